/* What orders agents: vector clocks, moved by the places where the machine orders them.
 *
 * A clock is a sorted list of components with how much of each is ordered before its owner, in the
 * views of races.h. Components belong to a cluster that runs: a later cluster at the same place has
 * others, so that points of the grid are not ordered unless something orders them. A thread or warp
 * has one, which counts what it published; what engines do has components of its own, which count
 * what is awaited in order: the phases of a barrier, the bulk groups of a thread, its products. So
 * every asynchronous operation is told apart from all others as far as any wait can tell them
 * apart, and nothing has to be pruned.
 *
 *   arrive   the phase that is open learns what the agent knows. In another block it does so only
 * if the arrival was made with cluster scope; else what engines did, and the agent has seen
 *            complete, is all that it learns: a signal orders nothing outside of its scope
 *   phase    is complete: its clock is kept for the waiters, the next one begins with nothing
 *   fence    what the agent has seen is ordered before what engines do for it. Loads are so only if
 *            they are those of its own lanes
 *   meet     named barriers, turns, scopes that all threads enter, begin and end of a warp_map
 *   tensor   memory is ordered by fences of its own: arrivals on barriers with orders_tensor_core,
 *            commits and scopes note in CARRIED what the agent may rely on (TENSOR), every kind of
 *            order passes that on, and the waits on such barriers turn it into TENSOR
 *   kernels  griddepcontrol_wait: those before this one are complete. They are one component
 *   signal   a semaphore remembers the clocks of its signals in their order; who waits learns those
 *            that it needs, and no later ones
 *
 * After an agent has published its clock its own time goes on, so that what it does then is not
 * covered. */
#include <stdlib.h>

#include "races.h"

/* Beyond these the oldest are forgotten, in favour of "ordered". */
enum { MOST_SEEN = 4096, MOST_SIGNALS = 64 };

/* ---- components --------------------------------------------------------------------------- */

static uint32_t first_id(const pm_machine *m, const cluster *c) {
  return 1 + m->races->instance[c - m->clusters] * m->races->each;
}

uint32_t pm_race_agent_id(const pm_machine *m, component kind, const thread *t) {
  const cluster *c = t->block->cluster;
  const uint32_t n = m->races->n_agents / m->n_blocks;
  return first_id(m, c) + kind * m->races->n_agents + (uint32_t)(t->block - c->blocks) * n +
         t->observer;
}

static uint32_t barrier_number(const pm_machine *m, const barrier *b) {
  return (uint32_t)(b->block - b->block->cluster->blocks) * m->n_barriers +
         (uint32_t)(b - b->block->bars);
}

uint32_t pm_race_barrier_id(const pm_machine *m, component kind, const barrier *b) {
  const races *r = m->races;
  return first_id(m, b->block->cluster) + PER_AGENT * r->n_agents +
         (kind - PER_AGENT) * r->n_barriers + barrier_number(m, b);
}

component pm_race_kind(const races *r, uint32_t id) {
  if (id == EARLIER_KERNELS) return OWN;
  const uint32_t local = (id - 1) % r->each, agents = PER_AGENT * r->n_agents;
  if (local < agents) return local / r->n_agents;
  return PER_AGENT + (local - agents) / r->n_barriers;
}

/* ---- clocks ------------------------------------------------------------------------------- */

static bool reserve(races *r, vclock *c, uint32_t n) {
  if (n <= c->cap) return true;
  const uint32_t cap = (uint32_t)pm_max(n, 2 * (int64_t)c->cap);
  struct seen *at = pm_realloc(c->at, cap * sizeof *at);
  if (!at) {
    r->no_memory = true;
    return false;
  }
  c->at = at;
  c->cap = cap;
  return true;
}

static void clear(vclock *c) { c->n = c->floor = 0; }

static void copy(races *r, vclock *to, const vclock *from) {
  if (!reserve(r, to, from->n)) return;
  if (from->n) memcpy(to->at, from->at, from->n * sizeof *to->at);
  to->n = from->n;
  to->floor = from->floor;
}

/* At least so much of the component is ordered, in the views first to last. */
static void raise_to(races *r, vclock *c, uint32_t id, enum view first, enum view last,
                     uint32_t time) {
  const uint32_t k = pm_clock_place(c, id);
  if (k == c->n || c->at[k].id != id) {
    if (!reserve(r, c, c->n + 1)) return;
    memmove(c->at + k + 1, c->at + k, (c->n++ - k) * sizeof *c->at);
    c->at[k] = (struct seen){.id = id};
  }
  for (uint32_t v = first; v <= last; v++) {
    if (c->at[k].at[v] < time) c->at[k].at[v] = time;
  }
}

static void limit(vclock *c) {
  const uint32_t drop = c->n / 2;
  if (c->n <= MOST_SEEN) return;
  c->floor = (uint32_t)pm_max(c->floor, c->at[drop].id);
  c->n -= drop;
  memmove(c->at, c->at + drop, c->n * sizeof *c->at);
}

/* What of a clock others learn: all, or all but plain accesses other than to tensor memory. Or all
 * and what the agent may rely on in tensor memory. */
enum part { ALL, NO_ACCESSES, WITH_TENSOR };

static struct seen part_of(const races *r, const struct seen *x, enum part part) {
  struct seen out = *x;
  if (part == WITH_TENSOR) return out;
  out.at[TENSOR] = 0;
  if (part == ALL || pm_race_kind(r, x->id) != OWN) return out;
  return (struct seen){.id = x->id, .at = {[CARRIED] = x->at[CARRIED]}};
}

static void join(races *r, vclock *to, const vclock *from, enum part part) {
  uint32_t more = 0, a = 0;
  for (uint32_t b = 0; b < from->n; b++) {
    while (a < to->n && to->at[a].id < from->at[b].id) a++;
    more += a == to->n || to->at[a].id != from->at[b].id;
  }
  if (!reserve(r, to, to->n + more)) return;
  to->floor = (uint32_t)pm_max(to->floor, from->floor);
  uint32_t i = to->n, out = to->n + more;
  to->n = out;
  for (uint32_t b = from->n; b-- > 0;) {
    const struct seen x = part_of(r, &from->at[b], part);
    while (i > 0 && to->at[i - 1].id > x.id) to->at[--out] = to->at[--i];
    if (i == 0 || to->at[i - 1].id != x.id) {
      to->at[--out] = x;
      continue;
    }
    struct seen *y = &to->at[--out];
    *y = to->at[--i];
    for (uint32_t v = 0; v < VIEWS; v++) y->at[v] = y->at[v] < x.at[v] ? x.at[v] : y->at[v];
  }
  limit(to);
}

/* ---- agents ------------------------------------------------------------------------------- */

static vclock *clock_of(const pm_machine *m, const thread *t) {
  return &m->races->agents[t - m->threads].clock;
}

const vclock *pm_race_clock(const pm_machine *m, const thread *t) { return clock_of(m, t); }

static void tick(pm_machine *m, const thread *t) {
  vclock *c = clock_of(m, t);
  const uint32_t id = pm_race_agent_id(m, OWN, t);
  const uint32_t now = pm_clock_at(c, id, SEEN) + 1;
  raise_to(m->races, c, id, SEEN, SEEN, now);
  raise_to(m->races, c, id, TENSOR, TENSOR, now);
}

static void publish(pm_machine *m, const thread *t, vclock *to, enum part part) {
  join(m->races, to, clock_of(m, t), part);
  tick(m, t);
}

static void learn(pm_machine *m, const thread *t, const vclock *from) {
  join(m->races, clock_of(m, t), from, ALL);
}

/* The fence of tensor memory that stands before synchronisation, or the one after it. */
static void tensor_fence(vclock *c, enum view from, enum view to) {
  for (uint32_t k = 0; k < c->n; k++) {
    if (c->at[k].at[to] < c->at[k].at[from]) c->at[k].at[to] = c->at[k].at[from];
  }
}

void pm_race_fence(pm_machine *m, const thread *t, bool by_author) {
  vclock *c = clock_of(m, t);
  for (uint32_t k = 0; k < c->n; k++) {
    c->at[k].at[FENCED] = c->at[k].at[SEEN];
    if (by_author) c->at[k].at[BY_AUTHOR] = c->at[k].at[SEEN];
  }
  const uint32_t warps = m->has_warps && !t->of ? WARPS : 0;
  for (uint32_t w = 0; w <= warps; w++) {
    const thread *own = w ? &pm_vm_warps(m, t)[w - 1] : t;
    const uint32_t id = pm_race_agent_id(m, OWN, own), k = pm_clock_place(c, id);
    if (k < c->n && c->at[k].id == id) c->at[k].at[DRAINED] = c->at[k].at[SEEN];
  }
  tick(m, t);
}

void pm_race_fork(pm_machine *m, const thread *t) {
  thread *w = pm_vm_warps(m, t);
  for (const thread *end = w + WARPS; w < end; w++) {
    copy(m->races, clock_of(m, w), clock_of(m, t));
    tick(m, w);
  }
  tick(m, t);
}

void pm_race_end_warp(pm_machine *m, const thread *w) {
  publish(m, w, clock_of(m, w->of), WITH_TENSOR);
}

void pm_race_meet(pm_machine *m, const block *b) {
  const thread *first = m->threads + (size_t)(b - m->blocks) * m->n_threads;
  vclock *all = &m->races->all;
  clear(all);
  for (uint32_t k = 0; k < m->n_threads; k++) {
    tensor_fence(clock_of(m, first + k), TENSOR, CARRIED);
    publish(m, first + k, all, ALL);
  }
  for (uint32_t k = 0; k < m->n_threads; k++) {
    learn(m, first + k, all);
    tensor_fence(clock_of(m, first + k), CARRIED, TENSOR);
  }
}

static vclock *named_of(const pm_machine *m, const block *b, uint32_t number) {
  return &m->races->named[(size_t)(b - m->blocks) * NAMED_BARRIERS + number];
}

void pm_race_come(pm_machine *m, const thread *t, uint32_t number) {
  publish(m, t, named_of(m, t->block, number), ALL);
}

void pm_race_leave(pm_machine *m, const thread *t, uint32_t number) {
  learn(m, t, named_of(m, t->block, number));
}

void pm_race_end_round(pm_machine *m, const block *b, uint32_t number) {
  clear(named_of(m, b, number));
}

void pm_race_leave_section(pm_machine *m, const thread *t) {
  vclock *turn = &m->races->turns[t->block - m->blocks];
  clear(turn);
  publish(m, t, turn, ALL);
}

void pm_race_enter_section(pm_machine *m, const thread *t) {
  learn(m, t, &m->races->turns[t->block - m->blocks]);
}

void pm_race_await_kernels(pm_machine *m, const thread *t) {
  raise_to(m->races, clock_of(m, t), EARLIER_KERNELS, SEEN, BY_AUTHOR, 1);
}

/* Loads from tensor memory are complete when they were awaited: like what engines did, they are so
 * for who learns of an arrival without cluster scope. */
uint32_t pm_race_next_loads(const pm_machine *m, const thread *t) {
  return m->races->agents[t - m->threads].loads + 1;
}

void pm_race_await_loads(pm_machine *m, const thread *t) {
  const uint32_t n = ++m->races->agents[t - m->threads].loads;
  raise_to(m->races, clock_of(m, t), pm_race_agent_id(m, LOADS, t), SEEN, TENSOR, n);
}

/* ---- barriers ----------------------------------------------------------------------------- */

static barrier_order *order_of(const pm_machine *m, const barrier *b) {
  return &m->races->barriers[(size_t)(b->block - m->blocks) * m->n_barriers +
                             (size_t)(b - b->block->bars)];
}

uint32_t pm_race_open_phase(const pm_machine *m, const barrier *b) {
  return order_of(m, b)->phases + 1;
}

void pm_race_tell_tensor(pm_machine *m, const thread *t) {
  tensor_fence(clock_of(m, t), TENSOR, CARRIED);
}

void pm_race_arrive(pm_machine *m, const thread *t, const barrier *b, bool in_cluster) {
  const bool own = in_cluster || b->block == t->block;
  publish(m, t, &order_of(m, b)->open, own ? ALL : NO_ACCESSES);
}

void pm_race_phase(pm_machine *m, const barrier *b, bool copied) {
  barrier_order *o = order_of(m, b);
  const vclock done = o->done;
  o->done = o->open;
  o->open = done;
  clear(&o->open);
  o->phases++;
  if (!copied) return;
  raise_to(m->races, &o->done, pm_race_barrier_id(m, COPIES, b), SEEN, BY_AUTHOR, o->phases);
  raise_to(m->races, &o->done, pm_race_barrier_id(m, REMOTE, b), SEEN, SEEN, o->phases);
}

void pm_race_wait(pm_machine *m, const thread *t, const barrier *b) {
  learn(m, t, &order_of(m, b)->done);
  if (b->info->tensor_core) tensor_fence(clock_of(m, t), CARRIED, TENSOR);
}

/* ---- asynchronous operations -------------------------------------------------------------- */

/* Who issues to a queue: its owner, and a thread's warp 0; n is 0 or 1. */
static const thread *issuer_of(const pm_machine *m, const task *k, int n) {
  return n && m->has_warps && !k->owner->of ? pm_vm_warps(m, k->owner) : k->owner;
}

/* A tensor core works in the order of its queue. */
static void follow_queue(pm_machine *m, task *k) {
  for (int n = 0; n < 2; n++) {
    const thread *t = issuer_of(m, k, n);
    raise_to(m->races, &k->issued, pm_race_agent_id(m, PRODUCTS, t), SEEN, TENSOR,
             m->races->agents[t - m->threads].products);
  }
}

/* Of a clock, what threads and warps of a block did. */
static void join_block(pm_machine *m, vclock *to, const vclock *from, const block *b) {
  const uint32_t n = m->races->n_agents / m->n_blocks;
  const uint32_t first = first_id(m, b->cluster) + (uint32_t)(b - b->cluster->blocks) * n;
  for (uint32_t k = pm_clock_place(from, first); k < from->n && from->at[k].id < first + n; k++) {
    for (enum view v = SEEN; v < TENSOR; v++) {
      raise_to(m->races, to, from->at[k].id, v, v, from->at[k].at[v]);
    }
  }
}

/* The products are complete, and so is what their issuer, which may be a warp of the owner, knew of
 * when it issued them: they waited for it. The arrival in the other block has no known scope:
 * there, what engines did counts, and what the issuer had learned from agents of that block. */
void pm_race_commit(pm_machine *m, const task *k, const barrier *b) {
  const bool own = b->block == k->owner->block;
  vclock *to = &order_of(m, b)->open;
  join(m->races, to, &k->issued, own ? ALL : NO_ACCESSES);
  if (!own) join_block(m, to, &k->issued, b->block);
  for (int n = 0; n < 2; n++) {
    const uint32_t id = pm_race_agent_id(m, PRODUCTS, issuer_of(m, k, n));
    raise_to(m->races, to, id, SEEN, CARRIED, pm_clock_at(&k->issued, id, SEEN));
  }
}

void pm_race_issue(pm_machine *m, thread *t, task *k) {
  copy(m->races, &k->issued, clock_of(m, t));
  k->issuer = t;
  k->number = ++m->races->agents[t - m->threads].products;
  if (k->kind == TASK_TENSOR) {
    follow_queue(m, k);
    tensor_fence(&k->issued, TENSOR, CARRIED); /* a commit stands for it */
  }
  if ((k->kind == TASK_STORE && !k->i->lowered) || k->kind == TASK_FETCH) {
    agent_order *o = &m->races->agents[k->owner - m->threads];
    o->stores = (uint32_t)k->group + 1;
    o->store = k->i->op;
  }
  tick(m, t);
}

/* Of `owner`, the groups below `done` are complete, or have been read. */
void pm_race_stores_done(pm_machine *m, const thread *t, const thread *owner, int64_t done,
                         bool read_only) {
  vclock *c = clock_of(m, t);
  const uint32_t time = (uint32_t)pm_max(done, 0);
  raise_to(m->races, c, pm_race_agent_id(m, STORE_READS, owner), SEEN, BY_AUTHOR, time);
  if (!read_only) raise_to(m->races, c, pm_race_agent_id(m, STORES, owner), SEEN, BY_AUTHOR, time);
}

void pm_race_product_done(pm_machine *m, const thread *t, const task *k) {
  raise_to(m->races, clock_of(m, t), pm_race_agent_id(m, PRODUCTS, t), SEEN, BY_AUTHOR, k->number);
}

/* ---- semaphores --------------------------------------------------------------------------- */

/* Of a word of an argument, which had a value before the launch: no signal of it counts for that.
 * NULL: no memory. */
static semaphore_order *word_of(races *r, const uint32_t *s) {
  uint32_t k = 0;
  while (k < r->n_words && r->words[k].at != s) k++;
  if (k < r->n_words) return &r->words[k].order;
  if (k == r->cap_words) {
    const uint32_t cap = k ? 2 * k : 16;
    word_order *words = pm_realloc(r->words, cap * sizeof *words);
    if (!words) {
      r->no_memory = true;
      return NULL;
    }
    r->words = words;
    r->cap_words = cap;
  }
  memset(&r->words[k], 0, sizeof *r->words);
  r->words[r->n_words++].at = s;
  return &r->words[k].order;
}

static semaphore_order *semaphore_of(const pm_machine *m, const block *b, const uint32_t *s) {
  const races *r = m->races;
  const uint32_t *end = m->semaphores + (size_t)m->n_devices * m->n_semaphores;
  const uint32_t *own = b->semaphores + m->n_block_semaphores;
  if (s >= m->semaphores && s < end) return &r->semaphores[s - m->semaphores];
  if (s < b->semaphores || s >= own) return word_of((races *)r, s);
  return &r->block_semaphores[(size_t)(b - m->blocks) * m->n_block_semaphores +
                              (size_t)(s - b->semaphores)];
}

/* The oldest two signals become one. */
static void merge_oldest(semaphore_order *s) {
  const vclock first = s->at[0].clock;
  memmove(s->at, s->at + 1, --s->n * sizeof *s->at);
  s->at[s->n].clock = first;
}

static signalled *new_signal(races *r, semaphore_order *s) {
  if (s->n == MOST_SIGNALS) merge_oldest(s);
  if (s->n == s->cap) {
    const uint32_t cap = s->cap ? 2 * s->cap : 4;
    signalled *at = pm_realloc(s->at, cap * sizeof *at);
    if (!at) {
      r->no_memory = true;
      return NULL;
    }
    memset(at + s->cap, 0, (cap - s->cap) * sizeof *at);
    s->at = at;
    s->cap = cap;
  }
  clear(&s->at[s->n].clock);
  return &s->at[s->n++];
}

/* What it was before the first signal. */
static void start_count(semaphore_order *s, uint32_t value) {
  if (!s->counts) s->total = value;
  s->counts = true;
}

void pm_race_signal(pm_machine *m, const thread *t, const uint32_t *at, int32_t amount) {
  semaphore_order *s = semaphore_of(m, t->block, at);
  if (!s) return;
  start_count(s, *at - (uint32_t)amount);
  const bool down = amount <= 0; /* who waits next may have needed any of them */
  while (down && s->n > 1) merge_oldest(s);
  signalled *x = down && s->n ? &s->at[0] : new_signal(m->races, s);
  if (!x) return;
  if (s->n > 1) copy(m->races, &x->clock, &s->at[s->n - 2].clock);
  s->total += amount;
  x->total = s->total;
  publish(m, t, &x->clock, ALL);
}

void pm_race_await(pm_machine *m, const thread *t, const uint32_t *at, uint32_t least, bool take) {
  semaphore_order *s = semaphore_of(m, t->block, at);
  if (!s) return;
  start_count(s, *at);
  /* = taken + least, but that counts of the program wrap */
  const int64_t need = s->total - (int32_t)((uint32_t)(s->total - s->taken) - least);
  uint32_t k = 0;
  while (k + 1 < s->n && s->at[k].total < need) k++;
  if (s->n && need) learn(m, t, &s->at[k].clock);
  if (take) s->taken += least;
}

void pm_race_read_semaphore(pm_machine *m, const thread *t, const uint32_t *at) {
  semaphore_order *s = semaphore_of(m, t->block, at);
  if (!s) return;
  start_count(s, *at);
  if (s->n) learn(m, t, &s->at[s->n - 1].clock);
}

static void reset_semaphore(semaphore_order *s) {
  s->n = 0, s->total = s->taken = 0;
  s->counts = false;
}

void pm_race_reset_semaphores(pm_machine *m, const block *b, uint32_t first, uint32_t n) {
  semaphore_order *s =
      m->races->block_semaphores + (size_t)(b - m->blocks) * m->n_block_semaphores + first;
  for (uint32_t k = 0; k < n; k++) reset_semaphore(&s[k]);
}

/* ---- a run -------------------------------------------------------------------------------- */

static uint32_t all_blocks(const pm_machine *m) { return m->n_clusters * m->n_blocks; }

/* The kernel of a device has ended when all its threads have. */
void pm_race_end_cluster(pm_machine *m, const cluster *c) {
  const size_t at = (size_t)(c->blocks - m->blocks) * m->n_threads;
  if (!m->races->ends) return;
  for (const thread *t = m->threads + at; t < m->threads + at + m->n_blocks * m->n_threads; t++) {
    join(m->races, &m->races->ends[c->device], clock_of(m, t), ALL);
  }
}

void pm_race_begin_cluster(pm_machine *m, const cluster *c) {
  races *r = m->races;
  r->instance[c - m->clusters] = r->instances++;
  r->shadow.full |= (uint64_t)(r->instances + 1) * r->each > UINT32_MAX;
  for (const block *b = c->blocks; b < c->blocks + m->n_blocks; b++) {
    const size_t at = (size_t)(b - m->blocks);
    const thread *first = m->threads + at * m->n_threads;
    for (const thread *t = first; t < first + m->n_threads; t++) {
      for (uint32_t w = 0; w <= (m->has_warps ? WARPS : 0); w++) {
        const thread *own = w ? &pm_vm_warps(m, t)[w - 1] : t;
        clear(clock_of(m, own));
        r->agents[own - m->threads].products = r->agents[own - m->threads].stores = 0;
        r->agents[own - m->threads].loads = 0;
        tick(m, own);
      }
    }
    for (uint32_t k = 0; k < m->n_barriers; k++) {
      barrier_order *o = &r->barriers[at * m->n_barriers + k];
      clear(&o->open);
      clear(&o->done);
      o->phases = 0;
    }
    for (uint32_t k = 0; k < NAMED_BARRIERS; k++) clear(named_of(m, b, k));
    clear(&r->turns[at]);
    pm_race_reset_semaphores(m, b, 0, m->n_block_semaphores);
    pm_shadow_clear(&r->shadow, &r->shadow.regions[at]);
    pm_shadow_clear(&r->shadow, &r->shadow.regions[all_blocks(m) + m->n_buffers + at]);
  }
}

static void *zeroed(size_t n, size_t bytes) {
  void *p = pm_malloc(n * bytes + 1);
  if (p) memset(p, 0, n * bytes);
  return p;
}

static bool make_region(shadow *s, region *g, size_t bytes) {
  const size_t n = bytes / PAGE + 1;
  g->pages = zeroed(n, sizeof(page));
  if (!g->pages) return false;
  g->n_pages = n;
  s->bytes += n * sizeof(page);
  return true;
}

/* The SMEM of each block, its TMEM after the arguments, and each memory that arguments lie in, if
 * the kernel writes there. */
static bool make_regions(pm_machine *m) {
  races *r = m->races;
  const uint32_t blocks = all_blocks(m);
  r->root = zeroed(m->n_buffers, sizeof *r->root);
  r->shadow.n_regions = 2 * blocks + m->n_buffers;
  r->shadow.regions = zeroed(r->shadow.n_regions, sizeof *r->shadow.regions);
  if (!r->root || !r->shadow.regions) return false;
  for (uint32_t k = 0; k < blocks; k++) {
    region *tmem = &r->shadow.regions[blocks + m->n_buffers + k];
    if (!make_region(&r->shadow, &r->shadow.regions[k], m->smem_bytes) ||
        !make_region(&r->shadow, tmem, (size_t)m->tmem_columns * 4)) {
      return false;
    }
  }
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    size_t bytes = 0;
    bool written = false;
    while (m->buffers[r->root[k]] != m->buffers[k]) r->root[k]++;
    for (uint32_t j = k; r->root[k] == k && j < m->n_buffers; j++) {
      if (m->buffers[j] != m->buffers[k]) continue;
      written |= m->args[j % m->n_args].written;
      bytes = (size_t)pm_max((int64_t)bytes, (int64_t)m->args[j % m->n_args].bytes);
    }
    if (written && !make_region(&r->shadow, &r->shadow.regions[blocks + k], bytes)) return false;
  }
  return true;
}

bool pm_race_begin(pm_machine *m) {
  races *r = m->races = zeroed(1, sizeof *r);
  if (!r) return false;
  r->n_agents = pm_vm_agents(m) / m->n_clusters;
  r->n_barriers = m->n_blocks * m->n_barriers;
  r->each = PER_AGENT * r->n_agents + (COMPONENTS - PER_AGENT) * r->n_barriers;
  r->instance = zeroed(m->n_clusters, sizeof *r->instance);
  r->agents = zeroed(pm_vm_agents(m), sizeof *r->agents);
  r->barriers = zeroed((size_t)all_blocks(m) * m->n_barriers, sizeof *r->barriers);
  r->named = zeroed((size_t)all_blocks(m) * NAMED_BARRIERS, sizeof *r->named);
  r->turns = zeroed(all_blocks(m), sizeof *r->turns);
  r->semaphores = zeroed((size_t)m->n_devices * m->n_semaphores, sizeof *r->semaphores);
  r->block_semaphores =
      zeroed((size_t)all_blocks(m) * m->n_block_semaphores, sizeof *r->block_semaphores);
  if (m->n_devices > 1 && !(r->ends = zeroed(m->n_devices, sizeof *r->ends))) return false;
  return r->instance && r->agents && r->barriers && r->named && r->turns && r->semaphores &&
         r->block_semaphores && make_regions(m);
}

static void free_signals(semaphore_order *s) {
  for (uint32_t j = 0; j < s->cap; j++) pm_free(s->at[j].clock.at);
  pm_free(s->at);
}

static void free_semaphores(semaphore_order *s, size_t n) {
  for (size_t k = 0; s && k < n; k++) free_signals(&s[k]);
  pm_free(s);
}

static void free_clocks(vclock *c, size_t n) {
  for (size_t k = 0; c && k < n; k++) pm_free(c[k].at);
  pm_free(c);
}

void pm_race_end(pm_machine *m) {
  races *r = m->races;
  if (!r) return;
  for (uint32_t k = 0; r->agents && k < pm_vm_agents(m); k++) pm_free(r->agents[k].clock.at);
  for (size_t k = 0; r->barriers && k < (size_t)all_blocks(m) * m->n_barriers; k++) {
    pm_free(r->barriers[k].open.at);
    pm_free(r->barriers[k].done.at);
  }
  free_clocks(r->named, (size_t)all_blocks(m) * NAMED_BARRIERS);
  free_clocks(r->turns, all_blocks(m));
  free_clocks(r->ends, m->n_devices);
  free_semaphores(r->semaphores, (size_t)m->n_devices * m->n_semaphores);
  for (uint32_t k = 0; k < r->n_words; k++) free_signals(&r->words[k].order);
  pm_free(r->words);
  free_semaphores(r->block_semaphores, (size_t)all_blocks(m) * m->n_block_semaphores);
  pm_free(r->all.at);
  pm_free(r->agents);
  pm_free(r->barriers);
  pm_free(r->instance);
  pm_free(r->reported);
  pm_free(r->root);
  pm_free(r->old);
  pm_free(r->places);
  pm_shadow_free(&r->shadow);
  pm_free(r);
  m->races = NULL;
}
