// Matrix products of a warpgroup. The products themselves are printed by family.c.

//! wgmma_fence
// registers of accumulators that were written before are seen by the products behind
FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

//! wgmma_commit
FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

//! wgmma_wait
// until at most N groups are pending
template <int N> FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

//! wgmma_address
// low word of a matrix descriptor: start of the matrix and distance of its leading dimension
FN u32 wgmma_address(u32 a, u32 leading) { return ((a & 0x3ffff) >> 4) | (leading >> 4) << 16; }
