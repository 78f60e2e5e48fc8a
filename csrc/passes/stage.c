/* Prefetching operands of products that loops load from GMEM, and adding products to their sums.
 *
 * `jnp.dot` stages an array b in SMEM, where wgmma reads it:
 *
 *     for j:  x = load gmem(j)                         alloc s; alloc ready
 *             scope:                                   if lower < upper: copy gmem(lower) to s
 *               alloc s                          ->    for j:
 *               store s, x                               scope:
 *               commit; wgmma acc, a, s                    wait ready; wgmma acc, a, s
 *               y = load acc; yield y                      y = load acc
 *                                                          if j + 1 < upper: copy gmem(j + 1) to s
 *                                                          yield y
 *
 * The copy for the next iteration overlaps the rest of the current one. One buffer suffices,
 * because reading the accumulator waits for the product. The transformation requires that the load
 * has no other use, that the address depends only on the loop's index, that nothing in the loop
 * writes GMEM, and that nothing in the kernel writes that argument. If x does not change in the
 * loop, the store moves before the loop, and so does an `a` that does not change.
 *
 * Before this, accesses whose mask is true everywhere become unmasked. After it, the sum of an
 * array and a product is computed by the tensor cores, in an accumulator that starts as the array.
 *
 * Only kernels with one Pallas thread are transformed: several threads share SMEM and would need
 * one buffer each. */
#include "passes.h"

#define PM_TRY(x)           \
  do {                      \
    const pm_code rc = (x); \
    if (rc) return rc;      \
  } while (0)

enum { ROOM = 2048 }; /* bytes of SMEM left for scratch and barriers */

typedef struct stager {
  pm_graph *g;
  int64_t smem, limit;
  bool *written; /* by value: arguments of the kernel that it writes */
  int64_t stage; /* number of the current loop */
  pm_opid front; /* the loop, or the first wait before it: copies start before it */
} stager;

/* a product whose b is staged in its scope */
typedef struct staged {
  pm_opid loop, scope, alloc, transpose, store, load, wgmma, acc_load;
} staged;

static uint16_t code_of(const pm_graph *g, pm_opid op) { return pm_get(g, op)->code; }

static pm_opid def_of(const pm_graph *g, pm_val v) { return pm_value_of(g, v)->def; }

static uint32_t count_uses(const pm_graph *g, pm_val v) {
  uint32_t n = 0;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) n += pm_in(g, op, k) == v;
  }
  return n;
}

static void replace_uses(pm_graph *g, pm_val old, pm_val by, pm_opid but) {
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; op != but && k < pm_get(g, op)->n_in; k++) {
      if (pm_in(g, op, k) == old) g->operands.at[pm_get(g, op)->in + k] = by;
    }
  }
}

/* Remove the op from its block's list; the op itself does not change. */
static void take_off(pm_graph *g, pm_opid op) {
  pm_block *b = &g->blocks.at[pm_get(g, op)->parent];
  const uint32_t at = pm_position(g, op);
  memmove(&b->ops.at[at], &b->ops.at[at + 1], sizeof(pm_opid) * (b->ops.n - at - 1));
  b->ops.n--;
}

static void drop(pm_graph *g, pm_opid op) {
  take_off(g, op);
  if (pm_get(g, op)->n_out) *pm_value_of(g, pm_get(g, op)->out) = (pm_value){0};
  *pm_get(g, op) = (pm_op){0};
}

/* Insert before `before`, in its block. */
static void move_before(pm_graph *g, pm_opid op, pm_opid before) {
  take_off(g, op);
  const pm_blk block = pm_get(g, before)->parent;
  const uint32_t at = pm_position(g, before);
  pm_vec_push(g->arena, &g->blocks.at[block].ops, op);
  pm_block *b = &g->blocks.at[block];
  memmove(&b->ops.at[at + 1], &b->ops.at[at], sizeof(pm_opid) * (b->ops.n - 1 - at));
  b->ops.at[at] = op;
  pm_get(g, op)->parent = block;
  if (pm_get(g, op)->n_out) pm_value_of(g, pm_get(g, op)->out)->block = block;
}

/* Is it the contents of an accumulator, after all products? */
static bool awaits_sum(const pm_graph *g, pm_opid op) {
  int64_t n;
  return pm_get(g, op)->n_out && pm_awaits_products(g, op, &n) && !n;
}

static bool lies_in(const pm_graph *g, pm_val v, pm_opid loop) {
  for (pm_blk b = pm_value_of(g, v)->block; b;) {
    const pm_opid parent = g->blocks.at[b].parent;
    if (parent == loop) return true;
    b = parent ? pm_get(g, parent)->parent : 0;
  }
  return false;
}

/* ---- masks ------------------------------------------------------------------------------- */

static void unmask(pm_graph *g, pm_opid op, void *ctx) {
  uint32_t n;
  pm_scalar mask;
  (void)ctx;
  pm_access a;
  pm_val array;
  if (!pm_is_masked(code_of(g, op)) || !pm_moves_array(g, op, &a, &array)) return;
  const bool load = a.reads;
  if (!pm_constant(g, pm_in(g, op, load ? 1 : 2), &mask) || !mask.i) return;
  pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  const pm_val in[] = {pm_in(g, op, 0), pm_in(g, op, 1)};
  const pm_type ref = *pm_typeof(g, in[0]);
  if (n || (!load && !pm_typeof(g, in[1])->rank && ref.rank)) return;
  const pm_attr_arg attrs[] = {{.id = PM_ATTR_LAYOUT}, {.id = PM_ATTR_OPTIMIZED}};
  const pm_blk block = pm_get(g, op)->parent;
  if (!load) {
    pm_insert(g, block, pm_position(g, op), PM_OP_STORE, in, 2, NULL, 0, NULL, 0, op);
  } else {
    const pm_val old = pm_get(g, op)->out;
    const pm_type t = *pm_typeof(g, old);
    const uint32_t name = pm_value_of(g, old)->name;
    const pm_opid plain =
        pm_insert(g, block, pm_position(g, op), PM_OP_LOAD, in, 1, &t, 1, attrs, 2, op);
    pm_value_of(g, pm_get(g, plain)->out)->name = name;
    replace_uses(g, old, pm_get(g, plain)->out, 0);
  }
  drop(g, op);
}

/* ---- what can be staged ------------------------------------------------------------------ */

static void find_written(pm_graph *g, pm_opid op, void *ctx) {
  stager *s = ctx;
  const pm_op *o = pm_get(g, op);
  if (pm_allocates(g, op, PM_SMEM)) {
    const pm_type *t = pm_typeof(g, o->out);
    s->smem += pm_round_up(pm_type_size(t) * pm_dtypes[t->dtype].bytes, 1024);
  }
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where == PM_IN_GMEM && a.writes) s->written[pm_view_base(g, a.view)] = true;
  }
}

/* May GMEM change during the block: does an op in it write there, or wait for those who do? */
static bool changes_gmem(const pm_graph *g, pm_blk block) {
  const pm_block *b = &g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const pm_op *o = pm_get(g, b->ops.at[k]);
    pm_access a = pm_accesses(b->ops.at[k]);
    while (pm_next_access(g, &a)) {
      if (a.writes && a.scope >= PM_DEVICE) return true;
    }
    if (pm_is_source(g, b->ops.at[k]) || pm_maps_warps(o->code)) return true;
    if (o->code == PM_OP_PDL_WAIT || o->code == PM_OP_AWAIT) return true;
    for (uint32_t r = 0; r < o->n_regions; r++) {
      if (changes_gmem(g, pm_region(g, b->ops.at[k], r))) return true;
    }
  }
  return false;
}

/* The allocation of which v is a full view, plain or transposed. */
static pm_opid whole_alloc(const pm_graph *g, pm_val v, pm_opid *transpose) {
  pm_opid def = def_of(g, v);
  *transpose = 0;
  if (def && code_of(g, def) == PM_OP_TRANSPOSE_REF) {
    *transpose = def;
    def = def_of(g, pm_in(g, def, 0));
  }
  return def && pm_allocates(g, def, PM_SMEM) ? def : 0;
}

/* Is memory of the allocation used by the store and by products alone? */
static bool only_products(const pm_graph *g, const staged *p) {
  const pm_val memory = pm_get(g, p->alloc)->out;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
      if (pm_in(g, op, k) != memory) continue;
      const bool mine = op == p->store || op == p->transpose;
      if (!mine && (code_of(g, op) != PM_OP_WGMMA || k != 2 || op != p->wgmma)) return false;
    }
  }
  return !p->transpose || count_uses(g, pm_get(g, p->transpose)->out) == 1;
}

/* A store in the scope whose memory the scope's product reads. */
static bool read_scope(const pm_graph *g, pm_opid scope, pm_opid store, staged *p) {
  uint32_t n;
  const pm_block *b = &g->blocks.at[pm_get(g, store)->parent];
  p->scope = scope;
  p->store = store;
  p->alloc = whole_alloc(g, pm_in(g, store, 0), &p->transpose);
  if (!p->alloc || pm_get(g, p->alloc)->parent != pm_get(g, store)->parent) return false;
  if (*pm_attr(g, p->alloc, PM_ATTR_GIVEN)) return false;
  pm_attr_list(g, p->alloc, PM_ATTR_UNION, &n);
  if (n) return false;
  p->wgmma = p->acc_load = 0;
  for (uint32_t k = pm_position(g, store) + 1; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    const uint16_t code = code_of(g, op);
    if (code == PM_OP_WGMMA && pm_in(g, op, 2) == pm_get(g, p->alloc)->out) p->wgmma = op;
    if (p->wgmma && awaits_sum(g, op)) p->acc_load = op;
  }
  if (!p->wgmma || !p->acc_load || !only_products(g, p)) return false;
  p->load = def_of(g, pm_in(g, store, 1));
  return true;
}

/* Can v be computed for another index of the loop? */
static bool follows_index(const pm_graph *g, pm_val v, pm_opid loop, int budget) {
  if (!lies_in(g, v, loop)) return true;
  const pm_opid def = def_of(g, v);
  if (!def) return v == g->blocks.at[pm_region(g, loop, 0)].arg;
  const pm_op *o = pm_get(g, def);
  const bool scalar = pm_typeof(g, v)->kind == PM_ARRAY && !pm_typeof(g, v)->rank;
  if (budget <= 0 || o->n_regions || !pm_is_pure(o->code)) return false;
  if (!scalar && !pm_makes_view(o->code)) return false;
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (!follows_index(g, pm_in(g, def, k), loop, budget - 1)) return false;
  }
  return true;
}

static bool can_copy(const stager *s, const staged *p) {
  const pm_graph *g = s->g;
  if (!p->load || !pm_is_free_load(g, p->load)) return false;
  const pm_val x = pm_get(g, p->load)->out, from = pm_in(g, p->load, 0);
  if (!lies_in(g, x, p->loop)) return false;
  const pm_blk block = pm_get(g, p->load)->parent;
  if (g->blocks.at[block].parent != p->loop && g->blocks.at[block].parent != p->scope) return false;
  if (pm_typeof(g, from)->space != PM_GMEM || s->written[pm_view_base(g, from)]) return false;
  return count_uses(g, x) == 1 && follows_index(g, from, p->loop, 32);
}

/* ---- staging ----------------------------------------------------------------------------- */

/* v for index `i` of the loop; new ops are inserted before `before`. */
static pm_val copy_for(pm_graph *g, pm_val v, pm_opid loop, pm_val i, pm_opid before) {
  if (!lies_in(g, v, loop)) return v;
  const pm_opid def = def_of(g, v);
  if (!def) return i;
  const pm_op o = *pm_get(g, def);
  pm_val *in = PM_NEW(g->arena, pm_val, o.n_in);
  for (uint32_t k = 0; k < o.n_in; k++) in[k] = copy_for(g, pm_in(g, def, k), loop, i, before);
  const pm_blk block = pm_get(g, before)->parent;
  return pm_get(g, pm_insert_like(g, block, pm_position(g, before), def, in))->out;
}

static pm_val insert_i32(pm_graph *g, pm_opid before, pm_opcode code, pm_val x, pm_val y,
                         pm_opid place) {
  const pm_type i32 = pm_scalar_type(PM_I32);
  const pm_val in[] = {x, y};
  return pm_insert_value(g, before, code, in, 2, &i32, NULL, 0, place);
}

/* The number of the next iteration, and which of two slots one has. */
static pm_val insert_next(pm_graph *g, pm_opid before, pm_val index, pm_val one, pm_opid place) {
  return insert_i32(g, before, PM_OP_ADD, index, one, place);
}

static pm_val insert_slot(pm_graph *g, pm_opid before, pm_val index, pm_val one, pm_opid place) {
  return insert_i32(g, before, PM_OP_AND, index, one, place);
}

static pm_opid insert_op(pm_graph *g, pm_opid before, pm_opcode code, const pm_val *in,
                         uint32_t n_in, pm_opid place) {
  return pm_insert(g, pm_get(g, before)->parent, pm_position(g, before), code, in, n_in, NULL, 0,
                   NULL, 0, place);
}

static pm_opid insert_wait(pm_graph *g, pm_opid before, pm_val barrier, pm_opid place) {
  return insert_op(g, before, PM_OP_WAIT, &barrier, 1, place);
}

/* An IF before `before`, with empty regions; returns the YIELD of the first. */
static pm_code open_if(pm_graph *g, pm_opid before, pm_val condition, pm_opid *yield, pm_err *err) {
  const pm_blk block = pm_get(g, before)->parent;
  const pm_op at = *pm_get(g, before);
  const uint32_t from = pm_position(g, before), n = g->blocks.at[block].ops.n - from;
  pm_opid *rest = PM_NEW(g->arena, pm_opid, n), op = 0;
  memcpy(rest, &g->blocks.at[block].ops.at[from], sizeof *rest * n);
  g->blocks.at[block].ops.n = from;
  pm_builder b = {g, block, at.file, at.line};
  pm_code code = pm_open(&b, PM_OP_IF, &condition, 1, 2, NULL, 0, &op, err);
  for (uint32_t r = 0; r < 2 && !code; r++) {
    pm_builder in = {g, pm_region(g, op, r), at.file, at.line};
    code = pm_yield(&in, NULL, 0, err);
  }
  if (!code) code = pm_close(&b, op, err);
  for (uint32_t k = 0; k < n; k++) pm_vec_push(g->arena, &g->blocks.at[block].ops, rest[k]);
  if (!code) *yield = pm_terminator(g, pm_region(g, op, 0));
  return code;
}

/* The copy for index i, if it is below the loop's upper bound. */
static pm_code copy_step(pm_graph *g, const staged *p, pm_val source, pm_val i, pm_val to,
                         pm_val ready, pm_opid before, pm_err *err) {
  const pm_val upper = pm_in(g, p->loop, 1);
  int64_t lo, hi, least, most;
  const pm_val pair[] = {i, upper};
  const pm_type truth = pm_scalar_type(PM_BOOL);
  const bool bounded = pm_range(g, i, &lo, &hi) && pm_range(g, upper, &least, &most);
  if (!bounded || hi >= least) {
    const pm_val more = pm_insert_value(g, before, PM_OP_LT, pair, 2, &truth, NULL, 0, p->store);
    const pm_code code = open_if(g, before, more, &before, err);
    if (code) return code;
  }
  const pm_val in[] = {copy_for(g, source, p->loop, i, before), to, ready};
  insert_op(g, before, PM_OP_COPY_G2S, in, 3, p->load);
  return PM_OK;
}

/* The memory gets the shape of the stored array; the product reads the transpose. */
static void transpose_alloc(pm_graph *g, const staged *p) {
  const pm_val memory = pm_get(g, p->alloc)->out;
  const pm_type old = *pm_typeof(g, memory);
  const int64_t swap[] = {1, 0};
  const pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = swap, .n = 2};
  if (!p->transpose) return;
  const pm_type to = *pm_typeof(g, pm_get(g, p->transpose)->out);
  pm_value_of(g, memory)->type = to;
  drop(g, p->transpose);
  const pm_val back =
      pm_insert_value(g, p->wgmma, PM_OP_TRANSPOSE_REF, &memory, 1, &old, &attr, 1, p->wgmma);
  g->operands.at[pm_get(g, p->wgmma)->in + 2] = back;
}

/* Nothing else is stored in the scope, and no other operand is in SMEM. */
static void drop_commit(pm_graph *g, const staged *p) {
  const pm_block *b = &g->blocks.at[pm_get(g, p->wgmma)->parent];
  pm_opid commit = 0;
  const pm_val x = pm_in(g, p->wgmma, 1);
  const pm_opid from = pm_view_smem(g, x); /* of an `a` that is staged too */
  const bool staged = from && *pm_attr(g, from, PM_ATTR_STAGE);
  if (pm_typeof(g, x)->kind != PM_ARRAY && !staged) return;
  for (uint32_t k = 0; b->ops.at[k] != p->wgmma; k++) {
    const uint16_t code = code_of(g, b->ops.at[k]);
    pm_access a = pm_accesses(b->ops.at[k]);
    while (pm_next_access(g, &a)) {
      if (a.where & PM_IN_MEMORY && a.writes && a.certainty != PM_UNTOLD) return;
    }
    if (code == PM_OP_COMMIT_SMEM) commit = b->ops.at[k];
  }
  if (commit) drop(g, commit);
}

/* Only the loop uses this memory: later allocations may reuse it. */
static void belongs(const stager *s, pm_opid alloc) {
  *pm_attr(s->g, alloc, PM_ATTR_STAGE) = s->stage;
}

static pm_val new_memory(stager *s, const pm_type *t, pm_opid place) {
  const pm_val memory =
      pm_insert_value(s->g, s->front, PM_OP_ALLOC_SMEM, NULL, 0, t, NULL, 0, place);
  belongs(s, def_of(s->g, memory));
  return memory;
}

/* A barrier for one copy, before the loop. */
static pm_val new_barrier(stager *s, pm_opid place) {
  const pm_type barrier = {PM_BARRIER, 0, PM_SMEM, 0, {0}};
  const pm_attr_arg arrivals = {.id = PM_ATTR_ARRIVALS, .i = 1};
  return pm_insert_value(s->g, s->front, PM_OP_ALLOC_BARRIER, NULL, 0, &barrier, &arrivals, 1,
                         place);
}

static pm_code stage_copy(stager *s, staged *p, pm_err *err) {
  pm_graph *g = s->g;
  const pm_val source = pm_in(g, p->load, 0), index = g->blocks.at[pm_region(g, p->loop, 0)].arg;
  move_before(g, p->alloc, s->front);
  belongs(s, p->alloc);
  const pm_val ready = new_barrier(s, p->load), memory = pm_get(g, p->alloc)->out;
  transpose_alloc(g, p);
  PM_TRY(copy_step(g, p, source, pm_in(g, p->loop, 0), memory, ready, s->front, err));
  insert_wait(g, p->store, ready, p->load);
  const pm_blk block = pm_get(g, p->acc_load)->parent;
  const pm_opid before = g->blocks.at[block].ops.at[pm_position(g, p->acc_load) + 1];
  const pm_val one = pm_insert_number(g, before, 1, p->load);
  const pm_val next = insert_next(g, before, index, one, p->load);
  PM_TRY(copy_step(g, p, source, next, memory, ready, before, err));
  drop(g, p->store);
  drop(g, p->load);
  drop_commit(g, p);
  return PM_OK;
}

/* x is stored to memory before the loop, by an engine if it was loaded from GMEM only for this
 * use. */
static void bring(stager *s, pm_val memory, pm_val x, pm_opid place) {
  pm_graph *g = s->g;
  const pm_opid load = def_of(g, x);
  const pm_val in[] = {memory, x};
  if (!load || !pm_is_free_load(g, load) || pm_typeof(g, pm_in(g, load, 0))->space != PM_GMEM ||
      s->written[pm_view_base(g, pm_in(g, load, 0))] || count_uses(g, x) != 1) {
    insert_op(g, s->front, PM_OP_STORE, in, 2, place);
    insert_op(g, s->front, PM_OP_COMMIT_SMEM, NULL, 0, place);
    return;
  }
  const pm_val copy[] = {pm_in(g, load, 0), memory, new_barrier(s, load)};
  insert_op(g, s->front, PM_OP_COPY_G2S, copy, 3, load);
  s->front = insert_wait(g, s->front, copy[2], load);
}

static void stage_invariant(stager *s, staged *p) {
  pm_graph *g = s->g;
  const pm_val x = pm_in(g, p->store, 1);
  move_before(g, p->alloc, s->front);
  belongs(s, p->alloc);
  transpose_alloc(g, p);
  bring(s, pm_get(g, p->alloc)->out, x, p->store);
  drop(g, p->store);
  drop_commit(g, p);
}

/* An `a` that does not change in the loop is kept in SMEM, which frees registers. */
static void stage_a(stager *s, const staged *p) {
  pm_graph *g = s->g;
  const pm_val a = pm_in(g, p->wgmma, 1);
  pm_type t = *pm_typeof(g, a);
  const int64_t bytes = pm_round_up(pm_type_size(&t) * pm_dtypes[t.dtype].bytes, 1024);
  if (t.kind != PM_ARRAY || lies_in(g, a, p->loop) || s->smem + bytes > s->limit) return;
  s->smem += bytes;
  t.kind = PM_REF;
  t.space = PM_SMEM;
  const pm_val memory = new_memory(s, &t, p->wgmma);
  bring(s, memory, a, p->wgmma);
  g->operands.at[pm_get(g, p->wgmma)->in + 1] = memory;
}

/* ---- loads with several uses -------------------------------------------------------------- */

enum { MOST_USES = 8 };

/* The products that read the result of a load: as `a`, or as b that a store stages. */
typedef struct shared {
  staged b[MOST_USES];
  pm_opid a[MOST_USES];
  uint32_t n_b, n_a;
} shared;

static pm_opid scope_in(const pm_graph *g, pm_opid op, pm_opid loop) {
  const pm_opid scope = g->blocks.at[pm_get(g, op)->parent].parent;
  if (!scope || !pm_has_attr(g, scope, PM_ATTR_COLLECTIVE)) return 0;
  return g->blocks.at[pm_get(g, scope)->parent].parent == loop ? scope : 0;
}

/* Is the product complete at the end of its scope? */
static bool is_awaited(const pm_graph *g, pm_opid wgmma) {
  const pm_block *b = &g->blocks.at[pm_get(g, wgmma)->parent];
  for (uint32_t k = pm_position(g, wgmma) + 1; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (awaits_sum(g, op)) return true;
  }
  return false;
}

static bool only_shared(const pm_graph *g, pm_val x, pm_opid loop, shared *out) {
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
      if (pm_in(g, op, k) != x) continue;
      const pm_opid scope = scope_in(g, op, loop);
      if (!scope || out->n_a == MOST_USES || out->n_b == MOST_USES) return false;
      staged *p = &out->b[out->n_b];
      *p = (staged){.loop = loop};
      if (code_of(g, op) == PM_OP_WGMMA && k == 1 && is_awaited(g, op)) {
        out->a[out->n_a++] = op;
      } else if (code_of(g, op) == PM_OP_STORE && k == 1 && read_scope(g, scope, op, p)) {
        out->n_b++;
      } else {
        return false;
      }
    }
  }
  return out->n_a + out->n_b > 1;
}

/* Number `slot` of the buffers in an allocation. */
static pm_val slot_of(pm_graph *g, pm_opid before, pm_val memory, pm_val slot, pm_opid place) {
  pm_type t = *pm_typeof(g, memory);
  const int64_t starts[] = {PM_DYNAMIC, 0, 0}, sizes[] = {PM_DROPPED, t.dim[1], t.dim[2]};
  const pm_attr_arg attrs[] = {{.id = PM_ATTR_STARTS, .list = starts, .n = 3},
                               {.id = PM_ATTR_SIZES, .list = sizes, .n = 3}};
  const pm_val in[] = {memory, slot};
  t.rank = 2;
  memmove(t.dim, t.dim + 1, 2 * sizeof *t.dim);
  t.dim[2] = 0;
  return pm_insert_value(g, before, PM_OP_INDEX, in, 2, &t, attrs, 2, place);
}

/* Two alternating buffers: the copy for the next step starts where the copy of this step was
 * awaited. */
static pm_code stage_shared(stager *s, pm_opid loop, pm_opid load, shared *u, pm_err *err) {
  pm_graph *g = s->g;
  const pm_val from = pm_in(g, load, 0), index = g->blocks.at[pm_region(g, loop, 0)].arg;
  const pm_type x = *pm_typeof(g, pm_get(g, load)->out);
  const pm_type both = {PM_REF, x.dtype, PM_SMEM, 3, {2, x.dim[0], x.dim[1]}};
  const pm_val memory = new_memory(s, &both, load);
  const pm_val ready = new_barrier(s, load), lower = pm_in(g, loop, 0);
  const pm_val unit = pm_insert_number(g, s->front, 1, load);
  const pm_val parity = insert_slot(g, s->front, lower, unit, load);
  pm_val to = slot_of(g, s->front, memory, parity, load);
  const staged first = {.loop = loop, .load = load, .store = load};
  PM_TRY(copy_step(g, &first, from, lower, to, ready, s->front, err));
  insert_wait(g, load, ready, load);
  const pm_val next = insert_next(g, load, index, unit, load);
  const pm_val here = insert_slot(g, load, index, unit, load);
  const pm_val there = insert_slot(g, load, next, unit, load);
  to = slot_of(g, load, memory, there, load);
  const pm_val mine = slot_of(g, load, memory, here, load);
  PM_TRY(copy_step(g, &first, from, next, to, ready, load, err));
  for (uint32_t k = 0; k < u->n_a; k++) g->operands.at[pm_get(g, u->a[k])->in + 1] = mine;
  for (uint32_t k = 0; k < u->n_b; k++) {
    transpose_alloc(g, &u->b[k]);
    replace_uses(g, pm_get(g, u->b[k].alloc)->out, mine, 0);
    drop(g, u->b[k].store);
    drop_commit(g, &u->b[k]);
    drop(g, u->b[k].alloc);
    stage_a(s, &u->b[k]);
  }
  drop(g, load);
  return PM_OK;
}

static pm_code stage_loads(stager *s, pm_opid loop, pm_err *err) {
  pm_graph *g = s->g;
  const pm_blk block = pm_region(g, loop, 0);
  if (changes_gmem(g, block)) return PM_OK;
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    shared u = {.n_a = 0};
    if (!pm_is_free_load(g, op)) continue;
    const pm_val x = pm_get(g, op)->out, from = pm_in(g, op, 0);
    const pm_type *t = pm_typeof(g, x);
    if (t->rank != 2 || pm_typeof(g, from)->space != PM_GMEM) continue;
    if (s->written[pm_view_base(g, from)] || !follows_index(g, from, loop, 32)) continue;
    const int64_t bytes = 2 * pm_round_up(pm_type_size(t) * pm_dtypes[t->dtype].bytes, 1024);
    if (pm_dtypes[t->dtype].bits != 16 || s->smem + bytes > s->limit) continue;
    if (!only_shared(g, x, loop, &u)) continue;
    s->smem += bytes;
    PM_TRY(stage_shared(s, loop, op, &u, err));
    k = UINT32_MAX; /* the list has changed */
  }
  return PM_OK;
}

static pm_code stage_scope(stager *s, pm_opid loop, pm_opid scope, pm_err *err) {
  pm_graph *g = s->g;
  const pm_blk block = pm_region(g, scope, 0);
  const bool quiet = !changes_gmem(g, pm_region(g, loop, 0));
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    staged p = {.loop = loop};
    if (code_of(g, op) != PM_OP_STORE || !read_scope(g, scope, op, &p)) continue;
    if (!lies_in(g, pm_in(g, op, 1), loop)) {
      stage_invariant(s, &p);
    } else if (quiet && can_copy(s, &p)) {
      PM_TRY(stage_copy(s, &p, err));
    } else {
      continue;
    }
    stage_a(s, &p);
    k = UINT32_MAX; /* the list has changed */
  }
  return PM_OK;
}

static pm_code stage_loop(stager *s, pm_opid loop, pm_err *err) {
  const pm_blk block = pm_region(s->g, loop, 0);
  s->front = loop;
  s->stage++;
  PM_TRY(stage_loads(s, loop, err));
  for (uint32_t k = 0; k < s->g->blocks.at[block].ops.n; k++) {
    const pm_opid op = s->g->blocks.at[block].ops.at[k];
    if (pm_has_attr(s->g, op, PM_ATTR_COLLECTIVE)) PM_TRY(stage_scope(s, loop, op, err));
  }
  return PM_OK;
}

/* ---- sums -------------------------------------------------------------------------------- */

/* The array that is added to the result of a scope, known before the scope; 0: none. */
static pm_val addend(const pm_graph *g, pm_opid add, pm_val result, pm_opid scope) {
  const pm_val a = pm_in(g, add, 0), b = pm_in(g, add, 1), other = a == result ? b : a;
  const pm_opid def = def_of(g, other);
  if (a == b || !pm_type_equal(pm_typeof(g, a), pm_typeof(g, b))) return 0;
  if (pm_get(g, add)->parent != pm_get(g, scope)->parent) return 0;
  if (!def || pm_get(g, def)->parent != pm_get(g, scope)->parent) return other;
  return pm_position(g, def) < pm_position(g, scope) ? other : 0;
}

static void sum_in_accumulator(pm_graph *g, pm_opid add, void *ctx) {
  (void)ctx;
  if (code_of(g, add) != PM_OP_ADD) return;
  for (uint32_t k = 0; k < 2; k++) {
    const pm_val result = pm_in(g, add, k);
    const pm_opid scope = def_of(g, result);
    if (!scope || !pm_has_attr(g, scope, PM_ATTR_COLLECTIVE) || count_uses(g, result) != 1)
      continue;
    const pm_val from =
        pm_in(g, pm_terminator(g, pm_region(g, scope, 0)), pm_value_of(g, result)->index);
    const pm_opid load = def_of(g, from);
    if (!load || code_of(g, load) != PM_OP_ACC_LOAD || count_uses(g, from) != 1) continue;
    const pm_val acc = pm_in(g, load, 0);
    const pm_opid alloc = def_of(g, acc);
    if (!alloc || !pm_allocates(g, alloc, PM_ACC) || pm_get(g, alloc)->n_in) continue;
    if (pm_get(g, alloc)->parent != pm_region(g, scope, 0)) continue;
    const pm_val x = addend(g, add, result, scope);
    if (!x || pm_typeof(g, x)->dtype != PM_F32) continue;
    const pm_type type = *pm_typeof(g, acc);
    const pm_val sum = pm_insert_value(g, alloc, PM_OP_ALLOC_ACC, &x, 1, &type, NULL, 0, alloc);
    replace_uses(g, acc, sum, 0);
    drop(g, alloc);
    pm_value_of(g, result)->name = pm_value_of(g, pm_get(g, add)->out)->name;
    replace_uses(g, pm_get(g, add)->out, result, add);
    return; /* the sum is now unused; the next simplification removes it */
  }
}

pm_code pm_stage_products(pm_graph *g, const pm_target *t, pm_err *err) {
  stager s = {.g = g, .limit = t->smem - ROOM};
  pm_walk(g, 1, unmask, NULL);
  if (g->n_threads > 1 || g->n_cluster) return PM_OK;
  s.written = PM_NEW(g->arena, bool, g->values.n);
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (g->alias && g->alias[k] >= 0) s.written[g->blocks.at[1].arg + (uint32_t)g->alias[k]] = true;
  }
  pm_walk(g, 1, find_written, &s);
  /* arrays staged in overlapping scopes get memory of their own */
  if (s.smem <= s.limit && !g->no_auto_barriers) {
    const uint32_t n = g->ops.n;
    for (pm_opid op = 1; op < n; op++) {
      if (pm_has_index(pm_get(g, op))) PM_TRY(stage_loop(&s, op, err));
    }
  }
  pm_walk(g, 1, sum_in_accumulator, NULL);
  return PM_OK;
}
