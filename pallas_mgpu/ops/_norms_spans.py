"""Rows for norms.py that do not begin at multiples of 16 bytes, or that warps do not share evenly.

The array is seen as one dimension. A tile, of rows or of a segment of one, is a span of it, whose
first and last bytes may lie inside a piece of 16 bytes that it shares with its neighbours. The bulk
engine brings all pieces that the span touches to SMEM, where the lanes read the rows at whatever
start they have, 4 bytes of a lane beside those of the next, so that no banks conflict. Results take
the place of what was read. The pieces that lie in the span as a whole leave by the bulk engine,
and lanes store what is left at both ends.

The engine copies a number of bytes that is known when the kernel is compiled: near the end of the
array a span begins earlier than it has to, and elements behind the last whole piece of the array
are loaded by lanes. A tile of fewer rows, the last one, is stored by lanes. Of an array that begins
elsewhere than at a multiple of 16 bytes lanes copy all, many elements at a time.

Statistics are made part by part, the last of which alone has a mask."""

import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches, unaligned
from ._open_rows import in_shapes

_LANES = 128
_COPIED = 2048  # elements that lanes copy at a time


class Span:
    """Where spans of `count` elements lie in a flat array, and in the buffer they are copied to."""

    def __init__(self, total, count, pitch, itemsize, engine=True):
        """pitch: spans start at multiples of it; engine: does the bulk engine copy them?"""
        self.total, self.count = total, count
        self.piece = 16 // itemsize
        self.engine, self.exact = engine, pitch % self.piece == 0 or not engine
        most = count if self.exact else count + self.piece - 1
        whole = _sizes.least(total) // self.piece  # pieces of the array
        self.room = min(pl.cdiv(most, self.piece), whole) * self.piece
        self.buffer = max(self.room, count) + self.piece  # elements
        self.top = (total - self.room) // self.piece * self.piece  # where the last one starts
        # elements behind that, which the engine does not reach
        self.rest = total - self.top - self.room if engine else 0

    def base(self, start):
        """The first element of the buffer that has the span from `start` on."""
        if not self.engine:
            return start
        found = start if self.exact else start // self.piece * self.piece
        return pl.multiple_of(jnp.clip(found, 0, self.top), self.piece)

    def inner(self, count):
        """Elements of whole pieces that lie in every span of so many elements."""
        return (count if self.exact else max(count - self.piece + 1, 0)) // self.piece * self.piece


class Plan:
    """Numbers that follow from the shape and the configuration."""

    def __init__(self, x, total, cfg):
        """x: a Problem of norms.py; total: elements of the array, perhaps a size of the call."""
        self.outer, self.n, _ = x.extents
        self.total, self.height, self.cluster = total, cfg.height, cfg.cluster
        size = max(x.dtype.itemsize, x.out_dtype.itemsize)
        pieces = 16 // min(x.dtype.itemsize, x.out_dtype.itemsize)
        self.width = self.n
        if self.cluster > 1:
            self.width = pl.cdiv(pl.cdiv(self.n, self.cluster), pieces) * pieces
        self.last = self.n - (self.cluster - 1) * self.width  # elements of the last segment
        count = self.height * self.width
        pitch = self.height * self.n  # what every start is a multiple of
        self.x = Span(total, count, pitch, x.dtype.itemsize, cfg.staged)
        self.o = Span(total, count, pitch, x.out_dtype.itemsize, cfg.staged)
        over = self.outer % self.height
        self.full_tiles = not isinstance(over, plgpu.Dim) and over == 0
        self.tiles = pl.cdiv(self.outer, self.height)
        # a warp has a row, or several short ones, or the warps share it
        self.vector = v = max(math.gcd(self.n, 16 // size), 4 // size)
        of_row = row_lanes(self.n, v)
        if self.height % (_LANES // of_row):
            of_row = _LANES
        grain = of_row * v
        part = pl.cdiv(cfg.part or self.width, grain) * grain
        self.part, self.parts = part, pl.cdiv(self.width, part)
        # parts without a mask; of a row in registers there is one part
        self.whole = min(self.last // part, self.parts)
        if self.parts == 1:
            self.whole = 0
        self.even = self.parts * part == self.width == self.last  # no mask at all
        self.layout = row_layout(of_row, v)

    def why_not(self):
        """What is wrong, or None."""
        if self.x.engine and not (self.x.room and self.o.room):
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
        return sum(16 * s.buffer // s.piece for s in spans)

    def scratch(self, x):
        found = {"x_smem": plgpu.SMEM((self.x.buffer,), x.dtype)}
        if x.dtype != x.out_dtype:
            found["o_smem"] = plgpu.SMEM((self.o.buffer,), x.out_dtype)
        if self.cluster > 1:
            found["stats"] = plgpu.SMEM((self.cluster, 2), jnp.float32)
            found["arrived"] = plgpu.Barrier(num_arrivals=self.cluster)
        return found | ({"full": plgpu.Barrier()} if self.x.engine else {})


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


class Tile:
    """A block's part of a row, or its rows, as the functions of norms.py want it."""

    def __init__(self, block):
        p = self.p = block.plan
        self.n, self.shared, self.block = p.n, p.cluster > 1, block
        self.shape = (p.height, p.part)
        self.sizes = [p.width] * (p.cluster - 1) + [p.last]
        self.share = 1 / p.n
        if self.shared:
            self.share = jnp.where(block.rank < p.cluster - 1, 1 / p.width, 1 / p.last)
        self.held = block.read(0, True) if p.parts == 1 else None

    def each(self, f, start):
        """f(acc, part, which elements are there or None) over the parts."""
        p, block = self.p, self.block
        acc = jnp.full(self.shape, start, jnp.float32)
        if self.held is not None:
            return f(acc, self.held, block.inside(0))

        def step(k, acc, masked=False):
            return f(acc, block.read(k, masked), block.inside(k) if masked else None)

        return self.loop(step, acc)

    def loop(self, step, carry):
        """carry = step(k, carry, is part k masked)."""
        p = self.p
        if p.whole:
            carry = lax.fori_loop(0, p.whole, step, carry)
        for k in range(p.whole, p.parts):
            carry = step(k, carry, True)
        return carry

    def most(self, x):
        return self.fixed(x).max(axis=1, keepdims=True)

    def total(self, x):
        return self.fixed(x).sum(axis=1, keepdims=True)

    def fixed(self, x):
        return plgpu.layout_cast(x, self.p.layout)


class Block:
    """One block of the kernel, while it is traced. x, o: flat."""

    def __init__(self, x, plan, refs):
        self.problem, self.plan, self.op = x, plan, x.op()
        vars(self).update(refs)
        p = plan
        self.rank = lax.axis_index("c") if p.cluster > 1 else 0
        self.first = lax.axis_index("tile") * p.height  # row
        self.offset = self.rank * p.width  # of the segment
        # elements of the segment
        self.mine = p.n
        if p.cluster > 1:
            self.mine = jnp.where(self.rank < p.cluster - 1, p.width, p.last)
        self.start = self.first * p.n + self.offset
        self.base, self.o_base = p.x.base(self.start), p.o.base(self.start)

    def run(self):
        p = self.plan
        self.load()
        tile = Tile(self)
        mine = self.op.local(tile)
        if p.cluster > 1:
            self.op.joined(tile, self.exchange(mine))
        else:
            self.op.alone(tile, *mine)
        tile.loop(lambda k, _, masked=False: self.write(tile, k, masked), None)
        plgpu.commit_smem()
        self.store()

    def load(self):
        span = self.plan.x
        if not span.engine:
            self.copy_elements(self.x, self.start, self.x_smem, 0)
            plgpu.commit_smem()
            return
        buffer = self.x_smem.at[pl.ds(0, span.room)]
        plgpu.copy_gmem_to_smem(self.x.at[pl.ds(self.base, span.room)], buffer, self.full)
        if isinstance(span.rest, plgpu.Dim) or span.rest:

            @pl.when(self.base == span.top)
            def _():
                keep = jnp.arange(_LANES) < span.rest
                value = pl.load(self.x, pl.ds(span.top + span.room, _LANES), mask=keep, other=0.0)
                pl.store(self.x_smem, pl.ds(span.room, _LANES), value, mask=keep)
                plgpu.commit_smem()

        plgpu.barrier_wait(self.full)

    def exchange(self, mine):
        """The statistics of all segments of the row."""
        mine = [value.reshape(()) for value in mine]
        numbers = jnp.where(jnp.arange(2) == 0, mine[0], mine[-1])
        box = self.stats.at[self.rank]
        for j in range(self.plan.cluster):
            plgpu.async_store_smem(numbers, box, self.arrived, cluster_idx=j, cluster_dim="c")
        plgpu.barrier_wait(self.arrived)
        return [[self.stats[j, i] for i in range(len(mine))] for j in range(self.plan.cluster)]

    def view(self, ref, base, k):
        """Part k of the tile in a buffer: a ref and an index of it."""
        p = self.plan
        start = self.start - base
        if p.x.exact and p.o.exact:
            start = pl.multiple_of(start, p.x.piece)
        at = k * p.part
        if p.height == 1:
            rows, at = ref.reshape((1, ref.size)), start + at
        else:
            rows = ref.at[pl.ds(start, p.height * p.n)].reshape((p.height, p.n))
        return rows, (slice(None), pl.ds(at, p.part))

    def inside(self, k):
        """Which elements of part k are there; None: all."""
        p, found = self.plan, None
        if not p.even:
            at = lax.broadcasted_iota(jnp.int32, (p.height, p.part), 1)
            found = at < self.mine - k * p.part
        return self.rows_inside(found)

    def rows_inside(self, keep=None):
        p = self.plan
        if p.full_tiles:
            return keep
        there = lax.broadcasted_iota(jnp.int32, (p.height, p.part), 0) < p.outer - self.first
        return there if keep is None else keep & there

    def read(self, k, masked):
        """Part k of the tile, float32."""
        p, keep = self.plan, self.inside(k) if masked else self.rows_inside()
        ref, at = self.view(self.x_smem, self.base, k)
        if keep is None:
            value = ref[at]
        else:
            value = pl.load(ref, at, mask=keep, other=self.op.fill)
        return plgpu.layout_cast(value, p.layout).astype(jnp.float32)

    def write(self, tile, k, masked):
        """The result of part k."""
        p, x, keep = self.plan, self.problem, self.inside(k) if masked else self.rows_inside()
        value = tile.held if tile.held is not None else self.read(k, masked)
        value = self.weighted(self.op.result(tile, value), k, masked).astype(x.out_dtype)
        ref, at = self.view(self.o_smem, self.o_base, k)
        if keep is None:
            ref[at] = value
        else:
            pl.store(ref, at, value, mask=keep)

    def weighted(self, value, k, masked):
        p = self.plan
        for i, (ref, aligned) in enumerate(zip(self.vectors, self.problem.aligned[1:])):
            if ref is None:
                continue
            start = self.offset + k * p.part
            at = pl.ds(start if aligned else unaligned(start), p.part)
            if masked and not p.even:
                index = jnp.arange(p.part)
                if p.height == p.part:  # not the index of rows, whose layout is another one
                    layout = p.layout.reduce(0)
                    index = plgpu.broadcasted_iota(jnp.int32, (p.part,), 0, layout=layout)
                w = pl.load(ref, at, mask=index < self.mine - k * p.part, other=0.0)
            else:
                w = ref[at]
            w = lax.broadcast_in_dim(w.astype(jnp.float32), (p.height, p.part), [1])
            value = value * w if i == 0 else value + w
        return value

    # ---- results

    def store(self):
        p = self.plan
        if not p.o.engine:
            self.copy_elements(self.o_smem, 0, self.o, self.start)
            return
        if p.cluster > 1 and p.last != p.width:
            pl.when(self.rank < p.cluster - 1)(lambda: self.store_whole(p.width))
            pl.when(self.rank == p.cluster - 1)(lambda: self.store_whole(p.last))
        elif p.full_tiles:
            self.store_whole(p.o.count)
        else:
            shift, full = self.start - self.o_base, self.first <= p.outer - p.height
            rest = functools.partial(self.copy_elements, self.o_smem, shift, self.o, self.start)
            if _sizes.most(p.outer) < p.height:
                rest()
            else:
                pl.when(full)(lambda: self.store_whole(p.o.count))
                pl.when(jnp.logical_not(full))(rest)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store_whole(self, count):
        """A span of so many elements, a static number."""
        span = self.plan.o
        inner = span.inner(count)
        begin = self.start
        if not span.exact:
            begin = (self.start + (span.piece - 1)) // span.piece * span.piece
        if inner:
            begin = jnp.clip(begin, 0, span.total - inner)  # known to lie inside
            begin = pl.multiple_of(begin, span.piece)
            here = jnp.clip(begin - self.o_base, 0, span.buffer - inner)
            source = self.o_smem.at[pl.ds(pl.multiple_of(here, span.piece), inner)]
            plgpu.copy_smem_to_gmem(source, self.o.at[pl.ds(begin, inner)])
        if inner < count:
            if not span.exact:
                self.store_elements(self.start, begin - self.start)
            end = begin + inner
            self.store_elements(end, self.start + count - end)

    def store_elements(self, start, count):
        """So many elements, at most as many as lanes."""
        keep = jnp.arange(_LANES) < count
        value = pl.load(self.o_smem, pl.ds(start - self.o_base, _LANES), mask=keep, other=0.0)
        pl.store(self.o, pl.ds(start, _LANES), value, mask=keep)

    def copy_elements(self, source, at, target, to):
        """Lanes copy what the tile has."""
        p = self.plan
        count = self.mine
        if p.height > 1:
            count = jnp.minimum(p.outer - self.first, p.height) * p.n
        index = plgpu.layout_cast(jnp.arange(_COPIED), plgpu.Layout.WG_STRIDED((_COPIED,), 1))

        def some(i, _):
            keep = index < count - i * _COPIED
            here, there = (pl.ds(unaligned(v) + i * _COPIED, _COPIED) for v in (at, to))
            pl.store(target, there, pl.load(source, here, mask=keep, other=0.0), mask=keep)

        lax.fori_loop(0, pl.cdiv(p.height * p.width, _COPIED), some, None)


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
        Block(x, p, given | scratch).run()

    # each lane reads what it wrote itself, but for what commit_smem and barriers order
    params = plgpu.CompilerParams(
        approx_math=x.out_dtype.itemsize == 2, unsafe_no_auto_barriers=True
    )
    clusters = dict(cluster=(p.cluster,), cluster_names=("c",)) if p.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, x.out_dtype),
        scratch_types=p.scratch(x),
        grid=(p.tiles,),
        grid_names=("tile",),
        **clusters,
        compiler_params=params,
        interpret=interpret,
        kernel_name=x.name,
        **in_shapes(shape, *(None for v in x.vectors if v is not None)),
    )
