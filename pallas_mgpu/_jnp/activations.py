"""Activation functions of `nn`, for traced values and host arrays."""

import math
import operator

import numpy as np

from .. import _core
from .._trace import Array
from . import elementwise, reduce
from .array import float32
from .elementwise import (
    abs,
    clip,
    exp,
    expm1,
    isfinite,
    log,
    logaddexp,
    maximum,
    minimum,
    sign,
    sqrt,
    square,
    tanh,
    where,
)
from .shape import broadcast_to, squeeze

__all__ = [
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "mish",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "sparse_plus",
    "sparse_sigmoid",
    "squareplus",
    "standardize",
    "swish",
    "tanh",
]


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + exp(-x))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


swish = silu


def relu(x):
    """max(x, 0)."""
    return maximum(x, 0)


def relu6(x):
    """min(max(x, 0), 6)."""
    return minimum(maximum(x, 0), 6)


def leaky_relu(x, negative_slope=0.01):
    """x if positive, else negative_slope * x."""
    return where(x >= 0, x, negative_slope * x)


def gelu(x, approximate=True):
    """Gaussian error linear unit, by its tanh approximation or (``approximate=False``) by erfc."""
    if not approximate:
        return 0.5 * x * _erfc(-x * math.sqrt(0.5))
    c = math.sqrt(2 / math.pi)
    return 0.5 * x * (1 + tanh(c * (x + 0.044715 * (x * x * x))))


def _erfc(x):
    if isinstance(x, Array):
        return _core.unary("erfc", x)
    return np.vectorize(math.erfc, [np.float64])(x).astype(np.asarray(x).dtype)


def soft_sign(x):
    """x / (|x| + 1)."""
    return x / (abs(x) + 1)


def identity(x):
    """x."""
    return x


def hard_tanh(x):
    """x clipped to [-1, 1]."""
    return clip(x, -1, 1)


def hard_sigmoid(x):
    """relu6(x + 3) / 6."""
    return relu6(x + 3) / 6


def hard_silu(x):
    """x * hard_sigmoid(x)."""
    return x * hard_sigmoid(x)


hard_swish = hard_silu


def softplus(x):
    """log(1 + exp(x))."""
    return logaddexp(x, 0.0)


def log_sigmoid(x):
    """log(sigmoid(x))."""
    return -softplus(-x)


def mish(x):
    """x * tanh(softplus(x))."""
    return x * tanh(softplus(x))


def sparse_plus(x):
    """0 below -1, x above 1, (x + 1)**2 / 4 in between."""
    return where(x <= -1, 0.0, where(x >= 1, x, (x + 1) ** 2 / 4))


def sparse_sigmoid(x):
    """0 below -1, 1 above 1, (x + 1) / 2 in between."""
    return 0.5 * clip(x + 1, 0, 2)


def squareplus(x, b=4):
    """(x + sqrt(x**2 + b)) / 2."""
    return 0.5 * (x + sqrt(x * x + b))


def elu(x, alpha=1.0):
    """x if positive, else alpha * (exp(x) - 1)."""
    return where(x > 0, x, alpha * expm1(where(x > 0, 0, x)))


def celu(x, alpha=1.0):
    """max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)."""
    return maximum(x, 0.0) + alpha * expm1(minimum(x, 0.0) / alpha)


def selu(x):
    """elu, scaled so that it preserves mean and variance."""
    return 1.0507009873554805 * elu(x, 1.6732632423543772)


def glu(x, axis=-1):
    """The first half along ``axis`` times the sigmoid of the second half. ValueError for an odd
    size."""
    axis = operator.index(axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"nn.glu: axis {axis} is out of bounds for rank {x.ndim}")
    size = x.shape[axis]
    if size % 2:
        raise ValueError(f"nn.glu: the size along axis {axis} must be even, got {size}")
    before = (slice(None),) * (axis % x.ndim)
    return x[(*before, slice(0, size // 2))] * sigmoid(x[(*before, slice(size // 2, size))])


# ---- over an axis --------------------------------------------------------------------------------


def _shifted(x, axis, where):
    """x minus its maximum along axis, and the maximum, with 0 instead of an infinite one."""
    top = reduce.max(x, axis=axis, keepdims=True, where=where, initial=-math.inf)
    top = elementwise.where(isfinite(top), top, 0)
    return x - top, top


def softmax(x, axis=-1, where=None):
    """exp(x) divided by its sum along ``axis``; elements excluded by ``where`` give 0."""
    e = exp(_shifted(x, axis, where)[0])
    if where is not None:
        e = elementwise.where(where, e, 0)
    return e / reduce.sum(e, axis=axis, keepdims=True)


def log_softmax(x, axis=-1, where=None):
    """log(softmax(x)); elements excluded by ``where`` give -inf."""
    y = _shifted(x, axis, where)[0]
    total = reduce.sum(exp(y), axis=axis, keepdims=True, where=where)
    out = y - log(total)
    return out if where is None else elementwise.where(where, out, -math.inf)


def logsumexp(a, axis=None, b=None, keepdims=False, return_sign=False, where=None):
    """log(sum(b * exp(a))) along ``axis`` (None: all axes), without intermediate overflow. With
    ``return_sign``, the logarithm of the absolute value, and the sign."""
    y, top = _shifted(a, axis, where)
    terms = exp(y) if b is None else b * exp(y)
    total = reduce.sum(terms, axis=axis, keepdims=True, where=where)
    signs = sign(total)
    out = log(abs(total) if return_sign else total) + top
    if not keepdims:
        axes = tuple(range(a.ndim)) if axis is None else axis
        out, signs = squeeze(out, axes), squeeze(signs, axes)
    return (out, signs) if return_sign else out


def standardize(x, axis=-1, mean=None, variance=None, epsilon=1e-5, where=None):
    """(x - mean) / sqrt(variance + epsilon), with both computed along ``axis`` unless given."""
    if mean is None:
        mean = _mean(x, axis, where)
    if variance is None:  # as the definition says; mean(x**2) - mean**2 would cancel
        variance = _mean(square(x - mean), axis, where)
    return (x - mean) / sqrt(variance + epsilon)


def _mean(x, axis, where):
    if where is None:
        return reduce.mean(x, axis=axis, keepdims=True)
    chosen = broadcast_to(where, x.shape).astype(float32)
    count = reduce.sum(chosen, axis=axis, keepdims=True)
    total = reduce.sum(x.astype(float32), axis=axis, keepdims=True, where=where)
    return (total / count).astype(x.dtype)


def one_hot(x, num_classes, *, dtype=float32, axis=-1):
    """Insert a dimension ``axis`` of size ``num_classes``: 1 where its index equals x, else 0."""
    num_classes = operator.index(num_classes)
    rank = x.ndim + 1
    if not -rank <= operator.index(axis) < rank:
        raise ValueError(f"nn.one_hot: axis {axis} is out of bounds for rank {rank}")
    axis %= rank
    if not isinstance(x, Array):
        classes = np.arange(num_classes).reshape((-1,) + (1,) * (rank - 1 - axis))
        return (np.expand_dims(x, axis) == classes).astype(_core.as_dtype(dtype))
    shape = (*x.shape[:axis], num_classes, *x.shape[axis:])
    kept = tuple(k for k in range(rank) if k != axis)
    spread = _core.broadcast_in_dim(x, shape, kept)
    return (spread == _core.iota("int32", shape, axis)).astype(dtype)
