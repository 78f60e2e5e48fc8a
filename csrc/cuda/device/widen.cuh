// Conversion of small integers to floats, a word at a time, without the slow conversion
// instructions. The bits of an integer n become the low mantissa bits of a power of two P whose
// last mantissa bit is worth 1, which gives P + n; then P is subtracted. All steps are exact.
// Signed integers are first made positive by flipping the highest bit, which adds half the range.

//! bits_under
// (x & mask) ^ one, in one instruction
FN u32 bits_under(u32 x, u32 mask, u32 one) {
  u32 r; asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(x), "r"(mask), "r"(one)); return r;
}

//! bf16_of_s8
// Of bytes 0 and 1, or 2 and 3, of w. bf16 has 7 mantissa bits, so that under a byte of 0x41 the
// sign bit is the lowest one of the exponent: 8 + (the low bits) / 16, or twice that. r, 16 or 8,
// makes it 128 + (the low bits), and 128 or 256, 384 - 16 r, is subtracted. Two of these four
// instructions leave those units alone that limit products with narrow operands, and one register
// has all constants that do not fit into instructions.
FN u32 bf16_of_s8(u32 w, bool upper) {
  const u32 k = 0x41804180u, p = __byte_perm(w, k, upper ? 0x5352 : 0x5150);
  u32 r;
  asm("{ .reg .b32 t; fma.rn.bf16x2 t, %1, %3, %4; fma.rn.bf16x2 %0, %2, %1, t; }"
      : "=r"(r) : "r"(bits_under(p, 0x00800080u, k)), "r"(p), "r"(k), "r"(0xc3c0c3c0u));
  return r;
}

//! cvt_from_s8x4_apart
// Of bytes that are not together in a word, but two in a register.
FN void cvt_from_s8x4_apart(bf16* d, const i8* x) {
  u32 r[2];
  #pragma unroll
  for (int k = 0; k < 2; k++) {
    const u32 pair = (u8)x[2 * k] | (u32)(u8)x[2 * k + 1] << 8;
    r[k] = bf16_of_s8(pair, false);
  }
  unpack<bf16, 4>(d, r);
}

//! cvt_from_s8x4
// f16: 1024 + (x + 128)
FN void cvt_from_s8x4(f16* d, const i8* x) {
  u32 w, r[2];
  pack<i8, 4>(&w, x);
  w ^= 0x80808080u;
  const u32 p[2] = {__byte_perm(w, 0x64646464u, 0x4140), __byte_perm(w, 0x64646464u, 0x4342)};
  #pragma unroll
  for (int k = 0; k < 2; k++)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r[k]) : "r"(p[k]), "r"(0x64806480u));
  unpack<f16, 4>(d, r);
}
FN void cvt_from_s8x4(bf16* d, const i8* x) {
  u32 w;
  pack<i8, 4>(&w, x);
  const u32 r[2] = {bf16_of_s8(w, false), bf16_of_s8(w, true)};
  unpack<bf16, 4>(d, r);
}
// f32: 2^23 + (x + 128)
FN void cvt_from_s8x4(f32* d, const i8* x) {
  u32 w;
  pack<i8, 4>(&w, x);
  w ^= 0x80808080u;
  #pragma unroll
  for (int k = 0; k < 4; k++)
    d[k] = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7650 | k)) - 8388736.0f;
}

//! cvt_from_u8x4
FN void cvt_from_u8x4(f16* d, const u8* x) {
  u32 w, r[2];
  pack<u8, 4>(&w, x);
  const u32 p[2] = {__byte_perm(w, 0x64646464u, 0x4140), __byte_perm(w, 0x64646464u, 0x4342)};
  #pragma unroll
  for (int k = 0; k < 2; k++)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r[k]) : "r"(p[k]), "r"(0x64006400u));
  unpack<f16, 4>(d, r);
}
// 128 + (the low bits) - 256, plus 128 + (the highest bit)
FN void cvt_from_u8x4(bf16* d, const u8* x) {
  u32 w, r[2];
  pack<u8, 4>(&w, x);
  #pragma unroll
  for (int k = 0; k < 2; k++) {
    const u32 p = __byte_perm(w, 0, k ? 0x4342 : 0x4140);
#ifdef HAS_BF16
    asm("{ .reg .b32 t; sub.rn.bf16x2 t, %1, %3; add.rn.bf16x2 %0, t, %2; }"
        : "=r"(r[k])
        : "r"(bits_under(p, 0x007f007fu, 0x43004300u)),
          "r"(bits_under(p, 0x00800080u, 0x43004300u)), "r"(0x43804380u));
#else
    asm("{ .reg .b32 t; fma.rn.bf16x2 t, %3, %5, %1; fma.rn.bf16x2 %0, t, %4, %2; }"
        : "=r"(r[k])
        : "r"(bits_under(p, 0x007f007fu, 0x43004300u)),
          "r"(bits_under(p, 0x00800080u, 0x43004300u)), "r"(0x43804380u), "r"(0x3f803f80u),
          "r"(0xbf80bf80u));
#endif
  }
  unpack<bf16, 4>(d, r);
}
FN void cvt_from_u8x4(f32* d, const u8* x) {
  u32 w;
  pack<u8, 4>(&w, x);
  #pragma unroll
  for (int k = 0; k < 4; k++)
    d[k] = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7650 | k)) - 8388608.0f;
}

//! spread_4x8
// The two elements of byte k, one in the low bits of each half of a word, the second one `by` bits
// above. APART: bytes lie in registers of their own; a multiplication leaves the units alone that
// do all else.
template <bool APART> FN u32 spread_4x8(const u8* x, int k, u32 by) {
  u32 w, p;
  if (APART) {
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(p) : "r"((u32)x[k]), "r"((0x10000u >> (4 - by)) + 1));
    return p;
  }
  pack<u8, 4>(&w, x);
  return __byte_perm(w, by ? w : w >> 4, 0x0400 | k * 0x0101);
}

//! cvt_from_4x8
// Four bytes x of two elements each; `sign` is 8 if they are signed, else 0.
// f16: the low half of a byte gives 1024 + n, the high half 1024 + 16 n
template <bool APART> FN void cvt_from_4x8(f16* d, const u8* x, u32 sign) {
  u32 r[4];
  const u32 add = sign ? 0xd480e408u : 0xd400e400u; // -(1024 + sign) and -(64 + sign)
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 p = spread_4x8<APART>(x, k, 4);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" // times 1 and 1 / 16
        : "=r"(r[k])
        : "r"(bits_under(p, 0x00f0000fu, 0x64006400u | sign | sign << 20)), "r"(0x2c003c00u),
          "r"(add));
  }
  unpack<f16, 8>(d, r);
}
// bf16: 128 + n for both
template <bool APART> FN void cvt_from_4x8(bf16* d, const u8* x, u32 sign) {
  u32 r[4];
  const u32 one = 0x43004300u | sign | sign << 16;
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 p = spread_4x8<APART>(x, k, 0);
#ifdef HAS_BF16
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r[k]) : "r"(bits_under(p, 0x000f000fu, one)), "r"(one));
#else
    asm("fma.rn.bf16x2 %0, %2, %3, %1;" // times -1
        : "=r"(r[k]) : "r"(bits_under(p, 0x000f000fu, one)), "r"(one), "r"(0xbf80bf80u));
#endif
  }
  unpack<bf16, 8>(d, r);
}

//! cvt_from_s4x8
template <typename T> FN void cvt_from_s4x8(T* d, const u8* x) { cvt_from_4x8<false>(d, x, 8); }

//! cvt_from_u4x8
template <typename T> FN void cvt_from_u4x8(T* d, const u8* x) { cvt_from_4x8<false>(d, x, 0); }

//! cvt_from_s4x8_apart
template <typename T> FN void cvt_from_s4x8_apart(T* d, const u8* x) {
  cvt_from_4x8<true>(d, x, 8);
}

//! cvt_from_u4x8_apart
template <typename T> FN void cvt_from_u4x8_apart(T* d, const u8* x) {
  cvt_from_4x8<true>(d, x, 0);
}

//! halves_of_e4m3
// The bytes of w as f16: 0 and 1 in one word, 2 and 3 in the other; APART: 0 and 2, 1 and 3.
template <bool APART> FN void halves_of_e4m3(u32* r, u32 w) {
  const u32 p = APART ? __byte_perm(w, w, 0x3120) : w;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r[0]) : "h"((u16)p));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r[1]) : "h"((u16)(p >> 16)));
}

//! halves_of_e5m2
// the same; an f16 begins with an e5m2
template <bool APART> FN void halves_of_e5m2(u32* r, u32 w) {
  r[0] = __byte_perm(w, 0, APART ? 0x2404 : 0x1404);
  r[1] = __byte_perm(w, 0, APART ? 0x3414 : 0x3424);
}

//! halves_of_s8
// the same: 1024 + (x + 128)
template <bool APART> FN void halves_of_s8(u32* r, u32 w) {
  w ^= 0x80808080u;
  const u32 p[2] = {__byte_perm(w, 0x64646464u, APART ? 0x4240 : 0x4140),
                    __byte_perm(w, 0x64646464u, APART ? 0x4341 : 0x4342)};
  #pragma unroll
  for (int k = 0; k < 2; k++)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r[k]) : "r"(p[k]), "r"(0x64806480u));
}
