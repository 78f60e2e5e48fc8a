/* Conversion of 64-bit NumPy arrays and scalars to the 32-bit dtypes of kernels.
 *
 * NumPy creates 64-bit arrays by default, so operands of a kernel are converted. Every value must
 * fit: integers exactly, finite floats as finite floats. */
#include "exchange.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <float.h>
#include <math.h>
#include <numpy/arrayobject.h>

static const struct wide {
  char kind;
  int number, narrow; /* NumPy's */
  pm_dtype to;
  const char *text;
} kinds[] = {{'i', NPY_INT64, NPY_INT32, PM_I32, "int64"},
             {'u', NPY_UINT64, NPY_UINT32, PM_U32, "uint64"},
             {'f', NPY_FLOAT64, NPY_FLOAT32, PM_F32, "float64"}};

static const struct wide *find(const PyArray_Descr *d) {
  for (size_t i = 0; i < PM_COUNT(kinds); i++)
    if (d->kind == kinds[i].kind && PyDataType_ELSIZE(d) == 8) return &kinds[i];
  return NULL;
}

/* Convert n elements; do all of them fit? */
static bool convert(const struct wide *w, const void *from, void *to, npy_intp n) {
  bool lost = false;
  if (w->to == PM_I32) {
    for (npy_intp i = 0; i < n; i++) {
      const int64_t x = ((const int64_t *)from)[i];
      lost |= (((int32_t *)to)[i] = (int32_t)x) != x;
    }
  } else if (w->to == PM_U32) {
    for (npy_intp i = 0; i < n; i++) {
      const uint64_t x = ((const uint64_t *)from)[i];
      lost |= (((uint32_t *)to)[i] = (uint32_t)x) != x;
    }
  } else {
    for (npy_intp i = 0; i < n; i++) {
      const double x = ((const double *)from)[i];
      lost |= (fabsf(((float *)to)[i] = (float)x) > FLT_MAX) & (fabs(x) <= DBL_MAX);
    }
  }
  return !lost;
}

/* Always -1: OverflowError that names the first element that does not fit. */
static int too_large(const struct wide *w, int which, PyArrayObject *a) {
  const size_t size = 8;
  const char *at = PyArray_DATA(a);
  char narrow[4], name[32];
  npy_intp i = 0, left;
  while (convert(w, at + (size_t)i * size, narrow, 1)) i++;
  PyObject *value = PyArray_GETITEM(a, at + (size_t)i * size);
  PyObject *index = PyTuple_New(PyArray_NDIM(a));
  left = i;
  for (int d = PyArray_NDIM(a); index && d-- > 0; left /= PyArray_DIM(a, d))
    PyTuple_SET_ITEM(index, d, PyLong_FromSsize_t(left % PyArray_DIM(a, d)));
  if (value && index && !PyErr_Occurred())
    PyErr_Format(PyExc_OverflowError,
                 "%s (numpy.ndarray of %s) is converted to %s, and %R at index %R does not fit",
                 pmpy_which(which, name), w->text, pm_dtypes[w->to].text, value, index);
  Py_XDECREF(index);
  Py_XDECREF(value);
  return -1;
}

PyObject *pmpy_narrow_array(PyObject *array, int which, pm_dtype *to, const char **was) {
  PyArrayObject *a = (PyArrayObject *)array;
  const struct wide *w = find(PyArray_DESCR(a));
  if (!w) return NULL;
  PyArrayObject *wide = (PyArrayObject *)PyArray_FromArray(
      a, PyArray_DescrFromType(w->number), NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);
  if (!wide) return NULL;
  PyObject *out = PyArray_SimpleNew(PyArray_NDIM(wide), PyArray_DIMS(wide), w->narrow);
  bool ok = false;
  if (out) {
    const void *from = PyArray_DATA(wide);
    void *into = PyArray_DATA((PyArrayObject *)out);
    const npy_intp n = PyArray_SIZE(wide);
    Py_BEGIN_ALLOW_THREADS ok = convert(w, from, into, n);
    Py_END_ALLOW_THREADS
  }
  if (out && !ok) too_large(w, which, wide);
  if (!ok) Py_CLEAR(out);
  Py_DECREF(wide);
  *to = w->to;
  *was = w->text;
  return out;
}

int pmpy_narrow_scalar(PyObject *scalar, int which, void *into, pm_dtype *to, const char **was) {
  PyArray_Descr *d = PyArray_DescrFromScalar(scalar);
  const struct wide *w = d ? find(d) : NULL;
  char value[8], name[32];
  Py_XDECREF(d);
  if (!w) return PyErr_Occurred() ? -1 : 0;
  PyArray_ScalarAsCtype(scalar, value);
  *to = w->to;
  *was = w->text;
  if (convert(w, value, into, 1)) return 1;
  PyErr_Format(PyExc_OverflowError, "%s (numpy.%s) is converted to %s, and %R does not fit",
               pmpy_which(which, name), w->text, pm_dtypes[w->to].text, scalar);
  return -1;
}

int pmpy_init_narrow(PyObject *module) {
  (void)module;
  import_array1(-1);
  return 0;
}
