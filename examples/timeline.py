"""What a kernel waits for: a GEMM on the interpreter, whose timeline shows the waits that cost
most, and the same kernel with more slots and a product in flight.

`python examples/timeline.py DIRECTORY` draws the pictures of docs/profiling.md there."""

import sys
import tempfile
from pathlib import Path

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

TILE, STEP, DEPTH = 128, 64, 512


def gemm(slots, in_flight, timeline):
    """A kernel for one tile. ``slots``: of the ring in shared memory. ``in_flight``: products that
    still run while the next one is issued."""
    steps = DEPTH // STEP

    def body(a, b, o, a_smem, b_smem, o_smem, full, empty):
        @pl.when(lax.axis_index("wg") == 0)
        def load():
            @pl.loop(0, steps)
            def _(k):
                slot = k % slots

                @pl.when(k >= slots)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                at = pl.ds(k * STEP, STEP)
                plgpu.copy_gmem_to_smem(a.at[:, at], a_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b.at[at], b_smem.at[slot], full.at[slot])

        @pl.when(lax.axis_index("wg") == 1)
        def multiply():
            def with_acc(acc):
                @pl.loop(0, steps)
                def _(k):
                    plgpu.barrier_wait(full.at[k % slots])
                    plgpu.wgmma(acc, a_smem.at[k % slots], b_smem.at[k % slots])
                    plgpu.wgmma_wait(in_flight)

                    @pl.when(k >= in_flight)  # the product before has read its slot
                    def _():
                        plgpu.barrier_arrive(empty.at[(k - in_flight) % slots])

                with plgpu.named_scope("store"):
                    o_smem[...] = acc[...].astype(jnp.float16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(o_smem, o)
                    plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(with_acc, plgpu.ACC((TILE, TILE), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float16),
        scratch_types=dict(
            a_smem=plgpu.SMEM((slots, TILE, STEP), jnp.float16),
            b_smem=plgpu.SMEM((slots, STEP, TILE), jnp.float16),
            o_smem=plgpu.SMEM((TILE, TILE), jnp.float16),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            empty=plgpu.Barrier(num_barriers=slots),
        ),
        num_threads=2,
        thread_name="wg",
        kernel_name="gemm",
        interpret=plgpu.InterpretParams(timeline=timeline),
    )


def trace_of(directory, **options):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((TILE, DEPTH), (DEPTH, TILE)))
    path = Path(directory) / "timeline.json"
    o = gemm(timeline=path, **options)(a, b)
    np.testing.assert_allclose(o, a.astype(np.float32) @ b.astype(np.float32), rtol=0.01, atol=0.1)
    return plgpu.read_trace(path)


def length(trace):
    """Of the whole trace, in nanoseconds."""
    return 1000 * max(e.get("ts", 0) for e in trace.events)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        waiting = trace_of(directory, slots=2, in_flight=0)
        running = trace_of(directory, slots=4, in_flight=1)
    for trace in (waiting, running):
        print(f"{length(trace):.0f} ns in the model")
        for wait in trace.waits[:3]:
            print(f"  {wait.critical_ns:5.0f} of {wait.ns:5.0f} ns are critical: {wait.source}")
    assert length(running) < 0.9 * length(waiting)
    if len(sys.argv) == 2:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        for name, trace in {"waiting": waiting, "running": running}.items():
            (Path(sys.argv[1]) / f"timeline_{name}.svg").write_text(trace.svg(width=900))
    print("ok")
