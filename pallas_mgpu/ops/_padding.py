"""Copies of operands whose rows TMA cannot address.

TMA wants arrays that begin at, and have rows of, a multiple of 16 bytes. Others are first copied to
padded rows by a kernel of their own, and results on other devices copied from them."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SeveralKernels, overlap_launches, unaligned
from ._open_rows import ANY_ROWS, in_shapes, rows_of, views

_WIDTH = 4096  # elements that a block copies


def _block(rows, cols):
    """Rows and columns that a block copies; there are as many."""
    width = min(cols, _WIDTH)
    return min(_sizes.least(rows), max(_WIDTH // width, 1)), width


def _matrix(ref):
    """The same rows as a matrix, whose rows may have a size of the call (plgpu.dim)."""
    return ref if ref.ndim == 2 else ref.reshape((-1, ref.shape[-1]))


@cached
def padding(shape, dtype, aligned, interpret, to=0):
    """Kernel: a copy with rows of `to` elements, by default the next multiple of 16 bytes, filled
    up with zeros.

    Blocks take a few rows, or a part of one. Where it does not come out even the last ones begin
    earlier, and copy once more what others copy too."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    whole = 16 // dtype.itemsize
    padded = to or pl.cdiv(cols, whole) * whole
    height, width = _block(rows, cols)

    def body(x, o):
        overlap_launches()
        r = jnp.minimum(lax.axis_index("row") * height, rows - height)
        c = jnp.minimum(lax.axis_index("col") * width, cols - width)
        x, o = _matrix(x), _matrix(o)
        part = x[pl.ds(r, height), pl.ds(c if aligned else unaligned(c), width)]
        o[pl.ds(r, height), pl.ds(c, width)] = part

        @pl.when(lax.axis_index("col") == 0)
        def _():
            if padded > cols:
                o[pl.ds(r, height), cols:] = jnp.zeros((height, padded - cols), dtype)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((*shape[:-1], padded), dtype),
        grid=(pl.cdiv(cols, width), pl.cdiv(rows, height)),  # any number in the last one
        grid_names=("col", "row"),
        interpret=interpret,
        kernel_name="matmul_padding",
        **in_shapes(shape),
    )


@cached
def cropping(shape, cols, dtype, interpret):
    """Kernel: a copy of the first columns alone. Blocks overlap as those of `padding` do."""
    rows = math.prod(shape[:-1])
    height, width = _block(rows, cols)

    def body(x, o):
        overlap_launches()
        r = jnp.minimum(lax.axis_index("row") * height, rows - height)
        c = jnp.minimum(lax.axis_index("col") * width, cols - width)
        at = pl.ds(r, height), pl.ds(c, width)
        x, o = _matrix(x), _matrix(o)
        o[at] = x[at]

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((*shape[:-1], cols), dtype),
        grid=(pl.cdiv(cols, width), pl.cdiv(rows, height)),  # any number in the last one
        grid_names=("col", "row"),
        interpret=interpret,
        kernel_name="matmul_cropping",
        **in_shapes(shape),
    )


def of_any_rows(make, shape, cols, *kind):
    """A kernel of `padding` or `cropping`, perhaps for any number of rows. make(shape): that of a
    shape; cols: of its results; kind: what else distinguishes programs."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    height, _ = _block(ANY_ROWS[1], min(width, cols))
    kind = "copies", width, cols, kind
    found, _ = rows_of(kind, rows, (0, height - 1, ANY_ROWS[1]))
    if found is rows:
        return make(shape)
    results = ((*shape[:-1], cols),)
    return views(make((found, width)), ((rows, width),), results, lambda: make(shape))


def needs_padding(x, any_rows=False):
    """any_rows: if a kernel gets arrays with other numbers of rows, too."""
    several = any_rows or math.prod(x.shape[:-1]) > 1
    return not x.aligned or several and x.shape[-1] * x.dtype.itemsize % 16 != 0


def padding_of(x, interpret, by_rows=False):
    """The kernel that copies the operand, or None where TMA can address it. by_rows: perhaps for
    any number of rows."""
    if not needs_padding(x, any_rows=by_rows):
        return None
    how, shape = (x.dtype, x.aligned, interpret), x.shape
    if by_rows and x.ndim > 2:
        whole = 16 // x.dtype.itemsize
        cols = pl.cdiv(shape[-1], whole) * whole
        return of_any_rows(lambda s: padding(s, *how), shape, cols, "padding", *how, x.device)
    if by_rows and x.ndim == 2:
        kind = "padding", shape[1], *how, x.device
        shape = rows_of(kind, shape[0], ANY_ROWS)[0], shape[1]
    return padding(shape, *how)


class Padded(SeveralKernels):
    """A product of copies of the operands. pads: the kernel that copies each, or None."""

    def __init__(self, product, pads):
        self.product, self.pads = product, pads

    def __call__(self, *operands, out=None, stream=None):
        operands = [
            x if pad is None else pad(x, stream=stream) for x, pad in zip(operands, self.pads)
        ]
        return self.product(*operands, out=out, stream=stream)


def with_padding(product, pads):
    """The product itself where no operand needs a copy."""
    return Padded(product, pads) if any(pads) else product
