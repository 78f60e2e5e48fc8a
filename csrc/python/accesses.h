/* What ops touch, as Python objects, for tests. */
#ifndef PMPY_ACCESSES_H
#define PMPY_ACCESSES_H

#include "../interp/interp.h"
#include "module.h"

/* New list, or NULL: (op, its name, argument or -1, where, reads, writes, proxy, scope, certainty,
 * completion, first byte, end) of each access, or of those of the whole kernel,
 * each once. Bytes are row-major, or as in memory. */
PyObject *pmpy_list_accesses(pm_graph *g, bool physical, bool summary);

/* What a run of the interpreter touched; `at` is owned, from pm_realloc. */
typedef struct pmpy_touches {
  pm_touch *at;
  uint32_t n, cap;
  bool no_memory;
} pmpy_touches;
void pmpy_note_touch(void *ctx, const pm_touch *t); /* without the GIL */
/* Append (op, argument or -1, reads, writes, engine, first byte, end) for each: 0,
 * or -1 with an exception. */
int pmpy_add_touches(PyObject *list, const pmpy_touches *s);

#endif
