/* Copies that nobody awaits: stores by engines, and loads by cp.async.
 *
 * A block must not exit while a copy may still access its shared memory, so a thread that can end
 * with such a copy waits at its end. One forward walk for each Pallas thread finds these threads.
 * It knows the branches that the thread takes and the loops that certainly run, and assumes that
 * everything else may or may not happen. Kernels that await their stores get no additional wait. */
#include "../ir/eval.h"
#include "gen.h"

/* OPEN: stores in no group yet; GROUPED: a group that may not have been read; FETCHING: a group of
 * cp.async that may not be complete. */
enum { OPEN = 1, GROUPED = 2, FETCHING = 4 };

typedef struct walk {
  const pm_graph *g;
  int64_t wg;
  int32_t *taken; /* per op: the region that the thread takes, or -1, plus 2; 0: not asked yet */
} walk;

static int after_block(const walk *w, pm_blk block, int state);

static int close_group(int state) { return state & OPEN ? (state & ~OPEN) | GROUPED : state; }

static bool runs_for_sure(const pm_graph *g, pm_opid loop) {
  pm_scalar low, high;
  return pm_has_index(pm_get(g, loop)) && pm_constant(g, pm_in(g, loop, 0), &low) &&
         pm_constant(g, pm_in(g, loop, 1), &high) && low.i < high.i;
}

static int after_loop(const walk *w, pm_opid op, int state) {
  const bool sure = runs_for_sure(w->g, op);
  int at_begin = state, end = state;
  do {
    at_begin |= end;
    end = at_begin;
    for (uint32_t r = 0; r < pm_get(w->g, op)->n_regions; r++) {
      end = after_block(w, pm_region(w->g, op, r), end);
    }
  } while (end & ~at_begin);
  return sure ? end : state | end;
}

static int after_regions(const walk *w, pm_opid op, int state) {
  const pm_op *o = pm_get(w->g, op);
  int after = 0;
  if (!o->n_regions) return state;
  if (pm_is_loop(o->code)) return after_loop(w, op, state);
  if (!w->taken[op]) w->taken[op] = pm_region_for_thread(w->g, op, w->wg) + 2;
  const int taken = w->taken[op] - 2;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    if (taken >= 0 && taken != (int)r) continue;
    after |= after_block(w, pm_region(w->g, op, r), state);
  }
  return after;
}

static int after_op(const walk *w, pm_opid op, int state) {
  const pm_graph *g = w->g;
  const int code = pm_get(g, op)->code;
  pm_access a = pm_accesses(op);
  if (code == PM_OP_COMMIT_GROUP) return close_group(state);
  if (code == PM_OP_WAIT_S2G) return *pm_attr(g, op, PM_ATTR_N) ? state : state & ~GROUPED;
  if (code == PM_OP_WAIT_CP_ASYNC) return *pm_attr(g, op, PM_ATTR_N) ? state : state & ~FETCHING;
  while (pm_next_access(g, &a)) {
    if (a.completion == PM_COMPLETES_LANES) state |= FETCHING;
    if (a.completion == PM_COMPLETES_GROUP && !pm_by_lanes(&a)) state |= OPEN;
  }
  const bool closes = pm_has_attr(g, op, PM_ATTR_COMMIT) && *pm_attr(g, op, PM_ATTR_COMMIT);
  return after_regions(w, op, closes ? close_group(state) : state);
}

static int after_block(const walk *w, pm_blk block, int state) {
  const pm_block *b = &w->g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) state = after_op(w, b->ops.at[k], state);
  return state;
}

void pm_print_last_wait(pm_gen *e) {
  const uint32_t n = e->g->n_threads;
  uint32_t threads = 0;
  int state = 0;
  for (uint32_t wg = 0; wg < n; wg++) {
    const walk w = {e->g, wg, PM_NEW(e->arena, int32_t, e->g->ops.n + 1)};
    const int end = after_block(&w, 1, 0);
    threads |= end ? 1u << wg : 0;
    state |= end;
  }
  if (!state) return;
  const char *who = "";
  if (threads + 1 != 1u << n) {
    who = threads & (threads - 1) ? pm_str(e, "if (0x%x >> wg & 1) ", threads)
                                  : pm_str(e, "if (wg == %d) ", __builtin_ctz(threads));
  }
  if (state & FETCHING) {
    pm_line(e, "// nobody awaits these copies, which may still write to shared memory");
    pm_line(e, "%scp_async_wait<0>();", who);
    return;
  }
  pm_line(e, "// nobody awaits these copies to GMEM, which may still read shared memory");
  pm_begin(e, "%s%s {", who, pm_store_lanes(e));
  if (state & OPEN) pm_line(e, "bulk_group_commit();");
  pm_line(e, "bulk_group_wait_read<0>();");
  pm_end(e);
}
