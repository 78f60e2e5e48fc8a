/* Warnings for a fence or a wait that is missing on every path of one thread.
 *
 * One forward walk keeps what is pending for sure: plain stores to SMEM without a proxy fence
 * since, copies and products in flight. An access that meets one of them goes wrong whatever other
 * threads do. So nothing is assumed about the others: whenever the thread learns from them (at
 * waits, semaphores, named barriers, inline source), all is forgotten, since one of them may have
 * fenced or waited in its place. A wait for some copies or products counts as one for all. What is
 * pending after branches was so in each of them; of a loop, only the first iteration is looked at.
 * Two accesses meet for sure if one is of the whole allocation, both are of the same view, or both
 * are of dense parts that are known and overlap; if each is of the whole of an allocation, also
 * where the allocations share bytes. Of arrays of indices it is not known which elements they name,
 * but that there are some.
 *
 * The graph is synchronised: fences that passes/sync.c placed are there. */
#include "passes.h"

typedef enum pending_kind {
  STORED,      /* SMEM, by the lanes */
  LOADING,     /* SMEM, by a copy that completes on a barrier */
  LOADED_FROM, /* GMEM, by such a copy */
  STORING,     /* GMEM, by a copy of a bulk group */
  STORED_FROM, /* SMEM, by such a copy */
  FETCHING,    /* SMEM, by a copy without a barrier */
  FETCHED,     /* GMEM, by such a copy */
  MULTIPLYING, /* SMEM, an operand of a product */
  KINDS
} pending_kind;

typedef struct pending {
  pending_kind kind;
  pm_access a;
  int64_t from, to; /* bytes of a dense part; to < 0: not dense; 0: not asked yet */
  bool some;        /* not all elements of the view, but some */
} pending;

enum { MOST = 64 }; /* beyond it nothing new is kept */

typedef struct state {
  pending at[MOST];
  uint32_t n;
} state;

typedef struct checker {
  pm_graph *g;
  bool *warned; /* by op: it has a warning */
} checker;

static void walk(checker *c, pm_blk block, state *s);

/* ---- do two accesses meet? ----------------------------------------------------------------- */

/* Views of GMEM may be larger than what they are a part of, and lie beyond its end. */
static bool may_overhang(const pm_graph *g, pm_opid op) {
  uint32_t n, next = 1;
  const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(g, op, PM_ATTR_SIZES, &n);
  const pm_type *of = pm_typeof(g, pm_in(g, op, 0));
  if (of->space != PM_GMEM) return false;
  for (uint32_t d = 0; d < n; d++) {
    pm_scalar start = {.i = starts[d]};
    const bool known = starts[d] != PM_DYNAMIC || pm_constant(g, pm_in(g, op, next++), &start);
    if (sizes[d] != PM_DROPPED && sizes[d] + (known ? start.i : 1) > of->dim[d]) return true;
  }
  return false;
}

/* Is all of the view inside of what it is a part of? */
static bool is_inside(const pm_graph *g, pm_val view) {
  for (const pm_val base = pm_view_base(g, view); view != base;) {
    const pm_opid op = pm_value_of(g, view)->def;
    if (pm_get(g, op)->code == PM_OP_INDEX && may_overhang(g, op)) return false;
    view = pm_in(g, op, 0);
  }
  return true;
}

static bool is_whole(const pm_graph *g, pm_val view) {
  const pm_type *of = pm_typeof(g, pm_view_base(g, view));
  return pm_type_size(pm_typeof(g, view)) == pm_type_size(of) && is_inside(g, view);
}

/* Do the elements of its view, in row-major order, follow each other at a known place? */
static bool is_dense(const pm_graph *g, pending *p) {
  if (p->to) return p->to > 0;
  const pm_type *t = pm_typeof(g, p->a.view);
  const bool known = pm_access_bytes(g, &p->a, false, &p->from, &p->to);
  const bool apart = !known || p->to - p->from != pm_type_size(t) * pm_dtypes[t->dtype].bytes;
  if (apart || !is_inside(g, p->a.view)) p->to = -1;
  return p->to > 0;
}

/* Are both of whole allocations of SMEM that overlap? */
static bool share_bytes(const pm_graph *g, pm_val a, pm_val b) {
  const pm_val views[] = {a, b};
  int64_t from[2], to[2], apart[2];
  for (int k = 0; k < 2; k++) {
    const pm_opid def = pm_value_of(g, pm_view_base(g, views[k]))->def;
    const pm_type *t = pm_typeof(g, views[k]);
    if (!def || !pm_allocates(g, def, PM_SMEM) || !is_whole(g, views[k])) return false;
    from[k] = *pm_attr(g, def, PM_ATTR_OFFSET);
    to[k] = from[k] + pm_type_size(t) * pm_dtypes[t->dtype].bytes;
    apart[k] = *pm_attr(g, def, PM_ATTR_APART);
  }
  return apart[0] == apart[1] && from[0] < to[1] && from[1] < to[0];
}

static bool meet(const pm_graph *g, pending *x, pending *y) {
  const pm_val a = x->a.view, b = y->a.view;
  if (x->some && y->some) return false;
  if (pm_memory_of(g, a) != pm_memory_of(g, b)) return !x->some && !y->some && share_bytes(g, a, b);
  if (x->some || y->some) return is_whole(g, x->some ? b : a);
  if (a == b || is_whole(g, a) || is_whole(g, b)) return true;
  return is_dense(g, x) && is_dense(g, y) && x->from < y->to && y->from < x->to;
}

/* ---- warnings ------------------------------------------------------------------------------ */

static const char *remedy(const pm_graph *g, const pending *p) {
  const bool wgmma = pm_get(g, p->a.op)->code == PM_OP_WGMMA;
  switch (p->kind) {
    case STORED: return "call plgpu.commit_smem() between them";
    case LOADING:
    case LOADED_FROM: return "call plgpu.barrier_wait() on its barrier before";
    case STORED_FROM: return "call plgpu.wait_smem_to_gmem(0, wait_read_only=True) before";
    case FETCHING:
    case FETCHED: return "call plgpu.wait_gmem_to_smem(0) before";
    case STORING: return "call plgpu.wait_smem_to_gmem(0) before";
    default: return wgmma ? "call plgpu.wgmma_wait(0) before" : "wait for its barrier before";
  }
}

static const char *line_text(const pm_graph *g, pm_opid op, pm_opid here) {
  const pm_op *o = pm_get(g, op);
  if (!o->line) return "";
  if (o->file == pm_get(g, here)->file) return pm_printf(g->arena, " in line %u", o->line);
  return pm_printf(g->arena, " at %s:%u", g->strings.at[o->file], o->line);
}

static void warn(checker *c, const pm_access *a, const pending *p) {
  static const char *const what[KINDS] = {[STORED] = "was stored to",
                                          [LOADING] = "may still be written by",
                                          [LOADED_FROM] = "may still be read by",
                                          [STORING] = "may still be written by",
                                          [STORED_FROM] = "may still be read by",
                                          [FETCHING] = "may still be written by",
                                          [FETCHED] = "may still be read by",
                                          [MULTIPLYING] = "may still be read by"};
  pm_graph *g = c->g;
  const pm_op *o = pm_get(g, a->op);
  const uint32_t name = pm_value_of(g, pm_view_base(g, a->view))->name;
  if (c->warned[a->op] || !o->line) return;
  c->warned[a->op] = true;
  const char *other = p->kind == STORED ? ""
                      : p->kind == MULTIPLYING
                          ? " the product"
                          : pm_printf(g->arena, " the %s", pm_op_name(pm_get(g, p->a.op)->code));
  pm_vec_push(g->arena, &g->warnings,
              pm_printf(g->arena,
                        "%s:%u: missing synchronisation: %s %s '%s', which %s%s%s; "
                        "%s",
                        g->strings.at[o->file], o->line, pm_op_name(o->code),
                        a->writes ? "writes" : "reads", name ? g->strings.at[name] : "a ref",
                        what[p->kind], other, line_text(g, p->a.op, a->op), remedy(g, p)));
}

/* ---- accesses ------------------------------------------------------------------------------ */

/* What an access leaves pending, or KINDS. */
static pending_kind kind_of(const pm_access *a) {
  const bool smem = a->where == PM_IN_SMEM;
  if (a->completion == PM_COMPLETES_NOW)
    return smem && a->writes && a->proxy == PM_GENERIC ? STORED : KINDS;
  if (a->completion == PM_COMPLETES_LANES) return smem ? FETCHING : FETCHED;
  if (a->proxy != PM_ASYNC) return KINDS;
  switch (a->completion) {
    case PM_COMPLETES_BARRIER: return !smem ? LOADED_FROM : a->writes ? LOADING : KINDS;
    case PM_COMPLETES_GROUP: return smem ? STORED_FROM : STORING;
    default: return smem && !a->writes ? MULTIPLYING : KINDS;
  }
}

/* Does the access go wrong while that is pending? Copies may add to one place. */
static bool conflicts(const pm_access *a, const pending *p) {
  const bool engine = a->proxy == PM_ASYNC;
  switch (p->kind) {
    case STORED: return engine && a->reads;
    case LOADING:
    case FETCHING: return true;
    case STORING: return !engine || (a->writes && !(a->reads && p->a.reads));
    default: return a->writes;
  }
}

/* Is it certain that elements are accessed, *some: named by arrays of indices? A mask may be true
 * everywhere. */
static bool is_certain(const pm_graph *g, const pm_access *a, bool *some) {
  const pm_op *o = pm_get(g, a->op);
  *some = false;
  if (a->certainty != PM_MAY || !pm_is_masked(o->code)) return a->certainty == PM_MUST;
  const pm_opid mask = pm_value_of(g, pm_in(g, a->op, a->writes ? 2 : 1))->def;
  const bool atomic = pm_has_attr(g, a->op, PM_ATTR_ATOMIC);
  *some = o->n_in > (atomic ? pm_n_beside(*pm_attr(g, a->op, PM_ATTR_ATOMIC)) : 3);
  return mask && pm_get(g, mask)->code == PM_OP_CONST && *pm_attr(g, mask, PM_ATTR_VALUE);
}

static void look(checker *c, const pm_access *a, state *s) {
  pending now = {.kind = kind_of(a), .a = *a};
  if (!(a->where & PM_IN_MEMORY) || a->scope == PM_CLUSTER || a->proxy == PM_UNKNOWN ||
      !is_certain(c->g, a, &now.some)) {
    return;
  }
  for (uint32_t k = 0; k < s->n; k++) {
    if (s->at[k].a.op == a->op || !conflicts(a, &s->at[k])) continue;
    if (meet(c->g, &now, &s->at[k])) {
      warn(c, a, &s->at[k]);
      break;
    }
  }
  if (now.kind != KINDS && s->n < MOST) s->at[s->n++] = now;
}

static void forget(state *s, unsigned kinds) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < s->n; k++)
    if (!(kinds >> s->at[k].kind & 1)) s->at[n++] = s->at[k];
  s->n = n;
}

/* Does the thread learn there what others did? */
static bool learns(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  const uint8_t effects = pm_ops[o->code].effects;
  if ((effects & E_MEET && effects & E_RELEASE) || effects & E_COUNT) return true;
  if (o->code == PM_OP_INLINE || o->code == PM_OP_SHUFFLE_TILE) return true;
  if (o->code == PM_OP_SCOPE) return *pm_attr(g, op, PM_ATTR_COLLECTIVE) && g->n_threads > 1;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where == PM_IN_SEMAPHORE || a.where == PM_IN_TMEM) return true;
    if (a.where == PM_IN_BARRIER && a.reads && !a.writes) return true;
  }
  return false;
}

/* ---- the walk ------------------------------------------------------------------------------ */

/* Of the same bytes, for the same reason. */
static bool is_alike(const pm_graph *g, pending *x, pending *y) {
  const pm_val a = x->a.view, b = y->a.view;
  if (x->kind != y->kind || x->some || y->some) return x->kind == y->kind && x->a.op == y->a.op;
  if (pm_memory_of(g, a) != pm_memory_of(g, b)) return false;
  if (a == b || (is_whole(g, a) && is_whole(g, b))) return true;
  return is_dense(g, x) && is_dense(g, y) && x->from == y->from && x->to == y->to;
}

static void keep_common(const pm_graph *g, state *s, state *other) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < s->n; k++)
    for (uint32_t i = 0; i < other->n; i++) {
      if (!is_alike(g, &s->at[k], &other->at[i])) continue;
      s->at[n++] = s->at[k];
      break;
    }
  s->n = n;
}

static void copy(state *to, const state *from) {
  to->n = from->n;
  memcpy(to->at, from->at, from->n * sizeof *from->at);
}

static void walk_regions(checker *c, pm_opid op, state *s) {
  const pm_op *o = pm_get(c->g, op);
  const bool loops = pm_is_loop(o->code);
  state before, inside;
  if (o->n_regions == 1 && !loops) {
    walk(c, pm_region(c->g, op, 0), s);
    return;
  }
  copy(&before, s);
  for (uint32_t r = 0; r < o->n_regions; r++) {
    copy(&inside, &before);
    walk(c, pm_region(c->g, op, r), &inside);
    if (!r && !loops) copy(s, &inside);
    else keep_common(c->g, s, &inside);
  }
}

static void walk(checker *c, pm_blk block, state *s) {
  const pm_graph *g = c->g;
  const pm_block *b = &g->blocks.at[block];
  int64_t n;
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    const pm_op *o = pm_get(g, op);
    if (pm_is_pure(o->code) && o->code != PM_OP_SHUFFLE_TILE) continue;
    const bool forgets = learns(g, op);
    if (forgets) s->n = 0;
    pm_access a = pm_accesses(op);
    while (pm_next_access(g, &a)) look(c, &a, s);
    if (o->n_regions) walk_regions(c, op, s);
    if (forgets && o->n_regions) s->n = 0;
    if (pm_ops[o->code].effects & E_FENCE) forget(s, 1u << STORED);
    if (pm_awaits_products(g, op, &n)) forget(s, 1u << MULTIPLYING);
    if (o->code == PM_OP_WAIT_CP_ASYNC) forget(s, 1u << FETCHING | 1u << FETCHED);
    if (o->code == PM_OP_WAIT_S2G)
      forget(s, 1u << STORED_FROM | (*pm_attr(g, op, PM_ATTR_READ_ONLY) ? 0 : 1u << STORING));
  }
}

pm_code pm_check_ordering(pm_graph *g, const pm_target *t, pm_err *err) {
  checker c = {g, PM_NEW(g->arena, bool, g->ops.n)};
  state *s = PM_NEW(g->arena, state, 1);
  (void)t;
  (void)err;
  walk(&c, 1, s);
  return PM_OK;
}
