/* Ops that move elements between registers and lanes: broadcast, reshape, slice, layout_cast and
 * reduce.
 *
 * All except reduce define where result index i comes from. If that element is in a register of the
 * same lane for every lane, the op renames registers (or does nothing). Otherwise the elements go
 * through this thread's scratch (exchange.c).
 *
 * A reduction combines the registers of a lane in ascending order (neighbours first, if they belong
 * to one result, which halves the chain), then the lanes by butterfly shuffles, then the warps
 * through scratch, in ascending order. The order depends only on the layout, and all copies end
 * with the same bits. Padding is skipped. ANY and ALL of a whole array need only a barrier. */
#include "gen.h"

typedef struct from {
  int rank; /* of the source */
  int64_t dim[PM_MAX_RANK], start[PM_MAX_RANK];
  bool one[PM_MAX_RANK]; /* the source has a single element there */
  const pm_type *in, *out;
} from;

/* The result as registers of the operand under the map text "r" -> register. */
void pm_bind_registers(pm_gen *e, pm_opid op, const char *map) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const int64_t n = pm_regs_of(e, out);
  if (n == pm_regs_of(e, in) && (n == 1 || !strcmp(map, "r"))) {
    pm_alias(e, out, in);
    return;
  }
  pm_note(e, op, pm_ops[pm_get(e->g, op)->code].text);
  const char *name = pm_declare(e, out, out);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, name, pm_at(e, in, map));
}

/* The same of words; the first register of word r of the result is number map of the operand. */
static void bind_words(pm_gen *e, pm_opid op, const char *map) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const long long each = pm_elements_of_word(e, out), n = pm_regs_of(e, out) / each;
  pm_note(e, op, "slice");
  const char *name = pm_declare_words(e, out);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s[(%s) / %lld];", n, name, e->slot[in].text,
          map, each);
}

/* The operand is one number for all elements: so is the result. */
bool pm_bind_scalar(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0);
  pm_at(e, in, "0");
  if (pm_is_array(e, in)) return false;
  pm_alias(e, pm_get(e->g, op)->out, in);
  return true;
}

/* ---- broadcast --------------------------------------------------------------------------- */

static void project_dims(const void *ctx, const int64_t *dst, int64_t *src) {
  const from *f = ctx;
  for (int k = 0; k < f->rank; k++) src[k] = f->one[k] ? 0 : dst[f->dim[k]] + f->start[k];
}

pm_code pm_cuda_BROADCAST(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_type *t = pm_typeof(e->g, in);
  uint32_t n;
  const int64_t *dims = pm_attr_list(e->g, op, PM_ATTR_DIMS, &n);
  from f = {.rank = t->rank};
  for (int k = 0; k < t->rank; k++) {
    f.dim[k] = dims[k];
    f.one[k] = t->dim[k] == 1 && pm_typeof(e->g, out)->dim[dims[k]] != 1;
  }
  const char *map =
      pm_reg_map(e, pm_layout_in(e, in), pm_layout_in(e, out), project_dims, &f, e->reg);
  if (!map) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "the layout of the operand does not fit the layout of the result");
  }
  e->expr = pm_at(e, in, pm_regs_of(e, in) == 1 ? "0" : map);
  return PM_OK;
}

/* ---- reshape and slice ------------------------------------------------------------------- */

static void project_linear(const void *ctx, const int64_t *dst, int64_t *src) {
  const from *f = ctx;
  int64_t linear = 0;
  for (int k = 0; k < f->out->rank; k++) linear = linear * f->out->dim[k] + dst[k];
  for (int k = f->in->rank - 1; k >= 0; k--) {
    src[k] = k ? linear % f->in->dim[k] : linear;
    linear /= f->in->dim[k];
  }
}

pm_code pm_cuda_RESHAPE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_layout *a = pm_layout_in(e, in), *b = pm_layout_in(e, out);
  const from f = {.in = pm_typeof(e->g, in), .out = pm_typeof(e->g, out)};
  if (pm_bind_scalar(e, op)) return PM_OK;
  const pm_view view = pm_scratch_view(f.out);
  if (!pm_moves_in_registers(e->g, op)) return pm_through_scratch(e, op, &view);
  const char *map = pm_wants_array(e, out) ? pm_reg_map(e, a, b, project_linear, &f, "r") : NULL;
  if (!map) return pm_no_registers(e, op);
  pm_bind_registers(e, op, map);
  return PM_OK;
}

pm_code pm_cuda_UNPACK(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const int64_t n = pm_regs_of(e, in);
  if (!pm_is_array(e, in) || pm_regs_of(e, out) != 2 * n) return pm_no_registers(e, op);
  pm_note(e, op, "unpack");
  const char *name = pm_declare(e, out, out);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) unpack_%s(&%s[2 * r], %s);", (long long)n,
          pm_dtypes[pm_typeof(e->g, out)->dtype].short_name, name, pm_at(e, in, "r"));
  return PM_OK;
}

pm_code pm_cuda_PACK(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const int64_t n = pm_regs_of(e, out);
  if (pm_wants_array(e, out) && pm_regs_of(e, in) != 2 * n) return pm_no_registers(e, op);
  const int bits = pm_dtypes[pm_typeof(e->g, in)->dtype].bits;
  pm_note(e, op, "pack");
  const char *name = pm_declare(e, out, out);
  if (!pm_is_array(e, out)) {
    pm_line(e, "%s = pack_%d(bits_of(%s), bits_of(%s));", name, bits, pm_at(e, in, "0"),
            pm_at(e, in, "0"));
    return PM_OK;
  }
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = pack_%d(bits_of(%s), bits_of(%s));",
          (long long)n, name, bits, pm_at(e, in, "2 * r"), pm_at(e, in, "2 * r + 1"));
  return PM_OK;
}

pm_code pm_cuda_SLICE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const bool words = e->only_words[out];
  if (!words && pm_bind_scalar(e, op)) return PM_OK;
  if (!pm_moves_in_registers(e->g, op)) {
    uint32_t n;
    const int64_t *starts = pm_attr_list(e->g, op, PM_ATTR_STARTS, &n);
    const int64_t *sizes = pm_attr_list(e->g, op, PM_ATTR_SIZES, &n);
    pm_view view = pm_scratch_view(pm_typeof(e->g, in));
    for (int k = 0; k < pm_typeof(e->g, in)->rank; k++) {
      view.offset += starts[k] * view.dim[k].inner;
      view.dim[k].size = sizes[k];
    }
    return pm_through_scratch(e, op, &view);
  }
  const int64_t *from = pm_slice_registers(e, op);
  if (!from) return pm_no_registers(e, op);
  const char *at = words ? pm_str(e, "%lld * r", (long long)pm_elements_of_word(e, out)) : "r";
  const char *map = pm_list_text(e, pm_layout_in(e, in), pm_layout_in(e, out), from, at);
  if (words) bind_words(e, op, map);
  else pm_bind_registers(e, op, map);
  return PM_OK;
}

/* ---- layout_cast ------------------------------------------------------------------------- */

static void project_same(const void *ctx, const int64_t *dst, int64_t *src) {
  memcpy(src, dst, sizeof *src * (size_t)((const from *)ctx)->rank);
}

pm_code pm_cuda_LAYOUT_CAST(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_type *t = pm_typeof(e->g, in);
  const from f = {.rank = t->rank};
  if (pm_bind_scalar(e, op)) return PM_OK;
  const char *map = NULL;
  int32_t only;
  if (pm_wants_array(e, out)) {
    map = pm_reg_map(e, pm_layout_in(e, in), pm_layout_in(e, out), project_same, &f, "r");
  } else if (pm_layout_register_map(e->arena, pm_layout_in(e, in), pm_layout_in(e, out), &only)) {
    const char *name = pm_declare(e, out, out);
    pm_line(e, "%s = %s;", name, pm_at(e, in, pm_str(e, "%d", only)));
    return PM_OK;
  }
  if (map) {
    pm_bind_registers(e, op, map);
    return PM_OK;
  }
  pm_relayout plan;
  const int64_t bytes = pm_dtypes[t->dtype].bytes;
  if (pm_wants_array(e, out) &&
      pm_relayout_plan(e->arena, pm_layout_in(e, in), pm_layout_in(e, out), &plan) &&
      pm_relayout_pays(&plan, bytes)) {
    return pm_by_shuffles(e, op, &plan);
  }
  pm_type wide = *t;
  wide.dim[t->rank - 1] = pm_exchange_row(t);
  pm_view view = pm_scratch_view(&wide);
  view.dim[t->rank - 1].size = t->dim[t->rank - 1];
  return pm_through(e, op, &view, &view);
}

/* ---- reduce ------------------------------------------------------------------------------ */

static bool is_reduced(const int64_t *dims, uint32_t n, const pm_layout *l, int dim) {
  if (dim < 0) return false;
  if (l->kind == PM_FLAT) return true;
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] == dim) return true;
  }
  return false;
}

const char *pm_combine(pm_gen *e, int reduce, pm_dtype t, const char *a, const char *b) {
  static const char *const on_bool[] = {"|", "|", "&", "&", "|", "&", "|"}; /* by kind */
  static const char *const on_int[] = {"wrap_add", "max_int", "min_int", "wrap_mul"};
  static const char *const on_float[] = {NULL, "max_f32", "min_f32"};
  if (t == PM_BOOL) return pm_str(e, "%s %s %s", a, on_bool[reduce], b);
  if (!pm_is_float(t)) return pm_str(e, "%s(%s, %s)", on_int[reduce], a, b);
  if (reduce == PM_REDUCE_ADD) return pm_str(e, "%s + %s", a, b);
  if (reduce == PM_REDUCE_MUL) return pm_str(e, "%s * %s", a, b);
  if (t == PM_F32) return pm_str(e, "%s(%s, %s)", on_float[reduce], a, b);
  return pm_str(e, "cvt_%s(%s(cvt_f32(%s), cvt_f32(%s)))", pm_cpp_type(t), on_float[reduce], a, b);
}

/* -0 is the identity of floating addition: -0 + x is x for every x. Products begin with 1. */
const char *pm_identity(pm_gen *e, int reduce, pm_dtype t) {
  pm_scalar v = {0};
  if (reduce == PM_REDUCE_MUL) {
    if (pm_is_float(t)) v.f = 1;
    else v.i = 1;
  } else if (pm_is_float(t)) {
    const double inf = (double)__builtin_inff();
    v.f = reduce == PM_REDUCE_ADD ? -0.0 : reduce == PM_REDUCE_MAX ? -inf : inf;
  } else if (reduce != PM_REDUCE_ADD) {
    const int bits = pm_dtypes[t].bits;
    const bool is_signed = pm_dtypes[t].class == PM_CLASS_INT;
    const int64_t top = t == PM_BOOL ? 1 : ((int64_t)1 << (is_signed ? bits - 1 : bits)) - 1;
    const bool from_top = reduce == PM_REDUCE_MIN || reduce == PM_REDUCE_ALL;
    v.i = from_top ? top : is_signed ? -top - 1 : 0;
  }
  return pm_literal(e, t, v);
}

/* x to the n, by squaring */
static pm_code reduce_power(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_dtype t = pm_typeof(e->g, in)->dtype;
  int64_t n = pm_type_size(pm_typeof(e->g, in)) / pm_type_size(pm_typeof(e->g, out));
  const char *power = pm_at(e, in, "0"), *product = pm_identity(e, PM_REDUCE_MUL, t);
  pm_note(e, op, "product of equal elements");
  for (; n; n /= 2) {
    const char *name = pm_name_of(e, out), *cpp = pm_cpp_type(t);
    if (n % 2) {
      pm_line(e, "const %s %s = %s;", cpp, name, pm_combine(e, PM_REDUCE_MUL, t, product, power));
      product = name;
      name = pm_name_of(e, out);
    }
    if (n == 1) break;
    pm_line(e, "const %s %s = %s;", cpp, name, pm_combine(e, PM_REDUCE_MUL, t, power, power));
    power = name;
  }
  pm_bind(e, out, product, PM_FORM_SCALAR);
  return PM_OK;
}

static pm_code reduce_splat(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_dtype t = pm_typeof(e->g, in)->dtype;
  const char *x = pm_at(e, in, "0");
  const int64_t reduce = *pm_attr(e->g, op, PM_ATTR_REDUCE);
  if (reduce == PM_REDUCE_MUL) return reduce_power(e, op);
  if (reduce != PM_REDUCE_ADD || t == PM_BOOL) {
    pm_alias(e, out, in);
    return PM_OK;
  }
  const int64_t n = pm_type_size(pm_typeof(e->g, in)) / pm_type_size(pm_typeof(e->g, out));
  const char *name = pm_name_of(e, out), *cpp = pm_cpp_type(t);
  pm_note(e, op, "sum of equal elements");
  if (t == PM_F32) {
    pm_line(e, "const f32 %s = %s * %lld.0f;", name, x, (long long)n);
  } else if (pm_is_float(t)) {
    pm_line(e, "const %s %s = cvt_%s(cvt_f32(%s) * %lld.0f);", cpp, name, cpp, x, (long long)n);
  } else {
    pm_line(e, "const %s %s = wrap_mul(%s, (%s)%lld);", cpp, name, x, cpp, (long long)n);
  }
  pm_bind(e, out, name, PM_FORM_SCALAR);
  return PM_OK;
}

typedef struct reduction {
  pm_gen *e;
  const pm_layout *l;
  const int64_t *dims;
  uint32_t n_dims;
  int reduce;
  pm_dtype dtype;
  int64_t n;        /* registers of the result */
  const char *name; /* of the array of results */
} reduction;

/* Every result starts as the identity. */
static void fill(reduction *r) {
  const char *k = pm_begin_unrolled(r->e, "k", r->n, 1);
  pm_line(r->e, "%s[%s] = %s;", r->name, k, pm_identity(r->e, r->reduce, r->dtype));
  pm_end_unrolled(r->e, r->n, 1);
}

/* Do the fastest registers pair up, each pair within one result? */
static bool has_pairs(const reduction *r) {
  if (!r->l->n_reg || pm_layout_is_padded(r->l)) return false;
  const pm_digit *d = &r->l->reg[r->l->n_reg - 1];
  return d->size % 2 == 0 && is_reduced(r->dims, r->n_dims, r->l, d->dim);
}

static void combine_registers(reduction *r, pm_val in, const char *map) {
  pm_gen *e = r->e;
  const int64_t n = pm_layout_regs(r->l), step = has_pairs(r) && n > 2 ? 2 : 1;
  fill(r);
  pm_begin(e, "{");
  const char *stem = pm_coord_lines(e, r->l), *reg = pm_begin_unrolled(e, "r", n, step);
  const char *valid = pm_valid(e, r->l, stem, reg), *x = pm_at(e, in, reg);
  const char *to = pm_str(e, "%s[%s]", r->name, n > 1 ? map : "0");
  if (step == 2) {
    pm_line(e, "const %s x = %s;", pm_cpp_type(r->dtype),
            pm_combine(e, r->reduce, r->dtype, x, pm_at(e, in, "r + 1")));
    x = "x";
  }
  pm_line(e, "%s%s%s%s = %s;", valid ? "if (" : "", valid ? valid : "", valid ? ") " : "", to,
          pm_combine(e, r->reduce, r->dtype, to, x));
  pm_end_unrolled(e, n, step);
  pm_end(e);
}

/* One bool for the whole array, combined by a barrier of the lanes, or a vote of the warp. */
static const char *vote(const reduction *r, int64_t results) {
  if (results > 1) return NULL;
  switch (r->reduce) {
    case PM_REDUCE_ANY: return "lanes_any(wg, ";
    case PM_REDUCE_ALL: return "lanes_all(wg, ";
    case PM_REDUCE_ANY_IN_WARP: return "warp_any(";
    default: return NULL;
  }
}

static void combine_lanes(reduction *r) {
  pm_gen *e = r->e;
  int64_t div = 1;
  bool open = false;
  const char *x = NULL;
  for (uint32_t k = r->l->n_lane; k-- > 0; div *= r->l->lane[k].size) {
    const pm_digit *d = &r->l->lane[k];
    if (!is_reduced(r->dims, r->n_dims, r->l, d->dim)) continue;
    if (!open) x = pm_str(e, "%s[%s]", r->name, pm_begin_unrolled(e, "k", r->n, 1));
    open = true;
    for (int64_t m = 1; m < d->size; m *= 2) {
      pm_line(e, "%s = %s;", x,
              pm_combine(e, r->reduce, r->dtype, x,
                         pm_str(e, "shuffle_xor(%s, %lld)", x, (long long)(m * div))));
    }
  }
  if (open) pm_end_unrolled(e, r->n, 1);
}

/* Warps that hold parts of one result: own warp with the reduced digits 0, plus sum over w. */
static int64_t reduced_warps(const reduction *r, pm_sum *own, pm_sum *others) {
  int64_t div = 1, n = 1;
  *own = *others = (pm_sum){.total = 4};
  for (uint32_t k = r->l->n_warp; k-- > 0; div *= r->l->warp[k].size) {
    const pm_digit *d = &r->l->warp[k];
    if (is_reduced(r->dims, r->n_dims, r->l, d->dim)) {
      others->at[others->n++] = (pm_piece){n, d->size, div};
      n *= d->size;
    } else if (d->dim >= 0) {
      own->at[own->n++] = (pm_piece){div, d->size, div};
    }
  }
  others->total = n;
  return n;
}

/* The lanes of a warp that hold different results, counted; their number as a sum over the lane. */
static int64_t distinct_lanes(const pm_layout *result, pm_sum *lane) {
  int64_t div = 1, n = 1;
  *lane = (pm_sum){.total = 32};
  for (uint32_t k = result->n_lane; k-- > 0; div *= result->lane[k].size) {
    if (result->lane[k].dim < 0) continue;
    lane->at[lane->n++] = (pm_piece){div, result->lane[k].size, n};
    n *= result->lane[k].size;
  }
  return n;
}

/* Scratch: 32-bit words [warp][lane part][register], as pm_reduce_scratch counts them, which also
 * says how many registers are combined at once. Lanes with equal results write the same word. */
static pm_code combine_warps(reduction *r, pm_opid op) {
  pm_gen *e = r->e;
  pm_sum own, others, lane;
  int64_t at_once;
  const int64_t n_warps = reduced_warps(r, &own, &others);
  const int64_t lanes = distinct_lanes(pm_layout_in(e, pm_get(e->g, op)->out), &lane);
  if (n_warps == 1) return PM_OK;
  pm_reduce_scratch(e->g, op, &at_once);
  const int64_t n = at_once, row = lanes * n * 4, steps = pm_cdiv(r->n, n);
  const char *cpp = pm_cpp_type(r->dtype);
  if (4 * row > pm_scratch_bytes(e)) {
    return pm_gen_fail(e, op, PM_E_INTERNAL, "a reduction needs %lld bytes of scratch, not %lld",
                       (long long)(4 * row), (long long)pm_scratch_bytes(e));
  }
  const char *b = pm_begin_unrolled(e, "b", r->n, steps == 1 ? r->n : n);
  pm_begin(e, "{");
  const char *part = pm_sum_text(e, &lane, "lane", n * 4);
  const char *mine = pm_sum_text(e, &own, "warp", row);
  pm_line(e, "const u32 p = %s%s%s;", pm_scratch(e), lane.n ? " + " : "", lane.n ? part : "");
  const char *k = pm_begin_unrolled(e, "k", n, 1);
  const char *at = steps == 1 ? k : n == 1 ? b : pm_str(e, "b + %s", k);
  const char *inside = r->n % n ? pm_str(e, "if (%s < %lld) ", at, (long long)r->n) : "";
  const char *word = strcmp(k, "0") ? pm_str(e, "p + %s * 4", k) : "p";
  pm_line(e, "%sst_shared<%s, 1>(%s + warp * %lld, &%s[%s]);", inside, cpp, word, (long long)row,
          r->name, at);
  pm_end_unrolled(e, n, 1);
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_begin_unrolled(e, "k", n, 1);
  const char *to = pm_str(e, "%s[%s]", r->name, at);
  if (*inside) pm_line(e, "if (%s >= %lld) break;", at, (long long)r->n);
  pm_line(e, "%s = %s;", to, pm_identity(e, r->reduce, r->dtype));
  pm_begin_unrolled(e, "w", n_warps, 1);
  pm_line(e, "%s x;", cpp);
  pm_line(e, "ld_shared<%s, 1>(&x, %s + %s%s%s);", cpp, word, pm_sum_text(e, &others, "w", row),
          own.n ? " + " : "", own.n ? mine : "");
  pm_line(e, "%s = %s;", to, pm_combine(e, r->reduce, r->dtype, to, "x"));
  pm_end(e);
  pm_end_unrolled(e, n, 1);
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_end(e);
  pm_end_unrolled(e, r->n, steps == 1 ? r->n : n);
  return PM_OK;
}

static void project_kept(const void *ctx, const int64_t *dst, int64_t *src) {
  const from *f = ctx;
  for (int k = 0; k < f->rank; k++) src[k] = dst[f->dim[k]];
}

pm_code pm_cuda_REDUCE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  reduction r = {
      .e = e, .l = pm_layout_in(e, in), .reduce = (int)*pm_attr(e->g, op, PM_ATTR_REDUCE)};
  r.dims = pm_attr_list(e->g, op, PM_ATTR_DIMS, &r.n_dims);
  r.dtype = pm_typeof(e->g, in)->dtype;
  pm_at(e, in, "0");
  if (r.l->kind == PM_SPLAT) return reduce_splat(e, op);
  if (pm_layout_in(e, out)->kind == PM_SPLAT) { /* the dims that stay have size 1 */
    static const int64_t all[PM_MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    r.dims = all;
    r.n_dims = r.l->rank;
  }
  from f = {0};
  for (int d = 0; d < r.l->rank; d++) {
    bool gone = false;
    for (uint32_t k = 0; k < r.n_dims; k++) gone = gone || r.dims[k] == d;
    if (!gone) f.dim[f.rank++] = d;
  }
  const char *map = "0";
  if (pm_wants_array(e, out)) {
    map = pm_reg_map(e, pm_layout_in(e, out), r.l, project_kept, &f, "r");
  } else if (f.rank && pm_type_size(pm_typeof(e->g, out)) > 1) {
    map = NULL;
  }
  if (!map) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "the layout of the result is not that of the operand "
                       "without the dimensions");
  }
  r.n = pm_regs_of(e, out);
  pm_note(e, op, pm_str(e, "reduce %s", pm_enum_text(PM_ENUM_REDUCE, r.reduce)));
  if (pm_wants_array(e, out)) {
    r.name = pm_declare(e, out, out);
  } else {
    r.name = pm_name_of(e, out);
    pm_line(e, "%s %s[1];", pm_cpp_type(r.dtype), r.name);
    pm_bind(e, out, pm_str(e, "%s[0]", r.name), PM_FORM_SCALAR);
  }
  combine_registers(&r, in, map);
  const char *all = vote(&r, pm_type_size(pm_typeof(e->g, out)));
  if (all) {
    pm_line(e, "%s[0] = %s%s[0]);", r.name, all, r.name);
    return PM_OK;
  }
  combine_lanes(&r);
  return combine_warps(&r, op);
}
