/* Modules: loaded for a kernel, retired with it, unloaded when nothing can use them.
 *
 * A module may be in use long after its kernel: by launches that still run, and by captured graphs,
 * which may launch it again at any time. The driver reports neither, so it is inferred from the
 * streams:
 * - The default stream cannot be captured. An event that is recorded there after the module was
 *   retired, and that the device has passed, proves that its launches have finished. The event is
 *   recorded just before a later launch on that stream, when using the stream is safe anyway.
 * - Nobody else can capture the device's own stream, which is used for host arrays, so it can be
 *   queried directly.
 * - A user's stream may be captured, and may no longer exist when we would query it. A module that
 *   was launched there is never unloaded.
 *
 * A retired module is reused if a kernel with the same cubin is loaded, so the modules that stay
 * are at most as many as there are different programs.
 *
 * Retiring makes no driver call, because kernels are deleted at any time, even while a stream is
 * being captured. Unloading a module, like loading one, makes the driver wait until the device is
 * idle. So modules are unloaded directly after one was loaded, and when the user waits for the
 * device. */
#include "modules.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pm_module *retired; /* under lock, as is all below */

/* Marks on the default stream of each device: the number of the last one recorded, of the last one
 * passed, and the event of the one in between. */
enum { MAX_DEVICES = 64 };
static struct {
  uint64_t recorded, passed;
  cu_event event; /* NULL: none is on its way */
} marks[MAX_DEVICES];

_Atomic bool pm_mark_wanted;

static int number_of(const pm_device *d) { return d->info.ordinal; }

/* ---- marks -------------------------------------------------------------------------------- */

static void update_wanted(void) {
  bool wanted = false;
  for (const pm_module *m = retired; m && !wanted; m = m->next) {
    const int i = number_of(m->device);
    wanted = m->due > marks[i].recorded && !marks[i].event;
  }
  atomic_store_explicit(&pm_mark_wanted, wanted, memory_order_relaxed);
}

void pm_modules_mark(const pm_device *d) {
  const int i = number_of(d);
  pthread_mutex_lock(&lock);
  bool needed = false;
  for (const pm_module *m = retired; m; m = m->next)
    needed |= m->device == d && m->due > marks[i].recorded;
  if (needed && !marks[i].event && !pm_cu.cuEventCreate(&marks[i].event, CU_NO_TIMING)) {
    if (pm_cu.cuEventRecord(marks[i].event, NULL)) {
      pm_cu.cuEventDestroy(marks[i].event);
      marks[i].event = NULL;
    } else {
      marks[i].recorded++;
    }
  }
  update_wanted();
  pthread_mutex_unlock(&lock);
}

/* ---- retired modules ------------------------------------------------------------------------ */

void pm_module_retire(pm_module *m) {
  if (!m) return;
  pthread_mutex_lock(&lock);
  const bool marked = atomic_load(&m->used) & PM_ON_DEFAULT;
  m->due = marked ? marks[number_of(m->device)].recorded + 1 : 0;
  m->next = retired;
  retired = m;
  update_wanted();
  pthread_mutex_unlock(&lock);
}

static pm_module *take_again(const pm_device *d, const uint64_t hash[2]) {
  pm_module *found = NULL;
  pthread_mutex_lock(&lock);
  for (pm_module **at = &retired; *at && !found; at = &(*at)->next) {
    if ((*at)->device != d || memcmp((*at)->hash, hash, sizeof(*at)->hash)) continue;
    found = *at;
    *at = found->next;
    found->next = NULL;
    update_wanted();
    break;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

/* In the device's context. */
static void unload(pm_module *m) {
  pm_counters_free(m->counters);
  pm_cu.cuModuleUnload(m->module);
  pm_free(m);
}

/* Which of the device's modules can go; they are moved to the list. In its context. */
static pm_module *take_unused(const pm_device *d) {
  pm_module *out = NULL;
  const int i = number_of(d);
  if (marks[i].event && !pm_cu.cuEventQuery(marks[i].event)) {
    pm_cu.cuEventDestroy(marks[i].event);
    marks[i].event = NULL;
    marks[i].passed = marks[i].recorded;
  }
  const bool idle = !pm_cu.cuStreamQuery(d->stream);
  for (pm_module **at = &retired; *at;) {
    pm_module *m = *at;
    const uint32_t used = atomic_load(&m->used);
    if (m->device != d || used & PM_ELSEWHERE || (used & PM_ON_OWN && !idle) ||
        m->due > marks[i].passed) {
      at = &m->next;
      continue;
    }
    *at = m->next;
    m->next = out;
    out = m;
  }
  update_wanted();
  return out;
}

static const pm_device *device_of_retired(int ordinal) {
  const pm_device *d = NULL;
  for (const pm_module *m = retired; m && !d; m = m->next)
    if (number_of(m->device) == ordinal) d = m->device;
  return d;
}

void pm_modules_sweep(void) {
  for (int i = 0; i < MAX_DEVICES; i++) {
    PM_IGNORED(ignored);
    bool pushed;
    int mode = CU_CAPTURE_RELAXED; /* another thread may be capturing: none of this is in it */
    pthread_mutex_lock(&lock);
    const pm_device *d = device_of_retired(i);
    pm_module *out = NULL;
    if (d && !pm_driver_need(&ignored) && !pm_enter(d, &pushed, &ignored)) {
      const bool relaxed = !pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
      out = take_unused(d);
      pthread_mutex_unlock(&lock);
      for (pm_module *next; out; out = next) {
        next = out->next;
        unload(out);
      }
      if (relaxed) pm_cu.cuThreadExchangeStreamCaptureMode(&mode);
      pm_leave(pushed);
    } else {
      pthread_mutex_unlock(&lock);
    }
  }
}

/* ---- loading -------------------------------------------------------------------------------- */

static void identify(const pm_cubin *c, const char *entry, uint64_t hash[2]) {
  uint64_t both[4];
  pm_digest(c->image, c->size, both);
  pm_digest(entry, strlen(entry), both + 2);
  pm_digest(both, sizeof both, hash);
}

pm_code pm_module_new(const pm_device *d, const pm_cubin *c, const char *entry, uint32_t counters,
                      pm_module **out, cu_result *result, pm_err *err) {
  uint64_t hash[2];
  identify(c, entry, hash);
  *result = CU_OK;
  *out = take_again(d, hash);
  if (*out) return PM_OK;
  pm_module *m = pm_malloc(sizeof *m);
  if (!m) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  memset(m, 0, sizeof *m);
  m->device = d;
  memcpy(m->hash, hash, sizeof hash);
  *result = pm_cu.cuModuleLoadData(&m->module, c->image);
  if (!*result) *result = pm_cu.cuModuleGetFunction(&m->function, m->module, entry);
  pm_code code = *result ? PM_E_LAUNCH : PM_OK;
  if (!code && counters) code = pm_counters_new(d, counters + 1, &m->counters, err);
  if (code) {
    if (m->module) pm_cu.cuModuleUnload(m->module);
    pm_free(m);
    return code;
  }
  *out = m;
  pm_modules_sweep();
  return PM_OK;
}
