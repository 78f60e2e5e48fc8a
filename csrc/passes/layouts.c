/* Register layouts of all arrays of a kernel.
 *
 * 1. Find the splats: values computed only from splats (a fixed point over loops). All others are
 *    "varied", and only they need a decision.
 * 2. Form classes: varied values that must share one layout, because a pointwise op or control flow
 *    connects them, are joined by union-find.
 * 3. Settle each class once, in this order: what ops demand (accumulators), what the user wrote,
 *    then relations (reduce, broadcast, reshape, slice and layout_cast derive the layout of one
 *    side from the other) until nothing changes. Then one preference after another, each followed
 *    by the relations again, and finally the strided default. Program order breaks ties, so the
 *    result is deterministic.
 * 4. Rewrite: each op gets its operands and produces its result in the layouts of their classes.
 *    Where these differ, a LAYOUT_CAST is inserted after the definition of the value (a load or
 *    iota is duplicated instead).
 *
 * Loads, stores, iotas and layout_casts adapt to the class they are in. A layout that the user
 * wrote there and that loses to a stronger one is replaced. */
#include "../ir/relayout.h"
#include "../ir/tmem.h"
#include "derive.h"

typedef struct converted {
  pm_val from, to;
  pm_layid layout;
} converted;

typedef struct pass {
  pm_graph *g;
  pm_err *err;
  pm_code code;
  uint32_t n_values; /* before the rewrite */
  bool *varied, grew;
  pm_val *parent;          /* parent in the union-find forest, by value */
  pm_layid *settled;       /* by root */
  uint8_t *widest;         /* by root: bytes of the widest element that is loaded or stored */
  PM_VEC(pm_opid) ops;     /* all, in program order */
  PM_VEC(pm_opid) related; /* ops that derive one layout from another */
  bool *wgmma_laid;        /* by value: an SMEM allocation that is accessed by arrays in WGMMA */
  PM_VEC(converted) done;
} pass;

static bool fits(const pm_layout *l, const pm_type *t) {
  return l->rank == t->rank && memcmp(l->shape, t->dim, sizeof t->dim[0] * t->rank) == 0;
}

static void collect(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  pm_vec_push(g->arena, &p->ops, op);
}

/* The layout that the user wrote at an op; 0: none. */
static pm_layid given_layout(const pm_graph *g, pm_opid op) {
  return pm_has_attr(g, op, PM_ATTR_LAYOUT) ? (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT) : 0;
}

/* `v`: the array in question. */
static void fail_layout_of(pass *p, pm_opid op, pm_val v, const char *why) {
  pm_graph *g = p->g;
  pm_layid l = given_layout(g, op);
  p->code = pm_fail(p->err, PM_E_VALUE,
                    "Failed to infer a possible set of layouts: %s of %s in the layout %s: %s",
                    pm_op_name(pm_get(g, op)->code), pm_type_text(g->arena, pm_typeof(g, v)),
                    l ? pm_layout_text(g->arena, pm_layout_of(g, l)) : "(none)", why);
  pm_err_op(p->err, g, op);
}

static void fail_layout(pass *p, pm_opid op, const char *why) {
  fail_layout_of(p, op, pm_get(p->g, op)->out, why);
}

static void check_given(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, op);
  pm_layid l = given_layout(g, op);
  const bool cast = pm_rule_of(g, op) == PM_LAY_FIXED;
  if (!l && !cast) return;
  const pm_type *t = pm_typeof(g, o->out);
  if (!l || l >= g->layouts.n || !fits(pm_layout_of(g, l), t)) {
    fail_layout(p, op, "the layout is for an array of another shape");
  } else if (!cast && is_splat(g, l) && pm_type_size(t) > 1) {
    fail_layout(p, op, "a splat has one value for all elements");
  }
}

/* A cast to a splat does not determine the layout of a varied value. */
static void check_cast(pass *p, pm_opid op) {
  const pm_op *o = pm_get(p->g, op);
  if (pm_rule_of(p->g, op) != PM_LAY_FIXED || !is_splat(p->g, given_layout(p->g, op))) return;
  if (pm_type_size(pm_typeof(p->g, o->out)) == 1 || !p->varied[pm_in(p->g, op, 0)]) return;
  fail_layout(p, op, "a splat has one value for all elements");
}

/* ---- splats ------------------------------------------------------------------------------- */

static bool varies(const pass *p, pm_val v) { return is_array(p->g, v) && p->varied[v]; }

static bool operand_varies(const pass *p, pm_opid op) {
  for (uint32_t k = 0; k < pm_get(p->g, op)->n_in; k++) {
    if (varies(p, pm_in(p->g, op, k))) return true;
  }
  return false;
}

static void mark(pass *p, pm_val v) {
  if (!is_array(p->g, v) || p->varied[v]) return;
  p->varied[v] = p->grew = true;
}

/* A source of values: a single element needs no decision, unless the user made one. */
static bool source_varies(const pass *p, pm_opid op) {
  pm_layid l = given_layout(p->g, op);
  if (l) return !is_splat(p->g, l);
  return pm_type_size(pm_typeof(p->g, pm_get(p->g, op)->out)) > 1;
}

/* The k-th value carried through a control op, at each place where it has another name. */
typedef void (*pm_name_visit)(pass *p, pm_val result, pm_val other);

static void each_name(pass *p, pm_opid op, uint32_t k, pm_name_visit fn) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, op);
  pm_val result = o->out + k;
  if (pm_is_loop(o->code)) fn(p, result, pm_in(g, op, o->n_in - o->n_out + k));
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    if (pm_is_loop(o->code)) fn(p, result, b->arg + b->n_args - o->n_out + k);
    if (!pm_is_condition(o, r)) fn(p, result, pm_in(g, pm_terminator(g, pm_region(g, op, r)), k));
  }
}

static void mark_result(pass *p, pm_val result, pm_val other) {
  if (varies(p, other)) mark(p, result);
}

static void mark_arguments(pass *p, pm_opid op, uint32_t k) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, op);
  if (!pm_is_loop(o->code) || !varies(p, o->out + k)) return;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    mark(p, b->arg + b->n_args - o->n_out + k);
  }
}

static void mark_op(pass *p, pm_opid op) {
  const pm_op *o = pm_get(p->g, op);
  switch (pm_rule_of(p->g, op)) {
    case PM_LAY_LOAD:
    case PM_LAY_FREE:
      if (o->n_out && source_varies(p, op)) mark(p, o->out);
      break;
    case PM_LAY_MASKED: /* a mask of one element may have a layout that the user gave */
      if (o->n_out && (source_varies(p, op) || operand_varies(p, op))) mark(p, o->out);
      break;
    case PM_LAY_ACC:
    case PM_LAY_TMEM:
    case PM_LAY_MMA:
      if (o->n_out) mark(p, o->out);
      break;
    case PM_LAY_FIXED:
      if (is_array(p->g, o->out) && !is_splat(p->g, given_layout(p->g, op))) mark(p, o->out);
      break;
    case PM_LAY_REDUCE:
      if (operand_varies(p, op) && pm_type_size(pm_typeof(p->g, o->out)) > 1) mark(p, o->out);
      break;
    case PM_LAY_PACK: /* the halves of one byte differ */
      if (unpacks(p->g, op) || operand_varies(p, op)) mark(p, o->out);
      break;
    case PM_LAY_POINTWISE:
    case PM_LAY_BROADCAST:
    case PM_LAY_RESHAPE:
    case PM_LAY_SLICE:
    case PM_LAY_TRANSPOSE:
      if (operand_varies(p, op)) mark(p, o->out);
      break;
    case PM_LAY_GATHER:
      if (varies(p, pm_in(p->g, op, 1))) mark(p, o->out);
      break;
    case PM_LAY_CONCAT:
    case PM_LAY_SCATTER:
    case PM_LAY_SCAN: /* the elements differ even for splats */
      if (operand_varies(p, op) || pm_type_size(pm_typeof(p->g, o->out)) > 1) mark(p, o->out);
      break;
    case PM_LAY_CONTROL:
      for (uint32_t k = 0; k < o->n_out; k++) {
        each_name(p, op, k, mark_result);
        mark_arguments(p, op, k);
      }
      break;
    default: break;
  }
}

static void find_splats(pass *p) {
  do {
    p->grew = false;
    for (uint32_t k = 0; k < p->ops.n; k++) mark_op(p, p->ops.at[k]);
  } while (p->grew);
}

/* ---- classes ------------------------------------------------------------------------------ */

static pm_val root(pass *p, pm_val v) {
  while (p->parent[v] != v) v = p->parent[v] = p->parent[p->parent[v]];
  return v;
}

static void join(pass *p, pm_val a, pm_val b) {
  if (!varies(p, a) || !varies(p, b)) return;
  a = root(p, a);
  b = root(p, b);
  p->parent[a < b ? b : a] = a < b ? a : b;
}

static void join_op(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, op);
  pm_layout_rule rule = pm_rule_of(g, op);
  if (rule == PM_LAY_POINTWISE) {
    for (uint32_t k = 0; k < o->n_in; k++) join(p, o->out, pm_in(g, op, k));
  } else if (rule == PM_LAY_GATHER) {
    join(p, o->out, pm_in(g, op, 1));
  } else if (rule == PM_LAY_SCATTER) {
    join(p, o->out, pm_in(g, op, 0));
    join(p, pm_in(g, op, 1), pm_in(g, op, 2));
  } else if (rule == PM_LAY_CONCAT) {
    pm_vec_push(g->arena, &p->related, op);
  } else if (rule == PM_LAY_MASKED) {
    for (uint32_t k = 1; k < o->n_in; k++) {
      for (uint32_t i = k + 1; i < o->n_in; i++) join(p, pm_in(g, op, k), pm_in(g, op, i));
      if (o->n_out) join(p, o->out, pm_in(g, op, k));
    }
  } else if (rule == PM_LAY_CONTROL) {
    for (uint32_t k = 0; k < o->n_out; k++) each_name(p, op, k, join);
  } else if (rule == PM_LAY_REDUCE || rule == PM_LAY_BROADCAST || rule == PM_LAY_RESHAPE ||
             rule == PM_LAY_SLICE || rule == PM_LAY_TRANSPOSE || rule == PM_LAY_PACK ||
             rule == PM_LAY_FIXED) {
    if (varies(p, pm_in(g, op, 0)) && varies(p, o->out)) pm_vec_push(g->arena, &p->related, op);
  }
}

/* An array whose class is loaded or stored together with elements like those of `like`. */
static void widen(pass *p, pm_val v, pm_val like) {
  if (!varies(p, v)) return;
  uint8_t *w = &p->widest[root(p, v)], bytes = pm_dtypes[pm_typeof(p->g, like)->dtype].bytes;
  if (*w < bytes) *w = bytes;
}

static void find_widths(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_opid op = p->ops.at[k];
    const pm_op *o = pm_get(p->g, op);
    const pm_layout_rule rule = pm_rule_of(p->g, op);
    if (rule == PM_LAY_LOAD) widen(p, o->out, o->out);
    if (rule == PM_LAY_STORE) widen(p, pm_in(p->g, op, 1), pm_in(p->g, op, 1));
    for (uint32_t k = 1; rule == PM_LAY_MASKED && k < o->n_in; k++) {
      widen(p, pm_in(p->g, op, k), pm_in(p->g, op, 0));
      if (o->n_out) widen(p, o->out, o->out);
    }
  }
  for (uint32_t k = 0; k < p->related.n; k++) { /* two elements for each byte */
    pm_opid op = p->related.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_PACK) continue;
    const bool unpack = unpacks(p->g, op);
    const pm_val in = pm_in(p->g, op, 0), out = pm_get(p->g, op)->out;
    uint8_t *w = &p->widest[root(p, unpack ? in : out)];
    *w = (uint8_t)pm_max(*w, 2 * p->widest[root(p, unpack ? out : in)]);
  }
}

/* ---- relations ---------------------------------------------------------------------------- */

/* The layout that the operand of a BROADCAST needs for a result in layout `out`. */
static pm_layid broadcast_operand(pm_graph *g, pm_opid op, pm_layid out) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  pm_type from = *pm_typeof(g, pm_in(g, op, 0));
  return pm_layout_broadcast_operand(g, out, dims, n, &from);
}

/* The first layout c of array v with fn(op, c) == want: WGMMA, then those that the kernel already
 * uses, then strided ones. */
static pm_layid search(pm_graph *g, pm_val v, pm_opid op, pm_layid want,
                       pm_layid (*fn)(pm_graph *, pm_opid, pm_layid)) {
  pm_type t = *pm_typeof(g, v);
  pm_layid c = pm_layout_wgmma(g, &t);
  if (c && fn(g, op, c) == want) return c;
  uint32_t n = g->layouts.n;
  for (c = 1; c < n; c++) {
    if (fits(pm_layout_of(g, c), &t) && !is_splat(g, c) && fn(g, op, c) == want) return c;
  }
  for (int64_t vec = 16; vec; vec /= 2) {
    c = pm_layout_strided(g, &t, vec);
    if (c && fn(g, op, c) == want) return c;
  }
  return 0;
}

static int64_t padded_size(const pm_layout *l) {
  int64_t n = 1;
  for (int k = 0; k < l->rank && (k == 0 || l->kind == PM_TILED); k++) n *= l->padded[k];
  return n;
}

/* Most registers would be padding: a conversion is better than propagating it over a reshape. */
static pm_layid unless_wasteful(pm_graph *g, pm_layid l) {
  if (!l) return 0;
  const pm_layout *x = pm_layout_of(g, l);
  int64_t size = 1;
  for (int k = 0; k < x->rank; k++) size *= x->shape[k];
  return padded_size(x) < 2 * pm_max(size, 128) ? l : 0;
}

/* A layout of the operand for which the op produces its result in layout `out`; 0: none found. */
static pm_layid operand_for(pm_graph *g, pm_opid op, pm_layid out) {
  pm_val in = pm_in(g, op, 0);
  pm_layid l;
  switch (pm_rule_of(g, op)) {
    case PM_LAY_BROADCAST: return broadcast_operand(g, op, out);
    case PM_LAY_FIXED: return out;
    case PM_LAY_TRANSPOSE: return pm_transposed_layout(g, op, out, true);
    case PM_LAY_PACK: return pm_repacked_layout(g, op, out, true);
    case PM_LAY_RESHAPE:
      l = unless_wasteful(g, pm_reshaped_layout(g, out, in));
      return l && pm_natural_layout(g, op, l) == out ? l : 0;
    default: return search(g, in, op, out, pm_natural_layout);
  }
}

static pm_layid result_for(pm_graph *g, pm_opid op, pm_layid in) {
  if (pm_rule_of(g, op) == PM_LAY_FIXED) return 0;
  if (pm_rule_of(g, op) == PM_LAY_RESHAPE) return unless_wasteful(g, pm_natural_layout(g, op, in));
  if (pm_rule_of(g, op) != PM_LAY_BROADCAST) return pm_natural_layout(g, op, in);
  return search(g, pm_get(g, op)->out, op, in, broadcast_operand);
}

static pm_layid layout_of_class(pass *p, pm_val v) { return p->settled[root(p, v)]; }

static bool settle(pass *p, pm_val v, pm_layid l) {
  pm_layid *s = &p->settled[root(p, v)];
  if (*s || !l || is_splat(p->g, l)) return false;
  *s = l;
  return true;
}

/* The operands follow the result. The result follows the first operand whose layout can be cut out
 * of a common layout of the result. */
static bool relate_concat(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_val out = pm_get(g, op)->out;
  const pm_type t = *pm_typeof(g, out);
  bool more = false;
  for (uint32_t k = 0; k < pm_get(g, op)->n_in && !layout_of_class(p, out); k++) {
    const pm_val in = pm_in(g, op, k);
    const pm_layid a = varies(p, in) ? layout_of_class(p, in) : 0;
    for (pm_layid c = 1, n = g->layouts.n; a && c <= n; c++) {
      const pm_layid l = c == n ? pm_layout_wgmma(g, &t) : c;
      if (!l || !fits(pm_layout_of(g, l), &t) || is_splat(g, l)) continue;
      if (pm_piece_layout(g, op, k, l) == a && settle(p, out, l)) {
        more = true;
        break;
      }
    }
  }
  const pm_layid l = layout_of_class(p, out);
  for (uint32_t k = 0; l && k < pm_get(g, op)->n_in; k++) {
    const pm_val in = pm_in(g, op, k);
    if (varies(p, in)) more |= settle(p, in, pm_piece_layout(g, op, k, l));
  }
  return more;
}

/* Propagate settled layouts along relations until nothing changes. */
static void relate(pass *p) {
  for (bool more = true; more;) {
    more = false;
    for (uint32_t k = 0; k < p->related.n; k++) {
      pm_opid op = p->related.at[k];
      if (pm_rule_of(p->g, op) == PM_LAY_CONCAT) {
        more |= relate_concat(p, op);
        continue;
      }
      pm_val in = pm_in(p->g, op, 0), out = pm_get(p->g, op)->out;
      pm_layid a = layout_of_class(p, in), b = layout_of_class(p, out);
      if (a && !b) more |= settle(p, out, result_for(p->g, op, a));
      if (b && !a) more |= settle(p, in, operand_for(p->g, op, b));
    }
  }
}

/* ---- seeds, by falling strength ----------------------------------------------------------- */

static pm_layid wgmma_of(pm_graph *g, pm_val v) {
  pm_type t = *pm_typeof(g, v);
  return pm_layout_wgmma(g, &t);
}

/* Four lanes' worth of row numbers for each warp, or all of them for one lane. */
static pm_layid rows_by_index(pm_graph *g, const pm_type *t) {
  return pm_layout_constant(g, t->dim[0] % 16 ? PM_LAYOUT_TMA_INDICES_4 : PM_LAYOUT_TMA_INDICES,
                            NULL, 0, t);
}

/* The layout that an op demands of operand k, or of its result where k is their number; 0: none.
 */
static pm_layid demanded(pm_graph *g, pm_opid op, uint32_t k) {
  const pm_op *o = pm_get(g, op);
  const pm_val v = k < o->n_in ? pm_in(g, op, k) : o->n_out ? o->out : 0;
  if (!v || !is_array(g, v)) return 0;
  const pm_type t = *pm_typeof(g, v);
  const pm_mma *m = pm_mma_of(g, op);
  if (m) return pm_mma_layout(g, m, k < o->n_in ? k : 0, &t);
  if (pm_rule_of(g, op) == PM_LAY_ROWS) return rows_by_index(g, &t);
  return pm_rule_of(g, op) == PM_LAY_ACC ? pm_layout_wgmma(g, &t) : 0;
}

static void seed_demands(pass *p) {
  for (uint32_t i = 0; i < p->ops.n; i++) {
    const pm_op *o = pm_get(p->g, p->ops.at[i]);
    for (uint32_t k = 0; k <= o->n_in; k++) {
      const pm_layid l = demanded(p->g, p->ops.at[i], k);
      const pm_val v = k < o->n_in ? pm_in(p->g, p->ops.at[i], k) : o->out;
      if (l && varies(p, v)) settle(p, v, l);
    }
  }
}

static void seed_given(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_opid op = p->ops.at[k];
    pm_layid l = given_layout(p->g, op);
    if (l && varies(p, pm_get(p->g, op)->out)) settle(p, pm_get(p->g, op)->out, l);
  }
}

/* ---- tensor memory ------------------------------------------------------------------------- */

/* The array that a LOAD_TMEM or STORE_TMEM moves; 0: another op. */
static pm_val of_tmem(const pm_graph *g, pm_opid op) {
  if (pm_rule_of(g, op) != PM_LAY_TMEM) return 0;
  return pm_get(g, op)->n_out ? pm_get(g, op)->out : pm_in(g, op, 1);
}

/* A LOAD_TMEM that reduces its rows. */
static bool reduces_rows(const pm_graph *g, pm_opid op) {
  return of_tmem(g, op) && pm_has_attr(g, op, PM_ATTR_TMEM_REDUCE) &&
         *pm_attr(g, op, PM_ATTR_TMEM_REDUCE);
}

/* `wanted` if the op can move its array in it, else the layout that it moves it in; 0: none. */
static pm_layid movable(pm_graph *g, pm_opid op, pm_layid wanted) {
  const pm_type t = *pm_typeof(g, of_tmem(g, op));
  const bool rows = reduces_rows(g, op);
  pm_layid l, first = 0;
  for (uint32_t k = 0; (l = pm_tmem_registers(g, pm_in(g, op, 0), &t, rows, k)); k++) {
    if (l == wanted) return l;
    if (!first) first = l;
  }
  return first;
}

/* Rows that a load reduces stay whole in each lane, whatever uses them: others convert the array.
 */
static void seed_reduced_loads(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    const pm_opid op = p->ops.at[k];
    if (!reduces_rows(p->g, op)) continue;
    settle(p, of_tmem(p->g, op), movable(p->g, op, given_layout(p->g, op)));
  }
}

/* Arrays that only tensor memory has a wish for. */
static void prefer_tmem(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    const pm_opid op = p->ops.at[k];
    const pm_val v = of_tmem(p->g, op);
    if (v && varies(p, v) && settle(p, v, movable(p->g, op, 0))) relate(p);
  }
}

static void check_tmem(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  if (!of_tmem(g, op)) return;
  const pm_layid given = given_layout(g, op), l = movable(g, op, given);
  if (l && (!given || l == given)) return;
  const pm_tmem m = pm_tmem_of(g, pm_tmem_alloc(g, pm_in(g, op, 0)));
  pm_text t;
  pm_text_init(&t, g->arena);
  pm_putf(&t, "TMEM in the layout %s, packed %d to 32 bits, ", pm_enum_text(PM_ENUM_TMEM, m.layout),
          m.packing);
  if (l) pm_putf(&t, "is loaded and stored in %s", pm_layout_text(g->arena, pm_layout_of(g, l)));
  else if (m.layout == PM_TMEM_DEFAULT || m.layout == PM_TMEM_HALF) {
    pm_put(&t, "cannot be loaded or stored; use packed=True");
  } else {
    pm_putf(&t, "cannot be loaded or stored; use packing=%u", 32 / pm_dtypes[m.dtype].bits);
  }
  fail_layout_of(p, op, of_tmem(g, op), t.at);
}

/* The array that a LOAD or STORE moves and the allocation in SMEM it moves it from or to. */
static pm_val moved(pass *p, pm_opid op, pm_opid *alloc) {
  pm_graph *g = p->g;
  pm_layout_rule rule = pm_rule_of(g, op);
  *alloc = 0;
  if (rule != PM_LAY_LOAD && rule != PM_LAY_STORE && rule != PM_LAY_MASKED) return 0;
  pm_val v = pm_get(g, op)->n_out ? pm_get(g, op)->out : pm_in(g, op, 1);
  *alloc = pm_view_smem(g, pm_in(g, op, 0));
  return varies(p, v) ? v : 0;
}

/* Arrays that are loaded from or stored to swizzled SMEM and fill whole WGMMA tiles get WGMMA, for
 * conflict-free accesses. SMEM that other arrays access in WGMMA will be swizzled. */
static void prefer_swizzled(pass *p) {
  pm_graph *g = p->g;
  pm_opid alloc;
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_val v = moved(p, p->ops.at[k], &alloc);
    if (!v || !alloc) continue;
    bool swizzled = *pm_attr(g, alloc, PM_ATTR_SWIZZLE) != 0;
    pm_layid l = layout_of_class(p, v);
    bool free = !*pm_attr(g, alloc, PM_ATTR_GIVEN) && l && l == wgmma_of(g, v);
    if (swizzled || free) p->wgmma_laid[pm_get(g, alloc)->out] = true;
  }
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_val v = moved(p, p->ops.at[k], &alloc);
    if (!v || !alloc || !p->wgmma_laid[pm_get(g, alloc)->out]) continue;
    pm_layid l = wgmma_of(g, v);
    if (l && !pm_layout_is_padded(pm_layout_of(g, l)) && settle(p, v, l)) relate(p);
  }
}

/* Strided with vectors of 16 bytes, if they divide the size and the minor dim. */
static pm_layid strided_for(pm_graph *g, pm_type t, uint8_t bytes) {
  int64_t size = pm_type_size(&t), minor = 1, vec = 1;
  for (int k = 0; k < t.rank; k++) {
    if (t.dim[k] > 1) minor = t.dim[k];
  }
  while (2 * vec * bytes <= 16 && size % (256 * vec) == 0 && minor % (2 * vec) == 0) vec *= 2;
  return pm_layout_strided(g, &t, vec);
}

/* Bytes of the elements of v's class for which 16-byte vectors are chosen. */
static uint8_t class_bytes(pass *p, pm_val v) {
  uint8_t widest = p->widest[root(p, v)];
  return widest ? widest : pm_dtypes[pm_typeof(p->g, v)->dtype].bytes;
}

static pm_layid strided_of_class(pass *p, pm_val v) {
  return strided_for(p->g, *pm_typeof(p->g, v), class_bytes(p, v));
}

/* A layout that can be reduced and broadcast along each dim: WGMMA; or the last dim along the lanes
 * if that means less padding (few rows); or another dim if it means much less, since neighbouring
 * lanes then no longer access neighbouring addresses. Rank 1: 0. */
static pm_layid matrix_for(pm_graph *g, pm_val v, uint8_t bytes) {
  const pm_type t = *pm_typeof(g, v);
  pm_layid best = pm_layout_wgmma(g, &t);
  if (!best || !pm_layout_is_padded(pm_layout_of(g, best))) return best;
  int64_t minor = t.dim[t.rank - 1], vec = 1, least = padded_size(pm_layout_of(g, best));
  while (2 * vec * bytes <= 16 && minor % (256 * vec) == 0) vec *= 2;
  for (int k = t.rank - 1; k >= 0; k--) {
    const bool last = k == t.rank - 1;
    pm_layid l = pm_layout_along(g, &t, k, last ? vec : 1);
    const int64_t size = padded_size(pm_layout_of(g, l));
    if (size * (last ? 1 : 2) >= least) continue;
    best = l;
    least = size;
  }
  return best;
}

static void prefer_reduced(pass *p) {
  for (uint32_t k = 0; k < p->related.n; k++) {
    pm_opid op = p->related.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_REDUCE) continue;
    pm_val in = pm_in(p->g, op, 0);
    if (settle(p, in, matrix_for(p->g, in, class_bytes(p, in)))) relate(p);
  }
}

/* In runs along the dim, or with another dim along the lanes, whichever pads less. */
pm_layid pm_scan_layout(pm_graph *g, const pm_type *t, int dim) {
  pm_layid best = pm_layout_along(g, t, dim, pm_cdiv(t->dim[dim], 128));
  for (int k = 0; k < t->rank && best; k++) {
    if (k == dim) continue;
    const pm_layid l = pm_layout_along(g, t, k, 1);
    if (l && padded_size(pm_layout_of(g, l)) <= padded_size(pm_layout_of(g, best))) best = l;
  }
  return best;
}

static pm_layid scan_layout(pm_graph *g, pm_opid op) {
  const pm_type t = *pm_typeof(g, pm_get(g, op)->out);
  return pm_scan_layout(g, &t, (int)*pm_attr(g, op, PM_ATTR_DIM));
}

static void prefer_scan(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_opid op = p->ops.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_SCAN || !varies(p, pm_get(p->g, op)->out)) continue;
    const pm_layid l = scan_layout(p->g, op);
    const pm_val in = pm_in(p->g, op, 0);
    if (varies(p, in) && settle(p, in, l)) relate(p);
    if (settle(p, pm_get(p->g, op)->out, unless_wasteful(p->g, l))) relate(p);
  }
}

static void prefer_broadcast(pass *p) {
  for (uint32_t k = 0; k < p->related.n; k++) {
    pm_opid op = p->related.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_BROADCAST) continue;
    pm_val out = pm_get(p->g, op)->out;
    pm_layid l = strided_of_class(p, out);
    if (!broadcast_operand(p->g, op, l)) l = matrix_for(p->g, out, class_bytes(p, out));
    if (settle(p, out, l)) relate(p);
  }
}

/* The first common layout of the operand of a SLICE that allows this slice; 0: none. */
static pm_layid sliceable(pm_graph *g, pm_opid op) {
  pm_val in = pm_in(g, op, 0);
  pm_type t = *pm_typeof(g, in);
  pm_layid l = 0;
  for (int64_t vec = 16 / pm_dtypes[t.dtype].bytes; vec; vec /= 2) {
    l = pm_layout_strided(g, &t, vec);
    if (l && pm_sliced_layout(g, op, l)) return l;
  }
  l = wgmma_of(g, in);
  if (l && pm_sliced_layout(g, op, l)) return l;
  static const char columns[] = "wgmma.reduce(0)";
  pm_err ignored;
  memset(&ignored, 0, sizeof ignored);
  if (pm_layout_parse(g, columns, sizeof columns - 1, &t, &l, &ignored)) return 0;
  return pm_sliced_layout(g, op, l) ? l : 0;
}

static void prefer_sliced(pass *p) {
  for (uint32_t k = 0; k < p->related.n; k++) {
    pm_opid op = p->related.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_SLICE) continue;
    pm_val in = pm_in(p->g, op, 0);
    if (layout_of_class(p, in) || pm_sliced_layout(p->g, op, strided_of_class(p, in))) continue;
    if (settle(p, in, sliceable(p->g, op))) relate(p);
  }
}

/* Pairs of 4-bit elements in neighbouring registers, so that PACK and UNPACK move nothing. */
static void prefer_packed(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    pm_opid op = p->ops.at[k];
    if (pm_rule_of(p->g, op) != PM_LAY_PACK) continue;
    const bool unpack = unpacks(p->g, op);
    const pm_val in = pm_in(p->g, op, 0), out = pm_get(p->g, op)->out, small = unpack ? out : in;
    const pm_type whole = *pm_typeof(p->g, small);
    const pm_layid bytes = strided_of_class(p, unpack ? in : out);
    if (!varies(p, small) || layout_of_class(p, small)) continue;
    if (settle(p, small, pm_layout_doubled(p->g, bytes, &whole))) relate(p);
  }
}

static void settle_rest(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) {
    const pm_op *o = pm_get(p->g, p->ops.at[k]);
    for (uint32_t r = 0; r < o->n_out; r++) {
      pm_val v = o->out + r;
      if (varies(p, v) && !layout_of_class(p, v) && settle(p, v, strided_of_class(p, v))) relate(p);
    }
  }
}

/* ---- rewrite ------------------------------------------------------------------------------ */

static void warn(pass *p, pm_opid at, pm_val v, pm_layid from, pm_layid to) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, at);
  const char *file = o->line ? g->strings.at[o->file] : "<unknown>";
  pm_vec_push(g->arena, &g->warnings,
              pm_printf(g->arena,
                        "%s:%u: %s: %s is converted from layout %s to %s through shared memory; "
                        "a layout_cast of its sources may avoid that",
                        file, o->line, pm_op_name(o->code), pm_type_text(g->arena, pm_typeof(g, v)),
                        pm_layout_text(g->arena, pm_layout_of(g, from)),
                        pm_layout_text(g->arena, pm_layout_of(g, to))));
}

static uint32_t place_after(const pm_graph *g, pm_val v, pm_blk *block) {
  const pm_value *value = pm_value_of(g, v);
  *block = value->block;
  if (!value->def) return 0;
  *block = pm_get(g, value->def)->parent;
  const pm_block *b = &g->blocks.at[*block];
  uint32_t at = 0;
  while (b->ops.at[at] != value->def) at++;
  return at + 1;
}

/* Duplicate a load or iota, after the first one, in another layout. */
static bool can_be_made_again(const pm_graph *g, pm_val v) {
  const pm_opid def = pm_value_of(g, v)->def;
  return def && (pm_rule_of(g, def) == PM_LAY_LOAD || pm_get(g, def)->code == PM_OP_IOTA);
}

static pm_opid make_again(pm_graph *g, pm_opid def, pm_blk block, uint32_t at, pm_layid to) {
  const pm_op o = *pm_get(g, def);
  pm_type t = *pm_typeof(g, o.out);
  pm_val in = o.n_in ? pm_in(g, def, 0) : 0;
  pm_attr_arg attrs[2] = {{.id = PM_ATTR_LAYOUT, .i = to}};
  attrs[1].id = pm_rule_of(g, def) == PM_LAY_LOAD ? PM_ATTR_OPTIMIZED : PM_ATTR_DIM;
  attrs[1].i = *pm_attr(g, def, attrs[1].id);
  return pm_insert(g, block, at, o.code, &in, o.n_in, &t, 1, attrs, 2, def);
}

/* v in layout `to`, for op `user`. */
static pm_val convert(pass *p, pm_val v, pm_layid to, pm_opid user) {
  pm_graph *g = p->g;
  pm_layid from = pm_value_of(g, v)->layout;
  if (from == to) return v;
  pm_opid def = pm_value_of(g, v)->def, op;
  const bool cast = def && pm_rule_of(g, def) == PM_LAY_FIXED;
  if (cast && pm_value_of(g, pm_in(g, def, 0))->layout == to) {
    return pm_in(g, def, 0);
  }
  for (uint32_t k = 0; k < p->done.n; k++) {
    if (p->done.at[k].from == v && p->done.at[k].layout == to) return p->done.at[k].to;
  }
  pm_blk block;
  uint32_t at = place_after(g, v, &block);
  if (can_be_made_again(g, v)) {
    op = make_again(g, def, block, at, to);
  } else {
    pm_type t = *pm_typeof(g, v);
    pm_attr_arg attr = {.id = PM_ATTR_LAYOUT, .i = to};
    op = pm_insert(g, block, at, PM_OP_LAYOUT_CAST, &v, 1, &t, 1, &attr, 1, user);
  }
  pm_val out = pm_get(g, op)->out;
  pm_value_of(g, out)->layout = to;
  pm_value_of(g, out)->name = pm_value_of(g, v)->name;
  pm_vec_push(g->arena, &p->done, ((converted){v, out, to}));
  if (pm_op_scratch(g, op)) {
    warn(p, user, v, from, to);
  }
  return out;
}

static void set_operand(pass *p, pm_opid op, uint32_t k, pm_layid to) {
  pm_val v = convert(p, pm_in(p->g, op, k), to, op);
  p->g->operands.at[pm_get(p->g, op)->in + k] = v;
}

/* The op produces v in layout `from`; all users get v in the layout of its class. */
static void set_result(pass *p, pm_opid op, pm_layid from) {
  pm_graph *g = p->g;
  pm_val v = pm_get(g, op)->out;
  pm_layid to = pm_value_of(g, v)->layout;
  if (from == to) return;
  pm_value_of(g, v)->layout = from;
  pm_val out = convert(p, v, to, op);
  pm_opid cast = pm_value_of(g, out)->def;
  for (uint32_t k = 0; k < g->operands.n; k++) {
    if (g->operands.at[k] == v && k != pm_get(g, cast)->in) g->operands.at[k] = out;
  }
}

enum { MOST_REGISTERS = 1024 };

/* A layout that can be sliced anywhere: the sliced dims are in registers, the last of the others
 * along the lanes. 0: too many registers. */
static pm_layid cut_anywhere(pm_graph *g, pm_opid op) {
  const pm_type t = *pm_typeof(g, pm_in(g, op, 0)), *to = pm_typeof(g, pm_get(g, op)->out);
  int64_t regs = 1;
  int lanes = -1;
  for (int k = 0; k < t.rank; k++) {
    if (t.dim[k] == to->dim[k] && t.dim[k] > 1) lanes = k;
  }
  for (int k = 0; k < t.rank; k++) {
    regs *= k == lanes ? pm_cdiv(t.dim[k], 128) : t.dim[k];
    if (regs > MOST_REGISTERS) return 0;
  }
  return pm_layout_along(g, &t, lanes, 1);
}

/* Layouts of the operand that work always, or almost always. */
static pm_layid slice_fallback(pm_graph *g, pm_opid op) {
  pm_layid l = sliceable(g, op);
  return l ? l : cut_anywhere(g, op);
}

static pm_layid reduce_fallback(pm_graph *g, pm_opid op) {
  pm_val in = pm_in(g, op, 0);
  return matrix_for(g, in, pm_dtypes[pm_typeof(g, in)->dtype].bytes);
}

static pm_layid pack_fallback(pm_graph *g, pm_opid op) {
  const bool unpack = unpacks(g, op);
  const pm_type bytes = *pm_typeof(g, unpack ? pm_in(g, op, 0) : pm_get(g, op)->out);
  const pm_layid l = strided_for(g, bytes, 1);
  return unpack ? l : pm_repacked_layout(g, op, l, true);
}

static pm_layid reshape_fallback(pm_graph *g, pm_opid op) {
  const pm_type t = *pm_typeof(g, pm_in(g, op, 0));
  return strided_for(g, t, pm_dtypes[t.dtype].bytes);
}

static void warn_scratch(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_op *o = pm_get(g, op);
  const char *file = o->line ? g->strings.at[o->file] : "<unknown>";
  if (!pm_op_scratch(g, op)) return;
  pm_vec_push(
      g->arena, &g->warnings,
      pm_printf(g->arena, "%s:%u: %s: %s moves between lanes, through shared memory", file, o->line,
                pm_op_name(o->code), pm_type_text(g->arena, pm_typeof(g, pm_in(g, op, 0)))));
}

/* REDUCE, RESHAPE, SLICE, TRANSPOSE: the result follows from the operand. Convert the result if the
 * operand's layout can be computed with. Otherwise produce the operand again, in a layout that
 * gives the result directly or in the fallback. Elements of all but REDUCE, PACK and UNPACK can go
 * through scratch. */
static void rewrite_derived(pass *p, pm_opid op, pm_layid (*fallback)(pm_graph *, pm_opid)) {
  pm_graph *g = p->g;
  pm_val out = pm_get(g, op)->out;
  pm_layid in = pm_value_of(g, pm_in(g, op, 0))->layout, l = pm_natural_layout(g, op, in);
  const bool bound = pm_rule_of(g, op) == PM_LAY_REDUCE || pm_rule_of(g, op) == PM_LAY_PACK;
  if (!l && (bound || can_be_made_again(g, pm_in(g, op, 0)))) {
    pm_layid want = pm_value_of(g, out)->layout, better = operand_for(g, op, want);
    if (!better && fallback) better = fallback(g, op);
    l = better ? pm_natural_layout(g, op, better) : 0;
    if (l) set_operand(p, op, 0, better);
  }
  if (l) set_result(p, op, l);
  else if (bound) fail_layout(p, op, "no layout of the operand allows it");
  else warn_scratch(p, op);
}

/* Loads can be repeated in the layout of their piece. */
static void rewrite_concat(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_layid out = pm_value_of(g, pm_get(g, op)->out)->layout;
  for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
    if (!can_be_made_again(g, pm_in(g, op, k))) continue;
    const pm_layid piece = pm_piece_layout(g, op, k, out);
    if (piece) set_operand(p, op, k, piece);
  }
  warn_scratch(p, op);
}

static void rewrite_scan(pass *p, pm_opid op) {
  enum { MOST = 512 };
  pm_graph *g = p->g;
  pm_layid l = scan_layout(g, op);
  if (!p->varied[pm_in(g, op, 0)]) {
    /* the running sum of a splat is not a splat */
    pm_type t = *pm_typeof(g, pm_get(g, op)->out);
    l = pm_type_size(&t) == 1 ? pm_layout_splat(g, &t) : l;
  }
  if (!l || pm_layout_regs(pm_layout_of(g, l)) > MOST) {
    p->code = pm_fail(p->err, PM_E_NOT_IMPLEMENTED,
                      "scan of %s along dimension %d: more than %d elements a lane; scan parts of "
                      "it, or along the last dimension of a reshaped array",
                      pm_type_text(g->arena, pm_typeof(g, pm_in(g, op, 0))),
                      (int)*pm_attr(g, op, PM_ATTR_DIM), MOST);
    pm_err_op(p->err, g, op);
    return;
  }
  set_operand(p, op, 0, l);
  set_result(p, op, l);
}

static void rewrite_reshape(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  pm_val in = pm_in(g, op, 0);
  pm_type t = *pm_typeof(g, in);
  if (!is_array(g, in)) return; /* a scalar: the result is a splat */
  if (!is_array(g, pm_get(g, op)->out)) {
    set_operand(p, op, 0, pm_layout_splat(g, &t));
    return;
  }
  rewrite_derived(p, op, reshape_fallback);
}

static void rewrite_broadcast(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  pm_val in = pm_in(g, op, 0), out = pm_get(g, op)->out;
  if (!is_array(g, in) || is_splat(g, pm_value_of(g, in)->layout)) return;
  pm_layid l = pm_value_of(g, out)->layout, source = broadcast_operand(g, op, l);
  if (!source) {
    l = matrix_for(g, out, pm_dtypes[pm_typeof(g, out)->dtype].bytes);
    source = l ? broadcast_operand(g, op, l) : 0;
  }
  if (!source) {
    fail_layout(p, op, "no layout of the operand allows it");
    return;
  }
  set_operand(p, op, 0, source);
  set_result(p, op, l);
}

static void rewrite_control(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_op o = *pm_get(g, op);
  for (uint32_t k = 0; k < o.n_out; k++) {
    if (!is_array(g, o.out + k)) continue;
    if (pm_is_loop(o.code))
      set_operand(p, op, o.n_in - o.n_out + k, pm_value_of(g, o.out + k)->layout);
  }
}

/* An ATOMIC whose result is used needs a layout without copies: each element is updated by one
 * lane, and that lane gets the old value. */
static void rewrite_atomic(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_val out = pm_get(g, op)->out;
  const pm_type t = *pm_typeof(g, out);
  bool used = false;
  if (!varies(p, out)) return;
  if (!pm_layout_is_replicated(pm_layout_of(g, pm_value_of(g, out)->layout))) return;
  for (uint32_t k = 0; k < g->operands.n; k++) used |= g->operands.at[k] == out;
  if (!used) return;
  const pm_layid l = strided_for(g, t, pm_dtypes[t.dtype].bytes);
  for (uint32_t k = 1; k < pm_get(g, op)->n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    if (is_array(g, v) && !is_splat(g, pm_value_of(g, v)->layout)) set_operand(p, op, k, l);
  }
  set_result(p, op, l);
}

/* A yield follows everything that it yields, so it is processed when it is reached. */
static void rewrite_yield(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  pm_blk block = pm_get(g, op)->parent;
  pm_opid parent = g->blocks.at[block].parent;
  const pm_op o = *pm_get(g, parent);
  if (pm_is_condition(&o, 0) && block == pm_region(g, parent, 0)) return;
  for (uint32_t k = 0; k < o.n_out; k++) {
    if (is_array(g, o.out + k)) set_operand(p, op, k, pm_value_of(g, o.out + k)->layout);
  }
}

/* The user's own cast may move data, too. */
static void warn_cast(pass *p, pm_opid op) {
  pm_val in = pm_in(p->g, op, 0), out = pm_get(p->g, op)->out;
  if (!pm_op_scratch(p->g, op)) return;
  warn(p, op, in, pm_value_of(p->g, in)->layout, pm_value_of(p->g, out)->layout);
}

static void rewrite_tmem(pass *p, pm_opid op) {
  const pm_layid l = movable(p->g, op, pm_value_of(p->g, of_tmem(p->g, op))->layout);
  if (pm_get(p->g, op)->n_out) set_result(p, op, l);
  else set_operand(p, op, 1, l);
}

static void rewrite(pass *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_op o = *pm_get(g, op);
  if (o.code == PM_OP_INLINE || o.code == PM_OP_INLINE_RESULT) { /* where the source has it */
    if (varies(p, o.out)) set_result(p, op, given_layout(g, op));
    return;
  }
  for (uint32_t k = 0; k <= o.n_in; k++) {
    const pm_layid l = demanded(g, op, k);
    if (l && k < o.n_in) set_operand(p, op, k, l);
    else if (l) set_result(p, op, l);
  }
  if (o.n_out == 1 && is_array(g, o.out) && given_layout(g, op)) {
    *pm_attr(g, op, PM_ATTR_LAYOUT) = pm_value_of(g, o.out)->layout;
  }
  switch (pm_rule_of(g, op)) {
    case PM_LAY_REDUCE:
      if (is_array(g, o.out)) rewrite_derived(p, op, reduce_fallback);
      break;
    case PM_LAY_RESHAPE: rewrite_reshape(p, op); break;
    case PM_LAY_PACK: rewrite_derived(p, op, pack_fallback); break;
    case PM_LAY_SLICE:
      if (is_array(g, o.out)) rewrite_derived(p, op, slice_fallback);
      break;
    case PM_LAY_TRANSPOSE: rewrite_derived(p, op, NULL); break;
    case PM_LAY_CONCAT: rewrite_concat(p, op); break;
    case PM_LAY_SCAN: rewrite_scan(p, op); break;
    case PM_LAY_BROADCAST: rewrite_broadcast(p, op); break;
    case PM_LAY_FIXED: warn_cast(p, op); break;
    case PM_LAY_CONTROL: rewrite_control(p, op); break;
    case PM_LAY_TMEM: rewrite_tmem(p, op); break;
    default: break;
  }
  if (o.code == PM_OP_ATOMIC) rewrite_atomic(p, op);
  if (o.code == PM_OP_YIELD) rewrite_yield(p, op);
}

static void set_layouts(pass *p) {
  for (pm_val v = 1; v < p->n_values; v++) {
    if (!is_array(p->g, v)) continue;
    pm_type t = *pm_typeof(p->g, v);
    pm_layid l = p->varied[v] ? layout_of_class(p, v) : pm_layout_splat(p->g, &t);
    pm_value_of(p->g, v)->layout = l;
  }
}

/* ---- what must hold afterwards ------------------------------------------------------------ */

static bool agrees(pm_graph *g, pm_val v, pm_layid l, bool splat_fits) {
  if (!is_array(g, v)) return true;
  pm_layid has = pm_value_of(g, v)->layout;
  return has == l || (splat_fits && is_splat(g, has));
}

static bool control_agrees(pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    pm_layid l = pm_value_of(g, o->out + k)->layout;
    if (pm_is_loop(o->code) && !agrees(g, pm_in(g, op, o->n_in - o->n_out + k), l, false))
      return false;
    for (uint32_t r = 0; r < o->n_regions; r++) {
      pm_blk b = pm_region(g, op, r);
      const pm_block *block = &g->blocks.at[b];
      if (pm_is_loop(o->code) && !agrees(g, block->arg + block->n_args - o->n_out + k, l, false))
        return false;
      if (pm_is_condition(o, r)) continue;
      if (!agrees(g, pm_in(g, pm_terminator(g, b), k), l, false)) return false;
    }
  }
  return true;
}

static bool op_agrees(pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    pm_layid l = pm_value_of(g, o->out + k)->layout;
    if (!is_array(g, o->out + k)) continue;
    if (!l || !fits(pm_layout_of(g, l), pm_typeof(g, o->out + k))) return false;
  }
  for (uint32_t k = 0; k <= o->n_in; k++) {
    const pm_layid l = demanded(g, op, k);
    if (l && pm_value_of(g, k < o->n_in ? pm_in(g, op, k) : o->out)->layout != l) return false;
  }
  pm_layid out = o->n_out ? pm_value_of(g, o->out)->layout : 0;
  switch (pm_rule_of(g, op)) {
    case PM_LAY_POINTWISE:
      for (uint32_t k = 0; k < o->n_in; k++) {
        if (!agrees(g, pm_in(g, op, k), out, true)) return false;
      }
      return true;
    case PM_LAY_MASKED:
      out = pm_value_of(g, pm_masked_shared(g, op))->layout;
      for (uint32_t k = 1; k < o->n_in; k++) {
        if (!agrees(g, pm_in(g, op, k), out, true)) return false;
      }
      return true;
    case PM_LAY_BROADCAST:
      return !is_array(g, pm_in(g, op, 0)) ||
             is_splat(g, pm_value_of(g, pm_in(g, op, 0))->layout) ||
             agrees(g, pm_in(g, op, 0), broadcast_operand(g, op, out), false);
    case PM_LAY_REDUCE:
    case PM_LAY_PACK:
      if (!is_array(g, pm_in(g, op, 0)) || !is_array(g, o->out)) return true;
      return pm_natural_layout(g, op, pm_value_of(g, pm_in(g, op, 0))->layout) == out;
    case PM_LAY_GATHER: return !is_array(g, o->out) || agrees(g, pm_in(g, op, 1), out, true);
    case PM_LAY_SCATTER: return agrees(g, pm_in(g, op, 0), out, true);
    case PM_LAY_SCAN: return agrees(g, pm_in(g, op, 0), out, false);
    case PM_LAY_FIXED: return !is_array(g, o->out) || given_layout(g, op) == out;
    case PM_LAY_CONTROL: return control_agrees(g, op);
    case PM_LAY_TMEM: {
      const pm_layid l = pm_value_of(g, of_tmem(g, op))->layout;
      return movable(g, op, l) == l;
    }
    default: return true;
  }
}

static void check_op(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  if (p->code || op_agrees(g, op)) return;
  p->code = pm_fail(p->err, PM_E_INTERNAL, "layout inference: the layouts of %s do not agree",
                    pm_op_name(pm_get(g, op)->code));
  pm_err_op(p->err, g, op);
}

/* ---- the pass ----------------------------------------------------------------------------- */

static void start(pass *p, pm_graph *g, pm_err *err) {
  uint32_t n = g->values.n;
  *p = (pass){.g = g, .err = err, .n_values = n};
  p->varied = PM_NEW(g->arena, bool, n);
  p->parent = PM_NEW(g->arena, pm_val, n);
  p->settled = PM_NEW(g->arena, pm_layid, n);
  p->widest = PM_NEW(g->arena, uint8_t, n);
  p->wgmma_laid = PM_NEW(g->arena, bool, n);
  for (uint32_t k = 0; k < n; k++) p->parent[k] = k;
  pm_walk(g, 1, collect, p);
}

static void infer(pass *p) {
  for (uint32_t k = 0; k < p->ops.n; k++) join_op(p, p->ops.at[k]);
  find_widths(p);
  seed_reduced_loads(p);
  seed_demands(p);
  seed_given(p);
  relate(p);
  prefer_tmem(p);
  prefer_swizzled(p);
  prefer_reduced(p);
  prefer_scan(p);
  prefer_broadcast(p);
  prefer_sliced(p);
  prefer_packed(p);
  settle_rest(p);
}

pm_code pm_infer_layouts(pm_graph *g, const pm_target *t, pm_err *err) {
  pass p;
  (void)t;
  start(&p, g, err);
  for (uint32_t k = 0; k < p.ops.n && !p.code; k++) check_given(&p, p.ops.at[k]);
  for (uint32_t k = 0; k < p.ops.n && !p.code; k++) check_tmem(&p, p.ops.at[k]);
  if (p.code) return p.code;
  find_splats(&p);
  for (uint32_t k = 0; k < p.ops.n && !p.code; k++) check_cast(&p, p.ops.at[k]);
  if (p.code) return p.code;
  infer(&p);
  set_layouts(&p);
  for (uint32_t k = 0; k < p.ops.n && !p.code; k++) rewrite(&p, p.ops.at[k]);
  if (!p.code) pm_walk(g, 1, check_op, &p);
  return p.code;
}
