/* The roles of operands, and the accesses of ops: see access.h.
 *
 * Inline code is the only op that names no roles: each of its refs, barriers and semaphores may be
 * read and written by the generic proxy. Three things are no operands: the phase that a wait
 * advances unless it is told which one it awaits, the counter of a tile, and the blocks that a copy
 * along axes of the cluster or an arrival at a cluster barrier reaches. */
#include "access.h"

#include <assert.h>

#include "view.h"

/* ---- operands ------------------------------------------------------------------------------- */

const char *pm_read_operand(const char *spec, pm_operand *out) {
  *out = (pm_operand){.letter = *spec++};
  if (*spec && strchr("<>=!", *spec)) out->role = *spec++;
  if (*spec == '~') out->async = *spec++;
  if (*spec == '@') out->remote = *spec++;
  if (*spec == '*') out->repeated = *spec++;
  else if (*spec == '?') out->optional = *spec++;
  return spec;
}

bool pm_is_pure(int code) { return !pm_ops[code].effects && !strpbrk(pm_ops[code].in, "<>=!"); }

bool pm_meets(int code) {
  const pm_op_info *info = &pm_ops[code];
  return info->part == PM_PART_WARPGROUP && (info->effects & (E_MEET | E_RELEASE)) == E_MEET;
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
      return t->space == PM_GMEM ? PM_IN_GMEM : t->space == PM_SMEM ? PM_IN_SMEM : PM_IN_ACC;
    default: return 0; /* an array: a value */
  }
}

/* Is there more than one block along the axes of an op's attribute? */
static bool spans_blocks(const pm_graph *g, pm_opid op) {
  uint32_t n = 0;
  int64_t blocks = 1;
  const int64_t *axis = NULL;
  if (pm_has_attr(g, op, PM_ATTR_CLUSTER)) axis = pm_attr_list(g, op, PM_ATTR_CLUSTER, &n);
  for (uint32_t k = 0; k < n; k++) blocks *= axis[k] < 0 ? 1 : g->cluster[axis[k]]; /* -1: a gap */
  return blocks > 1;
}

static bool has_peers(const pm_graph *g) {
  int64_t blocks = 1;
  for (uint32_t k = 0; k < g->n_cluster; k++) blocks *= g->cluster[k];
  return blocks > 1;
}

/* Does an access of SMEM or of a barrier reach other blocks? */
static bool leaves_block(const pm_graph *g, const pm_access *a) {
  if ((a->operand.remote && has_peers(g)) || spans_blocks(g, a->op)) return true;
  if (a->where == PM_IN_BARRIER) {
    return a->writes && spans_blocks(g, pm_value_of(g, pm_view_base(g, a->view))->def);
  }
  const pm_opid ref = pm_view_cluster(g, a->view);
  return ref && g->cluster[*pm_attr(g, ref, PM_ATTR_DIM)] > 1;
}

static uint8_t scope_of(const pm_graph *g, const pm_access *a) {
  switch (a->where) {
    case PM_IN_SMEM:
    case PM_IN_BARRIER: return leaves_block(g, a) ? PM_CLUSTER : PM_BLOCK;
    case PM_IN_SEMAPHORE: return pm_typeof(g, a->view)->space == PM_GMEM ? PM_DEVICE : PM_BLOCK;
    case PM_IN_GMEM:
    case PM_IN_COUNTER: return PM_DEVICE;
    default: return PM_THREAD;
  }
}

static uint8_t proxy_of(const pm_graph *g, const pm_access *a) {
  if (!a->operand.async) return PM_GENERIC;
  if (!pm_has_attr(g, a->op, PM_ATTR_ENGINE)) return PM_ASYNC;
  const int64_t engine = *pm_attr(g, a->op, PM_ATTR_ENGINE);
  return engine == PM_ENGINE_AUTO ? PM_UNKNOWN : engine == PM_ENGINE_PLAIN ? PM_GENERIC : PM_ASYNC;
}

static uint8_t certainty_of(const pm_graph *g, const pm_access *a) {
  if (a->operand.role == '!') return PM_UNTOLD;
  const bool predicated =
      pm_has_attr(g, a->op, PM_ATTR_PREDICATED) && *pm_attr(g, a->op, PM_ATTR_PREDICATED);
  return predicated || pm_is_masked(pm_get(g, a->op)->code) ? PM_MAY : PM_MUST;
}

/* A store that combines reads what is there. */
static bool combines(const pm_graph *g, pm_opid op) {
  return pm_has_attr(g, op, PM_ATTR_COMBINE) && *pm_attr(g, op, PM_ATTR_COMBINE);
}

static void fill(const pm_graph *g, pm_access *a) {
  const char role = a->operand.role;
  const bool memory = a->where & (PM_IN_MEMORY | PM_IN_ACC);
  a->reads = role != '>' || (memory && combines(g, a->op));
  a->writes = role != '<';
  a->proxy = proxy_of(g, a);
  a->certainty = certainty_of(g, a);
  a->done = memory ? pm_ops[pm_get(g, a->op)->code].done : PM_DONE_NOW;
  a->scope = scope_of(g, a);
}

/* What is no operand comes last: a phase, a counter. */
static bool next_extra(const pm_graph *g, pm_access *a) {
  const pm_op *o = pm_get(g, a->op);
  const char *spec = pm_ops[o->code].in;
  const bool waits = spec[0] == 'b' && spec[1] == '<' && o->n_in == 1;
  a->where = 0;
  if (a->extra++ || (!waits && !(pm_ops[o->code].effects & E_COUNT))) return false;
  a->view = waits ? pm_in(g, a->op, 0) : 0;
  a->where = waits ? PM_IN_PHASE : PM_IN_COUNTER;
  a->operand = (pm_operand){.role = '='};
  fill(g, a);
  return true;
}

bool pm_next_access(const pm_graph *g, pm_access *a) {
  const pm_op *o = pm_get(g, a->op);
  if (!a->spec) a->spec = pm_ops[o->code].in;
  while (a->k < o->n_in) {
    if (!a->operand.repeated) a->spec = pm_read_operand(a->spec, &a->operand);
    a->view = pm_in(g, a->op, a->k++);
    a->where = a->operand.role ? where_is(pm_typeof(g, a->view)) : 0;
    if (!a->where) continue;
    fill(g, a);
    return true;
  }
  return next_extra(g, a);
}

bool pm_by_lanes(const pm_access *a) {
  assert(a->proxy != PM_UNKNOWN);
  return a->proxy == PM_GENERIC;
}
