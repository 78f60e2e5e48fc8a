"""Descriptors of tensor memory (TMEM) and of cluster launch control, and the host functions that
arrange scales and sparse metadata as the tensor cores read them."""

import enum

import numpy as np

from . import _core
from ._names import show
from ._types import (
    SMEM,
    MemoryRef,
    MemorySpace,
    ShapeDtypeStruct,
    _Frozen,
    _makers,
    _shape,
    ints,
    itemsize_bits,
)


class TMEMLayoutValue(_Frozen):
    """A layout of tensor memory: a member of :class:`TMEMLayout`, with its arguments."""

    __slots__ = ("name", "columns", "packing")

    def __init__(self, name, columns, packing):
        self._set(name=name, columns=columns, packing=packing)

    def __repr__(self):
        arguments = "" if self.columns is None else f"({self.columns}, packing={self.packing})"
        return f"TMEMLayout.{self.name}{arguments}"


class TMEMLayout(enum.Enum):
    """The layout of the elements of a ref in tensor memory; for ``plgpu.TMEM(..., layout=)``.

    ``SCALES_LAYOUT``: scales of a block-scaled product, (128 or 256, n), 8 bits.
    ``SCALES_M64_COLLECTIVE_LAYOUT``: the scales of b, (256, n), where a pair of blocks computes 64
    rows each. ``SPARSE_METADATA_LAYOUT``: uint2 indices of a sparse a, (128, n).
    ``M64_COLLECTIVE_LAYOUT(columns, packing=1)``: 64 rows, the layout of accumulators of such a
    pair; ``columns`` is a multiple of 16, ``packing`` elements (at most 8) share 32 bits.
    """

    SCALES_LAYOUT = "scales"
    SPARSE_METADATA_LAYOUT = "sparse_metadata"
    M64_COLLECTIVE_LAYOUT = "m64_collective"
    SCALES_M64_COLLECTIVE_LAYOUT = "scales_m64_collective"

    def __call__(self, *args, **kwargs):
        if self is TMEMLayout.M64_COLLECTIVE_LAYOUT:
            return _m64_collective(*args, **kwargs)
        if args or kwargs:
            raise ValueError(f"TMEMLayout.{self.name} takes no arguments")
        return TMEMLayoutValue(self.name, None, 16 if "SPARSE" in self.name else 4)


def _m64_collective(columns, packing=1):
    what = "TMEMLayout.M64_COLLECTIVE_LAYOUT"
    (columns,), (packing,) = ints(columns, f"{what}: columns"), ints(packing, f"{what}: packing")
    if columns < 16 or columns % 16:
        raise ValueError(f"{what}: columns must be a positive multiple of 16, got {columns}")
    if packing not in (1, 2, 4, 8):
        raise ValueError(f"{what}: packing must be 1, 2, 4 or 8, got {packing}")
    return TMEMLayoutValue("M64_COLLECTIVE_LAYOUT", columns, packing)


class TMEMRef(MemoryRef):
    """An allocation of tensor memory, made by ``plgpu.TMEM(shape, dtype)``."""

    __slots__ = ("packed", "collective", "layout")

    def __init__(self, inner_aval, packed=None, collective=None, layout=None):
        super().__init__(inner_aval, MemorySpace.TMEM)
        what, bits = "plgpu.TMEM", itemsize_bits(self.dtype)
        if len(self.shape) < 2:
            raise ValueError(f"{what}: a shape (rows, columns) is needed, got {self.shape}")
        for name, flag in (("packed", packed), ("collective", collective)):
            if flag is not None and not isinstance(flag, bool | np.bool_):
                raise TypeError(f"{what}: {name} must be a bool or None, got {show(flag)}")
        if packed is not None and layout is not None:
            raise ValueError(f"{what}: packed and layout cannot both be given")
        if bits != 32 and packed is None and layout is None:
            raise ValueError(
                f"{what}: packed or layout is needed for {self.dtype.name}, which has {bits} bits:"
                " with packed=True the elements that fit share a column of 32 bits"
            )
        if isinstance(layout, TMEMLayout):
            if layout is TMEMLayout.M64_COLLECTIVE_LAYOUT:
                raise ValueError(f"{what}: TMEMLayout.{layout.name} needs its number of columns")
            layout = layout()
        if layout is not None and not isinstance(layout, TMEMLayoutValue):
            raise TypeError(f"{what}: layout must be a plgpu.TMEMLayout, got {show(layout)}")
        columns = self.shape[-1]
        if layout is not None and layout.columns not in (None, columns):
            raise ValueError(f"{what}: {layout!r} for {columns} columns, shape {self.shape}")
        if layout is None and self.shape[-2] not in (64, 128):
            raise ValueError(
                f"{what}: the rows (dimension -2) must be 128 or 64, got {self.shape[-2]}"
            )
        self._set(packed=packed, collective=bool(collective), layout=layout)
        _core.check_tmem(self.shape, self.dtype, *self.place)

    @property
    def place(self):
        """The name of its layout in the core, and how many elements share 32 bits."""
        if self.layout is not None:
            return TMEMLayout[self.layout.name].value, self.layout.packing
        packing = 32 // itemsize_bits(self.dtype) if self.packed else 1
        if self.shape[-2] == 128:
            return "default", packing
        return "m64_collective" if self.collective else "half_lane", packing


def TryClusterCancelResult(num_buffers=None):  # noqa: N802 - a constructor to its users
    """The descriptor of 16 bytes of SMEM for the answer of :func:`try_cluster_cancel`, or of
    ``num_buffers`` times as many, one per slot (``.at[slot]``). Blackwell."""
    if num_buffers is None:
        return SMEM((16,), np.int8)
    (n,) = ints(num_buffers, "TryClusterCancelResult: num_buffers")
    if n < 1:
        raise ValueError(f"TryClusterCancelResult: num_buffers must be at least 1, got {n}")
    return SMEM((n, 16), np.int8)


def tmem(shape, dtype, transforms, packed, collective, layout):
    """``plgpu.TMEM(...)``."""
    if transforms:
        raise ValueError("plgpu.TMEM: transforms are for SMEM; give packed or layout")
    aval = ShapeDtypeStruct(_shape(shape, "plgpu.TMEM"), _core.as_dtype(dtype))
    return TMEMRef(aval, packed, collective, layout)


_makers[MemorySpace.TMEM] = tmem


# ---- host functions ------------------------------------------------------------------------------


def format_tcgen05_sparse_metadata(meta, operand_dtype=np.float16):
    """Sparse metadata in the order of the tensor cores, for
    :func:`async_copy_sparse_metadata_to_tmem`.

    ``meta``: a uint2 array (M, groups, 2), for each four elements along K of a row the places of
    the two that are kept; M is a multiple of 128, ``2 * groups`` of 64. ``operand_dtype``: that of
    the sparse operand, of 16 or 8 bits. The result has shape (M / 128, 2 * groups / 64, 128, 64).
    ValueError for other arrays, NotImplementedError for other dtypes. Runs on the host.
    """
    what = "format_tcgen05_sparse_metadata"
    meta = np.asarray(meta)
    if meta.dtype.name != "uint2":
        raise ValueError(f"{what}: meta must be uint2, got {meta.dtype.name}")
    if meta.ndim != 3 or meta.shape[2] != 2:
        raise ValueError(f"{what}: meta must have shape (M, groups, 2), got {meta.shape}")
    m, k = meta.shape[0], 2 * meta.shape[1]
    if m % 128 or k % 64:
        raise ValueError(
            f"{what}: M must be a multiple of 128 and the groups of 32, got {meta.shape}"
        )
    bits = itemsize_bits(_core.as_dtype(operand_dtype))
    if bits == 8:
        return meta.reshape(m // 128, 128, k // 64, 64).transpose(0, 2, 1, 3).copy()
    if bits != 16:
        raise NotImplementedError(f"{what}: operands of {bits} bits; 16 and 8 are available")
    split = meta.reshape(m // 128, 8, 2, 8, k // 64, 4, 2, 8)
    return split.transpose(0, 4, 1, 6, 3, 5, 2, 7).reshape(m // 128, k // 64, 128, 64)


def format_tcgen05_scales(scales, *, m64_collective=False):
    """Scales of a block-scaled product in the order of the tensor cores, for
    :func:`plgpu.async_copy_scales_to_tmem`.

    ``scales``: an 8-bit array (rows, n), a row for each row of a or column of b, one scale for each
    block along K; n is a multiple of 4. Rows are padded to a multiple of 128 with zeros. The result
    has shape (rows / 128, n / 4, 32, 16). ``m64_collective``: the scales of b where a pair of
    blocks computes 64 rows each; then rows is a multiple of 64, at most 256, and the result has
    shape (1, n / 4, 64, 16). ValueError for other shapes. Runs on the host.
    """
    what = "format_tcgen05_scales"
    scales = np.asarray(scales)
    if scales.ndim != 2 or scales.shape[1] % 4 or itemsize_bits(scales.dtype) != 8:
        raise ValueError(
            f"{what}: scales must be an 8-bit array (rows, n) with n a multiple of 4, got"
            f" {scales.dtype.name}{list(scales.shape)}"
        )
    rows, n = scales.shape
    if m64_collective:
        if rows % 64 or rows > 256:
            raise ValueError(f"{what}: rows must be 64, 128, 192 or 256, got {rows}")
        c = rows // 64
        out = scales.reshape(2, c, 32, n // 4, 4).transpose(3, 0, 2, 1, 4)
        out = out.reshape(1, n // 4, 64, 4 * c)
        padded = np.zeros((1, n // 4, 64, 16), scales.dtype)
        padded[..., : 4 * c] = out
        return padded
    padded = np.zeros((-(-rows // 128) * 128, n), scales.dtype)
    padded[:rows] = scales
    split = padded.reshape(-1, 4, 32, n // 4, 4).transpose(0, 3, 2, 1, 4)
    return split.reshape(-1, n // 4, 32, 16)
