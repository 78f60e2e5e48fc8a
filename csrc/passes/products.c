/* What targets that lack an instruction do instead.
 *
 * Without dependent launches, the grids before this one are finished when it starts: the ops that
 * await them, and that let the next one start, are left out.
 *
 * Products without wgmma: mma, whose operands are all in registers.
 *
 *     acc = alloc_acc x                      y = mma x, load a, load b
 *     wgmma acc, a, b                  ->
 *     y = acc_load acc
 *
 * It is possible where all uses of the accumulator follow each other in one block, as those of
 * jnp.dot do: then its contents are a value at each of them. An accumulator that is changed in
 * loops or in branches, or whose parts are, has no such value, and the kernel is refused
 * (target.c). So is plgpu.wgmma on targets with tensor memory, whose products are many times as
 * fast as mma: users are told, and jnp.dot is as it is everywhere. */
#include "passes.h"

/* Does the op access the whole accumulator? */
static bool is_use(const pm_graph *g, pm_opid op, pm_val acc, pm_access *a) {
  *a = pm_accesses(op);
  return pm_next_access(g, a) && a->where == PM_IN_ACC && a->view == acc && a->certainty == PM_MUST;
}

static bool multiplies(const pm_access *a) { return a->reads && a->writes; }

/* A product that mma may compute. */
static bool is_replaceable(const pm_graph *g, const pm_target *t, pm_opid op) {
  if (pm_target_has(t, PM_HAS_TCGEN05) && !*pm_attr(g, op, PM_ATTR_PORTABLE)) return false;
  return pm_has_mma(g, op);
}

/* Are all uses of the accumulator whole, in its block, and products such as mma makes? */
static bool is_value(const pm_graph *g, const pm_target *t, pm_opid alloc) {
  const pm_val acc = pm_get(g, alloc)->out;
  pm_access a;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    const pm_op *o = pm_get(g, op);
    for (uint32_t k = 0; k < o->n_in; k++) {
      if (pm_in(g, op, k) != acc) continue;
      if (!is_use(g, op, acc, &a) || o->parent != pm_get(g, alloc)->parent) return false;
      if (multiplies(&a) && !is_replaceable(g, t, op)) return false;
    }
  }
  return true;
}

/* A wait for products alone. */
static bool is_wait(const pm_graph *g, pm_opid op) {
  int64_t n;
  return pm_awaits_products(g, op, &n) && !pm_get(g, op)->n_in;
}

bool pm_is_mma(const pm_graph *g, const pm_target *t, pm_opid op) {
  pm_access a = pm_accesses(op);
  if (is_wait(g, op)) return true;
  if (pm_allocates(g, op, PM_ACC)) return is_value(g, t, op);
  if (!pm_next_access(g, &a) || a.where != PM_IN_ACC) return false;
  const pm_opid alloc = pm_value_of(g, a.view)->def;
  return alloc && pm_allocates(g, alloc, PM_ACC) && is_value(g, t, alloc);
}

/* ---- the rewrite -------------------------------------------------------------------------- */

static pm_type array_of(const pm_type *ref) {
  pm_type t = *ref;
  t.kind = PM_ARRAY;
  t.space = PM_REGS;
  return t;
}

/* The operand as an array, made in front of `op`. */
static pm_val loaded(pm_graph *g, pm_opid op, uint32_t k) {
  const pm_val v = pm_in(g, op, k);
  if (pm_typeof(g, v)->kind == PM_ARRAY) return v;
  const pm_type t = array_of(pm_typeof(g, v));
  const pm_attr_arg attrs[] = {{.id = PM_ATTR_LAYOUT}, {.id = PM_ATTR_OPTIMIZED}};
  const pm_opid load = pm_insert(g, pm_get(g, op)->parent, pm_position(g, op), PM_OP_LOAD, &v, 1,
                                 &t, 1, attrs, 2, op);
  return pm_get(g, load)->out;
}

static void drop(pm_graph *g, pm_opid op) {
  pm_block *b = &g->blocks.at[pm_get(g, op)->parent];
  const uint32_t at = pm_position(g, op);
  memmove(&b->ops.at[at], &b->ops.at[at + 1], sizeof(pm_opid) * (b->ops.n - at - 1));
  b->ops.n--;
  if (pm_get(g, op)->n_out) *pm_value_of(g, pm_get(g, op)->out) = (pm_value){0};
  *pm_get(g, op) = (pm_op){0};
}

static void replace_uses(pm_graph *g, pm_val old, pm_val by) {
  for (uint32_t k = 0; k < g->operands.n; k++) {
    if (g->operands.at[k] == old) g->operands.at[k] = by;
  }
  if (!pm_value_of(g, by)->name) pm_value_of(g, by)->name = pm_value_of(g, old)->name;
}

/* What the accumulator holds first. */
static pm_val first_value(pm_graph *g, pm_opid alloc) {
  if (pm_get(g, alloc)->n_in) return pm_in(g, alloc, 0);
  const pm_type t = array_of(pm_typeof(g, pm_get(g, alloc)->out));
  const pm_attr_arg zero = {.id = PM_ATTR_VALUE};
  return pm_insert_value(g, alloc, PM_OP_CONST, NULL, 0, &t, &zero, 1, alloc);
}

static void rewrite(pm_graph *g, pm_opid alloc) {
  const pm_val acc = pm_get(g, alloc)->out;
  const pm_blk block = pm_get(g, alloc)->parent;
  const pm_type t = array_of(pm_typeof(g, acc));
  pm_val now = first_value(g, alloc);
  for (uint32_t k = pm_position(g, alloc) + 1; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    pm_access a;
    if (!is_use(g, op, acc, &a)) continue;
    if (!a.writes) replace_uses(g, pm_get(g, op)->out, now);
    if (!a.reads) now = pm_in(g, op, 1);
    if (multiplies(&a)) {
      const pm_val in[] = {now, loaded(g, op, 1), loaded(g, op, 2)};
      const pm_opid mma =
          pm_insert(g, block, pm_position(g, op), PM_OP_MMA, in, 3, &t, 1, NULL, 0, op);
      now = pm_get(g, mma)->out;
    }
    k = pm_position(g, op) - 1;
    drop(g, op);
  }
  drop(g, alloc);
}

static void drop_overlap(pm_graph *g) {
  const uint32_t n = g->ops.n;
  for (pm_opid op = 1; op < n; op++) {
    const int code = pm_get(g, op)->code;
    if (code == PM_OP_PDL_WAIT || code == PM_OP_PDL_LAUNCH) drop(g, op);
  }
}

pm_code pm_make_mma(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)err;
  if (!pm_target_has(t, PM_HAS_PDL)) drop_overlap(g);
  if (pm_target_has(t, PM_HAS_WGMMA)) return PM_OK;
  const uint32_t n = g->ops.n;
  for (pm_opid op = 1; op < n; op++) {
    if (is_wait(g, op)) drop(g, op);
    if (pm_allocates(g, op, PM_ACC)) rewrite(g, op);
  }
  return PM_OK;
}
