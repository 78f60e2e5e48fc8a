"""RMSNorm of the rows of a matrix by `pl.pallas_call`: one pass over memory.

As in fused_softmax.py a program works on whole rows. The row is staged in SMEM and read from there
twice, in parts of 4096 elements: that takes few registers, so that many blocks fit on an SM. The
weight is the same for all; it is read where it lies and stays in the L1 cache."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

EPSILON = 1e-6
PARAMS = plgpu.CompilerParams(approx_math=True)


def rms_norm_kernel(x_ref, w_ref, o_ref):
    n = x_ref.shape[1]
    part = n if n % 4096 else 4096
    parts = [pl.ds(k, part) for k in range(0, n, part)]
    squares = sum(jnp.square(x_ref[:, p].astype(jnp.float32)) for p in parts)
    scale = lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) * (1 / n) + EPSILON)
    for p in parts:
        y = x_ref[:, p].astype(jnp.float32) * scale * w_ref[p].astype(jnp.float32)
        o_ref[:, p] = y.astype(o_ref.dtype)


def make_rms_norm(shape, dtype, elements=8192, **options):
    """A kernel for arrays of that shape and a weight for each column."""
    rows = max(1, min(elements // shape[1], shape[0]))
    block = pl.BlockSpec((rows, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        rms_norm_kernel,
        out_shape=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(pl.cdiv(shape[0], rows),),
        in_specs=[block, pl.BlockSpec(memory_space=plgpu.GMEM)],
        out_specs=block,
        compiler_params=PARAMS,
        **options,
    )


# ---- long rows -----------------------------------------------------------------------------------


def long_rms_norm_kernel(x_ref, w_ref, o_ref, squares):
    row, visit, k = (pl.program_id(axis) for axis in range(3))
    x = x_ref[...].astype(jnp.float32)
    here = pl.ds(k * x.size, x.size)

    @pl.when((visit == 0) & (k == 0))
    def _():
        squares[0] = 0.0

    @pl.when(visit == 0)
    def _():
        squares[0] += jnp.sum(x * x)

    @pl.when(visit == 1)
    def _():
        scale = lax.rsqrt(squares[0] * (1 / w_ref.size) + EPSILON)
        o_ref[row, here] = (x * scale * w_ref[here].astype(jnp.float32)).astype(o_ref.dtype)


def make_long_rms_norm(shape, dtype, chunk=8192, steps=4, **options):
    """The same for rows of several chunks, which go by twice, the second time from the L2 cache."""
    return pl.pallas_call(
        long_rms_norm_kernel,
        out_shape=plgpu.ShapeDtypeStruct(shape, dtype),
        grid=(shape[0], 2, shape[1] // chunk),
        in_specs=[
            pl.BlockSpec((None, chunk), lambda i, visit, k: (i, k)),
            pl.BlockSpec(memory_space=plgpu.GMEM),
        ],
        out_specs=pl.BlockSpec(memory_space=plgpu.GMEM),
        scratch_shapes=[plgpu.SMEM((1,), jnp.float32)],
        compiler_params=PARAMS.replace(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), max_concurrent_steps=steps
        ),
        **options,
    )


def main():
    rng = np.random.default_rng(0)
    cases = [(37, 1024, make_rms_norm), (5, 1000, make_rms_norm), (2, 16384, make_long_rms_norm)]
    for rows, cols, make in cases:
        x = rng.standard_normal((rows, cols)).astype(jnp.bfloat16)
        w = rng.standard_normal(cols).astype(jnp.bfloat16)
        y = x.astype(np.float32)
        want = y / np.sqrt((y * y).mean(1, keepdims=True) + EPSILON) * w.astype(np.float32)
        got = make(x.shape, x.dtype)(x, w).astype(np.float32)
        np.testing.assert_allclose(got, want, rtol=1e-2)
    print("ok")


if __name__ == "__main__":
    main()
