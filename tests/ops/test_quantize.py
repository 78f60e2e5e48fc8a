"""8-bit elements of square blocks and by a given scale, and results that are quantised as they are
computed, against float64."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
STEP = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0}  # of rounding, relative
SQUARE = 128, 128
DTYPES = pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def checked():
    return plgpu.InterpretParams(detect_races=True, on_race="raise", seed=3)


@pytest.mark.parametrize("shape", [(1, 1), (200, 300), (128, 128), (3, 4096), (513, 77)], ids=str)
@pytest.mark.parametrize("to", LARGEST)
@DTYPES
def test_square_blocks(rng, shape, to, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    wide = x.astype(np.float64)
    q, scales = ops.quantize(x, dtype=to, block=SQUARE, interpret=checked())
    padded = np.zeros([-(-extent // 128) * 128 for extent in shape])
    padded[: shape[0], : shape[1]] = wide
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    np.testing.assert_allclose(scales, np.abs(blocks).max((1, 3)) / LARGEST[to], rtol=1e-5)
    back = ops.dequantize(q, scales, block=SQUARE, out_dtype=np.float32, interpret=checked())
    of_elements = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    assert (np.abs(back - wide) <= STEP[to] * np.abs(wide) + 0.51 * of_elements).all()


@pytest.mark.parametrize("shape", [(1,), (3, 5, 77), (70, 4096), (2, 100000)], ids=str)
@pytest.mark.parametrize("to", LARGEST)
@DTYPES
def test_by_scale(rng, shape, to, dtype):
    """Elements beyond the largest number become that; the magnitude is that of the argument."""
    x = (rng.standard_normal(shape) * 8).astype(dtype)
    scale, most = np.float32([0.03]), LARGEST[to]
    q, largest = ops.quantize_by_scale(x, scale, dtype=to, interpret=checked())
    wide = x.astype(np.float64)
    assert largest.shape == (1,) and largest[0] == np.abs(wide).max()
    want = np.clip(wide / scale, -most, most)
    got = q.astype(np.float64)
    assert (np.abs(got - want) <= np.maximum(STEP[to] * np.abs(want), 0.51)).all()
    assert np.abs(got).max() <= most


def quantized(value, block, mx, to):
    """Scales, or those below powers of two for mx."""
    n = value.shape[-1]
    size = block or n
    padded = np.zeros((*value.shape[:-1], -(-n // size) * size))
    padded[..., :n] = value
    return np.abs(padded.reshape(*value.shape[:-1], -1, size)).max(-1) / LARGEST[to]


def check(found, want, block, mx, to):
    q, scales = found
    assert q.dtype.name == to and q.shape == want.shape
    size = block or want.shape[-1]
    top = quantized(want, block, mx, to)
    got = scales.astype(np.float64).reshape(top.shape)
    if mx:
        assert (got >= top * 0.99).all() and (got <= top * 2.02).all()
    else:
        np.testing.assert_allclose(got, top, rtol=1e-2)
    back = ops.dequantize(q, scales, block=block, out_dtype=np.float32, interpret=True)
    of_elements = np.repeat(got, size, -1)[..., : want.shape[-1]]
    error = (STEP[to] + 0.02) * np.abs(want) + 0.6 * of_elements
    assert (np.abs(back - want) <= error).all()


FORMS = [(None, False), (128, False), (32, True), (64, False)]
FUSED = [(3, 1024), (2, 5, 384), (4, 4096), (3, 256), (2, 8192), (2, 9216), (2, 1000)]


@pytest.mark.parametrize("block, mx", FORMS)
@pytest.mark.parametrize("shape", FUSED, ids=str)
@DTYPES
def test_norms(rng, shape, block, mx, dtype):
    """One kernel, and two where a row is too long or no whole number of blocks."""
    to = "int8" if block == 64 else "float8_e4m3fn"
    x, w = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[-1:]).astype(dtype)
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-3)
    how = {"block": block, "mx": mx, "dtype": to, "eps": 1e-3, "interpret": checked()}
    check(ops.rms_norm_quantize(x, w, **how), y * w.astype(np.float64), block, mx, to)
    check(ops.rms_norm_quantize(x, **how), y, block, mx, to)


@pytest.mark.parametrize("block, mx", FORMS)
@pytest.mark.parametrize("shape", FUSED, ids=str)
@DTYPES
def test_gated(rng, shape, block, mx, dtype):
    to = "int8" if block == 64 else "float8_e4m3fn"
    x, up = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    wide = x.astype(np.float64)
    y = wide / (1 + np.exp(-wide)) * up.astype(np.float64)
    how = {"block": block, "mx": mx, "dtype": to, "interpret": checked()}
    check(ops.gated_linear_unit_quantize(x, up, **how), y, block, mx, to)
    check(ops.gated_linear_unit_quantize(np.concatenate([x, up], -1), **how), y, block, mx, to)


def test_relu_leaves_groups_of_zeros():
    x = -np.ones((2, 256), np.float32)
    options = {"activation": "relu", "block": 128, "interpret": True}
    q, scales = ops.gated_linear_unit_quantize(x, x, **options)
    assert (q.astype(np.float32) == 0).all() and (scales > 0).all()


def test_errors():
    x = np.ones((4, 256), np.float32)
    with pytest.raises(ValueError, match="quantize: blocks"):
        ops.quantize(x[None], block=SQUARE)
    with pytest.raises(ValueError, match="quantize: block must be"):
        ops.quantize(x, block=(64, 128))
    with pytest.raises(ValueError, match="dequantize: scales"):
        ops.dequantize(x.astype(np.int8), x, block=SQUARE)
    with pytest.raises(ValueError, match="quantize_by_scale: scale"):
        ops.quantize_by_scale(x, x)
    with pytest.raises(NotImplementedError, match="quantize_by_scale: out="):
        out = x.astype(np.int8), np.ones(1, np.float32)
        ops.quantize_by_scale(x, x[0, :1], dtype="int8", out=out, interpret=True)
    with pytest.raises(ValueError, match="rms_norm_quantize: weight"):
        ops.rms_norm_quantize(x, x)
    with pytest.raises(TypeError, match="rms_norm_quantize: dtype"):
        ops.rms_norm_quantize(x, dtype="int32")
    with pytest.raises(ValueError, match="gated_linear_unit_quantize: activation"):
        ops.gated_linear_unit_quantize(x, activation="tan")
    with pytest.raises(ValueError, match="gated_linear_unit_quantize: scales of mx"):
        ops.gated_linear_unit_quantize(x, mx=True)


def test_machine_code():
    """Nothing is spilled where one kernel does it."""
    from pallas_mgpu.ops import quantize_fused
    from pallas_mgpu.ops.quantize import Problem, _by_scale, _square

    bf16, to, f32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "f4"))
    spec = plgpu.ShapeDtypeStruct
    x = Problem.of((512, 4096), bf16, to, 128, False)
    kernels = [
        (_square((512, 4096), bf16, to, False, None), [spec((512, 4096), bf16)]),
        (
            _by_scale((512, 4096), bf16, to, 1056, None),
            [spec((512, 4096), bf16), spec((1,), f32)],
        ),
        (
            quantize_fused._norm(x, 1e-6, True, None),
            [spec((512, 4096), bf16), spec((4096,), bf16)],
        ),
        (quantize_fused._gated(x, True, "silu", None), [spec((512, 8192), bf16)]),
    ]
    for kernel, args in kernels:
        assert kernel.lower(*args, target="sm_90a").resources()["spill_bytes"] == 0
