/* Functions that move elements of arrays (transpose, concat, gather, scatter, scan), and mma.
 * Names, axes and defaults of the language are composed of these in pallas_mgpu/_shapes.py. */
#include "../ir/relayout.h"
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

static PyObject *mma(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x[3];
  pm_val in[3];
  if (n != 3) return pmpy_fail(PM_E_TYPE, "mma: expected acc, a and b");
  pmpy_trace *t = begin("mma", args[0], &x[0]);
  for (int k = 0; k < 3; k++) {
    if (!t || (k && (pmpy_arg_need(t, "mma", args[k], &x[k]) ||
                     !pmpy_arg_as(t, &x[k], x[k].type.dtype)))) {
      return NULL;
    }
    in[k] = x[k].val;
  }
  return result(t, pmpy_emit(t, PM_OP_MMA, in, 3, NULL, NULL, 0), false);
}

static PyObject *scan(PyObject *module, PyObject *args) {
  static const struct {
    const char *name;
    uint8_t op;
  } kinds[] = {{"add", PM_REDUCE_ADD},
               {"mul", PM_REDUCE_MUL},
               {"max", PM_REDUCE_MAX},
               {"min", PM_REDUCE_MIN}};
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
    pm_attr_arg attrs[] = {{.id = PM_ATTR_REDUCE, .i = kinds[k].op}, {.id = PM_ATTR_DIM, .i = dim}};
    return result(t, pmpy_emit(t, PM_OP_SCAN, &x.val, 1, NULL, attrs, 2), x.weak);
  }
  return pmpy_fail(PM_E_VALUE, "scan: kind '%s', expected add, mul, max or min", kind);
}

typedef struct conversion {
  pm_graph *g;
  pm_type array;
  pm_layid from, to;
  int64_t shuffles, bytes;
  const char *text;
} conversion;

static pm_code convert_body(void *ctx, pm_err *err) {
  conversion *c = ctx;
  const pm_layout *a = pm_layout_of(c->g, c->from), *b = pm_layout_of(c->g, c->to);
  const int64_t bytes = pm_dtypes[c->array.dtype].bytes;
  int32_t *map = PM_NEW(c->g->arena, int32_t, pm_layout_regs(b));
  pm_relayout plan;
  (void)err;
  c->text = pm_layout_text(c->g->arena, b);
  if (pm_layout_register_map(c->g->arena, a, b, map)) return PM_OK;
  if (pm_relayout_plan(c->g->arena, a, b, &plan) && pm_relayout_pays(&plan, bytes)) {
    c->shuffles = pm_relayout_shuffles(&plan, bytes);
  } else {
    c->bytes = pm_type_size(&c->array) * bytes;
  }
  return PM_OK;
}

/* What a layout_cast costs, without a kernel. */
static PyObject *layout_conversion(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *dtype, *shape, *from, *to;
  conversion c = {.array = pm_scalar_type(PM_BOOL)};
  pm_dtype d;
  pm_err err;
  memset(&err, 0, sizeof err);
  if (!PyArg_ParseTuple(args, "OOOO:layout_conversion", &dtype, &shape, &from, &to) ||
      pmpy_dtype_from(dtype, &d) || pmpy_shape(shape, "layout_conversion", &c.array)) {
    return NULL;
  }
  c.array.dtype = (uint8_t)d;
  pmpy_graph *graph = pmpy_graph_new();
  if (!graph) return NULL;
  pm_graph g;
  memset(&g, 0, sizeof g);
  g.arena = &graph->arena;
  c.g = &g;
  PyObject *out = NULL;
  c.from = pmpy_layout_in(&g, NULL, from, &c.array);
  c.to = c.from ? pmpy_layout_in(&g, NULL, to, &c.array) : 0;
  if (c.to) {
    out = pm_protect(convert_body, &c, &err)
              ? pmpy_raise(&err)
              : Py_BuildValue("(LLs)", (long long)c.shuffles, (long long)c.bytes, c.text);
  }
  Py_DECREF(graph);
  return out;
}

/* Which element each register of each lane holds. */
static PyObject *layout_elements(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *shape, *spec;
  pm_type array = pm_scalar_type(PM_I32);
  if (!PyArg_ParseTuple(args, "OO:layout_elements", &shape, &spec) ||
      pmpy_shape(shape, "layout_elements", &array)) {
    return NULL;
  }
  pmpy_graph *graph = pmpy_graph_new();
  if (!graph) return NULL;
  pm_graph g;
  memset(&g, 0, sizeof g);
  g.arena = &graph->arena;
  const pm_layid id = pmpy_layout_in(&g, NULL, spec, &array);
  PyObject *lanes = id ? PyList_New(128) : NULL;
  for (int tid = 0; lanes && tid < 128; tid++) {
    const pm_layout *l = pm_layout_of(&g, id);
    const int64_t n = pm_layout_regs(l);
    int64_t index[PM_MAX_RANK];
    PyObject *regs = PyList_New(n);
    if (regs) PyList_SET_ITEM(lanes, tid, regs);
    for (int64_t r = 0; regs && r < n; r++) {
      int64_t at = 0;
      const bool valid = pm_layout_index(l, tid, r, index);
      for (int k = 0; k < array.rank; k++) at = at * array.dim[k] + index[k];
      PyList_SET_ITEM(regs, r, PyLong_FromLongLong(valid ? at : -1));
    }
    if (!regs) Py_CLEAR(lanes);
  }
  Py_DECREF(graph);
  return lanes;
}

#define FAST(fn) (PyCFunction)(void (*)(void)) fn, METH_FASTCALL
static PyMethodDef functions[] = {
    {"transpose", FAST(transpose), "transpose(x, dims) -> Array: result dim k is dim dims[k]"},
    {"concat", FAST(concat), "concat(dim, *arrays) -> Array"},
    {"mma", FAST(mma), "mma(acc, a, b) -> Array: acc + a @ b by mma.sync"},
    {"gather", FAST(gather), "gather(x, indices) -> Array: elements by their row-major numbers"},
    {"scatter", FAST(scatter), "scatter(x, indices, values) -> Array"},
    {"scan", scan, METH_VARARGS, "scan(kind, x, dim) -> Array; kind is add, mul, max or min"},
    {"layout_conversion", layout_conversion, METH_VARARGS,
     "layout_conversion(dtype, shape, layout, to) -> (shuffles of a lane, bytes of SMEM, name)"},
    {"layout_elements", layout_elements, METH_VARARGS,
     "layout_elements(shape, layout) -> row-major numbers of elements, [lane][register], -1: none"},
    {NULL, NULL, 0, NULL}};

int pmpy_init_moves(PyObject *module) { return PyModule_AddFunctions(module, functions); }
