/* A call on the emulated machine: the generated program runs on the CPU. Python compiles and runs
 * it (pallas_mgpu/_emulate.py); arrays are staged as for the interpreter. */
#include "kernel.h"

/* New: what runs the plan's program; made once. */
static PyObject *emulation_of(pmpy_plan *p) {
  if (!p->emulation) {
    PyObject *hook = pmpy_hook(PMPY_HOOK_EMULATE);
    PyObject *made = hook ? PyObject_CallOneArg(hook, (PyObject *)p->graph) : NULL;
    if (!made) return NULL;
    if (p->emulation) Py_DECREF(made); /* another thread was faster */
    else p->emulation = made;
  }
  return Py_NewRef(p->emulation);
}

PyObject *pmpy_call_emulator(pmpy_call *c) {
  PyObject *made[PMPY_MAX_PARAMS];
  uint64_t out[PMPY_MAX_PARAMS];
  pm_interp_options options;
  void *stream = NULL;
  pm_err err = {0};
  pm_code code;
  PyObject *p = c->k->interpret, *emulation = emulation_of(c->plan);
  if (!emulation) return NULL;
  pm_interp_defaults(&options);
  options.zero_fill = p && p != Py_None && pmpy_attribute_is(p, "uninitialized_memory", "zero") > 0;
  if (PyErr_Occurred() ||
      (c->cuda && (pmpy_call_find_stream(c, c->device, &stream) < 0 ||
                   (c->has_stream && pmpy_order_home(c, stream) < 0))) ||
      pmpy_call_outputs(c, stream, made, out) < 0) {
    Py_DECREF(emulation);
    return NULL;
  }
  pmpy_run r = {
      .c = c, .device = c->device, .stream = stream, .options = &options, .emulation = emulation};
  pmpy_run_describe(&r, out);
  Py_BEGIN_ALLOW_THREADS code = pmpy_run_execute(&r, &err);
  Py_END_ALLOW_THREADS Py_DECREF(emulation);
  if (!code) return pmpy_call_finish(c, made);
  if (!PyErr_Occurred()) pmpy_raise(&err);
  return pmpy_call_drop(c, made);
}
