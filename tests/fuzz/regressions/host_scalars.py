"""jnp.broadcast_to and jnp.expand_dims of a number make a traced array in a kernel."""

SEED = 510
OPERANDS = []
OUTPUTS = [
    ("o", (4, 8), "float32"),
    ("p", (1,), "int32"),
]


def make(plgpu, pl, lax, jnp):
    def body(o, p):
        o[...] = jnp.broadcast_to(jnp.float32(-3.0), (32,)).reshape(4, 8)
        p[...] = jnp.expand_dims(jnp.int32(7), 0)

    return body, dict()
