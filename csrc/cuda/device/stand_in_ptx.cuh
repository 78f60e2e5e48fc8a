// What the stand-in for tensor memory and its tensor cores needs of PTX, and copies of pairs, which
// Hopper lacks: there the bytes of a copy count in the block that has the destination. So the
// second block of a pair waits for its own copies, on a barrier of the engine, and then tells the
// first one of the bytes. One lane of a block copies at a time.

//! queue_load
FN u32 queue_load(const u32* a) {
  u32 r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(a) : "memory");
  return r;
}

//! queue_store
FN void queue_store(u32* a, u32 x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(a), "r"(x) : "memory");
}

//! queue_add
FN u32 queue_add(u32* a, u32 x) {
  u32 r;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(r) : "l"(a), "r"(x) : "memory");
  return r;
}

//! queue_cas
FN u32 queue_cas(u32* a, u32 old, u32 x) {
  u32 r;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(r) : "l"(a), "r"(old), "r"(x) : "memory");
  return r;
}

//! queue_pause
FN void queue_pause(u32 nanos) { asm volatile("nanosleep.u32 %0;" :: "r"(nanos)); }

//! queue_noise
FN u32 queue_noise() {
  u32 r;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(r));
  return r;
}

//! cell_load
// from L2, which all multiprocessors share
FN u32 cell_load(const u32* a) {
  u32 r;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(a) : "memory");
  return r;
}

//! cell_store
FN void cell_store(u32* a, u32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(a), "r"(x) : "memory");
}

//! cells_fence
FN void cells_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

//! multiprocessor
FN u32 multiprocessor() { u32 r; asm("mov.u32 %0, %%smid;" : "=r"(r)); return r; }

//! cluster_meet
FN void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

//! answer_here
// four words for this block. st.async needs a launch in clusters, which a block alone may not have.
FN void answer_here(u32 result, const u32* w, u32 barrier) {
  st_shared<u32, 4>(result, w);
  asm volatile("fence.acq_rel.cta;\n"
               "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;"
               :: "r"(barrier) : "memory");
}

// ---- wgmma: d += A B of 64 rows and N columns, complete when it returns

//! tensor_wgmma
// TYPES: 0: f16, 1: bf16, 2 to 5: A (+ 1) and B (+ 2) are e5m2, else e4m3
#define TENSOR_D64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20," \
                   "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define TENSOR_D8 "{%0,%1,%2,%3}"
#define TENSOR_4(k) "+f"(d[k]), "+f"(d[k + 1]), "+f"(d[k + 2]), "+f"(d[k + 3])
#define TENSOR_16(k) TENSOR_4(k), TENSOR_4(k + 4), TENSOR_4(k + 8), TENSOR_4(k + 12)
#define TENSOR_BEGIN "{ .reg .pred p; .reg .b64 ma, mb; setp.eq.u32 p, 0, 0;\n"
#define TENSOR_RUN(n, k, types) "wgmma.fence.sync.aligned;\n" \
  "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." types " " TENSOR_D##n
#define TENSOR_END_OF(more) ", mb, p, 1, 1" more ";\n" \
  "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0; }"
// o: numbers of the operands after d, as text
#define TENSOR_A_B(n, k, types, o0, o1, o2, o3, more) \
  TENSOR_BEGIN "mov.b64 ma, {%" o0 ",%" o1 "}; mov.b64 mb, {%" o2 ",%" o3 "};\n" \
  TENSOR_RUN(n, k, types) ", ma" TENSOR_END_OF(more)
#define TENSOR_F_B(n, k, types, o0, o1, o2, o3, o4, o5, more) \
  TENSOR_BEGIN "mov.b64 ma, 0; mov.b64 mb, {%" o4 ",%" o5 "};\n" \
  TENSOR_RUN(n, k, types) ", {%" o0 ",%" o1 ",%" o2 ",%" o3 "}" TENSOR_END_OF(more)
#define TENSOR_HALVES(types) \
  if constexpr (N == 64) { \
    asm volatile(TENSOR_A_B(64, 16, types, "32", "33", "34", "35", ", %36, %37") \
                 : TENSOR_16(0), TENSOR_16(16) \
                 : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"((int)TA), "n"((int)TB) : "memory"); \
  } else { \
    asm volatile(TENSOR_A_B(8, 16, types, "4", "5", "6", "7", ", %8, %9") : TENSOR_4(0) \
                 : "r"(a), "r"(ah), "r"(b), "r"(bh), "n"((int)TA), "n"((int)TB) : "memory"); \
  }
#define TENSOR_BYTES(types) \
  if constexpr (N == 64) { \
    asm volatile(TENSOR_A_B(64, 32, types, "32", "33", "34", "35", "") \
                 : TENSOR_16(0), TENSOR_16(16) : "r"(a), "r"(ah), "r"(b), "r"(bh) : "memory"); \
  } else { \
    asm volatile(TENSOR_A_B(8, 32, types, "4", "5", "6", "7", "") : TENSOR_4(0) \
                 : "r"(a), "r"(ah), "r"(b), "r"(bh) : "memory"); \
  }
template <int N, int TYPES, bool TA, bool TB>
FN void tensor_wgmma(f32* d, u32 a, u32 ah, u32 b, u32 bh) {
  if constexpr (TYPES == 0) { TENSOR_HALVES("f16.f16") }
  else if constexpr (TYPES == 1) { TENSOR_HALVES("bf16.bf16") }
  else if constexpr (TYPES == 2) { TENSOR_BYTES("e4m3.e4m3") }
  else if constexpr (TYPES == 3) { TENSOR_BYTES("e5m2.e4m3") }
  else if constexpr (TYPES == 4) { TENSOR_BYTES("e4m3.e5m2") }
  else { TENSOR_BYTES("e5m2.e5m2") }
}
#undef TENSOR_HALVES
#undef TENSOR_BYTES
#define TENSOR_F "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3])
#define TENSOR_HALVES(types) \
  if constexpr (N == 64) { \
    asm volatile(TENSOR_F_B(64, 16, types, "32", "33", "34", "35", "36", "37", ", %38") \
                 : TENSOR_16(0), TENSOR_16(16) \
                 : TENSOR_F, "r"(b), "r"(bh), "n"((int)TB) : "memory"); \
  } else { \
    asm volatile(TENSOR_F_B(8, 16, types, "4", "5", "6", "7", "8", "9", ", %10") : TENSOR_4(0) \
                 : TENSOR_F, "r"(b), "r"(bh), "n"((int)TB) : "memory"); \
  }
#define TENSOR_BYTES(types) \
  if constexpr (N == 64) { \
    asm volatile(TENSOR_F_B(64, 32, types, "32", "33", "34", "35", "36", "37", "") \
                 : TENSOR_16(0), TENSOR_16(16) : TENSOR_F, "r"(b), "r"(bh) : "memory"); \
  } else { \
    asm volatile(TENSOR_F_B(8, 32, types, "4", "5", "6", "7", "8", "9", "") : TENSOR_4(0) \
                 : TENSOR_F, "r"(b), "r"(bh) : "memory"); \
  }
// f: A in registers
template <int N, int TYPES, bool TB>
FN void tensor_wgmma_registers(f32* d, const u32* f, u32 b, u32 bh) {
  if constexpr (TYPES == 0) { TENSOR_HALVES("f16.f16") }
  else if constexpr (TYPES == 1) { TENSOR_HALVES("bf16.bf16") }
  else if constexpr (TYPES == 2) { TENSOR_BYTES("e4m3.e4m3") }
  else if constexpr (TYPES == 3) { TENSOR_BYTES("e5m2.e4m3") }
  else if constexpr (TYPES == 4) { TENSOR_BYTES("e4m3.e5m2") }
  else { TENSOR_BYTES("e5m2.e5m2") }
}

// ---- copies of pairs

//! engine_begins
// words of 16 bytes of shared memory: the address of tensor memory, waits so far, a barrier
FN void engine_begins() {
  const u32 zero = 0, at = shared_base() + engine_bytes;
  st_shared<u32, 1>(at + 4, &zero);
  mbarrier_init(at + 8, 1);
  mbarrier_init_fence();
}

//! pair_copy_begin
// the barrier for a copy whose bytes are to count on `barrier` of the first block
template <int BYTES> FN u32 pair_copy_begin(u32 barrier) {
  const u32 rank = cluster_rank(), relay = shared_base() + engine_bytes + 8;
  if (rank % 2 == 0) return barrier - peer_offset(rank);
  mbarrier_arrive_expect_tx(relay, BYTES);
  return relay;
}

//! pair_copy_end
template <int BYTES> FN void pair_copy_end(u32 barrier) {
  if (cluster_rank() % 2 == 0) return;
  const u32 at = shared_base() + engine_bytes;
  u32 waits;
  ld_shared<u32, 1>(&waits, at + 4);
  mbarrier_wait(at + 8, waits & 1);
  waits++;
  st_shared<u32, 1>(at + 4, &waits);
  asm volatile("fence.acq_rel.cluster;\n"
               "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;"
               :: "r"(barrier), "r"(BYTES) : "memory");
}

//! tma_load_pair_1d
template <int BYTES>
FN void tma_load_pair_1d(u32 dst, const TensorMap* m, u32 barrier, i32 c0) {
  tma_load_1d(dst, m, pair_copy_begin<BYTES>(barrier), c0);
  pair_copy_end<BYTES>(barrier);
}

//! tma_load_pair_2d
template <int BYTES>
FN void tma_load_pair_2d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1) {
  tma_load_2d(dst, m, pair_copy_begin<BYTES>(barrier), c0, c1);
  pair_copy_end<BYTES>(barrier);
}

//! tma_load_pair_3d
template <int BYTES>
FN void tma_load_pair_3d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1, i32 c2) {
  tma_load_3d(dst, m, pair_copy_begin<BYTES>(barrier), c0, c1, c2);
  pair_copy_end<BYTES>(barrier);
}

//! tma_load_pair_4d
template <int BYTES>
FN void tma_load_pair_4d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
  tma_load_4d(dst, m, pair_copy_begin<BYTES>(barrier), c0, c1, c2, c3);
  pair_copy_end<BYTES>(barrier);
}

//! tma_load_pair_5d
template <int BYTES>
FN void tma_load_pair_5d(u32 dst, const TensorMap* m, u32 barrier,
                         i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  tma_load_5d(dst, m, pair_copy_begin<BYTES>(barrier), c0, c1, c2, c3, c4);
  pair_copy_end<BYTES>(barrier);
}
