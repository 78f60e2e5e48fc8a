// mbarriers. Arguments: an address in shared memory, and the parity of the phase to wait for.

//! mbarrier_init
FN void mbarrier_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(count) : "memory");
}

//! mbarrier_init_fence
FN void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

//! mbarrier_wait
// try_wait suspends the lane in hardware, so the loop is not a hot spin
FN void mbarrier_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\n"
               "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra D;\nbra W;\nD: }" :: "r"(b), "r"(parity) : "memory");
}

//! mbarrier_test
// is the phase complete? Does not wait
FN bool mbarrier_test(u32 b, u32 parity) {
  u32 r;
  asm volatile("{ .reg .pred p;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p; }" : "=r"(r) : "r"(b), "r"(parity) : "memory");
  return r != 0;
}

//! mbarrier_arrive
FN void mbarrier_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}

//! mbarrier_arrive_n
template <int N> FN void mbarrier_arrive_n(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(b), "n"(N) : "memory");
}

//! mbarrier_arrive_expect_tx
// one arrival; the phase also needs this many bytes from TMA
FN void mbarrier_arrive_expect_tx(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(b), "r"(bytes) : "memory");
}

//! mbarrier_wait_cluster
// the same; also makes visible what other blocks of the cluster wrote before they arrived
FN void mbarrier_wait_cluster(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\n"
               "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@p bra D;\nbra W;\nD: }" :: "r"(b), "r"(parity) : "memory");
}

//! mbarrier_arrive_remote
// on the barrier of any block of the cluster. It does not order ordinary accesses for other blocks:
// with .release.cluster, ptxas would insert a fence of all memory before it.
FN void mbarrier_arrive_remote(u32 b, u32 block) {
  asm volatile("{ .reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [r]; }" :: "r"(b), "r"(block) : "memory");
}

//! mbarrier_arrive_expect_tx_cluster
// mbarrier_arrive_expect_tx() on an address in any block of the cluster
FN void mbarrier_arrive_expect_tx_cluster(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;"
               :: "r"(b), "r"(bytes) : "memory");
}

//! st_async
// stores N elements in a block of the cluster; counts their bytes on the barrier there
template <typename T, int N> FN void st_async(u32 a, const T* s, u32 b) {
  constexpr int bytes = N * (int)sizeof(T);
  u32 w[4];
  pack<T, N>(w, s);
  if constexpr (bytes == 16) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
                 " [%0], {%1,%2,%3,%4}, [%5];"
                 :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(b) : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"
                 " [%0], {%1,%2}, [%3];" :: "r"(a), "r"(w[0]), "r"(w[1]), "r"(b) : "memory");
  } else {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32"
                 " [%0], %1, [%2];" :: "r"(a), "r"(w[0]), "r"(b) : "memory");
  }
}

//! store_async
// stores one word at the same offset in a block of the cluster; counts 4 bytes on the barrier there
FN void store_async(u32 a, i32 x, u32 b, u32 block) {
  asm volatile("{ .reg .b32 p, q;\nmapa.shared::cluster.u32 p, %0, %3;\n"
               "mapa.shared::cluster.u32 q, %2, %3;\n"
               "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [p], %1, [q]; }"
               :: "r"(a), "r"(x), "r"(b), "r"(block) : "memory");
}

//! mbarrier_arrive_release
// the same; also makes all preceding writes of the lanes visible to waiters
FN void mbarrier_arrive_release(u32 b, u32 block) {
  asm volatile("{ .reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]; }"
               :: "r"(b), "r"(block) : "memory");
}
