/* Sizes that are known when a kernel is called.
 *
 * A graph may leave extents of its arguments and axes of its grid open. Each such size is an
 * expression: an extent of an operand, a number, or a function of sizes before it. While the graph
 * is traced, lowered and generated, the type of an argument has one more than the most that an
 * open extent may be: what is derived holds for all of them, and no slice of a static size is the
 * whole. What needs the size itself (bounds of accesses, tensor maps, the grid, the op SIZE) finds
 * its number in `extents` and `grid_sizes`.
 * Strides stay static: only the first extent above 1 of an argument may be open.
 *
 * A call evaluates all sizes once, in their order. The interpreter runs the graph bound to them:
 * extents, views of whole dimensions and the grid are those of the call. */
#ifndef PM_SIZES_H
#define PM_SIZES_H

#include "ir.h"

enum { PM_MAX_SIZES = 64 }; /* of a graph, with number 0 */

/* The number of a size: of an equal one if there is one; 0 with an error. */
uint32_t pm_add_size(pm_graph *g, const pm_size *s, pm_err *err);
/* That some extents of argument k are sizes, by number. */
pm_code pm_set_extents(pm_graph *g, uint32_t k, const uint32_t *size, pm_err *err);

/* The values of n sizes (with number 0) for operands whose shapes are `shape`; names are of the
 * graph's strings. An extent that two operands have under one name is one size: `other` compares.
 */
typedef struct pm_shapes {
  const int64_t *(*of)(const void *ctx, uint32_t operand);
  const void *ctx;
} pm_shapes;
pm_code pm_eval_sizes(const pm_graph *g, const pm_shapes *shapes, int64_t *value, pm_err *err);

/* Extents of argument k for these values, in place of those of its type. */
void pm_bound_shape(const pm_graph *g, uint32_t k, const int64_t *value, int64_t *dim);

/* The size that is the whole of dimension d of a ref, 0: it is known now. */
uint32_t pm_whole_extent(const pm_graph *g, pm_val ref, uint32_t d);

/* Make the graph that of one call, for a moment: pm_unbind_sizes undoes it. Memory is `temp`'s. */
typedef struct pm_binding {
  pm_type *types; /* of all values, as they were */
  int64_t *lists;
  pm_size *sizes;
  uint32_t n_extents;
  int64_t grid[PM_MAX_RANK];
} pm_binding;
void pm_bind_sizes(pm_graph *g, const int64_t *value, pm_arena *temp, pm_binding *b);
void pm_unbind_sizes(pm_graph *g, const pm_binding *b);

#endif
