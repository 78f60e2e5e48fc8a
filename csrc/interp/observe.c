/* What a run logs, skips or measures on request (InterpretParams).
 *
 * Logging: a line for each event of the requested kinds, through the same channel as DEBUG_PRINT:
 * "[kind] agent: event at file:line".
 *
 * Runs without floating-point work: an instruction that only computes floats is not executed. An
 * instruction that loads floats, or waits for them, is executed, and its result is replaced. Either
 * way the result reads as +inf (the largest number of dtypes without one). Which instructions these
 * are, and how many elements they produce, is recorded when the kernel is compiled. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "../ir/access.h"
#include "vm.h"

void pm_vm_line(pm_machine *m, const char *line) {
  if (m->options.print) {
    m->options.print(m->options.print_ctx, line);
  } else {
    puts(line);
  }
}

void pm_vm_log(pm_machine *m, const thread *t, pm_opid op, int kind, const char *fmt, ...) {
  static const char *const names[] = {"barrier", "semaphore", "shared memory"};
  char text[1024], agent[512], place[600], line[2400];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  snprintf(line, sizeof line, "[%s] %s: %s%s", names[__builtin_ctz((unsigned)kind)],
           pm_vm_agent(m, t, agent, sizeof agent), text, pm_vm_place(m, op, place, sizeof place));
  pm_vm_line(m, line);
}

/* "'tile' float16[64, 64]" */
const char *pm_vm_view_text(const access *a, char *buf, size_t n) {
  int at = snprintf(buf, n, "'%s' %s[", a->name, pm_dtypes[a->dtype].text);
  for (int k = 0; k < a->rank && at < (int)n; k++) {
    at += snprintf(buf + at, n - (size_t)at, "%s%" PRId64, k ? ", " : "", a->dim[k]);
  }
  if (at < (int)n) snprintf(buf + at, n - (size_t)at, "]");
  return buf;
}

/* ---- without floating-point work ----------------------------------------------------------- */

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
