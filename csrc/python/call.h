/* One call of a kernel in steps, for callers that choose the kernel between reading the arguments
 * and running it (family.c). Always: pmpy_call_read, then others, then pmpy_call_end. */
#ifndef PMPY_CALL_H
#define PMPY_CALL_H

#include "plan.h"

#ifndef Py_BEGIN_CRITICAL_SECTION /* Python before 3.13 */
#define Py_BEGIN_CRITICAL_SECTION(o) {
#define Py_END_CRITICAL_SECTION() }
#endif

enum { PMPY_FEW = 16, PMPY_MOST_SIZES = 3 };

/* Shapes that a kernel sees the arrays of a call with, and that its results get: reshaped.c */
typedef struct pmpy_views {
  uint32_t n_in, n_out;
  pmpy_spec *shape; /* of operands as the kernel gets them, then of results as the caller does */
  bool *given;      /* other than as they are */
  /* The last operands of the kernel are beginnings of the first one with one dim, of these extents.
   * So it can learn sizes that no other extent says. */
  uint32_t n_sizes;
  int64_t sizes[PMPY_MOST_SIZES];
} pmpy_views;

typedef struct pmpy_call {
  struct pmpy_kernel *k;
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
  /* where the kernel runs: a device, or -1: the interpreter; what it is lowered for there */
  int runs_on;
  const pm_target *target; /* NULL: whatever has what the kernel needs */
  bool emulated;           /* where it runs on the CPU: as the generated program */
  bool may_fall_back;      /* to the interpreter, where the device lacks something */
  bool converted;          /* an operand was, from 64 bits */
  bool in_place;           /* an output given may be an operand */
  bool recorded;           /* autograd records operations on an operand */
  bool for_xla;            /* set before reading: leave JAX's arrays on a GPU to XLA */
  bool has_stream;         /* stream= was given */
  void *stream;
  /* of the plan, once it is found: sizes of this call, and its outputs and GMEM scratch */
  int64_t sizes[PM_MAX_SIZES];
  const pmpy_spec *specs;
  pmpy_spec *own_specs;    /* owned, or NULL: those of the plan */
  const pmpy_views *views; /* borrowed, NULL: the kernel gets the arrays as they are */
  uint32_t n_args;         /* operands before those of the views */
} pmpy_call;

/* Read operands and out (NULL: none); both must live as long as c. 1: done, 0: operand number n_in
 * is nested or no array, -1: exception. specs: things with shape and dtype alone will do. */
int pmpy_call_read(pmpy_call *c, PyObject *name, PyObject *const *args, size_t n, PyObject *out,
                   bool specs);
void pmpy_call_end(pmpy_call *c);
/* A call that has nothing to end yet, as after pmpy_call_end. */
void pmpy_call_clear(pmpy_call *c);
/* Find out where the arrays lie and whose they are; 0 or -1. */
int pmpy_call_locate(pmpy_call *c);
/* ValueError where an output given shares memory with another one or with an operand; if in_place,
 * it may be the whole of one. overlap.c */
int pmpy_call_check_overlap(const pmpy_call *c);
int pmpy_calls_check_overlap(const pmpy_call *a, uint32_t of_a, const pmpy_call *b, uint32_t of_b);
/* The strides of a strided array become those of another shape, of as many elements, in the same
 * memory. False: there are none. */
bool pmpy_restride(pmpy_buffer *b, const pmpy_spec *to);
/* "float32 of shape (3, 4)" */
PyObject *pmpy_text_of_buffer(const pmpy_buffer *b);
/* The plan for operands that were read and located, and where it runs; 0 or -1. */
int pmpy_call_plan(pmpy_call *c, PyObject *kernel);
/* New: what the kernel returns for operands that were read and located. */
PyObject *pmpy_call_run(pmpy_call *c, PyObject *kernel);
/* What a call's keyword is. */
typedef enum pmpy_keyword { PMPY_KW_OTHER, PMPY_KW_OUT, PMPY_KW_STREAM } pmpy_keyword;
extern PyObject *pmpy_name_out, *pmpy_name_stream; /* interned, as names in calls are */
static inline pmpy_keyword pmpy_keyword_of(PyObject *name) {
  if (name == pmpy_name_out) return PMPY_KW_OUT;
  if (name == pmpy_name_stream) return PMPY_KW_STREAM;
  if (!PyUnicode_CompareWithASCIIString(name, "out")) return PMPY_KW_OUT;
  return PyUnicode_CompareWithASCIIString(name, "stream") ? PMPY_KW_OTHER : PMPY_KW_STREAM;
}
/* stream= of a call that was read; NULL and None: not given. 0 or -1. */
static inline int pmpy_call_stream(pmpy_call *c, PyObject *stream) {
  if (!stream || stream == Py_None) return 0;
  c->has_stream = true;
  return pmpy_stream_from(stream, "stream", &c->stream);
}

/* ---- reshaped.c ---------------------------------------------------------------------------- */

/* Borrowed: the kernel of a Reshaped, and its views. */
PyObject *pmpy_reshaped_parts(PyObject *reshaped, const pmpy_views **views);

/* ---- streams.c ----------------------------------------------------------------------------- */

/* Order `stream` and the streams that arrays are used on, before the launch or after it: those of
 * the libraries that are not the home, or with stream= those that have no stream of their own. */
int pmpy_order(const pmpy_call *c, void *stream, bool before);
/* What the home's current stream holds comes before `stream`. */
int pmpy_order_home(const pmpy_call *c, void *stream);
/* Keep what the stream's work may still use until it is done: arrays of producers that do not know
 * our stream; with stream= all, and the results. */
int pmpy_hold(pmpy_call *c, void *stream, PyObject *const *made, uint32_t n_made);
/* Release what the device has passed. */
void pmpy_sweep(void);

/* TypeError for operand number n_in, which is no array. */
PyObject *pmpy_call_refuse(const pmpy_call *c);

/* __reduce__ of kernels and families: by their place in a module. */
PyObject *pmpy_reduce(PyObject *self, PyObject *unused);

#endif
