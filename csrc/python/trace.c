/* A trace in progress: the graph under construction and the stack of open regions.
 *
 * Traces are nested in a stack for each thread; the top is the current one. Every Python-visible
 * entry point calls pmpy_begin, which records the user's file and line in the builder; after that,
 * ops are added with pmpy_emit, each under pm_protect. A region gets a serial number when it is
 * entered. Values remember it, so a value of a closed or abandoned region is recognised even if
 * indices are reused. */
#include "trace.h"

#include <stdio.h>

static _Thread_local pmpy_trace *current; /* owned */

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
  pmpy_stamp(t);
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
  uint32_t id = pmpy_intern(t->g, name);
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
  PMPY_ERR(err);
  if (pm_protect(emit_body, j, &err)) {
    pmpy_raise(&err);
    return 0;
  }
  return j->op;
}

pm_opid pmpy_open(pmpy_trace *t, pm_opcode code, const pm_val *in, uint32_t n_in,
                  uint32_t n_regions, const pm_attr_arg *attrs, uint32_t n_attrs) {
  emit_job j = {&t->b, code, in, n_in, n_regions, NULL, attrs, n_attrs, 0};
  return emit(&j);
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

/* ---- Trace --------------------------------------------------------------------------------- */

int pmpy_push_region(pmpy_trace *t, pm_blk block) {
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
                          "profile_words",
                          "profile_warps",
                          "profile_output",
                          "mesh",
                          NULL};
  const char *name;
  PyObject *grid, *cluster, *mesh = NULL;
  int n_threads, approx_math = 0, no_auto_barriers = 0, exact_division = 0, profile_warps = 0;
  long long reduction_scratch = PM_REDUCTION_SCRATCH, profile_words = 0;
  unsigned profile_output = 0;
  pm_type g = {0}, c = {0}, d = {0};
  if (!PyArg_ParseTupleAndKeywords(args, kw, "sOOi|pppLLpIO:Trace", names, &name, &grid, &cluster,
                                   &n_threads, &approx_math, &no_auto_barriers, &exact_division,
                                   &reduction_scratch, &profile_words, &profile_warps,
                                   &profile_output, &mesh)) {
    return NULL;
  }
  if (pmpy_shape(grid, "grid", &g) || pmpy_shape(cluster, "cluster", &c)) return NULL;
  if (mesh && pmpy_shape(mesh, "mesh", &d)) return NULL;
  if (c.rank > 3) return pmpy_fail(PM_E_VALUE, "cluster: %d axes, at most 3 are supported", c.rank);
  if (n_threads < 1)
    return pmpy_fail(PM_E_VALUE, "num_threads: %d, it must be at least 1", n_threads);
  pmpy_trace *t = (pmpy_trace *)type->tp_alloc(type, 0);
  if (!t) return NULL;
  t->graph = pmpy_graph_new();
  if (!t->graph) goto fail;
  PMPY_ERR(err);
  if (pm_protect(begin_body, &(begin_job){t->graph, name}, &err)) {
    pmpy_raise(&err);
    goto fail;
  }
  t->g = t->graph->g;
  memcpy(t->g->grid, g.dim, sizeof t->g->grid);
  memcpy(t->g->cluster, c.dim, sizeof t->g->cluster);
  memcpy(t->g->mesh, d.dim, sizeof t->g->mesh);
  t->g->n_grid = g.rank;
  t->g->n_mesh = d.rank;
  t->g->n_cluster = c.rank;
  t->g->n_threads = (uint32_t)n_threads;
  t->g->approx_math = approx_math;
  t->g->no_auto_barriers = no_auto_barriers;
  t->exact_division = exact_division;
  t->g->reduction_scratch = reduction_scratch;
  t->g->profile_words = profile_words;
  t->g->profile_warps = profile_warps;
  t->g->profile_output = profile_output;
  t->b.g = t->g;
  if (pmpy_push_region(t, 1)) goto fail;
  return (PyObject *)t;
fail:
  Py_DECREF(t);
  return NULL;
}

static void drop(pmpy_trace *t) {
  Py_CLEAR(t->graph);
  Py_CLEAR(t->frame);
  t->g = t->b.g = NULL;
  t->depth = 0;
}

static void trace_dealloc(PyObject *self) {
  pmpy_trace *t = (pmpy_trace *)self;
  PyTypeObject *type = Py_TYPE(self);
  drop(t);
  for (uint32_t k = 0; k < PMPY_PLACES; k++) Py_CLEAR(t->place[k].filename);
  for (uint32_t k = 0; k < PMPY_LINES; k++) Py_CLEAR(t->instructions[k].code);
  PyMem_Free(t->region);
  PyMem_Free(t->calls);
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
  int scratch;
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
  g->n_scratch += j->scratch;
  return PM_OK;
}

static PyObject *add_arg(PyObject *self, PyObject *args, PyObject *kw, bool output) {
  static char *operand_names[] = {"shape", "dtype", "name", NULL};
  static char *output_names[] = {"shape", "dtype", "name", "alias", "scratch", NULL};
  pmpy_trace *t = (pmpy_trace *)self;
  PyObject *shape, *dtype;
  arg_job j = {.t = t, .type = {.kind = PM_REF, .space = PM_GMEM}, .output = output, .alias = -1};
  pm_dtype d;
  if (!PyArg_ParseTupleAndKeywords(args, kw, output ? "OO|zip:output" : "OO|z:operand",
                                   output ? output_names : operand_names, &shape, &dtype, &j.name,
                                   &j.alias, &j.scratch) ||
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
  PMPY_ERR(err);
  if (pm_protect(arg_body, &j, &err)) return pmpy_raise(&err);
  return pmpy_traced_new(t, j.val, false);
}

static PyObject *trace_operand(PyObject *self, PyObject *args, PyObject *kw) {
  return add_arg(self, args, kw, false);
}

static PyObject *trace_output(PyObject *self, PyObject *args, PyObject *kw) {
  return add_arg(self, args, kw, true);
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

typedef struct size_job {
  pm_graph *g;
  pm_size size;
  const char *name;
  uint32_t argument, extent[PM_MAX_RANK];
  uint32_t number;
} size_job;

static pm_code size_body(void *ctx, pm_err *err) {
  size_job *j = ctx;
  j->size.name = pm_intern(j->g, j->name);
  j->number = pm_add_size(j->g, &j->size, err);
  return j->number ? PM_OK : err->code;
}

/* size(how, a, b, least, most, multiple, name) -> its number */
static PyObject *trace_size(PyObject *self, PyObject *args) {
  pmpy_trace *t = (pmpy_trace *)self;
  size_job j = {.g = t->g};
  long long a, b, least, most, multiple;
  const char *how;
  PMPY_ERR(err);
  if (!PyArg_ParseTuple(args, "sLLLLLs:size", &how, &a, &b, &least, &most, &multiple, &j.name))
    return NULL;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  while (j.size.how < PM_SIZE_COUNT && strcmp(pm_enum_text(PM_ENUM_SIZE, j.size.how), how))
    j.size.how++;
  j.size.a = a, j.size.b = b;
  j.size.least = least, j.size.most = most, j.size.multiple = multiple;
  if (pm_protect(size_body, &j, &err)) return pmpy_raise(&err);
  return PyLong_FromUnsignedLong(j.number);
}

static pm_code extents_body(void *ctx, pm_err *err) {
  size_job *j = ctx;
  return pm_set_extents(j->g, j->argument, j->extent, err);
}

static int read_numbers(PyObject *o, uint32_t *out) {
  int64_t n[PM_MAX_RANK];
  const int count = pmpy_ints(o, "extents", n, PM_MAX_RANK);
  for (int k = 0; k < count; k++) out[k] = (uint32_t)n[k];
  return count;
}

/* extents(argument, numbers): which of its extents are sizes, 0: none */
static PyObject *trace_extents(PyObject *self, PyObject *args) {
  pmpy_trace *t = (pmpy_trace *)self;
  size_job j = {.g = t->g};
  PyObject *numbers;
  PMPY_ERR(err);
  if (!PyArg_ParseTuple(args, "IO:extents", &j.argument, &numbers)) return NULL;
  if (!t->graph || j.argument >= t->g->blocks.at[1].n_args)
    return pmpy_fail(PM_E_RUNTIME, "extents: there is no such argument");
  if (read_numbers(numbers, j.extent) < 0) return NULL;
  if (pm_protect(extents_body, &j, &err)) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

/* grid_sizes(numbers): which axes of the grid are sizes */
static PyObject *trace_grid_sizes(PyObject *self, PyObject *numbers) {
  pmpy_trace *t = (pmpy_trace *)self;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  if (read_numbers(numbers, t->g->grid_sizes) < 0) return NULL;
  Py_RETURN_NONE;
}

/* put_place(file or None, line) */
static PyObject *trace_put_place(PyObject *self, PyObject *args) {
  pmpy_trace *t = (pmpy_trace *)self;
  PyObject *file;
  unsigned line;
  if (!PyArg_ParseTuple(args, "OI:put_place", &file, &line)) return NULL;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  pmpy_put_place(t, file == Py_None ? NULL : file, line);
  Py_RETURN_NONE;
}

static PyObject *trace_finish(PyObject *self, PyObject *none) {
  pmpy_trace *t = (pmpy_trace *)self;
  (void)none;
  if (!t->graph) return pmpy_fail(PM_E_RUNTIME, "this trace has ended");
  if (t->depth != 1) return pmpy_fail(PM_E_RUNTIME, "a loop, branch or scope is still open");
  pmpy_name_results(t);
  PMPY_ERR(err);
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
     "output(shape, dtype, name=None, alias=-1, scratch=False) -> Ref"},
    {"size", trace_size, METH_VARARGS,
     "size(how, a, b, least, most, multiple, name) -> number of a size of the call"},
    {"extents", trace_extents, METH_VARARGS, "extents(argument, numbers of sizes)"},
    {"grid_sizes", trace_grid_sizes, METH_O, "grid_sizes(numbers of sizes)"},
    {"put_place", trace_put_place, METH_VARARGS,
     "put_place(file, line): where what is added from here on is; None, 0: the user's line"},
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

static PyObject *current_trace(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  if (!current || !current->graph) Py_RETURN_NONE;
  return Py_NewRef((PyObject *)current);
}

static PyMethodDef functions[] = {
    {"current_trace", current_trace, METH_NOARGS, "The thread's current Trace, or None."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_trace(PyObject *module) {
  pmpy.trace_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &trace_spec, NULL);
  if (!pmpy.trace_type || PyModule_AddType(module, pmpy.trace_type)) return -1;
  return PyModule_AddFunctions(module, functions);
}
