"""Dtypes, and functions that make arrays.

Dtypes are those of JAX with 64-bit mode off: Python ints and floats are weak int32 and float32, and
requests for 64 bits give 32 bits.
"""

import math

import ml_dtypes
import numpy as np

from .. import _core, tree
from .._names import show
from .._sizes import Dim
from .._trace import Array, Ref, tracing
from .._types import ints, is_integer
from .._types import itemsize_bits as _itemsize_bits
from .base import either, host, host_dtype, is_traced
from .shape import stack

__all__ = [
    "arange",
    "array",
    "asarray",
    "astype",
    "bfloat16",
    "bool_",
    "copy",
    "dtype",
    "e",
    "empty",
    "empty_like",
    "eye",
    "finfo",
    "float16",
    "float32",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "floating",
    "full",
    "full_like",
    "generic",
    "identity",
    "iinfo",
    "indices",
    "inf",
    "int16",
    "int2",
    "int32",
    "int4",
    "int8",
    "integer",
    "issubdtype",
    "itemsize_bits",
    "linspace",
    "logspace",
    "meshgrid",
    "nan",
    "ndarray",
    "newaxis",
    "number",
    "ones",
    "ones_like",
    "pi",
    "promote_types",
    "result_type",
    "signedinteger",
    "tri",
    "tril",
    "triu",
    "uint16",
    "uint2",
    "uint32",
    "uint4",
    "uint8",
    "unsignedinteger",
    "zeros",
    "zeros_like",
]

inf, nan, pi, e, newaxis = math.inf, math.nan, math.pi, math.e, None
ndarray = Array
finfo, iinfo = ml_dtypes.finfo, ml_dtypes.iinfo
generic, number = np.generic, np.number
floating, integer = np.floating, np.integer
signedinteger, unsignedinteger = np.signedinteger, np.unsignedinteger

# ---- dtypes --------------------------------------------------------------------------------------


class _Scalar:
    """A dtype object that makes strong scalars when called: ``jnp.float32(3)``."""

    __slots__ = ("dtype",)

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)

    def __call__(self, x):
        if isinstance(x, (Array, Ref, Dim)):
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
float8_e4m3fn = _Scalar(ml_dtypes.float8_e4m3fn)
float8_e5m2 = _Scalar(ml_dtypes.float8_e5m2)
float8_e8m0fnu = _Scalar(ml_dtypes.float8_e8m0fnu)
float16, float32, bfloat16 = _Scalar(np.float16), _Scalar(np.float32), _Scalar(ml_dtypes.bfloat16)


def dtype(x):
    """The NumPy dtype of any spelling."""
    return _core.as_dtype(x)


def itemsize_bits(x):
    """Bits of an element of a dtype in the memory of kernels: 4 for int4."""
    return _itemsize_bits(_core.as_dtype(x))


def issubdtype(a, b):
    """Is dtype ``a`` a subtype of the dtype or class ``b``? Includes the dtypes of ml_dtypes."""
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
    if not is_integer(dtype):
        return np.floating
    return np.unsignedinteger if dtype.name.startswith("u") else np.signedinteger


def promote_types(a, b):
    """The dtype both promote to."""
    return _core.promote_types([_core.as_dtype(a), _core.as_dtype(b)])[0]


def result_type(*xs):
    """The dtype that values and dtypes promote to."""
    return _core.promote_types(list(xs))[0]


def astype(x, dtype):
    """x in another dtype."""
    return x.astype(_core.as_dtype(dtype))


# ---- of other values -----------------------------------------------------------------------------


def array(x, dtype=None):
    """Like asarray, but always copies host arrays."""
    return asarray(x, dtype)


def _stacked(x):
    """Nested sequences of scalars and arrays as one array."""
    if isinstance(x, (list, tuple)):
        return stack([_stacked(y) for y in x])
    return _core.as_array(x)


def asarray(x, dtype=None):
    """``x`` as an array, converted to ``dtype`` if given. Sequences that hold traced values are
    stacked; in kernels those of numbers alone would be constants that are not scalars, which a
    kernel cannot capture: ValueError."""
    if isinstance(x, (list, tuple)) and is_traced(*tree.leaves(x)):
        x = _stacked(x)
    if is_traced(x):
        x = _core.as_array(x)
        return x if dtype is None else _core.convert(x, _core.as_dtype(dtype))
    if tracing() and np.ndim(x) == 0:
        return _core.as_array(x, host_dtype(dtype))
    if tracing():
        raise ValueError(
            "jnp.array: a kernel cannot capture constants that are not scalars; pass them as"
            " operands"
        )
    return host(np.asarray(x, host_dtype(dtype)))


def copy(x):
    """A copy of ``x``. In kernels arrays are immutable, so the result is ``x`` itself."""
    return asarray(x) if is_traced(x) else host(np.copy(x))


# ---- of one value --------------------------------------------------------------------------------


def full(shape, fill_value, dtype=None):
    """An array with the same value everywhere; its dtype is that of the value unless given."""
    if tracing():
        return _core.full(ints(shape, "shape"), fill_value, host_dtype(dtype))
    return host(np.full(shape, fill_value, host_dtype(dtype)))


def zeros(shape, dtype=float32):
    """An array of zeros; float32 unless given."""
    return full(shape, 0, dtype)


def ones(shape, dtype=float32):
    """An array of ones; float32 unless given."""
    return full(shape, 1, dtype)


def empty(shape, dtype=float32):
    """An array with unspecified contents (in fact zeros)."""
    return zeros(shape, dtype)


def full_like(x, fill_value, dtype=None, shape=None):
    """One value, in the shape and dtype of ``x`` (an array or a ref)."""
    out = full(x.shape if shape is None else shape, fill_value, x.dtype if dtype is None else dtype)
    if dtype is None and isinstance(x, Array) and x.weak_type:
        return _core.convert(out, x.dtype, weak=True)
    return out


def zeros_like(x, dtype=None, shape=None):
    """Zeros, in the shape and dtype of ``x`` (an array or a ref)."""
    return full_like(x, 0, dtype, shape)


def ones_like(x, dtype=None, shape=None):
    """Ones, in the shape and dtype of ``x`` (an array or a ref)."""
    return full_like(x, 1, dtype, shape)


def empty_like(x, dtype=None, shape=None):
    """Unspecified contents (in fact zeros), in the shape and dtype of ``x``."""
    return zeros_like(x, dtype, shape)


# ---- of indices ----------------------------------------------------------------------------------


def arange(start, stop=None, step=1, dtype=None):
    """start, start + step, ... below stop. The arguments are static."""
    if is_traced(start, stop, step):
        raise _core.ConcretizationTypeError(
            "jnp.arange: arguments must be known at trace time; use pl.loop or an iota plus a"
            " scalar"
        )
    if stop is None:
        start, stop = 0, start
    if not tracing():
        return host(np.arange(start, stop, step, host_dtype(dtype)))
    if dtype is None:
        dtype = "float32" if any(isinstance(v, float) for v in (start, stop, step)) else "int32"
    if step == 0:
        raise ValueError("jnp.arange: step must not be 0")
    n = max(math.ceil((stop - start) / step), 0)
    out = _core.iota(_core.as_dtype(dtype), (n,), 0)
    if step != 1:
        out = out * step
    return out + start if start != 0 else out


def linspace(start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0):
    """``num`` equally spaced numbers from ``start`` to ``stop`` (scalars); the last is exactly
    ``stop``."""
    scalars = all(np.ndim(x) == 0 for x in (start, stop))
    traced = any(isinstance(x, Array) for x in (start, stop))
    if not tracing() or not scalars:
        if traced:
            raise NotImplementedError("jnp.linspace: start and stop must be scalars in kernels")
        out = np.linspace(start, stop, num, endpoint, retstep, host_dtype(dtype), axis)
        return tuple(host(x) for x in out) if retstep else host(out)
    (num,) = ints(num, "jnp.linspace: num")
    gaps = max(num - 1 if endpoint else num, 1)
    to = _core.as_dtype("float32" if dtype is None else dtype)
    a, b = (_core.convert(_core.as_array(x), "float32") for x in (start, stop))
    t = _core.iota("float32", (num,), 0) / gaps
    out = a * (1 - t) + b * t
    if endpoint and num > 1:
        out = _core.where(_core.iota("int32", (num,), 0) == gaps, b, out)
    if is_integer(to):
        out = _core.unary("floor", out)
    out = _core.convert(out, to)
    return (out, (b - a) / gaps) if retstep else out


def logspace(start, stop, num=50, endpoint=True, base=10.0, dtype=None, axis=0):
    """``base`` to the power of the numbers of linspace."""
    if not tracing():
        return host(np.logspace(start, stop, num, endpoint, base, host_dtype(dtype), axis))
    out = _core.binary("power", base, linspace(start, stop, num, endpoint))
    return out if dtype is None else _core.convert(out, dtype)


def indices(dimensions, dtype="int32", sparse=False):
    """The indices along each dimension, stacked; with ``sparse`` a tuple of arrays that
    broadcast."""
    shape = ints(dimensions, "jnp.indices: dimensions")
    if not tracing():
        return np.indices(shape, _core.as_dtype(dtype), sparse)
    if sparse:
        lone = [tuple(n if k == d else 1 for k in range(len(shape))) for d, n in enumerate(shape)]
        return tuple(_core.iota(dtype, s, d) for d, s in enumerate(lone))
    return stack([_core.iota(dtype, shape, d) for d in range(len(shape))])


@either
def meshgrid(*xi, copy=True, sparse=False, indexing="xy"):
    """Each vector along its own dimension; ``indexing="xy"`` exchanges the first two."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"jnp.meshgrid: indexing must be 'xy' or 'ij', got {show(indexing)}")
    xi = [_core.as_array(x).reshape((-1,)) for x in xi]
    dims = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        dims[:2] = 1, 0
    sizes = [0] * len(xi)
    for x, d in zip(xi, dims):
        sizes[d] = x.shape[0]
    out = []
    for x, d in zip(xi, dims):
        shape = [sizes[k] if k == d or not sparse else 1 for k in range(len(xi))]
        out.append(_core.broadcast_in_dim(x, tuple(shape), (d,)))
    return out


# ---- triangles -----------------------------------------------------------------------------------


def _below(shape, k):
    """Is the column not more than ``k`` right of the row? bool[..., M, N]"""
    rows, cols = (_core.iota(np.dtype("int32"), shape, len(shape) + d) for d in (-2, -1))
    return rows + k >= cols if k else rows >= cols


def tri(N, M=None, k=0, dtype=None):  # noqa: N803 - NumPy's names
    """An (N, M) array with ones on and below the ``k``-th diagonal, zeros elsewhere."""
    dtype = _core.as_dtype("float32" if dtype is None else dtype)
    shape = ints((N, N if M is None else M), "jnp.tri: the shape")
    if not tracing():
        return np.tri(*shape, k, dtype)
    return _core.convert(_below(shape, k), dtype)


def eye(N, M=None, k=0, dtype=None):  # noqa: N803
    """An (N, M) array with ones on the ``k``-th diagonal, zeros elsewhere."""
    dtype = _core.as_dtype("float32" if dtype is None else dtype)
    shape = ints((N, N if M is None else M), "jnp.eye: the shape")
    if not tracing():
        return np.eye(*shape, k, dtype)
    return _core.convert(_below(shape, k) ^ _below(shape, k - 1), dtype)


def identity(n, dtype=None):
    """A square array with ones on the diagonal, zeros elsewhere."""
    return eye(n, dtype=dtype)


def _triangle(name, x, k, lower):
    if not is_traced(x):
        return host((np.tril if lower else np.triu)(x, k))
    if x.ndim < 2:
        raise ValueError(f"jnp.{name}: an array of at least 2 dims is needed, got {x.shape}")
    zero = _core.convert(_core.as_array(0), x.dtype)
    kept, rest = (x, zero) if lower else (zero, x)
    return _core.where(_below(x.shape, k if lower else k - 1), kept, rest)


def tril(x, k=0):
    """``x`` with zeros above the ``k``-th diagonal of the last two dimensions."""
    return _triangle("tril", x, k, True)


def triu(x, k=0):
    """``x`` with zeros below the ``k``-th diagonal of the last two dimensions."""
    return _triangle("triu", x, k, False)
