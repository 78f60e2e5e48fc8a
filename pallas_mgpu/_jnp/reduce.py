"""Reductions, scans and statistics.

A reduction is one op of the graph; `where=` replaces what is left out by the identity of the
operation, `initial=` is combined with the result. float16 and bfloat16 accumulate in float32.
Cumulative functions are one scan op.
"""

import builtins
import math

import ml_dtypes
import numpy as np

from .. import _core
from .._names import show
from .._types import is_integer
from .base import (
    axes_of,
    axis_of,
    either,
    host,
    host_floats,
    is_traced,
    numbers,
    strides,
    value,
)
from .elementwise import isclose, isnan, named, sqrt, square
from .index import slice_in_dim
from .shape import broadcast_to, concatenate, flip, ravel

__all__ = [
    "all",
    "allclose",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "array_equal",
    "average",
    "bincount",
    "count_nonzero",
    "cumprod",
    "cumsum",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "ediff1d",
    "isin",
    "max",
    "mean",
    "min",
    "nanargmax",
    "nanargmin",
    "nancumsum",
    "nanmax",
    "nanmean",
    "nanmin",
    "nanprod",
    "nanstd",
    "nansum",
    "nanvar",
    "prod",
    "ptp",
    "std",
    "sum",
    "var",
]

# ---- sum, max, min, any, all ---------------------------------------------------------------------


def _identity(kind, dtype):
    if kind == "sum":
        return 0
    if is_integer(dtype):
        info = ml_dtypes.iinfo(dtype)
        return info.min if kind == "max" else info.max
    return -math.inf if kind == "max" else math.inf


def _reduced(kind, x, axis, dtype, keepdims, initial, where):
    """A traced array reduced by "sum", "max" or "min"."""
    x = value(x, f"jnp.{kind}")
    if dtype is not None:
        x = _core.convert(x, _core.as_dtype(dtype))
    if where is not None:
        x = _core.where(where, x, _core.full(x.shape, _identity(kind, x.dtype), x.dtype))
    exact = "add" if kind == "sum" and dtype is not None else kind
    out = _core.reduce(exact, x, axis, keepdims)
    if initial is None:
        return out
    return _core.binary("add" if kind == "sum" else kind, out, initial)


def _on_host(f, x, axis, keepdims, **options):
    given = {k: v for k, v in options.items() if v is not None}
    return host(f(host(x), axis=axis, keepdims=keepdims, **given))


def sum(x, axis=None, dtype=None, keepdims=False, initial=None, where=None):  # noqa: A001
    """Sum over axes. float16 and bfloat16 are accumulated in float32."""
    if is_traced(x):
        return _reduced("sum", x, axis, dtype, keepdims, initial, where)
    dtype = None if dtype is None else np.dtype(dtype)
    return _on_host(np.sum, x, axis, keepdims, dtype=dtype, initial=initial, where=where)


def _extreme(kind, of_host, doc):
    def f(x, axis=None, out=None, keepdims=False, initial=None, where=None):
        if not is_traced(x):
            return _on_host(of_host, x, axis, keepdims, out=out, initial=initial, where=where)
        if out is not None:
            raise NotImplementedError(f"jnp.{kind}: out= is not supported in kernels")
        return _reduced(kind, x, axis, None, keepdims, initial, where)

    return named(f, kind, doc)


max = amax = _extreme("max", np.max, "Greatest over axes; NaN propagates.")
min = amin = _extreme("min", np.min, "Least over axes; NaN propagates.")


def _logical(kind, of_host, doc):
    def f(x, axis=None, out=None, keepdims=False, *, where=None):
        if not is_traced(x):
            return _on_host(of_host, x, axis, keepdims, out=out, where=where)
        x = value(x, f"jnp.{kind}")
        if out is not None:
            raise ValueError(f"jnp.{kind}: out= is not supported in kernels")
        if where is not None:  # what is left out decides nothing
            x = _core.where(where, _core.convert(x, "bool"), kind == "all")
        return _core.reduce(kind, x, axis, keepdims)

    return named(f, kind, doc)


any = _logical("any", np.any, "Is an element true (not 0)? A scalar decides branches.")
all = _logical("all", np.all, "Are all elements true? A scalar decides branches.")


# ---- products, folds, counts ---------------------------------------------------------------------


def _masked(x, where, fill):
    if where is None:
        return x
    where = broadcast_to(_core.as_array(where), x.shape) if np.ndim(where) == 0 else where
    return _core.where(where, x, _core.full((), fill, x.dtype))


@either
def prod(x, axis=None, dtype=None, keepdims=False, initial=None, where=None):
    """Product over axes. float16 and bfloat16 are multiplied in float32."""
    x = value(x, "prod")
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


@either
def count_nonzero(x, axis=None, keepdims=False):
    """The number of nonzero elements, as int32."""
    x = value(x, "count_nonzero")
    hit = x if x.dtype == bool else x != 0
    return _core.reduce("sum", hit, axes_of(axis, x.ndim, "count_nonzero"), keepdims)


@either
def bincount(x, weights=None, minlength=0, *, length=None):
    """How often each number from 0 to ``length`` - 1 occurs in the vector, or the sum of its
    weights. Each element is compared with every number; for many, atomics on a ref cost less."""
    if length is None:
        raise ValueError("jnp.bincount: length= must be given in kernels; shapes are static")
    n = builtins.max(length, minlength)
    x = _core.as_array(x)
    shape = (x.shape[0], n)
    hit = _core.broadcast_in_dim(x, shape, (0,)) == _core.iota(x.dtype, shape, 1)
    if weights is None:
        return sum(hit, axis=0)
    wide = _core.broadcast_in_dim(_core.as_array(weights), shape, (0,))
    return sum(_core.where(hit, wide, 0), axis=0)


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


# ---- where the extremes are ----------------------------------------------------------------------


def _arg_reduce(kind, x, axis, keepdims, name):
    x = value(x, name)
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
    steps = strides(x.shape) if axis is None else [int(k == axes[0]) for k in range(x.ndim)]
    at = _core.where(hit, numbers(x.shape, steps), np.int32(2**31 - 1))
    return _core.reduce("min", at, axes, keepdims)


@either
def argmax(x, axis=None, keepdims=False):
    """int32 index of the first NaN or else of the first maximum. ``axis=None``: its row-major
    index."""
    return _arg_reduce("max", x, axis, keepdims, "argmax")


@either
def argmin(x, axis=None, keepdims=False):
    """int32 index of the first NaN or else of the first minimum. ``axis=None``: its row-major
    index."""
    return _arg_reduce("min", x, axis, keepdims, "argmin")


@either
def ptp(a, axis=None, keepdims=False):
    """The difference of maximum and minimum."""
    return max(a, axis=axis, keepdims=keepdims) - min(a, axis=axis, keepdims=keepdims)


# ---- moments -------------------------------------------------------------------------------------


def _float_dtype(x, dtype):
    """Of a mean: as asked for, else the array's; integers become float32."""
    if dtype is not None:
        return _core.as_dtype(dtype)
    return np.dtype("float32") if is_integer(x.dtype) else x.dtype


def mean(x, axis=None, dtype=None, keepdims=False):
    """Mean over axes; integers become float32."""
    if not is_traced(x):
        return host(np.mean(host_floats(x), axis=axis, keepdims=keepdims))
    x = value(x, "jnp.mean")
    axes = axes_of(axis, x.ndim, "mean")
    n = math.prod(x.shape[a] for a in axes)
    total = _core.reduce("add", _core.convert(x, "float32"), axes, keepdims)
    return _core.convert(total / n, _float_dtype(x, dtype))


@either
def var(x, axis=None, dtype=None, ddof=0, keepdims=False, *, where=None, correction=None):
    """Variance over axes; integers become float32, float16 and bfloat16 are computed in it."""
    x = value(x, "var")
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
    center = _core.reduce("add", _masked(x, where, 0), axes, True) / count
    off = _masked(x - center, where, 0)
    total = _core.reduce("add", off * off, axes, keepdims)
    if where is not None:
        count = count if keepdims else count.reshape(total.shape)
    elif n <= ddof:
        return _core.full(total.shape, math.nan, to)
    return _core.convert(total / (count - ddof), to)


@either
def std(x, axis=None, dtype=None, ddof=0, keepdims=False, *, where=None, correction=None):
    """Standard deviation over axes."""
    x = value(x, "std")
    to = _core.as_dtype(dtype) if dtype is not None else x.dtype
    to = np.dtype("float32") if to.kind in "iub" else to
    x = _core.convert(x, "float32")
    out = var(x, axis, None, ddof, keepdims, where=where, correction=correction)
    return _core.convert(_core.unary("sqrt", out), to)


@either
def average(a, axis=None, weights=None, returned=False, keepdims=False):
    """mean, or the mean with weights of the shape of ``a``, or of the axis."""
    if weights is None:
        out = mean(a, axis=axis, keepdims=keepdims)
        n = a.size // builtins.max(out.size, 1)
        return (out, _core.full(out.shape, n, out.dtype)) if returned else out
    weights = _core.as_array(weights)
    if weights.shape != a.shape:
        if weights.ndim != 1 or not isinstance(axis, int):
            raise TypeError(
                "jnp.average: weights of another shape than the array are a vector along one axis"
            )
        weights = _core.broadcast_in_dim(weights, a.shape, (axis % a.ndim,))
    total = sum(weights, axis=axis, keepdims=keepdims)
    out = sum(a * weights, axis=axis, keepdims=keepdims) / total
    return (out, total) if returned else out


# ---- without NaN ---------------------------------------------------------------------------------


def _without_nan(f, fill):
    def g(a, axis=None, dtype=None, keepdims=False):
        a = _core.as_array(a)
        kept = a if is_integer(a.dtype) else _core.where(isnan(a), fill, a)
        return f(kept, axis=axis, dtype=dtype, keepdims=keepdims)

    return either(named(g, f"nan{f.__name__}", f"{f.__name__} of what is not NaN."))


nansum, nanprod = _without_nan(sum, 0), _without_nan(prod, 1)


def _extreme_without_nan(f, fill):
    def g(a, axis=None, keepdims=False):
        a = _core.as_array(a)
        if is_integer(a.dtype):
            return f(a, axis=axis, keepdims=keepdims)
        bad = isnan(a)
        out = f(_core.where(bad, fill, a), axis=axis, keepdims=keepdims)
        if f.__name__.startswith("arg"):
            return out
        return _core.where(all(bad, axis=axis, keepdims=keepdims), math.nan, out)

    return either(named(g, f"nan{f.__name__}", f"{f.__name__} of what is not NaN."))


nanmax, nanmin = _extreme_without_nan(max, -math.inf), _extreme_without_nan(min, math.inf)
nanargmax = _extreme_without_nan(argmax, -math.inf)
nanargmin = _extreme_without_nan(argmin, math.inf)


@either
def nanmean(a, axis=None, dtype=None, keepdims=False):
    """Mean of the elements that are not NaN."""
    n = sum(~isnan(a), axis=axis, keepdims=keepdims)
    total = nansum(a, axis, dtype, keepdims)
    return _core.convert(total / n, total.dtype)


@either
def nanvar(a, axis=None, dtype=None, ddof=0, keepdims=False):
    """Variance of the elements that are not NaN."""
    bad = isnan(a)
    centred = square(a - nanmean(a, axis, dtype, True))
    n = sum(~bad, axis=axis, keepdims=keepdims)
    total = sum(_core.where(bad, 0, centred), axis=axis, keepdims=keepdims)
    return _core.where(n > ddof, total / (n - ddof), math.nan).astype(total.dtype)


@either
def nanstd(a, axis=None, dtype=None, ddof=0, keepdims=False):
    """Standard deviation of the elements that are not NaN."""
    return sqrt(nanvar(a, axis, dtype, ddof, keepdims))


# ---- comparisons of whole arrays -----------------------------------------------------------------


@either
def allclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Are all elements close (see isclose)?"""
    return all(isclose(a, b, rtol, atol, equal_nan))


@either
def array_equal(a1, a2, equal_nan=False):
    """Equal shapes and elements?"""
    a, b = (_core.as_array(x) for x in (a1, a2))
    if a.shape != b.shape:
        return _core.as_array(False)
    same = a == b
    return all(same | ((a != a) & (b != b)) if equal_nan else same)


@either
def isin(element, test_elements, invert=False):
    """Is each element one of the test elements? Each is compared with all of them."""
    x, of = _core.as_array(element), ravel(_core.as_array(test_elements))
    wide = (*x.shape, of.shape[0])
    if x.ndim:
        x = _core.broadcast_in_dim(x, wide, tuple(range(x.ndim)))
    found = any(x == _core.broadcast_in_dim(of, wide, (len(wide) - 1,)), axis=-1)
    return ~found if invert else found


# ---- cumulative functions and differences --------------------------------------------------------


def scan(kind, x, axis, reverse=False, dtype=None, what="scan"):
    """Each element combined with those before it (``reverse``: after it) along ``axis``."""
    x = value(x, what)
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


def _cumulative(kind, name, doc):
    def f(x, axis=None, dtype=None):
        x = value(x, name)
        if axis is None:
            x, axis = x.reshape((-1,)), 0
        return scan(kind, x, axis, False, dtype, name)

    return either(named(f, name, doc))


cumsum = _cumulative("add", "cumsum", "Sums of the elements up to each, along axis.")
cumprod = _cumulative("mul", "cumprod", "Products of the elements up to each, along axis.")


def _cumulative_from(f, first, x, axis, dtype, include_initial):
    if axis is None:
        if x.ndim != 1:
            raise ValueError("cumulative_sum: axis must be given for arrays that are no vectors")
        axis = 0
    out = f(x, axis, dtype)
    if not include_initial:
        return out
    shape = tuple(1 if k == axis % x.ndim else n for k, n in enumerate(x.shape))
    return concatenate([_core.full(shape, first, out.dtype), out], axis)


@either
def cumulative_sum(x, axis=None, dtype=None, include_initial=False):
    """cumsum; ``include_initial`` prepends a zero."""
    return _cumulative_from(cumsum, 0, x, axis, dtype, include_initial)


@either
def cumulative_prod(x, axis=None, dtype=None, include_initial=False):
    """cumprod; ``include_initial`` prepends a one."""
    return _cumulative_from(cumprod, 1, x, axis, dtype, include_initial)


@either
def nancumsum(a, axis=None, dtype=None):
    """cumsum, treating NaN as zero."""
    a = _core.as_array(a)
    return cumsum(_core.where(isnan(a), 0, a), axis, dtype)


@either
def diff(a, n=1, axis=-1):
    """Differences of adjacent elements, taken ``n`` times."""
    for _ in range(n):
        m = a.shape[axis]
        later = slice_in_dim(a, 1, m, 1, axis)
        before = slice_in_dim(a, 0, m - 1, 1, axis)
        a = later != before if a.dtype == bool else later - before
    return a


@either
def ediff1d(ary):
    """Differences of adjacent elements of the flattened array."""
    return diff(ary.reshape((-1,)))
