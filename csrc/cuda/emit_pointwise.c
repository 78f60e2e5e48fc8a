/* Element-wise ops: each produces one C++ expression for element e->reg.
 *
 * f16 and bf16 have the operators + - * and unary -. All other ops on them, and all ops on smaller
 * floats, are computed in f32 and rounded once. Integer + - * on scalars are plain C++ if the range
 * is known to fit in i32, so that index arithmetic is readable, and wrap_ functions otherwise. */
#include <math.h>

#include "gen.h"

static pm_dtype in_dtype(pm_gen *e, pm_opid op) {
  return pm_typeof(e->g, pm_in(e->g, op, 0))->dtype;
}
static const char *arg(pm_gen *e, pm_opid op, uint32_t k) {
  return pm_at(e, pm_in(e->g, op, k), e->reg);
}

static pm_code leave(pm_gen *e, const char *expr) {
  e->expr = expr;
  return PM_OK;
}

/* operand k as an argument of a function */
static const char *argument(pm_gen *e, pm_opid op, uint32_t k) {
  return pm_unwrapped(e, arg(e, op, k));
}

/* operand k in f32, and an f32 result in the dtype of the op */
static const char *arg_f32(pm_gen *e, pm_opid op, uint32_t k) {
  return pm_is_narrow_float(in_dtype(e, op)) ? pm_str(e, "cvt_f32(%s)", argument(e, op, k))
                                             : arg(e, op, k);
}
static pm_code leave_f32(pm_gen *e, pm_opid op, const char *x) {
  const pm_dtype t = in_dtype(e, op);
  return leave(
      e, pm_is_narrow_float(t) ? pm_str(e, "cvt_%s(%s)", pm_cpp_type(t), pm_unwrapped(e, x)) : x);
}

/* ---- one operand ------------------------------------------------------------------------- */

static pm_code call_f32(pm_gen *e, pm_opid op, const char *fn) {
  return leave_f32(e, op, pm_str(e, "%s(%s)", fn, pm_unwrapped(e, arg_f32(e, op, 0))));
}

#define FLOAT_FUNCTION(id, exact) \
  pm_code pm_cuda_##id(pm_gen *e, pm_opid op) { return call_f32(e, op, exact); }
#define APPROX_FUNCTION(id, exact, approx)                      \
  pm_code pm_cuda_##id(pm_gen *e, pm_opid op) {                 \
    return call_f32(e, op, e->g->approx_math ? approx : exact); \
  }
APPROX_FUNCTION(EXP, "expf", "exp_approx")
APPROX_FUNCTION(EXP2, "exp2f", "exp2_approx")
APPROX_FUNCTION(LOG, "logf", "log_approx")
APPROX_FUNCTION(LOG2, "log2f", "log2_approx")
APPROX_FUNCTION(RSQRT, "rsqrtf", "rsqrt_approx")
APPROX_FUNCTION(TANH, "tanhf", "tanh_approx")
APPROX_FUNCTION(SIN, "sinf", "sin_approx")
APPROX_FUNCTION(COS, "cosf", "cos_approx")
FLOAT_FUNCTION(TAN, "tanf")
FLOAT_FUNCTION(ASIN, "asinf")
FLOAT_FUNCTION(ACOS, "acosf")
FLOAT_FUNCTION(ATAN, "atanf")
FLOAT_FUNCTION(SINH, "sinhf")
FLOAT_FUNCTION(COSH, "coshf")
FLOAT_FUNCTION(ASINH, "asinhf")
FLOAT_FUNCTION(ACOSH, "acoshf")
FLOAT_FUNCTION(ATANH, "atanhf")
FLOAT_FUNCTION(ERF, "erff")
FLOAT_FUNCTION(ERFC, "erfcf")
FLOAT_FUNCTION(ERF_INV, "erfinvf")
FLOAT_FUNCTION(LGAMMA, "lgammaf")
FLOAT_FUNCTION(LOG1P, "log1pf")
FLOAT_FUNCTION(EXPM1, "expm1f")
FLOAT_FUNCTION(SQRT, "sqrtf")
FLOAT_FUNCTION(CBRT, "cbrtf")
FLOAT_FUNCTION(TRUNC, "truncf")
FLOAT_FUNCTION(FLOOR, "floorf")
FLOAT_FUNCTION(CEIL, "ceilf")
FLOAT_FUNCTION(ROUND, "roundf")
FLOAT_FUNCTION(RINT, "rintf")

pm_code pm_cuda_RCP_APPROX(pm_gen *e, pm_opid op) {
  if (in_dtype(e, op) != PM_E8M0) return call_f32(e, op, "rcp_approx");
  return leave(e, pm_str(e, "div_e8m0(e8m0{127}, %s)", arg(e, op, 0)));
}

pm_code pm_cuda_NEG(pm_gen *e, pm_opid op) {
  const pm_dtype t = in_dtype(e, op);
  if (pm_is_small_float(t)) return call_f32(e, op, "-");
  return leave(e, pm_str(e, pm_is_float(t) ? "-(%s)" : "wrap_neg(%s)", argument(e, op, 0)));
}

pm_code pm_cuda_ABS(pm_gen *e, pm_opid op) {
  const pm_dtype t = in_dtype(e, op);
  if (pm_is_float(t)) return call_f32(e, op, "fabsf");
  if (pm_dtypes[t].class != PM_CLASS_INT) return leave(e, arg(e, op, 0));
  return leave(e, pm_str(e, "abs_int(%s)", argument(e, op, 0)));
}

pm_code pm_cuda_SIGN(pm_gen *e, pm_opid op) {
  if (pm_is_float(in_dtype(e, op))) return call_f32(e, op, "sign_f32");
  return leave(e, pm_str(e, "sign_int(%s)", argument(e, op, 0)));
}

pm_code pm_cuda_CLZ(pm_gen *e, pm_opid op) {
  return leave(e, pm_str(e, "leading_zeros(%s)", argument(e, op, 0)));
}

pm_code pm_cuda_POPCOUNT(pm_gen *e, pm_opid op) {
  return leave(e, pm_str(e, "bit_count(%s)", argument(e, op, 0)));
}

pm_code pm_cuda_NOT(pm_gen *e, pm_opid op) {
  const pm_dtype t = in_dtype(e, op);
  if (t == PM_BOOL) return leave(e, pm_str(e, "!%s", arg(e, op, 0)));
  if (t == PM_I32) return leave(e, pm_str(e, "complement(%s)", argument(e, op, 0)));
  return leave(e, pm_str(e, "(%s)~%s", pm_cpp_type(t), arg(e, op, 0)));
}

pm_code pm_cuda_OPT_BARRIER(pm_gen *e, pm_opid op) {
  return leave(e, pm_str(e, "opaque(%s)", argument(e, op, 0)));
}

/* ---- two operands ------------------------------------------------------------------------ */

static pm_code infix(pm_gen *e, pm_opid op, const char *sign) {
  return leave(e, pm_str(e, "%s %s %s", pm_infix_operand(e, arg(e, op, 0), sign, false), sign,
                         pm_infix_operand(e, arg(e, op, 1), sign, true)));
}

static pm_code infix_cast(pm_gen *e, pm_opid op, const char *sign) {
  const pm_dtype t = in_dtype(e, op);
  if (pm_dtypes[t].bits == 32 || t == PM_BOOL) return infix(e, op, sign);
  return leave(e, pm_str(e, "(%s)(%s %s %s)", pm_cpp_type(t), arg(e, op, 0), sign, arg(e, op, 1)));
}

static pm_code infix_f32(pm_gen *e, pm_opid op, const char *sign) {
  return leave_f32(e, op,
                   pm_str(e, "%s %s %s", pm_infix_operand(e, arg_f32(e, op, 0), sign, false), sign,
                          pm_infix_operand(e, arg_f32(e, op, 1), sign, true)));
}

static pm_code call(pm_gen *e, pm_opid op, const char *fn) {
  return leave(e, pm_str(e, "%s(%s, %s)", fn, argument(e, op, 0), argument(e, op, 1)));
}

static pm_code call2_f32(pm_gen *e, pm_opid op, const char *fn) {
  return leave_f32(e, op,
                   pm_str(e, "%s(%s, %s)", fn, pm_unwrapped(e, arg_f32(e, op, 0)),
                          pm_unwrapped(e, arg_f32(e, op, 1))));
}

static bool fits_i32(pm_gen *e, pm_opid op) {
  int64_t lo, hi;
  const pm_val out = pm_get(e->g, op)->out;
  if (pm_typeof(e->g, out)->rank || in_dtype(e, op) != PM_I32) return false;
  return pm_range(e->g, out, &lo, &hi) && lo >= INT32_MIN && hi <= INT32_MAX;
}

static pm_code arithmetic(pm_gen *e, pm_opid op, const char *sign, const char *wrap,
                          const char *on_bool) {
  const pm_dtype t = in_dtype(e, op);
  if (t == PM_BOOL) return infix(e, op, on_bool);
  if (pm_is_small_float(t)) return infix_f32(e, op, sign);
  if (pm_is_float(t) || fits_i32(e, op)) return infix(e, op, sign);
  if (t == PM_U32) return infix(e, op, sign);
  return call(e, op, wrap);
}

pm_code pm_cuda_ADD(pm_gen *e, pm_opid op) { return arithmetic(e, op, "+", "wrap_add", "|"); }

/* Whether operand n of an op on i32 is the constant x. Negatives are printed as wrap_neg, however
 * the user writes them. */
static bool is_i32(pm_gen *e, pm_opid op, uint32_t n, int64_t x) {
  pm_scalar c;
  return in_dtype(e, op) == PM_I32 && pm_constant(e->g, pm_in(e->g, op, n), &c) && c.i == x;
}

static pm_code negative(pm_gen *e, pm_opid op, uint32_t n) {
  return leave(e, pm_str(e, "wrap_neg(%s)", argument(e, op, n)));
}

pm_code pm_cuda_SUB(pm_gen *e, pm_opid op) {
  if (!fits_i32(e, op) && is_i32(e, op, 0, 0)) return negative(e, op, 1);
  return arithmetic(e, op, "-", "wrap_sub", "^");
}

/* ptxas knows nothing of an OPT_BARRIER: it would make one operation of the product and a sum. */
pm_code pm_cuda_MUL(pm_gen *e, pm_opid op) {
  if (in_dtype(e, op) == PM_E8M0) return call(e, op, "mul_e8m0");
  if (!fits_i32(e, op))
    for (uint32_t n = 0; n < 2; n++)
      if (is_i32(e, op, n, -1)) return negative(e, op, 1 - n);
  const bool whole = e->barred[pm_get(e->g, op)->out] && in_dtype(e, op) == PM_F32;
  return whole ? call(e, op, "mul_rn") : arithmetic(e, op, "*", "wrap_mul", "&");
}

/* Is operand k an i32 scalar that is known to be at least 0? */
static bool is_never_negative(pm_gen *e, pm_opid op, uint32_t k) {
  int64_t lo, hi;
  const pm_val v = pm_in(e->g, op, k);
  const pm_type *t = pm_typeof(e->g, v);
  return !t->rank && t->dtype == PM_I32 && pm_range(e->g, v, &lo, &hi) && lo >= 0;
}

/* By a constant it is plain C++; else a function, because x / 0 is undefined, also for padding.
 * Without signs it takes a third of the instructions less. */
static pm_code divide(pm_gen *e, pm_opid op, const char *sign, const char *fn) {
  pm_scalar y;
  if (pm_constant(e->g, pm_in(e->g, op, 1), &y) && y.i && y.i != -1) return infix_cast(e, op, sign);
  if (!is_never_negative(e, op, 0) || !is_never_negative(e, op, 1)) return call(e, op, fn);
  return leave(e, pm_str(e, "(i32)%s((u32)%s, (u32)%s)", fn, arg(e, op, 0), arg(e, op, 1)));
}

/* By a power of two an exact quotient is a product: both round the same real number. */
static pm_code divide_exactly(pm_gen *e, pm_opid op) {
  pm_scalar y;
  int exponent;
  if (!pm_constant(e->g, pm_in(e->g, op, 1), &y) || fabs(frexp(y.f, &exponent)) != 0.5 ||
      exponent < -100 || exponent > 100) {
    return call2_f32(e, op, "div_rn");
  }
  const char *inverse = pm_literal(e, PM_F32, (pm_scalar){.f = 1 / y.f});
  return leave_f32(e, op, pm_str(e, "mul_rn(%s, %s)", arg_f32(e, op, 0), inverse));
}

pm_code pm_cuda_DIV(pm_gen *e, pm_opid op) {
  if (in_dtype(e, op) == PM_E8M0) return call(e, op, "div_e8m0");
  if (!pm_is_float(in_dtype(e, op))) return divide(e, op, "/", "div_int");
  return *pm_attr(e->g, op, PM_ATTR_EXACT) ? divide_exactly(e, op) : infix_f32(e, op, "/");
}

pm_code pm_cuda_REM(pm_gen *e, pm_opid op) {
  if (!pm_is_float(in_dtype(e, op))) return divide(e, op, "%", "rem_int");
  return call2_f32(e, op, "fmodf");
}

pm_code pm_cuda_POW(pm_gen *e, pm_opid op) { return call2_f32(e, op, "powf"); }
pm_code pm_cuda_ATAN2(pm_gen *e, pm_opid op) { return call2_f32(e, op, "atan2f"); }

static pm_code extremum(pm_gen *e, pm_opid op, const char *name, const char *on_bool) {
  const pm_dtype t = in_dtype(e, op);
  if (t == PM_BOOL) return infix(e, op, on_bool);
  if (!pm_is_float(t)) return call(e, op, pm_str(e, "%s_int", name));
  return call2_f32(e, op, pm_str(e, "%s_f32", name));
}

pm_code pm_cuda_MIN(pm_gen *e, pm_opid op) { return extremum(e, op, "min", "&"); }
pm_code pm_cuda_MAX(pm_gen *e, pm_opid op) { return extremum(e, op, "max", "|"); }
pm_code pm_cuda_AND(pm_gen *e, pm_opid op) { return infix_cast(e, op, "&"); }
pm_code pm_cuda_OR(pm_gen *e, pm_opid op) { return infix_cast(e, op, "|"); }
pm_code pm_cuda_XOR(pm_gen *e, pm_opid op) { return infix_cast(e, op, "^"); }
pm_code pm_cuda_SHL(pm_gen *e, pm_opid op) { return call(e, op, "shift_left"); }
pm_code pm_cuda_SHR(pm_gen *e, pm_opid op) { return infix_cast(e, op, ">>"); }

static pm_code compare(pm_gen *e, pm_opid op, const char *sign) {
  return leave(e, pm_str(e, "%s %s %s", pm_infix_operand(e, arg_f32(e, op, 0), sign, false), sign,
                         pm_infix_operand(e, arg_f32(e, op, 1), sign, true)));
}

pm_code pm_cuda_EQ(pm_gen *e, pm_opid op) { return compare(e, op, "=="); }
pm_code pm_cuda_NE(pm_gen *e, pm_opid op) { return compare(e, op, "!="); }
pm_code pm_cuda_LT(pm_gen *e, pm_opid op) { return compare(e, op, "<"); }
pm_code pm_cuda_LE(pm_gen *e, pm_opid op) { return compare(e, op, "<="); }
pm_code pm_cuda_GT(pm_gen *e, pm_opid op) { return compare(e, op, ">"); }
pm_code pm_cuda_GE(pm_gen *e, pm_opid op) { return compare(e, op, ">="); }

pm_code pm_cuda_SELECT(pm_gen *e, pm_opid op) {
  return leave(e, pm_str(e, "%s ? %s : %s", arg(e, op, 0), arg(e, op, 1), arg(e, op, 2)));
}

/* ---- to other types ---------------------------------------------------------------------- */

const char *pm_convert_text(pm_gen *e, pm_dtype from, pm_dtype to, const char *x) {
  const char *cpp = pm_cpp_type(to), *inner = pm_unwrapped(e, x);
  if (from == to) return x;
  if (pm_is_small_int(to)) {
    if (pm_is_narrow_float(from)) x = pm_str(e, "cvt_f32(%s)", inner);
    return pm_str(e, pm_is_float(from) ? "cvt_%s(%s)" : "wrap_%s((u32)(%s))",
                  pm_dtypes[to].short_name, x);
  }
  if (pm_is_float(from)) {
    const char *f = pm_is_narrow_float(from) ? pm_str(e, "cvt_f32(%s)", inner) : x;
    if (to == PM_F32) return f;
    if (to == PM_BOOL) return pm_str(e, "%s != 0.0f", f);
    return pm_str(e, pm_is_narrow_float(to) ? "cvt_%s(%s)" : "cvt_int<%s>(%s)", cpp, f);
  }
  if (to == PM_BOOL) return pm_str(e, "%s != 0", x);
  if (to == PM_BF16 && (from == PM_I32 || from == PM_U32))
    return pm_str(e, "cvt_int_to_bf16(%s)", inner);
  if (pm_is_narrow_float(to)) return pm_str(e, "cvt_%s((f32)%s)", cpp, x);
  return pm_str(e, "(%s)%s", cpp, x);
}

pm_code pm_cuda_CONVERT(pm_gen *e, pm_opid op) {
  const pm_dtype to = pm_typeof(e->g, pm_get(e->g, op)->out)->dtype;
  return leave(e, pm_convert_text(e, in_dtype(e, op), to, arg(e, op, 0)));
}

pm_code pm_cuda_BITCAST(pm_gen *e, pm_opid op) {
  const char *to = pm_cpp_type(pm_typeof(e->g, pm_get(e->g, op)->out)->dtype);
  return leave(e, pm_str(e, "bitcast<%s>(%s)", to, argument(e, op, 0)));
}

/* ---- from nothing ------------------------------------------------------------------------ */

pm_code pm_cuda_CONST(pm_gen *e, pm_opid op) {
  return leave(e, pm_at(e, pm_get(e->g, op)->out, e->reg));
}

pm_code pm_cuda_MULTIPLE_OF(pm_gen *e, pm_opid op) { return leave(e, arg(e, op, 0)); }

/* As many times `scale` as points lie along axes `from` up to `to` of the grid; one operand. */
static const char *grid_points(pm_gen *e, uint32_t from, uint32_t to, int64_t scale) {
  const pm_graph *g = e->g;
  pm_text t;
  pm_text_init(&t, e->arena);
  for (uint32_t k = from; k < to; k++) {
    if (g->grid_sizes[k]) pm_putf(&t, " * %s", pm_size_text(e, g->grid_sizes[k]));
    else scale *= g->grid[k];
  }
  return t.n ? pm_str(e, "(%lld%s)", (long long)scale, t.at) : pm_str(e, "%lld", (long long)scale);
}

pm_code pm_cuda_SIZE(pm_gen *e, pm_opid op) {
  return leave(e, pm_size_text(e, (uint32_t)*pm_attr(e->g, op, PM_ATTR_N)));
}

/* The last axis of a grid is x, the one before y, all others share z, row-major. */
const char *pm_cluster_index(pm_gen *e, uint32_t d) {
  return pm_str(e, "cluster_index_%c()", "xyz"[e->g->n_cluster - 1 - d]);
}

/* The point that a cluster began with. */
const char *pm_grid_index(pm_gen *e, uint32_t d) {
  static const char letter[] = "xyz";
  const pm_graph *g = e->g;
  const uint32_t from_last = g->n_grid - 1 - d, axis = from_last < 2 ? from_last : 2;
  if (e->program->launch.folded) { /* its clusters lie along x */
    const char *below = grid_points(e, d + 1, g->n_grid, e->program->cluster[0]);
    const bool first = !d && !e->program->shares_grid;
    const char *at = strcmp(below, "1") ? pm_str(e, "blockIdx.x / %s", below) : "blockIdx.x";
    return first ? at : pm_str(e, "%s %% %s", at, grid_points(e, d, d + 1, 1));
  }
  const uint32_t cluster = e->program->cluster[axis];
  const char *block = pm_str(e, "blockIdx.%c", letter[axis]);
  if (cluster > 1) block = pm_str(e, "%s / %u", block, cluster);
  if (from_last < 2 || g->n_grid == 3) return block;
  const char *below = grid_points(e, d + 1, g->n_grid - 2, 1);
  if (strcmp(below, "1")) block = pm_str(e, "%s / %s", block, below);
  return d ? pm_str(e, "%s %% %s", block, grid_points(e, d, d + 1, 1)) : block;
}

pm_code pm_cuda_AXIS(pm_gen *e, pm_opid op) {
  const uint32_t d = (uint32_t)*pm_attr(e->g, op, PM_ATTR_DIM);
  switch (*pm_attr(e->g, op, PM_ATTR_AXIS)) {
    case PM_AXIS_GRID: return leave(e, pm_str(e, "(i32)%s", pm_atom(e, pm_grid_index(e, d))));
    case PM_AXIS_CLUSTER: return leave(e, pm_cluster_index(e, d));
    case PM_AXIS_DEVICE: return leave(e, pm_device_index(e, d));
    case PM_AXIS_WARP: return leave(e, "(i32)warp");
    default: return leave(e, "(i32)wg");
  }
}

/* Row-major; of a launch that shares the grid, whose clusters all lie along x, by that. */
pm_code pm_cuda_FIRST_TILE(pm_gen *e, pm_opid op) {
  const pm_graph *g = e->g;
  const uint32_t cluster = e->program->cluster[0];
  pm_text t;
  (void)op;
  if (e->program->shares_grid)
    return leave(e, cluster > 1 ? pm_str(e, "(i32)(blockIdx.x / %u)", cluster) : "(i32)blockIdx.x");
  pm_text_init(&t, e->arena);
  for (uint32_t d = 0; d < g->n_grid; d++) {
    pm_putf(&t, "%s%s * %s", d ? " + " : "", pm_atom(e, pm_grid_index(e, d)),
            grid_points(e, d + 1, g->n_grid, 1));
  }
  return leave(e, g->n_grid ? pm_str(e, "(i32)(%s)", t.at) : "0");
}

pm_code pm_cuda_IOTA(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const pm_layout *l = pm_value_layout(e->g, out);
  const int dim = (int)*pm_attr(e->g, op, PM_ATTR_DIM);
  const int64_t n = pm_layout_regs(l);
  pm_sum regs;
  if (!pm_wants_array(e, out)) {
    for (int k = 0; k < pm_typeof(e->g, out)->rank; k++) {
      if (k == dim && pm_typeof(e->g, out)->dim[k] > 1)
        return pm_gen_fail(e, op, PM_E_INTERNAL, "an index array has a splat layout");
    }
    return leave(e, pm_literal(e, pm_typeof(e->g, out)->dtype, (pm_scalar){0}));
  }
  const bool flat = l->kind == PM_FLAT;
  const char *base = pm_unique(e, "index");
  pm_coord_regs(l, flat ? 0 : dim, &regs);
  regs.total = n;
  pm_line(e, "const i32 %s = %s;", base, pm_coord_base(e, l, flat ? 0 : dim));
  const char *x = pm_str(e, "%s + (i32)%s", base, pm_atom(e, pm_sum_text(e, &regs, e->reg, 1)));
  if (flat) {
    int64_t below = 1;
    for (int k = dim + 1; k < l->rank; k++) below *= l->shape[k];
    const char *rows = below > 1 ? pm_str(e, "(%s) / %lld", x, (long long)below) : pm_atom(e, x);
    x = pm_str(e, "%s %% %lld", rows, (long long)l->shape[dim]);
  }
  const pm_dtype to = pm_typeof(e->g, out)->dtype;
  return leave(e, to == PM_I32 ? x : pm_convert_text(e, PM_I32, to, pm_atom(e, x)));
}
