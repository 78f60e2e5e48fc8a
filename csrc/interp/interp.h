/* The CPU interpreter: graph -> bytecode -> virtual machine with asynchronous engines. */
#ifndef PM_INTERP_H
#define PM_INTERP_H

#include "../ir/ir.h"
#include "../ir/view.h"

enum { PM_LOG_BARRIER = 1, PM_LOG_SEMAPHORE = 2, PM_LOG_SMEM = 4 };

/* An INLINE that runs: memory of each operand, then of each result, row-major. Of a ref it is a
 * copy, which goes back if `written`; of a barrier it is NULL, and the function says how many
 * arrivals there are. */
typedef struct pm_inline_call {
  int64_t function; /* INTERPRET */
  uint32_t n_in, n_out;
  struct pm_inline_value {
    void *at;
    int64_t bytes;
    bool written;
    int32_t arrivals; /* of a ref, -1: it was written in place, nothing goes back */
    /* of a ref: its first element, the memory that it lies in (of SMEM all of the block's) */
    void *first, *low;
    int64_t extent;
  } * value;
  uint32_t thread, warp;      /* warp: in a WARP_MAP, else 4 */
  uint32_t block[3], grid[3]; /* as the hardware counts them: x, y, z */
} pm_inline_call;

/* One of two accesses that are not ordered. */
typedef struct pm_race_side {
  const char *touch, *ref; /* "read", "write", "atomic"; name of the ref */
  char index[256];         /* of the ref: "[0:64, 3]" */
  char agent[512];         /* "TMA, for grid point (0, 1), block (1,), thread 2" */
  const char *file;        /* NULL: unknown */
  uint32_t line;
} pm_race_side;

typedef struct pm_race {
  const char *space;
  pm_race_side first, second;
  int64_t from, to; /* bytes of the second ref where they meet, and its elements */
  char index[256];
  char hint[512], text[4096];
} pm_race;

/* Who does something in the timeline. */
typedef struct pm_timeline_agent {
  int64_t cluster; /* number among those of the launch */
  uint32_t block, thread;
  int warp; /* -1: the whole thread */
} pm_timeline_agent;

typedef enum pm_timeline_kind {
  PM_TIME_WORK,
  PM_TIME_WAIT,
  PM_TIME_COPY_IN,
  PM_TIME_COPY_OUT,
  PM_TIME_PRODUCT,
  PM_TIME_SCOPE, /* a named scope begins, or with index 1 it ends */
  PM_TIME_KINDS
} pm_timeline_kind;

/* From when to when, in cycles of the model (timeline.c). Work and waits of one agent do not
 * overlap, what is asynchronous may. */
typedef struct pm_timeline_event {
  pm_timeline_kind kind;
  pm_timeline_agent agent;
  int64_t begin, end;
  const char *what; /* the op; of a wait the barrier or the like, of an engine's work the ref */
  int64_t index;    /* of the barrier, row-major; -1: there is one */
  const char *file; /* NULL: unknown */
  uint32_t line;
  pm_timeline_agent for_agent; /* of a wait: who came last, and where */
  const char *for_file;
  uint32_t for_line;
} pm_timeline_event;

enum { PM_TIMELINE_MHZ = 1700 }; /* of the model */

/* Bytes that an op touched, in the ref at the base of its view. */
typedef struct pm_touch {
  pm_opid op;
  int32_t param;   /* argument of the kernel; -1: SMEM */
  const void *use; /* which ref of the op */
  bool reads, writes, engine;
  int64_t from, to;
} pm_touch;

typedef struct pm_interp_options {
  uint64_t seed;      /* of the schedule */
  uint32_t seeds;     /* schedules: results of seed, seed + 1 ... must be the same; 0 is as 1 */
  bool oob_raise;     /* else out-of-bounds reads give the fill */
  bool zero_fill;     /* uninitialised memory reads as zeros; else NaN, integer maximum, true */
  bool skip_floats;   /* floats are not computed: every result reads as +inf */
  int log;            /* PM_LOG_ flags: which events are shown, a line for each */
  bool poison;        /* it is an error where what was never written has an effect */
  bool fresh_outputs; /* nobody has written the outputs that are no operands */
  bool races;         /* look for accesses that are not ordered */
  bool race_raises;   /* the first one ends the run (PM_E_RACE) */
  bool strict;        /* with races: also tell of what is right here, but refused by JAX */
  void (*race)(void *ctx, const pm_race *race);
  void (*note)(void *ctx, const char *text, const char *file, uint32_t line); /* file: or NULL */
  void *race_ctx;
  /* receives what happened, in one call when the run ends; NULL: nobody keeps track of time */
  void (*timeline)(void *ctx, const pm_timeline_event *events, uint32_t n, bool truncated);
  void *timeline_ctx;
  /* while it looks for races: every run of bytes of SMEM and of arguments that something writes */
  void (*touched)(void *ctx, const pm_touch *touch);
  void *touched_ctx;
  /* receives each line of DEBUG_PRINT, without the newline; NULL: stdout */
  void (*print)(void *ctx, const char *line);
  /* the text of a number by a format of the user, "" for none, as Python writes it. A float is the
   * double with the shortest digits that give it in its own dtype. NULL: such digits alone */
  void (*number)(void *ctx, const char *spec, pm_dtype d, pm_scalar v, char *buf, size_t n);
  void *print_ctx;
  /* called every few milliseconds with done and total grid points; nonzero stops the run
   * (PM_E_RUNTIME) */
  int (*progress)(void *ctx, int64_t done, int64_t total);
  void *progress_ctx;
  /* runs an INLINE that has a function; nonzero: it failed, and whoever set this knows why */
  int (*inlined)(void *ctx, pm_inline_call *call);
  void *inlined_ctx;
} pm_interp_options;

void pm_interp_defaults(pm_interp_options *o);

/* What memory holds that was never written: NaN, integer maximum, true, or zeros. For fresh
 * outputs. */
void pm_interp_fill(pm_dtype d, bool zeros, void *p, int64_t n);

/* A compiled graph; reusable, one run at a time per object. Not in the graph's arena. */
typedef struct pm_machine pm_machine;
pm_code pm_interp_compile(const pm_graph *g, pm_machine **out, pm_err *err);
/* buffers: one row-major host pointer per operand and output; outputs are written (never cleared).
 */
pm_code pm_interp_run(pm_machine *m, void *const *buffers, const pm_interp_options *o, pm_err *err);
void pm_interp_free(pm_machine *m);
/* Memory that it keeps between runs. */
size_t pm_interp_bytes(const pm_machine *m);

#endif
