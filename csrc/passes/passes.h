/* The passes, in order. Each takes the graph of the previous stage and leaves a verified graph. */
#ifndef PM_PASSES_H
#define PM_PASSES_H

#include "../ir/access.h"
#include "../ir/ir.h"
#include "../ir/layout.h"
#include "../ir/mma.h"
#include "../ir/view.h"

/* target.c: PM_E_NOT_IMPLEMENTED at the first op that needs what the target lacks. Changes nothing.
 */
pm_code pm_check_target(pm_graph *g, const pm_target *t, pm_err *err);
/* The first target of the table that has what a traced graph needs. */
const pm_target *pm_choose_target(pm_graph *g);
/* products.c: on targets without wgmma its products become those of mma, where pm_is_mma. */
pm_code pm_make_mma(pm_graph *g, const pm_target *t, pm_err *err);
/* Does pm_make_mma do away with the op? */
bool pm_is_mma(const pm_graph *g, const pm_target *t, pm_opid op);
/* simplify.c: fold scalar constants and x*1, x+0 and the like, merge equal pure ops of one block or
 * a dominating one, remove unused pure ops, allocations and empty regions, inline IF on a
 * constant. */
pm_code pm_simplify(pm_graph *g, pm_err *err);
/* subbyte.c: refs of elements below 8 bits become refs of bytes; loads are followed by UNPACK,
 * stores preceded by PACK. PM_E_NOT_IMPLEMENTED for views that would split a byte. */
pm_code pm_pack_refs(pm_graph *g, const pm_target *t, pm_err *err);
/* transposes.c: transposes of arrays that are loaded from or stored to SMEM become views of the
 * refs. */
pm_code pm_transpose_refs(pm_graph *g, const pm_target *t, pm_err *err);
/* outputs.c: warns about outputs that nothing writes. */
pm_code pm_check_outputs(pm_graph *g, const pm_target *t, pm_err *err);
/* rows.c: a program whose products have more rows than fit in registers is split into several with
 * fewer rows, if rows are independent: one more axis of the grid. */
pm_code pm_split_rows(pm_graph *g, const pm_target *t, pm_err *err);
/* stage.c: engines prefetch the operands of products that loops load from GMEM; sums with products
 * are computed in the accumulator; accesses with a mask that is true everywhere lose the mask. */
pm_code pm_stage_products(pm_graph *g, const pm_target *t, pm_err *err);
/* roles.c: loops around IFs on the thread's index become loops inside such an IF. */
pm_code pm_split_roles(pm_graph *g, const pm_target *t, pm_err *err);
/* strips.c: stores of arrays too large for registers, computed from loads by element-wise ops
 * alone, become loops over parts. */
pm_code pm_loop_over_strips(pm_graph *g, const pm_target *t, pm_err *err);
/* strips.c, for a graph with layouts: a warning for each line whose array needs more registers than
 * a lane has. */
pm_code pm_warn_large(pm_graph *g, const pm_target *t, pm_err *err);
/* registers.c: PM_E_VALUE if the requests of set_max_registers provably exceed what an SM has. */
pm_code pm_check_registers(pm_graph *g, const pm_target *t, pm_err *err);
/* registers.c, for a graph with layouts: branches of one role repeat the request of its threads. */
pm_code pm_repeat_requests(pm_graph *g, const pm_target *t, pm_err *err);
/* divergence.c: PM_E_VALUE for ordered sections with different participants, and for ops that need
 * all lanes in code that only some warps reach. */
pm_code pm_check_divergence(pm_graph *g, const pm_target *t, pm_err *err);
/* transforms.c: tiling and swizzle of the SMEM allocations that an op forces (wgmma operands:
 * tiling (8, S) and the widest swizzle of 128, 64, 32 that divides the minor dim and every slice of
 * it; both operands of one wgmma get one swizzle). Transforms that the user specified (GIVEN) are
 * binding; a contradiction is PM_E_VALUE "Failed to infer a possible set of layouts", naming both
 * lines. */
pm_code pm_force_transforms(pm_graph *g, const pm_target *t, pm_err *err);
/* transforms.c: the refusal of operand k of a product, 1 for a and 2 for b, which is not contiguous
 * along K. */
pm_code pm_refuse_major(pm_graph *g, pm_opid op, uint32_t k, pm_dtype dtype, pm_err *err);
/* layouts.c: register layouts of all arrays of rank > 0 together, over the whole kernel. Inserts
 * LAYOUT_CAST where a conversion is needed and a warning where it goes through SMEM. Afterwards
 * every operand of a POINTWISE op of rank > 0 has the layout of the result or is a splat, every
 * REDUCE result has pm_layout_reduce of its operand, every BROADCAST operand
 * pm_layout_broadcast_operand of its result (or is a splat), ACC values WGMMA, and carries, yields
 * and region arguments agree. A value computed only from splats is a splat, and so is every array
 * of one element unless something requires another layout. Only a LAYOUT_CAST converts a splat to
 * another layout. */
pm_code pm_infer_layouts(pm_graph *g, const pm_target *t, pm_err *err);
/* describe.c, for a graph whose layouts and transforms are known: the layout of an array, such as
 * "WGMMA", or the transforms of a ref in SMEM, such as "(TilingTransform(...), ...)", of which
 * `packed` elements share a byte. */
const char *pm_describe(const pm_graph *g, pm_val v, int64_t packed);
/* the line of a PRINT_LAYOUT */
const char *pm_print_layout_text(const pm_graph *g, pm_opid op);
/* derive.c: does a RESHAPE, SLICE, TRANSPOSE, CONCAT or GATHER only rename registers? */
bool pm_moves_in_registers(const pm_graph *g, pm_opid op);
/* Is this CONCAT an array followed by one number, in lanes that already hold the array? */
bool pm_is_fill(const pm_graph *g, pm_opid concat);
/* scratch.c: bytes of SMEM scratch that an op needs, 0 for most.
 * LAYOUT_CAST: 0 if pm_layout_register_map finds a map (a splat operand too) or shuffles do it
 * (relayout.h), else the array in row-major order, elements as in memory.
 * RESHAPE, SLICE, TRANSPOSE, CONCAT, GATHER, SCATTER: 0, or the operand in row-major order (the
 * result, for a CONCAT). For a TRANSPOSE, rows are pm_transposed_row elements apart.
 * SCAN: 0, or one element for each warp and run, [warp][run]. REDUCE: see pm_reduce_scratch.
 * WARP_MAP, and ops that tell all lanes a number: one word for each warp. */
int64_t pm_op_scratch(const pm_graph *g, pm_opid op);
/* The pitch, in elements, of scratch that is read column by column: an odd multiple of 16 bytes, so
 * that eight rows are in different banks. */
int64_t pm_transposed_row(const pm_type *t);
/* The pitch, in elements, of the scratch of a LAYOUT_CAST: if all rows started in the same bank,
 * lanes would wait for each other. */
int64_t pm_exchange_row(const pm_type *t);
/* The layout in which SCAN works: its dim is entirely in registers, or is distributed as
 * dim = (warp * 32 + lane) * run + register; the other dims are in slower registers. */
pm_layid pm_scan_layout(pm_graph *g, const pm_type *t, int dim);
/* Bytes of SMEM scratch a REDUCE needs to combine warps: 0 if no warp digit runs along a reduced
 * dim, else 32-bit words [warp][value], value = lane part * registers of the result + register. The
 * lane part numbers the lanes of a warp that hold different elements of the result: the mixed-radix
 * number of the result's lane digits that are not replicated. If the result is a scalar or a splat,
 * there is one value, and all dims count as reduced; such a result of ANY or ALL needs no scratch.
 * The user's limit allows *at_once registers at a time. If that is 0, not even one, the function
 * returns what one needs. */
int64_t pm_reduce_scratch(const pm_graph *g, pm_opid reduce, int64_t *at_once);
/* transforms.c: the remaining SMEM allocations, now that register layouts are known: those accessed
 * by arrays in WGMMA get (8, S) and a swizzle (conflict-free, stmatrix), all others stay
 * row-major. */
pm_code pm_choose_transforms(pm_graph *g, const pm_target *t, pm_err *err);
/* smem.c: byte offsets of SMEM and barrier allocations by scope (consecutive scopes overlap, nested
 * scopes add up, 1024-byte alignment), then scratch of reductions and conversions, then barriers.
 * If too large: PM_E_VALUE with a table, "exceeds available shared memory" and both byte counts. */
pm_code pm_plan_smem(pm_graph *g, const pm_target *t, pm_err *err);
/* tmem.c: columns of TMEM allocations by scope, and how many the block allocates. If too many:
 * PM_E_VALUE with a table. */
pm_code pm_plan_tmem(pm_graph *g, const pm_target *t, pm_err *err);
/* copies.c: the engine of every copy, by pm_plan_copy. */
pm_code pm_plan_copies(pm_graph *g, const pm_target *t, pm_err *err);
/* sync.c: SYNC ops at every hazard between lanes, also where the lane that arrives for all must not
 * run ahead of the others; the attribute RELAXED of arrivals. */
pm_code pm_place_syncs(pm_graph *g, const pm_target *t, pm_err *err);
/* ordering.c: a warning for each access that goes wrong because a fence or a wait is missing on
 * every path of its thread. */
pm_code pm_check_ordering(pm_graph *g, const pm_target *t, pm_err *err);

/* All of them, for a target, with pm_verify between in debug builds. The graph, which pm_verify has
 * accepted, is consumed: traced -> synced. */
pm_code pm_lower(pm_graph *g, const pm_target *t, pm_err *err);

/* ---- how a copy is done -------------------------------------------------------------------- */

enum { PM_TMA_RANK = 5 };

enum { PM_ANY_SWIZZLE = 255 }; /* of a map that nothing but prefetches use */

/* Whose memory a tensor map is of: this device's, each device's (a map for each), or all devices'.
 */
typedef enum pm_map_of { PM_MAP_OWN, PM_MAP_PEERS, PM_MAP_ALL } pm_map_of;

/* One tensor map: the arguments of cuTensorMapEncodeTiled, innermost dimension first. */
typedef struct pm_tensor_map {
  int32_t param;                                  /* kernel argument it describes */
  uint8_t dtype, rank, swizzle;                   /* swizzle in bytes, 0: none; PM_ANY_SWIZZLE */
  uint8_t of;                                     /* pm_map_of */
  uint64_t dim[PM_TMA_RANK], stride[PM_TMA_RANK]; /* strides in bytes; stride[0] is the element */
  uint32_t box[PM_TMA_RANK];
  uint32_t extent[PM_TMA_RANK]; /* dim is the least that this size of the call may be; 0: static */
} pm_tensor_map;

/* A coordinate of a TMA instruction: fixed + sum of val * mul / div (div provably divides). */
typedef struct pm_coord {
  int64_t fixed;
  uint32_t n_terms;
  pm_term term[6];
} pm_coord;

typedef struct pm_box_loop {
  int64_t count, smem_step, coord_step[PM_TMA_RANK];
} pm_box_loop;

/* A copy op as instructions.
 * TMA: n_loops nested loops over boxes (large or chunked copies; none: one box); the box with loop
 * counters c is at SMEM byte  smem_first + sum c[k] * loop[k].smem_step  and at coordinate[d] +
 * sum c[k] * loop[k].coord_step[d].
 * BULK: `bytes` contiguous bytes.
 * PLAIN: the lanes copy the elements of the views; out-of-range reads give zeros, such writes are
 * dropped.
 * A collective copy (attribute CLUSTER) is TMA: each of the share.count blocks that differ only
 * along the axes loads one part and multicasts it. The block with number r among them (its
 * coordinates on the axes as the attribute lists them, the last one fastest) loads the boxes above
 * shifted by r * share.smem_step and r * share.coord_step[d]. `bytes` counts all parts. Count 1:
 * not collective. */
typedef struct pm_copy_plan {
  int engine;      /* PM_ENGINE_TMA, BULK or PLAIN */
  const char *why; /* PLAIN: why no engine can do the copy, for warnings and dumps */
  bool alone;    /* a collective copy that each block does for itself, because no tensor map fits */
  bool promised; /* of one without a barrier: it does not overhang the array */
  pm_view gmem, smem; /* physical views of both sides */
  int64_t bytes; /* that arrive in SMEM (or leave it): all boxes, including out-of-range parts */
  pm_tensor_map map;
  pm_coord coord[PM_TMA_RANK];
  uint32_t n_loops;
  pm_box_loop loop[3], share;
} pm_copy_plan;

/* Plan one COPY op. Chooses the engine if the op's ENGINE is AUTO, else keeps it. Illegal copies
 * are PM_E_VALUE; those that no engine can do become PLAIN. */
pm_code pm_plan_copy(const pm_graph *g, pm_opid op, const pm_target *t, pm_copy_plan *out,
                     pm_err *err);
/* Does a WARP_MAP store with an engine? Then each warp of a thread has bulk groups. */
bool pm_warps_store(pm_graph *g, pm_opid map);

#endif
