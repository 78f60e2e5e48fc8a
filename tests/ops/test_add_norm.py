"""Norms of a sum with a residual, against float64."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops

UNIT = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20}
SHAPES = [(1, 1), (5, 130), (2, 3, 512), (33, 64), (3, 2048), (2, 5000), (2, 8200)]
SHAPES += [(7, 1000), (3, 1500), (3, 3856), (2, 4193), (9, 300)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_add_norm(rng, name, shape, dtype):
    dtype = np.dtype(dtype)
    x, r = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    w, b = (rng.standard_normal(shape[-1:]).astype(dtype) for _ in range(2))
    vectors = [w] if name == "rms_norm" else [w, b]
    how = plgpu.InterpretParams(detect_races=True, on_race="raise", seed=2)
    got, total = getattr(ops, f"add_{name}")(x, r, *vectors, eps=1e-3, interpret=how)
    want = (x.astype(np.float32) + r.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(total, want)
    wide = want.astype(np.float64)
    wide = wide if name == "rms_norm" else wide - wide.mean(-1, keepdims=True)
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-3) * w.astype(np.float64)
    y = y if name == "rms_norm" else y + b.astype(np.float64)
    unit = UNIT[dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), y, rtol=2 * unit, atol=4 * unit)
    plain, _ = getattr(ops, f"add_{name}")(x, r, eps=1e-3, interpret=True)
    assert plain.dtype == dtype and plain.shape == shape


def test_errors():
    x = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="add_rms_norm: residual"):
        ops.add_rms_norm(x, x[:2])
    with pytest.raises(ValueError, match="add_rms_norm: residual"):
        ops.add_rms_norm(x, x.astype(np.float16))
    with pytest.raises(ValueError, match="add_layer_norm: bias"):
        ops.add_layer_norm(x, x, x[0], x[:, 0])
    with pytest.raises(TypeError, match="add_layer_norm: weight"):
        ops.add_layer_norm(x, x, np.ones(8, np.int32))


@pytest.mark.parametrize("n", [512, 2048, 8192, 16384])
def test_registers(n):
    """Nothing is spilled."""
    from pallas_mgpu.ops.add_norm import Problem, _kernel

    bf16, spec = np.dtype(ml_dtypes.bfloat16), plgpu.ShapeDtypeStruct
    for name, dtypes in (("rms_norm", (bf16, bf16, None)), ("layer_norm", (bf16, bf16, bf16))):
        kernel = _kernel(Problem(name, 4096, n, 1e-6, dtypes, (4096, n)), None)
        args = [spec((4096, n), bf16)] * 2 + [spec((n,), bf16)] * (1 + (dtypes[2] is not None))
        assert kernel.lower(*args, target="sm_90a").resources()["spill_bytes"] == 0
