/* The devices of a mesh in one process: peer access, and launches on all of them.
 *
 * Each device's context is told that it may access the others' memory, once for each pair, and so
 * is the pool that arrays of this package come from. An address then means the same memory on every
 * device, so that the table of peers is filled with the addresses that the arrays have.
 *
 * Before a launch, memory that other devices are to access is looked at: virtual memory and pools
 * of other libraries were not opened to them, and a kernel that found out would take the context
 * down with it.
 *
 * The kernels of a mesh wait for each other, so all are launched before anything else is done.
 * Where the launches are ordered, each stream first waits for what the others hold: an event after
 * it in each of them.
 *
 * A GPU may stand for several devices of a mesh, which is how kernels are tested on one. Launches
 * of a stream follow each other, so all but the first of them have streams of their own, which
 * begin after those of the caller's stream and end before it goes on. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "driver.h"

enum { MAX_DEVICES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool connected[MAX_DEVICES][MAX_DEVICES]; /* under the lock */
static cu_stream own_streams[MAX_DEVICES][MAX_DEVICES];

/* ---- peer access -------------------------------------------------------------------------- */

static pm_code connect_pair(const pm_device *from, const pm_device *to, pm_err *err) {
  const int a = from->info.ordinal, b = to->info.ordinal;
  cu_device x, y;
  int can = 0;
  bool pushed;
  cu_result r = pm_cu.cuDeviceGet(&x, a);
  if (!r) r = pm_cu.cuDeviceGet(&y, b);
  if (!r) r = pm_cu.cuDeviceCanAccessPeer(&can, x, y);
  if (!r && !can)
    return pm_fail(
        err, PM_E_VALUE,
        "CUDA device %d cannot access the memory of device %d: a mesh needs devices that "
        "NVLink or PCIe peer access joins",
        a, b);
  if (!r) {
    if (pm_enter(from, &pushed, err)) return err->code;
    r = pm_cu.cuCtxEnablePeerAccess(to->context, 0);
    if (r == CU_PEER_ACCESS_ALREADY_ENABLED) r = CU_OK;
    pm_leave(pushed);
  }
  if (!r && to->pool) {
    const cu_pool_access access = {.location = {1, x}, .flags = 3};
    r = pm_cu.cuMemPoolSetAccess(to->pool, &access, 1);
  }
  if (r)
    return pm_cu_fail(err, PM_E_DRIVER, r, "device %d was not given access to device %d's memory",
                      a, b);
  connected[a][b] = true;
  return PM_OK;
}

pm_code pm_group_connect(const int *devices, uint32_t n, pm_err *err) {
  pm_code code = PM_OK;
  for (uint32_t i = 0; i < n && !code; i++) {
    for (uint32_t j = 0; j < n && !code; j++) {
      const pm_device *from, *to;
      if (devices[i] >= MAX_DEVICES || devices[j] >= MAX_DEVICES)
        return pm_fail(err, PM_E_NOT_IMPLEMENTED, "at most %d devices are supported", MAX_DEVICES);
      if (devices[i] == devices[j]) continue;
      if (pm_device_need(devices[i], &from, err) || pm_device_need(devices[j], &to, err))
        return err->code;
      pthread_mutex_lock(&lock);
      if (!connected[devices[i]][devices[j]]) code = connect_pair(from, to, err);
      pthread_mutex_unlock(&lock);
    }
  }
  return code;
}

pm_code pm_group_drain(const int *devices, uint32_t n, pm_err *err) {
  for (uint32_t i = 0; i < n; i++) {
    const pm_device *d;
    bool pushed;
    if (pm_device_need(devices[i], &d, err) || pm_enter(d, &pushed, err)) return err->code;
    const cu_result r = pm_cu.cuCtxSynchronize();
    pm_leave(pushed);
    if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "kernels of a mesh failed on GPU %d", devices[i]);
  }
  return PM_OK;
}

/* ---- launches ----------------------------------------------------------------------------- */

/* Can other devices access the memory at this address of device d? Else why not. */
static const char *hidden(const pm_device *d, uint64_t ptr) {
  uint64_t pool = 0;
  int plain = 1;
  if (pm_cu.cuPointerGetAttribute(&pool, CU_POINTER_POOL, ptr)) pool = 0;
  if (pool) {
    return (cu_pool)(uintptr_t)pool == d->pool
               ? NULL
               : "memory of a stream-ordered pool (cudaMallocAsync)";
  }
  if (pm_cu.cuPointerGetAttribute(&plain, CU_POINTER_IS_PLAIN, ptr)) plain = 1;
  return plain ? NULL : "virtual memory (for example an expandable segment of PyTorch)";
}

static pm_code check_memory(const pm_member *m, pm_err *err) {
  const pm_device *d;
  const int32_t *params;
  const uint32_t n = pm_kernel_peers(m->kernel, &params);
  if (pm_device_need(m->device, &d, err)) return err->code;
  for (uint32_t i = 0; i < n; i++) {
    const char *what = params[i] < 0 ? NULL : hidden(d, m->pointers[params[i]]);
    if (!what) continue;
    return pm_fail(
        err, PM_E_VALUE,
        "argument %d (operands, then outputs, from 0) on device %d is %s, which other "
        "devices cannot access; make it by plgpu.symm_empty, or pass a copy in memory of "
        "plgpu.device_put",
        params[i], m->device, what);
  }
  return PM_OK;
}

static cu_result record(cu_stream stream, cu_event *e) {
  cu_result r = pm_cu.cuEventCreate(e, CU_NO_TIMING);
  if (!r) r = pm_cu.cuEventRecord(*e, stream);
  return r;
}

/* Every stream waits for what is in all others now. */
static pm_code meet(const pm_member *m, uint32_t n, pm_err *err) {
  cu_event events[MAX_DEVICES] = {NULL};
  const pm_device *d;
  cu_result r = CU_OK;
  bool pushed;
  for (uint32_t i = 0; i < n && !r; i++) {
    if (pm_device_need(m[i].device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
    r = record(m[i].stream, &events[i]);
    pm_leave(pushed);
  }
  for (uint32_t i = 0; i < n && !r; i++) {
    if (pm_device_need(m[i].device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
    for (uint32_t j = 0; j < n && !r; j++)
      if (i != j) r = pm_cu.cuStreamWaitEvent(m[i].stream, events[j], 0);
    pm_leave(pushed);
  }
  for (uint32_t i = 0; i < n; i++)
    if (events[i]) pm_cu.cuEventDestroy(events[i]); /* the driver keeps it until the wait is over */
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "the streams of a mesh cannot be ordered");
  return PM_OK;
}

/* `after` continues once what is in `before` has run. Both are streams of the device. */
static pm_code follow(int device, cu_stream after, cu_stream before, pm_err *err) {
  const pm_device *d;
  cu_event e = NULL;
  bool pushed;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  cu_result r = record(before, &e);
  if (!r) r = pm_cu.cuStreamWaitEvent(after, e, 0);
  if (e) pm_cu.cuEventDestroy(e);
  pm_leave(pushed);
  return r ? pm_cu_fail(err, PM_E_DRIVER, r, "the streams of a mesh cannot be ordered") : PM_OK;
}

/* A stream for device number `at` of meshes, on this GPU; it stays. */
static pm_code own_stream(int device, uint32_t at, cu_stream *out, pm_err *err) {
  const pm_device *d;
  cu_result r = CU_OK;
  bool pushed;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  pthread_mutex_lock(&lock);
  if (!own_streams[device][at]) r = pm_cu.cuStreamCreate(&own_streams[device][at], CU_NON_BLOCKING);
  *out = own_streams[device][at];
  pthread_mutex_unlock(&lock);
  pm_leave(pushed);
  return r ? pm_cu_fail(err, PM_E_DRIVER, r, "no stream for device %u of the mesh", at) : PM_OK;
}

/* The members with a stream for each; those of one GPU begin after the caller's. */
static pm_code separate(const pm_member *m, uint32_t n, pm_member *out, pm_err *err) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t same = 0;
    while (m[same].device != m[i].device) same++;
    out[i] = m[i];
    if (same == i) continue;
    if (own_stream(m[i].device, i, (cu_stream *)&out[i].stream, err) ||
        follow(m[i].device, out[i].stream, m[i].stream, err))
      return err->code;
  }
  return PM_OK;
}

static pm_code launch_all(const pm_member *m, uint32_t n, const uint64_t *const *pointers,
                          const uint64_t *counters, uint32_t mesh, pm_err *err) {
  uint64_t records[MAX_DEVICES];
  char why[sizeof err->text + 64];
  pm_code code = PM_OK;
  for (uint32_t i = 0; i < n; i++) {
    const pm_peers peers = {.rank = i, .pointers = pointers, .counters = counters, .mesh = mesh};
    if (!pm_kernel_launch_in_mesh(m[i].kernel, pointers[i], counters[i], &peers, m[i].stream,
                                  &records[i], err))
      continue;
    snprintf(why, sizeof why, "a launch on rank %u failed: %s", i, err->text);
    if (i) pm_watch_end(mesh, why); /* for those that were launched */
    return err->code;
  }
  for (uint32_t i = 0; i < n; i++) { /* every record is freed; the first error counts */
    pm_err other = {0};
    const pm_code this =
        pm_kernel_end_checks(m[i].kernel, m[i].stream, records[i], code ? &other : err);
    if (!code) code = this;
  }
  return code;
}

static pm_code take_counters(const pm_member *m, uint64_t *counters, pm_err *err) {
  const pm_device *d;
  bool pushed;
  if (pm_device_need(m->device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  const pm_code code = pm_kernel_counters(m->kernel, m->stream, counters, err);
  pm_leave(pushed);
  return code;
}

pm_code pm_group_launch(const pm_member *given, uint32_t n, bool ordered, uint32_t mesh,
                        pm_err *err) {
  const uint64_t *pointers[MAX_DEVICES];
  uint64_t counters[MAX_DEVICES];
  pm_member m[MAX_DEVICES];
  int devices[MAX_DEVICES] = {0};
  if (n > MAX_DEVICES)
    return pm_fail(err, PM_E_NOT_IMPLEMENTED, "at most %d devices are supported", MAX_DEVICES);
  for (uint32_t i = 0; i < n; i++) devices[i] = given[i].device;
  if (pm_watch_check(mesh, err)) return err->code;
  if (pm_group_connect(devices, n, err) || separate(given, n, m, err)) return err->code;
  for (uint32_t i = 0; i < n; i++) {
    pointers[i] = m[i].pointers;
    if (check_memory(&m[i], err) || take_counters(&m[i], &counters[i], err)) return err->code;
  }
  if (ordered && meet(m, n, err)) return err->code;
  pm_code code = launch_all(m, n, pointers, counters, mesh, err);
  for (uint32_t i = 0; i < n; i++) {
    pm_err other = {0};
    if (m[i].stream == given[i].stream) continue;
    const pm_code this = follow(m[i].device, given[i].stream, m[i].stream, code ? &other : err);
    if (!code) code = this;
  }
  return code;
}
