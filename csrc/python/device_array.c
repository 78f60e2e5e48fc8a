/* DeviceArray: a dense array in GPU memory, from our own pool or borrowed through DLPack.
 *
 * Its memory is used in the order of the legacy default stream of its device. On export, the
 * consumer's stream waits for that stream. If it is a different stream, the memory is freed only
 * after the device has finished all work, because there is no notification when the consumer has
 * finished. */
#include "exchange.h"

#include <stddef.h>
#include <structmember.h>

#define DEVICE_ARRAY(o) ((pmpy_device_array *)(o))

static int fail(const pm_err *err) {
  pmpy_raise(err);
  return -1;
}

/* ---- devices ------------------------------------------------------------------------------ */

int pmpy_fitting_device(char *why, size_t size) {
  pm_device_info info;
  pm_err err = {0};
  int n = pm_device_count(why, size);
  for (int i = 0; i < n; i++) {
    if (pm_device_get(i, &info, &err)) {
      snprintf(why, size, "%s", err.text);
      err = (pm_err){0};
      continue;
    }
    if (info.target) return i;
    snprintf(why, size, "%s has compute capability %d.%d, for which kernels are not compiled",
             info.name, info.capability / 10, info.capability % 10);
  }
  return -1;
}

int pmpy_device_ordinal(PyObject *o, int *out) {
  char why[512];
  long n;
  if (!o || o == Py_None) {
    *out = pmpy_fitting_device(why, sizeof why);
    if (*out < 0 && pm_device_count(why, sizeof why) > 0) *out = 0; /* memory needs no target */
    if (*out >= 0) return 0;
    PyErr_Format(pmpy.exceptions[PM_E_DRIVER], "no GPU: %s", why);
    return -1;
  }
  if (PyUnicode_Check(o)) {
    const char *s = PyUnicode_AsUTF8(o);
    char *end = NULL;
    if (!s) return -1;
    n = !strcmp(s, "cuda") ? 0 : !strncmp(s, "cuda:", 5) ? strtol(s + 5, &end, 10) : -1;
    if (end && (*end || end == s + 5)) n = -1;
  } else {
    n = PyLong_AsLong(o);
    if (n == -1 && PyErr_Occurred()) return -1;
  }
  if (n < 0 || n > 1 << 16) {
    PyErr_Format(PyExc_ValueError, "device: got %R; an ordinal such as 0, or 'cuda:0', is accepted",
                 o);
    return -1;
  }
  *out = (int)n;
  return 0;
}

/* ---- life --------------------------------------------------------------------------------- */

PyObject *pmpy_device_array_new(const pmpy_spec *spec, int device, void *stream) {
  PMPY_ERR(err);
  pmpy_device_array *a = PyObject_New(pmpy_device_array, pmpy.device_array_type);
  if (!a) return NULL;
  memset(&a->weakrefs, 0, sizeof *a - offsetof(pmpy_device_array, weakrefs));
  a->spec = *spec;
  a->device = device;
  if (pm_device_alloc(device, pmpy_bytes(spec), stream, &a->ptr, &err)) {
    Py_DECREF(a);
    return pmpy_raise(&err);
  }
  return (PyObject *)a;
}

static void dealloc(PyObject *self) {
  pmpy_device_array *a = DEVICE_ARRAY(self);
  PyTypeObject *type = Py_TYPE(self);
  if (a->weakrefs) PyObject_ClearWeakRefs(self);
  if (a->borrowed) {
    PyObject *owner = a->base.keep;
    if (a->foreign_stream && owner && Py_TYPE(owner) == pmpy.device_array_type)
      DEVICE_ARRAY(owner)->foreign_stream = true;
    pmpy_release(&a->base);
  } else if (a->foreign_stream) {
    pm_device_free_unordered(a->device, a->ptr, pmpy_bytes(&a->spec));
  } else {
    pm_device_free(a->device, a->ptr, NULL);
  }
  PyObject_Free(self);
  Py_DECREF(type);
}

/* Upload from the host; the source may be gone as soon as this returns. */
static int upload(pmpy_device_array *a, const void *from) {
  pm_err err = {0};
  pm_code code;
  const size_t n = pmpy_bytes(&a->spec);
  void *packed = NULL;
  if (pm_dtypes[a->spec.dtype].bits < 8) {
    packed = pm_malloc(n + 1);
    if (!packed) return PyErr_NoMemory(), -1;
    pm_pack_bytes((pm_dtype)a->spec.dtype, from, packed, n * (8 / pm_dtypes[a->spec.dtype].bits));
    from = packed;
  }
  Py_BEGIN_ALLOW_THREADS code = pm_copy_to_device(a->device, a->ptr, from, n, NULL, &err);
  if (!code) code = pm_synchronize(a->device, NULL, &err);
  Py_END_ALLOW_THREADS pm_free(packed);
  return code ? fail(&err) : 0;
}

/* New. The whole array on the host. */
static PyObject *to_numpy(pmpy_device_array *a) {
  pm_err err = {0};
  pm_code code;
  void *data, *packed = NULL;
  const size_t n = pmpy_bytes(&a->spec);
  const bool small = pm_dtypes[a->spec.dtype].bits < 8;
  PyObject *host = pmpy_numpy_empty(&a->spec, &data);
  if (host && small && !(packed = pm_malloc(n + 1))) {
    PyErr_NoMemory();
    Py_CLEAR(host);
  }
  if (!host) return NULL;
  Py_BEGIN_ALLOW_THREADS code =
      pm_copy_to_host(a->device, small ? packed : data, a->ptr, n, NULL, &err);
  if (!code) code = pm_synchronize(a->device, NULL, &err);
  if (!code && small) {
    pm_unpack_bytes((pm_dtype)a->spec.dtype, packed, data, n * (8 / pm_dtypes[a->spec.dtype].bits));
  }
  Py_END_ALLOW_THREADS pm_free(packed);
  if (!code) return host;
  Py_DECREF(host);
  return pmpy_raise(&err);
}

/* New. A copy on the device. */
static PyObject *device_copy(const pmpy_device_array *a) {
  pm_err err = {0};
  PyObject *copy = pmpy_device_array_new(&a->spec, a->device, NULL);
  if (!copy) return NULL;
  if (!pm_copy_on_device(a->device, DEVICE_ARRAY(copy)->ptr, a->ptr, pmpy_bytes(&a->spec), NULL,
                         &err))
    return copy;
  Py_DECREF(copy);
  return pmpy_raise(&err);
}

static pmpy_spec spec_of(const pmpy_buffer *b) {
  pmpy_spec s = {.dtype = b->dtype, .rank = b->rank};
  memcpy(s.shape, b->shape, sizeof s.shape);
  return s;
}

/* New. An array that keeps b's memory alive; b is emptied. `owner` is borrowed. */
static PyObject *borrow(pmpy_buffer *b, PyObject *owner) {
  pmpy_device_array *a = PyObject_New(pmpy_device_array, pmpy.device_array_type);
  if (!a) return NULL;
  memset(&a->weakrefs, 0, sizeof *a - offsetof(pmpy_device_array, weakrefs));
  a->spec = spec_of(b);
  a->device = b->device;
  a->ptr = b->ptr;
  a->read_only = b->read_only;
  a->borrowed = true;
  a->base = *b;
  if (!a->base.keep) a->base.keep = Py_NewRef(owner);
  b->keep = NULL;
  b->managed = NULL;
  b->managed_old = NULL;
  return (PyObject *)a;
}

/* New. What is on the producer's stream comes before what will be done with the array. */
static PyObject *from_any(PyObject *o, bool copy_host, int device) {
  pmpy_buffer b;
  pm_err err = {0};
  void *stream = NULL;
  PyObject *made = NULL;
  if (Py_TYPE(o) == pmpy.device_array_type) return Py_NewRef(o);
  int code = pmpy_read(o, 0, PMPY_ARRAY, &b);
  if (code < 0) return NULL;
  if (!code)
    return PyErr_Format(PyExc_TypeError,
                        "a %s is no array: NumPy arrays, DLPack producers and "
                        "numbers are accepted",
                        Py_TYPE(o)->tp_name);
  if (!b.cuda) {
    pmpy_spec spec = spec_of(&b);
    if (!copy_host)
      PyErr_SetString(PyExc_BufferError, "from_dlpack: the array is on the host; use device_put");
    else made = pmpy_device_array_new(&spec, device, NULL);
    if (made && upload(DEVICE_ARRAY(made), (void *)(uintptr_t)b.ptr) < 0) Py_CLEAR(made);
  } else if (!pmpy_current_stream(b.source, b.device, &stream)) {
    if (pm_stream_order(b.device, stream, NULL, &err)) fail(&err);
    else made = borrow(&b, o);
  }
  pmpy_release(&b);
  return made;
}

/* ---- attributes --------------------------------------------------------------------------- */

static PyObject *get_shape(PyObject *self, void *unused) {
  (void)unused;
  return pmpy_spec_shape(&DEVICE_ARRAY(self)->spec);
}

static PyObject *get_dtype(PyObject *self, void *unused) {
  (void)unused;
  return pmpy_dtype_object((pm_dtype)DEVICE_ARRAY(self)->spec.dtype);
}

static PyObject *get_ndim(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromLong(DEVICE_ARRAY(self)->spec.rank);
}

static PyObject *get_nbytes(PyObject *self, void *unused) {
  (void)unused;
  return PyLong_FromSize_t(pmpy_bytes(&DEVICE_ARRAY(self)->spec));
}

static PyObject *get_size(PyObject *self, void *unused) {
  (void)unused;
  const pmpy_spec *s = &DEVICE_ARRAY(self)->spec;
  return PyLong_FromSize_t(pmpy_bytes(s) * 8 / pm_dtypes[s->dtype].bits);
}

static PyObject *get_device(PyObject *self, void *unused) {
  (void)unused;
  return PyUnicode_FromFormat("cuda:%d", DEVICE_ARRAY(self)->device);
}

static PyObject *get_interface(PyObject *self, void *unused) {
  (void)unused;
  static const char class_letter[] = {
      [PM_CLASS_BOOL] = 'b', [PM_CLASS_INT] = 'i', [PM_CLASS_UINT] = 'u', [PM_CLASS_FLOAT] = 'f'};
  const pmpy_device_array *a = DEVICE_ARRAY(self);
  const pm_dtype_info *t = &pm_dtypes[a->spec.dtype];
  char typestr[8];
  if (pm_is_extended(a->spec.dtype))
    return PyErr_Format(PyExc_AttributeError, "__cuda_array_interface__ has no %s: use __dlpack__",
                        t->text);
  snprintf(typestr, sizeof typestr, "%c%c%d", t->bytes == 1 ? '|' : '<', class_letter[t->class],
           t->bytes);
  PyObject *shape = pmpy_spec_shape(&a->spec);
  if (!shape) return NULL;
  return Py_BuildValue("{s:N,s:s,s:(KO),s:O,s:i,s:i}", "shape", shape, "typestr", typestr, "data",
                       (unsigned long long)a->ptr, a->read_only ? Py_True : Py_False, "strides",
                       Py_None, "stream", 1, "version", 3);
}

static PyObject *repr(PyObject *self) {
  const pmpy_device_array *a = DEVICE_ARRAY(self);
  PyObject *shape = pmpy_spec_shape(&a->spec);
  PyObject *text = shape ? PyUnicode_FromFormat("DeviceArray(shape=%R, dtype=%s, device='cuda:%d')",
                                                shape, pm_dtypes[a->spec.dtype].text, a->device)
                         : NULL;
  Py_XDECREF(shape);
  return text;
}

static Py_ssize_t length(PyObject *self) {
  const pmpy_spec *s = &DEVICE_ARRAY(self)->spec;
  if (s->rank) return (Py_ssize_t)s->shape[0];
  PyErr_SetString(PyExc_TypeError, "len() of an array without dimensions");
  return -1;
}

/* ---- NumPy -------------------------------------------------------------------------------- */

static PyObject *method_numpy(PyObject *self, PyObject *unused) {
  (void)unused;
  return to_numpy(DEVICE_ARRAY(self));
}

static PyObject *method_array(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"dtype", "copy", NULL};
  PyObject *dtype = Py_None, *copy = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|OO", names, &dtype, &copy)) return NULL;
  if (copy == Py_False)
    return PyErr_Format(PyExc_ValueError, "an array on the GPU cannot be seen by NumPy uncopied");
  PyObject *host = to_numpy(DEVICE_ARRAY(self));
  if (host && dtype != Py_None) Py_SETREF(host, PyObject_CallMethod(host, "astype", "O", dtype));
  return host;
}

/* ---- DLPack out --------------------------------------------------------------------------- */

/* What a capsule points to; both forms of the protocol share it. */
typedef struct exported {
  union {
    DLManagedTensorVersioned versioned;
    DLManagedTensor old;
  } m;
  PyObject *array; /* owned */
  int64_t shape[PM_MAX_RANK], strides[PM_MAX_RANK];
} exported;

static void forget(exported *e) {
  if (Py_IsInitialized()) { /* after that, memory goes with the process */
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(e->array);
    PyGILState_Release(gil);
  }
  pm_free(e);
}
static void delete_versioned(DLManagedTensorVersioned *m) { forget(m->manager_ctx); }
static void delete_old(DLManagedTensor *m) { forget(m->manager_ctx); }

static void drop_versioned(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
    delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}
static void drop_old(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) delete_old(PyCapsule_GetPointer(capsule, "dltensor"));
}

static PyObject *make_capsule(pmpy_device_array *a, bool versioned, bool is_copy) {
  exported *e = pm_malloc(sizeof *e);
  if (!e) return PyErr_NoMemory();
  int64_t stride = 1;
  for (int i = a->spec.rank - 1; i >= 0; i--) {
    e->shape[i] = a->spec.shape[i];
    e->strides[i] = stride;
    stride *= pm_max(e->shape[i], 1);
  }
  DLTensor t = {.data = (void *)(uintptr_t)a->ptr,
                .device = {kDLCUDA, a->device},
                .ndim = a->spec.rank,
                .dtype = {pm_dtypes[a->spec.dtype].dlpack, pm_dtypes[a->spec.dtype].bits, 1},
                .shape = e->shape,
                .strides = e->strides};
  if (versioned)
    e->m.versioned =
        (DLManagedTensorVersioned){.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
                                   .manager_ctx = e,
                                   .deleter = delete_versioned,
                                   .flags = (a->read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0) |
                                            (is_copy ? DLPACK_FLAG_BITMASK_IS_COPIED : 0),
                                   .dl_tensor = t};
  else e->m.old = (DLManagedTensor){.dl_tensor = t, .manager_ctx = e, .deleter = delete_old};
  PyObject *capsule = PyCapsule_New(&e->m, versioned ? "dltensor_versioned" : "dltensor",
                                    versioned ? drop_versioned : drop_old);
  if (capsule) e->array = Py_NewRef(a);
  else pm_free(e);
  return capsule;
}

/* Let the consumer's stream wait for ours. */
static int order_for(pmpy_device_array *a, PyObject *stream) {
  pm_err err = {0};
  if (stream == Py_None) return 0;
  void *handle;
  if (PyLong_Check(stream)) {
    if (PyLong_AsLong(stream) == -1 && !PyErr_Occurred()) return 0;
    PyErr_Clear();
  }
  if (pmpy_stream_from(stream, "__dlpack__: stream", &handle) < 0) return -1;
  if (!handle && PyLong_Check(stream)) {
    PyErr_SetString(PyExc_ValueError,
                    "__dlpack__: stream 0 is ambiguous; 1 is the legacy default "
                    "stream, 2 the default stream of the thread");
    return -1;
  }
  if (!handle || handle == (void *)1) return 0;
  a->foreign_stream = true;
  return pm_stream_order(a->device, NULL, handle, &err) ? fail(&err) : 0;
}

static PyObject *to_host_capsule(pmpy_device_array *a, PyObject *max_version) {
  PyObject *host = to_numpy(a), *capsule = NULL;
  PyObject *method = host ? PyObject_GetAttrString(host, "__dlpack__") : NULL;
  PyObject *empty = PyTuple_New(0), *kw = Py_BuildValue("{s:O}", "max_version", max_version);
  if (method && empty && kw) capsule = PyObject_Call(method, empty, kw);
  Py_XDECREF(kw);
  Py_XDECREF(empty);
  Py_XDECREF(method);
  Py_XDECREF(host);
  return capsule;
}

static bool is_pair(PyObject *o, const char *name) {
  if (o == Py_None || PyTuple_Check(o)) return true;
  PyErr_Format(PyExc_TypeError, "__dlpack__: %s must be a tuple of two ints, got %.80s", name,
               Py_TYPE(o)->tp_name);
  return false;
}

static PyObject *method_dlpack(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
  pmpy_device_array *a = DEVICE_ARRAY(self);
  PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None;
  int major = 0, minor = 0, type = kDLCUDA, id = a->device;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOO", names, &stream, &max_version, &device,
                                   &copy))
    return NULL;
  if (!is_pair(max_version, "max_version") || !is_pair(device, "dl_device")) return NULL;
  if (max_version != Py_None && !PyArg_ParseTuple(max_version, "ii", &major, &minor)) return NULL;
  if (device != Py_None && !PyArg_ParseTuple(device, "ii", &type, &id)) return NULL;
  if (type == kDLCPU && copy != Py_False) return to_host_capsule(a, max_version);
  if (type != kDLCUDA || id != a->device)
    return PyErr_Format(PyExc_BufferError, "an array on cuda:%d cannot be given to device (%d, %d)",
                        a->device, type, id);
  if (a->read_only && major < 1 && copy != Py_True)
    return PyErr_Format(PyExc_BufferError,
                        "the array is read-only, which DLPack before 1.0 cannot "
                        "say");
  if (copy != Py_True) return order_for(a, stream) < 0 ? NULL : make_capsule(a, major >= 1, false);
  pmpy_device_array *made = DEVICE_ARRAY(device_copy(a));
  PyObject *capsule = NULL;
  if (made && !order_for(made, stream)) capsule = make_capsule(made, major >= 1, true);
  Py_XDECREF(made);
  return capsule;
}

static PyObject *method_dlpack_device(PyObject *self, PyObject *unused) {
  (void)unused;
  return Py_BuildValue("(ii)", kDLCUDA, DEVICE_ARRAY(self)->device);
}

static PyObject *method_from_dlpack(PyObject *type, PyObject *o) {
  (void)type;
  return from_any(o, false, 0);
}

static PyObject *method_copy(PyObject *self, PyObject *unused) {
  (void)unused;
  return device_copy(DEVICE_ARRAY(self));
}

/* Extents, of which one may be -1, for so many elements; 0 or -1. */
static int read_extents(PyObject *shape, int64_t n, pmpy_spec *to) {
  const Py_ssize_t rank = PyTuple_GET_SIZE(shape);
  Py_ssize_t open = -1;
  int64_t known = 1;
  for (Py_ssize_t d = 0; d < rank && d < PM_MAX_RANK; d++) {
    const int64_t extent = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
    if (extent == -1 && PyErr_Occurred()) return -1;
    to->shape[d] = extent;
    if (extent == -1 && open < 0) open = d;
    else if (extent < 0 || (extent && known > n / extent + 1)) known = -1;
    else if (known >= 0) known *= extent;
  }
  if (open >= 0 && known > 0 && n % known == 0) {
    to->shape[open] = n / known;
    known = n;
  }
  if (rank > PM_MAX_RANK || known != n) {
    PyErr_Format(PyExc_ValueError, "reshape: an array of %lld elements cannot have the shape %R",
                 (long long)n, shape);
    return -1;
  }
  to->rank = (uint8_t)rank;
  return 0;
}

static PyObject *method_reshape(PyObject *self, PyObject *args) {
  const pmpy_device_array *a = DEVICE_ARRAY(self);
  PyObject *first = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : NULL;
  PyObject *shape = first && !PyLong_Check(first) ? PySequence_Tuple(first) : Py_NewRef(args);
  pmpy_spec to = {.dtype = a->spec.dtype};
  int64_t n = 1;
  for (int d = 0; d < a->spec.rank; d++) n *= a->spec.shape[d];
  const int code = shape ? read_extents(shape, n, &to) : -1;
  Py_XDECREF(shape);
  if (code < 0) return NULL;
  pmpy_buffer b = {.dtype = to.dtype,
                   .rank = to.rank,
                   .device = a->device,
                   .cuda = true,
                   .ptr = a->ptr,
                   .read_only = a->read_only};
  memcpy(b.shape, to.shape, sizeof b.shape);
  return borrow(&b, self);
}

/* ---- functions ---------------------------------------------------------------------------- */

static PyObject *device_put(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"x", "device", NULL};
  PyObject *x, *device = Py_None;
  int ordinal;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:device_put", names, &x, &device) ||
      pmpy_device_ordinal(device, &ordinal) < 0)
    return NULL;
  PyObject *made = from_any(x, true, ordinal);
  if (made && device != Py_None && DEVICE_ARRAY(made)->device != ordinal) {
    PyErr_Format(PyExc_ValueError,
                 "x is on cuda:%d; copies between GPUs are not supported, and "
                 "device=cuda:%d was asked for",
                 DEVICE_ARRAY(made)->device, ordinal);
    Py_CLEAR(made);
  }
  return made;
}

static int parse_shape(PyObject *o, pmpy_spec *spec) {
  PyObject *t = PyLong_Check(o) ? PyTuple_Pack(1, o) : PySequence_Tuple(o);
  int64_t total = 1;
  if (!t) return -1;
  Py_ssize_t rank = PyTuple_GET_SIZE(t);
  if (rank > PM_MAX_RANK)
    PyErr_Format(PyExc_ValueError, "shape: got %zd dimensions; at most %d are supported", rank,
                 PM_MAX_RANK);
  spec->rank = (uint8_t)rank;
  for (Py_ssize_t i = 0; i < rank && !PyErr_Occurred(); i++) {
    spec->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(t, i));
    if (spec->shape[i] < 0 && !PyErr_Occurred())
      PyErr_Format(PyExc_ValueError, "shape: got %R; extents are 0 or more", o);
    int64_t extent = pm_max(spec->shape[i], 1);
    if (total > (1ll << 56) / extent && !PyErr_Occurred())
      PyErr_Format(PyExc_ValueError, "shape: got %R, which no memory can hold", o);
    total = PyErr_Occurred() ? 1 : total * extent;
  }
  Py_DECREF(t);
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *device_empty(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "dtype", "device", NULL};
  PyObject *shape, *dtype, *device = Py_None;
  pmpy_spec spec = {0};
  pm_dtype t;
  int ordinal;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|O:device_empty", names, &shape, &dtype, &device) ||
      parse_shape(shape, &spec) < 0 || pmpy_dtype_from(dtype, &t) < 0 ||
      pmpy_device_ordinal(device, &ordinal) < 0)
    return NULL;
  spec.dtype = (uint8_t)t;
  return pmpy_device_array_new(&spec, ordinal, NULL);
}

/* Waits for the default stream and for the stream of host arrays. */
static PyObject *synchronize(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"device", NULL};
  PyObject *device = Py_None;
  pm_err err = {0};
  pm_code code;
  void *own;
  int ordinal;
  (void)module;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|O:synchronize", names, &device)) return NULL;
  if (device == Py_None && !pm_device_count(NULL, 0)) Py_RETURN_NONE;
  if (pmpy_device_ordinal(device, &ordinal) < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS code = pm_synchronize(ordinal, NULL, &err);
  if (!code) code = pm_private_stream(ordinal, &own, &err);
  if (!code) code = pm_synchronize(ordinal, own, &err);
  if (!code) pm_memory_sweep(ordinal);
  if (!code) pm_modules_sweep();
  Py_END_ALLOW_THREADS if (code) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

/* ---- tables ------------------------------------------------------------------------------- */

static PyGetSetDef getset[] = {{"shape", get_shape, NULL, "extents", NULL},
                               {"dtype", get_dtype, NULL, "NumPy dtype of the elements", NULL},
                               {"ndim", get_ndim, NULL, "number of dimensions", NULL},
                               {"size", get_size, NULL, "number of elements", NULL},
                               {"nbytes", get_nbytes, NULL, "bytes of the elements", NULL},
                               {"device", get_device, NULL, "such as 'cuda:0'", NULL},
                               {"__cuda_array_interface__", get_interface, NULL, "version 3", NULL},
                               {NULL, NULL, NULL, NULL, NULL}};

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS
static PyMethodDef methods[] = {
    {"numpy", method_numpy, METH_NOARGS, "The array on the host."},
    {"copy", method_copy, METH_NOARGS, "A copy on the device."},
    {"reshape", method_reshape, METH_VARARGS,
     "reshape(*shape): the same memory with another shape, ints or one tuple; one may be -1."},
    {"__copy__", method_copy, METH_NOARGS, "A copy on the device."},
    {"__deepcopy__", method_copy, METH_O, "A copy on the device."},
    {"__array__", KEYWORDS(method_array), "The array on the host."},
    {"__dlpack__", KEYWORDS(method_dlpack), "DLPack capsule."},
    {"__dlpack_device__", method_dlpack_device, METH_NOARGS, "(2, ordinal)"},
    {"from_dlpack", method_from_dlpack, METH_O | METH_CLASS,
     "An array on the memory of another one that lies on a GPU."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(pmpy_device_array, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_dealloc, dealloc},
                              {Py_tp_repr, repr},
                              {Py_tp_getset, getset},
                              {Py_tp_methods, methods},
                              {Py_tp_members, members},
                              {Py_sq_length, length},
                              {Py_tp_doc,
                               "A dense array in GPU memory. Made by device_put, "
                               "device_empty, from_dlpack and by kernels."},
                              {0, NULL}};

static PyType_Spec type_spec = {
    .name = "pallas_mgpu.DeviceArray",
    .basicsize = sizeof(pmpy_device_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots};

static PyMethodDef functions[] = {
    {"device_put", KEYWORDS(device_put),
     "device_put(x, device=None): x as a DeviceArray; host arrays are copied, arrays on the GPU "
     "are "
     "taken as they are."},
    {"device_empty", KEYWORDS(device_empty),
     "device_empty(shape, dtype, device=None): a DeviceArray that is not initialised."},
    {"synchronize", KEYWORDS(synchronize), "synchronize(device=None): wait for the GPU."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_device_array(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
  if (!type) return -1;
  pmpy.device_array_type = (PyTypeObject *)type;
  if (PyModule_AddObjectRef(module, "DeviceArray", type) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
