// Lanes, warps, warpgroups, blocks.

//! warp_uniform
// tells the compiler that all lanes of a warp have the same x
FN u32 warp_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

//! elect_one
// true in one lane of the warp, the same one every time. With "lane == 0" instead, ptxas would put
// a vote loop around every TMA instruction.
FN bool elect_one() {
  u32 r;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
  return r != 0;
}

//! lanes_sync
// all 128 lanes of warpgroup wg
FN void lanes_sync(u32 wg) { asm volatile("bar.sync %0, 128;" :: "r"(wg + 1) : "memory"); }

//! block_sync
FN void block_sync() { __syncthreads(); }

//! cluster_sync
FN void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

//! cluster_index_x
FN i32 cluster_index_x() { u32 r; asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(r)); return (i32)r; }

//! cluster_index_y
FN i32 cluster_index_y() { u32 r; asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(r)); return (i32)r; }

//! cluster_index_z
FN i32 cluster_index_z() { u32 r; asm("mov.u32 %0, %%cluster_ctaid.z;" : "=r"(r)); return (i32)r; }

//! shuffle_xor
// x of the lane whose number differs in the bits of mask
template <typename T> FN T shuffle_xor(T x, int mask) {
  T r; from_bits(r, __shfl_xor_sync(0xffffffffu, bits_of(x), mask)); return r;
}

//! registers_up
template <int N> FN void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

//! registers_down
template <int N> FN void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}
