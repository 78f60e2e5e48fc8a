"""The model of what moves, scans, sorts and searches arrays, of masked and atomic accesses and of
small products. Values are NumPy's own functions on `A.v`; what the language adds - traced indices
that are limited or dropped, NaN last, int32 results - stands here. Undefined (`Invalid`) are sets
of one element twice, float sums that are not exact, and signs of NaN and of sums of zeros."""

import functools
import math

import ml_dtypes
import numpy as np

from .values import (
    _MAX,
    _MIN,
    BOOL,
    FUSED,
    A,
    Invalid,
    as_array,
    as_dtype,
    binary,
    choose,
    convert,
    exact,
    f32,
    i32,
    is_float,
    is_int,
    need,
    order_free,
    to_dtype,
    unary,
    widen,
)


def _move(f):
    """A function that moves elements of one array."""

    def move(x, *args, **kw):
        x = as_array(x)
        try:
            out = f(x.v, *args, **kw)
        except (ValueError, IndexError) as e:
            raise Invalid(str(e)) from None
        need(out.size, "no elements")
        return x.like(out)

    return move


def _shape_args(args):
    return args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args or None


def _merge(xs, f):
    """A function that brings several arrays together."""
    xs = [as_array(x) for x in xs]
    need(len({x.dtype for x in xs}) == 1, "dtypes of a concatenation")
    tols = [x.tol for x in xs if x.tol is not None]
    tol = tuple(map(max, zip(*tols))) if tols else None
    flags = functools.reduce(lambda a, b: a | b, (x.flags for x in xs))
    try:
        v = f([x.v for x in xs])
    except ValueError as e:
        raise Invalid(str(e)) from None
    return A(v, False, tol, flags, any(x.dep for x in xs))


def concatenate(xs, axis=0):
    return _merge(xs, lambda vs: np.concatenate(vs, axis))


def stack(xs, axis=0):
    return _merge(xs, lambda vs: np.stack(vs, axis))


def _static(k):
    if isinstance(k, A):
        exact(k)
        need(k.shape == () and is_int(k.dtype) and not k.flags & FUSED, "index scalar")
        return int(k.v)
    return k


def roll(x, shift, axis=None):
    shift = [_static(s) for s in shift] if isinstance(shift, tuple) else _static(shift)
    return _move(np.roll)(x, shift, axis)


def pad_with(x, value, config):
    x, value = as_array(x), to_dtype(value, as_array(x).dtype)
    v = x.v
    for k, (low, high, interior) in enumerate(config):
        n = v.shape[k] + (v.shape[k] - 1) * interior + low + high
        need(n > 0 and interior >= 0, "pad")
        out = np.full((*v.shape[:k], n, *v.shape[k + 1 :]), value.v, v.dtype)
        at = low + np.arange(v.shape[k]) * (interior + 1)
        inside = (at >= 0) & (at < n)
        where = (slice(None),) * k
        out[(*where, at[inside])] = v[(*where, inside)]
        v = out
    return x.like(v, flags=x.flags | value.flags)


def pad(x, width, mode="constant", constant_values=0):
    config = [(a, b, 0) for a, b in np.broadcast_to(np.asarray(width), (as_array(x).ndim, 2))]
    return pad_with(x, constant_values, config)


# ---- indices -------------------------------------------------------------------------------------


def _places(shape, idx):
    """(numbers of the elements of x[idx], which of them are inside)"""
    idx = idx if isinstance(idx, tuple) else (idx,)
    dots = [k for k, w in enumerate(idx) if w is Ellipsis]
    used = sum(w is not None and w is not Ellipsis for w in idx)
    need(used <= len(shape) and len(dots) < 2, "too many indices")
    at = dots[0] if dots else len(idx)
    idx = (*idx[:at], *[slice(None)] * (len(shape) - used), *idx[at + len(dots) :])
    picks, oks, dim = [], [], 0
    for w in idx:
        if w is None or isinstance(w, slice):
            picks.append(w)
            oks.append(w)
            dim += w is not None
            continue
        n = shape[dim]
        dim += 1
        if isinstance(w, A):
            exact(w)
            need(is_int(w.dtype) and not w.flags & FUSED, "index array")
            i = w.v.astype(np.int64)
            i = np.where(i < 0, i + n, i)
            inside = (i >= 0) & (i < n)
            picks.append(np.clip(i, 0, n - 1))
            oks.append(np.asarray(inside))
        else:
            need(-n <= w < n, "index out of bounds")
            picks.append(w)
            oks.append(np.asarray(True))
    try:
        numbers = np.arange(math.prod(shape)).reshape(shape)[tuple(picks)]
    except (IndexError, ValueError) as e:
        raise Invalid(str(e)) from None
    need(numbers.size, "empty slice")
    good = np.ones(numbers.shape, bool)
    arrays = [o for o in oks if isinstance(o, np.ndarray)]
    wide = np.broadcast_shapes(*(o.shape for o in arrays)) if arrays else ()
    if not all(o.all() for o in arrays):
        ok = functools.reduce(np.logical_and, arrays)
        if wide not in ((), numbers.shape):
            return numbers, None
        good &= ok
    return numbers, good


def getitem(x, idx):
    return x.like(np.asarray(x.v.ravel()[_places(x.shape, idx)[0]]))


class At:
    def __init__(self, x, idx=None):
        self.x, self.idx = x, idx

    def __getitem__(self, idx):
        return At(self.x, idx)

    def get(self):
        return self.x[self.idx]

    def _change(self, value, op):
        numbers, good = _places(self.x.shape, self.idx)
        need(good is not None, "which of these indices is outside")
        value = to_dtype(as_array(value), self.x.dtype)
        try:
            value = value.like(np.broadcast_to(value.v, numbers.shape))
        except ValueError as e:
            raise Invalid(str(e)) from None
        return _scatter(self.x, numbers, good, value, op)

    def set(self, value):
        return self._change(value, None)

    def add(self, value):
        return self._change(value, "add")

    def multiply(self, value):
        return self._change(value, "mul")

    def min(self, value):
        return self._change(value, "min")

    def max(self, value):
        return self._change(value, "max")


def _scatter(x, numbers, good, value, op=None):
    to = numbers[good]
    need(np.unique(to).size == to.size, "an element is set twice")
    if op:
        value = binary(op, x.like(x.v.ravel()[numbers]), value)
    v = x.v.ravel().copy()
    v[to] = value.v[good]
    tols = [t for t in (x.tol, value.tol) if t is not None]
    return x.like(
        v.reshape(x.shape),
        tol=tuple(map(max, zip(*tols))) if tols else None,
        flags=x.flags | value.flags,
        dep=x.dep or value.dep,
    )


def _window(x, starts, sizes):
    need(len(starts) == x.ndim == len(sizes), "starts")
    out = []
    for s, d, n in zip(starts, sizes, x.shape):
        need(1 <= d <= n, "size of a slice")
        s = _static(s)
        s = s + n if s < 0 else s
        out.append(slice(max(0, min(s, n - d)), max(0, min(s, n - d)) + d))
    return tuple(out)


def dynamic_slice(x, starts, sizes):
    return x.like(x.v[_window(x, starts, sizes)])


def dynamic_slice_in_dim(x, start, size, axis=0):
    starts = [start if k == axis else 0 for k in range(x.ndim)]
    return dynamic_slice(x, starts, [size if k == axis else n for k, n in enumerate(x.shape)])


def dynamic_index_in_dim(x, index, axis=0, keepdims=True):
    out = dynamic_slice_in_dim(x, index, 1, axis)
    return out if keepdims else out.like(out.v.squeeze(axis))


def dynamic_update_slice(x, update, starts):
    update = as_array(update)
    need(update.dtype == x.dtype, "dtype of an update")
    where = _window(x, starts, update.shape)
    numbers = np.arange(x.size).reshape(x.shape)[where]
    return _scatter(x, numbers, np.ones(numbers.shape, bool), update)


def take(x, i, axis=None, mode="fill"):
    x, i = as_array(x), as_array(i)
    exact(i)
    need(is_int(i.dtype) and not i.flags & FUSED, "index array")
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    n, at = x.shape[axis], i.v.astype(np.int64)
    at = at % n if mode == "wrap" else np.where(at < 0, at + n, at) if mode == "fill" else at
    inside = (at >= 0) & (at < n)
    out = np.take(x.v, np.clip(at, 0, n - 1), axis)
    if mode == "fill" and not inside.all():
        d = x.dtype
        if d == BOOL:
            fill = True
        elif is_int(d):
            fill = np.iinfo(d).min if d.kind == "i" else np.iinfo(d).max
        else:
            fill = math.nan
        rank = x.ndim - 1 - axis
        ok = inside.reshape(inside.shape + (1,) * rank)
        out = np.where(np.broadcast_to(ok, out.shape), out, np.asarray(fill, d))
    return x.like(np.asarray(out))


def take_along_axis(x, i, axis=-1):
    exact(i)
    need(is_int(i.dtype) and not i.flags & FUSED and i.ndim == x.ndim, "index array")
    axis %= x.ndim
    n, at = x.shape[axis], i.v.astype(np.int64)
    at = np.clip(np.where(at < 0, at + n, at), 0, n - 1)
    return x.like(np.take_along_axis(x.v, at, axis))


def triangle(lower):
    def f(x, k=0):
        x = as_array(x)
        keep = np.tri(*x.shape[-2:], k if lower else k - 1, dtype=bool)
        keep = np.broadcast_to(keep if lower else ~keep, x.shape)
        return choose(A(keep), x, A(np.zeros((), x.dtype)))

    return f


# ---- scans, searches, sorts ----------------------------------------------------------------------

_STEP = {"add": np.add, "mul": np.multiply, "max": _MAX, "min": _MIN}


def scan(kind, x, axis=None, reverse=False, dtype=None):
    x = as_array(x)
    exact(x)
    x = to_dtype(x, i32) if x.dtype == BOOL else x
    x = x if dtype is None else to_dtype(x, as_dtype(dtype))
    if axis is None:
        x, axis = x.reshape((-1,)), 0
    need(-x.ndim <= axis < x.ndim and x.dtype.itemsize > 1, "scan")
    axis, d, v = axis % x.ndim, x.dtype, widen(x.v)
    if is_float(d) and kind in ("add", "mul"):
        need(kind == "add", "the order of float products matters")
        rows = np.moveaxis(v, axis, -1).reshape(-1, v.shape[axis])
        need(all(order_free(r) for r in rows), "the order of a float sum matters")
        need(not (np.signbit(v) & (v == 0)).any(), "sums of negative zeros")
    v = np.moveaxis(v, axis, 0)
    v = v[::-1] if reverse else v
    out = v.copy()
    with np.errstate(all="ignore"):
        for k in range(1, len(v)):
            out[k] = _STEP[kind](out[k - 1], v[k])
    out = out[::-1] if reverse else out
    flags = FUSED if x.flags else 0
    return x.like(np.moveaxis(out, 0, axis).astype(d), weak=False, flags=flags)


def prod(x, axis=None, keepdims=False):
    x = as_array(x)
    exact(x)
    need(is_int(x.dtype), "the order of float products matters")
    d = x.dtype if x.dtype.itemsize == 4 else np.dtype("u4" if x.dtype.kind == "u" else "i4")
    return x.like(np.asarray(np.prod(x.v, axis=axis, keepdims=keepdims, dtype=d)), weak=False)


def reduce_prod(x, axes):
    need(is_int(x.dtype) and x.dtype.itemsize > 1, "the order of float products matters")
    return x.like(np.asarray(np.prod(x.v, axis=tuple(axes), dtype=x.dtype)), weak=False)


def search(kind):
    def f(x, axis=None, keepdims=False):
        x = as_array(x)
        exact(x)
        need(not x.flags & FUSED, "a fused value decides")
        need(x.dtype.itemsize > 1 or x.dtype == BOOL, "8-bit arithmetic")
        v = widen(x.v)
        pick = np.argmax if kind == "max" else np.argmin
        return A(np.asarray(pick(v, axis=axis, keepdims=keepdims)).astype(i32))

    return f


def logical(f):
    def g(x, axis=None, keepdims=False):
        x = as_array(x)
        exact(x)
        need(not x.flags & FUSED, "a fused value decides")
        return A(np.asarray(f(widen(x.v) != 0, axis=axis, keepdims=keepdims)))

    return g


def count_nonzero(x, axis=None):
    exact(x)
    need(not x.flags & FUSED, "a fused value decides")
    return A(np.asarray((widen(x.v) != 0).sum(axis=axis)).astype(i32))


def argsort(x, axis=-1):
    x = as_array(x)
    exact(x)
    need(not x.flags & FUSED, "a fused value decides")
    need(x.dtype.itemsize > 1 or x.dtype == BOOL, "8-bit arithmetic")
    return A(np.argsort(widen(x.v), axis=axis, kind="stable").astype(i32))


def sort(x, axis=-1):
    return x.like(np.take_along_axis(x.v, argsort(x, axis).v, axis), weak=False)


# ---- products ------------------------------------------------------------------------------------


def dot_general(a, b, numbers, preferred_element_type=None):
    (ca, cb), (ba, bb) = numbers
    a, b = as_array(a), as_array(b)
    exact(a, b)
    need(a.dtype == b.dtype and a.dtype != BOOL, "dtypes of a product")
    d = a.dtype
    letters = iter("abcdefghijklmnop")
    x, y = [None] * a.ndim, [None] * b.ndim
    for p, q in (*zip(ca, cb), *zip(ba, bb)):
        need(a.shape[p] == b.shape[q], "shapes of a product")
        x[p] = y[q] = next(letters)
    x, y = [c or next(letters) for c in x], [c or next(letters) for c in y]
    free = [c for k, c in enumerate(x) if k not in (*ca, *ba)]
    free += [c for k, c in enumerate(y) if k not in (*cb, *bb)]
    out = [x[p] for p in ba] + free
    text = f"{''.join(x)},{''.join(y)}->{''.join(out)}"
    to = d if preferred_element_type is None else as_dtype(preferred_element_type)
    if is_int(d):
        need(is_int(to), "a float product of integers")
        work = to if preferred_element_type is not None else i32
        r = np.einsum(text, a.v.astype(np.int64), b.v.astype(np.int64))
        return A(np.asarray(r).astype(work).astype(to))
    need(not (a.flags | b.flags), "product of inexact values")
    v, w = widen(a.v).astype(np.float64), widen(b.v).astype(np.float64)
    need(np.isfinite(v).all() and np.isfinite(w).all(), "product of infinities")
    need((v == np.rint(v)).all() and (w == np.rint(w)).all(), "the order of a float sum matters")
    need(np.einsum(text, abs(v), abs(w)).max() <= 2.0**24, "the order of a float sum matters")
    r = np.einsum(text, v, w)
    zeros = np.einsum(text, (v != 0) * 1.0, (w != 0) * 1.0) == 0
    negative = np.einsum(text, np.signbit(v) * 1.0, (~np.signbit(w)) * 1.0)
    negative += np.einsum(text, (~np.signbit(v)) * 1.0, np.signbit(w) * 1.0)
    need(not (zeros & (negative > 0)).any(), "a sum of zeros of either sign")
    r = np.where(r == 0, 0.0, r)
    return A(convert(np.asarray(r.astype(f32)), to))


def dot(a, b, preferred_element_type=None):
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return dot_general(a, b, dims, preferred_element_type)


def matmul(a, b, preferred_element_type=None):
    if a.ndim <= 2:
        return dot(a, b, preferred_element_type)
    lead = tuple(range(a.ndim - 2))
    dims = (((a.ndim - 1,), (b.ndim - 2,)), (lead, lead))
    return dot_general(a, b, dims, preferred_element_type)


# ---- what the namespaces get ---------------------------------------------------------------------

_flip, _tile, _repeat = _move(np.flip), _move(np.tile), _move(np.repeat)
_transpose, _swapaxes, _moveaxis = _move(np.transpose), _move(np.swapaxes), _move(np.moveaxis)

A.__getitem__ = getitem
A.at = property(At)
A.T = property(_transpose)
A.mT = property(lambda x: _swapaxes(x, -1, -2))
A.transpose = lambda x, *axes: _transpose(x, _shape_args(axes))
A.swapaxes = _swapaxes
A.__matmul__ = matmul
A.any, A.all = logical(np.any), logical(np.all)
A.argmax, A.argmin = search("max"), search("min")
A.cumsum, A.prod = lambda x, axis=None: scan("add", x, axis), prod
A.flatten = A.ravel = lambda x: x.reshape((-1,))

JNP = {
    "transpose": _transpose,
    "permute_dims": _transpose,
    "swapaxes": _swapaxes,
    "moveaxis": _moveaxis,
    "matrix_transpose": lambda x: _swapaxes(x, -1, -2),
    "concatenate": concatenate,
    "stack": stack,
    "vstack": concatenate,
    "hstack": lambda xs: concatenate(xs, 1 if as_array(xs[0]).ndim > 1 else 0),
    "split": lambda x, n, axis=0: [x.like(v) for v in np.split(x.v, n, axis)],
    "tile": _tile,
    "repeat": _repeat,
    "flip": _flip,
    "roll": roll,
    "pad": pad,
    "take": take,
    "take_along_axis": take_along_axis,
    "tril": triangle(True),
    "triu": triangle(False),
    "cumsum": functools.partial(scan, "add"),
    "cumprod": functools.partial(scan, "mul"),
    "prod": prod,
    "argmax": search("max"),
    "argmin": search("min"),
    "any": logical(np.any),
    "all": logical(np.all),
    "count_nonzero": count_nonzero,
    "sort": sort,
    "argsort": argsort,
    "dot": dot,
    "matmul": matmul,
    "ravel": lambda x: x.reshape((-1,)),
    "trunc": lambda x: unary("trunc", x),
    **{
        n: type("_Narrow", (), {"dtype": np.dtype(getattr(ml_dtypes, n))})()
        for n in ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")
    },
}

LAX = {
    "transpose": _transpose,
    "concatenate": concatenate,
    "rev": _flip,
    "pad": pad_with,
    "slice_in_dim": lambda x, lo, hi, stride=1, axis=0: x[
        (*(slice(None),) * axis, slice(lo, hi, stride))
    ],
    "dynamic_slice": dynamic_slice,
    "dynamic_slice_in_dim": dynamic_slice_in_dim,
    "dynamic_index_in_dim": dynamic_index_in_dim,
    "dynamic_update_slice": dynamic_update_slice,
    **{
        n: lambda x, axis=0, reverse=False, k=k: scan(k, x, axis, reverse)
        for n, k in {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}.items()
    },
    "reduce_prod": reduce_prod,
    "argmax": lambda x, axis, d: to_dtype(search("max")(x, axis), as_dtype(d)),
    "argmin": lambda x, axis, d: to_dtype(search("min")(x, axis), as_dtype(d)),
    "sort": sort,
    "dot_general": dot_general,
    "clz": lambda x: unary("clz", x),
    "population_count": lambda x: unary("popcount", x),
}


def masked(load, store):
    """`pl`'s masked and atomic accesses, made of the model's plain ones."""

    def mask_of(mask, shape):
        m = as_array(True if mask is None else mask)
        exact(m)
        need(m.dtype == BOOL and not m.flags & FUSED, "mask")
        try:
            return np.broadcast_to(m.v, shape)
        except ValueError as e:
            raise Invalid(str(e)) from None

    def part(view, m):
        """The elements under the mask, as a view of one dim."""
        return type(view)(view.buf, view.idx[m])

    def pl_load(ref, idx, mask=None, other=None):
        view = ref.view(idx)
        if mask is None:
            return load(view)
        m = mask_of(mask, view.shape)
        rest = to_dtype(0 if other is None else other, ref.dtype)
        out = np.array(np.broadcast_to(rest.v, view.shape))
        got = load(part(view, m))
        out[m] = got.v
        return got.like(out, flags=got.flags | rest.flags)

    def pl_store(ref, idx, value, mask=None):
        view, value = ref.view(idx), as_array(value)
        need(value.shape == view.shape, "shape of a store")
        m = mask_of(mask, view.shape)
        store(part(view, m), value.like(value.v[m]))

    def atomic(op):
        def f(ref, idx, *args, mask=None):
            view = ref.view(idx)
            m = mask_of(mask, view.shape)
            target = part(view, m)
            old = load(target)
            need(old.tol is None and not old.flags, "an atomic on an inexact value")
            x = [to_dtype(a, ref.dtype) for a in args]
            x = [v.like(np.broadcast_to(v.v, view.shape)[m]) for v in x]
            need(all(v.tol is None and not v.flags for v in x), "an inexact value")
            if op == "xchg":
                new = x[0]
            elif op == "cas":
                new = choose(A(old.v == x[0].v), x[1], old)
            else:
                new = binary(op, old, x[0])
            store(target, new)
            if mask is None:
                return old.like(old.v.reshape(view.shape))
            return None

        return f

    ops = {"add": "add", "max": "max", "min": "min", "and": "and", "or": "or", "xor": "xor"}
    return {
        "load": pl_load,
        "store": pl_store,
        **{f"atomic_{n}": atomic(op) for n, op in {**ops, "xchg": "xchg", "cas": "cas"}.items()},
    }


def whole_atomics(pl):
    """`plgpu.atomic_*`: the same without an index and a result."""

    def whole(f):
        def g(ref, value):
            f(ref, Ellipsis, value)

        return g

    ops = ("add", "max", "min", "and", "or", "xor")
    return {f"atomic_{n}": whole(pl[f"atomic_{n}"]) for n in ops}
