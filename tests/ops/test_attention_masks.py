"""Masks that are functions, block masks, and keys that are divided among blocks."""

import functools

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import AttentionConfig, _open_rows, attention, block_mask

INTERPRET = [plgpu.InterpretParams(detect_races=True, seeds=2), "emulate"]


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    plgpu.clear_caches()
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 6)
    yield
    plgpu.clear_caches()


def expected(q, k, v, keep, bias=0.0):
    """Result and logarithm in float64; keep: [batch, heads, queries, keys]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + bias
    e = np.where(keep, np.exp(s), 0)
    total = e.sum(3)
    out = np.einsum("bhqk,bkhd->bqhd", e / np.where(total == 0, 1, total)[..., None], v)
    with np.errstate(divide="ignore"):
        return out, np.log(total)


def prefix(b, h, i, j):
    return (j <= i) | (j < 60)


def strided(b, h, i, j):
    return ((i - j) % (h + 2) == 0) & (j <= i + b * 50) & (i < 250)


def same_document(b, h, i, j, documents):
    return (documents[i] == documents[j]) & (j <= i)


def ancestors(b, h, i, j, spans):
    return (spans[j, 0] <= spans[i, 0]) & (spans[i, 0] < spans[j, 1])


def needs_an_int(b, h, i, j, documents):
    return (documents[i] == documents[j]) & (j < jnp.arange(documents.shape[0]).max())


def nothing(b, h, i, j):
    return (j > i + 200) & (i > j)


def everything(b, h, i, j):
    return (i == i) | (j == j)


def pairs(mask, batch, heads, n, m, *data):
    b, h, i, j = np.ogrid[:batch, :heads, :n, :m]
    return np.broadcast_to(mask(b, h, i, j, *data), (batch, heads, n, m))


def blocks_of(keep):
    """The rows of a block mask: of a tile with these pairs, up to 128 rows."""
    m = keep.shape[1]
    found = []
    for c in range(-(-m // 128)):
        part = keep[:, c * 128 : c * 128 + 128]
        if part.any():
            found.append(2 * c + (not part.all() or (c + 1) * 128 > m))
    return found or [1]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "mask, n, m, dim",
    [
        (prefix, 300, 300, 64),
        (strided, 260, 300, 128),
        (same_document, 300, 300, 96),
        (nothing, 130, 140, 64),
        (everything, 128, 384, 64),
        (prefix, 1, 140, 64),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_masks(rng, mask, n, m, dim, interpret):
    batch, heads, data = 2, 4, ()
    if interpret == "emulate":
        n, m, batch = min(n, 140), min(m, 260), 1
    q = rng.standard_normal((batch, n, heads, dim)).astype(bfloat16)
    k, v = rng.standard_normal((2, batch, m, 2, dim)).astype(bfloat16)
    how = {"mask": mask, "interpret": interpret}
    if mask is same_document:
        data = (np.sort(rng.integers(0, 4, max(n, m))).astype(np.int32),)
        how["mask_data"] = data[0]
    keep = pairs(mask, batch, heads, n, m, *data)
    want, want_lse = expected(q, k, v, keep)
    kinds = mask is strided
    blocks = block_mask(q, k, by_batch=kinds, by_head=kinds, **how)
    assert blocks.shape[:2] == ((batch, heads) if kinds else (1, 1))
    for b in range(blocks.shape[0]):
        for h in range(blocks.shape[1]):
            for t, row in enumerate(blocks[b, h]):
                tile = keep[b, h, t * 128 : t * 128 + 128]
                assert list(row[1 : 1 + row[0]]) == blocks_of(tile)
    for more in ({}, {"block_mask": blocks}):
        o, lse = attention(q, k, v, return_lse=True, **how, **more)
        np.testing.assert_allclose(np.asarray(o).astype(np.float64), want, atol=2e-2)
        np.testing.assert_allclose(lse, want_lse, atol=1e-3)


@pytest.mark.parametrize(
    "mask", [prefix, strided, same_document, nothing], ids=lambda f: f.__name__
)
def test_one_program_of_all_sizes(rng, monkeypatch, mask):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    for n, m, dim in ((300, 300, 64), (131, 190, 128)):
        test_masks(rng, mask, n, m, dim, INTERPRET[0])


@pytest.mark.parametrize("mask", [same_document, ancestors, needs_an_int], ids=lambda f: f.__name__)
def test_random_sizes_and_data(rng, monkeypatch, mask):
    """Few programs, unless the mask computes with the number of its data."""
    monkeypatch.setattr(_open_rows, "STATIC", 1)
    made, blocks_made = set(), set()
    for n, m in rng.integers(1, 400, (12, 2)):
        n, m = int(n), int(m)
        q = rng.standard_normal((1, n, 2, 64)).astype(np.float16)
        k, v = rng.standard_normal((2, 1, m, 1, 64)).astype(np.float16)
        data = np.sort(rng.integers(0, 3, max(n, m))).astype(np.int32)
        data = np.stack([data, data + 2], 1) if mask is ancestors else data
        how = {"mask": mask, "mask_data": data, "interpret": True}
        function = mask
        if mask is needs_an_int:
            function = lambda b, h, i, j, d: (d[i] == d[j]) & (j < len(d) - 1)  # noqa: E731
        keep = pairs(function, 1, 1, n, m, data)
        got = attention(q, k, v, **how)
        np.testing.assert_allclose(got, expected(q, k, v, keep)[0], atol=4e-3)
        found = attention.kernel(q, k, v, **how)
        made.add(getattr(found.attention, "kernel", found.attention))
        blocks_made.add(getattr(found.blocks.kernel, "kernel", found.blocks.kernel))
    few = mask is not needs_an_int
    assert (len(made) <= 4) == (len(blocks_made) <= 4) == few


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"mask": prefix}], ids=["plain", "mask"])
def test_several_kernels_are_compiled_before_a_call(tmp_path, monkeypatch, options):
    """As a thread does for calls that come often."""
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path))
    queries = 300 if options else 3
    q, k = (
        plgpu.ArrayInfo((1, n, heads, 64), np.dtype(np.float16), 0, True)
        for n, heads in ((queries, 4), (1300, 2))
    )
    spec = [plgpu.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, k)]
    found = attention.kernel(*spec, **options).compile(q, k, k)
    assert found == plgpu.ShapeDtypeStruct(q.shape, q.dtype)
    assert len(list(tmp_path.rglob("*.cubin"))) == 2


def test_open_sizes_under_vmap(rng, monkeypatch):
    q = rng.standard_normal((3, 1, 40, 2, 64)).astype(np.float16)
    k = rng.standard_normal((3, 1, 70, 1, 64)).astype(np.float16)
    bias = rng.standard_normal((3, 1, 2, 40, 70)).astype(np.float16)
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        for how in ({}, {"mask": prefix}):
            f = functools.partial(attention, interpret=True, **how)
            found.append(plgpu.vmap(lambda q, k, b, f=f: f(q, k, k, bias=b))(q, k, bias))
    np.testing.assert_array_equal(found[:2], found[2:])


def test_masks_and_bias(rng):
    n, m = 130, 200
    q = rng.standard_normal((1, n, 2, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, m, 1, 64)).astype(np.float16)
    bias = rng.standard_normal((1, 2, n, m)).astype(np.float16)
    want, _ = expected(q, k, v, pairs(prefix, 1, 2, n, m), bias.astype(np.float64))
    got = attention(q, k, v, mask=prefix, bias=bias, interpret=INTERPRET[0])
    np.testing.assert_allclose(got, want, atol=4e-3)


def test_masks_that_are_one_bool(rng):
    q = rng.standard_normal((1, 70, 2, 64)).astype(np.float16)
    o = attention(q, q, q, mask=lambda b, h, i, j: True, interpret=True)
    np.testing.assert_array_equal(o, attention(q, q, q, interpret=True))
    assert not attention(q, q, q, mask=lambda b, h, i, j: False, interpret=True).any()


def test_errors():
    q, data = np.zeros((1, 130, 2, 64), np.float16), np.zeros(130, np.int32)
    blocks = np.zeros((1, 1, 2, 3), np.int32)

    def call(error, words, f=attention, args=(q, q, q), **options):
        with pytest.raises(error, match=words):
            f(*args, interpret=True, **options)

    call(TypeError, "mask must be a function", mask=3)
    call(TypeError, "mask must be a function", block_mask, (q, q))
    call(ValueError, "need mask=", block_mask=blocks)
    call(ValueError, "need mask=", mask_data=data)
    call(ValueError, "replaces causal", mask=prefix, causal=True)
    call(ValueError, "replaces causal", mask=prefix, window=(3, 0))
    call(ValueError, "block_mask must be int32", mask=prefix, block_mask=blocks[:, :, :1].copy())
    call(ValueError, "block_mask must be int32", mask=prefix, block_mask=blocks.astype(np.uint32))
    call(ValueError, "four dims", block_mask, (q[0], q), mask=prefix)
    call(TypeError, "must return booleans", mask=lambda b, h, i, j: i + j)
    call(NotImplementedError, "no config=", mask=prefix, config=AttentionConfig())


# ---- head_dims -----------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "dim, value_dim",
    [(8, 8), (40, 40), (72, 72), (104, 104), (160, 160), (248, 248), (192, 128), (64, 256)],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_head_dims(rng, dim, value_dim, interpret):
    """Of any multiple of 8, and values of another width, on a poisoned result."""
    if interpret == "emulate" and max(dim, value_dim) > 160:
        pytest.skip("the interpreter has it")
    n, m = 70, 90
    q = rng.standard_normal((2, n, 4, dim)).astype(np.float16)
    k, v = (rng.standard_normal((2, m, 2, d)).astype(np.float16) for d in (dim, value_dim))
    keep = np.broadcast_to(np.arange(m) <= np.arange(n)[:, None], (2, 4, n, m))
    want, want_lse = expected(q, k, v, keep)
    out = np.full(want.shape, np.nan, np.float16), np.full(want_lse.shape, np.nan, np.float32)
    attention(q, k, v, causal=True, return_lse=True, interpret=interpret, out=out)
    np.testing.assert_allclose(out[0], want, atol=4e-3)
    np.testing.assert_allclose(out[1], want_lse, atol=1e-3)
    capped = attention(q, k, v, causal=True, softcap=1000.0, interpret=interpret)
    np.testing.assert_allclose(capped, want, atol=2e-2)


def test_values_of_another_width_and_divided_keys(rng):
    q = rng.standard_normal((1, 3, 2, 192)).astype(np.float16)
    k, v = (rng.standard_normal((1, 2100, 1, d)).astype(np.float16) for d in (192, 128))
    want, _ = expected(q, k, v, np.ones((1, 2, 3, 2100), bool))
    np.testing.assert_allclose(attention(q, k, v, interpret=True), want, atol=4e-3)
    for shape in ((1, 2100, 1, 132), (1, 2100, 1, 264), (1, 2099, 1, 128)):
        with pytest.raises(ValueError, match="k and v must have one shape"):
            attention(q, k, np.zeros(shape, np.float16), interpret=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "dim, value_dim", [(40, 40), (104, 104), (248, 248), (192, 128), (64, 256)]
)
def test_no_spills(dim, value_dim):
    S = plgpu.ShapeDtypeStruct
    q, k = (S((2, 4096, heads, dim), bfloat16) for heads in (16, 4))
    v = S((2, 4096, 4, value_dim), bfloat16)
    for causal in (False, True):
        kernel = attention.kernel(q, k, v, causal=causal)
        used = kernel.lower(q, k, v, target="sm_90a").resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


# ---- divided keys --------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "n, m, options",
    [
        (1, 2100, {}),
        (70, 2049, {"causal": True, "bottom_right": True}),
        (3, 3000, {"causal": True, "window": (900, None), "bottom_right": True}),
        (77, 2100, {"kv_lengths": np.array([130], np.int32)}),  # parts that are empty
        (5, 2100, {"softcap": 3.0}),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_divided_keys(rng, n, m, options, interpret):
    q = rng.standard_normal((1, n, 2, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, m, 1, 64)).astype(np.float16)
    how = {"return_lse": True, "interpret": interpret, **options}
    assert type(attention.kernel(q, k, v, **how)) is not type(
        attention.kernel(q, k, v, batch_invariant=True, **how)
    )
    distance = np.arange(m) - np.arange(n)[:, None]
    distance -= (m - n) if options.get("bottom_right") else 0
    keep = np.ones((n, m), bool) if "causal" not in options else distance <= 0
    if "window" in options:
        keep &= distance >= -options["window"][0]
    if "kv_lengths" in options:
        keep &= np.arange(m) < options["kv_lengths"]
        v[:, 130:] = np.nan
    if "softcap" in options:
        want, want_lse = attention(q, k, v, batch_invariant=True, **how)
    else:
        want, want_lse = expected(q, k, np.nan_to_num(v), keep)
    o, lse = attention(q, k, v, **how)
    np.testing.assert_allclose(o, want, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    there = np.full_like(o, np.nan), np.full_like(lse, np.nan)
    attention(q, k, v, out=there, **how)
    assert np.array_equal(there[0], o) and np.array_equal(there[1], lse)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "batch, n, m, heads, dim, value_dim",
    [(1, 130, 1300, (6, 6), 64, 64), (2, 70, 1300, (6, 2), 96, 40), (3, 10, 900, (2, 1), 128, 128)],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_shared_keys(rng, monkeypatch, batch, n, m, heads, dim, value_dim, interpret):
    """Equal shares of the keys of all tiles, where equal parts of each leave a wave half empty."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    plgpu.clear_caches()
    q, k, v = (
        rng.standard_normal((batch, rows, h, d)).astype(np.float16)
        for rows, h, d in ((n, heads[0], dim), (m, heads[1], dim), (m, heads[1], value_dim))
    )
    how = {"return_lse": True, "interpret": interpret}
    assert attention.kernel(q, k, v, **how).shares
    o, lse = attention(q, k, v, **how)
    want, want_lse = expected(q, k, v, np.ones((n, m), bool))
    np.testing.assert_allclose(o, want, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, atol=2e-3)
    plgpu.clear_caches()
