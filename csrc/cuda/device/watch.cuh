// Waits for other devices that the host can end (runtime/watch.c). `words` are memory of the host:
// why waits are to end, 0: they are not; after how many milliseconds a wait ends by itself, 0:
// never. Then, from word 8 on, 8 words for each device about the first wait that ended early there:
// kernel + 1, site, element, value, target, block, thread.

//! Watch
struct Watch { u32* words; u32 mesh, kernel, rank; };

//! watch_ended
// the mesh of which this program, on this device, ended a wait early
__device__ u32 watch_ended;

//! watch_load
FN u32 watch_load(const u32* w) {
  u32 r;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(w) : "memory");
  return r;
}

//! watch_store
FN void watch_store(u32* w, u32 x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(w), "r"(x) : "memory");
}

//! watch_report
// the first wait of the launch to end early
FN void watch_report(const Watch& w, u32 site, u32 element, u32 value, u32 target) {
  u32 was;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(was) : "l"(&watch_ended), "r"(w.mesh) : "memory");
  if (was == w.mesh) return;
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const u32 words[6] = {site, element, value, target, block, threadIdx.x};
  u32* const row = w.words + 8 + w.rank * 8;
  for (int k = 0; k < 6; k++) watch_store(row + 1 + k, words[k]);
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  watch_store(row, w.kernel + 1);
  if (!watch_load(w.words)) watch_store(w.words, 1);
}

//! watch_ends
// Has the host ended the wait, which has looked so often, or is it too late? A look over PCIe takes
// longer than one at a semaphore, so there is one in 4096.
FN bool watch_ends(const Watch& w, u32 looks, u64& since) {
  u32 ended;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(ended) : "l"(&watch_ended) : "memory");
  if (ended == w.mesh) return true;
  if (looks % 4096) return false;
  if (watch_load(w.words)) return true;
  const u64 now = nanoseconds(), most = watch_load(w.words + 1) * 1000000ull;
  if (!since) since = now;
  return most && now - since > most;
}

//! semaphore_look
// an acquiring read. A relaxed one and a fence would also wait for all writes of this lane, among
// them its own signals to other devices, to arrive.
template <bool SYSTEM> FN u32 semaphore_look(const u32* s) {
  u32 r;
  if constexpr (SYSTEM) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(s) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(s) : "memory");
  }
  return r;
}

//! semaphore_wait_watched
// waits until the semaphore is at least n; false: the wait was ended before. first: of its ref
template <bool SYSTEM>
FN bool semaphore_wait_watched(const u32* s, u32 n, const u32* first, u32 site, const Watch& w) {
  u64 since = 0;
  u32 looks = 0;
  for (u32 value; (i32)((value = semaphore_look<SYSTEM>(s)) - n) < 0;) {
    if (++looks % 64 || !watch_ends(w, looks, since)) continue;
    watch_report(w, site, (u32)(s - first), value, n);
    return false;
  }
  return true;
}

//! semaphore_take_watched
template <bool SYSTEM>
FN void semaphore_take_watched(u32* s, u32 n, const u32* first, u32 site, const Watch& w) {
  if (semaphore_wait_watched<SYSTEM>(s, n, first, site, w)) semaphore_take<SYSTEM>(s, n);
}
