"""Operands with a scale for each block of 16 or 32 elements along K, which Blackwell's tensor cores
multiply with themselves: mxfp8, mxf4 and nvfp4.

Scales come in the order in which the tensor cores read them (``plgpu.ext.format_tcgen05_scales``):
tiles of 128 rows and four blocks along K, 512 bytes each. They pass through the ring beside the
operands and are copied to tensor memory, where each tile takes four columns."""

import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import pl

FP4 = "float4_e2m1fn"
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_DTYPES = ("float8_e8m0fnu", "float8_e4m3fn")
ROWS, _WORD = 128, 4  # of a tile: rows, blocks along K
_TILE = 32, 16  # its shape in memory

# dtype of the scales, elements of a block: by whether operands have 4 bits, and in what order a
# shape that fits several is understood
_KINDS = {
    False: [("float8_e8m0fnu", 32)],
    True: [("float8_e8m0fnu", 32), ("float8_e8m0fnu", 16), ("float8_e4m3fn", 16)],
}


class BlockScaling(NamedTuple):
    """``dtype``: of the scales. ``block``: elements of K that share one."""

    dtype: np.dtype
    block: int

    def tiles(self, k):
        """Tiles of scales along k elements of K."""
        return pl.cdiv(k, _WORD * self.block)

    def memory(self, rows, k):
        """Shape of the scales of rows and k elements of K in memory."""
        return pl.cdiv(rows, ROWS), self.tiles(k), *_TILE

    def refs(self, name, stages, rows, k, pair):
        """Scratch: the scales of a slot in shared memory, and in tensor memory those of a step."""
        tiles, along_k, *tile = self.memory(rows, k)
        return {
            f"{name}_smem": plgpu.SMEM((stages, tiles, along_k, *tile), self.dtype),
            f"{name}_tmem": plgpu.TMEM(
                (tiles * ROWS, along_k * _WORD),
                self.dtype,
                layout=plgpu.TMEMLayout.SCALES_LAYOUT,
                collective=pair,
            ),
        }

    def columns(self, rows, k):
        """Of tensor memory, for the scales of rows and k elements of K."""
        return _WORD * math.prod(self.memory(rows, k)[:2])

    def bytes(self, rows, k):
        return math.prod(self.memory(rows, k))


def scaling_of(a, b, scale_a, scale_b, m, n, k):
    """The BlockScaling of such operands, ArrayInfos; None if they have no such scales.

    TypeError, ValueError for operands and scales that do not fit together."""
    four = a.dtype.name == FP4, b.dtype.name == FP4
    dtypes = [getattr(getattr(x, "dtype", None), "name", None) for x in (scale_a, scale_b)]
    if not any(four) and not any(x in _DTYPES for x in dtypes):
        return None
    if not all(four) and not (a.dtype.name in _FP8 and b.dtype.name in _FP8):
        raise TypeError(
            f"matmul: scales of {dtypes[0]} and {dtypes[1]} are for operands of 8-bit floats, or"
            f" both {FP4}; got {a.dtype} and {b.dtype}"
        )
    words = "plgpu.ext.format_tcgen05_scales arranges them"
    kinds = [kind for kind in _KINDS[four[0]] if dtypes == [kind[0]] * 2]
    if not kinds:
        known = " or ".join(dict.fromkeys(kind[0] for kind in _KINDS[four[0]]))
        raise TypeError(
            f"matmul: a and b of {a.dtype} and {b.dtype} take scale_a and scale_b of one dtype,"
            f" {known}, got {dtypes[0]} and {dtypes[1]}; {words}"
        )
    shapes = []
    for _, block in kinds:
        found = BlockScaling(np.dtype(scale_a.dtype), block)
        shapes.append((found.memory(m, k), found.memory(n, k)))
        if shapes[-1] == (scale_a.shape, scale_b.shape):
            return found
    known = " or ".join(f"{x} and {y} (blocks of {b})" for (x, y), (_, b) in zip(shapes, kinds))
    raise ValueError(
        f"matmul: scale_a and scale_b of {dtypes[0]} must have the shapes {known}, got"
        f" {scale_a.shape} and {scale_b.shape}; {words}"
    )


def check_operands(x):
    """NotImplementedError for layouts of 4-bit operands that the tensor cores do not take."""
    if x.dtypes[0].name != FP4:
        return
    if x.ta or not x.tb:
        raise NotImplementedError(
            f"matmul: {FP4} operands must be contiguous along K: a (M, K) without transpose_a, b"
            " (N, K) with transpose_b=True"
        )
    if x.k % 32:
        raise NotImplementedError(
            f"matmul: K of {FP4} operands must be a multiple of 32, got {x.k}; pad with zeros"
        )


def refuse_elsewhere(x):
    raise NotImplementedError(
        f"matmul: {x.dtypes[0]} with scales of {x.scaling.dtype} is for Blackwell's tensor cores"
        " (config=plgpu.ops.TensorMemoryConfig() on the interpreter); on Hopper use 8-bit floats"
        " with float32 scales of blocks of 128, or mixed_matmul"
    )
