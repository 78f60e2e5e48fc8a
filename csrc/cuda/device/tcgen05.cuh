// Tensor memory and the tensor cores that work on it. Addresses of tensor memory are
// lane << 16 | column. Products, copies and commits are called by one lane, and those of one lane
// take effect in order; allocation, loads, stores and their waits by all lanes of a warp.
// CTAS is 2 where blocks work in pairs.

//! tmem_alloc
// columns (a power of two) of tensor memory; their address is written to shared memory at slot
template <int CTAS> FN void tmem_alloc(u32 slot, u32 columns) {
  if constexpr (CTAS == 2) {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(slot), "r"(columns) : "memory");
  } else {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(slot), "r"(columns) : "memory");
  }
}

//! tmem_relinquish
// this block allocates no more: others may
template <int CTAS> FN void tmem_relinquish() {
  if constexpr (CTAS == 2) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  } else {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  }
}

//! tmem_dealloc
template <int CTAS> FN void tmem_dealloc(u32 tmem, u32 columns) {
  if constexpr (CTAS == 2) {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;"
                 :: "r"(tmem), "r"(columns) : "memory");
  } else {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
                 :: "r"(tmem), "r"(columns) : "memory");
  }
}

//! tmem_wait_load
// until the registers of all loads of the warp have their values
FN void tmem_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

//! tmem_wait_store
FN void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

//! tcgen05_fence_before
// the lane's accesses of tensor memory come before what a synchronisation after this tells others
FN void tcgen05_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }

//! tcgen05_fence_after
// what a synchronisation before this told the lane comes before its accesses of tensor memory
FN void tcgen05_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

//! tcgen05_commit
// one arrival when all products and copies of this lane are complete
FN void tcgen05_commit(u32 b) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               :: "r"(b) : "memory");
}

//! tcgen05_commit_pair
// the same, at the same place of every block whose bit is set in mask
FN void tcgen05_commit_pair(u32 b, u32 mask) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
               ".multicast::cluster.b64 [%0], %1;" :: "r"(b), "h"((u16)mask) : "memory");
}

//! tcgen05_address
// the low word of a matrix descriptor: start of the matrix; leading: bits 16 to 29
FN u32 tcgen05_address(u32 a, u32 leading) { return ((a & 0x3ffff) >> 4) | leading; }

//! try_cancel
// 16 bytes for each block of the cluster: which cluster that has not begun will not begin
FN void try_cancel(u32 result, u32 barrier) {
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
               ".multicast::cluster::all.b128 [%0], [%1];" :: "r"(result), "r"(barrier) : "memory");
}

//! query_cancel
// was there one? block: the indices of its first block
FN bool query_cancel(u32 result, u32* block) {
  u32 r;
  asm volatile("{ .reg .pred p; .reg .b128 h; ld.shared.b128 h, [%4];\n"
               "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0;\n"
               "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128"
               " {%0, %1, %2, _}, h;\nselp.u32 %3, 1, 0, p; }"
               : "=r"(block[0]), "=r"(block[1]), "=r"(block[2]), "=r"(r)
               : "r"(result) : "memory");
  return r != 0;
}

//! tma_gather4
// four rows of a matrix, which the box has one of
FN void tma_gather4(u32 dst, const TensorMap* m, u32 barrier, i32 column, const i32* rows) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
               ".mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(column), "r"(rows[0]), "r"(rows[1]),
                  "r"(rows[2]), "r"(rows[3]) : "memory");
}

//! tma_scatter4
FN void tma_scatter4(const TensorMap* m, u32 src, i32 column, const i32* rows) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
               " [%0, {%2,%3,%4,%5,%6}], [%1];"
               :: "l"(m), "r"(src), "r"(column), "r"(rows[0]), "r"(rows[1]), "r"(rows[2]),
                  "r"(rows[3]) : "memory");
}
