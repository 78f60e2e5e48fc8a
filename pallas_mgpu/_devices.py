"""Memory and semaphores of other devices, as kernels see them.

A kernel that `plgpu.spmd` calls runs on all devices of a mesh. Its arguments have counterparts on
each of them: `remote_ref` is that of another device, `multicast_ref` those of all at once. Devices
are numbered row-major over the mesh."""

import enum

import numpy as np

from . import _core
from ._names import show
from ._trace import Array, Ref, as_array, env, type_text
from ._types import GMEM, Transform


class DeviceIdType(enum.Enum):
    """How ``device_id`` names a device of the mesh. MESH: by its coordinates, one for each axis, or
    a dict from names of axes to coordinates, in which axes that are left out have the caller's own.
    LOGICAL: by its number, row-major over the mesh."""

    MESH = "mesh"
    LOGICAL = "logical"


def mesh_axes(what):
    """{name: size} of the mesh, in its order; ValueError where the kernel has none."""
    axes = env(what).axes
    found = {name: size for name, (kind, _, size) in axes.items() if kind == "device"}
    if not found:
        raise ValueError(f"{what}: the kernel has no mesh of devices; call it by plgpu.spmd")
    return found


def _int32(x, what):
    """A Python int, or a traced int32 scalar."""
    if isinstance(x, Array):
        if x.shape != () or x.dtype != np.int32:
            raise TypeError(f"{what} must be an int32 scalar, got {type_text(x)}")
        return x
    if isinstance(x, np.generic) and x.dtype != np.int32:
        raise TypeError(f"{what} must be an int32 scalar, got {x.dtype}")
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        raise TypeError(f"{what} must be an int32 scalar, got {show(x)}")
    return x.__index__()


def _in_range(x, size, what):
    if isinstance(x, int) and not 0 <= x < size:
        raise ValueError(f"{what} is {x}; the mesh has 0 to {size - 1} there")
    return x


def _from_dict(device_id, axes, what):
    """A coordinate for each axis: given, a part of one that is given for several axes, or the
    caller's own."""
    of_axis = {}
    for name, index in device_id.items():
        group = tuple(name) if isinstance(name, (tuple, list)) else (name,)
        unknown = [n for n in group if n not in axes]
        if unknown or not group:
            raise ValueError(f"{what}: {name!r} is no axis of the mesh, which has {list(axes)}")
        if any(n in of_axis for n in group) or len(set(group)) < len(group):
            raise ValueError(f"{what}: an axis of {name!r} is named twice")
        size = 1
        for n in group:
            size *= axes[n]
        index = _in_range(_int32(index, f"{what}[{name!r}]"), size, f"{what}[{name!r}]")
        for n in reversed(group):
            of_axis[n] = index % axes[n] if len(group) > 1 else index
            index = index // axes[n] if len(group) > 1 else index
    own = env(what).axes
    return [of_axis[n] if n in of_axis else _core.axis_index("device", own[n][1]) for n in axes]


def device_number(device_id, device_id_type, what):
    """The number of a device in the mesh: an int, or a traced int32 scalar."""
    what = f"{what}: device_id"
    axes = mesh_axes(what)
    if not isinstance(device_id_type, DeviceIdType):
        raise TypeError(f"{what}_type must be pl.DeviceIdType, got {show(device_id_type)}")
    if device_id_type is DeviceIdType.LOGICAL:
        n = 1
        for size in axes.values():
            n *= size
        return _in_range(_int32(device_id, what), n, what)
    if isinstance(device_id, dict):
        at = _from_dict(device_id, axes, what)
    else:
        at = list(device_id) if isinstance(device_id, (tuple, list)) else [device_id]
        if len(at) != len(axes):
            raise ValueError(
                f"{what}: one coordinate for each axis of the mesh {tuple(axes)}, got {len(at)}"
            )
        at = [
            _in_range(_int32(x, what), size, f"{what}: the coordinate on {name!r}")
            for x, (name, size) in zip(at, axes.items())
        ]
    number = 0
    for x, size in zip(at, axes.values()):
        number = number * size + x
    return number


def all_axes(collective_axes, what):
    """ValueError unless these are all axes of the mesh."""
    axes = mesh_axes(what)
    given = collective_axes
    if not isinstance(given, (str, tuple, list)):
        raise TypeError(f"{what}: collective_axes must be names of axes, got {show(given)}")
    given = (given,) if isinstance(given, str) else tuple(given)
    if set(given) != set(axes) or len(given) != len(axes):
        raise ValueError(
            f"{what}: collective_axes must be all axes of the mesh, {tuple(axes)}, got {given}"
        )


def _gmem(ref, what):
    if not isinstance(ref, Ref):
        raise TypeError(f"{what}: ref must be a ref, got {show(ref)}")
    if ref.dtype != "semaphore" and ref.memory_space is not GMEM:
        raise ValueError(
            f"{what}: ref must be in GMEM, an operand or output of the kernel, or a semaphore, got"
            f" {type_text(ref)}"
        )
    return ref


def remote_ref(ref, device_id, device_id_type=DeviceIdType.MESH):
    """The same operand, output or semaphore as ``ref`` on another device of the mesh.

    It can be loaded from and stored to, sliced, copied to and from SMEM, updated by atomics, and
    prefetched. ``device_id``: coordinates as int32 scalars, see :class:`pl.DeviceIdType`; they may
    be traced. TypeError unless ``ref`` is a ref; ValueError for refs that other devices do not have
    (SMEM, or without a mesh), for a ref of another device, and for ids outside of the mesh.
    """
    what = "remote_ref"
    return _core.device_ref(_gmem(ref, what), device_number(device_id, device_id_type, what))


def multicast_ref(ref, collective_axes):
    """The same operand, output or semaphore as ``ref`` on all devices of the mesh at once: a
    destination of ``copy_smem_to_gmem``. ``collective_axes`` must name all axes of the mesh. Needs
    memory that NVLink multicasts: ``plgpu.symm_empty(..., multicast=True)``. ValueError otherwise,
    and for a ref of another device."""
    what = "multicast_ref"
    ref = _gmem(ref, what)
    all_axes(collective_axes, what)
    return _core.multicast_ref(ref)


class PeerMemRef(Transform):
    """The transform that :func:`remote_ref` applies, for :func:`transform_ref`."""

    __slots__ = ("device_id", "device_id_type")

    def __init__(self, device_id, device_id_type):
        self._set(device_id=device_id, device_id_type=device_id_type)


def _reached_by_all(ref, collective_axes, what):
    ref = _gmem(ref, what)
    if ref.dtype == "semaphore":
        raise ValueError(f"{what}: ref is a semaphore; use semaphore_signal_multicast")
    all_axes(collective_axes, what)
    return ref


def multimem_store(source, ref, collective_axes):
    """Store an array to ``ref`` on all devices of the mesh, through the NVLink switch (Hopper).

    ``ref``: the device's own, in GMEM, with the shape and dtype of ``source``; ValueError
    otherwise, and unless ``collective_axes`` names all axes of the mesh. Each lane must hold 4
    bytes or more that are neighbours in memory."""
    what = "multimem_store"
    ref = _reached_by_all(ref, collective_axes, what)
    source = as_array(source, what)
    if source.shape != ref.shape or source.dtype != ref.dtype:
        raise ValueError(
            f"{what}: source is {type_text(source)} and ref is {type_text(ref)}; shape and dtype"
            " must be equal"
        )
    _core.effect(what, (ref, source))


def multimem_load_reduce(ref, *, collective_axes, reduction_op):
    """The elements of ``ref`` on all devices of the mesh, combined by the NVLink switch (Hopper).

    ``reduction_op``: "add" for float32; "add", "min" or "max" for float16, bfloat16,
    float8_e4m3fn and float8_e5m2 (these two need Blackwell); "add", "min", "max", "and", "or" or
    "xor" for int32 and uint32. ValueError for others, and unless ``collective_axes`` names all axes
    of the mesh. The rounding of sums is the switch's own."""
    what = "multimem_load_reduce"
    ref = _reached_by_all(ref, collective_axes, what)
    if reduction_op not in ("add", "min", "max", "and", "or", "xor"):
        raise ValueError(
            f"{what}: reduction_op must be add, min, max, and, or or xor, got {show(reduction_op)}"
        )
    return _core.effect(what, (ref,), kind=reduction_op)


def as_semaphores(ref):
    """An int32 ref in GMEM as semaphores, which keep their values from launch to launch.

    For flags between kernels and devices: ``semaphore_signal``, ``semaphore_wait`` and
    ``pl.semaphore_read`` take elements of it, also of a remote_ref. The caller makes them 0 before
    the first launch. Plain loads and stores of the same elements are not ordered with signals.
    TypeError for other dtypes."""
    return _core.semaphore_of(ref)
