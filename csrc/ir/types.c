/* Types and the type rules of ops.def: one function for each name in its `type` column.
 *
 * A rule reads a pm_typing (operands, attribute words, the given type) and either sets the type of
 * the single result or fails with a message for the user. The builder calls it before the op
 * exists, the verifier on the finished op with the result's type as `given`. So a rule alone
 * determines which ops are legal. Operand kinds (the letters of the `operands` column) and the
 * ranges of attributes are checked before it. */
#include <inttypes.h>

#include "access.h"
#include "mma.h"
#include "tmem.h"
#include "typing.h"
#include "view.h"

enum { MAX_BARRIERS = 32, MAX_ARRIVALS = (1 << 20) - 1 };

/* ---- pointwise ---------------------------------------------------------------------------- */

/* The shape of the result: that of the operands with dimensions, which agree. */
static pm_code common_shape(const pm_typing *t, pm_type *out) {
  const pm_type *shape = type_in(t, 0);
  for (uint32_t k = 1; k < t->n_in; k++) {
    const pm_type *other = type_in(t, k);
    if (!other->rank || same_shape(shape, other)) continue;
    if (shape->rank) {
      FAIL(TYPE, "%s got incompatible shapes for broadcasting: %s, %s", name(t),
           show_shape(t, shape), show_shape(t, other));
    }
    shape = other;
  }
  *out = *shape;
  return PM_OK;
}

static pm_code equal_dtypes(const pm_typing *t, uint32_t first) {
  for (uint32_t k = first + 1; k < t->n_in; k++) {
    if (type_in(t, k)->dtype != type_in(t, first)->dtype) {
      FAIL(TYPE, "%s requires arguments to have the same dtypes, got %s and %s", name(t),
           pm_dtypes[type_in(t, first)->dtype].text, pm_dtypes[type_in(t, k)->dtype].text);
    }
  }
  return PM_OK;
}

static pm_code pm_type_same(const pm_typing *t, pm_type *out) {
  pm_code rc = equal_dtypes(t, 0);
  return rc ? rc : common_shape(t, out);
}

static pm_code pm_type_multiple_of(const pm_typing *t, pm_type *out) {
  if (!pm_is_int(type_in(t, 0)->dtype)) {
    FAIL(TYPE, "multiple_of: x is %s, an integer scalar is needed", show_in(t, 0));
  }
  if (word(t, PM_ATTR_MULTIPLE) < 1) {
    FAIL(VALUE, "multiple_of: values is %" PRId64 ", at least 1 is needed",
         word(t, PM_ATTR_MULTIPLE));
  }
  return pm_type_same(t, out);
}

static pm_code pointwise(const pm_typing *t, pm_type *out, bool accepted, const char *accepts) {
  if (!accepted) {
    FAIL(TYPE, "%s does not accept dtype %s; it accepts %s", name(t),
         pm_dtypes[type_in(t, 0)->dtype].text, accepts);
  }
  return pm_type_same(t, out);
}

static pm_code pm_type_bits(const pm_typing *t, pm_type *out) {
  return pointwise(t, out, !pm_is_float(type_in(t, 0)->dtype), "bool and integer dtypes");
}

static pm_code pm_type_integer(const pm_typing *t, pm_type *out) {
  return pointwise(t, out, pm_is_int(type_in(t, 0)->dtype), "integer dtypes");
}

static pm_code pm_type_float(const pm_typing *t, pm_type *out) {
  return pointwise(t, out, pm_is_float(type_in(t, 0)->dtype), "floating-point dtypes");
}

static pm_code pm_type_number(const pm_typing *t, pm_type *out) {
  return pointwise(t, out, type_in(t, 0)->dtype != PM_BOOL, "integer and floating-point dtypes");
}

static pm_code pm_type_compare(const pm_typing *t, pm_type *out) {
  pm_code rc = pm_type_same(t, out);
  out->dtype = PM_BOOL;
  return rc;
}

static pm_code pm_type_select(const pm_typing *t, pm_type *out) {
  if (type_in(t, 0)->dtype != PM_BOOL) {
    FAIL(TYPE, "select: the predicate is %s, a bool array is needed", show_in(t, 0));
  }
  pm_code rc = equal_dtypes(t, 1);
  if (!rc) rc = common_shape(t, out);
  out->dtype = type_in(t, 1)->dtype;
  return rc;
}

static pm_code pm_type_convert(const pm_typing *t, pm_type *out) {
  pm_code rc = need_given(t, PM_ARRAY);
  if (rc) return rc;
  *out = *type_in(t, 0);
  out->dtype = t->given->dtype;
  return PM_OK;
}

static pm_code pm_type_bitcast(const pm_typing *t, pm_type *out) {
  pm_code rc = pm_type_convert(t, out);
  if (rc) return rc;
  pm_dtype from = type_in(t, 0)->dtype, to = out->dtype;
  if (pm_dtypes[from].bits != pm_dtypes[to].bits || (from == PM_BOOL) != (to == PM_BOOL)) {
    FAIL(TYPE, "bitcast: %s to %s; both dtypes must have the same width, bool only goes to bool",
         pm_dtypes[from].text, pm_dtypes[to].text);
  }
  return PM_OK;
}

/* ---- shape -------------------------------------------------------------------------------- */

/* `dims` names dimensions of a type of this rank, in increasing order. */
static pm_code increasing(const pm_typing *t, const int64_t *dims, uint32_t n, int rank) {
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] < 0 || dims[k] >= rank || (k && dims[k] <= dims[k - 1])) {
      FAIL(VALUE, "%s: dimension %" PRId64 " of dims; they must increase strictly and be below %d",
           name(t), dims[k], rank);
    }
  }
  return PM_OK;
}

static pm_code pm_type_broadcast(const pm_typing *t, pm_type *out) {
  pm_code rc = need_given(t, PM_ARRAY);
  if (rc) return rc;
  const pm_type *from = type_in(t, 0), *to = t->given;
  uint32_t n;
  const int64_t *dims = list_of(t, PM_ATTR_DIMS, &n);
  if (n != from->rank) {
    FAIL(VALUE, "broadcast: %u dims for an operand of rank %d", n, from->rank);
  }
  if ((rc = increasing(t, dims, n, to->rank))) return rc;
  for (uint32_t k = 0; k < n; k++) {
    if (from->dim[k] != 1 && from->dim[k] != to->dim[dims[k]]) {
      FAIL(TYPE,
           "broadcast: shape %s cannot become %s: dimension %u is %" PRId64 ", not 1 or %" PRId64,
           show_shape(t, from), show_shape(t, to), k, from->dim[k], to->dim[dims[k]]);
    }
  }
  *out = *to;
  out->dtype = from->dtype;
  return PM_OK;
}

static pm_code pm_type_reshape(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  pm_code rc = need_given(t, from->kind);
  if (rc) return rc;
  if (pm_type_size(from) != pm_type_size(t->given)) {
    FAIL(TYPE, "%s: %s to %s; the number of elements must stay", name(t), show_shape(t, from),
         show_shape(t, t->given));
  }
  *out = *t->given;
  out->dtype = from->dtype;
  out->space = from->space;
  return PM_OK;
}

/* What holds two elements of a small dtype; PM_BOOL: there is no such thing. */
static pm_dtype pair_dtype(pm_dtype d) {
  return pm_dtypes[d].bits == 4 ? PM_U8 : pm_dtypes[d].bits == 2 ? PM_UINT4 : PM_BOOL;
}

static pm_code pm_type_unpack(const pm_typing *t, pm_type *out) {
  pm_code rc = need_given(t, PM_ARRAY);
  if (rc) return rc;
  const pm_type *from = type_in(t, 0);
  pm_type want = *from;
  want.dtype = t->given->dtype;
  if (from->rank) want.dim[from->rank - 1] *= 2;
  if (!from->rank || from->dtype != pair_dtype(want.dtype) || !pm_type_equal(&want, t->given)) {
    FAIL(TYPE,
         "unpack: %s to %s; uint8 (..., n) becomes 4-bit elements (..., 2 * n), uint4 (..., n) "
         "2-bit ones",
         show_in(t, 0), pm_type_text(t->g->arena, t->given));
  }
  *out = want;
  return PM_OK;
}

static pm_code pm_type_pack(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  if (!from->rank || pair_dtype(from->dtype) == PM_BOOL || from->dim[from->rank - 1] % 2) {
    FAIL(TYPE, "pack: %s; an array of 2 or 4 bits with an even last dim is needed", show_in(t, 0));
  }
  *out = *from;
  out->dtype = (uint8_t)pair_dtype(from->dtype);
  out->dim[from->rank - 1] /= 2;
  return PM_OK;
}

static pm_code pm_type_slice(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  uint32_t n_starts, n;
  const int64_t *starts = list_of(t, PM_ATTR_STARTS, &n_starts);
  const int64_t *sizes = list_of(t, PM_ATTR_SIZES, &n);
  if (n != from->rank || n_starts != n) {
    FAIL(VALUE, "slice: %u starts and %u sizes for an array of rank %d", n_starts, n, from->rank);
  }
  *out = *from;
  for (uint32_t k = 0; k < n; k++) {
    if (starts[k] < 0 || sizes[k] < 1 || starts[k] > from->dim[k] ||
        sizes[k] > from->dim[k] - starts[k]) {
      FAIL(VALUE, "slice: %" PRId64 " elements from %" PRId64 " of dimension %u of %s", sizes[k],
           starts[k], k, show(t, from));
    }
    out->dim[k] = sizes[k];
  }
  return PM_OK;
}

/* Drop the dims listed (increasing). */
static void drop_dims(pm_type *type, const int64_t *dims, uint32_t n) {
  int rank = 0;
  for (int k = 0; k < type->rank; k++) {
    if (n && *dims == k) {
      dims++, n--;
    } else {
      type->dim[rank++] = type->dim[k];
    }
  }
  for (int k = rank; k < type->rank; k++) type->dim[k] = 0;
  type->rank = (uint8_t)rank;
}

static pm_code pm_type_reduce(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  uint32_t n;
  const int64_t *dims = list_of(t, PM_ATTR_DIMS, &n);
  const int64_t op = word(t, PM_ATTR_REDUCE);
  const bool logical = op >= PM_REDUCE_ANY;
  if (logical && from->dtype != PM_BOOL) {
    FAIL(TYPE, "reduce: %s does not accept dtype %s; it accepts bool",
         pm_enum_text(PM_ENUM_REDUCE, op), pm_dtypes[from->dtype].text);
  }
  if (!logical && from->dtype == PM_BOOL) {
    FAIL(TYPE, "reduce does not accept dtype bool; it accepts integer and floating-point dtypes");
  }
  if (!logical && pm_is_small_int(from->dtype))
    FAIL(NOT_IMPLEMENTED, "reduce of %s; convert it to int32 first", show(t, from));
  if (!n) FAIL(VALUE, "reduce: no dimensions are given");
  if (op == PM_REDUCE_ANY_IN_WARP && n != from->rank) {
    FAIL(VALUE, "reduce: any_in_warp is over all dimensions");
  }
  pm_code rc = increasing(t, dims, n, from->rank);
  if (rc) return rc;
  *out = *from;
  drop_dims(out, dims, n);
  return PM_OK;
}

static pm_code pm_type_concat(const pm_typing *t, pm_type *out) {
  if (!t->n_in) FAIL(VALUE, "concat: no arrays are given");
  const int64_t dim = word(t, PM_ATTR_DIM);
  const pm_type *first = type_in(t, 0);
  pm_code rc = equal_dtypes(t, 0);
  if (rc) return rc;
  if (dim < 0 || dim >= first->rank) {
    FAIL(VALUE, "concat: dimension %" PRId64 " of %s", dim, show(t, first));
  }
  *out = *first;
  for (uint32_t k = 1; k < t->n_in; k++) {
    pm_type like = *type_in(t, k);
    const int64_t n = like.dim[dim];
    like.dim[dim] = first->dim[dim];
    if (!same_shape(&like, first)) {
      FAIL(TYPE, "concat: shapes %s and %s differ in more than dimension %" PRId64,
           show_shape(t, first), show_shape(t, type_in(t, k)), dim);
    }
    out->dim[dim] += n;
  }
  return pm_type_check(t->g, out, "the result of concat", t->err);
}

static pm_code int_index(const pm_typing *t) {
  if (type_in(t, 1)->dtype == PM_I32) return PM_OK;
  FAIL(TYPE, "%s: the index is %s; int32 is needed", name(t), show_in(t, 1));
}

static pm_code pm_type_gather(const pm_typing *t, pm_type *out) {
  *out = *type_in(t, 1);
  out->dtype = type_in(t, 0)->dtype;
  return int_index(t);
}

static pm_code pm_type_scatter(const pm_typing *t, pm_type *out) {
  *out = *type_in(t, 0);
  if (!same_shape(type_in(t, 1), type_in(t, 2))) {
    FAIL(TYPE, "scatter: %s indices for values of shape %s", show_shape(t, type_in(t, 1)),
         show_shape(t, type_in(t, 2)));
  }
  if (type_in(t, 0)->dtype != type_in(t, 2)->dtype) {
    FAIL(TYPE, "scatter: values of %s into an array of %s", show_in(t, 2), show_in(t, 0));
  }
  return int_index(t);
}

static pm_code pm_type_scan(const pm_typing *t, pm_type *out) {
  const int64_t dim = word(t, PM_ATTR_DIM);
  *out = *type_in(t, 0);
  if (dim < 0 || dim >= out->rank)
    FAIL(VALUE, "scan: dimension %" PRId64 " of %s", dim, show(t, out));
  if (out->dtype == PM_BOOL || word(t, PM_ATTR_REDUCE) >= PM_REDUCE_ANY) {
    FAIL(TYPE, "scan: %s of %s; it is add, mul, max or min of numbers",
         pm_enum_text(PM_ENUM_REDUCE, word(t, PM_ATTR_REDUCE)), show(t, out));
  }
  if (pm_is_small_int(out->dtype))
    FAIL(NOT_IMPLEMENTED, "scan of %s; convert it to int32 first", show(t, out));
  return PM_OK;
}

/* ---- views -------------------------------------------------------------------------------- */

/* One dimension of an index. A static start of 0 may overhang in GMEM: copies clip there. */
static pm_code index_dim(const pm_typing *t, const pm_type *from, int k, int64_t start,
                         int64_t size, int64_t stride) {
  int64_t dim = from->dim[k], n = size == PM_DROPPED ? 1 : size;
  bool overhang = from->kind == PM_REF && from->space == PM_GMEM && size != PM_DROPPED;
  if (n < 1)
    FAIL(VALUE, "index: size %" PRId64 " along dimension %d, at least 1 is needed", size, k);
  if (stride < 1 || stride > INT32_MAX) {
    FAIL(VALUE, "index: stride %" PRId64 " along dimension %d, at least 1 is needed", stride, k);
  }
  if (stride > 1 && !pm_is_memory(from)) {
    FAIL(NOT_IMPLEMENTED,
         "index: stride %" PRId64
         " along dimension %d of %s; only refs in GMEM and SMEM have strided slices",
         stride, k, show(t, from));
  }
  n = (n - 1) * stride + 1;
  if (from->kind == PM_REF && from->space == PM_ACC) {
    if (size == PM_DROPPED || start == PM_DYNAMIC) {
      FAIL(NOT_IMPLEMENTED,
           "index: an accumulator takes static slices only; load it and slice the array instead");
    }
  }
  if (start == PM_DYNAMIC) {
    if (n <= dim || overhang) return PM_OK;
    FAIL(VALUE, "index: %" PRId64 " elements along dimension %d of %s", n, k, show(t, from));
  }
  if (start < 0) {
    FAIL(VALUE, "index: start %" PRId64 " along dimension %d of %s, at least 0 is needed", start, k,
         show(t, from));
  }
  if ((start == 0 && overhang) || (start < dim && n <= dim - start)) return PM_OK;
  if (size == PM_DROPPED) {
    FAIL(VALUE, "index: %" PRId64 " is out of bounds for dimension %d of %s", start, k,
         show(t, from));
  }
  FAIL(VALUE,
       "index: %" PRId64 " elements from %" PRId64 " are out of bounds for dimension %d of %s", n,
       start, k, show(t, from));
}

static pm_code pm_type_index(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  uint32_t n_starts, n_strides, n, dynamic = 0;
  const int64_t *starts = list_of(t, PM_ATTR_STARTS, &n_starts);
  const int64_t *sizes = list_of(t, PM_ATTR_SIZES, &n);
  const int64_t *strides = list_of(t, PM_ATTR_STRIDES, &n_strides);
  if (from->kind == PM_ARRAY) FAIL(TYPE, "index: %s is an array; slice it", show(t, from));
  if (n != from->rank || n_starts != n || (n_strides && n_strides != n)) {
    FAIL(VALUE, "index: %u starts and %u sizes for %s of rank %d", n_starts, n, show(t, from),
         from->rank);
  }
  *out = *from;
  int rank = 0;
  for (int k = 0; k < from->rank; k++) {
    pm_code rc = index_dim(t, from, k, starts[k], sizes[k], n_strides ? strides[k] : 1);
    if (rc) return rc;
    if (starts[k] == PM_DYNAMIC) dynamic++;
    if (sizes[k] != PM_DROPPED) out->dim[rank++] = sizes[k];
  }
  if (dynamic != t->n_in - 1) {
    FAIL(INTERNAL, "index: %u operands for %u dynamic starts", t->n_in - 1, dynamic);
  }
  if (from->kind == PM_REF && from->space == PM_TMEM) {
    const pm_code rc = pm_type_tmem_index(t);
    if (rc) return rc;
  }
  for (int k = rank; k < from->rank; k++) out->dim[k] = 0;
  out->rank = (uint8_t)rank;
  return PM_OK;
}

static pm_code pm_type_bitcast_ref(const pm_typing *t, pm_type *out) {
  pm_code rc = need_given(t, PM_REF);
  if (rc) return rc;
  const pm_dtype from = type_in(t, 0)->dtype, to = t->given->dtype;
  if (pm_dtypes[from].bits != pm_dtypes[to].bits) {
    FAIL(NOT_IMPLEMENTED,
         "bitcast: a ref of %s as %s; the dtypes must have the same width. Allocate a "
         "plgpu.RefUnion of both, or load and convert",
         pm_dtypes[from].text, pm_dtypes[to].text);
  }
  if ((from == PM_BOOL) != (to == PM_BOOL)) {
    FAIL(TYPE, "bitcast: %s to %s; bool only goes to bool", pm_dtypes[from].text,
         pm_dtypes[to].text);
  }
  *out = *type_in(t, 0);
  out->dtype = to;
  return PM_OK;
}

static pm_code pm_type_transpose(const pm_typing *t, pm_type *out) {
  const pm_type *from = type_in(t, 0);
  uint32_t n, seen = 0;
  const int64_t *dims = list_of(t, PM_ATTR_DIMS, &n);
  *out = *from;
  for (uint32_t k = 0; n == from->rank && k < n; k++) {
    if (dims[k] < 0 || dims[k] >= from->rank) break;
    out->dim[k] = from->dim[dims[k]];
    seen |= 1u << dims[k];
  }
  if (n != from->rank || seen != (1u << n) - 1) {
    FAIL(VALUE, "transpose: the permutation of %s must name each of its %d dimensions once",
         show(t, from), from->rank);
  }
  return PM_OK;
}

/* ---- clusters ----------------------------------------------------------------------------- */

/* Axes of the cluster, each at most once; `groups`: in groups that end with -1. */
static pm_code cluster_axes(const pm_typing *t, bool groups) {
  const pm_graph *g = t->g;
  uint32_t n, seen = 0, in_group = 0;
  const int64_t *list = list_of(t, PM_ATTR_CLUSTER, &n);
  for (uint32_t k = 0; k < n; k++) {
    if (groups && list[k] == -1) {
      if (!in_group) FAIL(VALUE, "%s: a group of collective axes is empty", name(t));
      in_group = 0;
      continue;
    }
    if (list[k] < 0 || list[k] >= g->n_cluster) {
      FAIL(VALUE, "%s: there is no cluster axis %" PRId64 ", the kernel has %u", name(t), list[k],
           g->n_cluster);
    }
    if (seen >> list[k] & 1) {
      FAIL(VALUE, "%s: cluster axis %" PRId64 " is named twice in collective_axes", name(t),
           list[k]);
    }
    seen |= 1u << list[k];
    in_group++;
  }
  if (groups && in_group) FAIL(INTERNAL, "%s: a group of axes does not end with -1", name(t));
  return PM_OK;
}

/* How many blocks signal one instance of a barrier with these groups of axes ([count, items]). */
static int64_t senders(const pm_graph *g, const int64_t *groups) {
  const int64_t limit = 1 << 20; /* the verifier sees the sizes later */
  int64_t n = 1, size = 1;
  for (int64_t k = 1; k <= groups[0]; k++) {
    if (groups[k] >= 0) {
      size = pm_min(limit, size * pm_max(1, pm_min(limit, g->cluster[groups[k]])));
      continue;
    }
    n += size - 1;
    size = 1;
  }
  return n;
}

int64_t pm_barrier_arrivals(const pm_graph *g, pm_opid alloc) {
  return *pm_attr(g, alloc, PM_ATTR_ARRIVALS) *
         senders(g, &g->lists.at[*pm_attr(g, alloc, PM_ATTR_CLUSTER)]);
}

static pm_code pm_type_cluster_ref(const pm_typing *t, pm_type *out) {
  const pm_graph *g = t->g;
  const int64_t dim = word(t, PM_ATTR_DIM);
  pm_scalar c;
  if (dim < 0 || dim >= g->n_cluster) {
    FAIL(VALUE, "cluster_ref: there is no cluster axis %" PRId64 ", the kernel has %u", dim,
         g->n_cluster);
  }
  if (pm_view_cluster(g, t->in[0])) {
    FAIL(NOT_IMPLEMENTED,
         "cluster_ref: the ref is in another block already; name one cluster axis only");
  }
  if (pm_constant(g, t->in[1], &c) && (c.i < 0 || c.i >= g->cluster[dim])) {
    FAIL(VALUE,
         "cluster_ref: index %" PRId64 " is out of bounds for a cluster axis of size %" PRId64, c.i,
         g->cluster[dim]);
  }
  *out = *type_in(t, 0);
  return PM_OK;
}

/* ---- given -------------------------------------------------------------------------------- */

static pm_code pm_type_constant(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_ARRAY, out);
  if (rc) return rc;
  const pm_dtype_info *d = &pm_dtypes[t->given->dtype];
  int64_t v = word(t, PM_ATTR_VALUE), lo = 0, hi = 1;
  if (d->class == PM_CLASS_FLOAT) return PM_OK;
  if (d->class == PM_CLASS_INT) {
    hi = (INT64_C(1) << (d->bits - 1)) - 1;
    lo = -hi - 1;
  } else if (d->class == PM_CLASS_UINT) {
    hi = (INT64_C(1) << d->bits) - 1;
  }
  if (v < lo || v > hi) FAIL(OVERFLOW, "%" PRId64 " is out of bounds for %s", v, d->text);
  return PM_OK;
}

static pm_code pm_type_iota(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_ARRAY, out);
  if (rc) return rc;
  int64_t dim = word(t, PM_ATTR_DIM);
  if (dim < 0 || dim >= t->given->rank) {
    FAIL(VALUE, "iota: dimension %" PRId64 " of shape %s", dim, show_shape(t, t->given));
  }
  if (t->given->dtype == PM_BOOL) FAIL(TYPE, "iota does not accept dtype bool");
  return PM_OK;
}

static pm_code pm_type_axis(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_ARRAY, out);
  if (rc) return rc;
  pm_type i32 = pm_scalar_type(PM_I32);
  if (!pm_type_equal(t->given, &i32)) {
    FAIL(INTERNAL, "%s: its type is int32[], not %s", name(t), show(t, t->given));
  }
  return PM_OK;
}

static pm_code pm_type_size_of_call(const pm_typing *t, pm_type *out) {
  pm_code rc = pm_type_axis(t, out);
  int64_t n = word(t, PM_ATTR_N);
  if (!rc && (n < 1 || n > pm_n_sizes(t->g))) {
    FAIL(VALUE, "%s: number %" PRId64 ", the graph has %u", name(t), n, pm_n_sizes(t->g));
  }
  return rc;
}

static pm_code pm_type_counter(const pm_typing *t, pm_type *out) {
  pm_code rc = pm_type_axis(t, out);
  int64_t n = word(t, PM_ATTR_N);
  if (!rc && (n < 0 || n >= PM_MAX_COUNTERS)) {
    FAIL(VALUE, "%s: counter %" PRId64 "; a kernel has counters 0 to %d", name(t), n,
         PM_MAX_COUNTERS - 1);
  }
  return rc;
}

static pm_code pm_type_alloc_smem(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_REF, out);
  if (rc) return rc;
  const pm_type *type = t->given;
  if (type->space != PM_SMEM) FAIL(VALUE, "alloc_smem: %s is not in SMEM", show(t, type));
  uint32_t n;
  const int64_t *tiling = list_of(t, PM_ATTR_TILING, &n);
  if (n > type->rank) {
    FAIL(VALUE, "alloc_smem: a tiling of %u dimensions for %s", n, show(t, type));
  }
  for (uint32_t k = 0; k < n; k++) {
    if (tiling[k] < 1 || type->dim[type->rank - n + k] % tiling[k]) {
      FAIL(VALUE, "alloc_smem: tile %" PRId64 " does not divide dimension %u of %s", tiling[k],
           type->rank - n + k, show(t, type));
    }
  }
  const int64_t *overlay = list_of(t, PM_ATTR_UNION, &n);
  if (n && (n != 2 || overlay[0] < 1 || overlay[1] < 0)) {
    FAIL(INTERNAL, "alloc_smem: attribute union is [number from 1, group]");
  }
  int64_t swizzle = word(t, PM_ATTR_SWIZZLE);
  if (swizzle && swizzle != 32 && swizzle != 64 && swizzle != 128) {
    FAIL(VALUE, "alloc_smem: swizzle %" PRId64 "; it is 32, 64 or 128 bytes", swizzle);
  }
  return PM_OK;
}

static pm_code pm_type_alloc_barrier(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_BARRIER, out);
  if (rc) return rc;
  int64_t arrivals = word(t, PM_ATTR_ARRIVALS);
  if (arrivals < 1) {
    FAIL(VALUE, "Barrier: num_arrivals is %" PRId64 ", at least 1 is needed", arrivals);
  }
  if ((rc = cluster_axes(t, true))) return rc;
  if (word(t, PM_ATTR_LEADER) && t->g->lists.at[word(t, PM_ATTR_CLUSTER)] != 2) {
    FAIL(NOT_IMPLEMENTED, "ClusterBarrier: leader_tracked needs one cluster axis, not grouped");
  }
  int64_t of_phase = senders(t->g, &t->g->lists.at[word(t, PM_ATTR_CLUSTER)]);
  if (arrivals > MAX_ARRIVALS / of_phase) {
    FAIL(VALUE, "Barrier: num_arrivals is %" PRId64 "; at most %" PRId64 " are accepted", arrivals,
         MAX_ARRIVALS / of_phase);
  }
  if (pm_type_size(t->given) > MAX_BARRIERS) {
    FAIL(NOT_IMPLEMENTED,
         "Barrier: %" PRId64 " barriers in one allocation; at most %d, make several",
         pm_type_size(t->given), MAX_BARRIERS);
  }
  return PM_OK;
}

static pm_code pm_type_alloc_acc(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_REF, out);
  if (rc) return rc;
  const pm_type *type = t->given;
  if (type->space != PM_ACC || type->rank != 2) {
    FAIL(VALUE, "ACC: %s; an accumulator has shape (m, n)", show(t, type));
  }
  if (type->dim[0] % 64 || type->dim[1] % 8) {
    FAIL(VALUE, "ACC: shape %s; m must be a multiple of 64 and n of 8", show_shape(t, type));
  }
  if (type->dtype != PM_F32 && type->dtype != PM_F16 && type->dtype != PM_I32) {
    FAIL(VALUE, "ACC: dtype %s; float32, float16 and int32 are accepted",
         pm_dtypes[type->dtype].text);
  }
  if (t->n_in && (!same_shape(type_in(t, 0), type) || type_in(t, 0)->dtype != type->dtype)) {
    FAIL(VALUE, "ACC: the initial value is %s, the accumulator %s", show_in(t, 0), show(t, type));
  }
  return PM_OK;
}

static pm_code semaphores(const pm_typing *t, pm_space space, int64_t first, pm_type *out) {
  pm_code rc = given(t, PM_SEMAPHORE, out);
  if (rc) return rc;
  if (t->given->space != space || t->given->dtype != PM_I32 || first < 0) {
    FAIL(INTERNAL, "%s: its type is %s", name(t), show(t, t->given));
  }
  if (pm_type_size(t->given) > PM_MAX_SEMAPHORES - pm_min(first, PM_MAX_SEMAPHORES)) {
    FAIL(VALUE, "SemaphoreType.REGULAR: a kernel has at most %d semaphores, not %" PRId64,
         PM_MAX_SEMAPHORES, first + pm_type_size(t->given));
  }
  return PM_OK;
}

static pm_code pm_type_alloc_semaphore(const pm_typing *t, pm_type *out) {
  return semaphores(t, PM_SMEM, 0, out);
}

static pm_code pm_type_global_semaphore(const pm_typing *t, pm_type *out) {
  return semaphores(t, PM_GMEM, word(t, PM_ATTR_N), out);
}

/* ---- memory ------------------------------------------------------------------------------- */

static pm_code pm_type_acc_store(const pm_typing *t, pm_type *out) {
  const pm_opid def = t->g->values.at[t->in[0]].def;
  const pm_code rc = pm_type_store(t, out);
  if (rc || t->g->ops.at[def].code != PM_OP_INDEX) return rc;
  FAIL(NOT_IMPLEMENTED, "storing to a part of an accumulator; store to all of it");
}

/* What a masked op accesses: the shape of the ref or of the array indices. */
static pm_code accessed(const pm_typing *t, pm_type *out) {
  uint32_t n;
  const int64_t *dims = list_of(t, PM_ATTR_DIMS, &n);
  const uint32_t first = pm_n_beside(word(t, PM_ATTR_ATOMIC));
  const pm_type *ref = type_in(t, 0);
  const pm_code rc = pm_one_device(t, 0, "the ref");
  if (rc) return rc;
  *out = *ref;
  out->kind = PM_ARRAY;
  out->space = PM_REGS;
  if (t->n_in < first || (t->n_in > first) != (n > 0) || (n && n != ref->rank)) {
    FAIL(INTERNAL, "%s: %u operands and %u dims", name(t), t->n_in, n);
  }
  if (!n) return PM_OK;
  const pm_type *shape = type_in(t, first);
  out->rank = shape->rank;
  memcpy(out->dim, shape->dim, sizeof out->dim);
  for (uint32_t k = first; k < t->n_in; k++) {
    if (type_in(t, k)->dtype != PM_I32 || !same_shape(shape, type_in(t, k))) {
      FAIL(INTERNAL, "%s: index %u is %s", name(t), k - first, show_in(t, k));
    }
  }
  for (uint32_t d = 0; d < n; d++) {
    const bool along = dims[d] >= 0 && dims[d] < out->rank && out->dim[dims[d]] == ref->dim[d];
    const bool by_index = dims[d] < 0 && -1 - dims[d] < t->n_in - first;
    if (!along && !by_index) FAIL(INTERNAL, "%s: dimension %u of the ref", name(t), d);
  }
  return PM_OK;
}

/* Operand k goes with the elements accessed: their shape or rank 0. */
static pm_code beside_ref(const pm_typing *t, uint32_t k, const char *what) {
  const pm_type *x = type_in(t, k);
  pm_type shape;
  pm_code rc = accessed(t, &shape);
  if (rc) return rc;
  if (!x->rank || same_shape(&shape, x)) return PM_OK;
  FAIL(VALUE, "%s: %s has shape %s, the ref %s; they must be equal", name(t), what,
       show_shape(t, x), show_shape(t, &shape));
}

static pm_code like_ref(const pm_typing *t, uint32_t k, const char *what) {
  const pm_type *ref = type_in(t, 0), *x = type_in(t, k);
  if (x->dtype != ref->dtype) {
    FAIL(VALUE, "%s: %s has dtype %s, the ref %s; they must be equal", name(t), what,
         pm_dtypes[x->dtype].text, pm_dtypes[ref->dtype].text);
  }
  return beside_ref(t, k, what);
}

static pm_code is_mask(const pm_typing *t, uint32_t k) {
  if (type_in(t, k)->dtype != PM_BOOL) {
    FAIL(TYPE, "%s: the mask is %s, a bool array is needed", name(t), show_in(t, k));
  }
  return beside_ref(t, k, "the mask");
}

static pm_code pm_type_masked_load(const pm_typing *t, pm_type *out) {
  pm_code rc = is_mask(t, 1);
  if (!rc) rc = like_ref(t, 2, "other");
  return rc ? rc : accessed(t, out);
}

static pm_code pm_type_masked_store(const pm_typing *t, pm_type *out) {
  pm_code rc = is_mask(t, 2);
  (void)out;
  return rc ? rc : like_ref(t, 1, "the value");
}

/* What the hardware has, and for halves a loop around compare-and-swap. */
static bool has_atomic(int64_t kind, pm_dtype d) {
  if (d == PM_I32 || d == PM_U32) return true;
  if (kind == PM_ATOMIC_XCHG || kind == PM_ATOMIC_CAS) return pm_dtypes[d].bits == 32;
  if (d == PM_F32) return kind == PM_ATOMIC_ADD;
  const bool minmax = kind == PM_ATOMIC_MIN || kind == PM_ATOMIC_MAX;
  return (d == PM_F16 || d == PM_BF16) && (kind == PM_ATOMIC_ADD || minmax);
}

static pm_code pm_type_atomic(const pm_typing *t, pm_type *out) {
  const int64_t kind = word(t, PM_ATTR_ATOMIC);
  const pm_dtype d = type_in(t, 0)->dtype;
  const char *what = pm_enum_text(PM_ENUM_ATOMIC, kind);
  if (!has_atomic(kind, d)) {
    FAIL(NOT_IMPLEMENTED,
         "atomic_%s on %s; available are all of them on int32 and uint32, add, xchg and cas on "
         "float32, add, max and min on float16 and bfloat16",
         what, pm_dtypes[d].text);
  }
  pm_code rc = like_ref(t, 1, "the value");
  if (!rc) rc = is_mask(t, 2);
  if (!rc && kind == PM_ATOMIC_CAS) rc = like_ref(t, 3, "the value to compare with");
  return rc ? rc : accessed(t, out);
}

int pm_combine_atomic(int64_t combine, pm_dtype d, pm_dtype *as) {
  const bool minmax = combine >= PM_COMBINE_UMIN && combine <= PM_COMBINE_SMAX;
  *as = d == PM_I32 ? PM_U32 : d;
  if (minmax && combine >= PM_COMBINE_SMIN) *as = PM_I32;
  switch (combine) {
    case PM_COMBINE_ADD: return PM_ATOMIC_ADD;
    case PM_COMBINE_MIN:
    case PM_COMBINE_UMIN:
    case PM_COMBINE_SMIN: return PM_ATOMIC_MIN;
    case PM_COMBINE_MAX:
    case PM_COMBINE_UMAX:
    case PM_COMBINE_SMAX: return PM_ATOMIC_MAX;
    case PM_COMBINE_AND: return PM_ATOMIC_AND;
    case PM_COMBINE_OR: return PM_ATOMIC_OR;
    case PM_COMBINE_XOR: return PM_ATOMIC_XOR;
    default: return -1;
  }
}

static pm_code check_combine(const pm_typing *t) {
  const int64_t combine = word(t, PM_ATTR_COMBINE);
  const pm_dtype d = type_in(t, 0)->dtype;
  const bool half = d == PM_F16 || d == PM_BF16, whole = d == PM_I32 || d == PM_U32;
  const char *fits = "int32 and uint32";
  bool ok = whole;
  if (combine == PM_COMBINE_NONE) return PM_OK;
  if (combine == PM_COMBINE_ADD) {
    fits = "float16, bfloat16, float32, int32 and uint32";
    ok = whole || half || d == PM_F32;
  } else if (combine == PM_COMBINE_MIN || combine == PM_COMBINE_MAX) {
    fits = "float16 and bfloat16 (of integers: umin, umax, smin, smax)";
    ok = half;
  }
  if (ok) return PM_OK;
  FAIL(VALUE, "%s: reduction_op '%s' of %s; it is for %s", name(t),
       pm_enum_text(PM_ENUM_COMBINE, combine), pm_dtypes[d].text, fits);
}

/* A copy of a pair of blocks, which the first of them tracks. */
static pm_code leader_copy(const pm_typing *t) {
  const pm_graph *g = t->g;
  int64_t blocks = 1;
  for (uint32_t k = 0; k < g->n_cluster; k++) blocks *= g->cluster[k];
  if (blocks == 2 && g->cluster[g->n_cluster - 1] == 2) return PM_OK;
  FAIL(NOT_IMPLEMENTED,
       "%s: leader_tracked in a cluster of %" PRId64
       " blocks; a cluster of two along its last axis is needed",
       name(t), blocks);
}

static pm_code same_source(const pm_typing *t) {
  const pm_type *src = type_in(t, 0), *dst = type_in(t, 1);
  if (src->dtype != dst->dtype) {
    FAIL(VALUE, "%s: src has dtype %s, dst %s; they must be equal", name(t),
         pm_dtypes[src->dtype].text, pm_dtypes[dst->dtype].text);
  }
  if (!same_shape(src, dst)) {
    FAIL(VALUE, "%s: src has shape %s, dst %s; they must be equal", name(t), show_shape(t, src),
         show_shape(t, dst));
  }
  return PM_OK;
}

/* `fixed`: operands besides the predicate */
static pm_code predicated(const pm_typing *t, uint32_t fixed) {
  if (word(t, PM_ATTR_PREDICATED) == (int64_t)(t->n_in - fixed)) return PM_OK;
  FAIL(INTERNAL, "%s: attribute predicated does not fit the operands", name(t));
}

static pm_code pm_type_copy(const pm_typing *t, pm_type *out) {
  const uint32_t fixed = t->code == PM_OP_COPY_G2S ? 3 : 2;
  (void)out;
  pm_code rc = same_source(t);
  if (!rc) rc = predicated(t, fixed);
  if (!rc) rc = pm_own_block(t, fixed == 3, fixed == 3 ? "dst" : "src");
  if (!rc && (fixed == 3 || word(t, PM_ATTR_COMBINE))) rc = pm_one_device(t, fixed == 2, "GMEM");
  if (rc || fixed == 2) return rc ? rc : check_combine(t);
  if ((rc = pm_single_barrier(t, 2)) || (rc = cluster_axes(t, false))) return rc;
  if (pm_is_cluster_barrier(t->g, t->in[2])) {
    FAIL(VALUE, "%s: the barrier is a ClusterBarrier; copies complete on a Barrier", name(t));
  }
  if ((rc = pm_flavour(t, 2, false))) return rc;
  return word(t, PM_ATTR_LEADER) ? leader_copy(t) : PM_OK;
}

static pm_code pm_type_cp_async(const pm_typing *t, pm_type *out) {
  (void)out;
  pm_code rc = same_source(t);
  if (!rc) rc = predicated(t, 2);
  if (!rc) rc = pm_own_block(t, 1, "dst");
  return rc ? rc : pm_one_device(t, 0, "GMEM");
}

static pm_code pm_type_prefetch(const pm_typing *t, pm_type *out) {
  (void)out;
  return pm_one_device(t, 0, "the ref");
}

static pm_code pm_type_discard(const pm_typing *t, pm_type *out) {
  pm_view v;
  (void)out;
  if (pm_view_device(t->g, t->in[0])) {
    FAIL(VALUE, "discard: the memory is another device's; discard it there");
  }
  if (pm_view_of(t->g, t->in[0], false, &v, t->err)) return t->err->code;
  for (int k = 0; k < v.rank; k++) {
    if (!v.dim[k].extent) continue;
    FAIL(NOT_IMPLEMENTED,
         "discard: dimension %d has a size that is known when the kernel is called; "
         "discard slices of sizes that are ints",
         k);
  }
  return PM_OK;
}

static pm_code pm_type_barrier(const pm_typing *t, pm_type *out) {
  (void)out;
  return pm_single_barrier(t, 0);
}

static pm_code pm_type_barrier_test(const pm_typing *t, pm_type *out) {
  if (pm_is_cluster_barrier(t->g, t->in[0])) {
    FAIL(NOT_IMPLEMENTED, "barrier_test: a ClusterBarrier cannot be tested; use barrier_wait");
  }
  *out = pm_scalar_type(PM_BOOL);
  return pm_single_barrier(t, 0);
}

static pm_code pm_type_semaphore(const pm_typing *t, pm_type *out) {
  const pm_type *s = type_in(t, 0);
  (void)out;
  if (t->code != PM_OP_SIGNAL && pm_view_device(t->g, t->in[0])) {
    FAIL(VALUE,
         "%s: the semaphore is another device's; only its own device waits for it and reads it",
         name(t));
  }
  if (pm_type_size(s) == 1) return PM_OK;
  FAIL(VALUE, "%s: the semaphore is an array of %" PRId64 " semaphores; index it with .at[i]",
       name(t), pm_type_size(s));
}

static pm_code pm_type_semaphore_read(const pm_typing *t, pm_type *out) {
  *out = pm_scalar_type(PM_I32);
  return pm_type_semaphore(t, out);
}

static pm_code pm_type_broadcast_tile(const pm_typing *t, pm_type *out) {
  const pm_type *to = type_in(t, 1);
  (void)out;
  if (to->kind != PM_REF || to->rank || to->dtype != PM_I32) {
    FAIL(VALUE, "broadcast_tile: it writes to %s; one int32 in SMEM is needed", show(t, to));
  }
  pm_code rc = pm_own_block(t, 1, "the ref");
  if (!rc) rc = pm_single_barrier(t, 2);
  if (rc) return rc;
  if (pm_is_cluster_barrier(t->g, t->in[2])) {
    FAIL(VALUE, "broadcast_tile: the barrier is a ClusterBarrier; it completes on a Barrier");
  }
  return pm_flavour(t, 2, false);
}

static pm_code pm_type_async_store(const pm_typing *t, pm_type *out) {
  const pm_type *to = type_in(t, 0), *x = type_in(t, 1);
  const int64_t combine = word(t, PM_ATTR_COMBINE);
  (void)out;
  if (!pm_view_cluster(t->g, t->in[0])) FAIL(INTERNAL, "async_store_smem: no cluster_ref");
  if (x->dtype != to->dtype || !same_shape(x, to)) {
    FAIL(TYPE, "async_store_smem: src is %s, ref %s; shapes and dtypes must be equal", show(t, x),
         show(t, to));
  }
  if (!x->rank) FAIL(NOT_IMPLEMENTED, "async_store_smem: scalars; store an array");
  if (pm_dtypes[x->dtype].bits < 8) {
    FAIL(NOT_IMPLEMENTED, "async_store_smem: %s, whose elements share bytes",
         pm_dtypes[x->dtype].text);
  }
  const bool bits32 = x->dtype == PM_I32 || x->dtype == PM_U32;
  if (combine && !bits32) {
    FAIL(NOT_IMPLEMENTED,
         "async_store_smem: atomic '%s' of %s; add, max, min, and, or, xor of int32 and uint32 are "
         "available",
         pm_enum_text(PM_ENUM_COMBINE, combine), pm_dtypes[x->dtype].text);
  }
  if (pm_is_cluster_barrier(t->g, t->in[2])) {
    FAIL(VALUE, "async_store_smem: the barrier is a ClusterBarrier; a Barrier is needed");
  }
  const pm_code rc = pm_flavour(t, 2, false);
  return rc ? rc : pm_single_barrier(t, 2);
}

/* ---- products of the tensor cores ----------------------------------------------------------- */

static pm_code product_dtypes(const pm_typing *t, const pm_mma **out) {
  const pm_dtype acc = type_in(t, 0)->dtype, a = type_in(t, 1)->dtype, b = type_in(t, 2)->dtype;
  const char *takes = NULL;
  bool known = false;
  *out = pm_mma_find((pm_opcode)t->code, a, b, acc);
  if (*out) return PM_OK;
  for (uint32_t k = 0; k < pm_mma_count; k++) {
    const pm_mma *p = &pm_mmas[k];
    if (p->op != t->code) continue;
    known |= p->a == a || p->b == b;
    if (p->a != a || p->b != b) continue;
    if (!takes) takes = pm_dtypes[p->acc].text;
  }
  if (a != b && !takes) {
    pm_fail(t->err, t->code == PM_OP_WGMMA ? PM_E_VALUE : PM_E_TYPE,
            "%s: a has dtype %s, b %s; they must be equal%s", name(t), pm_dtypes[a].text,
            pm_dtypes[b].text,
            t->code == PM_OP_WGMMA ? " (float8_e4m3fn and float8_e5m2 may mix)" : "");
    return t->err->code;
  }
  if (!known) {
    FAIL(NOT_IMPLEMENTED, "%s: operands of dtype %s; available are %s", name(t), pm_dtypes[a].text,
         pm_operand_dtypes(t));
  }
  FAIL(NOT_IMPLEMENTED, "%s: %s operands into a %s accumulator; use a %s accumulator", name(t),
       pm_dtypes[a].text, pm_dtypes[acc].text, takes);
}

static pm_code product_shapes(const pm_typing *t) {
  const pm_type *acc = type_in(t, 0), *a = type_in(t, 1), *b = type_in(t, 2);
  if (acc->rank != 2 || a->rank != 2 || b->rank != 2 || a->dim[0] != acc->dim[0] ||
      b->dim[1] != acc->dim[1] || a->dim[1] != b->dim[0]) {
    FAIL(VALUE, "%s: acc has shape %s, a %s, b %s; they must be (M, N), (M, K), (K, N)", name(t),
         show_shape(t, acc), show_shape(t, a), show_shape(t, b));
  }
  const pm_mma *first = pm_mmas; /* all rows of an op have the same limits */
  while (first->op != t->code) first++;
  if (acc->dim[0] % 64 || acc->dim[1] % 8 || (first->most_n && acc->dim[1] > first->most_n)) {
    FAIL(VALUE, "%s: acc has shape %s; M must be a multiple of 64, N a multiple of 8%s", name(t),
         show_shape(t, acc),
         first->most_n ? pm_printf(t->g->arena, " and at most %d", first->most_n) : "");
  }
  return PM_OK;
}

static pm_code product_depth(const pm_typing *t, const pm_mma *m) {
  const pm_type *a = type_in(t, 1);
  if (a->dim[1] % m->k == 0) return PM_OK;
  FAIL(VALUE, "%s: K is %" PRId64 "; it must be a multiple of %d for %s", name(t), a->dim[1], m->k,
       pm_dtypes[a->dtype].text);
}

static pm_code pm_type_wgmma(const pm_typing *t, pm_type *out) {
  const pm_type *acc = type_in(t, 0), *a = type_in(t, 1), *b = type_in(t, 2);
  (void)out;
  if (a->kind == PM_BARRIER) FAIL(TYPE, "wgmma: a is a barrier; an SMEM ref or an array is needed");
  if (b->kind != PM_REF) FAIL(TYPE, "wgmma: b is %s; an SMEM ref is needed", show(t, b));
  if ((a->kind == PM_REF && a->space != PM_SMEM) || b->space != PM_SMEM) {
    FAIL(VALUE, "wgmma: a is %s, b is %s; refs must be in SMEM", show(t, a), show(t, b));
  }
  pm_code rc = pm_own_block(t, 1, "a");
  if (!rc) rc = pm_own_block(t, 2, "b");
  const pm_mma *m = NULL;
  if (!rc) rc = product_shapes(t);
  if (!rc) rc = product_dtypes(t, &m);
  if (!rc) rc = product_depth(t, m);
  if (rc) return rc;
  const int64_t n = acc->dim[1];
  if (n % m->n && n != 8 && n != 24) {
    FAIL(VALUE, "wgmma: acc has shape %s; for %s operands N must be a multiple of %d, or 8, or 24",
         show_shape(t, acc), pm_dtypes[a->dtype].text, m->n);
  }
  return PM_OK;
}

static pm_code pm_type_mma(const pm_typing *t, pm_type *out) {
  const pm_mma *m = NULL;
  pm_code rc = product_shapes(t);
  if (!rc) rc = product_dtypes(t, &m);
  if (!rc) rc = product_depth(t, m);
  if (!rc) *out = *type_in(t, 0);
  return rc;
}

static pm_code pm_type_none(const pm_typing *t, pm_type *out) {
  (void)t, (void)out;
  return PM_OK;
}

static pm_code pm_type_registers(const pm_typing *t, pm_type *out) {
  const int64_t n = word(t, PM_ATTR_N);
  (void)out;
  if (n >= 24 && n <= 256 && n % 8 == 0) return PM_OK;
  FAIL(VALUE, "set_max_registers: n is %" PRId64 "; a multiple of 8 from 24 to 256 is needed", n);
}

static pm_code pm_type_groups(const pm_typing *t, pm_type *out) {
  const int64_t n = word(t, PM_ATTR_N);
  (void)out;
  if (n >= 0 && n <= 4096) return PM_OK;
  FAIL(VALUE, "%s: n is %" PRId64 "; 0 to 4096 is needed", name(t), n);
}

static pm_code pm_type_section(const pm_typing *t, pm_type *out) {
  const int64_t n = word(t, PM_ATTR_N);
  (void)out;
  if (n >= 2 && n <= t->g->n_threads) return PM_OK;
  FAIL(VALUE, "ordered_section: %" PRId64 " threads take turns, the kernel has %u", n,
       t->g->n_threads);
}

static pm_code pm_type_named(const pm_typing *t, pm_type *out) {
  const int64_t n = word(t, PM_ATTR_N);
  (void)out;
  if (n >= 32 && n % 32 == 0 && n <= 128 * (int64_t)t->g->n_threads) return PM_OK;
  FAIL(VALUE,
       "%s: %" PRId64
       " lanes; a multiple of 32 (a warp) up to %u (a thread is 128, the kernel "
       "has %u) is needed",
       name(t), n, 128 * t->g->n_threads, t->g->n_threads);
}

static pm_code pm_type_yield(const pm_typing *t, pm_type *out) {
  (void)out;
  for (uint32_t k = 0; k < t->n_in; k++) {
    if (type_in(t, k)->kind == PM_ARRAY) continue;
    FAIL(VALUE, "a region cannot return %s, only arrays; close over refs and barriers instead",
         show_in(t, k));
  }
  return PM_OK;
}

static pm_code pm_type_print_layout(const pm_typing *t, pm_type *out) {
  const pm_type *x = type_in(t, 0);
  (void)out;
  const bool on_chip = x->kind == PM_REF && (x->space == PM_SMEM || x->space == PM_TMEM);
  if (x->kind == PM_ARRAY || on_chip) return PM_OK;
  FAIL(VALUE, "print_layout: x is %s; an array or a ref in SMEM or TMEM is needed", show(t, x));
}

static pm_code pm_type_print(const pm_typing *t, pm_type *out) {
  (void)out;
  for (uint32_t k = 0; k < t->n_in; k++) {
    if (t->n_in == 1 || !type_in(t, k)->rank) continue;
    FAIL(NOT_IMPLEMENTED,
         "debug_print: argument %u is the array %s; an array is printed alone, scalars together", k,
         show_in(t, k));
  }
  return PM_OK;
}

static pm_code pm_type_inline(const pm_typing *t, pm_type *out) {
  for (uint32_t k = 0; k < t->n_in; k++) {
    const pm_type *x = type_in(t, k);
    if (x->kind == PM_REF && x->space == PM_ACC) {
      FAIL(VALUE, "inline_cuda: argument %u is an accumulator; read it first: acc[...]", k);
    }
    if (x->kind == PM_REF && x->space == PM_TMEM) {
      FAIL(NOT_IMPLEMENTED,
           "inline_cuda: argument %u is in TMEM; load it first: plgpu.async_load_tmem", k);
    }
    if (x->kind == PM_SEMAPHORE) {
      FAIL(VALUE, "inline_cuda: argument %u is a semaphore; arrays, refs and barriers are accepted",
           k);
    }
    if (x->kind == PM_BARRIER && pm_type_size(x) != 1) return pm_single_barrier(t, k);
  }
  if (t->given && t->given->rank && !word(t, PM_ATTR_LAYOUT)) {
    FAIL(INTERNAL, "inline_cuda: the layout of its result must be given");
  }
  return given(t, PM_ARRAY, out);
}

/* ---- control ------------------------------------------------------------------------------ */

static pm_code pm_type_control(const pm_typing *t, pm_type *out) {
  (void)out;
  uint32_t first = t->code == PM_OP_FOR ? 2 : 0;
  for (uint32_t k = first; k < t->n_in; k++) {
    if (type_in(t, k)->kind == PM_ARRAY) continue;
    FAIL(TYPE, "%s: carry %u is %s; only arrays are carried, close over refs and barriers instead",
         name(t), k - first, show_in(t, k));
  }
  if (word(t, PM_ATTR_UNROLL) < 0) {
    FAIL(VALUE, "unroll is %" PRId64 ", 0 or more is needed", word(t, PM_ATTR_UNROLL));
  }
  return PM_OK;
}

/* The first operand that is carried; n_in where nothing is. */
static uint32_t first_carry(const pm_op *o) {
  if (!pm_is_loop(o->code)) return o->n_in;
  return pm_has_index(o) ? 2 : 0;
}

uint32_t pm_region_args(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  return o->n_in - first_carry(o) + pm_has_index(o);
}

pm_type pm_region_arg_type(const pm_graph *g, pm_opid op, uint32_t arg) {
  const pm_op *o = pm_get(g, op);
  if (pm_has_index(o) && !arg) return pm_scalar_type(PM_I32);
  return *pm_typeof(g, pm_in(g, op, first_carry(o) + arg - pm_has_index(o)));
}

static pm_code check_carries(const pm_graph *g, pm_opid op, pm_opid yield, pm_err *err) {
  const pm_op *o = pm_get(g, op), *y = pm_get(g, yield);
  uint32_t first = first_carry(o);
  const char *fragment = pm_has_index(o) ? "body_fun output and input must have identical types"
                                         : "carry input and carry output must have equal types";
  if (y->n_in != o->n_in - first) {
    return pm_fail(err, PM_E_TYPE, "%s: %s, got %u values for %u carries", pm_op_name(o->code),
                   fragment, y->n_in, o->n_in - first);
  }
  for (uint32_t k = 0; k < y->n_in; k++) {
    const pm_type *in = pm_typeof(g, pm_in(g, op, first + k));
    const pm_type *out = pm_typeof(g, pm_in(g, yield, k));
    if (pm_type_equal(in, out)) continue;
    return pm_fail(err, PM_E_TYPE, "%s: %s, carry %u goes in as %s and comes out as %s",
                   pm_op_name(o->code), fragment, k, pm_type_text(g->arena, in),
                   pm_type_text(g->arena, out));
  }
  return PM_OK;
}

static pm_code check_condition(const pm_graph *g, pm_opid yield, pm_err *err) {
  pm_type want = pm_scalar_type(PM_BOOL);
  if (pm_get(g, yield)->n_in == 1 && pm_type_equal(pm_typeof(g, pm_in(g, yield, 0)), &want)) {
    return PM_OK;
  }
  return pm_fail(err, PM_E_TYPE, "while: the condition must return one bool scalar, got %s",
                 pm_get(g, yield)->n_in == 1
                     ? pm_type_text(g->arena, pm_typeof(g, pm_in(g, yield, 0)))
                     : "another number of values");
}

static pm_code check_branches(const pm_graph *g, pm_opid op, pm_err *err) {
  pm_opid first = pm_terminator(g, pm_region(g, op, 0));
  for (uint32_t r = 1; r < pm_get(g, op)->n_regions; r++) {
    pm_opid other = pm_terminator(g, pm_region(g, op, r));
    const char *text = pm_op_name(pm_get(g, op)->code);
    if (pm_get(g, first)->n_in != pm_get(g, other)->n_in) {
      return pm_fail(err, PM_E_TYPE,
                     "%s: branches must have equal output types, branch 0 returns %u values and "
                     "branch %u returns %u",
                     text, pm_get(g, first)->n_in, r, pm_get(g, other)->n_in);
    }
    for (uint32_t k = 0; k < pm_get(g, first)->n_in; k++) {
      const pm_type *a = pm_typeof(g, pm_in(g, first, k)), *b = pm_typeof(g, pm_in(g, other, k));
      if (pm_type_equal(a, b)) continue;
      return pm_fail(err, PM_E_TYPE,
                     "%s: branches must have equal output types, value %u is %s in branch 0 and %s "
                     "in branch %u",
                     text, k, pm_type_text(g->arena, a), pm_type_text(g->arena, b), r);
    }
  }
  return PM_OK;
}

pm_code pm_type_yields(const pm_graph *g, pm_opid op, pm_err *err) {
  const pm_op *o = pm_get(g, op);
  if (!pm_is_loop(o->code)) return check_branches(g, op, err);
  const bool tests = pm_is_condition(o, 0);
  pm_code rc = tests ? check_condition(g, pm_terminator(g, pm_region(g, op, 0)), err) : PM_OK;
  return rc ? rc : check_carries(g, op, pm_terminator(g, pm_region(g, op, tests)), err);
}

/* Where result k of a control op has its type from: its carries, or the yield of region 0. */
static pm_opid result_source(const pm_graph *g, pm_opid op, uint32_t *first) {
  const pm_op *o = pm_get(g, op);
  const bool loop = pm_is_loop(o->code);
  *first = loop ? first_carry(o) : 0;
  return loop ? op : pm_terminator(g, pm_region(g, op, 0));
}

uint32_t pm_control_results(const pm_graph *g, pm_opid op) {
  uint32_t first;
  pm_opid source = result_source(g, op, &first);
  return pm_get(g, source)->n_in - first;
}

pm_type pm_control_result_type(const pm_graph *g, pm_opid op, uint32_t k) {
  uint32_t first;
  pm_opid source = result_source(g, op, &first);
  return *pm_typeof(g, pm_in(g, source, first + k));
}

/* ---- operand kinds, attributes, dispatch -------------------------------------------------- */

static bool fits(char letter, const pm_type *t) {
  bool array = t->kind == PM_ARRAY, ref = t->kind == PM_REF;
  switch (letter) {
    case 'a': return array;
    case 's': return array && !t->rank;
    case 't':
    case 'i': return array && !t->rank && t->dtype == PM_I32;
    case 'p': return array && !t->rank && t->dtype == PM_BOOL;
    case 'r': return pm_is_memory(t);
    case 'g': return ref && t->space == PM_GMEM;
    case 'm': return ref && t->space == PM_SMEM;
    case 'x': return ref && t->space == PM_TMEM;
    case 'c': return ref && t->space == PM_ACC;
    case 'b': return t->kind == PM_BARRIER;
    case 'h': return t->kind == PM_SEMAPHORE;
    default: return letter == 'v';
  }
}

static const char *letter_text(char letter) {
  static const char *const texts[] = {
      "aan array",        "sa scalar",      "ian int32 scalar",
      "tan int32 scalar", "pa bool scalar", "ra ref in GMEM or SMEM",
      "ga ref in GMEM",   "ma ref in SMEM", "can accumulator ref (ACC)",
      "ba barrier",       "ha semaphore",   "va value",
      "xa ref in TMEM",
  };
  for (size_t k = 0; k < PM_COUNT(texts); k++) {
    if (texts[k][0] == letter) return texts[k] + 1;
  }
  return "?";
}

/* What users call the operand, where the op is one they call. */
static const char *operand_text(const pm_typing *t, uint32_t k) {
  const char *name = pm_ops[t->code].names;
  for (uint32_t i = k; i && *name; i--) name += strcspn(name, " ") + (strchr(name, ' ') != NULL);
  const int n = (int)strcspn(name, " ");
  return n ? pm_printf(t->g->arena, "%.*s", n, name) : pm_printf(t->g->arena, "operand %u", k);
}

static pm_code wrong_operand(const pm_typing *t, uint32_t k, char letter) {
  const pm_type *type = type_in(t, k);
  bool array = strchr("asitp", letter) != NULL;
  bool space = type->kind == PM_REF && (strchr("rgmx", letter));
  return pm_fail(t->err, space ? PM_E_VALUE : PM_E_TYPE, "%s: %s is %s; %s is needed%s", name(t),
                 operand_text(t, k), show(t, type), letter_text(letter),
                 array && type->kind == PM_REF ? " (load the ref first)" : "");
}

static pm_code check_operands(const pm_typing *t) {
  const pm_op_lookup *op = &pm_op_lookups[t->code];
  uint32_t k = 0;
  for (uint32_t i = 0; i < op->n_operands; i++) {
    const pm_operand *o = &op->operand[i];
    uint32_t n = o->repeated ? t->n_in - k : o->optional ? t->n_in > k : 1;
    if (t->n_in - k < n) FAIL(INTERNAL, "%s: %u operands are too few", name(t), t->n_in);
    for (; n; n--, k++) {
      const pm_type *x = type_in(t, k);
      if (!fits(o->letter, x)) return wrong_operand(t, k, o->letter);
      if (x->kind == PM_REF && x->space == PM_TMEM && !pm_tmem_alloc(t->g, t->in[k])) {
        FAIL(VALUE, "%s: %s is a TMEM ref that is not allocated", name(t), operand_text(t, k));
      }
    }
  }
  if (k != t->n_in) FAIL(INTERNAL, "%s: %u operands are too many", name(t), t->n_in);
  return PM_OK;
}

static bool attr_ok(const pm_graph *g, uint8_t form, int64_t word) {
  switch (form) {
    case PM_FORM_LIST:
      return word >= 0 && word < g->lists.n && g->lists.at[word] >= 0 &&
             g->lists.at[word] < g->lists.n - word;
    case PM_FORM_STR: return word >= 0 && word < g->strings.n;
    case PM_FORM_LAYOUT: return word >= 0 && word < g->layouts.n;
    case PM_FORM_INT:
    case PM_FORM_BITS: return true;
    default: return pm_enum_text(form - PM_FORM_ENUM_AXIS, word);
  }
}

static pm_code check_attrs(const pm_typing *t) {
  const pm_op_info *info = &pm_ops[t->code];
  for (int k = 0; k < info->n_attrs; k++) {
    if (attr_ok(t->g, pm_attr_forms[info->attrs[k]], t->attr[k])) continue;
    FAIL(INTERNAL, "%s: attribute %s is out of range", name(t), pm_attr_text[info->attrs[k]]);
  }
  return PM_OK;
}

typedef pm_code (*pm_rule)(const pm_typing *, pm_type *);

static const pm_rule rules[PM_OP_COUNT] = {
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  [PM_OP_##id] = pm_type_##type,
#include "ops.def"
#undef PM_OP
};

pm_code pm_type_op(const pm_typing *t, pm_type *out) {
  *out = (pm_type){0};
  pm_code rc = check_operands(t);
  if (!rc) rc = check_attrs(t);
  return rc ? rc : rules[t->code](t, out);
}
