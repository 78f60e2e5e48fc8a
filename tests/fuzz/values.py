"""Values of the model: NumPy arrays with the dtypes, promotions and conversions of the language.

An `A` is what a kernel sees as a traced value. It may carry `tol`, a relative and an absolute
bound on how far results may differ (transcendental functions, float products of tensor cores),
and the flags PRODUCT (an inexact float32 product, which a compiler may fuse with an addition) and
FUSED (one that may have been). `Invalid` says that a result would not be defined, or not exact."""

import functools
import math

import ml_dtypes
import numpy as np

bf16 = np.dtype(ml_dtypes.bfloat16)
f16, f32, i32 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int32)
BOOL = np.dtype(bool)
PRODUCT, FUSED = 1, 2


class Invalid(Exception):
    """The kernel has no single defined result."""


def need(ok, why, *args):
    if not ok:
        raise Invalid(why.format(*args))


def as_dtype(d):
    return bf16 if d == "bfloat16" else np.dtype(getattr(d, "dtype", d))


def is_float(d):
    return d.kind == "f" or d == bf16


def is_int(d):
    return d.kind in "iu"


def widen(x):
    """f32 of a 16-bit float."""
    return x.astype(f32) if is_float(x.dtype) and x.dtype != f32 else x


# ---- conversions and promotion -------------------------------------------------------------------

_JOIN = {
    ("int8", "uint8"): "int16",
    ("int8", "uint16"): "int32",
    ("int8", "uint32"): "int32",
    ("int16", "uint16"): "int32",
    ("int16", "uint32"): "int32",
    ("int32", "uint32"): "int32",
    ("int16", "uint8"): "int16",
    ("int32", "uint8"): "int32",
    ("int32", "uint16"): "int32",
    ("bfloat16", "float16"): "float32",
}


def join(a, a_weak, b, b_weak):
    """(dtype, weak) that two operands promote to."""
    if a_weak and b_weak:
        return (f32 if f32 in (a, b) else i32), True
    if b_weak:
        a, b, a_weak = b, a, True
    if a_weak:  # a is weak: int32 or float32
        if b == BOOL or (is_int(b) and a == f32):
            return a, True
        return b, False
    if a == b:
        return a, False
    if is_float(a) != is_float(b):
        return (a if is_float(a) else b), False
    if BOOL in (a, b):
        return (b if a == BOOL else a), False
    if is_int(a) and a.kind == b.kind or is_float(a) and f32 in (a, b):
        return (a if a.itemsize > b.itemsize else b), False
    key = tuple(sorted((a.name, b.name)))
    return as_dtype(_JOIN[key]), False


def _int_to_half(x, to):
    """Correctly rounded, through a float that keeps a sticky last bit."""
    wide = x.astype(np.float64)
    f = wide.astype(f32)
    over = np.abs(f.astype(np.float64)) > np.abs(wide)
    f = np.where(over, np.nextafter(f, f32.type(0)), f)
    inexact = f.astype(np.float64) != wide
    f = (f.view(np.uint32) | inexact).view(f32)
    with np.errstate(over="ignore"):
        return f.astype(to)


INT4 = {np.dtype(ml_dtypes.int4): (-8, 7), np.dtype(ml_dtypes.uint4): (0, 15)}
NARROW = {np.dtype(ml_dtypes.float8_e4m3fn): 448, np.dtype(ml_dtypes.float8_e5m2): 57344, **INT4}


def _to_narrow(v, to):
    """Saturated from floats; integers keep their low bits in int4, and reach floats by float32."""
    if to not in INT4:
        return np.clip(widen(v).astype(f32), -NARROW[to], NARROW[to]).astype(to)
    low, high = INT4[to]
    if is_float(v.dtype):
        w = np.trunc(widen(v).astype(np.float64))
        return np.where(np.isnan(w), 0, np.clip(w, low, high)).astype(np.int8).astype(to)
    return ((v.astype(np.int64) - low) % 16 + low).astype(np.int8).astype(to)


def convert(v, to):
    """A NumPy array in another dtype, by the rules of the language."""
    if v.dtype == to:
        return v
    if v.dtype in NARROW:
        v = v.astype(i32 if v.dtype in INT4 else f32)
    if to in NARROW:
        return _to_narrow(v, to)
    if v.dtype == to:
        return v
    if to == BOOL:
        return widen(v) != 0
    if is_float(v.dtype) and is_int(to):
        info = np.iinfo(to)
        w = np.trunc(widen(v).astype(np.float64))
        w = np.where(np.isnan(w), 0, np.clip(w, info.min, info.max))
        return w.astype(np.int64).astype(to)
    if is_int(v.dtype) and to in (f16, bf16):
        return _int_to_half(v, to)
    with np.errstate(over="ignore", invalid="ignore"):
        return widen(v).astype(to)


# ---- arrays --------------------------------------------------------------------------------------


class A:
    """A traced value: array or scalar."""

    __slots__ = ("v", "weak", "tol", "flags", "dep")
    __hash__ = None
    __array_ufunc__ = None  # NumPy scalars leave operators to A

    def __init__(self, v, weak=False, tol=None, flags=0, dep=False):
        self.v, self.weak, self.tol, self.flags, self.dep = np.asarray(v), weak, tol, flags, dep

    shape = property(lambda self: self.v.shape)
    dtype = property(lambda self: self.v.dtype)
    ndim = property(lambda self: self.v.ndim)
    size = property(lambda self: self.v.size)

    def like(self, v, **changes):
        kept = {"weak": self.weak, "tol": self.tol, "flags": self.flags, "dep": self.dep}
        return A(v, **{**kept, **changes})

    def astype(self, to):
        return to_dtype(self, as_dtype(to))

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return self.like(self.v.reshape(shape))

    def sum(self, axis=None, **kw):
        return reduction("sum", self, axis, **kw)

    def max(self, axis=None, **kw):
        return reduction("max", self, axis, **kw)

    def min(self, axis=None, **kw):
        return reduction("min", self, axis, **kw)

    def view(self, dtype):
        return bitcast(self, dtype)

    def __bool__(self):
        raise TypeError("bool() of a traced value")

    def __index__(self):
        raise TypeError("index of a traced value")

    def __neg__(self):
        return unary("neg", self)

    def __abs__(self):
        return unary("abs", self)

    def __invert__(self):
        return unary("not", self)

    def __pow__(self, n):
        need(n in (2, 3), "power {}", n)
        return self * self if n == 2 else self * self * self


def as_array(x):
    if isinstance(x, A):
        return x
    if isinstance(x, (bool, np.bool_)):
        return A(np.asarray(x, bool))
    if isinstance(x, int):
        need(-(2**31) <= x < 2**31, "{} is no int32", x)
        return A(np.asarray(x, i32), weak=True)
    if isinstance(x, float):
        with np.errstate(over="ignore"):
            return A(np.asarray(x, f32), weak=True)
    if isinstance(x, np.generic):
        return A(np.asarray(x))
    raise TypeError(f"{x!r} is no array")


def to_dtype(x, to):
    x = as_array(x)
    if x.dtype == to:
        return x.like(x.v, weak=False)
    tol = x.tol
    if tol is not None:
        need(is_float(to), "an inexact value becomes {}", to)
        if to != f32:
            tol = (tol[0] + 2 * float(ml_dtypes.finfo(to).eps), tol[1])
    flags = x.flags if x.flags & FUSED else 0
    return x.like(convert(x.v, to), weak=False, tol=tol, flags=flags)


def exact(*xs):
    need(all(x.tol is None for x in xs), "arithmetic on an inexact value")


def _zero_aware(pick, bits):
    def f(x, y):
        if not is_float(x.dtype):
            return pick(x, y)
        both = (x == 0) & (y == 0)
        u, w = x.view(np.uint32), y.view(np.uint32)
        with np.errstate(invalid="ignore"):
            r = pick(x, y)
        r = np.where(both, bits(u, w).view(f32), r)
        return np.where(np.isnan(x) | np.isnan(y), f32.type(np.nan), r)

    return f


def _divisor(x, y):
    need((y != 0).all(), "division by zero")
    if x.dtype.kind == "i":
        low = np.iinfo(x.dtype).min
        need(not ((x == low) & (y == -1)).any(), "division overflows")


def _trunc_div(x, y):
    if is_float(x.dtype):
        return x / y
    _divisor(x, y)
    a, b = x.astype(np.int64), y.astype(np.int64)
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(x.dtype)


def _rem(x, y):
    if is_float(x.dtype):
        return np.fmod(x, y)
    return (x.astype(np.int64) - _trunc_div(x, y).astype(np.int64) * y).astype(x.dtype)


def _floor_div(x, y):
    need(is_int(x.dtype), "// of floats")
    _divisor(x, y)
    return x // y


def _mod(x, y):
    need(is_int(x.dtype), "% of floats")
    _divisor(x, y)
    return x % y


def _shift(f):
    def g(x, y):
        need(is_int(x.dtype), "shift of {}", x.dtype)
        need(((y >= 0) & (y < x.dtype.itemsize * 8)).all(), "shift by the width")
        return f(x, y)

    return g


def _copysign(x, y):
    need(not np.isnan(y).any(), "sign of NaN")
    return np.copysign(x, y)


_MAX = _zero_aware(np.maximum, lambda u, w: u & w)
_MIN = _zero_aware(np.minimum, lambda u, w: u | w)


def _of_numbers(pick, x, y):
    """Of two zeros it may be either."""
    need(not ((x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))).any(), "zeros of either sign")
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, pick(x, y)))


_BITWISE = {"and", "or", "xor", "eq", "ne"}
_BINARY = {
    "add": lambda x, y: x | y if x.dtype == BOOL else x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x & y if x.dtype == BOOL else x * y,
    "div": _trunc_div,
    "rem": _rem,
    "floordiv": _floor_div,
    "mod": _mod,
    "max": lambda x, y: x | y if x.dtype == BOOL else _MAX(x, y),
    "min": lambda x, y: x & y if x.dtype == BOOL else _MIN(x, y),
    "copysign": _copysign,
    "fmax": lambda x, y: _of_numbers(_MAX, x, y),
    "fmin": lambda x, y: _of_numbers(_MIN, x, y),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


def _fusing(op, x, y, d, r):
    """Flags of a float32 result: products that a later addition could absorb."""
    flags = (x.flags | y.flags) & FUSED
    if op == "div" and is_float(d):  # there to 2 ulp
        return flags | FUSED
    if d != f32:
        return flags
    if op == "mul":
        wide = x.v.astype(np.float64) * y.v.astype(np.float64)
        same = (wide == r) | ~np.isfinite(r)
        return flags | (0 if same.all() else PRODUCT)
    if op in ("add", "sub") and (x.flags | y.flags) & PRODUCT:
        return flags | FUSED
    return flags


def binary(op, x, y):
    x, y = as_array(x), as_array(y)
    exact(x, y)
    d, weak = join(x.dtype, x.weak, y.dtype, y.weak)
    if op == "truediv":
        op = "div"
        if not is_float(d):
            d = f32
    need(not is_float(d) or op not in ("and", "or", "xor"), "bitwise op on floats")
    shape = np.broadcast_shapes(x.shape, y.shape) if _fits(x.shape, y.shape) else None
    need(shape is not None, "shapes {} and {}", x.shape, y.shape)
    eight = d.itemsize == 1 and d != BOOL and shape != ()
    need(not eight or op in _BITWISE, "8-bit arithmetic")
    need(d != BOOL or op in _BITWISE | {"add", "mul", "max", "min"}, "{} of bools", op)
    a, b = convert(x.v, d), convert(y.v, d)
    with np.errstate(all="ignore"):
        r = _BINARY[op](widen(a), widen(b))
    if op in ("eq", "ne", "lt", "le", "gt", "ge"):
        d, weak, flags = BOOL, False, (x.flags | y.flags) & FUSED
    else:
        with np.errstate(all="ignore"):
            r = np.asarray(r).astype(d)
        flags = _fusing(op, A(a, flags=x.flags), A(b, flags=y.flags), d, r)
    return A(np.asarray(r), weak, None, flags, x.dep or y.dep)


def _fits(a, b):
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def _round_away(x):
    return np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x)


def _sign(x):
    if not is_float(x.dtype):
        return np.sign(x)
    need(not np.isnan(x).any(), "sign of NaN")
    return np.where(x == 0, f32.type(0), np.copysign(f32.type(1), x))


def _signbit(x):
    need(not np.isnan(x).any(), "sign of NaN")
    return np.signbit(x)


def _bits(x):
    """Each number's bits along a new last dim, the highest first."""
    width = 8 * x.dtype.itemsize
    return (x.view(f"u{x.dtype.itemsize}")[..., None] >> np.arange(width)[::-1]) & 1


def _clz(x):
    bits = _bits(x)
    return np.where(bits.any(-1), bits.argmax(-1), bits.shape[-1])


_BITS = {"clz": _clz, "popcount": lambda x: _bits(x).sum(-1)}
_UNARY = {
    "trunc": np.trunc,
    "signbit": _signbit,
    **_BITS,
    "neg": lambda x: -x,
    "abs": np.abs,
    "sign": _sign,
    "not": np.invert,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "rint": np.rint,
    "round": _round_away,
}


def unary(op, x):
    x = as_array(x)
    d = x.dtype
    if op in ("neg", "abs") and x.tol is not None:
        pass
    else:
        exact(x)
    if op in _BITS:
        need(is_int(d), "{} of {}", op, d)
        return x.like(_BITS[op](np.asarray(x.v)).astype(d))
    need(is_float(d) or op in ("neg", "abs", "sign", "not"), "{} of {}", op, d)
    need(op != "not" or not is_float(d), "~ of a float")
    eight = d.itemsize == 1 and d != BOOL and x.shape != ()
    need(not eight or op == "not", "8-bit arithmetic")
    need(d != BOOL or op == "not", "{} of bools", op)
    if op == "abs" and d.kind == "u":
        return x
    with np.errstate(all="ignore"):
        r = _UNARY[op](widen(x.v)).astype(BOOL if op == "signbit" else d)
    keep = PRODUCT | FUSED if op in ("neg", "abs") else FUSED
    return x.like(r, flags=x.flags & keep)


def _operator(op, swapped=False):
    if swapped:
        return lambda self, other: binary(op, other, self)
    return lambda self, other: binary(op, self, other)


for _name, _op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "floordiv": "floordiv",
    "mod": "mod", "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr",
}.items():  # fmt: skip
    setattr(A, f"__{_name}__", _operator(_op))
    setattr(A, f"__r{_name}__", _operator(_op, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(A, f"__{_name}__", _operator(_name))


def choose(c, x, y):
    c, x, y = as_array(c), as_array(x), as_array(y)
    exact(c)
    need(not c.flags & FUSED, "a fused value decides")
    c = binary("ne", c, 0) if c.dtype != BOOL else c
    d, weak = join(x.dtype, x.weak, y.dtype, y.weak)
    tol = x.tol or y.tol
    need(tol is None or x.dtype == y.dtype, "mixed dtypes of inexact values")
    try:
        v = np.where(c.v, convert(x.v, d), convert(y.v, d))
    except ValueError:
        raise Invalid("shapes of where") from None
    if v.dtype != d:
        v = v.astype(d)
    return A(v, weak, tol, x.flags | y.flags, x.dep or y.dep or c.dep)


def bitcast(x, dtype):
    x, to = as_array(x), as_dtype(dtype)
    exact(x)
    need(to.itemsize == x.dtype.itemsize and BOOL not in (to, x.dtype), "bitcast")
    if is_float(x.dtype):
        need(not np.isnan(widen(x.v)).any(), "bits of a NaN")
    return x.like(x.v.view(to), weak=False)


def order_free(v, precision=24):
    """Is a float sum over all of v exact in every order?"""
    x = widen(v).astype(np.float64).ravel()
    fin = x[np.isfinite(x) & (x != 0)]
    if not fin.size:
        return True
    m, e = np.frexp(fin)
    bits = (np.abs(m) * 2.0**53).astype(np.uint64)
    low = (bits & (~bits + np.uint64(1))).astype(np.float64)
    quantum = np.min(np.log2(low) + e - 53)
    return np.abs(fin).sum() <= 2.0 ** (quantum + precision) and np.abs(fin).sum() < 1e38


def _identity(kind, d):
    if kind in ("sum", "add"):
        return d.type(0)
    info = None if is_float(d) else np.iinfo(d)
    if kind == "max":
        return d.type(info.min if info else -math.inf)
    return d.type(info.max if info else math.inf)


def reduction(kind, x, axis=None, dtype=None, keepdims=False, initial=None, where=None):
    x = as_array(x)
    if dtype is not None:
        x = to_dtype(x, as_dtype(dtype))
    exact(x)
    if where is not None:
        x = choose(where, x, _identity(kind, x.dtype))
    if axis is None:
        axis = tuple(range(x.ndim))
    axis = axis if isinstance(axis, (tuple, list)) else (axis,)
    need(all(-x.ndim <= a < x.ndim for a in axis), "axis {}", axis)
    axis = tuple(sorted(a % x.ndim for a in axis))
    need(len(set(axis)) == len(axis), "axis twice")
    d = x.dtype
    flags = x.flags
    if kind in ("sum", "add"):
        if kind == "sum" and dtype is None and d.itemsize < 4 and not is_float(d):
            d = np.dtype(np.uint32) if d.kind == "u" else i32
        if is_float(d):
            flags = FUSED if flags else 0
            precision = 24 if kind == "sum" else {f16: 11, bf16: 8}.get(d, 24)
            rest = [a for a in range(x.ndim) if a not in axis]
            moved = np.moveaxis(x.v, rest, range(len(rest))) if rest else x.v
            rows = moved.reshape(math.prod(x.shape[a] for a in rest), -1)
            need(all(order_free(r, precision) for r in rows), "the order of a float sum matters")
            negative = (widen(rows) == 0) & np.signbit(widen(rows))
            need(not negative.all(axis=1).any(), "a sum of negative zeros")
            with np.errstate(all="ignore"):
                r = widen(x.v).astype(np.float64).sum(axis=axis, keepdims=keepdims)
                r = r.astype(f32).astype(d)
        else:
            need(d != BOOL, "sum of bools in bool")
            r = convert(x.v, d).sum(axis=axis, keepdims=keepdims, dtype=d)
    else:
        need(d != BOOL, "{} of bools", kind)
        need(d.itemsize > 1, "8-bit arithmetic")
        f = _MAX if kind == "max" else _MIN
        v = widen(x.v)
        for a in axis:
            v = functools.reduce(f, np.split(v, v.shape[a], axis=a))
        r = (v if keepdims else v.squeeze(axis)).astype(d)
    out = x.like(np.asarray(r), weak=x.weak and d == x.dtype, flags=flags)
    if initial is not None:
        out = binary({"sum": "add"}.get(kind, kind), out, initial)
    return out


def broadcast_in_dim(x, shape, dims):
    x = as_array(x)
    need(len(dims) == x.ndim and list(dims) == sorted(set(dims)), "broadcast dims")
    need(all(x.shape[k] in (1, shape[d]) for k, d in enumerate(dims)), "broadcast sizes")
    full = [1] * len(shape)
    for k, d in enumerate(dims):
        full[d] = x.shape[k]
    return x.like(np.broadcast_to(x.v.reshape(full), shape))


def broadcast_to(x, shape):
    x = as_array(x)
    need(x.ndim <= len(shape), "broadcast_to")
    return broadcast_in_dim(x, shape, tuple(range(len(shape) - x.ndim, len(shape))))


def full(shape, value, dtype=None):
    x = as_array(value)
    need(x.shape == (), "full of an array")
    if dtype is not None:
        x = to_dtype(x, as_dtype(dtype))
    return x.like(np.broadcast_to(x.v, shape))


def iota(dtype, shape, dim):
    need(0 <= dim < len(shape), "iota dim")
    return A(convert(np.indices(shape)[dim].astype(i32), as_dtype(dtype)))


where = choose  # the name in the language
