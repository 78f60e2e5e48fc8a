"""Attention (forward) on Hopper's tensor cores: softmax(scale Q K^T) V, scores in registers only.

Persistent blocks, one per SM. Each consumer thread owns 64 rows of queries; the last thread
fetches. K and V travel in separate rings, because K of the next block is wanted before V of this
one. Per block of keys a consumer issues S = Q K, then O += P V of the block before, waits for S
alone, and computes its softmax while O is still in the making. Consumers take turns at issuing, so
that the softmax of one runs under the products of the other, whatever the instruction order.

Row maxima are stale on purpose: O is rescaled only when a maximum grew by more than 2^8, which
float16 probabilities still hold. Row sums are kept per column modulo 8 and meet in the end.

Key blocks go from the last to the first, so that those with a causal mask come first. Causal tiles
have different lengths: a counter hands them out, longest first, in groups of heads whose K and V
fit in the L2 cache.
"""

import functools
import math
import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._ring import for_told, hand_out, told_scratch

_MASKED = -3.0e38  # a score that is not there; stays finite in arithmetic
_LAZY = 8.0  # log2 of what a maximum may grow by before O is rescaled
_L2_BYTES = 32 << 20


class AttentionConfig(typing.NamedTuple):
    """How attention is tiled.

    ``consumers``: threads of 64 query rows each. ``block``: keys per step, a multiple of 16.
    ``stages``: slots of the rings of K and V. ``lazy``: rescale only when needed. ``late``: wait
    for the next K behind the softmax. ``own_output``: SMEM for O besides that of Q.
    ``q_registers``: keep Q in registers. ``programs``: blocks, 0: one for each SM.
    """

    consumers: int = 2
    block: int = 128
    stages: int = 2
    lazy: bool = True
    late: bool = True
    own_output: bool = True
    q_registers: bool = False
    programs: int = 0


def choose(queries, head_dim, causal):
    """The configuration for a number of queries and a head size."""
    most = pl.cdiv(queries, 64)
    if head_dim == 64:
        return AttentionConfig(min(3, most), 128, 4, lazy=not causal, late=False)
    if head_dim == 128:
        return AttentionConfig(min(2, most), 128, 2, causal, causal, q_registers=True)
    return AttentionConfig(min(2, most), 64, 2, own_output=False)


@functools.cache
def _kernel(shape, keys, kv_heads, dtype, causal, scale, want_lse, cfg, cores, interpret):
    batch, queries, heads, dim = shape
    rows, block, stages, me_count = cfg.consumers * 64, cfg.block, cfg.stages, cfg.consumers
    q_tiles, key_blocks = pl.cdiv(queries, rows), pl.cdiv(keys, block)
    all_heads = batch * heads
    total = all_heads * q_tiles
    programs = min(total, cfg.programs or cores)
    group = 1
    if causal:
        group = min(max(_L2_BYTES // (keys * dim * 4), 1), all_heads)
    dynamic = causal and total > programs
    c = scale * math.log2(math.e)  # exp(x) is exp2(x log2 e)
    f32 = np.float32

    def tile_of(t):
        """Tile of queries, head and batch of tile number t."""
        t = jnp.clip(t, 0, total - 1)  # it is, but came through memory
        band, inside = t // (group * q_tiles), t % (group * q_tiles)
        width = jnp.int32(group)
        if all_heads % group:
            width = jnp.maximum(jnp.minimum(all_heads - band * group, group), 1)
        tile, head = lax.div(inside, width), band * group + lax.rem(inside, width)
        if causal:
            tile = jnp.maximum(q_tiles - 1 - tile, 0)  # longest first
        return tile, head % heads, head // heads

    def blocks_of(tile):
        if not causal:
            return lax.optimization_barrier(jnp.int32(key_blocks))  # one step stays a loop
        return jnp.minimum(((tile + 1) * rows + block - 1) // block, key_blocks)

    def body(q, k, v, o, *refs):
        lse, refs = (refs[0], refs[1:]) if want_lse else (None, refs)
        q_s, k_s, v_s, o_s, lse_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, *ring = refs
        me, sm = lax.axis_index("wg"), lax.axis_index("sm")

        def give_registers(n, action):
            if me_count > 1:  # two threads have 256 each as it is
                plgpu.set_max_registers(n, action=action)

        def produce(t, carry):
            """Fetch what tile t needs. carry: tiles and key blocks so far."""
            tiles, it = carry
            tile, head, b = tile_of(t)
            count = blocks_of(tile)
            kv_head = head // (heads // kv_heads)

            @pl.when(tiles > 0)
            def _():
                plgpu.barrier_wait(q_empty, phase=tiles - 1)

            for w in range(me_count):
                at = (b, pl.ds(tile * rows + w * 64, 64), head)
                plgpu.copy_gmem_to_smem(q.at[at], q_s.at[w], q_full)

            def fetch(src, dst, full, empty, it, which):
                slot = it % stages

                @pl.when(it >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot], phase=it // stages - 1)

                at = (b, pl.ds((count - 1 - which) * block, block), kv_head)
                plgpu.copy_gmem_to_smem(src.at[at], dst.at[slot], full.at[slot])

            def step(j, _):
                @pl.when(j < count)
                def _():
                    fetch(k, k_s, k_full, k_empty, it + j, j)

                @pl.when(j > 0)
                def _():
                    fetch(v, v_s, v_full, v_empty, it + j - 1, j - 1)

            lax.fori_loop(0, count + 1, step, None)
            return tiles + 1, it + count

        def wait(ring, it):
            """For what key block number it brings into its slot of the ring."""
            plgpu.barrier_wait(ring.at[it % stages], phase=it // stages)

        def attend(t, it):
            """One tile of a consumer. it: key blocks so far."""
            tile, head, b = tile_of(t)
            count = blocks_of(tile)
            row = tile * rows + me * 64

            def mask(s, j):
                """Scores of key block count - 1 - j, those outside are _MASKED."""
                col = lax.broadcasted_iota(np.int32, s.shape, 1) + (count - 1 - j) * block
                keep = col < keys
                if causal:
                    at = lax.broadcasted_iota(np.int32, s.shape, 0) + row
                    keep = col <= at if keys >= queries else keep & (col <= at)
                return jnp.where(keep, s, f32(_MASKED))

            def mask_last(s):
                if causal and block % rows == 0:
                    return mask(s, 0)
                if not causal and keys % block == 0:
                    return s
                # A branch, so that which columns are there is not kept in registers.
                whole = count * block <= (jnp.minimum(row + 1, keys) if causal else keys)
                return lax.cond(whole, lambda s: s, lambda s: mask(s, 0), s)

            def mask_other(s, j):
                """For j > 0: whole blocks of keys, and most of them come before all rows."""
                if not causal or block % rows == 0:
                    return s
                behind = (count - j) * block
                return lax.cond(behind <= row + 1, lambda s: s, lambda s: mask(s, j), s)

            def scaled(m):
                """What is subtracted from scaled scores; a row may be masked entirely."""
                return jnp.where(m == f32(_MASKED), f32(0), m * f32(c))

            def rows_of(x, width):
                return lax.broadcast_in_dim(x, (64, width), [0])

            def partial_sums(p):
                return p.reshape(64, block // 8, 8).sum(axis=1)

            plgpu.barrier_wait(q_full)
            mine = q_s.at[me]
            if cfg.q_registers:
                mine = plgpu.load(mine, layout=plgpu.Layout.WGMMA)

            def with_output(o_acc):
                wait(k_full, it)

                def first_scores(s_acc):
                    with plgpu.in_turn(me_count):
                        plgpu.wgmma(s_acc, mine, k_s.at[it % stages].T)
                    return s_acc[...]

                s = pl.run_scoped(first_scores, plgpu.ACC((64, block)))
                plgpu.barrier_arrive(k_empty.at[it % stages])
                s = mask_last(s)
                m = jnp.max(s, axis=1)
                p = jnp.exp2(s * f32(c) - rows_of(scaled(m), block))
                sums = partial_sums(p)

                if cfg.late:

                    @pl.when(count > 1)
                    def _():
                        wait(k_full, it + 1)

                def step(j, carry):
                    m, sums, p = carry
                    now = it + j
                    slot, before = now % stages, (now - 1) % stages
                    if not cfg.late:
                        wait(k_full, now)

                    def scores(s_acc):
                        with plgpu.in_turn(me_count):
                            plgpu.wgmma(s_acc, mine, k_s.at[slot].T)
                            wait(v_full, now - 1)
                            plgpu.wgmma(o_acc, p, v_s.at[before])
                        return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                    s = pl.run_scoped(scores, plgpu.ACC((64, block)))
                    plgpu.barrier_arrive(k_empty.at[slot])
                    s = mask_other(s, j)
                    new = jnp.maximum(m, jnp.max(s, axis=1))
                    if cfg.lazy:
                        grown = (new - m) * f32(c) > f32(_LAZY)
                        new = jnp.where(grown, new, m)
                    base = scaled(new)
                    alpha = jnp.exp2(m * f32(c) - base)
                    s = jnp.exp2(s * f32(c) - rows_of(base, block))
                    sums = sums * rows_of(alpha, 8) + partial_sums(s)
                    if cfg.late:
                        # Its loop ends the basic block: without it ptxas moves the wait for the
                        # products up, in front of the exponentials.
                        s, alpha, sums = lax.optimization_barrier((s, alpha, sums))

                        @pl.when(j + 1 < count)
                        def _():
                            wait(k_full, now + 1)

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(v_empty.at[before])
                    value = plgpu.wgmma_accumulator_load(o_acc, wait_n=None)
                    if cfg.lazy:
                        o_acc[...] = plgpu.lazy_where(
                            rows_of(grown, dim), lambda: value * rows_of(alpha, dim), value
                        )
                    else:
                        o_acc[...] = value * rows_of(alpha, dim)
                    return new, sums, s.astype(dtype)

                m, sums, p = lax.fori_loop(1, count, step, (m, sums, p.astype(dtype)))
                if cfg.own_output:
                    plgpu.barrier_arrive(q_empty)
                last = (it + count - 1) % stages
                wait(v_full, it + count - 1)
                plgpu.wgmma(o_acc, p, v_s.at[last])
                sums = jnp.sum(sums, axis=1)
                value = o_acc[...]
                plgpu.barrier_arrive(v_empty.at[last])
                return value, m, sums

            value, m, sums = pl.run_scoped(with_output, plgpu.ACC((64, dim)))
            out = o_s if cfg.own_output else q_s
            value = (value * rows_of(pl.reciprocal(sums, approx=True), dim)).astype(dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out[me] = value
            if want_lse:
                lse_s[me] = (scaled(m) + jnp.log2(sums)) * f32(math.log(2))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[me], o.at[b, pl.ds(row, 64), head])
            if want_lse:
                where = lse.at[b, head, pl.ds(row, 64)]
                plgpu.copy_smem_to_gmem(lse_s.at[me], where, engine="lanes")
            if not cfg.own_output:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_empty)
            return it + count

        def static_tiles(work, carry):
            trips = (total - sm + (programs - 1)) // programs
            return lax.fori_loop(0, trips, lambda w, x: work(sm + w * programs, x), carry)

        @pl.when(me == me_count)
        def _():
            give_registers(40 if me_count < 3 else 32, "decrease")
            start = (jnp.int32(0), jnp.int32(0))
            if dynamic:
                tiles, it = hand_out(ring, sm, programs, total, produce, start)
            else:
                tiles, it = static_tiles(produce, start)
            plgpu.barrier_wait(q_empty, phase=tiles - 1)
            for s in range(stages):  # every release is waited for

                @pl.when(it > s)
                def _(s=s):
                    plgpu.barrier_wait(k_empty.at[s], phase=(it - s - 1) // stages)
                    plgpu.barrier_wait(v_empty.at[s], phase=(it - s - 1) // stages)

        @pl.when(me < me_count)
        def _():
            give_registers(232 if me_count < 3 else 160, "increase")
            if dynamic:
                for_told(ring, total, attend, jnp.int32(0))
            else:
                static_tiles(attend, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    per_thread = plgpu.SMEM((me_count, 64, dim), dtype, transforms=swizzled)
    slots = plgpu.SMEM((stages, block, dim), dtype, transforms=swizzled)
    full = plgpu.Barrier(num_barriers=stages)
    empty = plgpu.Barrier(num_barriers=stages, num_arrivals=me_count)
    outs = plgpu.ShapeDtypeStruct(shape, dtype)
    if want_lse:
        outs = (outs, plgpu.ShapeDtypeStruct((batch, heads, queries), f32))
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=[
            per_thread,
            slots,
            slots,
            per_thread if cfg.own_output else None,
            plgpu.SMEM((me_count, 64), f32) if want_lse else None,
            plgpu.Barrier(num_arrivals=me_count),
            plgpu.Barrier(num_arrivals=me_count),
            full,
            empty,
            full,
            empty,
            *(told_scratch(me_count) if dynamic else []),
        ],
        grid=(programs,),
        grid_names=("sm",),
        num_threads=me_count + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="attention",
    )


def _check(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"attention: {name} must have the dims [batch, length, heads, head_dim], got "
                f"shape {x.shape}"
            )
        if q.dtype.name not in ("float16", "bfloat16") or x.dtype != q.dtype:
            raise TypeError(
                "attention: q, k and v must all be float16 or all bfloat16, got "
                f"{q.dtype}, {k.dtype} and {v.dtype}"
            )
    batch, queries, heads, dim = q.shape
    _, keys, kv_heads, _ = k.shape
    if dim not in (64, 128, 256):
        raise NotImplementedError(
            f"attention: head_dim must be 64, 128 or 256, got {dim}; pad q, k and v with zeros and "
            "give scale"
        )
    if k.shape != v.shape:
        raise ValueError(f"attention: k and v must have one shape, got {k.shape} and {v.shape}")
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(f"attention: q {q.shape} and k {k.shape} differ in batch or head_dim")
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"attention: the heads of q must be a multiple of those of k and v, got {heads} and "
            f"{kv_heads}"
        )
    if 0 in (batch, queries, heads, keys):
        raise ValueError(f"attention: empty operands, {q.shape} and {k.shape}")


def _check_config(config):
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"attention: config must be an AttentionConfig, got {config!r}")
    c = config
    blocks = range(16, 257, 16)
    if c.consumers not in (1, 2, 3) or c.block not in blocks or c.stages < 1 or c.programs < 0:
        raise ValueError(
            "attention: an AttentionConfig has 1 to 3 consumers, a block that is a multiple of 16"
            f" up to 256, stages from 1 and programs from 0; got {config}"
        )


@plgpu.kernel_family
def attention(q, k, v, *, causal=False, scale=None, return_lse=False, config=None, interpret=None):
    """``softmax(scale * q @ k.T) @ v`` for each head, accumulated in float32 (Hopper).

    q: [batch, queries, heads, head_dim]; k, v: [batch, keys, kv_heads, head_dim]; float16 or
    bfloat16, row-major; head_dim 64, 128 or 256; any lengths. Query head h uses key head
    ``h // (heads // kv_heads)``. causal: query i sees the keys 0 to i. scale: of the scores,
    ``head_dim ** -0.5`` by default. return_lse: also return the natural logarithm of the sum of
    exponentials of the scores, float32 [batch, heads, queries]. config: an
    :class:`AttentionConfig`; chosen from the shape by default. out: a preallocated result, or a
    pair of them.

    Returns [batch, queries, heads, head_dim] of the caller's kind of array, or (that, lse).
    TypeError, ValueError for other dtypes and shapes, NotImplementedError for other head_dims.
    """
    _check(q, k, v)
    queries, dim = q.shape[1], q.shape[3]
    config = config or choose(queries, dim, bool(causal))
    _check_config(config)
    return _kernel(
        q.shape,
        k.shape[1],
        k.shape[2],
        q.dtype,
        bool(causal),
        float(dim**-0.5 if scale is None else scale),
        bool(return_lse),
        config,
        plgpu.core_count(q.device),
        interpret,
    )
