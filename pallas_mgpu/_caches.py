"""What a process caches of kernels between calls, and the limits.

Each signature of a kernel has a plan (the lowered graph, the program, loaded code). The extension
drops the least recently used plans beyond PALLAS_MGPU_PLAN_BYTES. A function under
`specialize` has a kernel for each combination of arguments. These, and the results of `cached`
functions, are LRU caches."""

import functools
import weakref

from . import _core

KEPT = 1024  # kernels of one family, or of one function that makes them
_clear: list = []
_families: weakref.WeakSet = weakref.WeakSet()


def cached(f):
    """A `functools.lru_cache` that :func:`clear_caches` empties."""
    f = functools.lru_cache(maxsize=KEPT)(f)
    _clear.append(f.cache_clear)
    return f


def add_family(family):
    """``family``: a `_core.Family` whose ``maker`` can forget what it made, too."""
    _families.add(family)


def clear_caches():
    """Drop all kernels that were traced or compiled in this process.

    Host memory is freed immediately. Later calls trace again and load programs from the compile
    cache on disk, which does not change. The function can be called at any time, even while kernels
    run or a CUDA graph is being captured: it does not wait, and code on the GPU is unloaded only
    when nothing can use it any more. Code that ran on a caller's stream (``stream=``,
    ``torch.cuda.stream``, every captured graph) stays loaded and is reused if the same program is
    needed again.
    """
    for family in list(_families):
        family.forget()
        family.maker.forget()
    for clear in _clear:
        clear()
    _core.clear_plans()
