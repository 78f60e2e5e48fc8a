/* Type rules of what reaches other devices: views of their memory, and the switch. */
#include "typing.h"
#include "view.h"

/* What other devices have too: kernel arguments, and semaphores of the launch. */
static pm_code shared_by_devices(const pm_typing *t) {
  const pm_type *x = type_in(t, 0);
  const bool memory = x->kind == PM_REF || x->kind == PM_SEMAPHORE;
  if (!t->g->n_mesh) {
    FAIL(VALUE, "%s: the kernel has no mesh of devices; call it by plgpu.spmd", name(t));
  }
  if (!memory || x->space != PM_GMEM) {
    FAIL(VALUE,
         "%s: the ref is %s; operands and outputs of the kernel, in GMEM, and semaphores have "
         "counterparts on other devices",
         name(t), show(t, x));
  }
  const pm_opid other = pm_view_device(t->g, t->in[0]);
  if (!other) return PM_OK;
  FAIL(VALUE, "%s: the ref is a %s already", name(t),
       t->g->ops.at[other].code == PM_OP_DEVICE_REF ? "remote_ref" : "multicast_ref");
}

pm_code pm_type_device_ref(const pm_typing *t, pm_type *out) {
  pm_scalar c;
  pm_code rc = shared_by_devices(t);
  if (rc) return rc;
  if (pm_constant(t->g, t->in[1], &c) && (c.i < 0 || c.i >= pm_n_devices(t->g))) {
    FAIL(VALUE, "%s: device %" PRId64 " is out of bounds for a mesh of %" PRId64 " devices",
         name(t), c.i, pm_n_devices(t->g));
  }
  *out = *type_in(t, 0);
  return PM_OK;
}

pm_code pm_type_multicast_ref(const pm_typing *t, pm_type *out) {
  *out = *type_in(t, 0);
  return shared_by_devices(t);
}

pm_code pm_type_semaphore_of(const pm_typing *t, pm_type *out) {
  const pm_type *x = type_in(t, 0);
  *out = *x;
  out->kind = PM_SEMAPHORE;
  if (x->dtype == PM_I32) return PM_OK;
  FAIL(TYPE, "%s: the ref is %s; one of int32 is needed", name(t), show(t, x));
}

/* The switch combines and multicasts the memory of all devices: the ref names none. */
static pm_code no_device(const pm_typing *t) {
  if (!t->g->n_mesh) {
    FAIL(VALUE, "%s: the kernel has no mesh of devices; call it by plgpu.spmd", name(t));
  }
  if (!pm_view_device(t->g, t->in[0])) return PM_OK;
  FAIL(VALUE, "%s: the ref is a remote_ref or a multicast_ref; give the device's own ref", name(t));
}

/* What the switch does, by dtype. */
static bool has_multimem(int64_t kind, pm_dtype d) {
  const bool minmax = kind == PM_ATOMIC_MIN || kind == PM_ATOMIC_MAX;
  if (d == PM_I32 || d == PM_U32) return kind <= PM_ATOMIC_XOR;
  if (d == PM_F32) return kind == PM_ATOMIC_ADD;
  const bool small = d == PM_F16 || d == PM_BF16 || d == PM_E4M3 || d == PM_E5M2;
  return small && (kind == PM_ATOMIC_ADD || minmax);
}

pm_code pm_type_multimem_store(const pm_typing *t, pm_type *out) {
  const pm_code rc = no_device(t);
  return rc ? rc : pm_type_store(t, out);
}

pm_code pm_type_multimem_reduce(const pm_typing *t, pm_type *out) {
  const int64_t kind = t->attr[0];
  const pm_dtype d = type_in(t, 0)->dtype;
  const pm_code rc = no_device(t);
  if (rc) return rc;
  if (!has_multimem(kind, d)) {
    FAIL(VALUE,
         "%s: reduction_op '%s' of %s; available are add of float32, add, min and max of float16, "
         "bfloat16, float8_e4m3fn and float8_e5m2, and add, min, max, and, or, xor of int32 and "
         "uint32",
         name(t), pm_enum_text(PM_ENUM_ATOMIC, kind), pm_dtypes[d].text);
  }
  return pm_type_load(t, out);
}
