/* The yardstick of bench_launch.py: a C loop of cuLaunchKernelEx on a cubin, without Python.
 * Built by it with the system's C compiler: cc -O2 -shared -fPIC launch_loop.c -ldl. It works in
 * the current context of the process. Returns host nanoseconds per launch, or a negative CUresult.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef struct {
  unsigned gx, gy, gz, bx, by, bz, smem;
  void *stream;
  void *attrs;
  unsigned n_attrs;
} config;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

typedef struct {
  int id;
  char pad[4];
  int value[16];
} attribute_of;

/* params: addresses of the kernel's arguments. dependent: launches may overlap (PDL). */
double launch_loop(const void *cubin, const char *entry, unsigned grid, unsigned block,
                   unsigned smem, void **params, int dependent, int launches) {
  void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) return -1;
  int (*load)(void **, const void *) =
      (int (*)(void **, const void *))dlsym(cuda, "cuModuleLoadData");
  int (*find)(void **, void *, const char *) =
      (int (*)(void **, void *, const char *))dlsym(cuda, "cuModuleGetFunction");
  int (*attribute)(void *, int, int) = (int (*)(void *, int, int))dlsym(cuda, "cuFuncSetAttribute");
  int (*launch)(const config *, void *, void **, void **) =
      (int (*)(const config *, void *, void **, void **))dlsym(cuda, "cuLaunchKernelEx");
  int (*sync)(void) = (int (*)(void))dlsym(cuda, "cuCtxSynchronize");
  void *module, *function;
  int rc = load(&module, cubin);
  if (rc) return -rc;
  if ((rc = find(&function, module, entry))) return -rc;
  if (smem && (rc = attribute(function, 8, (int)smem))) return -rc;
  attribute_of pdl = {.id = 6, .value = {1}};
  config c = {grid, 1, 1, block, 1, 1, smem, NULL, &pdl, dependent != 0};
  for (int i = 0; i < 10; i++)
    if ((rc = launch(&c, function, params, NULL))) return -rc;
  sync();
  double start = now();
  for (int i = 0; i < launches; i++) launch(&c, function, params, NULL);
  double took = now() - start;
  if ((rc = sync())) return -rc;
  return took / launches;
}
