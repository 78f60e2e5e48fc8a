/* Shared by the files of cuda/: the state of one generation and small services for all emitters.
 *
 * A value has a slot, which says how generated text names it. SCALAR: one C++ expression stands for
 * every element (rank 0, splats, constants, and arrays computed from such alone). ARRAY: a C++
 * array of the layout's registers. Refs and barriers in SMEM are SCALAR too: a u32 address. Values
 * that need no code (casts that change nothing, region arguments) share a slot. A C++ variable
 * changes only where a region yields, after the last use of its previous value. */
#ifndef PM_CUDA_GEN_H
#define PM_CUDA_GEN_H

#include "../ir/access.h"
#include "../ir/relayout.h"
#include "cuda.h"
#include "device.h"
#include "tcgen05.h"

/* WORDS: 16-bit elements, two in each u32 */
typedef enum pm_form { PM_FORM_NONE, PM_FORM_SCALAR, PM_FORM_ARRAY, PM_FORM_WORDS } pm_form;

typedef struct pm_slot {
  const char *text;
  uint8_t form;
} pm_slot;

/* What the next product finds in an accumulator: sums that it adds to; registers that nothing was
 * written to; registers that hold nothing either, but that it is to stay in (emit_wgmma.c). It
 * overwrites the last two. */
typedef enum pm_contents { PM_ADDED_TO, PM_FRESH, PM_HELD } pm_contents;

/* a u32 in front of the body */
typedef struct pm_head_var {
  const char *name, *text;
} pm_head_var;

typedef struct pm_gen pm_gen;
typedef pm_code (*pm_emitter)(pm_gen *e, pm_opid op);

struct pm_gen {
  const pm_emitter *emitters; /* per op code: pm_emitters */
  const pm_graph *g;
  const pm_target *target;
  const pm_cuda_options *options;
  pm_program *program;
  pm_err *err;
  pm_arena *arena;
  pm_text out; /* body of the entry */
  int indent;
  const char *file;      /* what the compiler believes of the next line: #line */
  uint32_t line, placed; /* as a compiler counts from #line on; of the last #line */
  uint32_t noted;        /* the user's line that the last comment named */
  pm_opid said;          /* its comment stands already: in front of the `if` of one lane */
  pm_slot *slot;         /* per value */
  uint32_t *uses;        /* per value: operands that are it */
  pm_opid *user;         /* per value: the last op of those */
  bool *barred;          /* per value: it goes through an OPT_BARRIER */
  bool *only_words;      /* per value: it has the form WORDS (packed16.c) */
  const char **into;     /* per value: the variable of an outer scope that it will end in */
  bool *named;           /* per value: it has had a name */
  pm_summaries *summaries;
  const uint32_t *number; /* per value: as the graph's text form has it */
  uint32_t next_name;     /* above those */
  pm_opid *next_copy;     /* per op: the copy after it in its run (expect.c) */
  bool *is_expected;      /* per op: the first copy of its run announced its bytes */
  bool *one_expect;       /* per value: a barrier that counts one arrival for each run */
  PM_VEC(struct pm_issued {
    const char *text;
    uint32_t stem;
    bool local; /* it names nothing outside the entry's body */
  })
  issued;           /* names (names.c) */
  const char *reg;  /* text of the register of which element-wise ops speak */
  const char *expr; /* what the emitter of an element-wise op leaves */
  PM_VEC(pm_tensor_map) maps;
  PM_VEC(const char *) map_names;
  const char **phase; /* per value: word of phase bits, of barrier allocations */
  int64_t registers;  /* that set_max_registers left to this branch; 0: unknown */
  bool reads_again;   /* a branch reads the numbers of its threads again (read_again) */
  bool warps;         /* inside a WARP_MAP: each warp for itself */
  bool warps_store;   /* there is a WARP_MAP with a store by an engine */
  bool lane;          /* inside a region that one elected lane runs (lane.c) */
  bool *lane_barrier; /* per value: barriers that may be waited for there */
  bool *made;         /* lane.c's own, as uses_inside */
  uint32_t *uses_inside;
  bool *sent;               /* per value: barriers that other blocks' stores complete */
  bool *released;           /* per value: cluster barriers with an arrival that releases memory */
  pm_contents *contents;    /* per value: of accumulators */
  const char **reduced;     /* per value: what its LOAD_TMEM found in its rows (emit_tcgen05.c) */
  bool *in_ptx;             /* per value: accumulators that C++ does not see (emit_wgmma.c) */
  pm_text registers_of_ptx; /* their declarations */
  PM_VEC(pm_head_var) head_vars;
  uint32_t n_counters;      /* words: of NEXT_TILE and FETCH_TILE, then semaphores of the launch */
  uint32_t first_semaphore; /* among them */
  bool asks;                /* there is a NEXT_TILE or such a semaphore */
  PM_VEC(pm_program_site) sites; /* of checks and of watched waits */
  bool checks, watches;          /* there are such */
  bool leaves, left;             /* a check leaves the kernel; from a region of one lane or warp */
  const char *lane_exit, *warp_exit; /* labels at the ends of those regions, NULL: unused */
  uint32_t arrivals;   /* byte in SMEM of the counters in place of named barriers, or 0 */
  pm_opid section;     /* an ENTER_SECTION */
  pm_opid masked;      /* the masked access that is printed */
  uint32_t n_section;  /* threads that enter ordered sections, 0: none do */
  uint32_t tmem_slot;  /* byte in SMEM of the address of tensor memory */
  bool tmem_used;      /* an allocation of tensor memory has been printed */
  const char *profile; /* the profiler's variable; NULL: it is off */
  struct ptx_function {
    const char *name, *text;
  } * ptx;
  uint32_t n_ptx, cap_ptx;
  pm_text inlines;                 /* functions of the user's */
  struct {                         /* while an ASYNC_STORE is printed */
    const char *barrier, *combine; /* in the other block, NULL: a usual store; its function */
    bool narrow;                   /* it would need stores of less than 32 bits */
  } async;
  bool *param_used;
  const char *size_name[PM_MAX_SIZES]; /* of sizes of the call that the program uses, else NULL */
  bool in_mesh;                        /* the parameter `peers` is used */
  PM_VEC(int32_t) peers;               /* arguments on other devices; -1: counters */
  const char *multimem; /* while a MULTIMEM_REDUCE is printed: what the switch does */
};

#define PM_TRY(x)            \
  do {                       \
    pm_code code_ = (x);     \
    if (code_) return code_; \
  } while (0)

/* One emitter per op. Those of element-wise ops (pm_is_elementwise) leave the text of element
 * e->reg in e->expr and may write lines that stand before the loop; the others write statements. */
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  pm_code pm_cuda_##id(pm_gen *e, pm_opid op);
#include "../ir/ops.def"
#undef PM_OP
extern const pm_emitter pm_emitters[PM_OP_COUNT]; /* emitters.c */
static inline pm_code pm_emit_op(pm_gen *e, pm_opid op) {
  return e->emitters[pm_get(e->g, op)->code](e, op);
}

/* ---- text (gen.c) ---------------------------------------------------------------------- */

void pm_line(pm_gen *e, const char *fmt, ...) PM_PRINTF(2, 3);
/* a line that opens a brace, one that closes it */
void pm_begin(pm_gen *e, const char *fmt, ...) PM_PRINTF(2, 3);
void pm_end(pm_gen *e);
/* `#pragma unroll` for a loop of n iterations over registers, if there is a loop: all of them, or a
 * few where there are very many. */
void pm_unroll(pm_gen *e, int64_t n);
/* `for` over registers, unrolled: the text of its variable. A single iteration has no loop and "0".
 */
const char *pm_begin_unrolled(pm_gen *e, const char *var, int64_t n, int64_t step);
void pm_end_unrolled(pm_gen *e, int64_t n, int64_t step);
/* comment with the op and its place; then #line, so that the next line is the user's */
void pm_note(pm_gen *e, pm_opid op, const char *what);
void pm_place(pm_gen *e, pm_opid op);
#define pm_str(e, ...) pm_printf((e)->arena, __VA_ARGS__)
pm_code pm_gen_fail(pm_gen *e, pm_opid op, pm_code code, const char *fmt, ...) PM_PRINTF(4, 5);

/* ---- values (gen.c) ---------------------------------------------------------------------- */

const char *pm_unique(pm_gen *e, const char *stem); /* a new C++ name, stem_number like no other */
const char *pm_identifier(pm_gen *e, const char *s);
const char *pm_name_of(pm_gen *e, pm_val v); /* unique, after the user's variable */
/* Names that need no number lose it (names.c): in the functions that hold PTX and the program's own
 * text. `catalogue`: the device functions that it calls. */
void pm_print_names(pm_gen *e, const pm_text *catalogue, pm_text *ptx, pm_text *own);
const char *pm_cpp_type(pm_dtype t);
const char *pm_literal(pm_gen *e, pm_dtype t, pm_scalar v);
/* text of register `reg` of a value; reg may be NULL where the slot is SCALAR */
const char *pm_at(pm_gen *e, pm_val v, const char *reg);
static inline const char *pm_scalar_of(pm_gen *e, pm_val v) { return pm_at(e, v, "0"); }
bool pm_is_array(const pm_gen *e, pm_val v);        /* slot form ARRAY */
bool pm_wants_array(const pm_gen *e, pm_val v);     /* by type and layout */
int64_t pm_regs_of(const pm_gen *e, pm_val v);      /* registers by layout; 1 for scalars */
const pm_layout *pm_layout_in(pm_gen *e, pm_val v); /* of an array or scalar */
void pm_bind(pm_gen *e, pm_val v, const char *text, pm_form form);
void pm_alias(pm_gen *e, pm_val v, pm_val of);
/* declare a variable for the value (array or scalar by its type and layout) */
const char *pm_declare(pm_gen *e, pm_val v, pm_val named_like);
void pm_assign(pm_gen *e, pm_val to, pm_val from); /* to must be declared */
void pm_declare_as(pm_gen *e, pm_val v, pm_val named_like, pm_val init);
const char *pm_convert_text(pm_gen *e, pm_dtype from, pm_dtype to, const char *x);

/* packed16.c */
void pm_find_words(pm_gen *e);
bool pm_is_packed(const pm_gen *e, pm_val v); /* loops and branches carry it as words */
const char *pm_new_words(pm_gen *e, pm_val v, const char *stem);
const char *pm_declare_words(pm_gen *e, pm_val v); /* binds v as WORDS */
const char *pm_copy_words(pm_gen *e, pm_val v);
void pm_copy(pm_gen *e, const char *to, const char *from, int64_t n);
int64_t pm_elements_of_word(const pm_gen *e, pm_val v);
void pm_pack(pm_gen *e, const char *words, pm_val like, pm_val v);
void pm_unpack(pm_gen *e, const char *words, pm_val v, pm_val named_like);
/* Nothing moves across this place that reads or writes the words of v, which has that form. */
void pm_pin_words(pm_gen *e, pm_val v);

bool pm_is_elementwise(const pm_graph *g, pm_opid op);
bool pm_is_barrier(const pm_op *o); /* an array or number that nothing may move across */
bool pm_is_view(const pm_graph *g, pm_opid op);
/* Does the barrier order the tensor core? */
bool pm_orders_tensor_core(const pm_graph *g, pm_val barrier);
uint32_t pm_threads_of(const pm_graph *g, pm_opid op); /* bit per Pallas thread that may come */

/* ---- ops and blocks (op.c, lane.c, block.c) ---------------------------------------------- */

pm_code pm_gen_block(pm_gen *e, pm_blk block); /* all ops but the YIELD */
pm_code pm_gen_op(pm_gen *e, pm_opid op);      /* one that is no part of a run */
/* the region of one lane that begins at op `first` of the block, if there is one; *next: after it,
 * else first (lane.c) */
pm_code pm_gen_region(pm_gen *e, pm_blk block, uint32_t first, uint32_t *next);
void pm_find_lane_barriers(pm_gen *e);
/* Does the op compute an array, rather than one number for all elements? in_run: per value, what
 * will be an array; or NULL. */
bool pm_makes_array(pm_gen *e, pm_opid op, const bool *in_run);
/* an element-wise op with one number for all elements: its statement; or a view: nothing */
bool pm_is_scalar_op(pm_gen *e, pm_opid op);
pm_code pm_gen_scalar(pm_gen *e, pm_opid op);
const char *pm_grid_index(pm_gen *e, uint32_t d);
const char *pm_cluster_index(pm_gen *e, uint32_t d);
const char *pm_scratch(pm_gen *e);                 /* address of this thread's scratch */
void pm_end_of_one_lane(pm_gen *e, const char *x); /* of PM_ONE_LANE: all get its scalar x */
const char *pm_taker(pm_gen *e, bool first_block); /* "if (..)": the lane that hands tiles
                                                    * on; "" where no other comes */
int64_t pm_scratch_bytes(const pm_gen *e);
#define PM_WARPGROUP_SYNC "warpgroup_sync(wg);"
#define PM_ONE_LANE "if (warp == 0 && elect_one())"
/* The same for what warps may do by themselves. */
static inline const char *pm_meet(const pm_gen *e) {
  return e->warps ? "warp_sync();" : PM_WARPGROUP_SYNC;
}
static inline const char *pm_elected(const pm_gen *e) {
  return e->warps ? "if (elect_one())" : PM_ONE_LANE;
}
/* The lanes whose bulk groups are those of the thread, or of the warp. */
static inline const char *pm_store_lanes(const pm_gen *e) {
  return e->warps || e->warps_store ? "if (elect_one())" : PM_ONE_LANE;
}
static inline const char *pm_first_lane(const pm_gen *e) {
  return e->warps ? "lane == 0" : "tid == 0";
}

/* ---- parentheses (operators.c) ------------------------------------------------------------ */

const char *pm_atom(pm_gen *e, const char *x);      /* in parentheses, if it has operators */
const char *pm_unwrapped(pm_gen *e, const char *x); /* without those around all of it */
/* an operand of `sign` without those that C++ does not need; right: it stands after the sign */
const char *pm_infix_operand(pm_gen *e, const char *x, const char *sign, bool right);

/* ---- registers and combinations (emit_registers.c) --------------------------------------- */

/* the result is registers of the operand: register r is number map(r) */
void pm_bind_registers(pm_gen *e, pm_opid op, const char *map);
/* the operand is one number for all elements: so is the result; false: it is not */
bool pm_bind_scalar(pm_gen *e, pm_opid op);
const char *pm_combine(pm_gen *e, int reduce, pm_dtype t, const char *a, const char *b);
const char *pm_identity(pm_gen *e, int reduce, pm_dtype t);

/* ---- exchange between lanes (exchange.c) -------------------------------------------------- */

/* this thread's scratch as an array of this type, row-major */
pm_view pm_scratch_view(const pm_type *t);
/* the operand goes to scratch row-major, the result is what this view of it shows */
pm_code pm_through_scratch(pm_gen *e, pm_opid op, const pm_view *result);
/* the same, with a view of scratch for the operand, too */
pm_code pm_through(pm_gen *e, pm_opid op, const pm_view *all, const pm_view *result);
pm_code pm_by_shuffles(pm_gen *e, pm_opid op, const pm_relayout *plan);
pm_code pm_no_registers(pm_gen *e, pm_opid op); /* an error of the planning */
/* Fails if the thread's scratch is smaller. */
pm_code pm_need_scratch(pm_gen *e, pm_opid op, int64_t bytes);
int64_t pm_scratch_size(const pm_gen *e, pm_val v); /* bytes of its elements there */
void pm_put_array(pm_gen *e, pm_val v, const pm_view *view);
/* declares the result and loads it; the lanes meet before and after */
void pm_take_result(pm_gen *e, pm_opid op, const pm_view *view);

/* Address of one barrier (emit_async.c). */
pm_code pm_barrier_address(pm_gen *e, pm_opid op, pm_val ref, const char **address);
const char *pm_size_text(pm_gen *e, uint32_t size); /* the parameter that has a size of the call */
const char *pm_map_name(pm_gen *e, const pm_tensor_map *m); /* that of an equal one, if there is */

/* ---- tensor memory (emit_tcgen05.c) ------------------------------------------------------ */

bool pm_has_tmem(const pm_gen *e);
bool pm_tmem_is_of_pairs(const pm_gen *e);
void pm_keep_blocks_apart(pm_gen *e);
void pm_print_tmem_alloc(pm_gen *e, uint32_t slot); /* slot: in shared memory, 4 bytes */
void pm_print_tmem_address(pm_gen *e, uint32_t slot);
void pm_print_tmem_dealloc(pm_gen *e);

/* ---- tcgen05 on Hopper (stand_in.c) -------------------------------------------------------- */

enum { PM_STAND_IN_LANES = 128 }; /* of each block, in addition to its threads */
/* Does the program have an engine in place of the tensor cores? */
bool pm_stands_in(const pm_gen *e);
pm_code pm_stand_in_check(pm_gen *e);                      /* fails for what it cannot do */
void pm_stand_in_constants(const pm_gen *e, pm_text *out); /* that its device functions use */
void pm_stand_in_begin(const pm_gen *e, pm_text *out);     /* before all else of the entry */
/* The function for a copy whose bytes count in the first block of a pair. */
const char *pm_stand_in_pair_copy(pm_gen *e, const char *fn, const pm_tensor_map *map);

/* ---- other devices (remote.c) -------------------------------------------------------------- */

/* Is the memory of the view another device's, or that of all? */
static inline bool pm_is_remote(const pm_view *v) { return v->device_val || v->all_devices; }
/* Where argument `param` (-1: the counters, from word `first` on) lies there: a pointer. */
const char *pm_remote_base(pm_gen *e, const pm_view *v, int32_t param, const char *type,
                           int64_t first);
const char *pm_device_index(pm_gen *e, uint32_t axis);
/* The name of the maps, as an argument of a copy: "&x_map", "&x_maps.of[1]". */
const char *pm_remote_map(pm_gen *e, const pm_view *v, const pm_tensor_map *m, const char *name);
void pm_print_peers(pm_gen *e, pm_text *out, const char *sep);
/* The function that moves n elements of v->dtype through the switch, for a load with what is
 * combined there. */
const char *pm_ptx_multimem(pm_gen *e, const pm_view *v, int64_t n, bool store);

/* ---- clusters (cluster.c) ---------------------------------------------------------------- */

/* Axes are indices in the user's order. Texts may name variables that stand in front of the body.
 */
const char *pm_cluster_share(pm_gen *e, const int64_t *axes, uint32_t n); /* 0 .. size - 1 */
const char *pm_cluster_mask(pm_gen *e, const int64_t *axes, uint32_t n);  /* of blocks that share */
int64_t pm_cluster_size(const pm_graph *g, const int64_t *axes, uint32_t n);
uint32_t pm_blocks(const pm_graph *g); /* of a cluster */
/* Blocks that an arrival signals: how many, and the rank of the k-th. groups: as the attribute. */
int64_t pm_cluster_targets(const pm_graph *g, const int64_t *groups, uint32_t n);
const char *pm_cluster_target(pm_gen *e, const int64_t *groups, uint32_t n, const char *k);
/* The rank of the block with index 0 on the axis, and this block's on the others. */
const char *pm_cluster_leader(pm_gen *e, int64_t axis);
/* Rank of the block with coordinate `at` on one axis, else those of this block. */
const char *pm_cluster_peer(pm_gen *e, int axis, const char *at);

/* ---- sums of digits (sums.c) and accesses (access.c) ------------------------------------- */

/* sum over pieces of (number / div % size) * mul, number < total */
typedef struct pm_piece {
  int64_t div, size, mul;
} pm_piece;
typedef struct pm_sum {
  pm_piece at[3 * PM_MAX_DIGITS];
  uint32_t n;
  int64_t total;
} pm_sum;
/* "0" if it is empty */
const char *pm_sum_text(pm_gen *e, const pm_sum *s, const char *number, int64_t scale);
int64_t pm_sum_at(const pm_sum *s, int64_t number);

/* Coordinates of a layout's registers along its dims (FLAT: the linear index is dim 0): thread part
 * as text, register part as a sum over the register's number. */
const char *pm_coord_base(pm_gen *e, const pm_layout *l, int dim);
void pm_coord_regs(const pm_layout *l, int dim, pm_sum *out);
/* condition under which register `reg` is no padding; NULL: always. Names from pm_coord_lines. */
const char *pm_coord_lines(pm_gen *e, const pm_layout *l); /* consts of the padded dims; stem */
const char *pm_valid(pm_gen *e, const pm_layout *l, const char *stem, const char *reg);

/* Text that gives for register `reg` of `dst` the register of `src` that holds the element whose
 * index is project(index in dst); NULL: it lies in other lanes. */
typedef void (*pm_project)(const void *ctx, const int64_t *dst, int64_t *src);
const char *pm_reg_map(pm_gen *e, const pm_layout *src, const pm_layout *dst, pm_project fn,
                       const void *ctx, const char *reg);
/* the same as numbers, -1 where a register of dst is padding; and their text */
const int64_t *pm_reg_list(pm_gen *e, const pm_layout *src, const pm_layout *dst, pm_project fn,
                           const void *ctx);
/* the same of the op, a slice; NULL: it is not made in registers */
const int64_t *pm_slice_registers(pm_gen *e, pm_opid op);
const char *pm_list_text(pm_gen *e, const pm_layout *src, const pm_layout *dst, const int64_t *list,
                         const char *reg);
/* prints a table of n small numbers, negative ones as 0; the text of its entry k */
const char *pm_table(pm_gen *e, const char *stem, const int64_t *x, int64_t n, const char *k);

/* the text of a map of the n registers of dst, of register r */
const char *pm_map_text(pm_gen *e, const pm_layout *dst, const int32_t *map, int64_t n);

/* Condition under which a lane holds the first of several copies; NULL: there are none. */
const char *pm_first_copy(pm_gen *e, const pm_layout *l);
/* Coordinate of register `reg` along dim; lanes and warps count in. */
const char *pm_coord_text(pm_gen *e, const pm_layout *l, int dim, const char *reg);
const char *pm_space_of(const pm_view *v); /* last part of the name of a load or store function */
/* What leads from an address of this block to that of the block that the view is in: a variable,
 * declared here. NULL: it is in this block. */
const char *pm_view_peer(pm_gen *e, const pm_view *v);
/* Address of the first element of a view: pointer or u32. */
const char *pm_view_address(pm_gen *e, const pm_view *v);
const char *pm_term_text(pm_gen *e, const pm_term *t, int64_t scale, bool wide); /* scaled by mul */
/* Loads into, or stores from, the C++ array or scalar `x` in layout l. */
void pm_load_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, bool words);
void pm_store_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, bool words);
/* does ldmatrix or stmatrix do it? x may then be an array of words */
bool pm_is_matrix(pm_gen *e, const pm_layout *l, const pm_view *v, bool store);
void pm_store_splat(pm_gen *e, const pm_view *v, const char *x);
/* Only where the mask is true; loads give `other` elsewhere. */
/* The address with what the array indices of register `reg` add to it. */
const char *pm_add_indices(pm_gen *e, const pm_view *v, const char *address, const char *reg);
void pm_load_masked(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, pm_val mask,
                    pm_val other);
void pm_store_masked(pm_gen *e, const pm_layout *l, const pm_view *v, pm_val value, pm_val mask);
/* fn(address, value) or fn(address, compare, value) for each element once; x gets the results, if
 * it is not NULL */
void pm_atomic_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *fn, pm_opid op,
                     const char *x);
/* the widest vector that one row of digits allows; raises the alignment of a GMEM parameter */
void pm_need_alignment(pm_gen *e, const pm_view *v, int64_t bytes);

/* ---- copies that share an arrival (expect.c) ----------------------------------------------- */

void pm_find_expects(pm_gen *e);
/* Bytes of a copy and those after it in its run. */
pm_code pm_expected_bytes(pm_gen *e, pm_opid op, long long *bytes);

/* ---- bulk groups (groups.c) ---------------------------------------------------------------- */

/* At the end of the body: until engines have read what a thread did not wait for. */
void pm_print_last_wait(pm_gen *e);

/* ---- checks (sanitize.c) ------------------------------------------------------------------- */

/* Of a region of one lane, or one warp, that has ended: the label that its checks go to, and the
 * vote by which the others follow. */
void pm_print_exit(pm_gen *e, const char **label);
/* After the body, which begins at byte `begin` of the text: where its checks go to. */
void pm_print_leave(pm_gen *e, uint32_t begin);
/* Calls of a function of named barriers, with the id and `lanes`, "": two warpgroups. `who`: "" or
 * "if (..) ". */
void pm_print_arrival(pm_gen *e, const char *who, const char *function, const char *id,
                      const char *lanes);
void pm_print_meeting(pm_gen *e, pm_opid op, const char *who, const char *function, const char *id,
                      const char *lanes);
/* What must hold before the op accesses memory. */
void pm_check_indices(pm_gen *e, pm_opid op);
/* The condition of a masked access, and that the indices of element `reg` are inside, and where the
 * element is in a slice: its coordinates along the dimensions of the access; NULL: a scalar. */
const char *pm_inside(pm_gen *e, pm_opid op, const char *const *at, const char *condition,
                      const char *reg);
/* `function(arguments)`, by all lanes; or by one, for which the others wait. */
void pm_print_wait(pm_gen *e, pm_opid op, const char *function, const char *arguments);
void pm_print_wait_of_one(pm_gen *e, pm_opid op, const char *function, const char *scope,
                          const char *arguments);

/* Until the semaphore at this address is at least n, or the host ends the waits of the mesh; then
 * the kernel goes on to its end. how: wait or take; first: address of its ref. */
void pm_print_watched_wait(pm_gen *e, pm_opid op, const char *how, const char *address,
                           const char *n, const char *first);

/* ---- the profiler (emit_profile.c) --------------------------------------------------------- */

void pm_print_profile_start(pm_gen *e);
void pm_print_profile_ready(pm_gen *e); /* all barriers are there */
void pm_print_profile_end(pm_gen *e);

/* ---- copies that combine (ptx.c) ------------------------------------------------ */

/* Names of the functions: (&map, smem, coordinates...), (gmem, smem, bytes), (gmem, value). */
const char *pm_tma_combine(pm_gen *e, int64_t combine, int rank);
const char *pm_bulk_combine(pm_gen *e, int64_t combine, pm_dtype d);
const char *pm_async_combine(pm_gen *e, int64_t combine,
                             pm_dtype d); /* (address, value, barrier) */
const char *pm_lane_combine(pm_gen *e, int64_t combine, pm_dtype d, const char **type);

/* ---- functions whose operand count varies (ptx.c) ------------------------------------- */

typedef struct pm_wgmma {
  int64_t n;
  const pm_mma *mma;
  bool transpose_a, transpose_b;
  pm_contents contents; /* of d */
  bool in_ptx;          /* d is a list of PTX's names, and the function a macro */
  int64_t steps;        /* along K */
  const pm_sum *a, *b;  /* where step k begins, in units of 16 bytes; a NULL: in registers */
} pm_wgmma;

/* Is the array, if it is one, in the layout of an accumulator, or of operand k of the product? */
pm_code pm_check_layout(pm_gen *e, pm_opid op, pm_val array, uint32_t k);
/* Names of the functions, which are printed with the program. */
const char *pm_ptx_wgmma(pm_gen *e, const pm_wgmma *kind);
const char *pm_ptx_mma(pm_gen *e, const pm_mma *m);
const char *pm_ptx_atomic(pm_gen *e, int64_t kind, pm_dtype t, const char *space, bool returns);
const char *pm_ptx_constant(pm_gen *e, const char *name, uint32_t x, const char *comment);
const char *pm_ptx_pin(pm_gen *e, pm_dtype t, int64_t n); /* n registers of 32 bits; F16: u32 */
/* (d, a, a_high or nothing if a is in tensor memory, b, b_high, instruction,
 * metadata if sparse, a_scale and b_scale if scaled, adds); (tmem, low, high); (registers, address)
 * of one part; (registers, &reduced, address) */
const char *pm_ptx_tcgen05(pm_gen *e, const pm_tcgen05_product *p);
const char *pm_ptx_tcgen05_copy(pm_gen *e, const char *shape, bool pair);
/* (smem, &map, barrier, mask if multicast, coordinates) */
const char *pm_ptx_tma_pair(pm_gen *e, int rank, bool multicast);
const char *pm_ptx_tmem_move(pm_gen *e, const pm_tcgen05_move *m, uint32_t part, bool store);
const char *pm_ptx_tmem_reduce(pm_gen *e, const pm_tcgen05_move *m, uint32_t part, int64_t reduce,
                               pm_dtype d);
/* Of n registers of an accumulator in PTX, from the first on: a macro that lists them; functions,
 * f(d) that copies them to or from an array, f() that declares them or makes them zero. */
const char *pm_ptx_declare(pm_gen *e, const char *acc, pm_dtype t, int64_t n);
const char *pm_ptx_list(pm_gen *e, const char *acc, int64_t first, int64_t n);
const char *pm_ptx_read(pm_gen *e, const char *acc, pm_dtype t, pm_dtype to, int64_t first,
                        int64_t n);
const char *pm_ptx_write(pm_gen *e, const char *acc, pm_dtype t, int64_t n);
const char *pm_ptx_zero(pm_gen *e, const char *acc, pm_dtype t, int64_t n);

#endif
