"""Activation functions, composed from `pallas_mgpu.numpy`. Traced values and host arrays."""

import math

from . import lax
from . import numpy as jnp
from ._names import finder


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + jnp.exp(-x))


def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


swish = silu


def relu(x):
    """max(x, 0)."""
    return jnp.maximum(x, 0)


def relu6(x):
    """min(max(x, 0), 6)."""
    return jnp.minimum(jnp.maximum(x, 0), 6)


def leaky_relu(x, negative_slope=0.01):
    """x where positive, else negative_slope * x."""
    return jnp.where(x >= 0, x, negative_slope * x)


def tanh(x):
    """Hyperbolic tangent."""
    return jnp.tanh(x)


def gelu(x, approximate=True):
    """Gaussian error linear unit: its tanh approximation, or by erf (traced values only)."""
    if not approximate:
        return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))
    c = math.sqrt(2 / math.pi)
    return 0.5 * x * (1 + jnp.tanh(c * (x + 0.044715 * (x * x * x))))


def soft_sign(x):
    """x / (|x| + 1)."""
    return x / (jnp.abs(x) + 1)


def identity(x):
    """x."""
    return x


_find = finder(
    "nn",
    {
        "write plain formulas with jnp": "celu elu glu hard_sigmoid hard_silu hard_swish hard_tanh"
        " log_sigmoid log_softmax logsumexp mish normalize one_hot selu softmax softplus"
        " sparse_plus sparse_sigmoid squareplus standardize",
    },
    {},
)


def __getattr__(name):
    return _find(name)
