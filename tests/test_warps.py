"""Warps of a thread that go their own ways: scalars, barriers, copies; what is refused there."""

import functools

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = plgpu.ShapeDtypeStruct((64,), np.float32)


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
    """One warp fetches, another one reads: through one slot, in step. Behind it the thread goes on
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
    """Warps read what all lanes have stored, and store what all lanes read before and behind: the
    lanes meet in front of the map and behind it, without more."""
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

            behind = back[...]
            p_ref[i] = behind
            q_ref[i] = before

    read = (np.arange(4)[:, None] * 128 + np.arange(16) * 29 + 64) % 512
    want = x[:, read]
    behind = np.outer(np.arange(16), np.arange(4)).reshape(64) + np.arange(3)[:, None]
    before = np.stack([np.zeros(64, int), *behind[:-1]])
    all_three = want, behind.astype(np.int32), before.astype(np.int32)
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
        (lambda o, s, b, v, w: s.set(v), plgpu.LoweringError, r"closes over the array float32\["),
        (lambda o, s, b, v, w: s.set(v.sum(), 0), plgpu.LoweringError, "reduce: .*closes over"),
        (lambda o, s, b, v, w: s.set((v + w)[0], 0), plgpu.LoweringError, "closes over the array"),
        (lambda o, s, b, v, w: plgpu.commit_smem(), NotImplementedError, "commit_smem: Unimp"),
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


def test_copy_that_its_warp_leaves_behind():
    def f(o, s, b, v, w):
        @pl.when(w == 1)
        def _():
            plgpu.copy_smem_to_gmem(s, o)

    with pytest.raises(ValueError, match="the warp ends while this copy"):
        lower(f)()


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
