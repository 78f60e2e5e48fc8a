"""Shapes of register arrays: permute, join, split, repeat and pad.

`transpose`, `concat`, slices and reshapes are ops of their own: they renumber registers where the
layouts allow it, and otherwise go through shared memory with wide accesses. `flip`, `roll` and
padding in front are gathers by element numbers (see `base`).
"""

import numpy as np

from .. import _core
from .._names import show
from .._trace import type_text
from .._types import ints
from .base import axes_of, axis_of, either, host, in_kernel, numbers, strides, value

__all__ = [
    "append",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "broadcast_arrays",
    "broadcast_to",
    "column_stack",
    "concat",
    "concatenate",
    "dsplit",
    "dstack",
    "expand_dims",
    "flip",
    "fliplr",
    "flipud",
    "hsplit",
    "hstack",
    "matrix_transpose",
    "moveaxis",
    "pad",
    "permute_dims",
    "ravel",
    "repeat",
    "reshape",
    "roll",
    "rollaxis",
    "rot90",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "tile",
    "transpose",
    "unstack",
    "vsplit",
    "vstack",
]

# ---- the same elements in another shape ----------------------------------------------------------


def broadcast_to(x, shape):
    """NumPy broadcasting to ``shape``: trailing dims align."""
    if not in_kernel(x):
        return np.broadcast_to(host(x), shape)
    x, shape = _core.as_array(x), ints(shape, "shape")
    if x.shape == shape:
        return x
    first = len(shape) - x.ndim
    if first < 0 or any(a not in (1, b) for a, b in zip(x.shape, shape[first:])):
        raise ValueError(
            f"jnp.broadcast_to: Incompatible shapes for broadcasting: {x.shape}, {shape}"
        )
    kept = [k for k, n in enumerate(x.shape) if n == shape[first + k]]
    if len(kept) < x.ndim:
        x = _core.reshape(x, tuple(x.shape[k] for k in kept))
    return _core.broadcast_in_dim(x, shape, tuple(first + k for k in kept))


def reshape(x, shape):
    """The same elements in row-major order with another shape; one extent may be -1."""
    return x.reshape(shape)


def ravel(x):
    """Flatten to one dimension."""
    return x.reshape((-1,))


@either
def squeeze(x, axis=None):
    """Remove dimensions of size 1: all of them, or those given."""
    x = value(x, "squeeze")
    if axis is None:
        axis = tuple(k for k, n in enumerate(x.shape) if n == 1)
    gone = axes_of(axis, x.ndim, "squeeze")
    for k in gone:
        if x.shape[k] != 1:
            raise ValueError(f"squeeze: dimension {k} of {type_text(x)} is not 1")
    return _core.reshape(x, tuple(n for k, n in enumerate(x.shape) if k not in gone))


def expand_dims(x, axis):
    """Insert a dimension of size 1."""
    if not in_kernel(x):
        return np.expand_dims(x, axis)
    x = _core.as_array(x)
    if not -x.ndim - 1 <= axis <= x.ndim:
        raise ValueError(f"jnp.expand_dims: axis {axis} is out of bounds for rank {x.ndim + 1}")
    axis = axis if axis >= 0 else axis + x.ndim + 1
    return x.reshape((*x.shape[:axis], 1, *x.shape[axis:]))


@either
def broadcast_arrays(*arrays):
    """Broadcast all arrays to their common shape."""
    arrays = [value(a, "broadcast_arrays") for a in arrays]
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(str(a.shape) for a in arrays)
        raise ValueError(
            f"broadcast_arrays: Incompatible shapes for broadcasting: {shapes}"
        ) from None
    return [broadcast_to(a, shape) for a in arrays]


def _each(f, xs):
    out = tuple(f(_core.as_array(x)) for x in xs)
    return out[0] if len(out) == 1 else out


@either
def atleast_1d(*arrays):
    """Scalars become arrays of one element."""
    return _each(lambda x: x if x.ndim else x.reshape((1,)), arrays)


@either
def atleast_2d(*arrays):
    """Scalars and vectors get new leading dims."""
    return _each(lambda x: x if x.ndim > 1 else x.reshape((1, x.size)), arrays)


@either
def atleast_3d(*arrays):
    """(n,) becomes (1, n, 1), (m, n) becomes (m, n, 1)."""

    def f(x):
        if x.ndim > 2:
            return x
        return x.reshape((1, x.size, 1) if x.ndim < 2 else (*x.shape, 1))

    return _each(f, arrays)


# ---- permutations --------------------------------------------------------------------------------


@either
def transpose(x, axes=None):
    """Permute the dimensions; without ``axes``, reverse them."""
    x = value(x, "transpose")
    if axes is None:
        axes = tuple(range(x.ndim))[::-1]
    found = axes_of(tuple(axes), x.ndim, "transpose")
    if len(found) != x.ndim:
        raise ValueError(f"transpose: axes {tuple(axes)} for an array of rank {x.ndim}")
    return x if found == tuple(range(x.ndim)) else _core.transpose(x, found)


permute_dims = transpose


@either
def swapaxes(x, axis1, axis2):
    """Exchange two dimensions."""
    x = value(x, "swapaxes")
    order = list(range(x.ndim))
    a, b = axis_of(axis1, x.ndim, "swapaxes"), axis_of(axis2, x.ndim, "swapaxes")
    order[a], order[b] = b, a
    return transpose(x, order)


@either
def moveaxis(x, source, destination):
    """Move dimensions; the others keep their order."""
    x = value(x, "moveaxis")
    source = axes_of(source, x.ndim, "moveaxis")
    destination = axes_of(destination, x.ndim, "moveaxis")
    if len(source) != len(destination):
        raise ValueError("moveaxis: source and destination must be as many")
    order = [k for k in range(x.ndim) if k not in source]
    for to, a in sorted(zip(destination, source)):
        order.insert(to, a)
    return transpose(x, order)


@either
def rollaxis(a, axis, start=0):
    """Move the axis before ``start``."""
    axis %= a.ndim
    start = start if start >= 0 else start + a.ndim
    return moveaxis(a, axis, start - 1 if start > axis else start)


def matrix_transpose(x):
    """Exchange the last two dimensions."""
    if np.ndim(x) < 2:
        raise ValueError(f"matrix_transpose: rank 2 or more is needed, got {np.shape(x)}")
    return swapaxes(x, -1, -2)


# ---- joining and splitting -----------------------------------------------------------------------


@either
def concatenate(arrays, axis=0, dtype=None):
    """Concatenate arrays along ``axis``; dtypes are promoted. None: flatten them first."""
    arrays = [value(a, "concatenate") for a in arrays]
    if not arrays:
        raise ValueError("concatenate: at least one array is needed")
    if axis is None:
        arrays, axis = [a.reshape((-1,)) for a in arrays], 0
    if not arrays[0].ndim:
        raise ValueError("concatenate: arrays of rank 0 cannot be joined; use jnp.stack")
    axis = axis_of(axis, arrays[0].ndim, "concatenate")
    like = [n for k, n in enumerate(arrays[0].shape) if k != axis]
    for a in arrays[1:]:
        if a.ndim != arrays[0].ndim or [n for k, n in enumerate(a.shape) if k != axis] != like:
            raise TypeError(
                f"concatenate: shapes {arrays[0].shape} and {a.shape} differ in more than"
                f" dimension {axis}"
            )
    if dtype is not None:
        arrays = [_core.convert(a, _core.as_dtype(dtype)) for a in arrays]
    return arrays[0] if len(arrays) == 1 else _core.concat(axis, *arrays)


@either
def concat(arrays, axis=0):
    """concatenate."""
    return concatenate(arrays, axis)


@either
def append(arr, values, axis=None):
    """``arr`` followed by ``values``; without ``axis`` both are flattened."""
    arr, values = _core.as_array(arr), _core.as_array(values)
    if axis is None:
        arr, values, axis = arr.reshape((-1,)), values.reshape((-1,)), 0
    return concatenate([arr, values], axis)


@either
def stack(arrays, axis=0, dtype=None):
    """Stack arrays of the same shape along a new dimension."""
    arrays = [value(a, "stack") for a in arrays]
    if not arrays:
        raise ValueError("stack: at least one array is needed")
    axis = axis_of(axis, arrays[0].ndim + 1, "stack")
    if any(a.shape != arrays[0].shape for a in arrays):
        raise ValueError(f"stack: shapes differ: {', '.join(str(a.shape) for a in arrays)}")
    shape = arrays[0].shape
    return concatenate([a.reshape((*shape[:axis], 1, *shape[axis:])) for a in arrays], axis, dtype)


def _at_least(x, rank):
    x = _core.as_array(x)
    if x.ndim >= rank:
        return x
    return x.reshape((1, *x.shape) if x.ndim else (1,) * rank)


@either
def vstack(arrays):
    """Concatenate along the first dimension; vectors become rows."""
    return concatenate([_at_least(a, 2) for a in arrays], 0)


@either
def hstack(arrays):
    """Concatenate along the second dimension, or the first of vectors."""
    arrays = [_at_least(a, 1) for a in arrays]
    return concatenate(arrays, 0 if arrays and arrays[0].ndim == 1 else 1)


@either
def dstack(tup):
    """Concatenate along a third dimension."""
    return concatenate([atleast_3d(_core.as_array(x)) for x in tup], 2)


@either
def column_stack(tup):
    """A matrix whose columns are the vectors."""
    parts = [_core.as_array(x) for x in tup]
    return concatenate([x if x.ndim > 1 else x.reshape((-1, 1)) for x in parts], 1)


@either
def split(x, indices_or_sections, axis=0):
    """A list of parts: a number of equal ones, or split at static indices."""
    x = value(x, "split")
    axis = axis_of(axis, x.ndim, "split")
    n = x.shape[axis]
    if isinstance(indices_or_sections, (tuple, list)):
        cuts = list(ints(indices_or_sections, "split: indices"))
    else:
        (parts,) = ints(indices_or_sections, "split: sections")
        if parts < 1 or n % parts:
            raise ValueError(f"split: {n} elements do not divide into {parts} equal parts")
        cuts = [n // parts * k for k in range(1, parts)]
    bounds = [0, *(slice(c).indices(n)[1] for c in cuts), n]
    lead = (slice(None),) * axis
    if any(b <= a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"split: indices {cuts} leave a part without elements")
    return [x[(*lead, slice(a, b))] for a, b in zip(bounds, bounds[1:])]


@either
def unstack(x, axis=0):
    """The slices of ``x`` along a dimension, without that dimension."""
    x = moveaxis(x, axis, 0)
    return tuple(x[k] for k in range(x.shape[0]))


@either
def hsplit(ary, indices_or_sections):
    """split along the second dim, or the first one of a vector."""
    return split(ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


@either
def vsplit(ary, indices_or_sections):
    """split along the first dim."""
    return split(ary, indices_or_sections, 0)


@either
def dsplit(ary, indices_or_sections):
    """split along the third dim."""
    return split(ary, indices_or_sections, 2)


# ---- repeating, reversing, moving ----------------------------------------------------------------


@either
def tile(x, reps):
    """Repeat the array along its dimensions."""
    x = value(x, "tile")
    reps = ints(reps, "tile: reps")
    reps = (1,) * (x.ndim - len(reps)) + reps
    shape = (1,) * (len(reps) - x.ndim) + x.shape
    wide, kept = [], []
    for r, n in zip(reps, shape):
        wide += [r, n] if r != 1 else [n]
        kept.append(len(wide) - 1)
    out = _core.broadcast_in_dim(x.reshape(shape), wide, tuple(kept))
    return out.reshape(tuple(r * n for r, n in zip(reps, shape)))


@either
def repeat(x, repeats, axis=None):
    """Repeat each element ``repeats`` times, a static number."""
    x = value(x, "repeat")
    (repeats,) = ints(repeats, "repeat: repeats")
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    axis = axis_of(axis, x.ndim, "repeat")
    wide = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    kept = tuple(k for k in range(len(wide)) if k != axis + 1)
    out = _core.broadcast_in_dim(x, wide, kept)
    return out.reshape(tuple(n * (repeats if k == axis else 1) for k, n in enumerate(x.shape)))


@either
def flip(x, axis=None):
    """Reverse the order of elements along axes; None means all axes."""
    x = value(x, "flip")
    axes = axes_of(axis, x.ndim, "flip")
    if not axes or all(x.shape[a] == 1 for a in axes):
        return x
    steps = [-s if k in axes else s for k, s in enumerate(strides(x.shape))]
    last = sum((n - 1) * -s for n, s in zip(x.shape, steps) if s < 0)
    return _core.gather(x, numbers(x.shape, steps, last))


@either
def fliplr(m):
    """Reverse the order of columns."""
    return flip(m, 1)


@either
def flipud(m):
    """Reverse the order of rows."""
    return flip(m, 0)


@either
def rot90(m, k=1, axes=(0, 1)):
    """Rotate ``k`` times by 90 degrees, from the first axis to the second."""
    a, b = axes
    k %= 4
    if k == 2:
        return flip(m, (a, b))
    if k == 1:
        return swapaxes(flip(m, b), a, b)
    return flip(swapaxes(m, a, b), b) if k else m


@either
def roll(x, shift, axis=None):
    """Elements moved by ``shift`` (static or traced) along axes; those that leave the end come in
    at the start."""
    x = value(x, "roll")
    if axis is None:
        return roll(x.reshape((-1,)), shift, 0).reshape(x.shape)
    axes = axes_of(axis, x.ndim, "roll")
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ValueError("roll: as many shifts as axes are needed")
    stride = strides(x.shape)
    source = numbers(x.shape, [0 if k in axes else s for k, s in enumerate(stride)])
    for a, by in zip(axes, shifts):
        by = by % x.shape[a]
        at = (_core.iota("int32", x.shape, a) + (x.shape[a] - by)) % x.shape[a]
        source = source + at * stride[a]
    return _core.gather(x, source)


# ---- padding -------------------------------------------------------------------------------------


def pad_with(x, fill, config):
    """``lax.pad``: (low, high, interior) of each dim; low and high may be negative."""
    x = value(x, "pad")
    if len(config) != x.ndim:
        raise ValueError(f"pad: {len(config)} entries for an array of rank {x.ndim}")
    shape, source, inside = [], None, None
    for n, (low, high, interior) in zip(x.shape, config):
        if interior < 0:
            raise ValueError("pad: interior padding must not be negative")
        shape.append(n + (n - 1) * interior + low + high)
        if shape[-1] < 1:
            raise ValueError(f"pad: {config} leaves no elements of {x.shape}")
    fill = _core.convert(_core.as_array(fill), x.dtype)
    if all(low == interior == 0 <= high for low, high, interior in config):
        for k, (_, high, _) in enumerate(config):
            if high:
                rest = (*x.shape[:k], high, *x.shape[k + 1 :])
                x = _core.concat(k, x, _core.broadcast_in_dim(fill, rest, ()))
        return x
    for k, (n, (low, high, interior)) in enumerate(zip(x.shape, config)):
        at, gap = _core.iota("int32", shape, k), interior + 1
        at = at - low if low else at
        checks = []
        if low > 0:
            checks.append(at >= 0)
        if high > 0:
            checks.append(at <= (n - 1) * gap)
        if gap > 1:
            checks.append(at % gap == 0)
            at = at // gap
        for c in checks:
            inside = c if inside is None else inside & c
        at = at * strides(x.shape)[k]
        source = at if source is None else source + at
    out = _core.gather(x, source)
    return out if inside is None else _core.where(inside, out, fill)


@either
def pad(x, pad_width, mode="constant", *, constant_values=0):
    """Pad ``x`` with ``constant_values``, one number; ``pad_width`` is as in NumPy."""
    x = value(x, "pad")
    if mode != "constant":
        raise NotImplementedError(f"jnp.pad: mode {show(mode)}; only 'constant' is supported")
    width = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2))
    config = [(int(a), int(b), 0) for a, b in width]
    return pad_with(x, _core.as_array(constant_values), config)
