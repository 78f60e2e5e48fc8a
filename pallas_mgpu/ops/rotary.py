"""Rotary position embedding: pairs of elements of a head are rotated by angles of the position.

Element i of the first half of a head and element i of the second half are a pair. A block takes a
few positions of all heads; cosines and sines are read once for each. The gradient is the rotation
by the opposite angles."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches

_FLOATS = ("float16", "bfloat16", "float32")
_TILE = 2048  # elements of half a tile


@cached
def _kernel(shape, dtype, inverse, interpret):
    batch, length, heads, dim = shape
    half = dim // 2
    height = max(1, min(_TILE // half, length))

    def body(x, cos, sin, o):
        overlap_launches()
        b, h = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * height
        rows, keep = pl.ds(start, height), None
        if length % height:
            keep = lax.broadcasted_iota(jnp.int32, (height, half), 0) < length - start

        def load(ref, at):
            value = ref[at] if keep is None else pl.load(ref, at, mask=keep, other=0.0)
            return value.astype(jnp.float32)

        def save(first, value):
            at, value = (b, rows, h, pl.ds(first, half)), value.astype(dtype)
            if keep is None:
                o[at] = value
            else:
                pl.store(o, at, value, mask=keep)

        c, s = (load(ref, (rows, pl.ds(0, half))) for ref in (cos, sin))
        s = -s if inverse else s
        left, right = (load(x, (b, rows, h, pl.ds(k, half))) for k in (0, half))
        save(0, left * c - right * s)
        save(half, right * c + left * s)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(batch, pl.cdiv(length, height), heads),
        grid_names=("batch", "tile", "head"),
        interpret=interpret,
        kernel_name="rotary",
    )


@plgpu.specialize
def rotary(x, cos, sin, *, inverse=False, interpret=None):
    """Rotary position embedding of queries or keys, computed in float32 (Hopper).

    x: [batch, length, heads, head_dim], float16, bfloat16 or float32; head_dim even. cos, sin:
    [length, head_dim / 2], any of these dtypes, of the angles. The pairs are (i, i + head_dim / 2).
    inverse: rotate by the opposite angles, which is the gradient. out: a preallocated result, which
    may be ``x``.

    Returns an array like ``x``. TypeError, ValueError for other dtypes and shapes.
    """
    for name, a in (("x", x), ("cos", cos), ("sin", sin)):
        if a.dtype.name not in _FLOATS:
            raise TypeError(f"rotary: {name} must be float16, bfloat16 or float32, got {a.dtype}")
    if x.ndim != 4 or x.shape[3] % 2 or 0 in x.shape:
        raise ValueError(
            "rotary: x must have the dims [batch, length, heads, head_dim] with an even head_dim,"
            f" got shape {x.shape}"
        )
    want = x.shape[1], x.shape[3] // 2
    for name, a in (("cos", cos), ("sin", sin)):
        if a.shape != want:
            raise ValueError(f"rotary: {name} must have the shape {want}, got {a.shape}")
    return _kernel(x.shape, np.dtype(x.dtype), bool(inverse), interpret)
