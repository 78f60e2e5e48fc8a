"""The `lax` namespace for kernel bodies: array functions, control flow, axis queries."""

from . import _names
from ._control import cond, fori_loop, switch, while_loop
from ._jnp import lax as _lax
from ._jnp.lax import *  # noqa: F403 - what it lists in __all__
from ._loops import associative_scan, map, scan
from ._ops import axis_index, axis_size, optimization_barrier

__all__ = [
    "associative_scan",
    "axis_index",
    "axis_size",
    "cond",
    "fori_loop",
    "map",
    "optimization_barrier",
    "scan",
    "switch",
    "while_loop",
    *_lax.__all__,
]

__getattr__ = _names.finder(
    "lax",
    _names.LAX_MISSING,
    {},
    "Unimplemented primitive in Pallas Mosaic GPU lowering: {name}; {hint}",
)


def __dir__():
    return sorted(__all__)
