/* Reshaped: a kernel whose arrays are views of the caller's with other shapes.
 *
 * An array in row-major order can be seen with any shape of as many elements, so a call (call.c)
 * only has to replace the extents that were read, and those that its results get. Other arrays are
 * seen so where their strides allow it (ValueError). Arrays that have no memory, or whose
 * operations autograd records, go to another kernel, which `alone` returns: that of the caller's
 * shapes.
 *
 * A kernel that serves many sizes reads them from the extents of its operands, and several sizes
 * may be one extent of these views. The kernel learns each of them from an operand of its own, of
 * which it uses the extent alone. */
#include "kernel.h"

#include <stddef.h>
#include <structmember.h>

typedef struct pmpy_reshaped {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *kernel, *alone; /* owned */
  PyObject *operands, *sizes; /* as given; owned, sizes may be NULL */
  pmpy_views views;         /* its arrays: owned */
} pmpy_reshaped;

PyObject *pmpy_reshaped_parts(PyObject *reshaped, const pmpy_views **views) {
  *views = &((pmpy_reshaped *)reshaped)->views;
  return ((pmpy_reshaped *)reshaped)->kernel;
}

static PyObject *reshaped_call(PyObject *self, PyObject *const *args, size_t nargsf,
                               PyObject *kwnames) {
  const pmpy_reshaped *r = (pmpy_reshaped *)self;
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject *result = NULL;
  pmpy_call c;
  const int code =
      pmpy_call_begin(&c, ((pmpy_kernel *)r->kernel)->name, args, n, kwnames, true, NULL);
  const bool views = code > 0 && !c.recorded;
  if (views && pmpy_call_locate(&c) == 0) {
    c.views = &r->views;
    result = pmpy_call_run(&c, r->kernel);
  }
  pmpy_call_end(&c);
  if (code >= 0 && !views) {
    PyObject *kernel = PyObject_CallNoArgs(r->alone);
    result = kernel ? PyObject_Vectorcall(kernel, args, nargsf, kwnames) : NULL;
    Py_XDECREF(kernel);
  }
  if (!result) pmpy_tidy_error();
  return result;
}

static PyObject *reshaped_lower(PyObject *self, PyObject *args, PyObject *kw) {
  PyObject *kernel = PyObject_CallNoArgs(((pmpy_reshaped *)self)->alone);
  PyObject *lower = kernel ? PyObject_GetAttrString(kernel, "lower") : NULL;
  PyObject *result = lower ? PyObject_Call(lower, args, kw) : NULL;
  Py_XDECREF(lower);
  Py_XDECREF(kernel);
  return result;
}

/* ---- the type ------------------------------------------------------------------------------- */

/* Ints from a tuple; 0 or -1. */
static int read_ints(PyObject *tuple, Py_ssize_t most, int64_t *to) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > most) {
    PyErr_Format(PyExc_TypeError, "Reshaped: a tuple of up to %zd ints is needed, got %R", most,
                 tuple);
    return -1;
  }
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(tuple); d++) {
    to[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, d));
    if (to[d] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

/* Shapes, or None for what stays as it is. */
static int read_shapes(PyObject *shapes, pmpy_spec *to, bool *given) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shapes); i++) {
    PyObject *shape = PyTuple_GET_ITEM(shapes, i);
    given[i] = shape != Py_None;
    if (!given[i]) continue;
    if (read_ints(shape, PM_MAX_RANK, to[i].shape) < 0) return -1;
    to[i].rank = (uint8_t)PyTuple_GET_SIZE(shape);
  }
  return 0;
}

static PyObject *reshaped_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"kernel", "alone", "operands", "results", "sizes", NULL};
  PyObject *kernel, *alone, *operands, *results, *sizes = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O!OO!O!|O!:Reshaped", names, pmpy.kernel_type,
                                   &kernel, &alone, &PyTuple_Type, &operands, &PyTuple_Type,
                                   &results, &PyTuple_Type, &sizes))
    return NULL;
  pmpy_reshaped *r = (pmpy_reshaped *)type->tp_alloc(type, 0);
  if (!r) return NULL;
  const size_t n_in = (size_t)PyTuple_GET_SIZE(operands), n_out = (size_t)PyTuple_GET_SIZE(results);
  r->vectorcall = reshaped_call;
  r->kernel = Py_NewRef(kernel);
  r->alone = Py_NewRef(alone);
  r->operands = Py_NewRef(operands);
  r->sizes = Py_XNewRef(sizes);
  pmpy_views *v = &r->views;
  v->n_in = (uint32_t)n_in;
  v->n_out = (uint32_t)n_out;
  v->n_sizes = sizes ? (uint32_t)PyTuple_GET_SIZE(sizes) : 0;
  v->shape = PyMem_Calloc(n_in + n_out + 1, sizeof *v->shape);
  v->given = PyMem_Calloc(n_in + n_out + 1, sizeof *v->given);
  if (v->shape && v->given && read_shapes(operands, v->shape, v->given) == 0 &&
      read_shapes(results, v->shape + n_in, v->given + n_in) == 0 &&
      (!sizes || read_ints(sizes, PMPY_MOST_SIZES, v->sizes) == 0))
    return (PyObject *)r;
  if (!PyErr_Occurred()) PyErr_NoMemory();
  Py_DECREF(r);
  return NULL;
}

static int reshaped_traverse(PyObject *self, visitproc visit, void *arg) {
  pmpy_reshaped *r = (pmpy_reshaped *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(r->kernel);
  Py_VISIT(r->alone);
  return 0;
}

static int reshaped_clear(PyObject *self) {
  pmpy_reshaped *r = (pmpy_reshaped *)self;
  Py_CLEAR(r->kernel);
  Py_CLEAR(r->alone);
  return 0;
}

static void reshaped_dealloc(PyObject *self) {
  pmpy_reshaped *r = (pmpy_reshaped *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  reshaped_clear(self);
  Py_XDECREF(r->operands);
  Py_XDECREF(r->sizes);
  PyMem_Free(r->views.shape);
  PyMem_Free(r->views.given);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"lower", (PyCFunction)(void (*)(void))reshaped_lower, METH_VARARGS | METH_KEYWORDS,
     "The kernel of the caller's shapes, lowered."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(pmpy_reshaped, vectorcall), READONLY, NULL},
    {"kernel", T_OBJECT, offsetof(pmpy_reshaped, kernel), READONLY, "What runs."},
    {"alone", T_OBJECT, offsetof(pmpy_reshaped, alone), READONLY, "What returns the other kernel."},
    {"operands", T_OBJECT, offsetof(pmpy_reshaped, operands), READONLY, "Their shapes, or None."},
    {"sizes", T_OBJECT, offsetof(pmpy_reshaped, sizes), READONLY, "Of the last operands, or None."},
    {NULL, 0, 0, 0, NULL}};

static PyObject *reshaped_name(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(((pmpy_kernel *)((pmpy_reshaped *)self)->kernel)->name);
}

static PyGetSetDef getset[] = {{"__name__", reshaped_name, NULL, "That of the kernel.", NULL},
                               {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, reshaped_new},
    {Py_tp_dealloc, reshaped_dealloc},
    {Py_tp_traverse, reshaped_traverse},
    {Py_tp_clear, reshaped_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_tp_doc,
     "Reshaped(kernel, alone, operands, results, sizes=()): a kernel that gets its operands with "
     "other shapes (None: as they are), and whose results get others. alone(): what serves arrays "
     "that cannot be reshaped or have no memory. sizes: ints; for each the kernel has one more "
     "operand of so many elements, the beginning of the first one."},
    {0, NULL}};

static PyType_Spec type_spec = {.name = "pallas_mgpu.Reshaped",
                                .basicsize = sizeof(pmpy_reshaped),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = slots};

/* restride(shape, strides, to): new, a tuple of ints or None; see _core.pyi. */
static PyObject *restride(PyObject *self, PyObject *args) {
  PyObject *shape, *strides, *to, *found;
  pmpy_buffer b = {.strided = true};
  pmpy_spec spec = {0};
  (void)self;
  if (!PyArg_ParseTuple(args, "O!O!O!:restride", &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                        &PyTuple_Type, &to) ||
      read_ints(shape, PM_MAX_RANK, b.shape) < 0 || read_ints(strides, PM_MAX_RANK, b.stride) < 0 ||
      read_ints(to, PM_MAX_RANK, spec.shape) < 0)
    return NULL;
  b.rank = (uint8_t)PyTuple_GET_SIZE(shape);
  spec.rank = (uint8_t)PyTuple_GET_SIZE(to);
  if (PyTuple_GET_SIZE(strides) != b.rank || !pmpy_restride(&b, &spec)) {
    PyErr_Format(PyExc_ValueError, "an array of shape %R and strides %R is no array of shape %R",
                 shape, strides, to);
    return NULL;
  }
  if (!b.strided) Py_RETURN_NONE;
  found = PyTuple_New(spec.rank);
  for (int d = 0; found && d < spec.rank; d++) {
    PyObject *stride = PyLong_FromLongLong(b.stride[d]);
    if (stride) PyTuple_SET_ITEM(found, d, stride);
    else Py_CLEAR(found);
  }
  return found;
}

static PyMethodDef functions[] = {
    {"restride", restride, METH_VARARGS,
     "The strides that an array has when its memory is seen with another shape."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_reshaped(PyObject *module) {
  pmpy.reshaped_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &type_spec, NULL);
  if (!pmpy.reshaped_type || PyModule_AddFunctions(module, functions) < 0) return -1;
  return PyModule_AddObjectRef(module, "Reshaped", (PyObject *)pmpy.reshaped_type);
}
