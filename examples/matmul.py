"""A pipelined tensor-core matmul on a grid of output tiles."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

M, N, K = 256, 384, 320


@plgpu.kernel(
    out_type=plgpu.ShapeDtypeStruct((M, N), jnp.float32),
    grid=(M // 128, N // 128),
    grid_names=("m", "n"),
)
def matmul(a_gmem, b_gmem, o_gmem):
    m, n = lax.axis_index("m"), lax.axis_index("n")

    def compute(acc):
        def step(_, a_smem, b_smem):
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(K // 64,),
            max_concurrent_steps=4,
            in_specs=[
                plgpu.BlockSpec((128, 64), lambda k: (m, k), delay_release=1),
                plgpu.BlockSpec((64, 128), lambda k: (k, n), delay_release=1),
            ],
        )(a_gmem, b_gmem)
        return acc[...]

    o_gmem[pl.ds(m * 128, 128), pl.ds(n * 128, 128)] = pl.run_scoped(compute, plgpu.ACC((128, 128)))


rng = np.random.default_rng(0)
a = rng.standard_normal((M, K)).astype(np.float16)
b = rng.standard_normal((K, N)).astype(np.float16)
np.testing.assert_allclose(
    matmul(a, b), a.astype(np.float32) @ b.astype(np.float32), rtol=1e-2, atol=5e-2
)
print("ok")
