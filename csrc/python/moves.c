/* Functions that move elements of arrays: transpose, concat, gather, scatter, scan. Names, axes and
 * defaults of the language are composed of these in pallas_mgpu/_shapes.py. */
#include "trace.h"

/* Operand `o` in the graph with its own dtype. */
static pmpy_trace *begin(const char *name, PyObject *o, pmpy_arg *x) {
  pmpy_trace *t = pmpy_begin(name, o);
  return t && !pmpy_arg_need(t, name, o, x) && pmpy_arg_as(t, x, x->type.dtype) ? t : NULL;
}

static int another(pmpy_trace *t, const char *name, PyObject *o, pm_dtype dtype, pmpy_arg *x) {
  return pmpy_arg_need(t, name, o, x) || !pmpy_arg_as(t, x, dtype) ? -1 : 0;
}

static PyObject *result(pmpy_trace *t, pm_val v, bool weak) {
  return v ? pmpy_traced_new(t, v, weak) : NULL;
}

static PyObject *transpose(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x;
  int64_t dim[PM_MAX_RANK];
  if (n != 2) return pmpy_fail(PM_E_TYPE, "transpose: expected x and dims");
  pmpy_trace *t = begin("transpose", args[0], &x);
  const int rank = t ? pmpy_ints(args[1], "transpose", dim, PM_MAX_RANK) : -1;
  if (rank < 0) return NULL;
  pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = dim, .n = (uint32_t)rank};
  return result(t, pmpy_emit(t, PM_OP_TRANSPOSE, &x.val, 1, NULL, &attr, 1), x.weak);
}

static PyObject *concat(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  enum { MOST = 64 };
  pmpy_arg x[MOST];
  pm_val in[MOST];
  int64_t dim;
  pm_dtype dtype;
  bool weak;
  if (n < 2) return pmpy_fail(PM_E_TYPE, "concat: expected a dim and arrays");
  if (n > MOST + 1) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED,
                     "concatenate: %zd arrays, at most %d are supported; concatenate some first",
                     n - 1, MOST);
  }
  pmpy_trace *t = pmpy_begin("concatenate", args[1]);
  if (!t || pmpy_ints(args[0], "concatenate", &dim, 1) != 1) return NULL;
  for (Py_ssize_t k = 1; k < n; k++) {
    if (pmpy_arg_need(t, "concatenate", args[k], &x[k - 1])) return NULL;
  }
  pmpy_promote(x, (uint32_t)n - 1, &dtype, &weak);
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t k = 0; k < n - 1; k++) {
    in[k] = pmpy_arg_as(t, &x[k], dtype);
    if (!in[k]) return NULL;
  }
  pm_attr_arg attr = {.id = PM_ATTR_DIM, .i = dim};
  return result(t, pmpy_emit(t, PM_OP_CONCAT, in, (uint32_t)n - 1, NULL, &attr, 1), weak);
}

static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x, index;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "gather: expected x and indices");
  pmpy_trace *t = begin("gather", args[0], &x);
  if (!t || another(t, "gather", args[1], PM_I32, &index)) return NULL;
  pm_val in[] = {x.val, index.val};
  return result(t, pmpy_emit(t, PM_OP_GATHER, in, 2, NULL, NULL, 0), x.weak);
}

static PyObject *scatter(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x, index, value;
  if (n != 3) return pmpy_fail(PM_E_TYPE, "scatter: expected x, indices and values");
  pmpy_trace *t = begin("scatter", args[0], &x);
  if (!t || another(t, "scatter", args[1], PM_I32, &index) ||
      another(t, "scatter", args[2], x.type.dtype, &value)) {
    return NULL;
  }
  pm_val in[] = {x.val, index.val, value.val};
  return result(t, pmpy_emit(t, PM_OP_SCATTER, in, 3, NULL, NULL, 0), x.weak);
}

static PyObject *scan(PyObject *module, PyObject *args) {
  static const struct {
    const char *name;
    uint8_t op;
  } kinds[] = {
      {"add", PM_REDUCE_ADD}, {"mul", PM_REDUCE_MUL}, {"max", PM_REDUCE_MAX}, {"min", PM_REDUCE_MIN}};
  (void)module;
  const char *kind;
  PyObject *o;
  int dim;
  pmpy_arg x;
  if (!PyArg_ParseTuple(args, "sOi:scan", &kind, &o, &dim)) return NULL;
  for (size_t k = 0; k < PM_COUNT(kinds); k++) {
    if (strcmp(kinds[k].name, kind)) continue;
    pmpy_trace *t = begin("scan", o, &x);
    if (!t) return NULL;
    pm_attr_arg attrs[] = {{.id = PM_ATTR_REDUCE, .i = kinds[k].op},
                           {.id = PM_ATTR_DIM, .i = dim}};
    return result(t, pmpy_emit(t, PM_OP_SCAN, &x.val, 1, NULL, attrs, 2), x.weak);
  }
  return pmpy_fail(PM_E_VALUE, "scan: kind '%s', expected add, mul, max or min", kind);
}

#define FAST(fn) (PyCFunction)(void (*)(void)) fn, METH_FASTCALL
PyMethodDef pmpy_move_functions[] = {
    {"transpose", FAST(transpose), "transpose(x, dims) -> Array: result dim k is dim dims[k]"},
    {"concat", FAST(concat), "concat(dim, *arrays) -> Array"},
    {"gather", FAST(gather), "gather(x, indices) -> Array: elements by their row-major numbers"},
    {"scatter", FAST(scatter), "scatter(x, indices, values) -> Array"},
    {"scan", scan, METH_VARARGS, "scan(kind, x, dim) -> Array; kind is add, mul, max or min"},
    {NULL, NULL, 0, NULL}};
