/* Programs that compute on more rows than fit in the registers of a warpgroup are split into
 * several programs.
 *
 * The accumulators of a loop with products of 128 rows and more may need more registers than a lane
 * has. If rows are independent, two programs can compute half of the rows each. The grid gets one
 * more axis; its index times the rows of a part is where the part starts.
 *
 * One walk marks which dimension of each value counts rows, starting from the accumulators, until
 * nothing changes. Element-wise ops, moves and control flow propagate marks in both directions, `a`
 * of a product takes the mark of the accumulator, loads and stores pass theirs to their masks. The
 * rest is unaffected: `b` of a product, scalars, addresses. An op that mixes rows, or that is not
 * safe to execute twice, ends the attempt, and the kernel is left unchanged. */
#include "passes.h"

enum {
  MOST = 160, /* accumulators of one loop: registers of a lane */
  LANES = 128,
  LEAST = 64, /* rows of a product */
  MOST_BLOCKS = 65535
};

typedef struct splitter {
  pm_graph *g;
  int8_t *row; /* by value: 1 + the dimension that counts rows; 0: none does */
  int64_t rows, parts;
  bool grew, failed;
  bool *written, *read; /* by value: accessed arguments of the kernel */
} splitter;

static uint16_t code_of(const pm_graph *g, pm_opid op) { return pm_get(g, op)->code; }

/* Unrelated ops share arrays that are made of nothing, constants and iotas. Each use gets its own,
 * and the next simplification merges them again. */
static void own_sources(pm_graph *g, pm_opid op) {
  for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    const pm_opid def = pm_value_of(g, v)->def;
    if (!def || pm_get(g, def)->n_in || !pm_is_pure(code_of(g, def)) || !pm_typeof(g, v)->rank)
      continue;
    const pm_blk block = pm_get(g, op)->parent;
    const pm_opid copy = pm_insert_like(g, block, pm_position(g, op), def, NULL);
    g->operands.at[pm_get(g, op)->in + k] = pm_get(g, copy)->out;
  }
}

/* ---- which loop --------------------------------------------------------------------------- */

static int64_t accumulators(const pm_graph *g, pm_blk block, int64_t *rows) {
  int64_t n = 0;
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    if (pm_allocates(g, op, PM_ACC)) {
      const pm_type *t = pm_typeof(g, pm_get(g, op)->out);
      n += pm_type_size(t) / LANES;
      *rows = !*rows || *rows == t->dim[0] ? t->dim[0] : -1;
    }
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++)
      n += accumulators(g, pm_region(g, op, r), rows);
  }
  return n;
}

static void mark(splitter *s, pm_val v, int dim) {
  const pm_type *t = pm_typeof(s->g, v);
  if (dim < 0 || !t->rank) return;
  if (s->row[v] == dim + 1) return;
  if (s->row[v] || t->dim[dim] != s->rows) {
    s->failed = true;
    return;
  }
  s->row[v] = (int8_t)(dim + 1);
  s->grew = true;
}

static int row_of(const splitter *s, pm_val v) { return s->row[v] - 1; }

/* Both have the same rows, along dims that correspond. */
static void tie(splitter *s, pm_val a, pm_val b) {
  if (!pm_typeof(s->g, a)->rank || !pm_typeof(s->g, b)->rank) return;
  mark(s, a, row_of(s, b));
  mark(s, b, row_of(s, a));
}

/* The largest number of parts that a loop needs; marks its accumulators. */
static void find_loops(pm_graph *g, pm_opid op, void *ctx) {
  splitter *s = ctx;
  int64_t rows = 0;
  if (!pm_has_index(pm_get(g, op)) || s->rows) return;
  const int64_t n = accumulators(g, pm_region(g, op, 0), &rows);
  if (n < MOST || rows < 2 * LEAST || rows % LEAST) return;
  s->rows = rows;
  for (s->parts = 2; n / s->parts >= MOST && rows % (s->parts * 2 * LEAST) == 0;) s->parts *= 2;
}

static void seed(pm_graph *g, pm_opid op, void *ctx) {
  splitter *s = ctx;
  const pm_val out = pm_get(g, op)->out;
  if (pm_allocates(g, op, PM_ACC) && pm_typeof(g, out)->dim[0] == s->rows) mark(s, out, 0);
}

/* ---- marks -------------------------------------------------------------------------------- */

/* The dim of `to` that corresponds to a dim of `from`, if a reshape only adds or drops dims of size
 * 1. */
static int through_reshape(const pm_type *from, const pm_type *to, int dim) {
  int i = 0, k = 0;
  for (;; i++, k++) {
    while (i < from->rank && from->dim[i] == 1) i++;
    while (k < to->rank && to->dim[k] == 1) k++;
    if (i == from->rank || k == to->rank || from->dim[i] != to->dim[k]) return -1;
    if (i == dim) return k;
  }
}

/* The corresponding dim on the other side of a move: of the result, or backwards of the operand;
 * -1: none, -2: the dim is lost. */
static int moved(const pm_graph *g, pm_opid op, int dim, bool back) {
  const pm_type *from = pm_typeof(g, pm_in(g, op, 0)), *to = pm_typeof(g, pm_get(g, op)->out);
  uint32_t n;
  if (pm_rule_of(g, op) == PM_LAY_RESHAPE) {
    const int k = back ? through_reshape(to, from, dim) : through_reshape(from, to, dim);
    return k < 0 ? -2 : k;
  }
  if (pm_rule_of(g, op) == PM_LAY_SLICE) {
    const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
    return !starts[dim] && from->dim[dim] == to->dim[dim] ? dim : -2;
  }
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  if (pm_rule_of(g, op) == PM_LAY_REDUCE) {
    int k = dim;
    for (uint32_t i = 0; i < n; i++) {
      if (dims[i] == dim && !back) return -2;
      if (!back && dims[i] < dim) k--;
    }
    for (int d = 0; back && d <= k; d++) {
      for (uint32_t i = 0; i < n; i++) k += dims[i] == d;
    }
    return k;
  }
  for (uint32_t k = 0; k < n; k++) { /* BROADCAST: dims[k] is dim k; TRANSPOSE: dim dims[k] */
    const bool broadcast = pm_rule_of(g, op) == PM_LAY_BROADCAST;
    if (broadcast && !back && (int)k == dim) return (int)dims[k];
    if (broadcast && back && dims[k] == dim) return from->dim[k] == 1 ? -1 : (int)k;
    if (!broadcast && !back && dims[k] == dim) return (int)k;
    if (!broadcast && back && (int)k == dim) return (int)dims[k];
  }
  return -1;
}

static void mark_moved(splitter *s, pm_opid op) {
  const pm_val in = pm_in(s->g, op, 0), out = pm_get(s->g, op)->out;
  if (!pm_typeof(s->g, in)->rank) return;
  if (s->row[in]) {
    const int dim = moved(s->g, op, row_of(s, in), false);
    s->failed |= dim < 0;
    mark(s, out, dim);
  }
  if (s->row[out]) {
    const int dim = moved(s->g, op, row_of(s, out), true);
    s->failed |= dim == -2;
    mark(s, in, dim);
  }
}

static void mark_control(splitter *s, pm_opid op) {
  pm_graph *g = s->g;
  const pm_op *o = pm_get(g, op);
  const bool loop = pm_has_index(o);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (loop) tie(s, o->out + k, pm_in(g, op, o->n_in - o->n_out + k));
    for (uint32_t r = 0; r < o->n_regions; r++) {
      const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
      if (loop) tie(s, o->out + k, b->arg + b->n_args - o->n_out + k);
      tie(s, o->out + k, pm_in(g, pm_terminator(g, pm_region(g, op, r)), k));
    }
  }
}

static bool any_marked(const splitter *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (s->row[o->out + k]) return true;
  }
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (s->row[pm_in(s->g, op, k)]) return true;
  }
  return false;
}

/* The arrays of a load or store; its ref is not an array and is split later. */
static void mark_access(splitter *s, pm_opid op) {
  const pm_graph *g = s->g;
  const pm_op *o = pm_get(g, op);
  uint32_t first = 0;
  pm_val like = o->n_out ? o->out : 0;
  for (uint32_t k = 1; k < o->n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    if (!pm_typeof(g, v)->rank) continue;
    if (!like) like = v, first = k;
    if (k != first) tie(s, like, v);
  }
  const bool gmem = pm_typeof(g, pm_in(g, op, 0))->space == PM_GMEM;
  if (like && s->row[like] && !gmem) s->failed = true;
}

/* Ops with effects that each part can have for itself. */
static bool is_accepted(int code) {
  switch (code) {
    case PM_OP_FOR:
    case PM_OP_IF:
    case PM_OP_SCOPE:
    case PM_OP_YIELD:
    case PM_OP_ALLOC_ACC:
    case PM_OP_ALLOC_SMEM:
    case PM_OP_ACC_LOAD:
    case PM_OP_WGMMA:
    case PM_OP_WGMMA_WAIT:
    case PM_OP_COMMIT_SMEM: return true;
    default: return false;
  }
}

static void mark_op(splitter *s, pm_opid op) {
  pm_graph *g = s->g;
  const pm_op *o = pm_get(g, op);
  pm_access a;
  pm_val array;
  if (o->n_regions && is_accepted(o->code)) {
    mark_control(s, op);
    return;
  }
  if (pm_moves_array(g, op, &a, &array)) {
    mark_access(s, op);
    return;
  }
  switch (pm_rule_of(g, op)) {
    case PM_LAY_BROADCAST:
    case PM_LAY_RESHAPE:
    case PM_LAY_TRANSPOSE:
    case PM_LAY_SLICE:
    case PM_LAY_REDUCE: mark_moved(s, op); return;
    case PM_LAY_POINTWISE:
      for (uint32_t k = 0; k < o->n_in; k++) tie(s, o->out, pm_in(g, op, k));
      return;
    default: break;
  }
  switch (o->code) {
    case PM_OP_ALLOC_ACC:
      if (o->n_in) tie(s, o->out, pm_in(g, op, 0));
      return;
    case PM_OP_ACC_LOAD: tie(s, o->out, pm_in(g, op, 0)); return;
    case PM_OP_WGMMA:
      tie(s, pm_in(g, op, 0), pm_in(g, op, 1));
      s->failed |= s->row[pm_in(g, op, 2)] != 0;
      s->failed |= s->row[pm_in(g, op, 0)] && pm_typeof(g, pm_in(g, op, 1))->kind != PM_ARRAY;
      return;
    case PM_OP_CONST:
    case PM_OP_IOTA:
    case PM_OP_YIELD: return;
    default: s->failed |= any_marked(s, op);
  }
}

/* ---- may it be done? ---------------------------------------------------------------------- */

/* An array without rows would be stored twice. */
static void note_argument(splitter *s, const pm_access *a, pm_val array) {
  if (a->where != PM_IN_GMEM) return;
  (a->writes ? s->written : s->read)[pm_view_base(s->g, a->view)] = true;
  s->failed |= a->writes && !s->row[array];
}

static void check_op(pm_graph *g, pm_opid op, void *ctx) {
  splitter *s = ctx;
  const pm_op *o = pm_get(g, op);
  uint32_t n;
  pm_access a;
  pm_val array;
  mark_op(s, op);
  if (pm_moves_array(g, op, &a, &array)) note_argument(s, &a, array);
  else s->failed |= !pm_is_pure(o->code) && !is_accepted(o->code);
  if (pm_is_masked(o->code) && any_marked(s, op)) {
    pm_attr_list(g, op, PM_ATTR_DIMS, &n);
    if (n) s->failed = true;
  }
  if (o->n_out && s->row[o->out] && pm_has_attr(g, op, PM_ATTR_LAYOUT) &&
      *pm_attr(g, op, PM_ATTR_LAYOUT))
    s->failed = true;
}

static bool possible(splitter *s) {
  pm_graph *g = s->g;
  pm_walk(g, 1, seed, s);
  do {
    s->grew = false;
    for (pm_opid op = 1; op < g->ops.n && !s->failed; op++) {
      if (code_of(g, op)) mark_op(s, op);
    }
  } while (s->grew && !s->failed);
  if (!s->failed) pm_walk(g, 1, check_op, s);
  for (pm_val v = 1; v < g->values.n; v++) s->failed |= s->read[v] && s->written[v];
  for (uint32_t k = 0; k < g->n_outputs; k++) s->failed |= g->alias && g->alias[k] >= 0;
  return !s->failed;
}

/* ---- the parts ---------------------------------------------------------------------------- */

/* The rows of the part of a ref, for an access whose array is `like`. */
static void cut_ref(splitter *s, pm_opid op, pm_val like, pm_val start) {
  pm_graph *g = s->g;
  const pm_val ref = pm_in(g, op, 0);
  pm_type t = *pm_typeof(g, ref);
  int64_t starts[PM_MAX_RANK] = {0}, sizes[PM_MAX_RANK];
  const int dim = row_of(s, like);
  t.dim[dim] /= s->parts;
  memcpy(sizes, t.dim, sizeof sizes);
  starts[dim] = PM_DYNAMIC;
  const pm_attr_arg attrs[] = {{.id = PM_ATTR_STARTS, .list = starts, .n = t.rank},
                               {.id = PM_ATTR_SIZES, .list = sizes, .n = t.rank}};
  const pm_val in[] = {ref, start};
  const pm_val view = pm_insert_value(g, op, PM_OP_INDEX, in, 2, &t, attrs, 2, op);
  g->operands.at[pm_get(g, op)->in] = view;
}

/* The index of a row counts from the first row of all parts. */
static void shift_iota(splitter *s, pm_opid op, pm_val start) {
  pm_graph *g = s->g;
  const pm_val out = pm_get(g, op)->out;
  const pm_type t = *pm_typeof(g, out), scalar = pm_scalar_type(t.dtype);
  const pm_opid next = g->blocks.at[pm_get(g, op)->parent].ops.at[pm_position(g, op) + 1];
  pm_val in[] = {out, start};
  if (t.dtype != PM_I32)
    in[1] = pm_insert_value(g, next, PM_OP_CONVERT, &start, 1, &scalar, NULL, 0, next);
  const pm_val sum = pm_insert_value(g, next, PM_OP_ADD, in, 2, &t, NULL, 0, next);
  const pm_opid add = pm_value_of(g, sum)->def;
  for (pm_opid user = 1; user < g->ops.n; user++) {
    for (uint32_t k = 0; user != add && k < pm_get(g, user)->n_in; k++) {
      if (pm_in(g, user, k) == out) g->operands.at[pm_get(g, user)->in + k] = sum;
    }
  }
}

static void split(splitter *s) {
  pm_graph *g = s->g;
  const pm_val n_values = g->values.n;
  const pm_opid n_ops = g->ops.n, first = g->blocks.at[1].ops.at[0];
  const pm_type i32 = pm_scalar_type(PM_I32);
  const pm_attr_arg axis[] = {{.id = PM_ATTR_AXIS, .i = PM_AXIS_GRID},
                              {.id = PM_ATTR_DIM, .i = g->n_grid}};
  g->grid[g->n_grid++] = s->parts;
  pm_val in[2];
  in[0] = pm_insert_value(g, first, PM_OP_AXIS, NULL, 0, &i32, axis, 2, first);
  in[1] = pm_insert_number(g, first, s->rows / s->parts, first);
  const pm_val start = pm_insert_value(g, first, PM_OP_MUL, in, 2, &i32, NULL, 0, first);
  for (pm_val v = 1; v < n_values; v++) {
    if (s->row[v]) pm_value_of(g, v)->type.dim[row_of(s, v)] /= s->parts;
  }
  for (pm_opid op = 1; op < n_ops; op++) {
    pm_access a;
    pm_val array = pm_get(g, op)->out;
    const bool iota = code_of(g, op) == PM_OP_IOTA;
    if ((!iota && !pm_moves_array(g, op, &a, &array)) || !s->row[array]) continue;
    if (!iota) cut_ref(s, op, array, start);
    else if (*pm_attr(g, op, PM_ATTR_DIM) == row_of(s, array)) shift_iota(s, op, start);
  }
}

pm_code pm_split_rows(pm_graph *g, const pm_target *t, pm_err *err) {
  splitter s = {.g = g};
  (void)t, (void)err;
  if (g->n_threads > 1 || g->n_cluster || g->n_grid == PM_MAX_RANK || pm_shares_grid(g))
    return PM_OK;
  if (g->profile_words) return PM_OK; /* there is a trace for each block that the kernel says */
  if (g->n_grid && g->grid[g->n_grid - 1] > MOST_BLOCKS) return PM_OK;
  pm_walk(g, 1, find_loops, &s);
  if (!s.rows) return PM_OK;
  const pm_opid n_ops = g->ops.n;
  for (pm_opid op = 1; op < n_ops; op++) own_sources(g, op);
  s.row = PM_NEW(g->arena, int8_t, g->values.n);
  s.read = PM_NEW(g->arena, bool, g->values.n);
  s.written = PM_NEW(g->arena, bool, g->values.n);
  if (possible(&s)) split(&s);
  return PM_OK;
}
