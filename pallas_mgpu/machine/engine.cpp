/* mbarriers, the copy engine, and the tensor core.
 *
 * Copies are operations in m.pending until the scheduler or a wait carries them out: a load in one
 * step, a store in two, reading and writing. Products of a warp are carried out in order; their
 * accumulators belong to a Flight, whose registers hold poison until a wait hands them back. */
#include <stdio.h>

#include "machine.h"

enum { MAX_COUNT = (1 << 20) - 1 };

/* ---- mbarriers ----------------------------------------------------------------------------- */

std::string host_place_of(Block &b, u32 offset) {
  const Mbarrier &x = b.mbarriers.at(offset);
  char text[200];
  snprintf(text, sizeof text,
           "mbarrier at byte %u (of line %d): phase %llu, %u of %u arrivals and %lld bytes to come",
           offset, x.init_line, x.phase, x.pending, x.expected, x.tx);
  return text;
}

extern "C" void host_mbarrier_init(u32 a, u32 count, int line) {
  Thread *t = m.self;
  Block &b = *t->block;
  const size_t at = shared_offset(b, a, 8, 8, "mbarrier.init", line);
  t->line = line;
  if (!count || count > MAX_COUNT) host_fail(line, "mbarrier.init with %u arrivals", count);
  if (b.mbarriers.count((u32)at)) host_fail(line, "there is an mbarrier at byte %zu already", at);
  const u8 zeros[8] = {0};
  thread_writes(b.shared, at, zeros, 8, line);
  for (size_t k = at; k < at + 8; k++) b.shared.marks[k].barrier = 1;
  Mbarrier &x = b.mbarriers[(u32)at];
  x = Mbarrier();
  x.expected = x.pending = count;
  x.init_line = line;
  x.init_by = (u16)t->rank;
  x.init_at = t->clock.seen[t->rank];
  for (Clock *c : {&x.gathered, &x.passed, &x.far, &x.far_passed}) c->reset(m.n_clock, 0, NOBODY);
  x.agent = host_new_agent(OF_BARRIER, &b, (u32)at);
}

/* for the cluster and the async proxy */
extern "C" void host_mbarrier_init_fence(int line) {
  Thread *t = m.self;
  t->line = line;
  for (auto &x : t->block->mbarriers)
    if (x.second.init_by == t->rank) x.second.fenced = true;
}

static Block &block_of(u32 rank, const char *what, int line) {
  const Cluster cluster = host_cluster_of(*m.self->block);
  if (rank >= cluster.size())
    host_fail(line, "%s: block %u of a cluster of %zu", what, rank, cluster.size());
  return cluster[rank];
}

/* `a` is an address of this thread's block; the mbarrier is at the same place of block `b`. */
static Mbarrier &mbarrier_of(Block &b, u32 a, const char *what, int line, u32 *offset) {
  Thread *t = m.self;
  *offset = (u32)shared_offset(*t->block, a, 8, 8, what, line);
  t->line = line;
  const auto found = b.mbarriers.find(*offset);
  if (found == b.mbarriers.end()) host_fail(line, "%s: no mbarrier is at byte %u", what, *offset);
  Mbarrier &x = found->second;
  if (&b != t->block && !x.published)
    host_fail(line, "%s: no barrier of the cluster stands after mbarrier.init in line %d", what,
              x.init_line);
  if (&b != t->block && !b.alive) host_fail(line, "%s: the other block has ended", what);
  if (!x.published && t->clock.seen[x.init_by] < x.init_at)
    host_fail(line, "%s is not ordered after mbarrier.init in line %d", what, x.init_line);
  if (&b != t->block) b.arrivals.push_back({(u16)t->rank, t->clock.seen[t->rank], line});
  return x;
}

static Mbarrier &mbarrier_at(u32 a, const char *what, int line, u32 *offset) {
  return mbarrier_of(*m.self->block, a, what, line, offset);
}

static void complete_if_done(Mbarrier &x) {
  if (x.pending || x.tx) return;
  if (x.has_bytes) {
    x.copied = true;
    x.awaited = false;
    x.copied_phase = x.phase;
  }
  x.has_bytes = false;
  m.progress++;
  x.phase++;
  x.pending = x.expected;
  x.passed.join(x.gathered);
  x.far_passed.join(x.far);
  x.passed.seen.raise_to(x.agent, host_when(x.phase));
  for (Thread *t : x.waiters) host_wake(t);
  x.waiters.clear();
}

extern "C" void host_mbarrier_expect(u32 a, u32 bytes, int line) {
  u32 at;
  Mbarrier &x = mbarrier_at(a, "mbarrier.expect_tx", line, &at);
  x.tx += bytes;
  x.has_bytes = true;
  if (x.tx > MAX_COUNT)
    host_fail(line, "mbarrier.expect_tx: %lld bytes overflow the tx-count", x.tx);
}

static const char TOO_MANY[] = "Wait on the barrier before, or allocate it with more arrivals";

static void arrived(Block &b, Mbarrier &x, u32 at, u32 n, int line) {
  if (!n || n > MAX_COUNT) host_fail(line, "mbarrier.arrive with a count of %u", n);
  if (n > x.pending) {
    host_fact("kind protocol");
    host_fail(line, "%s: %u more cannot be counted. %s", host_place_of(b, at).c_str(), n, TOO_MANY);
  }
  host_release(m.self);
  x.pending -= n;
  complete_if_done(x);
  host_yield();
}

extern "C" void host_mbarrier_arrive(u32 a, u32 n, int line) {
  u32 at;
  Mbarrier &x = mbarrier_at(a, "mbarrier.arrive", line, &at);
  x.gathered.join(m.self->clock);
  arrived(*m.self->block, x, at, n, line);
}

/* What the thread has seen is handed to those that wait for a barrier of block b. What engines have
 * done is done for everyone. What threads did is ordered within their block, as arrivals are
 * releases there, and for another block by a release with the scope of the cluster alone. */
static void gather(const Block &b, Mbarrier &x, bool release) {
  const Thread *t = m.self;
  if (&b == t->block) {
    x.gathered.join(t->clock);
    return;
  }
  for (u32 k = m.first_engine; k < m.n_clock; k++) x.gathered.seen.raise_to(k, t->clock.seen[k]);
  x.gathered.carried.raise(t->clock.carried);
  if (release) x.far.join(t->clock);
}

extern "C" void host_mbarrier_arrive_remote(u32 a, u32 rank, bool release, int line) {
  u32 at;
  Block &b = block_of(rank, "mbarrier.arrive", line);
  Mbarrier &x = mbarrier_of(b, a, "mbarrier.arrive", line, &at);
  gather(b, x, release);
  arrived(b, x, at, 1, line);
}

extern "C" void host_mbarrier_wait(u32 a, u32 parity, bool cluster, int line) {
  u32 at;
  Mbarrier &x = mbarrier_at(a, "mbarrier.try_wait", line, &at);
  Thread *t = m.self;
  if (parity > 1) host_fail(line, "mbarrier.try_wait.parity with parity %u", parity);
  while ((x.phase & 1) == parity) {
    x.waiters.push_back(t);
    host_sleep("parity %u of the mbarrier at byte %u", parity, at);
    if (t->late) return;
  }
  if (x.copied && x.phase == x.copied_phase + 1) x.awaited = true;
  t->clock.join(x.passed);
  if (cluster) t->clock.join(x.far_passed);
  host_yield();
}

/* The bytes of a copy may always arrive later than they did, for a thread that has not been told
 * that they are there: now and then all its lanes look too early. */
static bool seems_late(Mbarrier &x) {
  if (!x.copied || x.phase != x.copied_phase + 1) return false;
  if (m.self->clock.seen[x.agent] >= host_when(x.phase)) return false;
  if (x.late_phase != x.phase) {
    x.late_phase = x.phase;
    x.late = host_random(2) * m.block_threads;
  }
  return x.late && x.late--;
}

extern "C" bool host_mbarrier_test(u32 a, u32 parity, int line) {
  u32 at;
  Mbarrier &x = mbarrier_at(a, "mbarrier.test_wait", line, &at);
  if (parity > 1) host_fail(line, "mbarrier.test_wait.parity with parity %u", parity);
  if ((x.phase & 1) == parity || seems_late(x)) {
    host_yield_poll();
    return false;
  }
  host_mbarrier_wait(a, parity, false, line);
  return true;
}

/* ---- semaphores ---------------------------------------------------------------------------- */

static u32 *word_at(void *p, u32 a, int line) {
  return (u32 *)(p ? host_atomic_global(p, 4, line) : host_atomic_shared(a, 4, line));
}

/* What was set by other means than signals and waits could be of any of them. */
static void count_from(Semaphore &s, u32 value) {
  if ((u32)(s.total - s.taken) == value) return;
  if (s.signals.size() > 1) s.signals.erase(s.signals.begin(), s.signals.end() - 1);
  s.total = s.taken + value;
}

static void signal(u32 *w, u32 n, const Clock &clock) {
  enum { MOST = 64 }; /* of older ones the clocks are merged */
  Semaphore &s = m.semaphores[w];
  count_from(s, *w);
  Signal x = {s.total += (u64)(i64)(i32)n, clock};
  if (!s.signals.empty()) x.released.join(s.signals.back().released);
  if ((i32)n <= 0) s.signals.clear(); /* who waits next may need any of them */
  if (s.signals.size() == MOST) s.signals.erase(s.signals.begin());
  s.signals.push_back(x);
  *w += n;
  m.progress++;
  for (Thread *o : s.waiters) host_wake(o);
  s.waiters.clear();
}

extern "C" void host_semaphore_signal(void *p, u32 a, u32 n, int line) {
  u32 *w = word_at(p, a, line);
  signal(w, n, m.self->clock);
  host_release(m.self);
  host_yield();
}

/* A relaxed signal tells what came before the fence, and no more. */
extern "C" void host_semaphore_fence(int line) {
  m.self->line = line;
  m.self->told = m.self->clock;
  host_release(m.self);
}

extern "C" void host_semaphore_relaxed(void *p, u32 n, int line) {
  u32 *w = word_at(p, 0, line);
  if (m.self->told.seen.empty()) m.self->told.reset(m.n_clock, 0, NOBODY); /* nothing */
  signal(w, n, m.self->told);
  host_yield();
}

/* The next wait is at a site of the program, for an element of a ref. */
extern "C" void host_awaits(u32 site, u32 element) {
  snprintf(m.self->awaited, sizeof m.self->awaited, ", of site %u, element %u", site, element);
}

extern "C" void host_semaphore_wait(void *p, u32 a, u32 n, bool take, int line) {
  u32 *w = word_at(p, a, line);
  m.self->line = line;
  while ((i32)(*w - n) < 0) {
    m.semaphores[w].waiters.push_back(m.self);
    host_sleep("a semaphore to be %u, which is %u", n, *w, m.self->awaited);
    if (m.self->late) return;
  }
  m.self->awaited[0] = 0;
  Semaphore &s = m.semaphores[w];
  count_from(s, *w);
  size_t k = 0;
  while (k + 1 < s.signals.size() && s.signals[k].total < s.taken + n) k++;
  if (n && !s.signals.empty()) m.self->clock.join(s.signals[k].released);
  if (take) {
    *w -= n;
    s.taken += n;
  }
  host_yield();
}

extern "C" u32 host_semaphore_read(void *p, u32 a, int line) {
  u32 *w = word_at(p, a, line);
  const Semaphore &s = m.semaphores[w];
  if (!s.signals.empty()) m.self->clock.join(s.signals.back().released);
  const u32 r = *w;
  host_yield_poll();
  return r;
}

/* Variables of the program itself, by which its threads synchronise: p is the address of one. What
 * they hold is plain memory. */
extern "C" void host_variable_released(void *p, int line) {
  Clock &released = m.variables[p];
  m.self->line = line;
  if (released.seen.empty()) released = m.self->clock;
  released.join(m.self->clock);
  host_release(m.self);
}

extern "C" void host_variable_acquired(void *p, int line) {
  const Clock &released = m.variables[p];
  m.self->line = line;
  if (!released.seen.empty()) m.self->clock.join(released);
}

static void complete_bytes(Block &b, u32 at, u32 bytes, int line) {
  Mbarrier &x = b.mbarriers.at(at);
  x.tx -= bytes;
  if (x.tx < 0 && !x.shared) {
    host_fact("kind protocol");
    host_fail(line, "%u bytes arrived, and that is more than expected: %s", bytes,
              host_place_of(b, at).c_str());
  }
  complete_if_done(x);
}

/* ---- proxies ------------------------------------------------------------------------------- */

/* By the thread that runs. A fence of its own block's memory covers what threads of others stored
 * there, not what those of its block stored in others'. */
static void fence_proxy(Clock &clock, ProxyFence kind) {
  clock.fenced[kind == HOST_FENCE_GLOBAL].raise(clock.seen);
  if (kind == HOST_FENCE_CLUSTER) clock.fenced[FAR].raise(clock.seen);
  if (kind != HOST_FENCE_SHARED || !m.far_stores) return;
  const u32 first = m.self->rank - m.self->rank % m.block_threads;
  for (u32 k = 0; k < m.first_engine; k++)
    if (k < first || k >= first + m.block_threads) clock.fenced[FAR].raise_to(k, clock.seen[k]);
}

extern "C" void host_proxy_fence(ProxyFence kind, int line) {
  m.self->line = line;
  fence_proxy(m.self->clock, kind);
}

/* ---- other devices ------------------------------------------------------------------------- */

/* What one device has lies as far behind the same of the one before it as all that it has takes.
 * The address of all devices is that of device 0, with a mark. */
enum : u64 { EVERYWHERE = 1ull << 56 };

extern "C" u32 host_devices() { return m.devices; }

extern "C" void *host_on_device(void *p, u32 device) {
  if (!((u64)p & EVERYWHERE)) host_fail(m.self->line, "%p is not the address of all devices", p);
  return (void *)(((u64)p & ~EVERYWHERE) + device * m.stride);
}

/* ---- copies -------------------------------------------------------------------------------- */

/* 16-byte chunks of a 128-byte line are permuted by the number of the line */
static u32 swizzled(u32 a, u32 bytes) {
  const u32 chunks = bytes / 16;
  if (chunks < 2) return a;
  const u32 line = a / 128 % chunks, chunk = a / 16 % chunks;
  return a - chunk * 16 + (chunk ^ line) * 16;
}

/* A piece of at most 16 bytes: an address in shared memory, and one in global memory or none. */
struct Piece {
  u32 shared, bytes;
  u8 *global;
};

struct Copy : Operation {
  Block *signals = nullptr; /* the block of its mbarrier, if that is another one */
  bool store, has_read = false, has_written = false;
  std::vector<Piece> pieces;
  u32 barrier = 0, bytes = 0;
  u16 reader, writer; /* agents, and the number among their operations */
  u32 when;
  std::vector<u8> data;
  HostCombine how = HOST_STORE;
  HostType type = HOST_OTHER;
  bool step() override;
  void read();
  void write();
};

void Copy::read() {
  const Stamp s = {reader, when, line, &clock, block->cluster};
  size_t n = 0;
  has_read = true;
  data.assign(bytes, 0);
  for (const Piece &p : pieces) {
    if (store && p.global) {
      const size_t at = shared_offset(*block, p.shared, p.bytes, 1, "a bulk store", line);
      engine_reads(block->shared, at, p.bytes, s, &data[n]);
    } else if (p.global) {
      size_t at;
      Region &r = global_region(p.global, p.bytes, 1, "a bulk load", line, &at);
      engine_reads(r, at, p.bytes, s, &data[n]);
    }
    n += p.bytes;
  }
}

template <typename T>
static T of_ints(T old, T x, HostCombine how) {
  switch (how) {
    case HOST_add: return (T)((u32)old + (u32)x);
    case HOST_min: return old < x ? old : x;
    case HOST_max: return old > x ? old : x;
    case HOST_inc: return old >= x ? 0 : old + 1;
    case HOST_dec: return old == 0 || old > x ? x : old - 1;
    case HOST_and: return old & x;
    case HOST_or: return old | x;
    default: return old ^ x;
  }
}

template <typename T>
static T of_floats(T old, T x, HostCombine how) {
  return how == HOST_min ? min_f32(old, x) : how == HOST_max ? max_f32(old, x) : old + x;
}

static f16 of_floats(f16 old, f16 x, HostCombine how) {
  return how == HOST_add ? old + x : cvt_f16(of_floats(cvt_f32(old), cvt_f32(x), how));
}
static bf16 of_floats(bf16 old, bf16 x, HostCombine how) {
  return how == HOST_add ? old + x : cvt_bf16(of_floats(cvt_f32(old), cvt_f32(x), how));
}

template <typename T, typename F>
static void each(u8 *x, const u8 *old, u32 bytes, F f) {
  for (u32 k = 0; k < bytes; k += sizeof(T)) {
    T a, b;
    memcpy(&a, old + k, sizeof a);
    memcpy(&b, x + k, sizeof b);
    a = f(a, b);
    memcpy(x + k, &a, sizeof a);
  }
}

/* x becomes what is written over old */
static void combine(u8 *x, const u8 *old, u32 bytes, HostCombine how, HostType type) {
  switch (type) {
    case HOST_AS_u32:
      each<u32>(x, old, bytes, [=](u32 a, u32 b) { return of_ints(a, b, how); });
      break;
    case HOST_AS_i32:
      each<i32>(x, old, bytes, [=](i32 a, i32 b) { return of_ints(a, b, how); });
      break;
    case HOST_AS_f16:
      each<f16>(x, old, bytes, [=](f16 a, f16 b) { return of_floats(a, b, how); });
      break;
    case HOST_AS_bf16:
      each<bf16>(x, old, bytes, [=](bf16 a, bf16 b) { return of_floats(a, b, how); });
      break;
    default: each<f32>(x, old, bytes, [=](f32 a, f32 b) { return of_floats(a, b, how); });
  }
}

/* What cp.reduce.async.bulk is defined for. */
static void check_combine(HostCombine how, HostType type, int line) {
  const bool half = type == HOST_AS_f16 || type == HOST_AS_bf16;
  const bool whole =
      type == HOST_AS_u32 || (type == HOST_AS_i32 && (how == HOST_min || how == HOST_max));
  const bool ok = whole || (half && how <= HOST_max) || (type == HOST_AS_f32 && how == HOST_add);
  if (!ok) host_fail(line, "a copy that combines by %u elements of type %u", how, (u32)type);
}

void Copy::write() {
  const Stamp s = {writer, when, line, &clock, block->cluster};
  size_t n = 0;
  has_written = true;
  for (const Piece &p : pieces) {
    if (store && p.global) {
      size_t at;
      Region &r = global_region(p.global, p.bytes, 1, "a bulk store", line, &at);
      if (r.read_only) host_fail(line, "a bulk store to an operand");
      if (how) combine(&data[n], r.bytes + at, p.bytes, how, type);
      engine_writes(r, at, &data[n], p.bytes, s, how != HOST_STORE);
    } else if (!store) {
      const size_t at = shared_offset(*block, p.shared, p.bytes, 1, "a bulk load", line);
      engine_writes(block->shared, at, &data[n], p.bytes, s);
    }
    n += p.bytes;
  }
}

bool Copy::step() {
  if (store) {
    if (!has_read) {
      read();
      return false;
    }
    if (!has_written) write();
    return true;
  }
  Block &to = signals ? *signals : *block;
  Mbarrier &x = to.mbarriers.at(barrier);
  reader = writer = x.agent;
  when = host_when(x.phase + 1);
  read();
  write();
  complete_bytes(to, barrier, bytes, line);
  return true;
}

static std::shared_ptr<Copy> new_copy(bool store, int line) {
  std::shared_ptr<Copy> c = std::make_shared<Copy>();
  c->line = line;
  c->block = m.self->block;
  c->clock = m.self->clock;
  c->store = store;
  m.self->line = line;
  return c;
}

static void add_piece(Copy &c, u32 shared, u32 bytes, u8 *global) {
  const Piece p = {shared, bytes, global};
  c.pieces.push_back(p);
  c.bytes += bytes;
}

static void issue_load(std::shared_ptr<Copy> c, u32 barrier, int line) {
  const Mbarrier &x = mbarrier_at(barrier, "a bulk load", line, &c->barrier);
  if (!x.fenced && !x.published)
    host_fail(line,
              "no fence.mbarrier_init stands between mbarrier.init in line %d and the copy engine",
              x.init_line);
  host_release(m.self);
  host_issue(c);
  host_yield();
}

static void issue_store(std::shared_ptr<Copy> c) {
  Thread *t = m.self;
  if (!t->reads) {
    t->reads = host_new_agent(OF_STORE_READS, t->block, t->number);
    t->writes = host_new_agent(OF_STORE_WRITES, t->block, t->number);
  }
  c->reader = t->reads;
  c->writer = t->writes;
  c->when = host_when(++t->stores);
  t->open_group.ops.push_back(c);
  host_release(t);
  host_issue(c);
  host_yield();
}

/* A word on its way to another block, or this one, and its bytes for the mbarrier there. It is no
 * access of the async proxy. */
struct Word : Operation {
  u32 at, barrier, word[4], bytes = 4;
  HostCombine how = HOST_STORE;
  HostType type = HOST_OTHER;
  bool step() override {
    Mbarrier &x = block->mbarriers.at(barrier);
    const Stamp s = {x.agent, host_when(x.phase + 1), line, &clock, block->cluster};
    if (how) combine((u8 *)word, block->shared.bytes + at, bytes, how, type);
    engine_writes(block->shared, at, (const u8 *)word, bytes, s, how != HOST_STORE);
    complete_bytes(*block, barrier, bytes, line);
    return true;
  }
};

extern "C" void host_store_async(u32 a, u32 word, u32 b, u32 rank, int line) {
  Thread *t = m.self;
  std::shared_ptr<Word> w = std::make_shared<Word>();
  Block &to = block_of(rank, "st.async", line);
  mbarrier_of(to, b, "st.async", line, &w->barrier).shared = true;
  w->at = (u32)shared_offset(*t->block, a, 4, 4, "st.async", line);
  w->word[0] = word;
  w->line = t->line = line;
  w->block = &to;
  w->clock = t->clock;
  fence_proxy(w->clock, HOST_FENCE_CLUSTER);
  host_release(t);
  host_issue(w);
  host_yield();
}

/* An address of the window of the cluster has the number of the block, plus one, in the top byte.
 */
static Block &block_at(u32 a, const char *what, int line) {
  return block_of((a >> 24) - 1, what, line);
}

static void send(u32 a, const void *s, u32 bytes, u32 b, HostCombine how, HostType type, int line) {
  Thread *t = m.self;
  std::shared_ptr<Word> w = std::make_shared<Word>();
  Block &to = block_at(a, "st.async", line);
  if (a >> 24 != b >> 24) host_fail(line, "st.async whose mbarrier is in another block");
  if (!to.alive) host_fail(line, "st.async: the other block has ended");
  mbarrier_of(to, host_in_block(to, b) - to.shared.base + t->block->shared.base, "st.async", line,
              &w->barrier)
      .shared = true;
  w->at = (u32)shared_offset(to, host_in_block(to, a), bytes, bytes, "st.async", line);
  memcpy(w->word, s, bytes);
  w->bytes = bytes;
  w->how = how;
  w->type = type;
  w->line = t->line = line;
  w->block = &to;
  w->clock = t->clock;
  fence_proxy(w->clock, HOST_FENCE_CLUSTER);
  host_release(t);
  host_issue(w);
  host_yield();
}

extern "C" void host_st_async(u32 a, const void *s, u32 bytes, u32 b, int line) {
  send(a, s, bytes, b, HOST_STORE, HOST_OTHER, line);
}

extern "C" void host_red_async(u32 a, u32 x, u32 b, HostCombine how, HostType type, int line) {
  send(a, &x, 4, b, how, type, line);
}

extern "C" void host_mbarrier_arrive_tx_cluster(u32 a, u32 bytes, int line) {
  u32 at;
  Block &to = block_at(a, "mbarrier.arrive.expect_tx", line);
  const u32 own = host_in_block(to, a) - to.shared.base + m.self->block->shared.base;
  Mbarrier &x = mbarrier_of(to, own, "mbarrier.arrive.expect_tx", line, &at);
  x.shared = x.has_bytes = true;
  x.tx += bytes;
  gather(to, x, false);
  arrived(to, x, at, 1, line);
}

/* What cuTensorMapEncodeTiled and the instruction demand. */
static void check_map(const TensorMap *map, u32 shared, const i32 *c, u32 rank, int line) {
  if (!map->is_map) host_fail(line, "the tensor map was overwritten");
  if (map->rank != rank)
    host_fail(line, "the tensor map has %u dimensions, not %u", map->rank, rank);
  const u32 inner = map->box[0] * map->element;
  if (map->base % 16) host_fail(line, "the tensor begins at an address that is no multiple of 16");
  for (u32 k = 0; k + 1 < rank; k++)
    if (map->stride[k] % 16 || map->stride[k] >> 40)
      host_fail(line, "stride %llu of the tensor map", map->stride[k]);
  for (u32 k = 0; k < rank; k++) {
    if (!map->dim[k] || map->dim[k] >> 32)
      host_fail(line, "extent %llu of the tensor map", map->dim[k]);
    if (!map->box[k] || map->box[k] > 256)
      host_fail(line, "box of %u of the tensor map", map->box[k]);
  }
  if (inner % 16) host_fail(line, "rows of the box have %u bytes, no multiple of 16", inner);
  if (map->swizzle && inner != map->swizzle)
    host_fail(line, "rows of the box have %u bytes, and the swizzle %u", inner, map->swizzle);
  if ((i64)c[0] * map->element % 16)
    host_fail(line, "the box begins at element %d of a row, no multiple of 16 bytes", c[0]);
  if (shared % 128)
    host_fail(line, "a box at shared address %u, which is no multiple of 128", shared);
}

/* The mbarrier of one block of a pair, in the window of the cluster. */
static Block &pair_barrier(u32 a, u32 *at, int line) {
  Thread *t = m.self;
  host_tensor_group(2, line);
  Block &to = block_at(a, "cp.async.bulk.tensor.cta_group::2", line);
  if (host_rank_of(to) / 2 != host_rank_of(*t->block) / 2)
    host_fail(line, "the mbarrier is in a block of another pair");
  mbarrier_of(to, host_in_block(to, a) - to.shared.base + t->block->shared.base, "a load", line, at)
      .shared = true;
  return to;
}

/* Rows of the box lie densely in shared memory, in 16-byte chunks that the swizzle permutes. Of a
 * chunk that reaches out of the tensor the part inside is copied, zeros stand for the rest. */
static void add_box(Copy &copy, const TensorMap *map, u32 shared, const i32 *c) {
  u32 rows = 1;
  for (u32 k = 1; k < map->rank; k++) rows *= map->box[k];
  const u32 inner = map->box[0] * map->element;
  for (u32 row = 0; row < rows; row++) {
    u64 address = map->base;
    bool inside = true;
    for (u32 k = 1, n = row; k < map->rank; n /= map->box[k++]) {
      const i64 at = c[k] + (i64)(n % map->box[k]);
      inside = inside && at >= 0 && (u64)at < map->dim[k];
      address += (u64)at * map->stride[k - 1];
    }
    for (u32 x = 0; x < inner; x += 16) {
      const u32 to = swizzled(shared + row * inner + x, map->swizzle);
      const i64 first = (i64)c[0] * map->element + x, end = (i64)(map->dim[0] * map->element);
      const u32 n = !inside || first < 0 || first >= end ? 0
                    : end - first < 16                   ? (u32)(end - first)
                                                         : 16;
      if (n) add_piece(copy, to, n, (u8 *)(address + (u64)first));
      if (n < 16) add_piece(copy, to + n, 16 - n, nullptr);
    }
  }
}

extern "C" void host_tma_load(u32 dst, const TensorMap *map, u32 barrier, const i32 *c, u32 rank,
                              int line) {
  check_map(map, dst, c, rank, line);
  std::shared_ptr<Copy> copy = new_copy(false, line);
  add_box(*copy, map, dst, c);
  issue_load(copy, barrier, line);
}

/* One load for each block, which all write at the same place. */
extern "C" void host_tma_multicast(u32 dst, const TensorMap *map, u32 barrier, u32 mask,
                                   const i32 *c, u32 rank, int line) {
  Thread *t = m.self;
  const Cluster cluster = host_cluster_of(*t->block);
  check_map(map, dst, c, rank, line);
  if (!mask || mask >> cluster.size())
    host_fail(line, "multicast to blocks 0x%x of a cluster of %zu", mask, cluster.size());
  host_release(t);
  for (u32 k = 0; k < cluster.size(); k++) {
    if (!(mask >> k & 1)) continue;
    std::shared_ptr<Copy> copy = new_copy(false, line);
    Block &b = cluster[k];
    copy->block = &b;
    add_box(*copy, map, dst - t->block->shared.base + b.shared.base, c);
    Mbarrier &x = mbarrier_of(b, barrier, "a multicast load", line, &copy->barrier);
    x.shared = true;
    host_issue(copy);
  }
  host_yield();
}

/* Into this block, or, with a mask, into several; the bytes are those of one block's mbarrier. */
extern "C" void host_tma_pair(u32 dst, const TensorMap *map, u32 barrier, u32 mask, const i32 *c,
                              u32 rank, int line) {
  Thread *t = m.self;
  const Cluster cluster = host_cluster_of(*t->block);
  u32 at;
  check_map(map, dst, c, rank, line);
  Block &to = pair_barrier(barrier, &at, line);
  if (mask >> cluster.size())
    host_fail(line, "multicast to blocks 0x%x of a cluster of %zu", mask, cluster.size());
  host_release(t);
  for (u32 k = 0; k < cluster.size(); k++) {
    Block &b = cluster[k];
    if (mask ? !(mask >> k & 1) : &b != t->block) continue;
    if (!b.alive) host_fail(line, "a multicast load: the other block has ended");
    std::shared_ptr<Copy> copy = new_copy(false, line);
    copy->block = &b;
    copy->signals = &to;
    copy->barrier = at;
    add_box(*copy, map, dst - t->block->shared.base + b.shared.base, c);
    host_issue(copy);
  }
  host_yield();
}

/* ---- rows by number ------------------------------------------------------------------------ */

/* tile::gather4, tile::scatter4: four rows of a tensor map whose box has one; c[0] is the column.
 */
static void add_rows(Copy &copy, const TensorMap *map, u32 shared, const i32 *c, int line) {
  if (map->rank != 2 || map->box[1] != 1)
    host_fail(line, "rows by number of a tensor map with boxes of %u rows", map->box[1]);
  const u32 inner = map->box[0] * map->element;
  for (u32 row = 0; row < 4; row++)
    for (u32 x = 0; x < inner; x += 16) {
      const u32 to = swizzled(shared + row * inner + x, map->swizzle);
      const i64 at = (i64)c[0] * map->element + x, end = (i64)(map->dim[0] * map->element);
      const bool inside = c[row + 1] >= 0 && (u64)c[row + 1] < map->dim[1] && at >= 0 && at < end;
      const u32 n = inside ? (u32)(end - at < 16 ? end - at : 16) : 0;
      u8 *from = (u8 *)map->base + (u64)c[row + 1] * map->stride[0] + at;
      if (n) add_piece(copy, to, n, from);
      if (n < 16) add_piece(copy, to + n, 16 - n, nullptr);
    }
}

extern "C" void host_gather(u32 dst, const TensorMap *map, u32 barrier, const i32 *c, int line) {
  check_map(map, dst, c, 2, line);
  std::shared_ptr<Copy> copy = new_copy(false, line);
  add_rows(*copy, map, dst, c, line);
  issue_load(copy, barrier, line);
}

extern "C" void host_scatter(const TensorMap *map, u32 src, const i32 *c, int line) {
  check_map(map, src, c, 2, line);
  std::shared_ptr<Copy> copy = new_copy(true, line);
  add_rows(*copy, map, src, c, line);
  issue_store(copy);
}

extern "C" void host_tma_combine(const TensorMap *map, u32 src, const i32 *c, u32 rank,
                                 HostCombine how, int line) {
  if (map->base & EVERYWHERE) {
    for (u32 d = 0; d < m.devices; d++) {
      TensorMap one = *map;
      one.base = (u64)host_on_device((void *)map->base, d);
      host_tma_combine(&one, src, c, rank, how, line);
    }
    return;
  }
  check_map(map, src, c, rank, line);
  for (u32 k = 0; k < rank; k++) /* seen on an H200: an illegal instruction */
    if (c[k] < 0) host_fail(line, "a store that begins before the array, at %d", c[k]);
  std::shared_ptr<Copy> copy = new_copy(true, line);
  copy->how = how;
  copy->type = (HostType)map->type;
  if (how) check_combine(how, copy->type, line);
  add_box(*copy, map, src, c);
  issue_store(copy);
}

extern "C" void host_tma_store(const TensorMap *map, u32 src, const i32 *c, u32 rank, int line) {
  host_tma_combine(map, src, c, rank, HOST_STORE, line);
}

static void check_bulk(u32 shared, const void *global, u32 bytes, int line) {
  if (shared % 16 || (u64)global % 16 || bytes % 16 || !bytes)
    host_fail(line,
              "cp.async.bulk of %u bytes between shared address %u and global address %p: all must "
              "be multiples of 16",
              bytes, shared, global);
}

static void add_row(Copy &c, u32 shared, const void *global, u32 bytes) {
  for (u32 k = 0; k < bytes; k += 16) add_piece(c, shared + k, 16, (u8 *)global + k);
}

extern "C" void host_bulk_load(u32 dst, const void *src, u32 bytes, u32 barrier, int line) {
  check_bulk(dst, src, bytes, line);
  std::shared_ptr<Copy> copy = new_copy(false, line);
  add_row(*copy, dst, src, bytes);
  issue_load(copy, barrier, line);
}

extern "C" void host_bulk_store(void *dst, u32 src, u32 bytes, int line) {
  host_bulk_combine(dst, src, bytes, HOST_STORE, HOST_OTHER, line);
}

extern "C" void host_bulk_combine(void *dst, u32 src, u32 bytes, HostCombine how, HostType type,
                                  int line) {
  if ((u64)dst & EVERYWHERE) {
    for (u32 d = 0; d < m.devices; d++)
      host_bulk_combine(host_on_device(dst, d), src, bytes, how, type, line);
    return;
  }
  check_bulk(src, dst, bytes, line);
  std::shared_ptr<Copy> copy = new_copy(true, line);
  copy->how = how;
  copy->type = type;
  if (how) check_combine(how, type, line);
  add_row(*copy, src, dst, bytes);
  issue_store(copy);
}

extern "C" void host_prefetch(const TensorMap *map, int line) {
  if (!map->is_map) host_fail(line, "prefetch.tensormap of something else");
}

extern "C" void host_tma_prefetch(const TensorMap *map, const i32 *c, u32 rank, int line) {
  check_map(map, 0, c, rank, line);
}

extern "C" void host_bulk_prefetch(const void *p, u32 bytes, int line) {
  size_t at;
  check_bulk(0, p, bytes, line);
  global_region(p, bytes, 16, "cp.async.bulk.prefetch", line, &at);
}

extern "C" void host_group_commit(int line) {
  Thread *t = m.self;
  t->line = line;
  t->open_group.awaited = t->open_group.ops.empty();
  t->groups.push_back(t->open_group);
  t->open_group = BulkGroup();
}

extern "C" void host_group_wait(u32 n, bool read, int line) {
  Thread *t = m.self;
  t->line = line;
  const size_t count = t->groups.size() > n ? t->groups.size() - n : 0;
  for (size_t k = 0; k < count; k++) {
    t->groups[k].awaited = true;
    for (auto &op : t->groups[k].ops) {
      Copy *c = (Copy *)op.get();
      if (!c->has_read) c->step();
      if (!read && !c->has_written) host_finish(c);
      t->clock.seen.raise_to(c->reader, c->when);
      if (!read) t->clock.seen.raise_to(c->writer, c->when);
    }
  }
  if (!read) t->groups.erase(t->groups.begin(), t->groups.begin() + (long)count);
}

/* ---- commits and answers ------------------------------------------------------------------- */

/* One arrival after all that the thread gave to the tensor core before; it also stands for
 * fence::before_thread_sync. */
struct Commit : TensorOp {
  u32 at, mask;
  void execute() override;
};

/* The products came after all that was ordered before the commit, and who waits for it comes after
 * the products. The arrival in the other block has no known scope: there, what engines had done
 * came before it, and what threads of that block had told the issuer. */
static void learn_of(Clock &to, const Block &b, const Commit &c) {
  if (&b == c.block) return to.join(c.clock);
  const u32 engines = m.first_engine, first = b.threads[0].rank;
  for (u32 a = 0; a < m.n_clock; a++) {
    if (a < engines && a - first >= b.threads.size()) continue;
    to.seen.raise_to(a, c.clock.seen[a]);
    for (int k = 0; k < PROXIES; k++) to.fenced[k].raise_to(a, c.clock.fenced[k][a]);
  }
}

void Commit::execute() {
  const Cluster cluster = host_cluster_of(*block);
  for (u32 k = 0; k < cluster.size(); k++) {
    Block &b = cluster[k];
    if (mask ? !(mask >> k & 1) : &b != block) continue;
    if (!b.alive) host_fail(line, "tcgen05.commit: the other block has ended");
    Mbarrier &x = b.mbarriers.at(at);
    if (!x.pending) {
      host_fact("kind protocol");
      host_fail(line, "%s: the arrival of a commit cannot be counted. %s",
                host_place_of(b, at).c_str(), TOO_MANY);
    }
    learn_of(x.gathered, b, *this);
    x.gathered.seen.raise_to(who, when);
    x.gathered.carried.raise(known);
    x.gathered.carried.raise_to(who, when);
    x.pending--;
    complete_if_done(x);
  }
}

/* mask 0: the barrier of this block */
extern "C" void host_tcgen05_commit(u32 barrier, u32 mask, int line) {
  std::shared_ptr<Commit> o = std::make_shared<Commit>();
  const Cluster cluster = host_cluster_of(*m.self->block);
  host_tensor_group(mask ? 2 : 1, line);
  if (mask >> cluster.size())
    host_fail(line, "multicast to blocks 0x%x of a cluster of %zu", mask, cluster.size());
  for (u32 k = 0; k < cluster.size(); k++)
    if (mask ? mask >> k & 1 : &cluster[k] == m.self->block)
      mbarrier_of(cluster[k], barrier, "tcgen05.commit", line, &o->at);
  o->mask = mask;
  host_issue_tensor(o, false, line);
}

u32 host_barrier_for_bytes(Block &b, u32 barrier, const char *what, int line) {
  u32 at;
  mbarrier_of(b, barrier, what, line, &at).shared = true;
  return at;
}

void host_answer(Block &b, u32 at, u32 barrier, const u32 *words, const Clock &known, int line) {
  Mbarrier &x = b.mbarriers.at(barrier);
  const Stamp s = {x.agent, host_when(x.phase + 1), line, &known, b.cluster};
  engine_writes(b.shared, at, words, 16, s);
  complete_bytes(b, barrier, 16, line);
}

/* ---- wgmma --------------------------------------------------------------------------------- */

/* Instructions that all warps of a warpgroup must execute: the k-th of each must be the same. */
void host_same(Warp &w, const char *what, int line) {
  Block &b = *w.block;
  const size_t number = (size_t)(&w - &b.warps[0]);
  Warpgroup &g = b.warpgroups[number / 4];
  const std::string text = what + (" in line " + std::to_string(line));
  if (number / 4 * 4 + 4 > b.warps.size()) host_fail(line, "%s: the warpgroup is not whole", what);
  if (w.issued == g.issued.size()) g.issued.push_back(text);
  if (g.issued[w.issued] != text)
    host_fail(line, "warp %zu executes %s while another warp of its warpgroup executed %s", number,
              text.c_str(), g.issued[w.issued].c_str());
  w.issued++;
}

enum : u32 { POISON = 0xfff1fff1 }; /* NaN as f32 and as two f16 */

struct Product : Operation {
  Warp *warp;
  HostWgmma w;
  u32 a[32][4];
  std::shared_ptr<Flight> flight;
  u32 group = 0, when; /* group 0: not committed */
  bool done = false;
  bool step() override;
  void gather(u32 low, u32 high, bool transposed, u8 type, u32 first, u32 count, f32 *to);
  void multiply();
};

/* Rows of 16 bytes along K, or along M or N, all 32 bytes of K, as to[k][mn]. The layouts, in
 * bytes, T 16 bytes, S the bytes of the swizzle: K-major:   none: ((8, m), (T, 2)) : ((T, SBO), (1,
 * LBO)); else ((8, m), 32) : ((S, SBO), 1) MN-major:  none: ((T, m), (8, k)) : ((1, SBO), (T,
 * LBO)); else ((S, m), (8, k)) : ((1, LBO), (S, SBO)) and then the swizzle of the address. Only
 * elements of 16 bits may be MN-major. */
void Product::gather(u32 low, u32 high, bool transposed, u8 type, u32 first, u32 count, f32 *to) {
  static const u32 spans[] = {16, 128, 64, 32};
  const u32 window = block->shared.base & ~0x3ffffu; /* a descriptor has 18 bits of an address */
  const u32 start = ((low & 0x3fff) << 4) + window, lbo = (low >> 16 & 0x3fff) << 4;
  const Stamp s = {warp->agent, when, line, &clock, block->cluster};
  const u32 sbo = (high & 0x3fff) << 4, mode = high >> 30, span = spans[mode];
  const u32 bits = host_element_bits(type), row = 128 / bits;
  for (u32 k = 0; k < 2 * row; k += transposed ? 1 : row)
    for (u32 mn = first; mn < first + count; mn += transposed ? row : 1) {
      u32 at;
      if (!transposed) {
        at = mn % 8 * span + mn / 8 * sbo + k / row * (mode ? 16 : lbo);
      } else if (mode) {
        at = mn * 2 % span + mn * 2 / span * lbo + k % 8 * span + k / 8 * sbo;
      } else {
        at = mn / 8 * sbo + k % 8 * 16 + k / 8 * lbo;
      }
      u32 x[4];
      const size_t from =
          shared_offset(*block, swizzled(start + at, mode ? span : 0), 16, 16, "wgmma", line);
      engine_reads(block->shared, from, 16, s, x);
      for (u32 i = 0; i < row; i++) {
        const u32 kk = transposed ? k : k + i, n = (transposed ? mn + i : mn) - first;
        to[kk * count + n] = host_element(type, x, i);
      }
    }
}

/* Register i of lane l: row l / 4 (+ 8 if i / 2 is odd), column i / 4 * 8 + l % 4 * 2 + i % 2. */
void Product::multiply() {
  f32 a[32 * 16], b[32 * 256], sum[16 * 256];
  if (w.fresh) std::fill(flight->value.begin(), flight->value.end(), 0);
  const u32 n = w.n, row = (u32)(warp - &block->warps[0]) % 4 * 16;
  const u32 depth = 256 / host_element_bits(w.type_a);
  if (w.a) {
    for (u32 l = 0; l < 32; l++) host_fragment_a(w.type_a, this->a[l], l, a);
  } else {
    gather(w.a_low, w.a_high, w.transpose_a, w.type_a, row, 16, a);
  }
  gather(w.b_low, w.b_high, w.transpose_b, w.type_b, 0, n, b);
  for (u32 r = 0; r < 16; r++) {
    f32 *s = sum + r * n;
    for (u32 c = 0; c < n; c++) s[c] = 0;
    for (u32 k = 0; k < depth; k++) {
      const f32 x = a[k * 16 + r];
      const f32 *y = b + k * n;
      for (u32 c = 0; c < n; c++) s[c] += x * y[c];
    }
  }
  for (u32 l = 0; l < 32; l++)
    for (u32 i = 0; i < n / 2; i++) {
      const f32 s = sum[(l / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + l % 4 * 2 + i % 2];
      host_accumulate(w.acc, &flight->value[l * flight->words], i, s);
    }
}

bool Product::step() {
  if (done) return true;
  for (auto &p : warp->products)
    if (p.get() != this) {
      if (!((Product *)p.get())->done) ((Product *)p.get())->step();
    } else {
      break;
    }
  done = true;
  multiply();
  return true;
}

/* The base offset is one of the bits that must be 0: so a swizzle's pattern of 8 rows begins at a
 * multiple of its size. */
static void check_descriptor(const char *which, u32 low, u32 high, int line) {
  static const u32 patterns[] = {128, 1024, 512, 256};
  const u32 start = (low & 0x3fff) << 4, pattern = patterns[high >> 30];
  if (low & 0xc000c000 || high & 0x3fffc000)
    host_fail(line, "descriptor 0x%08x%08x of %s: bits that must be 0 are not", high, low, which);
  if (start % pattern / 128)
    host_fail(line, "%s begins at shared address %u, inside of a pattern of %u bytes", which, start,
              pattern);
}

static bool overlap(const void *a, u32 n, const void *b, u32 k) {
  const u8 *x = (const u8 *)a, *y = (const u8 *)b;
  return x < y + k * 4 && y < x + n * 4;
}

/* Registers are memory of the fiber's stack: have they changed since the fence? */
static void check_fenced(Thread *t, const void *registers, u32 bytes, const char *which, int line) {
  const u8 *end = t->stack + STACK_BYTES, *at = (const u8 *)registers;
  const u8 *first = end - t->fenced_stack.size();
  if (at < first || memcmp(at, t->fenced_stack.data() + (at - first), bytes))
    host_fail(line, "%s was written after the wgmma.fence", which);
}

static std::shared_ptr<Flight> flight_of(Warp &w, const HostWgmma *first, int line) {
  const u32 words = first->n / (first->acc == HOST_f16 ? 4 : 2);
  for (auto &f : w.flights) {
    if (f->registers[0] == first->d && f->words == words) return f;
    if (overlap(f->registers[0], f->words, first->d, words))
      host_fail(line, "the accumulator overlaps another one in flight, of another shape");
  }
  if (w.needs_fence)
    host_fail(line, "no wgmma.fence stands between the last access to registers and this product");
  std::shared_ptr<Flight> f = std::make_shared<Flight>();
  f->words = words;
  f->value.resize(32 * words);
  for (u32 l = 0; l < 32; l++) {
    f->registers[l] = ((const HostWgmma *)w.request[l]->p)->d;
    if (!first->fresh) check_fenced(w.lane[l], f->registers[l], words * 4, "the accumulator", line);
    memcpy(&f->value[l * words], f->registers[l], words * 4);
    for (u32 k = 0; k < words; k++) ((u32 *)f->registers[l])[k] = POISON;
  }
  w.flights.push_back(f);
  return f;
}

static void issue_product(Warp &w) {
  const HostWgmma *x = (const HostWgmma *)w.request[0]->p;
  const int line = w.request[0]->line;
  std::shared_ptr<Product> p = std::make_shared<Product>();
  for (u32 l = 1; l < 32; l++) {
    const HostWgmma *y = (const HostWgmma *)w.request[l]->p;
    if (x->a_low != y->a_low || x->a_high != y->a_high || x->b_low != y->b_low ||
        x->b_high != y->b_high)
      host_fail(line, "lanes 0 and %u have different descriptors", l);
  }
  char what[128];
  snprintf(what, sizeof what, "wgmma n%u a %08x%08x b %08x%08x", x->n, x->a_high, x->a_low,
           x->b_high, x->b_low);
  host_same(w, what, line);
  if (!x->a) check_descriptor("A", x->a_low, x->a_high, line);
  check_descriptor("B", x->b_low, x->b_high, line);
  p->line = line;
  p->block = w.block;
  p->warp = &w;
  p->w = *x;
  if (!w.agent) w.agent = host_new_agent(OF_PRODUCTS, w.block, w.lane[0]->number / 32);
  p->when = host_when(++w.count);
  p->clock = w.lane[0]->clock;
  for (u32 l = 1; l < 32; l++) p->clock.meet(w.lane[l]->clock);
  for (u32 l = 0; l < 32; l++) {
    if (x->a) memcpy(p->a[l], ((const HostWgmma *)w.request[l]->p)->a, 16);
    host_release(w.lane[l]);
  }
  p->flight = flight_of(w, x, line);
  for (u32 l = 0; l < 32 && x->a; l++)
    check_fenced(w.lane[l], ((const HostWgmma *)w.request[l]->p)->a, 16, "A, in registers,", line);
  w.products.push_back(p);
  host_issue(p);
}

extern "C" void host_wgmma(const HostWgmma *x, int line) {
  Request r = {"wgmma", line, ~0u, 0, 0, (void *)x, 0};
  host_meet(&r, issue_product);
}

static void fence(Warp &w) {
  host_same(w, "wgmma.fence", w.request[0]->line);
  w.needs_fence = false;
}

extern "C" void host_wgmma_fence(int line) {
  Thread *t = m.self;
  const u8 *first = (const u8 *)__builtin_frame_address(0), *end = t->stack + STACK_BYTES;
  t->fenced_stack.assign(first, end);
  Request r = {"wgmma.fence", line, ~0u, 0, 0, nullptr, 0};
  host_meet(&r, fence);
}

static void commit(Warp &w) {
  host_same(w, "wgmma.commit_group", w.request[0]->line);
  w.groups++;
  w.last.push_back(host_when(w.count));
  for (auto &p : w.products)
    if (!((Product *)p.get())->group) ((Product *)p.get())->group = w.groups;
  Warpgroup &g = w.block->warpgroups[(size_t)(&w - &w.block->warps[0]) / 4];
  for (Thread *t : g.waiters) host_wake(t);
  g.waiters.clear();
}

extern "C" void host_wgmma_commit(int line) {
  Request r = {"wgmma.commit_group", line, ~0u, 0, 0, nullptr, 0};
  host_meet(&r, commit);
}

static void hand_back(Warp &w, Flight &f, int line) {
  for (u32 l = 0; l < 32; l++) {
    u32 *r = (u32 *)f.registers[l];
    for (u32 k = 0; k < f.words; k++)
      if (r[k] != POISON) {
        host_fact("kind protocol");
        host_fail(line,
                  "an accumulator was written while a product was in flight. Wait before: "
                  "plgpu.wgmma_wait(0)");
      }
    memcpy(r, &f.value[l * f.words], f.words * 4);
  }
  w.needs_fence = true;
}

/* A product is one of the whole warpgroup: it is complete for a warp when it is for all four. */
static bool committed_by_all(Warp &w, u32 last) {
  Warp *first = &w.block->warps[(size_t)(&w - &w.block->warps[0]) / 4 * 4];
  for (Warp *o = first; last && o < first + 4; o++)
    if (o->groups < last) return false;
  return true;
}

static bool complete_in_others(Warp &w, u32 last) {
  Warp *first = &w.block->warps[(size_t)(&w - &w.block->warps[0]) / 4 * 4];
  if (!committed_by_all(w, last)) return false;
  for (Warp *o = first; last && o < first + 4; o++) {
    const std::vector<std::shared_ptr<Operation>> products = o->products;
    for (auto &op : products)
      if (((Product *)op.get())->group && ((Product *)op.get())->group <= last)
        host_finish(op.get());
    for (u32 l = 0; l < 32 && o->agent; l++)
      w.lane[l]->clock.seen.raise_to(o->agent, o->last[last - 1], true);
  }
  return true;
}

static void retire(Warp &w) {
  const u32 n = w.request[0]->a, line = (u32)w.request[0]->line;
  const u32 last = w.groups > n ? w.groups - n : 0;
  size_t count = 0;
  const bool done = complete_in_others(w, last);
  for (u32 l = 0; l < 32; l++) w.request[l]->result = done;
  if (!done) return;
  host_same(w, "wgmma.wait_group", (int)line);
  for (auto &op : w.products) {
    Product *p = (Product *)op.get();
    if (!p->group || p->group > last) break;
    host_finish(p);
    for (u32 l = 0; l < 32; l++) w.lane[l]->clock.seen.raise_to(w.agent, p->when, true);
    count++;
  }
  w.products.erase(w.products.begin(), w.products.begin() + (long)count);
  for (size_t k = 0; k < w.flights.size();) {
    bool open = false;
    for (auto &op : w.products) open = open || ((Product *)op.get())->flight == w.flights[k];
    if (open) {
      k++;
    } else {
      hand_back(w, *w.flights[k], (int)line);
      w.flights.erase(w.flights.begin() + (long)k);
    }
  }
}

extern "C" void host_wgmma_wait(u32 n, int line) {
  Request r = {"wgmma.wait_group", line, ~0u, n, 0, nullptr, 0};
  Block &b = *m.self->block;
  for (;;) {
    host_meet(&r, retire);
    if (r.result) return;
    Warp &w = *m.self->warp;
    if (committed_by_all(w, w.groups > n ? w.groups - n : 0)) continue; /* since the lanes met */
    b.warpgroups[m.self->number / 128].waiters.push_back(m.self);
    host_sleep("products that other warps of the warpgroup have not issued");
  }
}

extern "C" void host_pin(const void *registers, u32 bytes, int line) {
  Thread *t = m.self;
  t->line = line;
  for (auto &f : t->warp->flights) {
    if (!overlap(f->registers[t->lane], f->words, registers, bytes / 4)) continue;
    int product = 0;
    for (auto &op : t->warp->products)
      if (((Product *)op.get())->flight == f) product = op->line;
    host_fact("kind protocol");
    host_fail(line,
              "the accumulator is used while the wgmma in line %d may still write to it. Wait "
              "before: plgpu.wgmma_wait(0)",
              product);
  }
}

void host_products_end(Warp &w) {
  if (w.products.empty()) return;
  host_fact("kind protocol");
  host_fail(w.products[0]->line,
            "the block ends and nobody waited for this product: call "
            "plgpu.wgmma_wait(0)");
}
