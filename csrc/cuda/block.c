/* The ops of a block in order.
 *
 * Consecutive element-wise ops whose results are arrays with the same number of registers form a
 * run: they become the body of one unrolled loop over registers, and a result that only the run
 * reads is a variable of that loop: written where it is read, it would be computed under the
 * condition of a ?: there, and kernels spilled. Scalar ops between them depend on no array, so they
 * are printed before the loop. */
#include "gen.h"

/* ---- runs of element-wise ops ------------------------------------------------------------ */

/* Conversions of several elements in a few instructions: loops of their own. */
typedef struct group_convert {
  const char *fn;   /* the device function; NULL: element by element */
  int64_t n, from;  /* elements of a call; registers of `in`, or bytes, for them */
  pm_val in, bytes; /* elements of 4 bits: the array of their bytes, if there is one */
} group_convert;

/* The bytes that hold the elements of 4 bits in array v, two each; 0: they lie elsewhere, too. */
static pm_val packed_source(pm_gen *e, pm_val v) {
  const pm_opid def = pm_value_of(e->g, v)->def;
  return def && pm_get(e->g, def)->code == PM_OP_UNPACK ? pm_in(e->g, def, 0) : 0;
}

/* Were the elements of array v loaded into registers of fewer bytes than a word? */
static bool loaded_apart(pm_gen *e, pm_val v) {
  const pm_opid def = pm_value_of(e->g, v)->def;
  if (!def || !pm_get(e->g, def)->n_in || !pm_is_memory(pm_typeof(e->g, pm_in(e->g, def, 0))))
    return false;
  const pm_type *t = pm_typeof(e->g, v);
  const int64_t together = pm_layout_vector(pm_value_layout(e->g, v), t->rank - 1);
  return together * pm_dtypes[t->dtype].bits < 32;
}

/* f32 to 16 or 8 bits, and 8 bits to more, two at a time in one instruction; small integers by
 * words (device/widen.cuh). */
static group_convert find_group_convert(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  group_convert c = {0};
  if (o->code != PM_OP_CONVERT) return c;
  c.in = pm_in(e->g, op, 0);
  const pm_dtype from = pm_typeof(e->g, c.in)->dtype, to = pm_typeof(e->g, o->out)->dtype;
  const char *short_name = pm_dtypes[from].short_name;
  const bool half = pm_is_float(to) && pm_dtypes[to].bits == 16, wide = half || to == PM_F32;
  const int group = pm_dtypes[from].group, bits = pm_dtypes[from].bits;
  const char *fn = NULL;
  if (from == PM_F32 && pm_is_float(to) && pm_dtypes[to].group > 1) {
    fn = pm_str(e, "cvt_%sx2", pm_cpp_type(to));
    c.n = c.from = pm_dtypes[to].group;
  } else if (group > 1 && (bits == 8 ? wide : bits < 8 && half)) {
    if (bits < 8) c.bytes = packed_source(e, c.in);
    const bool can = bits < 8 || (from == PM_I8 && to == PM_BF16);
    const bool apart = can && loaded_apart(e, c.bytes ? c.bytes : c.in);
    fn = pm_str(e, "cvt_from_%sx%d%s", short_name, group, apart ? "_apart" : "");
    c.n = group;
    c.from = group * bits / 8; /* bytes */
  }
  if (fn && pm_regs_of(e, o->out) % c.n == 0) c.fn = fn;
  return c;
}

static bool is_group_convert(pm_gen *e, pm_opid op) { return find_group_convert(e, op).fn != NULL; }

static void convert_to_words(pm_gen *e, pm_val out, pm_val in) {
  const long long n = pm_regs_of(e, out), each = pm_elements_of_word(e, out);
  const char *words = pm_declare_words(e, out);
  pm_unroll(e, n);
  const char *x = pm_str(e, "%s, %s", pm_at(e, in, "r"), pm_at(e, in, "r + 1"));
  if (each == 4) x = pm_str(e, "%s, %s, %s", x, pm_at(e, in, "r + 2"), pm_at(e, in, "r + 3"));
  pm_line(e, "for (int r = 0; r < %lld; r += %lld) %s[r / %lld] = cvt_rn_%sx%lld(%s);", n, each,
          words, each, pm_cpp_type(pm_typeof(e->g, out)->dtype), each, x);
}

static void emit_group_convert(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  if (e->slot[out].form == PM_FORM_WORDS) return; /* with the accumulator that it converts */
  const group_convert c = find_group_convert(e, op);
  const long long n = pm_regs_of(e, out), by = c.n, from = c.from;
  pm_note(e, op, "");
  if (e->only_words[out]) {
    convert_to_words(e, out, c.in);
    return;
  }
  const char *bytes = NULL;
  if (from < by && !c.bytes) { /* the compiler finds those that they were taken from */
    bytes = pm_unique(e, "bytes");
    pm_line(e, "u8 %s[%lld];", bytes, n / 2);
    pm_unroll(e, n);
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = pack_4(bits_of(%s), bits_of(%s));", n / 2,
            bytes, pm_at(e, c.in, "2 * r"), pm_at(e, c.in, "2 * r + 1"));
  }
  const char *name = pm_declare(e, out, out);
  pm_unroll(e, n);
  if (bytes) {
    pm_line(e, "for (int r = 0; r < %lld; r += %lld) %s(&%s[r], &%s[r / 2]);", n, by, c.fn, name,
            bytes);
  } else if (by == 2) {
    pm_line(e, "for (int r = 0; r < %lld; r += 2) %s(&%s[r], %s, %s);", n, c.fn, name,
            pm_at(e, c.in, "r"), pm_at(e, c.in, "r + 1"));
  } else {
    pm_line(e, "for (int r = 0; r < %lld; r += %lld) %s(&%s[r], &%s);", n, by, c.fn, name,
            from == by ? pm_at(e, c.in, "r") : pm_at(e, c.bytes, "r / 2"));
  }
}

/* Sums, products, minima and maxima of floats of 16 bits: the function that makes two at a time, or
 * NULL. */
static const char *pair_function(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char *name = o->code == PM_OP_ADD   ? "add_x2"
                     : o->code == PM_OP_SUB ? "sub_x2"
                     : o->code == PM_OP_MUL ? "mul_x2"
                     : o->code == PM_OP_MIN ? "min_x2"
                     : o->code == PM_OP_MAX ? "max_x2"
                                            : NULL;
  if (!name || !pm_wants_array(e, o->out) || pm_regs_of(e, o->out) % 2) return NULL;
  const pm_dtype t = pm_typeof(e->g, o->out)->dtype;
  return t == PM_F16 || t == PM_BF16 ? name : NULL;
}

static void emit_pairs(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_val x = pm_in(e->g, op, 0), y = pm_in(e->g, op, 1);
  pm_note(e, op, "");
  const char *name = pm_declare(e, o->out, o->out);
  pm_unroll(e, pm_regs_of(e, o->out));
  pm_line(e, "for (int r = 0; r < %lld; r += 2)", (long long)pm_regs_of(e, o->out));
  pm_line(e, "  %s(&%s[r], %s, %s, %s, %s);", pair_function(e, op), name, pm_at(e, x, "r"),
          pm_at(e, x, "r + 1"), pm_at(e, y, "r"), pm_at(e, y, "r + 1"));
}

/* Words of an array that nothing may move across: one statement takes them all. */
static bool is_array_barrier(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (!pm_is_barrier(o) || !pm_wants_array(e, o->out)) return false;
  return pm_dtypes[pm_typeof(e->g, o->out)->dtype].bits == 32 || pm_is_packed(e, o->out);
}

/* Words of narrow elements that a selection takes whole (packed16.c). */
static bool is_selection_of_words(const pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  return o->n_in == 3 && e->only_words[o->out];
}

/* Its words, also where it is one number for all elements. */
static const char *words_of(pm_gen *e, pm_val v) {
  if (e->slot[v].form == PM_FORM_WORDS) return e->slot[v].text;
  const char *words = pm_new_words(e, v, "words");
  pm_pack(e, words, v, v);
  return words;
}

static void emit_selection(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const long long each = pm_elements_of_word(e, out), n = pm_regs_of(e, out) / each;
  const char *mask = pm_at(e, pm_in(e->g, op, 0), pm_str(e, "%lld * r", each));
  pm_note(e, op, "");
  const char *x = words_of(e, pm_in(e->g, op, 1)), *y = words_of(e, pm_in(e->g, op, 2));
  const char *words = pm_declare_words(e, out);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s ? %s[r] : %s[r];", n, words, mask, x, y);
}

/* Is this the last use of an array that was made in the same block, and of the values that have its
 * variable, too, because their ops only rename registers? */
static bool ends_here(const pm_gen *e, pm_opid op, pm_val v) {
  const pm_graph *g = e->g;
  const pm_opid def = pm_value_of(g, v)->def;
  const char *variable = e->slot[v].text;
  if (!def || pm_get(g, def)->parent != pm_get(g, op)->parent || !pm_is_array(e, v)) return false;
  int64_t later = 0; /* uses that do not stand in the block between the two */
  for (pm_val w = 1; w < g->values.n; w++) {
    if (e->slot[w].text == variable) later += e->uses[w];
  }
  const pm_block *b = &g->blocks.at[pm_get(g, op)->parent];
  for (uint32_t k = pm_position(g, def); k <= pm_position(g, op); k++) {
    const uint32_t n = pm_get(g, b->ops.at[k])->n_in;
    for (uint32_t i = 0; i < n; i++) {
      later -= e->slot[pm_in(g, b->ops.at[k], i)].text == variable;
    }
  }
  return !later;
}

static void emit_array_barrier(pm_gen *e, pm_opid op) {
  enum { MOST = 128 };
  const pm_val out = pm_get(e->g, op)->out, in = pm_in(e->g, op, 0);
  const pm_dtype t = pm_typeof(e->g, out)->dtype;
  const int64_t n = pm_regs_of(e, out);
  pm_note(e, op, "optimization_barrier");
  if (e->only_words[out]) {
    const char *words = e->slot[in].text;
    pm_declare_words(e, out);
    pm_copy(e, e->slot[out].text, words, n / pm_elements_of_word(e, out));
    pm_pin_words(e, out);
    return;
  }
  if (ends_here(e, op, in)) {
    pm_alias(e, out, in);
  } else {
    pm_declare(e, out, out);
    pm_assign(e, out, in);
  }
  const char *name = e->slot[out].text;
  if (pm_dtypes[t].bits < 32) {
    pm_line(e, "pin_narrow<%s, %lld>(%s);", pm_cpp_type(t), (long long)n, name);
    return;
  }
  for (int64_t k = 0; k < n; k += MOST) {
    const char *pin = pm_ptx_pin(e, t, pm_min(MOST, n - k));
    pm_line(e, "%s(&%s[%lld]);", pin, name, (long long)k);
  }
}

/* The run that begins with an array op at position `first`; *next becomes the position after its
 * end. */
static pm_code emit_run(pm_gen *e, pm_blk block, uint32_t first, uint32_t *next) {
  const pm_graph *g = e->g;
  const pm_block *b = &g->blocks.at[block];
  const int64_t n = pm_regs_of(e, pm_get(g, b->ops.at[first])->out);
  bool *in_run = PM_NEW(e->arena, bool, g->values.n);
  uint32_t *reads = PM_NEW(e->arena, uint32_t, g->values.n);
  PM_VEC(pm_opid) run = {0};
  uint32_t k = first;
  for (; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (pm_is_view(g, op) || (pm_is_elementwise(g, op) && !pm_makes_array(e, op, in_run))) {
      PM_TRY(pm_gen_scalar(e, op));
      continue;
    }
    if (!pm_is_elementwise(g, op) || is_group_convert(e, op) || is_array_barrier(e, op)) break;
    if (is_selection_of_words(e, op)) break;
    if (pair_function(e, op)) break;
    if (pm_rule_of(g, op) == PM_LAY_BROADCAST && in_run[pm_in(g, op, 0)]) break;
    if (pm_regs_of(e, pm_get(g, op)->out) != n) break;
    pm_vec_push(e->arena, &run, op);
    in_run[pm_get(g, op)->out] = true;
    for (uint32_t i = 0; i < pm_get(g, op)->n_in; i++) reads[pm_in(g, op, i)]++;
  }
  *next = k;

  e->reg = n == 1 ? "0" : "r";
  pm_note(e, run.at[0], "");
  const char **text = PM_NEW(e->arena, const char *, run.n);
  bool *stays = PM_NEW(e->arena, bool, run.n);
  for (uint32_t i = 0; i < run.n; i++) {
    const pm_val out = pm_get(g, run.at[i])->out;
    stays[i] = reads[out] != e->uses[out];
    PM_TRY(pm_emit_op(e, run.at[i]));
    text[i] = e->expr;
    if (stays[i]) {
      pm_declare(e, out, out);
    } else {
      pm_bind(e, out, pm_name_of(e, out), PM_FORM_SCALAR);
    }
  }
  pm_begin_unrolled(e, "r", n, 1);
  for (uint32_t i = 0; i < run.n; i++) {
    const pm_val out = pm_get(g, run.at[i])->out;
    pm_place(e, run.at[i]);
    if (stays[i]) {
      pm_line(e, "%s[%s] = %s;", e->slot[out].text, e->reg, text[i]);
    } else {
      pm_line(e, "const %s %s = %s;", pm_cpp_type(pm_typeof(g, out)->dtype), e->slot[out].text,
              text[i]);
    }
  }
  pm_end_unrolled(e, n, 1);
  return PM_OK;
}

/* ---- blocks ------------------------------------------------------------------------------ */

pm_code pm_gen_block(pm_gen *e, pm_blk block) {
  const pm_block *b = &e->g->blocks.at[block];
  for (uint32_t k = 0; k < pm_n_ops(e->g, block);) {
    const pm_opid op = b->ops.at[k];
    uint32_t after = k;
    if (!e->lane) PM_TRY(pm_gen_region(e, block, k, &after));
    if (after > k) {
      k = after;
    } else if (pm_is_scalar_op(e, op) || !pm_is_elementwise(e->g, op)) {
      PM_TRY(pm_gen_op(e, op));
      k++;
    } else if (is_array_barrier(e, op)) {
      emit_array_barrier(e, op);
      k++;
    } else if (is_group_convert(e, op)) {
      emit_group_convert(e, op);
      k++;
    } else if (is_selection_of_words(e, op)) {
      emit_selection(e, op);
      k++;
    } else if (pair_function(e, op)) {
      emit_pairs(e, op);
      k++;
    } else {
      PM_TRY(emit_run(e, block, k, &k));
    }
  }
  return PM_OK;
}
