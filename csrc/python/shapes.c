/* Shapes and register layouts, as Python gives them. */
#include "trace.h"

/* One int; 0 or -1. */
static int one_int(PyObject *o, const char *what, int64_t *out) {
  *out = PyNumber_AsSsize_t(o, PyExc_OverflowError);
  if (*out != -1 || !PyErr_Occurred()) return 0;
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    pmpy_fail(PM_E_VALUE, "%s: got an int of more than 64 bits", what);
  }
  return -1;
}

int pmpy_ints(PyObject *o, const char *what, int64_t *out, uint32_t max) {
  if (PyIndex_Check(o)) return one_int(o, what, out) ? -1 : 1;
  PyObject *seq = PySequence_Fast(o, "");
  if (!seq) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
      pmpy_fail(PM_E_TYPE, "%s: expected an int or a sequence of ints, got %s", what,
                Py_TYPE(o)->tp_name);
    }
    return -1;
  }
  Py_ssize_t n = PySequence_Fast_GET_SIZE(seq);
  if (n > (Py_ssize_t)max) {
    pmpy_fail(PM_E_VALUE, "%s: %zd entries, at most %u are supported", what, n, max);
    n = -1;
  }
  for (Py_ssize_t k = 0; k < n; k++) {
    PyObject *item = PySequence_Fast_GET_ITEM(seq, k);
    if (!PyIndex_Check(item)) {
      pmpy_fail(PM_E_TYPE, "%s: entry %zd must be an int, got %s", what, k, Py_TYPE(item)->tp_name);
      n = -1;
    } else if (one_int(item, what, &out[k])) {
      n = -1;
    }
  }
  Py_DECREF(seq);
  return (int)n;
}

int pmpy_shape(PyObject *o, const char *what, pm_type *type) {
  int n = pmpy_ints(o, what, type->dim, PM_MAX_RANK);
  if (n < 0) return -1;
  type->rank = (uint8_t)n;
  for (int k = 0; k < n; k++) {
    if (type->dim[k] < 1) {
      pmpy_fail(PM_E_VALUE, "%s: extent %d of a shape is %lld, it must be at least 1", what, k,
                (long long)type->dim[k]);
      return -1;
    }
  }
  return 0;
}

PyObject *pmpy_shape_tuple(const pm_type *type) {
  PyObject *shape = PyTuple_New(type->rank);
  for (int k = 0; shape && k < type->rank; k++) {
    PyObject *extent = PyLong_FromLongLong(type->dim[k]);
    if (!extent) Py_CLEAR(shape);
    else PyTuple_SET_ITEM(shape, k, extent);
  }
  return shape;
}

int pmpy_reshape_args(const pm_type *from, PyObject *const *args, Py_ssize_t n, pm_code mismatch,
                      pm_type *to) {
  int64_t dim[PM_MAX_RANK];
  int rank = 0;
  if (n == 1) {
    rank = pmpy_ints(args[0], "reshape", dim, PM_MAX_RANK);
  } else {
    PyObject *seq = PyTuple_New(n);
    if (!seq) return -1;
    for (Py_ssize_t k = 0; k < n; k++) PyTuple_SET_ITEM(seq, k, Py_NewRef(args[k]));
    rank = pmpy_ints(seq, "reshape", dim, PM_MAX_RANK);
    Py_DECREF(seq);
  }
  if (rank < 0) return -1;
  int64_t size = pm_type_size(from), known = 1;
  int open = -1;
  bool bad = false;
  for (int k = 0; k < rank; k++) {
    if (dim[k] == -1 && open < 0) {
      open = k;
    } else if (dim[k] < 1 || known > size) {
      bad = true;
    } else {
      known *= dim[k];
    }
  }
  if (open >= 0 && !bad && size % known == 0) {
    dim[open] = size / known;
    known = size;
  }
  *to = *from;
  to->rank = (uint8_t)rank;
  for (int k = 0; k < PM_MAX_RANK; k++) to->dim[k] = k < rank ? dim[k] : 0;
  if (bad || known != size) {
    char target[256];
    snprintf(target, sizeof target, "%s", strchr(pmpy_type_text(to), '['));
    pmpy_fail(mismatch, "cannot reshape %s (%lld elements) into %s", pmpy_type_text(from),
              (long long)size, target);
    return -1;
  }
  return 0;
}

/* A layout spec parsed; the tuples it points into are alive. */
typedef struct layout_job {
  pm_graph *g;
  const pm_type *array;
  enum { L_STRIDED, L_SPLAT, L_TILED, L_TEXT } kind;
  const char *text; /* as the text form of graphs has it */
  int64_t vec;
  pm_tiling t;
  /* ("reduce", ...): dims of the unreduced base tile that go, outermost reduce last */
  int64_t gone[PM_MAX_RANK];
  uint32_t n_gone, base_rank;
  int64_t base[PM_MAX_RANK];
  pm_layid out;
} layout_job;

static int digit_dims(PyObject *o, int64_t *out, uint32_t *n) {
  PyObject *seq = PySequence_Fast(o, "layout: warp_dims and lane_dims are sequences");
  if (!seq) return -1;
  Py_ssize_t size = PySequence_Fast_GET_SIZE(seq);
  int rc = 0;
  if (size > PM_MAX_RANK) {
    pmpy_fail(PM_E_VALUE, "layout: %zd warp or lane dims, at most %d are supported", size,
              PM_MAX_RANK);
    rc = -1;
  }
  for (Py_ssize_t k = 0; k < size && !rc; k++) {
    PyObject *item = PySequence_Fast_GET_ITEM(seq, k);
    const char *tag;
    long long times;
    if (PyTuple_Check(item)) {
      rc = PyArg_ParseTuple(item, "sL", &tag, &times) ? 0 : -1;
      out[k] = PM_REPLICATED + times;
    } else {
      rc = pmpy_ints(item, "layout", &out[k], 1) == 1 ? 0 : -1;
    }
  }
  *n = (uint32_t)size;
  Py_DECREF(seq);
  return rc;
}

static void use_tiling(layout_job *j) {
  j->kind = L_TILED;
  j->base_rank = j->t.rank[0];
  memcpy(j->base, j->t.tile[0], sizeof j->base);
}

static int tiled_spec(PyObject *spec, layout_job *j) {
  PyObject *tiles, *warp, *lane;
  long long vector;
  const char *tag;
  if (!PyArg_ParseTuple(spec, "sOOOL", &tag, &tiles, &warp, &lane, &vector)) return -1;
  j->t.vector = vector;
  if (digit_dims(warp, j->t.warp, &j->t.n_warp) || digit_dims(lane, j->t.lane, &j->t.n_lane)) {
    return -1;
  }
  PyObject *seq = PySequence_Fast(tiles, "layout: a tiling is a sequence of tiles");
  if (!seq) return -1;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(seq);
  int rc = 0;
  if (n < 1 || n > PM_MAX_TILES) {
    pmpy_fail(PM_E_VALUE, "layout: %zd tiles, 1 to %d are supported", n, PM_MAX_TILES);
    rc = -1;
  }
  for (Py_ssize_t k = 0; k < n && !rc; k++) {
    int rank = pmpy_ints(PySequence_Fast_GET_ITEM(seq, k), "layout", j->t.tile[k], PM_MAX_RANK);
    j->t.rank[k] = (uint32_t)rank;
    rc = rank < 0 ? -1 : 0;
  }
  Py_DECREF(seq);
  if (rc) return -1;
  j->t.n = (uint32_t)n;
  use_tiling(j);
  return 0;
}

static int named_spec(PyObject *spec, layout_job *j) {
  const char *tag, *name;
  PyObject *given;
  int64_t arg[2];
  if (!PyArg_ParseTuple(spec, "ssO", &tag, &name, &given)) return -1;
  const int id = pm_layout_find(name, strlen(name)), n = pmpy_ints(given, "layout", arg, 2);
  if (n < 0) return -1;
  if (id < 0 || !pm_layout_tiling((pm_layout_name_id)id, arg, (uint32_t)n, &j->t)) {
    PyErr_Format(PyExc_ValueError, "layout: there is no %s%R", name, given);
    return -1;
  }
  use_tiling(j);
  return 0;
}

static int layout_spec(PyObject *spec, layout_job *j);

/* Axes count in the base tile that is left after the inner reductions. */
static int reduce_spec(PyObject *spec, layout_job *j) {
  PyObject *inner, *axes;
  const char *tag;
  int64_t axis[PM_MAX_RANK];
  if (!PyArg_ParseTuple(spec, "sOO", &tag, &inner, &axes) || layout_spec(inner, j)) return -1;
  if (j->kind == L_SPLAT || j->kind == L_STRIDED) {
    pmpy_fail(PM_E_VALUE, "layout: WG_SPLAT and WG_STRIDED cannot be reduced");
    return -1;
  }
  int n = pmpy_ints(axes, "Layout.reduce", axis, PM_MAX_RANK);
  if (n < 0) return -1;
  int64_t left[PM_MAX_RANK];
  uint32_t n_left = 0;
  for (uint32_t k = 0; k < j->base_rank; k++) {
    bool gone = false;
    for (uint32_t i = 0; i < j->n_gone; i++) gone |= j->gone[i] == k;
    if (!gone) left[n_left++] = k;
  }
  uint32_t before = j->n_gone;
  for (int k = 0; k < n; k++) {
    bool twice = false;
    for (uint32_t i = before; i < j->n_gone; i++) {
      twice |= axis[k] >= 0 && axis[k] < n_left && j->gone[i] == left[axis[k]];
    }
    if (axis[k] < 0 || axis[k] >= n_left || twice) {
      pmpy_fail(PM_E_VALUE, "Layout.reduce: axis %lld, expected distinct ones of 0 to %d",
                (long long)axis[k], (int)n_left - 1);
      return -1;
    }
    j->gone[j->n_gone++] = left[axis[k]];
  }
  return 0;
}

static int layout_spec(PyObject *spec, layout_job *j) {
  PyObject *head = PyTuple_Check(spec) && PyTuple_GET_SIZE(spec) ? PyTuple_GET_ITEM(spec, 0) : NULL;
  const char *tag = head && PyUnicode_Check(head) ? PyUnicode_AsUTF8(head) : NULL;
  if (!tag) {
    if (!PyErr_Occurred()) {
      pmpy_fail(PM_E_TYPE, "layout: expected a plgpu.Layout, got %s", Py_TYPE(spec)->tp_name);
    }
    return -1;
  }
  if (!strcmp(tag, "splat")) {
    j->kind = L_SPLAT;
    return 0;
  }
  if (!strcmp(tag, "strided")) {
    long long vec;
    j->kind = L_STRIDED;
    if (!PyArg_ParseTuple(spec, "sL", &tag, &vec)) return -1;
    j->vec = vec;
    return 0;
  }
  if (!strcmp(tag, "text")) {
    j->kind = L_TEXT;
    return PyArg_ParseTuple(spec, "ss", &tag, &j->text) ? 0 : -1;
  }
  if (!strcmp(tag, "tiled")) return tiled_spec(spec, j);
  if (!strcmp(tag, "named")) return named_spec(spec, j);
  if (!strcmp(tag, "reduce")) return reduce_spec(spec, j);
  pmpy_fail(PM_E_NOT_IMPLEMENTED,
            "the register layout %s is not available; use WGMMA, WG_STRIDED, WG_SPLAT, a TILED "
            "layout or their reduce()",
            tag);
  return -1;
}

static pm_code layout_body(void *ctx, pm_err *err) {
  layout_job *j = ctx;
  const pm_type *array = j->array;
  pm_type full = *array;
  int64_t dims[PM_MAX_RANK];
  /* the array that the unreduced layout is of: reduced dims come back with the base tile's size */
  uint32_t rank = array->rank + j->n_gone, from = 0;
  if (rank > PM_MAX_RANK || rank < j->base_rank) {
    return pm_fail(err, PM_E_VALUE, "layout: it does not fit an array of rank %d", array->rank);
  }
  full.rank = (uint8_t)rank;
  uint32_t first = rank - j->base_rank, n_dims = 0;
  for (uint32_t k = 0; k < rank && j->n_gone; k++) {
    bool gone = false;
    for (uint32_t i = 0; i < j->n_gone; i++) gone |= k >= first && j->gone[i] == k - first;
    full.dim[k] = gone ? j->base[k - first] : array->dim[from++];
    if (gone) dims[n_dims++] = k;
  }
  switch (j->kind) {
    case L_STRIDED: j->out = pm_layout_strided(j->g, array, j->vec); break;
    case L_SPLAT: j->out = pm_layout_splat(j->g, array); break;
    case L_TEXT:
      if (pm_layout_parse(j->g, j->text, strlen(j->text), array, &j->out, err)) return err->code;
      break;
    case L_TILED:;
      pm_code rc = pm_layout_of_tiling(j->g, &full, &j->t, &j->out, err);
      if (rc) return rc;
      break;
  }
  if (j->out && j->n_gone) j->out = pm_layout_reduce(j->g, j->out, dims, n_dims);
  if (!j->out) return pm_fail(err, PM_E_VALUE, "layout: it does not fit the shape of the array");
  return PM_OK;
}

pm_layid pmpy_layout_in(pm_graph *g, const pm_builder *at, PyObject *spec, const pm_type *array) {
  layout_job j = {.g = g, .array = array};
  if (layout_spec(spec, &j)) return 0;
  PMPY_ERR(err);
  if (pm_protect(layout_body, &j, &err)) {
    size_t n = strlen(err.text);
    snprintf(err.text + n, sizeof err.text - n, " (array %s)", pmpy_type_text(array));
    if (at && at->line) pm_err_at(&err, g->strings.at[at->file], at->line);
    pmpy_raise(&err);
    return 0;
  }
  return j.out;
}

pm_layid pmpy_layout(pmpy_trace *t, PyObject *spec, const pm_type *array) {
  return pmpy_layout_in(t->g, &t->b, spec, array);
}
