"""Long rows for norms.py: a ring of chunks of rows in SMEM that is filled without a pause.

One persistent block an SM takes rows from a counter: SMs get unequal shares of the bandwidth, and
those that are ahead do more rows, else all would wait for the slowest. The last thread asks for the
next row before it fetches the last chunk of a row, and tells the others.

It fetches the row's chunks, one behind the other, for pairs of threads in turns, each of which has
slots of its own. The first of a pair gathers statistics as chunks arrive, for every place of a lane
its own; at the end of the row lanes put theirs together, and then pairs, in a fixed order. The
second, behind it, goes through the chunks once more, writes the result in their place, and has it
stored from there. A slot is free again when the store of the pair's next chunk has been issued and
its own has read SMEM. The bits of a row do not depend on the block that has it.

So while a row is written, the next one arrives in the slots that become free, and is gathered. A
row lies in SMEM as a whole, and its last slot is kept until a chunk of the next one is stored: a
pair has more slots than chunks of a row. Statistics of two rows have room; `met` says that those of
all pairs are there, `seen` that all have read them.

The second of a pair writes the same chunks of each row, and keeps their weights in registers, as
many as it has room for: the gatherers and the thread that fetches need few. Its loop over the
chunks of a row is unrolled then, since registers have no index."""

import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES as _SMEM
from ._ring import for_told, hand_out, roles, told_scratch

SLOTS = 32  # barriers of an array
FETCH_REGISTERS, GATHER_REGISTERS = 24, 64  # of a lane, at least, where writers keep weights
SMEM = _SMEM - 1024  # bytes for slots; barriers and statistics have the rest


class Plan:
    """Numbers that follow from the shape and the length of a chunk."""

    def __init__(self, rows, n, itemsize, chunk, consumers, programs):
        self.n, self.chunk, self.consumers = n, chunk, consumers
        self.grain = 2048 // itemsize  # 16 bytes for every lane
        self.whole, self.tail = divmod(n, chunk)
        self.chunks = self.whole + (self.tail > 0)
        self.stages = min(SMEM // (chunk * itemsize), SLOTS) // consumers  # of a consumer
        self.programs = min(programs, rows)
        threads = 2 * consumers + 1
        launched = 512 // threads // 8 * 8
        of_pair = (threads * launched - FETCH_REGISTERS) // consumers
        self.write_registers = min((of_pair - GATHER_REGISTERS) // 8 * 8, 232)
        self.gather_registers = min((of_pair - self.write_registers) // 8 * 8, launched)
        # rows that are told at a time: no wait of the thread that fetches but for slots
        self.ahead = min(max(pl.cdiv(self.stages - 1, self.chunks_of(0)), 2), SLOTS)
        # elements of each consumer
        self.sizes = [
            sum(min(n - k * chunk, chunk) for k in range(c, self.chunks, consumers))
            for c in range(consumers)
        ]

    def chunks_of(self, consumer):
        return (self.chunks - consumer + (self.consumers - 1)) // self.consumers

    def kept(self, vectors, aligned):
        """Numbers of the vectors, weight and bias, that the writers keep in registers."""
        elements = pl.cdiv(self.whole, self.consumers) * self.chunk // 128  # of a lane
        room, found = self.write_registers - 32, []  # the rest is for the work itself
        for i, v in enumerate(vectors):
            if v is None or not aligned[1 + i]:
                continue
            words = elements * v.itemsize // 4
            if words <= room:
                found.append(i)
                room -= words
        return found

    def why_not(self):
        """What is wrong with the chunks, or None."""
        if self.chunk % self.grain:
            return f"the chunk must be a multiple of {self.grain} elements"
        if self.whole < self.consumers:
            return "a row must have a whole chunk for each consumer"
        if self.stages <= self.chunks_of(0):
            return f"a consumer has {self.stages} slots, no more than chunks of a row"
        return None


class Segment:
    """A consumer's chunks of a row, as the functions of norms.py want a tile."""

    shared, held = True, None

    def __init__(self, p, me):
        self.n, self.sizes, self.shape = p.n, p.sizes, (1, p.grain)
        self.p, self.me = p, me
        # chunks of the consumer, without the one that ends the row
        self.mine = (p.whole - me + (p.consumers - 1)) // p.consumers
        self.has_tail = me == p.whole % p.consumers
        elements = self.mine * p.chunk + jnp.where(self.has_tail, p.tail, 0)
        self.share = 1 / elements.astype(jnp.float32)

    def counts(self):
        """How many elements each place of a lane has seen, float32."""
        p = self.p
        count = (self.mine * (p.chunk // p.grain)).astype(jnp.float32)
        if not p.tail:
            return count
        at = lax.broadcasted_iota(jnp.int32, self.shape, 1)
        groups, rest = divmod(p.tail, p.grain)
        more = jnp.where(at < rest, groups + 1.0, float(groups))
        return count + jnp.where(self.has_tail, more, 0.0)

    def most(self, x):
        return x.max(axis=1, keepdims=True)

    def total(self, x):
        return x.sum(axis=1, keepdims=True)


def choose(rows, n, itemsize, consumers, programs):
    """The length of a chunk: consumers have about the same, in few chunks."""

    def cost(chunk):
        p = Plan(rows, n, itemsize, chunk, consumers, programs)
        if p.why_not():
            return math.inf
        return max(p.sizes) + p.chunks * p.grain // 4

    grain = 2048 // itemsize
    return min(range(8 * grain, grain, -grain), key=cost)


@cached
def kernel(name, make, eps, shape, dtype, vectors, aligned, ring, interpret):
    """make(*eps): the statistics and the result of a row; vectors, aligned: as in norms.py; ring:
    chunk, consumers, programs."""
    rows, n = math.prod(shape[:-1]), shape[-1]
    p = Plan(rows, n, dtype.itemsize, *ring)
    kept = p.kept(vectors, aligned)
    chunk, consumers = p.chunk, p.consumers
    # groups that are stored together: each store is a sync, but results and loads take registers
    at_once = chunk // p.grain
    if kept:
        at_once = 2 if p.tail or sum(v is not None for v in vectors) > 1 else 4

    def body(x, *refs):
        given = iter(refs[: sum(v is not None for v in vectors)])
        weights = [None if v is None else next(given) for v in vectors]
        o, slots, stats_s, full, empty, met, seen, told = refs[-8:]
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        x, o = x.reshape((rows, n)), o.reshape((rows, n))
        sm = lax.axis_index("sm")

        def place(row, k, size):
            """Chunk k of a row, of which size elements are there; known to lie inside."""
            row = jnp.clip(row, 0, rows - 1)
            return pl.ds(row, 1), pl.ds(jnp.minimum(k * chunk, n - size), size)

        def before(w, c):
            """Chunks of pair c before the block's row w; known to be no less than 0."""
            return jnp.clip(w, 0, rows) * p.chunks_of(c)

        def slot_of(c, it, size=chunk):
            return slots.at[c, it % p.stages].reshape((1, chunk)).at[:, pl.ds(0, size)]

        def fetch():
            if kept:
                plgpu.set_max_registers(FETCH_REGISTERS, action="decrease")

            def one(row, w, k, size):
                c = k % consumers
                it = before(w, c) + k // consumers
                slot = c, it % p.stages

                @pl.when(it >= p.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot], phase=it // p.stages - 1)

                plgpu.copy_gmem_to_smem(
                    x.at[place(row, k, size)],
                    slot_of(c, it, size),
                    full.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

            def chunks(row, w, ask):
                """w: rows of this block before."""
                last = p.chunks - 1
                lax.fori_loop(0, last, lambda k, _: one(row, w, k, chunk), None)
                taken = ask()  # the answer comes while this waits for a slot
                one(row, w, last, p.tail or chunk)
                return w + 1, taken

            trips = hand_out(told, sm, p.programs, rows, chunks, jnp.int32(0), asks=True)
            for c in range(consumers):  # every release is waited for
                done = before(trips, c)

                def drain(s, _, c=c, done=done):
                    @pl.when(done > s)
                    def _():
                        phase = (done - s - 1) // p.stages
                        plgpu.barrier_wait(empty.at[c, s], phase=phase)

                lax.fori_loop(0, p.stages, drain, None)

        def inside(g, size):
            """Which elements of the group exist; None: all."""
            if (g + 1) * p.grain <= size:
                return None
            return lax.broadcasted_iota(jnp.int32, (1, p.grain), 1) < size - g * p.grain

        def groups(size):
            return range(pl.cdiv(size, p.grain))

        def read(ref, g, valid, fill):
            at = pl.ds(g, 1), slice(None)
            part = ref[at] if valid is None else pl.load(ref, at, mask=valid, other=fill)
            return part.astype(jnp.float32)

        def consume(me):
            def each(segment, step, carry, unroll=False):
                """carry = step(j, number of the chunk in the row, its elements, carry)."""

                def one(j, carry, size=chunk):
                    return step(j, me + j * consumers, size, carry)

                if unroll:
                    of_all, more = divmod(p.whole, consumers)
                    for j in range(of_all):
                        carry = one(j, carry)
                    if more:
                        there = segment.mine > of_all
                        carry = lax.cond(there, lambda c: one(of_all, c), lambda c: c, carry)
                else:
                    carry = lax.fori_loop(0, segment.mine, one, carry)
                if p.tail:

                    def end(carry):
                        return one(segment.mine, carry, p.tail)

                    carry = lax.cond(segment.has_tail, end, lambda carry: carry, carry)
                return carry

            def gather_row(row, w):
                """w: rows of this block before."""
                op, segment, it0 = make(*eps), Segment(p, me), before(w, me)

                def gather(j, k, size, stats):
                    it = it0 + j
                    plgpu.barrier_wait(full.at[me, it % p.stages], phase=it // p.stages)
                    ref, parts = slots.at[me, it % p.stages], []
                    for g in groups(size):
                        valid = inside(g, size)
                        parts.append((read(ref, g, valid, op.fill), valid))
                    return op.gather(stats, parts, j == 0)

                mine = op.gathered(segment, each(segment, gather, op.none(segment)))

                @pl.when(w > 1)
                def _():
                    plgpu.barrier_wait(seen.at[w % 2], phase=w // 2 - 1)

                for i, value in enumerate(mine):
                    stats_s[w % 2, me, i] = value.reshape(())
                plgpu.barrier_arrive(met.at[w % 2])
                return w + 1

            def write_row(row, w, held):
                op, segment, it0 = make(*eps), Segment(p, me), before(w, me)
                plgpu.barrier_wait(met.at[w % 2], phase=w // 2)
                box = stats_s.at[w % 2]
                of_all = [[box[c, i] for i in range(op.numbers)] for c in range(consumers)]
                plgpu.barrier_arrive(seen.at[w % 2])
                op.joined(segment, of_all)

                def write(j, k, size, _):
                    it = it0 + j
                    ref, results, stored = slots.at[me, it % p.stages], [], 0
                    parts = groups(size)
                    for g in parts:
                        valid = inside(g, size)
                        value = op.result(segment, read(ref, g, valid, op.fill))
                        have = held[j][g] if held and size == chunk else {}
                        value = weighted(value, valid, k * chunk + g * p.grain, have)
                        results.append(value.astype(dtype))
                        if len(results) == at_once or g == parts[-1]:  # one store: one sync
                            ref[stored : g + 1] = jnp.concatenate(results)
                            stored, results = g + 1, []
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot_of(me, it, size), o.at[place(row, k, size)])

                    @pl.when(it > 0)
                    def _():
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        plgpu.barrier_arrive(empty.at[me, (it - 1) % p.stages])

                each(segment, write, None, unroll=bool(kept))
                return w + 1

            @pl.when(lax.axis_index("wg") < consumers)
            def _():
                if kept:
                    plgpu.set_max_registers(p.gather_registers, action="decrease")
                trips = for_told(told, rows, gather_row, jnp.int32(0))
                for s in range(2):  # all that the writers say is waited for
                    last = (trips - 1 - s) // 2
                    pl.when(trips > s)(lambda s=s, n=last: plgpu.barrier_wait(seen.at[s], phase=n))

            @pl.when(lax.axis_index("wg") >= consumers)
            def _():
                held = []
                if kept:
                    plgpu.set_max_registers(p.write_registers, action="increase")
                    held = [keep(me, j) for j in range(pl.cdiv(p.whole, consumers))]
                work = functools.partial(write_row, held=held)
                trips = for_told(told, rows, work, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(empty.at[me, (before(trips, me) - 1) % p.stages])

        def load(i, start, valid=None):
            """A group of weight or bias."""
            if not aligned[1 + i]:  # no vectors: the compiler cannot know that this is zero
                start = start + lax.optimization_barrier(jnp.int32(0))
            at = pl.ds(start, p.grain)
            if valid is None:
                return weights[i][at]
            return pl.load(weights[i], at, mask=valid.reshape((p.grain,)), other=0.0)

        def keep(me, j):
            """What registers keep for the consumer's chunk j: of each group, by vector."""
            k = jnp.minimum(me + j * consumers, p.whole - 1)
            return [{i: load(i, k * chunk + g * p.grain) for i in kept} for g in groups(chunk)]

        def weighted(value, valid, start, held):
            for i, ref in enumerate(weights):
                if ref is None:
                    continue
                # behind the barrier it is as it was loaded: float32 would take twice the registers
                v = lax.optimization_barrier(held[i]) if i in held else load(i, start, valid)
                v = lax.broadcast_in_dim(v.astype(jnp.float32), value.shape, [1])
                value = value * v if i == 0 else value + v
            return value

        roles(2 * consumers, None, fetch, lambda thread: consume(thread % consumers))

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, dtype),
        scratch_types=[
            plgpu.SMEM((consumers, p.stages, chunk // p.grain, p.grain), dtype),
            plgpu.SMEM((2, consumers, 2), jnp.float32),
            plgpu.Barrier(num_barriers=(consumers, p.stages)),
            plgpu.Barrier(num_barriers=(consumers, p.stages)),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
            told_scratch(2 * consumers, p.ahead),
        ],
        grid=(p.programs,),
        grid_names=("sm",),
        num_threads=2 * consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=dtype.itemsize == 2),
        interpret=interpret,
        kernel_name=name,
    )
