"""What kernels with a ring of slots share: one thread fetches, the others multiply."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp


class Ring:
    """Slots of two operands and their barriers, refs of the body. Made while tracing.

    Loops carry the slot of a step, and how often the ring went round before it (the turn): dividing
    the number of a step by a count that is no power of two would make each step longer."""

    def __init__(self, stages, a, b, full, empty):
        self.stages, self.a, self.b, self.full, self.empty = stages, a, b, full, empty

    def at(self, it):
        """Slot and turn of step `it` of all."""
        return it % self.stages, it // self.stages

    def next(self, slot, turn):
        """The same of the step behind."""
        last = slot == self.stages - 1
        return lax.select(last, jnp.int32(0), slot + 1), turn + last.astype(jnp.int32)

    def fetch(self, first, steps, at, copy):
        """Thread that fetches: copy(s, slot of a, slot of b, barrier) for the steps from the first
        on, from slot and turn `at` on. Returns those behind the steps."""

        def one(s, at):
            slot, turn = at

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(self.empty.at[slot], phase=turn - 1)

            copy(s, self.a.at[slot], self.b.at[slot], self.full.at[slot])
            return self.next(slot, turn)

        return lax.fori_loop(first, steps, one, at)

    def drain(self, done):
        """Every release is waited for, also those of other blocks."""
        for s in range(self.stages):
            last = (done - s - 1) // self.stages
            pl.when(done > s)(lambda s=s, n=last: plgpu.barrier_wait(self.empty.at[s], phase=n))

    def multiply(
        self, acc, steps, at, factors, beside=lambda s, carry: carry, carry=None, before=None
    ):
        """Consumer: acc += the product of factors(a, b) of each slot, from slot and turn `at` on.
        One product is in flight while the next one is issued. carry = beside(s, carry): what else
        is done while step s multiplies. Returns the carry, slot and turn behind the steps, and the
        slot of the last one, which is yet to be released (-1 without steps). before(): when the
        products issued before the first step are done, if there are steps."""

        def one(s, state):
            carry, slot, turn, last = state
            plgpu.barrier_wait(self.full.at[slot], phase=turn)
            plgpu.wgmma(acc, *factors(self.a.at[slot], self.b.at[slot]))
            carry = beside(s, carry)
            plgpu.wgmma_wait(1)
            pl.when(last >= 0)(lambda: self.release(last))
            if before:
                pl.when(last < 0)(before)
            return carry, *self.next(slot, turn), slot

        carry, slot, turn, last = lax.fori_loop(0, steps, one, (carry, *at, jnp.int32(-1)))
        return carry, (slot, turn), last

    def release(self, slot):
        plgpu.barrier_arrive(self.empty.at[slot])


# ---- tiles from a counter of the launch ----------------------------------------------------------


def told_scratch(consumers, ahead=2, axes=None):
    """Tile numbers on their way from the thread that fetches to the consumers: `ahead` of them.
    axes: those of the cluster, if its blocks get the same tiles."""
    found = plgpu.ext.TileScheduler.scratch(consumers, ahead, axes or ())
    return [found["tiles"], found["ready"], found["read"], found.get("free")]


def hand_out(told_refs, first, programs, total, work, carry, some=True, asks=False, beyond=False):
    """Thread that fetches: carry = work(tile, carry) for the first tile, then for whichever is next
    of all blocks; the consumers are told each, and in the end one beyond the last. some: the first
    is one for sure. asks: not when the work begins, but when work(tile, carry, ask) does ask(), the
    next tile is taken; it returns (carry, what it was told). beyond: work for the one beyond, too.
    All blocks of a cluster get what the first one takes.
    """
    scheduler = plgpu.ext.TileScheduler(*told_refs)
    heard, ahead = scheduler.read, scheduler.slots

    def tell(w, t):
        scheduler.broadcast(t, w)
        return t if scheduler.free is None else scheduler.receive(w, release=False)

    def take(t):
        try:
            return scheduler.fetch()
        except NotImplementedError:  # vmap, whose elements would share the counter: a fixed share
            return t

    def step(x):
        w, t, carry = x
        if asks:
            carry, taken = work(t, carry, lambda: take(t))
        else:
            taken = take(t)
            carry = work(t, carry)
        return w + 1, tell(w + 1, taken + programs), carry

    start = jnp.int32(0), tell(jnp.int32(0), first), carry
    w, t, carry = lax.while_loop(lambda x: x[1] < total, step, start)
    if beyond:
        carry = work(t, carry)
    plgpu.barrier_wait(heard.at[w % ahead])
    for k in range(1, ahead):

        def await_heard(k=k):
            plgpu.barrier_wait(heard.at[(w + (ahead - k)) % ahead])

        pl.when(some and k == 1 or w > k - 1)(await_heard)
    return carry


def hear(told_refs, w):
    """Consumer: tile w of those that it is told."""
    return plgpu.ext.TileScheduler(*told_refs).receive(w)


def for_told(told_refs, total, work, carry):
    """Consumer: carry = work(tile, carry) for each tile that it is told."""

    def step(x):
        w, t, carry = x
        carry = work(t, carry)
        return w + 1, hear(told_refs, w + 1), carry

    start = (jnp.int32(0), hear(told_refs, jnp.int32(0)), carry)
    return lax.while_loop(lambda x: x[1] < total, step, start)[2]


def store_chunk(p, part, buffer, target, engine=None, evict_first=False):
    """part through one of p.buffers, by TMA."""
    plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
    buffer[...] = part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target, engine=engine, evict_first=evict_first)


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
