/* A stand-in for libcuda.so.1 on machines without a GPU, for tests of the runtime.
 *
 *   gcc -shared -fPIC -o DIR/libcuda.so.1 tests/runtime/fake_cuda.c      LD_LIBRARY_PATH=DIR python
 * ...
 *
 * Device memory is host memory, streams complete at once, and a launch is recorded. A test sees and
 * steers it through the functions fake_*, by ctypes on the same library: the next launches call a
 * callback in place of the kernel, and any entry point can be made to fail. Environment:
 * FAKE_CUDA_DEVICES (1), FAKE_CUDA_ARCH (90), FAKE_CUDA_VERSION (13000), FAKE_CUDA_MEMORY (bytes).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef int R;
typedef uint64_t P;
typedef struct {
  int id;
  char pad[4];
  union {
    char size[64];
    unsigned cluster[3];
    int on;
  } v;
} attr;
typedef struct {
  unsigned grid[3], block[3], smem;
  void *stream;
  attr *attrs;
  unsigned n_attrs;
} config;

/* What the last launch was. */
typedef struct {
  unsigned grid[3], block[3], smem, cluster[3], pdl, launches, device;
  void *stream;
} record;
/* A tensor map as it was asked for; lies in the 128 bytes that the kernel gets. */
typedef struct {
  uint32_t magic, dtype, rank, swizzle;
  uint64_t base;
  uint32_t dim[5], box[5];
  uint64_t stride[4];
} map;

static struct {
  record last;
  void (*kernel)(void **params, const record *r);
  char failing[64];
  R failure;
  int fail_after;
  int64_t allocated, live, copies, frees, events, modules, capturing, waits, calls, synchronized;
  int attribute[32];     /* of the function that was asked last */
  uint64_t foreign_pool; /* that memory belongs to */
  int virtual_memory;
} S;

EXPORT const record *fake_last(void) { return &S.last; }
EXPORT void fake_set_kernel(void (*kernel)(void **, const record *)) { S.kernel = kernel; }
/* The entry point fails with the result once, after `after` good calls; a negative result: always.
 */
EXPORT void fake_fail(const char *entry, R result, int after) {
  snprintf(S.failing, sizeof S.failing, "%s", entry);
  S.failure = result;
  S.fail_after = after;
}
EXPORT int64_t fake_live_bytes(void) { return S.live; }
EXPORT int64_t fake_copies(void) { return S.copies; }
EXPORT int64_t fake_live_events(void) { return S.events; }
EXPORT int64_t fake_live_modules(void) { return S.modules; }
/* How often a stream was made to wait for another one. */
EXPORT int64_t fake_waits(void) { return S.waits; }
EXPORT int fake_attribute(int a) { return S.attribute[a]; }
EXPORT void fake_set_capturing(int on) { S.capturing = on; }
/* Memory is of another library's pool, or virtual. */
EXPORT void fake_set_memory(uint64_t pool, int virtual_memory) {
  S.foreign_pool = pool;
  S.virtual_memory = virtual_memory;
}

/* Calls of entry points that may fail, or change something. */
EXPORT int64_t fake_calls(void) { return S.calls; }

static R failing(const char *entry) {
  S.calls++;
  if (!S.failing[0] || strcmp(S.failing, entry)) return 0;
  if (S.fail_after-- > 0) return 0;
  if (S.failure < 0) return -S.failure;
  S.failing[0] = 0;
  return S.failure;
}
#define MAY_FAIL              \
  do {                        \
    R r_ = failing(__func__); \
    if (r_) return r_;        \
  } while (0)

static int64_t number(const char *name, int64_t standard) {
  const char *s = getenv(name);
  return s && *s ? strtoll(s, NULL, 10) : standard;
}

/* ---- devices, contexts -------------------------------------------------------------------- */

static char contexts[64];
static __thread void *stack[64];
static __thread int depth;

static R cuInit(unsigned f) {
  (void)f;
  MAY_FAIL;
  return number("FAKE_CUDA_DEVICES", 1) ? 0 : 100;
}
EXPORT R cuDriverGetVersion(int *v) {
  *v = (int)number("FAKE_CUDA_VERSION", 13000);
  return 0;
}
static R cuGetErrorName(R r, const char **s) {
  *s = r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
static R cuGetErrorString(R r, const char **s) {
  *s = r == 2 ? "out of memory" : "a failure that the test asked for";
  return 0;
}
static R cuDeviceGetCount(int *n) {
  *n = (int)number("FAKE_CUDA_DEVICES", 1);
  return 0;
}
static R cuDeviceGet(int *d, int i) {
  *d = i;
  return 0;
}
static R cuDeviceGetName(char *s, int n, int d) {
  snprintf(s, (size_t)n, "Fake GPU %d", d);
  return 0;
}
static R cuDeviceGetAttribute(int *v, int a, int d) {
  (void)d;
  int arch = (int)number("FAKE_CUDA_ARCH", 90);
  *v = a == 75 ? arch / 10 : a == 76 ? arch % 10 : a == 16 ? 132 : a == 97 ? 232448 : 1;
  if (a == 115) *v = (int)number("FAKE_CUDA_POOLS", 1);
  return 0;
}
static R cuDeviceTotalMem(size_t *n, int d) {
  (void)d;
  *n = (size_t)number("FAKE_CUDA_MEMORY", 1 << 30);
  return 0;
}
static R cuDevicePrimaryCtxRetain(void **c, int d) {
  MAY_FAIL;
  *c = &contexts[d];
  return 0;
}
static R cuCtxGetCurrent(void **c) {
  *c = depth ? stack[depth - 1] : NULL;
  return 0;
}
static R cuCtxPushCurrent(void *c) {
  MAY_FAIL;
  stack[depth++] = c;
  return 0;
}
static R cuCtxPopCurrent(void **c) {
  *c = stack[--depth];
  return 0;
}
static R cuCtxSynchronize(void) {
  MAY_FAIL;
  S.synchronized++;
  return 0;
}
static R cuCtxRecordEvent(void *c, void *e) {
  (void)e;
  MAY_FAIL;
  return c ? 0 : 400;
}
EXPORT int64_t fake_synchronized(void) { return S.synchronized; }
EXPORT int fake_context_depth(void) { return depth; }
/* Another library makes the device current, or none any more (-1). */
EXPORT void fake_make_current(int device) {
  if (device < 0) depth--;
  else stack[depth++] = &contexts[device];
}

/* ---- modules, launch ---------------------------------------------------------------------- */

static R cuModuleLoadData(void **m, const void *image) {
  MAY_FAIL;
  if (memcmp(image, "\177ELF", 4)) return 200;
  *m = malloc(8);
  S.modules++;
  return 0;
}
static R cuModuleUnload(void *m) {
  S.calls++;
  free(m);
  S.modules--;
  return 0;
}
static R cuModuleGetFunction(void **f, void *m, const char *name) {
  MAY_FAIL;
  (void)name;
  memset(S.attribute, 0, sizeof S.attribute);
  *f = m;
  return 0;
}
static R cuFuncSetAttribute(void *f, int a, int v) {
  (void)f;
  MAY_FAIL;
  if (a < 0 || a >= 32) return 1;
  S.attribute[a] = v;
  return 0;
}
static R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t smem) {
  (void)f, (void)block, (void)smem;
  MAY_FAIL;
  *n = 2;
  return 0;
}
static R cuOccupancyMaxActiveClusters(int *n, void *f, const config *c) {
  (void)f;
  MAY_FAIL;
  if (c->n_attrs < 1 || c->attrs[0].id != 4) return 1;
  *n = 132 / (int)(c->attrs[0].v.cluster[0] * c->attrs[0].v.cluster[1] * c->attrs[0].v.cluster[2]);
  return 0;
}
static R cuLaunchKernelEx(const config *c, void *f, void **params, void **extra) {
  (void)f, (void)extra;
  MAY_FAIL;
  record *r = &S.last;
  for (int i = 0; i < 3; i++) r->grid[i] = c->grid[i], r->block[i] = c->block[i], r->cluster[i] = 1;
  r->smem = c->smem;
  r->stream = c->stream;
  r->pdl = 0;
  for (unsigned i = 0; i < c->n_attrs; i++)
    if (c->attrs[i].id == 4) memcpy(r->cluster, c->attrs[i].v.cluster, sizeof r->cluster);
    else if (c->attrs[i].id == 6) r->pdl = (unsigned)c->attrs[i].v.on;
  for (int i = 0; i < 3; i++)
    if (!c->grid[i] || !c->block[i]) return 1;
  r->launches++;
  r->device = (unsigned)((char *)stack[depth - 1] - contexts);
  if (S.kernel) S.kernel(params, r);
  return 0;
}
static R cuTensorMapEncodeTiled(void *out, int dtype, uint32_t rank, void *base,
                                const uint64_t *dim, const uint64_t *stride, const uint32_t *box,
                                const uint32_t *step, int interleave, int swizzle, int l2,
                                int oob) {
  (void)interleave, (void)l2, (void)oob;
  MAY_FAIL;
  if ((uintptr_t)out % 64 || (uintptr_t)base % 16 || rank < 1 || rank > 5) return 1;
  map m = {.magic = 0x50414d54,
           .dtype = (uint32_t)dtype,
           .rank = rank,
           .swizzle = (uint32_t)swizzle,
           .base = (uint64_t)(uintptr_t)base};
  for (uint32_t i = 0; i < rank; i++) {
    if (!dim[i] || box[i] < 1 || box[i] > 256 || step[i] != 1) return 1;
    if (i && (stride[i - 1] % 16 || stride[i - 1] >> 40)) return 1;
    m.dim[i] = (uint32_t)dim[i];
    m.box[i] = box[i];
    if (i) m.stride[i - 1] = stride[i - 1];
  }
  memcpy(out, &m, sizeof m);
  return 0;
}

/* ---- memory ------------------------------------------------------------------------------- */

static R cuMemAlloc(P *p, size_t n) {
  MAY_FAIL;
  if (S.live + (int64_t)n > number("FAKE_CUDA_MEMORY", 1 << 30)) return 2;
  char *at = aligned_alloc(256, 256 + (n + 255) / 256 * 256);
  *(size_t *)at = n;
  memset(at + 256, 0xcd, n);
  S.live += (int64_t)n;
  *p = (P)(uintptr_t)(at + 256);
  return 0;
}
static R cuMemFree(P p) {
  MAY_FAIL;
  char *at = (char *)(uintptr_t)p - 256;
  S.live -= (int64_t) * (size_t *)at;
  free(at);
  return 0;
}
static R cuMemHostAlloc(void **p, size_t n, unsigned flags) {
  (void)flags;
  MAY_FAIL;
  *p = calloc(1, n);
  return 0;
}
static R cuPointerGetAttribute(void *v, int a, P p) {
  (void)p;
  if (a == 17) *(uint64_t *)v = S.foreign_pool;
  else *(int *)v = a == 13 ? !S.virtual_memory : 0;
  return 0;
}
static R cuMemPoolCreate(void **p, const void *props) {
  (void)props;
  MAY_FAIL;
  *p = &S;
  return 0;
}
static R cuMemPoolSetAttribute(void *p, int a, void *v) {
  (void)p, (void)a, (void)v;
  return 0;
}
static R cuMemPoolSetAccess(void *p, const void *access, size_t n) {
  (void)p, (void)access, (void)n;
  return 0;
}
static R cuDeviceCanAccessPeer(int *can, int d, int e) {
  (void)d, (void)e;
  *can = 1;
  return 0;
}
static R cuCtxEnablePeerAccess(void *c, unsigned f) {
  (void)c, (void)f;
  return 0;
}
static R cuMemPoolTrimTo(void *p, size_t n) {
  (void)p, (void)n;
  return 0;
}
static R cuMemAllocFromPoolAsync(P *p, size_t n, void *pool, void *s) {
  (void)pool, (void)s;
  MAY_FAIL;
  return cuMemAlloc(p, n);
}
static R cuMemFreeAsync(P p, void *s) {
  (void)s;
  MAY_FAIL;
  return cuMemFree(p);
}
static R cuMemcpyHtoDAsync(P d, const void *h, size_t n, void *s) {
  (void)s;
  MAY_FAIL;
  S.copies++;
  memcpy((void *)(uintptr_t)d, h, n);
  return 0;
}
static R cuMemcpyDtoHAsync(void *h, P d, size_t n, void *s) {
  (void)s;
  MAY_FAIL;
  S.copies++;
  memcpy(h, (void *)(uintptr_t)d, n);
  return 0;
}
static R cuMemcpyDtoDAsync(P d, P e, size_t n, void *s) {
  (void)s;
  MAY_FAIL;
  S.copies++;
  memmove((void *)(uintptr_t)d, (void *)(uintptr_t)e, n);
  return 0;
}
static R cuMemsetD8Async(P d, unsigned char v, size_t n, void *s) {
  (void)s;
  MAY_FAIL;
  memset((void *)(uintptr_t)d, v, n);
  return 0;
}
static R cuMemsetD16Async(P d, unsigned short v, size_t n, void *s) {
  (void)s;
  for (size_t i = 0; i < n; i++) memcpy((char *)(uintptr_t)d + 2 * i, &v, 2);
  return 0;
}
static R cuMemsetD32Async(P d, unsigned v, size_t n, void *s) {
  (void)s;
  for (size_t i = 0; i < n; i++) memcpy((char *)(uintptr_t)d + 4 * i, &v, 4);
  return 0;
}

/* ---- streams, events ---------------------------------------------------------------------- */

static R cuStreamCreate(void **s, unsigned f) {
  (void)f;
  MAY_FAIL;
  *s = malloc(8);
  return 0;
}
static R cuStreamSynchronize(void *s) {
  (void)s;
  MAY_FAIL;
  return 0;
}
static R cuStreamQuery(void *s) {
  (void)s;
  MAY_FAIL;
  return 0;
}
static R cuThreadExchangeStreamCaptureMode(int *mode) {
  S.calls++;
  (void)mode;
  return 0;
}
static R cuStreamIsCapturing(void *s, int *v) {
  (void)s;
  *v = (int)S.capturing;
  return 0;
}
static R cuStreamGetCaptureInfo(void *s, int *v, uint64_t *id) {
  (void)s;
  *v = S.capturing != 0;
  *id = (uint64_t)S.capturing;
  return 0;
}
static R cuStreamWaitEvent(void *s, void *e, unsigned f) {
  (void)s, (void)e, (void)f;
  MAY_FAIL;
  S.waits++;
  return 0;
}
static R cuEventCreate(void **e, unsigned f) {
  (void)f;
  MAY_FAIL;
  *e = malloc(8);
  S.events++;
  return 0;
}
static R cuEventRecord(void *e, void *s) {
  (void)e, (void)s;
  MAY_FAIL;
  return 0;
}
static R cuEventQuery(void *e) {
  (void)e;
  MAY_FAIL;
  return 0;
}
static R cuEventDestroy(void *e) {
  S.calls++;
  free(e);
  S.events--;
  return 0;
}

/* ---- the table ---------------------------------------------------------------------------- */

EXPORT R cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                             int *status) {
  static const struct {
    const char *name;
    void *f;
  } table[] = {
#define PM_CU(name, version, parameters) {#name, (void *)name},
#include "../../csrc/runtime/driver.def"
#undef PM_CU
  };
  (void)flags;
  *status = 0;
  *out = NULL;
  if (version > number("FAKE_CUDA_VERSION", 13000)) return 500;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) *out = table[i].f;
  return *out ? 0 : 500;
}
