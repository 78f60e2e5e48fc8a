"""Attention with a latent cache: lengths, pages, tiles of queries, shares that cut sequences."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_attention_decode import expected, few_blocks_are_emulated, near, paged  # noqa: F401

import pallas_mgpu as plgpu
from pallas_mgpu.ops import MlaConfig, mla_decode

INTERPRET = [plgpu.InterpretParams(detect_races=True, seeds=2), "emulate"]


def operands(rng, lengths, queries, heads, dim, keys, dtype):
    """The cache beyond the lengths is NaN."""
    q = rng.standard_normal((len(lengths), queries, heads, dim)).astype(dtype)
    cache = rng.standard_normal((len(lengths), keys, dim)).astype(dtype)
    for b, n in enumerate(lengths):
        cache[b, n:] = np.nan
    return q, cache, np.array(lengths, np.int32)


def check(arrays, lengths, value_dim, interpret, given=None, **options):
    q, cache, n = arrays
    keys = np.where(np.isnan(cache.astype(np.float32)), np.zeros((), cache.dtype), cache)[
        :, :, None
    ]
    want, want_lse = expected(q, keys, keys[..., :value_dim], lengths, **options)
    cache, more = (given or {}).get("cache", cache), {k: v for k, v in (given or {}).items()}
    more.pop("cache", None)
    how = {"kv_lengths": n, "value_dim": value_dim, "return_lse": True, "interpret": interpret}
    o, lse = mla_decode(q, cache, **how, **options, **more)
    near(o, want, q.dtype)
    np.testing.assert_allclose(lse, want_lse, atol=1e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize(
    "lengths, queries, heads, dim, value_dim, dtype",
    [
        ((100, 0, 64), 1, 16, 192, 128, np.float16),
        ((150, 2), 3, 30, 128, 128, bfloat16),
        ((65,), 1, 128, 576, 512, bfloat16),
        ((40, 129), 2, 33, 320, 256, np.float16),
    ],
)
@pytest.mark.parametrize("interpret", INTERPRET, ids=str)
def test_lengths(rng, lengths, queries, heads, dim, value_dim, dtype, block, interpret):
    """One tile of queries and several, whole and in part."""
    arrays = operands(rng, lengths, queries, heads, dim, max(lengths) + 9, dtype)
    given = {"config": MlaConfig(block)}
    check(arrays, lengths, value_dim, interpret, given, causal=queries > 1, scale=0.1)


@pytest.mark.parametrize(
    "config, queries, interpret",
    [
        (MlaConfig(32, 4), 1, INTERPRET[0]),
        (MlaConfig(64, 2), 3, True),
    ],
    ids=str,
)
def test_configurations(rng, monkeypatch, config, queries, interpret):
    """Numbers of slots, several tiles."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    plgpu.clear_caches()
    lengths = 150, 70, 0
    q, cache, n = operands(rng, lengths, queries, 128, 192, 160, np.float16)
    pages, table = paged(rng, cache, 16, lengths)
    given = {"cache": pages, "page_table": table, "config": config}
    check((q, cache, n), lengths, 128, interpret, given, causal=queries > 1)
    plgpu.clear_caches()


@pytest.mark.parametrize("size, interpret", [(16, INTERPRET[0]), (24, "emulate"), (64, True)])
def test_pages(rng, size, interpret):
    lengths = 100, 0, size
    q, cache, n = arrays = operands(rng, lengths, 1, 16, 128, 110, np.float16)
    pages, table = paged(rng, cache, size, lengths)
    check(arrays, lengths, 128, interpret, {"cache": pages, "page_table": table})


@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("interpret", [*INTERPRET, plgpu.InterpretParams(seeds=8)], ids=str)
def test_few_blocks(rng, monkeypatch, blocks, interpret):
    """Shares of several segments, and segments that several blocks have parts of."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: blocks)
    plgpu.clear_caches()
    lengths = (500, 77, 0, 1) if interpret != "emulate" else (200, 70)
    check(operands(rng, lengths, 1, 20, 128, max(lengths), np.float16), lengths, 128, interpret)
    plgpu.clear_caches()


def test_out(rng):
    q, cache, n = operands(rng, (70, 9), 1, 8, 128, 70, np.float16)
    how = {"kv_lengths": n, "value_dim": 128, "interpret": True}
    want = mla_decode(q, cache, **how)
    o = np.full(want.shape, np.nan, np.float16)
    assert mla_decode(q, cache, out=o, **how) is o
    assert np.array_equal(o, want)


def test_errors():
    q, cache = np.zeros((2, 1, 8, 576), np.float16), np.zeros((2, 100, 576), np.float16)
    table = np.zeros((2, 1), np.int32)

    def call(error, words, q=q, cache=cache, **options):
        with pytest.raises(error, match=words):
            mla_decode(q, cache, interpret=True, **options)

    many = (np.broadcast_to(x[:1], (70000, *x.shape[1:])) for x in (q, cache))
    call(NotImplementedError, "up to 65536 sequences", *many)
    call(ValueError, "cache must have 3 dims", cache=cache[:, :, None])
    call(ValueError, "one last dim", cache=cache[..., :512].copy())
    call(ValueError, "differ in batch", cache=cache[:1].copy())
    call(ValueError, "kv_lengths must be int32", kv_lengths=table)
    call(ValueError, "from 1 to 576", value_dim=640)
    call(ValueError, "block of 32 or 64", config=MlaConfig(48))
    call(TypeError, "must be an MlaConfig", config=64)
    call(TypeError, "both be float16", cache=cache.astype(np.float32))
    call(NotImplementedError, "of 128 up to 512", value_dim=64)
    call(NotImplementedError, "must not be negative, got -1.0; negate q", scale=-1.0)
    call(NotImplementedError, "at least 16", cache=cache[:, :8].copy(), page_table=table)


@pytest.mark.long
@pytest.mark.parametrize("config, bytes_", [(MlaConfig(), 0), (MlaConfig(32), 64)], ids=str)
def test_spills(config, bytes_):
    """None by default; few where a slot has 32 rows, which no default has."""
    S = plgpu.ShapeDtypeStruct
    q, pages = S((128, 1, 128, 576), bfloat16), S((999, 64, 576), bfloat16)
    n, table = S((128,), np.int32), S((128, 64), np.int32)
    found = mla_decode.kernel(q, pages, kv_lengths=n, page_table=table, config=config)
    used = found.kernel.lower(q, pages, n, table, target="sm_90a").resources()
    assert used["spill_bytes"] <= bytes_ and not used["remarks"], used
