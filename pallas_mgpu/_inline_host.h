/* Device functions for `inline_cuda` sources that run on the CPU interpreter: one lane after the
 * other, as plain C++.
 *
 * The subset of the catalogue in csrc/cuda/device/ that needs no other lane and no tensor core,
 * with the same names and meanings. Whatever else a source calls does not compile, and is refused.
 * Accesses are checked against the array, or all of the block's shared memory; one outside throws.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <stdexcept>
#include <type_traits>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef float f32;
#define FN static inline

struct Index {
  u32 x, y, z;
};
struct Where {
  u32 thread, warp, block[3], grid[3];
  char *smem;
  u64 smem_bytes;
  char message[256];
};
static thread_local Where *where;
static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local i32 *arrivals;
/* addresses of barriers: this, and the number of the argument */
enum : u32 { BARRIERS = 0xb0000000u };

/* ---- types */

FN f32 f32_bits(u32 b) {
  f32 r;
  memcpy(&r, &b, 4);
  return r;
}
FN u32 bits_of(f32 x) {
  u32 r;
  memcpy(&r, &x, 4);
  return r;
}
FN void from_bits(f32 &x, u32 b) { x = f32_bits(b); }
#define BITS_OF_INT(T)                                                \
  FN u32 bits_of(T x) { return (u32)(std::make_unsigned<T>::type)x; } \
  FN void from_bits(T &x, u32 b) { x = (T)b; }
// clang-format off
BITS_OF_INT(i8) BITS_OF_INT(u8) BITS_OF_INT(i16) BITS_OF_INT(u16) BITS_OF_INT(i32) BITS_OF_INT(u32)
FN u32 bits_of(bool x) { return x; }
// clang-format on
FN f32 __uint_as_float(u32 x) { return f32_bits(x); }
FN u32 __float_as_uint(f32 x) { return bits_of(x); }

/* x rounded to nearest even at that many bits of significand; e_min: of the least normal number */
FN f32 rounded(f32 x, int significand, int e_min) {
  if (x == 0 || isnan(x) || isinf(x)) return x;
  const int e = ilogbf(x) < e_min ? e_min : ilogbf(x);
  return (f32)ldexp(nearbyint(ldexp((double)x, significand - 1 - e)), e - significand + 1);
}

struct f16 {
  u16 bits;
};
FN u32 bits_of(f16 x) { return x.bits; }
FN void from_bits(f16 &x, u32 b) { x.bits = (u16)b; }
FN f32 cvt_f32(f16 x) {
  const int e = x.bits >> 10 & 31, m = x.bits & 1023;
  const f32 size =
      e == 31 ? (m ? NAN : INFINITY) : ldexpf((f32)(e ? m | 1024 : m), (e ? e : 1) - 25);
  return x.bits >> 15 ? -size : size;
}
FN f16 cvt_f16(f32 x) {
  const u16 sign = (u16)(bits_of(x) >> 31 << 15);
  x = fabsf(rounded(x, 11, -14));
  if (isnan(x)) return f16{0x7fff};
  if (x > 65504.0f) return f16{(u16)(sign | 0x7c00)};
  if (x < 6.103515625e-05f) return f16{(u16)(sign | (u16)ldexpf(x, 24))};
  const int e = ilogbf(x);
  return f16{(u16)(sign | ((e + 15) << 10) | ((u16)ldexpf(x, 10 - e) & 1023))};
}
struct bf16 {
  u16 bits;
};
FN u32 bits_of(bf16 x) { return x.bits; }
FN void from_bits(bf16 &x, u32 b) { x.bits = (u16)b; }
FN f32 cvt_f32(bf16 x) { return f32_bits((u32)x.bits << 16); }
FN bf16 cvt_bf16(f32 x) {
  if (isnan(x)) return bf16{0x7fff};
  const u32 b = bits_of(x);
  return bf16{(u16)((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
#define ARITHMETIC(T)                                                   \
  FN T operator-(T x) { return T{(u16)(x.bits ^ 0x8000)}; }             \
  FN T operator+(T a, T b) { return cvt_##T(cvt_f32(a) + cvt_f32(b)); } \
  FN T operator-(T a, T b) { return cvt_##T(cvt_f32(a) - cvt_f32(b)); } \
  FN T operator*(T a, T b) { return cvt_##T(cvt_f32(a) * cvt_f32(b)); }
ARITHMETIC(f16) ARITHMETIC(bf16) struct e4m3 { u8 bits; };
struct e5m2 {
  u8 bits;
};
struct e8m0 {
  u8 bits;
};
struct e2m1 {
  u8 bits;
};

/* ---- arithmetic */

template <typename T>
FN T wrap_add(T a, T b) {
  return (T)((u32)a + (u32)b);
}
template <typename T>
FN T wrap_sub(T a, T b) {
  return (T)((u32)a - (u32)b);
}
template <typename T>
FN T wrap_mul(T a, T b) {
  return (T)((u32)a * (u32)b);
}
template <typename T>
FN T wrap_neg(T a) {
  return (T)(0u - (u32)a);
}
FN i32 complement(i32 a) { return -1 - a; }
template <typename T>
FN T shift_left(T a, T b) {
  return (T)((u32)a << ((u32)b & 31));
}
template <typename T>
FN T div_int(T a, T b) {
  return b ? (T)((i64)a / (i64)b) : (T)-1;
}
template <typename T>
FN T rem_int(T a, T b) {
  return b ? (T)((i64)a % (i64)b) : a;
}
template <typename T>
FN T abs_int(T a) {
  return a < 0 ? (T)(0u - (u32)a) : a;
}
template <typename T>
FN T sign_int(T a) {
  return (T)((a > 0) - (a < 0));
}
template <typename T>
FN T min_int(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
FN T max_int(T a, T b) {
  return a < b ? b : a;
}
FN int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
FN int __popc(u32 x) { return __builtin_popcount(x); }
template <typename T>
FN T leading_zeros(T x) {
  return (T)(__clz((int)(bits_of(x))) - (32 - 8 * (int)sizeof(T)));
}
template <typename T>
FN T bit_count(T x) {
  return (T)__popc(bits_of(x));
}
FN f32 sign_f32(f32 x) { return x == 0.0f ? 0.0f : copysignf(1.0f, x); }
FN f32 min_f32(f32 a, f32 b) {
  return isnan(a) || isnan(b) ? NAN : a < b || (a == b && signbit(a)) ? a : b;
}
FN f32 max_f32(f32 a, f32 b) {
  return isnan(a) || isnan(b) ? NAN : a > b || (a == b && !signbit(a)) ? a : b;
}
FN f32 mul_rn(f32 a, f32 b) { return a * b; }
FN f32 div_rn(f32 a, f32 b) { return a / b; }
FN f32 __fmul_rn(f32 a, f32 b) { return a * b; }
FN f32 __fadd_rn(f32 a, f32 b) { return a + b; }
FN f32 __fdiv_rn(f32 a, f32 b) { return a / b; }
FN f32 __fmaf_rn(f32 a, f32 b, f32 c) { return fmaf(a, b, c); }
FN f32 rsqrtf(f32 x) { return (f32)(1 / sqrt((double)x)); }
FN f32 flushed(f32 x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
FN f32 exp2_approx(f32 x) { return flushed(exp2f(flushed(x))); }
FN f32 exp_approx(f32 x) { return exp2_approx(x * 1.4426950408889634f); }
FN f32 log2_approx(f32 x) { return log2f(flushed(x)); }
FN f32 log_approx(f32 x) { return log2_approx(x) * 0.6931471805599453f; }
FN f32 sin_approx(f32 x) { return sinf(x); }
FN f32 cos_approx(f32 x) { return cosf(x); }
FN f32 tanh_approx(f32 x) { return tanhf(x); }
FN f32 rsqrt_approx(f32 x) { return rsqrtf(x); }
FN f32 rcp_approx(f32 x) { return flushed(1 / flushed(x)); }
template <typename T>
FN T opaque(T x) {
  return x;
}
template <typename T>
FN T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
FN T max(T a, T b) {
  return a < b ? b : a;
}

/* ---- memory */

[[noreturn]] FN void outside(const char *what, i64 at, u64 bytes) {
  char text[256];
  snprintf(text, sizeof text, "%s byte %lld of %llu is accessed", what, at, bytes);
  throw std::out_of_range(text);
}
FN char *shared(u32 a, u64 bytes) {
  if (a + bytes > where->smem_bytes) outside("shared memory:", a, where->smem_bytes);
  return where->smem + a;
}
template <typename T, int N>
FN void ld_shared(T *d, u32 a) {
  memcpy((void *)d, shared(a, N * sizeof(T)), N * sizeof(T));
}
template <typename T, int N>
FN void st_shared(u32 a, const T *s) {
  memcpy(shared(a, N * sizeof(T)), (const void *)s, N * sizeof(T));
}

/* A pointer into an array in global memory. */
template <typename T>
struct Global {
  T *at, *low;
  u64 bytes;
  T *inside(i64 k, u64 n = 1) const {
    const i64 from = (const char *)(at + k) - (const char *)low;
    if (from < 0 || (u64)from + n * sizeof(T) > bytes) outside("an array:", from, bytes);
    return at + k;
  }
  template <typename I>
  T &operator[](I k) const {
    return *inside((i64)k);
  }
  T &operator*() const { return *inside(0); }
  template <typename I>
  Global operator+(I k) const {
    return {at + (i64)k, low, bytes};
  }
  template <typename I>
  Global operator-(I k) const {
    return {at - (i64)k, low, bytes};
  }
  template <typename I>
  Global &operator+=(I k) {
    at += (i64)k;
    return *this;
  }
  Global &operator++() {
    ++at;
    return *this;
  }
  operator Global<const T>() const { return {at, low, bytes}; }
};
template <typename T, int N, typename U>
FN void ld_global(T *d, Global<U> a) {
  memcpy((void *)d, (const void *)a.inside(0, N), N * sizeof(T));
}
template <typename T, int N>
FN void st_global(Global<T> a, const T *s) {
  memcpy((void *)a.inside(0, N), (const void *)s, N * sizeof(T));
}

/* Not at others than those the source was given. */
FN void mbarrier_arrive(u32 a) {
  if (a < BARRIERS || a >= BARRIERS + 64)
    throw std::out_of_range(
        "mbarrier_arrive: this address is none of the barriers among the arguments");
  arrivals[a - BARRIERS]++;
}
