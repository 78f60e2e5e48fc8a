/* The part of the CUDA driver and NVRTC interfaces that the package uses, declared here so that it
 * builds without a toolkit. Names and numbers are those of the public ABI; driver.def and nvrtc.def
 * are the tables of entry points. */
#ifndef PM_CUDA_API_H
#define PM_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result, cu_device;
typedef uint64_t cu_ptr;
typedef struct cu_context_s *cu_context;
typedef struct cu_module_s *cu_module;
typedef struct cu_function_s *cu_function;
typedef struct cu_stream_s *cu_stream;
typedef struct cu_event_s *cu_event;
typedef struct cu_pool_s *cu_pool;

enum {
  CU_OK = 0,
  CU_INVALID_VALUE = 1,
  CU_OUT_OF_MEMORY = 2,
  CU_DEINITIALIZED = 4,
  CU_NO_DEVICE = 100,
  CU_INVALID_IMAGE = 200,
  CU_NO_BINARY_FOR_GPU = 209,
  CU_ECC_UNCORRECTABLE = 214,
  CU_UNSUPPORTED_PTX_VERSION = 222,
  CU_ILLEGAL_ADDRESS = 700,
  CU_LAUNCH_OUT_OF_RESOURCES = 701,
  CU_LAUNCH_TIMEOUT = 702,
  CU_CONTEXT_IS_DESTROYED = 709,
  CU_PEER_ACCESS_ALREADY_ENABLED = 704,
  CU_ASSERT = 710,
  CU_HARDWARE_STACK_ERROR = 714,
  CU_LAUNCH_FAILED = 719,
  CU_SYSTEM_DRIVER_MISMATCH = 803
};

enum { /* device attributes */
       CU_ATTR_SM_COUNT = 16,
       CU_ATTR_MAJOR = 75,
       CU_ATTR_MINOR = 76,
       CU_ATTR_SMEM_OPTIN = 97,
       CU_ATTR_POOLS = 115
};
enum { CU_FUNC_DYNAMIC_SMEM = 8, CU_FUNC_NON_PORTABLE_CLUSTER = 14 };
enum {
  CU_NON_BLOCKING = 1,
  CU_NO_TIMING = 2,
  CU_POOL_RELEASE_THRESHOLD = 4,
  CU_POINTER_DEVICE = 9,
  CU_POINTER_IS_PLAIN = 13, /* by cuMemAlloc; else virtual memory, or of a pool */
  CU_POINTER_POOL = 17
};

enum { CU_CAPTURE_RELAXED = 2 };
enum { CU_HOST_PORTABLE = 1, CU_HOST_MAPPED = 2 };
#define CU_STREAM_LEGACY ((cu_stream)1)
#define CU_STREAM_PER_THREAD ((cu_stream)2)

enum { CU_LAUNCH_CLUSTER = 4, CU_LAUNCH_PDL = 6 };

typedef struct cu_launch_attr {
  int id;
  char pad[4];
  union {
    char size[64];
    unsigned cluster[3];
    int pdl;
  } value;
} cu_launch_attr;

typedef struct cu_launch_config {
  unsigned grid[3], block[3], smem;
  cu_stream stream;
  cu_launch_attr *attrs;
  unsigned n_attrs;
} cu_launch_config;

typedef struct cu_tensor_map {
  _Alignas(64) uint64_t opaque[16];
} cu_tensor_map;
enum { /* element types of tensor maps */
       CU_MAP_U8 = 0,
       CU_MAP_U16 = 1,
       CU_MAP_U32 = 2,
       CU_MAP_I32 = 3,
       CU_MAP_F16 = 6,
       CU_MAP_F32 = 7,
       CU_MAP_BF16 = 9
};
enum { CU_MAP_NO_INTERLEAVE = 0, CU_MAP_L2_128B = 2, CU_MAP_OOB_ZEROS = 0 };

typedef struct cu_pool_props {
  int alloc_type, handle_types; /* 1: pinned on the device; 0: not shared between processes */
  struct {
    int type, id; /* 1: device */
  } location;
  void *security;
  size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
} cu_pool_props;

typedef struct cu_pool_access {
  struct {
    int type, id; /* 1: device */
  } location;
  int flags; /* 3: read and write */
} cu_pool_access;

typedef struct nvrtc_program_s *nvrtc_program;
enum { NVRTC_OK = 0, NVRTC_COMPILATION = 6, NVRTC_CANCELLED = 16 };

#endif
