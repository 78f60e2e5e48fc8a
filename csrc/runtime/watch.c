/* Waits of a mesh that can be ended: words in host memory, which every kernel of the mesh looks at
 * while it waits for other devices (device/watch.cuh).
 *
 * Somebody asks for the end: a launch that failed on one device of this process, the watch over
 * other processes, the exit of the interpreter; or a wait lasts longer than the mesh allows. Then
 * all waits of the mesh end, and its kernels run to their end. What they left is of no use, and
 * flags that count launches are out of step, so that every later call on the mesh raises.
 *
 * Words and names are never freed, since a kernel that is hung may still use them. A mesh of this
 * process is a number, its place in the table. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "driver.h"

enum { ORDINALS = 64, HEAD = 8, ROW = 8, MESHES = 4096, LEAST_KERNELS = 16 };
enum { RAN_OUT = 1, ASKED = 2 }; /* values of the first word */

typedef struct watch {
  volatile uint32_t *words;
  uint32_t n_devices;
  char why[256];        /* under the lock */
  atomic_bool reported; /* pm_watch_results has said so */
} watch;

typedef struct watched_kernel {
  const char *name;
  const pm_program_site *sites;
  uint32_t n_sites;
} watched_kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static watch meshes[MESHES]; /* from 1 on */
static atomic_uint n_meshes = 1;
static watched_kernel *kernels; /* under the lock */
static uint32_t n_kernels, cap_kernels;
static atomic_bool used[ORDINALS]; /* devices that such kernels were launched on */

pm_code pm_watch_new(int device, uint32_t n_devices, uint32_t milliseconds, uint32_t *out,
                     pm_err *err) {
  const size_t bytes = (HEAD + ROW * (size_t)n_devices) * sizeof(uint32_t);
  const pm_device *d;
  void *words;
  bool pushed;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  int mode = CU_CAPTURE_RELAXED; /* else it would end a capture that goes on in any thread */
  const bool relaxed = !pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  const cu_result r = pm_cu.cuMemHostAlloc(&words, bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED);
  if (relaxed) pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  pm_leave(pushed);
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "no host memory that devices of a mesh can read");
  memset(words, 0, bytes);
  pthread_mutex_lock(&lock);
  const uint32_t id = atomic_load(&n_meshes);
  if (id < MESHES) {
    meshes[id].words = words;
    meshes[id].n_devices = n_devices;
    meshes[id].words[1] = milliseconds;
    atomic_store(&n_meshes, id + 1);
  }
  pthread_mutex_unlock(&lock);
  *out = id;
  if (id < MESHES) return PM_OK;
  return pm_fail(err, PM_E_NOT_IMPLEMENTED, "a process can make %d different meshes of GPUs",
                 MESHES - 1);
}

pm_code pm_watch_kernel(const char *name, const pm_program_site *sites, uint32_t n, uint32_t *out,
                        pm_err *err) {
  pthread_mutex_lock(&lock);
  if (n_kernels == cap_kernels) {
    const uint32_t cap = cap_kernels ? 2 * cap_kernels : LEAST_KERNELS;
    watched_kernel *more = pm_malloc(cap * sizeof *more);
    if (more) {
      if (n_kernels) memcpy(more, kernels, n_kernels * sizeof *more);
      pm_free(kernels);
      kernels = more;
      cap_kernels = cap;
    }
  }
  pm_program_site *kept = n_kernels < cap_kernels ? pm_malloc((n + !n) * sizeof *kept) : NULL;
  if (kept) {
    if (n) memcpy(kept, sites, n * sizeof *kept);
    *out = n_kernels;
    kernels[n_kernels++] = (watched_kernel){.name = name, .sites = kept, .n_sites = n};
  }
  pthread_mutex_unlock(&lock);
  return kept ? PM_OK : pm_fail(err, PM_E_MEMORY, "the host is out of memory");
}

pm_watch_arg pm_watch_of(uint32_t mesh, uint32_t kernel, uint32_t rank, int device) {
  atomic_store_explicit(&used[device % ORDINALS], true, memory_order_relaxed);
  return (pm_watch_arg){.words = (uint64_t)(uintptr_t)meshes[mesh].words,
                        .mesh = mesh,
                        .kernel = kernel,
                        .rank = rank};
}

void pm_watch_end(uint32_t mesh, const char *why) {
  if (!mesh || mesh >= atomic_load(&n_meshes)) return;
  pthread_mutex_lock(&lock);
  if (!meshes[mesh].words[0]) {
    snprintf(meshes[mesh].why, sizeof meshes[mesh].why, "%s", why);
    meshes[mesh].words[0] = ASKED;
  }
  pthread_mutex_unlock(&lock);
}

/* ---- what is reported --------------------------------------------------------------------- */

/* The first wait that ended early on a device; 0: none did. */
static size_t tell_row(const watch *w, uint32_t rank, char *buf, size_t size) {
  const volatile uint32_t *row = w->words + HEAD + ROW * rank;
  const uint32_t kernel = row[0] - 1;
  if (!row[0] || kernel >= n_kernels || row[1] >= kernels[kernel].n_sites) return 0;
  const pm_program_site *s = &kernels[kernel].sites[row[1]];
  int n = snprintf(buf, size,
                   "\n  rank %u, kernel %s: %s of element %u of %s, which is %u, for %u or more "
                   "(block %u, thread %u, warp %u)",
                   rank, kernels[kernel].name, s->op, row[2], s->ref, row[3], row[4], row[5],
                   row[6] / 128, row[6] / 32 % 4);
  if (n > 0 && (size_t)n < size && s->file)
    n += snprintf(buf + n, size - (size_t)n, " at %s:%u", s->file, s->line);
  return n < 0 ? 0 : pm_min((size_t)n, size - 1);
}

static pm_code tell(watch *w, pm_err *err) {
  char rows[900];
  size_t n = 0;
  rows[0] = 0;
  pthread_mutex_lock(&lock);
  for (uint32_t rank = 0; rank < w->n_devices; rank++)
    n += tell_row(w, rank, rows + n, sizeof rows - n);
  pm_fail(err, PM_E_DEADLOCK,
          "the mesh of %u devices cannot be used any more: %s. Make a new DeviceMesh, and arrays "
          "for it%s%s",
          w->n_devices,
          w->words[0] == ASKED ? w->why : "a wait lasted longer than the timeout of the mesh",
          n ? ". These waits were ended:" : "", rows);
  pthread_mutex_unlock(&lock);
  return err->code;
}

pm_code pm_watch_check(uint32_t mesh, pm_err *err) {
  const struct timespec others = {.tv_nsec =
                                      20 * 1000 * 1000}; /* so long they may take to report */
  if (!mesh || mesh >= atomic_load(&n_meshes) || !meshes[mesh].words[0]) return PM_OK;
  nanosleep(&others, NULL);
  return tell(&meshes[mesh], err);
}

pm_code pm_watch_results(pm_err *err) {
  const uint32_t n = atomic_load_explicit(&n_meshes, memory_order_acquire);
  for (uint32_t k = 1; k < n; k++) {
    watch *w = &meshes[k];
    bool ended = false;
    if (!w->words[0] || atomic_load(&w->reported)) continue;
    for (uint32_t rank = 0; rank < w->n_devices; rank++) ended |= w->words[HEAD + ROW * rank] != 0;
    if (ended && !atomic_exchange(&w->reported, true)) return pm_watch_check(k, err);
  }
  return PM_OK;
}

/* ---- the end of the process --------------------------------------------------------------- */

static struct {
  pthread_mutex_t lock;
  pthread_cond_t done;
  bool is_done;
} leaving = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};

static void *await_devices(void *unused) {
  for (int k = 0; k < ORDINALS; k++) {
    PM_IGNORED(ignored);
    const pm_device *d;
    bool pushed;
    if (!atomic_load(&used[k])) continue;
    if (pm_device_need(k, &d, &ignored) || pm_enter(d, &pushed, &ignored)) continue;
    pm_cu.cuCtxSynchronize();
    pm_leave(pushed);
  }
  pthread_mutex_lock(&leaving.lock);
  leaving.is_done = true;
  pthread_cond_signal(&leaving.done);
  pthread_mutex_unlock(&leaving.lock);
  return unused;
}

void pm_watch_leave(uint32_t milliseconds) {
  struct timespec until;
  pthread_t thread;
  bool any = false;
  for (int k = 0; k < ORDINALS; k++) any |= atomic_load(&used[k]);
  if (!any || pthread_create(&thread, NULL, await_devices, NULL)) return;
  pthread_detach(thread);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += milliseconds / 1000;
  until.tv_nsec += milliseconds % 1000 * 1000000L;
  if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
  for (int once = 0; once < 2; once++) { /* kernels whose waits were ended take no longer */
    int r = 0;
    pthread_mutex_lock(&leaving.lock);
    while (!leaving.is_done && !r) r = pthread_cond_timedwait(&leaving.done, &leaving.lock, &until);
    const bool done = leaving.is_done;
    pthread_mutex_unlock(&leaving.lock);
    if (done) return;
    for (uint32_t k = 1; k < atomic_load(&n_meshes); k++) pm_watch_end(k, "the interpreter exits");
    until.tv_sec += 2;
  }
}
