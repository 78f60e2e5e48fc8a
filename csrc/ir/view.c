/* Views: the chain of INDEX, TRANSPOSE_REF, RESHAPE_REF, BITCAST_REF, SEMAPHORE_OF, CLUSTER_REF,
 * DEVICE_REF and MULTICAST_REF ops above a ref, resolved to its base.
 *
 * The base defines one stride (or a tile, an outer and an inner stride) for each dimension,
 * row-major except for operands whose array is strided. The ops of the chain are then applied from
 * the base outwards. Each changes the list of dimensions and the offset:
 *   index      the offset grows by the starts; dimensions shrink, are strided or removed
 *   transpose  dimensions are permuted
 *   reshape    runs of dimensions are merged and split where their strides allow it
 *   bitcast    the dtype changes, its width does not
 *
 * Invariants:
 * - A tiled dimension of a view starts at a multiple of its tile, so that element i is at i / tile
 *   * outer + i % tile * inner after the offset. Every op checks this, by pm_divisor if the start
 *   is dynamic.
 * - A term is never constant: constant starts go into the static offset.
 * - Unless `reshaped`, start and start_term say where the view starts in the base, and each view
 *   dimension with base_dim >= 0 runs along that single dimension; those with -1 have size 1. */
#include "view.h"

#include <stdio.h>

enum { MAX_CHAIN = 64 };

/* ---- transforms of an allocation ---------------------------------------------------------------
 */

pm_code pm_check_transforms(const pm_graph *g, pm_opid alloc, pm_err *err) {
  const pm_op *op = pm_get(g, alloc);
  const pm_type *t = pm_typeof(g, op->out);
  const int64_t bits = pm_dtypes[t->dtype].bits;
  uint32_t n;
  const int64_t *tile = pm_attr_list(g, alloc, PM_ATTR_TILING, &n);
  const int64_t swizzle = *pm_attr(g, alloc, PM_ATTR_SWIZZLE);
  pm_code code = PM_OK;
  if (n > t->rank) {
    code =
        pm_fail(err, PM_E_VALUE,
                "TilingTransform: a tiling of %u dimensions on an SMEM ref of rank %u", n, t->rank);
  }
  for (uint32_t k = 0; !code && k < n; k++) {
    const uint32_t d = t->rank - n + k;
    if (tile[k] < 1 || t->dim[d] % tile[k]) {
      code = pm_fail(
          err, PM_E_VALUE,
          "TilingTransform: dimension %u of size %lld is not divisible by the tile size %lld", d,
          (long long)t->dim[d], (long long)tile[k]);
    }
  }
  if (!code && swizzle && swizzle != 32 && swizzle != 64 && swizzle != 128) {
    code =
        pm_fail(err, PM_E_VALUE, "SwizzleTransform: swizzle %lld is not one of 32, 64, 128 (bytes)",
                (long long)swizzle);
  }
  if (!code && swizzle) {
    const int64_t minor = n ? tile[n - 1] : t->rank ? t->dim[t->rank - 1] : 0;
    if (minor * bits != swizzle * 8) {
      code = pm_fail(
          err, PM_E_VALUE,
          "SwizzleTransform: a swizzle of %lld bytes on %s needs a last physical dimension of "
          "%lld elements, got %lld; tile with (8, %lld) first",
          (long long)swizzle, pm_dtypes[t->dtype].text, (long long)(swizzle * 8 / bits),
          (long long)minor, (long long)(swizzle * 8 / bits));
    }
  }
  if (code) pm_err_op(err, g, alloc);
  return code;
}

/* ---- the base -------------------------------------------------------------------------------- */

static void row_major(const pm_type *t, pm_view *v) {
  int64_t stride = 1;
  for (int k = t->rank - 1; k >= 0; k--) {
    v->dim[k] = (pm_view_dim){.size = t->dim[k], .inner = stride, .step = 1, .base_dim = (int8_t)k};
    v->base_shape[k] = t->dim[k];
    v->base_stride[k] = stride;
    stride *= t->dim[k];
  }
}

static void open_extents(const pm_graph *g, uint32_t argument, pm_view *v) {
  for (uint32_t k = 0; k < v->rank; k++) {
    const uint32_t size = pm_extent_of(g, argument, k);
    if (!size) continue;
    v->dim[k].extent = v->base_extent[k] = size;
    v->base_shape[k] = g->sizes.at[size].least;
  }
}

static void take_strides(const int64_t *stride, pm_view *v) {
  for (uint32_t k = 0; k < v->rank; k++) v->dim[k].inner = v->base_stride[k] = stride[k];
}

/* [..., columns, rows, last tile]: a one-dimensional tiling is row-major already */
static void apply_tiling(const pm_graph *g, pm_view *v) {
  uint32_t n, n_rows = 0;
  const int64_t *tile = pm_attr_list(g, v->alloc, PM_ATTR_TILING, &n);
  pm_view_dim *d = &v->dim[v->rank - n];
  for (uint32_t k = 0; k < n; k++) {
    d[k].given = tile[k];
    if (k + 1 < n && tile[k] > 1) n_rows = k + 1;
  }
  if (n_rows) {
    int64_t stride = tile[n - 1];
    for (uint32_t k = n_rows; k-- > 0; stride *= d[k].size) d[k].inner = stride;
    d[n - 1].tile = tile[n - 1];
    d[n - 1].outer = stride;
    stride *= d[n - 1].size / tile[n - 1];
    for (uint32_t k = n - 1; k-- > n_rows; stride *= d[k].size) d[k].inner = stride;
  }
  v->swizzle = (uint8_t)*pm_attr(g, v->alloc, PM_ATTR_SWIZZLE);
}

static pm_code resolve_base(const pm_graph *g, pm_val ref, bool physical, pm_view *v, pm_err *err) {
  const pm_value *val = pm_value_of(g, ref);
  const pm_type *t = &val->type;
  memset(v, 0, offsetof(pm_view, index)); /* the rest is long, and counted */
  v->base = ref;
  v->alloc = val->def;
  v->param = -1;
  v->cluster_dim = -1;
  v->space = t->space;
  v->dtype = t->dtype;
  v->rank = v->base_rank = t->rank;
  row_major(t, v);
  if (!val->def) {
    if (val->block != 1) {
      return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                     "a ref that a loop or a branch carries is not available; use it from outside");
    }
    v->param = (int32_t)val->index;
    open_extents(g, val->index, v);
    if (g->strides && val->index < g->n_operands && g->strides[val->index])
      take_strides(g->strides[val->index], v);
    return PM_OK;
  }
  const pm_op_info *info = &pm_ops[pm_get(g, val->def)->code];
  if (!(info->effects & E_ALLOC) && t->kind != PM_SEMAPHORE) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED, "a ref that comes from the op %s is not available",
                   info->text);
  }
  if (!physical || t->kind != PM_REF || t->space != PM_SMEM) return PM_OK;
  if (pm_check_transforms(g, val->def, err)) return err->code;
  apply_tiling(g, v);
  return PM_OK;
}

/* ---- the ops --------------------------------------------------------------------------------- */

static bool add_term(pm_view *v, pm_val val, int64_t mul, int64_t div) {
  for (uint32_t k = 0; k < v->n_terms; k++) {
    if (v->term[k].val == val && v->term[k].div == div) {
      v->term[k].mul += mul;
      return true;
    }
  }
  if (v->n_terms == PM_MAX_TERMS) return false;
  v->term[v->n_terms++] = (pm_term){val, mul, div};
  return true;
}

static bool add_start_term(pm_view *v, pm_val val, int64_t mul, uint8_t dim) {
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    if (v->start_term[k].val == val && v->start_term[k].dim == dim) {
      v->start_term[k].mul += mul;
      return true;
    }
  }
  if (v->n_start_terms == PM_MAX_TERMS) return false;
  v->start_term[v->n_start_terms].val = val;
  v->start_term[v->n_start_terms].mul = mul;
  v->start_term[v->n_start_terms++].dim = dim;
  return true;
}

/* val 0: the start is static */
static pm_code check_tile(const pm_graph *g, uint32_t k, const pm_view_dim *d, pm_val val,
                          int64_t start, int64_t size, int64_t stride, pm_err *err) {
  if (stride > 1) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "Strided slices not implemented along dimension %u, which is tiled by %lld; "
                   "load whole tiles, or allocate the ref without transforms",
                   k, (long long)d->tile);
  }
  if (size == PM_DROPPED) {
    return pm_fail(
        err, PM_E_TYPE,
        "dimension %u is tiled by %lld and cannot be indexed by an integer; take a slice of "
        "whole tiles",
        k, (long long)d->tile);
  }
  if (size % d->tile || (!val && start % d->tile)) {
    return pm_fail(
        err, PM_E_VALUE,
        "a slice of a tiled dimension must start at and have a size divisible by the tile "
        "size: dimension %u has tiles of %lld, got %s%lld and size %lld",
        k, (long long)d->tile, val ? "a dynamic start, " : "start ", (long long)start,
        (long long)size);
  }
  if (val && pm_divisor(g, val) % d->tile) {
    return pm_fail(
        err, PM_E_VALUE,
        "Failed to infer a possible set of layouts: the dynamic start of a slice along "
        "dimension %u, which is tiled by %lld, is not provably divisible by the tile size; "
        "wrap it in pl.multiple_of(x, %lld)",
        k, (long long)d->tile, (long long)d->tile);
  }
  return PM_OK;
}

static pm_code apply_index(const pm_graph *g, pm_opid op, pm_view *v, pm_err *err) {
  uint32_t n, n_strides, next = 1, kept = 0;
  const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(g, op, PM_ATTR_SIZES, &n);
  const int64_t *strides = pm_attr_list(g, op, PM_ATTR_STRIDES, &n_strides);
  for (uint32_t k = 0; k < v->rank; k++) {
    pm_view_dim d = v->dim[k];
    const int64_t stride = n_strides ? strides[k] : 1;
    pm_val val = starts[k] == PM_DYNAMIC ? pm_in(g, op, next++) : 0;
    pm_scalar constant;
    int64_t start = val ? 0 : starts[k];
    if (val && pm_constant(g, val, &constant)) {
      start = constant.i;
      val = 0;
    }
    if (d.tile && check_tile(g, k, &d, val, start, sizes[k], stride, err)) return err->code;
    const int64_t div = d.tile ? d.tile : 1, mul = d.tile ? d.outer : d.inner;
    const bool known = d.base_dim >= 0 && !v->reshaped;
    bool room = true;
    v->offset += start / div * mul;
    if (val) room = add_term(v, val, mul, div);
    if (known) {
      v->start[d.base_dim] += start * d.step;
      if (val) room = add_start_term(v, val, d.step, (uint8_t)d.base_dim) && room;
    } else if (val || start) {
      v->reshaped = true;
    }
    if (!room) {
      return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                     "more than %d dynamic starts in one chain of slices", PM_MAX_TERMS);
    }
    if (sizes[k] == PM_DROPPED) continue;
    if (val || start || sizes[k] != d.size || stride != 1) d.extent = 0;
    d.size = sizes[k];
    d.inner *= stride;
    d.step *= stride;
    v->dim[kept++] = d;
  }
  v->rank = (uint8_t)kept;
  return PM_OK;
}

static void apply_transpose(const pm_graph *g, pm_opid op, pm_view *v) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  pm_view_dim old[PM_MAX_RANK];
  memcpy(old, v->dim, sizeof old);
  for (uint32_t k = 0; k < n; k++) v->dim[k] = old[dims[k]];
}

/* Make one dimension of a slower and a faster one; false: no stride and tile would fit. */
static bool fold_pair(const pm_view_dim *slow, pm_view_dim *fast) {
  const bool whole = !fast->tile || fast->tile == fast->size, split = slow->tile < slow->size;
  if (!(slow->tile && split) && fast->tile &&
      slow->inner == fast->outer * (fast->size / fast->tile)) {
    /* more tiles */
  } else if (whole && slow->inner == fast->inner * fast->size) {
    fast->tile = slow->tile && split ? slow->tile * fast->size : 0;
    fast->outer = slow->outer;
  } else {
    return false;
  }
  fast->size *= slow->size;
  fast->given = slow->given > 1 ? slow->given * fast->given : fast->given;
  return true;
}

static pm_code fail_fold(const pm_view_dim *dims, uint32_t first, uint32_t n, pm_err *err) {
  char sizes[400], tiles[400];
  size_t a = 0, b = 0;
  bool tiled = true;
  for (uint32_t k = 0; k < n; k++) {
    const char *sep = !k ? "" : k + 1 < n ? ", " : " and ";
    a += (size_t)snprintf(sizes + a, sizeof sizes - a, "%s%u of size %lld", sep, first + k,
                          (long long)dims[k].size);
    b += (size_t)snprintf(tiles + b, sizeof tiles - b, "%s%lld", sep, (long long)dims[k].given);
    tiled &= dims[k].given != 0;
  }
  if (tiled) {
    return pm_fail(err, PM_E_VALUE,
                   "reshape: the dimensions %s, tiled by %s, cannot be folded: of tiled dimensions "
                   "that become one only the last may have a tile above 1. Reshape other "
                   "dimensions, or drop the tiling",
                   sizes, tiles);
  }
  return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                 "reshape: the dimensions %s (tiled by %s, 0: not tiled) do not lie one after the "
                 "other in memory and cannot be folded; load the view and reshape the array",
                 sizes, tiles);
}

/* Dimensions old[first .. first + n) of a view as one. */
static pm_code fold(const pm_view_dim *old, uint32_t first, uint32_t n, pm_view_dim *out,
                    pm_err *err) {
  *out = (pm_view_dim){.size = 1, .step = 1, .base_dim = -1};
  for (uint32_t k = first + n; k-- > first;) {
    if (old[k].size == 1) continue;
    if (out->size == 1) {
      *out = old[k];
    } else if (!fold_pair(&old[k], out)) {
      return fail_fold(&old[first], first, n, err);
    }
  }
  return PM_OK;
}

/* A dimension as several: (tiles.., at most one that is tiled itself, in the tile..). */
static pm_code unfold(const pm_view_dim *old, const int64_t *sizes, uint32_t m, pm_view_dim *out,
                      pm_err *err) {
  const int64_t tile = old->tile ? old->tile : old->size;
  int64_t inner = old->inner, outer = old->outer, left = tile; /* of the tile */
  for (uint32_t k = m; k-- > 0;) {
    const int64_t size = sizes[k];
    out[k] =
        (pm_view_dim){.size = size, .inner = left > 1 ? inner : outer, .step = 1, .base_dim = -1};
    if (left % size == 0) {
      inner *= size;
      left /= size;
    } else if (size % left == 0) {
      if (left > 1) out[k].tile = out[k].given = left, out[k].outer = outer;
      outer *= size / left;
      left = 1;
    } else {
      return pm_fail(
          err, PM_E_VALUE,
          "reshape: a dimension of size %lld that is tiled by %lld cannot be unfolded to "
          "a part of %lld that is no divisor or multiple of the tile; reshape other "
          "dimensions, or drop the tiling",
          (long long)old->size, (long long)tile, (long long)size);
    }
  }
  return PM_OK;
}

/* May the result of a reshape of this view be a base? Axes along which it has one index stay axes
 * (unless that is 0); along the others it must be inside for sure, and those give way to the dims
 * of the result. */
static bool may_rebase(const pm_graph *g, const pm_view *v, bool *stays) {
  if (v->space != PM_GMEM || v->reshaped) return false;
  for (uint32_t d = 0; d < v->base_rank; d++) {
    int64_t extent = 1, lo, hi;
    bool whole = false; /* of a size known at run time */
    for (uint32_t k = 0; k < v->rank; k++) {
      if (v->dim[k].base_dim != (int)d) continue;
      extent = pm_view_extent(&v->dim[k]);
      whole = v->dim[k].extent && v->dim[k].extent == v->base_extent[d];
    }
    const bool known = pm_view_start_range(g, v, d, &lo, &hi);
    stays[d] = extent == 1 && !(known && !lo && !hi);
    if (stays[d] || whole) continue;
    if (!known || lo < 0 || hi + extent > v->base_shape[d]) return false;
  }
  return true;
}

static void rebase(const pm_graph *g, pm_view *v, const bool *stays) {
  uint8_t axis[PM_MAX_RANK];
  uint32_t n = 0, terms = 0;
  for (uint32_t d = 0; d < v->base_rank; d++) {
    axis[d] = (uint8_t)n;
    if (!stays[d]) {
      v->shifted |= v->start[d] != 0;
      continue;
    }
    v->base_shape[n] = v->base_shape[d];
    v->base_stride[n] = v->base_stride[d];
    v->base_extent[n] = v->base_extent[d];
    v->start[n++] = v->start[d];
  }
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    v->shifted |= !stays[v->start_term[k].dim];
    if (!stays[v->start_term[k].dim]) continue;
    v->start_term[terms] = v->start_term[k];
    v->start_term[terms++].dim = axis[v->start_term[k].dim];
  }
  v->n_start_terms = terms;
  int64_t stride = 1;
  for (uint32_t k = v->rank; k-- > 0;) {
    const uint32_t extent = v->dim[k].extent;
    if (v->dim[k].size > 1) stride = v->dim[k].inner;
    v->base_extent[n + k] = extent;
    v->dim[k].base_dim = (int8_t)(n + k);
    v->dim[k].step = 1;
    v->base_shape[n + k] = extent ? g->sizes.at[extent].least : v->dim[k].size;
    v->base_stride[n + k] = stride;
    v->start[n + k] = 0;
    stride *= v->dim[k].size;
  }
  v->base_rank = (uint8_t)(n + v->rank);
  v->reshaped = false;
}

static uint32_t count(const bool *set, uint32_t n) {
  uint32_t k = 0;
  while (n-- > 0) k += set[n];
  return k;
}

/* Dimensions that are merged or split have static sizes. */
static pm_code check_whole(const pm_view *v, uint32_t from, uint32_t to, pm_err *err) {
  for (uint32_t k = from; k < to; k++) {
    if (!v->dim[k].extent) continue;
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "reshape: dimension %u has a size that is known at run time only (plgpu.dim) "
                   "and cannot be merged or split; slice it first, or give the argument that shape",
                   k);
  }
  return PM_OK;
}

static pm_code apply_reshape(const pm_graph *g, pm_opid op, pm_view *v, pm_err *err) {
  const pm_type *to = pm_typeof(g, pm_get(g, op)->out);
  bool stays[PM_MAX_RANK];
  const bool base = may_rebase(g, v, stays) && count(stays, v->base_rank) + to->rank <= PM_MAX_RANK;
  pm_view_dim out[PM_MAX_RANK];
  uint32_t i = 0, j = 0;
  while (i < v->rank || j < to->rank) {
    if (i < v->rank && v->dim[i].size == 1) {
      i++;
      continue;
    }
    if (j < to->rank && to->dim[j] == 1) {
      out[j++] = (pm_view_dim){.size = 1, .step = 1, .base_dim = -1};
      continue;
    }
    const uint32_t i0 = i, j0 = j;
    int64_t a = i < v->rank ? v->dim[i++].size : 1, b = j < to->rank ? to->dim[j++] : 1;
    while (a != b) {
      if (a < b && i < v->rank) {
        a *= v->dim[i++].size;
      } else if (b < a && j < to->rank) {
        b *= to->dim[j++];
      } else {
        return pm_fail(err, PM_E_VALUE, "reshape: the sizes of the ref and of the result differ");
      }
    }
    if (i - i0 == 1 && j - j0 == 1) {
      out[j0] = v->dim[i0];
      continue;
    }
    pm_view_dim whole;
    if (check_whole(v, i0, i, err)) return err->code;
    if (fold(v->dim, i0, i - i0, &whole, err) ||
        unfold(&whole, &to->dim[j0], j - j0, &out[j0], err))
      return err->code;
    v->reshaped = true;
  }
  memcpy(v->dim, out, sizeof out[0] * to->rank);
  v->rank = to->rank;
  if (base) rebase(g, v, stays);
  return PM_OK;
}

/* ---- the chain ------------------------------------------------------------------------------- */

static bool is_view(const pm_graph *g, pm_opid op) {
  return op && pm_makes_view(pm_get(g, op)->code);
}

pm_val pm_view_base(const pm_graph *g, pm_val ref) {
  while (is_view(g, pm_value_of(g, ref)->def)) ref = pm_in(g, pm_value_of(g, ref)->def, 0);
  return ref;
}

pm_opid pm_view_smem(const pm_graph *g, pm_val ref) {
  const pm_opid def = pm_value_of(g, pm_view_base(g, ref))->def;
  return def && pm_allocates(g, def, PM_SMEM) ? def : 0;
}

/* The first view above the base that has one of two codes; 0: none. */
static pm_opid find_view(const pm_graph *g, pm_val ref, int code, int other) {
  pm_opid op;
  while (is_view(g, op = pm_value_of(g, ref)->def)) {
    if (pm_get(g, op)->code == code || pm_get(g, op)->code == other) return op;
    ref = pm_in(g, op, 0);
  }
  return 0;
}

pm_opid pm_view_cluster(const pm_graph *g, pm_val ref) {
  return find_view(g, ref, PM_OP_CLUSTER_REF, PM_OP_CLUSTER_REF);
}

pm_opid pm_view_device(const pm_graph *g, pm_val ref) {
  return find_view(g, ref, PM_OP_DEVICE_REF, PM_OP_MULTICAST_REF);
}

pm_code pm_view_of(const pm_graph *g, pm_val ref, bool physical, pm_view *out, pm_err *err) {
  pm_opid chain[MAX_CHAIN], op;
  uint32_t n = 0;
  while (is_view(g, op = pm_value_of(g, ref)->def)) {
    if (n == MAX_CHAIN) {
      pm_fail(err, PM_E_NOT_IMPLEMENTED, "more than %d slices, transposes and reshapes of one ref",
              MAX_CHAIN);
      pm_err_op(err, g, op);
      return err->code;
    }
    chain[n++] = op;
    ref = pm_in(g, op, 0);
  }
  pm_code code = resolve_base(g, ref, physical, out, err);
  while (!code && n > 0) {
    op = chain[--n];
    switch (pm_get(g, op)->code) {
      case PM_OP_INDEX: code = apply_index(g, op, out, err); break;
      case PM_OP_TRANSPOSE_REF: apply_transpose(g, op, out); break;
      case PM_OP_BITCAST_REF: out->dtype = pm_typeof(g, pm_get(g, op)->out)->dtype; break;
      case PM_OP_CLUSTER_REF:
        out->cluster_val = pm_in(g, op, 1);
        out->cluster_dim = (int8_t)*pm_attr(g, op, PM_ATTR_DIM);
        break;
      case PM_OP_DEVICE_REF: out->device_val = pm_in(g, op, 1); break;
      case PM_OP_MULTICAST_REF: out->all_devices = true; break;
      case PM_OP_SEMAPHORE_OF: break;
      default: code = apply_reshape(g, op, out, err); break;
    }
    if (code) pm_err_op(err, g, op);
  }
  return code;
}

pm_code pm_view_of_access(const pm_graph *g, pm_opid op, bool physical, pm_view *out, pm_err *err) {
  const pm_op *o = pm_get(g, op);
  uint32_t n = 0;
  pm_code rc = pm_view_of(g, pm_in(g, op, 0), physical, out, err);
  if (rc) return rc;
  const int64_t *dims = pm_is_masked(o->code) ? pm_attr_list(g, op, PM_ATTR_DIMS, &n) : NULL;
  if (!n) return PM_OK;
  const uint32_t first = pm_n_beside(pm_atomic_of(g, op));
  const pm_type *shape = pm_typeof(g, pm_in(g, op, first));
  pm_view_dim along[PM_MAX_RANK];
  memset(along, 0, sizeof along);
  for (int k = 0; k < shape->rank; k++) along[k].size = shape->dim[k];
  for (uint32_t d = 0; d < n; d++) {
    if (dims[d] >= 0) {
      along[dims[d]] = out->dim[d];
      continue;
    }
    out->index[out->n_index].val = pm_in(g, op, first + (uint32_t)(-1 - dims[d]));
    out->index[out->n_index++].dim = out->dim[d];
  }
  memcpy(out->dim, along, sizeof along);
  out->rank = shape->rank;
  return PM_OK;
}

/* ---- what can be proved ---------------------------------------------------------------------- */

int64_t pm_view_divisor(const pm_graph *g, const pm_view *v) {
  int64_t d = v->offset;
  for (uint32_t k = 0; k < v->n_terms; k++) {
    const pm_term *t = &v->term[k];
    d = pm_gcd(d, pm_divisor(g, t->val) / t->div * t->mul);
  }
  return d < 0 ? -d : d;
}

bool pm_view_start_range(const pm_graph *g, const pm_view *v, uint32_t dim, int64_t *lo,
                         int64_t *hi) {
  if (v->reshaped) return false;
  *lo = *hi = v->start[dim];
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    int64_t a, b;
    if (v->start_term[k].dim != dim) continue;
    if (!pm_range(g, v->start_term[k].val, &a, &b)) return false;
    *lo += a * v->start_term[k].mul;
    *hi += b * v->start_term[k].mul;
  }
  return true;
}

/* Does the view begin so far before the end of a dim that is a size of the call? */
static bool ends_inside(const pm_graph *g, const pm_view *v, uint32_t dim, int64_t extent) {
  pm_val start = 0;
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    if (v->start_term[k].dim != dim) continue;
    if (start || v->start_term[k].mul != 1) return false;
    start = v->start_term[k].val;
  }
  const uint32_t size = v->base_extent[dim];
  return size && start && pm_ends_inside(g, start, size, extent + v->start[dim]);
}

bool pm_view_in_bounds(const pm_graph *g, const pm_view *v) {
  int64_t extent[PM_MAX_RANK], lo, hi;
  for (uint32_t d = 0; d < v->base_rank; d++) extent[d] = 1;
  for (uint32_t k = 0; k < v->rank; k++) {
    if (v->dim[k].base_dim >= 0) extent[v->dim[k].base_dim] = pm_view_extent(&v->dim[k]);
  }
  for (uint32_t d = 0; d < v->base_rank; d++) {
    if (!pm_view_start_range(g, v, d, &lo, &hi) || lo < 0) return false;
    if (hi + extent[d] > v->base_shape[d] && !ends_inside(g, v, d, extent[d])) return false;
  }
  return true;
}
