"""The kernel that repeats what all elements of a `vmap` share."""

import math

from . import lax, pl
from ._caches import cached
from ._kernel import kernel
from ._types import ShapeDtypeStruct

_TILE = 4096  # elements that a block repeats


@cached
def repeating(shape, dtype):
    """Kernel: copies of an array, along the first dim of the result."""
    total = math.prod(shape[1:])
    tile = min(total, _TILE)

    def body(x, out):
        n, start = lax.axis_index("element"), lax.axis_index("tile") * tile
        # the last tiles begin earlier where they do not come out even
        at = pl.ds(lax.select(start > total - tile, total - tile, start), tile)
        out.reshape((shape[0], total))[n, at] = x.reshape((total,))[at]

    return kernel(
        body,
        out_type=ShapeDtypeStruct(shape, dtype),
        grid=(shape[0], -(-total // tile)),
        grid_names=("element", "tile"),
        kernel_name="repeating",
    )
