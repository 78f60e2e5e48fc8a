/* Regions that a single lane executes.
 *
 * One elected lane of warp 0 issues copies. If a whole run of ops of a block needs only that lane
 * (copies by engines, waits and arrivals on barriers, scalar arithmetic, loops and branches of
 * these), it becomes one region: `if (warp == 0 && elect_one()) { ... }` around all of it, without
 * elections inside. This makes a producer thread look as a person would write it.
 *
 * - Only the elected lane flips phase bits in a region, and only it knows the results of scalar
 *   loads, waits for stores and NEXT_TILE. A region with such ops ("sticky") must therefore be the
 *   rest of the kernel, or of a branch that not all threads take; the lanes synchronise after it if
 *   anything follows. What the lane knows of the tensor core by its waits, fences pass on.
 * - Each thread waits for a barrier either only inside regions or only outside of them:
 *   pm_find_lane_barriers finds the barriers that may be awaited in regions. Threads are
 *   distinguished by the conditions on the thread axis that lead to an op.
 * - SYNC ops inside a region are removed, because the other lanes do nothing there. If there were
 *   any, the lanes synchronise before the region.
 * - Pure scalars of the run that need nothing from inside are moved before it, so that they may be
 *   used after it. Other values from inside are not used outside. */
#include "../ir/eval.h"
#include "gen.h"

/* ---- which threads reach an op ----------------------------------------------------------- */

static uint32_t region_of(const pm_graph *g, pm_opid op, pm_blk block) {
  uint32_t r = 0;
  while (pm_region(g, op, r) != block) r++;
  return r;
}

uint32_t pm_threads_of(const pm_graph *g, pm_opid op) {
  uint32_t mask = (uint32_t)((UINT64_C(1) << g->n_threads) - 1);
  for (pm_blk b = pm_get(g, op)->parent; g->blocks.at[b].parent;) {
    const pm_opid parent = g->blocks.at[b].parent;
    for (uint32_t wg = 0; wg < g->n_threads; wg++) {
      if (!pm_may_take(g, parent, region_of(g, parent, b), wg)) mask &= ~(1u << wg);
    }
    b = pm_get(g, parent)->parent;
  }
  return mask;
}

/* ---- what an op is to a region ------------------------------------------------------------ */

typedef struct traits {
  bool issues, sticky, syncs, flows; /* also of what is inside; flows: loops and branches */
  bool sees_tensor_core;             /* a wait tells that it has done something */
} traits;

static bool lane_block(const pm_gen *e, pm_blk block, traits *t);

static bool is_scalar(const pm_gen *e, pm_val v) {
  const pm_type *t = pm_typeof(e->g, v);
  return t->kind != PM_ARRAY || !t->rank;
}

/* Bulk groups of a thread whose warps store: each has its lane. */
static bool of_all_warps(const pm_gen *e) { return e->warps_store && !e->warps; }

/* Are there only refs and scalars among operands and results? */
static bool has_no_arrays(const pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (!is_scalar(e, pm_in(e->g, op, k))) return false;
  }
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!is_scalar(e, o->out + k)) return false;
  }
  return true;
}

static bool lane_regions(const pm_gen *e, pm_opid op, traits *t) {
  const pm_graph *g = e->g;
  const pm_op *o = pm_get(g, op);
  const bool scope = pm_has_attr(g, op, PM_ATTR_COLLECTIVE);
  if (pm_ops[o->code].known_to == PM_KNOWN_ALL) return false;
  if (scope && *pm_attr(g, op, PM_ATTR_COLLECTIVE) && g->n_threads > 1) return false;
  t->flows = true;
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!is_scalar(e, o->out + k)) return false;
  }
  for (uint32_t r = 0; r < o->n_regions; r++) {
    if (!lane_block(e, pm_region(g, op, r), t)) return false;
  }
  return true;
}

/* Can one lane do it for the thread? Adds to t. */
static bool lane_op(const pm_gen *e, pm_opid op, traits *t) {
  const pm_graph *g = e->g;
  const pm_op *o = pm_get(g, op);
  const pm_op_info *info = &pm_ops[o->code];
  if (o->code == PM_OP_NAMED_SCOPE && g->profile_warps) return false; /* one for each warp */
  if (o->n_regions) return lane_regions(e, op, t);
  switch (info->known_to) {
    case PM_KNOWN_EACH:
      if (!pm_is_view(g, op) && !pm_is_elementwise(g, op)) return false;
      return is_scalar(e, o->out) || pm_has_attr(g, op, PM_ATTR_VALUE);
    case PM_KNOWN_LANE: t->sticky = true; break;
    case PM_KNOWN_ENGINE: t->issues = true; break;
    case PM_KNOWN_NOBODY: t->syncs |= info->effects & E_MEET; break;
    default: return false;
  }
  /* every lane has a fence of its own for what it did with tensor memory */
  if (o->code == PM_OP_ARRIVE && !e->warps && pm_orders_tensor_core(g, pm_in(g, op, 0)))
    return false;
  const bool engine = pm_has_attr(g, op, PM_ATTR_ENGINE);
  if (engine && *pm_attr(g, op, PM_ATTR_ENGINE) == PM_ENGINE_PLAIN) return false;
  if (o->code == PM_OP_COMMIT_GROUP || o->code == PM_OP_WAIT_S2G) return !of_all_warps(e);
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) { /* of a barrier that is waited for */
    const bool waits = a.where == PM_IN_BARRIER && !a.writes;
    if (waits && !e->lane_barrier[pm_view_base(g, a.view)]) return false;
    t->sees_tensor_core |= waits && pm_orders_tensor_core(g, a.view);
  }
  return has_no_arrays(e, op);
}

static bool lane_block(const pm_gen *e, pm_blk block, traits *t) {
  const pm_block *b = &e->g->blocks.at[block];
  for (uint32_t k = 0; k < pm_n_ops(e->g, block); k++) {
    if (!lane_op(e, b->ops.at[k], t)) return false;
  }
  return true;
}

static bool is_pure(const pm_gen *e, pm_opid op) {
  if (!pm_is_pure(pm_get(e->g, op)->code)) return false;
  return pm_is_view(e->g, op) || pm_is_elementwise(e->g, op);
}

/* Operands of ops [first, end) and of all inside them, counted by value. */
static void count(const pm_graph *g, pm_opid op, uint32_t *uses) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in; k++) uses[pm_in(g, op, k)]++;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    for (uint32_t k = 0; k < b->ops.n; k++) count(g, b->ops.at[k], uses);
  }
}

/* Is the op a pure scalar of a region that needs nothing from inside? made: values from inside. */
static bool is_hoisted(const pm_gen *e, pm_opid op, const bool *made) {
  if (!is_pure(e, op)) return false;
  for (uint32_t k = 0; k < pm_get(e->g, op)->n_in; k++) {
    if (made[pm_in(e->g, op, k)]) return false;
  }
  return true;
}

/* The end of ops that make values used only before `end`. */
static uint32_t cut_at_used(const pm_gen *e, pm_blk block, uint32_t first, uint32_t end) {
  const pm_block *b = &e->g->blocks.at[block];
  bool *made = e->made;
  uint32_t *uses = e->uses_inside;
  memset(made, 0, e->g->values.n * sizeof *made);
  memset(uses, 0, e->g->values.n * sizeof *uses);
  for (uint32_t k = first; k < end; k++) count(e->g, b->ops.at[k], uses);
  for (uint32_t k = first; k < end; k++) {
    const pm_opid op = b->ops.at[k];
    const pm_op *o = pm_get(e->g, op);
    if (is_hoisted(e, op, made)) continue;
    for (uint32_t i = 0; i < o->n_out; i++) {
      if (uses[o->out + i] != e->uses[o->out + i]) return cut_at_used(e, block, first, k);
      made[o->out + i] = true;
    }
  }
  return end;
}

static uint32_t position(const pm_graph *g, pm_blk block, pm_opid op) {
  uint32_t k = 0;
  while (g->blocks.at[block].ops.at[k] != op) k++;
  return k;
}

/* Does position `end` of the block end the kernel, or, if `branches`, a branch that not all threads
 * take? */
static bool is_last(const pm_graph *g, pm_blk block, uint32_t end, bool branches) {
  for (;;) {
    const pm_block *b = &g->blocks.at[block];
    const pm_opid parent = b->parent;
    if (end < pm_n_ops(g, block)) return false;
    if (!parent) return true;
    const int code = pm_get(g, parent)->code;
    if (pm_is_loop(code) || pm_maps_warps(code)) return false;
    for (uint32_t wg = 0; branches && wg < g->n_threads; wg++) {
      if (!pm_may_take(g, parent, region_of(g, parent, block), wg)) return true;
    }
    block = pm_get(g, parent)->parent;
    end = position(g, block, parent) + 1;
  }
}

/* The region that begins at op `first`: its end; `first`: there is none. */
static uint32_t find_region(const pm_gen *e, pm_blk block, uint32_t first, traits *t) {
  const pm_graph *g = e->g;
  const pm_block *b = &g->blocks.at[block];
  uint32_t end = first, plain = UINT32_MAX; /* plain: where the first sticky op stands */
  *t = (traits){0};
  for (; end < pm_n_ops(g, block); end++) {
    const pm_opid op = b->ops.at[end];
    const traits before = *t;
    if (!lane_op(e, op, t)) {
      *t = before;
      break;
    }
    if (t->sticky && plain == UINT32_MAX) plain = end;
  }
  for (uint32_t was = end + 1; t->issues && was != end;) {
    was = end;
    if (plain < end && !is_last(g, block, end, true)) end = plain;
    end = cut_at_used(e, block, first, end);
  }
  *t = (traits){0};
  for (uint32_t k = first; k < end; k++) lane_op(e, b->ops.at[k], t);
  while (end > first && !t->sticky) { /* a SYNC after the last issue is for what follows */
    const pm_opid op = b->ops.at[end - 1];
    if (!is_pure(e, op) && pm_get(g, op)->code != PM_OP_SYNC) break;
    end--;
  }
  return t->issues ? end : first;
}

/* ---- barriers ----------------------------------------------------------------------------- */

typedef struct waits {
  const pm_gen *e;
  bool in_region, in_warps;
  uint32_t *inside, *outside; /* threads, by barrier */
} waits;

static void note_waits(waits *w, pm_blk block);

static void note_wait(waits *w, pm_opid op) {
  const pm_graph *g = w->e->g;
  const pm_op *o = pm_get(g, op);
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where != PM_IN_BARRIER || a.writes) continue;
    const pm_val barrier = pm_view_base(g, a.view);
    const uint32_t threads = pm_threads_of(g, op);
    if (w->in_region || w->in_warps) w->inside[barrier] |= threads;
    if (!w->in_region || w->in_warps) w->outside[barrier] |= threads; /* all lanes know phases */
  }
  const bool outer = w->in_warps;
  w->in_warps |= pm_maps_warps(o->code);
  for (uint32_t r = 0; r < o->n_regions; r++) note_waits(w, pm_region(g, op, r));
  w->in_warps = outer;
}

static void note_waits(waits *w, pm_blk block) {
  const pm_block *b = &w->e->g->blocks.at[block];
  traits t;
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const uint32_t end = w->in_region ? k : find_region(w->e, block, k, &t);
    w->in_region = w->in_region || end > k;
    note_wait(w, b->ops.at[k]);
    if (end == k) continue;
    while (++k < end) note_wait(w, b->ops.at[k]);
    k--;
    w->in_region = false;
  }
}

void pm_find_lane_barriers(pm_gen *e) {
  const uint32_t n = e->g->values.n;
  bool again = true;
  for (uint32_t v = 0; v < n; v++) e->lane_barrier[v] = true;
  while (again) {
    waits w = {.e = e};
    w.inside = PM_NEW(e->arena, uint32_t, n);
    w.outside = PM_NEW(e->arena, uint32_t, n);
    note_waits(&w, 1);
    again = false;
    for (uint32_t v = 0; v < n; v++) {
      if (!e->lane_barrier[v] || !(w.inside[v] & w.outside[v])) continue;
      e->lane_barrier[v] = false;
      again = true;
    }
  }
}

/* ---- emission ----------------------------------------------------------------------------- */

/* Did the lanes meet right in front of position k? */
static bool has_met(const pm_gen *e, pm_blk block, uint32_t k) {
  const pm_block *b = &e->g->blocks.at[block];
  while (k > 0 && is_pure(e, b->ops.at[k - 1])) k--;
  if (!k) return false;
  return pm_meets(pm_get(e->g, b->ops.at[k - 1])->code);
}

pm_code pm_gen_region(pm_gen *e, pm_blk block, uint32_t first, uint32_t *next) {
  const pm_block *b = &e->g->blocks.at[block];
  traits t;
  const uint32_t end = find_region(e, block, first, &t);
  *next = end;
  if (end == first) return PM_OK;
  bool *made = e->made;
  memset(made, 0, e->g->values.n * sizeof *made);
  bool *hoisted = PM_NEW(e->arena, bool, end - first);
  for (uint32_t k = first; k < end; k++) {
    const pm_op *o = pm_get(e->g, b->ops.at[k]);
    hoisted[k - first] = is_hoisted(e, b->ops.at[k], made);
    if (hoisted[k - first]) PM_TRY(pm_gen_scalar(e, b->ops.at[k]));
    for (uint32_t i = 0; i < o->n_out; i++) made[o->out + i] = !hoisted[k - first];
  }
  if (t.syncs && !has_met(e, block, first)) pm_line(e, "%s", pm_meet(e));
  uint32_t named = first;
  while (is_pure(e, b->ops.at[named]) || pm_get(e->g, b->ops.at[named])->code == PM_OP_SYNC)
    named++;
  pm_note(e, b->ops.at[named], pm_ops[pm_get(e->g, b->ops.at[named])->code].text);
  e->said = b->ops.at[named];
  pm_begin(e, "%s {", pm_elected(e));
  e->lane = true;
  for (uint32_t k = first; k < end; k++) {
    if (!hoisted[k - first]) PM_TRY(pm_gen_op(e, b->ops.at[k]));
  }
  const bool meets = t.sticky && !is_last(e->g, block, end, false);
  if (meets && t.sees_tensor_core) pm_line(e, "tcgen05_fence_before();");
  e->lane = false;
  pm_end(e);
  pm_print_exit(e, &e->lane_exit);
  if (t.flows || t.sticky) pm_line(e, "warp_sync();");
  if (meets) pm_line(e, "%s", pm_meet(e));
  if (meets && t.sees_tensor_core) pm_line(e, "tcgen05_fence_after();");
  return PM_OK;
}
