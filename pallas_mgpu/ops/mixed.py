"""Product of 16-bit floats with int8, int4 or 8-bit float weights, on Hopper's tensor cores.

The transposed product is computed: out.T = weights @ x.T. So the weights are the left operand,
which tensor cores take from registers: a consumer loads its 64 rows of a slot, each lane the bytes
that it needs, and converts them to floats. (Wider loads and shuffles between lanes take more of the
integer units, which are the limit.) Not the weights but sums are multiplied with the scales: the
products of a group of K add up in an accumulator of their own, which goes into float32 sums with
one multiplication. That is exact, and few operations where x has few rows. For tiles of more than
192 rows registers have no room for both: there sums stay in their accumulator, in units of scales
(_mixed_sums.py). Scales of groups come through the ring with the weights: a load by the lanes would
wait for memory in every group.

Blocks are persistent. The producer fills a ring by TMA; each consumer owns 64 rows of the weights,
for `tile_m` rows of x. Where x has few rows the memory is the limit: then blocks of a cluster
divide K, so that all SMs fetch, and the first one adds up their sums in a fixed order. A consumer
would wait most of the time for its weights to be converted and for its product, so two or four
consumers take the slots of the same rows in turn.

Where x has many rows, wide tiles convert each weight less often, and blocks of a cluster share the
rows of x. `ahead` converts the weights of a step while the product of the step before runs.
Consumers that issue their products in order (`ordered`) fall out of step, so that one converts and
adds while the other multiplies."""

import contextlib
import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _mixed_tensor_memory, _tensor_memory, _warp_mma
from ._common import (
    REGISTERS,
    SMEM_BYTES,
    SMS,
    Ring,
    StaticTiles,
    WarpSpecialized,
    dtype_of,
    store,
    swizzled,
)
from ._matmul_choice import clusters_at_once
from ._mixed_sums import BITS, load_scales, load_weights, scaled, sum_of_groups
from ._mixed_tensor_memory import TensorMemoryMixedConfig
from ._open_rows import better, rows_of
from ._padding import needs_padding, padding_of, with_padding
from ._shares import Parts, SharedTiles, Work, semaphores, shares_of
from .gated import SLOPES

_WHOLE = 192  # rows of a tile that have sums and an accumulator in registers


class MixedConfig(NamedTuple):
    """How a mixed product is tiled.

    ``consumers``: warpgroups that multiply, 64 rows of the weights each, 1 to 3. ``tile_m``: rows
    of x of a tile, a multiple of 8 from 16 up to 256, with 3 consumers up to 192. ``split``: blocks
    of a cluster that divide K, 1, 2, 4 or 8; from 2 on for tile_m up to 64. ``stages``: slots of
    the ring; 0: as many as fit. ``step``: elements of K per slot, 64 or 128. ``group``: tiles of x
    worked on together, for the L2. ``turns``: warpgroups that alternate between the slots of the
    same rows, 1, 2 or 4; consumers * turns is at most 4, and tile_m times that at most 256 from 2
    on. ``ahead``: so many steps, one after the other, convert weights while the product before
    runs; 0: none do; no effect with groups of scales. ``cluster``: blocks side by side that share
    rows of x, 1 or 2; 1 with a split, 2 with a tile_m that is a multiple of 16. ``ordered``:
    consumers, 2 or 3 with 1 turn, issue their products one after the other, so that some multiply
    while others convert. ``shares``: parts of K of the last tiles, which are too few for all SMs;
    one block of each of them adds them up. Above 1 with 1 turn, no split and a cluster of 1; no
    effect under ``vmap`` and for rows at run time. With groups of scales a tile_m above 128 wants
    up to 2 consumers, 1 turn and no split.
    """

    consumers: int = 2
    tile_m: int = 128
    split: int = 1
    stages: int = 0
    step: int = 128
    group: int = 8
    turns: int = 1
    ahead: int = 0
    cluster: int = 1
    ordered: bool = False
    shares: int = 1


class Piece(NamedTuple):
    """Of K, that a block works on: ``it``, number of its first step among all of the block;
    ``first``: the same along K; ``steps``: how many."""

    it: object
    first: object
    steps: object


class Product(NamedTuple):
    """What a kernel computes."""

    m: int
    n: int
    k: int
    dtype: np.dtype  # of x
    weight_dtype: np.dtype
    scale_dtype: np.dtype | None  # None without scales
    scale_groups: int
    out_dtype: np.dtype
    activation: str = ""  # of the first half of the columns, that multiplies the other one

    @property
    def columns(self):
        """Of the result."""
        return self.n // 2 if self.activation else self.n


class _Plan:
    """What follows from a product and a configuration."""

    def __init__(self, x, cfg, sms):
        self.x, self.cfg = x, cfg
        self.strips = cfg.consumers  # of 64 rows of the weights
        self.cols = 32 if x.activation else 64  # of the result, of a strip
        self.rows, self.consumers = 64 * self.strips, self.strips * cfg.turns
        self.tiles_m = pl.cdiv(x.m, cfg.tile_m)
        self.tiles_n = pl.cdiv(x.n, self.rows * cfg.cluster)
        self.total = self.tiles_m * self.tiles_n
        steps = pl.cdiv(x.k, cfg.step)
        self.grouped = x.scale_groups > 1
        # Sums and an accumulator of so many rows do not fit into registers.
        whole = _WHOLE if cfg.consumers < 3 else 64
        self.in_place = self.grouped and cfg.tile_m > whole and cfg.turns == cfg.split == 1
        self.parts_of_group = 1
        if self.in_place:
            length = x.k // x.scale_groups
            self.parts_of_group = length // math.gcd(length, 128)
        if self.grouped:  # a sum for each group, or part of one
            groups = x.scale_groups * self.parts_of_group
            self.groups, self.group_steps = groups // cfg.split, steps // groups
        else:
            self.groups, self.group_steps = 1, pl.cdiv(steps, cfg.split)
        self.steps = self.groups * self.group_steps  # of a block, for a tile
        # shares of K are multiples of so many steps
        self.unit = self.group_steps if self.grouped else math.gcd(self.steps, cfg.ahead or 1)
        # Programs for many numbers of rows do not fetch what is beyond x: TMA is slow to fill with
        # zeros. They fetch a tile in boxes of powers of two, those that the number of its rows is
        # the sum of. (Where blocks share x, and in small tiles, more copies take longer.)
        self.boxes = [cfg.tile_m]
        if isinstance(x.m, plgpu.Dim) and cfg.cluster == 1 and cfg.tile_m >= 64:
            self.boxes = [1 << i for i in range(cfg.tile_m.bit_length() - 1, 2, -1)]
        bits = BITS[x.weight_dtype.name]
        slot = (self.rows * bits // 8 + cfg.tile_m * 2) * cfg.step
        # scales arrive with the weights: lanes would wait for memory, group by group
        self.scales_by_tma = self.grouped and x.columns * x.scale_dtype.itemsize % 16 == 0
        if self.scales_by_tma:
            slot += self.rows * x.scale_dtype.itemsize
        self.parts = cfg.split * cfg.turns  # of sums
        sums = (self.parts - 1) * self.strips * 64 * cfg.tile_m * 4

        def slots(stored):
            """That fit beside store buffers of so many rows."""
            used = self.strips * stored * self.cols * x.out_dtype.itemsize + 2048 + sums
            return min((SMEM_BYTES - used) // slot, 16)

        # A slot always has the same turn, which sees every phase of it; slots of a product are
        # released after it, or after the next one has been issued.
        round_ = cfg.turns * (self.group_steps if self.grouped else 1)
        needed = round_ if cfg.turns > 1 else 1
        if self.in_place:
            needed = round_ + 1
        elif cfg.ahead and not self.grouped:
            needed = 2 * round_
        # rows of a store buffer: those of large tiles leave in parts, so that more slots fit
        parts = 1
        if cfg.tile_m > 128 and (self.grouped or slots(cfg.tile_m) < 3):
            parts = 4 if self.in_place else 2
        self.stored = pl.cdiv(cfg.tile_m, 16 * parts) * 16 if parts > 1 else cfg.tile_m
        most = slots(self.stored)
        self.stages = min(cfg.stages or most, most, max(self.steps, 2))
        if needed > most:
            raise ValueError(
                f"mixed_matmul: {needed} slots of the ring are needed, {max(most, 0)} fit into"
                f" SMEM; got {cfg}"
            )
        self.stages = max(self.stages // round_ * round_ if cfg.turns > 1 else self.stages, needed)
        fit = max(int(clusters_at_once(sms, cfg.cluster)), 1)
        # The ring keeps other turns from sending sums of the next tile before the first consumer
        # has those of this one, if it is shorter than a tile by the slots of all turns.
        rounds = self.steps % round_ == 0 and self.steps >= self.stages + round_
        one_each = cfg.split > 1 or cfg.turns > 1 and not rounds
        one_each = one_each or _sizes.most(self.total) <= fit
        self.clusters = self.total if one_each else _sizes.minimum(self.total, fit)
        self.shares = None  # of the last tiles
        if cfg.shares > 1 and not isinstance(self.total, plgpu.Dim):
            self.shares = shares_of(self.total, fit, self.steps // self.unit, cfg.shares)
        if self.shares:
            self.clusters = fit if self.total > fit else self.shares.clusters
        axes = {"ck": cfg.split, "cn": cfg.cluster}
        self.axes = {name: size for name, size in axes.items() if size > 1}
        self.registers = REGISTERS.get(self.strips) if cfg.tile_m > 64 else None
        if self.consumers == 4:
            self.registers = (32, 112)
        if self.strips == 2 and self.grouped and cfg.tile_m > 128:
            self.registers = (24, 240)
        self.by_tma = _sizes.most(x.m) == 1 or x.columns * x.out_dtype.itemsize % 16 == 0

    def scratch(self):
        x, cfg, rows_of_w = self.x, self.cfg, (self.rows, self.cfg.step)
        bytes_ = cfg.step * BITS[x.weight_dtype.name] // 8
        tiled = (plgpu.TilingTransform((8, cfg.step)), plgpu.SwizzleTransform(bytes_))
        x_tile, x_tiled = (cfg.tile_m, cfg.step), swizzled(64, x.dtype)
        found = {
            "w_smem": plgpu.SMEM((self.stages, *rows_of_w), x.weight_dtype, transforms=tiled),
            "x_smem": plgpu.SMEM((self.stages, *x_tile), x.dtype, transforms=x_tiled),
            "o_smem": plgpu.SMEM((self.strips, self.stored, self.cols), x.out_dtype),
        }
        copies = 1 + len(self.boxes)
        if self.scales_by_tma:
            copies += 1
            found["s_smem"] = plgpu.SMEM((self.stages, self.rows), x.scale_dtype)
        shared = ("cn",) if cfg.cluster > 1 else ()
        found |= Ring.barriers(self.stages, copies, self.strips, shared)
        if self.parts > 1:
            sums = (self.parts - 1, self.strips, 64, cfg.tile_m)
            found["inbox"] = plgpu.SMEM(sums, jnp.float32)
            arrivals = {"num_arrivals": cfg.turns, "num_barriers": self.strips}
            if cfg.split > 1:
                found["arrived"] = plgpu.ClusterBarrier(collective_axes=("ck",), **arrivals)
            else:
                found["arrived"] = plgpu.Barrier(**arrivals)
        if self.shares:
            tile = self.consumers, 64, cfg.tile_m
            found["parts"] = Parts.scratch(self.shares, cfg.cluster, *tile, jnp.float32)
        return found


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.cfg = plan.cfg
        done = semaphores(plan.shares, plan.cfg.cluster, plan.consumers)
        slots = [self.w_smem, self.x_smem]
        if plan.scales_by_tma:
            slots.append(self.s_smem)
        self.ring = Ring(plan.stages, self.full, self.empty, *slots)
        cluster = lax.axis_index("cluster")
        if done is None:
            self.tiles = StaticTiles(plan.total, plan.clusters, cluster)
        else:
            units = plan.steps // plan.unit
            self.tiles = SharedTiles(plan.total, plan.clusters, units, plan.shares, cluster)
        self.rank = lax.axis_index("ck") if "ck" in plan.axes else 0
        self.place = lax.axis_index("cn") if "cn" in plan.axes else 0
        self.shared = None if done is None else Parts(self.parts, done, self.place)

    def steps_of(self, t):
        """The tile of unit t of the schedule, the first of its steps of K and their number."""
        p = self.plan
        if isinstance(t, Work):
            return t.tile, t.first * p.unit, t.steps * p.unit
        return t, self.rank * p.steps, p.steps

    def origin(self, t):
        """First row of x and of the weights of tile t."""
        p, band_height = self.plan, self.cfg.group
        band, inside = t // (band_height * p.tiles_n), t % (band_height * p.tiles_n)
        height = jnp.minimum(p.tiles_m - band * band_height, band_height)
        height = jnp.maximum(height, 1)
        i = band * band_height + lax.rem(inside, height)
        col = lax.div(inside, height) * self.cfg.cluster + self.place
        return i * self.cfg.tile_m, col * p.rows

    # ---- producer

    def prefetch(self):
        """Asks for the weights that fill the ring first. They go to the L2 cache, where stores of
        the kernels before this one reach them."""
        p, cfg = self.plan, self.cfg
        zero, tiles = jnp.int32(0), self.tiles
        t = tiles.work(zero) if isinstance(tiles, SharedTiles) else tiles.tile(zero)
        tile, first, steps = self.steps_of(t)
        _, col = self.origin(tile)

        def one(s, _):
            along_k = pl.ds((first + s) * cfg.step, cfg.step)
            plgpu.async_prefetch(self.strips_of(self.w, col, along_k))

        count = min if isinstance(steps, int) else jnp.minimum
        lax.fori_loop(0, count(p.stages, steps), one, None)

    def producer(self):
        self.ring.drain(self.tiles.produce(self.fetch_tile, jnp.int32(0)))

    def fetch_tile(self, t, it):
        p, cfg = self.plan, self.cfg
        tile, first, steps = self.steps_of(t)
        row, col = self.origin(tile)
        rows = jnp.minimum(p.x.m - row + 7, cfg.tile_m) // 8 * 8  # of x, that the tile has

        def copy(s, w_slot, x_slot, *others):
            *s_slot, full = others
            along_k = pl.ds((first + s) * cfg.step, cfg.step)
            self.copy_strips(self.w, col, w_slot, full, along_k)
            shared = "cn" if "cn" in p.axes else None
            for start, box, exists in self.boxes(rows, it + s):
                x_rows = self.x.at[pl.ds(row + start, box), along_k]
                part = x_slot.at[pl.ds(start, box)]
                how = {"collective_axes": shared, "predicate": exists}
                plgpu.copy_gmem_to_smem(x_rows, part, full, **how)
            if s_slot:
                group = (first + s) // (p.group_steps * p.parts_of_group)
                self.copy_strips(self.scales.at[group], col, s_slot[0], full)

        self.ring.fetch(0, steps, self.ring.at(it), copy)
        return it + steps

    def strips_of(self, ref, col, *rest):
        """The rows of the weights, the first dim of ref, that this block multiplies. Those of a
        gated product are eight of the gate, eight of up and so on, so that a lane of a consumer
        has sums of both for the same column."""
        p = self.plan
        if not p.x.activation:
            return ref.at[(pl.ds(col, p.rows), *rest)]
        shape, others = (2, p.x.n // 16, 8, *ref.shape[1:]), range(3, ref.ndim + 2)
        pairs = ref.reshape(shape).transpose((1, 0, 2, *others))
        return pairs.at[(pl.ds(col // 16, p.rows // 16), slice(None), slice(None), *rest)]

    def copy_strips(self, ref, col, slot, full, *rest):
        if self.plan.x.activation:
            slot = slot.reshape((self.plan.rows // 16, 2, 8, *slot.shape[1:]))
        plgpu.copy_gmem_to_smem(self.strips_of(ref, col, *rest), slot, full)

    def boxes(self, rows, it):
        """The first row of each box of a tile with so many rows, in the tile, the number of its
        rows, and whether it is fetched in step `it`. When a slot is filled for the first time, the
        whole tile is, so that no memory stays undefined."""
        p, tile_m = self.plan, self.cfg.tile_m
        if len(p.boxes) == 1:
            yield 0, tile_m, None
            return
        rows = lax.select(it < p.stages, tile_m, rows)
        for box in p.boxes:
            yield rows // (2 * box) * (2 * box), box, rows & box != 0

    # ---- consumers

    def consumer(self, me):
        strip, turn = me, 0
        if self.cfg.turns > 1:
            strip, turn = me % self.plan.strips, me // self.plan.strips
        multiply = functools.partial(self.multiply_tile, strip, turn)
        self.tiles.consume(multiply, jnp.int32(0))

    def multiply_tile(self, strip, turn, t, it):
        tile, first, steps = self.steps_of(t)
        row, col = self.origin(tile)
        col = col + strip * 64
        piece = Piece(it, first, steps)
        value = self.scaled_sum(strip, turn, piece, col)
        if isinstance(t, Work):
            self.finish(strip, t, value, row, col)
        elif self.plan.parts == 1:
            self.epilogue(strip, value, row, col)
        else:
            self.reduce(strip, turn, value, row, col)
        return it + steps

    def finish(self, strip, t, value, row, col):
        """Hands over what the block has of a tile without the last steps, and stores a tile with
        what others have of it."""
        shared, tiles = self.shared, self.tiles
        pl.when(~t.ends)(lambda: shared.hand_over(strip, [value], tiles, t))

        @pl.when(t.ends)
        def _():
            self.epilogue(strip, *shared.added(strip, [value], tiles, t), row, col)

    def share(self, count, turn):
        """How many of so many it is this consumer's turn to take."""
        turns = self.cfg.turns
        if turns == 1:
            return count
        return count // turns if count % turns == 0 else (count - turn + turns - 1) // turns

    def scaled_sum(self, strip, turn, piece, col):
        """Of a piece of K and the slots that it is this consumer's turn to take."""
        p, turns = self.plan, self.cfg.turns
        if not p.grouped:
            scales = self.load_scales(0, col)
            value = self.sum(strip, piece.it + turn, self.share(piece.steps, turn), turns)
            return scaled(value, scales)
        if p.in_place:
            return self.sum_in_place(strip, piece, col)

        def group(i, total):
            g = turn + i * turns
            first = piece.it + g * p.group_steps
            scales = self.scales_of(piece, g, strip, col)
            part = self.sum(strip, first, p.group_steps, 1, waited=p.scales_by_tma)
            return total + scaled(part, scales)

        zeros = jnp.zeros((64, self.cfg.tile_m), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        # NVRTC 13.0 takes the last step apart and then unrolls what it knows the count of
        count = self.share(self.groups_of(piece), turn)
        count = lax.optimization_barrier(jnp.int32(count))
        return lax.fori_loop(0, count, group, zeros)

    def groups_of(self, piece):
        """How many sums its steps are."""
        return piece.steps // self.plan.group_steps

    def sum_in_place(self, strip, piece, col):
        p, ring, it = self.plan, self.ring, piece.it

        def issue(acc, s, weights):
            with self.in_order():
                plgpu.wgmma(acc, weights, self.x_smem.at[ring.slot(it + s)].T)

        def multiply(acc):
            return sum_of_groups(
                acc,
                lax.optimization_barrier(jnp.int32(self.groups_of(piece))),
                p.group_steps,
                lambda g: self.scales_of(piece, g, strip, col),
                lambda s, first: self.weights_of(strip, it + s, first and p.scales_by_tma),
                functools.partial(issue, acc),
                lambda s: ring.release(it + s),
            )

        return pl.run_scoped(multiply, plgpu.ACC((64, self.cfg.tile_m)))

    def in_order(self):
        """Consumers issue their products one after the other."""
        if not self.cfg.ordered:
            return contextlib.nullcontext()
        return plgpu.ext.ordered_section(self.plan.consumers)

    def scales_of(self, piece, g, strip, col):
        """Of group g of a piece."""
        p = self.plan
        it = piece.it + g * p.group_steps
        if not p.scales_by_tma:
            group = piece.first // p.group_steps + g
            return self.load_scales(group // p.parts_of_group, col)
        self.ring.wait(it)
        return load_scales(self.s_smem.at[self.ring.slot(it), pl.ds(strip * 64, 64)])

    def weights_of(self, strip, it, waited=False):
        if not waited:
            self.ring.wait(it)
        mine = self.w_smem.at[self.ring.slot(it), pl.ds(strip * 64, 64)]
        return load_weights(mine, self.plan.x.dtype)

    def sum(self, strip, first, count, every, waited=False):
        """The product of so many steps, from the first on. waited: it is there."""
        ring = self.ring

        def product(acc, it, waited=False):
            weights = self.weights_of(strip, it, waited)
            with self.in_order():
                plgpu.wgmma(acc, weights, self.x_smem.at[ring.slot(it)].T)

        def multiply(acc):
            def step(i, _, waited=False):
                it = first + i * every
                product(acc, it, waited)
                plgpu.wgmma_wait(0)
                ring.release(it)

            def ahead(i):
                """Weights are converted while the product before is in flight."""
                it = first + i * every
                product(acc, it)
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: ring.release(it - every))

            several = 0 if self.plan.grouped else self.cfg.ahead
            if isinstance(count, int):
                several = several if count > 1 else 0
            elif every > 1 or self.plan.unit % max(several, 1):
                several = 0  # a share is no whole number of those
            if not several or waited:
                if waited:
                    step(0, None, waited=True)
                lax.fori_loop(int(waited), count, step, None)
                return acc[...]

            def some(j, _):
                for i in range(several):
                    ahead(several * j + i)

            lax.fori_loop(0, count // several, some, None)
            if isinstance(count, int):
                for i in range(count - count % several, count):
                    ahead(i)
            value = acc[...]
            ring.release(first + (count - 1) * every)
            return value

        return pl.run_scoped(multiply, plgpu.ACC((64, self.cfg.tile_m)))

    def load_scales(self, group, col):
        """Of 64 rows of the weights; None without scales."""
        p, n = self.plan, self.plan.x.n
        if self.scales is None:
            return None
        if p.x.activation:
            i = jnp.arange(64)
            row = lax.div(col, 2) + i // 16 * 8 + i % 8
            at, keep = row + i % 16 // 8 * (n // 2), row < n // 2
            return pl.load(self.scales, (group, at), mask=keep, other=0.0)
        rows = pl.ds(col, 64)
        if n % (p.rows * self.cfg.cluster) == 0:
            return self.scales[group, rows]
        keep = jnp.arange(64) < n - col
        return pl.load(self.scales, (group, rows), mask=keep, other=0.0)

    def reduce(self, strip, turn, value, row, col):
        """Sums the parts of K in the first consumer of the first block, which stores them."""
        p = self.plan
        part = self.rank * self.cfg.turns + turn
        inbox = plgpu.cluster_ref(self.inbox, {"ck": 0}) if "ck" in p.axes else self.inbox

        @pl.when(part > 0)
        def _():
            inbox[part - 1, strip] = value

        plgpu.barrier_arrive(self.arrived.at[strip])
        if "ck" in p.axes:
            plgpu.barrier_wait(self.arrived.at[strip])

        @pl.when(part == 0)
        def _():
            if "ck" not in p.axes:
                plgpu.barrier_wait(self.arrived.at[strip])
            total = value
            for j in range(p.parts - 1):
                total = total + plgpu.load(self.inbox.at[j, strip], layout=plgpu.Layout.WGMMA)
            self.epilogue(strip, total, row, col)

    # ---- epilogue

    def epilogue(self, strip, value, row, col):
        p, how = self.plan, {"engine": None if self.plan.by_tma else "plain"}
        if p.x.activation:
            col, pairs = lax.div(col, 2), value.reshape((4, 2, 8, value.shape[1]))
            found, _ = SLOPES[p.x.activation](pairs[:, 0])
            value = (found * pairs[:, 1]).reshape((p.cols, value.shape[1]))
        for start in range(0, value.shape[1], p.stored):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = value[:, start : start + p.stored].T.astype(p.x.out_dtype)
            rows = part.shape[0]
            where = self.o.at[pl.ds(row + start, rows), pl.ds(col, p.cols)]
            store(self.o_smem.at[strip, pl.ds(0, rows)], part, where, **how)


@cached
def _kernel(x, cfg, sms, interpret):
    """x: a Product."""
    return _mixed_tensor_memory.build(_Plan(x, cfg, sms), _Block, interpret)


# ---- the choice ---------------------------------------------------------------------------------


_INBOX = 96 << 10  # bytes of sums that a block receives, at most


class _Tiles(NamedTuple):
    """Configurations for more than 64 rows. ``largest``: the one with the most rows of x;
    ``time``: of such a tile with K = 8192, as a multiple of that of 128 x 128; ``fixed``: the part
    of it that tiles with fewer rows of x take, too. (H100)"""

    largest: MixedConfig
    time: float
    fixed: float


_LARGE_TILES = (
    _Tiles(MixedConfig(1, 128, 1, 0, 64, turns=2), 0.68, 0.35),
    _Tiles(MixedConfig(1, 128, 1, 0, 128), 0.7, 0.65),
    _Tiles(MixedConfig(2, 128, 1, 0, 128, ahead=4, ordered=True), 1.0, 0.5),
    _Tiles(MixedConfig(2, 192, 1, 0, 128, ordered=True), 1.35, 0.4),
    _Tiles(MixedConfig(3, 128, 1, 0, 128), 1.55, 0.3),
    _Tiles(MixedConfig(3, 192, 1, 0, 64, ahead=4, ordered=True), 2.0, 0.35),
    _Tiles(MixedConfig(2, 256, 1, 0, 64, 16, ahead=8, cluster=2), 1.72, 0.3),
)
_GROUPED_TILES = (
    _Tiles(MixedConfig(1, 128, 1, 0, 64, turns=2), 0.6, 0.35),
    _Tiles(MixedConfig(1, 128, 1, 0, 128), 0.65, 0.65),
    _Tiles(MixedConfig(2, 128, 1, 0, 128, 16, ordered=True), 1.0, 0.3),
    _Tiles(MixedConfig(2, 192, 1, 0, 128, 16, ordered=True), 1.3, 0.3),
    _Tiles(MixedConfig(3, 128, 1, 0, 128), 1.5, 0.45),
    _Tiles(MixedConfig(2, 256, 1, 0, 64, 16, cluster=2, ordered=True), 1.66, 0.3),
)
_SHARES = 4  # most parts of K of the last tiles
_SHARED = 1.02  # they are to gain more than that
# time of a row of 128 weights that each of them adds, with K = 8192, without and with groups
_EXCHANGE = 7.5e-4, 5.5e-4

# Of rows that share a program. Those above 64 share one for each height of tiles, which is chosen
# for the number of rows: a height for a bucket would leave tiles that are mostly beyond x.
_EDGES = (0, 16, 32, 64, 1 << 22)
_OPEN_HEIGHTS = (96, 128, 192, 256)
_OPEN_HEIGHTS_WIDE = (96, 128, 160, 176, 192, 256)  # where tiles of 64 weights have no use


def choose(m, n, k, scale_groups=1, sms=SMS, weights="int8", is_open=False, out_bytes=2):
    """The configuration for a shape and weights of that dtype, on a GPU with that many SMs.
    is_open: the program is one for many numbers of rows, up to 64 those of a bucket, then any.
    out_bytes: of an element of the result."""
    tile = next((t for t in (16, 32, 48, 64) if m <= t), None)
    if tile is None:
        return _choose_large(m, n, k, scale_groups, sms, weights, is_open, out_bytes)
    step = 128 if k // scale_groups % 128 == 0 else 64
    strips = pl.cdiv(n, 64)  # of 64 rows of the weights
    pairs_fill = strips > sms and 2 * pl.cdiv(strips, 2 * sms) <= pl.cdiv(strips, sms)
    if scale_groups > 1 and k // scale_groups > 4 * step:
        consumers, turns, stages = 1, 1, 0
    elif pairs_fill:
        consumers, turns, stages = 2, 2, 6
    elif tile <= 32:
        consumers, turns, stages = 1, 4, 12
    else:
        consumers, turns, stages = 1, 2, 8
    if n <= 64:
        consumers, turns = 1, min(turns * consumers, 4)
    split, tiles = 1, pl.cdiv(n, 64 * consumers)
    parts = scale_groups if scale_groups > 1 else pl.cdiv(k, step)
    sums = turns * consumers * 64 * tile * 4  # of a block
    while split < 8 and 2 * split * tiles <= sms and parts % (2 * split) == 0:
        # The first block adds up what all have: more than two are for long K.
        if 2 * split * sums > _INBOX or split > 1 and k < 50 * split**2 * turns * tile:
            break
        split *= 2
    return MixedConfig(consumers, tile, split, stages, step, turns=turns)


def _heights(m, n, tiles, is_open, sms):
    """Rows of x that tiles may have."""
    most, fewer = tiles.largest.tile_m, {128: 64, 192: 128, 256: _WHOLE}
    if not is_open:
        fewest = pl.cdiv(m, most)
        grain = 8 * tiles.largest.cluster
        found = [pl.cdiv(pl.cdiv(m, count), grain) * grain for count in (fewest, fewest + 1)]
    elif tiles.largest.consumers == 2:
        found = _OPEN_HEIGHTS if n <= 64 * sms else _OPEN_HEIGHTS_WIDE
    else:
        found = (96, 128) if tiles.largest.turns > 1 and n <= 64 * sms else ()
    return [h for h in found if fewer[most] < h <= most]  # others are faster with fewer


def _choose_large(m, n, k, scale_groups, sms, weights, is_open, out_bytes):
    """The same for more than 64 rows: the tile by which the waves take least."""
    length, found = k // scale_groups, {}
    for tiles in _GROUPED_TILES if scale_groups > 1 else _LARGE_TILES:
        cfg = tiles.largest
        if cfg.turns > 1 and scale_groups > 1 and length > 8 // out_bytes * cfg.step:
            continue  # a slot has the same turn
        if cfg.consumers > 1 and n <= 64 * (cfg.consumers * cfg.cluster - 1):
            continue
        for height in _heights(m, n, tiles, is_open, sms):
            total = pl.cdiv(m, height) * pl.cdiv(n, 64 * cfg.consumers * cfg.cluster)
            of_tile = tiles.time * (tiles.fixed + (1 - tiles.fixed) * height / cfg.tile_m)
            one = cfg._replace(tile_m=height)
            found[one] = pl.cdiv(total * cfg.cluster, sms) * of_tile
            if is_open or cfg.turns * cfg.cluster > 1:
                continue
            steps = pl.cdiv(k, cfg.step)
            units = scale_groups if scale_groups > 1 else steps // math.gcd(steps, cfg.ahead or 1)
            for each in range(2, _SHARES + 1):
                s = shares_of(total, sms, units, each)
                if s and s.each == each:
                    waves = (total - s.tiles) // sms + s.rounds * s.steps / units
                    exchange = _EXCHANGE[scale_groups > 1] * each * height * 8192 / k
                    exchange *= cfg.consumers / 2
                    found[one._replace(shares=each)] = _SHARED * (waves * of_tile + exchange)
    cfg = min(found, key=found.get) if found else MixedConfig(1, 128, 1, 0, 128)
    if scale_groups > 1 and (not is_open or weights == "int4"):
        cfg = cfg._replace(cluster=1)
    if cfg.turns > 1 and (scale_groups == 1 or length == 128):
        # Longer steps are faster, but where the weights of a wave keep the memory busy. Sums of
        # groups for 128 rows spill a little then.
        busy = 4 * pl.cdiv(n, 64) > 3 * sms and weights != "int4"
        spills = scale_groups > 1 and cfg.tile_m > 112
        if is_open or not (busy or spills):
            cfg = cfg._replace(step=128)
    return cfg._replace(step=64) if length % cfg.step else cfg


# ---- the function -------------------------------------------------------------------------------


def _check_config(name, config, x, sms):
    if not isinstance(config, MixedConfig):
        raise TypeError(f"{name}: config must be a MixedConfig, got {config!r}")
    c, groups = config, x.scale_groups
    if (
        c.consumers not in (1, 2, 3)
        or c.tile_m not in range(16, 257, 16 if c.cluster == 2 else 8)
        or c.tile_m > (192 if c.consumers == 3 else 256)
        or c.split not in (1, 2, 4, 8)
        or c.split > 1
        and c.tile_m > 64
        or c.step not in (64, 128)
        or c.stages < 0
        or c.group < 1
        or c.turns not in (1, 2, 4)
        or c.turns > 1
        and (c.tile_m * c.consumers > 256 // c.turns or c.consumers * c.turns > 4)
        or c.cluster not in (1, 2)
        or c.cluster > 1
        and c.split > 1
        or c.ahead < 0
        or c.ordered
        and (c.consumers == 1 or c.turns > 1)
        or c.shares < 1
        or c.shares > 1
        and c.turns * c.split * c.cluster > 1
        or groups > 1
        and c.tile_m > 128
        and (c.turns > 1 or c.split > 1 or c.consumers > 2)
    ):
        raise ValueError(
            f"{name}: a MixedConfig has 1 to 3 consumers, a tile_m that is a multiple of 8 (16 with"
            " a cluster of 2) from 16 up to 256 (to 192 with 3 consumers, to 64 with a split), a"
            " split of 1, 2, 4 or 8, stages from 0, a step of 64 or 128, a group from 1, 1, 2 or 4"
            " turns (consumers * turns up to 4, tile_m * consumers * turns up to 256), ahead from"
            " 0, and a cluster of 1 or 2 (1 with a split); ordered with 2 or 3 consumers and 1"
            " turn; shares from 1, above 1 with 1 turn, no split and a cluster of 1; with groups of"
            f" scales and a tile_m above 128 up to 2 consumers, 1 turn and no split; got {config}"
        )
    if groups > 1 and (x.k // groups % c.step or groups % c.split):
        raise ValueError(
            f"{name}: {groups} groups of {x.k // groups} elements must be a"
            f" multiple of the split, and a multiple of the step each; got {config}"
        )
    _Plan(x, config, sms)


def product_of(name, x, weights, scales, out_dtype, activation=""):
    """The Product of operands; TypeError, ValueError for those that have none."""
    if x.dtype.name not in ("float16", "bfloat16"):
        raise TypeError(f"{name}: x must be float16 or bfloat16, got {x.dtype}")
    if weights.dtype.name not in BITS:
        accepted = ", ".join(BITS)
        raise TypeError(f"{name}: weights must be one of {accepted}, got {weights.dtype}")
    if x.ndim != 2 or weights.ndim != 2:
        raise ValueError(
            f"{name}: x and weights must have two dims, got {x.shape} and {weights.shape}"
        )
    (m, k), (n, k2) = x.shape, weights.shape
    if k != k2:
        raise ValueError(
            f"{name}: x (M, K) and weights (N, K) differ in K, got {x.shape} and {weights.shape}"
        )
    if 0 in (m, n, k):
        raise ValueError(f"{name}: empty operands, {x.shape} and {weights.shape}")
    if k % 64:
        raise ValueError(f"{name}: K must be a multiple of 64, got {k}; pad both with zeros")
    groups = 1
    if scales is not None:
        if scales.dtype.name not in ("float16", "bfloat16", "float32"):
            raise TypeError(f"{name}: scales must be of a float dtype, got {scales.dtype}")
        if scales.ndim != 2 or scales.shape[1] != n or not scales.shape[0]:
            raise ValueError(f"{name}: scales must have the shape (G, {n}), got {scales.shape}")
        groups = scales.shape[0]
        if groups > 1 and (k % groups or k // groups % 64):
            raise ValueError(
                f"{name}: the K={k} elements of a row must be {groups} groups of a multiple of 64"
            )
    out_dtype = dtype_of(name, out_dtype, x.dtype)
    scale_dtype = None if scales is None else scales.dtype
    return Product(m, n, k, x.dtype, weights.dtype, scale_dtype, groups, out_dtype, activation)


def kernel_of(name, product, x, config, interpret):
    """The kernel of a Product, whose rows may become a size of the call. x: the operand."""
    if config is None:
        _warp_mma.refuse(name, x.device, "use ops.matmul of converted weights")
    sms, groups = plgpu.sm_count(x.device), product.scale_groups
    if config is None and _tensor_memory.runs_here(x.device):
        config = _mixed_tensor_memory.choose(product.m, product.k, groups)
    if isinstance(config, TensorMemoryMixedConfig):
        if product.activation:
            raise NotImplementedError(
                f"{name}: weights of 8 or 4 bits on Blackwell; use ops.mixed_matmul and"
                " ops.gated_linear_unit"
            )
        _mixed_tensor_memory.check(config, product)
        kernel = _mixed_tensor_memory.kernel(product, config, sms, interpret)
    else:
        m = product.m
        if config is None and not needs_padding(x):
            kind = name, product._replace(m=0), x.device, interpret
            rows, typical = rows_of(kind, m, _EDGES)
            product, m = product._replace(m=rows), m if m > _EDGES[-2] else typical
        is_open = isinstance(product.m, plgpu.Dim)
        how = sms, product.weight_dtype.name, is_open, product.out_dtype.itemsize
        config = config or choose(m, product.n, product.k, groups, *how)
        _check_config(name, config, product, sms)
        kernel = _kernel(product, config, sms, interpret)
    return with_padding(kernel, [padding_of(x, interpret), None, None])


@plgpu.specialize(in_place=False)
@better
def mixed_matmul(x, weights, scales=None, *, out_dtype=None, config=None, interpret=None):
    """``x @ (weights * scales).T`` with float32 accumulation, for weights of 8 or 4 bits
    (Hopper, Blackwell).

    x: (M, K) float16 or bfloat16; weights: (N, K) int8, int4, float8_e4m3fn or float8_e5m2, K
    contiguous; K a multiple of 64, any M and N. scales: (G, N) float16, bfloat16 or float32:
    element (g, n) belongs to ``weights[n, g * K // G : (g + 1) * K // G]``, whose length must be a
    multiple of 64 if G > 1; None for ones. out_dtype: float16, bfloat16 or float32; that of ``x``
    by default. config: a :class:`MixedConfig`, on Blackwell a :class:`TensorMemoryMixedConfig`;
    chosen from the shape by default. out: a preallocated result.

    Weights become floats of the dtype of ``x`` exactly, and scales multiply float32 sums. Returns
    (M, N) of the caller's kind of array. TypeError, ValueError for other dtypes and shapes.
    """
    product = product_of("mixed_matmul", x, weights, scales, out_dtype)
    return kernel_of("mixed_matmul", product, x, config, interpret)
