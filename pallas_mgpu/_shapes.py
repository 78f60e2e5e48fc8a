"""Shapes of register arrays: moving, joining, indexing, scanning and sorting, composed of few ops.

`transpose`, `concat`, slices and reshapes are ops of their own: they renumber registers where the
layouts allow it and go through shared memory with wide accesses else. All other movement is a
`gather` of elements by their row-major numbers, or a `scatter`; the numbers are sums of iotas, made
by `_numbers`, so every index expression of NumPy is one gather."""

import math

import ml_dtypes
import numpy as np

from . import _core
from ._names import show
from ._trace import Array, Ref
from ._types import ints as _ints
from ._types import is_integer

_as_array = _core.as_array


def _value(x, what):
    if isinstance(x, Ref):
        raise TypeError(f"{what}: a Ref was given; load it first with ref[...]")
    return _as_array(x)


def axis_of(axis, rank, what):
    """A static axis, not negative. ValueError if there is no such."""
    if isinstance(axis, Array):
        raise _core.ConcretizationTypeError(f"{what}: axis must be known at trace time")
    (axis,) = _ints(axis, f"{what}: axis")
    if not -rank <= axis < rank:
        raise ValueError(f"{what}: axis {axis} is out of bounds for an array of rank {rank}")
    return axis % rank


def axes_of(axis, rank, what):
    """A tuple of different axes; None: all."""
    if axis is None:
        return tuple(range(rank))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    found = tuple(axis_of(a, rank, what) for a in axes)
    if len(set(found)) != len(found):
        raise ValueError(f"{what}: axes {tuple(axes)} name a dimension twice")
    return found


# ---- permutations --------------------------------------------------------------------------------


def transpose(x, axes=None):
    """Dims permuted; reversed unless ``axes`` says."""
    x = _value(x, "transpose")
    if axes is None:
        axes = tuple(range(x.ndim))[::-1]
    found = axes_of(tuple(axes), x.ndim, "transpose")
    if len(found) != x.ndim:
        raise ValueError(f"transpose: axes {tuple(axes)} for an array of rank {x.ndim}")
    return x if found == tuple(range(x.ndim)) else _core.transpose(x, found)


def swapaxes(x, axis1, axis2):
    """Two dims exchanged."""
    x = _value(x, "swapaxes")
    order = list(range(x.ndim))
    a, b = axis_of(axis1, x.ndim, "swapaxes"), axis_of(axis2, x.ndim, "swapaxes")
    order[a], order[b] = b, a
    return transpose(x, order)


def moveaxis(x, source, destination):
    """Dims moved, the others in their order."""
    x = _value(x, "moveaxis")
    source = axes_of(source, x.ndim, "moveaxis")
    destination = axes_of(destination, x.ndim, "moveaxis")
    if len(source) != len(destination):
        raise ValueError("moveaxis: source and destination must be as many")
    order = [k for k in range(x.ndim) if k not in source]
    for to, a in sorted(zip(destination, source)):
        order.insert(to, a)
    return transpose(x, order)


def matrix_transpose(x):
    """The last two dims exchanged."""
    x = _value(x, "matrix_transpose")
    if x.ndim < 2:
        raise ValueError(f"matrix_transpose: rank 2 or more is needed, got {x.shape}")
    return swapaxes(x, -1, -2)


# ---- joining and cutting -------------------------------------------------------------------------


def concatenate(arrays, axis=0, dtype=None):
    """Arrays one behind the other along ``axis``; dtypes promote. None: all flattened."""
    arrays = [_value(a, "concatenate") for a in arrays]
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


def stack(arrays, axis=0, dtype=None):
    """Arrays of one shape along a new dim."""
    arrays = [_value(a, "stack") for a in arrays]
    if not arrays:
        raise ValueError("stack: at least one array is needed")
    axis = axis_of(axis, arrays[0].ndim + 1, "stack")
    if any(a.shape != arrays[0].shape for a in arrays):
        raise ValueError(f"stack: shapes differ: {', '.join(str(a.shape) for a in arrays)}")
    shape = arrays[0].shape
    return concatenate([a.reshape((*shape[:axis], 1, *shape[axis:])) for a in arrays], axis, dtype)


def _at_least(x, rank):
    x = _as_array(x)
    if x.ndim >= rank:
        return x
    return x.reshape((1, *x.shape) if x.ndim else (1,) * rank)


def vstack(arrays):
    """Along the first dim; vectors become rows."""
    return concatenate([_at_least(a, 2) for a in arrays], 0)


def hstack(arrays):
    """Along the second dim, of vectors along the first."""
    arrays = [_at_least(a, 1) for a in arrays]
    return concatenate(arrays, 0 if arrays and arrays[0].ndim == 1 else 1)


def split(x, indices_or_sections, axis=0):
    """A list of parts: so many equal ones, or cut at static indices."""
    x = _value(x, "split")
    axis = axis_of(axis, x.ndim, "split")
    n = x.shape[axis]
    if isinstance(indices_or_sections, (tuple, list)):
        cuts = list(_ints(indices_or_sections, "split: indices"))
    else:
        (parts,) = _ints(indices_or_sections, "split: sections")
        if parts < 1 or n % parts:
            raise ValueError(f"split: {n} elements do not divide into {parts} equal parts")
        cuts = [n // parts * k for k in range(1, parts)]
    bounds = [0, *(slice(c).indices(n)[1] for c in cuts), n]
    lead = (slice(None),) * axis
    if any(b <= a for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"split: indices {cuts} leave a part without elements")
    return [x[(*lead, slice(a, b))] for a, b in zip(bounds, bounds[1:])]


def broadcast_arrays(*arrays):
    """All with their common shape."""
    from . import numpy as jnp

    arrays = [_value(a, "broadcast_arrays") for a in arrays]
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        shapes = ", ".join(str(a.shape) for a in arrays)
        raise ValueError(
            f"broadcast_arrays: Incompatible shapes for broadcasting: {shapes}"
        ) from None
    return [jnp.broadcast_to(a, shape) for a in arrays]


def tile(x, reps):
    """The array repeated along its dims."""
    x = _value(x, "tile")
    reps = _ints(reps, "tile: reps")
    reps = (1,) * (x.ndim - len(reps)) + reps
    shape = (1,) * (len(reps) - x.ndim) + x.shape
    wide, kept = [], []
    for r, n in zip(reps, shape):
        wide += [r, n] if r != 1 else [n]
        kept.append(len(wide) - 1)
    out = _core.broadcast_in_dim(x.reshape(shape), wide, tuple(kept))
    return out.reshape(tuple(r * n for r, n in zip(reps, shape)))


def repeat(x, repeats, axis=None):
    """Each element so many times; ``repeats`` is static."""
    x = _value(x, "repeat")
    (repeats,) = _ints(repeats, "repeat: repeats")
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    axis = axis_of(axis, x.ndim, "repeat")
    wide = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    kept = tuple(k for k in range(len(wide)) if k != axis + 1)
    out = _core.broadcast_in_dim(x, wide, kept)
    return out.reshape(tuple(n * (repeats if k == axis else 1) for k, n in enumerate(x.shape)))


# ---- numbers of elements -------------------------------------------------------------------------


def _strides(shape):
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _numbers(shape, steps, base=0):
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


def _affine(x, start, shape, steps):
    """The elements at start + index * steps along each dim."""
    strides = _strides(x.shape)
    base = sum(a * s for a, s in zip(start, strides))
    return _core.gather(x, _numbers(shape, [a * s for a, s in zip(steps, strides)], base))


def flip(x, axis=None):
    """Elements in reverse order along axes; None: all."""
    x = _value(x, "flip")
    axes = axes_of(axis, x.ndim, "flip")
    if not axes or all(x.shape[a] == 1 for a in axes):
        return x
    start = [n - 1 if k in axes else 0 for k, n in enumerate(x.shape)]
    return _affine(x, start, x.shape, [-1 if k in axes else 1 for k in range(x.ndim)])


def rev(x, dimensions):
    """Elements in reverse order along dims."""
    return flip(x, tuple(dimensions))


def roll(x, shift, axis=None):
    """Elements moved on by ``shift`` (static or traced) along axes, around the end."""
    x = _value(x, "roll")
    if axis is None:
        return roll(x.reshape((-1,)), shift, 0).reshape(x.shape)
    axes = axes_of(axis, x.ndim, "roll")
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ValueError("roll: as many shifts as axes are needed")
    strides = _strides(x.shape)
    rest = [0 if k in axes else s for k, s in enumerate(strides)]
    numbers = _numbers(x.shape, rest)
    for a, by in zip(axes, shifts):
        by = by % x.shape[a]
        at = (_core.iota("int32", x.shape, a) + (x.shape[a] - by)) % x.shape[a]
        numbers = numbers + at * strides[a]
    return _core.gather(x, numbers)


def pad_with(x, value, config):
    """``lax.pad``: (low, high, interior) of each dim; low and high may be negative."""
    x = _value(x, "pad")
    if len(config) != x.ndim:
        raise ValueError(f"pad: {len(config)} entries for an array of rank {x.ndim}")
    shape, numbers, inside = [], None, None
    for n, (low, high, interior) in zip(x.shape, config):
        if interior < 0:
            raise ValueError("pad: interior padding must not be negative")
        shape.append(n + (n - 1) * interior + low + high)
        if shape[-1] < 1:
            raise ValueError(f"pad: {config} leaves no elements of {x.shape}")
    value = _core.convert(_as_array(value), x.dtype)
    if all(low == interior == 0 <= high for low, high, interior in config):
        for k, (_, high, _) in enumerate(config):
            if high:
                rest = (*x.shape[:k], high, *x.shape[k + 1 :])
                x = _core.concat(k, x, _core.broadcast_in_dim(value, rest, ()))
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
        at = at * _strides(x.shape)[k]
        numbers = at if numbers is None else numbers + at
    out = _core.gather(x, numbers)
    return out if inside is None else _core.where(inside, out, value)


def pad(x, pad_width, mode="constant", *, constant_values=0):
    """Around it ``constant_values``, one number; ``pad_width`` as of NumPy."""
    x = _value(x, "pad")
    if mode != "constant":
        raise NotImplementedError(f"jnp.pad: mode {show(mode)}; only 'constant' is supported")
    width = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2))
    config = [(int(a), int(b), 0) for a, b in width]
    return pad_with(x, _as_array(constant_values), config)


# ---- indexing ------------------------------------------------------------------------------------


def _check_index_array(i):
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
        raise ValueError(
            "index: a kernel cannot capture constants that are not scalars; pass the indices as an"
            " operand, or make them of jnp.arange"
        )
    return int(host)


def _expand(x, idx):
    """The index as a list with an entry per dim and None for new ones."""
    idx = list(idx) if isinstance(idx, tuple) else [idx]
    dots = [k for k, i in enumerate(idx) if i is Ellipsis]
    if len(dots) > 1:
        raise IndexError("index: an index can only have a single ellipsis ('...')")
    used = sum(i is not None and i is not Ellipsis for i in idx)
    if used > x.ndim:
        raise IndexError(f"index: too many indices: {used} for an array of rank {x.ndim}")
    at = dots[0] if dots else len(idx)
    idx[at : at + 1] = [slice(None)] * (x.ndim - used)
    return idx


def _static_bound(b):
    if isinstance(b, (Array, Ref)):
        raise IndexError(
            "Array slice indices must have static start/stop/step; use lax.dynamic_slice for a"
            " traced start"
        )
    return b


def _slice_start(s, n):
    """The start of a ``pl.ds`` in a dimension of n elements; a traced one is moved inside."""
    from . import numpy as jnp

    last = n - (s.size - 1) * s.stride - 1
    if s.size < 1 or s.stride < 1 or last < 0:
        raise IndexError(
            f"index: pl.ds of {s.size} elements, stride {s.stride}, of a dimension of {n} elements"
        )
    if s.is_dynamic_start:
        return jnp.clip(_check_index_array(s.start), 0, last)
    if not 0 <= s.start <= last:
        raise IndexError(
            f"index: {s.size} elements from {s.start}, stride {s.stride}, are out of bounds for a"
            f" dimension of {n} elements"
        )
    return s.start


def numbers_at(x, idx, drop):
    """Row-major numbers of the elements that ``x[idx]`` names, and which of their dims are those of
    arrays in the index. Traced indices out of range are limited to it, or with ``drop`` give -1; a
    ``pl.ds`` with a traced start is moved inside."""
    from . import numpy as jnp

    strides, dim = _strides(x.shape), 0
    shape, steps, base, advanced, first, split_up = [], [], 0, [], None, False
    entries = _expand(x, idx)
    has_array = any(
        isinstance(i, Array) and i.ndim or isinstance(i, (list, np.ndarray)) for i in entries
    )
    for i in entries:
        if i is None:
            shape.append(1)
            steps.append(0)
            continue
        n, stride = x.shape[dim], strides[dim]
        dim += 1
        if isinstance(i, slice):
            start, stop, step = slice(*map(_static_bound, (i.start, i.stop, i.step))).indices(n)
            count = len(range(start, stop, step))
            if not count:
                raise ValueError(f"index: {i} of a dimension of {n} elements has none")
            shape.append(count)
            steps.append(step * stride)
            base = base + start * stride
            continue
        if hasattr(i, "is_dynamic_start"):
            shape.append(i.size)
            steps.append(i.stride * stride)
            base = base + _slice_start(i, n) * stride
            continue
        i = _check_index_array(i)
        if isinstance(i, int) and not -n <= i < n:
            raise IndexError(f"index: {i} is out of bounds for a dimension of {n} elements")
        if isinstance(i, int) and not has_array:
            base = base + i % n * stride
            continue
        i = _as_array(i)
        i = _core.where(i < 0, i + n, i)
        inside = (i >= 0) & (i < n)
        if first is None:
            first = len(shape)
        split_up |= len(shape) != first
        advanced.append((jnp.clip(i, 0, n - 1) * stride, inside))
    wide = np.broadcast_shapes(*(a.shape for a, _ in advanced)) if advanced else ()
    at = 0 if split_up or first is None else first
    full = (*shape[:at], *wide, *shape[at:])
    if len(full) > 8:
        raise IndexError("index: the result has more than 8 dimensions")
    all_steps = (*steps[:at], *(0,) * len(wide), *steps[at:])
    dims = tuple(range(at, at + len(wide)))
    numbers, inside = _numbers(full, all_steps, base), None
    for offset, ok in advanced:
        spread = [jnp.broadcast_to(v, wide) for v in (offset, ok)]
        if wide != full:
            spread = [v if v.ndim == 0 else _core.broadcast_in_dim(v, full, dims) for v in spread]
        numbers = numbers + spread[0]
        inside = spread[1] if inside is None else inside & spread[1]
    if drop and inside is not None:
        numbers = _core.where(inside, numbers, -1)
    return numbers, dims


def index(x, idx):
    """``x[idx]`` with traced scalars, integer arrays or strides in the index."""
    return _core.gather(x, numbers_at(x, idx, False)[0])


class _At:
    """``x.at[idx]``: new arrays with some elements changed."""

    __slots__ = ("_x", "_idx")

    def __init__(self, x, idx=None):
        self._x, self._idx = x, idx

    def __getitem__(self, idx):
        return _At(self._x, idx)

    def _change(self, values, combine):
        from . import numpy as jnp

        values = _core.convert(_value(values, "x.at[idx]"), self._x.dtype)
        if isinstance(self._idx, Array) and self._idx.dtype == bool and self._idx.ndim:
            return self._change_masked(values, combine)
        numbers, dims = numbers_at(self._x, self._idx, True)
        values = jnp.broadcast_to(values, numbers.shape)
        if combine and math.prod(numbers.shape[d] for d in dims) > 1:
            return self._one_by_one(numbers, values, dims, combine)
        if combine:
            values = combine(_core.gather(self._x, numbers), values)
        return _core.scatter(self._x, numbers, values)

    def _change_masked(self, values, combine):
        """A mask of the first dims; what goes into its elements is the same for each."""
        from . import numpy as jnp

        x, mask = self._x, self._idx
        rest = x.shape[mask.ndim :]
        if mask.shape != x.shape[: mask.ndim]:
            raise IndexError(f"x.at[mask]: the mask has shape {mask.shape}, the array {x.shape}")
        if values.ndim > len(rest):
            raise ValueError(
                f"x.at[mask]: values of shape {values.shape}; how many elements a mask names is"
                f" known only at run time, so they must broadcast to {rest}; use jnp.where"
            )
        values = jnp.broadcast_to(jnp.broadcast_to(values, rest), x.shape)
        if rest:
            mask = _core.broadcast_in_dim(mask, x.shape, tuple(range(mask.ndim)))
        return _core.where(mask, combine(x, values) if combine else values, x)

    def _one_by_one(self, numbers, values, dims, combine):
        """For each index of the arrays, in order, as they may be equal: what one names differs."""
        from ._control import fori_loop

        n = math.prod(numbers.shape[d] for d in dims)
        rest = numbers.size // n
        numbers, values = (
            moveaxis(v, dims, tuple(range(len(dims)))).reshape((n, rest)) for v in (numbers, values)
        )
        mine = _numbers(self._x.shape, _strides(self._x.shape))

        def step(k, x):
            at, value = (index(v, k) for v in (numbers, values))
            if rest > 1:
                return _core.scatter(x, at, combine(_core.gather(x, at), value))
            return _core.where(mine == at.reshape(()), combine(x, value.reshape(())), x)

        return fori_loop(0, n, step, self._x)

    def get(self):
        """``x[idx]``."""
        return self._x[self._idx]

    def set(self, values):
        """Those elements replaced; traced indices out of range change nothing."""
        return self._change(values, None)

    def add(self, values):
        """``values`` added to those elements."""
        return self._change(values, lambda a, b: a + b)

    def subtract(self, values):
        """``values`` subtracted from those elements."""
        return self._change(values, lambda a, b: a - b)

    def multiply(self, values):
        """Those elements multiplied by ``values``."""
        return self._change(values, lambda a, b: a * b)

    def divide(self, values):
        """Those elements divided by ``values``."""
        return self._change(values, lambda a, b: _core.convert(a / b, a.dtype))

    def min(self, values):
        """The lesser of them and ``values``."""
        return self._change(values, lambda a, b: _core.binary("min", a, b))

    def max(self, values):
        """The greater of them and ``values``."""
        return self._change(values, lambda a, b: _core.binary("max", a, b))


def _starts(x, starts, sizes, what):
    from . import numpy as jnp

    sizes = _ints(sizes, f"{what}: sizes")
    starts = list(starts) if isinstance(starts, (tuple, list)) else [starts]
    if len(starts) != x.ndim or len(sizes) != x.ndim:
        raise TypeError(f"{what}: {len(starts)} starts and {len(sizes)} sizes for rank {x.ndim}")
    base = 0
    for start, size, n, stride in zip(starts, sizes, x.shape, _strides(x.shape)):
        if not 1 <= size <= n:
            raise TypeError(f"{what}: size {size} along a dimension of {n} elements")
        start = _check_index_array(start)
        if isinstance(start, int):
            start = max(0, min(start + n if start < 0 else start, n - size))
        else:
            start = jnp.clip(_core.where(start < 0, start + n, start), 0, n - size)
        base = base + start * stride
    return sizes, base


def dynamic_slice(x, start_indices, slice_sizes):
    """A slice at traced starts, which are moved inside."""
    x = _value(x, "dynamic_slice")
    sizes, base = _starts(x, start_indices, slice_sizes, "dynamic_slice")
    return _core.gather(x, _numbers(sizes, _strides(x.shape), base))


def dynamic_update_slice(x, update, start_indices):
    """``x`` with ``update`` in place of a slice at traced starts, which are moved inside."""
    x, update = _value(x, "dynamic_update_slice"), _value(update, "dynamic_update_slice")
    if update.dtype != x.dtype:
        raise TypeError(f"dynamic_update_slice: {update.dtype} into an array of {x.dtype}")
    sizes, base = _starts(x, start_indices, update.shape, "dynamic_update_slice")
    return _core.scatter(x, _numbers(sizes, _strides(x.shape), base), update)


def slice_in_dim(x, start_index, limit_index, stride=1, axis=0):
    """A static slice along one dim."""
    x = _value(x, "slice_in_dim")
    axis = axis_of(axis, x.ndim, "slice_in_dim")
    return x[(*(slice(None),) * axis, slice(start_index, limit_index, stride))]


def dynamic_slice_in_dim(x, start_index, slice_size, axis=0):
    """A slice along one dim at a traced start."""
    x = _value(x, "dynamic_slice_in_dim")
    axis = axis_of(axis, x.ndim, "dynamic_slice_in_dim")
    starts = [start_index if k == axis else 0 for k in range(x.ndim)]
    return dynamic_slice(x, starts, [slice_size if k == axis else n for k, n in enumerate(x.shape)])


def dynamic_index_in_dim(x, index, axis=0, keepdims=True):
    """The slice of one element along a dim, at a traced index."""
    out = dynamic_slice_in_dim(x, index, 1, axis)
    return out if keepdims else out.squeeze(axis)


def dynamic_update_slice_in_dim(x, update, start_index, axis):
    """``update`` in place of a slice along one dim at a traced start."""
    x = _value(x, "dynamic_update_slice_in_dim")
    axis = axis_of(axis, x.ndim, "dynamic_update_slice_in_dim")
    return dynamic_update_slice(x, update, [start_index if k == axis else 0 for k in range(x.ndim)])


def take(x, indices, axis=None, mode="fill"):
    """Elements by their indices along ``axis`` (None: of the flattened array). Out of range: NaN
    or the least number ("fill"), the nearest ("clip"), around the end ("wrap")."""
    from . import numpy as jnp

    if mode not in (None, "fill", "clip", "wrap"):
        raise ValueError(f"take: mode must be 'fill', 'clip' or 'wrap', got {show(mode)}")
    x = _value(x, "take")
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    axis = axis_of(axis, x.ndim, "take")
    i, n = _as_array(_check_index_array(indices)), x.shape[axis]
    at = i % n if mode == "wrap" else _core.where(i < 0, i + n, i) if mode != "clip" else i
    inside = (at >= 0) & (at < n)
    out = x[(*(slice(None),) * axis, jnp.clip(at, 0, n - 1))]
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


def take_along_axis(x, indices, axis=-1):
    """``x[..., indices[..., k, ...], ...]`` along one dim; the other dims are equal."""
    from . import numpy as jnp

    x = _value(x, "take_along_axis")
    i = _as_array(_check_index_array(indices))
    axis = axis_of(axis, x.ndim, "take_along_axis")
    shape = tuple(n if k != axis else i.shape[k] for k, n in enumerate(x.shape))
    if i.ndim != x.ndim or i.shape != shape:
        raise ValueError(f"take_along_axis: indices of shape {i.shape} for {x.shape}, axis {axis}")
    n, strides = x.shape[axis], _strides(x.shape)
    at = jnp.clip(_core.where(i < 0, i + n, i), 0, n - 1) * strides[axis]
    rest = _numbers(shape, [0 if k == axis else s for k, s in enumerate(strides)])
    return _core.gather(x, at + rest)


# ---- reductions ----------------------------------------------------------------------------------


def _masked(x, where, value):
    if where is None:
        return x
    from . import numpy as jnp

    where = jnp.broadcast_to(_as_array(where), x.shape) if np.ndim(where) == 0 else where
    return _core.where(where, x, _core.full((), value, x.dtype))


def prod(x, axis=None, dtype=None, keepdims=False, initial=None, where=None):
    """Product over axes. float16 and bfloat16 multiply in float32."""
    x = _value(x, "prod")
    axes = axes_of(axis, x.ndim, "prod")
    narrow = {"b": "int32", "i": "int32", "u": "uint32"}.get(x.dtype.kind)
    to = _core.as_dtype(dtype) if dtype is not None else x.dtype
    if dtype is None and narrow and x.dtype.itemsize < 4:
        to = np.dtype(narrow)
    work = np.dtype("float32") if dtype is None and to.itemsize == 2 and not narrow else to
    x = _masked(_core.convert(x, work), where, 1)
    out = _core.reduce("mul", x, axes, keepdims) if axes else x
    out = _core.convert(out, to)
    return out if initial is None else out * initial


def var(x, axis=None, dtype=None, ddof=0, keepdims=False, *, where=None, correction=None):
    """Variance over axes; integers become float32, float16 and bfloat16 are computed in it."""
    x = _value(x, "var")
    axes = axes_of(axis, x.ndim, "var")
    to = _core.as_dtype(dtype) if dtype is not None else x.dtype
    to = np.dtype("float32") if to.kind in "iub" else to
    ddof = ddof if correction is None else correction
    x = _core.convert(x, "float32")
    n = math.prod(x.shape[a] for a in axes)
    if where is not None:
        count = _core.reduce("add", _masked(_core.full(x.shape, 1.0), where, 0), axes, True)
    else:
        count = n
    mean = _core.reduce("add", _masked(x, where, 0), axes, True) / count
    off = _masked(x - mean, where, 0)
    total = _core.reduce("add", off * off, axes, keepdims)
    if where is not None:
        count = count if keepdims else count.reshape(total.shape)
    elif n <= ddof:
        return _core.full(total.shape, math.nan, to)
    return _core.convert(total / (count - ddof), to)


def std(x, axis=None, dtype=None, ddof=0, keepdims=False, *, where=None, correction=None):
    """Standard deviation over axes."""
    x = _value(x, "std")
    to = _core.as_dtype(dtype) if dtype is not None else x.dtype
    to = np.dtype("float32") if to.kind in "iub" else to
    x = _core.convert(x, "float32")
    out = var(x, axis, None, ddof, keepdims, where=where, correction=correction)
    return _core.convert(_core.unary("sqrt", out), to)


def _arg_reduce(kind, x, axis, keepdims, name):
    x = _value(x, name)
    if x.dtype == bool:
        x = _core.convert(x, "int32")
    axes = axes_of(axis, x.ndim, name)
    if axis is not None and len(axes) != 1:
        raise TypeError(f"{name}: axis must be one int or None, got {show(axis)}")
    if not axes:
        return _core.full((), 0, "int32")
    best = _core.reduce(kind, x, axes, True)
    hit = x == best
    if x.dtype.kind not in "iu":
        hit = hit | (x != x)  # the first NaN wins, as best is NaN then
    steps = _strides(x.shape) if axis is None else [int(k == axes[0]) for k in range(x.ndim)]
    at = _core.where(hit, _numbers(x.shape, steps), np.int32(2**31 - 1))
    return _core.reduce("min", at, axes, keepdims)


def argmax(x, axis=None, keepdims=False):
    """int32 index of the first greatest element, or NaN; None: its row-major number."""
    return _arg_reduce("max", x, axis, keepdims, "argmax")


def argmin(x, axis=None, keepdims=False):
    """int32 index of the first least element, or NaN; None: its row-major number."""
    return _arg_reduce("min", x, axis, keepdims, "argmin")


def count_nonzero(x, axis=None, keepdims=False):
    """How many elements are not 0, int32."""
    x = _value(x, "count_nonzero")
    hit = x if x.dtype == bool else x != 0
    return _core.reduce("sum", hit, axes_of(axis, x.ndim, "count_nonzero"), keepdims)


def fold(op, x, axes, what):
    """Over axes by an op that is associative and commutative: halves of each dim are combined."""
    axes = axes_of(axes, x.ndim, what)
    for a in axes:
        lead = (slice(None),) * a
        while (n := x.shape[a]) > 1:
            half = n // 2
            both = _core.binary(op, x[(*lead, slice(0, half))], x[(*lead, slice(half, 2 * half))])
            x = concatenate([both, x[(*lead, slice(n - 1, n))]], a) if n % 2 else both
    return x.reshape(tuple(n for k, n in enumerate(x.shape) if k not in axes))


# ---- scans and sorting ---------------------------------------------------------------------------


def scan(kind, x, axis, reverse=False, dtype=None, what="scan"):
    """Each element combined with those before it (behind it, ``reverse``) along ``axis``."""
    x = _value(x, what)
    if x.dtype == bool:
        x = _core.convert(x, "int32")
    to = x.dtype if dtype is None else _core.as_dtype(dtype)
    axis = axis_of(axis, x.ndim, what)
    half = to.itemsize < 4 and to.kind not in "iub" and kind in ("add", "mul")
    x = _core.convert(x, np.dtype("float32") if half else to)
    if x.shape[axis] > 1:
        x = flip(x, axis) if reverse else x
        x = _core.scan(kind, x, axis)
        x = flip(x, axis) if reverse else x
    return _core.convert(x, to)


def _cumulative(kind, name):
    def f(x, axis=None, dtype=None):
        x = _value(x, name)
        if axis is None:
            x, axis = x.reshape((-1,)), 0
        return scan(kind, x, axis, False, dtype, name)

    f.__name__ = f.__qualname__ = name
    f.__doc__ = f"{'Sums' if kind == 'add' else 'Products'} of the elements up to each, along axis."
    return f


cumsum, cumprod = _cumulative("add", "cumsum"), _cumulative("mul", "cumprod")


def _before(a, b, i, j, falling):
    """Does (a, i) stand before (b, j)? NaN is the greatest; i and j differ."""
    less, equal = a > b if falling else a < b, a == b
    if a.dtype.kind not in "iu":
        one, other = (b, a) if falling else (a, b)
        less = less | ((other != other) & (one == one))
        equal = equal | ((a != a) & (b != b))
    return less | (equal & (i < j))


_MOST_SORTED = 4096


def _extreme(dtype, least):
    """The number that sorts last, or the least one (which also sorts last, falling)."""
    if is_integer(dtype):
        info = ml_dtypes.iinfo(dtype)
        return info.min if least else info.max
    if not least:
        return math.nan
    low = float(np.asarray(-math.inf).astype(dtype))
    return float(ml_dtypes.finfo(dtype).min) if math.isnan(low) else low


def _sorted(x, axis, what, falling=False):
    """Sorted elements and their indices, equal ones in their order. Bitonic: in step (k, j) each
    element meets the one whose number differs in bit j. Narrow dtypes are sorted in 32 bits."""
    from ._control import fori_loop

    x = _value(x, what)
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    axis = axis_of(axis, x.ndim, what)
    to = x.dtype
    if to.itemsize == 1:
        x = _core.convert(x, "int32" if is_integer(to) else "float32")
    n = x.shape[axis]
    full = 1 << (n - 1).bit_length()
    if full > _MOST_SORTED:
        raise NotImplementedError(f"{what}: {n} elements along the axis, at most {_MOST_SORTED}")
    if full != n:
        last = _extreme(x.dtype, falling)
        config = [(0, full - n if k == axis else 0, 0) for k in range(x.ndim)]
        x = pad_with(x, _core.full((), last, x.dtype), config)
    stride = _strides(x.shape)[axis]
    numbers, at = _numbers(x.shape, _strides(x.shape)), _core.iota("int32", x.shape, axis)
    one = np.int32(1)

    def step(k, bit, values):
        x, order = values
        j = _core.binary("shl", one, bit)
        low, rising = (at & j) == 0, (at & k) == 0
        partner = _core.where(low, numbers + j * stride, numbers - j * stride)
        y, other = _core.gather(x, partner), _core.gather(order, partner)
        keep = _before(x, y, order, other, falling) == (low == rising)
        return _core.where(keep, x, y), _core.where(keep, order, other)

    def phase(p, values):
        k = _core.binary("shl", one, p)
        return fori_loop(0, p, lambda q, v: step(k, p - 1 - q, v), values)

    x, order = fori_loop(1, full.bit_length(), phase, (x, at)) if full > 1 else (x, at)
    cut = tuple(slice(0, n) if d == axis else slice(None) for d in range(x.ndim))
    return _core.convert(x[cut], to), order[cut]


def sort(x, axis=-1):
    """In rising order along ``axis``, NaN last; at most 4096 elements along it."""
    return _sorted(x, axis, "sort")[0]


def argsort(x, axis=-1):
    """int32 indices that sort along ``axis``; equal elements keep their order."""
    return _sorted(x, axis, "argsort")[1]


_FEW = 16


def _selected(x, k, axis):
    """``top_k`` in k steps: each takes the first of the greatest that stand behind the last."""
    from . import numpy as jnp
    from ._loops import scan

    to = x.dtype
    if to.itemsize < 4:
        x = _core.convert(x, "int32" if is_integer(to) else "float32")
    low = _core.full((), _extreme(x.dtype, True), x.dtype)

    def step(last, _):
        value, at = (jnp.broadcast_to(jnp.expand_dims(v, axis), x.shape) for v in last)
        number = _core.iota("int32", x.shape, axis)
        left = (at < 0) | _before(value, x, at, number, True)
        best = _core.reduce("max", _core.where(left, x, low), (axis,), True)
        same = x == best
        if not is_integer(x.dtype):
            same = same | ((x != x) & (best != best))
        first = _core.where(left & same, number, np.int32(2**31 - 1))
        found = best.squeeze(axis), _core.reduce("min", first, (axis,))
        return found, found

    rest = tuple(n for d, n in enumerate(x.shape) if d != axis)
    start = _core.full(rest, 0, x.dtype), _core.full(rest, -1, "int32")
    values, order = (moveaxis(v, 0, axis) for v in scan(step, start, length=k)[1])
    return _core.convert(values, to), order


def top_k(x, k, axis):
    """The k greatest, NaN before all, and their indices; equal elements in their order."""
    x = _value(x, "top_k")
    if not x.ndim:
        raise ValueError("top_k: a scalar has no dimension to search; at least rank 1 is needed")
    axis = axis_of(axis, x.ndim, "top_k")
    (k,) = _ints(k, "top_k: k")
    if not 1 <= k <= x.shape[axis]:
        raise ValueError(f"top_k: k must be 1..{x.shape[axis]}, got {k}")
    if k <= _FEW or x.shape[axis] > _MOST_SORTED:
        return _selected(x, k, axis)
    cut = (*(slice(None),) * axis, slice(0, k))
    values, order = _sorted(x, axis, "top_k", True)
    return values[cut], order[cut]


def median(x, axis=None, out=None, overwrite_input=False, keepdims=False):
    """The middle element over axes, of an even number the mean of two; NaN if there is one.
    Integers become float32; at most 4096 elements."""
    x = _value(x, "median")
    if out is not None:
        raise NotImplementedError("jnp.median: out= is not supported")
    axes = axes_of(axis, x.ndim, "median")
    to = np.dtype("float32") if is_integer(x.dtype) else x.dtype
    rest = [n for k, n in enumerate(x.shape) if k not in axes]
    order = (*(k for k in range(x.ndim) if k not in axes), *axes)
    n = math.prod(x.shape[k] for k in axes)
    shape = [1 if k in axes else n for k, n in enumerate(x.shape)] if keepdims else rest
    x = _sorted(transpose(x, order).reshape((*rest, n)), -1, "median")[0]
    low, high = (_core.convert(x[..., k], "float32") for k in ((n - 1) // 2, n // 2))
    middle = low if n % 2 else low * 0.5 + high * 0.5
    middle = _core.where(x[..., n - 1] != x[..., n - 1], math.nan, middle)
    return _core.convert(middle, to).reshape(tuple(shape))


# ---- members of arrays ---------------------------------------------------------------------------


def _transpose_method(self, *axes):
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
        return transpose(self, axes[0])
    return transpose(self, axes or None)


def _copy(self):
    return self


def _format(x, spec):
    if spec:
        raise TypeError(
            f"a traced value has no number to format with {spec!r} while the kernel is traced;"
            ' print its number when the kernel runs: pl.debug_print("{}", x)'
        )
    return repr(x)


def add_members():
    """The members of Array that are composed here."""
    from ._derived import diagonal, searchsorted, trace
    from ._dot import matmul

    Array.T = property(transpose, doc="Dims reversed.")
    Array.mT = property(matrix_transpose, doc="The last two dims exchanged.")
    Array.at = property(_At, doc="x.at[idx].set(y) and so on: a new array.")
    Array.transpose = _transpose_method
    Array.copy = _copy
    Array.__format__ = _format
    Array.__matmul__ = matmul
    Array.__rmatmul__ = lambda self, other: matmul(other, self)
    Array.dot = matmul
    for f in (swapaxes, prod, var, std, argmax, argmin, cumsum, cumprod, take, repeat, sort):
        setattr(Array, f.__name__, f)
    for f in (diagonal, searchsorted, trace):
        setattr(Array, f.__name__, f)
    Array.argsort = argsort
