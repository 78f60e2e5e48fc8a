"""ops.matmul of arrays with batch dimensions, against NumPy."""

import functools
import time

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import MatmulConfig as C
from pallas_mgpu.ops import _open_rows, matmul

bf16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3, I8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)


def product(run, a, b, **options):
    """The result as a call gives it, each kernel run in the way of the test."""
    f = matmul.kernel(a, b, **options, interpret=None if run.way == "cuda" else True)
    arrays = [a, b, *(x for x in options.values() if isinstance(x, np.ndarray))]
    if isinstance(f, _core.Reshaped):
        if run.way == "interpret":
            return f(*arrays)
        f = f.alone()
    given = [x.reshape(s) for x, s in zip(arrays, f.shapes, strict=True)]
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


SCALED = {  # dtype, shapes of a and b, of their scales or None, options
    "8 bits": (E4M3, (3, 20, 48), (3, 24, 48), None, None, {"transpose_b": True}),
    "8 bits, transposed first": (E4M3, (2, 40, 20), (3, 1, 40, 24), (), (), {"transpose_a": True}),
    "8 bits, odd": (E4M3, (3, 9, 61), (3, 33, 61), (3, 9, 1), (33,), {"transpose_b": True}),
    "a number for each": (
        E4M3,
        (3, 20, 48),
        (24, 48),
        (3, 1, 1),
        (1,),
        {"transpose_b": True, "bias": True},
    ),
    "rows and columns of each": (
        I8,
        (2, 3, 20, 40),
        (3, 40, 24),
        (2, 3, 20, 1),
        (3, 1, 24),
        {"bias": True},
    ),
    "all rows at once": (E4M3, (2, 3, 7, 40), (24, 40), (2, 3, 7, 1), None, {"transpose_b": True}),
    "rows of all": (E4M3, (3, 20, 48), (24, 48), (20,), None, {"transpose_b": True}),
    "blocks": (E4M3, (2, 70, 300), (2, 130, 300), (2, 70, 3), (2, 2, 3), {"transpose_b": True}),
    "blocks, all rows": (I8, (2, 9, 300), (130, 300), (2, 9, 3), (2, 3), {"transpose_b": True}),
    "exact sums": (I8, (3, 20, 40), (3, 40, 24), None, None, {}),
    "slices": (
        I8,
        (2, 70, 330),
        (2, 33, 330),
        (2, 70, 1),
        None,
        {"transpose_b": True, "config": C(1, 64, 0, 1, slices=3, step=128), "bias": True},
    ),
    "float32": (f32, (3, 20, 40), (3, 40, 24), None, None, {"bias": True}),
    "float32, odd": (f32, (2, 19, 41), (2, 23, 41), None, None, {"transpose_b": True}),
    "tf32": (f32, (3, 20, 40), (3, 40, 24), None, None, {"precision": "tf32"}),
}


def spread_scales(scale, shape, blocks):
    """A scale as a factor of the operand with that shape, (..., rows, K)."""
    if blocks:  # of 128 elements of K, and as many rows of B
        scale = np.repeat(scale, 128, -1)[..., : shape[-1]]
        return scale if blocks == 1 else np.repeat(scale, 128, -2)[..., : shape[-2], :]
    return scale[:, None] if scale.ndim == 1 else scale


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("case", SCALED)
def test_other_dtypes(run, rng, case):
    dtype, shape_a, shape_b, scale_a, scale_b, options = SCALED[case]
    options = dict(options)
    if dtype == I8:
        a, b = (rng.integers(-128, 128, s).astype(I8) for s in (shape_a, shape_b))
    else:
        a, b = (rng.standard_normal(s).astype(dtype) for s in (shape_a, shape_b))
    left = a.astype(np.float64)
    left = left.swapaxes(-1, -2) if options.get("transpose_a") else left
    right = b.astype(np.float64)
    right = right if options.get("transpose_b") else right.swapaxes(-1, -2)  # (..., N, K)
    of_blocks = "blocks" in case
    if scale_a is not None:
        options["scale_a"] = rng.uniform(0.5, 2, scale_a).astype(f32)
        left = left * spread_scales(options["scale_a"], left.shape, of_blocks)
    if scale_b is not None:
        options["scale_b"] = x = rng.uniform(0.5, 2, scale_b).astype(f32)
        x = x.swapaxes(-1, -2) if x.ndim > 1 and not of_blocks else x
        right = right * spread_scales(x, right.shape, 2 * of_blocks)
    want = left @ right.swapaxes(-1, -2)
    if options.pop("bias", False):
        bias = rng.standard_normal(want.shape[-1]).astype(f32)
        options = {"bias": bias, **options}  # operands come in this order
        want = want + bias
    got = product(run, a, b, **options)
    assert got.shape == want.shape
    if case == "exact sums":
        np.testing.assert_array_equal(got, want)
    else:
        unit = 1e-2 if got.dtype == bf16 else 4e-3 if "precision" in options else 1e-4
        np.testing.assert_allclose(got.astype(f32), want, rtol=unit, atol=4 * unit)


ANY_SIZES = {  # dtype, shapes of a and b for a batch of so many rows, options
    "both": (bf16, lambda n, m: ((n, m, 72), (n, 72, 136)), {"bias": True, "activation": "relu"}),
    "both, transposed": (bf16, lambda n, m: ((n, m, 136), (n, 72, 136)), {"transpose_b": True}),
    "B alone": (bf16, lambda n, m: ((m, 72), (n, 136, 72)), {"transpose_b": True}),
    "A transposed": (bf16, lambda n, m: ((n, 72, m), (n, 72, 136)), {"transpose_a": True}),
    "A alone, transposed": (bf16, lambda n, m: ((n, 72, m), (72, 24)), {"transpose_a": True}),
    "padded": (bf16, lambda n, m: ((n, m, 61), (n, 61, 40)), {}),
    "two dims": (bf16, lambda n, m: ((n, 2, m, 24), (n, 2, 24, 40)), {}),
    "invariant": (bf16, lambda n, m: ((n, m, 136), (n, 136, 72)), {"batch_invariant": True}),
    "scaled": (I8, lambda n, m: ((n, m, 48), (n, 24, 48)), {"transpose_b": True, "scale": True}),
}


@pytest.mark.parametrize("case", ANY_SIZES)
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
def test_any_sizes(case, way, rng, monkeypatch):
    """The number of matrices and of their rows is known at run time only. What stands in one of
    them is nothing to the others."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 6)
    plgpu.clear_caches()
    dtype, shapes_of, given = ANY_SIZES[case]
    ta, programs = "transpose_a" in given, set()
    for n, m in ((3, 40), (2, 151), (5, 300), (7, 33), (4, 150)):
        m = 40 if ta else m
        options, (shape_a, shape_b) = dict(given), shapes_of(n, m)
        a, b = (rng.integers(-9, 10, s).astype(dtype) for s in (shape_a, shape_b))
        wide = [x.astype(f32) for x in (a, b)]
        left, right = (
            x.swapaxes(-1, -2) if t else x for x, t in zip(wide, (ta, "transpose_b" in given))
        )
        want = left @ right
        if options.pop("bias", False):
            options["bias"] = rng.integers(-9, 10, want.shape[-1]).astype(bf16)
            want = np.maximum(want + options["bias"].astype(f32), 0)
        if options.pop("scale", False):
            options["scale_a"] = np.float32([0.25])
            want = want * 0.25
        if dtype == bf16 and a.ndim == b.ndim:
            a[-1], want[-1] = np.nan, np.nan
        out = np.full(want.shape, np.nan, bf16)
        matmul(a, b, out=out, interpret=way, **options)
        np.testing.assert_allclose(out.astype(f32), want, rtol=1e-2)
        kernel = matmul.kernel(a, b, interpret=way, **options)
        programs.add(getattr(kernel, "kernel", kernel))
    assert len(programs) == 1 or not ta


TB, TA = {"transpose_b": True}, {"transpose_a": True}
# dtype, shapes of a and b and perhaps of their scales for a batch of so many rows, options
OTHER_FORMS = {
    "odd results": (bf16, lambda n, m: ((n, m, 24), (n, 24, 33)), {}),
    "float32": (f32, lambda n, m: ((n, m, 41), (n, 41, 40)), {}),
    "float32, B transposed": (f32, lambda n, m: ((n, m, 40), (n, 23, 40)), TB),
    "float32, A transposed": (f32, lambda n, m: ((n, 24, m), (n, 24, 40)), TA),
    "tf32": (f32, lambda n, m: ((n, m, 40), (n, 40, 24)), {"precision": "tf32"}),
    "8 bits": (E4M3, lambda n, m: ((n, m, 48), (n, 48, 24)), {}),
    "8 bits, A transposed": (I8, lambda n, m: ((n, 48, m), (n, 24, 48)), TA | TB),
    "rows": (E4M3, lambda n, m: ((n, m, 48), (n, 24, 48), (n, m, 1), (n, 1, 24)), TB),
    "rows, odd": (I8, lambda n, m: ((n, m, 61), (n, 33, 61), (n, m, 1), (n, 1, 33)), TB),
    "rows of all": (E4M3, lambda n, m: ((n, m, 48), (n, 48, 24), (m, 1), (24,)), {}),
    "rows, B alone": (E4M3, lambda n, m: ((m, 48), (n, 24, 48), (m,), (n, 1, 24)), TB),
    "a number for each": (E4M3, lambda n, m: ((n, m, 48), (n, 24, 48), (n, 1, 1), (n, 1, 1)), TB),
    "blocks": (E4M3, lambda n, m: ((n, m, 300), (n, 130, 300), (n, m, 3), (n, 2, 3)), TB),
    "crossed": (bf16, lambda n, m: ((n, 1, m, 40), (1, 3, 40, 24)), {}),
    "crossed, B first": (bf16, lambda n, m: ((3, m, 40), (n, 1, 24, 40)), TB),
    "crossed, scales": (
        E4M3, lambda n, m: ((n, 1, m, 48), (2, 24, 48), (n, 1, m, 1), (2, 1, 24)), TB
    ),
    "crossed, three": (bf16, lambda n, m: ((2, 1, n, m, 24), (1, 3, n, 24, 16)), {}),
    "groups": (bf16, lambda n, m: ((n, 3, m, 40), (n, 1, 40, 24)), {}),
    "groups, scales": (
        I8, lambda n, m: ((n, 3, m, 48), (n, 1, 24, 48), (n, 3, m, 1), (n, 1, 1, 24)), TB
    ),
    "several, B shared by some": (f32, lambda n, m: ((2, n, m, 24), (n, 24, 16)), {}),
}  # fmt: skip


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("case", OTHER_FORMS)
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
        pytest.param(None, marks=pytest.mark.gpu),
    ],
    ids=("interpret", "host", "cuda"),
)
def test_any_sizes_of_other_forms(case, way, rng, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    if way is not None:
        monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 6)
    plgpu.clear_caches()
    dtype, shapes_of, given = OTHER_FORMS[case]
    ta, tb = "transpose_a" in given, "transpose_b" in given
    for n, m in ((3, 40), (2, 101), (5, 33), (2, 64)):
        m, options = 40 if ta else m, dict(given)
        shape_a, shape_b, *scales = shapes_of(n, m)
        a, b = (rng.integers(-4, 5, s).astype(dtype) for s in (shape_a, shape_b))
        if dtype == bf16:
            a.reshape(-1, *a.shape[-2:])[-1] = np.nan
        factors = [x.astype(f32) for x in (a, b)]
        factors = [x.swapaxes(-1, -2) if t else x for x, t in zip(factors, (ta, tb))]
        for k, (name, shape) in enumerate(zip(("scale_a", "scale_b"), scales)):
            scale = rng.choice([0.5, 1, 2], shape).astype(f32)
            options[name], blocks = scale, case == "blocks"
            scale = spread_scales(
                scale, (*shape[:-2], *(shape_a, shape_b)[k][-2:]), (1 + k) * blocks
            )
            scale = scale.T if len(shape) == 1 and k else scale
            factors[k] = factors[k] * (scale.swapaxes(-1, -2) if blocks and k else scale)
        want = factors[0] @ factors[1]
        kind = f32 if dtype in (f32, I8) and not scales else bf16
        out = np.full(want.shape, -77, kind)
        got = matmul(a, b, out=out, interpret=way, **options, out_dtype=kind)
        assert got is out
        np.testing.assert_allclose(out.astype(f32), want, rtol=1e-2, atol=1e-3)
        kernel = matmul.kernel(a, b, interpret=way, **options, out_dtype=kind)
        while not isinstance(kernel, _core.Kernel):
            kernel = getattr(kernel, "product", None) or kernel.kernel
        assert any(isinstance(n, plgpu.Dim) for n in kernel.definition.outs[0].shape)


def random_product(rng):
    """Operands and options of a product of small integers, and the result."""
    kind = rng.choice(["bfloat16", "float32", "tf32", "float8_e4m3fn", "int8"])
    dtype = np.dtype("float32" if kind == "tf32" else kind)
    dims = rng.integers(1, 4, rng.integers(1, 4))
    lead = [np.where(rng.random(len(dims)) < 0.6, dims, 1) for _ in "ab"]
    short = rng.integers(0, len(dims) + 1, 2) * (rng.random(2) < 0.3)
    lead = [tuple(x[n:].tolist()) for x, n in zip(lead, short if min(short) == 0 else (0, 0))]
    m, n, k = rng.choice([1, 2, 5, 8, 17, 33, 64, 65, 100, 130], 3).tolist()
    ta, tb = (rng.random(2) < (0.3, 0.5)).tolist()
    factors = [rng.integers(-3, 4, s).astype(f32) for s in ((*lead[0], m, k), (*lead[1], k, n))]
    arrays = [
        np.ascontiguousarray(x.swapaxes(-1, -2) if t else x).astype(dtype)
        for x, t in zip(factors, (ta, tb))
    ]
    options = {"transpose_a": ta, "transpose_b": tb, "out_dtype": f32}
    options |= {"precision": "tf32"} if kind == "tf32" else {}
    options |= {"batch_invariant": True} if rng.random() < 0.3 else {}
    form = rng.choice(["none", "rows", "one", "blocks", "rows of all"])
    if dtype.itemsize == 1 and form != "none":
        blocks = -(-k // 128)
        shapes = {
            "rows": ((*lead[0], m, 1), (*lead[1], 1, n)),
            "one": ((*lead[0], 1, 1), (*lead[1], 1, 1)),
            "blocks": ((*lead[0], m, blocks), (*lead[1], -(-n // 128), blocks)),
            "rows of all": ((m, 1), (1, n)),
        }[form]
        x, y = (rng.choice([0.5, 1, 2], s).astype(f32) for s in shapes)
        options |= {"scale_a": x, "scale_b": y}
        if form == "blocks":
            x = np.repeat(x, 128, -1)[..., :k]
            y = np.repeat(np.repeat(y, 128, -1)[..., :k], 128, -2)[..., :n, :].swapaxes(-1, -2)
        factors = [factors[0] * x, factors[1] * y]
    want = factors[0] @ factors[1]
    if rng.random() < 0.3:
        bias = rng.integers(-3, 4, n).astype(dtype if dtype == bf16 else f32)
        options, want = {"bias": bias, **options}, want + bias.astype(f32)
    return arrays, options, want


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 3))])
def test_random_products(seed, monkeypatch):
    """Of the programs of the sizes and of those of any sizes, by the race detector."""
    rng = np.random.default_rng(seed)
    way = plgpu.InterpretParams(detect_races=True, on_race="raise")
    for _ in range(120):
        cores, static = int(rng.choice([1, 2, 5, 132])), int(rng.choice([0, 0, 99]))
        monkeypatch.setattr(plgpu, "sm_count", lambda device=None, n=cores: n)
        monkeypatch.setattr(_open_rows, "STATIC", static)
        (a, b), options, want = random_product(rng)
        out = np.full(want.shape, np.nan, f32)
        matmul(a, b, out=out, interpret=way, **options)
        np.testing.assert_allclose(out, want, rtol=2e-3, atol=1e-3)


def test_random_sizes_have_at_most_twelve_programs(rng, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    spec = functools.partial(plgpu.ShapeDtypeStruct, dtype=bf16)
    for options in ({}, {"transpose_b": True}, {"batch_invariant": True}):
        plgpu.clear_caches()
        sizes = [*rng.integers(1, (64, 8193), (200, 2)).tolist(), (1, 300), (9, 1), (9, 2)]
        kernels = [
            matmul.kernel(spec((n, m, 520)), spec((n, 520, 520)), **options) for n, m in sizes
        ]
        programs = {getattr(kernel, "kernel", kernel) for kernel in kernels}
        assert 3 < len(programs) <= 12
        kernels = [matmul.kernel(spec((m, 520)), spec((n, 520, 520)), **options) for n, m in sizes]
        assert len({getattr(kernel, "kernel", kernel) for kernel in kernels}) <= 12


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_random_sizes_of_other_forms(case, rng, monkeypatch):
    """Programs that multiply, and those that copy; sizes of 1 are of other forms."""
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    plgpu.clear_caches()
    (dtype, shapes_of, options), multiply, copy = OTHER_FORMS[case], set(), set()
    for n, m in rng.integers(2, (64, 4097), (200, 2)).tolist():
        m = 40 if "transpose_a" in options else m
        a, b, *scales = (plgpu.ShapeDtypeStruct(s, dtype) for s in shapes_of(n, m))
        scales = [plgpu.ShapeDtypeStruct(s.shape, f32) for s in scales]
        kernel = matmul.kernel(a, b, **options, **dict(zip(("scale_a", "scale_b"), scales)))
        while not isinstance(kernel, _core.Kernel):
            copy |= {getattr(pad, "kernel", pad) for pad in getattr(kernel, "pads", ()) if pad}
            kernel = getattr(kernel, "product", None) or kernel.kernel
        multiply.add(kernel)
    assert 3 < len(multiply) <= 12 and len(copy) <= 12


@pytest.mark.parametrize("dtype, options", [(E4M3, {}), (f32, {}), (f32, {"precision": "tf32"})])
def test_copies_of_large_matrices(dtype, options, monkeypatch):
    """Their numbers are limited by the elements that an array may have."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    a, b = (plgpu.ShapeDtypeStruct((16, 8192, n), dtype) for n in (8192, 16384))
    product = matmul.kernel(a, b, **options).product
    assert product.pads[1].lower(b, target="sm_90a").as_text("cuda")


def test_sizes_that_come_often_have_a_program_of_their_own(monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    a, b = (plgpu.ShapeDtypeStruct(s, bf16) for s in ((5, 70, 128), (5, 128, 72)))
    first, deadline = matmul.kernel(a, b), time.monotonic() + 60
    repeated = matmul.kernel(a, b, deterministic=True)
    assert repeated.kernel is not first.kernel
    while (own := matmul.kernel(a, b)) is first:
        assert time.monotonic() < deadline
    assert own.kernel is not first.kernel
    assert matmul.kernel(a, b, deterministic=True) is repeated


def test_out_is_written_where_it_is(rng):
    a, b = (rng.standard_normal(s).astype(bf16) for s in ((2, 3, 8, 16), (16, 24)))
    out = np.full((2, 3, 8, 24), np.nan, bf16)
    assert matmul(a, b, out=out, interpret=True) is out
    assert out.tobytes() == matmul(a, b, interpret=True).tobytes()


def test_float32_of_several_heights(rng):
    """Programs for any number of rows, which matrices alone have, are not for batches."""
    for m in (7, 16, 37, 64, 65):
        a, b = (rng.standard_normal(s).astype(f32) for s in ((2, m, 24), (2, 24, 10)))
        got = matmul(a, b, interpret=True)
        np.testing.assert_allclose(got, a @ b, rtol=1e-3, atol=1e-3)


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


@pytest.mark.parametrize(
    "scales, exception, match",
    [
        ({"scale_a": (3, 16, 1)}, ValueError, r"of scale_a must be those of a, \(2,\), or none"),
        ({"scale_b": (1, 1, 16)}, ValueError, r"of scale_b must be those of b, \(2,\), or none"),
        ({"scale_a": (2, 5, 1)}, ValueError, "scale_a must have one of the shapes"),
        ({"scale_a": (2, 16)}, ValueError, "scale_a must have one of the shapes"),
    ],
)
def test_scales_that_do_not_fit(scales, exception, match):
    x = plgpu.ShapeDtypeStruct((2, 16, 16), E4M3)
    scales = {name: plgpu.ShapeDtypeStruct(shape, f32) for name, shape in scales.items()}
    with pytest.raises(exception, match=match):
        matmul.kernel(x, x, transpose_b=True, **scales)


def test_scales_of_8_bits_have_no_batches():
    x = plgpu.ShapeDtypeStruct((2, 16, 128), E4M3)
    scale = plgpu.ShapeDtypeStruct((2, 1, 1, 32, 16), ml_dtypes.float8_e8m0fnu)
    with pytest.raises(NotImplementedError, match="scales of 8 bits"):
        matmul.kernel(x, x, transpose_b=True, scale_a=scale, scale_b=scale)
