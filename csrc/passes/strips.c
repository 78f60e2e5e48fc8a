/* Arrays that are too large for registers are processed in strips.
 *
 * Stores whose values come from loads through element-wise ops alone become a FOR over strips of
 * one dimension. Each strip is loaded, computed and stored before the next one starts. A strip that
 * is still too large is divided again, along its next dimension.
 *
 * A chain ends in consecutive stores of the same shape. Between its first load and its last store,
 * loads are the only ops with effects. In each strip all loads come before all stores, so a chain
 * may load from a ref that it stores to, if both are the same ref; other refs that may overlap end
 * the chain. A value that is also used elsewhere would stay in registers anyway. In that case
 * nothing is changed, and pm_warn_large warns the user.
 *
 * Loads of columns of tensor memory are taken if they leave fewer than OTHERS of the registers that
 * a lane has at launch or, where the chain computes, fewer than half of them, since ptxas moves
 * part of the work on a large array before the rest of it. A WAIT_LOAD_TMEM between the loads and
 * the stores moves to the end; waiting later is always right.
 */
#include "../ir/tmem.h"
#include "passes.h"

enum {
  LANES = 128,
  SM_REGISTERS = 65536,
  MOST_WORDS = 255, /* registers of a lane */
  OTHERS = 40,      /* that the rest of a lane's work needs */
  STRIP = 32,       /* words of a lane that a strip of the widest value should take */
  ROWS = 8,         /* of a tile in SMEM */
  MOST_STORES = 16,
};

typedef struct chain {
  pm_graph *g;
  pm_err *err;
  pm_blk block;
  uint32_t *uses;   /* per value, of the whole graph */
  uint32_t *inside; /* per value: by ops of the chain */
  uint32_t n_values;
  pm_opid store[MOST_STORES];
  uint32_t n_stores, first_load, first_store, last_store; /* positions in the block */
  int dim;
  int64_t strip, bits; /* extent of a strip; bits of the widest element */
  int64_t tile;        /* of which extents of strips are multiples */
  bool tmem, computes;
} chain;

static int64_t words_of(const pm_type *t, int64_t elements) {
  return elements * pm_dtypes[t->dtype].bits / 32;
}

static bool exceeds(const pm_graph *g, pm_val v, int64_t most) {
  const pm_type *t = pm_typeof(g, v);
  if (t->kind != PM_ARRAY || !t->rank) return false;
  return words_of(t, (pm_type_size(t) + LANES - 1) / LANES) > most;
}

static bool is_large(const pm_graph *g, pm_val v) { return exceeds(g, v, MOST_WORDS); }

/* Registers of a lane that an array from tensor memory may take. */
static int64_t most_of_tmem(const pm_graph *g, bool computes) {
  const int64_t all = pm_min(MOST_WORDS + 1, SM_REGISTERS / LANES / (int64_t)g->n_threads);
  return pm_max(computes ? all / 2 : all - OTHERS, 64);
}

/* A store that a chain may end in: of a large array, or one that may come from tensor memory. */
static bool is_candidate(const pm_graph *g, pm_opid op) {
  const pm_type *t;
  if (pm_get(g, op)->code != PM_OP_STORE) return false;
  t = pm_typeof(g, pm_in(g, op, 1));
  return is_large(g, pm_in(g, op, 1)) ||
         (t->kind == PM_ARRAY && t->rank == 2 && pm_type_size(t) > most_of_tmem(g, true) * LANES);
}

/* ---- which memory -------------------------------------------------------------------------- */

/* The argument or allocation at the base of a view; 0: not known */
static pm_val root_of(const pm_graph *g, pm_val ref) {
  for (;;) {
    const pm_opid def = pm_value_of(g, ref)->def;
    if (!def) break;
    const int code = pm_get(g, def)->code;
    if (pm_allocates(g, def, PM_SMEM)) return *pm_attr(g, def, PM_ATTR_UNION) ? 0 : ref;
    if (!pm_makes_view(code) || code == PM_OP_CLUSTER_REF) return 0;
    ref = pm_in(g, def, 0);
  }
  const pm_value *v = pm_value_of(g, ref);
  if (v->block != 1) return 0; /* carried by a loop */
  const int64_t output = (int64_t)v->index - g->n_operands;
  if (output >= 0 && output < g->n_outputs && g->alias && g->alias[output] >= 0)
    return g->blocks.at[1].arg + (pm_val)g->alias[output];
  return ref;
}

static bool is_operand(const pm_graph *g, pm_val root) {
  const pm_value *v = pm_value_of(g, root);
  return !v->def && v->block == 1 && v->index < g->n_operands;
}

/* May a write through one ref change what the other reads or writes at a different index? An
 * operand that is written may have been passed twice. */
static bool may_overlap(const pm_graph *g, pm_val written, pm_val other) {
  if (written == other) return false;
  const pm_val a = root_of(g, written), b = root_of(g, other);
  return !a || !b || a == b || (is_operand(g, a) && is_operand(g, b));
}

/* ---- is it a chain? ------------------------------------------------------------------------ */

static bool takes_strips(chain *c, pm_val v, int dim);

/* Slices of a ref along a dimension that the user tiled are whole tiles. */
static void keep_tiles(chain *c, pm_val ref) {
  pm_view v;
  pm_err ignored;
  const bool smem = pm_typeof(c->g, ref)->space == PM_SMEM;
  if (smem && c->tile % ROWS) c->tile *= ROWS;
  if (!smem || pm_view_of(c->g, ref, true, &v, &ignored) || c->dim >= v.rank) return;
  const int64_t t = v.dim[c->dim].tile;
  if (t > 1 && c->tile % t) c->tile = t % c->tile ? c->tile * t : t;
}

static bool load_takes_strips(chain *c, pm_opid op) {
  const pm_graph *g = c->g;
  const uint32_t at = pm_position(g, op);
  const pm_val ref = pm_in(g, op, 0);
  if (*pm_attr(g, op, PM_ATTR_LAYOUT)) return false;
  keep_tiles(c, ref);
  c->first_load = (uint32_t)pm_min(c->first_load, at);
  for (uint32_t k = 0; k < c->n_stores; k++) {
    const pm_val to = pm_in(g, c->store[k], 0);
    if (may_overlap(g, to, ref)) return false;
    if (to == ref && at > pm_position(g, c->store[k])) return false;
  }
  return true;
}

/* The layout of registers that the user gave for `out`, for its first columns; 0: none. */
static pm_layid layout_of_columns(pm_graph *g, pm_opid op, int64_t columns) {
  const pm_layid given = (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT);
  const int64_t starts[2] = {0, 0};
  pm_type to = *pm_typeof(g, pm_get(g, op)->out);
  to.dim[1] = columns;
  return given ? pm_layout_slice(g, given, starts, &to) : 0;
}

/* Columns of an accumulator of 128 rows. */
static bool columns_take_strips(chain *c, pm_opid op, int dim) {
  pm_graph *g = c->g;
  const pm_opid alloc = pm_tmem_alloc(g, pm_in(g, op, 0));
  const pm_type *t = pm_typeof(g, pm_get(g, op)->out);
  if (!alloc || dim != 1 || t->dim[1] % 8) return false;
  if (*pm_attr(g, op, PM_ATTR_TMEM_REDUCE) || pm_tmem_of(g, alloc).layout != PM_TMEM_DEFAULT)
    return false;
  if (*pm_attr(g, op, PM_ATTR_LAYOUT) && !layout_of_columns(g, op, ROWS)) return false;
  c->first_load = (uint32_t)pm_min(c->first_load, pm_position(g, op));
  if (c->tile % ROWS) c->tile *= ROWS;
  return c->tmem = true;
}

static bool broadcast_takes_strips(chain *c, pm_opid op, int dim) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(c->g, op, PM_ATTR_DIMS, &n);
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] == dim) return takes_strips(c, pm_in(c->g, op, 0), (int)k);
  }
  return !is_large(c->g, pm_in(c->g, op, 0));
}

/* Can strips of v along dim be computed alone? Counts the uses of values within the chain. */
static bool takes_strips(chain *c, pm_val v, int dim) {
  const pm_graph *g = c->g;
  const pm_type *t = pm_typeof(g, v);
  const pm_opid op = pm_value_of(g, v)->def;
  if (!t->rank) return true;
  if (!op || pm_get(g, op)->parent != c->block) return false;
  if (c->inside[v]++) return true;
  const pm_op *o = pm_get(g, op);
  const pm_op_info *info = &pm_ops[o->code];
  c->bits = pm_max(c->bits, pm_dtypes[t->dtype].bits);
  if (pm_is_pure(o->code) && !o->n_in) /* a constant or an iota */
    return !pm_has_attr(g, op, PM_ATTR_LAYOUT) || !*pm_attr(g, op, PM_ATTR_LAYOUT);
  switch (info->layout) {
    case PM_LAY_LOAD: return load_takes_strips(c, op);
    case PM_LAY_TMEM: return columns_take_strips(c, op, dim);
    case PM_LAY_BROADCAST: return broadcast_takes_strips(c, op, dim);
    case PM_LAY_PACK: return dim != t->rank - 1 && takes_strips(c, pm_in(g, op, 0), dim);
    default: break;
  }
  if (info->layout != PM_LAY_POINTWISE || !pm_is_pure(o->code)) return false;
  if (info->n_attrs && !pm_has_attr(g, op, PM_ATTR_EXACT)) return false;
  c->computes |= o->code != PM_OP_CONVERT;
  for (uint32_t k = 0; k < o->n_in; k++)
    if (!takes_strips(c, pm_in(g, op, k), dim)) return false;
  return true;
}

/* Large values of the chain that are also used elsewhere */
static bool is_wanted_elsewhere(const chain *c) {
  for (pm_val v = 1; v < c->n_values; v++)
    if (c->inside[v] && c->inside[v] != c->uses[v] &&
        exceeds(c->g, v, c->tmem ? STRIP : MOST_WORDS))
      return true;
  return false;
}

static bool waits_for_loads(const pm_graph *g, pm_opid op) {
  return pm_get(g, op)->code == PM_OP_WAIT_LOAD_TMEM;
}

static bool has_no_effect_but_loads(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  return pm_ops[o->code].layout == PM_LAY_LOAD ||
         (pm_ops[o->code].layout == PM_LAY_TMEM && o->n_out) ||
         (pm_is_pure(o->code) && !o->n_regions);
}

/* The stores from position `at` on that can form one chain. */
static void gather_stores(chain *c, uint32_t at) {
  const pm_graph *g = c->g;
  const pm_block *b = &g->blocks.at[c->block];
  const pm_type *first = pm_typeof(g, pm_in(g, b->ops.at[at], 1));
  for (c->first_store = at; at < b->ops.n && c->n_stores < MOST_STORES; at++) {
    const pm_opid op = b->ops.at[at];
    if (pm_get(g, op)->code != PM_OP_STORE) {
      if (!has_no_effect_but_loads(g, op)) break;
      continue;
    }
    const pm_type *t = pm_typeof(g, pm_in(g, op, 1));
    bool fits = t->rank == first->rank && !memcmp(t->dim, first->dim, sizeof(int64_t) * t->rank);
    for (uint32_t k = 0; k < c->n_stores; k++) {
      const pm_val to = pm_in(g, c->store[k], 0);
      fits &= to != pm_in(g, op, 0) && !may_overlap(g, to, pm_in(g, op, 0));
    }
    if (!fits) break;
    c->store[c->n_stores++] = op;
  }
}

/* Extent of a strip: preferably a divisor of the dimension such that all lanes have the same number
 * of whole 16-byte words. */
static void choose_strip(chain *c, const pm_type *t) {
  int64_t row = 1;
  for (int d = 0; d < t->rank; d++) row *= d == c->dim ? 1 : t->dim[d];
  const int64_t extent = t->dim[c->dim], even = LANES * 128 / pm_max(c->bits, 8);
  const int64_t most = pm_max(STRIP * LANES * 32 / pm_max(c->bits, 1) / row, c->tile);
  const int64_t n = pm_min(most, extent);
  int best = -1;
  for (int64_t d = n; d >= 1 && d >= n / 2; d--) {
    if (d % c->tile) continue;
    const int score = 2 * (d * row % even == 0) + (extent % d == 0);
    if (score > best) c->strip = d;
    best = pm_max(best, score);
  }
}

/* Do the first stores that were collected form a chain along c->dim? */
static bool is_chain(chain *c) {
  const pm_graph *g = c->g;
  const pm_type *t = pm_typeof(g, pm_in(g, c->store[0], 1));
  if (t->dim[c->dim] == 1) return false;
  memset(c->inside, 0, sizeof(uint32_t) * c->n_values);
  c->first_load = c->first_store;
  c->bits = c->strip = 0;
  c->tmem = c->computes = false;
  c->tile = 1;
  for (uint32_t k = 0; k < c->n_stores; k++) keep_tiles(c, pm_in(g, c->store[k], 0));
  for (uint32_t k = 0; k < c->n_stores; k++)
    if (!takes_strips(c, pm_in(g, c->store[k], 1), c->dim)) return false;
  if (is_wanted_elsewhere(c)) return false;
  for (uint32_t k = c->first_load; k < c->first_store; k++) {
    const pm_opid op = g->blocks.at[c->block].ops.at[k];
    if (!has_no_effect_but_loads(g, op) && !(c->tmem && waits_for_loads(g, op))) return false;
  }
  const int64_t words = pm_type_size(t) / LANES * c->bits / 32;
  if (!is_large(g, pm_in(g, c->store[0], 1)) && !(c->tmem && words > most_of_tmem(g, c->computes)))
    return false;
  choose_strip(c, t);
  return c->strip && c->strip < t->dim[c->dim];
}

/* As many stores as possible, along the first dimension that is possible. */
static bool find_chain(chain *c, uint32_t at) {
  gather_stores(c, at);
  const int rank = pm_typeof(c->g, pm_in(c->g, c->store[0], 1))->rank;
  for (; c->n_stores; c->n_stores--) {
    c->last_store = pm_position(c->g, c->store[c->n_stores - 1]);
    for (c->dim = 0; c->dim < rank; c->dim++)
      if (is_chain(c)) return true;
  }
  return false;
}

/* ---- the loop ------------------------------------------------------------------------------ */

typedef struct maker {
  chain *c;
  pm_builder b;
  pm_val *now;  /* per value of the chain: its strip */
  pm_val start; /* int32 scalar */
  int64_t extent;
  pm_code code;
} maker;

static pm_val emit(maker *m, pm_opcode code, const pm_val *in, uint32_t n_in, const pm_type *type,
                   const pm_attr_arg *attrs, uint32_t n_attrs) {
  pm_opid op = 0;
  if (!m->code) m->code = pm_emit(&m->b, code, in, n_in, type, attrs, n_attrs, &op, m->c->err);
  return m->code ? 0 : pm_get(m->b.g, op)->out;
}

static pm_val number(maker *m, int64_t i) {
  const pm_type type = pm_scalar_type(PM_I32);
  const pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = i};
  return emit(m, PM_OP_CONST, NULL, 0, &type, &value, 1);
}

static pm_val strip_of_ref(maker *m, pm_val ref, int dim) {
  const pm_type *t = pm_typeof(m->b.g, ref);
  int64_t starts[PM_MAX_RANK] = {0}, sizes[PM_MAX_RANK];
  const pm_val in[2] = {ref, m->start};
  memcpy(sizes, t->dim, sizeof sizes);
  starts[dim] = PM_DYNAMIC;
  sizes[dim] = m->extent;
  const pm_attr_arg attrs[2] = {{.id = PM_ATTR_STARTS, .list = starts, .n = t->rank},
                                {.id = PM_ATTR_SIZES, .list = sizes, .n = t->rank}};
  return emit(m, PM_OP_INDEX, in, 2, NULL, attrs, 2);
}

static pm_val strip_of(maker *m, pm_val v, int dim);

static pm_val strip_of_iota(maker *m, pm_opid op, const pm_type *type, int dim) {
  const pm_attr_arg along = {.id = PM_ATTR_DIM, .i = *pm_attr(m->b.g, op, PM_ATTR_DIM)};
  const pm_val i = emit(m, PM_OP_IOTA, NULL, 0, type, &along, 1);
  if (along.i != dim) return i;
  const pm_type scalar = pm_scalar_type((pm_dtype)type->dtype);
  const pm_val from =
      type->dtype == PM_I32 ? m->start : emit(m, PM_OP_CONVERT, &m->start, 1, &scalar, NULL, 0);
  const pm_val in[2] = {i, from};
  return emit(m, PM_OP_ADD, in, 2, NULL, NULL, 0);
}

static pm_val strip_of_broadcast(maker *m, pm_opid op, const pm_type *type, int dim) {
  pm_graph *g = m->b.g;
  uint32_t n;
  int64_t dims[PM_MAX_RANK];
  const int64_t *list = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  memcpy(dims, list, sizeof(int64_t) * n);
  pm_val in = pm_in(g, op, 0);
  for (uint32_t k = 0; k < n; k++)
    if (dims[k] == dim) in = strip_of(m, in, (int)k);
  const pm_attr_arg along = {.id = PM_ATTR_DIMS, .list = dims, .n = n};
  return emit(m, PM_OP_BROADCAST, &in, 1, type, &along, 1);
}

/* The strip of v along dim that starts at m->start. */
static pm_val strip_of(maker *m, pm_val v, int dim) {
  pm_graph *g = m->b.g;
  pm_type type = *pm_typeof(g, v);
  if (!type.rank) return v;
  if (m->now[v]) return m->now[v];
  const pm_opid op = pm_value_of(g, v)->def;
  const uint32_t n_in = pm_get(g, op)->n_in;
  const int code = pm_get(g, op)->code;
  pm_val in[4] = {0}, made;
  type.dim[dim] = m->extent;
  m->b.file = pm_get(g, op)->file;
  m->b.line = pm_get(g, op)->line;
  if (pm_has_attr(g, op, PM_ATTR_VALUE)) {
    const pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = *pm_attr(g, op, PM_ATTR_VALUE)};
    made = emit(m, (pm_opcode)code, NULL, 0, &type, &value, 1);
  } else if (code == PM_OP_IOTA) {
    made = strip_of_iota(m, op, &type, dim);
  } else if (pm_rule_of(g, op) == PM_LAY_LOAD) {
    const pm_attr_arg optimized = {.id = PM_ATTR_OPTIMIZED,
                                   .i = *pm_attr(g, op, PM_ATTR_OPTIMIZED)};
    in[0] = strip_of_ref(m, pm_in(g, op, 0), dim);
    made = emit(m, (pm_opcode)code, in, 1, NULL, &optimized, 1);
  } else if (pm_rule_of(g, op) == PM_LAY_TMEM) {
    const pm_attr_arg layout = {.id = PM_ATTR_LAYOUT, .i = layout_of_columns(g, op, m->extent)};
    in[0] = strip_of_ref(m, pm_in(g, op, 0), dim);
    made = emit(m, (pm_opcode)code, in, 1, NULL, &layout, 1);
  } else if (pm_rule_of(g, op) == PM_LAY_BROADCAST) {
    made = strip_of_broadcast(m, op, &type, dim);
  } else {
    for (uint32_t k = 0; k < n_in; k++) in[k] = strip_of(m, pm_in(g, op, k), dim);
    m->b.file = pm_get(g, op)->file;
    m->b.line = pm_get(g, op)->line;
    const bool divides = pm_has_attr(g, op, PM_ATTR_EXACT);
    const pm_attr_arg exact = {.id = PM_ATTR_EXACT,
                               .i = divides ? *pm_attr(g, op, PM_ATTR_EXACT) : 0};
    made = emit(m, (pm_opcode)code, in, n_in, &type, &exact, divides);
  }
  if (!m->code) pm_value_of(g, made)->name = pm_value_of(g, v)->name;
  return m->now[v] = made;
}

/* Compute all values of one strip, then its stores. */
static void make_strip(maker *m, pm_val start, int64_t extent) {
  chain *c = m->c;
  pm_val x[MOST_STORES];
  m->start = start;
  m->extent = extent;
  memset(m->now, 0, sizeof(pm_val) * c->n_values);
  for (uint32_t k = 0; k < c->n_stores; k++)
    x[k] = strip_of(m, pm_in(c->g, c->store[k], 1), c->dim);
  for (uint32_t k = 0; k < c->n_stores && !m->code; k++) {
    m->b.file = pm_get(c->g, c->store[k])->file;
    m->b.line = pm_get(c->g, c->store[k])->line;
    const pm_val in[2] = {strip_of_ref(m, pm_in(c->g, c->store[k], 0), c->dim), x[k]};
    pm_opid op;
    if (!m->code) m->code = pm_emit(&m->b, PM_OP_STORE, in, 2, NULL, NULL, 0, &op, c->err);
  }
}

static void make_loop(maker *m, int64_t trips) {
  pm_opid loop;
  const pm_builder outer = m->b;
  const pm_val in[2] = {number(m, 0), number(m, trips)};
  const pm_attr_arg unroll = {.id = PM_ATTR_UNROLL, .i = 1};
  if (m->code || (m->code = pm_open(&m->b, PM_OP_FOR, in, 2, 1, &unroll, 1, &loop, m->c->err)))
    return;
  m->b.block = pm_region(m->b.g, loop, 0);
  const pm_val index = m->b.g->blocks.at[m->b.block].arg;
  const pm_val by[2] = {index, number(m, m->c->strip)};
  make_strip(m, emit(m, PM_OP_MUL, by, 2, NULL, NULL, 0), m->c->strip);
  if (!m->code) m->code = pm_yield(&m->b, NULL, 0, m->c->err);
  m->b = outer;
  if (!m->code) m->code = pm_close(&m->b, loop, m->c->err);
}

/* Move the ops from position n on to the last store, with waits after them, and remove the stores.
 */
static void put_in_place(chain *c, uint32_t n) {
  pm_block *b = &c->g->blocks.at[c->block];
  const uint32_t total = b->ops.n, made = total - n;
  pm_opid *order = PM_NEW(c->g->arena, pm_opid, total);
  uint32_t out = 0;
  pm_opid wait = 0;
  for (uint32_t k = 0; k < n; k++) {
    bool gone = false;
    if (c->tmem && k >= c->first_load && k < c->last_store && waits_for_loads(c->g, b->ops.at[k])) {
      wait = b->ops.at[k];
      continue;
    }
    for (uint32_t s = 0; s < c->n_stores; s++) gone |= c->store[s] == b->ops.at[k];
    if (!gone) order[out++] = b->ops.at[k];
    if (k != c->last_store) continue;
    memcpy(order + out, b->ops.at + n, sizeof(pm_opid) * made);
    out += made;
    if (wait) order[out++] = wait;
  }
  memcpy(b->ops.at, order, sizeof(pm_opid) * out);
  b->ops.n = out;
}

static pm_code loop_over(chain *c) {
  pm_graph *g = c->g;
  const pm_opid yield = c->block == 1 ? 0 : pm_terminator(g, c->block);
  if (yield) g->blocks.at[c->block].ops.n--; /* the builder appends to open blocks */
  const uint32_t n = g->blocks.at[c->block].ops.n;
  const pm_op *o = pm_get(g, c->store[0]);
  const int64_t extent = pm_typeof(g, pm_in(g, c->store[0], 1))->dim[c->dim];
  maker m = {.c = c,
             .b = {.g = g, .block = c->block, .file = o->file, .line = o->line},
             .now = PM_NEW(g->arena, pm_val, c->n_values)};
  make_loop(&m, extent / c->strip);
  if (extent % c->strip && !m.code)
    make_strip(&m, number(&m, extent / c->strip * c->strip), extent % c->strip);
  if (m.code) return m.code;
  put_in_place(c, n);
  if (yield) pm_vec_push(g->arena, &g->blocks.at[c->block].ops, yield);
  return PM_OK;
}

/* ---- the walk ------------------------------------------------------------------------------ */

static void count_uses(pm_graph *g, pm_opid op, void *ctx) {
  uint32_t *uses = ctx;
  for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) uses[pm_in(g, op, k)]++;
}

static pm_code walk(pm_graph *g, pm_blk block, bool *changed, pm_err *err) {
  for (uint32_t at = 0; at < g->blocks.at[block].ops.n; at++) {
    const pm_opid op = g->blocks.at[block].ops.at[at];
    const int code = pm_get(g, op)->code;
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions && !pm_maps_warps(code); r++) {
      pm_code failed = walk(g, pm_region(g, op, r), changed, err);
      if (failed) return failed;
    }
    if (!is_candidate(g, op)) continue;
    const uint32_t n = g->values.n;
    chain c = {.g = g, .err = err, .block = block, .n_values = n};
    c.uses = PM_NEW(g->arena, uint32_t, n);
    c.inside = PM_NEW(g->arena, uint32_t, n);
    pm_walk(g, 1, count_uses, c.uses);
    if (!find_chain(&c, at)) continue;
    pm_code failed = loop_over(&c);
    if (failed) return failed;
    *changed = true;
    at = c.first_store - 1; /* the loop is there now, and values in it may be large */
  }
  return PM_OK;
}

pm_code pm_loop_over_strips(pm_graph *g, const pm_target *t, pm_err *err) {
  bool any = false, changed = false;
  (void)t;
  for (pm_opid op = 1; op < g->ops.n && !any; op++) any = is_candidate(g, op);
  if (!any || walk(g, 1, &changed, err)) return err->code;
  return changed ? pm_simplify(g, err) : PM_OK;
}

/* ---- warnings ------------------------------------------------------------------------------ */

/* Once for each line of the user's source */
static void warn_of_results(pm_graph *g, pm_opid op, void *ctx) {
  pm_opid *last = ctx;
  const pm_op *o = pm_get(g, op), *before = pm_get(g, *last);
  for (pm_val v = o->out; v < o->out + o->n_out; v++) {
    const pm_type *type = pm_typeof(g, v);
    const pm_layid id = pm_value_of(g, v)->layout;
    if (type->kind != PM_ARRAY || !type->rank || !id) continue;
    const int64_t words = words_of(type, pm_layout_regs(pm_layout_of(g, id)));
    if (words <= MOST_WORDS || (*last && o->line == before->line && o->file == before->file))
      continue;
    *last = op;
    before = o;
    pm_vec_push(
        g->arena, &g->warnings,
        pm_printf(g->arena,
                  "%s:%u: %s: %s in layout %s takes %lld registers a lane, of %d that there are: "
                  "it will be in local memory, which is slow. Load and store parts of the ref in "
                  "a loop (lax.fori_loop with ref.at[pl.ds(i * 64, 64)]), or give each block a "
                  "part (grid and BlockSpec)",
                  o->line ? g->strings.at[o->file] : "<unknown>", o->line, pm_op_name(o->code),
                  pm_type_text(g->arena, type), pm_layout_text(g->arena, pm_layout_of(g, id)),
                  (long long)words, MOST_WORDS));
  }
}

pm_code pm_warn_large(pm_graph *g, const pm_target *t, pm_err *err) {
  pm_opid last = 0;
  (void)t;
  (void)err;
  pm_walk(g, 1, warn_of_results, &last);
  return PM_OK;
}
