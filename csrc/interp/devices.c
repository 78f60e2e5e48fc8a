/* The devices of a mesh: whose memory an access means, and accesses of all of them at once.
 *
 * All devices run the same program on arguments of their own: those of device d are the buffers
 * from d * n_args on. Each has its own launch: its points of the grid, its counters, its semaphores
 * of the launch. The clusters of all devices are one list, and one scheduler runs them, so that
 * any order in which devices might meet can come.
 *
 * What goes through the switch to all devices is one step: device after device, in their order. A
 * sum is taken in that order and in the dtype of the elements, where the switch may be more exact.
 */

#include "races.h"

/* ---- through the switch ------------------------------------------------------------------- */

static step exec_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "multimem_store");
  for (uint32_t d = 0; d < m->n_devices; d++) {
    const located there = pm_vm_on_device(m, &s, d);
    if (m->races && pm_race_plain(m, t, i, &there, WRITE, THREAD) == STEP_FAIL) return STEP_FAIL;
    pm_vm_scatter(&there, slot_of(t, i->a));
    if (m->races && pm_race_stored(m) == STEP_FAIL) return STEP_FAIL;
  }
  return STEP_PAUSE;
}

static step exec_reduce(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = (size_t)i->mem->n * i->mem->bytes;
  char *out = slot_of(t, i->dst), *part = pm_malloc(bytes + 1);
  step result = STEP_PAUSE;
  located s;
  if (!part) return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for a multimem_load_reduce");
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) result = pm_vm_outside(m, t, i->op, &s, "multimem_load_reduce");
  for (uint32_t d = 0; d < m->n_devices && result != STEP_FAIL; d++) {
    const located there = pm_vm_on_device(m, &s, d);
    if (m->races) result = pm_race_plain(m, t, i, &there, READ, THREAD);
    pm_vm_gather(&there, d ? part : out);
    for (size_t k = 0; d && k < bytes; k += i->mem->bytes) {
      pm_vm_combine(i->mem->dtype, i->flags, out + k, part + k, NULL);
    }
  }
  pm_free(part);
  return result == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

const handler pm_vm_DEVICE_REF = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_MULTICAST_REF = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_SEMAPHORE_OF = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_MULTIMEM_STORE = {
    pm_vm_encode_store, exec_store, {.poison = pm_poison_rule_everywhere}};
const handler pm_vm_MULTIMEM_REDUCE = {
    pm_vm_encode_reduce_devices, exec_reduce, {.poison = pm_poison_rule_everywhere}};
