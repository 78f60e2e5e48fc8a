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

typedef PyObject *made_of_call[PMPY_MAX_PARAMS];

/* Its stream, its outputs, and how they are moved; 0 or -1. */
static int begin(pmpy_call *c, pmpy_run *r, PyObject **made, const pm_interp_options *options,
                 PyObject *emulation) {
  uint64_t out[PMPY_MAX_PARAMS];
  void *stream = NULL;
  if ((c->cuda && (pmpy_call_find_stream(c, c->device, &stream) < 0 ||
                   (c->has_stream && pmpy_order_home(c, stream) < 0))) ||
      pmpy_call_outputs(c, stream, made, out) < 0)
    return -1;
  *r = (pmpy_run){
      .c = c, .device = c->device, .stream = stream, .options = options, .emulation = emulation};
  pmpy_run_describe(r, out);
  return 0;
}

static bool run(pmpy_run *runs, uint32_t n) {
  pm_err err = {0};
  pm_code code;
  Py_BEGIN_ALLOW_THREADS;
  code = n == 1 ? pmpy_run_execute(runs, &err) : pmpy_runs_execute(runs, n, &err);
  Py_END_ALLOW_THREADS;
  if (code && !PyErr_Occurred()) pmpy_raise(&err);
  return !code;
}

/* The result of one call; of calls on several devices a list of theirs. */
PyObject *pmpy_calls_emulator(pmpy_call *calls, uint32_t n) {
  PyObject *p = calls->k->interpret, *emulation = emulation_of(calls->plan);
  made_of_call *made = PyMem_Calloc(n, sizeof *made);
  pmpy_run *runs = PyMem_Calloc(n, sizeof *runs);
  PyObject *results = !emulation ? NULL : made && runs ? PyList_New(n) : PyErr_NoMemory();
  pm_interp_options options;
  uint32_t begun = 0;
  bool ok = results;
  pm_interp_defaults(&options);
  options.zero_fill =
      ok && p && p != Py_None && pmpy_attribute_is(p, "uninitialized_memory", "zero") > 0;
  ok = ok && !PyErr_Occurred();
  while (ok && begun < n &&
         (ok = begin(&calls[begun], &runs[begun], made[begun], &options, emulation) == 0))
    begun++;
  ok = ok && run(runs, n);
  for (uint32_t d = 0; d < begun; d++) {
    PyObject *x = ok ? pmpy_call_finish(&calls[d], made[d]) : pmpy_call_drop(&calls[d], made[d]);
    if (x) PyList_SET_ITEM(results, d, x);
    ok = ok && x;
  }
  Py_XDECREF(emulation);
  PyMem_Free(made);
  PyMem_Free(runs);
  if (!ok) Py_CLEAR(results);
  if (!ok || calls->plan->graph->g->n_mesh) return results;
  PyObject *one = Py_NewRef(PyList_GET_ITEM(results, 0));
  Py_DECREF(results);
  return one;
}
