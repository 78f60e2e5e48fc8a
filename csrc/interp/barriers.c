/* Arrivals at barriers, and the phases that they complete.
 *
 * A copy arrives when it is issued and holds the phase open until its bytes have landed. Misuse is
 * an error as soon as it is certain. */
#include <inttypes.h>

#include "vm.h"

/* Phases that thread k of the barrier's block observed: by any of its warps, while they run. */
static int64_t seen_by(const pm_machine *m, const barrier *b, uint32_t k) {
  const thread *t = &m->threads[(size_t)(b->block - m->blocks) * m->n_threads + k];
  int64_t most = b->seen[k];
  for (uint32_t w = 0; t->state == THREAD_AT_WARPS && w < WARPS; w++) {
    most = pm_max(most, b->seen[pm_vm_warps(m, t)[w].observer]);
  }
  return most;
}

static step complete(pm_machine *m, thread *t, pm_opid op, barrier *b) {
  char name[768], place[600];
  pm_vm_progress(m);
  if (b->arrivals < b->info->arrivals || b->pending) return STEP_NEXT;
  b->arrivals = 0;
  b->phase++;
  if (m->races) pm_race_phase(m, b, b->copied == b->phase);
  if (m->timeline) pm_time_phase(m, b);
  LOG(m, t, op, PM_LOG_BARRIER, "phase %" PRId64 " of barrier %s is complete", b->phase,
      pm_vm_barrier_text(m, t, b, name, sizeof name));
  bool waited = false;
  int64_t least = INT64_MAX;
  for (uint32_t k = 0; k < m->n_threads; k++) {
    const int64_t seen = seen_by(m, b, k);
    if (seen < 0) continue;
    waited = true;
    least = pm_min(least, seen);
  }
  if (!waited && b->phase == 2) {
    pm_race_note(m, op,
                 "barrier %s completes a second phase, but no thread has ever waited on it; its "
                 "first phase was completed%s",
                 pm_vm_barrier_text(m, t, b, name, sizeof name),
                 pm_vm_place(m, b->last_completion, place, sizeof place));
  }
  if (waited && least < b->phase - 2) {
    return pm_vm_fail(m, t, op, PM_E_VALUE,
                      "barrier %s completes phase %" PRId64
                      ", but a thread that waits on it has "
                      "observed only %" PRId64
                      "; the phase before was completed%s. A thread must wait "
                      "for every phase",
                      pm_vm_barrier_text(m, t, b, name, sizeof name), b->phase, least,
                      pm_vm_place(m, b->last_completion, place, sizeof place));
  }
  b->last_completion = op;
  pm_vm_wake(m, b->block, THREAD_AT_BARRIER, b);
  return STEP_NEXT;
}

step pm_vm_count_arrival(pm_machine *m, thread *t, pm_opid op, barrier *b, int32_t pending) {
  char name[768], place[600];
  if (b->arrivals == b->info->arrivals) {
    return pm_vm_fail(
        m, t, op, PM_E_VALUE,
        "barrier %s has all its %u arrivals of this phase, the last one%s, and copies "
        "among them may be in flight: one more arrival cannot be counted. Wait on the "
        "barrier first, or allocate it with more arrivals",
        pm_vm_barrier_text(m, t, b, name, sizeof name), b->info->arrivals,
        pm_vm_place(m, b->last_arrival, place, sizeof place));
  }
  if (m->timeline) pm_time_arrive(m, t, op, b);
  b->arrivals++;
  b->pending += pending;
  b->last_arrival = op;
  if (pending) {
    b->copied = b->phase + 1;
    b->last_copy = op;
  }
  LOG(m, t, op, PM_LOG_BARRIER, "arrival %u of %u of phase %" PRId64 " on barrier %s", b->arrivals,
      b->info->arrivals, b->phase + 1, pm_vm_barrier_text(m, t, b, name, sizeof name));
  return complete(m, t, op, b);
}

step pm_vm_arrive(pm_machine *m, thread *t, pm_opid op, barrier *b, int32_t pending) {
  if (m->races) pm_race_arrive(m, t, b, false);
  return pm_vm_count_arrival(m, t, op, b, pending);
}

step pm_vm_transfer_done(pm_machine *m, thread *t, pm_opid op, barrier *b) {
  b->pending--;
  return complete(m, t, op, b);
}

barrier *pm_vm_barrier(pm_machine *m, thread *t, const instr *i, const access *mem) {
  located s;
  pm_vm_locate(m, t, mem, &s);
  if (!s.inside) {
    pm_vm_outside(m, t, i->op, &s, "barrier");
    return NULL;
  }
  return t->block->bars + mem->base + s.offset;
}
