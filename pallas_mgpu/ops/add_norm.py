"""A residual connection and the norm that follows it: x + residual, and the norm of that sum.

A block has a few whole rows, about 2048 elements. The sum is rounded to the dtype of x and stored,
and the norm is that of the rounded sum, as if it had been read again. Rows that registers do not
hold are indeed read again, in parts. The gradient is that of the norm, with the gradient of the sum
as its add=."""

import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import in_shapes, rowwise, with_open_rows

_F32 = np.float32
_TILE = 2048  # elements of short rows
_HELD = 8192  # elements of a row that registers hold
_PART = 4096  # of a longer one


class Problem(NamedTuple):
    """What a kernel computes."""

    name: str  # of the norm
    rows: int
    n: int
    eps: float
    dtypes: tuple  # of x, weight, bias: None where there is none
    shape: tuple


def _height(x):
    """Rows of a tile; of open rows for any number of them."""
    most = _TILE // x.n if _sizes.is_open(x.shape) else min(_TILE // x.n, x.rows)
    return max(1, most)


class _Rows:
    """A tile of whole rows in parts, while it is traced."""

    def __init__(self, x, start):
        self.x, self.start = x, start
        self.height = _height(x)
        self.width = x.n if x.n <= _HELD else _PART
        self.parts, self.shape = pl.cdiv(x.n, self.width), (self.height, self.width)

    def _place(self, k):
        """Where part k is, and which elements there are: None for all."""
        x, keep = self.x, None
        if self.height > 1 and (_sizes.is_open(x.shape) or x.rows % self.height):
            keep = lax.broadcasted_iota(jnp.int32, self.shape, 0) < x.rows - self.start
        if x.n % self.width:
            inside = lax.broadcasted_iota(jnp.int32, self.shape, 1) < x.n - k * self.width
            keep = inside if keep is None else keep & inside
        return (pl.ds(self.start, self.height), pl.ds(k * self.width, self.width)), keep

    def load(self, ref, k):
        at, keep = self._place(k)
        value = ref[at] if keep is None else pl.load(ref, at, mask=keep, other=0)
        return value.astype(jnp.float32)

    def store(self, ref, k, value):
        at, keep = self._place(k)
        if keep is None:
            ref[at] = value.astype(ref.dtype)
        else:
            pl.store(ref, at, value.astype(ref.dtype), mask=keep)

    def vector(self, ref, k):
        """Numbers of the columns of part k, as a tile."""
        at = pl.ds(k * self.width, self.width)
        if self.x.n % self.width:
            keep = jnp.arange(self.width) < self.x.n - k * self.width
            value = pl.load(ref, at, mask=keep, other=0)
        else:
            value = ref[at]
        return lax.broadcast_in_dim(value.astype(jnp.float32), self.shape, [1])

    def mean(self, part):
        """Of part(k) over the rows, as a column; elements that are not there are 0."""

        def add(k, total):
            return total + jnp.sum(part(k), axis=1, keepdims=True)

        zero = jnp.zeros((self.height, 1), jnp.float32)
        total = add(0, zero) if self.parts == 1 else lax.fori_loop(0, self.parts, add, zero)
        return total * _F32(1 / self.x.n)

    def centred(self, value, mean, k):
        """value - mean where there is an element, else 0."""
        keep = self._place(k)[1]
        return value - mean if keep is None else jnp.where(keep, value - mean, 0.0)


@cached
def _kernel(x, interpret):
    given = [name for name, dtype in zip(("x", "weight", "bias"), x.dtypes) if dtype is not None]
    is_open = _sizes.is_open(x.shape)

    def body(*refs):
        overlap_launches()
        names = ["x", "residual", *given[1:], "out", "total"]
        found = dict(zip(names, refs))
        for name in () if is_open else ("x", "residual", "out", "total"):
            found[name] = found[name].reshape((x.rows, x.n))
        rows, held = _Rows(x, lax.axis_index("tile") * _height(x)), []

        def add(k):
            """The sum, which is stored, as it is rounded."""
            total = rows.load(found["x"], k) + rows.load(found["residual"], k)
            total = total.astype(x.dtypes[0])
            rows.store(found["total"], k, total)
            total = total.astype(jnp.float32)
            held.append(total)
            return total

        def again(k):
            return held[0] if rows.parts == 1 else rows.load(found["total"], k)

        if x.name == "layer_norm":
            mean = rows.mean(add)
            factor = rows.mean(lambda k: jnp.square(rows.centred(again(k), mean, k)))
        else:
            factor = rows.mean(lambda k: jnp.square(add(k)))
        factor = lax.rsqrt(factor + _F32(x.eps))

        def write(k):
            value = again(k)
            value = (value - mean if x.name == "layer_norm" else value) * factor
            if "weight" in found:
                value = value * rows.vector(found["weight"], k)
            if "bias" in found:
                value = value + rows.vector(found["bias"], k)
            rows.store(found["out"], k, value)

        if rows.parts == 1:
            write(0)
        else:
            lax.fori_loop(0, rows.parts, lambda k, _: write(k), None)

    out = plgpu.ShapeDtypeStruct(x.shape, x.dtypes[0])
    return plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(pl.cdiv(x.rows, _height(x)),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name=f"add_{x.name}",
        **in_shapes(x.shape, x.shape, *(None for _ in given[1:])),
    )


def _make(name, x, residual, vectors, eps, interpret):
    what = f"add_{name}"
    for argument, v in (("x", x), ("residual", residual), *vectors.items()):
        if v is not None and v.dtype.name not in FLOATS:
            raise TypeError(
                f"{what}: {argument} must be float16, bfloat16 or float32, got {v.dtype}"
            )
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"{what}: x must have a dim and elements, got shape {x.shape}")
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"{what}: residual must be {x.dtype} of shape {x.shape}, as x is; got {residual.dtype}"
            f" of shape {residual.shape}"
        )
    for argument, v in vectors.items():
        if v is not None and v.shape != x.shape[-1:]:
            raise ValueError(
                f"{what}: {argument} must have the shape {x.shape[-1:]}, got {v.shape}"
            )
    given = [*vectors.values(), None][:2]
    dtypes = x.dtype, *(None if v is None else v.dtype for v in given)
    n = x.shape[-1]
    problem = Problem(name, math.prod(x.shape[:-1]), n, float(eps), dtypes, x.shape)
    return _kernel(with_open_rows(problem, x.device, interpret), interpret)


@plgpu.specialize(in_place=False)
@rowwise
def add_rms_norm(x, residual, weight=None, *, eps=1e-6, interpret=None):
    """``rms_norm(x + residual, weight)``, and the sum, in one kernel (Hopper).

    x, residual: (..., N), float16, bfloat16 or float32, of one shape and dtype; weight, eps: as of
    :func:`rms_norm`. The sum is rounded to the dtype of ``x``, and the norm is that of the rounded
    sum. Both gradients are ``rms_norm_backward(grad, total, weight, add=of_total)``.

    Returns (norm, total), arrays like ``x``. TypeError, ValueError for other dtypes and shapes.
    """
    return _make("rms_norm", x, residual, {"weight": weight}, eps, interpret)


@plgpu.specialize(in_place=False)
@rowwise
def add_layer_norm(x, residual, weight=None, bias=None, *, eps=1e-5, interpret=None):
    """``layer_norm(x + residual, weight, bias)``, and the sum, in one kernel (Hopper): as
    :func:`add_rms_norm`.

    bias: (N,), float16, bfloat16 or float32. Returns (norm, total), arrays like ``x``. TypeError,
    ValueError for other dtypes and shapes.
    """
    vectors = {"weight": weight, "bias": bias}
    return _make("layer_norm", x, residual, vectors, eps, interpret)
