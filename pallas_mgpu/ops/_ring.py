"""What kernels with a ring of slots share: one thread fetches, the others multiply."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp


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

    def multiply(self, acc, steps, it, factors, beside=lambda s: None):
        """Consumer: acc += the product of factors(a, b) of each slot. One product is in flight
        while the next one is issued, and the last slot is yet to be released. beside(s): what else
        is done while step s multiplies."""

        def one(s, _):
            now = it + s
            slot = now % self.stages
            plgpu.barrier_wait(self.full.at[slot], phase=now // self.stages)
            plgpu.wgmma(acc, *factors(self.a.at[slot], self.b.at[slot]))
            beside(s)
            plgpu.wgmma_wait(1)

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


# ---- tiles from a counter of the launch ----------------------------------------------------------


def told_scratch(consumers):
    """Tile numbers on their way from the thread that fetches to the consumers, two at a time."""
    return [
        plgpu.SMEM((2,), jnp.int32),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
    ]


def hand_out(told_refs, first, programs, total, work, carry, some=True, beyond=False):
    """Thread that fetches: carry = work(tile, carry) for the first tile, then for whichever is next
    of all blocks; the consumers are told each, and in the end one beyond the last. some: the first
    is one for sure. beyond: work for the one beyond, too."""
    tile_s, told, heard = told_refs

    def tell(w, t):
        @pl.when(w > 1)
        def _():
            plgpu.barrier_wait(heard.at[w % 2])

        tile_s[w % 2] = t
        plgpu.barrier_arrive(told.at[w % 2])

    def step(x):
        w, t, carry = x
        tell(w, t)
        following = plgpu.next_tile() + programs
        return w + 1, following, work(t, carry)

    w, t, carry = lax.while_loop(lambda x: x[1] < total, step, (jnp.int32(0), first, carry))
    tell(w, t)
    if beyond:
        carry = work(t, carry)
    plgpu.barrier_wait(heard.at[w % 2])
    if some:
        plgpu.barrier_wait(heard.at[(w + 1) % 2])
    else:
        pl.when(w > 0)(lambda: plgpu.barrier_wait(heard.at[(w + 1) % 2]))
    return carry


def hear(told_refs, w):
    """Consumer: tile w of those that it is told."""
    tile_s, told, heard = told_refs
    plgpu.barrier_wait(told.at[w % 2])
    t = tile_s[w % 2]
    plgpu.barrier_arrive(heard.at[w % 2])
    return t


def for_told(told_refs, total, work, carry):
    """Consumer: carry = work(tile, carry) for each tile that it is told."""

    def step(x):
        w, t, carry = x
        carry = work(t, carry)
        return w + 1, hear(told_refs, w + 1), carry

    start = (jnp.int32(0), hear(told_refs, jnp.int32(0)), carry)
    return lax.while_loop(lambda x: x[1] < total, step, start)[2]


def store_chunk(p, part, buffer, target, engine=None):
    """part through one of p.buffers, by TMA."""
    plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
    buffer[...] = part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target, engine=engine)


def store(p, value, buffers, out_dtype, target):
    """value through the buffers, by TMA; target(c): where chunk c goes."""
    for c in range(p.chunks):
        part = value[:, c * p.chunk : (c + 1) * p.chunk].astype(out_dtype)
        store_chunk(p, part, buffers.at[c % p.buffers], target(c))


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
