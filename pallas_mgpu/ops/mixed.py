"""Product of 16-bit floats with int8, int4 or 8-bit float weights, on Hopper's tensor cores.

The transposed product is computed: out.T = weights @ x.T. So the weights are the left operand,
which tensor cores take from registers: a consumer loads its 64 rows of a slot, each lane the bytes
that it needs, and converts them to floats. (Wider loads and shuffles between lanes take more of the
integer units, which are the limit.) Not the weights but sums are multiplied with the scales: the
products of a group of K add up in an accumulator of their own, which goes into float32 sums with
one multiplication. That is exact, and few operations where x has few rows.

Blocks are persistent. The producer fills a ring by TMA; each consumer owns 64 rows of the weights,
for `tile_m` rows of x. Where x has few rows the memory is the limit: then blocks of a cluster
divide K, so that all SMs fetch, and the first one adds up their sums in a fixed order. A consumer
would wait most of the time for its weights to be converted and for its product, so two consumers
take the slots of the same rows in turn."""

import functools
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
    store,
    swizzled,
)
from ._mixed_tensor_memory import TensorMemoryMixedConfig
from ._open_rows import better, rows_of
from ._padding import needs_padding, padding_of, with_padding

_BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8}  # of weights


class MixedConfig(NamedTuple):
    """How a mixed product is tiled.

    ``consumers``: warpgroups that multiply, 64 rows of the weights each, 1 to 3. ``tile_m``: rows
    of x of a tile, a multiple of 16 up to 256, with 3 consumers up to 192, with groups of scales up
    to 128. ``split``: blocks of a cluster that divide K, 1, 2, 4 or 8; from 2 on for tile_m up to
    64. ``stages``: slots of the ring; 0: as many as fit. ``step``: elements of K per slot, 64 or
    128. ``group``: tiles of x worked on together, for the L2. ``turns``: warpgroups that alternate
    between the slots of the same rows, 1 or 2; 2 for tile_m up to 128 with 1 consumer, 64 with 2.
    """

    consumers: int = 2
    tile_m: int = 128
    split: int = 1
    stages: int = 0
    step: int = 128
    group: int = 8
    turns: int = 1


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
        self.tiles_m, self.tiles_n = pl.cdiv(x.m, cfg.tile_m), pl.cdiv(x.n, self.rows)
        self.total = self.tiles_m * self.tiles_n
        steps = pl.cdiv(x.k, cfg.step)
        self.grouped = x.scale_groups > 1
        if self.grouped:  # a sum for each group
            self.groups, self.group_steps = x.scale_groups // cfg.split, steps // x.scale_groups
        else:
            self.groups, self.group_steps = 1, pl.cdiv(steps, cfg.split)
        self.steps = self.groups * self.group_steps  # of a block, for a tile
        bits = _BITS[x.weight_dtype.name]
        used = self.strips * cfg.tile_m * 64 * x.out_dtype.itemsize + 2048
        self.parts = cfg.split * cfg.turns  # of sums
        if self.parts > 1:
            used += self.parts * self.strips * 64 * cfg.tile_m * 4
        slot = (self.rows * bits // 8 + cfg.tile_m * 2) * cfg.step
        most = min((SMEM_BYTES - used) // slot, 16)
        self.stages = min(cfg.stages or most, most, max(self.steps, 2))
        if cfg.turns > 1:  # a slot always has the same consumer, which sees every phase of it
            round_ = cfg.turns * (self.group_steps if self.grouped else 1)
            if round_ > most:
                raise ValueError(
                    f"mixed_matmul: {round_} slots, for 2 turns of a group, do not fit; got {cfg}"
                )
            self.stages = max(self.stages // round_, 1) * round_
        one_each = self.parts > 1 or _sizes.most(self.total) <= sms
        self.clusters = self.total if one_each else _sizes.minimum(self.total, sms)
        self.axes = {"ck": cfg.split} if cfg.split > 1 else {}
        self.registers = REGISTERS.get(self.strips) if cfg.tile_m > 64 else None
        self.by_tma = _sizes.most(x.m) == 1 or x.n * x.out_dtype.itemsize % 16 == 0  # the result

    def scratch(self):
        x, cfg, rows_of_w = self.x, self.cfg, (self.rows, self.cfg.step)
        bytes_ = cfg.step * _BITS[x.weight_dtype.name] // 8
        tiled = (plgpu.TilingTransform((8, cfg.step)), plgpu.SwizzleTransform(bytes_))
        x_tile, x_tiled = (cfg.tile_m, cfg.step), swizzled(64, x.dtype)
        found = {
            "w_smem": plgpu.SMEM((self.stages, *rows_of_w), x.weight_dtype, transforms=tiled),
            "x_smem": plgpu.SMEM((self.stages, *x_tile), x.dtype, transforms=x_tiled),
            "o_smem": plgpu.SMEM((self.strips, cfg.tile_m, 64), x.out_dtype),
        }
        found |= Ring.barriers(self.stages, 2, self.strips)
        if self.parts > 1:
            sums = (self.parts, self.strips, 64, cfg.tile_m)
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
        self.ring = Ring(plan.stages, self.full, self.empty, self.w_smem, self.x_smem)
        cluster = lax.axis_index("cluster")
        self.tiles = StaticTiles(plan.total, plan.clusters, cluster)
        self.rank = lax.axis_index("ck") if plan.axes else 0

    def origin(self, t):
        """First row of x and of the weights of tile t."""
        p, band_height = self.plan, self.cfg.group
        band, inside = t // (band_height * p.tiles_n), t % (band_height * p.tiles_n)
        height = jnp.minimum(p.tiles_m - band * band_height, band_height)
        height = jnp.maximum(height, 1)
        i = band * band_height + lax.rem(inside, height)
        return i * self.cfg.tile_m, lax.div(inside, height) * p.rows

    # ---- producer

    def producer(self):
        self.ring.drain(self.tiles.produce(self.fetch_tile, jnp.int32(0)))

    def fetch_tile(self, t, it):
        p, cfg = self.plan, self.cfg
        row, col = self.origin(t)

        def copy(s, w_slot, x_slot, full):
            along_k = pl.ds((self.rank * p.steps + s) * cfg.step, cfg.step)
            plgpu.copy_gmem_to_smem(self.w.at[pl.ds(col, p.rows), along_k], w_slot, full)
            plgpu.copy_gmem_to_smem(self.x.at[pl.ds(row, cfg.tile_m), along_k], x_slot, full)

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
        first = self.rank * p.groups if p.grouped else 0
        scales = self.load_scales(first + (turn if p.groups > 1 else 0), col)
        if p.groups == 1:
            value = self.sum(strip, it + turn, self.share(p.group_steps, turn), turns)
            return self.scaled(value, scales)

        def group(i, carry):
            total, scales = carry
            g = turn + i * turns
            # one ahead: it takes a while
            following = self.load_scales(first + jnp.minimum(g + turns, p.groups - 1), col)
            part = self.sum(strip, it + g * p.group_steps, p.group_steps, 1)
            return total + self.scaled(part, scales), following

        zeros = jnp.zeros((64, self.cfg.tile_m), jnp.float32)
        zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        # NVRTC 13.0 takes the last step apart and then unrolls what it knows the count of
        count = lax.optimization_barrier(jnp.int32(self.share(p.groups, turn)))
        return lax.fori_loop(0, count, group, (zeros, scales))[0]

    def sum(self, strip, first, count, every):
        """The product of so many steps, from the first on."""
        ring = self.ring

        def multiply(acc):
            def step(i, _):
                it = first + i * every
                slot = ring.slot(it)
                ring.wait(it)
                mine = self.w_smem.at[slot, pl.ds(strip * 64, 64)]
                weights = plgpu.load(mine, layout=plgpu.Layout.WGMMA, optimized=False)
                weights = weights.astype(self.plan.x.dtype)
                plgpu.wgmma(acc, weights, self.x_smem.at[slot].T)
                plgpu.wgmma_wait(0)
                ring.release(it)

            lax.fori_loop(0, count, step, None)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((64, self.cfg.tile_m)))

    def load_scales(self, group, col):
        """Of 64 rows of the weights; None without scales."""
        n, rows = self.plan.x.n, pl.ds(col, 64)
        if self.scales is None:
            return None
        if n % self.plan.rows == 0:
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
        inbox = plgpu.cluster_ref(self.inbox, {"ck": 0}) if p.axes else self.inbox
        inbox[part, strip] = value
        plgpu.barrier_arrive(self.arrived.at[strip])
        plgpu.barrier_wait(self.arrived.at[strip])

        @pl.when(part == 0)
        def _():
            total = plgpu.load(self.inbox.at[0, strip], layout=plgpu.Layout.WGMMA)
            for j in range(1, p.parts):
                total = total + plgpu.load(self.inbox.at[j, strip], layout=plgpu.Layout.WGMMA)
            self.epilogue(strip, total, row, col)

    # ---- epilogue

    def epilogue(self, strip, value, row, col):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        value = value.T.astype(self.plan.x.out_dtype)
        where = self.o.at[pl.ds(row, self.cfg.tile_m), pl.ds(col, 64)]
        store(self.o_smem.at[strip], value, where, engine=None if self.plan.by_tma else "plain")


@cached
def _kernel(x, cfg, sms, interpret):
    """x: a Product."""
    return _mixed_tensor_memory.build(_Plan(x, cfg, sms), _Block, interpret)


# ---- the choice ---------------------------------------------------------------------------------


_INBOX = 96 << 10  # bytes of sums that a block receives, at most

_EDGES = (1, 16, 32, 64, 128, 256, 512, 2048, 1 << 22)  # of rows that share a program

# consumers, tile_m, turns, relative time of a tile: from 128 to 2048 rows by weights of int8 on an
# H200, with a step of 64 and turns of 2 or a tile of 256
_LARGE_TILES = ((2, 128, 1, 1.0), (1, 128, 2, 0.65), (3, 128, 1, 1.33), (2, 256, 1, 1.63))


def choose(m, n, k, scale_groups=1, sms=SMS):
    """The configuration for a shape, on a GPU with that many SMs."""
    tile = next((t for t in (16, 32, 48, 64) if m <= t), 128)
    step = 128 if k // scale_groups % 128 == 0 else 64
    if tile == 128:
        return _choose_large(m, n, scale_groups, sms, step)
    consumers = 2 if n > 64 and tile == 16 else 1
    turns = 1 if scale_groups > 1 and k // scale_groups > 4 * step else 2
    split, tiles = 1, pl.cdiv(n, 64 * consumers)
    parts = scale_groups if scale_groups > 1 else pl.cdiv(k, step)
    sums = turns * consumers * 64 * tile * 4  # of a block
    while split < 8 and 2 * split * tiles <= sms and parts % (2 * split) == 0:
        if 2 * split * sums > _INBOX:
            break
        split *= 2
    return MixedConfig(consumers, tile, split, 8 if turns == 2 else 0, step, turns=turns)


def _choose_large(m, n, scale_groups, sms, step):
    """The same for more than 64 rows: the tile by which the waves take least."""
    if n <= 64:
        return MixedConfig(1, 128, 1, 0, step)
    if scale_groups > 1:  # with sums of groups there are no registers for more
        return MixedConfig(2, 128, 1, 0, step)

    def time(large):
        consumers, tile, _, of_tile = large
        return pl.cdiv(pl.cdiv(m, tile) * pl.cdiv(n, 64 * consumers), sms) * of_tile

    consumers, tile, turns, _ = min(_LARGE_TILES, key=time)
    step = 64 if turns == 2 or tile == 256 else step
    return MixedConfig(consumers, tile, 1, 0, step, 16 if tile == 256 else 8, turns)


# ---- the function -------------------------------------------------------------------------------


def _check_config(config, x, sms):
    if not isinstance(config, MixedConfig):
        raise TypeError(f"mixed_matmul: config must be a MixedConfig, got {config!r}")
    c, groups = config, x.scale_groups
    if (
        c.consumers not in (1, 2, 3)
        or c.tile_m not in range(16, 257, 16)
        or c.tile_m > (128 if groups > 1 else 192 if c.consumers == 3 else 256)
        or c.split not in (1, 2, 4, 8)
        or c.split > 1
        and c.tile_m > 64
        or c.step not in (64, 128)
        or c.stages < 0
        or c.group < 1
        or c.turns not in (1, 2)
        or c.turns == 2
        and (c.tile_m > 128 // c.consumers or c.consumers == 3)
    ):
        raise ValueError(
            "mixed_matmul: a MixedConfig has 1 to 3 consumers, a tile_m that is a multiple of 16 up"
            " to 256 (to 192 with 3 consumers, to 128 with groups of scales, to 64 with a split), a"
            " split of 1, 2, 4 or 8, stages from 0, a step of 64 or 128, a group from 1 and 1 or 2"
            " turns (2 with a tile_m up to 128 and 1 consumer, up to 64 and 2 consumers);"
            f" got {config}"
        )
    if groups > 1 and (x.k // groups % c.step or groups % c.split):
        raise ValueError(
            f"mixed_matmul: {groups} groups of {x.k // groups} elements must be a"
            f" multiple of the split, and a multiple of the step each; got {config}"
        )
    if _Plan(x, config, sms).stages < 1:
        raise ValueError(f"mixed_matmul: no slot of the ring fits into SMEM; got {config}")


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
    out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
    if out_dtype.name not in ("float16", "bfloat16", "float32"):
        raise TypeError(f"{name}: out_dtype must be a float dtype, got {out_dtype}")
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
        config = config or choose(m, n, k, groups, sms)
        _check_config(config, product, sms)
        kernel = _kernel(product, config, sms, interpret)
    return with_padding(kernel, [padding_of(x, interpret), None, None])
