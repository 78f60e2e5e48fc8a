"""The array functions of `lax`, with the argument orders and checks of `jax.lax`.

Unlike in `jax.lax`, dtypes promote as in `pallas_mgpu.numpy`, which accepts more combinations.
Functions of floats (`exp`, `rsqrt` ...) refuse integers, as in `jax.lax`.
"""

import builtins
import enum
import math

import numpy as np

from .. import _core
from .._loops import associative_scan
from .._names import show
from .._ops import axis_size
from .._types import is_integer
from . import elementwise
from . import reduce as reductions
from . import shape as shapes
from . import sort as sorting
from .array import full_like
from .base import axes_of, axis_of, value
from .elementwise import logaddexp, named, nextafter
from .index import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
    slice_in_dim,
)
from .linalg import DotAlgorithmPreset, Precision, dot_general, matmul
from .special import bessel
from .special import digamma as digamma_of_float32

__all__ = [
    "AWAY_FROM_ZERO",
    "DotAlgorithmPreset",
    "Precision",
    "RoundingMethod",
    "TO_NEAREST_EVEN",
    "abs",
    "acos",
    "acosh",
    "add",
    "argmax",
    "argmin",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "batch_matmul",
    "bessel_i0e",
    "bessel_i1e",
    "bitcast_convert_type",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "broadcast",
    "broadcast_in_dim",
    "broadcast_shapes",
    "broadcast_to_rank",
    "broadcasted_iota",
    "cbrt",
    "ceil",
    "clamp",
    "clz",
    "collapse",
    "concatenate",
    "convert_element_type",
    "cos",
    "cosh",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "digamma",
    "div",
    "dot",
    "dot_general",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expand_dims",
    "expm1",
    "floor",
    "full",
    "full_like",
    "ge",
    "gt",
    "index_in_dim",
    "integer_pow",
    "iota",
    "is_finite",
    "le",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "nextafter",
    "pad",
    "population_count",
    "pow",
    "psum",
    "pvary",
    "reciprocal",
    "reduce",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_precision",
    "reduce_prod",
    "reduce_sum",
    "reduce_xor",
    "rem",
    "reshape",
    "reshard",
    "rev",
    "round",
    "rsqrt",
    "select",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "slice",
    "slice_in_dim",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "top_k",
    "transpose",
]

# ---- one op each ---------------------------------------------------------------------------------


def _unary(name, op, doc):
    def f(x, *, accuracy=None):
        if accuracy is not None:
            raise NotImplementedError(f"lax.{name}: only accuracy=None is supported")
        return _core.unary(op, x)

    return named(f, name, doc)


def _need_float(name, x):
    dtype = getattr(x, "dtype", None)
    if dtype is not None and is_integer(dtype):
        raise TypeError(
            f"lax.{name} does not accept dtype {dtype}; it accepts floating dtypes, convert"
            " with x.astype(jnp.float32)"
        )


def _inexact(name, op, doc):
    unary = _unary(name, op, doc)

    def f(x, *, accuracy=None):
        _need_float(name, x)
        return unary(x, accuracy=accuracy)

    return named(f, name, doc)


def _two_operands(name, op, x, y):
    dims = [tuple(getattr(v, "shape", ())) for v in (x, y)]
    try:
        np.broadcast_shapes(*dims)
    except ValueError:
        raise TypeError(
            f"{name} got incompatible shapes for broadcasting: {dims[0]}, {dims[1]}"
        ) from None
    return _core.binary(op, x, y)


def _binary(name, op, doc):
    return named(lambda x, y: _two_operands(name, op, x, y), name, doc)


abs = _unary("abs", "abs", "|x|")
bitwise_not = _unary("bitwise_not", "not", "Bitwise complement; logical on bool.")
clz = _unary("clz", "clz", "Number of leading zero bits.")
neg = _unary("neg", "neg", "-x.")
population_count = _unary("population_count", "popcount", "Number of set bits.")
sign = _unary("sign", "sign", "-1, 0 or 1.")

acos = _inexact("acos", "acos", "Inverse cosine.")
acosh = _inexact("acosh", "acosh", "Inverse hyperbolic cosine.")
asin = _inexact("asin", "asin", "Inverse sine.")
asinh = _inexact("asinh", "asinh", "Inverse hyperbolic sine.")
atan = _inexact("atan", "atan", "Inverse tangent.")
atanh = _inexact("atanh", "atanh", "Inverse hyperbolic tangent.")
cbrt = _inexact("cbrt", "cbrt", "Cube root.")
ceil = _inexact("ceil", "ceil", "Smallest integer not below x.")
cos = _inexact("cos", "cos", "Cosine.")
cosh = _inexact("cosh", "cosh", "Hyperbolic cosine.")
erf = _inexact("erf", "erf", "Error function.")
erf_inv = _inexact("erf_inv", "erf_inv", "Inverse error function.")
erfc = _inexact("erfc", "erfc", "1 - erf(x), accurate where it is small.")
exp = _inexact("exp", "exp", "e to the power x.")
exp2 = _inexact("exp2", "exp2", "2 to the power x.")
expm1 = _inexact("expm1", "expm1", "exp(x) - 1, accurate near 0.")
floor = _inexact("floor", "floor", "Largest integer not above x.")
lgamma = _inexact("lgamma", "lgamma", "Logarithm of the magnitude of the gamma function.")
log = _inexact("log", "log", "Natural logarithm.")
log1p = _inexact("log1p", "log1p", "log(1 + x), accurate near 0.")
rsqrt = _inexact("rsqrt", "rsqrt", "1 / sqrt(x).")
sin = _inexact("sin", "sin", "Sine.")
sinh = _inexact("sinh", "sinh", "Hyperbolic sine.")
sqrt = _inexact("sqrt", "sqrt", "Square root.")
tan = _inexact("tan", "tan", "Tangent.")
tanh = _inexact("tanh", "tanh", "Hyperbolic tangent.")

add = _binary("add", "add", "x + y.")
atan2 = _binary("atan2", "atan2", "Angle of the point (y, x).")
bitwise_and = _binary("bitwise_and", "and", "x & y.")
bitwise_or = _binary("bitwise_or", "or", "x | y.")
bitwise_xor = _binary("bitwise_xor", "xor", "x ^ y.")
eq = _binary("eq", "eq", "x == y.")
ge = _binary("ge", "ge", "x >= y.")
gt = _binary("gt", "gt", "x > y.")
le = _binary("le", "le", "x <= y.")
lt = _binary("lt", "lt", "x < y.")
max = _binary("max", "max", "The larger operand; NaN propagates.")
min = _binary("min", "min", "The smaller operand; NaN propagates.")
mul = _binary("mul", "mul", "x * y.")
ne = _binary("ne", "ne", "x != y.")
pow = _binary("pow", "pow", "x to the power y; by multiplication if y is a static integer.")
rem = _binary("rem", "rem", "Remainder with the sign of the dividend.")
shift_left = _binary("shift_left", "shl", "x << y.")
sub = _binary("sub", "sub", "x - y.")


def div(x, y, *, exact=False):
    """x / y; integers are truncated toward zero.

    On a GPU, quotients of floats are accurate to 2 units in the last place. With ``exact``, or
    under ``CompilerParams(exact_division=True)``, they are correctly rounded at two to three times
    the cost. The interpreter always rounds correctly. TypeError unless ``exact`` is a bool."""
    if not isinstance(exact, bool):
        raise TypeError(f"div: exact must be a bool, got {show(exact)}")
    return _two_operands("div", "div_exact" if exact else "div", x, y)


class RoundingMethod(enum.IntEnum):
    """How :func:`round` treats halves."""

    AWAY_FROM_ZERO = 0
    TO_NEAREST_EVEN = 1


AWAY_FROM_ZERO, TO_NEAREST_EVEN = RoundingMethod.AWAY_FROM_ZERO, RoundingMethod.TO_NEAREST_EVEN


def round(x, rounding_method=AWAY_FROM_ZERO):  # noqa: A001
    """Nearest integer; halves are rounded away from zero, or to even with ``TO_NEAREST_EVEN``."""
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
    """x >> y, shifting in zeros."""
    return _shift(x, y, False, "shift_right_logical")


def shift_right_arithmetic(x, y):
    """x >> y, shifting in the sign bit."""
    return _shift(x, y, True, "shift_right_arithmetic")


def reduce_precision(operand, exponent_bits, mantissa_bits):
    """Round to a float format with the given numbers of bits, in the same dtype. Values below its
    normal numbers become zero. ValueError for ``exponent_bits < 1`` or ``mantissa_bits < 0``."""
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
    """x to the power of the static int y, by multiplication."""
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


def convert_element_type(operand, new_dtype):
    """operand converted to another dtype by value."""
    return _core.convert(_core.as_array(operand), _core.as_dtype(new_dtype))


def bitcast_convert_type(operand, new_dtype):
    """The bits of operand as another dtype of the same width."""
    return _core.bitcast(_core.as_array(operand), _core.as_dtype(new_dtype))


def broadcast_in_dim(x, shape, broadcast_dimensions):
    """Broadcast x to ``shape``: dimension k of x becomes ``broadcast_dimensions[k]``."""
    return _core.broadcast_in_dim(_core.as_array(x), shape, broadcast_dimensions)


def broadcast(x, sizes):
    """Add leading dimensions of the given sizes."""
    x = _core.as_array(x)
    n = len(sizes)
    return _core.broadcast_in_dim(x, (*sizes, *x.shape), tuple(range(n, n + x.ndim)))


def reshape(x, new_sizes, dimensions=None):
    """The same elements, in row-major order, with another shape."""
    if dimensions is not None:
        raise NotImplementedError("lax.reshape: dimensions= is not supported")
    return _core.reshape(_core.as_array(x), new_sizes)


def squeeze(x, dimensions):
    """Remove dimensions of size 1."""
    return _core.as_array(x).squeeze(dimensions)


def slice(x, start_indices, limit_indices, strides=None):  # noqa: A001
    """x[start:limit:stride] along each dimension, with static bounds."""
    if strides is not None and any(s != 1 for s in strides):
        bounds = zip(start_indices, limit_indices, strides)
        return _core.as_array(x)[tuple(builtins.slice(*b) for b in bounds)]
    sizes = tuple(b - a for a, b in zip(start_indices, limit_indices))
    return _core.slice_array(_core.as_array(x), tuple(start_indices), sizes)


def full(shape, fill_value, dtype=None):
    """An array with the same value everywhere."""
    return _core.full(shape, fill_value, dtype)


def iota(dtype, size):
    """The array 0, 1, ..., size - 1."""
    return _core.iota(dtype, (size,), 0)


def broadcasted_iota(dtype, shape, dimension):
    """An array of each element's index along ``dimension``."""
    return _core.iota(dtype, shape, dimension)


# ---- floats --------------------------------------------------------------------------------------


def is_finite(x):
    """x is a finite number."""
    x = _core.as_array(x)
    _need_float("is_finite", x)
    return elementwise.isfinite(x)


def logistic(x, *, accuracy=None):
    """1 / (1 + exp(-x))."""
    if accuracy is not None:
        raise NotImplementedError("lax.logistic: only accuracy=None is supported")
    x = _core.as_array(x)
    _need_float("logistic", x)
    return 1 / (1 + exp(-x))


def reciprocal(x):
    """1 / x."""
    x = _core.as_array(x)
    _need_float("reciprocal", x)
    return 1 / x


def _in_float32(name, f, doc):
    """``f`` computed in float32, and its result rounded once."""

    def g(x):
        x = _core.as_array(x)
        _need_float(name, x)
        return f(x.astype("float32")).astype(x.dtype)

    return named(g, name, doc)


digamma = _in_float32("digamma", digamma_of_float32, "Derivative of lgamma.")
bessel_i0e = _in_float32(
    "bessel_i0e",
    lambda x: bessel(x, 0),
    "exp(-|x|) I0(x): the modified Bessel function of order 0, scaled.",
)
bessel_i1e = _in_float32(
    "bessel_i1e",
    lambda x: bessel(x, 1),
    "exp(-|x|) I1(x): the modified Bessel function of order 1, scaled.",
)


# ---- reductions ----------------------------------------------------------------------------------


def _axes(axes):
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _reduction(name, kind, doc):
    return named(lambda x, axes: _core.reduce(kind, _core.as_array(x), _axes(axes)), name, doc)


reduce_max = _reduction("reduce_max", "max", "Maximum over axes.")
reduce_min = _reduction("reduce_min", "min", "Minimum over axes.")
reduce_sum = _reduction("reduce_sum", "add", "Sum over axes, in the dtype of x.")


def reduce_prod(x, axes):
    """Product over axes in the dtype of x."""
    x = _core.as_array(x)
    return _core.reduce("mul", x, axes_of(axes, x.ndim, "reduce_prod"))


def _bit_reduction(name, op, of_bools, doc):
    def f(x, axes):
        x = _core.as_array(x)
        if x.dtype == bool and of_bools:
            return _core.reduce(of_bools, x, _axes(axes))
        return reductions.fold(op, x, _axes(axes), f"lax.{name}")

    return named(f, name, doc)


reduce_or = _bit_reduction(
    "reduce_or", "or", "any", "Bitwise or over axes; of bool arrays: is any element true?"
)
reduce_and = _bit_reduction(
    "reduce_and", "and", "all", "Bitwise and over axes; of bool arrays: are all elements true?"
)
reduce_xor = _bit_reduction("reduce_xor", "xor", None, "Bitwise exclusive or over axes.")

_REDUCED_BY = {
    add: reduce_sum,
    mul: reduce_prod,
    max: reduce_max,
    min: reduce_min,
    bitwise_or: reduce_or,
    bitwise_and: reduce_and,
    bitwise_xor: reduce_xor,
}


def reduce(operand, init_value, computation, dimensions):
    """Combine ``operand`` over ``dimensions``, then with ``init_value``. ``computation`` is
    lax.add, mul, max, min, bitwise_or, bitwise_and or bitwise_xor; NotImplementedError for
    others."""
    found = _REDUCED_BY.get(computation) if callable(computation) else None
    if found is None:
        accepted = ", ".join(f"lax.{f.__name__}" for f in _REDUCED_BY)
        raise NotImplementedError(
            f"lax.reduce: computation must be one of {accepted}, got {show(computation)}"
        )
    return computation(found(operand, tuple(dimensions)), init_value)


# ---- shapes --------------------------------------------------------------------------------------


def broadcast_shapes(*shapes):
    """The shape that arrays of these shapes broadcast to."""
    return np.broadcast_shapes(*shapes)


def broadcast_to_rank(x, rank):
    """Add leading dimensions up to ``rank``."""
    if rank < x.ndim:
        raise ValueError(f"lax.broadcast_to_rank: rank {rank} of an array of rank {x.ndim}")
    return x.reshape((1,) * (rank - x.ndim) + tuple(x.shape))


def collapse(operand, start_dimension, stop_dimension=None):
    """Merge the dimensions from ``start`` to before ``stop``."""
    shape = tuple(operand.shape)
    a, b, _ = builtins.slice(start_dimension, stop_dimension).indices(len(shape))
    if b <= a:
        raise ValueError(
            f"lax.collapse: dims {start_dimension} to {stop_dimension} of rank {len(shape)}"
        )
    return operand.reshape((*shape[:a], math.prod(shape[a:b]), *shape[b:]))


def transpose(x, permutation):
    """Dimension k of the result is dimension ``permutation[k]`` of x."""
    return shapes.transpose(x, tuple(permutation))


def concatenate(operands, dimension):
    """Concatenate arrays along a dimension."""
    return shapes.concatenate(operands, dimension)


def rev(x, dimensions):
    """Reverse the order of elements along dimensions."""
    return shapes.flip(x, tuple(dimensions))


def split(operand, sizes, axis=0):
    """Split into parts of the given sizes along a dimension."""
    cuts = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    axis = axis_of(axis, operand.ndim, "split")
    if not sizes or cuts[-1] != operand.shape[axis]:
        raise ValueError(f"split: sizes {tuple(sizes)} of {operand.shape} along dimension {axis}")
    return shapes.split(operand, cuts[:-1], axis)


def expand_dims(x, dimensions):
    """Insert dimensions of size 1 at the given positions of the result."""
    x = _core.as_array(x)
    places = axes_of(tuple(dimensions), x.ndim + len(dimensions), "expand_dims")
    for d in sorted(places):
        x = shapes.expand_dims(x, d)
    return x


def index_in_dim(x, index, axis=0, keepdims=True):
    """The slice of one element at a static index along a dimension."""
    n = x.shape[axis_of(axis, x.ndim, "index_in_dim")]
    if not -n <= index < n:
        raise IndexError(f"index_in_dim: {index} is out of bounds for {n} elements")
    out = slice_in_dim(x, index % n, index % n + 1, 1, axis)
    return out if keepdims else out.squeeze(axis)


def dynamic_update_index_in_dim(x, update, index, axis):
    """Replace the slice of one element at a traced index by ``update``."""
    axis = axis_of(axis, x.ndim, "dynamic_update_index_in_dim")
    shape = tuple(1 if k == axis else n for k, n in enumerate(x.shape))
    return dynamic_update_slice_in_dim(x, _core.as_array(update).reshape(shape), index, axis)


def pad(operand, padding_value, padding_config):
    """(low, high, interior) elements of ``padding_value`` for each dim; low, high may be < 0."""
    return shapes.pad_with(operand, padding_value, padding_config)


def argmax(operand, axis, index_dtype="int32"):
    """Index of the first maximum."""
    return _core.convert(reductions.argmax(operand, axis), _core.as_dtype(index_dtype))


def argmin(operand, axis, index_dtype="int32"):
    """Index of the first least element."""
    return _core.convert(reductions.argmin(operand, axis), _core.as_dtype(index_dtype))


def _cumulative(kind, name, doc):
    def f(operand, axis=0, reverse=False):
        return reductions.scan(kind, operand, axis, reverse, None, name)

    return named(f, name, doc)


cumsum = _cumulative("add", "cumsum", "Sums of the elements up to each.")
cumprod = _cumulative("mul", "cumprod", "Products of the elements up to each.")
cummax = _cumulative("max", "cummax", "The greatest of the elements up to each.")
cummin = _cumulative("min", "cummin", "The least of the elements up to each.")


def cumlogsumexp(operand, axis=0, reverse=False):
    """The cumulative log(sum(exp(x))), without overflow, computed in float32."""
    x = value(operand, "cumlogsumexp")
    if x.dtype == bool or is_integer(x.dtype):
        raise TypeError(f"lax.cumlogsumexp does not accept dtype {x.dtype}; convert to a float")
    axis = axis_of(axis, x.ndim, "cumlogsumexp")
    out = associative_scan(logaddexp, _core.convert(x, "float32"), reverse, axis)
    return _core.convert(out, x.dtype)


def top_k(operand, k, *, axis=-1):
    """The k greatest elements along a dim in falling order, NaN first, and their int32 indices; of
    equal ones the first. More than 16 of more than 4096 elements take a step each."""
    return sorting.top_k(operand, k, axis)


def sort(operand, dimension=-1, is_stable=True, num_keys=1):
    """Sort in ascending order along a dimension, NaN last."""
    if isinstance(operand, (tuple, list)) or num_keys != 1:
        raise NotImplementedError("lax.sort: one array and one key; use jnp.argsort and jnp.take")
    return sorting.sort(operand, dimension)


def dot(lhs, rhs, *, dimension_numbers=None, precision=None, preferred_element_type=None):
    """Product of vectors or matrices."""
    if dimension_numbers is None:
        if not 1 <= lhs.ndim <= 2 or not 1 <= rhs.ndim <= 2:
            raise TypeError(f"lax.dot: shapes {lhs.shape} and {rhs.shape}; vectors or matrices")
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)


def batch_matmul(lhs, rhs, precision=None):
    """Matrix products over equal leading dimensions."""
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise TypeError(f"lax.batch_matmul: shapes {show(lhs.shape)} and {show(rhs.shape)}")
    return matmul(lhs, rhs, precision=precision)


# ---- of one device -------------------------------------------------------------------------------


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
    """The size of the axis times a Python number. Sums over blocks raise NotImplementedError."""
    if isinstance(x, (int, float)):
        return x * axis_size(axis_name)
    raise NotImplementedError(
        "Unimplemented primitive in Pallas Mosaic GPU lowering: psum of other than Python numbers;"
        " give each block its own output"
    )
