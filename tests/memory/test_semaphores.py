"""Semaphores, barrier_test and delay: what threads and blocks tell each other."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

REGULAR = plgpu.SemaphoreType.REGULAR
I32 = jnp.int32


def shape(*dims, dtype=I32):
    return plgpu.ShapeDtypeStruct(dims, dtype)


def nothing(_):
    """The result of what is done for its effect."""


def test_blocks_of_a_launch_wait_for_each_other(run, rng):
    """Each block hands a row to the next one, backwards too: all run at once, and what was written
    before a signal is read after the wait. Twice: the counters are zero at every launch."""
    n, w = 4, 256
    x = rng.integers(-1000, 1000, (n, w), dtype=np.int32)

    def body(x_ref, rows_ref, o_ref):
        sem = pl.get_global(REGULAR((n,)))
        i = lax.axis_index("i")
        rows_ref[i] = x_ref[i] * 2
        plgpu.semaphore_signal(sem.at[i], memory_scope="gpu")
        after = (i + 1) % n
        plgpu.semaphore_wait(sem.at[after], memory_scope="gpu")
        o_ref[i] = rows_ref[after] + 1

    kernel = run.kernel(body, [shape(n, w), shape(n, w)], grid=(n,), grid_names=("i",))
    for _ in range(2):
        _, out = run.call(kernel, x)
        np.testing.assert_array_equal(out, np.roll(x * 2, -1, 0) + 1)


def test_copies_between_blocks(run, rng):
    """The same through SMEM by copies: engines see what other blocks wrote, by stores of lanes and
    by engines."""
    n, w = 3, 512
    x = rng.integers(-1000, 1000, (n, w), dtype=np.int32)

    def body(x_ref, rows_ref, o_ref, smem, bar, done):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_ref.at[i], smem, bar)
        plgpu.barrier_wait(bar)
        smem[...] = smem[...] - 7
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, rows_ref.at[i])
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(done)
        pl.semaphore_wait(done, n, decrement=False)
        plgpu.copy_gmem_to_smem(rows_ref.at[(i + 1) % n], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[i] = smem[...]

    def with_global(x_ref, rows_ref, o_ref, smem, bar):
        body(x_ref, rows_ref, o_ref, smem, bar, pl.get_global(REGULAR))

    scratch = [plgpu.SMEM((w,), I32), plgpu.Barrier()]
    _, out = run(
        with_global,
        [shape(n, w), shape(n, w)],
        x,
        grid=(n,),
        grid_names=("i",),
        scratch_types=scratch,
    )
    np.testing.assert_array_equal(out, np.roll(x - 7, -1, 0))


def test_threads_of_a_block(run, rng):
    """Semaphores of a block: credits between two threads, several at a time, traced counts."""
    w, rounds = 128, 5
    x = rng.integers(-1000, 1000, (rounds, w), dtype=np.int32)

    def body(x_ref, o_ref, smem, full, free):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            plgpu.semaphore_signal(free, 2)

            def step(k, _):
                plgpu.semaphore_wait(free)
                smem[k % 2] = x_ref[k]
                plgpu.semaphore_signal(full.at[k % 2], k + 1)

            lax.fori_loop(0, rounds, step, None)
            plgpu.semaphore_wait(free, 2)

        @pl.when(lax.axis_index("t") == 1)
        def _():
            def step(k, _):
                plgpu.semaphore_wait(full.at[k % 2], k + 1)
                o_ref[k] = smem[k % 2] * 3
                plgpu.semaphore_signal(free)

            lax.fori_loop(0, rounds, step, None)

    out = run(
        body,
        shape(rounds, w),
        x,
        scratch_types=[plgpu.SMEM((2, w), I32), REGULAR((2,)), REGULAR],
        num_threads=2,
        thread_name="t",
    )
    np.testing.assert_array_equal(out, x * 3)


def test_all_lanes_have_read_before_a_signal(run, rng):
    """A slot is given back right after the load of it: whoever gets it may write there."""
    w, rounds = 128, 6
    x = rng.integers(-1000, 1000, (rounds, w), dtype=np.int32)

    def body(x_ref, o_ref, smem, full, free):
        @pl.when(lax.axis_index("t") == 0)
        def _():
            def step(k, _):
                smem[...] = x_ref[k]
                plgpu.semaphore_signal(full)
                plgpu.semaphore_wait(free)

            lax.fori_loop(0, rounds, step, None)

        @pl.when(lax.axis_index("t") == 1)
        def _():
            def step(k, total):
                plgpu.semaphore_wait(full)
                row = smem[...]
                plgpu.semaphore_signal(free)
                return total * 3 + row

            o_ref[...] = lax.fori_loop(0, rounds, step, jnp.zeros((w,), I32))

    scratch = [plgpu.SMEM((w,), I32), REGULAR, REGULAR]
    out = run(body, shape(w), x, scratch_types=scratch, num_threads=2, thread_name="t")
    want = np.zeros(w, np.int32)
    for row in x:
        want = want * 3 + row
    np.testing.assert_array_equal(out, want)


def test_semaphores_lie_after_counters_of_tiles(run, rng):
    """A launch that takes tiles from a counter, too: signals do not change which are taken."""
    tiles, w = 7, 128
    x = rng.integers(-1000, 1000, (tiles, w), dtype=np.int32)

    def body(x_ref, o_ref, n_ref):
        done = pl.get_global(REGULAR)

        @plgpu.dynamic_scheduling_loop(("i",))
        def tile(info):
            (i,) = info.index
            o_ref[i] = x_ref[i] + 1
            plgpu.semaphore_signal(done, 5)

            @pl.when(i == tiles - 1)
            def _():
                plgpu.semaphore_wait(done, 5 * tiles)
                n_ref[0] = pl.semaphore_read(done)

    kernel = run.kernel(body, [shape(tiles, w), shape(1)], grid=(tiles,), grid_names=("i",))
    for _ in range(2):
        out, left = run.call(kernel, x)
        np.testing.assert_array_equal(out, x + 1)
        assert left[0] == 0


def test_wait_is_at_least(run):
    """A wait is for at least a value, and takes away what it waited for, or nothing."""

    def body(o_ref):
        sem = pl.get_global(REGULAR)
        pl.semaphore_signal(sem, 5)
        pl.semaphore_wait(sem, 2)
        o_ref[0] = pl.semaphore_read(sem)
        pl.semaphore_wait(sem, 3, decrement=False)
        o_ref[1] = pl.semaphore_read(sem)
        other = pl.get_global(REGULAR((2, 3)))
        plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(other.at[1, 2], device_id=None, inc=7),
            plgpu.SemaphoreSignal(other.at[0].at[1], device_id=None),
        )
        o_ref[2] = pl.semaphore_read(other.at[1, 2])
        o_ref[3] = pl.semaphore_read(other.at[0, 1])
        o_ref[4] = pl.semaphore_read(other.at[1, 0])
        pl.delay(100)
        o_ref[5] = pl.semaphore_read(sem) + 10

    for _ in range(2):
        np.testing.assert_array_equal(run(body, shape(6)), [3, 3, 7, 1, 0, 13])


def test_delays_are_made():
    """In nanoseconds, known while tracing or not."""

    def body(x_ref, o_ref):
        pl.delay(100)
        pl.delay(x_ref[0])
        o_ref[0] = 1

    lowered = plgpu.kernel(body, out_type=shape(1)).lower(shape(1))
    text = lowered.as_text("cuda")
    assert re.findall(r"^ +delay\((\w+)\);", text, re.M)[0] == "100"
    assert len(re.findall(r"^ +delay\(", text, re.M)) == 2
    assert lowered.resources()["spill_bytes"] == 0


def test_many_semaphores_are_zeroed(run):
    """More words than a warp has lanes, left as they are: the next launch finds zeros."""
    n = 77

    def body(o_ref):
        sems = pl.get_global(REGULAR((n,)))

        def step(k, total):
            before = pl.semaphore_read(sems.at[k])
            plgpu.semaphore_signal(sems.at[k], k + 1)
            return total + before

        before = lax.fori_loop(0, n, step, jnp.int32(0))
        after = lax.fori_loop(0, n, lambda k, s: s + pl.semaphore_read(sems.at[k]), jnp.int32(0))
        o_ref[0], o_ref[1] = before, after

    kernel = run.kernel(body, shape(2))
    for _ in range(3):
        np.testing.assert_array_equal(run.call(kernel), [0, n * (n + 1) // 2])


def test_warps_signal_and_wait(run, rng):
    """Each warp for itself, in the order of their numbers backwards."""
    x = rng.integers(0, 100, 4, dtype=np.int32)

    def body(x_ref, o_ref, sems):
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp < 3)
            def _():
                plgpu.semaphore_wait(sems.at[warp])

            @pl.when(warp == 3)
            def _():
                o_ref[warp] = x_ref[warp]

            @pl.when(warp < 3)
            def _():
                o_ref[warp] = x_ref[warp] + o_ref[warp + 1]

            @pl.when(warp > 0)
            def _():
                plgpu.semaphore_signal(sems.at[warp - 1])

    out = run(body, shape(4), x, scratch_types=[REGULAR((3,))])
    np.testing.assert_array_equal(out, np.cumsum(x[::-1])[::-1])


def test_the_last_thing_warps_do(run):
    """Semaphores of the launch in warps, with nothing after: who clears them for the next launch
    waits for all warps."""

    def body(o_ref):
        sem = pl.get_global(REGULAR)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 2)
            def _():
                o_ref[0] = jnp.int32(3)
                plgpu.semaphore_signal(sem)

            @pl.when(warp == 1)
            def _():
                plgpu.semaphore_wait(sem)
                o_ref[1] = o_ref[0] + 1

    kernel = run.kernel(body, shape(2))
    for _ in range(3):
        np.testing.assert_array_equal(run.call(kernel), [3, 4])


@pytest.mark.parametrize("where", ["thread", "warp", "several"])
def test_barrier_test(run, rng, where):
    """A test in vain changes nothing, one that is not in vain is the wait; phases go on with waits
    of the usual kind."""
    n, w = 6, 128
    x = rng.integers(-1000, 1000, (n, w), dtype=np.int32)
    slots = 2 if where == "several" else 1

    def spin(bar):
        return lax.while_loop(
            lambda c: jnp.logical_not(c[0]),
            lambda c: (plgpu.barrier_test(bar), c[1] + 1),
            (plgpu.barrier_test(bar), jnp.int32(0)),
        )[1]

    def body(x_ref, o_ref, t_ref, smem, bars):
        def step(k, _):
            bar = bars.at[k % slots]
            o_ref[k] = jnp.zeros((w,), I32)
            t_ref[k] = jnp.where(plgpu.barrier_test(bar), 1, 0)
            plgpu.copy_gmem_to_smem(x_ref.at[k], smem, bar)
            if where == "warp":

                @plgpu.warp_map
                def _(warp):
                    pl.when(warp == 1)(lambda: nothing(spin(bar)))

            else:
                pl.when(k % 3 < 2)(lambda: nothing(spin(bar)))
                pl.when(k % 3 == 2)(lambda: plgpu.barrier_wait(bar))
            o_ref[k] = smem[...] + 1

        lax.fori_loop(0, n, step, None)

    bars = plgpu.Barrier(num_barriers=slots) if slots > 1 else plgpu.Barrier(num_barriers=(1,))
    out, tests = run(body, [shape(n, w), shape(n)], x, scratch_types=[plgpu.SMEM((w,), I32), bars])
    np.testing.assert_array_equal(out, x + 1)
    np.testing.assert_array_equal(tests, np.zeros(n))


def test_a_phase_is_tested_once(run):
    """A test that is true has seen the phase; the next one is about the next phase."""

    def body(o_ref, bar):
        o_ref[0] = jnp.where(plgpu.barrier_test(bar), 1, 0)
        plgpu.barrier_arrive(bar)
        o_ref[1] = jnp.where(plgpu.barrier_test(bar), 1, 0)
        o_ref[2] = jnp.where(plgpu.barrier_test(bar), 1, 0)
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        o_ref[3] = jnp.where(plgpu.barrier_test(bar), 1, 0)

    out = run(body, shape(4), scratch_types=[plgpu.Barrier()])
    np.testing.assert_array_equal(out, [0, 1, 0, 0])


# ---- what the interpreter finds ------------------------------------------------------------------


def interpreted(body, out=None, **options):
    return plgpu.kernel(body, out_type=out or shape(1), interpret=True, **options)


@pytest.mark.parametrize("look", ["test", "read"])
def test_looking_for_ever_is_a_deadlock(look):
    """Nobody arrives: a loop that keeps polling is found."""

    def body(o_ref, bar):
        sem = pl.get_global(REGULAR)

        def found(_):
            if look == "test":
                return plgpu.barrier_test(bar)
            return pl.semaphore_read(sem) == 1

        o_ref[0] = lax.while_loop(lambda c: jnp.logical_not(found(c)), lambda c: c + 1, 0)

    with pytest.raises(plgpu.DeadlockError, match="keeps polling"):
        interpreted(body, scratch_types=[plgpu.Barrier()])()


def test_a_wait_without_signals_is_a_deadlock():
    def body(o_ref):
        sem = pl.get_global(REGULAR)
        pl.semaphore_signal(sem, 2)
        pl.semaphore_wait(sem, 3)
        o_ref[0] = 1

    with pytest.raises(plgpu.DeadlockError, match="for 3 or more; it is 2"):
        interpreted(body)()


def test_semaphores_of_a_block_are_left_at_zero():
    def body(o_ref, sems):
        o_ref[0] = 1
        plgpu.semaphore_signal(sems.at[1], 4)

    with pytest.raises(ValueError, match=r"'sems' ends while number 1 of it is 4"):
        interpreted(body, scratch_types=[REGULAR((2,))])()


def test_errors():
    def raises(error, match, use, **options):
        def body(o_ref, sems, bar):
            use(sems, bar, o_ref)
            o_ref[0] = 1

        with pytest.raises(error, match=match):
            interpreted(body, scratch_types=[REGULAR((2,)), plgpu.Barrier()], **options)()

    signal, wait = plgpu.semaphore_signal, plgpu.semaphore_wait
    raises(ValueError, "needs one semaphore", lambda s, b, o: signal(s))
    raises(ValueError, "must be a semaphore ref", lambda s, b, o: wait(b))
    raises(TypeError, "semaphore must be a ref", lambda s, b, o: wait(1))
    raises(TypeError, "inc must be an int32 scalar", lambda s, b, o: signal(s.at[0], 1.5))
    raises(ValueError, "memory_scope must be", lambda s, b, o: wait(s.at[0], memory_scope="cta"))
    raises(
        ValueError,
        "device_id needs",
        lambda s, b, o: signal(s.at[0], device_id=1, memory_scope="gpu"),
    )
    raises(ValueError, "no mesh of devices", lambda s, b, o: signal(s.at[0], device_id=1))
    raises(
        NotImplementedError,
        "core_index",
        lambda s, b, o: pl.semaphore_signal(s.at[0], core_index=0),
    )
    raises(
        NotImplementedError,
        "known while tracing",
        lambda s, b, o: pl.semaphore_signal(s.at[0], o[0]),
    )
    raises(NotImplementedError, "only semaphores", lambda s, b, o: pl.get_global(plgpu.Barrier()))
    raises(ValueError, "cannot be read or written", lambda s, b, o: s[0])
    raises(ValueError, "out of bounds", lambda s, b, o: signal(s.at[2]))
    raises(
        NotImplementedError, "BARRIER", lambda s, b, o: pl.get_global(plgpu.SemaphoreType.BARRIER)
    )
    raises(TypeError, "nanos must be", lambda s, b, o: pl.delay(1.5))
    raises(
        NotImplementedError,
        "delay: Unimplemented",
        lambda s, b, o: plgpu.warp_map(lambda w: pl.delay(1)),
    )
    raises(
        NotImplementedError,
        "semaphore_read: Unimplemented",
        lambda s, b, o: plgpu.warp_map(lambda w: nothing(pl.semaphore_read(s.at[0]))),
    )
    raises(ValueError, "barrier must be a barrier", lambda s, b, o: plgpu.barrier_test(s))


def test_semaphores_under_vmap_are_refused():
    def body(x_ref, o_ref):
        pl.get_global(REGULAR)
        o_ref[...] = x_ref[...]

    kernel = interpreted(body, shape(128))
    with pytest.raises(NotImplementedError, match="vmap"):
        plgpu.vmap(kernel)(np.zeros((3, 128), np.int32))


def test_a_cluster_barrier_cannot_be_tested():
    def body(o_ref, bar):
        plgpu.barrier_test(bar)
        o_ref[0] = 1

    scratch = [plgpu.ClusterBarrier(collective_axes=("c",))]
    options = {"cluster": (2,), "cluster_names": ("c",), "scratch_types": scratch}
    with pytest.raises(NotImplementedError, match="ClusterBarrier cannot be tested"):
        interpreted(body, **options)()


def test_refs(run):
    """What a semaphore ref says of itself."""

    def body(o_ref, sems):
        assert sems.shape == (2, 3) and sems.dtype == "semaphore"
        assert jnp.issubdtype(sems.dtype, pl.semaphore)
        assert not jnp.issubdtype(sems.dtype, jnp.integer)
        assert not jnp.issubdtype(o_ref.dtype, pl.semaphore)
        assert sems.memory_space is plgpu.GMEM
        assert sems.at[1].shape == (3,)
        o_ref[0] = 1

    assert run(body, shape(1), scratch_types=[REGULAR((2, 3))])[0] == 1


def test_the_next_grid_waits_before_it_counts():
    """Where the launch may begin early, the words are still those of the grid before."""

    def body(o_ref):
        sem = pl.get_global(REGULAR)
        pl.semaphore_signal(sem)
        plgpu.griddepcontrol_wait()
        o_ref[0] = pl.semaphore_read(sem)

    text = plgpu.kernel(body, out_type=shape(1)).lower().as_text("cuda")
    first = text.index("semaphore_signal<true>(counters")
    assert "griddepcontrol_wait();" in text[text.index("__global__") : first]
