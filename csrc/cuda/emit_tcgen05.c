/* What Blackwell has: tensor memory, products in it, copies to it, cluster launch control, copies
 * of rows by number.
 *
 * A block allocates its columns once: warp 0 before the body, which leaves their address in shared
 * memory, and gives them back after it. Allocations of the kernel are columns of these.
 *
 * One elected lane issues products, copies and commits (lane.c), for pairs that of the first block
 * alone. A product is a statement for each instruction; tcgen05.c gives the numbers. Operands in
 * SMEM are [chunks][rows][S], as those of wgmma: chunks are the strides along the contiguous
 * dimension, groups of 8 rows follow each other.
 *
 * Loads and stores are by warps. A warp reaches the 32 lanes of tensor memory that its number in
 * the warpgroup gives, so that number is part of every address. A load waits for its registers at
 * once: they must not be used before. The wait is a statement that takes the registers as operands,
 * so that no use of them moves before it. */
#include "../ir/mma.h"
#include "../ir/tmem.h"
#include "gen.h"

/* ---- allocation ---------------------------------------------------------------------------- */

bool pm_has_tmem(const pm_gen *e) { return e->g->tmem_columns > 0; }

bool pm_tmem_is_of_pairs(const pm_gen *e) {
  for (pm_opid op = 1; op < e->g->ops.n; op++) { /* all of them agree */
    if (pm_allocates(e->g, op, PM_TMEM)) return *pm_attr(e->g, op, PM_ATTR_PAIR);
  }
  return false;
}

void pm_print_tmem_alloc(pm_gen *e, uint32_t slot) {
  const int ctas = pm_tmem_is_of_pairs(e) ? 2 : 1;
  pm_begin(e, "if (warp_uniform(threadIdx.x >> 5) == 0) {");
  pm_line(e, "tmem_alloc<%d>(smem + %u, %lld);", ctas, slot, (long long)e->g->tmem_columns);
  pm_line(e, "tmem_relinquish<%d>();", ctas);
  pm_end(e);
}

void pm_print_tmem_address(pm_gen *e, uint32_t slot) {
  pm_line(e, "u32 tmem;");
  pm_line(e, "ld_shared<u32, 1>(&tmem, smem + %u);", slot);
}

void pm_print_tmem_dealloc(pm_gen *e) {
  const int ctas = pm_tmem_is_of_pairs(e) ? 2 : 1;
  pm_line(e, "if (warp_uniform(%s >> 5) == 0) tmem_dealloc<%d>(tmem, %lld);",
          e->reads_again ? "thread_again()" : "threadIdx.x", ctas, (long long)e->g->tmem_columns);
}

/* Blocks that wait for each other hang if they share a multiprocessor that has not enough columns
 * for all of them. They take so much shared memory that no more run there than columns suffice
 * for. The blocks of a pair never share one. */
void pm_keep_blocks_apart(pm_gen *e) {
  enum { RESERVED = 1024, LANES = 2048 }; /* bytes for each block; of a multiprocessor */
  pm_program *p = e->program;
  if (!pm_has_tmem(e) || pm_stands_in(e)) return;
  const uint32_t fit = (uint32_t)(e->target->tmem / e->g->tmem_columns);
  const uint32_t near =
      p->cluster[0] * p->cluster[1] * p->cluster[2] / (pm_tmem_is_of_pairs(e) ? 2 : 1);
  if ((near <= fit && !p->meets_blocks) || LANES / p->block <= fit) return;
  const uint32_t all = (uint32_t)e->target->smem + RESERVED;
  const uint32_t least = all / (fit + 1) + 1 - RESERVED;
  p->smem_bytes = pm_max(p->smem_bytes, (uint32_t)pm_round_up(least, 128));
}

pm_code pm_cuda_ALLOC_TMEM(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const pm_tmem m = pm_tmem_of(e->g, op);
  if (m.offset < 0) return pm_gen_fail(e, op, PM_E_INTERNAL, "it has no columns");
  e->tmem_used = true;
  const char *name = pm_name_of(e, out);
  pm_place(e, op);
  pm_line(e, "const u32 %s = tmem + %lld; // %s, %s, %d in 32 bits", name, (long long)m.offset,
          pm_type_text(e->arena, pm_typeof(e->g, out)), pm_enum_text(PM_ENUM_TMEM, m.layout),
          m.packing);
  pm_bind(e, out, name, PM_FORM_SCALAR);
  return PM_OK;
}

static pm_code tmem_view(pm_gen *e, pm_opid op, pm_val ref, pm_tmem_view *v) {
  const pm_code code = pm_tmem_view_of(e->g, ref, v, e->err);
  if (code) pm_err_op(e->err, e->g, op);
  return code;
}

/* Address of the view's first column. */
static const char *tmem_address(pm_gen *e, const pm_tmem_view *v) {
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_put(&t, e->slot[pm_get(e->g, v->alloc)->out].text);
  for (uint32_t k = 0; k < v->n_terms; k++) {
    pm_putf(&t, " + %s", pm_term_text(e, &v->term[k], 1, false));
  }
  if (v->column) pm_putf(&t, " + %lld", (long long)v->column);
  return t.at;
}

static const char *plus(pm_gen *e, const char *x, int64_t by) {
  return by ? pm_str(e, "%s + %lld", x, (long long)by) : x;
}

/* ---- products ------------------------------------------------------------------------------ */

/* Only the first block of a pair issues. */
static void begin_pair(pm_gen *e, bool pair) {
  if (pair) pm_begin(e, "if (cluster_rank() %% 2 == 0) {");
}

static void end_pair(pm_gen *e, bool pair) {
  if (pair) pm_end(e);
}

static pm_code no_lane(pm_gen *e, pm_opid op) {
  return pm_gen_fail(e, op, PM_E_INTERNAL, "no lane was elected for it");
}

static pm_code operand_of(pm_gen *e, pm_opid op, pm_val ref, int k_dim, pm_view *v,
                          pm_tcgen05_operand *o) {
  if (pm_view_of(e->g, ref, true, v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  const pm_view_dim *k = &v->dim[k_dim], *mn = &v->dim[1 - k_dim];
  const int64_t bits = pm_dtypes[v->dtype].bits, s = v->swizzle * 8 / bits;
  o->k_major = k->inner == 1;
  const pm_view_dim *fast = o->k_major ? k : mn, *slow = o->k_major ? mn : k;
  if (!s || fast->inner != 1 || slow->inner != s || slow->tile ||
      (fast->tile ? fast->tile != s : fast->size > s)) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "an operand in SMEM is not tiled by (8, %lld) with a swizzle of %d bytes",
                       (long long)s, v->swizzle);
  }
  o->swizzle = v->swizzle;
  o->chunk = fast->size > s ? fast->outer * bits / 8 : 16;
  o->group = 8 * v->swizzle;
  return PM_OK;
}

static const char *hex_constant(pm_gen *e, const char *stem, uint32_t x, const char *comment) {
  return pm_ptx_constant(e, pm_str(e, "%s_%08x", stem, x), x, comment);
}

/* Declares the low word of the descriptor as a variable; returns its high word. */
static const char *descriptor(pm_gen *e, const char *name, const pm_view *v, uint64_t static_bits) {
  pm_line(e, "const u32 %s = tcgen05_address(%s, 0x%xu);", name, pm_view_address(e, v),
          (unsigned)static_bits);
  return hex_constant(e, "matrix", (uint32_t)(static_bits >> 32),
                      "high word of a matrix descriptor: distance of groups of 8 rows, swizzle");
}

typedef struct product {
  pm_tcgen05_product p;
  const char *d, *a, *a_high, *b_high, *a_scale, *b_scale, *metadata, *adds;
} product;

static void issue_step(pm_gen *e, const char *fn, const product *x, const pm_tcgen05_step *s) {
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "%s(%s, %s", fn, s->d ? pm_str(e, "%s + 0x%x", x->d, s->d) : x->d,
          plus(e, x->a, x->p.a_in_tmem ? s->a : s->a / 16));
  if (!x->p.a_in_tmem) pm_putf(&t, ", %s", x->a_high);
  pm_putf(&t, ", %s, %s, %s", plus(e, "b", s->b / 16), x->b_high,
          hex_constant(e, "instruction", s->instruction, "instruction descriptor"));
  if (x->p.sparse) pm_putf(&t, ", %s", plus(e, x->metadata, s->metadata));
  if (x->p.block) {
    pm_putf(&t, ", %s, %s", plus(e, x->a_scale, s->a_scale), plus(e, x->b_scale, s->b_scale));
  }
  pm_line(e, "%s, %s);", t.at, s->first ? x->adds : "true");
}

static pm_code tmem_operand(pm_gen *e, pm_opid op, pm_val ref, const char **out) {
  pm_tmem_view v;
  if (!ref) return PM_OK;
  PM_TRY(tmem_view(e, op, ref, &v));
  *out = tmem_address(e, &v);
  return PM_OK;
}

pm_code pm_cuda_TCGEN05_MMA(pm_gen *e, pm_opid op) {
  const pm_tcgen05 g = pm_tcgen05_of(e->g, op);
  pm_view a, b;
  product x = {.p = {.kind = g.row->types,
                     .a = (pm_dtype)g.row->a,
                     .b = (pm_dtype)g.row->b,
                     .d = (pm_dtype)g.row->acc,
                     .scale = (pm_dtype)g.row->scale,
                     .block = (int)g.block,
                     .sparse = g.metadata != 0,
                     .pair = g.pair,
                     .a_in_tmem = g.in_tmem,
                     .rows = g.m,
                     .b_columns = g.pair ? g.n / 2 : g.n,
                     .k = g.k}};
  if (!e->lane) return no_lane(e, op);
  PM_TRY(tmem_operand(e, op, g.acc, &x.d));
  PM_TRY(tmem_operand(e, op, g.a_scale, &x.a_scale));
  PM_TRY(tmem_operand(e, op, g.b_scale, &x.b_scale));
  PM_TRY(tmem_operand(e, op, g.metadata, &x.metadata));
  PM_TRY(operand_of(e, op, g.b, 0, &b, &x.p.in_b));
  if (!g.in_tmem) PM_TRY(operand_of(e, op, g.a, 1, &a, &x.p.in_a));
  x.adds = pm_scalar_of(e, g.accumulate);
  const char *fn = pm_ptx_tcgen05(e, &x.p);
  pm_note(e, op, "tcgen05_mma");
  pm_begin(e, g.pair ? "if (cluster_rank() %% 2 == 0) {" : "{");
  if (g.in_tmem) {
    PM_TRY(tmem_operand(e, op, g.a, &x.a));
  } else {
    x.a = "a";
    x.a_high = descriptor(e, "a", &a, pm_tcgen05_matrix_of(&x.p.in_a));
  }
  x.b_high = descriptor(e, "b", &b, pm_tcgen05_matrix_of(&x.p.in_b));
  for (int piece = 0; piece < pm_tcgen05_pieces(&x.p); piece++) {
    for (int64_t k = 0; k < pm_tcgen05_steps(&x.p); k++) {
      const pm_tcgen05_step s = pm_tcgen05_at(&x.p, piece, k);
      issue_step(e, fn, &x, &s);
    }
  }
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_TCGEN05_COMMIT(pm_gen *e, pm_opid op) {
  const bool pair = *pm_attr(e->g, op, PM_ATTR_PAIR);
  const char *address;
  if (!e->lane) return no_lane(e, op);
  PM_TRY(pm_barrier_address(e, op, pm_in(e->g, op, 0), &address));
  pm_note(e, op, "tcgen05_commit_arrive");
  begin_pair(e, pair);
  if (pair) {
    const int64_t axis = e->g->n_cluster - 1;
    pm_line(e, "tcgen05_commit_pair(%s, %s);", address, pm_cluster_mask(e, &axis, 1));
  } else {
    pm_line(e, "tcgen05_commit(%s);", address);
  }
  end_pair(e, pair);
  return PM_OK;
}

/* ---- copies to tensor memory --------------------------------------------------------------- */

typedef struct copy {
  pm_view from;
  pm_tmem_view to;
  bool pair;
  const char *address, *shape;
} copy;

static pm_code begin_copy(pm_gen *e, pm_opid op, copy *c) {
  if (!e->lane) return no_lane(e, op);
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, &c->from, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  PM_TRY(tmem_view(e, op, pm_in(e->g, op, 1), &c->to));
  c->pair = *pm_attr(e->g, op, PM_ATTR_PAIR);
  c->address = tmem_address(e, &c->to);
  pm_note(e, op, pm_ops[pm_get(e->g, op)->code].text);
  pm_begin(e, c->pair ? "if (cluster_rank() %% 2 == 0) {" : "{");
  return PM_OK;
}

/* One instruction: from `bytes` after the start to `column`. */
static void issue_copy(pm_gen *e, const copy *c, const char *high, int64_t bytes, int64_t column) {
  pm_line(e, "%s(%s, %s, %s);", pm_ptx_tcgen05_copy(e, c->shape, c->pair),
          plus(e, c->address, column), plus(e, "m", bytes / 16), high);
}

/* A matrix of 128 rows: with a swizzle 32 bytes of each row at once, else 16 bytes, which follow
 * each other row by row. */
pm_code pm_cuda_COPY_S2T(pm_gen *e, pm_opid op) {
  copy c = {0};
  PM_TRY(begin_copy(e, op, &c));
  const pm_view_dim *row = &c.from.dim[0], *column = &c.from.dim[1];
  const int64_t bits = pm_dtypes[c.from.dtype].bits, swizzle = c.from.swizzle;
  const int64_t s = (swizzle ? swizzle : 16) * 8 / bits, step = swizzle ? 32 : 16;
  const uint64_t m = pm_tcgen05_matrix(16, 8 * row->inner * bits / 8, (int)swizzle);
  c.shape = swizzle ? "128x256b" : "128x128b";
  const char *high = descriptor(e, "m", &c.from, m);
  for (int64_t at = 0; at < column->size * bits / 8; at += step) {
    const int64_t k = at * 8 / bits, chunk = column->tile ? k / s * column->outer : 0;
    issue_copy(e, &c, high, (chunk + k % s) * bits / 8, at / 4);
  }
  pm_end(e);
  return PM_OK;
}

/* Tiles of `rows` rows of 16 bytes, [n][k] of them; where tile (n, k) goes. */
static pm_code copy_tiles(pm_gen *e, copy *c, int64_t rows, int64_t n, int64_t k) {
  const char *high = descriptor(e, "m", &c->from, pm_tcgen05_matrix(0, 128, 0));
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < k; j++) {
      issue_copy(e, c, high, (i * k + j) * rows * 16, 4 * n * j + 4 * i);
    }
  }
  pm_end(e);
  return PM_OK;
}

static pm_code copy_staged(pm_gen *e, pm_opid op) {
  copy c = {0};
  PM_TRY(begin_copy(e, op, &c));
  const int64_t rows = c.from.dim[2].size;
  c.shape = rows == 32 ? "32x128b.warpx4" : rows == 64 ? "64x128b.warpx2::01_23" : "128x128b";
  return copy_tiles(e, &c, rows, c.from.dim[0].size, c.from.dim[1].size);
}

pm_code pm_cuda_COPY_SCALES(pm_gen *e, pm_opid op) { return copy_staged(e, op); }
pm_code pm_cuda_COPY_METADATA(pm_gen *e, pm_opid op) { return copy_staged(e, op); }

/* ---- between registers and tensor memory --------------------------------------------------- */

typedef struct cells {
  const pm_tmem_view *view;
  const pm_layout *layout;
  int rank, bits;
} cells;

/* The matrices of a batch follow each other. Of copies a lane has the one that its warp reaches. */
static bool cell_of(const void *ctx, int tid, int64_t reg, pm_tcgen05_cell *out) {
  const cells *c = ctx;
  const pm_tmem *m = &c->view->of;
  int64_t index[PM_MAX_RANK], matrix = 0;
  if (!pm_layout_index(c->layout, tid, reg, index)) return false;
  for (int d = 0; d < c->rank - 2; d++) matrix = matrix * c->layout->shape[d] + index[d];
  for (int k = 0; k < pm_tmem_copies(m); k++) {
    const pm_tmem_cell x = pm_tmem_at(m, index[c->rank - 2], index[c->rank - 1], k);
    *out = (pm_tcgen05_cell){(uint32_t)x.lane, (uint32_t)(x.column + matrix * m->width),
                             (uint32_t)(x.bit / c->bits)};
    if (x.lane / 32 == tid / 32) return true;
  }
  return false;
}

static pm_code plan_move(pm_gen *e, pm_opid op, pm_val array, const pm_tmem_view *v,
                         pm_tcgen05_move *m) {
  const pm_type *t = pm_typeof(e->g, array);
  const pm_layout *l = pm_value_layout(e->g, array);
  const cells c = {v, l, t->rank, pm_dtypes[t->dtype].bits};
  if (l->kind == PM_TILED &&
      pm_tcgen05_plan_move(e->arena, cell_of, &c, pm_layout_regs(l), c.bits, v->of.packing, m)) {
    return PM_OK;
  }
  return pm_gen_fail(e, op, PM_E_INTERNAL, "no instruction moves an array in layout %s",
                     pm_layout_text(e->arena, l));
}

static int64_t words_of(const pm_tcgen05_move *m) {
  int64_t n = 0;
  for (uint32_t k = 0; k < m->n; k++) n += m->part[k].words;
  return n;
}

/* Declares the address of this warp's part. */
static const char *warp_address(pm_gen *e, const pm_tmem_view *v) {
  pm_line(e, "const u32 at = %s + (warp << 21);", tmem_address(e, v));
  return "at";
}

static uint32_t first_word(const struct pm_tcgen05_part *p) { return p->word[0]; }

static void pin_words(pm_gen *e, int64_t n) {
  enum { AT_ONCE = 64 };
  for (int64_t k = 0; k < n; k += AT_ONCE) {
    const char *fn = pm_ptx_pin(e, PM_F16, pm_min(n - k, AT_ONCE));
    pm_line(e, k ? "%s(&w[%lld]);" : "%s(w);", fn, (long long)k);
  }
}

static const char *combined(pm_gen *e, int64_t reduce, pm_dtype d, const char *a, const char *b) {
  const bool max = reduce == PM_TMEM_REDUCE_MAX || reduce == PM_TMEM_REDUCE_ABSMAX;
  return pm_combine(e, max ? PM_REDUCE_MAX : PM_REDUCE_MIN, d, a, b);
}

/* Each instruction has its own result, which the wait gives as well. */
static void load_parts(pm_gen *e, pm_opid op, const pm_tcgen05_move *m, const char *at,
                       const char *reduced) {
  const int64_t reduce = *pm_attr(e->g, op, PM_ATTR_TMEM_REDUCE);
  const pm_dtype d = (pm_dtype)pm_typeof(e->g, pm_get(e->g, op)->out)->dtype;
  if (reduce) pm_line(e, "u32 found[%u];", m->n);
  for (uint32_t k = 0; k < m->n; k++) {
    const struct pm_tcgen05_part *p = &m->part[k];
    const char *to = first_word(p) ? pm_str(e, "&w[%u]", first_word(p)) : "w";
    const char *address = p->address ? pm_str(e, "%s + 0x%x", at, p->address) : at;
    if (reduce) {
      pm_line(e, "%s(%s, &found[%u], %s);", pm_ptx_tmem_reduce(e, m, k, reduce, d), to, k, address);
    } else {
      pm_line(e, "%s(%s, %s);", pm_ptx_tmem_move(e, m, k, false), to, address);
    }
  }
  pm_line(e, "tmem_wait_load();");
  pin_words(e, words_of(m));
  if (!reduce) return;
  pm_line(e, "%s(found);", pm_ptx_pin(e, PM_F16, m->n));
  pm_line(e, "from_bits(%s, found[0]);", reduced);
  for (uint32_t k = 1; k < m->n; k++) {
    pm_begin(e, "{");
    pm_line(e, "%s x;", pm_cpp_type(d));
    pm_line(e, "from_bits(x, found[%u]);", k);
    pm_line(e, "%s = %s;", reduced, combined(e, reduce, d, reduced, "x"));
    pm_end(e);
  }
}

/* Words to elements; registers have a byte for each element of 4 or 2 bits. */
static void split_words(pm_gen *e, const pm_tcgen05_move *m, pm_dtype t, const char *x) {
  const pm_dtype_info d = pm_dtypes[t];
  const long long n = words_of(m);
  pm_line(e, "#pragma unroll");
  if (m->per_word == 1) {
    pm_line(e, "for (int r = 0; r < %lld; r++) from_bits(%s[r], w[r]);", n, x);
  } else if (d.bits >= 8) {
    pm_line(e, "for (int r = 0; r < %lld; r++) unpack<%s, %d>(&%s[%d * r], &w[r]);", n,
            pm_cpp_type(t), m->per_word, x, m->per_word);
  } else {
    const int pairs = m->per_word / 2;
    pm_line(e, "for (int r = 0; r < %lld; r++)", n * pairs);
    pm_line(e, "  unpack_%s(&%s[2 * r], (u8)(w[r / %d] >> r %% %d * %d));", d.short_name, x, pairs,
            pairs, 2 * d.bits);
  }
}

/* Elements to the word r. */
static void join_word(pm_gen *e, const pm_tcgen05_move *m, pm_dtype t, const char *elements) {
  const pm_dtype_info d = pm_dtypes[t];
  const char *type = pm_cpp_type(t);
  pm_line(e, "const %s x[%d] = {%s};", type, m->per_word, elements);
  if (d.bits >= 8) {
    pm_line(e, "pack<%s, %d>(&w[r], x);", type, m->per_word);
    return;
  }
  pm_line(e, "w[r] = 0;");
  pm_line(e, "#pragma unroll");
  pm_line(e, "for (int k = 0; k < %d; k++)", m->per_word / 2);
  pm_line(e, "  w[r] |= (u32)pack_%d(bits_of(x[2 * k]), bits_of(x[2 * k + 1])) << %d * k;", d.bits,
          2 * d.bits);
}

pm_code pm_cuda_LOAD_TMEM(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t reduce = *pm_attr(e->g, op, PM_ATTR_TMEM_REDUCE);
  pm_tmem_view v;
  pm_tcgen05_move m;
  PM_TRY(tmem_view(e, op, pm_in(e->g, op, 0), &v));
  PM_TRY(plan_move(e, op, out, &v, &m));
  pm_note(e, op, "async_load_tmem");
  const char *x = pm_declare(e, out, out), *type = pm_cpp_type(pm_typeof(e->g, out)->dtype);
  const char *reduced = NULL;
  if (reduce) {
    reduced = e->reduced[out] = pm_unique(e, "reduced");
    pm_line(e, "%s %s;", type, reduced);
  }
  const long long n = words_of(&m);
  pm_begin(e, "{");
  pm_line(e, "u32 w[%lld];", n);
  load_parts(e, op, &m, warp_address(e, &v), reduced);
  split_words(e, &m, (pm_dtype)pm_typeof(e->g, out)->dtype, x);
  pm_end(e);
  return PM_OK;
}

/* A value of the LOAD_TMEM before it. */
pm_code pm_cuda_TMEM_REDUCED(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  if (!e->reduced[in]) return pm_gen_fail(e, op, PM_E_INTERNAL, "no load has reduced its operand");
  pm_place(e, op);
  const char *x = pm_declare(e, out, out);
  pm_line(e, pm_is_array(e, out) ? "%s[0] = %s;" : "%s = %s;", x, e->reduced[in]);
  return PM_OK;
}

pm_code pm_cuda_STORE_TMEM(pm_gen *e, pm_opid op) {
  const pm_val value = pm_in(e->g, op, 1);
  pm_tmem_view v;
  pm_tcgen05_move m;
  pm_text list;
  PM_TRY(tmem_view(e, op, pm_in(e->g, op, 0), &v));
  PM_TRY(plan_move(e, op, value, &v, &m));
  const long long n = words_of(&m);
  pm_text_init(&list, e->arena);
  for (int k = 0; k < m.per_word; k++) {
    const char *reg = m.per_word == 1 ? "r"
                      : k             ? pm_str(e, "%d * r + %d", m.per_word, k)
                                      : pm_str(e, "%d * r", m.per_word);
    pm_putf(&list, "%s%s", k ? ", " : "", pm_at(e, value, reg));
  }
  pm_note(e, op, "async_store_tmem");
  pm_begin(e, "{");
  pm_line(e, "u32 w[%lld];", n);
  pm_line(e, "#pragma unroll");
  pm_begin(e, "for (int r = 0; r < %lld; r++) {", n);
  join_word(e, &m, (pm_dtype)pm_typeof(e->g, value)->dtype, list.at);
  pm_end(e);
  const char *at = warp_address(e, &v);
  for (uint32_t k = 0; k < m.n; k++) {
    const struct pm_tcgen05_part *p = &m.part[k];
    pm_line(e, "%s(%s, %s);", pm_ptx_tmem_move(e, &m, k, true),
            first_word(p) ? pm_str(e, "&w[%u]", first_word(p)) : "w",
            p->address ? pm_str(e, "%s + 0x%x", at, p->address) : at);
  }
  pm_end(e);
  return PM_OK;
}

/* Does the thread that comes to op, or one of its warps, issue products or copies to tensor memory?
 */
static bool issues_itself(const pm_gen *e, pm_opid op) {
  const pm_graph *g = e->g;
  const uint32_t own = pm_threads_of(g, op);
  for (pm_opid k = 1; k < g->ops.n; k++) {
    const pm_opcode code = pm_get(g, k)->code;
    if (code != PM_OP_TCGEN05_MMA && code != PM_OP_COPY_S2T && code != PM_OP_COPY_SCALES &&
        code != PM_OP_COPY_METADATA)
      continue;
    if (pm_threads_of(g, k) & own) return true;
  }
  return false;
}

/* What each warp loaded or stored comes before the products that one lane of the thread issues.
 * Others hear of it by barriers, which have fences. */
static pm_code meet_after(pm_gen *e, pm_opid op, const char *name, const char *wait) {
  const bool fences = issues_itself(e, op);
  pm_note(e, op, name);
  pm_line(e, "%s", wait);
  if (fences) pm_line(e, "tcgen05_fence_before();");
  pm_line(e, PM_WARPGROUP_SYNC);
  if (fences) pm_line(e, "tcgen05_fence_after();");
  return PM_OK;
}

pm_code pm_cuda_COMMIT_TMEM(pm_gen *e, pm_opid op) {
  return meet_after(e, op, "commit_tmem", "tmem_wait_store();");
}

pm_code pm_cuda_WAIT_LOAD_TMEM(pm_gen *e, pm_opid op) {
  return meet_after(e, op, "wait_load_tmem", "tmem_wait_load();");
}

/* ---- cluster launch control ---------------------------------------------------------------- */

static pm_code result_address(pm_gen *e, pm_opid op, const char **address) {
  pm_view v;
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, &v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  *address = pm_view_address(e, &v);
  return PM_OK;
}

/* Each thread of each block arrives; thread 0 expects the answer, that of the first block asks. */
pm_code pm_cuda_TRY_CANCEL(pm_gen *e, pm_opid op) {
  const char *result, *barrier;
  const bool threads = e->g->n_threads > 1, blocks = pm_blocks(e->g) > 1;
  if (!e->lane) return no_lane(e, op);
  PM_TRY(result_address(e, op, &result));
  PM_TRY(pm_barrier_address(e, op, pm_in(e->g, op, 1), &barrier));
  pm_note(e, op, "try_cluster_cancel");
  if (threads) {
    pm_line(e, "if (wg != 0) mbarrier_arrive(%s);", barrier);
    pm_line(e, "else mbarrier_arrive_expect_tx(%s, 16);", barrier);
  } else {
    pm_line(e, "mbarrier_arrive_expect_tx(%s, 16);", barrier);
  }
  pm_line(e, "%s%s%s%s%stry_cancel(%s, %s);", threads || blocks ? "if (" : "",
          threads ? "wg == 0" : "", threads && blocks ? " && " : "",
          blocks ? "cluster_rank() == 0" : "", threads || blocks ? ") " : "", result, barrier);
  return PM_OK;
}

/* The number of the grid point from the indices of a block. */
pm_code pm_cuda_QUERY_CANCEL(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const uint32_t *n = e->program->grid, *c = e->program->cluster;
  const char *result;
  PM_TRY(result_address(e, op, &result));
  pm_note(e, op, "query_cluster_cancel");
  const char *x = pm_declare(e, out, out);
  pm_begin(e, "{");
  pm_line(e, "u32 block[3];");
  pm_line(e, "%s = -1;", x);
  pm_line(e, "if (query_cancel(%s, block))", result);
  pm_line(e, "  %s = (i32)((block[2] / %u * %u + block[1] / %u) * %u + block[0] / %u);", x, c[2],
          n[1] / c[1], c[1], n[0] / c[0], c[0]);
  pm_end(e);
  return PM_OK;
}

/* ---- rows by number ------------------------------------------------------------------------ */

/* Rows of an array that its numbers name; the SMEM ref has them one below the other, in chunks of
 * the columns. An instruction moves one chunk of four rows. */
typedef struct rows {
  pm_view smem, gmem;
  pm_tensor_map map;
  int64_t chunk, chunks, row_bytes, chunk_bytes; /* columns of a chunk */
  pm_val numbers;
  int64_t groups; /* of four numbers in a lane */
  bool all;       /* each lane has all numbers; else its warp's, 4 of each 16 */
} rows;

static pm_code rows_of(pm_gen *e, pm_opid op, pm_val smem, pm_val gmem, pm_val numbers, rows *r) {
  if (pm_view_of(e->g, smem, true, &r->smem, e->err) ||
      pm_view_of(e->g, gmem, true, &r->gmem, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  const pm_view *s = &r->smem, *g = &r->gmem;
  const pm_view_dim *column = &s->dim[1];
  const int64_t bits = pm_dtypes[s->dtype].bits, n = pm_typeof(e->g, numbers)->dim[0];
  r->chunk = column->tile ? column->tile : column->size;
  r->chunks = column->size / r->chunk;
  r->row_bytes = r->chunk * bits / 8;
  r->chunk_bytes = column->outer * bits / 8;
  r->map = (pm_tensor_map){.param = g->param,
                           .dtype = g->dtype,
                           .rank = 2,
                           .swizzle = s->swizzle,
                           .dim = {(uint64_t)g->base_shape[1], (uint64_t)g->base_shape[0]},
                           .extent = {g->base_extent[1], g->base_extent[0]},
                           .stride = {(uint64_t)bits / 8, (uint64_t)(g->base_stride[0] * bits / 8)},
                           .box = {(uint32_t)r->chunk, 1}};
  r->numbers = numbers;
  const int64_t held = pm_regs_of(e, numbers);
  r->all = held == n;
  r->groups = held / 4;
  if (r->all || held * 4 == n) return PM_OK;
  return pm_gen_fail(e, op, PM_E_INTERNAL, "the numbers of rows are in another layout");
}

static const char *first_column(pm_gen *e, const pm_view *g, const char *chunk) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (uint32_t k = 0; k < g->n_start_terms; k++) {
    const pm_term term = {g->start_term[k].val, g->start_term[k].mul, 1};
    if (g->start_term[k].dim == 1) pm_putf(&t, "%s + ", pm_term_text(e, &term, 1, false));
  }
  pm_putf(&t, "%lld", (long long)g->start[1]);
  return *chunk == '0' ? t.at : pm_str(e, "%s + %s", t.at, chunk);
}

/* The lanes that have numbers issue. end: what follows the address and the map. */
static void issue_rows(pm_gen *e, const rows *r, const char *barrier) {
  const char *map = pm_map_name(e, &r->map), *smem = pm_view_address(e, &r->smem);
  pm_begin(e, r->all ? PM_ONE_LANE " {" : "if (elect_one()) {");
  const char *t = pm_begin_unrolled(e, "t", r->groups, 1);
  const char *from = *t == '0' ? "" : "4 * t + ";
  pm_text list;
  pm_text_init(&list, e->arena);
  for (int k = 0; k < 4; k++) {
    pm_putf(&list, "%s(i32)%s", k ? ", " : "", pm_at(e, r->numbers, pm_str(e, "%s%d", from, k)));
  }
  pm_line(e, "const i32 rows[4] = {%s};", list.at);
  const long long group = r->row_bytes * (r->all ? 4 : 16);
  const char *to = *t == '0' ? smem : pm_str(e, "%s + t * %lld", smem, group);
  if (!r->all) to = pm_str(e, "%s + warp * %lld", to, (long long)r->row_bytes * 4);
  const char *c = pm_begin_unrolled(e, "c", r->chunks, 1);
  if (*c != '0') to = pm_str(e, "%s + c * %lld", to, (long long)r->chunk_bytes);
  const char *chunk = *c == '0' ? c : pm_str(e, "c * %lld", (long long)r->chunk);
  const char *column = first_column(e, &r->gmem, chunk);
  if (barrier) {
    pm_line(e, "tma_gather4(%s, &%s, %s, %s, rows);", to, map, barrier, column);
  } else {
    pm_line(e, "tma_scatter4(&%s, %s, %s, rows);", map, to, column);
  }
  pm_end_unrolled(e, r->chunks, 1);
  pm_end_unrolled(e, r->groups, 1);
  pm_end(e);
}

/* The barrier knows of the bytes before any warp asks for them. */
pm_code pm_cuda_GATHER_G2S(pm_gen *e, pm_opid op) {
  const char *barrier;
  rows r;
  PM_TRY(rows_of(e, op, pm_in(e->g, op, 1), pm_in(e->g, op, 0), pm_in(e->g, op, 3), &r));
  PM_TRY(pm_barrier_address(e, op, pm_in(e->g, op, 2), &barrier));
  const pm_type *t = pm_typeof(e->g, pm_in(e->g, op, 1));
  pm_note(e, op, "copy_gmem_to_smem of rows");
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_line(e, PM_ONE_LANE " mbarrier_arrive_expect_tx(%s, %lld);", barrier,
          (long long)(pm_type_size(t) * pm_dtypes[t->dtype].bits / 8));
  pm_line(e, PM_WARPGROUP_SYNC);
  issue_rows(e, &r, barrier);
  return PM_OK;
}

pm_code pm_cuda_SCATTER_S2G(pm_gen *e, pm_opid op) {
  rows r;
  PM_TRY(rows_of(e, op, pm_in(e->g, op, 0), pm_in(e->g, op, 1), pm_in(e->g, op, 2), &r));
  pm_note(e, op, "copy_smem_to_gmem of rows");
  pm_line(e, PM_WARPGROUP_SYNC);
  issue_rows(e, &r, NULL);
  if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) pm_line(e, "%s bulk_group_commit();", pm_store_lanes(e));
  return PM_OK;
}
