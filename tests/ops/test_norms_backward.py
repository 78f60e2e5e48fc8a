"""Gradients of softmax, rms_norm and layer_norm against float64, for rows that registers hold and
for longer ones, and sums over rows."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops

SHAPES = [(1, 1), (3, 7), (2, 5, 129), (70, 130), (9, 1000), (3, 4096), (2, 8193), (600, 33)]
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Sums of columns go through SMEM with a warning."""
    yield


def gradients(kind, grad, x, w, eps):
    """Of the row norm `kind`, in float64: by x, the weight and the bias."""
    grad, x = grad.astype(np.float64), x.astype(np.float64)
    g = grad if w is None else grad * w.astype(np.float64)
    if kind == "rms_norm":
        centred = x
    else:
        centred = x - x.mean(-1, keepdims=True)
        g = g - g.mean(-1, keepdims=True)
    factor = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    y = centred * factor
    dx = factor * (g - y * (g * y).mean(-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    return dx, (grad * y).sum(rows), grad.sum(rows)


def softmax_gradient(grad, y, axis):
    grad, y = grad.astype(np.float64), y.astype(np.float64)
    return y * (grad - (grad * y).sum(axis, keepdims=True))


def check(got, want, dtype, rows=1):
    """Relative to the largest number: sums of many rows cancel."""
    assert got.dtype == dtype and got.shape == want.shape
    unit = 2e-5 if dtype == np.float32 else 1e-2
    scale = np.abs(want).max() + np.sqrt(rows)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=unit, atol=unit * scale)


def normal(rng, shape, dtype, n):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(n)]


def rows_of(shape):
    return int(np.prod(shape[:-1]))


@shapes
@dtypes
def test_rms_norm(rng, shape, dtype):
    grad, x, add = normal(rng, shape, dtype, 3)
    (w,) = normal(rng, shape[-1:], dtype, 1)
    want = gradients("rms_norm", grad, x, w, 1e-6)
    dx, dw = ops.rms_norm_backward(grad, x, w, interpret=True)
    check(dx, want[0], dtype)
    check(dw, want[1], dtype, rows_of(shape))
    want = gradients("rms_norm", grad, x, None, 1e-3)[0] + add.astype(np.float64)
    check(ops.rms_norm_backward(grad, x, add=add, eps=1e-3, interpret=True), want, dtype)


@shapes
@dtypes
def test_layer_norm(rng, shape, dtype):
    if shape[-1] == 1:
        pytest.skip("one element is its own mean")
    grad, x = normal(rng, shape, dtype, 2)
    (w,) = normal(rng, shape[-1:], dtype, 1)
    found = ops.layer_norm_backward(grad, x, w, bias=True, interpret=True)
    want = gradients("layer_norm", grad, x, w, 1e-5)
    for got, expected, rows in zip(found, want, (1, rows_of(shape), rows_of(shape))):
        check(got, expected, dtype, rows)
    want = gradients("layer_norm", grad, x, None, 1e-5)[0]
    check(ops.layer_norm_backward(grad, x, interpret=True), want, dtype)


RING = [(37, 640), (5, 1536), (9, 4096), (7, 5000), (300, 1000), (5, 12296), (2, 33000), (2, 65536)]


@pytest.mark.parametrize("shape", RING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_rows_through_shared_memory(rng, name, shape, dtype):
    """Aligned rows, of one warpgroup, of several that share them, and of a cluster of blocks; with
    the race detector, and the gradient of a residual branch."""
    grad, x, add = normal(rng, shape, dtype, 3)
    (w,) = normal(rng, shape[-1:], dtype, 1)
    checked = plgpu.InterpretParams(detect_races=True)
    options = {"bias": True, "eps": 1e-4} if name == "layer_norm" else {"eps": 1e-4}
    call = getattr(ops, f"{name}_backward")
    found = call(grad, x, w, add=add, **options, interpret=checked)
    want = gradients(name, grad, x, w, 1e-4)
    want = want[0] + add.astype(np.float64), *want[1:]
    for got, expected, rows in zip(found, want, (1, rows_of(shape), rows_of(shape))):
        check(got, expected, dtype, rows)
    assert len(found) == len(options) + 1


C = ops.NormBackwardConfig
CONFIGS = [  # shape, config
    ((37, 640), C(stages=4)),
    ((37, 640), C(height=1)),
    ((9, 4096), C(members=2)),
    ((9, 4096), C(members=4)),
    ((9, 5000), C(roles=True)),
    ((150, 1032), C(roles=True, members=1, stages=2)),
    ((9, 520), C(roles=True, members=1, stages=20)),
    ((300, 1032), C(roles=True, cluster=8, stages=2)),  # slots and buffers are used again
    ((5, 12296), C(roles=True, cluster=4)),
    ((2, 33000), C(roles=True, stages=2)),
]


@pytest.mark.parametrize("shape, config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_configurations(rng, name, shape, config, interpret=True):
    """The same as without one; no unordered accesses."""
    dtype = DTYPES[1]
    grad, x, add = normal(rng, shape, dtype, 3)
    (w,) = normal(rng, shape[-1:], dtype, 1)
    options = {"add": add} | ({"bias": True} if name == "layer_norm" else {})
    how = plgpu.InterpretParams(detect_races=True) if interpret else None
    call = getattr(ops, f"{name}_backward")
    found = call(grad, x, w, config=config, interpret=how, **options)
    want = gradients(name, grad, x, w, 1e-5)
    want = want[0] + add.astype(np.float64), *want[1:]
    for got, expected, rows in zip(found, want, (1, rows_of(shape), rows_of(shape))):
        check(got, expected, dtype, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [C(), *{config for _, config in CONFIGS}], ids=str)
def test_configurations_on_a_gpu(rng, config):
    done = 0
    for shape in ((3001, 640), (1000, 4096), (700, 5000), (400, 12296), (150, 33000)):
        for name in ("rms_norm", "layer_norm"):
            try:
                test_configurations(rng, name, shape, config, interpret=False)
            except ValueError as e:
                assert "cannot pass through shared memory" in str(e)
                continue
            done += 1
    assert done


@pytest.mark.parametrize(
    "config, error, text",
    [
        (5, TypeError, "must be a NormBackwardConfig"),
        (C(members=3), ValueError, "1, 2 or 4 members"),
        (C(cluster=16), ValueError, "a cluster of 1, 2, 4 or 8"),
        (C(stages=1), ValueError, "2 stages or more"),
        (C(roles=True, members=4), ValueError, "with roles, up to 2 members"),
        (C(cluster=2), ValueError, "a cluster with roles only"),
        (C(height=2, members=2), ValueError, "rows of 1024 elements cannot pass"),
        (C(height=64), ValueError, "rows of 1024 elements cannot pass"),
    ],
)
def test_wrong_configurations(config, error, text):
    x = np.zeros((200, 1024), np.float32)
    with pytest.raises(error, match=f"rms_norm_backward: .*{text}"):
        ops.rms_norm_backward(x, x, config=config, interpret=True)
    with pytest.raises(ValueError, match="rows of 77 elements cannot pass"):
        ops.rms_norm_backward(x[:, :77].copy(), x[:, :77].copy(), config=C(), interpret=True)


def test_layer_norm_far_from_zero(rng):
    """The mean is a thousand times the deviation from it."""
    (x,) = normal(rng, (6, 4096), DTYPES[0], 1)
    x, (grad,) = x + np.float32(1000), normal(rng, x.shape, DTYPES[0], 1)
    want = gradients("layer_norm", grad, x, None, 1e-5)[0]
    for config in None, C(roles=True):
        got = ops.layer_norm_backward(grad, x, config=config, interpret=True)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 16384), (2, 40000)], ids=str)
def test_softmax_of_long_rows(rng, shape):
    x, grad = normal(rng, shape, DTYPES[1], 2)
    y = ops.softmax(x, interpret=True)
    checked = plgpu.InterpretParams(detect_races=True)
    check(ops.softmax_backward(grad, y, interpret=checked), softmax_gradient(grad, y, -1), x.dtype)


@shapes
@dtypes
@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax(rng, shape, dtype, axis):
    grad, x = normal(rng, shape, dtype, 2)
    y = ops.softmax(x, axis=axis, interpret=True)
    got = ops.softmax_backward(grad, y, axis=axis, interpret=True)
    check(got, softmax_gradient(grad, y, axis), dtype)


@shapes
def test_column_sums(rng, shape):
    (x,) = normal(rng, shape, DTYPES[1], 1)
    got = ops.column_sums(x, out_dtype=np.float32, interpret=True)
    want = x.astype(np.float64).sum(tuple(range(x.ndim - 1)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_no_spills(name, n):
    """At the widths of models, with the sums of all gradients in registers where they fit."""
    bf16 = DTYPES[1]
    x, w = plgpu.ShapeDtypeStruct((4096, n), bf16), plgpu.ShapeDtypeStruct((n,), bf16)
    options = {"bias": True} if name == "layer_norm_backward" else {}
    chain = getattr(ops, name).kernel(x, x, w, **options)
    used = chain.kernel.lower(x, x, w, target="sm_90a").resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [72, 200, 6145, 6532, 8191, 9688, 59560])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_spills_on_blackwell(monkeypatch, dtype, n):
    """Widths that fill a tile badly, with all options, through shared memory and not."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    x, w = plgpu.ShapeDtypeStruct((4096, n), dtype), plgpu.ShapeDtypeStruct((n,), DTYPES[0])
    chain = ops.layer_norm_backward.kernel(x, x, w, add=x, bias=True)
    used = chain.kernel.lower(x, x, w, x, target="sm_100a").resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda x: ops.rms_norm_backward(x, x[:1]), ValueError),
        (lambda x: ops.rms_norm_backward(x, x, x[0, :2]), ValueError),
        (lambda x: ops.layer_norm_backward(x, x.astype(np.int32)), TypeError),
        (lambda x: ops.softmax_backward(x, x, axis=2), ValueError),
        (lambda x: ops.column_sums(x[0]), ValueError),
    ],
)
def test_errors(call, error):
    x = np.ones((3, 4), np.float32)
    with pytest.raises(error, match="_backward|column_sums"):
        call(x)
