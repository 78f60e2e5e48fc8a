/* Encodings of tcgen05 instructions.
 *
 * A product is pieces along the columns of D times steps along K. A piece is as wide as one
 * instruction allows, 256 columns; with 64 rows of a block that is no pair, D lies in both halves
 * of each 32 lanes, and each half is a piece of its own. Where N is contiguous in B, a piece that
 * begins inside a row of a swizzle ends with it.
 *
 * A step takes 32 bytes along K (twice as many of B, if A is sparse). Inside a row of a swizzle
 * that is an offset of the address; the hardware applies the swizzle to the sum.
 *
 * Scales: a cell has those of four blocks. An instruction takes one, two or four of them, and its
 * descriptor says at which they begin. Metadata of 16-bit types: a pair of columns serves two
 * steps. */
#include "tcgen05.h"

/* Codes of the types of A and B (one for each kind of instruction that has them), and of D. */
static uint32_t type_code(pm_dtype t) {
  return t == PM_BF16 || t == PM_E5M2 || t == PM_I8 || t == PM_E2M1;
}

static uint32_t d_code(pm_dtype t) { return t == PM_F16 ? 0 : t == PM_F32 ? 1 : 2; }

/* ---- shapes -------------------------------------------------------------------------------- */

enum { MOST_COLUMNS = 256, STEP_BYTES = 32, CELL_SCALES = 4 };

int64_t pm_tcgen05_k(const pm_tcgen05_product *p) {
  return STEP_BYTES * 8 / pm_dtypes[p->a].bits * (p->sparse ? 2 : 1);
}

int64_t pm_tcgen05_steps(const pm_tcgen05_product *p) { return p->k / pm_tcgen05_k(p); }

/* D lies in both halves of each 32 lanes: the first half of its columns, and the second. */
static bool has_halves(const pm_tcgen05_product *p) { return !p->pair && p->rows == 64; }

typedef struct piece {
  int64_t from, columns; /* of D */
} piece;

/* The piece after those that end at column `from`. */
static piece next_piece(const pm_tcgen05_product *p, int64_t from) {
  const int64_t all = p->b_columns * (p->pair ? 2 : 1), half = all / 2;
  const int64_t s = p->in_b.swizzle * 8 / pm_dtypes[p->b].bits;
  int64_t end = has_halves(p) && from < half ? half : all;
  if (!p->in_b.k_major && from % s) end = pm_min(end, from - from % s + s);
  return (piece){from, pm_min(end - from, MOST_COLUMNS)};
}

static piece piece_at(const pm_tcgen05_product *p, int n) {
  piece x = next_piece(p, 0);
  while (n--) x = next_piece(p, x.from + x.columns);
  return x;
}

int pm_tcgen05_pieces(const pm_tcgen05_product *p) {
  const int64_t all = p->b_columns * (p->pair ? 2 : 1);
  int n = 0;
  for (int64_t from = 0; from < all; n++) {
    const piece x = next_piece(p, from);
    from += x.columns;
  }
  return n;
}

/* ---- descriptors --------------------------------------------------------------------------- */

uint64_t pm_tcgen05_matrix(int64_t leading, int64_t stride, int swizzle) {
  const uint64_t mode = swizzle == 128 ? 2 : swizzle == 64 ? 4 : swizzle == 32 ? 6 : 0;
  return (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 46 |
         mode << 61;
}

/* Where K is contiguous, the hardware does not use the leading dimension of swizzled matrices. */
uint64_t pm_tcgen05_matrix_of(const pm_tcgen05_operand *o) {
  return pm_tcgen05_matrix(o->k_major ? 0 : o->chunk, o->group, o->swizzle);
}

/* Bytes from the first element to that at k and at mn of the other dimension. */
static int64_t offset_of(const pm_tcgen05_operand *o, int bits, int64_t k, int64_t mn) {
  const int64_t s = o->swizzle * 8 / bits, fast = o->k_major ? k : mn, slow = o->k_major ? mn : k;
  return fast / s * o->chunk + fast % s * bits / 8 + slow / 8 * o->group;
}

/* Scales that one instruction takes of each row or column. */
static int64_t scales_of(const pm_tcgen05_product *p) { return pm_tcgen05_k(p) / p->block; }

static uint32_t instruction_of(const pm_tcgen05_product *p, int64_t columns, int64_t step) {
  const uint32_t m = (uint32_t)(p->rows * (p->pair ? 2 : 1)), n = (uint32_t)columns;
  uint32_t x = (uint32_t)p->sparse << 2 | type_code(p->a) << 7 | type_code(p->b) << 10 |
               (uint32_t)(!p->a_in_tmem && !p->in_a.k_major) << 15 |
               (uint32_t)!p->in_b.k_major << 16 | n / 8 << 17 | m / 16 << 24;
  if (p->block) {
    const int64_t taken = scales_of(p);
    const uint32_t id = (uint32_t)(step % (CELL_SCALES / taken) * taken);
    return x | id << 4 | (uint32_t)(p->scale == PM_E8M0) << 23 | id << 29;
  }
  if (p->sparse && pm_dtypes[p->a].bits == 16) x |= (uint32_t)(step % 2);
  return x | d_code(p->d) << 4;
}

/* Columns of tensor memory from the scales of one cell's steps to those of the next: a column for
 * each 32 of `rows`. */
static uint32_t scale_columns(const pm_tcgen05_product *p, int64_t step, int64_t rows) {
  const int64_t per_cell = CELL_SCALES / scales_of(p);
  return (uint32_t)(step / per_cell * CELL_SCALES * ((rows + 127) / 128));
}

pm_tcgen05_step pm_tcgen05_at(const pm_tcgen05_product *p, int piece_number, int64_t step) {
  const piece x = piece_at(p, piece_number);
  const int64_t all = p->b_columns * (p->pair ? 2 : 1), k = step * pm_tcgen05_k(p);
  const bool second = has_halves(p) && x.from >= all / 2;
  const int bits = pm_dtypes[p->a].bits;
  pm_tcgen05_step out = {.instruction = instruction_of(p, x.columns, step), .first = !step};
  const int64_t column = x.from - (second ? all / 2 : 0);
  out.d = (uint32_t)second << 20 | (uint32_t)column;
  out.a =
      p->a_in_tmem ? step * STEP_BYTES / 4 : offset_of(&p->in_a, bits, p->sparse ? k / 2 : k, 0);
  out.b = offset_of(&p->in_b, pm_dtypes[p->b].bits, k, p->pair ? 0 : x.from);
  if (p->block) {
    /* scales of B of a pair with 64 rows each: 128 lanes have those of 256 columns */
    const bool folded = p->pair && p->rows == 64;
    out.a_scale = scale_columns(p, step, 128);
    out.b_scale = scale_columns(p, step, folded ? 128 : all);
  }
  if (p->sparse) out.metadata = (uint32_t)(2 * (bits == 16 ? step / 2 : step));
  return out;
}

const char *pm_tcgen05_name(pm_arena *a, const pm_tcgen05_product *p) {
  return pm_printf(a, "tcgen05.mma%s.cta_group::%d.kind::%s", p->sparse ? ".sp" : "",
                   p->pair ? 2 : 1, p->kind);
}

/* ---- between registers and tensor memory --------------------------------------------------- */

/* Rows and columns of register r of lane l, of an instruction that moves one unit: rows of the
 * lanes of a warp, columns of 32 bits (PTX ISA, figures of data movement shapes). */
static const struct shape {
  const char *text;
  int rows, columns, registers; /* of .x1 */
} shapes[] = {
    [PM_TCGEN05_32X32B] = {"32x32b", 32, 1, 1},
    [PM_TCGEN05_16X256B] = {"16x256b", 16, 8, 4},
    [PM_TCGEN05_16X128B] = {"16x128b", 16, 4, 2},
};
enum { MOST_REGISTERS = 32 };

static void fragment(pm_tcgen05_shape shape, int l, int r, uint32_t *row, uint32_t *column) {
  switch (shape) {
    case PM_TCGEN05_16X256B:
      *row = (uint32_t)(l / 4 + 8 * (r / 2 % 2));
      *column = (uint32_t)(r % 2 + 2 * (l % 4) + 8 * (r / 4));
      break;
    case PM_TCGEN05_16X128B:
      *row = (uint32_t)(l / 4 + 8 * (r % 2));
      *column = (uint32_t)(l % 4 + 4 * (r / 2));
      break;
    default: *row = (uint32_t)l, *column = (uint32_t)r;
  }
}

/* What the words of the lanes are: their place in tensor memory, in columns of words. */
typedef struct words {
  int64_t n;
  pm_tcgen05_cell *at; /* [128][n], slot unused */
  uint32_t first, end; /* columns */
} words;

/* False: the elements of a word do not lie side by side, in its order, for every lane. */
static bool find_words(pm_arena *a, pm_tcgen05_cells cells, const void *ctx, int64_t registers,
                       int per_word, bool halves, words *out) {
  out->n = registers / per_word;
  out->at = PM_NEW(a, pm_tcgen05_cell, 128 * out->n);
  out->first = ~0u;
  for (int tid = 0; tid < 128; tid++) {
    for (int64_t r = 0; r < registers; r++) {
      pm_tcgen05_cell c, *word = &out->at[tid * out->n + r / per_word];
      if (!cells(ctx, tid, r, &c) || c.lane / 32 != (uint32_t)tid / 32) return false;
      const uint32_t slot = halves ? c.column % 2 : c.slot;
      if (halves) c.column /= 2;
      if (slot != (uint32_t)(r % per_word)) return false;
      if (r % per_word && (c.lane != word->lane || c.column != word->column)) return false;
      *word = c;
      if (c.column < out->first) out->first = c.column;
      if (c.column >= out->end) out->end = c.column + 1;
    }
  }
  return true;
}

/* The word that register r of the part is in every lane; -1: there is none. */
static int64_t word_of(const words *w, pm_tcgen05_shape shape, uint32_t lane, uint32_t column,
                       int r) {
  int64_t found = -1;
  for (int tid = 0; tid < 128; tid++) {
    uint32_t row, at;
    fragment(shape, tid % 32, r, &row, &at);
    row += lane + (uint32_t)tid / 32 * 32, at += column;
    int64_t k = found < 0 ? 0 : found;
    const pm_tcgen05_cell *own = &w->at[tid * w->n];
    while (found < 0 && k < w->n && (own[k].lane != row || own[k].column != at)) k++;
    if (k == w->n || own[k].lane != row || own[k].column != at) return -1;
    found = k;
  }
  return found;
}

static bool plan_shape(pm_arena *a, const words *w, pm_tcgen05_shape shape, pm_tcgen05_move *out) {
  const struct shape *s = &shapes[shape];
  const uint32_t columns = w->end - w->first, unit = (uint32_t)s->columns;
  if (columns % unit) return false;
  const uint32_t most = (uint32_t)(MOST_REGISTERS / s->registers), unit_count = columns / unit;
  out->shape = shape;
  out->n = 0;
  out->part = PM_NEW(a, struct pm_tcgen05_part, 2 * (unit_count / most + 8));
  for (uint32_t lane = 0; lane < 32; lane += (uint32_t)s->rows) {
    for (uint32_t from = 0; from < unit_count;) {
      uint32_t times = most;
      while (times > unit_count - from) times /= 2;
      const uint32_t column = w->first + from * unit, regs = times * (uint32_t)s->registers;
      uint16_t *word = PM_NEW(a, uint16_t, regs);
      for (uint32_t r = 0; r < regs; r++) {
        const int64_t k = word_of(w, shape, lane, column, (int)r);
        if (k < 0) return false;
        word[r] = (uint16_t)k;
      }
      const uint32_t at = column * (out->halves ? 2 : 1);
      out->part[out->n++] = (struct pm_tcgen05_part){lane << 16 | at, times, regs, word};
      from += times;
    }
  }
  return true;
}

bool pm_tcgen05_plan_move(pm_arena *a, pm_tcgen05_cells cells, const void *ctx, int64_t registers,
                          int bits, int packing, pm_tcgen05_move *out) {
  words w = {0};
  out->halves = bits == 16 && packing == 1;
  out->per_word = out->halves ? 2 : packing;
  if (!out->halves && bits * packing != 32) return false;
  if (registers % out->per_word) return false;
  if (!find_words(a, cells, ctx, registers, out->per_word, out->halves, &w)) return false;
  for (int shape = 0; shape < PM_TCGEN05_SHAPES; shape++) {
    if (plan_shape(a, &w, (pm_tcgen05_shape)shape, out)) return true;
  }
  return false;
}

const char *pm_tcgen05_shape_text(pm_arena *a, const pm_tcgen05_move *m, uint32_t part) {
  return pm_printf(a, "%s.x%u", shapes[m->shape].text, m->part[part].times);
}
