"""ops.attention against a softmax in float64: lengths, heads, masks, schedules."""

import sys

import ml_dtypes
import numpy as np
import pytest

from pallas_mgpu.ops import AttentionConfig, _attention_choice, attention

pytestmark = pytest.mark.covering(1, share=True)

implementation = sys.modules["pallas_mgpu.ops.attention"]
f16, bf16 = np.float16, ml_dtypes.bfloat16


def reference(q, k, v, causal, scale):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    share = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, share, 2), np.repeat(v, share, 2)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        s = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p / total, v), (top + np.log(total))[..., 0]


def operands(rng, batch, queries, keys, heads, kv_heads, dim, dtype=f16, spread=1.0):
    q = rng.standard_normal((batch, queries, heads, dim)) * spread
    k, v = rng.standard_normal((2, batch, keys, kv_heads, dim))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def check(run, qkv, causal=False, scale=None, config=None, programs=2, tolerance=2e-3):
    """Few blocks, so that each does several tiles."""
    _, queries, _, dim = qkv[0].shape
    config = (config or _attention_choice.choose(queries, dim, causal))._replace(programs=programs)
    options = dict(causal=causal, scale=scale, return_lse=True, config=config)
    options["interpret"] = None if run.way == "cuda" else True
    o, lse = run.call(attention.kernel(*qkv, **options), *qkv)
    want, want_lse = reference(*qkv, causal, qkv[0].shape[3] ** -0.5 if scale is None else scale)
    assert o.dtype == qkv[0].dtype and lse.dtype == np.float32
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "queries,keys,dim",
    [
        (256, 256, 128),
        (300, 170, 128),
        (70, 515, 64),
        (401, 401, 64),
        (130, 257, 256),
        (1, 3, 64),
        (200, 150, 96),
        (150, 300, 192),
    ],
)
def test_lengths(run, rng, queries, keys, dim, causal):
    check(run, operands(rng, 1, queries, keys, 2, 2, dim), causal)


@pytest.mark.parametrize("heads,kv_heads", [(4, 1), (6, 3)])
def test_heads_share_keys(run, rng, heads, kv_heads):
    check(run, operands(rng, 2, 65, 129, heads, kv_heads, 64), causal=True)


def test_bfloat16_and_scale(run, rng):
    qkv = operands(rng, 1, 128, 200, 1, 1, 128, bf16)
    check(run, qkv, scale=0.3, tolerance=2e-2)


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_growing_maxima(run, rng, spread):
    """Scores that grow by far more than the lazy rescaling tolerates, and by far less."""
    q, k, v = operands(rng, 1, 64, 640, 1, 1, 128, spread=spread)
    k *= np.linspace(3, 0.1, 640).astype(f16)[None, :, None, None]  # blocks come from the last
    check(run, (q, k, v), tolerance=4e-3)
    config = AttentionConfig(1, 64, 2, trusting=True, late=False, hold=True)
    for dtype, tolerance in ((f16, 4e-3), (bf16, 3e-2)):
        check(run, [x.astype(dtype) for x in (q, k, v)], config=config, tolerance=tolerance)


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(1, 64, 3),
        AttentionConfig(2, 96, 2, lazy=False, late=False, early=True),
        AttentionConfig(3, 80, 2, lazy=True, late=True, hold=True, early=True),
        AttentionConfig(2, 48, 3, lazy=False, late=True, q_registers=True, early=True),
        AttentionConfig(1, 64, 1, lazy=True, late=True, hold=True),
        AttentionConfig(2, 64, 1, lazy=False, late=False, q_registers=True),
        AttentionConfig(2, 80, 2, late=False, hold=True, trusting=True),
        AttentionConfig(3, 64, 3, apart=True, late=False, trusting=True),
    ],
    ids=repr,
)
def test_configurations(run, rng, config):
    check(run, operands(rng, 1, 450, 450, 2, 2, 64), causal=True, config=config)


def test_tiles_are_done_once_in_any_order(run, rng, monkeypatch):
    """Heads that do not divide into groups of the schedule, more blocks than tiles of a head."""
    monkeypatch.setattr(implementation, "_L2_BYTES", 128 * 64 * 4 * 2)  # groups of two heads
    check(run, operands(rng, 1, 128, 128, 5, 5, 64), causal=True, programs=3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", [np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_is(run, rng, what, causal):
    """Tiles share their accumulators, and the first begins with a product that nobody wants: what
    is not finite in V or Q reaches only the rows and columns that it belongs to."""
    q, k, v = operands(rng, 1, 200, 200, 3, 3, 64)
    v[0, 0, 1, 7] = what
    q[0, 3, 2, 5] = np.nan
    chosen = _attention_choice.choose(200, 64, causal)._replace(programs=2)
    for trusting in (False, True):
        config = chosen._replace(trusting=trusting)
        options = dict(causal=causal, config=config, interpret=None if run.way == "cuda" else True)
        o = np.asarray(run.call(attention.kernel(q, k, v, **options), q, k, v))
        good = np.ones(o.shape, bool)
        good[0, :, 1, 7] = False
        good[0, 3, 2] = False
        assert np.isfinite(o[good]).all() and np.isnan(o[0, 3, 2]).all()
        np.testing.assert_array_equal(o[0, :, 1, 7], o.dtype.type(what))


def test_what_callers_get(rng):
    q, k, v = operands(rng, 1, 20, 30, 2, 1, 64)
    o, lse = attention(q, k, v, return_lse=True, interpret=True)
    assert o.shape == q.shape and lse.shape == (1, 2, 20)
    again = np.empty_like(q)
    assert attention(q, k, v, out=again, interpret=True) is again
    np.testing.assert_array_equal(o, again)


@pytest.mark.parametrize(
    "change,error,words",
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q must have the dims"),
        (lambda q, k, v: (q.astype(np.float32), k, v), TypeError, "float16 or all bfloat16"),
        (lambda q, k, v: (q, k.astype(bf16), v), TypeError, "float16 or all bfloat16"),
        (lambda q, k, v: (q, k[:, :5], v), ValueError, "one shape"),
        (lambda q, k, v: (q[..., :36], k[..., :36], v[..., :36]), NotImplementedError, "head_dim"),
        (lambda q, k, v: (np.repeat(q, 2, 0), k, v), ValueError, "differ in batch"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "multiple"),
        (lambda q, k, v: (q[:, :0], k, v), ValueError, "empty"),
    ],
)
def test_errors(rng, change, error, words):
    q, k, v = operands(rng, 1, 20, 30, 4, 2, 64)
    with pytest.raises(error, match=words):
        attention(*change(q, k, v), interpret=True)
    assert attention(q, k, v, interpret=True).shape == q.shape


@pytest.mark.parametrize(
    "config,error,words",
    [
        ((2, 128), TypeError, "config must be an AttentionConfig, got .2, 128"),
        (AttentionConfig(4), ValueError, "1 to 3 consumers"),
        (AttentionConfig(2, 24), ValueError, "multiple of 16 up to 256"),
        (AttentionConfig(stages=0), ValueError, "stages from 1"),
        (AttentionConfig(programs=-1), ValueError, "programs from 0"),
    ],
)
def test_config_errors(rng, config, error, words):
    qkv = operands(rng, 1, 20, 30, 2, 2, 64)
    with pytest.raises(error, match=words):
        attention(*qkv, config=config, interpret=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_resources(dim, causal):
    """The flagship sizes neither spill nor make ptxas serialise products."""
    x = np.zeros((4, 4096, 16, dim), f16)
    used = attention.kernel(x, x, x, causal=causal).lower(x, x, x).resources()
    assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used
