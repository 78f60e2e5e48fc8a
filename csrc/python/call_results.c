/* What the ways to run a call share: its stream, its outputs, and what it returns. */
#include "kernel.h"

int pmpy_call_find_stream(const pmpy_call *c, int device, void **stream) {
  PMPY_ERR(err);
  *stream = c->stream;
  if (c->has_stream) return 0;
  if (c->cuda) return pmpy_current_stream(c->home, device, stream);
  if (!pm_private_stream(device, stream, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

int pmpy_call_outputs(const pmpy_call *c, void *stream, PyObject **made, uint64_t *ptr) {
  for (uint32_t i = 0; i < c->plan->n_out; i++) {
    if (c->out_arg) {
      ptr[i] = c->out[i].ptr;
      continue;
    }
    made[i] = pmpy_result(c->home, &c->specs[i], c->cuda, c->device, stream, &ptr[i]);
    if (made[i]) continue;
    while (i) Py_DECREF(made[--i]);
    return -1;
  }
  return 0;
}

PyObject *pmpy_call_drop(const pmpy_call *c, PyObject **made) {
  for (uint32_t i = 0; i < c->plan->n_out && !c->out_arg; i++) Py_DECREF(made[i]);
  return NULL;
}

/* New: what the call returns. Steals the items. */
static PyObject *pack(const pmpy_call *c, PyObject **items, uint32_t n) {
  pmpy_kernel *k = c->k;
  if (k->container == PMPY_SINGLE && n == 1 && !k->unflatten) return items[0];
  PyObject *all = k->container == PMPY_LIST && !k->unflatten ? PyList_New(n) : PyTuple_New(n);
  for (uint32_t i = 0; i < n; i++) {
    if (!all) Py_DECREF(items[i]);
    else if (PyList_CheckExact(all)) PyList_SET_ITEM(all, i, items[i]);
    else PyTuple_SET_ITEM(all, i, items[i]);
  }
  if (all && k->unflatten) Py_SETREF(all, PyObject_CallOneArg(k->unflatten, all));
  return all;
}

PyObject *pmpy_call_finish(const pmpy_call *c, PyObject **made) {
  uint32_t n = c->plan->n_out;
  if (c->out_arg) {
    for (uint32_t i = 0; i < n; i++) {
      if (c->out[i].source->library == PMPY_TORCH && pmpy_torch_written(c->out_args[i]) < 0)
        return NULL;
    }
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
