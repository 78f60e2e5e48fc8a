"""The examples of the general page on Pallas and of the glossary, as they stand there but for the
imports and the decorators of jit; block indices where the page multiplies them by the block size
are counted in blocks. What runs on TPUs only, and forms that never were part of the language, are
refused with the right form."""

import functools
import types

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import nn, pl
from pallas_mgpu import numpy as jnp

jax = types.SimpleNamespace(ShapeDtypeStruct=plgpu.ShapeDtypeStruct, nn=nn, vmap=plgpu.vmap)


@pytest.fixture
def pallas_call(run):
    """`pl.pallas_call` for the way of running; its kernels take and give NumPy arrays."""

    def make(*args, **options):
        if run.way != "cuda":
            options["interpret"] = True
        kernel = pl.pallas_call(*args, **options)
        return lambda *arrays: run.call(kernel, *arrays)

    return make


# ---- Quickstart, Core Concepts -------------------------------------------------------------------


def add_vectors_kernel(x_ref, y_ref, o_ref):
    x, y = x_ref[...], y_ref[...]
    o_ref[...] = x + y


def test_add_vectors(pallas_call):
    def add_vectors(x, y):
        return pallas_call(add_vectors_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(
            x, y
        )

    x = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(add_vectors(x, x), 2 * x)


def test_kernel_function_over_a_grid(pallas_call, rng):
    """A grid of 4 x 5 programs, all of which write the whole result."""

    def kernel_function(x_ref, y_ref, output_ref):
        # Read from refs
        x_value = x_ref[...]
        y_value = y_ref[...]
        # Perform computation
        result = x_value + y_value
        # Write to output ref
        output_ref[...] = result

    x, y = (rng.standard_normal((16, 32)).astype(np.float32) for _ in range(2))
    result = pallas_call(
        kernel_function, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(4, 5)
    )(x, y)
    np.testing.assert_array_equal(result, x + y)


# ---- Grids and BlockSpecs ------------------------------------------------------------------------


def test_block_specs_and_program_ids(pallas_call, rng):
    block_spec = pl.BlockSpec(
        block_shape=(64, 128),  # Size of each block
        index_map=lambda i, j: (i, j),  # How to map grid indices to blocks
    )

    def kernel(x_ref, o_ref):
        i = pl.program_id(0)  # Get current index along first grid axis
        j = pl.program_id(1)  # Get current index along second grid axis
        # Process block based on grid position
        o_ref[...] = x_ref[...] * i + j

    x = rng.standard_normal((640, 640)).astype(np.float32)
    result = pallas_call(
        kernel,
        grid=(10, 5),
        in_specs=[block_spec],
        out_specs=block_spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)
    i, j = np.arange(640)[:, None] // 64, np.arange(640) // 128
    np.testing.assert_allclose(result, x * i + j, rtol=1e-6, atol=1e-6)


# ---- Software Pipelining -------------------------------------------------------------------------


def test_pipelining(pallas_call, rng):
    """The page's parameters do not exist; those that do, with an axis to pipeline over."""
    specs = {
        "in_specs": [pl.BlockSpec((64, 128), lambda i, j: (i, j))],
        "out_specs": pl.BlockSpec((64, 128), lambda i, j: (i, j)),
    }
    with pytest.raises(TypeError, match="max_concurrent_steps"):
        plgpu.pipelines.PipelineParams(num_stages=3, prefetch=True)

    @functools.partial(
        pallas_call,
        out_shape=jax.ShapeDtypeStruct((1024, 256), jnp.float32),
        grid=(16, 2),
        compiler_params=plgpu.CompilerParams(
            max_concurrent_steps=2, dimension_semantics=("arbitrary", "parallel")
        ),
        **specs,
    )
    def pipelined_kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    x = rng.standard_normal((1024, 256)).astype(np.float32)
    np.testing.assert_allclose(pipelined_kernel(x), np.exp(x), rtol=1e-6)


# ---- Examples ------------------------------------------------------------------------------------


def gap(function):
    """Mark that skips while an array function is one of pallas_mgpu gaps."""

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    try:
        pl.pallas_call(body, out_shape=x).lower(x)
    except NotImplementedError as e:
        return pytest.mark.skipif("pallas_mgpu gaps" in str(e), reason=str(e))
    return pytest.mark.skipif(False, reason="")


needs_dot = gap(lambda x: jnp.dot(x, x))
needs_softmax = gap(lambda x: nn.softmax(x, axis=-1))


def matmul_kernel(x_ref, y_ref, o_ref, *, activation):
    x = x_ref[...]
    y = y_ref[...]
    result = jnp.dot(x, y)

    if activation == "relu":
        result = jnp.maximum(result, 0)
    elif activation == "silu":
        result = result * jax.nn.sigmoid(result)

    o_ref[...] = result


def matmul(pallas_call, x, y, *, activation=None):
    return pallas_call(
        functools.partial(matmul_kernel, activation=activation),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((x.shape[0] // 2, x.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((y.shape[0], y.shape[1] // 2), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((x.shape[0] // 2, y.shape[1] // 2), lambda i, j: (i, j)),
    )(x, y)


@needs_dot
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_matmul_with_activation(pallas_call, rng, activation):
    x, y = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(2))
    got = matmul(pallas_call, x, y, activation=activation)
    want = x @ y
    if activation == "relu":
        want = np.maximum(want, 0)
    elif activation == "silu":
        want = want / (1 + np.exp(-want))
    # products of float32 may be made of tf32 ones
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=0.1)


@needs_dot
def test_batched_matmul(rng):
    """vmap of a function that calls a kernel, as the page means it; the page's own spelling hands
    the arrays to pallas_call itself."""
    x, y = (rng.standard_normal((10, 64, 64)).astype(np.float32) for _ in range(2))
    call = functools.partial(pl.pallas_call, interpret=True)
    got = jax.vmap(functools.partial(matmul, call))(x, y)
    assert got.shape == (10, 64, 64)
    np.testing.assert_allclose(got, x @ y, rtol=2e-2, atol=0.1)


def test_batched_as_the_page_writes_it():
    """The page hands the arrays to pallas_call itself; the right form calls it first."""
    single_matmul = functools.partial(
        pl.pallas_call,
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((256, 256), jnp.float32),
        grid=(2, 2),
    )
    with pytest.raises(TypeError, match=r"the right form is vmap\(pallas_call\(body, ...\)\)"):
        jax.vmap(single_matmul)


def test_batched_kernel(run, rng):
    """The same with a kernel of sums, in one launch of 10 x 2 x 2 blocks."""
    kernel = pl.pallas_call(
        add_vectors_kernel,
        out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        grid=(2, 2),
        in_specs=[pl.BlockSpec((32, 32), lambda i, j: (i, j))] * 2,
        out_specs=pl.BlockSpec((32, 32), lambda i, j: (i, j)),
        interpret=run.way != "cuda",
    )
    x, y = (rng.standard_normal((10, 64, 64)).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(run.call(jax.vmap(kernel), x, y), x + y)


def sum_reduction_kernel(x_ref, o_ref):
    # Read input block
    x = x_ref[...]
    # Perform reduction
    sum_val = jnp.sum(x, axis=-1, keepdims=True)
    # Store result
    o_ref[...] = sum_val


@pytest.mark.parametrize("shape", [(256, 96), (384, 33)], ids=str)
def test_parallel_sum(pallas_call, rng, shape):
    """The page's maps return i * 128, which index maps multiply by 128 once more."""

    def parallel_sum(x):
        return pallas_call(
            sum_reduction_kernel,
            out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype),
            grid=(x.shape[0] // 128,),
            in_specs=pl.BlockSpec((128, x.shape[1]), lambda i: (i, 0)),
            out_specs=pl.BlockSpec((128, 1), lambda i: (i, 0)),
        )(x)

    x = rng.standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(parallel_sum(x), x.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)


def attention_kernel(q_ref, k_ref, v_ref, o_ref, *, block_size):
    q = q_ref[...]
    k = k_ref[...]
    v = v_ref[...]

    # Compute attention scores
    scores = jnp.dot(q, k.T) / jnp.sqrt(k.shape[-1])

    # Apply softmax
    attn_weights = jax.nn.softmax(scores, axis=-1)

    # Compute output
    o_ref[...] = jnp.dot(attn_weights, v)


@needs_dot
@needs_softmax
def test_blocked_attention(pallas_call, rng):
    def blocked_attention(q, k, v, block_size=64):
        seq_len, d_model = q.shape
        return pallas_call(
            functools.partial(attention_kernel, block_size=block_size),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(seq_len // block_size,),
            in_specs=[
                pl.BlockSpec((block_size, d_model), lambda i: (i, 0)),
                pl.BlockSpec(k.shape, lambda i: (0, 0)),  # Full K matrix
                pl.BlockSpec(v.shape, lambda i: (0, 0)),  # Full V matrix
            ],
            out_specs=pl.BlockSpec((block_size, d_model), lambda i: (i, 0)),
        )(q, k, v)

    q, k, v = (rng.standard_normal((128, 64)).astype(np.float32) for _ in range(3))
    s = q @ k.T / 8
    p = np.exp(s - s.max(1, keepdims=True))
    want = p / p.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(blocked_attention(q, k, v), want, rtol=2e-2, atol=2e-2)


# ---- the glossary --------------------------------------------------------------------------------


def test_glossary_element_blocks(pallas_call):
    """Element: the map counts elements."""
    spec = pl.BlockSpec((pl.Element(128),), lambda i: (i * 128,))
    x = np.arange(512, dtype=np.float32)
    got = pallas_call(
        lambda x_ref, o_ref: o_ref.set(x_ref[:] + 1),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
    )(x)
    np.testing.assert_array_equal(got, x + 1)


# ---- forms that are no part of the language ------------------------------------------------------


@pytest.mark.parametrize(
    "use, error, right",
    [
        (  # the TPU example
            lambda: pl.pallas_call(
                add_vectors_kernel,
                out_shape=jax.ShapeDtypeStruct((512, 512), jnp.float32),
                grid=(4, 4),
                dimension_semantics=("parallel", "parallel"),
            ),
            TypeError,
            r"compiler_params=plgpu.CompilerParams\(dimension_semantics=...\)",
        ),
        (
            lambda: pl.pallas_call(add_vectors_kernel, out_shape=None, scratch_types=[]),
            TypeError,
            "scratch_types",
        ),
        (lambda: pl.pallas_call(None, jax.ShapeDtypeStruct((1,), "int32")), TypeError, "callable"),
        (lambda: pl.pallas_call(add_vectors_kernel, out_shape=(8, 8)), TypeError, "shape and dty"),
        (lambda: plgpu.pallas_call, AttributeError, "pl.pallas_call"),
        (lambda: plgpu.triton_call, AttributeError, "plgpu.kernel"),
        (lambda: plgpu.Barrier(num_threads=32), TypeError, "num_arrivals"),
    ],
)
def test_right_forms(use, error, right):
    with pytest.raises(error, match=right):
        use()


def test_memory_operations(pallas_call, rng):
    """pl.load and pl.store as signatures of the page have them, without the memory spaces."""

    def kernel(x_ref, o_ref):
        pl.store(o_ref, (pl.ds(0, 8),), pl.load(x_ref, (pl.ds(0, 8),)) * 2)

    x = rng.standard_normal(8).astype(np.float32)
    np.testing.assert_array_equal(
        pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x), x * 2
    )


@pytest.mark.parametrize(
    "body, error, right",
    [
        (
            lambda x, o, bar: pl.load(x, (slice(None),), memory_space=plgpu.SMEM),
            TypeError,
            "plgpu.copy_gmem_to_smem",
        ),
        (
            lambda x, o, bar: pl.store(o, (slice(None),), x[...], memory_space=plgpu.GMEM),
            TypeError,
            "copy_smem_to_gmem",
        ),
        (lambda x, o, bar: bar.wait(), AttributeError, r"plgpu.barrier_wait\(barrier\)"),
    ],
)
def test_right_forms_in_bodies(body, error, right):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    call = pl.pallas_call(body, out_shape=x, scratch_shapes=[plgpu.Barrier()], interpret=True)
    with pytest.raises(error, match=right):
        call(np.zeros(8, np.float32))


def test_grid_spec_of_the_page():
    """GridSpec's scratch has two spellings."""
    with pytest.warns(DeprecationWarning, match="scratch_shapes"):
        spec = pl.GridSpec(grid=(1,), scratch_specs=[plgpu.SMEM((8,), jnp.int32)])

    def kernel(x_ref, o_ref, scratch):
        scratch[...] = x_ref[...] * 2
        o_ref[...] = scratch[...] + 1

    x = np.arange(8, dtype=np.int32)
    call = pl.pallas_call(kernel, out_shape=x, grid_spec=spec, interpret=True)
    np.testing.assert_array_equal(call(x), 2 * x + 1)
