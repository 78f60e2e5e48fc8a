/* CUDA source on the interpreter: a function provided by the caller of the machine replaces it.
 *
 * The function gets arrays as they are, row-major, and copies of the contents of refs. When it
 * returns, the contents of refs that kernels may write are copied back, and the arrivals that it
 * reports reach their barriers. All of this is one step: no other agent sees a part of it. */
#include "races.h"

void pm_vm_hardware_index(const pm_machine *m, const block *b, uint32_t index[3],
                          uint32_t grid[3]) {
  for (uint32_t k = 0; k < 3; k++) {
    grid[k] = 1;
    index[k] = 0;
  }
  for (uint32_t d = 0; d < m->n_grid; d++) {
    const uint32_t axis = pm_min(m->n_grid - 1 - d, 2);
    index[axis] = index[axis] * (uint32_t)m->grid[d] + (uint32_t)b->cluster->point[d];
    grid[axis] *= (uint32_t)m->grid[d];
  }
  for (uint32_t d = 0; d < m->n_cluster; d++) {
    const uint32_t axis = m->n_cluster - 1 - d;
    index[axis] = index[axis] * (uint32_t)m->cluster[d] + (uint32_t)b->coord[d];
    grid[axis] *= (uint32_t)m->cluster[d];
  }
}

static void place_of(const pm_machine *m, const thread *t, pm_inline_call *call) {
  pm_vm_hardware_index(m, t->block, call->block, call->grid);
  call->thread = t->index;
  call->warp = t->of ? t->warp : 4;
}

static step load(pm_machine *m, thread *t, const instr *i, const struct inlined_value *x,
                 located *s, struct pm_inline_value *v) {
  *v = (struct pm_inline_value){.bytes = x->bytes, .written = x->written};
  if (!x->mem) {
    v->at = slot_of(t, x->slot);
    return STEP_NEXT;
  }
  if (x->mem->kind == PM_BARRIER) return pm_vm_barrier(m, t, i, x->mem) ? STEP_NEXT : STEP_FAIL;
  pm_vm_locate(m, t, x->mem, s);
  if (!s->inside) return pm_vm_outside(m, t, i->op, s, "inline_cuda");
  if (!(v->at = pm_malloc((size_t)x->bytes + 1)))
    return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for an argument of inline_cuda");
  pm_vm_gather(s, v->at);
  const bool smem = x->mem->space == PM_SMEM;
  v->first = s->at;
  v->low = smem ? t->block->smem : s->base;
  v->extent = smem ? (int64_t)m->smem_bytes : x->mem->bytes;
  for (uint32_t k = 0; !smem && k < x->mem->base_rank; k++) v->extent *= x->mem->base_dim[k];
  return STEP_NEXT;
}

/* To the race detector, a ref in which elements have changed was written there, another was read.
 * `data`: what it is to hold. */
static step race(pm_machine *m, thread *t, const instr *i, const located *s, const char *data) {
  const access *mem = s->mem;
  int64_t index[PM_MAX_RANK] = {0};
  tracker x;
  bool any = false;
  if (!pm_race_begin_elements(&x, m, t, i, s, WRITE)) return STEP_NEXT;
  for (int64_t k = 0; k < mem->n; k++) {
    const char *at = pm_vm_element(s, false, index);
    if (memcmp(at, data + k * mem->bytes, mem->bytes)) {
      pm_race_element(&x, at, mem->bytes);
      any = true;
    }
    for (uint32_t d = mem->rank; d-- > 0;) {
      if (++index[d] < mem->dim[d]) break;
      index[d] = 0;
    }
  }
  return any ? pm_race_end_elements(&x) : pm_race_plain(m, t, i, s, READ, THREAD);
}

static step store(pm_machine *m, thread *t, const instr *i, const located *s,
                  struct pm_inline_value *v) {
  const bool in_place = v->arrivals < 0;
  if (m->poison && v->written) pm_poison_defined(m, t, s);
  if (!m->races) {
    if (v->written && !in_place) pm_vm_scatter(s, v->at);
    return STEP_NEXT;
  }
  char *data = v->at, *made = in_place ? pm_malloc((size_t)v->bytes + 1) : NULL;
  if (in_place && !made) {
    return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for an argument of inline_cuda");
  }
  if (in_place) { /* take it back for a moment */
    pm_vm_gather(s, made);
    pm_vm_scatter(s, data);
    data = made;
  }
  step result = race(m, t, i, s, data);
  if (v->written) pm_vm_scatter(s, data);
  if (result != STEP_FAIL) result = pm_race_stored(m);
  pm_free(made);
  return result;
}

static step give_back(pm_machine *m, thread *t, const instr *i, const struct inlined_value *x,
                      const located *s, struct pm_inline_value *v) {
  if (!x->mem) return STEP_NEXT;
  if (x->mem->kind != PM_BARRIER) return store(m, t, i, s, v);
  barrier *b = pm_vm_barrier(m, t, i, x->mem);
  for (int32_t k = 0; b && k < v->arrivals; k++) {
    if (pm_vm_arrive(m, t, i->op, b, 0) == STEP_FAIL) return STEP_FAIL;
  }
  return b ? STEP_NEXT : STEP_FAIL;
}

static step exec_inline(pm_machine *m, thread *t, const instr *i) {
  const inlined *x = i->inlined;
  const uint32_t n = x->n_in + x->n_out;
  pm_inline_call call = {.function = x->function, .n_in = x->n_in, .n_out = x->n_out};
  located *s = pm_malloc((n + 1) * sizeof *s);
  call.value = pm_malloc((n + 1) * sizeof *call.value);
  step result = s && call.value ? STEP_NEXT : STEP_FAIL;
  if (result == STEP_FAIL) pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for inline_cuda");
  uint32_t loaded = 0;
  place_of(m, t, &call);
  for (; result != STEP_FAIL && loaded < n; loaded++) {
    result = load(m, t, i, &x->value[loaded], &s[loaded], &call.value[loaded]);
  }
  if (result != STEP_FAIL && !m->options.inlined) {
    result = pm_vm_fail(m, t, i->op, PM_E_NOT_IMPLEMENTED,
                        "inline_cuda: nothing here can call the function that stands for it");
  } else if (result != STEP_FAIL && m->options.inlined(m->options.inlined_ctx, &call)) {
    result = pm_vm_fail(m, t, i->op, PM_E_RUNTIME, "inline_cuda: its function failed");
  }
  for (uint32_t k = 0; result != STEP_FAIL && k < n; k++) {
    result = give_back(m, t, i, &x->value[k], &s[k], &call.value[k]);
  }
  for (uint32_t k = 0; k < loaded; k++) {
    if (x->value[k].mem) pm_free(call.value[k].at);
  }
  pm_free(call.value);
  pm_free(s);
  return result == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

const handler pm_vm_INLINE = {pm_vm_encode_inline, exec_inline, {.poison = pm_poison_rule_inline}};
