/* One call of a kernel, up to where it runs.
 *
 * Arguments are read as memory (exchange.c), and the plan for their dtypes and shapes is found by
 * their signature (a miss traces, by calling Python). It runs on the GPU if the arrays are there;
 * for host arrays on a GPU that fits, or else on the interpreter, or where one of them was asked
 * for: there, or on the emulated machine. A hit on arrays that are in place
 * is one pass over the arguments, one hash, and the launch; no Python code runs and nothing is
 * awaited.
 */
#include "kernel.h"

#include "../base/env.h"

/* ---- arguments ----------------------------------------------------------------------------- */

void pmpy_call_clear(pmpy_call *c) {
  c->n_in = c->n_out_given = 0;
  c->many = NULL;
  c->own_specs = NULL;
  c->out_tuple = NULL;
  c->plan = NULL;
}

void pmpy_call_end(pmpy_call *c) {
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    pmpy_buffer *b = &c->in[i];
    if (b->keep || b->managed || b->managed_old) pmpy_release(b);
  }
  if (c->many) PyMem_Free(c->many);
  PyMem_Free(c->own_specs);
  Py_XDECREF(c->out_tuple);
  Py_XDECREF((PyObject *)c->plan);
  pmpy_call_clear(c);
}

static bool is_number(const pmpy_buffer *b) { return !b->cuda && b->rank == 0; }

static int refuse_mixture(const pmpy_call *c, int a, int b, const char *why) {
  char x[32], y[32];
  PyErr_Format(PyExc_TypeError, "kernel %U: %s and %s %s", c->name, pmpy_which(a, x),
               pmpy_which(b, y), why);
  return -1;
}

/* Index of buffer i for messages: outputs count down from -1. */
static int which(const pmpy_call *c, uint32_t i) {
  return i < c->n_in ? (int)i : -(int)(i - c->n_in) - 1;
}

/* Numbers (rank 0 on the host) go anywhere. */
int pmpy_call_locate(pmpy_call *c) {
  uint32_t first = 0;
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    const pmpy_buffer *b = &c->in[i];
    if (b->source->library == PMPY_NONE || is_number(b)) continue;
    if (!c->has_array) {
      c->has_array = true;
      c->home = b->source;
      c->cuda = b->cuda;
      c->device = b->device;
      first = i;
      continue;
    }
    if (b->cuda != c->cuda)
      return refuse_mixture(
          c, which(c, first), which(c, i),
          "are in different memories: one on the host, one on the GPU. Move one of "
          "them, for example by pallas_mgpu.device_put");
    if (b->device != c->device)
      return refuse_mixture(c, which(c, first), which(c, i), "lie on different GPUs");
    if (b->source->library == c->home->library) continue;
    if (!c->out_arg)
      return refuse_mixture(c, which(c, first), which(c, i),
                            "come from different libraries, so the kind of the result is unknown: "
                            "convert one of them, or give out=");
    c->mixed = true;
    if (c->home->library == PMPY_DEVICE_ARRAY || c->home->library == PMPY_NUMPY)
      c->home = b->source; /* the one with a stream of its own */
  }
  if (c->has_array) return 0;
  c->home = &pmpy_numpy_source;
  for (uint32_t i = 0; i < c->n_in; i++)
    if (c->in[i].source->library != PMPY_NONE) {
      c->home = c->in[i].source;
      break;
    }
  return 0;
}

/* Split out= into arrays. */
static int take_out(pmpy_call *c) {
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

/* Room for all buffers and those of views; on failure there is nothing to release. */
static int make_room(pmpy_call *c) {
  size_t n = c->n_in + (size_t)c->n_out_given;
  c->in = c->few;
  if (n + PMPY_MOST_SIZES > PMPY_FEW) {
    const size_t most = n + PMPY_MOST_SIZES;
    c->many = n <= PMPY_MAX_PARAMS ? PyMem_Malloc(most * sizeof *c->many) : NULL;
    c->in = c->many;
  }
  c->out = c->in + c->n_in;
  if (c->in) return 0;
  if (n <= PMPY_MAX_PARAMS) PyErr_NoMemory();
  else
    PyErr_Format(PyExc_NotImplementedError,
                 "kernel %U: %u arguments and %u arrays as out= were given; at most %d arrays in "
                 "all are supported",
                 c->name, c->n_in, c->n_out_given, PMPY_MAX_PARAMS);
  c->n_in = c->n_out_given = 0;
  return -1;
}

/* 1: all read, 0: an argument is nested or no array (its index is n_in then), -1: exception */
static int read_all(pmpy_call *c, bool specs) {
  if (make_room(c) < 0) return -1;
  uint32_t n_in = c->n_in, n_out = c->n_out_given;
  c->n_out_given = 0; /* what is read is what pmpy_call_end releases */
  for (c->n_in = 0; c->n_in < n_in; c->n_in++) {
    const pmpy_purpose purpose = specs ? PMPY_SPEC : c->for_xla ? PMPY_FOR_XLA : PMPY_INPUT;
    int code = pmpy_read(c->args[c->n_in], (int)c->n_in, purpose, &c->in[c->n_in]);
    if (code <= 0) return code;
    c->converted |= c->in[c->n_in].was != NULL;
    if (c->in[c->n_in].source->library == PMPY_TORCH && !specs && !c->recorded)
      c->recorded = pmpy_torch_records(c->args[c->n_in]);
  }
  for (; c->n_out_given < n_out; c->n_out_given++) {
    uint32_t i = c->n_out_given;
    int code = pmpy_read(c->out_args[i], -(int)i - 1, PMPY_OUTPUT, &c->out[i]);
    if (code > 0) {
      if (c->out[i].source->library == PMPY_TORCH && !specs && !c->recorded)
        c->recorded = pmpy_torch_records(c->out_args[i]);
      continue;
    }
    if (!code)
      PyErr_Format(PyExc_TypeError, "kernel %U: out[%u] is a %s, which is no array", c->name, i,
                   Py_TYPE(c->out_args[i])->tp_name);
    return -1;
  }
  return 1;
}

int pmpy_call_read(pmpy_call *c, PyObject *name, PyObject *const *args, size_t n, PyObject *out,
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
  c->has_stream = c->converted = c->recorded = false;
  c->specs = c->own_specs = NULL;
  c->views = NULL;
  c->device = 0;
  c->args = args;
  c->n_in = c->n_args = (uint32_t)n;
  if (take_out(c) < 0) {
    c->n_in = 0;
    return -1;
  }
  return read_all(c, specs);
}

PyObject *pmpy_call_refuse(const pmpy_call *c) {
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

/* ---- plans -------------------------------------------------------------------------------- */

/* New: ((shape, dtype), ...) of the arguments */
static PyObject *specs_of(const pmpy_call *c) {
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

pmpy_plan *pmpy_call_trace(const pmpy_call *c, bool keep_text) {
  const pm_target *before = pmpy_traced_for;
  PyObject *specs = specs_of(c);
  pmpy_traced_for = c->target;
  PyObject *traced = specs ? PyObject_CallOneArg(c->k->trace, specs) : NULL;
  pmpy_traced_for = before;
  pmpy_plan *p =
      traced ? pmpy_plan_new(traced, c->in, c->n_in, c->target, !c->may_fall_back, keep_text)
             : NULL;
  Py_XDECREF(traced);
  Py_XDECREF(specs);
  return p;
}

/* The arrays, and what else decides what is traced and lowered. */
static int make_signature(const pmpy_call *c, pmpy_new_signature *s) {
  int64_t *at = pmpy_signature_begin(s, pmpy_sign_most(c->n_in) + 1);
  if (!at) return -1;
  for (uint32_t i = 0; i < c->n_in; i++) {
    int64_t *const begin = at;
    at = pmpy_sign(at, &c->in[i], false);
    const uint8_t open = i < c->k->n_open ? c->k->open[i] : 0;
    for (int d = 0; open && d < c->in[i].rank; d++)
      if (open >> d & 1) begin[1 + d] = -1;
  }
  *at++ = pmpy.trace_flags | (c->target ? c->target - pm_targets + 1 : 0) << 8;
  pmpy_signature_end(s, at);
  return 0;
}

static int find_plan(pmpy_call *c) {
  pmpy_new_signature s;
  if (make_signature(c, &s) < 0) return -1;
  c->plan = pmpy_plans_find(&c->k->plans, &s.is);
  if (c->plan && !c->may_fall_back && c->target && c->plan->graph->g->target != c->target) {
    /* lowered for the interpreter: the reason is raised */
    Py_SETREF(c->plan, pmpy_call_trace(c, false));
  } else if (!c->plan && (c->plan = pmpy_call_trace(c, false))) {
    if (pmpy_signature_copy(&c->plan->signature, &s.is) < 0 ||
        pmpy_plans_add(&c->k->plans, c->plan) < 0)
      Py_CLEAR(c->plan);
  }
  pmpy_signature_drop(&s);
  return c->plan ? 0 : -1;
}

/* ---- sizes of a call ------------------------------------------------------------------------- */

static const int64_t *shape_of(const void *ctx, uint32_t operand) {
  return ((const pmpy_call *)ctx)->in[operand].shape;
}

/* What a plan with open sizes leaves to a call: the sizes, and the outputs' extents. 0 or -1 */
static int find_sizes(pmpy_call *c) {
  PMPY_ERR(err);
  const pm_graph *g = c->plan->graph->g;
  const uint32_t n = c->plan->n_out + c->plan->n_scratch;
  const pm_shapes shapes = {shape_of, c};
  if (pm_eval_sizes(g, &shapes, c->sizes, &err)) {
    pmpy_raise(&err);
    return -1;
  }
  c->own_specs = PyMem_Malloc((n + 1) * sizeof *c->own_specs);
  if (!c->own_specs) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(c->own_specs, c->plan->out, n * sizeof *c->own_specs);
  for (uint32_t i = 0; i < n; i++) pm_bound_shape(g, c->n_in + i, c->sizes, c->own_specs[i].shape);
  c->specs = c->own_specs;
  return 0;
}

/* ---- outputs ------------------------------------------------------------------------------ */

static PyObject *text_of_spec(const pmpy_spec *s) {
  PyObject *shape = pmpy_spec_shape(s);
  PyObject *text =
      shape ? PyUnicode_FromFormat("%s of shape %R", pm_dtypes[s->dtype].text, shape) : NULL;
  Py_XDECREF(shape);
  return text;
}

PyObject *pmpy_text_of_buffer(const pmpy_buffer *b) {
  pmpy_spec given = {.dtype = b->dtype, .rank = b->rank};
  memcpy(given.shape, b->shape, sizeof given.shape);
  return text_of_spec(&given);
}

static int check_outputs(const pmpy_call *c) {
  if (!c->out_arg) return 0;
  if (c->n_out_given != c->plan->n_out) {
    PyErr_Format(PyExc_TypeError, "kernel %U: out has %u arrays, and the kernel has %u output%s",
                 c->name, c->n_out_given, c->plan->n_out, c->plan->n_out == 1 ? "" : "s");
    return -1;
  }
  for (uint32_t i = 0; i < c->n_out_given; i++) {
    const pmpy_buffer *b = &c->out[i];
    const pmpy_spec *s = &c->specs[i];
    if (b->dtype == s->dtype && b->rank == s->rank &&
        !memcmp(b->shape, s->shape, b->rank * sizeof *b->shape))
      continue;
    PyObject *want = text_of_spec(s), *got = pmpy_text_of_buffer(b);
    if (want && got)
      PyErr_Format(PyExc_ValueError, "kernel %U: out[%u] must be %U; got %U", c->name, i, want,
                   got);
    Py_XDECREF(got);
    Py_XDECREF(want);
    return -1;
  }
  return pmpy_call_check_overlap(c);
}

/* ---- views --------------------------------------------------------------------------------- */

static int64_t count(const int64_t *shape, int rank) {
  int64_t n = 1;
  for (int d = 0; d < rank; d++) n *= shape[d];
  return n;
}

/* Dimensions that are one run of memory are merged, and runs are divided. */
bool pmpy_restride(pmpy_buffer *b, const pmpy_spec *to) {
  int64_t stride[PM_MAX_RANK] = {0}, expected = 1;
  int d = b->rank - 1, t = to->rank - 1;
  bool strided = false;
  for (;;) {
    while (d >= 0 && b->shape[d] == 1) d--;
    while (t >= 0 && to->shape[t] == 1) t--;
    if (d < 0 || t < 0) break;
    int64_t run = b->shape[d], step = b->stride[d], made = 1;
    for (; d > 0 && (b->shape[d - 1] == 1 || b->stride[d - 1] == run * step); d--)
      run *= b->shape[d - 1];
    d--;
    for (; t >= 0 && made < run; t--) {
      if (to->shape[t] != 1) stride[t] = step * made;
      made *= to->shape[t];
    }
    if (made != run) return false;
  }
  for (int k = to->rank - 1; k >= 0; k--) {
    strided |= to->shape[k] != 1 && stride[k] != expected;
    expected *= to->shape[k];
  }
  b->strided = strided;
  memcpy(b->stride, stride, sizeof b->stride);
  return true;
}

/* Beginnings of the first operand become the last ones; 0 or -1. */
static int add_sizes(pmpy_call *c) {
  const pmpy_views *v = c->views;
  const int64_t n = count(c->in[0].shape, c->in[0].rank);
  memmove(c->out + v->n_sizes, c->out, c->n_out_given * sizeof *c->out);
  c->out += v->n_sizes;
  for (uint32_t i = 0; i < v->n_sizes; i++) {
    pmpy_buffer *b = &c->in[c->n_in++];
    *b = c->in[0];
    b->keep = NULL; /* the first operand has the memory */
    b->managed = NULL;
    b->managed_old = NULL;
    b->strided = false;
    b->rank = 1;
    b->shape[0] = v->sizes[i];
  }
  for (uint32_t i = 0; i < v->n_sizes; i++)
    if (v->sizes[i] > n) {
      PyErr_Format(PyExc_ValueError, "kernel %U: the first operand has fewer than %lld elements",
                   c->name, (long long)v->sizes[i]);
      return -1;
    }
  return 0;
}

/* The extents that were read give way to those that the kernel sees; 0 or -1. */
static int reshape_operands(pmpy_call *c) {
  const pmpy_views *v = c->views;
  if (c->n_in != v->n_in) {
    PyErr_Format(PyExc_TypeError, "kernel %U: %u arrays are needed, got %u", c->name, v->n_in,
                 c->n_in);
    return -1;
  }
  for (uint32_t i = 0; i < v->n_in; i++) {
    pmpy_buffer *b = &c->in[i];
    const pmpy_spec *to = &v->shape[i];
    const int64_t n = count(b->shape, b->rank), needed = count(to->shape, to->rank);
    char name[32];
    if (!v->given[i]) continue;
    if (n != needed) {
      PyErr_Format(PyExc_ValueError, "kernel %U: %s must have %lld elements, got %lld", c->name,
                   pmpy_which((int)i, name), (long long)needed, (long long)n);
      return -1;
    }
    if (b->strided && !pmpy_restride(b, to)) {
      PyErr_Format(PyExc_ValueError, "kernel %U: %s is not contiguous: pass a contiguous copy",
                   c->name, pmpy_which((int)i, name));
      return -1;
    }
    b->rank = to->rank;
    memcpy(b->shape, to->shape, sizeof b->shape);
  }
  return add_sizes(c);
}

/* The same for the results, once the plan is known. */
static int reshape_results(pmpy_call *c) {
  const pmpy_views *v = c->views;
  const uint32_t n_out = c->plan->n_out, n = n_out + c->plan->n_scratch;
  if (!c->own_specs) {
    c->own_specs = PyMem_Malloc((n + 1) * sizeof *c->own_specs);
    if (!c->own_specs) return PyErr_NoMemory(), -1;
    memcpy(c->own_specs, c->plan->out, n * sizeof *c->own_specs);
    c->specs = c->own_specs;
  }
  for (uint32_t i = 0; i < n_out && i < v->n_out; i++) {
    pmpy_spec *s = &c->own_specs[i];
    const pmpy_spec *to = &v->shape[v->n_in + i];
    if (!v->given[v->n_in + i]) continue;
    if (count(s->shape, s->rank) != count(to->shape, to->rank)) {
      PyErr_Format(PyExc_ValueError, "kernel %U: result %u has other elements than its shape",
                   c->name, i);
      return -1;
    }
    s->rank = to->rank;
    memcpy(s->shape, to->shape, sizeof s->shape);
  }
  return 0;
}

/* ---- where it runs ------------------------------------------------------------------------- */

/* Warn once per process that host arrays go to the interpreter. */
static int warn_fallback(const char *why) {
  static bool warned;
  if (warned) return 0;
  warned = true;
  return PyErr_WarnFormat(
      PyExc_UserWarning, 1,
      "kernels on host arrays run on the CPU interpreter, because no GPU can be "
      "used: %s. Set PALLAS_MGPU_BACKEND=interpret if this is intended",
      why);
}

/* Where kernels on host arrays run; 0 or -1. */
static int choose_backend(pmpy_call *c) {
  const char *asked = pm_env(PM_ENV_BACKEND);
  char why[512] = "";
  c->emulated = !strcmp(asked, "emulate");
  if (c->emulated || !strcmp(asked, "interpret")) return 0;
  if (strcmp(asked, "auto") && strcmp(asked, "cuda")) {
    PyErr_Format(PyExc_ValueError, "%s: got %.80s; auto, cuda, interpret and emulate are accepted",
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
static int choose_target(pmpy_call *c) {
  PMPY_ERR(err);
  PyObject *p = c->k->interpret;
  c->runs_on = -1;
  c->target = NULL;
  c->may_fall_back = c->emulated = false;
  if (p && p != Py_None && p != Py_False) {
    c->emulated = pmpy_attribute_is(p, "backend", "emulate") > 0;
    if (PyErr_Occurred()) return -1;
  } else if (c->cuda) {
    c->runs_on = c->device;
  } else if (choose_backend(c) < 0) {
    return -1;
  }
  const pm_code code = c->runs_on < 0 ? pm_asked_target(&c->target, &err)
                                      : pm_device_target(c->runs_on, &c->target, &err);
  return code ? pmpy_raise(&err), -1 : 0;
}

static PyObject *dispatch(pmpy_call *c) {
  const pm_target *t = c->plan->graph->g->target;
  char why[128];
  if (c->runs_on < 0) return c->emulated ? pmpy_calls_emulator(c, 1) : pmpy_call_interpreter(c);
  if (t == c->target) return pmpy_call_gpu(c, c->runs_on);
  snprintf(why, sizeof why, "the GPU is %s, and a kernel needs what %s has", c->target->text,
           t->text);
  return warn_fallback(why) < 0 ? NULL : pmpy_call_interpreter(c);
}

/* The interpreter copies arrays to the host as they lie there. */
static int check_strides(const pmpy_call *c) {
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
static int warn_converted(const pmpy_call *c) {
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

int pmpy_call_plan(pmpy_call *c, PyObject *k) {
  c->k = (pmpy_kernel *)k;
  if (c->views && reshape_operands(c) < 0) return -1;
  if (check_strides(c) < 0) return -1;
  if (c->converted && warn_converted(c) < 0) return -1;
  if (choose_target(c) < 0 || find_plan(c) < 0) return -1;
  c->specs = c->plan->out;
  if (c->plan->graph->g->sizes.n && find_sizes(c) < 0) return -1;
  if (c->views && reshape_results(c) < 0) return -1;
  return check_outputs(c);
}

PyObject *pmpy_call_run(pmpy_call *c, PyObject *k) {
  return pmpy_call_plan(c, k) < 0 ? NULL : dispatch(c);
}
