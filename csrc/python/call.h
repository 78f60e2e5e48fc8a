/* One call of a kernel in steps, for those who choose the kernel between reading the arguments and
 * running it (family.c). Always: pmpy_call_read, then others, then pmpy_call_end. */
#ifndef PMPY_CALL_H
#define PMPY_CALL_H

#include "plan.h"

#ifndef Py_BEGIN_CRITICAL_SECTION /* Python before 3.13 */
#define Py_BEGIN_CRITICAL_SECTION(o) {
#define Py_END_CRITICAL_SECTION() }
#endif

enum { PMPY_FEW = 16 };

typedef struct pmpy_call {
  struct kernel *k;
  PyObject *name;  /* of the kernel or family, for messages; borrowed */
  pmpy_plan *plan; /* owned */
  uint32_t n_in, n_out_given;
  PyObject *const *args, *const *out_args; /* borrowed */
  PyObject *out_arg, *out_tuple;           /* as given, borrowed; its items, owned, or NULL */
  pmpy_buffer *in, *out;                   /* out: of given outputs */
  pmpy_buffer few[PMPY_FEW], *many;
  /* where the arrays are */
  const pmpy_source *home;
  bool cuda;
  int device;
  bool has_array, mixed;
  bool in_place; /* an output given may be an operand */
} pmpy_call;

/* Read operands and out (NULL: none); both must live as long as c. 1: done, 0: operand number n_in
 * is nested or no array, -1: exception. specs: things with shape and dtype alone will do. */
int pmpy_call_read(pmpy_call *c, PyObject *name, PyObject *const *args, size_t n, PyObject *out,
                   bool specs);
void pmpy_call_end(pmpy_call *c);
/* Find out where the arrays lie and whose they are; 0 or -1. */
int pmpy_call_locate(pmpy_call *c);
/* ValueError where an output given shares memory with another one or with an operand; if in_place,
 * it may be the whole of one. overlap.c */
int pmpy_call_check_overlap(const pmpy_call *c);
/* New: what the kernel returns for operands that were read and located. */
PyObject *pmpy_call_run(pmpy_call *c, PyObject *kernel);
/* TypeError for operand number n_in, which is no array. */
PyObject *pmpy_call_refuse(const pmpy_call *c);

/* family.c: Family. */
int pmpy_init_family(PyObject *module);

#endif
