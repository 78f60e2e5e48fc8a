// Support for matrix products of a warpgroup; ptx.c prints the wgmma functions themselves.

//! wgmma_commit
FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

//! unpack_pair
// the halves of an accumulator register. For a shift, ptxas would make a view of the register and
// wait for the products a second time (C7517).
FN void unpack_pair(f16* d, u32 w) {
  u32 low, high;
  asm("prmt.b32 %0, %2, 0, 0x4410;\nprmt.b32 %1, %2, 0, 0x4432;" : "=r"(low), "=r"(high) : "r"(w));
  d[0].bits = (u16)low;
  d[1].bits = (u16)high;
}

//! wgmma_wait
// waits until at most N groups are pending
template <int N> FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

//! wgmma_address
// the low word of a matrix descriptor: start of the matrix and stride of its leading dimension
FN u32 wgmma_address(u32 a, u32 leading) { return ((a & 0x3ffff) >> 4) | (leading >> 4) << 16; }

//! hold_operand
// protects N elements of an A that is the same in each iteration of a loop. ptxas before 13.1 may
// reuse their registers for another product of the loop without restoring them. Recomputing the
// words before each product avoids that; later versions need nothing.
template <typename T, int N> FN void hold_operand(T* x) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1301
  constexpr int n = N * (int)sizeof(T) / 4;
  u32 w[n], held[n];
  pack<T, N>(w, x);
  #pragma unroll
  for (int k = 0; k < n; k++)
    asm volatile("prmt.b32 %0, %1, %1, 0x3210;" : "=r"(held[k]) : "r"(w[k]));
  unpack<T, N>(x, held);
#endif
}

//! keep_operand
// the tensor cores have read these words until here: before it, what the next iteration of a loop
// will have in their place gets other registers
template <int N> FN void keep_operand(const u32* a) {
  #pragma unroll
  for (int k = 0; k < N; k++) asm volatile("" :: "r"(a[k]));
}
