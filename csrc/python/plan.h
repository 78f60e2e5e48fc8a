/* One kernel for one signature: the lowered graph and everything made from it, each when first
 * needed. */
#ifndef PMPY_PLAN_H
#define PMPY_PLAN_H

#include "signatures.h"

#include <pthread.h>
#include <stdatomic.h>

enum { PMPY_MAX_PARAMS = 128, PMPY_MAX_DEVICES = 64 };

/* Also the Python type _core.Lowered. The lock is taken with the GIL released, never the other way
 * round; it guards what is not yet made and the machine while it runs. */
typedef struct pmpy_plan {
  PyObject_HEAD pmpy_graph *graph; /* owned */
  PyObject *traced;                /* text of the graph before lowering, or NULL */
  uint32_t n_in, n_out;
  uint32_t n_scratch;   /* outputs after those, which a call makes and drops */
  pmpy_spec *out;       /* with them */
  const int32_t *alias; /* per output: operand or -1 */
  pthread_mutex_t lock;
  bool has_lock, has_program, has_cubin;
  char dump_name[160]; /* "": no dump */
  pm_program program;
  pm_cubin cubin;
  pm_kernel *kernels[PMPY_MAX_DEVICES];
  pm_machine *machine;
  int64_t machine_sizes[PM_MAX_SIZES]; /* that it was made for */
  PyObject *emulation;                 /* runs the program on the CPU; owned, or NULL */
  pmpy_signature signature;            /* of the calls that it is for */
  _Atomic size_t bytes;                /* of memory, as far as it is known */
  /* plan_cache.c */
  _Atomic uint64_t used;
  struct pmpy_plans *owner; /* NULL: in no table */
  struct pmpy_plan *next, *previous;
} pmpy_plan;

/* New. `traced` is what the trace callback returned: a Graph, or a tuple that begins with one; it
 * is lowered for the strides of `in`, and warnings of the passes are raised. keep_text: for
 * as_text("traced"). It is lowered for `target`; unless `strict`, a target that lacks what
 * the kernel needs (NULL: none is wanted) gives way to the first in the table that has it. */
pmpy_plan *pmpy_plan_new(PyObject *traced, const pmpy_buffer *in, uint32_t n_in,
                         const pm_target *target, bool strict, bool keep_text);

/* The kernel on a device; NULL with an exception. No lock and no call where it is loaded already.
 */
pm_kernel *pmpy_plan_load(pmpy_plan *p, int device);
static inline pm_kernel *pmpy_plan_kernel(pmpy_plan *p, int device) {
  pm_kernel *k = NULL;
  if (device < PMPY_MAX_DEVICES) k = __atomic_load_n(&p->kernels[device], __ATOMIC_ACQUIRE);
  return k ? k : pmpy_plan_load(p, device);
}
/* Interpret on host memory; waits for another run of the same plan. GIL released by the caller. */
/* For pm_interp_options: the text of a number by Python's own format(). */
void pmpy_format_number(void *ctx, const char *spec, pm_dtype d, pm_scalar v, char *buf, size_t n);
pm_code pmpy_plan_interpret(pmpy_plan *p, void *const *buffers, const int64_t *sizes,
                            const pm_interp_options *o, pm_err *err);

/* ---- plan_cache.c -------------------------------------------------------------------------- */

/* The plans of one kernel, by their signatures; all zero at first. Must not move. */
typedef struct pmpy_plans {
  pmpy_table table;
#ifdef Py_GIL_DISABLED
  PyMutex lock;
#endif
} pmpy_plans;
/* New, or NULL without an exception. */
pmpy_plan *pmpy_plans_find(pmpy_plans *t, const pmpy_signature *s);
/* Takes a reference; may release plans of any kernel. Two threads may both add the same signature:
 * then the plan that is found first serves, and both are right. 0, or -1 with an exception. */
int pmpy_plans_add(pmpy_plans *t, pmpy_plan *p);
void pmpy_plans_clear(pmpy_plans *t);
/* Functions of Python. */
PyObject *pmpy_plans_clear_all(PyObject *module, PyObject *unused);
PyObject *pmpy_plans_size(PyObject *module, PyObject *unused);

#endif
