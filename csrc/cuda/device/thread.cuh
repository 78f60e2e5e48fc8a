// Lanes, warps, warpgroups, blocks.

//! warp_uniform
// tells the compiler that all lanes of a warp have the same x
FN u32 warp_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

//! next_index
// the next index of a loop that is not unrolled. ptxas before 13.5 must compute addresses from it
// instead of incrementing them: it may add the increments of an address to values that were
// computed from the initial address before the loop.
FN i32 next_index(i32 i) {
  i += 1;
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1305
  asm("" : "+r"(i));
#endif
  return i;
}

//! elect_one
// true in one lane of the warp, always the same one. With "lane == 0" instead, ptxas would put a
// vote loop around every TMA instruction.
FN bool elect_one() {
#ifdef HAS_ELECT
  u32 r;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
  return r != 0;
#else
  return (threadIdx.x & 31) == 0;
#endif
}

//! warpgroup_sync
// synchronises all 128 lanes of warpgroup wg
FN void warpgroup_sync(u32 wg) { asm volatile("bar.sync %0, 128;" :: "r"(wg + 1) : "memory"); }

//! warp_sync
FN void warp_sync() { __syncwarp(); }

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

//! cluster_rank
FN u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

//! lanes_any
// is x true in any of the 128 lanes of warpgroup wg? Synchronises them
FN bool lanes_any(u32 wg, bool x) {
  u32 r;
  asm volatile("{ .reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.or.pred p, %2, 128, q;\n"
               "selp.u32 %0, 1, 0, p; }" : "=r"(r) : "r"((u32)x), "r"(wg + 1) : "memory");
  return r != 0;
}

//! lanes_all
FN bool lanes_all(u32 wg, bool x) {
  u32 r;
  asm volatile("{ .reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.and.pred p, %2, 128, q;\n"
               "selp.u32 %0, 1, 0, p; }" : "=r"(r) : "r"((u32)x), "r"(wg + 1) : "memory");
  return r != 0;
}

//! warp_any
// is x true in any lane of the warp?
FN bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }

//! section_enter
// waits, with all lanes of a warpgroup, until the previous participant has left the ordered section
FN void section_enter(u32 id) { asm volatile("bar.sync %0, 256;" :: "r"(id) : "memory"); }

//! section_leave
FN void section_leave(u32 id) { asm volatile("bar.arrive %0, 256;" :: "r"(id) : "memory"); }

//! named_barrier_sync
// with all lanes of a warp: waits until that many lanes of the block have arrived at the barrier
FN void named_barrier_sync(u32 id, u32 lanes) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(lanes) : "memory");
}

//! named_barrier_arrive
FN void named_barrier_arrive(u32 id, u32 lanes) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(lanes) : "memory");
}

//! shuffle_xor
// x of the lane whose number differs in the bits of mask (butterfly)
template <typename T> FN T shuffle_xor(T x, int mask) {
  T r; from_bits(r, __shfl_xor_sync(0xffffffffu, bits_of(x), mask)); return r;
}

//! shuffle_up
// x of the lane d below; the lowest d lanes keep their own x
template <typename T> FN T shuffle_up(T x, u32 d) {
  T r; from_bits(r, __shfl_up_sync(0xffffffffu, bits_of(x), d)); return r;
}

//! swap_lanes
// exchanges N elements at a and N at b, `apart` elements from each other, between lanes whose
// numbers differ in mask: afterwards, the lane where that bit is clear (low) has a of both, the
// other one b of both. A lane's own elements stay in place.
template <int N, int apart, typename T> FN void swap_lanes(T* a, T* b, bool high, int mask) {
  u32 first = 0, second = 0;
  #pragma unroll
  for (int k = 0; k < N; k++) {
    first |= bits_of(a[k * apart]) << (k * 8 * (int)sizeof(T) % 32);
    second |= bits_of(b[k * apart]) << (k * 8 * (int)sizeof(T) % 32);
  }
  const u32 w = __shfl_xor_sync(0xffffffffu, high ? first : second, mask);
  first = high ? w : first;
  second = high ? second : w;
  #pragma unroll
  for (int k = 0; k < N; k++) {
    from_bits(a[k * apart], first >> (k * 8 * (int)sizeof(T) % 32));
    from_bits(b[k * apart], second >> (k * 8 * (int)sizeof(T) % 32));
  }
}

//! pick_bytes
// byte k of the result is byte number `selector >> 4 * k & 7` of the eight bytes of a and b
FN u32 pick_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

//! swap_bytes
// swap_lanes for bytes of words: those whose number has the bit `step` clear are a, the others b
template <int step> FN void swap_bytes(u32* x, u32* y, bool high, int mask) {
  u32 first = pick_bytes(*x, *y, step == 1 ? 0x6420 : 0x5410);
  u32 second = pick_bytes(*x, *y, step == 1 ? 0x7531 : 0x7632);
  const u32 w = __shfl_xor_sync(0xffffffffu, high ? first : second, mask);
  first = high ? w : first;
  second = high ? second : w;
  *x = pick_bytes(first, second, step == 1 ? 0x5140 : 0x5410);
  *y = pick_bytes(first, second, step == 1 ? 0x7362 : 0x7632);
}

//! shuffle_from
// replaces N neighbouring elements by those of lane `from`
template <int N, typename T> FN void shuffle_from(T* x, u32 from) {
  u32 w = 0;
  #pragma unroll
  for (int k = 0; k < N; k++) w |= bits_of(x[k]) << (k * 8 * (int)sizeof(T) % 32);
  w = __shfl_sync(0xffffffffu, w, from);
  #pragma unroll
  for (int k = 0; k < N; k++) from_bits(x[k], w >> (k * 8 * (int)sizeof(T) % 32));
}

//! setmaxnreg_inc
template <int N> FN void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

//! thread_again
// threadIdx.x, not from a register of the code before
FN u32 thread_again() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

//! read_again
FN void read_again(u32& wg, u32& tid, u32& warp, u32& lane) {
  const u32 thread = thread_again();
  wg = warp_uniform(thread >> 7);
  tid = thread & 127;
  warp = warp_uniform(thread >> 5 & 3);
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
}

//! setmaxnreg_dec
template <int N> FN void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}

//! griddepcontrol_wait
// waits until the grids that this one depends on have finished and their writes are visible
FN void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

//! griddepcontrol_launch_dependents
FN void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

//! check_failed
// ends the launch; the driver prints the message and the line
extern "C" __device__ void __assertfail(const char *, const char *, u32, const char *, size_t);
FN void check_failed(const char *message, const char *file, u32 line) {
  __assertfail(message, file, line, "debug_check", 1);
}

//! next_tile
// increments a counter of all blocks; returns its previous value
FN i32 next_tile(u32* counter) {
  u32 r;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(counter) : "memory");
  return (i32)r;
}

//! counters_done
// The last caller resets the counters to zero for the next launch. The word after the last counter
// counts the callers.
FN void counters_done(u32* counters, u32 n, u32 callers) {
  u32 r;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(r) : "l"(counters + n) : "memory");
  if (r != callers - 1) return;
  for (u32 k = 0; k <= n; k++)
    asm volatile("st.global.u32 [%0], %1;" :: "l"(counters + k), "r"(0) : "memory");
}
