/* Kernels as custom calls of XLA: handlers for its foreign function interface (xla_abi.h).
 *
 * The attributes of a call contain all of the kernel: `graph`, the text of the lowered graph;
 * `cubin`, in hexadecimal digits, "" on the CPU; `program`, the digest of its text; `hash`, the
 * digest of the digests of graph and cubin, which is checked in the stage INSTANTIATE; `name`. A
 * kernel is made from them once per process and found again by its hash; so an executable that
 * another process compiled runs the same kernel, or fails by name where it was changed or where
 * this version of the package generates another program. On a GPU the module is loaded in the stage
 * INITIALIZE, so that EXECUTE only launches, on XLA's stream.
 *
 * On the CPU, the interpreter runs on the buffers of XLA. Nothing here takes the GIL or allocates
 * through Python. Known kernels are never removed: readers need no lock. */
#include "xla_abi.h"

#include "../interp/interp.h"
#include "../runtime/runtime.h"
#include "module.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MAX_DEVICES = 64, BUCKETS = 256, HASH = 32, MAX_PARAMS = 256 };

typedef struct call_kernel {
  char hash[HASH + 1];
  struct call_kernel *next;
  pm_arena arena;
  pm_graph *g;
  pm_program program; /* of a kernel for a GPU */
  pm_cubin cubin;
  uint32_t n; /* operands and outputs */
  size_t *bytes;
  pthread_mutex_t lock; /* of what follows */
  pm_machine *machine;
  pm_kernel *_Atomic loaded[MAX_DEVICES];
} call_kernel;

static call_kernel *_Atomic known[BUCKETS];
static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- errors --------------------------------------------------------------------------------- */

static int error_code(pm_code code) {
  switch (code) {
    case PM_E_VALUE:
    case PM_E_TYPE:
    case PM_E_INDEX: return XLA_INVALID_ARGUMENT;
    case PM_E_MEMORY:
    case PM_E_DEVICE_MEMORY: return XLA_RESOURCE_EXHAUSTED;
    case PM_E_DRIVER: return XLA_FAILED_PRECONDITION;
    case PM_E_DEADLOCK:
    case PM_E_RACE: return XLA_ABORTED;
    case PM_E_NOT_IMPLEMENTED: return XLA_UNIMPLEMENTED;
    default: return XLA_INTERNAL;
  }
}

static xla_error *raise(const xla_call *c, const pm_err *err) {
  char text[sizeof err->text + sizeof err->file + 128];
  const char *kind = pm_code_exception(err->code); /* "pallas_mgpu.RaceError:RuntimeError" */
  const char *dot = strchr(kind, '.');
  if (dot) kind = dot + 1;
  size_t n =
      (size_t)snprintf(text, sizeof text, "%.*s: %s", (int)strcspn(kind, ":"), kind, err->text);
  if (err->line && n < sizeof text)
    snprintf(text + n, sizeof text - n, "\n  at %s:%u", err->file, err->line);
  xla_error_create create = {
      .struct_size = sizeof create, .message = text, .code = error_code(err->code)};
  return c->api->error_create(&create);
}

/* Are all fields there that are read below? */
static bool fits(const xla_call *c) {
  return c->struct_size >= sizeof *c && c->api &&
         c->api->struct_size >= offsetof(xla_api, stream_get) + sizeof c->api->stream_get &&
         c->api->version.major == XLA_ABI_MAJOR;
}

static xla_error *refuse_version(const xla_call *c) {
  pm_err err = {0};
  if (!c->api || c->api->struct_size < offsetof(xla_api, error_create) + sizeof(void *)) abort();
  pm_fail(&err, PM_E_RUNTIME,
          "XLA calls with version %d.%d of its foreign function interface, and pallas_mgpu knows "
          "%d.%d; update pallas_mgpu",
          c->api->version.major, c->api->version.minor, XLA_ABI_MAJOR, XLA_ABI_MINOR);
  return raise(c, &err);
}

/* Answer the question who we are; true if that was all. A minor version that is newer than ours
 * only has more than is used here; of another major version XLA says so when it registers us. */
static bool answer_metadata(const xla_call *c) {
  bool answered = false;
  for (xla_extension *e = c->extensions; e; e = e->next) {
    if (e->type != XLA_EXTENSION_METADATA) continue;
    xla_metadata *m = ((xla_metadata_extension *)e)->metadata;
    const bool same = c->api && c->api->version.major == XLA_ABI_MAJOR;
    m->version.major = XLA_ABI_MAJOR;
    m->version.minor = same ? c->api->version.minor : XLA_ABI_MINOR;
    m->traits = XLA_TRAIT_COMMAND_BUFFER;
    answered = true;
  }
  return answered;
}

/* ---- kernels -------------------------------------------------------------------------------- */

static xla_span attribute(const xla_call *c, const char *name) {
  for (int64_t i = 0; i < c->attributes.size; i++) {
    const xla_span *s = c->attributes.names[i];
    if (s->size == strlen(name) && !memcmp(s->at, name, s->size) &&
        c->attributes.types[i] == XLA_STRING)
      return *(const xla_span *)c->attributes.at[i];
  }
  return (xla_span){NULL, 0};
}

static call_kernel *look(xla_span hash) {
  const unsigned bucket = (unsigned char)hash.at[0] * 7u + (unsigned char)hash.at[1];
  for (call_kernel *k = atomic_load_explicit(&known[bucket % BUCKETS], memory_order_acquire); k;
       k = k->next)
    if (!memcmp(k->hash, hash.at, HASH)) return k;
  return NULL;
}

static int hex_digit(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The bytes of hexadecimal digits; freed by pm_cubin_free. */
static pm_code read_cubin(xla_span text, pm_cubin *out, pm_err *err) {
  char *image = pm_malloc(text.size / 2 + 1);
  out->log = pm_malloc(1);
  if (out->log) *out->log = 0;
  out->image = image;
  out->size = text.size / 2;
  if (!image || !out->log) return pm_fail(err, PM_E_MEMORY, "out of memory");
  for (size_t i = 0; i < out->size; i++) {
    const int high = hex_digit(text.at[2 * i]), low = hex_digit(text.at[2 * i + 1]);
    if (high < 0 || low < 0) return pm_fail(err, PM_E_VALUE, "the cubin of a call is damaged");
    image[i] = (char)(high << 4 | low);
  }
  return PM_OK;
}

static void digest(xla_span text, char out[HASH + 1]) {
  uint64_t hash[2];
  pm_digest(text.at ? text.at : "", text.size, hash);
  snprintf(out, HASH + 1, "%016llx%016llx", (unsigned long long)hash[0],
           (unsigned long long)hash[1]);
}

static bool is_digest(xla_span found, xla_span of) {
  char text[HASH + 1];
  digest(of, text);
  return found.size == HASH && !memcmp(found.at, text, HASH);
}

/* What a launch must be follows from the program, whose text is generated here once more. */
static pm_code check_program(xla_span found, const char *name, const pm_program *p, pm_err *err) {
  if (is_digest(found, (xla_span){p->text, p->size})) return PM_OK;
  return pm_fail(err, PM_E_VALUE,
                 "kernel %s was compiled by another version of pallas_mgpu, whose programs differ; "
                 "compile the function that calls it again",
                 name);
}

static pm_code check_hash(const xla_call *c, xla_span hash, pm_err *err) {
  char both[2 * HASH + 1];
  digest(attribute(c, "graph"), both);
  digest(attribute(c, "cubin"), both + HASH);
  if (is_digest(hash, (xla_span){both, 2 * HASH})) return PM_OK;
  const xla_span name = attribute(c, "name");
  return pm_fail(err, PM_E_VALUE,
                 "kernel %.*s: the attributes of a call are damaged, since their hash differs; "
                 "compile the function that calls it again",
                 (int)(name.size < 128 ? name.size : 128), name.at ? name.at : "");
}

typedef struct making {
  call_kernel *k;
  const xla_call *c;
} making;

static pm_code make(void *ctx, pm_err *err) {
  const making *m = ctx;
  call_kernel *k = m->k;
  const xla_span graph = attribute(m->c, "graph"), cubin = attribute(m->c, "cubin");
  if (!graph.at) return pm_fail(err, PM_E_VALUE, "a call of pallas_mgpu has no graph");
  if (pm_parse(&k->arena, graph.at, graph.size, &k->g, err)) return err->code;
  if (pm_verify(k->g, err)) return err->code;
  const pm_graph *g = k->g;
  k->n = g->n_operands + g->n_outputs;
  if (k->n > MAX_PARAMS)
    return pm_fail(err, PM_E_NOT_IMPLEMENTED, "kernel %s has %u operands and outputs; at most %d",
                   g->name, k->n, MAX_PARAMS);
  k->bytes = PM_NEW(&k->arena, size_t, k->n);
  for (uint32_t i = 0; i < k->n; i++) {
    const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + i);
    k->bytes[i] = pm_dtypes[t->dtype].bytes;
    for (int d = 0; d < t->rank; d++) k->bytes[i] *= (size_t)t->dim[d];
  }
  if (!cubin.size) return PM_OK;
  const pm_cuda_options options = {.line_directives = false};
  if (read_cubin(cubin, &k->cubin, err) || pm_generate_cuda(g, &options, &k->program, err))
    return err->code;
  return check_program(attribute(m->c, "program"), g->name, &k->program, err);
}

/* The kernel of a call, made if it is not known yet; NULL with err. */
static call_kernel *find(const xla_call *c, pm_err *err) {
  const xla_span hash = attribute(c, "hash");
  if (!hash.at || hash.size != HASH) {
    pm_fail(err, PM_E_VALUE, "a call of pallas_mgpu has no hash; was it made by another version?");
    return NULL;
  }
  call_kernel *k = look(hash);
  if (k && c->stage != XLA_INSTANTIATE) return k;
  if (check_hash(c, hash, err)) return NULL;
  if (k) return k;
  pthread_mutex_lock(&known_lock);
  k = look(hash);
  if (!k && !(k = calloc(1, sizeof *k))) pm_fail(err, PM_E_MEMORY, "out of memory");
  if (k && !k->hash[0]) {
    const unsigned bucket = (unsigned char)hash.at[0] * 7u + (unsigned char)hash.at[1];
    memcpy(k->hash, hash.at, HASH);
    pm_arena_init(&k->arena);
    pthread_mutex_init(&k->lock, NULL);
    making m = {k, c};
    if (pm_protect(make, &m, err)) {
      pm_arena_free(&k->arena);
      pm_cubin_free(&k->cubin);
      free(k);
      k = NULL;
    } else {
      k->next = atomic_load_explicit(&known[bucket % BUCKETS], memory_order_relaxed);
      atomic_store_explicit(&known[bucket % BUCKETS], k, memory_order_release);
    }
  }
  pthread_mutex_unlock(&known_lock);
  return k;
}

/* ---- running -------------------------------------------------------------------------------- */

/* Addresses of operands and results, in the order of the kernel's parameters. */
static pm_code addresses(const call_kernel *k, const xla_call *c, void **at, pm_err *err) {
  const int64_t n = c->operands.size, all = n + c->results.size;
  if (n != k->g->n_operands || all != k->n)
    return pm_fail(err, PM_E_VALUE, "kernel %s: a call has %lld operands and %lld results",
                   k->g->name, (long long)n, (long long)(all - n));
  for (int64_t i = 0; i < all; i++) {
    const xla_buffer *b = i < n ? c->operands.at[i] : c->results.at[i - n];
    const pm_type *t = pm_typeof(k->g, k->g->blocks.at[1].arg + (uint32_t)i);
    bool same = b->rank == t->rank && b->dtype == pm_dtypes[t->dtype].xla;
    for (int d = 0; same && d < t->rank; d++) same = b->dims[d] == t->dim[d];
    if (!same)
      return pm_fail(err, PM_E_VALUE,
                     "kernel %s: argument %lld of a call has another shape or dtype", k->g->name,
                     (long long)i);
    at[i] = b->data;
  }
  return PM_OK;
}

typedef struct running {
  call_kernel *k;
  void **at;
} running;

static pm_code interpret(void *ctx, pm_err *err) {
  const running *r = ctx;
  call_kernel *k = r->k;
  const pm_graph *g = k->g;
  pm_interp_options options;
  if (!k->machine && pm_interp_compile(g, &k->machine, err)) return err->code;
  pm_interp_defaults(&options);
  options.fresh_outputs = true;
  for (uint32_t i = 0; i < g->n_outputs; i++) {
    const uint32_t p = g->n_operands + i;
    const int32_t from = g->alias ? g->alias[i] : -1;
    const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + p);
    const int64_t elements = (int64_t)(k->bytes[p] / pm_dtypes[t->dtype].bytes);
    if (from < 0) pm_interp_fill((pm_dtype)t->dtype, false, r->at[p], elements);
    else if (r->at[from] != r->at[p]) memcpy(r->at[p], r->at[from], k->bytes[p]);
    if (from >= 0) r->at[from] = r->at[p];
  }
  return pm_interp_run(k->machine, r->at, &options, err);
}

static pm_code stream_of(const xla_call *c, void **stream, xla_error **error) {
  xla_stream_get get = {.struct_size = sizeof get, .context = c->context};
  *error = c->api->stream_get(&get);
  *stream = get.stream;
  return *error ? PM_E_RUNTIME : PM_OK;
}

/* The kernel on the device of the call's arrays; NULL with err. */
static pm_kernel *load(call_kernel *k, const xla_call *c, int *device, pm_err *err) {
  void *at[MAX_PARAMS];
  if (addresses(k, c, at, err)) return NULL;
  *device = -1;
  for (uint32_t i = 0; i < k->n && *device < 0; i++)
    if (at[i] && pm_device_of((uint64_t)(uintptr_t)at[i], device, err)) return NULL;
  if (*device < 0 || *device >= MAX_DEVICES) {
    pm_fail(err, PM_E_NOT_IMPLEMENTED, "kernel %s: device %d", k->g->name, *device);
    return NULL;
  }
  pm_kernel *found = atomic_load_explicit(&k->loaded[*device], memory_order_acquire);
  if (found) return found;
  const pm_target *t;
  if (pm_device_target(*device, &t, err)) return NULL;
  if (t != k->g->target) {
    pm_fail(err, PM_E_DRIVER, "kernel %s was compiled for %s, and device %d is %s", k->g->name,
            k->g->target->text, *device, t->text);
    return NULL;
  }
  pthread_mutex_lock(&k->lock);
  found = k->loaded[*device];
  if (!found && !pm_kernel_load(*device, &k->cubin, &k->program, &found, err))
    atomic_store_explicit(&k->loaded[*device], found, memory_order_release);
  pthread_mutex_unlock(&k->lock);
  return found;
}

static xla_error *launch(call_kernel *k, const xla_call *c, pm_err *err) {
  void *at[MAX_PARAMS], *stream = NULL;
  uint64_t ptr[MAX_PARAMS];
  int device;
  xla_error *error = NULL;
  const pm_graph *g = k->g;
  pm_kernel *loaded = load(k, c, &device, err);
  if (!loaded || addresses(k, c, at, err)) return raise(c, err);
  if (stream_of(c, &stream, &error)) return error;
  for (uint32_t i = 0; i < k->n; i++) ptr[i] = (uint64_t)(uintptr_t)at[i];
  for (uint32_t i = 0; i < g->n_outputs; i++) {
    const int32_t from = g->alias ? g->alias[i] : -1;
    const uint64_t to = ptr[g->n_operands + i];
    if (from < 0) continue;
    if (ptr[from] != to &&
        pm_copy_on_device(device, to, ptr[from], k->bytes[g->n_operands + i], stream, err))
      return raise(c, err);
    ptr[from] = to;
  }
  return pm_kernel_launch(loaded, ptr, NULL, stream, err) ? raise(c, err) : NULL;
}

/* ---- handlers ------------------------------------------------------------------------------- */

static xla_error *on_cpu(xla_call *c) {
  PMPY_ERR(err);
  void *at[MAX_PARAMS];
  if (answer_metadata(c)) return NULL;
  if (!fits(c)) return refuse_version(c);
  call_kernel *k = find(c, &err);
  if (!k) return raise(c, &err);
  if (c->stage != XLA_EXECUTE) return NULL;
  if (addresses(k, c, at, &err)) return raise(c, &err);
  running r = {k, at};
  pthread_mutex_lock(&k->lock);
  const pm_code code = pm_protect(interpret, &r, &err);
  pthread_mutex_unlock(&k->lock);
  return code ? raise(c, &err) : NULL;
}

static bool has_memory(const xla_call *c) {
  for (int64_t i = 0; i < c->results.size; i++)
    if (((const xla_buffer *)c->results.at[i])->data) return true;
  return false;
}

static xla_error *on_gpu(xla_call *c) {
  PMPY_ERR(err);
  int device;
  if (answer_metadata(c)) return NULL;
  if (!fits(c)) return refuse_version(c);
  call_kernel *k = find(c, &err);
  if (!k) return raise(c, &err);
  if (!k->cubin.size) {
    pm_fail(&err, PM_E_VALUE, "kernel %s: a call was compiled for the CPU", k->g->name);
    return raise(c, &err);
  }
  if (c->stage != XLA_INITIALIZE && c->stage != XLA_EXECUTE) return NULL;
  if (!has_memory(c)) return NULL; /* nothing to do, or not known yet where */
  if (c->stage == XLA_EXECUTE) return launch(k, c, &err);
  return load(k, c, &device, &err) ? NULL : raise(c, &err);
}

/* ---- for Python ----------------------------------------------------------------------------- */

static PyObject *handlers(PyObject *module, PyObject *unused) {
  (void)module;
  (void)unused;
  PyObject *cpu = PyCapsule_New((void *)on_cpu, NULL, NULL);
  PyObject *gpu = PyCapsule_New((void *)on_gpu, NULL, NULL);
  PyObject *both = cpu && gpu ? PyTuple_Pack(2, cpu, gpu) : NULL;
  Py_XDECREF(cpu);
  Py_XDECREF(gpu);
  return both;
}

static PyMethodDef functions[] = {
    {"xla_handlers", handlers, METH_NOARGS,
     "xla_handlers(): capsules of the handlers of XLA's foreign function interface that run a "
     "kernel on the CPU, and on a GPU."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_xla_ffi(PyObject *module) { return PyModule_AddFunctions(module, functions); }
