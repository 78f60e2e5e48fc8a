"""Long rows for norms.py: a ring of chunks of rows in shared memory that is filled without a pause.

One persistent block an SM takes rows from a counter: SMs get unequal shares of the bandwidth, and
those that are ahead do more rows, else all would wait for the slowest. The producer asks for the
next row before it fetches the last chunk of a row, and tells the consumers.

It fetches the row's chunks, one after the other, for pairs of consumers in turns, each of which has
slots of its own. The first of a pair, the gatherer, gathers statistics as chunks arrive, for every
place of a lane its own; at the end of the row lanes combine theirs, and then pairs, in a fixed
order. The second, the writer, goes through the chunks once more, writes the result in their place,
and stores it from there. A slot is free again when the store of the pair's next chunk has been
issued and its own has read shared memory. The bits of a row do not depend on the block that has it.

So while a row is written, the next one arrives in the slots that become free, and is gathered. A
row lies in shared memory as a whole, and its last slot is kept until a chunk of the next one is
stored: a pair has more slots than chunks of a row. Statistics have a ring of their own, of two
rows: a slot is full when those of all pairs are there, and empty when all writers have read them.

The writer of a pair writes the same chunks of each row, and keeps their weights in registers, as
many as it has room for: the gatherers and the producer need few. Its loop over the chunks of a row
is unrolled then, since registers have no index, or moves them on from chunk to chunk. Vectors that
registers have no room for may come through shared memory (`stream`): the writer copies a chunk of
them while it works on the one before, in two slots by turns."""

import functools

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import (
    SMEM_BYTES,
    CountedTiles,
    Ring,
    WarpSpecialized,
    overlap_launches,
    unaligned,
    warp_specialized,
)

SLOTS = 32  # barriers of an array
# Registers of a lane, at least, where writers keep weights. Writers that move them on need more of
# their own: gatherers get few.
PRODUCER_REGISTERS, GATHERER_REGISTERS, FEW_REGISTERS = 24, 64, 56
ROOM = SMEM_BYTES - 1024  # bytes for slots; barriers and statistics have the rest
_COPIES = 2  # of a chunk of the vectors that come through shared memory


class Plan:
    """Numbers that follow from the shape and the length of a chunk."""

    axes: dict[str, int] = {}
    registers = None  # each role sets its own

    def __init__(self, rows, n, itemsize, chunk, pairs, programs, unroll=0, room=ROOM):
        self.rows, self.n, self.chunk, self.pairs, self.consumers = rows, n, chunk, pairs, 2 * pairs
        self.unroll = unroll
        self.grain = 2048 // itemsize  # 16 bytes for every lane
        self.whole, self.tail = divmod(n, chunk)
        self.chunks = self.whole + (self.tail > 0)
        self.stages = min(room // (chunk * itemsize), SLOTS) // pairs  # of a pair
        self.clusters = min(programs, rows)
        launched = 512 // (self.consumers + 1) // 8 * 8
        of_pair = ((self.consumers + 1) * launched - PRODUCER_REGISTERS) // pairs
        gatherer = FEW_REGISTERS if unroll else GATHERER_REGISTERS
        self.writer_registers = min((of_pair - gatherer) // 8 * 8, 232)
        self.gatherer_registers = min((of_pair - self.writer_registers) // 8 * 8, launched)
        # rows announced at a time: the producer waits for nothing but slots
        self.ahead = min(max(pl.cdiv(self.stages - 1, self.chunks_of(0)), 2), SLOTS)
        # elements of each pair
        self.sizes = [
            sum(min(n - k * chunk, chunk) for k in range(c, self.chunks, pairs))
            for c in range(pairs)
        ]

    def chunks_of(self, pair):
        return (self.chunks - pair + (self.pairs - 1)) // self.pairs

    def rotating(self, held):
        """Parts what registers hold for each chunk: for the first ones, with which a loop unrolls
        `unroll` chunks and moves on what the registers hold, and for the others."""
        of_all = self.whole // self.pairs
        first = of_all // self.unroll * self.unroll if 0 < self.unroll < of_all else 0
        return held[:first], held[first:]

    def why_not(self):
        """What is wrong with the chunks, or None."""
        if self.chunk % self.grain:
            return f"the chunk must be a multiple of {self.grain} elements"
        if self.whole < self.pairs:
            return "a row must have a whole chunk for each consumer"
        if self.stages <= self.chunks_of(0):
            return f"a consumer has {self.stages} slots, no more than chunks of a row"
        return None


class KernelPlan(Plan):
    """The same for a kernel, and what else its blocks need to know."""

    def __init__(self, x, ring):
        """x: a Problem of norms.py; ring: chunk, pairs, programs, unroll, stream."""
        *ring, stream = ring
        numbers = *x.extents[:2], x.dtype.itemsize, *ring
        super().__init__(*numbers)
        self.x, self.kept, self.streamed = x, self.vectors_kept(x), []
        if stream:
            self.streamed = [i for i in self.lane_vectors(x) if i not in self.kept]
            sizes = [x.vectors[i].itemsize for i in self.streamed]
            super().__init__(*numbers, room=ROOM - _COPIES * self.pairs * self.chunk * sum(sizes))
        # groups that are stored together: each store is a sync, but results take registers
        self.at_once = self.chunk // self.grain
        if self.kept:
            few = self.tail or self.unroll or sum(v is not None for v in x.vectors) > 1
            self.at_once = 2 if few else 4

    def vectors_kept(self, x):
        """Numbers of the vectors, weight and bias, that the writers keep in registers."""
        elements = pl.cdiv(self.whole, self.pairs) * self.chunk // 128  # of a lane
        room, found = self.writer_registers - 32, []  # the rest is for the work itself
        for i in self.lane_vectors(x):
            words = elements * x.vectors[i].itemsize // 4
            if words <= room:
                found.append(i)
                room -= words
        return found

    @staticmethod
    def lane_vectors(x):
        """Numbers of the vectors of which a lane or TMA takes 16 bytes at a time."""
        return [i for i, v in enumerate(x.vectors) if v is not None and x.aligned[1 + i]]

    def scratch(self):
        chunk, pairs = (self.chunk // self.grain, self.grain), self.pairs
        streamed = {}
        if self.streamed:
            shape = pairs, _COPIES, *chunk
            streamed = {f"v{i}_smem": plgpu.SMEM(shape, self.x.vectors[i]) for i in self.streamed}
            arrived = {"num_arrivals": len(streamed), "num_barriers": (pairs, _COPIES)}
            streamed["arrived"] = plgpu.Barrier(**arrived)
        return streamed | {
            "x_smem": plgpu.SMEM((pairs, self.stages, *chunk), self.x.dtype),
            "stats_smem": plgpu.SMEM((2, pairs, 2), jnp.float32),
            **Ring.barriers((pairs, self.stages), 1, 1),
            **Ring.barriers(2, pairs, pairs, prefix="stats_"),
            **CountedTiles.scratch(self.consumers, self.ahead),
        }


class Segment:
    """A pair's chunks of a row, as the functions of norms.py want a tile."""

    shared, held = True, None

    def __init__(self, p, pair):
        self.n, self.sizes, self.shape = p.n, p.sizes, (1, p.grain)
        self.p, self.pair = p, pair
        # chunks of the pair, without the one that ends the row
        self.mine = (p.whole - pair + (p.pairs - 1)) // p.pairs
        self.has_tail = pair == p.whole % p.pairs
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

    def each(self, step, carry):
        """carry = step(j, number of the chunk in the row, its elements, carry)."""
        p = self.p

        def one(j, carry, size=p.chunk):
            return step(j, self.pair + j * p.pairs, size, carry)

        carry = lax.fori_loop(0, self.mine, one, carry)
        if not p.tail:
            return carry
        return lax.cond(self.has_tail, lambda c: one(self.mine, c, p.tail), lambda c: c, carry)

    def each_with(self, rotating, fixed, step):
        """step(j, number of the chunk in the row, its elements, what registers hold for it), j from
        0. rotating, fixed: see Plan.rotating. Returns rotating, for the next row."""
        p = self.p

        def one(j, have, size=p.chunk):
            step(j, self.pair + j * p.pairs, size, have)

        def some(i, rotating):
            for j in range(p.unroll):
                one(i * p.unroll + j, rotating[j])
            return rotating[p.unroll :] + rotating[: p.unroll]

        of_all, first = p.whole // p.pairs, len(rotating)
        if rotating:
            rotating = lax.fori_loop(0, first // p.unroll, some, rotating)
        for j in range(first, of_all):
            one(j, fixed[j - first])
        if p.whole % p.pairs:
            pl.when(self.mine > of_all)(lambda: one(of_all, fixed[of_all - first]))
        if p.tail:
            pl.when(self.has_tail)(lambda: one(self.mine, None, p.tail))
        return rotating


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.stats_ring = Ring(2, self.stats_full, self.stats_empty)
        counted = self.tile_numbers, self.tile_full, self.tile_empty, None
        cluster = lax.axis_index("cluster")
        self.tiles = CountedTiles(plan.rows, plan.clusters, cluster, counted)

    def ring(self, pair):
        return Ring(self.plan.stages, self.full.at[pair], self.empty.at[pair])

    def place(self, row, k, size):
        """Chunk k of a row, of which size elements are there; known to lie inside."""
        p = self.plan
        row = jnp.clip(row, 0, p.rows - 1)
        return pl.ds(row, 1), pl.ds(jnp.minimum(k * p.chunk, p.n - size), size)

    def before(self, w, pair):
        """Chunks of a pair before the block's row w; known to be no less than 0."""
        return jnp.clip(w, 0, self.plan.rows) * self.plan.chunks_of(pair)

    def slot_of(self, pair, it, size):
        """The slot of a pair's chunk number `it` as part of a row."""
        whole = self.x_smem.at[pair, it % self.plan.stages].reshape((1, self.plan.chunk))
        return whole.at[:, pl.ds(0, size)]

    # ---- producer

    def producer(self):
        p = self.plan
        if p.kept:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        rows = self.tiles.produce(self.fetch_row, jnp.int32(0), asks=True)
        for pair in range(p.pairs):  # every release is waited for
            done = self.before(rows, pair)

            def drain(s, _, pair=pair, done=done):
                @pl.when(done > s)
                def _():
                    phase = (done - s - 1) // p.stages
                    plgpu.barrier_wait(self.empty.at[pair, s], phase=phase)

            lax.fori_loop(0, p.stages, drain, None)

    def fetch_row(self, row, w, ask):
        """w: rows of this block before."""
        p, last = self.plan, self.plan.chunks - 1
        lax.fori_loop(0, last, lambda k, _: self.fetch_chunk(row, w, k, p.chunk), None)
        taken = ask()  # the answer comes while this waits for a slot
        self.fetch_chunk(row, w, last, p.tail or p.chunk)
        return w + 1, taken

    def fetch_chunk(self, row, w, k, size):
        pair = k % self.plan.pairs
        it = self.before(w, pair) + k // self.plan.pairs
        ring = self.ring(pair)
        slot = ring.slot(it)
        ring.acquire(it)
        plgpu.copy_gmem_to_smem(
            self.x.at[self.place(row, k, size)],
            self.slot_of(pair, it, size),
            ring.full.at[slot],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    # ---- consumers

    def consumer(self, me):
        pair = me % self.plan.pairs
        pl.when(me < self.plan.pairs)(lambda: self.gatherer(pair))
        pl.when(me >= self.plan.pairs)(lambda: self.writer(pair))

    def gatherer(self, pair):
        p = self.plan
        if p.kept:
            plgpu.set_max_registers(p.gatherer_registers, action="decrease")
        gather = functools.partial(self.gather_row, pair)
        self.stats_ring.drain(self.tiles.consume(gather, jnp.int32(0)))

    def gather_row(self, pair, row, w):
        """w: rows of this block before."""
        op, segment, it0 = self.plan.x.op(), Segment(self.plan, pair), self.before(w, pair)
        ring = self.ring(pair)

        def gather(j, k, size, stats):
            it = it0 + j
            ring.wait(it)
            ref, parts = self.x_smem.at[pair, ring.slot(it)], []
            for g in self.groups(size):
                valid = self.inside(g, size)
                parts.append((self.read(ref, g, valid, op.fill), valid))
            return op.gather(stats, parts, j == 0)

        mine = op.gathered(segment, segment.each(gather, op.none(segment)))
        self.stats_ring.acquire(w)
        for i, value in enumerate(mine):
            self.stats_smem[self.stats_ring.slot(w), pair, i] = value.reshape(())
        self.stats_ring.fill(w)
        return w + 1

    def writer(self, pair):
        p, held = self.plan, []
        if p.kept:
            plgpu.set_max_registers(p.writer_registers, action="increase")
            held = [self.keep(pair, j) for j in range(pl.cdiv(p.whole, p.pairs))]
        rotating, fixed = p.rotating(held)
        write = functools.partial(self.write_row, pair, fixed)
        self.copy_vectors(jnp.int32(0), pair, pair)
        rows, _ = self.tiles.consume(write, (jnp.int32(0), rotating))
        self.await_vectors(jnp.clip(rows, 0, p.rows) * Segment(p, pair).mine, pair)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.ring(pair).release(self.before(rows, pair) - 1)

    def write_row(self, pair, fixed, row, carry):
        """carry: rows of this block before, and what Plan.rotating says."""
        p, op, (w, rotating) = self.plan, self.plan.x.op(), carry
        segment, it0 = Segment(p, pair), self.before(w, pair)
        self.stats_ring.wait(w)
        box = self.stats_smem.at[self.stats_ring.slot(w)]
        of_all = [[box[c, i] for i in range(op.numbers)] for c in range(p.pairs)]
        self.stats_ring.release(w)
        op.joined(segment, of_all)
        ring = self.ring(pair)

        def write(j, k, size, have):
            it = it0 + j
            ref, results, stored = self.x_smem.at[pair, ring.slot(it)], [], 0
            parts, streamed = self.groups(size), {}
            if size == p.chunk and p.streamed:
                turn = jnp.clip(w, 0, p.rows) * segment.mine + j
                more = j + 1 < segment.mine
                self.copy_vectors(turn + 1, jnp.where(more, k + p.pairs, pair), pair)
                streamed = self.await_vectors(turn, pair)
            for g in parts:
                valid = self.inside(g, size)
                value = op.result(segment, self.read(ref, g, valid, op.fill))
                start = k * p.chunk + g * p.grain
                held = have[g] if have else {}
                here = {i: ref[pl.ds(g, 1)].reshape((p.grain,)) for i, ref in streamed.items()}
                value = self.weighted(value, valid, start, held, here)
                results.append(value.astype(p.x.dtype))
                if len(results) == p.at_once or g == parts[-1]:  # one store: one sync
                    ref[stored : g + 1] = jnp.concatenate(results)
                    stored, results = g + 1, []
            plgpu.commit_smem()
            written = self.slot_of(pair, it, size)
            plgpu.copy_smem_to_gmem(written, self.o.at[self.place(row, k, size)])

            @pl.when(it > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                ring.release(it - 1)

        if p.kept:
            rotating = segment.each_with(rotating, fixed, write)
        else:
            segment.each(lambda j, k, size, _: write(j, k, size, None), None)
        return w + 1, rotating

    # ---- parts of a chunk: groups, of 16 bytes for every lane

    def groups(self, size):
        return range(pl.cdiv(size, self.plan.grain))

    def inside(self, g, size):
        """Which elements of the group exist; None: all."""
        grain = self.plan.grain
        if (g + 1) * grain <= size:
            return None
        return lax.broadcasted_iota(jnp.int32, (1, grain), 1) < size - g * grain

    def read(self, ref, g, valid, fill):
        at = pl.ds(g, 1), slice(None)
        part = ref[at] if valid is None else pl.load(ref, at, mask=valid, other=fill)
        return part.astype(jnp.float32)

    def load(self, i, start, valid=None):
        """A group of weight or bias."""
        if not self.plan.x.aligned[1 + i]:
            start = unaligned(start)
        at = pl.ds(start, self.plan.grain)
        if valid is None:
            return self.vectors[i][at]
        return pl.load(self.vectors[i], at, mask=valid.reshape((self.plan.grain,)), other=0.0)

    def keep(self, pair, j):
        """What registers keep for the pair's chunk j: of each group, by vector."""
        p = self.plan
        k = jnp.minimum(pair + j * p.pairs, p.whole - 1)
        return [
            {i: self.load(i, k * p.chunk + g * p.grain) for i in p.kept}
            for g in self.groups(p.chunk)
        ]

    def copy_vectors(self, turn, k, pair):
        """Copies chunk k of the vectors that do not stay in registers, in the pair's turn."""
        p = self.plan
        at = pl.ds(jnp.minimum(k * p.chunk, p.n - p.chunk), p.chunk)
        for i in p.streamed:
            here = getattr(self, f"v{i}_smem").at[pair, turn % _COPIES].reshape((p.chunk,))
            arrived = self.arrived.at[pair, turn % _COPIES]
            plgpu.copy_gmem_to_smem(self.vectors[i].at[at], here, arrived)

    def await_vectors(self, turn, pair):
        """The vectors of a pair's turn, by number."""
        p, slot = self.plan, turn % _COPIES
        if p.streamed:
            plgpu.barrier_wait(self.arrived.at[pair, slot], phase=turn // _COPIES)
        return {i: getattr(self, f"v{i}_smem").at[pair, slot] for i in p.streamed}

    def weighted(self, value, valid, start, held, streamed):
        for i, ref in enumerate(self.vectors):
            if ref is None:
                continue
            # after the barrier it is as it was loaded: float32 would take twice the registers
            v = lax.optimization_barrier(held[i]) if i in held else streamed.get(i)
            v = self.load(i, start, valid) if v is None else v
            v = lax.broadcast_in_dim(v.astype(jnp.float32), value.shape, [1])
            value = value * v if i == 0 else value + v
        return value


@cached
def kernel(x, ring, interpret):
    """x: a Problem of norms.py; ring: chunk, pairs, programs, unroll, stream."""
    plan = KernelPlan(x, ring)

    def body(source, *refs, **scratch):
        overlap_launches()
        ends = [ref.reshape((plan.rows, plan.n)) for ref in (source, refs[-1])]
        given = dict(x=ends[0], o=ends[1], vectors=x.given(refs))
        _Block(plan, given | scratch).run()

    out_type = plgpu.ShapeDtypeStruct(x.shape, x.dtype)
    approx = plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2)
    options = {"compiler_params": approx, "interpret": interpret}
    return warp_specialized(body, plan, out_type, kernel_name=x.name, **options)
