"""`emit_pipeline` and `pallas_call` by cp.async: GPUs without TMA and barriers."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import pl

S, P = plgpu.ShapeDtypeStruct, plgpu.InterpretParams


@pytest.fixture(autouse=True)
def target(monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_86")


CASES = {  # steps, slots, and: delay of the first input, is the grid dynamic?
    "one step": (1, 1, 0, False),
    "one slot": (4, 1, 0, False),
    "two slots": (5, 2, 0, False),
    "more slots than steps": (2, 3, 0, False),
    "delayed": (5, 3, 1, False),
    "dynamic": (4, 2, 0, True),
    "no step": (0, 2, 0, True),
}


@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("name", CASES)
def test_pipeline(name, backend, rng):
    """Inputs with slots of their own, one that never changes, an output that overhangs, a carry."""
    steps, slots, delay, dynamic = CASES[name]
    x = rng.integers(-9, 9, (max(steps, 1) * 16 - 3, 64)).astype(np.float32)
    y, w = x + 1, rng.integers(-9, 9, 64).astype(np.float32)

    def k(n, x, y, w, o, total):
        def body(_, xs, ys, ws, os, carry):
            os[...] = xs[...] * ws[...][None] + ys[...]
            return carry + jnp.sum(xs[...])

        rows = dict(block_shape=(16, 64), index_map=lambda i: (i, 0))
        total[0] = plgpu.emit_pipeline(
            body,
            grid=(n[0] if dynamic else steps,),
            in_specs=[
                plgpu.BlockSpec(**rows, delay_release=delay),
                pl.BlockSpec(**rows, pipeline_mode=pl.Buffered(slots + 1)),
                pl.BlockSpec((64,), lambda i: (0,), pipeline_mode=pl.Buffered(1)),
            ],
            out_specs=[pl.BlockSpec(**rows)],
            max_concurrent_steps=slots,
            init_carry=jnp.float32(0),
        )(x, y, w, o)

    outs = S(x.shape, x.dtype), S((1,), x.dtype)
    n = np.array([steps], np.int32)
    for seed in range(2):
        how = P(backend=backend, seed=seed, detect_races=True)
        kernel = plgpu.kernel(k, out_type=outs, interpret=how)
        o, total = kernel(n, x, y, w)
        if steps:
            np.testing.assert_array_equal(o, x * w + y)
        assert total[0] == (x.sum() if steps else 0)
    assert "cp_async" in kernel.lower(n, x, y, w).as_text("cuda")


def test_output_that_is_revisited(rng):
    """A block is stored at the first of its visits in a row, and at the very last step."""
    x = rng.integers(-9, 9, (8, 128)).astype(np.float32)

    def body(x_ref, o_ref, sums):
        @pl.when(pl.program_id(1) == 0)
        def _():
            sums[...] = jnp.zeros((128,), jnp.float32)

        sums[...] = sums[...] + x_ref[0]
        o_ref[0] = sums[...]

    call = pl.pallas_call(
        body,
        out_shape=S((2, 128), np.float32),
        grid=(2, 4),
        in_specs=[pl.BlockSpec((1, 128), lambda i, j: (i * 4 + j, 0))],
        out_specs=pl.BlockSpec((1, 128), lambda i, j: (i, 0)),
        scratch_shapes=[plgpu.SMEM((128,), np.float32)],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=["arbitrary"] * 2, max_concurrent_steps=2
        ),
        interpret=True,
    )
    np.testing.assert_array_equal(call(x), [x[0], x[4:].sum(0)])


def test_blocks_of_a_grid(rng):
    x = rng.standard_normal((10, 1000)).astype(np.float16)

    def softmax(x_ref, o_ref):
        e = jnp.exp(x_ref[...].astype(jnp.float32))
        o_ref[...] = (e / e.sum(axis=1, keepdims=True)).astype(o_ref.dtype)

    rows = pl.BlockSpec((4, 1000), lambda i: (i, 0))
    call = pl.pallas_call(
        softmax, out_shape=x, grid=(3,), in_specs=[rows], out_specs=rows, interpret=True
    )
    e = np.exp(x.astype(np.float32))
    np.testing.assert_allclose(call(x), e / e.sum(1, keepdims=True), rtol=1e-2, atol=1e-5)
