/* A trace in progress: the graph under construction, the stack of open regions, the user's source
 * location.
 *
 * Traces are nested in a stack for each thread; the top is the current one. Every Python-visible
 * entry point calls pmpy_begin, which records the user's file and line in the builder; after that,
 * ops are added with pmpy_emit, each under pm_protect. A region gets a serial number when it is
 * entered. Values remember it, so a value of a closed or abandoned region is recognised even if
 * indices are reused.
 *
 * Names: when a trace is finished, consecutive ops of one source line form a run. If the line reads
 * `name = ...`, the last result of the run gets that name. */
#include "trace.h"
#include "../ir/access.h"

#include <stdio.h>
#include <stdlib.h>

static _Thread_local pmpy_trace *current; /* owned */

/* ---- the user's place ---------------------------------------------------------------------- */

static char package_dir[4096]; /* with a slash at its end */
static size_t package_len;

static int find_package_dir(PyObject *module) {
  PyObject *file = PyObject_GetAttrString(module, "__file__");
  const char *s = file ? PyUnicode_AsUTF8(file) : NULL;
  const char *slash = s ? strrchr(s, '/') : NULL;
  if (slash && (size_t)(slash - s) + 2 < sizeof package_dir) {
    package_len = (size_t)(slash - s) + 1;
    memcpy(package_dir, s, package_len);
    package_dir[package_len] = 0;
  }
  Py_XDECREF(file);
  PyErr_Clear(); /* without a __file__ every file is the user's */
  return 0;
}

/* The ready kernels of ops/ and the demo count as user code: their lines are worth showing. */
static bool is_package_file(const char *file) {
  if (package_len && !strncmp(file, package_dir, package_len)) {
    const char *rest = file + package_len;
    return strncmp(rest, "ops/", 4) && strcmp(rest, "__main__.py");
  }
  return !strncmp(file, "<frozen", 7);
}

typedef struct intern_job {
  pm_graph *g;
  const char *text;
  uint32_t id;
} intern_job;

static pm_code intern_body(void *ctx, pm_err *err) {
  intern_job *j = ctx;
  (void)err;
  j->id = pm_intern(j->g, j->text);
  return PM_OK;
}

static void clear_err(pm_err *err) {
  err->code = PM_OK;
  err->line = 0;
  err->file[0] = err->text[0] = 0;
}

/* 0 if memory ran out (no exception): the text is then simply missing. */
static uint32_t intern(pm_graph *g, const char *text) {
  intern_job j = {g, text, 0};
  pm_err err;
  clear_err(&err);
  return pm_protect(intern_body, &j, &err) ? 0 : j.id;
}

static uint32_t file_of(pmpy_trace *t, PyObject *filename) {
  for (uint32_t k = 0; k < t->n_places && k < PMPY_PLACES; k++) {
    if (t->place[k].filename == filename) return t->place[k].file;
  }
  const char *s = PyUnicode_AsUTF8(filename);
  if (!s) PyErr_Clear();
  uint32_t file = s && !is_package_file(s) ? intern(t->g, s) : 0;
  pmpy_place *slot = &t->place[t->n_places++ % PMPY_PLACES];
  Py_XDECREF(slot->filename);
  slot->filename = Py_NewRef(filename);
  slot->file = file;
  return file;
}

/* Innermost frame of a user's file. With a trace its file is interned in *id, else it is *file. */
static void user_frame(pmpy_trace *t, uint32_t *id, const char **file, uint32_t *line) {
  PyFrameObject *f = PyEval_GetFrame();
  Py_XINCREF(f);
  bool found = false;
  while (f && !found) {
    PyCodeObject *code = PyFrame_GetCode(f);
    if (t) {
      *id = file_of(t, code->co_filename);
      found = *id != 0;
    } else {
      const char *s = PyUnicode_AsUTF8(code->co_filename);
      if (!s) PyErr_Clear();
      found = s && !is_package_file(s);
      if (found) *file = s;
    }
    Py_DECREF(code);
    if (found) *line = (uint32_t)PyFrame_GetLineNumber(f);
    PyFrameObject *back = found ? NULL : PyFrame_GetBack(f);
    Py_DECREF(f);
    f = back;
  }
}

void pmpy_user_place(const char **file, uint32_t *line) {
  *file = NULL;
  *line = 0;
  user_frame(NULL, NULL, file, line);
}

static void stamp(pmpy_trace *t) {
  t->b.file = t->b.line = 0;
  user_frame(t, &t->b.file, NULL, &t->b.line);
}

/* ---- errors -------------------------------------------------------------------------------- */

static void place_error(pm_err *err) {
  const char *file;
  uint32_t line;
  pmpy_user_place(&file, &line);
  if (file) pm_err_at(err, file, line);
}

PyObject *pmpy_fail(pm_code code, const char *fmt, ...) {
  pm_err err;
  clear_err(&err);
  err.code = code;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(err.text, sizeof err.text, fmt, ap);
  va_end(ap);
  place_error(&err);
  return pmpy_raise(&err);
}

PyObject *pmpy_tracer_fail(enum pmpy_tracer_error which, const char *fmt, ...) {
  pm_err err;
  clear_err(&err);
  err.code = PM_E_TYPE;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(err.text, sizeof err.text, fmt, ap);
  va_end(ap);
  place_error(&err);
  pmpy_raise(&err);
  /* all of them are TypeErrors: only the type is made precise */
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *text = value ? PyObject_Str(value) : NULL;
  if (text) PyErr_SetObject(pmpy.tracer_error[which], text);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return NULL;
}

const char *pmpy_type_text(const pm_type *type) {
  static _Thread_local char text[256];
  int n = snprintf(text, sizeof text, "%s[", pm_element_text(type));
  for (int k = 0; k < type->rank; k++) {
    n += snprintf(text + n, sizeof text - (size_t)n, k ? ",%lld" : "%lld", (long long)type->dim[k]);
  }
  snprintf(text + n, sizeof text - (size_t)n, "]");
  return text;
}

/* ---- values -------------------------------------------------------------------------------- */

pmpy_trace *pmpy_begin(const char *what, PyObject *x) {
  pmpy_trace *t = current;
  if (!t || !t->graph) {
    if (x && (PMPY_IS_ARRAY(x) || PMPY_IS_REF(x))) {
      pmpy_check_open(NULL, (pmpy_traced *)x);
      return NULL;
    }
    pmpy_fail(PM_E_RUNTIME,
              "%s: no kernel is being traced here; it works on the values of a kernel's body only",
              what);
    return NULL;
  }
  stamp(t);
  return t;
}

/* " made at FILE:LINE", or "" where that is not known any more. */
static const char *made_at(const pmpy_traced *x) {
  static _Thread_local char text[600];
  for (uint32_t k = 0; x->file && k < PMPY_PLACES; k++) {
    const pmpy_place *place = &x->trace->place[k];
    if (!place->filename || place->file != x->file) continue;
    const char *file = PyUnicode_AsUTF8(place->filename);
    if (!file) break;
    snprintf(text, sizeof text, ", made at %s:%u,", file, x->line);
    return text;
  }
  PyErr_Clear();
  return "";
}

int pmpy_check_open(const pmpy_trace *t, const pmpy_traced *x) {
  const char *why = "a loop, branch or scope that has ended: return it from there instead";
  if (x->trace == t) {
    for (uint32_t k = t->depth; k-- > 0;) {
      if (t->region[k].serial == x->serial) return 0;
    }
  } else if (!x->trace->graph) {
    why = "a kernel whose trace has ended";
  } else {
    why = "another kernel, whose trace is not the current one";
  }
  pmpy_tracer_fail(PMPY_UNEXPECTED_TRACER, "a traced value (%s)%s was used that belongs to %s",
                   pmpy_type_text(&x->type), made_at(x), why);
  return -1;
}

void pmpy_name(pmpy_trace *t, pm_val val, const char *name) {
  uint32_t id = intern(t->g, name);
  pm_value_of(t->g, val)->name = id;
}

typedef struct emit_job {
  pm_builder *b;
  pm_opcode code;
  const pm_val *in;
  uint32_t n_in, n_regions;
  const pm_type *given;
  const pm_attr_arg *attrs;
  uint32_t n_attrs;
  pm_opid op;
} emit_job;

static pm_code emit_body(void *ctx, pm_err *err) {
  emit_job *j = ctx;
  if (j->n_regions) {
    return pm_open(j->b, j->code, j->in, j->n_in, j->n_regions, j->attrs, j->n_attrs, &j->op, err);
  }
  return pm_emit(j->b, j->code, j->in, j->n_in, j->given, j->attrs, j->n_attrs, &j->op, err);
}

static pm_opid emit(emit_job *j) {
  pm_err err;
  clear_err(&err);
  if (pm_protect(emit_body, j, &err)) {
    pmpy_raise(&err);
    return 0;
  }
  return j->op;
}

pm_val pmpy_emit(pmpy_trace *t, pm_opcode code, const pm_val *in, uint32_t n_in,
                 const pm_type *given, const pm_attr_arg *attrs, uint32_t n_attrs) {
  static const pm_attr_arg exact = {.id = PM_ATTR_EXACT, .i = 1};
  if (code == PM_OP_DIV && t->exact_division && !n_attrs) attrs = &exact, n_attrs = 1;
  emit_job j = {&t->b, code, in, n_in, 0, given, attrs, n_attrs, 0};
  pm_opid op = emit(&j);
  if (!op) return 0;
  const pm_op *o = pm_get(t->g, op);
  return o->n_out ? o->out : 1;
}

PyObject *pmpy_traced_new(pmpy_trace *t, pm_val val, bool weak) {
  const pm_type *type = pm_typeof(t->g, val);
  PyTypeObject *py = type->kind == PM_ARRAY ? pmpy.array_type : pmpy.ref_type;
  pmpy_traced *x = PyObject_New(pmpy_traced, py);
  if (!x) return NULL;
  x->trace = (pmpy_trace *)Py_NewRef((PyObject *)t);
  x->val = val;
  x->serial = t->region[t->depth - 1].serial;
  x->file = t->b.file;
  x->line = t->b.line;
  x->weak = weak;
  x->type = *type;
  return (PyObject *)x;
}

/* ---- shapes and layouts -------------------------------------------------------------------- */

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
  enum { L_STRIDED, L_SPLAT, L_TILED } kind;
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
  pm_err err;
  clear_err(&err);
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

/* ---- Trace --------------------------------------------------------------------------------- */

static int push_region(pmpy_trace *t, pm_blk block) {
  if (t->depth == t->capacity) {
    uint32_t capacity = t->capacity ? t->capacity * 2 : 16;
    pmpy_region *region = PyMem_Realloc(t->region, capacity * sizeof *region);
    if (!region) {
      PyErr_NoMemory();
      return -1;
    }
    t->region = region;
    t->capacity = capacity;
  }
  t->region[t->depth++] = (pmpy_region){block, ++t->serials};
  t->b.block = block;
  return 0;
}

typedef struct begin_job {
  pmpy_graph *graph;
  const char *name;
} begin_job;

static pm_code begin_body(void *ctx, pm_err *err) {
  begin_job *j = ctx;
  (void)err;
  j->graph->g = pm_graph_new(&j->graph->arena, j->name);
  return PM_OK;
}

static PyObject *trace_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"name",
                          "grid",
                          "cluster",
                          "n_threads",
                          "approx_math",
                          "no_auto_barriers",
                          "exact_division",
                          "reduction_scratch",
                          NULL};
  const char *name;
  PyObject *grid, *cluster;
  int n_threads, approx_math = 0, no_auto_barriers = 0, exact_division = 0;
  long long reduction_scratch = PM_REDUCTION_SCRATCH;
  pm_type g = {0}, c = {0};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "sOOi|pppL:Trace", names, &name, &grid, &cluster,
                                   &n_threads, &approx_math, &no_auto_barriers, &exact_division,
                                   &reduction_scratch)) {
    return NULL;
  }
  if (pmpy_shape(grid, "grid", &g) || pmpy_shape(cluster, "cluster", &c)) return NULL;
  if (c.rank > 3) return pmpy_fail(PM_E_VALUE, "cluster: %d axes, at most 3 are supported", c.rank);
  if (n_threads < 1)
    return pmpy_fail(PM_E_VALUE, "num_threads: %d, it must be at least 1", n_threads);
  pmpy_trace *t = (pmpy_trace *)type->tp_alloc(type, 0);
  if (!t) return NULL;
  t->graph = pmpy_graph_new();
  if (!t->graph) goto fail;
  pm_err err;
  clear_err(&err);
  if (pm_protect(begin_body, &(begin_job){t->graph, name}, &err)) {
    pmpy_raise(&err);
    goto fail;
  }
  t->g = t->graph->g;
  memcpy(t->g->grid, g.dim, sizeof t->g->grid);
  memcpy(t->g->cluster, c.dim, sizeof t->g->cluster);
  t->g->n_grid = g.rank;
  t->g->n_cluster = c.rank;
  t->g->n_threads = (uint32_t)n_threads;
  t->g->approx_math = approx_math;
  t->g->no_auto_barriers = no_auto_barriers;
  t->exact_division = exact_division;
  t->g->reduction_scratch = reduction_scratch;
  t->b.g = t->g;
  if (push_region(t, 1)) goto fail;
  return (PyObject *)t;
fail:
  Py_DECREF(t);
  return NULL;
}

static void drop(pmpy_trace *t) {
  Py_CLEAR(t->graph);
  t->g = t->b.g = NULL;
  t->depth = 0;
}

static void trace_dealloc(PyObject *self) {
  pmpy_trace *t = (pmpy_trace *)self;
  PyTypeObject *type = Py_TYPE(self);
  drop(t);
  for (uint32_t k = 0; k < PMPY_PLACES; k++) Py_CLEAR(t->place[k].filename);
  PyMem_Free(t->region);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *trace_enter(PyObject *self, PyObject *none) {
  pmpy_trace *t = (pmpy_trace *)self;
  (void)none;
  if (t->entered) return pmpy_fail(PM_E_RUNTIME, "this trace was entered already");
  t->entered = true;
  t->below = current;
  current = (pmpy_trace *)Py_NewRef(self);
  return Py_NewRef(self);
}

static PyObject *trace_exit(PyObject *self, PyObject *none) {
  pmpy_trace *t = (pmpy_trace *)self;
  (void)none;
  if (current != t)
    return pmpy_fail(PM_E_RUNTIME, "this trace is not the current one of the thread");
  current = t->below;
  t->below = NULL;
  t->entered = false;
  Py_DECREF(t);
  Py_RETURN_NONE;
}

typedef struct arg_job {
  pmpy_trace *t;
  pm_type type;
  const char *name;
  bool output;
  int32_t alias;
  pm_val val;
} arg_job;

static pm_code arg_body(void *ctx, pm_err *err) {
  arg_job *j = ctx;
  pm_graph *g = j->t->g;
  (void)err;
  if (j->output) pm_vec_push(g->arena, &j->t->alias, j->alias);
  j->val = pm_add_arg(g, 1, &j->type);
  if (j->name) g->values.at[j->val].name = pm_intern(g, j->name);
  if (j->output) g->n_outputs++;
  else g->n_operands++;
  return PM_OK;
}

static PyObject *add_arg(PyObject *self, PyObject *args, PyObject *kw, bool output) {
  static char *operand_names[] = {"shape", "dtype", "name", NULL};
  static char *output_names[] = {"shape", "dtype", "name", "alias", NULL};
  pmpy_trace *t = (pmpy_trace *)self;
  PyObject *shape, *dtype;
  arg_job j = {.t = t, .type = {.kind = PM_REF, .space = PM_GMEM}, .output = output, .alias = -1};
  pm_dtype d;
  if (!PyArg_ParseTupleAndKeywords(args, kw, output ? "OO|zi:output" : "OO|z:operand",
                                   output ? output_names : operand_names, &shape, &dtype, &j.name,
                                   &j.alias) ||
      pmpy_shape(shape, "shape", &j.type) || pmpy_dtype_from(dtype, &d)) {
    return NULL;
  }
  j.type.dtype = (uint8_t)d;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  if (t->g->blocks.at[1].ops.n || (!output && t->g->n_outputs)) {
    return pmpy_fail(PM_E_RUNTIME, "operands come first, then outputs, then the body");
  }
  if (j.alias >= (int32_t)t->g->n_operands) {
    return pmpy_fail(PM_E_VALUE, "alias: %d, there are %u operands", j.alias, t->g->n_operands);
  }
  pm_err err;
  clear_err(&err);
  if (pm_protect(arg_body, &j, &err)) return pmpy_raise(&err);
  return pmpy_traced_new(t, j.val, false);
}

static PyObject *trace_operand(PyObject *self, PyObject *args, PyObject *kw) {
  return add_arg(self, args, kw, false);
}

static PyObject *trace_output(PyObject *self, PyObject *args, PyObject *kw) {
  return add_arg(self, args, kw, true);
}

/* ---- names from the source ----------------------------------------------------------------- */

static bool ident_char(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* `name = ...` or `name: T = ...`: length of the name, its start in *name; 0: no such line. */
static size_t target_of(const char *line, const char **name) {
  while (*line == ' ' || *line == '\t') line++;
  size_t n = 0;
  while (ident_char(line[n])) n++;
  if (!n || (line[0] >= '0' && line[0] <= '9')) return 0;
  const char *p = line + n;
  while (*p == ' ' || *p == '\t') p++;
  if (*p == ':') {
    int depth = 0;
    for (p++; *p && *p != '#' && (depth || *p != '='); p++) {
      depth += (*p == '[' || *p == '(' || *p == '{') - (*p == ']' || *p == ')' || *p == '}');
    }
  }
  if (p[0] != '=' || p[1] == '=' || strchr(p, ';')) return 0;
  *name = line;
  return n;
}

/* New reference to linecache's list of lines, NULL if there are none (no exception). */
static PyObject *lines_of(const char *file) {
  PyObject *linecache = PyImport_ImportModule("linecache");
  PyObject *lines = linecache ? PyObject_CallMethod(linecache, "getlines", "s", file) : NULL;
  Py_XDECREF(linecache);
  if (!lines) PyErr_Clear();
  if (lines && !PyList_Check(lines)) Py_CLEAR(lines);
  return lines;
}

static void name_result(pmpy_trace *t, pm_opid op, PyObject *lines) {
  const pm_op *o = pm_get(t->g, op);
  if (!lines || o->line > PyList_GET_SIZE(lines)) return;
  PyObject *line = PyList_GET_ITEM(lines, o->line - 1);
  const char *text = PyUnicode_Check(line) ? PyUnicode_AsUTF8(line) : NULL, *name;
  if (!text) {
    PyErr_Clear();
    return;
  }
  size_t n = target_of(text, &name);
  char buffer[64];
  if (!n || n >= sizeof buffer) return;
  memcpy(buffer, name, n);
  buffer[n] = 0;
  pm_value *v = pm_value_of(t->g, o->out);
  if (!v->name) v->name = intern(t->g, buffer);
}

static void name_results(pmpy_trace *t) {
  pm_graph *g = t->g;
  uint32_t n_files = g->strings.n, file = 0, line = 0;
  PyObject **lines = PyMem_Calloc(n_files, sizeof *lines);
  if (!lines) return;
  bool done = true;
  for (pm_opid op = g->ops.n; op-- > 1;) {
    const pm_op *o = pm_get(g, op);
    if (!o->code || !o->line) continue;
    if (o->file != file || o->line != line) {
      file = o->file;
      line = o->line;
      done = false;
    }
    /* an allocation bears its parameter's name; its line is that of the call that made it */
    bool alloc = o->code == PM_OP_ALLOC_SMEM || o->code == PM_OP_ALLOC_BARRIER ||
                 o->code == PM_OP_ALLOC_ACC || o->code == PM_OP_ALLOC_SEMAPHORE;
    if (done || alloc || (!o->n_out && !o->n_regions)) continue;
    done = true;
    if (o->n_out != 1) continue; /* no one name is right for several results */
    if (!lines[file]) {
      lines[file] = lines_of(g->strings.at[file]);
      if (!lines[file]) lines[file] = Py_NewRef(Py_None);
    }
    if (lines[file] != Py_None) name_result(t, op, lines[file]);
  }
  for (uint32_t k = 0; k < n_files; k++) Py_XDECREF(lines[k]);
  PyMem_Free(lines);
}

static pm_code finish_body(void *ctx, pm_err *err) {
  pmpy_trace *t = ctx;
  pm_graph *g = t->g;
  g->alias = PM_NEW(g->arena, int32_t, g->n_outputs ? g->n_outputs : 1);
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    g->alias[k] = t->alias.at[k];
    g->n_inout += g->alias[k] >= 0;
  }
  return pm_verify(g, err);
}

static PyObject *trace_finish(PyObject *self, PyObject *none) {
  pmpy_trace *t = (pmpy_trace *)self;
  (void)none;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  if (t->depth != 1) return pmpy_fail(PM_E_RUNTIME, "a loop, branch or scope is still open");
  name_results(t);
  pm_err err;
  clear_err(&err);
  pm_code rc = pm_protect(finish_body, t, &err);
  PyObject *graph = Py_NewRef((PyObject *)t->graph);
  drop(t);
  if (rc) {
    Py_DECREF(graph);
    return pmpy_raise(&err);
  }
  return graph;
}

static PyObject *trace_abort(PyObject *self, PyObject *none) {
  (void)none;
  drop((pmpy_trace *)self);
  Py_RETURN_NONE;
}

static PyMethodDef trace_methods[] = {
    {"enter", trace_enter, METH_NOARGS, "Make this the thread's current trace."},
    {"exit", trace_exit, METH_NOARGS, "Make the trace below current again."},
    {"operand", (PyCFunction)(void (*)(void))trace_operand, METH_VARARGS | METH_KEYWORDS,
     "operand(shape, dtype, name=None) -> Ref"},
    {"output", (PyCFunction)(void (*)(void))trace_output, METH_VARARGS | METH_KEYWORDS,
     "output(shape, dtype, name=None, alias=-1) -> Ref"},
    {"finish", trace_finish, METH_NOARGS, "End the trace; its Graph, verified."},
    {"abort", trace_abort, METH_NOARGS, "End the trace and drop what it holds."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot trace_slots[] = {{Py_tp_new, trace_new},
                                    {Py_tp_dealloc, trace_dealloc},
                                    {Py_tp_methods, trace_methods},
                                    {Py_tp_doc, "A kernel body being traced."},
                                    {0, NULL}};
static PyType_Spec trace_spec = {"pallas_mgpu._core.Trace", sizeof(pmpy_trace), 0,
                                 Py_TPFLAGS_DEFAULT, trace_slots};

/* ---- operands and attributes of ops made by name -------------------------------------------- */

enum { F_INT, F_BITS, F_LIST, F_STR, F_LAYOUT, F_ENUM };
#define F_ENUM_AXIS F_ENUM
#define F_ENUM_REDUCE F_ENUM
#define F_ENUM_ATOMIC F_ENUM
#define F_ENUM_OOB F_ENUM
#define F_ENUM_ENGINE F_ENUM
#define F_ENUM_COMBINE F_ENUM
static const uint8_t attr_form[PM_ATTR_COUNT] = {
#define PM_ATTR(id, text, kind) [PM_ATTR_##id] = F_##kind,
#include "../ir/attrs.def"
#undef PM_ATTR
};

typedef struct call {
  pm_opcode code;
  uint32_t n_in, n_attrs;
  pm_val *in;    /* owned */
  uint8_t *weak; /* owned; of operands */
  pm_attr_arg attrs[PM_MAX_ATTRS];
  int64_t list[PM_MAX_ATTRS][2 * PM_MAX_RANK];
} call;

static void end_call(call *c) {
  PyMem_Free(c->in);
  PyMem_Free(c->weak);
}

/* The operand letter of ops.def for operand k. */
static char letter_of(pm_opcode code, uint32_t k) {
  const char *spec = pm_ops[code].in;
  pm_operand o = {.letter = 'v'};
  for (k++; *spec && k && !o.repeated; k--) spec = pm_read_operand(spec, &o);
  return k && !o.repeated ? 'v' : o.letter;
}

static pm_val operand(pmpy_trace *t, pm_opcode code, char letter, PyObject *o, uint8_t *weak) {
  if (PMPY_IS_REF(o)) {
    pmpy_traced *x = (pmpy_traced *)o;
    *weak = 0;
    return pmpy_check_open(t, x) ? 0 : x->val;
  }
  pmpy_arg x;
  if (pmpy_arg_need(t, pm_ops[code].text, o, &x)) return 0;
  *weak = x.weak;
  const bool index = letter == 'i' || letter == 't';
  bool cast = index || (letter == 'p' && !x.val);
  if (index && !pm_is_int(x.type.dtype)) cast = false; /* the type rule complains */
  return pmpy_arg_as(t, &x, cast ? (index ? PM_I32 : PM_BOOL) : x.type.dtype);
}

static int operands(pmpy_trace *t, call *c, PyObject *seq) {
  PyObject *fast = PySequence_Fast(seq, "operands must be a sequence");
  if (!fast) return -1;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
  c->in = PyMem_Malloc(sizeof *c->in * (size_t)(n + 1));
  c->weak = PyMem_Malloc((size_t)(n + 1));
  int rc = c->in && c->weak ? 0 : -1;
  if (rc) PyErr_NoMemory();
  for (Py_ssize_t k = 0; k < n && !rc; k++) {
    PyObject *item = PySequence_Fast_GET_ITEM(fast, k);
    if (item == Py_None) continue; /* an optional operand that is not given */
    char letter = letter_of(c->code, c->n_in);
    c->in[c->n_in] = operand(t, c->code, letter, item, &c->weak[c->n_in]);
    if (!c->in[c->n_in++]) rc = -1;
  }
  Py_DECREF(fast);
  return rc;
}

int pmpy_enum_value(pm_attr_id id, const char *text, int64_t *out) {
#define V(family, id, text) text,
#define PM_FAMILY(family, values) static const char *const names_##family[] = {values NULL};
#include "../ir/enums.def"
#undef PM_FAMILY
#undef V
  const char *const *names = id == PM_ATTR_AXIS     ? names_AXIS
                             : id == PM_ATTR_REDUCE ? names_REDUCE
                             : id == PM_ATTR_ATOMIC ? names_ATOMIC
                             : id == PM_ATTR_OOB    ? names_OOB
                             : id == PM_ATTR_ENGINE ? names_ENGINE
                                                    : names_COMBINE;
  for (int k = 0; names[k]; k++) {
    if (!strcmp(names[k], text)) {
      *out = k;
      return 0;
    }
  }
  pmpy_fail(PM_E_VALUE, "%s: unknown value '%s'", pm_attr_text[id], text);
  return -1;
}

static int attribute(pmpy_trace *t, call *c, const char *name, PyObject *value) {
  const pm_op_info *info = &pm_ops[c->code];
  int k = 0;
  while (k < info->n_attrs && strcmp(pm_attr_text[info->attrs[k]], name)) k++;
  if (k == info->n_attrs) {
    pmpy_fail(PM_E_TYPE, "%s has no attribute '%s'", info->text, name);
    return -1;
  }
  pm_attr_arg *a = &c->attrs[c->n_attrs];
  *a = (pm_attr_arg){.id = info->attrs[k]};
  uint8_t form = attr_form[a->id];
  if (form == F_LAYOUT || form == F_BITS) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED, "%s: attribute '%s' cannot be given here", info->text, name);
    return -1;
  }
  if (form == F_LIST) {
    int n = pmpy_ints(value, name, c->list[c->n_attrs], 2 * PM_MAX_RANK);
    if (n < 0) return -1;
    a->list = c->list[c->n_attrs];
    a->n = (uint32_t)n;
  } else if (form == F_STR || (form == F_ENUM && PyUnicode_Check(value))) {
    const char *s = PyUnicode_AsUTF8(value);
    if (!s || (form == F_ENUM && pmpy_enum_value(a->id, s, &a->i))) return -1;
    if (form == F_STR) a->i = intern(t->g, s);
  } else if (pmpy_ints(value, name, &a->i, 1) != 1) {
    if (!PyErr_Occurred()) pmpy_fail(PM_E_TYPE, "%s: %s must be an int", info->text, name);
    return -1;
  }
  c->n_attrs++;
  return 0;
}

/* args: name and operands first, then `skip` others; the keywords are attributes. */
static int begin_call(pmpy_trace *t, call *c, PyObject *const *args, Py_ssize_t n,
                      Py_ssize_t expected, PyObject *kwnames) {
  memset(c, 0, offsetof(call, attrs));
  Py_ssize_t size;
  const char *name =
      n == expected && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8AndSize(args[0], &size) : NULL;
  if (!name) {
    if (!PyErr_Occurred()) pmpy_fail(PM_E_TYPE, "expected the name of an op and its operands");
    return -1;
  }
  c->code = (pm_opcode)pm_op_find(name, (size_t)size);
  if (!c->code) {
    pmpy_fail(PM_E_VALUE, "there is no op '%s'", name);
    return -1;
  }
  if (operands(t, c, args[1])) return -1;
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); k++) {
    const char *key = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kwnames, k));
    if (!key || attribute(t, c, key, args[n + k])) return -1;
  }
  return 0;
}

static PyObject *effect(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
  (void)module;
  const char *name = n && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  pmpy_trace *t = pmpy_begin(name ? name : "effect", NULL);
  call c;
  if (!t) return NULL;
  bool ok = !begin_call(t, &c, args, n, 2, kwnames);
  if (ok && (pm_ops[c.code].out > 1 || pm_ops[c.code].regions)) {
    pmpy_fail(PM_E_TYPE, "%s has results or regions; effect() makes ops without",
              pm_ops[c.code].text);
    ok = false;
  }
  const pm_val v = ok ? pmpy_emit(t, c.code, c.in, c.n_in, NULL, c.attrs, c.n_attrs) : 0;
  const bool out = ok && pm_ops[c.code].out;
  end_call(&c);
  if (!v) return NULL;
  if (out) return pmpy_traced_new(t, v, false);
  Py_RETURN_NONE;
}

static PyObject *axis_index(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_trace *t = pmpy_begin("axis_index", NULL);
  if (!t) return NULL;
  const char *kind = n == 2 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  if (!kind) {
    if (PyErr_Occurred()) return NULL;
    return pmpy_fail(PM_E_TYPE, "axis_index: expected a kind of axis and its number");
  }
  pm_attr_arg attrs[2] = {{.id = PM_ATTR_AXIS}, {.id = PM_ATTR_DIM}};
  if (pmpy_enum_value(PM_ATTR_AXIS, kind, &attrs[0].i)) return NULL;
  if (pmpy_ints(args[1], "axis_index", &attrs[1].i, 1) != 1) return NULL;
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, PM_OP_AXIS, NULL, 0, &type, attrs, 2);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *counted(pm_opcode code, PyObject *number) {
  const char *what = pm_ops[code].text;
  pmpy_trace *t = pmpy_begin(what, NULL);
  pm_attr_arg attr = {.id = PM_ATTR_N};
  if (!t || pmpy_ints(number, what, &attr.i, 1) != 1) return NULL;
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, code, NULL, 0, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *next_tile(PyObject *module, PyObject *number) {
  (void)module;
  return counted(PM_OP_NEXT_TILE, number);
}

static PyObject *take_tile(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_trace *t = pmpy_begin("take_tile", NULL);
  pm_attr_arg attr = {.id = PM_ATTR_N};
  pmpy_arg own;
  pm_val in = 0;
  if (!t || n < 1 || n > 2 || pmpy_ints(args[0], "take_tile", &attr.i, 1) != 1) return NULL;
  if (n == 2 &&
      (pmpy_arg_need(t, "take_tile", args[1], &own) || !(in = pmpy_arg_as(t, &own, PM_I32)))) {
    return NULL;
  }
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, PM_OP_TAKE_TILE, &in, n == 2, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *first_tile(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  pmpy_trace *t = pmpy_begin("first_tile", NULL);
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = t ? pmpy_emit(t, PM_OP_FIRST_TILE, NULL, 0, &type, NULL, 0) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* ---- Op: an op with regions, while it is being filled ---------------------------------------- */

typedef struct region_op {
  PyObject_HEAD pmpy_trace *trace; /* owned */
  pm_opid op;
  uint32_t outer;  /* serial of the region it stands in */
  uint32_t serial; /* of its region that is open, 0: none is */
  uint32_t inside; /* number of that region */
  uint32_t n_in, n_weak;
  bool ended;
  uint8_t *in_weak; /* owned; weakness of operands */
  uint8_t *weak;    /* owned; weakness of results as far as known */
} region_op;

static PyObject *open_op(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
  (void)module;
  pmpy_trace *t = pmpy_begin("open", NULL);
  call c;
  if (!t) return NULL;
  int64_t n_regions = 0;
  pm_opid op = 0;
  if (!begin_call(t, &c, args, n, 3, kwnames) &&
      pmpy_ints(args[2], "regions", &n_regions, 1) == 1) {
    if (!pm_ops[c.code].regions || n_regions < 1 || n_regions > UINT16_MAX) {
      pmpy_fail(PM_E_VALUE, "%s: %lld regions or branches; 1 to %d are supported",
                pm_ops[c.code].text, (long long)n_regions, UINT16_MAX);
    } else {
      emit_job j = {&t->b, c.code, c.in, c.n_in, (uint32_t)n_regions, NULL, c.attrs, c.n_attrs, 0};
      op = emit(&j);
    }
  }
  region_op *o = op ? PyObject_New(region_op, pmpy.op_type) : NULL;
  if (!o) {
    end_call(&c);
    return NULL;
  }
  o->trace = (pmpy_trace *)Py_NewRef((PyObject *)t);
  o->op = op;
  o->outer = t->region[t->depth - 1].serial;
  o->serial = o->inside = o->n_weak = 0;
  o->ended = false;
  o->n_in = c.n_in;
  o->in_weak = c.weak;
  o->weak = NULL;
  c.weak = NULL;
  end_call(&c);
  return (PyObject *)o;
}

static void op_dealloc(PyObject *self) {
  region_op *o = (region_op *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyMem_Free(o->in_weak);
  PyMem_Free(o->weak);
  Py_DECREF(o->trace);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* The op's trace with the user's place, if the op may do `what` now: `inside` one of its regions,
 * or directly where it stands. */
static pmpy_trace *op_begin(region_op *o, const char *what, bool inside) {
  pmpy_trace *t = pmpy_begin(what, NULL);
  if (!t) return NULL;
  uint32_t top = t->region[t->depth - 1].serial;
  if (o->trace != t || o->ended || top != (inside ? o->serial : o->outer)) {
    pmpy_fail(PM_E_RUNTIME, "%s: the op is not the one being filled", what);
    return NULL;
  }
  return t;
}

static pm_opcode op_code(const region_op *o) { return (pm_opcode)pm_get(o->trace->g, o->op)->code; }

/* Weakness of region argument k where the caller says nothing: that of the operand it starts with.
 */
static bool argument_weak(const region_op *o, uint32_t k) {
  pm_opcode code = op_code(o);
  if (code == PM_OP_FOR) return k ? o->in_weak[k + 1] : o->in_weak[0] && o->in_weak[1];
  return code == PM_OP_WHILE && o->in_weak[k];
}

/* List of objects for n consecutive values. `weak` and `names` may be NULL or None or sequences. */
static PyObject *value_list(pmpy_trace *t, const region_op *o, pm_val first, uint32_t n,
                            PyObject *weak, PyObject *names, bool results) {
  PyObject *w = weak && weak != Py_None ? PySequence_Fast(weak, "weak must be a sequence") : NULL;
  PyObject *s =
      names && names != Py_None ? PySequence_Fast(names, "names must be a sequence") : NULL;
  PyObject *list = PyErr_Occurred() ? NULL : PyList_New(n);
  for (uint32_t k = 0; list && k < n; k++) {
    bool is_weak = results ? k < o->n_weak && o->weak[k] : argument_weak(o, k);
    if (w)
      is_weak =
          k < PySequence_Fast_GET_SIZE(w) && PyObject_IsTrue(PySequence_Fast_GET_ITEM(w, k)) == 1;
    pm_dtype d = pm_typeof(t->g, first + k)->dtype;
    PyObject *x = pmpy_traced_new(t, first + k, is_weak && (d == PM_I32 || d == PM_F32));
    if (!x) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, x);
    PyObject *name = s && k < PySequence_Fast_GET_SIZE(s) ? PySequence_Fast_GET_ITEM(s, k) : NULL;
    const char *text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    if (text) pmpy_name(t, first + k, text);
  }
  Py_XDECREF(w);
  Py_XDECREF(s);
  return list;
}

static PyObject *op_enter(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"k", "weak", "names", NULL};
  region_op *o = (region_op *)self;
  int k = 0;
  PyObject *weak = NULL, *arg_names = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|iOO:enter", names, &k, &weak, &arg_names))
    return NULL;
  pmpy_trace *t = op_begin(o, "enter", false);
  if (!t) return NULL;
  if (k < 0 || k >= pm_get(t->g, o->op)->n_regions) {
    return pmpy_fail(PM_E_VALUE, "enter: there is no region %d", k);
  }
  pm_blk block = pm_region(t->g, o->op, (uint32_t)k);
  if (push_region(t, block)) return NULL;
  o->serial = t->region[t->depth - 1].serial;
  o->inside = (uint32_t)k;
  const pm_block *b = &t->g->blocks.at[block];
  return value_list(t, o, b->arg, b->n_args, weak, arg_names, false);
}

/* A result is weak if every yield (and the value it starts with) is. */
static int note_weak(region_op *o, const uint8_t *weak, uint32_t n) {
  pm_opcode code = op_code(o);
  if (code == PM_OP_WHILE && !o->inside) return 0;
  if (!o->weak) {
    o->weak = PyMem_Malloc(n + 1);
    if (!o->weak) {
      PyErr_NoMemory();
      return -1;
    }
    o->n_weak = n;
    uint32_t first = code == PM_OP_FOR ? 2 : 0;
    bool carries = code == PM_OP_FOR || code == PM_OP_WHILE;
    for (uint32_t k = 0; k < n; k++) {
      o->weak[k] = carries ? k + first < o->n_in && o->in_weak[k + first] : 1;
    }
  }
  for (uint32_t k = 0; k < n && k < o->n_weak; k++) o->weak[k] &= weak[k];
  return 0;
}

static PyObject *op_leave(PyObject *self, PyObject *values) {
  region_op *o = (region_op *)self;
  pmpy_trace *t = op_begin(o, "leave", true);
  if (!t) return NULL;
  call c = {.code = PM_OP_YIELD};
  bool ok = !operands(t, &c, values) && !note_weak(o, c.weak, c.n_in) &&
            pmpy_emit(t, PM_OP_YIELD, c.in, c.n_in, NULL, NULL, 0);
  end_call(&c);
  if (!ok) return NULL;
  t->depth--;
  t->b.block = t->region[t->depth - 1].block;
  o->serial = 0;
  Py_RETURN_NONE;
}

typedef struct close_job {
  pm_builder *b;
  pm_opid op;
} close_job;

static pm_code close_body(void *ctx, pm_err *err) {
  close_job *j = ctx;
  return pm_close(j->b, j->op, err);
}

static PyObject *op_close(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"weak", "names", NULL};
  region_op *o = (region_op *)self;
  PyObject *weak = NULL, *result_names = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|OO:close", names, &weak, &result_names)) return NULL;
  pmpy_trace *t = op_begin(o, "close", false);
  if (!t) return NULL;
  pm_err err;
  clear_err(&err);
  if (pm_protect(close_body, &(close_job){&t->b, o->op}, &err)) return pmpy_raise(&err);
  o->ended = true;
  const pm_op *op = pm_get(t->g, o->op);
  return value_list(t, o, op->out, op->n_out, weak, result_names, true);
}

static PyObject *op_abandon(PyObject *self, PyObject *none) {
  region_op *o = (region_op *)self;
  pmpy_trace *t = o->trace;
  (void)none;
  if (!t->graph || o->ended) Py_RETURN_NONE;
  uint32_t depth = t->depth;
  while (depth && t->region[depth - 1].serial != o->outer) depth--;
  pm_op *op = pm_get(t->g, o->op);
  const pm_block *parent = &t->g->blocks.at[op->parent];
  if (!depth || !parent->ops.n || parent->ops.at[parent->ops.n - 1] != o->op) {
    return pmpy_fail(PM_E_RUNTIME, "abandon: other ops came after this one");
  }
  pm_abandon(&t->b, o->op);
  t->depth = depth;
  t->b.block = t->region[depth - 1].block;
  o->ended = true;
  Py_RETURN_NONE;
}

static PyMethodDef op_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))op_enter, METH_VARARGS | METH_KEYWORDS,
     "enter(k=0, weak=None, names=None): go into region k; its arguments."},
    {"leave", op_leave, METH_O, "leave(values): end the region with what it yields."},
    {"close", (PyCFunction)(void (*)(void))op_close, METH_VARARGS | METH_KEYWORDS,
     "close(weak=None, names=None): end the op; its results."},
    {"abandon", op_abandon, METH_NOARGS, "Take the op away again, with all in it."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot op_slots[] = {{Py_tp_dealloc, op_dealloc},
                                 {Py_tp_methods, op_methods},
                                 {Py_tp_doc, "An op with regions that is being filled."},
                                 {0, NULL}};
static PyType_Spec op_spec = {"pallas_mgpu._core.Op", sizeof(region_op), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, op_slots};

/* ---- module -------------------------------------------------------------------------------- */

static PyObject *current_trace(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  if (!current || !current->graph) Py_RETURN_NONE;
  return Py_NewRef((PyObject *)current);
}

static PyObject *in_loop(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  const pmpy_trace *t = pmpy_begin("in_loop", NULL);
  if (!t) return NULL;
  bool found = false;
  for (pm_blk b = t->b.block; t->g->blocks.at[b].parent && !found;) {
    const pm_op *o = pm_get(t->g, t->g->blocks.at[b].parent);
    found = o->code == PM_OP_FOR || o->code == PM_OP_WHILE;
    b = o->parent;
  }
  return PyBool_FromLong(found);
}

static PyObject *region(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  const pmpy_trace *t = pmpy_begin("region", NULL);
  return t ? PyLong_FromUnsignedLong(t->region[t->depth - 1].serial) : NULL;
}

PyMethodDef pmpy_trace_functions[] = {
    {"current_trace", current_trace, METH_NOARGS, "The thread's current Trace, or None."},
    {"in_loop", in_loop, METH_NOARGS, "in_loop() -> bool: is the innermost region part of a loop?"},
    {"region", region, METH_NOARGS, "region() -> int: number of the innermost open region."},
    {"effect", (PyCFunction)(void (*)(void))effect, METH_FASTCALL | METH_KEYWORDS,
     "effect(name, operands, **attrs): add an op without regions; its result, or None."},
    {"open", (PyCFunction)(void (*)(void))open_op, METH_FASTCALL | METH_KEYWORDS,
     "open(name, operands, n_regions, **attrs) -> Op: add an op with regions."},
    {"first_tile", first_tile, METH_NOARGS, "first_tile(): number of this cluster in the launch."},
    {"take_tile", (PyCFunction)(void (*)(void))take_tile, METH_FASTCALL,
     "take_tile(n, own=None): the next number of counter n of the launch, for hand_tile or "
     "share_tile; own, where each cluster has a point of its own."},
    {"next_tile", next_tile, METH_O, "next_tile(n): counter n of the launch, plus one each time."},
    {"axis_index", (PyCFunction)(void (*)(void))axis_index, METH_FASTCALL,
     "axis_index(kind, dim) -> Array; kind is grid, cluster or thread."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_trace(PyObject *module) {
  if (find_package_dir(module) || pmpy_init_promote()) return -1;
  pmpy.trace_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &trace_spec, NULL);
  pmpy.op_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &op_spec, NULL);
  if (!pmpy.trace_type || !pmpy.op_type) return -1;
  if (PyModule_AddType(module, pmpy.trace_type) || PyModule_AddType(module, pmpy.op_type))
    return -1;
  if (pmpy_init_array(module) || pmpy_init_ref(module)) return -1;
  PyMethodDef *functions[] = {pmpy_trace_functions, pmpy_promote_functions, pmpy_array_functions,
                              pmpy_move_functions, pmpy_ref_functions};
  for (size_t k = 0; k < PM_COUNT(functions); k++) {
    if (PyModule_AddFunctions(module, functions[k])) return -1;
  }
  return 0;
}
