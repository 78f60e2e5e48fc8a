"""One step of AdamW, element by element: parameter, gradient and both moments are read once, and
parameter and moments written once."""

import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches

_FLOATS = ("float16", "bfloat16", "float32")
_TILE = 2048


@cached
def _kernel(shape, dtypes, interpret):
    n = math.prod(shape)
    tile = min(n, _TILE)

    def body(param, grad, first, second, settings, *outs):
        overlap_launches()
        start = lax.axis_index("tile") * tile
        at, keep = pl.ds(start, tile), None
        if n % tile:
            keep = jnp.arange(tile) < n - start
        rate, beta1, beta2, eps, decay, step = (settings[i] for i in range(6))

        def load(ref):
            ref = ref.reshape((n,))
            value = ref[at] if keep is None else pl.load(ref, (at,), mask=keep, other=0.0)
            return value.astype(jnp.float32)

        p, g, m, v = map(load, (param, grad, first, second))
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        rate_of_m = rate / (1 - jnp.exp2(step * jnp.log2(beta1)))
        root = jnp.sqrt(v) * lax.rsqrt(1 - jnp.exp2(step * jnp.log2(beta2)))
        p = p * (1 - rate * decay) - rate_of_m * m / (root + eps)
        for ref, value in zip(outs, (p, m, v)):
            ref, value = ref.reshape((n,)), value.astype(ref.dtype)
            if keep is None:
                ref[at] = value
            else:
                pl.store(ref, (at,), value, mask=keep)

    return plgpu.kernel(
        body,
        out_type=tuple(plgpu.ShapeDtypeStruct(shape, dtypes[k]) for k in (0, 2, 3)),
        grid=(pl.cdiv(n, tile),),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="adamw",
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
        if x.dtype.name not in _FLOATS:
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
    return _kernel(param.shape, tuple(x.dtype for x in arrays.values()), interpret)
