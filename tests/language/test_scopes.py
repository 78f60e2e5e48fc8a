"""Scopes: what one thread has for itself, scratch in global memory, barriers of one block."""

import functools

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32 = np.float16, np.float32
TWO = dict(num_threads=2, thread_name="wg")
RACES = plgpu.InterpretParams(detect_races=True)


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(F16)


def test_scope_of_one_thread(run, rng):
    """Each thread enters by itself and has its own SMEM, barriers and accumulator."""
    x = halves(rng, 2, 64, 64)

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        def scope(tile, ready, acc):
            for _ in range(3):  # the phases of a barrier that only this thread waits on
                plgpu.copy_gmem_to_smem(x_ref.at[wg], tile, ready)
                plgpu.barrier_wait(ready)
                plgpu.wgmma(acc, tile, plgpu.transpose_ref(tile, (1, 0)))
                plgpu.wgmma_wait(0)
            return acc[...]

        o_ref[wg] = pl.run_scoped(
            scope, plgpu.SMEM((64, 64), F16), plgpu.Barrier(), plgpu.ACC((64, 64))
        )

    got = run(body, np.zeros((2, 64, 64), F32), x, **TWO)
    want = 3 * np.einsum("bij,bkj->bik", x.astype(F32), x.astype(F32))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_different_scopes_of_threads(run, rng):
    """Threads enter different scopes, one of them again and again, with unions, arrays of barriers
    and semaphores."""
    x = halves(rng, 3, 64, 64)

    def loads(x_ref, o_ref, i):
        @functools.partial(
            pl.run_scoped,
            tiles=plgpu.SMEM((2, 64, 64), F16),
            ready=plgpu.Barrier(num_barriers=2),
            union=plgpu.RefUnion(plgpu.SMEM((64,), F32), [plgpu.SMEM((32,), F32)]),
        )
        def _(tiles, ready, union):
            for j in range(2):
                plgpu.copy_gmem_to_smem(x_ref.at[j], tiles.at[j], ready.at[j])
            for j in range(2):
                plgpu.barrier_wait(ready.at[j])
            row, [part] = union
            row[...] = jnp.full((64,), i.astype(F32))
            total = tiles[0].astype(F32) + tiles[1].astype(F32) + row[0]
            part[...] = jnp.zeros((32,), F32)
            o_ref[0] = total + part[3]

    def body(x_ref, o_ref):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            pl.loop(0, 4)(lambda i: loads(x_ref, o_ref, i))

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            def scope(tile, sem):
                tile[...] = x_ref[2]
                plgpu.semaphore_signal(sem.at[1], 2)
                plgpu.semaphore_wait(sem.at[1], 2)
                o_ref[1] = tile[...].astype(F32) * 2

            pl.run_scoped(scope, plgpu.SMEM((64, 64), F16), plgpu.SemaphoreType.REGULAR((2,)))

    got = run(body, np.zeros((2, 64, 64), F32), x, **TWO)
    x = x.astype(F32)
    np.testing.assert_array_equal(got[0], x[0] + x[1] + 3)
    np.testing.assert_array_equal(got[1], 2 * x[2])


def test_unions_of_one_thread_overlap(run, rng):
    """What a thread has for itself has its planned place in the interpreter as well: the groups of
    a union begin together, and each allocation at a multiple of 1024 bytes."""
    x = rng.standard_normal((2, 512)).astype(F32)

    def body(x_ref, o_ref):
        wg = lax.axis_index("wg")

        @functools.partial(
            pl.run_scoped,
            before=plgpu.SMEM((8,), F32),
            union=plgpu.RefUnion(
                plgpu.SMEM((512,), F32), [plgpu.SMEM((8,), F32), plgpu.SMEM((64,), F32)]
            ),
        )
        def _(before, union):
            whole, [first, part] = union
            before[...] = jnp.ones((8,))
            whole[...] = x_ref[wg]
            o_ref[wg, :64] = part[...]
            o_ref[wg, 64:72] = first[...] * before[...]

    got = run(body, np.zeros((2, 72), F32), x, **TWO)
    np.testing.assert_array_equal(got, np.hstack([x[:, 256:320], x[:, :8]]))


def test_cluster_barriers_of_one_thread(run, rng):
    """The thread with the same number in the other block signals it."""
    x = halves(rng, 2, 64, 64)

    def body(x_ref, o_ref, tiles):
        wg, c = lax.axis_index("wg"), lax.axis_index("c")

        def scope(meet):
            for _ in range(2):
                tiles[wg] = x_ref[c]
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)
                o_ref[c, wg] = plgpu.cluster_ref(tiles.at[wg], {"c": 1 - c})[...]
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)

        pl.run_scoped(scope, plgpu.ClusterBarrier(collective_axes=("c",)))

    got = run(
        body,
        np.zeros((2, 2, 64, 64), F16),
        x,
        scratch_types=[plgpu.SMEM((2, 64, 64), F16)],
        cluster=(2,),
        cluster_names=("c",),
        **TWO,
    )
    np.testing.assert_array_equal(got, np.broadcast_to(x[::-1, None], got.shape))


@pytest.mark.parametrize("cluster", [(), (2,)])
def test_cluster_barrier_without_axes(run, rng, cluster):
    """Only threads of its own block arrive on it; copies do, too."""
    x = halves(rng, 2, 64, 64)

    def body(x_ref, o_ref, tile, bars):
        c = lax.axis_index("c") if cluster else 1
        plgpu.copy_gmem_to_smem(x_ref.at[c], tile, bars.at[0])
        plgpu.barrier_wait(bars.at[0])
        plgpu.barrier_arrive(bars.at[1])
        plgpu.barrier_wait(bars.at[1])
        o_ref[c] = tile[...]
        if not cluster:
            o_ref[0] = x_ref[0]

    bars = plgpu.ClusterBarrier(collective_axes=(), num_barriers=2)
    options = dict(cluster=cluster, cluster_names=("c",)) if cluster else {}
    scratch = [plgpu.SMEM((64, 64), F16), bars]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch, **options), x)


def test_commit_smem_of_a_warp(run, rng):
    """A warp publishes what it stored, and copies it out itself."""
    x = halves(rng, 4, 64, 64)

    def body(x_ref, o_ref, tile):
        tile[...] = jnp.ones((64, 64), F16)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 2)
            def _():
                for j in range(4):
                    tile[j, 3] = x_ref[0, j, j]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile, o_ref)
                plgpu.wait_smem_to_gmem(0)

    want = np.ones((64, 64), F16)
    want[:4, 3] = np.diag(x[0])[:4]
    got = run(body, want, x, scratch_types=[plgpu.SMEM((64, 64), F16)])
    np.testing.assert_array_equal(got, want)


def test_a_commit_of_one_warp_is_not_that_of_another(run, rng):
    """A copy over what the thread stored is fenced in the warp that issues it, though another one
    has committed."""
    x = halves(rng, 64, 64)

    def body(x_ref, o_ref, tile, ready):
        tile[...] = x_ref[...] + 1

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 1)(plgpu.commit_smem)

            @pl.when(warp == 2)
            def _():
                plgpu.copy_gmem_to_smem(x_ref, tile, ready)
                plgpu.barrier_wait(ready)

        o_ref[...] = tile[...]

    scratch = [plgpu.SMEM((64, 64), F16), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x)
    shape = plgpu.ShapeDtypeStruct(x.shape, F16)
    kernel = plgpu.kernel(body, out_type=shape, scratch_types=scratch)
    text = kernel.lower(x).as_text("cuda").split("__global__")[1]
    before = text[: text.index("bulk_load(")]
    assert before.count("fence_proxy_async();") == 2, "that of warp 1 and that of the copy"


def test_scopes_that_are_refused():
    x = np.zeros((64, 64), F16)

    def lower(body, **options):
        out = plgpu.ShapeDtypeStruct((64, 64), F16)
        return lambda: plgpu.kernel(body, out_type=out, **options).lower(x)

    def many(x_ref, o_ref):
        pl.run_scoped(lambda b: plgpu.barrier_arrive(b.at[0]), plgpu.Barrier(num_barriers=17))

    def remote(x_ref, o_ref):
        def scope(tile):
            o_ref[...] = plgpu.cluster_ref(tile, {"c": 0})[...]

        pl.run_scoped(scope, plgpu.SMEM((64, 64), F16))

    with pytest.raises(NotImplementedError, match="at most 32 barriers .* got 34, those of all 2"):
        lower(many, **TWO)()
    with pytest.raises(NotImplementedError, match="other blocks of the cluster reach must be"):
        lower(remote, cluster=(2,), cluster_names=("c",), **TWO)()
    with pytest.raises(NotImplementedError, match="leader_tracked needs one cluster axis"):
        plgpu.ClusterBarrier(collective_axes=(), leader_tracked=True)


# ---- scratch in global memory --------------------------------------------------------------------


def test_scratch_in_gmem(run, rng):
    """Every block has its own, which its threads share; nested scratch types."""
    x = rng.standard_normal((6, 64, 40)).astype(F32)

    def body(x_ref, o_ref, tmp, rest, meet):
        g, c, wg = (lax.axis_index(n) for n in ("g", "c", "wg"))
        tmp[wg] = x_ref[g * 2 + c] + wg.astype(F32)
        rest["row"][wg] = g * 2 + c + 10 * wg
        plgpu.barrier_arrive(meet)
        plgpu.barrier_wait(meet)
        o_ref[g * 2 + c, wg] = tmp[1 - wg] + rest["row"][1 - wg].astype(F32)

    got = run(
        body,
        np.zeros((6, 2, 64, 40), F32),
        x,
        scratch_types=[
            plgpu.GMEM((2, 64, 40), F32),
            {"none": None, "row": plgpu.GMEM((2,), np.int32)},
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(3,),
        grid_names=("g",),
        cluster=(2,),
        cluster_names=("c",),
        **TWO,
    )
    block = np.arange(6, dtype=F32)[:, None, None]
    np.testing.assert_array_equal(got[:, 0], x + 1 + (block + 10))
    np.testing.assert_array_equal(got[:, 1], x + block)


def test_copies_of_gmem_scratch(run, rng):
    """By keyword; copies of it, of elements that share bytes too."""
    x = rng.integers(-8, 8, (4, 32, 128)).astype(np.int8)

    def body(x_ref, o_ref, *, tmp, tile, ready):
        g = lax.axis_index("g")
        tmp[...] = x_ref[g].astype("int4")
        plgpu.copy_gmem_to_smem(tmp, tile, ready)
        plgpu.barrier_wait(ready)
        o_ref[g] = tile[...].astype(jnp.int8)

    scratch = dict(
        tmp=plgpu.GMEM((32, 128), "int4"),
        tile=plgpu.SMEM((32, 128), "int4"),
        ready=plgpu.Barrier(),
    )
    got = run(body, x, x, scratch_types=scratch, grid=(4,), grid_names=("g",))
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("interpret", [RACES, "emulate"], ids=["interpret", "emulate"])
def test_shared_scratch(rng, interpret):
    """What all blocks see; semaphores order it. Elements of a batch have their own."""
    x = rng.standard_normal((4, 64)).astype(F32)

    def from_the_one_before(x_ref, o_ref, rows):
        i, done = lax.axis_index("g"), pl.get_global(plgpu.SemaphoreType.REGULAR((4,)))
        rows[i] = x_ref[i] * 2
        plgpu.semaphore_signal(done.at[i], memory_scope="gpu")

        @pl.when(i > 0)
        def _():
            plgpu.semaphore_wait(done.at[i - 1], memory_scope="gpu")

        o_ref[i] = rows[jnp.maximum(i - 1, 0)]

    options = dict(
        out_type=plgpu.ShapeDtypeStruct(x.shape, F32),
        scratch_types=[plgpu.ext.SharedScratch((4, 64), F32)],
        grid=(4,),
        grid_names=("g",),
        interpret=interpret,
    )
    kernel = plgpu.kernel(from_the_one_before, **options)
    np.testing.assert_array_equal(kernel(x), 2 * x[[0, 0, 1, 2]])

    def double(x_ref, o_ref, rows):
        i = lax.axis_index("g")
        rows[i] = x_ref[i] * 2
        o_ref[i] = rows[i]

    both = np.stack([x, x + 1])
    np.testing.assert_array_equal(plgpu.vmap(plgpu.kernel(double, **options))(both), 2 * both)


def test_shared_scratch_without_an_order(rng):
    def race(x_ref, o_ref, row):
        row[...] = x_ref[lax.axis_index("g")]
        o_ref[lax.axis_index("g")] = row[...]

    kernel = plgpu.kernel(
        race,
        out_type=plgpu.ShapeDtypeStruct((2, 64), F32),
        scratch_types=[plgpu.ext.SharedScratch((64,), F32)],
        grid=(2,),
        grid_names=("g",),
        interpret=RACES,
    )
    with pytest.raises(plgpu.RaceError):
        kernel(rng.standard_normal((2, 64)).astype(F32))


def test_gmem_scratch_of_other_calls(rng):
    """With out=, under vmap, in pallas_call; it begins undefined; what is refused."""
    x = rng.standard_normal((4, 64)).astype(F32)

    def double(x_ref, o_ref, tmp):
        g = lax.axis_index("g")
        tmp[...] = x_ref[g]
        o_ref[g] = tmp[...] * 2

    shape = plgpu.ShapeDtypeStruct(x.shape, F32)
    scratch = [plgpu.GMEM((64,), F32)]
    kernel = plgpu.kernel(
        double, out_type=shape, scratch_types=scratch, grid=(4,), grid_names=("g",), interpret=True
    )
    out = np.empty_like(x)
    assert kernel(x, out=out) is out
    np.testing.assert_array_equal(out, 2 * x)
    both = np.stack([x, x + 1])
    np.testing.assert_array_equal(plgpu.vmap(kernel)(both), 2 * both)

    def row(x_ref, o_ref, tmp):
        tmp[...] = x_ref[...]
        o_ref[...] = tmp[...] * 3

    spec = pl.BlockSpec((1, 64), lambda i: (i, 0))
    call = pl.pallas_call(
        row,
        shape,
        grid=(4,),
        in_specs=[spec],
        out_specs=spec,
        scratch_shapes=[plgpu.GMEM((1, 64), F32)],
        interpret=True,
    )
    np.testing.assert_array_equal(call(x), 3 * x)

    def undefined(o_ref, tmp):
        o_ref[...] = tmp[...]

    options = dict(out_type=plgpu.ShapeDtypeStruct((64,), F32), interpret=True)
    assert np.isnan(plgpu.kernel(undefined, scratch_types=scratch, **options)()).all()
    tiled = plgpu.GMEM((64, 64), F32, transforms=(plgpu.TilingTransform((8, 32)),))
    with pytest.raises(ValueError, match="transforms are for SMEM"):
        plgpu.kernel(undefined, scratch_types=[tiled], **options)()
    with pytest.raises(NotImplementedError, match="give plgpu.GMEM as scratch_types"):
        plgpu.kernel(lambda o: pl.run_scoped(len, plgpu.GMEM((64,), F32)), **options)()


@pytest.mark.gpu
def test_gmem_scratch_on_the_gpu(rng):
    """Of device arrays and of host arrays, with results of 2 and 4 bits."""
    x = rng.integers(-8, 8, (4, 64)).astype(ml_dtypes.int4)

    def body(x_ref, o_ref, tmp):
        g = lax.axis_index("g")
        tmp[...] = x_ref[g]
        o_ref[g] = tmp[...]

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.GMEM((64,), x.dtype)],
        grid=(4,),
        grid_names=("g",),
    )
    np.testing.assert_array_equal(kernel(x), x)
    np.testing.assert_array_equal(kernel(plgpu.device_put(x)).numpy(), x)
