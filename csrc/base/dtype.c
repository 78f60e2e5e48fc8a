/* The dtype table and conversions of single numbers.
 *
 * A number travels as int64 or double. Rounding a double to 16 or 8 bits goes through a float
 * rounded to odd: the float has more than two bits to spare, so the second rounding is as good as
 * the only one. */
#include "dtype.h"

#include <math.h>

const pm_dtype_info pm_dtypes[PM_DTYPE_COUNT] = {
#define PM_DTYPE(id, name, width, kind, cpp, code, short, np, of64, number, xla_number, map, \
                 at_once)                                                                    \
  [PM_##id] = {.text = name,                                                                 \
               .cuda = cpp,                                                                  \
               .short_name = short,                                                          \
               .numpy = np,                                                                  \
               .wide = of64,                                                                 \
               .bits = width,                                                                \
               .bytes = (width + 7) / 8,                                                     \
               .class = PM_CLASS_##kind,                                                     \
               .dlpack = code,                                                               \
               .torch = number,                                                              \
               .xla = xla_number,                                                            \
               .group = at_once},
#include "dtypes.def"
#undef PM_DTYPE
};

int pm_dtype_find(const char *text) {
  for (int t = 0; t < PM_DTYPE_COUNT; t++)
    if (!strcmp(pm_dtypes[t].text, text)) return t;
  return -1;
}

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

float pm_f16_to_f32(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
  if (exponent == 31) {
    uint32_t quiet = mantissa ? 0x400000 : 0;
    return float_of(sign | 0x7f800000 | quiet | mantissa << 13);
  }
  if (exponent == 0) {
    float magnitude = (float)mantissa * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t pm_f32_to_f16(float x) {
  uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
  if (magnitude >= 0x47800000) return sign | 0x7c00; /* 65536 and more */
  if (magnitude < 0x38800000) {                      /* below 2^-14: adding 0.5 rounds to 2^-24 */
    float sum = float_of(magnitude) + 0.5f;
    return sign | (uint16_t)(bits_of(sum) - 0x3f000000);
  }
  magnitude += 0xfff + (magnitude >> 13 & 1); /* may carry into the exponent, up to infinity */
  return sign | (uint16_t)((magnitude - 0x38000000) >> 13);
}

uint16_t pm_f32_to_bf16(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* ---- floats of 8 bits ---------------------------------------------------------------------
 * A sign, an exponent, `digits` bits of mantissa; exponents count from `bias`. All numbers are
 * floats, so a table would say no more. e8m0 is an exponent alone. */

typedef struct small_format {
  int digits, bias;
  uint32_t greatest; /* the bits of its greatest finite number */
} small_format;
static const small_format e4m3 = {3, 7, 0x7e}, e5m2 = {2, 15, 0x7b};

static float small_to_f32(small_format s, uint32_t x) {
  const uint32_t sign = (x & 0x80) << 24, rest = x & 0x7f;
  const bool infinite = s.greatest == 0x7b && rest == 0x7c;
  if (rest > s.greatest) return float_of(sign | (infinite ? 0x7f800000 : 0x7fc00000));
  if (rest >> s.digits == 0) {
    const float unit = float_of((uint32_t)(128 - s.bias - s.digits) << 23);
    return float_of(sign | bits_of((float)rest * unit));
  }
  return float_of(sign | ((rest << (23 - s.digits)) + ((uint32_t)(127 - s.bias) << 23)));
}

static uint32_t f32_to_small(small_format s, float x) {
  const uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
  uint32_t magnitude = u & 0x7fffffff;
  const int drop = 23 - s.digits;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude < (uint32_t)(128 - s.bias) << 23) { /* less than normal: a count of units */
    const float units = float_of((uint32_t)(126 + s.bias + s.digits) << 23);
    return sign | (uint32_t)nearbyintf(float_of(magnitude) * units);
  }
  magnitude += (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
  magnitude = (magnitude >> drop) - ((uint32_t)(127 - s.bias) << s.digits);
  return sign | (magnitude > s.greatest ? s.greatest : magnitude);
}

static float e8m0_to_f32(uint32_t x) { return x == 0xff ? NAN : float_of(x ? x << 23 : 0x400000); }

/* up to a power of two; what is negative has none */
static uint32_t f32_to_e8m0(float x) {
  const uint32_t u = bits_of(x), exponent = u >> 23, rest = u & 0x7fffff;
  if (isnan(x) || x < 0) return 0xff;
  if (exponent == 0 || u >> 31) return !(u >> 31) && rest > 0x400000;
  return exponent + (rest != 0) > 0xfe ? 0xfe : exponent + (rest != 0);
}

/* 4 bits: a sign and one of eight numbers, between which halfway goes to the even one */
static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

static float e2m1_to_f32(uint32_t x) { return copysignf(e2m1[x & 7], x & 8 ? -1.0f : 1.0f); }

static uint32_t f32_to_e2m1(float x) {
  uint32_t k = 0;
  if (isnan(x)) return 7;
  for (; k < 7; k++) {
    const float halfway = (e2m1[k] + e2m1[k + 1]) / 2;
    if (fabsf(x) < halfway || (fabsf(x) == halfway && k % 2 == 0)) break;
  }
  return k | (signbit(x) ? 8 : 0);
}

static float e4m3_to_f32(uint32_t x) { return small_to_f32(e4m3, x); }
static uint32_t f32_to_e4m3(float x) { return f32_to_small(e4m3, x); }
static float e5m2_to_f32(uint32_t x) { return small_to_f32(e5m2, x); }
static uint32_t f32_to_e5m2(float x) { return f32_to_small(e5m2, x); }
static float f16_to_f32(uint32_t x) { return pm_f16_to_f32((uint16_t)x); }
static uint32_t f32_to_f16(float x) { return pm_f32_to_f16(x); }
static float bf16_to_f32(uint32_t x) { return pm_bf16_to_f32((uint16_t)x); }
static uint32_t f32_to_bf16(float x) { return pm_f32_to_bf16(x); }

static const struct {
  float (*widen)(uint32_t);
  uint32_t (*narrow)(float);
} conversions[PM_DTYPE_COUNT] = {
    [PM_E2M1] = {e2m1_to_f32, f32_to_e2m1}, [PM_E4M3] = {e4m3_to_f32, f32_to_e4m3},
    [PM_E5M2] = {e5m2_to_f32, f32_to_e5m2}, [PM_E8M0] = {e8m0_to_f32, f32_to_e8m0},
    [PM_F16] = {f16_to_f32, f32_to_f16},    [PM_BF16] = {bf16_to_f32, f32_to_bf16}};

float pm_narrow_to_f32(pm_dtype t, uint16_t x) { return conversions[t].widen(x); }
uint16_t pm_f32_to_narrow(pm_dtype t, float x) { return (uint16_t)conversions[t].narrow(x); }

static float round_to_odd(double x) {
  float f = (float)x;
  uint32_t u = bits_of(f);
  if (isnan(x) || (double)f == x || (u & 1)) return f;
  return float_of(fabs(x) > fabs((double)f) ? u + 1 : u - 1);
}

pm_scalar pm_load_scalar(pm_dtype t, const void *p) {
  union {
    int8_t s8;
    int16_t s16;
    int32_t s32;
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    float f;
  } x;
  const int bytes = pm_dtypes[t].bytes;
  memcpy(&x, p, (size_t)bytes);
  switch (pm_dtypes[t].class) {
    case PM_CLASS_BOOL: return (pm_scalar){.i = x.u8 != 0};
    case PM_CLASS_INT: return (pm_scalar){.i = bytes == 1 ? x.s8 : bytes == 2 ? x.s16 : x.s32};
    case PM_CLASS_UINT: return (pm_scalar){.i = bytes == 1 ? x.u8 : bytes == 2 ? x.u16 : x.u32};
    default: break;
  }
  if (bytes == 4) return (pm_scalar){.f = x.f};
  return (pm_scalar){.f = pm_narrow_to_f32(t, bytes == 1 ? x.u8 : x.u16)};
}

pm_dtype pm_dtype_of(pm_dclass class, int bits) {
  int t = 0;
  while (pm_dtypes[t].class != class || pm_dtypes[t].bits != bits) t++;
  return (pm_dtype)t;
}

uint32_t pm_unwritten(pm_dtype t) {
  const uint32_t ones = 0xffffffffu >> (32 - pm_dtypes[t].bits);
  uint32_t nan = 0;
  if (pm_is_float(t)) pm_store_scalar(t, &nan, (pm_scalar){.f = NAN});
  return pm_is_float(t)                        ? nan
         : pm_dtypes[t].class == PM_CLASS_BOOL ? 1
         : pm_dtypes[t].class == PM_CLASS_INT  ? ones >> 1
                                               : ones;
}

/* The low bits of x as a byte of the dtype, of less than 8 bits. */
static uint8_t widened(pm_dtype t, uint8_t x) {
  const int bits = pm_dtypes[t].bits,
            sign = pm_dtypes[t].class == PM_CLASS_INT ? 1 << (bits - 1) : 0;
  return (uint8_t)(((x & ((1 << bits) - 1)) ^ sign) - sign);
}

void pm_store_scalar(pm_dtype t, void *p, pm_scalar v) {
  if (t == PM_F32) {
    float f = (float)v.f;
    memcpy(p, &f, 4);
  } else if (pm_is_float(t)) {
    float f = round_to_odd(v.f);
    uint16_t u = pm_f32_to_narrow(t, f);
    if (pm_dtypes[t].bytes == 1) *(uint8_t *)p = (uint8_t)u;
    else memcpy(p, &u, 2);
  } else if (pm_dtypes[t].bits < 8) {
    *(uint8_t *)p = widened(t, (uint8_t)v.i);
  } else if (t == PM_BOOL) {
    *(uint8_t *)p = v.i != 0;
  } else {
    uint8_t u8 = (uint8_t)v.i;
    uint16_t u16 = (uint16_t)v.i;
    uint32_t u32 = (uint32_t)v.i;
    switch (pm_dtypes[t].bytes) {
      case 1: memcpy(p, &u8, 1); break;
      case 2: memcpy(p, &u16, 2); break;
      default: memcpy(p, &u32, 4); break;
    }
  }
}

/* Truncates and saturates; NaN gives 0. */
static int64_t to_int(pm_dtype t, double x) {
  int bits = pm_dtypes[t].bits;
  bool is_signed = pm_dtypes[t].class == PM_CLASS_INT;
  int64_t hi = is_signed ? (INT64_C(1) << (bits - 1)) - 1 : (INT64_C(1) << bits) - 1;
  int64_t lo = is_signed ? -hi - 1 : 0;
  if (isnan(x)) return 0;
  return x >= (double)hi ? hi : x <= (double)lo ? lo : (int64_t)x;
}

pm_scalar pm_convert_scalar(pm_dtype from, pm_dtype to, pm_scalar v) {
  uint32_t room;
  if (to == PM_BOOL) return (pm_scalar){.i = pm_is_float(from) ? v.f != 0 : v.i != 0};
  if (pm_is_float(from) && !pm_is_float(to)) return (pm_scalar){.i = to_int(to, v.f)};
  if (!pm_is_float(from) && pm_is_float(to))
    v.f = pm_is_small_float(to) ? (double)(float)v.i : (double)v.i; /* to 8 bits through f32 */
  pm_store_scalar(to, &room, v);
  return pm_load_scalar(to, &room);
}

void pm_pack_bytes(pm_dtype t, const void *src, void *dst, size_t n) {
  const size_t bits = pm_dtypes[t].bits, per = 8 / bits;
  const uint8_t *s = src;
  uint8_t *d = dst;
  for (size_t i = 0; i < n / per; i++) {
    uint8_t byte = 0;
    for (size_t k = 0; k < per; k++) {
      byte |= (uint8_t)((s[per * i + k] & ((1 << bits) - 1)) << (bits * k));
    }
    d[i] = byte;
  }
}

void pm_unpack_bytes(pm_dtype t, const void *src, void *dst, size_t n) {
  const size_t bits = pm_dtypes[t].bits, per = 8 / bits;
  const uint8_t *s = src;
  uint8_t *d = dst;
  for (size_t i = 0; i < n; i++) d[i] = widened(t, (uint8_t)(s[i / per] >> (bits * (i % per))));
}
