"""ops.matmul of arrays with batch dimensions, against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu.ops import MatmulConfig as C
from pallas_mgpu.ops import matmul

bf16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def product(run, a, b, **options):
    """The result as a call gives it, each kernel run in the way of the test."""
    f = matmul.kernel(a, b, **options, interpret=None if run.way == "cuda" else True)
    arrays = [a, b, *(x for x in options.values() if isinstance(x, np.ndarray))]
    shapes = f.shapes + (None,) * (len(arrays) - 2)
    given = [x if s is None else x.reshape(s) for x, s in zip(arrays, shapes)]
    return by_steps(run.call, f.product, given).reshape(f.shape)


CASES = {  # shapes of a and b, options
    "both": ((3, 20, 40), (3, 40, 24), {}),
    "A alone": ((3, 20, 40), (40, 24), {"bias": True}),
    "A alone, transposed": ((3, 40, 20), (40, 24), {"transpose_a": True}),
    "B alone": ((20, 40), (3, 40, 24), {"bias": True, "activation": "relu"}),
    "merged": ((2, 3, 20, 40), (2, 3, 24, 40), {"transpose_b": True, "out_dtype": f32}),
    "crossed": ((2, 1, 20, 40), (3, 24, 40), {"transpose_b": True}),
    "padded": ((3, 9, 61), (3, 61, 33), {}),
    "one row": ((3, 1, 61), (3, 61, 33), {"bias": True}),
    "slices": ((2, 70, 330), (2, 330, 33), {"config": C(1, 64, 0, 1, slices=3), "bias": True}),
    "batch of one": ((1, 1, 4, 64), (1, 64, 8), {"batch_invariant": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(run, rng, case):
    shape_a, shape_b, options = CASES[case]
    a, b = (rng.standard_normal(s).astype(bf16) for s in (shape_a, shape_b))
    options = dict(options)
    left = a.astype(f32).swapaxes(-1, -2) if options.get("transpose_a") else a.astype(f32)
    right = b.astype(f32).swapaxes(-1, -2) if options.get("transpose_b") else b.astype(f32)
    want = left @ right
    if options.pop("bias", False):
        options["bias"] = rng.standard_normal(want.shape[-1]).astype(bf16)
        want = want + options["bias"].astype(f32)
    want = np.maximum(want, 0) if "activation" in options else want
    got = product(run, a, b, **options)
    assert got.shape == want.shape and got.dtype == options.get("out_dtype", bf16)
    np.testing.assert_allclose(got.astype(f32), want, rtol=1e-2, atol=1e-2)


def test_out_is_written_where_it_is(rng):
    a, b = (rng.standard_normal(s).astype(bf16) for s in ((2, 3, 8, 16), (16, 24)))
    out = np.full((2, 3, 8, 24), np.nan, bf16)
    assert matmul(a, b, out=out, interpret=True) is out
    assert out.tobytes() == matmul(a, b, interpret=True).tobytes()


def test_bits_do_not_depend_on_the_batch(rng):
    a, b = (rng.standard_normal(s).astype(bf16) for s in ((5, 30, 520), (5, 520, 72)))
    options = {"batch_invariant": True, "interpret": True}
    whole = matmul(a, b, **options)
    for k in range(5):
        assert matmul(a[k, 7:].copy(), b[k], **options).tobytes() == whole[k, 7:].tobytes()


@pytest.mark.parametrize(
    "a, b, options, exception, match",
    [
        ((2, 4, 8), (3, 8, 8), {}, ValueError, r"equal or 1, got \(2, 4, 8\) and \(3, 8, 8\)"),
        ((2, 4, 8), (8,), {}, ValueError, "two dims or more"),
        ((0, 8), (8, 4), {}, ValueError, "and elements"),
        ((2, 4, 8), (2, 4, 8), {}, ValueError, "inner dims differ, 8 and 4"),
        ((0, 4, 8), (8, 8), {}, ValueError, "and elements"),
        ((2, 8, 8), (2, 8, 8), {"accumulate": True}, NotImplementedError, "matrix by matrix"),
    ],
)
def test_misuse(a, b, options, exception, match):
    with pytest.raises(exception, match=match):
        matmul(np.zeros(a, bf16), np.zeros(b, bf16), **options, interpret=True)


def test_8_bit_operands_have_no_batches():
    x = plgpu.ShapeDtypeStruct((2, 16, 16), ml_dtypes.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="other than 16-bit operands"):
        matmul.kernel(x, x)
