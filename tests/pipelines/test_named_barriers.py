"""plgpu.ext: named barriers. Threads and warps of a block meet in groups, without memory."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = np.float32
THREADS = dict(num_threads=4, thread_name="wg")
sync, arrive = plgpu.ext.named_barrier_sync, plgpu.ext.named_barrier_arrive


def test_pairs_of_threads_meet(run, rng):
    """Two pairs exchange values through SMEM, each at a barrier of its own, whose number is
    computed, round after round; the other pair is never waited for."""
    x = rng.standard_normal((6, 4, 128)).astype(F32)

    def body(x_ref, o_ref, smem):
        me = lax.axis_index("wg")
        pair = me // 2

        def step(i, _):
            smem[me] = x_ref[i, me]
            sync(pair, num_threads=2)
            o_ref[i, me] = smem[me ^ 1]
            sync(pair + 2, num_threads=2)

        lax.fori_loop(0, 6 + pair * 0, step, None)

    got = run(body, x, x, scratch_types=[plgpu.SMEM((4, 128), F32)], **THREADS)
    np.testing.assert_array_equal(got, x[:, [1, 0, 3, 2]])


@pytest.mark.parametrize("num_warps", [False, True])
def test_producer_and_consumers(run, rng, num_warps):
    """Arrivals do not wait: a ring of two slots with a full and an empty barrier each, as kernels
    in CUDA have them. The producer runs ahead by two; three consumers share what it writes."""
    x = rng.standard_normal((9, 128)).astype(F32)
    all_ = dict(num_warps=16) if num_warps else dict(num_threads=4)

    def body(x_ref, o_ref, slots):
        me = lax.axis_index("wg")

        @pl.when(me == 3)
        def _():
            def fill(i, _):
                pl.when(i >= 2)(lambda: sync(2 + i % 2, **all_))
                slots[i % 2] = x_ref[i]
                arrive(i % 2, **all_)

            lax.fori_loop(0, 9, fill, None)

        @pl.when(me < 3)
        def _():
            def use(i, _):
                sync(i % 2, **all_)
                o_ref[i, me] = slots[i % 2] * (me + 1).astype(F32)
                arrive(2 + i % 2, **all_)

            lax.fori_loop(0, 9, use, None)

    out = plgpu.ShapeDtypeStruct((9, 3, 128), F32)
    got = run(body, out, x, scratch_types=[plgpu.SMEM((2, 128), F32)], **THREADS)
    np.testing.assert_array_equal(got, x[:, None] * np.arange(1, 4, dtype=F32)[:, None])


def test_warps_meet(run):
    """In a warp_map each warp comes by itself: pairs of warps pass numbers on; then three warps
    and a whole other thread."""

    def body(o_ref, smem):
        me = lax.axis_index("wg")

        @pl.when(me == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                smem[warp] = warp * 10 + 1
                sync(warp // 2, num_warps=2)
                o_ref[warp] = smem[warp ^ 1]
                pl.when(warp < 3)(lambda: arrive(3, num_warps=7))

        @pl.when(me == 1)
        def _():
            sync(3, num_warps=7)
            o_ref[4] = smem[0] + smem[1] + smem[2]

    out = plgpu.ShapeDtypeStruct((5,), np.int32)
    options = dict(scratch_types=[plgpu.SMEM((4,), np.int32)], num_threads=2, thread_name="wg")
    np.testing.assert_array_equal(run(body, out, **options), [11, 1, 31, 21, 33])


def test_beside_turns(run, rng):
    """The barriers of ordered_section and of threads are others."""
    x = rng.standard_normal((3, 128)).astype(F32)

    def body(x_ref, o_ref, smem):
        me = lax.axis_index("wg")
        sync(0, num_threads=3)
        with plgpu.ext.ordered_section(3):
            smem[me] = x_ref[me]
        sync(8, num_threads=3)
        o_ref[me] = smem[(me + 1) % 3]

    options = dict(scratch_types=[plgpu.SMEM((3, 128), F32)], num_threads=3, thread_name="wg")
    np.testing.assert_array_equal(run(body, x, x, **options), x[[1, 2, 0]])


def test_around_copies(run, rng):
    """What one lane waited for is there for who waits for its thread."""
    x = rng.standard_normal((8, 64, 64)).astype(F32)

    def body(x_ref, o_ref, s, full):
        me = lax.axis_index("wg")

        @pl.when(me == 1)
        def _():
            def fill(i, _):
                pl.when(i > 0)(lambda: sync(1, 2))
                plgpu.copy_gmem_to_smem(x_ref.at[i], s, full)
                plgpu.barrier_wait(full)
                arrive(0, 2)

            lax.fori_loop(0, 8, fill, None)

        @pl.when(me == 0)
        def _():
            def use(i, _):
                sync(0, 2)
                o_ref[i] = s[...] * 2
                pl.when(i < 7)(lambda: arrive(1, 2))

            lax.fori_loop(0, 8, use, None)

    got = run(
        body,
        x,
        x,
        scratch_types=[plgpu.SMEM((64, 64), F32), plgpu.Barrier()],
        num_threads=2,
        thread_name="wg",
    )
    np.testing.assert_array_equal(got, x * 2)


def test_warps_of_the_only_thread(run):
    """All four, round after round."""

    def body(o_ref, s):
        @plgpu.warp_map
        def _(warp):
            def step(i, _):
                s[warp] = warp + i
                sync(0, num_warps=4)
                o_ref[i, warp] = s[(warp + 1) % 4]
                sync(1, num_warps=4)

            lax.fori_loop(0, 3, step, None)

    got = run(
        body, plgpu.ShapeDtypeStruct((3, 4), np.int32), scratch_types=[plgpu.SMEM((4,), np.int32)]
    )
    np.testing.assert_array_equal(got, (np.arange(4) + 1) % 4 + np.arange(3)[:, None])


def test_blocks_have_their_own(run, rng):
    """In a cluster, too."""
    x = rng.standard_normal((2, 2, 128)).astype(F32)

    def body(x_ref, o_ref, s):
        me, c = lax.axis_index("wg"), lax.axis_index("c")
        s[me] = x_ref[c, me]
        sync(c, 2)
        o_ref[c, me] = s[1 - me]

    got = run(
        body,
        x,
        x,
        scratch_types=[plgpu.SMEM((2, 128), F32)],
        num_threads=2,
        thread_name="wg",
        cluster=(2,),
        cluster_names=("c",),
    )
    np.testing.assert_array_equal(got, x[:, ::-1])


def lowered(body, n=2, **options):
    out = plgpu.ShapeDtypeStruct((4,), np.int32)
    return plgpu.kernel(body, out_type=out, num_threads=n, thread_name="wg", **options)


def test_numbers_in_programs():
    """0 is the block's, then one for each thread, then those of the turns."""

    def body(o_ref):
        with plgpu.ext.ordered_section(2):
            sync(1, num_threads=2)
        arrive(lax.axis_index("wg"), num_warps=8)
        o_ref[0] = 1

    text = lowered(body, 3).lower().as_text("cuda")
    assert "named_barrier_sync(7, 256);" in text
    assert re.search(r"named_barrier_arrive\(6 \+ \(u32\).*, 256\);", text)


def test_what_is_refused():
    def raises(error, match, use, n=2):
        kernel = lowered(lambda o_ref: use(o_ref), n)
        with pytest.raises(error, match=match):
            kernel.lower()

    raises(TypeError, "either num_threads or num_warps", lambda o: sync(0))
    raises(TypeError, "either num_threads or num_warps", lambda o: sync(0, 1, num_warps=1))
    raises(ValueError, "num_threads must be positive, got 0", lambda o: sync(0, 0))
    raises(ValueError, "384 lanes; a multiple of 32 .* up to 256", lambda o: arrive(0, 3))
    raises(TypeError, "barrier is float32.*an int32 scalar", lambda o: sync(1.5, 1))
    raises(ValueError, "barrier is -1; 0 or more", lambda o: sync(-1, 1))
    raises(ValueError, "barrier is 13; a kernel of 2 threads has 13", lambda o: sync(13, 2))

    def turns(o):
        sync(11, 2)
        with plgpu.ext.ordered_section(2):
            o[0] = 1

    raises(ValueError, "barrier is 11; a kernel of 2 threads, some of .* has 11", turns)
    with pytest.raises(RuntimeError, match="inside the body of a kernel"):
        sync(0, 1)


def test_misuse_on_the_interpreter():
    """Each is a hang or worse on a GPU."""

    def raises(error, match, use, n=2):
        kernel = lowered(lambda o_ref: use(o_ref, lax.axis_index("wg")), n, interpret=True)
        with pytest.raises(error, match=match):
            kernel()

    def when(condition, f, *args, **options):
        pl.when(condition)(lambda: f(*args, **options))

    raises(
        plgpu.DeadlockError,
        "named_barrier_sync.*test_named_barriers.py.* on named barrier 3; 128 of 256 lanes",
        lambda o, me: when(me == 0, sync, 3, 2),
    )
    raises(IndexError, "barrier is 13; .* 0 to 12", lambda o, me: sync(me + 13, 1))
    raises(IndexError, "barrier is -1; .* 0 to 12", lambda o, me: sync(-1 - me, 1))

    def differ(o, me):
        when(me == 0, sync, 0, num_warps=8)
        when(me == 1, arrive, 0, num_warps=5)

    raises(ValueError, "named barrier 0 is for .* lanes here and for", differ)

    def twice(o, me):
        when(me == 0, arrive, 1, 2)
        when(me == 0, sync, 1, 2)

    raises(ValueError, "this thread arrives at named barrier 1 again, .*128 of 256", twice)
    raises(
        ValueError,
        "256 lanes come to named barrier 0, which is for 160",
        lambda o, me: sync(0, num_warps=5),
    )

    def fine(o_ref):
        sync(0, 2)
        o_ref[...] = jnp.full((4,), 7)

    assert lowered(fine, interpret=True)().tolist() == [7] * 4
