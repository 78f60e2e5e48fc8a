/* Device memory, copies and the order of streams.
 *
 * Memory comes from one pool for each device, which keeps freed memory in stream order. A failed
 * request is repeated once after the pool has released what it keeps. Devices without pools (none
 * of the supported targets) use cuMemAlloc and cuMemFree, which wait for the device. */
#include <pthread.h>

#include "driver.h"

/* Enter, do one driver call, leave. */
#define IN_CONTEXT(ordinal, result, call)                                              \
  const pm_device *d;                                                                  \
  bool pushed;                                                                         \
  if (pm_device_need(ordinal, &d, err) || pm_enter(d, &pushed, err)) return err->code; \
  cu_result result = (call);                                                           \
  pm_leave(pushed)

/* ---- free ----------------------------------------------------------------------------------- */

/* Memory that could not be freed when its owner went: destructors run wherever Python collects
 * garbage, also while a stream is captured, where waiting for the device would end the capture. It
 * is freed when the package next allocates or synchronizes outside a capture.
 *
 * What streams that we do not know may still use is freed after all work that the context has by
 * then. To ask for that ends every capture of the context, also those of other threads, of which
 * nothing tells. So it is asked for seldom: when much has come together, or memory is short. */
typedef struct late {
  struct late *next;
  uint64_t ptr;
  size_t bytes;
  int device;
  bool unordered;    /* streams that we do not know may still use it */
  cu_event all_work; /* of the context, once it was recorded */
} late;
static late *late_list;
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;

enum { MUCH = 128 << 20 }; /* bytes on a device */

static void put_back(late *l) {
  pthread_mutex_lock(&late_lock);
  l->next = late_list;
  late_list = l;
  pthread_mutex_unlock(&late_lock);
}

static void free_later(int device, uint64_t ptr, size_t bytes, bool unordered) {
  late *l = pm_malloc(sizeof *l);
  if (!l) return;
  *l = (late){.ptr = ptr, .bytes = bytes, .device = device, .unordered = unordered};
  put_back(l);
}

/* An operation on the default stream would end the capture of a stream that waits for it (one that
 * is not non-blocking). */
static bool is_default_usable(cu_stream s) {
  int status = 0;
  return (s && s != CU_STREAM_LEGACY) || !pm_cu.cuStreamIsCapturing(s, &status);
}

static late *take_late(int device) {
  late *out = NULL;
  pthread_mutex_lock(&late_lock);
  for (late **at = &late_list; *at;) {
    late *l = *at;
    if (l->device == device) {
      *at = l->next;
      l->next = out;
      out = l;
    } else {
      at = &l->next;
    }
  }
  pthread_mutex_unlock(&late_lock);
  return out;
}

/* May streams that we do not know still use it, as they may use memory that went before it
 * (`older_is`)? ask: record an event after all work of the context; drivers before CUDA 12.5 cannot
 * do that, and the work is waited for. */
static bool is_in_use(const pm_device *d, late *l, bool ask, bool older_is) {
  if (!l->unordered) return false;
  if (!l->all_work && !ask) return true;
  if (!l->all_work && pm_cu.cuCtxRecordEvent && !pm_cu.cuEventCreate(&l->all_work, CU_NO_TIMING) &&
      pm_cu.cuCtxRecordEvent(d->context, l->all_work)) {
    pm_cu.cuEventDestroy(l->all_work);
    l->all_work = NULL;
  }
  if (!l->all_work) return pm_cu.cuCtxSynchronize() != CU_OK;
  if (older_is || pm_cu.cuEventQuery(l->all_work)) return true;
  pm_cu.cuEventDestroy(l->all_work);
  l->all_work = NULL;
  return false;
}

/* In the context of the device. wait: until all its work is over. */
static void free_late(const pm_device *d, int device, cu_stream s, bool wait) {
  int status = 0;
  size_t waiting = 0;
  if (!late_list || pm_cu.cuStreamIsCapturing(s, &status) || status) return;
  late *l = take_late(device); /* the oldest first */
  /* After the list was taken: other threads go on, and add what their work still uses. */
  const bool idle = l && wait && pm_cu.cuCtxSynchronize() == CU_OK;
  for (const late *x = l; x; x = x->next)
    if (x->unordered && !x->all_work) waiting += x->bytes;
  bool in_use = false;
  for (late *next; l; l = next) {
    next = l->next;
    if (!idle && is_in_use(d, l, waiting >= MUCH, in_use)) {
      in_use = true;
      put_back(l);
      continue;
    }
    if (l->all_work) pm_cu.cuEventDestroy(l->all_work);
    if (d->pool) pm_cu.cuMemFreeAsync(l->ptr, NULL);
    else pm_cu.cuMemFree(l->ptr);
    pm_free(l);
  }
}

void pm_device_free(int device, uint64_t ptr, void *stream) {
  PM_IGNORED(ignored);
  const pm_device *d;
  bool pushed;
  if (!ptr || pm_device_need(device, &d, &ignored) || pm_enter(d, &pushed, &ignored)) return;
  int mode = CU_CAPTURE_RELAXED;
  const bool relaxed = !pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (!is_default_usable(stream)) free_later(device, ptr, 0, false);
  else if (d->pool) pm_cu.cuMemFreeAsync(ptr, stream);
  else pm_cu.cuMemFree(ptr);
  if (relaxed) pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  pm_leave(pushed);
}

void pm_device_free_unordered(int device, uint64_t ptr, size_t bytes) {
  if (ptr) free_later(device, ptr, bytes, true);
}

static cu_result allocate(const pm_device *d, size_t bytes, cu_stream s, cu_ptr *ptr) {
  return d->pool ? pm_cu.cuMemAllocFromPoolAsync(ptr, bytes, d->pool, s)
                 : pm_cu.cuMemAlloc(ptr, bytes);
}

static cu_result take(const pm_device *d, int device, size_t bytes, cu_stream s, cu_ptr *ptr) {
  const cu_result r = allocate(d, bytes, s, ptr);
  if (r != CU_OUT_OF_MEMORY) return r;
  free_late(d, device, s, true);
  pm_cu.cuCtxSynchronize(); /* what was freed in the order of streams is free then */
  if (d->pool) pm_cu.cuMemPoolTrimTo(d->pool, 0);
  return allocate(d, bytes, s, ptr);
}

pm_code pm_device_alloc(int device, size_t bytes, void *stream, uint64_t *ptr, pm_err *err) {
  *ptr = 0;
  if (!bytes) return PM_OK;
  const pm_device *d;
  bool pushed;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  free_late(d, device, stream, false);
  const cu_result r = take(d, device, bytes, stream, ptr);
  pm_leave(pushed);
  if (r)
    return pm_cu_fail(err, PM_E_DRIVER, r, "CUDA device %d gave no %zu bytes of memory", device,
                      bytes);
  return PM_OK;
}

void pm_memory_sweep(int device) {
  PM_IGNORED(ignored);
  const pm_device *d;
  bool pushed;
  if (pm_device_need(device, &d, &ignored) || pm_enter(d, &pushed, &ignored)) return;
  free_late(d, device, NULL, false);
  pm_leave(pushed);
}

/* ---- copies, order -------------------------------------------------------------------------- */

/* The driver's complaint about a copy may come from a kernel that ran before it. */
static pm_code copied(int device, cu_result r, const char *what, size_t bytes, pm_err *err) {
  if (!r) return PM_OK;
  return pm_cu_fail(err, PM_E_DRIVER, r, "%s of %zu bytes on CUDA device %d failed", what, bytes,
                    device);
}

pm_code pm_copy_to_device(int device, uint64_t dst, const void *src, size_t bytes, void *stream,
                          pm_err *err) {
  if (!bytes) return PM_OK;
  IN_CONTEXT(device, r, pm_cu.cuMemcpyHtoDAsync(dst, src, bytes, stream));
  return copied(device, r, "a copy from the host", bytes, err);
}

pm_code pm_copy_to_host(int device, void *dst, uint64_t src, size_t bytes, void *stream,
                        pm_err *err) {
  if (!bytes) return PM_OK;
  IN_CONTEXT(device, r, pm_cu.cuMemcpyDtoHAsync(dst, src, bytes, stream));
  return copied(device, r, "a copy to the host", bytes, err);
}

pm_code pm_copy_on_device(int device, uint64_t dst, uint64_t src, size_t bytes, void *stream,
                          pm_err *err) {
  if (!bytes) return PM_OK;
  IN_CONTEXT(device, r, pm_cu.cuMemcpyDtoDAsync(dst, src, bytes, stream));
  return copied(device, r, "a copy", bytes, err);
}

static cu_result store(cu_ptr dst, uint32_t value, size_t bytes, cu_stream s) {
  if (bytes == 1) return pm_cu.cuMemsetD8Async(dst, (unsigned char)value, 1, s);
  if (bytes == 2) return pm_cu.cuMemsetD16Async(dst, (unsigned short)value, 1, s);
  return pm_cu.cuMemsetD32Async(dst, value, 1, s);
}

pm_code pm_device_store(int device, uint64_t dst, uint32_t value, size_t bytes, void *stream,
                        pm_err *err) {
  IN_CONTEXT(device, r, store(dst, value, bytes, stream));
  return copied(device, r, "a fill", bytes, err);
}

pm_code pm_synchronize(int device, void *stream, pm_err *err) {
  IN_CONTEXT(device, r, pm_cu.cuStreamSynchronize(stream));
  if (r) return pm_cu_fail(err, PM_E_LAUNCH, r, "work on CUDA device %d failed", device);
  return pm_watch_results(err);
}

pm_code pm_stream_order(int device, void *before, void *after, pm_err *err) {
  if (before == after) return PM_OK;
  const pm_device *d;
  bool pushed;
  cu_event e;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  cu_result r = pm_cu.cuEventCreate(&e, CU_NO_TIMING);
  if (!r) {
    r = pm_cu.cuEventRecord(e, before);
    if (!r) r = pm_cu.cuStreamWaitEvent(after, e, 0);
    pm_cu.cuEventDestroy(e); /* the driver keeps it until the wait is over */
  }
  pm_leave(pushed);
  if (r)
    return pm_cu_fail(err, PM_E_DRIVER, r, "two streams of device %d cannot be ordered", device);
  return PM_OK;
}

pm_code pm_mark(int device, void *stream, void **mark, pm_err *err) {
  const pm_device *d;
  bool pushed;
  cu_event e = NULL;
  if (pm_device_need(device, &d, err) || pm_enter(d, &pushed, err)) return err->code;
  cu_result r = pm_cu.cuEventCreate(&e, CU_NO_TIMING);
  if (!r) r = pm_cu.cuEventRecord(e, stream);
  if (r && e) pm_cu.cuEventDestroy(e);
  pm_leave(pushed);
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "no event can be recorded on device %d", device);
  *mark = e;
  return PM_OK;
}

bool pm_mark_passed(int device, void *mark) {
  PM_IGNORED(ignored);
  const pm_device *d;
  bool pushed;
  int mode = CU_CAPTURE_RELAXED; /* a query would end a capture that goes on in any thread */
  if (pm_device_need(device, &d, &ignored) || pm_enter(d, &pushed, &ignored)) return false;
  const bool relaxed = !pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  const bool passed = pm_cu.cuEventQuery(mark) == CU_OK;
  if (passed) pm_cu.cuEventDestroy(mark);
  if (relaxed) pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
  pm_leave(pushed);
  return passed;
}

pm_code pm_private_stream(int device, void **stream, pm_err *err) {
  const pm_device *d;
  if (pm_device_need(device, &d, err)) return err->code;
  *stream = d->stream;
  return PM_OK;
}

pm_code pm_device_of(uint64_t ptr, int *device, pm_err *err) {
  if (pm_driver_need(err)) return err->code;
  cu_result r = pm_cu.cuPointerGetAttribute(device, CU_POINTER_DEVICE, ptr);
  if (r)
    return pm_cu_fail(err, PM_E_VALUE, r, "address 0x%llx is not CUDA memory",
                      (unsigned long long)ptr);
  return PM_OK;
}

bool pm_stream_is_capturing(int device, void *stream) {
  PM_IGNORED(ignored);
  const pm_device *d;
  bool pushed;
  int status = 0;
  if (pm_device_need(device, &d, &ignored) || pm_enter(d, &pushed, &ignored)) return false;
  if (pm_cu.cuStreamIsCapturing(stream, &status)) status = 0;
  pm_leave(pushed);
  return status != 0;
}
