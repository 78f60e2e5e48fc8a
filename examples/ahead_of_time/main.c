/* Runs the kernel that export.py wrote: adds two arrays on the first GPU. */
#include "add.h"

#include <stdio.h>
#include <stdlib.h>

enum { N = 1 << 20 };

static void need(CUresult r, const char *what) {
  if (!r) return;
  fprintf(stderr, "%s failed with error %d of the CUDA driver\n", what, (int)r);
  exit(1);
}

static void *read_file(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) return NULL;
  const long size = ftell(f);
  void *data = size > 0 ? malloc((size_t)size) : NULL;
  rewind(f);
  if (data && fread(data, 1, (size_t)size, f) != (size_t)size) data = NULL;
  fclose(f);
  return data;
}

int main(int argc, char **argv) {
  static float x[N], y[N], sum[N];
  CUdevice device;
  CUcontext context;
  CUdeviceptr at[3];
  add_kernel add;
  void *image = argc > 1 ? read_file(argv[1]) : NULL;
  if (!image) return fprintf(stderr, "usage: main PATH/add.cubin\n"), 2;
  for (int i = 0; i < N; i++) {
    x[i] = (float)i;
    y[i] = 0.5f;
  }
  need(cuInit(0), "cuInit");
  need(cuDeviceGet(&device, 0), "cuDeviceGet");
  need(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  need(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  for (int i = 0; i < 3; i++) need(cuMemAlloc(&at[i], sizeof x), "cuMemAlloc");
  need(cuMemcpyHtoD(at[0], x, sizeof x), "cuMemcpyHtoD");
  need(cuMemcpyHtoD(at[1], y, sizeof y), "cuMemcpyHtoD");
  need(add_load(&add, image), "add_load");
  need(add_launch(&add, NULL, at[0], at[1], at[2]), "add_launch");
  need(cuMemcpyDtoH(sum, at[2], sizeof sum), "cuMemcpyDtoH");
  need(add_unload(&add), "add_unload");
  for (int i = 0; i < N; i++)
    if (sum[i] != (float)i + 0.5f) return fprintf(stderr, "sum[%d] is %g\n", i, sum[i]), 1;
  puts("right");
  return 0;
}
