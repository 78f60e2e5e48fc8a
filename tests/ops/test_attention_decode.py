"""Attention of few queries with a long cache: any lengths, dims, pages and windows, shares that cut
sequences anywhere, parts that are merged."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, finfo, float8_e4m3fn, float8_e5m2

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import (
    AttentionDecodeConfig,
    append_pages,
    attention_decode,
    merge_attention,
)

INTERPRET = [plgpu.InterpretParams(detect_races=True, seeds=2), "emulate"]


def expected(
    q, k, v, lengths, causal=False, window=None, softcap=None, sinks=None, scale=None, tree=None
):
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
        if tree is not None and n:
            own = np.arange(n) - (n - queries)
            seen = np.broadcast_to(tree, (batch, queries, queries))[b][:, np.maximum(own, 0)]
            hidden |= (own >= 0) & ~seen
        for h in range(heads):
            s = q[b, :, h] @ k[b, :n, h // group].T * (dim**-0.5 if scale is None else scale)
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


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "small, dtype, dim, value_dim, of_batch",
    [
        (np.int8, np.float16, 128, 128, False),
        (float8_e4m3fn, bfloat16, 64, 64, True),
        (float8_e5m2, np.float16, 48, 192, True),
        (np.int8, bfloat16, 256, 80, False),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_small_caches(rng, small, dtype, dim, value_dim, of_batch, interpret):
    """Of 8 bits, with scales of heads; the cache beyond the lengths is NaN where it can be."""
    lengths = (140, 0, 65) if interpret != "emulate" else (70, 0, 5)
    q, k, v, n = operands(rng, lengths, 2, 4, 2, dim, lengths[0] + 10, np.float32, value_dim)
    if small is np.int8:
        k, v = (np.nan_to_num(np.clip(np.rint(x * 40), -128, 127)) for x in (k, v))
    q, k, v = q.astype(dtype), k.astype(small), v.astype(small)
    shape = (3, 2) if of_batch else (2,)
    scales = {name: rng.uniform(0.01, 0.05, shape) for name in ("k_scale", "v_scale")}
    scales = {name: x.astype(np.float32) for name, x in scales.items()}
    wide = [
        x.astype(np.float64) * np.broadcast_to(scale, (3, 2))[:, None, :, None]
        for x, scale in zip((k, v), scales.values())
    ]
    want, want_lse = expected(q, *wide, lengths, causal=True)
    how = {"kv_lengths": n, "causal": True, "return_lse": True, "interpret": interpret}
    o, lse = attention_decode(q, k, v, **how, **scales)
    near(o, want, dtype)
    np.testing.assert_allclose(lse, want_lse, atol=1e-3)
    if interpret == "emulate" and of_batch:
        return
    alone = attention_decode(q, k, v, **how)[0]
    want, _ = expected(q, *(x.astype(np.float64) for x in (k, v)), lengths, causal=True)
    size = max(np.abs(want).max(), 1)
    near(alone.astype(np.float64) / size, want / size, dtype)


@pytest.mark.parametrize("kind", [np.int8, float8_e4m3fn, float8_e5m2])
def test_queries_of_any_size(rng, kind):
    """Rows of bfloat16 queries far beyond what float16 can represent."""
    size = np.array([1e-30, 1e-6, 1, 1e30], np.float32)
    q = rng.standard_normal((2, 1, 4, 128)) * size[:, None]
    q[1, 0, 2] = 0
    q, keys = q.astype(bfloat16), rng.standard_normal((2, 130, 4, 128)) * 20
    k = (np.rint(keys) if kind is np.int8 else keys).astype(kind)
    v = np.rint(rng.standard_normal(k.shape) * 4).astype(kind)
    scale = (1e-2 / size).astype(np.float32)
    got = attention_decode(q, k, v, k_scale=scale, scale=1.0, interpret=INTERPRET[0])
    wide = k.astype(np.float64) * scale[:, None]
    want, _ = expected(q, wide, v.astype(np.float64), (130, 130), scale=1.0)
    near(got.astype(np.float64) / 8, want / 8, bfloat16)


def test_pages_of_small_caches(rng):
    lengths = 100, 33
    q, k, v, n = operands(rng, lengths, 1, 4, 2, 64, 110, np.float32)
    q, k, v = q.astype(np.float16), k.astype(float8_e4m3fn), v.astype(float8_e4m3fn)
    want, _ = expected(q, k, v, lengths)
    (k, table), (v, _) = (paged(rng, x, 24, lengths) for x in (k, v))
    got = attention_decode(q, k, v, kv_lengths=n, page_table=table, interpret=INTERPRET[0])
    near(got, want, np.float16)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config",
    [(1, 2, 1), (2, 0, 2), (3, 0, 4), (4, 4, 0), (0, 5, 4)],
    ids=str,
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_configurations(rng, monkeypatch, config, interpret):
    """Also with shares of several segments, and several that end in one block."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 8)
    plgpu.clear_caches()
    lengths = (400, 77, 0, 1) if interpret != "emulate" else (140, 70)
    arrays = operands(rng, lengths, 1, 8, 4, 64, max(lengths), np.float16)
    check(arrays, lengths, interpret, {"config": AttentionDecodeConfig(*config)})
    plgpu.clear_caches()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": (70, None)},
        {"window": (40, 1)},
        {"window": (None, 0), "softcap": 2.0},
        {"softcap": 3.0, "scale": 0.3},
        {"scale": -0.3},
        {"scale": 0.0},
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("trees", [1, 3])
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_trees(rng, trees, interpret):
    """Each query sees its ancestors; keys of the queries lie in two blocks, or are fewer."""
    queries, lengths = 7, ((130, 40, 3) if trees == 3 else (66, 0, 140))
    tree = np.zeros((trees, queries, queries), bool)
    for t in range(trees):
        for i in range(queries):
            tree[t, i] = tree[t, rng.integers(i)] if i else False
            tree[t, i, i] = True
    arrays = operands(rng, lengths, queries, 4, 2, 64, 150, np.float16)
    check(arrays, lengths, interpret, tree=tree)
    if trees == 1 and interpret != "emulate":
        check(arrays, lengths, interpret, tree=tree, window=(50, None), softcap=3.0)


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


@pytest.mark.parametrize(
    "interpret", [True, pytest.param("emulate", marks=pytest.mark.long)], ids=str
)
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


@pytest.mark.parametrize("paged", [False, True])
def test_prefetches(paged, rng):
    """They are in programs for arrays on a GPU; checkers see that lengths are read early."""
    q, k, v, n = operands(rng, (140, 70), 1, 4, 2, 72, 160, np.float16)
    config = AttentionDecodeConfig(prefetch=True)
    want = attention_decode(q, k, v, interpret=True)
    found = attention_decode(q, k, v, config=config, interpret="emulate")
    np.testing.assert_allclose(found, want, atol=2e-3)
    with pytest.raises(plgpu.RaceError, match="launched earlier"):
        attention_decode(q, k, v, kv_lengths=n, config=config, interpret="emulate")
    how = {"kv_lengths": n}
    if paged:
        k, v = (x.reshape(20, 16, 2, 72) for x in (k, v))
        how["page_table"] = np.arange(20, dtype=np.int32).reshape(2, 10)
    for prefetch in (None, True):
        config = AttentionDecodeConfig(prefetch=prefetch)
        kernel = attention_decode.kernel(q, k, v, **how, config=config).kernel
        found = kernel.lower(q, k, v, *how.values(), target="sm_90a").as_text("cuda")
        assert ("tma_prefetch" in found) == bool(prefetch)


def test_infinite_values(rng):
    """They make infinite what they belong to, also where several blocks have parts of a result."""
    q, k, v, n = operands(rng, (300,), 1, 2, 1, 64, 300, np.float16)
    v[0, 70, 0, 3] = np.inf
    found = attention_decode(q, k, v, kv_lengths=n, interpret=True)
    assert np.isposinf(found[..., 3]).all() and np.isfinite(np.delete(found, 3, -1)).all()


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

    many = (np.broadcast_to(x, (70000, *x.shape[1:])) for x in (q, k, v))
    call(NotImplementedError, "up to 65536 sequences", *many)
    call(ValueError, "100 stages of 64 keys", config=AttentionDecodeConfig(stages=100))
    call(ValueError, "kv_lengths must be int32", kv_lengths=n[:0])
    call(ValueError, "page_table must be int32", page_table=table[0])
    tree = np.ones((1, 1, 1), bool)
    call(ValueError, "tree must be bool", tree=tree.astype(np.int8))
    call(ValueError, "tree must be bool", tree=tree.repeat(2, 1))
    call(ValueError, "omit causal", tree=tree, causal=True)
    call(ValueError, "sinks must be float32", sinks=np.zeros(3, np.float32))
    call(ValueError, "window must be", window=(-1, 0))
    call(ValueError, "differ in batch", k=np.repeat(k, 2, 0), v=np.repeat(v, 2, 0))
    call(ValueError, "one head_dim", k=k[..., :32].copy())
    call(TypeError, "float16 or bfloat16", v=v.astype(np.float32))
    call(TypeError, "both of its dtype", v=v.astype(np.int8))
    small = [x.astype(np.int8) for x in (k, v)]
    one = np.ones(1, np.float32)
    call(ValueError, "k_scale is for elements of 8 bits", k_scale=one)
    call(ValueError, "v_scale must be float32", k=small[0], v=small[1], v_scale=one.repeat(2))
    call(ValueError, "k_scale must be float32", k=small[0], v=small[1], k_scale=n)
    narrow = [x[..., :40].copy() for x in (q, *small)]
    call(NotImplementedError, "multiples of 16", q=narrow[0], k=narrow[1], v=narrow[2])
    call(TypeError, "must be an AttentionDecodeConfig", config=2)
    for config in ((5,), (1, -1), (0, 0, 2)):
        call(ValueError, "up to 4 consumers", config=AttentionDecodeConfig(*config))
    call(NotImplementedError, "up to 64 queries", q=np.repeat(q, 33, 1))
    wide = np.zeros((1, 100, 1, 136), np.float16)
    call(NotImplementedError, "40 with values", q=np.repeat(q, 21, 1), v=wide)
    call(NotImplementedError, "multiples of 8", q=q[..., :36].copy(), k=k[..., :36].copy())
    call(NotImplementedError, "at least 16", k=k[:, :8], v=v[:, :8], page_table=table)


@pytest.mark.long
def test_no_spills():
    S = plgpu.ShapeDtypeStruct
    n = S((1,), np.int32)
    scale = {name: S((8,), np.float32) for name in ("k_scale", "v_scale")}
    small = {"dtype": float8_e4m3fn, **scale}
    for heads, kv_heads, dim, value_dim, options in (
        (32, 8, 128, 128, {}),
        (32, 8, 128, 128, small),
        (32, 8, 128, 128, {**small, "dtype": np.int8}),
        (32, 8, 64, 64, {**small, "dtype": float8_e5m2}),
        (64, 2, 256, 256, {}),
        (64, 1, 192, 128, {}),
        (40, 1, 40, 192, {}),
        (32, 4, 96, 96, {"causal": True, "window": (500, None), "softcap": 30.0}),
    ):
        options = dict(options)
        q, small = S((1, 1, heads, dim), bfloat16), options.pop("dtype", bfloat16)
        k, v = (S((1, 8192, kv_heads, d), small) for d in (dim, value_dim))
        found = attention_decode.kernel(q, k, v, kv_lengths=n, **options)
        more = [options[name] for name in scale if name in options]
        used = found.kernel.lower(q, k, v, n, *more, target="sm_90a").resources()
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


def appended(pages, new, table, lengths, cos=None, sin=None, **scales):
    """What append_pages makes of (k_pages, v_pages)."""
    found = [x.copy() for x in pages]
    size = found[0].shape[1]
    for b, n in enumerate(lengths):
        for at in range(n, min(n + new[0].shape[1], table.shape[1] * size)):
            page = table[b, at // size]
            if not 0 <= page < len(found[0]):
                continue
            for x, rows, name in zip(found, new, ("k_scale", "v_scale")):
                value = rows[b, at - n].astype(np.float32)
                if cos is not None and name == "k_scale":
                    half = cos.shape[1]
                    c, s = (a[min(at, len(a) - 1)] for a in (cos, sin))
                    left, right = value[:, :half], value[:, half : 2 * half]
                    turned = left * c - right * s, right * c + left * s
                    value = np.concatenate([*turned, value[:, 2 * half :]], 1)
                if name in scales:
                    scale = scales[name]
                    value = value / (scale if scale.ndim == 1 else scale[b])[:, None]
                if x.dtype == np.int8:
                    value = np.clip(np.rint(value), -127, 127)
                elif x.dtype.itemsize == 1:
                    value = np.clip(value, *(f * float(finfo(x.dtype).max) for f in (-1, 1)))
                x[page, at % size] = value.astype(x.dtype)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "to, dtype, dim, half, scales",
    [
        (np.float16, np.float16, 40, 0, None),
        (bfloat16, bfloat16, 64, 32, None),
        (np.int8, bfloat16, 64, 16, (2,)),
        (float8_e4m3fn, np.float32, 128, 64, (4, 2)),
        (float8_e5m2, np.float16, 40, 0, None),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_append(rng, to, dtype, dim, half, scales, interpret):
    """Across pages; rows beyond the table and on pages that do not exist are dropped; some values
    are larger than those of 8 bits."""
    pages = [rng.integers(-9, 9, (7, 16, 2, d)).astype(to) for d in (dim, dim + 8)]
    new = [(rng.standard_normal((4, 5, 2, d)) * 9).astype(dtype) for d in (dim, dim + 8)]
    table = np.array([[3, 1], [0, 6], [5, 99], [2, -1]], np.int32)
    lengths = np.array([14, 30, 13, -2], np.int32)
    options = {}
    if half:
        angles = rng.uniform(0, 7, (20, half)).astype(np.float32)
        options |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if scales:
        low, high = (0.05, 0.3) if to is np.int8 else (0.01, 0.2)
        drawn = [rng.uniform(low, high, scales).astype(np.float32) for _ in range(2)]
        options |= dict(zip(("k_scale", "v_scale"), drawn))
    want = appended(pages, new, table, lengths, **options)
    found = append_pages(*pages, *new, table, lengths, interpret=interpret, **options)
    for x, got, w in zip(pages, found, want):
        assert got is x
        x, w = x.astype(np.float64), w.astype(np.float64)
        # the last bit of a rotation decides between two neighbours now and then
        step = {np.int8: 1}.get(to, np.abs(w) * float(finfo(to).eps) if to is not np.int8 else 1)
        assert np.all(np.abs(x - w) <= step) and np.mean(x != w) < 1e-2
        if not half:
            assert np.array_equal(x, w)


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
    small, scale = pages.astype(np.int8), np.ones(2, np.float32)
    arrays = pages, other, new, new, table, lengths
    call(ValueError, "k_scale is for floats", *arrays, k_scale=scale)
    arrays = small, small.copy(), new, new, table, lengths
    call(ValueError, "v_scale must be float32", *arrays, v_scale=scale[:1])
    ints = [new.astype(np.int8)] * 2
    call(ValueError, "is for floats", *arrays[:2], *ints, table, lengths, k_scale=scale)
    angles = np.ones((20, 33), np.float32)
    call(ValueError, "given together", *arrays, cos=angles[:, :32])
    call(ValueError, "2 \\* n up to 64", *arrays, cos=angles, sin=angles)
    two = {n: angles[:, :32].copy() for n in ("cos", "sin")}
    call(TypeError, "where keys are rotated", *arrays[:2], *ints, table, lengths, **two)
    out = (pages, other)
    call(ValueError, "omit out", pages, other, new, new, table, lengths, out=out)
    call(ValueError, "^append_pages: k_pages and v_pages share", pages, pages, *arrays[2:])
    swapped = np.zeros((3, 2, 16, 64), np.float16).swapaxes(1, 2)
    call(ValueError, "^v_pages .* is not contiguous", pages, swapped, *arrays[2:])
