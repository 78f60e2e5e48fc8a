"""The gradient of an activation, and the sums of its columns: the gradient of a bias before it.

A block takes 16 rows of a strip of columns at a time, of its share of the rows. Each lane has
16 bytes of each fourth row, always of the same columns, so that its sums stay in registers until
its last row. A further kernel adds up the sums of the blocks, always in the same order."""

import functools
import math
import operator
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, dtype_of, overlap_launches
from ._open_rows import ANY_ROWS, in_shapes, rows_of, rowwise, views, with_open_rows
from .gated import SLOPES
from .norms_backward import WithSums, sums_of_rows

_F32 = np.float32
_HEIGHT = 16
_EDGES = 0, 512, ANY_ROWS[1]  # of numbers of rows that share a program with sums


def _tanh_slope(x):
    t = jnp.tanh(x)
    return t, 1 - t * t


def _slope(f):
    return lambda x: f(x)[1]


# the derivative of an activation by its argument, and where that needs no more, by its result
_OF_ARGUMENT = {name: _slope(f) for name, f in SLOPES.items() if name != "sigmoid"}
_OF_ARGUMENT["tanh"] = _slope(_tanh_slope)
_OF_RESULT = {"relu": _OF_ARGUMENT["relu"], "tanh": lambda y: 1 - y * y}


class Problem(NamedTuple):
    """What a kernel computes."""

    rows: int
    n: int
    activation: str
    of_result: bool
    chunks: int  # shares of the rows, each with sums for the gradient of the bias; 0: no sums
    dtypes: tuple  # of grad and x
    shape: tuple


def _width(x):
    """Columns of a strip."""
    return 32 * (16 // max(d.itemsize for d in x.dtypes))


def _tiling(x):
    """(rows at a time, rows of sums, blocks of an SM) of a kernel with sums, as registers have room
    for. silu of 16 bits takes up to 138 with 16 rows of sums, and 161 where columns are masked,
    too; others take at most 121."""
    if x.activation != "silu" or _width(x) < 256:
        return _HEIGHT, _HEIGHT, 4
    return (8, 8, 6) if x.n % _width(x) else (_HEIGHT, 8, 4)


@cached
def _kernel(x, interpret):
    width = _width(x)
    vec = width // 32
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((4, width), (vec,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    height, summed, _ = _tiling(x) if x.chunks else (_HEIGHT, _HEIGHT, 0)
    tiles, shape = pl.cdiv(x.n, width), (height, width)
    steps, is_open = 1, _sizes.is_open(x.shape)
    if x.chunks:
        steps = pl.cdiv(pl.cdiv(x.rows, height), x.chunks)
    chunks = x.chunks or pl.cdiv(x.rows, height)
    slope = (_OF_RESULT if x.of_result else _OF_ARGUMENT)[x.activation]
    ragged = is_open or x.rows % (height * steps) or x.n % width

    def body(grad, value, out, *sums):
        overlap_launches()
        chunk, c = lax.axis_index("chunk"), lax.axis_index("tile") * width
        if not is_open:
            grad, value, out = (r.reshape((x.rows, x.n)) for r in (grad, value, out))

        def add(i, total):
            r = (chunk * steps + i) * height
            at, keep = (pl.ds(r, height), pl.ds(c, width)), None
            if ragged:
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                keep = row < x.rows - r
                if x.n % width:
                    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
                    keep &= column < x.n - c
            options = {"layout": layout} if keep is None else {"mask": keep, "other": 0}
            g, v = (plgpu.load(ref.at[at], **options).astype(jnp.float32) for ref in (grad, value))
            g = g * slope(v)
            if keep is None:
                out[at] = g.astype(out.dtype)
            else:
                pl.store(out, at, g.astype(out.dtype), mask=keep)
            parts = [g[k : k + summed] for k in range(0, height, summed)]
            return total + functools.reduce(operator.add, parts) if x.chunks else total

        zero = plgpu.layout_cast(jnp.zeros((summed, width), jnp.float32), layout)
        total = lax.fori_loop(0, steps, add, zero if x.chunks else jnp.int32(0))
        for ref in sums:
            total, at = jnp.sum(total, axis=0), (chunk, pl.ds(c, width))
            if x.n % width:
                pl.store(ref, at, total, mask=jnp.arange(width) < x.n - c)
            else:
                ref[at] = total

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtypes[0])
    return plgpu.kernel(
        body,
        out_type=(out, plgpu.ShapeDtypeStruct((chunks, x.n), _F32)) if x.chunks else out,
        grid=(chunks, tiles),
        grid_names=("chunk", "tile"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=x.dtypes[0].itemsize == 2),
        kernel_name="activation_backward",
        **in_shapes(x.shape, x.shape),
    )


def _with_sums(x, device, sms, interpret):
    """The kernel that also sums rows, perhaps of any number of them, and the number of sums."""
    kind = "activation_backward", x._replace(rows=0, shape=()), x.shape[-1], device, interpret
    rows, typical = rows_of(kind, x.rows, _EDGES)
    height, _, blocks = _tiling(x)
    steps = pl.cdiv(typical, height)
    steps = pl.cdiv(steps, max(1, min(steps, blocks * sms // pl.cdiv(x.n, _width(x)))))
    x = x._replace(chunks=pl.cdiv(typical, steps * height))
    if rows is x.rows:
        return _kernel(x, interpret), x.chunks
    kernel, flat = _kernel(x._replace(rows=rows, shape=(rows, x.n)), interpret), (x.rows, x.n)
    if x.shape == flat:
        return kernel, x.chunks
    alone = functools.partial(_kernel, x, interpret)
    return views(kernel, (flat, flat), (x.shape, None), alone), x.chunks


@plgpu.specialize
@rowwise
def activation_backward(
    grad, x, *, activation="silu", of_result=False, bias=False, out_dtype=None, interpret=None
):
    """``grad * activation'(x)``, computed in float32, and its sums over the rows (Hopper).

    grad: the gradient of the result; x: the argument of the activation, or with ``of_result`` its
    result ("relu" and "tanh" alone); (..., N), float16, bfloat16 or float32, of one shape.
    activation: "relu", "silu", "gelu" (by tanh) or "tanh", as of :func:`matmul`. bias: also return
    the sums over all dims but the last, in ``out_dtype``, by default the dtype of ``grad``; always
    in the same order.

    Returns an array like ``grad``, or with ``bias`` the pair of it and the sums (N,). TypeError,
    ValueError for other dtypes, shapes and activations.
    """
    name = "activation_backward"
    for what, v in (("grad", grad), ("x", x)):
        if v.dtype.name not in FLOATS:
            raise TypeError(f"{name}: {what} must be float16, bfloat16 or float32, got {v.dtype}")
    if grad.shape != x.shape or x.ndim == 0 or 0 in x.shape:
        raise ValueError(
            f"{name}: grad and x must have one shape with elements, got {grad.shape} and {x.shape}"
        )
    known = _OF_RESULT if of_result else _OF_ARGUMENT
    if activation not in known:
        which = " by its result" if of_result else ""
        raise ValueError(
            f"{name}: activation{which} must be one of {', '.join(known)}, got {activation!r}"
        )
    to = dtype_of(name, out_dtype, grad.dtype)
    rows, n, sms = math.prod(x.shape[:-1]), x.shape[-1], plgpu.sm_count(x.device)
    dtypes = grad.dtype, x.dtype
    problem = Problem(rows, n, activation, bool(of_result), 0, dtypes, x.shape)
    if not bias:
        return _kernel(with_open_rows(problem, x.device, interpret), interpret)
    kernel, chunks = _with_sums(problem, x.device, sms, interpret)
    return WithSums(kernel, sums_of_rows(chunks, n, np.dtype(_F32), to, sms, interpret))
