/* Does a value depend on others? Dataflow backwards through operands. A result of an op with
 * regions depends on all that is used inside them; a region argument on its op's operands too: that
 * is more than strictly needed, never less. Loads depend on their refs, not on what is stored
 * there. */
#include "ir.h"

typedef struct walker {
  const pm_graph *g;
  const pm_val *on;
  uint32_t n_on;
  uint8_t *seen_value, *seen_op;
} walker;

static bool reaches(walker *w, pm_val v);

static bool op_reaches(walker *w, pm_opid id) {
  if (w->seen_op[id]) return false;
  w->seen_op[id] = 1;
  const pm_op *op = pm_get(w->g, id);
  for (uint32_t k = 0; k < op->n_in; k++)
    if (reaches(w, pm_in(w->g, id, k))) return true;
  for (uint32_t r = 0; r < op->n_regions; r++) {
    const pm_block *b = &w->g->blocks.at[pm_region(w->g, id, r)];
    for (uint32_t k = 0; k < b->ops.n; k++)
      if (op_reaches(w, b->ops.at[k])) return true;
  }
  return false;
}

static bool reaches(walker *w, pm_val v) {
  for (uint32_t k = 0; k < w->n_on; k++)
    if (w->on[k] == v) return true;
  if (w->seen_value[v]) return false;
  w->seen_value[v] = 1;
  const pm_value *value = pm_value_of(w->g, v);
  pm_opid op = value->def ? value->def : w->g->blocks.at[value->block].parent;
  return op && op_reaches(w, op);
}

bool pm_depends(const pm_graph *g, const pm_val *vals, uint32_t n, const pm_val *on,
                uint32_t n_on) {
  walker w = {g, on, n_on, PM_NEW(g->arena, uint8_t, g->values.n),
              PM_NEW(g->arena, uint8_t, g->ops.n)};
  for (uint32_t k = 0; k < n; k++)
    if (reaches(&w, vals[k])) return true;
  return false;
}
