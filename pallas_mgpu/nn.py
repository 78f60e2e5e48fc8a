"""Activation functions, for traced values and host arrays."""

from . import _names
from ._jnp import activations as _activations
from ._jnp.activations import *  # noqa: F403 - what it lists in __all__

__all__ = [*_activations.__all__]

__getattr__ = _names.finder(
    "nn",
    {"write plain formulas with jnp": "dot_product_attention log1mexp normalize"},
    {},
)


def __dir__():
    return sorted(__all__)
