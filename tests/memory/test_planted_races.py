"""Pairs of kernels as users write them: one is right, in the other a mistake is planted. Both
checkers must tell them apart, and name the lines of the mistake's kernel."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32, I32 = np.float32, np.int32
X = np.arange(128, dtype=F32)
TILE = plgpu.SMEM((128,), F32)
TWO = dict(num_threads=2, thread_name="t")
PAIR = dict(cluster=(2,), cluster_names=("c",))
g2s, s2g = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem


def each(*functions):
    for k, f in enumerate(functions):
        pl.when(lax.axis_index("t") == k)(f)


def masked_halves(wrong, x, o):
    """Two threads store by masks that have an element in common."""
    i = lax.broadcasted_iota(I32, (128,), 0)
    last = 63 if wrong else 64

    def store(value, mask):
        plgpu.store(o.at[...], value, mask=mask)

    each(lambda: store(x[...], i < 64), lambda: store(x[...] * 2, i >= last))


def strided_columns(wrong, x, o):
    """Every fourth element by one thread, every sixth by the other."""
    first, step = (2, 6) if wrong else (1, 4)

    def even():
        o[pl.ds(0, 20, 4)] = x[pl.ds(0, 20)]

    def other():
        o[pl.ds(first, 20, step)] = x[pl.ds(20, 20)]

    each(even, other)


def named_barrier(wrong, x, o, tile):
    """The writer arrives before it stores."""

    def write():
        if wrong:
            plgpu.ext.named_barrier_arrive(0, 2)
            tile[...] = x[...]
        else:
            tile[...] = x[...]
            plgpu.ext.named_barrier_arrive(0, 2)

    def read():
        plgpu.ext.named_barrier_sync(0, 2)
        o[...] = tile[...]

    each(write, read)


def section(wrong, x, o, tile):
    """A sum in shared memory, added to outside of the section."""
    me = lax.axis_index("t")
    with plgpu.ext.ordered_section(2):
        tile[...] = jnp.where(me == 0, x[...], x[...] + 1)
        if not wrong:
            o[me] = tile[...]
    if wrong:
        o[me] = tile[...]


def cluster_exchange(wrong, x, o, tile, ready):
    """A block reads its neighbour's shared memory before that has arrived."""
    me = lax.axis_index("c")
    tile[...] = x[...] + me.astype(F32)
    plgpu.barrier_arrive(ready)
    if wrong:
        o[me] = plgpu.cluster_ref(tile, {"c": 1 - me})[...]
        plgpu.barrier_wait(ready)
    else:
        plgpu.barrier_wait(ready)
        o[me] = plgpu.cluster_ref(tile, {"c": 1 - me})[...]


def slot_released_early(wrong, x, o, slots, full, empty):
    """A consumer releases a slot of a ring before it has read it."""

    def produce():
        @pl.loop(0, 8)
        def _(i):
            pl.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[i % 2]))
            g2s(x.at[i], slots.at[i % 2], full.at[i % 2])

    def consume():
        @pl.loop(0, 8)
        def _(i):
            plgpu.barrier_wait(full.at[i % 2])
            if wrong:
                plgpu.barrier_arrive(empty.at[i % 2])
            o[i] = slots[i % 2] + 1
            if not wrong:
                plgpu.barrier_arrive(empty.at[i % 2])

    each(produce, consume)


def commit(wrong, x, o, tile):
    """TMA copies what lanes stored."""
    tile[...] = x[...] * 2
    if not wrong:
        plgpu.commit_smem()
    s2g(tile, o)
    plgpu.wait_smem_to_gmem(0)


def warps(wrong, x, o, tile, bar):
    """Warp 1 copies what warp 0 received."""

    @plgpu.warp_map
    def _(w):
        @pl.when(w == 0)
        def _():
            g2s(x, tile, bar)

        @pl.when(w == 1)
        def _():
            if not wrong:
                plgpu.barrier_wait(bar)
            s2g(tile, o)
            plgpu.wait_smem_to_gmem(0)

    if wrong:
        plgpu.barrier_wait(bar)


def dependent_launch(wrong, x, o):
    """What an earlier kernel wrote is read before the wait for it."""
    if wrong:
        value = x[...]
        plgpu.griddepcontrol_wait()
    else:
        plgpu.griddepcontrol_wait()
        value = x[...]
    o[...] = value


ROWS = np.arange(1024, dtype=F32).reshape(8, 128)
KERNELS = {  # output, scratch, options, argument
    masked_halves: ((128,), [], TWO, X),
    strided_columns: ((128,), [], TWO, X),
    named_barrier: ((128,), [TILE], TWO, X),
    section: ((2, 128), [TILE], TWO, X),
    cluster_exchange: (
        (2, 128),
        [TILE, plgpu.ClusterBarrier(collective_axes=("c",))],
        PAIR,
        X,
    ),
    slot_released_early: (
        (8, 128),
        [plgpu.SMEM((2, 128), F32), plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)],
        TWO,
        ROWS,
    ),
    commit: ((128,), [TILE], {}, X),
    warps: ((128,), [TILE, plgpu.Barrier()], {}, X),
    dependent_launch: ((128,), [], {}, X),
}


def judged(body, wrong, backend):
    """The error of a kernel under some schedules, or None."""
    shape, scratch, options, x = KERNELS[body]

    def made(*refs):
        body(wrong, *refs)

    out = plgpu.ShapeDtypeStruct(shape, F32)
    for seed in range(5):
        params = plgpu.InterpretParams(
            detect_races=True, mode="reference", seed=seed, backend=backend
        )
        kernel = plgpu.kernel(
            made, out_type=out, scratch_types=scratch, interpret=params, **options
        )
        try:
            kernel(x)
        except plgpu.RaceError as e:
            return e
    return None


@pytest.mark.filterwarnings("ignore:missing synchronisation", "ignore:.*nothing writes output")
@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("body", KERNELS)
def test_the_mistake_and_nothing_else_is_found(body, backend):
    assert judged(body, False, backend) is None
    error = judged(body, True, backend)
    assert error is not None
    race = plgpu.get_races().races[0]
    for side in (race.first, race.second):
        assert side.ref and side.index.startswith("[") and side.agent
        assert side.file is None or side.file == __file__
    assert race.second.file == __file__ and race.second.line and race.hint
