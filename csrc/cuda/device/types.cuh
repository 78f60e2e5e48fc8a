// Fixed-size types. Every program contains them.

//! types
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef float f32;
#define FN __attribute__((unused)) static __device__ __forceinline__

//! TensorMap
struct __attribute__((aligned(64))) TensorMap { u64 opaque[16]; };

//! f32_bits
FN f32 f32_bits(u32 b) { return __uint_as_float(b); }

//! f16
struct f16 { u16 bits; };
FN u32 bits_of(f16 x) { return x.bits; }
FN void from_bits(f16& x, u32 b) { x.bits = (u16)b; }
FN f32 cvt_f32(f16 x) { f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r; }
FN f16 cvt_f16(f32 x) { f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }
FN f16 operator-(f16 x) { return f16{(u16)(x.bits ^ 0x8000)}; }
// one instruction, with the same result as rounding an f32 result once; .rn prevents fma fusion
FN f16 operator+(f16 a, f16 b) {
  f16 r; asm("add.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
}
FN f16 operator-(f16 a, f16 b) {
  f16 r; asm("sub.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
}
FN f16 operator*(f16 a, f16 b) {
  f16 r; asm("mul.rn.f16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
}

//! bf16
struct bf16 { u16 bits; };
FN u32 bits_of(bf16 x) { return x.bits; }
FN void from_bits(bf16& x, u32 b) { x.bits = (u16)b; }
FN f32 cvt_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
FN bf16 cvt_bf16(f32 x) {
  bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r;
}
FN bf16 operator-(bf16 x) { return bf16{(u16)(x.bits ^ 0x8000)}; }
FN bf16 operator+(bf16 a, bf16 b) {
#ifdef HAS_BF16
  bf16 r; asm("add.rn.bf16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
#else
  bf16 r; // a * 1 + b
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(r.bits) : "h"(a.bits), "h"((u16)0x3f80), "h"(b.bits));
  return r;
#endif
}
FN bf16 operator-(bf16 a, bf16 b) {
#ifdef HAS_BF16
  bf16 r; asm("sub.rn.bf16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
#else
  bf16 r; // b * -1 + a
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(r.bits) : "h"(b.bits), "h"((u16)0xbf80), "h"(a.bits));
  return r;
#endif
}
FN bf16 operator*(bf16 a, bf16 b) {
#ifdef HAS_BF16
  bf16 r; asm("mul.rn.bf16 %0, %1, %2;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits)); return r;
#else
  bf16 r; // a * b - 0
  asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(r.bits) : "h"(a.bits), "h"(b.bits), "h"((u16)0x8000));
  return r;
#endif
}

//! round_to_8_bits
// rounds to the nearest float with `digits` bits of mantissa and exponent bias `bias`; saturates
FN u32 round_to_8_bits(f32 x, i32 digits, i32 bias, u32 greatest) {
  const u32 u = __float_as_uint(x), sign = u >> 24 & 0x80, drop = 23 - digits;
  u32 m = u & 0x7fffffffu;
  if (m > 0x7f800000u) return 0x7f;
  if (m < (u32)(128 - bias) << 23) { // subnormal: a count of units
    return sign | __float2uint_rn(__uint_as_float(m)
                                  * __uint_as_float((u32)(126 + bias + digits) << 23));
  }
  m += (1u << (drop - 1)) - 1 + (m >> drop & 1);
  return sign | min((m >> drop) - ((u32)(127 - bias) << digits), greatest);
}

//! e4m3
// Conversions process pairs; the first element in memory is the last operand of the instruction.
// They saturate; NaN is 0x7f.
struct e4m3 { u8 bits; };
FN u32 bits_of(e4m3 x) { return x.bits; }
FN void from_bits(e4m3& x, u32 b) { x.bits = (u8)b; }
FN f32 cvt_f32(e4m3 x) {
#ifdef HAS_FP8
  u32 w; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(w) : "h"((u16)x.bits));
  return cvt_f32(f16{(u16)w});
#else
  // the bits of an f16 with a smaller exponent bias
  if ((x.bits & 127) == 127) return __uint_as_float(0x7fffffffu);
  return cvt_f32(f16{(u16)((x.bits & 128) << 8 | (x.bits & 127) << 7)}) * 256.0f;
#endif
}
FN e4m3 cvt_e4m3(f32 x) {
#ifdef HAS_FP8
  u16 w; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(0.0f), "f"(x));
  return e4m3{(u8)w};
#else
  return e4m3{(u8)round_to_8_bits(x, 3, 7, 0x7e)};
#endif
}

//! e5m2
struct e5m2 { u8 bits; };
FN u32 bits_of(e5m2 x) { return x.bits; }
FN void from_bits(e5m2& x, u32 b) { x.bits = (u8)b; }
FN f32 cvt_f32(e5m2 x) {
#ifdef HAS_FP8
  u32 w; asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(w) : "h"((u16)x.bits));
  return cvt_f32(f16{(u16)w});
#else
  return cvt_f32(f16{(u16)(x.bits << 8)});
#endif
}
FN e5m2 cvt_e5m2(f32 x) {
#ifdef HAS_FP8
  u16 w; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(w) : "f"(0.0f), "f"(x));
  return e5m2{(u8)w};
#else
  return e5m2{(u8)round_to_8_bits(x, 2, 15, 0x7b)};
#endif
}

//! e8m0
// 2 to the (bits - 127); NaN is 0xff. Rounds up and saturates; negative numbers become NaN.
struct e8m0 { u8 bits; };
FN u32 bits_of(e8m0 x) { return x.bits; }
FN void from_bits(e8m0& x, u32 b) { x.bits = (u8)b; }
FN f32 cvt_f32(e8m0 x) {
  return __uint_as_float(x.bits == 255 ? 0x7fffffffu : x.bits ? (u32)x.bits << 23 : 0x400000u);
}
FN e8m0 cvt_e8m0(f32 x) {
  const u32 b = __float_as_uint(x), up = (b + 0x7fffffu) >> 23; // the exponent, rounded up
  if (!(x >= 0.0f)) return e8m0{255};
  return e8m0{(u8)(b << 1 <= 0x800000u ? 0 : min(up, 254u))};
}
FN e8m0 exponent_e8m0(e8m0 x, e8m0 y, i32 sum) {
  return e8m0{(u8)(x.bits == 255 || y.bits == 255 ? 255 : min(max(sum, 0), 254))};
}
FN e8m0 mul_e8m0(e8m0 x, e8m0 y) { return exponent_e8m0(x, y, x.bits + y.bits - 127); }
FN e8m0 div_e8m0(e8m0 x, e8m0 y) { return exponent_e8m0(x, y, x.bits - y.bits + 127); }

//! e2m1
// 4 bits: a sign and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounds to nearest, ties to the even
// index, and saturates; NaN becomes 6.
struct e2m1 { u8 bits; };
FN u32 bits_of(e2m1 x) { return x.bits; }
FN void from_bits(e2m1& x, u32 b) { x.bits = (u8)(b & 15); }
FN f32 cvt_f32(e2m1 x) { // its bits are those of an f16 with a larger exponent
  return cvt_f32(f16{(u16)((x.bits & 8) << 12 | (x.bits & 7) << 9)}) * 16384.0f;
}
FN e2m1 cvt_e2m1(f32 x) {
  const f32 a = x != x ? 6.0f : fabsf(x);
  const i32 half_units = __float2int_rn(fminf(a, 6.0f) * 2.0f); // exact below 2
  const i32 k = a < 2.0f ? half_units : a < 4.0f ? 2 + __float2int_rn(a)
                                                 : 4 + __float2int_rn(fminf(a, 6.0f) * 0.5f);
  return e2m1{(u8)(k | (x < 0.0f || __float_as_uint(x) == 0x80000000u ? 8 : 0))};
}

//! unpack_e2m1
FN void unpack_e2m1(e2m1* d, u8 x) { d[0] = e2m1{(u8)(x & 15)}; d[1] = e2m1{(u8)(x >> 4)}; }

//! cvt_rn_e4m3x4
// four neighbours, the first one in the low byte
FN u32 cvt_rn_e4m3x4(f32 x0, f32 x1, f32 x2, f32 x3) {
#ifdef HAS_FP8
  u32 w; asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;"
             " cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
             : "=r"(w) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return w;
#else
  return bits_of(cvt_e4m3(x0)) | bits_of(cvt_e4m3(x1)) << 8 | bits_of(cvt_e4m3(x2)) << 16 |
         bits_of(cvt_e4m3(x3)) << 24;
#endif
}

//! cvt_e4m3x2
FN void cvt_e4m3x2(e4m3* d, f32 lo, f32 hi) {
#ifdef HAS_FP8
  u16 w; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(hi), "f"(lo));
  d[0] = e4m3{(u8)w}; d[1] = e4m3{(u8)(w >> 8)};
#else
  d[0] = cvt_e4m3(lo);
  d[1] = cvt_e4m3(hi);
#endif
}

//! cvt_rn_e5m2x4
// four neighbours, the first one in the low byte
FN u32 cvt_rn_e5m2x4(f32 x0, f32 x1, f32 x2, f32 x3) {
#ifdef HAS_FP8
  u32 w; asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;"
             " cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3; mov.b32 %0, {lo, hi}; }"
             : "=r"(w) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return w;
#else
  return bits_of(cvt_e5m2(x0)) | bits_of(cvt_e5m2(x1)) << 8 | bits_of(cvt_e5m2(x2)) << 16 |
         bits_of(cvt_e5m2(x3)) << 24;
#endif
}

//! cvt_e5m2x2
FN void cvt_e5m2x2(e5m2* d, f32 lo, f32 hi) {
#ifdef HAS_FP8
  u16 w; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(w) : "f"(hi), "f"(lo));
  d[0] = e5m2{(u8)w}; d[1] = e5m2{(u8)(w >> 8)};
#else
  d[0] = cvt_e5m2(lo);
  d[1] = cvt_e5m2(hi);
#endif
}

//! pair
template <typename T> FN u32 pair(T lo, T hi) { return bits_of(lo) | bits_of(hi) << 16; }

//! unpair
template <typename T> FN void unpair(T* d, u32 w) { from_bits(d[0], w); from_bits(d[1], w >> 16); }

//! cvt_rn_f16x2
// two conversions in one instruction
FN u32 cvt_rn_f16x2(f32 lo, f32 hi) {
  u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo)); return w;
}

//! cvt_f16x2
FN void cvt_f16x2(f16* d, f32 lo, f32 hi) {
  const u32 w = cvt_rn_f16x2(lo, hi);
  unpair(d, w);
}

//! cvt_rn_bf16x2
FN u32 cvt_rn_bf16x2(f32 lo, f32 hi) {
  u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo)); return w;
}

//! cvt_bf16x2
FN void cvt_bf16x2(bf16* d, f32 lo, f32 hi) {
  const u32 w = cvt_rn_bf16x2(lo, hi);
  unpair(d, w);
}

//! add_x2
// Two neighbours in one instruction: otherwise ptxas pairs other elements and separates them again.
FN void add_x2(f16* d, f16 a0, f16 a1, f16 b0, f16 b1) {
  u32 w; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}
FN void add_x2(bf16* d, bf16 a0, bf16 a1, bf16 b0, bf16 b1) {
#ifdef HAS_BF16
  u32 w; asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
#else
  d[0] = a0 + b0;
  d[1] = a1 + b1;
#endif
}

//! sub_x2
FN void sub_x2(f16* d, f16 a0, f16 a1, f16 b0, f16 b1) {
  u32 w; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}
FN void sub_x2(bf16* d, bf16 a0, bf16 a1, bf16 b0, bf16 b1) {
#ifdef HAS_BF16
  u32 w; asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
#else
  d[0] = a0 - b0;
  d[1] = a1 - b1;
#endif
}

//! mul_x2
FN void mul_x2(f16* d, f16 a0, f16 a1, f16 b0, f16 b1) {
  u32 w; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}
FN void mul_x2(bf16* d, bf16 a0, bf16 a1, bf16 b0, bf16 b1) {
#ifdef HAS_BF16
  u32 w; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
#else
  d[0] = a0 * b0;
  d[1] = a1 * b1;
#endif
}

//! min_x2
// NaN propagates, -0 is less than +0
FN void min_x2(f16* d, f16 a0, f16 a1, f16 b0, f16 b1) {
  u32 w; asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}
FN void min_x2(bf16* d, bf16 a0, bf16 a1, bf16 b0, bf16 b1) {
  u32 w; asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}

//! max_x2
// NaN propagates, -0 is less than +0
FN void max_x2(f16* d, f16 a0, f16 a1, f16 b0, f16 b1) {
  u32 w; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}
FN void max_x2(bf16* d, bf16 a0, bf16 a1, bf16 b0, bf16 b1) {
  u32 w; asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));
  unpair(d, w);
}

//! cvt_from_e4m3x2
FN u32 e4m3_pair(e4m3 lo, e4m3 hi) {
#ifdef HAS_FP8
  u32 w; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(w) : "h"((u16)(lo.bits | hi.bits << 8)));
  return w;
#else
  return pair(cvt_f16(cvt_f32(lo)), cvt_f16(cvt_f32(hi)));
#endif
}
FN void cvt_from_e4m3x2(f16* d, e4m3 lo, e4m3 hi) {
  const u32 w = e4m3_pair(lo, hi); unpair(d, w);
}
FN void cvt_from_e4m3x2(f32* d, e4m3 lo, e4m3 hi) {
  const u32 w = e4m3_pair(lo, hi); d[0] = cvt_f32(f16{(u16)w}); d[1] = cvt_f32(f16{(u16)(w >> 16)});
}
FN void cvt_from_e4m3x2(bf16* d, e4m3 lo, e4m3 hi) {
  f32 f[2]; cvt_from_e4m3x2(f, lo, hi); cvt_bf16x2(d, f[0], f[1]);
}

//! cvt_from_e5m2x2
FN u32 e5m2_pair(e5m2 lo, e5m2 hi) {
#ifdef HAS_FP8
  u32 w; asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(w) : "h"((u16)(lo.bits | hi.bits << 8)));
  return w;
#else
  return pair(cvt_f16(cvt_f32(lo)), cvt_f16(cvt_f32(hi)));
#endif
}
FN void cvt_from_e5m2x2(f16* d, e5m2 lo, e5m2 hi) {
  const u32 w = e5m2_pair(lo, hi); unpair(d, w);
}
FN void cvt_from_e5m2x2(f32* d, e5m2 lo, e5m2 hi) {
  const u32 w = e5m2_pair(lo, hi); d[0] = cvt_f32(f16{(u16)w}); d[1] = cvt_f32(f16{(u16)(w >> 16)});
}
FN void cvt_from_e5m2x2(bf16* d, e5m2 lo, e5m2 hi) {
  f32 f[2]; cvt_from_e5m2x2(f, lo, hi); cvt_bf16x2(d, f[0], f[1]);
}

//! cvt_int_to_bf16
// conversion through f32 would round twice
FN bf16 cvt_int_to_bf16(i32 x) {
#ifdef HAS_BF16
  bf16 r; asm("cvt.rn.bf16.s32 %0, %1;" : "=h"(r.bits) : "r"(x)); return r;
#else
  const f32 f = __int2float_rz(x); // rounded to odd
  return cvt_bf16(__uint_as_float(__float_as_uint(f) | (__float2int_rz(f) != x)));
#endif
}
FN bf16 cvt_int_to_bf16(u32 x) {
#ifdef HAS_BF16
  bf16 r; asm("cvt.rn.bf16.u32 %0, %1;" : "=h"(r.bits) : "r"(x)); return r;
#else
  const f32 f = __uint2float_rz(x); // rounded to odd
  return cvt_bf16(__uint_as_float(__float_as_uint(f) | (__float2uint_rz(f) != x)));
#endif
}

//! cvt_int
// rounds toward zero, saturates; NaN becomes 0
template <typename T> FN T cvt_int(f32 x) {
  constexpr bool is_signed = (T)-1 < (T)1;
  constexpr u32 top = 0xffffffffu >> (32 - 8 * sizeof(T) + is_signed);
  if constexpr (is_signed) {
    return (T)max(-(i32)top - 1, min((i32)top, __float2int_rz(x)));
  } else {
    return (T)min(top, __float2uint_rz(x));
  }
}

//! wrap_s4
// 4 bits in an i8 or u8
FN i8 wrap_s4(u32 x) { return (i8)((i32)(x << 28) >> 28); }

//! wrap_u4
FN u8 wrap_u4(u32 x) { return (u8)(x & 15); }

//! wrap_s2
// 2 bits in an i8 or u8
FN i8 wrap_s2(u32 x) { return (i8)((i32)(x << 30) >> 30); }

//! wrap_u2
FN u8 wrap_u2(u32 x) { return (u8)(x & 3); }

//! cvt_s2
FN i8 cvt_s2(f32 x) { return (i8)max(-2, min(1, __float2int_rz(x))); }

//! cvt_u2
FN u8 cvt_u2(f32 x) { return (u8)min(3u, __float2uint_rz(x)); }

//! unpack_s2
// two 2-bit elements share the low half of a byte
FN void unpack_s2(i8* d, u8 x) {
  d[0] = (i8)((i32)(x << 30) >> 30); d[1] = (i8)((i32)(x << 28) >> 30);
}

//! unpack_u2
FN void unpack_u2(u8* d, u8 x) { d[0] = x & 3; d[1] = x >> 2 & 3; }

//! pack_2
FN u8 pack_2(u32 lo, u32 hi) { return (u8)((lo & 3) | (hi & 3) << 2); }

//! cvt_s4
FN i8 cvt_s4(f32 x) { return (i8)max(-8, min(7, __float2int_rz(x))); }

//! cvt_u4
FN u8 cvt_u4(f32 x) { return (u8)min(15u, __float2uint_rz(x)); }

//! unpack_s4
// two 4-bit elements share a byte; the first one is the low half
FN void unpack_s4(i8* d, u8 x) { d[0] = wrap_s4(x); d[1] = (i8)((i8)x >> 4); }

//! unpack_u4
FN void unpack_u4(u8* d, u8 x) { d[0] = x & 15; d[1] = x >> 4; }

//! pack_4
FN u8 pack_4(u32 lo, u32 hi) { return (u8)((lo & 15) | hi << 4); }

//! bits_of
FN u32 bits_of(f32 x) { return __float_as_uint(x); }
template <typename T> FN u32 bits_of(T x) {
  return sizeof(T) == 1 ? (u8)x : sizeof(T) == 2 ? (u16)x : (u32)x;
}

//! pack_nibbles
// packs eight 4-bit elements into a word
template <typename T> FN void pack_nibbles(u32* w, const T* x) {
  *w = 0;
  #pragma unroll
  for (int k = 0; k < 8; k++) *w |= (bits_of(x[k]) & 15) << (4 * k);
}

//! from_bits
FN void from_bits(f32& x, u32 b) { x = __uint_as_float(b); }
template <typename T> FN void from_bits(T& x, u32 b) { x = (T)(sizeof(T) == 1 ? (u8)b : b); }

//! bitcast
template <typename T, typename S> FN T bitcast(S x) { T r; from_bits(r, bits_of(x)); return r; }
