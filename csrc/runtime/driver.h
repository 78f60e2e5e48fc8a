/* Inside runtime/: the driver's entry points, devices and contexts. */
#ifndef PM_DRIVER_H
#define PM_DRIVER_H

#include "cuda_api.h"
#include "runtime.h"

typedef struct pm_driver_table {
#define PM_CU(name, version, parameters) cu_result(*name) parameters;
#include "driver.def"
#undef PM_CU
} pm_driver_table;
extern pm_driver_table pm_cu; /* filled once pm_driver_need has succeeded */

typedef struct pm_device {
  pm_device_info info;
  cu_context context; /* the primary context, retained for good */
  cu_pool pool;       /* NULL: the device has none */
  cu_stream stream;   /* for host arrays */
} pm_device;

/* Load libcuda and initialise it, once. */
pm_code pm_driver_need(pm_err *err);
int pm_driver_version(void); /* 13000 for CUDA 13.0; 0: no driver */
/* The device, its context retained. */
pm_code pm_device_need(int ordinal, const pm_device **out, pm_err *err);

/* Make the device's context current, unless it is; *pushed tells pm_leave what to undo. */
pm_code pm_enter(const pm_device *d, bool *pushed, pm_err *err);
void pm_leave(bool pushed);

/* A pm_err for calls whose failure does not matter. */
#define PM_IGNORED(name) \
  pm_err name;           \
  name.code = PM_OK;     \
  name.line = 0

/* Name of the kernel launched last, kept for good; NULL: none. launch.c sets it. */
extern const char *_Atomic pm_last_kernel;

/* err from a driver result: "<what>: <text> (<name>)". Whatever the code given, out of memory is
 * PM_E_DEVICE_MEMORY, and errors that outlive the call are PM_E_LAUNCH, name the kernel launched
 * last and say that the context is lost. */
pm_code pm_cu_fail(pm_err *err, pm_code code, cu_result result, const char *fmt, ...)
    PM_PRINTF(4, 5);

#endif
