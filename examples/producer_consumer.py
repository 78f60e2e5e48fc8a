"""Two Pallas threads in a block: one fetches rows with TMA, the other works on them; barriers
hand the slots around."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

ROWS, SLOTS = 16, 2


def body(x_ref, o_ref, slots, full, empty):
    me = lax.axis_index("thread")

    @pl.when(me == 0)
    def producer():
        @pl.loop(0, ROWS)
        def _(i):
            @pl.when(i >= SLOTS)
            def _():
                plgpu.barrier_wait(empty.at[i % SLOTS])

            plgpu.copy_gmem_to_smem(x_ref.at[i], slots.at[i % SLOTS], full.at[i % SLOTS])

        for s in range(SLOTS):  # the last releases: barriers must end with every arrival waited for
            plgpu.barrier_wait(empty.at[s])

    @pl.when(me == 1)
    def consumer():
        @pl.loop(0, ROWS)
        def _(i):
            plgpu.barrier_wait(full.at[i % SLOTS])
            o_ref[i] = slots[i % SLOTS] * 2
            plgpu.barrier_arrive(empty.at[i % SLOTS])


double = plgpu.kernel(
    body,
    out_type=plgpu.ShapeDtypeStruct((ROWS, 128), jnp.float32),
    num_threads=2,
    thread_name="thread",
    scratch_types=dict(
        slots=plgpu.SMEM((SLOTS, 128), jnp.float32),
        full=plgpu.Barrier(num_barriers=SLOTS),
        empty=plgpu.Barrier(num_barriers=SLOTS),
    ),
)
x = np.random.default_rng(0).standard_normal((ROWS, 128)).astype(np.float32)
np.testing.assert_array_equal(double(x), x * 2)
print("ok")
