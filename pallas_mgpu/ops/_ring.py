"""What kernels with a ring of slots share: one thread fetches, the others multiply."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl


class Ring:
    """Slots of two operands and their barriers, refs of the body. Made while tracing."""

    def __init__(self, stages, a, b, full, empty):
        self.stages, self.a, self.b, self.full, self.empty = stages, a, b, full, empty

    def fetch(self, first, steps, it, copy):
        """Thread that fetches: copy(s, slot of a, slot of b, barrier) for the steps from the first
        on; `it` steps were before all of them."""

        def one(s, _):
            now = it + s
            slot = now % self.stages

            @pl.when(now >= self.stages)
            def _():
                plgpu.barrier_wait(self.empty.at[slot], phase=now // self.stages - 1)

            copy(s, self.a.at[slot], self.b.at[slot], self.full.at[slot])

        lax.fori_loop(first, steps, one, None)

    def drain(self, done):
        """Every release is waited for, also those of other blocks."""
        for s in range(self.stages):
            last = (done - s - 1) // self.stages
            pl.when(done > s)(lambda s=s, n=last: plgpu.barrier_wait(self.empty.at[s], phase=n))

    def multiply(self, acc, steps, it, factors, late=True):
        """Consumer: acc += the product of factors(a, b) of each slot. Late: one product is in
        flight while the next one is issued, and the last slot is yet to be released."""

        def one(s, _):
            now = it + s
            slot = now % self.stages
            plgpu.barrier_wait(self.full.at[slot], phase=now // self.stages)
            plgpu.wgmma(acc, *factors(self.a.at[slot], self.b.at[slot]))
            plgpu.wgmma_wait(1 if late else 0)
            if not late:
                plgpu.barrier_arrive(self.empty.at[slot])
                return

            @pl.when(s > 0)
            def _():
                plgpu.barrier_arrive(self.empty.at[(now - 1) % self.stages])

        lax.fori_loop(0, steps, one, None)

    def release_last(self, steps, it):
        plgpu.barrier_arrive(self.empty.at[(it + (steps - 1)) % self.stages])

    def skip(self, steps, it):
        """Consumer without rows: release what comes."""

        def one(s, _):
            slot = (it + s) % self.stages
            plgpu.barrier_wait(self.full.at[slot], phase=(it + s) // self.stages)
            plgpu.barrier_arrive(self.empty.at[slot])

        lax.fori_loop(0, steps, one, None)


def store(p, value, buffers, out_dtype, target, engine=None):
    """value through the buffers, by TMA; target(c): where chunk c goes."""
    for c in range(p.chunks):
        part = value[:, c * p.chunk : (c + 1) * p.chunk]
        buffer = buffers.at[c % p.buffers]
        plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
        buffer[...] = part.astype(out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target(c), engine=engine)


def roles(consumers, registers, fetch, consume):
    """fetch() in the last thread, consume(me) in the others; registers: those of the last thread
    and of the others, None for an even share."""
    me = lax.axis_index("wg")

    @pl.when(me == consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="decrease")
        fetch()

    @pl.when(me < consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="increase")
        consume(me)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
