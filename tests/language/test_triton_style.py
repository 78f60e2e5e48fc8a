"""Kernels in the style of Pallas' Triton backend against NumPy: accesses with masks that overhang
what they access, blocks that stay in GMEM, programs that share an output block, and the kernels of
examples/triton_kernels.py."""

import functools
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import triton_kernels as kernels

F32, F16 = np.float32, np.float16
pytestmark = [
    pytest.mark.filterwarnings("ignore:CompilerParams:UserWarning"),
    pytest.mark.covering(1, share=True),
]


def make(run, body, outs, **options):
    outs = plgpu.tree.map(lambda x: plgpu.ShapeDtypeStruct(x.shape, x.dtype), outs)
    if run.way != "cuda":
        options.setdefault("interpret", True)
    return pl.pallas_call(body, out_shape=outs, **options)


def call(run, body, outs, *args, **options):
    return run.call(make(run, body, outs, **options), *args)


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("space", [plgpu.SMEM, plgpu.GMEM], ids=str)
@pytest.mark.parametrize(
    "n, start, size", [(5, 0, 8), (100, 40, 128), (127, 126, 2), (256, 250, 64)]
)
@pytest.mark.parametrize("traced", [False, True])
def test_masked_accesses_overhang(run, rng, space, n, start, size, traced):
    """Static and traced starts, in SMEM and in GMEM: what lies outside is neither read nor
    written, the rest of the result is untouched."""

    def body(x_ref, o_ref):
        at = jnp.int32(start) + 0 * pl.program_id(0) if traced else start
        mask = start + jnp.arange(size) < n
        x = pl.load(x_ref.at[pl.ds(at, size)], mask=mask, other=-3.0)
        o_ref[...] = jnp.zeros((n,), jnp.float32)
        pl.store(o_ref.at[pl.ds(at, size)], x + jnp.sum(jnp.where(mask, 0.0, x)), mask=mask)

    x = rng.standard_normal(n, F32)
    want = np.zeros(n, F32)
    want[start:] = (x[start : start + size] - 3 * max(0, start + size - n))[: n - start]
    spec = pl.BlockSpec(memory_space=space)
    got = call(run, body, x, x, grid=(1,), in_specs=[spec], out_specs=spec)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16, np.int8], ids=lambda d: d.__name__)
def test_matrices_overhang(run, rng, dtype):
    """Both dims of a matrix, one of them at an index that is a scalar."""

    def body(x_ref, row_ref, o_ref):
        i, j = jnp.arange(8)[:, None], jnp.arange(32)[None, :]
        mask = (i + 2 < 5) & (j + 9 < 27)
        at = x_ref.at[row_ref[0], pl.ds(2, 8), pl.ds(9, 32)]
        o_ref[...] = plgpu.load(at, mask=mask, other=jnp.ones((1, 32), x_ref.dtype))

    x = rng.integers(-9, 9, (3, 5, 27)).astype(dtype)
    want = np.ones((8, 32), dtype)
    want[:3, :18] = x[1, 2:, 9:]
    got = call(run, body, want, x, np.array([1], np.int32))
    np.testing.assert_array_equal(got, want)


def test_forms_of_load_and_store(run, rng):
    """`load(ref.at[idx])` and `load(ref, idx)`, with and without mask, by arrays, of everything;
    names of pl and of plgpu, and the options of Triton."""

    def body(x_ref, o_ref):
        mask = jnp.arange(64) < 40
        a = pl.load(x_ref, mask=mask, other=1.0, cache_modifier=".cg", volatile=False)
        b = pl.load(x_ref, idx=..., mask=mask, other=1.0)
        c = pl.load(x_ref, (pl.ds(0, 64),), mask=mask, other=1.0)
        d = plgpu.load(x_ref.at[63 - jnp.arange(64)], eviction_policy="evict_last")
        e = pl.load(x_ref.at[pl.ds(3, 1)])
        pl.store(o_ref.at[0], a + b)
        pl.store(o_ref, 1, c + d)
        plgpu.store(o_ref.at[2, pl.ds(0, 64)], d, mask=mask, eviction_policy="evict_first")
        plgpu.store(o_ref.at[2], jnp.broadcast_to(e, (64,)), mask=~mask)

    x = rng.standard_normal(64, F32)
    a = np.where(np.arange(64) < 40, x, 1)
    want = np.stack([2 * a, a + x[::-1], np.where(np.arange(64) < 40, x[::-1], x[3])])
    np.testing.assert_array_equal(call(run, body, want.astype(F32), x), want.astype(F32))


def test_atomics_in_the_form_of_triton(run):
    """(ref, idx, val, mask) of plgpu, at a slice that overhangs."""

    def body(n_ref, o_ref):
        i = jnp.arange(128)
        plgpu.atomic_add(o_ref, (pl.ds(0, 128),), i + 1, mask=i < n_ref[0])
        plgpu.atomic_max(o_ref.at[pl.ds(0, 4)], jnp.full((4,), 7))

    o = np.zeros(100, np.int32)
    want = np.arange(100, dtype=np.int32) + 1
    want[90:] = 0
    want[:4] = 7
    got = call(
        run, lambda n, _, o: body(n, o), o, np.array([90], np.int32), o, input_output_aliases={1: 0}
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "access",
    [
        lambda r: r.at[pl.ds(3, 8)][...],
        lambda r: pl.load(r.at[pl.ds(3, 8)]),
        lambda r: r.at[pl.ds(3, 8)].set(jnp.zeros((8,), jnp.float32)),
        lambda r: r[pl.ds(3, 8)],
    ],
)
def test_overhang_without_mask(access):
    """Only a mask allows it; and other mistakes keep their errors."""

    def body(x_ref, o_ref):
        access(x_ref)

    x = np.zeros(8, F32)
    with pytest.raises(ValueError, match="8 elements from 3 are out of bounds for dimension 0"):
        pl.pallas_call(body, out_shape=plgpu.ShapeDtypeStruct((8,), F32), interpret=True)(x)


def test_mask_must_hold_what_lies_outside():
    """The interpreter finds a mask that is true outside of the array."""

    def body(x_ref, o_ref):
        o_ref[...] = pl.load(x_ref.at[pl.ds(0, 16)], mask=jnp.arange(16) < 9, other=0.0)

    with pytest.raises(IndexError):
        pl.pallas_call(body, out_shape=plgpu.ShapeDtypeStruct((16,), F32), interpret=True)(
            np.zeros(8, F32)
        )


# ---- indices that are a start and counts ---------------------------------------------------------


@pytest.mark.parametrize("scale, shift", [(1, 0), (1, 4), (1, 2), (2, 1), (-1, 511), (3, 0)])
def test_indices_are_views(run, rng, scale, shift):
    """Arrays of indices that count: forward, backward, in steps, by rows and columns; loads, stores
    and a mask. The text has no access by single elements where they lie side by side."""

    def body(x_ref, o_ref):
        i = pl.program_id(0) * 1536 + jnp.arange(512) * scale + shift
        x = pl.load(x_ref.at[i], mask=i < 3500, other=0.0)
        pl.store(o_ref.at[pl.program_id(0) * 512 + jnp.arange(512)], x)

    x = rng.standard_normal(6000, F32)
    i = (np.arange(3)[:, None] * 1536 + np.arange(512) * scale + shift).ravel()
    whole = pl.BlockSpec(memory_space=plgpu.GMEM)
    kernel = make(run, body, x[:1536], grid=(3,), in_specs=[whole], out_specs=whole)
    np.testing.assert_array_equal(run.call(kernel, x), np.where(i < 3500, x[i], 0))
    wide = "ld_global<f32, 4>" in kernel.lower(x).as_text("cuda")
    assert wide == (scale == 1 and shift % 4 == 0)


def test_indices_of_two_dims(run, rng):
    def body(x_ref, o_ref):
        rows = pl.program_id(0) * 4 + jnp.arange(4)
        columns = 8 + jnp.arange(16)
        o_ref[...] = x_ref[rows[:, None], 1, columns[None, :]]

    x = rng.integers(0, 99, (12, 3, 40)).astype(np.int32)
    out = pl.BlockSpec((4, 16), lambda i: (i, 0))
    spec = pl.BlockSpec(memory_space=plgpu.GMEM)
    got = call(run, body, x[:, 0, :16], x, grid=(3,), in_specs=[spec], out_specs=out)
    np.testing.assert_array_equal(got, x[:, 1, 8:24])


# ---- blocks in GMEM ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, block", [((64, 48), (16, 48)), ((37, 50), (16, 32)), ((5,), (8,))])
def test_blocks_in_gmem(run, rng, shape, block):
    """A view of the block, of the block's shape; where it may overhang, zeros are read outside and
    nothing is written there."""
    grid = tuple(pl.cdiv(n, b) for n, b in zip(shape, block))

    def body(x_ref, o_ref, n_ref):
        assert x_ref.shape == block and x_ref.memory_space is plgpu.GMEM and x_ref.dtype == F32
        x = x_ref[...]
        half = block[0] // 2
        assert x_ref.at[pl.ds(0, half)].shape == (half, *block[1:])
        o_ref.at[pl.ds(0, half)][...] = 2 * x_ref[pl.ds(0, half)]
        o_ref.at[pl.ds(half, half)][...] = 3 * x[half:]
        n_ref[...] = jnp.full((1,) * len(grid), jnp.sum((x != 0).astype(jnp.int32)))

    x = rng.integers(1, 9, shape).astype(F32)
    spec = pl.BlockSpec(block, lambda *i: i, memory_space=plgpu.GMEM)
    got, n = call(
        run,
        body,
        (x, np.zeros(grid, np.int32)),
        x,
        grid=grid,
        in_specs=[spec],
        out_specs=(spec, pl.BlockSpec((1,) * len(grid), lambda *i: i)),
    )
    scale = np.where(np.arange(shape[0]) % block[0] < block[0] // 2, 2, 3).astype(F32)
    np.testing.assert_array_equal(got, x * scale.reshape((-1, *[1] * (len(shape) - 1))))
    assert n.sum() == x.size


def test_scalars_rows_and_arrays_of_blocks_that_overhang(run, rng):
    """Dims that are squeezed, scalars, arrays of indices, swap, masks, atomics; indices that come
    from memory are not known to lie inside."""

    def body(where_ref, x_ref, o_ref):
        i = jnp.arange(8)
        row = x_ref[3]
        twice = x_ref[jnp.arange(4)[:, None] * 0 + 1, i[None, :]]
        some = pl.load(x_ref.at[2], mask=i < 6, other=9.0)
        o_ref[0] = row + x_ref[0, 1]
        o_ref[1] = twice[0] + some
        before = o_ref.swap(row, 0)
        pl.store(o_ref.at[2, pl.ds(4, 4)], before[4:], mask=i[:4] < 3)

    x = rng.integers(1, 99, (3, 6, 20)).astype(F32)
    block = np.zeros((4, 8), F32)
    block[:2, :4] = x[1, 4:, 16:]
    want = np.zeros((3, 8), F32)
    want[1] = block[1] + np.where(np.arange(8) < 6, block[2], 9)
    want[0] = block[3]
    want[2, 4:7] = (block[3] + block[0, 1])[4:7]
    spec = pl.BlockSpec((None, 4, 8), lambda i: (1, 1, 2), memory_space=plgpu.GMEM)
    out = pl.BlockSpec((3, 8), lambda i: (0, 0))
    zero = np.zeros((3, 8), F32)

    def with_zeros(where_ref, x_ref, z_ref, o_ref):
        o_ref[...] = z_ref[...]
        body(where_ref, x_ref, o_ref)

    whole = pl.no_block_spec
    got = call(
        run,
        with_zeros,
        zero,
        np.array([1], np.int32),
        x,
        zero,
        grid=(1,),
        in_specs=[whole, spec, whole],
        out_specs=out,
    )
    np.testing.assert_array_equal(got, want)


def test_blocks_wholly_outside(run, rng):
    """Zeros are read, nothing is written, on either side of the array."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = rng.standard_normal(64, F32)
    spec = pl.BlockSpec((16,), lambda i: (i * 3 - 1,), memory_space=plgpu.GMEM)
    plain = pl.BlockSpec((16,), lambda i: (i,))
    got = call(run, body, np.zeros(64, F32), x, grid=(4,), in_specs=[spec], out_specs=plain)
    want = np.ones(64, F32)
    want[16:32] += x[32:48]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("space", [None, plgpu.GMEM], ids=str)
def test_interpreter_tells_of_blocks_outside(space):
    """With map, index and line; not where a block only overhangs, and not where unchecked reads are
    asked for."""

    def use(index_map, interpret=True):
        spec = pl.BlockSpec((16,), index_map, memory_space=space)
        kernel = pl.pallas_call(
            lambda x, o: o.set(x[...]),
            out_shape=plgpu.ShapeDtypeStruct((64,), F32),
            grid=(4,),
            in_specs=[spec],
            out_specs=pl.BlockSpec((16,), lambda i: (i,)),
            interpret=interpret,
        )
        return kernel(np.ones(40, F32))

    with pytest.warns(UserWarning, match=r"in_specs\[0\] \(.*\.py:\d+\) gives block \(3,\) at"):
        got = use(lambda i: (i,))
    np.testing.assert_array_equal(got, np.arange(64) < 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(lambda i: (i % 3,))
        use(lambda i: (i,), plgpu.InterpretParams(out_of_bounds_reads="uninitialized"))


def test_large_blocks_stay_in_gmem(run, rng):
    """Whole arrays that do not fit SMEM are accessed in place, which is reported."""

    def body(x_ref, w_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds(i * 4, 4)] = x_ref[pl.ds(i * 4, 4)] * w_ref[...]

    x, w = rng.standard_normal((64, 1024), F32), rng.standard_normal((1, 1024), F32)
    with pytest.warns(UserWarning, match=r"in_specs\[0\] \(262144 bytes\).* do not fit"):
        got = call(
            run,
            lambda x, w, o: body(x, w, o),
            x,
            x,
            np.broadcast_to(w, (4, 1024)).copy(),
            grid=(16,),
            in_specs=pl.no_block_spec,
        )
    np.testing.assert_array_equal(got, x * w)


@pytest.mark.parametrize("masked", [False, True])
def test_programs_that_share_an_output_block(run, rng, masked):
    """Each stores a part of one block: nothing but that is written."""

    def body(x_ref, o_ref):
        part = pl.ds(pl.program_id(0) * 32, 32)
        if masked:
            pl.store(o_ref.at[part], x_ref[...], mask=jnp.arange(32) % 2 == 0)
            pl.store(o_ref.at[part], -x_ref[...], mask=jnp.arange(32) % 2 == 1)
        else:
            o_ref[part] = x_ref[...]

    x = rng.standard_normal(256, F32)
    got = call(
        run,
        body,
        x,
        x,
        grid=(8,),
        in_specs=[pl.BlockSpec((32,), lambda i: (i,))],
        out_specs=pl.BlockSpec((256,), lambda i: (0,)),
    )
    np.testing.assert_array_equal(got, np.where(np.arange(256) % 2, -x, x) if masked else x)


def test_shared_parts_of_a_staged_block():
    """A body that needs the block in SMEM cannot share it."""

    def body(x_ref, o_ref):
        o_ref[pl.ds(pl.program_id(0) * 32, 32)] = x_ref[...]
        plgpu.copy_smem_to_gmem(o_ref, x_ref.at[...])

    spec = pl.BlockSpec((256,), lambda i: (0,), memory_space=plgpu.SMEM)
    with pytest.raises(ValueError, match=r"out_specs\[0\]: several programs .*parts of one block"):
        pl.pallas_call(
            lambda x, o: o.__setitem__(pl.ds(pl.program_id(0) * 32, 32), x[...]),
            out_shape=plgpu.ShapeDtypeStruct((256,), F32),
            grid=(8,),
            in_specs=[pl.BlockSpec((32,), lambda i: (i,))],
            out_specs=spec,
            interpret=True,
        )(np.zeros(256, F32))


def test_parameters_of_triton():
    """Accepted, without effect, with one warning."""
    with pytest.warns(UserWarning, match="num_warps and num_stages") as seen:
        p = plgpu.CompilerParams(num_warps=8, num_stages=3, approx_math=True)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert p == plgpu.CompilerParams(approx_math=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plgpu.CompilerParams(num_stages=None) == plgpu.CompilerParams()


# ---- kernels -------------------------------------------------------------------------------------


def interpreted(run, make_kernel, *args):
    """The kernel that a function of triton_kernels makes, for a way of running."""
    old = pl.pallas_call
    if run.way != "cuda":
        kernels.pl.pallas_call = functools.partial(old, interpret=True)
    try:
        return make_kernel(*args)
    finally:
        kernels.pl.pallas_call = old


def close(got, want, bound):
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("n, dtype", [(200, F32), (1024, F16), (1000, F32)])
def test_softmax(run, rng, n, dtype):
    x = rng.standard_normal((3, n), F32).astype(dtype)
    e = np.exp(x.astype(F32) - x.max(1, keepdims=True).astype(F32))
    got = run.call(interpreted(run, kernels.softmax, 3, n, dtype), x)
    close(got, e / e.sum(1, keepdims=True), 1e-6 if dtype is F32 else 1e-3)


@pytest.mark.parametrize("n, block", [(200, None), (1000, 128), (512, 512)])
def test_norms(run, rng, n, block):
    x, w, b = (rng.standard_normal(s, F32) for s in ((3, n), n, n))
    make_kernel = functools.partial(kernels.layer_norm, block=block)
    got, mean, rstd = run.call(interpreted(run, make_kernel, 3, n, F32), x, w, b)
    want = 1 / np.sqrt(x.var(1) + 1e-5)
    close(mean, x.mean(1), 1e-5)
    close(rstd, want, 1e-5)
    close(got, (x - x.mean(1, keepdims=True)) * want[:, None] * w + b, 1e-5)
    make_kernel = functools.partial(kernels.rms_norm, block=block)
    got = run.call(interpreted(run, make_kernel, 3, n, F32), x, w)
    close(got, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w, 1e-5)


def attention(q, k, v, causal):
    """o, base-2 logsumexp, probabilities"""
    q, k, v = (x.astype(F32) for x in (q, k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -1e30)
    e = np.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    lse = (np.log2(total) + s.max(-1, keepdims=True) * np.log2(np.e))[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", e / total, v), lse, e / total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, bq, bk", [(64, 64, 64), (48, 64, 32), (128, 64, 128), (128, 128, 128)])
def test_mha(run, rng, d, bq, bk, causal):
    """Blocks of keys come by engines, ahead of time; d = 48 is padded to 64 with a mask. Blocks
    of 128 queries are too much for the registers of one warpgroup."""
    q, k, v = (rng.standard_normal((1, 256, 1, d), F32).astype(F16) for _ in range(3))
    kernel = interpreted(run, kernels.mha, 1, 256, 1, d, F16, causal, bq, bk)
    got, lse = run.call(kernel, q, k, v)
    want, want_lse, _ = attention(q, k, v, causal)
    close(got, want, 2e-3)
    close(lse, want_lse, 1e-3)
    low = kernel.lower(q, k, v)
    assert low.resources()["spill_bytes"] == 0
    if d != 48:
        assert low.as_text("cuda").count(" tma_load_") == 6  # defined; q; first and next of k and v


@pytest.mark.parametrize("causal", [False, True])
def test_mha_backward(run, rng, causal):
    q, k, v, do = (rng.standard_normal((1, 128, 2, 64), F32).astype(F16) for _ in range(4))
    o, lse, p = attention(q, k, v, causal)
    delta = np.einsum("bqhd,bqhd->bhq", o, do.astype(F32))
    ds = p * (np.einsum("bqhd,bkhd->bhqk", do.astype(F32), v.astype(F32)) - delta[..., None]) / 8
    kernel = interpreted(run, kernels.mha_backward, 1, 128, 2, 64, F16, causal)
    dq, dk, dv = run.call(kernel, q, k, v, do, lse.astype(F32), delta.astype(F32), spills=4096)
    close(dq, np.einsum("bhqk,bkhd->bqhd", ds, k.astype(F32)), 3e-3)
    close(dk, np.einsum("bhqk,bqhd->bkhd", ds, q.astype(F32)), 3e-3)
    close(dv, np.einsum("bhqk,bqhd->bkhd", p, do.astype(F32)), 3e-3)


def test_decode_and_paged(run, rng):
    b, seq, h, kv, d, page = 2, 256, 8, 2, 64, 16
    q = rng.standard_normal((b, h, d), F32).astype(F16)
    k, v = (rng.standard_normal((b, seq, kv, d), F32).astype(F16) for _ in range(2))
    lengths = np.array([201, 70], np.int32)
    s = np.einsum("bhd,bkhd->bhk", q.astype(F32), np.repeat(k, h // kv, 2).astype(F32)) / 8
    s = np.where(np.arange(seq) < lengths[:, None, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want = np.einsum("bhk,bkhd->bhd", p, np.repeat(v, h // kv, 2).astype(F32))
    kernel = interpreted(run, kernels.decode, b, seq, h, kv, d, 2)
    close(kernels.combine(np, *run.call(kernel, q, k, v, lengths, spills=4096)), want, 2e-3)
    table = rng.permutation(2 * b * seq // page)[: b * seq // page].reshape(b, -1)
    cache = np.zeros((2, kv, 2 * b * seq // page, page, d), F16)
    for x, of in zip(cache, (k, v)):
        pages = of.reshape(b, seq // page, page, kv, d).transpose(3, 0, 1, 2, 4)
        x[:, table] = pages
    args = (b, seq // page, cache.shape[2], page, h, kv, d, 2)
    kernel = interpreted(run, kernels.paged, *args)
    parts = run.call(kernel, q, *cache, table.astype(np.int32), lengths, spills=4096)
    close(kernels.combine(np, *parts), want, 2e-3)


# ---- products in loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_copies_ahead(run, rng, steps, transposed):
    """A loop of products whose number of steps is only known at run time, entered twice: each copy
    is waited for once. Another array is summed beside the product."""

    def body(n_ref, a_ref, b_ref, o_ref):
        a = a_ref[...]

        def step(j, acc):
            b = b_ref[j]
            return acc * 0.5 + jnp.dot(a, b.T if transposed else b, preferred_element_type=F32)

        for k in range(2):
            n = n_ref[k]
            o_ref[k] = lax.fori_loop(0, n, step, jnp.full((64, 32), k + 1.0, jnp.float32))

    a = rng.standard_normal((64, 48), F32).astype(F16)
    b = rng.standard_normal((5, 48, 32), F32).astype(F16)
    n = np.array([steps, 3], np.int32)
    want = np.zeros((2, 64, 32), F32)
    for k in range(2):
        want[k] = k + 1
        for j in range(n[k]):
            want[k] = want[k] * 0.5 + a.astype(F32) @ b[j].astype(F32)
    given = np.ascontiguousarray(b.transpose(0, 2, 1)) if transposed else b
    got = run(body, want, n, a, given)
    np.testing.assert_allclose(got, want, atol=2e-2)


def test_operand_that_stays(run, rng):
    """What does not change in the loop is stored once, in front of it."""

    def body(a_ref, b_ref, o_ref):
        b = b_ref[...]

        def step(j, acc):
            return acc + jnp.dot(a_ref[j], b, preferred_element_type=F32)

        o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros((64, 64), jnp.float32))

    a = rng.standard_normal((3, 64, 64), F32).astype(F16)
    b = rng.standard_normal((64, 64), F32).astype(F16)
    want = a.astype(F32).sum(0) @ b.astype(F32)
    np.testing.assert_allclose(run(body, want, a, b), want, atol=0.05)


def test_what_the_loop_writes_is_not_read_ahead(run, rng):
    """An operand that an earlier step stores: the copy must not come before the store."""

    def body(b_ref, o_ref, t_ref):
        t_ref[0] = b_ref[...]

        def step(j, acc):
            b = t_ref[j]
            t_ref[j + 1] = b * jnp.float16(0.5)
            return acc + jnp.dot(b, b_ref[...], preferred_element_type=F32)

        o_ref[...] = lax.fori_loop(0, 3, step, jnp.zeros((64, 64), jnp.float32))

    b = rng.standard_normal((64, 64), F32).astype(F16)
    t = np.stack([b * F16(0.5**j) for j in range(4)])
    want = sum(x.astype(F32) for x in t[:3]) @ b.astype(F32)
    got, stored = run(body, (want, t), b)
    np.testing.assert_allclose(got, want, atol=0.05)
    np.testing.assert_array_equal(stored, t)
