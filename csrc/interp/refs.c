/* Ops on refs: views, allocations, loads and stores.
 *
 * A view has no code of its own. What an op makes of the indices of its result is asked where a
 * view overhangs its ref (memory.c). */
#include "races.h"

static bool back_from_index(const view_step *v, const int32_t *starts, bool strict,
                            const int64_t *index, int64_t *in) {
  for (uint32_t d = 0; d < v->in_rank; d++) {
    in[d] = v->dynamic[d] ? starts[v->start[d]] : v->start[d];
    if (!v->dropped[d]) in[d] += *index++ * v->stride[d];
  }
  return !strict || pm_vm_within(in, v->in_dim, v->in_rank);
}

static bool back_from_transpose(const view_step *v, const int32_t *starts, bool strict,
                                const int64_t *index, int64_t *in) {
  (void)starts, (void)strict;
  for (uint32_t d = 0; d < v->out_rank; d++) in[v->perm[d]] = index[d];
  return true;
}

static bool back_from_reshape(const view_step *v, const int32_t *starts, bool strict,
                              const int64_t *index, int64_t *in) {
  int64_t linear = 0;
  (void)starts, (void)strict;
  if (!pm_vm_within(index, v->out_dim, v->out_rank)) return false;
  for (uint32_t d = 0; d < v->out_rank; d++) linear = linear * v->out_dim[d] + index[d];
  for (uint32_t d = v->in_rank; d-- > 0; linear /= v->in_dim[d]) in[d] = linear % v->in_dim[d];
  return true;
}

static void log_access(pm_machine *m, thread *t, const instr *i, const char *what) {
  char text[400];
  if (i->mem->space != PM_SMEM) return;
  LOG(m, t, i->op, PM_LOG_SMEM, "%s %s", what, pm_vm_view_text(i->mem, text, sizeof text));
}

static step exec_load(pm_machine *m, thread *t, const instr *i) {
  located s;
  log_access(m, t, i, "loads");
  pm_vm_locate(m, t, i->mem, &s);
  if (m->races && pm_race_plain(m, t, i, &s, READ, THREAD) == STEP_FAIL) return STEP_FAIL;
  if (s.inside) {
    pm_vm_gather(&s, slot_of(t, i->dst));
  } else if (m->options.oob_raise || !s.base) {
    return pm_vm_outside(m, t, i->op, &s, "load");
  } else {
    pm_interp_fill(i->mem->dtype, m->options.zero_fill, slot_of(t, i->dst), i->mem->n);
    pm_vm_gather_inside(&s, true, slot_of(t, i->dst));
  }
  return STEP_PAUSE;
}

static step exec_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  log_access(m, t, i, "stores");
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "store");
  if (m->races && pm_race_plain(m, t, i, &s, WRITE, THREAD) == STEP_FAIL) return STEP_FAIL;
  pm_vm_scatter(&s, slot_of(t, i->a));
  return m->races && pm_race_stored(m) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static step exec_alloc_acc(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (i->a) {
    memcpy(slot_of(t, i->dst), slot_of(t, i->a), i->n);
  } else {
    memset(slot_of(t, i->dst), 0, i->n);
  }
  return STEP_NEXT;
}

const handler pm_vm_LOAD = {pm_vm_encode_plain, exec_load, {.poison = pm_poison_rule_load}};
const handler pm_vm_STORE = {pm_vm_encode_store, exec_store, {.poison = pm_poison_rule_store}};
const handler pm_vm_ALLOC_SMEM = {pm_vm_encode_alloc, NULL, {0}};
const handler pm_vm_ALLOC_BARRIER = {pm_vm_encode_alloc, NULL, {.reaches = pm_vm_reaches_axes}};
const handler pm_vm_ALLOC_ACC = {
    pm_vm_encode_alloc, exec_alloc_acc, {.poison = pm_poison_rule_moves}};
const handler pm_vm_INDEX = {pm_vm_encode_nothing, NULL, {.back = back_from_index}};
const handler pm_vm_TRANSPOSE_REF = {pm_vm_encode_nothing, NULL, {.back = back_from_transpose}};
const handler pm_vm_RESHAPE_REF = {pm_vm_encode_nothing, NULL, {.back = back_from_reshape}};
const handler pm_vm_BITCAST_REF = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_CLUSTER_REF = {pm_vm_encode_nothing, NULL, {.reaches = pm_vm_reaches_always}};
