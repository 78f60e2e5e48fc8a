"""Matrix product on Hopper's tensor cores.

A block works on one tile of the result at a time. Its last thread fetches: a ring of `stages`
slots, each a tile of A and a tile of B, filled by TMA. The other threads, the consumers, own 64
rows each of the tile: per step one product of a slot, then they release it. The blocks of a cluster
share what they have in common: those one above the other the tile of B, those side by side the tile
of A; each fetches a part for all. Large products are done by one persistent block per SM.

Where there are fewer tiles than SMs, `split` blocks of a cluster divide K among them. Each sends
part j of the columns of its sum to block j, through the SMEM of the cluster, and every block adds
up its part, in the order of the blocks: results repeat bit for bit.

The order of a sum over K depends on the tiling: K may be divided, and persistent blocks go through
it backwards for every second tile. Batch-invariant products do neither, whatever their tiles: an
element is then the sum of the same instructions of the tensor cores in the same order.

One or two rows leave the tensor cores idle: another kernel then streams B through SMEM and
multiplies on the lanes. 8-bit floats have their scales, and a pass that turns operands, in
_scaled.py.

Ragged edges need nothing: TMA reads zeros outside and does not write there. Arrays whose rows TMA
cannot address (a pitch that is no multiple of 16 bytes) are first copied to padded rows."""

import functools
import itertools
import math
from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._promises import batch_invariance
from ._scaled import BLOCK, FP8, UNSCALED, Blocks, Epilogue, forms_of, turning

_ACTIVATIONS = {"relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "tanh": nn.tanh}
_FLOATS = ("float16", "bfloat16", "float32")
_SMEM = 232448 - 1024  # bytes of a block that buffers may take


class MatmulConfig(NamedTuple):
    """How a product is tiled.

    ``consumers``: threads that multiply, 64 rows each, 1 to 3. ``tile_n``: columns of a tile, 16,
    32 or a multiple of 64 up to 256, with 3 consumers 128. ``stages``: slots of the ring; 0: as
    many as fit. ``cluster``: blocks of a column of tiles that share B. ``buffers``: store buffers
    per consumer. ``group``: rows of cluster tiles worked on together, for the L2. ``cluster_n``:
    blocks of a row that share A. ``split``: blocks that divide K among them, so that each has a
    multiple of 8 columns; then every tile has a cluster of its own, of up to 8 blocks. ``step``:
    elements of K per slot, 64 or 128, for 8-bit floats also 256. ``lag``: products in flight while
    the next one is issued, 0 or 1; with scales of blocks and up to 128 columns those under way
    while sums are scaled. ``serpentine``: every second tile of a block goes through K backwards,
    and begins with what the L2 still holds.
    """

    consumers: int = 2
    tile_n: int = 256
    stages: int = 0
    cluster: int = 2
    buffers: int = 2
    group: int = 8
    cluster_n: int = 1
    split: int = 1
    step: int = 64
    lag: int = 1
    serpentine: bool = True


class _Plan:
    """Numbers that follow from a shape and a configuration."""

    def __init__(self, m, n, k, out_bytes, cfg, sms, in_bytes=2, along=2):
        """along: bytes of what goes along the columns, bias and scales."""
        self.rows, self.cols = 64 * cfg.consumers, cfg.tile_n
        self.tiles_m = pl.cdiv(m, self.rows * cfg.cluster)
        self.tiles_n = pl.cdiv(n, self.cols * cfg.cluster_n)
        self.total = self.tiles_m * self.tiles_n  # tiles of clusters
        self.cluster = cfg.cluster * cfg.cluster_n * cfg.split
        fit = max(sms // self.cluster, 1)
        self.single = cfg.split > 1 or self.total <= fit  # one tile for each cluster
        self.clusters = self.total if self.single else fit
        self.steps = pl.cdiv(pl.cdiv(k, cfg.step), cfg.split)
        # the result of a block: all columns of the tile, or its part of them
        self.width = self.cols // cfg.split
        self.chunk = math.gcd(128 // out_bytes, self.width)  # columns of a store buffer
        self.chunks = self.width // self.chunk
        self.buffers = max(b for b in range(1, cfg.buffers + 1) if self.chunks % b == 0)
        # rows of sums that are sent, if there are no more
        self.sent = min(64, pl.cdiv(m, 8) * 8) if cfg.consumers == 1 else 64
        used = cfg.consumers * self.buffers * 64 * self.chunk * out_bytes
        used += cfg.consumers * self.cols * along
        if cfg.split > 1:
            used += cfg.consumers * self.sent * (self.cols + self.width) * 4
        slot = (self.rows + self.cols) * cfg.step * in_bytes
        most = min((_SMEM - used) // slot, 12)
        self.stages = min(cfg.stages or most, most)
        if self.single:
            self.stages = min(self.stages, max(self.steps, 2))


def _swizzled(row, dtype):
    """Transforms of a buffer with rows of that many elements; what the tensor cores take."""
    bytes_ = row * dtype.itemsize
    if bytes_ not in (32, 64, 128):
        return ()
    return (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(bytes_))


@cached
def _product(
    m, n, k, dtypes, out_dtype, ta, tb, bias_dtype, activation, cfg, sms, interpret, forms
):
    """dtypes: of a and b. bias_dtype: None without bias. forms: of the scales."""
    has_bias, in_bytes = bias_dtype is not None, dtypes[0].itemsize
    along = 2
    if in_bytes == 1:
        along = (bias_dtype.itemsize if has_bias else 0) + (4 if forms.b == "each" else 0)
    p = _Plan(m, n, k, out_dtype.itemsize, cfg, sms, in_bytes, along)
    rows, cols, step, split, consumers = p.rows, p.cols, cfg.step, cfg.split, cfg.consumers
    group = min(cfg.group, p.tiles_m)
    shared = [a for a, size in (("cm", cfg.cluster), ("cn", cfg.cluster_n)) if size > 1]
    axes = {"cm": cfg.cluster, "cn": cfg.cluster_n, "ck": split}
    axes = {name: size for name, size in axes.items() if size > 1}
    share_a, share_b = ("cn" if "cn" in axes else None), ("cm" if "cm" in axes else None)
    late = bool(cfg.lag)
    if p.stages < 1 + late:
        raise ValueError(f"matmul: {max(p.stages, 0)} slots, {cfg} needs {1 + late} of them")
    by_tma = m == 1 or n * out_dtype.itemsize % 16 == 0  # the result
    # more accumulators than an even share has room for
    registers = None
    if cols > 128 or forms.blocks and cols == 128:
        registers = {2: (40, 232), 3: (32, 160)}.get(consumers)
    row_copies = [has_bias, forms.b == "each"].count(True)  # of what goes along rows

    # parts of a layout for whole rows would need another one beside what goes along rows or columns
    by_chunks = split > 1 and p.sent < 64 and (has_bias or forms.a == "each" or forms.b == "each")

    part = (p.sent, p.width)
    rows_of_lanes = None
    if split > 1 and p.sent * p.width % 512 == 0:
        rows_of_lanes = plgpu.Layout.WG_STRIDED(part, 4)

    def rank(axis):
        return lax.axis_index(axis) if axis in axes else 0

    def origin(t):
        """First row and column of this block's part of cluster tile t."""
        if p.tiles_m == 1:
            row, col = 0, t
        elif group == p.tiles_m:
            row, col = t % group, t // group
        else:
            band, inside = t // (group * p.tiles_n), t % (group * p.tiles_n)
            height = group
            if p.tiles_m % group:
                height = jnp.minimum(p.tiles_m - band * group, group)
            row, col = band * group + inside % height, inside // height
        row = (row * cfg.cluster + rank("cm")) * rows
        return row, (col * cfg.cluster_n + rank("cn")) * cols

    def for_tiles(body):
        """body(t, steps done before) for each of this cluster's tiles; all steps done."""
        cid = lax.axis_index("tile")
        if p.single:
            body(cid, 0)
            return p.steps
        trips = (p.total - cid + (p.clusters - 1)) // p.clusters

        def one(w, it):
            body(cid + w * p.clusters, it)
            return it + p.steps

        return lax.fori_loop(0, trips, one, 0)

    def places(it0):
        """Of the steps of a tile, along K, as a function; steps of all tiles before: it0."""
        if not cfg.serpentine:
            return lambda s: s
        # every second tile backwards: the end of its rows of A is still in the L2
        odd = it0 // p.steps % 2 == 1
        return lambda s: lax.select(odd, p.steps - 1 - s, s)

    def fetch(a, b, a_smem, b_smem, full, empty):
        def tile(t, it0):
            row, col = origin(t)
            k00 = rank("ck") * (p.steps * step)
            place = places(it0)

            def one(s, _):
                it = it0 + s
                slot = it % p.stages
                k0 = k00 + place(s) * step

                @pl.when(it >= p.stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot], phase=it // p.stages - 1)

                at_a = (pl.ds(k0, step), pl.ds(row, rows))
                at_b = (pl.ds(k0, step), pl.ds(col, cols))
                plgpu.copy_gmem_to_smem(
                    a.at[at_a if ta else at_a[::-1]],
                    a_smem.at[slot],
                    full.at[slot],
                    collective_axes=share_a,
                )
                plgpu.copy_gmem_to_smem(
                    b.at[at_b[::-1] if tb else at_b],
                    b_smem.at[slot],
                    full.at[slot],
                    collective_axes=share_b,
                )

            lax.fori_loop(0, p.steps, one, None)

        done = for_tiles(tile)
        for s in range(p.stages):  # every release is waited for, also those of other blocks
            last = (done - s - 1) // p.stages
            pl.when(done > s)(lambda s=s, n=last: plgpu.barrier_wait(empty.at[s], phase=n))

    def multiply(me, it0, under, a_smem, b_smem, full, empty):
        """This consumer's part of the tile, float32 in registers, in a list; and what under()
        returns, which is called under the last product."""

        def product(acc):
            def one(s, _):
                it = it0 + s
                slot = it % p.stages
                plgpu.barrier_wait(full.at[slot], phase=it // p.stages)
                mine = pl.ds(me * 64, 64)
                part = a_smem.at[slot, :, mine].T if ta else a_smem.at[slot, mine]
                plgpu.wgmma(acc, part, b_smem.at[slot].T if tb else b_smem.at[slot])
                plgpu.wgmma_wait(1 if late else 0)
                if late:

                    @pl.when(s > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[(it - 1) % p.stages])
                else:
                    plgpu.barrier_arrive(empty.at[slot])

            lax.fori_loop(0, p.steps, one, None)
            loaded = under and under()
            value = acc[...]
            if late:
                plgpu.barrier_arrive(empty.at[(it0 + (p.steps - 1)) % p.stages])
            return [value], loaded

        return pl.run_scoped(product, plgpu.ACC((64, cols)))

    def multiply_blocks(me, it0, row, col, scales, a_smem, b_smem, full, empty):
        """The same with scales that change along K; in parts of 128 columns if there are more."""
        place = places(it0)  # as they are fetched

        def block_of(s):
            return rank("ck") * p.steps + place(s)

        def slot(s):
            return (it0 + s) % p.stages

        def wait(s):
            plgpu.barrier_wait(full.at[slot(s)], phase=(it0 + s) // p.stages)
            of_b = [b_smem.at[slot(s), pl.ds(j, scales.cols)].T for j in range(0, cols, BLOCK)]
            return a_smem.at[slot(s), pl.ds(me * 64, 64)], of_b

        def release(s):
            plgpu.barrier_arrive(empty.at[slot(s)])

        return scales.sums(p.steps, block_of, row + me * 64, col, wait, release, late)

    def gather(me, value, inbox, outbox, arrived):
        """This block's part of the columns, summed over the blocks that divide K."""
        for j in range(split):
            part = value[: p.sent, j * p.width : (j + 1) * p.width]
            if outbox is not None:  # from pairs of columns to whole rows: fewer, larger packets
                outbox[me] = part
                part = plgpu.load(outbox.at[me], layout=rows_of_lanes)
            plgpu.cluster_ref(inbox, {"ck": j})[me, rank("ck")] = part
        plgpu.barrier_arrive(arrived.at[me])
        plgpu.barrier_wait(arrived.at[me])

        def summed(*columns):
            total = inbox[(me, 0, *columns)]
            for j in range(1, split):
                total = total + inbox[(me, j, *columns)]
            return total

        if by_chunks:
            return [summed(slice(None), pl.ds(c * p.chunk, p.chunk)) for c in range(p.chunks)]
        return [summed()]

    def store(me, values, row, col, o, o_smem, bias_smem, scaled):
        """values: one or more parts of the columns."""
        of_value = p.width // len(values)
        for c in range(p.chunks):
            i, first = divmod(c * p.chunk, of_value)
            part = values[i][:, first : first + p.chunk]
            if scaled is not None:
                part = scaled(c, part)
            if has_bias:
                b_part = bias_smem[me, pl.ds(c * p.chunk, p.chunk)].astype(jnp.float32)
                part = part + lax.broadcast_in_dim(b_part, part.shape, [1])
            if activation is not None:
                part = activation(part)
            height = part.shape[0]
            buffer = o_smem.at[me, c % p.buffers, pl.ds(0, height)]
            if not p.single or c >= p.buffers:
                plgpu.wait_smem_to_gmem(p.buffers - 1, wait_read_only=True)
            buffer[...] = part.astype(out_dtype)
            plgpu.commit_smem()
            where = (pl.ds(row + me * 64, height), pl.ds(col + c * p.chunk, p.chunk))
            plgpu.copy_smem_to_gmem(buffer, o.at[where], engine=None if by_tma else "lanes")

    def body(a, b, *refs):
        bias, refs = (refs[0], refs[1:]) if has_bias else (None, refs)
        scale_a, refs = (refs[0], refs[1:]) if forms.a else (None, refs)
        scale_b, refs = (refs[0], refs[1:]) if forms.b else (None, refs)
        o, a_smem, b_smem, o_smem, bias_smem, cols_smem, inbox, outbox, *refs = refs
        full, empty, row_ready, arrived = refs
        # the next kernel may begin; nothing is touched before the kernels before are done
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        me = lax.axis_index("wg")

        @pl.when(me == consumers)
        def producer():
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")
            fetch(a, b, a_smem, b_smem, full, empty)

        @pl.when(me < consumers)
        def consumer():
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            ring = a_smem, b_smem, full, empty
            scales = epilogue = None
            if forms.blocks:
                reach = p.tiles_n * cfg.cluster_n * cols, p.steps * split * step
                tile_shape = rows * cfg.cluster, cols
                scales = Blocks(scale_a, scale_b, m, tile_shape, reach, consumers)
            elif forms != UNSCALED:
                mine = cols_smem and cols_smem.at[me]
                epilogue = Epilogue(forms, scale_a, scale_b, m, rows * cfg.cluster, mine)

            def tile(t, it):
                row, col = origin(t)
                col_of_block = col + rank("ck") * p.width
                along_row = pl.ds(col_of_block, p.width)
                if has_bias:
                    plgpu.copy_gmem_to_smem(bias.at[along_row], bias_smem.at[me], row_ready.at[me])
                if forms.b == "each":
                    of_columns = scale_b.reshape((scale_b.size,)).at[along_row]
                    plgpu.copy_gmem_to_smem(of_columns, cols_smem.at[me], row_ready.at[me])

                if epilogue:
                    of_rows = pl.ds(row + me * 64, p.sent if split > 1 else 64)

                def load_scales():
                    rows_loaded = epilogue.load_rows(of_rows)
                    if forms.b == "each":
                        plgpu.barrier_wait(row_ready.at[me])
                    return rows_loaded, epilogue.load_columns(p.chunk, p.chunks)

                scaled = None
                if scales:
                    values = multiply_blocks(me, it, row, col, scales, *ring)
                else:
                    values, loaded = multiply(me, it, epilogue and load_scales, *ring)
                    scaled = epilogue and functools.partial(epilogue, loaded)
                if split > 1:
                    values = gather(me, *values, inbox, outbox, arrived)
                if has_bias and forms.b != "each":
                    plgpu.barrier_wait(row_ready.at[me])
                store(me, values, row, col_of_block, o, o_smem, bias_smem, scaled)

            for_tiles(tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    a_tile = (step, rows) if ta else (rows, step)
    b_tile = (cols, step) if tb else (step, cols)
    chunk = min(128 // in_bytes, step)
    # the same for both, as wgmma wants
    tiled = [_swizzled(chunk if tb else min(chunk, cols), dtype) for dtype in dtypes]
    slots = {"num_barriers": p.stages}
    if shared:
        empty = plgpu.ClusterBarrier(collective_axes=shared, num_arrivals=consumers, **slots)
    else:
        empty = plgpu.Barrier(num_arrivals=consumers, **slots)
    sums = (consumers, split, p.sent, p.width)
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[
            plgpu.SMEM((p.stages, *a_tile), dtypes[0], transforms=tiled[0]),
            plgpu.SMEM((p.stages, *b_tile), dtypes[1], transforms=tiled[1]),
            plgpu.SMEM(
                (consumers, p.buffers, 64, p.chunk),
                out_dtype,
                transforms=_swizzled(p.chunk, out_dtype),
            ),
            plgpu.SMEM((consumers, p.width), bias_dtype) if has_bias else None,
            plgpu.SMEM((consumers, p.width), jnp.float32) if forms.b == "each" else None,
            plgpu.SMEM(sums, jnp.float32) if split > 1 else None,
            plgpu.SMEM((consumers, *part), jnp.float32) if rows_of_lanes else None,
            plgpu.Barrier(num_arrivals=2, **slots),
            empty,
            plgpu.Barrier(num_barriers=consumers, num_arrivals=row_copies) if row_copies else None,
            plgpu.ClusterBarrier(collective_axes=("ck",), num_barriers=consumers)
            if split > 1
            else None,
        ],
        grid=(p.clusters,),
        grid_names=("tile",),
        cluster=tuple(axes.values()),
        cluster_names=tuple(axes),
        num_threads=consumers + 1,
        thread_name="wg",
        interpret=interpret,
        kernel_name="matmul",
    )


# ---- few rows ------------------------------------------------------------------------------------


class FewRowsConfig(NamedTuple):
    """How a product of up to 8 rows is done: the memory is the limit, tensor cores would idle.

    ``tile_n``: columns of a block: 64, 128 or 256, with ``transpose_b`` a multiple of 4. ``split``:
    blocks of a cluster that divide K. ``stages``: slots of the ring. ``step``: elements of K per
    slot, with ``transpose_b`` 256.
    """

    tile_n: int = 128
    split: int = 8
    stages: int = 4
    step: int = 64


@cached
def _few_rows(m, n, k, dtype, out_dtype, ta, tb, has_bias, activation, cfg, interpret):
    """Kernel for m <= 8. One thread per block, several blocks per SM, each with its own ring.

    B streams through SMEM once. Lanes hold 8 neighbours of B and add up products in float32; the
    lanes' sums meet in the end, then those of the blocks that divide K, in their order."""
    width, split, step, f32 = cfg.tile_n, cfg.split, cfg.step, jnp.float32
    steps = pl.cdiv(pl.cdiv(k, step), split)
    stages = min(cfg.stages, steps)
    # a pass: what the lanes take at once, 8 elements each
    part = (4, step) if tb else (1024 // width, width)
    if part[0] == 4:  # a row per warp
        spread = plgpu.Layout.TILED(plgpu.Tiling((part, (8,))), (-3,), (-2,), -1)
    else:
        tiles = plgpu.Tiling((part, (part[0] // 4, part[1]), (8,)))
        spread = plgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)
    groups = width // 4 if tb else 1  # sums that a lane keeps for each row of A
    by_tma = m == 1 or n * out_dtype.itemsize % 16 == 0

    def body(a, b, *refs):
        bias, refs = (refs[0], refs[1:]) if has_bias else (None, refs)
        o, a_smem, b_smem, o_smem, bias_smem, sums, full, bias_ready, arrived = refs
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        if ta:
            a = a.reshape((1, k))  # m is 1
        rank = lax.axis_index("ck") if split > 1 else 0
        col = lax.axis_index("tile") * width
        if has_bias:
            plgpu.copy_gmem_to_smem(bias.at[pl.ds(col, width)], bias_smem, bias_ready)

        def fetch(s):
            along_k, along_n = pl.ds((rank * steps + s) * step, step), pl.ds(col, width)
            slot = s % stages
            at = (along_n, along_k) if tb else (along_k, along_n)
            plgpu.copy_gmem_to_smem(b.at[at], b_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(a.at[:, along_k], a_smem.at[slot], full.at[slot])

        def factors(ref, axis):
            return plgpu.load(ref, layout=spread.reduce(axis)).astype(f32)

        def products(slot, acc):
            acc = list(acc)
            if tb:
                rows = [
                    lax.broadcast_in_dim(factors(a_smem.at[slot, i], 0), part, [1])
                    for i in range(m)
                ]
            for p in range(b_smem.shape[1] // part[0]):
                at = pl.ds(p * part[0], part[0])
                x = plgpu.load(b_smem.at[slot, at], layout=spread).astype(f32)
                for i in range(m):
                    if tb:
                        acc[i * groups + p] += x * rows[i]
                    else:
                        w = factors(a_smem.at[slot, i, at], 1)
                        acc[i] += x * lax.broadcast_in_dim(w, part, [0])
            return tuple(acc)

        def one(s, acc):
            slot = s % stages
            plgpu.barrier_wait(full.at[slot])
            acc = products(slot, acc)
            pl.when(s + stages < steps)(lambda: fetch(s + stages))
            return acc

        lax.fori_loop(0, stages, lambda s, _: fetch(s), None)
        zeros = plgpu.layout_cast(jnp.zeros(part, f32), spread)
        acc = lax.fori_loop(0, steps, one, (zeros,) * (m * groups))
        inbox = plgpu.cluster_ref(sums, {"ck": 0}) if split > 1 else sums
        for i in range(m):
            if tb:
                for p in range(groups):
                    inbox[rank, i, pl.ds(p * 4, 4)] = acc[i * groups + p].sum(1)
            else:
                inbox[rank, i] = acc[i].sum(0)
        if split > 1:
            plgpu.barrier_arrive(arrived)
            plgpu.barrier_wait(arrived)
        if has_bias:
            plgpu.barrier_wait(bias_ready)

        @pl.when(rank == 0)
        def _():
            value = sums[0]
            for j in range(1, split):
                value = value + sums[j]
            if has_bias:
                b_part = bias_smem[...].astype(f32)
                value = value + lax.broadcast_in_dim(b_part, value.shape, [1])
            if activation is not None:
                value = activation(value)
            o_smem[...] = value.astype(out_dtype)
            plgpu.commit_smem()
            where = o.at[:, pl.ds(col, width)]
            plgpu.copy_smem_to_gmem(o_smem, where, engine=None if by_tma else "lanes")
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[
            plgpu.SMEM((stages, m, step), dtype),
            plgpu.SMEM((stages, *((width, step) if tb else (step, width))), dtype),
            plgpu.SMEM((m, width), out_dtype),
            plgpu.SMEM((width,), dtype) if has_bias else None,
            plgpu.SMEM((split, m, width), f32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier() if has_bias else None,
            plgpu.ClusterBarrier(collective_axes=("ck",)) if split > 1 else None,
        ],
        grid=(pl.cdiv(n, width),),
        grid_names=("tile",),
        cluster=(split,) if split > 1 else (),
        cluster_names=("ck",) if split > 1 else (),
        interpret=interpret,
        kernel_name="matmul_few_rows",
    )


# ---- rows that TMA cannot address ---------------------------------------------------------------

_WIDTH = 4096  # elements that a block copies


@cached
def _padding(shape, dtype, aligned, interpret):
    """Kernel: a copy with rows of a multiple of 16 bytes, filled up with zeros.

    Blocks take a few rows, or a part of one. The last ones begin earlier where it does not come out
    even, and copy once more what others copy too."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    whole = 16 // dtype.itemsize
    padded = pl.cdiv(cols, whole) * whole
    width = min(cols, _WIDTH)
    height = min(rows, max(_WIDTH // width, 1))

    def body(x, o):
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        r = jnp.minimum(lax.axis_index("row") * height, rows - height)
        c = jnp.minimum(lax.axis_index("col") * width, cols - width)
        x, o = x.reshape((rows, cols)), o.reshape((rows, padded))
        from_ = c
        if not aligned:  # no vectors: the compiler cannot know that this is zero
            from_ = c + lax.optimization_barrier(jnp.int32(0))
        part = x[pl.ds(r, height), pl.ds(from_, width)]
        o[pl.ds(r, height), pl.ds(c, width)] = part

        @pl.when(lax.axis_index("col") == 0)
        def _():
            if padded > cols:
                o[pl.ds(r, height), cols:] = jnp.zeros((height, padded - cols), dtype)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((*shape[:-1], padded), dtype),
        grid=(pl.cdiv(rows, height), pl.cdiv(cols, width)),
        grid_names=("row", "col"),
        interpret=interpret,
        kernel_name="matmul_padding",
    )


def _needs_padding(x):
    return not x.aligned or (
        math.prod(x.shape[:-1]) > 1 and x.shape[-1] * x.dtype.itemsize % 16 != 0
    )


def _padding_of(x, interpret):
    return _padding(x.shape, x.dtype, x.aligned, interpret) if _needs_padding(x) else None


class _Padded:
    """The product of copies of the operands that need it."""

    def __init__(self, product, pads):
        self.product, self.pads = product, pads

    def __call__(self, *operands, out=None):
        operands = [x if pad is None else pad(x) for x, pad in zip(operands, self.pads)]
        return self.product(*operands) if out is None else self.product(*operands, out=out)


# ---- the choice ---------------------------------------------------------------------------------


# consumers, tile_n
_TILES = ((2, 256), (2, 192), (2, 128), (1, 256), (1, 192), (1, 128), (2, 64), (1, 64), (1, 32))

# blocks: below each other (B is shared), side by side (A is shared), along K. Clusters of four that
# share, or that share and divide K, took up to twice the time of two blocks on every shape.
_CLUSTERS = ((2, 1, 1), (1, 2, 1), (1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))


def candidates(m, n, k, sms=132, in_bytes=2, blocks=False):
    """Configurations that make sense for a shape, roughly from large tiles to small ones.

    in_bytes: of an element of a or b. blocks: with scales of blocks."""
    found, step = [], 128 // in_bytes
    for consumers, tile_n in _TILES:
        if consumers == 2 and m <= 64 or tile_n >= max(2 * n, 64):
            continue
        for cluster, cluster_n, split in _CLUSTERS:
            if tile_n % (8 * split) or pl.cdiv(k, step) < split:
                continue
            if blocks and not _blocks_take(consumers, tile_n, split):
                continue
            if cluster > 1 and m <= 64 * consumers or cluster_n > 1 and n <= tile_n:
                continue
            cfg = MatmulConfig(consumers, tile_n, 0, cluster, 2, 8, cluster_n, split, step)
            p = _Plan(m, n, k, 4, cfg, sms, in_bytes)
            if tile_n == 192 and not (p.single and split == 1):
                continue  # only where it makes one wave of what were nearly two
            if p.stages < 2:
                continue
            if in_bytes == 1:  # a power of two: slots are then counted by masks and shifts
                cfg = cfg._replace(stages=1 << p.stages.bit_length() - 1)
            found.append(cfg)
    return found


def _cycles(m, n, k, cfg, sms, in_bytes=2):
    """An estimate of the time of a product, in cycles of an SM.

    Its numbers were fitted to times measured on an H200, of all candidates on 14 shapes and of some
    on 4 large ones (bench_ops_matmul.py). What it chooses took at most 1.035 of the best, on
    128 x 4096 x 4096 1.175."""
    p = _Plan(m, n, k, 2, cfg, sms, in_bytes)
    waves = pl.cdiv(p.total, max(sms // p.cluster, 1))
    active = p.total * p.cluster / waves
    line = cfg.step * in_bytes
    slot = (p.rows + p.cols) * line
    fetched = (p.rows / cfg.cluster_n + p.cols / cfg.cluster) * line
    # a step takes what limits it: the tensor cores, the L2, or the way from barrier to barrier;
    # sharing hardly helps there (equal requests of neighbours are answered at once), but in power
    tensor, l2 = p.rows * p.cols * line / 3656, slot * active / 9670
    way = (281 if cfg.consumers == 1 else 355) * line / 128
    if in_bytes == 1:  # what one SM takes in, at most
        l2 = max(l2, slot / 55)
    step = max(tensor, l2, way) + 32 + fetched * active / 250e3
    epilogue = 57 + 3.6 * p.width
    if cfg.split > 1:  # the sums travel
        epilogue += 965 + p.sent * cfg.consumers * p.cols * 4 / 6.4
    time = waves * (p.steps * step + epilogue)
    if p.cluster > 1:
        time += 927
    if p.cluster > 2:
        time *= 1.37
    fill = min(p.stages, p.steps) * slot * active / 18400
    memory = ((m * k + k * n) * in_bytes + m * n * 2) / 2190
    return max(time, memory) + fill + 1820


def few_rows_candidates(m, k, transpose_b):
    """Configurations for up to 8 rows."""
    widths, step = ((8, 16, 32), 256) if transpose_b else ((64, 128, 256), 64)
    if transpose_b:
        widths = [w for w in widths if w * m <= 64]  # more sums than registers
    splits = [s for s in (1, 2, 4, 8) if s <= pl.cdiv(k, step)]
    return [
        FewRowsConfig(width, split, stages, step)
        for width, split, stages in itertools.product(widths, splits, (4, 8))
    ]


def _choose_few_rows(m, n, k, transpose_b, sms):
    """As wide as leaves about two blocks for every SM, or one with B transposed, whose ring is
    larger. K undivided if there are enough so."""
    if transpose_b:
        enough, step, stages, widths = 0.9 * sms, 256, 8, (32, 16, 8)
    else:
        enough, step, stages, widths = 1.75 * sms, 64, 4, (128, 64)
    most = 1 if transpose_b else 8  # blocks that divide K before tiles become narrower
    fitting = (w for w in widths if pl.cdiv(n, w) * most >= enough)
    width, split = next(fitting, widths[-1]), 1
    while split < 8 and pl.cdiv(n, width) * split < enough and 2 * split * step <= k:
        split *= 2
    return FewRowsConfig(width, split, stages, step)


def choose(m, n, k, sms=132, transpose_a=False, transpose_b=False):
    """The configuration for a shape on a GPU with that many SMs, for 16-bit floats."""
    if m == 1 or m == 2 and not transpose_a:
        return _choose_few_rows(m, n, k, transpose_b, sms)
    return min(candidates(m, n, k, sms), key=lambda cfg: _cycles(m, n, k, cfg, sms))


def choose_fp8(m, n, k, sms=132, blocks=False):
    """The same for 8-bit floats. blocks: with scales of blocks."""
    found = candidates(m, n, k, sms, 1, blocks)
    return min(found, key=lambda cfg: _cycles(m, n, k, cfg, sms, 1))


def choose_invariant(m, n, k, sms=132, in_bytes=2, blocks=False):
    """The fastest of those that sum over K in order. in_bytes, blocks: as for `candidates`."""
    found = [cfg for cfg in candidates(m, n, k, sms, in_bytes, blocks) if cfg.split == 1]
    found = min(found, key=lambda cfg: _cycles(m, n, k, cfg, sms, in_bytes))
    return found._replace(serpentine=False)


def _blocks_take(consumers, tile_n, split):
    """Is there a kernel for such tiles with scales of blocks? Two blocks wide take turns."""
    return BLOCK % tile_n == 0 or tile_n == 2 * BLOCK and consumers == 2 and split == 1


def _check_fp8_config(config, forms):
    if not isinstance(config, MatmulConfig):
        raise ValueError(f"matmul: config must be a MatmulConfig for 8-bit floats, got {config}")
    if config.step not in (64, 128, 256):
        raise ValueError(f"matmul: the step of 8-bit floats is 64, 128 or 256, got {config}")
    fits = _blocks_take(config.consumers, config.tile_n, config.split)
    if forms.blocks and (config.step != BLOCK or not fits):
        raise ValueError(
            f"matmul: with scales of blocks step must be {BLOCK} and tile_n divide it, or be"
            f" {2 * BLOCK} with 2 consumers and a split of 1, got {config}"
        )


# ---- the function -------------------------------------------------------------------------------


def _check_config(config, m, ta, tb):
    if isinstance(config, FewRowsConfig):
        if m > 8 or (ta and m > 1):
            raise ValueError(
                "matmul: a FewRowsConfig is for up to 8 rows, with transpose_a for 1;"
                f" got {m}{', transposed' if ta else ''}"
            )
        tile, step = config.tile_n, config.step
        fits = tile % 4 == 0 and step == 256 if tb else tile in (64, 128, 256) and step % 16 == 0
        if not fits or min(tile, step, config.stages) < 1 or config.split not in range(1, 9):
            raise ValueError(
                "matmul: tile_n of a FewRowsConfig must be 64, 128 or 256 and step a multiple of"
                " 16, with transpose_b a multiple of 4 and 256, stages at least 1 and split 1 to"
                f" 8; got {config}"
            )
        return
    if not isinstance(config, MatmulConfig):
        raise TypeError(f"matmul: config must be a MatmulConfig or a FewRowsConfig, got {config!r}")
    c = config
    if (
        c.consumers not in (1, 2, 3)
        or c.tile_n not in (16, 32, 64, 128, 192, 256)
        or c.consumers == 3
        and c.tile_n > 128
        or min(c.cluster, c.cluster_n, c.split) < 1
        or c.tile_n % (8 * c.split)
        or c.cluster * c.cluster_n * c.split > 8
        or c.stages < 0
        or min(c.buffers, c.group) < 1
        or c.step not in (64, 128)
        or c.lag not in (0, 1)
    ):
        raise ValueError(
            "matmul: a MatmulConfig has 1 to 3 consumers, a tile_n of 16, 32, 64, 128, 192 or 256"
            " (to 128 with 3), a split that leaves a multiple of 8 columns, up to 8 blocks a"
            " cluster (cluster * cluster_n * split), stages from 0, buffers and a group from 1, a"
            f" step of 64 or 128 and a lag of 0 or 1; got {config}"
        )


@plgpu.kernel_family(in_place=False)
def matmul(
    a,
    b,
    *,
    bias=None,
    activation=None,
    out_dtype=None,
    transpose_a=False,
    transpose_b=False,
    scale_a=None,
    scale_b=None,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``activation(a @ b + bias)`` with float32 accumulation (Hopper).

    a: (M, K), or (K, M) with ``transpose_a``; b: (K, N), or (N, K) with ``transpose_b``; row-major,
    any M, N, K; both float16 or bfloat16, or both 8-bit floats, float8_e4m3fn or float8_e5m2, also
    mixed. bias: (N,), dtype of ``a``, for 8-bit floats any 16- or 32-bit float. activation: a
    function of a float32 array, or "relu", "silu", "gelu", "tanh". out_dtype: float16, bfloat16 or
    float32; that of ``a`` by default, for 8-bit floats bfloat16. config: a :class:`MatmulConfig`
    or, for up to 8 rows of 16-bit floats, a :class:`FewRowsConfig`; chosen from the shape by
    default. out: a preallocated result.

    scale_a, scale_b: float32 arrays that 8-bit operands are multiplied with, None for ones. One
    number, of shape (), (1,) or (1, 1); or one for each row of the product, (M,) or (M, 1), and
    each column, (N,) or (1, N); or, both together, (M, ceil(K / 128)) and
    (ceil(N / 128), ceil(K / 128)): a number for a row of A and 128 elements of K, and for 128
    columns of B and 128 of K. Shapes do not depend on ``transpose_a`` and ``transpose_b``.

    The tensor cores sum products of 8-bit floats with about 14 bits, along all of K without
    scales of blocks ("fast accumulation"), along 128 elements with them. 8-bit operands whose K is
    not contiguous (``transpose_a``, no ``transpose_b``) are turned by a kernel before.

    batch_invariant: the bits of a row of the result depend on that row of ``a``, ``b``, the dtypes
    and options alone, not on M or on other rows (for the same config, if one is given): K is never
    divided, and a single row goes to the tensor cores, too, which takes longer where M and N are
    small. deterministic: a call repeats bit for bit, which every call does.

    Returns (M, N) of the caller's kind of array. TypeError, ValueError for other dtypes and shapes.
    """
    fp8 = a.dtype.name in FP8 and b.dtype.name in FP8
    if not fp8 and (a.dtype.name not in ("float16", "bfloat16") or b.dtype != a.dtype):
        raise TypeError(
            f"matmul: a and b must both be float16 or bfloat16, got {a.dtype} and {b.dtype};"
            f" or {' or '.join(FP8)} each"
        )
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"matmul: a and b must have two dims, got {a.shape} and {b.shape}")
    k, m = a.shape if transpose_a else a.shape[::-1]
    n, k2 = b.shape if transpose_b else b.shape[::-1]
    if k != k2:
        raise ValueError(f"matmul: the inner dims differ, {k} and {k2}")
    bias_dtypes = _FLOATS if fp8 else (a.dtype.name,)
    if bias is not None and (bias.shape != (n,) or bias.dtype.name not in bias_dtypes):
        raise ValueError(
            f"matmul: bias must be {' or '.join(bias_dtypes)} of shape ({n},), got {bias.dtype}"
            f" {bias.shape}"
        )
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"matmul: activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}"
            )
        activation = _ACTIVATIONS[activation]
    if out_dtype is None:
        out_dtype = jnp.dtype(jnp.bfloat16) if fp8 else a.dtype
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype.name not in _FLOATS:
        raise TypeError(f"matmul: out_dtype must be a float dtype, got {out_dtype}")
    sms = plgpu.core_count(a.device)
    invariant = batch_invariance("matmul", batch_invariant, deterministic)
    if invariant and isinstance(config, MatmulConfig):
        config = config._replace(serpentine=False)
    ta, tb, bias_dtype = bool(transpose_a), bool(transpose_b), bias and bias.dtype
    if fp8:
        forms = forms_of(scale_a, scale_b, m, n, k)
        if config is None and invariant:
            config = choose_invariant(m, n, k, sms, 1, forms.blocks)
        config = config or choose_fp8(m, n, k, sms, forms.blocks)
        _check_fp8_config(config, forms)
        dtypes = (a.dtype, b.dtype)
        shape = (m, n, k, dtypes, out_dtype, False, True, bias_dtype, activation, config)
        product = _product(*shape, sms, interpret, forms)
        pads = [
            turning(a.shape, a.dtype, a.aligned, interpret) if ta else _padding_of(a, interpret),
            _padding_of(b, interpret) if tb else turning(b.shape, b.dtype, b.aligned, interpret),
        ]
        pads += [] if bias is None else [_padding_of(bias, interpret)]
        pads += [] if scale_a is None else [None]
        if scale_b is not None:
            pads.append(_padding_of(scale_b, interpret) if forms.b == "each" else None)
        return _Padded(product, pads) if any(pads) else product
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            raise ValueError(
                f"matmul: {name} is for 8-bit floats, a and b are {a.dtype}; multiply the result"
            )
    if config is None and invariant:
        config = choose_invariant(m, n, k, sms)
    config = config or choose(m, n, k, sms, ta, tb)
    _check_config(config, m, ta, tb)
    few_rows = isinstance(config, FewRowsConfig)
    if few_rows:
        shape = (m, n, k, a.dtype, out_dtype, ta, tb, bias is not None, activation, config)
        product = _few_rows(*shape, interpret)
    else:
        shape = (m, n, k, (a.dtype, a.dtype), out_dtype, ta, tb, bias_dtype, activation, config)
        product = _product(*shape, sms, interpret, UNSCALED)
    operands = (a, b) if bias is None else (a, b, bias)
    one_column = few_rows and ta  # a is read as one row
    pads = [
        _padding(x.shape, a.dtype, x.aligned, interpret)
        if x.ndim == 2 and _needs_padding(x) and not (x is a and one_column)
        else None
        for x in operands
    ]
    return _Padded(product, pads) if any(pads) else product
