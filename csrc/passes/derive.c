/* Layouts that follow from other layouts by an op that moves elements: what its result has if only
 * registers are renamed, and whether that is what it does. */
#include "derive.h"

static pm_layid reduced(pm_graph *g, pm_opid op, pm_layid in) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  return pm_layout_reduce(g, in, dims, n);
}

pm_layid pm_sliced_layout(pm_graph *g, pm_opid op, pm_layid in) {
  uint32_t n;
  const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  pm_type to = *pm_typeof(g, pm_get(g, op)->out);
  return pm_layout_slice(g, in, starts, &to);
}

pm_layid pm_reshaped_layout(pm_graph *g, pm_layid l, pm_val like) {
  pm_type to = *pm_typeof(g, like);
  return pm_layout_reshape(g, l, &to);
}

pm_layid pm_transposed_layout(pm_graph *g, pm_opid op, pm_layid l, bool back) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  int64_t inverse[PM_MAX_RANK];
  for (uint32_t k = 0; k < n; k++) inverse[dims[k]] = k;
  pm_type to = *pm_typeof(g, back ? pm_in(g, op, 0) : pm_get(g, op)->out);
  return pm_layout_transpose(g, l, back ? inverse : dims, &to);
}

pm_layid pm_piece_layout(pm_graph *g, pm_opid op, uint32_t k, pm_layid out) {
  const int64_t dim = *pm_attr(g, op, PM_ATTR_DIM);
  int64_t starts[PM_MAX_RANK] = {0};
  for (uint32_t i = 0; i < k; i++) starts[dim] += pm_typeof(g, pm_in(g, op, i))->dim[dim];
  pm_type to = *pm_typeof(g, pm_in(g, op, k));
  return pm_layout_slice(g, out, starts, &to);
}

/* PACK or UNPACK */
pm_layid pm_repacked_layout(pm_graph *g, pm_opid op, pm_layid l, bool back) {
  const bool unpack = unpacks(g, op);
  const pm_type to = *pm_typeof(g, back ? pm_in(g, op, 0) : pm_get(g, op)->out);
  if (!unpack && is_splat(g, l)) return pm_layout_splat(g, &to);
  return unpack != back ? pm_layout_doubled(g, l, &to) : pm_layout_halved(g, l, &to);
}

pm_layid pm_natural_layout(pm_graph *g, pm_opid op, pm_layid in) {
  switch (pm_rule_of(g, op)) {
    case PM_LAY_REDUCE: return reduced(g, op, in);
    case PM_LAY_RESHAPE: return pm_reshaped_layout(g, in, pm_get(g, op)->out);
    case PM_LAY_SLICE: return pm_sliced_layout(g, op, in);
    case PM_LAY_TRANSPOSE: return pm_transposed_layout(g, op, in, false);
    case PM_LAY_PACK: return pm_repacked_layout(g, op, in, false);
    default: return 0;
  }
}

bool pm_is_fill(const pm_graph *g, pm_opid concat) {
  const pm_op *o = pm_get(g, concat);
  const pm_layid first = pm_value_of(g, pm_in(g, concat, 0))->layout;
  if (o->n_in != 2 || !is_array(g, pm_in(g, concat, 0)) || is_splat(g, first)) return false;
  if (!is_splat(g, pm_value_of(g, pm_in(g, concat, 1))->layout)) return false;
  return pm_piece_layout((pm_graph *)g, concat, 0, pm_value_of(g, o->out)->layout) == first;
}

bool pm_moves_in_registers(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  const pm_layid out = pm_value_of(g, o->out)->layout;
  pm_graph *m = (pm_graph *)g; /* only interns layouts */
  switch (pm_rule_of(g, op)) {
    case PM_LAY_RESHAPE:
    case PM_LAY_SLICE:
    case PM_LAY_TRANSPOSE: {
      const pm_layid in = pm_value_of(g, pm_in(g, op, 0))->layout;
      if (!is_array(g, pm_in(g, op, 0)) || !is_array(g, o->out)) return true;
      return is_splat(g, in) || pm_natural_layout(m, op, in) == out;
    }
    case PM_LAY_CONCAT:
      if (pm_is_fill(g, op)) return true;
      for (uint32_t k = 0; k < o->n_in; k++) {
        const pm_layid in = pm_value_of(g, pm_in(g, op, k))->layout;
        const pm_layid piece = pm_piece_layout(m, op, k, out);
        if (!piece || (in != piece && !is_splat(g, in))) return false;
      }
      return true;
    case PM_LAY_GATHER:
      return !is_array(g, pm_in(g, op, 0)) || is_splat(g, pm_value_of(g, pm_in(g, op, 0))->layout);
    default: return false;
  }
}
