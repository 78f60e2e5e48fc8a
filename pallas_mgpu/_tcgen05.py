"""Operations of Blackwell's tensor cores and tensor memory, and cluster launch control.

As in `_ops.py`, a function checks its arguments and adds one op; what shapes, dtypes and layouts
decide is checked by the op's type rule (csrc/ir/tcgen05.c)."""

import math

from . import _core, lax
from ._control import cluster_axis
from ._names import show
from ._ops import _barrier, _ref
from ._trace import as_array, as_bools, env, type_text
from ._types import SMEM, TMEM, axis_names, layout_spec

_NONE, *_REDUCTIONS = _core.enum_names("TMEM_REDUCE")


def _pair(collective_axis, what):
    """1 if the op is for a pair of blocks; ValueError for other axes."""
    if collective_axis is None:
        return 0
    names = axis_names(collective_axis)
    if len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(
            f"{what}: collective_axis is one cluster axis, got {show(collective_axis)}"
        )
    axis = cluster_axis(names[0], what)
    sizes = {k: size for kind, k, size in env(what).axes.values() if kind == "cluster"}
    if axis != max(sizes) or sizes[axis] != 2:
        raise ValueError(
            f"{what}: collective_axis {names[0]!r} has size {sizes[axis]}; it must be the last"
            " cluster axis and have size 2"
        )
    return 1


def tcgen05_mma(
    acc,
    a,
    b,
    barrier=None,
    *,
    a_scale=None,
    b_scale=None,
    a_sparse_metadata=None,
    accumulate=True,
    collective_axis=None,
):
    """Start ``acc = a @ b + (acc if accumulate else 0)`` on the tensor core (Blackwell). Returns
    nothing.

    ``acc``: a TMEM ref (M, N), M 128 or 64. ``a``: (M, K) in SMEM, or in TMEM (``packed=True``, M
    128). ``b``: (K, N) in SMEM. Views transposed by ``.T`` are accepted; 4-bit operands must be
    contiguous along K. N is a multiple of 8 (int8 16; with M 64 twice that) and at most 512, K a
    multiple of what a row of the swizzled operands holds.

    ==================  ==================  ==============================
    a, b                acc                 scales
    ==================  ==================  ==============================
    float16             float32, float16
    bfloat16            float32
    float8 (may mix)    float32, float16
    int8, uint8         int32
    float8 (may mix)    float32             float8_e8m0fnu, one for 32
    float4_e2m1fn       float32             float8_e8m0fnu, one for 32 or 16;
                                            float8_e4m3fn, one for 16
    ==================  ==================  ==============================

    ``accumulate``: a bool, or a traced bool scalar. ``barrier``: as if followed by
    ``tcgen05_commit_arrive(barrier, collective_axis)``; without it a later commit must follow.
    Products, copies to TMEM and commits of one thread or warp take effect in order.

    ``a_scale`` (128, K / block) and ``b_scale`` (N rounded up to 128, K / block): TMEM refs in
    ``TMEMLayout.SCALES_LAYOUT``. ``a_sparse_metadata``: a TMEM ref of uint2 in
    ``TMEMLayout.SPARSE_METADATA_LAYOUT``; then ``a`` is (M, K / 2), two of each four elements along
    K, and scales are for twice as many elements.

    ``collective_axis``: the last cluster axis, of size 2. Both blocks call it, and the first one
    issues one product for both: each has its rows in ``acc`` (M, 2 N) and ``a``, and half of the
    columns in ``b`` (K, N). TMEM is allocated with ``collective=True``.

    ValueError for shapes, dtypes, layouts and spaces that do not fit.
    """
    what = "tcgen05_mma"
    _ref(acc, what, "acc", TMEM)
    _ref(a, what, "a")
    if a.memory_space not in (SMEM, TMEM):
        raise ValueError(f"{what}: a must be an SMEM or TMEM ref, got {type_text(a)}")
    _ref(b, what, "b", SMEM)
    if (a_scale is None) != (b_scale is None):
        raise ValueError(f"{what}: a_scale and b_scale are given together")
    extras = [x for x in (a_scale, b_scale, a_sparse_metadata) if x is not None]
    for x, name in ((a_scale, "a_scale"), (b_scale, "b_scale")):
        if x is not None:
            _ref(x, what, name, TMEM)
    if a_sparse_metadata is not None:
        _ref(a_sparse_metadata, what, "a_sparse_metadata", TMEM)
    pair = _pair(collective_axis, what)
    if barrier is not None:
        barrier = _barrier(barrier, what)
    flag = accumulate
    if not isinstance(flag, bool):
        flag = as_bools(flag, f"{what}: accumulate")
    _core.effect(what, (acc, a, b, flag, *extras), pair=pair)
    if barrier is not None:
        _core.effect("tcgen05_commit_arrive", (barrier,), pair=pair)


def tcgen05_commit_arrive(barrier, collective_axis=None):
    """Count one arrival on ``barrier`` when all products and copies to TMEM that this thread or
    warp has issued are complete (Blackwell).

    ``barrier`` is allocated with ``orders_tensor_core=True`` (ValueError). ``collective_axis``: one
    arrival on the barriers of both blocks of the pair."""
    what = "tcgen05_commit_arrive"
    pair = _pair(collective_axis, what)
    _core.effect(what, (_barrier(barrier, what),), pair=pair)


def _copy(what, smem_ref, tmem_ref, collective_axis):
    smem_ref = _ref(smem_ref, what, "smem_ref", SMEM)
    tmem_ref = _ref(tmem_ref, what, "tmem_ref", TMEM)
    _core.effect(what, (smem_ref, tmem_ref), pair=_pair(collective_axis, what))


def async_copy_smem_to_tmem(smem_ref, tmem_ref, collective_axis=None):
    """Start a copy of an SMEM ref to a TMEM ref of the same shape (128, n) and dtype (Blackwell).

    ``tmem_ref`` has 128 rows and uses all 32 bits of its columns (``packed=True``). The copy is
    complete when a later :func:`tcgen05_commit_arrive` arrives; later products of this thread or
    warp see it. ``collective_axis``: in both blocks of a pair, each from its own SMEM; both call
    it. ValueError for other shapes and layouts."""
    _copy("async_copy_smem_to_tmem", smem_ref, tmem_ref, collective_axis)


def async_copy_scales_to_tmem(smem_ref, tmem_ref, collective_axis=None):
    """Start a copy of scales to TMEM (Blackwell).

    ``tmem_ref``: (rows, n) in ``TMEMLayout.SCALES_LAYOUT``, rows 128 or 256, and ``smem_ref``
    (rows / 128, n / 4, 32, 16), in the order of ``plgpu.ext.format_tcgen05_scales``. With
    ``SCALES_M64_COLLECTIVE_LAYOUT`` (256, n) and (1, n / 4, 64, 16). Completion and
    ``collective_axis``: see :func:`async_copy_smem_to_tmem`. ValueError for other shapes."""
    _copy("async_copy_scales_to_tmem", smem_ref, tmem_ref, collective_axis)


def async_copy_sparse_metadata_to_tmem(smem_ref, tmem_ref, collective_axis=None):
    """Start a copy of sparse metadata to TMEM (Blackwell).

    ``tmem_ref``: uint2 (128, n) in ``TMEMLayout.SPARSE_METADATA_LAYOUT``, and ``smem_ref``
    (1, n / 64, 128, 64), in the order of :func:`format_tcgen05_sparse_metadata`. Completion and
    ``collective_axis``: see :func:`async_copy_smem_to_tmem`. ValueError for other shapes."""
    _copy("async_copy_sparse_metadata_to_tmem", smem_ref, tmem_ref, collective_axis)


def async_load_tmem(src, *, layout=None, reduce=None):
    """Load the TMEM ref ``src`` (rows, columns) into an array (Blackwell).

    The array can be used at once. Before the part of TMEM is overwritten, call
    :func:`wait_load_tmem`. ``layout``: the register layout, one that fits the layout of ``src``; by
    default what the uses of the array need. ``reduce``: "max", "min", "absmax" or "absmin"; then
    the result is ``(array, reduced)``, with ``reduced[i]`` that of row i (float32; max and min also
    of int32 and uint32; sm_103a). ValueError for other arguments."""
    what = "async_load_tmem"
    src = _ref(src, what, "src", TMEM)
    if reduce is not None and reduce not in _REDUCTIONS:
        raise ValueError(
            f"{what}: reduce must be one of {', '.join(_REDUCTIONS)} or None, got {show(reduce)}"
        )
    x = _core.load_tmem(src, None if layout is None else layout_spec(layout), reduce or _NONE)
    if reduce is None:
        return x
    return x, _core.effect("tmem_reduced", (x,), reduce=reduce, dims=(1,))


def async_store_tmem(ref, value):
    """Store an array in the TMEM ref ``ref`` of the same shape and dtype (Blackwell).

    Products and loads see it after :func:`commit_tmem`. A ref with a batch is stored matrix by
    matrix. ValueError for other shapes and dtypes."""
    what = "async_store_tmem"
    ref = _ref(ref, what, "ref", TMEM)
    value = as_array(value, f"{what}: value")
    if value.shape != ref.shape or value.dtype != ref.dtype:
        raise ValueError(
            f"{what}: value is {type_text(value)}, ref {type_text(ref)}; shapes and dtypes must be"
            " equal"
        )
    if ref.ndim > 2:
        for k in range(ref.shape[0]):
            async_store_tmem(ref.at[k], value[k])
        return
    _core.effect(what, (ref, value))


def commit_tmem():
    """Wait until this thread's stores to TMEM are complete (Blackwell)."""
    _core.effect("commit_tmem", ())


def wait_load_tmem():
    """Wait until this thread's loads from TMEM have read it, so that it can be overwritten
    (Blackwell)."""
    _core.effect("wait_load_tmem", ())


def try_cluster_cancel(result_ref, barrier):
    """Request a grid point that has not started yet, for this cluster (Blackwell).

    Every thread of every block of the cluster calls it. ``result_ref``: 16 bytes of SMEM
    (``plgpu.TryClusterCancelResult``), ``barrier``: a ``plgpu.Barrier`` on which each call counts
    as one arrival, so its ``num_arrivals`` is the number of threads. All blocks of the cluster
    receive the response; read it with :func:`query_cluster_cancel` after waiting. Do not make
    another request after a response without success. TypeError for a result of another size."""
    what = "try_cluster_cancel"
    result_ref = _ref(result_ref, what, "result_ref", SMEM)
    _core.effect(what, (result_ref, _barrier(barrier, what)))
    env(what).cancels = True


def query_cluster_cancel(result_ref, grid_names):
    """``((index, ...), success)``: the grid point that :func:`try_cluster_cancel` got, its int32
    index along each axis of ``grid_names``, and a bool scalar (Blackwell). The indices are
    undefined without success. ValueError for names that are not grid axes."""
    what = "query_cluster_cancel"
    result_ref = _ref(result_ref, what, "result_ref", SMEM)
    axes = env(what).axes
    sizes = {k: size for kind, k, size in axes.values() if kind == "grid"}
    places = []
    for name in axis_names(grid_names):
        kind, k, _ = axes.get(name, (None, None, None))
        if kind != "grid":
            known = [n for n, (f, _, _) in axes.items() if f == "grid"]
            raise ValueError(f"{what}: {name!r} is not a grid axis; those are {known}")
        places.append(k)
    point = _core.effect(what, (result_ref,))
    return tuple(_index(point, k, sizes) for k in places), point >= 0


def _index(point, k, sizes):
    """Of axis k of a row-major number."""
    inner = math.prod(size for d, size in sizes.items() if d > k)
    outer = math.prod(size for d, size in sizes.items() if d < k)
    x = point if inner == 1 else lax.div(point, inner)
    return x if outer == 1 else lax.rem(x, sizes[k])
