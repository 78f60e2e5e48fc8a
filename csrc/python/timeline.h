/* The interpreter's timeline, handed to pallas_mgpu/_timeline.py. */
#ifndef PMPY_TIMELINE_H
#define PMPY_TIMELINE_H

#include "../interp/interp.h"
#include "module.h"

/* With the GIL. Write the events to the file that the parameters name: 0, or -1 with an exception;
 * one that is set stays. */
int pmpy_write_timeline(PyObject *params, const pm_graph *g, const pm_timeline_event *events,
                        uint32_t n, bool truncated);

#endif
