/* Allocations, views, loads and stores. */
#include "gen.h"

/* Views are resolved where they are used. */
pm_code pm_cuda_INDEX(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_TRANSPOSE_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_RESHAPE_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_CLUSTER_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }

static pm_code bind_address(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t offset = *pm_attr(e->g, op, PM_ATTR_OFFSET);
  if (offset < 0) return pm_gen_fail(e, op, PM_E_INTERNAL, "it has no place in SMEM");
  const char *name = pm_name_of(e, out);
  pm_place(e, op);
  pm_line(e, "const u32 %s = smem + %lld; // %s", name, (long long)offset,
          pm_type_text(e->arena, pm_typeof(e->g, out)));
  pm_bind(e, out, name, PM_FORM_SCALAR);
  return PM_OK;
}

pm_code pm_cuda_ALLOC_SMEM(pm_gen *e, pm_opid op) { return bind_address(e, op); }
pm_code pm_cuda_ALLOC_BARRIER(pm_gen *e, pm_opid op) { return bind_address(e, op); }

static pm_code view_of(pm_gen *e, pm_opid op, pm_val ref, pm_view *v) {
  const pm_code code = pm_view_of(e->g, ref, true, v, e->err);
  if (code) pm_err_op(e->err, e->g, op);
  return code;
}

/* One element, by all lanes. */
static const char *element_address(pm_gen *e, const pm_view *v) {
  const char *a = pm_view_address(e, v), *peer = pm_view_peer(e, v);
  if (v->swizzle) a = pm_str(e, "swizzle<%d>(%s)", v->swizzle, a);
  return peer ? pm_str(e, "%s + %s", a, peer) : a;
}

pm_code pm_cuda_LOAD(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  pm_view v;
  PM_TRY(view_of(e, op, pm_in(e->g, op, 0), &v));
  pm_note(e, op, "load");
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_array(e, pm_value_layout(e->g, out), &v, name);
    return PM_OK;
  }
  if (pm_type_size(pm_typeof(e->g, out)) > 1) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "an array that differs between elements has a splat "
                       "layout");
  }
  pm_line(e, "ld_%s<%s, 1>(&%s, %s);", pm_space_of(&v), pm_cpp_type(v.dtype), name,
          element_address(e, &v));
  return PM_OK;
}

pm_code pm_cuda_STORE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 1);
  pm_view v;
  PM_TRY(view_of(e, op, pm_in(e->g, op, 0), &v));
  pm_note(e, op, "store");
  const char *x = pm_at(e, in, "0");
  if (pm_is_array(e, in)) {
    pm_store_array(e, pm_value_layout(e->g, in), &v, e->slot[in].text);
    return PM_OK;
  }
  if (pm_type_size(pm_typeof(e->g, in)) > 1) {
    pm_store_splat(e, &v, x);
    return PM_OK;
  }
  const char *one = pm_unique(e, "one");
  pm_line(e, "const %s %s = %s;", pm_cpp_type(v.dtype), one, x);
  pm_line(e, "st_%s<%s, 1>(%s, &%s);", pm_space_of(&v), pm_cpp_type(v.dtype),
          element_address(e, &v), one);
  return PM_OK;
}
