/* Small queries: the dtype of a Python object, the GPUs and compilers of this machine. */
#include "exchange.h"
#include "trace.h"

#include <sys/stat.h>

#include "../base/env.h"

static PyObject *as_dtype(PyObject *Py_UNUSED(self), PyObject *any) {
  pm_dtype t;
  return pmpy_dtype_from(any, &t) < 0 ? NULL : pmpy_dtype_object(t);
}

/* ---- where NVRTC is -------------------------------------------------------------------------
 * The wheel's place is known, and looked at first without opening anything: asking cuda-pathfinder
 * takes longer than a hit in the compile cache may. It is asked where the wheel is not on sys.path.
 */

static const struct {
  const char *below;
  int major;
} wheels[] = {
    {"nvidia/cu13/lib/libnvrtc.so.13", 13},
    {"nvidia/cuda_nvrtc/lib/libnvrtc.so.13", 13},
    {"nvidia/cuda_nvrtc/lib/libnvrtc.so.12", 12},
};

/* Hint at the wheel of this major version, if it is on sys.path. */
static bool hint_wheel(int major) {
  PyObject *dirs = PySys_GetObject("path"); /* borrowed */
  for (Py_ssize_t i = 0; dirs && PyList_Check(dirs) && i < PyList_GET_SIZE(dirs); i++) {
    PyObject *dir = PyList_GET_ITEM(dirs, i);
    const char *text = PyUnicode_Check(dir) ? PyUnicode_AsUTF8(dir) : NULL;
    for (size_t k = 0; text && *text && k < PM_COUNT(wheels); k++) {
      char path[4096];
      struct stat st;
      int n = snprintf(path, sizeof path, "%s/%s", text, wheels[k].below);
      if (wheels[k].major != major || n < 0 || (size_t)n >= sizeof path || stat(path, &st))
        continue;
      pm_nvrtc_hint(path);
      return true;
    }
  }
  PyErr_Clear();
  return false;
}

static void hint_pathfinder(void) {
  PyObject *module = PyImport_ImportModule("cuda.pathfinder");
  PyObject *lib =
      module ? PyObject_CallMethod(module, "load_nvidia_dynamic_lib", "s", "nvrtc") : NULL;
  PyObject *path = lib ? PyObject_GetAttrString(lib, "abs_path") : NULL;
  if (path && PyUnicode_Check(path)) pm_nvrtc_hint(PyUnicode_AsUTF8(path));
  Py_XDECREF(path);
  Py_XDECREF(lib);
  Py_XDECREF(module);
  PyErr_Clear(); /* not found: the loader's own search comes next, and its error tells what to do */
}

void pmpy_find_nvrtc(void) {
  static bool done;
  if (done) return;
  done = true;
  pm_device_info d;
  pm_err err = {0};
  bool old = pm_device_count(NULL, 0) && !pm_device_get(0, &d, &err) && d.driver_version < 13000;
  if (!hint_wheel(old ? 12 : 13) && !hint_wheel(old ? 13 : 12)) hint_pathfinder();
}

/* ---- targets ------------------------------------------------------------------------------- */

int pmpy_target(PyObject *name, const pm_target **out) {
  *out = NULL;
  if (name == Py_None) return 0;
  const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
  if (text) *out = pm_target_named(text);
  if (*out || PyErr_Occurred()) return *out ? 0 : -1;
  pm_arena arena;
  pm_arena_init(&arena);
  PyErr_Format(PyUnicode_Check(name) ? PyExc_ValueError : PyExc_TypeError,
               "target must be one of %s, got %R", pm_target_list(&arena, 0), name);
  pm_arena_free(&arena);
  return -1;
}

/* New: the names of a target's features. */
static PyObject *features_of(const pm_target *t) {
  PyObject *out = PySet_New(NULL);
  for (int k = 0; out && k < PM_FEATURE_COUNT; k++) {
    if (!(t->features >> k & 1)) continue;
    PyObject *name = PyUnicode_FromString(pm_feature_names[k]);
    if (!name || PySet_Add(out, name) < 0) Py_CLEAR(out);
    Py_XDECREF(name);
  }
  return out;
}

_Thread_local const pm_target *pmpy_traced_for;

/* target(which=None): of a name, a device, or what the kernel is traced for; outside of kernels
 * what those on host arrays run on, without a GPU the first of the table. */
static PyObject *target(PyObject *Py_UNUSED(self), PyObject *args) {
  PyObject *which = Py_None;
  const pm_target *t = NULL;
  char why[512];
  PMPY_ERR(err);
  if (!PyArg_ParseTuple(args, "|O:target", &which)) return NULL;
  if (PyUnicode_Check(which)) {
    if (pmpy_target(which, &t) < 0) return NULL;
  } else if (which == Py_None && pmpy_traced_for) {
    t = pmpy_traced_for;
  } else {
    int device = which == Py_None ? pmpy_fitting_device(why, sizeof why) : -1;
    if (which != Py_None && pmpy_device_ordinal(which, &device) < 0) return NULL;
    if (device < 0 && pm_asked_target(&t, &err)) return pmpy_raise(&err);
    if (device < 0) t = t ? t : &pm_targets[0];
    else if (pm_device_target(device, &t, &err)) return pmpy_raise(&err);
  }
  PyObject *has = features_of(t);
  if (!has) return NULL;
  return Py_BuildValue("{s:s,s:i,s:L,s:i,s:i,s:i,s:N}", "name", t->text, "capability",
                       t->capability, "smem", (long long)t->smem, "tmem", t->tmem, "cluster",
                       t->cluster, "sms", t->sms, "features", has);
}

/* New: one dict of a device. */
static PyObject *device_dict(int ordinal) {
  pm_device_info d;
  pm_err err = {0};
  if (pm_device_get(ordinal, &d, &err)) return pmpy_raise(&err);
  return Py_BuildValue("{s:i,s:s,s:i,s:z,s:i,s:L,s:L,s:i}", "ordinal", d.ordinal, "name", d.name,
                       "capability", d.capability, "target", d.target ? d.target->text : NULL,
                       "sm_count", d.sm_count, "smem_optin", (long long)d.smem_optin,
                       "memory_bytes", (long long)d.memory_bytes, "driver", d.driver_version);
}

/* Of the device that kernels on host arrays run on for None; None: it is -1. */
static PyObject *sm_count(PyObject *Py_UNUSED(self), PyObject *device) {
  char why[512];
  pm_device_info d;
  pm_err err = {0};
  const long ordinal =
      device == Py_None ? pmpy_fitting_device(why, sizeof why) : PyLong_AsLong(device);
  if (ordinal < 0) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
  if (pm_device_get((int)pm_min(ordinal, INT_MAX), &d, &err)) return pmpy_raise(&err);
  return PyLong_FromLong(d.sm_count);
}

static PyObject *system_info(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
  char why[512] = "";
  int n = pm_device_count(why, sizeof why);
  PyObject *devices = PyList_New(0), *out = NULL;
  for (int k = 0; devices && k < n; k++) {
    PyObject *d = device_dict(k);
    if (!d || PyList_Append(devices, d) < 0) {
      Py_XDECREF(d);
      goto done;
    }
    Py_DECREF(d);
  }
  if (!devices) return NULL;
  int device = pmpy_fitting_device(why, sizeof why);
  if (device >= 0) why[0] = 0;
  const char *asked = pm_env(PM_ENV_BACKEND);
  const bool emulated = !strcmp(asked, "emulate"), off = emulated || !strcmp(asked, "interpret");
  if (off) snprintf(why, sizeof why, "PALLAS_MGPU_BACKEND=%s", asked);
  const char *backend = device >= 0 && !off ? "cuda" : emulated ? "emulate" : "interpret";
  int major = 0, minor = 0;
  const char *path = "";
  pm_err err = {0};
  pmpy_find_nvrtc();
  pm_code code = pm_nvrtc_version(&major, &minor, &path, &err);
  PyObject *nvrtc = code ? PyUnicode_FromFormat("not found (%s)", err.text)
                         : PyUnicode_FromFormat("%d.%d, %s", major, minor, path);
  if (nvrtc)
    out = Py_BuildValue("{s:O,s:i,s:s,s:N,s:s,s:s}", "devices", devices, "device", device, "no_gpu",
                        why, "nvrtc", nvrtc, "cache_dir", pm_cache_dir(), "backend", backend);
done:
  Py_DECREF(devices);
  return out;
}

static PyObject *cache_dir(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
  if (pm_env_is_on(PM_ENV_NO_CACHE)) Py_RETURN_NONE;
  return Py_BuildValue("(sL)", pm_cache_dir(), (long long)pm_env_number(PM_ENV_CACHE_BYTES));
}

static PyObject *check_products(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *ptx, *image;
  Py_ssize_t size;
  pm_err err = {0};
  if (!PyArg_ParseTuple(args, "sy#:check_products", &ptx, &image, &size)) return NULL;
  pmpy_find_nvrtc();
  if (pm_check_products(ptx, image, (size_t)size, "given", &err)) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

static PyObject *set_trace_flags(PyObject *Py_UNUSED(self), PyObject *flags) {
  const long bits = PyLong_AsLong(flags);
  if (bits == -1 && PyErr_Occurred()) return NULL;
  pmpy.trace_flags = (uint8_t)bits;
  Py_RETURN_NONE;
}

static PyObject *digest(PyObject *Py_UNUSED(self), PyObject *data) {
  char *bytes, text[33];
  Py_ssize_t n;
  uint64_t hash[2];
  if (PyBytes_AsStringAndSize(data, &bytes, &n) < 0) return NULL;
  pm_digest(bytes, (size_t)n, hash);
  snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)hash[0],
           (unsigned long long)hash[1]);
  return PyUnicode_FromString(text);
}

/* For tests: see pm_fail_allocation. */
static PyObject *fail_allocation(PyObject *Py_UNUSED(self), PyObject *number) {
  const long n = PyLong_AsLong(number);
  if (n == -1 && PyErr_Occurred()) return NULL;
  pm_fail_allocation(n);
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"as_dtype", as_dtype, METH_O, "NumPy dtype of any spelling; 64-bit ones become 32-bit."},
    {"cache_dir", cache_dir, METH_NOARGS,
     "cache_dir(): (directory of the compile cache, bytes it may have); None: it is off."},
    {"digest", digest, METH_O, "digest(data): 128 bits of the SHA-256 of bytes, as text."},
    {"fail_allocation", fail_allocation, METH_O,
     "The n-th allocation of this thread from now on fails, once; 0: none."},
    {"check_products", check_products, METH_VARARGS,
     "check_products(ptx, cubin): CompileError if the machine code lacks products of the PTX, as "
     "after every compilation."},
    {"set_trace_flags", set_trace_flags, METH_O, "How kernels are traced from now on: _flags.py."},
    {"target", target, METH_VARARGS,
     "target(which=None): figures of a target, by its name or of a device; None: of what kernels "
     "on "
     "host arrays are lowered for."},
    {"sm_count", sm_count, METH_O,
     "sm_count(device): multiprocessors of a device; None: of that of host arrays, or None."},
    {"system_info", system_info, METH_NOARGS,
     "Devices, NVRTC, cache directory and backend, as a dict."},
    {NULL, NULL, 0, NULL},
};

int pmpy_init_info(PyObject *module) { return PyModule_AddFunctions(module, functions); }
