"""What a process keeps of kernels between calls, and how much of it.

A signature of a kernel has a plan (the lowered graph, the program, what is loaded); the extension
drops those longest unused beyond PALLAS_MGPU_PLAN_BYTES. A `kernel_family` has a kernel for each
combination of arguments; of those, and of what `cached` functions made, the last ones stay."""

import functools
import weakref

from . import _core

KEPT = 1024  # kernels of one family, or of one function that makes them
_clear: list = []
_families: weakref.WeakSet = weakref.WeakSet()


def cached(f):
    """`functools.lru_cache` that :func:`clear_caches` empties."""
    f = functools.lru_cache(maxsize=KEPT)(f)
    _clear.append(f.cache_clear)
    return f


def add_family(family):
    """``family``: a `_core.Family` whose ``maker`` can forget what it made, too."""
    _families.add(family)


def clear_caches():
    """Drop every kernel that was traced or compiled in this process, of all signatures.

    Memory of the host is freed at once; later calls trace and load anew, from the compile cache on
    disk, which stays as it is. It can be called at any time, also while kernels run or a CUDA graph
    is being captured: nothing is waited for, and code on the GPU is unloaded only when nothing can
    use it any more. Code that ran on a stream of the caller's (``stream=``, ``torch.cuda.stream``,
    every captured graph) stays loaded, and serves again if the same kernel comes back.
    """
    for family in list(_families):
        family.forget()
        family.maker.forget()
    for clear in _clear:
        clear()
    _core.clear_plans()
