"""The functions of `lax` that move, join, scan and multiply arrays: their argument orders over
`_shapes` and `_dot`."""

import math

import numpy as np

from . import _core, _shapes
from ._dot import dot_general, matmul
from ._names import show
from ._shapes import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
    rev,
    slice_in_dim,
)
from ._types import is_integer

__all__ = [
    "argmax",
    "argmin",
    "batch_matmul",
    "broadcast_shapes",
    "broadcast_to_rank",
    "collapse",
    "concatenate",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot",
    "dot_general",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "expand_dims",
    "index_in_dim",
    "pad",
    "reduce_prod",
    "rev",
    "slice_in_dim",
    "sort",
    "split",
    "top_k",
    "transpose",
]


def broadcast_shapes(*shapes):
    """The shape that arrays of these shapes broadcast to."""
    return np.broadcast_shapes(*shapes)


def broadcast_to_rank(x, rank):
    """New dims in front, up to ``rank``."""
    if rank < x.ndim:
        raise ValueError(f"lax.broadcast_to_rank: rank {rank} of an array of rank {x.ndim}")
    return x.reshape((1,) * (rank - x.ndim) + tuple(x.shape))


def collapse(operand, start_dimension, stop_dimension=None):
    """The dims from start to before stop as one."""
    shape = tuple(operand.shape)
    a, b, _ = slice(start_dimension, stop_dimension).indices(len(shape))
    if b <= a:
        raise ValueError(
            f"lax.collapse: dims {start_dimension} to {stop_dimension} of rank {len(shape)}"
        )
    return operand.reshape((*shape[:a], math.prod(shape[a:b]), *shape[b:]))


def transpose(x, permutation):
    """Result dim k is dim ``permutation[k]``."""
    return _shapes.transpose(x, tuple(permutation))


def concatenate(operands, dimension):
    """Arrays one behind the other along a dim."""
    return _shapes.concatenate(operands, dimension)


def split(operand, sizes, axis=0):
    """Parts of these sizes along a dim."""
    cuts = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    axis = _shapes.axis_of(axis, operand.ndim, "split")
    if not sizes or cuts[-1] != operand.shape[axis]:
        raise ValueError(f"split: sizes {tuple(sizes)} of {operand.shape} along dimension {axis}")
    return _shapes.split(operand, cuts[:-1], axis)


def expand_dims(x, dimensions):
    """New dims of size 1 at these places of the result."""
    from . import numpy as jnp

    x = _core.as_array(x)
    places = _shapes.axes_of(tuple(dimensions), x.ndim + len(dimensions), "expand_dims")
    for d in sorted(places):
        x = jnp.expand_dims(x, d)
    return x


def index_in_dim(x, index, axis=0, keepdims=True):
    """The slice of one element at a static index."""
    n = x.shape[_shapes.axis_of(axis, x.ndim, "index_in_dim")]
    if not -n <= index < n:
        raise IndexError(f"index_in_dim: {index} is out of bounds for {n} elements")
    out = slice_in_dim(x, index % n, index % n + 1, 1, axis)
    return out if keepdims else out.squeeze(axis)


def dynamic_update_index_in_dim(x, update, index, axis):
    """``update`` in place of the slice of one element at a traced index."""
    axis = _shapes.axis_of(axis, x.ndim, "dynamic_update_index_in_dim")
    shape = tuple(1 if k == axis else n for k, n in enumerate(x.shape))
    return dynamic_update_slice_in_dim(x, _core.as_array(update).reshape(shape), index, axis)


def pad(operand, padding_value, padding_config):
    """(low, high, interior) elements of ``padding_value`` for each dim; low, high may be < 0."""
    return _shapes.pad_with(operand, padding_value, padding_config)


def argmax(operand, axis, index_dtype="int32"):
    """Index of the first greatest element."""
    return _core.convert(_shapes.argmax(operand, axis), _core.as_dtype(index_dtype))


def argmin(operand, axis, index_dtype="int32"):
    """Index of the first least element."""
    return _core.convert(_shapes.argmin(operand, axis), _core.as_dtype(index_dtype))


def _cumulative(kind, name, doc):
    def f(operand, axis=0, reverse=False):
        return _shapes.scan(kind, operand, axis, reverse, None, name)

    f.__name__ = f.__qualname__ = name
    f.__doc__ = doc
    return f


cumsum = _cumulative("add", "cumsum", "Sums of the elements up to each.")
cumprod = _cumulative("mul", "cumprod", "Products of the elements up to each.")
cummax = _cumulative("max", "cummax", "The greatest of the elements up to each.")
cummin = _cumulative("min", "cummin", "The least of the elements up to each.")


def cumlogsumexp(operand, axis=0, reverse=False):
    """log(sum(exp(x))) of the elements up to each, without overflow, computed in float32."""
    from . import numpy as jnp
    from ._loops import associative_scan

    x = _shapes._value(operand, "cumlogsumexp")
    if x.dtype == bool or is_integer(x.dtype):
        raise TypeError(f"lax.cumlogsumexp does not accept dtype {x.dtype}; convert to a float")
    axis = _shapes.axis_of(axis, x.ndim, "cumlogsumexp")
    out = associative_scan(jnp.logaddexp, _core.convert(x, "float32"), reverse, axis)
    return _core.convert(out, x.dtype)


def top_k(operand, k, *, axis=-1):
    """The k greatest elements along a dim in falling order, NaN first, and their int32 indices; of
    equal ones the first. More than 16 of more than 4096 elements take a step each."""
    return _shapes.top_k(operand, k, axis)


def reduce_prod(x, axes):
    """Product over axes in the dtype of x."""
    x = _core.as_array(x)
    return _core.reduce("mul", x, _shapes.axes_of(axes, x.ndim, "reduce_prod"))


def sort(operand, dimension=-1, is_stable=True, num_keys=1):
    """In rising order along a dim, NaN last."""
    if isinstance(operand, (tuple, list)) or num_keys != 1:
        raise NotImplementedError("lax.sort: one array and one key; use jnp.argsort and jnp.take")
    return _shapes.sort(operand, dimension)


def dot(lhs, rhs, *, dimension_numbers=None, precision=None, preferred_element_type=None):
    """Product of vectors or matrices."""
    if dimension_numbers is None:
        if not 1 <= lhs.ndim <= 2 or not 1 <= rhs.ndim <= 2:
            raise TypeError(f"lax.dot: shapes {lhs.shape} and {rhs.shape}; vectors or matrices")
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    return dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)


def batch_matmul(lhs, rhs, precision=None):
    """Products of matrices, of equal leading dims."""
    if lhs.ndim != rhs.ndim or lhs.ndim < 2:
        raise TypeError(f"lax.batch_matmul: shapes {show(lhs.shape)} and {show(rhs.shape)}")
    return matmul(lhs, rhs, precision=precision)
