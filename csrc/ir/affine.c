/* Is an array of indices a start plus counts along its dimensions?
 *
 *     v[i0, i1, ...] = constant + sum(term * mul) + sum over dims d of coef[d] * i_d
 *
 * with scalar terms. Sums, differences, products with constants, and moves of iotas and scalars
 * are. Index arithmetic is assumed not to overflow, as in facts.c. An access by such indices is
 * that of a view: its address is computed once, and neighbouring elements are neighbours in memory.
 */
#include "view.h"

enum { BUDGET = 64 };

typedef struct walk {
  const pm_graph *g;
  pm_affine *out;
  int budget;
} walk;

/* Which dimension of the whole each dimension of a value is; -1: none, it has one element or does
 * not count. */
typedef struct along {
  int8_t dim[PM_MAX_RANK];
} along;

static bool add(walk *w, pm_val v, int64_t scale, along at);

static bool add_term(walk *w, pm_val v, int64_t scale) {
  pm_scalar c;
  if (pm_constant(w->g, v, &c)) {
    w->out->constant += c.i * scale;
    return true;
  }
  if (w->out->n == PM_COUNT(w->out->term)) return false;
  w->out->term[w->out->n].val = v;
  w->out->term[w->out->n++].mul = scale;
  return true;
}

/* The dims of the operand of a RESHAPE that only adds or drops ones. */
static bool through_reshape(const pm_type *from, const pm_type *to, along at, along *out) {
  int i = 0, k = 0;
  for (int d = 0; d < PM_MAX_RANK; d++) out->dim[d] = -1;
  for (;; i++, k++) {
    while (i < from->rank && from->dim[i] == 1) i++;
    while (k < to->rank && to->dim[k] == 1) k++;
    if (i == from->rank || k == to->rank) return i == from->rank && k == to->rank;
    if (from->dim[i] != to->dim[k]) return false;
    out->dim[i] = at.dim[k];
  }
}

static bool add_moved(walk *w, pm_opid def, int64_t scale, along at) {
  const pm_graph *g = w->g;
  const pm_val in = pm_in(g, def, 0);
  const pm_type *from = pm_typeof(g, in), *to = pm_typeof(g, pm_get(g, def)->out);
  along inner = at;
  uint32_t n;
  if (pm_rule_of(g, def) == PM_LAY_RESHAPE) {
    if (!through_reshape(from, to, at, &inner)) return false;
  } else if (pm_rule_of(g, def) == PM_LAY_BROADCAST) {
    const int64_t *dims = pm_attr_list(g, def, PM_ATTR_DIMS, &n);
    for (uint32_t k = 0; k < n; k++) inner.dim[k] = from->dim[k] == 1 ? -1 : at.dim[dims[k]];
  }
  return add(w, in, scale, inner);
}

static bool add(walk *w, pm_val v, int64_t scale, along at) {
  const pm_graph *g = w->g;
  const pm_type *t = pm_typeof(g, v);
  const pm_opid def = pm_value_of(g, v)->def;
  pm_scalar c;
  if (w->budget-- <= 0 || t->kind != PM_ARRAY || !pm_is_int(t->dtype)) return false;
  if (!t->rank || pm_constant(g, v, &c)) return add_term(w, v, scale);
  if (!def) return false;
  switch (pm_rule_of(g, def)) {
    case PM_LAY_BROADCAST:
    case PM_LAY_RESHAPE:
    case PM_LAY_FIXED: return add_moved(w, def, scale, at);
    default: break;
  }
  switch (pm_get(g, def)->code) {
    case PM_OP_MULTIPLE_OF: return add_moved(w, def, scale, at);
    case PM_OP_CONVERT: /* of 32 bits to 32 bits: smaller ones may have wrapped */
      if (pm_dtypes[pm_typeof(g, pm_in(g, def, 0))->dtype].bits != 32) return false;
      return add_moved(w, def, scale, at);
    case PM_OP_IOTA: {
      const int dim = at.dim[*pm_attr(g, def, PM_ATTR_DIM)];
      if (dim >= 0) w->out->coef[dim] += scale;
      return pm_dtypes[t->dtype].bits == 32;
    }
    case PM_OP_ADD:
      return add(w, pm_in(g, def, 0), scale, at) && add(w, pm_in(g, def, 1), scale, at);
    case PM_OP_SUB:
      return add(w, pm_in(g, def, 0), scale, at) && add(w, pm_in(g, def, 1), -scale, at);
    case PM_OP_MUL:
      for (uint32_t k = 0; k < 2; k++) {
        if (pm_constant(g, pm_in(g, def, k), &c) && c.i > -INT32_MAX && c.i < INT32_MAX)
          return add(w, pm_in(g, def, 1 - k), scale * c.i, at);
      }
      return false;
    default: return false;
  }
}

bool pm_affine_of(const pm_graph *g, pm_val v, pm_affine *out) {
  walk w = {g, out, BUDGET};
  along at;
  for (int d = 0; d < PM_MAX_RANK; d++) at.dim[d] = (int8_t)d;
  memset(out, 0, sizeof *out);
  return add(&w, v, 1, at);
}
