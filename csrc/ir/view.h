/* Where the elements of a ref value are: the chain of view ops resolved to one base.
 *
 * Base: a kernel argument (GMEM), an ALLOC_SMEM, an ALLOC_ACC or an ALLOC_BARRIER. The physical
 * order of an SMEM allocation follows from its transforms. With tiling (t0, t1) on the last two
 * logical dims (..., M, N) it is
 *
 *     [..., N / t1, M, t1]     then the swizzle on the byte address
 *
 * that is, column chunks outermost, so that any number of rows of one chunk is one plain 2-D TMA
 * box, whatever N and wherever the slice starts (JAX's Pallas has [M/t0, N/t1, t0, t1]; users
 * cannot observe the order). A tiling of more dims has rows and columns of several dims: the rows
 * end with the last tile above 1 before t1, the columns are the dims after it. (8, 1, t) on (A, B,
 * C) is [B, C / t, A, t], and (1, 8, t) is [C / t, A, B, t], so dims with tile 1 can be merged with
 * the next tiled one. Other allocations are row-major. A swizzle of sw bytes moves byte address a,
 * which is absolute, with every allocation aligned to 1024, to
 *
 *     a ^ (((a >> 7) & (sw / 16 - 1)) << 4)
 *
 * An element with view index i is at  offset + sum over view dims of at(dim, i[dim])  elements,
 * where at(dim, i) = tile ? i / tile * outer + i % tile * inner : i * inner. */
#ifndef PM_VIEW_H
#define PM_VIEW_H

#include "ir.h"

enum { PM_MAX_TERMS = 24 };

/* value of a dynamic start times `mul`, divided by `div` first (provably exact) */
typedef struct pm_term {
  pm_val val;
  int64_t mul, div;
} pm_term;

typedef struct pm_view_dim {
  int64_t size;         /* logical extent in the view */
  int64_t tile;         /* 0: none */
  int64_t outer, inner; /* strides in elements */
  int64_t given;        /* the user's tile along it, 0: not tiled; errors speak of it */
  int64_t step;         /* index units of base_dim from one element to the next */
  uint32_t extent; /* sizes.h: it is whole, and has this size at run time; `size` is the most */
  int8_t base_dim; /* the dimension of the base it runs along, -1: several (a reshape) */
} pm_view_dim;

typedef struct pm_view {
  pm_val base;
  pm_opid alloc; /* of an SMEM, accumulator or barrier base; 0: kernel argument */
  int32_t param; /* index among the kernel's arguments, -1: none */
  uint8_t space, dtype, rank;
  uint8_t swizzle; /* bytes, 0: none */
  pm_view_dim dim[PM_MAX_RANK];
  /* SMEM of another block of the cluster: the one whose coordinate on axis cluster_dim is
   * cluster_val and whose others are the caller's. 0 (and dim -1): the block's own. */
  pm_val cluster_val;
  int8_t cluster_dim;
  /* GMEM or a semaphore of another device: its number in the mesh, 0: this one's. all_devices: of
   * all of them at once. */
  pm_val device_val;
  bool all_devices;
  /* An access by array indices: the element also lies at(dim, its index) for each of them. Then the
   * view's own dims are those of the access; one that no dim of the ref goes along has stride 0. */
  uint8_t n_index;
  int64_t offset; /* static part, elements */
  uint32_t n_terms;
  /* GMEM: start of the view along each dim of the base, for bounds and TMA coordinates. Valid
   * unless `reshaped`. Along base dim d the start is start[d] + sum of the terms of d (mul in index
   * units). The dims of a reshaped view become dims of the base where it was inside of that for
   * sure; `shifted`: then index 0 of all of them is not the first element of the argument. */
  bool reshaped, shifted;
  uint8_t base_rank;
  int64_t base_shape[PM_MAX_RANK], base_stride[PM_MAX_RANK], start[PM_MAX_RANK];
  uint32_t base_extent[PM_MAX_RANK]; /* sizes.h: base_shape is the least it may be; 0: it is that */
  uint32_t n_start_terms;
  /* Of these arrays as many elements are set as the n_ above say. */
  struct {
    pm_val val;
    pm_view_dim dim;
  } index[PM_MAX_RANK];
  pm_term term[PM_MAX_TERMS]; /* dynamic part: offset += val / div * mul */
  struct {
    pm_val val;
    int64_t mul;
    uint8_t dim;
  } start_term[PM_MAX_TERMS];
} pm_view;

/* index units of base_dim from the first element to the end of the last */
static inline int64_t pm_view_extent(const pm_view_dim *d) { return (d->size - 1) * d->step + 1; }

/* Resolve. `physical` false: ignore transforms, everything row-major (the interpreter's memory, and
 * checks before inference). Errors: views that the transforms do not allow, such as slices that are
 * not aligned to tiles. */
pm_code pm_view_of(const pm_graph *g, pm_val ref, bool physical, pm_view *out, pm_err *err);
/* Of the ref of an op, with its array indices if it is a masked one. */
pm_code pm_view_of_access(const pm_graph *g, pm_opid op, bool physical, pm_view *out, pm_err *err);
/* The value at the root of the chain of views: a kernel argument or the result of an allocation. */
pm_val pm_view_base(const pm_graph *g, pm_val ref);
/* The ALLOC_SMEM at that root; 0: the ref is elsewhere. */
pm_opid pm_view_smem(const pm_graph *g, pm_val ref);
/* The CLUSTER_REF in the chain of views; 0: none, the memory is the block's own. */
pm_opid pm_view_cluster(const pm_graph *g, pm_val ref);
/* The DEVICE_REF or MULTICAST_REF in the chain of views; 0: none, the memory is this device's. */
pm_opid pm_view_device(const pm_graph *g, pm_val ref);
/* Check the tiling and swizzle of an ALLOC_SMEM against its shape and dtype. */
pm_code pm_check_transforms(const pm_graph *g, pm_opid alloc, pm_err *err);

/* affine.c: indices that are a start plus a count along each dim; false: they are not. */
typedef struct pm_affine {
  int64_t coef[PM_MAX_RANK], constant;
  uint32_t n;
  struct {
    pm_val val;
    int64_t mul;
  } term[8];
} pm_affine;
bool pm_affine_of(const pm_graph *g, pm_val v, pm_affine *out);

/* Largest d that provably divides the whole offset, in elements; 0: the offset is 0. */
int64_t pm_view_divisor(const pm_graph *g, const pm_view *v);
/* Provable bounds of the start along one dim of the base; false: none known, or reshaped. */
bool pm_view_start_range(const pm_graph *g, const pm_view *v, uint32_t dim, int64_t *lo,
                         int64_t *hi);
/* Is every element of the view provably inside the base? False for reshaped views. */
bool pm_view_in_bounds(const pm_graph *g, const pm_view *v);

#endif
