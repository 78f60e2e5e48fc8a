"""The least of uint32 with `where`: its identity does not fit in int32."""

SEED = 9451
OPERANDS = [
    ("x", (4, 96), "uint32", "wild"),
    ("y", (4, 96), "bool", "wild"),
]
OUTPUTS = [
    ("o", (96,), "uint32"),
]


def make(plgpu, pl, lax, jnp):
    def body(x, y, o):
        o[...] = jnp.min(x[...], axis=0, where=y[...])

    return body, dict()
