"""On a GPU, by NVRTC 13.0: the scratch of a scan stepped along with a ring of shared memory."""

SEED = 9600014
OPERANDS = [  # name, shape, dtype, kind of data
    ("x4", (2, 128), "bfloat16", "small"),
    ("x5", (128, 9, 2), "bfloat16", "wild"),
    ("x9", (128, 5), "float32", "wild"),
    ("x10", (136,), "int32", "small"),
    ("x11", (4,), "int16", (0, 2)),
    ("x12", (4,), "int16", (1, 2)),
    ("x13", (32, 5, 4), "int32", "wild"),
]
OUTPUTS = [
    ("o16", (4, 384), "float32"),
]


def make(plgpu, pl, lax, jnp):
    def body(x4, x5, x9, x10, x11, x12, x13, o16, q18):
        g0 = lax.axis_index("g0")

        def f17(s1):
            @pl.loop(0, 3)
            def f3(i2):
                def f8(i6, c7):
                    return jnp.roll(
                        plgpu.layout_cast(
                            lax.dynamic_slice(
                                lax.cummin(
                                    plgpu.layout_cast(
                                        plgpu.broadcasted_iota(jnp.float32, (2, 128), 0),
                                        plgpu.Layout.WG_STRIDED((2, 128), 1),
                                    ),
                                    axis=0,
                                    reverse=True,
                                ),
                                (
                                    (3 - (i6 % 4)),
                                    0,
                                ),
                                (1, 128),
                            ),
                            plgpu.Layout.WG_STRIDED((1, 128), 1),
                        ),
                        i6,
                        axis=1,
                    ) + jnp.maximum(
                        x9.transpose((0, 1)).at[:, g0][...],
                        jnp.roll(x10[6:134].view(jnp.float32), -1, axis=0),
                    )  # noqa: E501

                v14 = jnp.repeat(
                    plgpu.transpose_ref(x13, (1, 2, 0))[
                        jnp.where(
                            (x12[3].astype(jnp.int32) % 2 == 0),
                            lax.fori_loop(0, 0, lambda i, c: c + 1, jnp.int32(0)),
                            jnp.where((x11[3].astype(jnp.int32) < 2), g0, jnp.clip(i2, 4, 4)),
                        ),
                        :,
                    ],
                    4,
                    axis=1,
                )  # noqa: E501
                v15 = jnp.take_along_axis(
                    lax.fori_loop(
                        -2,
                        lax.fori_loop(0, 0, lambda i, c: c + 1, jnp.int32(-2)),
                        f8,
                        lax.cummin(
                            plgpu.layout_cast(
                                (
                                    jnp.cumsum(x4[0:1], axis=1)
                                    >= plgpu.layout_cast(
                                        plgpu.load(
                                            x5.at[:, :, -1].at[0:128, -1:],
                                            layout=plgpu.Layout.WGMMA,
                                        ),
                                        plgpu.Layout.WGMMA,
                                    ).transpose()
                                ).astype(jnp.float32),
                                plgpu.Layout.WG_STRIDED((1, 128), 1),
                            ),
                            axis=0,
                        ),
                    ),
                    (v14 % 1),
                    axis=0,
                )  # noqa: E501
                plgpu.wait_smem_to_gmem(2, wait_read_only=True)
                s1[i2 % 3] = v15
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(s1.at[i2 % 3], o16.at[:, pl.ds((i2 * 1 + g0) * 128, 128)])

            plgpu.wait_smem_to_gmem(0)

        f17(q18)

    return body, dict(
        grid=(1,), grid_names=("g0",), scratch_types=[plgpu.SMEM((3, 4, 128), jnp.float32)]
    )  # noqa: E501
