"""Matrix product on Hopper's tensor cores.

A block works on one tile of the result at a time. Its producer fills a ring of slots, each a tile
of A and a tile of B, by TMA. Each consumer owns 64 rows of the tile: per step it multiplies what is
in a slot, then releases the slot. The blocks of a cluster share what they have in common, those one
above the other the tile of B, those side by side the tile of A: each fetches a part for all. Large
products are done by one persistent block per SM.

Where there are fewer tiles than SMs, `split` blocks of a cluster divide K among them. Each sends
part j of the columns of its sum to block j, through the shared memory of the cluster, and every
block adds up its part, in the order of the blocks: results repeat bit for bit. `slices` divides K
among blocks anywhere on the GPU, by way of global memory (_slices.py). `shares` divides K of the
last tiles alone, so that no block is idle at the end (_shares.py).

The order of a sum over K depends on the tiling: K may be divided, and persistent blocks go through
it backwards for every second tile. Batch-invariant products do neither, whatever their tiles: an
element is then the sum of the same instructions of the tensor cores in the same order.

One or two rows leave the tensor cores idle; _few_rows.py multiplies them on the lanes. Scales of
8-bit floats, and a pass that transposes 8-bit operands, are in _scaled.py.

Where the product is added to what the result holds, that arrives through the ring, too: after the
steps of a tile, the slots of A hold one part of its columns after the other.

Ragged edges need nothing: TMA reads zeros outside an array and does not write there. Arrays whose
rows TMA cannot address are first copied to padded rows (_padding.py)."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _sizes, lax, nn, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached
from pallas_mgpu._names import show

from . import (
    _batches,
    _block_scaled,
    _few_rows,
    _float32,
    _matmul_checks,
    _slices,
    _tensor_memory,
    _warp_mma,
)
from ._block_scaled import BlockScaling
from ._common import (
    FLOATS,
    REGISTERS,
    Ring,
    StaticTiles,
    WarpSpecialized,
    applied,
    compile_for,
    dtype_of,
    store,
    swizzled,
    warp_specialized,
)
from ._few_rows import FewRowsConfig
from ._matmul_choice import (
    MatmulConfig,
    Plan,
    choose,
    choose_invariant,
    choose_k_major,
)
from ._matmul_family import Rows, shared
from ._matmul_parts import Boxes, parts_of
from ._open_rows import in_shapes, is_static, may_settle, own_program, rows_of, settle, together
from ._padding import padding_of, with_padding
from ._scaled import (
    BLOCK,
    FP8,
    UNSCALED,
    BlockScales,
    Forms,
    Scales,
    forms_of,
    transposing,
)
from ._shares import Parts, SharedTiles, Work, semaphores
from ._tensor_memory import TensorMemoryConfig
from ._warp_mma import MmaConfig

_ACTIVATIONS = {"relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "tanh": nn.tanh}
_FP4 = jnp.dtype(_block_scaled.FP4)
_PRECISIONS = ("bf16x3", "tf32")  # of float32
_FEW_ROWS = 128  # of which operands come from memory, and are asked for early
_EARLY = 2  # steps whose operands are; more of them were slower


class Product(NamedTuple):
    """What a kernel computes. m: rows; a size of the call (plgpu.dim) in kernels for many."""

    m: int
    n: int
    k: int
    dtypes: tuple[np.dtype, np.dtype]  # of a and b
    out_dtype: np.dtype
    ta: bool
    tb: bool
    bias_dtype: np.dtype | None = None  # None without bias
    activation: Callable | None = None
    forms: Forms = UNSCALED  # of the scales
    accumulate: bool = False  # add to the result that is there
    keep: bool = False  # also store what the activation is applied to
    scaling: BlockScaling | None = None  # scales that the tensor cores apply
    swapped: bool = False  # the kernel makes the transpose, of a and b that have changed places
    batch: _batches.Batch | None = None

    def named(self, *refs):
        """Operands and the result by name, None for those that are not there."""
        by_block = self.scaling is not None
        scales = list(zip(("scale_a", "scale_b"), self.forms))
        operands = ["a", "b"]
        if self.swapped:
            operands, scales = operands[::-1], scales[::-1]
        given = [("bias", self.bias_dtype), *scales]
        names = [
            *operands,
            *(n for n, f in given if f is not None or by_block and n != "bias"),
            "o",
            *(["before"] if self.keep else []),
        ]
        return {"bias": None, "scale_a": None, "scale_b": None} | dict(zip(names, refs))

    @property
    def sums(self):
        """The dtype of sums over K; with scales of blocks they are scaled."""
        exact = self.dtypes[0].name == "int8" and not self.forms.blocks
        return jnp.dtype(jnp.int32 if exact else jnp.float32)

    def transposed(self):
        """The Product of the kernel that makes the transpose of the result."""
        return self._replace(
            m=self.n,
            n=self.m,
            dtypes=self.dtypes[::-1],
            ta=not self.tb,
            tb=not self.ta,
            forms=Forms(*self.forms[::-1]),
            swapped=True,
            batch=self.batch and self.batch.transposed(),
        )


class _KernelPlan(Plan):
    """The same for a kernel, and what else its blocks need to know."""

    parted: tuple = ()  # of parts_of

    def __init__(self, x, cfg, sms, clips=False):
        """x: a Product. clips: what is beyond the arrays is not fetched."""
        in_bytes, along = x.dtypes[0].itemsize, 2
        if in_bytes == 1:
            along = x.bias_dtype.itemsize if x.bias_dtype is not None else 0
            along += 4 if x.forms.b == "each" else 0
        elif x.bias_dtype is not None:
            along = x.bias_dtype.itemsize
        # what is added to the product comes through the ring while sums travel
        apart, out_bytes = x.accumulate, x.out_dtype.itemsize
        batch = x.batch and x.batch.size
        super().__init__(x.m, x.n, x.k, out_bytes, cfg, sms, in_bytes, along, apart, batch)
        self.x = x
        if self.stages < 1 + bool(cfg.lag):
            found, needed = max(self.stages, 0), 1 + bool(cfg.lag)
            raise ValueError(f"matmul: {found} slots, {cfg} needs {needed} of them")
        self.group = min(cfg.group, _sizes.most(self.tiles_m))
        if cfg.swapped and isinstance(self.tiles_n, plgpu.Dim):
            # as static ones: 1 in a single wave, square bands in several
            several = _sizes.minimum((self.total - 1) // self.fit, 1)
            self.group = 1 + several * (_sizes.minimum(self.tiles_n, 8) - 1)
        axes = {"cm": cfg.cluster, "cn": cfg.cluster_n, "ck": cfg.split}
        self.axes = {name: size for name, size in axes.items() if size > 1}  # of the cluster
        # more accumulators than an even share of the registers has room for
        wide = self.cols * self.height > 128 * 64 or x.forms.blocks and self.cols == 128
        self.registers = REGISTERS.get(self.consumers) if wide else None
        # the result; rows of slices are long enough
        rows, columns = (x.n, x.m) if x.swapped else (x.m, x.n)
        alone = _sizes.most(rows) == 1 and x.batch is None
        aligned = alone or columns * x.out_dtype.itemsize % 16 == 0
        self.by_tma = aligned or cfg.slices > 1
        # Sums are sent in whole rows: fewer, larger packets than pairs of columns.
        self.by_rows = cfg.split > 1 and self.sent * self.width % 512 == 0 and not x.swapped
        # parts in that layout would need another one beside what goes along rows or columns
        along = x.bias_dtype is not None or "each" in x.forms
        self.by_chunks = cfg.split > 1 and self.sent < 64 and along and not x.swapped
        # A block that fetched neither A nor B would not wait for one diagonally opposite: it could
        # release a slot twice before that one has released it once.
        both = cfg.cluster > 1 and cfg.cluster_n > 1
        # rows come in groups of 8 in a slot, columns in chunks of 128 bytes
        chunk, clips = 128 // in_bytes, clips and not x.accumulate and not both
        of_a = x.m, self.rows, cfg.cluster, cfg.cluster_n, chunk if x.ta else 8
        of_b = x.n, self.cols, cfg.cluster_n, cfg.cluster, 8 if x.tb else chunk
        self.parts_a, self.parts_b = (
            parts_of(*of, *self.parted) if clips else [(0, of[1], False)] for of in (of_a, of_b)
        )
        # slots after the steps of a tile, for what the product is added to
        self.there = self.chunks if x.accumulate else 0
        # The result is the sums in 16 bits. Read as such, they are half as many registers to the
        # compiler.
        used = x.bias_dtype is not None, x.activation, x.forms != UNSCALED, x.accumulate, x.keep
        divided = cfg.split > 1, cfg.slices > 1, self.shares
        exact = x.sums != jnp.float32 or x.out_dtype.itemsize != 2
        self.plain = not any((*used, *divided, exact, x.swapped))

    def scratch(self):
        x, cfg = self.x, self.cfg
        a_tile = (cfg.step, self.rows) if x.ta else (self.rows, cfg.step)
        b_tile = (self.cols, cfg.step) if x.tb else (cfg.step, self.cols)
        chunk = min(128 // x.dtypes[0].itemsize, cfg.step)
        # the same for both, as wgmma wants
        a_tiled, b_tiled = (
            swizzled(chunk if x.tb else math.gcd(chunk, self.cols), t) for t in x.dtypes
        )
        buffer = (self.chunk, 64) if x.swapped else (64, self.chunk)
        o_tiled, part = swizzled(buffer[1], x.out_dtype), (self.sent, self.width)
        biases = self.height if x.swapped else self.width
        ring = {
            "a_smem": plgpu.SMEM((self.stages, *a_tile), x.dtypes[0], transforms=a_tiled),
            "b_smem": plgpu.SMEM((self.stages, *b_tile), x.dtypes[1], transforms=b_tiled),
        }
        found, sums = {}, self.sums(part)
        if self.apart:
            found |= ring | sums
        elif sums:  # in place of the ring, when all has been multiplied
            found["ring_or_sums"] = plgpu.RefUnion(tuple(ring.values()), tuple(sums.values()))
        else:
            found |= ring
        found["o_smem"] = plgpu.SMEM(
            (self.consumers, self.buffers, *buffer), x.out_dtype, transforms=o_tiled
        )
        vectors = 0
        if x.bias_dtype is not None:
            vectors += 1
            found["bias_smem"] = plgpu.SMEM((self.consumers, biases), x.bias_dtype)
        if x.forms.b == "each":
            vectors += 1
            found["scale_smem"] = plgpu.SMEM((self.consumers, self.width), jnp.float32)
        shared = [axis for axis in ("cm", "cn") if axis in self.axes]
        found |= Ring.barriers(
            self.stages, len(self.parts_a) + len(self.parts_b), self.consumers, shared
        )
        if self.shares:
            tile = self.consumers, self.height, self.cols
            found["parts"] = Parts.scratch(self.shares, self.cluster, *tile, x.sums)
        if x.accumulate:
            parts = cfg.step * x.dtypes[0].itemsize // (self.chunk * x.out_dtype.itemsize)
            shape = self.stages, parts, self.rows, self.chunk  # as large as the slots of A
            there = plgpu.SMEM(shape, x.out_dtype, transforms=o_tiled)
            found["a_smem"] = plgpu.RefUnion([found["a_smem"]], [there])
        if vectors:
            found["row_full"] = plgpu.Barrier(num_barriers=self.consumers, num_arrivals=vectors)
        if cfg.split > 1:
            one_each, all_ = {"num_barriers": self.consumers}, {"num_arrivals": self.consumers}
            found["arrived"] = plgpu.ClusterBarrier(collective_axes=("ck",), **one_each)
            if not self.apart:
                found["multiplied"] = plgpu.ClusterBarrier(collective_axes=tuple(self.axes), **all_)
        return found

    def sums(self, part):
        """Scratch for the sums of other blocks of the cluster. part: the shape of one block's."""
        x, split = self.x, self.cfg.split
        found = {}
        if split > 1:
            found["inbox"] = plgpu.SMEM((self.consumers, split, *part), x.sums)
        if self.by_rows:
            found["outbox"] = plgpu.SMEM((self.consumers, *part), x.sums)
        return found

    def refs(self, scratch):
        """The refs of scratch() by name."""
        if "ring_or_sums" not in scratch:
            return scratch
        ring, sums = scratch.pop("ring_or_sums")
        return (
            scratch | dict(zip(("a_smem", "b_smem"), ring)) | dict(zip(("inbox", "outbox"), sums))
        )


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    done = None  # semaphores of shared tiles
    of_entries = False  # do scales belong to one matrix of several?
    scales_before = {"a": 0, "b": 0}  # those of other matrices, in arrays of all of them
    narrow = False  # sums are read in the dtype of the result

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.cfg = plan.x, plan.cfg
        if self.x.accumulate:
            (self.a_smem,), (self.there_smem,) = self.a_smem
        # products alone read the slots, and a release tells nothing else: no fence of all memory
        self.ring = Ring(plan.stages, self.full, self.empty, relaxed=True)

    def rank(self, axis):
        return lax.axis_index(axis) if axis in self.plan.axes else 0

    def tiles(self):
        p, cluster = self.plan, lax.axis_index("cluster")
        if self.done is not None:
            return SharedTiles(p.total, p.clusters, p.steps, p.shares, cluster)
        return StaticTiles(p.total, p.clusters, cluster)

    def part_of(self, t):
        """The slice and the cluster tile of unit t of the schedule, the first of its steps of K and
        their number."""
        p, cfg = self.plan, self.cfg
        if isinstance(t, Work):
            return 0, t.tile, t.first, t.steps
        part, tile = (0, t) if cfg.slices == 1 else (t // p.tiles, t % p.tiles)
        share = self.rank("ck")
        if cfg.slices > 1:
            share = part * cfg.split + share
        return part, tile, share * p.steps, p.steps

    def origin(self, t):
        """First row and column of this block's part of cluster tile t."""
        p, cfg = self.plan, self.cfg
        open_ = isinstance(p.tiles_m, plgpu.Dim) or isinstance(p.group, plgpu.Dim)
        bands = open_ or p.tiles_m % p.group  # of different heights
        if _sizes.most(p.tiles_m) == 1:
            row, col = 0, t
        elif not open_ and p.group == p.tiles_m:
            row, col = t % p.group, t // p.group
        else:
            band, inside = t // (p.group * p.tiles_n), t % (p.group * p.tiles_n)
            height = p.group
            if bands:
                height = jnp.minimum(p.tiles_m - band * p.group, p.group)
            row, col = band * p.group + inside % height, inside // height
        row = (row * cfg.cluster + self.rank("cm")) * p.rows
        return row, (col * cfg.cluster_n + self.rank("cn")) * p.cols

    def order(self, it0, backwards=True, t=None):
        """The place along K of each step of a tile that begins with step it0 of the block, unit t
        of the schedule. backwards: may it be walked so?"""
        steps, of_tile, number = self.plan.steps, self.plan.steps + self.plan.there, None
        if isinstance(t, Work):
            steps, number = t.steps, t.number
        if not self.cfg.serpentine:
            return lambda s: s
        # every second tile backwards: the end of its rows of A is still in the L2
        odd = ((it0 // of_tile if number is None else number) % 2 == 1) & backwards
        return lambda s: lax.select(odd, steps - 1 - s, s)

    # ---- producer

    def prefetch(self):
        """Asks for the first steps of the first tile while the kernels before this one end. They go
        to the L2 cache, where stores of these reach them. Without effect for many rows, whose
        operands are in that cache already: requests of no use delay those that follow."""
        p, x, tiles = self.plan, self.x, self.tiles()
        if _sizes.most(x.n if x.swapped else x.m) > _FEW_ROWS:
            return
        t = tiles.work(jnp.int32(0)) if isinstance(tiles, SharedTiles) else tiles.tile(0)
        _, tile, first, steps = self.part_of(t)
        (row, col), place = self.origin(tile), self.order(jnp.int32(0), t=t)

        def own(along, axis):
            """Of a part that the blocks along an axis fetch together."""
            size = along.size // p.axes.get(axis, 1)
            return pl.ds(along.start + self.rank(axis) * size, size)

        def ask(s, _):
            k = (first + place(s)) * self.cfg.step

            def ask_a(_, along, exists):
                tile = self.tile_of_a(self.a, own(along, "cn"), k)
                pl.when(exists is None or exists)(functools.partial(plgpu.async_prefetch, tile))

            def ask_b(_, along, exists):
                for holds, tile in self.tiles_of_b(own(along, "cm"), k):
                    there = holds if exists is None else exists & holds
                    pl.when(there)(functools.partial(plgpu.async_prefetch, tile))

            self.in_parts(p.parts_a, row, x.m, p.stages, ask_a)
            self.in_parts(p.parts_b, col, x.n, p.stages, ask_b)

        count = min(steps, _EARLY) if isinstance(steps, int) else jnp.minimum(steps, _EARLY)
        lax.fori_loop(0, count, ask, None)

    def producer(self):
        self.ring.drain(self.tiles().produce(self.fetch_tile, 0))

    def fetch_tile(self, t, it0):
        _, tile, first, _ = self.part_of(t)
        first, (row, col) = first * self.cfg.step, self.origin(tile)
        it = self.fetch_steps(it0, row, col, first, [(True, self.a)], t=t)
        if self.x.accumulate:
            self.fetch_there(it, row, col + self.rank("ck") * self.plan.width)
        return it + self.plan.there

    def fetch_steps(self, it0, row, col, first, sources, backwards=True, before=None, t=None):
        """All steps of a tile. first: where it begins along K. sources: pairs (condition, ref), of
        which the one that holds has the rows of A. backwards, t: as for order(). before(s): called
        in step s before all else."""
        p, x, ring, step = self.plan, self.x, self.ring, self.cfg.step
        steps = t.steps if isinstance(t, Work) else p.steps
        place = self.order(it0, backwards, t)
        if x.accumulate:
            plgpu.async_prefetch(self.o.at[pl.ds(row, p.rows), pl.ds(col, p.cols)])

        def fetch(s, _):
            it = it0 + s
            slot = ring.slot(it)
            k = first + place(s) * step
            if before:
                before(s)
            ring.acquire(it)

            def copy_a(part, along, exists):
                at = (slot, *(slice(None),) * x.ta, part)
                for holds, a in sources:
                    tile = self.tile_of_a(a, along, k)
                    self.copy(holds, tile, self.a_smem.at[at], slot, "cn", exists)

            def copy_b(part, along, exists):
                at = (slot, *(slice(None),) * (not x.tb), part)
                for holds, tile in self.tiles_of_b(along, k):
                    self.copy(holds, tile, self.b_smem.at[at], slot, "cm", exists)

            self.in_parts(p.parts_a, row, x.m, it, copy_a)
            self.in_parts(p.parts_b, col, x.n, it, copy_b)

        lax.fori_loop(0, steps, fetch, None)
        return it0 + steps

    def in_parts(self, parts, start, extent, it, copy):
        """Copies each part of a tile that begins there in step `it`: copy(its place in the slot and
        in the array, whether it exists)."""
        if isinstance(parts, Boxes):
            return parts.copies(start, extent, it < self.plan.stages, copy)
        for of_part in self.parts_at(parts, start, extent, it):
            copy(*of_part)

    def parts_at(self, parts, start, extent, it):
        """For each part of a tile that begins there: its place in the slot and in the array, and
        whether it is copied in step `it`. Beyond the array nothing is, but the first time that a
        slot is filled: the first part of the array, so that no memory stays undefined. TMA would
        fill it with zeros, which takes it longer."""
        for first, size, checked in parts:
            begin, exists = start + first, None
            if checked:
                inside = begin < extent
                begin, exists = lax.select(inside, begin, 0), inside | (it < self.plan.stages)
            yield pl.ds(first, size), pl.ds(begin, size), exists

    def copy(self, holds, tile, to, slot, axis, exists):
        """A part of a tile into a slot, by all blocks along an axis of the cluster."""

        def start():
            axes = axis if axis in self.plan.axes else None
            full = self.full.at[slot]
            plgpu.copy_gmem_to_smem(tile, to, full, collective_axes=axes, predicate=exists)

        pl.when(holds)(start)

    def tile_of_a(self, a, along_m, k):
        """The tile of A that begins at k."""
        along_k = pl.ds(k, self.cfg.step)
        return a.at[(along_k, along_m) if self.x.ta else (along_m, along_k)]

    def tiles_of_b(self, along_n, k):
        """Pairs (condition, tile of B that begins at k), of which the one that holds is copied."""
        along_k = pl.ds(k, self.cfg.step)
        return [(True, self.b.at[(along_n, along_k) if self.x.tb else (along_k, along_n)])]

    def fetch_there(self, it0, row, col):
        """What the result is added to, its columns part by part. Reducing copies would add, too,
        but L2 does that several times more slowly than it loads and stores."""
        p, ring, height = self.plan, self.ring, self.plan.rows // 2

        def fetch(c, _):
            slot = ring.slot(it0 + c)
            ring.acquire(it0 + c)

            def copy(half, _):  # as many copies as of A and B
                first = half * height
                along = pl.ds(row + first, height), pl.ds(col + c * p.chunk, p.chunk)
                buffer = self.there_smem.at[slot, 0, pl.ds(first, height)]
                plgpu.copy_gmem_to_smem(self.o.at[along], buffer, self.full.at[slot])

            lax.fori_loop(0, 2, copy, None)

        lax.fori_loop(0, p.there, fetch, None)

    # ---- consumers

    def consumer(self, me):
        scales = None if self.of_entries else self.scales()
        tile = functools.partial(self.multiply_tile, me, scales)
        self.tiles().consume(tile, 0)

    def scales(self):
        """What loads scales; None without any."""
        p, x, cfg = self.plan, self.x, self.cfg
        rows, above = p.rows * cfg.cluster, self.scales_before["a"]
        if x.forms.blocks:
            reach = (
                p.tiles_n * cfg.cluster_n * p.cols,
                p.steps * cfg.split * cfg.slices * cfg.step,
            )
            tile, of_product = (rows, p.cols), x._replace(forms=UNSCALED).sums
            how = tile, reach, p.consumers, of_product, above
            return BlockScales(self.scale_a, self.scale_b, x.m, *how)
        if x.forms != UNSCALED:
            return Scales(x.forms, self.scale_a, self.scale_b, x.m, rows, above)
        return None

    def multiply_tile(self, me, scales, t, it0):
        p, cfg = self.plan, self.cfg
        part, tile, k0, steps = self.part_of(t)
        row, col = self.origin(tile)
        first = col  # column of the block's part of the result
        if not self.x.swapped:
            first = col + self.rank("ck") * p.width
        self.fetch_vectors(me, row + me * p.height, first)
        scaled = None
        if self.x.forms.blocks:
            values = self.sum_blocks(me, it0, k0, row, col, scales)
        elif scales is None:
            values, _ = self.sum(me, it0, steps=steps)
        else:
            rows = pl.ds(row + me * p.height, p.sent if cfg.split > 1 else p.height)
            load = functools.partial(self.load_scales, me, rows, scales)
            values, loaded = self.sum(me, it0, load, steps)
            scaled = functools.partial(scales, loaded)
        if cfg.split > 1:
            self.send(me, *values)
        if cfg.split > 1 and not self.x.swapped:
            values = self.summed(me)
        results = [self.o.at[:, part] if cfg.slices > 1 else self.o]
        finish = functools.partial(self.epilogue, me)
        where = row, first, scaled, it0 + steps
        if self.x.swapped and cfg.split > 1:
            mine = self.rank("ck") == 0
            pl.when(mine)(lambda: finish(self.summed(me), results, *where))
            pl.when(~mine)(lambda: self.await_bias(me))
        elif isinstance(t, Work):
            self.share(me, t, values, lambda v: finish(v, results, *where))
        else:
            finish(values, results, *where)
        return it0 + steps + p.there

    def share(self, me, t, values, finish):
        """Hands over what the block has of a tile without the last steps; finish(values) with the
        parts of others where it has these."""
        tiles = self.tiles()
        rank = self.rank("cm") * self.cfg.cluster_n + self.rank("cn")
        parts = Parts(self.parts, self.done, rank)
        values = list(self.parts_of(values))

        @pl.when(~t.ends)
        def _():
            self.await_bias(me)  # that nobody needs
            parts.hand_over(me, values, tiles, t)

        pl.when(t.ends)(lambda: finish(parts.added(me, values, tiles, t)))

    def fetch_vectors(self, me, row, col):
        """Bias, and scales of the columns, for the epilogue."""
        along = pl.ds(col, self.plan.width)
        if self.bias is not None:
            there = pl.ds(row, self.plan.height) if self.x.swapped else along
            plgpu.copy_gmem_to_smem(
                self.bias.at[there], self.bias_smem.at[me], self.row_full.at[me]
            )
        if self.x.forms.b == "each":
            along = pl.ds(col + self.scales_before["b"], self.plan.width)
            scales = self.scale_b.reshape((self.scale_b.size,)).at[along]
            plgpu.copy_gmem_to_smem(scales, self.scale_smem.at[me], self.row_full.at[me])

    def store_part(self, me, number, value, row, col, targets):
        """A consumer's part of the columns, from `col` on, as store number `number` of a tile, and
        as one more for its second 64 rows, each through one of the store buffers. Returns the
        number of the next store."""
        p = self.plan
        for first in range(0, p.height, 64):
            if not p.single or number >= p.buffers:
                pending = 0 if p.uneven and number == 0 else (p.buffers - 1) * len(targets)
                plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            rows = value if p.height == 64 else value[first : first + 64]
            where = pl.ds(row + (me * p.height + first), rows.shape[0]), pl.ds(col, rows.shape[1])
            if self.x.swapped:
                rows, where = rows.T, where[::-1]
            buffer = self.o_smem.at[me, number % p.buffers, pl.ds(0, rows.shape[0])]
            self.send_rows(buffer, rows.astype(self.x.out_dtype), where, targets)
            number += 1
        return number

    def send_rows(self, buffer, value, where, targets):
        """Stores a value through a buffer. where: its rows and columns in the targets."""
        engine = None if self.plan.by_tma else "plain"
        store(buffer, value, *[target.at[where] for target in targets], engine=engine)

    def await_bias(self, me):
        if self.bias is not None and self.x.forms.b != "each":
            plgpu.barrier_wait(self.row_full.at[me])

    def load_scales(self, me, rows, scales):
        of_rows, columns = scales.load_rows(rows), None
        if self.x.forms.b == "each":
            plgpu.barrier_wait(self.row_full.at[me])
            columns = self.scale_smem.at[me]
        return of_rows, scales.load_columns(columns, self.plan.width, self.plan.chunk)

    def sum(self, me, it0, meanwhile=None, steps=None):
        """This consumer's part of the tile in registers, in a list, float32 unless self.narrow; and
        what meanwhile() returns, which is called under the last product. steps: all of K by
        default."""
        p, x, ring, late = self.plan, self.x, self.ring, bool(self.cfg.lag)
        steps = p.steps if steps is None else steps

        def multiply(acc):
            def step(s, _):
                it = it0 + s
                slot = ring.slot(it)
                ring.wait(it)
                mine = pl.ds(me * p.height, p.height)
                a = self.a_smem.at[slot, :, mine].T if x.ta else self.a_smem.at[slot, mine]
                plgpu.wgmma(acc, a, self.b_smem.at[slot].T if x.tb else self.b_smem.at[slot])
                plgpu.wgmma_wait(1 if late else 0)
                if late:
                    pl.when(s > 0)(lambda: ring.release(it - 1))
                else:
                    ring.release(it)

            lax.fori_loop(0, steps, step, None)
            loaded = meanwhile and meanwhile()
            if late:
                plgpu.wgmma_wait(0)
                ring.release(it0 + (steps - 1))
            value = acc[...]
            return [value.astype(x.out_dtype) if self.narrow else value], loaded

        return pl.run_scoped(multiply, plgpu.ACC((p.height, p.cols), x.sums))

    def sum_blocks(self, me, it0, k0, row, col, scales):
        """The same with scales that change along K; in parts of 128 columns if there are more."""
        p, ring = self.plan, self.ring
        place = self.order(it0)  # as they are fetched

        def block_of(s):
            return k0 + place(s)

        def wait(s):
            ring.wait(it0 + s)
            slot = ring.slot(it0 + s)
            parts = range(0, p.cols, BLOCK)
            of_b = [self.b_smem.at[slot, pl.ds(j, scales.cols)].T for j in parts]
            return self.a_smem.at[slot, pl.ds(me * 64, 64)], of_b

        def release(s):
            ring.release(it0 + s)

        late = bool(self.cfg.lag)
        return scales.sums(p.steps, block_of, row + me * 64, col, wait, release, late)

    def send(self, me, value):
        """Their part of the columns to each of the blocks that divide K. Of few columns, which are
        rows of the result, all to the first block."""
        p, split = self.plan, self.cfg.split
        if not p.apart:
            plgpu.barrier_arrive(self.multiplied)
            plgpu.barrier_wait(self.multiplied)
        if self.x.swapped:
            inbox = plgpu.cluster_ref(self.inbox, {"ck": 0})
            inbox[me, self.rank("ck")] = value
        for j in range(0 if self.x.swapped else split):
            part = value[: p.sent, j * p.width : (j + 1) * p.width]
            mine = self.rank("ck") == j

            @pl.when(mine)
            def _(part=part, j=j):
                self.inbox[me, j] = part

            @pl.when(~mine)
            def _(part=part, j=j):
                if p.by_rows:
                    self.outbox[me] = part
                    layout = plgpu.Layout.WG_STRIDED((p.sent, p.width), 4)
                    part = plgpu.load(self.outbox.at[me], layout=layout)
                plgpu.cluster_ref(self.inbox, {"ck": j})[me, self.rank("ck")] = part

        plgpu.barrier_arrive(self.arrived.at[me])
        plgpu.barrier_wait(self.arrived.at[me])

    def summed(self, me):
        """What all blocks have sent to this one: its part of the columns."""
        p = self.plan

        def of(*columns):
            total = self.inbox[(me, 0, *columns)]
            for j in range(1, self.cfg.split):
                total = total + self.inbox[(me, j, *columns)]
            return total

        if p.by_chunks:
            return [of(slice(None), pl.ds(c * p.chunk, p.chunk)) for c in range(p.chunks)]
        return [of()]

    # ---- epilogue

    def parts_of(self, values):
        """The parts of the columns that have a store buffer each; the last one may be narrower."""
        for i in range(len(values)):
            value = values[i]
            for first in range(0, value.shape[1], self.plan.chunk):
                yield value[:, first : min(first + self.plan.chunk, value.shape[1])]

    def epilogue(self, me, values, results, row, col, scaled=None, it=None):
        """Scales, bias and activation; stores. values: one or more parts of the columns. results:
        refs of (M, N), all of which get the result. it: step after the products of the tile."""
        p, x = self.plan, self.x
        self.await_bias(me)
        number = 0
        for c, part in enumerate(self.parts_of(values)):
            where = row, col + c * p.chunk
            if x.out_dtype != x.sums and not self.narrow:
                part = part.astype(jnp.float32)
            if scaled is not None:
                part = scaled(c, part)
            if self.bias is not None:
                at = slice(None) if x.swapped else pl.ds(c * p.chunk, p.chunk)
                bias = self.bias_smem[me, at].astype(jnp.float32)
                part = part + lax.broadcast_in_dim(bias, part.shape, [int(not x.swapped)])
            if x.keep:
                number = self.store_part(me, number, part, *where, [self.before])
            if x.activation is not None:
                part = applied(x.activation, part)
            if x.accumulate:
                part = part + self.load_there(me, it + c, part.shape[0])
            number = self.store_part(me, number, part, *where, results)

    def load_there(self, me, it, height):
        """The part of what the result is added to that step `it` brought."""
        ring, slot = self.ring, self.ring.slot(it)
        ring.wait(it)
        value = self.there_smem[slot, 0, pl.ds(me * self.plan.height, height)].astype(jnp.float32)
        # other blocks fill slots of A along "cn": they need to know of this load
        plgpu.barrier_arrive(ring.empty.at[slot], relaxed="cn" not in self.plan.axes)
        return value


class _BatchBlock(_batches.OfBatch, _Block):
    """The same for the products of a batch."""


def _semaphores(plan):
    return semaphores(plan.shares, plan.cluster, plan.consumers)


@cached
def _kernel(x, cfg, sms, interpret, scales=()):
    """x: a Product. scales: shapes of the scales that there are, where the rows are open; of a
    batch (form, shape) of those of a matrix, None for none."""
    whole, shape, of_scales = x, (x.m, x.n), scales
    options = {"interpret": interpret, "kernel_name": "matmul"}
    if cfg.slices > 1:
        x, shape = _slices.partial(whole), _slices.shape_of(whole, cfg.slices)
        scales = scales if x.forms.blocks else ()
    biases, batch, told = (None,) * (x.bias_dtype is not None), x.batch, []
    others = *biases, *scales
    if batch is not None:
        of_a, told = (None if batch.rows is None else x.m, None), batch.counted
        of_a, of_b, *others = batch.operands(of_a, (None, None), scales)
        shape = (batch.size, *shape) if batch.rows is None else (batch.rows, x.n)
        options |= in_shapes(of_a, of_b, *biases, *others, *[(size,) for size in told])
    elif isinstance(x.m, plgpu.Dim):
        options["in_shapes"] = (None, x.m) if x.ta else (x.m, None), None, *others
    elif isinstance(x.k, plgpu.Dim):
        options["in_shapes"] = (x.k, None), (x.k, None), *others
    if x.activation in _ACTIVATIONS.values() and x.out_dtype.itemsize == 2:
        # the result is rounded more coarsely; of a function of the caller nothing is known
        options["compiler_params"] = plgpu.CompilerParams(approx_math=True)
    x = x.transposed() if cfg.swapped else x
    plan = _KernelPlan(x, cfg, sms, clips=True)

    def body(a, b, *refs, **scratch):
        if told:  # without those that tell sizes
            refs = *refs[: -1 - len(told)], refs[-1]
        found = x.named(a, b, *refs) | plan.refs(scratch)
        block = (_BatchBlock if batch else _Block)(plan, found | {"done": _semaphores(plan)})
        block.narrow = plan.plain
        block.overlap_launches()
        block.run()

    out_type = plgpu.ShapeDtypeStruct(shape, x.out_dtype)
    out_type = (out_type, out_type) if x.keep else out_type
    kernel = warp_specialized(body, plan, out_type, **options)
    if cfg.slices == 1:
        return kernel
    return _slices.Sliced(kernel, whole, cfg.slices, interpret, of_scales)


# ---- the function -------------------------------------------------------------------------------


def _checked(a, b, bias, activation, out_dtype, ta, tb, scaled=False):
    """The Product of such operands."""
    fp8 = a.dtype.name in FP8 and b.dtype.name in FP8 or a.dtype == b.dtype == _FP4
    int8 = a.dtype.name == b.dtype.name == "int8"
    if not (fp8 or int8) and (a.dtype.name not in FLOATS or b.dtype != a.dtype):
        raise TypeError(
            f"matmul: a and b must both be {', '.join(FLOATS)}, int8 or {_FP4}, or"
            f" {' or '.join(FP8)} each; got {a.dtype} and {b.dtype}"
        )
    if a.ndim != 2 or b.ndim != 2 or 0 in a.shape or 0 in b.shape:
        raise ValueError(
            f"matmul: a and b must have two dims or more, and elements, got {a.shape} and {b.shape}"
        )
    k, m = a.shape if ta else a.shape[::-1]
    n, k2 = b.shape if tb else b.shape[::-1]
    if k != k2:
        shapes = f"a is {a.shape}, b {b.shape}"
        raise ValueError(f"matmul: the inner dims differ, {k} and {k2}: {shapes}")
    bias_dtypes = FLOATS if fp8 or int8 else (a.dtype.name,)
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
    elif activation is not None and not callable(activation):
        raise TypeError(
            f"matmul: activation must be a function, one of {sorted(_ACTIVATIONS)} or None, got"
            f" {activation!r}"
        )
    sums_alone = int8 and bias is None and activation is None and not scaled
    default = jnp.int32 if sums_alone else jnp.bfloat16 if fp8 or int8 else a.dtype
    accepted = (*FLOATS, "int32") if sums_alone else FLOATS
    note = "; int32 is for int8 operands without scales, bias and activation"
    out_dtype = dtype_of("matmul", out_dtype, jnp.dtype(default), accepted, note=note)
    dtypes, bias_dtype = (a.dtype, b.dtype), bias and bias.dtype
    return Product(m, n, k, dtypes, out_dtype, ta, tb, bias_dtype, activation)


def _may_leave_open(x, config):
    """Is there a form of the kernel for many numbers of rows? Where they are an outer dimension."""
    return config is None and not (x.ta or x.accumulate)


def _may_leave_k_open(x, config):
    """The same of K, which is the outer dimension of both operands: gradients of weights."""
    return config is None and x.ta and not (x.tb or x.keep) and x.m > 2


def _kind(x, a, invariant, interpret):
    """What distinguishes programs but the rows."""
    return x._replace(m=0), a.device, invariant, interpret


def _of_16_bits(x, a, b, config, invariant, sms, interpret):
    """The kernel for a Product of 16-bit floats."""
    m, k = x.m, x.k
    if _may_leave_open(x, config):
        kind = _kind(x, a, invariant, interpret)
        x = x._replace(m=rows_of(kind, m, _EDGES, _WEIGHT)[0])
    elif _may_leave_k_open(x, config):
        depth, k = rows_of((*_kind(x._replace(k=0), a, invariant, interpret), x.m), x.k)
        x = x._replace(k=depth)
    if config is None:
        in_order = invariant or x.accumulate or x.keep
        rows = Rows(x.n, k, sms, x.ta, x.tb, in_order)
        config = shared(rows, m, _BUCKETS) if isinstance(x.m, plgpu.Dim) else rows.of_one(m)
        if in_order:
            config = config._replace(serpentine=not invariant)
    if isinstance(config, FewRowsConfig):
        return _of_few_rows(x, a, b, config, interpret)
    _matmul_checks.check(config, m, x.ta, x.tb)
    product = _kernel(x, config, sms, interpret)
    open_k = isinstance(x.k, plgpu.Dim)
    open_a = open_k or isinstance(x.m, plgpu.Dim)
    pads = [padding_of(a, interpret, open_a), padding_of(b, interpret, open_k), None]
    return with_padding(product, pads)


def _of_few_rows(x, a, b, config, interpret):
    """The kernel on the lanes for a Product of floats."""
    _matmul_checks.check(config, x.m, x.ta, x.tb)
    product = _few_rows.kernel(x, config, interpret)
    pad_a = None if x.ta else padding_of(a, interpret)  # transposed, it is read as one row
    return with_padding(product, [pad_a, padding_of(b, interpret), None])


def _check_options(a, config, precision):
    _warp_mma.check_config("matmul", config, MmaConfig, a.device)
    if precision not in _PRECISIONS:
        raise ValueError(f"matmul: precision is one of {_PRECISIONS}, got {show(precision)}")
    if precision == "tf32" and a.dtype.name != "float32":
        raise ValueError(f"matmul: precision='tf32' is for float32 operands, got {a.dtype}")


def _check_on_hopper(a, config, what, instead):
    other = config is None and (_warp_mma.runs_here(a.device) or _tensor_memory.runs_here(a.device))
    if other or isinstance(config, (MmaConfig, TensorMemoryConfig)):
        raise NotImplementedError(f"matmul: {what} on other GPUs than Hopper; use {instead}")


def _check_accumulation(x, a, config, on_warps=False):
    why_not = None
    if a.dtype.itemsize == 1 and not on_warps or a.dtype == _FP4:
        why_not = "operands of 8 or 4 bits"
    elif a.dtype.name == "float32":
        why_not = "float32 operands"
    elif x.bias_dtype is not None or x.activation is not None:
        why_not = "a bias or an activation"
    elif on_warps:
        pass
    elif _tensor_memory.runs_here(a.device) or isinstance(config, TensorMemoryConfig):
        why_not = "Blackwell"
    elif isinstance(config, FewRowsConfig):
        why_not = "a FewRowsConfig"
    elif config and config.slices > 1:
        why_not = "a config with slices"
    elif config and (config.shares > 1 or config.swapped):
        why_not = "a config with shares or swapped operands"
    elif config and min(config.cluster, config.cluster_n) > 1:
        # slots with C depend on no other block: releases of two phases could be confused
        why_not = "a config whose blocks share both A and B"
    elif x.n * x.out_dtype.itemsize % 16:
        why_not = f"rows of {x.n} elements of {x.out_dtype}, which are no multiple of 16 bytes"
    if why_not:
        raise NotImplementedError(
            f"matmul: accumulate=True with {why_not}; add the product in a step of its own"
        )


class _Into:
    """A product that is added to what out= holds."""

    takes_views = True  # _strides.py

    def __init__(self, product):
        self.product = product

    def __call__(self, *operands, out=None, stream=None):
        if out is None:
            raise ValueError("matmul: accumulate=True adds to out=, which must be given")
        return self.product(*operands, out=out, stream=stream)


def without_product(dtype, dims, device):
    """Why there is no `return_product` for operands with so many dims; None: there is."""
    if dims > 2:
        return "batch dimensions"
    if dtype.itemsize != 2:
        return f"operands of {dtype}"
    if _warp_mma.runs_here(device) or _tensor_memory.runs_here(device):
        return _core.target(device)["name"]
    return None


def _check_kept(x, a, dims, config):
    why_not = without_product(a.dtype, dims, a.device)
    if why_not:
        pass
    elif x.activation is None:
        why_not = "no activation"
    elif x.accumulate:
        why_not = "accumulate=True"
    elif config is not None and not isinstance(config, MatmulConfig):
        why_not = f"a {type(config).__name__}"
    elif config is not None and config.slices > 1:
        why_not = "a config with slices"
    if why_not:
        raise NotImplementedError(
            f"matmul: return_product=True with {why_not}; apply the activation in a step of its own"
        )


def _grain(dtype):
    """Of the widths of wgmma."""
    return 16 if dtype == jnp.int8 else 8


def _k_major(x, operands, config, invariant, sms, interpret):
    """The same of 8-bit operands, and of float32 as tf32: both with K contiguous. operands: a, b,
    bias, scale_a, scale_b, None for no array."""
    a, b, bias, scale_a, scale_b = operands
    forms, in_bytes = forms_of(scale_a, scale_b, x.m, x.n, x.k), a.dtype.itemsize
    x = x._replace(forms=forms)
    if config is None:
        x, config = _choose_k_major(x, a, invariant, sms, interpret)
    _matmul_checks.check_k_major(config, forms, in_bytes)
    pads = [
        transposing(a.shape, a.dtype, a.aligned, interpret)
        if x.ta
        else padding_of(a, interpret, isinstance(x.m, plgpu.Dim)),
        padding_of(b, interpret) if x.tb else transposing(b.shape, b.dtype, b.aligned, interpret),
    ]
    pads += [] if bias is None else [padding_of(bias, interpret)]
    pads += [] if scale_a is None else [None]
    if scale_b is not None:
        pads.append(padding_of(scale_b, interpret) if forms.b == "each" else None)
    scales = ()
    if isinstance(x.m, plgpu.Dim):
        shapes = [
            (x.m, *s.shape[1:]) if by_rows else s and s.shape
            for s, by_rows in ((scale_a, forms.a in ("each", "blocks")), (scale_b, False))
        ]
        scales = tuple(shape for shape in shapes if shape is not None)
    product = _kernel(x._replace(ta=False, tb=True), config, sms, interpret, scales)
    return with_padding(product, pads)


# Programs for any number of rows by the most rows that they serve; up to the first edge rows have
# programs of their own, as have the first two numbers of them. So there are at most 12 programs.
_BUCKETS = {32: 1, 64: 1, 128: 1, 256: 1, 512: 1, 1 << 22: 3}
_K_MAJOR_BUCKETS = {32: 1, 64: 1, 128: 1, 256: 1, 384: 1, 512: 1, 1 << 22: 3}
_EDGES, _K_MAJOR_EDGES = (2, *_BUCKETS), (1, *_K_MAJOR_BUCKETS)
_WEIGHT = 1.5  # of the first ones


def _choose_k_major(x, a, invariant, sms, interpret):
    """The product, perhaps with open rows, and the configuration."""
    m, how = x.m, (invariant, a.dtype.itemsize, x.forms.blocks, _grain(a.dtype))
    rows = Rows(x.n, x.k, sms, False, True, *how)
    if not x.ta:
        kind = _kind(x, a, invariant, interpret)
        x = x._replace(m=rows_of(kind, m, _K_MAJOR_EDGES, _WEIGHT)[0])
    return x, shared(rows, m, _K_MAJOR_BUCKETS) if isinstance(x.m, plgpu.Dim) else rows.of_one(m)


def _in_tensor_memory(x, operands, config, sms, interpret):
    """The kernel for Blackwell. operands: as of _k_major."""
    a, b, bias, scale_a, scale_b = operands
    forms = UNSCALED
    if x.scaling:
        _block_scaled.check_operands(x)
    elif a.dtype.name in FP8:
        forms = forms_of(scale_a, scale_b, x.m, x.n, x.k)
    else:
        _check_unscaled(a, scale_a, scale_b)
    x = x._replace(forms=forms)
    config = config or _tensor_memory.choose(x.m, x.n, x.scaling, forms.blocks)
    _tensor_memory.check(config, x)
    product = _tensor_memory.kernel(x, config, sms, interpret)
    if a.dtype == _FP4:  # rows of a multiple of 16 bytes
        return product
    pads = [padding_of(a, interpret), padding_of(b, interpret)]
    pads += [] if bias is None else [padding_of(bias, interpret)]
    pads += [] if scale_a is None else [None]
    if scale_b is not None:
        pads.append(padding_of(scale_b, interpret) if forms.b == "each" else None)
    return with_padding(product, pads)


def _on_warps(x, operands, config, accumulate, interpret):
    """The kernel for GPUs with mma.sync alone. operands: as of _k_major."""
    a, b, _, scale_a, scale_b = operands
    target = _core.target(a.device)
    if x.scaling or a.dtype == _FP4:
        _block_scaled.refuse_elsewhere(x)
    pads = [padding_of(a, interpret), padding_of(b, interpret), None]
    if a.dtype.name in FP8:
        by_lanes = "TMA" not in target["features"]
        if x.ta:
            pads[0] = transposing(a.shape, a.dtype, a.aligned, interpret, by_lanes)
        if not x.tb:
            pads[1] = transposing(b.shape, b.dtype, b.aligned, interpret, by_lanes)
        pads = [*pads[:2], *(None for array in operands[2:] if array is not None)]
        x = x._replace(ta=False, tb=True, forms=forms_of(scale_a, scale_b, x.m, x.n, x.k))
    else:
        _check_unscaled(a, scale_a, scale_b)
    if accumulate:
        _check_accumulation(x, a, config, on_warps=True)
        x = x._replace(accumulate=True)
    config = config or _warp_mma.choose(x, plgpu.sm_count(a.device), target)
    product = with_padding(_warp_mma.kernel(x, config, target["name"], interpret), pads)
    return _Into(product) if accumulate else product


def _check_unscaled(a, scale_a, scale_b):
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            raise ValueError(
                f"matmul: {name} is for 8-bit floats, a and b are {a.dtype}; multiply the result"
            )


def _of_float32(x, operands, config, invariant, precision, accumulate, interpret):
    """The product of float32 operands. operands: as of _k_major."""
    a, b, bias, scale_a, scale_b = operands
    _check_unscaled(a, scale_a, scale_b)
    if accumulate:
        _check_accumulation(x, a, config)
    if precision == "tf32":
        _check_on_hopper(a, config, "tf32", "precision='bf16x3'")
        sms = plgpu.sm_count(a.device)
        return _k_major(x, operands, config, invariant, sms, interpret)
    if config is None and not invariant:
        config = _of_few_float32(x, a, interpret)
    if isinstance(config, FewRowsConfig):
        return _of_few_rows(x, a, b, config, interpret)

    def make(x, a, b):
        operands, sms = (a, b, bias, None, None), plgpu.sm_count(a.device)
        if isinstance(config, MmaConfig) or config is None and _warp_mma.runs_here(a.device):
            return _on_warps(x, operands, config, False, interpret)
        on_blackwell = config is None and _tensor_memory.runs_here(a.device)
        if on_blackwell or isinstance(config, TensorMemoryConfig):
            return _in_tensor_memory(x, operands, config, sms, interpret)
        return _of_16_bits(x, a, b, config, invariant, sms, interpret)

    return _float32.product(x, a, b, make, interpret)


def _of_few_float32(x, a, interpret):
    """The configuration for few rows of float32; None: they are multiplied in parts."""
    on_hopper = not (_tensor_memory.runs_here(a.device) or _warp_mma.runs_here(a.device))
    if not on_hopper or not _few_rows.suit_float32(x.m, x.ta, x.tb):
        return None
    if x.m > _EDGES[0] and not is_static(_kind(x, a, False, interpret), x.m):
        return None
    return _few_rows.choose_float32(x.m, x.n, x.k, x.tb, plgpu.sm_count(a.device))


def _of_narrow_types(x, operands, config, invariant, accumulate, interpret):
    """The product of operands of 16 bits or fewer. operands: as of _k_major."""
    a, b, _, scale_a, scale_b = operands
    sms = plgpu.sm_count(a.device)
    if a.dtype.name == "int8":
        _check_on_hopper(a, config, "int8 operands", "bfloat16 operands")
    on_blackwell = config is None and _tensor_memory.runs_here(a.device)
    on_blackwell |= isinstance(config, TensorMemoryConfig)
    if x.scaling and not on_blackwell:
        _block_scaled.refuse_elsewhere(x)
    if isinstance(config, MmaConfig) or config is None and _warp_mma.runs_here(a.device):
        return _on_warps(x, operands, config, accumulate, interpret)
    if accumulate:
        _check_accumulation(x, a, config)
        x = x._replace(accumulate=True)
        return _Into(_of_16_bits(x, a, b, config, invariant, sms, interpret))
    if on_blackwell:
        return _in_tensor_memory(x, operands, config, sms, interpret)
    if a.dtype.itemsize == 1:
        return _k_major(x, operands, config, invariant, sms, interpret)
    _check_unscaled(a, scale_a, scale_b)
    return _of_16_bits(x, a, b, config, invariant, sms, interpret)


def _of_batches(a, b, bias, scales, config, invariant, **options):
    """The product of arrays with batch dimensions. options: the other ones."""
    if options["accumulate"] or any(s is not None and s.dtype.name != "float32" for s in scales):
        raise NotImplementedError(
            "matmul: batch dimensions with accumulate=True or scales of 8 bits; multiply matrix by"
            f" matrix, got {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        )
    if min(a.ndim, b.ndim) < 2 or 0 in a.shape or 0 in b.shape:
        raise ValueError(
            f"matmul: a and b must have two dims or more, and elements, got {a.shape} and {b.shape}"
        )
    ta, tb = bool(options["transpose_a"]), bool(options["transpose_b"])
    others = {"bias": (bias, None), "scale_a": (scales[0], 0), "scale_b": (scales[1], 1)}
    extras = {n: _batches.Extra(*x) for n, x in others.items() if x[0] is not None}
    for name, extra in extras.items():
        extra.check(name, (a, b))

    def make_all(a, b, *rest, plan):
        given = dict(zip(extras, rest))
        return None if config else _of_one_batch(a, b, plan, given, invariant, options)

    def make(a, b, *rest, batch):
        given = dict(zip(extras, rest))
        found = config
        if found is None and batch > 1:
            found = _choose_for_batch(a, b, batch, given, invariant, options)
            if isinstance(found, MatmulConfig):  # mapped kernels have no memory in common
                found = found._replace(shares=1)
        how = {"config": found, "batch_invariant": invariant, **options}
        return matmul.__wrapped__(a, b, **given, **how)

    return _batches.product(a, b, ta, tb, make, make_all, list(extras.values()))


_TYPICAL_BATCH = 12


def _batch_product(a, b, given, split, options):
    """The Product of one of the matrices of `_of_one_batch`, and (form, shape) of its scales; None
    for none."""
    scales = [given.get(name) for name in ("scale_a", "scale_b")]
    one = [plgpu.ArrayInfo(y.shape[-2:], y.dtype, y.device, True) for y in (a, b)]
    how = (options[n] for n in ("activation", "out_dtype", "transpose_a", "transpose_b"))
    x = _checked(*one, given.get("bias"), *how, any(s is not None for s in scales))
    if a.dtype.itemsize > 1:
        _check_unscaled(a, *scales)
        if split:
            bf16 = jnp.dtype(jnp.bfloat16)
            x = x._replace(k=x.k * _float32.PARTS, dtypes=(bf16, bf16))
        return x, (None, None)
    of_one = [s and plgpu.ArrayInfo(s.shape[-2:], s.dtype, s.device) for s in scales]
    x = x._replace(forms=forms_of(*of_one, x.m, x.n, x.k))
    shapes = [
        {"one": (), "each": (n,), "blocks": s and s.shape[-2:]}.get(form)
        for form, n, s in zip(x.forms, (x.m, x.n), scales)
    ]
    return x, tuple(form and (form, shape) for form, shape in zip(x.forms, shapes))


def _of_one_batch(a, b, plan, given, invariant, options):
    """What `make_all` of `_batches.product` returns. given: bias and scales by name."""
    interpret, sms = options["interpret"], plgpu.sm_count(a.device)
    split = a.dtype.name == "float32" and options["precision"] != "tf32"
    k_major, count = a.dtype.itemsize != 2 and not split, math.prod(plan.extents)
    on_hopper = not (_tensor_memory.runs_here(a.device) or _warp_mma.runs_here(a.device))
    if not on_hopper or a.dtype == _FP4:
        return None
    x, scales = _batch_product(a, b, given, split, options)
    ta, m, moved = x.ta, x.m, (k_major and x.ta, k_major and not x.tb)
    x = x._replace(ta=False, tb=True) if k_major else x
    several = tuple(
        n in given and given[n].ndim == y.ndim > 2 for n, y in zip(("scale_a", "scale_b"), (a, b))
    )
    groups = plan.groups if len(plan.groups) > 1 or not plan.groups[0][2] else ()
    has = _batches.Batch(count, a.ndim > 2, b.ndim > 2, None, None, groups, several, plan.apart)
    in_bytes = x.dtypes[0].itemsize
    rows = Rows(x.n, x.k, sms, x.ta, x.tb, invariant, in_bytes, x.forms.blocks, _grain(a.dtype))
    kind = *_kind(x._replace(batch=has.without_sizes()), a, invariant, interpret), a.dtype, moved
    if groups and max(plan.extents) > a.size or plan.apart and any(several):  # it tells them
        return None
    x, of_call = _batches.with_open_sizes(x, has, kind, not moved[0])
    open_ = isinstance(x.batch.size, plgpu.Dim)
    few_rows = in_bytes == 2 and isinstance(rows.own(m), FewRowsConfig)
    few_rows |= split and not invariant and _few_rows.suit_float32(m, ta, x.tb)
    if not open_ and (count == 1 or few_rows):
        return None
    if isinstance(x.m, plgpu.Dim):
        config = shared(rows, m, _batches.BUCKETS, (count,))
    else:
        config = rows.own(m, _TYPICAL_BATCH if open_ else count)
    known = None if x.batch.rows is None else x.m, None  # of what has so many rows, of the rest
    given_sizes = (s and (s[0], (n, None)[: len(s[1])]) for s, n in zip(scales, known))
    product = _kernel(x, config, sms, interpret, tuple(given_sizes))
    shapes = of_call.operands(a.shape[-2:], b.shape[-2:], scales)
    shapes[2:2] = [given[n].shape for n in given if n == "bias"]
    arrays = [
        plgpu.ArrayInfo(s, y.dtype, y.device, y.aligned)
        for s, y in zip(shapes, (a, b, *given.values()))
    ]
    axes = [int(not t) for t in (ta, not x.tb)] if split else (None, None)
    by_tma = ["bias"] * k_major + ["scale_b"] * (x.forms.b == "each")
    with together(False) if open_ else contextlib.nullcontext():  # copies take no longer
        pads = _batches.copies(arrays, axes, moved, [n in by_tma for n in given], interpret)
    if plan.apart and any(pads):
        return None
    result = (count, m, x.n) if x.batch.rows is None else (count * m, x.n)
    sizes = plan.extents if open_ and groups else ()
    return with_padding(product, pads), shapes, result, sizes


def _choose_for_batch(a, b, batch, given, invariant, options):
    """The configuration for one of so many matrices; None on other GPUs than Hopper."""
    if _tensor_memory.runs_here(a.device) or _warp_mma.runs_here(a.device):
        return None
    ta, tb = bool(options["transpose_a"]), bool(options["transpose_b"])
    scaled = "scale_a" in given or "scale_b" in given
    x = _checked(a, b, given.get("bias"), None, None, ta, tb, scaled)
    sms, in_bytes = max(plgpu.sm_count(a.device) // batch, 1), a.dtype.itemsize
    tf32 = options["precision"] == "tf32"
    if in_bytes == 4 and not (tf32 or invariant) and _few_rows.suit_float32(x.m, ta, tb):
        return _few_rows.choose_float32(x.m, x.n, x.k, tb, sms)
    if in_bytes == 2 or in_bytes == 4 and not tf32:
        k = x.k * (1 if in_bytes == 2 else _float32.PARTS)
        return (choose_invariant if invariant else choose)(
            x.m, x.n, k, sms, *(() if invariant else (ta, tb))
        )
    blocks = forms_of(given.get("scale_a"), given.get("scale_b"), x.m, x.n, x.k).blocks
    if invariant:
        return choose_invariant(x.m, x.n, x.k, sms, in_bytes, blocks)
    return choose_k_major(x.m, x.n, x.k, sms, blocks, in_bytes, _grain(a.dtype))


@plgpu.specialize(in_place=False)
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
    accumulate=False,
    precision="bf16x3",
    return_product=False,
    interpret=None,
):
    """``activation(a @ b + bias)`` with float32 accumulation, int32 for int8.

    a: (M, K), or (K, M) with ``transpose_a``; b: (K, N), or (N, K) with ``transpose_b``; row-major,
    any M, N, K; both float16, bfloat16, float32 or int8, or both 8-bit floats, float8_e4m3fn or
    float8_e5m2, also mixed. bias: (N,), dtype of ``a``, for 8-bit operands any 16- or 32-bit float.
    activation: a function of a float32 array, or "relu", "silu", "gelu", "tanh". out_dtype:
    float16, bfloat16 or float32; that of ``a`` by default, for 8-bit operands bfloat16. int8
    without scales, bias and activation gives exact int32 sums (modulo 2**32), or floats. config: a
    :class:`MatmulConfig`, for few rows of floats a :class:`FewRowsConfig`, on Blackwell a
    :class:`TensorMemoryConfig`, on sm_80, sm_86, sm_89 and sm_120a a :class:`MmaConfig`; chosen
    from the shape by default. out: a preallocated result.

    precision: of float32 operands. "bf16x3": they are each split into two bfloat16 parts by
    separate kernels and multiplied as three products; the relative error of a term is about 2**-16,
    infinities give NaN. On Hopper, up to 16 rows (with ``transpose_b`` 8, with ``transpose_a``
    one) are multiplied in float32 instead, without ``batch_invariant``. "tf32" (Hopper): the tensor
    cores read 10 bits of each mantissa, cut off; the relative error of a term is below 2**-9.

    Operands may have batch dimensions before these two, which broadcast as in NumPy: (..., M, K)
    and (..., K, N) give (..., M, N), in one launch (and those that pad, transpose or split
    operands). Scales are those of all matrices, or have the batch dimensions of their operand
    before two of their own: (..., 1, 1); (..., M, 1) and (..., 1, N); or those of blocks.
    ``batch_invariant`` then holds for the number of matrices, too. NotImplementedError for batches
    with scales of 8 bits and ``accumulate``.

    scale_a, scale_b: float32 arrays that 8-bit operands are multiplied with, None for ones. One
    number, of shape (), (1,) or (1, 1); or one for each row of the product, (M,) or (M, 1), and
    each column, (N,) or (1, N); or, both together, (M, ceil(K / 128)) and
    (ceil(N / 128), ceil(K / 128)): a number for a row of A and 128 elements of K, and for 128
    columns of B and 128 of K. Shapes do not depend on ``transpose_a`` and ``transpose_b``.

    Blackwell's tensor cores also apply scales of 8 bits themselves: with 8-bit operands one
    float8_e8m0fnu for each 32 elements along K (mxfp8); with both operands float4_e2m1fn one
    float8_e8m0fnu for 32 (mxf4) or 16, or one float8_e4m3fn for 16 (nvfp4). Both scales then have
    the shape (ceil(rows / 128), ceil(K / (4 * block)), 32, 16) that
    ``plgpu.ext.format_tcgen05_scales`` gives for (rows, blocks); rows are M and N. A shape that
    fits blocks of 32 means them. 4-bit operands are contiguous along K, a multiple of 32
    (NotImplementedError, as on Hopper).

    The tensor cores sum products of 8-bit floats with about 14 bits, along all of K without
    scales of blocks ("fast accumulation"), along 128 elements with them. 8-bit and tf32 operands
    that are not contiguous along K are first transposed by another kernel.

    batch_invariant: the bits of a row of the result depend on that row of ``a``, ``b``, the dtypes
    and options alone, not on M or on other rows (for the same config, if one is given): K is never
    divided, and a single row goes to the tensor cores, too, which takes longer where M and N are
    small. deterministic: a call repeats bit for bit, in other processes, too, whatever they called
    before; each number of rows has a program of its own. Without it, the bits depend on whether the
    numbers of rows of a process share a program, and may change once, when one that came often gets
    a program of its own.

    accumulate: add the product to the contents of ``out``, for example a float32 gradient; without
    bias and activation, on Hopper for 16-bit operands where rows of ``out`` are a multiple of 16
    bytes (with a config of one slice and a ``cluster`` or ``cluster_n`` of 1), on sm_80, sm_86,
    sm_89 and sm_120a for all operands. NotImplementedError elsewhere; ValueError without ``out``.

    return_product: also return ``a @ b + bias``, in out_dtype, from which the gradient of an
    activation is computed; on Hopper, of 16-bit operands without batch dimensions, with an
    activation and a config of one slice. NotImplementedError elsewhere.

    Returns (M, N) of the caller's kind of array, or with return_product the pair of it and the
    product. TypeError, ValueError for other dtypes and shapes."""
    ta, tb = bool(transpose_a), bool(transpose_b)
    invariant = batch_invariant
    _check_options(a, config, precision)
    options = {"activation": activation, "out_dtype": out_dtype, "accumulate": accumulate}
    options |= {"transpose_a": ta, "transpose_b": tb, "precision": precision}
    options |= {"interpret": interpret}
    operands = a, b, bias, scale_a, scale_b
    with together(True) if deterministic else contextlib.nullcontext():
        return _of_any_operands(operands, config, invariant, return_product, **options)


def _of_any_operands(operands, config, invariant, return_product, **options):
    """The kernel for the operands of `matmul`: a, b, bias and both scales."""
    a, b, bias, *scales = operands
    if max(a.ndim, b.ndim) > 2:
        if return_product:
            _check_kept(None, a, max(a.ndim, b.ndim), config)
        return _of_batches(a, b, bias, tuple(scales), config, invariant, **options)
    scaled = any(s is not None for s in scales)
    names = "activation", "out_dtype", "transpose_a", "transpose_b"
    x = _checked(a, b, bias, *(options[name] for name in names), scaled)
    x = x._replace(scaling=_block_scaled.scaling_of(a, b, *scales, x.m, x.n, x.k))
    accumulate, interpret = options["accumulate"], options["interpret"]
    if return_product:
        x = x._replace(keep=True)
        _check_kept(x._replace(accumulate=bool(accumulate)), a, 2, config)
    if invariant and isinstance(config, MatmulConfig):
        config = config._replace(serpentine=False)
    if a.dtype.name == "float32":
        how = config, invariant, options["precision"], accumulate, interpret
        return _of_float32(x, operands, *how)
    return _of_narrow_types(x, operands, config, invariant, accumulate, interpret)


_GAIN = 1.01  # by which a program of its own is to be faster, by the estimate


def _own_program(a, b, **options):
    """specialize's ``better``, for calls whose rows are known at run time only: their own program
    where the configuration for many numbers of rows takes longer. Its sums may be in another order:
    not where the caller relies on that."""
    named = ("bias", "activation", "out_dtype", "transpose_a", "transpose_b")
    how = {name: options[name] for name in named}
    ta, tb = how.pop("transpose_a"), how.pop("transpose_b")
    promised = options["deterministic"] or options["batch_invariant"] or options["return_product"]
    if promised or options["accumulate"]:
        return None
    if a.dtype.itemsize != 2 or ta or max(a.ndim, b.ndim) > 2:
        return own_program(matmul.__wrapped__)(a, b, **options)
    if _tensor_memory.runs_here(a.device) or _warp_mma.runs_here(a.device):
        return None
    x = _checked(a, b, **how, ta=bool(ta), tb=bool(tb))
    kind, interpret = _kind(x, a, False, options["interpret"]), options["interpret"]
    if not (_may_leave_open(x, options["config"]) and may_settle(kind)):
        return None
    if isinstance(rows_of(kind, x.m, _EDGES, _WEIGHT)[0], int):
        return None
    sms = plgpu.sm_count(a.device)
    rows = Rows(x.n, x.k, sms, x.ta, x.tb)
    own, others = rows.own(x.m), shared(rows, x.m, _BUCKETS)
    if rows.time(x.m, others) < _GAIN * rows.time(x.m, own):
        return None

    def make():
        product = _of_16_bits(x, a, b, rows.of_one(x.m), False, sms, interpret)
        if a.device is not None:
            compile_for(product, [a, b] if options["bias"] is None else [a, b, options["bias"]])
        settle(kind, x.m)
        return product

    return make


_TRANSPOSES = {"transpose_a": ("a",), "transpose_b": ("b",)}
matmul.maker.better = _own_program  # type: ignore[attr-defined]  # not public
matmul.maker.transposes = _TRANSPOSES  # type: ignore[attr-defined]
