"""The sums of equal elements along lanes and registers are not equal; every one was the element."""

SEED = 3100087
OPERANDS = []
OUTPUTS = [
    ("o", (2, 1, 64, 8), "float16"),
    ("p", (1024,), "int32"),
]


def make(plgpu, pl, lax, jnp):
    def body(o, p):
        o[...] = jnp.cumsum(jnp.ones((2, 1, 64, 8), jnp.float16), axis=3)
        p[...] = lax.cumprod(jnp.full((1024,), 3, jnp.int32), axis=0, reverse=True)

    return body, dict()
