/* Staging: arrays that are not where the kernel runs, that are unpacked, or that begin as a copy of
 * an operand are moved to memory of the call's own, and back afterwards. */
#include "kernel.h"

/* The operand that output i begins as, or -1 */
static int32_t alias_of(const pmpy_run *r, uint32_t i) {
  return r->c->plan->alias ? r->c->plan->alias[i - r->c->n_in] : -1;
}

static void *host(uint64_t address) { return (void *)(uintptr_t)address; }

/* Memory that the kernel alone uses, for the time of the call. */
static bool is_scratch(const pmpy_run *r, uint32_t i) {
  return i >= r->c->n_in + r->c->plan->n_out;
}

static pm_code take_memory(pmpy_run *r, uint32_t i, pm_err *err) {
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
static pm_code move_small(pmpy_run *r, uint32_t i, uint64_t kernels, bool in, pm_err *err) {
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
static pm_code move_in(pmpy_run *r, uint32_t from, uint32_t to, pm_err *err) {
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
  const size_t n = pmpy_bytes(s), size = pm_dtypes[s->dtype].bytes;
  const int bits = pm_dtypes[s->dtype].bits;
  uint32_t item = zero ? 0 : pm_unwritten((pm_dtype)s->dtype);
  if (bits < 8) item *= 0xff / ((1 << bits) - 1); /* all of the elements in a byte */
  memcpy(at, &item, n < size ? n : size);
  for (size_t done = size; done < n; done *= 2) {
    memcpy((char *)at + done, at, n - done < done ? n - done : done);
  }
}

/* Output i before the run: its operand's contents, the caller's, or nothing. */
static pm_code begin_output(pmpy_run *r, uint32_t i, pm_err *err) {
  const pmpy_call *c = r->c;
  int32_t a = alias_of(r, i);
  if (take_memory(r, i, err)) return err->code;
  if (a >= 0 && r->given[a] != r->given[i]) return move_in(r, (uint32_t)a, i, err);
  if (c->out_arg && !is_scratch(r, i)) return r->staged[i] ? move_in(r, i, i, err) : PM_OK;
  if (!r->on_gpu) fill(&c->specs[i - c->n_in], host(r->ptr[i]), r->options->zero_fill);
  return PM_OK;
}

static pm_code stage_in(pmpy_run *r, pm_err *err) {
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

static pm_code stage_out(pmpy_run *r, pm_err *err) {
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

static void drop_stage(pmpy_run *r) {
  for (uint32_t i = 0; i < r->n; i++) {
    if (!r->staged[i]) continue;
    if (r->on_gpu) pm_device_free(r->device, r->ptr[i], r->stream);
    else pm_free(host(r->ptr[i]));
  }
}

/* On memory of the host, n addresses for one device after the other; an exception is set where it
 * fails. */
static pm_code emulate(const pmpy_run *r, const uint64_t *ptr, uint32_t n, pm_err *err) {
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *at = PyTuple_New(n), *done = NULL;
  for (uint32_t i = 0; at && i < n; i++) {
    PyObject *item = PyLong_FromUnsignedLongLong(ptr[i]);
    if (!item) Py_CLEAR(at);
    else PyTuple_SET_ITEM(at, i, item);
  }
  PyObject *params = r->c->k->interpret ? r->c->k->interpret : Py_None;
  PyObject *fresh = r->c->out_arg ? Py_False : Py_True;
  const uint32_t n_sizes = r->c->plan->graph->g->sizes.n;
  PyObject *sizes = PyTuple_New(n_sizes);
  for (uint32_t k = 0; sizes && k < n_sizes; k++)
    PyTuple_SET_ITEM(sizes, k, PyLong_FromLongLong(k ? r->c->sizes[k] : 0));
  if (at && sizes)
    done = PyObject_CallFunctionObjArgs(r->emulation, params, at, fresh, sizes, NULL);
  const pm_code code = done ? PM_OK : pm_fail(err, PM_E_RUNTIME, "the emulation failed");
  Py_XDECREF(done);
  Py_XDECREF(sizes);
  Py_XDECREF(at);
  PyGILState_Release(gil);
  return code;
}

static pm_code interpret(const pmpy_run *r, const uint64_t *at, pm_err *err) {
  return pmpy_plan_interpret(r->c->plan, (void *const *)at, r->c->sizes, r->options, err);
}

pm_code pmpy_run_execute(pmpy_run *r, pm_err *err) {
  pm_code code = stage_in(r, err);
  if (!code)
    code = r->on_gpu      ? pm_kernel_launch(r->kernel, r->ptr, r->c->sizes, r->stream, err)
           : r->emulation ? emulate(r, r->ptr, r->n, err)
                          : interpret(r, r->ptr, err);
  if (!code) code = stage_out(r, err);
  drop_stage(r);
  return code;
}

pm_code pmpy_runs_execute(pmpy_run *r, uint32_t n, pm_err *err) {
  const uint32_t each = r->n;
  uint64_t *all = pm_malloc((size_t)n * each * sizeof *all + 1);
  pm_code code = all ? PM_OK : pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  for (uint32_t d = 0; d < n && !code; d++) {
    code = stage_in(&r[d], err);
    memcpy(all + (size_t)d * each, r[d].ptr, each * sizeof *all);
  }
  if (!code) code = r->emulation ? emulate(r, all, n * each, err) : interpret(r, all, err);
  for (uint32_t d = 0; d < n && !code; d++) code = stage_out(&r[d], err);
  for (uint32_t d = 0; d < n; d++) drop_stage(&r[d]);
  pm_free(all);
  return code;
}

void pmpy_run_describe(pmpy_run *r, const uint64_t *out) {
  const pmpy_call *c = r->c;
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
    r->bytes[c->n_in + i] = pmpy_bytes(&c->specs[i]);
    r->there[c->n_in + i] = c->cuda;
    const uint8_t d = c->specs[i].dtype;
    if (pm_dtypes[d].bits < 8 && !c->cuda) r->small[c->n_in + i] = d;
  }
}
