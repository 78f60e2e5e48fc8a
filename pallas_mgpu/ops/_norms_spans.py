"""Rows for norms.py that pass through SMEM as spans of a flat array, and so may begin anywhere.

A span, a row or a segment of one, or several short rows, has first and last bytes that may lie
inside a piece of 16 bytes that it shares with its neighbours. The bulk engine brings all pieces
that the span touches to SMEM. Results take the place of what was read. The pieces that lie in the
span as a whole leave by the bulk engine, and lanes store what is left at both ends.

The engine copies a number of bytes that is known when the kernel is compiled: near the end of the
array a span begins earlier than it has to, and elements behind the last whole piece of the array
are loaded by lanes. A tile of fewer rows, the last one, is stored by lanes.

Short rows are one tile (height, n), read at whatever start they have: 4 bytes of a lane beside
those of the next, so that no banks conflict. Long rows, or their segments, go by in parts from the
piece on in which they begin, 16 bytes for each lane; the first and the last part alone have a mask.
There a warpgroup has several rows, one after the other, and reads weight and bias once for all of
them, from SMEM. Where a row begins inside a piece, its results are made from 4 bytes for each lane
again, as weights lie otherwise than the row.

A row is divided among the warpgroups of a block and the blocks of a cluster, which send each other
the statistics of their segments by asynchronous stores: nobody waits but the receiver. No lane
reads what another lane has written but behind commit_smem, so there are no other barriers between
lanes."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches, unaligned
from ._open_rows import in_shapes

SHORT = 2048  # elements of a row, up to which a tile has several at once
_LANES = 128


class Span:
    """Where spans of `count` elements lie in a flat array, and in the buffer they are copied to."""

    def __init__(self, total, count, pitch, itemsize):
        """pitch: spans start at multiples of it."""
        self.total, self.count, self.piece = total, count, 16 // itemsize
        self.exact = pitch % self.piece == 0
        most = count if self.exact else count + self.piece - 1
        whole = _sizes.least(total) // self.piece  # pieces of the array
        self.room = min(pl.cdiv(most, self.piece), whole) * self.piece
        self.buffer = max(pl.cdiv(count, self.piece) * self.piece, self.room) + self.piece
        self.top = (total - self.room) // self.piece * self.piece  # where the last one starts
        # elements behind that, which the engine does not reach
        self.rest = total - self.top - self.room

    def base(self, start):
        """The first element of the buffer that has the span from `start` on."""
        found = start if self.exact else start // self.piece * self.piece
        return pl.multiple_of(jnp.clip(found, 0, self.top), self.piece)

    def inner(self, count):
        """Elements of whole pieces that lie in every span of so many elements."""
        return (count if self.exact else max(count - self.piece + 1, 0)) // self.piece * self.piece

    def load(self, source, base, buffer, full):
        """Starts the copy of a span to the buffer, by the engine."""
        here = pl.ds(base, self.room)
        plgpu.copy_gmem_to_smem(
            source.at[here],
            buffer.at[pl.ds(0, self.room)],
            full,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
        if isinstance(self.rest, plgpu.Dim) or self.rest:

            @pl.when(base == self.top)
            def _():
                keep, behind = jnp.arange(_LANES) < self.rest, self.top + self.room
                value = pl.load(source, pl.ds(behind, _LANES), mask=keep, other=0.0)
                pl.store(buffer, pl.ds(self.room, _LANES), value, mask=keep)
                plgpu.commit_smem()


class Plan:
    """Numbers that follow from the shape and the configuration."""

    def __init__(self, x, total, cfg):
        """x: a Problem of norms.py; total: elements of the array, perhaps a size of the call."""
        self.problem, self.total, self.cluster = x, total, cfg.cluster
        self.outer, self.n, _ = x.extents
        self.threads, self.segments = cfg.threads, cfg.cluster * cfg.threads  # of a row
        self.joint = self.n <= SHORT and self.segments == 1  # is a tile of several rows one span?
        # rows of a span, and spans of a block
        self.height, self.rows = (cfg.height, 1) if self.joint else (1, cfg.height)
        vectors = [v for v in x.vectors if v is not None]
        sizes = [x.dtype.itemsize, x.out_dtype.itemsize]
        self.width = self.n
        if self.segments > 1:
            pieces = 16 // min(*sizes, *(v.itemsize for v in vectors))
            self.width = pl.cdiv(pl.cdiv(self.n, self.segments), pieces) * pieces
        self.last = self.n - (self.segments - 1) * self.width  # elements of the last segment
        count, pitch = self.height * self.width, self.height * self.n
        self.x, self.o = (Span(total, count, pitch, size) for size in sizes)
        self.tiles = pl.cdiv(self.outer, self.height * self.rows)
        over = self.outer % (self.height * self.rows)
        self.full_tiles = not isinstance(over, plgpu.Dim) and over == 0
        self.divide(cfg, max(sizes))
        # weight and bias come through SMEM, by number, where there are several parts
        self.streamed = {}
        if self.parts > 1:
            aligned = [i for i, v in enumerate(x.vectors) if v is not None and x.aligned[1 + i]]
            pitch = self.width if self.segments > 1 else 0
            for i in aligned:
                size = x.vectors[i].itemsize
                if self.n * size >= 16:
                    self.streamed[i] = Span(self.n, self.width, pitch, size)

    def divide(self, cfg, size):
        """The parts of a row."""
        piece = 16 // size
        exact = self.x.exact and self.o.exact
        self.pieces = not self.joint and 0 < cfg.part < self.width
        vector = max(math.gcd(self.n, piece), 4 // size)
        of_row = row_lanes(self.n, vector) if self.joint else _LANES
        if self.height % (_LANES // of_row):
            of_row = _LANES
        # parts begin with the piece in which the row begins: elements before it
        self.before = piece - 1 if self.pieces and not exact else 0
        first = piece if self.pieces else vector
        self.layout = row_layout(of_row, first)
        weighted = self.before and any(v is not None for v in self.problem.vectors)
        self.write_layout = row_layout(of_row, 4 // size) if weighted else self.layout
        grain = of_row * first
        self.part = pl.cdiv(min(cfg.part or self.width, self.width), grain) * grain
        self.parts = pl.cdiv(self.width + self.before, self.part)
        # parts without a mask
        self.whole = range(1 if self.before else 0, self.last // self.part)
        if self.parts == 1:
            self.whole = range(0)
        # no mask at all
        self.even = not self.before and self.parts * self.part == self.width == self.last

    def why_not(self):
        """What is wrong, or None."""
        if not (self.x.room and self.o.room):
            return "the array has less than 16 bytes"
        if self.last <= 0:
            return "a segment of a row would be empty"
        if _sizes.most(self.total) > _sizes.MOST:
            return f"the array has more than {_sizes.MOST} elements"
        if self.smem_bytes() > SMEM_BYTES - 2048:
            return f"a tile takes {self.smem_bytes()} bytes of shared memory"
        return None

    def smem_bytes(self):
        spans = {self.x.piece: self.x, self.o.piece: self.o}.values()
        of_vectors = sum(16 * (s.buffer // s.piece + 1) for s in self.streamed.values())
        of_rows = self.rows * sum(16 * s.buffer // s.piece for s in spans)
        return self.threads * (of_vectors + of_rows)

    def scratch(self):
        x, found, of_all = self.problem, {}, (self.threads, self.rows)
        found["x_smem"] = plgpu.SMEM((*of_all, self.x.buffer), x.dtype)
        if x.dtype != x.out_dtype:
            found["o_smem"] = plgpu.SMEM((*of_all, self.o.buffer), x.out_dtype)
        for i, span in self.streamed.items():  # with a piece in front
            shape = self.threads, span.piece + span.buffer
            found[f"v{i}_smem"] = plgpu.SMEM(shape, x.vectors[i])
        if self.streamed:
            of_vectors = {"num_arrivals": len(self.streamed), "num_barriers": self.threads}
            found["vectors_full"] = plgpu.Barrier(**of_vectors)
        if self.segments > 1:
            found["stats"] = plgpu.SMEM((self.rows, self.segments, 2), jnp.float32)
            found["arrived"] = plgpu.Barrier(num_arrivals=self.segments, num_barriers=self.rows)
        return found | {"full": plgpu.Barrier(num_barriers=of_all)}


def fewest(n, cfg, itemsize):
    """So many rows have fewer bytes than the engine copies at a time, if their number is open."""
    height = cfg.height if n <= SHORT else 1
    return height - 1 + pl.cdiv(16 // itemsize - 1, n)


def row_lanes(n, vector):
    """Lanes of a warp that share a short row."""
    return min(32, pl.next_power_of_2(pl.cdiv(n, vector)))


def row_layout(lanes, vector):
    """Rows of which so many lanes have a vector at a time: those of a warp or fewer, or all."""
    rows, width = 32 // lanes, lanes * vector
    if lanes > 32:
        tiles, warps, of_warp = ((width,), (width // 4,), (vector,)), -3, (-2,)
    elif rows == 1:
        tiles, warps, of_warp = ((4, width), (vector,)), -3, (-2,)
    elif lanes == 1:
        tiles, warps, of_warp = ((128, width), (32, width)), -4, (-2,)
    else:
        tiles, warps, of_warp = ((4 * rows, width), (rows, width), (vector,)), -5, (-3, -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (warps,), of_warp, -1)


def pair(numbers):
    """One or two scalars as an array of two."""
    numbers = [value.reshape(()) for value in numbers]
    return jnp.where(jnp.arange(2) == 0, numbers[0], numbers[-1])


def send(numbers, here, arrived, **to):
    """The statistics of a segment, to a block of the cluster."""
    plgpu.async_store_smem(pair(numbers), here, arrived, **to)


class Rows:
    """A span of a block: rows, or a segment of one, as the functions of norms.py want a tile."""

    def __init__(self, block, j):
        """j: the number of the span."""
        p = self.p = block.plan
        self.block, self.j, self.op = block, j, p.problem.op()
        self.n, self.shared, self.shape = p.n, p.segments > 1, (p.height, p.part)
        self.sizes = [p.width] * (p.segments - 1) + [p.last]
        self.share = 1 / p.n
        if self.shared:
            self.share = jnp.where(block.segment < p.segments - 1, 1 / p.width, 1 / p.last)
        self.first = block.first + j  # row
        known = jnp.minimum(self.first, p.outer - 1) if p.rows > 1 else self.first
        self.start = known * p.n + block.offset
        self.base, self.o_base = p.x.base(self.start), p.o.base(self.start)
        self.full = block.full.at[block.thread, j]
        self.x_smem, self.o_smem = (b.at[block.thread, j] for b in (block.x_smem, block.o_smem))
        self.lead = 0  # elements between the beginning of part 0 and the row
        if p.before:
            shift = self.start - self.base
            self.lead = shift % (p.before + 1)

    def load(self):
        self.p.x.load(self.block.x, self.base, self.x_smem, self.full)

    def make_statistics(self):
        p, block = self.p, self.block
        plgpu.barrier_wait(self.full)
        self.held = self.read(0) if p.parts == 1 else None
        mine = self.op.local(self)
        if not self.shared:
            self.op.alone(self, *mine)
            return
        here, arrived = block.stats.at[self.j, block.segment], block.arrived.at[self.j]
        for k in range(p.cluster) if p.cluster > 1 else ():
            send(mine, here, arrived, cluster_idx=k, cluster_dim="c")
        if p.cluster == 1:
            here[...] = pair(mine)
            plgpu.commit_smem()
            plgpu.barrier_arrive(arrived)

    def join(self):
        p, block = self.p, self.block
        if self.shared:
            plgpu.barrier_wait(block.arrived.at[self.j])
            found, numbers = block.stats.at[self.j], range(self.op.numbers)
            self.op.joined(self, [[found[k, i] for i in numbers] for k in range(p.segments)])

    def each(self, f, start):
        """f(acc, part, which elements are there or None) over the parts."""
        acc = jnp.full(self.shape, start, jnp.float32)
        if self.held is not None:
            return f(acc, self.held, self.inside(0))

        def step(k, acc, masked=False):
            return f(acc, self.read(k, masked), self.inside(k) if masked else None)

        return self.block.loop(step, acc)

    def most(self, x):
        return self.fixed(x).max(axis=1, keepdims=True)

    def total(self, x):
        return self.fixed(x).sum(axis=1, keepdims=True)

    def fixed(self, x):
        return plgpu.layout_cast(x, self.p.layout)

    # ---- parts

    def inside(self, k, layout=None):
        """Which elements of part k are there; None: all."""
        p, found = self.p, None
        if not p.even:
            at = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=layout or p.layout)
            found = at < self.block.mine + self.lead - k * p.part
            if p.before and isinstance(k, int) and k == 0:
                found &= at >= self.lead
        return self.rows_inside(found)

    def rows_inside(self, keep=None):
        p = self.p
        if p.full_tiles or not p.joint:
            return keep
        there = lax.broadcasted_iota(jnp.int32, self.shape, 0) < p.outer - self.first
        return there if keep is None else keep & there

    def view(self, ref, base, k):
        """Part k in a buffer: a ref and an index of it."""
        p = self.p
        start = self.start - base
        if p.joint and p.height > 1:
            rows = ref.at[pl.ds(start, p.height * p.n)].reshape((p.height, p.n))
            return rows, (slice(None), pl.ds(k * p.part, p.part))
        start -= self.lead
        if p.pieces:
            start = pl.multiple_of(
                start, 16 // max(p.problem.dtype.itemsize, p.problem.out_dtype.itemsize)
            )
        return ref.reshape((1, ref.size)), (slice(None), pl.ds(start + k * p.part, p.part))

    def read(self, k, masked=True, layout=None):
        """Part k, float32."""
        keep = self.inside(k, layout) if masked else self.rows_inside()
        ref, at = self.view(self.x_smem, self.base, k)
        if keep is None:
            value = ref[at]
        else:
            value = pl.load(ref, at, mask=keep, other=self.op.fill)
        return plgpu.layout_cast(value, layout or self.p.layout).astype(jnp.float32)

    def write(self, k, vectors, masked):
        """The result of part k. vectors: parts of weight and bias."""
        p = self.p
        held = self.held is not None
        value = self.held if held else self.read(k, masked, p.write_layout)
        value = self.op.result(self, value)
        for i, v in vectors.items():
            v = lax.broadcast_in_dim(v.astype(jnp.float32), self.shape, [1])
            value = value * v if i == 0 else value + v
        value = value.astype(p.problem.out_dtype)
        keep = self.inside(k, p.write_layout) if masked else self.rows_inside()
        ref, at = self.view(self.o_smem, self.o_base, k)
        if keep is None:
            ref[at] = value
        else:
            pl.store(ref, at, value, mask=keep)

    # ---- results

    def store(self):
        p = self.p
        if p.last != p.width:
            segment, last = self.block.segment, p.segments - 1
            pl.when(segment < last)(lambda: self.store_whole(p.width))
            pl.when(segment == last)(lambda: self.store_whole(p.last))
        elif p.full_tiles or not p.joint:
            self.store_whole(p.o.count)
        elif _sizes.most(p.outer) < p.height:
            self.store_rest()
        else:
            full = self.first <= p.outer - p.height
            pl.when(full)(lambda: self.store_whole(p.o.count))
            pl.when(jnp.logical_not(full))(self.store_rest)

    def store_whole(self, count):
        """A span of so many elements, a static number."""
        span, block, begin = self.p.o, self.block, self.start
        inner = span.inner(count)
        if not span.exact:
            begin = (self.start + (span.piece - 1)) // span.piece * span.piece
        if inner:
            begin = jnp.clip(begin, 0, span.total - inner)  # known to lie inside
            begin = pl.multiple_of(begin, span.piece)
            here = jnp.clip(begin - self.o_base, 0, span.buffer - inner)
            source = self.o_smem.at[pl.ds(pl.multiple_of(here, span.piece), inner)]
            plgpu.copy_smem_to_gmem(source, block.o.at[pl.ds(begin, inner)])
        if inner < count:
            if not span.exact:
                self.store_elements(self.start, begin - self.start)
            end = begin + inner
            self.store_elements(end, self.start + count - end)

    def store_elements(self, start, count):
        """So many elements, at most as many as lanes."""
        keep = jnp.arange(_LANES) < count
        at = pl.ds(start - self.o_base, _LANES)
        pl.store(
            self.block.o, pl.ds(start, _LANES), pl.load(self.o_smem, at, mask=keep, other=0.0),
            mask=keep,
        )  # fmt: skip

    def store_rest(self):
        """The last rows, fewer than of other tiles."""
        p, count = self.p, (self.p.outer - self.first) * self.p.n

        def some(i, _):
            self.store_elements(self.start + i * _LANES, count - i * _LANES)

        lax.fori_loop(0, pl.cdiv(p.height * p.n, _LANES), some, None)


class Block:
    """One block of the kernel, while it is traced. x, o: flat."""

    def __init__(self, plan, refs):
        self.plan = p = plan
        vars(self).update(refs)
        self.thread = lax.axis_index("wg") if p.threads > 1 else 0
        rank = lax.axis_index("c") if p.cluster > 1 else 0
        self.segment = rank * p.threads + self.thread  # of a row
        self.first = lax.axis_index("tile") * (p.height * p.rows)  # row
        self.offset = self.segment * p.width
        self.mine = p.n  # elements of the segment
        if p.segments > 1:
            self.mine = jnp.where(self.segment < p.segments - 1, p.width, p.last)

    def run(self):
        p = self.plan
        rows = [Rows(self, j) for j in range(p.rows)]
        for row in rows:
            row.load()
        bases = {i: span.base(self.offset) for i, span in p.streamed.items()}
        for i, span in p.streamed.items():
            buffer = self.buffer_of(i).at[pl.ds(span.piece, span.buffer)]
            span.load(self.vectors[i], bases[i], buffer, self.vectors_full.at[self.thread])
        # while the row comes
        early = self.vectors_of(0, rows[0], True, {}) if p.parts == 1 else None
        for row in rows:
            row.make_statistics()
        if p.streamed:
            plgpu.barrier_wait(self.vectors_full.at[self.thread])
        for row in rows:
            row.join()

        def write(k, _, masked=False):
            vectors = early
            if early is None:
                vectors = self.vectors_of(k, rows[0], masked, bases)
            for j, row in enumerate(rows):
                if p.before and j:
                    vectors = self.vectors_of(k, row, masked, bases)
                row.write(k, vectors, masked)

        if early is not None:  # they stay as they were loaded
            early = {i: lax.optimization_barrier(v) for i, v in early.items()}
        self.loop(write, None)
        plgpu.commit_smem()
        for row in rows:
            if p.full_tiles or p.rows == 1:
                row.store()
            else:
                pl.when(row.first < p.outer)(row.store)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def loop(self, step, carry):
        """carry = step(k, carry, is part k masked) over the parts of a row."""
        p = self.plan
        for k in range(p.whole.start):
            carry = step(k, carry, True)
        if p.whole:
            carry = lax.fori_loop(p.whole.start, p.whole.stop, step, carry)
        for k in range(max(p.whole.start, p.whole.stop), p.parts):
            carry = step(k, carry, True)
        return carry

    def buffer_of(self, i):
        return getattr(self, f"v{i}_smem").at[self.thread]

    def vectors_of(self, k, row, masked, bases):
        """Parts of weight and bias, by number. bases: of those in SMEM."""
        p, found = self.plan, {}
        size = p.part
        for i, ref in enumerate(self.vectors):
            if ref is None:
                continue
            start = self.offset + k * size - row.lead
            if i in bases:
                span = p.streamed[i]
                ref, start = self.buffer_of(i), start - bases[i] + span.piece
                if not p.before:
                    start = pl.multiple_of(start, span.piece)
            elif not p.problem.aligned[1 + i] or p.before:
                start = unaligned(start)
            found[i] = self.part_of(ref, start, k, row, masked)
        return found

    def part_of(self, ref, start, k, row, masked):
        p, at = self.plan, pl.ds(start, self.plan.part)
        if not masked or p.even:
            return ref[at]
        index = jnp.arange(p.part)
        if p.height == p.part:  # not the index of rows, whose layout is another one
            index = plgpu.broadcasted_iota(jnp.int32, (p.part,), 0, layout=p.layout.reduce(0))
        keep = index < self.mine + row.lead - k * p.part
        if p.before and k == 0:
            keep &= index >= row.lead
        return pl.load(ref, at, mask=keep, other=0.0)


@cached
def kernel(x, total, cfg, interpret):
    """x, total, cfg: of Plan. If `total` is a size of the call, the arrays have one dimension."""
    p, is_open = Plan(x, total, cfg), _sizes.is_open((total,))
    shape = (total,) if is_open else x.shape

    def body(source, *refs, **scratch):
        overlap_launches()
        ends = source, refs[-1]
        if not is_open:
            ends = [ref.reshape((total,)) for ref in ends]
        given = dict(x=ends[0], o=ends[1], vectors=x.given(refs), o_smem=scratch["x_smem"])
        Block(p, given | scratch).run()

    params = plgpu.CompilerParams(
        approx_math=x.out_dtype.itemsize == 2, unsafe_no_auto_barriers=True
    )
    clusters = dict(cluster=(p.cluster,), cluster_names=("c",)) if p.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, x.out_dtype),
        scratch_types=p.scratch(),
        grid=(p.tiles,),
        grid_names=("tile",),
        **clusters,
        **(dict(num_threads=p.threads, thread_name="wg") if p.threads > 1 else {}),
        compiler_params=params,
        interpret=interpret,
        kernel_name=x.name,
        **in_shapes(shape, *(None for v in x.vectors if v is not None)),
    )
