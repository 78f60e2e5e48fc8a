/* Tensor memory, the tensor core that fills it, and cluster launch control.
 *
 * Each block has 128 lanes of the columns that the kernel allocates, lane after lane, with elements
 * where ir/tmem.h says. An agent (a thread, or a warp of a WARP_MAP; warp 0 stands for its thread)
 * has a queue of products, copies and commits, which take effect in order, when the scheduler
 * chooses it. One that has taken effect stays in the queue until a later commit does: until
 * then others may not rely on it.
 *
 * Loads and stores of a thread take effect at once, and the thread keeps them in a list until it
 * has waited for them and then told others by a barrier that orders tensor cores. So these are
 * errors as soon as two accesses meet, under most schedules:
 *   - a load or store of what a product or copy has not committed
 *   - a product or copy into what a load has not waited for, or of what a store has not committed
 *   - a product after loads or stores of another thread that told nobody by such a barrier
 *   - products or copies that are in flight when the scope of their memory ends
 *   - ops of a pair that its blocks execute unequally often, and commits that one of them ignores
 *
 * In a pair of blocks the leader's queue works for both. */
#include "../ir/tmem.h"

#include <inttypes.h>
#include <stdio.h>

#include "races.h"

/* ---- places --------------------------------------------------------------------------------- */

/* The columns that a located view has, in the TMEM of a block. */
static tmem_place place_of(block *b, const located *s) {
  const pm_tmem *m = s->mem->tmem;
  const int64_t matrix = m->rows * m->columns, n = s->mem->dim[s->mem->rank - 1];
  const int64_t tile = pm_tmem_tile(m), per_tile = m->width * tile / m->columns;
  return (tmem_place){
      .block = b,
      .mem = s->mem,
      .rows = m->rows,
      .columns = n,
      .from = m->offset + s->offset / matrix * m->width + s->offset % m->columns / tile * per_tile,
      .width = m->width * n / m->columns};
}

static step locate(pm_machine *m, thread *t, const instr *i, const access *mem, const char *what,
                   tmem_place *out) {
  located s;
  pm_vm_locate(m, t, mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, what);
  *out = place_of(t->block, &s);
  return STEP_NEXT;
}

static bool meet(const tmem_place *a, const tmem_place *b) {
  return a->block == b->block && a->from < b->from + b->width && b->from < a->from + a->width;
}

/* In the TMEM of a block, or in the bytes beside it. */
static char *cell_of(const pm_machine *m, char *tmem, int64_t lane, int64_t column) {
  return tmem + (lane * m->tmem_columns + column) * 4;
}

char *pm_vm_tmem_at(const pm_machine *m, const block *b, int64_t lane, int64_t column) {
  return cell_of(m, b->tmem, lane, column);
}

/* Row i of a matrix as runs of elements: the first `half` of them, and the rest. */
static char *run_of(const pm_machine *m, const tmem_place *p, int64_t i, int64_t from) {
  pm_tmem like = *p->mem->tmem;
  like.columns = p->columns;
  const pm_tmem_cell c = pm_tmem_at(&like, i, from, 0);
  return pm_vm_tmem_at(m, p->block, c.lane, p->from + c.column) + c.bit / 8;
}

static int64_t run_length(const tmem_place *p) {
  const uint8_t layout = p->mem->tmem->layout;
  if (layout == PM_TMEM_DEFAULT || layout == PM_TMEM_METADATA) return p->columns;
  return layout == PM_TMEM_HALF || layout == PM_TMEM_M64 ? p->columns / 2 : 4;
}

/* Elements of fewer than 8 bits: a byte for each in an array. */
static void copy_bits(pm_dtype d, char *array, char *cells, int64_t n, bool load) {
  if (load) pm_unpack_bytes(d, cells, array, (size_t)n);
  else pm_pack_bytes(d, array, cells, (size_t)n);
}

static void copy_run(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n,
                     int64_t bytes) {
  if (to_step == bytes && from_step == bytes) {
    memcpy(to, from, (size_t)(n * bytes));
    return;
  }
  for (int64_t k = 0; k < n; k++) memcpy(to + k * to_step, from + k * from_step, (size_t)bytes);
}

/* All elements, row-major in `array`; `load`: from TMEM. Each lane of a replicated layout is
 * written. */
static void move_between(const pm_machine *m, char *tmem, const tmem_place *p, char *array,
                         bool load) {
  const pm_tmem *of = p->mem->tmem;
  const int64_t bytes = pm_dtypes[of->dtype].bytes, step = 4 / of->packing, n = run_length(p);
  pm_tmem like = *of;
  like.columns = p->columns;
  for (int64_t i = 0; i < p->rows; i++) {
    for (int64_t j = 0; j < p->columns; j += n) {
      char *x = array + (i * p->columns + j) * bytes;
      for (int k = 0; k < (load ? 1 : pm_tmem_copies(of)); k++) {
        const pm_tmem_cell c = pm_tmem_at(&like, i, j, k);
        char *y = cell_of(m, tmem, c.lane, p->from + c.column) + c.bit / 8;
        if (pm_dtypes[of->dtype].bits < 8) copy_bits(of->dtype, x, y, n, load);
        else if (load) copy_run(x, bytes, y, step, n, bytes);
        else copy_run(y, step, x, bytes, n, bytes);
      }
    }
  }
}

static void move_elements(const pm_machine *m, const tmem_place *p, char *array, bool load) {
  move_between(m, p->block->tmem, p, array, load);
}

/* ---- what was never written ----------------------------------------------------------------- */

/* Bytes beside an array of a slot, to or from those beside TMEM. */
static void move_poison(pm_machine *m, const thread *t, const tmem_place *p, uint32_t slot,
                        bool load) {
  if (!m->poison || pm_dtypes[p->mem->tmem->dtype].bits < 8) return;
  move_between(m, pm_poison_tmem(m, p->block), p, pm_poison_frame(t, slot), load);
}

/* The first mark in the columns of one lane, or of all lanes; 0: all of it is defined. */
static uint8_t mark_of(pm_machine *m, const tmem_place *p, int64_t lane, int64_t lanes) {
  for (int64_t i = lane; i < lane + lanes; i++) {
    const char *at = cell_of(m, pm_poison_tmem(m, p->block), i, p->from);
    for (int64_t k = 0; k < p->width * 4; k++) {
      if (at[k]) return (uint8_t)at[k];
    }
  }
  return 0;
}

/* Marks of rows and columns of a product become those of its accumulator. */
static void mark_products(pm_machine *m, const task *k, const tmem_place *acc, const uint8_t *row,
                          const uint8_t *column, char *array) {
  const tensor_op *x = k->i->tensor;
  char *beside = pm_poison_tmem(m, acc->block);
  const size_t bytes = pm_dtypes[acc->mem->tmem->dtype].bytes;
  move_between(m, beside, acc, array, true);
  for (int64_t i = 0; i < x->m; i++) {
    for (int64_t j = 0; j < x->n; j++) {
      char *at = array + (size_t)(i * x->n + j) * bytes;
      const uint8_t mark = row[i] ? row[i] : column[j];
      if (mark || !k->accumulate) memset(at, mark, bytes);
    }
  }
  move_between(m, beside, acc, array, false);
}

/* In one block: its rows of a, and b, of which the peer of a pair has the other half. */
static step poison_product(pm_machine *m, task *k, const located *a, const located *b,
                           const located *b_of_peer, const tmem_place *places) {
  const tensor_op *x = k->i->tensor;
  const thread *t = k->owner;
  const size_t lines = (size_t)(x->m + x->n);
  if (!pm_vm_want_buffer(k, lines + (size_t)(x->m * x->n) * 4)) {
    return pm_vm_fail(m, t, k->i->op, PM_E_MEMORY, "no memory to look for what was never written");
  }
  uint8_t *row = (uint8_t *)k->buffer, *column = row + x->m;
  const int64_t half = b_of_peer ? x->n / 2 : x->n;
  if ((x->a && pm_poison_operand(m, t, k->i, a) == STEP_FAIL) ||
      pm_poison_operand(m, t, k->i, b) == STEP_FAIL ||
      (b_of_peer && pm_poison_operand(m, t, k->i, b_of_peer) == STEP_FAIL))
    return STEP_FAIL;
  if (x->a && !pm_poison_lines(m, t, a, 0, row)) return STEP_FAIL;
  for (int64_t i = 0; !x->a && i < x->m; i++) row[i] = mark_of(m, &places[x->a_tmem], i, 1);
  if (!pm_poison_lines(m, t, b, 1, column)) return STEP_FAIL;
  if (b_of_peer && !pm_poison_lines(m, t, b_of_peer, 1, column + half)) return STEP_FAIL;
  for (uint32_t n = 1; n < k->n_places; n++) { /* scales, metadata */
    const uint8_t mark = n == x->a_tmem ? 0 : mark_of(m, &places[n], 0, PM_TMEM_LANES);
    if (mark) memset(row, mark, (size_t)x->m);
  }
  mark_products(m, k, &places[0], row, column, k->buffer + lines);
  return STEP_NEXT;
}

/* ---- what threads have not waited for ------------------------------------------------------- */

static thread *lane_of(thread *t) { return t->of && !t->warp ? t->of : t; }
static thread *thread_of(thread *t) { return t->of ? t->of : t; }

static step note_use(pm_machine *m, thread *t, const instr *i, const tmem_place *p, bool store) {
  for (uint32_t k = 0; k < t->n_uses; k++) {
    tmem_use *u = &t->uses[k];
    if (u->store != store || u->place.from != p->from || u->place.width != p->width) continue;
    u->op = i->op;
    u->stage = USE_ISSUED;
    return STEP_NEXT;
  }
  if (t->n_uses == t->cap_uses) {
    const uint32_t cap = t->cap_uses ? 2 * t->cap_uses : 8;
    tmem_use *at = pm_realloc(t->uses, cap * sizeof *at);
    if (!at) return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for an access of TMEM");
    t->uses = at;
    t->cap_uses = cap;
  }
  t->uses[t->n_uses++] = (tmem_use){.op = i->op, .place = *p, .store = store};
  return STEP_NEXT;
}

/* Loads, or stores, are complete. */
static void waited(thread *t, bool stores) {
  for (uint32_t k = 0; k < t->n_uses; k++) {
    if (t->uses[k].store == stores) t->uses[k].stage = USE_WAITED;
  }
}

void pm_vm_tmem_told(thread *t) {
  uint32_t n = 0;
  t = thread_of(t);
  for (uint32_t k = 0; k < t->n_uses; k++) {
    if (t->uses[k].stage == USE_ISSUED) t->uses[n++] = t->uses[k];
  }
  t->n_uses = n;
}

/* What must follow the access before another one that depends on it. */
static const char *lacks(const tmem_use *u) {
  if (u->stage == USE_WAITED) {
    return "it did not signal that: arrive on a barrier with orders_tensor_core=True, and wait on "
           "that before";
  }
  return u->store ? "commit_tmem must follow the store" : "wait_load_tmem must follow the load";
}

/* A tensor core, working for `by`, touches p. */
static step check_uses(pm_machine *m, const task *k, const tmem_place *p, bool writes) {
  char place[600], agent[512];
  const thread *first = m->threads + (size_t)(p->block - m->blocks) * m->n_threads;
  const thread *own = k->owner->of ? k->owner->of : k->owner;
  for (const thread *t = first; t < first + m->n_threads; t++) {
    for (uint32_t n = 0; n < t->n_uses; n++) {
      const tmem_use *u = &t->uses[n];
      if (!meet(&u->place, p) || (!u->store && !writes)) continue;
      if (u->stage == USE_WAITED && t == own) continue;
      return pm_vm_fail(
          m, k->owner, k->i->op, PM_E_VALUE,
          "%s %s columns %" PRId64 " to %" PRId64
          " of '%s' while the async_%s_tmem%s "
          "of %s may still %s them; %s",
          k->i->tensor->name, writes ? "writes" : "reads", p->from - p->mem->tmem->offset,
          p->from - p->mem->tmem->offset + p->width - 1, p->mem->name, u->store ? "store" : "load",
          pm_vm_place(m, u->op, place, sizeof place), pm_vm_agent(m, t, agent, sizeof agent),
          u->store ? "write" : "read", lacks(u));
    }
  }
  return STEP_NEXT;
}

/* ---- queues --------------------------------------------------------------------------------- */

/* Is the op for a pair, and does another block issue it? Each counts. */
static bool follows(pm_machine *m, thread *t, const tensor_op *x) {
  if (!x->pair) return false;
  t->block->n_pairs[x->number]++;
  return t->block->coord[m->n_cluster - 1] != 0;
}

static block *peer_of(block *b) { return b + 1; } /* of a leader, along the last axis */
static barrier *in_peer(const barrier *b) { return peer_of(b->block)->bars + (b - b->block->bars); }

static void enqueue(thread *t, task *k) {
  *(t->tensor_last ? &t->tensor_last->next : &t->tensor_first) = k;
  t->tensor_last = k;
  if (!t->tensor_next) t->tensor_next = k;
}

static step note_done(pm_machine *m, thread *t, const task *k) {
  for (uint32_t n = 0; n < k->n_places; n++) {
    const tmem_place *p = &k->places[n];
    uint32_t j = 0;
    while (j < t->n_finished &&
           !(t->finished[j].place.from == p->from && t->finished[j].place.width == p->width &&
             t->finished[j].writes == !n)) {
      j++;
    }
    if (j == t->cap_finished) {
      const uint32_t cap = j ? 2 * j : 8;
      tmem_done *at = pm_realloc(t->finished, cap * sizeof *at);
      if (!at) return pm_vm_fail(m, t, k->i->op, PM_E_MEMORY, "no memory for a product");
      t->finished = at;
      t->cap_finished = cap;
    }
    t->finished[j] = (tmem_done){.op = k->i->op,
                                 .name = k->i->tensor->name,
                                 .place = *p,
                                 .pair = k->i->tensor->pair,
                                 .writes = !n,
                                 .commit = t->n_commits};
    if (j == t->n_finished) t->n_finished++;
  }
  return STEP_NEXT;
}

/* What came before the commit is complete for whoever waited. */
static void forget_finished(thread *t, uint32_t commit) {
  uint32_t n = 0;
  for (uint32_t j = 0; j < t->n_finished; j++) {
    if (t->finished[j].commit > commit) t->finished[n++] = t->finished[j];
  }
  t->n_finished = n;
}

void pm_vm_see_commit(pm_machine *m, const barrier *b, int64_t phase) {
  for (uint32_t k = m->n_commits; k-- > 0;) {
    const commit_note c = m->commits[k];
    if (c.barrier != b || c.phase > phase) continue;
    forget_finished(c.by, c.number);
    if (c.by->block != b->block) c.by->peer_saw = pm_max(c.by->peer_saw, c.number);
    m->commits[k] = m->commits[--m->n_commits];
  }
}

static step arrive(pm_machine *m, thread *t, pm_opid op, barrier *b) {
  const commit_note c = {b, t, op, t->n_commits, b->phase + 1};
  uint32_t k = 0;
  while (k < m->n_commits && (m->commits[k].barrier != b || m->commits[k].by != t ||
                              (m->commits[k].phase - c.phase) % 2)) {
    k++;
  }
  if (k == m->cap_commits) {
    const uint32_t cap = k ? 2 * k : 16;
    commit_note *at = pm_realloc(m->commits, cap * sizeof *at);
    if (!at) return pm_vm_fail(m, t, op, PM_E_MEMORY, "no memory for a commit");
    m->commits = at;
    m->cap_commits = cap;
  }
  m->commits[k] = c;
  if (k == m->n_commits) m->n_commits++;
  return pm_vm_count_arrival(m, t, op, b, 0);
}

/* The tasks in front of a commit can be relied on, by who waits for its barrier. */
static step retire(pm_machine *m, thread *t, const task *commit) {
  while (t->tensor_first != commit) {
    task *k = t->tensor_first;
    if (note_done(m, t, k) == STEP_FAIL) return STEP_FAIL;
    t->tensor_first = k->next;
    pm_vm_free_task(m, k);
  }
  return STEP_NEXT;
}

void pm_vm_drop_tensor(pm_machine *m, thread *t) {
  bool pending = false;
  for (task *k = t->tensor_first, *next; k; k = next) {
    next = k->next;
    pending |= k == t->tensor_next;
    if (pending) pm_vm_finish_task(m, k);
    pm_vm_free_task(m, k);
  }
  for (uint32_t k = m->n_commits; k-- > 0;) {
    if (m->commits[k].by == t) m->commits[k] = m->commits[--m->n_commits];
  }
  t->tensor_first = t->tensor_last = t->tensor_next = NULL;
  t->n_uses = t->n_finished = t->n_commits = t->peer_saw = 0;
}

static bool touches(const task *k, const tmem_place *p, bool writes_only) {
  for (uint32_t n = 0; n < k->n_places; n++) {
    if ((n == 0 || !writes_only) && meet(&k->places[n], p)) return true;
    tmem_place other = k->places[n];
    other.block = k->i->tensor->pair ? peer_of(other.block) : other.block;
    if ((n == 0 || !writes_only) && meet(&other, p)) return true;
  }
  return false;
}

/* Who uses a place. */
typedef struct user {
  pm_opid op; /* 0: nobody */
  const char *name;
  const thread *owner;
  bool committed, writes;
} user;

static user finished(const thread *u, const tmem_place *p, bool writes_only) {
  for (uint32_t n = 0; n < u->n_finished; n++) {
    const tmem_done *d = &u->finished[n];
    tmem_place other = d->place;
    if (d->pair) other.block = peer_of(other.block);
    if (writes_only && !d->writes) continue;
    if (meet(&d->place, p) || meet(&other, p)) return (user){d->op, d->name, u, true, d->writes};
  }
  return (user){0};
}

/* A task that touches p, that is writes it, or reads it as well, and that is not committed, or
 * whose commit nobody has waited for. */
static user in_flight(const pm_machine *m, const tmem_place *p, bool writes_only) {
  const cluster *c = p->block->cluster;
  const thread *first = m->threads + (size_t)(c->blocks - m->blocks) * m->n_threads;
  for (const thread *t = first; t < first + m->n_blocks * m->n_threads; t++) {
    for (uint32_t w = 0; w <= (m->has_warps ? WARPS : 0u); w++) {
      const thread *u = w ? pm_vm_warps(m, t) + w - 1 : t;
      for (const task *k = u->tensor_first; k; k = k->next) {
        if (!touches(k, p, writes_only)) continue;
        return (user){k->i->op, k->i->tensor->name, k->owner, false, touches(k, p, true)};
      }
      const user done = finished(u, p, writes_only);
      if (done.op) return done;
    }
  }
  return (user){0};
}

static const char *advice(const user *u) {
  return u->committed ? "nobody has waited for the barrier of a tcgen05_commit_arrive after it"
                      : "wait before for the barrier of a tcgen05_commit_arrive after it";
}

/* A thread is about to read or write p. */
static step check_idle(pm_machine *m, thread *t, const instr *i, const tmem_place *p, bool store) {
  char place[600], agent[512];
  const user by = in_flight(m, p, !store);
  if (by.op) {
    return pm_vm_fail(
        m, t, i->op, PM_E_VALUE, "async_%s_tmem of '%s' while the %s%s of %s may still %s it; %s",
        store ? "store" : "load", p->mem->name, by.name, pm_vm_place(m, by.op, place, sizeof place),
        pm_vm_agent(m, by.owner, agent, sizeof agent), by.writes ? "write" : "read", advice(&by));
  }
  const thread *first = m->threads + (size_t)(t->block - m->blocks) * m->n_threads;
  for (const thread *u = first; u < first + m->n_threads; u++) {
    for (uint32_t n = 0; n < u->n_uses; n++) {
      const tmem_use *x = &u->uses[n];
      if (!meet(&x->place, p) || (!x->store && !store)) continue;
      if (u == t && (x->stage == USE_WAITED || (x->store && store))) continue;
      return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                        "async_%s_tmem of '%s' while the async_%s_tmem%s of %s may still %s it; %s",
                        store ? "store" : "load", p->mem->name, x->store ? "store" : "load",
                        pm_vm_place(m, x->op, place, sizeof place),
                        pm_vm_agent(m, u, agent, sizeof agent), x->store ? "write" : "read",
                        lacks(x));
    }
  }
  return STEP_NEXT;
}

/* ---- issuing -------------------------------------------------------------------------------- */

static step exec_tensor(pm_machine *m, thread *t, const instr *i) {
  const tensor_op *x = i->tensor;
  if (follows(m, t, x)) return STEP_PAUSE;
  task *k = pm_vm_new_task(m, lane_of(t), i, TASK_TENSOR);
  if (!k) return STEP_FAIL;
  k->n_places = 0;
  enqueue(k->owner, k);
  for (uint32_t n = 0; n < x->n_tmem; n++) {
    if (locate(m, t, i, x->tmem[n], x->name, &k->places[n]) == STEP_FAIL) return STEP_FAIL;
    k->n_places++;
  }
  k->lhs.mem = k->rhs.mem = NULL;
  if (x->a) pm_vm_locate(m, t, x->a, &k->lhs);
  if (x->b) pm_vm_locate(m, t, x->b, &k->rhs);
  if (x->a && !k->lhs.inside) return pm_vm_outside(m, t, i->op, &k->lhs, x->name);
  if (x->b && !k->rhs.inside) return pm_vm_outside(m, t, i->op, &k->rhs, x->name);
  k->accumulate = x->accumulate && *(const uint8_t *)slot_of(t, x->accumulate);
  k->barrier = NULL;
  if (x->barrier && !(k->barrier = pm_vm_barrier(m, t, i, x->barrier))) return STEP_FAIL;
  if (m->races) pm_race_issue(m, t, k);
  if (m->timeline) pm_time_issue(m, t, k);
  return STEP_PAUSE;
}

/* ---- products ------------------------------------------------------------------------------- */

/* A view of SMEM in the block that `to` is, where it was located in `from`. */
static located in_block(const located *s, const block *from, const block *to) {
  located out = *s;
  if (!s->mem) return out;
  out.base = to->smem + (s->base - from->smem);
  out.at = to->smem + (s->at - from->smem);
  return out;
}

static float scale_at(const pm_machine *m, const tmem_place *p, int64_t i, int64_t j) {
  pm_tmem like = *p->mem->tmem;
  like.columns = p->columns;
  const pm_tmem_cell c = pm_tmem_at(&like, i, j, 0);
  const uint8_t *at =
      (const uint8_t *)pm_vm_tmem_at(m, p->block, c.lane, p->from + c.column) + c.bit / 8;
  return pm_narrow_to_f32(like.dtype, *at);
}

/* The n-th index of row i of the metadata; operands of 16 bits have their own order. */
static int index_at(const pm_machine *m, const tmem_place *p, int64_t i, int64_t n, int bits) {
  int64_t lane = i, entry = n % 64;
  if (bits == 16) {
    lane = i / 16 * 16 + entry / 8 % 2 * 8 + i % 8;
    entry = entry / 16 * 16 + i / 8 % 2 * 8 + entry % 8;
  }
  const uint8_t *at = (const uint8_t *)pm_vm_tmem_at(m, p->block, lane, p->from + n / 64 * 4);
  return at[entry / 4] >> entry % 4 * 2 & 3;
}

/* `n` elements that are contiguous, and packed if they have 4 bits, as floats. */
static void widen(pm_dtype d, const char *from, float *to, int64_t n) {
  uint8_t bytes[256];
  if (pm_dtypes[d].bits >= 8) {
    pm_convert_array(d, PM_F32, from, to, (size_t)n);
    return;
  }
  for (int64_t k = 0; k < n; k += (int64_t)sizeof bytes) {
    const int64_t some = pm_min(n - k, (int64_t)sizeof bytes);
    pm_unpack_bytes(d, from + k / 2, bytes, (size_t)some);
    pm_convert_array(d, PM_F32, bytes, to + k, (size_t)some);
  }
}

/* Elements (i, 0) to (i, n - 1) of a view of SMEM; `packed` elements share a byte, along the
 * dimension of the view that is contiguous. */
static void widen_row(const located *s, int row_dim, pm_dtype d, int packed, int64_t i, int64_t n,
                      float *to) {
  const int64_t bytes = s->mem->bytes, step = s->mem->stride[1 - row_dim] * bytes;
  const char *from = s->at + i * s->mem->stride[row_dim] * bytes;
  if (step == bytes) {
    widen(d, from, to, n);
    return;
  }
  for (int64_t k = 0; k < n / packed; k++) widen(d, from + k * step, to + k * packed, packed);
}

/* a (M, K) of one block as floats: dense, scaled. */
static void widen_a(const pm_machine *m, const task *k, const located *a, const tmem_place *places,
                    float *out) {
  const tensor_op *x = k->i->tensor;
  const int64_t kept = x->metadata ? x->k / 2 : x->k;
  const int bits = pm_dtypes[x->a_dtype].bits, pair = bits == 4 ? 2 : 1;
  float *row = out + x->m * x->k;
  for (int64_t i = 0; i < x->m; i++, out += x->k) {
    float *to = x->metadata ? row : out;
    if (x->a) widen_row(a, 0, x->a_dtype, x->packed, i, kept, to);
    else widen(x->a_dtype, run_of(m, &places[x->a_tmem], i, 0), to, kept);
    if (x->metadata) {
      memset(out, 0, (size_t)x->k * sizeof *out);
      for (int64_t n = 0; n < kept; n++) {
        const int64_t place = n / pair, group = place / 2 * 4 * pair;
        const int at = index_at(m, &places[x->metadata], i, place, bits);
        out[group + at * pair + n % pair] = row[n];
      }
    }
    for (int64_t p = 0; x->a_scale && p < x->k; p++) {
      out[p] *= scale_at(m, &places[x->a_scale], i, p / x->block);
    }
  }
}

/* The columns first .. first + n of the product are those of this b; (n, K) as floats. */
static void widen_b(const pm_machine *m, const task *k, const located *b, const tmem_place *places,
                    int64_t first, int64_t n, float *out) {
  const tensor_op *x = k->i->tensor;
  for (int64_t j = 0; j < n; j++, out += x->k) {
    widen_row(b, 1, x->b_dtype, x->packed, j, x->k, out);
    if (!x->b_scale) continue;
    const tmem_place *s = &places[x->b_scale];
    int64_t row = first + j;
    if (s->mem->tmem->layout == PM_TMEM_SCALES_M64) row = row / (x->n / 2) * 128 + row % (x->n / 2);
    for (int64_t p = 0; p < x->k; p++) out[p] *= scale_at(m, s, row, p / x->block);
  }
}

/* Part of the accumulator of one block: columns first .. first + n, by a and b, into `sums`. */
static void multiply(pm_machine *m, const task *k, const located *a, const located *b,
                     const tmem_place *places, int64_t first, int64_t n, pm_vm_target sums) {
  const tensor_op *x = k->i->tensor;
  char *work = m->pack + x->m * x->n * (int64_t)sizeof(float);
  pm_vm_factor left, right;
  if (pm_vm_is_widened(x)) {
    float *wide_a = (float *)work, *wide_b = wide_a + (x->m + 1) * x->k;
    widen_a(m, k, a, places, wide_a);
    widen_b(m, k, b, places, first, n, wide_b);
    left = (pm_vm_factor){(const char *)wide_a, x->m, x->k, x->k, 1, PM_F32};
    right = (pm_vm_factor){(const char *)wide_b, n, x->k, x->k, 1, PM_F32};
    work = (char *)(wide_b + x->n * x->k);
  } else {
    right = (pm_vm_factor){b->at, n, x->k, b->mem->stride[1], b->mem->stride[0], x->b_dtype};
    left = (pm_vm_factor){NULL, x->m, x->k, 0, 1, x->a_dtype};
    if (x->a) {
      left.at = a->at;
      left.step = a->mem->stride[0];
      left.k_step = a->mem->stride[1];
    } else {
      left.at = run_of(m, &places[x->a_tmem], 0, 0);
      left.step = m->tmem_columns * 4 / pm_dtypes[x->a_dtype].bytes;
    }
  }
  sums.n = n;
  pm_vm_product(work, &sums, left, right);
}

/* The accumulator of one block. That of 128 rows of 32 bits is added to where it lies; others are
 * loaded, and stored again. */
static void multiply_block(pm_machine *m, const task *k, const located *a, const located *b,
                           const located *b_of_peer, const tmem_place *places) {
  const tensor_op *x = k->i->tensor;
  const tmem_place *acc = &places[0];
  const pm_dtype d = acc->mem->tmem->dtype;
  const int64_t bytes = pm_dtypes[d].bytes, n = b_of_peer ? x->n / 2 : x->n;
  const bool direct = acc->mem->tmem->layout == PM_TMEM_DEFAULT && bytes == 4;
  pm_vm_target to = {m->pack, x->m, x->n, x->n, d};
  if (direct) {
    to.at = pm_vm_tmem_at(m, acc->block, 0, acc->from);
    to.ldc = m->tmem_columns;
  } else if (k->accumulate) {
    move_elements(m, acc, to.at, true);
  }
  for (int64_t i = 0; !k->accumulate && i < x->m; i++) {
    memset(to.at + i * to.ldc * bytes, 0, (size_t)(x->n * bytes));
  }
  multiply(m, k, a, b, places, 0, n, to);
  if (b_of_peer) {
    to.at += n * bytes;
    multiply(m, k, a, b_of_peer, places, n, n, to);
  }
  if (!direct) move_elements(m, acc, m->pack, false);
}

static step run_product(pm_machine *m, task *k) {
  const tensor_op *x = k->i->tensor;
  block *own = k->places[0].block, *peer = x->pair ? peer_of(own) : NULL;
  if (m->options.skip_floats && pm_is_float(k->places[0].mem->tmem->dtype)) return STEP_NEXT;
  const located b = peer ? in_block(&k->rhs, own, peer) : k->rhs;
  const located *other = peer ? &b : NULL;
  if (m->poison && poison_product(m, k, &k->lhs, &k->rhs, other, k->places) == STEP_FAIL) {
    return STEP_FAIL;
  }
  multiply_block(m, k, &k->lhs, &k->rhs, other, k->places);
  if (!peer) return STEP_NEXT;
  tmem_place places[PM_VM_TMEM_OPERANDS];
  for (uint32_t n = 0; n < k->n_places; n++) {
    places[n] = k->places[n];
    places[n].block = peer;
  }
  const located a = in_block(&k->lhs, own, peer);
  if (m->poison && poison_product(m, k, &a, &k->rhs, &b, places) == STEP_FAIL) return STEP_FAIL;
  multiply_block(m, k, &a, &k->rhs, &b, places);
  return STEP_NEXT;
}

/* ---- copies from SMEM ----------------------------------------------------------------------- */

/* Elements of `mem`, from `at` on by these strides, to TMEM, or to the bytes beside it. */
static void copy_into(const pm_machine *m, char *tmem, const tmem_place *p, const access *mem,
                      const char *at, const int64_t *stride) {
  const pm_tmem *of = p->mem->tmem;
  if (of->layout == PM_TMEM_DEFAULT) {
    const int64_t bytes = mem->bytes;
    for (int64_t i = 0; i < p->rows; i++) {
      copy_run(cell_of(m, tmem, i, p->from), bytes, at + i * stride[0] * bytes, stride[1] * bytes,
               mem->dim[1], bytes);
    }
    return;
  }
  const int64_t rows = mem->dim[2], depth = mem->dim[1], across = mem->dim[0];
  for (int64_t tile = 0; tile < across * depth; tile++) {
    const int64_t column = p->from + tile % depth * 4 * across + tile / depth * 4;
    const char *from = at + tile / depth * stride[0] + tile % depth * stride[1];
    for (int64_t r = 0; r < PM_TMEM_LANES; r++) {
      /* 32 rows go to each quarter of the lanes; of 64, 32 to each half, twice */
      const int64_t row = rows == 64 ? r / 64 * 32 + r % 32 : r % rows;
      memcpy(cell_of(m, tmem, r, column), from + row * stride[2], 16);
    }
  }
}

static step run_copy(pm_machine *m, const task *k, block *b) {
  const located s = in_block(&k->lhs, k->places[0].block, b);
  tmem_place p = k->places[0];
  p.block = b;
  copy_into(m, b->tmem, &p, s.mem, s.at, s.mem->stride);
  if (!m->poison) return STEP_NEXT;
  const char *marks = pm_poison_bytes(m, k->owner, &s);
  int64_t stride[PM_MAX_RANK], n = 1;
  if (!marks) return STEP_FAIL;
  for (int d = s.mem->rank - 1; d >= 0; d--) {
    stride[d] = n;
    n *= s.mem->dim[d];
  }
  copy_into(m, pm_poison_tmem(m, b), &p, s.mem, marks, stride);
  return STEP_NEXT;
}

/* ---- taking effect -------------------------------------------------------------------------- */

static step run_commit(pm_machine *m, task *k) {
  thread *t = k->owner;
  const pm_opid op = k->i->op;
  const bool pair = k->i->tensor->pair;
  barrier *b = k->barrier;
  t->tensor_next = k->next;
  t->n_commits++;
  if (retire(m, t, k) == STEP_FAIL) return STEP_FAIL;
  t->tensor_first = k->next;
  if (!t->tensor_first) t->tensor_last = NULL;
  if (m->races) pm_race_commit(m, k, b);
  if (m->races && pair) pm_race_commit(m, k, in_peer(b));
  if (m->timeline) pm_time_committed(m, k, b);
  if (m->timeline && pair) pm_time_committed(m, k, in_peer(b));
  pm_vm_end_task(m, k);
  if (arrive(m, t, op, b) == STEP_FAIL) return STEP_FAIL;
  return pair ? arrive(m, t, op, in_peer(b)) : STEP_NEXT;
}

static step check_places(pm_machine *m, const task *k, block *b) {
  const tensor_op *x = k->i->tensor;
  for (uint32_t n = 0; n < k->n_places; n++) {
    tmem_place p = k->places[n];
    p.block = b;
    if (check_uses(m, k, &p, n == 0) == STEP_FAIL) return STEP_FAIL;
    if (m->races && pm_race_tensor(m, k, &p, n ? READ : WRITE) == STEP_FAIL) return STEP_FAIL;
  }
  if (!m->races) return STEP_NEXT;
  const block *own = k->places[0].block;
  const located a = in_block(&k->lhs, own, b), r = in_block(&k->rhs, own, b);
  if (x->a && pm_race_engine(m, k, &a, READ) == STEP_FAIL) return STEP_FAIL;
  return x->b && pm_race_engine(m, k, &r, READ) == STEP_FAIL ? STEP_FAIL : STEP_NEXT;
}

step pm_vm_run_tensor(pm_machine *m, thread *t) {
  task *k = t->tensor_next;
  const tensor_op *x = k->i->tensor;
  if (x->barrier) return run_commit(m, k);
  block *own = k->places[0].block;
  if (check_places(m, k, own) == STEP_FAIL) return STEP_FAIL;
  if (x->pair && check_places(m, k, peer_of(own)) == STEP_FAIL) return STEP_FAIL;
  if (x->b) {
    if (run_product(m, k) == STEP_FAIL) return STEP_FAIL;
  } else {
    if (run_copy(m, k, own) == STEP_FAIL) return STEP_FAIL;
    if (x->pair && run_copy(m, k, peer_of(own)) == STEP_FAIL) return STEP_FAIL;
  }
  t->tensor_next = k->next;
  pm_vm_finish_task(m, k);
  return STEP_NEXT;
}

/* ---- loads and stores ----------------------------------------------------------------------- */

static step exec_load(pm_machine *m, thread *t, const instr *i) {
  tmem_place p;
  if (locate(m, t, i, i->mem, "async_load_tmem", &p) == STEP_FAIL) return STEP_FAIL;
  if (check_idle(m, t, i, &p, false) == STEP_FAIL) return STEP_FAIL;
  if (m->races && pm_race_tmem(m, t, i, &p, READ) == STEP_FAIL) return STEP_FAIL;
  move_elements(m, &p, slot_of(t, i->dst), true);
  move_poison(m, t, &p, i->dst, true);
  return note_use(m, t, i, &p, false) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static step exec_store(pm_machine *m, thread *t, const instr *i) {
  tmem_place p;
  if (locate(m, t, i, i->mem, "async_store_tmem", &p) == STEP_FAIL) return STEP_FAIL;
  if (check_idle(m, t, i, &p, true) == STEP_FAIL) return STEP_FAIL;
  if (m->races && pm_race_tmem(m, t, i, &p, WRITE) == STEP_FAIL) return STEP_FAIL;
  move_elements(m, &p, slot_of(t, i->a), false);
  move_poison(m, t, &p, i->a, false);
  return note_use(m, t, i, &p, true) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static step exec_commit_tmem(pm_machine *m, thread *t, const instr *i) {
  (void)m, (void)i;
  waited(t, true);
  return STEP_PAUSE;
}

static step exec_wait_load(pm_machine *m, thread *t, const instr *i) {
  (void)i;
  if (m->races) pm_race_await_loads(m, t);
  waited(t, false);
  return STEP_PAUSE;
}

/* ---- scopes --------------------------------------------------------------------------------- */

void pm_vm_init_tmem(pm_machine *m, block *b, const struct tmem_alloc *x) {
  const int64_t bytes = pm_tmem_size(&x->tmem) * 4;
  const pm_dtype d = pm_dtypes[x->tmem.dtype].bits < 8 ? PM_U8 : x->tmem.dtype;
  for (int64_t lane = 0; lane < PM_TMEM_LANES; lane++) {
    pm_interp_fill(d, m->options.zero_fill, pm_vm_tmem_at(m, b, lane, x->tmem.offset),
                   bytes / pm_dtypes[d].bytes);
    if (!m->poison) continue;
    memset(cell_of(m, pm_poison_tmem(m, b), lane, x->tmem.offset),
           pm_poison_number(m, x->name, x->op), (size_t)bytes);
  }
}

step pm_vm_check_tmem(pm_machine *m, thread *t, pm_opid op, const struct tmem_alloc *x) {
  char place[600];
  const tmem_place p = {.block = t->block, .from = x->tmem.offset, .width = pm_tmem_size(&x->tmem)};
  const user by = in_flight(m, &p, false);
  if (by.op) {
    return pm_vm_fail(m, t, op, PM_E_VALUE,
                      "the scope of '%s' ends while the %s%s may still use it; %s", x->name,
                      by.name, pm_vm_place(m, by.op, place, sizeof place), advice(&by));
  }
  thread *first = m->threads + (size_t)(t->block - m->blocks) * m->n_threads;
  for (thread *u = first; u < first + m->n_threads; u++) {
    uint32_t n = 0;
    for (uint32_t j = 0; j < u->n_uses; j++) {
      const tmem_use *use = &u->uses[j];
      const bool issued = use->stage == USE_ISSUED;
      /* a load may still read when the next scope uses the columns */
      if (!meet(&use->place, &p) || (issued && !use->store)) u->uses[n++] = *use;
      else if (issued)
        return pm_vm_fail(m, t, op, PM_E_VALUE,
                          "the scope of '%s' ends while the async_store_tmem%s may still write to "
                          "it; commit_tmem must follow the store",
                          x->name, pm_vm_place(m, use->op, place, sizeof place));
    }
    u->n_uses = n;
  }
  return STEP_NEXT;
}

/* A commit for a pair that arrives in the other block has to be seen there, or a later one: nothing
 * else says that the arrival came before that block ended. */
static step check_commits(pm_machine *m, const cluster *c) {
  char place[64];
  for (uint32_t k = m->n_commits; k-- > 0;) {
    const commit_note n = m->commits[k];
    block *b = n.barrier->block;
    if (b->cluster != c) continue;
    m->commits[k] = m->commits[--m->n_commits];
    if (n.by->block == b || n.number <= n.by->peer_saw) continue;
    return pm_vm_fail(m, n.by, n.op, PM_E_VALUE,
                      "block %s ends, and none of its threads has waited for this commit, which "
                      "arrives there as well, or for a later one; wait for it in both blocks",
                      pm_vm_block(m, b, place, sizeof place));
  }
  return STEP_NEXT;
}

/* How much oftener a leader came to the ops of a kind than the other block of its pair. */
static int64_t ahead(const pm_machine *m, const block *b, const char *name) {
  int64_t n = 0;
  for (uint32_t k = 0; k < m->n_pairs; k++)
    if (m->pair_ops[k].name == name) n += (int64_t)b->n_pairs[k] - b[1].n_pairs[k];
  return n;
}

/* The cluster has ended: the blocks of its pairs came to the ops of each kind equally often. */
step pm_vm_check_pairs(pm_machine *m, const cluster *c) {
  for (block *b = c->blocks; b < c->blocks + m->n_blocks; b += 2) {
    thread *t = &m->threads[(size_t)(b - m->blocks) * m->n_threads];
    for (uint32_t k = 0; k < m->n_pairs; k++) {
      if (b->n_pairs[k] == b[1].n_pairs[k] || !ahead(m, b, m->pair_ops[k].name)) continue;
      return pm_vm_fail(m, t, m->pair_ops[k].op, PM_E_VALUE,
                        "the leader of a pair of blocks executed this op with collective_axis %u "
                        "times, the other block %u times; both must call it",
                        b->n_pairs[k], b[1].n_pairs[k]);
    }
  }
  return check_commits(m, c);
}

/* A copy, or a store, is about to overwrite SMEM that a product in flight reads. */
step pm_vm_check_operands(pm_machine *m, const task *copy) {
  char place[600], agent[512];
  const block *to = copy->barrier->block;
  const cluster *c = to->cluster;
  const thread *first = m->threads + (size_t)(c->blocks - m->blocks) * m->n_threads;
  for (const thread *t = first; t < first + m->n_blocks * m->n_threads; t++) {
    for (uint32_t w = 0; w <= (m->has_warps ? WARPS : 0u); w++) {
      const thread *u = w ? pm_vm_warps(m, t) + w - 1 : t;
      for (const task *k = u->tensor_first; k; k = k->next) {
        if (k->i->tensor->barrier) continue;
        const block *own = k->places[0].block;
        for (int n = 0; n < (k->i->tensor->pair ? 2 : 1); n++) {
          const located a = in_block(&k->lhs, own, own + n), b = in_block(&k->rhs, own, own + n);
          const bool hit = (a.mem && pm_vm_overlap(&a, &copy->smem)) ||
                           (b.mem && pm_vm_overlap(&b, &copy->smem));
          if (!hit) continue;
          return pm_vm_fail(
              m, copy->owner, copy->i->op, PM_E_VALUE,
              "copy_gmem_to_smem overwrites '%s' while the %s%s of %s may still read it. Wait "
              "before for a barrier on which a tcgen05_commit_arrive after it arrives",
              copy->smem.mem->name, k->i->tensor->name,
              pm_vm_place(m, k->i->op, place, sizeof place),
              pm_vm_agent(m, u, agent, sizeof agent));
        }
      }
    }
  }
  return STEP_NEXT;
}

/* ---- reductions ----------------------------------------------------------------------------- */

#define REDUCE_ROWS(name, T, ABS)                                                         \
  static void name(const instr *i, const T *x, T *out, int64_t n) {                       \
    const bool max = i->flags == PM_TMEM_REDUCE_MAX || i->flags == PM_TMEM_REDUCE_ABSMAX; \
    for (uint32_t r = 0; r < i->n; r++, x += n) {                                         \
      T best = ABS(x[0]);                                                                 \
      for (int64_t k = 1; k < n; k++) {                                                   \
        const T y = ABS(x[k]);                                                            \
        if (y != y || (max ? y > best : y < best)) best = best != best ? best : y;        \
      }                                                                                   \
      out[r] = best;                                                                      \
    }                                                                                     \
  }
#define SAME(x) (x)
#define MAGNITUDE(x) (i->flags >= PM_TMEM_REDUCE_ABSMAX ? __builtin_fabsf(x) : (x))
REDUCE_ROWS(reduce_f32, float, MAGNITUDE)
REDUCE_ROWS(reduce_i32, int32_t, SAME)
REDUCE_ROWS(reduce_u32, uint32_t, SAME)

/* n rows of `to` elements; flags: PM_TMEM_REDUCE */
static step exec_reduced(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  const void *x = slot_of(t, i->a);
  void *out = slot_of(t, i->dst);
  if (i->dtype == PM_F32) reduce_f32(i, x, out, i->to);
  else if (i->dtype == PM_I32) reduce_i32(i, x, out, i->to);
  else reduce_u32(i, x, out, i->to);
  return STEP_NEXT;
}

/* ---- cluster launch control ----------------------------------------------------------------- */

/* The answer: a grid point that has not begun, in the order of the grid; -1: none is left. */
static step run_cancel(pm_machine *m, task *k) {
  device *d = &m->devices[k->owner->block->cluster->device];
  const int64_t point = d->begun < m->points ? d->begun++ : -1;
  int32_t answer[4] = {(int32_t)point, 0, 0, point >= 0};
  thread *t = k->owner;
  const block *own = t->block;
  const pm_opid op = k->i->op;
  if (point >= 0) m->points_done++;
  for (block *u = own->cluster->blocks; u < own->cluster->blocks + m->n_blocks; u++) {
    const located s = in_block(&k->smem, own, u);
    barrier *b = u->bars + (k->barrier - own->bars);
    task there = *k; /* tracked by the block's own barrier */
    there.barrier = b;
    if (m->races && pm_race_engine(m, &there, &s, WRITE) == STEP_FAIL) return STEP_FAIL;
    memcpy(s.at, answer, sizeof answer);
    if (m->poison) pm_poison_defined(m, t, &s);
    if (pm_vm_transfer_done(m, t, op, b) == STEP_FAIL) return STEP_FAIL;
  }
  if (m->timeline) pm_time_landed(m, k);
  pm_vm_end_task(m, k);
  return STEP_NEXT;
}

/* The first thread of the first block of a cluster to ask asks for all: the others get its answer
 * with their own arrival. */
static step exec_try_cancel(pm_machine *m, thread *t, const instr *i) {
  located s;
  barrier *b = pm_vm_barrier(m, t, i, i->mem2);
  if (!b) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "try_cluster_cancel");
  const bool asks = t->index == 0;
  if (!asks || t->block != t->block->cluster->blocks) {
    return pm_vm_arrive(m, t, i->op, b, asks) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
  }
  cluster *c = t->block->cluster;
  if (c->refused) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "try_cluster_cancel after an answer that there was no grid point left, which "
                      "is undefined; leave the loop when query_cluster_cancel gave False");
  }
  task *k = pm_vm_new_task(m, t, i, TASK_LOAD);
  if (!k) return STEP_FAIL;
  k->run = run_cancel;
  k->barrier = b;
  k->smem = s;
  k->gmem.mem = NULL;
  if (m->races) pm_race_issue(m, t, k);
  if (m->timeline) pm_time_issue(m, t, k);
  return pm_vm_arrive(m, t, i->op, b, 1) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static step exec_query_cancel(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "query_cluster_cancel");
  if (m->races && pm_race_plain(m, t, i, &s, READ, THREAD) == STEP_FAIL) return STEP_FAIL;
  int32_t *out = slot_of(t, i->dst);
  memcpy(out, s.at, sizeof *out);
  if (*out < 0) t->block->cluster->refused = true;
  return STEP_PAUSE;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* The buffer of a copy of rows: where each begins in GMEM, NULL where it does not exist; then the
 * elements on their way to GMEM, and their marks. */
static char **rows_of(const task *k) { return (char **)(void *)k->buffer; }
static int64_t row_bytes(const task *k) { return k->smem.mem->dim[1] * k->smem.mem->bytes; }

static step locate_rows(pm_machine *m, thread *t, const instr *i, task *k, bool out) {
  const char *what = out ? "copy_smem_to_gmem" : "copy_gmem_to_smem";
  pm_vm_locate(m, t, out ? i->mem2 : i->mem, &k->gmem);
  pm_vm_locate(m, t, out ? i->mem : i->mem2, &k->smem);
  if (!k->gmem.inside) return pm_vm_outside(m, t, i->op, &k->gmem, what);
  if (!k->smem.inside) return pm_vm_outside(m, t, i->op, &k->smem, what);
  const access *of = k->gmem.mem;
  const int64_t n = k->smem.mem->dim[0];
  const uint32_t *rows = slot_of(t, i->a);
  if (!pm_vm_want_buffer(k, (size_t)n * (sizeof(char *) + (out ? 2 * (size_t)row_bytes(k) : 0)))) {
    return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for a copy");
  }
  for (int64_t r = 0; r < n; r++) {
    rows_of(k)[r] = rows[r] < of->dim[0] ? k->gmem.at + rows[r] * of->stride[0] * of->bytes : NULL;
  }
  if (m->races) pm_race_issue(m, t, k);
  if (m->timeline) pm_time_issue(m, t, k);
  return STEP_NEXT;
}

static step run_gather(pm_machine *m, task *k) {
  const access *to = k->smem.mem;
  const int64_t n = row_bytes(k);
  if (m->races && (pm_race_rows(m, k, &k->gmem, rows_of(k), to->dim[0], READ) == STEP_FAIL ||
                   pm_race_engine(m, k, &k->smem, WRITE) == STEP_FAIL)) {
    return STEP_FAIL;
  }
  for (int64_t r = 0; r < to->dim[0]; r++) {
    char *at = k->smem.at + r * to->stride[0] * to->bytes;
    const char *from = rows_of(k)[r];
    if (from) memcpy(at, from, (size_t)n);
    else memset(at, 0, (size_t)n);
  }
  thread *t = k->owner;
  const pm_opid op = k->i->op;
  barrier *b = k->barrier;
  if (m->poison) pm_poison_defined(m, t, &k->smem);
  if (m->timeline) pm_time_landed(m, k);
  pm_vm_end_task(m, k);
  return pm_vm_transfer_done(m, t, op, b);
}

static step exec_gather(pm_machine *m, thread *t, const instr *i) {
  barrier *b = pm_vm_barrier(m, t, i, i->mem3);
  task *k = b ? pm_vm_new_task(m, t, i, TASK_LOAD) : NULL;
  if (!k) return STEP_FAIL;
  k->run = run_gather;
  k->barrier = b;
  k->from = 0;
  k->to = i->mem2->n;
  if (locate_rows(m, t, i, k, false) == STEP_FAIL) return STEP_FAIL;
  if (pm_vm_check_operands(m, k) == STEP_FAIL) return STEP_FAIL;
  return pm_vm_arrive(m, t, i->op, b, 1) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static step run_scatter(pm_machine *m, task *k) {
  const int64_t rows = k->smem.mem->dim[0], n = row_bytes(k);
  char *data = k->buffer + rows * (int64_t)sizeof(char *), *marks = data + rows * n;
  if (!k->read) {
    if (m->races && pm_race_engine(m, k, &k->smem, READ) == STEP_FAIL) return STEP_FAIL;
    pm_vm_gather(&k->smem, data);
    if (m->poison) pm_poison_read(m, k, marks);
    k->read = true;
    return STEP_NEXT;
  }
  if (m->races && pm_race_rows(m, k, &k->gmem, rows_of(k), rows, WRITE) == STEP_FAIL) {
    return STEP_FAIL;
  }
  for (int64_t r = 0; r < rows; r++) {
    char *to = rows_of(k)[r];
    if (!to) continue;
    memcpy(to, data + r * n, (size_t)n);
    char *beside = m->poison ? pm_poison_beside(m, k->owner, &k->gmem, to) : NULL;
    if (beside) memcpy(beside, marks + r * n, (size_t)n);
  }
  const step found = m->races ? pm_race_stored(m) : STEP_NEXT;
  pm_vm_end_store(m, k);
  return found;
}

/* Rows by their numbers, to GMEM. */
static step exec_scatter(pm_machine *m, thread *t, const instr *i) {
  task *k = pm_vm_new_store(m, t, i);
  if (!k) return STEP_FAIL;
  k->run = run_scatter;
  if (locate_rows(m, t, i, k, true) == STEP_FAIL) return STEP_FAIL;
  if (i->flags) pm_vm_close_group(m, t);
  return STEP_PAUSE;
}

const handler pm_vm_GATHER_G2S = {pm_vm_encode_plain, exec_gather, {0}};
const handler pm_vm_SCATTER_S2G = {pm_vm_encode_rows_out, exec_scatter, {0}};
const handler pm_vm_TRY_CANCEL = {
    pm_vm_encode_plain, exec_try_cancel, {.reaches = pm_vm_reaches_cluster}};
const handler pm_vm_QUERY_CANCEL = {pm_vm_encode_plain, exec_query_cancel, {0}};
const handler pm_vm_ALLOC_TMEM = {pm_vm_encode_alloc, NULL, {0}};
const handler pm_vm_TCGEN05_MMA = {
    pm_vm_encode_tensor, exec_tensor, {.reaches = pm_vm_reaches_pair}};
const handler pm_vm_TCGEN05_COMMIT = {
    pm_vm_encode_tensor, exec_tensor, {.reaches = pm_vm_reaches_pair}};
const handler pm_vm_COPY_S2T = {pm_vm_encode_tensor, exec_tensor, {.reaches = pm_vm_reaches_pair}};
const handler pm_vm_COPY_SCALES = {
    pm_vm_encode_tensor, exec_tensor, {.reaches = pm_vm_reaches_pair}};
const handler pm_vm_COPY_METADATA = {
    pm_vm_encode_tensor, exec_tensor, {.reaches = pm_vm_reaches_pair}};
const handler pm_vm_LOAD_TMEM = {pm_vm_encode_plain, exec_load, {0}};
const handler pm_vm_TMEM_REDUCED = {pm_vm_encode_reduced, exec_reduced, {0}};
const handler pm_vm_STORE_TMEM = {pm_vm_encode_plain, exec_store, {0}};
const handler pm_vm_COMMIT_TMEM = {pm_vm_encode_plain, exec_commit_tmem, {0}};
const handler pm_vm_WAIT_LOAD_TMEM = {pm_vm_encode_plain, exec_wait_load, {0}};
