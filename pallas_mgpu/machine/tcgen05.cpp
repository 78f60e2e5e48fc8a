/* Instructions of the tensor core on tensor memory: products, copies to it, commits.
 *
 * Descriptors are read from their bits. Comments name the sections of the PTX ISA's chapter
 * "TensorCore 5th Generation Family Instructions" by their titles, since numbers change from
 * version to version. Instructions of one thread are carried out in order, whenever the scheduler
 * likes; they read shared and tensor memory at that time. */
#include "machine.h"

#include <math.h>

/* ---- instructions of one thread ------------------------------------------------------------ */

bool TensorOp::step() {
  if (done) return true;
  while (!done) {
    std::shared_ptr<TensorOp> first = thread->tensor_ops[0];
    first->execute();
    first->done = true;
    thread->tensor_ops.erase(thread->tensor_ops.begin());
  }
  return true;
}

void host_issue_tensor(std::shared_ptr<TensorOp> op, bool accesses, int line) {
  Thread *t = m.self;
  if (!t->tensor) t->tensor = host_new_agent(OF_TENSOR_CORE, t->block, t->number);
  op->line = t->line = line;
  op->thread = t;
  op->block = t->block;
  op->clock = t->clock;
  op->known = t->ordered;
  op->who = t->tensor;
  op->when = host_when(++t->n_tensor_ops);
  if (accesses) {
    t->tensor_access = t->n_tensor_ops;
    t->tensor_line = (u32)line;
  }
  host_release(t);
  t->tensor_ops.push_back(op);
  host_issue(op);
  host_yield();
}

/* ---- matrices in shared memory ------------------------------------------------------------- */

/* "Shared memory descriptor". */
struct Matrix {
  u32 start, leading, stride, span; /* bytes; span: of a row of the swizzle, 16: none */
};

static Matrix matrix_of(u32 low, u32 high, const char *which, int line) {
  Matrix x;
  const u32 mode = high >> 29;
  if (low & 0xc000c000) host_fail(line, "%s: reserved bits of its descriptor are set", which);
  if ((high >> 14 & 7) != 1)
    host_fail(line, "%s: bits 46 to 48 of its descriptor are not 0b001", which);
  if (high >> 17 & 15) host_fail(line, "%s: a base offset or an absolute stride", which);
  if (high >> 21 & 255) host_fail(line, "%s: bits 53 to 60 of its descriptor are set", which);
  x.start = (low & 0x3fff) * 16;
  x.leading = (low >> 16 & 0x3fff) * 16;
  x.stride = (high & 0x3fff) * 16;
  switch (mode) {
    case 0: x.span = 16; break;
    case 2: x.span = 128; break;
    case 4: x.span = 64; break;
    case 6: x.span = 32; break;
    default: host_fail(line, "%s: swizzle mode %u", which, mode);
  }
  /* the base offset is 0: the repeating pattern begins at a multiple of its size */
  if (mode && x.start / x.span % 8)
    host_fail(line, "%s begins at shared address %u, inside of a pattern of %u bytes", which,
              x.start, 8 * x.span);
  return x;
}

/* "Shared Memory Layout and Swizzling": chunks of 16 bytes of a 128-byte line change places by the
 * number of the line. */
static u32 placed(u32 a, u32 span) {
  const u32 chunks = span / 16, line = a / 128 % chunks;
  return a - a % span + (a / 16 % chunks ^ line) * 16 + a % 16;
}

/* Descriptors have addresses of the block that issues; another one has the same at the same offset.
 */
struct Reader {
  Block *block;
  u32 own, base; /* where shared memory begins in the one that issues, and in this one */
  Stamp stamp;
  void chunk(u32 address, u32 *to) const {
    /* a descriptor has 18 bits of an address */
    const u32 at_base = ((address - own) & 0x3ffffu) + base;
    const size_t at = shared_offset(*block, at_base, 16, 16, "tcgen05", stamp.line);
    engine_reads(block->shared, at, 16, stamp, to);
  }
};

/* n rows (of M or N) and `bytes` along K, into to[k * pitch + mn]. */
static void read_k_major(const Reader &r, const Matrix &x, u8 type, u32 n, u32 bytes, f32 *to,
                         u32 pitch) {
  const u32 of_chunk = 128 / host_element_bits(type);
  if (x.span > 16 && x.start % x.span + bytes > x.span)
    host_fail(r.stamp.line, "%u bytes along K reach beyond a row of a swizzle of %u", bytes,
              x.span);
  for (u32 mn = 0; mn < n; mn++)
    for (u32 c = 0; c < bytes / 16; c++) {
      u32 words[4];
      const u32 row = x.start + mn % 8 * x.span + mn / 8 * x.stride;
      r.chunk(x.span > 16 ? placed(row + c * 16, x.span) : row + c * x.leading, words);
      for (u32 i = 0; i < of_chunk; i++)
        to[(c * of_chunk + i) * pitch + mn] = host_element(type, words, i);
    }
}

static void read_mn_major(const Reader &r, const Matrix &x, u8 type, u32 n, u32 depth, f32 *to,
                          u32 pitch) {
  const u32 bits = host_element_bits(type), of_chunk = 128 / bits, bytes = n * bits / 8;
  if (bits < 8)
    host_fail(r.stamp.line, "elements of %u bits that are not contiguous along K", bits);
  if (x.span == 16) host_fail(r.stamp.line, "an MN-major matrix without a swizzle");
  if (x.start % x.span && x.start % x.span + bytes > x.span)
    host_fail(r.stamp.line, "a matrix that begins inside a row of its swizzle and ends outside");
  for (u32 k = 0; k < depth; k++)
    for (u32 at = 0; at < bytes; at += 16) {
      u32 words[4];
      const u32 row = x.start + at / x.span * x.leading + k % 8 * x.span + k / 8 * x.stride;
      r.chunk(placed(row + at % x.span, x.span), words);
      for (u32 i = 0; i < of_chunk; i++)
        to[k * pitch + at * 8 / bits + i] = host_element(type, words, i);
    }
}

/* ---- products ------------------------------------------------------------------------------ */

/* "Instruction descriptor": the formats of kinds without and with scales. */
struct Instruction {
  u32 m, n, depth; /* depth: along K, of B */
  u8 d, a, b;      /* types */
  bool a_mn_major, b_mn_major;
  u32 selector;   /* of sparsity */
  u32 a_id, b_id; /* which byte of 32 bits the scales begin at */
  bool power;     /* scales are ue8m0, else ue4m3 */
};

static u8 type_of(u8 kind, u32 code, int line) {
  switch (kind) {
    case HOST_KIND_f16:
      if (code < 2) return code ? HOST_bf16 : HOST_f16;
      break;
    case HOST_KIND_tf32:
      if (code == 2) return HOST_tf32;
      break;
    case HOST_KIND_f8f6f4:
    case HOST_KIND_mxf8f6f4:
      if (code < 2) return code ? HOST_e5m2 : HOST_e4m3;
      break;
    case HOST_KIND_i8:
      if (code < 2) return code ? HOST_s8 : HOST_u8;
      break;
    default:
      if (code == 1) return HOST_e2m1;
  }
  host_fail(line, "an instruction descriptor with type %u of A or B", code);
}

static bool is_scaled(u8 kind) { return kind >= HOST_KIND_mxf8f6f4; }

/* "Matrix Shape", the table of kinds and shapes. */
static void check_shape(const HostTcgen05 &x, const Instruction &i, int line) {
  const bool integer = x.kind == HOST_KIND_i8;
  u32 step = x.pair ? 16 : 8;
  if (integer) step = x.pair ? 32 : i.n > 32 ? 16 : 8;
  const bool m_ok =
      x.pair ? i.m == 128 || i.m == 256 : i.m == 128 || (i.m == 64 && !is_scaled(x.kind));
  if (!m_ok) host_fail(line, "tcgen05.mma with M %u", i.m);
  if (!i.n || i.n > 256 || i.n % step) host_fail(line, "tcgen05.mma with M %u, N %u", i.m, i.n);
}

static Instruction decode(const HostTcgen05 &x, int line) {
  const u32 w = x.instruction;
  Instruction i = {};
  const bool scaled = is_scaled(x.kind);
  i.a = type_of(x.kind, w >> 7 & 7, line);
  i.b = type_of(x.kind, w >> 10 & 7, line);
  i.a_mn_major = w >> 15 & 1;
  i.b_mn_major = w >> 16 & 1;
  i.n = (w >> 17 & 63) * 8;
  i.depth = 256 / host_element_bits(i.a) * (x.sparse ? 2 : 1);
  if ((w >> 2 & 1) != x.sparse) host_fail(line, "the sparsity bit of the instruction descriptor");
  if (host_element_bits(i.a) == 4 && w >> 15 & 3) host_fail(line, "A or B of 4 bits transposed");
  if (w >> 13 & 3 || w & 8) host_fail(line, "A or B negated, or saturation");
  if (scaled) {
    if (w & 3 || w >> 6 & 1 || w >> 24 & 7 || w >> 31)
      host_fail(line, "reserved bits of the instruction descriptor 0x%08x", w);
    i.d = HOST_f32;
    i.m = (w >> 27 & 3) * 128;
    i.b_id = w >> 4 & 3;
    i.a_id = w >> 29 & 3;
    i.power = w >> 23 & 1;
  } else {
    if (w >> 6 & 1 || w >> 23 & 1 || w >> 29)
      host_fail(line, "reserved bits of the instruction descriptor 0x%08x", w);
    static const u8 types[] = {HOST_f16, HOST_f32, HOST_s32};
    const u32 code = w >> 4 & 3;
    const bool legal =
        x.kind == HOST_KIND_i8 ? code == 2 : code == 1 || (code == 0 && x.kind != HOST_KIND_tf32);
    if (!legal) host_fail(line, "an instruction descriptor with type %u of D", code);
    i.d = types[code];
    i.m = (w >> 24 & 31) * 16;
    i.selector = w & 3;
  }
  check_shape(x, i, line);
  return i;
}

struct Mma : TensorOp {
  HostTcgen05 x;
  Instruction i;
  Block *other; /* of the pair, or NULL */
  void execute() override;
  Block &half(bool second) { return second ? *other : *block; }
  Reader reader(Block &b) const {
    return {&b, block->shared.base, b.shared.base, {who, when, line, &clock, b.cluster}};
  }
  u32 cell(Block &b, u32 lane, u32 column) {
    return tensor_read(b, lane, column, known, who, when, line);
  }
  void read_a(f32 *a);
  void read_b(f32 *b);
  void expand(f32 *a);
  f32 scale(Block &b, u32 lane, u32 column, u32 byte);
  f32 scale_a(u32 row, u32 k);
  f32 scale_b(u32 column, u32 k);
  void place(u32 row, u32 column, Block **b, u32 *lane, u32 *at);
};

/* "Packing formats of elements in Tensor and Shared memory": A in tensor memory has row r in lane
 * r, elements packed along K. */
void Mma::read_a(f32 *a) {
  const u32 rows = other ? i.m / 2 : i.m, bits = host_element_bits(i.a);
  const u32 depth = x.sparse ? i.depth / 2 : i.depth;
  for (u32 h = 0; h < (other ? 2u : 1u); h++) {
    Block &b = half(h);
    if (!x.a_in_tmem) {
      const Matrix w = matrix_of(x.a, x.a_high, "A", line);
      f32 *to = a + h * rows;
      if (i.a_mn_major) read_mn_major(reader(b), w, i.a, rows, depth, to, i.m);
      else read_k_major(reader(b), w, i.a, rows, 32, to, i.m);
      continue;
    }
    if (rows != 128) host_fail(line, "A in tensor memory with %u rows", rows);
    for (u32 r = 0; r < rows; r++)
      for (u32 c = 0; c < 8; c++) {
        const u32 word = cell(b, (x.a >> 16) + r, (x.a & 0xffff) + c);
        for (u32 e = 0; e < 32 / bits; e++)
          a[(c * 32 / bits + e) * i.m + h * rows + r] = host_element(i.a, &word, e);
      }
  }
}

/* Of a pair, each block has half of the columns. */
void Mma::read_b(f32 *b) {
  const u32 columns = other ? i.n / 2 : i.n;
  const Matrix w = matrix_of(x.b, x.b_high, "B", line);
  for (u32 h = 0; h < (other ? 2u : 1u); h++) {
    f32 *to = b + h * columns;
    if (i.b_mn_major) read_mn_major(reader(half(h)), w, i.b, columns, i.depth, to, i.n);
    else read_k_major(reader(half(h)), w, i.b, columns, x.sparse ? 64 : 32, to, i.n);
  }
}

/* "Sparse Matrices" and "Sparsity selector": of each four elements (of 4 bits: pairs of them) along
 * K two are there, at the places that two numbers of 2 bits give. A row's numbers: of 8 and 4 bits
 * those of its lane, 16 in a column. Of 16 bits: lanes 16 j + 8 h + i have, of rows 16 j + i (low
 * half of a column) and 16 j + 8 + i (high half), the h-th eight; the selector says which column.
 */
void Mma::expand(f32 *a) {
  const u32 bits = host_element_bits(i.a), wide = bits == 4 ? 2 : 1, groups = i.depth / (4 * wide);
  std::vector<f32> dense(i.depth * i.m, 0.0f);
  if (bits != 16 && i.selector) host_fail(line, "a sparsity selector of %u", i.selector);
  for (u32 r = 0; r < i.m; r++) {
    const u32 own = other ? i.m / 2 : i.m, row = r % own;
    Block &b = half(r >= own);
    for (u32 g = 0; g < 2 * groups; g++) {
      u32 lane = row, column = (x.metadata & 0xffff) + g / 16, at = g % 16;
      if (bits == 16) {
        if (i.selector > 1) host_fail(line, "a sparsity selector of %u", i.selector);
        lane = row / 16 * 16 + g / 8 * 8 + row % 8;
        column = (x.metadata & 0xffff) + i.selector;
        at = row / 8 % 2 * 8 + g % 8;
      }
      const u32 index = cell(b, lane, column) >> 2 * at & 3;
      for (u32 e = 0; e < wide; e++)
        dense[((g / 2 * 4 + index) * wide + e) * i.m + r] = a[(g * wide + e) * i.m + r];
    }
  }
  memcpy(a, dense.data(), dense.size() * sizeof *a);
}

f32 Mma::scale(Block &b, u32 lane, u32 column, u32 byte) {
  const u8 bits = (u8)(cell(b, lane, column) >> 8 * byte);
  return i.power ? cvt_f32(e8m0{bits}) : cvt_f32(e4m3{bits});
}

/* "Scale Factor A ID": scales are there in each 32 lanes, and all copies are compared. Row r is in
 * lane r % 32 of the (r / 32)-th column, and its bytes are those of k. */
f32 Mma::scale_a(u32 row, u32 k) {
  const u32 own = other ? i.m / 2 : i.m;
  Block &b = half(row >= own);
  const u32 r = row % own, column = (x.a_scale & 0xffff) + r / 32;
  const f32 s = scale(b, r % 32, column, i.a_id + k);
  for (u32 q = 1; q < 4; q++) {
    const f32 copy = scale(b, 32 * q + r % 32, column, i.a_id + k);
    if (float_bits(copy) != float_bits(s))
      host_fail(line, "the scale of row %u of A differs between quarters of the lanes", row);
  }
  return s;
}

/* "Scale Factor B ID": of a pair with M 128 the two halves of the columns have 64 lanes each, as D.
 * Both blocks hold all. */
f32 Mma::scale_b(u32 column, u32 k) {
  const bool folded = other && i.m == 128;
  const u32 c = folded ? column % (i.n / 2) : column, at = (x.b_scale & 0xffff) + c / 32;
  const u32 lane = folded ? column / (i.n / 2) * 64 : 0, copies = folded ? 2 : 4;
  const f32 s = scale(*block, lane + c % 32, at, i.b_id + k);
  for (u32 q = 0; q < copies * (other ? 2 : 1); q++) {
    const f32 copy = scale(half(q >= copies), lane + q % copies * 32 + c % 32, at, i.b_id + k);
    if (float_bits(copy) != float_bits(s))
      host_fail(line, "the scale of column %u of B differs between its copies", column);
  }
  return s;
}

/* "Data Path Layout Organization": layouts A (M 256), B (M 128 of a pair), C (the same, A being
 * sparse), D (M 128) and F (M 64). */
void Mma::place(u32 row, u32 column, Block **b, u32 *lane, u32 *at) {
  const u32 rows = other ? i.m / 2 : i.m;
  *b = &half(row >= rows);
  row %= rows;
  *at = (x.d & 0xffff) + column;
  *lane = (x.d >> 16) + row;
  if (rows == 64 && (!other || x.sparse)) {
    *lane = (x.d >> 16) + row / 16 * 32 + row % 16;
  } else if (rows == 64) {
    *lane = (x.d >> 16) + row + column / (i.n / 2) * 64;
    *at = (x.d & 0xffff) + column % (i.n / 2);
  }
}

static u32 accumulated(u8 d, u32 old, f32 s) {
  if (d == HOST_f16) return (u32)host_to_f16(host_from_f16((u16)old) + s) | 0xfff10000u;
  if (d == HOST_s32) return old + (u32)(i32)s;
  return float_bits(f32_bits(old) + s);
}

void Mma::execute() {
  std::vector<f32> a(i.depth * i.m), b(i.depth * i.n), sum(i.n), part(i.n);
  read_a(a.data());
  if (x.sparse) expand(a.data());
  read_b(b.data());
  const u32 parts = x.scales ? x.scales : 1, depth = i.depth / parts;
  std::vector<f32> b_scale(parts * i.n);
  for (u32 k = 0; x.scales && k < parts; k++)
    for (u32 c = 0; c < i.n; c++) b_scale[k * i.n + c] = scale_b(c, k);
  for (u32 r = 0; r < i.m; r++) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (u32 p = 0; p < parts; p++) {
      std::fill(part.begin(), part.end(), 0.0f);
      for (u32 k = p * depth; k < (p + 1) * depth; k++) {
        const f32 y = a[k * i.m + r], *z = &b[k * i.n];
        for (u32 c = 0; c < i.n; c++) part[c] += y * z[c];
      }
      const f32 s = x.scales ? scale_a(r, p) : 1;
      for (u32 c = 0; c < i.n; c++)
        sum[c] += x.scales ? part[c] * (s * b_scale[p * i.n + c]) : part[c];
    }
    for (u32 c = 0; c < i.n; c++) {
      Block *to;
      u32 lane, at;
      place(r, c, &to, &lane, &at);
      const u32 old = x.adds ? cell(*to, lane, at) : 0;
      tensor_write(*to, lane, at, accumulated(i.d, old, sum[c]), known, who, when, line);
    }
  }
}

extern "C" void host_tcgen05_mma(const HostTcgen05 *x, int line) {
  std::shared_ptr<Mma> o = std::make_shared<Mma>();
  host_tensor_group(x->pair ? 2 : 1, line);
  o->x = *x;
  o->i = decode(*x, line);
  o->other = nullptr;
  if (x->pair) {
    if (host_rank_of(*m.self->block) % 2)
      host_fail(line, "the second block of a pair issues for both");
    o->other = &host_pair_of(*m.self->block, line);
  }
  const u32 lane = x->d >> 16;
  if (lane && !(lane == 16 && o->i.m == 64)) host_fail(line, "D begins at lane %u", lane);
  if (x->a_in_tmem && o->i.a_mn_major) host_fail(line, "A in tensor memory is transposed");
  if (is_scaled(x->kind) && (o->i.a_id % x->scales || o->i.b_id % x->scales))
    host_fail(line, "scale ids %u and %u for %u scales", o->i.a_id, o->i.b_id, x->scales);
  host_issue_tensor(o, true, line);
}

/* ---- copies to tensor memory --------------------------------------------------------------- */

struct TensorCopy : TensorOp {
  HostTcgen05Copy x;
  Block *other;
  void execute() override;
  void copy(Block &b);
};

/* tcgen05.cp: rows of the matrix go to lanes, the same to several quarters; .128x256b has two
 * chunks of 16 bytes in a row, the others one. */
void TensorCopy::copy(Block &b) {
  const Matrix w = matrix_of(x.low, x.high, "the matrix", line);
  const Reader r = {&b, block->shared.base, b.shared.base, {who, when, line, &clock, b.cluster}};
  const u32 rows = x.shape == HOST_32x128b ? 32 : x.shape == HOST_64x128b ? 64 : 128;
  const u32 chunks = x.shape == HOST_128x256b ? 2 : 1, copies = 128 / rows;
  if (w.span > 16 && w.start % w.span + chunks * 16 > w.span)
    host_fail(line, "tcgen05.cp: %u bytes reach beyond a row of a swizzle of %u", chunks * 16,
              w.span);
  for (u32 row = 0; row < rows; row++)
    for (u32 c = 0; c < chunks; c++) {
      u32 words[4];
      const u32 from = w.start + row % 8 * w.span + row / 8 * w.stride;
      r.chunk(w.span > 16 ? placed(from + c * 16, w.span) : from + c * w.leading, words);
      for (u32 q = 0; q < copies; q++) {
        /* warpx4: 32 rows in each quarter; warpx2::01_23: 32 rows in each quarter of a half */
        const u32 lane = row / 32 * 32 * copies + q * 32 + row % 32;
        for (u32 k = 0; k < 4; k++)
          tensor_write(b, copies > 1 ? lane : row, (x.d & 0xffff) + c * 4 + k, words[k], known, who,
                       when, line);
      }
    }
}

void TensorCopy::execute() {
  copy(*block);
  if (other) copy(*other);
}

extern "C" void host_tcgen05_copy(const HostTcgen05Copy *x, int line) {
  std::shared_ptr<TensorCopy> o = std::make_shared<TensorCopy>();
  host_tensor_group(x->pair ? 2 : 1, line);
  o->x = *x;
  o->other = x->pair ? &host_pair_of(*m.self->block, line) : nullptr;
  if (x->d >> 16) host_fail(line, "tcgen05.cp to lane %u", x->d >> 16);
  host_issue_tensor(o, true, line);
}

/* ---- cluster launch control ---------------------------------------------------------------- */

/* One answer for all blocks of the cluster. Another processor may have taken what is left. */
struct Answer {
  bool known = false;
  u32 words[4];
};

struct Cancel : Operation {
  std::shared_ptr<Answer> answer;
  u32 at, barrier;
  bool step() override;
};

bool Cancel::step() {
  if (!answer->known) {
    answer->known = true;
    const u32 n = (u32)m.waiting.size();
    const bool taken = n && host_random(8);
    answer->words[0] = taken;
    if (taken) {
      const u32 k = host_random(n), c = m.waiting[k];
      const HostIndex g = {m.grid.x / m.cluster.x, m.grid.y / m.cluster.y, 1};
      m.waiting.erase(m.waiting.begin() + k);
      answer->words[1] = c % g.x * m.cluster.x;
      answer->words[2] = c / g.x % g.y * m.cluster.y;
      answer->words[3] = c / g.x / g.y * m.cluster.z;
    }
  }
  host_answer(*block, at, barrier, answer->words, clock, line);
  return true;
}

extern "C" void host_try_cancel(u32 result, u32 barrier, int line) {
  Thread *t = m.self;
  if (m.together) host_fail(line, "try_cancel in blocks that wait for each other");
  const Cluster cluster = host_cluster_of(*t->block);
  if (cluster[0].no_more)
    host_fail(line, "clusterlaunchcontrol.try_cancel after an answer that there is nothing left");
  std::shared_ptr<Answer> answer = std::make_shared<Answer>();
  t->line = line;
  for (Block &b : cluster) {
    std::shared_ptr<Cancel> o = std::make_shared<Cancel>();
    o->line = line;
    o->block = &b;
    o->clock = t->clock;
    o->answer = answer;
    o->at = (u32)shared_offset(*t->block, result, 16, 16, "try_cancel", line);
    o->barrier = host_barrier_for_bytes(b, barrier, "try_cancel", line);
    host_issue(o);
  }
  host_release(t);
  host_yield();
}

/* False: nothing was cancelled. Else the first block of the cluster that will not begin. */
extern "C" bool host_query_cancel(u32 result, u32 *block, int line) {
  u32 words[4];
  host_load_shared(words, result, 16, line);
  if (words[0] > 1) host_fail(line, "query_cancel of 16 bytes that are no answer");
  if (!words[0]) host_cluster_of(*m.self->block)[0].no_more = true;
  /* without a cluster they mean nothing: often 0, as the device's function leaves them */
  for (u32 k = 0; k < 3; k++) block[k] = words[0] ? words[k + 1] : host_random(2) * 0xdeadbeef;
  return words[0];
}
