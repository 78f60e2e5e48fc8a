/* dtypes between Python and the core.
 *
 * NumPy's dtype objects for these types are singletons, so they are looked up once and then
 * compared by identity. Everything else is first converted to a NumPy dtype and found by its name.
 */
#include "trace.h"

/* New: numpy.dtype(spelling). */
static PyObject *numpy_dtype(PyObject *spelling) {
  PyObject *numpy = PyImport_ImportModule("numpy");
  PyObject *dtype = numpy ? PyObject_CallMethod(numpy, "dtype", "O", spelling) : NULL;
  Py_XDECREF(numpy);
  return dtype;
}

/* New: what numpy.dtype() takes for a dtype; those of ml_dtypes are not known to NumPy by name. */
static PyObject *spelling_of(pm_dtype t) {
  if (!pm_is_extended(t)) return PyUnicode_FromString(pm_dtypes[t].text);
  PyObject *module = PyImport_ImportModule("ml_dtypes");
  PyObject *type = module ? PyObject_GetAttrString(module, pm_dtypes[t].text) : NULL;
  Py_XDECREF(module);
  return type;
}

PyObject *pmpy_dtype_object(pm_dtype t) {
  PyObject *known = __atomic_load_n(&pmpy.dtypes[t], __ATOMIC_ACQUIRE);
  if (known) return Py_NewRef(known);
  PyObject *spelling = spelling_of(t);
  PyObject *made = spelling ? numpy_dtype(spelling) : NULL;
  Py_XDECREF(spelling);
  if (!made) return NULL;
  if (__atomic_compare_exchange_n(&pmpy.dtypes[t], &known, made, false, __ATOMIC_ACQ_REL,
                                  __ATOMIC_ACQUIRE))
    return Py_NewRef(made); /* the table keeps the first reference */
  Py_DECREF(made);          /* another thread was faster */
  return Py_NewRef(known);
}

static bool find(const char *name, pm_dtype *out) {
  int t = pm_dtype_find(name);
  for (int k = 0; k < PM_DTYPE_COUNT && t < 0; k++)
    if (*pm_dtypes[k].wide && !strcmp(name, pm_dtypes[k].wide)) t = k;
  if (t < 0) return false;
  *out = (pm_dtype)t;
  return true;
}

/* Is `dtype` a numpy dtype of native byte order with one of our names? Clears any exception. */
static bool find_numpy(PyObject *dtype, pm_dtype *out) {
  PyObject *native = PyObject_GetAttrString(dtype, "isnative");
  PyObject *name = native == Py_True ? PyObject_GetAttrString(dtype, "name") : NULL;
  const char *text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
  bool found = text && find(text, out);
  Py_XDECREF(name);
  Py_XDECREF(native);
  PyErr_Clear();
  return found;
}

/* torch.float16 and the like say their name only as text. */
static bool find_torch(PyObject *any, pm_dtype *out) {
  if (strcmp(Py_TYPE(any)->tp_name, "torch.dtype")) return false;
  PyObject *repr = PyObject_Str(any);
  const char *text = repr ? PyUnicode_AsUTF8(repr) : NULL;
  bool found = text && !strncmp(text, "torch.", 6) && find(text + 6, out);
  Py_XDECREF(repr);
  PyErr_Clear();
  return found;
}

const char *pmpy_dtype_names(char *names) {
  size_t n = 0;
  for (int t = 0; t < PM_DTYPE_COUNT; t++)
    n +=
        (size_t)snprintf(names + n, PMPY_DTYPE_NAMES - n, "%s%s", t ? ", " : "", pm_dtypes[t].text);
  return names;
}

static int refuse(PyObject *any) {
  char names[PMPY_DTYPE_NAMES];
  PyErr_Clear();
  PyObject *repr = PyObject_Repr(any);
  const char *text = repr ? PyUnicode_AsUTF8(repr) : NULL;
  if (!text) PyErr_Clear();
  pmpy_fail(PM_E_TYPE, "dtype: got %.200s; accepted are %s (64-bit ones become 32-bit)",
            text ? text : Py_TYPE(any)->tp_name, pmpy_dtype_names(names));
  Py_XDECREF(repr);
  return -1;
}

int pmpy_dtype_from(PyObject *any, pm_dtype *out) {
  for (int t = 0; t < PM_DTYPE_COUNT; t++) {
    if (any != __atomic_load_n(&pmpy.dtypes[t], __ATOMIC_RELAXED)) continue;
    *out = (pm_dtype)t;
    return 0;
  }
  if (any == Py_None) return refuse(any); /* NumPy would take float64 */
  if (PyUnicode_Check(any)) {
    const char *text = PyUnicode_AsUTF8(any);
    if (text && find(text, out)) return 0;
    PyErr_Clear();
  }
  if (find_numpy(any, out) || find_torch(any, out)) return 0;
  PyObject *dtype = PyType_Check(any) ? NULL : PyObject_GetAttrString(any, "dtype");
  if (!dtype) {
    PyErr_Clear();
    dtype = numpy_dtype(any);
  }
  bool found = dtype && (find_numpy(dtype, out) || find_torch(dtype, out));
  Py_XDECREF(dtype);
  return found ? 0 : refuse(any);
}
