"""Grouped matrix products on Hopper's tensor cores: the rows of an array come in groups whose sizes
only the GPU knows.

Both kernels are built like `matmul`: persistent blocks with a producer, which fills a ring by TMA,
and consumers, each of which owns 64 rows or columns of the tile. Every block starts by making a
table of where groups begin; whatever the sizes are, all accesses are within the arrays.

`ragged_dot` multiplies each group of rows with a matrix of its own. The tensor cores take the
matrix as their left operand, of which they multiply 64 columns at a time, and the rows as the right
one, of which they multiply any number; so a tile is as narrow as its group asks for, in steps of an
eighth, and the result is transposed on its way into shared memory. Tiles begin where a group does
and share its rows evenly, and what is stored ends where the group ends: in boxes of TMA, whose rows
are powers of two. Narrow tiles take less time, so blocks soon do not work in step; a counter
assigns the tiles, so that those that need the same columns still begin at about the same time and
find them in the L2. With fixed shares they would drift apart, and the matrices would be read from
memory several times. The blocks of a cluster lie side by side and share the rows.

`transposed_ragged_dot` sums over the rows of a group. Its last 1 to 32 rows (all 0 of an empty one)
lie in a slot of their own, the edge, where rows of the next group come too; the producer overwrites
those with zeros. The edge is multiplied first: its slot is free for the next tile during most of
this one, every tile has one, and its product is what an accumulator begins with, not zeros. Groups
of a few hundred rows have more bytes of results than of operands: a tile is kept in 16 bits and
stored, half by half, while the next one is multiplied, by the two consumers alternately. The blocks
of a cluster lie one above the other and share the right operand."""

import contextlib
import functools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _ragged_mixed, _ragged_tensor_memory, _tensor_memory, _warp_mma
from ._common import (
    REGISTERS,
    SMEM_BYTES,
    SMS,
    CountedTiles,
    Ring,
    StaticTiles,
    dtype_of,
    overlap_launches,
    store,
    swizzled,
    unaligned,
    warp_specialized,
)
from ._groups import GROUPS, GroupedBlock, Product, in_bands, open_shapes
from ._mixed_sums import BITS
from ._open_rows import ANY_ROWS, better, bucket_of, in_shapes, is_static, together
from ._padding import needs_padding, padding_of, with_padding
from ._scaled import BLOCK, FP8

_STEP = 128  # bytes of the summed dim in a slot
# Rows of a group in a slot of sums. With half a _STEP the slot for the edge takes half of the room:
# beside tiles of 256 columns the ring holds 224 rows instead of 192.
_SUM_STEP = 32
_GRAIN = 16  # of those that one instruction of the tensor cores sums
_CACHE = 64 << 20  # bytes; a larger result does not stay in the L2 until somebody reads it
_EARLY = 3  # steps that are fetched before the rest of the edge is overwritten


class RaggedConfig(NamedTuple):
    """How a grouped product is tiled.

    ``consumers``: warpgroups that multiply, 1 or 2, 64 columns of a tile each, or 64 rows for
    :func:`transposed_ragged_dot`. ``tile``: its rows, at most, or columns for
    :func:`transposed_ragged_dot`; 64, 128, 192 or 256. ``stages``: slots of the ring, of 64
    elements of the summed dim, or of 32 rows for :func:`transposed_ragged_dot`; 0: as many as fit.
    ``cluster``: blocks that share an operand, 1 or 2. ``buffers``: store buffers per consumer
    (16-bit results of :func:`transposed_ragged_dot` always have one). ``group``: rows of tiles
    worked on together, for the L2.
    """

    consumers: int = 2
    tile: int = 256
    stages: int = 0
    cluster: int = 2
    buffers: int = 2
    group: int = 16


class _Plan:
    """What follows from a product and a configuration, for both kernels."""

    weights = None  # what _ragged_mixed has for matrices of 8 or 4 bits

    def __init__(self, x, cfg, step, edge, chunk_bytes, buffers):
        """edge: a slot beside the ring; chunk_bytes: of the rows of a store buffer."""
        self.x, self.cfg, self.consumers, self.step = x, cfg, cfg.consumers, step
        self.wide = 64 * cfg.consumers  # the other extent of a tile
        self.groups = _sizes.most(x.groups)
        out_bytes = x.out_dtype.itemsize
        self.chunk = math.gcd(chunk_bytes // out_bytes, cfg.tile)  # a store buffer's part of a tile
        self.chunks = cfg.tile // self.chunk
        self.buffers = max(b for b in range(1, buffers + 1) if self.chunks % b == 0)
        used = cfg.consumers * self.buffers * 64 * self.chunk * out_bytes
        used += 8 * (self.groups + 1) + 1024
        itemsize = x.dtype.itemsize
        slot = (self.wide + cfg.tile) * step * itemsize + cfg.tile * 4 * x.scaled
        most = 1024 // (step * itemsize)
        if self.weights:
            slot = (self.wide * self.weights.bits // 8 + cfg.tile * itemsize) * step
            slot, most = slot + self.wide * self.weights.scale_bytes, 16
        most = min((SMEM_BYTES - used) // slot - edge, most)
        self.stages = min(cfg.stages or most, most)
        # more accumulators than an even share of the registers has room for; with scales, the
        # product of a step has one beside the sums
        self.registers = REGISTERS.get(cfg.consumers) if cfg.tile << x.scaled > 128 else None
        self.axes = {"c": cfg.cluster} if cfg.cluster > 1 else {}
        self.share = "c" if self.axes else None  # along this blocks share an operand
        rows = x.groups * x.k if edge else x.m
        by_tma = _sizes.most(rows) == 1 or x.n * out_bytes % 16 == 0  # the result
        self.engine = None if by_tma else "plain"

    def scratch(self, a_tile, b_tile, part):
        x, tiled = self.x, swizzled(128 // self.x.dtype.itemsize, self.x.dtype)
        o_tiled = swizzled(min(part[1], 128 // x.out_dtype.itemsize), x.out_dtype)
        buffers = (self.consumers, self.buffers, *part)
        copies = 2 + (x.scaled or x.scale_groups > 1)  # that fill a slot
        return {
            "a_smem": plgpu.SMEM((self.stages, *a_tile), x.dtype, transforms=tiled),
            "b_smem": plgpu.SMEM((self.stages, *b_tile), x.dtype, transforms=tiled),
            "o_smem": plgpu.SMEM(buffers, x.out_dtype, transforms=o_tiled),
            "table": plgpu.SMEM((2, self.groups + 1), jnp.int32),
            "table_ready": plgpu.Barrier(),
            **Ring.barriers(self.stages, copies, self.consumers, self.axes),
        }


def _to_and_fro(s, steps, w):
    """Every second tile goes backwards: the end of what it shares is still in the L2."""
    return lax.select(w % 2 == 1, steps - 1 - s, s)


# ---- a matrix for each group ---------------------------------------------------------------------


class _DotPlan(_Plan):
    """Of `ragged_dot`. A tile has up to cfg.tile rows and self.wide columns."""

    def __init__(self, x, cfg, sms):
        self.weights = x.weights and _ragged_mixed.Weights(x, cfg.tile)
        step = self.weights.step if self.weights else _STEP // x.dtype.itemsize
        super().__init__(x, cfg, step, 0, 128, cfg.buffers)
        self.rows, self.steps = cfg.tile, pl.cdiv(x.k, self.step)
        self.cluster_cols = self.wide * cfg.cluster
        self.tiles_n = pl.cdiv(x.n, self.cluster_cols)
        most = (pl.cdiv(x.m, self.rows) + x.groups) * self.tiles_n  # tiles
        self.clusters = _sizes.minimum(max(sms // cfg.cluster, 1), most)
        # What tiles may measure. Each width costs time to compile. Above the half, where most tiles
        # are, there are as many as keep small what is multiplied for nothing; below, the matrix
        # takes longer to come than to multiply.
        grain = 8 * pl.cdiv(self.rows, 128)  # the instruction takes multiples of 8
        self.widths = [self.rows // 4, *range(self.rows // 2, self.rows + 1, grain)]
        if x.scaled or x.weights:  # sums of their own for each, or conversions
            self.widths = [self.rows // 4 * quarter for quarter in (1, 2, 3, 4)]
        self.grain = math.gcd(*self.widths)
        self.fetched = [self.rows // 4 * quarter for quarter in (1, 2, 3, 4)]

    def scratch(self):
        b_tile = (self.wide, self.step) if self.x.tb else (self.step, self.wide)
        found = super().scratch((self.rows, self.step), b_tile, (self.chunk, 64))
        if self.x.scaled:
            found["scale_smem"] = plgpu.SMEM((self.stages, self.rows), jnp.float32)
        if self.weights:
            found |= self.weights.scratch(self)
        return found | CountedTiles.scratch(self.consumers, axes=self.share)


class _DotBlock(GroupedBlock):
    """One block of `ragged_dot`."""

    tile_free = None

    def __init__(self, plan, refs):
        super().__init__(plan, plan.rows, refs)
        total = self.table[1, plan.x.groups] * plan.tiles_n
        counted = self.tile_numbers, self.tile_full, self.tile_empty, self.tile_free
        self.tiles = CountedTiles(total, plan.clusters, self.cluster, counted)

    def place(self, t, g):
        """Group, first row, rows and first column of tile t. g: the group of an earlier tile."""
        p, table = self.plan, self.table
        g = lax.while_loop(lambda g: table[1, g + 1] * p.tiles_n <= t, lambda g: g + 1, g)
        start, size = self.group_rows(g)
        count = (size + (p.rows - 1)) // p.rows
        t = t - jnp.maximum(table[1, g], 0) * p.tiles_n
        i, j = in_bands(t, count, p.tiles_n, p.cfg.group)
        # tiles of one height: they keep in step, and find in the L2 what they share
        share = lax.div(size + (count * p.grain - 1), count * p.grain) * p.grain
        row = i * share
        height = jnp.minimum(share, size - row)
        return g, start + row, height, (j * p.cfg.cluster + self.rank) * p.wide

    # ---- producer

    def producer(self):
        start = jnp.int32(0), jnp.int32(0)
        self.ring.drain(self.tiles.produce(self.fetch_tile, start, some=False)[1])

    def fetch_tile(self, t, carry):
        """carry: the group of the tile before, steps so far."""
        p, x, (g, it) = self.plan, self.plan.x, carry
        g, row, height, col = self.place(t, g)

        def copy(s, a_slot, b_slot, *others):
            *scale_slot, full = others
            w = col // p.cluster_cols
            step = _to_and_fro(s, p.steps, w)
            along_k = pl.ds(step * p.step, p.step)
            along_n = pl.ds(col, p.wide)

            def fetch_rows(count):
                rows, slot = self.a.at[pl.ds(row, count), along_k], a_slot.at[pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(rows, slot, full, collective_axes=p.share)

            # a narrow tile is limited by what comes in
            for less, count in zip((0, *p.fetched), p.fetched):
                fits = (height > less) & (height <= count)
                pl.when(fits)(functools.partial(fetch_rows, count))
            at = (along_n, along_k) if x.tb else (along_k, along_n)
            plgpu.copy_gmem_to_smem(self.b.at[(g, *at)], b_slot, full)
            if x.scaled:
                scales = self.scale_lhs.at[pl.ds(step * side_by_side(x.m) + row, p.rows)]
                plgpu.copy_gmem_to_smem(scales, scale_slot[0], full)
            elif scale_slot:
                scales = self.scale_rhs.at[g, step // p.weights.steps_of_scale, along_n]
                plgpu.copy_gmem_to_smem(scales, scale_slot[0], full)

        self.ring.fetch(0, p.steps, self.ring.at(it), copy)
        return g, it + p.steps

    # ---- consumers

    def consumer(self, me):
        start = jnp.int32(0), jnp.int32(0)
        self.tiles.consume(functools.partial(self.multiply_tile, me), start)
        if not self.plan.x.each:
            self.zero_rest(me)

    def multiply_tile(self, me, t, carry):
        g, it = carry
        g, row, height, col = self.place(t, g)
        col += me * 64
        if self.plan.x.scaled:
            value = self.scaled_product(me, g, height, col, it)
        elif self.plan.weights:
            value = _ragged_mixed.product(self, me, g, height, col, it)
        else:
            value = self.product(me, height, it)
        self.epilogue(me, value, row, height, col)
        return g, it + self.plan.steps

    def product(self, me, height, it):
        """The tile transposed, of the narrowest width that holds so many rows."""
        p, ring = self.plan, self.ring
        which = sum((height > w).astype(jnp.int32) for w in p.widths[:-1])

        def multiply(acc):
            def of_width(count):
                part, mine = pl.ds(0, count), pl.ds(me * 64, 64)

                def factors(a_slot, b_slot):
                    left = b_slot.at[mine] if p.x.tb else b_slot.at[:, mine].T
                    return left, a_slot.at[part].T

                return ring.multiply(acc.at[:, part], p.steps, ring.at(it), factors)[2]

            last = lax.switch(which, [functools.partial(of_width, w) for w in p.widths])
            value = acc[...]
            ring.release_slot(last)
            return value

        return pl.run_scoped(multiply, plgpu.ACC((64, p.rows)))

    def scaled_product(self, me, g, height, col, it):
        """The same of 8-bit operands with scales of blocks, which change with every step: the
        product of a step has an accumulator of its own and is added to the sums, scaled. Meanwhile
        the tensor cores work for the other consumer."""
        p, ring = self.plan, self.ring
        which = sum((height > w).astype(jnp.int32) for w in p.widths[:-1])
        # the last block of a cluster may begin beyond the columns
        block = jnp.minimum(col // BLOCK, self.scale_rhs.shape[1] - 1)
        blocks, w = self.scale_rhs.at[g, block], col // p.cluster_cols
        along = plgpu.Layout.WGMMA.reduce(0)

        def scale_of(s):
            return blocks[_to_and_fro(jnp.minimum(s, p.steps - 1), p.steps, w)]

        def of_width(count):
            part, mine = pl.ds(0, count), pl.ds(me * 64, 64)

            def step(s, carry):
                slot, phase, scale, sums = carry

                def product(acc):
                    right = self.a_smem.at[slot, part].T
                    plgpu.wgmma(acc, self.b_smem.at[slot, mine], right)
                    following = scale_of(s + 1)  # one ahead: it takes a while
                    of_rows = plgpu.load(self.scale_smem.at[slot, part], layout=along)
                    return acc[...], of_rows * scale, following

                plgpu.barrier_wait(self.full.at[slot], phase=phase)
                value, scales, following = pl.run_scoped(product, plgpu.ACC((64, count)))
                ring.release_slot(slot)
                sums = sums + value * lax.broadcast_in_dim(scales, value.shape, [1])
                return *ring.next(slot, phase), following, sums

            zeros = jnp.zeros((64, count), jnp.float32)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            start = *ring.at(it), scale_of(0), zeros
            sums = lax.fori_loop(0, p.steps, step, start)[-1]
            if count == p.rows:
                return sums
            return jnp.concatenate([sums, jnp.zeros((64, p.rows - count), jnp.float32)], axis=1)

        return lax.switch(which, [functools.partial(of_width, w) for w in p.widths])

    def epilogue(self, me, value, row, height, col):
        """Stores so many rows of the tile."""
        p = self.plan

        def send(buffer, row, count):
            target = self.o.at[pl.ds(row, count), pl.ds(col, 64)]
            plgpu.copy_smem_to_gmem(buffer, target, engine=p.engine)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for c in range(p.chunks):

            @pl.when(height > c * p.chunk)
            def _(c=c):
                buffer = self.o_smem.at[me, c % p.buffers]
                if c >= p.buffers:
                    plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
                part = value[:, c * p.chunk : (c + 1) * p.chunk]
                buffer.T[...] = part.astype(p.x.out_dtype)
                plgpu.commit_smem()
                whole = height >= (c + 1) * p.chunk
                pl.when(whole)(lambda: send(buffer, row + c * p.chunk, p.chunk))

        # the rest in boxes of as many rows as its number has bits
        c = height // p.chunk
        count = p.chunk // 2
        while count:

            @pl.when(height & count != 0)
            def _(count=count):
                done = height % p.chunk // (2 * count) * (2 * count)
                buffer = self.o_smem.at[me, c % p.buffers, pl.ds(done, count)]
                send(buffer, row + c * p.chunk + done, count)

            count //= 2

    def zero_rest(self, me):
        """Rows of no group, by all consumers of all blocks."""
        p, x = self.plan, self.plan.x
        first = jnp.clip(self.table[0, x.groups], 0, x.m)
        first += (self.cluster * p.cfg.cluster + self.rank) * p.consumers + me
        stride = p.clusters * p.cfg.cluster * p.consumers
        width = min(x.n, 2048)  # of what is zeroed at a time

        def zero_row(i, _):
            def zero(c, _):
                at = jnp.minimum(c * width, x.n - width)
                self.o[first + i * stride, pl.ds(at, width)] = jnp.zeros((width,), x.out_dtype)

            lax.fori_loop(0, pl.cdiv(x.n, width), zero, None)

        lax.fori_loop(0, (jnp.maximum(x.m - first, 0) + stride - 1) // stride, zero_row, None)


def side_by_side(rows):
    """Elements from the scales of one step of all rows to those of the next one."""
    return pl.cdiv(rows, 16) * 16


@cached
def scales_by_steps(rows, steps, aligned, interpret):
    """Kernel: the scales of rows and steps (rows, steps) as one row, in which those of a step are
    side by side."""
    pitch, height, width = side_by_side(rows), 64, 16

    def body(x, o, tile):
        overlap_launches()
        first, step = lax.axis_index("row") * height, lax.axis_index("step") * width
        down, across = (lax.broadcasted_iota(jnp.int32, (height, width), k) for k in (0, 1))
        inside = (down < rows - first) & (across < steps - step)
        at = pl.ds(first, height), pl.ds(step if aligned else unaligned(step), width)
        tile[...] = pl.load(x.reshape((rows, steps)), at, mask=inside, other=0.0)
        value = plgpu.transpose_ref(tile, (1, 0))[...]
        down, across = (lax.broadcasted_iota(jnp.int32, (width, height), k) for k in (0, 1))
        inside = (down < steps - step) & (across < pitch - first)
        pl.store(o, ((step + down) * pitch + (first + across),), value, mask=inside)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((steps * pitch,), jnp.float32),
        grid=(pl.cdiv(rows, height), pl.cdiv(steps, width)),
        grid_names=("row", "step"),
        scratch_types=[plgpu.SMEM((height, width), jnp.float32)],
        interpret=interpret,
        kernel_name="ragged_dot_scales",
        **in_shapes((rows, steps)),
    )


@cached
def _dot_kernel(x, cfg, sms, interpret):
    plan = _DotPlan(x, cfg, sms)

    def body(a, b, sizes, *others, **scratch):
        overlap_launches()
        *scales, o = others
        refs = dict(zip(("scale_rhs", "scale_lhs"), reversed(scales)))
        if x.each:
            a, o = a.reshape((x.m, a.shape[-1])), o.reshape((x.m, x.n))
        refs |= dict(a=a, b=b, sizes=sizes, o=o)
        _DotBlock(plan, refs | scratch).run()

    shape = (x.groups, x.each, x.n) if x.each else (x.m, x.n)
    out_type = plgpu.ShapeDtypeStruct(shape, x.out_dtype)
    how = {"interpret": interpret, "kernel_name": "ragged_dot"}
    scales = (side_by_side(x.m) * pl.cdiv(x.k, BLOCK),) if x.scaled else None
    return warp_specialized(body, plan, out_type, **how, **open_shapes(x, scales=scales))


# ---- a sum for each group ------------------------------------------------------------------------


def _cached_groups(x):
    """How many groups have results that the L2 keeps."""
    return _CACHE // (x.k * x.n * x.out_dtype.itemsize)


class _SumPlan(_Plan):
    """Of `transposed_ragged_dot`. A tile has self.wide rows and cfg.tile columns."""

    def __init__(self, x, cfg, sms):
        # A tile in 16 bits is stored under the next one: registers have room for it, and one wide
        # store costs the products less than two.
        self.late = x.out_dtype.itemsize == 2
        chunk_bytes, buffers = (256, 1) if self.late else (128, cfg.buffers)
        super().__init__(x, cfg, _SUM_STEP, 1, chunk_bytes, buffers)
        self.cols = cfg.tile
        self.tiles_m = pl.cdiv(x.k, self.wide * cfg.cluster)
        self.tiles_n = pl.cdiv(x.n, self.cols)
        self.tiles = self.tiles_m * self.tiles_n  # of a group
        self.clusters = _sizes.minimum(max(sms // cfg.cluster, 1), x.groups * self.tiles)
        self.large = _sizes.least(x.groups) > _cached_groups(x)

    def scratch(self):
        a_tile, b_tile = (self.step, self.wide), (self.step, self.cols)
        tiled = swizzled(64, self.x.dtype)
        return super().scratch(a_tile, b_tile, (64, self.chunk)) | {
            "a_edge": plgpu.SMEM(a_tile, self.x.dtype, transforms=tiled),
            "b_edge": plgpu.SMEM(b_tile, self.x.dtype, transforms=tiled),
            "edge_loaded": plgpu.Barrier(num_arrivals=2),
            "edge_full": plgpu.Barrier(),
            "edge_empty": plgpu.Barrier(num_arrivals=self.consumers),
        }


class _SumBlock(GroupedBlock):
    """One block of `transposed_ragged_dot`."""

    def __init__(self, plan, refs):
        super().__init__(plan, plan.step, refs)
        self.tiles = StaticTiles(plan.x.groups * plan.tiles, plan.clusters, self.cluster)
        self.trips = self.tiles.count()

    def place(self, w):
        """Of this cluster's tile number w: group, row and column of tiles, first row of the group,
        its size, its steps. A step is `step` rows of the group, what is left is the edge: up to
        `step` rows."""
        p = self.plan
        t = jnp.minimum(self.tiles.tile(w), self.tiles.total - 1)  # also after the last one
        g = t // p.tiles
        i, j = in_bands(t % p.tiles, p.tiles_m, p.tiles_n, p.cfg.group)
        start, size = self.group_rows(g)
        i = i * p.cfg.cluster + self.rank
        return g, i, j, start, size, jnp.maximum(size - 1, 0) // p.step

    def for_tiles(self, work, kept):
        """at, following, kept = work(number, place, slot and phase, following, kept) for each of
        this cluster's tiles; slot and phase after them, kept. following(): the place of the next
        tile, which work asks for when nobody waits for it."""
        p = self.plan

        def one(w, carry):
            at, (g, i, j, *group), kept = carry
            here = g, i * p.wide, j * p.cols, *group  # known to be multiples
            return work(w, here, at, lambda: self.place(w + 1), kept)

        start = self.ring.at(jnp.int32(0)), self.place(0), kept
        at, _, kept = lax.fori_loop(0, self.trips, one, start)
        return at, kept

    # ---- producer

    def producer(self):
        (slot, phase), _ = self.for_tiles(self.fetch_tile, None)
        self.ring.drain(phase * self.plan.stages + slot)
        plgpu.barrier_wait(self.edge_empty, phase=self.trips - 1)

    def fetch_tile(self, w, here, at, following, _):
        p = self.plan
        _, row, col, start, size, steps = here

        def copy(s, a_slot, b_slot, full, axis=None):
            along = pl.ds(start + s * p.step, p.step)
            plgpu.copy_gmem_to_smem(self.a.at[along, pl.ds(row, p.wide)], a_slot, full)
            b = self.b.at[along, pl.ds(col, p.cols)]
            plgpu.copy_gmem_to_smem(b, b_slot, full, collective_axes=axis)

        def step(s, *where):
            copy(_to_and_fro(s, steps, w), *where, axis=p.share)

        pl.when(w > 0)(lambda: plgpu.barrier_wait(self.edge_empty, phase=w - 1))
        # not shared: releases of slots that plain stores reach would need fences
        copy(steps, self.a_edge, self.b_edge, self.edge_loaded)
        # the edge comes while slots become free
        early = jnp.minimum(steps, min(_EARLY, p.stages))
        at = self.ring.fetch(0, early, at, step)
        plgpu.barrier_wait(self.edge_loaded, phase=w)
        self.clear_edge(size - steps * p.step)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.edge_full)
        return self.ring.fetch(early, steps, at, step), following(), None

    def clear_edge(self, left):
        """Zeros in the rows of the edge from row `left` on, as far as they are multiplied."""

        def zero(i, _):
            for ref in (self.a_edge, self.b_edge):
                zeros = jnp.zeros((8, ref.shape[1]), ref.dtype)
                at = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
                pl.store(ref, (pl.ds(i * 8, 8), slice(None)), zeros, mask=at >= left - i * 8)

        used = jnp.maximum((left + (_GRAIN - 1)) // _GRAIN * _GRAIN, _GRAIN)
        lax.fori_loop(left // 8, used // 8, zero, None)

    # ---- consumers

    def consumer(self, me):
        p, multiply = self.plan, functools.partial(self.multiply_tile, me)
        if not p.late:
            self.for_tiles(multiply, None)
            return
        zero = jnp.int32(0)
        kept = jnp.zeros((64, p.cols), p.x.out_dtype), zero, zero, zero
        kept = self.for_tiles(multiply, kept)[1]
        self.store_from(me, 0, kept)

    def multiply_tile(self, me, w, here, at, following, kept):
        """kept: the tile before, if it is stored under this one: (value, group, row, column)."""
        p, ring, (g, row, col, _, size, steps) = self.plan, self.ring, here
        apart = jnp.maximum(steps // p.chunks, 1)  # from store to store

        def store_in_time(s, carry):
            """Beside the products. carry: the next chunk, and the step for it."""
            if not p.late:
                return carry
            c, due_at = carry
            due = s == due_at
            pl.when(due)(lambda: self.store_any(me, c, kept))
            return c + due.astype(jnp.int32), due_at + lax.select(due, apart, 0)

        def release_edge():
            plgpu.barrier_arrive(self.edge_empty)

        def multiply(acc):
            self.multiply_edge(me, acc, w, size, steps)
            begun = lax.select(w > 0, jnp.int32(0), p.chunks), 1 + apart // 2 * me
            begun, after, last = ring.multiply(
                acc,
                steps,
                at,
                functools.partial(self.factors, me),
                store_in_time,
                begun,
                release_edge,
            )
            then = following()  # while the last product runs
            if p.late:
                self.store_from(me, begun[0], kept)
            value = acc[...]
            pl.when(steps > 0)(lambda: ring.release_slot(last))
            pl.when(steps == 0)(release_edge)
            return value.astype(p.x.out_dtype), after, then

        value, after, then = pl.run_scoped(multiply, plgpu.ACC((64, p.cols)))
        new = value, g, row + me * 64, col
        if p.late:
            return after, then, new
        for c in range(p.chunks):
            self.epilogue(me, c, new)
        return after, then, kept

    def factors(self, me, a_slot, b_slot):
        return a_slot.at[:, pl.ds(me * 64, 64)].T, b_slot

    def multiply_edge(self, me, acc, w, size, steps):
        """acc = the product of the rows of the edge."""
        plgpu.barrier_wait(self.edge_full, phase=w)
        for i in range(0, self.plan.step, _GRAIN):

            def grain(i=i):
                part = pl.ds(i, _GRAIN)
                plgpu.wgmma(acc, *self.factors(me, self.a_edge.at[part], self.b_edge.at[part]))

            grain() if i == 0 else pl.when(size - steps * self.plan.step > i)(grain)

    # ---- epilogue

    def epilogue(self, me, c, kept):
        """Stores chunk c of a tile."""
        p, (value, g, row, col) = self.plan, kept
        part = value[:, c * p.chunk : (c + 1) * p.chunk]
        col = pl.multiple_of(col, p.chunk) + c * p.chunk  # it went round a loop
        target = self.o.at[g, pl.ds(row, 64), pl.ds(col, p.chunk)]
        plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
        buffer = self.o_smem.at[me, c % p.buffers]
        store(buffer, part, target, engine=p.engine, evict_first=p.large)

    def store_any(self, me, c, kept):
        """The same of a chunk whose number is traced."""
        for i in range(self.plan.chunks):
            pl.when(c == i)(functools.partial(self.epilogue, me, i, kept))

    def store_from(self, me, first, kept):
        """All chunks from the first one on."""
        lax.fori_loop(first, self.plan.chunks, lambda c, _: self.store_any(me, c, kept), None)


@cached
def _sum_kernel(x, cfg, sms, interpret):
    plan = _SumPlan(x, cfg, sms)

    def body(a, b, sizes, o, **scratch):
        overlap_launches()
        _SumBlock(plan, dict(a=a, b=b, sizes=sizes, o=o) | scratch).run()

    out_type = plgpu.ShapeDtypeStruct((x.groups, x.k, x.n), x.out_dtype)
    how = {"interpret": interpret, "kernel_name": "transposed_ragged_dot"}
    return warp_specialized(body, plan, out_type, **how, **open_shapes(x, True))


# ---- the choice ---------------------------------------------------------------------------------


def _fitting(extent, tiles, sms):
    """How far a tile extends: no further than needed, and as leaves two tiles for every SM.
    tiles(w): how many there are."""
    return next((w for w in (256, 128, 64) if w < 2 * extent and tiles(w) >= 2 * sms), 64)


def _paired(tiles):
    """The cluster: two blocks, unless one of them would often have nothing to do."""
    return 2 if tiles % 2 == 0 or tiles > 16 else 1


def choose(m, n, groups, sms=SMS):
    """The configuration of ragged_dot for a shape, on a GPU with that many SMs."""
    consumers = 2 if n > 64 else 1
    columns = pl.cdiv(n, 64 * consumers)
    # twice the mean: groups may be uneven
    tile = _fitting(2 * m / groups, lambda w: (m / w + groups / 2) * columns, sms)
    return RaggedConfig(consumers, tile, 0, _paired(columns), 2, 16)


def choose_transposed(n, k, groups, sms=SMS):
    """The configuration of transposed_ragged_dot."""
    consumers = 2 if k > 64 else 1
    tiles = pl.cdiv(k, 64 * consumers)
    tile = _fitting(n, lambda w: groups * tiles * (n / w), sms)
    return RaggedConfig(consumers, tile, 0, _paired(tiles), 2, 16)


# ---- the functions ------------------------------------------------------------------------------


def _check(name, lhs, rhs, rhs_ndim, sizes, out_dtype, config, takes=("float16", "bfloat16")):
    dtype = lhs.dtype
    narrow = name == "ragged_dot" and dtype.itemsize == 2 and rhs.dtype.name in BITS
    if dtype.name not in takes or rhs.dtype != dtype and not narrow:
        raise TypeError(
            f"{name}: lhs and rhs must have the same dtype, one of {', '.join(takes)}; got"
            f" {lhs.dtype} and {rhs.dtype}"
        )
    by_groups = lhs.ndim == 3 and rhs_ndim == 3 and name == "ragged_dot"
    if not by_groups and lhs.ndim != 2 or rhs.ndim != rhs_ndim:
        raise ValueError(
            f"{name}: lhs must have two dims and rhs {rhs_ndim}, got {lhs.shape} and {rhs.shape}"
        )
    if sizes.dtype != jnp.dtype("int32"):
        raise TypeError(f"{name}: group_sizes must be int32, got {sizes.dtype}")
    if sizes.ndim != 1:
        raise ValueError(f"{name}: group_sizes must have one dim, got shape {sizes.shape}")
    if 0 in (*lhs.shape, *rhs.shape, *sizes.shape):
        raise ValueError(f"{name}: empty operands, {lhs.shape}, {rhs.shape} and {sizes.shape}")
    default = jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype
    out_dtype = dtype_of(name, out_dtype, default)
    if config is not None:
        check = _check_config
        if isinstance(config, _tensor_memory.TensorMemoryConfig):
            check = _ragged_tensor_memory.check
        check(name, config)
    return out_dtype


def _check_config(name, config):
    if not isinstance(config, RaggedConfig):
        raise TypeError(f"{name}: config must be a RaggedConfig, got {config!r}")
    c = config
    if (
        c.consumers not in (1, 2)
        or c.tile not in (64, 128, 192, 256)
        or c.cluster not in (1, 2)
        or c.stages < 0
        or c.buffers < 1
        or c.group < 1
    ):
        raise ValueError(
            f"{name}: a RaggedConfig has 1 or 2 consumers, a tile of 64, 128, 192 or 256, a"
            f" cluster of 1 or 2, stages from 0, buffers and a group from 1; got {config}"
        )


def _make(name, kernel, plan, x, config, sms, operands, interpret, scales=()):
    """The kernel of a call, or a _padding.Padded. plan: its class. scales: kernels that copy."""
    if config.stages == 1 or plan(x, config, sms).stages < 2:
        raise ValueError(
            f"{name}: the ring needs two slots, which {config} does not ask for or which do not fit"
            f" into SMEM with {_sizes.most(x.groups)} groups"
        )
    pads = _pads(x, operands, interpret)
    return with_padding(kernel(x, config, sms, interpret), [*pads, None, *scales])


def _pads(x, operands, interpret):
    """The kernels that copy operands to longer rows, None for none."""
    by_rows = isinstance(x.m, plgpu.Dim)
    with together(False) if by_rows else contextlib.nullcontext():  # copies take no longer
        return [padding_of(y, interpret, by_rows) for y in operands]


def _open(x, operands, interpret, transposed=False, config=None, scales=()):
    """The product, perhaps with rows and groups that are sizes of the call. Its configuration is
    that of the numbers themselves, one of a few, each with programs of its own; or `config`."""
    lhs, rhs = operands
    if x.m > ANY_ROWS[-1]:
        return x
    edges = tuple(sorted({*GROUPS, min(_cached_groups(x), GROUPS[-1])})) if transposed else GROUPS
    one_number = x.groups > edges[-1]  # of groups
    copied = tuple(needs_padding(y, any_rows=True) for y in (*operands, *scales))
    kind = x._replace(m=0, groups=x.groups if one_number else 0), lhs.device, interpret, transposed
    kind = *kind, copied, config
    if is_static(kind, (x.m, x.groups)):
        return x
    if not one_number:
        x = x._replace(groups=bucket_of("G", x.groups, edges)[0])
    return x._replace(m=bucket_of("M", x.m, ANY_ROWS)[0])


def _narrow(lhs, rhs, scale_lhs, scale_rhs, transposed):
    """Of a Product of matrices of 8 or 4 bits: weights, dtype and number of scales."""
    if rhs.dtype == lhs.dtype:
        return ()
    if scale_lhs is not None:
        raise ValueError("ragged_dot: scale_lhs is for 8-bit lhs")
    count = _ragged_mixed.check(lhs, rhs, scale_rhs, transposed)
    return rhs.dtype, None if scale_rhs is None else scale_rhs.dtype, count


def _check_scales(lhs, rhs, scale_lhs, scale_rhs, transposed):
    """Are there scales of blocks?"""
    fp8 = lhs.dtype.name in FP8
    if not fp8 and (scale_lhs is not None or scale_rhs is not None):
        raise ValueError(f"ragged_dot: scales are for 8-bit floats, lhs is {lhs.dtype}")
    if not fp8:
        return False
    if not transposed:
        raise NotImplementedError(
            "ragged_dot: 8-bit floats need the matrices as (G, N, K) and transpose_rhs=True"
        )
    if (scale_lhs is None) != (scale_rhs is None):
        got = "scale_rhs" if scale_lhs is None else "scale_lhs"
        raise ValueError(
            "ragged_dot: scale_lhs and scale_rhs must both be given or neither, got"
            f" {got} alone; pass an array of ones for the other"
        )
    if scale_lhs is None:
        return False
    blocks = pl.cdiv(lhs.shape[-1], BLOCK)
    groups, n = rhs.shape[:2]
    wanted = (*lhs.shape[:-1], blocks), (groups, pl.cdiv(n, BLOCK), blocks)
    for what, scale, shape in zip(("lhs", "rhs"), (scale_lhs, scale_rhs), wanted):
        if scale.dtype.name != "float32":
            raise TypeError(f"ragged_dot: scale_{what} must be float32, got {scale.dtype}")
        if scale.shape != shape:
            raise ValueError(
                f"ragged_dot: scale_{what} must have the shape {shape}, got {scale.shape}"
            )
    return True


@plgpu.specialize(in_place=False)
@better
def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    *,
    transpose_rhs=False,
    scale_lhs=None,
    scale_rhs=None,
    out_dtype=None,
    config=None,
    interpret=None,
):
    """``lhs[rows of group g] @ rhs[g]`` for each g, with float32 accumulation (Hopper, Blackwell).

    lhs: (M, K); rhs: (G, K, N), or (G, N, K) with ``transpose_rhs``; float16 or bfloat16, on Hopper
    with ``transpose_rhs`` also both float8_e4m3fn or both float8_e5m2, or weights of int8, int4,
    float8_e4m3fn or float8_e5m2 beside 16-bit rows, K a multiple of 64; row-major, other extents
    any. group_sizes: (G,) int32, on the device: the first group_sizes[0] rows of ``lhs`` are group
    0, the next ones group 1 and so on. Sizes may be 0; negative ones count as 0, and no group
    reaches beyond M. Rows of no group give zeros.

    Or, on Hopper, lhs: (G, R, K): each group has an array of its own, of which the first
    group_sizes[g] rows are multiplied; what the result (G, R, N) has beyond them is undefined.

    scale_lhs, scale_rhs: of 8-bit floats, float32 arrays of the shapes (M, ceil(K / 128)) or
    (G, R, ceil(K / 128)), and (G, ceil(N / 128), ceil(K / 128)): a number for a row of lhs and 128
    elements of K, and for 128 columns and 128 of K. Neither: ones. scale_rhs of weights beside
    16-bit rows: (G, S, N) of a float dtype, element (g, s, n) for the elements s * K // S to
    (s + 1) * K // S of column n, a multiple of 64 if S > 1.

    out_dtype: float16, bfloat16 or float32; that of ``lhs`` by default, for 8-bit floats bfloat16.
    config: a :class:`RaggedConfig`, on Blackwell a :class:`TensorMemoryConfig` without pair and
    dynamic; chosen from the shape by default. out: a preallocated result.

    Returns (M, N) or (G, R, N) of the caller's kind of array. TypeError, ValueError for other
    dtypes and shapes, NotImplementedError for what other GPUs lack.
    """
    takes = ("float16", "bfloat16", *FP8)
    out_dtype = _check("ragged_dot", lhs, rhs, 3, group_sizes, out_dtype, config, takes)
    k, groups = lhs.shape[-1], rhs.shape[0]
    n, k2 = rhs.shape[1:] if transpose_rhs else rhs.shape[:0:-1]
    if k != k2:
        shapes = f"lhs is {lhs.shape}, rhs {rhs.shape}"
        raise ValueError(f"ragged_dot: the inner dims differ, {k} and {k2}: {shapes}")
    if group_sizes.shape != (groups,):
        raise ValueError(
            f"ragged_dot: group_sizes must have the shape ({groups},), got {group_sizes.shape}"
        )
    each = lhs.shape[1] if lhs.ndim == 3 else 0
    if each and lhs.shape[0] != groups:
        raise ValueError(f"ragged_dot: lhs has arrays of {lhs.shape[0]} groups, rhs of {groups}")
    narrow = _narrow(lhs, rhs, scale_lhs, scale_rhs, transpose_rhs)
    scaled = not narrow and _check_scales(lhs, rhs, scale_lhs, scale_rhs, transpose_rhs)
    if config is None:
        _warp_mma.refuse("ragged_dot", lhs.device, "use ops.matmul for each group")
    sms, m = plgpu.sm_count(lhs.device), math.prod(lhs.shape[:-1])
    x = Product(m, n, k, groups, lhs.dtype, out_dtype, bool(transpose_rhs), each, scaled, *narrow)
    on_blackwell = config is None and _tensor_memory.runs_here(lhs.device)
    if on_blackwell or isinstance(config, _tensor_memory.TensorMemoryConfig):
        if each or narrow or lhs.dtype.name in FP8:
            raise NotImplementedError(
                "ragged_dot: 8-bit floats and arrays of each group, and weights of 8 or 4 bits, on"
                " Blackwell; use ops.matmul or ops.mixed_matmul for each group"
            )
        if config is None:
            x, config = _open(x, (lhs, rhs), interpret), _ragged_tensor_memory.choose(n)
        kernel = _ragged_tensor_memory.kernel(x, config, sms, interpret)
        return with_padding(kernel, [*_pads(x, (lhs, rhs), interpret), None])
    of_weights = [scale_rhs] if narrow and scale_rhs is not None else []
    x = x if each else _open(x, (lhs, rhs), interpret, False, config, of_weights)
    if config is None:
        config = choose(m, n, groups, sms)
        if scaled:
            config = config._replace(tile=min(config.tile, BLOCK))
        if narrow:
            config = config._replace(tile=_ragged_mixed.rows_of_tile(m / groups), cluster=1)
    if scaled and config.tile > BLOCK:
        raise ValueError(f"ragged_dot: with scales a tile has up to {BLOCK} rows, got {config}")
    scales = []
    if scaled:
        how = scale_lhs.shape[-1], scale_lhs.aligned, interpret
        scales = [scales_by_steps(x.m, *how), None]
    elif of_weights:
        scales = _pads(x, of_weights, interpret)
    operands = lhs, rhs
    return _make("ragged_dot", _dot_kernel, _DotPlan, x, config, sms, operands, interpret, scales)


@plgpu.specialize(in_place=False)
@better
def transposed_ragged_dot(lhs, rhs, group_sizes, *, out_dtype=None, config=None, interpret=None):
    """``lhs[rows of group g].T @ rhs[rows of group g]`` for each g, with float32 accumulation
    (Hopper, Blackwell): the gradient of :func:`ragged_dot` with respect to its matrices.

    lhs: (M, K); rhs: (M, N); float16 or bfloat16, row-major, any extents. group_sizes: (G,) int32,
    on the device, as for :func:`ragged_dot`; groups without rows give zeros, rows of no group are
    left out. out_dtype: float16, bfloat16 or float32; that of ``lhs`` by default. config: a
    :class:`RaggedConfig`, on Blackwell a :class:`TensorMemoryConfig` without pair and dynamic;
    chosen from the shape by default. out: a preallocated result.

    Returns (G, K, N) of the caller's kind of array. TypeError, ValueError for other dtypes and
    shapes.
    """
    name = "transposed_ragged_dot"
    out_dtype = _check(name, lhs, rhs, 2, group_sizes, out_dtype, config)
    (m, k), (m2, n), groups = lhs.shape, rhs.shape, group_sizes.shape[0]
    if m != m2:
        raise ValueError(f"{name}: lhs and rhs must have the same rows, got {m} and {m2}")
    if config is None:
        instead = "use ops.matmul for each group, with transpose_a=True"
        _warp_mma.refuse(name, lhs.device, instead)
    sms = plgpu.sm_count(lhs.device)
    x = Product(m, n, k, groups, lhs.dtype, out_dtype)
    on_blackwell = config is None and _tensor_memory.runs_here(lhs.device)
    if on_blackwell or isinstance(config, _tensor_memory.TensorMemoryConfig):
        if config is None:
            x, config = _open(x, (lhs, rhs), interpret, True), _ragged_tensor_memory.choose(n)
        kernel = _ragged_tensor_memory.kernel(x, config, sms, interpret, transposed=True)
        return with_padding(kernel, [*_pads(x, (lhs, rhs), interpret), None])
    x = _open(x, (lhs, rhs), interpret, True, config)
    config = config or choose_transposed(n, k, groups, sms)
    return _make(name, _sum_kernel, _SumPlan, x, config, sms, (lhs, rhs), interpret)
