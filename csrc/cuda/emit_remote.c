/* Stores that the switch multicasts, and loads that it combines: the addresses are those of
 * remote.c. */
#include "gen.h"

static pm_code view_of(pm_gen *e, pm_opid op, pm_view *v) {
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  v->all_devices = true;
  e->async.narrow = false;
  return PM_OK;
}

static pm_code check_width(pm_gen *e, pm_opid op) {
  if (!e->async.narrow) return PM_OK;
  return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                     "lanes would access less than 32 bits at once; give the array a layout "
                     "with neighbours in one lane (plgpu.layout_cast to "
                     "Layout.WG_STRIDED(shape, vec_size)), or use a wider dtype");
}

pm_code pm_cuda_MULTIMEM_STORE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 1);
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "multimem_store");
  if (e->slot[in].form == PM_FORM_WORDS || pm_is_array(e, in)) {
    pm_store_array(e, pm_value_layout(e->g, in), &v, e->slot[in].text,
                   e->slot[in].form == PM_FORM_WORDS);
  } else {
    pm_store_splat(e, &v, pm_at(e, in, "0"));
  }
  return check_width(e, op);
}

pm_code pm_cuda_MULTIMEM_REDUCE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "multimem_load_reduce");
  e->multimem = pm_enum_text(PM_ENUM_ATOMIC, *pm_attr(e->g, op, PM_ATTR_ATOMIC));
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_array(e, pm_value_layout(e->g, out), &v, name, false);
  } else {
    pm_line(e, "%s(&%s, %s);", pm_ptx_multimem(e, &v, 1, false), name, pm_view_address(e, &v));
  }
  e->multimem = NULL;
  return check_width(e, op);
}
