/* Products on targets without wgmma: mma, whose operands are all in registers.
 *
 *     acc = alloc_acc x                      y = mma x, load a, load b
 *     wgmma acc, a, b                  ->
 *     y = acc_load acc
 *
 * It is possible where all uses of the accumulator follow each other in one block, as those of
 * jnp.dot do: then its contents are a value at each of them. An accumulator that is changed in
 * loops or in branches, or whose parts are, has no such value, and the kernel is refused
 * (target.c). */
#include "passes.h"

static bool is_use(const pm_graph *g, pm_opid op, pm_val acc) {
  const uint16_t code = pm_get(g, op)->code;
  const bool whole = code == PM_OP_ACC_LOAD || code == PM_OP_ACC_STORE || code == PM_OP_WGMMA;
  return whole && pm_in(g, op, 0) == acc;
}

/* Are all uses of the accumulator whole, in its block, and products such as mma makes? */
static bool is_value(const pm_graph *g, pm_opid alloc) {
  const pm_val acc = pm_get(g, alloc)->out;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    const pm_op *o = pm_get(g, op);
    for (uint32_t k = 0; k < o->n_in; k++) {
      if (pm_in(g, op, k) != acc) continue;
      if (!is_use(g, op, acc) || o->parent != pm_get(g, alloc)->parent) return false;
      if (o->code == PM_OP_WGMMA && !pm_has_mma(g, op)) return false;
    }
  }
  return true;
}

bool pm_is_mma(const pm_graph *g, pm_opid op) {
  const uint16_t code = pm_get(g, op)->code;
  if (code == PM_OP_WGMMA_WAIT) return true;
  if (code == PM_OP_ALLOC_ACC) return is_value(g, op);
  if (code != PM_OP_ACC_LOAD && code != PM_OP_ACC_STORE && code != PM_OP_WGMMA) return false;
  const pm_opid alloc = pm_value_of(g, pm_in(g, op, 0))->def;
  return alloc && pm_get(g, alloc)->code == PM_OP_ALLOC_ACC && is_value(g, alloc);
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
    const uint16_t code = pm_get(g, op)->code;
    if (!is_use(g, op, acc)) continue;
    if (code == PM_OP_ACC_LOAD) replace_uses(g, pm_get(g, op)->out, now);
    if (code == PM_OP_ACC_STORE) now = pm_in(g, op, 1);
    if (code == PM_OP_WGMMA) {
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

pm_code pm_make_mma(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)err;
  if (pm_target_has(t, PM_HAS_WGMMA)) return PM_OK;
  const uint32_t n = g->ops.n;
  for (pm_opid op = 1; op < n; op++) {
    const uint16_t code = pm_get(g, op)->code;
    if (code == PM_OP_WGMMA_WAIT) drop(g, op);
    if (code == PM_OP_ALLOC_ACC) rewrite(g, op);
  }
  return PM_OK;
}
