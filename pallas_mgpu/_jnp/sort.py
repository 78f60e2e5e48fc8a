"""Sorting, order statistics and searches.

`sort` and its relatives are a bitonic network, in which every element meets a partner by a gather;
`top_k` of few elements takes the greatest one at a time. Searches halve a rising vector.
"""

import math

import ml_dtypes
import numpy as np

from .. import _core
from .._control import fori_loop
from .._loops import scan
from .._names import show
from .._trace import Array
from .._types import ints, is_integer
from .base import axes_of, axis_of, either, numbers, strides, value
from .elementwise import clip, isnan
from .index import take
from .reduce import any as any_of
from .shape import broadcast_to, expand_dims, moveaxis, pad_with, stack, transpose

__all__ = [
    "argsort",
    "digitize",
    "interp",
    "median",
    "percentile",
    "quantile",
    "searchsorted",
    "sort",
]

_MOST_SORTED = 4096  # elements along the axis
_FEW = 16  # of top_k, found one by one

# ---- sorting -------------------------------------------------------------------------------------


def _before(a, b, i, j, falling):
    """Does (a, i) stand before (b, j)? NaN is the greatest; i and j differ."""
    less, equal = a > b if falling else a < b, a == b
    if a.dtype.kind not in "iu":
        one, other = (b, a) if falling else (a, b)
        less = less | ((other != other) & (one == one))
        equal = equal | ((a != a) & (b != b))
    return less | (equal & (i < j))


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
    x = value(x, what)
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
    stride = strides(x.shape)[axis]
    number, at = numbers(x.shape, strides(x.shape)), _core.iota("int32", x.shape, axis)
    one = np.int32(1)

    def step(k, bit, values):
        x, order = values
        j = _core.binary("shl", one, bit)
        low, rising = (at & j) == 0, (at & k) == 0
        partner = _core.where(low, number + j * stride, number - j * stride)
        y, other = _core.gather(x, partner), _core.gather(order, partner)
        keep = _before(x, y, order, other, falling) == (low == rising)
        return _core.where(keep, x, y), _core.where(keep, order, other)

    def phase(p, values):
        k = _core.binary("shl", one, p)
        return fori_loop(0, p, lambda q, v: step(k, p - 1 - q, v), values)

    x, order = fori_loop(1, full.bit_length(), phase, (x, at)) if full > 1 else (x, at)
    cut = tuple(slice(0, n) if d == axis else slice(None) for d in range(x.ndim))
    return _core.convert(x[cut], to), order[cut]


@either
def sort(x, axis=-1):
    """Sort in ascending order along ``axis``, NaN last; at most 4096 elements along it."""
    return _sorted(x, axis, "sort")[0]


@either
def argsort(x, axis=-1):
    """int32 indices that sort along ``axis``; equal elements keep their order."""
    return _sorted(x, axis, "argsort")[1]


# ---- the greatest elements -----------------------------------------------------------------------


def _selected(x, k, axis):
    """``top_k`` in k steps: each takes the first of the greatest that stand after the last one."""
    to = x.dtype
    if to.itemsize < 4:
        x = _core.convert(x, "int32" if is_integer(to) else "float32")
    low = _core.full((), _extreme(x.dtype, True), x.dtype)

    def step(last, _):
        best_before, at = (broadcast_to(expand_dims(v, axis), x.shape) for v in last)
        number = _core.iota("int32", x.shape, axis)
        left = (at < 0) | _before(best_before, x, at, number, True)
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
    """The k largest elements, NaN first, and their indices; equal elements keep their order."""
    x = value(x, "top_k")
    if not x.ndim:
        raise ValueError("top_k: a scalar has no dimension to search; at least rank 1 is needed")
    axis = axis_of(axis, x.ndim, "top_k")
    (k,) = ints(k, "top_k: k")
    if not 1 <= k <= x.shape[axis]:
        raise ValueError(f"top_k: k must be 1..{x.shape[axis]}, got {k}")
    if k <= _FEW or x.shape[axis] > _MOST_SORTED:
        return _selected(x, k, axis)
    cut = (*(slice(None),) * axis, slice(0, k))
    values, order = _sorted(x, axis, "top_k", True)
    return values[cut], order[cut]


# ---- order statistics ----------------------------------------------------------------------------


@either
def median(x, axis=None, out=None, overwrite_input=False, keepdims=False):
    """The middle element over axes, or the mean of two of an even number; NaN if there is one.
    Integers become float32; at most 4096 elements."""
    x = value(x, "median")
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


@either
def quantile(a, q, axis=None, method="linear", keepdims=False):
    """The element at the fraction ``q`` of the way from the least to the greatest; ``q`` is a
    number or a sequence of numbers, ``method`` linear, lower, higher, nearest or midpoint. NaN if
    any element is."""
    if method not in ("linear", "lower", "higher", "nearest", "midpoint"):
        raise NotImplementedError(f"jnp.quantile: method {show(method)} in kernels")
    if isinstance(q, Array):
        raise NotImplementedError("jnp.quantile: q must be known at trace time in kernels")
    if isinstance(q, (tuple, list, np.ndarray)):
        return stack([quantile(a, x, axis, method, keepdims) for x in q])
    if not 0 <= q <= 1:
        raise ValueError(f"jnp.quantile: q must be from 0 to 1, got {q}")
    a = a.astype("float32") if is_integer(a.dtype) else a
    rank, kept = a.ndim, a.shape
    if axis is None:
        a, along = a.reshape((-1,)), 0
    else:
        along = axis % rank
    n = a.shape[along]
    x, bad = sort(a, along), any_of(isnan(a), axis=along)
    place = float(q) * (n - 1)
    low, part = math.floor(place), place - math.floor(place)
    if method != "linear":
        fixed = {"lower": 0, "higher": math.ceil(part), "midpoint": 0.5 * (part > 0)}
        fixed["nearest"] = round(place) - low
        part = fixed[method]
    one, other = (take(x, min(k, n - 1), axis=along) for k in (low, low + 1))
    out = one if part == 0 else one * (1 - part) + other * part
    out = _core.where(bad, math.nan, out).astype(a.dtype)
    if not keepdims:
        return out
    return out.reshape((1,) * rank if axis is None else (*kept[:along], 1, *kept[along + 1 :]))


@either
def percentile(a, q, axis=None, method="linear", keepdims=False):
    """quantile of q / 100."""
    several = isinstance(q, (tuple, list, np.ndarray))
    return quantile(a, [x / 100 for x in q] if several else q / 100, axis, method, keepdims)


# ---- searches ------------------------------------------------------------------------------------


@either
def searchsorted(a, v, side="left"):
    """How many elements of the rising vector ``a`` are less than each of ``v`` (``side="right"``:
    not greater), by halving."""
    if a.ndim != 1 or side not in ("left", "right"):
        raise ValueError(f"jnp.searchsorted: a vector and left or right, got {a.shape}, {side!r}")
    v, n = _core.as_array(v), a.shape[0]
    low = _core.full(v.shape, 0, "int32") if v.ndim else _core.convert(_core.as_array(0), "int32")

    def step(_, s):
        low, high = s
        middle = (low + high) // 2
        x = _core.gather(a, middle)
        before = (x < v if side == "left" else x <= v) | ((v != v) & (x == x))
        before = before & (low < high)
        return _core.where(before, middle + 1, low), _core.where(before, high, middle)

    return fori_loop(0, n.bit_length(), step, (low, low + n))[0]


@either
def digitize(x, bins, right=False):
    """The index of the bin, of ascending ones, that contains each element."""
    if isinstance(bins, (tuple, list, np.ndarray)):
        raise ValueError("jnp.digitize: pass the bins as an operand of the kernel")
    return searchsorted(bins, x, "left" if right else "right")


@either
def interp(x, xp, fp, left=None, right=None):
    """Linear between the points (xp, fp), xp rising; outside them ``left`` and ``right``, which are
    the first and the last of fp if not given."""
    x = _core.as_array(x)
    n = xp.shape[0]
    k = clip(searchsorted(xp, x, "right"), 1, max(n - 1, 1))
    x0, y0 = _core.gather(xp, k - 1), _core.gather(fp, k - 1)
    x1, y1 = _core.gather(xp, k), _core.gather(fp, k)
    width = _core.where(x1 == x0, 1, x1 - x0)
    out = y0 + (x - x0) * ((y1 - y0) / width)
    out = _core.where(x < xp[0], fp[0] if left is None else left, out)
    return _core.where(x > xp[n - 1], fp[n - 1] if right is None else right, out)
