/* What wgmma and mma share: elements of every type, fragments in registers, accumulation; and mma.
 *
 * Sums of integers stay below 2^24, so f32 holds them. */
#include <cmath>

#include "machine.h"

u32 host_element_bits(u8 type) {
  switch (type) {
    case HOST_s4:
    case HOST_u4:
    case HOST_e2m1: return 4;
    case HOST_e4m3:
    case HOST_e5m2:
    case HOST_s8:
    case HOST_u8: return 8;
    case HOST_f16:
    case HOST_bf16: return 16;
    default: return 32;
  }
}

static f32 from_e4m3(u32 x) {
  const u32 e = x >> 3 & 15, m = x & 7;
  if ((x & 127) == 127) return f32_bits(0x7fffffff);
  const f32 a = e ? ldexpf((f32)(8 + m), (int)e - 10) : ldexpf((f32)m, -9);
  return x & 128 ? -a : a;
}

/* element i of words */
f32 host_element(u8 type, const u32 *words, u32 i) {
  const u32 bits = host_element_bits(type), at = i * bits;
  const u32 x = words[at / 32] >> at % 32;
  switch (type) {
    case HOST_f16: return host_from_f16((u16)x);
    case HOST_bf16: return f32_bits(x << 16);
    case HOST_tf32: return f32_bits(x & 0xffffe000);
    case HOST_e4m3: return from_e4m3(x & 255);
    case HOST_e5m2: return host_from_f16((u16)(x << 8));
    case HOST_s8: return (i8)x;
    case HOST_u8: return (u8)x;
    case HOST_s4: return (i32)(x << 28) >> 28;
    case HOST_u4: return x & 15;
    case HOST_e2m1: return cvt_f32(e2m1{(u8)(x & 15)});
    default: return f32_bits(x);
  }
}

/* The four registers of A of lane l, into a[k][16]. A word has e elements: registers 0 and 1 are
 * rows l / 4 and 8 below, the first half of K, registers 2 and 3 the second. */
void host_fragment_a(u8 type, const u32 *registers, u32 l, f32 *a) {
  const u32 e = 32 / host_element_bits(type);
  for (u32 i = 0; i < 4; i++)
    for (u32 x = 0; x < e; x++) {
      const u32 row = l / 4 + i % 2 * 8, k = i / 2 * 4 * e + l % 4 * e + x;
      a[k * 16 + row] = host_element(type, registers + i, x);
    }
}

/* number i of the accumulators of a lane grows by s */
void host_accumulate(u8 acc, u32 *d, u32 i, f32 s) {
  if (acc == HOST_f16) {
    const u32 shift = i % 2 * 16;
    const u16 x = host_to_f16(host_from_f16((u16)(d[i / 2] >> shift)) + s);
    d[i / 2] = (d[i / 2] & ~(0xffffu << shift)) | (u32)x << shift;
  } else if (acc == HOST_s32) {
    d[i] += (u32)(i32)s;
  } else {
    d[i] = float_bits(f32_bits(d[i]) + s);
  }
}

/* ---- mma.sync ------------------------------------------------------------------------------ */

/* Registers of B: column l / 4, rows of each half of K; of the accumulator: 0 and 1 row l / 4,
 * columns l % 4 * 2 and the next, 2 and 3 the row 8 below. */
static void mma(Warp &w) {
  const HostMma *first = (const HostMma *)w.request[0]->p;
  const u8 type = first->type;
  const u32 e = 32 / host_element_bits(type), depth = 8 * e;
  f32 a[64 * 16], b[64 * 8];
  for (u32 l = 0; l < 32; l++) {
    const HostMma *x = (const HostMma *)w.request[l]->p;
    host_fragment_a(type, x->a, l, a);
    for (u32 i = 0; i < 2; i++)
      for (u32 k = 0; k < e; k++)
        b[(i * 4 * e + l % 4 * e + k) * 8 + l / 4] = host_element(type, x->b + i, k);
  }
  for (u32 l = 0; l < 32; l++)
    for (u32 i = 0; i < 4; i++) {
      const u32 row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      f32 s = 0;
      for (u32 k = 0; k < depth; k++) s += a[k * 16 + row] * b[k * 8 + column];
      u32 d[4];
      void *at = ((const HostMma *)w.request[l]->p)->d;
      memcpy(d, at, sizeof d);
      host_accumulate(first->acc, d, i, s);
      memcpy(at, d, sizeof d);
    }
}

extern "C" void host_mma(const HostMma *x, int line) {
  Request r = {"mma.sync", line, ~0u, 0, 0, (void *)x, 0};
  host_meet(&r, mma);
}
