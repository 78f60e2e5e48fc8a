/* What a kernel needs against what its target has, once, before any other pass.
 *
 * An op whose row in ops.def needs a feature that the target lacks is refused, at the user's line.
 * Products of which products.c makes other instructions are no obstacle. */
#include "passes.h"

typedef struct checker {
  const pm_target *target;
  bool operands; /* ops that have operands: they tell users more than allocations do */
  bool lacks;    /* there is an op that needs more */
  pm_code code;
  pm_err *err;
} checker;

static void check_op(pm_graph *g, pm_opid op, void *ctx) {
  checker *c = ctx;
  const pm_op *o = pm_get(g, op);
  const pm_mma *m = pm_mma_of(g, op);
  uint32_t needs = pm_ops[o->code].needs | (m ? m->needs : 0);
  if (o->code == PM_OP_MULTIMEM_REDUCE && pm_dtypes[pm_typeof(g, o->out)->dtype].bits == 8) {
    needs |= PM_HAS_MULTIMEM_FP8;
  }
  if (o->n_in && pm_has_attr(g, op, PM_ATTR_LEADER) && *pm_attr(g, op, PM_ATTR_LEADER))
    needs |= PM_HAS_TMA_PAIR;
  if (c->code || pm_target_has(c->target, needs)) return;
  c->lacks = true;
  if ((o->n_in > 0) != c->operands) return;
  if (pm_is_mma(g, c->target, op)) needs &= ~(uint32_t)PM_HAS_WGMMA;
  c->code = pm_target_check(c->target, needs, pm_op_name(o->code), g->arena, c->err);
  if (!c->code) return;
  /* a barrier that is given or missing is a wrong argument, whichever the target needs */
  if (pm_has_attr(g, op, PM_ATTR_OOB) && needs & ~c->target->features & PM_HAS_TMA) {
    c->code = c->err->code = PM_E_VALUE;
  }
  pm_err_op(c->err, g, op);
}

static pm_code check_cluster(const pm_graph *g, const pm_target *t, pm_err *err) {
  int64_t n = 1;
  for (uint32_t k = 0; k < g->n_cluster && n <= INT32_MAX; k++) n *= g->cluster[k];
  if (n > 1) {
    const char *who = pm_printf(g->arena, "a kernel with a cluster of %lld blocks", (long long)n);
    const pm_code code = pm_target_check(t, PM_HAS_CLUSTER, who, g->arena, err);
    if (code && g->blocks.at[1].ops.n) pm_err_op(err, g, g->blocks.at[1].ops.at[0]);
    if (code) return code;
  }
  if (n <= t->cluster) return PM_OK;
  return pm_fail(err, PM_E_VALUE, "a cluster has at most %d blocks on %s, this one has %s%lld",
                 t->cluster, t->text, n > INT32_MAX ? "more than " : "",
                 (long long)pm_min(n, INT32_MAX));
}

pm_code pm_check_target(pm_graph *g, const pm_target *t, pm_err *err) {
  checker c = {.target = t, .operands = true, .err = err};
  if (check_cluster(g, t, err)) return err->code;
  pm_walk(g, 1, check_op, &c);
  c.operands = false;
  if (c.lacks) pm_walk(g, 1, check_op, &c);
  return c.code;
}

const pm_target *pm_choose_target(pm_graph *g) {
  for (int k = 0; k < PM_TARGET_COUNT; k++) {
    pm_err lacks;
    memset(&lacks, 0, sizeof lacks);
    if (!pm_check_target(g, &pm_targets[k], &lacks)) return &pm_targets[k];
  }
  return &pm_targets[0];
}
