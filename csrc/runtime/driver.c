/* libcuda, opened when it is first needed; devices and their primary contexts.
 *
 * The table of entry points is filled once for the process. A device is set up at its first use and
 * kept: its primary context (which PyTorch, CuPy and JAX use as well) is retained for good, because
 * arrays and kernels may outlive any order of destruction. A child process made by fork() cannot
 * use the parent's contexts, so every entry point refuses there. */
#include "driver.h"

#include "../base/env.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

enum { MAX_DEVICES = 64, OLDEST_DRIVER = 12000 };

pm_driver_table pm_cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pm_err load_error; /* code PM_OK: the driver is ready */
static int driver_version, n_devices;
static atomic_bool forked;

static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;
static pm_device devices[MAX_DEVICES];
static atomic_bool device_ready[MAX_DEVICES];

/* ---- errors ------------------------------------------------------------------------------- */

/* Errors after which every later call in the context fails in the same way. */
static bool is_sticky(cu_result r) {
  return r == CU_ECC_UNCORRECTABLE || r == CU_ILLEGAL_ADDRESS || r == CU_LAUNCH_TIMEOUT ||
         r == CU_CONTEXT_IS_DESTROYED || r == CU_ASSERT ||
         (r >= CU_HARDWARE_STACK_ERROR && r <= CU_LAUNCH_FAILED);
}

const char *_Atomic pm_last_kernel;

pm_code pm_cu_fail(pm_err *err, pm_code code, cu_result result, const char *fmt, ...) {
  char what[2048];
  const char *name = NULL, *text = NULL;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(what, sizeof what, fmt, ap);
  va_end(ap);
  if (pm_cu.cuGetErrorName) pm_cu.cuGetErrorName(result, &name);
  if (pm_cu.cuGetErrorString) pm_cu.cuGetErrorString(result, &text);
  if (!text) text = "unknown error";
  if (!name) name = "no name";
  if (!is_sticky(result)) {
    if (result == CU_OUT_OF_MEMORY) code = PM_E_DEVICE_MEMORY;
    return pm_fail(err, code, "%s: %s (%s, %d)", what, text, name, result);
  }
  const char *kernel = atomic_load_explicit(&pm_last_kernel, memory_order_relaxed);
  return pm_fail(
      err, PM_E_LAUNCH,
      "%s: %s (%s, %d). The CUDA context is lost: a kernel that ran before failed on the "
      "device (the last one launched here was %s), and no further GPU work is possible in "
      "this process. Start it anew; interpret=True checks accesses and synchronisation on "
      "the CPU",
      what, text, name, result, kernel ? kernel : "of another library");
}

/* ---- the library -------------------------------------------------------------------------- */

static void in_child(void) { atomic_store(&forked, true); }

static pm_code resolve(void *lib, pm_err *err) {
  cu_result (*get)(const char *, void **, int, uint64_t, int *);
  cu_result (*version)(int *);
  *(void **)&get = dlsym(lib, "cuGetProcAddress_v2");
  *(void **)&version = dlsym(lib, "cuDriverGetVersion");
  if (version) version(&driver_version);
  if (!get || driver_version < OLDEST_DRIVER)
    return pm_fail(err, PM_E_DRIVER,
                   "the NVIDIA driver is too old: it supports CUDA %d.%d, and CUDA %d.%d is needed "
                   "(driver 525 or later)",
                   driver_version / 1000, driver_version % 1000 / 10, OLDEST_DRIVER / 1000,
                   OLDEST_DRIVER % 1000 / 10);
  int status;
#define PM_CU(name, abi, parameters)                                                 \
  if (get(#name, (void **)&pm_cu.name, abi, 0, &status) != CU_OK || !pm_cu.name)     \
    return pm_fail(err, PM_E_DRIVER, "the NVIDIA driver (CUDA %d.%d) has no " #name, \
                   driver_version / 1000, driver_version % 1000 / 10);
#define PM_CU_OPTIONAL(name, abi, parameters) \
  if (get(#name, (void **)&pm_cu.name, abi, 0, &status) != CU_OK) pm_cu.name = NULL;
#include "driver.def"
#undef PM_CU
  return PM_OK;
}

static pm_code load(pm_err *err) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return pm_fail(err, PM_E_DRIVER, "no NVIDIA driver was found (%s)", dlerror());
  if (resolve(lib, err)) return err->code;
  cu_result r = pm_cu.cuInit(0);
  if (r == CU_NO_DEVICE) return pm_fail(err, PM_E_DRIVER, "the NVIDIA driver sees no GPU");
  if (r == CU_SYSTEM_DRIVER_MISMATCH)
    return pm_cu_fail(err, PM_E_DRIVER, r,
                      "the NVIDIA kernel module and libcuda.so.1 are of different versions");
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "cuInit failed");
  r = pm_cu.cuDeviceGetCount(&n_devices);
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "cuDeviceGetCount failed");
  if (!n_devices) return pm_fail(err, PM_E_DRIVER, "the NVIDIA driver sees no GPU");
  if (n_devices > MAX_DEVICES) n_devices = MAX_DEVICES;
  pthread_atfork(NULL, NULL, in_child);
  return PM_OK;
}

static void load_once(void) { load(&load_error); }

pm_code pm_driver_need(pm_err *err) {
  pthread_once(&once, load_once);
  if (load_error.code) return pm_fail(err, load_error.code, "%s", load_error.text);
  if (atomic_load_explicit(&forked, memory_order_relaxed))
    return pm_fail(err, PM_E_DRIVER,
                   "this process was forked after CUDA had been initialised, and cannot use the "
                   "GPU: start workers with the multiprocessing method 'spawn'");
  return PM_OK;
}

int pm_driver_version(void) {
  pthread_once(&once, load_once);
  return driver_version;
}

/* ---- devices ------------------------------------------------------------------------------ */

pm_code pm_asked_target(const pm_target **out, pm_err *err) {
  const char *asked = pm_env(PM_ENV_TARGET);
  *out = *asked ? pm_target_named(asked) : NULL;
  if (!*asked || *out) return PM_OK;
  pm_arena arena;
  pm_arena_init(&arena);
  pm_fail(err, PM_E_VALUE, "the environment variable %s must be one of %s, got %s",
          pm_env_table[PM_ENV_TARGET].variable, pm_target_list(&arena, 0), asked);
  pm_arena_free(&arena);
  return err->code;
}

/* What kernels are compiled for on a device: for what the user asks, if it can run it. */
static pm_code choose_target(pm_device_info *info, pm_err *err) {
  const pm_target *asked;
  info->target = pm_target_of_device(info->capability);
  if (pm_asked_target(&asked, err) || !asked) return err->code;
  info->target = asked;
  if (pm_target_runs_on(asked, info->capability)) return PM_OK;
  if (pm_env_is_on(PM_ENV_STAND_IN) && asked == &pm_targets[PM_TARGET_SM_100A] &&
      pm_target_runs_on(&pm_targets[PM_TARGET_SM_90A], info->capability))
    return PM_OK;
  return pm_fail(err, PM_E_VALUE,
                 "the environment variable %s is %s, which CUDA device %d (%s, compute capability "
                 "%d.%d) does not run",
                 pm_env_table[PM_ENV_TARGET].variable, asked->text, info->ordinal, info->name,
                 info->capability / 10, info->capability % 10);
}

static pm_code set_up(int ordinal, pm_device *d, pm_err *err) {
  pm_device_info *info = &d->info;
  cu_device dev;
  cu_result r;
  int major = 0, minor = 0, smem = 0, pools = 0;
  size_t bytes = 0;
  info->ordinal = ordinal;
  info->driver_version = driver_version;
  if ((r = pm_cu.cuDeviceGet(&dev, ordinal)) ||
      (r = pm_cu.cuDeviceGetName(info->name, (int)sizeof info->name, dev)) ||
      (r = pm_cu.cuDeviceGetAttribute(&major, CU_ATTR_MAJOR, dev)) ||
      (r = pm_cu.cuDeviceGetAttribute(&minor, CU_ATTR_MINOR, dev)) ||
      (r = pm_cu.cuDeviceGetAttribute(&info->sm_count, CU_ATTR_SM_COUNT, dev)) ||
      (r = pm_cu.cuDeviceGetAttribute(&smem, CU_ATTR_SMEM_OPTIN, dev)) ||
      (r = pm_cu.cuDeviceGetAttribute(&pools, CU_ATTR_POOLS, dev)) ||
      (r = pm_cu.cuDeviceTotalMem(&bytes, dev)))
    return pm_cu_fail(err, PM_E_DRIVER, r, "CUDA device %d cannot be queried", ordinal);
  info->capability = major * 10 + minor;
  if (choose_target(info, err)) return err->code;
  info->smem_optin = smem;
  info->memory_bytes = (int64_t)bytes;
  if ((r = pm_cu.cuDevicePrimaryCtxRetain(&d->context, dev)))
    return pm_cu_fail(err, PM_E_DRIVER, r, "CUDA device %d gives no context", ordinal);
  bool pushed;
  if (pm_enter(d, &pushed, err)) return err->code;
  r = pm_cu.cuStreamCreate(&d->stream, CU_NON_BLOCKING);
  if (!r && pools) {
    /* our own pool: its blocks are kept for reuse without touching the default pool's settings */
    cu_pool_props props = {.alloc_type = 1, .location = {1, dev}};
    uint64_t keep = UINT64_MAX;
    r = pm_cu.cuMemPoolCreate(&d->pool, &props);
    if (!r) r = pm_cu.cuMemPoolSetAttribute(d->pool, CU_POOL_RELEASE_THRESHOLD, &keep);
  }
  pm_leave(pushed);
  if (r) return pm_cu_fail(err, PM_E_DRIVER, r, "CUDA device %d cannot be set up", ordinal);
  return PM_OK;
}

pm_code pm_device_need(int ordinal, const pm_device **out, pm_err *err) {
  if (pm_driver_need(err)) return err->code;
  if (ordinal < 0 || ordinal >= n_devices)
    return pm_fail(err, PM_E_VALUE, "there is no CUDA device %d: this process sees %d", ordinal,
                   n_devices);
  *out = &devices[ordinal];
  if (atomic_load_explicit(&device_ready[ordinal], memory_order_acquire)) return PM_OK;
  pthread_mutex_lock(&device_lock);
  pm_code code = PM_OK;
  if (!atomic_load_explicit(&device_ready[ordinal], memory_order_relaxed)) {
    pm_device d = {0};
    code = set_up(ordinal, &d, err);
    if (!code) {
      devices[ordinal] = d;
      atomic_store_explicit(&device_ready[ordinal], true, memory_order_release);
    }
  }
  pthread_mutex_unlock(&device_lock);
  return code;
}

int pm_device_count(char *why, size_t why_size) {
  pm_err err = {0};
  if (!pm_driver_need(&err)) return n_devices;
  if (why) snprintf(why, why_size, "%s", err.text);
  return 0;
}

pm_code pm_device_get(int ordinal, pm_device_info *out, pm_err *err) {
  const pm_device *d;
  if (pm_device_need(ordinal, &d, err)) return err->code;
  *out = d->info;
  return PM_OK;
}

/* Each call asks: of a device that is set up there is nothing more to find out. */
pm_code pm_device_target(int ordinal, const pm_target **out, pm_err *err) {
  const pm_device *d;
  if (ordinal >= 0 && ordinal < n_devices &&
      atomic_load_explicit(&device_ready[ordinal], memory_order_acquire))
    d = &devices[ordinal];
  else if (pm_device_need(ordinal, &d, err)) return err->code;
  *out = d->info.target;
  if (*out) return PM_OK;
  pm_arena arena;
  pm_arena_init(&arena);
  pm_fail(err, PM_E_NOT_IMPLEMENTED,
          "CUDA device %d (%s) has compute capability %d.%d; kernels are compiled for %s. "
          "interpret=True runs this one on the CPU",
          ordinal, d->info.name, d->info.capability / 10, d->info.capability % 10,
          pm_target_list(&arena, 0));
  pm_arena_free(&arena);
  return err->code;
}

/* ---- contexts ----------------------------------------------------------------------------- */

pm_code pm_enter(const pm_device *d, bool *pushed, pm_err *err) {
  cu_context now = NULL;
  *pushed = false;
  cu_result r = pm_cu.cuCtxGetCurrent(&now);
  if (!r && now == d->context) return PM_OK;
  r = pm_cu.cuCtxPushCurrent(d->context);
  if (r)
    return pm_cu_fail(err, PM_E_DRIVER, r, "the context of CUDA device %d cannot be entered",
                      d->info.ordinal);
  *pushed = true;
  return PM_OK;
}

void pm_leave(bool pushed) {
  cu_context old;
  if (pushed) pm_cu.cuCtxPopCurrent(&old);
}
