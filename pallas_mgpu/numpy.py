"""The `jnp` namespace: on traced values it builds the graph, on host arrays it is NumPy.

Dtypes are those of JAX with 64-bit mode off: Python ints and floats are weak int32 and float32,
64-bit requests become 32-bit."""

import functools
import math
from builtins import any as _any

import ml_dtypes
import numpy as np

from . import _core, _dot, _einsum, _shapes
from . import tree as _tree
from ._names import finder as _finder
from ._trace import Array, Ref, tracing
from ._types import ints as _ints
from ._types import is_integer as _is_integer
from ._types import itemsize_bits as _itemsize_bits

inf, nan, pi, e, newaxis = math.inf, math.nan, math.pi, math.e, None
ndarray = Array
finfo, iinfo = ml_dtypes.finfo, ml_dtypes.iinfo
floating, integer = np.floating, np.integer
signedinteger, unsignedinteger, number, generic = (
    np.signedinteger,
    np.unsignedinteger,
    np.number,
    np.generic,
)


class _Scalar:
    """A dtype object that makes strong scalars when called: ``jnp.float32(3)``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)

    def __call__(self, x):
        if isinstance(x, (Array, Ref)):
            return _core.convert(_core.as_array(x), self.dtype)
        return self.dtype.type(x)

    def __eq__(self, other):
        try:
            return self.dtype == np.dtype(other)
        except TypeError:
            return NotImplemented

    def __hash__(self):
        return hash(self.dtype)

    def __repr__(self):
        return f"jnp.{self.dtype.name}"

    @property
    def name(self):
        return self.dtype.name

    @property
    def itemsize(self):
        return self.dtype.itemsize


bool_ = _Scalar(np.bool_)
int8, int16, int32 = _Scalar(np.int8), _Scalar(np.int16), _Scalar(np.int32)
uint8, uint16, uint32 = _Scalar(np.uint8), _Scalar(np.uint16), _Scalar(np.uint32)
int4, uint4 = _Scalar(ml_dtypes.int4), _Scalar(ml_dtypes.uint4)
int2, uint2 = _Scalar(ml_dtypes.int2), _Scalar(ml_dtypes.uint2)
float4_e2m1fn = _Scalar(ml_dtypes.float4_e2m1fn)
float8_e4m3fn, float8_e5m2, float8_e8m0fnu = (
    _Scalar(ml_dtypes.float8_e4m3fn),
    _Scalar(ml_dtypes.float8_e5m2),
    _Scalar(ml_dtypes.float8_e8m0fnu),
)
float16, float32, bfloat16 = _Scalar(np.float16), _Scalar(np.float32), _Scalar(ml_dtypes.bfloat16)


def dtype(x):
    """The NumPy dtype of any spelling."""
    return _core.as_dtype(x)


def itemsize_bits(x):
    """Bits of an element of a dtype in the memory of kernels: 4 for int4."""
    return _itemsize_bits(_core.as_dtype(x))


def issubdtype(a, b):
    """Is dtype ``a`` of class or dtype ``b``? Those of ml_dtypes too."""
    if isinstance(a, str) and a in ("barrier", "semaphore"):  # of refs; pl.semaphore is a class
        return getattr(b, "__name__", b) == a
    try:
        a = np.dtype(a)
    except TypeError:
        a = _core.as_dtype(a)  # names that NumPy does not know
    if (
        a.isbuiltin == 2
        and isinstance(b, type)
        and issubclass(b, np.generic)
        and b.__module__ == "numpy"
    ):
        return issubclass(_class_of(a), b)
    return np.issubdtype(a, b if isinstance(b, type) else getattr(b, "dtype", b))


def _class_of(dtype):
    if not _is_integer(dtype):
        return np.floating
    return np.unsignedinteger if dtype.name.startswith("u") else np.signedinteger


def promote_types(a, b):
    """The dtype both promote to."""
    return _core.promote_types([_core.as_dtype(a), _core.as_dtype(b)])[0]


def result_type(*xs):
    """The dtype that values and dtypes promote to."""
    return _core.promote_types(list(xs))[0]


def _traced(*xs):
    return _any(isinstance(x, (Array, Ref)) for x in xs)


def _in_kernel(x):
    """Is x traced, or a number in a kernel (where an array made of it must be traced)?"""
    return _traced(x) or tracing() and np.ndim(x) == 0


_NARROW = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}


def _host(x):
    """A NumPy result in 32 bits."""
    x = np.asarray(x)
    return x.astype(_NARROW[x.dtype.name]) if x.dtype.name in _NARROW else x


def _float_input(x):
    """Host operand of an inexact function: ints become float32."""
    x = _host(x)
    return x.astype(np.float32) if _is_integer(x.dtype) else x


def _export(name, f, doc):
    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc
    globals()[name] = f


def _unary(op, host, inexact):
    def f(x):
        if _traced(x):
            if inexact and isinstance(x, Array) and _is_integer(x.dtype):
                x = _core.convert(x, "float32")
            return _core.unary(op, x)
        return _host(host(_float_input(x) if inexact else _host(x)))

    return f


def _binary(op, host):
    def f(x, y):
        if _traced(x, y):
            return _core.binary(op, x, y)
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            to = _core.promote_types([x, y])[0]
            if op not in ("true_divide",):
                x, y = np.asarray(x).astype(to), np.asarray(y).astype(to)
        return _host(host(x, y))

    return f


for _name, _op, _f, _inexact, _doc in (
    ("abs", "abs", np.abs, False, "|x|."),
    ("absolute", "abs", np.abs, False, "|x|."),
    ("arccos", "acos", np.arccos, True, "Inverse cosine; integers become float32."),
    ("acos", "acos", np.arccos, True, "Inverse cosine; integers become float32."),
    ("arccosh", "acosh", np.arccosh, True, "Inverse hyperbolic cosine."),
    ("acosh", "acosh", np.arccosh, True, "Inverse hyperbolic cosine."),
    ("arcsin", "asin", np.arcsin, True, "Inverse sine; integers become float32."),
    ("asin", "asin", np.arcsin, True, "Inverse sine; integers become float32."),
    ("arcsinh", "asinh", np.arcsinh, True, "Inverse hyperbolic sine."),
    ("asinh", "asinh", np.arcsinh, True, "Inverse hyperbolic sine."),
    ("arctan", "atan", np.arctan, True, "Inverse tangent; integers become float32."),
    ("atan", "atan", np.arctan, True, "Inverse tangent; integers become float32."),
    ("arctanh", "atanh", np.arctanh, True, "Inverse hyperbolic tangent."),
    ("atanh", "atanh", np.arctanh, True, "Inverse hyperbolic tangent."),
    ("cbrt", "cbrt", np.cbrt, True, "Cube root; integers become float32."),
    ("ceil", "ceil", np.ceil, False, "Smallest integer not below x."),
    ("cos", "cos", np.cos, True, "Cosine."),
    ("cosh", "cosh", np.cosh, True, "Hyperbolic cosine."),
    ("exp", "exp", np.exp, True, "e to the x; integers become float32."),
    ("exp2", "exp2", np.exp2, True, "2 to the x; integers become float32."),
    ("expm1", "expm1", np.expm1, True, "exp(x) - 1, exact near 0; integers become float32."),
    ("floor", "floor", np.floor, False, "Largest integer not above x."),
    ("invert", "not", np.invert, False, "Bitwise complement; logical on bool."),
    ("bitwise_not", "not", np.invert, False, "Bitwise complement; logical on bool."),
    ("log", "log", np.log, True, "Natural logarithm; integers become float32."),
    ("log2", "log2", np.log2, True, "Logarithm to base 2; integers become float32."),
    ("log1p", "log1p", np.log1p, True, "log(1 + x), exact near 0; integers become float32."),
    ("negative", "neg", np.negative, False, "-x."),
    ("rint", "rint", np.rint, True, "Nearest integer, halves to even."),
    ("sign", "sign", np.sign, False, "-1, 0 or 1."),
    ("sin", "sin", np.sin, True, "Sine."),
    ("sinh", "sinh", np.sinh, True, "Hyperbolic sine."),
    ("sqrt", "sqrt", np.sqrt, True, "Square root."),
    ("tan", "tan", np.tan, True, "Tangent; integers become float32."),
    ("tanh", "tanh", np.tanh, True, "Hyperbolic tangent."),
    ("trunc", "trunc", np.trunc, False, "x without its fraction."),
):
    _export(_name, _unary(_op, _f, _inexact), _doc)

for _name, _op, _host_f, _doc in (
    ("add", "add", np.add, "x + y."),
    ("arctan2", "atan2", np.arctan2, "Angle of the point (y, x); integers become float32."),
    ("atan2", "atan2", np.arctan2, "Angle of the point (y, x); integers become float32."),
    ("bitwise_and", "and", np.bitwise_and, "x & y."),
    ("bitwise_left_shift", "shl", np.left_shift, "x << y."),
    ("bitwise_or", "or", np.bitwise_or, "x | y."),
    ("bitwise_right_shift", "shr", np.right_shift, "x >> y."),
    ("bitwise_xor", "xor", np.bitwise_xor, "x ^ y."),
    ("divide", "true_divide", np.true_divide, "x / y; integers become float32."),
    ("true_divide", "true_divide", np.true_divide, "x / y; integers become float32."),
    ("equal", "eq", np.equal, "x == y."),
    ("floor_divide", "floor_divide", np.floor_divide, "x // y, rounding down."),
    ("greater", "gt", np.greater, "x > y."),
    ("greater_equal", "ge", np.greater_equal, "x >= y."),
    ("left_shift", "shl", np.left_shift, "x << y."),
    ("less", "lt", np.less, "x < y."),
    ("less_equal", "le", np.less_equal, "x <= y."),
    ("maximum", "max", np.maximum, "The greater; NaN propagates."),
    ("minimum", "min", np.minimum, "The lesser; NaN propagates."),
    ("mod", "remainder", np.remainder, "x % y, with the sign of the divisor."),
    ("remainder", "remainder", np.remainder, "x % y, with the sign of the divisor."),
    ("multiply", "mul", np.multiply, "x * y."),
    ("not_equal", "ne", np.not_equal, "x != y."),
    ("pow", "power", np.power, "x to the y; a static whole y by multiplication."),
    ("power", "power", np.power, "x to the y; a static whole y by multiplication."),
    ("right_shift", "shr", np.right_shift, "x >> y."),
    ("subtract", "sub", np.subtract, "x - y."),
):
    _export(_name, _binary(_op, _host_f), _doc)
del _name, _op, _f, _host_f, _inexact, _doc


def _truth(x):
    x = _core.as_array(x)
    return x if x.dtype == bool else _core.binary("ne", x, 0)


def logical_and(x, y):
    """(x != 0) and (y != 0), elementwise."""
    return _core.binary("and", _truth(x), _truth(y)) if _traced(x, y) else np.logical_and(x, y)


def logical_or(x, y):
    """(x != 0) or (y != 0), elementwise."""
    return _core.binary("or", _truth(x), _truth(y)) if _traced(x, y) else np.logical_or(x, y)


def logical_xor(x, y):
    """(x != 0) != (y != 0), elementwise."""
    return _core.binary("xor", _truth(x), _truth(y)) if _traced(x, y) else np.logical_xor(x, y)


def logical_not(x):
    """x == 0, elementwise."""
    return _core.unary("not", _truth(x)) if _traced(x) else np.logical_not(x)


def isnan(x):
    """x is not a number."""
    return _core.binary("ne", x, x) if _traced(x) else np.isnan(x)


def isinf(x):
    """x is infinite."""
    return _core.binary("eq", _core.unary("abs", x), inf) if _traced(x) else np.isinf(x)


def isfinite(x):
    """x is a finite number."""
    return _core.binary("lt", _core.unary("abs", x), inf) if _traced(x) else np.isfinite(x)


def bitwise_invert(x):
    """Bitwise complement; logical on bool."""
    return invert(x)  # noqa: F821 - made by the table above


def bitwise_count(x):
    """Number of bits set in the magnitude of x, as uint8."""
    if not _traced(x):
        x = _host(x)
        x = np.abs(x)
        return np.unpackbits(x[..., None].view(np.uint8), axis=-1).sum(-1, dtype=np.uint8)
    return _core.convert(_core.unary("popcount", _core.unary("abs", x)), "uint8")


def square(x):
    """x * x; bool becomes int32."""
    if _traced(x) and x.dtype == bool:
        x = _core.convert(x, "int32")
    return multiply(x, x)  # noqa: F821 - made by the table above


def reciprocal(x):
    """1 / x; integers become float32."""
    if _traced(x) and x.dtype == bool:
        x = _core.convert(x, "float32")
    return divide(1, x)  # noqa: F821


def where(condition, x=None, y=None):
    """``x`` where ``condition``, else ``y``; all three are needed in kernels."""
    if _traced(condition, x, y):
        if x is None or y is None:
            raise NotImplementedError("jnp.where: x and y must be given in kernels")
        return _core.where(condition, x, y)
    return np.where(condition) if x is None and y is None else _host(np.where(condition, x, y))


def clip(x, min=None, max=None, *, a_min=None, a_max=None):  # noqa: A002
    """x limited to [min, max]; NaN stays NaN."""
    lo, hi = min if a_min is None else a_min, max if a_max is None else a_max
    if lo is not None:
        x = maximum(x, lo)  # noqa: F821
    if hi is not None:
        x = minimum(x, hi)  # noqa: F821
    return x


def round(x, decimals=0):  # noqa: A001
    """Nearest, halves to even."""
    if not _traced(x):
        return _host(np.round(x, decimals))
    if _is_integer(_core.as_array(x).dtype):
        return x
    if decimals == 0:
        return _core.unary("rint", x)
    scale = 10.0**decimals
    return _core.unary("rint", x * scale) / scale


def astype(x, dtype):
    """x in another dtype."""
    return x.astype(_core.as_dtype(dtype))


# ---- reductions ----------------------------------------------------------------------------------


def _axes(x, axis):
    if axis is None:
        return tuple(range(x.ndim))
    axis = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(a.__index__() for a in axis)


def _identity(kind, dtype):
    if kind == "sum":
        return 0
    if _is_integer(dtype):
        info = iinfo(dtype)
        return info.min if kind == "max" else info.max
    return -inf if kind == "max" else inf


def _reduce(kind, host):
    def f(x, axis=None, dtype=None, keepdims=False, initial=None, where=None):
        if not _traced(x):
            extra = {} if where is None else {"where": where}
            if initial is not None:
                extra["initial"] = initial
            if dtype is not None:
                extra["dtype"] = np.dtype(dtype)
            return _host(host(_host(x), axis=axis, keepdims=keepdims, **extra))
        if isinstance(x, Ref):
            raise TypeError(f"jnp.{f.__name__}: a Ref was given; load it first with ref[...]")
        if dtype is not None:
            x = _core.convert(x, _core.as_dtype(dtype))
        if where is not None:
            x = _core.where(where, x, _core.full(x.shape, _identity(kind, x.dtype), x.dtype))
        exact = "add" if kind == "sum" and dtype is not None else kind
        out = _core.reduce(exact, x, _axes(x, axis), keepdims)
        if initial is not None:
            out = _core.binary({"sum": "add"}.get(kind, kind), out, initial)
        return out

    return f


_export("sum", _reduce("sum", np.sum), "Sum over axes. float16 and bfloat16 add up in float32.")
_export("max", _reduce("max", np.max), "Greatest over axes; NaN propagates.")
_export("min", _reduce("min", np.min), "Least over axes; NaN propagates.")
amax, amin = max, min  # noqa: F821


def _logical(name, host):
    def f(x, axis=None, out=None, keepdims=False, *, where=None):
        if isinstance(x, Ref):
            raise TypeError(f"jnp.{name}: a Ref was given; load it first with ref[...]")
        if isinstance(x, Array):
            return getattr(x, name)(axis, out, keepdims, where=where)
        extra = {} if where is None else {"where": where}
        return _host(host(_host(x), axis=axis, out=out, keepdims=keepdims, **extra))

    return f


_export("any", _logical("any", np.any), "Is an element true (not 0)? A scalar decides branches.")
_export("all", _logical("all", np.all), "Are all elements true? A scalar decides branches.")


def mean(x, axis=None, dtype=None, keepdims=False):
    """Mean over axes; integers become float32."""
    if not _traced(x):
        return _host(np.mean(_float_input(x), axis=axis, keepdims=keepdims))
    to = (
        _core.as_dtype(dtype)
        if dtype is not None
        else x.dtype
        if not _is_integer(x.dtype)
        else np.dtype("float32")
    )
    n = math.prod(x.shape[a] for a in _axes(x, axis))
    total = _core.reduce("add", _core.convert(x, "float32"), _axes(x, axis), keepdims)
    return _core.convert(total / n, to)


# ---- creation ------------------------------------------------------------------------------------


def _shape_of(shape):
    return _ints(shape, "shape")


def full(shape, fill_value, dtype=None):
    """One value everywhere; dtype of the value unless given."""
    if tracing():
        return _core.full(
            _shape_of(shape), fill_value, None if dtype is None else _core.as_dtype(dtype)
        )
    return _host(np.full(shape, fill_value, None if dtype is None else _core.as_dtype(dtype)))


def zeros(shape, dtype=float32):
    """Zeros; float32 unless given."""
    return full(shape, 0, dtype)


def ones(shape, dtype=float32):
    """Ones; float32 unless given."""
    return full(shape, 1, dtype)


def empty(shape, dtype=float32):
    """Zeros: contents are not promised."""
    return zeros(shape, dtype)


def full_like(x, fill_value, dtype=None, shape=None):
    """One value, with shape and dtype of ``x`` (an array or a ref)."""
    out = full(x.shape if shape is None else shape, fill_value, x.dtype if dtype is None else dtype)
    if dtype is None and isinstance(x, Array) and x.weak_type:
        return _core.convert(out, x.dtype, weak=True)
    return out


def zeros_like(x, dtype=None, shape=None):
    """Zeros, with shape and dtype of ``x`` (an array or a ref)."""
    return full_like(x, 0, dtype, shape)


def ones_like(x, dtype=None, shape=None):
    """Ones, with shape and dtype of ``x`` (an array or a ref)."""
    return full_like(x, 1, dtype, shape)


def empty_like(x, dtype=None, shape=None):
    """Zeros, with shape and dtype of ``x``: contents are not promised."""
    return zeros_like(x, dtype, shape)


def array(x, dtype=None):
    """As asarray; on the host a copy."""
    return asarray(x, dtype)


def _stacked(x):
    """Nested sequences of scalars and arrays as one array."""
    if isinstance(x, (list, tuple)):
        return _shapes.stack([_stacked(y) for y in x])
    return _core.as_array(x)


def asarray(x, dtype=None):
    """``x`` as an array, converted to ``dtype`` if given. Sequences that hold traced values are
    stacked; in kernels those of numbers alone would be constants that are not scalars, which a
    kernel cannot capture: ValueError."""
    if isinstance(x, (list, tuple)) and _traced(*_tree.leaves(x)):
        x = _stacked(x)
    if _traced(x):
        x = _core.as_array(x)
        return x if dtype is None else _core.convert(x, _core.as_dtype(dtype))
    if tracing() and np.ndim(x) == 0:
        return _core.as_array(x, None if dtype is None else _core.as_dtype(dtype))
    if tracing():
        raise ValueError(
            "jnp.array: a kernel cannot capture constants that are not scalars; pass them as"
            " operands"
        )
    return _host(np.asarray(x, None if dtype is None else _core.as_dtype(dtype)))


def arange(start, stop=None, step=1, dtype=None):
    """start, start + step, ... below stop; static arguments."""
    if _traced(start, stop, step):
        raise _core.ConcretizationTypeError(
            "jnp.arange: arguments must be known at trace time; use pl.loop or an iota plus a"
            " scalar"
        )
    if stop is None:
        start, stop = 0, start
    if not tracing():
        return _host(np.arange(start, stop, step, None if dtype is None else _core.as_dtype(dtype)))
    if dtype is None:
        dtype = "float32" if _any(isinstance(v, float) for v in (start, stop, step)) else "int32"
    if step == 0:
        raise ValueError("jnp.arange: step must not be 0")
    n = math.ceil((stop - start) / step)
    if n < 0:
        n = 0
    out = _core.iota(_core.as_dtype(dtype), (n,), 0)
    if step != 1:
        out = out * step
    return out + start if start != 0 else out


def _below(shape, k):
    """Is the column not more than ``k`` right of the row? bool[..., M, N]"""
    rows, cols = (_core.iota(np.dtype("int32"), shape, len(shape) + d) for d in (-2, -1))
    return rows + k >= cols if k else rows >= cols


def tri(N, M=None, k=0, dtype=None):  # noqa: N803 - NumPy's names
    """(N, M), ones where the column is not more than ``k`` right of the row, zeros elsewhere."""
    dtype = _core.as_dtype("float32" if dtype is None else dtype)
    shape = _ints((N, N if M is None else M), "jnp.tri: the shape")
    if not tracing():
        return np.tri(*shape, k, dtype)
    return _core.convert(_below(shape, k), dtype)


def eye(N, M=None, k=0, dtype=None):  # noqa: N803
    """(N, M), ones on the ``k``-th diagonal, zeros elsewhere."""
    dtype = _core.as_dtype("float32" if dtype is None else dtype)
    shape = _ints((N, N if M is None else M), "jnp.eye: the shape")
    if not tracing():
        return np.eye(*shape, k, dtype)
    return _core.convert(_below(shape, k) ^ _below(shape, k - 1), dtype)


def _triangle(name, x, k, lower):
    if not _traced(x):
        return _host((np.tril if lower else np.triu)(x, k))
    if x.ndim < 2:
        raise ValueError(f"jnp.{name}: an array of at least 2 dims is needed, got {x.shape}")
    zero = _core.convert(_core.as_array(0), x.dtype)
    kept, rest = (x, zero) if lower else (zero, x)
    return _core.where(_below(x.shape, k if lower else k - 1), kept, rest)


def tril(x, k=0):
    """``x`` with zeros more than ``k`` right of the diagonal (of the last two dims)."""
    return _triangle("tril", x, k, True)


def triu(x, k=0):
    """``x`` with zeros left of the ``k``-th diagonal (of the last two dims)."""
    return _triangle("triu", x, k, False)


def copy(x):
    """The same values; in kernels arrays do not change, and it is ``x`` itself."""
    return asarray(x) if _traced(x) else _host(np.copy(x))


# ---- shape ---------------------------------------------------------------------------------------


def broadcast_to(x, shape):
    """NumPy broadcasting to ``shape``: trailing dims align."""
    if not _in_kernel(x):
        return np.broadcast_to(_host(x), shape)
    x, shape = _core.as_array(x), _shape_of(shape)
    if x.shape == shape:
        return x
    first = len(shape) - x.ndim
    if first < 0 or _any(a not in (1, b) for a, b in zip(x.shape, shape[first:])):
        raise ValueError(
            f"jnp.broadcast_to: Incompatible shapes for broadcasting: {x.shape}, {shape}"
        )
    kept = [k for k, n in enumerate(x.shape) if n == shape[first + k]]
    if len(kept) < x.ndim:
        x = _core.reshape(x, tuple(x.shape[k] for k in kept))
    return _core.broadcast_in_dim(x, shape, tuple(first + k for k in kept))


def reshape(x, shape):
    """Same elements, row-major; one -1 is allowed."""
    return x.reshape(shape)


def ravel(x):
    """One dim."""
    return x.reshape((-1,))


def squeeze(x, axis=None):
    """Drop dims of size 1."""
    return x.squeeze(axis)


def expand_dims(x, axis):
    """A new dim of size 1."""
    if not _in_kernel(x):
        return np.expand_dims(x, axis)
    x = _core.as_array(x)
    if not -x.ndim - 1 <= axis <= x.ndim:
        raise ValueError(f"jnp.expand_dims: axis {axis} is out of bounds for rank {x.ndim + 1}")
    axis = axis if axis >= 0 else axis + x.ndim + 1
    return x.reshape((*x.shape[:axis], 1, *x.shape[axis:]))


def _is_operand(x):
    return isinstance(x, (np.ndarray, np.generic))


def _moved(f):
    """``f`` on traced arrays, NumPy's function of the same name on others."""

    @functools.wraps(f)
    def either(*args, **kwargs):
        if _any(isinstance(x, (Array, Ref)) for x in _tree.leaves([args, kwargs])):
            return f(*args, **kwargs)
        if f is _shapes.matrix_transpose:
            return np.swapaxes(args[0], -1, -2)
        to = kwargs.pop("preferred_element_type", None)
        if to is not None:  # of products: their sums are in it
            args = tuple(np.asarray(x, _core.as_dtype(to)) if _is_operand(x) else x for x in args)
        for k in ("precision", "out_sharding"):
            kwargs.pop(k, None)
        out = getattr(np, f.__name__)(*args, **kwargs)
        return _host(out) if isinstance(out, (np.ndarray, np.generic)) else out

    return either


for _move in (
    *(_shapes.transpose, _shapes.swapaxes, _shapes.moveaxis, _shapes.matrix_transpose),
    *(_shapes.concatenate, _shapes.stack, _shapes.vstack, _shapes.hstack, _shapes.split),
    *(_shapes.broadcast_arrays, _shapes.tile, _shapes.repeat, _shapes.flip, _shapes.roll),
    *(_shapes.pad, _shapes.take, _shapes.take_along_axis, _shapes.prod, _shapes.var),
    *(_shapes.std, _shapes.argmax, _shapes.argmin, _shapes.count_nonzero, _shapes.cumsum),
    *(_shapes.cumprod, _shapes.sort, _shapes.argsort, _shapes.median),
    *(_dot.dot, _dot.matmul, _dot.tensordot, _dot.vdot, _dot.outer, _einsum.einsum),
):
    globals()[_move.__name__] = _moved(_move)
del _move
permute_dims = _moved(_shapes.transpose)


_find = _finder("jnp", {}, {})


def __getattr__(name):
    """Other names are NumPy's on host arrays and refuse traced ones."""
    f = getattr(np, name, None)
    if name.startswith("_") or f is None:
        return _find(name)
    if not callable(f) or isinstance(f, type):
        return f

    def host_only(*args, **kwargs):
        if _traced(*_tree.leaves([args, kwargs])):
            raise NotImplementedError(
                f"Unimplemented primitive in Pallas Mosaic GPU lowering: {name} (jnp.{name}"
                f" works on host arrays"
                " only; `python -m pallas_mgpu gaps` says what to use in a kernel)"
            )
        out = f(*args, **kwargs)
        return _host(out) if isinstance(out, (np.ndarray, np.generic)) else out

    host_only.__name__ = name
    return host_only


from . import _elementwise as _composed  # noqa: E402 - it is made of the functions above

for _name in _composed.NUMPY_NAMES:
    globals()[_name] = getattr(_composed, _name)

from . import _derived  # noqa: E402 - so is this

for _name in _derived.NAMES:
    globals()[_name] = _moved(getattr(_derived, _name))
for _name in _derived.MAKE_ARRAYS:
    globals()[_name] = getattr(_derived, _name)
around = round
del _name
