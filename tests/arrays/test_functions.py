"""Elementwise functions against NumPy's float64: random float32, every float16 and bfloat16, all
integers of 8 and 16 bits, special values; powers; activations; the bounds of docs/arrays.md."""

import math

import ml_dtypes
import numpy as np
import pytest

from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
f16, f32 = np.dtype(np.float16), np.dtype(np.float32)
INTS = [np.dtype(d) for d in ("int8", "int16", "int32", "uint8", "uint16", "uint32")]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def per_element(f):
    def g(x):
        try:
            return f(x)
        except (ValueError, OverflowError):
            return math.nan if math.isnan(x) or f is not math.lgamma else math.inf

    return np.vectorize(g, [np.float64])


def inverse_erf(y):
    """By bisection and a step of Newton's; linear near zero."""
    a = np.abs(y)
    erf, erfc = np.vectorize(math.erf, [np.float64]), np.vectorize(math.erfc, [np.float64])
    out = np.where(a < 1, a * (math.sqrt(math.pi) / 2), np.where(a == 1, np.inf, np.nan))
    some = (a < 1) & (a > 1e-5)
    a = a[some]
    low, high = np.zeros_like(a), np.full_like(a, 7)
    for _ in range(26):
        middle = (low + high) / 2
        below = erf(middle) < a
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    excess = np.where(a < 0.5, erf(low) - a, 1 - a - erfc(low))
    out[some] = low - excess * (math.sqrt(math.pi) / 2) * np.exp(low * low)
    return np.copysign(out, y)


def digamma(x):
    x = x.copy()
    out = np.zeros_like(x)
    for _ in range(40):  # psi(x) = psi(x + 1) - 1 / x
        small = x < 30
        out -= np.where(small, 1 / x, 0)
        x += small
    return out + np.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4)


def scaled_bessel(order):
    def f(x):
        t = (np.arange(400) + 0.5) * (math.pi / 400)
        terms = np.exp(np.outer(x, np.cos(t)) - np.abs(x)[:, None]) * np.cos(order * t)
        small = np.exp(-np.abs(x)) * (x / 2 if order else 1)
        return np.where(np.abs(x) < 1e-4, small, np.mean(terms, 1))

    return f


def round_away(x):
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


# name: function, reference, bound in ulps of float32, interval of the bound
ALL = (-math.inf, math.inf)
UNARY = {
    "exp": (jnp.exp, np.exp, 2, ALL),
    "exp2": (jnp.exp2, np.exp2, 2, ALL),
    "expm1": (lax.expm1, np.expm1, 2, ALL),
    "log": (jnp.log, np.log, 2, ALL),
    "log2": (jnp.log2, np.log2, 2, ALL),
    "log10": (jnp.log10, np.log10, 3, ALL),
    "log1p": (lax.log1p, np.log1p, 2, ALL),
    "sqrt": (jnp.sqrt, np.sqrt, 1, ALL),
    "rsqrt": (lax.rsqrt, lambda x: 1 / np.sqrt(x), 2, ALL),
    "cbrt": (jnp.cbrt, np.cbrt, 1, ALL),
    "sin": (jnp.sin, np.sin, 2, ALL),
    "cos": (jnp.cos, np.cos, 2, ALL),
    "tan": (jnp.tan, np.tan, 4, ALL),
    "asin": (jnp.arcsin, np.arcsin, 2, ALL),
    "acos": (lax.acos, np.arccos, 2, ALL),
    "atan": (jnp.arctan, np.arctan, 2, ALL),
    "sinh": (lax.sinh, np.sinh, 3, ALL),
    "cosh": (jnp.cosh, np.cosh, 2, ALL),
    "tanh": (jnp.tanh, np.tanh, 2, ALL),
    "asinh": (jnp.arcsinh, np.arcsinh, 3, ALL),
    "acosh": (lax.acosh, np.arccosh, 4, ALL),
    "atanh": (jnp.arctanh, np.arctanh, 3, ALL),
    "erf": (lax.erf, per_element(math.erf), 2, ALL),
    "erfc": (lax.erfc, per_element(math.erfc), 4, ALL),
    "erf_inv": (lax.erf_inv, inverse_erf, 2, ALL),
    "lgamma": (lax.lgamma, per_element(math.lgamma), 6, (2.5, math.inf)),
    "digamma": (lax.digamma, digamma, 16, (2.0, 1e4)),
    "bessel_i0e": (lax.bessel_i0e, scaled_bessel(0), 10, (-300, 300)),
    "bessel_i1e": (lax.bessel_i1e, scaled_bessel(1), 10, (-300, 300)),
    "logistic": (lax.logistic, lambda x: 1 / (1 + np.exp(-x)), 4, (-80, 80)),
    "floor": (jnp.floor, np.floor, 0, ALL),
    "ceil": (lax.ceil, np.ceil, 0, ALL),
    "trunc": (jnp.trunc, np.trunc, 0, ALL),
    "rint": (jnp.rint, np.rint, 0, ALL),
    "round": (lax.round, round_away, 0, ALL),
    "abs": (jnp.abs, np.abs, 0, ALL),
    "neg": (lax.neg, np.negative, 0, ALL),
    "square": (jnp.square, np.square, 0, ALL),
    "sinc": (jnp.sinc, np.sinc, 32, (-0.9, 0.9)),
    "deg2rad": (jnp.deg2rad, np.deg2rad, 2, ALL),
    "nan_to_num": (lambda x: jnp.nan_to_num(x, nan=7, posinf=1, neginf=-1),
                   lambda x: np.nan_to_num(x, nan=7, posinf=1, neginf=-1), 0, ALL),
}  # fmt: skip
IN_STEPS = {"logistic", "log10", "sinc", "deg2rad"}  # 16-bit floats are rounded on the way


def errors(got, want, x, interval):
    """Distances in ulps of the dtype of got, where x is in the interval."""
    got, want = got.astype(np.float64), want.astype(np.float32).astype(got.dtype)
    fi, want = ml_dtypes.finfo(want.dtype), want.astype(np.float64)
    inside = (x >= interval[0]) & (x <= interval[1]) | np.isnan(x)
    np.testing.assert_array_equal(np.isnan(got[inside]), np.isnan(want[inside]))
    size = np.maximum(np.abs(want), float(fi.smallest_normal))
    ulp = np.exp2(np.floor(np.log2(size))) * float(fi.eps)
    same = (got == want) | np.isnan(want) | ~inside
    return np.where(same, 0, np.abs(got - want) / ulp)


def grouped(names, n=7):
    names = list(names)
    return [names[k : k + n] for k in range(0, len(names), n)]


def by_blocks(functions, n):
    """A kernel's body: each function of the operand into an output, n elements a block."""

    def body(x_ref, *out_refs):
        part = pl.ds(lax.axis_index("i") * n, n)
        x = x_ref[part]
        for f, out_ref in zip(functions, out_refs, strict=True):
            out_ref[part] = f(x).astype(out_ref.dtype)

    return body


@pytest.mark.parametrize("names", grouped(UNARY), ids=lambda names: names[0])
def test_float32(run, rng, names):
    """The bounds of the reference, on random numbers of all magnitudes and on special ones."""
    n = 3001
    x = np.concatenate(
        [
            rng.uniform(-4, 4, n // 3),
            rng.uniform(-1, 1, n // 3),
            rng.standard_normal(n) * np.exp2(rng.uniform(-40, 40, n)),
            [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 88, -88, 100, -104, 1e-40, 3e38],
            [math.inf, -math.inf, math.nan],
        ]
    ).astype(f32)
    x = x[: len(x) // 16 * 16]
    got = run(
        by_blocks([UNARY[k][0] for k in names], len(x) // 16),
        (x,) * len(names),
        x,
        grid=(16,),
        grid_names=("i",),
    )
    for k, y in zip(names, got, strict=True):
        _, reference, bound, interval = UNARY[k]
        d = errors(y, reference(x.astype(np.float64)), x, interval)
        assert d.max() <= bound, (k, d.max(), x[d.argmax()], y[d.argmax()])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("names", grouped(UNARY, 9), ids=lambda names: names[0])
def test_every_half(run, names, dtype):
    """All 65536 numbers: float32's result, rounded once."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    got = run(
        by_blocks([UNARY[k][0] for k in names], 1024),
        (x,) * len(names),
        x,
        grid=(64,),
        grid_names=("i",),
    )
    wide = x.astype(np.float64)
    for k, y in zip(names, got, strict=True):
        _, reference, bound, interval = UNARY[k]
        if k in IN_STEPS:
            interval = (-0.9, 0.9)
        some = np.abs(wide) < 400 if "bessel" in k else np.ones(len(x), bool)
        d = errors(y[some], reference(wide[some]), wide[some], interval)
        assert d.max() <= (16 if k in IN_STEPS else bound > 0), (k, d.max(), wide[some][d.argmax()])


BINARY = {  # function, reference, bound in ulps of float32
    "atan2": (lax.atan2, np.arctan2, 3),
    "pow": (lax.pow, np.power, 8),
    "hypot": (jnp.hypot, np.hypot, 3),
    "fmod": (jnp.fmod, np.fmod, 0),
    "fmax": (jnp.fmax, np.fmax, 0),
    "fmin": (jnp.fmin, np.fmin, 0),
    "copysign": (jnp.copysign, np.copysign, 0),
    "heaviside": (jnp.heaviside, np.heaviside, 0),
    "logaddexp": (jnp.logaddexp, np.logaddexp, 4),
    "logaddexp2": (jnp.logaddexp2, np.logaddexp2, 4),
    "maximum": (jnp.maximum, np.maximum, 0),
}
SPECIAL = [0.0, -0.0, 1, -1, 0.5, 2, -3, 1e-40, 3e38, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_two_floats(run, rng, dtype):
    x, y = (v.reshape(-1) for v in np.meshgrid(SPECIAL, SPECIAL))
    x, y = (np.concatenate([v, rng.uniform(-8, 8, 500)]).astype(f32).astype(dtype) for v in (x, y))

    def body(x_ref, y_ref, *out_refs):
        x, y = x_ref[...], y_ref[...]
        for (f, _, _), out_ref in zip(BINARY.values(), out_refs, strict=True):
            out_ref[...] = f(x, y)

    got = run(body, (x,) * len(BINARY), x, y)
    a, b = x.astype(np.float64), y.astype(np.float64)
    for (name, (_, reference, bound)), z in zip(BINARY.items(), got, strict=True):
        d = errors(z, reference(a, b), np.zeros_like(a), ALL)
        if name.startswith("logadd"):  # where the sum cancels, its error is that of the operands
            d = np.where((np.abs(a) > 1e30) | (np.abs(b) > 1e30) | (np.abs(z) > 2), d, 0)
        if dtype != f32:
            bound = 6 if "log" in name or name == "hypot" else min(bound, 1)
        assert d.max() <= bound, (name, d.max(), x[d.argmax()], y[d.argmax()])


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_parts_of_floats(run, rng, dtype):
    """Neighbours, signs, mantissas and exponents: exact, also of subnormals and infinities."""
    words = np.dtype(f"uint{8 * dtype.itemsize}")
    x, y = (rng.integers(0, 1 << 8 * dtype.itemsize, 999).astype(words) for _ in range(2))
    x, y = x.view(dtype).copy(), y.view(dtype).copy()
    x[:200] = y[200:400] = np.resize(np.asarray(SPECIAL, f32).astype(dtype), 200)
    y[:100] = x[:100]
    n = rng.integers(-320, 320, x.shape, dtype=np.int32)

    def body(x_ref, y_ref, n_ref, next_ref, mantissa_ref, exponent_ref, scaled_ref, f_ref, w_ref,
             minus_ref, plus_inf_ref, minus_inf_ref):  # fmt: skip
        x = x_ref[...]
        next_ref[...] = lax.nextafter(x, y_ref[...])
        mantissa_ref[...], exponent_ref[...] = jnp.frexp(x)
        scaled_ref[...] = jnp.ldexp(x, n_ref[...])
        f_ref[...], w_ref[...] = jnp.modf(x)
        minus_ref[...] = jnp.signbit(x)
        plus_inf_ref[...], minus_inf_ref[...] = jnp.isposinf(x), jnp.isneginf(x)

    flag = np.zeros(x.shape, bool)
    got = run(body, (x, x, n, x, x, x, flag, flag, flag), x, y, n)
    finite = np.isfinite(x.astype(f32))
    bits = x.view(words).astype(np.int64)  # neighbours in the order of magnitudes
    sign = 1 << 8 * dtype.itemsize - 1
    up = (y > x).astype(bool)
    stepped = np.where(up == (x > 0), bits + 1, bits - 1)
    stepped = np.where(x == 0, (y.view(words) & sign) | 1, stepped).astype(words).view(dtype)
    want = np.where(x == y, y, np.where(np.isnan(x) | np.isnan(y), np.asarray(np.nan, dtype),
                                        stepped))  # fmt: skip
    np.testing.assert_array_equal(got[0].astype(f32), want.astype(f32))
    mantissa, exponent = np.frexp(x.astype(np.float64))
    np.testing.assert_array_equal(got[1].astype(f32), mantissa.astype(f32))
    np.testing.assert_array_equal(got[2], np.where(finite, exponent, 0))
    scaled = np.ldexp(x.astype(np.float64), n)
    tiny = np.abs(scaled) < float(ml_dtypes.finfo(dtype).smallest_normal)  # is rounded twice
    np.testing.assert_array_equal(
        got[3].astype(f32)[~tiny], scaled.astype(f32).astype(dtype).astype(f32)[~tiny]
    )
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    assert np.all(np.abs(got[3].astype(np.float64) - scaled)[tiny] <= least)
    for have, part in zip(got[4:6], np.modf(x.astype(np.float64))):
        np.testing.assert_array_equal(have.astype(f32), part.astype(f32))
    np.testing.assert_array_equal(got[6], np.signbit(x))
    np.testing.assert_array_equal(got[7], x == np.inf)
    np.testing.assert_array_equal(got[8], x == -np.inf)


@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (8, 23), (4, 3), (2, 0), (6, 12)], ids=str)
def test_reduce_precision(run, rng, bits):
    """Round to nearest even at any width; subnormal results are zero."""
    exponent_bits, mantissa_bits = bits
    x = (rng.standard_normal(2000) * np.exp2(rng.uniform(-20, 20, 2000))).astype(f32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38]

    def body(x_ref, o_ref):
        o_ref[...] = lax.reduce_precision(x_ref[...], exponent_bits, mantissa_bits)

    got = run(body, x, x)
    m, e = np.frexp(x.astype(np.float64))
    want = np.ldexp(np.rint(m * 2 ** (mantissa_bits + 1)), e - mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    want = np.where(np.abs(want) < 2.0 ** (1 - bias), np.copysign(0, x), want)
    want = np.where(np.abs(want) >= 2.0 ** (bias + 1), np.copysign(np.inf, x), want)
    np.testing.assert_array_equal(got, np.where(np.isfinite(x), want, x).astype(f32))
    if bits == (8, 7):
        np.testing.assert_array_equal(got, x.astype(bf16).astype(f32))


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_bits_of_integers(run, rng, dtype):
    """Every number of 8 and 16 bits, random ones of 32."""
    width, i = 8 * dtype.itemsize, np.iinfo(dtype)
    n = 1 << 16 if width == 16 else 4096
    x = np.arange(n).astype(dtype) if width < 32 else rng.integers(i.min, i.max, n).astype(dtype)
    x[:5] = [0, 1, i.min, i.max, i.max // 2]
    zeros, ones = run(
        by_blocks([lax.clz, lax.population_count], n // 32), (x, x), x, grid=(32,),
        grid_names=("i",),
    )  # fmt: skip
    text = [f"{int(v) & (1 << width) - 1:0{width}b}" for v in x]
    np.testing.assert_array_equal(zeros, [len(t) - len(t.lstrip("0")) for t in text])
    np.testing.assert_array_equal(ones, [t.count("1") for t in text])


@pytest.mark.parametrize("dtype", INTS[1:3] + INTS[4:], ids=str)
def test_integer_powers(run, rng, dtype):
    """Static and traced exponents; products wrap."""
    i = np.iinfo(dtype)
    x = rng.integers(i.min, i.max, 200, dtype=dtype, endpoint=True)
    n = rng.integers(0, 64, 200).astype(dtype)
    n[:64] = np.arange(64)

    def body(x_ref, n_ref, traced_ref, static_ref, one_ref, big_ref):
        x = x_ref[...]
        traced_ref[...] = x ** n_ref[...]
        static_ref[...], one_ref[...], big_ref[...] = x**11, x**0, x**4099

    got = run(body, (x,) * 4, x, n)
    exponents = [n.tolist(), [11] * 200, [0] * 200, [4099] * 200]
    for have, powers in zip(got, exponents, strict=True):
        want = [pow(a, b, 1 << 32) for a, b in zip(x.tolist(), powers)]
        np.testing.assert_array_equal(have, np.array(want, np.uint32).astype(dtype))


def test_float_powers(run, rng):
    """By static floats, and by arrays of integers."""
    x = rng.uniform(0.1, 4, 300).astype(f32)
    n = rng.integers(-5, 6, 300, dtype=np.int32)

    def body(x_ref, n_ref, *out_refs):
        x, n = x_ref[...], n_ref[...]
        powers = x**1.7, x**-2, x**-0.5, x**n, 1.5**x, jnp.float_power(n, 2), x**2000
        for out_ref, y in zip(out_refs, powers, strict=True):
            out_ref[...] = y

    got = run(body, (x,) * 7, x, n)
    w = x.astype(np.float64)
    want = w**1.7, w**-2, w**-0.5, w**n, 1.5**w, n**2.0, w**2000
    for y, reference in zip(got, want, strict=True):
        assert errors(y, reference, w, ALL).max() <= 4


def np_softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


erfc = per_element(math.erfc)
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "soft_sign": lambda x: x / (1 + np.abs(x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "log_sigmoid": lambda x: -np.logaddexp(-x, 0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "sparse_plus": lambda x: np.where(x < -1, 0, np.where(x > 1, x, (x + 1) ** 2 / 4)),
    "sparse_sigmoid": lambda x: np.clip(x + 1, 0, 2) / 2,
    "squareplus": lambda x: (x + np.sqrt(x * x + 4)) / 2,
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "celu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "selu": lambda x: (
        1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    ),
}


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("shape", [(777,), (3, 43)], ids=str)
def test_activations(run, rng, dtype, shape):
    x = rng.uniform(-8, 8, shape).astype(dtype)
    names = [*ACTIVATIONS, "gelu exact"]

    def body(x_ref, *out_refs):
        for name, out_ref in zip(names, out_refs, strict=True):
            exact = name.endswith("exact")
            f = getattr(nn, name.split()[0])
            out_ref[...] = f(x_ref[...], approximate=False) if exact else f(x_ref[...])

    got = run(body, (x,) * len(names), x)
    w = x.astype(np.float64)
    unit = 4e-6 if dtype == f32 else 0.05
    for name, y in zip(names, got, strict=True):
        exact = 0.5 * w * erfc(-w / math.sqrt(2)) if name.endswith("exact") else None
        want = ACTIVATIONS[name](w) if exact is None else exact
        np.testing.assert_allclose(y.astype(np.float64), want, unit, unit, err_msg=name)
        host = getattr(nn, name.split()[0])
        host = host(x.astype(f32), approximate=False) if exact is not None else host(x.astype(f32))
        np.testing.assert_allclose(host, want, 2e-5, 2e-5, err_msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(5, 100), (64, 128), (300,)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_over_an_axis(run, rng, shape, dtype):
    """softmax and its relatives, also of rows of which nothing is left."""
    x = (rng.standard_normal(shape) * 8).astype(dtype)
    x[..., 3] = -np.inf
    mask = rng.random(shape) < 0.7
    mask[..., 0] = True

    def body(x_ref, m_ref, soft_ref, log_ref, sum_ref, masked_ref, std_ref):
        x = x_ref[...]
        soft_ref[...] = nn.softmax(x)
        log_ref[...] = nn.log_softmax(x)
        sum_ref[...] = nn.logsumexp(x, axis=-1)
        masked_ref[...] = nn.softmax(x, where=m_ref[...])
        std_ref[...] = nn.standardize(jnp.where(x == -jnp.inf, 0, x))

    row = np.zeros(shape[:-1], dtype)
    got = run(body, (x, x, row, x, x), x, mask)
    w = x.astype(np.float64)
    p = np_softmax(w, -1)
    left = np_softmax(np.where(mask, w, -np.inf), -1)
    z = np.where(np.isinf(w), 0, w)
    z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    want = p, np.log(p), np.log(np.exp(w).sum(-1)), left, z
    unit = 1e-5 if dtype == f32 else 0.05
    for y, reference in zip(got, want, strict=True):
        np.testing.assert_allclose(y.astype(np.float64), reference, unit, unit)


def test_choices(run, rng):
    """select, select_n by integers, one_hot, glu."""
    x = rng.integers(-2, 5, 64, dtype=np.int32)
    y = rng.standard_normal((64, 128)).astype(f32)

    def body(x_ref, y_ref, s_ref, n_ref, hot_ref, glu_ref):
        x = x_ref[...]
        s_ref[...] = jnp.select([x < 0, x < 2], [x * 10, x + 100], -1)
        n_ref[...] = lax.select_n(x, x, x * 2, x * 3)
        hot_ref[...] = nn.one_hot(x, 5)
        glu_ref[...] = nn.glu(y_ref[...])

    hot = np.zeros((64, 5), f32)
    s, n, hot, gated = run(body, (x, x, hot, y[:, :64].copy()), x, y)
    np.testing.assert_array_equal(s, np.select([x < 0, x < 2], [x * 10, x + 100], -1))
    np.testing.assert_array_equal(n, x * (np.clip(x, 0, 2) + 1))
    np.testing.assert_array_equal(hot, x[:, None] == np.arange(5))
    np.testing.assert_allclose(gated, y[:, :64] * sigmoid(y[:, 64:]), 1e-5, 1e-6)


SHAPES = [(1,), (3,), (127,), (129,), (7, 33), (3, 5, 9), (2, 1, 3, 5), (128, 1), (65, 8)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(run, rng, shape, dtype):
    """Some of the functions on every shape, with rows broadcast over it."""
    names = rng.choice(list(UNARY), 3, replace=False)
    pairs = rng.choice(list(BINARY), 3, replace=False)
    x = rng.uniform(2.5, 4, shape).astype(dtype)
    y = rng.uniform(2.5, 4, shape[-1:]).astype(dtype)

    def body(x_ref, y_ref, *out_refs):
        x, y = x_ref[...], y_ref[...]
        for k, name in enumerate(names):
            out_refs[k][...] = UNARY[name][0](x)
        for k, name in enumerate(pairs):
            out_refs[k + 3][...] = BINARY[name][0](x, y)

    got = run(body, (x,) * 6, x, y)
    w, v = x.astype(np.float64), np.broadcast_to(y, shape).astype(np.float64)
    for k, name in enumerate([*names, *pairs]):
        f = UNARY[name][1](w.reshape(-1)) if k < 3 else BINARY[name][1](w, v)
        bound = UNARY[name][2] if k < 3 else BINARY[name][2]
        steps = 16 if name in IN_STEPS or "log" in name or name == "hypot" else 1
        inside = UNARY[name][3] if k < 3 else ALL
        d = errors(got[k], f.reshape(shape), w, inside)
        assert d.max() <= (bound if dtype == f32 else steps), (name, d.max())


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_approximate_reciprocal(run, rng, dtype):
    """To 1 ulp of float32, then rounded; zeros and infinities; full_range and integers divide."""
    x = np.exp(rng.uniform(-9, 9, 1024)) * rng.choice([-1, 1], 1024)
    x[:4] = 0.0, -0.0, np.inf, -np.inf
    x = x.astype(dtype)

    def body(x_ref, o_ref, full_ref, int_ref):
        x = x_ref[...]
        o_ref[...] = pl.reciprocal(x, approx=True)
        full_ref[...] = pl.reciprocal(x, approx=True, full_range=True)
        int_ref[...] = pl.reciprocal(jnp.full(x.shape, 3), approx=True)

    got, full, third = run(body, (x, x, np.zeros(1024, f32)), x)
    want = 1 / x.astype(np.float64)
    exact = (1 / x.astype(f32)).astype(dtype)
    near = float(ml_dtypes.finfo(dtype).eps) * (run.way == "cuda")
    np.testing.assert_allclose(full.astype(f32), exact.astype(f32), rtol=near, atol=0)
    np.testing.assert_allclose(third, np.float32(1) / np.float32(3), rtol=1.2e-7, atol=0)
    step = np.abs(exact.astype(np.float64)) * float(ml_dtypes.finfo(dtype).eps)
    finite = np.isfinite(want)
    error = np.abs(got.astype(np.float64) - want)[finite]
    assert (error <= (1 if dtype == f32 else 0.51) * step[finite]).all()
    np.testing.assert_array_equal(got[~finite], exact[~finite])
