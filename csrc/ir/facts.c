/* Facts about scalars, derived from the graph on demand: constants, divisors, ranges.
 *
 * A query walks the definitions of a value. Values form a DAG, so every query has a budget of
 * visits; when it is exhausted, the answer is "nothing known". A query of ranges keeps those of
 * some values, which it does not visit twice. Index arithmetic is assumed not to overflow, except
 * that a range that exceeds its dtype is dropped. */
#include "ir.h"

enum { BUDGET = 256, KEPT = 32 };

static bool defined_by(const pm_graph *g, pm_val v, pm_op *out) {
  pm_opid def = pm_value_of(g, v)->def;
  if (!def) return false;
  *out = *pm_get(g, def);
  return true;
}

static pm_val operand(const pm_graph *g, const pm_op *o, uint32_t k) {
  return g->operands.at[o->in + k];
}

/* ---- constants ---------------------------------------------------------------------------- */

static pm_scalar constant_of(const pm_graph *g, pm_opid op) {
  pm_dtype dtype = pm_typeof(g, pm_get(g, op)->out)->dtype;
  int64_t word = *pm_attr(g, op, PM_ATTR_VALUE);
  pm_scalar v;
  if (!pm_is_float(dtype)) return (pm_scalar){.i = word};
  memcpy(&v.f, &word, sizeof word);
  unsigned char rounded[8];
  pm_store_scalar(dtype, rounded, v);
  return pm_load_scalar(dtype, rounded);
}

bool pm_constant(const pm_graph *g, pm_val v, pm_scalar *out) {
  enum { DEPTH = 32 };
  pm_dtype path[DEPTH]; /* dtypes on the way, last conversion first */
  for (int n = 0; n < DEPTH; n++) {
    pm_op o;
    if (!defined_by(g, v, &o)) return false;
    path[n] = pm_typeof(g, v)->dtype;
    if (o.code == PM_OP_CONST) {
      *out = constant_of(g, pm_value_of(g, v)->def);
      for (; n > 0; n--) *out = pm_convert_scalar(path[n], path[n - 1], *out);
      return true;
    }
    if (o.code != PM_OP_CONVERT && o.code != PM_OP_BROADCAST && o.code != PM_OP_MULTIPLE_OF) {
      return false;
    }
    v = operand(g, &o, 0);
  }
  return false;
}

static bool int_constant(const pm_graph *g, pm_val v, int64_t *out) {
  pm_scalar s;
  if (!pm_is_int(pm_typeof(g, v)->dtype) || !pm_constant(g, v, &s)) return false;
  *out = s.i;
  return true;
}

/* ---- divisors ----------------------------------------------------------------------------- */

typedef struct span {
  int64_t lo, hi;
} span;

typedef struct facts {
  const pm_graph *g;
  int budget;
  bool compares; /* the next comparison is what is asked for; others are not worth their visits */
  pm_val kept[KEPT]; /* 0: none */
  span range[KEPT];
} facts;

static int64_t divisor(facts *f, pm_val v);

/* An IF, SWITCH or SCOPE: its results are what one of its regions yields. */
static bool yields_results(const pm_op *o) { return o->n_regions && !pm_is_loop(o->code); }

/* gcd of what the regions yield for result k */
static int64_t divisor_of_yields(facts *f, const pm_op *o, uint32_t k) {
  int64_t d = 0;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    pm_opid yield = pm_terminator(f->g, f->g->region_blocks.at[o->regions + r]);
    d = pm_gcd(d, divisor(f, pm_in(f->g, yield, k)));
  }
  return d;
}

static int64_t product(int64_t a, int64_t b) {
  int64_t limit = INT64_C(1) << 40;
  if (!a || !b) return 0;
  return a > limit / b ? pm_max(a, b) : a * b;
}

static int64_t power_of_two_in(int64_t d) { return d ? d & -d : 0; }

/* Rules of numbers.def: of the operands of an op. */
typedef int64_t divisor_rule(facts *f, const pm_op *o);

static int64_t divisor_in(facts *f, const pm_op *o, uint32_t k) {
  return divisor(f, operand(f->g, o, k));
}

/* A shift by a constant. */
static bool shift_of(facts *f, const pm_op *o, int64_t *c) {
  return int_constant(f->g, operand(f->g, o, 1), c) && *c >= 0 && *c <= 31;
}

static int64_t divisor_any(facts *f, const pm_op *o) {
  (void)f, (void)o;
  return 1;
}

static int64_t divisor_axis(facts *f, const pm_op *o) {
  int64_t lo, hi;
  return pm_range(f->g, o->out, &lo, &hi) && !lo && !hi ? 0 : 1;
}

static int64_t divisor_size(facts *f, const pm_op *o) {
  return f->g->sizes.at[f->g->attrs.at[o->attr]].multiple;
}

static int64_t divisor_operand(facts *f, const pm_op *o) { return divisor_in(f, o, 0); }

static int64_t divisor_promise(facts *f, const pm_op *o) {
  const int64_t promised = f->g->attrs.at[o->attr], known = divisor_in(f, o, 0);
  return known ? product(promised / pm_gcd(promised, known), known) : 0;
}

static int64_t divisor_both(facts *f, const pm_op *o) {
  const int64_t x = divisor_in(f, o, 0);
  return pm_gcd(x, divisor_in(f, o, 1));
}

static int64_t divisor_mul(facts *f, const pm_op *o) {
  const int64_t x = divisor_in(f, o, 0);
  return product(x, divisor_in(f, o, 1));
}

static int64_t divisor_shl(facts *f, const pm_op *o) {
  int64_t c;
  return shift_of(f, o, &c) ? product(divisor_in(f, o, 0), INT64_C(1) << c) : 1;
}

static int64_t divisor_div(facts *f, const pm_op *o) {
  int64_t c;
  if (!int_constant(f->g, operand(f->g, o, 1), &c) || c <= 0) return 1;
  const int64_t d = divisor_in(f, o, 0);
  return d % c ? 1 : d / c;
}

static int64_t divisor_shr(facts *f, const pm_op *o) {
  int64_t c;
  if (!shift_of(f, o, &c)) return 1;
  const int64_t d = divisor_in(f, o, 0);
  return d & ((INT64_C(1) << c) - 1) ? 1 : d >> c;
}

static int64_t divisor_rem(facts *f, const pm_op *o) {
  int64_t c;
  if (!int_constant(f->g, operand(f->g, o, 1), &c) || !c) return 1;
  return pm_gcd(divisor_in(f, o, 0), c);
}

static int64_t divisor_either(facts *f, const pm_op *o) {
  const int64_t x = power_of_two_in(divisor_in(f, o, 0));
  return pm_max(x, power_of_two_in(divisor_in(f, o, 1)));
}

static int64_t divisor_bits(facts *f, const pm_op *o) {
  return power_of_two_in(divisor_both(f, o));
}

static int64_t divisor_select(facts *f, const pm_op *o) {
  const int64_t x = divisor_in(f, o, 1);
  return pm_gcd(x, divisor_in(f, o, 2));
}

static int64_t divisor_convert(facts *f, const pm_op *o) {
  const pm_dtype from = pm_typeof(f->g, operand(f->g, o, 0))->dtype;
  if (!pm_is_int(from)) return 1;
  const int64_t d = divisor_in(f, o, 0);
  const bool fits = pm_dtypes[from].bits <= pm_dtypes[pm_typeof(f->g, o->out)->dtype].bits;
  return fits ? d : power_of_two_in(d);
}

static divisor_rule *const divisors[PM_OP_COUNT] = {
#define PM_NUMBER(op, value, range, divisor, commutes, unit, decides, like) \
  [PM_OP_##op] = divisor_##divisor,
#include "numbers.def"
#undef PM_NUMBER
};

static int64_t divisor(facts *f, pm_val v) {
  int64_t c;
  pm_op o;
  if (f->budget-- <= 0) return 1;
  const pm_type *t = pm_typeof(f->g, v);
  if (t->kind != PM_ARRAY || !pm_is_int(t->dtype)) return 1;
  if (int_constant(f->g, v, &c)) return c < 0 ? -c : c;
  if (!defined_by(f->g, v, &o)) return 1;
  if (yields_results(&o)) return divisor_of_yields(f, &o, pm_value_of(f->g, v)->index);
  return divisors[o.code] ? divisors[o.code](f, &o) : 1;
}

int64_t pm_divisor(const pm_graph *g, pm_val v) {
  facts f = {.g = g, .budget = BUDGET};
  return divisor(&f, v);
}

/* ---- control ------------------------------------------------------------------------------ */

bool pm_in_loop(const pm_graph *g, pm_opid op) {
  while ((op = g->blocks.at[pm_get(g, op)->parent].parent)) {
    if (pm_is_loop(pm_get(g, op)->code)) return true;
  }
  return false;
}

/* ---- launch ------------------------------------------------------------------------------- */

int64_t pm_grid_size(const pm_graph *g) {
  int64_t n = 1;
  for (uint32_t k = 0; k < g->n_grid; k++) {
    if (__builtin_mul_overflow(n, g->grid[k], &n)) return INT64_MAX / 4;
  }
  return pm_min(n, INT64_MAX / 4);
}

typedef struct sharing {
  bool takes, placed; /* placed: an op asks for its grid point */
} sharing;

static void note_sharing(pm_graph *g, pm_opid op, void *ctx) {
  sharing *s = ctx;
  const uint16_t code = pm_get(g, op)->code;
  s->takes |= code == PM_OP_FETCH_TILE;
  s->placed |= code == PM_OP_AXIS && *pm_attr(g, op, PM_ATTR_AXIS) == PM_AXIS_GRID;
}

bool pm_shares_grid(const pm_graph *g) {
  sharing s = {0};
  pm_walk((pm_graph *)g, 1, note_sharing, &s); /* the visitor changes nothing */
  return s.takes && !s.placed;
}

/* ---- ranges ------------------------------------------------------------------------------- */

static span range(facts *f, pm_val v);

static span span_of_dtype(pm_dtype t) {
  int bits = pm_dtypes[t].bits;
  switch (pm_dtypes[t].class) {
    case PM_CLASS_BOOL: return (span){0, 1};
    case PM_CLASS_UINT: return (span){0, (INT64_C(1) << bits) - 1};
    default: return (span){-(INT64_C(1) << (bits - 1)), (INT64_C(1) << (bits - 1)) - 1};
  }
}

static span hull(span a, span b) { return (span){pm_min(a.lo, b.lo), pm_max(a.hi, b.hi)}; }

static span hull_of_products(span a, span b) {
  span low = {pm_min(a.lo * b.lo, a.lo * b.hi), pm_max(a.lo * b.lo, a.lo * b.hi)};
  span high = {pm_min(a.hi * b.lo, a.hi * b.hi), pm_max(a.hi * b.lo, a.hi * b.hi)};
  return hull(low, high);
}

static span range_of_yields(facts *f, const pm_op *o, uint32_t k) {
  span s = {0, 0};
  for (uint32_t r = 0; r < o->n_regions; r++) {
    pm_opid yield = pm_terminator(f->g, f->g->region_blocks.at[o->regions + r]);
    span one = range(f, pm_in(f->g, yield, k));
    s = r ? hull(s, one) : one;
  }
  return s;
}

/* Rules of numbers.def: of the operands of an op, whose dtype has the bounds `all`. */
typedef span range_rule(facts *f, const pm_op *o, span all);

static span range_in(facts *f, const pm_op *o, uint32_t k) { return range(f, operand(f->g, o, k)); }

static span range_any(facts *f, const pm_op *o, span all) {
  (void)f, (void)o;
  return all;
}

static span range_operand(facts *f, const pm_op *o, span all) {
  (void)all;
  return range_in(f, o, 0);
}

static span range_axis(facts *f, const pm_op *o, span all) {
  const pm_graph *g = f->g;
  int64_t axis = g->attrs.at[o->attr], dim = g->attrs.at[o->attr + 1];
  if (axis == PM_AXIS_THREAD) return (span){0, (int64_t)g->n_threads - 1};
  if (axis == PM_AXIS_WARP) return (span){0, 3};
  if (axis == PM_AXIS_GRID && dim < g->n_grid) return (span){0, g->grid[dim] - 1};
  if (axis == PM_AXIS_CLUSTER && dim < g->n_cluster) return (span){0, g->cluster[dim] - 1};
  if (axis == PM_AXIS_DEVICE && dim < g->n_mesh) return (span){0, g->mesh[dim] - 1};
  return all;
}

static span range_size(facts *f, const pm_op *o, span all) {
  const pm_size *s = &f->g->sizes.at[f->g->attrs.at[o->attr]];
  (void)all;
  return (span){s->least, s->most};
}

static span range_iota(facts *f, const pm_op *o, span all) {
  (void)all;
  return (span){0, pm_typeof(f->g, o->out)->dim[f->g->attrs.at[o->attr]] - 1};
}

static span range_first_tile(facts *f, const pm_op *o, span all) {
  (void)o, (void)all;
  return (span){0, pm_max(pm_grid_size(f->g) - 1, 0)};
}

static span range_count(facts *f, const pm_op *o, span all) {
  (void)f, (void)o;
  return (span){0, all.hi};
}

static span range_neg(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0);
  (void)all;
  return (span){-a.hi, -a.lo};
}

static span range_add(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  (void)all;
  return (span){a.lo + b.lo, a.hi + b.hi};
}

static span range_sub(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  (void)all;
  return (span){a.lo - b.hi, a.hi - b.lo};
}

static span range_mul(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  const int64_t big = INT64_C(1) << 31; /* of unsigned factors the product may leave int64 */
  return a.hi > big || b.hi > big ? all : hull_of_products(a, b);
}

static span range_min(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  (void)all;
  return (span){pm_min(a.lo, b.lo), pm_min(a.hi, b.hi)};
}

static span range_max(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  (void)all;
  return (span){pm_max(a.lo, b.lo), pm_max(a.hi, b.hi)};
}

static span range_div(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  if (b.lo <= 0) return all;
  return (span){a.lo / (a.lo < 0 ? b.lo : b.hi), a.hi / (a.hi < 0 ? b.hi : b.lo)};
}

/* x % y truncates toward zero, as x / y does */
static span range_rem(facts *f, const pm_op *o, span all) {
  const span y = range_in(f, o, 1);
  if (y.lo <= 0) return all;
  const span x = range_in(f, o, 0);
  if (x.lo >= 0) return x.hi < y.lo ? x : (span){0, pm_min(x.hi, y.hi - 1)};
  return (span){pm_max(x.lo, 1 - y.hi), pm_max(0, pm_min(x.hi, y.hi - 1))};
}

static span range_shl(facts *f, const pm_op *o, span all) {
  int64_t c;
  if (!shift_of(f, o, &c) || c > 30) return all;
  const span a = range_in(f, o, 0);
  return (span){a.lo * (INT64_C(1) << c), a.hi * (INT64_C(1) << c)};
}

static span range_shr(facts *f, const pm_op *o, span all) {
  int64_t c;
  if (!shift_of(f, o, &c)) return all;
  const span a = range_in(f, o, 0);
  return (span){a.lo >> c, a.hi >> c};
}

static span range_and(facts *f, const pm_op *o, span all) {
  const span a = range_in(f, o, 0), b = range_in(f, o, 1);
  if (a.lo >= 0 && b.lo >= 0) return (span){0, pm_min(a.hi, b.hi)};
  if (a.lo >= 0) return (span){0, a.hi};
  return b.lo >= 0 ? (span){0, b.hi} : all;
}

static span range_convert(facts *f, const pm_op *o, span all) {
  return pm_is_float(pm_typeof(f->g, operand(f->g, o, 0))->dtype) ? all : range_in(f, o, 0);
}

/* a < b for all elements of both, or for none; `all`: neither */
static span range_less(facts *f, pm_val a, pm_val b, span all) {
  if (!f->compares) return all;
  f->compares = false;
  const span x = range(f, a), y = range(f, b);
  if (x.hi < y.lo) return (span){1, 1};
  return x.lo >= y.hi ? (span){0, 0} : all;
}

static span inverse(span s) { return (span){1 - s.hi, 1 - s.lo}; }

static span range_lt(facts *f, const pm_op *o, span all) {
  return range_less(f, operand(f->g, o, 0), operand(f->g, o, 1), all);
}

static span range_gt(facts *f, const pm_op *o, span all) {
  return range_less(f, operand(f->g, o, 1), operand(f->g, o, 0), all);
}

static span range_ge(facts *f, const pm_op *o, span all) { return inverse(range_lt(f, o, all)); }

static span range_le(facts *f, const pm_op *o, span all) { return inverse(range_gt(f, o, all)); }

/* Quotients and remainders of Python are `r < 0 ? x + c : x`: known is that r is not negative, or,
 * if r is x, that each side has its sign. */
static span range_select(facts *f, const pm_op *o, span all) {
  const pm_graph *g = f->g;
  const pm_val p = operand(g, o, 0), yes = operand(g, o, 1), no = operand(g, o, 2);
  span b = range(f, no);
  pm_op less, sum;
  int64_t zero, c;
  (void)all;
  if (!defined_by(g, p, &less) || less.code != PM_OP_LT ||
      !int_constant(g, operand(g, &less, 1), &zero) || zero) {
    return hull(range(f, yes), b);
  }
  const pm_val r = operand(g, &less, 0);
  if (!pm_is_float(pm_typeof(g, r)->dtype) && range(f, r).lo >= 0) return b;
  if (r != no || b.lo >= 0 || b.hi < 0 || !defined_by(g, yes, &sum) || sum.code != PM_OP_ADD ||
      operand(g, &sum, 0) != no || !int_constant(g, operand(g, &sum, 1), &c)) {
    return hull(range(f, yes), b);
  }
  return hull((span){b.lo + c, c - 1}, (span){0, b.hi});
}

static range_rule *const ranges[PM_OP_COUNT] = {
#define PM_NUMBER(op, value, range, divisor, commutes, unit, decides, like) \
  [PM_OP_##op] = range_##range,
#include "numbers.def"
#undef PM_NUMBER
};

/* The index of a loop runs from lower to below upper; inside the body there was a step to make. */
static span range_of_arg(facts *f, pm_val v, span all) {
  const pm_value *value = pm_value_of(f->g, v);
  pm_opid parent = f->g->blocks.at[value->block].parent;
  if (!parent || value->index || !pm_has_index(pm_get(f->g, parent))) return all;
  span lower = range(f, pm_in(f->g, parent, 0)), upper = range(f, pm_in(f->g, parent, 1));
  if (lower.lo >= upper.hi) return lower; /* never runs */
  return (span){lower.lo, upper.hi - 1};
}

static span range(facts *f, pm_val v) {
  pm_dtype dtype = pm_typeof(f->g, v)->dtype;
  span all = span_of_dtype(dtype), s;
  int64_t c;
  pm_op o;
  const uint32_t at = v % KEPT;
  if (f->budget > 0 && f->kept[at] == v) return f->range[at];
  if (f->budget-- <= 0) return all;
  if (int_constant(f->g, v, &c)) return (span){c, c};
  if (defined_by(f->g, v, &o)) {
    const uint32_t index = pm_value_of(f->g, v)->index;
    s = yields_results(&o) ? range_of_yields(f, &o, index)
        : ranges[o.code]   ? ranges[o.code](f, &o, all)
                           : all;
  } else {
    s = range_of_arg(f, v, all);
  }
  if (s.lo < all.lo || s.hi > all.hi) s = all;
  if (!f->compares) {
    f->kept[at] = v;
    f->range[at] = s;
  }
  return s;
}

bool pm_element_range(const pm_graph *g, pm_val v, int64_t *lo, int64_t *hi) {
  const pm_type *t = pm_typeof(g, v);
  if (t->kind != PM_ARRAY || !pm_is_int(t->dtype)) return false;
  facts f = {.g = g, .budget = BUDGET};
  const span s = range(&f, v);
  *lo = s.lo;
  *hi = s.hi;
  return true;
}

bool pm_compared_range(const pm_graph *g, pm_opid op, int64_t *lo, int64_t *hi) {
  const pm_op *o = pm_get(g, op);
  if (o->n_in != 2 || !pm_is_int(pm_typeof(g, operand(g, o, 0))->dtype)) return false;
  facts f = {.g = g, .budget = BUDGET, .compares = true};
  const span s = range(&f, o->out);
  *lo = s.lo;
  *hi = s.hi;
  return true;
}

bool pm_range(const pm_graph *g, pm_val v, int64_t *lo, int64_t *hi) {
  const pm_type *t = pm_typeof(g, v);
  if (t->kind != PM_ARRAY || t->rank || !pm_is_int(t->dtype)) return false;
  facts f = {.g = g, .budget = BUDGET};
  span all = span_of_dtype(t->dtype), s = range(&f, v);
  *lo = s.lo;
  *hi = s.hi;
  return s.lo > all.lo || s.hi < all.hi || pm_dtypes[t->dtype].bits < 32;
}

bool pm_ends_inside(const pm_graph *g, pm_val v, uint32_t size, int64_t count) {
  pm_op o;
  for (int budget = BUDGET; budget && defined_by(g, v, &o); budget--) {
    if (o.code == PM_OP_SIZE) {
      const pm_size *s = &g->sizes.at[g->attrs.at[o.attr]];
      if (s->how != PM_SIZE_SUB || s->a != size) return false;
      const pm_size *less = &g->sizes.at[s->b];
      return less->how == PM_SIZE_NUMBER && less->a >= count;
    }
    if (o.code == PM_OP_MIN && pm_ends_inside(g, operand(g, &o, 0), size, count)) return true;
    if (o.code != PM_OP_MIN && o.code != PM_OP_MULTIPLE_OF) return false;
    v = operand(g, &o, o.code == PM_OP_MIN);
  }
  return false;
}
