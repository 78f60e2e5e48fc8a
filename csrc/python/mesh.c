/* Calls of a kernel on the devices of a mesh, all at once.
 *
 * Each device has a call of its own, with its arguments, its stream and its outputs; they share one
 * plan, since their arguments must agree in everything that it depends on. On the interpreter all
 * run as one machine. On GPUs every output is made and the kernel is loaded on every device before
 * the first launch, because a kernel that waits for its peers must not be waited for. */
#include "../base/env.h"
#include "kernel.h"
#include "trace.h"

enum { MOST = 64 };

static void end_calls(pmpy_call *c, uint32_t n) {
  for (uint32_t d = 0; d < n; d++) pmpy_call_end(&c[d]);
  PyMem_Free(c);
}

static int differs(const pmpy_call *a, const pmpy_call *b, uint32_t d) {
  if (a->n_in != b->n_in)
    return PyErr_Format(PyExc_ValueError, "kernel %U: %u arguments on device 0 and %u on device %u",
                        a->name, a->n_in, b->n_in, d),
           -1;
  for (uint32_t i = 0; i < a->n_in; i++) {
    const pmpy_buffer *x = &a->in[i], *y = &b->in[i];
    if (x->dtype == y->dtype && x->rank == y->rank && x->strided == y->strided &&
        !memcmp(x->shape, y->shape, x->rank * sizeof *x->shape) &&
        (!x->strided || !memcmp(x->stride, y->stride, x->rank * sizeof *x->stride)))
      continue;
    PyObject *first = pmpy_text_of_buffer(x), *other = first ? pmpy_text_of_buffer(y) : NULL;
    if (other)
      PyErr_Format(PyExc_ValueError,
                   "kernel %U: argument %u differs between device 0 and device %u of the mesh, %U "
                   "and %U: the devices need arrays of one shape, dtype and order of memory",
                   a->name, i, d, first, other);
    Py_XDECREF(first);
    Py_XDECREF(other);
    return -1;
  }
  return 0;
}

/* Read the arguments of device d, and find the plan, which is that of device 0. gpus: ordinals, or
 * NULL. */
static int prepare(pmpy_call *calls, uint32_t d, PyObject *kernel, const int64_t *gpus) {
  pmpy_call *c = &calls[d];
  if (pmpy_call_locate(c) < 0 || (d && differs(calls, c, d) < 0)) return -1;
  if (!c->has_array && gpus) {
    c->home = &pmpy_device_array_source;
    c->cuda = true;
    c->device = (int)gpus[d];
  }
  if (d && (c->cuda != calls->cuda || c->home->library != calls->home->library)) {
    PyErr_Format(PyExc_TypeError,
                 "kernel %U: the arrays of devices 0 and %u of the mesh are of different kinds",
                 c->name, d);
    return -1;
  }
  if (pmpy_call_plan(c, kernel) < 0) return -1;
  if (c->plan != calls->plan) Py_SETREF(c->plan, (pmpy_plan *)Py_NewRef((PyObject *)calls->plan));
  for (uint32_t e = 0; e < d; e++)
    if (pmpy_calls_check_overlap(c, d, &calls[e], e) < 0 ||
        pmpy_calls_check_overlap(&calls[e], e, c, d) < 0)
      return -1;
  return 0;
}

/* ---- GPUs --------------------------------------------------------------------------------- */

typedef struct place {
  PyObject *made[PMPY_MAX_PARAMS];
  uint64_t out[PMPY_MAX_PARAMS], pointers[PMPY_MAX_PARAMS];
  bool has_outputs;
} place;

/* Everything that comes before the first launch. */
static int make_ready(pmpy_call *c, int device, place *p, pm_member *m) {
  if (!c->cuda || c->runs_on < 0) {
    PyErr_Format(
        PyExc_TypeError,
        "kernel %U: a mesh of GPUs takes arrays that lie on them; use plgpu.device_put, or "
        "interpret=True",
        c->name);
    return -1;
  }
  if (c->device != device) {
    PyErr_Format(PyExc_ValueError,
                 "kernel %U: an array for cuda:%d, by the order of the mesh, is on cuda:%d",
                 c->name, device, c->device);
    return -1;
  }
  if (c->plan->n_scratch) {
    PyErr_Format(PyExc_NotImplementedError,
                 "kernel %U: GMEM scratch on a mesh of devices; pass an output instead", c->name);
    return -1;
  }
  for (uint32_t i = 0; c->plan->alias && i < c->plan->n_out; i++)
    if (c->plan->alias[i] >= 0) {
      PyErr_Format(
          PyExc_NotImplementedError,
          "kernel %U: operands that begin outputs, on a mesh of devices; use plgpu.new_ref "
          "without other outputs",
          c->name);
      return -1;
    }
  m->device = c->device;
  if (pmpy_call_find_stream(c, c->device, &m->stream) < 0) return -1;
  if (!(m->kernel = pmpy_plan_kernel(c->plan, c->device))) return -1;
  if (pmpy_call_outputs(c, m->stream, p->made, p->out) < 0) return -1;
  p->has_outputs = true;
  for (uint32_t i = 0; i < c->n_in; i++) p->pointers[i] = c->in[i].ptr;
  for (uint32_t i = 0; i < c->plan->n_out; i++) p->pointers[c->n_in + i] = p->out[i];
  m->pointers = p->pointers;
  return 0;
}

static PyObject *run_on_gpus(pmpy_call *calls, uint32_t n, const int64_t *gpus, bool ordered,
                             uint32_t mesh) {
  if (!gpus) {
    PyErr_Format(PyExc_TypeError,
                 "kernel %U: the arrays are on GPUs, and the mesh has none: give it "
                 "DeviceMesh(..., devices=...)",
                 calls->name);
    return NULL;
  }
  place *places = PyMem_Calloc(n, sizeof *places);
  pm_member members[MOST];
  PyObject *results = places ? PyList_New(n) : PyErr_NoMemory();
  bool ok = results;
  for (uint32_t d = 0; d < n && ok; d++)
    ok = make_ready(&calls[d], (int)gpus[d], &places[d], &members[d]) == 0;
  if (ok) {
    PMPY_ERR(err);
    pm_code code;
    Py_BEGIN_ALLOW_THREADS code = pm_group_launch(members, n, ordered, mesh, &err);
    Py_END_ALLOW_THREADS if (code) pmpy_raise(&err);
    ok = !code;
  }
  for (uint32_t d = 0; places && d < n; d++) {
    if (!places[d].has_outputs) continue;
    PyObject *x = ok ? pmpy_call_finish(&calls[d], places[d].made)
                     : pmpy_call_drop(&calls[d], places[d].made);
    if (x) PyList_SET_ITEM(results, d, x);
    ok = ok && x;
  }
  if (!ok) Py_CLEAR(results);
  PyMem_Free(places);
  return results;
}

/* ---- calls -------------------------------------------------------------------------------- */

/* mesh_call(kernel, args, outs, devices, ordered, mesh): lists of a tuple for each device, an item
 * of outs may be None; ordinals of GPUs or None; the number of mesh_watch. A list of results. */
static PyObject *mesh_call(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
  (void)module;
  if (n_args != 6 || Py_TYPE(args[0]) != pmpy.kernel_type || !PyList_Check(args[1]) ||
      !PyList_Check(args[2]) || PyList_GET_SIZE(args[1]) != PyList_GET_SIZE(args[2]))
    return PyErr_Format(PyExc_TypeError, "mesh_call: expected a kernel, two lists, and a bool");
  pmpy_kernel *k = (pmpy_kernel *)args[0];
  const uint32_t n = (uint32_t)PyList_GET_SIZE(args[1]);
  const uint32_t mesh = (uint32_t)PyLong_AsUnsignedLong(args[5]);
  if (PyErr_Occurred()) return NULL;
  int64_t ordinals[MOST];
  const int64_t *gpus = args[3] == Py_None ? NULL : ordinals;
  if (gpus && pmpy_ints(args[3], "mesh_call: devices", ordinals, MOST) != (int)n)
    return PyErr_Occurred() ? NULL
                            : PyErr_Format(PyExc_ValueError, "mesh_call: %u calls do not fit", n);
  pmpy_call *calls = PyMem_Calloc(n ? n : 1, sizeof *calls);
  PyObject *result = NULL;
  uint32_t read = 0;
  int code = calls ? 1 : -1;
  if (!calls) PyErr_NoMemory();
  for (; read < n && code > 0; read++) {
    PyObject *in = PyList_GET_ITEM(args[1], read), *out = PyList_GET_ITEM(args[2], read);
    code = pmpy_call_read(&calls[read], k->name, &PyTuple_GET_ITEM(in, 0),
                          (size_t)PyTuple_GET_SIZE(in), out == Py_None ? NULL : out, false);
    if (!code) pmpy_call_refuse(&calls[read]);
    else if (code > 0 && prepare(calls, read, args[0], gpus) < 0) code = -1;
  }
  if (code > 0 && calls->runs_on < 0 && calls->emulated) result = pmpy_calls_emulator(calls, n);
  else if (code > 0 && calls->runs_on < 0) result = pmpy_calls_interpreter(calls, n);
  else if (code > 0) result = run_on_gpus(calls, n, gpus, args[4] == Py_True, mesh);
  if (calls) end_calls(calls, read);
  if (!result) pmpy_tidy_error();
  return result;
}

/* ---- one process for each device ---------------------------------------------------------- */

/* Addresses of one argument on all devices, from (list, address of all): a column of `pointers`. */
static int read_addresses(PyObject *entry, uint32_t n, uint64_t *first, size_t step,
                          uint64_t *all) {
  PyObject *list, *everywhere;
  if (!PyArg_ParseTuple(entry, "O!O", &PyList_Type, &list, &everywhere)) return -1;
  if (PyList_GET_SIZE(list) != n) {
    PyErr_Format(PyExc_ValueError, "mesh_launch: %zd addresses for %u devices",
                 PyList_GET_SIZE(list), n);
    return -1;
  }
  for (uint32_t d = 0; d < n; d++)
    first[d * step] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, d));
  *all = PyLong_AsUnsignedLongLong(everywhere);
  return PyErr_Occurred() ? -1 : 0;
}

typedef struct table {
  uint64_t *pointers, *all, counters[PM_MAX_DEVICES], all_counters;
  const uint64_t *rows[PM_MAX_DEVICES];
} table;

static int fill_table(pmpy_call *c, const pm_kernel *k, PyObject *tables, uint32_t n, table *t) {
  const uint32_t n_params = c->n_in + c->plan->n_out;
  const int32_t *params;
  const uint32_t n_peers = pm_kernel_peers(k, &params);
  for (uint32_t i = 0; i < n_peers; i++) {
    if (params[i] < 0) continue;
    PyObject *entry = PyList_GetItem(tables, params[i]);
    if (entry == Py_None)
      PyErr_Format(PyExc_ValueError,
                   "kernel %U: argument %d (operands, then outputs, from 0) is accessed on other "
                   "devices, and is not in memory that they reach: make it by plgpu.symm_empty",
                   c->name, params[i]);
    if (!entry || entry == Py_None ||
        read_addresses(entry, n, t->pointers + params[i], n_params, &t->all[params[i]]) < 0)
      return -1;
  }
  for (uint32_t d = 0; d < n; d++) t->rows[d] = t->pointers + (size_t)d * n_params;
  return 0;
}

/* Calls counters(words) -> (addresses, address of all), then launches. */
static int launch_rank(pmpy_call *c, uint32_t rank, uint32_t n, uint32_t mesh, PyObject *tables,
                       PyObject *counters, table *t) {
  const uint32_t n_params = c->n_in + c->plan->n_out;
  uint64_t own[PMPY_MAX_PARAMS];
  PMPY_ERR(err);
  pm_kernel *k = pmpy_plan_kernel(c->plan, c->device);
  if (!k || fill_table(c, k, tables, n, t) < 0) return -1;
  for (uint32_t i = 0; i < c->n_in; i++) own[i] = c->in[i].ptr;
  for (uint32_t i = 0; i < c->plan->n_out; i++) own[c->n_in + i] = c->out[i].ptr;
  memcpy(t->pointers + (size_t)rank * n_params, own, n_params * sizeof *own);
  PyObject *words = PyObject_CallFunction(counters, "I", c->plan->program.n_counters + 1);
  const int code = words ? read_addresses(words, n, t->counters, 1, &t->all_counters) : -1;
  Py_XDECREF(words);
  if (code < 0) return -1;
  const pm_peers peers = {.rank = rank,
                          .pointers = t->rows,
                          .counters = t->counters,
                          .all = t->all,
                          .all_counters = t->all_counters,
                          .mesh = mesh};
  uint64_t record;
  if (!pm_watch_check(mesh, &err) &&
      !pm_kernel_launch_in_mesh(k, own, t->counters[rank], &peers, c->stream, &record, &err) &&
      !pm_kernel_end_checks(k, c->stream, record, &err))
    return 0;
  pmpy_raise(&err);
  return -1;
}

/* mesh_launch(kernel, rank, devices, mesh, args, outs, tables, counters, stream): on this process'
 * device. tables: for each operand and output (addresses on all devices, address of all) or None.
 */
static PyObject *mesh_launch(PyObject *module, PyObject *args) {
  PyObject *kernel, *in, *out, *tables, *counters, *stream;
  unsigned rank, n, mesh;
  pmpy_call c;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!IIIO!O!O!OO:mesh_launch", pmpy.kernel_type, &kernel, &rank, &n,
                        &mesh, &PyTuple_Type, &in, &PyTuple_Type, &out, &PyList_Type, &tables,
                        &counters, &stream))
    return NULL;
  if (n > PM_MAX_DEVICES || rank >= n)
    return PyErr_Format(PyExc_ValueError, "mesh_launch: rank %u of %u devices", rank, n);
  c.for_xla = false;
  int code = pmpy_call_read(&c, ((pmpy_kernel *)kernel)->name, &PyTuple_GET_ITEM(in, 0),
                            (size_t)PyTuple_GET_SIZE(in), out, false);
  if (!code) pmpy_call_refuse(&c);
  if (code > 0 && (pmpy_call_stream(&c, stream) < 0 || pmpy_call_locate(&c) < 0 ||
                   pmpy_call_plan(&c, kernel) < 0))
    code = -1;
  if (code > 0 && c.runs_on < 0) {
    PyErr_SetString(PyExc_TypeError, "mesh_launch: arrays of a GPU are needed");
    code = -1;
  }
  table *t = code > 0 ? PyMem_Calloc(1, sizeof *t) : NULL;
  if (t) {
    const size_t n_params = c.n_in + c.plan->n_out;
    t->pointers = PyMem_Calloc(n * n_params, sizeof *t->pointers);
    t->all = PyMem_Calloc(n_params, sizeof *t->all);
    if (!t->pointers || !t->all) PyErr_NoMemory();
    else launch_rank(&c, rank, n, mesh, tables, counters, t);
    PyMem_Free(t->pointers);
    PyMem_Free(t->all);
  } else if (code > 0) {
    PyErr_NoMemory();
  }
  PyMem_Free(t);
  pmpy_call_end(&c);
  if (!PyErr_Occurred()) Py_RETURN_NONE;
  pmpy_tidy_error();
  return NULL;
}

static int read_devices(PyObject *ordinals, int *devices) {
  int64_t list[MOST];
  const int n = pmpy_ints(ordinals, "DeviceMesh: devices", list, MOST);
  for (int i = 0; i < n; i++) devices[i] = (int)list[i];
  return n;
}

static PyObject *drain(PyObject *module, PyObject *ordinals) {
  int devices[MOST];
  const int n = read_devices(ordinals, devices);
  pm_code code;
  PMPY_ERR(err);
  (void)module;
  if (n < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS code = pm_group_drain(devices, (uint32_t)n, &err);
  Py_END_ALLOW_THREADS if (code) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

static PyObject *connect(PyObject *module, PyObject *ordinals) {
  int devices[MOST];
  const int n = read_devices(ordinals, devices);
  PMPY_ERR(err);
  (void)module;
  if (n < 0) return NULL;
  if (pm_group_connect(devices, (uint32_t)n, &err)) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

/* ---- waits that can be ended --------------------------------------------------------------- */

static PyObject *watch(PyObject *module, PyObject *args) {
  unsigned n;
  long long milliseconds;
  int device;
  uint32_t mesh;
  PMPY_ERR(err);
  (void)module;
  if (!PyArg_ParseTuple(args, "iIL:mesh_watch", &device, &n, &milliseconds)) return NULL;
  if (milliseconds < 0) milliseconds = pm_env_number(PM_ENV_MESH_SECONDS) * 1000;
  if (pm_watch_new(device, n, (uint32_t)pm_min(milliseconds, UINT32_MAX), &mesh, &err))
    return pmpy_raise(&err);
  return PyLong_FromUnsignedLong(mesh);
}

static PyObject *end_waits(PyObject *module, PyObject *args) {
  unsigned mesh;
  const char *why;
  (void)module;
  if (!PyArg_ParseTuple(args, "Is:mesh_end", &mesh, &why)) return NULL;
  pm_watch_end(mesh, why);
  Py_RETURN_NONE;
}

static PyObject *check_waits(PyObject *module, PyObject *number) {
  const unsigned long mesh = PyLong_AsUnsignedLong(number);
  PMPY_ERR(err);
  (void)module;
  if (PyErr_Occurred()) return NULL;
  if (pm_watch_check((uint32_t)mesh, &err)) return pmpy_raise(&err);
  Py_RETURN_NONE;
}

static PyObject *leave(PyObject *module, PyObject *number) {
  const unsigned long milliseconds = PyLong_AsUnsignedLong(number);
  (void)module;
  if (PyErr_Occurred()) return NULL;
  Py_BEGIN_ALLOW_THREADS pm_watch_leave((uint32_t)milliseconds);
  Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"mesh_call", (PyCFunction)(void (*)(void))mesh_call, METH_FASTCALL,
     "mesh_call(kernel, args, outs, devices, ordered, mesh): call a kernel on all devices of its "
     "mesh."},
    {"mesh_launch", mesh_launch, METH_VARARGS,
     "mesh_launch(kernel, rank, devices, mesh, args, outs, tables, counters, stream): launch a "
     "kernel "
     "of a mesh on the device of this process."},
    {"mesh_watch", watch, METH_VARARGS,
     "mesh_watch(device, devices, milliseconds): a number for a mesh, whose kernels' waits for "
     "other devices end when mesh_end asks for it, or after some time (0: never, -1: as the "
     "environment says)."},
    {"mesh_end", end_waits, METH_VARARGS,
     "mesh_end(mesh, why): end all waits of a mesh for other devices."},
    {"mesh_check", check_waits, METH_O, "mesh_check(mesh): DeadlockError if its waits were ended."},
    {"mesh_leave", leave, METH_O,
     "mesh_leave(milliseconds): wait so long for kernels of meshes, then end their waits."},
    {"mesh_connect", connect, METH_O,
     "mesh_connect(devices): let each of these GPUs access the memory of all others."},
    {"mesh_drain", drain, METH_O,
     "mesh_drain(devices): wait for everything that runs on these GPUs."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_mesh(PyObject *module) {
  if (PyModule_AddIntConstant(module, "MAX_DEVICES", PM_MAX_DEVICES) < 0) return -1;
  return PyModule_AddFunctions(module, functions);
}
