"""Functions of `jnp` that are plain compositions of others, with NumPy's meaning and arguments.

Each is what its docstring says and no faster; the costs are those of what it is made of. On host
arrays NumPy's functions of the same names run, see `numpy._moved`."""

import itertools
import math

import numpy as np

from . import _core, _shapes
from . import numpy as jnp
from ._names import show
from ._trace import Array, tracing
from ._types import ints as _ints
from ._types import is_integer

# ---- joining, splitting, turning -----------------------------------------------------------------


def _each(f, xs):
    out = tuple(f(_core.as_array(x)) for x in xs)
    return out[0] if len(out) == 1 else out


def atleast_1d(*arrays):
    """Scalars become arrays of one element."""
    return _each(lambda x: x if x.ndim else x.reshape((1,)), arrays)


def atleast_2d(*arrays):
    """New dims in front."""
    return _each(lambda x: x if x.ndim > 1 else x.reshape((1, x.size)), arrays)


def atleast_3d(*arrays):
    """(n,) becomes (1, n, 1), (m, n) becomes (m, n, 1)."""

    def f(x):
        if x.ndim > 2:
            return x
        return x.reshape((1, x.size, 1) if x.ndim < 2 else (*x.shape, 1))

    return _each(f, arrays)


def column_stack(tup):
    """Vectors as the columns of a matrix."""
    parts = [_core.as_array(x) for x in tup]
    return _shapes.concatenate([x if x.ndim > 1 else x.reshape((-1, 1)) for x in parts], 1)


def dstack(tup):
    """Along a third dim."""
    return _shapes.concatenate([atleast_3d(x) for x in tup], 2)


def concat(arrays, axis=0):
    """concatenate."""
    return _shapes.concatenate(arrays, axis)


def append(arr, values, axis=None):
    """``values`` behind ``arr``; without ``axis`` both flat."""
    arr, values = _core.as_array(arr), _core.as_array(values)
    if axis is None:
        arr, values, axis = arr.reshape((-1,)), values.reshape((-1,)), 0
    return _shapes.concatenate([arr, values], axis)


def unstack(x, axis=0):
    """The parts of ``x`` along a dim, without it."""
    x = _shapes.moveaxis(x, axis, 0)
    return tuple(x[k] for k in range(x.shape[0]))


def hsplit(ary, indices_or_sections):
    """split along the second dim, of vectors the first."""
    return _shapes.split(ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


def vsplit(ary, indices_or_sections):
    """split along the first dim."""
    return _shapes.split(ary, indices_or_sections, 0)


def dsplit(ary, indices_or_sections):
    """split along the third dim."""
    return _shapes.split(ary, indices_or_sections, 2)


def fliplr(m):
    """Columns in reverse order."""
    return _shapes.flip(m, 1)


def flipud(m):
    """Rows in reverse order."""
    return _shapes.flip(m, 0)


def rot90(m, k=1, axes=(0, 1)):
    """Turned ``k`` times by 90 degrees, from the first axis to the second."""
    a, b = axes
    k %= 4
    if k == 2:
        return _shapes.flip(m, (a, b))
    if k == 1:
        return _shapes.swapaxes(_shapes.flip(m, b), a, b)
    return _shapes.flip(_shapes.swapaxes(m, a, b), b) if k else m


def rollaxis(a, axis, start=0):
    """The axis moved in front of ``start``."""
    axis %= a.ndim
    start = start if start >= 0 else start + a.ndim
    return _shapes.moveaxis(a, axis, start - 1 if start > axis else start)


# ---- numbers -------------------------------------------------------------------------------------


def identity(n, dtype=None):
    """Ones on the diagonal."""
    return jnp.eye(n, dtype=dtype)


def indices(dimensions, dtype="int32", sparse=False):
    """The index along each dim, stacked; with ``sparse`` a tuple that broadcasts."""
    shape = _ints(dimensions, "jnp.indices: dimensions")
    if not tracing():
        return np.indices(shape, _core.as_dtype(dtype), sparse)
    if sparse:
        lone = [tuple(n if k == d else 1 for k in range(len(shape))) for d, n in enumerate(shape)]
        return tuple(_core.iota(dtype, s, d) for d, s in enumerate(lone))
    return _shapes.stack([_core.iota(dtype, shape, d) for d in range(len(shape))])


def meshgrid(*xi, copy=True, sparse=False, indexing="xy"):
    """Each vector along a dim of its own; with ``indexing="xy"`` the first two trade places."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"jnp.meshgrid: indexing must be 'xy' or 'ij', got {show(indexing)}")
    xi = [_core.as_array(x).reshape((-1,)) for x in xi]
    dims = list(range(len(xi)))
    if indexing == "xy" and len(xi) > 1:
        dims[:2] = 1, 0
    full = [0] * len(xi)
    for x, d in zip(xi, dims):
        full[d] = x.shape[0]
    out = []
    for x, d in zip(xi, dims):
        shape = [full[k] if k == d or not sparse else 1 for k in range(len(xi))]
        out.append(_core.broadcast_in_dim(x, tuple(shape), (d,)))
    return out


def linspace(start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0):
    """``num`` numbers from ``start`` to ``stop``, scalars; the last one is ``stop`` exactly."""
    scalars = all(np.ndim(x) == 0 for x in (start, stop))
    traced = any(isinstance(x, Array) for x in (start, stop))
    if not tracing() or not scalars:
        if traced:
            raise NotImplementedError("jnp.linspace: start and stop must be scalars in kernels")
        out = np.linspace(start, stop, num, endpoint, retstep, _host_dtype(dtype), axis)
        return tuple(jnp._host(x) for x in out) if retstep else jnp._host(out)
    (num,) = _ints(num, "jnp.linspace: num")
    gaps = max(num - 1 if endpoint else num, 1)
    to = _core.as_dtype("float32" if dtype is None else dtype)
    a, b = (_core.convert(_core.as_array(x), "float32") for x in (start, stop))
    t = _core.iota("float32", (num,), 0) / gaps
    out = a * (1 - t) + b * t
    if endpoint and num > 1:
        out = _core.where(_core.iota("int32", (num,), 0) == gaps, b, out)
    if is_integer(to):
        out = jnp.floor(out)
    out = _core.convert(out, to)
    return (out, (b - a) / gaps) if retstep else out


def _host_dtype(dtype):
    return None if dtype is None else _core.as_dtype(dtype)


def logspace(start, stop, num=50, endpoint=True, base=10.0, dtype=None, axis=0):
    """``base`` to the numbers of linspace."""
    if not tracing():
        out = np.logspace(start, stop, num, endpoint, base, _host_dtype(dtype), axis)
        return jnp._host(out)
    out = jnp.power(base, linspace(start, stop, num, endpoint))
    return out if dtype is None else _core.convert(out, dtype)


def unravel_index(indices, shape):
    """Row-major numbers as a tuple of indices; those outside are limited to the last one."""
    shape = _ints(shape, "jnp.unravel_index: shape")
    at = jnp.clip(indices, -math.prod(shape), math.prod(shape) - 1)
    at = _core.where(at < 0, at + math.prod(shape), at)
    out = []
    for n in reversed(shape):
        out.append(at % n)
        at = at // n
    return tuple(reversed(out))


def ravel_multi_index(multi_index, dims, mode="clip", order="C"):
    """Row-major numbers of indices; those outside are limited or, with "wrap", wrap."""
    if mode not in ("clip", "wrap") or order != "C":
        raise NotImplementedError(
            "jnp.ravel_multi_index: mode must be 'clip' or 'wrap', order 'C' in kernels"
        )
    total = 0
    for i, n in zip(multi_index, dims, strict=True):
        total = total * n + (jnp.clip(i, 0, n - 1) if mode == "clip" else i % n)
    return total


def gcd(x1, x2):
    """Greatest common divisor of integers."""
    from ._control import while_loop

    dtype = _core.promote_types([x1, x2])[0]
    if not is_integer(dtype):
        raise TypeError(f"jnp.gcd: integers are needed, got {dtype}")
    xs = (_core.convert(_core.as_array(x), dtype) for x in (x1, x2))
    a, b = jnp.broadcast_arrays(*(jnp.abs(x) for x in xs))

    def step(s):
        a, b = s
        return _core.where(b == 0, a, b), _core.where(b == 0, b, a % _core.where(b == 0, 1, b))

    return while_loop(lambda s: jnp.any(s[1] != 0), step, (a, b))[0]


def lcm(x1, x2):
    """Least common multiple of integers."""
    d = gcd(x1, x2)
    return _core.where(d == 0, 0, jnp.abs(x1) // _core.where(d == 0, 1, d) * jnp.abs(x2))


# ---- diagonals, differences ----------------------------------------------------------------------


def diagonal(a, offset=0, axis1=0, axis2=1):
    """Elements whose indices along the two axes differ by ``offset``, as the last dim."""
    if a.ndim < 2:
        raise ValueError(f"jnp.diagonal: two dims are needed, got shape {a.shape}")
    a = _shapes.moveaxis(a, (axis1, axis2), (-2, -1))
    rows, columns = a.shape[-2:]
    first = max(-offset, 0), max(offset, 0)
    n = min(rows - first[0], columns - first[1])
    if n < 1:
        raise ValueError(f"jnp.diagonal: offset {offset} leaves nothing of {rows} x {columns}")
    k = _core.iota("int32", (n,), 0)
    return _shapes.index(a, (..., k + first[0], k + first[1]))


def trace(a, offset=0, axis1=0, axis2=1, dtype=None):
    """Sum of the diagonal."""
    return jnp.sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)


def diag(v, k=0):
    """A matrix with the vector as its diagonal, or the diagonal of a matrix."""
    if v.ndim != 1:
        return diagonal(v, k)
    n = v.shape[0] + abs(k)
    i, j = (_core.iota("int32", (n, n), d) for d in range(2))
    at = i if k >= 0 else j
    spread = _core.gather(v, jnp.minimum(at, v.shape[0] - 1))
    return _core.where(j - i == k, spread, _core.convert(_core.as_array(0), v.dtype))


def diff(a, n=1, axis=-1):
    """Neighbours' differences, ``n`` times."""
    for _ in range(n):
        m = a.shape[axis]
        later = _shapes.slice_in_dim(a, 1, m, 1, axis)
        before = _shapes.slice_in_dim(a, 0, m - 1, 1, axis)
        a = later != before if a.dtype == bool else later - before
    return a


def ediff1d(ary):
    """Neighbours' differences of the flat array."""
    return diff(ary.reshape((-1,)))


def ptp(a, axis=None, keepdims=False):
    """The range from the least to the greatest."""
    return jnp.max(a, axis=axis, keepdims=keepdims) - jnp.min(a, axis=axis, keepdims=keepdims)


def cumulative_sum(x, axis=None, dtype=None, include_initial=False):
    """cumsum; ``include_initial`` puts a zero in front."""
    return _cumulative(_shapes.cumsum, 0, x, axis, dtype, include_initial)


def cumulative_prod(x, axis=None, dtype=None, include_initial=False):
    """cumprod; ``include_initial`` puts a one in front."""
    return _cumulative(_shapes.cumprod, 1, x, axis, dtype, include_initial)


def _cumulative(f, first, x, axis, dtype, include_initial):
    if axis is None:
        if x.ndim != 1:
            raise ValueError("cumulative_sum: axis must be given for arrays that are no vectors")
        axis = 0
    out = f(x, axis, dtype)
    if not include_initial:
        return out
    shape = tuple(1 if k == axis % x.ndim else n for k, n in enumerate(x.shape))
    return _shapes.concatenate([_core.full(shape, first, out.dtype), out], axis)


# ---- products ------------------------------------------------------------------------------------


def inner(a, b):
    """Over the last dim of both."""
    from ._dot import tensordot

    if not a.ndim or not b.ndim:
        return a * b
    return tensordot(a, b, ((a.ndim - 1,), (b.ndim - 1,)))


def vecdot(x1, x2, axis=-1):
    """Sum of products along one dim; the others broadcast."""
    return jnp.sum(x1 * x2, axis=axis)


def matvec(x1, x2):
    """(..., m, n) and (..., n): sums over n."""
    return jnp.sum(x1 * jnp.expand_dims(x2, -2), axis=-1)


def vecmat(x1, x2):
    """(..., m) and (..., m, n): sums over m."""
    return jnp.sum(jnp.expand_dims(x1, -1) * x2, axis=-2)


def kron(a, b):
    """Every element of ``a`` times all of ``b``."""
    n = max(a.ndim, b.ndim)
    shapes = [(1,) * (n - x.ndim) + x.shape for x in (a, b)]
    wide = tuple(itertools.chain(*zip(*shapes)))
    left = a.reshape(tuple(itertools.chain(*((m, 1) for m in shapes[0]))))
    right = b.reshape(tuple(itertools.chain(*((1, m) for m in shapes[1]))))
    out = jnp.broadcast_to(left, wide) * jnp.broadcast_to(right, wide)
    return out.reshape(tuple(p * q for p, q in zip(*shapes)))


def cross(a, b, axis=-1):
    """The vector product along a dim of 3."""
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ValueError(f"jnp.cross: shapes {a.shape} and {b.shape}; the dim must have 3 elements")
    a, b = (unstack(x, axis) for x in (a, b))
    turned = [(1, 2), (2, 0), (0, 1)]
    return _shapes.stack([a[i] * b[j] - a[j] * b[i] for i, j in turned], axis)


def polyval(p, x):
    """p[0] * x**(n - 1) + ... + p[n - 1]."""
    total = 0 * x
    for k in range(len(p) if not hasattr(p, "shape") else p.shape[0]):
        total = total * x + p[k]
    return total


def vander(x, N=None, increasing=False):  # noqa: N803 - NumPy's name
    """Powers of the elements as columns, falling."""
    n = x.shape[0] if N is None else N
    columns = [jnp.ones_like(x)]
    for _ in range(n - 1):
        columns.append(columns[-1] * x)
    return _shapes.stack(columns if increasing else columns[::-1], 1)


# ---- comparisons ---------------------------------------------------------------------------------


def isclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """|a - b| <= atol + rtol * |b|, or equal."""
    a, b = (_core.as_array(x) for x in (a, b))
    if is_integer(a.dtype) or a.dtype == bool:
        a = a.astype("float32")
    if is_integer(b.dtype) or b.dtype == bool:
        b = b.astype("float32")
    near = jnp.abs(a - b) <= atol + rtol * jnp.abs(b)
    near = (near & jnp.isfinite(a) & jnp.isfinite(b)) | (a == b)
    return near | (jnp.isnan(a) & jnp.isnan(b)) if equal_nan else near


def allclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Are all elements close?"""
    return jnp.all(isclose(a, b, rtol, atol, equal_nan))


def array_equal(a1, a2, equal_nan=False):
    """Equal shapes and elements?"""
    a, b = (_core.as_array(x) for x in (a1, a2))
    if a.shape != b.shape:
        return _core.as_array(False)
    same = a == b
    return jnp.all(same | ((a != a) & (b != b)) if equal_nan else same)


def isin(element, test_elements, invert=False):
    """Is each element one of those? Compared with all of them."""
    x, of = _core.as_array(element), jnp.ravel(_core.as_array(test_elements))
    wide = (*x.shape, of.shape[0])
    if x.ndim:
        x = _core.broadcast_in_dim(x, wide, tuple(range(x.ndim)))
    found = jnp.any(x == _core.broadcast_in_dim(of, wide, (len(wide) - 1,)), axis=-1)
    return ~found if invert else found


# ---- statistics ----------------------------------------------------------------------------------


def average(a, axis=None, weights=None, returned=False, keepdims=False):
    """mean, or the mean with weights of the shape of ``a``, or of the axis."""
    if weights is None:
        mean = jnp.mean(a, axis=axis, keepdims=keepdims)
        n = a.size // max(mean.size, 1)
        return (mean, jnp.full_like(mean, n)) if returned else mean
    weights = _core.as_array(weights)
    if weights.shape != a.shape:
        if weights.ndim != 1 or not isinstance(axis, int):
            raise TypeError(
                "jnp.average: weights of another shape than the array are a vector along one axis"
            )
        weights = _core.broadcast_in_dim(weights, a.shape, (axis % a.ndim,))
    total = jnp.sum(weights, axis=axis, keepdims=keepdims)
    mean = jnp.sum(a * weights, axis=axis, keepdims=keepdims) / total
    return (mean, total) if returned else mean


def _without_nan(name, fill):
    def f(a, axis=None, dtype=None, keepdims=False):
        a = _core.as_array(a)
        kept = a if is_integer(a.dtype) else _core.where(jnp.isnan(a), fill, a)
        return getattr(jnp, name)(kept, axis=axis, dtype=dtype, keepdims=keepdims)

    f.__name__ = f.__qualname__ = f"nan{name}"
    f.__doc__ = f"{name} of what is not NaN."
    return f


nansum, nanprod = _without_nan("sum", 0), _without_nan("prod", 1)


def _extreme_without_nan(name, fill):
    def f(a, axis=None, keepdims=False):
        a = _core.as_array(a)
        if is_integer(a.dtype):
            return getattr(jnp, name)(a, axis=axis, keepdims=keepdims)
        bad = jnp.isnan(a)
        out = getattr(jnp, name)(_core.where(bad, fill, a), axis=axis, keepdims=keepdims)
        if name.startswith("arg"):
            return out
        return _core.where(jnp.all(bad, axis=axis, keepdims=keepdims), math.nan, out)

    f.__name__ = f.__qualname__ = f"nan{name}"
    f.__doc__ = f"{name} of what is not NaN."
    return f


nanmax, nanmin = _extreme_without_nan("max", -math.inf), _extreme_without_nan("min", math.inf)
nanargmax = _extreme_without_nan("argmax", -math.inf)
nanargmin = _extreme_without_nan("argmin", math.inf)


def nancumsum(a, axis=None, dtype=None):
    """cumsum, NaN counting as zero."""
    a = _core.as_array(a)
    return _shapes.cumsum(_core.where(jnp.isnan(a), 0, a), axis, dtype)


def nanmean(a, axis=None, dtype=None, keepdims=False):
    """mean of what is not NaN."""
    n = jnp.sum(~jnp.isnan(a), axis=axis, keepdims=keepdims)
    total = nansum(a, axis, dtype, keepdims)
    return _core.convert(total / n, total.dtype)


def nanvar(a, axis=None, dtype=None, ddof=0, keepdims=False):
    """var of what is not NaN."""
    bad = jnp.isnan(a)
    centred = jnp.square(a - nanmean(a, axis, dtype, True))
    n = jnp.sum(~bad, axis=axis, keepdims=keepdims)
    total = jnp.sum(_core.where(bad, 0, centred), axis=axis, keepdims=keepdims)
    return _core.where(n > ddof, total / (n - ddof), math.nan).astype(total.dtype)


def nanstd(a, axis=None, dtype=None, ddof=0, keepdims=False):
    """std of what is not NaN."""
    return jnp.sqrt(nanvar(a, axis, dtype, ddof, keepdims))


def quantile(a, q, axis=None, method="linear", keepdims=False):
    """The q-th part of the way from the least element to the greatest; ``q`` is a number or a
    sequence of numbers, ``method`` linear, lower, higher, nearest or midpoint. NaN if any is."""
    if method not in ("linear", "lower", "higher", "nearest", "midpoint"):
        raise NotImplementedError(f"jnp.quantile: method {show(method)} in kernels")
    if isinstance(q, Array):
        raise NotImplementedError("jnp.quantile: q must be known at trace time in kernels")
    if isinstance(q, (tuple, list, np.ndarray)):
        return _shapes.stack([quantile(a, x, axis, method, keepdims) for x in q])
    if not 0 <= q <= 1:
        raise ValueError(f"jnp.quantile: q must be from 0 to 1, got {q}")
    a = a.astype("float32") if is_integer(a.dtype) else a
    rank, kept = a.ndim, a.shape
    if axis is None:
        a, along = a.reshape((-1,)), 0
    else:
        along = axis % rank
    n = a.shape[along]
    x, bad = _shapes.sort(a, along), jnp.any(jnp.isnan(a), axis=along)
    place = float(q) * (n - 1)
    low, part = math.floor(place), place - math.floor(place)
    if method != "linear":
        fixed = {"lower": 0, "higher": math.ceil(part), "midpoint": 0.5 * (part > 0)}
        fixed["nearest"] = round(place) - low
        part = fixed[method]
    one, other = (jnp.take(x, min(k, n - 1), axis=along) for k in (low, low + 1))
    out = one if part == 0 else one * (1 - part) + other * part
    out = _core.where(bad, math.nan, out).astype(a.dtype)
    if not keepdims:
        return out
    return out.reshape((1,) * rank if axis is None else (*kept[:along], 1, *kept[along + 1 :]))


def percentile(a, q, axis=None, method="linear", keepdims=False):
    """quantile of q / 100."""
    host = isinstance(q, (tuple, list, np.ndarray))
    return quantile(a, [x / 100 for x in q] if host else q / 100, axis, method, keepdims)


def searchsorted(a, v, side="left"):
    """How many elements of the rising vector ``a`` are less than each of ``v`` (``side="right"``:
    not greater), by halving."""
    from ._control import fori_loop

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


def digitize(x, bins, right=False):
    """Which of the bins, that rise or fall, each element is in."""
    if isinstance(bins, (tuple, list, np.ndarray)):
        raise ValueError("jnp.digitize: pass the bins as an operand of the kernel")
    return searchsorted(bins, x, "left" if right else "right")


def interp(x, xp, fp, left=None, right=None):
    """Straight between the points (xp, fp), xp rising; outside ``left`` and ``right``, which are
    the first and the last of fp if not given."""
    x = _core.as_array(x)
    n = xp.shape[0]
    k = jnp.clip(searchsorted(xp, x, "right"), 1, max(n - 1, 1))
    x0, y0 = _core.gather(xp, k - 1), _core.gather(fp, k - 1)
    x1, y1 = _core.gather(xp, k), _core.gather(fp, k)
    width = _core.where(x1 == x0, 1, x1 - x0)
    out = y0 + (x - x0) * ((y1 - y0) / width)
    out = _core.where(x < xp[0], fp[0] if left is None else left, out)
    return _core.where(x > xp[n - 1], fp[n - 1] if right is None else right, out)


def bincount(x, weights=None, minlength=0, *, length=None):
    """How often each number from 0 to ``length`` - 1 stands in the vector, or the sum of its
    weights. Compared with all of them; for many, atomics on a ref cost less."""
    if length is None:
        raise ValueError("jnp.bincount: length= must be given in kernels; shapes are static")
    n = max(length, minlength)
    x = _core.as_array(x)
    is_it = _core.broadcast_in_dim(x, (x.shape[0], n), (0,)) == _core.iota(
        x.dtype, (x.shape[0], n), 1
    )
    if weights is None:
        return jnp.sum(is_it, axis=0)
    wide = _core.broadcast_in_dim(_core.as_array(weights), (x.shape[0], n), (0,))
    return jnp.sum(_core.where(is_it, wide, 0), axis=0)


NAMES: list[str] = (
    "allclose append array_equal atleast_1d atleast_2d atleast_3d average bincount column_stack"
    " concat cross cumulative_prod cumulative_sum diag diagonal diff digitize dsplit dstack ediff1d"
    " fliplr flipud gcd hsplit inner interp isclose isin kron lcm matvec meshgrid nanargmax"
    " nanargmin nancumsum nanmax nanmean nanmin nanprod nanstd nansum nanvar percentile polyval"
    " ptp quantile ravel_multi_index rollaxis rot90 searchsorted trace unravel_index unstack vander"
    " vecdot vecmat vsplit"
).split()
MAKE_ARRAYS: tuple[str, ...] = ("identity", "indices", "linspace", "logspace")
