// The copy engines: boxes of tensors by tensor maps, contiguous bytes, groups of stores. One
// elected lane calls these functions.
//
// Without clusters a destination is .shared::cta: for sm_120a ptxas makes of .shared::cluster a
// comparison with the block's own window, and a call where it fails, which takes a stack.

//! tensor_map_prefetch
FN void tensor_map_prefetch(const TensorMap* m) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(m) : "memory");
}

//! tma_load_1d
FN void tma_load_1d(u32 dst, const TensorMap* m, u32 barrier, i32 c0) {
#ifdef HAS_CLUSTER
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0) : "memory");
#endif
}

//! tma_load_2d
FN void tma_load_2d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1) {
#ifdef HAS_CLUSTER
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1) : "memory");
#endif
}

//! tma_load_3d
FN void tma_load_3d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1, i32 c2) {
#ifdef HAS_CLUSTER
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
#endif
}

//! tma_load_4d
FN void tma_load_4d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
#ifdef HAS_CLUSTER
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5,%6}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5,%6}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
#endif
}

//! tma_load_5d
FN void tma_load_5d(u32 dst, const TensorMap* m, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3,
                    i32 c4) {
#ifdef HAS_CLUSTER
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
#else
  asm volatile("cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
               :: "r"(dst), "l"(m), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
#endif
}

//! tma_multicast_1d
// multicasts to the same offset in every block of the cluster whose bit is set in mask
FN void tma_multicast_1d(u32 dst, const TensorMap* m, u32 barrier, u32 mask, i32 c0) {
  asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%4}], [%2], %3;"
               :: "r"(dst), "l"(m), "r"(barrier), "h"((u16)mask),
                  "r"(c0) : "memory");
}

//! tma_multicast_2d
FN void tma_multicast_2d(u32 dst, const TensorMap* m, u32 barrier, u32 mask, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%4,%5}], [%2], %3;"
               :: "r"(dst), "l"(m), "r"(barrier), "h"((u16)mask),
                  "r"(c0), "r"(c1) : "memory");
}

//! tma_multicast_3d
FN void tma_multicast_3d(u32 dst, const TensorMap* m, u32 barrier, u32 mask,
                        i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%4,%5,%6}], [%2], %3;"
               :: "r"(dst), "l"(m), "r"(barrier), "h"((u16)mask),
                  "r"(c0), "r"(c1), "r"(c2) : "memory");
}

//! tma_multicast_4d
FN void tma_multicast_4d(u32 dst, const TensorMap* m, u32 barrier, u32 mask,
                        i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%4,%5,%6,%7}], [%2], %3;"
               :: "r"(dst), "l"(m), "r"(barrier), "h"((u16)mask),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

//! tma_multicast_5d
FN void tma_multicast_5d(u32 dst, const TensorMap* m, u32 barrier, u32 mask,
                        i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%4,%5,%6,%7,%8}], [%2], %3;"
               :: "r"(dst), "l"(m), "r"(barrier), "h"((u16)mask),
                  "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

//! tma_store_1d
FN void tma_store_1d(const TensorMap* m, u32 src, i32 c0) {
  asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];"
               :: "l"(m), "r"(src), "r"(c0) : "memory");
}

//! tma_store_2d
FN void tma_store_2d(const TensorMap* m, u32 src, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1) : "memory");
}

//! tma_store_3d
FN void tma_store_3d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

//! tma_store_4d
FN void tma_store_4d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

//! tma_store_5d
FN void tma_store_5d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

//! tma_store_evict_first_1d
// a cache policy: L2 evicts what is written before anything else
FN void tma_store_evict_first_1d(const TensorMap* m, u32 src, i32 c0) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.tensor.1d.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0, {%2}], [%1], first; }"
               :: "l"(m), "r"(src), "r"(c0) : "memory");
}

//! tma_store_evict_first_2d
FN void tma_store_evict_first_2d(const TensorMap* m, u32 src, i32 c0, i32 c1) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0, {%2,%3}], [%1], first; }"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1) : "memory");
}

//! tma_store_evict_first_3d
FN void tma_store_evict_first_3d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0, {%2,%3,%4}], [%1], first; }"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

//! tma_store_evict_first_4d
FN void tma_store_evict_first_4d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0, {%2,%3,%4,%5}], [%1], first; }"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

//! tma_store_evict_first_5d
FN void tma_store_evict_first_5d(const TensorMap* m, u32 src, i32 c0, i32 c1, i32 c2,
                                 i32 c3, i32 c4) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0, {%2,%3,%4,%5,%6}], [%1], first; }"
               :: "l"(m), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

//! bulk_load
// for a block without a cluster; compilers before 12.8 only know the form for clusters
FN void bulk_load(u32 dst, const void* src, u32 bytes, u32 barrier) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1208
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
#else
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
#endif
               " [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}

//! bulk_load_cluster
FN void bulk_load_cluster(u32 dst, const void* src, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}

//! bulk_store
FN void bulk_store(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}

//! bulk_store_evict_first
FN void bulk_store_evict_first(void* dst, u32 src, u32 bytes) {
  asm volatile("{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;"
               " cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint"
               " [%0], [%1], %2, first; }"
               :: "l"(dst), "r"(src), "r"(bytes) : "memory");
}

//! bulk_group_commit
FN void bulk_group_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

//! bulk_group_wait
// waits until at most N groups of this lane are pending
template <int N> FN void bulk_group_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}

//! bulk_group_wait_read
// waits until all but N groups have at least read their shared memory
template <int N> FN void bulk_group_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

//! fence_proxy_async
// orders this lane's accesses to shared memory before later ones by TMA and the tensor cores
FN void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

//! fence_proxy_async_cluster
// the same, and for what it stored to shared memory of other blocks of the cluster
FN void fence_proxy_async_cluster() {
  asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}

//! fence_proxy_async_global
// makes visible to TMA what lanes that this one has synchronised with wrote to global memory
FN void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

//! tma_prefetch_1d
// fetches a box into L2
FN void tma_prefetch_1d(const TensorMap* m, i32 c0) {
  asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];"
               :: "l"(m), "r"(c0) : "memory");
}

//! tma_prefetch_2d
FN void tma_prefetch_2d(const TensorMap* m, i32 c0, i32 c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1,%2}];"
               :: "l"(m), "r"(c0), "r"(c1) : "memory");
}

//! tma_prefetch_3d
FN void tma_prefetch_3d(const TensorMap* m, i32 c0, i32 c1, i32 c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1,%2,%3}];"
               :: "l"(m), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

//! tma_prefetch_4d
FN void tma_prefetch_4d(const TensorMap* m, i32 c0, i32 c1, i32 c2, i32 c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];"
               :: "l"(m), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

//! tma_prefetch_5d
FN void tma_prefetch_5d(const TensorMap* m, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1,%2,%3,%4,%5}];"
               :: "l"(m), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

//! bulk_prefetch
FN void bulk_prefetch(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(src), "r"(bytes) : "memory");
}

//! prefetch_global
// fetches the cache line of this address into L2
FN void prefetch_global(const void* a) { asm volatile("prefetch.global.L2 [%0];" :: "l"(a)); }
