"""Gated linear units, element by element: activation(gate) * up, and the gradients.

Gate and up are two arrays, or the left and the right half of the rows of one, as a product with
both weights gives them. Nothing is copied for either: a tile is a few rows times a few columns, and
the second form reads two places. The gradients of one array are one array again."""

import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, nn, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, dtype_of, overlap_launches
from ._open_rows import ANY_ROWS, in_shapes, rows_of, rowwise

_F32 = np.float32
_TILE = 2048  # elements
_A, _B = _F32(math.sqrt(2 / math.pi)), _F32(0.044715)


def _sigmoid_slope(x):
    s = nn.sigmoid(x)
    return s, s * (1 - s)


def _silu_slope(x):
    s = nn.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu_slope(x):
    t = jnp.tanh(_A * (x + _B * x * x * x))
    half = _F32(0.5) * (1 + t)
    return x * half, half + _F32(0.5) * x * (1 - t * t) * _A * (1 + 3 * _B * x * x)


def _relu_slope(x):
    return jnp.maximum(x, 0), (x > 0).astype(jnp.float32)


# value and derivative of each activation
SLOPES = {
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "relu": _relu_slope,
    "sigmoid": _sigmoid_slope,
}


class Problem(NamedTuple):
    """What a kernel computes."""

    rows: int
    n: int  # columns of the result
    packed: bool  # one array with both halves
    activation: str
    shape: tuple  # of the result
    dtype: np.dtype
    out_dtype: np.dtype

    @property
    def operands(self):
        """Shapes of gate and up."""
        if self.packed:
            return ((*self.shape[:-1], 2 * self.n),)
        return self.shape, self.shape


def _with_open_rows(x, gate, *kind):
    if len(x.shape) != 2:
        return x
    rows, _ = rows_of((x._replace(rows=0, shape=(0, x.n)), gate.device, kind), x.rows, ANY_ROWS)
    return x._replace(rows=rows, shape=(rows, x.n))


@cached
def _kernel(x, backward, interpret):
    width = min(x.n, _TILE)
    is_open = _sizes.is_open(x.shape)
    height = max(1, _TILE // width if is_open else min(_TILE // width, x.rows))
    slope = SLOPES[x.activation]

    def body(*refs):
        overlap_launches()
        r, c = lax.axis_index("row") * height, lax.axis_index("column") * width
        rows, shape, keep = pl.ds(r, height), (height, width), None
        if height > 1 and (is_open or x.rows % height):
            keep = lax.broadcasted_iota(jnp.int32, shape, 0) < x.rows - r
        if x.n % width:
            inside = lax.broadcasted_iota(jnp.int32, shape, 1) < x.n - c
            keep = inside if keep is None else keep & inside

        def load(ref, start=0):
            at = rows, pl.ds(c + start, width)
            value = ref[at] if keep is None else pl.load(ref, at, mask=keep, other=0.0)
            return value.astype(jnp.float32)

        def save(ref, value, start=0):
            at, value = (rows, pl.ds(c + start, width)), value.astype(ref.dtype)
            if keep is None:
                ref[at] = value
            else:
                pl.store(ref, at, value, mask=keep)

        if not is_open:
            refs = [ref.reshape((x.rows, ref.shape[-1])) for ref in refs]
        refs = list(refs)
        grad = refs.pop(0) if backward else None
        gate = refs.pop(0)
        up = (gate, x.n) if x.packed else (refs.pop(0), 0)
        value, derivative = slope(load(gate))
        if not backward:
            save(refs[0], value * load(*up))
            return
        g = load(grad)
        save(refs[0], g * load(*up) * derivative)
        save(*((refs[0], g * value, x.n) if x.packed else (refs[1], g * value)))

    half = plgpu.ShapeDtypeStruct(x.shape, x.dtype if backward else x.out_dtype)
    outs = half
    if backward:
        both = plgpu.ShapeDtypeStruct((*x.shape[:-1], 2 * x.n), x.dtype)
        outs = both if x.packed else (half, half)
    return plgpu.kernel(
        body,
        out_type=outs,
        grid=(pl.cdiv(x.n, width), pl.cdiv(x.rows, height)),  # any number in the last one
        grid_names=("column", "row"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2),
        kernel_name="gated_linear_unit_backward" if backward else "gated_linear_unit",
        **in_shapes(*[x.shape] * backward, *x.operands),
    )


def problem_of(name, gate, up, activation, out_dtype):
    if activation not in SLOPES:
        raise ValueError(
            f"{name}: activation must be one of {', '.join(SLOPES)}, got {activation!r}"
        )
    if gate.dtype.name not in FLOATS:
        raise TypeError(f"{name}: gate must be float16, bfloat16 or float32, got {gate.dtype}")
    if up is not None and (up.shape != gate.shape or up.dtype != gate.dtype):
        raise ValueError(
            f"{name}: up must be {gate.dtype} of shape {gate.shape}, as gate is; got {up.dtype} of"
            f" shape {up.shape}"
        )
    if gate.ndim == 0 or 0 in gate.shape:
        raise ValueError(f"{name}: gate must have a dim and elements, got shape {gate.shape}")
    n = gate.shape[-1]
    if up is None and n % 2:
        raise ValueError(f"{name}: without up, rows of gate are two halves; got {n} elements")
    n = n if up is not None else n // 2
    out_dtype = dtype_of(name, out_dtype, gate.dtype)
    shape = *gate.shape[:-1], n
    rows = math.prod(shape[:-1])
    return Problem(rows, n, up is None, activation, shape, gate.dtype, out_dtype)


@plgpu.specialize(in_place=False)
@rowwise
def gated_linear_unit(gate, up=None, *, activation="silu", out_dtype=None, interpret=None):
    """``activation(gate) * up``, computed in float32 (Hopper): SwiGLU, GeGLU and others.

    gate, up: arrays of one shape and dtype, float16, bfloat16 or float32; or ``gate`` alone, whose
    rows are both, gate first: (..., 2 N). activation: "silu", "gelu" (by tanh), "relu" or
    "sigmoid". out_dtype: one of the dtypes above; that of ``gate`` by default.

    Returns (..., N) of the caller's kind of array. TypeError, ValueError for other dtypes and
    shapes.
    """
    x = problem_of("gated_linear_unit", gate, up, activation, out_dtype)
    return _kernel(_with_open_rows(x, gate, interpret), False, interpret)


@plgpu.specialize(in_place=False)
@rowwise
def gated_linear_unit_backward(grad, gate, up=None, *, activation="silu", interpret=None):
    """The gradients of :func:`gated_linear_unit` with respect to ``gate`` and ``up`` (Hopper).

    grad: the gradient of the result, (..., N), float16, bfloat16 or float32; the others: the
    arguments of gated_linear_unit. Returns (gradient of ``gate``, gradient of ``up``), or one array
    (..., 2 N) where ``gate`` is both. TypeError, ValueError for other dtypes and shapes.
    """
    name = "gated_linear_unit_backward"
    x = problem_of(name, gate, up, activation, None)
    if grad.shape != x.shape or grad.dtype.name not in FLOATS:
        raise ValueError(
            f"{name}: grad must be a float16, bfloat16 or float32 array of shape {x.shape}, got"
            f" {grad.dtype} of shape {grad.shape}"
        )
    return _kernel(_with_open_rows(x, gate, grad.dtype, interpret), True, interpret)
