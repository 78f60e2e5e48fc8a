"""Loops over elements and what is composed of sorts and products: against NumPy, odd shapes."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

pytestmark = pytest.mark.covering(1, share=True)

f32, i32 = np.float32, np.int32


def data(rng, shape, dtype=f32):
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-50, 50, shape).astype(dtype)
    return rng.uniform(-4, 4, shape).astype(f32).astype(dtype)


def lower(body, *args):
    out = plgpu.ShapeDtypeStruct((1,), f32)
    plgpu.kernel(body, out_type=out, interpret=True).lower(*args)


# ---- scan, map, associative_scan -----------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(run, rng, reverse):
    """The carry, and outputs of several shapes and dtypes, in the order of xs."""
    x, k = data(rng, (7, 33)), data(rng, (7,), i32)

    def body(x_ref, k_ref, last_ref, rows_ref, n_ref):
        def step(carry, element):
            total, n = carry
            row, by = element["row"], element["by"]
            total = total * 0.5 + row * by
            return (total, n + 1), (total, {"n": by + n})

        init = (jnp.zeros((33,)), 0)
        xs = {"row": x_ref[...], "by": k_ref[...]}
        (last, n), (rows, rest) = lax.scan(step, init, xs, reverse=reverse)
        last_ref[...] = last + n
        rows_ref[...], n_ref[...] = rows, rest["n"]

    total, rows, ns = np.zeros(33, f32), np.zeros((7, 33), f32), np.zeros(7, i32)
    for n, i in enumerate(range(6, -1, -1) if reverse else range(7)):
        total = total * f32(0.5) + x[i] * f32(k[i])
        rows[i], ns[i] = total, k[i] + n
    last, got, counts = run(body, (total, rows, ns), x, k)
    np.testing.assert_allclose(last, total + 7, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(got, rows, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(counts, ns)


def test_scan_without_arrays(run, rng):
    """Outputs of a counted scan, one without outputs, an unrolled one; a weak carry that takes
    the dtype of the sum."""
    x = data(rng, (5,))

    def body(x_ref, o_ref, p_ref, q_ref):
        o_ref[...] = lax.scan(lambda c, _: (c * 2, c), x_ref[0], length=9)[1]
        total, none = lax.scan(lambda c, z: (c + z, None), 0, x_ref[...])
        assert none is None and total.dtype == f32
        p_ref[...] = total.reshape((1,))
        q_ref[...] = lax.scan(lambda c, z: (c + z, c > z), x_ref[0], x_ref[...], unroll=True)[1]

    got = run(body, (np.zeros(9, f32), np.zeros(1, f32), np.zeros(5, bool)), x)
    np.testing.assert_array_equal(got[0], x[0] * 2.0 ** np.arange(9, dtype=f32))
    np.testing.assert_allclose(got[1], [x.sum()], rtol=1e-5)
    np.testing.assert_array_equal(got[2], x[0] + np.cumsum(x) - x > x)


def test_map(run, rng):
    """Results of elements that are scalars and rows, bool ones too."""
    x, b = data(rng, (9, 5)), rng.random(9) < 0.5

    def body(x_ref, b_ref, o_ref, p_ref, q_ref):
        o_ref[...] = lax.map(lambda row: jnp.max(row), x_ref[...])
        p_ref[...], q_ref[...] = lax.map(
            lambda t: (jnp.where(t[1], t[0], 0), ~t[1]), (x_ref[...], b_ref[...]), batch_size=4
        )

    o, p, q = run(body, (x[:, 0], x, b), x, b)
    np.testing.assert_array_equal(o, x.max(1))
    np.testing.assert_array_equal(p, np.where(b[:, None], x, 0))
    np.testing.assert_array_equal(q, ~b)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape, axis", [((37,), 0), ((5, 19), 1), ((33, 4), -2), ((1, 8), 0)])
def test_associative_scan(run, rng, shape, axis, reverse):
    """A function that does not commute, of two arrays: x -> a * x + b, one after the other."""
    a, b = data(rng, shape) / 4, data(rng, shape)

    def after(p, q):
        return p[0] * q[0], q[0] * p[1] + q[1]

    def body(a_ref, b_ref, o_ref, p_ref):
        pair = a_ref[...], b_ref[...]
        o_ref[...], p_ref[...] = lax.associative_scan(after, pair, reverse=reverse, axis=axis)

    def host(a, b):
        a, b = (np.moveaxis(v.astype(np.float64), axis, 0)[:: -1 if reverse else 1] for v in (a, b))
        out = [(a[0], b[0])]
        for p in zip(a[1:], b[1:]):
            out.append(after(out[-1], p))
        parts = (np.stack(v)[:: -1 if reverse else 1] for v in zip(*out))
        return [np.moveaxis(v, 0, axis) for v in parts]

    for got, want in zip(run(body, (a, b), a, b), host(a, b)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [f32, np.float16])
def test_cumlogsumexp(run, rng, dtype):
    """Also of numbers whose exponentials overflow, and in both directions."""
    x = (data(rng, (3, 21)) * 40).astype(dtype)
    x[0, :3] = -np.inf

    def body(x_ref, o_ref, p_ref):
        o_ref[...] = lax.cumlogsumexp(x_ref[...], 1)
        p_ref[...] = lax.cumlogsumexp(x_ref[...], 0, reverse=True)

    got = run(body, (x, x), x)
    wide = x.astype(np.float64)
    want = np.logaddexp.accumulate(wide, 1), np.logaddexp.accumulate(wide[::-1], 0)[::-1]
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.astype(f32), w, rtol=1e-3 if dtype != f32 else 1e-5, atol=1e-5)


ELEMENTS = {
    "leading": (ValueError, "leading dimensions differ", lambda x: lax.map(sum, (x, x[:2]))),
    "length": (
        ValueError,
        "leading dimensions differ",
        lambda x: lax.scan(lambda c, z: (c, z), 0, x, length=3),
    ),
    "no length": (ValueError, "length must be given", lambda x: lax.scan(lambda c, z: (c, z), 0)),
    "negative": (ValueError, "negative", lambda x: lax.scan(lambda c, z: (c, z), 0, length=-1)),
    "scalar": (ValueError, "a scalar", lambda x: lax.map(lambda z: z, x[0, 0])),
    "pair": (TypeError, "a pair", lambda x: lax.scan(lambda c, z: c, 0, x)),
    "carry": (TypeError, "identical types", lambda x: lax.scan(lambda c, z: (z, c), x, x)),
    "arity": (TypeError, "it gets a carry", lambda x: lax.scan(lambda c: (c, c), 0, x)),
    "text": (TypeError, "expected an array", lambda x: lax.map(lambda z: z, "x")),
    "no steps": (
        NotImplementedError,
        "without elements",
        lambda x: lax.scan(lambda c, z: (c, c), 0, length=0),
    ),
    "batch": (ValueError, "positive", lambda x: lax.map(lambda z: z, x, batch_size=0)),
    "associative shapes": (
        ValueError,
        "differ along axis",
        lambda x: lax.associative_scan(lambda a, b: a, (x, x[:2])),
    ),
    "associative result": (
        TypeError,
        "must return what it gets",
        lambda x: lax.associative_scan(lambda a, b: a[0], x),
    ),
    "associative axis": (
        ValueError,
        "out of bounds",
        lambda x: lax.associative_scan(lambda a, b: a, x, axis=2),
    ),
    "cumlogsumexp": (TypeError, "int32", lambda x: lax.cumlogsumexp(x.astype(i32))),
    "top_k": (ValueError, r"k must be 1\.\.8", lambda x: lax.top_k(x, 9)),
    "piecewise list": (TypeError, "a list", lambda x: jnp.piecewise(x, [x > 0], 3)),
    "einsum labels": (TypeError, "a list of ints", lambda x: jnp.einsum(x, 3)),
    "top_k k": (TypeError, "k", lambda x: lax.top_k(x, 1.5)),
    "median": (ValueError, "out of bounds", lambda x: jnp.median(x, axis=3)),
    "xor": (TypeError, "float32", lambda x: lax.reduce_xor(x, (0,))),
    "piecewise": (ValueError, "1 or 2 functions", lambda x: jnp.piecewise(x, [x > 0], [1, 2, 3])),
    "choose": (TypeError, "mode='clip'", lambda x: jnp.choose(x.astype(i32), [x, x])),
    "choose numbers": (TypeError, "integers", lambda x: jnp.choose(x, [x, x], mode="clip")),
    "einsum rank": (ValueError, "rank 2", lambda x: jnp.einsum("ijk->i", x)),
    "einsum operands": (ValueError, "got 1", lambda x: jnp.einsum("ij,jk->ik", x)),
    "einsum sizes": (ValueError, "8 elements", lambda x: jnp.einsum("ij,ik->jk", x, x.T)),
    "einsum result": (ValueError, "labels of operands", lambda x: jnp.einsum("ij->k", x)),
    "einsum letter": (ValueError, "not a letter", lambda x: jnp.einsum("i1->i", x)),
    "einsum array": (TypeError, "got 'x'|str", lambda x: jnp.einsum("ij,j->i", x, "x")),
    "precision": (ValueError, "lax.Precision", lambda x: jnp.dot(x, x.T, precision="exact")),
    "no precision": (ValueError, "two of them", lambda x: jnp.dot(x, x.T, precision=())),
    "double": (
        NotImplementedError,
        "float64",
        lambda x: jnp.dot(x, x.T, precision=lax.DotAlgorithmPreset.F64_F64_F64),
    ),
    "empty": (NotImplementedError, "jnp.zeros", lambda x: pl.empty((2,), f32)),
    "empty_like": (NotImplementedError, "jnp.zeros", lambda x: pl.empty_like(x)),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_errors(name):
    """Type and text of what does not fit, when the kernel is traced, with the user's line."""
    error, text, f = ELEMENTS[name]

    def body(x_ref, o_ref):
        f(x_ref[...])

    with pytest.raises(error, match=text) as e:
        lower(body, np.zeros((4, 8), f32))
    assert "test_loops.py" in str(e.value)


# ---- sorts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, ml_dtypes.bfloat16, i32, np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("shape, k, axis", [((5, 37), 4, -1), ((64,), 64, 0), ((19, 3), 1, 0)])
def test_top_k(run, rng, shape, k, axis, dtype):
    """Falling, of equal ones the first, NaN and infinities in their places."""
    x = np.round(data(rng, shape)).astype(dtype)  # many are equal
    if dtype in (f32, ml_dtypes.bfloat16):
        flat = x.reshape(-1)
        flat[rng.permutation(flat.size)[:6]] = [np.nan, np.nan, -np.inf, np.inf, -np.inf, 0]

    def body(x_ref, v_ref, i_ref):
        v_ref[...], i_ref[...] = lax.top_k(x_ref[...], k, axis=axis)

    key = x.astype(np.float64)
    key = np.where(np.isnan(key), 1e300, key)  # above infinity for what follows
    rank = np.where(key == np.inf, 1e299, key)
    order = np.take(np.argsort(-rank, axis, kind="stable"), range(k), axis).astype(i32)
    values, indices = run(body, (np.take_along_axis(x, order, axis), order), x)
    np.testing.assert_array_equal(indices, order)
    want = np.take_along_axis(x, order, axis)
    np.testing.assert_array_equal(values.astype(f32), want.astype(f32))


def test_top_k_of_a_router(run, rng):
    """Few of many, more than sorts take; no spills where sorts have some."""
    x, y = data(rng, (32, 256)), data(rng, (2, 5000), np.int16)

    def body(x_ref, y_ref, o_ref, p_ref):
        o_ref[...] = lax.top_k(x_ref[...], 8)[1]
        p_ref[...] = lax.top_k(y_ref[...], 3)[1]

    want = tuple(np.argsort(-v, 1, kind="stable")[:, :k].astype(i32) for v, k in ((x, 8), (y, 3)))
    for got, w in zip(run(body, want, x, y), want):
        np.testing.assert_array_equal(got, w)


@pytest.mark.parametrize("axis, keepdims", [(None, False), (0, True), (1, False), ((0, 2), True)])
@pytest.mark.parametrize("dtype", [f32, np.float16, i32])
def test_median(run, rng, axis, keepdims, dtype):
    """Odd and even numbers of elements; a NaN makes it NaN."""
    x = data(rng, (5, 6, 3), dtype)
    if dtype == f32:
        x[1, 2, 0] = np.nan
    want = np.median(x.astype(np.float64), axis=axis, keepdims=keepdims)
    want = np.asarray(want).astype(f32 if dtype == i32 else dtype)

    def body(x_ref, o_ref):
        out = jnp.median(x_ref[...], axis=axis, keepdims=keepdims)
        assert out.dtype == want.dtype
        o_ref[...] = out if out.ndim else out.reshape((1,))

    got = run(body, np.atleast_1d(want), x)
    np.testing.assert_allclose(got, np.atleast_1d(want), rtol=1e-3 if dtype != f32 else 1e-6)


@pytest.mark.parametrize("name", ["or", "and", "xor"])
def test_reduce_bits(run, rng, name):
    """Over each dim, both, and of bool arrays; ``lax.reduce`` too."""
    x, b = rng.integers(-(2**31), 2**31, (13, 7)).astype(i32), rng.random((13, 7)) < 0.3
    f, host = getattr(lax, f"reduce_{name}"), getattr(np, f"bitwise_{name}")

    def body(x_ref, b_ref, o_ref, p_ref, q_ref, r_ref):
        x = x_ref[...]
        o_ref[...], p_ref[...] = f(x, (0,)), f(x, (0, 1)).reshape((1,))
        q_ref[...] = f(b_ref[...], (1,))
        r_ref[...] = lax.reduce(x, 5, getattr(lax, f"bitwise_{name}"), (1,))

    want = host.reduce(x, 0), host.reduce(x, None)[None], host.reduce(b, 1), host.reduce(x, 1)
    want = (*want[:3], host(want[3], 5))
    for got, w in zip(run(body, want, x, b), want):
        np.testing.assert_array_equal(got, w)


def test_piecewise_and_choose(run, rng):
    """The last condition that holds; numbers out of range, choices that broadcast."""
    x, y, k = data(rng, (7, 33)), data(rng, (33,)), rng.integers(-3, 6, (7, 33)).astype(i32)

    def functions(xp):
        return [lambda v, by: v * by, -3.0, lambda v, by: xp.abs(v) + by]

    def body(x_ref, y_ref, k_ref, *outs):
        x, y, k = x_ref[...], y_ref[...], k_ref[...]
        outs[0][...] = jnp.piecewise(x, [x < 1, x < -1], functions(jnp), 2.0)
        outs[1][...] = jnp.piecewise(x, [x > 2], [1])
        outs[2][...] = jnp.choose(k, [x, y, 2], mode="clip")
        outs[3][...] = jnp.choose(k, [x, y, 2], mode="wrap")

    want = (
        np.piecewise(x, [x < 1, x < -1], functions(np), 2.0),
        np.piecewise(x, [x > 2], [1]),
        np.choose(k, [x, y, f32(2)], mode="clip"),
        np.choose(k, [x, y, f32(2)], mode="wrap"),
    )
    for got, w in zip(run(body, want, x, y, k), want):
        np.testing.assert_array_equal(got, w)


# ---- products ------------------------------------------------------------------------------------

EINSUMS = {
    "ij,jk->ik": [(5, 7), (7, 9)],
    "ij,jk": [(5, 7), (7, 9)],
    "ji,jk->ki": [(5, 7), (5, 9)],
    "bij,bjk->bik": [(3, 5, 7), (3, 7, 4)],
    "bqhd,bkhd->bhqk": [(2, 5, 3, 8), (2, 6, 3, 8)],
    "bi,bi->b": [(20, 7), (20, 7)],
    "i,j->ji": [(5,), (7,)],
    "ij,ij->ij": [(5, 7), (5, 7)],
    "ij,j->ij": [(5, 7), (7,)],
    "ii->i": [(6, 6)],
    "ii": [(6, 6)],
    "iji->j": [(4, 5, 4)],
    "ijk->k": [(3, 4, 5)],
    "ij->ji": [(3, 4)],
    "ij,k->i": [(3, 4), (5,)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "ij,ij->": [(3, 4), (3, 4)],
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 5)],
    "...i,i": [(2, 3, 4), (4,)],
    "...i,...j->ij...": [(3, 4), (1, 5)],
}


@pytest.mark.parametrize("text", EINSUMS)
def test_einsum(run, rng, text):
    """Every kind of label: contracted, batch, summed, diagonal, under an ellipsis."""
    xs = [data(rng, shape) for shape in EINSUMS[text]]
    want = np.einsum(text, *(x.astype(np.float64) for x in xs))

    def body(*refs):
        out = jnp.einsum(text, *(r[...] for r in refs[:-1]))
        assert out.shape == want.shape
        refs[-1][...] = out if out.ndim else out.reshape((1,))

    got = run(body, np.atleast_1d(want).astype(f32), *xs)
    np.testing.assert_allclose(got, np.atleast_1d(want), rtol=1e-4, atol=1e-3)


def test_einsum_on_tensor_cores(run, rng):
    """float16 operands, in memory and in registers, summed in float32; the form with lists."""
    a, b = data(rng, (70, 48), np.float16), data(rng, (48, 40), np.float16)

    def body(a_ref, b_ref, o_ref, p_ref):
        o_ref[...] = jnp.einsum("ij,jk->ki", a_ref, b_ref, preferred_element_type=jnp.float32)
        p_ref[...] = jnp.einsum(a_ref[...], [0, 1], b_ref[...], [1, 2], [0, 2])

    want = a.astype(f32) @ b.astype(f32)
    o, p = run(body, (want.T.copy(), want.astype(np.float16)), a, b)
    np.testing.assert_allclose(o, want.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(p, want, rtol=2e-3, atol=2e-2)


PRECISIONS = [
    *(None, "highest", lax.Precision.HIGH, (lax.Precision.DEFAULT, lax.Precision.HIGHEST)),
    *("BF16_BF16_F32", lax.DotAlgorithmPreset.F16_F16_F32, lax.DotAlgorithmPreset.TF32_TF32_F32),
]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision(run, rng, precision):
    """Presets of 16-bit operands round float32 ones and keep the result in float32; all others are
    at least as exact as they say."""
    a, b = data(rng, (64, 33)), data(rng, (33, 24))

    def body(a_ref, b_ref, o_ref, p_ref):
        o_ref[...] = jnp.matmul(a_ref[...], b_ref[...], precision=precision)
        p_ref[...] = jnp.einsum("ij,jk->ik", a_ref[...], b_ref[...], precision=precision)

    name = getattr(precision, "name", str(precision))
    narrow = {"B": ml_dtypes.bfloat16, "F": np.float16}.get(name[0])
    ways = [a, b] if narrow is None else [a.astype(narrow), b.astype(narrow)]
    want = (ways[0].astype(np.float64) @ ways[1].astype(np.float64)).astype(f32)
    for got in run(body, (want, want), a, b):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_pl_dot(run, rng):
    """Transposed operands, integer sums; taking the name warns."""
    a, b, k = data(rng, (33, 20)), data(rng, (9, 33)), data(rng, (20, 20), np.int8)
    with pytest.warns(DeprecationWarning, match="jnp.dot"):
        dot = pl.dot

    def body(a_ref, b_ref, k_ref, o_ref, p_ref):
        o_ref[...] = dot(a_ref[...], b_ref[...], trans_a=True, trans_b=True, allow_tf32=True)
        p_ref[...] = dot(k_ref[...], k_ref[...])

    wide = k.astype(i32)
    o, p = run(body, (a.T @ b.T, wide @ wide), a, b, k)
    np.testing.assert_allclose(o, a.T @ b.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(p, wide @ wide)

    def wrong(a_ref, o_ref):
        with pytest.raises(ValueError, match="matrices"):
            dot(a_ref[0], a_ref[...])
        with pytest.raises(ValueError, match="only one of"):
            dot(a_ref[...], a_ref[...], allow_tf32=True, precision="high")
        o_ref[...] = jnp.zeros((1,))

    lower(wrong, a)


# ---- the host ------------------------------------------------------------------------------------


def test_empty_on_host(rng):
    """Arrays to pass to kernels as outputs, pytrees of them, mutable ones."""
    a = pl.empty((3, 4), jnp.bfloat16)
    assert a.shape == (3, 4) and a.dtype == ml_dtypes.bfloat16
    like = pl.empty_like({"a": plgpu.ShapeDtypeStruct((5,), np.int8), "b": a})
    assert like["a"].dtype == np.int8 and like["b"].shape == (3, 4)
    x = data(rng, (6,))
    out, ref = pl.empty_like(x), pl.empty_ref_like(x)

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    plgpu.kernel(double, out_type=x, interpret=True)(x, out=out)
    np.testing.assert_array_equal(out, x * 2)
    ref[...] = x
    np.testing.assert_array_equal(ref[...], x)
    with pytest.raises(TypeError, match="a shape and a dtype"):
        pl.empty_like([3])
    with pytest.raises(TypeError):
        pl.empty((2.5,), f32)


def test_on_host_arrays(rng):
    """Without traced values the functions are NumPy's."""
    x, k = data(rng, (4, 6)), rng.integers(0, 2, (4, 6)).astype(i32)
    np.testing.assert_array_equal(jnp.median(x, axis=1), np.median(x, axis=1))
    np.testing.assert_array_equal(jnp.choose(k, [x, -x]), np.choose(k, [x, -x]))
    np.testing.assert_array_equal(
        jnp.piecewise(x, [x > 0], [1, 2]), np.piecewise(x, [x > 0], [1, 2])
    )
    want = np.einsum("ij,kj->ik", x, x)
    np.testing.assert_allclose(jnp.einsum("ij,kj->ik", x, x, precision="high"), want, rtol=1e-6)
    got = jnp.dot(k.astype(np.int8), k.T.astype(np.int8), preferred_element_type=jnp.float32)
    assert got.dtype == f32
    np.testing.assert_array_equal(got, k @ k.T)


# ---- checks --------------------------------------------------------------------------------------


def test_debug_check(rng):
    """Off: no code. On: the first false condition ends the kernel, with the message and the line;
    a kernel that ran before is compiled again."""
    x = data(rng, (8,))

    def body(x_ref, o_ref):
        top = jnp.max(x_ref[...])
        pl.debug_check(top < 100, 'x is "large": 100% {}')
        o_ref[...] = x_ref[...] * 2

    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((8,), f32), interpret=True)
    large = x + 1000
    np.testing.assert_array_equal(kernel(large), large * 2)
    assert not pl.enable_debug_checks.value
    assert "check_failed" not in kernel.lower(x).as_text("cuda")
    with pl.enable_debug_checks(True):
        assert pl.enable_debug_checks.value
        np.testing.assert_array_equal(kernel(x), x * 2)
        with pytest.raises(AssertionError, match='x is "large": 100% {}') as e:
            kernel(large)
        assert "pl.debug_check(top < 100" in str(e.value)
        low = kernel.lower(x)
        assert low.resources()["spill_bytes"] == 0  # NVRTC takes it
        assert "check_failed" in low.as_text("cuda")
        out = np.empty_like(x)
        host.run(low, [x], [out])
        np.testing.assert_array_equal(out, x * 2)
        with pytest.raises(host.HostError, match='x is "large": 100% {}'):
            host.run(low, [large], [out])
    assert not pl.enable_debug_checks.value
    np.testing.assert_array_equal(kernel(large), large * 2)
    with pytest.raises(NotImplementedError, match="use assert"):
        pl.debug_check(True, "x")
    with pytest.warns(DeprecationWarning):
        assert pl.debug_checks_enabled() is False
    with pytest.raises(TypeError, match="expected a bool"):
        pl.enable_debug_checks("yes")


CHECKS = {
    "array": (r"float32\[8\]", lambda x: pl.debug_check(x, "m")),
    "message": ("message must be text", lambda x: pl.debug_check(True, 3)),
    "number": ("bool scalar", lambda x: pl.debug_check(1, "m")),
}


@pytest.mark.parametrize("name", CHECKS)
def test_debug_check_errors(name):
    text, f = CHECKS[name]

    def body(x_ref, o_ref):
        f(x_ref[...])

    with pl.enable_debug_checks(True), pytest.raises(TypeError, match=text):
        lower(body, np.zeros((8,), f32))
