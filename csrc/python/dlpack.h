/* The binary interface of DLPack 1.3, by which frameworks exchange arrays.
 *
 * It is declared here because neither Python nor NumPy installs a header for it. Names and layouts
 * are those of the public specification, https://dmlc.github.io/dlpack; only the parts that this
 * package uses are named. A capsule "dltensor" holds a DLManagedTensor, "dltensor_versioned" the
 * versioned one. The receiver calls the deleter once. */
#ifndef PMPY_DLPACK_H
#define PMPY_DLPACK_H

#include <stdint.h>

enum { DLPACK_MAJOR_VERSION = 1, DLPACK_MINOR_VERSION = 3 };

typedef struct {
  uint32_t major, minor; /* another major version has another layout */
} DLPackVersion;

typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 } DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code, bits; /* code: column `dlpack` of dtypes.def */
  uint16_t lanes;
} DLDataType;

/* Shape and strides count elements; strides may be NULL before version 1.2: row-major. The first
 * element lies at data + byte_offset. */
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

enum { DLPACK_FLAG_BITMASK_READ_ONLY = 1, DLPACK_FLAG_BITMASK_IS_COPIED = 2 };

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

/* A type's attribute __dlpack_c_exchange_api__ is a capsule of this table. Functions return 0, or
 * -1 with a Python exception set, and order nothing on any stream. Objects are PyObject pointers.
 */
typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api; /* the table of an older version, or NULL */
} DLPackExchangeAPIHeader;

typedef struct {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out, void *error,
                                  void (*set_error)(void *error, const char *kind,
                                                    const char *message));
  int (*managed_tensor_from_py_object_no_sync)(void *object, DLManagedTensorVersioned **out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *tensor, void **object);
  int (*dltensor_from_py_object_no_sync)(void *object, DLTensor *out); /* may be NULL */
  int (*current_work_stream)(DLDeviceType type, int32_t device, void **stream);
} DLPackExchangeAPI;

#endif
