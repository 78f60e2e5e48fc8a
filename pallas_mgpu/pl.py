"""The `pl` namespace: generic helpers of kernel bodies."""

from . import _core
from ._control import loop, run_scoped, run_state, when, with_scoped
from ._ops import debug_print, num_programs, program_id
from ._trace import Array
from ._types import Blocked, BlockSpec, Element, MemoryRef, Squeezed, squeezed

__all__ = [
    "BlockSpec",
    "Blocked",
    "Element",
    "MemoryRef",
    "Slice",
    "Squeezed",
    "align_to",
    "cdiv",
    "debug_print",
    "ds",
    "dslice",
    "loop",
    "multiple_of",
    "next_power_of_2",
    "num_programs",
    "program_id",
    "run_scoped",
    "run_state",
    "squeezed",
    "strides_from_shape",
    "when",
    "with_scoped",
]


class Slice:
    """``start``, static or traced, and static ``size`` of a slice of a ref."""

    __slots__ = ("start", "size", "stride")

    def __init__(self, start, size, stride=1):
        if isinstance(size, Array):
            raise NotImplementedError(
                "pl.ds: Dynamic slice size not supported; the size must be a Python int"
            )
        if isinstance(stride, Array):
            raise ValueError("pl.ds: the stride must be a Python int")
        if stride < 0:
            raise ValueError(f"pl.ds: the stride must not be negative, got {stride}")
        self.start, self.size, self.stride = start, size.__index__(), stride

    @property
    def is_dynamic_start(self):
        return isinstance(self.start, Array)

    @property
    def is_dynamic_size(self):
        return False

    def __eq__(self, other):
        if not isinstance(other, Slice):
            return NotImplemented
        return (
            self.start is other.start or bool(self.start == other.start) and self.size == other.size
        )

    def __repr__(self):
        return f"Slice({self.start!r}, {self.size}, {self.stride})"


def dslice(start, size=None, stride=1):
    """A slice of ``size`` elements from ``start`` (traced or not). ``ds(n)`` is the first n;
    ``ds(None)`` everything."""
    if size is None:
        return slice(None) if start is None else Slice(0, start, stride)
    return Slice(0 if start is None else start, size, stride)


ds = dslice


def cdiv(a, b):
    """ceil(a / b) for a >= 0. A Python int if both are."""
    if isinstance(a, Array) or isinstance(b, Array):
        return _core.binary("div", a + (b - 1), b)
    return (a + b - 1) // b


def align_to(a, n):
    """``a`` rounded up to a multiple of ``n``."""
    return cdiv(a, n) * n


def next_power_of_2(x):
    """The least power of two not below ``x``; 1 for 0. ValueError for negative ``x``."""
    if x < 0:
        raise ValueError(f"next_power_of_2: x must not be negative, got {x}")
    return 1 if x == 0 else 1 << (x - 1).bit_length()


def strides_from_shape(shape):
    """Row-major strides in elements."""
    out, step = [], 1
    for d in reversed(shape):
        out.append(step)
        step *= d
    return tuple(reversed(out))


def multiple_of(x, values):
    """``x`` with the promise that every int in ``values`` divides it. Lets slices of tiled SMEM
    and wide accesses be proved aligned."""
    if not isinstance(x, Array):
        return x
    for v in (values,) if isinstance(values, int) else tuple(values):
        x = _core.multiple_of(x, v)
    return x


_MISSING = {
    "pallas_call": "use plgpu.kernel",
    "core_map": "use plgpu.kernel",
    "kernel": "use plgpu.kernel",
    "semaphore_signal": "use plgpu.Barrier inside a block",
    "semaphore_wait": "use plgpu.Barrier inside a block",
    "semaphore_read": "use plgpu.Barrier inside a block",
    "get_global": "pass an operand",
    "debug_check": "use pl.debug_print",
    "delay": "leave it out",
    "load": "use ref[idx]",
    "store": "use ref[idx] = value",
    "swap": "use ref.swap(value, idx)",
    "atomic_add": "give each block its own output",
    "dot": "use plgpu.wgmma",
}


def __getattr__(name):
    hint = _MISSING.get(name)
    if hint is None:
        raise AttributeError(f"pallas_mgpu.pl has no {name!r}")

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"pl.{name} is not supported yet; {hint} (docs/gaps.md lists what is missing)"
        )

    missing.__name__ = name
    return missing
