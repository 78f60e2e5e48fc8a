/* Consecutive copies that arrive on the same barrier.
 *
 * Each copy is an arrival that announces to the barrier how many bytes to expect. If every phase of
 * a barrier is completed by one run of such copies, the first of them announces the bytes of all,
 * and the barrier counts a single arrival. A run has as many copies as the barrier counts arrivals;
 * its copies are unpredicated and not collective, and only index arithmetic separates them. A
 * barrier with other arrivals keeps one arrival for each copy. */
#include "gen.h"

/* The barrier at which a copy of a run arrives; 0: the op is none. */
static pm_val barrier_of_run(const pm_graph *g, pm_opid op) {
  uint32_t n;
  if (pm_get(g, op)->code != PM_OP_COPY_G2S) return 0;
  if (*pm_attr(g, op, PM_ATTR_ENGINE) == PM_ENGINE_PLAIN) return 0;
  if (*pm_attr(g, op, PM_ATTR_PREDICATED)) return 0;
  pm_attr_list(g, op, PM_ATTR_CLUSTER, &n);
  return n ? 0 : pm_in(g, op, 2);
}

/* Does the first block of a pair track the copy? Then it expects twice the bytes. */
static bool is_led(const pm_graph *g, pm_opid op) { return *pm_attr(g, op, PM_ATTR_LEADER); }

static bool is_index_arithmetic(const pm_graph *g, pm_opid op) {
  return pm_is_view(g, op) || (pm_is_elementwise(g, op) && pm_is_pure(pm_get(g, op)->code));
}

/* Does the barrier count just this block's arrivals, so many? */
static bool counts(const pm_graph *g, pm_val barrier, int64_t n) {
  uint32_t n_groups;
  const pm_opid alloc = pm_value_of(g, pm_view_base(g, barrier))->def;
  const int64_t *groups = pm_attr_list(g, alloc, PM_ATTR_CLUSTER, &n_groups);
  return pm_cluster_targets(g, groups, n_groups) == 1 && pm_barrier_arrivals(g, alloc) == n;
}

typedef struct search {
  pm_gen *e;
  bool *others; /* per value: a barrier at which more than such runs arrive */
} search;

/* Links the copies of the run that begins at position `first`; returns the position after it. */
static uint32_t find_run(search *s, pm_blk block, uint32_t first) {
  const pm_graph *g = s->e->g;
  const pm_block *b = &g->blocks.at[block];
  const pm_val barrier = barrier_of_run(g, b->ops.at[first]);
  pm_opid last = b->ops.at[first];
  uint32_t end = first + 1, n = 1;
  for (uint32_t k = end; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (is_index_arithmetic(g, op)) continue;
    if (barrier_of_run(g, op) != barrier || is_led(g, op) != is_led(g, last)) break;
    s->e->next_copy[last] = op;
    last = op;
    end = k + 1;
    n++;
  }
  if (counts(g, barrier, n)) s->e->one_expect[pm_view_base(g, barrier)] = true;
  else s->others[pm_view_base(g, barrier)] = true;
  return end;
}

static void find_in_block(search *s, pm_blk block, bool in_warps) {
  const pm_graph *g = s->e->g;
  const pm_block *b = &g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n;) {
    const pm_opid op = b->ops.at[k];
    const pm_op *o = pm_get(g, op);
    if (barrier_of_run(g, op) && !in_warps) {
      k = find_run(s, block, k);
      continue;
    }
    k++;
    for (uint32_t r = 0; r < o->n_regions; r++) {
      find_in_block(s, pm_region(g, op, r), in_warps || pm_maps_warps(o->code));
    }
    pm_access a = pm_accesses(op);
    while (pm_next_access(g, &a)) {
      if (a.where == PM_IN_BARRIER && a.writes) s->others[pm_view_base(g, a.view)] = true;
    }
  }
}

void pm_find_expects(pm_gen *e) {
  const pm_graph *g = e->g;
  search s = {.e = e, .others = PM_NEW(e->arena, bool, g->values.n + 1)};
  find_in_block(&s, 1, false);
  for (pm_val v = 1; v < g->values.n; v++) e->one_expect[v] &= !s.others[v];
  for (pm_opid op = 1; op < g->ops.n; op++) {
    const pm_opid next = e->next_copy[op];
    if (!next) continue;
    if (e->one_expect[pm_view_base(g, pm_in(g, op, 2))]) {
      e->is_expected[next] = true;
    } else {
      e->next_copy[op] = 0;
    }
  }
}

pm_code pm_expected_bytes(pm_gen *e, pm_opid op, long long *bytes) {
  *bytes = 0;
  for (; op; op = e->next_copy[op]) {
    pm_copy_plan p;
    PM_TRY(pm_plan_copy(e->g, op, e->target, &p, e->err));
    *bytes += p.bytes;
  }
  return PM_OK;
}
