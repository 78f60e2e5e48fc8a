/* Folding, merging and removal of pure ops, in two linear walks.
 *
 * Forward, in program order: operands are replaced by the values they were found equal to. A pure
 * op is folded (replaced by a constant or one of its operands) or merged with an equal op that
 * dominates it. Equal ops are found in a hash table whose entries are removed at the end of their
 * block. An IF or SWITCH on a constant, and a FOR of at most one iteration, are replaced by the ops
 * of the region that runs. Floats are folded only if that is exact. Constants are canonical: ints
 * are wrapped to their dtype.
 *
 * Backward: ops with effects are live, and so are the ops they use, the ops that contain them, and
 * the yields of those. Everything else is removed: pure ops, loads, allocations, regions without
 * effects. */
#include "../ir/eval.h"
#include "passes.h"

typedef PM_VEC(uint64_t) words;

typedef struct simplifier {
  pm_graph *g;
  pm_val *same;   /* what a value was replaced by; 0: itself */
  pm_opid *table; /* open addressing, linear probing */
  uint64_t *hashes;
  uint32_t mask;
  PM_VEC(uint32_t) entries; /* occupied slots, oldest first */
  words key, other;         /* of the current op, of an entry */
} simplifier;

static void run_region(simplifier *s, pm_blk from, pm_blk to);

static pm_val find(const simplifier *s, pm_val v) {
  while (s->same[v]) v = s->same[v];
  return v;
}

static pm_val operand(const simplifier *s, pm_opid op, uint32_t k) { return pm_in(s->g, op, k); }

static void replace(simplifier *s, pm_val old, pm_val by) {
  pm_value *from = pm_value_of(s->g, old), *to = pm_value_of(s->g, by);
  if (!to->name) to->name = from->name;
  s->same[old] = by;
}

static bool replaceable(const simplifier *s, pm_val old, pm_val by) {
  const pm_value *a = pm_value_of(s->g, old), *b = pm_value_of(s->g, by);
  return pm_type_equal(&a->type, &b->type) && a->layout == b->layout;
}

static void remove_values(pm_graph *g, pm_val first, uint32_t n) {
  for (uint32_t k = 0; k < n; k++) *pm_value_of(g, first + k) = (pm_value){0};
}

/* The slot becomes PM_OP_NONE; the op must have been removed from its block's list. */
static void remove_op(pm_graph *g, pm_opid op) {
  for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) {
    pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    for (uint32_t k = 0; k < b->ops.n; k++) remove_op(g, b->ops.at[k]);
    remove_values(g, b->arg, b->n_args);
    *b = (pm_block){0};
  }
  remove_values(g, pm_get(g, op)->out, pm_get(g, op)->n_out);
  *pm_get(g, op) = (pm_op){0};
}

/* ---- folding to a constant ---------------------------------------------------------------- */

/* A comparison of arrays that has one outcome for all elements, by their bounds. */
static bool fold_bounds(const simplifier *s, pm_opid op, int64_t *out) {
  const pm_val v = pm_get(s->g, op)->out;
  int64_t hi;
  if (pm_typeof(s->g, v)->dtype != PM_BOOL || !pm_typeof(s->g, v)->rank) return false;
  return pm_compared_range(s->g, op, out, &hi) && *out == hi;
}

/* The value of every element of the op's result, if it is known. */
static bool fold(simplifier *s, pm_opid op, pm_scalar *out) {
  const pm_op *o = pm_get(s->g, op);
  pm_scalar x[PM_EVAL_OPERANDS] = {{0}};
  bool known[PM_EVAL_OPERANDS] = {false};
  if (fold_bounds(s, op, &out->i)) return true;
  if (o->n_in > 2) return false; /* a SELECT becomes its operand, rather than one more constant */
  for (uint32_t k = 0; k < o->n_in; k++) {
    known[k] = pm_constant(s->g, operand(s, op, k), &x[k]);
  }
  return pm_eval(s->g, op, x, known, out);
}

static void become_constant(simplifier *s, pm_opid op, pm_scalar v) {
  pm_graph *g = s->g;
  pm_op *o = pm_get(g, op);
  int64_t word = v.i;
  if (pm_is_float(pm_typeof(g, o->out)->dtype)) memcpy(&word, &v.f, sizeof word);
  pm_vec_push(g->arena, &g->attrs, word);
  o->code = PM_OP_CONST;
  o->n_in = 0;
  o->attr = g->attrs.n - 1;
}

/* ---- folding to an operand ---------------------------------------------------------------- */

static bool is_element(const simplifier *s, pm_val v, pm_element e) {
  pm_scalar c;
  return e != PM_ELEMENT_NO && pm_constant(s->g, v, &c) &&
         pm_is_element(e, (pm_dtype)pm_typeof(s->g, v)->dtype, c);
}

/* Does no attribute of an op that is like its operand change it? */
static bool has_identity_attrs(const simplifier *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  const pm_op_info *info = &pm_ops[o->code];
  for (uint32_t k = 0; k < info->n_attrs; k++) {
    uint32_t n;
    const pm_attr_id id = (pm_attr_id)info->attrs[k];
    if (id == PM_ATTR_MULTIPLE && *pm_attr(s->g, op, id) != 1) return false;
    if (id != PM_ATTR_DIMS && id != PM_ATTR_STARTS) continue; /* the type has SIZES */
    const int64_t *list = pm_attr_list(s->g, op, id, &n);
    for (uint32_t d = 0; d < n; d++) {
      if (list[d] != (id == PM_ATTR_DIMS ? d : 0)) return false;
    }
  }
  return true;
}

/* The operand that equals the result if it has its type and layout, or 0. */
static pm_val equal_operand(const simplifier *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  const pm_law *law = &pm_laws[o->code];
  const pm_element unit = (pm_element)law->unit;
  const pm_val x = o->n_in > 0 ? operand(s, op, 0) : 0, y = o->n_in > 1 ? operand(s, op, 1) : x;
  if (law->like == PM_LIKE_SAME && x == y && has_identity_attrs(s, op)) return x;
  if (o->n_in == 2) {
    const pm_dtype t = (pm_dtype)pm_typeof(s->g, x)->dtype;
    if (is_element(s, y, unit)) return x;
    return pm_commutes((pm_opcode)o->code, t) && is_element(s, x, unit) ? y : 0;
  }
  if (o->code != PM_OP_SELECT) return 0;
  if (y == operand(s, op, 2) || is_element(s, x, PM_ELEMENT_ONE)) return y;
  return is_element(s, x, PM_ELEMENT_ZERO) ? operand(s, op, 2) : 0;
}

/* Is it f(x, x) of ints that is 0? */
static bool cancels(const simplifier *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  return pm_laws[o->code].like == PM_LIKE_NOTHING && operand(s, op, 0) == operand(s, op, 1) &&
         !pm_is_float(pm_typeof(s->g, o->out)->dtype);
}

/* ---- merging ------------------------------------------------------------------------------ */

/* Words that are equal for equal ops only: code, operands, attributes, type, layout. */
#define PUT(x) pm_vec_push(g->arena, key, (uint64_t)(x))
static void make_key(simplifier *s, pm_opid op, words *key) {
  pm_graph *g = s->g;
  const pm_op *o = pm_get(g, op);
  const pm_op_info *info = &pm_ops[o->code];
  const pm_value *v = pm_value_of(g, o->out);
  key->n = 0;
  PUT(o->code | (uint64_t)o->n_in << 16);
  bool swap = o->n_in == 2 && operand(s, op, 0) > operand(s, op, 1) &&
              pm_commutes((pm_opcode)o->code, (pm_dtype)pm_typeof(g, operand(s, op, 0))->dtype);
  for (uint32_t k = 0; k < o->n_in; k++) PUT(operand(s, op, swap ? 1 - k : k));
  for (uint32_t k = 0; k < info->n_attrs; k++) {
    int64_t word = g->attrs.at[o->attr + k];
    if (info->attrs[k] != PM_ATTR_DIMS && info->attrs[k] != PM_ATTR_STARTS &&
        info->attrs[k] != PM_ATTR_SIZES && info->attrs[k] != PM_ATTR_STRIDES) {
      PUT(word);
      continue;
    }
    for (int64_t i = 0; i <= g->lists.at[word]; i++) PUT(g->lists.at[word + i]);
  }
  PUT(v->type.kind | v->type.dtype << 8 | v->type.space << 16 | (uint64_t)v->type.rank << 24);
  for (int k = 0; k < v->type.rank; k++) PUT(v->type.dim[k]);
  PUT(v->layout);
}
#undef PUT

/* An equal op that dominates this one; otherwise 0, and this one is entered. */
static pm_opid merge(simplifier *s, pm_opid op) {
  pm_graph *g = s->g;
  make_key(s, op, &s->key);
  uint64_t hash = pm_hash(s->key.at, sizeof(uint64_t) * s->key.n, 0);
  uint32_t at = (uint32_t)hash & s->mask;
  for (; s->table[at]; at = (at + 1) & s->mask) {
    if (s->hashes[at] != hash) continue;
    make_key(s, s->table[at], &s->other);
    if (s->other.n == s->key.n && !memcmp(s->other.at, s->key.at, sizeof(uint64_t) * s->key.n)) {
      return s->table[at];
    }
  }
  s->table[at] = op;
  s->hashes[at] = hash;
  pm_vec_push(g->arena, &s->entries, at);
  return 0;
}

/* Entries are removed in reverse order of insertion, so no probe sequence is broken. */
static void forget_to(simplifier *s, uint32_t mark) {
  while (s->entries.n > mark) s->table[s->entries.at[--s->entries.n]] = 0;
}

/* ---- the forward walk --------------------------------------------------------------------- */

/* A constant has the splat layout, so once layouts are known not every value can become one. */
static bool may_be_constant(const simplifier *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  const pm_value *v = pm_value_of(s->g, o->out);
  return pm_rule_of(s->g, op) != PM_LAY_FIXED &&
         (!v->layout || pm_layout_of(s->g, v->layout)->kind == PM_SPLAT);
}

/* An array of different elements from no operands: what is computed from it shares its layout, so
 * each place has its own until layouts are known. */
static bool is_source(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  return !o->n_in && pm_typeof(g, o->out)->rank && !pm_has_attr(g, op, PM_ATTR_VALUE);
}

/* Is a pure op no longer needed, because it was replaced? */
static bool simplify_pure(simplifier *s, pm_opid op) {
  pm_graph *g = s->g;
  pm_val out = pm_get(g, op)->out;
  pm_scalar c = {.i = 0};
  if (!pm_has_attr(g, op, PM_ATTR_VALUE)) {
    if (may_be_constant(s, op) && (fold(s, op, &c) || cancels(s, op))) {
      become_constant(s, op, c);
    } else {
      pm_val by = equal_operand(s, op);
      if (by && replaceable(s, out, by)) {
        replace(s, out, by);
        return true;
      }
    }
  }
  if (g->stage < PM_LAID_OUT && is_source(g, op)) return false;
  pm_opid equal = merge(s, op);
  if (equal) replace(s, out, pm_get(g, equal)->out);
  return equal != 0;
}

/* The only region of a control op that runs, exactly once; -1: not known, -2: none runs */
static int only_region(const simplifier *s, pm_opid op) {
  const pm_op *o = pm_get(s->g, op);
  pm_scalar x, y;
  if (o->code == PM_OP_SWITCH && o->n_regions == 1) return 0;
  if (pm_is_branch(o->code)) {
    return pm_constant(s->g, operand(s, op, 0), &x) ? (int)pm_chosen_region(o, x.i) : -1;
  }
  if (pm_has_index(o) && pm_constant(s->g, operand(s, op, 0), &x) &&
      pm_constant(s->g, operand(s, op, 1), &y) && y.i - x.i <= 1) {
    return y.i - x.i == 1 ? 0 : -2;
  }
  return -1;
}

static bool layouts_allow(const simplifier *s, pm_opid op, pm_opid source, uint32_t first) {
  const pm_op *o = pm_get(s->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (!replaceable(s, o->out + k, find(s, pm_in(s->g, source, first + k)))) return false;
  }
  return true;
}

/* Replace a control op by the ops of the region that runs. */
static bool inline_control(simplifier *s, pm_opid op, pm_blk to) {
  pm_graph *g = s->g;
  int region = only_region(s, op);
  bool loop = pm_has_index(pm_get(g, op));
  if (region == -1 || (loop && !layouts_allow(s, op, op, 2))) return false;
  pm_opid source = op;
  uint32_t first = loop ? 2 : 0;
  if (region >= 0) {
    pm_blk from = pm_region(g, op, (uint32_t)region);
    const pm_block *b = &g->blocks.at[from];
    for (uint32_t k = 0; k < b->n_args; k++) s->same[b->arg + k] = operand(s, op, k ? k + 1 : 0);
    source = pm_terminator(g, from);
    first = 0;
    if (!loop && !layouts_allow(s, op, source, 0)) return false;
    run_region(s, from, to);
  }
  for (uint32_t k = 0; k < pm_get(g, op)->n_out; k++) {
    replace(s, pm_get(g, op)->out + k, find(s, pm_in(g, source, first + k)));
  }
  remove_op(g, op);
  return true;
}

static void take(simplifier *s, pm_opid op, pm_blk to) {
  pm_graph *g = s->g;
  pm_op *o = pm_get(g, op);
  o->parent = to;
  for (uint32_t k = 0; k < o->n_out; k++) pm_value_of(g, o->out + k)->block = to;
  pm_vec_push(g->arena, &g->blocks.at[to].ops, op);
}

static void simplify_op(simplifier *s, pm_opid op, pm_blk to) {
  pm_graph *g = s->g;
  pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in; k++) {
    pm_val *slot = &g->operands.at[o->in + k];
    *slot = find(s, *slot);
  }
  if (pm_is_pure(o->code)) {
    if (simplify_pure(s, op)) {
      remove_op(g, op);
    } else {
      take(s, op, to);
    }
    return;
  }
  if (inline_control(s, op, to)) return;
  take(s, op, to);
  for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) {
    uint32_t mark = s->entries.n;
    pm_blk region = pm_region(g, op, r);
    run_region(s, region, region);
    forget_to(s, mark);
  }
}

/* Simplify the ops of a block and append them to `to`: itself, or the block it is inlined in, which
 * does not get the yield. */
static void run_region(simplifier *s, pm_blk from, pm_blk to) {
  pm_graph *g = s->g;
  pm_opid *ops = g->blocks.at[from].ops.at;
  uint32_t n = g->blocks.at[from].ops.n;
  g->blocks.at[from].ops.at = NULL;
  g->blocks.at[from].ops.n = g->blocks.at[from].ops.cap = 0;
  pm_vec_reserve(g->arena, &g->blocks.at[to].ops, g->blocks.at[to].ops.n + n);
  for (uint32_t k = 0; k < n; k++) {
    if (from != to && k + 1 == n) break;
    simplify_op(s, ops[k], to);
  }
  if (from != to) pm_vec_push(g->arena, &g->blocks.at[from].ops, ops[n - 1]);
}

/* ---- the backward walk -------------------------------------------------------------------- */

typedef struct marker {
  pm_graph *g;
  uint8_t *live;
  PM_VEC(pm_opid) todo;
} marker;

static void mark(marker *m, pm_opid op) {
  if (!op || m->live[op]) return;
  m->live[op] = 1;
  pm_vec_push(m->g->arena, &m->todo, op);
}

/* An op stays for some effects though nobody uses its results, and goes in spite of the others. */
enum {
  STAYS = E_SYNC | E_MEET | E_FENCE | E_RELEASE | E_COUNT | E_IO,
  GOES = E_ALLOC | E_CTRL,
};
_Static_assert((STAYS | GOES) == E_ALL && !(STAYS & GOES), "each effect on one side");

static void mark_effects(pm_graph *g, pm_opid op, void *ctx) {
  pm_access a = pm_accesses(op);
  bool kept = pm_ops[pm_get(g, op)->code].effects & STAYS;
  while (!kept && pm_next_access(g, &a)) kept = a.writes;
  if (kept) mark(ctx, op);
}

static void mark_uses(marker *m, pm_opid op) {
  const pm_graph *g = m->g;
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in; k++) mark(m, pm_value_of(g, pm_in(g, op, k))->def);
  for (uint32_t r = 0; r < o->n_regions; r++) mark(m, pm_terminator(g, pm_region(g, op, r)));
  mark(m, g->blocks.at[o->parent].parent);
}

static void sweep(marker *m, pm_blk block) {
  pm_graph *g = m->g;
  pm_block *b = &g->blocks.at[block];
  uint32_t n = 0;
  for (uint32_t k = 0; k < b->ops.n; k++) {
    pm_opid op = b->ops.at[k];
    if (!m->live[op]) {
      remove_op(g, op);
      continue;
    }
    b->ops.at[n++] = op;
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) sweep(m, pm_region(g, op, r));
  }
  b->ops.n = n;
}

static void remove_dead(pm_graph *g) {
  marker m = {.g = g, .live = PM_NEW(g->arena, uint8_t, g->ops.n)};
  pm_walk(g, 1, mark_effects, &m);
  while (m.todo.n) mark_uses(&m, m.todo.at[--m.todo.n]);
  sweep(&m, 1);
}

pm_code pm_simplify(pm_graph *g, pm_err *err) {
  (void)err;
  simplifier s = {.g = g, .same = PM_NEW(g->arena, pm_val, g->values.n)};
  uint32_t n = 64;
  while (n < 2 * g->ops.n) n *= 2;
  s.mask = n - 1;
  s.table = PM_NEW(g->arena, pm_opid, n);
  s.hashes = PM_NEW(g->arena, uint64_t, n);
  run_region(&s, 1, 1);
  remove_dead(g);
  return PM_OK;
}
