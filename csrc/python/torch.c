/* Results as torch tensors, by the shortest way.
 *
 * The allocator of torch's DLPack table creates two tensors for one, which takes about half as long
 * again. On a GPU, the shortest way is the function with which torch's own compiled code allocates,
 * _empty_strided_cuda, which bypasses the dispatcher. Next come torch's C interface for compiled
 * models (aoti_torch_empty_strided and related functions, whose ABI is stable) and the function
 * that wraps a tensor into its Python object. If one of these is missing or fails, the next one is
 * used, finally the DLPack table, which also has the better error messages. The first two are
 * private to torch, and used with the versions that they were tested with only. None of this is
 * needed to build, and nothing here loads torch. */
#include "exchange.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

/* ---- versions ------------------------------------------------------------------------------- */

enum { UNKNOWN, PRIVATE, PUBLIC, FIRST_MINOR = 4, LAST_MINOR = 12 }; /* torch 2.4 to 2.12 */
static atomic_int ways;

static int ways_of_version(void) {
  int major = 0, minor = 0;
  PyObject *module = PyImport_ImportModule("torch");
  PyObject *version = module ? PyObject_GetAttrString(module, "__version__") : NULL;
  PyObject *text = version ? PyObject_Str(version) : NULL;
  const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
  const bool known = s && sscanf(s, "%d.%d", &major, &minor) == 2 && major == 2 &&
                     minor >= FIRST_MINOR && minor <= LAST_MINOR;
  Py_XDECREF(text);
  Py_XDECREF(version);
  Py_XDECREF(module);
  PyErr_Clear();
  return known ? PRIVATE : PUBLIC;
}

static bool is_private_allowed(void) {
  if (ways == UNKNOWN) ways = ways_of_version();
  return ways == PRIVATE;
}

static PyObject *use_private(PyObject *module, PyObject *on) {
  (void)module;
  const int yes = PyObject_IsTrue(on);
  if (yes < 0) return NULL;
  ways = yes ? UNKNOWN : PUBLIC;
  Py_RETURN_NONE;
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Whether a tensor requires gradients costs an eighth of a launch as an attribute, and counting a
 * write as much. Private to torch are where a Python object points to its tensor, which is found by
 * looking for the address that `_cdata` tells, and the functions that answer and count. A C++
 * reference to a tensor is the address of that pointer. */
static struct {
  atomic_int offset; /* bytes; 0: not looked for, -1: not found */
  PyTypeObject *tensor, *parameter;
  bool (*requires_grad)(const void *impl);
  void *const *(*version_counter)(const void *reference);
  void (*bump_version)(const void *reference);
} direct;

enum { FIRST_OFFSET = 16, OWNED_OFFSET = 24, LAST_OFFSET = 48 }; /* of 24: a flag precedes it */

static PyTypeObject *type_of(const char *module, const char *name) {
  PyObject *m = PyImport_ImportModule(module);
  PyObject *type = m ? PyObject_GetAttrString(m, name) : NULL; /* kept for good */
  Py_XDECREF(m);
  PyErr_Clear();
  return (PyTypeObject *)type;
}

static void find_functions(void) {
  void *c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!c10 || !cpu) return;
  *(void **)&direct.requires_grad = dlsym(c10, "_ZNK3c1010TensorImpl13requires_gradEv");
  *(void **)&direct.version_counter =
      dlsym(cpu, "_ZN5torch8autograd4impl15version_counterERKN2at6TensorE");
  *(void **)&direct.bump_version =
      dlsym(cpu, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
}

static int find_offset(PyObject *tensor) {
  find_functions();
  direct.tensor = type_of("torch", "Tensor");
  direct.parameter = type_of("torch.nn", "Parameter");
  if (!direct.tensor || !direct.parameter) return -1;
  PyObject *address = PyObject_GetAttrString(tensor, "_cdata");
  void *impl = address ? PyLong_AsVoidPtr(address) : NULL;
  Py_XDECREF(address);
  PyErr_Clear();
  const int last = (int)pm_min(LAST_OFFSET, direct.tensor->tp_basicsize - (int)sizeof impl);
  for (int at = FIRST_OFFSET; impl && at <= last; at += (int)sizeof impl)
    if (!memcmp((char *)tensor + at, &impl, sizeof impl)) return at;
  return -1;
}

/* Where a tensor's object points to its implementation; NULL: not known. */
static const void *reference_of(PyObject *tensor) {
  if (!is_private_allowed()) return NULL;
  if (!direct.offset) direct.offset = find_offset(tensor);
  const int at = direct.offset;
  if (at < 0) return NULL;
  if (Py_TYPE(tensor) != direct.tensor && Py_TYPE(tensor) != direct.parameter) return NULL;
  if (at == OWNED_OFFSET && ((char *)tensor)[FIRST_OFFSET]) return NULL;
  return (char *)tensor + at;
}

/* ---- results -------------------------------------------------------------------------------- */

typedef int (*empty_strided)(int64_t rank, const int64_t *sizes, const int64_t *strides,
                             int32_t dtype, int32_t device_type, int32_t device, void **tensor);
typedef int (*get_data_ptr)(const void *tensor, void **ptr);
typedef int (*get_device_index)(const void *tensor, int32_t *index);
typedef int (*delete_tensor)(void *tensor);
typedef PyObject *(*wrap)(const void *tensor);

static struct {
  empty_strided empty;
  get_data_ptr data;
  get_device_index device;
  delete_tensor drop;
  wrap wrap; /* last: set where all are there */
} torch;
static pthread_once_t once = PTHREAD_ONCE_INIT;

enum { TORCH_CPU = 0, TORCH_CUDA = 1 };
static void look(void) {
  void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void *python = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!cpu || !python) return;
  *(void **)&torch.empty = dlsym(cpu, "aoti_torch_empty_strided");
  *(void **)&torch.data = dlsym(cpu, "aoti_torch_get_data_ptr");
  *(void **)&torch.device = dlsym(cpu, "aoti_torch_get_device_index");
  *(void **)&torch.drop = dlsym(cpu, "aoti_torch_delete_tensor_object");
  if (torch.empty && torch.data && torch.device &&
      torch.drop) /* THPVariable_Wrap(const at::TensorBase &) */
    *(void **)&torch.wrap = dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
}

/* New: a tuple of n ints. */
static PyObject *int_tuple(const int64_t *n, int rank) {
  PyObject *t = PyTuple_New(rank);
  for (int i = 0; t && i < rank; i++) {
    PyObject *x = PyLong_FromLongLong(n[i]);
    if (!x) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, i, x);
  }
  return t;
}

/* torch._C._dynamo.guards._empty_strided_cuda and torch's dtypes, once found; kept for good. The
 * search may run twice if two threads begin at once, and finds the same. */
static PyObject *_Atomic empty_cuda, *_Atomic torch_dtype[PM_DTYPE_COUNT];
static atomic_bool searched;

static void search(void) {
  PyObject *guards = PyImport_ImportModule("torch._C._dynamo.guards");
  PyObject *torch_module = guards ? PyImport_ImportModule("torch") : NULL;
  PyObject *f = torch_module ? PyObject_GetAttrString(guards, "_empty_strided_cuda") : NULL;
  for (int t = 0; f && t < PM_DTYPE_COUNT; t++) {
    torch_dtype[t] = PyObject_GetAttrString(torch_module, pm_dtypes[t].text);
    PyErr_Clear();
  }
  empty_cuda = f;
  Py_XDECREF(torch_module);
  Py_XDECREF(guards);
  PyErr_Clear();
  searched = true;
}

/* The memory of a new tensor, if it lies on this device: 0, else -1. */
static int memory_of(const DLPackExchangeAPI *api, PyObject *made, int device, uint64_t *ptr) {
  const void *reference = reference_of(made);
  DLTensor t;
  if (reference && torch.wrap) {
    int32_t index = -1;
    void *data = NULL;
    if (torch.device(reference, &index) || index != device || torch.data(reference, &data))
      return -1;
    *ptr = (uint64_t)(uintptr_t)data;
    return 0;
  }
  if (api->dltensor_from_py_object_no_sync(made, &t) || t.device.device_id != device) return -1;
  *ptr = (uint64_t)(uintptr_t)t.data + t.byte_offset;
  return 0;
}

/* New: the arguments of _empty_strided_cuda. They are kept for the next results of this type. */
static PyObject *arguments(const pmpy_spec *spec, const int64_t *strides, PyObject *dtype) {
  static struct {
    pmpy_spec spec;
    PyObject *args;
  } recent[16]; /* under the GIL */
  size_t at = spec->dtype + 3u * spec->rank;
  for (int i = 0; i < spec->rank; i++) at = at * 31 + (size_t)spec->shape[i];
  at = (at ^ at >> 8) % PM_COUNT(recent);
  const pmpy_spec *known = &recent[at].spec;
  if (recent[at].args && known->dtype == spec->dtype && known->rank == spec->rank &&
      !memcmp(known->shape, spec->shape, spec->rank * sizeof *spec->shape))
    return Py_NewRef(recent[at].args);
  PyObject *sizes = int_tuple(spec->shape, spec->rank);
  PyObject *steps = sizes ? int_tuple(strides, spec->rank) : NULL;
  PyObject *args = steps ? PyTuple_Pack(3, sizes, steps, dtype) : NULL;
  Py_XDECREF(sizes);
  Py_XDECREF(steps);
#ifndef Py_GIL_DISABLED
  if (args) {
    recent[at].spec = *spec;
    Py_XSETREF(recent[at].args, Py_NewRef(args));
  }
#endif
  return args;
}

/* By _empty_strided_cuda, which allocates on the current device; NULL without an exception. */
static PyObject *empty_on_current(const DLPackExchangeAPI *api, const pmpy_spec *spec,
                                  const int64_t *strides, int device, uint64_t *ptr) {
  if (!searched) search();
  PyObject *f = empty_cuda, *dtype = torch_dtype[spec->dtype];
  if (!f || !dtype || !api || !api->dltensor_from_py_object_no_sync) return NULL;
  PyObject *args = arguments(spec, strides, dtype);
  PyObject *made = args ? PyObject_Call(f, args, NULL) : NULL;
  Py_XDECREF(args);
  if (made && memory_of(api, made, device, ptr)) Py_CLEAR(made);
  PyErr_Clear();
  return made;
}

PyObject *pmpy_torch_empty(const DLPackExchangeAPI *api, const pmpy_spec *spec, bool cuda,
                           int device, uint64_t *ptr) {
  int64_t strides[PM_MAX_RANK], stride = 1;
  void *tensor = NULL, *data = NULL;
  PyObject *made = NULL;
  if (!is_private_allowed()) return NULL;
  for (int i = spec->rank - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= pm_max(spec->shape[i], 1);
  }
  pthread_once(&once, look);
  if (cuda && (made = empty_on_current(api, spec, strides, device, ptr))) return made;
  if (!torch.wrap) return NULL;
  if (torch.empty(spec->rank, spec->shape, strides, pm_dtypes[spec->dtype].torch,
                  cuda ? TORCH_CUDA : TORCH_CPU, cuda ? device : 0, &tensor))
    return NULL;
  if (!torch.data(tensor, &data)) made = torch.wrap(tensor);
  torch.drop(tensor);
  if (!made) PyErr_Clear();
  *ptr = (uint64_t)(uintptr_t)data;
  return made;
}

/* ---- autograd ------------------------------------------------------------------------------- */

static PyObject *_Atomic is_grad_enabled; /* torch.is_grad_enabled, kept for good */

/* 1 or 0; -1: the attribute must be asked */
static int requires_grad(PyObject *tensor) {
  const void *const *reference = reference_of(tensor);
  return reference && direct.requires_grad ? direct.requires_grad(*reference) : -1;
}

static bool asks_for_gradients(PyObject *tensor) {
  static PyObject *name;
  const int found = requires_grad(tensor);
  if (found >= 0) return found;
  if (!name) name = PyUnicode_InternFromString("requires_grad");
  PyObject *wanted = name ? PyObject_GetAttr(tensor, name) : NULL;
  Py_XDECREF(wanted);
  PyErr_Clear();
  return wanted == Py_True;
}

bool pmpy_torch_records(PyObject *tensor) {
  PyObject *on = NULL;
  if (!asks_for_gradients(tensor)) return false;
  if (!is_grad_enabled) {
    PyObject *module = PyImport_ImportModule("torch");
    if (module) is_grad_enabled = PyObject_GetAttrString(module, "is_grad_enabled");
    Py_XDECREF(module);
  }
  if (is_grad_enabled) on = PyObject_CallNoArgs(is_grad_enabled);
  Py_XDECREF(on);
  PyErr_Clear();
  return on == Py_True;
}

/* Inference tensors have no counter: torch would throw. */
static bool bump_version(PyObject *tensor) {
  const void *reference = reference_of(tensor);
  if (!reference || !direct.version_counter || !direct.bump_version) return false;
  if (*direct.version_counter(reference)) direct.bump_version(reference);
  return true;
}

int pmpy_torch_written(PyObject *tensor) {
  static PyObject *_Atomic increment; /* torch.autograd.graph.increment_version, kept for good */
  if (bump_version(tensor)) return 0;
  if (!increment) {
    PyObject *module = PyImport_ImportModule("torch.autograd.graph");
    if (module) increment = PyObject_GetAttrString(module, "increment_version");
    Py_XDECREF(module);
    if (!increment) return -1;
  }
  PyObject *none = PyObject_CallOneArg(increment, tensor);
  Py_XDECREF(none);
  return none ? 0 : -1;
}

PyObject *pmpy_torch_call(PyObject *target, PyObject *const *args, Py_ssize_t n, PyObject *names,
                          bool recorded) {
  const Py_ssize_t n_names = names ? PyTuple_GET_SIZE(names) : 0;
  PyObject *hook = pmpy_hook(PMPY_HOOK_TORCH), *result = NULL;
  PyObject *positional = PyTuple_New(n), *named = PyDict_New();
  for (Py_ssize_t i = 0; positional && i < n; i++)
    PyTuple_SET_ITEM(positional, i, Py_NewRef(args[i]));
  bool ok = hook && positional && named;
  for (Py_ssize_t i = 0; ok && i < n_names; i++)
    ok = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[n + i]) == 0;
  if (ok)
    result = PyObject_CallFunctionObjArgs(hook, target, positional, named,
                                          recorded ? Py_True : Py_False, NULL);
  Py_XDECREF(positional);
  Py_XDECREF(named);
  return result;
}

static PyMethodDef functions[] = {
    {"use_private_torch", use_private, METH_O,
     "use_private_torch(on): may results be allocated, gradients asked for, and writes counted by "
     "what is private in torch? False: by the DLPack table and public functions alone. True, the "
     "default: where this version of torch is known."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_torch(PyObject *module) { return PyModule_AddFunctions(module, functions); }
