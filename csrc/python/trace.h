/* A trace in progress and its values: what the files that build a graph share.
 *
 * A traced value (Array or Ref) is an index into the graph of a Trace, with a copy of its type, so
 * that it can be asked for shape and dtype after the graph is gone. It belongs to the region that
 * was open when it was created (`serial`). It may be used while that region is open and its trace
 * is the thread's current one; everything else is UnexpectedTracerError.
 *
 * Functions that return int return 0, or -1 with an exception set; those that return a pm_val or
 * pm_opid return 0 on failure; PyObject pointers are new references unless stated otherwise. */
#ifndef PMPY_TRACE_H
#define PMPY_TRACE_H

#include "module.h"

enum { PMPY_PLACES = 16, PMPY_CALLS = 3, PMPY_LINES = 256 };

typedef struct pmpy_region {
  pm_blk block;
  uint32_t serial; /* never used twice in a trace */
} pmpy_region;

/* The file of a code object, looked up once: pm_intern'ed name, or 0 for a file of the package. */
typedef struct pmpy_place {
  PyObject *filename; /* owned */
  uint32_t file;
} pmpy_place;

/* A line of the user's, its file interned. */
typedef struct pmpy_line {
  uint32_t file, line;
} pmpy_line;

/* The line of an instruction of Python's. */
typedef struct pmpy_instruction {
  PyObject *code; /* owned */
  int at;
  uint32_t line;
} pmpy_instruction;

/* Ops from here on are made by functions of the user's that others of his call: the lines of the
 * calls, the innermost first. n 0: by a function that the package calls. */
typedef struct pmpy_calls {
  pm_opid from;
  uint32_t n;
  pmpy_line at[PMPY_CALLS];
} pmpy_calls;

typedef struct pmpy_trace {
  PyObject_HEAD pmpy_graph *graph; /* owned; NULL once finished or aborted */
  pm_graph *g;                     /* graph->g */
  pm_builder b;
  struct pmpy_trace *below; /* owned; the trace that was current before enter() */
  bool entered, exact_division;
  uint32_t serials, depth, capacity;
  pmpy_region *region; /* stack of open regions; [0] is the kernel's body */
  pmpy_place place[PMPY_PLACES];
  uint32_t n_places;
  uint32_t at_file, at_line;                 /* of what is added; file 0: the user's line */
  pmpy_instruction instructions[PMPY_LINES]; /* by code and place in it */
  pmpy_calls *calls;                         /* by rising ops */
  uint32_t n_calls, cap_calls;
  PyObject *frame;       /* owned; that of the last op */
  PM_VEC(int32_t) alias; /* per output, in the graph's arena */
} pmpy_trace;

/* Array and Ref */
typedef struct pmpy_traced {
  PyObject_HEAD pmpy_trace *trace; /* owned */
  pm_val val;
  uint32_t serial;
  uint32_t file, line; /* where it was made, for messages; file: of trace->place */
  bool weak;
  pm_type type;
} pmpy_traced;

#define PMPY_IS_ARRAY(o) (Py_TYPE(o) == pmpy.array_type)
#define PMPY_IS_REF(o) (Py_TYPE(o) == pmpy.ref_type)

/* ---- trace.c ------------------------------------------------------------------------------- */

/* The current trace (borrowed) with its builder at the user's line. Outside of a kernel NULL with
 * RuntimeError, or UnexpectedTracerError if x (may be NULL) is a traced value. Every entry point
 * calls it once. */
pmpy_trace *pmpy_begin(const char *what, PyObject *x);
/* May the value be used in trace t now? 0 or -1 with UnexpectedTracerError. */
int pmpy_check_open(const pmpy_trace *t, const pmpy_traced *x);

/* Add an op without regions; its first result (1 if it has none), or 0. */
pm_val pmpy_emit(pmpy_trace *t, pm_opcode code, const pm_val *in, uint32_t n_in,
                 const pm_type *given, const pm_attr_arg *attrs, uint32_t n_attrs);
/* Add an op with regions, which are to be filled; 0 on failure. */
pm_opid pmpy_open(pmpy_trace *t, pm_opcode code, const pm_val *in, uint32_t n_in,
                  uint32_t n_regions, const pm_attr_arg *attrs, uint32_t n_attrs);
/* What is added from here on goes to this block; 0 or -1. */
int pmpy_push_region(pmpy_trace *t, pm_blk block);
/* Object for a value made in the open region. */
PyObject *pmpy_traced_new(pmpy_trace *t, pm_val val, bool weak);
/* Name of a value in dumps and generated code. */
void pmpy_name(pmpy_trace *t, pm_val val, const char *name);

/* ---- place.c ------------------------------------------------------------------------------- */

/* The builder at the user's line, or at the one that was put in its place; file NULL: none. */
void pmpy_stamp(pmpy_trace *t);
void pmpy_put_place(pmpy_trace *t, PyObject *filename, uint32_t line);
/* 0 if memory ran out (no exception): the text is then simply missing. */
uint32_t pmpy_intern(pm_graph *g, const char *text);
/* Names of results, from the lines that made them. */
void pmpy_name_results(pmpy_trace *t);
/* Raise the exception of `code` with the user's place; always NULL. */
PyObject *pmpy_fail(pm_code code, const char *fmt, ...) PM_PRINTF(2, 3);
/* The same for the exceptions about tracers. */
PyObject *pmpy_tracer_fail(enum pmpy_tracer_error which, const char *fmt, ...) PM_PRINTF(2, 3);
/* "float32[128,64]", in a static buffer of the thread */
const char *pmpy_type_text(const pm_type *type);

/* ---- shapes.c ------------------------------------------------------------------------------ */

/* int, or a sequence of ints, of at most `max` entries; what names the argument. Count, or -1. */
int pmpy_ints(PyObject *o, const char *what, int64_t *out, uint32_t max);
/* Shape: as pmpy_ints, extents >= 1 checked, into type->rank and dim. */
int pmpy_shape(PyObject *o, const char *what, pm_type *type);
PyObject *pmpy_shape_tuple(const pm_type *type);
/* reshape's arguments: ints or one sequence, one of them may be -1 */
int pmpy_reshape_args(const pm_type *from, PyObject *const *args, Py_ssize_t n, pm_code mismatch,
                      pm_type *to);
/* Layout id of a layout spec for an array, or 0. */
pm_layid pmpy_layout(pmpy_trace *t, PyObject *spec, const pm_type *array);
/* The same for any graph; `at` (may be NULL) is where errors point. */
pm_layid pmpy_layout_in(pm_graph *g, const pm_builder *at, PyObject *spec, const pm_type *array);

/* ---- ops.c --------------------------------------------------------------------------------- */

/* Operands and attributes of an op that is made by its name. */
typedef struct pmpy_op_call {
  pm_opcode code;
  uint32_t n_in, n_attrs;
  pm_val *in;    /* owned */
  uint8_t *weak; /* owned; of operands */
  pm_attr_arg attrs[PM_MAX_ATTRS];
  int64_t list[PM_MAX_ATTRS][2 * PM_MAX_RANK];
} pmpy_op_call;
/* args: the name and the operands, and what else is `expected` in all; keywords are attributes.
 * 0 or -1; pmpy_op_call_end in either case. */
int pmpy_op_call_begin(pmpy_trace *t, pmpy_op_call *c, PyObject *const *args, Py_ssize_t n,
                       Py_ssize_t expected, PyObject *kwnames);
int pmpy_operands(pmpy_trace *t, pmpy_op_call *c, PyObject *seq);
void pmpy_op_call_end(pmpy_op_call *c);
/* Of an attribute that is an enum, by name; 0, or -1 with an exception. */
int pmpy_enum_value(pm_attr_id id, const char *text, int64_t *out);

/* ---- promote.c ----------------------------------------------------------------------------- */

/* An operand as the user gave it: a value of the graph, or a number not yet in it. */
typedef struct pmpy_arg {
  pm_val val; /* 0: a number */
  pm_type type;
  bool weak;
  pm_scalar number; /* double if type.dtype floats, else int64 */
} pmpy_arg;

/* 1: done, 0: no operand of an array op (no exception), -1: exception. Nothing is emitted. */
int pmpy_arg_from(pmpy_trace *t, PyObject *o, pmpy_arg *out);
/* New: a plgpu.dim, or what is computed from it, as an Array; NULL without an exception for all
 * else. */
PyObject *pmpy_size_value(PyObject *o);
/* The same, where anything else is a TypeError naming `op`. 0 or -1. */
int pmpy_arg_need(pmpy_trace *t, const char *op, PyObject *o, pmpy_arg *out);
/* The same where a dtype is asked for: a Python int need fit in that one only. */
int pmpy_arg_for(pmpy_trace *t, const char *op, PyObject *o, pm_dtype dtype, pmpy_arg *out);
/* -1: they have no common dtype */
int pmpy_promote(const pmpy_arg *args, uint32_t n, pm_dtype *dtype, bool *weak);
/* Into the graph with this dtype (by value). The val, or 0. */
pm_val pmpy_arg_as(pmpy_trace *t, pmpy_arg *x, pm_dtype dtype);
/* Shapes made equal (rank 0 stays, it meets anything); all have a val already. */
int pmpy_broadcast(pmpy_trace *t, const char *op, pmpy_arg *args, uint32_t n);
/* RESHAPE, or what it was before if that has the shape already: x[:, None] broadcasts as x itself.
 */
pm_val pmpy_reshape(pmpy_trace *t, pm_val x, const pm_type *to);
pm_val pmpy_number(pmpy_trace *t, const pm_type *type, pm_scalar number);

/* What the operators do, by number; the names of binary() and unary() lead here. */
typedef enum pmpy_binop {
  PMPY_SIMPLE,
  PMPY_COMPARE,
  PMPY_TRUE_DIVIDE,
  PMPY_EXACT, /* a quotient that is correctly rounded */
  PMPY_FLOAT, /* integers become float32 */
  PMPY_FLOOR_DIVIDE,
  PMPY_MOD,
  PMPY_POW
} pmpy_binop;
/* New Array; NotImplemented where an operand is foreign to us and `foreign_ok`. */
PyObject *pmpy_binary(pmpy_binop how, pm_opcode code, const char *name, PyObject *x, PyObject *y,
                      bool foreign_ok);
PyObject *pmpy_unary(pm_opcode code, PyObject *x);
PyObject *pmpy_convert(pmpy_trace *t, pmpy_arg *x, pm_dtype dtype, bool weak);
PyObject *pmpy_select(pmpy_trace *t, pmpy_arg *cond, pmpy_arg *x, pmpy_arg *y);

/* ---- ref.c --------------------------------------------------------------------------------- */

/* An index, one entry per dimension. start PM_DYNAMIC: the next of dyn; size PM_DROPPED: an int. */
typedef struct pmpy_index {
  uint32_t n_dyn;
  bool full; /* the whole value */
  uint8_t n_new;
  uint8_t new_at[PM_MAX_RANK]; /* None: before the n-th dimension of the operand */
  bool strided;
  int64_t start[PM_MAX_RANK], size[PM_MAX_RANK], stride[PM_MAX_RANK];
  pm_val dyn[PM_MAX_RANK];
} pmpy_index;

/* Allocations stand directly in the region of a scope. NULL with an exception elsewhere. */
pmpy_trace *pmpy_begin_alloc(const char *what);
/* The ref of an allocation (0: it failed), with the user's name for it (or NULL). */
PyObject *pmpy_allocated(pmpy_trace *t, pm_val v, const char *name);

/* The type of what is indexed after the index, with its new dimensions; -1: too many. */
int pmpy_indexed_type(const pmpy_index *index, const pm_type *from, pm_type *to);
int pmpy_parse_index(pmpy_trace *t, PyObject *idx, const pm_type *type, bool array,
                     pmpy_index *out);

#endif
