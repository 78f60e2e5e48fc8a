"""All-gather, then matmul, on a ring of devices: rows travel while the rows before are multiplied.

Each device has some rows of A and some columns of B, and computes all rows of A @ B for its
columns. In step i it multiplies the rows of the device i places on. The blocks with the first
columns send each tile of A that is in shared memory on to the neighbour, which needs it in the next
step. Slots are kept one step longer (`delay_release=1`), since a store still reads them. A
semaphore for each step counts the blocks of the neighbour that have sent everything of it. One for
all steps would not do: a block that is two steps ahead would count for one that is late, which the
race detector finds.

This runs four devices on the interpreter; `main(0, 1)` runs on those GPUs."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile
COMPUTE = 2  # warpgroups that multiply, with 64 rows each; one more copies
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def ring_all_gather_matmul(m, k, n, devices, dtype, blocks, **options):
    """A kernel of a (m, k) and b (k, n) on each device of a mesh with the axis "ring", for
    `plgpu.spmd`: the product (devices * m, n), and the memory (devices - 1, m, k) that rows arrive
    in."""
    tiles_m, tiles_n = m // ROWS, n // COLUMNS

    def body(a, b, c, ring):
        me, wg = lax.axis_index("ring"), lax.axis_index("wg")
        to = (me + devices - 1) % devices
        received = pl.get_global(plgpu.SemaphoreType.REGULAR((devices - 1,)))

        def multiply(source, step):
            """The rows in `source`, which are sent on unless this is the last step."""
            window = c.at[pl.ds((me + step) % devices * m, m)]

            @plgpu.nd_loop((tiles_m * tiles_n,), collective_axes="block")
            def _(loop):
                row, column = loop.index[0] % tiles_m, loop.index[0] // tiles_m

                def one(index, a_tile, b_tile, acc):
                    plgpu.wgmma(acc, a_tile.at[pl.ds(wg * 64, 64)], b_tile)
                    if step < devices - 1:

                        @pl.when((wg == 0) & (column == 0))
                        def _():
                            there = plgpu.remote_ref(ring, to).at[step]
                            at = pl.ds(row * ROWS, ROWS), pl.ds(index[0] * DEPTH, DEPTH)
                            plgpu.copy_smem_to_gmem(a_tile, there.at[at])
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                    plgpu.wgmma_wait(1)
                    return acc

                def compute(pipeline):
                    def whole(acc):
                        return pipeline(acc)[...]

                    value = pl.run_scoped(whole, plgpu.ACC((64, COLUMNS), jnp.float32))
                    at = pl.ds(row * ROWS + wg * 64, 64), pl.ds(column * COLUMNS, COLUMNS)
                    window[at] = value.astype(dtype)
                    # before its slots are used again by the next tile
                    pl.when(wg == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

                plgpu.emit_pipeline_warp_specialized(
                    one,
                    grid=(k // DEPTH,),
                    in_specs=[
                        plgpu.BlockSpec(
                            (ROWS, DEPTH), lambda s: (row, s), transforms=TILED, delay_release=1
                        ),
                        plgpu.BlockSpec(
                            (DEPTH, COLUMNS),
                            lambda s: (s, column),
                            transforms=TILED,
                            delay_release=1,
                        ),
                    ],
                    max_concurrent_steps=4,
                    wg_axis="wg",
                    num_compute_wgs=COMPUTE,
                    memory_registers=40,
                    compute_context=compute,
                )(source, b)

        for step in range(devices):
            multiply(a if step == 0 else ring.at[step - 1], step)
            if step == devices - 1:
                break

            @pl.when(wg == 0)
            def _(step=step):
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(received.at[step], device_id=to)

            pl.semaphore_wait(received.at[step], blocks, decrement=False)

    return plgpu.kernel(
        body,
        out_type=(
            plgpu.ShapeDtypeStruct((devices * m, n), dtype),
            plgpu.ShapeDtypeStruct((devices - 1, m, k), dtype),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        **options,
    )


def main(*gpus):
    devices = len(gpus) or 4
    m, k, n, blocks = (1024, 4096, 2048, 132) if gpus else (128, 128, 256, 2)
    mesh = plgpu.DeviceMesh((devices,), "ring", devices=gpus or None)
    options = {} if gpus else {"interpret": plgpu.InterpretParams(detect_races=True)}
    kernel = ring_all_gather_matmul(m, k, n, devices, np.float16, blocks, **options)
    rng = np.random.default_rng(0)
    a, b = (
        [rng.standard_normal(shape, np.float32).astype(np.float16) / 8 for _ in range(devices)]
        for shape in ((m, k), (k, n))
    )
    if gpus:
        put = [[plgpu.device_put(x, d) for x, d in zip(side, gpus)] for side in (a, b)]
    c, _ = plgpu.spmd(kernel, mesh)(*(put if gpus else (a, b)))
    for d in range(devices):
        want = np.concatenate(a).astype(np.float32) @ b[d].astype(np.float32)
        np.testing.assert_allclose(np.asarray(c[d], np.float32), want, rtol=2e-2, atol=2e-2)
    print("ok")


if __name__ == "__main__":
    main()
