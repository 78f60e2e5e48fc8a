/* Shared by layouts.c and derive.c: layouts that follow from other layouts. */
#ifndef PM_DERIVE_H
#define PM_DERIVE_H

#include "passes.h"

static inline bool is_array(const pm_graph *g, pm_val v) {
  const pm_type *t = pm_typeof(g, v);
  return t->kind == PM_ARRAY && t->rank > 0;
}

/* Of the ops with the rule PACK. */
static inline bool unpacks(const pm_graph *g, pm_opid op) {
  return pm_get(g, op)->code == PM_OP_UNPACK;
}

static inline bool is_splat(const pm_graph *g, pm_layid l) {
  return pm_layout_of(g, l)->kind == PM_SPLAT;
}

/* The layout in which an op naturally produces its result for an operand in layout `in`. */
pm_layid pm_natural_layout(pm_graph *g, pm_opid op, pm_layid in);
/* The same for one kind of op; back: the layout of the operand for a result in layout l. */
pm_layid pm_sliced_layout(pm_graph *g, pm_opid op, pm_layid in);
pm_layid pm_reshaped_layout(pm_graph *g, pm_layid l, pm_val like);
pm_layid pm_transposed_layout(pm_graph *g, pm_opid op, pm_layid l, bool back);
pm_layid pm_repacked_layout(pm_graph *g, pm_opid op, pm_layid l, bool back);
/* The layout that the k-th operand of a CONCAT needs for a result in layout `out`; 0: none. */
pm_layid pm_piece_layout(pm_graph *g, pm_opid op, uint32_t k, pm_layid out);

#endif
