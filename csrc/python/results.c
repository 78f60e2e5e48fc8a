/* Arrays for the results of calls: made by the exchange API of the operands' library, by torch or
 * CuPy, whose memory is then reused in the order of their streams; else a DeviceArray or a NumPy
 * array, of which pmpy_finish makes one of that library. */
#include "exchange.h"

static void set_error(void *ctx, const char *kind, const char *message) {
  (void)ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  bool memory = strstr(kind, "Memory") || strstr(message, "out of memory");
  PyErr_Format(memory ? pmpy.exceptions[PM_E_DEVICE_MEMORY] : PyExc_RuntimeError, "%s: %s", kind,
               message);
  PyGILState_Release(gil);
}

static PyObject *result_by_api(const DLPackExchangeAPI *api, const pmpy_spec *spec, bool cuda,
                               int device, uint64_t *ptr) {
  int64_t shape[PM_MAX_RANK], strides[PM_MAX_RANK], stride = 1;
  DLTensor prototype = {.device = {cuda ? kDLCUDA : kDLCPU, cuda ? device : 0},
                        .ndim = spec->rank,
                        .dtype = {pm_dtypes[spec->dtype].dlpack, pm_dtypes[spec->dtype].bits, 1},
                        .shape = shape,
                        .strides = strides};
  DLManagedTensorVersioned *made = NULL;
  void *out = NULL;
  for (int i = spec->rank - 1; i >= 0; i--) {
    shape[i] = spec->shape[i];
    strides[i] = stride;
    stride *= pm_max(shape[i], 1);
  }
  if (api->managed_tensor_allocator(&prototype, &made, NULL, set_error) || !made) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the array library gave no array");
    return NULL;
  }
  *ptr = (uint64_t)(uintptr_t)made->dl_tensor.data + made->dl_tensor.byte_offset;
  if (api->managed_tensor_to_py_object_no_sync(made, &out)) return NULL;
  return out;
}

/* New: an array of CuPy on its current device; NULL without an exception where that is another one,
 * CuPy has no such dtype, or another reason, which the way by DLPack tells. */
static PyObject *cupy_empty(const pmpy_spec *spec, int device, uint64_t *ptr) {
  static PyObject *_Atomic type; /* cupy.ndarray, kept for good */
  if (!type) {
    PyObject *module = PyImport_ImportModule("cupy");
    if (module) type = PyObject_GetAttrString(module, "ndarray");
    Py_XDECREF(module);
  }
  PyObject *args[2] = {pmpy_spec_shape(spec), pmpy_dtype_object((pm_dtype)spec->dtype)};
  PyObject *made = type && args[0] && args[1] ? PyObject_Vectorcall(type, args, 2, NULL) : NULL;
  PyObject *data = made ? PyObject_GetAttrString(made, "data") : NULL;
  PyObject *at = data ? PyObject_GetAttrString(data, "ptr") : NULL;
  PyObject *on = data ? PyObject_GetAttrString(data, "device_id") : NULL;
  if (at && on) *ptr = (uint64_t)(uintptr_t)PyLong_AsVoidPtr(at);
  if (!at || !on || PyLong_AsLong(on) != device || PyErr_Occurred()) Py_CLEAR(made);
  Py_XDECREF(on);
  Py_XDECREF(at);
  Py_XDECREF(data);
  Py_XDECREF(args[1]);
  Py_XDECREF(args[0]);
  PyErr_Clear();
  return made;
}

PyObject *pmpy_result(const pmpy_source *s, const pmpy_spec *spec, bool cuda, int device,
                      void *stream, uint64_t *ptr) {
  if (s->library == PMPY_TORCH) {
    if (pm_dtypes[spec->dtype].bits < 8)
      return PyErr_Format(
          PyExc_NotImplementedError,
          "a result of dtype %s: PyTorch has no tensors of it; pass NumPy arrays or "
          "DeviceArrays",
          pm_dtypes[spec->dtype].text);
    PyObject *tensor = pmpy_torch_empty(s->api, spec, cuda, device, ptr);
    if (tensor) return tensor;
  }
  if (s->api && s->api->managed_tensor_allocator && s->api->managed_tensor_to_py_object_no_sync)
    return result_by_api(s->api, spec, cuda, device, ptr);
  PyObject *made = NULL;
  if (cuda && s->library == PMPY_CUPY) made = cupy_empty(spec, device, ptr);
  if (made) return made;
  if (cuda) {
    made = pmpy_device_array_new(spec, device, stream);
    if (made) *ptr = ((pmpy_device_array *)made)->ptr;
  } else {
    void *data = NULL;
    made = pmpy_numpy_empty(spec, &data);
    *ptr = (uint64_t)(uintptr_t)data;
  }
  return made;
}
