/* The extension module pallas_mgpu._core.
 *
 * Multi-phase init. The process has one copy of the state (module.h), so it is executed once, and
 * only in the main interpreter. */
#include "module.h"

static int (*const inits[])(PyObject *) = {
#define X(file) pmpy_init_##file,
    PMPY_INITS(X)
#undef X
};

static int exec_module(PyObject *module) {
  static bool done;
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(PyExc_ImportError, "pallas_mgpu cannot be imported in a sub-interpreter");
    return -1;
  }
  if (done) {
    PyErr_SetString(PyExc_ImportError, "pallas_mgpu cannot be loaded twice in one process");
    return -1;
  }
  for (size_t k = 0; k < PM_COUNT(inits); k++) {
    if (inits[k](module) < 0) return -1;
  }
  done = true;
  return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
#ifdef Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_MOD_GIL_NOT_USED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "pallas_mgpu._core",
    .m_doc = "The C core of pallas_mgpu: tracing, lowering, interpreter, compilation, launch",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
