/* Registers of a block: set_max_registers must leave enough for all of its threads.
 *
 * A request for more registers than the SM has left blocks forever, so the sum is checked before
 * anything runs. The body is walked once for each thread index. A branch is decided if its
 * predicate follows from the index. A thread needs the maximum of its requests, or its share at
 * launch if it makes none. If a branch that cannot be decided contains a request, nothing is
 * concluded. Only ops that are or contain requests are visited.
 *
 * ptxas assigns registers by the requests that it finds on the way to an instruction. Where threads
 * with different requests have met again, it counts on the smallest, also for code of one role that
 * follows (what a compute thread does after a pipeline): it would be computed in local memory. So
 * a branch of such a role that has large arrays repeats the request of its threads, which changes
 * nothing for the hardware. There the generator reads the numbers of the thread again: ptxas would
 * keep those of the start in local memory. */
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

/* ---- requests that are repeated ------------------------------------------------------------ */

enum { MOST_THREADS = 32, UNKNOWN = -1, NONE = 0 };

/* The last request of each thread that comes to an op. */
typedef struct requests {
  int64_t n[MOST_THREADS];
} requests;

typedef struct repeater {
  pm_graph *g;
  const bool *asks;
  bool insert;
} repeater;

static void follow(const repeater *r, pm_blk block, uint32_t threads, requests *at);

static void merge(requests *into, const requests *other) {
  for (int k = 0; k < MOST_THREADS; k++)
    if (into->n[k] != other->n[k]) into->n[k] = UNKNOWN;
}

/* Registers of a lane for the largest array or accumulator among the values of the op. */
static void note_size(pm_graph *g, pm_opid op, void *ctx) {
  int64_t *most = ctx;
  const pm_op *o = pm_get(g, op);
  for (pm_val v = o->out; v < o->out + o->n_out; v++) {
    const pm_type *t = pm_typeof(g, v);
    const pm_layid id = pm_value_of(g, v)->layout;
    if (t->rank && id)
      *most = pm_max(*most, pm_layout_regs(pm_layout_of(g, id)) * pm_dtypes[t->dtype].bits / 32);
  }
}

/* Threads part at the op, and those that go to the region have made the same request. If others
 * made a smaller one, ptxas takes that for the region, too. Arrays of up to half of the smaller
 * number are left alone: the request would cost more than it gives. */
static void repeat(const repeater *r, pm_opid op, pm_blk region, uint32_t all, uint32_t there,
                   const requests *at) {
  pm_graph *g = r->g;
  int64_t n = UNKNOWN, least = UNKNOWN, size = 0;
  for (int k = 0; k < MOST_THREADS; k++) {
    if (there >> k & 1) {
      if (n != UNKNOWN && n != at->n[k]) return;
      n = at->n[k];
    }
    if (all >> k & 1 && at->n[k] > NONE && (least == UNKNOWN || at->n[k] < least)) least = at->n[k];
  }
  if (n <= NONE || n <= least || r->asks[op]) return;
  pm_walk(g, region, note_size, &size);
  if (2 * size <= least) return;
  const pm_attr_arg attrs[] = {
      {.id = PM_ATTR_N, .i = n}, {.id = PM_ATTR_INCREASE, .i = 1}, {.id = PM_ATTR_PLACED, .i = 1}};
  pm_insert(g, region, 0, PM_OP_SET_MAX_REGISTERS, NULL, 0, NULL, 0, attrs, 3, op);
}

static void follow_branch(const repeater *r, pm_opid op, uint32_t threads, requests *at) {
  const pm_graph *g = r->g;
  const requests before = *at;
  uint32_t undecided = 0;
  for (uint32_t k = 0; k < g->n_threads; k++)
    if (threads >> k & 1 && pm_region_for_thread(g, op, k) < 0) undecided |= 1u << k;
  for (uint32_t i = 0; i < pm_get(g, op)->n_regions; i++) {
    const pm_blk region = pm_region(g, op, i);
    uint32_t there = undecided;
    for (uint32_t k = 0; k < g->n_threads; k++)
      if (threads >> k & 1 && pm_region_for_thread(g, op, k) == (int)i) there |= 1u << k;
    if (r->insert && !undecided && there) repeat(r, op, region, threads, there, &before);
    requests after = before;
    follow(r, region, there, &after);
    for (uint32_t k = 0; k < g->n_threads; k++) {
      if (!(there >> k & 1)) continue;
      const bool certain = !(undecided >> k & 1);
      if (certain) at->n[k] = after.n[k];
      else if (after.n[k] != before.n[k]) at->n[k] = UNKNOWN;
    }
  }
}

static void follow(const repeater *r, pm_blk block, uint32_t threads, requests *at) {
  const pm_graph *g = r->g;
  for (uint32_t i = 0; i < g->blocks.at[block].ops.n; i++) {
    const pm_opid op = g->blocks.at[block].ops.at[i];
    const pm_op *o = pm_get(g, op);
    if (o->code == PM_OP_SET_MAX_REGISTERS) {
      for (uint32_t k = 0; k < g->n_threads; k++)
        if (threads >> k & 1) at->n[k] = *pm_attr(g, op, PM_ATTR_N);
    } else if (pm_is_branch(o->code)) {
      follow_branch(r, op, threads, at);
    } else if (o->n_regions) {
      if (o->code != PM_OP_SCOPE &&
          r->asks[op]) { /* a loop: what its body leaves comes to it, too */
        repeater only_follow = *r;
        only_follow.insert = false;
        requests after = *at;
        for (uint32_t k = 0; k < o->n_regions; k++)
          follow(&only_follow, pm_region(g, op, k), threads, &after);
        merge(at, &after);
      }
      for (uint32_t k = 0; k < pm_get(g, op)->n_regions; k++)
        follow(r, pm_region(g, op, k), threads, at);
    }
  }
}

pm_code pm_repeat_requests(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  (void)err;
  if (g->n_threads < 2 || g->n_threads > MOST_THREADS) return PM_OK;
  bool *asks = PM_NEW(g->arena, bool, g->ops.n);
  pm_walk(g, 1, note_request, asks);
  requests at = {{NONE}};
  const repeater r = {.g = g, .asks = asks, .insert = true};
  follow(&r, 1, (uint32_t)((1ull << g->n_threads) - 1), &at);
  return PM_OK;
}
