"""Softmax, RMS norm and layer norm of the rows of an array: each element is read once.

A block works on a tile of whole rows, about 2048 elements, so that many blocks fit on an SM and the
copies of some run under the arithmetic of others. TMA brings the tile to SMEM, the result takes its
place there, and leaves by TMA. Short rows stay in registers between their statistics and their
result; longer ones are read from SMEM again, in parts that take few registers.

Rows too long for that, those that begin anywhere, and those whose weight comes while the row does
are spans of a flat array, _norms_spans.py. The blocks of a cluster share long ones: each makes the
statistics of its segment, sends them to all through the SMEM of the cluster, and every block puts
them together in the same order. A ring of chunks for each SM, _norms_ring.py, is there if a
configuration asks for it. Results repeat bit for bit.

Along another axis than the last a tile is columns: as many as make rows of 128 bytes, or fewer
where the axis is long. Blocks of a cluster share its rows, and exchange statistics of each column.
If few blocks fit on an SM, parts of the tile come and leave by copies of their own, and the
warpgroups of a block join their statistics first.

Where TMA cannot go (a pitch that is no multiple of 16 bytes) the lanes load and store the tile
themselves. Columns that neither shared memory nor registers hold are read twice, _norms_columns.py;
so are those of arrays whose extents are known at run time only.

The order of a sum follows from the tile and its register layout. Both depend on the number of rows,
and on where the array begins, unless the call is batch invariant: then they are functions of the
row alone, and the layout is prescribed (_layout)."""

import functools
import math
import numbers
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from .._names import show
from . import _norms_columns, _norms_ring, _norms_spans
from ._common import FLOATS, SMS, dtype_of, overlap_launches, unaligned
from ._norms_columns import Exponentials
from ._open_rows import ANY_ROWS, in_shapes, rows_of, rowwise
from ._warp_mma import room_of_block

_BLOCK_BYTES = 32768  # of a segment of a row, as long as the cluster can grow
_STAGED_BYTES = 98304  # of a segment in SMEM: two blocks on an SM
_HELD = 8192  # elements of a row that a block of a cluster keeps in registers; alone, twice as many
_PART = 4096  # elements in registers at a time otherwise
_BOX = 256  # most elements of a row in a box of TMA
_COLUMNS = 64  # of a tile along another axis than the last, if lanes load it
# of a row of such a tile in SMEM, the first that fits
_ROW_BYTES = 128, 64, 32
_WARPS = 2048  # bytes that the four warps load at once
_COLUMN_BYTES = 16384  # of a block's part of it, as long as the cluster can grow
_COLUMN_STAGED_BYTES = 98304  # the most that such a part has
_DIVIDED_BYTES = 49152  # from which it comes and leaves in parts: fewer blocks fit on an SM
_BARRIERS = 32  # of one allocation
_WIDE_BYTES = 57344  # of a segment of a row, beyond which a cluster has 16 blocks
_EARLY_BYTES = 4096  # of a row whose weight and bias come while it does
_SHORT = 1024  # elements of a row that one warp has, in batch-invariant functions
_NARROW = 512  # elements of a row up to which it always has them so
_NARROW_TILE = 4096  # elements of a tile of such rows, if there are many


class NormConfig(NamedTuple):
    """How softmax, rms_norm and layer_norm are tiled.

    ``height``: rows of a tile (columns, along an axis other than the last). ``cluster``: blocks
    that share a row, with one row a tile, or columns; 16 where the GPU has such clusters. ``part``:
    elements of a row in registers at a time; 0: all of the block's. ``staged``: through SMEM by
    TMA. ``ring``: elements of a chunk if chunks of rows pass through a ring in SMEM (the fields
    above then have no effect); 0: no ring. ``consumers``: pairs of warpgroups in a block that
    process the chunks, 1 to 3. ``programs``: the number of blocks; 0: one for each SM. ``unroll``:
    chunks of a row that are unrolled where a ring keeps weights in registers; fewer compile faster;
    0: all. ``stream``: a weight or bias that registers have no room for comes through SMEM, too;
    with ``spans``, every one. ``spans``: bulk copies bring rows of the last axis to SMEM at
    whatever address they begin; a tile may have several rows of up to 2048 elements if neither
    blocks nor warpgroups share them.
    ``threads``: warpgroups of a block, 1 to 8, that share its part of a row, with ``spans``, or of
    columns. ``divided``: each part of columns comes and leaves by copies of its own, so that the
    first ones are read while others are on their way. ``slices``: of softmax along another axis
    than the last, the parts of a column of which a first kernel makes statistics, before a second
    one reads the array again (1: one kernel that reads it twice), with tiles of ``height`` columns
    and ``part`` rows of each lane at a time; 0: no second read, if there is room.
    """

    height: int = 1
    cluster: int = 1
    part: int = 0
    staged: bool = True
    ring: int = 0
    consumers: int = 2
    programs: int = 0
    unroll: int = 0
    stream: bool = False
    spans: bool = False
    threads: int = 1
    divided: bool = False
    slices: int = 0


# What each function needs of a row: `local` the statistics of the segment that the block has,
# `joined` those of the row from those of all segments, `alone` from one segment that is the row,
# `result` an element. `fill` stands after the end of the row; statistics are so many `numbers`.


def _plus(acc, x):
    """acc: None for the first part, to which nothing is added."""
    return x if acc is None else acc + x


def _most(acc, x, _):
    return x if acc is None else jnp.maximum(acc, x)


class _Softmax:
    fill = -math.inf
    numbers = 2
    fast = False  # fewer instructions, for bfloat16: see Exponentials
    # maxima of two elements of 16 bits at once: of columns, but not of tiles that come in parts
    packed = False

    def local(self, tile):
        most = tile.most(tile.each(_most, -math.inf, raw=self.packed).astype(jnp.float32))
        # a segment of -inf alone adds nothing to others; a row of them gives NaN
        self.base = jnp.where(most == -math.inf, 0.0, most) if tile.shared else most
        exp = Exponentials(self.base, self.fast)
        if tile.held is not None:
            tile.held = exp(tile.held)
            return most, tile.total(tile.held)
        return most, tile.total(tile.each(lambda acc, x, _: acc + exp(x), 0.0))

    def joined(self, tile, segments):
        most = functools.reduce(jnp.maximum, [m for m, _ in segments])
        total = sum(s * jnp.exp(m - most) for m, s in segments)
        if tile.held is None:
            self.base = jnp.where(most == -math.inf, 0.0, most)
        self.scale = jnp.exp(self.base - most) * (1 / total)

    def merged(self, segments):
        """The statistics of several segments as those of one."""
        most = functools.reduce(jnp.maximum, [m for m, _ in segments])
        base = jnp.where(most == -math.inf, 0.0, most)
        return most, sum(s * jnp.exp(m - base) for m, s in segments)

    def alone(self, tile, most, total):
        self.scale = 1 / total

    def none(self, tile):
        return jnp.full(tile.shape, -math.inf, jnp.float32), jnp.zeros(tile.shape, jnp.float32)

    def gather(self, stats, parts, first):
        most, total = stats
        new = functools.reduce(jnp.maximum, [x for x, _ in parts], most)
        base = jnp.where(new == -math.inf, 0.0, new)
        total = total * jnp.exp(most - base)
        return new, functools.reduce(lambda t, x: t + jnp.exp(x[0] - base), parts, total)

    def gathered(self, tile, stats):
        most = tile.most(stats[0])
        self.base = jnp.where(most == -math.inf, 0.0, most)
        return most, tile.total(stats[1] * jnp.exp(stats[0] - self.base))

    def result(self, tile, x):
        held = tile.held is not None
        return (x if held else Exponentials(self.base, self.fast)(x)) * self.scale


class _RMSNorm:
    fill = 0.0
    numbers = 1
    fast = False

    def __init__(self, eps):
        self.eps = eps

    def local(self, tile):
        return (tile.total(tile.each(lambda acc, x, _: _plus(acc, x * x), 0.0)),)

    def joined(self, tile, segments):
        self.alone(tile, sum(s for (s,) in segments))

    def none(self, tile):
        return (jnp.zeros(tile.shape, jnp.float32),)

    def gather(self, stats, parts, first):
        return (functools.reduce(lambda acc, x: acc + x[0] * x[0], parts, stats[0]),)

    def gathered(self, tile, stats):
        return (tile.total(stats[0]),)

    def alone(self, tile, squares):
        self.scale = lax.rsqrt(squares * (1 / tile.n) + self.eps)

    def result(self, tile, x):
        return x * self.scale


class _LayerNorm(_RMSNorm):
    numbers = 2

    def local(self, tile):
        """Mean and sum of squared differences from it."""
        mean = tile.total(tile.each(lambda acc, x, _: _plus(acc, x), 0.0)) * tile.share

        def squares(acc, x, valid):
            d = x - mean
            return _plus(acc, d * d if valid is None else jnp.where(valid, d * d, 0.0))

        return mean, tile.total(tile.each(squares, 0.0))

    def joined(self, tile, segments):
        mean = sum(m * (c / tile.n) for (m, _), c in zip(segments, tile.sizes))
        squares = sum(s for _, s in segments)
        squares += sum(jnp.square(m - mean) * float(c) for (m, _), c in zip(segments, tile.sizes))
        self.alone(tile, mean, squares)

    def none(self, tile):
        """Of each place its first element, and sums of differences from it and of their squares:
        the mean may be much larger than they are."""
        return (jnp.zeros(tile.shape, jnp.float32),) * 3

    def gather(self, stats, parts, first):
        base, total, squares = stats
        base = jnp.where(first, parts[0][0], base)
        for x, valid in parts:
            d = x - base if valid is None else jnp.where(valid, x - base, 0.0)
            total, squares = total + d, squares + d * d
        return base, total, squares

    def gathered(self, tile, stats):
        base, total, squares = stats
        count = tile.counts()
        off = total / count
        squares = squares - total * off
        mean = tile.total((base + off) * count) * tile.share
        return mean, tile.total(squares + jnp.square(base + off - mean) * count)

    def alone(self, tile, mean, squares):
        self.mean = mean
        self.scale = lax.rsqrt(squares * (1 / tile.n) + self.eps)
        self.shift = mean * self.scale

    def result(self, tile, x):
        if self.fast:  # one instruction, whose rounding changes no more than that of the mean does
            return x * self.scale - self.shift
        return (x - self.mean) * self.scale


class _Tile:
    """The block's part of a tile, as float32 parts. Built while tracing."""

    def __init__(self, plan, dtype, read, valid, offset, arrive, there):
        """arrive(k) waits until part k can be read, once. there: of a divided tile, how many parts
        need no mask, and how many there are."""
        self.n, self.width, self.parts, self.axis = plan.n, plan.width, plan.parts, plan.axis
        self.shape, self.shared, self.layout = plan.part_shape, plan.segments > 1, plan.layout
        self.dtype, self.read, self.valid, self.arrive = dtype, read, valid, arrive
        # masked accesses beyond the row need a start that is not known to lie there
        self.rolled = plan.parts > 4 or plan.parts > 1 and plan.padded
        self.whole = plan.whole
        if self.shared:  # elements of the segments
            begins = range(0, plan.segments * plan.width, plan.width)
            self.sizes = [max(min(plan.n - at, plan.width), 0) for at in begins]
        # 1 / elements of the segment
        self.share = 1 / plan.n
        if self.shared:
            mine = jnp.clip(plan.n - offset, 1, plan.width)
            self.share = 1 / mine.astype(jnp.float32)
        self.held = read(0) if plan.parts == 1 else None
        self.there = there

    def each(self, f, start, raw=False):
        """f(acc, part, which elements are there or None) over the parts; acc: None if one
        part is all. raw: of their own dtype, unless registers hold them."""
        if self.held is not None:
            return f(None, self.held, self.valid(0))

        arrive, self.arrive = self.arrive, None

        def step(k, acc, masked):
            if arrive:
                arrive(k)
            return f(acc, self.read(k, masked, raw), self.valid(k, masked))

        return self.loop(step, jnp.full(self.shape, start, self.dtype if raw else jnp.float32))

    def loop(self, step, carry):
        """carry = step(k, carry, may part k need a mask) over the parts."""
        if self.there:
            whole, count = self.there
            carry = lax.fori_loop(0, whole, lambda k, acc: step(k, acc, False), carry)
            if isinstance(count, int):
                return carry
            return lax.fori_loop(whole, count, lambda k, acc: step(k, acc, True), carry)
        first, masked = self.whole if self.rolled else 0, self.whole == self.parts  # after a loop
        if first:
            carry = lax.fori_loop(0, first, lambda k, acc: step(k, acc, masked), carry)
        for k in range(first, self.parts):
            carry = step(k, carry, True)
        return carry

    def most(self, x):
        return self.fixed(x).max(axis=self.axis, keepdims=True)

    def total(self, x):
        return self.fixed(x).sum(axis=self.axis, keepdims=True)

    def fixed(self, x):
        return x if self.layout is None else plgpu.layout_cast(x, self.layout)


def _layout(columns, n, itemsize):
    """What fixes the order in which batch-invariant functions reduce a tile. Columns: a warp takes
    every fourth row of 64. Rows: a warp has short rows, several at once of those shorter than its
    lanes reach; the four warps share long ones. A lane has vectors that any row is aligned to, or
    pairs."""
    if columns:
        tiling = plgpu.Tiling(((4, _COLUMNS), (2,)))
        return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)
    lanes = 128 if n > _SHORT else _row_lanes(n, itemsize)
    return _norms_spans.row_layout(lanes, _vector(n, itemsize))


def _is_narrow(n, height, itemsize):
    """Are rows so short that the layout of batch-invariant functions takes fewer registers than
    one that is inferred, 28 instead of 67 for 128 columns? It has to come out even."""
    return n <= _NARROW and height % (128 // _row_lanes(n, itemsize)) == 0


def _column_layout(height, itemsize):
    """Of columns in SMEM: a lane has 4 bytes of a row, or as many as let a warp have it, so that
    sums along columns need no shuffles, or few; None where lanes do not come out even."""
    row = height * itemsize
    if row % 4 or row > 512:
        return None
    vector = max(4, row // 32) // itemsize
    lanes = height // vector
    if lanes not in (8, 16, 32) or lanes * vector != height or vector & (vector - 1):
        return None
    if lanes == 32:
        tiles, warps, of_warp = ((4, height), (vector,)), -3, (-2,)
    else:
        rows = 32 // lanes
        tiles, warps, of_warp = ((4 * rows, height), (rows, height), (vector,)), -5, (-3, -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (warps,), of_warp, -1)


def _vector(n, itemsize):
    return max(math.gcd(n, 16 // itemsize), 2)


def _row_lanes(n, itemsize):
    return _norms_spans.row_lanes(n, _vector(n, itemsize))


def _in_boxes(n, width, itemsize):
    """Does TMA copy segments of so many elements of rows of n? In boxes that begin at whole lines
    of shared memory, or that divide the row."""
    if width <= _BOX:
        return True
    of_16_bytes = (c for c in range(1, _BOX + 1) if width % c == 0 and c * itemsize % 16 == 0)
    return any(c * itemsize % 128 == 0 or n % c == 0 and width // c <= _BOX for c in of_16_bytes)


class _Plan:
    """Numbers that follow from the shape and the configuration. The array is seen as [outer, n,
    inner]; its tiles are rows of [outer, n], where inner is 1, or columns of [n, inner]."""

    def __init__(self, outer, n, inner, columns, cfg, itemsize, invariant=False, aligned=True):
        """itemsize: of x; invariant: of the batch; aligned: where lanes may load vectors."""
        self.outer, self.n, self.inner, self.cluster = outer, n, inner, cfg.cluster
        self.axis = 0 if columns else 1  # of a tile, that is reduced
        # segments of a row: those of each block, and of all
        self.threads, self.segments = cfg.threads, cfg.cluster * cfg.threads
        across = inner if columns else outer
        # of full height: rows that are missing would change how a lane adds up its registers
        fixed = invariant or not columns and _is_narrow(n, cfg.height, itemsize)
        whole = fixed or columns and cfg.staged
        self.height = cfg.height if whole else min(cfg.height, _sizes.most(across))
        self.width = n
        if self.segments > 1:
            self.width = pl.cdiv(pl.cdiv(n, self.segments), 8) * 8
        if cfg.staged and not columns and not _in_boxes(n, self.width, itemsize):
            self.width = pl.cdiv(self.width, _BOX) * _BOX
        part = min(cfg.part or self.width, self.width)
        self.parts = pl.cdiv(self.width, part)
        if self.parts > 1:
            # whole vectors for every lane; a segment is a number of parts, whose place in SMEM TMA
            # wants to be a multiple of 128 bytes
            grain = max(128 // (self.height * itemsize), 1) if columns else 1024
            part = pl.cdiv(pl.cdiv(self.width, self.parts), grain) * grain
            self.parts = pl.cdiv(self.width, part)
            self.width = part * self.parts
        self.part = part
        self.part_shape = (part, self.height) if columns else (self.height, part)
        self.layout = _layout(columns, n, itemsize) if fixed else None
        if columns and cfg.staged:
            self.layout = _column_layout(self.height, itemsize)
        if not (self.layout or aligned or columns):  # a lane's elements beside those of the next
            self.layout = _norms_spans.row_layout(128, 1)
        self.padded = self.width * self.segments != n
        self.whole = self.parts  # in a loop: those of columns that end there have masks after it
        if columns and cfg.staged and self.padded and self.parts > 1:
            self.whole = max(n - (self.segments - 1) * self.width, 0) // part
        over = across % self.height
        self.ragged = isinstance(over, plgpu.Dim) or over != 0
        self.tiles = pl.cdiv(across, self.height)
        self.grid = self.tiles * (outer if columns else 1)
        self.staged = cfg.staged
        self.copies = self.parts if cfg.divided else 1  # of a segment, to SMEM
        # do the warpgroups of a block join their statistics before they send them?
        self.joins = cfg.divided and cfg.threads > 1 and cfg.cluster > 1

    def scratch(self, x):
        columns, threads = self.axis == 0, self.threads
        part = (self.width, self.height) if columns else (self.height, self.width)
        found = {}
        if self.staged:
            found["x_smem"] = plgpu.SMEM((threads, *part), x.dtype)
            if x.dtype != x.out_dtype:
                found["o_smem"] = plgpu.SMEM((threads, *part), x.out_dtype)
        if self.segments > 1:
            of_each = (self.height,) if columns else ()
            senders = self.cluster if self.joins else self.segments
            found["stats"] = plgpu.SMEM((senders, 2, *of_each), jnp.float32)
        if self.joins:
            found["stats_here"] = plgpu.SMEM((self.threads, 2, *of_each), jnp.float32)
            found["arrived_here"] = plgpu.Barrier(num_arrivals=self.threads)
        if self.staged:
            found["full"] = plgpu.Barrier(num_barriers=threads * self.copies)
        if self.segments > 1:
            stores = x.op().numbers if columns and self.cluster > 1 else 1  # of a segment
            found["arrived"] = plgpu.Barrier(num_arrivals=senders * stores)
        return found


class Problem(NamedTuple):
    """What a kernel computes."""

    name: str
    eps: tuple  # arguments of the function's class
    shape: tuple  # of ints; of matrices the rows may be a size of the call (plgpu.dim)
    axis: int  # the first that is reduced
    axes: int  # how many are, one after the other
    dtype: np.dtype
    out_dtype: np.dtype
    vectors: tuple  # dtypes of weight and bias, None for one that is not there
    aligned: tuple[bool, ...]  # whether lanes may assume so, of x, weight, bias and the result

    def op(self):
        return _OPS[self.name](*self.eps)

    def is_fast(self):
        """Are x and the result rounded so much that the arithmetic may be shorter?"""
        if self.name == "softmax":
            return self.dtype == self.out_dtype == jnp.bfloat16
        return self.dtype.itemsize == self.out_dtype.itemsize == 2

    @property
    def last(self):
        return self.axis + self.axes - 1

    @property
    def extents(self):
        """The array as [outer, n, inner], whose axis n is reduced."""
        stops = self.axis, self.last + 1
        parts = self.shape[: stops[0]], self.shape[slice(*stops)], self.shape[stops[1] :]
        return tuple(map(math.prod, parts))

    def given(self, refs):
        """Of all refs after x the vectors, None for one that is not there."""
        found = iter(refs)
        refs = [None if v is None else next(found) for v in self.vectors]
        return [
            ref.reshape((ref.size,)) if ref is not None and self.axes > 1 else ref for ref in refs
        ]


class _Block:
    """One block of the kernel, while it is traced."""

    def __init__(self, x, plan, rows, refs):
        """rows: are tiles rows of [outer, n]?"""
        self.problem, self.plan, self.rows, self.op = x, plan, rows, x.op()
        self.op.packed = not rows and plan.copies == 1
        self.op.fast = x.is_fast() and (self.op.packed or x.name != "softmax")
        vars(self).update(refs)
        self.t = lax.axis_index("tile")
        thread = lax.axis_index("wg") if plan.threads > 1 else 0
        rank = lax.axis_index("c") if plan.cluster > 1 else 0
        self.thread, self.rank, self.segment = thread, rank, rank * plan.threads + thread
        self.offset, self.there = self.segment * plan.width, None
        if plan.copies > 1:
            self.there = plan.parts, plan.parts
            if plan.padded:
                mine = jnp.clip(plan.n - self.offset, 0, plan.width)
                self.there = mine // plan.part, pl.cdiv(mine, plan.part)
        if plan.staged:
            self.full = self.full.at[pl.ds(thread * plan.copies, plan.copies)]
            self.x_smem, self.o_smem = (b.at[thread] for b in (self.x_smem, self.o_smem))
        self.across = (self.t if rows else self.t % plan.tiles) * plan.height

    def run(self):
        p = self.plan
        if p.copies > 1:

            def load(k, _):
                here = self.x_smem.at[self.part(k)]
                plgpu.copy_gmem_to_smem(self.x.at[self.place(k)], here, self.full.at[k])

            lax.fori_loop(0, self.there[1], load, None)
        elif p.staged:
            where = (pl.ds(self.across, p.height), pl.ds(self.offset, p.width))
            if not self.rows:
                where = (self.t // p.tiles, *reversed(where))
            plgpu.copy_gmem_to_smem(self.x.at[where], self.x_smem, self.full.at[0])
            plgpu.barrier_wait(self.full.at[0])
        how = self.read, self.inside, self.offset, self.arrive, self.there
        tile = _Tile(p, self.problem.dtype, *how)
        mine = self.op.local(tile)
        if p.segments > 1:
            self.op.joined(tile, self.exchange(mine))
        else:
            self.op.alone(tile, *mine)
        tile.loop(lambda k, _, masked: self.write(tile, k, masked), None)
        if p.staged and p.copies == 1:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.o_smem, self.o.at[where])
        if p.staged:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def arrive(self, k):
        """Waits for part k, before it is read for the first time."""
        if self.plan.copies > 1:
            plgpu.barrier_wait(self.full.at[k])

    def exchange(self, mine):
        """The statistics of all segments of the row, or of the columns."""
        p, shape = self.plan, self.stats.shape[2:]
        if p.joins:
            mine = self.op.merged(self.exchange_in_block(mine, self.stats_here, self.arrived_here))
        elif p.cluster == 1:
            return self.exchange_in_block(mine, self.stats, self.arrived)
        here = self.stats.at[self.rank if p.joins else self.segment]
        for j in range(p.cluster):
            to = {"cluster_idx": j, "cluster_dim": "c"}
            if self.rows:
                _norms_spans.send(mine, here, self.arrived, **to)
                continue

            def send(to=to):
                for i, value in enumerate(mine):
                    plgpu.async_store_smem(value.reshape(shape), here.at[i], self.arrived, **to)

            if p.joins:  # one warpgroup of the block
                pl.when(self.thread == j % p.threads)(send)
            else:
                send()
        plgpu.barrier_wait(self.arrived)
        return self.received(self.stats, len(mine))

    def exchange_in_block(self, mine, stats, arrived):
        for i, value in enumerate(mine):
            stats.at[self.thread][i] = value.reshape(stats.shape[2:])
        plgpu.commit_smem()
        plgpu.barrier_arrive(arrived)
        plgpu.barrier_wait(arrived)
        return self.received(stats, len(mine))

    def received(self, stats, count):
        shape = stats.shape[2:]

        def one(j, i):
            if self.rows:
                return stats[j, i]
            layout = self.plan.layout and self.plan.layout.reduce(0)
            value = plgpu.load(stats.at[j, i], layout=layout)
            return lax.broadcast_in_dim(value, (1, *shape), [1])

        return [[one(j, i) for i in range(count)] for j in range(stats.shape[0])]

    def place(self, k, aligned=True):
        """Part k of the tile in the array."""
        p = self.plan
        start = self.offset + k * p.part
        if not aligned:
            start = unaligned(start)
        along, other = pl.ds(start, p.part), pl.ds(self.across, p.height)
        return (other, along) if self.rows else (self.t // p.tiles, along, other)

    def part(self, k):
        """Part k of the tile in SMEM."""
        along = pl.ds(k * self.plan.part, self.plan.part)
        return (slice(None), along) if self.rows else (along, slice(None))

    def inside(self, k, masked=True):
        """Which elements of part k lie in the row; None: all. masked: that may not be all."""
        p = self.plan
        if not p.padded or not masked:
            return None
        at = lax.broadcasted_iota(jnp.int32, p.part_shape, p.axis)
        return at < p.n - (self.offset + k * p.part)

    def mask(self, k, masked):
        """Which elements of part k lie in the array; None: all."""
        p, found = self.plan, self.inside(k, masked)
        if p.ragged:
            at = lax.broadcasted_iota(jnp.int32, p.part_shape, 1 - p.axis)
            there = at < (p.outer if self.rows else p.inner) - self.across
            found = there if found is None else found & there
        return found

    def read(self, k, masked=True, raw=False):
        """Part k of the tile, float32 unless raw."""
        p, fill = self.plan, self.op.fill
        dtype = self.problem.dtype if raw else np.dtype(np.float32)
        if p.staged:
            value = self.x_smem[self.part(k)].astype(dtype)
            valid = self.inside(k, masked)
            if valid is None or fill == 0.0:  # TMA reads zeros outside
                return value
            return jnp.where(valid, value, dtype.type(fill))
        keep, at = self.mask(k, masked), self.place(k, self.problem.aligned[0])
        value = self.x[at] if keep is None else pl.load(self.x, at, mask=keep, other=0.0)
        value = value.astype(dtype)
        valid = self.inside(k, masked)
        return value if valid is None else jnp.where(valid, value, dtype.type(fill))

    def write(self, tile, k, masked):
        """The result of part k."""
        p, x = self.plan, self.problem
        value = tile.held if tile.held is not None else self.read(k, masked)
        value = self.weighted(self.op.result(tile, value), k).astype(x.out_dtype)
        if p.staged:
            self.o_smem[self.part(k)] = value
            if p.copies > 1:
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(self.o_smem.at[self.part(k)], self.o.at[self.place(k)])
            return
        keep, at = self.mask(k, masked), self.place(k, x.aligned[-1])
        if keep is None:
            self.o[at] = value
        else:
            pl.store(self.o, at, value, mask=keep)

    def weighted(self, value, k):
        p = self.plan
        for i, (ref, aligned) in enumerate(zip(self.vectors, self.problem.aligned[1:])):
            if ref is None:
                continue
            at = self.place(k, aligned)[1]
            if p.padded:
                valid = jnp.arange(p.part) < p.n - (self.offset + k * p.part)
                w = pl.load(ref, at, mask=valid, other=0.0)
            else:
                w = ref[at]
            w = lax.broadcast_in_dim(w.astype(jnp.float32), p.part_shape, [1])
            value = value * w if i == 0 else value + w
        return value


@cached
def _kernel(x, cfg, invariant, interpret):
    """x: a Problem; invariant: of the batch."""
    outer, n, inner = x.extents
    rows = not _by_columns(x.shape, x.last, inner, invariant)
    p = _Plan(outer, n, inner, not rows, cfg, x.dtype.itemsize, invariant, x.aligned[0])
    if p.threads * p.copies > _BARRIERS:
        raise ValueError(
            f"{x.name}: with divided=True a block has up to {_BARRIERS} parts, {p.copies} for each"
            f" of {p.threads} warpgroups are more, got {cfg}"
        )
    flat = (outer, n) if rows else (outer, n, inner)
    is_open = _sizes.is_open(x.shape)

    def body(source, *refs, **scratch):
        overlap_launches()
        ends = source, refs[-1]
        if not is_open:
            ends = [ref.reshape(flat) for ref in ends]
        given = dict(x=ends[0], o=ends[1], vectors=x.given(refs))
        if p.staged:  # the result takes the place of the tile where it can
            given["o_smem"] = scratch["x_smem"]
        _Block(x, p, rows, given | scratch).run()

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, x.out_dtype),
        scratch_types=p.scratch(x),
        grid=(p.grid,),
        grid_names=("tile",),
        cluster=(p.cluster,) if p.cluster > 1 else (),
        cluster_names=("c",) if p.cluster > 1 else (),
        **({"num_threads": p.threads, "thread_name": "wg"} if p.threads > 1 else {}),
        # no lane reads what another one has written, but for statistics that a barrier orders;
        # but stores of parts of sectors are faster if warps are together
        compiler_params=plgpu.CompilerParams(
            approx_math=x.out_dtype.itemsize == 2,
            unsafe_no_auto_barriers=p.staged and (p.segments > 1 or not rows),
        ),
        interpret=interpret,
        kernel_name=x.name,
        **(in_shapes(x.shape, *(None for v in x.vectors if v is not None)) if is_open else {}),
    )


_OPS = {"softmax": _Softmax, "rms_norm": _RMSNorm, "layer_norm": _LayerNorm}


# ---- the choice ---------------------------------------------------------------------------------


def choose(
    name, outer, n, inner=1, itemsize=2, staged=True, sms=SMS, by_spans=False, aligned=True, most=8
):
    """The configuration for an array seen as [outer, n, inner]; `staged`: TMA can address it;
    `by_spans`: spans of it may pass through SMEM; `aligned`: it begins at 16 bytes; `most`: blocks
    of a cluster."""
    if inner > 1:
        return _choose_columns(outer, n, inner, itemsize, staged, sms, most)
    weighted = name != "softmax"
    long = n > _HELD and n * itemsize >= _BLOCK_BYTES + (not weighted)
    uneven = n > _NARROW and n * itemsize % _WARPS
    early = weighted and n * itemsize >= _EARLY_BYTES
    if by_spans and not aligned:  # lanes copy them
        return NormConfig(1, _blocks(n * itemsize, _BLOCK_BYTES), 1024, spans=True, threads=2)
    if by_spans and (long or uneven or early or not staged):
        return _choose_spans(name, n, itemsize, most)
    height = max(1, min(2048 // n, outer))
    if n <= _NARROW:
        at_once = 128 // _row_lanes(n, itemsize)  # rows of the four warps
        tile = _NARROW_TILE if outer * n >= 16 * sms * _NARROW_TILE else 2048
        height = max(min(tile // n // at_once, pl.cdiv(outer, at_once)), 1) * at_once
    elif name == "layer_norm" and itemsize == 2 and n < 4096 and n * itemsize % _WARPS:
        height = max(height, min(2, outer))
    if not staged:
        if name == "softmax" and itemsize == 2 and n > _NARROW:
            height = 1
        if n > 2 * _HELD and (name == "layer_norm" or name == "softmax" and itemsize == 4):
            return NormConfig(1, _blocks(n, _HELD), 0 if n <= 16 * _HELD else _PART, False)
        cluster = _blocks(n, _PART)
        return NormConfig(height, cluster, 0 if pl.cdiv(n, cluster) <= _PART else _PART, False)
    # softmax keeps the row in registers, or it would compute each exponential twice; the others
    # where one block has the row, which is faster than reading SMEM again (but not in clusters)
    held = name == "softmax"
    cluster = 1
    if n > 16384 or n * itemsize > _BLOCK_BYTES:
        most = _HELD if held else _BLOCK_BYTES // itemsize
        cluster = _blocks(n, most // 2 if name == "layer_norm" and n >= 65536 else most)
    width = pl.cdiv(n, cluster)
    if width * itemsize > _STAGED_BYTES:
        return NormConfig(1, cluster, _PART, False)
    # elements of a row that the warps do not share evenly take masks, and too many registers
    uneven = n > 4096 and n * itemsize % _WARPS
    whole = (held or cluster == 1 and not uneven) and width <= 2 * _HELD
    return NormConfig(height, cluster, 0 if whole else _PART)


def _by_lanes(name, n, itemsize):
    """Do lanes copy unaligned rows to SMEM, which they would otherwise read several times?"""
    if name == "layer_norm":  # from places of any alignment
        return n > 2 * _HELD and n * itemsize % 16 != 0
    return n > 8 * _PART


def _choose_spans(name, n, itemsize, most_blocks=8):
    odd, size = n * itemsize % 16 != 0, n * itemsize
    if size > 8 * _WIDE_BYTES and most_blocks >= 16 and not odd:
        part = 4096 if name != "softmax" else 1024 if n % (16 * 2048) else 2048
        return NormConfig(1, 16, part, spans=True)
    early = name != "softmax" and size >= _EARLY_BYTES and size % _WARPS == 0
    # registers hold the vectors, too, of few enough columns
    most = {("rms_norm", 2): 6144, ("rms_norm", 4): _HELD, ("layer_norm", 4): 3072}
    if early and n <= most.get((name, itemsize), 0):
        return NormConfig(spans=True)
    short = n <= _norms_spans.SHORT and not early
    if short and n > _NARROW and not odd:
        return NormConfig(_height_of_short(name, n, itemsize), spans=True)
    if short:
        vector = max(math.gcd(n, 16 // itemsize), 4 // itemsize)
        lanes = _norms_spans.span_lanes(n, vector, itemsize)
        at_once = 128 // lanes  # rows of the four warps
        return NormConfig(max(round(2048 / n / at_once), 1) * at_once, spans=True)
    if n <= _HELD and not early:
        # registers hold them, but for those whose statistics take most, and masks of odd rows
        parts = itemsize == 2 and (name == "layer_norm" or odd and name == "rms_norm")
        parts &= n > 4096 or n % 256 != 0  # masks take registers
        if parts and n > 4096 and not odd:
            return NormConfig(part=1024, stream=True, spans=True)
        return NormConfig(part=(1024 if n <= 4096 else 2048) if parts else 0, spans=True)
    if odd:  # lanes read and write few bytes at a time
        narrow = name == "softmax" or name == "rms_norm" and itemsize == 2
        threads = {"softmax": 2, "rms_norm": 8 // itemsize, "layer_norm": 1}[name]
        cluster, part = _blocks(size, _BLOCK_BYTES * (1 + narrow)), 1024
        if name == "layer_norm" and itemsize == 4:
            part = 2048
        return NormConfig(1, cluster, part, spans=True, threads=threads)
    # weight and bias take as much shared memory as the row, or parts wait for them
    vectors = {"softmax": 0, "rms_norm": 1, "layer_norm": 2}[name]
    if name == "softmax" and size <= 40960:
        return NormConfig(part=2048, spans=True)
    if name == "layer_norm" and size <= 20480 and size % 1024 == 0:
        return NormConfig(stream=True, spans=True)
    cluster = _blocks(size, _BLOCK_BYTES // max(vectors, 1))
    # registers hold the segment, shared memory the vectors, if lanes share segments evenly by 8
    # bytes at least
    width, even = n // cluster, n % (cluster * 1024 // itemsize) == 0
    most = {(2, 2): 12288, (4, 2): 7168, (4, 4): 7168}.get((itemsize, cluster), 0)
    held = {
        "softmax": itemsize == 4 and cluster <= 4 and width <= most,
        "rms_norm": size <= _BLOCK_BYTES * cluster and (cluster in (1, 8) or width <= most),
        "layer_norm": size <= _BLOCK_BYTES // 2 * cluster,
    }
    if held[name] and even:
        return NormConfig(1, cluster, stream=vectors > 0, spans=True)
    cluster = max(cluster, 2) if vectors and size >= _BLOCK_BYTES else cluster
    room = pl.cdiv(size, cluster) * (1 + vectors) <= _norms_spans.STREAMED_BYTES
    # longer parts if a segment has a whole number of them
    whole = itemsize == 2 and n % (4096 * cluster) == 0
    return NormConfig(1, cluster, 2048 if room and not whole else 4096, spans=True)


def _height_of_short(name, n, itemsize):
    """Rows of a tile of more than _NARROW elements each: a warp has one, or the four warps have
    two, whatever lets lanes share a row evenly, without masks."""
    if itemsize == 2 and n <= 768 and n % 256 == 0:  # by 16 bytes
        return 8 if name == "layer_norm" else 4
    if itemsize == 2 and n % 256 == 0:
        return 2
    if itemsize == 2 and n % 64 == 0:
        return 8 if name == "layer_norm" and n > 1024 else 4
    return 4 if 3 * n <= _norms_spans.SHORT else 2


def _choose_columns(outer, n, inner, itemsize, staged, sms, most_blocks=8):
    misaligned = inner * itemsize % 64 != 0
    rows = [row for row in _ROW_BYTES if row < 2 * inner * itemsize] or _ROW_BYTES[-1:]
    for row in rows if staged else ():
        height = row // itemsize
        cluster = _blocks(n * row, max(_COLUMN_BYTES, (256 if misaligned else 128) * row))
        elements = pl.cdiv(n, cluster) * height
        most = _STAGED_BYTES if row > 32 else _COLUMN_STAGED_BYTES
        if row > 64:
            most = 65536 if misaligned else _COLUMN_BYTES // cluster
        if elements * itemsize > most:
            continue
        if elements > 2 * _HELD and elements * itemsize > _DIVIDED_BYTES:
            threads = 2 if elements <= 6 * _HELD else 4
            part = (2048 if misaligned and threads == 2 else 4096) // height
            if misaligned and most_blocks >= 16:
                threads, cluster = 2, 16
            return NormConfig(height, cluster, part, True, threads=threads, divided=True)
        # a mask for the last part takes longer than registers for all
        held = elements <= _HELD and (cluster <= 2 or n % (64 * cluster))
        return NormConfig(height, cluster, 0 if held else max(2048 // height, 1), True)
    if n * 2 * _COLUMNS <= 10240 and inner >= 2 * _COLUMNS:  # registers hold them
        return NormConfig(2 * _COLUMNS, 1, 0, False)
    height, slices, part = _norms_columns.choose((outer, n, inner), itemsize, sms)
    return NormConfig(height, 1, part, False, slices=slices)


def _without_clusters(config, n, itemsize, gpu):
    """The same for a GPU without clusters, of which one block has a row: it keeps in registers what
    they hold, and reads longer rows again. Without TMA the lanes load it."""
    whole = n <= 2 * _HELD
    staged = config.staged and "TMA" in gpu["features"]
    staged &= n * itemsize * config.height <= room_of_block(gpu) - 1024
    return NormConfig(config.height, 1, 0 if whole else _PART, staged)


def _by_columns(shape, axis, inner, invariant):
    """Are tiles columns? One column is a row, too, but batches of columns are to agree with it."""
    return inner > 1 or invariant and axis < len(shape) - 1


def choose_invariant(name, n, columns, itemsize=2, staged=True):
    """The configuration that makes a row's bits independent of the other rows, as `choose`;
    `staged`: TMA can address the rows of arrays that begin where it wants."""
    if columns:
        return NormConfig(_COLUMNS, 1, _PART // _COLUMNS, False)
    config = choose(name, 1, n, 1, itemsize, staged)
    if n > _SHORT:
        return config
    at_once = 128 // _row_lanes(n, itemsize)  # rows of the four warps
    return config._replace(height=max(2048 // n // at_once, 1) * at_once)


def _blocks(n, most):
    """Blocks of a cluster, so that each has up to that many elements, or the most there are."""
    cluster = 1
    while cluster < 8 and n > cluster * most:
        cluster *= 2
    return cluster


# ---- the functions ------------------------------------------------------------------------------


def _axes_of(name, x, axis, at_end):
    """The first axis that is reduced, and how many are. at_end: the last one has to be."""
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    known = all(isinstance(a, int) and -x.ndim <= a < x.ndim for a in given)
    found = sorted({a % x.ndim for a in given}) if known else []
    if not found or len(found) < len(given):
        raise ValueError(
            f"{name}: axis must be an int from {-x.ndim} to {x.ndim - 1}, or a tuple of different"
            f" ones, got {axis!r}"
        )
    if found != list(range(found[0], found[0] + len(found))):
        raise NotImplementedError(
            f"{name}: axes that are reduced follow each other, got {axis!r} of {x.shape}; transpose"
            " the array first"
        )
    if at_end and found[-1] != x.ndim - 1:
        raise NotImplementedError(
            f"{name}: the last axis is one of those that are reduced, got {axis!r} of {x.shape};"
            " transpose the array first"
        )
    return found[0], len(found)


def _make(name, x, vectors, axis, eps, out_dtype, config, invariant, interpret):
    """The kernel of a call, after checks. vectors: by name, None for one that is not there.
    invariant: of the batch."""
    for what, v in (("x", x), *vectors.items()):
        if v is not None and v.dtype.name not in FLOATS:
            raise TypeError(f"{name}: {what} must be float16, bfloat16 or float32, got {v.dtype}")
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"{name}: x must have a dim and elements, got shape {x.shape}")
    axis, axes = _axes_of(name, x, axis, at_end=bool(vectors))
    for what, v in vectors.items():
        if v is not None and v.shape != x.shape[axis:]:
            raise ValueError(f"{name}: {what} must have the shape {x.shape[axis:]}, got {v.shape}")
    out_dtype = dtype_of(name, out_dtype, x.dtype)
    given = list(vectors.values())
    aligned = (x.aligned, *(v is None or v.aligned for v in given), x.aligned)
    dtypes = tuple(None if v is None else v.dtype for v in given)
    if eps is not None and not isinstance(eps, numbers.Real):
        raise TypeError(f"{name}: eps must be a number, got {show(eps)}")
    eps = () if eps is None else (float(eps),)
    problem = Problem(name, eps, x.shape, axis, axes, x.dtype, out_dtype, dtypes, aligned)
    outer, n, inner = problem.extents
    gpu = _core.target(x.device)
    pitch = n if inner == 1 else inner
    pitches = pitch * x.dtype.itemsize | pitch * out_dtype.itemsize
    by_tma = x.aligned and pitches % 16 == 0
    if inner > 1:
        by_tma = by_tma and "CLUSTER" in gpu["features"]
    size = max(x.dtype.itemsize, out_dtype.itemsize)
    smallest = min(x.dtype.itemsize, out_dtype.itemsize)
    sms = plgpu.sm_count(x.device)
    default = config is None
    if default and inner > 1 and not invariant:
        kernel = _norms_columns.open_kernel(_columns_of(problem), x.device, interpret)
        if kernel:
            return kernel
    if config is None and invariant:
        columns = _by_columns(x.shape, problem.last, inner, True)
        config = choose_invariant(name, n, columns, size, pitches % 16 == 0)
        config = config._replace(staged=config.staged and by_tma)
    elif config is None:
        by_spans = "CLUSTER" in gpu["features"] and n * outer * smallest >= 16
        by_spans &= x.element_strides is None and (x.aligned or _by_lanes(name, n, size))
        how = by_tma, sms, by_spans, x.aligned, gpu["cluster"]
        config = choose(name, outer, n, inner, size, *how)
        # one program has the short rows of less than a tile, however many they are
        few = n <= _norms_spans.SHORT and outer < config.height
        if config.spans and (few or _norms_spans.Plan(problem, outer * n, config).why_not()):
            config = choose(name, outer, n, inner, size, by_tma, sms)
    if default and inner == 1 and "CLUSTER" not in gpu["features"]:
        config = _without_clusters(config, n, size, gpu)
    _check(name, config, inner, by_tma)
    if config.cluster > 1 and "CLUSTER" not in gpu["features"]:
        raise NotImplementedError(
            f"{name}: clusters of blocks, which {gpu['name']} lacks; use a NormConfig with cluster"
            " 1, or no config"
        )
    if config.slices:
        tiling = _norms_columns.Tiling(config.height, config.slices, config.part)
        return _norms_columns.kernel(_columns_of(problem), tiling, interpret)
    one_program = default and axes == 1 and inner == 1  # for any number of rows
    kind = problem._replace(shape=(0, n), axis=1), x.device, invariant, interpret
    if config.spans:
        return _by_spans(problem, config, kind if one_program else None, interpret)
    if one_program and x.ndim == 2:
        rows, _ = rows_of(kind, outer, ANY_ROWS)
        if rows is not outer:
            problem = problem._replace(shape=(rows, n))
            if not invariant:  # one height for any number
                at_once = 128 // _row_lanes(n, size) if n <= _NARROW else 1
                height = max(2048 // n // at_once, 1) * at_once
                config = config._replace(height=height)
    if not config.ring:
        return _kernel(problem, config, invariant, interpret)
    return _by_ring(problem, config, sms, interpret)


def _columns_of(x):
    """What _norms_columns.py makes of a Problem."""
    aligned = x.aligned[0] and x.aligned[-1]
    return _norms_columns.Columns(x.name, x.shape, x.extents, (x.dtype,), x.out_dtype, aligned)


def _by_spans(problem, config, kind, interpret):
    """The kernel of spans. kind: what distinguishes programs but the number of rows; None: this one
    serves no other."""
    outer, n, _ = problem.extents
    why_not = _norms_spans.Plan(problem, outer * n, config).why_not()
    if why_not:
        raise ValueError(
            f"{problem.name}: spans=True does not fit {problem.shape}: {why_not}; got {config}"
        )

    def alone():
        return _norms_spans.kernel(problem, outer * n, config, interpret)

    edges = config.height - 1, min(ANY_ROWS[1], _sizes.MOST // n)
    if kind is None or rows_of(kind, outer, edges)[0] is outer:
        return alone()
    total = plgpu.dim("E", min=(edges[0] + 1) * n, max=edges[1] * n, multiple_of=n)
    of_any = problem._replace(shape=(total // n, n), axis=1)
    kernel = _norms_spans.kernel(of_any, total, config, interpret)
    given = (outer * n,), *(None for v in problem.vectors if v is not None)
    return _core.Reshaped(kernel, alone, given, (problem.shape,))


def _by_ring(problem, config, sms, interpret):
    name, n, in_place = problem.name, problem.extents[1], problem.dtype == problem.out_dtype
    ring = config.ring, config.consumers, config.programs or sms, config.unroll, config.stream
    why_not = _norms_ring.KernelPlan(problem, ring).why_not()
    if not in_place:
        why_not = f"the result must have the dtype of x, {problem.dtype}"
    if why_not:
        raise ValueError(
            f"{name}: no ring for rows of {n} elements: {why_not}; got {config} and"
            f" {problem.out_dtype}"
        )
    return _norms_ring.kernel(problem, ring, interpret)


def _check(name, config, inner, by_tma):
    if not isinstance(config, NormConfig):
        raise TypeError(f"{name}: config must be a NormConfig, got {config!r}")
    height, cluster, part, staged, ring, consumers, programs, unroll, _, spans, threads, divided = (
        config[:-1]
    )
    from_0 = part, ring, programs, unroll, config.slices
    if height < 1 or cluster not in (1, 2, 4, 8, 16) or min(from_0) < 0:
        raise ValueError(
            f"{name}: a NormConfig has a height from 1, a cluster of 1, 2, 4, 8 or 16, and a part,"
            f" ring, programs, unroll and slices from 0, got {config}"
        )
    if config.slices and (inner == 1 or staged or not part or cluster > 1 or name != "softmax"):
        raise ValueError(
            f"{name}: slices are for softmax along another axis than the last, with a part, and"
            f" staged=False, without clusters, got {config}"
        )
    if ring and consumers not in (1, 2, 3):
        raise ValueError(f"{name}: a ring has 1 to 3 consumers, got {config}")
    if ring and not staged:
        raise ValueError(f"{name}: TMA fills the ring; staged must be True, got {config}")
    if spans and (ring or inner > 1 or not staged):
        raise ValueError(
            f"{name}: spans=True is for the last axis, without a ring; staged must be True, got"
            f" {config}"
        )
    if (
        threads not in range(1, 9)
        or threads > 1
        and (ring or not staged or inner == 1 and not spans)
    ):
        raise ValueError(
            f"{name}: threads are 1 to 8; more than 1 share rows with spans=True, or columns with"
            f" staged=True, got {config}"
        )
    if divided and (inner == 1 or not staged or not part):
        raise ValueError(
            f"{name}: divided=True is for columns, with staged=True and a part, got {config}"
        )
    several = cluster > 1 and height > 1 and inner == 1 and not spans
    if several or ring and (height > 1 or inner > 1):
        raise ValueError(
            f"{name}: along the last axis clusters and rings are for single rows, along others"
            f" there are no rings, got {config}"
        )
    if staged and not (by_tma or spans):
        raise ValueError(
            f"{name}: TMA takes arrays that begin at, and have rows of, a multiple of 16 bytes, and"
            f" another axis than the last on GPUs with clusters; staged must be False, got {config}"
        )


@plgpu.specialize
@rowwise
def softmax(
    x,
    *,
    axis=-1,
    out_dtype=None,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along an axis, computed in float32.

    x: float16, bfloat16 or float32, any number of dims from 1, any extents from 1. axis: an int, or
    a tuple of adjacent axes; the last axis is fastest. out_dtype: one of the same
    dtypes, that of ``x`` by default. config: a :class:`NormConfig`; chosen from the shape by
    default. out: a preallocated result, which may be ``x``.

    batch_invariant: the bits of a row depend on the row, its length, the dtypes and options alone,
    not on other rows, their number or where the array begins; some shapes then take longer.
    deterministic: a call repeats bit for bit, which every call does.

    A row of -inf alone gives NaN. Returns the shape of ``x``, of the caller's kind of array.
    TypeError, ValueError for other dtypes and shapes.
    """
    return _make("softmax", x, {}, axis, None, out_dtype, config, batch_invariant, interpret)


@plgpu.specialize
@rowwise
def rms_norm(
    x,
    weight=None,
    *,
    axis=-1,
    eps=1e-6,
    out_dtype=None,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``x / sqrt(mean(x * x) + eps) * weight`` of the rows of the last axis, computed in float32.

    x: float16, bfloat16 or float32, any number of dims from 1, any extents from 1. axis: the last
    one, or a tuple of the last ones, which together are a row. weight: one number for each element
    of a row, with the shape of these axes and any of these dtypes; None for ones. out_dtype: one of
    these dtypes, that of ``x`` by default. config: a :class:`NormConfig`; chosen from the shape by
    default. out: a preallocated result, which may be ``x``. batch_invariant, deterministic: as for
    :func:`softmax`.

    Returns the shape of ``x``, of the caller's kind of array. TypeError, ValueError for other
    dtypes and shapes.
    """
    vectors = {"weight": weight}
    return _make("rms_norm", x, vectors, axis, eps, out_dtype, config, batch_invariant, interpret)


@plgpu.specialize
@rowwise
def layer_norm(
    x,
    weight=None,
    bias=None,
    *,
    axis=-1,
    eps=1e-5,
    out_dtype=None,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` of the rows of the last axis, computed
    in float32.

    x: float16, bfloat16 or float32, any number of dims from 1, any extents from 1. axis: the last
    one, or a tuple of the last ones, which together are a row. weight, bias: one number for each
    element of a row, with the shape of these axes and any of these dtypes; None for ones and zeros.
    out_dtype: one of these dtypes, that of ``x`` by default. config: a :class:`NormConfig`; chosen
    from the shape by default. out: a preallocated result, which may be ``x``. batch_invariant,
    deterministic: as for :func:`softmax`.

    The variance is the mean of squared differences from the mean. Returns the shape of ``x``, of
    the caller's kind of array. TypeError, ValueError for other dtypes and shapes.
    """
    vectors = {"weight": weight, "bias": bias}
    return _make("layer_norm", x, vectors, axis, eps, out_dtype, config, batch_invariant, interpret)
