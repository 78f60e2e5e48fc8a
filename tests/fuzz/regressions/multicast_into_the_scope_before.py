"""A block that ran ahead filled slots of its peers by multicast while they still read what lay
there in the scope before."""

SEED = 50321
OPERANDS = [  # name, shape, dtype, kind of data
    ("x1", (128, 128), "float16", "small"),
    ("x2", (128, 128), "float16", "small"),
    ("x14", (96, 64), "bfloat16", "wild"),
]
OUTPUTS = [
    ("o11", (64, 1024), "float32"),
    ("o12", (2, 2, 1, 2, 64, 1), "float32"),
    ("o23", (32, 3, 1536), "bfloat16"),
]


def make(plgpu, pl, lax, jnp):
    def body(x1, x2, x14, o11, o12, o23):
        g0 = lax.axis_index("g0")
        c0 = lax.axis_index("c0")
        c1 = lax.axis_index("c1")
        t = lax.axis_index("t")

        def f13(s3, s4, b5):
            @pl.when(t == 0)
            def f7():
                plgpu.copy_gmem_to_smem(x1, s3, b5)
                plgpu.copy_gmem_to_smem(x2, s4, b5)

            plgpu.barrier_wait(b5)

            def f8(c6):
                plgpu.wgmma(c6, s3.at[pl.ds(pl.multiple_of(t * 64, 64), 64)], s4.T)
                return c6[...]

            v9 = pl.run_scoped(f8, plgpu.ACC((64, 128)))
            v10 = jnp.max(v9, axis=1)
            o11[:, pl.ds(lax.axis_index(("t", "c1", "c0")) * 128, 128)] = v9 - lax.broadcast_in_dim(
                v10, (64, 128), (0,)
            )
            o12.at[c0, c1, g0, t][:, ((g0 << 1) + 0)] = v10

        pl.run_scoped(
            f13,
            plgpu.SMEM(
                (128, 128),
                jnp.float16,
                transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.SMEM(
                (128, 128),
                jnp.float16,
                transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
            ),
            plgpu.Barrier(2),
            collective_axes="t",
        )

        def f16(i19, p15):
            (i20,) = i19
            v22 = p15[...]
            o23.at[:, :, pl.ds((((i20 * 2 + t) * 2 + c0) * 2 + c1) * 64, 64)][
                :, jnp.maximum((jnp.abs(i20) % 1 + 0), c0)
            ] = v22

        plgpu.emit_pipeline_warp_specialized(
            f16,
            grid=(3,),
            memory_registers=40,
            in_specs=[plgpu.BlockSpec((32, 64), lambda a0: (a0, 0), collective_axes="c1")],
            max_concurrent_steps=3,
            wg_axis="t",
            num_compute_wgs=1,
        )(x14)

    return body, dict(
        grid=(1,),
        grid_names=("g0",),
        cluster=(2, 2),
        cluster_names=("c0", "c1"),
        num_threads=2,
        thread_name="t",
    )
