/* Tensor memory: who may use it, moves between it and registers, and its order.
 *
 * Tensor memory has 128 lanes and 512 columns of 32 bits (PTX ISA, "Tensor Memory"); warp w of a
 * warpgroup reaches lanes 32 w to 32 w + 31 ("Access restrictions"). A load takes effect at any
 * time until wait::ld, where its registers, poison until then, get their values; a store until
 * wait::st.
 *
 * Each cell remembers its last write and the reads since. An access must come after them, by the
 * order that tcgen05 has ("Memory Consistency Model for 5th generation of TensorCore operations"):
 * instructions of one thread's tensor core are in order; a thread knows what it waited for
 * (wait::ld, wait::st); what others did it knows by fence::after_thread_sync after a
 * synchronisation that carries their fence::before_thread_sync or their commit. */
#include "machine.h"

enum { LANES = 128, COLUMNS = 512 };
enum : u32 { POISON = 0xfff1fff1 }; /* NaN as f32 and as two f16 */

/* ---- order --------------------------------------------------------------------------------- */

extern "C" void host_tcgen05_fence(bool before, int line) {
  Thread *t = m.self;
  t->line = line;
  if (before) t->clock.carried.raise(t->ordered);
  else t->ordered.raise(t->clock.carried);
}

static Cell &cell_of(Block &b, u32 lane, u32 column, const char *what, int line) {
  if (lane >= LANES) host_fail(line, "%s of lane %u of tensor memory", what, lane);
  bool inside = false;
  for (auto &a : b.tensor.allocated) inside |= column >= a.first && column < a.first + a.second;
  if (!inside)
    host_fail(line, "%s of column %u of tensor memory, which block (%u, %u, %u) has not allocated",
              what, column, b.index.x, b.index.y, b.index.z);
  return b.tensor.cells[column * LANES + lane];
}

/* Of the cell: what was done with it, by whom and where, and before that. */
static void __attribute__((noreturn))
unordered(const Block &b, u32 lane, u32 column, const char *before, u16 other, int where,
          const char *what, u16 who, int line) {
  host_fact("kind race");
  host_fact("lacks tensor");
  host_fact_cell(before, b, lane, column, other, where);
  host_fact_cell(what, b, lane, column, who, line);
  host_fail(line,
            "%s of lane %u, column %u of tensor memory is not ordered after its %s in line %d",
            what, lane, column, before, where);
}

u32 tensor_read(Block &b, u32 lane, u32 column, const Times &known, u16 who, u32 when, int line) {
  Cell &c = cell_of(b, lane, column, "read", line);
  if (c.writer == NOBODY) {
    host_fact("kind unwritten");
    host_fact_cell("read", b, lane, column, who, line);
    host_fail(line, "lane %u, column %u of tensor memory is read and was never written", lane,
              column);
  }
  if (c.writer != who && known[c.writer] < c.write)
    unordered(b, lane, column, "write", c.writer, c.write_line, "read", who, line);
  u32 k = 0;
  while (k < c.n_readers && c.reader[k].who != who) k++;
  if (k == 3) k = 0; /* the first is forgotten */
  if (k == c.n_readers) c.n_readers++;
  c.reader[k].who = who;
  c.reader[k].when = when;
  c.reader[k].line = (u16)line;
  return c.value;
}

void tensor_write(Block &b, u32 lane, u32 column, u32 value, const Times &known, u16 who, u32 when,
                  int line) {
  Cell &c = cell_of(b, lane, column, "write", line);
  if (c.writer != NOBODY && c.writer != who && known[c.writer] < c.write)
    unordered(b, lane, column, "write", c.writer, c.write_line, "write", who, line);
  for (u32 k = 0; k < c.n_readers; k++)
    if (c.reader[k].who != who && known[c.reader[k].who] < c.reader[k].when)
      unordered(b, lane, column, "read", c.reader[k].who, c.reader[k].line, "write", who, line);
  c.n_readers = 0;
  c.writer = who;
  c.write = when;
  c.write_line = (u16)line;
  c.value = value;
}

/* ---- allocation ---------------------------------------------------------------------------- */

void host_tensor_group(u32 ctas, int line) {
  if (!m.tensor_ctas) m.tensor_ctas = ctas;
  if (m.tensor_ctas != ctas)
    host_fail(line, "cta_group::%u in a kernel whose other instructions have cta_group::%u", ctas,
              m.tensor_ctas);
}

Block &host_pair_of(Block &b, int line) {
  const Cluster cluster = host_cluster_of(b);
  const u32 rank = host_rank_of(b);
  if ((rank ^ 1) >= cluster.size())
    host_fail(line, "cta_group::2 in a cluster of %zu blocks", cluster.size());
  Block &other = cluster[rank ^ 1];
  if (!other.alive) host_fail(line, "the other block of the pair has ended");
  return other;
}

/* All lanes bring the same. */
static const Request *same_request(Warp &w) {
  const Request *r = w.request[0];
  for (u32 l = 1; l < 32; l++)
    if (w.request[l]->a != r->a || w.request[l]->b != r->b)
      host_fail(r->line, "lanes 0 and %u have different operands of %s", l, r->what);
  return r;
}

/* The first free columns that a random search finds; COLUMNS: there are none. */
static u32 place(const TensorMemory &t, u32 n) {
  const u32 start = host_random(COLUMNS / 32);
  for (u32 k = 0; k < COLUMNS / 32; k++) {
    const u32 at = (start + k) % (COLUMNS / 32) * 32;
    bool free = at + n <= COLUMNS;
    for (auto &a : t.allocated) free &= at + n <= a.first || at >= a.first + a.second;
    if (free) return at;
  }
  return COLUMNS;
}

/* Columns of the other blocks that run on the same multiprocessor, among those that wait for each
 * other: of the cluster, or of the launch. By the seed, as many share one as fit. The blocks of a
 * pair never do. */
static u32 held_beside(const Block &b, u32 ctas) {
  const u32 threads = 2048, shared = 228 << 10, reserved = 1 << 10;
  if (!m.crowded) return 0;
  const u32 room =
      std::max(1u, std::min(threads / m.block_threads, shared / (m.shared_bytes + reserved)));
  const size_t n = m.together ? m.blocks.size() : m.cluster_blocks;
  const size_t me = &b - &m.blocks[0], first = me / n * n;
  u32 held = 0;
  for (size_t k = first; k < first + n; k++) {
    if (k == me || (k - me) % ctas || (k - first) / ctas / room != (me - first) / ctas / room)
      continue;
    for (auto &a : m.blocks[k].tensor.allocated) held += a.second;
  }
  return held;
}

static void allocate(Warp &w) {
  const Request *r = same_request(w);
  const u32 n = r->b & 0xffff, ctas = r->b >> 16;
  Block &b = *w.block;
  TensorMemory &t = b.tensor;
  host_tensor_group(ctas, r->line);
  if (n < 32 || n > COLUMNS || n & (n - 1)) host_fail(r->line, "tcgen05.alloc of %u columns", n);
  if (t.relinquished) host_fail(r->line, "tcgen05.alloc after relinquish_alloc_permit");
  if (t.cells.empty()) {
    Cell none = {};
    none.value = POISON;
    none.writer = NOBODY;
    t.cells.assign(LANES * COLUMNS, none);
    t.taken = host_random(4) ? 0 : 32 * (1 + host_random(16));
    t.tries = host_random(20);
  }
  if (t.tries) t.tries--;
  const bool waits = (t.tries && t.taken + n > COLUMNS) || held_beside(b, ctas) + n > COLUMNS;
  for (u32 l = 0; l < 32; l++) w.request[l]->result = waits;
  if (waits) return;
  u32 at = place(t, n);
  if (ctas == 2) {
    const TensorMemory &other = host_pair_of(b, r->line).tensor;
    const size_t k = t.allocated.size(); /* a pair has the same columns */
    if (other.allocated.size() > k) {
      auto it = other.allocated.begin();
      std::advance(it, k);
      at = it->first;
      if (it->second != n)
        host_fail(r->line, "tcgen05.alloc of %u columns, and of %u in the other block of the pair",
                  n, it->second);
    }
  }
  if (at == COLUMNS)
    host_fail(r->line, "tcgen05.alloc waits for ever: the block itself holds too many columns");
  t.allocated[at] = n;
  thread_writes(b.shared, shared_offset(b, r->a, 4, 4, "tcgen05.alloc", r->line), &at, 4, r->line);
}

extern "C" void host_tmem_alloc(u32 slot, u32 columns, u32 ctas, int line) {
  Request r = {"tcgen05.alloc", line, ~0u, slot, ctas << 16 | columns, nullptr, 0};
  for (;;) {
    host_meet(&r, allocate);
    if (!r.result) return;
    host_yield_poll();
  }
}

static void relinquish(Warp &w) {
  const Request *r = same_request(w);
  host_tensor_group(r->a, r->line);
  w.block->tensor.relinquished = true;
}

extern "C" void host_tmem_relinquish(u32 ctas, int line) {
  Request r = {"tcgen05.relinquish_alloc_permit", line, ~0u, ctas, 0, nullptr, 0};
  host_meet(&r, relinquish);
}

/* Everything that touched the columns is over, as far as any lane of the warp knows. */
static void check_quiet(Warp &w, u32 first, u32 n, int line) {
  const Times &seen = w.lane[0]->clock.seen;
  for (u32 k = first * LANES; k < (first + n) * LANES; k++) {
    const Cell &c = w.block->tensor.cells[k];
    u32 late = 0;
    if (c.writer != NOBODY && seen[c.writer] < c.write) late = c.write_line;
    for (u32 i = 0; i < c.n_readers; i++)
      if (seen[c.reader[i].who] < c.reader[i].when) late = c.reader[i].line;
    if (late)
      host_fail(line, "tcgen05.dealloc is not ordered after the access of column %u in line %u",
                k / LANES, late);
  }
}

static void deallocate(Warp &w) {
  const Request *r = same_request(w);
  const u32 n = r->b & 0xffff;
  TensorMemory &t = w.block->tensor;
  host_tensor_group(r->b >> 16, r->line);
  const auto found = t.allocated.find(r->a);
  if (found == t.allocated.end() || found->second != n)
    host_fail(r->line, "tcgen05.dealloc of %u columns at 0x%x, which were not allocated so", n,
              r->a);
  check_quiet(w, r->a, n, r->line);
  t.allocated.erase(found);
}

extern "C" void host_tmem_dealloc(u32 address, u32 columns, u32 ctas, int line) {
  Request r = {"tcgen05.dealloc", line, ~0u, address, ctas << 16 | columns, nullptr, 0};
  host_meet(&r, deallocate);
}

/* ---- between registers and tensor memory --------------------------------------------------- */

/* "Data Movement Shape", the matrix fragments: rows (lanes) and columns of 32 bits, and of register
 * r of lane l of a warp. */
static void fragment(u8 shape, u32 l, u32 r, u32 *row, u32 *column) {
  switch (shape) {
    case HOST_16x256b: /* two registers of each 64 bits, four lanes a row, 8 rows below */
      *row = l / 4 + (r & 2 ? 8 : 0);
      *column = r / 4 * 8 + l % 4 * 2 + (r & 1);
      break;
    case HOST_16x128b:
      *row = l / 4 + (r & 1 ? 8 : 0);
      *column = r / 2 * 4 + l % 4;
      break;
    default: *row = l, *column = r;
  }
}

static u32 registers_of(const HostTmemMove &x) {
  return x.times * (x.shape == HOST_16x256b ? 4 : x.shape == HOST_16x128b ? 2 : 1);
}

struct TensorMove : Operation {
  Warp *warp;
  bool store, done = false;
  HostTmemMove x;
  Times known;
  u16 who;
  u32 when, n; /* registers of a lane */
  u32 *registers[32][128], value[32][128];
  bool step() override;
  void one(u32 l, u32 r);
  void hand_back();
};

void TensorMove::one(u32 l, u32 r) {
  u32 row, column, &v = value[l][r];
  Block &b = *warp->block;
  fragment(x.shape, l, r, &row, &column);
  row += x.address >> 16;
  if (!x.halves) {
    column += x.address & 0xffff;
    if (store) tensor_write(b, row, column, v, known, who, when, line);
    else v = tensor_read(b, row, column, known, who, when, line);
    return;
  }
  column = 2 * column + (x.address & 0xffff); /* .pack::16b, .unpack::16b: neighbouring columns */
  if (store) {
    tensor_write(b, row, column, v & 0xffff, known, who, when, line);
    tensor_write(b, row, column + 1, v >> 16, known, who, when, line);
  } else {
    const u32 low = tensor_read(b, row, column, known, who, when, line);
    v = (low & 0xffff) | tensor_read(b, row, column + 1, known, who, when, line) << 16;
  }
}

bool TensorMove::step() {
  for (u32 l = 0; l < 32 && !done; l++)
    for (u32 r = 0; r < n; r++) one(l, r);
  done = true;
  return true;
}

/* NaN propagates; of integers as the type has it. One part reduces what another left. */
static void reduce(const HostTmemMove &x, const u32 *value, u32 n) {
  u32 all = x.fresh ? value[0] : *x.reduced;
  for (u32 k = 0; k <= n; k++) {
    u32 v = k < n ? value[k] : all;
    const bool abs = x.reduce == HOST_absmax || x.reduce == HOST_absmin;
    const bool max = x.reduce == HOST_rmax || x.reduce == HOST_absmax;
    if (abs) v &= 0x7fffffff;
    if (!k && x.fresh) {
      all = v;
    } else if (x.type == HOST_AS_f32) {
      const f32 a = f32_bits(all), b = f32_bits(v);
      all = float_bits(max ? max_f32(a, b) : min_f32(a, b));
    } else if (x.type == HOST_AS_i32) {
      all = ((i32)v > (i32)all) == max ? v : all;
    } else {
      all = (v > all) == max ? v : all;
    }
  }
  *x.reduced = all;
}

void TensorMove::hand_back() {
  for (u32 l = 0; l < 32; l++)
    for (u32 r = 0; r < n; r++) {
      if (*registers[l][r] != POISON)
        host_fail(line, "a register was written while a load from tensor memory was in flight");
      *registers[l][r] = value[l][r];
    }
}

static void issue_move(Warp &w) {
  const Request *first = w.request[0];
  const int line = first->line;
  const bool store = first->a;
  const HostTmemMove &x = *(const HostTmemMove *)first->p;
  const u32 quarter = (u32)(&w - &w.block->warps[0]) % 4 * 32, lane = x.address >> 16;
  for (u32 l = 1; l < 32; l++)
    if (((const HostTmemMove *)w.request[l]->p)->address != x.address)
      host_fail(line, "lanes 0 and %u have different addresses of tensor memory", l);
  if (lane != quarter && !(x.shape != HOST_32x32b && lane == quarter + 16))
    host_fail(line, "lane %u of tensor memory in a warp that reaches lanes %u to %u", lane, quarter,
              quarter + 31);
  if (x.times & (x.times - 1) || registers_of(x) > 128)
    host_fail(line, "a move of tensor memory, .x%u", x.times);
  std::shared_ptr<TensorMove> o = std::make_shared<TensorMove>();
  if (!w.mover[store])
    w.mover[store] =
        host_new_agent(store ? OF_TMEM_STORES : OF_TMEM_LOADS, w.block, w.lane[0]->number / 32);
  o->x = x;
  o->line = line;
  o->block = w.block;
  o->warp = &w;
  o->store = store;
  o->n = registers_of(x);
  o->who = w.mover[store];
  o->when = host_when(++w.n_moves[store]);
  o->known = w.lane[0]->ordered;
  for (u32 l = 0; l < 32; l++) {
    const HostTmemMove &own = *(const HostTmemMove *)w.request[l]->p;
    o->known.lower(w.lane[l]->ordered);
    for (u32 r = 0; r < o->n; r++) {
      o->registers[l][r] = own.registers[r];
      o->value[l][r] = *own.registers[r];
      if (!store) *own.registers[r] = POISON;
    }
    host_release(w.lane[l]);
  }
  w.moves[store].push_back(o);
  host_issue(o);
}

static void move(const HostTmemMove *x, bool store, int line) {
  Request r = {store ? "tcgen05.st" : "tcgen05.ld", line, ~0u, store, 0, (void *)x, 0};
  host_meet(&r, issue_move);
}

extern "C" void host_tmem_load(const HostTmemMove *x, int line) { move(x, false, line); }
extern "C" void host_tmem_store(const HostTmemMove *x, int line) { move(x, true, line); }

static void wait_moves(Warp &w) {
  const bool store = w.request[0]->a;
  for (auto &o : w.moves[store]) {
    host_finish(o.get());
    if (!store) o->hand_back();
  }
  w.moves[store].clear();
  if (!w.mover[store]) return;
  for (u32 l = 0; l < 32; l++) {
    const u32 when = host_when(w.n_moves[store]);
    w.lane[l]->ordered.raise_to(w.mover[store], when, true);
    w.lane[l]->clock.seen.raise_to(w.mover[store], when, true);
  }
}

extern "C" void host_tmem_wait(bool store, int line) {
  Request r = {store ? "tcgen05.wait::st" : "tcgen05.wait::ld", line, ~0u, store, 0, nullptr, 0};
  host_meet(&r, wait_moves);
}

/* What a load with .red found, in the registers that the wait has filled. */
extern "C" void host_tmem_reduce(const HostTmemMove *x, int line) {
  u32 value[128];
  m.self->line = line;
  for (u32 r = 0; r < registers_of(*x); r++) value[r] = *x->registers[r];
  reduce(*x, value, registers_of(*x));
}

/* ---- the end of a block -------------------------------------------------------------------- */

void host_tensor_ends(Block &b) {
  for (auto &a : b.tensor.allocated)
    host_fail(0, "the block ends with %u columns of tensor memory allocated", a.second);
  for (Warp &w : b.warps)
    for (int store = 0; store < 2; store++)
      if (!w.moves[store].empty())
        host_fail(w.moves[store][0]->line, "the block ends and nobody waited for this %s",
                  store ? "store to tensor memory" : "load from tensor memory");
  for (Thread &t : b.threads) {
    if (!t.tensor_access) continue;
    bool awaited = false;
    for (Block &o : m.blocks)
      for (Thread &other : o.threads)
        awaited |= other.clock.seen[t.tensor] >= host_when(t.tensor_access);
    if (!awaited)
      host_fail((int)t.tensor_line,
                "the block ends and nobody waited for this instruction of the "
                "tensor core: no commit after it was awaited");
  }
}
