"""emit_pipeline_warp_specialized: steps against slots, delays, outputs, barriers by hand, contexts,
pipelines that follow each other."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

f32, i32 = np.float32, np.int32
ROWS = dict(block_shape=(1, 128), index_map=lambda i: (i, 0))
State = plgpu.PipelinePipeline


def emit(body, compute=1, **options):
    options = {"memory_registers": 40, "wg_axis": "wg", **options}
    return plgpu.emit_pipeline_warp_specialized(body, num_compute_wgs=compute, **options)


def threads(compute=1, **options):
    return dict(num_threads=compute + 1, thread_name="wg", **options)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("steps,slots", [(1, 1), (1, 2), (2, 3), (5, 1), (5, 2), (5, 8)])
@pytest.mark.parametrize("compute", [1, 2])
def test_slots_and_steps(run, rng, compute, steps, slots, dynamic):
    """Every compute thread sees every block, of both inputs."""
    x = rng.standard_normal((steps, 128)).astype(f32)
    y = rng.standard_normal((4, 128)).astype(f32)

    def body(x_ref, y_ref, n_ref, o_ref):
        wg = lax.axis_index("wg")

        def step(indices, a, b):
            o_ref[wg, indices[0]] = a[0] + b[0] * indices[0].astype(f32)

        emit(
            step,
            compute,
            grid=(n_ref[0] if dynamic else steps,),
            in_specs=[plgpu.BlockSpec(**ROWS), plgpu.BlockSpec((1, 128), lambda i: (i % 4, 0))],
            max_concurrent_steps=slots,
        )(x_ref, y_ref)

    out = np.zeros((compute, steps, 128), f32)
    got = run(body, out, x, y, np.array([steps], i32), **threads(compute))
    at = np.arange(steps)
    want = x + y[at % 4] * at.astype(f32)[:, None]
    np.testing.assert_allclose(got, np.broadcast_to(want, out.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("slots,delay,steps", [(2, 1, 3), (3, 1, 8), (3, 2, 7)])
@pytest.mark.parametrize("compute", [1, 2])
def test_delayed_release(run, rng, compute, slots, delay, steps):
    """A slot is read until its release: products are awaited as late as the delay allows."""
    x = rng.standard_normal((steps, 64, 64)).astype(np.float16)
    y = rng.standard_normal((64, 64)).astype(np.float16)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, y_ref, o_ref, y_smem, bar):
        wg = lax.axis_index("wg")

        def context(pipeline):
            plgpu.copy_gmem_to_smem(y_ref, y_smem.at[wg], bar.at[wg])
            plgpu.barrier_wait(bar.at[wg])

            def scope(acc):
                pipeline(acc)
                o_ref[wg] = acc[...]

            pl.run_scoped(scope, plgpu.ACC((64, 64)))

        def step(indices, a, acc):
            plgpu.wgmma(acc, a, y_smem.at[wg])
            plgpu.wgmma_wait(delay)
            return acc

        emit(
            step,
            compute,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec(
                    (None, 64, 64), lambda i: (i, 0, 0), transforms=tiled, delay_release=delay
                )
            ],
            max_concurrent_steps=slots,
            compute_context=context,
        )(x_ref)

    scratch = [
        plgpu.SMEM((compute, 64, 64), np.float16, transforms=tiled),
        plgpu.Barrier(num_barriers=compute),
    ]
    out = np.zeros((compute, 64, 64), f32)
    got = run(body, out, x, y, **threads(compute, scratch_types=scratch))
    want = x.astype(f32).sum(axis=0) @ y.astype(f32)
    np.testing.assert_allclose(got, np.broadcast_to(want, out.shape), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("steps,slots", [(1, 2), (5, 1), (6, 3)])
@pytest.mark.parametrize("what", ["variant", "invariant", "both"])
def test_outputs(run, rng, steps, slots, what):
    """A block a step, and one that the last step leaves; both through SMEM."""
    x = rng.standard_normal((steps, 128)).astype(f32)

    def body(x_ref, *outs):
        def step(indices, a, *refs):
            for k, r in enumerate(refs):
                r[...] = a[...] * (2 + k)

        specs = {
            "variant": [plgpu.BlockSpec(**ROWS)],
            "invariant": [plgpu.BlockSpec((1, 128), lambda i: (0, 0))],
        }
        specs["both"] = specs["variant"] + specs["invariant"]
        emit(
            step,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(**ROWS)],
            out_specs=specs[what],
            max_concurrent_steps=slots,
        )(x_ref, *outs)

    wants = {"variant": [x * 2], "invariant": [x[-1:] * 2], "both": [x * 2, x[-1:] * 3]}[what]
    got = run(body, tuple(np.zeros_like(w) for w in wants), x, **threads())
    for g, w in zip(got, wants, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outputs_of_some_steps(run, rng, slots):
    """A block that stays is stored at the first of its steps; a map of two axes finds its place."""
    x = rng.standard_normal((6, 128)).astype(f32)

    def body(x_ref, o_ref, p_ref):
        def step(indices, a, o, p):
            o[...] = a[...] + 1
            p[...] = a[...] * 2

        emit(
            step,
            grid=(3, 2),
            in_specs=[plgpu.BlockSpec((1, 128), lambda i, j: (i * 2 + j, 0))],
            out_specs=[
                plgpu.BlockSpec((1, 128), lambda i, j: (i, 0)),
                plgpu.BlockSpec((None, 1, 128), lambda i, j: (j, i, 0)),
            ],
            max_concurrent_steps=slots,
        )(x_ref, o_ref, p_ref)

    outs = np.zeros((3, 128), f32), np.zeros((2, 3, 128), f32)
    o, p = run(body, outs, x, **threads())
    np.testing.assert_array_equal(o, x[::2] + 1)
    np.testing.assert_array_equal(p, x.reshape(3, 2, 128).swapaxes(0, 1) * 2)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("ready,consumed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("compute", [1, 2])
@pytest.mark.parametrize("slots", [1, 3])
def test_barriers_by_hand(run, rng, compute, slots, ready, consumed):
    """The body waits for one input after the other, and releases each as soon as it has read it."""
    x, y = (rng.standard_normal((7, 128)).astype(f32) for _ in range(2))

    def body(x_ref, y_ref, o_ref):
        wg = lax.axis_index("wg")

        def step(indices, a, b, *bars):
            total = jnp.zeros((128,), f32)
            for k, ref in enumerate((a, b)):
                if ready:
                    plgpu.barrier_wait(bars[k])
                total += ref[0] * (k + 1)
                if consumed:
                    plgpu.barrier_arrive(bars[k - 2])
            o_ref[wg, indices[0]] = total

        emit(
            step,
            compute,
            grid=(7,),
            in_specs=[plgpu.BlockSpec(**ROWS)] * 2,
            max_concurrent_steps=slots,
            manual_ready_barriers=ready,
            manual_consumed_barriers=consumed,
        )(x_ref, y_ref)

    out = np.zeros((compute, 7, 128), f32)
    got = run(body, out, x, y, **threads(compute))
    np.testing.assert_allclose(got, np.broadcast_to(x + y * 2, out.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_context_has_the_carry(run, rng, steps):
    x = rng.standard_normal((steps, 128)).astype(f32)

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        def context(pipeline):
            o_ref[wg] = pipeline(jnp.full((128,), 1, f32) * (wg + 1).astype(f32)) * 2

        emit(
            lambda indices, a, c: c + a[0],
            2,
            grid=(steps,),
            in_specs=[plgpu.BlockSpec(**ROWS)],
            compute_context=context,
        )(x_ref)

    want = np.stack([(x.sum(axis=0) + k) * 2 for k in (1, 2)])
    got = run(body, want, x, **threads(2))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("slots,rounds", [(1, 2), (2, 3), (4, 4)])
def test_pipelines_after_each_other(run, rng, slots, rounds, traced):
    """One sequence in the same slots: only the first fills them, only the last awaits the rest."""
    x = rng.standard_normal((rounds, 4, 128)).astype(f32)

    def body(x_ref, o_ref):
        def pipeline(t, state):
            def step(indices, a):
                o_ref[t, indices[0]] = a[0] * 2

            return emit(
                step,
                grid=(4,),
                in_specs=[plgpu.BlockSpec((None, 1, 128), lambda i: (t, i, 0))],
                max_concurrent_steps=slots,
                pipeline_state=state,
            )

        def scope(allocations):
            def one(t):
                if traced:
                    state = jnp.where(t == rounds - 1, int(State.STOP), int(State.STEADY))
                    state = jnp.where(t == 0, int(State.START), state)
                else:
                    state = State.START if t == 0 else State.STEADY
                    state = State.STOP if t == rounds - 1 else state
                pipeline(t, state)(x_ref, allocations=allocations)

            if traced:
                pl.loop(0, rounds)(one)
            else:
                for t in range(rounds):
                    one(t)

        types = pipeline(0, State.START).get_allocations(x_ref)
        pl.run_scoped(scope, types, collective_axes="wg")

    np.testing.assert_array_equal(run(body, x, x, **threads()), x * 2)


def test_the_last_rows_are_missing(run, rng):
    x = rng.standard_normal((21, 128)).astype(f32)

    def body(x_ref, o_ref):
        def step(indices, a):
            o_ref[indices[0]] = a[...]

        emit(
            step,
            grid=(3,),
            in_specs=[plgpu.BlockSpec((8, 128), lambda i: (i, 0))],
        )(x_ref)

    got = run(body, np.zeros((3, 8, 128), f32), x, **threads())
    np.testing.assert_array_equal(got.reshape(24, 128)[:21], x)
    assert (got.reshape(24, 128)[21:] == 0).all()


@pytest.mark.parametrize("mode", ["ZEROS", "PROMISE_IN_BOUNDS"])
def test_blocks_that_are_promised_inside(run, mode):
    """Contiguous bytes need no tensor map if they are inside."""

    def body(x_ref, n_ref, o_ref):
        def step(indices, a):
            o_ref[indices[0]] = a[0]

        fill = getattr(plgpu.OOBFillMode, mode)
        specs = [plgpu.BlockSpec(**ROWS, oob_fill_mode=fill)]
        emit(step, grid=(n_ref[0],), in_specs=specs)(x_ref)

    x, n = np.zeros((8, 128), f32), np.array([8], i32)
    text = run.kernel(body, x, **threads()).lower(x, n).as_text("cuda")
    assert ("TensorMap x_ref_map" in text) == (mode == "ZEROS")


@pytest.mark.parametrize(
    "compute,memory,up", [(1, 40, 256), (2, 40, 232), (2, 24, 240), (3, 32, 160)]
)
def test_registers(run, compute, memory, up):
    """What the memory thread gives away is shared by the others."""

    def body(x_ref, o_ref):
        def step(indices, a):
            o_ref[lax.axis_index("wg")] = a[0]

        emit(
            step,
            compute,
            grid=(1,),
            in_specs=[plgpu.BlockSpec(**ROWS)],
            memory_registers=memory,
        )(x_ref)

    x = np.zeros((1, 128), f32)
    out = plgpu.ShapeDtypeStruct((compute, 128), f32)
    text = run.kernel(body, out, **threads(compute)).lower(x).as_text("cuda")
    assert f"setmaxnreg_inc<{up}>();" in text
    assert f"setmaxnreg_dec<{memory}>();" in text
