"""Keys and values of 8 bits as 16-bit ones, for attention of many queries on Hopper.

Blocks of attention that widen elements as they arrive (_attention_narrow.py) do so again for every
tile of queries, which takes them about as long as three quarters of the products. A kernel of its
own reads and writes 3 bytes an element once: with 1,024 queries to a head of keys that is less,
causal or not. Scales are multiplied in before elements are rounded to 16 bits. Pages stay as they
are: a copy of them would need memory for the longest sequence of all."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SeveralKernels, overlap_launches

_LEAST = 1024  # queries to a head of keys
_TILE = 8192  # elements of a block
_VECTOR = 8  # elements that a lane loads and stores together


def pays(x):
    """Is it faster to widen keys and values first? x: a Problem."""
    return bool(x.kv_dtype) and not x.page and x.queries * x.group >= _LEAST


@cached
def _widen(shape, dtype, to, scale_dims, interpret):
    """Kernel: an array [batch, keys, heads, dim], times its scale if there is one."""
    batch, keys, heads, dim = shape
    least = 128 * _VECTOR // math.gcd(dim, 128 * _VECTOR)
    height = least * max(1, _TILE // (least * dim))
    layout = plgpu.Layout.WG_STRIDED((height, dim), vec_size=_VECTOR)

    def body(x, *refs):
        overlap_launches()
        *scales, out = refs
        b, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        at = b, pl.ds(tile * height, height), head
        rest = keys - tile * height

        def widened(value):
            value = value.astype(jnp.float32)
            for scale in scales:
                value = value * (scale[head] if scale_dims == 1 else scale[b, head])
            return value.astype(to)

        def whole():
            out[at] = widened(plgpu.load(x.at[at], layout=layout))

        def last():
            keep = lax.broadcasted_iota(jnp.int32, (height, dim), 0) < rest
            pl.store(out, at, widened(pl.load(x, at, mask=keep, other=0)), mask=keep)

        if keys % height == 0:
            whole()
        else:
            pl.when(rest >= height)(whole)
            pl.when(rest < height)(last)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, to),
        grid=(batch, pl.cdiv(keys, height), heads),
        grid_names=("batch", "tile", "head"),
        interpret=interpret,
        kernel_name="attention_widen",
    )


class Widened(SeveralKernels):
    """Attention to keys and values of 16 bits, after those of 8 bits have been widened."""

    def __init__(self, x, make, interpret):
        """make(problem): the kernel of a problem."""
        _, k, v = x.shapes
        self.order = *x.scores.operands, *x.others
        of_k, of_v = x.scales[1:]
        self.widen_k = _widen(k, x.kv_dtype, x.dtype, of_k, interpret)
        self.widen_v = _widen(v, x.kv_dtype, x.dtype, of_v, interpret)
        self.attention = make(x._replace(kv_dtype=None, scales=(x.scales[0], 0, 0)))

    def __call__(self, q, k, v, *others, out=None, stream=None):
        named = dict(zip(self.order, others, strict=True))
        k, v = (
            widen(x, *([named.pop(name)] if name in named else []), stream=stream)
            for widen, x, name in ((self.widen_k, k, "k_scale"), (self.widen_v, v, "v_scale"))
        )
        return self.attention(q, k, v, *named.values(), out=out, stream=stream)
