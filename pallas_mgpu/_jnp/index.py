"""Index expressions on register arrays.

Every index expression of NumPy becomes one gather of elements by their numbers (see `base`), and
``x.at[idx].set(y)`` one scatter. Static slices do not come here: they are an op of their own.
"""

import math

import ml_dtypes
import numpy as np

from .. import _core
from .._control import fori_loop
from .._names import show
from .._trace import Array, Ref
from .._types import ints
from .base import axis_of, either, numbers, strides, value
from .elementwise import clip, minimum
from .shape import broadcast_to, moveaxis

__all__ = [
    "diag",
    "diagonal",
    "ravel_multi_index",
    "take",
    "take_along_axis",
    "unravel_index",
]

# ---- what an index names -------------------------------------------------------------------------


def entries(x, idx, error=ValueError):
    """An index as a list with one entry for each dim of ``x``, and None for new ones."""
    idx = list(idx) if isinstance(idx, tuple) else [idx]
    dots = [k for k, i in enumerate(idx) if i is Ellipsis]
    used = sum(i is not None and i is not Ellipsis for i in idx)
    if len(dots) > 1:
        raise error("index: at most one ... is accepted")
    if used > x.ndim:
        raise error(f"index: too many indices, {used} for rank {x.ndim}")
    at = dots[0] if dots else len(idx)
    idx[at : at + 1] = [slice(None)] * (x.ndim - used)
    return idx


CAPTURED = (
    "index: a kernel cannot capture constants that are not scalars; pass the indices as an"
    " operand, or make them of jnp.arange"
)


def _checked(i):
    """An index array or scalar as int32, or a Python int."""
    if isinstance(i, Ref):
        raise TypeError("index: a Ref was given; load it first with ref[...]")
    if isinstance(i, Array):
        if i.dtype == bool:
            raise IndexError(
                "index: boolean masks give shapes that are known only at run time; use jnp.where"
            )
        if i.dtype.kind not in "iu":
            raise IndexError(f"index: indices must be integers, got {i.dtype}")
        return _core.convert(i, "int32")
    host = np.asarray(i)
    if host.dtype.kind not in "iu":
        raise IndexError(f"index: indices must be integers, got {host.dtype}")
    if host.ndim:
        raise ValueError(CAPTURED)
    return int(host)


def _static_bound(b):
    if isinstance(b, (Array, Ref)):
        raise IndexError(
            "Array slice indices must have static start/stop/step; use lax.dynamic_slice for a"
            " traced start"
        )
    return b


def _slice_start(s, n):
    """The start of a ``pl.ds`` in a dimension of n elements; a traced one is moved inside."""
    last = n - (s.size - 1) * s.stride - 1
    if s.size < 1 or s.stride < 1 or last < 0:
        raise IndexError(
            f"index: pl.ds of {s.size} elements, stride {s.stride}, of a dimension of {n} elements"
        )
    if s.is_dynamic_start:
        return clip(_checked(s.start), 0, last)
    if not 0 <= s.start <= last:
        raise IndexError(
            f"index: {s.size} elements from {s.start}, stride {s.stride}, are out of bounds for a"
            f" dimension of {n} elements"
        )
    return s.start


class _Box:
    """What an index expression selects, dim by dim.

    The plain entries (slices, static indices, None) are a strided box: ``shape`` and ``steps`` of
    its dims from the element number ``base``. ``offsets`` are those of the arrays in the index,
    with which of their elements are in range; their dims are inserted at ``place``.
    """

    def __init__(self, x, idx):
        self.shape, self.steps, self.base = [], [], 0
        self.offsets, self.place, apart = [], 0, False
        found = entries(x, idx, IndexError)
        has_array = any(
            isinstance(i, Array) and i.ndim or isinstance(i, (list, np.ndarray)) for i in found
        )
        dims = iter(zip(x.shape, strides(x.shape)))
        for i in found:
            if i is None:
                self._add(1, 0)
                continue
            n, stride = next(dims)
            if isinstance(i, slice):
                start, stop, step = slice(*map(_static_bound, (i.start, i.stop, i.step))).indices(n)
                count = len(range(start, stop, step))
                if not count:
                    raise ValueError(f"index: {i} of a dimension of {n} elements has none")
                self._add(count, step * stride, start * stride)
            elif hasattr(i, "is_dynamic_start"):
                self._add(i.size, i.stride * stride, _slice_start(i, n) * stride)
            elif self._is_fixed(i := _checked(i), n, has_array):
                self.base = self.base + i % n * stride
            else:
                if not self.offsets:
                    self.place = len(self.shape)
                apart |= len(self.shape) != self.place
                self.offsets.append(self._offset(i, n, stride))
        if apart:  # a slice stands between the arrays: NumPy puts their dims in front
            self.place = 0

    def _add(self, size, step, base=0):
        self.shape.append(size)
        self.steps.append(step)
        self.base = self.base + base

    @staticmethod
    def _is_fixed(i, n, has_array):
        if not isinstance(i, int):
            return False
        if not -n <= i < n:
            raise IndexError(f"index: {i} is out of bounds for a dimension of {n} elements")
        return not has_array

    @staticmethod
    def _offset(i, n, stride):
        i = _core.as_array(i)
        i = _core.where(i < 0, i + n, i)
        inside = (i >= 0) & (i < n)
        return clip(i, 0, n - 1) * stride, inside

    def numbers(self, drop):
        """The element numbers, and which of their dims are those of arrays in the index."""
        at, wide = self.place, np.broadcast_shapes(*(a.shape for a, _ in self.offsets))
        full = (*self.shape[:at], *wide, *self.shape[at:])
        if len(full) > 8:
            raise IndexError("index: the result has more than 8 dimensions")
        steps = (*self.steps[:at], *(0,) * len(wide), *self.steps[at:])
        dims = tuple(range(at, at + len(wide)))
        out, inside = numbers(full, steps, self.base), None
        for offset, ok in self.offsets:
            spread = [broadcast_to(v, wide) for v in (offset, ok)]
            if wide != full:
                spread = [
                    v if v.ndim == 0 else _core.broadcast_in_dim(v, full, dims) for v in spread
                ]
            out = out + spread[0]
            inside = spread[1] if inside is None else inside & spread[1]
        if drop and inside is not None:
            out = _core.where(inside, out, -1)
        return out, dims


def _numbers_at(x, idx, drop):
    """Row-major numbers of the elements that ``x[idx]`` names, and which of their dims are those of
    arrays in the index. Traced indices out of range are limited to it, or with ``drop`` give -1; a
    ``pl.ds`` with a traced start is moved inside."""
    return _Box(x, idx).numbers(drop)


def index(x, idx):
    """``x[idx]`` with traced scalars, integer arrays or strides in the index."""
    return _core.gather(x, _numbers_at(x, idx, False)[0])


# ---- x.at ----------------------------------------------------------------------------------------


class At:
    """``x.at[idx]``: new arrays with some elements changed."""

    __slots__ = ("_x", "_idx")

    def __init__(self, x, idx=None):
        self._x, self._idx = x, idx

    def __getitem__(self, idx):
        return At(self._x, idx)

    def _change(self, values, combine):
        values = _core.convert(value(values, "x.at[idx]"), self._x.dtype)
        if isinstance(self._idx, Array) and self._idx.dtype == bool and self._idx.ndim:
            return self._change_masked(values, combine)
        at, dims = _numbers_at(self._x, self._idx, True)
        values = broadcast_to(values, at.shape)
        if combine and math.prod(at.shape[d] for d in dims) > 1:
            return self._one_by_one(at, values, dims, combine)
        if combine:
            values = combine(_core.gather(self._x, at), values)
        return _core.scatter(self._x, at, values)

    def _change_masked(self, values, combine):
        """A mask over the first dims; each of its elements gets the same values."""
        x, mask = self._x, self._idx
        rest = x.shape[mask.ndim :]
        if mask.shape != x.shape[: mask.ndim]:
            raise IndexError(f"x.at[mask]: the mask has shape {mask.shape}, the array {x.shape}")
        if values.ndim > len(rest):
            raise ValueError(
                f"x.at[mask]: values of shape {values.shape}; how many elements a mask names is"
                f" known only at run time, so they must broadcast to {rest}; use jnp.where"
            )
        values = broadcast_to(broadcast_to(values, rest), x.shape)
        if rest:
            mask = _core.broadcast_in_dim(mask, x.shape, tuple(range(mask.ndim)))
        return _core.where(mask, combine(x, values) if combine else values, x)

    def _one_by_one(self, at, values, dims, combine):
        """For each index of the arrays in order, as equal ones may occur: all that a single index
        names differs."""
        n = math.prod(at.shape[d] for d in dims)
        rest = at.size // n
        at, values = (
            moveaxis(v, dims, tuple(range(len(dims)))).reshape((n, rest)) for v in (at, values)
        )
        mine = numbers(self._x.shape, strides(self._x.shape))

        def step(k, x):
            here, new = (index(v, k) for v in (at, values))
            if rest > 1:
                return _core.scatter(x, here, combine(_core.gather(x, here), new))
            return _core.where(mine == here.reshape(()), combine(x, new.reshape(())), x)

        return fori_loop(0, n, step, self._x)

    def get(self):
        """``x[idx]``."""
        return self._x[self._idx]

    def set(self, values):
        """A copy of the array with those elements replaced. Traced indices out of range are
        dropped."""
        return self._change(values, None)

    def add(self, values):
        """A copy of the array with ``values`` added to those elements."""
        return self._change(values, lambda a, b: a + b)

    def subtract(self, values):
        """A copy of the array with ``values`` subtracted from those elements."""
        return self._change(values, lambda a, b: a - b)

    def multiply(self, values):
        """A copy of the array with those elements multiplied by ``values``."""
        return self._change(values, lambda a, b: a * b)

    def divide(self, values):
        """A copy of the array with those elements divided by ``values``."""
        return self._change(values, lambda a, b: _core.convert(a / b, a.dtype))

    def min(self, values):
        """A copy of the array with the minimum of those elements and ``values``."""
        return self._change(values, lambda a, b: _core.binary("min", a, b))

    def max(self, values):
        """A copy of the array with the maximum of those elements and ``values``."""
        return self._change(values, lambda a, b: _core.binary("max", a, b))


# ---- slices at traced starts ---------------------------------------------------------------------


def _starts(x, starts, sizes, what):
    sizes = ints(sizes, f"{what}: sizes")
    starts = list(starts) if isinstance(starts, (tuple, list)) else [starts]
    if len(starts) != x.ndim or len(sizes) != x.ndim:
        raise TypeError(f"{what}: {len(starts)} starts and {len(sizes)} sizes for rank {x.ndim}")
    base = 0
    for start, size, n, stride in zip(starts, sizes, x.shape, strides(x.shape)):
        if not 1 <= size <= n:
            raise TypeError(f"{what}: size {size} along a dimension of {n} elements")
        start = _checked(start)
        if isinstance(start, int):
            start = max(0, min(start + n if start < 0 else start, n - size))
        else:
            start = clip(_core.where(start < 0, start + n, start), 0, n - size)
        base = base + start * stride
    return sizes, base


def dynamic_slice(x, start_indices, slice_sizes):
    """A slice at traced starts, which are moved inside."""
    x = value(x, "dynamic_slice")
    sizes, base = _starts(x, start_indices, slice_sizes, "dynamic_slice")
    return _core.gather(x, numbers(sizes, strides(x.shape), base))


def dynamic_update_slice(x, update, start_indices):
    """``x`` with ``update`` in place of a slice at traced starts, which are moved inside."""
    x, update = value(x, "dynamic_update_slice"), value(update, "dynamic_update_slice")
    if update.dtype != x.dtype:
        raise TypeError(f"dynamic_update_slice: {update.dtype} into an array of {x.dtype}")
    sizes, base = _starts(x, start_indices, update.shape, "dynamic_update_slice")
    return _core.scatter(x, numbers(sizes, strides(x.shape), base), update)


def slice_in_dim(x, start_index, limit_index, stride=1, axis=0):
    """A static slice along one dim."""
    x = value(x, "slice_in_dim")
    axis = axis_of(axis, x.ndim, "slice_in_dim")
    return x[(*(slice(None),) * axis, slice(start_index, limit_index, stride))]


def dynamic_slice_in_dim(x, start_index, slice_size, axis=0):
    """A slice along one dim at a traced start."""
    x = value(x, "dynamic_slice_in_dim")
    axis = axis_of(axis, x.ndim, "dynamic_slice_in_dim")
    starts = [start_index if k == axis else 0 for k in range(x.ndim)]
    return dynamic_slice(x, starts, [slice_size if k == axis else n for k, n in enumerate(x.shape)])


def dynamic_index_in_dim(x, index, axis=0, keepdims=True):
    """The slice of one element along a dim, at a traced index."""
    out = dynamic_slice_in_dim(x, index, 1, axis)
    return out if keepdims else out.squeeze(axis)


def dynamic_update_slice_in_dim(x, update, start_index, axis):
    """``update`` in place of a slice along one dim at a traced start."""
    x = value(x, "dynamic_update_slice_in_dim")
    axis = axis_of(axis, x.ndim, "dynamic_update_slice_in_dim")
    return dynamic_update_slice(x, update, [start_index if k == axis else 0 for k in range(x.ndim)])


# ---- elements by their indices -------------------------------------------------------------------


@either
def take(x, indices, axis=None, mode="fill"):
    """Elements by their indices along ``axis`` (None: of the flattened array). Those out of range
    are NaN or the least number ("fill"), the nearest ("clip"), or counted modulo ("wrap")."""
    if mode not in (None, "fill", "clip", "wrap"):
        raise ValueError(f"take: mode must be 'fill', 'clip' or 'wrap', got {show(mode)}")
    x = value(x, "take")
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    axis = axis_of(axis, x.ndim, "take")
    i, n = _core.as_array(_checked(indices)), x.shape[axis]
    at = i % n if mode == "wrap" else _core.where(i < 0, i + n, i) if mode != "clip" else i
    inside = (at >= 0) & (at < n)
    out = x[(*(slice(None),) * axis, clip(at, 0, n - 1))]
    if mode in ("clip", "wrap"):
        return out
    fill = math.nan
    if x.dtype == bool:
        fill = True
    elif x.dtype.kind in "iu":
        info = ml_dtypes.iinfo(x.dtype)
        fill = info.min if x.dtype.kind == "i" else info.max
    if i.ndim and inside.shape != out.shape:
        inside = _core.broadcast_in_dim(inside, out.shape, tuple(range(axis, axis + i.ndim)))
    return _core.where(inside, out, _core.full((), fill, x.dtype))


@either
def take_along_axis(x, indices, axis=-1):
    """``x[..., indices[..., k, ...], ...]`` along one dim; the other dims are equal."""
    x = value(x, "take_along_axis")
    i = _core.as_array(_checked(indices))
    axis = axis_of(axis, x.ndim, "take_along_axis")
    shape = tuple(n if k != axis else i.shape[k] for k, n in enumerate(x.shape))
    if i.ndim != x.ndim or i.shape != shape:
        raise ValueError(f"take_along_axis: indices of shape {i.shape} for {x.shape}, axis {axis}")
    n, stride = x.shape[axis], strides(x.shape)
    at = clip(_core.where(i < 0, i + n, i), 0, n - 1) * stride[axis]
    rest = numbers(shape, [0 if k == axis else s for k, s in enumerate(stride)])
    return _core.gather(x, at + rest)


@either
def unravel_index(indices, shape):
    """Row-major numbers as a tuple of indices; those outside are limited to the last one."""
    shape = ints(shape, "jnp.unravel_index: shape")
    at = clip(indices, -math.prod(shape), math.prod(shape) - 1)
    at = _core.where(at < 0, at + math.prod(shape), at)
    out = []
    for n in reversed(shape):
        out.append(at % n)
        at = at // n
    return tuple(reversed(out))


@either
def ravel_multi_index(multi_index, dims, mode="clip", order="C"):
    """Row-major numbers of indices; those outside are limited ("clip") or taken modulo ("wrap")."""
    if mode not in ("clip", "wrap") or order != "C":
        raise NotImplementedError(
            "jnp.ravel_multi_index: mode must be 'clip' or 'wrap', order 'C' in kernels"
        )
    total = 0
    for i, n in zip(multi_index, dims, strict=True):
        total = total * n + (clip(i, 0, n - 1) if mode == "clip" else i % n)
    return total


# ---- diagonals -----------------------------------------------------------------------------------


@either
def diagonal(a, offset=0, axis1=0, axis2=1):
    """Elements whose indices along the two axes differ by ``offset``, as the last dim."""
    if a.ndim < 2:
        raise ValueError(f"jnp.diagonal: two dims are needed, got shape {a.shape}")
    a = moveaxis(a, (axis1, axis2), (-2, -1))
    rows, columns = a.shape[-2:]
    first = max(-offset, 0), max(offset, 0)
    n = min(rows - first[0], columns - first[1])
    if n < 1:
        raise ValueError(f"jnp.diagonal: offset {offset} leaves nothing of {rows} x {columns}")
    k = _core.iota("int32", (n,), 0)
    return index(a, (..., k + first[0], k + first[1]))


@either
def diag(v, k=0):
    """A matrix with the vector as its diagonal, or the diagonal of a matrix."""
    if v.ndim != 1:
        return diagonal(v, k)
    n = v.shape[0] + abs(k)
    i, j = (_core.iota("int32", (n, n), d) for d in range(2))
    at = i if k >= 0 else j
    spread = _core.gather(v, minimum(at, v.shape[0] - 1))
    return _core.where(j - i == k, spread, _core.convert(_core.as_array(0), v.dtype))
