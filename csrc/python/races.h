/* The race detector's findings as Python objects. */
#ifndef PMPY_RACES_H
#define PMPY_RACES_H

#include "../interp/interp.h"
#include "module.h"

/* With the GIL. Append a tuple, for a note of (text, file, line), to the list: 0, or -1 with an
 * exception. */
int pmpy_add_race(PyObject *list, const pm_race *r);
int pmpy_add_note(PyObject *list, const char *what, const char *file, uint32_t line);
/* The run has ended: warn, as the parameters say, and keep the list for get_races(). 0, or -1 with
 * an exception; one that is set stays. */
int pmpy_finish_races(PyObject *list, PyObject *params);

#endif
