"""A step of AdamW, element by element: parameter, gradient and both moments are read once, and
parameter and moments written once.

Tensors of one shape share a launch, so that only the last of them ends with a GPU that is half
empty: a block takes a tile of one of them. Tiles are small, a few elements for each lane, since
only many blocks fill the last wave of blocks evenly."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import divides, elements_of, in_shapes, views

_TILE = 512
MOST = 8  # tensors of a launch: code of its own for each, and 7 of the 128 arrays of a kernel


class Problem(NamedTuple):
    """What a kernel computes."""

    shape: tuple  # of one dim, where it is known later (plgpu.dim)
    dtypes: tuple  # of param, grad, first, second
    tensors: int  # how many

    @property
    def elements(self):
        return self.shape[0] if _sizes.is_open(self.shape) else math.prod(self.shape)

    @property
    def tile(self):
        """Elements that a block takes."""
        return _TILE if _sizes.is_open(self.shape) else min(self.elements, _TILE)


class _Tile:
    """A tile of one tensor, while it is traced."""

    def __init__(self, x):
        self.n, self.size, self.is_open = x.elements, x.tile, _sizes.is_open(x.shape)
        self.start, self.keep = lax.axis_index("tile") * self.size, None
        if not divides(self.size, self.n):
            self.keep = jnp.arange(self.size) < self.n - self.start

    def _flat(self, ref):
        return ref if self.is_open else ref.reshape((self.n,))

    def load(self, ref):
        ref, at = self._flat(ref), pl.ds(self.start, self.size)
        value = ref[at] if self.keep is None else pl.load(ref, (at,), mask=self.keep, other=0.0)
        return value.astype(jnp.float32)

    def store(self, ref, value):
        ref, at, value = self._flat(ref), pl.ds(self.start, self.size), value.astype(ref.dtype)
        if self.keep is None:
            ref[at] = value
        else:
            pl.store(ref, (at,), value, mask=self.keep)


def _update(tile, settings, arrays, outs):
    rate, beta1, beta2, eps, decay, step = (settings[i] for i in range(6))
    p, g, m, v = map(tile.load, arrays)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    rate_of_m = rate / (1 - jnp.exp2(step * jnp.log2(beta1)))
    root = jnp.sqrt(v) * lax.rsqrt(1 - jnp.exp2(step * jnp.log2(beta2)))
    p = p * (1 - rate * decay) - rate_of_m * m / (root + eps)
    for ref, value in zip(outs, (p, m, v)):
        tile.store(ref, value)


@cached
def kernel(x, interpret):
    """Operands: param, grad, first and second of each tensor, and settings, (count, 6) for several;
    results: param, first and second of each."""

    def body(*refs):
        overlap_launches()
        tile, which = _Tile(x), lax.axis_index("tensor")
        operands, settings, outs = (
            refs[: 4 * x.tensors],
            refs[4 * x.tensors],
            refs[4 * x.tensors + 1 :],
        )

        def one(k):
            mine = settings if x.tensors == 1 else settings.at[k]
            _update(tile, mine, operands[4 * k : 4 * k + 4], outs[3 * k : 3 * k + 3])

        if x.tensors == 1:
            return one(0)
        for k in range(x.tensors):
            pl.when(which == k)(lambda k=k: one(k))

    of_one = tuple(plgpu.ShapeDtypeStruct(x.shape, x.dtypes[k]) for k in (0, 2, 3))
    return plgpu.kernel(
        body,
        out_type=of_one * x.tensors,
        grid=(x.tensors, pl.cdiv(x.elements, x.tile)),
        grid_names=("tensor", "tile"),
        interpret=interpret,
        kernel_name="adamw",
        **in_shapes(*(x.shape,) * 4, None),
    )


@plgpu.specialize
def adamw(param, grad, first, second, settings, *, interpret=None):
    """One step of AdamW, computed in float32 (Hopper).

    param, grad, first, second: the parameter, its gradient and the moments of the gradient and of
    its square; float16, bfloat16 or float32 each, of one shape. settings: float32 (6,): learning
    rate, beta1, beta2, epsilon, weight decay and the number of the step, from 1; on the GPU, so
    that a replayed CUDA graph uses the current values. out: ``(param, first, second)`` for a step
    in place.

    Returns the new (param, first, second). TypeError, ValueError for other dtypes and shapes.
    """
    arrays = {"param": param, "grad": grad, "first": first, "second": second}
    for name, x in arrays.items():
        if x.dtype.name not in FLOATS:
            raise TypeError(f"adamw: {name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.shape != param.shape or 0 in x.shape:
            raise ValueError(
                f"adamw: {name} must have elements, and the shape of param, {param.shape}; got"
                f" {x.shape}"
            )
    if settings.shape != (6,) or settings.dtype != np.float32:
        raise ValueError(
            f"adamw: settings must be float32 of shape (6,), got {settings.dtype} of shape"
            f" {settings.shape}"
        )
    x = Problem(param.shape, tuple(x.dtype for x in arrays.values()), 1)
    size = elements_of(("adamw", x.dtypes, param.device, interpret), x.shape, _TILE)
    if size is None:
        return kernel(x, interpret)
    flat = ((x.elements,),) * 4
    alone = functools.partial(kernel, x, interpret)
    return views(kernel(x._replace(shape=(size,)), interpret), (*flat, None), (x.shape,) * 3, alone)
