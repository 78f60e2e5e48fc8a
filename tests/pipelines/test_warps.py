"""Warps of a thread that go their own ways: scalars, barriers, copies; what is refused there."""

import functools

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = plgpu.ShapeDtypeStruct((64,), np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:pl.core_map is deprecated")


@pytest.mark.parametrize("form", ["map", "mesh", "kernel"])
def test_scalars(run, form):
    """Each warp computes with its own number, branches and loops on it."""

    def body(o_ref):
        o_ref[...] = jnp.zeros((8,), jnp.int32)
        factor = lax.axis_index("g") + 10

        def work(w):
            @pl.when(w == 2)
            def _():
                o_ref[4] = lax.fori_loop(0, w + 3, lambda i, c: c + i, jnp.int32(0))

            o_ref[w] = jnp.where(w > 1, w * factor, -w)

        if form == "map":
            assert plgpu.warp_map(work) is None
        elif form == "mesh":

            @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
            def _():
                assert lax.axis_size("warp") == 4
                work(lax.axis_index("warp"))
        else:
            each = pl.kernel(
                lambda r: work(lax.axis_index("w")), mesh=plgpu.WarpMesh(axis_name="w")
            )
            each(o_ref)
        o_ref[5] = o_ref[0] + o_ref[2]

    got = run(body, np.zeros(8, np.int32), grid=(1,), grid_names=("g",))
    np.testing.assert_array_equal(got, [0, -1, 20, 30, 10, 20, 0, 0])


@pytest.mark.parametrize("dtype, n", [(np.float32, 24), (np.int8, 24), (np.int8, 161)])
def test_producer_and_consumer(run, rng, dtype, n):
    """One warp fetches, another one reads: through one slot, in step. After it the thread goes on
    with the same barriers, so all its lanes know their phases. Rows of int8 are no multiples of 16
    bytes: lanes of the warp copy them, 161 of them in several rounds."""
    steps = 5
    x = rng.integers(0, 100, (steps + 1, n)).astype(dtype)

    def body(x_ref, o_ref, last_ref, smem, ready, free):
        @plgpu.warp_map
        def _(w):
            @pl.when(w == 0)
            def _():
                @pl.loop(0, steps)
                def _(k):
                    @pl.when(k > 0)
                    def _():
                        plgpu.barrier_wait(free)

                    plgpu.copy_gmem_to_smem(x_ref.at[k], smem, ready.at[1])

            @pl.when(w == 3)
            def _():
                @pl.loop(0, steps)
                def _(k):
                    plgpu.barrier_wait(ready.at[1])
                    o_ref[k, 0] = smem[k]
                    o_ref[k, 1] = smem[n - 1]
                    plgpu.barrier_arrive(free)

        plgpu.barrier_wait(free)
        plgpu.copy_gmem_to_smem(x_ref.at[steps], smem, ready.at[1])
        plgpu.barrier_wait(ready.at[1])
        last_ref[...] = smem[...]

    want = np.stack([x[np.arange(steps), np.arange(steps)], x[:steps, -1]], 1)
    got, last = run(
        body,
        (want, x[0]),
        x,
        scratch_types=[
            plgpu.SMEM((n,), dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
        ],
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(last, x[steps])


def test_memory_of_the_thread(run, rng):
    """Warps read what all lanes have stored, and store what all lanes read before and after: the
    lanes meet in front of the map and after it, without more."""
    x = rng.integers(0, 1000, (3, 512)).astype(np.int32)

    def body(x_ref, o_ref, p_ref, q_ref, smem, back):
        back[...] = jnp.zeros((64,), jnp.int32)

        @pl.loop(0, 3)
        def _(i):
            smem[...] = x_ref[i]
            before = back[...]

            @plgpu.warp_map
            def _(w):
                @pl.loop(0, 16)
                def _(k):  # elements that lanes of other warps have stored
                    o_ref[i, w, k] = smem[(w * 128 + k * 29 + 64) % 512]
                    back[k * 4 + w] = k * w + i

            after = back[...]
            p_ref[i] = after
            q_ref[i] = before

    read = (np.arange(4)[:, None] * 128 + np.arange(16) * 29 + 64) % 512
    want = x[:, read]
    after = np.outer(np.arange(16), np.arange(4)).reshape(64) + np.arange(3)[:, None]
    before = np.stack([np.zeros(64, int), *after[:-1]])
    all_three = want, after.astype(np.int32), before.astype(np.int32)
    types = [plgpu.SMEM((512,), np.int32), plgpu.SMEM((64,), np.int32)]
    for got, expected in zip(run(body, all_three, x, scratch_types=types), all_three, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_stores_of_warps(run, rng):
    """Two warps of each of two threads copy to GMEM and wait for their own groups."""
    x = rng.standard_normal((2, 2, 64)).astype(np.float32)

    def body(x_ref, o_ref, smem):
        t = lax.axis_index("t")
        for k in range(2):
            smem[t, k] = x_ref[t, k]
        plgpu.commit_smem()

        @plgpu.warp_map
        def _(w):
            @pl.when(w < 2)
            def _():
                plgpu.copy_smem_to_gmem(smem.at[t, w], o_ref.at[t, w])
                plgpu.wait_smem_to_gmem(0)

    types = [plgpu.SMEM((2, 2, 64), np.float32)]
    got = run(body, x, x, scratch_types=types, num_threads=2, thread_name="t")
    np.testing.assert_array_equal(got, x)


def test_a_thread_waits_for_copies_of_its_warps(run, rng):
    """All warps copy to GMEM and leave; then the thread waits and writes the SMEM again."""
    x = rng.standard_normal((3, 2, 4, 2048)).astype(np.float32)

    def body(x_ref, o_ref, smem):
        t = lax.axis_index("t")

        @pl.loop(0, 3)
        def _(i):
            for w in range(4):
                smem[t, w] = x_ref[i, t, w]
            plgpu.commit_smem()

            @plgpu.warp_map
            def _(w):
                plgpu.copy_smem_to_gmem(smem.at[t, w], o_ref.at[i, t, w])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for w in range(4):
                smem[t, w] = jnp.full((2048,), -1.0)

    types = [plgpu.SMEM((2, 4, 2048), np.float32)]
    got = run(body, x, x, scratch_types=types, num_threads=2, thread_name="t")
    np.testing.assert_array_equal(got, x)


def counted(x_ref, o_ref, smem, overwrite):
    """Groups of warps, of the thread, and some that the thread closes for a warp. Row k of o is
    copied from row k of smem, which is overwritten when at most two later groups are pending."""
    n = x_ref.shape[0]
    for k in range(n):
        smem[k] = x_ref[k]
    plgpu.commit_smem()

    def copy(k, **options):
        plgpu.copy_smem_to_gmem(smem.at[k], o_ref.at[k], **options)

    @plgpu.warp_map
    def _(w):
        pl.when(w == 2)(lambda: copy(0))
        pl.when(w == 3)(lambda: copy(1, commit_group=False))

    plgpu.commit_smem_to_gmem_group()  # of all warps: row 1
    copy(2)
    plgpu.wait_smem_to_gmem(2, wait_read_only=True)
    overwrite(0)
    copy(3)
    copy(4)
    plgpu.wait_smem_to_gmem(2)
    overwrite(1)
    overwrite(2)

    @plgpu.warp_map
    def _(w):
        @pl.when(w == 0)
        def _():
            plgpu.wait_smem_to_gmem(0)  # warp 0 issues the copies of its thread

        @pl.when(w == 1)
        def _():
            copy(5)
            copy(6)
            plgpu.wait_smem_to_gmem(1)

    overwrite(3)
    overwrite(4)
    overwrite(5)
    plgpu.wait_smem_to_gmem(0)
    overwrite(6)


def test_groups_of_warps_and_of_their_thread(run, rng):
    """wait_smem_to_gmem(n) counts, for each warp, its own groups and those of the thread."""
    x = rng.standard_normal((7, 1024)).astype(np.float32)

    def body(x_ref, o_ref, smem):
        def overwrite(k):
            smem[k] = jnp.full((1024,), -1.0)

        counted(x_ref, o_ref, smem, overwrite)

    options = [{}]
    if run.way == "interpret":
        options = [{"interpret": plgpu.InterpretParams(seed=k)} for k in range(8)]
    for each in options:
        got = run(body, x, x, scratch_types=[plgpu.SMEM(x.shape, x.dtype)], **each)
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    "n, read_only, right", [(1, True, False), (0, True, True), (0, False, True)], ids=str
)
def test_what_a_wait_of_the_thread_leaves(n, read_only, right):
    """The last copy of a warp may still read its SMEM if one group may be pending."""
    x = np.arange(1024, dtype=np.float32)

    def body(x_ref, o_ref, smem):
        smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.warp_map(
            lambda w: pl.when(w == 3)(lambda: plgpu.copy_smem_to_gmem(smem, o_ref) and None)
        )
        plgpu.wait_smem_to_gmem(n, wait_read_only=read_only)
        smem[...] = -x_ref[...]

    wrong = 0
    for seed in range(32):
        kernel = plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM(x.shape, x.dtype)],
            interpret=plgpu.InterpretParams(seed=seed),
        )
        wrong += not np.array_equal(kernel(x), x)
    assert wrong == 0 if right else wrong > 8, wrong


def test_waits_of_kernels_without_stores_in_warps():
    """One lane of the thread waits; where warps store, one of each."""

    def text(in_warp):
        def body(o_ref, smem):
            smem[...] = jnp.zeros(smem.shape)
            plgpu.commit_smem()
            if in_warp:
                copy = lambda w: plgpu.copy_smem_to_gmem(smem, o_ref) and None  # noqa: E731
                plgpu.warp_map(lambda w: pl.when(w == 1)(lambda: copy(w)))
            else:
                plgpu.copy_smem_to_gmem(smem, o_ref)
            plgpu.wait_smem_to_gmem(0)

        scratch = [plgpu.SMEM((64,), np.float32)]
        return plgpu.kernel(body, out_type=F32, scratch_types=scratch).lower().as_text("cuda")

    assert "  if (elect_one()) bulk_group_wait<0>();\n" in text(True)
    assert "warp == 0 && elect_one()" in text(False) and "if (elect_one())" not in text(False)


def lower(f, **options):
    def body(o_ref, smem, bar):
        o_ref[...] = jnp.zeros((64,))
        plgpu.warp_map(functools.partial(f, o_ref, smem, bar, o_ref[...]))

    options = {"scratch_types": [plgpu.SMEM((64,), np.float32), plgpu.Barrier()], **options}
    return plgpu.kernel(body, out_type=F32, interpret=True, **options)


@pytest.mark.parametrize(
    "f, error, text",
    [
        (lambda o, s, b, v, w: s[...], ValueError, "Can only load scalars"),
        (
            lambda o, s, b, v, w: s.set(jnp.full(s.shape, o[0])),
            NotImplementedError,
            "Can only store scalars|broadcast",
        ),
        (
            lambda o, s, b, v, w: s.set(v),
            plgpu.LoweringError,
            r"closes over the array float32\[.*at .*:\d+\); only refs",
        ),
        (lambda o, s, b, v, w: s.set(v.sum(), 0), plgpu.LoweringError, "reduce: .*closes over"),
        (lambda o, s, b, v, w: s.set((v + w)[0], 0), plgpu.LoweringError, "closes over the array"),
        (lambda o, s, b, v, w: plgpu.atomic_add(o.at[0], 1.0), NotImplementedError, "atomic: Un"),
        (
            lambda o, s, b, v, w: pl.run_scoped(
                lambda r: r.set(1.0, 0), plgpu.SMEM((4,), jnp.float32)
            ),
            NotImplementedError,
            "scope: Unimplemented",
        ),
        (
            lambda o, s, b, v, w: plgpu.warp_map(lambda u: None),
            plgpu.LoweringError,
            "cannot be nested",
        ),
        (lambda o, s, b, v, w: 3, ValueError, "must return None"),
    ],
)
def test_errors(f, error, text):
    def g(o_ref, *args):
        result = f(o_ref, *args)
        if isinstance(result, plgpu.Array):  # what nobody uses would vanish
            o_ref[0] = result.sum() if result.shape else result
            return None
        return result

    with pytest.raises(error, match=text):
        lower(g)()


def test_deadlock_names_the_warp():
    def f(o, s, b, v, w):
        @pl.when(w == 1)
        def _():
            plgpu.barrier_wait(b)

    with pytest.raises(plgpu.DeadlockError, match=r"thread 0, warp 1: barrier_wait.*'bar'"):
        lower(f)()


def test_warps_wait_equally_often_for_their_thread(run, rng):
    """One, two or three warps wait for phases that the thread counts as its own then."""
    x = rng.standard_normal((6, 256)).astype(np.float32)

    def body(x_ref, o_ref, smem, bars):
        def step(k, waiters, bar):
            @plgpu.warp_map
            def _(w):
                @pl.when(w == 3)
                def _():
                    plgpu.copy_gmem_to_smem(x_ref.at[k], smem, bar)

                @pl.when(w < waiters)
                def _():
                    plgpu.barrier_wait(bar)

            o_ref[k] = smem[...]

        @pl.loop(0, 2)
        def _(i):
            for k in range(3):
                step(3 * i + k, k + 1, bars.at[1])
            plgpu.barrier_arrive(bars.at[1])
            plgpu.barrier_wait(bars.at[1])

    scratch = [plgpu.SMEM((256,), np.float32), plgpu.Barrier(num_barriers=2)]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x)


@pytest.mark.parametrize("then", ["thread", "map", "test", "nothing", "another barrier"])
def test_warps_that_wait_unequally_often(then):
    """Refused at the next wait, with the line of the map; nothing is wrong before."""

    def body(o_ref, bars, seen):
        bar = bars.at[1]
        plgpu.barrier_arrive(bar)

        def uneven(w):
            pl.when(w < 3)(lambda: plgpu.barrier_wait(bar) and None)
            pl.when(w < 2)(lambda: plgpu.barrier_arrive(seen) and None)

            @pl.when(w == 2)
            def _():
                plgpu.barrier_wait(seen)
                plgpu.barrier_arrive(bar)
                plgpu.barrier_wait(bar)

        plgpu.warp_map(uneven)
        if then == "thread":
            plgpu.barrier_wait(bar)
        elif then == "test":
            plgpu.barrier_test(bar)
        elif then == "map":
            plgpu.warp_map(lambda w: pl.when(w == 0)(lambda: plgpu.barrier_wait(bar) and None))
        elif then == "another barrier":
            plgpu.barrier_arrive(bars.at[0])
            plgpu.barrier_wait(bars.at[0])
        o_ref[...] = jnp.zeros((64,))

    for seed in range(4):
        kernel = plgpu.kernel(
            body,
            out_type=F32,
            scratch_types=[plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=2)],
            interpret=plgpu.InterpretParams(seed=seed),
        )
        if then in ("nothing", "another barrier"):
            kernel()
            continue
        with pytest.raises(
            ValueError, match=r"'bars\[1\]'.*waited 1, 1, 2 and 0 times in the warp_"
        ):
            kernel()


def test_names():
    mesh = plgpu.WarpMesh(axis_name="warp")
    assert mesh.shape == {"warp": 4} and mesh == plgpu.WarpMesh(axis_name="warp")
    with pytest.raises(ValueError, match="for the body of a kernel"):
        pl.core_map(mesh)

    def taken(o_ref):
        pl.core_map(plgpu.WarpMesh(axis_name="g"))(lambda: None)

    with pytest.raises(ValueError, match="'g' is taken"):
        plgpu.kernel(taken, out_type=F32, interpret=True, grid=(1,), grid_names=("g",))()

    def gone(o_ref):
        plgpu.warp_map(lambda w: None)
        lax.axis_index("warp")

    with pytest.raises(NameError, match="unbound axis name"):
        plgpu.kernel(gone, out_type=F32, interpret=True)()


def test_scalars_of_other_blocks(run):
    """A warp loads from and stores to the SMEM of its cluster's other block."""

    def body(o_ref, s, t, bar):
        me = lax.axis_index("c")
        s[0] = me * 10 + 1

        def meet():
            plgpu.barrier_arrive(bar)
            plgpu.barrier_wait(bar)

        meet()

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 1)
            def _():
                o_ref[me, 0] = plgpu.cluster_ref(s, {"c": 1 - me})[0]
                plgpu.cluster_ref(t, {"c": 1 - me})[me] = me + 5

        meet()
        o_ref[me, 1] = t[1 - me]

    smem = plgpu.SMEM((2,), np.int32)
    got = run(
        body,
        np.zeros((2, 2), np.int32),
        cluster=(2,),
        cluster_names=("c",),
        scratch_types=[smem, smem, plgpu.ClusterBarrier(collective_axes=("c",))],
    )
    np.testing.assert_array_equal(got, [[11, 6], [1, 5]])
