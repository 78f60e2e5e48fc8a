"""Product of an array of 16-bit floats with weights of 8 or 4 bits, on Hopper's tensor cores.

The transposed product is computed: out.T = weights @ x.T. So the weights are the left operand,
which tensor cores take from registers: a consumer loads its 64 rows of a slot, each lane the bytes
that it needs, and makes floats of them. (Wider loads and shuffles between lanes take more of the
integer units, which are the limit.) Scales are not multiplied with weights
but with sums: the products of a group of K add up in accumulators of their own, and go into float32
sums with one multiplication. That is exact, and few operations where x has few rows.

Persistent blocks: the last thread fetches into a ring by TMA, each of the others owns 64 rows of
the weights, for `tile_m` rows of x. Where x has few rows the memory is the limit: then blocks of a
cluster divide K, so that all SMs fetch, and the first one adds up their sums in a fixed order. In
a block two threads then take the slots of the same rows in turn, as one would wait most of the time
for its weights to become floats and for its product."""

from typing import NamedTuple

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES as _SMEM
from ._common import swizzled as _swizzled
from ._padding import needs_padding as _needs_padding
from ._padding import padding as _padding
from ._ring import Ring, roles

_BITS = {"int8": 8, "int4": 4}


class MixedConfig(NamedTuple):
    """How a mixed product is tiled.

    ``consumers``: threads that multiply, 64 rows of the weights each, 1 to 3. ``tile_m``: rows of x
    of a tile, a multiple of 16 up to 128. ``split``: blocks of a cluster that divide K, 1, 2, 4 or
    8; from 2 on for tile_m up to 32. ``stages``: slots of the ring; 0: as many as fit. ``step``:
    elements of K per slot, 64 or 128. ``group``: tiles of x worked on together,
    for the L2. ``turns``: threads that take the slots of the same rows in turn, 1 or 2; 2 for
    tile_m up to 32 and up to 2 consumers.
    """

    consumers: int = 2
    tile_m: int = 128
    split: int = 1
    stages: int = 0
    step: int = 128
    group: int = 8
    turns: int = 1


class _Plan:
    """Numbers that follow from a shape and a configuration."""

    def __init__(self, m, n, k, scale_groups, bits, out_bytes, cfg, sms):
        self.rows = 64 * cfg.consumers
        self.tiles_m, self.tiles_n = pl.cdiv(m, cfg.tile_m), pl.cdiv(n, self.rows)
        self.total = self.tiles_m * self.tiles_n
        steps = pl.cdiv(k, cfg.step)
        if scale_groups > 1:  # sums of a group each
            self.groups = scale_groups // cfg.split
            self.steps = steps // scale_groups
        else:
            self.groups, self.steps = 1, pl.cdiv(steps, cfg.split)
        used = cfg.consumers * cfg.tile_m * 64 * out_bytes + 2048
        self.parts = cfg.split * cfg.turns  # of sums
        if self.parts > 1:
            used += self.parts * cfg.consumers * 64 * cfg.tile_m * 4
        slot = (self.rows * bits // 8 + cfg.tile_m * 2) * cfg.step
        most = min((_SMEM - used) // slot, 16)
        self.stages = min(cfg.stages or most, most, max(self.groups * self.steps, 2))
        if cfg.turns > 1:  # a slot always has the same thread, which sees every phase of it
            round_ = cfg.turns * (self.steps if scale_groups > 1 else 1)
            if round_ > most:
                raise ValueError(
                    f"mixed_matmul: {round_} slots, for 2 turns of a group, do not fit; got {cfg}"
                )
            self.stages = max(self.stages // round_, 1) * round_
        self.clusters = self.total if self.parts > 1 else min(self.total, sms)
        self.registers = {2: (40, 232), 3: (32, 160)}.get(cfg.consumers)
        if cfg.tile_m <= 64:
            self.registers = None


@cached
def _product(
    m, n, k, dtype, weight_dtype, scale_dtype, scale_groups, out_dtype, cfg, sms, interpret
):
    """scale_dtype: None without scales."""
    bits = _BITS[weight_dtype.name]
    p = _Plan(m, n, k, scale_groups, bits, out_dtype.itemsize, cfg, sms)
    tile, split, step, consumers = cfg.tile_m, cfg.split, cfg.step, cfg.consumers
    turns = cfg.turns
    steps = p.groups * p.steps  # of a block
    by_tma = m == 1 or n * out_dtype.itemsize % 16 == 0
    f32 = jnp.float32

    def body(x, w, *refs, w_smem, x_smem, o_smem, full, empty, inbox=None, arrived=None):
        *scales, o = refs
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        ring = Ring(p.stages, w_smem, x_smem, full, empty)
        cid = lax.axis_index("tile")
        rank = lax.axis_index("ck") if split > 1 else 0

        def for_tiles(work):
            """work(first row of x, of the weights, steps before) for each tile; all steps."""

            def one(i, it):
                t = cid + i * p.clusters
                band, inside = t // (cfg.group * p.tiles_n), t % (cfg.group * p.tiles_n)
                height = jnp.minimum(p.tiles_m - band * cfg.group, cfg.group)
                height = jnp.maximum(height, 1)
                at = band * cfg.group + lax.rem(inside, height)
                work(at * tile, lax.div(inside, height) * p.rows, it)
                return it + steps

            if p.clusters == p.total:
                return one(0, jnp.int32(0))
            trips = (p.total - cid + (p.clusters - 1)) // p.clusters
            return lax.fori_loop(0, trips, one, jnp.int32(0))

        def fetch():
            def one(row, col, it):
                def copy(s, w_slot, x_slot, barrier):
                    along_k = pl.ds((rank * steps + s) * step, step)
                    plgpu.copy_gmem_to_smem(w.at[pl.ds(col, p.rows), along_k], w_slot, barrier)
                    plgpu.copy_gmem_to_smem(x.at[pl.ds(row, tile), along_k], x_slot, barrier)

                ring.fetch(0, steps, ring.at(it), copy)

            ring.drain(for_tiles(one))

        def consume(thread):
            me, turn = (thread % consumers, thread // consumers) if turns > 1 else (thread, 0)

            def share(count):
                """How many of so many it is this thread's turn to take."""
                return count // turns if count % turns == 0 else (count - turn + turns - 1) // turns

            def scales_of(group, col):
                """Of the rows of the weights."""
                rows = pl.ds(col, 64)
                if n % p.rows == 0:
                    return scales[0][group, rows]
                keep = jnp.arange(64) < n - col
                return pl.load(scales[0], (group, rows), mask=keep, other=0.0)

            def product(first, count, every):
                """The sums of so many steps, from the first on."""

                def with_sums(acc):
                    def one(i, _):
                        now = first + i * every
                        slot = now % p.stages
                        plgpu.barrier_wait(full.at[slot], phase=now // p.stages)
                        mine = w_smem.at[slot, pl.ds(me * 64, 64)]
                        weights = plgpu.load(mine, layout=plgpu.Layout.WGMMA, optimized=False)
                        weights = weights.astype(dtype)
                        plgpu.wgmma(acc, weights, x_smem.at[slot].T)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])

                    lax.fori_loop(0, count, one, None)
                    return acc[...]

                return pl.run_scoped(with_sums, plgpu.ACC((64, tile)))

            def scaled(value, s):
                if not scales:
                    return value
                return value * lax.broadcast_in_dim(s.astype(f32), value.shape, [0])

            def sums(it, col):
                first = rank * p.groups if scale_groups > 1 else 0
                s = scales_of(first + (turn if p.groups > 1 else 0), col) if scales else None
                if p.groups == 1:
                    return scaled(product(it + turn, share(p.steps), turns), s)

                def one(i, carry):
                    total, s = carry
                    group = turn + i * turns
                    # one ahead: it takes a while
                    following = scales_of(first + jnp.minimum(group + turns, p.groups - 1), col)
                    part = product(it + group * p.steps, p.steps, 1)
                    return total + scaled(part, s), following

                zeros = plgpu.layout_cast(jnp.zeros((64, tile), f32), plgpu.Layout.WGMMA)
                # NVRTC 13.0 takes the last step apart and then unrolls what it knows the count of
                count = lax.optimization_barrier(jnp.int32(share(p.groups)))
                return lax.fori_loop(0, count, one, (zeros, s))[0]

            def store(value, row, col):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[me] = value.T.astype(out_dtype)
                plgpu.commit_smem()
                where = o.at[pl.ds(row, tile), pl.ds(col, 64)]
                plgpu.copy_smem_to_gmem(o_smem.at[me], where, engine=None if by_tma else "lanes")

            def one(row, col, it):
                col = col + me * 64
                value = sums(it, col)
                if p.parts == 1:
                    store(value, row, col)
                    return
                part = rank * turns + turn
                (plgpu.cluster_ref(inbox, {"ck": 0}) if split > 1 else inbox)[part, me] = value
                plgpu.barrier_arrive(arrived.at[me])
                plgpu.barrier_wait(arrived.at[me])

                @pl.when(part == 0)
                def _():
                    total = plgpu.load(inbox.at[0, me], layout=plgpu.Layout.WGMMA)
                    for j in range(1, p.parts):
                        total = total + plgpu.load(inbox.at[j, me], layout=plgpu.Layout.WGMMA)
                    store(total, row, col)

            for_tiles(one)

        roles(consumers * turns, p.registers, fetch, consume)

    bytes_ = step * bits // 8
    tiled = (plgpu.TilingTransform((8, step)), plgpu.SwizzleTransform(bytes_))
    slots = {"num_barriers": p.stages}
    scratch = {
        "w_smem": plgpu.SMEM((p.stages, p.rows, step), weight_dtype, transforms=tiled),
        "x_smem": plgpu.SMEM((p.stages, tile, step), dtype, transforms=_swizzled(64, dtype)),
        "o_smem": plgpu.SMEM((consumers, tile, 64), out_dtype),
        "full": plgpu.Barrier(num_arrivals=2, **slots),
        "empty": plgpu.Barrier(num_arrivals=consumers, **slots),
    }
    if p.parts > 1:
        scratch["inbox"] = plgpu.SMEM((p.parts, consumers, 64, tile), f32)
        arrivals = {"num_arrivals": turns, "num_barriers": consumers}
        scratch["arrived"] = (
            plgpu.ClusterBarrier(collective_axes=("ck",), **arrivals)
            if split > 1
            else plgpu.Barrier(**arrivals)
        )
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=scratch,
        grid=(p.clusters,),
        grid_names=("tile",),
        cluster=(split,) if split > 1 else (),
        cluster_names=("ck",) if split > 1 else (),
        num_threads=consumers * turns + 1,
        thread_name="wg",
        interpret=interpret,
        kernel_name="mixed_matmul",
    )


# ---- the choice ---------------------------------------------------------------------------------


def choose(m, n, k, scale_groups=1, sms=132):
    """The configuration for a shape, on a GPU with that many SMs."""
    tile = next((t for t in (16, 32, 64) if m <= t), 128)
    step = 128 if k // scale_groups % 128 == 0 else 64
    consumers = 2 if n > 64 else 1
    if tile == 128 and pl.cdiv(m, tile) * pl.cdiv(n, 192) >= 4 * sms:
        # with sums of groups there are no registers for more
        return MixedConfig(3, 112 if scale_groups > 1 else 128, 1, 0, step)
    if tile > 32:
        return MixedConfig(consumers, tile, 1, 0, step)
    split, tiles = 1, pl.cdiv(n, 64 * consumers)
    parts = scale_groups if scale_groups > 1 else pl.cdiv(k, step)
    while split < 8 and 2 * split * tiles <= sms and parts % (2 * split) == 0:
        split *= 2
    if scale_groups > 1 and k // scale_groups > 4 * step:
        return MixedConfig(consumers, tile, split, 0, step)
    return MixedConfig(consumers, tile, split, 8, step, turns=2)


# ---- the function -------------------------------------------------------------------------------


def _check_config(config, shape, scale_groups, bits, out_dtype, sms):
    if not isinstance(config, MixedConfig):
        raise TypeError(f"mixed_matmul: config must be a MixedConfig, got {config!r}")
    c, k = config, shape[2]
    if (
        c.consumers not in (1, 2, 3)
        or c.tile_m not in range(16, 129, 16)
        or c.split not in (1, 2, 4, 8)
        or c.split > 1
        and c.tile_m > 32
        or c.step not in (64, 128)
        or c.stages < 0
        or c.group < 1
        or c.turns not in (1, 2)
        or c.turns == 2
        and (c.tile_m > 32 or c.consumers == 3)
    ):
        raise ValueError(
            "mixed_matmul: a MixedConfig has 1 to 3 consumers, a tile_m that is a multiple of 16 up"
            " to 128 (to 32 with a split), a split of 1, 2, 4 or 8, stages from 0, a step of 64 or"
            " 128, a group from 1 and 1 or 2 turns (2 with a tile_m up to 32 and 1 or 2 consumers);"
            f" got {config}"
        )
    if scale_groups > 1 and (k // scale_groups % c.step or scale_groups % c.split):
        raise ValueError(
            f"mixed_matmul: {scale_groups} groups of {k // scale_groups} elements must be a"
            f" multiple of the split, and a multiple of the step each; got {config}"
        )
    if _Plan(*shape, scale_groups, bits, out_dtype.itemsize, config, sms).stages < 1:
        raise ValueError(f"mixed_matmul: no slot of the ring fits into SMEM; got {config}")


class _Padded:
    """The product of a copy of x."""

    def __init__(self, product, pad):
        self.product, self.pad = product, pad

    def __call__(self, x, *operands, out=None):
        x = self.pad(x)
        return self.product(x, *operands) if out is None else self.product(x, *operands, out=out)


@plgpu.kernel_family(in_place=False)
def mixed_matmul(x, weights, scales=None, *, out_dtype=None, config=None, interpret=None):
    """``x @ (weights * scales).T`` with float32 accumulation, for weights of 8 or 4 bits (Hopper).

    x: (M, K) float16 or bfloat16; weights: (N, K) int8 or int4, K contiguous; K a multiple of 64,
    any M and N. scales: (G, N) float16, bfloat16 or float32: element (g, n) belongs to
    ``weights[n, g * K // G : (g + 1) * K // G]``, whose length must be a multiple of 64 if G > 1;
    None for ones. out_dtype: float16, bfloat16 or float32; that of ``x`` by default. config: a
    :class:`MixedConfig`; chosen from the shape by default. out: a preallocated result.

    Weights become floats of the dtype of ``x`` exactly, and scales multiply float32 sums. Returns
    (M, N) of the caller's kind of array. TypeError, ValueError for other dtypes and shapes.
    """
    name = "mixed_matmul"
    if x.dtype.name not in ("float16", "bfloat16"):
        raise TypeError(f"{name}: x must be float16 or bfloat16, got {x.dtype}")
    if weights.dtype.name not in _BITS:
        raise TypeError(f"{name}: weights must be int8 or int4, got {weights.dtype}")
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
    sms = plgpu.core_count(x.device)
    config = config or choose(m, n, k, groups, sms)
    bits = _BITS[weights.dtype.name]
    _check_config(config, (m, n, k), groups, bits, out_dtype, sms)
    product = _product(
        m,
        n,
        k,
        x.dtype,
        weights.dtype,
        None if scales is None else scales.dtype,
        groups,
        out_dtype,
        config,
        sms,
        interpret,
    )
    if _needs_padding(x):
        return _Padded(product, _padding(x.shape, x.dtype, x.aligned, interpret))
    return product
