// Arithmetic of array elements and scalars. Integers wrap; in C++, signed overflow is undefined.

//! wrap_add
template <typename T> FN T wrap_add(T a, T b) { return (T)((u32)a + (u32)b); }

//! mul_rn
// a product that is rounded even if it is then added to something
FN f32 mul_rn(f32 a, f32 b) { return __fmul_rn(a, b); }

//! div_rn
// correctly rounded, whatever the compiler options for divisions
FN f32 div_rn(f32 a, f32 b) {
  f32 r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}

//! wrap_sub
template <typename T> FN T wrap_sub(T a, T b) { return (T)((u32)a - (u32)b); }

//! wrap_mul
template <typename T> FN T wrap_mul(T a, T b) { return (T)((u32)a * (u32)b); }

//! wrap_neg
// Written as ~a + 1. Of 0 - a, ptxas before 13.5 drops the sign where it makes one VIMNMX3 of two
// signed maxima or minima, and NVVM makes abs.s32 where a select gives -x if x < 0; see abs_int.
template <typename T> FN T wrap_neg(T a) {
  i32 r; asm("not.b32 %0, %1;\n\tadd.s32 %0, %0, 1;" : "=&r"(r) : "r"((i32)a)); return (T)r;
}

//! complement
// Not ~a, of which NVVM makes 0 - a where 1 is added; see wrap_neg.
FN i32 complement(i32 a) { i32 r; asm("not.b32 %0, %1;" : "=r"(r) : "r"(a)); return r; }

//! shift_left
template <typename T> FN T shift_left(T a, T b) { return (T)((u32)a << (u32)b); }

//! div_int
// rounds toward zero. In C++, x / 0 is undefined, and the compiler would conclude that padding,
// which is 0, never is a divisor; here the result is an arbitrary number.
FN i32 div_bits(i32 a, i32 b) {
  i32 r; asm("div.s32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
FN u32 div_bits(u32 a, u32 b) {
  u32 r; asm("div.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
template <typename T> FN T div_int(T a, T b) { return (T)div_bits(a, b); } // u8, u16 promote to i32

//! rem_int
FN i32 rem_bits(i32 a, i32 b) {
  i32 r; asm("rem.s32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
FN u32 rem_bits(u32 a, u32 b) {
  u32 r; asm("rem.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
template <typename T> FN T rem_int(T a, T b) { return (T)rem_bits(a, b); }

//! abs_int
// The magnitude of the least i32 is itself. Not abs.s32: ptxas before 13.1 takes that for no less
// than 0, and leaves out the sign of a remainder.
template <typename T> FN T abs_int(T a) {
  i32 minus, r;
  asm("not.b32 %0, %1;\n\tadd.s32 %0, %0, 1;" : "=&r"(minus) : "r"((i32)a));
  asm("max.s32 %0, %1, %2;" : "=r"(r) : "r"((i32)a), "r"(minus));
  return (T)r;
}

//! sign_int
template <typename T> FN T sign_int(T a) { return (T)((a > 0) - (a < 0)); }

//! sign_f32
// zero of either sign gives +0; NaN gives 1 with its own sign
FN f32 sign_f32(f32 x) { return x == 0.0f ? 0.0f : copysignf(1.0f, x); }

//! leading_zeros
template <typename T> FN T leading_zeros(T x) {
  constexpr int unused = 32 - 8 * (int)sizeof(T);
  return (T)(__clz((int)((u32)x & 0xffffffffu >> unused)) - unused);
}

//! bit_count
template <typename T> FN T bit_count(T x) {
  return (T)__popc((u32)x & 0xffffffffu >> (32 - 8 * (int)sizeof(T)));
}

//! min_int
template <typename T> FN T min_int(T a, T b) { return b < a ? b : a; }

//! max_int
template <typename T> FN T max_int(T a, T b) { return a < b ? b : a; }

//! min_f32
// NaN propagates, -0 is less than +0
FN f32 min_f32(f32 a, f32 b) {
  f32 r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}

//! max_f32
FN f32 max_f32(f32 a, f32 b) {
  f32 r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}

//! exp2_approx
FN f32 exp2_approx(f32 x) { f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! exp_approx
FN f32 exp_approx(f32 x) { return exp2_approx(x * 1.4426950408889634f); }

//! log2_approx
FN f32 log2_approx(f32 x) { f32 r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! log_approx
FN f32 log_approx(f32 x) { return log2_approx(x) * 0.6931471805599453f; }

//! sin_approx
FN f32 sin_approx(f32 x) { f32 r; asm("sin.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! cos_approx
FN f32 cos_approx(f32 x) { f32 r; asm("cos.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! tanh_approx
FN f32 tanh_approx(f32 x) { f32 r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! rsqrt_approx
FN f32 rsqrt_approx(f32 x) { f32 r; asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! rcp_approx
// accurate to 1 ulp; subnormals are treated as 0
FN f32 rcp_approx(f32 x) { f32 r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

//! opaque
// returns x, but the compiler can neither see that nor move the computation across
FN u32 opaque_bits(u32 x) { asm volatile("" : "+r"(x) : : "memory"); return x; }
template <typename T> FN T opaque(T x) { T r; from_bits(r, opaque_bits(bits_of(x))); return r; }
