/* The integer evaluator, by the rules that numbers.def names, and which way threads go. Values form
 * a DAG, so a query has a budget of visits, as in facts.c. */
#include "eval.h"

enum { BUDGET = 256 };

/* ---- what numbers.def says ------------------------------------------------------------------ */

const pm_law pm_laws[PM_OP_COUNT] = {
#define PM_NUMBER(op, value, range, divisor, when, x, y, how) \
  [PM_OP_##op] = {.commutes = PM_COMMUTES_##when,             \
                  .unit = PM_ELEMENT_##x,                     \
                  .decides = PM_ELEMENT_##y,                  \
                  .like = PM_LIKE_##how},
#include "numbers.def"
#undef PM_NUMBER
};

static int64_t element(pm_element e, pm_dtype t) {
  if (e == PM_ELEMENT_ONES) return t == PM_BOOL ? 1 : -1;
  return e == PM_ELEMENT_ONE || e == PM_ELEMENT_ANY_ONE;
}

bool pm_is_element(pm_element e, pm_dtype t, pm_scalar x) {
  if (e == PM_ELEMENT_NO) return false;
  if (pm_is_float(t)) return e == PM_ELEMENT_ANY_ONE && x.f == 1;
  return x.i == element(e, t);
}

bool pm_commutes(pm_opcode code, pm_dtype t) {
  const uint8_t when = pm_laws[code].commutes;
  return when == PM_COMMUTES_ALWAYS || (when == PM_COMMUTES_INTS && !pm_is_float(t));
}

/* ---- one op ------------------------------------------------------------------------------- */

typedef struct operands {
  pm_dtype from, to; /* of the first operand, of the result */
  const pm_scalar *x;
  const bool *known;
  bool all; /* are known */
} operands;

/* Before it is wrapped. */
typedef bool value_rule(const operands *o, pm_scalar *out);

#define INTEGERS(name, condition, result)                              \
  static bool value_##name(const operands *o, pm_scalar *out) {        \
    const int64_t x = o->x[0].i, y = o->x[1].i;                        \
    const bool boolean = o->from == PM_BOOL;                           \
    if (!o->all || pm_is_float(o->from) || !(condition)) return false; \
    out->i = (result);                                                 \
    return (void)y, (void)boolean, true;                               \
  }
INTEGERS(neg, !boolean, -x)
INTEGERS(abs, !boolean, x < 0 ? -x : x)
INTEGERS(sign, !boolean, (x > 0) - (x < 0))
INTEGERS(not, true, boolean ? !x : ~x)
INTEGERS(add, true, boolean ? x | y : x + y)
INTEGERS(sub, true, x - y)
INTEGERS(mul, true, (int64_t)((uint64_t)x *(uint64_t)y))
INTEGERS(div, y, x / y)
INTEGERS(rem, y, x % y)
INTEGERS(min, true, pm_min(x, y))
INTEGERS(max, true, pm_max(x, y))
INTEGERS(and, true, x &y)
INTEGERS(or, true, x | y)
INTEGERS(xor, true, x ^ y)
INTEGERS(shl, y >= 0 && y < pm_dtypes[o->from].bits, (int64_t)((uint64_t)x << y))
INTEGERS(shr, y >= 0 && y < pm_dtypes[o->from].bits, x >> y)
#undef INTEGERS

#define COMPARISON(name, is)                                                         \
  static bool value_##name(const operands *o, pm_scalar *out) {                      \
    const pm_scalar *x = o->x;                                                       \
    if (o->all) out->i = pm_is_float(o->from) ? x[0].f is x[1].f : x[0].i is x[1].i; \
    return o->all;                                                                   \
  }
COMPARISON(eq, ==)
COMPARISON(ne, !=)
COMPARISON(lt, <)
COMPARISON(le, <=)
COMPARISON(gt, >)
COMPARISON(ge, >=)
#undef COMPARISON

static bool value_select(const operands *o, pm_scalar *out) {
  const int side = o->known[0] && o->x[0].i ? 1 : 2;
  if (o->known[side]) *out = o->x[side];
  return o->known[0] && o->known[side];
}

static bool value_convert(const operands *o, pm_scalar *out) {
  if (o->all) *out = pm_convert_scalar(o->from, o->to, o->x[0]);
  return o->all;
}

static bool value_operand(const operands *o, pm_scalar *out) {
  if (o->known[0]) *out = o->x[0];
  return o->known[0];
}

enum { value_none = 0 }; /* no rule */
static value_rule *const values[PM_OP_COUNT] = {
#define PM_NUMBER(op, value, range, divisor, commutes, unit, decides, like) \
  [PM_OP_##op] = value_##value,
#include "numbers.def"
#undef PM_NUMBER
};

/* Does one operand decide what an op of two integers or bools gives? */
static bool is_decided(pm_opcode code, const operands *o, pm_scalar *out) {
  const pm_element e = (pm_element)pm_laws[code].decides;
  if (e == PM_ELEMENT_NO || pm_is_float(o->from)) return false;
  for (int k = pm_commutes(code, o->from) ? 0 : 1; k < 2; k++) {
    if (!o->known[k] || !pm_is_element(e, o->from, o->x[k])) continue;
    out->i = e == PM_ELEMENT_ONES ? element(e, o->from) : 0;
    return true;
  }
  return false;
}

bool pm_eval(const pm_graph *g, pm_opid op, const pm_scalar *x, const bool *known, pm_scalar *out) {
  const pm_op *o = pm_get(g, op);
  unsigned char wrapped[8];
  if (!values[o->code]) return false;
  const pm_dtype to = (pm_dtype)pm_typeof(g, o->out)->dtype;
  operands in = {(pm_dtype)pm_typeof(g, pm_in(g, op, 0))->dtype, to, x, known, true};
  for (uint32_t k = 0; k < o->n_in; k++) in.all &= known[k];
  if (!is_decided((pm_opcode)o->code, &in, out) && !values[o->code](&in, out)) return false;
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
  pm_scalar x[PM_EVAL_OPERANDS] = {{0}};
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
