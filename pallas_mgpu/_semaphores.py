"""Semaphores: int32 counters, of one block or of the launch, that threads signal and wait for; and
memory that the blocks of a launch share."""

from . import _core
from ._devices import DeviceIdType, all_axes, device_number
from ._names import show
from ._schedule import not_batched
from ._trace import Array, Ref, as_array, env, type_text
from ._types import (
    GMEM,
    PlacedRef,
    Semaphores,
    SemaphoreType,
    ShapeDtypeStruct,
    _Frozen,
    _shape,
)


class semaphore:
    """The abstract dtype of semaphore refs: ``jnp.issubdtype(ref.dtype, pl.semaphore)``."""


def get_global(what):
    """Semaphores that all blocks of a launch share. They are 0 when the kernel starts.

    ``what``: ``plgpu.SemaphoreType.REGULAR`` or ``REGULAR(shape)``; NotImplementedError for
    anything else. Each call makes different semaphores. They may have any value when the kernel
    ends.
    """
    e = env("get_global")
    if isinstance(what, SemaphoreType):
        what = what()
    if not isinstance(what, Semaphores):
        raise NotImplementedError(
            f"get_global: only semaphores, plgpu.SemaphoreType.REGULAR, are shared by all blocks,"
            f" got {show(what)}; pass an operand for memory"
        )
    not_batched("get_global")
    first, n = e.semaphores, 1
    for d in what.shape:
        n *= d
    e.semaphores += n
    return _core.alloc_semaphore(what.shape, first)


class SharedScratch(PlacedRef):
    """Scratch in global memory that all blocks of a launch share, for ``scratch_types``.

    It lives as long as the call and is uninitialised at the start. Under ``plgpu.vmap`` each
    element has its own. A block may read what another one wrote once it has waited for a
    semaphore (``pl.get_global``) that was signalled after the write. ``plgpu.GMEM(shape, dtype)``
    is memory that a block has to itself.
    """

    __slots__ = ()

    def __init__(self, shape, dtype):
        aval = ShapeDtypeStruct(_shape(shape, "ext.SharedScratch"), _core.as_dtype(dtype))
        super().__init__(aval, GMEM)


def _one(x, what):
    if not isinstance(x, Ref):
        raise TypeError(f"{what}: semaphore must be a ref, got {show(x)}")
    if x.dtype != "semaphore":
        raise ValueError(f"{what}: semaphore must be a semaphore ref, got {type_text(x)}")
    if x.shape != ():
        raise ValueError(
            f"{what}: needs one semaphore, got an array of shape {x.shape}; index it with .at[i]"
        )
    return x


def _count(x, what):
    if not isinstance(x, Array):
        x = as_array(x, what)
    if x.shape != () or x.dtype.kind not in "iu" or x.dtype.itemsize > 4:
        raise TypeError(f"{what} must be an int32 scalar, got {type_text(x)}")
    return _core.convert(x, "int32")


def _scope(memory_scope, what):
    if memory_scope not in ("sys", "gpu"):
        raise ValueError(f"{what}: memory_scope must be 'sys' or 'gpu', got {show(memory_scope)}")
    return int(memory_scope == "sys")


def _signal(semaphore, inc, device_id, device_id_type, system, release, what):
    semaphore, inc = _one(semaphore, what), _count(inc, f"{what}: inc")
    if device_id is not None:
        number = device_number(device_id, device_id_type, what)
        semaphore = _core.device_ref(semaphore, number)
    _core.effect("semaphore_signal", (semaphore, inc), system=system, release=release)


def semaphore_signal(semaphore, inc=1, *, device_id=None, memory_scope="sys"):
    """Add ``inc``, an int32 scalar, to a semaphore, or with ``device_id`` to the same one of
    another device of the mesh (:func:`plgpu.remote_ref`), in the block with the same number.

    Threads that wait for the signal see the preceding memory accesses of this thread, also those of
    other devices' memory; copies by ``copy_smem_to_gmem`` only once ``wait_smem_to_gmem(0)`` has
    awaited them. ``memory_scope``: "sys", or "gpu", which is sufficient between blocks of one GPU.
    ValueError for other scopes, and for "gpu" with ``device_id``.
    """
    what = "semaphore_signal"
    system = _scope(memory_scope, what)
    if device_id is not None and not system:
        raise ValueError(f"{what}: device_id needs memory_scope='sys'")
    _signal(semaphore, inc, device_id, DeviceIdType.MESH, system, "own", what)


def semaphore_wait(semaphore, value=1, *, decrement=True, memory_scope="sys"):
    """Wait until a semaphore is at least ``value``, an int32 scalar: until it is less than 2**31
    ahead of it, modulo 2**32, so that counts may wrap. Then subtract ``value`` if ``decrement`` is
    True. TypeError unless ``decrement`` is a bool."""
    what = "semaphore_wait"
    if not isinstance(decrement, bool):
        raise TypeError(f"{what}: decrement must be a bool, got {show(decrement)}")
    _core.effect(
        what,
        (_one(semaphore, what), _count(value, f"{what}: value")),
        system=_scope(memory_scope, what),
        decrement=int(decrement),
    )


def semaphore_read(sem_or_view):
    """The value of a semaphore, an int32 scalar. Memory accesses before its signals are visible."""
    what = "semaphore_read"
    return _core.effect(what, (_one(sem_or_view, what),), system=1)


def generic_signal(
    sem_or_view, inc=1, *, device_id=None, device_id_type=DeviceIdType.MESH, core_index=None
):
    """``plgpu.semaphore_signal`` with a static ``inc``. NotImplementedError for a traced one, and
    for ``core_index``."""
    what = "semaphore_signal"
    if core_index is not None:
        raise NotImplementedError(f"{what}: core_index is not for GPUs; leave it out")
    if not isinstance(device_id_type, DeviceIdType):
        raise TypeError(f"{what}: device_id_type must be pl.DeviceIdType, got {device_id_type!r}")
    if isinstance(inc, Array):
        raise NotImplementedError(
            f"{what}: inc must be known while tracing; use plgpu.semaphore_signal for a traced one"
        )
    _signal(sem_or_view, inc, device_id, device_id_type, 1, "own", what)


def generic_wait(sem_or_view, value=1, *, decrement=True):
    """``plgpu.semaphore_wait``."""
    semaphore_wait(sem_or_view, value, decrement=decrement)


generic_signal.__name__ = generic_signal.__qualname__ = "semaphore_signal"
generic_wait.__name__ = generic_wait.__qualname__ = "semaphore_wait"


class SemaphoreSignal(_Frozen):
    """One signal of :func:`semaphore_signal_parallel`. ``device_id``: coordinates of a device of
    the mesh, or None: this one."""

    __slots__ = ("ref", "device_id", "inc")

    def __init__(self, ref, *, device_id, inc=1):
        self._set(ref=ref, device_id=device_id, inc=inc)


def semaphore_signal_parallel(*signals):
    """Send several signals, in any order. Each is like :func:`semaphore_signal`, but they share one
    fence."""
    what = "semaphore_signal_parallel"
    for s in signals:
        if not isinstance(s, SemaphoreSignal):
            raise TypeError(f"{what}: expected plgpu.SemaphoreSignal, got {show(s)}")
    for k, s in enumerate(signals):
        release = "own" if len(signals) == 1 else "shared" if k else "first"
        if s.ref is not None and getattr(s.ref, "memory_space", None) is not GMEM:
            release = "own"  # of the block
        _signal(s.ref, s.inc, s.device_id, DeviceIdType.MESH, 1, release, what)


def semaphore_signal_multicast(semaphore, value=1, *, collective_axes):
    """Add ``value`` to the semaphore on every device of the mesh, this one included, through the
    NVLink switch (Hopper). ``collective_axes`` must name all axes of the mesh; ValueError
    otherwise."""
    what = "semaphore_signal_multicast"
    semaphore = _one(semaphore, what)
    all_axes(collective_axes, what)
    value = _count(value, f"{what}: value")
    _core.effect("semaphore_signal", (_core.multicast_ref(semaphore), value), system=1)
