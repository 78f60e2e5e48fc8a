"""Copies between contiguous pieces of global memory, also of other devices, by the TMA engine.

A worker (a warpgroup) has a ring of slots in shared memory. It has pieces loaded ahead and stores
each one when it has come; a slot is loaded again when the engine has read what it stored from
there. So the bytes in flight are those of the ring, and no lane carries data."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

PIECE = 8192  # bytes of a slot
_SLOTS = 6
_STORES = 3  # of a worker in flight; the other slots are being loaded


def scratch(threads, dtype):
    """Scratch of a block of so many warpgroups."""
    return {
        "ring": plgpu.SMEM((threads, _SLOTS, PIECE // dtype.itemsize), dtype),
        "loaded": plgpu.Barrier(num_barriers=threads * _SLOTS),
    }


def fits(n, itemsize):
    """Can slices of flat arrays begin at multiples of n elements?"""
    return n * itemsize % 16 == 0


class Ring:
    """The slots of one worker, while its kernel is traced."""

    def __init__(self, ring, loaded):
        self.ring, self.loaded, self.me = ring, loaded, lax.axis_index("wg")
        self.size = ring.shape[-1]

    def copy(self, pieces, source, targets, ready=None):
        """Copies a number of pieces: source(k), of `size` elements, to each of targets(k). ready()
        is called when the first pieces are being loaded. finish() waits for what was stored."""
        ahead = _SLOTS - _STORES

        def slot(k):
            i = k % _SLOTS
            return self.ring.at[self.me, i], self.loaded.at[self.me * _SLOTS + i]

        def load(k):
            plgpu.copy_gmem_to_smem(source(k), *slot(k))

        for k in range(ahead):
            pl.when(k < pieces)(lambda k=k: load(k))
        if ready:
            ready()

        def step(k, _):
            buffer, loaded = slot(k)
            plgpu.barrier_wait(loaded)
            *others, last = targets(k)
            for target in others:
                plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)
            plgpu.copy_smem_to_gmem(buffer, last)
            plgpu.wait_smem_to_gmem(_STORES, wait_read_only=True)
            pl.when(k + ahead < pieces)(lambda: load(k + ahead))

        lax.fori_loop(0, pieces, step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def finish(self):
        plgpu.wait_smem_to_gmem(0)
