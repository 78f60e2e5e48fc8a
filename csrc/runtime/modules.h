/* Inside runtime/: modules, and when they are unloaded. */
#ifndef PM_MODULES_H
#define PM_MODULES_H

#include "counters.h"

#include <stdatomic.h>

enum { PM_ON_DEFAULT = 1, PM_ON_OWN = 2, PM_ELSEWHERE = 4 }; /* where a module was launched */

/* What is loaded for one cubin on one device; of one kernel at a time. */
typedef struct pm_module {
  const pm_device *device;
  cu_module module;
  cu_function function;
  pm_counters *counters; /* NULL: it has none */
  uint64_t hash[2];      /* of the cubin and its entry */
  _Atomic uint32_t used; /* the places above */
  /* of one that is retired */
  uint64_t due; /* the mark on the default stream that it waits for */
  struct pm_module *next;
} pm_module;

/* Load, or take again one that was retired. counters: words that it needs, 0: none. In the device's
 * context; on failure nothing is left, and err has no text yet if *result is not CU_OK. */
pm_code pm_module_new(const pm_device *d, const pm_cubin *c, const char *entry, uint32_t counters,
                      pm_module **out, cu_result *result, pm_err *err);
/* It will be unloaded when nothing can use it any more; calls no driver. */
void pm_module_retire(pm_module *m);

/* The next mark that a retired module needs, of devices that have one. */
extern _Atomic bool pm_mark_wanted;
void pm_modules_mark(const pm_device *d);

/* To be called before each launch, in the device's context. */
static inline void pm_module_used(pm_module *m, cu_stream s) {
  const bool standard = !s || s == CU_STREAM_LEGACY;
  const uint32_t place = standard                 ? PM_ON_DEFAULT
                         : s == m->device->stream ? PM_ON_OWN
                                                  : PM_ELSEWHERE;
  if (!(atomic_load_explicit(&m->used, memory_order_relaxed) & place))
    atomic_fetch_or(&m->used, place);
  if (standard && atomic_load_explicit(&pm_mark_wanted, memory_order_relaxed))
    pm_modules_mark(m->device);
}

#endif
