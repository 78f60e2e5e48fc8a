"""Attention (forward) on Hopper's tensor cores: softmax(scale Q K^T) V, scores in registers only.

Persistent blocks, one per SM. Each consumer thread owns 64 rows of queries; the last thread
fetches. K and V travel in separate rings, because K of the next block is wanted before V of this
one. Per block of keys a consumer issues S = Q K, then O += P V of the block before, waits for S
alone, and computes its softmax while O is still in the making. Consumers take turns at issuing, so
that the softmax of one runs under the products of the other, whatever the instruction order.

The steps of all tiles are one loop: with the first S of a tile goes the last P V of the tile
before, whose result leaves then. So each product stands once in the kernel, which compiles in four
fifths of the time. Before the first block comes a P V that nobody wants, behind the last an S.
What happens once in a tile stands in one branch, which most steps jump over.

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
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES as _SMEM
from ._promises import batch_invariance
from ._ring import hand_out, hear, told_scratch

_MASKED = -3.0e38  # a score that is not there; stays finite in arithmetic
_LAZY = 8.0  # log2 of what a maximum may grow by before O is rescaled
_L2_BYTES = 32 << 20
_OUT = 128  # columns of O that leave at a time


class AttentionConfig(typing.NamedTuple):
    """How attention is tiled.

    ``consumers``: threads of 64 query rows each. ``block``: keys per step, a multiple of 16.
    ``stages``: slots of the rings of K and V. ``lazy``: rescale only when needed. ``late``: wait
    for P V and the next K behind the softmax. ``hold``: release K there, too. ``q_registers``: keep
    Q in registers. ``programs``: blocks, 0: one for each SM.
    """

    consumers: int = 2
    block: int = 128
    stages: int = 2
    lazy: bool = True
    late: bool = True
    hold: bool = False
    q_registers: bool = False
    programs: int = 0


def choose(queries, head_dim, causal):
    """The configuration for a number of queries and a head size."""
    most = pl.cdiv(queries, 64)
    if head_dim == 64:
        full = not causal
        return AttentionConfig(min(3, most), 128, 4, lazy=full, late=False, hold=full)
    if head_dim == 128:
        return AttentionConfig(min(2, most), 128, 2, q_registers=True)
    return AttentionConfig(min(2, most), 64, 2)


@cached
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
    # The next queries are fetched while these are in use, where there is room.
    used = 2 * (2 * rows * dim + 2 * stages * block * dim + rows * min(dim, _OUT))
    q_slots = 2 if not cfg.q_registers and used + 2048 <= _SMEM else 1
    q_ahead = cfg.q_registers or q_slots > 1

    def tile_of(t):
        """Tile of queries, head and batch of tile number t."""
        t = jnp.clip(t, 0, total - 1)  # there is one beyond
        band, inside = t // (group * q_tiles), t % (group * q_tiles)
        width = jnp.int32(group)
        if all_heads % group:
            width = jnp.maximum(jnp.minimum(all_heads - band * group, group), 1)
        tile, head = lax.div(inside, width), band * group + lax.rem(inside, width)
        if causal:
            tile = jnp.maximum(q_tiles - 1 - tile, 0)  # longest first
        return tile, head % heads, head // heads

    def blocks_of(t, tile):
        """Key blocks of a tile; the one beyond has one."""
        count = jnp.int32(key_blocks)
        if causal:
            count = jnp.minimum(((tile + 1) * rows + block - 1) // block, count)
        return lax.select(t < total, count, jnp.int32(1))

    def body(q, k, v, o, *refs):
        lse, refs = (refs[0], refs[1:]) if want_lse else (None, refs)
        q_s, k_s, v_s, o_s, lse_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, *told = refs
        me, sm = lax.axis_index("wg"), lax.axis_index("sm")

        def give_registers(n, action):
            if me_count > 1:  # two threads have 256 each as it is
                plgpu.set_max_registers(n, action=action)

        def wait(barriers, it, slots=stages):
            """For the use number it of the slots of a ring."""
            plgpu.barrier_wait(barriers.at[it % slots], phase=it // slots)

        def fetch(src, dst, full, empty, it, place):
            pl.when(it >= stages)(lambda: wait(empty, it - stages))
            slot = it % stages
            b, row, head = place
            at = (b, pl.ds(pl.multiple_of(row, block), block), head)
            plgpu.copy_gmem_to_smem(src.at[at], dst.at[slot], full.at[slot])

        def produce(t, carry):
            """Fetch what tile t needs. carry: tiles and key blocks so far, the place of the last
            block: V comes a step behind K."""
            tiles, it, place = carry
            tile, head, b = tile_of(t)
            count = blocks_of(t, tile)
            kv_head = head // (heads // kv_heads)
            pl.when(tiles >= q_slots)(lambda: wait(q_empty, tiles - q_slots, q_slots))
            slot = tiles % q_slots
            for w in range(me_count):
                at = (b, pl.ds(tile * rows + w * 64, 64), head)
                plgpu.copy_gmem_to_smem(q.at[at], q_s.at[slot, w], q_full.at[slot])

            def step(j, carry):
                it, before = carry
                place = b, (count - 1 - j) * block, kv_head
                fetch(k, k_s, k_full, k_empty, it, place)
                fetch(v, v_s, v_full, v_empty, it, before)
                return it + 1, place

            it, place = lax.fori_loop(0, count, step, (it, place))
            return tiles + 1, it, place

        def rows_of(x, width):
            return lax.broadcast_in_dim(x, (64, width), [0])

        def scaled(m):
            """What is subtracted from scaled scores; a row may be masked entirely."""
            return jnp.where(m == f32(_MASKED), f32(0), m * f32(c))

        def mask(s, row, end):
            """Scores of the keys before `end`, those outside are _MASKED."""
            col = lax.broadcasted_iota(np.int32, s.shape, 1) + (end - block)
            keep = col < keys
            if causal:
                at = lax.broadcasted_iota(np.int32, s.shape, 0) + row
                keep = col <= at if keys >= queries else keep & (col <= at)
            return jnp.where(keep, s, f32(_MASKED))

        def finish(t, value, m, sums):
            """Stores a consumer's rows of tile t."""
            tile, head, b = tile_of(t)
            at = pl.ds(tile * rows + me * 64, 64)
            sums = jnp.sum(sums, axis=1)
            value = (value * rows_of(pl.reciprocal(sums, approx=True), dim)).astype(dtype)
            for c in range(0, dim, _OUT):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s[me] = value[:, c : c + _OUT]
                plgpu.commit_smem()
                there = o.at[b, at, head, pl.ds(c, min(dim, _OUT))]
                plgpu.copy_smem_to_gmem(o_s.at[me], there)
            if want_lse:
                lse_s[me] = (scaled(m) + jnp.log2(sums)) * f32(math.log(2))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(lse_s.at[me], lse.at[b, head, at], engine="lanes")

        def attend(o_acc, hear):
            """All tiles of a consumer; hear(w): its tile number w."""

            def begin(w):
                """Number, first row and keys of tile w."""
                t = hear(w)
                tile, _, _ = tile_of(t)
                return t, tile * rows + me * 64, blocks_of(t, tile) * block

            def load_queries(w):
                wait(q_full, w, q_slots)
                if not cfg.q_registers:
                    return jnp.int32(0)
                mine = plgpu.load(q_s.at[0, me], layout=plgpu.Layout.WGMMA)
                plgpu.barrier_arrive(q_empty.at[0])
                return mine

            def step(carry):
                """The key block before key `end` of tile t, whose first row is `row`; `ended`: the
                tile before, if this is the first block of t (`total`: there is none), or -1. w:
                tiles, it: blocks so far. m, sums: maxima and sums of the rows; p: probabilities of
                the block before; mine: queries, where registers have them."""
                w, t, row, end, ended, it, m, sums, p, mine = carry
                slot = it % stages
                first, last = ended != -1, end == block
                rare = first | last
                if causal:
                    rare |= end > row + 1
                if keys % block:
                    rare |= end > keys
                if not cfg.q_registers:
                    mine_s = q_s.at[w % q_slots, me]
                    if not q_ahead:
                        pl.when(first)(lambda: wait(q_full, w, 1))
                if not cfg.late:
                    wait(k_full, it)

                def scores(s_acc):
                    with plgpu.ext.ordered_section(me_count):
                        plgpu.wgmma(s_acc, mine if cfg.q_registers else mine_s, k_s.at[slot].T)
                        wait(v_full, it)
                        plgpu.wgmma(o_acc, p, v_s.at[slot])
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                s = pl.run_scoped(scores, plgpu.ACC((64, block)))
                if not cfg.hold:
                    plgpu.barrier_arrive(k_empty.at[slot])

                def turn_over(m, sums):
                    """The tile before ends, and there is nothing yet of this one."""
                    plgpu.wgmma_wait(0)
                    value = plgpu.wgmma_accumulator_load(o_acc, wait_n=None)
                    pl.when(ended < total)(lambda: finish(ended, value, m, sums))
                    o_acc[...] = jnp.zeros_like(value)
                    return jnp.full_like(m, f32(_MASKED)), jnp.zeros_like(sums)

                def same(mine):
                    return w, t, row, end - block, mine

                def following(mine):
                    """The next tile; its queries, where they have a place of their own."""
                    if q_ahead:
                        mine = load_queries(w + 1)
                    return w + 1, *begin(w + 1), mine

                def rarely(s, m, sums, mine):
                    if causal or keys % block:
                        outside = end > (jnp.minimum(row + 1, keys) if causal else keys)
                        s = lax.cond(outside, lambda s: mask(s, row, end), lambda s: s, s)
                    m, sums = lax.cond(first, turn_over, lambda m, sums: (m, sums), m, sums)
                    if not cfg.q_registers:
                        pl.when(last)(lambda: plgpu.barrier_arrive(q_empty.at[w % q_slots]))
                    now_ended = lax.select(last, t, -1)
                    return (
                        s,
                        m,
                        sums,
                        now_ended,
                        *lax.cond(last & (t < total), following, same, mine),
                    )

                def mostly(s, m, sums, mine):
                    return s, m, sums, jnp.int32(-1), *same(mine)

                s, m, sums, ended, w, t, row, end, mine = lax.cond(
                    rare, rarely, mostly, s, m, sums, mine
                )
                new = jnp.maximum(m, jnp.max(s, axis=1))
                if cfg.lazy:
                    grown = (new - m) * f32(c) > f32(_LAZY)
                    new = jnp.where(grown, new, m)
                base = scaled(new)
                alpha = jnp.exp2(m * f32(c) - base)
                s = jnp.exp2(s * f32(c) - rows_of(base, block))
                partial = s.reshape(64, block // 8, 8).sum(axis=1)
                sums = sums * rows_of(alpha, 8) + partial
                if cfg.hold:
                    plgpu.barrier_arrive(k_empty.at[slot])
                if cfg.late:
                    # Its loop ends the basic block: without it ptxas moves the wait for the
                    # products up, in front of the exponentials.
                    s, alpha, sums = lax.optimization_barrier((s, alpha, sums))
                    wait(k_full, it + 1)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_empty.at[slot])
                value = plgpu.wgmma_accumulator_load(o_acc, wait_n=None)
                if cfg.lazy:
                    o_acc[...] = plgpu.ext.warp_where(
                        rows_of(grown, dim), lambda: value * rows_of(alpha, dim), value
                    )
                else:
                    o_acc[...] = value * rows_of(alpha, dim)
                return w, t, row, end, ended, it + 1, new, sums, s.astype(dtype), mine

            def full(shape, x, layout=plgpu.Layout.WGMMA):
                return plgpu.layout_cast(jnp.full(shape, x), layout)

            none = jnp.int32(0)
            mine = load_queries(none) if q_ahead else none
            if cfg.late:
                wait(k_full, none)
            m = full((64,), f32(_MASKED), plgpu.Layout.WGMMA.reduce(1))
            sums, p = full((64, 8), f32(0)), full((64, block), np.zeros((), dtype))
            start = none, *begin(none), none + total, none, m, sums, p, mine
            lax.while_loop(lambda x: x[3] > 0, step, start)

        @pl.when(me == me_count)
        def _():
            give_registers(24 if me_count < 3 else 32, "decrease")
            none = jnp.int32(0)
            _, head, b = tile_of(sm)
            start = none, none, (b, none, head // (heads // kv_heads))
            if dynamic:
                end = hand_out(told[0], sm, programs, total, produce, start, beyond=True)
            else:
                trips = (total - sm + (programs - 1)) // programs
                end = lax.fori_loop(0, trips + 1, lambda w, x: produce(sm + w * programs, x), start)
            tiles, it, place = end
            if cfg.late:  # the last step waits for it, too
                fetch(k, k_s, k_full, k_empty, it, place)
            for s in range(q_slots):  # every release is waited for
                wait(q_empty, tiles - 1 - s, q_slots)
            for s in range(stages):

                @pl.when(it > s)
                def _(s=s):
                    if not cfg.late or s < stages - 1:
                        wait(k_empty, it - 1 - s)
                    wait(v_empty, it - 1 - s)

        @pl.when(me < me_count)
        def _():
            give_registers(240 if me_count < 3 else 160, "increase")
            of_tile = functools.partial(hear, told[0]) if dynamic else lambda w: sm + w * programs
            pl.run_scoped(lambda acc: attend(acc, of_tile), plgpu.ACC((64, dim)))
            plgpu.wait_smem_to_gmem(0)

    def smem(*shape):
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def barriers(slots, arrivals=1):
        return plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals)

    outs = plgpu.ShapeDtypeStruct(shape, dtype)
    if want_lse:
        outs = (outs, plgpu.ShapeDtypeStruct((batch, heads, queries), f32))
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=[
            smem(q_slots, me_count, 64, dim),
            smem(stages, block, dim),
            smem(stages, block, dim),
            smem(me_count, 64, min(dim, _OUT)),
            plgpu.SMEM((me_count, 64), f32) if want_lse else None,
            barriers(q_slots, me_count),
            barriers(q_slots, me_count),
            barriers(stages),
            barriers(stages, me_count),
            barriers(stages),
            barriers(stages, me_count),
            *([told_scratch(me_count)] if dynamic else []),
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


@plgpu.specialize(in_place=False)
def attention(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    return_lse=False,
    config=None,
    batch_invariant=False,
    deterministic=False,
    interpret=None,
):
    """``softmax(scale * q @ k.T) @ v`` for each head, accumulated in float32 (Hopper).

    q: [batch, queries, heads, head_dim]; k, v: [batch, keys, kv_heads, head_dim]; float16 or
    bfloat16, row-major; head_dim 64, 128 or 256; any lengths. Query head h uses key head
    ``h // (heads // kv_heads)``. causal: query i sees the keys 0 to i. scale: of the scores,
    ``head_dim ** -0.5`` by default. return_lse: also return the natural logarithm of the sum of
    exponentials of the scores, float32 [batch, heads, queries]. config: an
    :class:`AttentionConfig`; chosen from the shape by default. out: a preallocated result, or a
    pair of them. batch_invariant: the bits of a query's result depend on that query, its keys and
    values, the dtypes and options alone (for the same config, if one is given). deterministic: a
    call repeats bit for bit. Both always hold; the options ask later versions to keep it so.

    Returns [batch, queries, heads, head_dim] of the caller's kind of array, or (that, lse).
    TypeError, ValueError for other dtypes and shapes, NotImplementedError for other head_dims.
    """
    _check(q, k, v)
    batch_invariance("attention", batch_invariant, deterministic)  # the choice always is
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
        plgpu.sm_count(q.device),
        interpret,
    )
