"""Attention of few queries with a long cache: any lengths, dims, pages and windows, shares that cut
sequences anywhere, parts that are merged."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import append_pages, attention_decode, merge_attention

INTERPRET = [plgpu.InterpretParams(detect_races=True, seeds=2), "emulate"]


def expected(q, k, v, lengths, causal=False, window=None, softcap=None, sinks=None, scale=None):
    """In float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    batch, queries, heads, dim = q.shape
    group = heads // k.shape[2]
    left, right = window or (None, None)
    right = 0 if causal else right
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full((batch, heads, queries), -np.inf)
    for b, n in enumerate(lengths):
        distance = np.arange(n) - (n - queries + np.arange(queries))[:, None]
        hidden = np.zeros(distance.shape, bool) if right is None else distance > right
        hidden |= False if left is None else distance < -left
        for h in range(heads):
            s = q[b, :, h] @ k[b, :n, h // group].T * (scale or dim**-0.5)
            s = softcap * np.tanh(s / softcap) if softcap else s
            e = np.where(hidden, 0, np.exp(s))
            total = e.sum(1) + (0 if sinks is None else np.exp(np.float64(sinks[h])))
            for i in np.flatnonzero(total):
                out[b, i, h] = e[i] @ v[b, :n, h // group] / total[i]
                lse[b, h, i] = np.log(total[i])
    return out, lse


@pytest.fixture(autouse=True)
def few_blocks_are_emulated(request, monkeypatch):
    """On the emulated machine the blocks of 6 multiprocessors, most of which have keys."""
    if (
        getattr(request.node, "callspec", None)
        and "emulate" in request.node.callspec.params.values()
    ):
        plgpu.clear_caches()
        monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 6)
        yield
        plgpu.clear_caches()
    else:
        yield


def operands(rng, lengths, queries, heads, kv_heads, dim, keys, dtype, value_dim=None):
    """The cache beyond the lengths is NaN."""
    q = rng.standard_normal((len(lengths), queries, heads, dim)).astype(dtype)
    k, v = (
        rng.standard_normal((len(lengths), keys, kv_heads, d)).astype(dtype)
        for d in (dim, value_dim or dim)
    )
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    return q, k, v, np.array(lengths, np.int32)


def paged(rng, x, size, lengths, more=3):
    """The cache in pages in random order, and the table, whose unused entries mean nothing."""
    batch, keys = x.shape[:2]
    entries = -(-keys // size)
    pages = np.full((batch * entries + more, size, *x.shape[2:]), np.nan, x.dtype)
    table = np.random.default_rng(7).permutation(len(pages))[: batch * entries]
    table = table.reshape(batch, entries).astype(np.int32)
    for b in range(batch):
        for e in range(entries):
            rows = x[b, e * size : (e + 1) * size]
            pages[table[b, e], : len(rows)] = rows
        table[b, -(-lengths[b] // size) :] = rng.choice([-5, 10**9])
    return pages, table


def near(got, want, dtype):
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}[np.dtype(dtype).name]
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=tolerance)


def check(arrays, lengths, interpret, given=None, **options):
    """Of contiguous caches, or of what is given instead."""
    want, want_lse = expected(*arrays[:3], lengths, **options)
    q, k, v, n = (given or {}).pop("arrays", arrays)
    more = (given or {}) | options
    o, lse = attention_decode(q, k, v, kv_lengths=n, return_lse=True, interpret=interpret, **more)
    near(o, want, q.dtype)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=2e-3 if "softcap" in more else 1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "lengths, queries, heads, kv_heads, dim, keys, dtype",
    [
        ((140, 77, 0), 1, 8, 2, 128, 140, np.float16),
        ((1, 64, 65, 130), 3, 4, 2, 64, 135, bfloat16),
        ((200,), 1, 4, 4, 128, 220, bfloat16),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_lengths(rng, lengths, queries, heads, kv_heads, dim, keys, dtype, interpret):
    check(operands(rng, lengths, queries, heads, kv_heads, dim, keys, dtype), lengths, interpret)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "dim, value_dim", [(32, 32), (40, 40), (96, 96), (256, 256), (192, 128), (72, 200)]
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_dims(rng, dim, value_dim, interpret):
    arrays = operands(rng, (70, 5), 1, 6, 2, dim, 75, np.float16, value_dim)
    check(arrays, (70, 5), interpret)


@pytest.mark.parametrize(
    "size, interpret",
    [(n, INTERPRET[0]) for n in (16, 24, 32, 64, 96, 128)] + [(24, "emulate")],
    ids=str,
)
def test_pages(rng, size, interpret):
    lengths = (290, 0, 65, size) if interpret != "emulate" else (80, 0)
    q, k, v, n = arrays = operands(rng, lengths, 1, 4, 2, 64, max(lengths) + 10, np.float16)
    (k, table), (v, _) = (paged(rng, x, size, lengths) for x in (k, v))
    check(arrays, lengths, interpret, {"arrays": (q, k, v, n), "page_table": table})


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": (70, None)},
        {"window": (40, 1)},
        {"window": (None, 0), "softcap": 2.0},
        {"softcap": 3.0, "scale": 0.3},
    ],
    ids=str,
)
def test_options(rng, options):
    """Lengths below the queries too: the first of them see no key."""
    lengths = 300, 2, 66, 0
    arrays = operands(rng, lengths, 5, 4, 2, 64, 300, np.float16)
    check(arrays, lengths, INTERPRET[0], **options)
    sinks = rng.standard_normal(4).astype(np.float32) * 3
    check(arrays, lengths, INTERPRET[0], sinks=sinks, **options)


def test_options_emulated(rng):
    arrays = operands(rng, (130, 2), 3, 2, 1, 64, 130, np.float16)
    options = {"causal": True, "window": (70, None), "softcap": 2.0}
    check(arrays, (130, 2), "emulate", sinks=np.array([0.5, -1], np.float32), **options)


def test_a_window_of_pages(rng):
    """Pages before the window may be anything."""
    lengths = 400, 90
    q, k, v, n = arrays = operands(rng, lengths, 1, 4, 1, 96, 400, bfloat16)
    (k, table), (v, _) = (paged(rng, x, 16, lengths) for x in (k, v))
    table[0, :16] = -1
    given = {"arrays": (q, k, v, n), "page_table": table}
    check(arrays, lengths, True, given, window=(100, None))


@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("interpret", [*INTERPRET, plgpu.InterpretParams(seeds=8)], ids=str)
def test_few_blocks(rng, monkeypatch, blocks, interpret):
    """Shares of many blocks of keys and several segments; slots of the rings are used again."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: blocks)
    plgpu.clear_caches()
    lengths = (600, 77, 0, 1) if interpret != "emulate" else (200, 70)
    arrays = operands(rng, lengths, 1, 4, 2, 64, max(lengths), np.float16)
    check(arrays, lengths, interpret)
    if interpret != "emulate":  # one consumer
        arrays = operands(rng, lengths, 5, 16, 2, 64, max(lengths), np.float16)
        check(arrays, lengths, interpret, causal=True, window=(300, None))
    plgpu.clear_caches()


@pytest.mark.parametrize("interpret", [True, "emulate"], ids=str)
def test_out(rng, interpret):
    q, k, v, n = operands(rng, (70, 9), 1, 2, 1, 64, 70, np.float16)
    want, want_lse = expected(q, k, v, n)
    o, lse = np.full(q.shape, np.nan, np.float16), np.full((2, 2, 1), np.nan, np.float32)
    found = attention_decode(q, k, v, kv_lengths=n, out=o, interpret=interpret)
    assert found is o
    near(o, want, q.dtype)
    o[:] = np.nan
    how = {"kv_lengths": n, "return_lse": True, "interpret": interpret}
    found = attention_decode(q, k, v, out=(o, lse), **how)
    assert found[0] is o and found[1] is lse
    near(o, want, q.dtype)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
    with pytest.raises(ValueError, match="out must be"):
        attention_decode(q, k, v, out=o, **how)


def test_lengths_do_not_compile(rng):
    q, k, v, _ = operands(rng, (200, 200), 1, 2, 1, 64, 200, np.float16)
    attention_decode(q, k, v, kv_lengths=np.array([5, 9], np.int32), interpret=True)
    before = _core.plan_memory()["plans"]
    for n in (1, 64, 130, 200):
        attention_decode(q, k, v, kv_lengths=np.array([n, 200], np.int32), interpret=True)
    assert _core.plan_memory()["plans"] == before


def test_errors(rng):
    q, k, v, n = operands(rng, (100,), 1, 2, 1, 64, 100, np.float16)
    table = np.zeros((1, 1), np.int32)

    def call(error, words, q=q, k=k, v=v, **options):
        with pytest.raises(error, match=words):
            attention_decode(q, k, v, interpret=True, **options)

    call(ValueError, "kv_lengths must be int32", kv_lengths=n[:0])
    call(ValueError, "page_table must be int32", page_table=table[0])
    call(ValueError, "sinks must be float32", sinks=np.zeros(3, np.float32))
    call(ValueError, "window must be", window=(-1, 0))
    call(ValueError, "differ in batch", k=np.repeat(k, 2, 0), v=np.repeat(v, 2, 0))
    call(ValueError, "one head_dim", k=k[..., :32].copy())
    call(TypeError, "float16 or all bfloat16", v=v.astype(np.float32))
    call(NotImplementedError, "up to 64 queries", q=np.repeat(q, 33, 1))
    wide = np.zeros((1, 100, 1, 136), np.float16)
    call(NotImplementedError, "40 with values", q=np.repeat(q, 21, 1), v=wide)
    call(NotImplementedError, "multiples of 8", q=q[..., :36].copy(), k=k[..., :36].copy())
    call(NotImplementedError, "at least 16", k=k[:, :8], v=v[:, :8], page_table=table)


@pytest.mark.long
def test_no_spills():
    S = plgpu.ShapeDtypeStruct
    n = S((1,), np.int32)
    for heads, kv_heads, dim, value_dim, options in (
        (32, 8, 128, 128, {}),
        (64, 2, 256, 256, {}),
        (64, 1, 192, 128, {}),
        (40, 1, 40, 192, {}),
        (32, 4, 96, 96, {"causal": True, "window": (500, None), "softcap": 30.0}),
    ):
        q = S((1, 1, heads, dim), bfloat16)
        k, v = (S((1, 8192, kv_heads, d), bfloat16) for d in (dim, value_dim))
        found = attention_decode.kernel(q, k, v, kv_lengths=n, **options)
        used = found.kernel.lower(q, k, v, n, target="sm_90a").resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


# ---- merging parts, appending to pages -----------------------------------------------------------


@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_merge(rng, interpret):
    """Three parts of a cache, one of which has no keys of a sequence, are what the whole is."""
    lengths = 150, 40
    q, k, v, n = operands(rng, lengths, 3, 4, 2, 96, 150, np.float16)
    o, lse = np.zeros((3, *q.shape), np.float16), np.zeros((3, 2, 4, 3), np.float32)
    for part, (begin, end) in enumerate(((0, 50), (50, 120), (120, 150))):
        here = np.clip(n - begin, 0, end - begin).astype(np.int32)
        given = q, k[:, begin:end].copy(), v[:, begin:end].copy()
        out = o[part], lse[part]
        attention_decode(*given, kv_lengths=here, return_lse=True, out=out, interpret=True)
    o[2, 1] = np.nan  # no keys, anything
    want, want_lse = expected(q, k, v, lengths)
    got, got_lse = merge_attention(o, lse, return_lse=True, interpret=interpret)
    near(got, want, q.dtype)
    np.testing.assert_allclose(got_lse, want_lse, atol=1e-4)
    assert np.array_equal(merge_attention(o, lse, interpret=interpret), got)


def test_merge_of_nothing():
    o, lse = np.full((2, 1, 1, 2, 32), np.nan, bfloat16), np.full((2, 1, 2, 1), -np.inf, np.float32)
    got, got_lse = merge_attention(o, lse, return_lse=True, interpret=True)
    assert not got.any() and np.all(got_lse == -np.inf)


def test_merge_errors():
    o, lse = np.zeros((2, 1, 3, 2, 32), np.float16), np.zeros((2, 1, 2, 3), np.float32)
    with pytest.raises(ValueError, match="lse must have the shape"):
        merge_attention(o, lse.swapaxes(2, 3).copy(), interpret=True)
    with pytest.raises(ValueError, match="o must have the dims"):
        merge_attention(o[0], lse, interpret=True)
    with pytest.raises(TypeError, match="lse float32"):
        merge_attention(o, lse.astype(np.float16), interpret=True)


@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_append(rng, interpret):
    """Across pages; rows beyond the table and on pages that do not exist are dropped."""
    pages = [rng.standard_normal((7, 16, 2, d)).astype(np.float16) for d in (40, 64)]
    new = [rng.standard_normal((4, 5, 2, d)).astype(np.float16) for d in (40, 64)]
    table = np.array([[3, 1], [0, 6], [5, 99], [2, 4]], np.int32)
    lengths = np.array([14, 30, 13, 0], np.int32)
    want = [x.copy() for x in pages]
    for b, n in enumerate(lengths):
        for at in range(n, min(n + 5, 32)):
            page = table[b, at // 16]
            for x, rows in zip(want, new):
                if page < 7:
                    x[page, at % 16] = rows[b, at - n]
    found = append_pages(*pages, *new, table, lengths, interpret=interpret)
    for x, got, w in zip(pages, found, want):
        assert got is x and np.array_equal(x, w)


def test_append_errors(rng):
    pages, new = np.zeros((3, 16, 2, 64), np.float16), np.zeros((1, 1, 2, 64), np.float16)
    table, lengths = np.zeros((1, 3), np.int32), np.zeros(1, np.int32)
    other = pages.copy()

    def call(error, words, *args, **options):
        with pytest.raises(error, match=words):
            append_pages(*args, interpret=True, **options)

    call(ValueError, "page_table must be int32", pages, other, new, new, table[0], lengths)
    call(ValueError, "page_table must be int32", pages, other, new, new, table, lengths[:0])
    call(ValueError, "k must|and k", pages, other, new[0], new, table, lengths)
    call(ValueError, "page_size", pages, other[:2].copy(), new, new, table, lengths)
    call(TypeError, "one dtype", pages, other, new, new.astype(bfloat16), table, lengths)
    out = (pages, other)
    call(ValueError, "omit out", pages, other, new, new, table, lengths, out=out)
