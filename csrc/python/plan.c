/* Plans: lowering, compilation, loading, and the Lowered object that shows them.
 *
 * Lowering happens when a plan is created. Program text, cubin, loaded kernels and interpreter are
 * each created once, when first needed, under the plan's lock and without the GIL. */
#include "plan.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../base/env.h"

/* ---- steps: core calls, in pm_protect, under the lock ------------------------------------ */

typedef struct step {
  pmpy_plan *p;
  int device;
  pm_text *text; /* for printing */
  pm_cubin *cubin;
  void *const *buffers;
  const int64_t *sizes; /* of the call, where the graph has some */
  const pm_interp_options *options;
  const pm_target *target; /* to lower for, NULL: any */
  bool strict;
} step;

static pm_code lower(void *ctx, pm_err *err) {
  step *s = ctx;
  pm_graph *g = s->p->graph->g;
  const pm_target *t = s->target;
  pm_err lacks = {0};
  if (!t || (!s->strict && pm_check_target(g, t, &lacks))) t = pm_choose_target(g);
  return pm_lower(g, t, err);
}

static void describe_op(pm_graph *g, pm_opid op, void *ctx) {
  if (pm_get(g, op)->code == PM_OP_PRINT_LAYOUT) pm_putf(ctx, "%s\n", pm_print_layout_text(g, op));
}

static pm_code describe(void *ctx, pm_err *err) {
  step *s = ctx;
  (void)err;
  pm_walk(s->p->graph->g, 1, describe_op, s->text);
  return PM_OK;
}

static pm_code print(void *ctx, pm_err *err) {
  step *s = ctx;
  (void)err;
  pm_print(s->p->graph->g, s->text);
  return PM_OK;
}

static pm_code generate(void *ctx, pm_err *err) {
  pmpy_plan *p = ((step *)ctx)->p;
  const bool checks = pm_env_is_on(PM_ENV_SANITIZE);
  pm_cuda_options options = {.line_directives = true,
                             .check_indices = checks,
                             .check_waits = checks,
                             .stand_in = pm_stand_in_is_on(p->graph->g)};
  if (p->has_program) return PM_OK;
  pm_code code = pm_generate_cuda(p->graph->g, &options, &p->program, err);
  p->has_program = !code;
  return code;
}

static pm_code compile(void *ctx, pm_err *err) {
  pmpy_plan *p = ((step *)ctx)->p;
  if (p->has_cubin) return PM_OK;
  if (generate(ctx, err)) return err->code;
  pm_compile_options options = {.use_disk_cache = !pm_env_is_on(PM_ENV_NO_CACHE),
                                .lineinfo = pm_env_is_on(PM_ENV_LINEINFO),
                                .dump_dir = p->dump_name[0] ? pm_env(PM_ENV_DUMP) : NULL,
                                .dump_name = p->dump_name};
  pm_code code = pm_compile(&p->program, &options, &p->cubin, err);
  p->has_cubin = !code;
  return code;
}

/* Machine code is of GPUs of one major version; on later ones the driver compiles the PTX. */
static pm_code load_for(step *s, pm_kernel **out, pm_err *err) {
  pm_cubin code = s->p->cubin;
  pm_device_info device;
  char *ptx = NULL;
  if (pm_device_get(s->device, &device, err)) return err->code;
  if (device.capability / 10 != s->p->program.machine->capability / 10) {
    if (pm_compile_ptx(&s->p->program, pm_env_is_on(PM_ENV_LINEINFO), &ptx, &code.size, err))
      return err->code;
    code.image = ptx;
  }
  const pm_code result = pm_kernel_load(s->device, &code, &s->p->program, out, err);
  pm_free(ptx);
  return result;
}

static pm_code load(void *ctx, pm_err *err) {
  step *s = ctx;
  const pm_target *t, *compiled = s->p->graph->g->target;
  if (s->device < 0 || s->device >= PMPY_MAX_DEVICES)
    return pm_fail(err, PM_E_NOT_IMPLEMENTED, "device %d: at most %d GPUs are supported", s->device,
                   PMPY_MAX_DEVICES);
  if (s->p->kernels[s->device]) return PM_OK;
  if (pm_device_target(s->device, &t, err)) return err->code;
  if (t != compiled)
    return pm_fail(err, PM_E_INTERNAL, "CUDA device %d is %s, and the kernel was lowered for %s",
                   s->device, t->text, compiled->text);
  if (compile(ctx, err)) return err->code;
  pm_kernel *k;
  if (load_for(s, &k, err)) return err->code;
  __atomic_store_n(&s->p->kernels[s->device], k, __ATOMIC_RELEASE);
  return PM_OK;
}

typedef struct bind_job {
  pm_graph *g;
  const int64_t *sizes;
  pm_arena *temp;
  pm_binding *was;
} bind_job;

static pm_code bind(void *ctx, pm_err *err) {
  const bind_job *j = ctx;
  (void)err;
  pm_bind_sizes(j->g, j->sizes, j->temp, j->was);
  return PM_OK;
}

/* For the sizes of the call. */
static pm_code make_machine(const step *s, pm_err *err) {
  pmpy_plan *p = s->p;
  pm_graph *g = p->graph->g;
  pm_binding was;
  pm_arena temp;
  if (!g->sizes.n) return pm_interp_compile(g, &p->machine, err);
  pm_arena_init(&temp);
  bind_job job = {g, s->sizes, &temp, &was};
  pm_code code = pm_protect(bind, &job, err);
  if (!code) {
    code = pm_interp_compile(g, &p->machine, err);
    pm_unbind_sizes(g, &was);
    memcpy(p->machine_sizes, s->sizes, g->sizes.n * sizeof *s->sizes);
  }
  pm_arena_free(&temp);
  return code;
}

static pm_code interpret(void *ctx, pm_err *err) {
  step *s = ctx;
  pmpy_plan *p = s->p;
  const uint32_t n = pm_n_sizes(p->graph->g);
  if (p->machine && n && memcmp(p->machine_sizes + 1, s->sizes + 1, n * sizeof *s->sizes)) {
    pm_interp_free(p->machine);
    p->machine = NULL;
  }
  if (!p->machine && make_machine(s, err)) return err->code;
  return pm_interp_run(p->machine, s->buffers, s->options, err);
}

/* The arena has the graph and the text of the program. */
static void account(pmpy_plan *p) {
  size_t bytes = sizeof *p + p->graph->arena.total + p->signature.n * sizeof *p->signature.word;
  if (p->has_cubin) bytes += p->cubin.size + strlen(p->cubin.log);
  if (p->machine) bytes += pm_interp_bytes(p->machine);
  for (int i = 0; i < PMPY_MAX_DEVICES; i++)
    if (p->kernels[i]) bytes += pm_kernel_bytes(p->kernels[i]);
  atomic_store_explicit(&p->bytes, bytes, memory_order_relaxed);
}

/* Without the GIL. */
static pm_code run_locked(pm_body body, step *s, pm_err *err) {
  if (pthread_mutex_lock(&s->p->lock) == EDEADLK)
    return pm_fail(err, PM_E_RUNTIME, "kernel %s was called by something that it called itself",
                   s->p->graph->g->name);
  const bool known = body == interpret && s->p->machine;
  pm_code code = pm_protect(body, s, err);
  if (!known) account(s->p);
  pthread_mutex_unlock(&s->p->lock);
  return code;
}

/* With the GIL; 0 or -1 with an exception. */
static int run(pm_body body, step *s) {
  pm_err err = {0};
  pm_code code;
  Py_BEGIN_ALLOW_THREADS code = run_locked(body, s, &err);
  Py_END_ALLOW_THREADS if (code) pmpy_raise(&err);
  return code ? -1 : 0;
}

void pmpy_format_number(void *ctx, const char *spec, pm_dtype d, pm_scalar v, char *buf, size_t n) {
  (void)ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *number = pm_is_float(d) ? PyFloat_FromDouble(v.f)
                     : d == PM_BOOL ? PyBool_FromLong(v.i != 0)
                                    : PyLong_FromLongLong(v.i);
  PyObject *by = PyUnicode_FromString(spec);
  PyObject *text = number && by ? PyObject_Format(number, by) : NULL;
  const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
  snprintf(buf, n, "%s", s ? s : "?");
  if (!s) PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(by);
  Py_XDECREF(number);
  PyGILState_Release(gil);
}

pm_code pmpy_plan_interpret(pmpy_plan *p, void *const *buffers, const int64_t *sizes,
                            const pm_interp_options *o, pm_err *err) {
  step s = {.p = p, .buffers = buffers, .sizes = sizes, .options = o};
  return run_locked(interpret, &s, err);
}

/* After a compilation: say once if the disk cache is of no use. */
static int warn_cache(void) {
  char text[8192];
  return pm_cache_complaint(text, sizeof text) ? PyErr_WarnEx(PyExc_UserWarning, text, 1) : 0;
}

pm_kernel *pmpy_plan_load(pmpy_plan *p, int device) {
  step s = {.p = p, .device = device};
  pmpy_find_nvrtc();
  return run(load, &s) < 0 || warn_cache() < 0 ? NULL : p->kernels[device];
}

static int need_program(pmpy_plan *p) {
  step s = {.p = p};
  return run(generate, &s);
}

static int need_cubin(pmpy_plan *p) {
  step s = {.p = p};
  pmpy_find_nvrtc();
  return run(compile, &s) < 0 ? -1 : warn_cache();
}

/* New. What a step prints. */
static PyObject *text_by(pm_body body, pmpy_plan *p) {
  pm_arena arena;
  pm_text text;
  step s = {.p = p, .text = &text};
  PyObject *result = NULL;
  pm_arena_init(&arena);
  pm_text_init(&text, &arena);
  if (!run(body, &s))
    result = PyUnicode_DecodeUTF8(text.n ? text.at : "", (Py_ssize_t)text.n, "replace");
  pm_arena_free(&arena);
  return result;
}

/* New. The graph as it is now. */
static PyObject *graph_text(pmpy_plan *p) { return text_by(print, p); }

/* ---- making ------------------------------------------------------------------------------- */

/* Borrowed. What Python has shown of a file: each warning once, unless the user's filters say
 * otherwise. */
static PyObject *shown_of(PyObject *file) {
  static PyObject *_Atomic files;
  PyObject *all = files, *made = PyDict_New();
  if (!all && made && atomic_compare_exchange_strong(&files, &all, made)) {
    all = made;
    made = PyDict_New();
  }
  PyObject *shown = made ? PyDict_SetDefault(all, file, made) : NULL;
  Py_XDECREF(made);
  return shown;
}

/* Warnings of the passes are "file:line: text", and shown at that place; others where the user's
 * code called. */
static int warn(const char *text) {
  const char *line = strstr(text, ": "), *file = NULL;
  const char *colon = line;
  while (colon && colon > text && colon[-1] >= '0' && colon[-1] <= '9') colon--;
  const bool placed = line && colon != line && colon != text && colon[-1] == ':';
  uint32_t number;
  if (!placed) pmpy_user_place(&file, &number);
  if (!placed && !file) return PyErr_WarnEx(PyExc_UserWarning, text, 1);
  PyObject *where = placed ? PyUnicode_DecodeUTF8(text, colon - 1 - text, "replace")
                           : PyUnicode_DecodeUTF8(file, (Py_ssize_t)strlen(file), "replace");
  if (placed) {
    number = (uint32_t)atoi(colon);
    text = line + 2;
  }
  PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  PyObject *shown = where && message ? shown_of(where) : NULL;
  int code = -1;
  if (shown)
    code = PyErr_WarnExplicitObject(PyExc_UserWarning, message, where, (int)number, NULL, shown);
  Py_XDECREF(message);
  Py_XDECREF(where);
  return code;
}

static void choose_dump_name(pmpy_plan *p) {
  static atomic_uint count;
  if (!*pm_env(PM_ENV_DUMP)) return;
  snprintf(p->dump_name, sizeof p->dump_name, "%.120s_%u", p->graph->g->name,
           atomic_fetch_add(&count, 1));
  for (char *s = p->dump_name; *s; s++) /* it becomes the name of files */
    if (*s == '/' || (unsigned char)*s <= ' ') *s = '_';
  if (*p->dump_name == '.') *p->dump_name = '_';
}

static int dump(pmpy_plan *p, PyObject *text, const char *extension) {
  Py_ssize_t n;
  const char *s = PyUnicode_AsUTF8AndSize(text, &n);
  if (s) pm_dump(pm_env(PM_ENV_DUMP), p->dump_name, extension, s, (size_t)n);
  return s ? 0 : -1;
}

/* Operands and outputs, from the arguments of block 1. */
static int read_outputs(pmpy_plan *p, uint32_t n_in, uint32_t n_scratch) {
  const pm_graph *g = p->graph->g;
  const pm_block *body = &g->blocks.at[1];
  const uint32_t n_all = g->n_outputs;
  p->n_in = g->n_operands;
  p->n_scratch = pm_min(n_scratch, n_all);
  p->n_out = n_all - p->n_scratch;
  p->alias = g->alias;
  if (p->n_in != n_in || p->n_in + n_all != body->n_args) {
    PyErr_Format(PyExc_TypeError, "kernel %s: the graph has %u operands, and %u were given",
                 g->name, p->n_in, n_in);
    return -1;
  }
  if (p->n_in + n_all > PMPY_MAX_PARAMS) {
    PyErr_Format(PyExc_NotImplementedError,
                 "kernel %s has %u operands, outputs and GMEM scratch refs; at most %d are "
                 "supported",
                 g->name, p->n_in + n_all, PMPY_MAX_PARAMS);
    return -1;
  }
  p->out = PyMem_Calloc(n_all ? n_all : 1, sizeof *p->out);
  if (!p->out) {
    PyErr_NoMemory();
    return -1;
  }
  for (uint32_t i = 0; i < n_all; i++) {
    const pm_type *t = pm_typeof(g, body->arg + p->n_in + i);
    p->out[i].dtype = t->dtype;
    p->out[i].rank = t->rank;
    memcpy(p->out[i].shape, t->dim, sizeof t->dim);
  }
  return 0;
}

/* What print_layout asked for, to Python's stdout. */
static int print_layouts(pmpy_plan *p) {
  pm_text text;
  step s = {.p = p, .text = &text};
  pm_text_init(&text, p->graph->g->arena);
  if (run(describe, &s) < 0) return -1;
  PyObject *out = PySys_GetObject("stdout"); /* borrowed */
  if (!text.n || !out || out == Py_None) return 0;
  return PyFile_WriteString(text.at, out);
}

static int lower_and_warn(pmpy_plan *p, const pm_target *t, bool strict, bool keep_text) {
  step s = {.p = p, .target = t, .strict = strict};
  pm_err err = {0};
  if (pm_env_check(&err)) return pmpy_raise(&err), -1;
  choose_dump_name(p);
  if (keep_text || p->dump_name[0]) {
    p->traced = graph_text(p);
    if (!p->traced || (p->dump_name[0] && dump(p, p->traced, "traced") < 0)) return -1;
  }
  if (run(lower, &s) < 0 || print_layouts(p) < 0) return -1;
  if (p->dump_name[0]) {
    PyObject *text = graph_text(p);
    int code = text ? dump(p, text, "graph") : -1;
    Py_XDECREF(text);
    if (code < 0) return -1;
  }
  for (uint32_t i = 0; i < p->graph->g->warnings.n; i++)
    if (warn(p->graph->g->warnings.at[i]) < 0) return -1;
  return 0;
}

static PyTypeObject *plan_type;

typedef struct strides_job {
  pm_graph *g;
  const pmpy_buffer *in;
} strides_job;

static pm_code give_strides(void *ctx, pm_err *err) {
  const strides_job *j = ctx;
  pm_graph *g = j->g;
  (void)err;
  for (uint32_t i = 0; i < g->n_operands; i++) {
    if (!j->in[i].strided) continue;
    if (!g->strides) g->strides = pm_alloc(g->arena, g->n_operands * sizeof *g->strides);
    int64_t *s = pm_alloc(g->arena, sizeof j->in[i].stride);
    memcpy(s, j->in[i].stride, sizeof j->in[i].stride);
    g->strides[i] = s;
  }
  return PM_OK;
}

static int add_strides(pmpy_plan *p, const pmpy_buffer *in) {
  pm_err err = {0};
  strides_job job = {p->graph->g, in};
  for (uint32_t i = 0; i < p->n_out; i++) {
    if (!p->alias || p->alias[i] < 0 || !in[p->alias[i]].strided) continue;
    PyErr_Format(PyExc_ValueError,
                 "kernel %s: argument %d begins output %u, and is not contiguous in row-major "
                 "order: pass a contiguous copy",
                 p->graph->g->name, p->alias[i], i);
    return -1;
  }
  if (!pm_protect(give_strides, &job, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

/* New, without outputs. */
static pmpy_plan *allocate(PyObject *graph) {
  pmpy_plan *p = (pmpy_plan *)plan_type->tp_alloc(plan_type, 0);
  if (!p) return NULL;
  p->graph = (pmpy_graph *)Py_NewRef(graph);
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_settype(&a, PTHREAD_MUTEX_ERRORCHECK);
  p->has_lock = !pthread_mutex_init(&p->lock, &a);
  pthread_mutexattr_destroy(&a);
  return p;
}

/* A kernel that was compiled before, for arguments that fit: their strides are part of it. */
static pmpy_plan *take_compiled(pmpy_plan *p, const pmpy_buffer *in, uint32_t n_in,
                                const pm_target *target) {
  const pm_graph *g = p->graph->g;
  if (target && target != g->target) {
    PyErr_Format(pmpy.exceptions[PM_E_NOT_IMPLEMENTED],
                 "kernel %s was compiled for %s, and this call is for %s: compile it for that "
                 "target too",
                 g->name, g->target->text, target->text);
    return NULL;
  }
  for (uint32_t i = 0; i < n_in && i < g->n_operands; i++) {
    const int64_t *s = g->strides ? g->strides[i] : NULL;
    if (in[i].strided == (s != NULL) && (!s || !memcmp(s, in[i].stride, in[i].rank * sizeof *s)))
      continue;
    PyErr_Format(PyExc_ValueError,
                 "kernel %s: argument %u has other strides than the array that the kernel was "
                 "compiled for%s",
                 g->name, i, s ? "" : ", which is contiguous: pass a contiguous copy");
    return NULL;
  }
  return (pmpy_plan *)Py_NewRef((PyObject *)p);
}

pmpy_plan *pmpy_plan_new(PyObject *traced, const pmpy_buffer *in, uint32_t n_in,
                         const pm_target *target, bool strict, bool keep_text) {
  PyObject *graph = traced;
  uint32_t n_scratch = 0;
  if (Py_TYPE(traced) == plan_type) return take_compiled((pmpy_plan *)traced, in, n_in, target);
  if (PyTuple_Check(traced) && PyTuple_GET_SIZE(traced) > 0) graph = PyTuple_GET_ITEM(traced, 0);
  if (PyTuple_Check(traced) && PyTuple_GET_SIZE(traced) > 2)
    n_scratch = (uint32_t)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(traced, 2));
  if (PyErr_Occurred()) return NULL;
  if (Py_TYPE(graph) != pmpy.graph_type || !((pmpy_graph *)graph)->g) {
    PyErr_Format(PyExc_TypeError, "a trace callback returns a finished Graph; got a %s",
                 Py_TYPE(graph)->tp_name);
    return NULL;
  }
  pmpy_plan *p = allocate(graph);
  if (!p) return NULL;
  if (read_outputs(p, n_in, n_scratch) < 0 || add_strides(p, in) < 0 ||
      lower_and_warn(p, target, strict, keep_text) < 0)
    Py_CLEAR(p);
  return p;
}

static pm_code generate_plain(void *ctx, pm_err *err) {
  pmpy_plan *p = ((step *)ctx)->p;
  const pm_cuda_options options = {.line_directives = true};
  if (p->graph->g->stage != PM_SYNCED)
    return pm_fail(err, PM_E_VALUE, "the graph of kernel %s is not lowered", p->graph->g->name);
  const pm_code code = pm_generate_cuda(p->graph->g, &options, &p->program, err);
  p->has_program = !code;
  return code;
}

/* New: a kernel whose machine code exists, so that no compiler is asked. */
static PyObject *compiled(PyObject *module, PyObject *args) {
  PyObject *graph, *image;
  unsigned n_scratch;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!I:compiled", pmpy.graph_type, &graph, &PyBytes_Type, &image,
                        &n_scratch))
    return NULL;
  const pm_graph *g = ((pmpy_graph *)graph)->g;
  pmpy_plan *p = g ? allocate(graph) : NULL;
  if (!p) return g ? NULL : PyErr_Format(PyExc_TypeError, "compiled: the graph is not finished");
  step s = {.p = p};
  if (read_outputs(p, g->n_operands, n_scratch) < 0 || run(generate_plain, &s) < 0) goto failed;
  p->cubin = (pm_cubin){.size = (size_t)PyBytes_GET_SIZE(image),
                        .registers = -1,
                        .spill_bytes = -1,
                        .stack_bytes = -1,
                        .from_disk = true};
  p->cubin.image = pm_malloc(p->cubin.size + 1);
  p->cubin.log = pm_malloc(1);
  p->has_cubin = true;
  if (!p->cubin.image || !p->cubin.log) {
    PyErr_NoMemory();
    goto failed;
  }
  memcpy(p->cubin.image, PyBytes_AS_STRING(image), p->cubin.size);
  *p->cubin.log = 0;
  return (PyObject *)p;
failed:
  Py_DECREF(p);
  return NULL;
}

static void dealloc(PyObject *self) {
  pmpy_plan *p = (pmpy_plan *)self;
  PyTypeObject *type = Py_TYPE(self);
  for (int i = 0; i < PMPY_MAX_DEVICES; i++) pm_kernel_free(p->kernels[i]);
  if (p->has_cubin) pm_cubin_free(&p->cubin);
  if (p->machine) pm_interp_free(p->machine);
  if (p->has_lock) pthread_mutex_destroy(&p->lock);
  PyMem_Free(p->out);
  pmpy_signature_free(&p->signature);
  Py_XDECREF(p->emulation);
  Py_XDECREF(p->traced);
  Py_XDECREF(p->graph);
  type->tp_free(self);
  Py_DECREF(type);
}

/* ---- Lowered: texts ------------------------------------------------------------------------ */

/* In bin/ beside the lib/ that NVRTC is in, as the wheels and toolkits have it. */
static bool find_beside_nvrtc(char *path, size_t size) {
  PMPY_ERR(ignored);
  const char *nvrtc, *slash;
  int major, minor;
  if (pm_nvrtc_version(&major, &minor, &nvrtc, &ignored)) return false;
  slash = strrchr(nvrtc, '/');
  if (!slash) return false;
  snprintf(path, size, "%.*s/../bin/nvdisasm", (int)(slash - nvrtc), nvrtc);
  return !access(path, X_OK);
}

/* The path of nvdisasm: on PATH, in a toolkit, or beside NVRTC. */
static bool find_nvdisasm(char *path, size_t size) {
  const char *list = getenv("PATH");
  while (list && *list) {
    size_t n = strcspn(list, ":");
    snprintf(path, size, "%.*s/nvdisasm", (int)n, list);
    if (n && !access(path, X_OK)) return true;
    list += n + (list[n] == ':');
  }
  const char *const homes[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"};
  for (size_t i = 0; i < PM_COUNT(homes); i++) {
    if (!homes[i] || !*homes[i]) continue;
    snprintf(path, size, "%s/bin/nvdisasm", homes[i]);
    if (!access(path, X_OK)) return true;
  }
  return find_beside_nvrtc(path, size);
}

/* Everything that a command prints; NULL: it failed. PyMem_RawFree it. */
static char *output_of(const char *command, size_t *n) {
  FILE *f = popen(command, "r");
  char *at = NULL;
  size_t cap = 0;
  *n = 0;
  if (!f) return NULL;
  for (;;) {
    if (cap - *n < 1 << 16) {
      char *more = PyMem_RawRealloc(at, cap += 1 << 20);
      if (!more) break;
      at = more;
    }
    size_t got = fread(at + *n, 1, cap - *n, f);
    if (!got) break;
    *n += got;
  }
  if (pclose(f) == 0 && *n) return at;
  PyMem_RawFree(at);
  return NULL;
}

/* New: what nvdisasm says with these options. */
static PyObject *disassemble(const pm_cubin *c, const char *options) {
  char tool[PATH_MAX], command[PATH_MAX + 128], file[] = "/tmp/pallas_mgpu_XXXXXX";
  if (!find_nvdisasm(tool, sizeof tool) || strchr(tool, '\'')) {
    PyErr_SetString(pmpy.exceptions[PM_E_RUNTIME],
                    "as_text('sass') and spills() need nvdisasm, which was found neither on PATH, "
                    "nor in CUDA_HOME/bin, nor beside NVRTC: pip install nvidia-cuda-nvdisasm, or "
                    "disassemble .cubin()");
    return NULL;
  }
  int fd = mkstemp(file);
  bool ok = fd >= 0 && write(fd, c->image, c->size) == (ssize_t)c->size;
  if (fd >= 0) close(fd);
  snprintf(command, sizeof command, "'%s' %s '%s' 2>&1", tool, options, file);
  char *text = NULL;
  size_t n = 0;
  Py_BEGIN_ALLOW_THREADS if (ok) text = output_of(command, &n);
  Py_END_ALLOW_THREADS if (fd >= 0) unlink(file);
  if (!text) return PyErr_Format(pmpy.exceptions[PM_E_RUNTIME], "%s failed", tool);
  PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)n, "replace");
  PyMem_RawFree(text);
  return result;
}

static PyObject *sass(pmpy_plan *p) {
  return need_cubin(p) < 0 ? NULL : disassemble(&p->cubin, "-ndf -c");
}

/* The program with every line of the entry's at the place that the last #line gave, not after it:
 * one line of Python is many of CUDA. */
static void pin_lines(const char *text, size_t size, pm_text *out) {
  unsigned long place = 0;
  for (const char *end = text + size; text < end;) {
    const char *eol = memchr(text, '\n', (size_t)(end - text));
    const size_t n = eol ? (size_t)(eol - text) + 1 : (size_t)(end - text);
    if (n > 6 && !strncmp(text, "#line ", 6)) place = strtoul(text + 6, NULL, 10);
    else if (place) pm_putf(out, "#line %lu\n", place);
    pm_putn(out, text, n);
    text += n;
  }
}

static pm_code compile_pinned(void *ctx, pm_err *err) {
  step *s = ctx;
  pm_program program = s->p->program;
  const pm_compile_options options = {.use_disk_cache = !pm_env_is_on(PM_ENV_NO_CACHE),
                                      .lineinfo = true};
  pin_lines(program.text, program.size, s->text);
  program.text = s->text->at;
  program.size = s->text->n;
  return pm_compile(&program, &options, s->cubin, err);
}

/* Compiled once more, with lines. */
static PyObject *sass_with_lines(pmpy_plan *p) {
  pm_cubin cubin = {0};
  pm_arena arena;
  pm_text program;
  if (need_program(p) < 0) return NULL;
  pmpy_find_nvrtc();
  pm_arena_init(&arena);
  pm_text_init(&program, &arena);
  step s = {.p = p, .text = &program, .cubin = &cubin};
  PyObject *text = run(compile_pinned, &s) < 0 ? NULL : disassemble(&cubin, "-ndf -c -gi");
  pm_arena_free(&arena);
  pm_cubin_free(&cubin);
  return text;
}

static PyObject *spills(PyObject *self, PyObject *unused) {
  pmpy_plan *p = (pmpy_plan *)self;
  (void)unused;
  if (need_cubin(p) < 0) return NULL;
  if (!p->cubin.spill_bytes) return PyList_New(0);
  PyObject *text = sass_with_lines(p);
  PyObject *hook = text ? pmpy_hook(PMPY_HOOK_SPILLS) : NULL;
  PyObject *result = hook ? PyObject_CallOneArg(hook, text) : NULL;
  Py_XDECREF(text);
  return result;
}

static PyObject *cuda_with_lines(pmpy_plan *p) {
  if (need_program(p) < 0) return NULL;
  return PyUnicode_DecodeUTF8(p->program.text, (Py_ssize_t)p->program.size, "replace");
}

static pm_code print_cuda(void *ctx, pm_err *err) {
  step *s = ctx;
  const pm_program *p = &s->p->program;
  char *plain = PM_NEW(s->text->arena, char, p->size + 1);
  (void)err;
  plain[pm_without_lines(p->text, p->size, plain)] = 0;
  pm_put_program(s->text, plain);
  return PM_OK;
}

static PyObject *cuda(pmpy_plan *p) {
  if (need_program(p) < 0) return NULL;
  pm_arena arena;
  pm_text text;
  pm_arena_init(&arena);
  pm_text_init(&text, &arena);
  step s = {.p = p, .text = &text};
  PyObject *result =
      run(print_cuda, &s) < 0 ? NULL : PyUnicode_DecodeUTF8(text.at, (Py_ssize_t)text.n, "replace");
  pm_arena_free(&arena);
  return result;
}

static PyObject *ptx(pmpy_plan *p) {
  char *text = NULL;
  size_t n = 0;
  pm_err err = {0};
  pm_code code;
  if (need_program(p) < 0) return NULL;
  pmpy_find_nvrtc();
  Py_BEGIN_ALLOW_THREADS code =
      pm_compile_ptx(&p->program, pm_env_is_on(PM_ENV_LINEINFO), &text, &n, &err);
  Py_END_ALLOW_THREADS if (code) return pmpy_raise(&err);
  PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
  pm_free(text);
  return result;
}

static PyObject *traced(pmpy_plan *p) { return Py_NewRef(p->traced ? p->traced : Py_None); }

static PyObject *as_text(PyObject *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"", "lines", NULL};
  static const struct {
    const char *kind;
    PyObject *(*text)(pmpy_plan *);
  } kinds[] = {
      {"graph", graph_text}, {"traced", traced}, {"cuda", cuda}, {"ptx", ptx}, {"sass", sass}};
  const char *kind = "graph";
  int lines = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|s$p:as_text", names, &kind, &lines)) return NULL;
  if (lines && !strcmp(kind, "cuda")) return cuda_with_lines((pmpy_plan *)self);
  if (lines && !strcmp(kind, "sass")) return sass_with_lines((pmpy_plan *)self);
  for (size_t i = 0; i < PM_COUNT(kinds); i++)
    if (!strcmp(kind, kinds[i].kind)) return kinds[i].text((pmpy_plan *)self);
  return PyErr_Format(PyExc_ValueError,
                      "as_text: got %.80s; accepted are graph, traced, cuda, ptx, sass", kind);
}

static PyObject *resources(PyObject *self, PyObject *unused) {
  pmpy_plan *p = (pmpy_plan *)self;
  char remarks[128];
  (void)unused;
  if (need_cubin(p) < 0) return NULL;
  const pm_program *g = &p->program;
  pm_remarks(p->cubin.log, remarks, sizeof remarks);
  return Py_BuildValue(
      "{s:s,s:i,s:i,s:i,s:I,s:I,s:(III),s:(III),s:s,s:s,s:n,s:O}", "entry", g->entry, "registers",
      p->cubin.registers, "spill_bytes", p->cubin.spill_bytes, "stack_bytes", p->cubin.stack_bytes,
      "smem_bytes", g->smem_bytes, "threads", g->block, "grid", g->grid[0], g->grid[1], g->grid[2],
      "cluster", g->cluster[0], g->cluster[1], g->cluster[2], "remarks", remarks, "log",
      p->cubin.log, "cubin_bytes", (Py_ssize_t)p->cubin.size, "from_disk",
      p->cubin.from_disk ? Py_True : Py_False);
}

static PyObject *cubin(PyObject *self, PyObject *unused) {
  pmpy_plan *p = (pmpy_plan *)self;
  (void)unused;
  if (need_cubin(p) < 0) return NULL;
  return PyBytes_FromStringAndSize(p->cubin.image, (Py_ssize_t)p->cubin.size);
}

static PyObject *export(PyObject *self, PyObject *args, PyObject *kw) {
  PyObject *hook = pmpy_hook(PMPY_HOOK_EXPORT), *all = NULL;
  const Py_ssize_t n = PyTuple_GET_SIZE(args);
  if (hook && (all = PyTuple_New(n + 1))) {
    PyTuple_SET_ITEM(all, 0, Py_NewRef(self));
    for (Py_ssize_t i = 0; i < n; i++)
      PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyTuple_GET_ITEM(args, i)));
  }
  PyObject *result = all ? PyObject_Call(hook, all, kw) : NULL;
  Py_XDECREF(all);
  return result;
}

static PyObject *get_graph(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(((pmpy_plan *)self)->graph);
}

static void put_types(pm_text *t, const pm_graph *g, uint32_t first, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const pm_type *type = pm_typeof(g, g->blocks.at[1].arg + first + i);
    pm_putf(t, "%s%s[", i ? ", " : "", pm_dtypes[type->dtype].text);
    for (int d = 0; d < type->rank; d++)
      pm_putf(t, "%s%lld", d ? "," : "", (long long)type->dim[d]);
    pm_putf(t, "]");
  }
}

static void put_axes(pm_text *t, const char *what, const int64_t *sizes, uint32_t n) {
  if (n) pm_putf(t, ", %s ", what);
  for (uint32_t i = 0; i < n; i++) pm_putf(t, "%s%lld", i ? " x " : "", (long long)sizes[i]);
}

static pm_code say(void *ctx, pm_err *err) {
  step *s = ctx;
  const pmpy_plan *p = s->p;
  const pm_graph *g = p->graph->g;
  (void)err;
  pm_putf(s->text, "<pallas_mgpu kernel %s, lowered: (", g->name);
  put_types(s->text, g, 0, p->n_in);
  pm_putf(s->text, ") -> (");
  put_types(s->text, g, p->n_in, p->n_out);
  pm_putf(s->text, ")");
  put_axes(s->text, "grid", g->grid, g->n_grid);
  put_axes(s->text, "cluster", g->cluster, g->n_cluster);
  pm_putf(s->text, ", %u lanes, %lld bytes of SMEM>", 128 * g->n_threads, (long long)g->smem_bytes);
  return PM_OK;
}

static PyObject *repr(PyObject *self) { return text_by(say, (pmpy_plan *)self); }

static PyMethodDef methods[] = {
    {"as_text", (PyCFunction)(void (*)(void))as_text, METH_VARARGS | METH_KEYWORDS,
     "as_text(kind='graph', *, lines=False): 'traced', 'graph' (lowered), 'cuda', 'ptx' or "
     "'sass'.\n"
     "lines: 'cuda' has the #line directives that lead the compiler to the Python source, 'sass' "
     "comments that do.\n"
     "Needs no GPU."},
    {"resources", resources, METH_NOARGS,
     "Registers, spills, stack and shared memory, ptxas remarks and the log, as a dict."},
    {"spills", spills, METH_NOARGS,
     "spills(): [(file, line, bytes)] of the lines whose values the compiler keeps in local memory "
     "because registers run out, the largest first: bytes that a lane stores and loads. Needs "
     "nvdisasm if there are any."},
    {"cubin", cubin, METH_NOARGS, "The compiled program."},
    {"export", (PyCFunction)(void (*)(void)) export, METH_VARARGS | METH_KEYWORDS,
     "export(directory, *, name=None): write the kernel to files, to be called without a compiler: "
     "the cubin, a C launcher with its header, and what plgpu.load_exported() reads. See "
     "docs/calling.md."},
    {"_repr_html_", pmpy_html, METH_NOARGS, "The lowered kernel for a notebook."},
    {NULL, NULL, 0, NULL}};

/* New: [(shape, dtype)] of all outputs, with the global memory that a call needs besides. */
static PyObject *get_outputs(PyObject *self, void *unused) {
  const pmpy_plan *p = (pmpy_plan *)self;
  PyObject *all = PyList_New(0);
  (void)unused;
  for (uint32_t i = 0; all && i < p->n_out + p->n_scratch; i++) {
    PyObject *shape = pmpy_spec_shape(&p->out[i]);
    PyObject *dtype = pmpy_dtype_object((pm_dtype)p->out[i].dtype);
    PyObject *pair = shape && dtype ? PyTuple_Pack(2, shape, dtype) : NULL;
    if (!pair || PyList_Append(all, pair) < 0) Py_CLEAR(all);
    Py_XDECREF(pair);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
  }
  return all;
}

static PyObject *get_n_results(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromUnsignedLong(((pmpy_plan *)self)->n_out);
}

/* New: as NVRTC compiles it, whose lines may be longer than those that are shown. */
static PyObject *get_program(PyObject *self, void *unused) {
  pmpy_plan *p = (pmpy_plan *)self;
  (void)unused;
  if (need_program(p) < 0) return NULL;
  char *text = PyMem_Malloc(p->program.size + 1);
  if (!text) return PyErr_NoMemory();
  const size_t n = pm_without_lines(p->program.text, p->program.size, text);
  PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)n, "replace");
  PyMem_Free(text);
  return result;
}

static PyGetSetDef getset[] = {
    {"graph", get_graph, NULL, "the lowered graph", NULL},
    {"outputs", get_outputs, NULL,
     "[(shape, dtype)] of the outputs, then of the global memory that a "
     "call needs besides",
     NULL},
    {"n_results", get_n_results, NULL, "how many of them a call returns", NULL},
    {"program", get_program, NULL, "the CUDA C++ that is compiled, without #line directives", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc},
    {Py_tp_repr, repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "A kernel lowered for one signature of arguments, as text and figures."},
    {0, NULL}};

static PyType_Spec type_spec = {
    .name = "pallas_mgpu.Lowered",
    .basicsize = sizeof(pmpy_plan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots};

static PyMethodDef functions[] = {
    {"compiled", compiled, METH_VARARGS,
     "compiled(graph, cubin, n_scratch) -> Lowered: a lowered graph whose machine code exists; the "
     "last n_scratch outputs are global memory that a call needs besides."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_plan(PyObject *module) {
  if (PyModule_AddFunctions(module, functions) < 0) return -1;
  plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &type_spec, NULL);
  if (!plan_type) return -1;
  return PyModule_AddObjectRef(module, "Lowered", (PyObject *)plan_type);
}
