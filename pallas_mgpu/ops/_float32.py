"""Products of float32 matrices by three bfloat16 ones.

x = high + low + the rest, where high is x rounded to bfloat16 and low what is left, rounded. The
product is high * high + high * low + low * high: what is dropped is about 2**-16 of each term. A
kernel writes the parts of an operand one after the other along K, those of A as (high, high, low)
and those of B as (high, low, high); one product of three times the K adds everything up."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches, unaligned
from ._open_rows import ANY_ROWS, any_number, in_shapes, rows_of, views
from ._padding import with_padding

PARTS = 3
_LOW = (False, False, True), (False, True, False)  # of A and of B: is a part the low one?
_WIDTH = 1024  # elements that a block splits


def shape_of(shape, axis):
    """Of the parts of a matrix, or of several. Rows are a multiple of 16 bytes."""
    *lead, rows, cols = shape
    rows, cols = (rows * PARTS, cols) if axis == 0 else (rows, cols * PARTS)
    return *lead, rows, pl.cdiv(cols, 8) * 8


def _height(cols):
    """Rows that a block splits, if there are as many."""
    return max(_WIDTH // min(cols, _WIDTH), 1)


def _any_rows(cols):
    """Edges of the numbers of rows that share a kernel."""
    return 0, _height(cols) - 1, ANY_ROWS[1]


@cached
def _splitting(shape, axis, low, aligned, interpret):
    """Kernel: the parts of a matrix along an axis, or of each of several. Where blocks do not come
    out even the last ones begin earlier, and write once more what others write, too."""
    (*several, rows, cols), out = shape, shape_of(shape, axis)
    width = min(cols, _WIDTH)
    height = min(_sizes.least(rows), _height(cols))
    filled = cols if axis == 0 else cols * PARTS

    def body(x, o):
        overlap_launches()
        if several:
            x, o = (ref.at[lax.axis_index("matrix")] for ref in (x, o))
        elif not _sizes.is_open(shape):  # these are those of the operand
            x = x.reshape(shape)
        r = jnp.minimum(lax.axis_index("row") * height, rows - height)
        c = jnp.minimum(lax.axis_index("col") * width, cols - width)
        value = x[pl.ds(r, height), pl.ds(c if aligned else unaligned(c), width)]
        high = value.astype(jnp.bfloat16)
        rest = (value - high.astype(jnp.float32)).astype(jnp.bfloat16)
        for j, is_low in enumerate(low):
            at = (r + j * rows, c) if axis == 0 else (r, c + j * cols)
            o[pl.ds(at[0], height), pl.ds(at[1], width)] = rest if is_low else high

        @pl.when(lax.axis_index("col") == 0)
        def _():
            if out[-1] > filled:
                for j in range(PARTS if axis == 0 else 1):
                    zeros = jnp.zeros((height, out[-1] - filled), jnp.bfloat16)
                    o[pl.ds(r + j * rows, height), filled:] = zeros

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(out, jnp.bfloat16),
        # any number along the last axis
        grid=(pl.cdiv(cols, width), pl.cdiv(rows, height), *several),
        grid_names=("col", "row", *["matrix"] * len(several)),
        interpret=interpret,
        kernel_name="matmul_split",
        **in_shapes(shape),
    )


def splitting(number, shape, interpret):
    """The kernel for operand `number`, A or B, of a product that transposes neither."""
    return _splitting(shape, 1 - number, _LOW[number], True, interpret)


def splitting_of(number, operand, axis, interpret):
    """What splits operand `number`, with or without a dimension before those of a matrix: perhaps
    for any number of rows, or of matrices."""
    low, shape, of = _LOW[number], operand.shape, (operand.aligned, operand.device, interpret)
    how = axis, low, operand.aligned, interpret
    if axis == 0 and len(shape) == 2:
        return _splitting(shape, *how)
    if axis == 0:
        kind = "matmul_split", number, *shape[1:], *of
        several = rows_of(kind, shape[0], any_number(*shape_of(shape, axis)[1:]))[0]
        return _splitting((several, *shape[1:]), *how)
    kind, rows = ("matmul_split", number, shape[-1], *of), math.prod(shape[:-1])
    kernel = _splitting((rows_of(kind, rows, _any_rows(shape[-1]))[0], shape[-1]), *how)
    if len(shape) == 2:
        return kernel
    whole = shape_of(shape, axis)
    return views(kernel, ((rows, shape[-1]),), (whole,), lambda: _splitting(shape, *how))


def product(x, a, b, make, interpret):
    """The function of float32 arrays. x: their Product. make(x, a, b): a product of bfloat16."""
    bf16, infos, kernels = jnp.dtype(jnp.bfloat16), [], []
    a_shape = a.shape
    if x.ta and x.m == 1:  # a column is a row, too
        x, a_shape = x._replace(ta=False), (1, x.k)
    of_a, of_b = (a, a_shape, 0 if x.ta else 1), (b, b.shape, 1 if x.tb else 0)
    for (operand, shape, axis), low in zip((of_a, of_b), _LOW):
        infos.append(plgpu.ArrayInfo(shape_of(shape, axis), bf16, operand.device))
        if axis == 1 and operand is a and shape is a.shape:
            kind = "matmul_split", shape[1], operand.aligned, operand.device, interpret
            shape = rows_of(kind, shape[0], _any_rows(shape[1]))[0], shape[1]
        kernels.append(_splitting(shape, axis, low, operand.aligned, interpret))
    inner = make(x._replace(k=x.k * PARTS, dtypes=(bf16, bf16)), *infos)
    return with_padding(inner, [*kernels, *(None,) * (x.bias_dtype is not None)])
