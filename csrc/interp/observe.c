/* What a run skips or measures on request (InterpretParams).
 *
 * Runs without floating-point work: an instruction that only computes floats is not executed. An
 * instruction that loads floats, or waits for them, is executed, and its result is replaced. Either
 * way the result reads as +inf (the largest number of dtypes without one). Which instructions these
 * are, and how many elements they produce, is recorded when the kernel is compiled. */
#include <math.h>

#include "../ir/access.h"
#include "vm.h"

skip pm_vm_skips(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (!op || o->n_out != 1 || o->n_regions) return SKIP_NOTHING;
  const pm_type *t = pm_typeof(g, o->out);
  if (t->kind != PM_ARRAY || !pm_is_float(t->dtype)) return SKIP_NOTHING;
  if (pm_is_pure(o->code)) return SKIP_ALL;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.writes) return SKIP_NOTHING;
  }
  return pm_ops[o->code].effects & ~E_SYNC ? SKIP_NOTHING : SKIP_RESULT;
}

static step run_skipping(pm_machine *m, thread *t, const instr *i) {
  step s = i->skip == SKIP_ALL ? STEP_NEXT : i->exec(m, t, i);
  if (i->skip == SKIP_NOTHING || s == STEP_FAIL) return s;
  const pm_dtype d = (pm_dtype)i->skip_dtype;
  char *at = slot_of(t, i->dst);
  for (uint32_t k = 0; k < i->skip_bytes; k += pm_dtypes[d].bytes) {
    pm_store_scalar(d, at + k, (pm_scalar){.f = INFINITY});
  }
  return s;
}

step pm_vm_observe(pm_machine *m, thread *t, const instr *i) {
  m->steps++;
  if (m->poison && i->poison && i->poison(m, t, i) == STEP_FAIL) return STEP_FAIL;
  if (m->timeline) pm_time_step(m, t, i);
  return m->options.skip_floats ? run_skipping(m, t, i) : i->exec(m, t, i);
}
