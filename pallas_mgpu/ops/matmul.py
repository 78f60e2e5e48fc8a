"""Matrix product on Hopper's tensor cores.

One persistent block per SM works through output tiles. Its last thread fetches: a ring of
`stages` slots, each a tile of A and a tile of B, filled by TMA. The other threads, the consumers,
own 64 rows each of the output tile: per step one wgmma on a slot, then they release it. Blocks of
a cluster lie one above the other and share the tile of B, of which each fetches a part for all.
The epilogue goes through small swizzled buffers in SMEM, 64 columns at a time, so that the stores
of one tile run under the next.

Ragged edges need nothing: TMA reads zeros outside and does not write there."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, nn, pl
from pallas_mgpu import numpy as jnp

_ACTIVATIONS = {"relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu, "tanh": nn.tanh}
_STEP = 64  # elements of K per step: one 128-byte row of 16-bit elements


class MatmulConfig:
    """How a product is tiled.

    ``consumers``: threads that multiply, 64 rows each. ``tile_n``: columns of a tile, a multiple
    of 64 up to 256. ``stages``: slots of the ring. ``cluster``: blocks that share a tile of B.
    ``buffers``: store buffers per consumer. ``group``: rows of cluster tiles worked on together,
    for the L2.
    """

    __slots__ = ("consumers", "tile_n", "stages", "cluster", "buffers", "group")

    def __init__(self, consumers=2, tile_n=256, stages=4, cluster=2, buffers=2, group=8):
        self.consumers, self.tile_n, self.stages = consumers, tile_n, stages
        self.cluster, self.buffers, self.group = cluster, buffers, group

    def key(self):
        return tuple(getattr(self, k) for k in self.__slots__)

    def __eq__(self, other):
        return isinstance(other, MatmulConfig) and self.key() == other.key()

    def __hash__(self):
        return hash(self.key())

    def __repr__(self):
        return "MatmulConfig(" + ", ".join(f"{k}={getattr(self, k)}" for k in self.__slots__) + ")"


def choose(m, n, k, sms=132):
    """The configuration for a shape: the largest tile whose last wave is not too thin."""

    def waves(c):
        tiles = pl.cdiv(m, 64 * c.consumers * c.cluster) * pl.cdiv(n, c.tile_n)
        return pl.cdiv(tiles, sms // c.cluster)

    def cost(c):
        # time of a wave: columns of wgmma per step, a little more for narrow tiles that reread A
        return waves(c) * (c.tile_n + 32) * max(c.consumers, 1)

    candidates = [
        MatmulConfig(2, 256, 4, 2, 2, 8),
        MatmulConfig(2, 256, 4, 1, 2, 8),
        MatmulConfig(2, 128, 6, 1, 2, 8),
        MatmulConfig(1, 128, 6, 1, 2, 8),
        MatmulConfig(1, 64, 8, 1, 2, 8),
    ]
    usable = [c for c in candidates if c.cluster == 1 or m > 64 * c.consumers]
    return min(usable, key=cost)


@functools.cache
def _kernel(m, n, k, dtype, out_dtype, ta, tb, has_bias, activation, cfg, sms, interpret):
    rows, cols = 64 * cfg.consumers, cfg.tile_n
    tiles_m, tiles_n = pl.cdiv(m, rows * cfg.cluster), pl.cdiv(n, cols)
    total, steps = tiles_m * tiles_n, pl.cdiv(k, _STEP)
    clusters = min(total, max(sms // cfg.cluster, 1))
    group = min(cfg.group, tiles_m)
    shared = "cta" if cfg.cluster > 1 else None
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    bits = np.dtype(out_dtype).itemsize
    out_cols = 128 // bits  # columns of a store buffer: one swizzled row
    chunks = cols // out_cols
    buffers = max(b for b in range(1, cfg.buffers + 1) if chunks % b == 0)

    def origin(t, rank):
        """First row and column of this block's part of cluster tile t."""
        band = t // (group * tiles_n)
        inside = t % (group * tiles_n)
        if tiles_m % group == 0:
            height = group
        else:
            height = _core.binary("min", tiles_m - band * group, group)
        row = band * group + inside % height
        return (row * cfg.cluster + rank) * rows, inside // height * cols

    def for_tiles(cid, body, carry):
        trips = (total - cid + (clusters - 1)) // clusters
        return lax.fori_loop(0, trips, lambda w, c: body(cid + w * clusters, c), carry)

    def body(a, b, *refs):
        bias, (o, a_smem, b_smem, o_smem, bias_smem, full, empty, bias_ready) = (
            (refs[0], refs[1:]) if has_bias else (None, refs)
        )
        me, cid = lax.axis_index("wg"), lax.axis_index("sm")
        rank = lax.axis_index("cta") if shared else 0

        @pl.when(me == cfg.consumers)
        def producer():
            plgpu.set_max_registers(40, action="decrease")

            def fetch(t, it):
                row, col = origin(t, rank)

                def step(s, it):
                    slot = it % cfg.stages
                    k0 = s * _STEP

                    @pl.when(it >= cfg.stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    at_a = (pl.ds(k0, _STEP), pl.ds(row, rows))
                    at_b = (pl.ds(k0, _STEP), pl.ds(col, cols))
                    plgpu.copy_gmem_to_smem(
                        a.at[at_a if ta else at_a[::-1]], a_smem.at[slot], full.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        b.at[at_b[::-1] if tb else at_b],
                        b_smem.at[slot],
                        full.at[slot],
                        collective_axes=shared,
                    )
                    return it + 1

                return lax.fori_loop(0, steps, step, it)

            done = for_tiles(cid, fetch, 0)
            for s in range(cfg.stages):  # every release is waited for, also those of other blocks

                @pl.when(done > s)
                def _(s=s):
                    plgpu.barrier_wait(empty.at[s])

        @pl.when(me < cfg.consumers)
        def consumer():
            plgpu.set_max_registers(232 if cfg.consumers < 3 else 160, action="increase")

            def tile(t, it):
                row, col = origin(t, rank)
                if has_bias:
                    plgpu.copy_gmem_to_smem(
                        bias.at[pl.ds(col, cols)], bias_smem.at[me], bias_ready.at[me]
                    )

                def product(acc):
                    def step(s, it):
                        slot = it % cfg.stages
                        plgpu.barrier_wait(full.at[slot])
                        mine = pl.ds(me * 64, 64)
                        part = a_smem.at[slot, :, mine].T if ta else a_smem.at[slot, mine]
                        other = b_smem.at[slot].T if tb else b_smem.at[slot]
                        plgpu.wgmma(acc, part, other)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])
                        return it + 1

                    it_next = lax.fori_loop(0, steps, step, it)
                    return acc[...], it_next

                value, it = pl.run_scoped(product, plgpu.ACC((64, cols)))
                if has_bias:
                    plgpu.barrier_wait(bias_ready.at[me])
                for c in range(chunks):
                    part = value[:, c * out_cols : (c + 1) * out_cols]
                    if has_bias:
                        b_part = bias_smem[me, pl.ds(c * out_cols, out_cols)].astype(jnp.float32)
                        part = part + lax.broadcast_in_dim(b_part, part.shape, [1])
                    if activation is not None:
                        part = activation(part)
                    buffer = o_smem.at[me, c % buffers]
                    plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                    buffer[...] = part.astype(out_dtype)
                    plgpu.commit_smem()
                    where = (pl.ds(row + me * 64, 64), pl.ds(col + c * out_cols, out_cols))
                    plgpu.copy_smem_to_gmem(buffer, o.at[where])
                return it

            for_tiles(cid, tile, 0)
            plgpu.wait_smem_to_gmem(0)

    a_tile = (_STEP, rows) if ta else (rows, _STEP)
    b_tile = (cols, _STEP) if tb else (_STEP, cols)
    slots = {"num_barriers": cfg.stages}
    if shared:
        empty = plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=cfg.consumers, **slots)
    else:
        empty = plgpu.Barrier(num_arrivals=cfg.consumers, **slots)
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[
            plgpu.SMEM((cfg.stages, *a_tile), dtype, transforms=swizzled),
            plgpu.SMEM((cfg.stages, *b_tile), dtype, transforms=swizzled),
            plgpu.SMEM(
                (cfg.consumers, buffers, 64, out_cols),
                out_dtype,
                transforms=(plgpu.TilingTransform((8, out_cols)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.SMEM((cfg.consumers, cols), dtype) if has_bias else None,
            plgpu.Barrier(num_arrivals=2, **slots),
            empty,
            plgpu.Barrier(num_barriers=cfg.consumers) if has_bias else None,
        ],
        grid=(clusters,),
        grid_names=("sm",),
        cluster=(cfg.cluster,) if shared else (),
        cluster_names=("cta",) if shared else (),
        num_threads=cfg.consumers + 1,
        thread_name="wg",
        interpret=interpret,
        kernel_name="matmul",
    )


@plgpu.kernel_family
def matmul(
    a,
    b,
    *,
    bias=None,
    activation=None,
    out_dtype=None,
    transpose_a=False,
    transpose_b=False,
    config=None,
    interpret=None,
):
    """``activation(a @ b + bias)`` with float32 accumulation (Hopper).

    a: (M, K), or (K, M) with ``transpose_a``; b: (K, N), or (N, K) with ``transpose_b``; float16
    or bfloat16, row-major, any M, N, K. bias: (N,), dtype of ``a``. activation: a function of a
    float32 array, or "relu", "silu", "gelu", "tanh". out_dtype: float16, bfloat16 or float32;
    that of ``a`` by default. config: a :class:`MatmulConfig`; chosen from the shape by default.
    out: a preallocated result.

    Returns (M, N) of the caller's kind of array. TypeError, ValueError for other dtypes and shapes.
    """
    dtype = _core.as_dtype(a.dtype)
    if dtype.name not in ("float16", "bfloat16") or _core.as_dtype(b.dtype) != dtype:
        raise TypeError(
            f"matmul: a and b must both be float16 or bfloat16, got {a.dtype} and {b.dtype}"
        )
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ValueError(
            f"matmul: a and b must have two dims, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    (k, m) = a.shape if transpose_a else tuple(a.shape)[::-1]
    (n, k2) = b.shape if transpose_b else tuple(b.shape)[::-1]
    if k != k2:
        raise ValueError(f"matmul: the inner dims differ, {k} and {k2}")
    if bias is not None and (tuple(bias.shape) != (n,) or _core.as_dtype(bias.dtype) != dtype):
        raise ValueError(
            f"matmul: bias must be {dtype} of shape ({n},), got {bias.dtype} {tuple(bias.shape)}"
        )
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"matmul: activation must be one of {sorted(_ACTIVATIONS)}, got {activation!r}"
            )
        activation = _ACTIVATIONS[activation]
    sms = plgpu.core_count(a.device)
    return _kernel(
        m,
        n,
        k,
        dtype,
        dtype if out_dtype is None else _core.as_dtype(out_dtype),
        bool(transpose_a),
        bool(transpose_b),
        bias is not None,
        activation,
        config or choose(m, n, k, sms),
        sms,
        interpret,
    )
