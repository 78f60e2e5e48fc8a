/* What type rules of several files share: checks of a type, of a barrier, of the block and the
 * device that an operand lies in, and the rules of LOAD and STORE, which other rules extend. */
#include "typing.h"

#include "mma.h"
#include "sizes.h"
#include "view.h"

enum { MAX_ARRAY = 1 << 24 };

pm_code pm_type_check(const pm_graph *g, const pm_type *t, const char *what, pm_err *err) {
  if (t->kind < PM_ARRAY || t->kind > PM_SEMAPHORE || t->dtype >= PM_DTYPE_COUNT ||
      t->space >= PM_SPACE_COUNT || t->rank > PM_MAX_RANK ||
      (t->kind == PM_REF) != (t->space != PM_REGS && t->kind < PM_BARRIER)) {
    return pm_fail(err, PM_E_INTERNAL, "%s has a malformed type", what);
  }
  int64_t n = 1, limit = t->kind == PM_ARRAY ? MAX_ARRAY : INT64_C(1) << 46;
  for (int k = 0; k < t->rank; k++) {
    if (t->dim[k] < 1 || t->dim[k] > INT32_MAX) {
      return pm_fail(err, PM_E_VALUE,
                     "%s has type %s: a dimension is at least 1 and less than 2**31", what,
                     pm_type_text(g->arena, t));
    }
    n *= t->dim[k] > limit ? limit + 1 : t->dim[k];
    if (n > limit) {
      return pm_fail(err, PM_E_VALUE, "%s has type %s: too many elements (at most %" PRId64 ")",
                     what, pm_type_text(g->arena, t), limit);
    }
  }
  return PM_OK;
}

bool pm_is_cluster_barrier(const pm_graph *g, pm_val barrier) {
  const pm_opid def = pm_value_of(g, pm_view_base(g, barrier))->def;
  return def && pm_get(g, def)->code == PM_OP_ALLOC_BARRIER &&
         g->lists.at[*pm_attr(g, def, PM_ATTR_CLUSTER)] > 0;
}

pm_code pm_own_block(const pm_typing *t, uint32_t k, const char *operand) {
  if (type_in(t, k)->kind != PM_REF || !pm_view_cluster(t->g, t->in[k])) return PM_OK;
  FAIL(VALUE,
       "%s: %s is a cluster_ref, SMEM of another block; the block's own SMEM is needed (a "
       "cluster_ref can be loaded from and stored to)",
       name(t), operand);
}

pm_code pm_single_barrier(const pm_typing *t, uint32_t k) {
  int64_t n = pm_type_size(type_in(t, k));
  if (n == 1) return PM_OK;
  FAIL(VALUE, "%s: the barrier is an array of %" PRId64 " barriers; index it with .at[i]", name(t),
       n);
}

const char *pm_operand_dtypes(const pm_typing *t) {
  pm_text out;
  uint64_t listed = 0;
  pm_text_init(&out, t->g->arena);
  for (uint32_t k = 0; k < pm_mma_count; k++) {
    const uint64_t bit = UINT64_C(1) << pm_mmas[k].a;
    if (pm_mmas[k].op != t->code || listed & bit) continue;
    listed |= bit;
    pm_putf(&out, "%s%s", out.n ? ", " : "", pm_dtypes[pm_mmas[k].a].text);
  }
  return out.at;
}

pm_code pm_flavour(const pm_typing *t, uint32_t k, bool tensor_core) {
  const pm_opid def = pm_value_of(t->g, pm_view_base(t->g, t->in[k]))->def;
  if (!def || pm_get(t->g, def)->code != PM_OP_ALLOC_BARRIER) return PM_OK;
  if ((*pm_attr(t->g, def, PM_ATTR_TENSOR_CORE) != 0) == tensor_core) return PM_OK;
  FAIL(VALUE, "%s: the barrier was allocated with%s orders_tensor_core=True; %s", name(t),
       tensor_core ? "out" : "",
       tensor_core ? "products and copies to TMEM complete on one that has it"
                   : "copies complete on a Barrier without it");
}

/* Operand k is this device's own, or that of one other device. */
pm_code pm_one_device(const pm_typing *t, uint32_t k, const char *operand) {
  const pm_opid view = pm_view_device(t->g, t->in[k]);
  if (!view || t->g->ops.at[view].code == PM_OP_DEVICE_REF) return PM_OK;
  FAIL(VALUE,
       "%s: %s is a multicast_ref, the memory of all devices at once; only copy_smem_to_gmem and "
       "semaphore_signal_multicast write there. Use plgpu.multimem_store, or a remote_ref",
       name(t), operand);
}

/* Does a part of a dimension of a size of the call end beyond all that it may be? */
static bool ends_beyond(const pm_graph *g, pm_val view) {
  for (const pm_val base = pm_view_base(g, view); view != base;) {
    const pm_opid op = g->values.at[view].def;
    view = pm_in(g, op, 0);
    if (!pm_has_attr(g, op, PM_ATTR_STARTS)) continue;
    uint32_t n;
    const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
    const int64_t *sizes = pm_attr_list(g, op, PM_ATTR_SIZES, &n);
    for (uint32_t d = 0; d < n; d++) {
      if (starts[d] == PM_DYNAMIC || sizes[d] == PM_DROPPED) continue;
      const int64_t most = g->values.at[view].type.dim[d] - 1;
      if (starts[d] + sizes[d] > most && pm_whole_extent(g, view, d)) return true;
    }
  }
  return false;
}

/* An array in registers has a fixed shape, and so has what is loaded or stored. */
static pm_code known_extents(const pm_typing *t) {
  bool open = ends_beyond(t->g, t->in[0]);
  for (uint32_t d = 0; d < type_in(t, 0)->rank; d++) open |= pm_whole_extent(t->g, t->in[0], d) > 0;
  if (!open) return PM_OK;
  FAIL(TYPE,
       "%s: the ref ends with a dimension whose size is known when the kernel is called "
       "(plgpu.dim); access a part of a fixed size, as ref[pl.ds(start, n)], with a mask where it "
       "may overhang",
       name(t));
}

pm_code pm_type_load(const pm_typing *t, pm_type *out) {
  pm_code rc = pm_one_device(t, 0, "the ref");
  if (!rc) rc = known_extents(t);
  if (rc) return rc;
  *out = *type_in(t, 0);
  out->kind = PM_ARRAY;
  out->space = PM_REGS;
  return pm_type_check(t->g, out, name(t), t->err);
}

pm_code pm_type_store(const pm_typing *t, pm_type *out) {
  const pm_type *ref = type_in(t, 0), *value = type_in(t, 1);
  pm_code rc = pm_one_device(t, 0, "the ref");
  if (!rc) rc = known_extents(t);
  (void)out;
  if (rc) return rc;
  if (!same_shape(ref, value)) {
    FAIL(VALUE,
         "Invalid shape for `swap`. Ref shape: %s. Value shape: %s. There is no broadcasting",
         show_shape(t, ref), show_shape(t, value));
  }
  if (ref->dtype != value->dtype) {
    FAIL(VALUE, "Invalid dtype for `swap`. Ref dtype: %s. Value dtype: %s",
         pm_dtypes[ref->dtype].text, pm_dtypes[value->dtype].text);
  }
  return PM_OK;
}
