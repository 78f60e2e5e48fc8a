/* The op graph: SSA with structured regions.
 *
 * Values, ops and blocks are 32-bit indices into arrays of one graph; 0 means "none" for each of
 * them. Everything is allocated in the graph's arena. A region is one block. Block 1 is the body of
 * the kernel; its arguments are the kernel's operands, then its outputs, all refs in GMEM. The last
 * op of every other block is YIELD. Effects keep program order; only pure ops may move or merge.
 *
 * A ref is a value. Views (INDEX, TRANSPOSE_REF, RESHAPE_REF, BITCAST_REF, CLUSTER_REF,
 * DEVICE_REF, MULTICAST_REF, SEMAPHORE_OF) are pure
 * ops on it in terms of logical dimensions. Physical addresses are determined only after inference,
 * by ir/view.h.
 *
 * Stages, in order: traced, checked (verify.c), laid out (passes/layouts.c), planned
 * (passes/smem.c, passes/copies.c), synchronised (passes/sync.c). Each leaves a graph that
 * pm_verify accepts. The interpreter and the CUDA generator both read the last one. */
#ifndef PM_IR_H
#define PM_IR_H

#include <assert.h>

#include "../base/base.h"
#include "../base/dtype.h"
#include "target.h"

#define PM_MAX_RANK 8
#define PM_DYNAMIC INT64_MIN        /* in STARTS: the next operand gives the start */
#define PM_DROPPED (-1)             /* in SIZES: an int index, the dimension goes */
#define PM_MAX_COUNTERS 32          /* numbers that NEXT_TILE may have */
#define PM_MAX_SEMAPHORES (1 << 20) /* of a launch, or of a block */

typedef uint32_t pm_val, pm_opid, pm_blk, pm_layid;

/* ---- tables ------------------------------------------------------------------------------- */

typedef enum pm_attr_id {
  PM_ATTR_NONE,
#define PM_ATTR(id, text, kind) PM_ATTR_##id,
#include "attrs.def"
#undef PM_ATTR
  PM_ATTR_COUNT
} pm_attr_id;

/* PM_AXIS_GRID, PM_REDUCE_ADD, PM_OOB_ZEROS, PM_ENGINE_TMA ...: each enum counts from 0 */
#define V(name, id, text) PM_##name##_##id,
#define PM_ENUM(name, values) enum { values PM_##name##_COUNT };
#include "enums.def"
#undef PM_ENUM
#undef V
typedef enum pm_enum {
#define V(name, id, text)
#define PM_ENUM(name, values) PM_ENUM_##name,
#include "enums.def"
#undef PM_ENUM
#undef V
  PM_ENUM_COUNT
} pm_enum;
const char *pm_enum_text(pm_enum f, int64_t value);

/* clang-format off */
enum { /* effects beyond the accesses of access.h; ops.def says what they mean */
  E_SYNC = 1, E_MEET = 2, E_FENCE = 4, E_RELEASE = 8, E_COUNT = 16, E_IO = 32, E_ALLOC = 64,
  E_CTRL = 128, E_ALL = 255
};

typedef enum pm_layout_rule {
  PM_LAY_NONE, PM_LAY_VIEW, PM_LAY_POINTWISE, PM_LAY_SPLAT, PM_LAY_FREE, PM_LAY_FIXED, PM_LAY_LOAD,
  PM_LAY_STORE, PM_LAY_MASKED,
  PM_LAY_REDUCE, PM_LAY_BROADCAST, PM_LAY_RESHAPE, PM_LAY_SLICE, PM_LAY_TRANSPOSE, PM_LAY_CONCAT,
  PM_LAY_GATHER, PM_LAY_SCATTER, PM_LAY_SCAN, PM_LAY_PACK, PM_LAY_ACC, PM_LAY_MMA,
  PM_LAY_TMEM, PM_LAY_ROWS, PM_LAY_CONTROL
} pm_layout_rule;
/* clang-format on */
typedef enum pm_participants {
  PM_BY_EACH,
  PM_BY_WARPGROUP,
  PM_BY_LANE,
  PM_BY_TELLS
} pm_participants;
typedef enum pm_known {
  PM_KNOWN_EACH,
  PM_KNOWN_ALL,
  PM_KNOWN_LANE,
  PM_KNOWN_NOBODY,
  PM_KNOWN_ENGINE
} pm_known;
typedef enum pm_completion {
  PM_COMPLETES_NOW,
  PM_COMPLETES_BARRIER,
  PM_COMPLETES_GROUP,
  PM_COMPLETES_LANES,
  PM_COMPLETES_COMMIT,
  PM_COMPLETES_TMEM
} pm_completion;

typedef enum pm_opcode {
  PM_OP_NONE,
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  PM_OP_##id,
#include "ops.def"
#undef PM_OP
  PM_OP_COUNT
} pm_opcode;

#define PM_MAX_ATTRS 8
#define PM_VARIABLE 255
typedef struct pm_op_info {
  const char *text, *in, *names;
  uint8_t out, regions; /* PM_VARIABLE: V */
  uint8_t n_attrs;
  uint8_t attrs[PM_MAX_ATTRS]; /* pm_attr_id */
  uint8_t layout, participants, known_to, completion, warp;
  uint16_t effects;
  uint32_t needs; /* PM_HAS_ of target.h */
} pm_op_info;
extern const pm_op_info pm_ops[PM_OP_COUNT];

typedef struct pm_operand {
  char letter, role;  /* '<' read, '>' written, '=' both, '!' by source text, 0: a value */
  bool async, remote; /* by the async proxy; in other blocks of the cluster */
  bool everywhere;    /* on all devices of the mesh */
  bool repeated, optional;
} pm_operand;
/* What is looked up by every pass for every op, read from the rows of ops.def when the library is
 * loaded. */
#define PM_MAX_OPERANDS 8
typedef struct pm_op_lookup {
  pm_operand operand[PM_MAX_OPERANDS];
  uint8_t n_operands;
  bool touches;               /* has accesses, see access.h */
  int8_t slot[PM_ATTR_COUNT]; /* of an attribute among those of the op; -1: the op lacks it */
} pm_op_lookup;
extern pm_op_lookup pm_op_lookups[PM_OP_COUNT];
/* Of operand k of an op that has so many. */
static inline const pm_operand *pm_operand_of(int code, uint32_t k) {
  const pm_op_lookup *op = &pm_op_lookups[code];
  return &op->operand[k < op->n_operands ? k : op->n_operands - 1u];
}
extern const char *const pm_attr_text[PM_ATTR_COUNT];
const char *pm_op_name(int code);           /* in messages */
int pm_op_find(const char *text, size_t n); /* 0: no such op */

/* ---- the graph ---------------------------------------------------------------------------- */

/* A semaphore in GMEM is one of the launch, in SMEM one of the block. */
typedef enum pm_kind { PM_NO_TYPE, PM_ARRAY, PM_REF, PM_BARRIER, PM_SEMAPHORE } pm_kind;
typedef enum pm_space {
#define PM_SPACE(id, text, member, addressed) PM_##id,
#include "spaces.def"
#undef PM_SPACE
  PM_SPACE_COUNT
} pm_space;
typedef struct pm_space_info {
  const char *text, *member;
  bool addressed;
} pm_space_info;
extern const pm_space_info pm_spaces[PM_SPACE_COUNT];

typedef struct pm_type {
  uint8_t kind, dtype, space, rank;
  int64_t dim[PM_MAX_RANK];
} pm_type;

typedef struct pm_value {
  pm_type type;
  pm_opid def; /* 0: an argument of `block` */
  pm_blk block;
  uint32_t index;  /* which result or argument */
  pm_layid layout; /* arrays of rank > 0, once laid out */
  uint32_t name;   /* interned text, 0: none; the user's variable */
} pm_value;

typedef struct pm_op {
  uint16_t code;
  uint16_t n_regions;
  uint32_t n_in, n_out;
  uint32_t in;      /* first of n_in words in graph.operands */
  pm_val out;       /* first result; results are consecutive */
  uint32_t regions; /* first of n_regions words in graph.region_blocks */
  uint32_t attr;    /* first of info.n_attrs words in graph.attrs */
  pm_blk parent;
  uint32_t file, line; /* the user's Python; file is interned text, 0: unknown */
} pm_op;

typedef struct pm_block {
  PM_VEC(pm_opid) ops;
  pm_val arg; /* first argument; arguments are consecutive */
  uint32_t n_args;
  pm_opid parent; /* 0: the kernel's body */
} pm_block;

/* See sizes.h. Sizes of a call are numbered from 1; 0: known now. */
typedef struct pm_size {
  int64_t how, a, b; /* PM_SIZE_; EXTENT: argument and dimension; NUMBER: a; else two sizes */
  int64_t least, most, multiple;
  uint32_t name; /* interned text, 0: none */
} pm_size;

typedef struct pm_graph {
  pm_arena *arena;
  const char *name;
  int64_t grid[PM_MAX_RANK], cluster[3]; /* in the user's order */
  int64_t mesh[PM_MAX_RANK];             /* devices along each axis */
  uint32_t n_grid, n_cluster, n_mesh,
      n_threads;                  /* n_threads: Pallas threads of a block, at least 1 */
  uint32_t n_operands, n_outputs; /* arguments of block 1 */
  uint32_t n_scratch;             /* the last outputs, which the caller does not get */
  uint32_t n_inout;               /* outputs that alias operands (recorded in alias[]) */
  int32_t *alias;                 /* per output: operand index or -1 */
  const int64_t *
      *strides;          /* per operand those of its array, in elements, NULL: row-major; or NULL */
  PM_VEC(pm_size) sizes; /* that are known when it is called; index 0 is none, empty: none */
  PM_VEC(uint32_t) extents; /* PM_MAX_RANK for each kernel argument: its extents that are sizes */
  uint32_t grid_sizes[PM_MAX_RANK]; /* axes of the grid that are sizes; grid has the most */
  bool approx_math, no_auto_barriers;
  int64_t reduction_scratch; /* most bytes that a REDUCE of one Pallas thread may take at a time */
  /* The profiler: words of SMEM for each trace, 0: off; a trace for each warp, else for each Pallas
   * thread; the output that gets them; after passes/smem.c, where the first one is in SMEM. */
  int64_t profile_words;
  bool profile_warps;
  uint32_t profile_output;
  int64_t profile_offset;
  uint8_t stage;           /* enum pm_stage */
  const pm_target *target; /* that it is lowered for; while it is traced the first one */
  int64_t smem_bytes;      /* after passes/smem.c: dynamic SMEM with all reserves */
  int64_t tmem_columns;    /* after passes/tmem.c: what a block allocates, 0: none */
  /* reductions and layout conversions, inside smem_bytes; an equal part for each Pallas thread */
  int64_t scratch_offset, scratch_bytes;
  PM_VEC(pm_value) values;
  PM_VEC(pm_op) ops;
  PM_VEC(pm_block) blocks;
  PM_VEC(uint32_t) operands;
  PM_VEC(uint32_t) region_blocks;
  PM_VEC(int64_t) attrs;
  PM_VEC(int64_t) lists;              /* an attribute list is [count, items...] at its index */
  PM_VEC(const char *) strings;       /* interned; index 0 is "" */
  PM_VEC(struct pm_layout *) layouts; /* interned; index 0 is none */
  PM_VEC(const char *) warnings;      /* passes report costly things here: "file:line: text" */
  PM_VEC(uint32_t) string_slots;      /* hash table over strings; pm_intern's own */
} pm_graph;

enum { PM_MAX_DEVICES = 1024 };       /* of a mesh */
enum { PM_REDUCTION_SCRATCH = 2048 }; /* unless the user says otherwise */
/* A trace of the profiler, int32: the low word of the global timer at the start, the SM, the words
 * of events (those dropped for lack of space count), the events, each a tag and the clock; what
 * profile_words leaves; then the clock at the start, the timer and the clock at the end, and the
 * number of blocks. A tag is the number of a name; at the end of a scope, bit 31 is set. Scope 0
 * is the kernel's own initialisation. */
enum { PM_PROFILE_HEAD = 3, PM_PROFILE_TAIL = 4 };
enum pm_stage { PM_TRACED, PM_LAID_OUT, PM_PLANNED, PM_SYNCED };

/* ---- building (graph.c, build.c). Failures of memory leave through pm_protect. --------------- */

pm_graph *pm_graph_new(pm_arena *a, const char *name);
uint32_t pm_intern(pm_graph *g, const char *s);

static inline pm_type pm_scalar_type(pm_dtype d) {
  return (pm_type){PM_ARRAY, (uint8_t)d, PM_REGS, 0, {0}};
}
/* A ref that loads and stores reach by addresses. */
static inline bool pm_is_memory(const pm_type *t) {
  return t->kind == PM_REF && pm_spaces[t->space].addressed;
}
bool pm_type_equal(const pm_type *a, const pm_type *b);
int64_t pm_type_size(const pm_type *t); /* elements */
const char *pm_type_text(pm_arena *a, const pm_type *t);
const char *pm_element_text(const pm_type *t); /* "int32", "barrier" */

/* Append an argument to a block that has no op yet (kernel operands and outputs: block 1). */
pm_val pm_add_arg(pm_graph *g, pm_blk block, const pm_type *type);
pm_blk pm_new_block(pm_graph *g);

/* A builder adds ops at the end of `block`; the place is stamped on each of them. */
typedef struct pm_builder {
  pm_graph *g;
  pm_blk block;
  uint32_t file, line;
} pm_builder;

/* One attribute of a new op. INT, BITS and ENUM use i; LIST uses list and n; STR an interned text
 * and LAYOUT a layout id in i. Attributes not given are 0 (OFFSET -1, empty list). */
typedef struct pm_attr_arg {
  pm_attr_id id;
  int64_t i;
  const int64_t *list;
  uint32_t n;
} pm_attr_arg;

/* Make an op, infer its types by its rule (`given` is the type for the rules given, convert,
 * bitcast, reshape, broadcast), check it, append it. Regions are added by pm_add_region before the
 * op is closed; ops with regions get results from pm_close. On failure nothing is added and err has
 * the builder's place. */
pm_code pm_emit(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in,
                const pm_type *given, const pm_attr_arg *attrs, uint32_t n_attrs, pm_opid *op,
                pm_err *err);

/* Control: pm_open appends the op with its operands and regions (blocks with arguments; FOR: i32
 * then the carries; WHILE: the carries in both; the others none). Fill each region with a builder
 * on pm_region(g, op, k), end it with pm_yield, then pm_close checks that the yields agree and
 * makes the results. pm_abandon removes an open op again (a body is traced anew). */
pm_code pm_open(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in, uint32_t n_regions,
                const pm_attr_arg *attrs, uint32_t n_attrs, pm_opid *op, pm_err *err);
pm_code pm_yield(pm_builder *b, const pm_val *vals, uint32_t n, pm_err *err);
pm_code pm_close(pm_builder *b, pm_opid op, pm_err *err);
void pm_abandon(pm_builder *b, pm_opid op);

/* Insert a ready-made op before position `at` of a block (passes). Types are taken as given. */
pm_opid pm_insert(pm_graph *g, pm_blk block, uint32_t at, pm_opcode code, const pm_val *in,
                  uint32_t n_in, const pm_type *out, uint32_t n_out, const pm_attr_arg *attrs,
                  uint32_t n_attrs, pm_opid place_of);
/* The same op once more, without regions and with one result, of other operands of the same types.
 */
pm_opid pm_insert_like(pm_graph *g, pm_blk block, uint32_t at, pm_opid like, const pm_val *in);

uint32_t pm_position(const pm_graph *g, pm_opid op); /* in its block */
/* In front of another op; the only result. pm_insert_number: an int32 scalar. */
pm_val pm_insert_value(pm_graph *g, pm_opid before, pm_opcode code, const pm_val *in, uint32_t n_in,
                       const pm_type *out, const pm_attr_arg *attrs, uint32_t n_attrs,
                       pm_opid place_of);
pm_val pm_insert_number(pm_graph *g, pm_opid before, int64_t number, pm_opid place_of);

/* ---- reading ------------------------------------------------------------------------------- */

static inline pm_op *pm_get(const pm_graph *g, pm_opid op) { return &g->ops.at[op]; }
static inline pm_value *pm_value_of(const pm_graph *g, pm_val v) { return &g->values.at[v]; }
static inline const pm_type *pm_typeof(const pm_graph *g, pm_val v) {
  return &g->values.at[v].type;
}
static inline uint32_t pm_profile_traces(const pm_graph *g) { /* of a block */
  return g->n_threads * (g->profile_warps ? 4 : 1);
}
static inline pm_val pm_in(const pm_graph *g, pm_opid op, uint32_t k) {
  return g->operands.at[g->ops.at[op].in + k];
}
static inline pm_blk pm_region(const pm_graph *g, pm_opid op, uint32_t k) {
  return g->region_blocks.at[g->ops.at[op].regions + k];
}
/* Ops of a block in front of its yield. */
static inline uint32_t pm_n_ops(const pm_graph *g, pm_blk b) {
  return g->blocks.at[b].ops.n - (g->blocks.at[b].parent != 0);
}
static inline pm_opid pm_terminator(const pm_graph *g, pm_blk b) {
  return g->blocks.at[b].ops.at[g->blocks.at[b].ops.n - 1];
}
static inline pm_layout_rule pm_rule_of(const pm_graph *g, pm_opid op) {
  return (pm_layout_rule)pm_ops[pm_get(g, op)->code].layout;
}
/* Are the elements of the result those of the first operand, in other places or repeated? */
static inline bool pm_only_moves(int code) {
  switch (pm_ops[code].layout) {
    case PM_LAY_FIXED:
    case PM_LAY_BROADCAST:
    case PM_LAY_RESHAPE:
    case PM_LAY_SLICE:
    case PM_LAY_TRANSPOSE: return true;
    default: return false;
  }
}
static inline uint32_t pm_n_sizes(const pm_graph *g) { return g->sizes.n ? g->sizes.n - 1 : 0; }
/* The size that is extent d of argument k, 0: it is known now. */
static inline uint32_t pm_extent_of(const pm_graph *g, uint32_t k, uint32_t d) {
  return k * PM_MAX_RANK + d < g->extents.n ? g->extents.at[k * PM_MAX_RANK + d] : 0;
}
static inline bool pm_is_loop(int code) { return code == PM_OP_FOR || code == PM_OP_WHILE; }
static inline bool pm_is_branch(int code) { return code == PM_OP_IF || code == PM_OP_SWITCH; }
/* Does it allocate memory in that space? Barriers and semaphores are none. */
static inline bool pm_allocates(const pm_graph *g, pm_opid op, pm_space space) {
  const pm_op *o = pm_get(g, op);
  const pm_type *t = pm_typeof(g, o->out);
  return pm_ops[o->code].effects & E_ALLOC && t->kind == PM_REF && t->space == space;
}
/* Does each warp of the thread run the region by itself? */
static inline bool pm_maps_warps(int code) {
  return pm_ops[code].regions && pm_ops[code].participants == PM_BY_WARPGROUP;
}
/* Does the body of the loop get an index in front of the carries? */
static inline bool pm_has_index(const pm_op *o) { return o->code == PM_OP_FOR; }
/* The region of a WHILE that yields whether to go on, rather than the next carries. */
static inline bool pm_is_condition(const pm_op *o, uint32_t r) {
  return o->code == PM_OP_WHILE && !r;
}
/* Does an op of this code make a view of its first operand? */
static inline bool pm_makes_view(int code) { return pm_ops[code].layout == PM_LAY_VIEW; }
/* Operands of a MASKED_LOAD, MASKED_STORE or ATOMIC in front of its array indices.
 *
 * With such indices DIMS has a number for each dimension of the ref: the dimension of the access
 * that it goes along, or -1 - k: the k-th index, an int32 array in the shape of the access, says
 * where each element is. Empty: no indices, the access is the ref. */
static inline uint32_t pm_n_beside(int64_t atomic) { return atomic == PM_ATOMIC_CAS ? 4 : 3; }
static inline bool pm_is_masked(int code) { return pm_ops[code].layout == PM_LAY_MASKED; }
/* Elements of a dimension from the first to the last of a slice, both included. `strides`: the list
 * of an INDEX, n of them. */
static inline int64_t pm_slice_extent(int64_t size, const int64_t *strides, uint32_t n,
                                      uint32_t k) {
  return size == PM_DROPPED ? 1 : (size - 1) * (n ? strides[k] : 1) + 1;
}
/* the slot of an attribute of an op; the op must have it (asserted) */
static inline bool pm_has_attr(const pm_graph *g, pm_opid op, pm_attr_id id) {
  return pm_op_lookups[g->ops.at[op].code].slot[id] >= 0;
}
static inline int64_t *pm_attr(const pm_graph *g, pm_opid op, pm_attr_id id) {
  const pm_op *o = &g->ops.at[op];
  assert(pm_has_attr(g, op, id));
  return &g->attrs.at[o->attr + (uint32_t)pm_op_lookups[o->code].slot[id]];
}
/* What an ATOMIC does; 0 of all other ops. */
int64_t pm_atomic_of(const pm_graph *g, pm_opid op);
/* A LOAD whose layout the user has left open. */
bool pm_is_free_load(const pm_graph *g, pm_opid op);
const int64_t *pm_attr_list(const pm_graph *g, pm_opid op, pm_attr_id id, uint32_t *n);
void pm_set_list(pm_graph *g, pm_opid op, pm_attr_id id, const int64_t *list, uint32_t n);

/* What a copy with reduction_op does to elements of dtype d: a PM_ATOMIC on elements of *as, which
 * are as wide. -1 for INC and DEC, which are on uint32. */
int pm_combine_atomic(int64_t combine, pm_dtype d, pm_dtype *as);

/* Arrivals that complete a phase of an ALLOC_BARRIER: those it was allocated with, from each of the
 * blocks that signal it (those whose coordinates differ in at most one of its groups of axes). */
int64_t pm_barrier_arrivals(const pm_graph *g, pm_opid alloc);

/* If v is a CONST (through CONVERT and BROADCAST), its number. */
bool pm_constant(const pm_graph *g, pm_val v, pm_scalar *out);
/* The largest d such that v is provably a multiple of it (0: v is the constant 0), from constants,
 * MULTIPLE_OF, add, sub, mul, loop indices with a static lower bound times constants, select, min,
 * max. 1 when nothing is known. Scalars of an int dtype. */
int64_t pm_divisor(const pm_graph *g, pm_val v);
/* A power of two: aligned groups of as many neighbours along dim hold one value of the array. */
int64_t pm_grain(const pm_graph *g, pm_val v, int dim);
/* Devices of the mesh; 1: there is none. */
static inline int64_t pm_n_devices(const pm_graph *g) {
  int64_t n = 1;
  for (uint32_t k = 0; k < g->n_mesh; k++) n *= g->mesh[k];
  return n;
}
/* Clusters of the grid; at most INT64_MAX / 4. */
int64_t pm_grid_size(const pm_graph *g);
/* A launch may have fewer clusters than the grid: they hand out its points among themselves
 * (FETCH_TILE), and nothing in the body depends on which point a cluster began with. */
bool pm_shares_grid(const pm_graph *g);
/* Provable bounds of an int scalar (axis sizes, constants, loops); false: none known. */
bool pm_range(const pm_graph *g, pm_val v, int64_t *lo, int64_t *hi);
/* Is v at most a size of the call minus `count`, because it is a minimum of that (jnp.clip)? */
bool pm_ends_inside(const pm_graph *g, pm_val v, uint32_t size, int64_t count);
/* Bounds of all elements of an int array, at the least those of its dtype; false: of others. */
bool pm_element_range(const pm_graph *g, pm_val v, int64_t *lo, int64_t *hi);
/* The same of the bools that a comparison of int arrays gives: 0 to 0, 1 to 1 or 0 to 1; false: the
 * op is none. */
bool pm_compared_range(const pm_graph *g, pm_opid op, int64_t *lo, int64_t *hi);

/* The results of an INLINE: its own and those of the INLINE_RESULTs after it, up to the next
 * INLINE. Returns how many; out: NULL, or that many. */
uint32_t pm_inline_results(const pm_graph *g, pm_opid op, pm_val *out);

/* Is the op in a loop, at any depth? */
bool pm_in_loop(const pm_graph *g, pm_opid op);

/* Does any of the n values depend on any of `on`, by dataflow? Conservative through regions.
 * depends.c */
bool pm_depends(const pm_graph *g, const pm_val *vals, uint32_t n, const pm_val *on, uint32_t n_on);
/* Is there a loop around the op in which v is the same in every iteration, as far as one can see?
 * depends.c */
bool pm_repeats(const pm_graph *g, pm_val v, pm_opid op);

/* ---- whole-graph services ------------------------------------------------------------------ */

pm_code pm_verify(const pm_graph *g, pm_err *err);
void pm_print(const pm_graph *g, pm_text *out);
/* Per value its number there, 0 where the text does not define it; *n: how many there are. */
const uint32_t *pm_number_values(const pm_graph *g, pm_arena *a, uint32_t *n);
/* Parse the text form; `places` of ops come from their "file:line" comments, if any. */
pm_code pm_parse(pm_arena *a, const char *text, size_t n, pm_graph **out, pm_err *err);
/* Place of an op into err, if it has none yet. */
void pm_err_op(pm_err *err, const pm_graph *g, pm_opid op);
/* Call fn for every op of the block and of the regions below it, in program order. */
typedef void (*pm_visit)(pm_graph *g, pm_opid op, void *ctx);
void pm_walk(pm_graph *g, pm_blk block, pm_visit fn, void *ctx);

#endif
