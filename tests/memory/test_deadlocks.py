"""Kernels that cannot go on: both checkers say who waits where, for what, by name and line."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32 = np.float16, np.float32
X = np.arange(128, dtype=F32)
TILE, Barrier = plgpu.SMEM((128,), F32), plgpu.Barrier
TWO = dict(num_threads=2, thread_name="t")
BLOCKS = dict(cluster=(2,), cluster_names=("c",))
wait, arrive, g2s = plgpu.barrier_wait, plgpu.barrier_arrive, plgpu.copy_gmem_to_smem
CASES = {}


def case(*args, names, out=(128,), **options):
    """names: patterns of lines of the report: who, the ref, and the line with that comment."""

    def declare(body):
        CASES[body.__name__] = body, args, names, out, options
        return body

    return declare


def each(*functions):
    for k, f in enumerate(functions):
        pl.when(lax.axis_index("t") == k)(f)


@case(X, scratch_types=[Barrier()], names=[("thread 0", "bar", "alone")])
def nobody_arrives(x, o, bar):
    o[...] = x[...]
    wait(bar)  #: alone


@case(
    X,
    scratch_types=[Barrier(), Barrier()],
    names=[("thread 0", "a", "first"), ("thread 1", "b", "second")],
    **TWO,
)
def each_waits_for_the_other(x, o, a, b):
    def first():
        wait(a)  #: first
        arrive(b)

    def second():
        wait(b)  #: second
        arrive(a)

    each(first, second)
    o[...] = x[...]


@case(
    X,
    scratch_types=[TILE, Barrier(num_arrivals=3)],
    names=[("thread 0", "bar", "three")],
)
def one_arrival_less_than_counted(x, o, tile, bar):
    g2s(x, tile, bar)
    arrive(bar)
    wait(bar)  #: three
    o[...] = tile[...]


@case(
    X,
    out=(2, 128),
    scratch_types=[plgpu.ClusterBarrier(collective_axes=("c",))],
    names=[(r"block \(1,\), thread 0", "met", "meet")],
    **BLOCKS,
)
def one_block_skips_the_barrier(x, o, met):
    me = lax.axis_index("c")
    o[me] = x[...]

    @pl.when(me == 1)
    def _():
        arrive(met)
        wait(met)  #: meet


@case(
    X,
    out=(2, 128),
    scratch_types=[TILE, Barrier()],
    names=[(r"block \(1,\), thread 0", "bar", "both")],
    **BLOCKS,
)
def one_block_skips_a_collective_copy(x, o, tile, bar):
    me = lax.axis_index("c")

    @pl.when(me == 1)
    def _():
        g2s(x, tile, bar, collective_axes="c")
        wait(bar)  #: both

    o[me] = x[...]


@case(
    X,
    out=(4, 128),
    grid=(4,),
    grid_names=("i",),
    names=[(r"grid point \(0,\)", "", "five")],
)
def more_than_all_signals(x, o):
    i, done = lax.axis_index("i"), pl.get_global(plgpu.SemaphoreType.REGULAR)
    o[i] = x[...]
    plgpu.semaphore_signal(done, memory_scope="gpu")
    pl.when(i == 0)(lambda: plgpu.semaphore_wait(done, 5, memory_scope="gpu"))  #: five


@case(
    np.stack([X] * 4),
    out=(4, 128),
    scratch_types=[plgpu.SMEM((2, 128), F32), Barrier(num_barriers=2), Barrier(num_barriers=2)],
    names=[("thread 0", "empty", "free"), ("thread 1", "full", "use")],
    **TWO,
)
def waits_for_slots_in_the_first_lap(x, o, slots, full, empty):
    def produce():
        @pl.loop(0, 4)
        def _(i):
            wait(empty.at[i % 2])  #: free
            g2s(x.at[i], slots.at[i % 2], full.at[i % 2])

    def consume():
        @pl.loop(0, 4)
        def _(i):
            wait(full.at[i % 2])  #: use
            o[i] = slots[i % 2]
            arrive(empty.at[i % 2])

    each(produce, consume)


@case(X, scratch_types=[Barrier()], names=[("", "", "spin")])
def polls_without_an_end(x, o, bar):
    o[...] = x[...]
    lax.while_loop(lambda d: ~d, lambda d: plgpu.barrier_test(bar), jnp.bool_(False))  #: spin


@case(
    X,
    scratch_types=[Barrier()],
    names=[("thread 1", "", "named")],
    **TWO,
)
def alone_at_a_named_barrier(x, o, bar):
    me = lax.axis_index("t")
    pl.when(me == 1)(lambda: plgpu.ext.named_barrier_sync(0, num_threads=2))  #: named
    pl.when(me == 0)(lambda: o.set(x[...]) and None)


@case(
    np.ones((128, 64), F16),
    np.ones((128, 64), F16),
    out=(128, 128),
    scratch_types=[
        *(plgpu.SMEM((128, 64), F16),) * 2,
        plgpu.TMEM((128, 128), F32),
        Barrier(num_arrivals=2),
        Barrier(orders_tensor_core=True),
    ],
    names=[("thread 0", "done", "product")],
)
def product_without_a_commit(a, b, o, a_smem, b_smem, acc, full, done):
    g2s(a, a_smem, full)
    g2s(b, b_smem, full)
    wait(full)
    plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
    wait(done)  #: product
    o[...] = plgpu.async_load_tmem(acc)


def line_of(comment):
    lines = open(__file__, encoding="utf-8").read().splitlines()
    return next(k for k, x in enumerate(lines, 1) if x.endswith(f"#: {comment}"))


def run(name, backend, seed):
    body, args, _, out, options = CASES[name]
    params = plgpu.InterpretParams(backend=backend, seed=seed, detect_races=True, mode="reference")
    shape = plgpu.ShapeDtypeStruct(out, F32)
    return plgpu.kernel(body, out_type=shape, interpret=params, **options)(*args)


@pytest.mark.filterwarnings("ignore:.*nothing writes output")
@pytest.mark.parametrize("backend", ["interpret", "emulate"])
@pytest.mark.parametrize("name", CASES)
def test_deadlocks(name, backend):
    for seed in range(2):
        with pytest.raises(plgpu.DeadlockError) as caught:
            run(name, backend, seed)
        text = str(caught.value)
        for who, ref, comment in CASES[name][2]:
            where = f"test_deadlocks.py:{line_of(comment)}"
            found = [x for x in re.split(r"\n  (?! )", text) if where in x]
            assert found, text
            assert any(re.search(who, x) and ref in x for x in found), text


def test_an_error_beside_threads_that_wait():
    """The error of one thread is what the call raises."""

    def body(i, x, o, bar):
        def fails():
            o[i[0]] = x[0]
            arrive(bar)

        each(fails, lambda: wait(bar))

    for backend in ("interpret", "emulate"):
        k = plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct((128,), F32),
            scratch_types=[Barrier()],
            interpret=plgpu.InterpretParams(backend=backend),
            **TWO,
        )
        with pytest.raises(IndexError, match="index 128 of dimension 0"):
            k(np.array([128], np.int32), X)
