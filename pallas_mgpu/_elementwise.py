"""Elementwise functions of `jnp` and `lax` that are composed of others.

Those of the special functions that no single op computes are the textbook formulas: digamma by
its recurrence and asymptotic series, scaled Bessel functions by their power and asymptotic series.
What reads or makes the bits of a float goes through integers of its width. Every function of
`jnp` here also takes host arrays, which NumPy computes."""

import math

import numpy as np

from . import _core
from . import numpy as jnp
from ._names import show
from ._trace import Array, Ref
from ._types import is_integer

LAX_NAMES: tuple[str, ...] = (
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "is_finite",
    "logistic",
    "nextafter",
    "reciprocal",
)
NUMPY_NAMES: tuple[str, ...] = (
    "choose",
    "conj",
    "conjugate",
    "copysign",
    "deg2rad",
    "degrees",
    "divmod",
    "fabs",
    "fix",
    "float_power",
    "fmax",
    "fmin",
    "fmod",
    "frexp",
    "heaviside",
    "hypot",
    "isneginf",
    "isposinf",
    "ldexp",
    "log10",
    "logaddexp",
    "logaddexp2",
    "modf",
    "nan_to_num",
    "nextafter",
    "piecewise",
    "positive",
    "rad2deg",
    "radians",
    "real",
    "select",
    "signbit",
    "sinc",
)

WORDS = {1: "int8", 2: "int16", 4: "int32"}  # by itemsize


def _traced(*xs):
    return any(isinstance(x, (Array, Ref)) for x in xs)


def on_host(f):
    """Decorator: without traced arguments NumPy's function of that name is called."""

    def g(*args, **kwargs):
        if _traced(*args):
            return f(*args, **kwargs)
        with np.errstate(all="ignore"):
            out = getattr(np, f.__name__)(*map(jnp._host, args), **kwargs)
        return tuple(map(jnp._host, out)) if isinstance(out, tuple) else jnp._host(out)

    g.__name__ = g.__qualname__ = f.__name__
    g.__doc__ = f.__doc__
    return g


def _float(x):
    """x, float32 if it was of integers."""
    x = _core.as_array(x)
    return _core.convert(x, "float32") if is_integer(x.dtype) else x


def _floats(x, y):
    """Both in their common float dtype."""
    dtype, weak = _core.promote_types([x, y])
    dtype = np.dtype("float32") if is_integer(dtype) else dtype
    return tuple(_core.convert(_core.as_array(v, dtype), dtype, weak=weak) for v in (x, y))


def _bits(x):
    return _core.bitcast(x, WORDS[x.dtype.itemsize])


def _sign_mask(bits):
    return -(1 << (8 * bits.dtype.itemsize - 1))


# ---- signs, neighbours, parts of floats ----------------------------------------------------------


@on_host
def signbit(x):
    """Is the sign of x set (also of -0.0 and NaN)?"""
    x = _core.as_array(x)
    if is_integer(x.dtype):
        return x < 0
    bits = _bits(x)
    return (bits & _sign_mask(bits)) != 0


@on_host
def copysign(x1, x2):
    """|x1| with the sign of x2."""
    x, y = _floats(x1, x2)
    sign = _sign_mask(_bits(x))
    return _core.bitcast((_bits(x) & ~sign) | (_bits(y) & sign), x.dtype)


@on_host
def nextafter(x, y):
    """The next float after x in the direction of y."""
    x, y = _floats(x, y)
    bits = _bits(x)
    away = jnp.where((y > x) == (x > 0), 1, -1).astype(bits.dtype)  # from zero, or toward it
    first = (_bits(y) & _sign_mask(bits)) | 1
    stepped = _core.bitcast(jnp.where(x == 0, first, bits + away), x.dtype)
    return jnp.where(x == y, y, jnp.where((x != x) | (y != y), jnp.nan, stepped))


@on_host
def modf(x):
    """Fraction and whole part, both with the sign of x."""
    x = _float(x)
    whole = jnp.trunc(x)
    return copysign(jnp.where(jnp.isinf(x), 0.0, x - whole), x), whole


@on_host
def frexp(x):
    """Mantissa of magnitude [0.5, 1), and exponent (int32) of 2."""
    x = _float(x)
    wide = x.astype(jnp.float32)
    small = jnp.abs(wide) < 2.0**-126
    bits = _bits(jnp.where(small, wide * 2.0**24, wide))
    plain = (wide != 0) & jnp.isfinite(wide)
    exponent = ((bits >> 23) & 255) - 126 - jnp.where(small, 24, 0)
    mantissa = _core.bitcast((bits & ~(255 << 23)) | (126 << 23), "float32")
    return (
        jnp.where(plain, mantissa.astype(x.dtype), x),
        jnp.where(plain, exponent, 0),
    )


def _power_of_two(n):
    return _core.bitcast((n + 127) << 23, "float32")


@on_host
def ldexp(x1, x2):
    """x1 * 2**x2."""
    x = _float(x1)
    n = jnp.clip(_core.as_array(x2).astype(jnp.int32), -300, 300)
    last = jnp.clip(n, -126, 127)
    first = n - last
    half = first >> 1
    wide = x.astype(jnp.float32) * _power_of_two(half) * _power_of_two(first - half)
    return (wide * _power_of_two(last)).astype(x.dtype)


@on_host
def isposinf(x):
    """x == inf."""
    return jnp.equal(_float(x), jnp.inf)


@on_host
def isneginf(x):
    """x == -inf."""
    return jnp.equal(_float(x), -jnp.inf)


def nan_to_num(x, copy=True, nan=0.0, posinf=None, neginf=None):
    """x with numbers in place of NaN and infinities; the largest finite ones unless given."""
    if not _traced(x):
        return jnp._host(np.nan_to_num(jnp._host(x), copy, nan, posinf, neginf))
    if is_integer(x.dtype):
        return x
    largest = jnp.finfo(x.dtype)
    out = jnp.where(x == jnp.inf, float(largest.max) if posinf is None else posinf, x)
    out = jnp.where(x == -jnp.inf, float(largest.min) if neginf is None else neginf, out)
    return jnp.where(x != x, nan, out)


# ---- of two arguments ----------------------------------------------------------------------------


@on_host
def fmax(x, y):
    """The greater; a number wins over NaN."""
    return jnp.where((x != x) | (y >= x), y, x) if _is_float(x, y) else jnp.maximum(x, y)


@on_host
def fmin(x, y):
    """The lesser; a number wins over NaN."""
    return jnp.where((x != x) | (y <= x), y, x) if _is_float(x, y) else jnp.minimum(x, y)


def _is_float(x, y):
    return not is_integer(_core.promote_types([x, y])[0])


@on_host
def fmod(x, y):
    """Remainder with the sign of x."""
    return _core.binary("rem", x, y)


@on_host
def divmod(x, y):  # noqa: A001
    """(x // y, x % y)."""
    return jnp.floor_divide(x, y), jnp.remainder(x, y)


@on_host
def float_power(x, y):
    """x to the y, in floats."""
    return jnp.power(_float(x), y) if isinstance(x, Array) else jnp.power(float(x), y)


@on_host
def hypot(x1, x2):
    """sqrt(x1**2 + x2**2), without overflow on the way."""
    x, y = (jnp.abs(v) for v in _floats(x1, x2))
    high, low = jnp.maximum(x, y), jnp.minimum(x, y)
    ratio = low / jnp.where(high == 0, 1.0, high)
    infinite = jnp.isinf(x) | jnp.isinf(y)
    return jnp.where(infinite, jnp.inf, high * jnp.sqrt(1 + ratio * ratio))


@on_host
def logaddexp(x1, x2):
    """log(exp(x1) + exp(x2))."""
    x, y = _floats(x1, x2)
    delta = x - y
    return jnp.where(delta != delta, x + y, jnp.maximum(x, y) + jnp.log1p(jnp.exp(-jnp.abs(delta))))


@on_host
def logaddexp2(x1, x2):
    """log2(2**x1 + 2**x2)."""
    x, y = _floats(x1, x2)
    delta = x - y
    more = jnp.log1p(jnp.exp2(-jnp.abs(delta))) * (1 / math.log(2))
    return jnp.where(delta != delta, x + y, jnp.maximum(x, y) + more)


@on_host
def heaviside(x1, x2):
    """0 below zero, 1 above, x2 at zero."""
    x, y = _floats(x1, x2)
    return jnp.where(x == 0, y, jnp.where(x != x, x, jnp.where(x < 0, 0.0, 1.0)))


def select(condlist, choicelist, default=0):
    """The choice of the first condition that holds, elementwise."""
    if len(condlist) != len(choicelist):
        raise ValueError(
            f"jnp.select: condlist and choicelist must have one length, got {len(condlist)} and"
            f" {len(choicelist)}"
        )
    if not len(condlist):
        raise ValueError("jnp.select: condlist must not be empty")
    if not _traced(default, *condlist, *choicelist):
        return jnp._host(np.select(condlist, choicelist, default))
    dtype, weak = _core.promote_types([default, *choicelist])
    out = _core.convert(_core.as_array(default), dtype, weak=weak)
    for condition, choice in zip(reversed(condlist), reversed(choicelist)):
        out = jnp.where(condition, choice, out)
    return out


def piecewise(x, condlist, funclist, *args, **kw):
    """In the dtype of x the function (called with x and what follows) or number of the last
    condition that holds; one more in ``funclist`` where none holds, else 0. Every function is
    computed for all of x."""
    if not isinstance(condlist, (list, tuple)):
        condlist = [condlist]
    if not isinstance(funclist, (list, tuple)):
        raise TypeError(f"jnp.piecewise: funclist must be a list, got {show(funclist)}")
    n = len(condlist)
    if not n or len(funclist) not in (n, n + 1):
        raise ValueError(
            f"jnp.piecewise: with {n} conditions there must be {n} or {n + 1} functions, got"
            f" {len(funclist)}"
        )
    if not _traced(x, *condlist):
        return jnp._host(np.piecewise(jnp._host(x), condlist, funclist, *args, **kw))
    x = _core.as_array(x)
    if len(funclist) > n:
        *funclist, default = funclist
    else:
        default = 0
    out = jnp.full(x.shape, 0, x.dtype)
    for k, f in enumerate([default, *funclist]):
        y = f(x, *args, **kw) if callable(f) else f
        y = _core.convert(_core.as_array(y), x.dtype)
        if y.shape not in ((), x.shape):
            raise ValueError(
                f"jnp.piecewise: function {k} gives shape {y.shape} for an array of {x.shape}"
            )
        out = jnp.where(condlist[k - 1], y, out) if k else jnp.broadcast_to(y, x.shape)
    return out


def choose(a, choices, out=None, mode="raise"):
    """``choices[a]`` elementwise, arrays that broadcast; numbers out of range are limited to it
    (``mode="clip"``) or taken modulo ("wrap"), one of which kernels need."""
    if mode not in ("raise", "clip", "wrap"):
        raise ValueError(f"jnp.choose: mode must be 'clip' or 'wrap', got {show(mode)}")
    if not _traced(a, choices, *(choices if isinstance(choices, (list, tuple)) else ())):
        return jnp._host(np.choose(a, choices, out, mode))
    if out is not None:
        raise NotImplementedError("jnp.choose: out= is not supported")
    if mode == "raise":
        raise _core.ConcretizationTypeError(
            "jnp.choose: numbers are known only at run time; pass mode='clip' or mode='wrap'"
        )
    a = _core.as_array(a)
    if not is_integer(a.dtype):
        raise TypeError(f"jnp.choose: numbers must be integers, got {a.dtype}")
    if not isinstance(choices, (list, tuple)):
        choices = [choices[k] for k in range(choices.shape[0])]
    if not choices:
        raise ValueError("jnp.choose: choices must not be empty")
    a = _core.convert(a, "int32")
    a = a % len(choices) if mode == "wrap" else a
    dtype, weak = _core.promote_types(list(choices))
    choices = [_core.convert(_core.as_array(c), dtype, weak=weak) for c in choices]
    a, *choices = jnp.broadcast_arrays(a, *choices)
    value = choices[0]
    for k, c in enumerate(choices[1:], 1):
        value = jnp.where(a >= k, c, value)
    return value


# ---- of one argument -----------------------------------------------------------------------------


@on_host
def log10(x):
    """Logarithm to base 10; integers become float32."""
    return jnp.log(_float(x)) / math.log(10)


@on_host
def sinc(x):
    """sin(pi x) / (pi x), 1 at zero."""
    y = math.pi * _float(x)
    return jnp.where(y == 0, 1.0, jnp.sin(y) / jnp.where(y == 0, 1.0, y))


@on_host
def fabs(x):
    """|x|; integers become float32."""
    return jnp.abs(_float(x))


@on_host
def fix(x):
    """x without its fraction."""
    return jnp.trunc(x)


@on_host
def degrees(x):
    """Radians to degrees."""
    return _float(x) * (180 / math.pi)


@on_host
def radians(x):
    """Degrees to radians."""
    return _float(x) * (math.pi / 180)


@on_host
def positive(x):
    """x."""
    return x


rad2deg, deg2rad = degrees, radians


def conj(x):
    """x: there are no complex dtypes."""
    return x


conjugate = real = conj


# ---- lax -----------------------------------------------------------------------------------------


def _need_float(name, *xs):
    for x in xs:
        dtype = _core.as_array(x).dtype
        if is_integer(dtype):
            raise TypeError(
                f"lax.{name} does not accept dtype {dtype}; it accepts floating dtypes, convert"
                " with x.astype(jnp.float32)"
            )


def is_finite(x):
    """x is a finite number."""
    _need_float("is_finite", x)
    return jnp.isfinite(x)


def logistic(x, *, accuracy=None):
    """1 / (1 + exp(-x))."""
    if accuracy is not None:
        raise NotImplementedError("lax.logistic: only accuracy=None is supported")
    _need_float("logistic", x)
    return 1 / (1 + jnp.exp(-x))


def reciprocal(x):
    """1 / x."""
    _need_float("reciprocal", x)
    return 1 / x


def _series(x, coefficients):
    out = coefficients[0]
    for c in coefficients[1:]:
        out = out * x + c
    return out


def _in_float32(f):
    """Decorator: computed in float32 and rounded once."""

    def g(x):
        _need_float(f.__name__, x)
        x = _core.as_array(x)
        return f(x.astype(jnp.float32)).astype(x.dtype)

    g.__name__ = g.__qualname__ = f.__name__
    g.__doc__ = f.__doc__
    return g


@_in_float32
def digamma(x):
    """Derivative of lgamma."""
    mirrored = x < 0.5  # digamma(x) is digamma(1 - x) - pi / tan(pi x)
    y, below = jnp.where(mirrored, 1 - x, x), 0.0
    for _ in range(7):
        small = y < 7
        below = below + jnp.where(small, 1 / y, 0.0)
        y = jnp.where(small, y + 1, y)
    z = 1 / (y * y)
    tail = z * _series(z, (-1 / 252, 1 / 120, -1 / 12))
    out = jnp.log(y) - 0.5 / y + tail - below
    fraction = x - jnp.floor(x + 0.5)
    out = jnp.where(mirrored, out - math.pi / jnp.tan(math.pi * fraction), out)
    return jnp.where((x <= 0) & (fraction == 0), jnp.nan, out)


def _bessel(x, order):
    """exp(-|x|) I_n(x): the power series below 12, where its terms are all positive, and the
    asymptotic one above. Terms as ratios of neighbours."""
    a = jnp.abs(x)
    near = jnp.minimum(a, 12.0)
    quarter, out = near * near * 0.25, 1.0
    for k in range(32, 0, -1):
        out = 1.0 + out * quarter * (1 / (k * (k + order)))
    out = out * jnp.exp(-near) * (near * 0.5 if order else 1.0)
    far = jnp.maximum(a, 12.0)
    tail, mu = 1.0, 4.0 * order * order
    for k in range(8, 0, -1):
        tail = 1.0 - tail * ((mu - (2 * k - 1) ** 2) / (8 * k)) / far
    tail = tail * jnp.sqrt((1 / (2 * math.pi)) / far)
    out = jnp.where(a < 12, out, tail)
    return jnp.where(x != x, x, jnp.where(x < 0, -out, out) if order else out)


@_in_float32
def bessel_i0e(x):
    """exp(-|x|) I0(x): the modified Bessel function of order 0, scaled."""
    return _bessel(x, 0)


@_in_float32
def bessel_i1e(x):
    """exp(-|x|) I1(x): the modified Bessel function of order 1, scaled."""
    return _bessel(x, 1)
