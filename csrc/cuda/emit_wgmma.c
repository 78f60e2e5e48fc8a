/* Accumulators and wgmma.
 *
 * An accumulator (M, N) is one C++ array of M / 64 * N / 2 f32 or i32 registers (for f16: half as
 * many words of two) in the order of the WGMMA layout, which is that of the instruction. It is
 * updated in place. If its first use is a wgmma of all of it in the same block, it is never filled
 * with zeros: the first step of that product overwrites it. The same holds if zeros are stored into
 * it before a product of all of it. That product overwrites it, but takes its registers as operands
 * that are read ("held"): as outputs alone they would be assigned to different registers each time,
 * which caused spills where consecutive products leave few registers free.
 *
 * A product is a statement that starts with the fence, with registers as operands. After ordinary
 * code has written accumulators, and before it reads the result of a wait, an empty asm statement
 * takes them as operands ("pin"), so that the compiler moves no access across it, into products in
 * flight.
 *
 * Operands of asm statements are expensive: they took a third of the compile time of a large
 * product. So an accumulator that starts as zeros is not an array but a set of PTX registers, which
 * the entry declares and statements name. Code that reads or writes it copies them to or from an
 * array. Accumulators that live for one product, or that code writes right before one, remain
 * arrays: ptxas spills less around them.
 *
 * The tensor cores read A from its registers until the wait, which a C++ compiler does not know.
 * What a loop carries is one register for all iterations, so the A of the next iteration would be
 * computed into the registers of this one's, if that comes before the wait. Then an empty asm
 * statement after the wait reads this one ("keep").
 *
 * Operands in SMEM are [chunks][rows][S]: chunks of S elements (one swizzle row) of the contiguous
 * dimension. Descriptors are split into a low word, with address and leading dimension stride, and
 * a constant high word. If K is contiguous, a step is 32 bytes within a chunk, or the next chunk.
 * If M or N is contiguous (16-bit types only), a step is 16 rows, and the leading dimension stride
 * is that of chunks. */
#include "gen.h"

typedef struct part {
  pm_view view;
  int64_t rows, columns;       /* of the slice of the accumulator */
  int64_t base_columns, first; /* first register */
  bool half;
} part;

static pm_code part_of(pm_gen *e, pm_opid op, pm_val ref, part *p) {
  if (pm_view_of(e->g, ref, true, &p->view, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  const pm_view *v = &p->view;
  if (v->rank != 2 || v->reshaped || v->n_start_terms || v->dim[0].base_dim != 0 ||
      v->start[0] % 64 || v->start[1] % 8 || v->dim[0].size % 64 || v->dim[1].size % 8) {
    return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                       "a slice of an accumulator needs static bounds, rows at multiples of 64 and "
                       "columns at multiples of 8; read it whole and slice the array");
  }
  p->rows = v->dim[0].size;
  p->columns = v->dim[1].size;
  p->base_columns = v->base_shape[1];
  p->first = v->start[0] / 64 * (p->base_columns / 2) + v->start[1] / 2;
  p->half = v->dtype == PM_F16;
  return PM_OK;
}

/* Register of the accumulator that is register r of the slice. */
static const char *register_text(pm_gen *e, const part *p) {
  pm_sum s = {.total = p->rows * p->columns / 128};
  const int64_t tile = p->columns / 2;
  s.at[s.n++] = (pm_piece){1, tile, 1};
  if (p->rows > 64) s.at[s.n++] = (pm_piece){tile, p->rows / 64, p->base_columns / 2};
  const char *r = pm_sum_text(e, &s, "r", 1);
  return p->first ? pm_str(e, "%s + %lld", r, (long long)p->first) : r;
}

/* The registers of the slice; products may be in flight to others. */
static void pin(pm_gen *e, const part *p) {
  const char *acc = e->slot[p->view.base].text;
  const int64_t per_word = p->half ? 4 : 2, words = p->columns / per_word;
  const char *fn = pm_ptx_pin(e, (pm_dtype)p->view.dtype, words);
  for (int64_t m = 0; m < p->rows / 64; m++) {
    const int64_t at = m * p->base_columns / per_word + p->first * 2 / per_word;
    pm_line(e, "%s(&%s[%lld]);", fn, acc, (long long)at);
  }
}

/* acc[...] = x, for every register of the slice */
static void write_registers(pm_gen *e, const part *p, const char *x, const char *next) {
  const char *acc = e->slot[p->view.base].text, *to = register_text(e, p);
  const int64_t n = p->rows * p->columns / 128;
  pm_line(e, "#pragma unroll");
  if (p->half) {
    pm_begin(e, "for (int r = 0; r < %lld; r += 2) {", (long long)n);
    pm_line(e, "const f16 x[2] = {%s, %s};", x, next);
    pm_line(e, "pack<f16, 2>(&%s[(%s) / 2], x);", acc, to);
    pm_end(e);
  } else {
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[%s] = %s;", (long long)n, acc, to, x);
  }
}

pm_code pm_check_layout(pm_gen *e, pm_opid op, pm_val array, uint32_t k) {
  pm_graph *g = (pm_graph *)e->g; /* interns layouts, changes nothing that there is */
  const pm_type t = *pm_typeof(g, array);
  const pm_mma *m = pm_mma_of(g, op);
  const pm_layid want = m ? pm_mma_layout(g, m, k, &t) : pm_layout_wgmma(g, &t);
  if (e->slot[array].form == PM_FORM_SCALAR || pm_value_of(g, array)->layout == want) return PM_OK;
  return pm_gen_fail(e, op, PM_E_INTERNAL, "its array is not in the layout %s",
                     pm_layout_text(e->arena, pm_layout_of(g, want)));
}

/* v, or a slice of it */
static bool mentions(const pm_graph *g, pm_opid op, pm_val v) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (pm_view_base(g, pm_in(g, op, k)) == v) return true;
  }
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    for (uint32_t k = 0; k < b->ops.n; k++) {
      if (mentions(g, b->ops.at[k], v)) return true;
    }
  }
  return false;
}

/* Is the first use of the accumulator that follows `after` a product into all of it? */
static bool is_overwritten(const pm_graph *g, pm_opid after, pm_val acc) {
  const pm_block *b = &g->blocks.at[pm_get(g, after)->parent];
  uint32_t k = 0;
  while (b->ops.at[k] != after) k++;
  for (k++; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (mentions(g, op, acc)) {
      return pm_get(g, op)->code == PM_OP_WGMMA && pm_in(g, op, 0) == acc;
    }
  }
  return false;
}

static bool is_store(const pm_graph *g, pm_opid op) {
  return pm_get(g, op)->code == PM_OP_ACC_STORE;
}

static bool is_zeros(const pm_graph *g, pm_val array) {
  pm_opid def = pm_value_of(g, array)->def;
  while (def && pm_get(g, def)->code == PM_OP_LAYOUT_CAST) {
    array = pm_in(g, def, 0);
    def = pm_value_of(g, array)->def;
  }
  pm_scalar x;
  return pm_constant(g, array, &x) && !x.i;
}

/* Is it written right before a product? ptxas is worse at that where it is registers of PTX. */
static bool is_written_for_product(const pm_graph *g, pm_val acc) {
  for (pm_opid op = 1; op < g->ops.n; op++) {
    if (is_store(g, op) && pm_view_base(g, pm_in(g, op, 0)) == acc && is_overwritten(g, op, acc))
      return true;
  }
  return false;
}

/* ---- waits -------------------------------------------------------------------------------- */

/* A in registers: words of one, two or four values in the order of the layout; `read` only, they
 * are those of a value that has the form. How many */
static int64_t put_words_of_a(pm_gen *e, pm_val a, bool read) {
  const pm_type *t = pm_typeof(e->g, a);
  const int64_t of_word = 4 / pm_dtypes[t->dtype].bytes, words = pm_type_size(t) / 128 / of_word;
  if (read && e->slot[a].form == PM_FORM_WORDS) {
    pm_line(e, "const u32* const a = %s;", e->slot[a].text);
    return words;
  }
  pm_line(e, "u32 a[%lld];", (long long)words);
  if (e->slot[a].form != PM_FORM_SCALAR) {
    pm_pack(e, "a", a, a);
    return words;
  }
  const char *type = pm_cpp_type(t->dtype), *x = pm_at(e, a, "0");
  if (of_word == 4) x = pm_str(e, "%s, %s", x, x);
  if (of_word > 1) x = pm_str(e, "%s, %s", x, x);
  pm_line(e, "const %s x[%lld] = {%s};", type, (long long)of_word, x);
  pm_line(e, "#pragma unroll");
  pm_line(e, "for (int r = 0; r < %lld; r++) pack<%s, %lld>(&a[r], x);", (long long)words, type,
          (long long)of_word);
  return words;
}

/* Position in a block of the op, or of the one around it. -1: it is elsewhere */
static int64_t position_in(const pm_graph *g, pm_blk block, pm_opid op) {
  while (op && pm_get(g, op)->parent != block) op = g->blocks.at[pm_get(g, op)->parent].parent;
  return op ? (int64_t)pm_position(g, op) : -1;
}

/* The array that v is a slice of, or v. */
static pm_val whole_of(const pm_graph *g, pm_val v) {
  pm_opid def = pm_value_of(g, v)->def;
  while (def && pm_rule_of(g, def) == PM_LAY_SLICE) {
    v = pm_in(g, def, 0);
    def = pm_value_of(g, v)->def;
  }
  return v;
}

/* Does a loop carry v, and is what follows it in the next iteration computed before the wait? */
static bool is_replaced_before(const pm_graph *g, pm_val v, pm_opid wait) {
  const pm_value *value = pm_value_of(g, v);
  const pm_blk body = value->block;
  const pm_opid loop = value->def ? 0 : g->blocks.at[body].parent;
  if (!loop || !pm_is_loop(pm_get(g, loop)->code)) return false;
  if (body != pm_region(g, loop, pm_get(g, loop)->n_regions - 1u)) return false; /* a condition */
  const uint32_t k = value->index - pm_has_index(pm_get(g, loop));
  const pm_val next = pm_in(g, pm_terminator(g, body), k);
  const int64_t made = position_in(g, body, pm_value_of(g, next)->def);
  return next != v && made >= 0 && made <= position_in(g, body, wait);
}

typedef struct awaited {
  pm_opid wait;
  int64_t left; /* products from here back that are not awaited */
  int64_t most; /* and those that no wait before has awaited */
  pm_val kept;  /* what was kept last: slices of one array follow each other */
} awaited;

/* What a scope contains; 0: the op is none */
static pm_blk scope_of(const pm_graph *g, pm_opid op) {
  return pm_get(g, op)->code == PM_OP_SCOPE ? pm_region(g, op, 0) : 0;
}

/* Keeps the A of the awaited products among the first `until` ops of a block, from the last on. */
static void keep_operands(pm_gen *e, awaited *w, pm_blk block, uint32_t until) {
  const pm_graph *g = e->g;
  for (uint32_t k = until; k-- > 0 && w->most > 0;) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    const pm_blk inside = scope_of(g, op);
    int64_t n;
    if (inside) {
      keep_operands(e, w, inside, g->blocks.at[inside].ops.n);
    } else if (pm_is_branch(pm_get(g, op)->code)) { /* which may run */
      for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) {
        awaited copy = *w;
        keep_operands(e, &copy, pm_region(g, op, r), g->blocks.at[pm_region(g, op, r)].ops.n);
      }
    } else if (pm_awaits_products(g, op, &n) && n >= 0) {
      w->most = pm_min(w->most, n);
    } else if (pm_get(g, op)->code == PM_OP_WGMMA) {
      const pm_val a = whole_of(g, pm_in(g, op, 1));
      w->most--;
      if (w->left-- > 0 || a == w->kept) continue;
      if (pm_typeof(g, a)->kind != PM_ARRAY || !is_replaced_before(g, a, w->wait)) continue;
      w->kept = a;
      pm_begin(e, "{");
      pm_line(e, "keep_operand<%lld>(a);", (long long)put_words_of_a(e, a, true));
      pm_end(e);
    }
  }
}

static void wait_for_products(pm_gen *e, pm_opid op, int64_t n) {
  awaited w = {.wait = op, .left = n, .most = INT64_MAX};
  pm_line(e, "wgmma_wait<%lld>();", (long long)n);
  keep_operands(e, &w, pm_get(e->g, op)->parent, pm_position(e->g, op));
}

/* Another catalogue has no PTX, and registers of two halves are read with arithmetic. */
static bool is_in_ptx(const pm_gen *e, pm_opid alloc, const part *p) {
  const pm_val acc = pm_get(e->g, alloc)->out;
  return !e->options->entry_only && !p->half && !pm_get(e->g, alloc)->n_in &&
         !is_overwritten(e->g, alloc, acc) && !is_written_for_product(e->g, acc);
}

pm_code pm_cuda_ALLOC_ACC(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_type *t = pm_typeof(e->g, o->out);
  const char *name = pm_name_of(e, o->out);
  part p;
  PM_TRY(part_of(e, op, o->out, &p));
  const int64_t n = p.rows * p.columns / 128;
  pm_note(e, op, pm_str(e, "accumulator %s", pm_type_text(e->arena, t)));
  pm_bind(e, o->out, name, PM_FORM_SCALAR);
  if (is_in_ptx(e, op, &p)) {
    e->in_ptx[o->out] = true;
    pm_putf(&e->registers_of_ptx, "  %s();\n", pm_ptx_declare(e, name, t->dtype, n));
    pm_line(e, "%s();", pm_ptx_zero(e, name, t->dtype, n));
    return PM_OK;
  }
  pm_line(e, "%s %s[%lld];", p.half ? "u32" : pm_cpp_type(t->dtype), name,
          (long long)(p.half ? n / 2 : n));
  if (o->n_in) {
    const pm_val init = pm_in(e->g, op, 0);
    pm_at(e, init, "0");
    PM_TRY(pm_check_layout(e, op, init, 0));
    write_registers(e, &p, pm_at(e, init, "r"), pm_at(e, init, "r + 1"));
  } else if (is_overwritten(e->g, op, o->out)) {
    e->contents[o->out] = PM_FRESH;
    return PM_OK;
  } else {
    const char *zero = pm_literal(e, t->dtype, (pm_scalar){0});
    write_registers(e, &p, zero, zero);
  }
  pin(e, &p);
  return PM_OK;
}

/* What the array that op makes of an accumulator is converted to at once; else the array itself. */
static pm_val converted(const pm_gen *e, pm_opid op) {
  const pm_val array = pm_get(e->g, op)->out;
  const pm_op *user = pm_get(e->g, e->user[array]);
  const bool once = e->uses[array] == 1 && user->parent == pm_get(e->g, op)->parent;
  const bool words = once && user->n_out == 1 && !user->n_regions && e->only_words[user->out];
  return words && pm_elements_of_word(e, user->out) == 2 ? user->out : array;
}

/* The slice of an accumulator in PTX into an array of type `to`, 16-bit elements as words. */
static void read_ptx(pm_gen *e, const part *p, pm_dtype to, const char *array) {
  const int64_t of_word = pm_dtypes[to].bytes < 4 ? 2 : 1;
  const char *acc = e->slot[p->view.base].text;
  const bool whole = p->columns == p->base_columns;
  const int64_t parts = whole ? 1 : p->rows / 64, n = p->rows * p->columns / 128 / parts;
  for (int64_t m = 0; m < parts; m++) {
    const char *fn =
        pm_ptx_read(e, acc, (pm_dtype)p->view.dtype, to, p->first + m * p->base_columns / 2, n);
    pm_line(e, m ? "%s(&%s[%lld]);" : "%s(%s);", fn, array, (long long)(m * n / of_word));
  }
}

/* Are at most *left groups of products pending, as the first `until` ops of a block show? UNKNOWN:
 * it depends on what comes before the block. */
typedef enum pending { UNKNOWN, AWAITED, PENDING } pending;

static bool has_products(const pm_graph *g, pm_opid op);

static bool block_has_products(const pm_graph *g, pm_blk block) {
  const pm_block *b = &g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++)
    if (has_products(g, b->ops.at[k])) return true;
  return false;
}

static bool has_products(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t r = 0; r < o->n_regions; r++)
    if (block_has_products(g, pm_region(g, op, r))) return true;
  return pm_ops[o->code].completion == PM_COMPLETES_COMMIT || pm_is_source(g, op);
}

static pending look_back(const pm_graph *g, pm_blk block, uint32_t until, int64_t *left);

/* The same before an op with regions. A loop must end every iteration with a wait. */
static pending look_into(const pm_graph *g, pm_opid op, int64_t *left) {
  const pm_op *o = pm_get(g, op);
  const bool loop = pm_is_loop(o->code);
  int64_t least = *left;
  if (scope_of(g, op)) {
    return look_back(g, scope_of(g, op), g->blocks.at[scope_of(g, op)].ops.n, left);
  }
  if (!loop && !pm_is_branch(o->code)) return has_products(g, op) ? PENDING : UNKNOWN;
  for (uint32_t r = 0; r < o->n_regions; r++) {
    const pm_blk region = pm_region(g, op, r);
    int64_t rest = *left;
    if (!block_has_products(g, region)) continue;
    const pending found = look_back(g, region, g->blocks.at[region].ops.n, &rest);
    if (found == PENDING || (loop && found == UNKNOWN)) return PENDING;
    if (found == UNKNOWN) least = pm_min(least, rest);
  }
  *left = least;
  return UNKNOWN;
}

static pending look_back(const pm_graph *g, pm_blk block, uint32_t until, int64_t *left) {
  for (uint32_t k = until; k-- > 0;) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    int64_t n;
    if (pm_awaits_products(g, op, &n) && n >= 0 && n <= *left) return AWAITED;
    if (pm_get(g, op)->n_regions) {
      const pending found = look_into(g, op, left);
      if (found != UNKNOWN) return found;
    } else if (has_products(g, op) && (pm_is_source(g, op) || (*left)-- == 0)) {
      return PENDING;
    }
  }
  return UNKNOWN;
}

/* Has a wait before this op awaited all but n groups of products, if there are any? */
static bool is_awaited(const pm_graph *g, pm_opid op, int64_t n) {
  for (;;) {
    const pm_blk block = pm_get(g, op)->parent;
    const pending found = look_back(g, block, pm_position(g, op), &n);
    op = g->blocks.at[block].parent;
    if (found != UNKNOWN || !op) return found != PENDING;
    if (pm_is_loop(pm_get(g, op)->code)) return false;
  }
}

pm_code pm_cuda_ACC_LOAD(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t n = *pm_attr(e->g, op, PM_ATTR_N);
  part p;
  PM_TRY(part_of(e, op, pm_in(e->g, op, 0), &p));
  pm_note(e, op, "accumulator to array");
  if (n >= 0 && !is_awaited(e->g, op, n)) wait_for_products(e, op, n);
  const bool in_ptx = e->in_ptx[p.view.base];
  if (!in_ptx) pin(e, &p);
  const pm_val narrow = in_ptx ? converted(e, op) : out;
  if (narrow != out) {
    PM_TRY(pm_check_layout(e, op, out, 0));
    const char *words = pm_declare_words(e, narrow);
    pm_bind(e, out, words, PM_FORM_ARRAY); /* which nothing reads */
    read_ptx(e, &p, pm_typeof(e->g, narrow)->dtype, words);
    return PM_OK;
  }
  const char *name = pm_declare(e, out, out), *acc = e->slot[p.view.base].text;
  if (!pm_is_array(e, out)) return pm_check_layout(e, op, out, 0);
  PM_TRY(pm_check_layout(e, op, out, 0));
  if (in_ptx) {
    read_ptx(e, &p, (pm_dtype)p.view.dtype, name);
    return PM_OK;
  }
  const int64_t regs = pm_regs_of(e, out);
  const char *from = register_text(e, &p);
  pm_line(e, "#pragma unroll");
  if (p.half) {
    pm_line(e, "for (int r = 0; r < %lld; r += 2) unpack_pair(&%s[r], %s[(%s) / 2]);",
            (long long)regs, name, acc, from);
  } else {
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s[%s];", (long long)regs, name, acc, from);
  }
  return PM_OK;
}

static pm_code write_ptx(pm_gen *e, pm_opid op, pm_val in, const part *p) {
  const pm_dtype t = (pm_dtype)p->view.dtype;
  const char *acc = e->slot[p->view.base].text, *x = pm_at(e, in, "0");
  const int64_t n = p->rows * p->columns / 128;
  if (is_zeros(e->g, in)) {
    pm_line(e, "%s();", pm_ptx_zero(e, acc, t, n));
    return PM_OK;
  }
  PM_TRY(pm_check_layout(e, op, in, 0));
  if (pm_is_array(e, in)) {
    pm_line(e, "%s(%s);", pm_ptx_write(e, acc, t, n), e->slot[in].text);
    return PM_OK;
  }
  const char *same = pm_unique(e, "same");
  pm_line(e, "%s %s[%lld];", pm_cpp_type(t), same, (long long)n);
  pm_line(e, "#pragma unroll");
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, same, x);
  pm_line(e, "%s(%s);", pm_ptx_write(e, acc, t, n), same);
  return PM_OK;
}

pm_code pm_cuda_ACC_STORE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 1);
  part p; /* all of it: stores take nothing else */
  PM_TRY(part_of(e, op, pm_in(e->g, op, 0), &p));
  if (is_zeros(e->g, in) && is_overwritten(e->g, op, p.view.base)) {
    e->contents[p.view.base] = PM_HELD;
    return PM_OK;
  }
  pm_note(e, op, "array to accumulator");
  if (e->in_ptx[p.view.base]) return write_ptx(e, op, in, &p);
  pm_at(e, in, "0");
  PM_TRY(pm_check_layout(e, op, in, 0));
  write_registers(e, &p, pm_at(e, in, "r"), pm_at(e, in, "r + 1"));
  pin(e, &p);
  return PM_OK;
}

pm_code pm_cuda_WGMMA_WAIT(pm_gen *e, pm_opid op) {
  pm_note(e, op, "wgmma_wait");
  wait_for_products(e, op, *pm_attr(e->g, op, PM_ATTR_N));
  return PM_OK;
}

/* ---- operands ---------------------------------------------------------------------------- */

typedef struct operand {
  pm_view view;
  bool k_contiguous;
  int64_t leading, stride; /* bytes */
  pm_sum k, m;             /* steps along K, of 64 along M, in units of 16 bytes */
} operand;

static pm_code operand_of(pm_gen *e, pm_opid op, pm_val ref, int k_dim, operand *o) {
  if (pm_view_of(e->g, ref, true, &o->view, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  const pm_view *v = &o->view;
  const pm_view_dim *k = &v->dim[k_dim], *mn = &v->dim[1 - k_dim];
  const int64_t bytes = pm_dtypes[v->dtype].bytes, s = v->swizzle / bytes;
  o->k_contiguous = k->inner == 1;
  const pm_view_dim *fast = o->k_contiguous ? k : mn, *slow = o->k_contiguous ? mn : k;
  if (!s || fast->inner != 1 || slow->inner != s || slow->tile ||
      (fast->tile ? fast->tile != s : fast->size > s)) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "an operand in SMEM is not tiled by (8, %lld) with a swizzle of %d bytes",
                       (long long)s, v->swizzle);
  }
  const int64_t chunk = fast->size > s ? fast->outer * bytes / 16 : 0;
  const int64_t step = pm_mma_of(e->g, op)->k;
  const int64_t row = v->swizzle / 16, k_steps = k->size / step, m_steps = mn->size / 64;
  o->stride = 8 * v->swizzle;
  o->leading = o->k_contiguous || !chunk ? 16 : chunk * 16;
  o->k = (pm_sum){.total = k_steps};
  o->m = (pm_sum){.total = m_steps};
  if (o->k_contiguous) {
    const int64_t inside = pm_min(s / step, k_steps);
    o->k.at[o->k.n++] = (pm_piece){1, inside, 2};
    if (k_steps > inside) o->k.at[o->k.n++] = (pm_piece){inside, k_steps / inside, chunk};
    o->m.at[o->m.n++] = (pm_piece){1, m_steps, 64 * row};
  } else {
    o->k.at[o->k.n++] = (pm_piece){1, k_steps, 16 * row};
    o->m.at[o->m.n++] = (pm_piece){1, m_steps, 64 / s * chunk};
  }
  return PM_OK;
}

/* bits 32 to 63 of a descriptor: distance of 8-row groups, and which swizzle */
static const char *high_word(pm_gen *e, const operand *o) {
  const uint32_t mode = o->view.swizzle == 128 ? 1 : o->view.swizzle == 64 ? 2 : 3;
  const long long stride = o->stride;
  const int swizzle = o->view.swizzle;
  return pm_ptx_constant(
      e, pm_str(e, "stride_%lld_swizzle_%d", stride, swizzle), (uint32_t)(stride >> 4) | mode << 30,
      pm_str(e, "high word of a matrix descriptor: groups of 8 rows are %lld bytes apart", stride));
}

/* Steps along K that one statement takes. Where a step begins repeats itself after 4. */
enum { MOST_STEPS = 8 };

/* A in registers; all words in front of the first statement, if there are several. Held, where a
 * loop does not change them. */
static void pack_a(pm_gen *e, pm_opid op, pm_val a, bool several) {
  const bool repeats = pm_repeats(e->g, a, op);
  const int64_t words = put_words_of_a(e, a, !repeats && !several);
  if (repeats) pm_line(e, "hold_operand<u32, %lld>(a);", (long long)words);
  if (several) pm_line(e, "%s(a);", pm_ptx_pin(e, PM_F16, words));
}

/* address, index or offset, as text */
static const char *moved(pm_gen *e, const char *name, const char *m, int64_t m_step, int64_t by) {
  if (*m != '0' && by)
    return pm_str(e, "%s + %s * %lld + %lld", name, m, (long long)m_step, (long long)by);
  if (*m != '0') return pm_str(e, "%s + %s * %lld", name, m, (long long)m_step);
  return by ? pm_str(e, "%s + %lld", name, (long long)by) : name;
}

/* The product of row block m, which is a text. a NULL: in registers */
static void issue_row(pm_gen *e, const char *d, const char *m, const operand *a, const operand *b,
                      int64_t k_steps, pm_wgmma kind) {
  for (int64_t k = 0; k < k_steps; k += MOST_STEPS) {
    kind.steps = pm_min(k_steps - k, MOST_STEPS);
    const char *fn = pm_ptx_wgmma(e, &kind);
    const char *x = moved(e, "a", m, k_steps * 4, k * 4);
    if (a) {
      x = pm_str(e, "%s, %s", moved(e, "a", m, pm_sum_at(&a->m, 1), pm_sum_at(&a->k, k)),
                 high_word(e, a));
    }
    pm_line(e, "%s(%s, %s, %s, %s);", fn, d, x, moved(e, "b", "0", 0, pm_sum_at(&b->k, k)),
            high_word(e, b));
    kind.contents = PM_ADDED_TO;
  }
}

static void issue_rows(pm_gen *e, const part *p, const operand *a, const operand *b,
                       int64_t k_steps, const pm_wgmma *kind) {
  const int64_t per_word = p->half ? 4 : 2, m_steps = p->rows / 64;
  const int64_t of_row = p->base_columns / per_word;
  const char *acc = e->slot[p->view.base].text;
  for (int64_t m = 0; kind->in_ptx && m < m_steps; m++) {
    const char *d = pm_ptx_list(e, acc, p->first + m * of_row, p->columns / 2);
    issue_row(e, d, pm_str(e, "%lld", (long long)m), a, b, k_steps, *kind);
  }
  if (kind->in_ptx) return;
  const char *m = pm_begin_unrolled(e, "m", m_steps, 1);
  issue_row(e, moved(e, acc, m, of_row, p->first * 2 / per_word), m, a, b, k_steps, *kind);
  pm_end_unrolled(e, m_steps, 1);
}

pm_code pm_cuda_WGMMA(pm_gen *e, pm_opid op) {
  const pm_val in_a = pm_in(e->g, op, 1), in_b = pm_in(e->g, op, 2);
  const bool registers = pm_typeof(e->g, in_a)->kind == PM_ARRAY;
  part p;
  operand a = {0}, b = {0};
  PM_TRY(part_of(e, op, pm_in(e->g, op, 0), &p));
  PM_TRY(operand_of(e, op, in_b, 0, &b));
  if (!registers) PM_TRY(operand_of(e, op, in_a, 1, &a));
  const pm_type *ta = pm_typeof(e->g, in_a);
  pm_wgmma kind = {.n = p.columns,
                   .mma = pm_mma_of(e->g, op),
                   .transpose_a = !registers && !a.k_contiguous,
                   .transpose_b = !b.k_contiguous,
                   .contents = e->contents[p.view.base],
                   .in_ptx = e->in_ptx[p.view.base],
                   .a = registers ? NULL : &a.k,
                   .b = &b.k};
  const int64_t k_steps = ta->dim[1] / kind.mma->k;
  pm_note(e, op, "wgmma");
  pm_begin(e, "{");
  if (registers) {
    pm_at(e, in_a, "0");
    PM_TRY(pm_check_layout(e, op, in_a, 1));
    pack_a(e, op, in_a, p.rows > 64 || k_steps > MOST_STEPS);
  } else {
    pm_line(e, "const u32 a = wgmma_address(%s, %lld);", pm_view_address(e, &a.view),
            (long long)a.leading);
  }
  pm_line(e, "const u32 b = wgmma_address(%s, %lld);", pm_view_address(e, &b.view),
          (long long)b.leading);
  issue_rows(e, &p, registers ? NULL : &a, &b, k_steps, &kind);
  e->contents[p.view.base] = PM_ADDED_TO;
  pm_line(e, "wgmma_commit();");
  pm_end(e);
  return PM_OK;
}
