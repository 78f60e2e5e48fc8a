/* Registers of a block: set_max_registers must leave enough for all of its threads.
 *
 * A request for more registers than the SM has left blocks forever, so the sum is checked before
 * anything runs. The body is walked once for each thread index. A branch is decided if its
 * predicate follows from the index. A thread needs the maximum of its requests, or its share at
 * launch if it makes none. If a branch that cannot be decided contains a request, nothing is
 * concluded. Only ops that are or contain requests are visited. */
#include "../ir/eval.h"
#include "passes.h"

enum { SM_REGISTERS = 65536, LANES = 128 };

typedef struct walker {
  const pm_graph *g;
  const bool *asks; /* by op: it is a request, or there is one inside */
  int64_t thread;
  int64_t most; /* 0: no request yet */
  pm_opid op;   /* of the largest request */
  bool any, unknown;
} walker;

static void walk(walker *w, pm_blk block);

/* The regions of a branch that may run: one, or all of them if the predicate is unknown. */
static void walk_branch(walker *w, pm_opid op) {
  const pm_op *o = pm_get(w->g, op);
  const int taken = pm_region_for_thread(w->g, op, w->thread);
  if (taken >= 0) {
    walk(w, pm_region(w->g, op, (uint32_t)taken));
    return;
  }
  bool before = w->any;
  w->any = false;
  for (uint32_t r = 0; r < o->n_regions; r++) walk(w, pm_region(w->g, op, r));
  if (w->any) w->unknown = true;
  w->any |= before;
}

static void walk(walker *w, pm_blk block) {
  const pm_block *b = &w->g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) {
    pm_opid op = b->ops.at[k];
    const pm_op *o = pm_get(w->g, op);
    if (!w->asks[op]) continue;
    if (o->code == PM_OP_SET_MAX_REGISTERS) {
      int64_t n = *pm_attr(w->g, op, PM_ATTR_N);
      w->any = true;
      if (n > w->most) {
        w->most = n;
        w->op = op;
      }
    } else if (pm_is_branch(o->code)) {
      walk_branch(w, op);
    } else {
      for (uint32_t r = 0; r < o->n_regions; r++) walk(w, pm_region(w->g, op, r));
    }
  }
}

static void note_request(pm_graph *g, pm_opid op, void *ctx) {
  bool *asks = ctx;
  if (pm_get(g, op)->code != PM_OP_SET_MAX_REGISTERS) return;
  for (; op && !asks[op]; op = g->blocks.at[pm_get(g, op)->parent].parent) asks[op] = true;
}

pm_code pm_check_registers(pm_graph *g, const pm_target *t, pm_err *err) {
  int64_t total = 0, share = SM_REGISTERS / (LANES * (int64_t)g->n_threads) / 8 * 8, most = 0;
  pm_opid worst = 0;
  pm_text text;
  (void)t;
  pm_text_init(&text, g->arena);
  if (share > 255) share = 255;
  bool *asks = PM_NEW(g->arena, bool, g->ops.n);
  pm_walk(g, 1, note_request, asks);
  for (uint32_t k = 0; k < g->n_threads; k++) {
    walker w = {.g = g, .asks = asks, .thread = k};
    walk(&w, 1);
    if (w.unknown) return PM_OK;
    int64_t n = w.any ? w.most : share;
    total += n * LANES;
    if (w.any && w.most > most) {
      most = w.most;
      worst = w.op;
    }
    pm_putf(&text, "%s%lld", k ? " + " : "", (long long)n);
  }
  if (!worst || total <= SM_REGISTERS) return PM_OK;
  pm_fail(err, PM_E_VALUE,
          "set_max_registers: the threads of a block ask for %s registers a lane (%lld at launch), "
          "%lld in all, and there are %d: the block would wait forever. Request fewer "
          "registers",
          text.at, (long long)share, (long long)total, SM_REGISTERS);
  pm_err_op(err, g, worst);
  return err->code;
}
