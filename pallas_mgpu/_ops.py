"""The hardware operations of kernel bodies: copies, barriers, wgmma, registers, printing.

Each function checks its arguments as described in docs/language.md and adds one op to the graph."""

import functools
import importlib
import math
import re
import types
from collections.abc import Hashable

from . import _core, _flags, tree
from ._clipped import ClippedRef
from ._control import cluster_axis
from ._devices import PeerMemRef, remote_ref
from ._jnp.refs import IndexedRef
from ._memory import load as masked_load
from ._names import NOT_SPECIFIED, accepts, deprecated, show, shown_as
from ._trace import Array, Ref, as_array, as_bools, env, scope_names, tracing, type_text
from ._types import (
    GMEM,
    REGS,
    SMEM,
    TMEM,
    OOBFillMode,
    ShapeDtypeStruct,
    TilingTransform,
    _Partitioned,
    _Replicated,
    axis_names,
    check_oob_fill_mode,
    ints,
    is_integer,
    layout_spec,
)


def _ref(x, what, name, space=None):
    if isinstance(x, ClippedRef):
        x.refuse()
        x = x.view()  # engines clip at the end of the array
    if isinstance(x, IndexedRef):
        raise NotImplementedError(
            f"{what}: {name} is indexed by arrays; load with ref[idx], store with ref[idx] = value"
        )
    if not isinstance(x, Ref):
        raise TypeError(f"{what}: {name} must be a ref, got {show(x)}")
    if space is not None and x.memory_space is not space:
        a = "an" if space is SMEM else "a"
        raise ValueError(f"{what}: {name} must be {a} {space.name} ref, got {type_text(x)}")
    return x


def _rows(x, what, name):
    """The ref and the row numbers of ``ref.at[rows, a:b]``."""
    rows = x.arrays[0] if len(x.arrays) == 1 else None
    dims = x.by[0]
    if rows is None or rows.ndim != 1 or dims != (-1, *range(1, len(dims))) or len(dims) != 2:
        raise NotImplementedError(
            f"{what}: {name} is indexed by arrays; copies take rows of a matrix by one array of"
            " row numbers: ref.at[rows, a:b]. Others: load with ref[idx], store with ref[idx] ="
            " value"
        )
    if rows.dtype.kind != "u":
        raise ValueError(
            f"{what}: the row numbers are {type_text(rows)}; unsigned integers are needed (uint32)"
        )
    return _ref(x.ref, what, name, GMEM), _core.convert(rows, "uint32")


def _plain_rows(what, **options):
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{what}: {name} together with an array of row numbers")


def _barrier(x, what):
    _ref(x, what, "barrier")
    if x.dtype != "barrier":
        raise ValueError(f"{what}: barrier must be a barrier ref, got {type_text(x)}")
    if x.size != 1:
        raise ValueError(
            f"{what}: needs one barrier, got {x.size} of shape {x.shape}; index it with .at[i]"
        )
    while x.ndim:
        x = x.at[0]
    return x


def _predicate(x, what):
    return () if x is None else (as_bools(x, f"{what}: predicate"),)


def _same(a, b, what, an, bn):
    if a.dtype != b.dtype:
        raise ValueError(f"{what}: {an} is {a.dtype} and {bn} is {b.dtype}; they must be equal")
    if a.shape != b.shape:
        raise ValueError(f"{what}: {an} has shape {a.shape} and {bn} {b.shape}; they must be equal")


_AUTO, *_ENGINES = _core.enum_names("ENGINE")
_NONE, *_REDUCTIONS = _core.enum_names("COMBINE")
_ATOMICS = [kind for kind in _core.enum_names("ATOMIC") if kind not in ("xchg", "cas")]


def _one_of(x, names, default, what):
    """A name of the core's, of which None is the default."""
    if x is not None and x not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)} or None, got {show(x)}")
    return default if x is None else x


def _check_leader(leader_tracked, collective_axes, what):
    if leader_tracked is None:
        return
    if collective_axes is None:
        raise ValueError(f"{what}: leader_tracked needs collective_axes")
    if not isinstance(leader_tracked, (_Partitioned, _Replicated)):
        raise TypeError(
            f"{what}: leader_tracked must be plgpu.CopyPartition.PARTITIONED(axis), REPLICATED or"
            f" None, got {show(leader_tracked)}"
        )


def _part(leader_tracked, collective_axes, src, dst, what):
    """What this block copies of ``src``; ValueError unless the shapes fit."""
    if leader_tracked is None:
        _same(src, dst, what, "src", "dst")
        return src
    if len(axis_names(collective_axes)) != 1:
        raise ValueError(
            f"{what}: leader_tracked needs exactly one collective axis, got {collective_axes}"
        )
    if isinstance(leader_tracked, _Partitioned):
        axes = axis_names(collective_axes)
        for name in axes:
            cluster_axis(name, what)
        dim, size = leader_tracked.axis, math.prod(env(what).axes[name][2] for name in axes)
        if not 0 <= dim < dst.ndim:
            raise ValueError(f"{what}: PARTITIONED({dim}) of dst, which has shape {dst.shape}")
        want = (*dst.shape[:dim], dst.shape[dim] * size, *dst.shape[dim + 1 :])
        text = (
            f"dim {dim} is partitioned over an axis of size {size}"
            f" ({' and '.join(map(repr, axes))}), so dst of shape {dst.shape} needs src of shape"
            f" {want}, got {src.shape}"
        )
        if src.shape != want:
            raise ValueError(f"{what}: {text}")
        if src.dtype != dst.dtype:
            _same(src, dst, what, "src", "dst")
        if size != 2:
            raise NotImplementedError(
                f"{what}: leader_tracked is for an axis of size 2, not {size}"
            )
        rank = _core.axis_index("cluster", cluster_axis(axes[0], what))
        size = dst.shape[dim]
        own = types.SimpleNamespace(start=rank * size, size=size, stride=1)
        return src.at[(*(slice(None),) * dim, own)]
    _same(src, dst, what, "src", "dst")
    return src


def _partitioned(args, kwargs, value):
    """For `accepts`: the older spelling."""
    kwargs["leader_tracked"] = _Partitioned(value)
    return "pass leader_tracked=plgpu.CopyPartition.PARTITIONED(axis)"


def _copy_by_lanes(src, dst, oob_mode, predicate, refused):
    what = "copy_gmem_to_smem"
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{what}: {name} needs a barrier, got {name}={show(value)}")
    src = _ref(src, what, "src", GMEM)
    dst = _ref(dst, what, "dst", SMEM)
    oob = check_oob_fill_mode(oob_mode, f"{what}: oob_mode") if oob_mode is not None else None
    pred = _predicate(predicate, what)
    _core.effect(
        "copy_gmem_to_smem_cp_async",
        (src, dst, *pred),
        oob=int(OOBFillMode.ZEROS if oob is None else oob),
        predicated=len(pred),
    )


@accepts(impl=None, partitioned_axis=_partitioned)
def copy_gmem_to_smem(
    src,
    dst,
    barrier=None,
    *,
    collective_axes=None,
    leader_tracked=None,
    oob_mode=None,
    predicate=None,
    engine=None,
):
    """Start an asynchronous copy of the GMEM view ``src`` to the SMEM view ``dst``.

    The copy counts as one arrival on ``barrier`` (Hopper and newer); wait on it before reading.
    Shapes and dtypes must be equal. Elements outside the array are zeros. ``predicate``: a bool
    scalar; if False, only the arrival happens.

    Without ``barrier`` (sm_80, sm_86, sm_89; ValueError when the kernel is lowered for others) the
    lanes copy by cp.async, and :func:`wait_gmem_to_smem` waits. Each copy of a thread is one group,
    an empty one if ``predicate`` is False. ``oob_mode=OOBFillMode.PROMISE_IN_BOUNDS`` saves the
    checks of the bounds. This form takes no ``collective_axes``, ``leader_tracked`` or ``engine``
    (ValueError), and is not available in a warp.

    ``collective_axes``: cluster axes along which the copy is multicast.
    ``leader_tracked``, with one collective axis in a cluster of two blocks (Blackwell): both blocks
    call it, and only the barrier of the first one signals that the data of both have arrived.
    ``CopyPartition.PARTITIONED(axis)``: ``src`` is twice as large along ``axis``, and each block
    gets its half; ``REPLICATED``: both get all of it.

    ``src`` may be ``ref.at[rows, a:b]`` with an array of row numbers, uint32 and a multiple of 4 of
    them (Blackwell): row k of ``dst`` becomes row ``rows[k]``; rows that do not exist are zeros.
    This form takes no ``predicate``, ``collective_axes`` or ``engine`` and is not available in a
    warp. Any shape and pitch is legal: TMA copies if it can, otherwise the lanes of the thread.
    ``engine``: "tma", "bulk" or "plain" requests one; ValueError if that is not possible."""
    what = "copy_gmem_to_smem"
    if barrier is None:
        given = {"collective_axes": collective_axes, "leader_tracked": leader_tracked}
        _copy_by_lanes(src, dst, oob_mode, predicate, given | {"engine": engine})
        return
    if isinstance(src, IndexedRef):
        _plain_rows(what, predicate=predicate, collective_axes=collective_axes, engine=engine)
        src, rows = _rows(src, what, "src")
        dst = _ref(dst, what, "dst", SMEM)
        _core.effect("gather_gmem_to_smem", (src, dst, _barrier(barrier, what), rows))
        return
    src = _ref(src, what, "src", GMEM)
    dst = _ref(dst, what, "dst", SMEM)
    _check_leader(leader_tracked, collective_axes, what)
    src = _part(leader_tracked, collective_axes, src, dst, what)
    if isinstance(leader_tracked, _Partitioned):
        collective_axes = None
    axes = tuple(cluster_axis(n, what) for n in axis_names(collective_axes))
    oob = OOBFillMode.ZEROS
    if oob_mode is not None:
        oob = check_oob_fill_mode(oob_mode, f"{what}: oob_mode")
    pred = _predicate(predicate, what)
    _core.effect(
        what,
        (src, dst, _barrier(barrier, what), *pred),
        oob=int(oob),
        predicated=len(pred),
        cluster=axes,
        leader=int(leader_tracked is not None),
        engine=_one_of(engine, _ENGINES, _AUTO, f"{what}: engine"),
    )


def copy_smem_to_gmem(
    src,
    dst,
    predicate=None,
    *,
    commit_group=True,
    reduction_op=None,
    engine=None,
    evict_first=False,
):
    """Start an asynchronous copy of the SMEM view ``src`` to the GMEM view ``dst`` (Hopper).

    Call :func:`commit_smem` first if ordinary stores wrote ``src``. Elements outside the array are
    not written. ``predicate``: a bool scalar; if False, nothing is copied. ``commit_group`` closes
    a group, which :func:`wait_smem_to_gmem` counts. ``engine``: as for :func:`copy_gmem_to_smem`.

    ``reduction_op`` atomically combines each element with the one in ``dst``: "add" (float16,
    bfloat16, float32, int32, uint32); "min", "max" (float16, bfloat16); and for int32 and uint32
    "umin", "umax" (unsigned), "smin", "smax" (signed), "and", "or", "xor", "inc" (add 1, or 0 if
    the element was at least ``src``) and "dec" (subtract 1, or ``src`` if the element was 0 or more
    than ``src``). ValueError for others. ``evict_first``: a hint that the result is not read soon,
    so that the L2 cache evicts it first; for results larger than the cache. Copies by the lanes and
    copies with ``reduction_op`` ignore it. ``dst`` may be ``ref.at[rows, a:b]``, see
    :func:`copy_gmem_to_smem`: row k of ``src`` goes to row ``rows[k]``.
    """
    what = "copy_smem_to_gmem"
    src = _ref(src, what, "src", SMEM)
    if isinstance(dst, IndexedRef):
        if reduction_op is not None:
            raise ValueError(f"{what}: reduction_op together with an array of row numbers")
        _plain_rows(what, predicate=predicate, engine=engine)
        dst, rows = _rows(dst, what, "dst")
        _core.effect("scatter_smem_to_gmem", (src, dst, rows), commit=int(bool(commit_group)))
        return
    dst = _ref(dst, what, "dst", GMEM)
    _same(src, dst, what, "src", "dst")
    pred = _predicate(predicate, what)
    _core.effect(
        what,
        (src, dst, *pred),
        commit=int(bool(commit_group)),
        predicated=len(pred),
        reduction_op=_one_of(reduction_op, _REDUCTIONS, _NONE, f"{what}: reduction_op"),
        engine=_one_of(engine, _ENGINES, _AUTO, f"{what}: engine"),
        evict_first=int(bool(evict_first)),
    )


def async_prefetch(ref, *, collective_axes=None, leader_tracked=None):
    """Fetch the GMEM view ``ref`` into the L2 cache (Hopper). The completion cannot be awaited.
    With ``leader_tracked``, as for :func:`copy_gmem_to_smem`: the part of this block, or all.
    NotImplementedError with ``collective_axes`` alone, and for rows by an array."""
    what = "async_prefetch"
    ref = _ref(ref, what, "ref", GMEM)
    _check_leader(leader_tracked, collective_axes, what)
    if isinstance(leader_tracked, _Partitioned):
        dim, shape = leader_tracked.axis, list(ref.shape)
        if not 0 <= dim < ref.ndim or shape[dim] % 2:
            raise ValueError(f"{what}: PARTITIONED({dim}) of a ref of shape {ref.shape}")
        shape[dim] //= 2
        half = ShapeDtypeStruct(tuple(shape), ref.dtype)
        ref = _part(leader_tracked, collective_axes, ref, half, what)
    elif leader_tracked is None and collective_axes is not None:
        raise NotImplementedError(
            f"{what}: collective prefetches are not supported; let one block prefetch, L2 is common"
            " to all"
        )
    _core.effect(what, (ref,))


def discard(ref):
    """Discard the contents of the GMEM view ``ref`` (PTX ``discard.L2``). They are undefined
    afterwards, and the L2 cache need not write the 128-byte lines inside ``ref`` back to memory.
    Use it on scratch memory after its last read.

    It counts as a write by the lanes of the thread, so other threads must have finished with
    ``ref``. ValueError if ``ref`` is not in GMEM, or is another device's. NotImplementedError if
    ``ref`` is a block that may overhang its array, or one of its dimensions is a `plgpu.dim`."""
    if isinstance(ref, ClippedRef):
        raise NotImplementedError(
            "discard: ref is a block that may overhang its array; discard a slice of the array"
        )
    _core.effect("discard", (_ref(ref, "discard", "ref", GMEM),))


def async_store_smem(src, ref, barrier, *, cluster_idx, cluster_dim, optimized=True, atomic=None):
    """Store the array ``src`` in the SMEM view ``ref`` of another block of the cluster (Hopper).

    That block has index ``cluster_idx`` along the cluster axis ``cluster_dim``, and the caller's
    indices along the others. The store counts as one arrival on that block's ``barrier``, on which
    it waits before reading. ``atomic``: "add", "max", "min", "and", "or" or "xor" combines each
    element with the one there (int32 and uint32). ``optimized`` has no effect. TypeError if shapes
    or dtypes differ, ValueError for another ``atomic``.
    """
    what = "async_store_smem"
    _ref(ref, what, "ref", SMEM)
    _ref(barrier, what, "barrier")
    if barrier.dtype == "barrier" and barrier.size != 1:
        raise TypeError(f"{what}: needs one barrier, got {barrier.size}; index it with .at[i]")
    atomic = _one_of(atomic, _ATOMICS, _NONE, f"{what}: atomic")
    src = as_array(src, f"{what}: src")
    to = _core.cluster_ref(ref, cluster_axis(cluster_dim, what), cluster_idx)
    minmax = "s" if src.dtype == "int32" else "u"
    op = minmax + atomic if atomic in ("max", "min") else atomic
    _core.effect(what, (to, src, _barrier(barrier, what)), reduction_op=op)


def commit_smem_to_gmem_group():
    """Close a group of the copies started with ``commit_group=False`` (Hopper)."""
    _core.effect("commit_smem_to_gmem_group", ())


def _count(n, what):
    try:
        n = n.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{what}: n must be a Python int, got {show(n)}") from None
    if n < 0:
        raise ValueError(f"{what}: n must not be negative, got {n}")
    return n


@accepts(allow_groups="n")
def wait_smem_to_gmem(n, wait_read_only=False):
    """Wait until at most the ``n`` latest groups of copies to GMEM are in flight (Hopper).

    In a thread, this includes the groups that its warps started in a :func:`warp_map`. In a warp,
    it means the groups of this warp; the thread's own copies belong to warp 0. With
    ``wait_read_only``, wait only until the SMEM sources have been read, so that they can be reused.
    A kernel may end without a wait, but a wait is needed before writing a source again or reading
    what was stored. TypeError, ValueError for other ``n``.
    """
    n = _count(n, "wait_smem_to_gmem")
    _core.effect("wait_smem_to_gmem", (), n=n, read_only=int(bool(wait_read_only)))


def wait_gmem_to_smem(n):
    """Wait until at most the ``n`` latest copies without a barrier are in flight (sm_80, sm_86,
    sm_89).

    They are the copies that this thread started by :func:`copy_gmem_to_smem`, in their order. The
    lanes of the thread synchronise; use a barrier after it to hand the data to other threads.
    TypeError, ValueError for other ``n``; ValueError when the kernel is lowered for a GPU whose
    copies have barriers.
    """
    _core.effect("wait_gmem_to_smem", (), n=_count(n, "wait_gmem_to_smem"))


def commit_smem():
    """Make this thread's writes to SMEM visible to TMA and tensor cores (Hopper)."""
    _core.effect("commit_smem", ())


def barrier_arrive(barrier, *, relaxed=False):
    """Count one arrival of this thread on a barrier, after its earlier memory accesses (Hopper).

    ``relaxed``, of a :class:`ClusterBarrier`: for threads of other blocks, the arrival orders only
    what products and copies have read of shared memory, not the loads and stores of this thread.
    Where semaphores order those, this saves a fence of all memory. Without ``relaxed``, arrivals
    are relaxed in kernels whose blocks share nothing else. TypeError unless it is a bool.
    """
    what = "barrier_arrive"
    if not isinstance(relaxed, bool):
        raise TypeError(f"{what}: relaxed must be a bool, got {show(relaxed)}")
    order = "relaxed" if relaxed else "auto"
    _core.effect(what, (_barrier(barrier, what),), memory_order=order)


def barrier_wait(barrier, *, phase=None):
    """Wait for the next phase that this thread has not seen yet (Hopper). Memory accesses before
    the arrivals are then visible.

    ``phase``: an int32 scalar, the number of phases of this barrier that the thread has waited for
    before. For example, step ``it`` of a ring of n slots waits for phase ``it // n`` of slot
    ``it % n``. If all waits on a barrier specify it, tracking the phase takes no registers and no
    instructions. The interpreter raises ValueError if it is wrong.
    """
    what = "barrier_wait"
    if phase is not None:
        phase = as_array(phase, f"{what}: phase")
        if phase.shape != () or phase.dtype != "int32":
            raise TypeError(f"{what}: phase must be an int32 scalar, got {type_text(phase)}")
    _core.effect(what, (_barrier(barrier, what), phase))


def barrier_test(barrier):
    """A bool scalar: is the next phase that this thread has not seen complete (Hopper)?

    If True, the thread has seen the phase, as after :func:`barrier_wait`; otherwise nothing
    changes. NotImplementedError for a :class:`ClusterBarrier`."""
    return _core.effect("barrier_test", (_barrier(barrier, "barrier_test"),))


def delay(nanos):
    """Let this thread sleep for about ``nanos`` nanoseconds, an int or an integer scalar. No effect
    on the interpreter."""
    nanos = as_array(nanos, "delay: nanos")
    if nanos.shape != () or nanos.dtype.kind not in "iu":
        raise TypeError(f"delay: nanos must be an integer scalar, got {type_text(nanos)}")
    _core.effect("delay", (_core.convert(nanos, "int32"),))


def _transposed_b(args, kwargs, value):
    """For `accepts`: wgmma's rhs_transpose."""
    if value:
        b = args if len(args) > 2 else kwargs
        at = 2 if b is args else "b"
        b[at] = _ref(b[at], "wgmma", "b").T
    return "pass b.T"


@accepts(rhs_transpose=_transposed_b, swizzle=None)
def wgmma(acc, a, b):
    """``acc += a @ b`` on the tensor cores, asynchronously (Hopper).

    ``acc``: an ACC ref (M, N), M a multiple of 64, N a multiple of 8 up to 256. ``a``: an SMEM ref
    (M, K) or an array in registers. ``b``: an SMEM ref (K, N). K is a multiple of 32 bytes.

    float16 accumulates in float32 or float16, bfloat16 in float32; either dimension of an operand
    may be contiguous (``ref.T``). The other dtypes need K contiguous in both (``b_ref.T`` of an
    (N, K) ref): float8_e4m3fn and float8_e5m2, also mixed, accumulate in float32 or float16; int8
    or uint8 in int32; float32, read as tf32, in float32.

    Each call is one group. :func:`wgmma_wait`, or reading ``acc``, waits for it; the operands must
    not change until then. TypeError, ValueError for other operands.
    """
    if not isinstance(acc, Ref) or acc.memory_space is not REGS:
        raise TypeError(f"wgmma: acc must be an ACC ref, got {show(acc)}")
    if not isinstance(a, (Ref, Array)):
        raise TypeError(f"wgmma: a must be an SMEM ref or an array, got {show(a)}")
    if isinstance(a, Ref):
        _ref(a, "wgmma", "a", SMEM)
    _ref(b, "wgmma", "b", SMEM)
    _core.effect("wgmma", (acc, a, b))


def mma(acc, a, b, /):
    """``acc + a @ b`` on the tensor cores, synchronously, with everything in registers.

    ``acc`` is (M, N), ``a`` (M, K), ``b`` (K, N). M is a multiple of 64, N of 8, and K of 8
    (float32), 16 (16-bit types), 32 (8-bit) or 64 (4-bit). ``a`` and ``b`` have the same dtype:
    float32 (read as tf32), float16, bfloat16, float8_e4m3fn or float8_e5m2 with a float32 ``acc``;
    int8, uint8, int4 or uint4 with an int32 ``acc``. Arrays loaded for the product are loaded in
    the layouts ``MMA_LHS(dtype)``, ``MMA_RHS(dtype)`` and ``MMA_ACC(dtype)``.
    """
    operands = [as_array(x, f"mma: {name}") for name, x in (("acc", acc), ("a", a), ("b", b))]
    return _core.mma(*operands)


def wgmma_wait(n):
    """Wait until at most ``n`` wgmma calls of this thread are in flight (Hopper)."""
    _core.effect("wgmma_wait", (), n=_count(n, "wgmma_wait"))


def wgmma_accumulator_load(acc, *, wait_n=0):
    """Wait until at most ``wait_n`` wgmma calls are in flight (None: do not wait), and return the
    value of the accumulator.

    Calls still in flight must write to other accumulators or to other parts of this one; otherwise
    the interpreter raises ValueError."""
    if not isinstance(acc, Ref) or acc.memory_space is not REGS:
        raise TypeError(f"wgmma_accumulator_load: acc must be an ACC ref, got {show(acc)}")
    return _core.acc_load(acc, -1 if wait_n is None else _count(wait_n, "wgmma_accumulator_load"))


def set_max_registers(n, *, action):
    """Set the number of registers of each lane of this thread (Hopper).

    ``n``: a multiple of 8 from 24 to 256. ``action``: "increase" or "decrease". Call it first in
    the branch of a role. ValueError for other values."""
    if action not in ("increase", "decrease"):
        raise ValueError(
            f"set_max_registers: action must be 'increase' or 'decrease', got {show(action)}"
        )
    n = _count(n, "set_max_registers")
    if n % 8 or not 24 <= n <= 256:
        raise ValueError(f"set_max_registers: n must be a multiple of 8 in 24..256, got {n}")
    _core.effect("set_max_registers", (), n=n, increase=int(action == "increase"))


def layout_cast(x, new_layout):
    """``x`` in the register layout ``new_layout``. If possible, ``x`` is produced in that
    layout."""
    return _core.layout_cast(as_array(x, "layout_cast"), layout_spec(new_layout))


@shown_as(lambda src, idx=NOT_SPECIFIED, *, layout=None, optimized=True: None)
def load(src, idx=NOT_SPECIFIED, *, layout=None, optimized=True, mask=None, other=None, **options):
    """Load ``src[...]``, in the register layout ``layout`` if given.

    ``idx`` is deprecated; use ``load(src.at[idx])``. With ``mask``, ``other`` or options of Pallas'
    Triton backend, it is ``pl.load``."""
    if mask is not None or other is not None or options or isinstance(src, ClippedRef):
        x = masked_load(
            src, ... if idx is NOT_SPECIFIED else idx, mask=mask, other=other, **options
        )
        return x if layout is None else layout_cast(x, layout)
    if not isinstance(src, IndexedRef):
        _ref(src, "load", "src")
    if idx is not NOT_SPECIFIED:
        deprecated("load: idx is deprecated; use load(src.at[idx])", 2)
        src = src.at[idx]
    if isinstance(src, IndexedRef):
        return src[...] if layout is None else layout_cast(src[...], layout)
    if src.memory_space is REGS:
        return _core.acc_load(src, 0)
    return _core.load(src, None if layout is None else layout_spec(layout), bool(optimized))


def broadcasted_iota(dtype, shape, dimension, *, layout=None):
    """An array of each element's index along ``dimension``, in register layout ``layout`` if given.
    ValueError if there is no such dimension."""
    (dimension,) = ints(dimension, "broadcasted_iota: dimension")
    shape = ints(shape, "broadcasted_iota: shape")
    return _core.iota(dtype, shape, dimension, None if layout is None else layout_spec(layout))


def cluster_ref(ref, block_id):
    """The same SMEM as ``ref`` in another block of the cluster (Hopper): ``{cluster_axis: index}``.

    For loads and stores with ``[...]``. Along the other axes, the block has the caller's indices.
    The other block must be running and its memory in the right state: use a
    :class:`ClusterBarrier`. ValueError for barriers, NotImplementedError for several axes.
    """
    _ref(ref, "cluster_ref", "ref", SMEM)
    if ref.dtype == "barrier":
        raise ValueError(
            "cluster_ref: barriers cannot be shared this way; use plgpu.ClusterBarrier"
        )
    if len(block_id) != 1:
        raise NotImplementedError(f"cluster_ref: exactly one cluster axis, got {list(block_id)}")
    ((name, index),) = block_id.items()
    return _core.cluster_ref(ref, cluster_axis(name, "cluster_ref"), index)


def griddepcontrol_wait():
    """Wait until earlier grids of the stream have finished and their writes are visible (Hopper). A
    kernel with this call is launched with programmatic stream serialisation."""
    _core.effect("griddepcontrol_wait", ())


def griddepcontrol_launch_dependents():
    """Allow the next grid of the stream to start (Hopper)."""
    _core.effect("griddepcontrol_launch_dependents", ())


class named_scope:
    """``with named_scope(name):``, or a decorator: names a part of a kernel's body, for the traces
    of the profiler (``CompilerParams(profile_space=)``) and the interpreter
    (``InterpretParams(timeline=)``). Without these it does not change the generated code. Scopes
    may be nested. TypeError unless ``name`` is a str."""

    def __init__(self, name):
        if not isinstance(name, str):
            raise TypeError(f"named_scope: name must be text, got {show(name)}")
        self.name = name

    def _mark(self, ends):
        names = scope_names()
        if names is not None:
            number = names.setdefault(self.name, len(names))
            _core.effect("named_scope", (), format=self.name, n=number, ends=ends)

    def __call__(self, f):
        @functools.wraps(f)
        def scoped(*args, **kwargs):
            with self:
                return f(*args, **kwargs)

        return scoped

    def __enter__(self):
        self._mark(0)
        return self

    def __exit__(self, kind, *exception):
        if kind is None:
            self._mark(1)
        return False


_FORMAT = (  # a format specification of Python for numbers
    r"(?:(?P<fill>[ -~])?[<>=^])?[-+ ]?#?(?P<zero>0)?(?P<width>\d*)(?P<group>[,_]?)"
    r"(?:\.(?P<precision>\d+))?[bdeEfFgGnoxX%]?"
)
_MOST_PLACES = 200


def _check_format(spec, dtype, k):
    """ValueError if Python refuses the format for numbers of this dtype."""
    what = f"debug_print: argument {k}, {dtype.name}, with the format {spec!r}"
    try:
        format(True if dtype.name == "bool" else 0 if is_integer(dtype) else 0.0, spec)
    except ValueError as e:
        raise ValueError(f"{what}: {e}") from None
    m = re.fullmatch(_FORMAT, spec)
    if m is None or (m["group"] and (m["zero"] or m["fill"] == "0")):
        raise NotImplementedError(
            f"{what}: accepted are [[fill]align][sign][#][0][width][, or _][.precision][type] with"
            " an ASCII fill, a type of bdeEfFgGnoxX%, and no zeros in front of grouped digits"
        )
    if max(int(m["width"] or 0), int(m["precision"] or 0)) > _MOST_PLACES:
        raise NotImplementedError(f"{what}: at most {_MOST_PLACES} places")


def _pieces(fmt):
    """(text, field, specification, conversion) of a format string."""
    return list(importlib.import_module("string").Formatter().parse(fmt))  # few kernels print


def _print_fields(fmt, args):
    """The literal texts of a format, and the specification of the field after each, or None."""
    try:
        pieces = _pieces(fmt)
    except ValueError as e:
        raise ValueError(f"debug_print: {fmt!r}: {e}") from None
    fields = [p for p in pieces if p[1] is not None]
    for _, name, spec, conversion in fields:
        if conversion or "{" in spec:
            raise ValueError(
                f"debug_print: a field is {{}} or {{:format}}, with no conversion and no field in"
                f" it; got {fmt!r}"
            )
        if name:
            raise ValueError(f"debug_print: fields have no names or numbers, got {fmt!r}")
    if len(fields) != len(args):
        raise TypeError(f"debug_print: {fmt!r} has {len(fields)} fields for {len(args)} arguments")
    return [(literal, None if name is None else spec) for literal, name, spec, _ in pieces]


@shown_as(lambda fmt, *args: None)
def debug_print(fmt, *args, label=False, **kwargs):
    """Print from each thread of each block. ``fmt`` has one ``{}`` or ``{:spec}`` for each
    argument.

    Scalars give one line. An array must be the only argument; it gives one line for each element,
    with ``[i, j]: value`` in place of the field, in any order on the GPU. Numbers and formats are
    those of Python: ``10.0``, ``True``, ``{:>8.3f}``. Floats without a format have the fewest
    digits that read back as the same number of their dtype.

    With ``label=True`` each line starts with the position along the axes of the kernel, such as
    "[grid point (0, 1), block (1,), thread 2] " (block: within its cluster). In a kernel with
    :func:`dynamic_scheduling_loop`, the grid point is the one with which the block started.

    TypeError, ValueError for invalid formats, NotImplementedError for an array among other
    arguments.
    """
    if kwargs:
        raise ValueError(f"debug_print: keyword arguments are not accepted, got {show(kwargs)}")
    if not isinstance(fmt, str) or "\0" in fmt:
        raise TypeError(f"debug_print: fmt must be text without zero bytes, got {show(fmt)}")
    pieces = _print_fields(fmt, args)
    if not tracing():
        print(fmt.format(*args))
        return
    values = []
    for k, x in enumerate(args):
        if isinstance(x, Ref):
            raise TypeError(f"debug_print: argument {k} is a ref; load it first: ref[...]")
        x = as_array(x, f"debug_print: argument {k}")
        if x.shape != () and len(args) > 1:
            raise NotImplementedError(
                f"debug_print: argument {k} is {type_text(x)}; an array is printed alone, scalars"
                " together"
            )
        values.append(x)
    text, k = "", 0
    for literal, spec in pieces:  # doubled braces are resolved here
        text += literal.replace("{", "{{").replace("}", "}}")
        if spec is None:
            continue
        if spec:
            _check_format(spec, values[k].dtype, k)
        text += f"{{:{spec}}}" if spec else "{}"
        k += 1
    _core.effect("debug_print", tuple(values), format=text, label=int(bool(label)))


def debug_check(condition, message):
    """Make the kernel fail if the bool scalar ``condition`` is false. Has an effect only if
    ``pl.enable_debug_checks`` is on when the kernel is traced.

    The interpreter raises AssertionError. On a GPU, a device assertion fails, after which the
    process cannot use that GPU. TypeError for other arguments."""
    if not isinstance(message, str) or "\0" in message:
        raise TypeError(f"debug_check: message must be text, got {show(message)}")
    if not tracing():
        raise NotImplementedError("debug_check: only in the body of a kernel; use assert")
    if not _flags.enable_debug_checks.value:
        return
    condition = as_bools(condition, "debug_check: condition", hint="; reduce arrays by jnp.all")
    _core.effect("debug_check", (condition,), format=message)


def print_layout(fmt, x):
    """Print ``fmt.format(description)`` once, when the kernel is lowered. The description is the
    register layout of an array (``WGMMA``, ``WGMMA_ROW``, ``WG_STRIDED((64, 64), 8)``), or the
    tuple of transforms of an SMEM ref, or the layout of a TMEM ref (``TMEM_DEFAULT(packing=1)``).
    No effect at run time. ValueError for other refs."""
    what = "print_layout"
    if not isinstance(fmt, str) or "\0" in fmt:
        raise TypeError(f"{what}: fmt must be text without zero bytes, got {show(fmt)}")
    fields = [p[1:] for p in _pieces(fmt) if p[1] is not None]
    if fields != [("", "", None)]:
        raise ValueError(f"{what}: fmt must have exactly one bare {{}}, got {fmt!r}")
    if not isinstance(x, Ref):
        x = as_array(x, f"{what}: x")
    elif x.dtype == "barrier" or x.memory_space not in (SMEM, TMEM):
        raise ValueError(f"{what}: x must be an array, an SMEM or a TMEM ref, got {type_text(x)}")
    _core.effect("print_layout", (x,), format=fmt)


def optimization_barrier(tree_of_arrays):
    """Return a pytree of arrays unchanged. The compiler moves no computation across it."""
    return tree.map(
        lambda x: _core.opt_barrier(as_array(x, "optimization_barrier")), tree_of_arrays
    )


def planar_snake(lin_idx, shape, minor_dim, tile_width):
    """``(i0, i1)``: a linear index mapped to a 2-D grid, tile by tile, in boustrophedon order.

    ``minor_dim`` (0 or 1) is divided into tiles of ``tile_width``. Within a tile, the minor
    dimension varies fastest, then the major dimension, which odd tiles traverse backwards. Works on
    Python ints and on traced scalars. ValueError for other ``minor_dim`` and ``tile_width < 1``.
    """
    if minor_dim not in (0, 1):
        raise ValueError(f"planar_snake: minor_dim must be 0 or 1, got {minor_dim}")
    major_size, minor_size = shape[1 - minor_dim], shape[minor_dim]
    if isinstance(minor_size, int):
        tile_width = min(tile_width, minor_size)

    def where(c, a, b):
        return _core.where(c, a, b) if isinstance(c, Array) else a if c else b

    def at_least(x, low):
        return _core.binary("max", x, low) if isinstance(x, Array) else max(x, low)

    def at_most(x, high):
        traced = isinstance(x, Array) or isinstance(high, Array)
        return _core.binary("min", x, high) if traced else min(x, high)

    if isinstance(tile_width, int) and tile_width < 1:
        raise ValueError(f"planar_snake: tile_width must be at least 1, got {tile_width}")
    per_tile = tile_width * major_size
    full, rest = minor_size // tile_width, minor_size % tile_width
    tile = lin_idx // per_tile
    # Remainders of non-negative numbers are known to be non-negative, as starts of copies must be.
    inside = lin_idx % per_tile
    minor, major = tile * tile_width + inside % tile_width, inside // tile_width
    if not (isinstance(rest, int) and rest == 0):  # the last tile is narrower
        width = rest if isinstance(rest, int) else where(rest == 0, 1, rest)
        over = at_least(lin_idx - full * per_tile, 0)
        in_full = tile < full
        minor = where(in_full, minor, full * tile_width + over % width)
        major = where(in_full, major, at_most(over // width, major_size - 1))
        tile = where(in_full, tile, full)
    major = where(tile % 2 == 0, major, major_size - 1 - major)
    return (minor, major) if minor_dim == 0 else (major, minor)


def find_swizzle(minor_dim_bits, what=""):
    """The first of 128, 64, 32 and 16 bytes that divides a row of ``minor_dim_bits`` bits. 16 means
    no swizzle. ValueError if none divides it."""
    for swizzle in (128, 64, 32, 16):
        if minor_dim_bits % (8 * swizzle) == 0:
            return swizzle
    of = f" of {what}" if what else ""
    raise ValueError(
        f"find_swizzle: no swizzle divides the minor dim{of}, {minor_dim_bits} bits; it must be"
        " a multiple of 16 bytes"
    )


def transpose_ref(ref, permutation):
    """A view of ``ref`` with its dimensions permuted; no data is moved."""
    return _ref(ref, "transpose_ref", "ref").transpose(tuple(permutation))


def transform_ref(ref, transform):
    """A view of ``ref`` with a transform applied; no data is moved.

    ``TilingTransform(tiling)`` views (..., M, N) as (..., M / t0, N / t1, t0, t1). TypeError unless
    ``ref`` is a ref, ValueError if the tiling does not divide it, NotImplementedError for other
    transforms: specify those where SMEM is allocated.
    """
    what = "transform_ref"
    _ref(ref, what, "ref")
    if isinstance(transform, PeerMemRef):
        return remote_ref(ref, transform.device_id, transform.device_id_type)
    if not isinstance(transform, TilingTransform):
        raise NotImplementedError(
            f"{what}: only TilingTransform and PeerMemRef make a view, got {show(transform)}; give"
            " transforms where the ref is allocated: plgpu.SMEM(shape, dtype, transforms=...)"
        )
    tiling, first = transform.tiling, ref.ndim - len(transform.tiling)
    if first < 0 or any(d % t for d, t in zip(ref.shape[first:], tiling)):
        raise ValueError(f"{what}: the tiling {tiling} does not divide {type_text(ref)}")
    split = [x for d, t in zip(ref.shape[first:], tiling) for x in (d // t, t)]
    pairs = range(first, first + len(split))
    view = ref.reshape(*ref.shape[:first], *split)
    return view.transpose((*range(first), *pairs[::2], *pairs[1::2]))


def _flat(names):
    """One name, or tuples of names in tuples, as a list."""
    several = isinstance(names, (tuple, list))
    return [n for part in names for n in _flat(part)] if several else [names]


def _bound(names, what):
    """Kind, index among its kind and size of each axis."""
    axes, found = env(what).axes, []
    for name in _flat(names):
        if isinstance(name, Hashable) and name in axes:
            found.append(axes[name])
            continue
        bound = f"bound are {sorted(map(str, axes))}" if axes else "the kernel names no axes"
        raise NameError(
            f"unbound axis name: {name!r}; {bound} (grid_names=, cluster_names=, thread_name=)"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"{what}: an axis is repeated in {names!r}")
    return found


def axis_index(name):
    """The int32 index of this program along a grid, cluster or thread axis, or an axis of the mesh
    of devices. A tuple of names gives the row-major index over those axes. NameError for an unknown
    name, ValueError for one that is repeated."""
    total = None
    for kind, k, size in _bound(name, "axis_index"):
        index = program_id(k) if kind == "program" else _core.axis_index(kind, k)
        total = index if total is None else total * size + index
    return 0 if total is None else total


def axis_size(name):
    """Size of an axis as a Python int; the product for a tuple of names. NameError for an unknown
    name, ValueError for one that is repeated."""
    return math.prod(size for _, _, size in _bound(name, "axis_size"))


def program_id(axis):
    """The int32 index of this program along grid axis ``axis``. ValueError if there is no such
    axis."""
    axis, _ = _grid_axis(axis, "program_id")
    e = env("program_id")
    return e.programs[axis] if e.programs else _core.axis_index("grid", e.leading + axis)


def num_programs(axis):
    """The size of grid axis ``axis``. ValueError if there is no such axis."""
    return _grid_axis(axis, "num_programs")[1]


def _grid_axis(axis, what):
    grid = env(what).grid
    axes = ints(axis, f"{what}: axis")
    if len(axes) != 1:
        raise TypeError(f"{what}: axis must be one int, got {show(axis)}")
    if not 0 <= axes[0] < len(grid):
        accepted = f"must be 0..{len(grid) - 1}" if grid else "is of no use: there is no grid"
        raise ValueError(f"{what}: axis {accepted}, got {axes[0]}")
    return axes[0], grid[axes[0]]
