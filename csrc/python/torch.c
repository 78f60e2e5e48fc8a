/* Results as torch tensors, by the shortest way.
 *
 * The allocator of torch's DLPack table makes two tensors for one, and about half of the time on
 * top. Where the torch that is loaded exports them, its C interface for compiled models
 * (aoti_torch_empty_strided and friends, whose ABI is stable) and the function that wraps a tensor
 * into its Python object make the same tensor directly. Whatever is missing or fails leaves the
 * work to the DLPack table, which also has the better errors. Nothing here is needed to build, and
 * nothing opens torch. */
#include "exchange.h"

#include <dlfcn.h>
#include <pthread.h>

typedef int (*empty_strided)(int64_t rank, const int64_t *sizes, const int64_t *strides,
                             int32_t dtype, int32_t device_type, int32_t device, void **tensor);
typedef int (*get_data_ptr)(void *tensor, void **ptr);
typedef int (*delete_tensor)(void *tensor);
typedef PyObject *(*wrap)(const void *tensor);

static struct {
  empty_strided empty;
  get_data_ptr data;
  delete_tensor drop;
  wrap wrap; /* last: set where all are there */
} torch;
static pthread_once_t once = PTHREAD_ONCE_INIT;

enum { TORCH_CPU = 0, TORCH_CUDA = 1 };
/* torch's numbers of dtypes, which files and compiled models contain */
static const int8_t dtype_number[PM_DTYPE_COUNT] = {
    [PM_U8] = 0,  [PM_I8] = 1,    [PM_I16] = 2,   [PM_I32] = 3,  [PM_F16] = 5,
    [PM_F32] = 6, [PM_BOOL] = 11, [PM_BF16] = 15, [PM_U16] = 27, [PM_U32] = 28};

static void look(void) {
  void *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void *python = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!cpu || !python) return;
  *(void **)&torch.empty = dlsym(cpu, "aoti_torch_empty_strided");
  *(void **)&torch.data = dlsym(cpu, "aoti_torch_get_data_ptr");
  *(void **)&torch.drop = dlsym(cpu, "aoti_torch_delete_tensor_object");
  if (torch.empty && torch.data && torch.drop) /* THPVariable_Wrap(const at::TensorBase &) */
    *(void **)&torch.wrap = dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
}

PyObject *pmpy_torch_empty(const pmpy_spec *spec, bool cuda, int device, uint64_t *ptr) {
  int64_t strides[PM_MAX_RANK], stride = 1;
  void *tensor = NULL, *data = NULL;
  PyObject *made = NULL;
  pthread_once(&once, look);
  if (!torch.wrap) return NULL;
  for (int i = spec->rank - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= pm_max(spec->shape[i], 1);
  }
  if (torch.empty(spec->rank, spec->shape, strides, dtype_number[spec->dtype],
                  cuda ? TORCH_CUDA : TORCH_CPU, cuda ? device : 0, &tensor))
    return NULL;
  if (!torch.data(tensor, &data)) made = torch.wrap(tensor);
  torch.drop(tensor);
  if (!made) PyErr_Clear();
  *ptr = (uint64_t)(uintptr_t)data;
  return made;
}
