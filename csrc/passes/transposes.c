/* Transposes of arrays that are loaded from or stored to SMEM become views of the ref.
 *
 *   store r, transpose(x)  ->  store (the inverse transpose of r), x
 *   transpose(load r)      ->  load (the transpose of r)
 *
 * The view of the ref is free, while the array would go through scratch. GMEM is left alone,
 * because its rows are best read and written as they are. pm_simplify removes what is no longer
 * used. */
#include "passes.h"

static pm_opid transpose_of(const pm_graph *g, pm_val v) {
  const pm_opid def = pm_value_of(g, v)->def;
  return def && pm_rule_of(g, def) == PM_LAY_TRANSPOSE ? def : 0;
}

static bool in_smem(const pm_graph *g, pm_val ref) { return pm_typeof(g, ref)->space == PM_SMEM; }

/* The view of `ref` whose dim k is dim dims[k], made before position `at` of the block of `place`.
 */
static pm_val transposed_ref(pm_graph *g, pm_opid place, uint32_t at, pm_val ref,
                             const int64_t *dims) {
  const pm_type from = *pm_typeof(g, ref);
  pm_type to = from;
  for (int k = 0; k < from.rank; k++) to.dim[k] = from.dim[dims[k]];
  pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = dims, .n = from.rank};
  const pm_blk block = pm_get(g, place)->parent;
  const pm_opid op = pm_insert(g, block, at, PM_OP_TRANSPOSE_REF, &ref, 1, &to, 1, &attr, 1, place);
  return pm_get(g, op)->out;
}

static void permutation(const pm_graph *g, pm_opid transpose, bool back, int64_t *out) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, transpose, PM_ATTR_DIMS, &n);
  for (uint32_t k = 0; k < n; k++) {
    if (back) out[dims[k]] = k;
    else out[k] = dims[k];
  }
}

static void visit_store(pm_graph *g, pm_opid op) {
  int64_t dims[PM_MAX_RANK];
  const pm_opid def = transpose_of(g, pm_in(g, op, 1));
  if (!def || !in_smem(g, pm_in(g, op, 0))) return;
  permutation(g, def, true, dims);
  const pm_val ref = transposed_ref(g, op, pm_position(g, op), pm_in(g, op, 0), dims);
  g->operands.at[pm_get(g, op)->in] = ref;
  g->operands.at[pm_get(g, op)->in + 1] = pm_in(g, def, 0);
}

static bool is_used(const pm_graph *g, pm_val v) {
  for (uint32_t k = 0; k < g->operands.n; k++) {
    if (g->operands.at[k] == v) return true;
  }
  return false;
}

/* The walk reaches the op again, after the inserted ops; by then it is unused. */
static void visit_transpose(pm_graph *g, pm_opid op) {
  int64_t dims[PM_MAX_RANK];
  if (!is_used(g, pm_get(g, op)->out)) return;
  const pm_opid load = pm_value_of(g, pm_in(g, op, 0))->def;
  if (!load || !pm_is_free_load(g, load)) return;
  if (!in_smem(g, pm_in(g, load, 0))) return;
  permutation(g, op, false, dims);
  const uint32_t at = pm_position(g, load) + 1;
  const pm_val ref = transposed_ref(g, load, at, pm_in(g, load, 0), dims);
  const pm_type t = *pm_typeof(g, pm_get(g, op)->out);
  pm_attr_arg attrs[] = {{.id = PM_ATTR_LAYOUT},
                         {.id = PM_ATTR_OPTIMIZED, .i = *pm_attr(g, load, PM_ATTR_OPTIMIZED)}};
  const pm_blk block = pm_get(g, load)->parent;
  const pm_opid again = pm_insert(g, block, at + 1, PM_OP_LOAD, &ref, 1, &t, 1, attrs, 2, load);
  const pm_val old = pm_get(g, op)->out, new = pm_get(g, again)->out;
  for (uint32_t k = 0; k < g->operands.n; k++) {
    if (g->operands.at[k] == old) g->operands.at[k] = new;
  }
}

static void visit(pm_graph *g, pm_opid op, void *ctx) {
  (void)ctx;
  if (pm_get(g, op)->code == PM_OP_STORE) visit_store(g, op);
  if (pm_rule_of(g, op) == PM_LAY_TRANSPOSE) visit_transpose(g, op);
}

pm_code pm_transpose_refs(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t, (void)err;
  pm_walk(g, 1, visit, NULL);
  return PM_OK;
}
