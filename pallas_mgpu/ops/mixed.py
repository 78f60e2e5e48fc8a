"""Product of 16-bit floats with int8, int4 or 8-bit float weights, on Hopper's tensor cores.

The transposed product is computed: out.T = weights @ x.T. So the weights are the left operand,
which tensor cores take from registers: a consumer loads its 64 rows of a slot, each lane the bytes
that it needs, and converts them to floats. (Wider loads and shuffles between lanes take more of the
integer units, which are the limit.) Not the weights but sums are multiplied with the scales: the
products of a group of K add up in an accumulator of their own, which goes into float32 sums with
one multiplication. That is exact, and few operations where x has few rows. Scales of groups come
through the ring with the weights: a load by the lanes would wait for memory in every group.

Blocks are persistent. The producer fills a ring by TMA; each consumer owns 64 rows of the weights,
for `tile_m` rows of x. Where x has few rows the memory is the limit: then blocks of a cluster
divide K, so that all SMs fetch, and the first one adds up their sums in a fixed order. A consumer
would wait most of the time for its weights to be converted and for its product, so two or four
consumers take the slots of the same rows in turn.

Where x has many rows, wide tiles convert each weight less often, and blocks of a cluster share the
rows of x. `ahead` converts the weights of a step while the product of the step before runs. Sums of
groups for more than 176 rows of x, and an accumulator beside them, do not fit into registers: then
the two halves of these rows are multiplied one after the other, by the same converted weights and
in the same accumulators. With `ahead`, halves of 64 rows have accumulators of their own: one is
added to the sums while the other is multiplied. Consumers that issue their products in order
(`ordered`) fall out of step, so that one converts and adds while the other multiplies."""

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
from ._mixed_tensor_memory import TensorMemoryMixedConfig
from ._open_rows import better, rows_of
from ._padding import needs_padding, padding_of, with_padding

_WHOLE = 176  # rows of a tile that have sums and an accumulator in registers
_BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8}  # of weights


class MixedConfig(NamedTuple):
    """How a mixed product is tiled.

    ``consumers``: warpgroups that multiply, 64 rows of the weights each, 1 to 3. ``tile_m``: rows
    of x of a tile, a multiple of 16 up to 256, with 3 consumers up to 192. ``split``: blocks of a
    cluster that divide K, 1, 2, 4 or 8; from 2 on for tile_m up to 64. ``stages``: slots of the
    ring; 0: as many as fit. ``step``: elements of K per slot, 64 or 128. ``group``: tiles of x
    worked on together, for the L2. ``turns``: warpgroups that alternate between the slots of the
    same rows, 1, 2 or 4; consumers * turns is at most 4, and tile_m times that at most 256 from 2
    on. ``ahead``: so many steps, or groups of scales, one after the other convert weights while the
    product before runs; 0: none do. ``cluster``: blocks side by side that share rows of x, 1 or 2;
    1 with a split. ``ordered``: consumers, 2 or 3 with 1 turn, issue their products one after the
    other, so that some multiply while others convert. With groups of scales, ``ahead`` or a tile_m
    above 128 wants up to 2 consumers, 1 turn and no split.
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


class _Plan:
    """What follows from a product and a configuration."""

    def __init__(self, x, cfg, sms):
        self.x, self.cfg = x, cfg
        self.strips = cfg.consumers  # of 64 rows of the weights
        self.rows, self.consumers = 64 * self.strips, self.strips * cfg.turns
        self.tiles_m = pl.cdiv(x.m, cfg.tile_m)
        self.tiles_n = pl.cdiv(x.n, self.rows * cfg.cluster)
        self.total = self.tiles_m * self.tiles_n
        steps = pl.cdiv(x.k, cfg.step)
        self.grouped = x.scale_groups > 1
        # one half of the rows after the other
        self.halves = self.grouped and (cfg.tile_m > _WHOLE or cfg.ahead > 0)
        self.parts_of_group = 1
        if self.halves:  # all weights of a group are in registers
            length = x.k // x.scale_groups
            self.parts_of_group = length // math.gcd(length, 128)
        if self.grouped:  # a sum for each group, or part of one
            groups = x.scale_groups * self.parts_of_group
            self.groups, self.group_steps = groups // cfg.split, steps // groups
        else:
            self.groups, self.group_steps = 1, pl.cdiv(steps, cfg.split)
        self.steps = self.groups * self.group_steps  # of a block, for a tile
        bits = _BITS[x.weight_dtype.name]
        # rows of a store buffer: those of large tiles leave in two parts, so that more slots fit
        apart = cfg.tile_m > 128 and (self.grouped or x.out_dtype.itemsize == 4)
        self.stored = cfg.tile_m // 2 if apart else cfg.tile_m
        used = self.strips * self.stored * 64 * x.out_dtype.itemsize + 2048
        self.parts = cfg.split * cfg.turns  # of sums
        used += (self.parts - 1) * self.strips * 64 * cfg.tile_m * 4
        slot = (self.rows * bits // 8 + cfg.tile_m * 2) * cfg.step
        # scales arrive with the weights: lanes would wait for memory, group by group
        self.scales_by_tma = self.grouped and x.n * x.scale_dtype.itemsize % 16 == 0
        if self.scales_by_tma:
            slot += self.rows * x.scale_dtype.itemsize
        most = min((SMEM_BYTES - used) // slot, 16)
        self.stages = min(cfg.stages or most, most, max(self.steps, 2))
        # A slot always has the same turn, which sees every phase of it; slots of a product are
        # released after it, or after the next one has been issued.
        round_ = cfg.turns * (self.group_steps if self.grouped else 1)
        needed = round_ if cfg.turns > 1 or self.halves else 1
        if cfg.ahead and (self.halves or not self.grouped):
            needed = 2 * round_
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
        axes = {"ck": cfg.split, "cn": cfg.cluster}
        self.axes = {name: size for name, size in axes.items() if size > 1}
        self.registers = REGISTERS.get(self.strips) if cfg.tile_m > 64 else None
        if self.consumers == 4:
            self.registers = (32, 112)
        if self.strips == 2 and (self.halves or self.grouped and cfg.tile_m > 128):
            self.registers = (24, 240)
        self.by_tma = _sizes.most(x.m) == 1 or x.n * x.out_dtype.itemsize % 16 == 0  # the result

    def scratch(self):
        x, cfg, rows_of_w = self.x, self.cfg, (self.rows, self.cfg.step)
        bytes_ = cfg.step * _BITS[x.weight_dtype.name] // 8
        tiled = (plgpu.TilingTransform((8, cfg.step)), plgpu.SwizzleTransform(bytes_))
        x_tile, x_tiled = (cfg.tile_m, cfg.step), swizzled(64, x.dtype)
        found = {
            "w_smem": plgpu.SMEM((self.stages, *rows_of_w), x.weight_dtype, transforms=tiled),
            "x_smem": plgpu.SMEM((self.stages, *x_tile), x.dtype, transforms=x_tiled),
            "o_smem": plgpu.SMEM((self.strips, self.stored, 64), x.out_dtype),
        }
        copies = 2
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
        return found


class _Block(WarpSpecialized):
    """One block of the kernel, while it is traced."""

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.cfg = plan.cfg
        slots = [self.w_smem, self.x_smem]
        if plan.scales_by_tma:
            slots.append(self.s_smem)
        self.ring = Ring(plan.stages, self.full, self.empty, *slots)
        cluster = lax.axis_index("cluster")
        self.tiles = StaticTiles(plan.total, plan.clusters, cluster)
        self.rank = lax.axis_index("ck") if "ck" in plan.axes else 0
        self.place = lax.axis_index("cn") if "cn" in plan.axes else 0

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
        _, col = self.origin(self.tiles.tile(0))

        def one(s, _):
            along_k = pl.ds((self.rank * p.steps + s) * cfg.step, cfg.step)
            plgpu.async_prefetch(self.w.at[pl.ds(col, p.rows), along_k])

        lax.fori_loop(0, min(p.stages, p.steps), one, None)

    def producer(self):
        self.ring.drain(self.tiles.produce(self.fetch_tile, jnp.int32(0)))

    def group(self, g):
        """The row of scales of sum g of this block."""
        g = self.rank * self.plan.groups + g
        return g // self.plan.parts_of_group

    def fetch_tile(self, t, it):
        p, cfg = self.plan, self.cfg
        row, col = self.origin(t)

        def copy(s, w_slot, x_slot, *others):
            *s_slot, full = others
            along_k = pl.ds((self.rank * p.steps + s) * cfg.step, cfg.step)
            plgpu.copy_gmem_to_smem(self.w.at[pl.ds(col, p.rows), along_k], w_slot, full)
            shared = "cn" if "cn" in p.axes else None
            x_rows = self.x.at[pl.ds(row, cfg.tile_m), along_k]
            plgpu.copy_gmem_to_smem(x_rows, x_slot, full, collective_axes=shared)
            if s_slot:
                scales = self.scales.at[self.group(s // p.group_steps), pl.ds(col, p.rows)]
                plgpu.copy_gmem_to_smem(scales, s_slot[0], full)

        self.ring.fetch(0, p.steps, self.ring.at(it), copy)
        return it + p.steps

    # ---- consumers

    def consumer(self, me):
        strip, turn = me, 0
        if self.cfg.turns > 1:
            strip, turn = me % self.plan.strips, me // self.plan.strips
        multiply = functools.partial(self.multiply_tile, strip, turn)
        self.tiles.consume(multiply, jnp.int32(0))

    def multiply_tile(self, strip, turn, t, it):
        row, col = self.origin(t)
        col = col + strip * 64
        if self.plan.halves:
            sums = self.scaled_late if self.cfg.ahead else self.scaled_halves
            first = 0
            for value in sums(strip, it, col):
                self.epilogue(strip, value, row, col, first)
                first += value.shape[1]
            return it + self.plan.steps
        value = self.scaled_sum(strip, turn, it, col)
        if self.plan.parts == 1:
            self.epilogue(strip, value, row, col)
        else:
            self.reduce(strip, turn, value, row, col)
        return it + self.plan.steps

    def share(self, count, turn):
        """How many of so many it is this consumer's turn to take."""
        turns = self.cfg.turns
        return count // turns if count % turns == 0 else (count - turn + turns - 1) // turns

    def scaled_sum(self, strip, turn, it, col):
        """Of this block's part of K and the slots that it is this consumer's turn to take."""
        p, turns = self.plan, self.cfg.turns
        if not p.grouped:
            scales = self.load_scales(0, col)
            value = self.sum(strip, it + turn, self.share(p.group_steps, turn), turns)
            return self.scaled(value, scales)

        def group(i, total):
            g = turn + i * turns
            first = it + g * p.group_steps
            scales = self.scales_of(g, first, strip, col)
            part = self.sum(strip, first, p.group_steps, 1, waited=p.scales_by_tma)
            return total + self.scaled(part, scales)

        zeros = jnp.zeros((64, self.cfg.tile_m), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        # NVRTC 13.0 takes the last step apart and then unrolls what it knows the count of
        count = lax.optimization_barrier(jnp.int32(self.share(p.groups, turn)))
        return lax.fori_loop(0, count, group, zeros)

    def scaled_halves(self, strip, it, col):
        """Sums of the left and the right half of the rows of x, by the same accumulators."""
        p, ring, half = self.plan, self.ring, self.cfg.tile_m // 2

        def multiply(acc):
            def group(i, totals):
                totals = list(totals)
                steps = [it + i * p.group_steps + s for s in range(p.group_steps)]
                scales = self.scales_of(i, steps[0], strip, col)
                weights = self.weights_of_steps(strip, steps)
                for k in (0, 1):
                    with self.in_order():
                        acc[...] = jnp.zeros((64, half), jnp.float32)
                        for s, w in zip(steps, weights):
                            rows = self.x_smem.at[ring.slot(s), pl.ds(k * half, half)]
                            plgpu.wgmma(acc, w, rows.T)
                    plgpu.wgmma_wait(0)
                    if k == 1:
                        for s in steps:
                            ring.release(s)
                    totals[k] = totals[k] + self.scaled(acc[...], scales)
                return tuple(totals)

            zeros = jnp.zeros((64, half), jnp.float32)
            zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            count = lax.optimization_barrier(jnp.int32(p.groups))
            return lax.fori_loop(0, count, group, (zeros, zeros))

        return pl.run_scoped(multiply, plgpu.ACC((64, half)))

    def scaled_late(self, strip, it, col):
        """The same with accumulators for each half: one is multiplied while the other is added, and
        while the next weights are converted."""
        p, ring, half = self.plan, self.ring, self.cfg.tile_m // 2

        def multiply(*accs):
            def steps(g):
                return [it + g * p.group_steps + s for s in range(p.group_steps)]

            def factors(g):
                scales = self.scales_of(g, steps(g)[0], strip, col)
                return scales, self.weights_of_steps(strip, steps(g))

            def issue(k, g, weights):
                accs[k][...] = jnp.zeros((64, half), jnp.float32)
                for s, w in zip(steps(g), weights):
                    rows = self.x_smem.at[ring.slot(s), pl.ds(k * half, half)]
                    plgpu.wgmma(accs[k], w, rows.T)

            def release(g):
                for s in steps(g):
                    ring.release(s)

            def added(total, k, scales):
                part = plgpu.wgmma_accumulator_load(accs[k], wait_n=1)
                return total + self.scaled(part, scales)

            def group(g, carry):
                left, right, before = carry
                scales, weights = factors(g)
                issue(0, g, weights)
                right = added(right, 1, before)
                release(g - 1)
                issue(1, g, weights)
                return added(left, 0, scales), right, scales

            def some(j, carry):
                for i in range(several):
                    carry = group(several * j + i + 1, carry)
                return carry

            several = self.cfg.ahead
            scales, weights = factors(0)
            issue(0, 0, weights)
            issue(1, 0, weights)
            zeros = plgpu.layout_cast(jnp.zeros((64, half), jnp.float32), plgpu.Layout.WGMMA)
            count = p.groups - 1
            carry = added(zeros, 0, scales), zeros, scales
            if count >= several:
                trips = lax.optimization_barrier(jnp.int32(count // several))
                carry = lax.fori_loop(0, trips, some, carry)
            for i in range(count - count % several, count):
                carry = group(i + 1, carry)
            left, right, before = carry
            right = right + self.scaled(accs[1][...], before)
            release(count)
            return left, right

        acc = plgpu.ACC((64, half))
        return pl.run_scoped(multiply, acc, acc)

    def in_order(self):
        """Consumers issue their products one after the other."""
        if not self.cfg.ordered:
            return contextlib.nullcontext()
        return plgpu.ext.ordered_section(self.plan.consumers)

    def scales_of(self, g, it, strip, col):
        """Of group g of this block's, whose first step is `it`."""
        p = self.plan
        if not p.scales_by_tma:
            return self.load_scales(self.group(g), col)
        self.ring.wait(it)
        mine = self.s_smem.at[self.ring.slot(it), pl.ds(strip * 64, 64)]
        return plgpu.load(mine, layout=plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)

    def weights_of_steps(self, strip, steps):
        """Of steps of a group whose scales are there."""
        first, *others = steps
        waited = self.plan.scales_by_tma
        return [self.weights_of(strip, first, waited), *(self.weights_of(strip, s) for s in others)]

    def weights_of(self, strip, it, waited=False):
        if not waited:
            self.ring.wait(it)
        mine = self.w_smem.at[self.ring.slot(it), pl.ds(strip * 64, 64)]
        weights = plgpu.load(mine, layout=plgpu.Layout.WGMMA, optimized=False)
        return weights.astype(self.plan.x.dtype)

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

            several = self.cfg.ahead
            if not several or not isinstance(count, int) or count < 2 or waited:
                if waited:
                    step(0, None, waited=True)
                lax.fori_loop(int(waited), count, step, None)
                return acc[...]

            def some(j, _):
                for i in range(several):
                    ahead(several * j + i)

            lax.fori_loop(0, count // several, some, None)
            for i in range(count - count % several, count):
                ahead(i)
            value = acc[...]
            ring.release(first + (count - 1) * every)
            return value

        return pl.run_scoped(multiply, plgpu.ACC((64, self.cfg.tile_m)))

    def load_scales(self, group, col):
        """Of 64 rows of the weights; None without scales."""
        n, rows = self.plan.x.n, pl.ds(col, 64)
        if self.scales is None:
            return None
        if n % (self.plan.rows * self.cfg.cluster) == 0:
            return self.scales[group, rows]
        keep = jnp.arange(64) < n - col
        return pl.load(self.scales, (group, rows), mask=keep, other=0.0)

    def scaled(self, value, scales):
        if scales is None:
            return value
        return value * lax.broadcast_in_dim(scales.astype(jnp.float32), value.shape, [0])

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

    def epilogue(self, strip, value, row, col, first=0):
        """first: of the tile's rows, that of the value."""
        p = self.plan
        for start in range(0, value.shape[1], p.stored):
            at = (first + start) % p.stored
            if at == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = value[:, start : start + p.stored].T.astype(p.x.out_dtype)
            rows = part.shape[0]
            where = self.o.at[pl.ds(row + (first + start), rows), pl.ds(col, 64)]
            buffer = self.o_smem.at[strip, pl.ds(at, rows)]
            store(buffer, part, where, engine=None if p.by_tma else "plain")


@cached
def _kernel(x, cfg, sms, interpret):
    """x: a Product."""
    return _mixed_tensor_memory.build(_Plan(x, cfg, sms), _Block, interpret)


# ---- the choice ---------------------------------------------------------------------------------


_INBOX = 96 << 10  # bytes of sums that a block receives, at most

_EDGES = (1, 16, 32, 64, 128, 256, 512, 2048, 1 << 22)  # of rows that share a program

# Configurations for more than 64 rows with the most rows of x, and relative times of a tile (H200)
_LARGE_TILES = (
    (MixedConfig(1, 128, 1, 0, 64, turns=2), 0.6),
    (MixedConfig(2, 128, 1, 0, 128, ahead=4, ordered=True), 1.0),
    (MixedConfig(2, 176, 1, 0, 128, ordered=True), 1.31),
    (MixedConfig(3, 128, 1, 0, 128), 1.75),
    (MixedConfig(2, 256, 1, 0, 64, 16, ahead=8, cluster=2), 1.73),
)
_GROUPED_TILES = (
    (MixedConfig(1, 128, 1, 0, 64, turns=2), 0.6),
    (MixedConfig(2, 128, 1, 0, 128, 16, ordered=True), 1.0),
    (MixedConfig(2, 176, 1, 0, 128, 16, ordered=True), 1.31),
    (MixedConfig(2, 256, 1, 0, 64, 16, cluster=2), 1.85),
)


def choose(m, n, k, scale_groups=1, sms=SMS, weights="int8"):
    """The configuration for a shape and weights of that dtype, on a GPU with that many SMs."""
    tile, bits = next((t for t in (16, 32, 48, 64) if m <= t), None), _BITS[weights]
    if tile is None:
        return _choose_large(m, n, k, scale_groups, sms, weights)
    step = 128 if k // scale_groups % 128 == 0 else 64
    many = pl.cdiv(n, 64) > sms  # strips of 64 rows of the weights
    if scale_groups > 1 and k // scale_groups > 4 * step:
        consumers, turns, stages = 1, 1, 0
    elif bits == 4 and tile <= 32 and (many or tile == 16) or many and tile == 16:
        consumers, turns, stages = 2, 2, 8
    elif tile == 16 or bits == 4 and tile == 32:
        consumers, turns, stages = 1, 4, 8 if bits == 8 else 12
    else:
        consumers, turns, stages = (2, 1, 0) if many and tile == 64 else (1, 2, 8)
    if n <= 64:
        consumers, turns = 1, min(turns * consumers, 4)
    split, tiles = 1, pl.cdiv(n, 64 * consumers)
    parts = scale_groups if scale_groups > 1 else pl.cdiv(k, step)
    sums = turns * consumers * 64 * tile * 4  # of a block
    while split < 8 and 2 * split * tiles <= sms and parts % (2 * split) == 0:
        if 2 * split * sums > _INBOX:
            break
        split *= 2
    return MixedConfig(consumers, tile, split, stages, step, turns=turns)


def _choose_large(m, n, k, scale_groups, sms, weights):
    """The same for more than 64 rows: the tile by which the waves take least."""
    length, found = k // scale_groups, {}
    for cfg, of_tile in _GROUPED_TILES if scale_groups > 1 else _LARGE_TILES:
        if cfg.turns > 1 and scale_groups > 1 and length > 4 * cfg.step:
            continue  # a slot has the same turn
        if cfg.consumers > 1 and n <= 64 * (cfg.consumers * cfg.cluster - 1):
            continue
        tiles, most = pl.cdiv(m, cfg.tile_m), cfg.tile_m
        cfg = cfg._replace(tile_m=pl.cdiv(pl.cdiv(m, tiles), 16) * 16)
        if most > _WHOLE >= cfg.tile_m:
            continue  # there is a faster one
        blocks = tiles * pl.cdiv(n, 64 * cfg.consumers * cfg.cluster) * cfg.cluster
        found[cfg] = pl.cdiv(blocks, sms) * of_tile * (0.15 + 0.85 * cfg.tile_m / most)
    cfg = min(found, key=found.get) if found else MixedConfig(1, 128, 1, 0, 128)
    one_wave = pl.cdiv(m, cfg.tile_m) * pl.cdiv(n, 64 * cfg.consumers) <= sms
    if scale_groups > 1 and (one_wave or weights == "int4"):
        cfg = cfg._replace(cluster=1)
    return cfg._replace(step=64) if length % cfg.step else cfg


# ---- the function -------------------------------------------------------------------------------


def _check_config(config, x, sms):
    if not isinstance(config, MixedConfig):
        raise TypeError(f"mixed_matmul: config must be a MixedConfig, got {config!r}")
    c, groups = config, x.scale_groups
    if (
        c.consumers not in (1, 2, 3)
        or c.tile_m not in range(16, 257, 16)
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
        or groups > 1
        and (c.ahead or c.tile_m > 128)
        and (c.turns > 1 or c.split > 1 or c.consumers > 2)
    ):
        raise ValueError(
            "mixed_matmul: a MixedConfig has 1 to 3 consumers, a tile_m that is a multiple of 16 up"
            " to 256 (to 192 with 3 consumers, to 64 with a split), a split of 1, 2, 4 or 8, stages"
            " from 0, a step of 64 or 128, a group from 1, 1, 2 or 4 turns (consumers * turns up to"
            " 4, tile_m * consumers * turns up to 256), ahead from 0, and a cluster of 1 or 2 (1"
            " with a split); ordered with 2 or 3 consumers and 1 turn; with groups of scales and"
            f" ahead or a tile_m above 128 up to 2 consumers, 1 turn and no split; got {config}"
        )
    if groups > 1 and (x.k // groups % c.step or groups % c.split):
        raise ValueError(
            f"mixed_matmul: {groups} groups of {x.k // groups} elements must be a"
            f" multiple of the split, and a multiple of the step each; got {config}"
        )
    _Plan(x, config, sms)


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
    name = "mixed_matmul"
    if x.dtype.name not in ("float16", "bfloat16"):
        raise TypeError(f"{name}: x must be float16 or bfloat16, got {x.dtype}")
    if weights.dtype.name not in _BITS:
        accepted = ", ".join(_BITS)
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
    if not weights.aligned:
        raise ValueError(f"{name}: weights must begin at a multiple of 16 bytes")
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
    if config is None:
        _warp_mma.refuse(name, x.device, "use ops.matmul of converted weights")
    sms = plgpu.sm_count(x.device)
    scale_dtype = None if scales is None else scales.dtype
    product = Product(m, n, k, x.dtype, weights.dtype, scale_dtype, groups, out_dtype)
    if config is None and _tensor_memory.runs_here(x.device):
        config = _mixed_tensor_memory.choose(m, k, groups)
    if isinstance(config, TensorMemoryMixedConfig):
        _mixed_tensor_memory.check(config, product)
        kernel = _mixed_tensor_memory.kernel(product, config, sms, interpret)
    else:
        if config is None and not needs_padding(x):
            kind = name, product._replace(m=0), x.device, interpret
            rows, m = rows_of(kind, m, _EDGES)
            product = product._replace(m=rows)
        config = config or choose(m, n, k, groups, sms, weights.dtype.name)
        _check_config(config, product, sms)
        kernel = _kernel(product, config, sms, interpret)
    return with_padding(kernel, [padding_of(x, interpret), None, None])
