/* Memory: every byte knows who wrote it and who read it since. See machine.h for the clocks. */
#include "machine.h"

/* Accesses. */
enum { READ, WRITE, UPDATE };
static const char *const names[] = {"read", "write", "atomic"};

static int write_of(const Mark &b) { return b.atomic ? UPDATE : WRITE; }

void Region::forget() {
  const Mark none = {0, 0, NOBODY, NOBODY, 0, 0, 0, 0, 0, 0, 0};
  marks.assign(size, none);
  for (EngineReads &e : engine_reads) e.n = 0;
  crowds.clear();
  before_atomics.clear();
}

static Mark *marks_of(Region &r) {
  if (r.marks.empty()) r.forget();
  return r.marks.data();
}

void Accesses::set(u32 who, u32 value) {
  if (when.empty()) first = who;
  if (who < first) {
    when.insert(when.begin(), first - who, 0);
    first = who;
  }
  if (who - first >= when.size()) when.resize(who - first + 1);
  when[who - first] = value;
}

static Crowd &crowd_of(Region &r, size_t at) { return r.crowds[at]; }

static bool is_engine(u16 who) { return who < MANY && who >= m.first_engine; }

static const char *whom(u16 who, char *text, size_t size) {
  if (is_engine(who)) return "an engine";
  if (who == MANY) return "several threads";
  snprintf(text, size, "thread %u", who % m.block_threads);
  return text;
}

/* Who makes the access that is looked at: an engine, or the thread that runs. */
static u16 own(const Stamp *s) { return s ? s->who : (u16)m.self->rank; }

/* Of mark b or of a read by an engine: who made the access before it, and where. */
static void __attribute__((noreturn)) unordered(const Region &r, size_t at, int access, int before,
                                                u16 who, int where, const Stamp *s, int line) {
  char text[32];
  host_fact("kind race");
  host_fact("lacks order");
  host_fact_access(names[before], r, at, who, where);
  host_fact_access(names[access], r, at, own(s), line);
  host_fail(line, "%s of byte %zu of %s is not ordered after its %s by %s in line %d",
            names[access], at, r.name, names[before], whom(who, text, sizeof text), where);
}

static void uninitialised(const Region &r, size_t at, const Stamp *s, int line) {
  if (m.may_be_unwritten) return;
  host_fact("kind unwritten");
  host_fact_access("read", r, at, own(s), line);
  host_fail(line, "byte %zu of %s is read and was never written", at, r.name);
}

static void __attribute__((noreturn)) in_barrier(const Region &r, size_t at, int line) {
  host_fail(line, "byte %zu of %s is part of an mbarrier", at, r.name);
}

static void __attribute__((noreturn))
unfenced(const Region &r, size_t at, int access, u16 writer, const Mark &b, const Stamp &s) {
  host_fact("kind race");
  host_fact("lacks fence");
  host_fact_access(names[write_of(b)], r, at, writer, b.write_line);
  host_fact_access(names[access], r, at, s.who, s.line);
  host_fail(s.line,
            "%s of byte %zu of %s by an engine: no proxy fence for it stands after its write by "
            "thread %u "
            "in line %d",
            names[access], at, r.name, writer % m.block_threads, b.write_line);
}

/* A load may still wait in its queue when what follows it in program order has been done. */
static void __attribute__((noreturn))
unread(const Region &r, size_t at, u16 reader, const Mark &b, const Stamp &s) {
  char text[32];
  host_fact("kind race");
  host_fact("lacks drain");
  host_fact_access("read", r, at, reader, b.read_line);
  host_fact_access("write", r, at, s.who, s.line);
  host_fail(s.line,
            "write of byte %zu of %s by an engine: no proxy fence stands after its read by %s in "
            "line %d",
            at, r.name, whom(reader, text, sizeof text), b.read_line);
}

/* What may still be written is in no order with anything. */
static void in_flight(const Region &r, size_t at, int access, const Mark &b, const Stamp *s,
                      int line) {
  if (!b.copied) return;
  host_fact("kind race");
  host_fact("lacks wait");
  host_fact_access("write", r, at, b.writer, b.copied);
  host_fact_access(names[access], r, at, own(s), line);
  host_fail(line, "%s of byte %zu of %s while the cp.async of line %d may still write it",
            names[access], at, r.name, b.copied);
}

/* ---- other clusters, other launches -------------------------------------------------------- */

enum : u16 { SEVERAL = 0xffff }; /* clusters */

static u16 own_cluster(const Stamp *s) { return s ? s->cluster : m.self->block->cluster; }

/* Clusters that do not wait for each other are in no order, whenever they run here. */
static bool in_no_order(const Region &r) { return r.global && !r.read_only && !m.together; }

static void __attribute__((noreturn)) across(const Region &r, size_t at, int access, int before,
                                             u16 cluster, int where, const Stamp *s, int line) {
  const std::string block = cluster == SEVERAL ? "" : " " + host_name_of(m.began[cluster - 1u]);
  host_fact("kind race");
  host_fact("lacks grid");
  host_fact("access touch %s space gmem region %u at %zu line %d by cluster%s", names[before],
            r.number, at, where, block.c_str());
  host_fact_access(names[access], r, at, own(s), line);
  host_fail(line, "%s of byte %zu of %s is not ordered after its %s by another cluster in line %d",
            names[access], at, r.name, names[before], where);
}

/* A write of the byte; same: of what is there. Clocks know nothing of other clusters then. */
static void write_among_clusters(Region &r, Mark &b, size_t at, bool same, bool update,
                                 const Stamp *s, int line) {
  if (!in_no_order(r)) return;
  const u16 mine = own_cluster(s);
  const bool wrote = b.wrote && b.wrote != mine, was_read = b.was_read && b.was_read != mine;
  const bool updates = update && b.atomic;
  const int access = update ? UPDATE : WRITE;
  if (wrote && !same && !updates)
    across(r, at, access, write_of(b), b.wrote, b.write_line, s, line);
  if (was_read && !same) across(r, at, access, READ, b.was_read, b.read_line, s, line);
  if (wrote && !updates) b.writer = NOBODY;
  if (was_read) b.reader = NOBODY;
  else b.was_read = 0;
  b.wrote = wrote ? SEVERAL : mine;
}

/* Is the byte one that several clusters wrote alike? */
static bool read_among_clusters(Region &r, Mark &b, size_t at, const Stamp *s, int line) {
  if (!in_no_order(r)) return false;
  const u16 mine = own_cluster(s);
  if (b.wrote && b.wrote != mine && (b.wrote != SEVERAL || b.atomic))
    across(r, at, READ, write_of(b), b.wrote, b.write_line, s, line);
  return b.wrote == SEVERAL;
}

static void note_cluster(Region &r, Mark &b, const Stamp *s) {
  if (!in_no_order(r)) return;
  const u16 mine = own_cluster(s);
  b.was_read = !b.was_read || b.was_read == mine ? mine : (u16)SEVERAL;
}

/* The launch before this one may still write what is read, and read what is written. */
static void after_launches(const Region &r, size_t at, int access, const Clock &c, const Stamp *s,
                           int line) {
  if (!m.dependent || !r.global || c.launched || r.counters) return;
  host_fact("kind race");
  host_fact("lacks launch");
  host_fact("access touch write space gmem region %u at %zu line 0 by launch", r.number, at);
  host_fact_access(names[access], r, at, own(s), line);
  host_fail(line, "%s of byte %zu of %s before griddepcontrol.wait", names[access], at, r.name);
}

/* ---- reads by engines ---------------------------------------------------------------------- */

static u16 mask_of(size_t chunk, size_t at, size_t n) {
  const size_t first = at > chunk * 16 ? at - chunk * 16 : 0;
  const size_t end = at + n < chunk * 16 + 16 ? at + n - chunk * 16 : 16;
  return (u16)((0xffffu >> (16 - end)) & ~0u << first);
}

static void note_engine_reads(Region &r, size_t at, size_t n, const Stamp &s) {
  if (r.engine_reads.empty()) r.engine_reads.assign(r.size / 16 + 1, EngineReads());
  for (size_t chunk = at / 16; chunk * 16 < at + n; chunk++) {
    EngineReads &e = r.engine_reads[chunk];
    u32 k = 0;
    while (k < e.n && (e.at[k].who != s.who || e.at[k].cluster != s.cluster)) k++;
    if (k == MAX_READERS) k = 0; /* the first is forgotten */
    if (k == e.n) {
      e.n++;
      e.at[k].mask = 0;
    }
    e.at[k].who = s.who;
    e.at[k].cluster = s.cluster;
    e.at[k].when = s.when;
    e.at[k].line = (u16)s.line;
    e.at[k].mask |= mask_of(chunk, at, n);
  }
}

/* The first of the bytes of a chunk that a write changes, or -1. */
static int changed(const Region &r, size_t chunk, u32 mask, size_t at, const void *from) {
  for (int k = 0; k < 16; k++) {
    const size_t byte = chunk * 16 + (size_t)k;
    if ((mask >> k & 1) && (!from || r.bytes[byte] != ((const u8 *)from)[byte - at])) return k;
  }
  return -1;
}

/* A write by one who knows c must be after them; then they are of the past, unless it is an atomic:
 * another one may come in any order with that. Of those by other clusters only a change matters.
 * from: what is written, NULL: it is not known. */
static void after_engine_reads(Region &r, size_t at, size_t n, int access, const void *from,
                               const Clock &c, const Stamp *s, int line) {
  if (r.engine_reads.empty()) return;
  for (size_t chunk = at / 16; chunk * 16 < at + n; chunk++) {
    EngineReads &e = r.engine_reads[chunk];
    const u16 mask = mask_of(chunk, at, n);
    for (u32 k = 0; k < e.n; k++) {
      if (!(e.at[k].mask & mask)) continue;
      if (in_no_order(r) && e.at[k].cluster != own_cluster(s)) {
        const int byte = changed(r, chunk, e.at[k].mask & mask, at, from);
        if (byte >= 0)
          across(r, chunk * 16 + (size_t)byte, access, READ, e.at[k].cluster, e.at[k].line, s,
                 line);
        continue;
      }
      if (c.seen[e.at[k].who] < e.at[k].when)
        unordered(r, chunk * 16 + (u32)__builtin_ctz(e.at[k].mask & mask), access, READ,
                  e.at[k].who, e.at[k].line, s, line);
      if (access != UPDATE) e.at[k].mask &= (u16)~mask;
    }
    while (e.n && !e.at[e.n - 1].mask) e.n--;
  }
}

/* ---- by threads ---------------------------------------------------------------------------- */

static bool any_seen(const Accesses &x, const Times &seen) {
  for (u32 k = 0; k < x.when.size(); k++)
    if (x.when[k] && seen[x.first + k] >= x.when[k]) return true;
  return false;
}

/* One of them that is not among what is seen; MANY: all are. */
static u16 one_of(const Accesses &x, const Times &seen, u32 but = NOBODY) {
  for (u32 k = 0; k < x.when.size(); k++)
    if (x.when[k] > seen[x.first + k] && x.first + k != but) return (u16)(x.first + k);
  return MANY;
}

static bool all_seen(const Accesses &x, const Times &seen, u32 but = NOBODY) {
  return one_of(x, seen, but) == MANY;
}

static bool all_after(const Accesses &x, const Times &seen) { return all_seen(x, seen); }

/* Of a thread that wrote there. */
static const Times &fenced_of(const Clock &c, const Region &r, u16 writer) {
  const bool far = !r.global && &m.blocks[writer / m.block_threads].shared != &r;
  return c.fenced[far ? FAR : r.global];
}

/* Engines need no proxy fence among themselves. */
static bool all_fenced(const Accesses &x, const Clock &c, const Region &r) {
  for (u32 k = 0; k < x.when.size(); k++)
    if (!is_engine((u16)(x.first + k)) &&
        x.when[k] > fenced_of(c, r, (u16)(x.first + k))[x.first + k])
      return false;
  return true;
}

/* Is each that is not among what is seen by somebody who may? */
template <typename May>
static bool others_may(const Accesses &x, const Times &seen, May may) {
  for (u32 k = 0; k < x.when.size(); k++)
    if (x.when[k] > seen[x.first + k] && !may((u16)(x.first + k))) return false;
  return true;
}

static void note_read(Region &r, Mark &b, size_t at, Thread *t, int line) {
  const Times &seen = t->clock.seen;
  if (b.reader == MANY) {
    crowd_of(r, at).read.set(t->rank, seen[t->rank]);
    return;
  }
  if (b.reader != NOBODY && b.reader != t->rank && seen[b.reader] < b.read) {
    Crowd &c = crowd_of(r, at);
    c.read.when.clear();
    c.read.set(b.reader, b.read);
    c.read.set(t->rank, seen[t->rank]);
    b.reader = MANY;
  } else {
    b.reader = (u16)t->rank;
    b.read = seen[t->rank];
  }
  b.read_line = (u16)line;
}

void thread_reads(Region &r, size_t at, size_t n, int line) {
  Thread *t = m.self;
  Mark *marks = marks_of(r);
  const Times &seen = t->clock.seen;
  after_launches(r, at, READ, t->clock, nullptr, line);
  for (size_t k = at; k < at + n; k++) {
    Mark &b = marks[k];
    if (b.barrier) in_barrier(r, k, line);
    in_flight(r, k, READ, b, nullptr, line);
    if (read_among_clusters(r, b, k, nullptr, line)) {
    } else if (b.writer == NOBODY) {
      if (!r.born_written) uninitialised(r, k, nullptr, line);
    } else if (b.writer == MANY) {
      const Accesses &write = crowd_of(r, k).write;
      if (b.atomic ? !all_seen(write, seen, t->rank) : !any_seen(write, seen))
        unordered(r, k, READ, write_of(b), one_of(write, seen, t->rank), b.write_line, nullptr,
                  line);
    } else if (seen[b.writer] < b.write) {
      unordered(r, k, READ, write_of(b), b.writer, b.write_line, nullptr, line);
    }
    note_read(r, b, k, t, line);
    note_cluster(r, b, nullptr);
  }
}

static bool write_is_ordered(Region &r, const Mark &b, size_t at, const Thread *t) {
  const Times &seen = t->clock.seen;
  if (b.writer == NOBODY) return true;
  if (b.writer == MANY) return all_seen(crowd_of(r, at).write, seen, t->rank);
  return seen[b.writer] >= b.write;
}

static bool reads_are_ordered(Region &r, const Mark &b, size_t at, const Thread *t) {
  const Times &seen = t->clock.seen;
  if (b.reader == NOBODY || b.reader == t->rank) return true;
  if (b.reader == MANY) return all_seen(crowd_of(r, at).read, seen, t->rank);
  return seen[b.reader] >= b.read;
}

/* Lanes of one Pallas thread may each store what all of them have, and read it. */
static bool same_thread(u16 who, const Thread *t) {
  return !is_engine(who) && who / 128 == t->rank / 128 && m.block_threads % 128 == 0;
}

/* Did others than the lanes of t read the byte in no order with t? */
static bool others_read(Region &r, const Mark &b, size_t at, const Thread *t) {
  if (b.reader == NOBODY) return false;
  if (b.reader != MANY) return !same_thread(b.reader, t);
  return !others_may(crowd_of(r, at).read, t->clock.seen,
                     [&](u16 who) { return same_thread(who, t); });
}

/* Did only lanes of t write the byte, or threads of other points of the grid or other devices?
 * Those may write what is there already. */
static bool may_repeat(Region &r, const Mark &b, size_t at, const Thread *t) {
  const auto may = [&](u16 who) {
    return same_thread(who, t) || m.blocks[who / m.block_threads].cluster != t->block->cluster;
  };
  if (b.writer != MANY) return is_engine(b.writer) || may(b.writer);
  return others_may(crowd_of(r, at).write, t->clock.seen,
                    [&](u16 who) { return is_engine(who) || may(who); });
}

/* Whose write or read it is, for messages: one that is not ordered, of several. */
static u16 writer_of(Region &r, const Mark &b, size_t at, const Thread *t) {
  return b.writer == MANY ? one_of(crowd_of(r, at).write, t->clock.seen, t->rank) : b.writer;
}
static u16 reader_of(Region &r, const Mark &b, size_t at, const Thread *t) {
  return b.reader == MANY ? one_of(crowd_of(r, at).read, t->clock.seen, t->rank) : b.reader;
}

/* Threads may write one value to one place in any order, and update it. */
static void join_writers(Region &r, Mark &b, size_t at, u16 who, u32 when) {
  Crowd &c = crowd_of(r, at);
  if (b.writer != MANY) {
    c.write.when.clear();
    c.write.set(b.writer, b.write);
    b.writer = MANY;
  }
  c.write.set(who, when);
}

/* The first atomic after a plain write. */
static void keep_plain_write(Region &r, const Mark &b, size_t at) {
  if (b.writer == NOBODY) {
    r.before_atomics.erase(at);
    return;
  }
  PlainWrite &p = r.before_atomics[at];
  p = {b.write, b.writer, b.write_line, {}};
  if (b.writer == MANY) p.many = crowd_of(r, at).write;
}

/* Another atomic, by one who knows `seen`. */
static void after_plain_write(Region &r, size_t at, const Times &seen, const Stamp *s, int line) {
  const auto found = r.before_atomics.find(at);
  if (found == r.before_atomics.end()) return;
  const PlainWrite &p = found->second;
  const bool one = p.many.when.empty();
  if (one ? seen[p.writer] >= p.write : any_seen(p.many, seen)) return;
  const u16 who = one ? p.writer : one_of(p.many, seen);
  unordered(r, at, UPDATE, WRITE, who, p.line, s, line);
}

/* Are the words that hold byte k float32 NaN? The hardware has one NaN for results of arithmetic,
 * the CPU here passes on that of an operand: lanes that add up the same can differ in its bits. */
static bool both_nan(const Region &r, size_t at, size_t k, const void *from, size_t n) {
  const size_t word = k & ~(size_t)3;
  if (at % 4 || n % 4) return false;
  float old, now;
  memcpy(&old, &r.bytes[at + word], 4);
  memcpy(&now, (const u8 *)from + word, 4);
  return old != old && now != now;
}

/* Is it the same store, of another lane, where the order does not matter? */
static bool one_wins(const Mark &b, const Thread *t, int line) {
  return b.writer < MANY && b.write_line == (u16)line && (u32)line < m.n_loose && m.loose[line] &&
         same_thread(b.writer, t);
}

void thread_writes(Region &r, size_t at, const void *from, size_t n, int line) {
  Thread *t = m.self;
  bool changes = false;
  m.far_stores |= !r.global && &r != &t->block->shared;
  Mark *marks = marks_of(r);
  after_launches(r, at, WRITE, t->clock, nullptr, line);
  after_engine_reads(r, at, n, WRITE, from, t->clock, nullptr, line);
  for (size_t k = 0; k < n; k++) {
    Mark &b = marks[at + k];
    u8 value = ((const u8 *)from)[k];
    bool same = r.bytes[at + k] == value;
    if (!same && !write_is_ordered(r, b, at + k, t) && both_nan(r, at, k, from, n)) {
      same = true;
      value = r.bytes[at + k];
    }
    changes |= !same;
    if (b.barrier) in_barrier(r, at + k, line);
    in_flight(r, at + k, WRITE, b, nullptr, line);
    write_among_clusters(r, b, at + k, same, false, nullptr, line);
    if (!reads_are_ordered(r, b, at + k, t) && (!same || others_read(r, b, at + k, t)))
      unordered(r, at + k, WRITE, READ, reader_of(r, b, at + k, t), b.read_line, nullptr, line);
    if (!write_is_ordered(r, b, at + k, t) && !one_wins(b, t, line)) {
      if (!same || b.atomic || is_engine(b.writer) || !may_repeat(r, b, at + k, t))
        unordered(r, at + k, WRITE, write_of(b), writer_of(r, b, at + k, t), b.write_line, nullptr,
                  line);
      join_writers(r, b, at + k, (u16)t->rank, t->clock.seen[t->rank]);
    } else {
      b.writer = (u16)t->rank;
      b.write = t->clock.seen[t->rank];
      b.reader = NOBODY;
    }
    b.atomic = 0;
    b.write_line = (u16)line;
    r.bytes[at + k] = value;
  }
  m.progress += changes; /* lanes that poll tell each other the same again and again */
}

/* Reads and writes; those of several threads need no order. */
static void thread_updates(Region &r, size_t at, size_t n, int line) {
  Thread *t = m.self;
  m.far_stores |= !r.global && &r != &t->block->shared;
  Mark *marks = marks_of(r);
  after_launches(r, at, UPDATE, t->clock, nullptr, line);
  after_engine_reads(r, at, n, UPDATE, nullptr, t->clock, nullptr, line);
  for (size_t k = at; k < at + n; k++) {
    Mark &b = marks[k];
    if (b.barrier) in_barrier(r, k, line);
    in_flight(r, k, UPDATE, b, nullptr, line);
    if (b.writer == NOBODY && !b.wrote && !r.born_written) uninitialised(r, k, nullptr, line);
    write_among_clusters(r, b, k, false, true, nullptr, line);
    if (!reads_are_ordered(r, b, k, t))
      unordered(r, k, UPDATE, READ, reader_of(r, b, k, t), b.read_line, nullptr, line);
    if (write_is_ordered(r, b, k, t)) {
      if (!b.atomic) keep_plain_write(r, b, k);
      b.writer = (u16)t->rank;
      b.write = t->clock.seen[t->rank];
    } else {
      if (!b.atomic)
        unordered(r, k, UPDATE, WRITE, writer_of(r, b, k, t), b.write_line, nullptr, line);
      after_plain_write(r, k, t->clock.seen, nullptr, line);
      join_writers(r, b, k, (u16)t->rank, t->clock.seen[t->rank]);
    }
    b.atomic = 1;
    b.write_line = (u16)line;
  }
}

/* ---- by engines ---------------------------------------------------------------------------- */

void engine_reads(Region &r, size_t at, size_t n, const Stamp &s, void *to) {
  const Clock &c = *s.known;
  const Times &fenced = c.fenced[r.global];
  Mark *marks = marks_of(r);
  after_launches(r, at, READ, c, &s, s.line);
  for (size_t k = at; k < at + n; k++) {
    Mark &b = marks[k];
    if (b.barrier) in_barrier(r, k, s.line);
    in_flight(r, k, READ, b, &s, s.line);
    if (read_among_clusters(r, b, k, &s, s.line)) {
    } else if (b.writer == NOBODY) {
      if (!r.born_written) uninitialised(r, k, &s, s.line);
    } else if (is_engine(b.writer)) {
      if (c.seen[b.writer] < b.write)
        unordered(r, k, READ, write_of(b), b.writer, b.write_line, &s, s.line);
    } else if (b.writer == MANY) {
      const Accesses &write = crowd_of(r, k).write;
      const auto enough = b.atomic ? all_after : any_seen;
      if (!enough(write, c.seen))
        unordered(r, k, READ, write_of(b), one_of(write, c.seen), b.write_line, &s, s.line);
      if (!(b.atomic ? all_fenced(write, c, r) : any_seen(write, fenced)))
        unfenced(r, k, READ, one_of(write, fenced), b, s);
    } else if (fenced_of(c, r, b.writer)[b.writer] < b.write) {
      if (c.seen[b.writer] >= b.write) unfenced(r, k, READ, b.writer, b, s);
      unordered(r, k, READ, write_of(b), b.writer, b.write_line, &s, s.line);
    }
  }
  note_engine_reads(r, at, n, s);
  if (to) memcpy(to, r.bytes + at, n);
}

void engine_writes(Region &r, size_t at, const void *from, size_t n, const Stamp &s, bool update) {
  const Clock &c = *s.known;
  const int access = update ? UPDATE : WRITE;
  const Times &fenced = c.fenced[r.global];
  Mark *marks = marks_of(r);
  after_launches(r, at, access, c, &s, s.line);
  after_engine_reads(r, at, n, access, update ? nullptr : from, c, &s, s.line);
  for (size_t k = at; k < at + n; k++) {
    Mark &b = marks[k];
    if (b.barrier) in_barrier(r, k, s.line);
    in_flight(r, k, access, b, &s, s.line);
    write_among_clusters(r, b, k, r.bytes[k] == ((const u8 *)from)[k - at], update, &s, s.line);
    if (b.reader == MANY) {
      const Accesses &read = crowd_of(r, k).read;
      if (!all_seen(read, c.seen))
        unordered(r, k, access, READ, one_of(read, c.seen), b.read_line, &s, s.line);
      if (!r.global && !all_seen(read, fenced)) unread(r, k, one_of(read, fenced), b, s);
    } else if (b.reader != NOBODY) {
      if (c.seen[b.reader] < b.read)
        unordered(r, k, access, READ, b.reader, b.read_line, &s, s.line);
      if (!r.global && fenced[b.reader] < b.read) unread(r, k, b.reader, b, s);
    }
    if (update && b.writer == NOBODY && !b.wrote && !r.born_written)
      uninitialised(r, k, &s, s.line);
    if (update && !b.atomic) keep_plain_write(r, b, k);
    if (update && b.atomic) {
      after_plain_write(r, k, c.seen, &s, s.line);
      if (b.writer != s.who) join_writers(r, b, k, s.who, s.when);
    } else if (b.writer == MANY) {
      const Accesses &write = crowd_of(r, k).write;
      if (!all_seen(write, c.seen))
        unordered(r, k, access, write_of(b), one_of(write, c.seen), b.write_line, &s, s.line);
      if (!all_fenced(write, c, r)) unfenced(r, k, access, one_of(write, fenced), b, s);
    } else if (b.writer != NOBODY) {
      if (c.seen[b.writer] < b.write)
        unordered(r, k, access, write_of(b), b.writer, b.write_line, &s, s.line);
      if (!is_engine(b.writer) && fenced_of(c, r, b.writer)[b.writer] < b.write)
        unfenced(r, k, access, b.writer, b, s);
    }
    if (!update || !b.atomic || b.writer == s.who) {
      b.writer = s.who;
      b.write = s.when;
    }
    b.write_line = (u16)s.line;
    b.atomic = update;
    if (!update) b.reader = NOBODY;
  }
  memcpy(r.bytes + at, from, n);
}

/* ---- the end of a launch on several devices ------------------------------------------------- */

static u32 device_of(u16 who) {
  const u32 first = m.first_engine;
  return m.blocks[who < first ? who / m.block_threads : m.agents[who - first].block].device;
}

/* A write to memory of a device by another one, which its kernel did not wait for. */
static void __attribute__((noreturn))
after_the_end(const Region &r, size_t at, const Mark &b, u16 who, u32 device) {
  host_fact("kind race");
  host_fact("lacks end");
  host_fact_access(names[write_of(b)], r, at, who, b.write_line);
  host_fact("access touch read space gmem region %u at %zu line 0 by end number %u", r.number, at,
            device);
  host_fail(b.write_line, "%s of byte %zu of %s may come after the kernel of device %u",
            names[write_of(b)], at, r.name, device);
}

/* The host may read memory of a device as soon as the kernel there has ended. */
void host_end_of_devices() {
  std::vector<Times> ends(m.devices);
  for (Times &end : ends) end.reset(m.n_clock, 0, NOBODY);
  for (const Block &b : m.blocks)
    for (const Thread &t : b.threads) ends[b.device].raise(t.clock.seen);
  const u32 each = (u32)(m.global.size() / m.devices);
  for (Region &r : m.global) {
    const u32 device = r.number / each;
    if (r.counters || r.read_only || r.marks.empty()) continue;
    for (size_t at = 0; at < r.size; at++) {
      const Mark &b = r.marks[at];
      const auto check = [&](u16 who, u32 when) {
        const bool shared = who == m.n_clock - 1; /* by several engines, when there are too many */
        if (!shared && device_of(who) != device && ends[device][who] < when)
          after_the_end(r, at, b, who, device);
      };
      if (b.atomic && m.semaphores.count((u32 *)(r.bytes + (at & ~(size_t)3)))) continue;
      if (b.writer < MANY) check(b.writer, b.write);
      if (b.writer != MANY) continue;
      const Accesses &write = crowd_of(r, at).write;
      for (u32 k = 0; k < write.when.size(); k++)
        if (write.when[k]) check((u16)(write.first + k), write.when[k]);
    }
  }
}

/* ---- addresses ----------------------------------------------------------------------------- */

extern "C" u32 host_shared_base() { return m.self->block->shared.base; }

size_t shared_offset(Block &b, u32 a, size_t bytes, size_t align, const char *what, int line) {
  if (a % align)
    host_fail(line, "%s at shared address %u, which is no multiple of %zu (offset %lld)", what, a,
              align, (i64)a - b.shared.base);
  const i64 at = (i64)a - b.shared.base;
  if (at < 0 || at + bytes > b.shared.size) {
    host_fact("kind bounds");
    host_fact_access("access", b.shared, at, m.self ? (u16)m.self->rank : (u16)NOBODY, line);
    host_fail(line, "%s of bytes %lld to %lld, and the shared memory has %zu", what, at,
              at + (i64)bytes, b.shared.size);
  }
  return (size_t)at;
}

Region &global_region(const void *p, size_t bytes, size_t align, const char *what, int line,
                      size_t *at) {
  const uintptr_t a = (uintptr_t)p;
  Region *near = nullptr;
  uintptr_t least = ~(uintptr_t)0;
  if (a % align)
    host_fail(line, "%s at global address %p, which is no multiple of %zu", what, p, align);
  for (Region &r : m.global) {
    const uintptr_t first = (uintptr_t)r.bytes;
    if (a >= first && a + bytes <= first + r.size) {
      *at = a - first;
      return r;
    }
    const uintptr_t away =
        a < first ? first - a : a - first - (a - first < r.size ? a - first : r.size);
    if (away <= 65536 && away < least) {
      least = away;
      near = &r;
    }
  }
  host_fact("kind bounds");
  if (near) {
    host_fact_access("access", *near, (i64)a - (i64)(uintptr_t)near->bytes,
                     m.self ? (u16)m.self->rank : (u16)NOBODY, line);
    host_fail(line, "%s of bytes %lld to %lld of argument %zu, which has %zu", what,
              (i64)a - (i64)(uintptr_t)near->bytes, (i64)(a + bytes) - (i64)(uintptr_t)near->bytes,
              (size_t)(near - &m.global[0]), near->size);
  }
  host_fail(line, "%s at %p, outside of all arguments", what, p);
}

/* ---- loads and stores ---------------------------------------------------------------------- */

extern "C" void host_load_shared(void *d, u32 a, u32 bytes, int line) {
  Region &r = m.self->block->shared;
  const size_t at = shared_offset(*m.self->block, a, bytes, bytes, "ld.shared", line);
  m.self->line = line;
  thread_reads(r, at, bytes, line);
  memcpy(d, r.bytes + at, bytes);
}

extern "C" void host_store_shared(u32 a, const void *s, u32 bytes, int line) {
  const size_t at = shared_offset(*m.self->block, a, bytes, bytes, "st.shared", line);
  m.self->line = line;
  thread_writes(m.self->block->shared, at, s, bytes, line);
}

/* ---- other blocks of the cluster ------------------------------------------------------------ */

/* Addresses of the window of the cluster have the number of the block, plus one, in the top byte.
 */
extern "C" u32 host_peer_offset(u32 rank, int line) {
  const Cluster cluster = host_cluster_of(*m.self->block);
  if (rank >= cluster.size())
    host_fail(line, "mapa: block %u of a cluster of %zu", rank, cluster.size());
  return (cluster[rank].shared.base & 0xffffff) + ((rank + 1) << 24) - m.self->block->shared.base;
}

static Block &peer(u32 a, const char *what, int line) {
  const u32 rank = (a >> 24) - 1;
  const Cluster cluster = host_cluster_of(*m.self->block);
  if (rank >= cluster.size()) host_fail(line, "%s at 0x%x, in no block", what, a);
  if (!cluster[rank].alive) host_fail(line, "%s: the other block has ended", what);
  return cluster[rank];
}

extern "C" void host_load_cluster(void *d, u32 a, u32 bytes, int line) {
  Block &b = peer(a, "ld.shared::cluster", line);
  const size_t at = shared_offset(b, host_in_block(b, a), bytes, bytes, "ld.shared::cluster", line);
  m.self->line = line;
  thread_reads(b.shared, at, bytes, line);
  memcpy(d, b.shared.bytes + at, bytes);
}

extern "C" void host_store_cluster(u32 a, const void *s, u32 bytes, int line) {
  Block &b = peer(a, "st.shared::cluster", line);
  const size_t at = shared_offset(b, host_in_block(b, a), bytes, bytes, "st.shared::cluster", line);
  m.self->line = line;
  thread_writes(b.shared, at, s, bytes, line);
}

extern "C" void host_load_global(void *d, const void *p, u32 bytes, int line) {
  size_t at;
  m.self->line = line;
  Region &r = global_region(p, bytes, bytes, "ld.global", line, &at);
  thread_reads(r, at, bytes, line);
  memcpy(d, p, bytes);
}

extern "C" void host_store_global(void *p, const void *s, u32 bytes, int line) {
  size_t at;
  m.self->line = line;
  Region &r = global_region(p, bytes, bytes, "st.global", line, &at);
  if (r.read_only) host_fail(line, "st.global to an operand");
  thread_writes(r, at, s, bytes, line);
}

/* relaxed */
extern "C" u32 host_atomic_add(u32 *p, u32 x, int line) {
  size_t at;
  const u32 old = *p;
  m.self->line = line;
  global_region(p, 4, 4, "atom.global", line, &at);
  *p = old + x;
  return old;
}

/* ---- atomics ------------------------------------------------------------------------------- */

extern "C" void *host_atomic_global(void *p, u32 bytes, int line) {
  size_t at;
  m.self->line = line;
  Region &r = global_region(p, bytes, bytes, "atom.global", line, &at);
  if (r.read_only) host_fail(line, "atom.global to an operand");
  thread_updates(r, at, bytes, line);
  return p;
}

extern "C" void *host_atomic_shared(u32 a, u32 bytes, int line) {
  Region &r = m.self->block->shared;
  const size_t at = shared_offset(*m.self->block, a, bytes, bytes, "atom.shared", line);
  m.self->line = line;
  thread_updates(r, at, bytes, line);
  return r.bytes + at;
}

extern "C" void *host_atomic_cluster(u32 a, u32 bytes, int line) {
  Block &b = peer(a, "atom.shared::cluster", line);
  const size_t at =
      shared_offset(b, host_in_block(b, a), bytes, bytes, "atom.shared::cluster", line);
  m.self->line = line;
  thread_updates(b.shared, at, bytes, line);
  return b.shared.bytes + at;
}

/* ---- ldmatrix, stmatrix -------------------------------------------------------------------- */

/* Lane 8 i + j gives the address of row j of matrix i. Register i of lane l holds elements
 * 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i; with .trans, of column l / 4. */
static void move_matrix(Warp &w, bool store) {
  const bool transposed = w.request[0]->b;
  const int line = w.request[0]->line;
  Thread *self = m.self;
  for (u32 i = 0; i < 4; i++) {
    u16 matrix[8][8];
    for (u32 l = 0; l < 32 && store; l++)
      for (u32 e = 0; e < 2; e++) {
        const u16 x = ((const u16 *)w.request[l]->p)[2 * i + e];
        const u32 major = l / 4, minor = l % 4 * 2 + e;
        matrix[transposed ? minor : major][transposed ? major : minor] = x;
      }
    for (u32 j = 0; j < 8; j++) {
      const size_t at = shared_offset(*w.block, w.request[8 * i + j]->a, 16, 16,
                                      store ? "stmatrix" : "ldmatrix", line);
      /* a row belongs to the four lanes that hold it, in turn to the eight; the lane that gave the
       * address stands for them */
      m.self = w.lane[8 * i + j];
      if (store) {
        thread_writes(w.block->shared, at, matrix[j], 16, line);
      } else {
        thread_reads(w.block->shared, at, 16, line);
        memcpy(matrix[j], w.block->shared.bytes + at, 16);
      }
    }
    m.self = self;
    for (u32 l = 0; l < 32 && !store; l++)
      for (u32 e = 0; e < 2; e++) {
        const u32 major = l / 4, minor = l % 4 * 2 + e;
        ((u16 *)w.request[l]->p)[2 * i + e] =
            matrix[transposed ? minor : major][transposed ? major : minor];
      }
  }
}
static void load_matrix(Warp &w) { move_matrix(w, false); }
static void store_matrix(Warp &w) { move_matrix(w, true); }

extern "C" void host_load_matrix(void *words, u32 a, bool transposed, int line) {
  Request r = {"ldmatrix", line, ~0u, a, transposed, words, 0};
  host_meet(&r, load_matrix);
}

extern "C" void host_store_matrix(u32 a, const void *words, bool transposed, int line) {
  Request r = {"stmatrix", line, ~0u, a, transposed, (void *)words, 0};
  host_meet(&r, store_matrix);
}

/* ---- halves -------------------------------------------------------------------------------- */

extern "C" f32 host_from_f16(u16 x) {
  const u32 sign = (u32)(x & 0x8000) << 16, exponent = x >> 10 & 31, digits = x & 0x3ff;
  if (exponent == 31) return f32_bits(sign | 0x7f800000 | digits << 13);
  if (exponent) return f32_bits(sign | (exponent + 112) << 23 | digits << 13);
  const f32 r = (f32)digits * 0x1p-24f;
  return sign ? -r : r;
}

/* floats of 8 bits: finite numbers as multiples of the unit of their exponent */
extern "C" f32 host_from_fp8(u8 x, int digits, int bias) {
  const int exponent = (x & 0x7f) >> digits, rest = x & ((1 << digits) - 1);
  const int whole = exponent ? rest + (1 << digits) : rest;
  const f32 r = ldexpf((f32)whole, (exponent ? exponent : 1) - bias - digits);
  return x & 0x80 ? -r : r;
}

extern "C" u8 host_to_fp8(f32 x, int digits, int bias, f32 greatest) {
  const f32 a = fminf(fabsf(x), 2 * greatest);
  const int exponent = a > 0 && ilogbf(a) > 1 - bias ? ilogbf(a) : 1 - bias;
  const f32 near = ldexpf(rintf(ldexpf(a, digits - exponent)), exponent - digits);
  const f32 r = fminf(near, greatest);
  u8 bits = 0;
  for (int k = 0; k < 128; k++) /* the numbers are in the order of their bits */
    if (host_from_fp8((u8)k, digits, bias) <= r) bits = (u8)k;
  return bits | (signbit(x) ? 0x80 : 0);
}

/* to nearest, ties to even */
extern "C" u16 host_to_f16(f32 x) {
  const u32 b = float_bits(x), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return 0x7fff;                /* the canonical NaN */
  if (a >= 0x477ff000) return (u16)(sign | 0x7c00); /* 65520 and more */
  if (a < 0x38800000) {                             /* subnormal: units of 2^-24 */
    return (u16)(sign | (u32)nearbyintf(f32_bits(a) * 0x1p24f));
  }
  return (u16)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
}

/* A double that is exact or odd in its last digit rounds to bf16 once. Sums of two bf16 may need
 * more digits than 53; then the last digit says "and something more". */
extern "C" f32 host_erf_inv(f32 y) {
  const double a = fabs((double)y);
  double low = 0, high = 8;
  if (a == 1) return copysignf(INFINITY, y);
  if (!(a < 1)) return NAN;
  if (a < 1e-5) return (f32)(y * 0.88622692545275801); /* half the root of pi */
  for (int k = 0; k < 80; k++) {
    const double middle = (low + high) / 2;
    (a < 0.5 ? erf(middle) < a : erfc(middle) > 1 - a) ? low = middle : high = middle;
  }
  return copysignf((f32)low, y);
}

extern "C" u16 host_bf16_of_double(double x) {
  f32 f = (f32)x;
  if ((double)f != x && x == x && f - f == 0) { /* to odd */
    u32 b = float_bits(f);
    if (fabs((double)f) > fabs(x)) b--;
    f = f32_bits(b | 1);
  }
  return host_to_bf16(f);
}
