/* Loops whose body is an IF on the role of the thread: each role gets its own loop.
 *
 *   for i: { x = f(i); if (thread == 2) A(x) else B(x) }
 *   if (thread == 2) for i: { A(f(i)) } else for i: { B(f(i)) }
 *
 * The role of a thread does not change, but ptxas does not know that code of one role, executed
 * perhaps by a single lane, does not diverge the warps of the other role. In a shared loop it
 * computes addresses and descriptors of products in vector registers and moves them to uniform
 * registers (R2UR). In a loop of one role it computes them in uniform registers.
 *
 * Everything in the body except the IFs must be pure, and the thread's index alone must decide
 * every IF, so that the same two groups of threads separate at each of them. Then no effect is
 * duplicated. The loop is copied twice with constant predicates, and pm_simplify removes the
 * branches that do not run. Inner loops are processed first, so the roles separate outside all
 * loops. */
#include "../ir/eval.h"
#include "passes.h"

enum { MOST_THREADS = 32, MOST_IFS = 16 };

typedef struct splitter {
  pm_graph *g;
  pm_err *err;
  pm_blk block; /* position of the loop */
  pm_opid loop;
  pm_opid ifs[MOST_IFS];
  uint32_t n_ifs;
  bool taken[2][MOST_IFS]; /* by the group for which the first is true, by the other */
  pm_val *map;             /* per value: its copy */
} splitter;

/* ---- copies -------------------------------------------------------------------------------- */

static pm_val mapped(const splitter *s, pm_val v) { return s->map[v] ? s->map[v] : v; }

static pm_code copy_op(splitter *s, pm_opid op, pm_blk to, pm_opid *made);

static pm_code copy_block(splitter *s, pm_blk from, pm_blk to) {
  pm_graph *g = s->g;
  for (uint32_t k = 0; k < g->blocks.at[from].n_args; k++) {
    const pm_val arg = g->blocks.at[from].arg + k, copy = g->blocks.at[to].arg + k;
    pm_value_of(g, copy)->name = pm_value_of(g, arg)->name;
    s->map[arg] = copy;
  }
  for (uint32_t k = 0; k < g->blocks.at[from].ops.n; k++) {
    pm_opid made;
    pm_code code = copy_op(s, g->blocks.at[from].ops.at[k], to, &made);
    if (code) return code;
  }
  return PM_OK;
}

/* Copy the op with its regions to the end of the block. */
static pm_code copy_op(splitter *s, pm_opid op, pm_blk to, pm_opid *made) {
  pm_graph *g = s->g;
  const pm_op o = *pm_get(g, op);
  const size_t attrs = sizeof(int64_t) * pm_ops[o.code].n_attrs;
  pm_val *in = PM_NEW(g->arena, pm_val, o.n_in + 1);
  pm_type *out = PM_NEW(g->arena, pm_type, o.n_out + 1);
  for (uint32_t k = 0; k < o.n_in; k++) in[k] = mapped(s, pm_in(g, op, k));
  for (uint32_t k = 0; k < o.n_out; k++) out[k] = *pm_typeof(g, o.out + k);
  if (o.n_regions) {
    pm_builder b = {.g = g, .block = to, .file = o.file, .line = o.line};
    pm_code code = pm_open(&b, (pm_opcode)o.code, in, o.n_in, o.n_regions, NULL, 0, made, s->err);
    if (code) return code;
    if (attrs) memcpy(&g->attrs.at[pm_get(g, *made)->attr], &g->attrs.at[o.attr], attrs);
    for (uint32_t r = 0; r < o.n_regions && !code; r++)
      code = copy_block(s, pm_region(g, op, r), pm_region(g, *made, r));
    if (!code) code = pm_close(&b, *made, s->err);
    if (code) return code;
  } else {
    *made = pm_insert(g, to, g->blocks.at[to].ops.n, (pm_opcode)o.code, in, o.n_in, out, o.n_out,
                      NULL, 0, op);
    if (attrs) memcpy(&g->attrs.at[pm_get(g, *made)->attr], &g->attrs.at[o.attr], attrs);
  }
  for (uint32_t k = 0; k < o.n_out; k++) {
    const pm_val copy = pm_get(g, *made)->out + k;
    pm_value_of(g, copy)->name = pm_value_of(g, o.out + k)->name;
    s->map[o.out + k] = copy;
  }
  return PM_OK;
}

/* ---- may the loop be split? ---------------------------------------------------------------- */

/* Which way each thread goes at each IF: the same two groups separate everywhere. */
static bool has_two_roles(splitter *s) {
  const pm_graph *g = s->g;
  bool seen[2] = {false, false};
  if (g->n_threads < 2 || g->n_threads > MOST_THREADS) return false;
  for (int64_t thread = 0; thread < g->n_threads; thread++) {
    int group = 0;
    for (uint32_t k = 0; k < s->n_ifs; k++) {
      const int region = pm_region_for_thread(g, s->ifs[k], thread);
      if (region < 0) return false;
      if (!k) group = region;
      if (seen[group] && s->taken[group][k] != !region) return false;
      s->taken[group][k] = !region;
    }
    seen[group] = true;
  }
  for (uint32_t k = 0; k < s->n_ifs; k++)
    if (s->taken[0][k] == s->taken[1][k]) return false;
  return seen[0] && seen[1];
}

/* Can it be computed before the loop? */
static bool is_invariant(const splitter *s, pm_val v) {
  const pm_graph *g = s->g;
  const pm_blk body = pm_region(g, s->loop, 0);
  const pm_opid def = pm_value_of(g, v)->def;
  if (!def) return pm_value_of(g, v)->block != body;
  if (pm_get(g, def)->parent != body) return true;
  for (uint32_t k = 0; k < pm_get(g, def)->n_in; k++)
    if (!is_invariant(s, pm_in(g, def, k))) return false;
  return pm_is_pure(pm_get(g, def)->code);
}

static bool can_be_split(splitter *s) {
  const pm_graph *g = s->g;
  const pm_block *b = &g->blocks.at[pm_region(g, s->loop, 0)];
  for (uint32_t k = 0; k + 1 < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    const int code = pm_get(g, op)->code;
    if (code == PM_OP_IF && s->n_ifs < MOST_IFS) {
      s->ifs[s->n_ifs++] = op;
    } else if (!pm_is_pure(code) || pm_get(g, op)->n_regions) {
      return false;
    }
  }
  return s->n_ifs && has_two_roles(s) && is_invariant(s, pm_in(g, s->ifs[0], 0));
}

/* ---- the split ----------------------------------------------------------------------------- */

static pm_val before_loop(splitter *s, pm_val v) {
  pm_graph *g = s->g;
  const pm_opid def = pm_value_of(g, v)->def;
  pm_opid made;
  if (s->map[v]) return s->map[v];
  if (!def || pm_get(g, def)->parent != pm_region(g, s->loop, 0)) return v;
  for (uint32_t k = 0; k < pm_get(g, def)->n_in; k++) before_loop(s, pm_in(g, def, k));
  return copy_op(s, def, s->block, &made) ? v : pm_get(g, made)->out;
}

static pm_val constant(splitter *s, pm_dtype t, int64_t i) {
  pm_graph *g = s->g;
  const pm_type type = pm_scalar_type(t);
  const pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = i};
  const pm_opid op = pm_insert(g, s->block, g->blocks.at[s->block].ops.n, PM_OP_CONST, NULL, 0,
                               &type, 1, &value, 1, s->loop);
  return pm_get(g, op)->out;
}

/* A copy of the loop in the block, its IFs decided; the block yields the results of the loop. */
static pm_code loop_of_role(splitter *s, pm_blk to, int group, const pm_val *truth) {
  pm_graph *g = s->g;
  pm_opid loop;
  memset(s->map, 0, sizeof(pm_val) * g->values.n);
  pm_code code = copy_op(s, s->loop, to, &loop);
  if (code) return code;
  const pm_block *b = &g->blocks.at[pm_region(g, loop, 0)];
  for (uint32_t k = 0, n = 0; k < b->ops.n; k++) {
    const pm_op *o = pm_get(g, b->ops.at[k]);
    if (o->code == PM_OP_IF) g->operands.at[o->in] = truth[s->taken[group][n++]];
  }
  const pm_op o = *pm_get(g, loop);
  pm_val *out = PM_NEW(g->arena, pm_val, o.n_out + 1);
  for (uint32_t k = 0; k < o.n_out; k++) out[k] = o.out + k;
  pm_builder yield = {.g = g, .block = to, .file = o.file, .line = o.line};
  return pm_yield(&yield, out, o.n_out, s->err);
}

/* Move the ops from position n on to position `at`. */
static void move_to(splitter *s, uint32_t at, uint32_t n) {
  pm_block *b = &s->g->blocks.at[s->block];
  const uint32_t made = b->ops.n - n;
  pm_opid *moved = PM_NEW(s->g->arena, pm_opid, made + 1);
  memcpy(moved, b->ops.at + n, sizeof(pm_opid) * made);
  memmove(b->ops.at + at + made, b->ops.at + at, sizeof(pm_opid) * (n - at));
  memcpy(b->ops.at + at, moved, sizeof(pm_opid) * made);
}

static pm_code split(splitter *s, uint32_t at) {
  pm_graph *g = s->g;
  const pm_op loop = *pm_get(g, s->loop);
  const pm_opid end = s->block == 1 ? 0 : pm_terminator(g, s->block);
  if (end) g->blocks.at[s->block].ops.n--; /* the builder appends to open blocks */
  const uint32_t n = g->blocks.at[s->block].ops.n;
  /* two copies, each with as many values as the loop; only older values are looked up */
  s->map = PM_NEW(g->arena, pm_val, 4 * g->values.n + 64);
  const pm_val role = before_loop(s, pm_in(g, s->ifs[0], 0)), none = constant(s, PM_I32, 0);
  const pm_val truth[2] = {constant(s, PM_BOOL, 0), constant(s, PM_BOOL, 1)};
  pm_builder b = {.g = g, .block = s->block, .file = loop.file, .line = loop.line};
  pm_opid made;
  pm_code code = pm_open(&b, PM_OP_IF, &role, 1, 2, NULL, 0, &made, s->err);
  for (int group = 0; group < 2 && !code; group++)
    code = loop_of_role(s, pm_region(g, made, (uint32_t)group), group, truth);
  if (!code) code = pm_close(&b, made, s->err);
  if (code) return code;
  for (uint32_t k = 0; k < g->operands.n; k++) {
    const pm_val v = g->operands.at[k];
    if (v >= loop.out && v < loop.out + loop.n_out)
      g->operands.at[k] = pm_get(g, made)->out + (v - loop.out);
  }
  g->operands.at[loop.in] = g->operands.at[loop.in + 1] =
      none; /* no iterations: pm_simplify removes it */
  move_to(s, at, n);
  if (end) pm_vec_push(g->arena, &g->blocks.at[s->block].ops, end);
  return PM_OK;
}

static pm_code walk(pm_graph *g, pm_blk block, bool *changed, pm_err *err) {
  for (uint32_t at = 0; at < g->blocks.at[block].ops.n && !*changed; at++) {
    const pm_opid op = g->blocks.at[block].ops.at[at];
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions && !*changed; r++) {
      pm_code code = walk(g, pm_region(g, op, r), changed, err);
      if (code) return code;
    }
    if (*changed || !pm_has_index(pm_get(g, op))) continue;
    splitter s = {.g = g, .err = err, .block = block, .loop = op};
    if (!can_be_split(&s)) continue;
    *changed = true;
    return split(&s, at);
  }
  return PM_OK;
}

pm_code pm_split_roles(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  for (bool changed = g->n_threads > 1; changed;) {
    changed = false;
    pm_code code = walk(g, 1, &changed, err);
    if (!code && changed) code = pm_simplify(g, err);
    if (code) return code;
  }
  return PM_OK;
}
