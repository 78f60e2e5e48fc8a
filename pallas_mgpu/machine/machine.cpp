/* Fibers, the scheduler, and what threads do together: warps, bar.sync, clusters.
 *
 * host_run() forks: the child carries out the launch, so that a crash or an endless loop of a
 * generated program is a report and no more. Results, text and the error come back in memory that
 * both share. An error leaves the fiber for good: the child writes it down and exits. */
#include "machine.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK = STACK_BYTES, GUARD = 4096, TEXT = 1 << 16, FACTS = 1 << 14, SECONDS = 120 };

Machine m;
HostThread *host_self;

struct Report {
  int failed, line;
  u32 n_text, n_facts;
  char error[4096];
  char text[TEXT];
  char facts[FACTS];
  u32 record[8];
};
static Report *report;
static void (*entry)(void **);
static void **entry_args;

/* ---- errors -------------------------------------------------------------------------------- */

extern "C" void host_fail(int line, const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  size_t n = 0;
  if (m.self) {
    const HostIndex b = m.self->block->index;
    if (m.devices > 1)
      n = (size_t)snprintf(report->error, sizeof report->error, "device %u, ",
                           m.self->block->device);
    n += (size_t)snprintf(report->error + n, sizeof report->error - n,
                          "block (%u, %u, %u), thread %u: ", b.x, b.y, b.z, m.self->number);
  }
  vsnprintf(report->error + n, sizeof report->error - n, format, ap);
  va_end(ap);
  report->line = line;
  report->failed = 1;
  _exit(1);
}

void host_fact(const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  const int n = vsnprintf(report->facts + report->n_facts, FACTS - report->n_facts, format, ap);
  va_end(ap);
  if (report->n_facts + (u32)n + 1 < FACTS) { /* else it is left out */
    report->n_facts += (u32)n;
    report->facts[report->n_facts++] = '\n';
  }
  report->facts[report->n_facts] = 0;
}

/* A block as facts name it: its index, its device. */
static std::string name_of(const HostIndex &b, u32 device) {
  char text[64];
  snprintf(text, sizeof text, "block %u,%u,%u,%u", b.x, b.y, b.z, device);
  return text;
}

std::string host_name_of(const Block &b) { return name_of(b.index, b.device); }
std::string host_name_of(const Began &c) { return name_of(c.first, c.device); }

static std::string by(u16 who) {
  char text[160] = "by unknown";
  const u32 first = m.first_engine;
  const char *const kinds[] = {"barrier",     "products",   "store_reads", "store_writes",
                               "tensor_core", "tmem_loads", "tmem_stores"};
  if (who < first) {
    const Block &b = m.blocks[who / m.block_threads];
    snprintf(text, sizeof text, "by thread number %u %s", who % m.block_threads,
             host_name_of(b).c_str());
  } else if (who < MANY) {
    const Agent &a = m.agents[who - first];
    snprintf(text, sizeof text, "by %s number %u %s", kinds[a.kind], a.number,
             host_name_of(m.blocks[a.block]).c_str());
  }
  return text;
}

void host_fact_access(const char *touch, const Region &r, i64 at, u16 who, int line) {
  host_fact("access touch %s space %s region %u at %lld line %d %s", touch,
            r.global ? "gmem" : "smem", r.number, at, line, by(who).c_str());
}

void host_fact_cell(const char *touch, const Block &b, u32 lane, u32 column, u16 who, int line) {
  u32 first = column;
  for (auto &a : b.tensor.allocated) first = std::min(first, a.first);
  host_fact("access touch %s space tmem region %u at %u line %d %s", touch, lane, column - first,
            line, by(who).c_str());
}

extern "C" int host_print(const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  const int n = vsnprintf(report->text + report->n_text, TEXT - report->n_text, format, ap);
  va_end(ap);
  report->n_text += (u32)n;
  if (report->n_text > TEXT - 1) report->n_text = TEXT - 1;
  return n;
}

/* The first failure, as the record of PALLAS_MGPU_SANITIZE has it. */
static void note(u32 site, i32 value, const Thread &t, u32 place = 0) {
  if (m.stopped) return;
  m.stopped = true;
  const u32 words[8] = {
      1,      site, (u32)value, t.block_index.x, t.block_index.y, t.block_index.z, t.number,
      place};
  memcpy(report->record, words, sizeof words);
}

extern "C" bool host_stopped() { return m.stopped; }
extern "C" bool host_late() {
  m.self->site = -1;
  return m.self->late;
}

extern "C" void host_outside(i32 i, i32 limit, u32 site, u32 place, int line) {
  if (m.leaves) {
    note(site, i, *m.self, place);
    return;
  }
  host_fact("kind outside");
  host_fact("site %u value %d place %u thread %u %s", site, i, place, m.self->number,
            host_name_of(*m.self->block).c_str());
  host_fail(line, "index %d is not in [0, %d]", i, limit);
}

extern "C" void host_timed(u32 site) {
  m.self->site = site;
  m.self->late = false;
}

static void crashed(int number) {
  static u64 before;
  if (number == SIGALRM && m.progress != before) { /* it is slow, but goes on */
    before = m.progress;
    alarm(SECONDS);
    return;
  }
  if (!report->failed) {
    if (number == SIGALRM) host_fact("kind endless");
    snprintf(report->error, sizeof report->error, "%s",
             number == SIGALRM ? "the program does not end"
             : number == SIGILL
                 ? "after this line: an index out of bounds, an overflow, a shift too "
                   "far, or a division by zero"
                 : "the program crashed after this line");
    report->line = m.self ? m.self->line : 0;
    report->failed = 1;
  }
  _exit(1);
}

/* ---- agents -------------------------------------------------------------------------------- */

u16 host_new_agent(AgentKind kind, const Block *b, u32 number) {
  const u32 most = (u32)m.agents.size();
  const u32 k = m.engines < most ? m.engines++ : most - 1; /* the last ones share */
  m.agents[k] = {kind, (u32)(b - &m.blocks[0]), number};
  return (u16)(m.first_engine + k);
}

u32 host_when(u64 n) {
  const u32 when = m.clock + (u32)n;
  if (when > m.top) m.top = when;
  return when;
}

void host_release(Thread *t) { t->clock.seen.raise_to(t->rank, t->clock.seen[t->rank] + 1); }

/* ---- fibers -------------------------------------------------------------------------------- */

u32 host_clock() { return ++m.steps; }

u32 host_random(u32 below) {
  m.random ^= m.random << 13;
  m.random ^= m.random >> 7;
  m.random ^= m.random << 17;
  return (u32)((m.random >> 20) % below);
}

#if defined(__x86_64__)
extern "C" void host_switch(void **save, void *to);
asm(".text\n.globl host_switch\n.hidden host_switch\nhost_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

static void *fresh_stack(u8 *stack, void (*start)()) {
  void **top = (void **)(stack + STACK);
  *--top = nullptr; /* no return address: the start function stands as if it was called */
  *--top = (void *)start;
  for (int k = 0; k < 6; k++) *--top = nullptr;
  return top;
}
#elif defined(__aarch64__)
extern "C" void host_switch(void **save, void *to);
asm(".text\n.globl host_switch\n.hidden host_switch\nhost_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n"
    "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");

static void *fresh_stack(u8 *stack, void (*start)()) {
  void **top = (void **)(stack + STACK) - 20;
  for (int k = 0; k < 20; k++) top[k] = nullptr;
  top[11] = (void *)start; /* x30 */
  return top;
}
#else
#error "no context switch for this processor"
#endif

static void *scheduler;

static void leave() {
  Thread *t = m.self;
  host_switch(&t->stack_pointer, scheduler);
}

static void enter(Thread *t) {
  m.self = t;
  host_self = t;
  host_switch(&scheduler, t->stack_pointer);
  m.self = nullptr;
}

void host_sleep(const char *format, u32 a, u32 b, const char *what) {
  m.self->waits_for = {format, a, b, what};
  leave();
  m.self->site = -1;
}

static std::string text_of(const WaitsFor &x) {
  char text[256];
  const int n = snprintf(text, sizeof text, x.format, x.a, x.b);
  snprintf(text + n, sizeof text - n, "%s", x.what);
  return text;
}

void host_wake(Thread *t) { m.ready.push_back(t); }

/* Others may overtake here. */
void host_yield() {
  if (host_random(8)) return;
  host_wake(m.self);
  leave();
}

static void deadlock();

/* Threads that look so often, while nothing is written and nobody arrives, do so for ever. */
extern "C" void host_yield_poll() {
  enum { MOST = 1 << 17 };
  m.polled = true;
  m.polls = m.progress == m.polled_progress ? m.polls + 1 : 0;
  m.polled_progress = m.progress;
  if (m.polls == MOST) {
    host_wake(m.self);
    for (Thread *t : m.ready) t->waits_for = {"a value that nobody changes", 0, 0, ""};
    deadlock();
  }
  host_wake(m.self);
  leave();
}

static void thread_ends(Thread *t) {
  if (m.stopped) {
    t->done = true;
    t->block->alive--;
    return;
  }
  host_fact("kind unawaited"); /* unless it is well */
  if (!t->open_group.ops.empty())
    host_fail(t->open_group.ops[0]->line, "the thread ends with bulk stores that no group holds");
  for (BulkGroup &g : t->groups)
    if (!g.awaited)
      host_fail(g.ops[0]->line,
                "the thread ends and nobody waited until this bulk store has read "
                "its shared memory");
  host_lane_copies_end(*t);
  report->n_facts = 0;
  m.progress++;
  t->done = true;
  t->block->alive--;
}

static void fiber() {
  entry(entry_args + m.self->block->device * m.n_args);
  thread_ends(m.self);
  leave();
}

/* ---- scheduler ----------------------------------------------------------------------------- */

static void forget_late(std::vector<Thread *> &all) {
  std::vector<Thread *> kept;
  for (Thread *t : all)
    if (!t->late) kept.push_back(t);
  all.swap(kept);
}

/* Waits that give up do so where nothing else can happen. Is there one? */
static bool give_up() {
  bool any = false;
  for (Block &b : m.blocks)
    for (Thread &t : b.threads) {
      if (t.done || t.site < 0) continue;
      note((u32)t.site, 0, t);
      t.late = any = true;
      host_wake(&t);
    }
  for (Block &b : m.blocks) {
    for (auto &x : b.mbarriers) forget_late(x.second.waiters);
    for (NamedBarrier &n : b.named) forget_late(n.arrived);
  }
  for (auto &s : m.semaphores) forget_late(s.second.waiters);
  return any;
}

static void deadlock() {
  std::string s = "deadlock: ";
  host_fact("kind deadlock");
  std::map<std::string, std::vector<Thread *>> why;
  int line = 0;
  for (Block &b : m.blocks)
    for (Thread &t : b.threads)
      if (!t.done) {
        char text[400];
        const std::string waits_for = text_of(t.waits_for);
        snprintf(text, sizeof text, "%s (line %d, block (%u, %u, %u)%s)", waits_for.c_str(), t.line,
                 b.index.x, b.index.y, b.index.z,
                 m.devices > 1 ? (" of device " + std::to_string(b.device)).c_str() : "");
        why[text].push_back(&t);
        if (why[text].size() == 1)
          host_fact("waits site %lld line %d thread %u %s for %s", t.site, t.line, t.number,
                    host_name_of(b).c_str(), waits_for.c_str());
        line = t.line;
      }
  for (auto &w : why) {
    char text[64];
    snprintf(text, sizeof text, "%zu threads, the first is %u, wait for ", w.second.size(),
             w.second[0]->number);
    s += text + w.first + "; ";
  }
  for (Block &b : m.blocks)
    for (auto &x : b.mbarriers) {
      s += host_place_of(b, x.first) + "; ";
      host_fact("barrier %s at %u line 0 pending %u expected %u bytes %lld phase %llu",
                host_name_of(b).c_str(), x.first, x.second.pending, x.second.expected, x.second.tx,
                x.second.phase);
    }
  m.self = nullptr;
  host_fail(line, "%s", s.c_str());
}

void host_issue(std::shared_ptr<Operation> op) { m.pending.push_back(op); }

static void advance(size_t k) {
  std::shared_ptr<Operation> op = m.pending[k];
  m.progress++;
  if (!op->step()) return;
  for (size_t i = 0; i < m.pending.size(); i++)
    if (m.pending[i] == op) {
      m.pending.erase(m.pending.begin() + (long)i);
      return;
    }
}

void host_finish(Operation *op) {
  for (size_t k = 0; k < m.pending.size(); k++)
    if (m.pending[k].get() == op) {
      std::shared_ptr<Operation> keep = m.pending[k];
      while (!keep->step()) continue;
      for (k = 0; k < m.pending.size(); k++)
        if (m.pending[k] == keep) m.pending.erase(m.pending.begin() + (long)k);
      return;
    }
}

/* Half of the turns go to any thread, the other half to a warp that some rule prefers. */
static size_t choose() {
  const u32 n = (u32)m.ready.size();
  size_t best = host_random(n);
  if (host_random(2)) return best;
  const u32 salt = (u32)(m.clock * 7 + m.leader);
  for (int k = 0; k < 3; k++) {
    const size_t other = host_random(n);
    const u32 a = (m.ready[best]->rank / 32 + salt) * 2654435761u;
    const u32 b = (m.ready[other]->rank / 32 + salt) * 2654435761u;
    if (b > a) best = other;
  }
  return best;
}

static void run_blocks() {
  u32 alive = 0;
  for (Block &b : m.blocks) alive += b.alive;
  while (alive) {
    const bool polled = m.polled && !host_random(4);
    if (!m.pending.empty() &&
        (m.ready.empty() || polled || (m.eagerness && !host_random(m.eagerness)))) {
      m.polled = false;
      advance(host_random((u32)m.pending.size()));
      continue;
    }
    if (m.ready.empty() && !(m.leaves && give_up())) deadlock();
    m.steps++;
    const size_t k = choose();
    Thread *t = m.ready[k];
    m.ready[k] = m.ready.back();
    m.ready.pop_back();
    enter(t);
    if (t->done) alive--;
  }
}

/* ---- warps --------------------------------------------------------------------------------- */

void host_meet(Request *r, void (*act)(Warp &)) {
  Thread *t = m.self;
  Warp &w = *t->warp;
  t->line = r->line;
  if (!(r->mask >> t->lane & 1))
    host_fail(r->line, "%s: lane %u is not in its mask", r->what, t->lane);
  if (w.arrived) {
    u32 k = 0;
    while (!(w.arrived >> k & 1)) k++;
    const Request *o = w.request[k];
    if (o->what != r->what || o->line != r->line || o->mask != r->mask)
      host_fail(r->line,
                "lane %u is at %s here (mask 0x%x) while lane %u of its warp is at %s in line "
                "%d (mask 0x%x)",
                t->lane, r->what, r->mask, k, o->what, o->line, o->mask);
  }
  w.arrived |= 1u << t->lane;
  w.request[t->lane] = r;
  if (w.arrived != r->mask) {
    host_sleep("the other lanes of its warp at ", 0, 0, r->what);
    return;
  }
  act(w);
  w.arrived = 0;
  for (u32 k = 0; k < 32; k++)
    if ((r->mask >> k & 1) && k != t->lane) host_wake(w.lane[k]);
}

static void shuffle(Warp &w) {
  for (u32 k = 0; k < 32; k++)
    if (w.arrived >> k & 1) {
      const u32 from = w.request[k]->b;
      if (from > 31 || !(w.arrived >> from & 1))
        host_fail(w.request[k]->line, "lane %u shuffles from lane %u, which takes no part", k,
                  from);
      w.request[k]->result = w.request[from]->a;
    }
}

extern "C" u32 host_shuffle(u32 x, u32 lane, u32 mask, int line) {
  Request r = {"shfl.sync", line, mask, x, lane, nullptr, 0};
  host_meet(&r, shuffle);
  return r.result;
}

static void vote_any(Warp &w) {
  u32 any = 0;
  for (u32 k = 0; k < 32; k++)
    if (w.arrived >> k & 1) any |= w.request[k]->a;
  for (u32 k = 0; k < 32; k++)
    if (w.arrived >> k & 1) w.request[k]->result = any;
}

extern "C" bool host_vote_any(u32 mask, bool x, int line) {
  Request r = {"vote.any", line, mask, x, 0, nullptr, 0};
  host_meet(&r, vote_any);
  return r.result;
}

static void elect(Warp &w) {
  u32 leader = m.leader;
  while (!(w.arrived >> leader & 1)) leader = (leader + 1) % 32;
  for (u32 k = 0; k < 32; k++)
    if (w.arrived >> k & 1) w.request[k]->result = k == leader;
}

extern "C" bool host_elect(u32 mask, int line) {
  Request r = {"elect.sync", line, mask, 0, 0, nullptr, 0};
  host_meet(&r, elect);
  return r.result;
}

/* ---- setmaxnreg ---------------------------------------------------------------------------- */

static void set_registers(Warp &w) {
  Block &b = *w.block;
  const Request *r = w.request[0];
  const u32 n = r->a;
  const bool up = r->b;
  if (n < 24 || n > 256 || n % 8)
    host_fail(r->line, "setmaxnreg %u: not a multiple of 8 from 24 to 256", n);
  if (up ? n < w.registers : n > w.registers)
    host_fail(r->line, "setmaxnreg.%s to %u: the warp has %u", up ? "inc" : "dec", n, w.registers);
  const u32 need = up ? (n - w.registers) * 32 : 0;
  for (u32 k = 0; k < 32; k++) w.request[k]->result = need > b.free_registers;
  if (need > b.free_registers) return;
  b.free_registers += w.registers * 32;
  b.free_registers -= n * 32;
  w.registers = n;
  for (Thread *t : b.want_registers) host_wake(t);
  b.want_registers.clear();
}

extern "C" void host_registers(u32 n, bool up, int line) {
  Request r = {"setmaxnreg", line, ~0u, n, up, nullptr, 0};
  for (bool first = true;; first = false) {
    host_meet(&r, set_registers);
    Thread *t = m.self;
    if (first && t->lane == 0) host_same(*t->warp, "setmaxnreg", line);
    if (!r.result) return;
    // another warp may have given registers back since the lanes met
    if ((n - t->warp->registers) * 32 <= t->block->free_registers) continue;
    t->block->want_registers.push_back(t);
    host_sleep("%u registers: the block has %u left", n, t->block->free_registers);
  }
}

/* ---- barriers of threads ------------------------------------------------------------------- */

/* Those who met before come one after the other. */
static std::vector<Thread *> by_rank(std::vector<Thread *> all) {
  std::sort(all.begin(), all.end(), [](Thread *a, Thread *b) { return a->rank < b->rank; });
  return all;
}

static void pass(const std::vector<Thread *> &met) {
  const std::vector<Thread *> all = by_rank(met);
  Clock c = all[0]->clock;
  c.settle();
  for (Thread *t : all) c.join(t->clock);
  for (Thread *t : all) {
    t->clock.adopt(c);
    host_release(t);
  }
}

/* What any of them knows. */
static Times known_to(const std::vector<Thread *> &threads) {
  const std::vector<Thread *> all = by_rank(threads);
  Times known = all[0]->clock.seen;
  known.settle();
  for (const Thread *t : all) known.raise(t->clock.seen);
  return known;
}

static void check_warps(const NamedBarrier &b, u32 id, int line) {
  std::map<Warp *, u32> warps;
  for (Thread *t : b.arrived) warps[t->warp]++;
  for (auto &g : b.gone) warps[g.first->warp]++;
  for (auto &w : warps)
    if (w.second != 32)
      host_fail(line, "bar.sync %u is passed by %u lanes of warp %u only", id, w.second,
                w.first->lane[0]->number / 32);
}

/* What all of them vote is in t->any and t->all after it. Those that only arrive go on at once. */
static void bar(u32 id, u32 threads, bool vote, int line, bool waits = true) {
  Thread *t = m.self;
  Block &block = *t->block;
  t->line = line;
  if (id > 15) host_fail(line, "bar.sync %u: barriers are 0 to 15", id);
  if (!threads) threads = m.block_threads;
  if (threads % 32 || threads > m.block_threads)
    host_fail(line, "bar.sync of %u threads in a block of %u", threads, m.block_threads);
  NamedBarrier &b = block.named[id];
  if (b.arrived.empty() && b.gone.empty()) {
    b.expected = threads;
    b.line = line;
  } else if (b.expected != threads) {
    host_fail(line, "bar.sync %u is for %u threads here and for %u in line %d", id, threads,
              b.expected, b.line);
  }
  b.any |= vote;
  b.all &= vote;
  if (waits) {
    b.arrived.push_back(t);
  } else {
    b.gone.emplace_back(t, t->clock);
    host_release(t);
  }
  if (b.arrived.size() + b.gone.size() < threads) {
    if (waits) host_sleep("bar.sync %u, where %u threads meet", id, threads);
    return;
  }
  check_warps(b, id, line);
  std::vector<Thread *> all;
  all.swap(b.arrived);
  if (!all.empty())
    for (auto &g : b.gone) all[0]->clock.join(g.second);
  b.gone.clear();
  if (!all.empty()) pass(all);
  for (Thread *o : all) {
    o->any = b.any;
    o->all = b.all;
    if (o != t) host_wake(o);
  }
  b.any = 0;
  b.all = 1;
}

extern "C" void host_bar_sync(u32 id, u32 threads, int line) { bar(id, threads, false, line); }
extern "C" void host_bar_arrive(u32 id, u32 threads, int line) {
  bar(id, threads, false, line, false);
}

extern "C" bool host_bar_red(u32 id, u32 threads, bool x, bool any, int line) {
  bar(id, threads, x, line);
  return any ? m.self->any : m.self->all;
}

static void meet_lanes(Warp &w) {
  std::vector<Thread *> all;
  for (u32 k = 0; k < 32; k++)
    if (w.arrived >> k & 1) all.push_back(w.lane[k]);
  pass(all);
}

extern "C" void host_warp_sync(u32 mask, int line) {
  Request r = {"bar.warp.sync", line, mask, 0, 0, nullptr, 0};
  host_meet(&r, meet_lanes);
}

extern "C" u32 host_cluster_rank() { return host_rank_of(*m.self->block); }

extern "C" void host_launches_done(int line) {
  m.self->line = line;
  m.self->clock.launched = true;
}

/* arrive.relaxed, wait.acquire: no memory is ordered but mbarriers after their fence */
extern "C" void host_cluster_sync(int line) {
  static std::map<const Block *, std::vector<Thread *>> meetings; /* by the first block */
  Thread *t = m.self;
  const Cluster cluster = host_cluster_of(*t->block);
  std::vector<Thread *> &arrived = meetings[cluster.first];
  t->line = line;
  arrived.push_back(t);
  if (arrived.size() < cluster.size() * m.block_threads) {
    host_sleep("barrier.cluster");
    return;
  }
  std::vector<Thread *> all;
  all.swap(arrived);
  const Times met = known_to(all);
  for (Block &b : cluster) {
    for (auto &x : b.mbarriers) x.second.published = x.second.fenced;
    b.met = met;
  }
  for (Thread *o : all)
    if (o != t) host_wake(o);
}

/* ---- launch -------------------------------------------------------------------------------- */

static void make_thread(Block &b, u32 k, u32 rank) {
  Thread &t = b.threads[k];
  t.thread_index = {k, 0, 0};
  t.block_index = b.index;
  t.cluster_index = b.in_cluster;
  t.block_dim = {m.block_threads, 1, 1};
  t.grid_dim = m.grid;
  t.block = &b;
  t.warp = &b.warps[k / 32];
  t.number = k;
  t.lane = k % 32;
  t.rank = rank;
  t.warp->lane[t.lane] = &t;
  t.line = 0;
  t.done = false;
  t.groups.clear();
  t.lane_group = nullptr;
  t.lane_groups.clear();
  t.reads = t.writes = 0;
  t.stores = t.any = t.all = 0;
  t.fenced_stack.clear();
  t.ordered.reset(m.n_clock, 0, NOBODY);
  t.tensor_ops.clear();
  t.tensor = 0;
  t.n_tensor_ops = t.tensor_access = t.tensor_line = 0;
  t.clock.reset(m.n_clock, m.clock, rank);
  host_release(&t);
  if (!t.stack) {
    t.stack = (u8 *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(t.stack, GUARD, PROT_NONE);
  }
  t.stack_pointer = fresh_stack(t.stack, fiber);
  m.ready.push_back(&t);
}

static void make_block(Block &b, HostIndex first, u32 number) {
  const u32 k = number % m.cluster_blocks;
  b.in_cluster = {k % m.cluster.x, k / m.cluster.x % m.cluster.y, k / m.cluster.x / m.cluster.y};
  b.index = {first.x + b.in_cluster.x, first.y + b.in_cluster.y, first.z + b.in_cluster.z};
  b.shared.name = "shared memory";
  b.shared.number = number;
  /* the upper bits are not those of a descriptor */
  b.shared.base =
      1024 * (1 + host_random(4)) + (m.cluster_blocks == 1 && m.random >> 40 & 1 ? 1 << 24 : 0);
  b.cluster = (u16)((m.began.size() - 1) % 65534 + 1);
  b.no_more = false;
  b.shared.size = m.shared_bytes;
  if (!b.shared.bytes) b.shared.bytes = (u8 *)malloc(m.shared_bytes + 1);
  memset(b.shared.bytes, 0xcd, m.shared_bytes);
  b.shared.forget();
  b.mbarriers.clear();
  b.arrivals.clear();
  b.met.reset(m.n_clock, 0, NOBODY);
  b.tensor = TensorMemory();
  const u32 limit = 65536 / m.block_threads / 8 * 8; /* what __launch_bounds__(n, 1) leaves */
  const u32 registers = limit > 256 ? 256 : limit;
  b.free_registers = 0;
  b.want_registers.clear();
  b.warpgroups.assign((m.block_threads + 127) / 128, Warpgroup());
  b.warps.assign(m.block_threads / 32, Warp());
  for (Warp &w : b.warps) {
    w.block = &b;
    w.registers = registers;
  }
  b.threads.resize(m.block_threads);
  for (u32 i = 0; i < m.block_threads; i++) make_thread(b, i, number * m.block_threads + i);
  b.alive = m.block_threads;
}

/* What other blocks and their engines do to a block's memory comes before its end. */
static void check_visits(Block &b) {
  const u32 me = (u32)(&b - &m.blocks[0]), engines = m.first_engine;
  std::vector<Thread *> all;
  for (Thread &t : b.threads) all.push_back(&t);
  Times known = known_to(all);
  known.raise(b.met);
  auto check = [&](u16 who, u32 when, int line, const char *what) {
    if (who >= MANY || known[who] >= when) return;
    if ((who < engines ? who / m.block_threads : m.agents[who - engines].block) == me) return;
    host_fail(line, "block (%u, %u, %u) may end before %s %s", b.index.x, b.index.y, b.index.z,
              what, by(who).c_str());
  };
  for (const Mark &k : b.shared.marks) {
    check(k.writer, k.write, k.write_line, "its shared memory is written");
    check(k.reader, k.read, k.read_line, "its shared memory is read");
  }
  for (const Arrival &a : b.arrivals) check(a.who, a.when, a.line, "an arrival");
}

static void end_block(Block &b) {
  if (m.stopped) {
    for (NamedBarrier &n : b.named) n = NamedBarrier();
    for (auto &a : b.tensor.allocated)
      host_fail(0, "the block ends with %u columns of tensor memory allocated", a.second);
    return;
  }
  for (Warp &w : b.warps) host_products_end(w);
  host_tensor_ends(b);
  for (Warpgroup &g : b.warpgroups) {
    const size_t k = (size_t)(&g - &b.warpgroups[0]);
    for (u32 w = 0; w < 4 && k * 4 + w < b.warps.size(); w++)
      if (b.warps[k * 4 + w].issued != g.issued.size())
        host_fail(0,
                  "warp %zu executed %u instructions that all warps of its warpgroup must execute, "
                  "and another one %zu",
                  k * 4 + w, b.warps[k * 4 + w].issued, g.issued.size());
  }
  if (m.cluster_blocks > 1) check_visits(b);
  for (auto &x : b.mbarriers) {
    const Mbarrier &bar = x.second;
    if (bar.tx || (bar.copied && !bar.awaited)) host_fact("kind unawaited");
    if (bar.tx)
      host_fail(bar.init_line, "the block ends while %s expects more bytes",
                host_place_of(b, x.first).c_str());
    if (bar.copied && !bar.awaited)
      host_fail(bar.init_line, "the block ends and nobody waited for the bytes that arrived at %s",
                host_place_of(b, x.first).c_str());
  }
}

/* Clocks have entries for so many engines: mbarriers, products, copies. */
enum : u32 { LEAST_ENGINES = 256, BLOCK_ENGINES = 64 };

/* These clusters, by their numbers in the grids of all devices, all at once. */
static void run_clusters(const std::vector<u32> &clusters) {
  const HostIndex n = {m.grid.x / m.cluster.x, m.grid.y / m.cluster.y, m.grid.z / m.cluster.z};
  const u32 size = m.cluster_blocks, count = (u32)clusters.size() * size;
  const u32 each = n.x * n.y * n.z;
  /* As large as for the first ones, which are the most: memory remembers accesses by numbers. */
  const u32 threads = count * m.block_threads;
  const u32 engines = std::max<u32>(LEAST_ENGINES, count * BLOCK_ENGINES);
  if (threads + engines > m.n_clock) {
    m.n_clock = threads + engines;
    m.first_engine = threads;
    m.agents.resize(engines);
  }
  m.blocks.resize(count);
  m.engines = 0;
  for (u32 k = 0; k < count; k++) {
    const u32 c = clusters[k / size] % each;
    const HostIndex first = {c % n.x * m.cluster.x, c / n.x % n.y * m.cluster.y,
                             c / n.x / n.y * m.cluster.z};
    if (k % size == 0) m.began.push_back({first, clusters[k / size] / each});
    m.blocks[k].device = clusters[k / size] / each;
    make_block(m.blocks[k], first, k);
  }
  run_blocks();
  while (!m.pending.empty()) advance(host_random((u32)m.pending.size()));
  for (Block &b : m.blocks) end_block(b);
  for (Block &b : m.blocks)
    for (Thread &t : b.threads)
      if (t.clock.seen[t.rank] > m.top) m.top = t.clock.seen[t.rank];
  m.clock = m.top;
}

enum { MOST_THREADS = 1024, MOST_BLOCKS = 4 }; /* at once, of clusters that need not be */

static void launch(u64 seed) {
  m.random = seed * 0x9e3779b97f4a7c15u + 0x1234567;
  for (int k = 0; k < 8; k++) host_random(2);
  static const u32 eagerness[] = {0, 0, 64, 16, 4};
  m.eagerness = eagerness[host_random(5)];
  m.leader = host_random(32);
  m.crowded = m.random >> 41 & 1;
  m.cluster_blocks = m.cluster.x * m.cluster.y * m.cluster.z;
  const u32 clusters = m.grid.x * m.grid.y * m.grid.z / m.cluster_blocks * m.devices;
  const u32 at_once = 1 + host_random(3);
  std::vector<u32> order(clusters);
  for (u32 k = 0; k < clusters; k++) {
    const u32 at = host_random(k + 1);
    order[k] = order[at];
    order[at] = k;
  }
  if (m.together) {
    if ((u64)clusters * m.cluster_blocks * m.block_threads > MANY / 2)
      host_fail(
          0,
          "%u blocks that wait for each other, or of a mesh, are too many: the emulated machine "
          "has %u threads. Use InterpretParams(backend=\"interpret\"), or fewer blocks",
          clusters * m.cluster_blocks, MANY / 2);
    run_clusters(order);
    m.self = nullptr;
    if (m.devices > 1 && !m.stopped) host_end_of_devices();
    return;
  }
  m.waiting = order;
  while (!m.waiting.empty()) {
    std::vector<u32> now;
    do {
      now.push_back(m.waiting.back());
      m.waiting.pop_back();
    } while (!m.waiting.empty() && now.size() < at_once &&
             (now.size() + 1) * m.cluster_blocks <= MOST_BLOCKS &&
             (now.size() + 1) * m.cluster_blocks * m.block_threads <= MOST_THREADS);
    run_clusters(now);
  }
}

static void catch_signals() {
  stack_t stack = {};
  stack.ss_sp = malloc(1 << 16);
  stack.ss_size = 1 << 16;
  sigaltstack(&stack, nullptr);
  struct sigaction a = {};
  a.sa_handler = crashed;
  a.sa_flags = SA_ONSTACK;
  for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) sigaction(s, &a, nullptr);
  alarm(SECONDS);
}

struct HostBuffer {
  void *at;
  u64 bytes;
  u32 read_only, written;
};

/* Launch the kernel of a library. buffers: memory that is shared with a child. args: for each
 * parameter its address, of a pointer or a tensor map; for a mesh those of all devices, n_args for
 * each. record: NULL, or 8 words: checks and waits that fail are noted there and the program goes
 * on, as on a GPU. Returns 0, or 1 with the error. */
extern "C" int host_run(const char *library, const u32 grid[3], const u32 cluster[3], u32 threads,
                        u32 together, u32 dependent, u32 shared_bytes, const HostBuffer *buffers,
                        u32 n_buffers, void **args, u32 devices, u32 n_args, u64 stride, u64 seed,
                        u32 may_be_unwritten, u32 *record, const u8 *loose, u32 n_loose,
                        char *error, u32 error_size, int *line, char *text, u32 text_size,
                        char *facts, u32 facts_size) {
  report = (Report *)mmap(nullptr, sizeof *report, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGINT, SIG_DFL);          /* who interrupts the run ends it */
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* and so does the end of the parent */
    catch_signals();
    void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    entry = h ? (void (*)(void **))dlsym(h, "host_entry") : nullptr;
    if (!entry) host_fail(0, "%s", dlerror());
    entry_args = args;
    m.grid = {grid[0], grid[1], grid[2]};
    m.cluster = {cluster[0], cluster[1], cluster[2]};
    m.block_threads = threads;
    m.together = together;
    m.dependent = dependent;
    m.shared_bytes = shared_bytes;
    m.devices = devices;
    m.n_args = n_args;
    m.stride = stride;
    m.may_be_unwritten = may_be_unwritten;
    m.leaves = record;
    m.loose = loose;
    m.n_loose = n_loose;
    m.global.resize(n_buffers);
    for (u32 k = 0; k < n_buffers; k++) {
      m.global[k].name = "global memory";
      m.global[k].number = k;
      m.global[k].global = true;
      m.global[k].counters = (k + 1) % (n_buffers / devices) == 0;
      m.global[k].bytes = (u8 *)buffers[k].at;
      m.global[k].size = buffers[k].bytes;
      m.global[k].read_only = buffers[k].read_only;
      m.global[k].born_written = buffers[k].written;
    }
    launch(seed);
    _exit(0);
  }
  int status = 0;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (child < 0 || (status && !report->failed)) {
    snprintf(report->error, sizeof report->error, "the child process died (status %d)", status);
    report->failed = 1;
  }
  const int failed = report->failed;
  snprintf(error, error_size, "%s", report->error);
  snprintf(text, text_size, "%s", report->text);
  snprintf(facts, facts_size, "%s", report->facts);
  *line = report->line;
  if (record) memcpy(record, report->record, sizeof report->record);
  munmap(report, sizeof *report);
  return failed;
}

extern "C" void *host_alloc(u64 bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
extern "C" void host_free(void *p, u64 bytes) { munmap(p, bytes); }
