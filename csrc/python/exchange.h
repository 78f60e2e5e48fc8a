/* What exchange.c, device_array.c, plan.c and call.c share: arrays of any framework as plain
 * memory, and results in the caller's kind.
 *
 * Functions that return int say 0 or -1 with an exception set; PyObject pointers are new references
 * unless said. */
#ifndef PMPY_EXCHANGE_H
#define PMPY_EXCHANGE_H

#include "module.h"

#include "dlpack.h"

/* Who made an array; results are made by the same. */
typedef enum pmpy_library {
  PMPY_NONE, /* numbers, and specs without data */
  PMPY_NUMPY,
  PMPY_DEVICE_ARRAY,
  PMPY_TORCH,
  PMPY_CUPY,
  PMPY_JAX,
  PMPY_OTHER
} pmpy_library;

/* How objects of one Python type are read; found once per type. */
typedef struct pmpy_source {
  PyTypeObject *type;
  int how; /* enum in exchange.c */
  pmpy_library library;
  const DLPackExchangeAPI *api; /* NULL: none */
  bool opaque;                  /* a subclass of torch.Tensor: its memory is not what it means */
} pmpy_source;

/* An argument as memory: row-major, dense. Must not move: a number lies in it. */
typedef struct pmpy_buffer {
  uint64_t ptr; /* 0 for a spec and for an array without elements */
  const pmpy_source *source;
  uint8_t dtype, rank;
  bool cuda, read_only, spec, copied;
  int device;
  int64_t shape[PM_MAX_RANK];
  PyObject *keep;                    /* owned: what must live while ptr is used, or NULL */
  DLManagedTensorVersioned *managed; /* owned, or NULL */
  DLManagedTensor *managed_old;      /* owned, or NULL */
  const char *was;                   /* the dtype that it was converted from, or NULL */
  bool strided;                      /* not row-major: an operand on the GPU */
  int64_t stride[PM_MAX_RANK];       /* in elements, if strided */
  uint32_t number;                   /* the memory of a Python number */
} pmpy_buffer;

/* What an object is read for. */
typedef enum pmpy_purpose {
  PMPY_ARRAY,   /* its memory as it is */
  PMPY_OUTPUT,  /* to be written: no copies, no numbers, nothing read-only */
  PMPY_INPUT,   /* an operand: NumPy's 64 bits are converted */
  PMPY_FOR_XLA, /* the same, but arrays of JAX on a GPU are not read: XLA runs such calls */
  PMPY_SPEC     /* an operand of which shape and dtype alone will do */
} pmpy_purpose;
/* Read an object. 1: done, 0: no array (no exception), -1: exception naming the argument. */
int pmpy_read(PyObject *o, int which, pmpy_purpose purpose, pmpy_buffer *out);
/* narrow.c: an array, or a scalar of NumPy, of 64 bits as one of 32. New, or NULL (0), with an
 * exception or where the dtype is another one (none); a scalar: 1, -1 with an exception. */
PyObject *pmpy_narrow_array(PyObject *array, int which, pm_dtype *to, const char **was);
int pmpy_narrow_scalar(PyObject *scalar, int which, void *into, pm_dtype *to, const char **was);
void pmpy_release(pmpy_buffer *b);
/* Would pmpy_read take it, and not as a number? Objects with shape and dtype alone where `specs`.
 */
bool pmpy_is_array(PyObject *o, bool specs);

/* The stream that the library computes on now (NULL: the legacy default stream). */
int pmpy_current_stream(const pmpy_source *s, int device, void **stream);

/* The handle of a stream object or an int: streams.c. */
int pmpy_stream_from(PyObject *o, const char *who, void **stream);

typedef struct pmpy_spec {
  uint8_t dtype, rank;
  int64_t shape[PM_MAX_RANK];
} pmpy_spec;
/* In the memory of kernels, where two elements of 4 bits share a byte; in NumPy's they do not. */
static inline size_t pmpy_bytes(const pmpy_spec *s) {
  size_t n = 1;
  for (int i = 0; i < s->rank; i++) n *= (size_t)s->shape[i];
  return pm_dtypes[s->dtype].bits < 8 ? n * pm_dtypes[s->dtype].bits / 8
                                      : n * pm_dtypes[s->dtype].bytes;
}

/* results.c: a fresh array for a result of a library, with its memory. On the device the libraries
 * without an exchange API get a DeviceArray here and their own kind from pmpy_finish. */
PyObject *pmpy_result(const pmpy_source *s, const pmpy_spec *spec, bool cuda, int device,
                      void *stream, uint64_t *ptr);
/* torch.c: an uninitialised tensor; NULL without an exception where this way is not open. */
PyObject *pmpy_torch_empty(const DLPackExchangeAPI *api, const pmpy_spec *spec, bool cuda,
                           int device, uint64_t *ptr);
/* Does autograd record operations on this tensor now? */
bool pmpy_torch_records(PyObject *tensor);
/* Autograd is told that a kernel wrote this tensor: 0, or -1 with an exception. */
int pmpy_torch_written(PyObject *tensor);
/* New: what the hook of calls that torch must see returns, NotImplemented: the call goes on.
 * `names` are of the last arguments, or NULL; recorded: because autograd records, not for lack of
 * memory. */
PyObject *pmpy_torch_call(PyObject *target, PyObject *const *args, Py_ssize_t n, PyObject *names,
                          bool recorded);
/* The array to hand out for what pmpy_result made; steals `made`. */
PyObject *pmpy_finish(const pmpy_source *s, PyObject *made, bool cuda);
PyObject *pmpy_numpy_empty(const pmpy_spec *spec, void **data);
PyObject *pmpy_spec_shape(const pmpy_spec *spec);
extern const pmpy_source pmpy_numpy_source, pmpy_device_array_source;

/* ---- device_array.c ------------------------------------------------------------------------ */

/* Device memory of our own, or borrowed through DLPack. All its work is ordered by the legacy
 * default stream of its device: whoever uses it on another stream makes the two wait for each
 * other. */
typedef struct pmpy_device_array {
  PyObject_HEAD PyObject *weakrefs;
  uint64_t ptr;
  int device;
  bool read_only;
  bool foreign_stream; /* it was given to someone whose stream we cannot order at the end */
  pmpy_spec spec;
  pmpy_buffer base; /* borrowed memory: what keeps it alive */
  bool borrowed;
} pmpy_device_array;

/* Uninitialised; allocated in the order of `stream`. */
PyObject *pmpy_device_array_new(const pmpy_spec *spec, int device, void *stream);

/* Device ordinal of None, an int, or "cuda:1". */
int pmpy_device_ordinal(PyObject *o, int *out);
/* What the kernel that this thread traces is traced for; NULL: any. info.c */
extern _Thread_local const pm_target *pmpy_traced_for;
/* A target by its name; NULL for None. 0, or -1 with an exception. info.c */
int pmpy_target(PyObject *name, const pm_target **out);
/* The first device that kernels are compiled for, or -1 with the reason. */
int pmpy_fitting_device(char *why, size_t size);

#endif
