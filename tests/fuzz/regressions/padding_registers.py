"""A layout_cast read register -1 of an array where the result is padded in every lane."""

SEED = 415
OPERANDS = [
    ("x", (7,), "int8", "wild"),
]
OUTPUTS = [
    ("o", (7,), "bfloat16"),
]


def make(plgpu, pl, lax, jnp):
    def body(x, o):
        o[...] = plgpu.layout_cast(x[...], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.bfloat16)

    return body, dict()
