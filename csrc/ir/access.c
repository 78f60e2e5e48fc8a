/* The roles of operands, and the accesses of ops: see access.h.
 *
 * One walk over the operand column gives an op's accesses. Refs, barriers and semaphores are
 * accesses if the column gives them a role; arrays are values. Source text (role '!') may read and
 * write whatever it gets, by the generic proxy. Three facts are not in the column: a wait that is
 * not told its phase advances the phase of its thread, an op with the effect COUNT advances a
 * counter, and an op or barrier with cluster axes reaches the blocks along them.
 *
 * A summary of a region merges equal accesses. It is made bottom-up, so that one table from views
 * to entries serves all of them, and each op of the kernel is visited once. */
#include "access.h"

#include <assert.h>

#include "view.h"

/* ---- operands ------------------------------------------------------------------------------- */

bool pm_meets(int code) {
  const pm_op_info *info = &pm_ops[code];
  return info->participants == PM_BY_WARPGROUP && (info->effects & (E_MEET | E_RELEASE)) == E_MEET;
}

bool pm_awaits_products(const pm_graph *g, pm_opid op, int64_t *n) {
  const uint16_t code = pm_get(g, op)->code;
  if (code != PM_OP_WGMMA_WAIT && code != PM_OP_ACC_LOAD) return false;
  *n = *pm_attr(g, op, PM_ATTR_N);
  return true;
}

/* ---- accesses ------------------------------------------------------------------------------- */

static uint8_t where_is(const pm_type *t) {
  switch (t->kind) {
    case PM_BARRIER: return PM_IN_BARRIER;
    case PM_SEMAPHORE: return PM_IN_SEMAPHORE;
    case PM_REF:
      return t->space == PM_GMEM   ? PM_IN_GMEM
             : t->space == PM_SMEM ? PM_IN_SMEM
             : t->space == PM_ACC  ? PM_IN_ACC
                                   : PM_IN_TMEM;
    default: return 0; /* an array: a value */
  }
}

/* An attribute of an op; 0: the op lacks it. */
static int64_t attr_of(const pm_graph *g, const pm_op *o, pm_attr_id id) {
  const int slot = pm_op_lookups[o->code].slot[id];
  return slot < 0 ? 0 : g->attrs.at[o->attr + (uint32_t)slot];
}

/* Is there more than one block along the axes of an op's attribute? */
static bool spans_blocks(const pm_graph *g, const pm_op *o) {
  if (attr_of(g, o, PM_ATTR_LEADER) || attr_of(g, o, PM_ATTR_PAIR)) return true;
  const int64_t *axis = &g->lists.at[attr_of(g, o, PM_ATTR_CLUSTER)];
  int64_t n = *axis++, blocks = 1;
  for (; n > 0; n--, axis++) blocks *= *axis < 0 ? 1 : g->cluster[*axis]; /* -1: a gap */
  return blocks > 1;
}

static bool has_peers(const pm_graph *g) {
  for (uint32_t k = 0; k < g->n_cluster; k++) {
    if (g->cluster[k] > 1) return true;
  }
  return false;
}

/* Does an access of SMEM or of a barrier reach other blocks? */
static bool leaves_block(const pm_graph *g, const pm_op *o, const pm_operand *how, pm_val view) {
  if (!has_peers(g)) return false;
  if (how->remote || spans_blocks(g, o)) return true;
  if (pm_typeof(g, view)->kind == PM_BARRIER) {
    const pm_opid alloc = pm_value_of(g, pm_view_base(g, view))->def;
    return how->role != '<' && spans_blocks(g, pm_get(g, alloc));
  }
  const pm_opid ref = pm_view_cluster(g, view);
  return ref && g->cluster[*pm_attr(g, ref, PM_ATTR_DIM)] > 1;
}

static uint8_t proxy_of(const pm_graph *g, const pm_op *o) {
  if (pm_op_lookups[o->code].slot[PM_ATTR_ENGINE] < 0) return PM_ASYNC;
  const int64_t engine = attr_of(g, o, PM_ATTR_ENGINE);
  return engine == PM_ENGINE_AUTO ? PM_UNKNOWN : engine == PM_ENGINE_PLAIN ? PM_GENERIC : PM_ASYNC;
}

static uint8_t certainty_of(const pm_graph *g, const pm_op *o, const pm_operand *how) {
  if (how->role == '!') return PM_UNTOLD;
  return attr_of(g, o, PM_ATTR_PREDICATED) || pm_is_masked(o->code) ? PM_MAY : PM_MUST;
}

/* Does an access of global memory reach other devices? */
static bool leaves_device(const pm_graph *g, const pm_operand *how, pm_val view) {
  return g->n_mesh && (how->everywhere || pm_view_device(g, view));
}

/* What an access of *a's view does there. A store that combines reads what is there. */
static void fill(const pm_graph *g, pm_access *a, const pm_operand *how, uint8_t where) {
  const pm_op *o = pm_get(g, a->op);
  const pm_val view = a->view;
  const bool memory = where & (PM_IN_MEMORY | PM_IN_ACC | PM_IN_TMEM);
  const bool reads = how->role != '>' || (memory && attr_of(g, o, PM_ATTR_COMBINE));
  const uint8_t certainty = certainty_of(g, o, how);
  const uint8_t proxy = how->async ? proxy_of(g, o) : PM_GENERIC;
  uint8_t scope = PM_THREAD;
  if (where & (PM_IN_SMEM | PM_IN_TMEM | PM_IN_BARRIER)) {
    scope = leaves_block(g, o, how, view) ? PM_CLUSTER : PM_BLOCK;
  } else if (where & (PM_IN_GMEM | PM_IN_SEMAPHORE) && leaves_device(g, how, view)) {
    scope = PM_PEERS;
  } else if (where & (PM_IN_GMEM | PM_IN_COUNTER)) {
    scope = PM_DEVICE;
  } else if (where == PM_IN_SEMAPHORE) {
    scope = pm_typeof(g, view)->space == PM_GMEM ? PM_DEVICE : PM_BLOCK;
  }
  a->where = where;
  a->reads = reads;
  a->writes = how->role != '<';
  a->proxy = proxy;
  a->scope = scope;
  a->certainty = certainty;
  a->completion = memory ? pm_ops[o->code].completion : PM_COMPLETES_NOW;
}

/* After the operands: a phase, a counter. */
static bool next_extra(const pm_graph *g, pm_access *a) {
  static const pm_operand advances = {.role = '='};
  const pm_op *o = pm_get(g, a->op);
  const pm_operand *first = pm_op_lookups[o->code].operand;
  const bool waits = first->letter == 'b' && first->role == '<' && o->n_in == 1;
  a->where = 0;
  if (a->extra++ || (!waits && !(pm_ops[o->code].effects & E_COUNT))) return false;
  a->view = waits ? pm_in(g, a->op, 0) : 0;
  fill(g, a, &advances, waits ? PM_IN_PHASE : PM_IN_COUNTER);
  return true;
}

bool pm_find_access(const pm_graph *g, pm_access *a) {
  const pm_op *o = pm_get(g, a->op);
  while (a->k < o->n_in) {
    const pm_operand *how = pm_operand_of(o->code, a->k++);
    if (!how->role) continue;
    a->view = pm_in(g, a->op, a->k - 1);
    const uint8_t where = where_is(pm_typeof(g, a->view));
    if (!where) continue;
    fill(g, a, how, where);
    return true;
  }
  return next_extra(g, a);
}

bool pm_moves_array(const pm_graph *g, pm_opid op, pm_access *a, pm_val *array) {
  *a = pm_accesses(op);
  if (!pm_next_access(g, a) || !(a->where & PM_IN_MEMORY)) return false;
  if (a->completion != PM_COMPLETES_NOW || a->reads == a->writes) return false;
  if (pm_operand_of(pm_get(g, op)->code, 0)->everywhere) return false;
  *array = a->writes ? pm_in(g, op, 1) : pm_get(g, op)->out;
  return true;
}

bool pm_by_lanes(const pm_access *a) {
  assert(a->proxy != PM_UNKNOWN);
  return a->proxy == PM_GENERIC;
}

/* ---- regions -------------------------------------------------------------------------------- */

pm_val pm_memory_of(const pm_graph *g, pm_val view) {
  const pm_val base = pm_view_base(g, view);
  const pm_value *v = pm_value_of(g, base);
  if (v->def || v->block != 1 || v->index < g->n_operands || !g->alias) return base;
  const int32_t operand = g->alias[v->index - g->n_operands];
  return operand < 0 ? base : g->blocks.at[1].arg + (pm_val)operand;
}

pm_summaries *pm_new_summaries(const pm_graph *g) {
  pm_summaries *s = PM_NEW(g->arena, pm_summaries, 1);
  s->g = g;
  s->of = PM_NEW(g->arena, pm_access_list, g->ops.n);
  s->first = PM_NEW(g->arena, uint32_t, g->values.n);
  return s;
}

/* A list that is being made: accesses of one view are linked, from s->first on. */
typedef struct entry {
  pm_access a;
  uint32_t next;           /* number of the next one of this view, plus 1; 0: none */
  uint32_t n_sure, region; /* regions in which it is MUST, the last of them plus 1 */
} entry;
typedef struct making {
  pm_summaries *s;
  PM_VEC(entry) all;
  uint32_t region; /* plus 1 */
  bool sure;       /* the region is always run */
} making;

static bool is_same(const pm_access *a, const pm_access *b) {
  return a->where == b->where && a->reads == b->reads && a->writes == b->writes &&
         a->proxy == b->proxy && a->scope == b->scope && a->completion == b->completion &&
         (a->certainty == PM_UNTOLD) == (b->certainty == PM_UNTOLD);
}

static void add(making *m, pm_access a) {
  uint32_t *link = &m->s->first[a.view];
  if (a.certainty == PM_MUST && !m->sure) a.certainty = PM_MAY;
  while (*link && !is_same(&m->all.at[*link - 1].a, &a)) link = &m->all.at[*link - 1].next;
  uint32_t number = *link;
  if (!number) {
    number = *link = m->all.n + 1; /* the push moves what link points to */
    pm_vec_push(m->s->g->arena, &m->all, ((entry){.a = a}));
  }
  entry *e = &m->all.at[number - 1];
  if (a.certainty < e->a.certainty) e->a.certainty = a.certainty;
  if (a.certainty != PM_MUST || e->region == m->region) return;
  e->region = m->region;
  e->n_sure++;
}

static void add_block(making *m, pm_blk block) {
  const pm_graph *g = m->s->g;
  const pm_block *b = &g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    pm_access a = pm_accesses(op);
    while (pm_next_access(g, &a)) add(m, a);
    if (!pm_get(g, op)->n_regions) continue;
    const pm_access_list *inside = &m->s->of[op];
    for (uint32_t i = 0; i < inside->all.n; i++) add(m, inside->all.at[i]);
  }
}

/* Is the region run whenever the op is? Of branches one is. */
static bool always_runs(const pm_graph *g, pm_opid op, uint32_t region) {
  pm_scalar lower, upper;
  if (!op || !pm_is_loop(pm_get(g, op)->code)) return true;
  if (!pm_has_index(pm_get(g, op))) return pm_is_condition(pm_get(g, op), region);
  return pm_constant(g, pm_in(g, op, 0), &lower) && pm_constant(g, pm_in(g, op, 1), &upper) &&
         lower.i < upper.i;
}

/* Regions inside are summarised first, since only one list can use s->first at a time. */
static void summarise_inside(pm_summaries *s, pm_blk block) {
  const pm_block *b = &s->g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) {
    if (pm_get(s->g, b->ops.at[k])->n_regions) pm_accesses_inside(s, b->ops.at[k]);
  }
}

const pm_access_list *pm_accesses_inside(pm_summaries *s, pm_opid op) {
  const pm_graph *g = s->g;
  pm_access_list *list = &s->of[op];
  const uint32_t n = op ? pm_get(g, op)->n_regions : 1;
  making m = {.s = s};
  if (list->known) return list;
  for (uint32_t r = 0; r < n; r++) summarise_inside(s, op ? pm_region(g, op, r) : 1);
  for (uint32_t r = 0; r < n; r++) {
    m.region = r + 1;
    m.sure = always_runs(g, op, r);
    add_block(&m, op ? pm_region(g, op, r) : 1);
  }
  const bool branches = op && pm_is_branch(pm_get(g, op)->code);
  pm_vec_reserve(g->arena, &list->all, m.all.n);
  for (uint32_t k = 0; k < m.all.n; k++) {
    entry *e = &m.all.at[k];
    if (e->a.certainty == PM_MUST && branches && e->n_sure < n) e->a.certainty = PM_MAY;
    pm_vec_push(g->arena, &list->all, e->a);
    s->first[e->a.view] = 0;
  }
  list->known = true;
  return list;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

/* How far the last element along a dimension is from the first. */
static int64_t reach_of(const pm_view_dim *d) {
  if (!d->tile || d->size <= d->tile) return (d->size - 1) * d->inner;
  return (d->size - 1) / d->tile * d->outer + (d->tile - 1) * d->inner;
}

/* The offset of a dynamic start: of how many elements at least, and at most; -1: of any. */
static void add_term(const pm_graph *g, const pm_term *t, int64_t *least, int64_t *most) {
  int64_t lo, hi;
  if (*most < 0 || !pm_range(g, t->val, &lo, &hi)) {
    *least = *most = -1;
    return;
  }
  *least += lo / t->div * t->mul;
  *most += hi / t->div * t->mul;
}

bool pm_access_bytes(const pm_graph *g, const pm_access *a, bool physical, int64_t *from,
                     int64_t *to) {
  const bool masked = pm_is_masked(pm_get(g, a->op)->code);
  pm_view v, whole;
  pm_err ignored = {0};
  if (masked ? pm_view_of_access(g, a->op, physical, &v, &ignored)
             : pm_view_of(g, a->view, physical, &v, &ignored))
    return false;
  if (pm_view_of(g, v.base, physical, &whole, &ignored)) return false;
  int64_t least = 0, most = 0, end = 1;
  for (uint32_t k = 0; k < whole.rank; k++) end += reach_of(&whole.dim[k]);
  for (uint32_t k = 0; k < v.n_terms; k++) add_term(g, &v.term[k], &least, &most);
  *from = most < 0 ? 0 : v.offset + least;
  *to = most < 0 ? end : v.offset + most + 1;
  for (uint32_t k = 0; k < v.rank; k++) *to += reach_of(&v.dim[k]);
  for (uint32_t k = 0; k < v.n_index; k++) *to += reach_of(&v.index[k].dim);
  const int64_t bytes = pm_dtypes[v.dtype].bytes, unit = physical && v.swizzle ? v.swizzle : 1;
  *from = pm_max(*from, 0) * bytes / unit * unit; /* a swizzle moves bytes within so many */
  *to = pm_round_up(pm_min(*to, end) * bytes, unit);
  return true;
}
