// Semaphores: counters in global memory, for all blocks, or in shared memory, for one block. One
// lane signals or waits for all; the lanes synchronise before a signal and after a wait.

//! semaphore_signal
// releases the writes of all lanes that this one has synchronised with
template <bool SYSTEM> FN void semaphore_signal(u32* s, u32 n) {
  if constexpr (SYSTEM) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" :: "l"(s), "r"(n) : "memory");
  } else {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(s), "r"(n) : "memory");
  }
}

//! semaphore_load
template <bool SYSTEM> FN u32 semaphore_load(const u32* s) {
  u32 r;
  if constexpr (SYSTEM) {
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(s) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(s) : "memory");
  }
  return r;
}

//! semaphore_acquire
// after a relaxed read: makes visible to this lane what was written before the signal
template <bool SYSTEM> FN void semaphore_acquire() {
  if constexpr (SYSTEM) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}

//! semaphore_wait
// waits until the semaphore is n, or up to 2^31 more: counts wrap from 2^32 - 1 to 0
template <bool SYSTEM> FN void semaphore_wait(const u32* s, u32 n) {
  while ((i32)(semaphore_load<SYSTEM>(s) - n) < 0) {}
  semaphore_acquire<SYSTEM>();
}

//! semaphore_take
// the same, and subtracts n atomically
template <bool SYSTEM> FN void semaphore_take(u32* s, u32 n) {
  u32 old, seen = n;
  do {
    old = seen < n ? n : seen;
    if constexpr (SYSTEM) {
      asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
                   : "=r"(seen) : "l"(s), "r"(old), "r"(old - n) : "memory");
    } else {
      asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                   : "=r"(seen) : "l"(s), "r"(old), "r"(old - n) : "memory");
    }
  } while (seen != old);
  semaphore_acquire<SYSTEM>();
}

//! semaphore_read
template <bool SYSTEM> FN i32 semaphore_read(const u32* s) {
  const u32 r = semaphore_load<SYSTEM>(s);
  semaphore_acquire<SYSTEM>();
  return (i32)r;
}

//! block_semaphore_init
// initialises n semaphores; one lane calls it before any other lane uses them
FN void block_semaphore_init(u32 s, u32 n) {
  for (u32 k = 0; k < n; k++)
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(s + k * 4), "r"(0) : "memory");
}

//! block_semaphore_signal
FN void block_semaphore_signal(u32 s, u32 n) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" :: "r"(s), "r"(n) : "memory");
}

//! block_semaphore_load
FN u32 block_semaphore_load(u32 s) {
  u32 r;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(r) : "r"(s) : "memory");
  return r;
}

//! block_semaphore_wait
FN void block_semaphore_wait(u32 s, u32 n) {
  while ((i32)(block_semaphore_load(s) - n) < 0) {}
}

//! block_semaphore_take
FN void block_semaphore_take(u32 s, u32 n) {
  u32 old, seen = n;
  do {
    old = seen < n ? n : seen;
    asm volatile("atom.acquire.cta.shared::cta.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(seen) : "r"(s), "r"(old), "r"(old - n) : "memory");
  } while (seen != old);
}

//! block_semaphore_read
FN i32 block_semaphore_read(u32 s) { return (i32)block_semaphore_load(s); }

//! counters_done_by_warp
// counters_done() for many counters, by all lanes of a warp
FN void counters_done_by_warp(u32* counters, u32 n, u32 callers) {
  u32 r = 0;
  __syncwarp();
  if ((threadIdx.x & 31) == 0)
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(r) : "l"(counters + n) : "memory");
  if (__shfl_sync(0xffffffffu, r, 0) != callers - 1) return;
  for (u32 k = threadIdx.x & 31; k <= n; k += 32)
    asm volatile("st.global.u32 [%0], %1;" :: "l"(counters + k), "r"(0) : "memory");
}

//! delay
FN void delay(i32 nanos) { asm volatile("nanosleep.u32 %0;" :: "r"(nanos)); }
