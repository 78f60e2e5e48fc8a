/* Arrays for the results of calls: made by the exchange API of the operands' library or by torch,
 * else a DeviceArray or a NumPy array, of which pmpy_finish makes one of that library. */
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
  PyObject *made;
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
