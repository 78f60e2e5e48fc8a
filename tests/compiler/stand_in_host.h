/* What stand_in_ptx.cuh has, for the emulated machine: the engine in place of the tensor cores runs
 * on the CPU, its products by the machine's wgmma. Copies of pairs are the machine's own. */
extern "C" void host_variable_released(void *p, int line);
extern "C" void host_variable_acquired(void *p, int line);

FN void queue_pause(u32) { host_yield_poll(); }
FN u32 queue_load(const u32 *a, LINE) {
  const u32 x = *(volatile const u32 *)a;
  host_variable_acquired((void *)a, line);
  host_yield_poll();
  return x;
}
FN void queue_store(u32 *a, u32 x, LINE) {
  host_variable_released(a, line);
  *a = x;
}
FN u32 queue_add(u32 *a, u32 x, LINE) {
  const u32 old = *a;
  host_variable_acquired(a, line);
  host_variable_released(a, line);
  *a = old + x;
  return old;
}
FN u32 queue_cas(u32 *a, u32 old, u32 x, LINE) {
  const u32 seen = *a;
  host_variable_acquired(a, line);
  host_variable_released(a, line);
  if (seen == old) *a = x;
  return seen;
}
FN u32 queue_noise() { return host_clock(); }
FN u32 cell_load(const u32 *a) { return *a; }
FN void cell_store(u32 *a, u32 x) { *a = x; }
FN void cells_fence() {}
FN u32 multiprocessor() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
FN void answer_here(u32 result, const u32 *w, u32 barrier, LINE) {
  const u32 here = peer_offset(cluster_rank());
  st_async<u32, 4>(result + here, w, barrier + here, line);
}
FN void cluster_meet(LINE) { host_cluster_sync(line); }
FN void engine_begins() {}

template <int N, int TYPES>
FN void host_engine_product(f32 *d, const u32 *f, u32 a, u32 ah, u32 b, u32 bh, bool ta, bool tb,
                            int line) {
  const u8 half = TYPES == 0 ? HOST_f16 : HOST_bf16;
  const u8 type_a = TYPES < 2 ? half : TYPES % 2 ? HOST_e5m2 : HOST_e4m3;
  const u8 type_b = TYPES < 2 ? half : TYPES > 3 ? HOST_e5m2 : HOST_e4m3;
  const HostWgmma w = {d, f, a, ah, b, bh, N, HOST_f32, type_a, type_b, ta, tb, false};
  host_wgmma_fence(line);
  host_wgmma(&w, line);
  host_wgmma_commit(line);
  host_wgmma_wait(0, line);
}
template <int N, int TYPES, bool TA, bool TB>
FN void tensor_wgmma(f32 *d, u32 a, u32 ah, u32 b, u32 bh, LINE) {
  host_engine_product<N, TYPES>(d, nullptr, a, ah, b, bh, TA, TB, line);
}
template <int N, int TYPES, bool TB>
FN void tensor_wgmma_registers(f32 *d, const u32 *f, u32 b, u32 bh, LINE) {
  host_engine_product<N, TYPES>(d, f, 0, 0, b, bh, false, TB, line);
}
