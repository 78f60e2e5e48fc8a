/* What the core calls in Python: functions and classes that the package registers once, with
 * set_hooks(), when it is imported. module.h has the table. */
#include "module.h"

pmpy_state pmpy;

static const char *const names[PMPY_HOOK_COUNT] = {
#define X(id, name) [PMPY_HOOK_##id] = #name,
    PMPY_HOOKS(X)
#undef X
};

/* Borrowed; NULL with an exception before the package is imported. */
PyObject *pmpy_hook(pmpy_hook_id id) {
  PyObject *hook = pmpy.hooks[id];
  if (!hook) PyErr_Format(PyExc_RuntimeError, "the hook %s is not registered", names[id]);
  return hook;
}

PyObject *pmpy_html(PyObject *self, PyObject *unused) {
  (void)unused;
  PyObject *hook = pmpy_hook(PMPY_HOOK_HTML);
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

static PyObject *set_hooks(PyObject *module, PyObject *args, PyObject *kw) {
  (void)module;
  if (PyTuple_GET_SIZE(args) || !kw || PyDict_GET_SIZE(kw) != PMPY_HOOK_COUNT) {
    PyErr_Format(PyExc_TypeError, "set_hooks: %d hooks are given by name", PMPY_HOOK_COUNT);
    return NULL;
  }
  for (int k = 0; k < PMPY_HOOK_COUNT; k++) {
    PyObject *hook = PyDict_GetItemString(kw, names[k]);
    if (!hook) {
      PyErr_Format(PyExc_TypeError, "set_hooks: the hook %s is missing", names[k]);
      return NULL;
    }
    Py_XSETREF(pmpy.hooks[k], Py_NewRef(hook));
  }
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_hooks", (PyCFunction)(void (*)(void))set_hooks, METH_VARARGS | METH_KEYWORDS,
     "set_hooks(**hooks): what the core calls in Python, all of it by name."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_hooks(PyObject *module) { return PyModule_AddFunctions(module, functions); }
