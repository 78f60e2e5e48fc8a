/* Kernel: the callable that a user holds. call.c does what a call is. */
#include "kernel.h"

#include <stddef.h>
#include <structmember.h>

/* ---- calling ------------------------------------------------------------------------------ */

/* Arguments that are no arrays: nested ones are taken apart in Python. */
static PyObject *call_structured(const pmpy_kernel *k, const pmpy_call *c, Py_ssize_t n,
                                 PyObject *stream) {
  PyObject *tuple = PyTuple_New(n), *result = NULL;
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(c->args[i]));
  result = PyObject_CallMethod(k->structured, "call", "OOO", tuple,
                               c->out_arg ? c->out_arg : Py_None, stream ? stream : Py_None);
  Py_DECREF(tuple);
  return result;
}

int pmpy_call_begin(pmpy_call *c, PyObject *name, PyObject *const *args, Py_ssize_t n,
                    PyObject *kwnames, bool for_xla, PyObject **given_stream) {
  const Py_ssize_t n_kw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  PyObject *out = NULL, *stream = NULL, *unknown = NULL;
  for (Py_ssize_t i = 0; i < n_kw; i++) {
    PyObject *keyword = PyTuple_GET_ITEM(kwnames, i), *value = args[n + i];
    const pmpy_keyword what = pmpy_keyword_of(keyword);
    if (what == PMPY_KW_OTHER) unknown = keyword;
    else if (value != Py_None) *(what == PMPY_KW_OUT ? &out : &stream) = value;
  }
  c->for_xla = for_xla && !out && !stream;
  const int code = unknown ? pmpy_call_read(c, name, args, 0, NULL, false)
                           : pmpy_call_read(c, name, args, (size_t)n, out, false);
  if (given_stream) *given_stream = stream;
  if (unknown && code >= 0)
    PyErr_Format(PyExc_TypeError,
                 "kernel %U: unknown argument %R; only out= and stream= are given by name", name,
                 unknown);
  return unknown || (code >= 0 && pmpy_call_stream(c, stream) < 0) ? -1 : code;
}

static PyObject *kernel_call(PyObject *self, PyObject *const *args, size_t nargsf,
                             PyObject *kwnames) {
  pmpy_kernel *k = (pmpy_kernel *)self;
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject *stream = NULL, *result = NULL;
  pmpy_call c;
  const bool for_xla = k->structured && !k->interpret;
  const int code = pmpy_call_begin(&c, k->name, args, n, kwnames, for_xla, &stream);
  if (!code) result = k->structured ? call_structured(k, &c, n, stream) : pmpy_call_refuse(&c);
  else if (code > 0 && c.recorded) result = pmpy_torch_call(self, args, n, kwnames, true);
  if (result == Py_NotImplemented) Py_CLEAR(result);
  if (code > 0 && !result && !PyErr_Occurred() && pmpy_call_locate(&c) == 0)
    result = pmpy_call_run(&c, self);
  pmpy_call_end(&c);
  if (!result) pmpy_tidy_error();
  return result;
}

/* ---- lower -------------------------------------------------------------------------------- */

/* What to lower for: what the user says, or what the calls on host arrays would run on. */
static int read_target(pmpy_call *c, PyObject *given) {
  char why[512];
  PMPY_ERR(err);
  c->target = NULL;
  c->may_fall_back = given == Py_None;
  if (given == Py_None) {
    const int device = pmpy_fitting_device(why, sizeof why);
    pm_code code = pm_asked_target(&c->target, &err);
    if (c->target) c->may_fall_back = false; /* nor does a call */
    if (!code && device >= 0) code = pm_device_target(device, &c->target, &err);
    return code ? pmpy_raise(&err), -1 : 0;
  }
  return pmpy_target(given, &c->target);
}

static PyObject *kernel_lower(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"target", NULL};
  PyObject *target = Py_None, *empty = PyTuple_New(0);
  pmpy_kernel *k = (pmpy_kernel *)self;
  pmpy_call c;
  c.for_xla = false;
  if (!empty) return NULL;
  int ok = PyArg_ParseTupleAndKeywords(empty, kw, "|$O:lower", names, &target);
  Py_DECREF(empty);
  if (!ok || read_target(&c, target) < 0) return NULL;
  PyObject *result = NULL;
  int code = pmpy_call_read(&c, k->name, &PyTuple_GET_ITEM(args, 0), (size_t)PyTuple_GET_SIZE(args),
                            NULL, true);
  c.k = k;
  if (!code && k->structured)
    result = PyObject_CallMethod(k->structured, "lower", "OO", args, target);
  else if (!code) result = pmpy_call_refuse(&c);
  else if (code > 0) result = (PyObject *)pmpy_call_trace(&c, true);
  pmpy_call_end(&c);
  if (!result) pmpy_tidy_error();
  return result;
}

/* ---- the type ----------------------------------------------------------------------------- */

/* Borrowed; NULL where absent or None. Its owner is the dict. */
static PyObject *option(PyObject *options, const char *name) {
  PyObject *o = PyDict_GetItemString(options, name);
  return o == Py_None ? NULL : o;
}

static int set_container(pmpy_kernel *k, PyObject *o) {
  static const char *const names[] = {
      [PMPY_SINGLE] = "single", [PMPY_TUPLE] = "tuple", [PMPY_LIST] = "list"};
  k->container = PMPY_SINGLE;
  for (size_t i = 0; o && i < PM_COUNT(names); i++)
    if (PyUnicode_Check(o) && !PyUnicode_CompareWithASCIIString(o, names[i])) {
      k->container = (pmpy_container)i;
      return 0;
    }
  if (o) PyErr_Format(PyExc_ValueError, "Kernel: outputs must be single, tuple or list, got %R", o);
  return o ? -1 : 0;
}

/* A tuple of ints. */
static int set_open(pmpy_kernel *k, PyObject *o) {
  if (!o) return 0;
  const Py_ssize_t n = PyTuple_Check(o) ? PyTuple_GET_SIZE(o) : -1;
  k->open = n >= 0 ? PyMem_Calloc((size_t)n + 1, 1) : NULL;
  if (!k->open) {
    if (n < 0) PyErr_SetString(PyExc_TypeError, "Kernel: open must be a tuple of ints");
    else PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t i = 0; i < n; i++)
    k->open[i] = (uint8_t)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(o, i));
  k->n_open = (uint32_t)n;
  return PyErr_Occurred() ? -1 : 0;
}

/* Kernel(name, trace, options). Options: interpret, outputs (single, tuple, list), unflatten,
 * structured, progress, open (a tuple of bits of dimensions by operand); others are ignored. */
static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"name", "trace", "options", NULL};
  PyObject *name, *trace, *options = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "UO|O!:Kernel", names, &name, &trace, &PyDict_Type,
                                   &options))
    return NULL;
  pmpy_kernel *k = (pmpy_kernel *)type->tp_alloc(type, 0);
  if (!k) return NULL;
  k->vectorcall = kernel_call;
  k->name = Py_NewRef(name);
  k->trace = Py_NewRef(trace);
  k->options = options ? PyDict_Copy(options) : PyDict_New();
  if (!k->options || set_container(k, option(k->options, "outputs")) < 0) {
    Py_DECREF(k);
    return NULL;
  }
  if (set_open(k, option(k->options, "open")) < 0) {
    Py_DECREF(k);
    return NULL;
  }
  k->interpret = option(k->options, "interpret");
  k->unflatten = option(k->options, "unflatten");
  k->structured = option(k->options, "structured");
  k->progress = option(k->options, "progress");
  return (PyObject *)k;
}

static int kernel_traverse(PyObject *self, visitproc visit, void *arg) {
  pmpy_kernel *k = (pmpy_kernel *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(k->dict);
  Py_VISIT(k->trace);
  Py_VISIT(k->options);
  return 0;
}

static int kernel_clear(PyObject *self) {
  pmpy_kernel *k = (pmpy_kernel *)self;
  k->interpret = k->unflatten = k->structured = k->progress = NULL;
  Py_CLEAR(k->dict);
  Py_CLEAR(k->trace);
  Py_CLEAR(k->options);
  return 0;
}

static void kernel_dealloc(PyObject *self) {
  pmpy_kernel *k = (pmpy_kernel *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (k->weakrefs) PyObject_ClearWeakRefs(self);
  kernel_clear(self);
  pmpy_plans_clear(&k->plans);
  PyMem_Free(k->open);
  Py_XDECREF(k->name);
  type->tp_free(self);
  Py_DECREF(type);
}

/* New: definition.method(); NULL without an exception where there is no definition. */
static PyObject *ask_definition(PyObject *self, const char *method) {
  PyObject *dict = ((pmpy_kernel *)self)->dict;
  PyObject *definition = dict ? PyDict_GetItemString(dict, "definition") : NULL;
  return definition ? PyObject_CallMethod(definition, method, NULL) : NULL;
}

static PyObject *kernel_repr(PyObject *self) {
  PyObject *text = ask_definition(self, "describe");
  if (text || PyErr_Occurred()) return text;
  return PyUnicode_FromFormat("<pallas_mgpu kernel %U>", ((pmpy_kernel *)self)->name);
}

/* __signature__ is made when it is asked for: few kernels are. */
static PyObject *kernel_getattr(PyObject *self, PyObject *name) {
  PyObject *found = PyObject_GenericGetAttr(self, name);
  if (found || PyUnicode_CompareWithASCIIString(name, "__signature__") ||
      !PyErr_ExceptionMatches(PyExc_AttributeError))
    return found;
  PyErr_Clear();
  found = ask_definition(self, "signature");
  if (!found && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
  return found;
}

static PyObject *get_name(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(((pmpy_kernel *)self)->name);
}

PyObject *pmpy_reduce(PyObject *self, PyObject *unused) {
  (void)unused;
  PyObject *hook = pmpy_hook(PMPY_HOOK_PICKLE);
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

/* A kernel is a function: copies of what holds it share it. */
static PyObject *kernel_copy(PyObject *self, PyObject *memo) {
  (void)memo;
  return Py_NewRef(self);
}

static PyMethodDef methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "For annotations: Kernel[P, R]."},
    {"_repr_html_", pmpy_html, METH_NOARGS, "The kernel for a notebook."},
    {"__reduce__", pmpy_reduce, METH_NOARGS, "By the name that the kernel has in a module."},
    {"__copy__", kernel_copy, METH_NOARGS, "The kernel itself."},
    {"__deepcopy__", kernel_copy, METH_O, "The kernel itself."},
    {"lower", (PyCFunction)(void (*)(void))kernel_lower, METH_VARARGS | METH_KEYWORDS,
     "lower(*args, target=None): trace and lower for arguments like these, without running. They "
     "may be arrays or anything with shape and dtype. target: 'sm_90a', 'sm_100a' ..., of which no "
     "GPU is needed; None: the GPU that kernels on host arrays run on, or the first that has what "
     "the kernel needs."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef getset[] = {
    {"name", get_name, NULL, "name of the kernel", NULL},
    {"__name__", get_name, NULL, "name of the kernel", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(pmpy_kernel, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(pmpy_kernel, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(pmpy_kernel, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, kernel_new},
                              {Py_tp_dealloc, kernel_dealloc},
                              {Py_tp_traverse, kernel_traverse},
                              {Py_tp_clear, kernel_clear},
                              {Py_tp_call, PyVectorcall_Call},
                              {Py_tp_repr, kernel_repr},
                              {Py_tp_getattro, kernel_getattr},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {Py_tp_members, members},
                              {Py_tp_doc, "A kernel as a callable on arrays."},
                              {0, NULL}};

static PyType_Spec type_spec = {.name = "pallas_mgpu.Kernel",
                                .basicsize = sizeof(pmpy_kernel),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = slots};

/* New: the int that a stream of any library is. */
static PyObject *stream_handle(PyObject *module, PyObject *stream) {
  void *found = NULL;
  (void)module;
  return pmpy_stream_from(stream, "stream", &found) < 0 ? NULL : PyLong_FromVoidPtr(found);
}

static PyMethodDef functions[] = {
    {"stream_handle", stream_handle, METH_O, "The handle of a stream of any library, an int."},
    {"clear_plans", pmpy_plans_clear_all, METH_NOARGS,
     "Drop all traced and compiled kernels; calls make them anew."},
    {"plan_memory", pmpy_plans_size, METH_NOARGS,
     "Number of traced kernels (plans), and bytes of host memory that they take."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_kernel(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
  if (!type) return -1;
  pmpy.kernel_type = (PyTypeObject *)type;
  if (PyModule_AddObjectRef(module, "Kernel", type) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
