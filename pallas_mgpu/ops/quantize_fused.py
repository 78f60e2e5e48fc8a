"""A norm or a gated linear unit whose result becomes 8-bit elements and scales as it is computed.

A thread block has one row, or of a gated linear unit with blocks a part of it. The lanes of a block
of elements are neighbours, as in quantize.py. What is quantised is the float32 value: it is never
rounded to 16 bits. Rows that registers do not hold, and rows that are not whole numbers of blocks,
take two kernels."""

import functools

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import gated
from ._common import SeveralKernels, overlap_launches
from ._open_rows import in_shapes, rowwise, with_open_rows
from .gated import SLOPES, gated_linear_unit
from .norms import rms_norm
from .quantize import (
    HELD,
    SQUARE,
    Problem,
    check_options,
    layout_of,
    load_as,
    quantize,
    scale_of,
    to_integers,
)

_PART = 4096  # elements of a part of a row
_WHOLE = 8192  # of a row with one scale, as float32 in registers
_F32 = np.float32


class _Groups:
    """Consecutive groups of a row, [group, element], or a whole row, [element], while it is traced.

    count: groups, a multiple of what the lanes of a warp take."""

    def __init__(self, x, row, first, count):
        self.x, self.row, self.first = x, row, first
        self.layout = self.keep = self.there = None
        if not x.block:
            return
        self.count, self.layout = count, layout_of(x.block, x.vec)
        if x.groups % count:
            left, shape = x.groups - first, (count, x.block)
            at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=self.layout)
            self.keep = at < left
            at = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=self.layout.reduce(1))
            self.there = at < left

    def _at(self, ref, start):
        x = self.x
        columns = ref.shape[-1]
        if not x.block:
            ref = ref if x.is_open else ref.reshape((x.rows, columns))
            return ref, (self.row, pl.ds(start, x.n))
        ref = ref.reshape((-1, columns // x.block, x.block))
        return ref, (self.row, pl.ds(start // x.block + self.first, self.count), slice(None))

    def load(self, ref, start=0):
        """float32; the row begins with column `start` of the array."""
        ref, at = self._at(ref, start)
        if self.layout is None:
            return ref[at].astype(jnp.float32)
        return load_as(self.layout, ref, at, self.keep).astype(jnp.float32)

    def load_weight(self, ref):
        """One number for each element of a row, which is whole."""
        if not self.x.block:
            return ref[...].astype(jnp.float32)
        ref = ref.reshape((self.x.groups, self.x.block))
        at = pl.ds(0, self.count), slice(None)
        return load_as(self.layout, ref, at, self.keep).astype(jnp.float32)

    def quantize(self, value, out, scales):
        x = self.x
        largest = jnp.max(jnp.abs(value), axis=1 if x.block else None)
        scale = scale_of(x, largest).astype(x.scales)
        inverse = 1 / scale.astype(jnp.float32)
        inverse = lax.broadcast_in_dim(inverse, value.shape, [0]) if x.block else inverse
        (out, at), value = self._at(out, 0), to_integers(x, value * inverse).astype(x.to)
        scales = scales if x.is_open else scales.reshape((x.rows, x.groups))
        if self.keep is None:
            out[at] = value
        else:
            pl.store(out, at, value, mask=self.keep)
        if not x.block:
            scales[(self.row,) if x.is_open else (self.row, 0)] = scale
            return
        at = self.row, pl.ds(self.first, self.count)
        if self.there is None:
            scales[at] = scale
        else:
            pl.store(scales, at, scale, mask=self.there)


def _count(x, most):
    """Groups of a part of up to so many elements."""
    least = 4 * max(32 // (x.block // x.vec), 1)
    return pl.cdiv(min(most // x.block, x.groups), least) * least


def _outs(x):
    return (
        plgpu.ShapeDtypeStruct(x.shape, x.to),
        plgpu.ShapeDtypeStruct(x.scales_shape, x.scales),
    )


@cached
def _norm(x, eps, weighted, interpret):
    count = _count(x, x.n) if x.block else 0

    def body(source, *refs):
        overlap_launches()
        weight, (out, scales) = refs[0], refs[-2:]
        groups = _Groups(x, lax.axis_index("row"), 0, count)
        value = groups.load(source)
        squares = jnp.sum(value * value) * _F32(1 / x.n)
        value = value * lax.rsqrt(squares + _F32(eps))
        groups.quantize(value * groups.load_weight(weight) if weighted else value, out, scales)

    return plgpu.kernel(
        body,
        out_type=_outs(x),
        grid=(x.rows,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="rms_norm_quantize",
        **in_shapes(x.shape, *(None,) * weighted),
    )


@cached
def _gated(x, packed, activation, interpret):
    count = _count(x, _PART) if x.block else 0
    parts = pl.cdiv(x.groups, count) if x.block else 1
    slope = SLOPES[activation]
    shapes = [(*x.shape[:-1], 2 * x.n)] if packed else [x.shape] * 2

    def body(*refs):
        overlap_launches()
        out, scales = refs[-2:]
        groups = _Groups(x, lax.axis_index("row"), lax.axis_index("part") * count, count)
        up = groups.load(refs[0], x.n) if packed else groups.load(refs[1])
        groups.quantize(slope(groups.load(refs[0]))[0] * up, out, scales)

    return plgpu.kernel(
        body,
        out_type=_outs(x),
        grid=(parts, x.rows),  # any number in the last one
        grid_names=("part", "row"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2),
        kernel_name="gated_linear_unit_quantize",
        **in_shapes(*shapes),
    )


class _Apart(SeveralKernels):
    """The same by two kernels."""

    def __init__(self, make, then):
        self.make, self.then = make, then

    def __call__(self, *operands, out=None, stream=None):
        return self.then(self.make(*operands, stream=stream), out=out, stream=stream)


def _two_kernels(make, dtype, block, mx, interpret, **options):
    make = functools.partial(make, interpret=interpret, **options)
    return _Apart(
        make, functools.partial(quantize, dtype=dtype, block=block, mx=mx, interpret=interpret)
    )


@plgpu.specialize(in_place=False)
@rowwise
def rms_norm_quantize(
    x, weight=None, *, eps=1e-6, dtype="float8_e4m3fn", block=None, mx=False, interpret=None
):
    """:func:`quantize` of :func:`rms_norm` (Hopper), in one kernel for rows up to 32 KB that are
    whole numbers of blocks.

    x: (..., N), float16, bfloat16 or float32; weight: (N,), any of these dtypes, None for ones.
    eps: as for rms_norm; dtype, block, mx: as for quantize. Returns (q, scales), as quantize does.
    TypeError, ValueError for other dtypes and shapes.
    """
    name = "rms_norm_quantize"
    to = check_options(name, x, dtype, block, mx)
    n = x.shape[-1]
    if weight is not None and (weight.shape != (n,) or weight.dtype.name not in gated.FLOATS):
        raise ValueError(
            f"{name}: weight must be float16, bfloat16 or float32 of shape ({n},), got"
            f" {weight.dtype} of shape {weight.shape}"
        )
    if n * x.dtype.itemsize > HELD or block == SQUARE or n % (block or 1):
        return _two_kernels(rms_norm, dtype, block, mx, interpret, eps=eps)
    problem = Problem.of(x.shape, x.dtype, to, block, mx)
    how = float(eps), weight is not None, interpret
    return _norm(with_open_rows(problem, x.device, name, *how), *how)


@plgpu.specialize(in_place=False)
@rowwise
def gated_linear_unit_quantize(
    gate,
    up=None,
    *,
    activation="silu",
    dtype="float8_e4m3fn",
    block=None,
    mx=False,
    interpret=None,
):
    """:func:`quantize` of :func:`gated_linear_unit` (Hopper), in one kernel for rows that are whole
    numbers of blocks, or with a scale for the row up to 8192 elements.

    gate, up, activation: as for gated_linear_unit; dtype, block, mx: as for quantize. Returns
    (q, scales), as quantize does. TypeError, ValueError for other dtypes and shapes.
    """
    name = "gated_linear_unit_quantize"
    x = gated.problem_of(name, gate, up, activation, None)
    to = check_options(name, gate, dtype, block, mx)
    one = x.n <= _WHOLE if block is None else block != SQUARE and x.n % block == 0
    if not one:
        return _two_kernels(gated_linear_unit, dtype, block, mx, interpret, activation=activation)
    problem = Problem.of(x.shape, gate.dtype, to, block, mx)
    how = up is None, activation, interpret
    return _gated(with_open_rows(problem, gate.device, name, *how), *how)
