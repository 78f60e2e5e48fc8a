"""ops.matmul of int8 matrices beside NumPy: sums are exact, whatever divides K."""

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import FewRowsConfig, TensorMemoryConfig
from pallas_mgpu.ops import MatmulConfig as C

BF16, F32, I32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.int32)
CASES = {  # m, n, k, transpose_a, transpose_b, configuration
    "chosen": (70, 90, 300, False, True, None),
    "one row": (1, 90, 300, False, True, None),
    "rows of K nowhere": (37, 61, 99, True, False, None),
    "persistent": (300, 200, 333, False, True, C(1, 64, 2, 1, step=128)),
    "K in two": (130, 96, 520, False, True, C(2, 96, 0, 1, split=2, step=128)),
    "slices": (130, 70, 1040, False, True, C(1, 64, 0, 1, slices=3, step=128)),
    "shares": (200, 300, 1040, False, True, C(2, 64, 0, 1, shares=2, step=128)),
    "swapped": (37, 200, 520, False, True, C(2, 48, 0, 1, step=128, swapped=True)),
    "swapped, K in two": (5, 70, 520, False, True, C(1, 8, 0, 1, split=2, step=64, swapped=True)),
}

BLOCK_CASES = [
    None,
    C(2, 256, 2, 1, step=128),  # consumers alternate
    C(1, 128, 0, 1, split=2, step=128),
    C(2, 64, 0, 2, step=128, slices=2),
]


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scaled", [False, True], ids=["sums", "scales"])
def test_against_numpy(run, rng, monkeypatch, case, scaled):
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 5)
    m, n, k, ta, tb, config = CASES[case]
    a = rng.integers(-128, 128, (k, m) if ta else (m, k)).astype(np.int8)
    b = rng.integers(-128, 128, (n, k) if tb else (k, n)).astype(np.int8)
    want = (a.T if ta else a).astype(np.int64) @ (b.T if tb else b).astype(np.int64)
    given, options = {}, {"transpose_a": ta, "transpose_b": tb, "config": config}
    if scaled:
        given = {
            "bias": rng.standard_normal(n).astype(F32),
            "scale_a": rng.random((m, 1)).astype(F32) + 0.5,
            "scale_b": rng.random((1, n)).astype(F32) + 0.5,
        }
        want = want * given["scale_a"].astype(np.float64) * given["scale_b"] + given["bias"]
    how = None if run.way == "cuda" else True
    f = ops.matmul.kernel(a, b, **given, **options, interpret=how)
    got = by_steps(run.call, f, [a, b, *given.values()])
    if scaled:
        assert got.dtype == BF16
        np.testing.assert_allclose(got.astype(F32), want, rtol=2**-7, atol=1e-2)
    else:
        assert got.dtype == I32
        np.testing.assert_array_equal(got, want)


def test_results_of_other_dtypes(rng):
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((33, 70), (40, 70)))
    sums = a.astype(np.int64) @ b.T.astype(np.int64)
    for dtype in (np.float32, np.float16):
        got = ops.matmul(a, b, transpose_b=True, out_dtype=dtype, interpret=True)
        want = np.asarray(sums / 4096, dtype)  # as float16 they do not fit
        scale = np.float32([1 / 4096])
        scaled = ops.matmul(a, b, transpose_b=True, scale_a=scale, out_dtype=dtype, interpret=True)
        np.testing.assert_allclose(scaled.astype(F32), want.astype(F32), rtol=1e-3)
        assert got.dtype == scaled.dtype == dtype
    got = ops.matmul(a, b, transpose_b=True, activation="relu", interpret=True)
    np.testing.assert_allclose(got.astype(F32), np.maximum(sums, 0), rtol=2**-8)


I8 = np.zeros((32, 32), np.int8)


@pytest.mark.parametrize(
    "change, exception, match",
    [
        (dict(b=I8.astype(np.float16)), TypeError, "got int8 and float16"),
        (
            dict(out_dtype=np.int32, scale_a=np.ones(1, F32)),
            TypeError,
            "int32 is for int8 operands",
        ),
        (dict(out_dtype=np.int32, activation="relu"), TypeError, "without scales, bias and act"),
        (dict(out_dtype=np.int8), TypeError, "must be float16, bfloat16, float32 or int32, got"),
        (dict(bias=np.zeros(32, np.int32)), ValueError, "bias must be float16 or"),
        (
            dict(scale_a=np.ones((32, 1), F32), scale_b=np.ones((1, 1), F32), config=C(step=32)),
            ValueError,
            r"step of 8-bit operands is one of \[64, 128, 256\]",
        ),
        (dict(config=FewRowsConfig()), ValueError, "a MatmulConfig for 8-bit operands"),
        (dict(config=TensorMemoryConfig()), NotImplementedError, "int8 operands on other GPUs"),
        (dict(accumulate=True, out=np.zeros((32, 32), F32)), NotImplementedError, "8 or 4 bits"),
        (dict(precision="tf32"), ValueError, "'tf32' is for float32 operands, got int8"),
    ],
)
def test_misuse(change, exception, match):
    given = {"a": I8, "b": I8, "transpose_b": True, **change}
    with pytest.raises(exception, match=match):
        ops.matmul(interpret=True, **given)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("config", BLOCK_CASES, ids=str)
def test_scales_of_blocks(run, rng, config):
    m, n, k = 150, 200, 600
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((m, k), (n, k)))
    scale_a, scale_b = (rng.random(s).astype(F32) + 0.5 for s in ((m, 5), (2, 5)))
    wide = np.repeat(scale_a, 128, 1)[:, :k], np.repeat(np.repeat(scale_b, 128, 0), 128, 1)[:n, :k]
    want = (a * wide[0]).astype(np.float64) @ (b * wide[1]).T.astype(np.float64)
    options = {"transpose_b": True, "config": config, "out_dtype": F32}
    given = {"scale_a": scale_a, "scale_b": scale_b}
    how = None if run.way == "cuda" else True
    f = ops.matmul.kernel(a, b, **given, **options, interpret=how)
    got = by_steps(run.call, f, [a, b, scale_a, scale_b])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("target", ["sm_80", "sm_100a"])
def test_other_targets(target, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    plgpu.clear_caches()
    try:
        with pytest.raises(NotImplementedError, match="int8 operands on other GPUs than Hopper"):
            ops.matmul(I8, I8, interpret=True)
        a = np.zeros((8, 8), F32)
        with pytest.raises(NotImplementedError, match="tf32 on other GPUs than Hopper"):
            ops.matmul(a, a, precision="tf32", interpret=True)
    finally:
        plgpu.clear_caches()
