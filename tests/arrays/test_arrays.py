"""Arithmetic on register arrays: every op against NumPy on random data, odd shapes, all dtypes
and promotions."""

import math
import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(128,), (1,), (3,), (127,), (129,), (1000,), (64, 64), (7, 33), (3, 5, 9), (128, 1)]
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), bf16]
F32 = np.float32
INTS = [np.dtype(d) for d in ("int8", "int16", "int32", "uint8", "uint16", "uint32")]


def floats(rng, shape, dtype, low=-4, high=4):
    return rng.uniform(low, high, shape).astype(np.float32).astype(dtype)


def ints(rng, shape, dtype):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


def ulps(got, want, dtype):
    """Distance in units of the last place of dtype; NaNs and infinities must agree."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    ok = ~np.isnan(want)
    got, want = got[ok], want[ok]
    fi = ml_dtypes.finfo(dtype)
    same = got == want
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.maximum(np.abs(want), float(fi.tiny))
        ulp = np.exp2(np.floor(np.log2(scale))) * float(fi.eps)
        d = np.abs(got - want) / ulp
    return float(np.max(np.where(same, 0, d), initial=0))


@pytest.mark.parametrize("shape", SHAPES)
def test_add_one(run, rng, shape):
    """The first example of the documents, at any shape."""
    x = floats(rng, shape, np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    np.testing.assert_array_equal(run(body, x, x), x + 1)


UNARY = {
    "exp": (jnp.exp, np.exp, 2),
    "exp2": (jnp.exp2, np.exp2, 2),
    "log": (jnp.log, np.log, 2),
    "log2": (jnp.log2, np.log2, 3),
    "sqrt": (jnp.sqrt, np.sqrt, 1),
    "tanh": (jnp.tanh, np.tanh, 3),
    "sin": (jnp.sin, np.sin, 3),
    "cos": (jnp.cos, np.cos, 3),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), 3),
    "erf": (lax.erf, np.vectorize(math.erf), 3),
    "log1p": (lambda x: jnp.log1p(jnp.abs(x)), lambda x: np.log1p(np.abs(x)), 2),
    "floor": (jnp.floor, np.floor, 0),
    "ceil": (jnp.ceil, np.ceil, 0),
    "rint": (jnp.round, np.rint, 0),
    "round": (lax.round, lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5), 0),
    "abs": (jnp.abs, np.abs, 0),
    "neg": (lax.neg, np.negative, 0),
    "sign": (jnp.sign, np.sign, 0),
    "square": (jnp.square, np.square, 1),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary_float(run, rng, name, dtype):
    """Unary functions round once from float32 accuracy."""
    f, host, bound = UNARY[name]
    x = floats(rng, (257,), dtype)
    if name in ("log", "log2", "sqrt", "rsqrt"):
        x = np.abs(x) + np.asarray(0.01, dtype)
    x[:7] = np.asarray([0.5, 1.5, 2.5, 1, 2, 0.25, 3], dtype)

    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    got = run(body, x, x)
    want = host(x.astype(np.float64)).astype(np.float32).astype(dtype)
    assert ulps(got, want, dtype) <= (bound if dtype == np.float32 else max(1, bound > 0))


SPECIALS = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1, -1, 0.5, -0.5, 3.4e38], np.float32
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bf16], ids=str)
def test_special_values(run, dtype):
    """NaN, infinities, signed zeros and denormals through max, min, comparisons, abs, clip,
    where. Of 16 bits two at a time."""
    with np.errstate(over="ignore"):
        specials = SPECIALS.astype(dtype)
    grid = np.meshgrid(specials, specials)
    # a whole number of elements for each lane, and more than one
    a, b = (np.resize(v, 256).astype(dtype) for v in grid)

    def body(a_ref, b_ref, hi_ref, lo_ref, lt_ref, ne_ref, cl_ref, sel_ref):
        a, b = a_ref[...], b_ref[...]
        hi_ref[...] = jnp.maximum(a, b)
        lo_ref[...] = jnp.minimum(a, b)
        lt_ref[...] = (a < b).astype(jnp.int32)
        ne_ref[...] = (a != b).astype(jnp.int32)
        cl_ref[...] = jnp.clip(a, -1, 1)
        sel_ref[...] = jnp.where(a > b, a, b)

    i = np.zeros(a.shape, np.int32)
    hi, lo, lt, ne, cl, sel = run(body, (a, a, i, i, a, a), a, b)
    a, b, hi, lo, cl, sel = (v.astype(np.float32) for v in (a, b, hi, lo, cl, sel))
    np.testing.assert_array_equal(hi, np.maximum(a, b))
    np.testing.assert_array_equal(lo, np.minimum(a, b))
    both = ~np.isnan(a) & ~np.isnan(b) & (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(hi[both]), np.signbit(a[both]) & np.signbit(b[both]))
    np.testing.assert_array_equal(np.signbit(lo[both]), np.signbit(a[both]) | np.signbit(b[both]))
    np.testing.assert_array_equal(lt, (a < b).astype(np.int32))
    np.testing.assert_array_equal(ne, (a != b).astype(np.int32))
    np.testing.assert_array_equal(cl, np.clip(a, -1, 1))
    np.testing.assert_array_equal(sel, np.where(a > b, a, b))


def assert_quotients(run, got, want):
    if run.way == "cuda":
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2 * ulp(want.dtype), atol=0)
    else:
        np.testing.assert_array_equal(got, want)


def ulp(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_float(run, rng, dtype):
    """+ - * / round per op; a GPU divides float32 to 2 ulp."""
    a, b = floats(rng, (300,), dtype), floats(rng, (300,), dtype, 0.5, 4)

    def body(a_ref, b_ref, s_ref, d_ref, p_ref, q_ref):
        a, b = a_ref[...], b_ref[...]
        s_ref[...], d_ref[...], p_ref[...], q_ref[...] = a + b, a - b, a * b, a / b

    got = run(body, (a, a, a, a), a, b)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    for g, w in zip(got, (a32 + b32, a32 - b32, a32 * b32)):
        np.testing.assert_array_equal(g, w.astype(dtype))
    assert_quotients(run, got[3], (a32 / b32).astype(dtype))


@pytest.mark.parametrize("dtype", [d for d in INTS if d.itemsize > 1], ids=str)
def test_binary_int(run, rng, dtype):
    """Integers wrap; // floors, lax.div truncates, % has the sign of the divisor."""
    a, b = ints(rng, (500,), dtype), ints(rng, (500,), dtype)
    b[b == 0] = 3
    if dtype.kind == "i":
        low = np.iinfo(dtype).min
        b[(a == low) & (b == -1)] = 5

    def body(a_ref, b_ref, *outs):
        a, b = a_ref[...], b_ref[...]
        values = (
            a + b,
            a - b,
            a * b,
            a // b,
            a % b,
            lax.div(a, b),
            lax.rem(a, b),
            a & b,
            a | b,
            a ^ b,
            ~a,
        )
        for o, v in zip(outs, values):
            o[...] = v

    got = run(body, (a,) * 11, a, b)
    wide = (a.astype(np.int64), b.astype(np.int64))
    quotient = np.sign(wide[0]) * np.sign(wide[1]) * (np.abs(wide[0]) // np.abs(wide[1]))
    with np.errstate(over="ignore"):
        want = (
            a + b,
            a - b,
            a * b,
            a // b,
            a % b,
            quotient.astype(dtype),
            (wide[0] - quotient * wide[1]).astype(dtype),
            a & b,
            a | b,
            a ^ b,
            ~a,
        )
    for k, (g, w) in enumerate(zip(got, want)):
        np.testing.assert_array_equal(g, w, err_msg=str(k))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int16, np.uint16])
def test_shifts(run, rng, dtype):
    x = ints(rng, (200,), np.dtype(dtype))
    n = rng.integers(0, np.dtype(dtype).itemsize * 8, (200,)).astype(dtype)

    def body(x_ref, n_ref, l_ref, r_ref, log_ref, ar_ref):
        x, n = x_ref[...], n_ref[...]
        l_ref[...] = x << n
        r_ref[...] = x >> n
        log_ref[...] = lax.shift_right_logical(x, n)
        ar_ref[...] = lax.shift_right_arithmetic(x, n)

    left, right, logical, arith = run(body, (x,) * 4, x, n)
    unsigned, signed = np.dtype(f"u{x.dtype.itemsize}"), np.dtype(f"i{x.dtype.itemsize}")
    np.testing.assert_array_equal(left, np.left_shift(x, n))
    np.testing.assert_array_equal(right, np.right_shift(x, n))
    np.testing.assert_array_equal(logical, (x.view(unsigned) >> n.view(unsigned)).view(x.dtype))
    np.testing.assert_array_equal(arith, (x.view(signed) >> n.view(signed)).view(x.dtype))


def equal(got, want, text=""):
    """Bitwise up to NaN; NumPy does not see that a bfloat16 is NaN."""
    if want.dtype == bf16:
        assert got.dtype == bf16, text
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(got, want, err_msg=text)


def convert(x, to):
    """The rule of the language: floats to ints saturate, NaN gives 0; to bool is != 0."""
    to = np.dtype(to)
    if to == bool:
        return x != 0
    if x.dtype.kind not in "iub" and to.kind in "iu":
        info = np.iinfo(to)
        wide = np.trunc(x.astype(np.float64))
        return (
            np.where(np.isnan(wide), 0, np.clip(wide, info.min, info.max))
            .astype(np.int64)
            .astype(to)
        )
    if x.dtype.kind in "iub" and to.kind not in "iub":
        with np.errstate(over="ignore"):
            return (
                x.astype(np.float64).astype(np.float32).astype(to)
                if to != np.float32
                else x.astype(to)
            )
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(to)


@pytest.mark.parametrize("source", [np.dtype(bool), *INTS, *FLOATS], ids=str)
def test_convert(run, rng, source):
    """astype from each dtype to every other."""
    if source == bool:
        x = rng.integers(0, 2, 300).astype(bool)
    elif source in INTS:
        x = ints(rng, (300,), source)
    else:
        x = (floats(rng, (300,), np.float32) * np.exp2(rng.integers(-8, 20, 300))).astype(source)
        x[:6] = np.asarray([np.nan, np.inf, -np.inf, -0.0, 0.5, -0.5], source)
    targets = [np.dtype(bool), *INTS, *FLOATS]

    def body(x_ref, *outs):
        x = x_ref[...]
        for o, t in zip(outs, targets):
            o[...] = x.astype(t)

    got = run(body, tuple(np.zeros(300, t) for t in targets), x)
    for g, t in zip(got, targets):
        want = convert(x, t)
        if source.kind in "iu" and source.itemsize == 4 and t in (np.float16, bf16):
            assert ulps(g, want, t) <= 1  # one rounding or two
        else:
            equal(g, want, f"{source} -> {t}")


def test_weak_types(run):
    """Python numbers adopt the array's dtype, NumPy scalars keep theirs."""
    x = np.arange(128).astype(bf16)

    def body(x_ref, a_ref, b_ref, i_ref):
        x = x_ref[...]
        weak, strong, i = x * 1.5, x * np.float32(1.5), x_ref[...].astype(jnp.int32)
        assert weak.dtype == jnp.bfloat16 and strong.dtype == jnp.float32
        assert (i * 1.5).dtype == jnp.float32 and (i + True).dtype == jnp.int32
        assert (i / 2).dtype == jnp.float32 and (i.astype(jnp.float16) * i).dtype == jnp.float16
        a_ref[...], b_ref[...], i_ref[...] = weak, strong, i // 3 + i % 5

    a, b, i = run(body, (x, x.astype(np.float32), np.zeros(128, np.int32)), x)
    np.testing.assert_array_equal(a, (x.astype(np.float32) * 1.5).astype(bf16))
    np.testing.assert_array_equal(b, x.astype(np.float32) * np.float32(1.5))
    n = np.arange(128)
    np.testing.assert_array_equal(i, x.astype(np.int32) // 3 + x.astype(np.int32) % 5)
    assert n.size == 128


TABLE = "bool int8 uint8 int16 uint16 int32 uint32 bfloat16 float16 float32".split()
JOIN = {  # promotion of strongly typed dtypes, row x column
    ("int8", "uint8"): "int16",
    ("int8", "uint16"): "int32",
    ("int8", "uint32"): "int32",
    ("uint8", "int16"): "int16",
    ("int16", "uint16"): "int32",
    ("int16", "uint32"): "int32",
    ("uint16", "int32"): "int32",
    ("int32", "uint32"): "int32",
    ("bfloat16", "float16"): "float32",
}


def test_promotion_table():
    """Every pair of dtypes joins as the table of the language says."""
    for i, a in enumerate(TABLE):
        for j, b in enumerate(TABLE):
            x, y = (a, b) if i <= j else (b, a)
            want = JOIN.get((x, y), JOIN.get((y, x), y))
            assert jnp.promote_types(a, b).name == want, (a, b)
    for small in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        for other in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", small):
            assert jnp.promote_types(small, other).name == small
            assert jnp.promote_types(other, small).name == small
        assert jnp.result_type(jnp.dtype(small), 1, 2.5).name == small


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(128, 64), (100, 50), (64, 8), (1, 129), (3, 7)])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions(run, rng, shape, axis):
    """sum, max, min over rows, columns and all, at any extents."""
    x = floats(rng, shape, np.float32)
    out = np.zeros(np.sum(x, axis=axis).shape, np.float32)

    def body(x_ref, s_ref, hi_ref, lo_ref):
        x = x_ref[...]
        s_ref[...] = jnp.sum(x, axis=axis)
        hi_ref[...] = jnp.max(x, axis=axis)
        lo_ref[...] = x.min(axis)

    s, hi, lo = run(body, (out, out, out), x)
    np.testing.assert_allclose(s, x.astype(np.float64).sum(axis), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(hi, x.max(axis))
    np.testing.assert_array_equal(lo, x.min(axis))


@pytest.mark.parametrize("n", [1000, 2048])
def test_reductions_in_a_row(run, rng, n):
    """Reductions that follow each other share the memory between warps; some need others."""
    x = floats(rng, (n,), np.float32)

    def body(x_ref, o_ref):
        x = x_ref[...]
        y, i = x * x, (x * 8).astype(jnp.int32)
        sums = [jnp.sum(v) for v in (x, y, x + y)]
        high = jnp.max(x), jnp.max(y)
        mixed = jnp.sum(i).astype(jnp.float32), jnp.sum(x), jnp.min(x)
        centred = jnp.sum((x - sums[0] / n) ** 2)
        for k, v in enumerate((*sums, *high, *mixed, centred)):
            o_ref[k] = v

    found = run(body, np.zeros(9, np.float32), x)
    x = x.astype(np.float64)
    i = (x.astype(np.float32) * 8).astype(np.int32)
    sums = [v.sum() for v in (x, x * x, x + x * x)]
    want = *sums, x.max(), (x * x).max(), i.sum(), x.sum(), x.min(), ((x - x.mean()) ** 2).sum()
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
def test_equal_elements_are_added_up(run, rng, dtype):
    """One number in all elements: its sum in its own dtype, without a loop."""
    x = rng.integers(-9, 9, 4).astype(dtype)

    def body(x_ref, o_ref):
        x = jnp.broadcast_to(x_ref[2], (16, 24))
        o_ref[...] = lax.reduce(x, np.zeros((), dtype), lax.add, (1,))

    got = run(body, plgpu.ShapeDtypeStruct((16,), dtype), x)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.full(16, 24 * float(x[2])))


# true in the corners, in the middle, nowhere, everywhere but once, everywhere
MASKS = ["first", "last", "none", "but one", "all"]


def mask_of(kind, shape):
    m = np.full(shape, kind in ("but one", "all"))
    if kind in ("first", "last"):
        m.flat[0 if kind == "first" else -1] = True
    if kind == "but one":
        m.flat[m.size // 2] = False
    return m


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("shape", [(64, 128), (3, 5), (1, 1), (130, 9), (7,), (640,)], ids=str)
@pytest.mark.parametrize("layout", [None, plgpu.Layout.WGMMA], ids=["any", "wgmma"])
def test_any_and_all(run, shape, layout):
    """Over every axis and all, of every kind of mask, as methods, functions and lax reductions."""
    if layout and len(shape) < 2:
        pytest.skip("a layout of matrices")
    axes = [None, *range(len(shape))] if len(shape) > 1 else [None, 0]
    masks = np.stack([mask_of(k, shape) for k in MASKS]).astype(np.float32)

    def body(x_ref, *outs):
        for k in range(len(MASKS)):
            x = plgpu.load(x_ref.at[k], layout=layout)
            outs_of_k = iter(outs)
            for axis in axes:
                all_axes = tuple(range(len(shape))) if axis is None else (axis,)
                for value in (
                    jnp.any(x, axis),
                    (x != 0).all(axis=axis),
                    lax.reduce_or(x != 0, all_axes),
                    lax.reduce_and(x > 0, [a - len(shape) for a in all_axes]),
                ):
                    next(outs_of_k)[k] = value.astype(np.int32)

    shapes = [np.any(masks[0], axis=a).shape for a in axes for _ in range(4)]
    outs = [plgpu.ShapeDtypeStruct((len(MASKS), *s), np.int32) for s in shapes]
    got = iter(run(body, outs, masks))
    of_masks = [None if a is None else a + 1 for a in axes]
    for a in of_masks:
        rest = tuple(range(1, masks.ndim)) if a is None else a
        for fn in (np.any, np.all, np.any, np.all):
            np.testing.assert_array_equal(next(got), fn(masks != 0, axis=rest))


def test_any_and_all_decide(run, rng):
    """As conditions of branches and loops; other dtypes, where=, keepdims=; scalars; the host."""
    x = rng.uniform(1, 2, (64, 32)).astype(np.float32)

    def as_int(x):
        return x.astype(np.int32)

    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[0] = 0

        @pl.when(jnp.any(x > 1.5))
        def _():
            o_ref[0] = 1

        o_ref[1] = lax.cond(jnp.all(x >= 1.5), lambda: 1, lambda: 2)
        halved = lax.while_loop(lambda y: jnp.any(y > 0.01), lambda y: y * 0.5, x)
        o_ref[2] = as_int(jnp.all(halved <= 0.01) & jnp.any(halved > 0.005))
        i = lax.broadcasted_iota(np.int32, (64, 32), 0)
        o_ref[3] = as_int(i.all() | (i < 0).any())
        o_ref[4] = as_int(
            jnp.all(i, where=i > 0) & ~jnp.any(i, where=i == 0) & jnp.all(i, where=i < 0)
        )
        assert jnp.any(i, axis=1, keepdims=True).shape == (64, 1)
        assert jnp.any(i, keepdims=True).shape == (1, 1) and (i == 0).all(0).dtype == bool
        o_ref[5] = as_int(
            jnp.any(o_ref[0]) & jnp.all(o_ref[1] == 2) & lax.reduce_or(o_ref[0] > 0, ())
        )
        o_ref[6] = as_int(jnp.all(jnp.full((128,), True)) & ~jnp.any(jnp.zeros((4, 128))))
        nan = jnp.full((128,), np.nan, np.float32)
        o_ref[7] = as_int(jnp.any(nan) & jnp.all(nan.astype(np.float16)))

    got = run(body, plgpu.ShapeDtypeStruct((8,), np.int32), x)
    np.testing.assert_array_equal(got, [1, 2, 1, 0, 1, 1, 1, 1])
    assert jnp.any(x > 1.5) and not jnp.all(x > 1.5, axis=None)
    assert jnp.all(x, axis=1, keepdims=True).shape == (64, 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_of_broadcasts(run, rng, axis):
    """Of all elements, of which many are equal: those that count once, and those that do not; other
    code reads the broadcast arrays, too."""
    x = rng.integers(-50, 50, 64).astype(np.int32)
    y = rng.integers(-50, 50, (64, 64)).astype(np.int32)

    def body(x_ref, y_ref, o_ref, k_ref):
        y = plgpu.load(y_ref, layout=plgpu.Layout.WGMMA)
        rows = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis))
        wide = lax.broadcast_in_dim(rows, y.shape, [axis])
        few, none = (lax.broadcast_in_dim(rows > n, y.shape, [axis]) for n in (40, 60))
        for k, value in enumerate((jnp.max(wide), jnp.min(wide), jnp.sum(wide))):
            k_ref[k] = value
        for k, value in enumerate((jnp.any(few), jnp.all(~none), jnp.any(none), jnp.all(few))):
            k_ref[3 + k] = value.astype(jnp.int32)
        o_ref[...] = jnp.where(few, y, wide) + jnp.where(none, wide, y)

    out = plgpu.ShapeDtypeStruct(y.shape, y.dtype), plgpu.ShapeDtypeStruct((7,), np.int32)
    got, found = run(body, out, x, y)
    wide = np.broadcast_to(x[:, None] if axis == 0 else x, y.shape)
    few = wide > 40
    want = [wide.max(), wide.min(), wide.sum(), few.any(), True, False, few.all()]
    np.testing.assert_array_equal(found, np.array(want, np.int32))
    np.testing.assert_array_equal(got, np.where(few, y, wide) + np.where(wide > 60, wide, y))


def test_any_of_threads(run):
    """Each thread decides for itself."""

    def body(x_ref, o_ref):
        t = lax.axis_index("wg")
        o_ref[t, 0] = jnp.any(x_ref[t] > 0).astype(np.int32)
        o_ref[t, 1] = jnp.all(x_ref[t] > 0).astype(np.int32)

    x = np.zeros((3, 256), np.float32)
    x[1, 200], x[2] = 1, 1
    got = run(body, plgpu.ShapeDtypeStruct((3, 2), np.int32), x, num_threads=3, thread_name="wg")
    np.testing.assert_array_equal(got, [[0, 0], [1, 0], [1, 1]])


def test_lax_reduce(run, rng):
    x = rng.uniform(-1, 1, (64, 32)).astype(np.float32)

    def body(x_ref, s_ref, o_ref):
        x = x_ref[...]
        s_ref[...] = lax.reduce(x, 1.0, lax.add, (1,))
        o_ref[0] = lax.reduce(x, -jnp.inf, lax.max, [0, 1])
        o_ref[1] = lax.reduce(x, -3.0, lax.min, [0, 1])
        o_ref[2] = lax.reduce(x > 0.9, False, lax.bitwise_or, (0, 1)).astype(np.float32)
        o_ref[3] = lax.reduce(x < 2, False, lax.bitwise_and, (0, 1)).astype(np.float32)

    s, o = run(body, [plgpu.ShapeDtypeStruct(n, np.float32) for n in ((64,), (4,))], x)
    np.testing.assert_allclose(s, x.sum(1) + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(o, [x.max(), -3, 1, 0])


def test_any_refusals():
    def body(use):
        return lambda x_ref: use(x_ref)

    x = np.zeros((8, 8), np.float32)
    for use, error, why in [
        (lambda r: jnp.any(r), TypeError, "load it first"),
        (lambda r: lax.reduce_or(r[...], (0,)), TypeError, "accepts bool and integer dtypes"),
        (lambda r: jnp.any(r[...], axis=2), ValueError, "out of"),
        (lambda r: lax.reduce(r[...], 0, lax.sub, (0,)), NotImplementedError, "lax.add"),
        (lambda r: r[...].any(0, r), ValueError, "out="),
        (lambda r: bool(jnp.any(r[...])), plgpu.TracerBoolConversionError, "."),
    ]:
        with pytest.raises(error, match=why):
            plgpu.kernel(lambda r, use=use: use(r) and None, out_type=()).lower(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [1, 31, 128, 1000, 4096])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), bf16, np.dtype(np.int32)], ids=str)
def test_full_reduction_of_a_vector(run, rng, n, dtype):
    x = floats(rng, (n,), dtype) if dtype.kind != "i" else ints(rng, (n,), dtype)

    def body(x_ref, s_ref, m_ref):
        s_ref[...] = x_ref[...].sum()
        m_ref[...] = x_ref[...].max()

    s, m = run(body, (np.zeros((), dtype), np.zeros((), dtype)), x)
    if dtype.kind == "i":
        assert s == x.sum(dtype=np.int32)
    else:
        np.testing.assert_allclose(
            float(s),
            x.astype(np.float64).sum(),
            rtol=1e-2 if dtype == bf16 else 1e-5,
            atol=1e-1 if dtype == bf16 else 1e-4,
        )
    assert m == x.max()


def test_reduction_propagates_nan(run):
    x = np.ones((64, 16), np.float32)
    x[3, 5] = np.nan

    def body(x_ref, hi_ref):
        hi_ref[...] = jnp.max(x_ref[...], axis=1)

    hi = run(body, np.zeros(64, np.float32), x)
    assert np.isnan(hi[3]) and np.isnan(hi).sum() == 1


@pytest.mark.parametrize("shape", [(64, 32), (128, 128), (5, 9)])
def test_softmax_rows(run, rng, shape):
    """A row reduction broadcast back: the shape of attention's softmax."""
    x = floats(rng, shape, np.float32)

    def body(x_ref, o_ref):
        x = x_ref[...]
        e = jnp.exp(x - lax.broadcast_in_dim(jnp.max(x, axis=1), x.shape, [0]))
        o_ref[...] = e / lax.broadcast_in_dim(jnp.sum(e, axis=1), x.shape, [0])

    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(run(body, x, x), e / e.sum(1, keepdims=True), rtol=1e-5)


def test_broadcasts(run, rng):
    """Rows, columns and scalars against a matrix."""
    x, row, col = (
        floats(rng, (64, 40), np.float32),
        floats(rng, (40,), np.float32),
        floats(rng, (64,), np.float32),
    )

    def body(x_ref, row_ref, col_ref, a_ref, b_ref, c_ref):
        x = x_ref[...]
        a_ref[...] = x * jnp.broadcast_to(row_ref[...], x.shape)
        b_ref[...] = x + lax.broadcast_in_dim(col_ref[...], x.shape, [0])
        c_ref[...] = x + jnp.full(x.shape, row_ref[3])

    a, b, c = run(body, (x, x, x), x, row, col)
    np.testing.assert_array_equal(a, x * row)
    np.testing.assert_array_equal(b, x + col[:, None])
    np.testing.assert_array_equal(c, x + row[3])


def test_iota_mask(run, rng):
    """A causal mask from two iotas."""
    x = floats(rng, (64, 64), np.float32)

    def body(x_ref, o_ref):
        i = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0)
        j = plgpu.broadcasted_iota(jnp.int32, (64, 64), 1, layout=plgpu.Layout.WGMMA)
        o_ref[...] = jnp.where(i >= j, x_ref[...], -jnp.inf)

    np.testing.assert_array_equal(
        run(body, x, x), np.where(np.tri(64) > 0, x, -np.inf).astype(np.float32)
    )


@pytest.mark.parametrize("shape", [(64, 16), (128, 64), (100, 24)])
def test_layout_conversion_through_smem(run, rng, shape):
    """A value asked for in two layouts is converted, and says so once."""
    x = floats(rng, shape, np.float32)

    def body(x_ref, o_ref, r_ref):
        a = plgpu.layout_cast(x_ref[...] * 2, plgpu.Layout.WGMMA)
        o_ref[...] = plgpu.layout_cast(
            a + 1, plgpu.Layout.WG_STRIDED(shape, 1) if a.size % 128 == 0 else plgpu.Layout.WGMMA
        )
        r_ref[...] = jnp.sum(a, axis=1)

    with np.errstate(all="ignore"):
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            o, r = run(body, (x, x[:, 0].copy()), x)
    np.testing.assert_array_equal(o, x * 2 + 1)
    np.testing.assert_allclose(r, (x * 2).sum(1), rtol=1e-4, atol=1e-4)


def test_reshape_and_slice(run, rng):
    x = floats(rng, (8, 128), np.float32)
    m = floats(rng, (128, 64), np.float32)

    def body(x_ref, m_ref, a_ref, b_ref):
        a_ref[...] = x_ref[...].reshape(4, 256) * 2
        b_ref[...] = plgpu.load(m_ref, layout=plgpu.Layout.WGMMA, optimized=False)[64:, 16:48] + 1

    a, b = run(body, (np.zeros((4, 256), np.float32), np.zeros((64, 32), np.float32)), x, m)
    np.testing.assert_array_equal(a, x.reshape(4, 256) * 2)
    np.testing.assert_array_equal(b, m[64:, 16:48] + 1)


@pytest.mark.parametrize(
    "f",
    [nn.sigmoid, nn.silu, nn.relu, nn.gelu, nn.leaky_relu, nn.soft_sign],
    ids=lambda f: f.__name__,
)
def test_activations(run, rng, f):
    """The same composition on traced values and on the host."""
    x = floats(rng, (200,), np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = f(x_ref[...])

    np.testing.assert_allclose(run(body, x, x), f(x), rtol=2e-6, atol=1e-6)


def test_approx_math(run, rng):
    x = floats(rng, (512,), np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) + jnp.exp2(x_ref[...]) + jnp.tanh(x_ref[...])

    got = run(body, x, x, compiler_params=plgpu.CompilerParams(approx_math=True))
    np.testing.assert_allclose(got, np.exp(x) + np.exp2(x) + np.tanh(x), rtol=1e-3, atol=1e-3)


QUOTIENTS = [  # (quotient of floats x and y, the same in NumPy)
    (lambda x, y: lax.div(x, y, exact=True), lambda x, y: x / y),
    (lambda x, y: lax.div(x, -8, exact=True), lambda x, y: x / -8),
    (lambda x, y: lax.div(3.0, y, exact=True), lambda x, y: 3 / y),
    (lambda x, y: lax.div(x, 6.0, exact=True), lambda x, y: x / 6),
]
EVERY_QUOTIENT = [
    (lambda x, y: x / y, lambda x, y: x / y),
    (lambda x, y: 1 / y, lambda x, y: 1 / y),
    (lambda x, y: jnp.divide(x, 1024), lambda x, y: x / 1024),
    (lambda x, y: pl.reciprocal(y), lambda x, y: 1 / y),
    (lambda x, y: y**-2, lambda x, y: 1 / (y * y)),
    (lambda x, y: lax.div(x, y), lambda x, y: x / y),
    (lambda x, y: x / y[3], lambda x, y: x / y[3]),
    (lambda x, y: x + jnp.mean(y[:128].at[1:].set(0.0)), lambda x, y: x + y[0] / F32(128)),
]


@pytest.mark.filterwarnings("ignore:.*is converted from layout")
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("dtype", [F32, np.float16, bf16], ids=str)
def test_exact_quotients(run, rng, dtype, every):
    """Correctly rounded everywhere: subnormals, overflows and special values among them; by a
    power of two, which is a product; scalars. One by one, and every quotient of a kernel."""
    x, y = (np.exp2(rng.uniform(-148, 126, 896)) * rng.choice([-1, 1], 896) for _ in range(2))
    if dtype == np.float16:
        x, y = np.abs(x) ** 0.125 * np.sign(x), np.abs(y) ** 0.125 * np.sign(y)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 2.0**-149, -(2.0**-126)]
    x = np.concatenate([x, np.repeat(special, 16)]).astype(dtype)
    y = np.concatenate([y, np.tile(special, 16)]).astype(dtype)
    pairs = [(f, g) for f, g in QUOTIENTS + EVERY_QUOTIENT * every]
    if dtype != F32:  # which round between steps, or in float32
        pairs = pairs[: len(QUOTIENTS) + 4 * every]

    def body(x_ref, y_ref, *o_refs):
        a, b = x_ref[...], y_ref[...]
        for (f, _), o_ref in zip(pairs, o_refs):
            o_ref[...] = f(a, b).astype(dtype)

    params = plgpu.CompilerParams(exact_division=True) if every else None
    got = run(body, (x,) * len(pairs), x, y, compiler_params=params)
    for k, ((_, g), found) in enumerate(zip(pairs, got)):
        with np.errstate(all="ignore"):
            want = np.asarray(g(x.astype(F32), y.astype(F32)), F32).astype(dtype)
        same = (found == want) & (np.signbit(found) == np.signbit(want))
        same |= np.isnan(found.astype(F32)) & np.isnan(want.astype(F32))
        assert same.all(), (k, x[~same][:4], y[~same][:4], found[~same][:4], want[~same][:4])


def test_quotients_are_exact_by_themselves(monkeypatch):
    """What an exact quotient compiles to does not depend on options of the program, and makes no
    other quotient exact; integers divide as ever."""

    def body(x_ref, o_ref, p_ref, i_ref):
        x = x_ref[...]
        o_ref[...] = lax.div(x, x + 1, exact=True)
        p_ref[...] = x / (x + 2)
        i_ref[0] = lax.div(i_ref[1], i_ref[2], exact=True)

    x = np.ones(128, F32)
    out = [plgpu.ShapeDtypeStruct(s, d) for s, d in [((128,), F32)] * 2 + [((3,), np.int32)]]

    def quotients(**options):
        ptx = plgpu.kernel(body, out_type=out, **options).lower(x).as_text("ptx")
        return sorted(re.findall(r"div\.\w+(?:\.\w+)?", ptx))

    assert quotients() == ["div.full.f32", "div.rn.f32", "div.s32"]
    params = plgpu.CompilerParams(exact_division=True)
    assert quotients(compiler_params=params) == ["div.rn.f32", "div.rn.f32", "div.s32"]
    monkeypatch.setenv("PALLAS_MGPU_NVRTC_OPTIONS", "--use_fast_math")
    assert "div.rn.f32" in quotients()


@pytest.mark.parametrize(
    "magnitude",
    [jnp.abs, lambda x: jnp.where(x < 0, -x, x), lambda x: jnp.maximum(x, -x)],
    ids=["abs", "select", "maximum"],
)
def test_the_magnitude_of_the_least_int32(run, rng, magnitude):
    """It wraps to itself, and stays negative in what follows: older compilers take abs.s32 for no
    less than 0, and remainders of it lose their sign."""
    x = np.concatenate([np.full(64, -(2**31)), rng.integers(-(2**31), 2**31, 64)]).astype(np.int32)
    y = rng.choice([-7, -2, 1, 3, 7, 15], 128).astype(np.int32)

    def body(x_ref, y_ref, q_ref, r_ref, s_ref):
        m = magnitude(x_ref[...])
        q_ref[...], r_ref[...] = m // y_ref[...], lax.rem(m, y_ref[...])
        s_ref[...] = lax.rem(m, 7)

    with np.errstate(over="ignore"):
        m = np.abs(x)
    want = m // y, np.fmod(m, y), np.fmod(m, 7)
    got = run(body, (x, x, x), x, y)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    out = [plgpu.ShapeDtypeStruct((128,), np.int32)] * 3
    assert "abs.s32" not in plgpu.kernel(body, out_type=out).lower(x, y).as_text("ptx")


@pytest.mark.parametrize(
    "negative",
    [lambda x: -x, lambda x: 0 - x, lambda x: x * -1, lambda x: ~x + 1],
    ids=["negative", "difference", "product", "complement"],
)
def test_extremes_of_negatives(run, rng, negative):
    """The largest and least of three int32, one of them a negative: older compilers lose the sign
    where they make one instruction of two maxima or two minima."""
    x, y, z = rng.integers(-(2**31), 2**31, (3, 128)).astype(np.int32)

    def body(x_ref, y_ref, z_ref, *outs):
        x, y, z = x_ref[...], y_ref[...], z_ref[...]
        outs[0][...] = jnp.maximum(jnp.maximum(x, negative(x)), y)
        outs[1][...] = jnp.minimum(jnp.minimum(x, negative(x)), y)
        outs[2][...] = jnp.maximum(z, jnp.maximum(negative(x), y))
        outs[3][...] = jnp.minimum(jnp.abs(x), lax.cummax(jnp.abs(z)))

    with np.errstate(over="ignore"):
        cumulative = np.maximum.accumulate(np.abs(z))
        want = (
            np.maximum(np.maximum(x, -x), y),
            np.minimum(np.minimum(x, -x), y),
            np.maximum(z, np.maximum(-x, y)),
            np.minimum(np.abs(x), cumulative),
        )
    for a, b in zip(run(body, (x,) * 4, x, y, z), want):
        np.testing.assert_array_equal(a, b)


def test_scalar_arithmetic(run):
    """Index arithmetic on scalars, read and written element by element."""
    x = np.arange(16, dtype=np.int32)

    def body(x_ref, o_ref):
        i = lax.axis_index("x")
        v = x_ref[i]
        o_ref[i] = jnp.where(v % 3 == 0, v // 2, lax.rem(v, 5) * 7 - (v >> 1)) + pl.cdiv(v, 4)

    got = run(body, x, x, grid=(16,), grid_names=("x",))
    want = np.where(x % 3 == 0, x // 2, x % 5 * 7 - (x >> 1)) + -(-x // 4)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int8, np.int32])
def test_extrema_of_integers_at_their_ends(run, dtype):
    """All elements are the largest, or the smallest, number there is."""
    ends = np.iinfo(dtype)
    x = np.stack([np.full((64, 24), ends.max, dtype), np.full((64, 24), ends.min, dtype)])

    def body(x_ref, low_ref, high_ref):
        for k in range(2):
            low_ref[k] = x_ref[k].min(1)
            high_ref[k] = x_ref[k].max(1)

    low, high = run(body, (x[:, :, 0], x[:, :, 0]), x)
    np.testing.assert_array_equal(low, x[:, :, 0])
    np.testing.assert_array_equal(high, x[:, :, 0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_of_negative_zeros(run, dtype):
    """-0 is what a sum begins with."""
    x = np.full((64, 24), -0.0, dtype)
    got = run(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...].sum(1)), x[:, 0], x)
    assert np.signbit(got).all() and (got == 0).all()


def test_numbers_need_fit_in_the_dtype_that_is_said(run):
    """Without one, a Python int is int32."""

    def body(u_ref, f_ref):
        u = jnp.full((8,), 2**32 - 1, jnp.uint32), lax.full((8,), 2**31, jnp.uint32)
        u_ref[...] = u[0] - u[1] + jnp.asarray(2**32 - 2, jnp.uint32)
        f_ref[...] = jnp.full((8,), 2**40, jnp.float32) + jnp.array(-(2**41), jnp.float32)
        for wrong in (
            lambda: jnp.full((8,), 2**32 - 1),
            lambda: jnp.full((8,), 2**32, jnp.uint32),
            lambda: jnp.full((8,), 2**31, jnp.int32),
            lambda: u[0] + (2**32 - 1),
        ):
            with pytest.raises(OverflowError, match="too large to convert to int32"):
                wrong()

    u, f = run(body, (np.zeros(8, np.uint32), np.zeros(8, np.float32)))
    assert (u == 2**31 - 3).all() and (f == -(2.0**40)).all()


def test_types_of_results():
    """Dtype and weakness of what bools, weak values and reductions give."""

    def body(o_ref):
        b, i, w = jnp.zeros(4, bool), jnp.zeros(4, jnp.int32), jnp.full(4, 0)
        assert w.weak_type and jnp.full(4, 1.5).weak_type and not i.weak_type
        for x, dtype in (
            (jnp.square(b), "int32"),
            (b**2, "int32"),
            (b << b, "int32"),
            (jnp.reciprocal(b), "float32"),
            (jnp.floor(i.astype(jnp.int16)), "int16"),
            (jnp.ceil(i.astype(jnp.uint32)), "uint32"),
            (jnp.sum(w), "int32"),
            (jnp.max(w), "int32"),
            (jnp.sum(jnp.full(4, 1.5)), "float32"),
        ):
            assert (x.dtype, x.weak_type) == (np.dtype(dtype), False), dtype
        for x in (jnp.zeros_like(w), jnp.full_like(w, 3), lax.full_like(w, 3), w + 1.5):
            assert x.weak_type
        v = lax.cond(o_ref[0] > 0, lambda a, n: a + n, lambda a, n: a * n, 1.5, 3)
        assert (v.dtype, v.weak_type) == (np.dtype(np.float32), True)
        for f in (lax.exp, lax.rsqrt, lax.floor):
            with pytest.raises(TypeError, match="does not accept dtype int32"):
                f(i)
        with pytest.raises(plgpu.ConcretizationTypeError, match="arange"):
            jnp.arange(o_ref[0].astype(jnp.int32))

    out = plgpu.ShapeDtypeStruct((1,), np.float32)
    plgpu.kernel(body, out_type=out, interpret=True).lower()


def test_scalars_meet_constant_arrays(run):
    """A scalar against an array of one number has the array's shape, whatever can be folded."""
    outs = [
        lambda s: s // jnp.ones(3, jnp.int32),
        lambda s: s % jnp.full(3, 4, jnp.int32),
        lambda s: s // jnp.full((2, 3), 4, jnp.int32),
        lambda s: jnp.ones(3, jnp.int32) * s,
        lambda s: s & jnp.full(3, -1, jnp.int32),
        lambda s: s << jnp.zeros(3, jnp.int32),
        lambda s: jnp.maximum(s, jnp.full(3, -100)),
    ]
    wants = [np.full(3, -13), np.full(3, 3), np.full((2, 3), -4), *[np.full(3, -13)] * 4]

    def body(x_ref, *o_refs):
        for f, o in zip(outs, o_refs):
            o[...] = f(x_ref[0])

    wants = tuple(w.astype(np.int32) for w in wants)
    for got, want in zip(run(body, wants, np.array([-13], np.int32)), wants):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [bf16, np.dtype(np.float16), np.dtype(np.int8)], ids=str)
def test_iota_of_one_element(run, dtype):
    def body(a_ref, b_ref):
        a_ref[...] = plgpu.broadcasted_iota(dtype, (1,), 0)
        b_ref[...] = plgpu.broadcasted_iota(dtype, (1, 5), 1)

    a, b = run(body, (np.ones(1, dtype), np.ones((1, 5), dtype)))
    np.testing.assert_array_equal(a, np.zeros(1, dtype))
    np.testing.assert_array_equal(b, np.arange(5).astype(dtype)[None])


def test_integers_wrap(run):
    """Scalars, which are plain C++ where the range is known, and arrays."""
    x = np.repeat(np.array([[2**31 - 1], [-(2**31)], [2**30]], np.int32), 128, 1)
    want = np.array([-(2**31), 2**31 - 1, 0, 1, -(2**31), -(2**31), 0, -(2**31)], np.int32)

    def values(a, b, c):
        minus = jnp.int32(-1)
        return [a + 1, b - 1, c * 4, a * a, -b, lax.div(b, minus), lax.rem(b, minus), abs(b)]

    def body(x_ref, scalars_ref, arrays_ref):
        for k, v in enumerate(values(x_ref[0, 0], x_ref[1, 0], x_ref[2, 0])):
            scalars_ref[k] = v
        for k, v in enumerate(values(x_ref[0], x_ref[1], x_ref[2])):
            arrays_ref[k] = v

    scalars, arrays = run(body, (want, np.zeros((8, 128), np.int32)), x)
    np.testing.assert_array_equal(scalars, want)
    np.testing.assert_array_equal(arrays, np.repeat(want[:, None], 128, 1))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_integers_to_bfloat16_are_rounded_once(run, dtype):
    """In float32 they would become ties."""
    half, ulp = 2**30 + 2**22, 2**23
    x = np.array([half + 1, half - 1, half, 2**30 + ulp + 2**22 - 1], dtype)
    want = np.array([2**30 + ulp, 2**30, 2**30, 2**30 + ulp], np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(bf16)

    np.testing.assert_array_equal(run(body, x.astype(bf16), x).astype(np.float32), want)


# ---- slices of arrays with traced starts ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*through shared memory:UserWarning")
def test_index_by_traced_slices(run, rng):
    """array[i, pl.ds(...)]: traced ints beside slices, slices with traced starts and strides, new
    dims; starts that would leave the array are moved inside, negative ints count from the end."""
    x = rng.standard_normal((24, 32)).astype(np.float32)

    def body(x_ref, n_ref, *outs):
        x, (i, j, far) = x_ref[...], (n_ref[k] for k in range(3))
        parts = [
            x[i, pl.ds(8, 16)],
            x[i, pl.ds(j, 16)],
            x[pl.ds(i, 4), j],
            x[pl.ds(i, 4), pl.ds(j, 8, 2)],
            x[-i, pl.ds(far, 5)],
            x[pl.ds(far - 200, 3), 1:9],
            x[..., pl.ds(j, 16), None],
            x[3, pl.ds(2, 4, 3)],
            x[jnp.arange(4) * i, pl.ds(j, 8)],
            x.at[i, pl.ds(j, 16)].set(1.0),
            x.at[pl.ds(i, 2), pl.ds(0, 4, 8)].add(x[0, 0:4]),
        ]
        for o, part in zip(outs, parts, strict=True):
            o[...] = part

    i, j, far = 5, 11, 100
    changed, added = x.copy(), x.copy()
    changed[i, j : j + 16] = 1
    added[i : i + 2, ::8] += x[0, 0:4]
    wants = [
        x[i, 8:24],
        x[i, j : j + 16],
        x[i : i + 4, j],
        x[i : i + 4, j : j + 16 : 2],
        x[-i, -5:],
        x[:3, 1:9],
        x[..., j : j + 16, None],
        x[3, 2:12:3],
        x[np.arange(4) * i, j : j + 8],
        changed,
        added,
    ]
    got = run(body, tuple(np.zeros_like(w) for w in wants), x, np.array([i, j, far], np.int32))
    for g, w in zip(got, wants, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_slices_of_arrays_that_are_refused():
    def lower(f):
        def body(x_ref, n_ref, o_ref):
            f(x_ref[...], n_ref[0])

        shapes = [
            plgpu.ShapeDtypeStruct((8, 32), np.float32),
            plgpu.ShapeDtypeStruct((1,), "int32"),
        ]
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((1,), np.float32)).lower(*shapes)

    for f, text in [
        (lambda x, i: x[i, pl.ds(i, 33)], "pl.ds of 33 elements"),
        (lambda x, i: x[i, pl.ds(30, 4)], "4 elements from 30, stride 1, are out of bounds"),
        (lambda x, i: x[i, pl.ds(i, 9, 4)], "stride 4, of a dimension of 32"),
        (lambda x, i: x[i, pl.ds(1.0 * i, 4)], "must be integers"),
        (lambda x, i: x[i, "a"], "must be integers"),
    ]:
        with pytest.raises((IndexError, TypeError), match=text):
            lower(f)
