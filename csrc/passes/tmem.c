/* The columns of tensor memory.
 *
 * As in shared memory, allocations form a stack that follows the nesting of regions: consecutive
 * scopes overlap, nested scopes add up, the groups of a union start at one column. An allocation
 * takes whole units of 4 columns. The block allocates once, for the deepest point: a power of two
 * of at least 32 columns, which the hardware demands. The allocations live at the deepest point are
 * kept for the error message of a kernel that needs more than there are. */
#include "../ir/tmem.h"

#include "passes.h"

enum { LEAST = 32 }; /* columns that a block can allocate */

typedef struct plan {
  pm_graph *g;
  int64_t top, deepest;
  struct {
    int64_t number, group, start, end; /* number 0: no union is open */
  } overlay;
  PM_VEC(pm_opid) live;
  PM_VEC(pm_opid) live_at_deepest;
  pm_opid first; /* allocation */
  bool mixed;    /* some allocations are for pairs, others not */
} plan;

static void close_union(plan *p) {
  if (p->overlay.number) p->top = pm_max(p->top, p->overlay.end);
  p->overlay.number = 0;
}

static void enter_union(plan *p, pm_opid alloc) {
  uint32_t n;
  const int64_t *u = pm_attr_list(p->g, alloc, PM_ATTR_UNION, &n);
  if (!n || u[0] != p->overlay.number) close_union(p);
  if (!n) return;
  if (!p->overlay.number) {
    p->overlay.number = u[0];
    p->overlay.start = p->overlay.end = p->top;
  } else if (u[1] != p->overlay.group) {
    p->overlay.end = pm_max(p->overlay.end, p->top);
    p->top = p->overlay.start;
  }
  p->overlay.group = u[1];
}

static void place(plan *p, pm_opid op) {
  pm_graph *g = p->g;
  const pm_tmem m = pm_tmem_of(g, op);
  enter_union(p, op);
  *pm_attr(g, op, PM_ATTR_OFFSET) = p->top;
  p->top = pm_min(p->top + pm_tmem_size(&m), INT32_MAX);
  if (!p->first) p->first = op;
  p->mixed |= m.pair != pm_tmem_of(g, p->first).pair;
  pm_vec_push(g->arena, &p->live, op);
  if (p->top <= p->deepest) return;
  p->deepest = p->top;
  p->live_at_deepest.n = 0;
  for (uint32_t k = 0; k < p->live.n; k++) {
    pm_vec_push(g->arena, &p->live_at_deepest, p->live.at[k]);
  }
}

static void place_block(plan *p, pm_blk block) {
  pm_graph *g = p->g;
  const int64_t top = p->top;
  const uint32_t live = p->live.n;
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    if (pm_allocates(g, op, PM_TMEM)) place(p, op);
    else if (pm_get(g, op)->n_regions) close_union(p);
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) place_block(p, pm_region(g, op, r));
  }
  p->overlay.number = 0;
  p->top = top;
  p->live.n = live;
}

static pm_code too_large(const plan *p, int limit, pm_err *err) {
  enum { MAX_ROWS = 40 };
  pm_graph *g = p->g;
  pm_text t;
  pm_text_init(&t, g->arena);
  pm_putf(&t, "\n  %8s %8s  %-24s %s\n", "columns", "first", "name", "shape and place");
  const uint32_t n = p->live_at_deepest.n;
  for (uint32_t k = 0; k < n && k < MAX_ROWS; k++) {
    const pm_opid op = p->live_at_deepest.at[k];
    const pm_value *v = pm_value_of(g, pm_get(g, op)->out);
    const pm_tmem m = pm_tmem_of(g, op);
    const char *name = v->name ? g->strings.at[v->name] : pm_printf(g->arena, "tmem%u", k);
    pm_putf(&t, "  %8lld %8lld  %-24s %s, %s, %d in 32 bits, at %s:%u\n",
            (long long)pm_tmem_size(&m), (long long)m.offset, name,
            pm_type_text(g->arena, &v->type), pm_enum_text(PM_ENUM_TMEM, m.layout), m.packing,
            g->strings.at[pm_get(g, op)->file], pm_get(g, op)->line);
  }
  if (n > MAX_ROWS) pm_putf(&t, "  ... and %u more\n", n - MAX_ROWS);
  pm_fail(err, PM_E_VALUE,
          "the kernel needs %lld columns of TMEM, a block has %d. At the deepest point these are "
          "live (groups of a plgpu.RefUnion begin at the same column):%s",
          (long long)p->deepest, limit, t.at);
  pm_err_op(err, g, p->live_at_deepest.at[n - 1]);
  return PM_E_VALUE;
}

/* All tcgen05 instructions of a kernel are for pairs, or none is: commits, too, which have no ref
 * in tensor memory. */
static pm_code check_pairs(pm_graph *g, bool pair, pm_err *err) {
  for (pm_opid op = 1; op < g->ops.n; op++) {
    if (!pm_has_attr(g, op, PM_ATTR_PAIR) || *pm_attr(g, op, PM_ATTR_PAIR) == pair) continue;
    pm_fail(err, PM_E_VALUE,
            "%s: collective_axis is %s, but the kernel's TMEM is allocated %s collective=True; all "
            "products, copies to TMEM and commits of a kernel are for pairs of blocks, or none is",
            pm_op_name(pm_get(g, op)->code), pair ? "missing" : "given", pair ? "with" : "without");
    pm_err_op(err, g, op);
    return PM_E_VALUE;
  }
  return PM_OK;
}

pm_code pm_plan_tmem(pm_graph *g, const pm_target *t, pm_err *err) {
  plan p = {.g = g};
  place_block(&p, 1);
  g->tmem_columns = 0;
  if (!p.first) return PM_OK;
  if (p.mixed) {
    pm_fail(err, PM_E_VALUE,
            "some of the kernel's TMEM is allocated with collective=True and some without; all of "
            "it must agree");
    pm_err_op(err, g, p.first);
    return PM_E_VALUE;
  }
  if (check_pairs(g, pm_tmem_of(g, p.first).pair, err)) return err->code;
  if (p.deepest > t->tmem) return too_large(&p, t->tmem, err);
  g->tmem_columns = LEAST;
  while (g->tmem_columns < p.deepest) g->tmem_columns *= 2;
  return PM_OK;
}
