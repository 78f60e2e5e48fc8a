"""A mask of one element in a layout that the user gave has a place, and so has what it loads."""

SEED = 7000098
OPERANDS = [
    ("x", (1, 1), "bfloat16", "wild"),
    ("y", (1, 1), "bool", "wild"),
    ("n", (4,), "int32", (0, 0)),
]
OUTPUTS = [
    ("o", (1, 1), "bfloat16"),
    ("r", (1, 1), "int32"),
    ("q", (1, 1), "int32"),
]


def make(plgpu, pl, lax, jnp):
    def body(x, y, n, o, r, q):
        m = plgpu.load(y, layout=plgpu.Layout.WGMMA_TRANSPOSED)
        o[...] = pl.load(x, (pl.ds(n[0], 1), slice(0, 1)), mask=m & (n[0] < 1))
        q[...] = jnp.full((1, 1), 5, jnp.int32)
        r[...] = pl.atomic_add(q, ..., 7)
        pl.atomic_add(q, ..., 7, mask=m)

    return body, dict()
