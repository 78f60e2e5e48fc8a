"""Softmax and its gradient along another axis than the last, of columns that are read twice
(ops/_norms_columns.py): slices of columns, extents that are known at run time only."""

import numpy as np
import pytest
from test_open_rows import kernels_in
from test_ops_norms import BF16, F16, F32, TOLERANCE, arrays, no_warnings, reference

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import NormConfig, _open_rows, softmax, softmax_backward

pytestmark = pytest.mark.covering(1, share=True)

__all__ = ["no_warnings"]  # a fixture


def call(run, x, **options):
    """softmax, by one kernel or by two."""
    kernel = softmax.kernel(x, **options, interpret=None if run.way == "cuda" else True)
    if hasattr(kernel, "definition"):
        return run.call(kernel, x)
    return run.call(kernel.second, x, run.call(kernel.first, x))


def slices(height, count, part=4):
    return NormConfig(height, part=part, staged=False, slices=count)


CASES = [
    ((300, 128), 0, BF16, slices(64, 3)),
    ((300, 136), 0, BF16, slices(64, 3, 2)),  # the last columns are fewer
    ((2, 300, 77), 1, F16, slices(64, 3)),  # odd rows
    ((2, 500, 72), 1, F32, slices(32, 20, 1)),  # the last slices are empty
    ((500, 72), 0, F32, slices(32, 1)),  # one kernel
    ((3, 50, 7), 1, F32, slices(32, 2)),
    ((9, 40, 4), 1, BF16, slices(64, 2)),  # one lane for each row
]


@pytest.mark.parametrize("shape, axis, dtype, config", CASES, ids=str)
def test_slices(run, rng, shape, axis, dtype, config):
    x = arrays(rng, "softmax", shape, dtype)[0]
    got, want = call(run, x, axis=axis, config=config), reference("softmax", x, axis=axis)
    assert got.dtype == dtype and got.shape == shape
    np.testing.assert_allclose(got.astype(F32), want, rtol=TOLERANCE[dtype], atol=1e-6)


def test_another_dtype(run, rng):
    x = arrays(rng, "softmax", (300, 40), BF16)[0]
    got = call(run, x, axis=0, config=slices(32, 2), out_dtype=F32)
    assert got.dtype == F32
    np.testing.assert_allclose(got, reference("softmax", x, axis=0), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("config", [slices(16, 1), slices(16, 3)])
def test_special_values(rng, config):
    """Slices of -inf alone, columns of -inf, NaN; in place, without races."""
    x = rng.standard_normal((512, 32)).astype(F32) * 100 + 1000
    x[:200, 0] = x[300:, 2] = x[:, 3] = -np.inf
    x[400, 4] = np.nan
    with np.errstate(invalid="ignore"):
        want = reference("softmax", x, axis=0)
    params = plgpu.InterpretParams(detect_races=True, detect_uninitialized=True, seeds=2)
    softmax(x, axis=0, config=config, out=x, interpret=params)
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-30)
    assert np.isnan(x[:, 3]).all() and np.isnan(x[:, 4]).all()


def gradient(grad, y, axis):
    grad, y = grad.astype(np.float64), y.astype(np.float64)
    return y * (grad - (grad * y).sum(axis, keepdims=True))


@pytest.mark.parametrize("static", [0, 99])
@pytest.mark.parametrize("shape, axis", [((1300, 40), 0), ((2, 7, 5, 3), 1), ((3, 1, 50), 1)])
def test_gradient(rng, monkeypatch, static, shape, axis):
    monkeypatch.setattr(_open_rows, "STATIC", static)
    plgpu.clear_caches()
    x, grad = rng.standard_normal((2, *shape)).astype(F32)
    y = softmax(x, axis=axis, interpret=True)
    np.testing.assert_allclose(y, reference("softmax", x, axis=axis), rtol=1e-5, atol=1e-7)
    got = softmax_backward(grad, y, axis=axis, interpret=True)
    want = gradient(grad, y, axis)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("function", [softmax, softmax_backward], ids=["softmax", "gradient"])
def test_any_sizes(rng, function, monkeypatch):
    """200 random shapes have at most 12 programs, whose results are those of one shape."""
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    plgpu.clear_caches()
    made = []
    for i in range(200):
        outer, n, inner = rng.integers((1, 1, 2), (4, 1500, 300 if i % 10 else 20)).tolist()
        shape, axis = ((n, inner), 0) if i % 3 else ((outer, n, inner), 1)
        given = [plgpu.ArrayInfo(shape, BF16)] * (1 + (function is softmax_backward))
        made.append(function.kernel(*given, axis=axis, interpret=True))
        if i % 40 == 0:
            x, grad = rng.standard_normal((2, *shape)).astype(BF16)
            y = softmax(x, axis=axis, interpret=True)
            want = reference("softmax", x, axis=axis)
            np.testing.assert_allclose(y.astype(F32), want, rtol=2**-8, atol=1e-6)
            if function is softmax_backward:
                got = function(grad, y, axis=axis, interpret=True).astype(F32)
                want = gradient(grad, y, axis)
                np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3 * np.abs(want).max())
    assert len({id(kernel) for kernel in kernels_in(made)}) <= 12


def test_views_and_batches_of_any_sizes(rng, monkeypatch):
    """Arrays that are not contiguous, and elements of a batch, have programs of their shape."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    x = rng.standard_normal((3, 40, 700)).astype(F32)
    turned = x.transpose(0, 2, 1)
    got = softmax(turned, axis=1, interpret=True)
    np.testing.assert_allclose(got, reference("softmax", turned, axis=1), rtol=1e-5, atol=1e-7)
    got = plgpu.vmap(lambda x: softmax(x, axis=0, interpret=True))(x)
    np.testing.assert_allclose(got, reference("softmax", x, axis=1), rtol=1e-5, atol=1e-7)
    kernel = softmax.kernel(x, axis=1, interpret=True)
    with pytest.raises(ValueError, match="argument 0 must have 84000 elements, got 40"):
        kernel(x[0, :, :1].copy())


@pytest.mark.parametrize("shape", [(2, 2**25), (2**15, 2**15)])
def test_shapes_too_large_for_any_sizes(monkeypatch, shape):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    found = softmax.kernel(plgpu.ArrayInfo(shape, BF16), axis=0)
    assert all(not isinstance(k, _core.Reshaped) for k in vars(found).values())
