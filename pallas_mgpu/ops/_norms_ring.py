"""Long rows for norms.py: a ring of chunks of rows in SMEM that is filled without a pause.

One persistent block an SM takes every `programs`-th row. Its last thread fetches the row's chunks,
one behind the other, into slots; the consumers take the chunks in turns. Each gathers statistics
as its chunks arrive, for every place of a lane its own; at the end of the row lanes and then
consumers put theirs together, in a fixed order. Then each consumer goes through its chunks once
more, writes the result in their place, and has it stored from there. A slot is free again when the
store of the consumer's next chunk has been issued and its own has read SMEM.

A row lies in SMEM as a whole, so there are at least as many slots as it has chunks. What is left
takes chunks of the next row while this one waits for its statistics; `stages >= 2 * consumers`,
as a consumer keeps its last slot until it has seen a chunk of the next row."""

import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._ring import roles

CONSUMERS = 2
SLOTS = 32  # barriers of an array
SMEM = 232448 - 2048  # bytes for slots


class Plan:
    """Numbers that follow from the shape and the length of a chunk."""

    def __init__(self, rows, n, itemsize, chunk, programs):
        self.n, self.chunk = n, chunk
        self.grain = 2048 // itemsize  # 16 bytes for every lane
        self.whole, self.tail = divmod(n, chunk)
        self.chunks = self.whole + (self.tail > 0)
        self.stages = min(SMEM // (chunk * itemsize), SLOTS)
        self.programs = min(programs, rows)
        # elements of each consumer
        self.sizes = [
            sum(min(n - k * chunk, chunk) for k in range(c, self.chunks, CONSUMERS))
            for c in range(CONSUMERS)
        ]

    def why_not(self):
        """What is wrong with the chunks, or None."""
        if self.chunk % self.grain:
            return f"the chunk must be a multiple of {self.grain} elements"
        if self.whole < CONSUMERS:
            return f"a row must have {CONSUMERS} whole chunks or more"
        if self.stages < max(self.chunks, 2 * CONSUMERS):
            return f"SMEM has room for {self.stages} chunks, less than a row has"
        return None


class Segment:
    """A consumer's chunks of a row, as the functions of norms.py want a tile."""

    shared, held = True, None

    def __init__(self, p, me):
        self.n, self.sizes, self.shape = p.n, p.sizes, (1, p.grain)
        self.p, self.me = p, me
        # chunks of the consumer, without the one that ends the row
        self.mine = (p.whole - me + (CONSUMERS - 1)) // CONSUMERS
        self.has_tail = me == p.whole % CONSUMERS
        self.share = jnp.where(me == 0, *(jnp.float32(1 / c) for c in p.sizes))

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


def choose(rows, n, itemsize, programs):
    """The length of a chunk: consumers have about the same, in few chunks."""

    def cost(chunk):
        p = Plan(rows, n, itemsize, chunk, programs)
        if p.why_not():
            return math.inf
        return max(p.sizes) + p.chunks * p.grain // 4

    grain = 2048 // itemsize
    return min(range(8 * grain, grain, -grain), key=cost)


@functools.cache
def kernel(name, make, eps, shape, dtype, vectors, aligned, chunk, programs, interpret):
    """make(*eps): the statistics and the result of a row; vectors, aligned: as in norms.py."""
    rows, n = math.prod(shape[:-1]), shape[-1]
    p = Plan(rows, n, dtype.itemsize, chunk, programs)

    def body(x, *refs):
        given = iter(refs[: sum(v is not None for v in vectors)])
        weights = [None if v is None else next(given) for v in vectors]
        o, slots, stats_s, full, empty, met = refs[-6:]
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        x, o = x.reshape((rows, n)), o.reshape((rows, n))
        sm = lax.axis_index("sm")
        trips = (rows - sm + (p.programs - 1)) // p.programs

        def place(w, k, size):
            """Chunk k of the block's row w, of which size elements are there."""
            row = jnp.minimum(sm + w * p.programs, rows - 1)  # known to lie inside
            return pl.ds(row, 1), pl.ds(jnp.minimum(k * chunk, n - size), size)

        def slot_of(it, size=chunk):
            return slots.at[it % p.stages, :, pl.ds(0, size)]

        def fetch():
            def one(w, k, size):
                it = w * p.chunks + k

                @pl.when(it >= p.stages)
                def _():
                    plgpu.barrier_wait(empty.at[it % p.stages], phase=it // p.stages - 1)

                plgpu.copy_gmem_to_smem(
                    x.at[place(w, k, size)],
                    slot_of(it, size),
                    full.at[it % p.stages],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

            def row(w, _):
                lax.fori_loop(0, p.whole, lambda k, _: one(w, k, chunk), None)
                if p.tail:
                    one(w, p.whole, p.tail)

            lax.fori_loop(0, trips, row, None)

        def inside(g, size):
            """Which elements of the group exist; None: all."""
            if (g + 1) * p.grain <= size:
                return None
            return lax.broadcasted_iota(jnp.int32, (1, p.grain), 1) < size - g * p.grain

        def groups(size):
            return range(pl.cdiv(size, p.grain))

        def read(ref, g, valid, fill):
            at = slice(None), pl.ds(g * p.grain, p.grain)
            part = ref[at] if valid is None else pl.load(ref, at, mask=valid, other=fill)
            return part.astype(jnp.float32)

        def consume(me):
            def each(segment, step, carry):
                """carry = step(j, number of the chunk in the row, its elements, carry)."""

                def one(j, carry, size=chunk):
                    return step(j, me + j * CONSUMERS, size, carry)

                carry = lax.fori_loop(0, segment.mine, one, carry)
                if p.tail:

                    def end(carry):
                        return one(segment.mine, carry, p.tail)

                    carry = lax.cond(segment.has_tail, end, lambda carry: carry, carry)
                return carry

            def release(w, k):
                plgpu.barrier_arrive(empty.at[(w * p.chunks + k) % p.stages])

            def row(w, _):
                op, segment = make(*eps), Segment(p, me)

                def gather(j, k, size, stats):
                    it = w * p.chunks + k
                    plgpu.barrier_wait(full.at[it % p.stages], phase=it // p.stages)
                    ref, parts = slot_of(it), []
                    for g in groups(size):
                        valid = inside(g, size)
                        parts.append((read(ref, g, valid, op.fill), valid))
                    stats = op.gather(stats, parts, j == 0)

                    @pl.when((j == 0) & (w > 0))
                    def _():
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        last = (p.chunks - 1 - me) // CONSUMERS * CONSUMERS + me
                        release(w - 1, last)

                    return stats

                mine = op.gathered(segment, each(segment, gather, op.none(segment)))
                box = stats_s.at[w % 2]
                for i, value in enumerate(mine):
                    box[me, i] = value.reshape(())
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met, phase=w)
                of_all = [[box[c, i] for i in range(len(mine))] for c in range(CONSUMERS)]
                op.joined(segment, of_all)

                def write(j, k, size, _):
                    ref = slot_of(w * p.chunks + k)
                    results = []  # all are read before any is written, for one sync
                    for g in groups(size):
                        valid = inside(g, size)
                        value = op.result(segment, read(ref, g, valid, op.fill))
                        value = weighted(value, valid, k * chunk + g * p.grain)
                        results.append(value.astype(dtype))
                    for g, value in enumerate(results):
                        ref[:, pl.ds(g * p.grain, p.grain)] = value
                    plgpu.commit_smem()
                    source = slot_of(w * p.chunks + k, size)
                    plgpu.copy_smem_to_gmem(source, o.at[place(w, k, size)])

                    @pl.when(j > 0)
                    def _():
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        release(w, k - CONSUMERS)

                each(segment, write, None)

            lax.fori_loop(0, trips, row, None)

        def weighted(value, valid, start):
            for i, (ref, is_aligned) in enumerate(zip(weights, aligned[1:])):
                if ref is None:
                    continue
                if not is_aligned:  # no vectors: the compiler cannot know that this is zero
                    start = start + lax.optimization_barrier(jnp.int32(0))
                at = pl.ds(start, p.grain)
                if valid is None:
                    v = ref[at]
                else:
                    v = pl.load(ref, at, mask=valid.reshape((p.grain,)), other=0.0)
                v = lax.broadcast_in_dim(v.astype(jnp.float32), value.shape, [1])
                value = value * v if i == 0 else value + v
            return value

        roles(CONSUMERS, None, fetch, consume)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, dtype),
        scratch_types=[
            plgpu.SMEM((p.stages, 1, chunk), dtype),
            plgpu.SMEM((2, CONSUMERS, 2), jnp.float32),
            plgpu.Barrier(num_barriers=p.stages),
            plgpu.Barrier(num_barriers=p.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ],
        grid=(p.programs,),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=dtype.itemsize == 2),
        interpret=interpret,
        kernel_name=name,
    )
