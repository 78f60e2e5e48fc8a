"""Softmax of the rows of a matrix: one block of rows per program, reductions in registers."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

ROWS, COLS, BLOCK = 200, 257, 64  # nothing need divide anything


@plgpu.kernel(
    out_type=plgpu.ShapeDtypeStruct((ROWS, COLS), jnp.float32),
    grid=(pl.cdiv(ROWS, BLOCK),),
    grid_names=("rows",),
)
def softmax(x_ref, o_ref):
    def block(_, x_smem, o_smem):
        x = x_smem[...]
        x = jnp.where(plgpu.broadcasted_iota(jnp.int32, x.shape, 1) < COLS, x, -jnp.inf)
        e = jnp.exp(x - lax.broadcast_in_dim(jnp.max(x, axis=1), x.shape, [0]))
        o_smem[...] = e / lax.broadcast_in_dim(jnp.sum(e, axis=1), x.shape, [0])

    rows = plgpu.BlockSpec((BLOCK, 264), lambda: (lax.axis_index("rows"), 0))
    plgpu.emit_pipeline(block, grid=(), in_specs=[rows], out_specs=[rows])(x_ref, o_ref)


x = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32)
e = np.exp(x - x.max(1, keepdims=True))
np.testing.assert_allclose(softmax(x), e / e.sum(1, keepdims=True), rtol=1e-5)
print("ok")
