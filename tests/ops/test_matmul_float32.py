"""ops.matmul of float32 matrices, by products of bfloat16 parts, against float64."""

import itertools

import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import MatmulConfig as C

f32 = np.dtype(np.float32)
CASES = {  # m, n, k, options
    "even": (64, 72, 128, {}),
    "odd": (37, 61, 99, {"bias": True, "activation": "relu"}),
    "one row": (1, 33, 200, {"bias": True}),
    "one column": (40, 1, 77, {}),
    "slices": (70, 66, 200, {"config": C(1, 64, 0, 1, slices=3), "bias": True}),
    "wide": (3, 1500, 40, {"out_dtype": np.float16}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "case, ta, tb",
    [
        pytest.param(
            *(case, ta, tb), marks=pytest.mark.exhaustive if case != "odd" and ta != tb else ()
        )
        for case, ta, tb in itertools.product(CASES, (False, True), (False, True))
    ],
)
def test_against_float64(run, rng, case, ta, tb):
    """The error is that of the parts that are dropped, far below that of bfloat16."""
    m, n, k, options = CASES[case]
    a = rng.standard_normal((k, m) if ta else (m, k)).astype(f32)
    b = rng.standard_normal((n, k) if tb else (k, n)).astype(f32)
    left = (a.T if ta else a).astype(np.float64)
    right = (b.T if tb else b).astype(np.float64)
    want, scale = left @ right, np.abs(left) @ np.abs(right)
    options, arrays = dict(options), [a, b]
    if options.pop("bias", False):
        arrays.append(rng.standard_normal(n).astype(f32))
        want = want + arrays[2]
    want = np.maximum(want, 0) if "activation" in options else want
    given = dict(zip(("bias",), arrays[2:]))
    how = None if run.way == "cuda" else True
    f = ops.matmul.kernel(a, b, **given, transpose_a=ta, transpose_b=tb, **options, interpret=how)
    got = by_steps(run.call, f, arrays)
    assert got.shape == want.shape and got.dtype == options.get("out_dtype", f32)
    bound = 2.0**-15 * scale + (2e-3 * np.abs(want) if got.dtype != f32 else 0)
    assert (np.abs(got - want) <= bound + 1e-6).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("m, ta", [(1, False), (1, True), (3, False), (8, False), (16, False)])
@pytest.mark.parametrize("n, k, tb", [(37, 330, False), (133, 512, True), (260, 1000, True)])
def test_few_rows_lose_nothing(run, rng, m, n, k, ta, tb):
    m = min(m, 8) if tb else m
    plgpu.clear_caches()
    a = rng.standard_normal((k, m) if ta else (m, k)).astype(f32)
    b = rng.standard_normal((n, k) if tb else (k, n)).astype(f32)
    left, right = (a.T if ta else a).astype(np.float64), (b.T if tb else b).astype(np.float64)
    how = {"transpose_a": ta, "transpose_b": tb, "interpret": None if run.way == "cuda" else True}
    got = by_steps(run.call, ops.matmul.kernel(a, b, **how), [a, b])
    want = left @ right
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert got.dtype == f32 and error < 6e-7
    invariant = ops.matmul(a, b, **how | {"interpret": True}, batch_invariant=True)
    error = np.linalg.norm(invariant - want) / np.linalg.norm(want)
    assert 1e-6 < error < 2e-5  # by parts, as more rows are


def test_infinities_of_few_rows(rng):
    a, b = (rng.standard_normal(s).astype(f32) for s in ((2, 40), (40, 24)))
    a[0, 3] = np.inf
    got = ops.matmul(a, b, interpret=True)
    np.testing.assert_array_equal(got[0], np.sign(b[3]) * np.inf)


TF32 = {  # m, n, k, configuration
    "chosen": (70, 90, 330, None),
    "one row": (1, 33, 200, None),
    "wide": (3, 700, 40, None),
    "long steps": (130, 66, 100, C(2, 64, 0, 1, step=64)),
    "slices": (70, 66, 200, C(1, 64, 0, 1, step=32, slices=2)),
    "swapped": (20, 130, 300, C(1, 32, 0, 1, step=32, swapped=True)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ta, tb", [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("case", TF32)
def test_tf32(run, rng, case, ta, tb):
    """Operands lose all but 10 bits of their mantissas; sums are float32."""
    m, n, k, config = TF32[case]
    a = rng.standard_normal((k, m) if ta else (m, k)).astype(f32)
    b = rng.standard_normal((n, k) if tb else (k, n)).astype(f32)
    bias = rng.standard_normal(n).astype(f32)
    how = None if run.way == "cuda" else True
    options = {"transpose_a": ta, "transpose_b": tb, "config": config, "precision": "tf32"}
    f = ops.matmul.kernel(a, b, bias=bias, **options, interpret=how)
    got = by_steps(run.call, f, [a, b, bias])
    left, right = (
        (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(f32).astype(np.float64) for x in (a, b)
    )
    left, right = left.T if ta else left, right.T if tb else right
    bound = 2.0**-18 * (np.abs(left) @ np.abs(right)) + 1e-6
    assert got.dtype == f32 and (np.abs(got - (left @ right + bias)) <= bound).all()


@pytest.mark.parametrize("target", ["sm_80", "sm_100a", "sm_120a"])
def test_other_targets(target, rng, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    plgpu.clear_caches()  # functions of ops choose once for each signature
    a, b = (rng.standard_normal(s).astype(f32) for s in ((33, 70), (70, 40)))
    got = ops.matmul(a, b, interpret=True)
    plgpu.clear_caches()
    assert np.abs(got - a.astype(np.float64) @ b).max() < 1e-3


def test_misuse(rng):
    a = np.zeros((8, 8), f32)
    with pytest.raises(NotImplementedError, match="accumulate=True with float32 operands"):
        ops.matmul(a, a, accumulate=True, out=a.copy(), interpret=True)
    with pytest.raises(ValueError, match="scale_a is for 8-bit floats"):
        ops.matmul(a, a, scale_a=np.ones(1, f32), interpret=True)
    with pytest.raises(ValueError, match="precision is one of .*, got 'fp8'"):
        ops.matmul(a, a, precision="fp8", interpret=True)
