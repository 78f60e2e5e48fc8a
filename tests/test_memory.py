"""Refs, copies, barriers, scopes: data goes where the program says, at any shape and start."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

bf16 = np.dtype(ml_dtypes.bfloat16)
SWIZZLED = {
    w: (plgpu.TilingTransform((8, w // 2)), plgpu.SwizzleTransform(w)) for w in (32, 64, 128)
}


def random(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def test_index_forms(run, rng):
    """Ints, slices, pl.ds, traced indices, ellipsis, .at chains, negative indices on GMEM refs."""
    x = random(rng, (6, 10, 128), np.float32)
    outs = [
        x[2, 3],
        x[1:3, 4, 64:],
        x[5, 9, 7],
        x[4, :4, :32],
        x[..., 5:9][0],
        x[-1, -2],
        x[3, 2:5, 8:40],
    ]

    def body(x_ref, *o):
        i = lax.axis_index("g") + 2
        o[0][...] = x_ref[i, 3]
        o[1][...] = x_ref[1:3, 4, 64:]
        o[2][...] = x_ref[5, 9, i + 5]
        o[3][...] = x_ref.at[4].at[pl.ds(0, 4)][:, pl.ds(0, 32)]
        o[4][...] = x_ref.at[0][..., 5:9]
        o[5][...] = x_ref[-1, -2]
        o[6][...] = x_ref.at[3, pl.ds(i, 3)][:, pl.ds(i * 4, 32)]

    got = run(body, tuple(np.array(w) for w in outs), x, grid=(1,), grid_names=("g",))
    for k, (g, w) in enumerate(zip(got, outs)):
        np.testing.assert_array_equal(g, w, err_msg=str(k))


def test_store_into_slices(run, rng):
    x = random(rng, (4, 64), np.float32)

    def body(x_ref, o_ref):
        i = lax.axis_index("g")
        o_ref[3 - i] = x_ref[i] * 2
        o_ref[3 - i, pl.ds(0, 16)] = x_ref[i, 48:]

    want = x[::-1] * 2
    want[:, :16] = x[::-1, 48:]
    np.testing.assert_array_equal(run(body, x, x, grid=(4,), grid_names=("g",)), want)


def test_store_typing(run):
    """Integers go into any integer ref, weak floats into any float ref, nothing else by itself."""
    x = np.arange(-64, 64, dtype=np.int32) * 7

    def body(x_ref, a_ref, b_ref):
        a_ref[...] = x_ref[...]
        b_ref[0] = 1.5

    a, b = run(body, (np.zeros(128, np.int8), np.zeros(1, bf16)), x)
    np.testing.assert_array_equal(a, x.astype(np.int8))
    assert b[0] == 1.5


def test_transposed_and_reshaped_refs(run, rng):
    x = random(rng, (24, 40), np.float32)

    def body(x_ref, a_ref, b_ref):
        a_ref[...] = x_ref.T[...]
        b_ref[...] = x_ref.reshape(12, 80)[...]

    a, b = run(body, (x.T.copy(), x.reshape(12, 80)), x)
    np.testing.assert_array_equal(a, x.T)
    np.testing.assert_array_equal(b, x.reshape(12, 80))


@pytest.mark.parametrize(
    "dtype", [np.dtype(np.float32), np.dtype(np.float16), bf16, np.dtype(np.int8)], ids=str
)
@pytest.mark.parametrize("shape", [(128,), (1000,), (64, 64), (100, 48), (3, 20, 32), (300, 16)])
def test_copy_there_and_back(run, rng, shape, dtype):
    """GMEM -> SMEM -> registers -> SMEM -> GMEM, untiled, any engine."""
    x = random(rng, shape, np.float32)
    x = (x * 20).astype(dtype) if dtype.kind == "i" else x.astype(dtype)

    def body(x_ref, o_ref, a_smem, b_smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, a_smem, bar)
        plgpu.barrier_wait(bar)
        b_smem[...] = a_smem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(b_smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(shape, dtype), plgpu.SMEM(shape, dtype), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("pitch", [512, 520, 511])
@pytest.mark.parametrize("start", [(0, 0), (64, 64), (130, 392), (131, 389)])
def test_copy_swizzled_blocks(run, rng, swizzle, pitch, start):
    """Blocks of a matrix, some overhanging, into tiled and swizzled SMEM and back; zeros
    outside."""
    x = random(rng, (200, pitch), bf16)
    shape = (64, 128)

    def body(x_ref, where_ref, o_ref, copy_ref, smem, bar):
        i, j = where_ref[0], pl.multiple_of(where_ref[1], math.gcd(start[1], 64))
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i, 64), pl.ds(j, 128)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]
        plgpu.copy_smem_to_gmem(smem, copy_ref.at[pl.ds(i, 64), pl.ds(j, 128)])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(shape, bf16, transforms=SWIZZLED[swizzle]), plgpu.Barrier()]
    padded = np.zeros((400, 800), bf16)
    padded[:200, :pitch] = x
    i, j = start
    want = padded[i : i + 64, j : j + 128]
    block, copied = run(
        body, (np.zeros(shape, bf16), x), x, np.array(start, np.int32), scratch_types=scratch
    )
    np.testing.assert_array_equal(block, want)
    valid = copied[i : i + 64, j : j + 128]
    np.testing.assert_array_equal(valid, want[: valid.shape[0], : valid.shape[1]])


def test_many_copies_on_one_barrier(run, rng):
    """num_arrivals counts copies and arrivals of threads alike; slots are indexed dynamically."""
    x = random(rng, (8, 128), np.float32)

    def body(x_ref, o_ref, smem, bars):
        @pl.loop(0, 4)
        def _(i):
            slot = i % 2
            plgpu.copy_gmem_to_smem(x_ref.at[2 * i], smem.at[slot, 0], bars.at[slot])
            plgpu.copy_gmem_to_smem(x_ref.at[2 * i + 1], smem.at[slot, 1], bars.at[slot])
            plgpu.barrier_arrive(bars.at[slot])
            plgpu.barrier_wait(bars.at[slot])
            o_ref[pl.ds(2 * i, 2)] = smem[slot] + 1

    scratch = [plgpu.SMEM((2, 2, 128), np.float32), plgpu.Barrier(num_arrivals=3, num_barriers=2)]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x + 1)


def test_predicated_copies(run, rng):
    """A false predicate copies nothing, but arrives and commits all the same."""
    x = random(rng, (4, 128), np.float32)

    def body(x_ref, o_ref, smem, bar):
        i = lax.axis_index("g")
        smem[...] = jnp.zeros(128, jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(x_ref.at[i], smem, bar, predicate=i % 2 == 0)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(smem, o_ref.at[i], predicate=i != 3)
        plgpu.wait_smem_to_gmem(0)

        @pl.when(i == 3)
        def _():
            o_ref[i] = jnp.full((128,), 7.0)

    want = x.copy()
    want[1], want[3] = 0, 7
    got = run(
        body,
        x,
        x,
        grid=(4,),
        grid_names=("g",),
        scratch_types=[plgpu.SMEM((128,), np.float32), plgpu.Barrier()],
    )
    np.testing.assert_array_equal(got, want)


def test_grouped_stores_and_read_only_wait(run, rng):
    x = random(rng, (6, 128), np.float32)

    def body(x_ref, o_ref, smem):
        for i in range(6):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            smem[i % 2] = x_ref[i] * 3
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem.at[i % 2], o_ref.at[i], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    np.testing.assert_array_equal(
        run(body, x, x, scratch_types=[plgpu.SMEM((2, 128), np.float32)]), x * 3
    )


@pytest.mark.parametrize("threads", [2, 3])
def test_producer_and_consumers(run, rng, threads):
    """Threads of a block: one loads, the others compute, barriers hand the slots around."""
    x = random(rng, (12, 128), np.float32)
    consumers = threads - 1

    def body(x_ref, o_ref, smem, full, empty):
        me = lax.axis_index("wg")

        @pl.when(me == 0)
        def _():
            @pl.loop(0, 12)
            def _(i):
                @pl.when(i >= 2)
                def _():
                    plgpu.barrier_wait(empty.at[i % 2])

                plgpu.copy_gmem_to_smem(x_ref.at[i], smem.at[i % 2], full.at[i % 2])

        @pl.when(me > 0)
        def _():
            @pl.loop(0, 12)
            def _(i):
                plgpu.barrier_wait(full.at[i % 2])
                value = smem[i % 2]

                @pl.when(i % consumers == me - 1)
                def _():
                    o_ref[i] = value * 2

                plgpu.barrier_arrive(empty.at[i % 2])

            # the last two releases are waited for here, so that the barriers end quiescent

        @pl.when(me == 0)
        def _():
            plgpu.barrier_wait(empty.at[0])
            plgpu.barrier_wait(empty.at[1])

    got = run(
        body,
        x,
        x,
        num_threads=threads,
        thread_name="wg",
        scratch_types=dict(
            smem=plgpu.SMEM((2, 128), np.float32),
            full=plgpu.Barrier(num_barriers=2),
            empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
        ),
    )
    np.testing.assert_array_equal(got, x * 2)


def test_axis_indices(run):
    """Grid, cluster and thread axes, alone and linearised, in the order of the launch."""
    grid, cluster = (2, 3, 2), (2,)

    def body(o_ref):
        i, j, k, c = (lax.axis_index(n) for n in ("i", "j", "k", "c"))
        t = lax.axis_index("t")
        assert lax.axis_size(("i", "j")) == 6
        o_ref[i, j, k, c, t] = lax.axis_index(("k", "j")) * 1000 + i * 100 + c * 10 + t

    got = run(
        body,
        np.zeros((2, 3, 2, 2, 2), np.int32),
        grid=grid,
        grid_names=("i", "j", "k"),
        cluster=cluster,
        cluster_names=("c",),
        num_threads=2,
        thread_name="t",
    )
    i, j, k, c, t = np.indices(got.shape)
    np.testing.assert_array_equal(got, (k * 3 + j) * 1000 + i * 100 + c * 10 + t)


@pytest.mark.parametrize("grid", [(), (5,), (2, 3), (2, 1, 3), (2, 3, 1, 2), (2, 1, 2, 1, 3)])
def test_grid_ranks(run, grid):
    """Grids of any rank, unnamed too."""

    def body(o_ref):
        where = tuple(pl.program_id(k) for k in range(len(grid)))
        code = 0
        for w in where:
            code = code * 10 + w
        o_ref[where] = code + jnp.int32(1)

    got = run(body, np.zeros(grid, np.int32), grid=grid)
    want = np.ones(grid, np.int32)
    for k, ind in enumerate(np.indices(grid)):
        want += ind.astype(np.int32) * 10 ** (len(grid) - 1 - k)
    np.testing.assert_array_equal(got, want)


def test_scopes_nest_and_follow_each_other(run, rng):
    """Sibling scopes share memory, nested ones do not, values leave scopes, None and pytrees
    pass."""
    x = random(rng, (256,), np.float32)

    def body(x_ref, o_ref):
        def first(pair, none):
            assert none is None
            pair["a"][...] = x_ref[...]

            @functools.partial(pl.run_scoped, inner=plgpu.SMEM((256,), np.float32))
            def value(inner):
                inner[...] = pair["a"][...] * 2
                return {"v": inner[...], "n": 5}

            pair["b"][...] = value["v"] + pair["a"][...]
            return pair["b"][...], value["n"]

        v, n = pl.run_scoped(
            first, {"a": plgpu.SMEM((256,), np.float32), "b": plgpu.SMEM((256,), np.float32)}, None
        )

        @pl.with_scoped(plgpu.SMEM((256,), np.float32))
        def second(extra, smem):
            smem[...] = v + extra
            o_ref[...] = smem[...]

        second(n)

    np.testing.assert_array_equal(run(body, x, x), x * 3 + 5)


def test_scope_inside_a_loop(run):
    """A barrier of a scope in a loop goes on counting phases."""
    x = np.arange(5 * 128, dtype=np.float32).reshape(5, 128)

    def body(x_ref, o_ref):
        @pl.loop(0, 5)
        def _(i):
            def inner(smem, bar):
                plgpu.copy_gmem_to_smem(x_ref.at[i], smem, bar)
                plgpu.barrier_wait(bar)
                o_ref[i] = smem[...] + 1

            pl.run_scoped(inner, plgpu.SMEM((128,), np.float32), plgpu.Barrier())

    np.testing.assert_array_equal(run(body, x, x), x + 1)


def test_arguments_and_results_are_pytrees(run, rng):
    x, y, s = random(rng, (128,), np.float32), random(rng, (64,), np.float32), np.float32(2.5)

    def body(args, none, scale_ref, outs, tmp):
        assert none is None
        tmp["t"][...] = args["x"][...] * scale_ref[...]
        outs["p"][...] = tmp["t"][...]
        outs["q"][0][...] = args["pair"][1][...] + 1

    like = plgpu.ShapeDtypeStruct
    out = {"p": like((128,), np.float32), "q": (like((64,), np.float32),)}
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=({"t": plgpu.SMEM((128,), np.float32)},),
        interpret=run.way != "cuda" or None,
    )
    got = run.call(kernel, {"x": x, "pair": (x, y)}, None, s)
    np.testing.assert_array_equal(got["p"], x * s)
    np.testing.assert_array_equal(got["q"][0], y + 1)


def test_swap_and_update(run):
    def body(o_ref, smem):
        smem[...] = jnp.arange(128)
        old = smem.swap(jnp.full((128,), 5, jnp.int32))
        smem[...] += old
        o_ref[...] = smem[...]

    got = run(body, np.zeros(128, np.int32), scratch_types=[plgpu.SMEM((128,), np.int32)])
    np.testing.assert_array_equal(got, np.arange(128) + 5)


def test_debug_print(run, capfd):
    def body(o_ref):
        i = lax.axis_index("g")
        pl.debug_print("{{i}} is {}, half {}, 100%", i - 1, i * 0.5)
        o_ref[i] = i

    run(body, np.zeros(2, np.int32), grid=(2,), grid_names=("g",))
    plgpu.synchronize()
    out = capfd.readouterr().out
    assert "{i} is -1, half 0" in out and "{i} is 0, half 0.5" in out and "100%" in out
