/* Arrays of any framework as plain memory, without calling Python if possible.
 *
 * How an object is read depends only on its type and is determined once for each type: our
 * DeviceArray and NumPy's ndarray directly; types with the exchange table of DLPack 1.3 through its
 * C functions; then __dlpack__; then __cuda_array_interface__; then numbers. Descriptions of types
 * are never removed, and their types are kept alive, so readers need no lock.
 *
 * 64-bit NumPy operands are converted (narrow.c).
 *
 * The result is always dense and row-major. Host arrays of NumPy that are not are copied. All other
 * arrays that are not are refused, since copying device memory should be the user's decision. */
#include "exchange.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

enum how {
  READ_DEVICE_ARRAY,
  READ_NUMPY,
  READ_MASKED, /* of numpy.ma: refused */
  READ_DLPACK_C,
  READ_DLPACK,
  READ_CUDA_INTERFACE,
  READ_NUMBER,
  READ_NUMPY_NUMBER,
  READ_SPEC,
  READ_NOTHING
};

const pmpy_source pmpy_numpy_source = {.how = READ_NUMPY, .library = PMPY_NUMPY};
const pmpy_source pmpy_device_array_source = {.how = READ_DEVICE_ARRAY,
                                              .library = PMPY_DEVICE_ARRAY};

/* Always -1. "<argument 2> (numpy.ndarray) <text>" */
static int refuse(PyObject *type, int which, PyObject *o, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static int refuse(PyObject *type, int which, PyObject *o, const char *fmt, ...) {
  char name[32], text[768];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  PyErr_Format(type, "%s (%s) %s", pmpy_which(which, name), Py_TYPE(o)->tp_name, text);
  return -1;
}

static pmpy_library library_of(PyTypeObject *type);

/* The cast that helps, as the library of the array spells it. */
static int refuse_dtype(int which, PyObject *o, const char *dtype) {
  static const struct {
    const char *wide, *narrow;
  } casts[] = {{"int64", "int32"}, {"uint64", "uint32"}, {"float64", "float32"},
               {"<i8", "int32"},   {"<u8", "uint32"},    {"<f8", "float32"}};
  char names[PMPY_DTYPE_NAMES], cast[64] = "";
  for (size_t i = 0; i < PM_COUNT(casts) && !*cast; i++) {
    if (strcmp(dtype, casts[i].wide)) continue;
    const bool torch = library_of(Py_TYPE(o)) == PMPY_TORCH;
    snprintf(cast, sizeof cast, torch ? "by x.to(torch.%s), " : "by x.astype('%s'), ",
             casts[i].narrow);
  }
  return refuse(PyExc_TypeError, which, o,
                "has dtype %s, which kernels do not take: cast it explicitly, %sto a type of 32 "
                "bits or less (%s)",
                dtype, cast, pmpy_dtype_names(names));
}

static int refuse_rank(int which, PyObject *o, int rank) {
  return refuse(PyExc_ValueError, which, o, "has %d dimensions; at most %d are supported", rank,
                PM_MAX_RANK);
}

static int refuse_strides(int which, PyObject *o) {
  return refuse(PyExc_ValueError, which, o,
                "is not contiguous in row-major order: pass a contiguous copy");
}

/* An array on the GPU that is not row-major: kernels take it by its strides (elements), if they are
 * such as a tensor's are. */
static int take_strides(PyObject *o, int which, const int64_t *stride, pmpy_buffer *b) {
  if (!b->cuda || pm_dtypes[b->dtype].bits < 8) return refuse_strides(which, o);
  for (int i = 0; i < b->rank; i++) {
    b->stride[i] = b->shape[i] == 1 ? 0 : stride[i];
    if (b->stride[i] < 0)
      return refuse(PyExc_ValueError, which, o,
                    "has a negative stride along dimension %d: pass a contiguous copy", i);
  }
  b->strided = true;
  return 1;
}

static int refuse_read_only(int which, PyObject *o) {
  return refuse(PyExc_ValueError, which, o, "is read-only");
}

/* ---- NumPy -------------------------------------------------------------------------------- */

/* The dtype of ml_dtypes that has this number in NumPy; -1: none. */
static int extended_dtype(int number) {
  static atomic_int known[PM_DTYPE_COUNT]; /* 0: not known (yet) */
  for (int t = PM_DTYPE_COUNT; t-- > 0;) {
    if (!pm_is_extended(t)) continue;
    int n = atomic_load_explicit(&known[t], memory_order_relaxed);
    if (!n) {
      PyObject *dtype = pmpy_dtype_object(t);
      if (!dtype) PyErr_Clear(); /* ml_dtypes is too old for it */
      n = dtype ? ((PyArray_Descr *)dtype)->type_num : -1;
      Py_XDECREF(dtype);
      atomic_store_explicit(&known[t], n, memory_order_relaxed);
    }
    if (n == number) return t;
  }
  return -1;
}

/* By NumPy's numbers of its own dtypes: 1 + ours, 0: it is none of ours. */
static uint8_t own_dtypes[NPY_NTYPES_LEGACY];

static int find_own_dtypes(void) {
  for (int t = 0; t < PM_DTYPE_COUNT; t++) {
    if (pm_is_extended(t)) continue;
    PyObject *dtype = pmpy_dtype_object(t);
    if (!dtype) return -1;
    own_dtypes[((PyArray_Descr *)dtype)->type_num] = (uint8_t)(t + 1);
    Py_DECREF(dtype);
  }
  return 0;
}

/* -1: none of ours */
static int dtype_of_descr(const PyArray_Descr *d) {
  const int number = d->type_num;
  if (!PyArray_ISNBO(d->byteorder)) return -1;
  if (number >= 0 && number < NPY_NTYPES_LEGACY) return own_dtypes[number] - 1;
  return PyTypeNum_ISUSERDEF(number) ? extended_dtype(number) : -1;
}

static int refuse_descr(int which, PyObject *o, PyArray_Descr *d) {
  PyObject *text = PyObject_Str((PyObject *)d);
  const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
  if (s) refuse_dtype(which, o, s);
  Py_XDECREF(text);
  return -1;
}

static int read_numpy(PyObject *o, int which, pmpy_purpose purpose, pmpy_buffer *b) {
  PyArrayObject *a = (PyArrayObject *)o;
  int dtype = dtype_of_descr(PyArray_DESCR(a)), rank = PyArray_NDIM(a);
  if (rank > PM_MAX_RANK) return refuse_rank(which, o, rank);
  if (dtype < 0) {
    pm_dtype to;
    b->keep = purpose >= PMPY_INPUT ? pmpy_narrow_array(o, which, &to, &b->was) : NULL;
    if (!b->keep) return PyErr_Occurred() ? -1 : refuse_descr(which, o, PyArray_DESCR(a));
    b->copied = true;
    a = (PyArrayObject *)b->keep;
    dtype = (int)to;
  }
  b->dtype = (uint8_t)dtype;
  b->rank = (uint8_t)rank;
  b->read_only = !PyArray_ISWRITEABLE(a);
  for (int i = 0; i < rank; i++) b->shape[i] = PyArray_DIM(a, i);
  if (purpose == PMPY_OUTPUT && b->read_only) return refuse_read_only(which, o);
  if (!PyArray_IS_C_CONTIGUOUS(a) || !PyArray_ISALIGNED(a)) {
    if (purpose == PMPY_OUTPUT) return refuse_strides(which, o);
    b->keep = PyArray_NewCopy(a, NPY_CORDER);
    if (!b->keep) return -1;
    b->copied = true;
    a = (PyArrayObject *)b->keep;
  }
  b->ptr = (uint64_t)(uintptr_t)PyArray_DATA(a);
  return 1;
}

PyObject *pmpy_numpy_empty(const pmpy_spec *spec, void **data) {
  npy_intp dims[PM_MAX_RANK];
  for (int i = 0; i < spec->rank; i++) dims[i] = (npy_intp)spec->shape[i];
  PyObject *dtype = pmpy_dtype_object((pm_dtype)spec->dtype);
  PyObject *a = dtype ? PyArray_Empty(spec->rank, dims, (PyArray_Descr *)dtype, 0) : NULL;
  if (a && data) *data = PyArray_DATA((PyArrayObject *)a);
  return a;
}

PyObject *pmpy_spec_shape(const pmpy_spec *spec) {
  PyObject *t = PyTuple_New(spec->rank);
  for (int i = 0; t && i < spec->rank; i++) {
    PyObject *n = PyLong_FromLongLong(spec->shape[i]);
    if (!n) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, i, n);
  }
  return t;
}

/* ---- numbers ------------------------------------------------------------------------------ */

static int keep_number(pmpy_buffer *b, pm_dtype t, pm_scalar v) {
  b->dtype = (uint8_t)t;
  b->rank = 0;
  b->read_only = true;
  pm_store_scalar(t, &b->number, v);
  b->ptr = (uint64_t)(uintptr_t)&b->number;
  return 1;
}

static int read_int(PyObject *o, int which, pmpy_buffer *b) {
  PyObject *index = PyNumber_Index(o);
  if (!index) return -1;
  int overflow;
  long long v = PyLong_AsLongLongAndOverflow(index, &overflow);
  Py_DECREF(index);
  if (overflow || v < INT32_MIN || v > INT32_MAX)
    return refuse(PyExc_OverflowError, which, o, "does not fit int32");
  return keep_number(b, PM_I32, (pm_scalar){.i = v});
}

static int read_number(PyObject *o, int which, pmpy_buffer *b) {
  if (PyBool_Check(o)) return keep_number(b, PM_BOOL, (pm_scalar){.i = o == Py_True});
  if (PyLong_Check(o)) return read_int(o, which, b);
  double v = PyFloat_AsDouble(o);
  if (v == -1 && PyErr_Occurred()) return -1;
  if (isfinite(v) && !isfinite((float)v))
    return refuse(PyExc_OverflowError, which, o, "does not fit float32");
  return keep_number(b, PM_F32, (pm_scalar){.f = v});
}

/* numpy.float16(3) and the like: of their own dtype, or converted */
static int read_numpy_number(PyObject *o, int which, pmpy_buffer *b) {
  PyArray_Descr *d = PyArray_DescrFromScalar(o);
  if (!d) return -1;
  int dtype = dtype_of_descr(d), code = 1;
  pm_dtype to;
  if (dtype >= 0) {
    PyArray_ScalarAsCtype(o, &b->number);
  } else {
    code = pmpy_narrow_scalar(o, which, &b->number, &to, &b->was);
    if (!code) code = refuse_descr(which, o, d);
    dtype = (int)to;
  }
  Py_DECREF(d);
  if (code < 0) return -1;
  b->dtype = (uint8_t)dtype;
  b->rank = 0;
  b->read_only = true;
  b->ptr = (uint64_t)(uintptr_t)&b->number;
  return 1;
}

static bool object_has(PyObject *o, const char *name);

/* Those of an ArrayInfo; 1, or -1. */
static int read_spec_strides(PyObject *o, pmpy_buffer *b) {
  PyObject *strides = NULL;
  if (!object_has(o, "element_strides")) return 1;
  strides = PyObject_GetAttrString(o, "element_strides");
  b->strided = strides && PyTuple_Check(strides) && PyTuple_GET_SIZE(strides) == b->rank;
  for (int i = 0; b->strided && i < b->rank; i++)
    b->stride[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
  Py_XDECREF(strides);
  return PyErr_Occurred() ? -1 : 1;
}

/* Objects with shape and dtype, and no data: only where a description is enough. */
static int read_spec(PyObject *o, int which, pmpy_buffer *b) {
  pm_dtype t;
  PyObject *dtype = PyObject_GetAttrString(o, "dtype"), *shape = NULL;
  int code = -1;
  if (!dtype || pmpy_dtype_from(dtype, &t) < 0) goto done;
  shape = PyObject_GetAttrString(o, "shape");
  if (shape) Py_SETREF(shape, PySequence_Tuple(shape));
  if (!shape) goto done;
  Py_ssize_t rank = PyTuple_GET_SIZE(shape);
  if (rank > PM_MAX_RANK) {
    refuse_rank(which, o, (int)rank);
    goto done;
  }
  for (Py_ssize_t i = 0; i < rank; i++) {
    b->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    if (b->shape[i] < 0) {
      if (!PyErr_Occurred()) refuse(PyExc_ValueError, which, o, "has a negative extent");
      goto done;
    }
  }
  b->dtype = (uint8_t)t;
  b->rank = (uint8_t)rank;
  b->spec = true;
  code = read_spec_strides(o, b);
done:
  Py_XDECREF(shape);
  Py_XDECREF(dtype);
  return code;
}

/* ---- DLPack ------------------------------------------------------------------------------- */

static int dtype_of_dlpack(DLDataType d) {
  for (int t = 0; t < PM_DTYPE_COUNT; t++)
    if (pm_dtypes[t].dlpack == d.code && pm_dtypes[t].bits == d.bits && d.lanes == 1) return t;
  return -1;
}

static bool is_dense(const DLTensor *t) {
  int64_t expected = 1;
  if (!t->strides) return true;
  for (int i = 0; i < t->ndim; i++)
    if (t->shape[i] == 0) return true;
  for (int i = t->ndim - 1; i >= 0; i--) {
    if (t->shape[i] != 1 && t->strides[i] != expected) return false;
    expected *= t->shape[i];
  }
  return true;
}

/* Fill b from a tensor. Its shape is copied. */
static int read_tensor(PyObject *o, int which, const DLTensor *t, pmpy_buffer *b) {
  int dtype = dtype_of_dlpack(t->dtype);
  if (dtype >= 0 && pm_dtypes[dtype].bits < 8 && t->device.device_type == kDLCPU) {
    return refuse(PyExc_TypeError, which, o,
                  "has elements on the host that share bytes; pass a NumPy array of ml_dtypes");
  }
  if (dtype < 0) {
    static const char *const kinds[] = {"int",    "uint",    "float", "handle",
                                        "bfloat", "complex", "bool"};
    char name[48];
    snprintf(name, sizeof name, "%s%d",
             t->dtype.code < PM_COUNT(kinds) ? kinds[t->dtype.code] : "DLPack float of bits ",
             t->dtype.bits);
    return refuse_dtype(which, o, name);
  }
  if (t->ndim > PM_MAX_RANK) return refuse_rank(which, o, t->ndim);
  switch ((int)t->device.device_type) {
    case kDLCPU:
    case kDLCUDAHost: break;
    case kDLCUDA:
    case kDLCUDAManaged: b->cuda = true; break;
    default:
      return refuse(PyExc_TypeError, which, o,
                    "is on a device of DLPack type %d; the host and CUDA devices are supported",
                    (int)t->device.device_type);
  }
  b->dtype = (uint8_t)dtype;
  b->rank = (uint8_t)t->ndim;
  b->device = b->cuda ? t->device.device_id : 0;
  b->ptr = (uint64_t)(uintptr_t)t->data + t->byte_offset;
  for (int i = 0; i < t->ndim; i++) b->shape[i] = t->shape[i];
  return is_dense(t) ? 1 : take_strides(o, which, t->strides, b);
}

/* torch's views of imaginary parts of conjugates have the sign of their memory wrong. Such views
 * have strides. */
static int check_not_negated(PyObject *o, int which, const pmpy_buffer *b) {
  PyObject *negated = b->source->library == PMPY_TORCH ? PyObject_CallMethod(o, "is_neg", NULL)
                                                       : Py_NewRef(Py_False);
  const int yes = negated ? PyObject_IsTrue(negated) : -1;
  Py_XDECREF(negated);
  if (!yes) return 1;
  return yes < 0 ? -1
                 : refuse(PyExc_TypeError, which, o,
                          "is a view whose sign is changed when it is read: pass x.resolve_neg()");
}

static int read_dlpack_c(PyObject *o, int which, const DLPackExchangeAPI *api, pmpy_buffer *b) {
  if (api->dltensor_from_py_object_no_sync) {
    DLTensor t;
    if (api->dltensor_from_py_object_no_sync(o, &t)) {
      if (b->source->library != PMPY_TORCH) return -1;
      PyErr_Clear(); /* without memory of its own, as under torch.func */
      return 0;
    }
    const int code = read_tensor(o, which, &t, b);
    return code > 0 && b->strided ? check_not_negated(o, which, b) : code;
  }
  if (api->managed_tensor_from_py_object_no_sync(o, &b->managed)) return -1;
  b->read_only = b->managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY;
  return read_tensor(o, which, &b->managed->dl_tensor, b);
}

/* Take the tensor out of a capsule; b owns it afterwards. */
static const DLTensor *open_capsule(PyObject *o, int which, PyObject *capsule, pmpy_buffer *b) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    DLManagedTensorVersioned *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (PyCapsule_SetName(capsule, "used_dltensor_versioned")) return NULL;
    b->managed = m;
    b->read_only = m->version.major == 1 && (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY);
    if (m->version.major == 1) return &m->dl_tensor;
    PyErr_Format(PyExc_BufferError, "the array uses DLPack %u.%u; 0.x and 1.x are supported",
                 m->version.major, m->version.minor);
    return NULL;
  }
  if (!PyCapsule_IsValid(capsule, "dltensor")) {
    refuse(PyExc_TypeError, which, o, "has a __dlpack__ that returned %s",
           PyCapsule_CheckExact(capsule) ? "a capsule that was used before"
                                         : "something that is no capsule");
    return NULL;
  }
  DLManagedTensor *old = PyCapsule_GetPointer(capsule, "dltensor");
  if (!old || PyCapsule_SetName(capsule, "used_dltensor")) return NULL;
  b->managed_old = old;
  return &old->dl_tensor;
}

/* New: o.__dlpack__(stream=..., max_version=(1, 1)), or without max_version for old producers. */
static PyObject *call_dlpack(PyObject *o, PyObject *stream) {
  PyObject *method = PyObject_GetAttrString(o, "__dlpack__");
  PyObject *empty = PyTuple_New(0), *capsule = NULL;
  PyObject *kw = Py_BuildValue("{s:O,s:(ii)}", "stream", stream, "max_version", 1, 1);
  if (method && empty && kw) {
    capsule = PyObject_Call(method, empty, kw);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
      PyErr_Clear();
      if (!PyDict_DelItemString(kw, "max_version")) capsule = PyObject_Call(method, empty, kw);
    }
  }
  Py_XDECREF(kw);
  Py_XDECREF(empty);
  Py_XDECREF(method);
  return capsule;
}

/* The (type, id) of o.__dlpack_device__() */
static int dlpack_device(PyObject *o, int which, int *type, int *id) {
  PyObject *pair = PyObject_CallMethod(o, "__dlpack_device__", NULL);
  int ok = pair && PyTuple_Check(pair);
  if (pair && !ok)
    refuse(PyExc_TypeError, which, o, "has a __dlpack_device__ that returned no pair of ints");
  ok = ok && PyArg_ParseTuple(pair, "ii", type, id);
  Py_XDECREF(pair);
  return ok ? 0 : -1;
}

/* Always -1. The array refused, and did not say which argument it is. */
static int say_whose(PyObject *o, int which) {
  if (!PyErr_ExceptionMatches(PyExc_BufferError)) return -1;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *text = value ? PyObject_Str(value) : NULL;
  const char *why = text ? PyUnicode_AsUTF8(text) : NULL;
  if (why) refuse(PyExc_BufferError, which, o, "cannot be read through DLPack: %s", why);
  else PyErr_SetNone(PyExc_BufferError);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return -1;
}

static int read_dlpack(PyObject *o, int which, pmpy_purpose purpose, pmpy_buffer *b) {
  int type, id;
  void *on = NULL;
  PyObject *stream = NULL, *capsule = NULL;
  const DLTensor *t;
  if (dlpack_device(o, which, &type, &id) < 0) return say_whose(o, which);
  if (type == kDLCUDA || type == kDLCUDAManaged) {
    if (purpose == PMPY_FOR_XLA && b->source->library == PMPY_JAX) return 0;
    if (pmpy_current_stream(b->source, id, &on) < 0) return -1;
    stream = PyLong_FromVoidPtr(on ? on : (void *)1); /* 1: the legacy default stream */
  } else {
    stream = Py_NewRef(Py_None);
  }
  if (stream) capsule = call_dlpack(o, stream);
  t = capsule ? open_capsule(o, which, capsule, b) : NULL;
  Py_XDECREF(capsule);
  Py_XDECREF(stream);
  return t ? read_tensor(o, which, t, b) : say_whose(o, which);
}

/* ---- __cuda_array_interface__ -------------------------------------------------------------- */

static int dtype_of_typestr(const char *s) {
  if (!strchr("<|=", s[0])) return -1;
  for (int t = 0; t < PM_DTYPE_COUNT; t++)
    if (!pm_is_extended(t) && !strcmp(s + 1, pm_dtypes[t].numpy)) return t;
  return -1;
}

/* Its own stream, if it names one, is made to come before the stream that kernels run on. */
static int order_interface(PyObject *stream, int device) {
  pm_err err = {0};
  if (!stream || stream == Py_None) return 0;
  void *s = PyLong_AsVoidPtr(stream);
  if (!s && PyErr_Occurred()) return -1;
  if (s == (void *)1) return 0;
  if (!pm_stream_order(device, s, NULL, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

/* Device that an address belongs to; interfaces do not say it. */
static int device_of(uint64_t ptr, int *device) {
  pm_err err = {0};
  if (!pm_device_of(ptr, device, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

static int read_interface_dict(PyObject *o, int which, PyObject *d, pmpy_buffer *b) {
  PyObject *typestr = PyDict_GetItemString(d, "typestr");
  PyObject *data = PyDict_GetItemString(d, "data"), *shape = PyDict_GetItemString(d, "shape");
  PyObject *strides = PyDict_GetItemString(d, "strides");
  int64_t stride[PM_MAX_RANK];
  unsigned long long ptr;
  int read_only;
  const char *text = typestr && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
  if (!text || !data || !shape || !PyTuple_Check(shape) ||
      !PyArg_ParseTuple(data, "Kp", &ptr, &read_only)) {
    PyErr_Clear();
    return refuse(PyExc_TypeError, which, o, "has a malformed __cuda_array_interface__");
  }
  int dtype = dtype_of_typestr(text);
  if (dtype < 0) return refuse_dtype(which, o, text);
  Py_ssize_t rank = PyTuple_GET_SIZE(shape);
  if (rank > PM_MAX_RANK) return refuse_rank(which, o, (int)rank);
  bool strided = strides && PyTuple_Check(strides) && PyTuple_GET_SIZE(strides) == rank;
  for (Py_ssize_t i = 0; i < rank; i++) {
    b->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    if (strided)
      stride[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i)) / pm_dtypes[dtype].bytes;
  }
  if (PyErr_Occurred()) return -1;
  DLTensor dense = {.ndim = (int)rank, .shape = b->shape, .strides = strided ? stride : NULL};
  b->dtype = (uint8_t)dtype;
  b->rank = (uint8_t)rank;
  b->cuda = true;
  b->read_only = read_only;
  b->ptr = ptr;
  if (!is_dense(&dense) && take_strides(o, which, stride, b) < 0) return -1;
  if (ptr && device_of(ptr, &b->device) < 0) return -1;
  return order_interface(PyDict_GetItemString(d, "stream"), b->device) < 0 ? -1 : 1;
}

static int read_interface(PyObject *o, int which, pmpy_buffer *b) {
  PyObject *d = PyObject_GetAttrString(o, "__cuda_array_interface__");
  if (!d) return -1;
  int code = PyDict_Check(d) ? read_interface_dict(o, which, d, b)
                             : refuse(PyExc_TypeError, which, o,
                                      "has a __cuda_array_interface__ that is no dict");
  Py_DECREF(d);
  return code;
}

/* ---- types -------------------------------------------------------------------------------- */

/* What is known, newest first; nodes live for good. */
typedef struct node {
  pmpy_source source;
  struct node *next;
} node;
static node *_Atomic known_types;
static pthread_mutex_t types_lock = PTHREAD_MUTEX_INITIALIZER;

/* First part of the module's name of a type: "torch" of torch.nn.parameter */
static pmpy_library library_of(PyTypeObject *type) {
  static const struct {
    const char *name;
    pmpy_library library;
  } known[] = {{"torch", PMPY_TORCH}, {"cupy", PMPY_CUPY}, {"jax", PMPY_JAX}, {"jaxlib", PMPY_JAX}};
  pmpy_library library = PMPY_OTHER;
  PyObject *mro = type->tp_mro;
  for (Py_ssize_t k = 0; mro && k < PyTuple_GET_SIZE(mro) && library == PMPY_OTHER; k++) {
    PyObject *module = PyObject_GetAttrString(PyTuple_GET_ITEM(mro, k), "__module__");
    const char *s = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : NULL;
    size_t n = s ? strcspn(s, ".") : 0;
    for (size_t i = 0; i < PM_COUNT(known); i++)
      if (n == strlen(known[i].name) && !strncmp(s, known[i].name, n)) library = known[i].library;
    Py_XDECREF(module);
    PyErr_Clear();
  }
  return library;
}

/* torch.Tensor itself, Parameter and Buffer. Others may stand for anything. */
static bool is_plain_tensor(PyTypeObject *type) {
  PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
  const bool plain = module && PyUnicode_Check(module) &&
                     (!PyUnicode_CompareWithASCIIString(module, "torch") ||
                      !PyUnicode_CompareWithASCIIString(module, "torch.nn.parameter"));
  Py_XDECREF(module);
  PyErr_Clear();
  return plain;
}

/* The DLPack exchange table of a type, of a version we know; NULL without an exception. */
static const DLPackExchangeAPI *exchange_api(PyTypeObject *type) {
  const DLPackExchangeAPIHeader *h = NULL;
  PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
  if (capsule && PyCapsule_CheckExact(capsule))
    h = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);
  PyErr_Clear();
  while (h && h->version.major != DLPACK_MAJOR_VERSION) h = h->prev_api;
  return (const DLPackExchangeAPI *)h;
}

static bool type_has(PyTypeObject *type, const char *name) {
  PyObject *a = PyObject_GetAttrString((PyObject *)type, name);
  Py_XDECREF(a);
  PyErr_Clear();
  return a != NULL;
}

/* Does every object of the type read in one way? Then *s says how. */
static bool describe(PyObject *o, pmpy_source *s) {
  PyTypeObject *type = Py_TYPE(o);
  *s = (pmpy_source){.type = type};
  if (PyArray_Check(o)) {
    s->how = type_has(type, "harden_mask") ? READ_MASKED : READ_NUMPY;
    s->library = PMPY_NUMPY;
    return true;
  }
  if (PyBool_Check(o) || PyLong_Check(o) || PyFloat_Check(o) || PyArray_CheckScalar(o)) {
    s->how = PyArray_CheckScalar(o) ? READ_NUMPY_NUMBER : READ_NUMBER;
    return true;
  }
  s->api = exchange_api(type);
  if (s->api) s->how = READ_DLPACK_C;
  else if (type_has(type, "__dlpack__") && type_has(type, "__dlpack_device__"))
    s->how = READ_DLPACK;
  else if (type_has(type, "__cuda_array_interface__")) s->how = READ_CUDA_INTERFACE;
  else return false;
  s->library = library_of(type);
  s->opaque = s->library == PMPY_TORCH && !is_plain_tensor(type);
  return true;
}

static bool object_has(PyObject *o, const char *name) {
  PyObject *a = PyObject_GetAttrString(o, name);
  Py_XDECREF(a);
  PyErr_Clear();
  return a != NULL;
}

static const pmpy_source *find_source(PyTypeObject *type) {
  for (node *n = atomic_load_explicit(&known_types, memory_order_acquire); n; n = n->next)
    if (n->source.type == type) return &n->source;
  return NULL;
}

static const pmpy_source *add_source(const pmpy_source *s) {
  node *n = pm_malloc(sizeof *n);
  if (!n) return NULL;
  Py_INCREF(s->type);
  n->source = *s;
  pthread_mutex_lock(&types_lock);
  n->next = atomic_load_explicit(&known_types, memory_order_relaxed);
  atomic_store_explicit(&known_types, n, memory_order_release);
  pthread_mutex_unlock(&types_lock);
  return &n->source;
}

/* Borrowed; NULL: no memory, with an exception. */
static const pmpy_source *source_of(PyObject *o) {
  static const pmpy_source number = {.how = READ_NUMBER}, spec = {.how = READ_SPEC},
                           nothing = {.how = READ_NOTHING},
                           interface = {.how = READ_CUDA_INTERFACE, .library = PMPY_OTHER};
  PyTypeObject *type = Py_TYPE(o);
  pmpy_source new;
  if (type == pmpy.device_array_type) return &pmpy_device_array_source;
  if (type == &PyArray_Type) return &pmpy_numpy_source;
  if (type == &PyFloat_Type || type == &PyLong_Type || type == &PyBool_Type) return &number;
  const pmpy_source *s = find_source(type);
  if (s) return s;
  if (!describe(o, &new)) {
    if (object_has(o, "__cuda_array_interface__")) return &interface;
    const bool is_spec = object_has(o, "shape") && object_has(o, "dtype");
    return is_spec && !object_has(o, "is_mutable_array") ? &spec : &nothing;
  }
  s = add_source(&new);
  if (!s) PyErr_NoMemory();
  return s;
}

/* ---- reading ------------------------------------------------------------------------------ */

static int read_device_array(PyObject *o, int which, bool writable, pmpy_buffer *b) {
  const pmpy_device_array *a = (const pmpy_device_array *)o;
  if (writable && a->read_only) return refuse_read_only(which, o);
  b->cuda = true;
  b->device = a->device;
  b->ptr = a->ptr;
  b->dtype = a->spec.dtype;
  b->rank = a->spec.rank;
  b->read_only = a->read_only;
  for (int i = 0; i < a->spec.rank; i++) b->shape[i] = a->spec.shape[i];
  return 1;
}

static int read_as(PyObject *o, int which, pmpy_purpose purpose, pmpy_buffer *b) {
  switch ((enum how)b->source->how) {
    case READ_DEVICE_ARRAY: return read_device_array(o, which, purpose == PMPY_OUTPUT, b);
    case READ_NUMPY: return read_numpy(o, which, purpose, b);
    case READ_MASKED:
      return refuse(PyExc_TypeError, which, o,
                    "is a masked array, and kernels have no masks: pass x.filled(value), or x.data "
                    "to leave the mask out");
    case READ_DLPACK_C:
      if (b->source->opaque) return purpose == PMPY_SPEC ? read_spec(o, which, b) : 0;
      return read_dlpack_c(o, which, b->source->api, b);
    case READ_DLPACK: return read_dlpack(o, which, purpose, b);
    case READ_CUDA_INTERFACE: return read_interface(o, which, b);
    case READ_NUMBER: return read_number(o, which, b);
    case READ_NUMPY_NUMBER: return read_numpy_number(o, which, b);
    case READ_SPEC: return purpose == PMPY_SPEC ? read_spec(o, which, b) : 0;
    case READ_NOTHING: break;
  }
  return 0;
}

int pmpy_read(PyObject *o, int which, pmpy_purpose purpose, pmpy_buffer *b) {
  const bool writable = purpose == PMPY_OUTPUT;
  b->source = source_of(o);
  if (!b->source) return -1;
  b->ptr = 0;
  b->cuda = b->read_only = b->spec = b->copied = false;
  b->device = 0;
  b->keep = NULL;
  b->managed = NULL;
  b->managed_old = NULL;
  b->was = NULL;
  b->strided = false;
  int code = read_as(o, which, purpose, b);
  if (code == 1 && b->strided && purpose < PMPY_INPUT) code = refuse_strides(which, o);
  if (code == 1 && writable && b->source->library == PMPY_JAX)
    code = refuse(PyExc_TypeError, which, o, "is immutable, as all JAX arrays are");
  if (code == 1 && writable && b->read_only)
    code = b->source->library == PMPY_NONE
               ? refuse(PyExc_TypeError, which, o, "is a number; an array is needed")
               : refuse_read_only(which, o);
  if (code < 0) pmpy_release(b);
  return code;
}

void pmpy_release(pmpy_buffer *b) {
  Py_CLEAR(b->keep);
  if (b->managed) {
    if (b->managed->deleter) b->managed->deleter(b->managed);
    b->managed = NULL;
  }
  if (b->managed_old) {
    if (b->managed_old->deleter) b->managed_old->deleter(b->managed_old);
    b->managed_old = NULL;
  }
}

bool pmpy_is_array(PyObject *o, bool specs) {
  PyTypeObject *type = Py_TYPE(o);
  if (type == pmpy.device_array_type || type == &PyArray_Type) return true;
  /* what keywords are set to most often need no search */
  if (o == Py_None || type == &PyBool_Type || type == &PyUnicode_Type || type == &PyLong_Type ||
      type == &PyFloat_Type || type == &PyFunction_Type || PyTuple_Check(o) || PyType_Check(o))
    return false;
  const pmpy_source *s = source_of(o);
  if (!s) PyErr_Clear();
  return s && (s->library != PMPY_NONE || (specs && s->how == READ_SPEC));
}

/* ---- streams ------------------------------------------------------------------------------ */

/* A stream handle from Python: module.function(...).attribute */
static int python_stream(const char *module, const char *function, PyObject *arg, const char *attr,
                         void **stream) {
  PyObject *m = PyImport_ImportModule(module), *s = NULL, *n = NULL;
  if (m)
    s = arg ? PyObject_CallMethod(m, function, "O", arg) : PyObject_CallMethod(m, function, NULL);
  if (s) n = PyObject_GetAttrString(s, attr);
  if (n) *stream = PyLong_AsVoidPtr(n);
  Py_XDECREF(n);
  Py_XDECREF(s);
  Py_XDECREF(m);
  return PyErr_Occurred() ? -1 : 0;
}

int pmpy_current_stream(const pmpy_source *s, int device, void **stream) {
  *stream = NULL;
  if (s->api && s->api->current_work_stream)
    return s->api->current_work_stream(kDLCUDA, device, stream) ? -1 : 0;
  if (s->library == PMPY_CUPY)
    return python_stream("cupy.cuda", "get_current_stream", NULL, "ptr", stream);
  if (s->library != PMPY_TORCH) return 0;
  PyObject *ordinal = PyLong_FromLong(device);
  int code =
      ordinal ? python_stream("torch.cuda", "current_stream", ordinal, "cuda_stream", stream) : -1;
  Py_XDECREF(ordinal);
  return code;
}

/* ---- results ------------------------------------------------------------------------------ */

/* New: module.function(arg) */
static PyObject *call_in(const char *module, const char *function, PyObject *arg) {
  PyObject *m = PyImport_ImportModule(module);
  PyObject *result = m ? PyObject_CallMethod(m, function, "O", arg) : NULL;
  Py_XDECREF(m);
  return result;
}

PyObject *pmpy_finish(const pmpy_source *s, PyObject *made, bool cuda) {
  static const struct {
    pmpy_library library;
    const char *module[2], *function[2];
  } ways[] = {{PMPY_TORCH, {"torch", "torch"}, {"from_numpy", "from_dlpack"}},
              {PMPY_CUPY, {"cupy", "cupy"}, {"asarray", "from_dlpack"}},
              {PMPY_JAX, {"jax.numpy", "jax.dlpack"}, {"asarray", "from_dlpack"}}};
  bool ours = cuda ? Py_TYPE(made) == pmpy.device_array_type : PyArray_CheckExact(made);
  for (size_t i = 0; i < PM_COUNT(ways) && ours; i++)
    if (ways[i].library == s->library) {
      PyObject *result = call_in(ways[i].module[cuda], ways[i].function[cuda], made);
      Py_DECREF(made);
      return result;
    }
  return made;
}

int pmpy_init_exchange(PyObject *module) {
  (void)module;
  import_array1(-1);
  return find_own_dtypes();
}
