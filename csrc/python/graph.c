/* Graph: an op graph with its arena, for tests, dumps and the kernel object.
 *
 * lower() works in place. If it fails, the graph is in an intermediate state, so it is dropped and
 * every later use says so. interpret() releases the GIL; output of the kernel and Ctrl-C are
 * handled by callbacks that acquire it again. */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "accesses.h"
#include "module.h"
#include "plan.h"
#include "races.h"

#include <numpy/arrayobject.h>

static void clear_err(pm_err *err) {
  err->code = PM_OK;
  err->line = 0;
  err->file[0] = err->text[0] = 0;
}

static PyObject *fail(pm_code code, const char *text) {
  pm_err err;
  clear_err(&err);
  pm_fail(&err, code, "%s", text);
  return pmpy_raise(&err);
}

pmpy_graph *pmpy_graph_new(void) {
  pmpy_graph *self = PyObject_New(pmpy_graph, pmpy.graph_type);
  if (!self) return NULL;
  pm_arena_init(&self->arena);
  self->g = NULL;
  self->inlined = NULL;
  return self;
}

static void graph_dealloc(PyObject *o) {
  PyTypeObject *type = Py_TYPE(o);
  pm_arena_free(&((pmpy_graph *)o)->arena);
  Py_XDECREF(((pmpy_graph *)o)->inlined);
  PyObject_Free(o);
  Py_DECREF(type);
}

/* The core's graph, or NULL with RuntimeError if a failed lower() took it. */
static pm_graph *graph_of(PyObject *o) {
  pm_graph *g = ((pmpy_graph *)o)->g;
  if (!g) fail(PM_E_RUNTIME, "this graph was lost when its lowering failed");
  return g;
}

static pm_graph *lowered_of(PyObject *o) {
  pm_graph *g = graph_of(o);
  if (!g || g->stage == PM_SYNCED) return g;
  fail(PM_E_RUNTIME, "this graph is not lowered yet: call lower() first");
  return NULL;
}

/* ---- text ---------------------------------------------------------------------------------- */

typedef struct parse_job {
  pm_arena *arena;
  const char *text;
  size_t n;
  pm_graph *g;
} parse_job;

static pm_code parse_body(void *ctx, pm_err *err) {
  parse_job *j = ctx;
  return pm_parse(j->arena, j->text, j->n, &j->g, err);
}

static PyObject *graph_parse(PyObject *type, PyObject *arg) {
  (void)type;
  Py_ssize_t n;
  const char *text = PyUnicode_AsUTF8AndSize(arg, &n);
  pmpy_graph *self = text ? pmpy_graph_new() : NULL;
  if (!self) return NULL;
  parse_job j = {&self->arena, text, (size_t)n, NULL};
  pm_err err;
  clear_err(&err);
  if (pm_protect(parse_body, &j, &err)) {
    Py_DECREF(self);
    return pmpy_raise(&err);
  }
  self->g = j.g;
  return (PyObject *)self;
}

typedef struct print_job {
  const pm_graph *g;
  pm_text out;
} print_job;

static pm_code print_body(void *ctx, pm_err *err) {
  print_job *j = ctx;
  (void)err;
  pm_print(j->g, &j->out);
  return PM_OK;
}

static PyObject *graph_text(PyObject *o, PyObject *none) {
  (void)none;
  pm_arena scratch;
  print_job j = {.g = graph_of(o)};
  pm_err err;
  if (!j.g) return NULL;
  clear_err(&err);
  pm_arena_init(&scratch);
  pm_text_init(&j.out, &scratch);
  PyObject *text = pm_protect(print_body, &j, &err)
                       ? pmpy_raise(&err)
                       : PyUnicode_DecodeUTF8(j.out.at, (Py_ssize_t)j.out.n, "replace");
  pm_arena_free(&scratch);
  return text;
}

static PyObject *graph_repr(PyObject *o) {
  const pm_graph *g = ((pmpy_graph *)o)->g;
  return PyUnicode_FromFormat("Graph(%s)", g ? g->name : "lost");
}

/* ---- lowering ------------------------------------------------------------------------------ */

typedef struct lower_job {
  pm_graph *g;
  const pm_target *target; /* NULL: any */
  pm_cuda_options options;
  pm_program program;
} lower_job;

static pm_code lower_body(void *ctx, pm_err *err) {
  lower_job *j = ctx;
  return pm_lower(j->g, j->target ? j->target : pm_choose_target(j->g), err);
}

static PyObject *graph_lower(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"target", NULL};
  PyObject *target = Py_None;
  lower_job j = {.g = graph_of(o)};
  pm_err err;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O:lower", names, &target)) return NULL;
  if (pmpy_target(target, &j.target) < 0) return NULL;
  if (!j.g) return NULL;
  if (j.g->stage == PM_SYNCED) return Py_NewRef(o);
  clear_err(&err);
  if (pm_protect(lower_body, &j, &err)) {
    pmpy_graph *self = (pmpy_graph *)o;
    self->g = NULL;
    pm_arena_free(&self->arena);
    return pmpy_raise(&err);
  }
  return Py_NewRef(o);
}

static pm_code cuda_body(void *ctx, pm_err *err) {
  lower_job *j = ctx;
  return pm_generate_cuda(j->g, &j->options, &j->program, err);
}

static PyObject *u32_tuple(const uint32_t *x, uint32_t n) {
  PyObject *out = PyTuple_New(n);
  for (uint32_t k = 0; out && k < n; k++) {
    PyObject *item = PyLong_FromUnsignedLong(x[k]);
    if (!item) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, k, item);
  }
  return out;
}

static PyObject *u64_tuple(const uint64_t *x, uint32_t n) {
  PyObject *out = PyTuple_New(n);
  for (uint32_t k = 0; out && k < n; k++) {
    PyObject *item = PyLong_FromUnsignedLongLong(x[k]);
    if (!item) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, k, item);
  }
  return out;
}

/* New list of make(p, k) for k below n. */
static PyObject *list_of(const pm_program *p, uint32_t n,
                         PyObject *(*make)(const pm_program *, uint32_t)) {
  PyObject *list = PyList_New(n);
  for (uint32_t k = 0; list && k < n; k++) {
    PyObject *item = make(p, k);
    if (!item) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, item);
  }
  return list;
}

static PyObject *arg_info(const pm_program *p, uint32_t k) {
  static const char *const kinds[] = {"tensor_map", "pointer", "counters", "sanitizer",
                                      "watch",      "peers",   "size"}; /* enum pm_arg_kind */
  return Py_BuildValue("(siI)", kinds[p->args[k].kind], p->args[k].param, p->args[k].map);
}

/* As CU_MAP_ of cuda_api.h names them. */
static const char *const map_elements[PM_DTYPE_COUNT] = {
#define PM_DTYPE(id, text, bits, class, cuda, dlpack, short, numpy, wide, torch, xla, map, group) \
  [PM_##id] = #map,
#include "../base/dtypes.def"
#undef PM_DTYPE
};

static PyObject *map_info(const pm_program *p, uint32_t k) {
  const pm_tensor_map *m = &p->maps[k];
  return Py_BuildValue("{s:i,s:i,s:s,s:s,s:i,s:N,s:N,s:N,s:N}", "param", m->param, "of", m->of,
                       "dtype", pm_dtypes[m->dtype].text, "element", map_elements[m->dtype],
                       "swizzle", m->swizzle, "dim", u64_tuple(m->dim, m->rank), "stride",
                       u64_tuple(m->stride, m->rank), "box", u32_tuple(m->box, m->rank), "extent",
                       u32_tuple(m->extent, m->rank));
}

/* What the k-th pointer must be: (dtype, shape, bytes of alignment, operand it shares or -1). */
static PyObject *param_info(const pm_graph *g, const pm_program *p, uint32_t k) {
  const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + k);
  bool output = k >= g->n_operands;
  PyObject *shape = PyTuple_New(t->rank);
  for (int d = 0; shape && d < t->rank; d++)
    PyTuple_SET_ITEM(shape, d, PyLong_FromLongLong(t->dim[d]));
  return Py_BuildValue("(sNLi)", pm_dtypes[t->dtype].text, shape, (long long)p->align[k],
                       output && g->alias ? (int)g->alias[k - g->n_operands] : -1);
}

static PyObject *params_info(const pm_graph *g, const pm_program *p) {
  PyObject *list = PyList_New(p->n_params);
  for (uint32_t k = 0; list && k < p->n_params; k++) {
    PyObject *item = param_info(g, p, k);
    if (!item) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, item);
  }
  return list;
}

/* Of parameters: numbers of the sizes that their extents are, 0: static. */
static PyObject *extents_info(const pm_graph *g, const pm_program *p) {
  PyObject *list = PyList_New(p->n_params);
  for (uint32_t k = 0; list && k < p->n_params; k++) {
    const int rank = pm_typeof(g, g->blocks.at[1].arg + k)->rank;
    PyObject *item = PyTuple_New(rank);
    for (int d = 0; item && d < rank; d++)
      PyTuple_SET_ITEM(item, d, PyLong_FromUnsignedLong(pm_extent_of(g, k, (uint32_t)d)));
    if (!item) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, item);
  }
  return list;
}

/* Of sizes from number 1: (how, of what and what, least, most, multiple, name); see ir/sizes.h. */
static PyObject *sizes_info(const pm_graph *g) {
  PyObject *list = PyList_New(0);
  for (uint32_t k = 1; list && k < g->sizes.n; k++) {
    const pm_size *s = &g->sizes.at[k];
    PyObject *item = Py_BuildValue("(sLLLLLs)", pm_enum_text(PM_ENUM_SIZE, s->how), (long long)s->a,
                                   (long long)s->b, (long long)s->least, (long long)s->most,
                                   (long long)s->multiple, g->strings.at[s->name]);
    if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

/* Arguments in the table of peers; -1: the counters. */
static PyObject *peers_info(const pm_program *p) {
  PyObject *out = PyTuple_New(p->n_peers);
  for (uint32_t k = 0; out && k < p->n_peers; k++)
    PyTuple_SET_ITEM(out, k, PyLong_FromLong(p->peers[k]));
  return out;
}

/* Of parameters: (name, strides in elements or None). */
static PyObject *given_info(const pm_graph *g, const pm_program *p) {
  PyObject *list = PyList_New(p->n_params);
  for (uint32_t k = 0; list && k < p->n_params; k++) {
    const int64_t *s = g->strides && k < g->n_operands ? g->strides[k] : NULL;
    const int rank = pm_typeof(g, g->blocks.at[1].arg + k)->rank;
    PyObject *strides = s ? PyTuple_New(rank) : Py_NewRef(Py_None);
    for (int d = 0; strides && s && d < rank; d++)
      PyTuple_SET_ITEM(strides, d, PyLong_FromLongLong(s[d]));
    PyObject *item = strides ? Py_BuildValue("(sN)", p->names[k], strides) : NULL;
    if (!item) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, item);
  }
  return list;
}

/* Of a check: (file or None, line, op, ref, dimension, shape, size of a range, does it wait). */
static PyObject *site_info(const pm_program *p, uint32_t k) {
  const pm_program_site *s = &p->sites[k];
  return Py_BuildValue("(zIsNisLOII)", s->file, s->line, s->op,
                       PyUnicode_FromFormat(s->of_view ? "a view of '%s'" : "'%s'", s->ref),
                       (int)s->dim, s->shape, (long long)s->size, s->waits ? Py_True : Py_False,
                       s->blocks, s->devices);
}

static PyObject *i64_tuple(const int64_t *x, uint32_t n) {
  PyObject *out = PyTuple_New(n);
  for (uint32_t k = 0; out && k < n; k++) PyTuple_SET_ITEM(out, k, PyLong_FromLongLong(x[k]));
  return out;
}

static PyObject *graph_cuda(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"line", "catalogue", "check_indices", "check_waits", NULL};
  int line = 1, catalogue = 1, indices = 0, waits = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|pppp:cuda", names, &line, &catalogue, &indices,
                                   &waits)) {
    return NULL;
  }
  lower_job j = {.g = lowered_of(o),
                 .options = {.line_directives = line,
                             .check_indices = indices,
                             .check_waits = waits,
                             .entry_only = !catalogue}};
  if (j.g) j.options.stand_in = pm_stand_in_is_on(j.g);
  pm_err err;
  if (!j.g) return NULL;
  clear_err(&err);
  if (pm_protect(cuda_body, &j, &err)) return pmpy_raise(&err);
  const pm_program *p = &j.program;
  return Py_BuildValue(
      "(N{s:s,s:N,s:N,s:O,s:O,s:O,s:I,s:I,s:I,s:I,s:N,s:N,s:s,s:O,s:N,s:N,s:N,s:N,s:N,s:N,s:I,s:N,"
      "s:I,s:N,s:N,s:N,s:O})",
      PyUnicode_DecodeUTF8(p->text, (Py_ssize_t)p->size, "replace"), "entry", p->entry, "grid",
      u32_tuple(p->grid, 3), "cluster", u32_tuple(p->cluster, 3), "shares_grid",
      p->shares_grid ? Py_True : Py_False, "folds_grid", p->launch.folded ? Py_True : Py_False,
      "meets_blocks", p->meets_blocks ? Py_True : Py_False,
      "block", p->block, "smem_bytes", p->smem_bytes, "counters", p->n_counters, "devices",
      p->n_devices, "mesh", i64_tuple(j.g->mesh, j.g->n_mesh), "peers", peers_info(p), "target",
      p->target->text, "pdl", p->pdl ? Py_True : Py_False, "args", list_of(p, p->n_args, arg_info),
      "maps", list_of(p, p->n_maps, map_info), "params", params_info(j.g, p), "given",
      given_info(j.g, p), "grid_sizes", i64_tuple(j.g->grid, j.g->n_grid), "cluster_sizes",
      i64_tuple(j.g->cluster, j.g->n_cluster), "operands", j.g->n_operands, "sites",
      list_of(p, p->n_sites, site_info), "sizes", p->n_sizes, "grid_extents",
      u32_tuple(j.g->grid_sizes, j.g->n_grid), "extents", extents_info(j.g, p), "size_rules",
      sizes_info(j.g), "clears_counters", p->clears_counters ? Py_True : Py_False);
}

/* ---- functions that stand for CUDA source --------------------------------------------------- */

int64_t pmpy_graph_inlines(pmpy_graph *graph, PyObject *function) {
  if (!graph->inlined && !(graph->inlined = PyList_New(0))) return 0;
  if (PyList_Append(graph->inlined, function) < 0) return 0;
  return (int64_t)PyList_GET_SIZE(graph->inlined);
}

/* (first element, memory, its bytes, written) of a ref; None of all else */
static PyObject *place_of(const struct pm_inline_value *v) {
  if (!v->low) return Py_NewRef(Py_None);
  return Py_BuildValue("(KKLO)", (unsigned long long)(uintptr_t)v->first,
                       (unsigned long long)(uintptr_t)v->low, (long long)v->extent,
                       v->written ? Py_True : Py_False);
}

/* function(list of memory of operands and results, None for barriers; where; places of operands)
 * -> arrivals on each operand */
int pmpy_call_inlined(const pmpy_graph *graph, pm_inline_call *call) {
  const uint32_t n = call->n_in + call->n_out;
  const Py_ssize_t known = graph->inlined ? PyList_GET_SIZE(graph->inlined) : 0;
  if (call->function < 1 || call->function > known) {
    fail(PM_E_NOT_IMPLEMENTED, "inline_cuda: this graph was parsed, its functions are not there");
    return -1;
  }
  PyObject *values = PyList_New(n), *arrivals = NULL;
  for (uint32_t k = 0; values && k < n; k++) {
    const struct pm_inline_value *v = &call->value[k];
    PyObject *o = v->at ? PyMemoryView_FromMemory(v->at, (Py_ssize_t)v->bytes,
                                                  v->written ? PyBUF_WRITE : PyBUF_READ)
                        : Py_NewRef(Py_None);
    if (!o) Py_CLEAR(values);
    else PyList_SET_ITEM(values, k, o);
  }
  PyObject *places = values ? PyList_New(call->n_in) : NULL;
  for (uint32_t k = 0; places && k < call->n_in; k++) {
    PyObject *place = place_of(&call->value[k]);
    if (!place) Py_CLEAR(places);
    else PyList_SET_ITEM(places, k, place);
  }
  PyObject *function = Py_NewRef(PyList_GET_ITEM(graph->inlined, call->function - 1));
  if (places) {
    const uint32_t *b = call->block, *g = call->grid;
    arrivals = PyObject_CallFunction(function, "O(II(III)(III))O", values, call->thread, call->warp,
                                     b[0], b[1], b[2], g[0], g[1], g[2], places);
  }
  bool ok = arrivals && PyList_Check(arrivals) && PyList_GET_SIZE(arrivals) == call->n_in;
  for (uint32_t k = 0; ok && k < call->n_in; k++) {
    const long x = PyLong_AsLong(PyList_GET_ITEM(arrivals, k));
    call->value[k].arrivals = (int32_t)x;
    ok = !(x == -1 && PyErr_Occurred());
  }
  if (!ok && !PyErr_Occurred()) fail(PM_E_INTERNAL, "inline_cuda: expected a list of arrivals");
  Py_XDECREF(arrivals);
  Py_DECREF(function);
  Py_XDECREF(places);
  Py_XDECREF(values);
  return ok ? 0 : -1;
}

static int call_inlined(void *ctx, pm_inline_call *call) {
  PyGILState_STATE gil = PyGILState_Ensure();
  int rc = pmpy_call_inlined(ctx, call);
  PyGILState_Release(gil);
  return rc;
}

/* ---- interpreter --------------------------------------------------------------------------- */

typedef struct run_job {
  const pm_graph *g;
  pm_machine *machine;
  void **buffers;
  pm_interp_options options;
} run_job;

static pm_code compile_body(void *ctx, pm_err *err) {
  run_job *j = ctx;
  if (j->g->sizes.n)
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "this graph has sizes that are known at run time only: call its kernel");
  return pm_interp_compile(j->g, &j->machine, err);
}

static pm_code run_body(void *ctx, pm_err *err) {
  run_job *j = ctx;
  return pm_interp_run(j->machine, j->buffers, &j->options, err);
}

static void print_line(void *ctx, const char *line) {
  (void)ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *out = PySys_GetObject("stdout");
  PyObject *text = PyUnicode_FromFormat("%s\n", line);
  PyObject *rc = out && text ? PyObject_CallMethod(out, "write", "O", text) : NULL;
  if (!rc) PyErr_Clear();
  Py_XDECREF(rc);
  Py_XDECREF(text);
  PyGILState_Release(gil);
}

static int check_signals(void *ctx, int64_t done, int64_t total) {
  (void)ctx, (void)done, (void)total;
  PyGILState_STATE gil = PyGILState_Ensure();
  int stop = PyErr_CheckSignals();
  PyGILState_Release(gil);
  return stop;
}

/* Data of an array that is what the k-th argument of the kernel must be; NULL with an exception. */
static void *buffer_of(const pm_graph *g, uint32_t k, PyObject *o) {
  const pm_type *type = pm_typeof(g, g->blocks.at[1].arg + k);
  pm_err err;
  pm_dtype d;
  clear_err(&err);
  bool output = k >= g->n_operands;
  if (!PyArray_Check(o)) {
    pm_fail(&err, PM_E_TYPE, "interpret: argument %u is %s, expected a NumPy array", k,
            Py_TYPE(o)->tp_name);
    return pmpy_raise(&err);
  }
  PyArrayObject *a = (PyArrayObject *)o;
  if (pmpy_dtype_from((PyObject *)PyArray_DESCR(a), &d)) return NULL;
  bool same = d == type->dtype && PyArray_ITEMSIZE(a) == pm_dtypes[d].bytes &&
              PyArray_NDIM(a) == type->rank;
  for (int i = 0; i < type->rank && same; i++) same = PyArray_DIM(a, i) == type->dim[i];
  if (!same || !PyArray_IS_C_CONTIGUOUS(a) || (output && !PyArray_ISWRITEABLE(a))) {
    pm_fail(&err, PM_E_VALUE,
            "interpret: argument %u must be a C-contiguous%s array of the kernel's shape and dtype "
            "(%s, rank %d)",
            k, output ? ", writeable" : "", pm_dtypes[type->dtype].text, type->rank);
    return pmpy_raise(&err);
  }
  return PyArray_DATA(a);
}

static PyObject *run(run_job *j, PyObject *arrays) {
  PyObject *seq = PySequence_Fast(arrays, "interpret: expected a list of NumPy arrays");
  if (!seq) return NULL;
  const uint32_t each = j->g->n_operands + j->g->n_outputs;
  const uint32_t n = each * (uint32_t)pm_n_devices(j->g);
  bool ok = PySequence_Fast_GET_SIZE(seq) == n;
  if (!ok) fail(PM_E_VALUE, "interpret: each device needs one array per operand and output");
  j->buffers = PyMem_Calloc(n + 1, sizeof *j->buffers);
  if (ok && !j->buffers) {
    PyErr_NoMemory();
    ok = false;
  }
  for (uint32_t k = 0; ok && k < n; k++) {
    j->buffers[k] = buffer_of(j->g, k % each, PySequence_Fast_GET_ITEM(seq, k));
    ok = j->buffers[k] != NULL;
  }
  if (ok) {
    pm_err err;
    clear_err(&err);
    PyThreadState *save = PyEval_SaveThread();
    pm_code rc = pm_protect(compile_body, j, &err);
    if (!rc) rc = pm_protect(run_body, j, &err);
    if (j->machine) pm_interp_free(j->machine);
    PyEval_RestoreThread(save);
    ok = !rc && !PyErr_Occurred();
    if (rc && !PyErr_Occurred()) pmpy_raise(&err);
    else if (rc) pmpy_add_place(&err);
  }
  PyMem_Free(j->buffers);
  Py_DECREF(seq);
  return ok ? Py_NewRef(Py_None) : NULL;
}

static void add_race(void *ctx, const pm_race *race) {
  PyGILState_STATE gil = PyGILState_Ensure();
  if (ctx && !PyErr_Occurred()) pmpy_add_race(ctx, race);
  PyGILState_Release(gil);
}

static void add_note(void *ctx, const char *what, const char *file, uint32_t line) {
  PyGILState_STATE gil = PyGILState_Ensure();
  if (ctx && !PyErr_Occurred()) pmpy_add_note(ctx, what, file, line);
  PyGILState_Release(gil);
}

static PyObject *graph_accesses(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"physical", "summary", NULL};
  int physical = 0, summary = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|pp:accesses", names, &physical, &summary)) {
    return NULL;
  }
  pm_graph *g = graph_of(o);
  return g ? pmpy_list_accesses(g, physical, summary) : NULL;
}

static PyObject *graph_interpret(PyObject *o, PyObject *args, PyObject *kw) {
  static char *names[] = {"arrays", "seed",    "oob_raise",     "zero_fill",
                          "races",  "touched", "uninitialized", NULL};
  PyObject *arrays, *races = NULL, *touched = NULL;
  unsigned long long seed = 0;
  int oob_raise = 1, zero_fill = 0, uninitialized = 0;
  pmpy_touches touches = {0};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|KppO!O!p:interpret", names, &arrays, &seed,
                                   &oob_raise, &zero_fill, &PyList_Type, &races, &PyList_Type,
                                   &touched, &uninitialized)) {
    return NULL;
  }
  run_job j = {.g = lowered_of(o)};
  if (!j.g) return NULL;
  pm_interp_defaults(&j.options);
  j.options.seed = seed;
  j.options.oob_raise = oob_raise;
  j.options.zero_fill = zero_fill;
  j.options.poison = j.options.fresh_outputs = uninitialized;
  j.options.races = j.options.strict = races;
  j.options.race_raises = false;
  j.options.race = add_race;
  j.options.note = add_note;
  j.options.race_ctx = races;
  j.options.print = print_line;
  j.options.number = pmpy_format_number;
  j.options.progress = check_signals;
  j.options.inlined = call_inlined;
  j.options.inlined_ctx = o;
  j.options.races |= touched != NULL;
  j.options.touched = touched ? pmpy_note_touch : NULL;
  j.options.touched_ctx = &touches;
  PyObject *result = run(&j, arrays);
  if (result && touched && pmpy_add_touches(touched, &touches)) Py_CLEAR(result);
  pm_free(touches.at);
  return result;
}

/* ---- type ---------------------------------------------------------------------------------- */

static PyObject *get_name(PyObject *o, void *c) {
  (void)c;
  const pm_graph *g = graph_of(o);
  return g ? PyUnicode_FromString(g->name) : NULL;
}

static PyObject *get_warnings(PyObject *o, void *c) {
  (void)c;
  const pm_graph *g = graph_of(o);
  PyObject *list = g ? PyList_New(g->warnings.n) : NULL;
  for (uint32_t k = 0; list && k < g->warnings.n; k++) {
    const char *s = g->warnings.at[k];
    PyObject *text = PyUnicode_DecodeUTF8(s, (Py_ssize_t)strlen(s), "replace");
    if (!text) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, text);
  }
  return list;
}

static PyGetSetDef graph_getset[] = {
    {"name", get_name, NULL, "Name of the kernel.", NULL},
    {"warnings", get_warnings, NULL, "What the passes found costly, with places.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

#define KEYWORDS(fn) (PyCFunction)(void (*)(void)) fn, METH_VARARGS | METH_KEYWORDS
static PyMethodDef graph_methods[] = {
    {"parse", graph_parse, METH_O | METH_STATIC, "parse(text) -> Graph, verified."},
    {"text", graph_text, METH_NOARGS, "The text form."},
    {"lower", KEYWORDS(graph_lower),
     "lower(target=None): all passes, in place, for the target, or the first of the table that has "
     "what the kernel needs; itself."},
    {"cuda", KEYWORDS(graph_cuda),
     "cuda(line=True, catalogue=True) -> (CUDA C++ text, dict about the launch). "
     "catalogue=False leaves out the device functions."},
    {"interpret", KEYWORDS(graph_interpret),
     "interpret(arrays, seed=0, oob_raise=True, zero_fill=False, races=None, touched=None, "
     "uninitialized=False): run on the CPU, and append the races found, and what ops touched, to "
     "the lists; writes outputs in place. uninitialized: an error where what was never written has "
     "an effect."},
    {"accesses", KEYWORDS(graph_accesses),
     "accesses(physical=False, summary=False): what each op may touch, by the table of ops; or the "
     "whole kernel, each access once."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot graph_slots[] = {{Py_tp_dealloc, graph_dealloc},
                                    {Py_tp_repr, graph_repr},
                                    {Py_tp_getset, graph_getset},
                                    {Py_tp_methods, graph_methods},
                                    {Py_tp_doc, "The op graph of a kernel."},
                                    {0, NULL}};
static PyType_Spec graph_spec = {"pallas_mgpu._core.Graph", sizeof(pmpy_graph), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 graph_slots};

int pmpy_init_graph(PyObject *module) {
  import_array1(-1);
  pmpy.graph_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &graph_spec, NULL);
  return pmpy.graph_type ? PyModule_AddType(module, pmpy.graph_type) : -1;
}
