/* Ops that move elements of arrays to other positions, and scans.
 *
 * Arrays are row-major here, so each op is a walk over its operands: strided, by rows, or by the
 * numbers in an index array. A scan proceeds along its dimension row by row, with the loop of its
 * op; f16 and bf16 are scanned in f32 and rounded once. */
#include "vm.h"

step pm_vm_strided(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  pm_vm_gather(&s, slot_of(t, i->dst));
  return STEP_NEXT;
}

static step exec_concat(pm_machine *m, thread *t, const instr *i) {
  const rows *r = i->rows;
  const char *from = slot_of(t, i->a);
  char *to = (char *)slot_of(t, i->dst) + r->at;
  (void)m;
  for (int64_t k = 0; k < r->n; k++) {
    memcpy(to + k * r->step, from + k * r->bytes, (size_t)r->bytes);
  }
  return STEP_NEXT;
}

static step exec_gather(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = pm_dtypes[i->dtype].bytes;
  const char *from = slot_of(t, i->a);
  const int32_t *index = slot_of(t, i->b);
  char *to = slot_of(t, i->dst);
  (void)m;
  for (uint32_t k = 0; k < i->n; k++) {
    const int64_t at = pm_max(0, pm_min((int64_t)index[k], (int64_t)i->to - 1));
    memcpy(to + k * bytes, from + (size_t)at * bytes, bytes);
  }
  return STEP_NEXT;
}

static step exec_scatter(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = pm_dtypes[i->dtype].bytes;
  const int32_t *index = slot_of(t, i->b);
  const char *from = slot_of(t, i->c);
  char *to = slot_of(t, i->dst);
  (void)m;
  memcpy(to, slot_of(t, i->a), i->to * bytes);
  for (uint32_t k = 0; k < i->n; k++) {
    if (index[k] < 0 || (uint32_t)index[k] >= i->to) continue;
    memcpy(to + (size_t)index[k] * bytes, from + k * bytes, bytes);
  }
  return STEP_NEXT;
}

static step exec_scan(pm_machine *m, thread *t, const instr *i) {
  const reduction *r = i->reduction;
  const size_t row = (size_t)r->group[0].inner * pm_dtypes[i->out].bytes;
  char *work = slot_of(t, i->b), *at = work;
  (void)m;
  if (i->out == i->dtype) memcpy(work, slot_of(t, i->a), i->n * pm_dtypes[i->dtype].bytes);
  else pm_vm_widen(i->dtype, slot_of(t, i->a), (float *)work, i->n);
  for (int64_t o = 0; o < r->group[0].outer; o++, at += row) {
    for (int64_t k = 1; k < r->group[0].size; k++, at += row) {
      r->kernel(at + row, at, at + row, NULL, (size_t)r->group[0].inner);
    }
  }
  if (i->out == i->dtype) memcpy(slot_of(t, i->dst), work, i->n * pm_dtypes[i->dtype].bytes);
  else pm_vm_narrow(i->dtype, (float *)work, slot_of(t, i->dst), i->n);
  return STEP_NEXT;
}

const handler pm_vm_BROADCAST = {pm_vm_encode_strided, pm_vm_strided, {0}};
const handler pm_vm_SLICE = {pm_vm_encode_strided, pm_vm_strided, {0}};
const handler pm_vm_TRANSPOSE = {pm_vm_encode_strided, pm_vm_strided, {0}};
const handler pm_vm_CONCAT = {pm_vm_encode_concat, exec_concat, {.poison = pm_poison_rule_moves}};
const handler pm_vm_GATHER = {pm_vm_encode_indexed, exec_gather, {.poison = pm_poison_rule_gather}};
const handler pm_vm_SCATTER = {
    pm_vm_encode_indexed, exec_scatter, {.poison = pm_poison_rule_scatter}};
const handler pm_vm_SCAN = {pm_vm_encode_scan, exec_scan, {.poison = pm_poison_rule_scan}};
