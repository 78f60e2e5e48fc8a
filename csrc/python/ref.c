/* Ref: memory that a kernel can read and write, a barrier, or an accumulator, or a view of one.
 *
 * Views are pure ops on the ref's value in terms of logical dimensions; nothing is resolved here.
 * An index is parsed once, for refs and arrays alike, into one start and one size for each
 * dimension. A traced start that is known to be a constant becomes static. */
#include "trace.h"

static pmpy_traced *self_of(PyObject *o) { return (pmpy_traced *)o; }

/* ---- indices ------------------------------------------------------------------------------- */

typedef struct parser {
  pmpy_trace *t;
  const pm_type *type;
  bool array;
  pmpy_index *out;
} parser;

static pm_code index_code(const parser *p) { return p->array ? PM_E_INDEX : PM_E_VALUE; }

static int static_int(const parser *p, int k, PyObject *o) {
  int64_t dim = p->type->dim[k], i;
  if (pmpy_ints(o, "index", &i, 1) != 1) return -1;
  if (i < -dim || i >= dim) {
    pmpy_fail(index_code(p), "index %lld is out of bounds for dimension %d of %s", (long long)i, k,
              pmpy_type_text(p->type));
    return -1;
  }
  p->out->start[k] = i < 0 ? i + dim : i;
  p->out->size[k] = PM_DROPPED;
  return 0;
}

/* A traced start: an int scalar of any dtype. */
static int traced_start(const parser *p, int k, PyObject *o, int64_t size) {
  pmpy_arg x;
  pm_scalar known;
  if (p->array) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "Unimplemented primitive in Pallas Mosaic GPU lowering: dynamic_slice (a traced "
              "index of an array); "
              "index the ref instead: ref[i]");
    return -1;
  }
  if (pmpy_arg_need(p->t, "index", o, &x)) return -1;
  if (x.type.rank) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "index: arrays as indices (%s) are not available; use scalars and pl.ds (TMA gathers "
              "rows on Blackwell only)",
              pmpy_type_text(&x.type));
    return -1;
  }
  if (!pm_is_int(x.type.dtype)) {
    pmpy_fail(PM_E_TYPE, "index: a traced index must be an integer scalar, got %s",
              pmpy_type_text(&x.type));
    return -1;
  }
  p->out->size[k] = size;
  const int64_t extent = size == PM_DROPPED ? 1 : (size - 1) * p->out->stride[k] + 1;
  /* a block may overhang where its start was computed: that stays a matter of run time */
  if (pm_constant(p->t->g, x.val, &known) && known.i >= 0 && known.i <= p->type->dim[k] - extent) {
    p->out->start[k] = known.i;
    return 0;
  }
  p->out->start[k] = PM_DYNAMIC;
  p->out->dyn[p->out->n_dyn] = pmpy_arg_as(p->t, &x, PM_I32);
  return p->out->dyn[p->out->n_dyn++] ? 0 : -1;
}

static int python_slice(const parser *p, int k, PyObject *o) {
  PySliceObject *s = (PySliceObject *)o;
  Py_ssize_t start, stop, step;
  PyObject *part[3] = {s->start, s->stop, s->step};
  for (int i = 0; i < 3; i++) {
    if (!PMPY_IS_ARRAY(part[i])) continue;
    if (p->array) {
      pmpy_fail(
          PM_E_INDEX,
          "Array slice indices must have static start/stop/step; index the ref with pl.ds instead");
    } else {
      pmpy_tracer_fail(PMPY_BOOL_CONVERSION,
                       "a slice with a traced bound: use pl.ds(start, size), whose size is static");
    }
    return -1;
  }
  if (PySlice_Unpack(o, &start, &stop, &step) < 0) return -1;
  if (step < 1 || (p->array && step != 1)) {
    pmpy_fail(step < 1 ? index_code(p) : PM_E_NOT_IMPLEMENTED,
              step < 1 ? "index: step %zd of dimension %d, it must be at least 1"
                       : "Strided slices of arrays not implemented: step %zd of dimension %d; "
                         "slice the ref instead",
              step, k);
    return -1;
  }
  p->out->stride[k] = step;
  Py_ssize_t size = PySlice_AdjustIndices((Py_ssize_t)p->type->dim[k], &start, &stop, step);
  if (size < 1) {
    pmpy_fail(index_code(p), "index: the slice of dimension %d of %s is empty", k,
              pmpy_type_text(p->type));
    return -1;
  }
  p->out->start[k] = start;
  p->out->size[k] = size;
  return 0;
}

/* pl.Slice: start (int, None or traced), size (int), stride (1) */
static int pallas_slice(const parser *p, int k, PyObject *o, PyObject *start) {
  int64_t size, stride = 1, at = 0;
  int rc = -1;
  PyObject *py_size = PyObject_GetAttrString(o, "size");
  PyObject *py_stride = py_size ? PyObject_GetAttrString(o, "stride") : NULL;
  if (!py_stride) goto done;
  if (PMPY_IS_ARRAY(py_size)) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "Dynamic slice size not supported: the size of pl.ds must be a Python int");
    goto done;
  }
  if (PMPY_IS_ARRAY(py_stride)) {
    pmpy_fail(PM_E_VALUE, "pl.ds: the stride must be a Python int");
    goto done;
  }
  if (pmpy_ints(py_size, "pl.ds: size", &size, 1) != 1 ||
      pmpy_ints(py_stride, "pl.ds: stride", &stride, 1) != 1)
    goto done;
  if (stride < 1 || (p->array && stride != 1)) {
    pmpy_fail(stride < 1 ? PM_E_VALUE : PM_E_NOT_IMPLEMENTED,
              stride < 1 ? "pl.ds: stride %lld, it must be at least 1"
                         : "Strided slices of arrays not implemented: stride %lld of pl.ds; slice "
                           "the ref instead",
              (long long)stride);
    goto done;
  }
  if (size < 1) {
    pmpy_fail(index_code(p), "pl.ds: size %lld, it must be at least 1", (long long)size);
    goto done;
  }
  p->out->stride[k] = stride;
  PyObject *value = pmpy_size_value(start);
  if (!value && PyErr_Occurred()) goto done;
  if (value || PMPY_IS_ARRAY(start)) {
    rc = traced_start(p, k, value ? value : start, size);
    Py_XDECREF(value);
    goto done;
  }
  if (start != Py_None && pmpy_ints(start, "pl.ds: start", &at, 1) != 1) goto done;
  if (at < 0) {
    pmpy_fail(index_code(p), "pl.ds: start %lld, it must not be negative", (long long)at);
    goto done;
  }
  if (p->array && size > p->type->dim[k] - at) {
    pmpy_fail(PM_E_INDEX, "index: %lld elements from %lld are out of bounds for dimension %d of %s",
              (long long)size, (long long)at, k, pmpy_type_text(p->type));
    goto done;
  }
  p->out->start[k] = at;
  p->out->size[k] = size;
  rc = 0;
done:
  Py_XDECREF(py_size);
  Py_XDECREF(py_stride);
  return rc;
}

/* Arrays of NumPy and others; those of rank 0 are ints. */
static bool is_array_index(PyObject *o) {
  if (PyLong_Check(o) || !PyObject_HasAttrString(o, "__array__")) return false;
  PyObject *ndim = PyObject_GetAttrString(o, "ndim");
  bool is = ndim && PyLong_Check(ndim) && PyLong_AsLong(ndim) > 0;
  Py_XDECREF(ndim);
  PyErr_Clear();
  return is;
}

static int one_index(const parser *p, int k, PyObject *o) {
  PyObject *size = pmpy_size_value(o);
  if (size) {
    const int rc = traced_start(p, k, size, PM_DROPPED);
    Py_DECREF(size);
    return rc;
  }
  if (PyErr_Occurred()) return -1;
  if (PMPY_IS_ARRAY(o)) return traced_start(p, k, o, PM_DROPPED);
  if (PySlice_Check(o)) return python_slice(p, k, o);
  if (PyBool_Check(o)) {
    pmpy_fail(index_code(p), "index: a bool is no index (masks are not available)");
    return -1;
  }
  if (is_array_index(o)) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "index: arrays as indices (a %s) are not available; use scalars and pl.ds (TMA "
              "gathers rows on Blackwell only)",
              Py_TYPE(o)->tp_name);
    return -1;
  }
  if (PyIndex_Check(o)) return static_int(p, k, o);
  PyObject *start = PyObject_GetAttrString(o, "start");
  if (start) {
    int rc = pallas_slice(p, k, o, start);
    Py_DECREF(start);
    return rc;
  }
  PyErr_Clear();
  pmpy_fail(index_code(p), "index: %s is no index; use ints, slices, pl.ds and ...",
            Py_TYPE(o)->tp_name);
  return -1;
}

static void whole_dim(const parser *p, int k) {
  p->out->start[k] = 0;
  p->out->size[k] = p->type->dim[k];
}

int pmpy_parse_index(pmpy_trace *t, PyObject *idx, const pm_type *type, bool array,
                     pmpy_index *out) {
  parser p = {t, type, array, out};
  bool tuple = PyTuple_Check(idx);
  Py_ssize_t n = tuple ? PyTuple_GET_SIZE(idx) : 1;
  PyObject *const *item = tuple ? PySequence_Fast_ITEMS(idx) : &idx;
  Py_ssize_t dots = 0, news = 0;
  out->n_dyn = 0;
  out->n_new = 0;
  out->strided = false;
  for (int d = 0; d < PM_MAX_RANK; d++) out->stride[d] = 1;
  for (Py_ssize_t k = 0; k < n; k++) {
    dots += item[k] == Py_Ellipsis;
    news += item[k] == Py_None;
  }
  if (dots > 1 || news > PM_MAX_RANK) {
    pmpy_fail(index_code(&p),
              dots > 1 ? "index: at most one ... is accepted" : "index: too many None");
    return -1;
  }
  Py_ssize_t given = n - dots - news;
  if (given > type->rank) {
    pmpy_fail(index_code(&p), "index: too many indices, %zd for %s", given, pmpy_type_text(type));
    return -1;
  }
  int k = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (item[i] == Py_Ellipsis) {
      for (Py_ssize_t left = type->rank - given; left > 0; left--, k++) whole_dim(&p, k);
    } else if (item[i] == Py_None) {
      out->new_at[out->n_new++] = (uint8_t)k;
    } else {
      if (one_index(&p, k, item[i])) return -1;
      k++;
    }
  }
  for (; k < type->rank; k++) whole_dim(&p, k);
  out->full = !out->n_new;
  for (k = 0; k < type->rank; k++) {
    out->full &= !out->start[k] && out->size[k] == type->dim[k];
    out->strided |= out->size[k] > 1 && out->stride[k] > 1;
  }
  return 0;
}

int pmpy_indexed_type(const pmpy_index *index, const pm_type *from, pm_type *to) {
  int64_t dim[2 * PM_MAX_RANK] = {0};
  int n = 0;
  for (int k = 0, m = 0; k <= from->rank; k++) {
    for (; m < index->n_new && index->new_at[m] == k; m++) dim[n++] = 1;
    if (k < from->rank && index->size[k] != PM_DROPPED) dim[n++] = index->size[k];
  }
  if (n > PM_MAX_RANK) {
    pmpy_fail(PM_E_INDEX, "index: the result has more than %d dimensions", PM_MAX_RANK);
    return -1;
  }
  *to = *from;
  to->rank = (uint8_t)n;
  memcpy(to->dim, dim, sizeof to->dim);
  return 0;
}

/* of what is no ref in memory */
static const char *kind_text(const pmpy_traced *r) {
  if (r->type.kind == PM_SEMAPHORE) return "a semaphore";
  if (r->type.kind == PM_BARRIER) return "a barrier";
  return r->type.space == PM_TMEM ? "a ref in TMEM" : "an accumulator";
}

/* ---- views --------------------------------------------------------------------------------- */

static pmpy_trace *begin_ref(const char *what, PyObject *self) {
  pmpy_trace *t = pmpy_begin(what, self);
  return t && !pmpy_check_open(t, self_of(self)) ? t : NULL;
}

/* The value of ref[index] as a view: the ref's own one if nothing is cut. */
static pm_val view_of(pmpy_trace *t, const pmpy_traced *r, PyObject *idx, pm_type *type) {
  pmpy_index index;
  pm_val in[PM_MAX_RANK + 1] = {r->val};
  if (pmpy_parse_index(t, idx, &r->type, false, &index)) return 0;
  *type = r->type;
  if (index.full) return r->val;
  if (index.n_new && !pm_is_memory(&r->type)) {
    pmpy_fail(PM_E_VALUE, "index: None is for refs in memory, not for %s", kind_text(r));
    return 0;
  }
  memcpy(in + 1, index.dyn, sizeof index.dyn);
  pm_attr_arg attrs[] = {{.id = PM_ATTR_STARTS, .list = index.start, .n = r->type.rank},
                         {.id = PM_ATTR_SIZES, .list = index.size, .n = r->type.rank},
                         {.id = PM_ATTR_STRIDES, .list = index.stride, .n = r->type.rank}};
  pm_val v = pmpy_emit(t, PM_OP_INDEX, in, 1 + index.n_dyn, NULL, attrs, index.strided ? 3 : 2);
  if (v && index.n_new) {
    pm_type to;
    if (pmpy_indexed_type(&index, &r->type, &to)) return 0;
    v = pmpy_emit(t, PM_OP_RESHAPE_REF, &v, 1, &to, NULL, 0);
  }
  if (v) *type = *pm_typeof(t->g, v);
  return v;
}

/* Array indices: what they name is no view of a few strides. It is an object of _jnp/refs.py; NULL
 * with no error where all indices are plain. */
static PyObject *by_arrays(PyObject *self, PyObject *idx) {
  const pm_type *type = &self_of(self)->type;
  const bool tuple = PyTuple_Check(idx);
  const Py_ssize_t n = tuple ? PyTuple_GET_SIZE(idx) : 1;
  bool found = false;
  if (!pm_is_memory(type)) return NULL;
  for (Py_ssize_t k = 0; k < n; k++) {
    PyObject *o = tuple ? PyTuple_GET_ITEM(idx, k) : idx;
    found |= PMPY_IS_ARRAY(o) ? self_of(o)->type.rank > 0 : is_array_index(o);
  }
  if (!found) return NULL;
  PyObject *hook = pmpy_hook(PMPY_HOOK_INDEX_REF);
  return hook ? PyObject_CallFunctionObjArgs(hook, self, idx, NULL) : NULL;
}

/* What overhangs a ref in memory is no view, but may be accessed with a mask: an object of
 * _clipped.py that keeps the error for all else. NULL with the error as it was for other errors. */
static PyObject *overhanging(PyObject *self, PyObject *idx) {
  const pm_type *type = &self_of(self)->type;
  if (!pm_is_memory(type)) return NULL;
  if (!PyErr_ExceptionMatches(PyExc_ValueError)) return NULL;
  PyObject *kind, *error, *traceback;
  PyErr_Fetch(&kind, &error, &traceback);
  PyErr_NormalizeException(&kind, &error, &traceback);
  PyObject *hook = pmpy_hook(PMPY_HOOK_OVERHANGING);
  PyObject *out = hook ? PyObject_CallFunctionObjArgs(hook, self, idx, error, NULL) : NULL;
  if (!out) PyErr_Clear(); /* it is wrong in another way, too: the first error stands */
  if (out && out != Py_None) {
    Py_DECREF(kind), Py_XDECREF(error), Py_XDECREF(traceback);
    return out;
  }
  Py_XDECREF(out);
  PyErr_Restore(kind, error, traceback);
  return NULL;
}

static PyObject *at_index(PyObject *self, PyObject *idx) {
  PyObject *indexed = by_arrays(self, idx);
  if (indexed || PyErr_Occurred()) return indexed;
  pmpy_trace *t = begin_ref("index", self);
  pm_type type;
  pm_val v = t ? view_of(t, self_of(self), idx, &type) : 0;
  return v ? pmpy_traced_new(t, v, false) : overhanging(self, idx);
}

static bool is_view_base(const pmpy_traced *r, const char *what) {
  if (pm_is_memory(&r->type)) return true;
  pmpy_fail(PM_E_VALUE, "%s: %s has no such view", what, kind_text(r));
  return false;
}

static PyObject *permuted(PyObject *self, const int64_t *perm, uint32_t n) {
  pmpy_trace *t = begin_ref("transpose", self);
  const pmpy_traced *r = self_of(self);
  if (!t || !is_view_base(r, "transpose")) return NULL;
  bool identity = n == r->type.rank;
  for (uint32_t k = 0; k < n; k++) identity &= perm[k] == k;
  if (identity) return Py_NewRef(self);
  pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = perm, .n = n};
  pm_val v = pmpy_emit(t, PM_OP_TRANSPOSE_REF, &r->val, 1, NULL, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *ref_transpose(PyObject *self, PyObject *perm) {
  int64_t dims[PM_MAX_RANK];
  int n = pmpy_ints(perm, "transpose", dims, PM_MAX_RANK);
  return n < 0 ? NULL : permuted(self, dims, (uint32_t)n);
}

static PyObject *get_T(PyObject *self, void *c) {
  int64_t dims[PM_MAX_RANK];
  uint32_t n = self_of(self)->type.rank;
  (void)c;
  for (uint32_t k = 0; k < n; k++) dims[k] = n - 1 - k;
  return permuted(self, dims, n);
}

static PyObject *get_shape(PyObject *self, void *c);

/* New, or NULL: the arguments of reshape as a list. Sizes of the call (plgpu.dim) that are extents
 * of the ref become what its type has for them; of other sizes pmpy_ints speaks. */
static PyObject *typed_shape(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  const bool listed = n == 1 && PySequence_Check(args[0]);
  PyObject *list = listed ? PySequence_List(args[0]) : PyList_New(n),
           *shape = get_shape(self, NULL);
  for (Py_ssize_t k = 0; list && !listed && k < n; k++) {
    PyList_SET_ITEM(list, k, Py_NewRef(args[k]));
  }
  const pm_type *type = &self_of(self)->type;
  for (Py_ssize_t k = 0; list && shape && k < PyList_GET_SIZE(list); k++) {
    PyObject *given = PyList_GET_ITEM(list, k);
    for (Py_ssize_t d = 0; list && d < type->rank && !PyLong_Check(given); d++) {
      PyObject *extent = PyTuple_GET_ITEM(shape, d);
      if (PyLong_Check(extent) || Py_TYPE(extent) != Py_TYPE(given)) continue;
      if (PyObject_Hash(extent) != PyObject_Hash(given)) continue; /* == makes ops of sizes */
      PyObject *known = PyLong_FromLongLong(type->dim[d]);
      if (!known || PyList_SetItem(list, k, known)) Py_CLEAR(list);
      break;
    }
  }
  Py_XDECREF(shape);
  if (!shape) Py_CLEAR(list);
  return list;
}

static PyObject *ref_reshape(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  pmpy_trace *t = begin_ref("reshape", self);
  const pmpy_traced *r = self_of(self);
  pm_type to;
  if (!t || !is_view_base(r, "reshape")) return NULL;
  PyObject *shape = typed_shape(self, args, n);
  const int failed = !shape || pmpy_reshape_args(&r->type, &shape, 1, PM_E_VALUE, &to);
  Py_XDECREF(shape);
  if (failed) return NULL;
  if (to.rank == r->type.rank && !memcmp(to.dim, r->type.dim, sizeof(int64_t) * to.rank))
    return Py_NewRef(self);
  pm_val v = pmpy_emit(t, PM_OP_RESHAPE_REF, &r->val, 1, &to, NULL, 0);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* ---- loads and stores ---------------------------------------------------------------------- */

static bool can_access(const pmpy_traced *r) {
  if (r->type.kind == PM_REF && r->type.space == PM_TMEM) {
    pmpy_fail(PM_E_RUNTIME,
              "a ref in TMEM cannot be read or written by []; use plgpu.async_load_tmem(ref), or "
              "plgpu.async_store_tmem(ref, value) and plgpu.commit_tmem()");
    return false;
  }
  if (r->type.kind == PM_REF) return true;
  if (r->type.kind == PM_SEMAPHORE) {
    pmpy_fail(PM_E_VALUE,
              "a semaphore cannot be read or written; use pl.semaphore_read, semaphore_signal and "
              "semaphore_wait, and .at[i] for one of several");
    return false;
  }
  pmpy_fail(PM_E_VALUE,
            "a barrier cannot be read or written; use barrier_arrive and barrier_wait, and .at[i] "
            "for one of several");
  return false;
}

static pm_val load_view(pmpy_trace *t, pm_val view, pm_layid layout, bool optimized) {
  pm_attr_arg attrs[] = {{.id = PM_ATTR_LAYOUT, .i = layout},
                         {.id = PM_ATTR_OPTIMIZED, .i = optimized}};
  return pmpy_emit(t, PM_OP_LOAD, &view, 1, NULL, attrs, 2);
}

static pm_val acc_value(pmpy_trace *t, pm_val acc, int64_t pending) {
  pm_attr_arg n = {.id = PM_ATTR_N, .i = pending};
  return pmpy_emit(t, PM_OP_ACC_LOAD, &acc, 1, NULL, &n, 1);
}

static PyObject *ref_subscript(PyObject *self, PyObject *idx) {
  pmpy_trace *t = begin_ref("load", self);
  const pmpy_traced *r = self_of(self);
  pm_type type;
  if (!t || !can_access(r)) return NULL;
  if (r->type.space == PM_ACC) {
    pm_val v = acc_value(t, r->val, 0);
    PyObject *all = v ? pmpy_traced_new(t, v, false) : NULL;
    if (!all || idx == Py_Ellipsis) return all;
    PyObject *part = PyObject_GetItem(all, idx);
    Py_DECREF(all);
    return part;
  }
  PyObject *indexed = by_arrays(self, idx);
  if (indexed || PyErr_Occurred()) {
    PyObject *out = indexed ? PyObject_GetItem(indexed, Py_Ellipsis) : NULL;
    Py_XDECREF(indexed);
    return out;
  }
  pm_val v = view_of(t, r, idx, &type);
  if (v) v = load_view(t, v, 0, true);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static int bad_store(const char *what, const pm_type *ref, const pm_type *value, bool shape) {
  PyObject *to = pmpy_shape_tuple(ref), *from = pmpy_shape_tuple(value);
  if (to && from) {
    PyObject *text =
        shape ? PyUnicode_FromFormat(
                    "%s for `swap`. Ref shape: %S. Value shape: %S. There is no broadcasting: "
                    "use jnp.full(ref.shape, value, ref.dtype)",
                    what, to, from)
              : PyUnicode_FromFormat(
                    "%s for `swap`. Ref dtype: %s. Value dtype: %s. Convert it: "
                    "value.astype(ref.dtype)",
                    what, pm_dtypes[ref->dtype].text, pm_dtypes[value->dtype].text);
    const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
    if (s) pmpy_fail(PM_E_VALUE, "%s", s);
    Py_XDECREF(text);
  }
  Py_XDECREF(to);
  Py_XDECREF(from);
  return -1;
}

/* The value to store into a view of this type: its shape must match exactly; integers convert to
 * any integer dtype and weakly typed floats to any float dtype. */
static pm_val stored_value(pmpy_trace *t, const pm_type *ref, PyObject *value) {
  pmpy_arg x;
  if (PMPY_IS_REF(value)) {
    pmpy_fail(PM_E_VALUE, "store: the value is a Ref (%s); load it first: ref[...]",
              pmpy_type_text(&self_of(value)->type));
    return 0;
  }
  if (pmpy_arg_need(t, "store", value, &x)) return 0;
  if (x.type.rank != ref->rank || memcmp(x.type.dim, ref->dim, sizeof(int64_t) * ref->rank)) {
    bad_store("Invalid shape", ref, &x.type, true);
    return 0;
  }
  bool ok = x.type.dtype == ref->dtype || (pm_is_int(x.type.dtype) && pm_is_int(ref->dtype)) ||
            (x.weak && pm_is_float(x.type.dtype) && pm_is_float(ref->dtype));
  if (!ok) {
    bad_store("Invalid dtype", ref, &x.type, false);
    return 0;
  }
  return pmpy_arg_as(t, &x, ref->dtype);
}

static PyObject *stored(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  if (n != 2 || !PMPY_IS_ARRAY(args[0])) {
    return pmpy_fail(PM_E_TYPE, "stored: expected an array and a value");
  }
  pmpy_trace *t = pmpy_begin("store", args[0]);
  const pm_val v = t ? stored_value(t, &self_of(args[0])->type, args[1]) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static int store_view(pmpy_trace *t, pm_val view, const pm_type *type, PyObject *value) {
  pm_val v = stored_value(t, type, value);
  return v && pmpy_emit(t, PM_OP_STORE, (pm_val[]){view, v}, 2, NULL, NULL, 0) ? 0 : -1;
}

static int acc_store(pmpy_trace *t, const pmpy_traced *r, PyObject *idx, PyObject *value) {
  pmpy_index index;
  if (pmpy_parse_index(t, idx, &r->type, false, &index)) return -1;
  if (!index.full) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "storing to a part of an accumulator; store to all of it: acc[...] = value");
    return -1;
  }
  pm_val v = stored_value(t, &r->type, value);
  return v && pmpy_emit(t, PM_OP_ACC_STORE, (pm_val[]){r->val, v}, 2, NULL, NULL, 0) ? 0 : -1;
}

static int ref_assign(PyObject *self, PyObject *idx, PyObject *value) {
  const pmpy_traced *r = self_of(self);
  if (!value) {
    pmpy_fail(PM_E_TYPE, "a part of a Ref cannot be deleted");
    return -1;
  }
  pmpy_trace *t = begin_ref("store", self);
  pm_type type;
  if (!t || !can_access(r)) return -1;
  if (r->type.space == PM_ACC) return acc_store(t, r, idx, value);
  PyObject *indexed = by_arrays(self, idx);
  if (indexed || PyErr_Occurred()) {
    const int rc = indexed ? PyObject_SetItem(indexed, Py_Ellipsis, value) : -1;
    Py_XDECREF(indexed);
    return rc;
  }
  pm_val view = view_of(t, r, idx, &type);
  return view ? store_view(t, view, &type, value) : -1;
}

static PyObject *ref_get(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"idx", NULL};
  PyObject *idx = Py_Ellipsis;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O:get", names, &idx)) return NULL;
  return ref_subscript(self, idx);
}

static PyObject *ref_set(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"value", "idx", NULL};
  PyObject *value, *idx = Py_Ellipsis;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:set", names, &value, &idx)) return NULL;
  if (ref_assign(self, idx, value)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *ref_swap(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"value", "idx", NULL};
  PyObject *value, *idx = Py_Ellipsis;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:swap", names, &value, &idx)) return NULL;
  PyObject *old = ref_subscript(self, idx);
  if (old && ref_assign(self, idx, value)) Py_CLEAR(old);
  return old;
}

static PyObject *ref_addupdate(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"value", "idx", NULL};
  PyObject *value, *idx = Py_Ellipsis;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:addupdate", names, &value, &idx)) return NULL;
  PyObject *old = ref_subscript(self, idx), *sum = old ? PyNumber_Add(old, value) : NULL;
  const bool ok = sum && !ref_assign(self, idx, sum);
  Py_XDECREF(old);
  Py_XDECREF(sum);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject *ref_bitcast(PyObject *self, PyObject *dtype) {
  pmpy_trace *t = begin_ref("bitcast", self);
  const pmpy_traced *r = self_of(self);
  pm_type to = r->type;
  pm_dtype d;
  if (!t || !is_view_base(r, "bitcast") || pmpy_dtype_from(dtype, &d)) return NULL;
  if (d == (pm_dtype)to.dtype) return Py_NewRef(self);
  to.dtype = (uint8_t)d;
  pm_val v = pmpy_emit(t, PM_OP_BITCAST_REF, &r->val, 1, &to, NULL, 0);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* A ref where an array is meant: arithmetic, NumPy. */
static PyObject *refuse_array(PyObject *a, PyObject *b) {
  const pm_type *type = &self_of(PMPY_IS_REF(a) ? a : b)->type;
  return pmpy_fail(PM_E_TYPE, "a Ref (%s) is memory, not an array; load it first: ref[...]",
                   pmpy_type_text(type));
}

static PyObject *refuse_unary(PyObject *self) { return refuse_array(self, self); }

static PyObject *refuse_power(PyObject *a, PyObject *b, PyObject *m) {
  (void)m;
  return refuse_array(a, b);
}

static PyObject *ref_compare(PyObject *a, PyObject *b, int op) {
  if (op == Py_EQ || op == Py_NE) Py_RETURN_NOTIMPLEMENTED; /* identity */
  return refuse_array(a, b);
}

static Py_hash_t ref_hash(PyObject *self) { return (Py_hash_t)((uintptr_t)self >> 4); }

static PyObject *ref_numpy(PyObject *self, PyObject *args, PyObject *kw) {
  (void)args, (void)kw;
  return pmpy_tracer_fail(PMPY_ARRAY_CONVERSION,
                          "a Ref (%s) cannot become a NumPy array: load it with ref[...] and use "
                          "the functions of pallas_mgpu.numpy",
                          pmpy_type_text(&self_of(self)->type));
}

/* ---- attributes ---------------------------------------------------------------------------- */

static PyObject *get_shape(PyObject *self, void *c) {
  const pmpy_traced *r = self_of(self);
  (void)c;
  PyObject *shape = pmpy_shape_tuple(&r->type);
  for (int d = 0; shape && r->trace->g && d < r->type.rank; d++) {
    const uint32_t size = pm_whole_extent(r->trace->g, r->val, (uint32_t)d);
    PyObject *hook = size ? pmpy_hook(PMPY_HOOK_SIZE) : NULL;
    if (!size) continue;
    PyObject *dim = hook ? PyObject_CallFunction(hook, "I", size) : NULL;
    if (!dim) Py_CLEAR(shape);
    else Py_SETREF(PyTuple_GET_ITEM(shape, d), dim);
  }
  return shape;
}

static PyObject *get_dtype(PyObject *self, void *c) {
  const pm_type *type = &self_of(self)->type;
  (void)c;
  return type->kind == PM_REF ? pmpy_dtype_object(type->dtype)
                              : PyUnicode_FromString(pm_element_text(type));
}

static PyObject *get_ndim(PyObject *self, void *c) {
  (void)c;
  return PyLong_FromLong(self_of(self)->type.rank);
}

static PyObject *get_size(PyObject *self, void *c) {
  PyObject *shape = get_shape(self, c), *size = shape ? PyLong_FromLong(1) : NULL;
  for (Py_ssize_t d = 0; size && d < PyTuple_GET_SIZE(shape); d++) {
    PyObject *extent = PyTuple_GET_ITEM(shape, d);
    Py_SETREF(size, d ? PyNumber_Multiply(size, extent) : Py_NewRef(extent));
  }
  Py_XDECREF(shape);
  return size;
}

/* The member of plgpu.MemorySpace. */
static PyObject *get_space(PyObject *self, void *c) {
  const pm_type *type = &self_of(self)->type;
  (void)c;
  const int space = type->kind == PM_BARRIER     ? PM_SMEM
                    : type->kind == PM_SEMAPHORE ? PM_GMEM
                                                 : type->space;
  PyObject *members = pmpy_hook(PMPY_HOOK_MEMORY_SPACE);
  return members ? PyObject_GetAttrString(members, pm_spaces[space].member) : NULL;
}

static PyObject *get_transforms(PyObject *self, void *c) {
  const pmpy_traced *r = self_of(self);
  const pm_graph *g = r->trace->g;
  const pm_opid alloc = g ? pm_value_of(g, pm_view_base(g, r->val))->def : 0;
  (void)c;
  if (!alloc || pm_get(g, alloc)->code != PM_OP_ALLOC_SMEM || !*pm_attr(g, alloc, PM_ATTR_GIVEN)) {
    return PyTuple_New(0);
  }
  pm_type tiling = {.rank = 0};
  uint32_t n;
  const int64_t *tile = pm_attr_list(g, alloc, PM_ATTR_TILING, &n);
  if (*pm_attr(g, alloc, PM_ATTR_GIVEN) == PM_GIVEN_SWIZZLE)
    n = 0; /* it follows from the swizzle */
  for (uint32_t k = 0; k < n; k++) tiling.dim[tiling.rank++] = tile[k];
  PyObject *hook = pmpy_hook(PMPY_HOOK_REF_TRANSFORMS);
  PyObject *tiles = hook ? pmpy_shape_tuple(&tiling) : NULL;
  PyObject *out = tiles ? PyObject_CallFunction(hook, "OL", tiles,
                                                (long long)*pm_attr(g, alloc, PM_ATTR_SWIZZLE))
                        : NULL;
  Py_XDECREF(tiles);
  return out;
}

static PyObject *get_is_view(PyObject *self, void *c) {
  const pmpy_traced *r = self_of(self);
  const pm_graph *g = r->trace->g;
  (void)c;
  pm_opid def = g ? pm_value_of(g, r->val)->def : 0;
  return PyBool_FromLong(
      def && pm_makes_view(pm_get(g, def)->code) && pm_get(g, def)->code != PM_OP_CLUSTER_REF &&
      pm_get(g, def)->code != PM_OP_DEVICE_REF && pm_get(g, def)->code != PM_OP_MULTICAST_REF);
}

/* Names that other libraries' barriers have. */
static PyObject *no_method(PyObject *self, void *instead) {
  PyErr_Format(PyExc_AttributeError, "a Ref has no such method; the right form is %s(barrier)",
               (const char *)instead);
  (void)self;
  return NULL;
}

static Py_ssize_t ref_length(PyObject *self) {
  const pm_type *type = &self_of(self)->type;
  if (type->rank) return (Py_ssize_t)type->dim[0];
  pmpy_fail(PM_E_TYPE, "len() of a Ref of rank 0");
  return -1;
}

static PyObject *ref_repr(PyObject *self) {
  const pm_type *type = &self_of(self)->type;
  if (type->kind != PM_REF) return PyUnicode_FromFormat("Ref<%s>", pmpy_type_text(type));
  return PyUnicode_FromFormat("Ref<%s, %s>", pmpy_type_text(type), pm_spaces[type->space].text);
}

static void ref_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Py_DECREF(self_of(self)->trace);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* ref.at */
typedef struct indexer {
  PyObject_HEAD PyObject *ref; /* owned */
} indexer;

static PyTypeObject *indexer_type;

static PyObject *get_at(PyObject *self, void *c) {
  (void)c;
  indexer *at = PyObject_New(indexer, indexer_type);
  if (at) at->ref = Py_NewRef(self);
  return (PyObject *)at;
}

static PyObject *indexer_subscript(PyObject *self, PyObject *idx) {
  return at_index(((indexer *)self)->ref, idx);
}

static void indexer_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Py_DECREF(((indexer *)self)->ref);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyType_Slot indexer_slots[] = {{Py_tp_dealloc, indexer_dealloc},
                                      {Py_mp_subscript, indexer_subscript},
                                      {Py_tp_doc, "ref.at: index it for a view."},
                                      {0, NULL}};
static PyType_Spec indexer_spec = {"pallas_mgpu._core.RefIndexer", sizeof(indexer), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                   indexer_slots};

static PyGetSetDef ref_getset[] = {
    {"shape", get_shape, NULL, "Tuple of ints, and of sizes of the call (plgpu.dim).", NULL},
    {"dtype", get_dtype, NULL, "NumPy dtype; \"barrier\" for barriers.", NULL},
    {"ndim", get_ndim, NULL, "Number of dimensions.", NULL},
    {"size", get_size, NULL, "Number of elements.", NULL},
    {"memory_space", get_space, NULL, "plgpu.GMEM, SMEM, TMEM or REGS.", NULL},
    {"transforms", get_transforms, NULL,
     "Transforms it was allocated with, the last one first: (SwizzleTransform, TilingTransform). "
     "Empty where they are inferred.",
     NULL},
    {"is_view", get_is_view, NULL, "Is it a part or another shape of a ref?", NULL},
    {"T", get_T, NULL, "View with reversed dimensions.", NULL},
    {"at", get_at, NULL, "ref.at[idx]: a view.", NULL},
    {"wait", no_method, NULL, "Not a method: plgpu.barrier_wait.", "plgpu.barrier_wait"},
    {"arrive", no_method, NULL, "Not a method: plgpu.barrier_arrive.", "plgpu.barrier_arrive"},
    {NULL, NULL, NULL, NULL, NULL}};

#define KEYWORDS(fn) (PyCFunction)(void (*)(void)) fn, METH_VARARGS | METH_KEYWORDS
static PyMethodDef ref_methods[] = {
    {"get", KEYWORDS(ref_get), "get(idx=...): load."},
    {"set", KEYWORDS(ref_set), "set(value, idx=...): store."},
    {"swap", KEYWORDS(ref_swap), "swap(value, idx=...): store; what was there before."},
    {"transpose", ref_transpose, METH_O, "transpose(permutation): a view."},
    {"reshape", (PyCFunction)(void (*)(void))ref_reshape, METH_FASTCALL,
     "reshape(*shape): a view."},
    {"__array__", KEYWORDS(ref_numpy), "Raises: a ref is no array."},
    {"addupdate", KEYWORDS(ref_addupdate), "addupdate(value, idx=...): ref[idx] += value."},
    {"bitcast", ref_bitcast, METH_O,
     "bitcast(dtype): a view of the same bytes; both dtypes have one width."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot ref_slots[] = {
    {Py_tp_dealloc, ref_dealloc},
    {Py_tp_repr, ref_repr},
    {Py_tp_getset, ref_getset},
    {Py_tp_methods, ref_methods},
    {Py_mp_length, ref_length},
    {Py_mp_subscript, ref_subscript},
    {Py_mp_ass_subscript, ref_assign},
    {Py_tp_richcompare, ref_compare},
    {Py_tp_hash, ref_hash},
    {Py_nb_add, refuse_array},
    {Py_nb_subtract, refuse_array},
    {Py_nb_multiply, refuse_array},
    {Py_nb_true_divide, refuse_array},
    {Py_nb_floor_divide, refuse_array},
    {Py_nb_remainder, refuse_array},
    {Py_nb_matrix_multiply, refuse_array},
    {Py_nb_power, refuse_power},
    {Py_nb_lshift, refuse_array},
    {Py_nb_rshift, refuse_array},
    {Py_nb_and, refuse_array},
    {Py_nb_or, refuse_array},
    {Py_nb_xor, refuse_array},
    {Py_nb_negative, refuse_unary},
    {Py_nb_absolute, refuse_unary},
    {Py_nb_invert, refuse_unary},
    {Py_tp_doc, "Memory, a barrier or an accumulator of a kernel being traced."},
    {0, NULL}};
static PyType_Spec ref_spec = {"pallas_mgpu._core.Ref", sizeof(pmpy_traced), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ref_slots};

/* ---- functions ----------------------------------------------------------------------------- */

/* The ref in `o`, usable now; NULL with TypeError for anything else. */
static pmpy_traced *need_ref(pmpy_trace *t, const char *what, PyObject *o) {
  if (!PMPY_IS_REF(o)) {
    pmpy_fail(PM_E_TYPE, "%s: expected a Ref, got %s", what, Py_TYPE(o)->tp_name);
    return NULL;
  }
  return pmpy_check_open(t, self_of(o)) ? NULL : self_of(o);
}

static PyObject *load(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"ref", "layout", "optimized", NULL};
  (void)module;
  PyObject *o, *spec = Py_None;
  int optimized = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|Op:load", names, &o, &spec, &optimized))
    return NULL;
  pmpy_trace *t = pmpy_begin("load", o);
  pmpy_traced *r = t ? need_ref(t, "load", o) : NULL;
  if (!r || !can_access(r)) return NULL;
  pm_layid layout = 0;
  if (spec != Py_None) {
    layout = pmpy_layout(t, spec, &r->type);
    if (!layout) return NULL;
  }
  pm_val v;
  if (r->type.space == PM_ACC) {
    v = acc_value(t, r->val, 0);
    pm_attr_arg attr = {.id = PM_ATTR_LAYOUT, .i = layout};
    if (v && layout) v = pmpy_emit(t, PM_OP_LAYOUT_CAST, &v, 1, NULL, &attr, 1);
  } else {
    v = load_view(t, r->val, layout, optimized);
  }
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *store(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "store: expected a ref and a value");
  pmpy_trace *t = pmpy_begin("store", args[0]);
  pmpy_traced *r = t ? need_ref(t, "store", args[0]) : NULL;
  if (!r || ref_assign((PyObject *)r, Py_Ellipsis, args[1])) return NULL;
  Py_RETURN_NONE;
}

/* ---- masks and atomics --------------------------------------------------------------------- */

static bool in_memory(const char *what, const pmpy_traced *r) {
  if (pm_is_memory(&r->type)) return true;
  pmpy_fail(PM_E_VALUE, "%s: a ref in GMEM or SMEM is needed, got %s", what, kind_text(r));
  return false;
}

/* `other` and the value to compare with: what a store accepts, but one number for all is, too. */
static pm_val filler(pmpy_trace *t, const char *what, const pm_type *ref, PyObject *o) {
  pmpy_arg x;
  if (pmpy_arg_need(t, what, o, &x)) return 0;
  const bool float_to_int = pm_is_float(x.type.dtype) && !pm_is_float(ref->dtype);
  const bool ok = x.weak ? !float_to_int : x.type.dtype == ref->dtype;
  if (ok && (ref->dtype == PM_BOOL) == (x.type.dtype == PM_BOOL))
    return pmpy_arg_as(t, &x, ref->dtype);
  pmpy_fail(PM_E_VALUE, "%s: it has dtype %s, the ref %s; they must be equal", what,
            pm_dtypes[x.type.dtype].text, pm_dtypes[ref->dtype].text);
  return 0;
}

static pm_val mask_value(pmpy_trace *t, PyObject *o) {
  pmpy_arg x;
  return pmpy_arg_need(t, "mask", o, &x) ? 0 : pmpy_arg_as(t, &x, x.type.dtype);
}

/* An access under construction: operands in order, after the others the array indices. */
typedef struct masked_op {
  pmpy_trace *t;
  pm_type type; /* of what is accessed, with the ref's dtype */
  pm_val in[5 + PM_MAX_RANK];
  uint32_t n;
  int64_t dims[PM_MAX_RANK], kind;
  uint32_t n_dims;
  pm_val index[PM_MAX_RANK];
  uint32_t n_index;
} masked_op;

/* `by`: nothing, or DIMS and the arrays. */
static int begin_masked(masked_op *a, const char *what, PyObject *ref, PyObject *const *by,
                        Py_ssize_t n) {
  pmpy_arg x;
  memset(a, 0, sizeof *a);
  a->t = pmpy_begin(what, ref);
  pmpy_traced *r = a->t ? need_ref(a->t, what, ref) : NULL;
  if (!r || !in_memory(what, r)) return -1;
  a->type = r->type;
  a->in[a->n++] = r->val;
  if (n < 2) return 0;
  const int rank = pmpy_ints(by[0], what, a->dims, PM_MAX_RANK);
  if (rank < 0 || n - 1 > PM_MAX_RANK) return -1;
  a->n_dims = (uint32_t)rank;
  for (Py_ssize_t k = 1; k < n; k++) {
    if (pmpy_arg_need(a->t, what, by[k], &x) || !pmpy_arg_as(a->t, &x, PM_I32)) return -1;
    a->index[a->n_index++] = x.val;
    a->type.rank = x.type.rank;
    memcpy(a->type.dim, x.type.dim, sizeof a->type.dim);
  }
  return 0;
}

static int add_operand(masked_op *a, pm_val v) {
  a->in[a->n++] = v;
  return v ? 0 : -1;
}

static pm_val end_masked(masked_op *a, pm_opcode code) {
  const pm_attr_arg attrs[] = {{.id = PM_ATTR_DIMS, .list = a->dims, .n = a->n_dims},
                               {.id = PM_ATTR_ATOMIC, .i = a->kind}};
  for (uint32_t k = 0; k < a->n_index; k++) a->in[a->n++] = a->index[k];
  return pmpy_emit(a->t, code, a->in, a->n, NULL, attrs, code == PM_OP_ATOMIC ? 2 : 1);
}

static PyObject *masked_load(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  masked_op a;
  if (n < 3) return pmpy_fail(PM_E_TYPE, "masked_load: expected a ref, a mask and other");
  if (begin_masked(&a, "load", args[0], args + 3, n - 3) ||
      add_operand(&a, mask_value(a.t, args[1])) ||
      add_operand(&a, filler(a.t, "load: other", &a.type, args[2]))) {
    return NULL;
  }
  pm_val v = end_masked(&a, PM_OP_MASKED_LOAD);
  return v ? pmpy_traced_new(a.t, v, false) : NULL;
}

static PyObject *masked_store(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  masked_op a;
  if (n < 3) return pmpy_fail(PM_E_TYPE, "masked_store: expected a ref, a value and a mask");
  if (begin_masked(&a, "store", args[0], args + 3, n - 3) ||
      add_operand(&a, stored_value(a.t, &a.type, args[1])) ||
      add_operand(&a, mask_value(a.t, args[2])) || !end_masked(&a, PM_OP_MASKED_STORE)) {
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject *atomic(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  masked_op a;
  const char *kind = n >= 5 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  if (!kind) return pmpy_fail(PM_E_TYPE, "atomic: expected kind, ref, value, mask, compare");
  if (begin_masked(&a, "atomic", args[1], args + 5, n - 5) ||
      pmpy_enum_value(PM_ATTR_ATOMIC, kind, &a.kind) ||
      add_operand(&a, filler(a.t, "atomic: the value", &a.type, args[2])) ||
      add_operand(&a, mask_value(a.t, args[3]))) {
    return NULL;
  }
  if (a.kind == PM_ATOMIC_CAS &&
      add_operand(&a, filler(a.t, "atomic: the value to compare with", &a.type, args[4]))) {
    return NULL;
  }
  pm_val v = end_masked(&a, PM_OP_ATOMIC);
  return v ? pmpy_traced_new(a.t, v, false) : NULL;
}

static PyObject *acc_load(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  int64_t pending = 0;
  if (n < 1 || n > 2) return pmpy_fail(PM_E_TYPE, "acc_load: expected an accumulator and wait_n");
  pmpy_trace *t = pmpy_begin("wgmma_accumulator_load", args[0]);
  pmpy_traced *r = t ? need_ref(t, "wgmma_accumulator_load", args[0]) : NULL;
  if (!r) return NULL;
  if (r->type.kind != PM_REF || r->type.space != PM_ACC) {
    return pmpy_fail(PM_E_TYPE, "wgmma_accumulator_load: expected an ACC ref, got %s",
                     pmpy_type_text(&r->type));
  }
  if (n == 2 && args[1] == Py_None) {
    pending = -1;
  } else if (n == 2) {
    if (pmpy_ints(args[1], "wait_n", &pending, 1) != 1) return NULL;
    if (pending < -1)
      return pmpy_fail(PM_E_VALUE,
                       "wgmma_accumulator_load: wait_n is %lld, it must not be negative",
                       (long long)pending);
  }
  pm_val v = acc_value(t, r->val, pending);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* ---- allocation ---------------------------------------------------------------------------- */

pmpy_trace *pmpy_begin_alloc(const char *what) {
  pmpy_trace *t = pmpy_begin(what, NULL);
  if (!t) return NULL;
  pm_opid parent = t->g->blocks.at[t->b.block].parent;
  if (parent && pm_get(t->g, parent)->code == PM_OP_SCOPE) return t;
  pmpy_fail(PM_E_RUNTIME, "%s: memory is allocated by pl.run_scoped or scratch_types only", what);
  return NULL;
}

PyObject *pmpy_allocated(pmpy_trace *t, pm_val v, const char *name) {
  if (!v) return NULL;
  if (name) pmpy_name(t, v, name);
  return pmpy_traced_new(t, v, false);
}

static PyObject *alloc_smem(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "dtype", "tiling", "swizzle", "given", "name", "union", NULL};
  (void)module;
  PyObject *shape, *dtype, *tiling = Py_None, *overlay = Py_None;
  int swizzle = 0;
  const char *name = NULL, *given = "nothing";
  pm_dtype d;
  pm_type type = {.kind = PM_REF, .space = PM_SMEM};
  int64_t tile[PM_MAX_RANK], place[2], whose;
  int n = 0, n_overlay = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|OiszO:alloc_smem", names, &shape, &dtype, &tiling,
                                   &swizzle, &given, &name, &overlay) ||
      pmpy_dtype_from(dtype, &d) || pmpy_enum_value(PM_ATTR_GIVEN, given, &whose)) {
    return NULL;
  }
  pmpy_trace *t = pmpy_begin_alloc("SMEM");
  if (!t || pmpy_shape(shape, "SMEM", &type)) return NULL;
  if (tiling != Py_None) n = pmpy_ints(tiling, "tiling", tile, PM_MAX_RANK);
  if (overlay != Py_None) n_overlay = pmpy_ints(overlay, "union", place, 2);
  if (n < 0 || n_overlay < 0) return NULL;
  type.dtype = (uint8_t)d;
  pm_attr_arg attrs[] = {{.id = PM_ATTR_TILING, .list = tile, .n = (uint32_t)n},
                         {.id = PM_ATTR_SWIZZLE, .i = swizzle},
                         {.id = PM_ATTR_GIVEN, .i = whose},
                         {.id = PM_ATTR_UNION, .list = place, .n = (uint32_t)n_overlay}};
  return pmpy_allocated(t, pmpy_emit(t, PM_OP_ALLOC_SMEM, NULL, 0, &type, attrs, 4), name);
}

static PyObject *alloc_barrier(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "arrivals", "name", "cluster", "leader", "tensor_core", NULL};
  (void)module;
  PyObject *shape, *cluster = Py_None;
  int64_t groups[2 * PM_MAX_RANK];
  int arrivals, leader = 0, tensor_core = 0;
  const char *name = NULL;
  pm_type type = {.kind = PM_BARRIER, .space = PM_SMEM};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "Oi|zOii:alloc_barrier", names, &shape, &arrivals,
                                   &name, &cluster, &leader, &tensor_core))
    return NULL;
  pmpy_trace *t = pmpy_begin_alloc("Barrier");
  if (!t || pmpy_shape(shape, "Barrier", &type)) return NULL;
  int n = cluster == Py_None ? 0 : pmpy_ints(cluster, "ClusterBarrier", groups, PM_COUNT(groups));
  if (n < 0) return NULL;
  pm_attr_arg attrs[] = {{.id = PM_ATTR_ARRIVALS, .i = arrivals},
                         {.id = PM_ATTR_CLUSTER, .list = groups, .n = (uint32_t)n},
                         {.id = PM_ATTR_LEADER, .i = leader},
                         {.id = PM_ATTR_TENSOR_CORE, .i = tensor_core}};
  return pmpy_allocated(t, pmpy_emit(t, PM_OP_ALLOC_BARRIER, NULL, 0, &type, attrs, 4), name);
}

/* first < 0: of the block, else the place of the first one among those of the launch */
static PyObject *alloc_semaphore(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "first", "name", NULL};
  (void)module;
  PyObject *shape;
  long long first;
  const char *name = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OL|z:alloc_semaphore", names, &shape, &first, &name))
    return NULL;
  const bool global = first >= 0;
  const char *what = "SemaphoreType.REGULAR";
  pm_type type = {
      .kind = PM_SEMAPHORE, .dtype = PM_I32, .space = (uint8_t)(global ? PM_GMEM : PM_SMEM)};
  pmpy_trace *t = global ? pmpy_begin(what, NULL) : pmpy_begin_alloc(what);
  if (!t || pmpy_shape(shape, what, &type)) return NULL;
  pm_attr_arg attr = {.id = PM_ATTR_N, .i = first};
  return pmpy_allocated(t,
                        pmpy_emit(t, global ? PM_OP_GLOBAL_SEMAPHORE : PM_OP_ALLOC_SEMAPHORE, NULL,
                                  0, &type, &attr, global),
                        name);
}

/* For text that must know how a ref lies in SMEM: what the user gave, else this from now on. */
static PyObject *fix_transforms(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  int64_t tile[PM_MAX_RANK], swizzle;
  if (n != 3 || !PMPY_IS_REF(args[0])) {
    return pmpy_fail(PM_E_TYPE, "fix_transforms: expected a ref, a tiling and a swizzle");
  }
  pmpy_trace *t = begin_ref("inline_cuda", args[0]);
  const int n_tile = t ? pmpy_ints(args[1], "tiling", tile, PM_MAX_RANK) : -1;
  if (n_tile < 0 || pmpy_ints(args[2], "swizzle", &swizzle, 1) != 1) return NULL;
  pm_graph *g = t->g;
  const pm_opid alloc = pm_value_of(g, pm_view_base(g, self_of(args[0])->val))->def;
  const bool smem = alloc && pm_get(g, alloc)->code == PM_OP_ALLOC_SMEM;
  uint32_t n_given = 0;
  const int64_t *given = smem ? pm_attr_list(g, alloc, PM_ATTR_TILING, &n_given) : NULL;
  const int64_t swizzled = smem ? *pm_attr(g, alloc, PM_ATTR_SWIZZLE) : 0;
  if (smem && !*pm_attr(g, alloc, PM_ATTR_GIVEN)) {
    pm_set_list(g, alloc, PM_ATTR_TILING, tile, (uint32_t)n_tile);
    *pm_attr(g, alloc, PM_ATTR_SWIZZLE) = swizzle;
    *pm_attr(g, alloc, PM_ATTR_GIVEN) = PM_GIVEN_TRANSFORMS;
    Py_RETURN_NONE;
  }
  if (n_given == (uint32_t)n_tile && swizzled == swizzle &&
      !memcmp(given ? given : tile, tile, n_given * sizeof *tile)) {
    Py_RETURN_NONE;
  }
  return pmpy_fail(PM_E_VALUE,
                   "inline_cuda: the transforms of a ref are not those of its RefType; it was "
                   "allocated with a tiling of %u dimensions and a swizzle of %lld bytes",
                   n_given, (long long)swizzled);
}

/* inline_cuda(source, args, shape, dtype, layout, what stands for it or None) */
static PyObject *inline_cuda(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pm_val in[64];
  pm_type type = {.kind = PM_ARRAY, .space = PM_REGS};
  pm_dtype d;
  const char *what = "inline_cuda";
  const char *source = n == 6 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  if (!source || !PyTuple_Check(args[1])) {
    return PyErr_Occurred() ? NULL : pmpy_fail(PM_E_TYPE, "inline_cuda: expected six arguments");
  }
  const Py_ssize_t n_in = PyTuple_GET_SIZE(args[1]);
  pmpy_trace *t = pmpy_begin(what, NULL);
  if (!t || pmpy_shape(args[2], what, &type) || pmpy_dtype_from(args[3], &d)) return NULL;
  if (n_in > (Py_ssize_t)PM_COUNT(in)) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED, "inline_cuda: at most %d arguments, got %zd",
                     (int)PM_COUNT(in), n_in);
  }
  type.dtype = (uint8_t)d;
  for (Py_ssize_t k = 0; k < n_in; k++) {
    PyObject *o = PyTuple_GET_ITEM(args[1], k);
    if (PMPY_IS_REF(o)) {
      if (pmpy_check_open(t, self_of(o))) return NULL;
      in[k] = self_of(o)->val;
      continue;
    }
    pmpy_arg x;
    if (pmpy_arg_need(t, what, o, &x) || !(in[k] = pmpy_arg_as(t, &x, x.type.dtype))) return NULL;
  }
  pm_attr_arg attrs[3] = {{.id = PM_ATTR_FORMAT, .i = pm_intern(t->g, source)},
                          {.id = PM_ATTR_LAYOUT},
                          {.id = PM_ATTR_INTERPRET}};
  if (args[5] != Py_None && !(attrs[2].i = pmpy_graph_inlines(t->graph, args[5]))) return NULL;
  if (type.rank && !(attrs[1].i = pmpy_layout(t, args[4], &type))) return NULL;
  pm_val v = pmpy_emit(t, PM_OP_INLINE, in, (uint32_t)n_in, &type, attrs, 3);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* inline_result(shape, dtype, layout): the next one */
static PyObject *inline_result(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pm_type type = {.kind = PM_ARRAY, .space = PM_REGS};
  pm_attr_arg attr = {.id = PM_ATTR_LAYOUT};
  pm_dtype d;
  if (n != 3) return pmpy_fail(PM_E_TYPE, "inline_result: expected three arguments");
  pmpy_trace *t = pmpy_begin("inline_cuda", NULL);
  if (!t || pmpy_shape(args[0], "inline_cuda", &type) || pmpy_dtype_from(args[1], &d)) return NULL;
  type.dtype = (uint8_t)d;
  if (type.rank && !(attr.i = pmpy_layout(t, args[2], &type))) return NULL;
  pm_val v = pmpy_emit(t, PM_OP_INLINE_RESULT, NULL, 0, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *cluster_ref(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg index;
  pm_attr_arg attr = {.id = PM_ATTR_DIM};
  if (n != 3 || !PMPY_IS_REF(args[0])) {
    return pmpy_fail(PM_E_TYPE, "cluster_ref: expected a ref, the number of an axis and an index");
  }
  pmpy_trace *t = begin_ref("cluster_ref", args[0]);
  if (!t || pmpy_ints(args[1], "cluster_ref", &attr.i, 1) != 1 ||
      pmpy_arg_need(t, "cluster_ref", args[2], &index)) {
    return NULL;
  }
  const pm_val at = pmpy_arg_as(t, &index, PM_I32);
  const pm_val in[2] = {self_of(args[0])->val, at};
  pm_val v = at ? pmpy_emit(t, PM_OP_CLUSTER_REF, in, 2, NULL, &attr, 1) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *device_ref(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg index;
  if (n != 2 || !PMPY_IS_REF(args[0])) {
    return pmpy_fail(PM_E_TYPE, "remote_ref: expected a ref and the number of a device");
  }
  pmpy_trace *t = begin_ref("remote_ref", args[0]);
  if (!t || pmpy_arg_need(t, "remote_ref", args[1], &index)) return NULL;
  const pm_val at = pmpy_arg_as(t, &index, PM_I32);
  const pm_val in[2] = {self_of(args[0])->val, at};
  pm_val v = at ? pmpy_emit(t, PM_OP_DEVICE_REF, in, 2, NULL, NULL, 0) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *view_of_ref(PyObject *ref, pm_opcode code, const char *what) {
  if (!PMPY_IS_REF(ref)) return pmpy_fail(PM_E_TYPE, "%s: expected a ref", what);
  pmpy_trace *t = begin_ref(what, ref);
  pm_val v = t ? pmpy_emit(t, code, &self_of(ref)->val, 1, NULL, NULL, 0) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *multicast_ref(PyObject *module, PyObject *ref) {
  (void)module;
  return view_of_ref(ref, PM_OP_MULTICAST_REF, "multicast_ref");
}

static PyObject *semaphore_of(PyObject *module, PyObject *ref) {
  (void)module;
  return view_of_ref(ref, PM_OP_SEMAPHORE_OF, "as_semaphores");
}

static PyObject *alloc_acc(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "dtype", "init", "name", NULL};
  (void)module;
  PyObject *shape, *dtype, *init = Py_None;
  const char *name = NULL;
  pm_dtype d;
  pmpy_arg x;
  pm_type type = {.kind = PM_REF, .space = PM_ACC};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|Oz:alloc_acc", names, &shape, &dtype, &init,
                                   &name) ||
      pmpy_dtype_from(dtype, &d)) {
    return NULL;
  }
  pmpy_trace *t = pmpy_begin_alloc("ACC");
  if (!t || pmpy_shape(shape, "ACC", &type)) return NULL;
  type.dtype = (uint8_t)d;
  if (init != Py_None && (pmpy_arg_need(t, "ACC", init, &x) || !pmpy_arg_as(t, &x, x.type.dtype)))
    return NULL;
  bool has_init = init != Py_None;
  return pmpy_allocated(
      t, pmpy_emit(t, PM_OP_ALLOC_ACC, has_init ? &x.val : NULL, has_init, &type, NULL, 0), name);
}

static PyMethodDef functions[] = {
    {"load", KEYWORDS(load), "load(ref, layout=None, optimized=True) -> Array"},
    {"store", (PyCFunction)(void (*)(void))store, METH_FASTCALL, "store(ref, value)"},
    {"stored", (PyCFunction)(void (*)(void))stored, METH_FASTCALL,
     "stored(part, value) -> Array: the value as a ref that holds part takes it"},
    {"masked_load", (PyCFunction)(void (*)(void))masked_load, METH_FASTCALL,
     "masked_load(ref, mask, other, *by) -> Array"},
    {"masked_store", (PyCFunction)(void (*)(void))masked_store, METH_FASTCALL,
     "masked_store(ref, value, mask, *by)"},
    {"atomic", (PyCFunction)(void (*)(void))atomic, METH_FASTCALL,
     "atomic(kind, ref, value, mask, compare, *by) -> Array of what was there"},
    {"acc_load", (PyCFunction)(void (*)(void))acc_load, METH_FASTCALL,
     "acc_load(acc, wait_n=0) -> Array"},
    {"alloc_smem", KEYWORDS(alloc_smem),
     "alloc_smem(shape, dtype, tiling=None, swizzle=0, given=\"nothing\", name=None, union=None) "
     "-> Ref"},
    {"alloc_barrier", KEYWORDS(alloc_barrier),
     "alloc_barrier(shape, arrivals, name=None, cluster=None, leader=0, tensor_core=0) -> Ref"},
    {"fix_transforms", (PyCFunction)(void (*)(void))fix_transforms, METH_FASTCALL,
     "fix_transforms(ref, tiling, swizzle): how it lies in SMEM; ValueError if it was given"},
    {"inline_cuda", (PyCFunction)(void (*)(void))inline_cuda, METH_FASTCALL,
     "inline_cuda(source, args, shape, dtype, layout, stands_for_it) -> Array"},
    {"inline_result", (PyCFunction)(void (*)(void))inline_result, METH_FASTCALL,
     "inline_result(shape, dtype, layout) -> Array, a further one of the inline_cuda before"},
    {"alloc_semaphore", KEYWORDS(alloc_semaphore),
     "alloc_semaphore(shape, first, name=None) -> Ref; first < 0: of the block, else of the "
     "launch, where its first word is"},
    {"cluster_ref", (PyCFunction)(void (*)(void))cluster_ref, METH_FASTCALL,
     "cluster_ref(ref, axis, index) -> Ref: the same SMEM in another block"},
    {"device_ref", (PyCFunction)(void (*)(void))device_ref, METH_FASTCALL,
     "device_ref(ref, number) -> Ref: the same memory of another device"},
    {"multicast_ref", multicast_ref, METH_O, "multicast_ref(ref) -> Ref: that of all devices"},
    {"semaphore_of", semaphore_of, METH_O, "semaphore_of(ref) -> Ref: int32 as semaphores"},
    {"alloc_acc", KEYWORDS(alloc_acc), "alloc_acc(shape, dtype, init=None, name=None) -> Ref"},
    {NULL, NULL, 0, NULL}};

int pmpy_init_ref(PyObject *module) {
  pmpy.ref_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ref_spec, NULL);
  indexer_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &indexer_spec, NULL);
  if (!pmpy.ref_type || !indexer_type || PyModule_AddType(module, pmpy.ref_type)) return -1;
  return PyModule_AddFunctions(module, functions);
}
