/* Semaphores: counters of the launch or of a block. A thread that waits for a semaphore that is too
 * low is blocked until another one signals it. */
#include <inttypes.h>
#include <stdio.h>

#include "vm.h"

/* NULL: failed */
static uint32_t *semaphore_at(pm_machine *m, thread *t, const instr *i, const char *what) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) {
    pm_vm_outside(m, t, i->op, &s, what);
    return NULL;
  }
  if (i->mem->kind == PM_REF) return (uint32_t *)s.at;
  if (i->mem->space != PM_GMEM) return t->block->semaphores + i->mem->base + s.offset;
  const int64_t device = pm_vm_device_of(m, t, i->mem);
  return m->semaphores + device * m->n_semaphores + i->mem->base + s.offset;
}

static void signal(pm_machine *m, thread *t, const instr *i, uint32_t *s) {
  *s += (uint32_t)slot_i32(t, i->a);
  LOG(m, t, i->op, PM_LOG_SEMAPHORE, "adds %" PRId32 " to semaphore '%s', now %" PRIu32,
      slot_i32(t, i->a), i->mem->name, *s);
  if (m->races) pm_race_signal(m, t, s, slot_i32(t, i->a));
  if (m->timeline) pm_time_signal(m, t, i->op, s);
  pm_vm_progress(m);
  pm_vm_wake_at(m, s);
}

static step exec_signal(pm_machine *m, thread *t, const instr *i) {
  uint32_t *s = semaphore_at(m, t, i, "semaphore_signal");
  located here;
  if (!s) return STEP_FAIL;
  if (!i->mem->all_devices) return signal(m, t, i, s), STEP_PAUSE;
  pm_vm_locate(m, t, i->mem, &here);
  for (uint32_t d = 0; d < m->n_devices; d++) {
    if (i->mem->kind == PM_REF) s = (uint32_t *)pm_vm_on_device(m, &here, d).at;
    else s = m->semaphores + d * m->n_semaphores + i->mem->base + here.offset;
    signal(m, t, i, s);
  }
  return STEP_PAUSE;
}

static step exec_await(pm_machine *m, thread *t, const instr *i) {
  uint32_t *s = semaphore_at(m, t, i, "semaphore_wait");
  const uint32_t least = (uint32_t)slot_i32(t, i->a);
  if (!s) return STEP_FAIL;
  const bool early = (int32_t)(*s - least) < 0; /* counts may wrap */
  LOG(m, t, i->op, PM_LOG_SEMAPHORE, "%s semaphore '%s' for %" PRIu32 " or more, it is %" PRIu32,
      early ? "waits on" : "passes", i->mem->name, least, *s);
  if (early) {
    t->waits_at = s;
    t->pc--;
    return pm_vm_block_on(m, t, THREAD_AT_SEMAPHORE);
  }
  if (m->races) pm_race_await(m, t, s, least, i->flags);
  if (m->timeline) pm_time_await(m, t, i, s);
  if (i->flags) *s -= least;
  return STEP_PAUSE;
}

static step exec_read(pm_machine *m, thread *t, const instr *i) {
  const uint32_t *s = semaphore_at(m, t, i, "semaphore_read");
  if (!s) return STEP_FAIL;
  *(int32_t *)slot_of(t, i->dst) = (int32_t)*s;
  if (m->races) pm_race_read_semaphore(m, t, s);
  if (m->timeline) pm_time_await(m, t, i, s);
  return pm_vm_poll(m, t);
}

static step exec_delay(pm_machine *m, thread *t, const instr *i) {
  (void)m, (void)t, (void)i;
  return STEP_PAUSE;
}

size_t pm_vm_semaphore_text(pm_machine *m, thread *t, const instr *i, char *buf, size_t n) {
  const uint32_t least = (uint32_t)slot_i32(t, i->a);
  (void)m;
  const int len = snprintf(buf, n, " on '%s' for %" PRIu32 " or more; it is %" PRIu32, i->mem->name,
                           least, *t->waits_at);
  return len < 0 ? 0 : pm_min((size_t)len, n);
}

step pm_vm_check_semaphores(pm_machine *m, thread *t, pm_opid op, const scope *s) {
  for (uint32_t k = 0; k < s->n_sems; k++) {
    uint32_t n = s->sems[k].count, j = pm_vm_first_of(m, s, t, &n);
    for (const uint32_t end = j + n; j < end; j++) {
      const uint32_t left = t->block->semaphores[s->sems[k].first + j];
      if (!left) continue;
      return pm_vm_fail(m, t, op, PM_E_VALUE,
                        "the scope of semaphore '%s' ends while number %" PRIu32
                        " of it is %" PRIu32
                        "; wait for all signals with decrement=True, so that it is 0 again",
                        s->sems[k].name, j, left);
    }
  }
  return STEP_NEXT;
}

const handler pm_vm_ALLOC_SEMAPHORE = {pm_vm_encode_alloc, NULL, {0}};
const handler pm_vm_GLOBAL_SEMAPHORE = {pm_vm_encode_alloc, NULL, {0}};
const handler pm_vm_SIGNAL = {pm_vm_encode_plain, exec_signal, {.poison = pm_poison_rule_counts}};
const handler pm_vm_AWAIT = {pm_vm_encode_plain, exec_await, {.poison = pm_poison_rule_counts}};
const handler pm_vm_READ_SEMAPHORE = {
    pm_vm_encode_plain, exec_read, {.poison = pm_poison_rule_addresses}};
const handler pm_vm_DELAY = {pm_vm_encode_plain, exec_delay, {0}};
