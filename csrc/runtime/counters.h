/* Inside runtime/: the words of PM_ARG_COUNTERS. */
#ifndef PM_COUNTERS_H
#define PM_COUNTERS_H

#include "driver.h"

/* Of one kernel on one device; shared by threads. All calls are made in the device's context. */
typedef struct pm_counters pm_counters;
pm_code pm_counters_new(const pm_device *d, uint32_t words, pm_counters **out, pm_err *err);
void pm_counters_free(pm_counters *c);
/* The words of a launch on the stream; zero, now or when what is in the stream is done. */
pm_code pm_counters_of(pm_counters *c, cu_stream stream, cu_ptr *out, pm_err *err);

#endif
