/* Register layouts: where the elements of an array are in the 128 lanes of a warpgroup.
 *
 * There is one representation for all of them. A layout covers a padded shape. Warp, lane and
 * register are mixed-radix numbers whose digits each add `digit * stride` to one dimension of the
 * index:
 *
 *     index[dim] = sum over digits of dim:  ((number / div) % size) * stride
 *
 * where number is the warp (0..3), the lane (0..31) or the register (0..n_regs-1), and div is the
 * product of the sizes of the less significant digits of the same number. A digit with dim -1 is
 * replicated: all its values hold copies. Every index below the padded shape is reached once for
 * each copy. An index outside the logical extents is padding: its register exists, but its value is
 * meaningless and is never stored, reduced, compared across lanes or printed.
 *
 * SPLAT: one register for all elements. FLAT: the digits address the row-major linear index (one
 * dimension of size `padded[0]` >= the number of elements); WG_STRIDED is the flat layout linear =
 * (r / vec * 128 + tid) * vec + r % vec. TILED: the digits address the dimensions; WGMMA, its
 * reductions and all named layouts (layouts.def) are constants of it. Array values are C arrays of
 * n_regs elements in generated code: register r is element r, and the fastest register digit is the
 * vector.
 *
 * Layouts are interned in each graph: equal layouts have equal pm_layid. */
#ifndef PM_LAYOUT_H
#define PM_LAYOUT_H

#include "ir.h"

typedef enum pm_layout_kind { PM_SPLAT, PM_FLAT, PM_TILED } pm_layout_kind;
enum { PM_MAX_DIGITS = 16 };

typedef struct pm_digit {
  int8_t dim; /* -1: replicated */
  int32_t size, stride;
} pm_digit;

typedef struct pm_layout {
  uint8_t kind, rank;
  uint8_t n_warp, n_lane, n_reg; /* digits, most significant first */
  int64_t shape[PM_MAX_RANK];    /* logical extents */
  int64_t padded[PM_MAX_RANK];   /* FLAT: padded[0] only */
  pm_digit warp[PM_MAX_DIGITS], lane[PM_MAX_DIGITS], reg[PM_MAX_DIGITS];
} pm_layout;

/* Constructors intern and return an id. The shape is the array's; they pad it. Rank 0 is splat. */
pm_layid pm_layout_splat(pm_graph *g, const pm_type *array);
pm_layid pm_layout_strided(pm_graph *g, const pm_type *array, int64_t vec); /* vec 0: the default */
/* Dim `dim` along the lanes in runs of vec, all others in registers; -1: every lane holds all. */
pm_layid pm_layout_along(pm_graph *g, const pm_type *array, int dim, int64_t vec);
enum { PM_REPLICATED = 0x10000, PM_MAX_TILES = 8 };
/* The general form: tiles, then which of the resulting dims (negative) go where; as Layout.TILED.
 * A replicated digit is given as PM_REPLICATED + times in warp_dims / lane_dims. */
pm_code pm_layout_tiled(pm_graph *g, const pm_type *array, const int64_t *const *tiles,
                        const uint32_t *tile_rank, uint32_t n_tiles, const int64_t *warp_dims,
                        uint32_t n_warp, const int64_t *lane_dims, uint32_t n_lane,
                        int64_t vector_dim, pm_layid *out, pm_err *err);
/* The same in one piece. One that a user gives must be canonical, which names need not be. */
typedef struct pm_tiling {
  bool named;
  uint32_t n, rank[PM_MAX_TILES], n_warp, n_lane;
  int64_t tile[PM_MAX_TILES][PM_MAX_RANK], warp[PM_MAX_RANK], lane[PM_MAX_RANK], vector;
} pm_tiling;
pm_code pm_layout_of_tiling(pm_graph *g, const pm_type *array, const pm_tiling *t, pm_layid *out,
                            pm_err *err);

/* ---- layout_named.c: the layouts of layouts.def --------------------------------------------- */

typedef enum pm_layout_name_id {
#define PM_LAYOUT(id, text, arguments, swizzled, tiles, warp, lane, vector) PM_LAYOUT_##id,
#include "layouts.def"
#undef PM_LAYOUT
  PM_LAYOUT_COUNT
} pm_layout_name_id;
int pm_layout_find(const char *text, size_t n); /* its pm_layout_name_id; -1: no such name */
/* False: the name has no such arguments. */
bool pm_layout_tiling(pm_layout_name_id id, const int64_t *arg, uint32_t n, pm_tiling *out);
/* 0: the array has too few dimensions, or the name no such arguments. */
pm_layid pm_layout_constant(pm_graph *g, pm_layout_name_id id, const int64_t *arg, uint32_t n,
                            const pm_type *array);
/* WGMMA on the last two dims (leading dims are registers); rank 1 or 0: none fits, 0 */
pm_layid pm_layout_wgmma(pm_graph *g, const pm_type *array);
/* Which of them a layout is, reduced over dim `axis` of the first tile, or not: -1. */
typedef struct pm_layout_identity {
  pm_layout_name_id id;
  int axis;
  int64_t arg[2];
} pm_layout_identity;
bool pm_layout_identify(pm_arena *a, const pm_layout *l, pm_layout_identity *out);
/* Is shared memory swizzled for such arrays? */
bool pm_layout_swizzled(pm_arena *a, const pm_layout *l);
/* "mma_lhs(16).reduce(1)" of a layout that layouts.def has; NULL: it has not */
const char *pm_layout_name(pm_arena *a, const pm_layout *l);
pm_layid pm_layout_by_name(pm_graph *g, const char *text, size_t n, const pm_type *array);
const char *pm_layout_text(pm_arena *a, const pm_layout *l); /* its name, or digits */
pm_code pm_layout_parse(pm_graph *g, const char *text, size_t n, const pm_type *array,
                        pm_layid *out, pm_err *err);
/* Layout of the array after dims `dims` are reduced away. SPLAT stays splat, and a result of one
 * element is a splat from any layout: the dims that stay have size 1, so the whole array is
 * reduced. FLAT over some of its dims: 0 (none exists). */
pm_layid pm_layout_reduce(pm_graph *g, pm_layid l, const int64_t *dims, uint32_t n);
/* The same of a TILED one, also where one element is left. */
pm_layid pm_layout_without(pm_graph *g, pm_layid l, const int64_t *dims, uint32_t n);
/* The same elements in row-major order in the same registers under another shape; 0 if no digits
 * say that. */
pm_layid pm_layout_reshape(pm_graph *g, pm_layid l, const pm_type *to);
/* The same elements in the same registers, dim k of the result being dim perm[k]; 0: none. */
pm_layid pm_layout_transpose(pm_graph *g, pm_layid l, const int64_t *perm, const pm_type *to);
/* Each element of the last dim becomes two neighbours, in neighbouring registers: register r those
 * in 2r and 2r + 1; and back, if that is how they lie. 0: not of this form. */
pm_layid pm_layout_doubled(pm_graph *g, pm_layid l, const pm_type *to);
pm_layid pm_layout_halved(pm_graph *g, pm_layid l, const pm_type *to);
/* Slice of the same rank where each lane keeps some of its registers, in order; 0: none. */
pm_layid pm_layout_slice(pm_graph *g, pm_layid l, const int64_t *starts, const pm_type *to);
/* The layout an operand must have so that broadcasting it (dims as in BROADCAST) costs nothing; 0:
 * none does. Every dim in `dims` has the size of the operand's. */
pm_layid pm_layout_broadcast_source(pm_graph *g, pm_layid result, const int64_t *dims, uint32_t n);

/* The same for an operand that has size 1 where the result has not: those dims are new as well. */
pm_layid pm_layout_broadcast_operand(pm_graph *g, pm_layid result, const int64_t *dims, uint32_t n,
                                     const pm_type *operand);

static inline const pm_layout *pm_layout_of(const pm_graph *g, pm_layid l) {
  return g->layouts.at[l];
}
static inline const pm_layout *pm_value_layout(const pm_graph *g, pm_val v) {
  return g->layouts.at[g->values.at[v].layout];
}
/* The value whose layout the arrays of an op share (layout rule MASKED), but for splats: the
 * result, or the first operand that is no splat; where all are splats, the first array. */
pm_val pm_masked_shared(const pm_graph *g, pm_opid op);
int64_t pm_layout_regs(const pm_layout *l); /* registers per lane; SPLAT: 1 */
/* contiguous run of the fastest register digit along dim; FLAT: along the linear index, any dim */
int64_t pm_layout_vector(const pm_layout *l, int dim);
/* index of register r of lane tid (0..127); false: padding (index then lies outside the extents) */
bool pm_layout_index(const pm_layout *l, int tid, int64_t r, int64_t index[PM_MAX_RANK]);
/* The same for many lanes and registers: the sum of the parts of (tid, 0) and of (0, r) is where
 * pm_layout_place finds the index. */
void pm_layout_part(const pm_layout *l, int tid, int64_t r, int64_t part[PM_MAX_RANK]);
bool pm_layout_place(const pm_layout *l, int64_t index[PM_MAX_RANK]);
bool pm_layout_is_padded(const pm_layout *l);  /* any padding at all */
bool pm_layout_is_strided(const pm_layout *l); /* WG_STRIDED of its vector */
bool pm_layout_is_replicated(const pm_layout *l);
/* Does each lane hold, in one register number for all lanes, what it needs for each register of
 * `to`? Then map[r] is that register of `from` (-1: padding in every lane), and a conversion moves
 * nothing between lanes. Of one shape; map has pm_layout_regs(to) words; scratch memory from `a`.
 */
bool pm_layout_register_map(pm_arena *a, const pm_layout *from, const pm_layout *to, int32_t *map);
const char *pm_layout_digits(pm_arena *a, const pm_layout *l); /* "splat", "strided(4)", digits */
pm_layid pm_layout_by_digits(pm_graph *g, const char *text, size_t n, const pm_type *array);
pm_layid pm_layout_intern(pm_graph *g, const pm_layout *l); /* canonical form first */

#endif
