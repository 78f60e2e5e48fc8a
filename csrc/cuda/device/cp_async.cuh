// Asynchronous copies of a lane from global to shared memory, without an mbarrier.

//! cp_async
// N bytes, 4, 8 or 16; 16 leave out the L1
template <int N> FN void cp_async(u32 dst, const void* src) {
  if constexpr (N == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(dst), "l"(src)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(dst), "l"(src), "n"(N)
                 : "memory");
}

//! cp_async_or_zeros
// the same if `valid`, else zeros, and nothing is read
template <int N> FN void cp_async_or_zeros(u32 dst, const void* src, bool valid) {
  const u32 bytes = valid ? N : 0;
  if constexpr (N == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(dst), "l"(src), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(dst), "l"(src), "n"(N), "r"(bytes) : "memory");
}

//! cp_async_commit
// closes a group of the lane's copies; it may be empty
FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

//! cp_async_wait
// waits until at most N groups of this lane are pending; other lanes see their data after a barrier
template <int N> FN void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
