/* A CUDA driver that prints its calls, a line of JSON each. A tensor map begins with its number. */
#include <stdio.h>
#include <string.h>

#include "cuda.h"

static uint64_t n_maps;

CUresult cuModuleLoadData(CUmodule *m, const void *image) {
  *m = (CUmodule)image;
  printf("[\"load\", \"%s\"]\n", (const char *)image);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  *f = (CUfunction)m;
  printf("[\"function\", \"%s\"]\n", name);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule m) {
  (void)m;
  puts("[\"unload\"]");
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) {
  (void)f;
  printf("[\"attribute\", %d, %d]\n", (int)a, value);
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *p, size_t bytes) {
  *p = 0xc0000;
  printf("[\"alloc\", %zu]\n", bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr p) {
  printf("[\"free\", %llu]\n", (unsigned long long)p);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32(CUdeviceptr p, unsigned value, size_t n) {
  printf("[\"fill\", %llu, %u, %zu]\n", (unsigned long long)p, value, n);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t n, CUstream s) {
  printf("[\"clear\", %llu, %u, %zu, %d]\n", (unsigned long long)p, value, n, (int)(size_t)s);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *d) {
  *d = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute a, CUdevice d) {
  (void)a;
  (void)d;
  *value = 132;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  (void)f;
  (void)c;
  *n = 30;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads,
                                                     size_t smem) {
  (void)f;
  (void)threads;
  (void)smem;
  *n = 1;
  return CUDA_SUCCESS;
}

static void put(const char *name, const void *values, int size, uint32_t n) {
  printf(", \"%s\": [", name);
  for (uint32_t i = 0; i < n; i++)
    printf("%s%llu", i ? ", " : "",
           size == 8 ? (unsigned long long)((const uint64_t *)values)[i]
                     : (unsigned long long)((const uint32_t *)values)[i]);
  printf("]");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *at, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps, int interleave,
                                CUtensorMapSwizzle swizzle, int promotion, int fill) {
  map->opaque[0] = n_maps++;
  printf("[\"map\", {\"type\": %d, \"at\": %llu, \"swizzle\": %d, \"rest\": [%d, %d, %d]", (int)type,
         (unsigned long long)(uintptr_t)at, (int)swizzle, interleave, promotion, fill);
  put("dims", dims, 8, rank);
  put("strides", strides, 8, rank - 1);
  put("box", box, 4, rank);
  put("steps", steps, 4, rank);
  puts("}]");
  return CUDA_SUCCESS;
}

/* Parameters by the first four bytes of each: addresses, numbers of maps, sizes. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  (void)f;
  (void)extra;
  printf("[\"launch\", {\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"smem\": %u, "
         "\"stream\": %llu, \"cluster\": [",
         c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
         c->sharedMemBytes, (unsigned long long)(uintptr_t)c->hStream);
  int pdl = 0;
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttribute *a = &c->attrs[i];
    if (a->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      pdl = a->value.programmaticStreamSerializationAllowed;
    else
      printf("%u, %u, %u", a->value.clusterDim.x, a->value.clusterDim.y, a->value.clusterDim.z);
  }
  printf("], \"pdl\": %d, \"params\": [", pdl);
  for (int i = 0; i < N_PARAMS; i++) {
    uint32_t low;
    memcpy(&low, params[i], sizeof low);
    printf("%s%u", i ? ", " : "", low);
  }
  puts("]}]");
  return CUDA_SUCCESS;
}
