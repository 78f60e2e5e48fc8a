"""The `pl` namespace: generic functions for kernel bodies."""

import numpy as np

from . import _core, _mutable, _names, _types, tree
from ._call import CompilerParams, CostEstimate, GridSpec, no_block_spec, pallas_call
from ._control import loop, run_scoped, run_state, when, with_scoped
from ._flags import enable_debug_checks, enable_poison_buffers
from ._jnp import elementwise, linalg
from ._jnp.array import issubdtype as _issubdtype
from ._jnp.base import strides as _strides
from ._jnp.shape import broadcast_to as _broadcast_to
from ._memory import WITH_INDEX, atomic_cas, load, store, swap
from ._meshes import core_map
from ._meshes import mesh_kernel as kernel
from ._names import NOT_SPECIFIED, PL_MISSING, PL_WRONG, finder, show
from ._ops import (
    debug_check,
    debug_print,
    delay,
    named_scope,
    num_programs,
    program_id,
)
from ._semaphores import DeviceIdType, get_global, semaphore, semaphore_read
from ._semaphores import generic_signal as semaphore_signal
from ._semaphores import generic_wait as semaphore_wait
from ._trace import Array, tracing
from ._types import Blocked, Buffered, Element, MemoryRef, RevisitMode, Squeezed, squeezed

BlockSpec, MemorySpace = _types.GenericBlockSpec, _types.GenericMemorySpace
ANY = MemorySpace.ANY
atomic_add, atomic_max, atomic_min, atomic_and, atomic_or, atomic_xor, atomic_xchg = (
    WITH_INDEX[f"atomic_{kind}"] for kind in ("add", "max", "min", "and", "or", "xor", "xchg")
)
BlockDim = Element | Squeezed | Blocked

__all__ = [
    "ANY",
    "BlockDim",
    "BlockSpec",
    "Blocked",
    "Buffered",
    "CompilerParams",
    "CostEstimate",
    "DeviceIdType",
    "Element",
    "GridSpec",
    "MemoryRef",
    "MemorySpace",
    "RevisitMode",
    "Slice",
    "Squeezed",
    "align_to",
    "broadcast_to",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_xchg",
    "atomic_xor",
    "cdiv",
    "core_map",
    "debug_check",
    "debug_print",
    "delay",
    "ds",
    "dslice",
    "empty",
    "empty_like",
    "empty_ref_like",
    "enable_debug_checks",
    "enable_poison_buffers",
    "get_global",
    "kernel",
    "load",
    "loop",
    "multiple_of",
    "named_scope",
    "next_power_of_2",
    "no_block_spec",
    "num_programs",
    "pallas_call",
    "program_id",
    "reciprocal",
    "run_scoped",
    "run_state",
    "semaphore",
    "semaphore_read",
    "semaphore_signal",
    "semaphore_wait",
    "squeezed",
    "store",
    "strides_from_shape",
    "swap",
    "when",
    "with_scoped",
]


@tree.register_pytree_node_class
class Slice:
    """A slice of a ref: ``start`` (static or traced), ``size`` and ``stride`` (static)."""

    __slots__ = ("start", "size", "stride")

    def __init__(self, start, size, stride=1):
        if isinstance(size, Array):
            raise NotImplementedError(
                "pl.ds: Dynamic slice size not supported; the size must be a Python int"
            )
        if isinstance(stride, Array):
            raise ValueError("pl.ds: the stride must be a Python int")
        for name, n in (("size", size), ("stride", stride), ("start", start)):
            if not hasattr(n, "__index__"):
                raise TypeError(f"pl.ds: the {name} must be an integer, got {show(n)}")
        if stride < 0:
            raise ValueError(f"pl.ds: the stride must not be negative, got {stride}")
        self.start, self.size, self.stride = start, size.__index__(), stride

    @property
    def is_dynamic_start(self):
        return isinstance(self.start, Array)

    @property
    def is_dynamic_size(self):
        return False

    @classmethod
    def from_slice(cls, slc, size):
        """From a Python slice of a dimension of ``size`` elements."""
        start, stop, step = slc.indices(size)
        return cls(start, max(-(-(stop - start) // step), 0), step)

    def tree_flatten(self):
        if self.is_dynamic_start:
            return (self.start,), (None, self.size, self.stride)
        return (), (self.start, self.size, self.stride)

    @classmethod
    def tree_unflatten(cls, aux_data, children):
        out = object.__new__(cls)
        out.start, out.size, out.stride = aux_data
        if children:
            (out.start,) = children
        return out

    def __eq__(self, other):
        if not isinstance(other, Slice):
            return NotImplemented
        if (self.size, self.stride) != (other.size, other.stride):
            return False
        if self.is_dynamic_start or other.is_dynamic_start:
            return self.start is other.start
        return self.start == other.start

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self):
        return f"Slice({self.start!r}, {self.size}, {self.stride})"


def dslice(start, size=NOT_SPECIFIED, stride=None):
    """A slice of ``size`` elements that begins at ``start``, an int or a traced int32 scalar.
    ``ds(n)`` selects the first n elements, ``ds(None)`` all of them."""
    if size is NOT_SPECIFIED:
        if start is None:
            return slice(None)
        start, size = 0, start
    return Slice(0 if start is None else start, size, 1 if stride is None else stride)


ds = dslice


def cdiv(a, b):
    """ceil(a / b) for a >= 0. A Python int if both operands are."""
    if isinstance(a, Array) or isinstance(b, Array):
        return _core.binary("div", a + (b - 1), b)
    return (a + b - 1) // b


def align_to(a, alignment):
    """``a`` rounded up to a multiple of ``alignment``."""
    return cdiv(a, alignment) * alignment


def next_power_of_2(x):
    """The smallest power of two that is at least ``x``; 1 for 0. ValueError for negative ``x``."""
    if not hasattr(x, "__index__"):
        raise TypeError(f"next_power_of_2: x must be an int, got {show(x)}")
    x = x.__index__()
    if x < 0:
        raise ValueError(f"next_power_of_2: x must not be negative, got {x}")
    return 1 if x == 0 else 1 << (x - 1).bit_length()


def reciprocal(x, *, approx=False, full_range=False):
    """1 / x, accurate to 1 ulp of float32, or correctly rounded under
    ``CompilerParams(exact_division=True)``.

    With ``approx``, floats take one instruction, also accurate to 1 ulp, which treats subnormal
    operands and results as 0. ``full_range`` disables ``approx``."""
    traced = isinstance(x, Array) and _issubdtype(x.dtype, np.inexact)
    if approx and not full_range and traced:
        return _core.unary("rcp_approx", x)
    return elementwise.reciprocal(x)


def broadcast_to(a, shape):
    """``jnp.broadcast_to``."""
    return _broadcast_to(a, shape)


def dot_of_matrices(a, b, trans_a=False, trans_b=False, allow_tf32=None, precision=None):
    """The product of two matrices in float32 (int32 for integers); ``trans_a`` and ``trans_b``
    transpose the operands. An older spelling of ``jnp.dot``."""
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"pl.dot: a and b must be matrices, got shapes {a.shape} and {b.shape}")
    if allow_tf32 is not None:
        if precision is not None:
            raise ValueError("pl.dot: only one of allow_tf32 and precision can be specified")
        precision = linalg.Precision["HIGH" if allow_tf32 else "HIGHEST"]
    dtype = _core.promote_types([a.dtype, b.dtype])[0]
    dims = (((0 if trans_a else 1,), (1 if trans_b else 0,)), ((), ()))
    out = "int32" if _types.is_integer(dtype) else "float32"
    return linalg.dot_general(a, b, dims, precision, out)


def _debug_checks_enabled():
    """``pl.enable_debug_checks.value``"""
    return enable_debug_checks.value


dot_of_matrices.__name__ = dot_of_matrices.__qualname__ = "dot"


def _on_host(what):
    if tracing():
        raise NotImplementedError(
            f"Unimplemented primitive in Pallas Mosaic GPU lowering: {what}; in a kernel use"
            " jnp.zeros, or pl.run_scoped for memory"
        )


def empty(shape, dtype, *, out_sharding=None):
    """A host array with undefined contents, to pass to kernels."""
    _on_host("empty")
    return np.empty(_types.ints(shape, "pl.empty: shape"), _core.as_dtype(dtype))


def empty_like(x):
    """``pl.empty`` for each leaf of a pytree of arrays or ``plgpu.ShapeDtypeStruct``."""
    _on_host("empty_like")
    return tree.map(_empty_like, x)


def _empty_like(x):
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"pl.empty_like: leaves must have a shape and a dtype, got {show(x)}")
    return empty(tuple(x.shape), x.dtype)


def empty_ref_like(x):
    """A mutable array (``plgpu.new_ref``) with undefined contents for each leaf of a pytree."""
    _on_host("empty_ref_like")
    return tree.map(lambda leaf: _mutable.new_ref(_empty_like(leaf)), x)


def strides_from_shape(shape):
    """Row-major strides in elements."""
    return _strides(shape)


def multiple_of(x, values):
    """``x``, with the promise that it is a multiple of every int in ``values``. The compiler uses
    it to prove that slices of tiled SMEM and wide accesses are aligned. ValueError if ``x`` is a
    Python int that is not such a multiple."""
    return _core.multiple_of(x, values)


_find = finder("pl", PL_MISSING, PL_WRONG)


def __getattr__(name):
    if name == "dot":
        _names.deprecated("pl.dot is an older spelling; use jnp.dot or lax.dot_general", 2)
        return dot_of_matrices
    if name == "debug_checks_enabled":
        _names.deprecated(f"pl.{name} is an older spelling; use pl.enable_debug_checks.value", 2)
        return _debug_checks_enabled
    return _find(name)


def __dir__():
    return sorted(__all__)
