"""Softmax of the rows of a matrix by `pl.pallas_call`: one pass over memory.

A program works on whole rows, staged in SMEM: about 8192 elements, so that several blocks fit on an
SM and the copies of some run under the arithmetic of others. Rows that are too long for registers
go by in chunks, twice; the second time they come from the L2 cache."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl

PARAMS = plgpu.CompilerParams(approx_math=True)


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - x.max(axis=1, keepdims=True))
    o_ref[...] = (e * (1 / e.sum(axis=1, keepdims=True))).astype(o_ref.dtype)


def make_softmax(shape, dtype, elements=8192, **options):
    """A kernel for arrays of that shape, whose programs work on about so many elements."""
    rows = max(1, min(elements // shape[1], shape[0]))
    block = pl.BlockSpec((rows, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel,
        out_shape=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(pl.cdiv(shape[0], rows),),
        in_specs=[block],
        out_specs=block,
        compiler_params=PARAMS,
        **options,
    )


# ---- long rows -----------------------------------------------------------------------------------


def long_softmax_kernel(x_ref, o_ref, stats):
    row, visit, k = (pl.program_id(axis) for axis in range(3))
    x = x_ref[...].astype(jnp.float32)

    @pl.when((visit == 0) & (k == 0))
    def _():
        stats[0], stats[1] = -jnp.inf, 0.0  # of what was seen: the greatest, the sum

    @pl.when(visit == 0)
    def _():
        most = jnp.maximum(stats[0], x.max())
        stats[1] = stats[1] * jnp.exp(stats[0] - most) + jnp.exp(x - most).sum()
        stats[0] = most

    @pl.when(visit == 1)
    def _():
        y = jnp.exp(x - stats[0]) * (1 / stats[1])
        o_ref[row, pl.ds(k * x.size, x.size)] = y.astype(o_ref.dtype)


def make_long_softmax(shape, dtype, chunk=8192, steps=4, **options):
    """The same for rows of several chunks."""
    return pl.pallas_call(
        long_softmax_kernel,
        out_shape=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(shape[0], 2, shape[1] // chunk),
        in_specs=[pl.BlockSpec((None, chunk), lambda i, visit, k: (i, k))],
        out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
        scratch_shapes=[plgpu.SMEM((2,), jnp.float32)],
        compiler_params=PARAMS.replace(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), max_concurrent_steps=steps
        ),
        **options,
    )


def main():
    rng = np.random.default_rng(0)
    cases = [(37, 1024, make_softmax), (5, 1000, make_softmax), (2, 16384, make_long_softmax)]
    for rows, cols, make in cases:
        x = rng.standard_normal((rows, cols)).astype(jnp.bfloat16)
        e = np.exp(x.astype(np.float32))
        got = make(x.shape, x.dtype)(x).astype(np.float32)
        np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=1e-2)
    print("ok")


if __name__ == "__main__":
    main()
