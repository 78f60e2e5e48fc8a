/* The agents of a run, threads and warps: where they are, which of them are ready, and who wakes
 * whom. */
#include "vm.h"

enum { MANY_POLLS = 1 << 18, SOME_POLLS = 1 << 8 }; /* tests in vain: of all, of each */

uint32_t pm_vm_observers(const pm_machine *m) {
  return m->n_threads * (m->has_warps ? 1 + WARPS : 1);
}

uint32_t pm_vm_agents(const pm_machine *m) { return pm_vm_blocks(m) * pm_vm_observers(m); }

/* All threads come first, then all warps, in their order. */
thread *pm_vm_warps(const pm_machine *m, const thread *t) {
  const size_t n = (size_t)pm_vm_blocks(m) * m->n_threads;
  return m->threads + n + (size_t)(t - m->threads) * WARPS;
}

bool pm_vm_same_but(const pm_machine *m, const block *a, const block *b, uint32_t axes) {
  for (uint32_t d = 0; d < m->n_cluster; d++) {
    if (a->coord[d] != b->coord[d] && !(axes >> d & 1)) return false;
  }
  return true;
}

/* Which of n barriers or semaphores of a scope belong to a thread: where the scope is not
 * collective, a part for each thread follows the other. */
uint32_t pm_vm_first_of(const pm_machine *m, const scope *s, const thread *t, uint32_t *n) {
  if (s->collective || m->n_threads == 1) return 0;
  *n /= m->n_threads;
  return *n * t->index;
}

void pm_vm_make_ready(pm_machine *m, thread *t) {
  t->state = THREAD_READY;
  t->ready = m->n_ready;
  m->ready[m->n_ready++] = t;
}

step pm_vm_block_on(pm_machine *m, thread *t, thread_state why) {
  t->state = why;
  m->ready[t->ready] = m->ready[--m->n_ready];
  m->ready[t->ready]->ready = t->ready;
  return STEP_PAUSE;
}

static void wake_some(pm_machine *m, thread *t, uint32_t n, thread_state why,
                      const barrier *waits_for) {
  for (thread *end = t + n; t < end; t++) {
    if (t->state == why && (!waits_for || t->waits_for == waits_for)) pm_vm_make_ready(m, t);
  }
}

void pm_vm_wake(pm_machine *m, block *b, thread_state why, const barrier *waits_for) {
  thread *t = m->threads + (size_t)(b - m->blocks) * m->n_threads;
  wake_some(m, t, m->n_threads, why, waits_for);
  if (m->has_warps) wake_some(m, pm_vm_warps(m, t), m->n_threads * WARPS, why, waits_for);
}

void pm_vm_wake_at(pm_machine *m, const uint32_t *semaphore) {
  for (thread *t = m->threads; t < m->threads + pm_vm_agents(m); t++) {
    if (t->state == THREAD_AT_SEMAPHORE && t->waits_at == semaphore) pm_vm_make_ready(m, t);
  }
}

/* Threads that wait by looking again are never blocked. Where all of those that are ready do
 * nothing else for very long, and nothing is in flight, it is a deadlock. */
step pm_vm_poll(pm_machine *m, thread *t) {
  if (t->epoch != m->epoch) t->polled = 0;
  t->epoch = m->epoch;
  t->polled++;
  if (++m->polls < MANY_POLLS || m->polls % MANY_POLLS) return STEP_PAUSE;
  for (uint32_t k = 0; k < m->n_ready; k++) {
    const thread *r = m->ready[k];
    if (r->epoch != m->epoch || r->polled < SOME_POLLS) return STEP_PAUSE;
  }
  for (int k = 0; k < TASK_KINDS; k++) {
    if (m->tasks[k].n) return STEP_PAUSE;
  }
  return STEP_STUCK;
}
