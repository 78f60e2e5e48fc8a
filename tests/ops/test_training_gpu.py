"""Training kernels on a GPU beside the interpreter, with more blocks than a GPU runs at once."""

import ml_dtypes
import numpy as np
import pytest

from pallas_mgpu import ops
from pallas_mgpu.ops.adamw import MOST, Problem, kernel

pytestmark = pytest.mark.gpu
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
EIGHT = 2.0**-7  # of bfloat16


def normal(rng, shape, dtype=BF16):
    return rng.standard_normal(shape).astype(dtype)


def alike(got, want, tolerance):
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(2000, 1024), (33, 384), (5, 130)], ids=str)
@pytest.mark.parametrize("block, mx", [(None, False), (128, False), (64, False), (32, True)])
def test_quantize(rng, shape, block, mx):
    x = normal(rng, shape)
    q, scales = ops.quantize(x, block=block, mx=mx)
    want, of_want = ops.quantize(x, block=block, mx=mx, interpret=True)
    alike(scales, of_want, 1e-5)
    back = ops.dequantize(q, scales, block=block)
    size = block or shape[1]
    largest = np.repeat(np.asarray(scales, F32).reshape(shape[0], -1) * 448, size, 1)[:, : shape[1]]
    assert (np.abs(back.astype(F32) - x.astype(F32)) <= largest / 16 + 1e-6).all()
    same = np.mean(np.asarray(q).view(np.uint8) == np.asarray(want).view(np.uint8))
    assert same > 0.99  # others are rounded from a quotient that differs in its last bit


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(700, 8192), (300, 5000), (300, 20480), (900, 333)], ids=str)
def test_cross_entropy(rng, shape, dtype):
    x = (4 * rng.standard_normal(shape)).astype(dtype)
    targets = rng.integers(0, shape[1], shape[0]).astype(np.int32)
    targets[::7] = -100
    wide = x.astype(np.float64)
    lse = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    rows = np.arange(shape[0])
    losses, got = ops.cross_entropy(x, targets)
    alike(got, lse, 1e-5)
    alike(losses, np.where(targets < 0, 0, lse - wide[rows, np.maximum(targets, 0)]), 1e-5)
    grad = rng.standard_normal(shape[0]).astype(F32)
    want = np.exp(wide - lse[:, None])
    want[rows, np.maximum(targets, 0)] -= 1
    want *= np.where(targets < 0, 0, grad)[:, None]
    unit = EIGHT if dtype == BF16 else 1e-5
    alike(ops.cross_entropy_backward(grad, x, targets, got), want, unit)
    x = x.copy()
    alike(ops.cross_entropy_backward(grad, x, targets, got, out=x), want, unit)


@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2100, 1032, 1000), (4096, 4096, 512), (130, 264, 96)], ids=str)
def test_accumulate(rng, shape, out_dtype):
    m, n, k = shape
    a, b, c = normal(rng, (k, m)), normal(rng, (k, n)), normal(rng, (m, n), out_dtype)
    want = c.astype(F32) + a.T.astype(F32) @ b.astype(F32)
    options = {"transpose_a": True, "out_dtype": out_dtype, "accumulate": True}
    ops.matmul(a, b, out=c, **options)
    error = np.abs(c.astype(F32) - want).max() / np.abs(want).max()
    assert error < (EIGHT if out_dtype == BF16 else 1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "tanh"])
@pytest.mark.parametrize("shape", [(3000, 2048), (1000, 1000), (70, 40)], ids=str)
def test_activation_backward(rng, activation, shape):
    grad, x = normal(rng, shape), normal(rng, shape)
    options = {"activation": activation, "bias": True, "out_dtype": F32}
    got, sums = ops.activation_backward(grad, x, **options)
    want, of_want = ops.activation_backward(grad, x, **options, interpret=True)
    alike(got, want, EIGHT)
    alike(sums, of_want, 2e-2)


@pytest.mark.parametrize("count", [1, 3, MOST])
@pytest.mark.parametrize("shape", [(1000, 700), (3,), (64, 512)], ids=str)
def test_adamw(rng, count, shape):
    tensors = [
        (
            normal(rng, shape),
            normal(rng, shape),
            normal(rng, shape, F32),
            abs(normal(rng, shape, F32)),
        )
        for _ in range(count)
    ]
    settings = np.stack([np.float32([0.1, 0.9, 0.99, 1e-8, 0.1, 3 + i]) for i in range(count)])
    settings = settings if count > 1 else settings[0]
    x = Problem(shape, (BF16, BF16, F32, F32), count)
    operands = [y for t in tensors for y in t]
    got, want = (kernel(x, how)(*operands, settings) for how in (None, True))
    for a, b in zip(got, want, strict=True):
        alike(a, b, EIGHT if a.dtype == BF16 else 1e-5)
