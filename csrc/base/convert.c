/* Conversion of contiguous arrays: one loop per pair of dtypes, made by macros.
 *
 * Floats of 16 and 8 bits are never the type of a loop: they are widened to, or narrowed from,
 * blocks of float on the stack. The two directions of f16 use F16C where the processor has it. i32
 * and u32 to bf16 go number by number, because a float on the way would round twice (f16 overflows
 * before that). */
#include "dtype.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAVE_X86 1
#endif

enum { BLOCK = 512 };

/* ---- 16-bit floats ------------------------------------------------------------------------ */

#ifdef HAVE_X86
static bool has_f16c(void) {
  static _Atomic int known; /* 1 no, 2 yes; CPUID takes microseconds on a virtual machine */
  unsigned a, b, c, d;
  if (!known) {
    bool avx2 = __builtin_cpu_supports("avx2");
    known = 1 + (avx2 && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C));
  }
  return known == 2;
}

__attribute__((target("avx2,f16c"))) static size_t widen_f16c(const uint16_t *src, float *dst,
                                                              size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
  return i;
}

__attribute__((target("avx2,f16c"))) static size_t narrow_f16c(const float *src, uint16_t *dst,
                                                               size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#endif

static void widen_f16(const uint16_t *src, float *dst, size_t n) {
  size_t i = 0;
#ifdef HAVE_X86
  if (has_f16c()) i = widen_f16c(src, dst, n);
#endif
  for (; i < n; i++) dst[i] = pm_f16_to_f32(src[i]);
}

static void narrow_f16(const float *src, uint16_t *dst, size_t n) {
  size_t i = 0;
#ifdef HAVE_X86
  if (has_f16c()) i = narrow_f16c(src, dst, n);
#endif
  for (; i < n; i++) dst[i] = pm_f32_to_f16(src[i]);
}

static void widen_bf16(const uint16_t *restrict src, float *restrict dst, size_t n) {
  for (size_t i = 0; i < n; i++) dst[i] = pm_bf16_to_f32(src[i]);
}

static void narrow_bf16(const float *restrict src, uint16_t *restrict dst, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint32_t u;
    memcpy(&u, &src[i], 4);
    uint32_t nan = (u >> 16) | 0x40, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    dst[i] = (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
  }
}

/* ---- loops of the other pairs ------------------------------------------------------------- */

typedef void (*loop)(const void *restrict src, void *restrict dst, size_t n);

#define LOOP(name, S, D, expr)                                               \
  static void name(const void *restrict src, void *restrict dst, size_t n) { \
    const S *s = src;                                                        \
    D *d = dst;                                                              \
    for (size_t i = 0; i < n; i++) {                                         \
      S x = s[i];                                                            \
      d[i] = expr;                                                           \
    }                                                                        \
  }

/* Whole numbers wrap, so that the sign of the result's type does not matter. */
#define FROM_INT(id, S, value)                     \
  LOOP(id##_to_bool, S, uint8_t, x != 0)           \
  LOOP(id##_to_8, S, uint8_t, (uint8_t)(value))    \
  LOOP(id##_to_16, S, uint16_t, (uint16_t)(value)) \
  LOOP(id##_to_32, S, uint32_t, (uint32_t)(value)) \
  LOOP(id##_to_f32, S, float, (float)(value))
FROM_INT(BOOL, uint8_t, x != 0)
FROM_INT(I8, int8_t, x)
FROM_INT(I16, int16_t, x)
FROM_INT(I32, int32_t, x)
FROM_INT(U8, uint8_t, x)
FROM_INT(U16, uint16_t, x)
FROM_INT(U32, uint32_t, x)

/* Floats saturate and NaN gives 0. lo and end are floats, so that the comparisons are exact. */
#define FROM_FLOAT(id, D, lo, end, max)                                             \
  static void F32_to_##id(const void *restrict src, void *restrict dst, size_t n) { \
    const float *s = src;                                                           \
    D *d = dst;                                                                     \
    for (size_t i = 0; i < n; i++) {                                                \
      float x = s[i] > lo ? s[i] : s[i] == s[i] ? lo : 0.0f;                        \
      bool large = x >= end;                                                        \
      D inside = (D)(large ? 0.0f : x);                                             \
      d[i] = large ? max : inside;                                                  \
    }                                                                               \
  }
LOOP(F32_to_BOOL, float, uint8_t, x != 0)
FROM_FLOAT(I8, int8_t, -128.0f, 128.0f, INT8_MAX)
FROM_FLOAT(I16, int16_t, -32768.0f, 32768.0f, INT16_MAX)
FROM_FLOAT(I32, int32_t, -0x1p31f, 0x1p31f, INT32_MAX)
FROM_FLOAT(U8, uint8_t, 0.0f, 256.0f, UINT8_MAX)
FROM_FLOAT(U16, uint16_t, 0.0f, 65536.0f, UINT16_MAX)
FROM_FLOAT(U32, uint32_t, 0.0f, 0x1p32f, UINT32_MAX)

#define ROW(from, id)                                                                    \
  [PM_##from] = {[PM_BOOL] = id##_to_bool, [PM_I8] = id##_to_8,   [PM_I16] = id##_to_16, \
                 [PM_I32] = id##_to_32,    [PM_U8] = id##_to_8,   [PM_U16] = id##_to_16, \
                 [PM_U32] = id##_to_32,    [PM_F32] = id##_to_f32}
#define INT_ROW(id) ROW(id, id)
static const loop loops[PM_DTYPE_COUNT][PM_DTYPE_COUNT] = {
    INT_ROW(BOOL),
    INT_ROW(I8),
    INT_ROW(I16),
    INT_ROW(I32),
    INT_ROW(U8),
    INT_ROW(U16),
    INT_ROW(U32),
    ROW(INT2, I8),
    ROW(UINT2, U8),
    ROW(INT4, I8),
    ROW(UINT4, U8),
    [PM_F32] =
        {
            [PM_BOOL] = F32_to_BOOL,
            [PM_I8] = F32_to_I8,
            [PM_I16] = F32_to_I16,
            [PM_I32] = F32_to_I32,
            [PM_U8] = F32_to_U8,
            [PM_U16] = F32_to_U16,
            [PM_U32] = F32_to_U32,
        },
};

/* ---- all pairs ---------------------------------------------------------------------------- */

static void to_float(pm_dtype from, const void *src, float *dst, size_t n) {
  switch (from) {
    case PM_F16: widen_f16(src, dst, n); break;
    case PM_BF16: widen_bf16(src, dst, n); break;
    case PM_F32: memcpy(dst, src, n * sizeof *dst); break;
    case PM_E2M1:
    case PM_E4M3:
    case PM_E5M2:
    case PM_E8M0:
      for (size_t i = 0; i < n; i++) dst[i] = pm_narrow_to_f32(from, ((const uint8_t *)src)[i]);
      break;
    default: loops[from][PM_F32](src, dst, n); break;
  }
}

static void from_float(pm_dtype to, const float *src, void *dst, size_t n) {
  switch (to) {
    case PM_F16: narrow_f16(src, dst, n); break;
    case PM_BF16: narrow_bf16(src, dst, n); break;
    case PM_E2M1:
    case PM_E4M3:
    case PM_E5M2:
    case PM_E8M0:
      for (size_t i = 0; i < n; i++) ((uint8_t *)dst)[i] = (uint8_t)pm_f32_to_narrow(to, src[i]);
      break;
    default: loops[PM_F32][to](src, dst, n); break;
  }
}

static void one_by_one(pm_dtype from, pm_dtype to, const char *src, char *dst, size_t n) {
  for (size_t i = 0; i < n; i++, src += pm_dtypes[from].bytes, dst += pm_dtypes[to].bytes)
    pm_store_scalar(to, dst, pm_convert_scalar(from, to, pm_load_scalar(from, src)));
}

void pm_convert_array(pm_dtype from, pm_dtype to, const void *src, void *dst, size_t n) {
  float block[BLOCK];
  if (n == 0) {
    return;
  } else if (from == to) {
    memcpy(dst, src, n * pm_dtypes[to].bytes);
  } else if (pm_dtypes[to].bits < 8) {
    one_by_one(from, to, src, dst, n);
  } else if (loops[from][to]) {
    loops[from][to](src, dst, n);
  } else if (to == PM_F32) {
    to_float(from, src, dst, n);
  } else if (from == PM_F32) {
    from_float(to, src, dst, n);
  } else if (to == PM_BF16 && (from == PM_I32 || from == PM_U32)) {
    one_by_one(from, to, src, dst, n);
  } else {
    const char *s = src;
    char *d = dst;
    for (size_t i = 0; i < n; i += BLOCK) {
      size_t k = n - i < BLOCK ? n - i : BLOCK;
      to_float(from, s + i * pm_dtypes[from].bytes, block, k);
      from_float(to, block, d + i * pm_dtypes[to].bytes, k);
    }
  }
}
