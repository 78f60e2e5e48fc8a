/* The second catalogue: the device functions of generated programs, for the CPU.
 *
 * Same names and meanings as csrc/cuda/device/ and csrc/cuda/ptx.c, written from the PTX ISA and
 * not from that text. Everything that touches memory or other threads is a function of the
 * emulated machine (machine.h), and tells it the line of the generated program. */
#ifndef HOST_CATALOGUE_H
#define HOST_CATALOGUE_H

#include <math.h>
#include <string.h>

#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef float f32;

/* ---- the machine --------------------------------------------------------------------------- */

struct HostIndex {
  u32 x, y, z;
};

/* what a thread can read of itself */
struct HostThread {
  HostIndex thread_index, block_index, cluster_index, block_dim, grid_dim;
};
extern HostThread *host_self;

#define threadIdx (host_self->thread_index)
#define blockIdx (host_self->block_index)
#define blockDim (host_self->block_dim)
#define gridDim (host_self->grid_dim)
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define LINE int line = __builtin_LINE()
#define FN static inline __attribute__((always_inline, unused))

/* What cuTensorMapEncodeTiled is given, in place of the opaque 128 bytes it makes. */
struct alignas(64) TensorMap {
  u64 base, dim[5], stride[4]; /* innermost first; stride[k] in bytes, of dim k + 1 */
  u32 box[5];
  u8 rank, element, swizzle, is_map;
  u64 type; /* HostType of the elements, for copies that combine */
};
static_assert(sizeof(TensorMap) == 128, "a tensor map has 128 bytes");

/* Elements of operands and accumulators of the tensor cores. */
enum : u8 {
  HOST_f32,
  HOST_f16,
  HOST_s32,
  HOST_bf16,
  HOST_tf32,
  HOST_e4m3,
  HOST_e5m2,
  HOST_s8,
  HOST_u8,
  HOST_s4,
  HOST_u4,
  HOST_e2m1
};
struct HostMma {
  void *d; /* four accumulators */
  const u32 *a, *b;
  u8 acc, type;
};
enum ProxyFence : u32 { HOST_FENCE_SHARED, HOST_FENCE_CLUSTER, HOST_FENCE_GLOBAL };
enum HostType : u64 {
  HOST_OTHER,
  HOST_AS_u32,
  HOST_AS_i32,
  HOST_AS_f16,
  HOST_AS_bf16,
  HOST_AS_f32
};
enum HostCombine : u32 {
  HOST_STORE,
  HOST_add,
  HOST_min,
  HOST_max,
  HOST_inc,
  HOST_dec,
  HOST_and,
  HOST_or,
  HOST_xor
};

struct HostWgmma {
  void *d;
  const u32 *a; /* registers, or NULL */
  u32 a_low, a_high, b_low, b_high;
  u16 n;
  u8 acc, type_a, type_b; /* HOST_f32 ... */
  bool transpose_a, transpose_b;
  bool fresh; /* scale-d is 0: what the accumulator held does not count */
};

enum : u8 { HOST_32x32b, HOST_16x256b, HOST_16x128b }; /* shapes of moves */
enum : u8 { HOST_no_reduce, HOST_rmax, HOST_rmin, HOST_absmax, HOST_absmin };
struct HostTmemMove {
  u32 *const *registers;
  u32 address;
  u8 shape, times;
  bool halves; /* .pack::16b, .unpack::16b */
  u8 reduce;   /* .red: into *reduced; fresh: what that held does not count */
  bool fresh;
  HostType type;
  u32 *reduced;
};

/* kinds of products; from mxf8f6f4 on they have scales */
enum : u8 {
  HOST_KIND_f16,
  HOST_KIND_tf32,
  HOST_KIND_f8f6f4,
  HOST_KIND_i8,
  HOST_KIND_mxf8f6f4,
  HOST_KIND_mxf4nvf4
};
struct HostTcgen05 {
  u32 d, a, a_high, b, b_high, instruction; /* a: of A in tensor memory the address */
  u32 a_scale, b_scale, metadata;
  u8 kind, scales; /* .scale_vec::, 0: none */
  bool sparse, pair, a_in_tmem;
  bool adds; /* enable-input-d */
};

enum : u8 { HOST_128x256b, HOST_128x128b, HOST_64x128b, HOST_32x128b }; /* shapes of copies */
struct HostTcgen05Copy {
  u32 d, low, high;
  u8 shape;
  bool pair;
};

extern "C" {
u32 host_shared_base();
void host_load_shared(void *d, u32 a, u32 bytes, int line);
void host_store_shared(u32 a, const void *s, u32 bytes, int line);
void host_load_global(void *d, const void *p, u32 bytes, int line);
void host_store_global(void *p, const void *s, u32 bytes, int line);
void host_load_matrix(void *words, u32 a, bool transposed, int line);
void host_store_matrix(u32 a, const void *words, bool transposed, int line);
u32 host_shuffle(u32 x, u32 lane, u32 mask, int line);
bool host_elect(u32 mask, int line);
u32 host_clock(); /* steps of the machine so far */
void host_bar_sync(u32 id, u32 threads, int line);
void host_bar_arrive(u32 id, u32 threads, int line);
bool host_vote_any(u32 mask, bool x, int line);
void host_warp_sync(u32 mask, int line);
bool host_bar_red(u32 id, u32 threads, bool x, bool any, int line);
void host_cluster_sync(int line);
u32 host_cluster_rank();
void host_outside(i32 i, i32 limit, u32 site, u32 place, int line);
bool host_stopped();
bool host_late();
void host_timed(u32 site); /* of the wait that comes next */
void host_launches_done(int line); /* griddepcontrol.wait */
u32 host_peer_offset(u32 rank, int line);
void host_load_cluster(void *d, u32 a, u32 bytes, int line);
void host_store_cluster(u32 a, const void *s, u32 bytes, int line);
/* where the bytes are, of an atomic that the thread may do now */
void *host_atomic_global(void *p, u32 bytes, int line);
void *host_atomic_shared(u32 a, u32 bytes, int line);
void *host_atomic_cluster(u32 a, u32 bytes, int line);
u32 host_atomic_add(u32 *p, u32 x, int line);
void host_registers(u32 n, bool up, int line);
void host_mbarrier_init(u32 b, u32 count, int line);
void host_mbarrier_init_fence(int line);
void host_mbarrier_wait(u32 b, u32 parity, bool cluster, int line);
bool host_mbarrier_test(u32 b, u32 parity, int line);
void host_semaphore_signal(void *p, u32 a, u32 n, int line); /* p NULL: shared memory at a */
void host_semaphore_wait(void *p, u32 a, u32 n, bool take, int line);
void host_awaits(u32 site, u32 element);
u32 host_semaphore_read(void *p, u32 a, int line);
void host_semaphore_fence(int line);
void host_semaphore_relaxed(void *p, u32 n, int line);
u32 host_devices();
void *host_on_device(void *p, u32 device); /* p: at the address of all devices */
void host_yield_poll();
void host_mbarrier_expect(u32 b, u32 bytes, int line);
void host_mbarrier_arrive(u32 b, u32 n, int line);
void host_mbarrier_arrive_remote(u32 b, u32 rank, bool release, int line);
void host_mbarrier_arrive_tx_cluster(u32 b, u32 bytes, int line);
void host_st_async(u32 a, const void *s, u32 bytes, u32 b, int line);
void host_red_async(u32 a, u32 x, u32 b, HostCombine how, HostType type, int line);
void host_store_async(u32 a, u32 word, u32 b, u32 rank, int line);
void host_tma_load(u32 dst, const TensorMap *m, u32 barrier, const i32 *c, u32 rank, int line);
void host_tma_multicast(u32 dst, const TensorMap *m, u32 barrier, u32 mask, const i32 *c, u32 rank,
                        int line);
void host_tma_store(const TensorMap *m, u32 src, const i32 *c, u32 rank, int line);
void host_tma_combine(const TensorMap *m, u32 src, const i32 *c, u32 rank, HostCombine how,
                      int line);
void host_bulk_combine(void *dst, u32 src, u32 bytes, HostCombine how, HostType type, int line);
void host_bulk_load(u32 dst, const void *src, u32 bytes, u32 barrier, int line);
void host_bulk_store(void *dst, u32 src, u32 bytes, int line);
void host_tma_prefetch(const TensorMap *m, const i32 *c, u32 rank, int line);
void host_bulk_prefetch(const void *p, u32 bytes, int line);
void host_group_commit(int line);
void host_group_wait(u32 n, bool read, int line);
void host_cp_async(u32 dst, const void *src, u32 bytes, bool valid, int line);
void host_cp_async_commit(int line);
void host_cp_async_wait(u32 n, int line);
void host_prefetch(const TensorMap *m, int line);
void host_proxy_fence(ProxyFence kind, int line);
void host_wgmma(const HostWgmma *w, int line);
void host_mma(const HostMma *x, int line);
void host_wgmma_fence(int line);
void host_wgmma_commit(int line);
void host_wgmma_wait(u32 n, int line);
void host_pin(const void *registers, u32 bytes, int line);
void host_tmem_alloc(u32 slot, u32 columns, u32 ctas, int line);
void host_tmem_relinquish(u32 ctas, int line);
void host_tmem_dealloc(u32 address, u32 columns, u32 ctas, int line);
void host_tmem_load(const HostTmemMove *x, int line);
void host_tmem_store(const HostTmemMove *x, int line);
void host_tmem_wait(bool store, int line);
void host_tmem_reduce(const HostTmemMove *x, int line);
void host_tcgen05_fence(bool before, int line);
void host_tcgen05_mma(const HostTcgen05 *x, int line);
void host_tcgen05_copy(const HostTcgen05Copy *x, int line);
void host_tcgen05_commit(u32 barrier, u32 mask, int line);
void host_tma_pair(u32 dst, const TensorMap *m, u32 barrier, u32 mask, const i32 *c, u32 rank,
                   int line);
void host_gather(u32 dst, const TensorMap *m, u32 barrier, const i32 *c, int line);
void host_scatter(const TensorMap *m, u32 src, const i32 *c, int line);
void host_try_cancel(u32 result, u32 barrier, int line);
bool host_query_cancel(u32 result, u32 *block, int line);
void host_fail(int line, const char *format, ...)
    __attribute__((format(__printf__, 2, 3), noreturn));
int host_print(const char *format, ...) __attribute__((format(__printf__, 1, 2)));
const char *print_int(char *out, i64 x, const char *style, i32 width);
const char *print_float(char *out, double x, const char *style, i32 width, i32 precision, i32 bits,
                        i32 least, char *body);
}
#define printf host_print

/* ---- numbers ------------------------------------------------------------------------------- */

FN u32 float_bits(f32 x) {
  u32 r;
  memcpy(&r, &x, 4);
  return r;
}
FN f32 f32_bits(u32 b) {
  f32 r;
  memcpy(&r, &b, 4);
  return r;
}

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};

struct e2m1 {
  u8 bits;
};
struct e4m3 {
  u8 bits;
};
struct e5m2 {
  u8 bits;
};
struct e8m0 {
  u8 bits;
};

extern "C" {
f32 host_from_fp8(u8 x, int digits, int bias);
u8 host_to_fp8(f32 x, int digits, int bias, f32 greatest);
f32 host_from_f16(u16 x);
u16 host_to_f16(f32 x);
}
static inline u16 host_to_bf16(f32 x) {
  const u32 b = float_bits(x);
  if (x != x) return 0x7fff; /* the canonical NaN */
  return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

FN f32 cvt_f32(f16 x) { return host_from_f16(x.bits); }
FN f32 cvt_f32(bf16 x) { return f32_bits((u32)x.bits << 16); }
FN f16 cvt_f16(f32 x) { return f16{host_to_f16(x)}; }
FN bf16 cvt_bf16(f32 x) { return bf16{host_to_bf16(x)}; }
FN u32 cvt_rn_f16x2(f32 lo, f32 hi) { return (u32)host_to_f16(hi) << 16 | host_to_f16(lo); }
FN u32 cvt_rn_bf16x2(f32 lo, f32 hi) { return (u32)host_to_bf16(hi) << 16 | host_to_bf16(lo); }
FN void cvt_f16x2(f16 *d, f32 lo, f32 hi) { d[0] = cvt_f16(lo), d[1] = cvt_f16(hi); }
FN void cvt_bf16x2(bf16 *d, f32 lo, f32 hi) { d[0] = cvt_bf16(lo), d[1] = cvt_bf16(hi); }
FN f32 cvt_f32(e4m3 x) { return (x.bits & 0x7f) == 0x7f ? NAN : host_from_fp8(x.bits, 3, 7); }
FN f32 cvt_f32(e5m2 x) {
  const u8 a = x.bits & 0x7f;
  const f32 special = a == 0x7c ? INFINITY : NAN;
  return a >= 0x7c ? copysignf(special, x.bits & 0x80 ? -1 : 1) : host_from_fp8(x.bits, 2, 15);
}
FN f32 cvt_f32(e8m0 x) { return x.bits == 255 ? NAN : ldexpf(1, x.bits - 127); }
FN e4m3 cvt_e4m3(f32 x) { return e4m3{x != x ? (u8)0x7f : host_to_fp8(x, 3, 7, 448)}; }
FN e5m2 cvt_e5m2(f32 x) { return e5m2{x != x ? (u8)0x7f : host_to_fp8(x, 2, 15, 57344)}; }
FN e8m0 cvt_e8m0(f32 x) {
  int exponent;
  if (!(x >= 0)) return e8m0{255};
  if (x > 0x1p127f) return e8m0{254};
  const f32 part = frexpf(x, &exponent); /* of [0.5, 1), and 0.5 is a power of two */
  if (x == 0) exponent = -126;
  exponent += 127 - (part <= 0.5f);
  return e8m0{(u8)(exponent < 0 ? 0 : exponent)};
}
FN e8m0 mul_e8m0(e8m0 x, e8m0 y) { return cvt_e8m0(cvt_f32(x) * cvt_f32(y)); }
FN e8m0 div_e8m0(e8m0 x, e8m0 y) { return cvt_e8m0(cvt_f32(x) / cvt_f32(y)); }
FN f32 cvt_f32(e2m1 x) {
  const f32 a = (x.bits & 6) == 0 ? 0.5f * (x.bits & 1)
                                  : ldexpf(1 + 0.5f * (x.bits & 1), (x.bits >> 1 & 3) - 1);
  return x.bits & 8 ? -a : a;
}
FN e2m1 cvt_e2m1(f32 x) {
  const f32 a = x != x ? 6 : fminf(fabsf(x), 6);
  const f32 unit = a < 2 ? 0.5f : a < 4 ? 1 : 2;
  const f32 near = rintf(a / unit) * unit;
  u8 k = 0;
  while (cvt_f32(e2m1{k}) < near) k++;
  return e2m1{(u8)(k | (x == x && signbit(x) ? 8 : 0))};
}
FN u32 cvt_rn_e4m3x4(f32 x0, f32 x1, f32 x2, f32 x3) {
  return cvt_e4m3(x0).bits | cvt_e4m3(x1).bits << 8 | cvt_e4m3(x2).bits << 16 |
         (u32)cvt_e4m3(x3).bits << 24;
}
FN void cvt_e4m3x2(e4m3 *d, f32 lo, f32 hi) { d[0] = cvt_e4m3(lo), d[1] = cvt_e4m3(hi); }
FN u32 cvt_rn_e5m2x4(f32 x0, f32 x1, f32 x2, f32 x3) {
  return cvt_e5m2(x0).bits | cvt_e5m2(x1).bits << 8 | cvt_e5m2(x2).bits << 16 |
         (u32)cvt_e5m2(x3).bits << 24;
}
FN void cvt_e5m2x2(e5m2 *d, f32 lo, f32 hi) { d[0] = cvt_e5m2(lo), d[1] = cvt_e5m2(hi); }
FN void widened(f32 *d, f32 x) { *d = x; }
FN void widened(f16 *d, f32 x) { *d = cvt_f16(x); }
FN void widened(bf16 *d, f32 x) { *d = cvt_bf16(x); }
template <typename T>
FN void cvt_from_e4m3x2(T *d, e4m3 lo, e4m3 hi) {
  widened(d, cvt_f32(lo)), widened(d + 1, cvt_f32(hi));
}
template <typename T>
FN void cvt_from_e5m2x2(T *d, e5m2 lo, e5m2 hi) {
  widened(d, cvt_f32(lo)), widened(d + 1, cvt_f32(hi));
}
template <typename T>
FN void cvt_from_s8x4(T *d, const i8 *x) {
  for (int k = 0; k < 4; k++) widened(d + k, x[k]);
}
template <typename T>
FN void cvt_from_u8x4(T *d, const u8 *x) {
  for (int k = 0; k < 4; k++) widened(d + k, x[k]);
}
FN void cvt_from_s8x4_apart(bf16 *d, const i8 *x) { cvt_from_s8x4(d, x); }
/* x: of four bytes */
FN void halves_of(u32 *r, const f16 *x, bool apart) {
  for (int k = 0; k < 2; k++) {
    const f16 *first = x + (apart ? k : 2 * k);
    r[k] = first[0].bits | (u32)first[apart ? 2 : 1].bits << 16;
  }
}
template <bool APART>
FN void halves_of_e4m3(u32 *r, u32 w) {
  f16 x[4];
  for (int k = 0; k < 4; k++) widened(x + k, cvt_f32(e4m3{(u8)(w >> 8 * k)}));
  halves_of(r, x, APART);
}
template <bool APART>
FN void halves_of_e5m2(u32 *r, u32 w) {
  f16 x[4];
  for (int k = 0; k < 4; k++) widened(x + k, cvt_f32(e5m2{(u8)(w >> 8 * k)}));
  halves_of(r, x, APART);
}
template <bool APART>
FN void halves_of_s8(u32 *r, u32 w) {
  f16 x[4];
  for (int k = 0; k < 4; k++) widened(x + k, (i8)(w >> 8 * k));
  halves_of(r, x, APART);
}
template <typename T>
FN void cvt_from_s4x8(T *d, const u8 *x) {
  for (int k = 0; k < 8; k++) widened(d + k, (f32)((i8)(x[k / 2] << (k % 2 ? 0 : 4)) >> 4));
}
template <typename T>
FN void cvt_from_u4x8(T *d, const u8 *x) {
  for (int k = 0; k < 8; k++) widened(d + k, (f32)(x[k / 2] >> (k % 2 ? 4 : 0) & 15));
}
template <typename T>
FN void cvt_from_s4x8_apart(T *d, const u8 *x) {
  cvt_from_s4x8(d, x);
}
template <typename T>
FN void cvt_from_u4x8_apart(T *d, const u8 *x) {
  cvt_from_u4x8(d, x);
}
/* f32 has more than twice the digits and two: rounding sums and products of halves twice is
 * rounding them once. */
FN f16 operator-(f16 x) { return f16{(u16)(x.bits ^ 0x8000)}; }
FN f16 operator+(f16 a, f16 b) { return cvt_f16(cvt_f32(a) + cvt_f32(b)); }
FN f16 operator-(f16 a, f16 b) { return cvt_f16(cvt_f32(a) - cvt_f32(b)); }
FN f16 operator*(f16 a, f16 b) { return cvt_f16(cvt_f32(a) * cvt_f32(b)); }
FN bf16 operator-(bf16 x) { return bf16{(u16)(x.bits ^ 0x8000)}; }
/* Not so sums of bf16, whose exponents may lie farther apart than f32 has digits. */
extern "C" u16 host_bf16_of_double(double x);
FN bf16 operator+(bf16 a, bf16 b) {
  return bf16{host_bf16_of_double((double)cvt_f32(a) + cvt_f32(b))};
}
FN bf16 operator-(bf16 a, bf16 b) {
  return bf16{host_bf16_of_double((double)cvt_f32(a) - cvt_f32(b))};
}
FN bf16 operator*(bf16 a, bf16 b) {
  return bf16{host_bf16_of_double((double)cvt_f32(a) * cvt_f32(b))};
}
template <typename T>
FN u32 pair(T lo, T hi) {
  return bits_of(lo) | bits_of(hi) << 16;
}
template <typename T>
FN void add_x2(T *d, T a0, T a1, T b0, T b1) {
  d[0] = a0 + b0, d[1] = a1 + b1;
}
template <typename T>
FN void sub_x2(T *d, T a0, T a1, T b0, T b1) {
  d[0] = a0 - b0, d[1] = a1 - b1;
}
template <typename T>
FN void mul_x2(T *d, T a0, T a1, T b0, T b1) {
  d[0] = a0 * b0, d[1] = a1 * b1;
}
FN bf16 cvt_int_to_bf16(i32 x) { return bf16{host_bf16_of_double(x)}; }
FN bf16 cvt_int_to_bf16(u32 x) { return bf16{host_bf16_of_double(x)}; }

/* cvt.rzi: toward zero, clamped, NaN is 0 */
template <typename T>
FN T cvt_int(f32 x) {
  const bool is_signed = (T)-1 < (T)0;
  const int bits = (int)sizeof(T) * 8 - is_signed;
  const double top = (double)(((u64)1 << bits) - 1), bottom = is_signed ? -top - 1 : 0;
  if (x != x) return 0;
  return (double)x >= top ? (T)(i64)top : (double)x <= bottom ? (T)(i64)bottom : (T)(i64)x;
}

/* 4 bits, in an i8 or u8; two share a byte, the first has the low half */
FN i8 wrap_s4(u32 x) { return (i8)(x % 16 < 8 ? (int)(x % 16) : (int)(x % 16) - 16); }
FN u8 wrap_u4(u32 x) { return (u8)(x % 16); }
FN i8 cvt_s4(f32 x) { return x != x ? 0 : (i8)fmaxf(-8, fminf(7, truncf(x))); }
FN u8 cvt_u4(f32 x) { return x != x ? 0 : (u8)fmaxf(0, fminf(15, truncf(x))); }
FN void unpack_s4(i8 *d, u8 x) { d[0] = wrap_s4(x), d[1] = wrap_s4(x / 16); }
FN void unpack_u4(u8 *d, u8 x) { d[0] = x % 16, d[1] = x / 16; }
FN void unpack_e2m1(e2m1 *d, u8 x) { d[0] = e2m1{(u8)(x % 16)}, d[1] = e2m1{(u8)(x / 16)}; }
template <typename T>
FN void pack_nibbles(u32 *w, const T *x) {
  *w = 0;
  for (int k = 0; k < 8; k++) *w |= (u32)(x[k] & 15) << 4 * k;
}
FN u8 pack_4(u32 lo, u32 hi) { return (u8)(lo % 16 + hi % 16 * 16); }
FN i8 wrap_s2(u32 x) { return (i8)(x % 4 < 2 ? (int)(x % 4) : (int)(x % 4) - 4); }
FN u8 wrap_u2(u32 x) { return (u8)(x % 4); }
FN i8 cvt_s2(f32 x) { return x != x ? 0 : (i8)fmaxf(-2, fminf(1, truncf(x))); }
FN u8 cvt_u2(f32 x) { return x != x ? 0 : (u8)fmaxf(0, fminf(3, truncf(x))); }
FN void unpack_s2(i8 *d, u8 x) { d[0] = wrap_s2(x), d[1] = wrap_s2(x / 4); }
FN void unpack_u2(u8 *d, u8 x) { d[0] = x % 4, d[1] = x / 4 % 4; }
FN u8 pack_2(u32 lo, u32 hi) { return (u8)(lo % 4 + hi % 4 * 4); }

FN u32 bits_of(f32 x) { return float_bits(x); }
FN u32 bits_of(f16 x) { return x.bits; }
FN u32 bits_of(bf16 x) { return x.bits; }
FN u32 bits_of(e2m1 x) { return x.bits; }
FN u32 bits_of(e4m3 x) { return x.bits; }
FN u32 bits_of(e5m2 x) { return x.bits; }
FN u32 bits_of(e8m0 x) { return x.bits; }
FN u32 bits_of(bool x) { return x; }
template <typename T>
FN u32 bits_of(T x) {
  u32 r = 0;
  memcpy(&r, &x, sizeof x);
  return r;
}
template <typename T>
FN void from_bits(T &x, u32 b) {
  memcpy(&x, &b, sizeof x);
}
template <>
inline void from_bits<bool>(bool &x, u32 b) {
  x = (u8)b != 0;
}
template <typename T, typename S>
FN T bitcast(S x) {
  static_assert(sizeof(T) == sizeof(S), "a bitcast keeps the size");
  T r;
  from_bits(r, bits_of(x));
  return r;
}
template <typename T>
FN T opaque(T x) {
  return x;
}
template <typename T, int N>
FN void pin_narrow(T *) {
  static_assert(sizeof(T) < 4 && N * sizeof(T) % 4 == 0, "whole words of narrow elements");
}

FN f32 mul_rn(f32 a, f32 b) { return a * b; }
FN f32 div_rn(f32 a, f32 b) { return a / b; }
template <typename T>
FN T wrap_add(T a, T b) {
  return (T)((u64)a + (u64)b);
}
template <typename T>
FN T wrap_sub(T a, T b) {
  return (T)((u64)a - (u64)b);
}
template <typename T>
FN T wrap_mul(T a, T b) {
  return (T)((u64)a * (u64)b);
}
template <typename T>
FN T wrap_neg(T a) {
  return (T)(0 - (u64)a);
}
FN i32 complement(i32 a) { return -1 - a; }
/* shifts by 32 or more clamp to 32 */
template <typename T>
FN T shift_left(T a, T b) {
  return (u32)b > 31 ? (T)0 : (T)((u64)a << (u32)b);
}
/* x / 0 is unspecified; the most negative number by -1 wraps */
template <typename T>
FN T div_int(T a, T b) {
  return b == 0 ? (T)-1 : (T)((i64)a / (i64)b);
}
template <typename T>
FN T rem_int(T a, T b) {
  return b == 0 ? a : (T)((i64)a % (i64)b);
}
template <typename T>
FN T abs_int(T a) {
  return a < 0 ? (T)(0 - (u64)a) : a;
}
template <typename T>
FN T sign_int(T a) {
  return a > 0 ? (T)1 : a < 0 ? (T)-1 : (T)0;
}
template <typename T>
FN T min_int(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
FN T max_int(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
FN T leading_zeros(T x) {
  const int bits = 8 * (int)sizeof(T);
  int n = 0;
  while (n < bits && !((u64)x >> (bits - 1 - n) & 1)) n++;
  return (T)n;
}
template <typename T>
FN T bit_count(T x) {
  int n = 0;
  for (int k = 0; k < 8 * (int)sizeof(T); k++) n += (int)((u64)x >> k & 1);
  return (T)n;
}
/* by bisection */
extern "C" f32 host_erf_inv(f32 y);
FN f32 erfinvf(f32 y) { return host_erf_inv(y); }
FN f32 sign_f32(f32 x) { return x == 0 ? 0.0f : copysignf(1, x); }
/* NaN propagates as the canonical one; -0 < +0 */
FN f32 min_f32(f32 a, f32 b) {
  if (a != a || b != b) return f32_bits(0x7fffffff);
  return a < b || (a == b && signbit(a)) ? a : b;
}
FN f32 max_f32(f32 a, f32 b) {
  if (a != a || b != b) return f32_bits(0x7fffffff);
  return a > b || (a == b && !signbit(a)) ? a : b;
}
#define HOST_EXTREMA_OF_PAIRS(name, T) \
  FN void name##_x2(T *d, T a0, T a1, T b0, T b1) { \
    d[0] = cvt_##T(name##_f32(cvt_f32(a0), cvt_f32(b0))); \
    d[1] = cvt_##T(name##_f32(cvt_f32(a1), cvt_f32(b1))); \
  }
HOST_EXTREMA_OF_PAIRS(min, f16)
HOST_EXTREMA_OF_PAIRS(min, bf16)
HOST_EXTREMA_OF_PAIRS(max, f16)
HOST_EXTREMA_OF_PAIRS(max, bf16)
/* .ftz: subnormals in and out are zero */
FN f32 flushed(f32 x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }
FN f32 exp2_approx(f32 x) { return flushed(exp2f(flushed(x))); }
FN f32 exp_approx(f32 x) { return exp2_approx(x * 1.4426950408889634f); }
FN f32 log2_approx(f32 x) { return log2f(flushed(x)); }
FN f32 log_approx(f32 x) { return log2_approx(x) * 0.6931471805599453f; }
FN f32 sin_approx(f32 x) { return sinf(x); }
FN f32 cos_approx(f32 x) { return cosf(x); }
FN f32 tanh_approx(f32 x) { return tanhf(x); }
FN f32 rcp_approx(f32 x) { return 1 / x; }
FN f32 rsqrt_approx(f32 x) { return 1 / sqrtf(x); }
FN f32 rsqrtf(f32 x) { return (f32)(1 / sqrt((double)x)); }

/* ---- memory -------------------------------------------------------------------------------- */

FN u32 shared_base() { return host_shared_base(); }

/* 16-byte chunks of a 128-byte line are permuted by the number of the line, within groups of B */
template <int B>
FN u32 swizzle(u32 a) {
  static_assert(B == 32 || B == 64 || B == 128, "swizzles have 32, 64 or 128 bytes");
  const u32 line = a / 128, chunk = a / 16 % (B / 16);
  return a - chunk * 16 + (chunk ^ line % (B / 16)) * 16;
}

template <typename T, int N>
FN void pack(u32 *w, const T *s) {
  memset(w, 0, (N * sizeof(T) + 3) / 4 * 4);
  memcpy(w, s, N * sizeof(T));
}
template <typename T, int N>
FN void unpack(T *d, const u32 *w) {
  const u8 *s = (const u8 *)w;
  for (int k = 0; k < N; k++) {
    u32 b = 0;
    memcpy(&b, s + k * sizeof(T), sizeof(T));
    from_bits(d[k], b);
  }
}
FN void unpack_pair(f16 *d, u32 w) { unpack<f16, 2>(d, &w); }
template <typename T, int N>
FN void zero(T *d) {
  memset((void *)d, 0, N * sizeof(T));
}

template <typename T, int N>
struct HostVector {
  static_assert(N * sizeof(T) <= 16 && !(N & (N - 1)), "a vector has 1, 2, 4, 8 or 16 bytes");
  u32 w[4];
};
template <typename T, int N>
FN void ld_shared(T *d, u32 a, LINE) {
  HostVector<T, N> v;
  host_load_shared(v.w, a, N * sizeof(T), line);
  unpack<T, N>(d, v.w);
}
template <typename T, int N>
FN void st_shared(u32 a, const T *s, LINE) {
  HostVector<T, N> v;
  pack<T, N>(v.w, s);
  host_store_shared(a, v.w, N * sizeof(T), line);
}
/* from an address of this block to the same one of another */
FN u32 peer_offset(u32 block, LINE) { return host_peer_offset(block, line); }
template <typename T, int N>
FN void ld_cluster(T *d, u32 a, LINE) {
  HostVector<T, N> v;
  host_load_cluster(v.w, a, N * sizeof(T), line);
  unpack<T, N>(d, v.w);
}
template <typename T, int N>
FN void st_cluster(u32 a, const T *s, LINE) {
  HostVector<T, N> v;
  pack<T, N>(v.w, s);
  host_store_cluster(a, v.w, N * sizeof(T), line);
}
template <typename T, int N>
FN void ld_global(T *d, const T *p, LINE) {
  HostVector<T, N> v;
  host_load_global(v.w, p, N * sizeof(T), line);
  unpack<T, N>(d, v.w);
}
template <typename T, int N>
FN void st_global(T *p, const T *s, LINE) {
  HostVector<T, N> v;
  pack<T, N>(v.w, s);
  host_store_global(p, v.w, N * sizeof(T), line);
}
/* what is there then is nothing that a program may use */
FN void discard_lines(const void *p, u64 bytes, u32 first, u32 step, LINE) {
  const u32 lost[4] = {0xffdeadffu, 0xffdeadffu, 0xffdeadffu, 0xffdeadffu};
  const u64 end = (u64)p + bytes;
  for (u64 a = ((u64)p + 127) / 128 * 128 + first * 128; a + 128 <= end; a += step * 128)
    for (u64 k = 0; k < 128; k += 16) host_store_global((void *)(a + k), lost, 16, line);
}
template <typename T>
FN void ldmatrix_x4(T *d, u32 a, LINE) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements of 16 bits, or pairs of them");
  host_load_matrix(d, a, false, line);
}
template <typename T>
FN void ldmatrix_x4_trans(T *d, u32 a, LINE) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements of 16 bits, or pairs of them");
  host_load_matrix(d, a, true, line);
}
template <typename T>
FN void stmatrix_x4(u32 a, const T *s, LINE) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements of 16 bits, or pairs of them");
  host_store_matrix(a, s, false, line);
}
template <typename T>
FN void stmatrix_x4_trans(u32 a, const T *s, LINE) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements of 16 bits, or pairs of them");
  host_store_matrix(a, s, true, line);
}

/* ---- threads ------------------------------------------------------------------------------- */

FN u32 lane_number() { return threadIdx.x % 32; }
FN u32 warp_uniform(u32 x, LINE) { return host_shuffle(x, 0, ~0u, line); }
FN i32 next_index(i32 i) { return i + 1; }
FN bool elect_one(LINE) { return host_elect(~0u, line); }
FN bool warp_any(bool x, LINE) { return host_vote_any(~0u, x, line); }
FN void section_enter(u32 id, LINE) { host_bar_sync(id, 256, line); }
FN void section_leave(u32 id, LINE) { host_bar_arrive(id, 256, line); }
FN void named_barrier_sync(u32 id, u32 lanes, LINE) { host_bar_sync(id, lanes, line); }
FN void named_barrier_arrive(u32 id, u32 lanes, LINE) { host_bar_arrive(id, lanes, line); }
FN void warpgroup_sync(u32 wg, LINE) { host_bar_sync(wg + 1, 128, line); }
FN bool lanes_any(u32 wg, bool x, LINE) { return host_bar_red(wg + 1, 128, x, true, line); }
FN bool lanes_all(u32 wg, bool x, LINE) { return host_bar_red(wg + 1, 128, x, false, line); }
FN void warp_sync(LINE) { host_warp_sync(~0u, line); }
FN void block_sync(LINE) { host_bar_sync(0, 0, line); }
FN void cluster_sync(LINE) { host_cluster_sync(line); }
FN u32 cluster_rank() { return host_cluster_rank(); }
FN void check_failed(const char *message, const char *, u32 line) {
  host_fail(int(line), "debug_check: %s", message);
}
FN void griddepcontrol_wait(LINE) { host_launches_done(line); }
FN void griddepcontrol_launch_dependents() {}
FN i32 next_tile(u32 *counter, LINE) { return (i32)host_atomic_add(counter, 1, line); }
FN void counters_done(u32 *counters, u32 n, u32 callers, LINE) {
  if (host_atomic_add(counters + n, 1, line) != callers - 1) return;
  for (u32 k = 0; k <= n; k++) counters[k] = 0;
}
FN void counters_done_by_warp(u32 *counters, u32 n, u32 callers, LINE) {
  host_warp_sync(~0u, line);
  const u32 r = threadIdx.x % 32 ? 0 : host_atomic_add(counters + n, 1, line);
  if (host_shuffle(r, 0, ~0u, line) != callers - 1) return;
  for (u32 k = threadIdx.x % 32; k <= n; k += 32) counters[k] = 0;
}
template <bool SYSTEM>
FN void semaphore_signal(u32 *s, u32 n, LINE) {
  host_semaphore_signal(s, 0, n, line);
}
template <bool SYSTEM>
FN void semaphore_wait(u32 *s, u32 n, LINE) {
  host_semaphore_wait(s, 0, n, false, line);
}
template <bool SYSTEM>
FN void semaphore_take(u32 *s, u32 n, LINE) {
  host_semaphore_wait(s, 0, n, true, line);
}
template <bool SYSTEM>
FN i32 semaphore_read(u32 *s, LINE) {
  return (i32)host_semaphore_read(s, 0, line);
}
FN void semaphore_signal_first(u32 *s, u32 n, LINE) {
  host_semaphore_fence(line);
  host_semaphore_relaxed(s, n, line);
}
FN void semaphore_signal_relaxed(u32 *s, u32 n, LINE) { host_semaphore_relaxed(s, n, line); }
FN void semaphore_signal_all(u32 *s, u32 n, LINE) {
  for (u32 d = 0; d < host_devices(); d++)
    host_semaphore_signal(host_on_device(s, d), 0, n, line);
}
FN void block_semaphore_init(u32 s, u32 n, LINE) {
  const u32 zero = 0;
  for (u32 k = 0; k < n; k++) host_store_shared(s + 4 * k, &zero, 4, line);
}
FN void block_semaphore_signal(u32 s, u32 n, LINE) { host_semaphore_signal(nullptr, s, n, line); }
FN void block_semaphore_wait(u32 s, u32 n, LINE) {
  host_semaphore_wait(nullptr, s, n, false, line);
}
FN void block_semaphore_take(u32 s, u32 n, LINE) { host_semaphore_wait(nullptr, s, n, true, line); }
FN i32 block_semaphore_read(u32 s, LINE) { return (i32)host_semaphore_read(nullptr, s, line); }
FN void delay(i32) { host_yield_poll(); }
FN i32 cluster_index_x() { return (i32)host_self->cluster_index.x; }
FN i32 cluster_index_y() { return (i32)host_self->cluster_index.y; }
FN i32 cluster_index_z() { return (i32)host_self->cluster_index.z; }
template <typename T>
FN T shuffle_xor(T x, int mask, LINE) {
  T r;
  from_bits(r, host_shuffle(bits_of(x), lane_number() ^ (u32)mask, ~0u, line));
  return r;
}
template <typename T>
FN T shuffle_up(T x, u32 d, LINE) {
  T r;
  u32 lane = lane_number();
  from_bits(r, host_shuffle(bits_of(x), lane < d ? lane : lane - d, ~0u, line));
  return r;
}
template <int N, int apart, typename T>
FN void swap_lanes(T *a, T *b, bool high, int mask, LINE) {
  T *gives = high ? a : b;
  T words[4 / sizeof(T)] = {};
  for (int k = 0; k < N; k++) words[k] = gives[k * apart];
  u32 w;
  memcpy(&w, words, 4);
  w = host_shuffle(w, lane_number() ^ (u32)mask, ~0u, line);
  memcpy(words, &w, 4);
  for (int k = 0; k < N; k++) gives[k * apart] = words[k];
}
FN u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 r = 0;
  for (int k = 0; k < 4; k++) {
    const u32 from = selector >> 4 * k & 7;
    r |= ((from < 4 ? a : b) >> from % 4 * 8 & 255) << 8 * k;
  }
  return r;
}
template <int step>
FN void swap_bytes(u32 *x, u32 *y, bool high, int mask, LINE) {
  u8 b[8], gives[4], *at = gives;
  memcpy(b, x, 4), memcpy(b + 4, y, 4);
  for (int k = 0; k < 8; k++)
    if (!(k & step) == high) *at++ = b[k];
  u32 w;
  memcpy(&w, gives, 4);
  w = host_shuffle(w, lane_number() ^ (u32)mask, ~0u, line);
  memcpy(at = gives, &w, 4);
  for (int k = 0; k < 8; k++)
    if (!(k & step) == high) b[k] = *at++;
  memcpy(x, b, 4), memcpy(y, b + 4, 4);
}
template <int N, typename T>
FN void shuffle_from(T *x, u32 from, LINE) {
  u32 w = 0;
  memcpy(&w, x, N * sizeof(T));
  w = host_shuffle(w, from, ~0u, line);
  memcpy(x, &w, N * sizeof(T));
}
template <int N>
FN void setmaxnreg_inc(LINE) {
  host_registers(N, true, line);
}
FN u32 thread_again() { return threadIdx.x; }
FN void read_again(u32 &wg, u32 &tid, u32 &warp, u32 &lane) {
  wg = threadIdx.x / 128, tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
}
template <int N>
FN void setmaxnreg_dec(LINE) {
  host_registers(N, false, line);
}

/* ---- atomics ------------------------------------------------------------------------------- */

/* old, x: the element and the operand */
#define HOST_ATOMIC(kind, T, space, address, expr)           \
  FN T atom_##kind##_##T##_##space(address a, T x, LINE) {   \
    T *p = (T *)host_atomic_##space(a, sizeof(T), line);     \
    const T old = *p;                                        \
    *p = (expr);                                             \
    return old;                                              \
  }                                                          \
  FN void red_##kind##_##T##_##space(address a, T x, LINE) { \
    atom_##kind##_##T##_##space(a, x, line);                 \
  }
#define HOST_ATOMICS(kind, T, expr)       \
  HOST_ATOMIC(kind, T, global, T *, expr) \
  HOST_ATOMIC(kind, T, shared, u32, expr) \
  HOST_ATOMIC(kind, T, cluster, u32, expr)
#define HOST_INT_ATOMICS(T)                    \
  HOST_ATOMICS(add, T, (T)((u32)old + (u32)x)) \
  HOST_ATOMICS(max, T, old > x ? old : x)      \
  HOST_ATOMICS(min, T, old < x ? old : x)      \
  HOST_ATOMICS(and, T, old &x)                 \
  HOST_ATOMICS(or, T, old | x)                 \
  HOST_ATOMICS(xor, T, old ^ x)                \
  HOST_ATOMICS(xchg, T, x)
#define HOST_HALF_ATOMICS(T)                                    \
  HOST_ATOMICS(add, T, old + x)                                 \
  HOST_ATOMICS(max, T, cvt_##T(max_f32(cvt_f32(old), cvt_f32(x)))) \
  HOST_ATOMICS(min, T, cvt_##T(min_f32(cvt_f32(old), cvt_f32(x))))
#define HOST_CAS(T, space, address)                              \
  FN T atom_cas_##T##_##space(address a, T compare, T x, LINE) { \
    T *p = (T *)host_atomic_##space(a, sizeof(T), line);         \
    const T old = *p;                                            \
    if (bits_of(old) == bits_of(compare)) *p = x;                \
    return old;                                                  \
  }
#define HOST_CAS_ALL(T) HOST_CAS(T, global, T *) HOST_CAS(T, shared, u32) HOST_CAS(T, cluster, u32)
HOST_INT_ATOMICS(i32)
HOST_INT_ATOMICS(u32)
HOST_ATOMIC(inc, u32, global, u32 *, old >= x ? 0 : old + 1)
HOST_ATOMIC(dec, u32, global, u32 *, !old || old > x ? x : old - 1)
HOST_ATOMICS(add, f32, old + x)
HOST_ATOMICS(xchg, f32, x)
HOST_HALF_ATOMICS(f16)
HOST_HALF_ATOMICS(bf16)
HOST_CAS_ALL(i32)
HOST_CAS_ALL(u32)
HOST_CAS_ALL(f32)

/* ---- other devices ------------------------------------------------------------------------- */

template <int DEVICES>
struct TensorMaps {
  TensorMap of[DEVICES];
};
template <int ARGUMENTS, int DEVICES>
struct Peers {
  u64 rank, at[ARGUMENTS][DEVICES], all[ARGUMENTS];
};
template <typename T, int N, int D>
FN T *peer(const Peers<N, D> &peers, u32 k, u32 device) {
  return (T *)peers.at[k][device];
}
template <typename T, int N, int D>
FN T *address_on_all(const Peers<N, D> &peers, u32 k) {
  return (T *)peers.all[k];
}
FN void fence_proxy_alias() {}

template <typename T, int N>
FN void store_everywhere(T *a, const T *x, int line) {
  for (u32 d = 0; d < host_devices(); d++) st_global<T, N>((T *)host_on_device(a, d), x, line);
}
#define HOST_MULTIMEM_STORE(T, N) \
  FN void st_multimem_##T##_##N(T *a, const T *x, LINE) { store_everywhere<T, N>(a, x, line); }
/* 4, 8 or 16 bytes */
#define HOST_MULTIMEM_STORES(T, N, N2, N4) \
  HOST_MULTIMEM_STORE(T, N) HOST_MULTIMEM_STORE(T, N2) HOST_MULTIMEM_STORE(T, N4)
HOST_MULTIMEM_STORES(f32, 1, 2, 4)
HOST_MULTIMEM_STORES(i32, 1, 2, 4)
HOST_MULTIMEM_STORES(u32, 1, 2, 4)
HOST_MULTIMEM_STORES(f16, 2, 4, 8)
HOST_MULTIMEM_STORES(bf16, 2, 4, 8)
HOST_MULTIMEM_STORES(i16, 2, 4, 8)
HOST_MULTIMEM_STORES(u16, 2, 4, 8)
HOST_MULTIMEM_STORES(i8, 4, 8, 16)
HOST_MULTIMEM_STORES(u8, 4, 8, 16)
HOST_MULTIMEM_STORES(e4m3, 4, 8, 16)
HOST_MULTIMEM_STORES(e5m2, 4, 8, 16)
#define HOST_MULTIMEM_LOAD(op, T, N, expr)                          \
  FN void ld_multimem_##op##_##T##_##N(T *x, const T *a, LINE) {    \
    for (u32 d = 0; d < host_devices(); d++) {                      \
      T part[N];                                                    \
      ld_global<T, N>(part, (T *)host_on_device((void *)a, d), line); \
      for (int k = 0; k < N; k++) {                                 \
        const T p = x[k], q = part[k];                              \
        x[k] = d ? (T)(expr) : q;                                   \
      }                                                             \
    }                                                               \
  }
#define HOST_MULTIMEM_INT(T)                                                                  \
  HOST_MULTIMEM_INTS(add, T, (T)((u32)p + (u32)q)) HOST_MULTIMEM_INTS(min, T, p < q ? p : q) \
  HOST_MULTIMEM_INTS(max, T, p > q ? p : q) HOST_MULTIMEM_INTS(and, T, p & q)                 \
  HOST_MULTIMEM_INTS(or, T, p | q) HOST_MULTIMEM_INTS(xor, T, p ^ q)
#define HOST_MULTIMEM_INTS(op, T, expr)                                   \
  HOST_MULTIMEM_LOAD(op, T, 1, expr) HOST_MULTIMEM_LOAD(op, T, 2, expr) \
  HOST_MULTIMEM_LOAD(op, T, 4, expr)
HOST_MULTIMEM_INT(i32)
HOST_MULTIMEM_INT(u32)
HOST_MULTIMEM_INTS(add, f32, p + q)
#define HOST_MULTIMEM_HALVES(op, T, expr)                                 \
  HOST_MULTIMEM_LOAD(op, T, 2, expr) HOST_MULTIMEM_LOAD(op, T, 4, expr) \
  HOST_MULTIMEM_LOAD(op, T, 8, expr)
#define HOST_MULTIMEM_HALF(T)                                                      \
  HOST_MULTIMEM_HALVES(add, T, p + q)                                              \
  HOST_MULTIMEM_HALVES(min, T, cvt_##T(min_f32(cvt_f32(p), cvt_f32(q))))           \
  HOST_MULTIMEM_HALVES(max, T, cvt_##T(max_f32(cvt_f32(p), cvt_f32(q))))
HOST_MULTIMEM_HALF(f16)
HOST_MULTIMEM_HALF(bf16)
#define HOST_MULTIMEM_FP8(op, T, expr)                                    \
  HOST_MULTIMEM_LOAD(op, T, 4, expr) HOST_MULTIMEM_LOAD(op, T, 8, expr) \
  HOST_MULTIMEM_LOAD(op, T, 16, expr)
#define HOST_MULTIMEM_BYTE(T)                                                  \
  HOST_MULTIMEM_FP8(add, T, cvt_##T(cvt_f32(p) + cvt_f32(q)))                  \
  HOST_MULTIMEM_FP8(min, T, cvt_##T(min_f32(cvt_f32(p), cvt_f32(q))))          \
  HOST_MULTIMEM_FP8(max, T, cvt_##T(max_f32(cvt_f32(p), cvt_f32(q))))
HOST_MULTIMEM_BYTE(e4m3)
HOST_MULTIMEM_BYTE(e5m2)

/* ---- barriers and copies ------------------------------------------------------------------- */

FN void mbarrier_init(u32 b, u32 count, LINE) { host_mbarrier_init(b, count, line); }
FN void mbarrier_init_fence(LINE) { host_mbarrier_init_fence(line); }
FN void mbarrier_wait(u32 b, u32 parity, LINE) { host_mbarrier_wait(b, parity, false, line); }
FN void mbarrier_wait_cluster(u32 b, u32 parity, LINE) {
  host_mbarrier_wait(b, parity, true, line);
}
FN bool mbarrier_test(u32 b, u32 parity, LINE) { return host_mbarrier_test(b, parity, line); }
FN void mbarrier_arrive(u32 b, LINE) { host_mbarrier_arrive(b, 1, line); }
template <int N>
FN void mbarrier_arrive_n(u32 b, LINE) {
  host_mbarrier_arrive(b, N, line);
}
FN void mbarrier_arrive_remote(u32 b, u32 block, LINE) {
  host_mbarrier_arrive_remote(b, block, false, line);
}
FN void mbarrier_arrive_release(u32 b, u32 block, LINE) {
  host_mbarrier_arrive_remote(b, block, true, line);
}
FN void store_async(u32 a, i32 x, u32 b, u32 block, LINE) {
  host_store_async(a, (u32)x, b, block, line);
}
FN void mbarrier_arrive_expect_tx_cluster(u32 b, u32 bytes, LINE) {
  host_mbarrier_arrive_tx_cluster(b, bytes, line);
}
template <typename T, int N>
FN void st_async(u32 a, const T *s, u32 b, LINE) {
  static_assert(N * sizeof(T) == 4 || N * sizeof(T) == 8 || N * sizeof(T) == 16,
                "32, 64, 128 bits");
  HostVector<T, N> v;
  pack<T, N>(v.w, s);
  host_st_async(a, v.w, N * sizeof(T), b, line);
}
#define HOST_RED_ASYNC(op, T)                                \
  FN void red_async_##op##_##T(u32 a, T x, u32 b, LINE) {    \
    host_red_async(a, (u32)x, b, HOST_##op, HOST_AS_##T, line); \
  }
#define HOST_RED_ASYNCS(T) \
  HOST_RED_ASYNC(add, T)   \
  HOST_RED_ASYNC(min, T)   \
  HOST_RED_ASYNC(max, T) HOST_RED_ASYNC(and, T) HOST_RED_ASYNC(or, T) HOST_RED_ASYNC(xor, T)
HOST_RED_ASYNCS(i32)
HOST_RED_ASYNCS(u32)
FN void mbarrier_arrive_expect_tx(u32 b, u32 bytes, LINE) {
  host_mbarrier_expect(b, bytes, line);
  host_mbarrier_arrive(b, 1, line);
}

FN void tensor_map_prefetch(const TensorMap *m, LINE) { host_prefetch(m, line); }
#define HOST_TMA(rank, parameters, ...)                                                           \
  FN void tma_load_##rank##d(u32 dst, const TensorMap *m, u32 barrier, parameters, LINE) {        \
    const i32 c[] = {__VA_ARGS__};                                                                \
    host_tma_load(dst, m, barrier, c, rank, line);                                                \
  }                                                                                               \
  FN void tma_multicast_##rank##d(u32 dst, const TensorMap *m, u32 barrier, u32 mask, parameters, \
                                  LINE) {                                                         \
    const i32 c[] = {__VA_ARGS__};                                                                \
    host_tma_multicast(dst, m, barrier, mask, c, rank, line);                                     \
  }                                                                                               \
  FN void tma_prefetch_##rank##d(const TensorMap *m, parameters, LINE) {                          \
    const i32 c[] = {__VA_ARGS__};                                                                \
    host_tma_prefetch(m, c, rank, line);                                                          \
  }                                                                                               \
  FN void tma_store_##rank##d(const TensorMap *m, u32 src, parameters, LINE) {                    \
    const i32 c[] = {__VA_ARGS__};                                                                \
    host_tma_store(m, src, c, rank, line);                                                        \
  }                                                                                               \
  FN void tma_store_evict_first_##rank##d(const TensorMap *m, u32 src, parameters, LINE) {        \
    const i32 c[] = {__VA_ARGS__};                                                                \
    host_tma_store(m, src, c, rank, line);                                                        \
  }
#define HOST_TMA_COMBINE(op, rank, parameters, ...)                             \
  FN void tma_##op##_##rank##d(const TensorMap *m, u32 src, parameters, LINE) { \
    const i32 c[] = {__VA_ARGS__};                                              \
    host_tma_combine(m, src, c, rank, HOST_##op, line);                         \
  }
#define HOST_BULK_COMBINE(op, type)                                   \
  FN void bulk_##op##_##type(void *dst, u32 src, u32 bytes, LINE) {   \
    host_bulk_combine(dst, src, bytes, HOST_##op, HOST_AS_##type, line); \
  }
/* clang-format off */
#define COMMA ,
#define HOST_TMA_COMBINES(op) \
  HOST_TMA_COMBINE(op, 1, i32 a, a) \
  HOST_TMA_COMBINE(op, 2, i32 a COMMA i32 b, a, b) \
  HOST_TMA_COMBINE(op, 3, i32 a COMMA i32 b COMMA i32 c_, a, b, c_) \
  HOST_TMA_COMBINE(op, 4, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d, a, b, c_, d) \
  HOST_TMA_COMBINE(op, 5, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d COMMA i32 e, a, b, c_, d, e)
HOST_TMA_COMBINES(add) HOST_TMA_COMBINES(min) HOST_TMA_COMBINES(max) HOST_TMA_COMBINES(inc)
HOST_TMA_COMBINES(dec) HOST_TMA_COMBINES(and) HOST_TMA_COMBINES(or) HOST_TMA_COMBINES(xor)
HOST_BULK_COMBINE(add, u32) HOST_BULK_COMBINE(add, f16) HOST_BULK_COMBINE(add, bf16)
HOST_BULK_COMBINE(add, f32) HOST_BULK_COMBINE(min, u32) HOST_BULK_COMBINE(min, i32)
HOST_BULK_COMBINE(min, f16) HOST_BULK_COMBINE(min, bf16) HOST_BULK_COMBINE(max, u32)
HOST_BULK_COMBINE(max, i32) HOST_BULK_COMBINE(max, f16) HOST_BULK_COMBINE(max, bf16)
HOST_BULK_COMBINE(inc, u32) HOST_BULK_COMBINE(dec, u32) HOST_BULK_COMBINE(and, u32)
HOST_BULK_COMBINE(or, u32) HOST_BULK_COMBINE(xor, u32)
HOST_TMA(1, i32 a, a)
HOST_TMA(2, i32 a COMMA i32 b, a, b)
HOST_TMA(3, i32 a COMMA i32 b COMMA i32 c_, a, b, c_)
HOST_TMA(4, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d, a, b, c_, d)
HOST_TMA(5, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d COMMA i32 e, a, b, c_, d, e)
    /* clang-format on */

    FN void bulk_load(u32 dst, const void *src, u32 bytes, u32 barrier, LINE) {
  host_bulk_load(dst, src, bytes, barrier, line);
}
FN void bulk_load_cluster(u32 dst, const void *src, u32 bytes, u32 barrier, LINE) {
  host_bulk_load(dst, src, bytes, barrier, line);
}
FN void bulk_store(void *dst, u32 src, u32 bytes, LINE) { host_bulk_store(dst, src, bytes, line); }
FN void bulk_store_evict_first(void *dst, u32 src, u32 bytes, LINE) {
  host_bulk_store(dst, src, bytes, line);
}
FN void bulk_prefetch(const void *p, u32 bytes, LINE) { host_bulk_prefetch(p, bytes, line); }
FN void prefetch_global(const void *) {}
FN void bulk_group_commit(LINE) { host_group_commit(line); }
template <int N>
FN void bulk_group_wait(LINE) {
  host_group_wait(N, false, line);
}
template <int N>
FN void bulk_group_wait_read(LINE) {
  host_group_wait(N, true, line);
}
template <int N>
FN void cp_async(u32 dst, const void *src, LINE) {
  host_cp_async(dst, src, N, true, line);
}
template <int N>
FN void cp_async_or_zeros(u32 dst, const void *src, bool valid, LINE) {
  host_cp_async(dst, src, N, valid, line);
}
FN void cp_async_commit(LINE) { host_cp_async_commit(line); }
template <int N>
FN void cp_async_wait(LINE) {
  host_cp_async_wait(N, line);
}
FN void fence_proxy_async(LINE) { host_proxy_fence(HOST_FENCE_SHARED, line); }
FN void fence_proxy_async_cluster(LINE) { host_proxy_fence(HOST_FENCE_CLUSTER, line); }
FN void fence_proxy_async_global(LINE) { host_proxy_fence(HOST_FENCE_GLOBAL, line); }

/* ---- checks of programs -------------------------------------------------------------------- */

FN bool index_outside(i32 i, i32 limit, u32 site, u32 *, u32 place = 0, LINE) {
  if (i < 0 || i > limit) host_outside(i, limit, site, place, line);
  return i < 0 || i > limit;
}
/* A wait that cannot end is one that ends late. */
FN bool mbarrier_wait_timed(u32 b, u32 parity, u32 site, u32 *, LINE) {
  host_timed(site);
  host_mbarrier_wait(b, parity, false, line);
  return host_late();
}
FN bool mbarrier_wait_cluster_timed(u32 b, u32 parity, u32 site, u32 *, LINE) {
  host_timed(site);
  host_mbarrier_wait(b, parity, true, line);
  return host_late();
}
template <bool SYSTEM>
FN bool semaphore_wait_timed(u32 *s, u32 n, u32 site, u32 *, LINE) {
  host_timed(site);
  host_semaphore_wait(s, 0, n, false, line);
  return host_late();
}
template <bool SYSTEM>
FN bool semaphore_take_timed(u32 *s, u32 n, u32 site, u32 *, LINE) {
  host_timed(site);
  host_semaphore_wait(s, 0, n, true, line);
  return host_late();
}
FN bool block_semaphore_wait_timed(u32 s, u32 n, u32 site, u32 *, LINE) {
  host_timed(site);
  host_semaphore_wait(nullptr, s, n, false, line);
  return host_late();
}
FN bool block_semaphore_take_timed(u32 s, u32 n, u32 site, u32 *, LINE) {
  host_timed(site);
  host_semaphore_wait(nullptr, s, n, true, line);
  return host_late();
}
FN bool sanitizer_stopped(const u32 *) { return host_stopped(); }
FN void sanitizer_settle(const u32 *) {}
FN void barrier_arrive_counted(u32, u32 id, u32 lanes, LINE) { host_bar_arrive(id, lanes, line); }
FN bool barrier_sync_timed(u32, u32 id, u32 lanes, u32 site, u32 *, LINE) {
  host_timed(site);
  host_bar_sync(id, lanes, line);
  return host_late();
}

/* A wait that the host has ended, in its own words: see device/watch.cuh. */
struct Watch {
  u32 *words;
  u32 mesh, kernel, rank;
};
template <bool SYSTEM>
FN bool wait_watched(u32 *s, u32 n, bool take, u32 *first, u32 site, const Watch &w, int line) {
  if (!w.words[0]) {
    host_awaits(site, (u32)(s - first));
    host_semaphore_wait(s, 0, n, take, line);
    return true;
  }
  for (u32 looks = 0; looks < 64; looks++) {
    if (host_semaphore_read(s, 0, line) < n) continue;
    host_semaphore_wait(s, 0, n, take, line);
    return true;
  }
  u32 *row = w.words + 8 + w.rank * 8;
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const u32 words[7] = {w.kernel + 1, site, (u32)(s - first), *s, n, block, threadIdx.x};
  for (u32 k = 0; k < 7 && (k || !row[0]); k++) row[k] = words[k];
  return false;
}
template <bool SYSTEM>
FN void semaphore_wait_watched(u32 *s, u32 n, u32 *first, u32 site, const Watch &w, LINE) {
  wait_watched<SYSTEM>(s, n, false, first, site, w, line);
}
template <bool SYSTEM>
FN void semaphore_take_watched(u32 *s, u32 n, u32 *first, u32 site, const Watch &w, LINE) {
  wait_watched<SYSTEM>(s, n, true, first, site, w, line);
}

/* ---- the profiler -------------------------------------------------------------------------- */

struct Profile {
  u32 at, used, room, clock, timer;
};
FN void profile_event(Profile &p, u32 tag, LINE) {
  const u32 event[2] = {tag, host_clock()};
  if (p.used < p.room) host_store_shared(p.at + p.used * 4, event, 8, line);
  p.used += 2;
}
FN void profile_start(Profile &p, LINE) {
  p.clock = p.timer = host_clock();
  profile_event(p, 0, line);
}
FN void profile_scope(Profile &p, u32 tag, LINE) { profile_event(p, tag, line); }
FN void profile_scope_end(Profile &p, u32 tag, LINE) { profile_event(p, tag | 1u << 31, line); }
template <int W>
FN void profile_write(const Profile &p, i32 *to, LINE) {
  const u32 stored = p.used < p.room ? p.used : p.room, now = host_clock();
  const u32 sm = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; /* of its own */
  const u32 head[3] = {p.timer, sm, p.used};
  const u32 tail[4] = {p.clock, now, now, gridDim.x * gridDim.y * gridDim.z};
  for (u32 k = 0; k < 3; k++) host_store_global(to + k, &head[k], 4, line);
  for (u32 k = 0; k < stored; k++) {
    u32 word;
    host_load_shared(&word, p.at + k * 4, 4, line);
    host_store_global(to + 3 + k, &word, 4, line);
  }
  for (u32 k = 0; k < 4; k++) host_store_global(to + W + k, &tail[k], 4, line);
}

/* ---- matrix products ----------------------------------------------------------------------- */

FN void wgmma_fence(LINE) { host_wgmma_fence(line); }
FN void wgmma_commit(LINE) { host_wgmma_commit(line); }
template <int N>
FN void wgmma_wait(LINE) {
  host_wgmma_wait(N, line);
}
/* matrix-descriptor-encode of bits 0-13 and 16-29 */
template <typename T, int N> FN void hold_operand(T *) {}
template <int N> FN void keep_operand(const u32 *) {}

FN u32 wgmma_address(u32 a, u32 leading) {
  return (a & 0x3ffff) >> 4 | (leading & 0x3ffff) >> 4 << 16;
}

/* Functions named wgmma_m64n<N>k<K>_<D>_<A>[_<B>]_<major of A><major of B>; r: A in registers. */
#define HOST_WGMMA_SMEM(name, N, d, ia, ib, ta, tb)                                             \
  FN void name(HostRegister_##d *r, u32 a, u32 ah, u32 b, u32 bh, LINE) {                       \
    const HostWgmma w = {r, 0, a, ah, b, bh, N, HOST_##d, HOST_##ia, HOST_##ib, ta, tb, false}; \
    host_wgmma(&w, line);                                                                       \
  }                                                                                             \
  FN void name##_fresh(HostRegister_##d *r, u32 a, u32 ah, u32 b, u32 bh, LINE) {               \
    const HostWgmma w = {r, 0, a, ah, b, bh, N, HOST_##d, HOST_##ia, HOST_##ib, ta, tb, true};  \
    host_wgmma(&w, line);                                                                       \
  }
#define HOST_WGMMA_REGS(name, N, d, ia, ib, tb)                                                   \
  FN void name(HostRegister_##d *r, const u32 *a, u32 b, u32 bh, LINE) {                          \
    const HostWgmma w = {r, a, 0, 0, b, bh, N, HOST_##d, HOST_##ia, HOST_##ib, false, tb, false}; \
    host_wgmma(&w, line);                                                                         \
  }                                                                                               \
  FN void name##_fresh(HostRegister_##d *r, const u32 *a, u32 b, u32 bh, LINE) {                  \
    const HostWgmma w = {r, a, 0, 0, b, bh, N, HOST_##d, HOST_##ia, HOST_##ib, false, tb, true};  \
    host_wgmma(&w, line);                                                                         \
  }
#define HOST_WGMMA_HALF(N, d, in)                                                 \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k16_##d##_##in##_kk, N, d, in, in, false, false) \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k16_##d##_##in##_kn, N, d, in, in, false, true)  \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k16_##d##_##in##_mk, N, d, in, in, true, false)  \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k16_##d##_##in##_mn, N, d, in, in, true, true)   \
  HOST_WGMMA_REGS(wgmma_m64n##N##k16_##d##_##in##_rk, N, d, in, in, false)        \
  HOST_WGMMA_REGS(wgmma_m64n##N##k16_##d##_##in##_rn, N, d, in, in, true)
#define HOST_WGMMA_BYTE(N, d, in)                                                 \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k32_##d##_##in##_kk, N, d, in, in, false, false) \
  HOST_WGMMA_REGS(wgmma_m64n##N##k32_##d##_##in##_rk, N, d, in, in, false)
#define HOST_WGMMA_MIXED(N, d, a, b)                                                 \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k32_##d##_##a##_##b##_kk, N, d, a, b, false, false) \
  HOST_WGMMA_REGS(wgmma_m64n##N##k32_##d##_##a##_##b##_rk, N, d, a, b, false)
#define HOST_WGMMA(N)                                                              \
  HOST_WGMMA_HALF(N, f32, f16)                                                     \
  HOST_WGMMA_HALF(N, f32, bf16)                                                    \
  HOST_WGMMA_HALF(N, f16, f16)                                                     \
  HOST_WGMMA_SMEM(wgmma_m64n##N##k8_f32_tf32_kk, N, f32, tf32, tf32, false, false) \
  HOST_WGMMA_REGS(wgmma_m64n##N##k8_f32_tf32_rk, N, f32, tf32, tf32, false)        \
  HOST_WGMMA_BYTE(N, f32, e4m3)                                                    \
  HOST_WGMMA_BYTE(N, f32, e5m2)                                                    \
  HOST_WGMMA_BYTE(N, f16, e4m3)                                                    \
  HOST_WGMMA_BYTE(N, f16, e5m2)                                                    \
  HOST_WGMMA_MIXED(N, f32, e4m3, e5m2)                                             \
  HOST_WGMMA_MIXED(N, f32, e5m2, e4m3)                                             \
  HOST_WGMMA_MIXED(N, f16, e4m3, e5m2)                                             \
  HOST_WGMMA_MIXED(N, f16, e5m2, e4m3)
/* the instruction of integers has fewer sizes */
#define HOST_WGMMA_INT(N) HOST_WGMMA_BYTE(N, s32, s8) HOST_WGMMA_BYTE(N, s32, u8)
#define HOST_MMA(K, d, in)                                                                    \
  FN void mma_m16n8k##K##_##d##_##in(HostRegister_##d *r, const u32 *a, const u32 *b, LINE) { \
    const HostMma x = {r, a, b, HOST_##d, HOST_##in};                                         \
    host_mma(&x, line);                                                                       \
  }
#define HOST_PIN(N)                                               \
  FN void pin_f32_##N(f32 *d, LINE) { host_pin(d, N * 4, line); } \
  FN void pin_u32_##N(u32 *d, LINE) { host_pin(d, N * 4, line); } \
  FN void pin_i32_##N(i32 *d, LINE) { host_pin(d, N * 4, line); }
typedef f32 HostRegister_f32;
typedef u32 HostRegister_f16;
typedef i32 HostRegister_s32;
HOST_MMA(8, f32, tf32)
HOST_MMA(16, f32, f16)
HOST_MMA(16, f32, bf16)
HOST_MMA(32, f32, e4m3) HOST_MMA(32, f32, e5m2) HOST_MMA(32, s32, s8) HOST_MMA(32, s32, u8)
    HOST_MMA(64, s32, s4) HOST_MMA(64, s32, u4)

    /* clang-format off */
HOST_WGMMA(8) HOST_WGMMA(16) HOST_WGMMA(24) HOST_WGMMA(32) HOST_WGMMA(40) HOST_WGMMA(48)
HOST_WGMMA(56) HOST_WGMMA(64) HOST_WGMMA(72) HOST_WGMMA(80) HOST_WGMMA(88) HOST_WGMMA(96)
HOST_WGMMA(104) HOST_WGMMA(112) HOST_WGMMA(120) HOST_WGMMA(128) HOST_WGMMA(136) HOST_WGMMA(144)
HOST_WGMMA(152) HOST_WGMMA(160) HOST_WGMMA(168) HOST_WGMMA(176) HOST_WGMMA(184) HOST_WGMMA(192)
HOST_WGMMA(200) HOST_WGMMA(208) HOST_WGMMA(216) HOST_WGMMA(224) HOST_WGMMA(232) HOST_WGMMA(240)
HOST_WGMMA(248) HOST_WGMMA(256)
HOST_WGMMA_INT(8) HOST_WGMMA_INT(16) HOST_WGMMA_INT(24) HOST_WGMMA_INT(32) HOST_WGMMA_INT(48)
HOST_WGMMA_INT(64) HOST_WGMMA_INT(80) HOST_WGMMA_INT(96) HOST_WGMMA_INT(112) HOST_WGMMA_INT(128)
HOST_WGMMA_INT(144) HOST_WGMMA_INT(160) HOST_WGMMA_INT(176) HOST_WGMMA_INT(192)
HOST_WGMMA_INT(208) HOST_WGMMA_INT(224) HOST_WGMMA_INT(240) HOST_WGMMA_INT(256)
HOST_PIN(1) HOST_PIN(2) HOST_PIN(3) HOST_PIN(4) HOST_PIN(5) HOST_PIN(6) HOST_PIN(7) HOST_PIN(8)
HOST_PIN(9) HOST_PIN(10) HOST_PIN(11) HOST_PIN(12) HOST_PIN(13) HOST_PIN(14) HOST_PIN(15)
HOST_PIN(16) HOST_PIN(17) HOST_PIN(18) HOST_PIN(19) HOST_PIN(20) HOST_PIN(21) HOST_PIN(22)
HOST_PIN(23) HOST_PIN(24) HOST_PIN(25) HOST_PIN(26) HOST_PIN(27) HOST_PIN(28) HOST_PIN(29)
HOST_PIN(30) HOST_PIN(31) HOST_PIN(32) HOST_PIN(33) HOST_PIN(34) HOST_PIN(35) HOST_PIN(36)
HOST_PIN(37) HOST_PIN(38) HOST_PIN(39) HOST_PIN(40) HOST_PIN(41) HOST_PIN(42) HOST_PIN(43)
HOST_PIN(44) HOST_PIN(45) HOST_PIN(46) HOST_PIN(47) HOST_PIN(48) HOST_PIN(49) HOST_PIN(50)
HOST_PIN(51) HOST_PIN(52) HOST_PIN(53) HOST_PIN(54) HOST_PIN(55) HOST_PIN(56) HOST_PIN(57)
HOST_PIN(58) HOST_PIN(59) HOST_PIN(60) HOST_PIN(61) HOST_PIN(62) HOST_PIN(63) HOST_PIN(64)
HOST_PIN(65) HOST_PIN(66) HOST_PIN(67) HOST_PIN(68) HOST_PIN(69) HOST_PIN(70) HOST_PIN(71)
HOST_PIN(72) HOST_PIN(73) HOST_PIN(74) HOST_PIN(75) HOST_PIN(76) HOST_PIN(77) HOST_PIN(78)
HOST_PIN(79) HOST_PIN(80) HOST_PIN(81) HOST_PIN(82) HOST_PIN(83) HOST_PIN(84) HOST_PIN(85)
HOST_PIN(86) HOST_PIN(87) HOST_PIN(88) HOST_PIN(89) HOST_PIN(90) HOST_PIN(91) HOST_PIN(92)
HOST_PIN(93) HOST_PIN(94) HOST_PIN(95) HOST_PIN(96) HOST_PIN(97) HOST_PIN(98) HOST_PIN(99)
HOST_PIN(100) HOST_PIN(101) HOST_PIN(102) HOST_PIN(103) HOST_PIN(104) HOST_PIN(105) HOST_PIN(106)
HOST_PIN(107) HOST_PIN(108) HOST_PIN(109) HOST_PIN(110) HOST_PIN(111) HOST_PIN(112) HOST_PIN(113)
HOST_PIN(114) HOST_PIN(115) HOST_PIN(116) HOST_PIN(117) HOST_PIN(118) HOST_PIN(119) HOST_PIN(120)
HOST_PIN(121) HOST_PIN(122) HOST_PIN(123) HOST_PIN(124) HOST_PIN(125) HOST_PIN(126) HOST_PIN(127)
HOST_PIN(128)
    /* clang-format on */

/* ---- tensor memory ------------------------------------------------------------------------- */

template <int CTAS>
FN void tmem_alloc(u32 slot, u32 columns, LINE) {
  host_tmem_alloc(slot, columns, CTAS, line);
}
template <int CTAS>
FN void tmem_relinquish(LINE) {
  host_tmem_relinquish(CTAS, line);
}
template <int CTAS>
FN void tmem_dealloc(u32 tmem, u32 columns, LINE) {
  host_tmem_dealloc(tmem, columns, CTAS, line);
}
FN void tmem_wait_load(LINE) { host_tmem_wait(false, line); }
FN void tmem_wait_store(LINE) { host_tmem_wait(true, line); }
FN void tcgen05_fence_before(LINE) { host_tcgen05_fence(true, line); }
FN void tcgen05_fence_after(LINE) { host_tcgen05_fence(false, line); }
FN void tcgen05_commit(u32 b, LINE) { host_tcgen05_commit(b, 0, line); }
FN void tcgen05_commit_pair(u32 b, u32 mask, LINE) { host_tcgen05_commit(b, mask, line); }

/* r: the registers of the lane, in the instruction's order */
#define HOST_TMEM(shape)                                                            \
  template <int N, bool HALVES>                                                     \
  FN void tmem_load_##shape(u32 *const *r, u32 a, LINE) {                           \
    const HostTmemMove x = {r, a, HOST_##shape, N, HALVES, 0, false, HOST_OTHER, 0}; \
    host_tmem_load(&x, line);                                                       \
  }                                                                                 \
  template <int N, bool HALVES>                                                     \
  FN void tmem_store_##shape(u32 *const *r, u32 a, LINE) {                          \
    const HostTmemMove x = {r, a, HOST_##shape, N, HALVES, 0, false, HOST_OTHER, 0}; \
    host_tmem_store(&x, line);                                                      \
  }
HOST_TMEM(32x32b)
HOST_TMEM(16x256b)
HOST_TMEM(16x128b)

/* .red; the wait for the registers is part of it here */
template <int N, u8 HOW, HostType TYPE>
FN void tmem_load_reduce(u32 *const *r, u32 *reduced, u32 a, bool fresh, LINE) {
  const HostTmemMove x = {r, a, HOST_32x32b, N, false, HOW, fresh, TYPE, reduced};
  host_tmem_load(&x, line);
  host_tmem_wait(false, line);
  host_tmem_reduce(&x, line);
}

#define HOST_TCGEN05_COPY(name, shape)                             \
  FN void tcgen05_copy_##name(u32 d, u32 low, u32 high, LINE) {        \
    const HostTcgen05Copy x = {d, low, high, shape, false};            \
    host_tcgen05_copy(&x, line);                                       \
  }                                                                    \
  FN void tcgen05_copy_##name##_pair(u32 d, u32 low, u32 high, LINE) { \
    const HostTcgen05Copy x = {d, low, high, shape, true};             \
    host_tcgen05_copy(&x, line);                                       \
  }
HOST_TCGEN05_COPY(128x256b, HOST_128x256b)
HOST_TCGEN05_COPY(128x128b, HOST_128x128b)
HOST_TCGEN05_COPY(64x128b_warpx2, HOST_64x128b)
HOST_TCGEN05_COPY(32x128b_warpx4, HOST_32x128b)

/* tcgen05_mma_<kind>[_pair][_tmem]: of A in shared memory, or in tensor memory. Sparse ones have
 * _sp after mma, block-scaled ones the addresses of the scales. */
#define HOST_MMA5(name, kind, scales, sp, pair, more, meta, sa, sb)                                \
  FN void tcgen05_mma##name(u32 d, u32 a, u32 ah, u32 b, u32 bh, u32 i more, bool adds, LINE) {    \
    const HostTcgen05 x = {d,  a,  ah,   b,    bh,     i,  sa,   sb,                               \
                           meta, kind, scales, sp, pair, false, adds};                             \
    host_tcgen05_mma(&x, line);                                                                    \
  }                                                                                                \
  FN void tcgen05_mma##name##_tmem(u32 d, u32 a, u32 b, u32 bh, u32 i more, bool adds, LINE) {     \
    const HostTcgen05 x = {d,  a,  0,    b,    bh,     i,  sa,   sb,                               \
                           meta, kind, scales, sp, pair, true, adds};                              \
    host_tcgen05_mma(&x, line);                                                                    \
  }
#define META , u32 m
#define SCALES , u32 sa, u32 sb
#define META_SCALES , u32 m, u32 sa, u32 sb
#define HOST_MMA5_PLAIN(name, kind)                                       \
  HOST_MMA5(_##name, kind, 0, false, false, , 0, 0, 0)                    \
  HOST_MMA5(_##name##_pair, kind, 0, false, true, , 0, 0, 0)              \
  HOST_MMA5(_sp_##name, kind, 0, true, false, META, m, 0, 0)              \
  HOST_MMA5(_sp_##name##_pair, kind, 0, true, true, META, m, 0, 0)
#define HOST_MMA5_SCALED(name, kind, scales)                                          \
  HOST_MMA5(_##name, kind, scales, false, false, SCALES, 0, sa, sb)                   \
  HOST_MMA5(_##name##_pair, kind, scales, false, true, SCALES, 0, sa, sb)             \
  HOST_MMA5(_sp_##name, kind, scales, true, false, META_SCALES, m, sa, sb)            \
  HOST_MMA5(_sp_##name##_pair, kind, scales, true, true, META_SCALES, m, sa, sb)
HOST_MMA5_PLAIN(f16, HOST_KIND_f16)
HOST_MMA5_PLAIN(f8f6f4, HOST_KIND_f8f6f4)
HOST_MMA5_PLAIN(i8, HOST_KIND_i8)
HOST_MMA5_SCALED(mxf8f6f4_1x, HOST_KIND_mxf8f6f4, 1)
HOST_MMA5_SCALED(mxf4nvf4_2x, HOST_KIND_mxf4nvf4, 2)
HOST_MMA5_SCALED(mxf4nvf4_4x, HOST_KIND_mxf4nvf4, 4)

/* matrix-descriptor-encode of an address, and the bits 16 to 29 as they are */
FN u32 tcgen05_address(u32 a, u32 leading) { return (a & 0x3ffff) >> 4 | leading; }

/* ---- copies of pairs and of rows, cluster launch control ----------------------------------- */

/* barrier: in the window of the cluster */
#define HOST_TMA_PAIR(rank, parameters, ...)                                                     \
  FN void tma_load_pair_##rank##d(u32 dst, const TensorMap *m, u32 barrier, parameters, LINE) {  \
    const i32 c[] = {__VA_ARGS__};                                                               \
    host_tma_pair(dst, m, barrier, 0, c, rank, line);                                            \
  }                                                                                              \
  FN void tma_multicast_pair_##rank##d(u32 dst, const TensorMap *m, u32 barrier, u32 mask,       \
                                       parameters, LINE) {                                       \
    const i32 c[] = {__VA_ARGS__};                                                               \
    host_tma_pair(dst, m, barrier, mask, c, rank, line);                                         \
  }
/* clang-format off */
HOST_TMA_PAIR(1, i32 a, a)
HOST_TMA_PAIR(2, i32 a COMMA i32 b, a, b)
HOST_TMA_PAIR(3, i32 a COMMA i32 b COMMA i32 c_, a, b, c_)
HOST_TMA_PAIR(4, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d, a, b, c_, d)
HOST_TMA_PAIR(5, i32 a COMMA i32 b COMMA i32 c_ COMMA i32 d COMMA i32 e, a, b, c_, d, e)
/* clang-format on */
FN void tma_gather4(u32 dst, const TensorMap *m, u32 barrier, i32 column, const i32 *rows, LINE) {
  const i32 c[] = {column, rows[0], rows[1], rows[2], rows[3]};
  host_gather(dst, m, barrier, c, line);
}
FN void tma_scatter4(const TensorMap *m, u32 src, i32 column, const i32 *rows, LINE) {
  const i32 c[] = {column, rows[0], rows[1], rows[2], rows[3]};
  host_scatter(m, src, c, line);
}
FN void try_cancel(u32 result, u32 barrier, LINE) { host_try_cancel(result, barrier, line); }
FN bool query_cancel(u32 result, u32 *block, LINE) {
  return host_query_cancel(result, block, line);
}

/* ---- launch -------------------------------------------------------------------------------- */

/* host_entry(args): calls the kernel with what the pointers point at, as cuLaunchKernel does.
     */
    template <typename... P, size_t... I>
    static inline void host_call(void (*kernel)(P...), void **args, std::index_sequence<I...>) {
  kernel(*(P *)args[I]...);
}
template <typename... P>
static inline void host_call(void (*kernel)(P...), void **args) {
  host_call(kernel, args, std::index_sequence_for<P...>());
}
#define HOST_ENTRY(kernel) \
  extern "C" void host_entry(void **args) { host_call(kernel, args); }

#endif
