"""ops.ragged_dot with matrices of int8, int4 and 8-bit floats beside NumPy: scales of columns and
of groups of K, odd extents, scales that are 0 or far apart."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import RaggedConfig, TensorMemoryConfig, _open_rows, ragged_dot

pytestmark = pytest.mark.covering(1, share=True)

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, I4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UNIT = {F16: 2**-11, BF16: 2**-8, F32: 2**-22}  # of the rounding of a result
C = RaggedConfig


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Blocks do several tiles; no warnings."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def weights_of(rng, shape, dtype):
    if dtype in (E4, E5):
        return rng.standard_normal(shape).astype(dtype)
    info = ml_dtypes.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)  # also the least number


def check(run, lhs, rhs, sizes, scales=None, **options):
    sizes = np.array(sizes, np.int32)
    full, k = rhs.astype(np.float64), lhs.shape[-1]
    if scales is not None:
        spread = np.repeat(scales.astype(np.float64), k // scales.shape[1], 1)
        full = full * spread.transpose(0, 2, 1)
    given = [lhs, rhs, sizes, *([] if scales is None else [scales])]
    options |= {"transpose_rhs": True, "interpret": None if run.way == "cuda" else True}
    kernel = ragged_dot.kernel(lhs, rhs, sizes, scale_rhs=scales, **options)
    if hasattr(kernel, "pads"):
        given = [a if pad is None else run.call(pad, a) for a, pad in zip(given, kernel.pads)]
        kernel = kernel.product
    got = run.call(kernel, *given)
    assert got.dtype == np.dtype(options.get("out_dtype", lhs.dtype))
    assert got.shape == (*lhs.shape[:-1], rhs.shape[1])
    if lhs.ndim == 3:
        counts = np.clip(sizes, 0, lhs.shape[1])
        pairs = [(got[g, :c], lhs[g, :c], full[g]) for g, c in enumerate(counts)]
    else:
        ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), len(lhs))
        rows = [slice(a, b) for a, b in zip((0, *ends[:-1]), ends)]
        pairs = [(got[r], lhs[r], full[g]) for g, r in enumerate(rows)]
        assert not got[ends[-1] :].any()
    for found, left, right in pairs:
        want = left.astype(np.float64) @ right.T
        close = 2e-6 * np.sqrt(k) * max(np.abs(right).max(), 1e-30)
        np.testing.assert_allclose(
            found.astype(np.float64),
            want,
            rtol=UNIT[got.dtype],
            atol=close * np.abs(left).max(initial=1),
        )
    return getattr(kernel, "kernel", kernel)


def operands(rng, m, n, k, sizes, groups, weights, dtype=BF16, scales=F32):
    lhs = rng.standard_normal((m, k)).astype(dtype)
    rhs = weights_of(rng, (len(sizes), n, k), weights)
    if not groups:
        return lhs, rhs, sizes
    return lhs, rhs, sizes, (rng.random((len(sizes), groups, n)) - 0.5).astype(scales)


CASES = {  # rows, columns, K, sizes, groups of scales, configuration
    "no scales": (50, 24, 64, (20, 0, 30), 0, None),
    "scales of columns": (90, 136, 192, (70, 3, 10), 1, C(1, 128, 0, 1)),
    "groups": (150, 200, 256, (20, 0, 130), 2, None),
    "large tiles": (150, 200, 512, (20, 0, 130), 4, C(2, 256)),
    "scales in rows that are copied": (150, 203, 256, (-3, 40, 200), 4, C(2, 256, 0, 1)),
    "tiles of 192 rows": (300, 264, 512, (270, 3, 10), 4, C(2, 192)),
    "groups of an odd number of steps": (70, 130, 384, (30, 40), 2, C(2, 192, 0, 1)),
    "a ring that goes round": (130, 72, 768, (64, 66), 3, C(1, 64, 2, 1)),
    "a block without columns": (60, 128, 256, (30, 30), 2, C(2, 64, 0, 2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", [I8, I4], ids=str)
def test_groups_of_rows(run, rng, case, weights):
    *extents, sizes, groups, config = CASES[case]
    given = operands(rng, *extents, sizes, groups, weights)
    check(run, *given, config=config, out_dtype=F32)


@pytest.mark.parametrize("weights", [E4, E5], ids=str)
@pytest.mark.parametrize("dtype, scales", [(F16, F16), (BF16, BF16)], ids=str)
def test_float8(run, rng, weights, dtype, scales):
    given = operands(rng, 60, 77, 256, (33, 0, 20), 2, weights, dtype, scales)
    check(run, *given)


def test_arrays_of_groups(run, rng):
    lhs = rng.standard_normal((3, 70, 128)).astype(BF16)
    rhs = weights_of(rng, (3, 72, 128), I8)
    scales = (rng.random((3, 2, 72)) + 0.5).astype(BF16)
    check(run, lhs, rhs, (70, 0, 33), scales, out_dtype=F32)


def test_scales_of_0_and_far_apart(run, rng):
    """Sums are held in units of scales: these may be 0 at first, in between, always."""
    lhs, rhs, sizes, scales = operands(rng, 40, 96, 512, (10, 30), 4, I8)
    scales[0, 0, :20] = 0
    scales[0, :3, 20:30] = 0
    scales[0, 2:, 30:40] = 0
    scales[0, :, 40:50] = 0
    scales[1, 1] *= 1e-30
    scales[1, 2, :20] = 1e-38
    check(run, lhs, rhs, sizes, scales, out_dtype=F32)


class Interpreter:
    way = "interpret"

    @staticmethod
    def call(kernel, *arrays):
        return kernel(*arrays)


def test_programs_for_any_sizes(rng, monkeypatch):
    """Rows and groups are sizes of the call; where scales have odd rows, which are copied, the
    number of groups is not."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    made = []
    for m, sizes, n in [(40, (10, 20), 96), (90, (5, 0, 80), 96), (9, (9,), 77), (60, (33,), 77)]:
        given = operands(rng, m, n, 256, sizes, 2, I8, scales=BF16)
        made.append(check(Interpreter, *given, out_dtype=F32))
    assert made[0] is made[1] and made[2] is made[3]


_LHS, _RHS = np.zeros((40, 256), BF16), np.zeros((2, 136, 256), I8)


@pytest.mark.parametrize(
    "change, exception, match",
    [
        ({"transpose_rhs": False, "rhs": np.zeros((2, 256, 136), I8)}, NotImplementedError, "G, N"),
        ({"scale_lhs": np.ones((40, 2), F32)}, ValueError, "scale_lhs is for"),
        ({"scale_rhs": np.ones((2, 3, 136), F32)}, ValueError, "groups of a multiple of 64"),
        ({"scale_rhs": np.ones((2, 136), F32)}, ValueError, r"the shape \(2, S, 136\)"),
        ({"scale_rhs": np.ones((2, 2, 136), I8)}, TypeError, "a float dtype"),
        ({"lhs": _LHS[:, :200], "rhs": _RHS[:, :, :200]}, ValueError, "multiple of 64, got 200"),
        ({"lhs": _LHS.astype(F32)}, TypeError, "must have the same dtype"),
    ],
)
def test_misuse(change, exception, match):
    given = {"lhs": _LHS, "rhs": _RHS, "transpose_rhs": True, **change}
    with pytest.raises(exception, match=match):
        ragged_dot(group_sizes=np.array([3, 4], np.int32), interpret=True, **given)


def test_on_blackwell():
    config = TensorMemoryConfig(pair=False, dynamic=False)
    with pytest.raises(NotImplementedError, match="weights of 8 or 4 bits, on Blackwell"):
        ragged_dot(
            _LHS,
            _RHS,
            np.array([3, 4], np.int32),
            transpose_rhs=True,
            config=config,
            interpret=True,
        )
