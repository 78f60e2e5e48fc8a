// Checks of PALLAS_MGPU_SANITIZE. The record, words of global memory: is there one, site, value,
// block x, y, z, thread of the block, and 1 + the device whose memory it is about, 0: its own.

//! sanitizer_note
// the first failure of the launch stays
FN void sanitizer_note(u32* s, u32 site, i32 value, u32 place = 0) {
  u32 was;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(was) : "l"(s) : "memory");
  if (was) return;
  const u32 words[7] = {site,       (u32)value,  blockIdx.x, blockIdx.y,
                        blockIdx.z, threadIdx.x, place};
  for (int k = 0; k < 7; k++)
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(s + 1 + k), "r"(words[k]) : "memory");
}

//! sanitizer_stopped
FN bool sanitizer_stopped(const u32* s) {
  u32 r;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(s) : "memory");
  return r != 0;
}

//! index_outside
FN bool index_outside(i32 i, i32 limit, u32 site, u32* s, u32 place = 0) {
  if (i >= 0 && i <= limit) return false;
  sanitizer_note(s, site, i, place);
  return true;
}

//! nanoseconds
FN u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

//! wait_is_late
// Of a wait that began at `start`: has it lasted too long, or has another one failed some time ago?
FN bool wait_is_late(u64 start, u32 site, u32* s) {
  const u64 t = nanoseconds() - start;
  if (t > 5000000000ull) {
    sanitizer_note(s, site, 0);
    return true;
  }
  return t > 100000000ull && sanitizer_stopped(s);
}

//! sanitizer_settle
// after a failure: copies and products that are under way come to their end
FN void sanitizer_settle(const u32* s) {
  if (sanitizer_stopped(s)) asm volatile("nanosleep.u32 1000000;");
}

//! arrivals_add
// with all lanes of a warp: counts the warp as arrived; how many had before
FN u32 arrivals_add(u32 counter) {
  u32 r = 0;
  __syncwarp();
  if ((threadIdx.x & 31) == 0)
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(r) : "r"(counter) : "memory");
  return __shfl_sync(0xffffffffu, r, 0);
}

//! barrier_arrive_counted
// one of those `lanes` that the round needs goes on at once
FN void barrier_arrive_counted(u32 counters, u32 id, u32 /* lanes */) {
  arrivals_add(counters + id * 4);
}

//! barrier_sync_timed
// the named barrier `id`: waits until that many lanes have arrived in this round
FN bool barrier_sync_timed(u32 counters, u32 id, u32 lanes, u32 site, u32* s) {
  const u32 counter = counters + id * 4, warps = lanes / 32;
  const u32 end = (arrivals_add(counter) / warps + 1) * warps;
  const u64 start = nanoseconds();
  while ((i32)(block_semaphore_load(counter) - end) < 0)
    if (wait_is_late(start, site, s)) return true;
  return false;
}

//! mbarrier_wait_timed
FN bool mbarrier_wait_timed(u32 b, u32 parity, u32 site, u32* s) {
  const u64 start = nanoseconds();
  while (!mbarrier_test(b, parity))
    if (wait_is_late(start, site, s)) return true;
  return false;
}

//! mbarrier_wait_cluster_timed
FN bool mbarrier_wait_cluster_timed(u32 b, u32 parity, u32 site, u32* s) {
  if (mbarrier_wait_timed(b, parity, site, s)) return true;
  mbarrier_wait_cluster(b, parity);
  return false;
}

//! semaphore_wait_timed
template <bool SYSTEM> FN bool semaphore_wait_timed(const u32* w, u32 n, u32 site, u32* s) {
  const u64 start = nanoseconds();
  while ((i32)(semaphore_load<SYSTEM>(w) - n) < 0)
    if (wait_is_late(start, site, s)) return true;
  semaphore_acquire<SYSTEM>();
  return false;
}

//! semaphore_take_timed
template <bool SYSTEM> FN bool semaphore_take_timed(u32* w, u32 n, u32 site, u32* s) {
  if (semaphore_wait_timed<SYSTEM>(w, n, site, s)) return true;
  semaphore_take<SYSTEM>(w, n);
  return false;
}

//! block_semaphore_wait_timed
FN bool block_semaphore_wait_timed(u32 w, u32 n, u32 site, u32* s) {
  const u64 start = nanoseconds();
  while ((u32)block_semaphore_read(w) < n)
    if (wait_is_late(start, site, s)) return true;
  block_semaphore_wait(w, n);
  return false;
}

//! block_semaphore_take_timed
FN bool block_semaphore_take_timed(u32 w, u32 n, u32 site, u32* s) {
  if (block_semaphore_wait_timed(w, n, site, s)) return true;
  block_semaphore_take(w, n);
  return false;
}
