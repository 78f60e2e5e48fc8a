/* Pointwise ops, shapes, reductions; and the table of all ops.
 *
 * An op is one C expression for each class of dtypes; macros expand it to a loop for each dtype.
 * Floats below 32 bits have no loops of their own: blocks are widened to f32, computed, and rounded
 * once for each op. A scalar operand of an array op is broadcast to a block once. Integers wrap.
 * Division by zero and shifts by the width or more give the values that hardware typically gives,
 * never a trap.
 *
 * A reduction halves its group with the loop of its op until one element is left, so sums are
 * pairwise. */
#include <math.h>

#include "vm.h"

typedef uint8_t BOOL;
typedef int8_t I8;
typedef int16_t I16;
typedef int32_t I32;
typedef uint8_t U8;
typedef uint16_t U16;
typedef uint32_t U32;
typedef float F32;

/* ---- kernels ------------------------------------------------------------------------------ */

/* dst may be an operand: ivdep says that no iteration reads what another writes */
#define KERNEL2(id, T, R, expr)                                                            \
  static void id##_##T(void *dst, const void *a, const void *b, const void *c, size_t n) { \
    const T *p = a, *q = b;                                                                \
    R *d = dst;                                                                            \
    (void)c;                                                                               \
    _Pragma("GCC ivdep") for (size_t k = 0; k < n; k++) {                                  \
      T x = p[k], y = q[k];                                                                \
      d[k] = (R)(expr);                                                                    \
    }                                                                                      \
  }
#define KERNEL1(id, T, R, expr)                                                            \
  static void id##_##T(void *dst, const void *a, const void *b, const void *c, size_t n) { \
    const T *p = a;                                                                        \
    R *d = dst;                                                                            \
    (void)b, (void)c;                                                                      \
    _Pragma("GCC ivdep") for (size_t k = 0; k < n; k++) {                                  \
      T x = p[k];                                                                          \
      d[k] = (R)(expr);                                                                    \
    }                                                                                      \
  }

#define SIGNED(M, id, expr) M(id, I8, I8, expr) M(id, I16, I16, expr) M(id, I32, I32, expr)
#define UNSIGNED(M, id, expr) M(id, U8, U8, expr) M(id, U16, U16, expr) M(id, U32, U32, expr)
#define COMPARE(M, id, expr) \
  M(id, BOOL, BOOL, expr)    \
  M(id, I8, BOOL, expr)      \
  M(id, I16, BOOL, expr)     \
  M(id, I32, BOOL, expr)     \
  M(id, U8, BOOL, expr) M(id, U16, BOOL, expr) M(id, U32, BOOL, expr) M(id, F32, BOOL, expr)

#define ROW(id, T) [PM_##T] = id##_##T
#define INT_ROWS(id) \
  ROW(id, I8), ROW(id, I16), ROW(id, I32), ROW(id, U8), ROW(id, U16), ROW(id, U32)
#define HANDLER(id, rule, ...) \
  const handler pm_vm_##id = { \
      pm_vm_encode_pointwise, exec_pointwise, {.poison = rule, .kernels = {__VA_ARGS__}}};
#define EACH pm_poison_rule_pointwise /* comes from where one of its operands does */

static step exec_pointwise(pm_machine *m, thread *t, const instr *i);

/* floats only */
#define FLOAT_UNARY(id, expr) KERNEL1(id, F32, F32, expr) HANDLER(id, EACH, ROW(id, F32))
#define FLOAT_BINARY(id, expr) KERNEL2(id, F32, F32, expr) HANDLER(id, EACH, ROW(id, F32))
/* all dtypes, an expression for each class */
#define UNARY(id, on_bool, on_signed, on_unsigned, on_float) \
  KERNEL1(id, BOOL, BOOL, on_bool)                           \
  SIGNED(KERNEL1, id, on_signed)                             \
  UNSIGNED(KERNEL1, id, on_unsigned)                         \
  KERNEL1(id, F32, F32, on_float) HANDLER(id, EACH, ROW(id, BOOL), INT_ROWS(id), ROW(id, F32))
#define BINARY(id, poison, on_bool, on_signed, on_unsigned, on_float) \
  KERNEL2(id, BOOL, BOOL, on_bool)                                    \
  SIGNED(KERNEL2, id, on_signed)                                      \
  UNSIGNED(KERNEL2, id, on_unsigned)                                  \
  KERNEL2(id, F32, F32, on_float) HANDLER(id, poison, ROW(id, BOOL), INT_ROWS(id), ROW(id, F32))
#define NUMBER(id, on_signed, on_unsigned, on_float) \
  SIGNED(KERNEL2, id, on_signed)                     \
  UNSIGNED(KERNEL2, id, on_unsigned)                 \
  KERNEL2(id, F32, F32, on_float) HANDLER(id, EACH, INT_ROWS(id), ROW(id, F32))
#define BITS(id, poison, expr)  \
  KERNEL2(id, BOOL, BOOL, expr) \
  SIGNED(KERNEL2, id, expr)     \
  UNSIGNED(KERNEL2, id, expr) HANDLER(id, poison, ROW(id, BOOL), INT_ROWS(id))
#define COMPARISON(id, op) \
  COMPARE(KERNEL2, id, x op y) HANDLER(id, EACH, ROW(id, BOOL), INT_ROWS(id), ROW(id, F32))

/* NaN wins; equal numbers have equal bits, but for the zeros. Without a branch. */
static inline F32 from_bits(U32 u) {
  F32 f;
  memcpy(&f, &u, 4);
  return f;
}
static inline U32 bits_of(F32 f) {
  U32 u;
  memcpy(&u, &f, 4);
  return u;
}
static inline F32 least(F32 x, F32 y) {
  F32 r = x < y ? x : y;
  r = x == y ? from_bits(bits_of(x) | bits_of(y)) : r;
  return x != x ? x : r;
}
static inline F32 greatest(F32 x, F32 y) {
  F32 r = x > y ? x : y;
  r = x == y ? from_bits(bits_of(x) & bits_of(y)) : r;
  return x != x ? x : r;
}

/* Winitzki's estimate, then Newton's steps on erf or, where that is flat, on erfc. */
static F32 erf_inverse(F32 y) {
  const double a = fabs((double)y), l = log1p(-a * a), b = 2 / (M_PI * 0.147) + l / 2;
  if (!(a < 1)) return a == 1 ? copysignf(INFINITY, y) : NAN;
  double x = sqrt(sqrt(b * b - l / 0.147) - b);
  for (int k = 0; k < 3; k++) {
    const double high = a < 0.5 ? erf(x) - a : 1 - a - erfc(x);
    x -= high / (M_2_SQRTPI * exp(-x * x));
  }
  return a == 0 ? y : copysignf((float)x, y);
}

#define WIDTH(x) (8 * sizeof(x))

UNARY(NEG, x, 0u - (U32)x, 0u - x, -x)
UNARY(ABS, x, x < 0 ? 0u - (U32)x : (U32)x, x, fabsf(x))
UNARY(SIGN, x, (x > 0) - (x < 0), x != 0, x == 0 ? 0.0f : copysignf(1.0f, x))
FLOAT_UNARY(EXP, expf(x))
FLOAT_UNARY(EXP2, exp2f(x))
FLOAT_UNARY(LOG, logf(x))
FLOAT_UNARY(LOG2, log2f(x))
FLOAT_UNARY(LOG1P, log1pf(x))
FLOAT_UNARY(SQRT, sqrtf(x))
FLOAT_UNARY(RSQRT, 1.0f / sqrtf(x))
FLOAT_UNARY(RCP_APPROX, 1.0f / x)
FLOAT_UNARY(EXPM1, expm1f(x))
FLOAT_UNARY(CBRT, cbrtf(x))
FLOAT_UNARY(TANH, tanhf(x))
FLOAT_UNARY(SINH, sinhf(x))
FLOAT_UNARY(COSH, coshf(x))
FLOAT_UNARY(ASINH, asinhf(x))
FLOAT_UNARY(ACOSH, acoshf(x))
FLOAT_UNARY(ATANH, atanhf(x))
FLOAT_UNARY(ERF, erff(x))
FLOAT_UNARY(ERFC, erfcf(x))
FLOAT_UNARY(ERF_INV, erf_inverse(x))
FLOAT_UNARY(LGAMMA, lgammaf(x))
FLOAT_UNARY(TAN, tanf(x))
FLOAT_UNARY(ASIN, asinf(x))
FLOAT_UNARY(ACOS, acosf(x))
FLOAT_UNARY(ATAN, atanf(x))
FLOAT_UNARY(SIN, sinf(x))
FLOAT_UNARY(COS, cosf(x))
FLOAT_UNARY(FLOOR, floorf(x))
FLOAT_UNARY(CEIL, ceilf(x))
FLOAT_UNARY(TRUNC, truncf(x))
FLOAT_UNARY(ROUND, roundf(x))
FLOAT_UNARY(RINT, rintf(x))

KERNEL1(NOT, BOOL, BOOL, !x)
SIGNED(KERNEL1, NOT, ~x)
UNSIGNED(KERNEL1, NOT, ~x)
HANDLER(NOT, EACH, ROW(NOT, BOOL), INT_ROWS(NOT))

/* the bits of x, none above its width */
#define BITS_OF(x) ((U32)(x) & ~0u >> (32 - WIDTH(x)))
#define INTEGER_UNARY(id, expr) \
  SIGNED(KERNEL1, id, expr) UNSIGNED(KERNEL1, id, expr) HANDLER(id, EACH, INT_ROWS(id))
INTEGER_UNARY(CLZ, x ? (U32)__builtin_clz(BITS_OF(x)) - (32 - WIDTH(x)) : WIDTH(x))
INTEGER_UNARY(POPCOUNT, __builtin_popcount(BITS_OF(x)))

BINARY(ADD, EACH, x | y, (U32)x + (U32)y, (U32)x + (U32)y, x + y)
NUMBER(SUB, (U32)x - (U32)y, (U32)x - (U32)y, x - y)
BINARY(MUL, pm_poison_rule_and, x &y, (U32)x *(U32)y, (U32)x *(U32)y, x *y)
NUMBER(DIV,
       y == 0    ? (U32)-1
       : y == -1 ? 0u - (U32)x
                 : (U32)(x / y),
       y == 0 ? (U32)-1 : x / y, x / y)
NUMBER(REM, y == 0 ? x : y == -1 ? 0 : x % y, y == 0 ? x : x % y, fmodf(x, y))
FLOAT_BINARY(POW, powf(x, y))
FLOAT_BINARY(ATAN2, atan2f(x, y))
BINARY(MIN, EACH, x &y, x < y ? x : y, x < y ? x : y, least(x, y))
BINARY(MAX, EACH, x | y, x > y ? x : y, x > y ? x : y, greatest(x, y))
BITS(AND, pm_poison_rule_and, x &y)
BITS(OR, pm_poison_rule_or, x | y)
BITS(XOR, EACH, x ^ y)

SIGNED(KERNEL2, SHL, (U32)y >= WIDTH(x) ? 0 : (U32)x << (U32)y)
UNSIGNED(KERNEL2, SHL, y >= WIDTH(x) ? 0 : (U32)x << y)
HANDLER(SHL, EACH, INT_ROWS(SHL))
SIGNED(KERNEL2, SHR, x >> ((U32)y >= WIDTH(x) ? WIDTH(x) - 1 : (U32)y))
UNSIGNED(KERNEL2, SHR, y >= WIDTH(x) ? 0 : x >> y)
HANDLER(SHR, EACH, INT_ROWS(SHR))

COMPARISON(EQ, ==)
COMPARISON(NE, !=)
COMPARISON(LT, <)
COMPARISON(LE, <=)
COMPARISON(GT, >)
COMPARISON(GE, >=)

#define SELECT_KERNEL(T)                                                                     \
  static void SELECT_##T(void *dst, const void *a, const void *b, const void *c, size_t n) { \
    const BOOL *p = a;                                                                       \
    const T *q = b, *r = c;                                                                  \
    T *d = dst;                                                                              \
    _Pragma("GCC ivdep") for (size_t k = 0; k < n; k++) d[k] = p[k] ? q[k] : r[k];           \
  }
SELECT_KERNEL(U8)
SELECT_KERNEL(U16)
SELECT_KERNEL(U32)
#define SELECT_2 SELECT_U8
#define SELECT_4 SELECT_U8
#define SELECT_8 SELECT_U8
#define SELECT_16 SELECT_U16
#define SELECT_32 SELECT_U32
const handler pm_vm_SELECT = {pm_vm_encode_pointwise,
                              exec_pointwise,
                              {.poison = pm_poison_rule_select,
                               .kernels = {
#define PM_DTYPE(id, text, bits, class, cuda, dlpack, short, numpy, wide, torch, xla, map, group) \
  [PM_##id] = SELECT_##bits,
#include "../base/dtypes.def"
#undef PM_DTYPE
                               }}};

/* ---- pointwise ---------------------------------------------------------------------------- */

enum { BLOCK = 512 };

void pm_vm_widen(pm_dtype d, const void *src, float *dst, size_t n) {
  if (n == 1) {
    const bool byte = pm_dtypes[d].bytes == 1;
    *dst = pm_narrow_to_f32(d, byte ? *(const uint8_t *)src : *(const uint16_t *)src);
  } else {
    pm_convert_array(d, PM_F32, src, dst, n);
  }
}

void pm_vm_narrow(pm_dtype d, const float *src, void *dst, size_t n) {
  if (n == 1) {
    const uint16_t x = pm_f32_to_narrow(d, *src);
    if (pm_dtypes[d].bytes == 1) *(uint8_t *)dst = (uint8_t)x;
    else *(uint16_t *)dst = x;
  } else {
    pm_convert_array(PM_F32, d, src, dst, n);
  }
}

static void spread(const void *one, uint8_t bytes, void *dst, size_t n) {
  if (bytes == 1) {
    memset(dst, *(const uint8_t *)one, n);
  } else if (bytes == 2) {
    for (size_t k = 0; k < n; k++) ((uint16_t *)dst)[k] = *(const uint16_t *)one;
  } else {
    for (size_t k = 0; k < n; k++) ((uint32_t *)dst)[k] = *(const uint32_t *)one;
  }
}

static step exec_in_blocks(thread *t, const instr *i) {
  float space[3][BLOCK], result[BLOCK];
  const uint32_t slots[] = {i->a, i->b, i->c};
  const char *in[3];
  uint8_t bytes[3];
  int count = i->c ? 3 : i->b ? 2 : 1;
  for (int k = 0; k < count; k++) {
    in[k] = slot_of(t, slots[k]);
    bytes[k] = pm_dtypes[i->c && k == 0 ? PM_BOOL : i->dtype].bytes;
    if (!(i->flags & SPLAT_X << k)) continue;
    size_t n = pm_min(i->n, BLOCK);
    if (i->flags & WIDEN) {
      float one;
      pm_vm_widen(i->dtype, in[k], &one, 1);
      spread(&one, 4, space[k], n);
    } else {
      spread(in[k], bytes[k], space[k], n);
    }
  }
  char *dst = slot_of(t, i->dst);
  uint8_t out_bytes = pm_dtypes[i->out].bytes;
  for (size_t at = 0; at < i->n; at += BLOCK) {
    size_t n = (size_t)pm_min(i->n - (int64_t)at, BLOCK);
    const void *from[3] = {space[0], space[1], space[2]};
    for (int k = 0; k < count; k++) {
      if (i->flags & SPLAT_X << k) continue;
      if (i->flags & WIDEN) {
        pm_vm_widen(i->dtype, in[k] + at * bytes[k], space[k], n);
      } else {
        from[k] = in[k] + at * bytes[k];
      }
    }
    void *to = dst + at * out_bytes;
    i->kernel(i->flags & NARROW ? result : to, from[0], from[1], from[2], n);
    if (i->flags & NARROW) pm_vm_narrow(i->out, result, to, n);
  }
  return STEP_NEXT;
}

static step exec_pointwise(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (i->flags) return exec_in_blocks(t, i);
  i->kernel(slot_of(t, i->dst), slot_of(t, i->a), slot_of(t, i->b), slot_of(t, i->c), i->n);
  return STEP_NEXT;
}

/* Each element of x is two of half its bits, the first one in the low half. */
static step exec_unpack(pm_machine *m, thread *t, const instr *i) {
  const uint8_t *x = slot_of(t, i->a);
  uint8_t *d = slot_of(t, i->dst);
  const int bits = pm_dtypes[i->out].bits;
  (void)m;
  for (uint32_t k = 0; k < i->n; k++) {
    const pm_scalar half = {.i = x[k / 2] >> (k % 2 ? bits : 0)};
    if (pm_is_float((pm_dtype)i->out)) d[k] = half.i & ((1 << bits) - 1);
    else pm_store_scalar((pm_dtype)i->out, d + k, half);
  }
  return STEP_NEXT;
}

static step exec_pack(pm_machine *m, thread *t, const instr *i) {
  const uint8_t *x = slot_of(t, i->a);
  uint8_t *d = slot_of(t, i->dst);
  const int bits = pm_dtypes[i->dtype].bits, mask = (1 << bits) - 1;
  (void)m;
  for (uint32_t k = 0; k < i->n; k++) {
    d[k] = (uint8_t)((x[2 * k] & mask) | (x[2 * k + 1] & mask) << bits);
  }
  return STEP_NEXT;
}

static step exec_convert(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (i->n == 1) {
    pm_scalar v = pm_load_scalar(i->dtype, slot_of(t, i->a));
    pm_store_scalar(i->out, slot_of(t, i->dst), pm_convert_scalar(i->dtype, i->out, v));
  } else {
    pm_convert_array(i->dtype, i->out, slot_of(t, i->a), slot_of(t, i->dst), i->n);
  }
  return STEP_NEXT;
}

/* ---- the rest ----------------------------------------------------------------------------- */

static step exec_axis(pm_machine *m, thread *t, const instr *i) {
  int64_t device = t->block->cluster->device;
  for (uint32_t d = i->to + 1; i->flags == PM_AXIS_DEVICE && d < m->n_mesh; d++) {
    device /= m->mesh[d];
  }
  int64_t v = i->flags == PM_AXIS_GRID      ? t->block->cluster->point[i->to]
              : i->flags == PM_AXIS_DEVICE  ? device % m->mesh[i->to]
              : i->flags == PM_AXIS_CLUSTER ? t->block->coord[i->to]
              : i->flags == PM_AXIS_WARP    ? t->warp
                                            : t->index;
  pm_store_scalar(i->out, slot_of(t, i->dst), (pm_scalar){.i = v});
  return STEP_NEXT;
}

static step exec_multiple(pm_machine *m, thread *t, const instr *i) {
  int64_t v = pm_load_scalar(i->dtype, slot_of(t, i->a)).i;
  if (i->to && v % (int64_t)i->to == 0) return STEP_NEXT;
  return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                    "multiple_of: %lld is not a multiple of %u, as was promised", (long long)v,
                    i->to);
}

static step exec_reduce(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  const reduction *r = i->reduction;
  size_t bytes = pm_dtypes[i->out].bytes;
  char *work = slot_of(t, i->b);
  if (i->out == i->dtype) {
    memcpy(work, slot_of(t, i->a), i->n * bytes);
  } else {
    pm_vm_widen(i->dtype, slot_of(t, i->a), (float *)work, i->n);
  }
  for (uint32_t g = 0; g < r->n; g++) {
    size_t inner = (size_t)r->group[g].inner, size = (size_t)r->group[g].size;
    for (int64_t o = 0; o < r->group[g].outer; o++) {
      char *at = work + (size_t)o * size * inner * bytes;
      for (size_t n = size; n > 1; n -= n / 2) { /* add the last half to the first */
        size_t half = n / 2;
        r->kernel(at, at, at + (n - half) * inner * bytes, NULL, half * inner);
      }
      memmove(work + (size_t)o * inner * bytes, at, inner * bytes);
    }
  }
  if (i->out == i->dtype) {
    memcpy(slot_of(t, i->dst), work, (size_t)r->n_out * bytes);
  } else {
    pm_vm_narrow(i->dtype, (float *)work, slot_of(t, i->dst), (size_t)r->n_out);
  }
  return STEP_NEXT;
}

/* n elements of the result, `to` columns of it, dtype of the operands */
static step exec_mma(pm_machine *m, thread *t, const instr *i) {
  const pm_dtype d = (pm_dtype)i->dtype;
  const int64_t k = i->depth, n = i->to;
  const pm_vm_target to = {slot_of(t, i->dst), i->n / n, n, n, (pm_dtype)i->out};
  memcpy(to.at, slot_of(t, i->a), i->n * pm_dtypes[to.dtype].bytes);
  pm_vm_product(m->pack, &to, (pm_vm_factor){slot_of(t, i->b), to.m, k, k, 1, d},
                (pm_vm_factor){slot_of(t, i->c), n, k, 1, n, d});
  return STEP_NEXT;
}

static step exec_await_kernels(pm_machine *m, thread *t, const instr *i) {
  (void)i;
  if (m->races) pm_race_await_kernels(m, t);
  return STEP_PAUSE;
}

static step exec_nothing(pm_machine *m, thread *t, const instr *i) {
  (void)m, (void)t, (void)i;
  return STEP_PAUSE;
}

static step exec_first_tile(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  *(int32_t *)slot_of(t, i->dst) = (int32_t)t->block->cluster->number;
  return STEP_NEXT;
}

static int32_t *counters_of(const pm_machine *m, const thread *t) {
  return m->devices[t->block->cluster->device].counters;
}

/* Others than the taker get a number that must not matter. */
static step exec_fetch_tile(pm_machine *m, thread *t, const instr *i) {
  const bool taker = t->index + 1 == m->n_threads && t->block == t->block->cluster->blocks;
  int64_t number = !taker ? INT32_MIN : i->a ? *(const int32_t *)slot_of(t, i->a) : m->grid_size;
  if (taker && m->shares_grid) number = m->points + counters_of(m, t)[i->to]++;
  *(int32_t *)slot_of(t, i->dst) = (int32_t)number;
  return STEP_PAUSE;
}

static step exec_next_tile(pm_machine *m, thread *t, const instr *i) {
  *(int32_t *)slot_of(t, i->dst) = counters_of(m, t)[i->to]++;
  return STEP_PAUSE;
}

const handler pm_vm_CONST = {pm_vm_encode_const, NULL, {0}};
const handler pm_vm_IOTA = {pm_vm_encode_iota, NULL, {0}};
const handler pm_vm_SIZE = {pm_vm_encode_size, NULL, {0}};
const handler pm_vm_AXIS = {pm_vm_encode_axis, exec_axis, {0}};
const handler pm_vm_CONVERT = {
    pm_vm_encode_plain, exec_convert, {.poison = pm_poison_rule_convert}};
const handler pm_vm_BITCAST = {pm_vm_encode_alias, NULL, {0}};
const handler pm_vm_OPT_BARRIER = {pm_vm_encode_alias, NULL, {0}};
const handler pm_vm_MULTIPLE_OF = {pm_vm_encode_multiple, exec_multiple, {0}};
const handler pm_vm_RESHAPE = {pm_vm_encode_alias, NULL, {0}};
const handler pm_vm_REDUCE = {pm_vm_encode_reduce, exec_reduce, {.poison = pm_poison_rule_reduce}};
const handler pm_vm_MMA = {pm_vm_encode_product, exec_mma, {.poison = pm_poison_rule_mma}};
const handler pm_vm_UNPACK = {pm_vm_encode_plain, exec_unpack, {.poison = pm_poison_rule_unpack}};
const handler pm_vm_PACK = {pm_vm_encode_plain, exec_pack, {.poison = pm_poison_rule_pack}};
const handler pm_vm_LAYOUT_CAST = {pm_vm_encode_alias, NULL, {0}};
const handler pm_vm_SET_MAX_REGISTERS = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_INLINE_RESULT = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_PRINT_LAYOUT = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_SYNC = {pm_vm_encode_plain, exec_nothing, {0}};
const handler pm_vm_PDL_WAIT = {pm_vm_encode_kernels, exec_await_kernels, {0}};
const handler pm_vm_PDL_LAUNCH = {pm_vm_encode_plain, exec_nothing, {0}};
const handler pm_vm_FIRST_TILE = {pm_vm_encode_plain, exec_first_tile, {0}};
const handler pm_vm_FETCH_TILE = {pm_vm_encode_plain, exec_fetch_tile, {0}};
const handler pm_vm_SHUFFLE_TILE = {pm_vm_encode_alias, NULL, {0}};
const handler pm_vm_NEXT_TILE = {pm_vm_encode_plain, exec_next_tile, {0}};

#undef UNARY
#undef BINARY
#undef EACH
