/* The integer evaluator, and which way threads go. Values form a DAG, so a query has a budget of
 * visits, as in facts.c. */
#include "eval.h"

enum { BUDGET = 256 };

/* ---- one op ------------------------------------------------------------------------------- */

static bool eval_compare(pm_opcode code, bool floats, pm_scalar x, pm_scalar y, int64_t *out) {
  const bool less = floats ? x.f < y.f : x.i < y.i, equal = floats ? x.f == y.f : x.i == y.i;
  const bool greater = floats ? x.f > y.f : x.i > y.i;
  switch (code) {
    case PM_OP_EQ: *out = equal; return true;
    case PM_OP_NE: *out = !equal; return true;
    case PM_OP_LT: *out = less; return true;
    case PM_OP_LE: *out = less || equal; return true;
    case PM_OP_GT: *out = greater; return true;
    case PM_OP_GE: *out = greater || equal; return true;
    default: return false;
  }
}

static bool eval_unary(pm_opcode code, bool boolean, int64_t x, int64_t *out) {
  switch (code) {
    case PM_OP_NEG: *out = -x; return !boolean;
    case PM_OP_ABS: *out = x < 0 ? -x : x; return !boolean;
    case PM_OP_SIGN: *out = (x > 0) - (x < 0); return !boolean;
    case PM_OP_NOT: *out = boolean ? !x : ~x; return true;
    default: return false;
  }
}

static bool eval_binary(pm_opcode code, pm_dtype t, int64_t x, int64_t y, int64_t *out) {
  const bool boolean = t == PM_BOOL, shift_ok = y >= 0 && y < pm_dtypes[t].bits;
  switch (code) {
    case PM_OP_ADD: *out = boolean ? x | y : x + y; return true;
    case PM_OP_SUB: *out = x - y; return true;
    case PM_OP_MUL: *out = (int64_t)((uint64_t)x * (uint64_t)y); return true;
    case PM_OP_DIV: *out = y ? x / y : 0; return y != 0;
    case PM_OP_REM: *out = y ? x % y : 0; return y != 0;
    case PM_OP_MIN: *out = pm_min(x, y); return true;
    case PM_OP_MAX: *out = pm_max(x, y); return true;
    case PM_OP_AND: *out = x & y; return true;
    case PM_OP_OR: *out = x | y; return true;
    case PM_OP_XOR: *out = x ^ y; return true;
    case PM_OP_SHL: *out = shift_ok ? (int64_t)((uint64_t)x << y) : 0; return shift_ok;
    case PM_OP_SHR: *out = shift_ok ? x >> y : 0; return shift_ok;
    default: return false;
  }
}

/* Does one operand decide what an op of two integers or bools gives? */
static bool eval_half(pm_opcode code, pm_dtype t, int64_t x, int64_t *out) {
  *out = code == PM_OP_OR;
  switch (code) {
    case PM_OP_MUL:
    case PM_OP_AND: return !x;
    case PM_OP_OR: return t == PM_BOOL && x;
    default: return false;
  }
}

static bool eval_two(pm_opcode code, pm_dtype t, const pm_scalar *x, const bool *known,
                     int64_t *out) {
  const bool floats = pm_is_float(t);
  for (int k = 0; k < 2 && !floats; k++) {
    if (known[k] && eval_half(code, t, x[k].i, out)) return true;
  }
  if (!known[0] || !known[1]) return false;
  return eval_compare(code, floats, x[0], x[1], out) ||
         (!floats && eval_binary(code, t, x[0].i, x[1].i, out));
}

/* The result before it is wrapped. */
static bool eval_op(const pm_graph *g, pm_opid op, const pm_scalar *x, const bool *known,
                    pm_scalar *out) {
  const pm_op *o = pm_get(g, op);
  const pm_opcode code = (pm_opcode)o->code;
  const pm_dtype from = (pm_dtype)pm_typeof(g, pm_in(g, op, 0))->dtype;
  if (code == PM_OP_SELECT) {
    const int side = known[0] && x[0].i ? 1 : 2;
    if (known[side]) *out = x[side];
    return known[0] && known[side];
  }
  if (pm_only_moves(code) || code == PM_OP_MULTIPLE_OF || code == PM_OP_OPT_BARRIER) {
    if (known[0]) *out = x[0];
    return known[0];
  }
  if (o->n_in == 2) return eval_two(code, from, x, known, &out->i);
  if (o->n_in != 1 || !known[0]) return false;
  if (code == PM_OP_CONVERT) {
    *out = pm_convert_scalar(from, (pm_dtype)pm_typeof(g, o->out)->dtype, x[0]);
    return true;
  }
  return !pm_is_float(from) && eval_unary(code, from == PM_BOOL, x[0].i, &out->i);
}

bool pm_eval(const pm_graph *g, pm_opid op, const pm_scalar *x, const bool *known, pm_scalar *out) {
  const pm_op *o = pm_get(g, op);
  unsigned char wrapped[8];
  if (!o->n_in || o->n_in > PM_EVAL_OPERANDS || o->n_out != 1 || o->n_regions) return false;
  if (!eval_op(g, op, x, known, out)) return false;
  const pm_dtype to = (pm_dtype)pm_typeof(g, o->out)->dtype;
  pm_store_scalar(to, wrapped, *out);
  *out = pm_load_scalar(to, wrapped);
  return true;
}

/* ---- threads ------------------------------------------------------------------------------ */

typedef struct query {
  const pm_graph *g;
  int64_t thread;
  int budget;
} query;

static bool value(query *q, pm_val v, pm_scalar *out) {
  const pm_graph *g = q->g;
  const pm_type *type = pm_typeof(g, v);
  const pm_opid def = pm_value_of(g, v)->def;
  pm_scalar x[PM_EVAL_OPERANDS];
  bool known[PM_EVAL_OPERANDS] = {false};
  if (!def || type->kind != PM_ARRAY || pm_is_float(type->dtype) || q->budget-- <= 0) return false;
  if (pm_constant(g, v, out)) return true;
  const pm_op *o = pm_get(g, def);
  if (o->code == PM_OP_AXIS) {
    out->i = q->thread;
    return *pm_attr(g, def, PM_ATTR_AXIS) == PM_AXIS_THREAD;
  }
  for (uint32_t k = 0; k < o->n_in && k < PM_EVAL_OPERANDS; k++) {
    known[k] = value(q, pm_in(g, def, k), &x[k]);
  }
  return pm_eval(g, def, x, known, out);
}

bool pm_value_for_thread(const pm_graph *g, pm_val v, int64_t thread, int64_t *out) {
  query q = {g, thread, BUDGET};
  pm_scalar found;
  if (!value(&q, v, &found)) return false;
  *out = found.i;
  return true;
}

uint32_t pm_chosen_region(const pm_op *branch, int64_t x) {
  if (branch->code == PM_OP_IF) return x ? 0 : 1;
  return (uint32_t)pm_max(0, pm_min(x, (int64_t)branch->n_regions - 1));
}

int pm_region_for_thread(const pm_graph *g, pm_opid op, int64_t thread) {
  int64_t x;
  const pm_op *o = pm_get(g, op);
  if (!pm_is_branch(o->code) || !pm_value_for_thread(g, pm_in(g, op, 0), thread, &x)) return -1;
  return (int)pm_chosen_region(o, x);
}

bool pm_may_take(const pm_graph *g, pm_opid op, uint32_t r, int64_t thread) {
  const int taken = pm_region_for_thread(g, op, thread);
  return taken < 0 || taken == (int)r;
}
