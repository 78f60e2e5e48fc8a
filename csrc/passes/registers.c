/* Registers of a block: set_max_registers must leave enough for all of its threads.
 *
 * A request for more registers than the SM has left blocks forever, so the sum is checked before
 * anything runs. The body is walked once for each thread index. A branch is decided if its
 * predicate follows from the index. A thread needs the maximum of its requests, or its share at
 * launch if it makes none. If a branch that cannot be decided contains a request, nothing is
 * concluded. */
#include "passes.h"

enum { SM_REGISTERS = 65536, LANES = 128, MAX_DEPTH = 24 };

typedef struct walker {
  const pm_graph *g;
  int64_t thread;
  int64_t most; /* 0: no request yet */
  pm_opid op;   /* of the largest request */
  bool any, unknown;
} walker;

static bool eval(const walker *w, pm_val v, int depth, int64_t *out);

static bool eval_two(pm_opcode code, int64_t a, int64_t b, int64_t *out) {
  switch (code) {
    case PM_OP_ADD: *out = a + b; return true;
    case PM_OP_SUB: *out = a - b; return true;
    case PM_OP_MUL: *out = a * b; return true;
    case PM_OP_DIV: *out = b ? a / b : 0; return b != 0;
    case PM_OP_REM: *out = b ? a % b : 0; return b != 0;
    case PM_OP_MIN: *out = pm_min(a, b); return true;
    case PM_OP_MAX: *out = pm_max(a, b); return true;
    case PM_OP_AND: *out = a & b; return true;
    case PM_OP_OR: *out = a | b; return true;
    case PM_OP_XOR: *out = a ^ b; return true;
    case PM_OP_EQ: *out = a == b; return true;
    case PM_OP_NE: *out = a != b; return true;
    case PM_OP_LT: *out = a < b; return true;
    case PM_OP_LE: *out = a <= b; return true;
    case PM_OP_GT: *out = a > b; return true;
    case PM_OP_GE: *out = a >= b; return true;
    default: return false;
  }
}

static bool is_small(int64_t x) { return x >= INT32_MIN && x <= INT32_MAX; }

/* Value of an op for the current thread; true if it is known. */
static bool eval_op(const walker *w, pm_opid op, int depth, int64_t *out) {
  const pm_graph *g = w->g;
  const pm_op *o = pm_get(g, op);
  int64_t x[3];
  bool known[3] = {false, false, false};
  if (o->code == PM_OP_AXIS) {
    *out = w->thread;
    return *pm_attr(g, op, PM_ATTR_AXIS) == PM_AXIS_THREAD;
  }
  if (!o->n_in || o->n_in > 3 || o->n_regions) return false;
  for (uint32_t k = 0; k < o->n_in; k++)
    known[k] = eval(w, pm_in(g, op, k), depth + 1, &x[k]) && is_small(x[k]);
  bool truth = pm_typeof(g, o->out)->dtype == PM_BOOL;
  if (truth && (o->code == PM_OP_AND || o->code == PM_OP_OR)) {
    int64_t decides = o->code == PM_OP_OR;
    for (int k = 0; k < 2; k++)
      if (known[k] && x[k] == decides) return *out = decides, true;
  }
  for (uint32_t k = 0; k < o->n_in; k++)
    if (!known[k]) return false;
  switch (o->code) {
    case PM_OP_CONVERT:
    case PM_OP_MULTIPLE_OF:
    case PM_OP_OPT_BARRIER: *out = x[0]; return true;
    case PM_OP_NOT: *out = !x[0]; return truth;
    case PM_OP_SELECT: *out = x[0] ? x[1] : x[2]; return true;
    default: return o->n_in == 2 && eval_two((pm_opcode)o->code, x[0], x[1], out);
  }
}

static bool eval(const walker *w, pm_val v, int depth, int64_t *out) {
  const pm_type *type = pm_typeof(w->g, v);
  pm_scalar number;
  if (type->kind != PM_ARRAY || type->rank || pm_is_float(type->dtype) || depth > MAX_DEPTH)
    return false;
  if (pm_constant(w->g, v, &number)) return *out = number.i, true;
  pm_opid def = pm_value_of(w->g, v)->def;
  return def && eval_op(w, def, depth, out);
}

bool pm_value_for_thread(const pm_graph *g, pm_val v, int64_t thread, int64_t *out) {
  const walker w = {.g = g, .thread = thread};
  return eval(&w, v, 0, out);
}

static void walk(walker *w, pm_blk block);

/* The regions of a branch that may run: one, or all of them if the predicate is unknown. */
static void walk_branch(walker *w, pm_opid op) {
  const pm_op *o = pm_get(w->g, op);
  int64_t which;
  if (eval(w, pm_in(w->g, op, 0), 0, &which)) {
    if (o->code == PM_OP_IF) which = !which;
    walk(w, pm_region(w->g, op, (uint32_t)pm_min(pm_max(which, 0), o->n_regions - 1)));
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
    if (o->code == PM_OP_SET_MAX_REGISTERS) {
      int64_t n = *pm_attr(w->g, op, PM_ATTR_N);
      w->any = true;
      if (n > w->most) {
        w->most = n;
        w->op = op;
      }
    } else if (o->code == PM_OP_IF || o->code == PM_OP_SWITCH) {
      walk_branch(w, op);
    } else {
      for (uint32_t r = 0; r < o->n_regions; r++) walk(w, pm_region(w->g, op, r));
    }
  }
}

pm_code pm_check_registers(pm_graph *g, const pm_target *t, pm_err *err) {
  int64_t total = 0, share = SM_REGISTERS / (LANES * (int64_t)g->n_threads) / 8 * 8, most = 0;
  pm_opid worst = 0;
  pm_text text;
  (void)t;
  pm_text_init(&text, g->arena);
  if (share > 255) share = 255;
  for (uint32_t k = 0; k < g->n_threads; k++) {
    walker w = {.g = g, .thread = k};
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
          "%lld in all, and there are %d: the block would wait for ever. Decrease others, or "
          "increase to less",
          text.at, (long long)share, (long long)total, SM_REGISTERS);
  pm_err_op(err, g, worst);
  return err->code;
}
