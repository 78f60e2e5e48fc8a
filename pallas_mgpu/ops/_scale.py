"""An array times one number of the device, in place: nothing is read or written if that is 1, which
the host need not know."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import overlap_launches

_TILE = 4096  # elements
_RESIDENT = 8  # blocks of an SM


@cached
def _kernel(shape, dtype, programs, interpret):
    total = math.prod(shape)
    tiles = pl.cdiv(total, _TILE)
    programs = min(programs, tiles)

    def body(x, factor, out):
        overlap_launches()
        me, by = lax.axis_index("program"), factor.reshape((1,))[0]
        x, out = x.reshape((total,)), out.reshape((total,))

        def one(i, _):
            start = (me + i * programs) * _TILE
            at, keep = pl.ds(start, _TILE), None
            if total % _TILE:
                keep = jnp.arange(_TILE) < total - start
            value = x[at] if keep is None else pl.load(x, at, mask=keep, other=0)
            value = (value.astype(jnp.float32) * by).astype(dtype)
            if keep is None:
                out[at] = value
            else:
                pl.store(out, at, value, mask=keep)

        @pl.when(by != 1)
        def _():
            lax.fori_loop(0, (tiles - me + (programs - 1)) // programs, one, None)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        kernel_name="scale",
    )


@plgpu.specialize
def _scale(x, factor, *, interpret=None):
    return _kernel(x.shape, x.dtype, _RESIDENT * plgpu.sm_count(x.device), interpret)


def scale_in_place(x, factor):
    """x *= factor. x: float16, bfloat16 or float32; factor: one number, float32."""
    _scale(x, factor, out=x)
