/* What the files of a kernel's call share: kernel.c has the type, call.c reads arguments and finds
 * the plan, staging.c moves arrays to where the kernel runs and back, call_gpu.c and
 * call_interpreter.c run it. */
#ifndef PMPY_KERNEL_H
#define PMPY_KERNEL_H

#include "call.h"

typedef enum pmpy_container { PMPY_SINGLE, PMPY_TUPLE, PMPY_LIST } pmpy_container;

typedef struct pmpy_kernel {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *dict, *weakrefs;
  PyObject *name, *trace, *options;            /* owned; options holds the objects below */
  PyObject *interpret;                         /* borrowed: None, True or the parameters */
  PyObject *unflatten, *structured, *progress; /* borrowed, or NULL */
  pmpy_container container;
  pmpy_plans plans;
  uint8_t *open; /* owned: of each operand the dimensions that calls may differ in, a bit each */
  uint32_t n_open;
  bool has_warned; /* of operands that were converted */
  bool apart;      /* no output given may be an operand: a family says so */
} pmpy_kernel;

/* ---- kernel.c ------------------------------------------------------------------------------ */

/* Read the arguments of a call by position and out= and stream=, which are all that is given by
 * name: as pmpy_call_read. for_xla: unless these are given. *stream: borrowed, or NULL; NULL:
 * nobody wants it. */
int pmpy_call_begin(pmpy_call *c, PyObject *name, PyObject *const *args, Py_ssize_t n,
                    PyObject *kwnames, bool for_xla, PyObject **stream);

/* ---- call.c -------------------------------------------------------------------------------- */

/* New: the plan for operands that were read. */
pmpy_plan *pmpy_call_trace(const pmpy_call *c, bool keep_text);

/* ---- call_results.c ------------------------------------------------------------------------ */

/* The stream of a call that runs on a device, or whose arrays lie there; 0 or -1. */
int pmpy_call_find_stream(const pmpy_call *c, int device, void **stream);
/* Addresses of the outputs, which are fresh arrays unless given. On failure (-1) none is left. */
int pmpy_call_outputs(const pmpy_call *c, void *stream, PyObject **made, uint64_t *ptr);
/* New: what the call returns. Steals the outputs that were made. */
PyObject *pmpy_call_finish(const pmpy_call *c, PyObject **made);
/* Release the outputs that were made; NULL. */
PyObject *pmpy_call_drop(const pmpy_call *c, PyObject **made);

/* ---- call_gpu.c, call_interpreter.c, call_emulator.c ---------------------------------------- */

/* New: the results of a call whose plan was found. */
PyObject *pmpy_call_gpu(pmpy_call *c, int device);
PyObject *pmpy_call_interpreter(pmpy_call *c);
PyObject *pmpy_calls_emulator(pmpy_call *calls, uint32_t n);
/* Does the attribute equal the text? -1: exception. Absent counts as false. */
int pmpy_attribute_is(PyObject *o, const char *name, const char *text);
/* New: a list of the results of n calls of one plan, on the devices of its mesh. */
PyObject *pmpy_calls_interpreter(pmpy_call *calls, uint32_t n);

/* ---- staging.c ----------------------------------------------------------------------------- */

/* Every operand and output of one run, in order, and what must be done around it. */
typedef struct pmpy_run {
  const pmpy_call *c;
  bool on_gpu;
  int device;
  void *stream;
  pm_kernel *kernel;
  const pm_interp_options *options;
  PyObject *emulation; /* borrowed: of the plan, NULL: it is interpreted */
  uint32_t n;
  uint64_t given[PMPY_MAX_PARAMS]; /* where the caller has it */
  uint64_t ptr[PMPY_MAX_PARAMS];   /* where the kernel finds it */
  size_t bytes[PMPY_MAX_PARAMS];
  bool there[PMPY_MAX_PARAMS];    /* the caller has it on the GPU */
  bool staged[PMPY_MAX_PARAMS];   /* ptr is a copy of ours */
  uint8_t small[PMPY_MAX_PARAMS]; /* a dtype below 8 bits that the caller has unpacked; or 0 */
  bool replaced[PMPY_MAX_PARAMS]; /* an operand that is one of the outputs */
} pmpy_run;

/* Fill r's description of parameters; `out` are the addresses of the outputs. */
void pmpy_run_describe(pmpy_run *r, const uint64_t *out);
/* Move in, run, move out; the GIL is released. */
pm_code pmpy_run_execute(pmpy_run *r, pm_err *err);
/* The same for runs of one plan on the devices of its mesh, on the CPU. */
pm_code pmpy_runs_execute(pmpy_run *r, uint32_t n, pm_err *err);

#endif
