/* Asynchronous engines: copies between GMEM and SMEM, bulk groups, wgmma and its groups.
 *
 * Issuing an operation creates a task that holds only its addresses; data moves when the task runs.
 * A task runs when the scheduler selects it or when a wait of its owner needs it, and a wait forces
 * no more tasks than necessary. So data is read as late, and written as early or as late, as
 * hardware might do it.
 *
 * Each block of a group issues a collective copy, reads its part and writes it to all blocks of the
 * group: there is a task for each of them, and each barrier waits for as many parts as there are
 * blocks. (Parts are ranges of elements in row-major order, while on the device they are boxes; a
 * correct kernel cannot tell the difference.) The blocks of a group must issue the same copies: the
 * n-th execution of the op by a thread of one block is compared with the n-th execution by the same
 * thread of the others. */
#include <stdio.h>

#include "races.h"

/* ---- tasks -------------------------------------------------------------------------------- */

static step no_memory(pm_machine *m, task *k) {
  return pm_vm_fail(m, k->owner, k->i->op, PM_E_MEMORY, "no memory for an asynchronous operation");
}

/* The data of a task, followed, if poison is tracked, by that of the data and of what they are
 * combined with: PARTS of so many bytes. */
enum { PARTS = 3, FLAGS = 2 };

static void drop_products(pm_machine *m, thread *t) {
  bool pending = false;
  for (task *k = t->mma_first, *next; k; k = next) {
    next = k->next;
    pending |= k == t->mma_next;
    if (pending) pm_vm_finish_task(m, k);
    pm_vm_free_task(m, k);
  }
  t->mma_first = t->mma_last = t->mma_next = NULL;
  t->n_mma = 0;
}

void pm_vm_drop_tasks(pm_machine *m) {
  for (thread *t = m->threads; t < m->threads + pm_vm_agents(m); t++) {
    drop_products(m, t);
    pm_vm_drop_tensor(m, t);
    t->stores = NULL;
  }
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    while (m->tasks[kind].n) pm_vm_end_task(m, m->tasks[kind].at[0]);
  }
}

/* ---- collective copies -------------------------------------------------------------------- */

static uint32_t bit_of(const block *b) { return 1u << (b - b->cluster->blocks); }

static uint32_t group_of(const pm_machine *m, const block *b, uint32_t axes) {
  uint32_t set = 0;
  for (const block *u = b->cluster->blocks; u < b->cluster->blocks + m->n_blocks; u++) {
    if (pm_vm_same_but(m, b, u, axes)) set |= bit_of(u);
  }
  return set;
}

static const char *blocks_text(const pm_machine *m, const cluster *c, uint32_t set, char *buf,
                               size_t n) {
  char one[64];
  size_t at = 0;
  buf[0] = 0;
  for (const block *b = c->blocks; b < c->blocks + m->n_blocks && at < n; b++) {
    if (!(set & bit_of(b))) continue;
    at += (size_t)snprintf(buf + at, n - at, "%sblock %s", at ? ", " : "",
                           pm_vm_block(m, b, one, sizeof one));
  }
  return buf;
}

static bool same_place(const located *a, const located *b) {
  if (a->inside != b->inside) return false;
  if (a->inside) return a->offset == b->offset;
  return !memcmp(a->starts, b->starts, a->mem->n_starts * sizeof *a->starts);
}

/* How a copy differs from that of other blocks; NULL: not at all. */
static const char *difference(const shared_copy *a, const shared_copy *b) {
  if (a->off != b->off) return "the predicate";
  if (!same_place(&a->gmem, &b->gmem)) return "the part of the source";
  if (a->smem.offset != b->smem.offset) return "the place in the destination";
  return a->barrier != b->barrier ? "the barrier" : NULL;
}

/* Compare with what the blocks of the group issued before. */
static step match_copy(pm_machine *m, thread *t, const shared_copy *x) {
  char others[1024];
  for (uint32_t k = 0; k < m->open_copies.n; k++) {
    shared_copy *c = &m->open_copies.at[k];
    if (c->i != x->i || c->thread != x->thread || c->ordinal != x->ordinal ||
        c->group != x->group || c->cluster != x->cluster) {
      continue;
    }
    const char *what = difference(c, x);
    if (what) {
      return pm_vm_fail(m, t, x->i->op, PM_E_VALUE,
                        "copy_gmem_to_smem with collective_axes: %s differs between this block and "
                        "%s. All blocks that differ only along the collective axes must issue the "
                        "same copies in the same order",
                        what, blocks_text(m, c->cluster, c->seen, others, sizeof others));
    }
    c->seen |= x->seen;
    if (c->seen == c->group) *c = m->open_copies.at[--m->open_copies.n];
    return STEP_NEXT;
  }
  if (m->open_copies.n == m->open_copies.cap) {
    uint32_t cap = m->open_copies.cap ? 2 * m->open_copies.cap : 16;
    shared_copy *at = pm_realloc(m->open_copies.at, cap * sizeof *at);
    if (!at) return pm_vm_fail(m, t, x->i->op, PM_E_MEMORY, "no memory for a collective copy");
    m->open_copies.at = at;
    m->open_copies.cap = cap;
  }
  m->open_copies.at[m->open_copies.n++] = *x;
  return STEP_NEXT;
}

size_t pm_vm_missing_parts(const pm_machine *m, const barrier *b, char *buf, size_t n) {
  char place[600], others[1024];
  size_t at = 0;
  buf[0] = 0;
  for (uint32_t k = 0; k < m->open_copies.n && at < n; k++) {
    const shared_copy *c = &m->open_copies.at[k];
    if (c->cluster != b->block->cluster || !(c->seen & bit_of(b->block))) continue;
    if (b->block->bars + c->barrier != b) continue;
    at += (size_t)snprintf(buf + at, n - at,
                           "; the collective copy%s lacks the part of %s, which has not issued it",
                           pm_vm_place(m, c->i->op, place, sizeof place),
                           blocks_text(m, c->cluster, c->group & ~c->seen, others, sizeof others));
  }
  return pm_min(at, n);
}

/* On a device that does not exist. */
static bool is_nowhere(const located *s) { return !s->base && s->mem->device_slot; }

static step locate_copy_in(pm_machine *m, thread *t, const instr *i, located *gmem, located *smem) {
  pm_vm_locate(m, t, i->mem, gmem);
  pm_vm_locate(m, t, i->mem2, smem);
  if (!smem->inside) return pm_vm_outside(m, t, i->op, smem, "copy_gmem_to_smem");
  if (is_nowhere(gmem)) return pm_vm_outside(m, t, i->op, gmem, "copy_gmem_to_smem");
  char text[400];
  LOG(m, t, i->op, PM_LOG_SMEM, "begins a copy to %s", pm_vm_view_text(i->mem2, text, sizeof text));
  if (!gmem->inside && i->flags == PM_OOB_PROMISE_IN_BOUNDS) {
    return pm_vm_outside(m, t, i->op, gmem, "copy_gmem_to_smem, promised in bounds,");
  }
  if (!gmem->inside && i->flags == PROMISED_AND_CLIPPED) {
    pm_race_note(m, i->op, "the copy was promised in bounds and is not. Here TMA reads zeros");
  }
  return STEP_NEXT;
}

/* A product that was not waited for may read its operands, whether it has run here or not. */
static step check_products(pm_machine *m, const task *k) {
  char place[600], agent[512];
  if (pm_vm_check_operands(m, k) == STEP_FAIL) return STEP_FAIL;
  const block *to = k->barrier->block;
  const thread *first = m->threads + (size_t)(to - m->blocks) * m->n_threads;
  for (const thread *t = first; t < first + m->n_threads; t++) {
    for (const task *p = t->mma_first; p; p = p->next) {
      const bool left = p->lhs.mem && pm_vm_overlap(&p->lhs, &k->smem);
      if (!left && !pm_vm_overlap(&p->rhs, &k->smem)) continue;
      return pm_vm_fail(m, k->owner, k->i->op, PM_E_VALUE,
                        "copy_gmem_to_smem overwrites '%s' while the wgmma%s of %s may still read "
                        "it. Wait for the product before its operands are released: wgmma_wait",
                        k->smem.mem->name, pm_vm_place(m, p->i->op, place, sizeof place),
                        pm_vm_agent(m, t, agent, sizeof agent));
    }
  }
  return STEP_NEXT;
}

/* The barrier that a copy of the block completes on. */
static barrier *tracked_by(const instr *i, barrier *b) {
  return i->leader ? b->block->cluster->blocks->bars + (b - b->block->bars) : b;
}

/* `n` transfers of this block's; the leader of a pair waits for those of both. */
static step arrive_for(pm_machine *m, thread *t, const instr *i, barrier *b, int32_t n) {
  barrier *by = tracked_by(i, b);
  if (by != b) return STEP_NEXT;
  return pm_vm_arrive(m, t, i->op, by, i->leader ? 2 * n : n);
}

/* This block's part of a collective copy, to every block of the group. */
static step issue_parts(pm_machine *m, thread *t, const instr *i, barrier *b, bool off) {
  block *own = t->block;
  shared_copy x = {.i = i, .thread = t->index, .seen = bit_of(own), .off = off};
  x.cluster = own->cluster;
  x.ordinal = own->n_parts[i->to * m->n_threads + t->index]++;
  x.group = group_of(m, own, i->n);
  x.barrier = (uint32_t)(b - own->bars);
  if (locate_copy_in(m, t, i, &x.gmem, &x.smem) == STEP_FAIL) return STEP_FAIL;
  uint32_t parts = (uint32_t)__builtin_popcount(x.group);
  uint32_t part = (uint32_t)__builtin_popcount(x.group & (x.seen - 1));
  if (parts > 1 && match_copy(m, t, &x) == STEP_FAIL) return STEP_FAIL;
  if (arrive_for(m, t, i, b, off ? 0 : (int32_t)parts) == STEP_FAIL) return STEP_FAIL;
  block *first = own->cluster->blocks;
  for (block *u = first; u < first + m->n_blocks && !off; u++) {
    if (!(x.group & bit_of(u))) continue;
    task *k = pm_vm_new_task(m, t, i, TASK_LOAD);
    if (!k) return STEP_FAIL;
    k->barrier = tracked_by(i, u->bars + x.barrier);
    k->gmem = x.gmem;
    k->smem = x.smem;
    k->smem.base = u->smem + (x.smem.base - own->smem);
    k->smem.at = u->smem + (x.smem.at - own->smem);
    if (check_products(m, k) == STEP_FAIL) return STEP_FAIL;
    if (m->races) pm_race_issue(m, t, k);
    k->from = i->mem2->n * part / parts;
    k->to = i->mem2->n * (part + 1) / parts;
    if (m->timeline) pm_time_issue(m, t, k);
  }
  return STEP_PAUSE;
}

/* ---- GMEM to SMEM ------------------------------------------------------------------------- */

static bool predicated_off(thread *t, const instr *i) {
  return i->a && !*(uint8_t *)slot_of(t, i->a);
}

static step run_copy_in(pm_machine *m, task *k);

/* Looking for races, a copy that lanes do is made when it is issued, as it is on the device. */
static bool is_made_now(const pm_machine *m, const instr *i) { return m->races && i->lowered; }

static step exec_copy_in(pm_machine *m, thread *t, const instr *i) {
  barrier *b = pm_vm_barrier(m, t, i, i->mem3);
  if (!b) return STEP_FAIL;
  const bool off = predicated_off(t, i);
  if (i->n) return issue_parts(m, t, i, b, off);
  task *k = off ? NULL : pm_vm_new_task(m, t, i, TASK_LOAD);
  if (k) {
    k->barrier = tracked_by(i, b);
    k->from = 0;
    k->to = i->mem2->n;
    if (locate_copy_in(m, t, i, &k->gmem, &k->smem) == STEP_FAIL) return STEP_FAIL;
    if (check_products(m, k) == STEP_FAIL) return STEP_FAIL;
    if (m->races) pm_race_issue(m, t, k);
    if (m->timeline) pm_time_issue(m, t, k);
    if (is_made_now(m, i)) pm_race_fence(m, t, true);
  }
  if ((!off && !k) || arrive_for(m, t, i, b, !off) == STEP_FAIL) return STEP_FAIL;
  if (k && is_made_now(m, i) && run_copy_in(m, k) == STEP_FAIL) return STEP_FAIL;
  return STEP_PAUSE;
}

/* To SMEM of another block, whose barrier waits for it. The data are those of now. */
static step exec_async_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "async_store_smem");
  const barrier *own = pm_vm_barrier(m, t, i, i->mem2);
  if (!own) return STEP_FAIL;
  block *to = t->block->cluster->blocks;
  while (to->smem + i->mem->base != s.base) to++;
  barrier *b = to->bars + (own - t->block->bars);
  if (pm_vm_arrive(m, t, i->op, b, 1) == STEP_FAIL) return STEP_FAIL;
  task *k = pm_vm_new_task(m, t, i, TASK_LOAD);
  const size_t bytes = (size_t)i->n * i->mem->bytes;
  if (!k || !pm_vm_want_buffer(k, PARTS * bytes)) return k ? no_memory(m, k) : STEP_FAIL;
  memcpy(k->buffer, slot_of(t, i->a), bytes);
  if (m->poison) pm_poison_take(t, i->a, k->buffer + FLAGS * bytes, bytes);
  if (m->races) pm_race_issue(m, t, k);
  k->barrier = b;
  k->smem = s;
  k->gmem.mem = NULL;
  if (m->timeline) pm_time_issue(m, t, k);
  return STEP_PAUSE;
}

static step run_async_store(pm_machine *m, task *k) {
  const access *mem = k->smem.mem;
  const size_t bytes = (size_t)mem->n * mem->bytes;
  char *data = k->buffer;
  if (m->races && pm_race_engine(m, k, &k->smem, k->i->to ? ATOMIC : WRITE) == STEP_FAIL) {
    return STEP_FAIL;
  }
  if (m->poison &&
      pm_poison_write(m, k, &k->smem, k->buffer + FLAGS * bytes, k->i->to) == STEP_FAIL) {
    return STEP_FAIL;
  }
  if (k->i->to) {
    pm_dtype as;
    const int kind = pm_combine_atomic(k->i->to, mem->dtype, &as);
    data += bytes;
    pm_vm_gather(&k->smem, data);
    for (size_t at = 0; at < bytes; at += mem->bytes) {
      pm_vm_combine(mem->dtype, kind, data + at, k->buffer + at, NULL);
    }
  }
  pm_vm_scatter(&k->smem, data);
  thread *t = k->owner;
  const pm_opid op = k->i->op;
  barrier *b = k->barrier;
  if (m->timeline) pm_time_landed(m, k);
  pm_vm_end_task(m, k);
  return pm_vm_transfer_done(m, t, op, b);
}

/* What a copy reads, to its buffer. */
static void fetch_source(pm_machine *m, task *k) {
  const access *to = k->smem.mem;
  const bool zeros = k->i->flags != PM_OOB_UNDEFINED || m->options.zero_fill;
  if (k->gmem.inside) {
    pm_vm_gather_part(&k->gmem, k->from, k->to, k->buffer);
    return;
  }
  pm_interp_fill(to->dtype, zeros, k->buffer, to->n);
  pm_vm_gather_inside(&k->gmem, false, k->buffer);
}

static step run_copy_in(pm_machine *m, task *k) {
  const access *to = k->smem.mem;
  if (!k->gmem.mem) return run_async_store(m, k);
  if (m->races && (pm_race_engine(m, k, &k->gmem, READ) == STEP_FAIL ||
                   pm_race_engine(m, k, &k->smem, WRITE) == STEP_FAIL)) {
    return STEP_FAIL;
  }
  if (m->poison && pm_poison_copy_in(m, k) == STEP_FAIL) return STEP_FAIL;
  bool whole = k->to - k->from == to->n;
  if (k->gmem.inside && to->contiguous && whole) {
    pm_vm_gather(&k->gmem, k->smem.at);
  } else {
    if (!pm_vm_want_buffer(k, (size_t)to->n * to->bytes)) return no_memory(m, k);
    fetch_source(m, k);
    pm_vm_scatter_part(&k->smem, k->from, k->to, k->buffer);
  }
  thread *t = k->owner;
  pm_opid op = k->i->op;
  barrier *b = k->barrier;
  if (m->timeline) pm_time_landed(m, k);
  pm_vm_end_task(m, k);
  return pm_vm_transfer_done(m, t, op, b);
}

/* ---- SMEM to GMEM ------------------------------------------------------------------------- */

static step run_copy_out(pm_machine *m, task *k);
static step run_fetch(pm_machine *m, task *k);

static step exec_copy_out(pm_machine *m, thread *t, const instr *i) {
  if (!predicated_off(t, i)) {
    task *k = pm_vm_new_store(m, t, i);
    if (!k) return STEP_FAIL;
    pm_vm_locate(m, t, i->mem, &k->smem);
    pm_vm_locate(m, t, i->mem2, &k->gmem);
    if (!k->smem.inside) return pm_vm_outside(m, t, i->op, &k->smem, "copy_smem_to_gmem");
    if (is_nowhere(&k->gmem)) return pm_vm_outside(m, t, i->op, &k->gmem, "copy_smem_to_gmem");
    if (m->races) pm_race_issue(m, t, k);
    if (m->timeline) pm_time_issue(m, t, k);
    if (is_made_now(m, i)) {
      if (run_copy_out(m, k) == STEP_FAIL || run_copy_out(m, k) == STEP_FAIL) return STEP_FAIL;
    }
  }
  if (i->flags) pm_vm_close_group(m, t);
  return STEP_PAUSE;
}

/* What was there, combined with what the copy brings. `old` holds the latter where it is outside.
 */
static char *combined(const task *k, size_t bytes) {
  char *old = k->buffer + bytes;
  const access *mem = k->gmem.mem;
  pm_dtype as;
  const int kind = pm_combine_atomic(k->i->to, mem->dtype, &as);
  memcpy(old, k->buffer, bytes);
  if (k->gmem.inside) {
    pm_vm_gather(&k->gmem, old);
  } else {
    pm_vm_gather_inside(&k->gmem, false, old);
  }
  for (size_t at = 0; at < bytes; at += mem->bytes) {
    uint32_t x, y;
    if (kind >= 0) {
      pm_vm_combine(as, kind, old + at, k->buffer + at, NULL);
      continue;
    }
    memcpy(&x, old + at, 4);
    memcpy(&y, k->buffer + at, 4);
    x = k->i->to == PM_COMBINE_INC ? (x >= y ? 0 : x + 1) : (!x || x > y ? y : x - 1);
    memcpy(old + at, &x, 4);
  }
  return old;
}

static step write_out(pm_machine *m, task *k, size_t bytes) {
  if (m->races && pm_race_engine(m, k, &k->gmem, k->i->to ? ATOMIC : WRITE) == STEP_FAIL) {
    return STEP_FAIL;
  }
  if (m->poison &&
      pm_poison_write(m, k, &k->gmem, k->buffer + FLAGS * bytes, k->i->to) == STEP_FAIL) {
    return STEP_FAIL;
  }
  const char *data = k->i->to ? combined(k, bytes) : k->buffer;
  if (k->gmem.inside) {
    pm_vm_scatter(&k->gmem, data);
  } else {
    pm_vm_scatter_inside(&k->gmem, data);
  }
  return m->races ? pm_race_stored(m) : STEP_NEXT;
}

/* Its source is read, then its destination written. */
static step run_copy_out(pm_machine *m, task *k) {
  if (k->kind == TASK_FETCH) return run_fetch(m, k);
  if (k->run) return k->run(m, k);
  const access *from = k->smem.mem;
  const size_t bytes = (size_t)from->n * from->bytes;
  if (!k->read) {
    if (m->races && pm_race_engine(m, k, &k->smem, READ) == STEP_FAIL) return STEP_FAIL;
    if (!pm_vm_want_buffer(k, PARTS * bytes)) return no_memory(m, k);
    pm_vm_gather(&k->smem, k->buffer);
    if (m->poison) pm_poison_read(m, k, k->buffer + FLAGS * bytes);
    k->read = true;
    return STEP_NEXT;
  }
  const bool all = k->gmem.mem->all_devices;
  for (uint32_t d = 0; d < (all ? m->n_devices : 1); d++) {
    if (all) k->gmem = pm_vm_on_device(m, &k->gmem, d);
    if (write_out(m, k, bytes) == STEP_FAIL) return STEP_FAIL;
  }
  pm_vm_end_store(m, k);
  return STEP_NEXT;
}

/* ---- GMEM to SMEM by cp.async ------------------------------------------------------------- */

/* Each copy is a group, also one whose predicate is false. */
static step exec_fetch(pm_machine *m, thread *t, const instr *i) {
  if (!predicated_off(t, i)) {
    task *k = pm_vm_new_in_group(m, t, i, TASK_FETCH);
    if (!k) return STEP_FAIL;
    k->from = 0;
    k->to = i->mem2->n;
    if (locate_copy_in(m, t, i, &k->gmem, &k->smem) == STEP_FAIL) return STEP_FAIL;
    if (m->races) pm_race_issue(m, t, k);
    if (m->timeline) pm_time_issue(m, t, k);
  }
  pm_vm_close_group(m, t);
  return STEP_PAUSE;
}

static step run_fetch(pm_machine *m, task *k) {
  const access *to = k->smem.mem;
  if (!k->read) {
    if (m->races && pm_race_engine(m, k, &k->gmem, READ) == STEP_FAIL) return STEP_FAIL;
    if (!pm_vm_want_buffer(k, (size_t)to->n * to->bytes)) return no_memory(m, k);
    fetch_source(m, k);
    k->read = true;
    return STEP_NEXT;
  }
  if (m->races && pm_race_engine(m, k, &k->smem, WRITE) == STEP_FAIL) return STEP_FAIL;
  if (m->poison && pm_poison_copy_in(m, k) == STEP_FAIL) return STEP_FAIL;
  pm_vm_scatter_part(&k->smem, k->from, k->to, k->buffer);
  pm_vm_end_store(m, k);
  return STEP_NEXT;
}

static step exec_commit_group(pm_machine *m, thread *t, const instr *i) {
  (void)i;
  pm_vm_close_group(m, t);
  return STEP_PAUSE;
}

static step await_stores(pm_machine *m, const thread *by, const thread *t, const instr *i) {
  int64_t done = t->groups - (int64_t)i->to; /* groups below it */
  bool read_only = i->flags;
  for (task *k = t->stores, *next; k; k = next) {
    next = k->next;
    if (k->group >= done) continue;
    if (!k->read && run_copy_out(m, k) == STEP_FAIL) return STEP_FAIL;
    if (!read_only && run_copy_out(m, k) == STEP_FAIL) return STEP_FAIL;
  }
  if (m->races) pm_race_stores_done(m, by, t, done, read_only);
  if (m->timeline) pm_time_stores_done(m, by, i->op, t, done, read_only);
  return STEP_PAUSE;
}

/* A thread waits for those of all its warps. */
static step exec_wait_copies_out(pm_machine *m, thread *t, const instr *i) {
  step s = await_stores(m, t, pm_vm_issuer(t), i);
  for (uint32_t w = 1; m->has_warps && !t->of && w < WARPS && s != STEP_FAIL; w++) {
    s = await_stores(m, t, &pm_vm_warps(m, t)[w], i);
  }
  return s;
}

/* All that it does is seen by the race detector. */
static step exec_commit_smem(pm_machine *m, thread *t, const instr *i) {
  if (m->races) pm_race_fence(m, t, !i->lowered);
  return STEP_PAUSE;
}

static step exec_proxy_fence(pm_machine *m, thread *t, const instr *i) {
  (void)i;
  if (m->races) pm_race_fence(m, t, false);
  return STEP_PAUSE;
}

/* ---- wgmma -------------------------------------------------------------------------------- */

static step exec_wgmma(pm_machine *m, thread *t, const instr *i) {
  task *k = pm_vm_new_task(m, t, i, TASK_MMA);
  if (!k) return STEP_FAIL;
  *(t->mma_last ? &t->mma_last->next : &t->mma_first) = k;
  t->mma_last = k;
  if (!t->mma_next) t->mma_next = k;
  t->n_mma++;
  pm_vm_locate(m, t, i->mem, &k->acc);
  pm_vm_locate(m, t, i->a ? i->mem2 : i->mem3, &k->rhs);
  if (!k->rhs.inside) return pm_vm_outside(m, t, i->op, &k->rhs, "wgmma");
  if (i->a) { /* its registers are read when it is issued: the generator keeps them until then */
    size_t bytes = (size_t)i->n * pm_dtypes[i->dtype].bytes;
    if (!pm_vm_want_buffer(k, 2 * bytes)) return no_memory(m, k);
    memcpy(k->buffer, slot_of(t, i->a), bytes);
    if (m->poison) pm_poison_take(t, i->a, k->buffer + bytes, bytes);
    k->lhs.mem = NULL;
  } else {
    pm_vm_locate(m, t, i->mem2, &k->lhs);
    if (!k->lhs.inside) return pm_vm_outside(m, t, i->op, &k->lhs, "wgmma");
  }
  if (m->races) pm_race_issue(m, t, k);
  if (m->timeline) pm_time_issue(m, t, k);
  return STEP_PAUSE;
}

static step race_operands(pm_machine *m, const task *k) {
  if (k->lhs.mem && pm_race_engine(m, k, &k->lhs, READ) == STEP_FAIL) return STEP_FAIL;
  return pm_race_engine(m, k, &k->rhs, READ);
}

static step run_mma(pm_machine *m, thread *t) {
  task *k = t->mma_next;
  if (m->races && race_operands(m, k) == STEP_FAIL) return STEP_FAIL;
  const size_t array = (size_t)k->i->n * pm_dtypes[k->i->dtype].bytes;
  if (m->poison && pm_poison_product(m, k, k->buffer + array) == STEP_FAIL) return STEP_FAIL;
  if (!m->options.skip_floats || !pm_is_float((pm_dtype)k->acc.mem->dtype)) {
    pm_vm_matmul(m->pack, &k->acc, &k->lhs, k->buffer, &k->rhs, k->i->out, k->i->dtype);
  }
  t->mma_next = k->next;
  pm_vm_finish_task(m, k);
  return STEP_NEXT;
}

/* A product that has run stays in the thread's list until a wait covers it: it might be running. */
static step await_mma(pm_machine *m, thread *t, const instr *i) {
  const uint32_t n = i->to;
  while (t->n_mma > n) {
    task *k = t->mma_first;
    if (k == t->mma_next && run_mma(m, t) == STEP_FAIL) return STEP_FAIL;
    if (m->races) pm_race_product_done(m, t, k);
    if (m->timeline) pm_time_product_done(m, t, i->op, k);
    t->mma_first = k->next;
    if (!k->next) t->mma_last = NULL;
    t->n_mma--;
    pm_vm_free_task(m, k);
  }
  return STEP_PAUSE;
}

/* Do two views of one accumulator, each a rectangle of it, have an element in common? */
static bool overlap(const located *a, const located *b) {
  const int64_t n = a->mem->base_dim[1];
  const int64_t row = a->offset / n - b->offset / n, column = a->offset % n - b->offset % n;
  return row < b->mem->dim[0] && -row < a->mem->dim[0] && column < b->mem->dim[1] &&
         -column < a->mem->dim[1];
}

/* The wgmma that was not waited for and may write to these elements of an accumulator, or NULL. */
static const task *writer_of(const thread *t, const located *acc) {
  const task *found = NULL;
  for (const task *k = t->mma_first; k; k = k->next) {
    if (k->acc.base == acc->base && overlap(&k->acc, acc)) found = k;
  }
  return found;
}

const task *pm_vm_writer_in(const thread *t, uint32_t slot) {
  const task *found = NULL;
  for (const task *k = t->mma_first; k; k = k->next) {
    if (k->acc.base == t->frame + slot) found = k;
  }
  return found;
}

static step exec_wgmma_wait(pm_machine *m, thread *t, const instr *i) { return await_mma(m, t, i); }

/* Where an accumulator is read or written by its thread, nothing else may write to it. */
static step locate_idle(pm_machine *m, thread *t, const instr *i, const char *what, located *s) {
  char place[600];
  pm_vm_locate(m, t, i->mem, s);
  const task *k = writer_of(t, s);
  if (!k) return STEP_NEXT;
  return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                    "accumulator '%s' is %s while the wgmma%s may still write to it. Wait before: "
                    "wgmma_wait(0), or wgmma_accumulator_load(acc, wait_n=0)",
                    i->mem->name, what, pm_vm_place(m, k->i->op, place, sizeof place));
}

static step exec_acc_load(pm_machine *m, thread *t, const instr *i) {
  located s;
  if ((int32_t)i->to >= 0 && await_mma(m, t, i) == STEP_FAIL) return STEP_FAIL;
  if (locate_idle(m, t, i, "read", &s) == STEP_FAIL) return STEP_FAIL;
  pm_vm_gather(&s, slot_of(t, i->dst));
  if (m->poison) pm_poison_acc_load(m, t, i, &s);
  return STEP_PAUSE;
}

static step exec_acc_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  if (locate_idle(m, t, i, "written", &s) == STEP_FAIL) return STEP_FAIL;
  pm_vm_scatter(&s, slot_of(t, i->a));
  return STEP_PAUSE;
}

step pm_vm_run_task(pm_machine *m, task *k) {
  pm_vm_progress(m);
  if (k->kind == TASK_TENSOR) return pm_vm_run_tensor(m, k->owner);
  if (k->run) return k->run(m, k);
  if (k->kind == TASK_LOAD) return run_copy_in(m, k);
  if (k->kind == TASK_STORE || k->kind == TASK_FETCH) return run_copy_out(m, k);
  return run_mma(m, k->owner);
}

const handler pm_vm_COPY_G2S = {pm_vm_encode_copy_in,
                                exec_copy_in,
                                {.poison = pm_poison_rule_counts, .reaches = pm_vm_reaches_copy}};
const handler pm_vm_COPY_S2G = {
    pm_vm_encode_copy_out, exec_copy_out, {.poison = pm_poison_rule_counts}};
const handler pm_vm_ASYNC_STORE = {
    pm_vm_encode_copy_out,
    exec_async_store,
    {.poison = pm_poison_rule_addresses, .reaches = pm_vm_reaches_always}};
const handler pm_vm_PREFETCH = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_CP_ASYNC = {pm_vm_encode_plain, exec_fetch, {.poison = pm_poison_rule_counts}};
const handler pm_vm_WAIT_CP_ASYNC = {pm_vm_encode_plain, exec_wait_copies_out, {0}};
const handler pm_vm_COMMIT_GROUP = {pm_vm_encode_plain, exec_commit_group, {0}};
const handler pm_vm_WAIT_S2G = {pm_vm_encode_plain, exec_wait_copies_out, {0}};
const handler pm_vm_COMMIT_SMEM = {pm_vm_encode_plain, exec_commit_smem, {0}};
const handler pm_vm_PROXY_FENCE = {pm_vm_encode_plain, exec_proxy_fence, {0}};
const handler pm_vm_WGMMA = {
    pm_vm_encode_product, exec_wgmma, {.poison = pm_poison_rule_addresses}};
const handler pm_vm_WGMMA_WAIT = {pm_vm_encode_plain, exec_wgmma_wait, {0}};
const handler pm_vm_ACC_LOAD = {
    pm_vm_encode_plain, exec_acc_load, {.poison = pm_poison_rule_nothing}};
const handler pm_vm_ACC_STORE = {
    pm_vm_encode_plain, exec_acc_store, {.poison = pm_poison_rule_acc_store}};
