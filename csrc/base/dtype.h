/* Element types and their conversions. The table is dtypes.def; conversions round to nearest even
 * unless said; float to int saturates and gives 0 for NaN. The rules are in docs/arrays.md. */
#ifndef PM_DTYPE_H
#define PM_DTYPE_H

#include "base.h"

typedef enum pm_dtype {
#define PM_DTYPE(id, text, bits, class, cuda, dlpack, short, numpy, wide, torch, xla, map, group) \
  PM_##id,
#include "dtypes.def"
#undef PM_DTYPE
  PM_DTYPE_COUNT
} pm_dtype;

typedef enum pm_dclass { PM_CLASS_BOOL, PM_CLASS_INT, PM_CLASS_UINT, PM_CLASS_FLOAT } pm_dclass;

typedef struct pm_dtype_info {
  const char *text, *cuda, *short_name, *numpy, *wide;
  uint8_t bits, bytes, class, dlpack, torch, xla, group;
} pm_dtype_info;

extern const pm_dtype_info pm_dtypes[PM_DTYPE_COUNT];

static inline bool pm_is_float(pm_dtype t) { return pm_dtypes[t].class == PM_CLASS_FLOAT; }
static inline bool pm_is_int(pm_dtype t) {
  return pm_dtypes[t].class == PM_CLASS_INT || pm_dtypes[t].class == PM_CLASS_UINT;
}
/* Is it a float that is computed with as f32? */
static inline bool pm_is_narrow_float(pm_dtype t) {
  return pm_is_float(t) && pm_dtypes[t].bits < 32;
}
static inline bool pm_is_small_int(pm_dtype t) { return !pm_is_float(t) && pm_dtypes[t].bits < 8; }
static inline bool pm_is_small_float(pm_dtype t) {
  return pm_is_float(t) && pm_dtypes[t].bits < 16;
}
/* Is it one that NumPy does not have itself, but ml_dtypes? */
static inline bool pm_is_extended(pm_dtype t) { return !*pm_dtypes[t].numpy; }
int pm_dtype_find(const char *text); /* -1: no such dtype */

float pm_f16_to_f32(uint16_t x);
uint16_t pm_f32_to_f16(float x);
static inline float pm_bf16_to_f32(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
uint16_t pm_f32_to_bf16(float x);
/* of the 16-bit and smaller floats; what overflows one of 8 bits becomes its greatest */
float pm_narrow_to_f32(pm_dtype t, uint16_t x);
uint16_t pm_f32_to_narrow(pm_dtype t, float x);

/* The dtype of this class and width that C's numbers have; of narrow floats another one may come
 * first. */
pm_dtype pm_dtype_of(pm_dclass class, int bits);
/* What memory that was never written reads as: NaN, the greatest integer, true. */
uint32_t pm_unwritten(pm_dtype t);

/* Scalars travel as a double (floats, exact for all of them) or an int64 (all others). */
typedef union pm_scalar {
  int64_t i;
  double f;
} pm_scalar;
pm_scalar pm_load_scalar(pm_dtype t, const void *p);
void pm_store_scalar(pm_dtype t, void *p, pm_scalar v); /* wraps ints, rounds floats once */
pm_scalar pm_convert_scalar(pm_dtype from, pm_dtype to, pm_scalar v);
/* n elements of less than 8 bits, a byte for each, to and from as many bytes as hold their bits; n
 * is a multiple of how many share one */
void pm_pack_bytes(pm_dtype t, const void *src, void *dst, size_t n);
void pm_unpack_bytes(pm_dtype t, const void *src, void *dst, size_t n);
/* n elements, contiguous, no overlap */
void pm_convert_array(pm_dtype from, pm_dtype to, const void *src, void *dst, size_t n);

#endif
