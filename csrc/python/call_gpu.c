/* A call on the GPU: its stream, what other streams must know of it, and the launch.
 *
 * The kernel runs on the current stream of the first array that is not a DeviceArray (or on the
 * legacy default stream), ordered with the streams of the other kinds of arrays among the
 * arguments. Producers whose streams are unknown (JAX and others) keep their arrays until the
 * kernel has finished: `pending` in streams.c holds them. */
#include "kernel.h"

static int check_capture(const pmpy_call *c, int device, void *stream) {
  if (device >= PMPY_MAX_DEVICES || c->plan->kernels[device] ||
      !pm_stream_is_capturing(device, stream))
    return 0;
  PyErr_Format(pmpy.exceptions[PM_E_RUNTIME],
               "kernel %U is not compiled for these arguments yet, and cannot be while the stream "
               "is being captured: call it once before the capture",
               c->name);
  return -1;
}

static bool all_empty(const pmpy_call *c) {
  for (uint32_t i = 0; i < c->plan->n_out; i++)
    if (pmpy_bytes(&c->specs[i])) return false;
  return c->plan->n_out > 0;
}

/* Is GMEM scratch memory of the kind of the results? They are dropped behind the launch, and their
 * library may use the memory again at once, but on the stream of the launch alone. */
static bool has_scratch_of_home(const pmpy_call *c) { return c->cuda && !c->has_stream; }

/* Addresses of all parameters if nothing needs staging. out: with those of scratch. */
static bool direct(const pmpy_call *c, const uint64_t *out, uint64_t *ptr) {
  if (c->plan->n_scratch && !has_scratch_of_home(c)) return false;
  for (uint32_t i = 0; i < c->n_in; i++) {
    if (!c->in[i].cuda) return false;
    ptr[i] = c->in[i].ptr;
  }
  for (uint32_t i = 0; i < c->plan->n_out; i++) {
    if (c->plan->alias && c->plan->alias[i] >= 0) return false;
    ptr[c->n_in + i] = out[i];
  }
  for (uint32_t i = c->plan->n_out; i < c->plan->n_out + c->plan->n_scratch; i++)
    ptr[c->n_in + i] = out[i];
  return c->cuda;
}

static int take_scratch(const pmpy_call *c, void *stream, PyObject **made, uint64_t *ptr) {
  for (uint32_t i = 0; has_scratch_of_home(c) && i < c->plan->n_scratch; i++) {
    const pmpy_spec *spec = &c->specs[c->plan->n_out + i];
    made[i] = pmpy_result(c->home, spec, true, c->device, stream, &ptr[i]);
    if (made[i]) continue;
    while (i) Py_DECREF(made[--i]);
    return -1;
  }
  return 0;
}

static void drop_scratch(const pmpy_call *c, PyObject *const *made) {
  for (uint32_t i = 0; has_scratch_of_home(c) && i < c->plan->n_scratch; i++) Py_DECREF(made[i]);
}

static int launch(const pmpy_call *c, pm_kernel *kernel, int device, void *stream,
                  const uint64_t *out) {
  PMPY_ERR(err);
  pm_code code;
  uint64_t ptr[PMPY_MAX_PARAMS];
  if (direct(c, out, ptr)) {
    Py_BEGIN_ALLOW_THREADS code = pm_kernel_launch(kernel, ptr, c->sizes, stream, &err);
    Py_END_ALLOW_THREADS
  } else {
    pmpy_run r = {.c = c, .on_gpu = true, .device = device, .stream = stream, .kernel = kernel};
    pmpy_run_describe(&r, out);
    Py_BEGIN_ALLOW_THREADS code = pmpy_run_execute(&r, &err);
    Py_END_ALLOW_THREADS
  }
  if (code) pmpy_raise(&err);
  return code ? -1 : 0;
}

/* With stream=: a capture allocates nothing of ours, and copies nothing of the host's. */
static int check_captured_stream(const pmpy_call *c) {
  const char *why = NULL;
  if (!c->cuda) why = "arrays of the host are copied and waited for. Pass arrays of the GPU";
  else if (!c->out_arg && c->home->library != PMPY_TORCH)
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

static int plan_around(const pmpy_call *c, int device, void *stream, PyObject *const *made,
                       around *a) {
  const uint32_t n = c->plan->n_out;
  a->order = c->mixed;
  a->hold = c->home->library >= PMPY_JAX || c->mixed;
  a->to_default =
      c->cuda && !c->out_arg && n && stream && Py_TYPE(made[0]) == pmpy.device_array_type;
  a->home = false;
  if (!c->has_stream && !c->mixed) return 0;
  if (pm_stream_is_capturing(device, stream)) { /* other streams are not part of the capture */
    *a = (around){0};
    return c->has_stream ? check_captured_stream(c) : 0;
  }
  if (!c->has_stream) return 0;
  a->order = a->hold = c->cuda;
  a->home = c->cuda && (!c->out_arg || c->mixed);
  return 0;
}

static int launch_around(pmpy_call *c, pm_kernel *kernel, int device, void *stream,
                         const uint64_t *out, PyObject *const *made) {
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

PyObject *pmpy_call_gpu(pmpy_call *c, int device) {
  PyObject *made[PMPY_MAX_PARAMS], *scratch[PMPY_MAX_PARAMS];
  uint64_t out[PMPY_MAX_PARAMS];
  void *stream = NULL;
  if (pmpy_call_find_stream(c, device, &stream) < 0 || check_capture(c, device, stream) < 0)
    return NULL;
  pm_kernel *kernel = pmpy_plan_kernel(c->plan, device);
  if (!kernel) return NULL;
  if (pmpy_call_outputs(c, stream, made, out) < 0) return NULL;
  if (take_scratch(c, stream, scratch, out + c->plan->n_out) < 0) return pmpy_call_drop(c, made);
  const bool good = all_empty(c) || !launch_around(c, kernel, device, stream, out, made);
  drop_scratch(c, scratch);
  return good ? pmpy_call_finish(c, made) : pmpy_call_drop(c, made);
}
