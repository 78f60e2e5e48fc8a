"""What the array functions share: traced and host operands, axes, and element numbers.

An element's *number* is its row-major index. `numbers` builds the numbers of a strided box as a sum
of iotas, so that every index expression becomes one gather.
"""

import functools
import math

import numpy as np

from .. import _core, tree
from .._sizes import Dim
from .._trace import Array, Ref, tracing
from .._types import ints, is_integer

# ---- operands ------------------------------------------------------------------------------------


_TRACED = frozenset((Array, Ref, Dim))  # none has a derived class


def is_traced(*xs):
    """Is any of them a traced array, a ref or a size of the call?"""
    for x in xs:  # any() of a generator takes twice as long
        if type(x) in _TRACED:
            return True
    return False


def in_kernel(x):
    """Is x traced, or a number in a kernel (where an array made of it must be traced)?"""
    return is_traced(x) or tracing() and np.ndim(x) == 0


def value(x, what):
    """A traced array. TypeError for a ref."""
    if isinstance(x, Ref):
        raise TypeError(f"{what}: a Ref was given; load it first with ref[...]")
    return _core.as_array(x)


_NARROW = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}


def host(x):
    """A host array, with 64-bit elements converted to 32 bits."""
    x = np.asarray(x)
    return x.astype(_NARROW[x.dtype.name]) if x.dtype.name in _NARROW else x


def host_floats(x):
    """The host operand of an inexact function: integers become float32."""
    x = host(x)
    return x.astype(np.float32) if is_integer(x.dtype) else x


def host_dtype(dtype):
    """For NumPy's ``dtype=``, where None means that NumPy chooses."""
    return None if dtype is None else _core.as_dtype(dtype)


def _narrowed(out):
    return host(out) if isinstance(out, (np.ndarray, np.generic)) else out


def _is_host_array(x):
    return isinstance(x, (np.ndarray, np.generic))


def either(f):
    """Decorator: ``f`` computes on traced operands; without any, NumPy's function of that name is
    called."""

    @functools.wraps(f)
    def call(*args, **kwargs):
        if is_traced(*args) or is_traced(*tree.leaves([args, kwargs])):
            return f(*args, **kwargs)
        to = kwargs.pop("preferred_element_type", None)
        if to is not None:  # of a product, which accumulates in this dtype
            to = _core.as_dtype(to)
            args = tuple(np.asarray(x, to) if _is_host_array(x) else x for x in args)
        for k in ("precision", "out_sharding"):
            kwargs.pop(k, None)
        return _narrowed(getattr(np, f.__name__)(*args, **kwargs))

    return call


def on_host(f):
    """Decorator of elementwise functions, as `either`: NumPy gets operands of 32 bits and does not
    warn of values that have no result."""

    @functools.wraps(f)
    def call(*args, **kwargs):
        if is_traced(*args):
            return f(*args, **kwargs)
        with np.errstate(all="ignore"):
            out = getattr(np, f.__name__)(*map(host, args), **kwargs)
        return tuple(map(host, out)) if isinstance(out, tuple) else host(out)

    return call


# ---- axes ----------------------------------------------------------------------------------------


def axis_of(axis, rank, what):
    """A static axis, made non-negative. ValueError if the array has no such axis."""
    if isinstance(axis, Array):
        raise _core.ConcretizationTypeError(f"{what}: axis must be known at trace time")
    (axis,) = ints(axis, f"{what}: axis")
    if not -rank <= axis < rank:
        raise ValueError(f"{what}: axis {axis} is out of bounds for an array of rank {rank}")
    return axis % rank


def axes_of(axis, rank, what):
    """A tuple of different axes; None means all of them."""
    if axis is None:
        return tuple(range(rank))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    found = tuple(axis_of(a, rank, what) for a in axes)
    if len(set(found)) != len(found):
        raise ValueError(f"{what}: axes {tuple(axes)} name a dimension twice")
    return found


# ---- element numbers -----------------------------------------------------------------------------


def strides(shape):
    """Row-major strides in elements."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def numbers(shape, steps, base=0):
    """base + sum of index[k] * steps[k], for each index of an array of this shape."""
    total = None
    for k, (n, step) in enumerate(zip(shape, steps)):
        if n > 1 and step:
            term = _core.iota("int32", shape, k)
            term = term * step if step != 1 else term
            total = term if total is None else total + term
    if total is None:
        return _core.full(shape, base, "int32")
    return total if isinstance(base, int) and base == 0 else total + base
