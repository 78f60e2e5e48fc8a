/* SMEM through which the lanes of a Pallas thread exchange elements: how much an op needs.
 *
 * Which ops do follows from their layout rules: conversions of layouts that neither registers nor
 * shuffles do, moves of elements, sums over warps. One lane also uses it to tell the others a
 * number, and the warps of a WARP_MAP to tell each other which phases they saw. An op that uses
 * scratch orders its lanes itself, so that one piece serves all ops of a thread. */
#include "../ir/relayout.h"
#include "passes.h"

enum { WORDS = 16 }; /* bytes: one word for each warp */

int64_t pm_exchange_row(const pm_type *t) {
  const int64_t row = t->dim[t->rank - 1];
  return t->rank > 1 && row * pm_dtypes[t->dtype].bytes % 128 == 0 ? pm_transposed_row(t) : row;
}

int64_t pm_transposed_row(const pm_type *t) {
  const int64_t bytes = pm_dtypes[t->dtype].bytes;
  const int64_t parts = pm_cdiv(t->dim[t->rank - 1] * bytes, 16);
  return (parts | 1) * 16 / bytes;
}

static int64_t cast_scratch(const pm_graph *g, pm_opid cast) {
  const pm_op *o = pm_get(g, cast);
  const pm_type *t = pm_typeof(g, o->out);
  pm_layid from = pm_value_of(g, pm_in(g, cast, 0))->layout, to = pm_value_of(g, o->out)->layout;
  if (!t->rank || from == to) return 0;
  const pm_layout *a = pm_layout_of(g, from), *b = pm_layout_of(g, to);
  int32_t *map = PM_NEW(g->arena, int32_t, pm_layout_regs(b));
  if (pm_layout_register_map(g->arena, a, b, map)) return 0;
  pm_relayout plan;
  const int64_t bytes = pm_dtypes[t->dtype].bytes;
  if (pm_relayout_plan(g->arena, a, b, &plan) && pm_relayout_pays(&plan, bytes)) return 0;
  return pm_type_size(t) / t->dim[t->rank - 1] * pm_exchange_row(t) * bytes;
}

static int64_t bytes_of(const pm_graph *g, pm_val v) {
  const pm_type *t = pm_typeof(g, v);
  return pm_type_size(t) * pm_dtypes[t->dtype].bytes;
}

static int64_t move_scratch(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (pm_moves_in_registers(g, op)) return 0;
  if (pm_ops[o->code].layout == PM_LAY_TRANSPOSE) {
    const pm_type *t = pm_typeof(g, pm_in(g, op, 0));
    const int64_t rows = pm_type_size(t) / t->dim[t->rank - 1];
    return rows * pm_transposed_row(t) * pm_dtypes[t->dtype].bytes;
  }
  return bytes_of(g, pm_ops[o->code].layout == PM_LAY_CONCAT ? o->out : pm_in(g, op, 0));
}

static int64_t scan_scratch(const pm_graph *g, pm_opid scan) {
  const pm_op *o = pm_get(g, scan);
  const pm_layout *l = pm_layout_of(g, pm_value_of(g, o->out)->layout);
  const int64_t dim = *pm_attr(g, scan, PM_ATTR_DIM);
  if (l->kind == PM_SPLAT || !l->n_warp || (l->warp[0].dim != dim && l->kind == PM_TILED)) return 0;
  const int64_t run = pm_cdiv(pm_typeof(g, o->out)->dim[dim], 128);
  return 4 * (pm_layout_regs(l) / run) * pm_dtypes[pm_typeof(g, o->out)->dtype].bytes;
}

int64_t pm_reduce_scratch(const pm_graph *g, pm_opid reduce, int64_t *at_once) {
  uint32_t n;
  const pm_op *o = pm_get(g, reduce);
  const int64_t *dims = pm_attr_list(g, reduce, PM_ATTR_DIMS, &n);
  const pm_layout *l = pm_layout_of(g, pm_value_of(g, pm_in(g, reduce, 0))->layout);
  const pm_layout *r = pm_layout_of(g, pm_value_of(g, o->out)->layout);
  bool all = !r || r->kind == PM_SPLAT, crosses = false;
  for (int k = 0; k < l->n_warp; k++) {
    crosses |= all && l->warp[k].dim >= 0;
    for (uint32_t d = 0; d < n; d++) crosses |= l->warp[k].dim == dims[d];
  }
  const int64_t kind = *pm_attr(g, reduce, PM_ATTR_REDUCE);
  *at_once = 1;
  if (!crosses || (all && kind >= PM_REDUCE_ANY)) return 0;
  int64_t one = 4 * 4, regs = all ? 1 : pm_layout_regs(r); /* a scalar: one word for each warp */
  for (int k = 0; !all && k < r->n_lane; k++) one *= r->lane[k].dim < 0 ? 1 : r->lane[k].size;
  *at_once = pm_min(regs, g->reduction_scratch / one);
  if (*at_once) *at_once = pm_cdiv(regs, pm_cdiv(regs, *at_once)); /* steps of equal size */
  return one * pm_max(*at_once, 1);
}

int64_t pm_op_scratch(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  const pm_op_info *info = &pm_ops[o->code];
  int64_t at_once;
  if (pm_maps_warps(o->code)) return WORDS;
  if (info->participants == PM_BY_TELLS) return pm_type_size(pm_typeof(g, o->out)) == 1 ? WORDS : 0;
  switch (info->layout) {
    case PM_LAY_FIXED: return cast_scratch(g, op);
    case PM_LAY_RESHAPE:
    case PM_LAY_SLICE:
    case PM_LAY_TRANSPOSE:
    case PM_LAY_CONCAT:
    case PM_LAY_GATHER:
    case PM_LAY_SCATTER: return move_scratch(g, op);
    case PM_LAY_SCAN: return scan_scratch(g, op);
    case PM_LAY_REDUCE: return pm_reduce_scratch(g, op, &at_once);
    default: return 0;
  }
}
