"""Memory that one scope wrote with stores and the next fills by TMA needs a proxy fence between."""

SEED = 2
OPERANDS = [
    ("x", (2, 64), "float32", "norm"),
]
OUTPUTS = [
    ("o", (64,), "float32"),
    ("p", (64,), "float32"),
]


def make(plgpu, pl, lax, jnp):
    def body(x, o, p):
        def first(s):
            s[...] = x[0]
            o[...] = s[...] + 1

        def second(s, b):
            plgpu.copy_gmem_to_smem(x.at[1], s, b)
            plgpu.barrier_wait(b)
            p[...] = s[...]

        pl.run_scoped(first, plgpu.SMEM((64,), jnp.float32))
        pl.run_scoped(second, plgpu.SMEM((64,), jnp.float32), plgpu.Barrier())

    return body, dict()
