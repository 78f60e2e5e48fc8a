/* Arrays of narrow elements as 32-bit words.
 *
 * Loops and branches carry arrays as words, because the compiler would keep each element in a
 * register of its own wherever branches join. After that they are arrays of elements again, except
 * 16-bit arrays of which only words are needed: by products, by stmatrix, by loops, by slices of
 * whole words of which only words are needed. These are never unpacked, so the compiler need not
 * find out that the unpacking is unused. The same holds for floats of 8 bits, of which barriers and
 * selections by rows take words, too: the compiler does not find out then. */
#include "gen.h"

bool pm_is_packed(const pm_gen *e, pm_val v) {
  const pm_dtype t = pm_typeof(e->g, v)->dtype;
  const int bytes = pm_dtypes[t].bytes;
  return pm_wants_array(e, v) && t != PM_BOOL && bytes < 4 && pm_regs_of(e, v) * bytes % 4 == 0;
}

static int64_t words_of(const pm_gen *e, pm_val v) {
  return pm_regs_of(e, v) * pm_dtypes[pm_typeof(e->g, v)->dtype].bytes / 4;
}

/* ---- which ------------------------------------------------------------------------------- */

static bool is_matrix_access(pm_gen *e, pm_opid op, pm_val array, bool store) {
  pm_view v;
  pm_err ignored;
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, &v, &ignored)) return false;
  return pm_is_matrix(e, pm_value_layout(e->g, array), &v, store);
}

/* Are results of an op words at its end, whatever becomes of them? */
static bool yields_words(int code) { return pm_is_loop(code) || pm_is_branch(code); }

int64_t pm_elements_of_word(const pm_gen *e, pm_val v) {
  return 4 / pm_dtypes[pm_typeof(e->g, v)->dtype].bytes;
}

static bool is_slice_of_words(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t *from = pm_slice_registers(e, op), n = pm_regs_of(e, out);
  const int64_t each = pm_elements_of_word(e, out);
  bool whole = from && n % each == 0;
  for (int64_t r = 0; whole && r < n; r++) {
    const int64_t first = from[r - r % each];
    whole = first >= 0 && first % each == 0 && from[r] == first + r % each;
  }
  return whole;
}

static bool is_byte(const pm_gen *e, pm_val v) {
  const pm_dtype t = pm_typeof(e->g, v)->dtype;
  return t == PM_E4M3 || t == PM_E5M2;
}

/* Is the op a selection that takes all elements of each word from one array? */
static bool is_selection_of_words(pm_gen *e, pm_opid op) {
  if (!pm_is_elementwise(e->g, op) || pm_get(e->g, op)->n_in != 3) return false;
  const pm_val out = pm_get(e->g, op)->out, mask = pm_in(e->g, op, 0);
  const pm_opid def = pm_value_of(e->g, mask)->def;
  const int last = pm_typeof(e->g, out)->rank - 1;
  if (!is_byte(e, out) || pm_typeof(e->g, mask)->dtype != PM_BOOL) return false;
  if (!def || pm_rule_of(e->g, def) != PM_LAY_BROADCAST) return false;
  uint32_t n;
  const int64_t *dims = pm_attr_list(e->g, def, PM_ATTR_DIMS, &n);
  for (uint32_t k = 0; k < n; k++)
    if (dims[k] == last) return false;
  return pm_layout_vector(pm_value_layout(e->g, out), last) % pm_elements_of_word(e, out) == 0;
}

/* The array whose words are those of v: what a scope ends with, what v is a slice of, what a
 * barrier pins, or one that a selection takes. Else 0 */
static pm_val source_of(pm_gen *e, pm_val v) {
  const pm_opid def = pm_value_of(e->g, v)->def;
  if (!def) return 0;
  if (pm_is_barrier(pm_get(e->g, def))) return is_byte(e, v) ? pm_in(e->g, def, 0) : 0;
  switch (pm_get(e->g, def)->code) {
    case PM_OP_SCOPE: {
      const pm_opid end = pm_terminator(e->g, pm_region(e->g, def, 0));
      return pm_in(e->g, end, v - pm_get(e->g, def)->out);
    }
    case PM_OP_SLICE: return is_slice_of_words(e, def) ? pm_in(e->g, def, 0) : 0;
    default: return is_selection_of_words(e, def) ? pm_in(e->g, def, 1) : 0;
  }
}

/* The other array of a selection. Else 0 */
static pm_val other_source_of(pm_gen *e, pm_val v) {
  const pm_opid def = source_of(e, v) ? pm_value_of(e->g, v)->def : 0;
  const bool selects = def && pm_is_elementwise(e->g, def) && pm_get(e->g, def)->n_in == 3;
  return selects ? pm_in(e->g, def, 2) : 0;
}

/* Is v a carry in the body of a loop, which its condition does not read? */
static bool is_carry(const pm_gen *e, pm_val v, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_blk block = pm_value_of(e->g, v)->block;
  if (pm_has_index(o)) return true;
  if (!pm_is_loop(o->code) || pm_region(e->g, op, 1) != block) return false;
  const pm_block *cond = &e->g->blocks.at[pm_region(e->g, op, 0)];
  return !e->uses[cond->arg + (v - e->g->blocks.at[block].arg)];
}

/* Can the op that makes v make words? */
static bool makes_words(pm_gen *e, pm_val v) {
  const pm_value *val = pm_value_of(e->g, v);
  if (!val->def) { /* an argument of a region */
    const pm_opid op = e->g->blocks.at[val->block].parent;
    return op && is_carry(e, v, op);
  }
  if (yields_words(pm_get(e->g, val->def)->code)) return true;
  switch (pm_get(e->g, val->def)->code) {
    case PM_OP_LOAD: return is_matrix_access(e, val->def, v, false);
    case PM_OP_CONVERT: return pm_typeof(e->g, pm_in(e->g, val->def, 0))->dtype == PM_F32;
    default: return source_of(e, v) != 0;
  }
}

static bool takes_words(pm_gen *e, pm_opid op, uint32_t k) {
  const pm_op *o = pm_get(e->g, op);
  const pm_val v = pm_in(e->g, op, k);
  const pm_opid parent = e->g->blocks.at[o->parent].parent;
  const uint32_t bounds = pm_has_index(o) ? 2 : 0;
  if (pm_is_loop(o->code)) return k >= bounds && pm_is_packed(e, o->out + k - bounds);
  switch (o->code) {
    case PM_OP_WGMMA: return k == 1;
    case PM_OP_STORE: return k == 1 && is_matrix_access(e, op, pm_in(e->g, op, 1), true);
    case PM_OP_YIELD: {
      const pm_val out = parent ? pm_get(e->g, parent)->out + k : 0;
      if (!parent || yields_words(pm_get(e->g, parent)->code)) return out && pm_is_packed(e, out);
      return e->only_words[out] && source_of(e, out) == v;
    }
    default:
      if (o->n_out != 1 || !e->only_words[o->out]) return false;
      return source_of(e, o->out) == v || other_source_of(e, o->out) == v;
  }
}

/* Leaves out what has no words or is needed otherwise. Did it find such a value? */
static bool reject_words(pm_gen *e) {
  const pm_graph *g = e->g;
  bool found = false;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
      bool *only = &e->only_words[pm_in(g, op, k)];
      if (!*only || takes_words(e, op, k)) continue;
      *only = false;
      found = true;
    }
  }
  for (pm_val v = 1; v < g->values.n; v++) {
    const pm_val source = e->only_words[v] ? source_of(e, v) : 0, other = other_source_of(e, v);
    if (!source || (e->only_words[source] && (!other || e->only_words[other]))) continue;
    e->only_words[v] = false;
    found = true;
  }
  return found;
}

void pm_find_words(pm_gen *e) {
  const pm_graph *g = e->g;
  for (pm_val v = 1; v < g->values.n; v++) {
    const pm_dtype t = pm_typeof(g, v)->dtype;
    const bool narrow = t == PM_F16 || t == PM_BF16 || is_byte(e, v);
    e->only_words[v] = pm_typeof(g, v)->kind == PM_ARRAY && narrow && pm_is_packed(e, v) &&
                       e->uses[v] && makes_words(e, v);
  }
  while (reject_words(e)) continue;
}

/* ---- text -------------------------------------------------------------------------------- */

const char *pm_new_words(pm_gen *e, pm_val v, const char *stem) {
  const char *name = pm_unique(e, stem);
  pm_line(e, "u32 %s[%lld];", name, (long long)words_of(e, v));
  return name;
}

const char *pm_declare_words(pm_gen *e, pm_val v) {
  const char *name = e->into[v] ? e->into[v] : pm_name_of(e, v);
  pm_bind(e, v, name, PM_FORM_WORDS);
  if (e->into[v]) return name;
  pm_line(e, "u32 %s[%lld]; // %s", name, (long long)words_of(e, v),
          pm_type_text(e->arena, pm_typeof(e->g, v)));
  return name;
}

void pm_copy(pm_gen *e, const char *to, const char *from, int64_t n) {
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s[r];", (long long)n, to, from);
}

const char *pm_copy_words(pm_gen *e, pm_val v) {
  const char *name = pm_new_words(e, v, "old");
  pm_copy(e, name, e->slot[v].text, words_of(e, v));
  return name;
}

void pm_pack(pm_gen *e, const char *words, pm_val like, pm_val v) {
  const char *type = pm_cpp_type(pm_typeof(e->g, like)->dtype);
  const int64_t n = pm_regs_of(e, like);
  pm_at(e, v, "0");
  const char *from = e->slot[v].text;
  if (e->slot[v].form == PM_FORM_WORDS) {
    pm_copy(e, words, from, words_of(e, like));
    return;
  }
  if (!pm_is_array(e, v)) {
    from = pm_unique(e, "same");
    pm_line(e, "%s %s[%lld];", type, from, (long long)n);
    pm_unroll(e, n);
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, from, e->slot[v].text);
  }
  pm_line(e, "pack<%s, %lld>(%s, %s);", type, (long long)n, words, from);
}

void pm_pin_words(pm_gen *e, pm_val v) {
  pm_line(e, "%s(&%s[0]);", pm_ptx_pin(e, PM_U32, words_of(e, v)), e->slot[v].text);
}

void pm_unpack(pm_gen *e, const char *words, pm_val v, pm_val named_like) {
  if (e->only_words[v]) {
    pm_bind(e, v, words, PM_FORM_WORDS);
    return;
  }
  const char *name = pm_declare(e, v, named_like);
  pm_line(e, "unpack<%s, %lld>(%s, %s);", pm_cpp_type(pm_typeof(e->g, v)->dtype),
          (long long)pm_regs_of(e, v), name, words);
}
