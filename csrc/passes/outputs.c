/* Warnings for outputs that no path of a kernel writes, since their contents are undefined.
 *
 * An output counts as written if an op that writes GMEM has a view of it among its operands,
 * whether or not that op is reached. An output that starts as a copy of an operand need not be
 * written, nor scratch that nothing reads. */
#include "passes.h"

typedef struct seen {
  pm_graph *g;
  bool *written, *read; /* by argument of block 1 */
} seen;

static void note(pm_graph *g, pm_opid op, void *ctx) {
  seen *s = ctx;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (!(a.where & (PM_IN_GMEM | PM_IN_SEMAPHORE))) continue;
    const pm_val argument = pm_view_base(g, a.view) - g->blocks.at[1].arg;
    if (argument >= g->n_operands + g->n_outputs) continue;
    s->written[argument] |= a.writes;
    s->read[argument] |= a.reads;
  }
}

pm_code pm_check_outputs(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  (void)err;
  const uint32_t n = g->n_operands + g->n_outputs + 1;
  seen s = {g, PM_NEW(g->arena, bool, n), PM_NEW(g->arena, bool, n)};
  pm_walk(g, 1, note, &s);
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (g->profile_words && k == g->profile_output) continue;
    if (s.written[g->n_operands + k] || (g->alias && g->alias[k] >= 0)) continue;
    if (k + g->n_scratch >= g->n_outputs && !s.read[g->n_operands + k]) continue;
    const pm_value *v = pm_value_of(g, g->blocks.at[1].arg + g->n_operands + k);
    const char *name = v->name ? g->strings.at[v->name] : "";
    pm_vec_push(
        g->arena, &g->warnings,
        pm_printf(g->arena, "kernel %s: nothing writes output %u%s%s%s; its contents are undefined",
                  g->name, k, *name ? " (" : "", name, *name ? ")" : ""));
  }
  return PM_OK;
}
