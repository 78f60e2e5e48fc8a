// mbarriers: an address in shared memory, and the parity of the phase that a thread waits for.

//! barrier_init
FN void barrier_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(count) : "memory");
}

//! barrier_init_fence
FN void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

//! barrier_wait
// try_wait suspends the lane in hardware, so the loop is not a hot spin
FN void barrier_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\n"
               "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra D;\nbra W;\nD: }" :: "r"(b), "r"(parity) : "memory");
}

//! barrier_arrive
FN void barrier_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}

//! barrier_arrive_n
FN void barrier_arrive_n(u32 b, u32 n) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory");
}

//! barrier_arrive_tx
// one arrival, and the phase also needs this many bytes from TMA
FN void barrier_arrive_tx(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(b), "r"(bytes) : "memory");
}

//! barrier_arrive_n_tx
FN void barrier_arrive_n_tx(u32 b, u32 n, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(b), "r"(bytes) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory");
}
