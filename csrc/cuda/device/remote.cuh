// Other devices of a mesh: where their memory is, and signals that reach all of them.

//! TensorMaps
// of one argument on each of DEVICES devices
template <int DEVICES> struct TensorMaps { TensorMap of[DEVICES]; };

//! Peers
// which device this is; addresses of arguments on each device, and at all of them at once
template <int ARGUMENTS, int DEVICES> struct Peers {
  u64 rank, at[ARGUMENTS][DEVICES], all[ARGUMENTS];
};

//! peer
template <typename T, int N, int D> FN T* peer(const Peers<N, D>& peers, u32 k, u32 device) {
  return (T*)peers.at[k][device];
}

//! address_on_all
template <typename T, int N, int D> FN T* address_on_all(const Peers<N, D>& peers, u32 k) {
  return (T*)peers.all[k];
}

//! semaphore_signal_first
// releases, for itself and for relaxed signals that follow
FN void semaphore_signal_first(u32* s, u32 n) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" :: "l"(s), "r"(n) : "memory");
}

//! semaphore_signal_relaxed
FN void semaphore_signal_relaxed(u32* s, u32 n) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" :: "l"(s), "r"(n) : "memory");
}

//! fence_proxy_alias
// between accesses of one memory at two addresses: a device's own, and that of all devices
FN void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

//! semaphore_signal_all
// on each device
FN void semaphore_signal_all(u32* s, u32 n) {
  asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" :: "l"(s), "r"(n) : "memory");
  fence_proxy_alias();
}
