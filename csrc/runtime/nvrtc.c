/* libnvrtc: finding it, opening it, one compilation.
 *
 * Candidates in order: PALLAS_MGPU_NVRTC (binding), the hint, LD_LIBRARY_PATH, CUDA_HOME and
 * CUDA_PATH, /usr/local/cuda, then the loader's own search. The paths of all but the last are known
 * without opening anything, so a hit in the disk cache, whose key names the library, opens none.
 * The GPU's driver determines which major version comes first, since it may refuse a cubin of a
 * newer major version. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include "../base/env.h"
#include "compile.h"
#include "driver.h"

typedef struct pm_nvrtc_table {
#define PM_NVRTC(name, result, parameters) result(*name) parameters;
#define PM_NVRTC_LATER PM_NVRTC
#include "nvrtc.def"
#undef PM_NVRTC_LATER
#undef PM_NVRTC
} pm_nvrtc_table;

static const char *const sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char hint[PATH_MAX];
static char found[PATH_MAX]; /* the choice, once made; under lock */
static pm_nvrtc_table nvrtc; /* filled once `ready` */
static atomic_bool ready;
static int version_major, version_minor;

void pm_nvrtc_hint(const char *path) {
  pthread_mutex_lock(&lock);
  snprintf(hint, sizeof hint, "%s", path ? path : "");
  pthread_mutex_unlock(&lock);
}

/* ---- search ------------------------------------------------------------------------------- */

static bool take(const char *path) {
  struct stat st;
  if (stat(path, &st) || !S_ISREG(st.st_mode)) return false;
  if (!realpath(path, found)) found[0] = 0;
  return found[0] != 0;
}

static bool take_in(const char *dir, size_t n, const char *below, const char *soname) {
  char path[PATH_MAX];
  int len = snprintf(path, sizeof path, "%.*s%s/%s", (int)n, dir, below, soname);
  return n && len > 0 && (size_t)len < sizeof path && take(path);
}

static bool take_in_list(const char *list, const char *soname) {
  while (list && *list) {
    size_t n = strcspn(list, ":");
    if (take_in(list, n, "", soname)) return true;
    list += n + (list[n] == ':');
  }
  return false;
}

static bool take_known(const char *soname) {
  static const char *const homes[] = {"CUDA_HOME", "CUDA_PATH"};
  if (take_in_list(getenv("LD_LIBRARY_PATH"), soname)) return true;
  for (size_t i = 0; i < PM_COUNT(homes); i++) {
    const char *home = getenv(homes[i]);
    if (home && take_in(home, strlen(home), "/lib64", soname)) return true;
  }
  return take_in("/usr/local/cuda", strlen("/usr/local/cuda"), "/lib64", soname);
}

static bool take_by_loader(const char *soname) {
  Dl_info info;
  void *lib = dlopen(soname, RTLD_NOW | RTLD_LOCAL);
  void *symbol = lib ? dlsym(lib, "nvrtcVersion") : NULL;
  return symbol && dladdr(symbol, &info) && info.dli_fname && take(info.dli_fname);
}

/* Fill `found`; the lock is held. */
static pm_code search(pm_err *err) {
  const char *given = pm_env(PM_ENV_NVRTC);
  if (found[0]) return PM_OK;
  if (*given) {
    if (take(given)) return PM_OK;
    return pm_fail(err, PM_E_NVRTC, "%s names %s, which is no file",
                   pm_env_table[PM_ENV_NVRTC].variable, given);
  }
  if (hint[0] && take(hint)) return PM_OK;
  int driver = pm_driver_version();
  bool old = driver && driver < 13000;
  for (size_t i = 0; i < PM_COUNT(sonames); i++)
    if (take_known(sonames[old ? PM_COUNT(sonames) - 1 - i : i])) return PM_OK;
  for (size_t i = 0; i < PM_COUNT(sonames); i++)
    if (take_by_loader(sonames[old ? PM_COUNT(sonames) - 1 - i : i])) return PM_OK;
  return pm_fail(err, PM_E_NVRTC,
                 "libnvrtc, the CUDA run-time compiler, was not found. Install it with "
                 "pip install 'pallas_mgpu[cu13]', or name a libnvrtc.so in %s",
                 pm_env_table[PM_ENV_NVRTC].variable);
}

pm_code pm_nvrtc_identity(char *out, size_t size, pm_err *err) {
  struct stat st;
  pthread_mutex_lock(&lock);
  if (!search(err)) {
    if (stat(found, &st)) memset(&st, 0, sizeof st);
    snprintf(out, size, "%s %lld %lld.%09ld", found, (long long)st.st_size,
             (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
  }
  pthread_mutex_unlock(&lock);
  return err->code;
}

/* ---- the library -------------------------------------------------------------------------- */

/* NVRTC opens its builtins by name, through its own RUNPATH, which a sanitizer's dlopen loses.
 * Opened here by path, they are found by name whatever the search. */
static void open_builtins(void) {
  char path[PATH_MAX + 64];
  const char *slash = strrchr(found, '/');
  if (!slash) return;
  snprintf(path, sizeof path, "%.*s/libnvrtc-builtins.so.%d.%d", (int)(slash - found), found,
           version_major, version_minor);
  dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static pm_code open_found(pm_err *err) {
  void *lib = dlopen(found, RTLD_NOW | RTLD_LOCAL);
  if (!lib) return pm_fail(err, PM_E_NVRTC, "libnvrtc cannot be opened: %s", dlerror());
#define PM_NVRTC_LATER(name, result, parameters) *(void **)&nvrtc.name = dlsym(lib, #name);
#define PM_NVRTC(name, result, parameters)           \
  *(void **)&nvrtc.name = dlsym(lib, #name);         \
  if (!nvrtc.name)                                   \
    return pm_fail(err, PM_E_NVRTC,                  \
                   "%s is too old: it has no " #name \
                   "; CUDA 12.0 or later is "        \
                   "needed",                         \
                   found);
#include "nvrtc.def"
#undef PM_NVRTC
#undef PM_NVRTC_LATER
  if (nvrtc.nvrtcVersion(&version_major, &version_minor))
    return pm_fail(err, PM_E_NVRTC, "%s does not tell its version", found);
  if (version_major < 12)
    return pm_fail(err, PM_E_NVRTC, "%s is of CUDA %d.%d; 12.0 or later is needed", found,
                   version_major, version_minor);
  open_builtins();
  return PM_OK;
}

static pm_code need(pm_err *err) {
  if (atomic_load_explicit(&ready, memory_order_acquire)) return PM_OK;
  pm_code code = PM_OK;
  pthread_mutex_lock(&lock);
  if (!atomic_load_explicit(&ready, memory_order_relaxed)) {
    code = search(err);
    if (!code) code = open_found(err);
    if (!code) atomic_store_explicit(&ready, true, memory_order_release);
  }
  pthread_mutex_unlock(&lock);
  return code;
}

pm_code pm_nvrtc_version(int *major, int *minor, const char **path, pm_err *err) {
  if (need(err)) return err->code;
  *major = version_major;
  *minor = version_minor;
  *path = found;
  return PM_OK;
}

/* ---- the time limit ----------------------------------------------------------------------- */

/* NVRTC asks a callback now and then whether to go on: 13.5 between the passes of its optimiser,
 * 12.9 and 13.0 only before and after all of them, CUDA 12.0 never, and none of them while ptxas
 * runs, which comes last. So the limit may pass long before it is seen. A thread says so then; what
 * is complete in the end is used. */
typedef struct pm_deadline {
  const char *entry;
  int64_t seconds; /* 0: none */
  time_t start;
  pthread_t watcher;
  pthread_mutex_t lock;
  pthread_cond_t ended;
  bool over, watched;
} pm_deadline;

static time_t seconds_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec;
}

static int is_over(void *payload, void *reserved) {
  const pm_deadline *d = payload;
  (void)reserved;
  return seconds_now() - d->start >= d->seconds;
}

/* Waits until the compilation has ended, or a second after it should have been cancelled. */
static void *watch(void *payload) {
  pm_deadline *d = payload;
  const struct timespec until = {.tv_sec = d->start + d->seconds + 1};
  int late = 0;
  pthread_mutex_lock(&d->lock);
  while (!d->over && !late) late = pthread_cond_timedwait(&d->ended, &d->lock, &until);
  if (!d->over)
    fprintf(stderr,
            "pallas_mgpu: NVRTC %d.%d still compiles kernel %s after %lld s, the limit (%s). In "
            "this phase it cannot be stopped; what it gives in the end is used. Arrays of more "
            "than 255 registers a lane are the usual reason\n",
            version_major, version_minor, d->entry, (long long)d->seconds,
            pm_env_table[PM_ENV_COMPILE_SECONDS].variable);
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

static void set_deadline(nvrtc_program p, const char *entry, pm_deadline *d) {
  pthread_condattr_t monotonic;
  *d = (pm_deadline){.entry = entry, .seconds = pm_env_number(PM_ENV_COMPILE_SECONDS)};
  d->start = seconds_now();
  if (!d->seconds) return;
  if (nvrtc.nvrtcSetFlowCallback) nvrtc.nvrtcSetFlowCallback(p, is_over, d);
  pthread_mutex_init(&d->lock, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&d->ended, &monotonic);
  pthread_condattr_destroy(&monotonic);
  d->watched = !pthread_create(&d->watcher, NULL, watch, d);
}

static void end_deadline(pm_deadline *d) {
  if (!d->seconds) return;
  pthread_mutex_lock(&d->lock);
  d->over = true;
  pthread_cond_signal(&d->ended);
  pthread_mutex_unlock(&d->lock);
  if (d->watched) pthread_join(d->watcher, NULL);
  pthread_cond_destroy(&d->ended);
  pthread_mutex_destroy(&d->lock);
}

static pm_code cancelled(const pm_deadline *d, const char *entry, pm_err *err) {
  return pm_fail(
      err, PM_E_COMPILE,
      "kernel %s was not compiled: NVRTC %d.%d had taken %lld s when it looked at the clock, and "
      "the limit is %lld s. Arrays of more than 255 registers a lane are the usual reason: work on "
      "smaller parts in a loop (plgpu.kernel with a grid, pl.loop, emit_pipeline). %s sets another "
      "limit, 0 none",
      entry, version_major, version_minor, (long long)(seconds_now() - d->start),
      (long long)d->seconds, pm_env_table[PM_ENV_COMPILE_SECONDS].variable);
}

/* ---- one compilation ---------------------------------------------------------------------- */

/* Size and text of one product of NVRTC: cubin, PTX or log. */
typedef int (*size_of)(nvrtc_program, size_t *);
typedef int (*bytes_of)(nvrtc_program, char *);

static char *fetch(nvrtc_program p, size_of size, bytes_of bytes, size_t *n) {
  *n = 0;
  if (size(p, n)) return NULL;
  char *at = pm_malloc(*n + 1);
  if (!at || bytes(p, at)) {
    pm_free(at);
    return NULL;
  }
  at[*n] = 0;
  return at;
}

/* The place of the first error: "file(line): error". With #line it is the user's Python. */
static void place_of_error(const char *log, pm_err *err) {
  char file[sizeof err->file];
  const char *at = strstr(log, "): error");
  const char *open = at;
  while (open && open > log && *open != '(') open--;
  if (!open || *open != '(') return;
  const char *start = open;
  while (start > log && start[-1] != '\n') start--;
  snprintf(file, sizeof file, "%.*s", (int)(open - start), start);
  pm_err_at(err, file, (uint32_t)strtoul(open + 1, NULL, 10));
}

static pm_code refused(int result, const char *entry, const char *log, pm_err *err) {
  if (result != NVRTC_COMPILATION)
    return pm_fail(err, PM_E_COMPILE, "NVRTC %d.%d failed on kernel %s: %s\n%s", version_major,
                   version_minor, entry, nvrtc.nvrtcGetErrorString(result), log ? log : "");
  if (log) place_of_error(log, err);
  return pm_fail(err, PM_E_COMPILE, "NVRTC %d.%d refused the CUDA text of kernel %s:\n%s",
                 version_major, version_minor, entry, log ? log : "(it gave no reason)");
}

void pm_nvrtc_result_free(pm_nvrtc_result *r) {
  pm_free(r->log);
  pm_free(r->image);
  pm_free(r->ptx);
  *r = (pm_nvrtc_result){0};
}

pm_code pm_nvrtc_run(const char *text, const char *entry, const pm_options *o, bool want_cubin,
                     bool want_ptx, pm_nvrtc_result *out, pm_err *err) {
  nvrtc_program p = NULL;
  pm_deadline deadline;
  char name[256];
  size_t n;
  *out = (pm_nvrtc_result){0};
  if (need(err)) return err->code;
  snprintf(name, sizeof name, "%s.cu", entry);
  int r = nvrtc.nvrtcCreateProgram(&p, text, name, 0, NULL, NULL);
  if (r) return refused(r, entry, NULL, err);
  set_deadline(p, entry, &deadline);
  r = nvrtc.nvrtcCompileProgram(p, o->n, o->at);
  end_deadline(&deadline);
  out->log = fetch(p, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, &n);
  if (r == NVRTC_CANCELLED) {
    cancelled(&deadline, entry, err);
  } else if (r) {
    refused(r, entry, out->log, err);
  } else {
    if (want_cubin)
      out->image = fetch(p, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, &out->image_size);
    if (want_ptx) out->ptx = fetch(p, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, &out->ptx_size);
    if (!out->log || (want_cubin && !out->image) || (want_ptx && !out->ptx))
      pm_fail(err, PM_E_MEMORY, "the host is out of memory, or NVRTC gave no result");
  }
  nvrtc.nvrtcDestroyProgram(&p);
  if (err->code) pm_nvrtc_result_free(out);
  return err->code;
}
