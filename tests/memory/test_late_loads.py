"""Loads from SMEM that are still in flight when the slot is given back. The load unit works in
order: after scattered stores a load waits in its queue for more than a microsecond, while an
arrival or a barrier overtakes it, and TMA fills the slot before the load has read it. When nothing
waited for the loads, nearly every launch of the first kernel was wrong on an H200. The emulated
machine asks for a proxy fence between a load and an engine's write."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp

STEPS, ROWS, COLS, SIDE = 6, 8, 64, 33


def scatter(ref, t, i):
    """Stores whose lanes lie far apart, a queue for the loads of the next iteration."""
    side = jnp.asarray(t * STEPS + i, jnp.float32)
    ref.at[t, i].T[...] = plgpu.broadcasted_iota(jnp.float32, (SIDE, SIDE), 1) + side


def scattered(threads):
    shape = (threads, STEPS, SIDE, SIDE)
    rows = np.arange(SIDE, dtype=np.float32)[:, None]
    first = np.arange(threads * STEPS, dtype=np.float32).reshape(threads, STEPS, 1, 1)
    return np.broadcast_to(rows + first, shape)


def check(run, body, shapes, x, want, **options):
    outs = tuple(plgpu.ShapeDtypeStruct(s, d) for s, d in shapes)
    kernel = run.kernel(body, outs, **options)
    for _ in range(200 if run.way == "cuda" else 1):
        for got, right in zip(run.call(kernel, x), want, strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("slots", [1, 2])
def test_ring_of_a_producer_and_two_consumers(run, rng, slots):
    """The slot goes back before the values are used: arrive, then scattered stores."""
    x = rng.standard_normal((STEPS, ROWS, COLS)).astype(np.float16)

    def body(x_ref, o_ref, far_ref, ring, full, empty):
        t = lax.axis_index("t")

        @pl.when(t == 2)
        def _():
            @pl.loop(0, STEPS)
            def _(i):
                @pl.when(i >= slots)
                def _():
                    plgpu.barrier_wait(empty.at[i % slots])

                plgpu.copy_gmem_to_smem(x_ref.at[i], ring.at[i % slots], full.at[i % slots])

        @pl.when(t < 2)
        def _():
            @pl.loop(0, STEPS)
            def _(i):
                plgpu.barrier_wait(full.at[i % slots])
                value = ring[i % slots]
                plgpu.barrier_arrive(empty.at[i % slots])
                o_ref[t, i] = value
                scatter(far_ref, t, i)

    check(
        run,
        body,
        [((2, STEPS, ROWS, COLS), jnp.float16), ((2, STEPS, SIDE, SIDE), jnp.float32)],
        x,
        [np.stack([x, x]), scattered(2)],
        num_threads=3,
        thread_name="t",
        scratch_types=[
            plgpu.SMEM((slots, ROWS, COLS), jnp.float16),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(2, num_barriers=slots),
        ],
    )


def test_a_thread_refills_its_own_slot(run, rng):
    """Load, start the next copy, and only then use what was loaded."""
    x = rng.standard_normal((STEPS, ROWS, COLS)).astype(np.float16)

    def body(x_ref, o_ref, far_ref, slot, full):
        plgpu.copy_gmem_to_smem(x_ref.at[0], slot, full)

        @pl.loop(0, STEPS)
        def _(i):
            plgpu.barrier_wait(full)
            value = slot[...]

            @pl.when(i + 1 < STEPS)
            def _():
                plgpu.copy_gmem_to_smem(x_ref.at[i + 1], slot, full)

            o_ref[i] = value
            scatter(far_ref, 0, i)

    check(
        run,
        body,
        [((STEPS, ROWS, COLS), jnp.float16), ((1, STEPS, SIDE, SIDE), jnp.float32)],
        x,
        [x, scattered(1)],
        scratch_types=[plgpu.SMEM((ROWS, COLS), jnp.float16), plgpu.Barrier()],
    )


def test_scopes_that_share_memory(run, rng):
    """One thread loads at the end of a scope, the other one fills the same bytes in the next."""
    x = rng.standard_normal((STEPS, ROWS, COLS)).astype(np.float16)

    def body(x_ref, o_ref, far_ref):
        t = lax.axis_index("t")

        @pl.loop(0, STEPS)
        def _(i):
            def scope(slot, full):
                @pl.when(t == 1)
                def _():
                    plgpu.copy_gmem_to_smem(x_ref.at[i], slot, full)

                @pl.when(t == 0)
                def _():
                    plgpu.barrier_wait(full)
                    scatter(far_ref, 0, i)
                    o_ref[i] = slot[...]

            memory = plgpu.SMEM((ROWS, COLS), jnp.float16)
            pl.run_scoped(scope, memory, plgpu.Barrier(), collective_axes="t")

    check(
        run,
        body,
        [((STEPS, ROWS, COLS), jnp.float16), ((1, STEPS, SIDE, SIDE), jnp.float32)],
        x,
        [x, scattered(1)],
        num_threads=2,
        thread_name="t",
    )


def test_values_that_a_product_read_need_no_fence():
    """Operands of wgmma in SMEM are read when the product is awaited; the arrival stays bare."""
    A = plgpu.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    text = ops.matmul.kernel(A, A).lower(A, A).as_text("cuda")
    consumer = text[text.index("wgmma_wait") :]
    assert "fence_proxy_async" not in consumer[: consumer.index("barrier_arrive")]


def test_slots_that_no_engine_fills_need_no_fence():
    """What lanes stored is in order with what lanes store: arrivals after loads stay bare."""

    def body(x_ref, o_ref, slot, full, empty):
        t = lax.axis_index("t")

        @pl.loop(0, STEPS)
        def _(i):
            @pl.when(t == 0)
            def _():
                slot[...] = x_ref[i]
                plgpu.barrier_arrive(full)
                plgpu.barrier_wait(empty)

            @pl.when(t == 1)
            def _():
                plgpu.barrier_wait(full)
                value = slot[...]
                plgpu.barrier_arrive(empty)
                o_ref[i] = value

    x = np.zeros((STEPS, ROWS, COLS), np.float16)
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="t",
        scratch_types=[plgpu.SMEM((ROWS, COLS), jnp.float16), plgpu.Barrier(), plgpu.Barrier()],
    )
    text = kernel.lower(x).as_text("cuda")
    assert "barrier_arrive" in text and "fence_proxy_async" not in text
