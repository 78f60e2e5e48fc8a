// Loads and stores. A vector of N elements, aligned to its size, takes one instruction. SMEM is
// addressed by 32-bit addresses in the shared window, GMEM by pointers.

//! shared_base
// start of the dynamic shared memory, a multiple of 1024
extern __shared__ __attribute__((aligned(1024))) u8 shared_memory[];
FN u32 shared_base() {
  u32 r;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
      : "=r"(r) : "l"(shared_memory));
  return r;
}

//! swizzle
// the position of byte a in rows of B bytes whose 16-byte chunks are permuted as by TMA and wgmma
template <int B> FN u32 swizzle(u32 a) { return a ^ (((a >> 7) & (B / 16 - 1)) << 4); }

//! pack
// packs N elements into the 32-bit words that a vector instruction moves, or unpacks them; written
// out for whole words, because the compiler spends most of its time on unrolling small loops
template <typename T, int N> FN void pack(u32* w, const T* s) {
  if constexpr (sizeof(T) == 4) {
    #pragma unroll
    for (int i = 0; i < N; i++) w[i] = bits_of(s[i]);
  } else if constexpr (sizeof(T) == 2 && N == 8) {
    w[0] = bits_of(s[0]) | bits_of(s[1]) << 16;
    w[1] = bits_of(s[2]) | bits_of(s[3]) << 16;
    w[2] = bits_of(s[4]) | bits_of(s[5]) << 16;
    w[3] = bits_of(s[6]) | bits_of(s[7]) << 16;
  } else {
    #pragma unroll
    for (int i = 0; i < (N * (int)sizeof(T) + 3) / 4; i++) {
      u32 half[2] = {0, 0}; // lets the compiler recognise bytes that were loaded in pairs
      #pragma unroll
      for (int k = 0; k < 4 / (int)sizeof(T) && i * 4 / (int)sizeof(T) + k < N; k++)
        half[k * (int)sizeof(T) / 2 % 2] |= bits_of(s[i * 4 / (int)sizeof(T) + k])
                                            << (k * (int)sizeof(T) * 8 % 16);
      w[i] = half[0] | half[1] << 16;
    }
  }
}

//! unpack
template <typename T, int N> FN void unpack(T* d, const u32* w) {
  if constexpr (sizeof(T) == 2 && N == 8) {
    from_bits(d[0], w[0]), from_bits(d[1], w[0] >> 16);
    from_bits(d[2], w[1]), from_bits(d[3], w[1] >> 16);
    from_bits(d[4], w[2]), from_bits(d[5], w[2] >> 16);
    from_bits(d[6], w[3]), from_bits(d[7], w[3] >> 16);
  } else {
    #pragma unroll
    for (int i = 0; i < N; i++)
      from_bits(d[i], w[i * (int)sizeof(T) / 4] >> (i * (int)sizeof(T) % 4 * 8));
  }
}

//! discard_lines
// the contents of the lines of 128 bytes in [p, p + bytes) are lost: line first, first + step ...
FN void discard_lines(const void* p, u64 bytes, u32 first, u32 step) {
  const u64 end = (u64)p + bytes;
  for (u64 a = ((u64)p + 127) / 128 * 128 + first * 128; a + 128 <= end; a += step * 128)
    asm volatile("discard.global.L2 [%0], 128;" :: "l"(a) : "memory");
}

//! pin_narrow
// the compiler moves no access to these registers (two or four elements each) across
template <typename T, int N> FN void pin_narrow(T* d) {
  constexpr int words = N * (int)sizeof(T) / 4;
  u32 w[words];
  pack<T, N>(w, d);
  #pragma unroll
  for (int k = 0; k < words; k++) asm volatile("" : "+r"(w[k]) :: "memory");
  unpack<T, N>(d, w);
}

//! ld_shared
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

//! st_shared
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

//! peer_offset
// converts an address in shared memory to the same address in another block of the cluster
FN u32 peer_offset(u32 block) {
  u32 r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_base()), "r"(block));
  return r - shared_base();
}

//! ld_cluster
// loads from shared memory of any block of the cluster
template <typename T, int N> FN void ld_cluster(T* d, u32 a) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  if constexpr (bytes == 16) {
    asm volatile("ld.shared::cluster.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("ld.shared::cluster.v2.b32 {%0,%1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1]) : "r"(a) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  } else {
    asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=r"(w[0]) : "r"(a) : "memory");
  }
  unpack<T, N>(d, w);
}

//! st_cluster
template <typename T, int N> FN void st_cluster(u32 a, const T* s) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  pack<T, N>(w, s);
  if constexpr (bytes == 16) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1,%2,%3,%4};"
                 :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.shared::cluster.v2.b32 [%0], {%1,%2};"
                 :: "r"(a), "r"(w[0]), "r"(w[1]) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" :: "r"(a), "r"(w[0]) : "memory");
  } else if constexpr (bytes == 2) {
    asm volatile("st.shared::cluster.b16 [%0], %1;" :: "r"(a), "h"((u16)w[0]) : "memory");
  } else {
    asm volatile("st.shared::cluster.b8 [%0], %1;" :: "r"(a), "r"(w[0]) : "memory");
  }
}

//! ld_global
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

//! st_global
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

//! stmatrix_x4
// stores four 8x8 matrices of 16-bit elements. Lanes 8k to 8k+7 provide the row addresses of matrix
// k; s holds this lane's pair of elements of each matrix
FN void stmatrix_x4(u32 a, const u32* w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
template <typename T> FN void stmatrix_x4(u32 a, const T* s) {
  u32 w[4];
  pack<T, 8>(w, s);
  stmatrix_x4(a, w);
}

//! stmatrix_x4_trans
// the same, but the addresses are of columns
FN void stmatrix_x4_trans(u32 a, const u32* w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
template <typename T> FN void stmatrix_x4_trans(u32 a, const T* s) {
  u32 w[4];
  pack<T, 8>(w, s);
  stmatrix_x4_trans(a, w);
}

//! ldmatrix_x4
FN void ldmatrix_x4(u32* w, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a) : "memory");
}
template <typename T> FN void ldmatrix_x4(T* d, u32 a) {
  u32 w[4];
  ldmatrix_x4(w, a);
  unpack<T, 8>(d, w);
}

//! ldmatrix_x4_trans
FN void ldmatrix_x4_trans(u32* w, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a) : "memory");
}
template <typename T> FN void ldmatrix_x4_trans(T* d, u32 a) {
  u32 w[4];
  ldmatrix_x4_trans(w, a);
  unpack<T, 8>(d, w);
}

//! zero
// the value of elements outside an array
template <typename T, int N> FN void zero(T* d) {
  #pragma unroll
  for (int i = 0; i < N; i++) from_bits(d[i], 0);
}
