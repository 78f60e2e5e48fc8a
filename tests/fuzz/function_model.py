"""The model of functions that are not exact (function_table.py) and of pallas_mgpu.nn."""

import ml_dtypes
import numpy as np

from .function_table import ACTIVATIONS, ALONG, FUNCTIONS, PAIRS
from .values import FUSED, as_array, binary, convert, exact, f16, f32, is_float, need, widen

STEPS = 40  # units in the last place that the steps of a composed function may add up to


def _rounded(x, value, ulp):
    """The result in the dtype of x, with what it may be off by."""
    d = x.dtype
    eps = float(ml_dtypes.finfo(d).eps)
    least = 6.1e-8 if d == f16 else 1e-30  # numbers below the normal ones have no more bits
    r = convert(np.asarray(value).astype(f32), d)
    return x.like(r, tol=(eps * (ulp + 2 if d == f32 else 1.01), least), flags=0)


def _argument(name, x, low, high):
    x = as_array(x)
    exact(x)
    need(is_float(x.dtype), "{} of {}", name, x.dtype)
    need(not x.flags & FUSED, "{} of a fused value", name)
    wide = widen(x.v).astype(np.float64)
    need(((low <= wide) & (wide <= high)).all(), "{} outside its tame domain", name)
    return x, wide


def _function(name, f):
    def call(x, **options):
        need(options == eval(f"dict({f.options[2:]})"), "options of {}", name)
        x, wide = _argument(name, x, f.low, f.high)
        return _rounded(x, f.of(wide), f.ulp)

    return call


def _pair(name, f):
    def call(x, y):
        (x, a), (y, b) = (_argument(name, v, f.low, f.high) for v in (x, y))
        need(x.dtype == y.dtype and x.shape == y.shape, "two arguments of {}", name)
        return _rounded(x, f.of(a, b), f.ulp)

    return call


def _composed(name, f):
    def call(x, **kw):
        x, wide = _argument(name, x, -4, 4)
        need(kw in ({}, {"axis": -1}), "options of {}", name)
        if name == "standardize":
            need((wide.var(-1) >= 0.5).all(), "standardize of numbers that are alike")
        out = _rounded(x, f(wide), 0)
        eps = float(ml_dtypes.finfo(x.dtype).eps)
        return out.like(out.v, tol=(eps * STEPS, eps * STEPS))

    return call


def _one_hot(x, num_classes, *, dtype=f32):
    x = as_array(x)
    exact(x)
    d = getattr(dtype, "dtype", dtype)
    return x.like(convert(x.v[..., None] == np.arange(num_classes), d), weak=False)


def _clip(low, high):
    return lambda x: binary("min", binary("max", x, low), high)


NN = {
    **{n: _composed(n, f) for n, f in {**ACTIVATIONS, **ALONG}.items()},
    "relu": lambda x: binary("max", x, 0),
    "relu6": _clip(0, 6),
    "hard_tanh": _clip(-1, 1),
    "identity": as_array,
    "one_hot": _one_hot,
}


def of(space):
    """The functions of a namespace; `lax` has what `jnp` has, too."""
    made = {n: _function(n, f) for n, f in FUNCTIONS.items() if space in ("lax", f.space)}
    return made | {n: _pair(n, f) for n, f in PAIRS.items()}
