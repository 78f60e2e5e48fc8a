"""Gradients of attention against float64: lengths that no block divides, groups of heads, causal;
no unordered accesses, no spills."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops

SHAPES = [  # batch, queries, heads, head_dim, keys, kv_heads, causal
    (1, 64, 1, 64, 64, 1, False),
    (2, 100, 2, 64, 77, 1, False),
    (1, 300, 1, 128, 129, 1, False),
    (1, 130, 4, 128, 200, 2, True),
    (1, 200, 2, 64, 130, 2, True),
    (1, 1, 1, 128, 1, 1, False),
    (1, 65, 3, 64, 257, 1, True),
]


def gradients(grad, q, k, v, causal, scale):
    """In float64, from the definition."""
    grad, q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (grad, q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = scale * q @ k.swapaxes(-1, -2)
    if causal:
        outside = np.arange(s.shape[-1])[None] > np.arange(s.shape[-2])[:, None]
        s = np.where(outside, -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    delta = (grad * (p @ v)).sum(-1, keepdims=True)
    ds = scale * p * (grad @ v.swapaxes(-1, -2) - delta)
    dk, dv = ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ grad
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return [x.transpose(0, 2, 1, 3) for x in (ds @ k, dk, dv)]


def operands(rng, shape, dtype):
    batch, queries, heads, dim, keys, kv_heads, _ = shape
    q, grad = (rng.standard_normal((batch, queries, heads, dim)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((batch, keys, kv_heads, dim)).astype(dtype) for _ in range(2))
    return grad, q, k, v


WIDTHS = [(8, 8), (72, 72), (96, 64), (64, 120), (200, 200)]  # head_dim, that of the values


@pytest.mark.parametrize("dim, value_dim", WIDTHS)
def test_other_head_dims(rng, dim, value_dim, interpret=True):
    """By copies with columns of zeros; results also into arrays that are given."""
    dtype, scale = np.float16, 0.1
    shapes = [(2, 70, 4, value_dim), (2, 70, 4, dim), (2, 50, 2, dim), (2, 50, 2, value_dim)]
    grad, q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    how = {"causal": True, "scale": scale, "interpret": interpret}
    o, lse = ops.attention(q, k, v, return_lse=True, **how)
    want = gradients(grad, q, k, v, True, scale)
    found = ops.attention_backward(grad, q, k, v, o, lse, **how)
    into = [np.full(x.shape, np.nan, dtype) for x in (q, k, v)]
    ops.attention_backward(grad, q, k, v, o, lse, out=tuple(into), **how)
    bias = np.zeros((1, 1, 70, 50), dtype)
    more = {"bias": bias, "bias_gradient": True}
    biased = ops.attention_backward(grad, q, k, v, o, lse, **more, **how)
    into.append(np.full(bias.shape, np.nan, dtype))
    ops.attention_backward(grad, q, k, v, o, lse, out=tuple(into), **more, **how)
    np.testing.assert_allclose(into[3], biased[3], rtol=1e-2, atol=1e-2)
    for a, b, c, w in zip(found, into, biased, want):
        for x in (a, b, c):
            error = np.abs(x.astype(np.float64) - w).max()
            assert x.dtype == dtype and error < 1.5e-3 * max(4, np.abs(w).max())
    with pytest.raises(NotImplementedError, match="ops.rotary"):
        angles = np.ones((70, dim // 2), np.float32)
        ops.attention_backward(grad, q, k, v, o, lse, cos=angles, sin=angles, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, value_dim", WIDTHS)
def test_other_head_dims_on_a_gpu(rng, dim, value_dim):
    test_other_head_dims(rng, dim, value_dim, interpret=None)


@pytest.mark.usefixtures("one_sm")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients(rng, shape, dtype):
    grad, q, k, v = operands(rng, shape, dtype)
    causal, scale = shape[-1], 0.1
    o, lse = ops.attention(q, k, v, causal=causal, scale=scale, return_lse=True, interpret=True)
    how = {"causal": causal, "scale": scale, "interpret": True}
    found = ops.attention_backward(grad, q, k, v, o, lse, **how)
    repeating = ops.attention_backward(grad, q, k, v, o, lse, deterministic=True, **how)
    unit = 2e-3 if dtype is np.float16 else 1.5e-2
    expected = gradients(grad, q, k, v, causal, scale)
    for got, want in zip((*found, *repeating), (*expected, *expected), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= unit * np.abs(want).max() + 1e-2 * unit


@pytest.mark.usefixtures("one_sm")
@pytest.mark.parametrize("causal", [False, True])
def test_no_races(rng, causal):
    grad, q, k, v = operands(rng, (1, 200, 2, 64, 130, 1, causal), np.float16)
    o, lse = ops.attention(q, k, v, causal=causal, return_lse=True, interpret=True)
    checked = plgpu.InterpretParams(detect_races=True, on_race="raise")
    for repeats in (False, True):
        how = {"causal": causal, "deterministic": repeats, "interpret": checked}
        ops.attention_backward(grad, q, k, v, o, lse, **how)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_no_spills(dim, causal):
    x = plgpu.ShapeDtypeStruct((2, 1024, 4, dim), np.float16)
    lse = plgpu.ShapeDtypeStruct((2, 4, 1024), np.float32)
    found = ops.attention_backward.kernel(x, x, x, x, x, lse, causal=causal, deterministic=True)
    for kernel in (found.by_keys, found.by_queries):
        used = kernel.lower(x, x, x, x, lse, lse, target="sm_90a").resources()
        assert used["spill_bytes"] == 0 and "C75" not in used["remarks"], used


@pytest.mark.parametrize(
    "change, error",
    [
        ({"grad": (1, 8, 1, 64)}, ValueError),
        ({"lse": (1, 1, 8)}, ValueError),
        ({"q": (1, 16, 1, 36), "k": (1, 16, 1, 36), "v": (1, 16, 1, 36)}, NotImplementedError),
    ],
)
def test_errors(change, error):
    shapes = dict.fromkeys(("grad", "q", "k", "v", "o"), (1, 16, 1, 64)) | {"lse": (1, 1, 16)}
    shapes |= change
    arrays = [
        np.zeros(s, np.float32 if name == "lse" else np.float16) for name, s in shapes.items()
    ]
    with pytest.raises(error, match="attention_backward"):
        ops.attention_backward(*arrays)
