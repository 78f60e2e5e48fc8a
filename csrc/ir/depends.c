/* Two data-flow questions, answered backwards through operands. Loads depend on their refs, not on
 * what is stored there.
 *
 * Does a value depend on others? A result of an op with regions depends on everything used inside
 * them; a region argument also depends on the op's operands. That is more than strictly necessary,
 * never less.
 *
 * Is a value the same in every iteration of a loop? It changes if it leads to the loop's index, to
 * a carry that the loop computes from itself or from changing values, to memory that the loop
 * writes, or to shared memory, which other threads write. */
#include "access.h"
#include "view.h"

typedef struct walker {
  const pm_graph *g;
  const pm_val *on;
  uint32_t n_on;
  uint8_t *seen_value, *seen_op;
} walker;

static bool reaches(walker *w, pm_val v);

static bool op_reaches(walker *w, pm_opid id) {
  if (w->seen_op[id]) return false;
  w->seen_op[id] = 1;
  const pm_op *op = pm_get(w->g, id);
  for (uint32_t k = 0; k < op->n_in; k++)
    if (reaches(w, pm_in(w->g, id, k))) return true;
  for (uint32_t r = 0; r < op->n_regions; r++) {
    const pm_block *b = &w->g->blocks.at[pm_region(w->g, id, r)];
    for (uint32_t k = 0; k < b->ops.n; k++)
      if (op_reaches(w, b->ops.at[k])) return true;
  }
  return false;
}

static bool reaches(walker *w, pm_val v) {
  for (uint32_t k = 0; k < w->n_on; k++)
    if (w->on[k] == v) return true;
  if (w->seen_value[v]) return false;
  w->seen_value[v] = 1;
  const pm_value *value = pm_value_of(w->g, v);
  pm_opid op = value->def ? value->def : w->g->blocks.at[value->block].parent;
  return op && op_reaches(w, op);
}

bool pm_depends(const pm_graph *g, const pm_val *vals, uint32_t n, const pm_val *on,
                uint32_t n_on) {
  walker w = {g, on, n_on, PM_NEW(g->arena, uint8_t, g->values.n),
              PM_NEW(g->arena, uint8_t, g->ops.n)};
  for (uint32_t k = 0; k < n; k++)
    if (reaches(&w, vals[k])) return true;
  return false;
}

/* ---- the same in every iteration ---------------------------------------------------------- */

typedef struct changes {
  const pm_graph *g;
  pm_opid loop;
  uint8_t *seen; /* per value: 1 it is being looked at, 2 it does not change */
} changes;

static bool is_inside(const pm_graph *g, pm_blk block, pm_opid op) {
  pm_opid parent = g->blocks.at[block].parent;
  while (parent && parent != op) parent = g->blocks.at[pm_get(g, parent)->parent].parent;
  return parent == op;
}

/* Is what v is a view of written below the op? */
static bool writes(const pm_graph *g, pm_opid op, pm_val base) {
  const pm_op *o = pm_get(g, op);
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a))
    if (a.writes && pm_view_base(g, a.view) == base) return true;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    for (uint32_t k = 0; k < b->ops.n; k++)
      if (writes(g, b->ops.at[k], base)) return true;
  }
  return false;
}

static bool changes_in(changes *c, pm_val v);

static bool any_changes(changes *c, pm_opid op) {
  for (uint32_t k = 0; k < pm_get(c->g, op)->n_in; k++)
    if (changes_in(c, pm_in(c->g, op, k))) return true;
  return false;
}

/* Argument k of a region: an index if it stands in front of the carries of a FOR. */
static bool argument_changes(changes *c, pm_opid op, uint32_t k) {
  const pm_op *o = pm_get(c->g, op);
  const uint32_t index = pm_has_index(o);
  if (k < index) /* of a loop inside: it counts anew each time */
    return op == c->loop || changes_in(c, pm_in(c->g, op, 0)) || changes_in(c, pm_in(c->g, op, 1));
  if (op != c->loop && changes_in(c, pm_in(c->g, op, k + index))) return true;
  const pm_opid yield = pm_terminator(c->g, pm_region(c->g, op, o->n_regions - 1u));
  const pm_val next = pm_in(c->g, yield, k - index);
  const pm_value *n = pm_value_of(c->g, next);
  if (!n->def && n->index == k && c->g->blocks.at[n->block].parent == op) return false; /* itself */
  return changes_in(c, next);
}

/* A result of an op with regions: what they yield, and what chooses between them. */
static bool region_changes(changes *c, pm_opid op, uint32_t k) {
  const pm_op *o = pm_get(c->g, op);
  if (any_changes(c, op)) return true;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    if (pm_is_condition(o, r)) continue;
    const pm_opid yield = pm_terminator(c->g, pm_region(c->g, op, r));
    if (changes_in(c, pm_in(c->g, yield, k))) return true;
  }
  return pm_is_condition(o, 0) &&
         changes_in(c, pm_in(c->g, pm_terminator(c->g, pm_region(c->g, op, 0)), 0));
}

static bool result_changes(changes *c, pm_val v) {
  const pm_graph *g = c->g;
  const pm_value *value = pm_value_of(g, v);
  const pm_opid op = value->def;
  if (!op) return argument_changes(c, g->blocks.at[value->block].parent, value->index);
  if (pm_get(g, op)->n_regions) return region_changes(c, op, value->index);
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.certainty == PM_UNTOLD) continue; /* who knows what it reads */
    if (a.writes || a.where & (PM_IN_SMEM | PM_IN_BARRIER | PM_IN_SEMAPHORE)) return true;
    if (writes(g, c->loop, pm_view_base(g, a.view))) return true;
  }
  return any_changes(c, op);
}

/* true ends the whole question, so that what does not change is all there is to remember. */
static bool changes_in(changes *c, pm_val v) {
  const pm_value *value = pm_value_of(c->g, v);
  if (!is_inside(c->g, value->block, c->loop)) return false;
  /* a carry that leads to itself; those of loops inside begin anew each time */
  if (c->seen[v] == 1) return c->g->blocks.at[value->block].parent == c->loop;
  if (c->seen[v]) return false;
  c->seen[v] = 1;
  if (result_changes(c, v)) return true;
  c->seen[v] = 2;
  return false;
}

bool pm_repeats(const pm_graph *g, pm_val v, pm_opid op) {
  changes c = {g, 0, PM_NEW(g->arena, uint8_t, g->values.n)};
  while ((op = g->blocks.at[pm_get(g, op)->parent].parent)) {
    if (!pm_is_loop(pm_get(g, op)->code)) continue;
    memset(c.seen, 0, g->values.n);
    c.loop = op;
    if (!changes_in(&c, v)) return true;
  }
  return false;
}
