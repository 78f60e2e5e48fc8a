/* The timeline of a run: what each agent did and when, in the time of a simple model of the GPU.
 *
 * Every agent has a clock, in cycles of the SM. An instruction moves the clock of its thread on by
 * the cost of its op, which is computed when the graph is compiled. An agent that waits moves on to
 * the moment at which what it waits for happened: a phase of a barrier is complete at the latest
 * moment of its arrivals and of the bytes that they brought. So times follow from what orders the
 * agents, and not from the order in which the scheduler runs them; seeds change little.
 *
 * Copies and wgmmas take an engine of their block: the copy engine, limited by the share of the
 * memory bandwidth that an SM has, and the tensor cores. An engine does one operation at a time. As
 * the scheduler may run one thread far ahead of another, an operation gets the first gap that is
 * long enough from its moment of issue on, and not the end of a queue.
 *
 * The clusters of a launch take turns on the GPU's SMs: each starts where one ended first.
 *
 * Neighbouring instructions of one line of Python are one slice of work. A wait that costs time is
 * a slice of its own, and names what it waited for: the line that came last, and whose it is. */
#include "vm.h"

#include "../ir/access.h"

/* The model: rates of an H100, per SM and cycle, and latencies in cycles. */
enum {
  LANES_PER_CYCLE = 128,          /* of one instruction, by a thread's four warps */
  SPECIAL_PER_CYCLE = 16,         /* exp, log, division ... */
  SMEM_PER_CYCLE = 128,           /* bytes */
  GMEM_PER_CYCLE = 48,            /* bytes, largely from L2 */
  FMA_BYTES_PER_CYCLE = 4096,     /* wgmma: multiply-adds times bytes of an element of b */
  MMA_BYTES_PER_CYCLE = 2048,     /* mma */
  TCGEN05_BYTES_PER_CYCLE = 8192, /* of a B200 */
  SMEM_LATENCY = 30,
  GMEM_LATENCY = 500,
  COPY_LATENCY = 600,
  REMOTE_LATENCY = 200,
  WGMMA_LATENCY = 60,
  ISSUE = 8, /* an asynchronous operation, an arrival */
  MEET = 16, /* the lanes of a thread, or a wait that finds all done */
  SCALAR = 1,
  MOST_GAPS = 64,
  MOST_EVENTS = 1 << 18
};

/* A moment, and what made it so late. */
typedef struct moment {
  int64_t at;
  pm_opid op;
  const thread *by;
} moment;

typedef struct store {
  int64_t group, read, done;
  pm_opid op;
} store;

typedef struct agent {
  int64_t now, since; /* since: begin of the slice of work that is open */
  pm_opid op;         /* of that slice */
  const instr *last;
  int64_t tensor; /* when what its queue of a tensor core has so far is complete */
  store *stores;
  uint32_t n_stores, cap_stores;
} agent;

/* Disjoint intervals in which it is busy, in order. What ended before the first one is forgotten.
 */
typedef struct engine {
  int64_t from[MOST_GAPS], to[MOST_GAPS];
  uint32_t n;
} engine;

enum { COPIES, TENSOR_CORES, ENGINES };

typedef struct place_in_block {
  engine engines[ENGINES];
  moment turn, named[NAMED_BARRIERS];
} place_in_block;

/* Of the open phase, of the last complete one. */
typedef struct phase {
  moment open, done;
} phase;

struct timeline {
  agent *agents;
  place_in_block *blocks;
  phase *phases;      /* per block and barrier */
  moment *semaphores; /* of the launch, then of each block */
  int64_t *slots;     /* when each part of the GPU that holds a cluster is free */
  uint32_t *slot_of;  /* per cluster that runs: its slot */
  uint32_t n_slots;
  pm_timeline_event *events;
  uint32_t n_events, cap_events;
  pm_timeline_event lost; /* there was no room for it */
  bool truncated;
};

/* ---- costs -------------------------------------------------------------------------------- */

static int64_t elements(const pm_graph *g, pm_val v) {
  const pm_type *t = pm_typeof(g, v);
  return t->kind == PM_ARRAY ? pm_type_size(t) : 1;
}

static bool is_special(int code) { /* the functions of a float stand together in ops.def */
  return (code >= PM_OP_EXP && code <= PM_OP_COS) || code == PM_OP_POW || code == PM_OP_ATAN2 ||
         code == PM_OP_DIV || code == PM_OP_REM;
}

/* What an op does to memory, at once or by issuing it. */
static int64_t memory_cost(const pm_graph *g, pm_opid op) {
  int64_t cycles = 0;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    const pm_type *t = pm_typeof(g, a.view ? a.view : pm_get(g, op)->out);
    const int64_t bytes = a.view ? pm_type_size(t) * pm_dtypes[t->dtype].bytes : 4;
    if (a.where & (PM_IN_COUNTER | PM_IN_SEMAPHORE)) {
      cycles += a.reads ? GMEM_LATENCY : ISSUE;
    } else if (a.where & PM_IN_BARRIER) {
      cycles += a.reads ? MEET : ISSUE;
    } else if (pm_ops[pm_get(g, op)->code].completion != PM_COMPLETES_NOW) {
      continue;
    } else if (a.where & PM_IN_SMEM) {
      cycles += pm_cdiv(bytes, SMEM_PER_CYCLE) + (a.reads ? SMEM_LATENCY : 0);
    } else if (a.where & PM_IN_GMEM) {
      cycles += pm_cdiv(bytes, GMEM_PER_CYCLE) + (a.reads ? GMEM_LATENCY : 0);
    }
  }
  return cycles;
}

uint32_t pm_time_cost(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  const pm_op_info *info = &pm_ops[o->code];
  int64_t n = 1, cycles = memory_cost(g, op);
  if (pm_has_attr(g, op, PM_ATTR_ENDS) || pm_has_attr(g, op, PM_ATTR_VALUE) ||
      info->layout == PM_LAY_VIEW || info->effects & E_ALLOC)
    return 0; /* scopes with names, constants, views, allocations */
  for (uint32_t k = 0; k < o->n_in; k++) n = pm_max(n, elements(g, pm_in(g, op, k)));
  for (uint32_t k = 0; k < o->n_out; k++) n = pm_max(n, elements(g, o->out + k));
  if (info->layout == PM_LAY_MMA) {
    const pm_type *a = pm_typeof(g, pm_in(g, op, 1));
    const int64_t depth = a->dim[a->rank - 1];
    n = elements(g, o->out) * depth * pm_dtypes[a->dtype].bytes;
    return (uint32_t)pm_min(pm_cdiv(n, MMA_BYTES_PER_CYCLE), UINT32_MAX);
  }
  if (info->effects & E_MEET) cycles += MEET;
  if (info->completion != PM_COMPLETES_NOW) cycles += ISSUE;
  if (!cycles) cycles = n > 1 ? 0 : SCALAR;
  if (n > 1) cycles += pm_cdiv(n, is_special(o->code) ? SPECIAL_PER_CYCLE : LANES_PER_CYCLE);
  return (uint32_t)pm_min(cycles, UINT32_MAX);
}

/* ---- events ------------------------------------------------------------------------------- */

static agent *agent_of(const pm_machine *m, const thread *t) {
  return &m->timeline->agents[t - m->threads];
}

static place_in_block *block_of(const pm_machine *m, const block *b) {
  return &m->timeline->blocks[b - m->blocks];
}

static pm_timeline_agent name_of(const pm_machine *m, const thread *t) {
  return (pm_timeline_agent){
      .cluster = t->block->cluster->number + t->block->cluster->device * m->points,
      .block = (uint32_t)(t->block - t->block->cluster->blocks) % m->n_blocks,
      .thread = t->index,
      .warp = t->of ? (int)t->warp : -1};
}

static pm_timeline_event *add(pm_machine *m, pm_timeline_kind kind, const thread *t, pm_opid op,
                              int64_t begin, int64_t end) {
  timeline *x = m->timeline;
  if (x->n_events == x->cap_events) {
    const uint32_t cap = x->cap_events ? 2 * x->cap_events : 1024;
    pm_timeline_event *at =
        cap > MOST_EVENTS ? NULL : pm_realloc(x->events, cap * sizeof *x->events);
    if (!at) {
      x->truncated = true;
      return &x->lost;
    }
    x->events = at;
    x->cap_events = cap;
  }
  pm_timeline_event *e = &x->events[x->n_events++];
  *e = (pm_timeline_event){.kind = kind,
                           .agent = name_of(m, t),
                           .begin = begin,
                           .end = end,
                           .index = -1,
                           .file = m->places[op].file,
                           .line = m->places[op].line,
                           .what = m->places[op].what};
  return e;
}

static void close_slice(pm_machine *m, const thread *t) {
  agent *a = agent_of(m, t);
  if (a->now > a->since) add(m, PM_TIME_WORK, t, a->op, a->since, a->now);
  a->since = a->now;
}

static bool same_line(const place *a, const place *b) {
  return a->file == b->file && a->line == b->line;
}

static void charge(pm_machine *m, const thread *t, pm_opid op, int64_t cycles) {
  agent *a = agent_of(m, t);
  if (!cycles) return;
  if (!same_line(&m->places[op], &m->places[a->op])) close_slice(m, t);
  if (a->now == a->since) a->op = op;
  a->now += cycles;
}

/* NULL: it cost nothing. */
static pm_timeline_event *await(pm_machine *m, const thread *t, pm_opid op, moment until) {
  agent *a = agent_of(m, t);
  if (until.at <= a->now) return NULL;
  close_slice(m, t);
  pm_timeline_event *e = add(m, PM_TIME_WAIT, t, op, a->now, until.at);
  e->for_file = m->places[until.op].file;
  e->for_line = m->places[until.op].line;
  if (until.by) e->for_agent = name_of(m, until.by);
  a->now = a->since = until.at;
  return e;
}

static void later(moment *a, moment b) {
  if (b.at >= a->at) *a = b;
}

static moment now_of(const pm_machine *m, const thread *t, pm_opid op) {
  return (moment){agent_of(m, t)->now, op, t};
}

/* Before the instruction. One that blocked is tried again, and costs nothing then. */
void pm_time_step(pm_machine *m, const thread *t, const instr *i) {
  agent *a = agent_of(m, t);
  if (a->last != i) charge(m, t, i->op, m->places[i->op].cost);
  a->last = i;
}

/* ---- barriers ----------------------------------------------------------------------------- */

static phase *phase_of(const pm_machine *m, const barrier *b) {
  return &m->timeline
              ->phases[(b->block - m->blocks) * (int64_t)m->n_barriers + (b - b->block->bars)];
}

void pm_time_arrive(pm_machine *m, const thread *t, pm_opid op, const barrier *b) {
  later(&phase_of(m, b)->open, now_of(m, t, op));
}

void pm_time_phase(pm_machine *m, const barrier *b) {
  phase *p = phase_of(m, b);
  p->done = p->open;
  p->open = (moment){0};
}

void pm_time_wait(pm_machine *m, const thread *t, pm_opid op, const barrier *b) {
  pm_timeline_event *e = await(m, t, op, phase_of(m, b)->done);
  if (!e) return;
  e->what = b->info->name;
  if (b->info->count > 1) e->index = b - b->block->bars - b->info->first;
}

/* ---- engines ------------------------------------------------------------------------------ */

/* Begin of the first gap of `cycles` from `at` on; it is taken. */
static int64_t reserve(engine *e, int64_t at, int64_t cycles) {
  uint32_t k = 0;
  while (k < e->n && (e->to[k] <= at || e->from[k] < at + cycles)) {
    at = pm_max(at, e->to[k]);
    k++;
  }
  if (k && e->to[k - 1] == at) {
    e->to[k - 1] += cycles;
    return at;
  }
  if (e->n == MOST_GAPS) {
    if (!k) return at;
    memmove(e->from, e->from + 1, --e->n * sizeof *e->from);
    memmove(e->to, e->to + 1, e->n * sizeof *e->to);
    k--;
  }
  memmove(e->from + k + 1, e->from + k, (e->n - k) * sizeof *e->from);
  memmove(e->to + k + 1, e->to + k, (e->n++ - k) * sizeof *e->to);
  e->from[k] = at;
  e->to[k] = at + cycles;
  return at;
}

static int64_t bytes_of(const task *k) {
  const access *a = k->smem.mem;
  return (k->kind == TASK_LOAD && k->gmem.mem ? k->to - k->from : a->n) * a->bytes;
}

static void add_async(pm_machine *m, pm_timeline_kind kind, const task *k, int64_t begin,
                      const char *name) {
  add(m, kind, k->owner, k->i->op, begin, k->done)->what = name;
}

static void issue_store(pm_machine *m, task *k, int64_t read) {
  agent *a = agent_of(m, k->owner);
  if (a->n_stores == a->cap_stores) {
    const uint32_t cap = a->cap_stores ? 2 * a->cap_stores : 16;
    store *at = pm_realloc(a->stores, cap * sizeof *at);
    if (!at) return;
    a->stores = at;
    a->cap_stores = cap;
  }
  a->stores[a->n_stores++] = (store){k->group, read, k->done, k->i->op};
}

/* A product or copy of a queue; a commit is complete with what is before it. */
static void issue_tensor(pm_machine *m, task *k, int64_t now, engine *e) {
  const tensor_op *x = k->i->tensor;
  int64_t *last = &agent_of(m, k->owner)->tensor;
  k->done = pm_max(now, *last);
  if (x->barrier) return;
  const int64_t bits =
      x->b ? x->m * x->n * x->k * pm_dtypes[x->b_dtype].bits : 8 * (int64_t)x->a->n * x->a->bytes;
  const int64_t rate = 8 * (x->b ? TCGEN05_BYTES_PER_CYCLE : SMEM_PER_CYCLE);
  const int64_t begin = reserve(&e[TENSOR_CORES], now, pm_cdiv(bits, rate));
  *last = k->done = pm_max(*last, begin + pm_cdiv(bits, rate) + WGMMA_LATENCY);
  add_async(m, PM_TIME_PRODUCT, k, begin, k->places[0].mem->name);
}

void pm_time_committed(pm_machine *m, const task *k, const barrier *b) {
  later(&phase_of(m, b)->open, (moment){k->done, k->i->op, k->owner});
}

/* `t` issues it now. */
void pm_time_issue(pm_machine *m, const thread *t, task *k) {
  const int64_t now = agent_of(m, t)->now;
  engine *e = block_of(m, t->block)->engines;
  if (k->kind == TASK_TENSOR) {
    issue_tensor(m, k, now, e);
    return;
  }
  if (k->kind == TASK_MMA) {
    const access *acc = k->acc.mem;
    const int64_t depth = k->rhs.mem->n / acc->dim[1];
    const int64_t work = acc->dim[0] * acc->dim[1] * depth * k->rhs.mem->bytes;
    const int64_t cycles = pm_cdiv(work, FMA_BYTES_PER_CYCLE);
    const int64_t begin = reserve(&e[TENSOR_CORES], now, cycles);
    k->done = begin + cycles + WGMMA_LATENCY;
    add_async(m, PM_TIME_PRODUCT, k, begin, acc->name);
    return;
  }
  if (k->kind == TASK_LOAD && !k->gmem.mem) {
    k->done = now + pm_cdiv(bytes_of(k), SMEM_PER_CYCLE) + REMOTE_LATENCY;
    add_async(m, PM_TIME_COPY_IN, k, now, k->smem.mem->name);
    return;
  }
  const int64_t cycles = pm_cdiv(bytes_of(k), GMEM_PER_CYCLE);
  const int64_t begin = reserve(&e[COPIES], now, cycles);
  k->done = begin + cycles + COPY_LATENCY;
  if (k->kind != TASK_LOAD) issue_store(m, k, begin + cycles);
  add_async(m, k->kind == TASK_STORE ? PM_TIME_COPY_OUT : PM_TIME_COPY_IN, k, now,
            k->smem.mem->name);
}

/* The bytes of a copy are there; its barrier is told. */
void pm_time_landed(pm_machine *m, const task *k) {
  later(&phase_of(m, k->barrier)->open, (moment){k->done, k->i->op, k->owner});
}

void pm_time_stores_done(pm_machine *m, const thread *t, pm_opid op, const thread *owner,
                         int64_t done, bool read_only) {
  agent *a = agent_of(m, owner);
  moment until = {0};
  uint32_t left = 0;
  for (uint32_t k = 0; k < a->n_stores; k++) {
    const store *s = &a->stores[k];
    if (s->group < done) later(&until, (moment){read_only ? s->read : s->done, s->op, owner});
    if (s->group >= done || read_only) a->stores[left++] = *s;
  }
  a->n_stores = left;
  await(m, t, op, until);
}

void pm_time_product_done(pm_machine *m, const thread *t, pm_opid op, const task *k) {
  await(m, t, op, (moment){k->done, k->i->op, t});
}

/* ---- meetings ----------------------------------------------------------------------------- */

static pm_opid op_before(const pm_machine *m, const thread *t) {
  return t->pc ? m->code[t->pc - 1].op : 0;
}

void pm_time_meet(pm_machine *m, const block *b) {
  const thread *t = &m->threads[(size_t)(b - m->blocks) * m->n_threads];
  moment last = {0};
  for (uint32_t k = 0; k < m->n_threads; k++) later(&last, now_of(m, t + k, op_before(m, t + k)));
  for (uint32_t k = 0; k < m->n_threads; k++) await(m, t + k, op_before(m, t + k), last);
}

void pm_time_come(pm_machine *m, const thread *t, pm_opid op, uint32_t number) {
  later(&block_of(m, t->block)->named[number], now_of(m, t, op));
}

void pm_time_leave(pm_machine *m, const thread *t, uint32_t number) {
  pm_timeline_event *e = await(m, t, op_before(m, t), block_of(m, t->block)->named[number]);
  if (!e) return;
  e->what = "named barrier";
  e->index = number;
}

void pm_time_leave_section(pm_machine *m, const thread *t, pm_opid op) {
  block_of(m, t->block)->turn = now_of(m, t, op);
}

void pm_time_enter_section(pm_machine *m, const thread *t, pm_opid op) {
  await(m, t, op, block_of(m, t->block)->turn);
}

/* What a semaphore counts is not told apart: who waits for it waits for the last signal so far. */
static moment *semaphore_at(const pm_machine *m, const thread *t, const uint32_t *at) {
  if (at >= m->semaphores && at < m->semaphores + (size_t)m->n_devices * m->n_semaphores) {
    return &m->timeline->semaphores[at - m->semaphores];
  }
  const uint32_t *own = t->block->semaphores;
  const size_t of_blocks = (size_t)m->n_clusters * m->n_blocks * m->n_block_semaphores;
  if (at < own || at >= own + m->n_block_semaphores) { /* words of arguments count as one */
    return &m->timeline->semaphores[(size_t)m->n_devices * m->n_semaphores + of_blocks];
  }
  return &m->timeline->semaphores[(size_t)m->n_devices * m->n_semaphores +
                                  (t->block - m->blocks) * (int64_t)m->n_block_semaphores +
                                  (at - t->block->semaphores)];
}

void pm_time_signal(pm_machine *m, const thread *t, pm_opid op, const uint32_t *at) {
  later(semaphore_at(m, t, at), now_of(m, t, op));
}

void pm_time_await(pm_machine *m, const thread *t, const instr *i, const uint32_t *at) {
  pm_timeline_event *e = await(m, t, i->op, *semaphore_at(m, t, at));
  if (e) e->what = i->mem->name;
}

/* ---- warps and clusters ------------------------------------------------------------------- */

void pm_time_scope(pm_machine *m, const thread *t, pm_opid op, bool ends) {
  close_slice(m, t);
  const int64_t now = agent_of(m, t)->now;
  add(m, PM_TIME_SCOPE, t, op, now, now)->index = ends;
}

void pm_time_fork(pm_machine *m, const thread *t) {
  for (uint32_t w = 0; w < WARPS; w++) {
    agent *a = agent_of(m, pm_vm_warps(m, t) + w);
    a->now = a->since = agent_of(m, t)->now;
    a->last = NULL;
  }
}

void pm_time_join(pm_machine *m, const thread *t, pm_opid op) {
  moment last = {0};
  for (uint32_t w = 0; w < WARPS; w++) {
    const thread *warp = pm_vm_warps(m, t) + w;
    close_slice(m, warp);
    later(&last, now_of(m, warp, op));
  }
  close_slice(m, t);
  agent *a = agent_of(m, t);
  a->now = a->since = pm_max(a->now, last.at);
}

void pm_time_begin_cluster(pm_machine *m, const cluster *c) {
  timeline *x = m->timeline;
  const block *first = c->blocks;
  uint32_t best = 0;
  for (uint32_t k = 1; k < x->n_slots; k++) {
    if (x->slots[k] < x->slots[best]) best = k;
  }
  const int64_t begin = x->slots[best];
  x->slot_of[c - m->clusters] = best;
  x->slots[best] = INT64_MAX; /* until it ends */
  memset(block_of(m, first), 0, m->n_blocks * sizeof *x->blocks);
  memset(x->phases + (first - m->blocks) * (int64_t)m->n_barriers, 0,
         (size_t)m->n_blocks * m->n_barriers * sizeof *x->phases);
  const thread *t = &m->threads[(size_t)(first - m->blocks) * m->n_threads];
  for (uint32_t k = 0; k < m->n_blocks * m->n_threads; k++) {
    agent *a = agent_of(m, t + k);
    a->now = a->since = begin;
    a->last = NULL;
    a->n_stores = 0;
    for (uint32_t w = 0; m->has_warps && w < WARPS; w++) {
      agent_of(m, pm_vm_warps(m, t + k) + w)->n_stores = 0;
    }
  }
}

/* It leaves its SMs when the last store is complete. */
void pm_time_end_cluster(pm_machine *m, const cluster *c) {
  timeline *x = m->timeline;
  const thread *t = &m->threads[(size_t)(c->blocks - m->blocks) * m->n_threads];
  int64_t end = 0;
  for (uint32_t k = 0; k < m->n_blocks * m->n_threads; k++) {
    const agent *a = agent_of(m, t + k);
    close_slice(m, t + k);
    end = pm_max(end, a->now);
    for (uint32_t s = 0; s < a->n_stores; s++) end = pm_max(end, a->stores[s].done);
  }
  x->slots[x->slot_of[c - m->clusters]] = end;
}

/* ---- a run -------------------------------------------------------------------------------- */

static void *zeroed(size_t n, size_t size) {
  void *p = pm_malloc(n * size + 1);
  if (p) memset(p, 0, n * size + 1);
  return p;
}

static void free_timeline(pm_machine *m) {
  timeline *x = m->timeline;
  m->timeline = NULL;
  if (!x) return;
  for (uint32_t k = 0; x->agents && k < pm_vm_agents(m); k++) pm_free(x->agents[k].stores);
  pm_free(x->agents);
  pm_free(x->blocks);
  pm_free(x->phases);
  pm_free(x->semaphores);
  pm_free(x->slots);
  pm_free(x->slot_of);
  pm_free(x->events);
  pm_free(x);
}

bool pm_time_begin(pm_machine *m) {
  const uint32_t blocks = m->n_clusters * m->n_blocks;
  timeline *x = m->timeline = zeroed(1, sizeof *x);
  if (!x) return false;
  x->n_slots = (uint32_t)pm_max(m->sms / m->n_blocks, m->n_clusters);
  x->agents = zeroed(pm_vm_agents(m), sizeof *x->agents);
  x->blocks = zeroed(blocks, sizeof *x->blocks);
  x->phases = zeroed((size_t)blocks * m->n_barriers, sizeof *x->phases);
  x->semaphores =
      zeroed((size_t)m->n_devices * m->n_semaphores + (size_t)blocks * m->n_block_semaphores + 1,
             sizeof(moment));
  x->slots = zeroed(x->n_slots, sizeof *x->slots);
  x->slot_of = zeroed(m->n_clusters, sizeof *x->slot_of);
  if (x->agents && x->blocks && x->phases && x->semaphores && x->slots && x->slot_of) return true;
  free_timeline(m);
  return false;
}

/* The events so far, also of a run that failed. */
void pm_time_end(pm_machine *m) {
  timeline *x = m->timeline;
  if (!x) return;
  for (const thread *t = m->threads; t < m->threads + pm_vm_agents(m); t++) {
    if (t->state != THREAD_DONE) close_slice(m, t);
  }
  m->options.timeline(m->options.timeline_ctx, x->events, x->n_events, x->truncated);
  free_timeline(m);
}
