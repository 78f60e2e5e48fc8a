/* Loops, branches, scopes.
 *
 * A value that a region carries or returns is a C++ variable declared before it; region arguments
 * and results of the op share its slot. A YIELD assigns. If it permutes carries, those that are
 * read after they are written are saved first. Arrays of narrow elements are carried as words
 * (packed16.c). */
#include "gen.h"

static pm_code check_carries(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (pm_typeof(e->g, o->out + k)->kind != PM_ARRAY) {
      return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                         "refs and barriers cannot be carried or returned; use them from outside");
    }
  }
  return PM_OK;
}

/* The name that the user gave: to the result, else to the region's argument. */
static pm_val named(pm_gen *e, pm_val result, pm_val arg) {
  return pm_value_of(e->g, result)->name || !arg ? result : arg;
}

static const char *copy_of(pm_gen *e, pm_val v) {
  const char *name = pm_unique(e, "old");
  const char *type = pm_cpp_type(pm_typeof(e->g, v)->dtype);
  if (!pm_is_array(e, v)) {
    pm_line(e, "const %s %s = %s;", type, name, pm_at(e, v, "0"));
    return name;
  }
  const int64_t n = pm_regs_of(e, v);
  pm_line(e, "%s %s[%lld];", type, name, (long long)n);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, name, pm_at(e, v, "r"));
  return name;
}

/* Names of the words that results of an op are carried in, NULL for the others. */
static const char **declare_words(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char **words = PM_NEW(e->arena, const char *, o->n_out + 1);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (pm_is_packed(e, o->out + k)) words[k] = pm_new_words(e, o->out + k, "words");
  }
  return words;
}

static void unpack_results(pm_gen *e, pm_opid op, const char **words) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (words[k] && e->uses[o->out + k]) pm_unpack(e, words[k], o->out + k, o->out + k);
  }
}

/* ---- what runs through regions ----------------------------------------------------------- */

/* Has a result no variable? Results of branches and scopes that nobody reads have none. */
static bool is_left_out(const pm_gen *e, pm_val v, const char *words) {
  return !words && !e->slot[v].text;
}

/* Assign the values that a region yields to the variables first, first + 1 ..., or to words. */
static void emit_yield(pm_gen *e, pm_blk block, pm_val first, const char **words) {
  const pm_opid y = pm_terminator(e->g, block);
  const uint32_t n = pm_get(e->g, y)->n_in;
  if (n) pm_note(e, y, "");
  pm_slot *from = PM_NEW(e->arena, pm_slot, n + 1);
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, y, k);
    if (is_left_out(e, first + k, words[k])) continue;
    pm_at(e, v, "0");
    from[k] = e->slot[v];
    for (uint32_t j = 0; j < k; j++) { /* a variable that is written before it is read here */
      if (words[k] && words[j] && words[j] == from[k].text && from[j].text != from[k].text) {
        from[k].text = pm_copy_words(e, v);
        break;
      }
      if (words[j] || words[k]) continue;
      if (e->slot[first + j].text == from[k].text && from[j].text != from[k].text) {
        from[k].text = copy_of(e, v);
        break;
      }
    }
  }
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, y, k);
    if (is_left_out(e, first + k, words[k])) continue;
    if (from[k].text == (words[k] ? words[k] : e->slot[first + k].text)) continue;
    const pm_slot keep = e->slot[v];
    e->slot[v] = from[k];
    if (words[k]) {
      pm_pack(e, words[k], first + k, v);
    } else {
      pm_assign(e, first + k, v);
    }
    e->slot[v] = keep;
  }
}

static const char **declare_carries(pm_gen *e, pm_opid op, uint32_t skip, pm_val args) {
  const pm_op *o = pm_get(e->g, op);
  const char **words = declare_words(e, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    const pm_val init = pm_in(e->g, op, skip + k);
    pm_at(e, init, "0");
    if (words[k]) {
      pm_pack(e, words[k], o->out + k, init);
      continue;
    }
    pm_declare_as(e, o->out + k, named(e, o->out + k, args ? args + k : 0), init);
  }
  return words;
}

static void share_carries(pm_gen *e, pm_opid op, pm_val args, const char **words) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!words[k]) pm_alias(e, args + k, o->out + k);
  }
}

/* At the begin of the body. */
static void unpack_carries(pm_gen *e, pm_opid op, pm_val args, const char **words) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (words[k]) pm_unpack(e, words[k], args + k, named(e, o->out + k, args + k));
  }
}

pm_code pm_cuda_FOR(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_blk body = pm_region(e->g, op, 0);
  const pm_val index = e->g->blocks.at[body].arg;
  const int64_t unroll = *pm_attr(e->g, op, PM_ATTR_UNROLL);
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "for");
  const char **words = declare_carries(e, op, 2, index + 1);
  share_carries(e, op, index + 1, words);
  const char *i = pm_name_of(e, index);
  const char *lower = pm_scalar_of(e, pm_in(e->g, op, 0));
  const char *upper = pm_scalar_of(e, pm_in(e->g, op, 1));
  pm_bind(e, index, i, PM_FORM_SCALAR);
  if (unroll) {
    pm_line(e, "#pragma unroll %lld", (long long)unroll);
  } else {
    pm_line(e, "#pragma unroll");
  }
  if (unroll == 1) {
    pm_begin(e, "for (i32 %s = %s; %s < %s; %s = next_index(%s)) {", i, lower, i, upper, i, i);
  } else {
    pm_begin(e, "for (i32 %s = %s; %s < %s; %s++) {", i, lower, i, upper, i);
  }
  unpack_carries(e, op, index + 1, words);
  PM_TRY(pm_gen_block(e, body));
  emit_yield(e, body, o->out, words);
  pm_end(e);
  unpack_results(e, op, words);
  return PM_OK;
}

/* A statement at the head of a body that carries words keeps the compiler from rotating the loop:
 * in a rotated one ptxas no longer interleaves the maxima and the exponentials of attention, which
 * costs it 2 to 4 %. */
static void pin_first(pm_gen *e, pm_opid op, pm_val args) {
  for (uint32_t k = 0; k < pm_get(e->g, op)->n_out; k++) {
    if (!e->only_words[args + k]) continue;
    pm_pin_words(e, args + k);
    return;
  }
}

pm_code pm_cuda_WHILE(pm_gen *e, pm_opid op) {
  const pm_blk cond = pm_region(e->g, op, 0), body = pm_region(e->g, op, 1);
  const pm_val cond_args = e->g->blocks.at[cond].arg, body_args = e->g->blocks.at[body].arg;
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "while");
  const char **words = declare_carries(e, op, 0, body_args);
  share_carries(e, op, cond_args, words);
  share_carries(e, op, body_args, words);
  pm_line(e, "#pragma unroll 1");
  pm_begin(e, "for (;;) {");
  unpack_carries(e, op, body_args, words);
  pin_first(e, op, body_args);
  for (uint32_t k = 0; k < pm_get(e->g, op)->n_out; k++) {
    if (words[k]) pm_alias(e, cond_args + k, body_args + k);
  }
  PM_TRY(pm_gen_block(e, cond));
  const pm_val goes_on = pm_in(e->g, pm_terminator(e->g, cond), 0);
  pm_line(e, "if (!%s) break;", pm_atom(e, pm_unwrapped(e, pm_scalar_of(e, goes_on))));
  PM_TRY(pm_gen_block(e, body));
  emit_yield(e, body, pm_get(e->g, op)->out, words);
  pm_end(e);
  unpack_results(e, op, words);
  return PM_OK;
}

/* Arrays that a region without carries ends with are made in the variables of the results. */
static void make_in_place(pm_gen *e, pm_blk block, pm_val first, const char **words) {
  const pm_opid y = pm_terminator(e->g, block);
  for (uint32_t k = 0; k < pm_get(e->g, y)->n_in; k++) {
    const pm_val v = pm_in(e->g, y, k);
    if (e->into[v] || !pm_wants_array(e, v)) continue;
    if (words[k]) {
      if (e->only_words[v]) e->into[v] = words[k];
    } else if (pm_is_array(e, first + k)) {
      e->into[v] = e->slot[first + k].text;
    }
  }
}

static const char **declare_results(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char **words = declare_words(e, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!words[k] && e->uses[o->out + k]) pm_declare(e, o->out + k, o->out + k);
  }
  return words;
}

static pm_code emit_branch(pm_gen *e, pm_opid op, uint32_t region, const char **words) {
  const pm_blk b = pm_region(e->g, op, region);
  const int64_t registers = e->registers;
  make_in_place(e, b, pm_get(e->g, op)->out, words);
  PM_TRY(pm_gen_block(e, b));
  emit_yield(e, b, pm_get(e->g, op)->out, words);
  e->registers = registers;
  return PM_OK;
}

pm_code pm_cuda_IF(pm_gen *e, pm_opid op) {
  PM_TRY(check_carries(e, op));
  const pm_blk other = pm_region(e->g, op, 1);
  pm_note(e, op, "if");
  const char **words = declare_results(e, op);
  pm_begin(e, "if (%s) {", pm_unwrapped(e, pm_scalar_of(e, pm_in(e->g, op, 0))));
  PM_TRY(emit_branch(e, op, 0, words));
  if (e->g->blocks.at[other].ops.n > 1 || pm_get(e->g, op)->n_out) {
    e->indent--;
    pm_begin(e, "} else {");
    PM_TRY(emit_branch(e, op, 1, words));
  }
  pm_end(e);
  unpack_results(e, op, words);
  return PM_OK;
}

pm_code pm_cuda_SWITCH(pm_gen *e, pm_opid op) {
  const uint32_t n = pm_get(e->g, op)->n_regions;
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "switch");
  const char **words = declare_results(e, op);
  pm_begin(e, "switch (max_int(0, min_int(%u, %s))) {", n - 1, pm_scalar_of(e, pm_in(e->g, op, 0)));
  for (uint32_t k = 0; k < n; k++) {
    if (k + 1 < n) {
      pm_begin(e, "case %u: {", k);
    } else {
      pm_begin(e, "default: {");
    }
    PM_TRY(emit_branch(e, op, k, words));
    pm_line(e, "break;");
    pm_end(e);
  }
  pm_end(e);
  unpack_results(e, op, words);
  return PM_OK;
}

/* All threads meet, and what they did in the scopes before comes first: in tensor memory too, whose
 * columns scopes share. */
static void enter_together(pm_gen *e, pm_opid op) {
  const bool nested = e->g->blocks.at[pm_get(e->g, op)->parent].parent != 0;
  const bool fences = pm_has_tmem(e) && (nested || e->tmem_used);
  if (fences) pm_line(e, "tcgen05_fence_before();");
  if (e->arrivals) pm_print_meeting(e, op, "", "", "0", pm_str(e, "%u", e->program->block));
  else pm_line(e, "block_sync();");
  if (fences) pm_line(e, "tcgen05_fence_after();");
}

pm_code pm_cuda_SCOPE(pm_gen *e, pm_opid op) {
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "scope");
  const pm_op *o = pm_get(e->g, op);
  const char **words = PM_NEW(e->arena, const char *, o->n_out + 1); /* no branches meet */
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!e->uses[o->out + k]) continue;
    if (e->only_words[o->out + k]) words[k] = pm_declare_words(e, o->out + k);
    else pm_declare(e, o->out + k, o->out + k);
  }
  pm_begin(e, "{");
  if (*pm_attr(e->g, op, PM_ATTR_COLLECTIVE) && e->g->n_threads > 1) enter_together(e, op);
  PM_TRY(emit_branch(e, op, 0, words));
  pm_end(e);
  return PM_OK;
}

/* The op that owns the region prints it. */
pm_code pm_cuda_YIELD(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
