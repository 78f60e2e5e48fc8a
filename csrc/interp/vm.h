/* Inside the interpreter: bytecode, its memory, and the state of a run.
 *
 * Bytecode. One program for all Pallas threads: a flat array of instructions with jumps. A value of
 * the graph is a slot of the thread's frame: a byte offset. Scalars take 8 bytes, in their own
 * dtype. Arrays are row-major and share memory by liveness. Constants are written once, when a run
 * starts. Views produce no code: each use of a ref is an `access`, resolved at compile time except
 * for dynamic starts.
 *
 * Agents. A thread has a program counter and runs until an op that other agents can observe. A copy
 * or a wgmma becomes a `task` when it is issued, with all its addresses; its reads and writes
 * happen when the scheduler chooses it, or when a wait forces it. A store is two steps: SMEM is
 * read, then GMEM is written. The wgmmas of one thread run in order, everything else in any order.
 * A wgmma that has run stays with its thread until a wait covers it, so that using its result too
 * early is an error under every schedule.
 *
 * The order is a function of the seed alone. */
#ifndef PM_VM_H
#define PM_VM_H

#include "../ir/tmem.h"
#include "interp.h"

typedef struct thread thread;
typedef struct instr instr;
typedef struct task task;
typedef struct races races;
typedef struct block block;
struct poison;
typedef struct timeline timeline;

/* What is ordered before an agent or an operation: see clocks.c. */
typedef struct vclock {
  struct seen *at;
  uint32_t n, cap, floor; /* components below floor that are not listed are ordered */
} vclock;

/* What an instruction tells the loop that runs a thread. */
typedef enum step {
  STEP_NEXT,  /* go on at pc */
  STEP_PAUSE, /* a scheduling point; the thread may have blocked or ended */
  STEP_STUCK, /* nobody can continue */
  STEP_FAIL   /* the error is recorded */
} step;

typedef step (*exec_fn)(pm_machine *m, thread *t, const instr *i);
typedef exec_fn poison_fn; /* before it is executed: see poison.c */
/* n elements, contiguous; dst may be the same array as an operand */
typedef void (*kernel_fn)(void *dst, const void *x, const void *y, const void *z, size_t n);

enum { PROMISED_AND_CLIPPED = PM_OOB_COUNT }; /* instr.flags, copies: TMA reads zeros outside */
enum { SPLAT_X = 1, SPLAT_Y = 2, SPLAT_Z = 4, WIDEN = 8, NARROW = 16 }; /* instr.flags, pointwise */

struct instr {
  exec_fn exec;
  poison_fn poison; /* NULL: nothing to do */
  union {
    kernel_fn kernel;
    const struct access *mem;
    const struct scope *scope;
    const struct moves *moves;
    const struct printing *printing;
    const uint32_t *targets;
    const struct reduction *reduction;
    const struct rows *rows;
    const struct inlined *inlined;
    const struct tensor_op *tensor;
    int64_t depth; /* of an MMA: K */
  };
  const struct access *mem2, *mem3;
  uint32_t dst, a, b, c; /* slots; 0: none */
  uint32_t n;            /* elements, or an attribute */
  uint32_t to;           /* of jumps; of other ops a second attribute */
  pm_opid op;
  uint8_t dtype, out; /* of operands, of the result */
  uint8_t flags;
  uint8_t skip, skip_dtype; /* enum skip; of the floats in dst */
  bool leader;              /* of copies of a pair: the first block tracks those of both */
  bool lowered; /* ARRIVE: it is relaxed; COMMIT_SMEM: a pass placed it; copies: lanes do them */
  uint32_t skip_bytes;
};

/* What a run without floating-point work does with an instruction. */
typedef enum skip { SKIP_NOTHING, SKIP_RESULT, SKIP_ALL } skip;

/* ---- memory ------------------------------------------------------------------------------- */

enum { NAMED_BARRIERS = 16 }; /* of a block; one for the block and one for each thread are in use */
enum { WARPS = 4, MAX_STARTS = PM_MAX_TERMS, MAX_LOOPS = 2 * PM_MAX_RANK };

/* One step from a view to the ref it is a view of. */
typedef struct view_step view_step;
/* Index of a view -> index in the ref that it is cut from, which is `in`; false: outside */
typedef bool step_back(const view_step *v, const int32_t *starts, bool strict, const int64_t *index,
                       int64_t *in);
struct view_step {
  step_back *back;
  uint8_t in_rank, out_rank;
  int64_t in_dim[PM_MAX_RANK], out_dim[PM_MAX_RANK];
  int64_t start[PM_MAX_RANK]; /* INDEX; of a dynamic one its number among the access's starts */
  int64_t stride[PM_MAX_RANK];
  bool dynamic[PM_MAX_RANK], dropped[PM_MAX_RANK];
  uint8_t perm[PM_MAX_RANK]; /* TRANSPOSE_REF */
};

/* A start that may lie outside: 0 <= start <= limit must hold. */
typedef struct start_check {
  bool dynamic;
  int64_t start, limit; /* dynamic: the number of the start */
  uint16_t step, dim;
} start_check;

/* Array indices of a masked access. */
typedef struct indexing {
  uint8_t rank, n;
  int64_t size, dim[PM_MAX_RANK]; /* of the access */
  int8_t from[PM_MAX_RANK];       /* by dimension of the view: DIMS */
  uint32_t slot[PM_MAX_RANK];
} indexing;

typedef struct access {
  const char *name;
  const indexing *by;                /* NULL: none */
  uint8_t kind, space, dtype, bytes; /* kind: enum pm_kind; PM_ARRAY: a slot of the frame */
  uint8_t rank, base_rank, n_loops;
  bool contiguous;
  uint32_t
      base; /* GMEM: kernel argument; SMEM: byte in the block; REGS: slot; barriers: first one */
  const pm_tmem *tmem;   /* TMEM: its allocation */
  uint32_t apart;        /* SMEM that each thread has for itself: bytes from one's to the next's */
  uint32_t cluster_slot; /* of the coordinate on cluster_dim of the block meant, 0: its own */
  uint8_t cluster_dim;
  uint32_t device_slot; /* GMEM, semaphores: of the number of the device meant, 0: its own */
  bool all_devices;     /* of all of them, one after the other: see devices.c */
  int64_t n;            /* elements */
  int64_t offset;
  int64_t dim[PM_MAX_RANK], stride[PM_MAX_RANK];        /* of the view; stride -1: see loops */
  int64_t loop_size[MAX_LOOPS], loop_stride[MAX_LOOPS]; /* the same, merged where possible */
  int64_t base_dim[PM_MAX_RANK];
  uint32_t n_terms, n_starts, n_checks, n_steps;
  struct access_term {
    uint32_t slot;
    int64_t mul, div;
  } * terms;
  uint32_t *starts; /* slots of the dynamic starts */
  start_check *checks;
  view_step *steps; /* from the view to the base */
} access;

/* An access with its starts read. */
typedef struct located {
  const access *mem;
  char *base,
      *at;        /* at is valid if inside; of barriers, only offset is; base NULL: no such block */
  int64_t offset; /* elements */
  bool inside;
  int32_t starts[MAX_STARTS];
} located;

typedef struct scope {
  bool collective;
  uint32_t index;
  uint32_t n_smem, n_bars, n_accs;
  struct smem_alloc {
    const char *name;
    uint32_t at, apart;
    uint8_t dtype;
    pm_opid op;
    int64_t n;
  } * smem;
  uint32_t *bars; /* numbers of barrier_info */
  uint32_t *accs; /* slots of the accumulators */
  uint32_t n_tmem;
  struct tmem_alloc {
    const char *name;
    pm_opid op;
    pm_tmem tmem;
  } * tmem;
  uint32_t n_sems;
  struct semaphore_alloc {
    const char *name;
    uint32_t first, count; /* among those of the block */
  } * sems;
} scope;

typedef struct barrier_info {
  const char *name;
  uint32_t first, count, arrivals;
  bool shared;      /* other blocks reach it: it lives as long as the cluster */
  bool again;       /* its scope can be entered again, where the device keeps its phase */
  uint8_t n_groups; /* of a cluster barrier */
  uint8_t group[3]; /* per cluster axis, from 1; 0: not collective */
  bool leader;      /* only blocks with index 0 on its axis are signalled */
  bool tensor_core; /* it orders accesses of TMEM */
  uint8_t rank;
  int64_t dim[PM_MAX_RANK];
  pm_opid op;
} barrier_info;

typedef struct moves {
  uint32_t n;
  struct move {
    uint32_t dst, src, bytes;
  } at[];
} moves;

typedef struct printing {
  const char *format;
  bool label;
  uint32_t n;
  struct {
    uint32_t slot;
    uint8_t dtype, rank;
    int64_t n, dim[PM_MAX_RANK];
  } arg[];
} printing;

/* Groups of dims to reduce, one after the other: (outer, size, inner) of the array left by then. */
typedef struct reduction {
  kernel_fn kernel;
  uint32_t n;
  struct {
    int64_t outer, size, inner;
  } group[PM_MAX_RANK];
  int64_t n_out;
} reduction;

/* An INLINE: operands, then results. */
typedef struct inlined {
  int64_t function;
  uint32_t n_in, n_out;
  struct inlined_value {
    const access *mem; /* NULL: an array, in `slot` */
    uint32_t slot;
    int64_t bytes;
    bool written;
  } * value;
} inlined;

/* n rows of contiguous bytes go to `at`, at + step, at + 2 step ... */
typedef struct rows {
  int64_t n, bytes, step, at;
} rows;

/* ---- tensor memory ------------------------------------------------------------------------- */

enum { PM_VM_TMEM_OPERANDS = 5 };

struct pair_op {
  pm_opid op;
  const char *name;
};

/* A product, a copy to TMEM, or a commit. */
typedef struct tensor_op {
  const char *name;
  const access *tmem[PM_VM_TMEM_OPERANDS]; /* what is written, then what is read */
  uint32_t n_tmem;
  const access *a, *b; /* in SMEM; of a copy a is its source. NULL: none */
  const access *barrier;
  uint32_t accumulate;                        /* slot */
  uint8_t a_tmem, a_scale, b_scale, metadata; /* places in tmem, 0: none */
  uint8_t a_dtype, b_dtype;
  uint8_t packed;  /* elements of a and b that share a byte of SMEM */
  bool pair;       /* of blocks: the leader does it for both */
  uint32_t number; /* among the ops of pairs */
  int64_t m, n, k, block;
} tensor_op;

/* Does a product work on copies of its operands in float32? */
static inline bool pm_vm_is_widened(const tensor_op *x) {
  return x->a_scale || x->metadata || x->packed > 1;
}

/* Columns from, from + 1 ... of the TMEM of a block, and the elements in them. */
typedef struct tmem_place {
  block *block;
  const access *mem;
  int64_t rows, columns, from, width;
} tmem_place;

/* What a thread loaded or stored: ISSUED, or WAITED, and not yet told others. */
typedef enum use_stage { USE_ISSUED, USE_WAITED } use_stage;
typedef struct tmem_use {
  pm_opid op;
  tmem_place place;
  bool store;
  uint8_t stage;
} tmem_use;

/* What tasks of a queue touched that a commit has covered, and nobody has waited for that. */
typedef struct tmem_done {
  pm_opid op;
  const char *name;
  tmem_place place;
  bool pair, writes;
  uint32_t commit; /* its number in the queue */
} tmem_done;

/* ---- a run -------------------------------------------------------------------------------- */

/* A cluster that runs, or may. */
typedef struct cluster {
  block *blocks;
  uint32_t device;                    /* number in the mesh */
  int64_t point[PM_MAX_RANK], number; /* of the grid; among the clusters of the device's launch */
  bool refused;                       /* it was told that no grid point is left */
  uint32_t n_live, n_tasks;           /* agents that have not ended; pending tasks of theirs */
} cluster;

/* How often each warp of a thread waited for a barrier in one WARP_MAP, where they disagree. */
typedef struct uneven {
  pm_opid map; /* 0: they agree */
  int32_t waits[WARPS];
  bool partly; /* those that waited agree: right, but JAX wants all of them */
} uneven;

/* The arrival of a commit that nobody has waited for; of each thread and barrier the last one in an
 * even phase, and in an odd one. */
typedef struct commit_note {
  struct barrier *barrier;
  thread *by;
  pm_opid op;
  uint32_t number;
  int64_t phase;
} commit_note;

/* Values of barrier.seen below 0. MISSED: not since its scope was entered, and before that phases
 * completed that it never waited for. */
enum { NEVER = -1, MISSED = -2 };

typedef struct barrier {
  const barrier_info *info;
  block *block;
  int64_t phase;     /* completed phases */
  uint32_t arrivals; /* of the open phase */
  int32_t pending;   /* transfers it waits for; below 0: parts came before this block asked */
  pm_opid last_arrival, last_completion;
  int64_t copied; /* the last phase that transfers are a part of; 0: none */
  pm_opid last_copy;
  int64_t *seen;  /* per thread of the block, then per warp: phases it observed, or NEVER ... */
  uneven *uneven; /* per thread of the block */
} barrier;

/* A named barrier of a block. Its warps are bits, four for each thread. */
typedef struct named_barrier {
  uint32_t lanes, come; /* lanes: of the round that is open */
  pm_opid first;        /* who came first */
} named_barrier;

struct block {
  cluster *cluster;
  char *smem, *tmem; /* TMEM lane by lane */
  uint32_t *semaphores;
  uint32_t *n_pairs; /* per op of pairs: how often it was executed */
  barrier *bars;
  int64_t coord[3];
  uint32_t n_entering, n_done;
  const scope *entering;
  uint32_t turn; /* thread that has it */
  bool in_section;
  named_barrier named[NAMED_BARRIERS];
  uint32_t *n_left;  /* per scope: threads that left it */
  uint32_t *n_parts; /* per collective copy and thread: parts issued */
};

/* A collective copy that some blocks have issued their part of, and others not yet. */
typedef struct shared_copy {
  const instr *i;
  const cluster *cluster;
  uint32_t thread, ordinal; /* the how manyth of this instruction by this thread */
  uint32_t group, seen;     /* sets of blocks */
  bool off;                 /* its predicate is false */
  located gmem, smem;
  uint32_t barrier; /* in the block */
} shared_copy;

typedef enum thread_state {
  THREAD_READY,
  THREAD_AT_BARRIER,
  THREAD_AT_SCOPE,
  THREAD_AT_TURN,
  THREAD_AT_NAMED,
  THREAD_AT_SEMAPHORE,
  THREAD_AT_WARPS, /* its warps run a WARP_MAP, each as an agent of its own */
  THREAD_DONE
} thread_state;

struct thread {
  char *frame;
  uint8_t *poison; /* a byte beside each of the frame: see poison.c */
  uint32_t pc;
  uint32_t index;         /* in the block */
  thread *of;             /* of a warp: its thread, else NULL */
  uint32_t warp, n_warps; /* of a thread: warps that still run */
  uint32_t observer;      /* place in barrier.seen */
  uint32_t ready;         /* place in machine.ready */
  thread_state state;
  block *block;
  barrier *waits_for;
  const named_barrier *waits_named;
  const uint32_t *waits_at; /* a semaphore */
  uint64_t polled;          /* tests in vain since the epoch */
  uint64_t epoch;
  task *mma_first, *mma_last;                     /* not waited for, oldest first */
  task *mma_next;                                 /* the first of them that has not run */
  uint32_t n_mma;                                 /* all of them */
  task *stores;                                   /* of groups, pending, any order */
  task *tensor_first, *tensor_last, *tensor_next; /* not committed; the first that has not run */
  tmem_use *uses;
  tmem_done *finished;
  uint32_t n_uses, cap_uses, n_finished, cap_finished, n_commits;
  uint32_t peer_saw; /* of its commits, the last one that the other block of its pair waited for */
  int64_t groups;    /* closed groups: bulk groups, or of cp.async (no target has both) */
};

typedef enum task_kind {
  TASK_LOAD,
  TASK_FETCH,
  TASK_STORE,
  TASK_MMA,
  TASK_TENSOR,
  TASK_KINDS
} task_kind;

struct task {
  task_kind kind;
  step (*run)(pm_machine *m, task *k); /* NULL: what the kind says */
  uint32_t index;                      /* place in machine.tasks[kind] */
  thread *owner;
  const instr *i;
  task *next, *prev;  /* in the thread's list, or among the free ones */
  located gmem, smem; /* of a copy */
  int64_t from, to;   /* the elements that are moved, of a collective copy */
  barrier *barrier;
  int64_t group;
  bool read;                              /* of a group, and its source was read */
  tmem_place places[PM_VM_TMEM_OPERANDS]; /* as tensor_op.tmem */
  uint32_t n_places;
  bool accumulate;
  located acc, lhs, rhs; /* of a wgmma; lhs.mem NULL: in `buffer` */
  vclock issued; /* looking for races: what was ordered before it; who issued it, its number */
  const thread *issuer;
  uint32_t number;
  int64_t done; /* in the timeline: when it is complete */
  char *buffer;
  size_t buffer_bytes;
};

typedef struct place {
  const char *file; /* NULL: unknown */
  uint32_t line;
  uint32_t cost;    /* in the timeline, cycles */
  const char *what; /* the op */
} place;

/* An argument. */
typedef struct arg {
  const char *name;
  uint8_t dtype;
  size_t bytes, item; /* item: of an element */
  uint32_t rank;
  int64_t dim[PM_MAX_RANK];
  bool written; /* by some instruction */
  bool fresh;   /* an output that is no operand */
} arg;

/* A device of the mesh: its launch. */
typedef struct device {
  int64_t begun;                     /* points of the grid */
  int32_t counters[PM_MAX_COUNTERS]; /* of NEXT_TILE and FETCH_TILE */
} device;

struct pm_machine {
  pm_arena arena;
  const char *name;
  int64_t mesh[PM_MAX_RANK];
  uint32_t n_mesh, n_devices, n_buffers; /* n_buffers: arguments of all devices */
  bool meets_blocks; /* blocks may wait for others of the launch, or of other devices */
  int64_t grid[PM_MAX_RANK], cluster[3];
  uint32_t n_grid, n_cluster, n_threads, n_blocks; /* blocks of a cluster */
  uint32_t n_clusters, room; /* that run at once, on all devices; that may on each */
  uint32_t n_semaphores, n_block_semaphores; /* of the launch, of a block */
  uint32_t n_section;                        /* threads that enter ordered sections */
  uint32_t sms;                              /* of the GPU */
  int64_t profile_words;                     /* of a trace; 0: the profiler is off */
  bool profile_warps;
  uint32_t profile_param;
  bool shares_grid, has_warps, overlaps_kernels; /* the last: it has a PDL_WAIT */
  instr *code;
  place *places; /* per op */
  scope **scopes;
  barrier_info *bars;
  uint32_t n_scopes, n_bars, n_barriers; /* n_barriers: all elements of all bars */
  uint32_t n_shared_copies, n_args;
  uint32_t n_pairs; /* ops of pairs of blocks */
  struct pair_op *pair_ops;
  int64_t tmem_columns;
  arg *args;
  size_t frame_bytes, smem_bytes;
  char *image; /* first bytes of every frame: the constants */
  size_t image_bytes;
  size_t pack_bytes; /* scratch of the largest wgmma */

  /* of the run */
  bool allocated;
  thread *threads;
  cluster *clusters, *last; /* last: that of whom ran last */
  block *blocks;
  uint32_t *semaphores;
  uint64_t epoch, polls; /* polls: tests in vain in this epoch, in which nothing else happened */
  char *pack;
  thread **ready;
  uint32_t n_ready, n_live;
  struct {
    task **at;
    uint32_t n, cap, weight;
  } tasks[TASK_KINDS];
  task *free_tasks;
  commit_note *commits;
  uint32_t n_commits, cap_commits;
  struct {
    shared_copy *at;
    uint32_t n, cap;
  } open_copies;
  uint64_t random;
  int64_t points_done, points; /* points: clusters that each device launches */
  int64_t grid_size;
  uint32_t ticks;
  int64_t next_report; /* nanoseconds */
  device *devices;
  races *races;          /* NULL: nobody looks for them */
  struct poison *poison; /* NULL: what was never written is not tracked */
  timeline *timeline;    /* NULL: nobody keeps track of time */
  bool observed;         /* each instruction goes through pm_vm_observe */
  uint32_t steps;        /* instructions so far, where they are observed */
  void *const *buffers;
  pm_interp_options options;
  pm_err *err;
};

static inline void *slot_of(thread *t, uint32_t slot) { return t->frame + slot; }
static inline int32_t slot_i32(thread *t, uint32_t slot) { return *(int32_t *)(t->frame + slot); }

/* messages.c */
step pm_vm_fail(pm_machine *m, const thread *t, pm_opid op, pm_code code, const char *fmt, ...)
    PM_PRINTF(5, 6);
/* " at file:line" */
const char *pm_vm_place(const pm_machine *m, pm_opid op, char *buf, size_t n);
/* "grid point (0, 1), block (1,), thread 2" */
const char *pm_vm_agent(const pm_machine *m, const thread *t, char *buf, size_t n);
/* "(0, 1)", the coordinates of a block in its cluster; of a device in the mesh */
const char *pm_vm_block(const pm_machine *m, const block *b, char *buf, size_t n);
size_t pm_vm_put_device(const pm_machine *m, int64_t number, char *buf, size_t n);
/* "'full[1]' of block (1,) (allocated at file:line)", for thread t */
const char *pm_vm_barrier_text(const pm_machine *m, const thread *t, const barrier *b, char *buf,
                               size_t n);
/* "'tile' float16[64, 64]" */
const char *pm_vm_view_text(const access *a, char *buf, size_t n);
/* "[3, 4]" of the element at a byte */
const char *pm_vm_index_text(const arg *a, size_t at, char *buf, size_t n);
void pm_vm_line(pm_machine *m, const char *line); /* shown as DEBUG_PRINT's */
void pm_vm_log(pm_machine *m, const thread *t, pm_opid op, int kind, const char *fmt, ...)
    PM_PRINTF(5, 6);
#define LOG(m, t, op, kind, ...) \
  ((m)->options.log & (kind) ? pm_vm_log(m, t, op, kind, __VA_ARGS__) : (void)0)

/* agents.c */
static inline uint32_t pm_vm_blocks(const pm_machine *m) { return m->n_clusters * m->n_blocks; }
uint32_t pm_vm_observers(const pm_machine *m); /* agents of a block */
uint32_t pm_vm_agents(const pm_machine *m);    /* threads, then warps */
/* The WARPS warps of a thread. */
thread *pm_vm_warps(const pm_machine *m, const thread *t);
/* Do the blocks differ along these axes only (bit k: axis k)? */
bool pm_vm_same_but(const pm_machine *m, const block *a, const block *b, uint32_t axes);
uint32_t pm_vm_first_of(const pm_machine *m, const scope *s, const thread *t, uint32_t *n);
void pm_vm_make_ready(pm_machine *m, thread *t);
step pm_vm_block_on(pm_machine *m, thread *t, thread_state why);
/* Agents of the block in this state, that wait for this barrier if it is not NULL. */
void pm_vm_wake(pm_machine *m, block *b, thread_state why, const barrier *waits_for);
/* Threads that wait for this semaphore look at it again. */
void pm_vm_wake_at(pm_machine *m, const uint32_t *semaphore);
/* The thread found what it looks for to be false, and may look again and again. */
step pm_vm_poll(pm_machine *m, thread *t);
/* Something happened that another thread may look for. */
static inline void pm_vm_progress(pm_machine *m) {
  m->epoch++;
  m->polls = 0;
}

/* barriers.c */
/* `pending` transfers hold the phase open. */
step pm_vm_arrive(pm_machine *m, thread *t, pm_opid op, barrier *b, int32_t pending);
/* The same, when the thread is elsewhere: of a commit. */
step pm_vm_count_arrival(pm_machine *m, thread *t, pm_opid op, barrier *b, int32_t pending);
step pm_vm_transfer_done(pm_machine *m, thread *t, pm_opid op, barrier *b);
barrier *pm_vm_barrier(pm_machine *m, thread *t, const instr *i,
                       const access *mem); /* NULL: failed */

/* machine.c: what no op stands for */
step pm_vm_move(pm_machine *m, thread *t, const instr *i);
step pm_vm_jump(pm_machine *m, thread *t, const instr *i);
step pm_vm_next(pm_machine *m, thread *t, const instr *i);     /* a FOR's increment and jump back */
step pm_vm_leave(pm_machine *m, thread *t, const instr *i);    /* end of a scope */
step pm_vm_warp_end(pm_machine *m, thread *t, const instr *i); /* end of a WARP_MAP's region */
step pm_vm_end(pm_machine *m, thread *t, const instr *i);      /* end of the program */

/* observe.c */
skip pm_vm_skips(const pm_graph *g, pm_opid op);
/* Execute an instruction where each is looked at. */
step pm_vm_observe(pm_machine *m, thread *t, const instr *i);

/* memory.c */
void pm_vm_locate(pm_machine *m, thread *t, const access *mem, located *s);
step pm_vm_outside(pm_machine *m, thread *t, pm_opid op, const located *s, const char *what);
void pm_vm_gather(const located *s, void *dst);        /* inside */
void pm_vm_scatter(const located *s, const void *src); /* inside */
/* Elements from <= k < to of the view, at their places in an array of all of them. */
void pm_vm_gather_part(const located *s, int64_t from, int64_t to, void *dst);
void pm_vm_scatter_part(const located *s, int64_t from, int64_t to, const void *src);
/* The runs of bytes of a view that is inside, by rising addresses: its loops by their strides, the
 * smallest last, with those that continue each other joined. */
typedef struct runs {
  uint32_t n;
  int64_t size[MAX_LOOPS], step[MAX_LOOPS], count[MAX_LOOPS]; /* steps in bytes */
  const char *at;
  size_t bytes; /* of a run */
} runs;
void pm_vm_begin_runs(const located *s, runs *r);
bool pm_vm_next_run(runs *r); /* false: there is none */
/* Have two views that are inside a byte in common? */
bool pm_vm_overlap(const located *a, const located *b);
/* Element by element, for views that overhang; `strict`: the view's own bounds count as well as
 * those of its base. What is outside is left alone in dst, or not stored. */
void pm_vm_gather_inside(const located *s, bool strict, void *dst);
void pm_vm_clear_inside(const located *s, bool strict, void *dst); /* zeros for what is inside */
void pm_vm_scatter_inside(const located *s, const void *src);
bool pm_vm_within(const int64_t *index, const int64_t *dim, uint32_t rank);
/* Address of an element of the view, NULL: outside. */
char *pm_vm_element(const located *s, bool strict, const int64_t *view_index);
/* The device whose memory an access means; -1: there is no such one. */
int64_t pm_vm_device_of(const pm_machine *m, const thread *t, const access *mem);
/* The same place on device `to`, for an access of all devices. */
located pm_vm_on_device(const pm_machine *m, const located *s, uint32_t to);
/* " on device (1,)", of memory of another device, otherwise "" */
const char *pm_vm_whose(const pm_machine *m, const thread *t, const access *mem, char *buf,
                        size_t n);
/* The device whose argument begins at `base`. */
uint32_t pm_vm_owner(const pm_machine *m, const access *mem, const char *base);

/* tasks.c */
/* A pending task; NULL: out of memory, and the error is set. */
task *pm_vm_new_task(pm_machine *m, thread *t, const instr *i, task_kind kind);
void pm_vm_finish_task(pm_machine *m, task *k); /* it is not pending any more */
void pm_vm_free_task(pm_machine *m, task *k);
void pm_vm_end_task(pm_machine *m, task *k); /* both */
bool pm_vm_want_buffer(task *k, size_t bytes);
void pm_vm_free_tasks(pm_machine *m);
/* Whose copies these are: warp 0 issues those of its thread. */
thread *pm_vm_issuer(thread *t);
void pm_vm_close_group(pm_machine *m, thread *t);
/* A copy of the group that its thread has open. */
task *pm_vm_new_in_group(pm_machine *m, thread *t, const instr *i, task_kind kind);
task *pm_vm_new_store(pm_machine *m, thread *t, const instr *i);
void pm_vm_end_store(pm_machine *m, task *k);

/* async.c */
step pm_vm_run_task(pm_machine *m, task *k); /* one step of it */
/* For a thread that waits for `b`: which blocks owe it parts of a collective copy. */
size_t pm_vm_missing_parts(const pm_machine *m, const barrier *b, char *buf, size_t n);
/* The wgmma that was not waited for and may write to the accumulator in this slot, or NULL. */
const task *pm_vm_writer_in(const thread *t, uint32_t slot);
void pm_vm_drop_tasks(pm_machine *m); /* after a failure */

/* The race detector, only where m->races is set. clocks.c: */
bool pm_race_begin(pm_machine *m);
void pm_race_end(pm_machine *m);
void pm_race_begin_cluster(pm_machine *m, const cluster *c);
void pm_race_end_cluster(pm_machine *m, const cluster *c);
step pm_race_end_launch(pm_machine *m); /* of all devices */
const vclock *pm_race_clock(const pm_machine *m, const thread *t);
void pm_race_fence(pm_machine *m, const thread *t, bool by_author);
void pm_race_fork(pm_machine *m, const thread *t);
void pm_race_end_warp(pm_machine *m, const thread *w);
void pm_race_meet(pm_machine *m, const block *b);                   /* all threads of the block */
void pm_race_come(pm_machine *m, const thread *t, uint32_t number); /* to a named barrier */
void pm_race_leave(pm_machine *m, const thread *t, uint32_t number);
void pm_race_end_round(pm_machine *m, const block *b, uint32_t number);
void pm_race_leave_section(pm_machine *m, const thread *t);
void pm_race_enter_section(pm_machine *m, const thread *t);
void pm_race_await_loads(pm_machine *m, const thread *t);   /* from tensor memory */
void pm_race_await_kernels(pm_machine *m, const thread *t); /* those before this one */
void pm_race_tell_tensor(pm_machine *m, const thread *t);   /* its order of tensor memory */
void pm_race_arrive(pm_machine *m, const thread *t, const barrier *b, bool in_cluster);
void pm_race_phase(pm_machine *m, const barrier *b, bool copied); /* is complete */
uint32_t pm_race_open_phase(const pm_machine *m, const barrier *b);
void pm_race_wait(pm_machine *m, const thread *t, const barrier *b); /* has seen it */
void pm_race_issue(pm_machine *m, thread *t, task *k);
void pm_race_stores_done(pm_machine *m, const thread *t, const thread *owner, int64_t done,
                         bool read_only);
void pm_race_product_done(pm_machine *m, const thread *t, const task *k);
/* A commit tells a barrier that what was issued before it is complete. */
void pm_race_commit(pm_machine *m, const task *k, const barrier *b);
/* A thread, or for a task a tensor core, touches TMEM. */
step pm_race_tmem(pm_machine *m, const thread *t, const instr *i, const tmem_place *p, int touch);
step pm_race_tensor(pm_machine *m, const task *k, const tmem_place *p, int touch);
void pm_race_signal(pm_machine *m, const thread *t, const uint32_t *at, int32_t amount);
void pm_race_await(pm_machine *m, const thread *t, const uint32_t *at, uint32_t least, bool take);
void pm_race_read_semaphore(pm_machine *m, const thread *t, const uint32_t *at);
void pm_race_reset_semaphores(pm_machine *m, const block *b, uint32_t first, uint32_t n);
/* races.c: STEP_FAIL where a race ends the run */
void pm_race_check_stores(pm_machine *m, const thread *t); /* at its end: are they read? */
/* What is right here, and refused by JAX. Once for each op. */
void pm_race_note(pm_machine *m, pm_opid op, const char *fmt, ...) PM_PRINTF(3, 4);
step pm_race_plain(pm_machine *m, const thread *t, const instr *i, const located *s, int touch,
                   int maker);
step pm_race_engine(pm_machine *m, const task *k, const located *s, int touch);
step pm_race_rows(pm_machine *m, const task *k, const located *s, char *const *at, int64_t n,
                  int touch);
step pm_race_hand(pm_machine *m, const thread *t, const instr *i, const located *s,
                  const barrier *b);

/* timeline.c, only where m->timeline is set, beside the calls of the race detector: */
uint32_t pm_time_cost(const pm_graph *g, pm_opid op); /* cycles, when it is compiled */
bool pm_time_begin(pm_machine *m);
void pm_time_end(pm_machine *m);
void pm_time_begin_cluster(pm_machine *m, const cluster *c);
void pm_time_end_cluster(pm_machine *m, const cluster *c);
void pm_time_step(pm_machine *m, const thread *t, const instr *i);
void pm_time_arrive(pm_machine *m, const thread *t, pm_opid op, const barrier *b);
void pm_time_phase(pm_machine *m, const barrier *b); /* is complete */
void pm_time_wait(pm_machine *m, const thread *t, pm_opid op, const barrier *b);
void pm_time_issue(pm_machine *m, const thread *t, task *k);
void pm_time_landed(pm_machine *m, const task *k);
void pm_time_committed(pm_machine *m, const task *k, const barrier *b);
void pm_time_stores_done(pm_machine *m, const thread *t, pm_opid op, const thread *owner,
                         int64_t done, bool read_only);
void pm_time_product_done(pm_machine *m, const thread *t, pm_opid op, const task *k);
void pm_time_meet(pm_machine *m, const block *b);
void pm_time_come(pm_machine *m, const thread *t, pm_opid op, uint32_t number);
void pm_time_leave(pm_machine *m, const thread *t, uint32_t number);
void pm_time_leave_section(pm_machine *m, const thread *t, pm_opid op);
void pm_time_enter_section(pm_machine *m, const thread *t, pm_opid op);
void pm_time_signal(pm_machine *m, const thread *t, pm_opid op, const uint32_t *at);
void pm_time_await(pm_machine *m, const thread *t, const instr *i, const uint32_t *at);
void pm_time_scope(pm_machine *m, const thread *t, pm_opid op, bool ends);
void pm_time_fork(pm_machine *m, const thread *t);
void pm_time_join(pm_machine *m, const thread *t, pm_opid op);

/* inline.c: x is the last axis of the grid, y the one before, z all others. */
void pm_vm_hardware_index(const pm_machine *m, const block *b, uint32_t index[3], uint32_t grid[3]);

/* profile.c: the profiler, only where m->profile_words is set */
void pm_profile_begin_cluster(pm_machine *m, const cluster *c);
void pm_profile_end_cluster(pm_machine *m, const cluster *c);

/* machine.c: under one schedule */
pm_code pm_vm_run_once(pm_machine *m, void *const *buffers, const pm_interp_options *o,
                       pm_err *err);
/* poison.c, only where m->poison is set */
enum { PM_POISON_OUTSIDE = 254 }; /* of what lies out of bounds */
bool pm_poison_begin(pm_machine *m);
step pm_poison_check(pm_machine *m); /* at the end of a launch */
void pm_poison_end(pm_machine *m);
/* Those that handlers name. */
step pm_poison_rule_acc_store(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_addresses(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_and(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_branch(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_check(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_convert(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_counts(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_defined(pm_machine *m, thread *t, const instr *i), /* of the operands */
    pm_poison_rule_everywhere(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_for(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_gather(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_inline(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_load(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_mma(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_moves(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_nothing(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_or(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_pack(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_pointwise(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_reduce(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_scan(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_scatter(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_select(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_store(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_switch(pm_machine *m, thread *t, const instr *i),
    pm_poison_rule_unpack(pm_machine *m, thread *t, const instr *i);
void pm_poison_scope(pm_machine *m, const block *b, const struct smem_alloc *x, size_t at);
/* Of tensor memory: the bytes beside it; the number of an allocation; of a matrix in SMEM for each
 * index along a dimension, what its row or column comes from; the bytes beside a view, NULL: no
 * memory; those beside a slot. pm_poison_operand: an error if nothing of a matrix was written. */
char *pm_poison_tmem(const pm_machine *m, const block *b);
uint8_t pm_poison_number(pm_machine *m, const char *name, pm_opid op);
step pm_poison_operand(pm_machine *m, const thread *t, const instr *i, const located *s);
bool pm_poison_lines(pm_machine *m, const thread *t, const located *s, int dim, uint8_t *line);
const char *pm_poison_bytes(pm_machine *m, const thread *t, const located *s);
char *pm_poison_beside(const pm_machine *m, const thread *t, const located *s, const char *at);
char *pm_poison_frame(const thread *t, uint32_t slot);
void pm_poison_defined(pm_machine *m, const thread *t, const located *s);
void pm_poison_acc_load(pm_machine *m, thread *t, const instr *i, const located *s);
/* Of engines: `p` is the part of a task's buffer for the bytes beside its data. */
step pm_poison_copy_in(pm_machine *m, const task *k);
void pm_poison_read(pm_machine *m, const task *k, char *p);
step pm_poison_write(pm_machine *m, const task *k, const located *s, char *p, bool combine);
void pm_poison_take(const thread *t, uint32_t slot, char *p, size_t bytes);
step pm_poison_product(pm_machine *m, const task *k, const char *array);
/* Of masked accesses: an element of an operand is a byte of the frame. value, old 0: none */
step pm_poison_mask(pm_machine *m, thread *t, const instr *i, uint32_t slot, uint32_t element);
step pm_poison_index(pm_machine *m, thread *t, const instr *i, uint32_t slot, int64_t element);
void pm_poison_element(pm_machine *m, thread *t, const instr *i, const located *s, const char *at,
                       uint32_t value, uint32_t old);

/* masked.c: *at becomes what a PM_ATOMIC makes of it and of value; compare: of CAS, else NULL */
void pm_vm_combine(pm_dtype d, int64_t kind, char *at, const char *value, const char *compare);

/* semaphores.c */
step pm_vm_check_semaphores(pm_machine *m, thread *t, pm_opid op, const scope *s);
/* For a thread that waits at a semaphore: how far it is. */
size_t pm_vm_semaphore_text(pm_machine *m, thread *t, const instr *i, char *buf, size_t n);

/* moves.c */
step pm_vm_strided(pm_machine *m, thread *t, const instr *i); /* a walk over a slot */

/* tile_ops.c */
void pm_vm_widen(pm_dtype d, const void *src, float *dst, size_t n); /* f16, bf16 */
void pm_vm_narrow(pm_dtype d, const float *src, void *dst, size_t n);

/* tcgen05.c */
char *pm_vm_tmem_at(const pm_machine *m, const block *b, int64_t lane, int64_t column);
step pm_vm_run_tensor(pm_machine *m, thread *t); /* the next task of its queue */
void pm_vm_drop_tensor(pm_machine *m, thread *t);
/* A thread has seen a phase of a barrier: the commits in it as well. */
void pm_vm_see_commit(pm_machine *m, const barrier *b, int64_t phase);
/* The thread arrived at a barrier that orders tensor cores: what it waited for is known. */
void pm_vm_tmem_told(thread *t);
void pm_vm_init_tmem(pm_machine *m, block *b, const struct tmem_alloc *x);
step pm_vm_check_tmem(pm_machine *m, thread *t, pm_opid op, const struct tmem_alloc *x);
step pm_vm_check_pairs(pm_machine *m, const cluster *c);
/* May a copy overwrite its SMEM? */
step pm_vm_check_operands(pm_machine *m, const task *copy);

/* matmul.c */
/* A matrix of `major` rows (of a) or columns (of b) by K: its element (i, p) is at i * step + p *
 * k_step. */
typedef struct pm_vm_factor {
  const char *at;
  int64_t major, k, step, k_step;
  pm_dtype dtype;
} pm_vm_factor;
/* Rows of an accumulator, ldc elements apart. */
typedef struct pm_vm_target {
  char *at;
  int64_t m, n, ldc;
  pm_dtype dtype;
} pm_vm_target;
/* acc += a @ b; buffer: pm_vm_pack_bytes */
void pm_vm_product(char *buffer, const pm_vm_target *acc, pm_vm_factor a, pm_vm_factor b);
size_t pm_vm_pack_bytes(int64_t m, int64_t n, int64_t k);
void pm_vm_matmul(char *pack, const located *acc, const located *lhs, const void *lhs_array,
                  const located *rhs, pm_dtype a, pm_dtype b);

/* ---- compiling ------------------------------------------------------------------------------ */

typedef struct compiler compiler;

/* How an op becomes code, and the function and kernels of the one instruction that most are. */
typedef struct handler {
  void (*encode)(compiler *c, pm_opid op, const struct handler *h);
  exec_fn exec;
  struct {            /* {0}: its result is defined, if it has one */
    poison_fn poison; /* what it makes of memory that was never written: poison.c */
    /* Do other blocks of the cluster reach what it allocates, or what its operands are cut from?
     * NULL: never */
    bool (*reaches)(const pm_machine *m, const pm_graph *g, pm_opid op);
    step_back *back; /* of views; NULL: their indices are those of what they are cut from */
    kernel_fn kernels[PM_DTYPE_COUNT]; /* by dtype of the computation; f16 and bf16 use f32's */
  };
} handler;
/* handlers.c: all that code is made of. Encoders find it in their compiler, as the files that it
 * lists name encoders. */
typedef struct handlers {
  const handler *const *ops;        /* by opcode */
  const handler *const *reductions; /* those of two operands, by PM_REDUCE */
  exec_fn move, jump, next, leave, warp_end, end;
} handlers;
extern const handlers pm_vm_handlers;

bool pm_vm_reaches_always(const pm_machine *m, const pm_graph *g, pm_opid op);
bool pm_vm_reaches_cluster(const pm_machine *m, const pm_graph *g,
                           pm_opid op);                                      /* if there is one */
bool pm_vm_reaches_pair(const pm_machine *m, const pm_graph *g, pm_opid op); /* by attributes: */
bool pm_vm_reaches_axes(const pm_machine *m, const pm_graph *g, pm_opid op);
bool pm_vm_reaches_copy(const pm_machine *m, const pm_graph *g, pm_opid op);
void pm_vm_encode_pointwise(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_kernels(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_plain(compiler *c, pm_opid op,
                        const handler *h); /* a, b, c, dst; memory operands */
void pm_vm_encode_store(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_product(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_masked(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_masked_store(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_reduce_devices(compiler *c, pm_opid op, const handler *h); /* flags: the ATOMIC */
void pm_vm_encode_copy_out(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_copy_in(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_alias(compiler *c, pm_opid op, const handler *h); /* the result is the operand */
void pm_vm_encode_nothing(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_tensor(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_reduced(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_rows_out(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_inline(compiler *c, pm_opid op, const handler *h); /* fails */
void pm_vm_encode_const(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_iota(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_size(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_axis(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_multiple(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_strided(compiler *c, pm_opid op, const handler *h); /* BROADCAST, SLICE ... */
void pm_vm_encode_concat(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_indexed(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_scan(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_reduce(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_alloc(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_section(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_print(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_scope(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_warp_map(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_for(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_while(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_if(compiler *c, pm_opid op, const handler *h);
void pm_vm_encode_switch(compiler *c, pm_opid op, const handler *h);

void pm_vm_encode_named_scope(compiler *c, pm_opid op, const handler *h);

/* The handler of each op, beside its functions. */
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  extern const handler pm_vm_##id;
#include "../ir/ops.def"
#undef PM_OP

#endif
