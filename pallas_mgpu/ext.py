"""`plgpu.ext`: what this language has and Pallas does not.

Named barriers are those of the block's hardware: warps meet there without memory. A kernel of n
threads has ``15 - n`` of them for itself, less the threads that take turns (`plgpu.in_turn`)."""

from . import _core
from ._trace import env
from ._types import ints

__all__ = ["named_barrier_arrive", "named_barrier_sync"]

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
    """Wait at a named barrier of the block until ``num_threads`` threads have come to it, by this
    or by `named_barrier_arrive`; the round then ends, and the barrier can be used again (PTX
    ``bar.sync``). What they read and wrote before is done for all who waited.

    ``barrier``: an int from 0, or an int32 scalar that may be computed; the barriers of `plgpu`
    itself have numbers of their own. ``num_threads``: static, with the caller, the same for all
    who come in a round. ``num_warps``, in its place, counts warps: a thread is four of them; in a
    `plgpu.warp_map` each warp comes by itself. All lanes must come.

    ValueError for more than the kernel has; on the interpreter also where counts differ or one
    comes twice in a round, IndexError for a number that the kernel does not have.
    """
    _come("named_barrier_sync", barrier, num_threads, num_warps)


def named_barrier_arrive(barrier, num_threads=None, *, num_warps=None):
    """Come to a named barrier, as `named_barrier_sync`, and go on without waiting (PTX
    ``bar.arrive``): those who wait there see what was written before."""
    _come("named_barrier_arrive", barrier, num_threads, num_warps)
