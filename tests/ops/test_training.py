"""Gated linear units, rotary embedding and cross entropy, with their gradients, against float64:
odd shapes, every dtype; gradients also against differences of the forward."""

import ml_dtypes
import numpy as np
import pytest
from fuzz.ops_training import ACTIVATIONS

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops.matmul import Product, _kernel

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
UNIT = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Rows that nothing divides move through SMEM with a warning."""
    yield


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def check(got, want, dtype):
    assert got.dtype == dtype and got.shape == want.shape
    unit = UNIT[np.dtype(dtype).name]
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=unit, atol=unit)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 130), (9, 2050), (40, 64)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@dtypes
def test_gated_linear_unit(rng, shape, activation, dtype):
    gate, up, grad = (normal(rng, shape, dtype) for _ in range(3))
    both = np.concatenate([gate, up], -1)
    f = ACTIVATIONS[activation]
    g, u, d = (x.astype(np.float64) for x in (gate, up, grad))
    options = {"activation": activation, "interpret": True}
    check(ops.gated_linear_unit(gate, up, **options), f(g) * u, dtype)
    check(ops.gated_linear_unit(both, **options), f(g) * u, dtype)
    slope = np.where(g > 0, 1.0, 0.0)
    if activation != "relu":
        slope = (f(g + 1e-6) - f(g - 1e-6)) / 2e-6
    want = d * u * slope, d * f(g)
    for got, expected in zip(ops.gated_linear_unit_backward(grad, gate, up, **options), want):
        check(got, expected, dtype)
    got = ops.gated_linear_unit_backward(grad, both, **options)
    check(got, np.concatenate(want, -1), dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 33, 3, 64), (1, 100, 2, 10), (1, 7, 1, 128)])
@dtypes
def test_rotary(rng, shape, dtype):
    x = normal(rng, shape, dtype)
    angles = rng.random((shape[1], shape[3] // 2)) * 7
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = ops.rotary(x, cos, sin, interpret=True)
    half = shape[3] // 2
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half:].astype(np.float64)
    rotated = pairs * np.exp(1j * angles)[None, :, None]
    check(got, np.concatenate([rotated.real, rotated.imag], -1), dtype)
    back = ops.rotary(got, cos, sin, inverse=True, interpret=True)
    check(back, x.astype(np.float64), dtype)


@pytest.mark.parametrize("shape", [(2, 33, 3, 64), (1, 100, 2, 10), (3, 40, 5, 128)])
@dtypes
def test_rotary_with_norm(rng, shape, dtype):
    """QK-norm, and its gradients from those of the pairs as complex numbers."""
    x, weight = normal(rng, shape, dtype), normal(rng, shape[3:], dtype)
    grad = normal(rng, shape, dtype)
    angles = rng.random((shape[1], shape[3] // 2)) * 7
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half, eps = shape[3] // 2, 1e-5

    def turned(v, angles):
        pairs = (v[..., :half] + 1j * v[..., half:]) * np.exp(1j * angles)[None, :, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    wide, w, g = (v.astype(np.float64) for v in (x, weight, grad))
    factor = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
    y = wide * factor
    check(ops.rotary(x, cos, sin, weight, eps=eps, interpret=True), turned(y * w, angles), dtype)
    g = turned(g, -angles)
    gw = g * w
    want = (gw - y * (gw * y).mean(-1, keepdims=True)) * factor, (g * y).sum((0, 1, 2))
    how = plgpu.InterpretParams(detect_races=True, on_race="raise", seed=1)
    got = ops.rotary_backward(grad, x, cos, sin, weight, eps=eps, interpret=how)
    check(got[0], want[0], dtype)
    np.testing.assert_allclose(
        got[1].astype(np.float64), want[1], rtol=4 * UNIT[dtype.name], atol=3e-2
    )


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (5, 7), (3, 2048), (4, 5001), (130, 33), (3, 5000), (2, 4104), (2, 20480)],
    ids=str,
)
@dtypes
def test_cross_entropy(rng, shape, dtype):
    logits = (4 * rng.standard_normal(shape)).astype(dtype)
    targets = rng.integers(0, shape[1], shape[0]).astype(np.int32)
    targets[0] = -100
    x = logits.astype(np.float64)
    lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    loss = np.where(targets == -100, 0, lse - x[np.arange(len(x)), np.maximum(targets, 0)])
    got = ops.cross_entropy(logits, targets, interpret=True)
    np.testing.assert_allclose(got[0], loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], lse, rtol=1e-5, atol=1e-5)
    grad = rng.standard_normal(shape[0]).astype(np.float32)
    onehot = np.arange(shape[1]) == targets[:, None]
    want = (np.exp(x - lse[:, None]) - onehot) * np.where(targets == -100, 0, grad)[:, None]
    options = {"interpret": True}
    check(ops.cross_entropy_backward(grad, logits, targets, got[1], **options), want, dtype)
    ops.cross_entropy_backward(grad, logits, targets, got[1], out=logits, **options)
    check(logits, want, dtype)  # in the place of the logits


def test_a_target_that_is_no_class(rng):
    logits, targets = normal(rng, (2, 5), np.float32), np.asarray([5, 2], np.int32)
    losses, _ = ops.cross_entropy(logits, targets, interpret=True)
    assert np.isnan(losses[0]) and np.isfinite(losses[1])


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("n", [1000, 4096, 128256])
def test_no_spills_of_cross_entropy(name, n):
    S = plgpu.ShapeDtypeStruct
    x, t, f = S((64, n), DTYPES[1]), S((64,), np.int32), S((64,), np.float32)
    kernel = ops.cross_entropy.kernel(x, t)
    args = x, t
    if name == "backward":
        kernel, args = ops.cross_entropy_backward.kernel(f, x, t, f), (f, x, t, f)
    assert kernel.lower(*args, target="sm_90a").resources()["spill_bytes"] == 0


@pytest.mark.parametrize("n", [64, 14336])
@pytest.mark.parametrize("packed", [False, True])
def test_no_spills_of_gated_linear_unit(n, packed):
    half = plgpu.ShapeDtypeStruct((64, n), DTYPES[1])
    gate = plgpu.ShapeDtypeStruct((64, 2 * n), DTYPES[1]) if packed else half
    args = (half, gate) if packed else (half, gate, gate)
    kernel = ops.gated_linear_unit_backward.kernel(*args)
    assert kernel.lower(*args, target="sm_90a").resources()["spill_bytes"] == 0


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda x, t: ops.gated_linear_unit(x, x[:1]), ValueError),
        (lambda x, t: ops.gated_linear_unit(x[:, :3]), ValueError),
        (lambda x, t: ops.gated_linear_unit(x, activation="tan"), ValueError),
        (lambda x, t: ops.gated_linear_unit_backward(x, x), ValueError),
        (lambda x, t: ops.rotary(x, x, x), ValueError),
        (lambda x, t: ops.rotary(x[None, :, None], x, x), ValueError),
        (lambda x, t: ops.rotary(x[None, :, None], x[:, :2], x[:, :2], t), TypeError),
        (lambda x, t: ops.rotary(x[None, :, None], x[:, :2], x[:, :2], x), ValueError),
        (
            lambda x, t: ops.rotary(x[None, :, None], x[:, :2], x[:, :2], x[0], inverse=True),
            ValueError,
        ),
        (
            lambda x, t: ops.rotary_backward(x, x[None, :, None], x[:, :2], x[:, :2], x[0]),
            ValueError,
        ),
        (lambda x, t: ops.cross_entropy(x, t[:1]), ValueError),
        (lambda x, t: ops.cross_entropy(x.astype(np.int32), t), TypeError),
        (lambda x, t: ops.cross_entropy_backward(x, x, t, x), ValueError),
    ],
)
def test_errors(call, error):
    x, t = np.ones((3, 4), np.float32), np.zeros(3, np.int32)
    with pytest.raises(error, match="gated_linear_unit|rotary|cross_entropy"):
        call(x, t)


def _silu_slope(x):
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))


def _gelu_slope(x):
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


ACTIVATIONS_BACKWARD = {
    ("silu", False): _silu_slope,
    ("gelu", False): _gelu_slope,
    ("relu", False): lambda x: x > 0,
    ("relu", True): lambda y: y > 0,
    ("tanh", False): lambda x: 1 - np.tanh(x) ** 2,
    ("tanh", True): lambda y: 1 - y * y,
}


@pytest.mark.parametrize("shape", [(1, 1), (70, 40), (2, 300, 264), (33, 1000), (5, 256)], ids=str)
@pytest.mark.parametrize("activation, of_result", ACTIVATIONS_BACKWARD)
@dtypes
def test_activation_backward(rng, shape, activation, of_result, dtype):
    grad, x = normal(rng, shape, dtype), normal(rng, shape, dtype)
    slope = ACTIVATIONS_BACKWARD[activation, of_result](x.astype(np.float64))
    options = {"activation": activation, "of_result": of_result, "interpret": True}
    want = grad.astype(np.float64) * slope
    check(ops.activation_backward(grad, x, **options), want, dtype)
    got, sums = ops.activation_backward(grad, x, bias=True, out_dtype=np.float32, **options)
    check(got, want, dtype)
    np.testing.assert_allclose(sums, want.reshape(-1, shape[-1]).sum(0), rtol=1e-3, atol=1e-3)


def test_errors_of_activation_backward():
    x = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="activation by its result must be one of relu, tanh"):
        ops.activation_backward(x, x, activation="gelu", of_result=True)
    with pytest.raises(ValueError, match="activation_backward: grad and x"):
        ops.activation_backward(x, x[:1])
    with pytest.raises(TypeError, match="activation_backward: x"):
        ops.activation_backward(x, x.astype(np.int32))


# ---- AdamW, 8-bit elements -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (3, 7), (5000,), (2, 2048)], ids=str)
@dtypes
def test_adamw(rng, shape, dtype):
    """Three steps in place against the definition in float64."""
    p, g = normal(rng, shape, dtype), normal(rng, shape, dtype)
    m, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    rate, beta1, beta2, eps, decay = 0.01, 0.9, 0.99, 1e-8, 0.1
    want, wm, wv = p.astype(np.float64), 0, 0
    for step in (1, 2, 3):
        settings = np.asarray([rate, beta1, beta2, eps, decay, step], np.float32)
        ops.adamw(p, g, m, v, settings, out=(p, m, v), interpret=True)
        d = g.astype(np.float64)
        wm, wv = beta1 * wm + (1 - beta1) * d, beta2 * wv + (1 - beta2) * d * d
        root = np.sqrt(wv / (1 - beta2**step)) + eps
        want = want * (1 - rate * decay) - rate / (1 - beta1**step) * wm / root
    unit = UNIT[dtype.name]
    np.testing.assert_allclose(p.astype(np.float64), want, rtol=3 * unit, atol=3 * unit)
    np.testing.assert_allclose(m, wm, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(v, wv, rtol=1e-4, atol=1e-6)


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (3, 130), (2, 3, 256), (2, 5000), (7, 33), (48, 256), (33, 384), (70, 16), (5, 1536)],
    ids=str,
)
@pytest.mark.parametrize("to", LARGEST)
@pytest.mark.parametrize("block, mx", [(None, False), (128, False), (32, True), (64, False)])
def test_quantize(rng, shape, to, block, mx):
    x = (rng.standard_normal(shape) * 10).astype(np.float32)
    x[0] = 0  # a group of zeros stays one
    q, scales = ops.quantize(x, dtype=to, block=block, mx=mx, interpret=True)
    assert q.dtype.name == to and q.shape == shape
    n = shape[-1]
    size = block or n
    padded = np.zeros((*shape[:-1], -(-n // size) * size))
    padded[..., :n] = x
    groups = padded.reshape(*shape[:-1], -1, size)
    want = np.abs(groups).max(-1) / LARGEST[to]
    got = scales.astype(np.float64).reshape(want.shape)
    there = want > 0
    if mx:
        assert scales.dtype.name == "float8_e8m0fnu"
        ratio = got[there] / want[there]
        assert (ratio >= 1 - 1e-6).all() and (ratio < 2 + 1e-6).all()
    else:
        np.testing.assert_allclose(got[there], want[there], rtol=1e-5)
    back = ops.dequantize(q, scales, block=block, out_dtype=np.float32, interpret=True)
    assert (back[0] == 0).all()
    unit = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0}[to]
    floor = np.repeat(got[..., None], size, -1).reshape(padded.shape)[..., :n]
    assert (np.abs(back - x) <= unit * np.abs(x) + 0.51 * floor).all()


def test_errors_of_quantize_and_adamw():
    x = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match="quantize: block"):
        ops.quantize(x, block=48)
    with pytest.raises(ValueError, match="quantize: scales of mx"):
        ops.quantize(x, mx=True)
    with pytest.raises(TypeError, match="quantize: dtype"):
        ops.quantize(x, dtype="int32")
    with pytest.raises(ValueError, match="dequantize: scales"):
        ops.dequantize(x.astype(np.int8), x)
    with pytest.raises(ValueError, match="adamw: settings"):
        ops.adamw(x, x, x, x, x)


# ---- products that are added to what is there ----------------------------------------------------


@pytest.mark.parametrize("shape", [(100, 72, 56), (300, 256, 200), (1, 64, 64), (130, 520, 1000)])
@pytest.mark.parametrize("ta, tb", [(False, False), (True, False), (False, True)])
def test_accumulate(rng, shape, ta, tb):
    """Into a float32 array; m, n, k that nothing divides, with copies of padded operands."""
    m, n, k = shape
    a = normal(rng, (k, m) if ta else (m, k), np.float16)
    b = normal(rng, (n, k) if tb else (k, n), np.float16)
    c = normal(rng, (m, n), np.float32)
    want = c + (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    options = {"transpose_a": ta, "transpose_b": tb, "out_dtype": np.float32}
    got = ops.matmul(a, b, accumulate=True, out=c, interpret=True, **options)
    assert got is c
    np.testing.assert_allclose(c, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        ops.MatmulConfig(1, 64, cluster=1, buffers=1),
        ops.MatmulConfig(2, 128, cluster=2, stages=3),
        ops.MatmulConfig(2, 128, cluster=1, cluster_n=2),
        ops.MatmulConfig(1, 128, cluster=1, split=2),
        ops.MatmulConfig(1, 32, cluster=1, step=128),
        ops.MatmulConfig(3, 128, cluster=1, buffers=4),
    ],
    ids=str,
)
def test_accumulate_with_configs(rng, config, dtype):
    """Several tiles for each block, buffers of all numbers, blocks that divide K; under any
    schedule, without races."""
    a, b = normal(rng, (3000, 96), np.float16), normal(rng, (96, 264), np.float16)
    c = normal(rng, (3000, 264), dtype)
    want = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    how = plgpu.InterpretParams(detect_races=True, on_race="raise", seed=7)
    ops.matmul(a, b, accumulate=True, out=c, out_dtype=dtype, config=config, interpret=how)
    error = 1e-3 if dtype == np.float32 else 2e-2
    np.testing.assert_allclose(c.astype(np.float64), want, rtol=error, atol=2 * error)


def test_clusters_accumulate_without_fences():
    """Blocks of a cluster release slots to each other without waiting for their stores."""
    f16, f32, spec = np.dtype(np.float16), np.dtype(np.float32), plgpu.ShapeDtypeStruct
    x = Product(1024, 512, 256, (f16, f16), f32, False, False, accumulate=True)
    kernel = _kernel(x, ops.MatmulConfig(2, 256, cluster=2, buffers=1), 132, None)
    text = kernel.lower(spec((1024, 256), f16), spec((256, 512), f16)).as_text("cuda")
    assert "mbarrier_arrive_remote" in text and "mbarrier_arrive_release" not in text


def test_errors_of_accumulate():
    a = np.ones((8, 8), np.float16)
    with pytest.raises(ValueError, match="must be given"):
        ops.matmul(a, a, accumulate=True, interpret=True)
    with pytest.raises(NotImplementedError, match="bias or an activation"):
        ops.matmul(a, a, activation="relu", accumulate=True, out=a.copy(), interpret=True)
    for options in ({}, {"activation": "relu", "config": ops.FewRowsConfig()}):
        with pytest.raises(NotImplementedError, match="matmul: return_product=True with"):
            ops.matmul(a, a, return_product=True, interpret=True, **options)
    with pytest.raises(NotImplementedError, match="share both A and B"):
        shared = ops.MatmulConfig(cluster=2, cluster_n=2)
        ops.matmul(a, a, accumulate=True, out=a.copy(), config=shared, interpret=True)
    with pytest.raises(NotImplementedError, match="multiple of 16 bytes"):
        ops.matmul(a, a[:, :3].copy(), accumulate=True, out=a[:, :3].copy(), interpret=True)


@pytest.mark.parametrize(
    "config",
    [
        None,
        ops.MatmulConfig(1, 64, cluster=1, buffers=1),
        ops.MatmulConfig(2, 128, cluster=2, buffers=4),
        ops.MatmulConfig(1, 128, cluster=1, split=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 64, 64), (300, 200, 96), (2100, 136, 200)], ids=str)
def test_products_before_activations(rng, config, shape):
    """Both results; rows that TMA cannot store, several tiles for each block."""
    m, n, k = shape
    a, b, bias = normal(rng, (m, k), np.float16), normal(rng, (k, n), np.float16), None
    bias = normal(rng, (n,), np.float16)
    want = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
    how = plgpu.InterpretParams(detect_races=True, on_race="raise", seed=5)
    options = {"bias": bias, "activation": "silu", "config": config, "interpret": how}
    y, z = ops.matmul(a, b, return_product=True, **options)
    np.testing.assert_allclose(z.astype(np.float64), want, rtol=1e-2, atol=2e-2)
    np.testing.assert_allclose(
        y.astype(np.float64), want / (1 + np.exp(-want)), rtol=1e-2, atol=2e-2
    )


# ---- the checker ---------------------------------------------------------------------------------


def _checked_calls(rng):
    x, w = normal(rng, (9, 130), np.float32), normal(rng, (130,), np.float32)
    long, h = normal(rng, (2, 9000), np.float32), normal(rng, (40, 64), np.float16)
    targets, lse = np.zeros(9, np.int32), np.ones(9, np.float32)
    angles = rng.random((7, 32)).astype(np.float32)
    settings = np.asarray([0.1, 0.9, 0.99, 1e-8, 0.1, 1], np.float32)
    return {
        "rms_norm_backward": lambda **o: ops.rms_norm_backward(x, x, w, **o),
        "long rows": lambda **o: ops.layer_norm_backward(long, long, long[0], bias=True, **o),
        "softmax_backward": lambda **o: ops.softmax_backward(x, x, axis=0, **o),
        "column_sums": lambda **o: ops.column_sums(np.tile(x, (40, 1)), **o),
        "gated_linear_unit_backward": lambda **o: ops.gated_linear_unit_backward(x, x, x, **o),
        "rotary": lambda **o: ops.rotary(h.reshape(1, 10, 4, 64)[:, :7], angles, angles, **o),
        "cross_entropy": lambda **o: ops.cross_entropy(x, targets, **o),
        "cross_entropy_backward": lambda **o: ops.cross_entropy_backward(lse, x, targets, lse, **o),
        "cross_entropy of long rows": lambda **o: ops.cross_entropy(long, targets[:2], **o),
        "cross_entropy_backward in place": lambda **o: ops.cross_entropy_backward(
            lse[:2], long, targets[:2], lse[:2], out=long, **o
        ),
        "activation_backward": lambda **o: ops.activation_backward(x, x, bias=True, **o),
        "adamw": lambda **o: ops.adamw(x, x, x, x, settings, **o),
        "quantize": lambda **o: ops.quantize(x, block=32, mx=True, **o),
        "quantize blocks": lambda **o: ops.quantize(h, block=64, **o),
        "dequantize": lambda **o: ops.dequantize(*ops.quantize(h, block=32), block=32, **o),
        "accumulate": lambda **o: ops.matmul(
            h, h.T.copy(), accumulate=True, out=h[:, :40].copy(), **o
        ),
    }


@pytest.mark.parametrize("name", _checked_calls(np.random.default_rng(0)))
def test_no_races(rng, name):
    _checked_calls(rng)[name](interpret=plgpu.InterpretParams(detect_races=True, on_race="raise"))
    assert not plgpu.get_races().races
