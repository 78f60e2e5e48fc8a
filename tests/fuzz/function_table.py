"""Functions that are not exact: what they are in NumPy, where the generator calls them, and how
many units in the last place of float32 a result may be off (docs/arrays.md)."""

import math
import statistics
from typing import NamedTuple

import numpy as np


class Function(NamedTuple):
    space: str  # the namespace that has it
    of: object  # of float64 arrays
    low: float  # arguments, where it is well conditioned
    high: float
    ulp: int = 2
    options: str = ""  # after the argument


_vector = np.vectorize
_normal = statistics.NormalDist()


def _erf_inv(y):
    """The number of which `y` is the error function: a step of Newton's after the quantile."""
    x = _normal.inv_cdf((y + 1) / 2) / math.sqrt(2)
    return x - (math.erf(x) - y) * math.sqrt(math.pi) / 2 * math.exp(x * x)


FUNCTIONS = {
    "exp": Function("jnp", np.exp, -6, 6),
    "exp2": Function("jnp", np.exp2, -6, 6),
    "expm1": Function("jnp", np.expm1, 0.0625, 6),
    "log": Function("jnp", np.log, 1.25, 60),
    "log2": Function("jnp", np.log2, 1.25, 60),
    "log1p": Function("jnp", np.log1p, 0.0625, 60),
    "rsqrt": Function("lax", lambda x: 1 / np.sqrt(x), 0.0625, 60),
    "reciprocal": Function("pl", lambda x: 1 / x, 0.0625, 60, 1, ", approx=True"),
    "cbrt": Function("jnp", np.cbrt, 0.0625, 60, 1),
    "sin": Function("jnp", np.sin, 0.0625, 1.5),
    "cos": Function("jnp", np.cos, -1.5, 1.5),
    "tan": Function("jnp", np.tan, 0.0625, 1.5, 4),
    "arcsin": Function("jnp", np.arcsin, 0.0625, 0.9375),
    "arccos": Function("jnp", np.arccos, -0.9375, 0.9375),
    "arctan": Function("jnp", np.arctan, 0.0625, 60),
    "sinh": Function("jnp", np.sinh, 0.0625, 6, 3),
    "cosh": Function("jnp", np.cosh, -6, 6),
    "tanh": Function("jnp", np.tanh, 0.0625, 6),
    "arcsinh": Function("jnp", np.arcsinh, 0.0625, 60, 3),
    "arccosh": Function("jnp", np.arccosh, 1.25, 60, 4),
    "arctanh": Function("jnp", np.arctanh, 0.0625, 0.9375, 3),
    "erf": Function("lax", _vector(math.erf, [float]), 0.0625, 3),
    "erfc": Function("lax", _vector(math.erfc, [float]), -2, 2, 4),
    "erf_inv": Function("lax", _vector(_erf_inv, [float]), 0.0625, 0.9375),
    "lgamma": Function("lax", _vector(math.lgamma, [float]), 3, 60, 6),
}
# of two arguments in [low, high]
PAIRS = {
    "power": Function("jnp", np.power, 0.25, 2, 8),
    "arctan2": Function("jnp", np.arctan2, 0.25, 60, 3),
}


def _softplus(x):
    return np.logaddexp(x, 0)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _logsumexp(x):
    return np.logaddexp.reduce(x, axis=-1)


def _standardize(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


# of nn: rounded after each step; arguments in [-4, 4]
ACTIVATIONS = {
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "soft_sign": lambda x: x / (np.abs(x) + 1),
    "softplus": _softplus,
    "log_sigmoid": lambda x: -_softplus(-x),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "squareplus": lambda x: (x + np.sqrt(x * x + 4)) / 2,
    "sparse_sigmoid": lambda x: np.clip(x + 1, 0, 2) / 2,
    "elu": _elu,
    "celu": _elu,
    "selu": lambda x: 1.0507009873554805 * _elu(x, 1.6732632423543772),
}
# of nn, along the last axis, which is of that many elements at most
ALONG = {"softmax": _softmax, "log_softmax": lambda x: x - _logsumexp(x)[..., None],
         "standardize": _standardize, "logsumexp": _logsumexp}  # fmt: skip
