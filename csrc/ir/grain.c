/* In groups of how many neighbours along a dimension is a bool array constant?
 *
 * A group starts at a multiple of its size, which is a power of two. Element-wise ops preserve what
 * all their operands have. A comparison `index < bound` changes at the bound: if index is an iota
 * plus b, and neither b nor the bound varies along the dimension, it is constant on groups whose
 * size divides both. So a masked access can test once for each of its vectors. */
#include "ir.h"

enum { MOST = 1 << 10, BUDGET = 256 };

typedef struct walk {
  const pm_graph *g;
  int budget;
} walk;

static bool defined_by(const walk *w, pm_val v, pm_op *out) {
  const pm_opid def = pm_value_of(w->g, v)->def;
  if (!def) return false;
  *out = *pm_get(w->g, def);
  return true;
}

static pm_val operand(const walk *w, const pm_op *o, uint32_t k) {
  return w->g->operands.at[o->in + k];
}

/* The dimension of a reshape's operand that is dim of its result; -1: only ones come and go, and
 * dim is one of those, -2: something else. */
static int through_reshape(const pm_type *from, const pm_type *to, int dim) {
  int i = 0, k = 0, found = -1;
  for (;;) {
    while (i < from->rank && from->dim[i] == 1) i++;
    while (k < to->rank && to->dim[k] == 1) k++;
    if (i == from->rank || k == to->rank) break;
    if (from->dim[i] != to->dim[k]) return -2;
    if (k == dim) found = i;
    i++, k++;
  }
  return i == from->rank && k == to->rank ? found : -2;
}

/* Of a BROADCAST, RESHAPE or LAYOUT_CAST: its operand's dimension; -1: constant along dim. */
static int source_dim(const walk *w, const pm_op *o, int dim) {
  const pm_type *from = pm_typeof(w->g, operand(w, o, 0)), *to = pm_typeof(w->g, o->out);
  const uint8_t rule = pm_ops[o->code].layout;
  if (rule == PM_LAY_FIXED) return dim;
  if (rule == PM_LAY_RESHAPE) return through_reshape(from, to, dim);
  uint32_t n;
  const int64_t *dims = pm_attr_list(w->g, pm_value_of(w->g, o->out)->def, PM_ATTR_DIMS, &n);
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] == dim) return from->dim[k] == 1 ? -1 : (int)k;
  }
  return -1;
}

static bool is_moved(const pm_op *o) {
  const uint8_t rule = pm_ops[o->code].layout;
  return rule == PM_LAY_BROADCAST || rule == PM_LAY_RESHAPE || rule == PM_LAY_FIXED;
}

/* Is v an index along dim plus something constant along it, whose divisor is *base? */
static bool is_index(walk *w, pm_val v, int dim, int64_t *base);

static int64_t grain(walk *w, pm_val v, int dim) {
  const pm_type *t = pm_typeof(w->g, v);
  pm_op o;
  if (w->budget-- <= 0) return 1;
  if (dim < 0 || !t->rank || t->dim[dim] == 1) return MOST;
  if (!defined_by(w, v, &o)) return 1;
  if (o.code == PM_OP_CONST) return MOST;
  if (is_moved(&o)) {
    const int d = source_dim(w, &o, dim);
    return d < -1 ? 1 : grain(w, operand(w, &o, 0), d);
  }
  if (o.code == PM_OP_IOTA) {
    return *pm_attr(w->g, pm_value_of(w->g, v)->def, PM_ATTR_DIM) == dim ? 1 : MOST;
  }
  if (pm_ops[o.code].layout != PM_LAY_POINTWISE) return 1;
  int64_t least = MOST, base;
  for (uint32_t k = 0; k < o.n_in && least > 1; k++) {
    least = pm_min(least, grain(w, operand(w, &o, k), dim));
  }
  const bool less = o.code == PM_OP_LT || o.code == PM_OP_GE;
  const bool more = o.code == PM_OP_GT || o.code == PM_OP_LE;
  if (least > 1 || (!less && !more)) return least;
  /* x < y, with the index at x; x > y is y < x */
  pm_val x = operand(w, &o, less ? 0 : 1), y = operand(w, &o, less ? 1 : 0);
  if (!is_index(w, x, dim, &base)) {
    /* x <= c is x < c + 1 */
    pm_scalar c;
    if (!is_index(w, y, dim, &base) || !pm_constant(w->g, x, &c)) return 1;
    base = pm_gcd(base, c.i + 1);
  } else {
    if (grain(w, y, dim) < MOST) return 1;
    base = pm_gcd(base, pm_divisor(w->g, y));
  }
  return base ? pm_min(MOST, base & -base) : MOST;
}

static bool is_index(walk *w, pm_val v, int dim, int64_t *base) {
  const pm_type *t = pm_typeof(w->g, v);
  pm_op o;
  if (w->budget-- <= 0 || dim < 0 || !pm_is_int(t->dtype) || dim >= t->rank) return false;
  if (!defined_by(w, v, &o)) return false;
  if (is_moved(&o)) return is_index(w, operand(w, &o, 0), source_dim(w, &o, dim), base);
  if (o.code == PM_OP_IOTA) {
    *base = 0;
    return *pm_attr(w->g, pm_value_of(w->g, v)->def, PM_ATTR_DIM) == dim;
  }
  if (o.code != PM_OP_ADD && o.code != PM_OP_SUB) return false;
  pm_val x = operand(w, &o, 0), y = operand(w, &o, 1);
  if (grain(w, y, dim) < MOST) {
    if (o.code == PM_OP_SUB) return false;
    const pm_val swap = x;
    x = y, y = swap;
    if (grain(w, y, dim) < MOST) return false;
  }
  if (!is_index(w, x, dim, base)) return false;
  *base = pm_gcd(*base, pm_divisor(w->g, y));
  return true;
}

int64_t pm_grain(const pm_graph *g, pm_val v, int dim) {
  walk w = {g, BUDGET};
  return grain(&w, v, dim);
}
