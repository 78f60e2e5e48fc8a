/* What the files of python/ share. The only folder that includes Python.h and NumPy.
 *
 * Ownership is said above each function: "new" results belong to the caller, "borrowed" do not.
 * Errors: core code fills a pm_err; pmpy_raise turns it into the exception of errors.def with the
 * user's file and line in the text, and returns NULL. */
#ifndef PMPY_MODULE_H
#define PMPY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../interp/interp.h"
#include "../passes/passes.h"
#include "../runtime/runtime.h"

/* What the core calls in Python: X(ID, keyword of set_hooks). hooks.c */
#define PMPY_HOOKS(X)                                                               \
  X(EMULATE, emulate)               /* what runs a program on the CPU */            \
  X(EXPORT, export)                 /* Lowered.export */                            \
  X(HTML, html)                     /* _repr_html_ of kernels and lowered ones */   \
  X(INDEX_ARRAY, index_array)       /* x[idx] of an array that is no slice */       \
  X(INDEX_REF, index_ref)           /* ref.at[idx] with arrays in idx */            \
  X(MEMORY_SPACE, memory_space)     /* the enum plgpu.MemorySpace */                \
  X(OVERHANGING, overhanging)       /* ref.at[idx] that reaches outside */          \
  X(PICKLE, pickle)                 /* __reduce__ of kernels */                     \
  X(RACES, races)                   /* what a run with detect_races found */        \
  X(REF_TRANSFORMS, ref_transforms) /* ref.transforms, of tiling and swizzle */     \
  X(SIZE, size)                     /* the plgpu.dim with a number in this trace */ \
  X(SPILLS, spills)                 /* spills by line, from SASS */                 \
  X(TIDY, tidy)                     /* an error that leaves a kernel */             \
  X(TIMELINE, timeline)             /* what happened in a run with timeline */      \
  X(TORCH, torch)                   /* a call that torch must see, see torch.c */
typedef enum pmpy_hook_id {
#define X(id, name) PMPY_HOOK_##id,
  PMPY_HOOKS(X)
#undef X
      PMPY_HOOK_COUNT
} pmpy_hook_id;

/* A pm_err without the cost of clearing its texts. */
#define PMPY_ERR(name) \
  pm_err name;         \
  name.code = PM_OK;   \
  name.line = 0;       \
  name.file[0] = name.text[0] = 0

/* Process-wide objects, made once when the module is executed (sub-interpreters are refused). */
typedef struct pmpy_state {
  PyObject *exceptions[PM_CODE_COUNT]; /* by pm_code */
  PyObject *tracer_error[5];           /* enum pmpy_tracer_error */
  PyObject *dtypes[PM_DTYPE_COUNT];    /* numpy dtype objects (of ml_dtypes too), lazily */
  PyTypeObject *graph_type, *trace_type, *array_type, *ref_type, *op_type; /* graph.c trace.c ... */
  PyTypeObject *device_array_type, *kernel_type, *reshaped_type;           /* by their files */
  PyObject *hooks[PMPY_HOOK_COUNT];
  uint8_t trace_flags; /* of pallas_mgpu/_flags.py; a part of the key of plans */
} pmpy_state;
extern pmpy_state pmpy;

#define PMPY_IS_TRACED(o) (Py_TYPE(o) == pmpy.array_type || Py_TYPE(o) == pmpy.ref_type)

/* ConcretizationTypeError(TypeError) and its children, UnexpectedTracerError */
enum pmpy_tracer_error {
  PMPY_CONCRETIZATION,
  PMPY_BOOL_CONVERSION,
  PMPY_INTEGER_CONVERSION,
  PMPY_ARRAY_CONVERSION,
  PMPY_UNEXPECTED_TRACER
};

/* errors.c. Raise the exception of err; always NULL. Text: "<text>\n  at <file>:<line>: <source
 * line>". */
PyObject *pmpy_raise(const pm_err *err);
/* The place as a note of the exception that is set, which the user's own function raised. */
void pmpy_add_place(const pm_err *err);
/* The exception that is set leaves a kernel: in a notebook it is shown without our frames. */
void pmpy_tidy_error(void);
/* For methods _repr_html_. */
PyObject *pmpy_html(PyObject *self, PyObject *unused);

/* dtypes.c. New reference to the numpy dtype. */
PyObject *pmpy_dtype_object(pm_dtype t);
/* Any spelling (numpy dtype, string, jnp.float32-like object with .dtype, Python bool/int/float;
 * 64-bit becomes 32-bit). 0, or -1 with TypeError that lists what is accepted. */
int pmpy_dtype_from(PyObject *any, pm_dtype *out);
/* All names, for messages; returns the buffer, which has PMPY_DTYPE_NAMES bytes. */
enum { PMPY_DTYPE_NAMES = 32 * PM_DTYPE_COUNT };
const char *pmpy_dtype_names(char *buffer);

/* graph.c. A graph with its arena. Immutable once finished. */
typedef struct pmpy_graph {
  PyObject_HEAD pm_arena arena;
  pm_graph *g;
  PyObject *inlined; /* owned: a list of the functions that stand for INLINEs, or NULL */
} pmpy_graph;
/* new; the caller then owns what it builds in ->arena */
pmpy_graph *pmpy_graph_new(void);
/* Number of a function that is to stand for an INLINE (INTERPRET); 0: an exception. */
int64_t pmpy_graph_inlines(pmpy_graph *graph, PyObject *function);
/* For pm_interp_options.inlined, with the GIL: 0, or -1 with an exception. */
struct pm_inline_call;
int pmpy_call_inlined(const pmpy_graph *graph, struct pm_inline_call *call);

/* hooks.c. Borrowed; NULL with an exception before the package is imported. */
PyObject *pmpy_hook(pmpy_hook_id id);

/* Files that add types and functions to the module, in this order; 0 or -1. */
// clang-format off
#define PMPY_INITS(X) \
  X(errors) X(hooks) X(place) X(graph) X(promote) X(trace) X(ops) X(regions) X(array) X(moves) \
  X(ref) X(tmem) X(narrow) X(exchange) X(device_array) X(streams) X(plan) X(kernel) X(mesh) \
  X(reshaped) X(family) X(info) X(facts) X(encodings) X(xla_ffi) X(torch)
// clang-format on
#define X(file) int pmpy_init_##file(PyObject *module);
PMPY_INITS(X)
#undef X

/* errors.c. Which argument: 0, 1 ... positional; -1, -2 ...: out[0], out[1] ...; as "argument 2" or
 * "out[0]". */
const char *pmpy_which(int which, char text[32]);
/* info.c. Tell the runtime where the NVRTC wheel is; called before the first compilation of a
 * process. */
void pmpy_find_nvrtc(void);

/* Place of the innermost Python frame outside the package, as borrowed UTF-8 valid until the
 * frame's code dies (callers intern it at once). *file is NULL if there is none. place.c */
void pmpy_user_place(const char **file, uint32_t *line);

#endif
