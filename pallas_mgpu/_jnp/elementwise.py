"""Elementwise functions: arithmetic, comparisons, and what is composed of them.

`absolute`, `add` and the like are made by `_unary` and `_binary`: an op of the graph, and the
function of NumPy that computes the same on host arrays, which also gives the name. What reads or
makes the bits of a float goes through integers of its width.
"""

import builtins
import math

import numpy as np

from .. import _core
from .._control import while_loop
from .._names import show
from .._trace import Array
from .._types import is_integer
from .array import finfo, full, inf, nan
from .base import either, host, host_floats, is_traced, on_host
from .shape import broadcast_arrays, broadcast_to

__all__ = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "around",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_count",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "cbrt",
    "ceil",
    "choose",
    "clip",
    "conj",
    "conjugate",
    "copysign",
    "cos",
    "cosh",
    "deg2rad",
    "degrees",
    "divide",
    "divmod",
    "equal",
    "exp",
    "exp2",
    "expm1",
    "fabs",
    "fix",
    "float_power",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frexp",
    "gcd",
    "greater",
    "greater_equal",
    "heaviside",
    "hypot",
    "invert",
    "isclose",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "lcm",
    "ldexp",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "modf",
    "multiply",
    "nan_to_num",
    "negative",
    "nextafter",
    "not_equal",
    "piecewise",
    "positive",
    "pow",
    "power",
    "rad2deg",
    "radians",
    "real",
    "reciprocal",
    "remainder",
    "right_shift",
    "rint",
    "round",
    "select",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "true_divide",
    "trunc",
    "where",
]

WORDS = {1: "int8", 2: "int16", 4: "int32"}  # by itemsize


def named(f, name, doc):
    """``f`` with a name and a docstring."""
    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc
    return f


# ---- one op each ---------------------------------------------------------------------------------


def _unary(op, of_host, doc, inexact=False):
    """``inexact``: integers become float32."""

    def f(x):
        if is_traced(x):
            if inexact and isinstance(x, Array) and is_integer(x.dtype):
                x = _core.convert(x, "float32")
            return _core.unary(op, x)
        return host(of_host(host_floats(x) if inexact else host(x)))

    return named(f, of_host.__name__, doc)


def _inexact(op, of_host, doc):
    return _unary(op, of_host, doc, inexact=True)


def _binary(op, of_host, doc):
    def f(x, y):
        if is_traced(x, y):
            return _core.binary(op, x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            to = _core.promote_types([x, y])[0]
            if op != "true_divide":
                x, y = np.asarray(x).astype(to), np.asarray(y).astype(to)
        return host(of_host(x, y))

    return named(f, of_host.__name__, doc)


absolute = abs = _unary("abs", np.absolute, "|x|.")
arccos = acos = _inexact("acos", np.arccos, "Inverse cosine; integers become float32.")
arccosh = acosh = _inexact("acosh", np.arccosh, "Inverse hyperbolic cosine.")
arcsin = asin = _inexact("asin", np.arcsin, "Inverse sine; integers become float32.")
arcsinh = asinh = _inexact("asinh", np.arcsinh, "Inverse hyperbolic sine.")
arctan = atan = _inexact("atan", np.arctan, "Inverse tangent; integers become float32.")
arctanh = atanh = _inexact("atanh", np.arctanh, "Inverse hyperbolic tangent.")
cbrt = _inexact("cbrt", np.cbrt, "Cube root; integers become float32.")
ceil = _unary("ceil", np.ceil, "Smallest integer not below x.")
cos = _inexact("cos", np.cos, "Cosine.")
cosh = _inexact("cosh", np.cosh, "Hyperbolic cosine.")
exp = _inexact("exp", np.exp, "e to the x; integers become float32.")
exp2 = _inexact("exp2", np.exp2, "2 to the x; integers become float32.")
expm1 = _inexact("expm1", np.expm1, "exp(x) - 1, exact near 0; integers become float32.")
floor = _unary("floor", np.floor, "Largest integer not above x.")
invert = bitwise_not = _unary("not", np.invert, "Bitwise complement; logical on bool.")
log = _inexact("log", np.log, "Natural logarithm; integers become float32.")
log2 = _inexact("log2", np.log2, "Logarithm to base 2; integers become float32.")
log1p = _inexact("log1p", np.log1p, "log(1 + x), exact near 0; integers become float32.")
negative = _unary("neg", np.negative, "-x.")
rint = _inexact("rint", np.rint, "Nearest integer, halves to even.")
sign = _unary("sign", np.sign, "-1, 0 or 1.")
sin = _inexact("sin", np.sin, "Sine.")
sinh = _inexact("sinh", np.sinh, "Hyperbolic sine.")
sqrt = _inexact("sqrt", np.sqrt, "Square root.")
tan = _inexact("tan", np.tan, "Tangent; integers become float32.")
tanh = _inexact("tanh", np.tanh, "Hyperbolic tangent.")
trunc = _unary("trunc", np.trunc, "x without its fraction.")

add = _binary("add", np.add, "x + y.")
arctan2 = atan2 = _binary(
    "atan2", np.arctan2, "Angle of the point (y, x); integers become float32."
)
bitwise_and = _binary("and", np.bitwise_and, "x & y.")
bitwise_or = _binary("or", np.bitwise_or, "x | y.")
bitwise_xor = _binary("xor", np.bitwise_xor, "x ^ y.")
divide = true_divide = _binary("true_divide", np.true_divide, "x / y; integers become float32.")
equal = _binary("eq", np.equal, "x == y.")
floor_divide = _binary("floor_divide", np.floor_divide, "x // y, rounding down.")
greater = _binary("gt", np.greater, "x > y.")
greater_equal = _binary("ge", np.greater_equal, "x >= y.")
left_shift = bitwise_left_shift = _binary("shl", np.left_shift, "x << y.")
less = _binary("lt", np.less, "x < y.")
less_equal = _binary("le", np.less_equal, "x <= y.")
maximum = _binary("max", np.maximum, "The larger operand; NaN propagates.")
minimum = _binary("min", np.minimum, "The smaller operand; NaN propagates.")
multiply = _binary("mul", np.multiply, "x * y.")
not_equal = _binary("ne", np.not_equal, "x != y.")
power = pow = _binary(
    "power", np.power, "x to the power y; by multiplication if y is a static integer."
)
remainder = mod = _binary("remainder", np.remainder, "x % y, with the sign of the divisor.")
right_shift = bitwise_right_shift = _binary("shr", np.right_shift, "x >> y.")
subtract = _binary("sub", np.subtract, "x - y.")


# ---- logic ---------------------------------------------------------------------------------------


def _truth(x):
    x = _core.as_array(x)
    return x if x.dtype == bool else _core.binary("ne", x, 0)


def logical_and(x, y):
    """(x != 0) and (y != 0), elementwise."""
    return _core.binary("and", _truth(x), _truth(y)) if is_traced(x, y) else np.logical_and(x, y)


def logical_or(x, y):
    """(x != 0) or (y != 0), elementwise."""
    return _core.binary("or", _truth(x), _truth(y)) if is_traced(x, y) else np.logical_or(x, y)


def logical_xor(x, y):
    """(x != 0) != (y != 0), elementwise."""
    return _core.binary("xor", _truth(x), _truth(y)) if is_traced(x, y) else np.logical_xor(x, y)


def logical_not(x):
    """x == 0, elementwise."""
    return _core.unary("not", _truth(x)) if is_traced(x) else np.logical_not(x)


def bitwise_invert(x):
    """Bitwise complement; logical on bool."""
    return invert(x)


def bitwise_count(x):
    """Number of bits set in the magnitude of x, as uint8."""
    if not is_traced(x):
        x = np.abs(host(x))
        return np.unpackbits(x[..., None].view(np.uint8), axis=-1).sum(-1, dtype=np.uint8)
    return _core.convert(_core.unary("popcount", _core.unary("abs", x)), "uint8")


def where(condition, x=None, y=None):
    """``x`` where ``condition`` is true, otherwise ``y``. Kernels need all three arguments."""
    if is_traced(condition, x, y):
        if x is None or y is None:
            raise NotImplementedError("jnp.where: x and y must be given in kernels")
        return _core.where(condition, x, y)
    return np.where(condition) if x is None and y is None else host(np.where(condition, x, y))


# ---- classes of floats ---------------------------------------------------------------------------


def isnan(x):
    """x is not a number."""
    return _core.binary("ne", x, x) if is_traced(x) else np.isnan(x)


def isinf(x):
    """x is infinite."""
    return _core.binary("eq", _core.unary("abs", x), inf) if is_traced(x) else np.isinf(x)


def isfinite(x):
    """x is a finite number."""
    return _core.binary("lt", _core.unary("abs", x), inf) if is_traced(x) else np.isfinite(x)


@on_host
def isposinf(x):
    """x == inf."""
    return equal(_float(x), inf)


@on_host
def isneginf(x):
    """x == -inf."""
    return equal(_float(x), -inf)


def nan_to_num(x, copy=True, nan=0.0, posinf=None, neginf=None):
    """x with NaN replaced by 0 and infinities by the largest finite numbers, unless given."""
    if not is_traced(x):
        return host(np.nan_to_num(host(x), copy, nan, posinf, neginf))
    if is_integer(x.dtype):
        return x
    largest = finfo(x.dtype)
    out = where(x == inf, float(largest.max) if posinf is None else posinf, x)
    out = where(x == -inf, float(largest.min) if neginf is None else neginf, out)
    return where(x != x, nan, out)


# ---- powers and rounding -------------------------------------------------------------------------


def square(x):
    """x * x; bool becomes int32."""
    if is_traced(x) and x.dtype == bool:
        x = _core.convert(x, "int32")
    return multiply(x, x)


def reciprocal(x):
    """1 / x; integers become float32."""
    if is_traced(x) and x.dtype == bool:
        x = _core.convert(x, "float32")
    return divide(1, x)


def clip(x, min=None, max=None, *, a_min=None, a_max=None):  # noqa: A002
    """x clipped to [min, max]; NaN stays NaN."""
    lo, hi = min if a_min is None else a_min, max if a_max is None else a_max
    if lo is not None:
        x = maximum(x, lo)
    if hi is not None:
        x = minimum(x, hi)
    return x


def round(x, decimals=0):  # noqa: A001
    """Round to ``decimals`` digits after the point, to nearest, ties to even."""
    if not is_traced(x):
        return host(np.round(x, decimals))
    if is_integer(_core.as_array(x).dtype):
        return x
    if decimals == 0:
        return _core.unary("rint", x)
    scale = 10.0 ** builtins.abs(decimals)
    if decimals < 0:
        return _core.unary("rint", x / scale) * scale
    return _core.unary("rint", x * scale) / scale


around = round


@on_host
def fix(x):
    """x rounded toward zero."""
    return trunc(x)


# ---- signs, neighbours, parts of floats ----------------------------------------------------------


def _float(x):
    """x, converted to float32 if its dtype is integer."""
    x = _core.as_array(x)
    return _core.convert(x, "float32") if is_integer(x.dtype) else x


def _floats(x, y):
    """Both operands in their common float dtype."""
    dtype, weak = _core.promote_types([x, y])
    dtype = np.dtype("float32") if is_integer(dtype) else dtype
    return tuple(_core.convert(_core.as_array(v, dtype), dtype, weak=weak) for v in (x, y))


def _bits(x):
    return _core.bitcast(x, WORDS[x.dtype.itemsize])


def _sign_mask(bits):
    return -(1 << (8 * bits.dtype.itemsize - 1))


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
    away = where((y > x) == (x > 0), 1, -1).astype(bits.dtype)  # from zero, or toward it
    first = (_bits(y) & _sign_mask(bits)) | 1
    stepped = _core.bitcast(where(x == 0, first, bits + away), x.dtype)
    return where(x == y, y, where((x != x) | (y != y), nan, stepped))


@on_host
def modf(x):
    """Fraction and whole part, both with the sign of x."""
    x = _float(x)
    whole = trunc(x)
    return copysign(where(isinf(x), 0.0, x - whole), x), whole


@on_host
def frexp(x):
    """Mantissa of magnitude [0.5, 1), and exponent (int32) of 2."""
    x = _float(x)
    wide = x.astype("float32")
    small = abs(wide) < 2.0**-126
    bits = _bits(where(small, wide * 2.0**24, wide))
    plain = (wide != 0) & isfinite(wide)
    exponent = ((bits >> 23) & 255) - 126 - where(small, 24, 0)
    mantissa = _core.bitcast((bits & ~(255 << 23)) | (126 << 23), "float32")
    return where(plain, mantissa.astype(x.dtype), x), where(plain, exponent, 0)


def _power_of_two(n):
    return _core.bitcast((n + 127) << 23, "float32")


@on_host
def ldexp(x1, x2):
    """x1 * 2**x2."""
    x = _float(x1)
    n = clip(_core.as_array(x2).astype("int32"), -300, 300)
    last = clip(n, -126, 127)
    first = n - last
    half = first >> 1
    wide = x.astype("float32") * _power_of_two(half) * _power_of_two(first - half)
    return (wide * _power_of_two(last)).astype(x.dtype)


# ---- of two arguments ----------------------------------------------------------------------------


def _is_float(x, y):
    return not is_integer(_core.promote_types([x, y])[0])


@on_host
def fmax(x, y):
    """The larger operand; if one is NaN, the other."""
    return where((x != x) | (y >= x), y, x) if _is_float(x, y) else maximum(x, y)


@on_host
def fmin(x, y):
    """The smaller operand; if one is NaN, the other."""
    return where((x != x) | (y <= x), y, x) if _is_float(x, y) else minimum(x, y)


@on_host
def fmod(x, y):
    """Remainder with the sign of x."""
    return _core.binary("rem", x, y)


@on_host
def divmod(x, y):  # noqa: A001
    """(x // y, x % y)."""
    return floor_divide(x, y), remainder(x, y)


@on_host
def float_power(x, y):
    """x to the power y, in floats."""
    return power(_float(x), y) if isinstance(x, Array) else power(float(x), y)


@on_host
def hypot(x1, x2):
    """sqrt(x1**2 + x2**2), without intermediate overflow."""
    x, y = (abs(v) for v in _floats(x1, x2))
    high, low = maximum(x, y), minimum(x, y)
    ratio = low / where(high == 0, 1.0, high)
    infinite = isinf(x) | isinf(y)
    return where(infinite, inf, high * sqrt(1 + ratio * ratio))


@on_host
def logaddexp(x1, x2):
    """log(exp(x1) + exp(x2))."""
    x, y = _floats(x1, x2)
    delta = x - y
    return where(delta != delta, x + y, maximum(x, y) + log1p(exp(-abs(delta))))


@on_host
def logaddexp2(x1, x2):
    """log2(2**x1 + 2**x2)."""
    x, y = _floats(x1, x2)
    delta = x - y
    more = log1p(exp2(-abs(delta))) * (1 / math.log(2))
    return where(delta != delta, x + y, maximum(x, y) + more)


@on_host
def heaviside(x1, x2):
    """0 below zero, 1 above, x2 at zero."""
    x, y = _floats(x1, x2)
    return where(x == 0, y, where(x != x, x, where(x < 0, 0.0, 1.0)))


@either
def isclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """|a - b| <= atol + rtol * |b|, or equal."""
    a, b = (_core.as_array(x) for x in (a, b))
    if is_integer(a.dtype) or a.dtype == bool:
        a = a.astype("float32")
    if is_integer(b.dtype) or b.dtype == bool:
        b = b.astype("float32")
    near = abs(a - b) <= atol + rtol * abs(b)
    near = (near & isfinite(a) & isfinite(b)) | (a == b)
    return near | (isnan(a) & isnan(b)) if equal_nan else near


@either
def gcd(x1, x2):
    """Greatest common divisor of integers."""
    dtype = _core.promote_types([x1, x2])[0]
    if not is_integer(dtype):
        raise TypeError(f"jnp.gcd: integers are needed, got {dtype}")
    xs = (_core.convert(_core.as_array(x), dtype) for x in (x1, x2))
    a, b = broadcast_arrays(*(abs(x) for x in xs))

    def step(s):
        a, b = s
        return where(b == 0, a, b), where(b == 0, b, a % where(b == 0, 1, b))

    return while_loop(lambda s: _core.reduce("any", s[1] != 0), step, (a, b))[0]


@either
def lcm(x1, x2):
    """Least common multiple of integers."""
    d = gcd(x1, x2)
    return where(d == 0, 0, abs(x1) // where(d == 0, 1, d) * abs(x2))


# ---- choices -------------------------------------------------------------------------------------


def select(condlist, choicelist, default=0):
    """The choice of the first true condition, elementwise."""
    if len(condlist) != len(choicelist):
        raise ValueError(
            f"jnp.select: condlist and choicelist must have one length, got {len(condlist)} and"
            f" {len(choicelist)}"
        )
    if not len(condlist):
        raise ValueError("jnp.select: condlist must not be empty")
    if not is_traced(default, *condlist, *choicelist):
        return host(np.select(condlist, choicelist, default))
    dtype, weak = _core.promote_types([default, *choicelist])
    out = _core.convert(_core.as_array(default), dtype, weak=weak)
    for condition, choice in zip(reversed(condlist), reversed(choicelist)):
        out = where(condition, choice, out)
    return out


def piecewise(x, condlist, funclist, *args, **kw):
    """In the dtype of x, the function (called with x and what follows) or number of the last
    condition that holds. One more entry in ``funclist`` stands for where none holds, else 0.
    Every function is computed for all of x."""
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
    if not is_traced(x, *condlist):
        return host(np.piecewise(host(x), condlist, funclist, *args, **kw))
    x = _core.as_array(x)
    if len(funclist) > n:
        *funclist, default = funclist
    else:
        default = 0
    out = full(x.shape, 0, x.dtype)
    for k, f in enumerate([default, *funclist]):
        y = f(x, *args, **kw) if callable(f) else f
        y = _core.convert(_core.as_array(y), x.dtype)
        if y.shape not in ((), x.shape):
            raise ValueError(
                f"jnp.piecewise: function {k} gives shape {y.shape} for an array of {x.shape}"
            )
        out = where(condlist[k - 1], y, out) if k else broadcast_to(y, x.shape)
    return out


def choose(a, choices, out=None, mode="raise"):
    """``choices[a]`` elementwise, of arrays that broadcast. Kernels need a ``mode``: numbers out
    of range are limited to it ("clip") or taken modulo ("wrap")."""
    if mode not in ("raise", "clip", "wrap"):
        raise ValueError(f"jnp.choose: mode must be 'clip' or 'wrap', got {show(mode)}")
    if not is_traced(a, choices, *(choices if isinstance(choices, (list, tuple)) else ())):
        return host(np.choose(a, choices, out, mode))
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
    a, *choices = broadcast_arrays(a, *choices)
    value = choices[0]
    for k, c in enumerate(choices[1:], 1):
        value = where(a >= k, c, value)
    return value


# ---- of one argument -----------------------------------------------------------------------------


@on_host
def log10(x):
    """Logarithm to base 10; integers become float32."""
    return log(_float(x)) / math.log(10)


@on_host
def sinc(x):
    """sin(pi x) / (pi x), 1 at zero."""
    y = math.pi * _float(x)
    return where(y == 0, 1.0, sin(y) / where(y == 0, 1.0, y))


@on_host
def fabs(x):
    """|x|; integers become float32."""
    return abs(_float(x))


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
