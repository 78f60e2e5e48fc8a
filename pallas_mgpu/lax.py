"""The `lax` namespace for kernel bodies: array functions, control flow, axis queries.

Unlike `jax.lax`, dtypes promote as in `pallas_mgpu.numpy`: a superset of what `jax.lax` accepts.
Functions of floats (`exp`, `rsqrt` ...) refuse integers, as there."""

import builtins
import enum
import math

import numpy as np

from . import _core, _lax_moves, _shapes
from ._control import cond, fori_loop, switch, while_loop
from ._dot import DotAlgorithmPreset, Precision
from ._lax_moves import *  # noqa: F403 - what it lists in __all__
from ._loops import associative_scan, map, scan
from ._names import LAX_MISSING, finder, show
from ._ops import axis_index, axis_size, optimization_barrier
from ._types import is_integer
from .numpy import _composed, full_like

__all__ = [
    "DotAlgorithmPreset",
    "Precision",
    "associative_scan",
    "axis_index",
    "axis_size",
    "cond",
    "div",
    "fori_loop",
    "full_like",
    "map",
    "optimization_barrier",
    "scan",
    "switch",
    "while_loop",
    *_lax_moves.__all__,
]


def _unary(op, doc):
    def f(x, *, accuracy=None):
        if accuracy is not None:
            raise NotImplementedError(f"lax.{f.__name__}: only accuracy=None is supported")
        return _core.unary(op, x)

    f.__doc__ = doc
    return f


def _two_operands(op, x, y, name):
    shapes = [tuple(getattr(v, "shape", ())) for v in (x, y)]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise TypeError(
            f"{name} got incompatible shapes for broadcasting: {shapes[0]}, {shapes[1]}"
        ) from None
    return _core.binary(op, x, y)


def _binary(op, doc):
    def f(x, y):
        return _two_operands(op, x, y, op)

    f.__doc__ = doc
    return f


def _inexact(op, doc):
    unary = _unary(op, doc)

    def f(x, *, accuracy=None):
        if hasattr(x, "dtype") and is_integer(x.dtype):
            raise TypeError(
                f"lax.{op} does not accept dtype {x.dtype}; it accepts floating dtypes, convert"
                " with x.astype(jnp.float32)"
            )
        return unary(x, accuracy=accuracy)

    f.__doc__ = doc
    return f


def _define(table, make):
    for name, (op, doc) in table.items():
        f = make(op, doc)
        f.__name__ = f.__qualname__ = name
        globals()[name] = f
        __all__.append(name)


_define(
    {
        "abs": ("abs", "|x|"),
        "bitwise_not": ("not", "Bitwise complement; logical on bool."),
        "clz": ("clz", "Number of leading zero bits."),
        "neg": ("neg", "-x."),
        "population_count": ("popcount", "Number of bits that are set."),
        "sign": ("sign", "-1, 0 or 1."),
    },
    _unary,
)
_define(
    {
        "acos": ("acos", "Inverse cosine."),
        "acosh": ("acosh", "Inverse hyperbolic cosine."),
        "asin": ("asin", "Inverse sine."),
        "asinh": ("asinh", "Inverse hyperbolic sine."),
        "atan": ("atan", "Inverse tangent."),
        "atanh": ("atanh", "Inverse hyperbolic tangent."),
        "cbrt": ("cbrt", "Cube root."),
        "ceil": ("ceil", "Smallest integer not below x."),
        "cos": ("cos", "Cosine."),
        "cosh": ("cosh", "Hyperbolic cosine."),
        "erf": ("erf", "Error function."),
        "erf_inv": ("erf_inv", "Inverse error function."),
        "erfc": ("erfc", "1 - erf(x), exact where that is small."),
        "exp": ("exp", "e to the x."),
        "exp2": ("exp2", "2 to the x."),
        "expm1": ("expm1", "exp(x) - 1, exact near 0."),
        "floor": ("floor", "Largest integer not above x."),
        "lgamma": ("lgamma", "Logarithm of the magnitude of the gamma function."),
        "log": ("log", "Natural logarithm."),
        "log1p": ("log1p", "log(1 + x), exact near 0."),
        "rsqrt": ("rsqrt", "1 / sqrt(x)."),
        "sin": ("sin", "Sine."),
        "sinh": ("sinh", "Hyperbolic sine."),
        "sqrt": ("sqrt", "Square root."),
        "tan": ("tan", "Tangent."),
        "tanh": ("tanh", "Hyperbolic tangent."),
    },
    _inexact,
)
_define(
    {
        "add": ("add", "x + y."),
        "atan2": ("atan2", "Angle of the point (y, x)."),
        "bitwise_and": ("and", "x & y."),
        "bitwise_or": ("or", "x | y."),
        "bitwise_xor": ("xor", "x ^ y."),
        "eq": ("eq", "x == y."),
        "ge": ("ge", "x >= y."),
        "gt": ("gt", "x > y."),
        "le": ("le", "x <= y."),
        "lt": ("lt", "x < y."),
        "max": ("max", "The greater; NaN propagates."),
        "min": ("min", "The lesser; NaN propagates."),
        "mul": ("mul", "x * y."),
        "ne": ("ne", "x != y."),
        "pow": ("pow", "x to the y; a static whole y by multiplication."),
        "rem": ("rem", "Remainder with the sign of the dividend."),
        "shift_left": ("shl", "x << y."),
        "sub": ("sub", "x - y."),
    },
    _binary,
)


def div(x, y, *, exact=False):
    """x / y; integers truncate toward zero.

    A quotient of floats is within 2 units in the last place on a GPU; with ``exact``, or under
    ``CompilerParams(exact_division=True)``, it is correctly rounded, at two to three times the
    cost. The interpreter always rounds correctly."""
    if not isinstance(exact, bool):
        raise TypeError(f"div: exact must be a bool, got {show(exact)}")
    return _two_operands("div_exact" if exact else "div", x, y, "div")


class RoundingMethod(enum.IntEnum):
    """Where halves go."""

    AWAY_FROM_ZERO = 0
    TO_NEAREST_EVEN = 1


AWAY_FROM_ZERO, TO_NEAREST_EVEN = RoundingMethod.AWAY_FROM_ZERO, RoundingMethod.TO_NEAREST_EVEN


def round(x, rounding_method=AWAY_FROM_ZERO):  # noqa: A001
    """Nearest integer; halves away from zero, or to even with ``TO_NEAREST_EVEN``."""
    if rounding_method not in (AWAY_FROM_ZERO, TO_NEAREST_EVEN):
        raise ValueError(
            "lax.round: rounding_method must be lax.AWAY_FROM_ZERO or lax.TO_NEAREST_EVEN, got"
            f" {show(rounding_method)}"
        )
    return _core.unary("round" if rounding_method == AWAY_FROM_ZERO else "rint", x)


def _shift(x, y, signed, what):
    x = _core.as_array(x)
    if x.dtype == bool or not is_integer(x.dtype):
        raise TypeError(f"{what} does not accept dtype {x.dtype}")
    name = x.dtype.name
    other = name.lstrip("u") if signed else "u" + name.lstrip("u")
    if name == other:
        return _core.binary("shr", x, y)
    return _core.bitcast(
        _core.binary("shr", _core.bitcast(x, other), _core.convert(y, other)), name
    )


def shift_right_logical(x, y):
    """x >> y, filling with zeros."""
    return _shift(x, y, False, "shift_right_logical")


def shift_right_arithmetic(x, y):
    """x >> y, filling with the sign."""
    return _shift(x, y, True, "shift_right_arithmetic")


def reduce_precision(operand, exponent_bits, mantissa_bits):
    """Rounded to a float of that many bits, of the same dtype; what is below its normal numbers
    becomes zero."""
    if exponent_bits < 1 or mantissa_bits < 0:
        raise ValueError(
            "lax.reduce_precision: exponent_bits must be at least 1 and mantissa_bits 0, got"
            f" {show(exponent_bits)} and {show(mantissa_bits)}"
        )
    x = _core.as_array(operand)
    drop = 23 - mantissa_bits if mantissa_bits < 23 else 0
    wide = _core.convert(x, "float32")
    bits = _core.bitcast(wide, "int32")
    if drop:
        bits = (bits + (((bits >> drop) & 1) + ((1 << drop - 1) - 1))) & -(1 << drop)
    out = _core.bitcast(bits, "float32")
    if exponent_bits < 8:
        bias = (1 << exponent_bits - 1) - 1
        size = _core.unary("abs", out)
        zero, infinite = (_core.binary("mul", out, v) for v in (0.0, math.inf))
        out = _core.where(_core.binary("lt", size, 2.0 ** (1 - bias)), zero, out)
        out = _core.where(_core.binary("ge", size, 2.0 ** (bias + 1)), infinite, out)
    plain = _core.binary("lt", _core.unary("abs", wide), math.inf)
    return _core.convert(_core.where(plain, out, wide), x.dtype)


def integer_pow(x, y):
    """x to the static int y, by multiplication."""
    return x**y


def square(x):
    """x * x."""
    return _core.binary("mul", x, x)


def select(pred, on_true, on_false):
    """``on_true`` where ``pred``, else ``on_false``."""
    return _core.where(pred, on_true, on_false)


def select_n(which, *cases):
    """``cases[which]`` elementwise; ``which`` is bool (two cases) or int (clamped)."""
    if not cases:
        raise TypeError("select_n: at least one case must be given")
    which = _core.as_array(which)
    if which.dtype == bool and len(cases) > 2:
        raise TypeError(f"select_n: a bool selects one of two cases, got {len(cases)}")
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        out = _core.where(which if which.dtype == bool else which >= k, case, out)
    return out


def clamp(lo, x, hi):
    """min(max(x, lo), hi)."""
    return _core.binary("min", _core.binary("max", x, lo), hi)


def convert_element_type(x, dtype):
    """x in another dtype, by value."""
    return _core.convert(_core.as_array(x), _core.as_dtype(dtype))


def bitcast_convert_type(x, dtype):
    """x in another dtype of the same width, by bits."""
    return _core.bitcast(_core.as_array(x), _core.as_dtype(getattr(dtype, "dtype", dtype)))


def broadcast_in_dim(x, shape, broadcast_dimensions):
    """Operand dim k becomes result dim ``broadcast_dimensions[k]``."""
    return _core.broadcast_in_dim(_core.as_array(x), shape, broadcast_dimensions)


def broadcast(x, sizes):
    """New leading dims ``sizes``."""
    x = _core.as_array(x)
    n = len(sizes)
    return _core.broadcast_in_dim(x, (*sizes, *x.shape), tuple(range(n, n + x.ndim)))


def reshape(x, new_sizes, dimensions=None):
    """Same elements, row-major."""
    if dimensions is not None:
        raise NotImplementedError("lax.reshape: dimensions= is not supported")
    return _core.reshape(_core.as_array(x), new_sizes)


def squeeze(x, dimensions):
    """Drop dims of size 1."""
    return _core.as_array(x).squeeze(dimensions)


def slice(x, start_indices, limit_indices, strides=None):  # noqa: A001
    """Static slice."""
    if strides is not None and any(s != 1 for s in strides):
        bounds = zip(start_indices, limit_indices, strides)
        return _core.as_array(x)[tuple(builtins.slice(*b) for b in bounds)]
    sizes = tuple(b - a for a, b in zip(start_indices, limit_indices))
    return _core.slice_array(_core.as_array(x), tuple(start_indices), sizes)


def full(shape, fill_value, dtype=None):
    """One value everywhere."""
    return _core.full(shape, fill_value, dtype)


def iota(dtype, size):
    """0 .. size-1."""
    return _core.iota(dtype, (size,), 0)


def broadcasted_iota(dtype, shape, dimension):
    """Index along ``dimension``."""
    return _core.iota(dtype, shape, dimension)


def _reduction(kind, doc):
    def f(x, axes):
        return _core.reduce(
            kind, _core.as_array(x), tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        )

    f.__doc__ = doc
    return f


_define(
    {
        "reduce_max": ("max", "Greatest over axes."),
        "reduce_min": ("min", "Least over axes."),
        "reduce_sum": ("add", "Sum over axes in the dtype of x."),
    },
    _reduction,
)


def _bit_reduction(op, kind, doc):
    def f(x, axes):
        x = _core.as_array(x)
        axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        if x.dtype == bool and kind:
            return _core.reduce(kind, x, axes)
        return _shapes.fold(op, x, axes, f"lax.{f.__name__}")

    f.__doc__ = doc
    return f


for _name, _args in {
    "reduce_or": ("or", "any", "Bitwise or over axes; of bool arrays: is any element true?"),
    "reduce_and": ("and", "all", "Bitwise and over axes; of bool arrays: are all elements true?"),
    "reduce_xor": ("xor", None, "Bitwise exclusive or over axes."),
}.items():
    _f = _bit_reduction(*_args)
    _f.__name__ = _f.__qualname__ = _name
    globals()[_name] = _f
    __all__.append(_name)
del _name, _args, _f


_COMBINED_BY = {
    "add": "reduce_sum",
    "mul": "reduce_prod",
    "max": "reduce_max",
    "min": "reduce_min",
    "bitwise_or": "reduce_or",
    "bitwise_and": "reduce_and",
    "bitwise_xor": "reduce_xor",
}


def reduce(operand, init_value, computation, dimensions):
    """``operand`` combined over dims, then with ``init_value``: by lax.add, mul, max, min,
    bitwise_or, bitwise_and or bitwise_xor."""
    name = getattr(computation, "__name__", None)
    if name not in _COMBINED_BY or globals()[name] is not computation:
        raise NotImplementedError(
            f"lax.reduce: computation must be one of {', '.join(f'lax.{k}' for k in _COMBINED_BY)},"
            f" got {show(computation)}"
        )
    return computation(globals()[_COMBINED_BY[name]](operand, tuple(dimensions)), init_value)


for _name in _composed.LAX_NAMES:
    globals()[_name] = getattr(_composed, _name)
    __all__.append(_name)
del _name


def stop_gradient(x):
    """Identity."""
    return x


def pvary(x, axis_name):
    """Identity: there is one device."""
    return x


def reshard(x, sharding):
    """Identity: there is one device."""
    return x


def psum(x, axis_name):
    """The size of the axis times a Python number; sums over blocks are not offered."""
    if isinstance(x, (int, float)):
        return x * axis_size(axis_name)
    raise NotImplementedError(
        "Unimplemented primitive in Pallas Mosaic GPU lowering: psum of other than Python numbers;"
        " give each block its own output"
    )


_find = finder(
    "lax",
    LAX_MISSING,
    {},
    "Unimplemented primitive in Pallas Mosaic GPU lowering: {name}; {hint}",
)


def __getattr__(name):
    return _find(name)
