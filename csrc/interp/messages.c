/* How messages name who runs and what is touched, errors of a run, and the log.
 *
 * The log: a line for each event of the kinds that InterpretParams asks for, through the same
 * channel as DEBUG_PRINT: "[kind] agent: event at file:line". */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "vm.h"

/* ---- names -------------------------------------------------------------------------------- */

const char *pm_vm_place(const pm_machine *m, pm_opid op, char *buf, size_t n) {
  const place *p = &m->places[op];
  if (p->file) {
    snprintf(buf, n, " at %s:%u", p->file, p->line);
  } else {
    snprintf(buf, n, " at an unknown place");
  }
  return buf;
}

static int put_tuple(char *buf, size_t n, const int64_t *x, uint32_t rank) {
  int at = snprintf(buf, n, "(");
  for (uint32_t k = 0; k < rank && at < (int)n; k++) {
    at += snprintf(buf + at, n - (size_t)at, k ? ", %" PRId64 : "%" PRId64, x[k]);
  }
  if (at < (int)n) at += snprintf(buf + at, n - (size_t)at, rank == 1 ? ",)" : ")");
  return at;
}

size_t pm_vm_put_device(const pm_machine *m, int64_t number, char *buf, size_t n) {
  int64_t at[PM_MAX_RANK];
  for (uint32_t d = m->n_mesh; d-- > 0; number /= m->mesh[d]) at[d] = number % m->mesh[d];
  return pm_min((size_t)put_tuple(buf, n, at, m->n_mesh), n);
}

const char *pm_vm_block(const pm_machine *m, const block *b, char *buf, size_t n) {
  put_tuple(buf, n, b->coord, m->n_cluster);
  return buf;
}

const char *pm_vm_agent(const pm_machine *m, const thread *t, char *buf, size_t n) {
  int at = 0;
  buf[0] = 0;
  if (m->n_mesh) {
    at += snprintf(buf, n, "device ");
    at += (int)pm_vm_put_device(m, t->block->cluster->device, buf + at, n - (size_t)at);
  }
  if (m->n_grid) {
    at += snprintf(buf + at, n - (size_t)at, "%sgrid point ", at ? ", " : "");
    at += put_tuple(buf + at, n - (size_t)at, t->block->cluster->point, m->n_grid);
  }
  if (m->n_cluster) {
    at += snprintf(buf + at, n - (size_t)at, "%sblock ", at ? ", " : "");
    at += put_tuple(buf + at, n - (size_t)at, t->block->coord, m->n_cluster);
  }
  at += snprintf(buf + at, n - (size_t)at, "%sthread %u", at ? ", " : "", t->index);
  if (t->of && at < (int)n) snprintf(buf + at, n - (size_t)at, ", warp %u", t->warp);
  return buf;
}

const char *pm_vm_barrier_text(const pm_machine *m, const thread *t, const barrier *b, char *buf,
                               size_t n) {
  const barrier_info *info = b->info;
  int64_t index = b - b->block->bars - info->first, at[PM_MAX_RANK];
  for (uint32_t d = info->rank; d-- > 0; index /= info->dim[d]) at[d] = index % info->dim[d];
  int len = snprintf(buf, n, "'%s", info->name);
  for (uint32_t d = 0; d < info->rank && info->count > 1 && len < (int)n; d++) {
    len += snprintf(buf + len, n - (size_t)len, "%s%" PRId64, d ? ", " : "[", at[d]);
  }
  if (len < (int)n) {
    len += snprintf(buf + len, n - (size_t)len, "%s'", info->rank && info->count > 1 ? "]" : "");
  }
  char place[600];
  if (len < (int)n && b->block != t->block) {
    len += snprintf(buf + len, n - (size_t)len, " of block %s",
                    pm_vm_block(m, b->block, place, sizeof place));
  }
  if (len < (int)n && m->places[info->op].file) {
    snprintf(buf + len, n - (size_t)len, " (allocated%s)",
             pm_vm_place(m, info->op, place, sizeof place));
  }
  return buf;
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

const char *pm_vm_index_text(const arg *a, size_t at, char *buf, size_t n) {
  int64_t rest = (int64_t)(at / a->item), index[PM_MAX_RANK];
  for (uint32_t d = a->rank; d-- > 0; rest /= a->dim[d]) index[d] = rest % a->dim[d];
  int len = snprintf(buf, n, "[");
  for (uint32_t d = 0; d < a->rank && len < (int)n; d++) {
    len += snprintf(buf + len, n - (size_t)len, d ? ", %" PRId64 : "%" PRId64, index[d]);
  }
  if (len < (int)n) snprintf(buf + len, n - (size_t)len, "]");
  return buf;
}

/* ---- errors and the log ------------------------------------------------------------------- */

step pm_vm_fail(pm_machine *m, const thread *t, pm_opid op, pm_code code, const char *fmt, ...) {
  char text[3072], agent[512];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  pm_fail(m->err, code, "%s (%s)", text, pm_vm_agent(m, t, agent, sizeof agent));
  if (m->places[op].file) pm_err_at(m->err, m->places[op].file, m->places[op].line);
  return STEP_FAIL;
}

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
