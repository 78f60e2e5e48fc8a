"""The matmul of `python -m pallas_mgpu` and of the first example: one Pallas thread per block, a
software pipeline of swizzled tiles, wgmma, and a TMA store. Written in the public language
alone."""

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp


def matmul_kernel(
    m, n, k, dtype, *, tile_m=128, tile_n=128, tile_k=64, steps=3, group=8, interpret=None
):
    """A kernel for ``(m, k) @ (k, n) -> (m, n)``; the tiles must divide the shapes.

    dtype: float16 or bfloat16. steps: blocks of A and B in flight. group: rows of tiles that are
    worked on together, so that their operands stay in L2.
    """
    if min(m, n, k) < 1:
        raise ValueError(f"matmul_kernel: extents must be positive, got {(m, n, k)}")
    if m % tile_m or n % tile_n or k % tile_k:
        raise ValueError(
            f"matmul_kernel: tiles {(tile_m, tile_n, tile_k)} do not divide {(m, n, k)}"
        )
    tiles_m, tiles_n = m // tile_m, n // tile_n
    group = next(g for g in range(min(group, tiles_m), 0, -1) if tiles_m % g == 0)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a_gmem, b_gmem, o_gmem):
        tile = lax.axis_index("tile")
        in_group = tile % (group * tiles_n)
        row = (tile // (group * tiles_n)) * group + in_group % group
        col = in_group // group

        def compute(acc):
            def step(_, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(k // tile_k,),
                in_specs=[
                    plgpu.BlockSpec(
                        (tile_m, tile_k), lambda s: (row, s), transforms=transforms, delay_release=1
                    ),
                    plgpu.BlockSpec(
                        (tile_k, tile_n), lambda s: (s, col), transforms=transforms, delay_release=1
                    ),
                ],
                max_concurrent_steps=steps,
            )(a_gmem, b_gmem)
            return acc[...].astype(dtype)

        result = pl.run_scoped(compute, plgpu.ACC((tile_m, tile_n), jnp.float32))

        def store(o_smem):
            o_smem[...] = result
            plgpu.commit_smem()
            where = (pl.ds(row * tile_m, tile_m), pl.ds(col * tile_n, tile_n))
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[where])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(store, plgpu.SMEM((tile_m, tile_n), dtype, transforms=transforms))

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((m, n), dtype),
        grid=(tiles_m * tiles_n,),
        grid_names=("tile",),
        interpret=interpret,
        kernel_name="matmul",
    )
