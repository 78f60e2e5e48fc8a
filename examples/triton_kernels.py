"""Kernels in the style of Pallas' Triton backend: softmax, norms, attention forward and backward,
decoding over a contiguous and over a paged cache.

Programs see blocks of their arrays, load them with masks into registers, loop, and store. Nothing
here mentions warps, shared memory or barriers. Under JAX the same text runs with other imports:
`from jax import ShapeDtypeStruct, lax, numpy as jnp, vmap`, `from jax.experimental import pallas as
pl` and `from jax.experimental.pallas import triton as plgpu`. Each function makes a kernel for its
shapes; `python examples/triton_kernels.py` checks them against NumPy on small arrays."""

import functools
import math

import pallas_mgpu as plgpu
from pallas_mgpu import ShapeDtypeStruct, lax, pl, vmap
from pallas_mgpu import numpy as jnp

F32 = jnp.float32
LOG2E = math.log2(math.e)
FAR = -1e30  # of masked scores: exp2 of it is 0, and no infinity is subtracted from another


# ---- rows ----------------------------------------------------------------------------------------


def softmax_kernel(x_ref, o_ref, *, block):
    n = x_ref.shape[0]
    mask = jnp.arange(block) < n
    row = plgpu.load(x_ref.at[pl.ds(0, block)], mask=mask, other=-float("inf")).astype(F32)
    top = jnp.max(row, axis=0)
    e = jnp.exp(row - top)
    out = e / jnp.sum(e, axis=0)
    plgpu.store(o_ref.at[pl.ds(0, block)], out.astype(o_ref.dtype), mask=mask)


def softmax(rows, n, dtype, num_warps=4):
    """(rows, n) -> (rows, n): one program a row, all of it in registers."""
    f = pl.pallas_call(
        functools.partial(softmax_kernel, block=pl.next_power_of_2(n)),
        out_shape=ShapeDtypeStruct((n,), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        name="softmax",
    )
    return vmap(f)


def columns(i, block, n):
    col = i * block + jnp.arange(block)
    return col, col < n


def layer_norm_kernel(x_ref, weight_ref, bias_ref, o_ref, mean_ref, rstd_ref, *, eps, block):
    n = x_ref.shape[0]
    steps = pl.cdiv(n, block)

    def add(i, acc):
        col, mask = columns(i, block, n)
        return acc + plgpu.load(x_ref.at[col], mask=mask, other=0.0).astype(F32)

    mean = jnp.sum(lax.fori_loop(0, steps, add, jnp.zeros((block,), F32)), axis=0) / n

    def add_square(i, acc):
        col, mask = columns(i, block, n)
        x = plgpu.load(x_ref.at[col], mask=mask, other=0.0).astype(F32)
        x = jnp.where(mask, x - mean, 0.0)
        return acc + x * x

    var = jnp.sum(lax.fori_loop(0, steps, add_square, jnp.zeros((block,), F32)), axis=0) / n
    rstd = 1 / jnp.sqrt(var + eps)
    mean_ref[...] = mean
    rstd_ref[...] = rstd

    def scale(i, _):
        col, mask = columns(i, block, n)
        weight = plgpu.load(weight_ref.at[col], mask=mask, other=0.0).astype(F32)
        bias = plgpu.load(bias_ref.at[col], mask=mask, other=0.0).astype(F32)
        x = plgpu.load(x_ref.at[col], mask=mask, other=0.0).astype(F32)
        out = (x - mean) * rstd * weight + bias
        plgpu.store(o_ref.at[col], out.astype(o_ref.dtype), mask=mask)

    lax.fori_loop(0, steps, scale, None)


def row_block(n, itemsize):
    return min(max(min(65536 // itemsize, pl.next_power_of_2(n)), 128), 4096)


def layer_norm(rows, n, dtype, eps=1e-5, block=None, num_warps=8):
    """x (rows, n), weight (n,), bias (n,) -> out (rows, n), mean (rows,), 1/deviation (rows,)."""
    f = pl.pallas_call(
        functools.partial(layer_norm_kernel, eps=eps, block=block or row_block(n, 4)),
        out_shape=[
            ShapeDtypeStruct((n,), dtype),
            ShapeDtypeStruct((), F32),
            ShapeDtypeStruct((), F32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
        name="layer_norm",
    )
    return vmap(f, in_axes=(0, None, None))


def rms_norm_kernel(x_ref, weight_ref, o_ref, *, eps, block):
    n = x_ref.shape[0]
    steps = pl.cdiv(n, block)

    def add_square(i, acc):
        col, mask = columns(i, block, n)
        x = plgpu.load(x_ref.at[col], mask=mask, other=0.0).astype(F32)
        return acc + x * x

    square = jnp.sum(lax.fori_loop(0, steps, add_square, jnp.zeros((block,), F32)), axis=0)
    scale = 1 / jnp.sqrt(square / n + eps)

    def write(i, _):
        col, mask = columns(i, block, n)
        weight = plgpu.load(weight_ref.at[col], mask=mask, other=0.0).astype(F32)
        x = plgpu.load(x_ref.at[col], mask=mask, other=0.0).astype(F32)
        plgpu.store(o_ref.at[col], (x * scale * weight).astype(o_ref.dtype), mask=mask)

    lax.fori_loop(0, steps, write, None)


def rms_norm(rows, n, dtype, eps=1e-6, block=None, num_warps=8):
    """x (rows, n), weight (n,) -> (rows, n). Blocks are given, not mapped."""
    return pl.pallas_call(
        functools.partial(rms_norm_kernel, eps=eps, block=block or row_block(n, 4)),
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, n), lambda i: (i, 0)), pl.BlockSpec((n,), lambda i: (0,))],
        out_specs=pl.BlockSpec((None, n), lambda i: (i, 0)),
        out_shape=ShapeDtypeStruct((rows, n), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=3),
        name="rms_norm",
    )


# ---- attention -----------------------------------------------------------------------------------


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


def causal_mask(q_start, k_start, bq, bk):
    rows = q_start + lax.broadcasted_iota(jnp.int32, (bq, bk), 0)
    return rows >= k_start + lax.broadcasted_iota(jnp.int32, (bq, bk), 1)


def mha_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, scale, causal, bq, bk, d):
    """One block of queries of one head; o and the base-2 logarithm of the sums."""
    i, seq, wide = pl.program_id(0), k_ref.shape[0], q_ref.shape[-1]
    head = (jnp.arange(wide) < d)[None, :]
    q = plgpu.load(q_ref, mask=head, other=0.0)

    def step(j, carry):
        o, top, total = carry
        at = pl.ds(j * bk, bk)
        s = dot(q, plgpu.load(k_ref.at[at, :], mask=head, other=0.0).T) * (scale * LOG2E)
        if causal:
            s = jnp.where(causal_mask(i * bq, j * bk, bq, bk), s, FAR)
        higher = jnp.maximum(top, jnp.max(s, axis=-1))
        shrink = jnp.exp2(top - higher)
        p = jnp.exp2(s - higher[:, None])
        v = plgpu.load(v_ref.at[at, :], mask=head, other=0.0)
        o = o * shrink[:, None] + dot(p.astype(v.dtype), v)
        return o, higher, total * shrink + jnp.sum(p, axis=-1)

    steps = pl.cdiv((i + 1) * bq, bk) if causal else seq // bk
    start = jnp.zeros((bq, wide), F32), jnp.full((bq,), FAR, F32), jnp.zeros((bq,), F32)
    o, top, total = lax.fori_loop(0, steps, step, start)
    lse_ref[...] = top + jnp.log2(total)
    plgpu.store(o_ref, (o / total[:, None]).astype(o_ref.dtype), mask=head)


def mha(b, seq, h, d, dtype, causal=False, bq=64, bk=64, num_warps=4, num_stages=2):
    """q, k, v (batch, seq, heads, d) -> o like q, logsumexp (batch, heads, seq)."""
    wide = pl.next_power_of_2(d)
    rows = pl.BlockSpec((None, bq, None, wide), lambda i, b, h: (b, i, h, 0))
    whole = pl.BlockSpec((None, seq, None, wide), lambda i, b, h: (b, 0, h, 0))
    return pl.pallas_call(
        functools.partial(mha_kernel, scale=1 / math.sqrt(d), causal=causal, bq=bq, bk=bk, d=d),
        grid=(seq // bq, b, h),
        in_specs=[rows, whole, whole],
        out_specs=[rows, pl.BlockSpec((None, None, bq), lambda i, b, h: (b, h, i))],
        out_shape=[ShapeDtypeStruct((b, seq, h, d), dtype), ShapeDtypeStruct((b, h, seq), F32)],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="mha",
    )


def mha_backward_kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    *,
    scale,
    causal,
    bq,
    bk,
):
    """Program i: dk and dv of its block of keys, then dq of its block of queries."""
    i, seq, d = pl.program_id(2), q_ref.shape[0], q_ref.shape[-1]
    mine = pl.ds(i * bk, bk)
    k, v = k_ref[mine, :], v_ref[mine, :]

    def scores(q, k, q_start, k_start, lse):
        s = dot(q, k.T) * (scale * LOG2E)
        if causal:
            s = jnp.where(causal_mask(q_start, k_start, s.shape[0], s.shape[1]), s, FAR)
        return jnp.exp2(s - lse[:, None])

    def keys(j, carry):
        dk, dv = carry
        at = pl.ds(j * bq, bq)
        q, do = q_ref[at, :], do_ref[at, :]
        p = scores(q, k, j * bq, i * bk, lse_ref[at])
        dv = dv + dot(p.astype(do.dtype).T, do)
        ds = p * (dot(do, v.T) - delta_ref[at][:, None]) * scale
        return dk + dot(ds.astype(q.dtype).T, q), dv

    zeros = jnp.zeros((bk, d), F32)
    first = lax.div(i * bk, bq) if causal else 0
    dk, dv = lax.fori_loop(first, seq // bq, keys, (zeros, zeros))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)

    mine = pl.ds(i * bq, bq)
    q, do, lse, delta = q_ref[mine, :], do_ref[mine, :], lse_ref[mine], delta_ref[mine]

    def queries(j, dq):
        at = pl.ds(j * bk, bk)
        k, v = k_ref[at, :], v_ref[at, :]
        p = scores(q, k, i * bq, j * bk, lse)
        ds = p * (dot(do, v.T) - delta[:, None]) * scale
        return dq + dot(ds.astype(k.dtype), k)

    last = pl.cdiv((i + 1) * bq, bk) if causal else seq // bk
    dq = lax.fori_loop(0, last, queries, jnp.zeros((bq, d), F32))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def mha_backward(b, seq, h, d, dtype, causal=False, bq=64, bk=64, num_warps=4, num_stages=2):
    """q, k, v, do (batch, seq, heads, d), logsumexp, delta (batch, heads, seq) -> dq, dk, dv.
    delta: sums of o * do over d."""
    whole = pl.BlockSpec((None, seq, None, d), lambda b, h, i: (b, 0, h, 0))
    vector = pl.BlockSpec((None, None, seq), lambda b, h, i: (b, h, 0))
    row = pl.BlockSpec((None, bq, None, d), lambda b, h, i: (b, i, h, 0))
    return pl.pallas_call(
        functools.partial(mha_backward_kernel, scale=1 / math.sqrt(d), causal=causal, bq=bq, bk=bk),
        grid=(b, h, seq // bq),
        in_specs=[whole, whole, whole, whole, vector, vector],
        out_specs=[row, row, row],
        out_shape=[ShapeDtypeStruct((b, seq, h, d), dtype)] * 3,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="mha_backward",
    )


# ---- decoding ------------------------------------------------------------------------------------


def partial_attention(q, load_k, load_v, steps, valid, bk, d, scale):
    """Online softmax over ``steps`` blocks of keys: unscaled sums, tops, totals."""

    def step(j, carry):
        o, top, total = carry
        s = dot(q, load_k(j).T) * (scale * LOG2E)
        inside = j * bk + lax.broadcasted_iota(jnp.int32, s.shape, 1) < valid
        s = jnp.where(inside, s, FAR)
        higher = jnp.maximum(top, jnp.max(s, axis=-1))
        shrink = jnp.exp2(top - higher)
        p = jnp.where(inside, jnp.exp2(s - higher[:, None]), 0.0)
        v = load_v(j)
        o = o * shrink[:, None] + dot(p.astype(v.dtype), v)
        return o, higher, total * shrink + jnp.sum(p, axis=-1)

    n = q.shape[0]
    start = jnp.zeros((n, d), F32), jnp.full((n,), FAR, F32), jnp.zeros((n,), F32)
    return lax.fori_loop(0, steps, step, start)


def decode_kernel(q_ref, k_ref, v_ref, length_ref, o_ref, top_ref, total_ref, *, heads, bk, scale):
    """The queries of one group of heads against one part of the keys."""
    part, d, bh = k_ref.shape[0], k_ref.shape[1], pl.next_power_of_2(max(heads, 16))
    row = jnp.arange(bh) < heads
    q = plgpu.load(q_ref.at[pl.ds(0, bh), :], mask=row[:, None], other=0.0)
    valid = jnp.clip(length_ref[...] - pl.program_id(2) * part, 0, part)
    o, top, total = partial_attention(
        q,
        lambda j: k_ref[pl.ds(j * bk, bk), :],
        lambda j: v_ref[pl.ds(j * bk, bk), :],
        pl.cdiv(valid, bk),
        valid,
        bk,
        d,
        scale,
    )
    plgpu.store(o_ref.at[pl.ds(0, bh), :], o, mask=row[:, None])
    plgpu.store(top_ref.at[pl.ds(0, bh)], top, mask=row)
    plgpu.store(total_ref.at[pl.ds(0, bh)], total, mask=row)


def decode(b, seq, h, kv, d, splits, bk=64, num_warps=4, num_stages=2):
    """q (batch, heads, d), k, v (batch, seq, kv heads, d), lengths (batch,) -> of each of the
    ``splits`` parts of the keys: sums (batch, splits, heads, d), tops and totals (batch, splits,
    heads), for :func:`combine`."""
    group = h // kv
    part = seq // splits
    keys = pl.BlockSpec((None, part, None, d), lambda b, g, s: (b, s, g, 0))
    sums = pl.BlockSpec((None, None, group), lambda b, g, s: (b, s, g))
    return pl.pallas_call(
        functools.partial(decode_kernel, heads=group, bk=bk, scale=1 / math.sqrt(d)),
        grid=(b, kv, splits),
        in_specs=[
            pl.BlockSpec((None, group, d), lambda b, g, s: (b, g, 0)),
            keys,
            keys,
            pl.BlockSpec((None,), lambda b, g, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, group, d), lambda b, g, s: (b, s, g, 0)),
            sums,
            sums,
        ],
        out_shape=[
            ShapeDtypeStruct((b, splits, h, d), F32),
            ShapeDtypeStruct((b, splits, h), F32),
            ShapeDtypeStruct((b, splits, h), F32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="decode",
    )


def paged_kernel(
    q_ref, k_ref, v_ref, table_ref, length_ref, o_ref, top_ref, total_ref, *, heads, page, bp, scale
):
    """As `decode_kernel`, with keys in pages that a table names."""
    pages, d, bh = table_ref.shape[0], k_ref.shape[-1], pl.next_power_of_2(max(heads, 16))
    row = jnp.arange(bh) < heads
    q = plgpu.load(q_ref.at[pl.ds(0, bh), :], mask=row[:, None], other=0.0)
    valid = jnp.clip(length_ref[...] - pl.program_id(2) * pages * page, 0, pages * page)
    bk = bp * page

    def gather(ref, j):
        which = plgpu.load(table_ref.at[pl.ds(j * bp, bp)])
        return ref[which].reshape(bk, d)

    o, top, total = partial_attention(
        q,
        lambda j: gather(k_ref, j),
        lambda j: gather(v_ref, j),
        pl.cdiv(valid, bk),
        valid,
        bk,
        d,
        scale,
    )
    plgpu.store(o_ref.at[pl.ds(0, bh), :], o, mask=row[:, None])
    plgpu.store(top_ref.at[pl.ds(0, bh)], top, mask=row)
    plgpu.store(total_ref.at[pl.ds(0, bh)], total, mask=row)


def paged(b, pages, n_pages, page, h, kv, d, splits, bp=4, num_warps=4, num_stages=2):
    """q (batch, heads, d), k, v (kv heads, n_pages, page, d), page table (batch, pages), lengths
    (batch,) -> as :func:`decode`."""
    group = h // kv
    part = pages // splits
    cache = pl.BlockSpec((None, n_pages, page, d), lambda b, g, s: (g, 0, 0, 0))
    sums = pl.BlockSpec((None, None, group), lambda b, g, s: (b, s, g))
    return pl.pallas_call(
        functools.partial(paged_kernel, heads=group, page=page, bp=bp, scale=1 / math.sqrt(d)),
        grid=(b, kv, splits),
        in_specs=[
            pl.BlockSpec((None, group, d), lambda b, g, s: (b, g, 0)),
            cache,
            cache,
            pl.BlockSpec((None, part), lambda b, g, s: (b, s)),
            pl.BlockSpec((None,), lambda b, g, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, group, d), lambda b, g, s: (b, s, g, 0)),
            sums,
            sums,
        ],
        out_shape=[
            ShapeDtypeStruct((b, splits, h, d), F32),
            ShapeDtypeStruct((b, splits, h), F32),
            ShapeDtypeStruct((b, splits, h), F32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="paged",
    )


def combine(xp, o, top, total):
    """The parts of :func:`decode` as one result, by the array module ``xp``."""
    weight = xp.exp2(top - top.max(axis=1, keepdims=True))
    return (o * weight[..., None]).sum(axis=1) / (total * weight).sum(axis=1)[..., None]


def main():
    import numpy as np

    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((8, 1000), np.float32), rng.standard_normal(1000, np.float32)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    got = softmax(8, 1000, x.dtype)(x)
    np.testing.assert_allclose(got, e / e.sum(axis=1, keepdims=True), rtol=1e-5)
    scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(rms_norm(8, 1000, x.dtype)(x, weight), x * scale * weight, rtol=1e-4)

    q, k, v = (
        rng.standard_normal((1, 128, 2, 64), np.float32).astype(np.float16) for _ in range(3)
    )
    got, _ = mha(1, 128, 2, 64, q.dtype)(q, k, v)
    s = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float32), k.astype(np.float32)) / 8
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", p, v.astype(np.float32))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-3)
    print("ok")


if __name__ == "__main__":
    main()
