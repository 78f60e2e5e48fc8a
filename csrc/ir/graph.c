/* The graph's storage and what is read from it: strings, types, attributes, places, walks. It knows
 * no rule of any op.
 *
 * Index 0 of values, ops, blocks, strings and layouts is reserved for "none"; list 0 is the empty
 * list. Ops that were removed (pm_abandon, passes) keep their slot with code PM_OP_NONE. */
#include <inttypes.h>

#include "ir.h"

/* ---- the graph and its strings -------------------------------------------------------------- */

pm_graph *pm_graph_new(pm_arena *a, const char *name) {
  pm_graph *g = PM_NEW(a, pm_graph, 1);
  g->arena = a;
  g->name = pm_strdup(a, name, strlen(name));
  g->n_threads = 1;
  g->target = &pm_targets[0];
  g->reduction_scratch = PM_REDUCTION_SCRATCH;
  pm_vec_push(a, &g->values, (pm_value){0});
  pm_vec_push(a, &g->ops, (pm_op){0});
  pm_vec_push(a, &g->blocks, (pm_block){0});
  pm_vec_push(a, &g->operands, 0);
  pm_vec_push(a, &g->region_blocks, 0);
  pm_vec_push(a, &g->attrs, 0);
  pm_vec_push(a, &g->lists, 0);
  pm_vec_push(a, &g->strings, "");
  pm_vec_push(a, &g->layouts, NULL);
  pm_new_block(g);
  return g;
}

static uint32_t *string_slot(pm_graph *g, const char *s, size_t n) {
  uint32_t mask = g->string_slots.n - 1, at = (uint32_t)pm_hash(s, n, 0) & mask;
  uint32_t *slots = g->string_slots.at;
  while (slots[at] && strcmp(g->strings.at[slots[at]], s)) at = (at + 1) & mask;
  return &slots[at];
}

static void grow_string_slots(pm_graph *g) {
  uint32_t n = g->string_slots.n ? g->string_slots.n * 2 : 64;
  g->string_slots.at = PM_NEW(g->arena, uint32_t, n);
  g->string_slots.n = g->string_slots.cap = n;
  for (uint32_t k = 1; k < g->strings.n; k++) {
    *string_slot(g, g->strings.at[k], strlen(g->strings.at[k])) = k;
  }
}

uint32_t pm_intern(pm_graph *g, const char *s) {
  size_t n = strlen(s);
  if (!n) return 0;
  if (g->strings.n * 2 >= g->string_slots.n) grow_string_slots(g);
  uint32_t *slot = string_slot(g, s, n);
  if (!*slot) {
    pm_vec_push(g->arena, &g->strings, pm_strdup(g->arena, s, n));
    *slot = g->strings.n - 1;
  }
  return *slot;
}

pm_blk pm_new_block(pm_graph *g) {
  pm_vec_push(g->arena, &g->blocks, (pm_block){0});
  return g->blocks.n - 1;
}

/* ---- types ---------------------------------------------------------------------------------- */

bool pm_type_equal(const pm_type *a, const pm_type *b) {
  if (a->kind != b->kind || a->rank != b->rank) return false;
  if (a->kind != PM_BARRIER && a->dtype != b->dtype) return false;
  const bool placed = a->kind == PM_REF || a->kind == PM_SEMAPHORE;
  if (placed && a->space != b->space) return false;
  return !memcmp(a->dim, b->dim, sizeof(int64_t) * a->rank);
}

int64_t pm_type_size(const pm_type *t) {
  int64_t n = 1;
  for (int k = 0; k < t->rank; k++) n *= t->dim[k];
  return n;
}

const char *pm_element_text(const pm_type *t) {
  if (t->kind == PM_BARRIER) return "barrier";
  return t->kind == PM_SEMAPHORE ? "semaphore" : pm_dtypes[t->dtype].text;
}

const char *pm_type_text(pm_arena *a, const pm_type *t) {
  pm_text out;
  pm_text_init(&out, a);
  if (t->kind == PM_REF || t->kind == PM_SEMAPHORE) pm_putf(&out, "%s ", pm_spaces[t->space].text);
  pm_put(&out, pm_element_text(t));
  pm_put(&out, "[");
  for (int k = 0; k < t->rank; k++) pm_putf(&out, "%s%" PRId64, k ? "," : "", t->dim[k]);
  pm_put(&out, "]");
  return out.at;
}

/* ---- ops ------------------------------------------------------------------------------------ */

bool pm_is_free_load(const pm_graph *g, pm_opid op) {
  return pm_rule_of(g, op) == PM_LAY_LOAD && !*pm_attr(g, op, PM_ATTR_LAYOUT);
}

int64_t pm_atomic_of(const pm_graph *g, pm_opid op) {
  return pm_has_attr(g, op, PM_ATTR_ATOMIC) ? *pm_attr(g, op, PM_ATTR_ATOMIC) : 0;
}

const int64_t *pm_attr_list(const pm_graph *g, pm_opid op, pm_attr_id id, uint32_t *n) {
  const int64_t *list = &g->lists.at[*pm_attr(g, op, id)];
  *n = (uint32_t)list[0];
  return list + 1;
}

void pm_err_op(pm_err *err, const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (o->line) pm_err_at(err, g->strings.at[o->file], o->line);
}

void pm_walk(pm_graph *g, pm_blk block, pm_visit fn, void *ctx) {
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    pm_opid op = g->blocks.at[block].ops.at[k];
    fn(g, op, ctx);
    const uint32_t n = g->ops.at[op].n_regions;
    for (uint32_t r = 0; r < n; r++) pm_walk(g, pm_region(g, op, r), fn, ctx);
  }
}

uint32_t pm_position(const pm_graph *g, pm_opid op) {
  const pm_block *b = &g->blocks.at[pm_get(g, op)->parent];
  uint32_t at = 0;
  while (b->ops.at[at] != op) at++;
  return at;
}

uint32_t pm_inline_results(const pm_graph *g, pm_opid op, pm_val *out) {
  const pm_block *b = &g->blocks.at[pm_get(g, op)->parent];
  uint32_t n = 0;
  for (uint32_t k = pm_position(g, op); k < b->ops.n; k++) {
    const pm_op *o = pm_get(g, b->ops.at[k]);
    if (o->code == PM_OP_INLINE && n) break;
    if (o->code != PM_OP_INLINE && o->code != PM_OP_INLINE_RESULT) continue;
    if (out) out[n] = o->out;
    n++;
  }
  return n;
}
