/* Kernel: the callable that a user holds.
 *
 * A call reads its arguments as memory (exchange.c), finds the plan for their dtypes and shapes in
 * a hash table (a miss traces, by calling Python), and runs it: on the GPU if the arrays are there;
 * for host arrays on a GPU that fits, or else on the interpreter. Arguments that are not where the
 * kernel runs are copied there and back. A hit on arrays that are in place is one pass over the
 * arguments, one hash, and the launch; no Python code runs and nothing is awaited.
 *
 * Streams: the kernel runs on the current stream of the first array that is not a DeviceArray (or
 * on the legacy default stream), ordered with the streams of the other kinds of arrays among the
 * arguments. Producers whose streams are unknown (JAX and others) keep their arrays until the
 * kernel has finished: `pending` holds them. */
#include "call.h"
#include "races.h"

#include <stddef.h>
#include <structmember.h>

#include "../base/env.h"

typedef enum container { SINGLE, TUPLE, LIST } container;

typedef struct kernel {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *dict, *weakrefs;
  PyObject *name, *trace, *options;            /* owned; options holds the objects below */
  PyObject *interpret;                         /* borrowed: None, True or the parameters */
  PyObject *unflatten, *structured, *progress; /* borrowed, or NULL */
  container container;
  pmpy_plans plans;
  bool has_warned; /* of operands that were converted */
} kernel;

/* ---- one call ----------------------------------------------------------------------------- */

typedef pmpy_call call;

void pmpy_call_end(call *c) {
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    pmpy_buffer *b = &c->in[i];
    if (b->keep || b->managed || b->managed_old) pmpy_release(b);
  }
  if (c->many) PyMem_Free(c->many);
  Py_XDECREF(c->out_tuple);
  Py_XDECREF((PyObject *)c->plan);
}

static bool is_number(const pmpy_buffer *b) { return !b->cuda && b->rank == 0; }

static int refuse_mixture(const call *c, int a, int b, const char *why) {
  char x[32], y[32];
  PyErr_Format(PyExc_TypeError, "kernel %U: %s and %s %s", c->name, pmpy_which(a, x),
               pmpy_which(b, y), why);
  return -1;
}

/* Index of buffer i for messages: outputs count down from -1. */
static int which(const call *c, uint32_t i) {
  return i < c->n_in ? (int)i : -(int)(i - c->n_in) - 1;
}

/* Numbers (rank 0 on the host) go anywhere. */
int pmpy_call_locate(call *c) {
  uint32_t first = 0;
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    const pmpy_buffer *b = &c->in[i];
    if (b->source->family == PMPY_NONE || is_number(b)) continue;
    if (!c->has_array) {
      c->has_array = true;
      c->home = b->source;
      c->cuda = b->cuda;
      c->device = b->device;
      first = i;
      continue;
    }
    if (b->cuda != c->cuda)
      return refuse_mixture(c, which(c, first), which(c, i),
                            "lie on different sides: one on the host, one on the GPU. Move one of "
                            "them, for example by pallas_mgpu.device_put");
    if (b->device != c->device)
      return refuse_mixture(c, which(c, first), which(c, i), "lie on different GPUs");
    if (b->source->family == c->home->family) continue;
    if (!c->out_arg)
      return refuse_mixture(c, which(c, first), which(c, i),
                            "come from different libraries, so the kind of the result is unknown: "
                            "convert one of them, or give out=");
    c->mixed = true;
    if (c->home->family == PMPY_DEVICE_ARRAY || c->home->family == PMPY_NUMPY)
      c->home = b->source; /* the one with a stream of its own */
  }
  if (c->has_array) return 0;
  c->home = &pmpy_numpy_source;
  for (uint32_t i = 0; i < c->n_in; i++)
    if (c->in[i].source->family != PMPY_NONE) {
      c->home = c->in[i].source;
      break;
    }
  return 0;
}

/* Split out= into arrays. */
static int take_out(call *c) {
  if (!c->out_arg) return 0;
  if (PyTuple_Check(c->out_arg) || PyList_Check(c->out_arg)) {
    c->out_tuple = PySequence_Tuple(c->out_arg);
    if (!c->out_tuple) return -1;
    c->out_args = &PyTuple_GET_ITEM(c->out_tuple, 0);
    c->n_out_given = (uint32_t)PyTuple_GET_SIZE(c->out_tuple);
  } else {
    c->out_args = &c->out_arg;
    c->n_out_given = 1;
  }
  return 0;
}

/* Room for all buffers; on failure there is nothing to release. */
static int make_room(call *c) {
  size_t n = c->n_in + (size_t)c->n_out_given;
  c->in = c->few;
  if (n > PMPY_FEW) {
    c->many = n <= PMPY_MAX_PARAMS ? PyMem_Malloc(n * sizeof *c->many) : NULL;
    c->in = c->many;
  }
  c->out = c->in + c->n_in;
  if (c->in) return 0;
  c->n_in = c->n_out_given = 0;
  if (n <= PMPY_MAX_PARAMS) PyErr_NoMemory();
  else
    PyErr_Format(PyExc_NotImplementedError,
                 "kernel %U: %zu arrays were given; at most %d are "
                 "supported",
                 c->name, n, PMPY_MAX_PARAMS);
  return -1;
}

/* 1: all read, 0: an argument is nested or no array (its index is n_in then), -1: exception */
static int read_all(call *c, bool specs) {
  if (make_room(c) < 0) return -1;
  uint32_t n_in = c->n_in, n_out = c->n_out_given;
  c->n_out_given = 0; /* what is read is what pmpy_call_end releases */
  for (c->n_in = 0; c->n_in < n_in; c->n_in++) {
    int code =
        pmpy_read(c->args[c->n_in], (int)c->n_in, specs ? PMPY_SPEC : PMPY_INPUT, &c->in[c->n_in]);
    if (code <= 0) return code;
    c->converted |= c->in[c->n_in].was != NULL;
  }
  for (; c->n_out_given < n_out; c->n_out_given++) {
    uint32_t i = c->n_out_given;
    int code = pmpy_read(c->out_args[i], -(int)i - 1, PMPY_OUTPUT, &c->out[i]);
    if (code > 0) continue;
    if (!code)
      PyErr_Format(PyExc_TypeError, "kernel %U: out[%u] is a %s, which is no array", c->name, i,
                   Py_TYPE(c->out_args[i])->tp_name);
    return -1;
  }
  return 1;
}

/* ---- plans -------------------------------------------------------------------------------- */

static uint32_t make_key(const call *c, int64_t *key) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_in; i++) {
    const pmpy_buffer *b = &c->in[i];
    key[n++] = b->dtype | b->rank << 8 | b->strided << 16;
    for (int d = 0; d < b->rank; d++) key[n++] = b->shape[d];
    for (int d = 0; b->strided && d < b->rank; d++) key[n++] = b->stride[d];
  }
  key[n++] = pmpy.debug_checks | (c->target ? c->target - pm_targets + 1 : 0) << 1;
  return n;
}

/* New: ((shape, dtype), ...) of the arguments */
static PyObject *specs_of(const call *c) {
  PyObject *specs = PyTuple_New(c->n_in);
  for (uint32_t i = 0; specs && i < c->n_in; i++) {
    pmpy_spec s = {.dtype = c->in[i].dtype, .rank = c->in[i].rank};
    memcpy(s.shape, c->in[i].shape, sizeof s.shape);
    PyObject *shape = pmpy_spec_shape(&s), *dtype = pmpy_dtype_object((pm_dtype)s.dtype);
    PyObject *pair = shape && dtype ? PyTuple_Pack(2, shape, dtype) : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    if (pair) PyTuple_SET_ITEM(specs, i, pair);
    else Py_CLEAR(specs);
  }
  return specs;
}

/* New. */
static pmpy_plan *trace(const call *c, bool keep_text) {
  PyObject *specs = specs_of(c);
  PyObject *traced = specs ? PyObject_CallOneArg(c->k->trace, specs) : NULL;
  pmpy_plan *p =
      traced ? pmpy_plan_new(traced, c->in, c->n_in, c->target, !c->may_fall_back, keep_text)
             : NULL;
  Py_XDECREF(traced);
  Py_XDECREF(specs);
  return p;
}

static int find_plan(call *c) {
  int64_t few[PMPY_FEW * 4], *key = few, *many = NULL;
  size_t most = c->n_in * (size_t)(2 * PM_MAX_RANK + 1) + 1;
  if (most > PM_COUNT(few)) key = many = PyMem_Malloc(most * sizeof *key);
  if (!key) return PyErr_NoMemory(), -1;
  uint32_t n = make_key(c, key);
  uint64_t hash = pm_hash(key, n * sizeof *key, 0);
  c->plan = pmpy_plans_find(&c->k->plans, hash, key, n);
  if (c->plan && !c->may_fall_back && c->target && c->plan->graph->g->target != c->target) {
    Py_SETREF(c->plan, trace(c, false)); /* lowered for the interpreter: the reason is raised */
  } else if (!c->plan && (c->plan = trace(c, false))) {
    c->plan->hash = hash;
    c->plan->n_key = n;
    c->plan->key = PyMem_Malloc((n + 1) * sizeof *key);
    if (c->plan->key) memcpy(c->plan->key, key, n * sizeof *key);
    else PyErr_NoMemory();
    if (!c->plan->key || pmpy_plans_add(&c->k->plans, c->plan) < 0) Py_CLEAR(c->plan);
  }
  PyMem_Free(many);
  return c->plan ? 0 : -1;
}

/* ---- outputs ------------------------------------------------------------------------------ */

static PyObject *text_of_spec(const pmpy_spec *s) {
  PyObject *shape = pmpy_spec_shape(s);
  PyObject *text =
      shape ? PyUnicode_FromFormat("%s of shape %R", pm_dtypes[s->dtype].text, shape) : NULL;
  Py_XDECREF(shape);
  return text;
}

static int check_outputs(const call *c) {
  if (!c->out_arg) return 0;
  if (c->n_out_given != c->plan->n_out) {
    PyErr_Format(PyExc_TypeError, "kernel %U: out has %u arrays, and the kernel has %u outputs",
                 c->name, c->n_out_given, c->plan->n_out);
    return -1;
  }
  for (uint32_t i = 0; i < c->n_out_given; i++) {
    const pmpy_buffer *b = &c->out[i];
    const pmpy_spec *s = &c->plan->out[i];
    if (b->dtype == s->dtype && b->rank == s->rank &&
        !memcmp(b->shape, s->shape, b->rank * sizeof *b->shape))
      continue;
    pmpy_spec given = {.dtype = b->dtype, .rank = b->rank};
    memcpy(given.shape, b->shape, sizeof given.shape);
    PyObject *want = text_of_spec(s), *got = text_of_spec(&given);
    if (want && got)
      PyErr_Format(PyExc_ValueError, "kernel %U: out[%u] must be %U; got %U", c->name, i, want,
                   got);
    Py_XDECREF(got);
    Py_XDECREF(want);
    return -1;
  }
  return pmpy_call_check_overlap(c);
}

/* Fresh arrays for the outputs, with their addresses. On failure none is left. */
static int make_outputs(const call *c, void *stream, PyObject **made, uint64_t *ptr) {
  for (uint32_t i = 0; i < c->plan->n_out; i++) {
    made[i] = pmpy_result(c->home, &c->plan->out[i], c->cuda, c->device, stream, &ptr[i]);
    if (made[i]) continue;
    while (i) Py_DECREF(made[--i]);
    return -1;
  }
  return 0;
}

/* New: what the call returns. Steals the items. */
static PyObject *pack(const call *c, PyObject **items, uint32_t n) {
  kernel *k = c->k;
  if (k->container == SINGLE && n == 1 && !k->unflatten) return items[0];
  PyObject *all = k->container == LIST && !k->unflatten ? PyList_New(n) : PyTuple_New(n);
  for (uint32_t i = 0; i < n; i++) {
    if (!all) Py_DECREF(items[i]);
    else if (PyList_CheckExact(all)) PyList_SET_ITEM(all, i, items[i]);
    else PyTuple_SET_ITEM(all, i, items[i]);
  }
  if (all && k->unflatten) Py_SETREF(all, PyObject_CallOneArg(k->unflatten, all));
  return all;
}

static PyObject *finish(const call *c, PyObject **made) {
  uint32_t n = c->plan->n_out;
  if (c->out_arg) {
    for (uint32_t i = 0; i < n; i++) made[i] = Py_NewRef(c->out_args[i]);
    return pack(c, made, n);
  }
  for (uint32_t i = 0; i < n; i++) {
    made[i] = pmpy_finish(c->home, made[i], c->cuda);
    if (made[i]) continue;
    for (uint32_t j = 0; j < n; j++) Py_XDECREF(made[j]);
    return NULL;
  }
  return pack(c, made, n);
}

/* ---- staging ------------------------------------------------------------------------------ */

/* Every operand and output of one run, in order, and what must be done around it. */
typedef struct run {
  const call *c;
  bool on_gpu;
  int device;
  void *stream;
  pm_kernel *kernel;
  const pm_interp_options *options;
  uint32_t n;
  uint64_t given[PMPY_MAX_PARAMS]; /* where the caller has it */
  uint64_t ptr[PMPY_MAX_PARAMS];   /* where the kernel finds it */
  size_t bytes[PMPY_MAX_PARAMS];
  bool there[PMPY_MAX_PARAMS];    /* the caller has it on the GPU */
  bool staged[PMPY_MAX_PARAMS];   /* ptr is a copy of ours */
  uint8_t small[PMPY_MAX_PARAMS]; /* a dtype below 8 bits that the caller has unpacked; or 0 */
  bool replaced[PMPY_MAX_PARAMS]; /* an operand that is one of the outputs */
} run;

/* The operand that output i begins as, or -1 */
static int32_t alias_of(const run *r, uint32_t i) {
  return r->c->plan->alias ? r->c->plan->alias[i - r->c->n_in] : -1;
}

static void *host(uint64_t address) { return (void *)(uintptr_t)address; }

/* Memory that the kernel alone uses, for the time of the call. */
static bool is_scratch(const run *r, uint32_t i) { return i >= r->c->n_in + r->c->plan->n_out; }

static pm_code take_memory(run *r, uint32_t i, pm_err *err) {
  if (!is_scratch(r, i) && r->there[i] == r->on_gpu && !r->small[i]) {
    r->ptr[i] = r->given[i];
    return PM_OK;
  }
  if (r->on_gpu) {
    if (pm_device_alloc(r->device, r->bytes[i], r->stream, &r->ptr[i], err)) return err->code;
  } else {
    void *p = pm_malloc(r->bytes[i] + 1);
    if (!p) return pm_fail(err, PM_E_MEMORY, "the host is out of memory (%zu bytes)", r->bytes[i]);
    r->ptr[i] = (uint64_t)(uintptr_t)p;
  }
  r->staged[i] = true;
  return PM_OK;
}

/* Unpacked elements of the caller to memory of the kernel, or back. */
static pm_code move_small(run *r, uint32_t i, uint64_t kernels, bool in, pm_err *err) {
  const size_t n = r->bytes[i];
  void *packed = r->on_gpu ? pm_malloc(n + 1) : host(kernels);
  pm_code code = PM_OK;
  if (!packed) return pm_fail(err, PM_E_MEMORY, "the host is out of memory (%zu bytes)", n);
  const size_t elements = n * (8 / pm_dtypes[r->small[i]].bits);
  if (in) pm_pack_bytes((pm_dtype)r->small[i], host(r->given[i]), packed, elements);
  if (r->on_gpu) {
    code = in ? pm_copy_to_device(r->device, kernels, packed, n, r->stream, err)
              : pm_copy_to_host(r->device, packed, kernels, n, r->stream, err);
    if (!code) code = pm_synchronize(r->device, r->stream, err);
  }
  if (!in && !code) pm_unpack_bytes((pm_dtype)r->small[i], packed, host(r->given[i]), elements);
  if (r->on_gpu) pm_free(packed);
  return code;
}

/* Contents of parameter `from`, as the caller has it, to where the kernel finds parameter `to`. */
static pm_code move_in(run *r, uint32_t from, uint32_t to, pm_err *err) {
  uint64_t src = r->given[from], dst = r->ptr[to];
  size_t n = r->bytes[from];
  uint32_t value = 0;
  if (r->small[from]) return move_small(r, from, dst, true, err);
  if (r->there[from])
    return r->on_gpu ? pm_copy_on_device(r->device, dst, src, n, r->stream, err)
                     : pm_copy_to_host(r->device, host(dst), src, n, r->stream, err);
  if (!r->on_gpu) {
    memmove(host(dst), host(src), n);
    return PM_OK;
  }
  if (n != 1 && n != 2 && n != 4)
    return pm_copy_to_device(r->device, dst, host(src), n, r->stream, err);
  memcpy(&value, host(src), n);
  return pm_device_store(r->device, dst, value, n, r->stream, err);
}

/* Fresh outputs begin as memory that was never written. */
static void fill(const pmpy_spec *s, void *at, bool zero) {
  size_t n = pmpy_bytes(s), size = pm_dtypes[s->dtype].bytes;
  unsigned char item[4];
  memset(item, 0xff, sizeof item);
  if (pm_is_float((pm_dtype)s->dtype))
    pm_store_scalar((pm_dtype)s->dtype, item, (pm_scalar){.f = __builtin_nan("")});
  if (pm_dtypes[s->dtype].class == PM_CLASS_INT) item[size - 1] = 0x7f;
  if (s->dtype == PM_BOOL) item[0] = 1;
  if (zero) memset(item, 0, sizeof item);
  for (size_t i = 0; i < n; i += size) memcpy((char *)at + i, item, size);
}

/* Output i before the run: its operand's contents, the caller's, or nothing. */
static pm_code begin_output(run *r, uint32_t i, pm_err *err) {
  const call *c = r->c;
  int32_t a = alias_of(r, i);
  if (take_memory(r, i, err)) return err->code;
  if (a >= 0 && r->given[a] != r->given[i]) return move_in(r, (uint32_t)a, i, err);
  if (c->out_arg && !is_scratch(r, i)) return r->staged[i] ? move_in(r, i, i, err) : PM_OK;
  if (!r->on_gpu) fill(&c->plan->out[i - c->n_in], host(r->ptr[i]), r->options->zero_fill);
  return PM_OK;
}

static pm_code stage_in(run *r, pm_err *err) {
  bool wait = false;
  uint32_t n_in = r->c->n_in;
  for (uint32_t i = n_in; i < r->n; i++)
    if (alias_of(r, i) >= 0) r->replaced[alias_of(r, i)] = true;
  for (uint32_t i = 0; i < n_in; i++) {
    if (r->replaced[i]) continue;
    if (take_memory(r, i, err)) return err->code;
    if (r->staged[i] && move_in(r, i, i, err)) return err->code;
  }
  for (uint32_t i = n_in; i < r->n; i++) {
    if (begin_output(r, i, err)) return err->code;
    if (alias_of(r, i) >= 0) r->ptr[alias_of(r, i)] = r->ptr[i];
  }
  for (uint32_t i = 0; i < r->n; i++) wait |= r->there[i] && !r->on_gpu;
  return wait ? pm_synchronize(r->device, r->stream, err) : PM_OK;
}

static pm_code stage_out(run *r, pm_err *err) {
  bool wait = false;
  for (uint32_t i = r->c->n_in; i < r->n; i++) {
    if (!r->staged[i] || is_scratch(r, i)) continue;
    uint64_t to = r->given[i], from = r->ptr[i];
    if (r->small[i]) {
      if (move_small(r, i, from, false, err)) return err->code;
      continue;
    }
    wait = true;
    if (r->on_gpu ? pm_copy_to_host(r->device, host(to), from, r->bytes[i], r->stream, err)
                  : pm_copy_to_device(r->device, to, host(from), r->bytes[i], r->stream, err))
      return err->code;
  }
  return wait ? pm_synchronize(r->device, r->stream, err) : PM_OK;
}

static void drop_stage(run *r) {
  for (uint32_t i = 0; i < r->n; i++) {
    if (!r->staged[i]) continue;
    if (r->on_gpu) pm_device_free(r->device, r->ptr[i], r->stream);
    else pm_free(host(r->ptr[i]));
  }
}

static pm_code execute(run *r, pm_err *err) {
  pm_code code = stage_in(r, err);
  if (!code)
    code = r->on_gpu ? pm_kernel_launch(r->kernel, r->ptr, r->stream, err)
                     : pmpy_plan_interpret(r->c->plan, (void *const *)r->ptr, r->options, err);
  if (!code) code = stage_out(r, err);
  drop_stage(r);
  return code;
}

/* Fill r's description of parameters; `out` are the addresses of the outputs. */
static void describe(run *r, const uint64_t *out) {
  const call *c = r->c;
  r->n = c->n_in + c->plan->n_out + c->plan->n_scratch;
  for (uint32_t i = 0; i < c->n_in; i++) {
    const pmpy_buffer *b = &c->in[i];
    pmpy_spec s = {.dtype = b->dtype, .rank = b->rank};
    memcpy(s.shape, b->shape, sizeof s.shape);
    r->given[i] = b->ptr;
    r->bytes[i] = pmpy_bytes(&s);
    r->there[i] = b->cuda;
    if (pm_dtypes[b->dtype].bits < 8 && !b->cuda) r->small[i] = b->dtype;
  }
  for (uint32_t i = 0; i < r->n - c->n_in; i++) {
    r->given[c->n_in + i] = i < c->plan->n_out ? out[i] : 0;
    r->bytes[c->n_in + i] = pmpy_bytes(&c->plan->out[i]);
    r->there[c->n_in + i] = c->cuda;
    const uint8_t d = c->plan->out[i].dtype;
    if (pm_dtypes[d].bits < 8 && !c->cuda) r->small[c->n_in + i] = d;
  }
}

/* ---- the GPU ------------------------------------------------------------------------------ */

static int check_capture(const call *c, int device, void *stream) {
  if (device >= PMPY_MAX_DEVICES || c->plan->kernels[device] ||
      !pm_stream_is_capturing(device, stream))
    return 0;
  PyErr_Format(pmpy.exceptions[PM_E_RUNTIME],
               "kernel %U is not compiled for these arguments yet, and cannot be while the stream "
               "is being captured: call it once before the capture",
               c->name);
  return -1;
}

static bool all_empty(const pmpy_plan *p) {
  for (uint32_t i = 0; i < p->n_out; i++)
    if (pmpy_bytes(&p->out[i])) return false;
  return p->n_out > 0;
}

/* Addresses of all parameters if nothing needs staging. */
static bool direct(const call *c, const uint64_t *out, uint64_t *ptr) {
  if (c->plan->n_scratch) return false;
  for (uint32_t i = 0; i < c->n_in; i++) {
    if (!c->in[i].cuda) return false;
    ptr[i] = c->in[i].ptr;
  }
  for (uint32_t i = 0; i < c->plan->n_out; i++) {
    if (c->plan->alias && c->plan->alias[i] >= 0) return false;
    ptr[c->n_in + i] = out[i];
  }
  return c->cuda;
}

static int launch(const call *c, pm_kernel *kernel, int device, void *stream, const uint64_t *out) {
  PMPY_ERR(err);
  pm_code code;
  uint64_t ptr[PMPY_MAX_PARAMS];
  if (direct(c, out, ptr)) {
    Py_BEGIN_ALLOW_THREADS code = pm_kernel_launch(kernel, ptr, stream, &err);
    Py_END_ALLOW_THREADS
  } else {
    run r = {.c = c, .on_gpu = true, .device = device, .stream = stream, .kernel = kernel};
    describe(&r, out);
    Py_BEGIN_ALLOW_THREADS code = execute(&r, &err);
    Py_END_ALLOW_THREADS
  }
  if (code) pmpy_raise(&err);
  return code ? -1 : 0;
}

/* With stream=: a capture allocates nothing of ours, and copies nothing of the host's. */
static int check_captured_stream(const call *c) {
  const char *why = NULL;
  if (!c->cuda) why = "arrays of the host are copied and waited for. Pass arrays of the GPU";
  else if (!c->out_arg && c->home->family != PMPY_TORCH)
    why = "its results would need memory of the capture's own. Pass arrays for them as out=";
  if (!why) return 0;
  PyErr_Format(pmpy.exceptions[PM_E_RUNTIME], "kernel %U cannot be captured so: %s", c->name, why);
  return -1;
}

/* What comes before and after a launch that other streams must know of. */
typedef struct around {
  bool order;      /* arrays that are used on other streams */
  bool home;       /* fresh results: their memory may be in use on the home's stream */
  bool hold;       /* arrays must outlive the launch */
  bool to_default; /* results that are DeviceArrays for now are used on the default stream next */
} around;

static int plan_around(const call *c, int device, void *stream, PyObject *const *made, around *a) {
  const uint32_t n = c->plan->n_out;
  a->order = c->mixed;
  a->hold = c->home->family >= PMPY_JAX || c->mixed;
  a->to_default =
      c->cuda && !c->out_arg && n && stream && Py_TYPE(made[0]) == pmpy.device_array_type;
  a->home = false;
  if (!c->has_stream) return 0;
  if (pm_stream_is_capturing(device, stream)) {
    *a = (around){0};
    return check_captured_stream(c);
  }
  a->order = a->hold = c->cuda;
  a->home = c->cuda && (!c->out_arg || c->mixed);
  return 0;
}

static int launch_around(call *c, pm_kernel *kernel, int device, void *stream, const uint64_t *out,
                         PyObject *const *made) {
  pm_err err;
  around a;
  const uint32_t n_made = c->out_arg ? 0 : c->plan->n_out;
  if (plan_around(c, device, stream, made, &a) < 0 || (a.home && pmpy_order_home(c, stream) < 0) ||
      (a.order && pmpy_order(c, stream, true) < 0) || launch(c, kernel, device, stream, out) < 0 ||
      (a.order && pmpy_order(c, stream, false) < 0) ||
      (a.hold && pmpy_hold(c, stream, made, c->has_stream ? n_made : 0) < 0))
    return -1;
  err.code = PM_OK;
  if (a.to_default && pm_stream_order(device, stream, NULL, &err)) {
    pmpy_raise(&err);
    return -1;
  }
  if (a.hold) pmpy_sweep();
  return 0;
}

static int find_stream(const call *c, int device, void **stream) {
  PMPY_ERR(err);
  *stream = c->stream;
  if (c->has_stream) return 0;
  if (c->cuda) return pmpy_current_stream(c->home, device, stream);
  if (!pm_private_stream(device, stream, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

static PyObject *call_gpu(call *c, int device) {
  PyObject *made[PMPY_MAX_PARAMS];
  uint64_t out[PMPY_MAX_PARAMS];
  void *stream = NULL;
  uint32_t n = c->plan->n_out;
  if (find_stream(c, device, &stream) < 0 || check_capture(c, device, stream) < 0) return NULL;
  pm_kernel *kernel = pmpy_plan_kernel(c->plan, device);
  if (!kernel) return NULL;
  if (c->out_arg)
    for (uint32_t i = 0; i < n; i++) out[i] = c->out[i].ptr;
  else if (make_outputs(c, stream, made, out) < 0) return NULL;
  if (all_empty(c->plan) || !launch_around(c, kernel, device, stream, out, made))
    return finish(c, made);
  for (uint32_t i = 0; i < n && !c->out_arg; i++) Py_DECREF(made[i]);
  return NULL;
}

/* ---- the interpreter ---------------------------------------------------------------------- */

typedef struct hooks {
  PyObject *progress;      /* borrowed, or NULL */
  PyObject *races;         /* owned: a list, or NULL where nobody looks for them */
  const pmpy_graph *graph; /* borrowed */
  bool failed;             /* an exception is set */
} hooks;

static void print_line(void *ctx, const char *line) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *out = PySys_GetObject("stdout"); /* borrowed */
  if (!h->failed && out && out != Py_None)
    h->failed = PyFile_WriteString(line, out) < 0 || PyFile_WriteString("\n", out) < 0;
  PyGILState_Release(gil);
}

static int on_inlined(void *ctx, pm_inline_call *call) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = pmpy_call_inlined(h->graph, call) < 0;
  PyGILState_Release(gil);
  return h->failed;
}

static int on_progress(void *ctx, int64_t done, int64_t total) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = PyErr_CheckSignals() < 0;
  if (!h->failed && h->progress) {
    PyObject *r = PyObject_CallFunction(h->progress, "LL", (long long)done, (long long)total);
    h->failed = !r;
    Py_XDECREF(r);
  }
  PyGILState_Release(gil);
  return h->failed;
}

static void on_race(void *ctx, const pm_race *race) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = pmpy_add_race(h->races, race) < 0;
  PyGILState_Release(gil);
}

/* Does the attribute equal the text? -1: exception. Absent counts as false. */
static int attribute_is(PyObject *o, const char *name, const char *text) {
  PyObject *a = PyObject_GetAttrString(o, name);
  if (!a) return PyErr_ExceptionMatches(PyExc_AttributeError) ? PyErr_Clear(), 0 : -1;
  int is = PyUnicode_Check(a) && !PyUnicode_CompareWithASCIIString(a, text);
  Py_DECREF(a);
  return is;
}

/* -1: exception */
static int race_options(PyObject *p, hooks *h, pm_interp_options *o) {
  PyObject *races = PyObject_GetAttrString(p, "detect_races");
  if (!races) PyErr_Clear();
  Py_XDECREF(races);
  if (races != Py_True) return 0;
  if (!(h->races = PyList_New(0))) return -1;
  o->races = true;
  o->race = on_race;
  o->race_ctx = h;
  o->race_raises = attribute_is(p, "on_race", "raise") > 0;
  o->strict = attribute_is(p, "mode", "strict") > 0;
  return PyErr_Occurred() ? -1 : 0;
}

static int interp_options(const kernel *k, hooks *h, pm_interp_options *o) {
  pm_interp_defaults(o);
  o->print = print_line;
  o->number = pmpy_format_number;
  o->progress = on_progress;
  o->inlined = on_inlined;
  o->print_ctx = o->progress_ctx = o->inlined_ctx = h;
  h->progress = k->progress;
  PyObject *p = k->interpret;
  if (!p || p == Py_None || PyBool_Check(p)) return 0;
  PyObject *seed = PyObject_GetAttrString(p, "seed");
  if (seed) o->seed = PyLong_AsUnsignedLongLongMask(seed);
  else PyErr_Clear();
  Py_XDECREF(seed);
  PyObject *log = PyObject_GetAttrString(p, "log");
  if (log) o->log = (int)PyLong_AsLong(log);
  else PyErr_Clear();
  Py_XDECREF(log);
  PyObject *skip = PyObject_GetAttrString(p, "skip_floating_point_ops");
  o->skip_floats = skip == Py_True;
  if (!skip) PyErr_Clear();
  Py_XDECREF(skip);
  int oob = attribute_is(p, "out_of_bounds_reads", "uninitialized");
  int zero = attribute_is(p, "uninitialized_memory", "zero");
  o->oob_raise = !oob;
  o->zero_fill = zero > 0;
  return PyErr_Occurred() ? -1 : race_options(p, h, o);
}

static PyObject *call_interpreter(call *c) {
  PyObject *made[PMPY_MAX_PARAMS];
  uint64_t out[PMPY_MAX_PARAMS];
  pm_interp_options options;
  hooks h = {.graph = c->plan->graph};
  void *stream = NULL;
  pm_err err = {0};
  pm_code code;
  uint32_t n = c->plan->n_out;
  if (interp_options(c->k, &h, &options) < 0) goto no_outputs;
  if (c->cuda &&
      (find_stream(c, c->device, &stream) < 0 || (c->has_stream && pmpy_order_home(c, stream) < 0)))
    goto no_outputs;
  if (c->out_arg)
    for (uint32_t i = 0; i < n; i++) out[i] = c->out[i].ptr;
  else if (make_outputs(c, stream, made, out) < 0) goto no_outputs;
  run r = {.c = c, .device = c->device, .stream = stream, .options = &options};
  describe(&r, out);
  Py_BEGIN_ALLOW_THREADS;
  code = execute(&r, &err);
  Py_END_ALLOW_THREADS;
  if (h.failed) pmpy_add_place(&err);
  else if (code) pmpy_raise(&err);
  const bool failed = h.failed || code;
  if ((!h.races || pmpy_finish_races(h.races, c->k->interpret) == 0) && !failed) {
    Py_XDECREF(h.races);
    return finish(c, made);
  }
  for (uint32_t i = 0; i < n && !c->out_arg; i++) Py_DECREF(made[i]);
no_outputs:
  Py_XDECREF(h.races);
  return NULL;
}

/* ---- which of the two ------------------------------------------------------------------------ */

/* Warn once per process that host arrays go to the interpreter. */
static int warn_fallback(const char *why) {
  static bool warned;
  if (warned) return 0;
  warned = true;
  return PyErr_WarnFormat(
      PyExc_UserWarning, 1,
      "kernels on host arrays run on the CPU interpreter, because no GPU can be "
      "used: %s. PALLAS_MGPU_BACKEND=interpret says that this is meant",
      why);
}

/* Where kernels on host arrays run; 0 or -1. */
static int choose_backend(call *c) {
  const char *asked = pm_env(PM_ENV_BACKEND);
  char why[512] = "";
  if (!strcmp(asked, "interpret")) return 0;
  if (strcmp(asked, "auto") && strcmp(asked, "cuda")) {
    PyErr_Format(PyExc_ValueError, "%s: got %.80s; auto, cuda and interpret are accepted",
                 pm_env_table[PM_ENV_BACKEND].variable, asked);
    return -1;
  }
  c->may_fall_back = *asked == 'a';
  c->runs_on = pmpy_fitting_device(why, sizeof why);
  if (c->runs_on >= 0) return 0;
  if (c->may_fall_back) return warn_fallback(why);
  PyErr_Format(pmpy.exceptions[PM_E_DRIVER], "%s is cuda, and no GPU can be used: %s",
               pm_env_table[PM_ENV_BACKEND].variable, why);
  return -1;
}

/* Where the call runs, and what the kernel is lowered for there; 0 or -1. */
static int choose_target(call *c) {
  PMPY_ERR(err);
  PyObject *p = c->k->interpret;
  c->runs_on = -1;
  c->target = NULL;
  c->may_fall_back = false;
  if (p && p != Py_None && p != Py_False) return 0;
  if (c->cuda) c->runs_on = c->device;
  else if (choose_backend(c) < 0) return -1;
  if (c->runs_on < 0 || !pm_device_target(c->runs_on, &c->target, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

static PyObject *dispatch(call *c) {
  const pm_target *t = c->plan->graph->g->target;
  char why[128];
  if (c->runs_on < 0) return call_interpreter(c);
  if (t == c->target) return call_gpu(c, c->runs_on);
  snprintf(why, sizeof why, "the GPU is %s, and a kernel needs what %s has", c->target->text,
           t->text);
  return warn_fallback(why) < 0 ? NULL : call_interpreter(c);
}

/* Arguments that are no arrays: nested ones are taken apart in Python. */
static PyObject *call_structured(const kernel *k, const call *c, Py_ssize_t n, PyObject *stream) {
  PyObject *tuple = PyTuple_New(n), *result = NULL;
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(c->args[i]));
  result = PyObject_CallMethod(k->structured, "call", "OOO", tuple,
                               c->out_arg ? c->out_arg : Py_None, stream ? stream : Py_None);
  Py_DECREF(tuple);
  return result;
}

PyObject *pmpy_call_refuse(const call *c) {
  PyObject *o = c->args[c->n_in];
  if (PMPY_IS_TRACED(o))
    return PyErr_Format(PyExc_TypeError,
                        "kernel %U: argument %u is a traced value of a kernel's body (%R): a "
                        "kernel cannot be called inside of another one; call its body",
                        c->name, c->n_in, o);
  return PyErr_Format(PyExc_TypeError,
                      "kernel %U: argument %u is a %s, which is no array: NumPy, PyTorch, CuPy and "
                      "JAX arrays, DLPack producers, DeviceArrays and numbers are accepted",
                      c->name, c->n_in, Py_TYPE(o)->tp_name);
}

int pmpy_call_read(call *c, PyObject *name, PyObject *const *args, size_t n, PyObject *out,
                   bool specs) {
  c->k = NULL;
  c->name = name;
  c->plan = NULL;
  c->out_arg = out;
  c->out_tuple = NULL;
  c->n_out_given = 0;
  c->many = NULL;
  c->cuda = c->has_array = c->mixed = false;
  c->in_place = true;
  c->has_stream = c->converted = false;
  c->device = 0;
  c->args = args;
  c->n_in = (uint32_t)n;
  if (take_out(c) < 0) {
    c->n_in = 0;
    return -1;
  }
  return read_all(c, specs);
}

/* The interpreter copies arrays to the host as they lie there. */
static int check_strides(const call *c) {
  PyObject *p = c->k->interpret;
  if (!c->cuda || !p || p == Py_None || p == Py_False) return 0;
  for (uint32_t i = 0; i < c->n_in; i++) {
    char name[32];
    if (!c->in[i].strided) continue;
    PyErr_Format(PyExc_NotImplementedError,
                 "kernel %U: %s is not contiguous in row-major order, and the interpreter takes no "
                 "other arrays of a GPU: pass a contiguous copy",
                 c->name, pmpy_which((int)i, name));
    return -1;
  }
  return 0;
}

/* Once for each kernel. */
static int warn_converted(const call *c) {
  uint32_t i = 0;
  char name[32];
  if (c->k->has_warned) return 0;
  while (!c->in[i].was) i++;
  const int code = PyErr_WarnFormat(
      PyExc_UserWarning, 1,
      "kernel %U: %s of %s was converted to %s, as kernels have no dtypes of 64 bits. Cast it "
      "before, for example by x.astype('%s'), to save the copy. Later calls of this kernel do not "
      "say so again",
      c->name, pmpy_which((int)i, name), c->in[i].was, pm_dtypes[c->in[i].dtype].text,
      pm_dtypes[c->in[i].dtype].text);
  c->k->has_warned = code == 0;
  return code;
}

PyObject *pmpy_call_run(call *c, PyObject *k) {
  c->k = (kernel *)k;
  if (check_strides(c) < 0) return NULL;
  if (c->converted && warn_converted(c) < 0) return NULL;
  if (choose_target(c) < 0 || find_plan(c) < 0 || check_outputs(c) < 0) return NULL;
  return dispatch(c);
}

static PyObject *kernel_call(PyObject *self, PyObject *const *args, size_t nargsf,
                             PyObject *kwnames) {
  kernel *k = (kernel *)self;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf), n_kw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  PyObject *out = NULL, *stream = NULL, *result = NULL;
  for (Py_ssize_t i = 0; i < n_kw; i++) {
    PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = args[n + i];
    const pmpy_keyword what = pmpy_keyword_of(name);
    if (what == PMPY_KW_OTHER)
      return PyErr_Format(PyExc_TypeError,
                          "kernel %U: unknown argument %R; only out= and stream= are given by name",
                          k->name, name);
    if (value != Py_None) *(what == PMPY_KW_OUT ? &out : &stream) = value;
  }
  call c;
  int code = pmpy_call_read(&c, k->name, args, (size_t)n, out, false);
  if (code >= 0 && pmpy_call_stream(&c, stream) < 0) code = -1;
  if (!code) result = k->structured ? call_structured(k, &c, n, stream) : pmpy_call_refuse(&c);
  else if (code > 0 && pmpy_call_locate(&c) == 0) result = pmpy_call_run(&c, self);
  pmpy_call_end(&c);
  return result;
}

/* ---- lower -------------------------------------------------------------------------------- */

/* What to lower for: what the user says, or what the calls on host arrays would run on. */
static int read_target(call *c, PyObject *given) {
  char why[512];
  PMPY_ERR(err);
  c->target = NULL;
  c->may_fall_back = given == Py_None;
  if (given == Py_None) {
    const int device = pmpy_fitting_device(why, sizeof why);
    if (device < 0 || !pm_device_target(device, &c->target, &err)) return 0;
    return pmpy_raise(&err), -1;
  }
  return pmpy_target(given, &c->target);
}

static PyObject *kernel_lower(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"target", NULL};
  PyObject *target = Py_None, *empty = PyTuple_New(0);
  kernel *k = (kernel *)self;
  call c;
  if (!empty) return NULL;
  int ok = PyArg_ParseTupleAndKeywords(empty, kw, "|$O:lower", names, &target);
  Py_DECREF(empty);
  if (!ok || read_target(&c, target) < 0) return NULL;
  PyObject *result = NULL;
  int code = pmpy_call_read(&c, k->name, &PyTuple_GET_ITEM(args, 0), (size_t)PyTuple_GET_SIZE(args),
                            NULL, true);
  c.k = k;
  if (!code && k->structured)
    result = PyObject_CallMethod(k->structured, "lower", "OO", args, target);
  else if (!code) result = pmpy_call_refuse(&c);
  else if (code > 0) result = (PyObject *)trace(&c, true);
  pmpy_call_end(&c);
  return result;
}

/* ---- the type ----------------------------------------------------------------------------- */

/* Borrowed; NULL where absent or None. Its owner is the dict. */
static PyObject *option(PyObject *options, const char *name) {
  PyObject *o = PyDict_GetItemString(options, name);
  return o == Py_None ? NULL : o;
}

static int set_container(kernel *k, PyObject *o) {
  static const char *const names[] = {[SINGLE] = "single", [TUPLE] = "tuple", [LIST] = "list"};
  k->container = SINGLE;
  for (size_t i = 0; o && i < PM_COUNT(names); i++)
    if (PyUnicode_Check(o) && !PyUnicode_CompareWithASCIIString(o, names[i])) {
      k->container = (container)i;
      return 0;
    }
  if (o) PyErr_Format(PyExc_ValueError, "Kernel: outputs must be single, tuple or list, got %R", o);
  return o ? -1 : 0;
}

/* Kernel(name, trace, options). Options: interpret, outputs (single, tuple, list), unflatten,
 * structured, progress; others are ignored. */
static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"name", "trace", "options", NULL};
  PyObject *name, *trace, *options = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "UO|O!:Kernel", names, &name, &trace, &PyDict_Type,
                                   &options))
    return NULL;
  kernel *k = (kernel *)type->tp_alloc(type, 0);
  if (!k) return NULL;
  k->vectorcall = kernel_call;
  k->name = Py_NewRef(name);
  k->trace = Py_NewRef(trace);
  k->options = options ? PyDict_Copy(options) : PyDict_New();
  if (!k->options || set_container(k, option(k->options, "outputs")) < 0) {
    Py_DECREF(k);
    return NULL;
  }
  k->interpret = option(k->options, "interpret");
  k->unflatten = option(k->options, "unflatten");
  k->structured = option(k->options, "structured");
  k->progress = option(k->options, "progress");
  return (PyObject *)k;
}

static int kernel_traverse(PyObject *self, visitproc visit, void *arg) {
  kernel *k = (kernel *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(k->dict);
  Py_VISIT(k->trace);
  Py_VISIT(k->options);
  return 0;
}

static int kernel_clear(PyObject *self) {
  kernel *k = (kernel *)self;
  k->interpret = k->unflatten = k->structured = k->progress = NULL;
  Py_CLEAR(k->dict);
  Py_CLEAR(k->trace);
  Py_CLEAR(k->options);
  return 0;
}

static void kernel_dealloc(PyObject *self) {
  kernel *k = (kernel *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (k->weakrefs) PyObject_ClearWeakRefs(self);
  kernel_clear(self);
  pmpy_plans_clear(&k->plans);
  Py_XDECREF(k->name);
  type->tp_free(self);
  Py_DECREF(type);
}

/* New: definition.method(); NULL without an exception where there is no definition. */
static PyObject *ask_definition(PyObject *self, const char *method) {
  PyObject *dict = ((kernel *)self)->dict;
  PyObject *definition = dict ? PyDict_GetItemString(dict, "definition") : NULL;
  return definition ? PyObject_CallMethod(definition, method, NULL) : NULL;
}

static PyObject *kernel_repr(PyObject *self) {
  PyObject *text = ask_definition(self, "describe");
  if (text || PyErr_Occurred()) return text;
  return PyUnicode_FromFormat("<pallas_mgpu kernel %U>", ((kernel *)self)->name);
}

/* __signature__ is made when it is asked for: few kernels are. */
static PyObject *kernel_getattr(PyObject *self, PyObject *name) {
  PyObject *found = PyObject_GenericGetAttr(self, name);
  if (found || PyUnicode_CompareWithASCIIString(name, "__signature__") ||
      !PyErr_ExceptionMatches(PyExc_AttributeError))
    return found;
  PyErr_Clear();
  found = ask_definition(self, "signature");
  if (!found && !PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
  return found;
}

static PyObject *get_name(PyObject *self, void *unused) {
  (void)unused;
  return Py_NewRef(((kernel *)self)->name);
}

PyObject *pmpy_reduce(PyObject *self, PyObject *unused) {
  (void)unused;
  PyObject *hook = pmpy_hook(PMPY_HOOK_PICKLE);
  return hook ? PyObject_CallOneArg(hook, self) : NULL;
}

/* A kernel is a function: copies of what holds it share it. */
static PyObject *kernel_copy(PyObject *self, PyObject *memo) {
  (void)memo;
  return Py_NewRef(self);
}

static PyMethodDef methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "For annotations: Kernel[P, R]."},
    {"__reduce__", pmpy_reduce, METH_NOARGS, "By the name that the kernel has in a module."},
    {"__copy__", kernel_copy, METH_NOARGS, "The kernel itself."},
    {"__deepcopy__", kernel_copy, METH_O, "The kernel itself."},
    {"lower", (PyCFunction)(void (*)(void))kernel_lower, METH_VARARGS | METH_KEYWORDS,
     "lower(*args, target=None): trace and lower for arguments like these, without running. They "
     "may be arrays or anything with shape and dtype. target: 'sm_90a', 'sm_100a' ..., of which no "
     "GPU is needed; None: the GPU that kernels on host arrays run on, or the first that has what "
     "the kernel needs."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef getset[] = {
    {"name", get_name, NULL, "name of the kernel", NULL},
    {"__name__", get_name, NULL, "name of the kernel", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(kernel, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(kernel, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(kernel, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, kernel_new},
                              {Py_tp_dealloc, kernel_dealloc},
                              {Py_tp_traverse, kernel_traverse},
                              {Py_tp_clear, kernel_clear},
                              {Py_tp_call, PyVectorcall_Call},
                              {Py_tp_repr, kernel_repr},
                              {Py_tp_getattro, kernel_getattr},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {Py_tp_members, members},
                              {Py_tp_doc, "A kernel as a callable on arrays."},
                              {0, NULL}};

static PyType_Spec type_spec = {.name = "pallas_mgpu.Kernel",
                                .basicsize = sizeof(kernel),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = slots};

static PyMethodDef functions[] = {
    {"clear_plans", pmpy_plans_clear_all, METH_NOARGS,
     "Drop all traced and compiled kernels; calls make them anew."},
    {"plan_memory", pmpy_plans_size, METH_NOARGS,
     "Number of traced kernels (plans), and bytes of host memory that they take."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_kernel(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
  if (!type) return -1;
  pmpy.kernel_type = (PyTypeObject *)type;
  if (PyModule_AddObjectRef(module, "Kernel", type) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
