// fuzz_kernel: grid 2 x 1 x 1, block 256, 2320 bytes of dynamic shared memory

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

// start of the dynamic shared memory, a multiple of 1024
extern __shared__ __attribute__((aligned(1024))) u8 shared_memory[];
FN u32 shared_base() {
  u32 r;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
      : "=r"(r) : "l"(shared_memory));
  return r;
}

// tells the compiler that all lanes of a warp have the same x
FN u32 warp_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

FN void barrier_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(count) : "memory");
}

FN void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FN void block_sync() { __syncthreads(); }

FN void from_bits(f32& x, u32 b) { x = __uint_as_float(b); }
template <typename T> FN void from_bits(T& x, u32 b) { x = (T)(sizeof(T) == 1 ? (u8)b : b); }

template <typename T, int N> FN void unpack(T* d, const u32* w) {
  #pragma unroll
  for (int i = 0; i < N; i++)
    from_bits(d[i], w[i * (int)sizeof(T) / 4] >> (i * (int)sizeof(T) % 4 * 8));
}

template <typename T, int N> FN void ld_global(T* d, const T* a) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  if constexpr (bytes == 16) {
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(a) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "l"(a) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(w[0]) : "l"(a) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(w[0]) : "l"(a) : "memory");
  } else {
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(w[0]) : "l"(a) : "memory");
  }
  unpack<T, N>(d, w);
}

// what stands for elements outside of an array
template <typename T, int N> FN void zero(T* d) {
  #pragma unroll
  for (int i = 0; i < N; i++) from_bits(d[i], 0);
}

// all 128 lanes of warpgroup wg
FN void lanes_sync(u32 wg) { asm volatile("bar.sync %0, 128;" :: "r"(wg + 1) : "memory"); }

FN u32 bits_of(f32 x) { return __float_as_uint(x); }
template <typename T> FN u32 bits_of(T x) {
  return sizeof(T) == 1 ? (u8)x : sizeof(T) == 2 ? (u16)x : (u32)x;
}

// N elements to or from the 32-bit words that a vector instruction moves
template <typename T, int N> FN void pack(u32* w, const T* s) {
  #pragma unroll
  for (int i = 0; i < (N * (int)sizeof(T) + 3) / 4; i++) {
    w[i] = 0;
    #pragma unroll
    for (int k = 0; k < 4 / (int)sizeof(T) && i * 4 / (int)sizeof(T) + k < N; k++)
      w[i] |= bits_of(s[i * 4 / (int)sizeof(T) + k]) << (k * (int)sizeof(T) * 8);
  }
}

template <typename T, int N> FN void st_shared(u32 a, const T* s) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  pack<T, N>(w, s);
  if constexpr (bytes == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};"
                 :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};"
                 :: "r"(a), "r"(w[0]), "r"(w[1]) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(a), "r"(w[0]) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(a), "h"((u16)w[0]) : "memory");
  } else {
    asm volatile("st.shared.b8 [%0], %1;" :: "r"(a), "r"(w[0]) : "memory");
  }
}

FN void barrier_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}

// try_wait suspends the lane in hardware, so the loop is not a hot spin
FN void barrier_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\n"
               "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra D;\nbra W;\nD: }" :: "r"(b), "r"(parity) : "memory");
}

template <typename T, int N> FN void ld_shared(T* d, u32 a) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  if constexpr (bytes == 16) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "r"(a) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  } else {
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  }
  unpack<T, N>(d, w);
}

template <typename T, typename S> FN T bitcast(S x) { T r; from_bits(r, bits_of(x)); return r; }

FN f32 max_f32(f32 a, f32 b) {
  f32 r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}

// what this lane wrote to shared memory becomes visible to TMA and tensor cores
FN void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// true in one lane of the warp, the same one every time. With "lane == 0" instead, ptxas would put
// a vote loop around every TMA instruction.
FN bool elect_one() {
  u32 r;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
  return r != 0;
}

FN void bulk_store(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}

FN void store_group_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// until at most N groups of this lane are pending
template <int N> FN void store_group_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}

template <typename T> FN T max_int(T a, T b) { return a < b ? b : a; }

template <typename T> FN T min_int(T a, T b) { return b < a ? b : a; }

template <typename T> FN T wrap_add(T a, T b) { return (T)((u32)a + (u32)b); }

// x of the lane whose number differs in the bits of mask
template <typename T> FN T shuffle_xor(T x, int mask) {
  T r; from_bits(r, __shfl_xor_sync(0xffffffffu, bits_of(x), mask)); return r;
}

template <typename T, int N> FN void st_global(T* a, const T* s) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  pack<T, N>(w, s);
  if constexpr (bytes == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
                 :: "l"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};"
                 :: "l"(a), "r"(w[0]), "r"(w[1]) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("st.global.b32 [%0], %1;" :: "l"(a), "r"(w[0]) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("st.global.b16 [%0], %1;" :: "l"(a), "h"((u16)w[0]) : "memory");
  } else {
    asm volatile("st.global.b8 [%0], %1;" :: "l"(a), "r"(w[0]) : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
fuzz_kernel(
    const f32* x8_1 /* gmem float32[48,2,2] */,
    const u32* x9_2 /* gmem uint32[1,1] */,
    const i16* x21_3 /* gmem int16[7] */,
    const i16* x23_4 /* gmem int16[1,1] */,
    const bool* x27_5 /* gmem bool[7,96] */,
    const u16* x28_6 /* gmem uint16[7,96] */,
    const u16* x29_7 /* gmem uint16[7,96] */,
    const u16* x30_8 /* gmem uint16[7,6,16] */,
    const i16* x40_9 /* gmem int16[3,32] */,
    f32* o10_10 /* gmem float32[1,2,2,2,48] */,
    i16* o31_11 /* gmem int16[28] */,
    i16* o41_12 /* gmem int16[33,8] */,
    i16* o42_13 /* gmem int16[2,2,2,1,32,5] */) {
  const u32 smem = shared_base();
  const u32 wg = warp_uniform(threadIdx.x >> 7);
  const u32 tid = threadIdx.x & 127;
  const u32 warp = warp_uniform(threadIdx.x >> 5 & 3);
  const u32 lane = threadIdx.x & 31;
  u32 phase_14 = 0;
  u32 phase_15 = 0;
  u32 phase_16 = 0;
  if (threadIdx.x == 0) {
    for (int k = 0; k < 2; k++) barrier_init(smem + 2272 + k * 8, 1);
    for (int k = 0; k < 2; k++) barrier_init(smem + 2288 + k * 8, 1);
    for (int k = 0; k < 2; k++) barrier_init(smem + 2304 + k * 8, 1);
    barrier_init_fence();
  }
  block_sync();
  // scope  fz2.py:5
#line 5 "/tmp/hcuda/t/fz2.py"
  {
    block_sync();
#line 5
    const u32 q12_17 = smem + 0; // smem float32[2,48]
#line 5
    const u32 q13_18 = smem + 2272; // barrier[2]
#line 23 "<x>"
    const i32 v_19 = (i32)(blockIdx.x);
    const i32 v_20 = (i32)wg;
#line 26
    const bool v_21 = v_20 == 0;
    // if  <x>:26
#line 26
    if (v_21) {
      // load  <x>:28
      f32 v_22[1];
      {
        const i32 index_23_d0 = warp * 32 + lane;
        const f32* const p = x8_1;
        const i32 c1 = (index_23_d0) % 48;
        const i32 c0 = (index_23_d0) / 48;
        if (index_23_d0 < 96) ld_global<f32, 1>(&v_22[0], p + (i64)c1 * 4 + (i64)c0);
        else zero<f32, 1>(&v_22[0]);
      }
#line 28
      lanes_sync(wg);
      // store  <x>:28
#line 28
      {
        const i32 index_24_d0 = warp * 32 + lane;
        const u32 p = q12_17 + warp * 128 + lane * 4;
        if (index_24_d0 < 96) st_shared<f32, 1>(p, &v_22[0]);
      }
#line 28
      lanes_sync(wg);
      // barrier_arrive  <x>:29
#line 29
      if (tid == 0) barrier_arrive(q13_18);
    }
    // barrier_wait  <x>:32
    barrier_wait(q13_18 + v_20 * 8, phase_14 >> (v_20) & 1);
    phase_14 ^= 1u << (v_20);
    // load  <x>:33
#line 33
    f32 v_25[1];
    {
      const i32 index_26_d0 = warp * 32 + lane;
      const u32 p = q12_17 + warp * 128 + lane * 4;
      if (index_26_d0 < 96) ld_shared<f32, 1>(&v_25[0], p);
      else zero<f32, 1>(&v_25[0]);
    }
    // load  <x>:34
#line 34
    u32 v_27;
    ld_global<u32, 1>(&v_27, x9_2);
#line 34
    const f32 v_28 = bitcast<f32>(v_27);
#line 34
    f32 v_29[1];
#line 34
    v_29[0] = max_f32(v_25[0], v_28);
#line 34
    lanes_sync(wg);
    // store  <x>:34
#line 34
    {
      const i32 index_30_d0 = warp * 32 + lane;
      const u32 p = q12_17 + warp * 128 + lane * 4;
      if (index_30_d0 < 96) st_shared<f32, 1>(p, &v_29[0]);
    }
    // commit_smem  <x>:35
#line 35
    async_proxy_fence();
    lanes_sync(wg);
    // copy_smem_to_gmem  <x>:36
#line 36
    if (warp == 0 && elect_one()) {
#line 36
      bulk_store(o10_10 + (i64)v_19 * 192 + (i64)v_20 * 96, q12_17, 384);
      store_group_commit();
    }
    // wait_smem_to_gmem  <x>:37
#line 37
    if (warp == 0 && elect_one()) store_group_wait<0>();
    lanes_sync(wg);
#line 38
    const i32 v_31 = v_20 + 1;
#line 38
    const i32 v_32 = v_31 % 2;
    // barrier_arrive  <x>:38
#line 38
    if (tid == 0) barrier_arrive(q13_18 + v_32 * 8);
    // if  <x>:39
#line 39
    if (v_21) {
      // barrier_wait  <x>:41
      barrier_wait(q13_18, phase_14 >> (0) & 1);
      phase_14 ^= 1u << (0);
    }
    // scope  <x>:68
#line 68
    {
      block_sync();
#line 68
      const u32 s14_33 = smem + 1024; // smem int16[7]
#line 68
      const u32 b15_34 = smem + 2288; // barrier[2]
      // if  <x>:44
#line 44
      if (v_21) {
        // load  <x>:46
        i16 v_35[1];
        {
          const i32 index_36_d0 = warp * 32 + lane;
          const i16* const p = x21_3 + warp * 32 + lane;
          if (index_36_d0 < 7) ld_global<i16, 1>(&v_35[0], p);
          else zero<i16, 1>(&v_35[0]);
        }
#line 46
        lanes_sync(wg);
        // store  <x>:46
#line 46
        {
          const i32 index_37_d0 = warp * 32 + lane;
          const u32 p = s14_33 + warp * 64 + lane * 2;
          if (index_37_d0 < 7) st_shared<i16, 1>(p, &v_35[0]);
        }
#line 46
        lanes_sync(wg);
        // barrier_arrive  <x>:47
#line 47
        if (tid == 0) barrier_arrive(b15_34);
      }
      // barrier_wait  <x>:50
      barrier_wait(b15_34 + v_20 * 8, phase_15 >> (v_20) & 1);
      phase_15 ^= 1u << (v_20);
      // load  <x>:51
#line 51
      i16 v_38[7];
      {
        const u32 p = s14_33;
        #pragma unroll
        for (int i = 0; i < 7; i++) {
          ld_shared<i16, 1>(&v_38[i], p + i * 2);
        }
      }
      // switch  <x>:60
      i16 v_40[7];
      switch (max_int(0, min_int(3, v_19))) {
        case 0: {
          // load  <x>:53
#line 53
          i16 v_41;
          ld_global<i16, 1>(&v_41, x23_4);
#line 53
          const i16 v_42 = (i16)(v_41 >> (i16)5);
          // <x>:60
#line 60
          #pragma unroll
          for (int r = 0; r < 7; r++) v_40[r] = v_42;
          break;
        }
        case 1: {
          // load  <x>:55
#line 55
          i16 v_43;
          ld_global<i16, 1>(&v_43, x23_4);
          // <x>:60
#line 60
          #pragma unroll
          for (int r = 0; r < 7; r++) v_40[r] = v_43;
          break;
        }
        case 2: {
#line 60
          #pragma unroll
          for (int r = 0; r < 7; r++) v_40[r] = (i16)-6;
          break;
        }
        default: {
          // load  <x>:59
#line 59
          bool v_44[7];
          {
            const i32 index_45_d1 = warp * 32 + lane;
            const bool* const p = x27_5 + warp * 32 + lane;
            #pragma unroll
            for (int i = 0; i < 7; i++) {
              if (index_45_d1 < 96) ld_global<bool, 1>(&v_44[i], p + i * 96);
              else zero<bool, 1>(&v_44[i]);
            }
          }
#line 59
          bool v_46[7];
          #pragma unroll
          for (int r = 0; r < 7; r++) {
#line 59
            v_46[r] = v_44[r] | true;
          }
          // load  <x>:59
#line 59
          u16 v_47[7];
          {
            const i32 index_48_d1 = warp * 32 + lane;
            const u16* const p = x28_6 + warp * 32 + lane;
            #pragma unroll
            for (int i = 0; i < 7; i++) {
              if (index_48_d1 < 96) ld_global<u16, 1>(&v_47[i], p + i * 96);
              else zero<u16, 1>(&v_47[i]);
            }
          }
          // load  <x>:59
#line 59
          u16 v_49[7];
          {
            const i32 index_50_d1 = warp * 32 + lane;
            const u16* const p = x29_7 + warp * 32 + lane;
            #pragma unroll
            for (int i = 0; i < 7; i++) {
              if (index_50_d1 < 96) ld_global<u16, 1>(&v_49[i], p + i * 96);
              else zero<u16, 1>(&v_49[i]);
            }
          }
#line 59
          u16 v_51[7];
          #pragma unroll
          for (int r = 0; r < 7; r++) {
#line 59
            v_51[r] = min_int(v_47[r], v_49[r]);
          }
          // load  <x>:59
#line 59
          u16 v_52[7];
          {
            const i32 index_53_d1 = warp * 32 + lane;
            const u16* const p = x30_8 + warp * 32 + lane;
            #pragma unroll
            for (int i = 0; i < 7; i++) {
              if (index_53_d1 < 96) ld_global<u16, 1>(&v_52[i], p + i * 96);
              else zero<u16, 1>(&v_52[i]);
            }
          }
#line 59
          i16 v_55[7];
          #pragma unroll
          for (int r = 0; r < 7; r++) {
#line 59
            const u16 v_54 = v_46[r] ? v_51[r] : v_52[r];
#line 59
            v_55[r] = bitcast<i16>(v_54);
          }
          // <x>:60
#line 60
          #pragma unroll
          for (int r = 0; r < 7; r++) v_40[r] = v_55[r];
          break;
        }
      }
      // reduce add  <x>:60
#line 60
      i16 v_56[7];
      #pragma unroll
      for (int k = 0; k < 7; k++) {
        v_56[k] = (i16)0;
      }
      {
        const i32 index_57_d1 = warp * 32 + lane;
        #pragma unroll
        for (int r = 0; r < 7; r++) {
          if (index_57_d1 < 96) v_56[r] = wrap_add(v_56[r], v_40[r]);
        }
      }
      #pragma unroll
      for (int k = 0; k < 7; k++) {
        v_56[k] = wrap_add(v_56[k], shuffle_xor(v_56[k], 1));
        v_56[k] = wrap_add(v_56[k], shuffle_xor(v_56[k], 2));
        v_56[k] = wrap_add(v_56[k], shuffle_xor(v_56[k], 4));
        v_56[k] = wrap_add(v_56[k], shuffle_xor(v_56[k], 8));
        v_56[k] = wrap_add(v_56[k], shuffle_xor(v_56[k], 16));
      }
      {
        const u32 p = smem + 2048 + wg * 112;
        #pragma unroll
        for (int k = 0; k < 7; k++) {
          st_shared<i16, 1>(p + k * 4 + warp * 28, &v_56[k]);
        }
        lanes_sync(wg);
        #pragma unroll
        for (int k = 0; k < 7; k++) {
          v_56[k] = (i16)0;
          #pragma unroll
          for (int w = 0; w < 4; w++) {
            i16 x;
            ld_shared<i16, 1>(&x, p + k * 4 + w * 28);
            v_56[k] = wrap_add(v_56[k], x);
          }
        }
        lanes_sync(wg);
      }
#line 60
      i16 v_58[7];
      #pragma unroll
      for (int r = 0; r < 7; r++) {
#line 60
        v_58[r] = max_int(v_38[r], v_56[r]);
      }
#line 60
      lanes_sync(wg);
      // store  <x>:60
#line 60
      if (warp < 1 && lane < 1) {
        {
          const u32 p = s14_33;
          #pragma unroll
          for (int i = 0; i < 7; i++) {
            st_shared<i16, 1>(p + i * 2, &v_58[i]);
          }
        }
      }
      // commit_smem  <x>:61
#line 61
      async_proxy_fence();
      lanes_sync(wg);
#line 62
      const i32 v_60 = v_19 * 2;
#line 62
      const i32 v_61 = v_60 + v_20;
#line 62
      const i32 v_62 = v_61 * 7;
      // copy_smem_to_gmem by all lanes  <x>:62
#line 62
      #pragma unroll 4
      for (i32 c = tid; c < 7; c += 128) {
        const i32 c0 = c;
        i16 x[1];
        ld_shared<i16, 1>(x, s14_33 + c0 * 2);
        st_global<i16, 1>(o31_11 + (i64)v_62 + (i64)c0 * 1, x);
      }
      lanes_sync(wg);
      if (warp == 0 && elect_one()) store_group_commit();
      // wait_smem_to_gmem  <x>:63
#line 63
      if (warp == 0 && elect_one()) store_group_wait<0>();
      lanes_sync(wg);
      // barrier_arrive  <x>:64
#line 64
      if (tid == 0) barrier_arrive(b15_34 + v_32 * 8);
      // if  <x>:65
#line 65
      if (v_21) {
        // barrier_wait  <x>:67
        barrier_wait(b15_34, phase_15 >> (0) & 1);
        phase_15 ^= 1u << (0);
      }
    }
    // scope  <x>:87
#line 87
    {
      block_sync();
#line 87
      const u32 s33_63 = smem + 1024; // smem int16[1,32]
#line 87
      const u32 b34_64 = smem + 2304; // barrier[2]
      // if  <x>:70
#line 70
      if (v_21) {
        // load  <x>:72
        i16 v_65[16];
        {
          const i32 index_66_d0 = warp * 16 + lane / 8 * 2;
          const i16* const p = x40_9 + 64 + warp * 512 + lane % 4 * 2 + lane / 4 % 2 + lane / 8 * 64;
          #pragma unroll
          for (int i = 0; i < 16; i++) {
            if (index_66_d0 + i % 2 + i / 2 % 2 * 8 < 1) ld_global<i16, 1>(&v_65[i], p + i % 2 * 32 + i / 2 % 2 * 256 + i / 4 * 8);
            else zero<i16, 1>(&v_65[i]);
          }
        }
#line 72
        lanes_sync(wg);
        // store  <x>:72
#line 72
        {
          const i32 index_67_d0 = warp * 16 + lane / 8 * 2;
          const u32 p = s33_63 + warp * 1024 + lane % 4 * 4 + lane / 4 % 2 * 2 + lane / 8 * 128;
          #pragma unroll
          for (int i = 0; i < 16; i++) {
            if (index_67_d0 + i % 2 + i / 2 % 2 * 8 < 1) st_shared<i16, 1>(p + i % 2 * 64 + i / 2 % 2 * 512 + i / 4 * 16, &v_65[i]);
          }
        }
#line 72
        lanes_sync(wg);
        // barrier_arrive  <x>:73
#line 73
        if (tid == 0) barrier_arrive(b34_64);
      }
      // for  <x>:74
#line 74
      #pragma unroll 1
      for (i32 i35_68 = 0; i35_68 < 2; i35_68++) {
        // barrier_wait  <x>:76
#line 76
        barrier_wait(b34_64 + v_20 * 8, phase_16 >> (v_20) & 1);
        phase_16 ^= 1u << (v_20);
        // load  <x>:77
#line 77
        i16 v_69[1];
        {
          const i32 index_70_d0 = warp * 32 + lane;
          const u32 p = s33_63 + warp * 64 + lane * 2;
          if (index_70_d0 < 32) ld_shared<i16, 1>(&v_69[0], p);
          else zero<i16, 1>(&v_69[0]);
        }
        // <x>:78
#line 78
        i16 v_71[1];
#line 78
        v_71[0] = max_int(v_69[0], (i16)5);
#line 78
        lanes_sync(wg);
        // store  <x>:78
#line 78
        {
          const i32 index_72_d0 = warp * 32 + lane;
          const u32 p = s33_63 + warp * 64 + lane * 2;
          if (index_72_d0 < 32) st_shared<i16, 1>(p, &v_71[0]);
        }
        // commit_smem  <x>:79
#line 79
        async_proxy_fence();
        lanes_sync(wg);
#line 80
        const i32 v_73 = i35_68 * 2;
#line 80
        const i32 v_74 = v_73 + v_20;
#line 80
        const i32 v_75 = v_74 * 2;
#line 80
        const i32 v_76 = v_75 + v_19;
#line 80
        const i32 v_77 = v_20 / 2;
        // copy_smem_to_gmem by all lanes  <x>:80
#line 80
        #pragma unroll 4
        for (i32 c = tid; c < 32; c += 128) {
          const i32 c1 = c % 32;
          i16 x[1];
          ld_shared<i16, 1>(x, s33_63 + c1 * 2);
          st_global<i16, 1>(o41_12 + (i64)v_76 + (i64)v_77 + 8 + (i64)c1 * 8, x);
        }
        lanes_sync(wg);
        if (warp == 0 && elect_one()) store_group_commit();
        // wait_smem_to_gmem  <x>:81
#line 81
        if (warp == 0 && elect_one()) store_group_wait<0>();
        lanes_sync(wg);
        // barrier_arrive  <x>:82
#line 82
        if (tid == 0) barrier_arrive(b34_64 + v_32 * 8);
        const i32 v_78 = min_int(i35_68, 4);
#line 83
        const i32 v_79 = max_int(v_78, 0);
        // store  <x>:83
#line 83
        {
          const i32 index_80_d0 = warp * 32 + lane;
          i16* const p = o42_13 + (i64)v_20 * 640 + (i64)v_19 * 320 + (i64)i35_68 * 160 + (i64)v_79;
          const i32 c1 = (index_80_d0) % 32;
          if (index_80_d0 < 32) st_global<i16, 1>(p + (i64)c1 * 5, &v_69[0]);
        }
#line 83
        lanes_sync(wg);
      }
      // if  <x>:84
#line 84
      if (v_21) {
        // barrier_wait  <x>:86
        barrier_wait(b34_64, phase_16 >> (0) & 1);
        phase_16 ^= 1u << (0);
      }
    }
  }
}
