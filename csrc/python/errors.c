/* Exceptions: those of errors.def, those of tracing, and the conversion of a pm_err to a raised
 * exception.
 *
 * A name without a dot is a builtin. "pallas_mgpu.X:Base" is created here, with the builtin Base,
 * and added to the module as X. */
#include "../base/env.h"
#include "module.h"

static const char *const meanings[PM_CODE_COUNT] = {
    NULL,
#define PM_ERROR(name, exception, when) when,
#include "../base/errors.def"
#undef PM_ERROR
};

static const struct {
  const char *name, *doc;
  int parent; /* enum pmpy_tracer_error, -1: TypeError */
} tracer_errors[PM_COUNT(pmpy.tracer_error)] = {
    [PMPY_CONCRETIZATION] = {"pallas_mgpu.ConcretizationTypeError",
                             "A traced value was used where Python needs a number", -1},
    [PMPY_BOOL_CONVERSION] = {"pallas_mgpu.TracerBoolConversionError",
                              "A traced value was used as a Python bool", PMPY_CONCRETIZATION},
    [PMPY_INTEGER_CONVERSION] = {"pallas_mgpu.TracerIntegerConversionError",
                                 "A traced value was used as a Python int", PMPY_CONCRETIZATION},
    [PMPY_ARRAY_CONVERSION] = {"pallas_mgpu.TracerArrayConversionError",
                               "A traced value was given to NumPy", PMPY_CONCRETIZATION},
    [PMPY_UNEXPECTED_TRACER] = {"pallas_mgpu.UnexpectedTracerError",
                                "A traced value was used outside its trace or region", -1},
};

/* New; `base` is borrowed. `name` is "pallas_mgpu.X"; the module gets the attribute X. */
static PyObject *make_exception(PyObject *module, const char *name, const char *doc,
                                PyObject *base) {
  PyObject *type = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
  if (!type) return NULL;
  if (PyModule_AddObjectRef(module, strrchr(name, '.') + 1, type) < 0) Py_CLEAR(type);
  return type;
}

/* New. One entry of errors.def. */
static PyObject *exception_of(PyObject *module, PyObject *builtins, const char *spelling,
                              const char *doc) {
  const char *colon = strchr(spelling, ':');
  if (!colon) return PyObject_GetAttrString(builtins, spelling);
  char name[64];
  snprintf(name, sizeof name, "%.*s", (int)(colon - spelling), spelling);
  PyObject *base = PyObject_GetAttrString(builtins, colon + 1);
  PyObject *type = base ? make_exception(module, name, doc, base) : NULL;
  Py_XDECREF(base);
  return type;
}

int pmpy_init_errors(PyObject *module) {
  PyObject *builtins = PyImport_ImportModule("builtins");
  if (!builtins) return -1;
  for (int code = 1; code < PM_CODE_COUNT; code++) {
    pmpy.exceptions[code] =
        exception_of(module, builtins, pm_code_exception((pm_code)code), meanings[code]);
    if (!pmpy.exceptions[code]) break;
  }
  Py_DECREF(builtins);
  for (size_t i = 0; i < PM_COUNT(tracer_errors) && !PyErr_Occurred(); i++) {
    int parent = tracer_errors[i].parent;
    pmpy.tracer_error[i] = make_exception(module, tracer_errors[i].name, tracer_errors[i].doc,
                                          parent < 0 ? PyExc_TypeError : pmpy.tracer_error[parent]);
  }
  return PyErr_Occurred() ? -1 : 0;
}

/* New: the line of the source without its indent, or NULL with no exception set. */
static PyObject *source_line(PyObject *file, uint32_t line) {
  PyObject *linecache = PyImport_ImportModule("linecache");
  PyObject *text = linecache ? PyObject_CallMethod(linecache, "getline", "OI", file, line) : NULL;
  PyObject *bare = text ? PyObject_CallMethod(text, "strip", NULL) : NULL;
  Py_XDECREF(text);
  Py_XDECREF(linecache);
  if (bare && PyUnicode_Check(bare) && PyUnicode_GET_LENGTH(bare) > 0) return bare;
  Py_XDECREF(bare);
  PyErr_Clear();
  return NULL;
}

/* New. */
static PyObject *decode(const char *s) {
  return PyUnicode_DecodeUTF8(s, (Py_ssize_t)strlen(s), "replace");
}

/* New: "  at file:line: source", or NULL: no exception is set where the record has no place. */
static PyObject *place_of(const pm_err *err) {
  if (!err->line || !err->file[0]) return NULL;
  PyObject *file = decode(err->file), *place = NULL;
  PyObject *source = file ? source_line(file, err->line) : NULL;
  if (source) place = PyUnicode_FromFormat("  at %U:%u: %U", file, err->line, source);
  else if (file) place = PyUnicode_FromFormat("  at %U:%u", file, err->line);
  Py_XDECREF(source);
  Py_XDECREF(file);
  return place;
}

PyObject *pmpy_raise(const pm_err *err) {
  PyObject *type = pmpy.exceptions[err->code] ? pmpy.exceptions[err->code] : PyExc_SystemError;
  PyObject *text = decode(err->text), *place = text ? place_of(err) : NULL;
  PyObject *full = place ? PyUnicode_FromFormat("%U\n%U", text, place) : NULL;
  if (text && !PyErr_Occurred()) PyErr_SetObject(type, full ? full : text);
  Py_XDECREF(full);
  Py_XDECREF(place);
  Py_XDECREF(text);
  return NULL;
}

void pmpy_add_place(const pm_err *err) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject *place = value ? place_of(err) : NULL;
  PyObject *none = place ? PyObject_CallMethod(value, "add_note", "O", place) : NULL;
  Py_XDECREF(none);
  Py_XDECREF(place);
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
}

void pmpy_tidy_error(void) {
  PyObject *type, *value, *traceback;
  if (pm_env_is_on(PM_ENV_TRACEBACK)) return;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (value && traceback) PyException_SetTraceback(value, traceback);
  PyObject *hook = value ? pmpy_hook(PMPY_HOOK_TIDY) : NULL;
  PyObject *none = hook ? PyObject_CallOneArg(hook, value) : NULL;
  Py_XDECREF(none);
  PyErr_Clear(); /* it is shown as it is */
  Py_XDECREF(traceback);
  PyErr_Restore(type, value, value ? PyException_GetTraceback(value) : NULL);
}

const char *pmpy_which(int which, char text[32]) {
  if (which >= 0) snprintf(text, 32, "argument %d", which);
  else snprintf(text, 32, "out[%d]", -which - 1);
  return text;
}
