"""ops.gated_matmul with weights of int8, int4 and 8-bit floats beside NumPy."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import MixedConfig, TensorMemoryMixedConfig, gated_matmul

pytestmark = pytest.mark.covering(1, share=True)

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, I4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
E4 = np.dtype(ml_dtypes.float8_e4m3fn)
C = MixedConfig
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Blocks do several tiles; no warnings."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def check(run, rng, m, n, k, groups, weights=I8, dtype=BF16, activation="silu", config=None):
    x = rng.standard_normal((m, k)).astype(dtype)
    if weights == E4:
        w = rng.standard_normal((2 * n, k)).astype(weights)
    else:
        info = ml_dtypes.iinfo(weights)
        w = rng.integers(info.min, info.max + 1, (2 * n, k)).astype(weights)
    scales = None
    full = w.astype(np.float64)
    if groups:
        unit = 2 / np.abs(full).max() / np.sqrt(k)
        scales = ((rng.random((groups, 2 * n)) + 0.5) * unit).astype(F32)
        full *= np.repeat(scales.astype(np.float64), k // groups, 0).T
    both = x.astype(np.float64) @ full.T
    with np.errstate(over="ignore"):
        want = ACTIVATIONS[activation](both[:, :n]) * both[:, n:]
    how = {"transpose_b": True, "activation": activation, "config": config}
    how["interpret"] = None if run.way == "cuda" else True
    kernel = gated_matmul.kernel(x, w, scale_b=scales, **how)
    given = [x, w, *([] if scales is None else [scales])]
    if hasattr(kernel, "pads"):
        given = [a if pad is None else run.call(pad, a) for a, pad in zip(given, kernel.pads)]
        kernel = kernel.product
    got = run.call(kernel, *given)
    assert got.dtype == dtype and got.shape == (m, n)
    unit = {F16: 2**-11, BF16: 2**-8}[dtype]
    atol = 1e-5 * np.abs(both).max() ** 2
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2 * unit, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(run, rng, activation):
    check(run, rng, 5, 40, 128, 2, activation=activation)


@pytest.mark.parametrize("weights", [I8, I4, E4], ids=str)
@pytest.mark.parametrize("groups", [1, 3])
def test_weights(run, rng, weights, groups):
    """Scales of columns are loaded by the lanes, those of groups arrive with the weights."""
    check(run, rng, 20, 72, 384, groups, weights, F16)


def test_without_scales(run, rng):
    check(run, rng, 9, 24, 64, 0, E4)


CONFIGS = {  # with extents m, n, k, groups of scales
    C(1, 16, 4, 2, 64): (3, 136, 512, 4),
    C(2, 16, 2, 4, 64, turns=2): (16, 200, 512, 4),
    C(1, 64, 2, 8, 64, turns=2): (60, 72, 512, 1),
    C(3, 48, 1, 2, 64, 2): (150, 200, 256, 2),
    C(2, 256, 1, 0, 64, cluster=2): (300, 136, 512, 4),
    C(2, 160, 1, 0, 128, ordered=True, shares=2): (300, 72, 512, 4),
    C(2, 128, 1, 0, 64, ahead=4, cluster=2): (140, 152, 448, 1),
}


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_configurations(run, rng, config):
    check(run, rng, *CONFIGS[config], config=config)


_X, _W = np.zeros((4, 128), BF16), np.zeros((32, 128), I8)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"transpose_b": False}, NotImplementedError, r"\(2 N, K\), with transpose_b=True"),
        ({"up": _W}, NotImplementedError, "use mixed_matmul and gated_linear_unit"),
        ({"return_products": True}, NotImplementedError, "and their products"),
        ({"w": _W[:20]}, NotImplementedError, "N a multiple of 8"),
        ({"activation": "tanh"}, ValueError, "activation must be one of silu"),
        ({"scale_b": np.ones((2, 31), F32)}, ValueError, r"must have the shape \(G, 32\)"),
        ({"w": _W.astype(BF16), "scale_b": np.ones((1, 32), F32)}, ValueError, "scale_b is for"),
        ({"x": _X.astype(F32)}, TypeError, "x must be float16 or bfloat16"),
        ({"config": C(4)}, ValueError, "gated_matmul: a MixedConfig has 1 to 3 consumers"),
        ({"config": TensorMemoryMixedConfig()}, NotImplementedError, "on Blackwell"),
    ],
)
def test_errors(change, error, words):
    given = {"x": _X, "w": _W, "transpose_b": True, **change}
    with pytest.raises(error, match=words):
        gated_matmul(interpret=True, **given)
