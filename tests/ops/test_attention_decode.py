"""Attention of few queries with a long cache: any lengths, shares that cut sequences anywhere."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import attention_decode


def expected(q, k, v, lengths):
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out, lse = np.zeros(q.shape, np.float32), np.full(q.transpose(0, 2, 1, 3).shape[:3], -np.inf)
    for b, n in enumerate(lengths):
        for h in range(q.shape[2] if n else 0):
            s = q[b, :, h] @ k[b, :n, h // group].T * q.shape[3] ** -0.5
            e = np.exp(s - s.max(1, keepdims=True))
            out[b, :, h] = e @ v[b, :n, h // group] / e.sum(1, keepdims=True)
            lse[b, h] = s.max(1) + np.log(e.sum(1))
    return out, lse


def operands(rng, lengths, queries, heads, kv_heads, dim, keys, dtype):
    """The cache beyond the lengths is NaN."""
    q = rng.standard_normal((len(lengths), queries, heads, dim)).astype(dtype)
    k, v = (
        rng.standard_normal((len(lengths), keys, kv_heads, dim)).astype(dtype) for _ in range(2)
    )
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    return q, k, v, np.array(lengths, np.int32)


@pytest.mark.parametrize(
    "lengths, queries, heads, kv_heads, dim, keys, dtype",
    [
        ((300, 77, 0), 1, 8, 2, 128, 300, np.float16),
        ((1, 64, 65, 190), 3, 4, 2, 64, 200, bfloat16),
        ((500,), 1, 4, 4, 128, 520, bfloat16),
    ],
)
@pytest.mark.parametrize(
    "interpret", [plgpu.InterpretParams(detect_races=True, seeds=2), "emulate"], ids=str
)
def test_lengths(rng, lengths, queries, heads, kv_heads, dim, keys, dtype, interpret):
    *arrays, n = operands(rng, lengths, queries, heads, kv_heads, dim, keys, dtype)
    want, want_lse = expected(*arrays, lengths)
    o, lse = attention_decode(*arrays, kv_lengths=n, return_lse=True, interpret=interpret)
    tolerance = 2e-3 if dtype == np.float16 else 2e-2
    np.testing.assert_allclose(np.asarray(o).astype(np.float32), want, atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=1e-4)


def test_lengths_do_not_compile(rng):
    q, k, v, _ = operands(rng, (200, 200), 1, 2, 1, 64, 200, np.float16)
    attention_decode(q, k, v, kv_lengths=np.array([5, 9], np.int32), interpret=True)
    before = _core.plan_memory()["plans"]
    for n in (1, 64, 130, 200):
        attention_decode(q, k, v, kv_lengths=np.array([n, 200], np.int32), interpret=True)
    assert _core.plan_memory()["plans"] == before


def test_errors(rng):
    q, k, v, n = operands(rng, (100,), 1, 2, 1, 64, 100, np.float16)
    with pytest.raises(ValueError, match="kv_lengths must be int32"):
        attention_decode(q, k, v, kv_lengths=n[:0], interpret=True)
    with pytest.raises(NotImplementedError, match="up to 64 queries"):
        attention_decode(np.repeat(q, 33, 1), k, v, interpret=True)
