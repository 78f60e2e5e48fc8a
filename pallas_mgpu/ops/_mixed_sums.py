"""Products whose left operand is weights of 8 or 4 bits, with scales for groups of K.

The tensor cores take the weights from registers, each lane the elements that it has loaded and
converted. Scales do not multiply weights, whose products would have to be rounded, but float32
sums, and without a second accumulator: what has been added up so far is held in units of the scale
of the current group. Where the next group begins, the sums are multiplied by the ratio of both
scales, in place, and the last scale multiplies the result. The weights of a step are converted
while the product of the step before runs.

Where a scale is 0, or tiny beside the unit, the unit stays, and the weights of the group are
multiplied by the ratio: so nothing is divided by 0, and no sum becomes infinite."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu import numpy as jnp

BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8}  # of weights
_TINY = 2.0**-64  # of the unit


def load_weights(ref, dtype):
    """64 rows of weights of a slot, as floats."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(dtype)


def load_scales(ref):
    """Of 64 rows of weights, float32."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)


def scaled(value, scales):
    """Each row of sums times its scale; scales: None for ones."""
    if scales is None:
        return value
    return value * lax.broadcast_in_dim(scales.astype(jnp.float32), value.shape, [0])


def _change(unit, scales, dtype):
    """The next unit, the old one as a multiple of it, and what the weights of a group with such
    scales are multiplied by, so that their products are sums in the next unit."""
    tiny = jnp.abs(scales) <= jnp.abs(unit) * _TINY
    factor = jnp.where(tiny, jnp.where(scales == 0, 0.0, scales / unit), 1.0).astype(dtype)
    ratio = jnp.where(tiny, 1.0, unit / scales)
    return jnp.where(tiny, unit, scales), ratio, factor


def _times(weights, factor):
    """Weights times a factor that is 1 but for tiny scales: warps without one do not multiply."""
    spread = lax.broadcast_in_dim(factor, weights.shape, [0])
    return plgpu.ext.warp_where(spread != 1, lambda: weights * spread, weights, along=1)


def sum_of_groups(acc, groups, each, scales_of, weights_of, issue, release):
    """The scaled sum over groups, at least one, of `each` steps. acc: an accumulator of 64 rows.

    scales_of(g): the scales of a group, whose first step is there then, or None for ones.
    weights_of(s, first): the weights of step s; first: of a group, after its scales. issue(s,
    weights): the product, into acc. release(s): its slot may be filled again."""

    def products(first, factor, w):
        for j in range(each):
            issue(first + j, w)
            if j + 1 < each:
                w = weights_of(first + j + 1, False)
                w = w if factor is None else _times(w, factor)

    def release_all(first):
        for j in range(each):
            release(first + j)

    def group(g, carry):
        unit, factor, w = carry
        products(g * each, factor, w)
        scales, w = scales_of(g + 1), weights_of((g + 1) * each, True)
        if scales is not None:
            unit, ratio, factor = _change(unit, scales, w.dtype)
            w = _times(w, factor)
        plgpu.wgmma_wait(0)
        release_all(g * each)
        if scales is not None:
            acc[...] = scaled(acc[...], ratio)
        return unit, factor, w

    zeros = jnp.zeros(acc.shape, jnp.float32)
    acc[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    unit, w = scales_of(0), weights_of(0, True)
    factor = None if unit is None else jnp.ones_like(unit).astype(w.dtype)
    unit, factor, w = lax.fori_loop(0, groups - 1, group, (unit, factor, w))
    last = (groups - 1) * each
    products(last, factor, w)
    plgpu.wgmma_wait(0)
    release_all(last)
    return scaled(acc[...], unit)
