/* The profiler on the interpreter: traces in the form that generated programs write (ir.h),
 * straight to its output. Clock and timer count the instructions of the run. */
#include "vm.h"

enum { TIMER, SM, USED, EVENTS }; /* words of a trace */

static const uint32_t ENDS = 1u << 31;

static uint32_t traces_of(const pm_machine *m) {
  return m->n_threads * (m->profile_warps ? WARPS : 1);
}

static int32_t *trace_of(const pm_machine *m, const block *b, uint32_t number) {
  uint32_t at[3], grid[3];
  pm_vm_hardware_index(m, b, at, grid);
  const int64_t block = ((int64_t)at[0] * grid[1] + at[1]) * grid[2] + at[2];
  return (int32_t *)m->buffers[b->cluster->device * m->n_args + m->profile_param] +
         (block * traces_of(m) + number) * (m->profile_words + PM_PROFILE_TAIL);
}

static void add_event(const pm_machine *m, int32_t *trace, uint32_t tag) {
  const int64_t used = trace[USED];
  if (used + 2 <= m->profile_words - PM_PROFILE_HEAD) {
    trace[EVENTS + used] = (int32_t)tag;
    trace[EVENTS + used + 1] = (int32_t)m->steps;
  }
  trace[USED] += 2;
}

void pm_profile_begin_cluster(pm_machine *m, const cluster *c) {
  for (const block *b = c->blocks; b < c->blocks + m->n_blocks; b++) {
    for (uint32_t k = 0; k < traces_of(m); k++) {
      int32_t *trace = trace_of(m, b, k);
      trace[TIMER] = trace[m->profile_words] = (int32_t)m->steps;
      trace[SM] = (int32_t)(b - m->blocks);
      trace[USED] = 0;
      add_event(m, trace, 0);
      add_event(m, trace, ENDS);
    }
  }
}

void pm_profile_end_cluster(pm_machine *m, const cluster *c) {
  for (const block *b = c->blocks; b < c->blocks + m->n_blocks; b++) {
    for (uint32_t k = 0; k < traces_of(m); k++) {
      int32_t *tail = trace_of(m, b, k) + m->profile_words;
      tail[1] = tail[2] = (int32_t)m->steps;
      tail[3] = (int32_t)(m->points * m->n_blocks);
    }
  }
}

/* A scope that a thread enters is one of each of its warps; of what warps enter by themselves, a
 * trace of the thread has that of warp 0. */
static step exec_named_scope(pm_machine *m, thread *t, const instr *i) {
  const uint32_t tag = i->to | (i->n ? ENDS : 0);
  if (m->timeline) pm_time_scope(m, t, i->op, i->n);
  if (!m->profile_words || (t->of && t->warp && !m->profile_warps)) return STEP_NEXT;
  if (!m->profile_warps) {
    add_event(m, trace_of(m, t->block, t->index), tag);
    return STEP_NEXT;
  }
  for (uint32_t w = 0; w < WARPS; w++) {
    if (!t->of || t->warp == w) add_event(m, trace_of(m, t->block, t->index * WARPS + w), tag);
  }
  return STEP_NEXT;
}

const handler pm_vm_NAMED_SCOPE = {pm_vm_encode_named_scope, exec_named_scope, {0}};
