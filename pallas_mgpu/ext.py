"""`plgpu.ext`: what kernels can use here and Pallas does not have.

Named barriers are hardware barriers of a block; they synchronise warps without memory. A kernel of
n threads may use ``15 - n`` of them, minus the number of participants of `ordered_section`."""

from . import _core
from ._control import ordered_section, warp_where
from ._devices import as_semaphores
from ._names import finder
from ._ops import discard
from ._schedule import TileScheduler
from ._semaphores import SharedScratch
from ._tmem import format_tcgen05_scales
from ._trace import env
from ._types import ints

__all__ = [
    "SharedScratch",
    "TileScheduler",
    "as_semaphores",
    "discard",
    "format_tcgen05_scales",
    "named_barrier_arrive",
    "named_barrier_sync",
    "ordered_section",
    "warp_where",
]

_WARP, _THREAD = 32, 128


def _come(what, barrier, num_threads, num_warps):
    env(what)
    if (num_threads is None) == (num_warps is None):
        raise TypeError(f"{what}: either num_threads or num_warps must be given")
    unit, count = ("num_threads", num_threads) if num_warps is None else ("num_warps", num_warps)
    (n,) = ints(count, f"{what}: {unit}")
    if n < 1:
        raise ValueError(f"{what}: {unit} must be positive, got {n}")
    lanes = n * (_THREAD if num_warps is None else _WARP)
    _core.effect(what, (_core.as_array(barrier),), n=lanes)


def named_barrier_sync(barrier, num_threads=None, *, num_warps=None):
    """Arrive at a named barrier of the block and wait until ``num_threads`` threads have arrived,
    by this function or by `named_barrier_arrive` (PTX ``bar.sync``). The barrier can then be
    reused. Accesses that precede an arrival are complete for all threads that waited.

    ``barrier``: an int from 0, or a traced int32 scalar. The barriers that `plgpu` uses itself are
    numbered separately. ``num_threads``: static, includes the caller, and is the same for all
    participants of a round. ``num_warps``, an alternative, counts warps: a thread counts as four,
    and in a `plgpu.warp_map` each warp arrives separately. All lanes must execute the call.

    ValueError for more threads than the kernel has; on the interpreter also if the counts differ or
    a thread arrives twice in a round, and IndexError for a barrier that the kernel does not have.
    """
    _come("named_barrier_sync", barrier, num_threads, num_warps)


def named_barrier_arrive(barrier, num_threads=None, *, num_warps=None):
    """Arrive at a named barrier without waiting (PTX ``bar.arrive``). Threads that wait in
    `named_barrier_sync` see preceding writes. Arguments and errors are the same as there."""
    _come("named_barrier_arrive", barrier, num_threads, num_warps)


__getattr__ = finder("plgpu.ext", {}, {})


def __dir__():
    return sorted(__all__)
