"""Grouped matrix products on Hopper's tensor cores: the rows of an array come in groups of sizes
that only the GPU knows.

Both kernels are built as `matmul`: persistent blocks, whose last thread fetches into a ring by TMA
and whose other threads, the consumers, own 64 rows or columns of the tile each. At the start every
block makes a table of where groups begin; whatever the sizes are, what is read and written lies in
the arrays.

`ragged_dot` multiplies each group of rows with a matrix of its own. The tensor cores take the
matrix as their left operand, of which they multiply 64 columns at a time, and the rows as the right
one, of which they multiply any number; so a tile is as narrow as its group asks for, in steps of an
eighth, and the result is transposed on its way into SMEM. Tiles begin where a group does and share
its rows evenly, and what is stored ends where the group ends: in boxes of TMA, whose rows are
powers of two. Narrow tiles take less time, so blocks soon do not work in step; a counter hands the
tiles out, and those that multiply with the same columns still begin nearly at once and find them in
the L2. With a fixed share for every block they drift apart, and the memory sends the matrices
several times. The blocks of a cluster lie side by side and share the rows.

`transposed_ragged_dot` sums over the rows of a group. Its last 1 to 32 rows (all 0 of an empty one)
lie in a slot of their own, the edge, where rows of the next group come too; the thread that fetches
overwrites those with zeros. It is multiplied first: its slot is free for the next tile during most
of this one, every tile has one, and its product is what an accumulator begins with, not zeros.
Groups of few hundred rows make more bytes of result than of operands: a tile is kept in 16 bits and
stored, half by half, while the next one is multiplied, by one consumer when the other does not. The
blocks of a cluster lie one above the other and share the right operand."""

import functools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES as _SMEM
from ._common import swizzled as _swizzled
from ._padding import Padded as _Padded
from ._padding import needs_padding as _needs_padding
from ._padding import padding as _padding
from ._ring import Ring, for_told, hand_out, roles, store_chunk, told_scratch

_STEP = 64  # elements of the summed dim in a slot
# Rows of a group in a slot of sums. With half a _STEP the slot for the edge takes half of the room:
# beside tiles of 256 columns the ring holds 224 rows instead of 192.
_SUM_STEP = 32
_GRAIN = 16  # of those that one instruction of the tensor cores sums
_CACHE = 64 << 20  # bytes; a larger result does not stay in the L2 until somebody reads it
_EARLY = 3  # steps that are fetched before the rest of the edge is overwritten


class RaggedConfig(NamedTuple):
    """How a grouped product is tiled.

    ``consumers``: threads that multiply, 1 or 2, 64 columns of a tile each, or 64 rows for
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
    """Numbers that follow from a shape and a configuration; `edge`: sums over groups, with a slot
    for the edge."""

    def __init__(self, groups, out_bytes, cfg, edge):
        self.step = _SUM_STEP if edge else _STEP
        wide = 64 * cfg.consumers
        # A tile in 16 bits is stored under the next one: registers have room for it, and one wide
        # store costs the products less than two.
        self.late = edge and out_bytes == 2
        width, most = (256, 1) if self.late else (128, cfg.buffers)
        self.chunk = math.gcd(width // out_bytes, cfg.tile)  # a store buffer's part of the tile
        self.chunks = cfg.tile // self.chunk
        self.buffers = max(b for b in range(1, most + 1) if self.chunks % b == 0)
        used = cfg.consumers * self.buffers * 64 * self.chunk * out_bytes
        used += 8 * (groups + 1) + 1024
        slot = (wide + cfg.tile) * self.step * 2
        most = min((_SMEM - used) // slot - edge, 512 // self.step)
        self.stages = min(cfg.stages or most, most)
        # more accumulators than an even share of the registers has room for
        self.registers = (40, 232) if cfg.consumers > 1 and cfg.tile > 128 else None


def _make_table(sizes, table, m, rows):
    """The first row of each group, and the number of row tiles before it; an entry more for the
    end. No group reaches beyond the array, whatever the sizes are."""
    groups = sizes.shape[0]
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes[...], 0, m)), m)
    table[0, 0], table[1, 0] = 0, 0
    table[0, pl.ds(1, groups)] = ends
    starts = table[0, pl.ds(0, groups)]
    table[1, pl.ds(1, groups)] = jnp.cumsum((ends - starts + (rows - 1)) // rows)


def _place(t, tiles_m, tiles_n, band):
    """Tile number t as row and column of tiles: bands of rows, column by column."""
    if isinstance(tiles_m, int) and tiles_m <= band:
        return t % tiles_m, t // tiles_m
    number, inside = t // (band * tiles_n), t % (band * tiles_n)
    height = jnp.maximum(jnp.minimum(tiles_m - number * band, band), 1)
    return number * band + lax.rem(inside, height), lax.div(inside, height)


def _widths(rows):
    """What tiles of up to that many rows may measure. Each costs time to compile. Above the half,
    where most tiles are, there are as many as keep small what is multiplied for nothing; below, the
    matrix takes longer to come than to multiply."""
    grain = 8 * pl.cdiv(rows, 128)  # the instruction takes multiples of 8
    return [rows // 4, *range(rows // 2, rows + 1, grain)]


def _to_and_fro(s, steps, w):
    """Every second tile goes backwards: the end of what it shares is still in the L2."""
    return lax.select(w % 2 == 1, steps - 1 - s, s)


def _scratch(p, cfg, groups, a_tile, b_tile, dtype, out_dtype, edge):
    """Scratch types by name."""
    tiled = _swizzled(64, dtype)
    slots = {"num_barriers": p.stages}
    part = (64, p.chunk) if edge else (p.chunk, 64)
    if cfg.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=cfg.consumers, **slots)
    else:
        empty = plgpu.Barrier(num_arrivals=cfg.consumers, **slots)
    found = {
        "a_smem": plgpu.SMEM((p.stages, *a_tile), dtype, transforms=tiled),
        "b_smem": plgpu.SMEM((p.stages, *b_tile), dtype, transforms=tiled),
        "o_smem": plgpu.SMEM(
            (cfg.consumers, p.buffers, *part),
            out_dtype,
            transforms=_swizzled(min(part[1], 128 // out_dtype.itemsize), out_dtype),
        ),
        "table": plgpu.SMEM((2, groups + 1), jnp.int32),
        "table_ready": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=2, **slots),
        "empty": empty,
    }
    if edge:
        found |= {
            "a_edge": plgpu.SMEM(a_tile, dtype, transforms=tiled),
            "b_edge": plgpu.SMEM(b_tile, dtype, transforms=tiled),
            "edge_loaded": plgpu.Barrier(num_arrivals=2),
            "edge_full": plgpu.Barrier(),
            "edge_empty": plgpu.Barrier(num_arrivals=cfg.consumers),
        }
    return found


def _begin(sizes, table, table_ready, m, rows):
    """What all threads of a block begin with."""
    # the next kernel may begin; nothing is touched before the kernels before are done
    plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        _make_table(sizes, table, m, rows)
        plgpu.barrier_arrive(table_ready)

    plgpu.barrier_wait(table_ready)


def _launch(cfg, clusters):
    """Options of the kernel."""
    return dict(
        grid=(clusters,),
        grid_names=("tile",),
        cluster=(cfg.cluster,) if cfg.cluster > 1 else (),
        cluster_names=("c",) if cfg.cluster > 1 else (),
        num_threads=cfg.consumers + 1,
        thread_name="wg",
    )


# ---- a matrix for each group ---------------------------------------------------------------------


@cached
def _grouped(m, n, k, groups, dtype, out_dtype, tb, cfg, sms, interpret):
    p = _Plan(groups, out_dtype.itemsize, cfg, False)
    rows, cols = cfg.tile, 64 * cfg.consumers  # rows: at most
    widths = _widths(rows)
    grain = math.gcd(*widths)
    fetched = [rows // 4 * quarter for quarter in (1, 2, 3, 4)]
    steps = pl.cdiv(k, _STEP)
    shared = cfg.cluster > 1
    axes = "c" if shared else None
    tiles_n = pl.cdiv(n, cols * cfg.cluster)
    clusters = min(max(sms // cfg.cluster, 1), (pl.cdiv(m, rows) + groups) * tiles_n)
    by_tma = m == 1 or n * out_dtype.itemsize % 16 == 0  # the result
    engine = None if by_tma else "lanes"
    width = min(n, 2048)  # of what is zeroed at a time

    def body(a, b, sizes, o, *, a_smem, b_smem, o_smem, table, table_ready, full, empty, told):
        _begin(sizes, table, table_ready, m, rows)
        ring = Ring(p.stages, a_smem, b_smem, full, empty)
        cid = lax.axis_index("tile")
        rank = lax.axis_index("c") if shared else 0
        total = table[1, groups] * tiles_n

        def handed(work):
            """work(group, first row, rows, first column, steps before) for what a counter hands
            out: a tile number of all, the group of the one before and the steps before."""

            def one(t, carry):
                g, it = carry
                g = lax.while_loop(lambda g: table[1, g + 1] * tiles_n <= t, lambda g: g + 1, g)
                start = jnp.clip(table[0, g], 0, m)
                size = jnp.maximum(table[0, g + 1] - start, 0)
                count = (size + (rows - 1)) // rows
                i, j = _place(t - jnp.maximum(table[1, g], 0) * tiles_n, count, tiles_n, cfg.group)
                # tiles of one height: they keep in step, and find in the L2 what they share
                share = lax.div(size + (count * grain - 1), count * grain) * grain
                row = i * share
                height = jnp.minimum(share, size - row)
                work(g, start + row, height, (j * cfg.cluster + rank) * cols, it)
                return g, it + steps

            return one

        start = jnp.int32(0), jnp.int32(0)

        def fetch():
            def tile(g, row, height, col, it):
                def copy(s, a_slot, b_slot, barrier):
                    w = col // (cols * cfg.cluster)
                    along_k = pl.ds(_to_and_fro(s, steps, w) * _STEP, _STEP)
                    along_n = pl.ds(col, cols)

                    def rows_of_a(count):
                        plgpu.copy_gmem_to_smem(
                            a.at[pl.ds(row, count), along_k],
                            a_slot.at[pl.ds(0, count)],
                            barrier,
                            collective_axes=axes,
                        )

                    # a narrow tile is limited by what comes in
                    for less, count in zip((0, *fetched), fetched):
                        fits = (height > less) & (height <= count)
                        pl.when(fits)(functools.partial(rows_of_a, count))
                    at = (along_n, along_k) if tb else (along_k, along_n)
                    plgpu.copy_gmem_to_smem(b.at[(g, *at)], b_slot, barrier)

                ring.fetch(0, steps, ring.at(it), copy)

            it = hand_out(told, cid, clusters, total, handed(tile), start, some=False, rank=rank)[1]
            ring.drain(it)

        def consume(me):
            def product(height, it):
                which = sum((height > w).astype(jnp.int32) for w in widths[:-1])

                def with_sums(acc):
                    def of_width(count):
                        part = pl.ds(0, count)

                        def factors(a_slot, b_slot):
                            mine = pl.ds(me * 64, 64)
                            left = b_slot.at[mine] if tb else b_slot.at[:, mine].T
                            return left, a_slot.at[part].T

                        return ring.multiply(acc.at[:, part], steps, ring.at(it), factors)[2]

                    last = lax.switch(which, [functools.partial(of_width, w) for w in widths])
                    value = acc[...]
                    ring.release(last)
                    return value

                return pl.run_scoped(with_sums, plgpu.ACC((64, rows)))

            def send(buffer, row, col, count):
                plgpu.copy_smem_to_gmem(
                    buffer, o.at[pl.ds(row, count), pl.ds(col, 64)], engine=engine
                )

            def tile(g, row, height, col, it):
                col += me * 64
                value = product(height, it)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for c in range(p.chunks):

                    @pl.when(height > c * p.chunk)
                    def _(c=c):
                        buffer = o_smem.at[me, c % p.buffers]
                        if c >= p.buffers:
                            plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
                        part = value[:, c * p.chunk : (c + 1) * p.chunk]
                        buffer.T[...] = part.astype(out_dtype)
                        plgpu.commit_smem()

                        @pl.when(height >= (c + 1) * p.chunk)
                        def _():
                            send(buffer, row + c * p.chunk, col, p.chunk)

                # the rest in boxes of as many rows as its number has bits
                c = height // p.chunk
                count = p.chunk // 2
                while count:

                    @pl.when(height & count != 0)
                    def _(count=count):
                        done = height % p.chunk // (2 * count) * (2 * count)
                        buffer = o_smem.at[me, c % p.buffers, pl.ds(done, count)]
                        send(buffer, row + c * p.chunk + done, col, count)

                    count //= 2

            for_told(told, total, handed(tile), start)
            # rows of no group
            first = jnp.clip(table[0, groups], 0, m)
            first += (cid * cfg.cluster + rank) * cfg.consumers + me
            stride = clusters * cfg.cluster * cfg.consumers

            def zero_row(i, _):
                def zero(c, _):
                    at = jnp.minimum(c * width, n - width)
                    o[first + i * stride, pl.ds(at, width)] = jnp.zeros((width,), out_dtype)

                lax.fori_loop(0, pl.cdiv(n, width), zero, None)

            lax.fori_loop(0, (jnp.maximum(m - first, 0) + stride - 1) // stride, zero_row, None)

        roles(cfg.consumers, p.registers, fetch, consume)

    b_tile = (cols, _STEP) if tb else (_STEP, cols)
    scratch = _scratch(p, cfg, groups, (rows, _STEP), b_tile, dtype, out_dtype, edge=False)
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=scratch | {"told": told_scratch(cfg.consumers, axes=axes)},
        interpret=interpret,
        kernel_name="ragged_dot",
        **_launch(cfg, clusters),
    )


# ---- a sum for each group ------------------------------------------------------------------------


@cached
def _summed(m, n, k, groups, dtype, out_dtype, cfg, sms, interpret):
    """[m, k], [m, n] -> [groups, k, n]."""
    p = _Plan(groups, out_dtype.itemsize, cfg, True)
    rows, cols, step = 64 * cfg.consumers, cfg.tile, p.step
    shared = cfg.cluster > 1
    tiles_m, tiles_n = pl.cdiv(k, rows * cfg.cluster), pl.cdiv(n, cols)
    tiles = tiles_m * tiles_n  # of a group
    clusters = min(max(sms // cfg.cluster, 1), groups * tiles)
    by_tma = groups * k == 1 or n * out_dtype.itemsize % 16 == 0  # the result
    engine = None if by_tma else "lanes"
    large = groups * k * n * out_dtype.itemsize > _CACHE

    def body(
        a,
        b,
        sizes,
        o,
        *,
        a_smem,
        b_smem,
        o_smem,
        table,
        table_ready,
        full,
        empty,
        a_edge,
        b_edge,
        edge_loaded,
        edge_full,
        edge_empty,
    ):
        _begin(sizes, table, table_ready, m, step)
        ring = Ring(p.stages, a_smem, b_smem, full, empty)
        cid = lax.axis_index("tile")
        rank = lax.axis_index("c") if shared else 0

        def place(w):
            """Of this cluster's tile number w: group, row and column of tiles, first row of the
            group, its size, its steps. A step is `step` rows of the group, what is left is the
            edge: up to `step` rows."""
            t = jnp.minimum(cid + w * clusters, groups * tiles - 1)  # also behind the last one
            g = t // tiles
            i, j = _place(t % tiles, tiles_m, tiles_n, cfg.group)
            start = jnp.clip(table[0, g], 0, m)
            size = jnp.maximum(table[0, g + 1] - start, 0)
            return g, i * cfg.cluster + rank, j, start, size, jnp.maximum(size - 1, 0) // step

        trips = (groups * tiles - cid + (clusters - 1)) // clusters  # tiles of this cluster

        def for_tiles(work, kept):
            """at, following, kept = work(number, place, slot and turn, following, kept) for each of
            this cluster's tiles; slot and turn behind them, kept. following(): the place of the
            next tile, which work asks for when nobody waits for it."""

            def one(w, carry):
                at, (g, i, j, *group), kept = carry
                here = g, i * rows, j * cols, *group  # known to be multiples
                return work(w, here, at, lambda: place(w + 1), kept)

            at, _, kept = lax.fori_loop(0, trips, one, (ring.at(jnp.int32(0)), place(0), kept))
            return at, kept

        def fetch():
            def tile(w, here, at, following, _):
                _, row, col, start, size, steps = here

                def copy(s, a_slot, b_slot, barrier, axis=None):
                    along = pl.ds(start + s * step, step)
                    plgpu.copy_gmem_to_smem(a.at[along, pl.ds(row, rows)], a_slot, barrier)
                    plgpu.copy_gmem_to_smem(
                        b.at[along, pl.ds(col, cols)], b_slot, barrier, collective_axes=axis
                    )

                def one(s, *where):
                    copy(_to_and_fro(s, steps, w), *where, axis="c" if shared else None)

                @pl.when(w > 0)
                def _():
                    plgpu.barrier_wait(edge_empty, phase=w - 1)

                # not shared: releases of slots that plain stores reach would need fences
                copy(steps, a_edge, b_edge, edge_loaded)
                # the edge comes while slots become free
                early = jnp.minimum(steps, min(_EARLY, p.stages))
                at = ring.fetch(0, early, at, one)
                plgpu.barrier_wait(edge_loaded, phase=w)
                left = size - steps * step

                def zero(i, _):
                    for ref in (a_edge, b_edge):
                        zeros = jnp.zeros((8, ref.shape[1]), dtype)
                        at = lax.broadcasted_iota(jnp.int32, zeros.shape, 0)
                        pl.store(
                            ref, (pl.ds(i * 8, 8), slice(None)), zeros, mask=at >= left - i * 8
                        )

                used = jnp.maximum((left + (_GRAIN - 1)) // _GRAIN * _GRAIN, _GRAIN)
                lax.fori_loop(left // 8, used // 8, zero, None)
                plgpu.commit_smem()
                plgpu.barrier_arrive(edge_full)
                return ring.fetch(early, steps, at, one), following(), None

            (slot, turn), _ = for_tiles(tile, None)
            ring.drain(turn * p.stages + slot)
            plgpu.barrier_wait(edge_empty, phase=trips - 1)

        def consume(me):
            def factors(a_slot, b_slot):
                return a_slot.at[:, pl.ds(me * 64, 64)].T, b_slot

            def put(c, kept):
                """Stores chunk c of the tile that was kept."""
                value, g, row, col = kept
                part = value[:, c * p.chunk : (c + 1) * p.chunk]
                col = pl.multiple_of(col, p.chunk) + c * p.chunk  # it went round a loop
                at = (g, pl.ds(row, 64), pl.ds(col, p.chunk))
                store_chunk(p, part, o_smem.at[me, c % p.buffers], o.at[at], engine, large)

            def put_any(c, kept):
                for i in range(p.chunks):
                    pl.when(c == i)(lambda i=i: put(i, kept))

            def tile(w, here, at, following, kept):
                g, row, col, _, size, steps = here
                apart = jnp.maximum(steps // p.chunks, 1)  # from store to store

                def beside(s, carry):
                    """A store, if it is time."""
                    if not p.late:
                        return carry
                    c, due_at = carry
                    due = s == due_at
                    pl.when(due)(lambda: put_any(c, kept))
                    return c + due.astype(jnp.int32), due_at + lax.select(due, apart, 0)

                def release_edge():
                    plgpu.barrier_arrive(edge_empty)

                def product(acc):
                    plgpu.barrier_wait(edge_full, phase=w)
                    for i in range(0, step, _GRAIN):

                        def grain(i=i):
                            part = pl.ds(i, _GRAIN)
                            plgpu.wgmma(acc, *factors(a_edge.at[part], b_edge.at[part]))

                        grain() if i == 0 else pl.when(size - steps * step > i)(grain)
                    # the chunk of the tile before that is stored next, and the step for it
                    begun = lax.select(w > 0, jnp.int32(0), p.chunks), 1 + apart // 2 * me
                    begun, at_end, last = ring.multiply(
                        acc, steps, at, factors, beside, begun, release_edge
                    )
                    then = following()  # while the last product runs
                    if p.late:
                        lax.fori_loop(begun[0], p.chunks, lambda c, _: put_any(c, kept), None)
                    value = acc[...]
                    pl.when(steps > 0)(lambda: ring.release(last))
                    pl.when(steps == 0)(release_edge)
                    return value.astype(out_dtype), at_end, then

                value, at, then = pl.run_scoped(product, plgpu.ACC((64, cols)))
                new = value, g, row + me * 64, col
                if p.late:
                    return at, then, new
                for c in range(p.chunks):
                    put(c, new)
                return at, then, kept

            if p.late:
                zero = jnp.int32(0)
                kept = jnp.zeros((64, cols), out_dtype), zero, zero, zero
                kept = for_tiles(tile, kept)[1]
                lax.fori_loop(0, p.chunks, lambda c, _: put_any(c, kept), None)
            else:
                for_tiles(tile, None)

        roles(cfg.consumers, p.registers, fetch, consume)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((groups, k, n), out_dtype),
        scratch_types=_scratch(
            p, cfg, groups, (step, rows), (step, cols), dtype, out_dtype, edge=True
        ),
        interpret=interpret,
        kernel_name="transposed_ragged_dot",
        **_launch(cfg, clusters),
    )


# ---- the choice ---------------------------------------------------------------------------------


def _fitting(extent, tiles, sms):
    """How far a tile extends: no further than needed, and as leaves two tiles for every SM.
    tiles(w): how many there are."""
    return next((w for w in (256, 128, 64) if w < 2 * extent and tiles(w) >= 2 * sms), 64)


def _paired(tiles):
    """The cluster: two blocks, unless one of them would often have nothing to do."""
    return 2 if tiles % 2 == 0 or tiles > 16 else 1


def choose(m, n, groups, sms=132):
    """The configuration of ragged_dot for a shape, on a GPU with that many SMs."""
    consumers = 2 if n > 64 else 1
    columns = pl.cdiv(n, 64 * consumers)
    # twice the mean: groups may be uneven
    tile = _fitting(2 * m / groups, lambda w: (m / w + groups / 2) * columns, sms)
    return RaggedConfig(consumers, tile, 0, _paired(columns), 2, 16)


def choose_transposed(n, k, groups, sms=132):
    """The configuration of transposed_ragged_dot."""
    consumers = 2 if k > 64 else 1
    tiles = pl.cdiv(k, 64 * consumers)
    tile = _fitting(n, lambda w: groups * tiles * (n / w), sms)
    return RaggedConfig(consumers, tile, 0, _paired(tiles), 2, 16)


# ---- the functions ------------------------------------------------------------------------------


def _check(name, lhs, rhs, rhs_ndim, sizes, out_dtype, config):
    dtype = lhs.dtype
    if dtype.name not in ("float16", "bfloat16") or rhs.dtype != dtype:
        raise TypeError(
            f"{name}: lhs and rhs must both be float16 or bfloat16, got {lhs.dtype} and {rhs.dtype}"
        )
    if lhs.ndim != 2 or rhs.ndim != rhs_ndim:
        raise ValueError(
            f"{name}: lhs must have two dims and rhs {rhs_ndim}, got {lhs.shape} and {rhs.shape}"
        )
    if sizes.dtype != jnp.dtype("int32"):
        raise TypeError(f"{name}: group_sizes must be int32, got {sizes.dtype}")
    if sizes.ndim != 1:
        raise ValueError(f"{name}: group_sizes must have one dim, got shape {sizes.shape}")
    if 0 in (*lhs.shape, *rhs.shape, *sizes.shape):
        raise ValueError(f"{name}: empty operands, {lhs.shape}, {rhs.shape} and {sizes.shape}")
    out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
    if out_dtype.name not in ("float16", "bfloat16", "float32"):
        raise TypeError(f"{name}: out_dtype must be a float dtype, got {out_dtype}")
    if config is not None:
        _check_config(name, config)
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


def _check_ring(name, groups, out_dtype, config, edge):
    if config.stages == 1 or _Plan(groups, out_dtype.itemsize, config, edge).stages < 2:
        raise ValueError(
            f"{name}: the ring needs two slots, which {config} does not ask for or which do not fit"
            f" into SMEM with {groups} groups"
        )


def _padded(product, operands, sizes, interpret):
    pads = [
        _padding(x.shape, x.dtype, x.aligned, interpret) if _needs_padding(x) else None
        for x in operands
    ]
    return _Padded(product, [*pads, None]) if any(pads) else product


@plgpu.kernel_family(in_place=False)
def ragged_dot(
    lhs, rhs, group_sizes, *, transpose_rhs=False, out_dtype=None, config=None, interpret=None
):
    """``lhs[rows of group g] @ rhs[g]`` for each g, with float32 accumulation (Hopper).

    lhs: (M, K); rhs: (G, K, N), or (G, N, K) with ``transpose_rhs``; float16 or bfloat16,
    row-major, any extents. group_sizes: (G,) int32, on the device: the first group_sizes[0] rows of
    ``lhs`` are group 0, the next ones group 1 and so on. Sizes may be 0; negative ones count as 0,
    and no group reaches beyond M. Rows of no group give zeros. out_dtype: float16, bfloat16 or
    float32; that of ``lhs`` by default. config: a :class:`RaggedConfig`; chosen from the shape by
    default. out: a preallocated result.

    Returns (M, N) of the caller's kind of array. TypeError, ValueError for other dtypes and
    shapes.
    """
    out_dtype = _check("ragged_dot", lhs, rhs, 3, group_sizes, out_dtype, config)
    m, k = lhs.shape
    groups, n, k2 = rhs.shape if transpose_rhs else (rhs.shape[0], *rhs.shape[:0:-1])
    if k != k2:
        raise ValueError(f"ragged_dot: the inner dims differ, {k} and {k2}")
    if group_sizes.shape != (groups,):
        raise ValueError(
            f"ragged_dot: group_sizes must have the shape ({groups},), got {group_sizes.shape}"
        )
    sms = plgpu.core_count(lhs.device)
    config = config or choose(m, n, groups, sms)
    _check_ring("ragged_dot", groups, out_dtype, config, False)
    shape = (m, n, k, groups, lhs.dtype, out_dtype, bool(transpose_rhs), config, sms)
    return _padded(_grouped(*shape, interpret), (lhs, rhs), group_sizes, interpret)


@plgpu.kernel_family(in_place=False)
def transposed_ragged_dot(lhs, rhs, group_sizes, *, out_dtype=None, config=None, interpret=None):
    """``lhs[rows of group g].T @ rhs[rows of group g]`` for each g, with float32 accumulation
    (Hopper): the gradient of :func:`ragged_dot` by its matrices.

    lhs: (M, K); rhs: (M, N); float16 or bfloat16, row-major, any extents. group_sizes: (G,) int32,
    on the device, as for :func:`ragged_dot`; groups without rows give zeros, rows of no group are
    left out. out_dtype: float16, bfloat16 or float32; that of ``lhs`` by default. config: a
    :class:`RaggedConfig`; chosen from the shape by default. out: a preallocated result.

    Returns (G, K, N) of the caller's kind of array. TypeError, ValueError for other dtypes and
    shapes.
    """
    name = "transposed_ragged_dot"
    out_dtype = _check(name, lhs, rhs, 2, group_sizes, out_dtype, config)
    (m, k), (m2, n), groups = lhs.shape, rhs.shape, group_sizes.shape[0]
    if m != m2:
        raise ValueError(f"{name}: lhs and rhs must have the same rows, got {m} and {m2}")
    sms = plgpu.core_count(lhs.device)
    config = config or choose_transposed(n, k, groups, sms)
    _check_ring(name, groups, out_dtype, config, True)
    shape = (m, n, k, groups, lhs.dtype, out_dtype, config, sms)
    return _padded(_summed(*shape, interpret), (lhs, rhs), group_sizes, interpret)
