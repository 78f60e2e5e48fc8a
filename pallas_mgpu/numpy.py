"""The `jnp` namespace: on traced values it builds the graph, on host arrays it is NumPy.

Dtypes are those of JAX with 64-bit mode off: Python ints and floats are weak int32 and float32,
64-bit requests become 32-bit. Names that are not defined here are NumPy's, for host arrays alone.
"""

import numpy as _np

from . import _names
from . import tree as _tree
from ._jnp import array as _array
from ._jnp import einsum as _einsum
from ._jnp import elementwise as _elementwise
from ._jnp import index as _index
from ._jnp import linalg as _linalg
from ._jnp import reduce as _reduce
from ._jnp import shape as _shape
from ._jnp import sort as _sort
from ._jnp.array import *  # noqa: F403 - what the modules list in __all__
from ._jnp.base import host as _host
from ._jnp.base import is_traced as _is_traced
from ._jnp.einsum import *  # noqa: F403
from ._jnp.elementwise import *  # noqa: F403
from ._jnp.index import *  # noqa: F403
from ._jnp.linalg import *  # noqa: F403
from ._jnp.reduce import *  # noqa: F403
from ._jnp.shape import *  # noqa: F403
from ._jnp.sort import *  # noqa: F403

__all__ = [
    *_array.__all__,
    *_einsum.__all__,
    *_elementwise.__all__,
    *_index.__all__,
    *_linalg.__all__,
    *_reduce.__all__,
    *_shape.__all__,
    *_sort.__all__,
]

_find = _names.finder("jnp", {}, {})


def __getattr__(name):
    f = getattr(_np, name, None)
    if name.startswith("_") or f is None:
        return _find(name)
    if not callable(f) or isinstance(f, type):
        return f

    def host_only(*args, **kwargs):
        if _is_traced(*_tree.leaves([args, kwargs])):
            raise NotImplementedError(
                f"Unimplemented primitive in Pallas Mosaic GPU lowering: {name} (jnp.{name}"
                " works on host arrays only; `python -m pallas_mgpu gaps` says what to use in a"
                " kernel)"
            )
        out = f(*args, **kwargs)
        return _host(out) if isinstance(out, (_np.ndarray, _np.generic)) else out

    host_only.__name__ = name
    return host_only


def __dir__():
    return sorted(__all__)
