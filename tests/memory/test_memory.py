"""Refs, copies, barriers, scopes: data goes where the program says, at any shape and start."""

import functools
import math
import re

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


@pytest.mark.covering(1)
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


@pytest.mark.covering(2)
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
        pl.debug_print("{{i}} is {}, half {}, 100% done", i - 1, i * 0.5)
        pl.debug_print("most {}", i.astype(jnp.uint32) - 1)
        o_ref[i] = i

    run(body, np.zeros(2, np.int32), grid=(2,), grid_names=("g",))
    plgpu.synchronize()
    out = capfd.readouterr().out
    times = 2 if run.way == "host" else 1  # the interpreter has printed as well
    for text in (r"{i} is -1, half 0\.?0*", r"{i} is 0, half 0\.50*"):
        assert len(re.findall(f"^{text}, 100% done$", out, flags=re.M)) == times
    for text in ("most 4294967295", "most 0"):
        assert len(re.findall(f"^{text}$", out, flags=re.M)) == times


def test_vectors_begin_where_they_may(run, rng):
    """Rows and starts that are no multiples of a vector, in GMEM and SMEM, known and traced."""
    x = random(rng, (64, 19), np.float32)
    y = random(rng, (2048,), np.float32)
    o = [np.zeros((64, 16), np.float32)] * 4 + [np.zeros(512, np.float32)] * 4

    def body(x_ref, y_ref, *rest):
        i = lax.axis_index("g")
        *o, x_smem, y_smem = rest
        x_smem[...] = x_ref[...]
        y_smem[...] = y_ref[...]
        wgmma = plgpu.Layout.WGMMA
        o[0][...] = plgpu.load(x_ref.at[:, pl.ds(0, 16)], layout=wgmma)
        o[1][...] = plgpu.load(x_smem.at[:, pl.ds(0, 16)], layout=wgmma)
        o[2][...] = plgpu.load(x_ref.at[:, pl.ds(i + 1, 16)], layout=wgmma)
        o[3][...] = plgpu.load(x_smem.at[:, pl.ds(i + 2, 16)], layout=wgmma)
        o[4][...] = y_ref[pl.ds(1, 512)]
        o[5][...] = y_smem[pl.ds(2, 512)]
        o[6][...] = y_ref[pl.ds(i + 3, 512)]
        o[7][...] = y_smem[pl.ds(i * 2 + 6, 512)]

    scratch = [plgpu.SMEM(x.shape, np.float32), plgpu.SMEM(y.shape, np.float32)]
    got = run(body, tuple(o), x, y, grid=(1,), grid_names=("g",), scratch_types=scratch)
    want = [x[:, k : k + 16] for k in (0, 0, 1, 2)] + [y[k : k + 512] for k in (1, 2, 3, 6)]
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(g, w, err_msg=str(k))


@pytest.mark.parametrize("width", SWIZZLED)
def test_swizzled_buffers_after_small_ones(run, rng, width):
    """Patterns of a swizzle begin at multiples of up to 1024 bytes, as tensor cores demand."""
    a, b = rng.standard_normal((2, 64, 64)).astype(np.float16)

    def body(a_ref, b_ref, o_ref, p_ref, a_smem, q_ref, b_smem, bar):
        p_ref[...] = jnp.ones((8,), jnp.float32)
        q_ref[...] = jnp.ones((130,), jnp.float32)
        plgpu.copy_gmem_to_smem(a_ref, a_smem, bar)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, bar)
        plgpu.barrier_wait(bar)

        def product(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...] + p_ref[0] + q_ref[129]

        o_ref[...] = pl.run_scoped(product, plgpu.ACC((64, 64), np.float32))

    tile = plgpu.SMEM((64, 64), np.float16, transforms=SWIZZLED[width])
    small = [plgpu.SMEM((n,), np.float32) for n in (8, 130)]
    scratch = [small[0], tile, small[1], tile, plgpu.Barrier(num_arrivals=2)]
    got = run(body, np.zeros((64, 64), np.float32), a, b, scratch_types=scratch)
    want = a.astype(np.float32) @ b.astype(np.float32) + 2
    np.testing.assert_allclose(got, want, atol=1e-2)


@pytest.mark.parametrize("width", SWIZZLED)
def test_wgmma_layout_meets_swizzled_rows_anywhere(run, rng, width):
    """Slices that begin inside of a swizzle pattern, and transposed ones; 16 and 32 bits."""
    wgmma = plgpu.Layout.WGMMA
    x = random(rng, (80, 128), np.float16)
    y = random(rng, (72, 128), np.float32)

    def tiled(shape, dtype):
        tiling = plgpu.TilingTransform((8, width // np.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))

    outs = [(64, 128), (64, 128), (64, 128), (128, 64), (128, 64)]

    def body(x_ref, y_ref, *rest):
        i = lax.axis_index("g")
        *o, xs, ys, transposed, transposed32 = rest
        xs[...] = x_ref[...]
        ys[...] = y_ref[...]
        o[0][...] = plgpu.load(xs.at[pl.ds(1, 64)], layout=wgmma).astype(np.float32)
        a = plgpu.load(xs.at[pl.ds(i + 3, 64)], layout=wgmma)
        b = plgpu.load(ys.at[pl.ds(i + 5, 64)], layout=wgmma)
        xs[pl.ds(9, 64)] = a
        o[1][...] = xs[pl.ds(9, 64)].astype(np.float32)
        ys[pl.ds(2, 64)] = b
        o[2][...] = ys[pl.ds(2, 64)]
        transposed.T[...] = a
        o[3][...] = transposed[...].astype(np.float32)
        inside = transposed32.at[pl.ds(1, 128)]
        inside.T[...] = b
        more = plgpu.load(transposed.T, layout=wgmma).astype(np.float32)
        again = plgpu.load(inside.T, layout=wgmma) + more
        inside.T[...] = again
        o[4][...] = inside[...]

    scratch = [
        tiled(x.shape, np.float16),
        tiled(y.shape, np.float32),
        tiled((128, 64), np.float16),
        tiled((136, 64), np.float32),
    ]
    outs = tuple(np.zeros(s, np.float32) for s in outs)
    got = run(body, outs, x, y, grid=(1,), grid_names=("g",), scratch_types=scratch)
    x = x.astype(np.float32)
    want = [x[1:65], x[3:67], y[5:69], x[3:67].T, (x[3:67] + y[5:69]).T]
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(g, w, err_msg=str(k))


def test_predicated_stores_leave_what_was_there(run, rng):
    x = random(rng, (2, 64, 64), np.float16)

    def body(x_ref, o_ref, smem):
        i = lax.axis_index("g")
        for k in range(2):
            smem[...] = x_ref[k]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, o_ref.at[i], predicate=(i == 1) | (k == 0))
            plgpu.wait_smem_to_gmem(0)

    for transforms in ((), SWIZZLED[128]):
        smem = plgpu.SMEM((64, 64), np.float16, transforms=transforms)
        got = run(body, x, x, grid=(2,), grid_names=("g",), scratch_types=[smem])
        np.testing.assert_array_equal(got, x)


def test_boxes_of_one_array_differ(run, rng):
    """Copies of a whole array, of some rows and of some columns."""
    x = random(rng, (64, 128), np.float16)

    def body(x_ref, a_ref, b_ref, c_ref, a, b, c, bar):
        plgpu.copy_gmem_to_smem(x_ref, a, bar)
        plgpu.copy_gmem_to_smem(x_ref.at[8:32], b, bar)
        plgpu.copy_gmem_to_smem(x_ref.at[:, 64:], c, bar)
        plgpu.barrier_wait(bar)
        for smem, o in ((a, a_ref), (b, b_ref), (c, c_ref)):
            plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(0)

    want = (x, x[8:32], np.ascontiguousarray(x[:, 64:]))
    scratch = [plgpu.SMEM(w.shape, np.float16, transforms=SWIZZLED[128]) for w in want]
    got = run(body, want, x, scratch_types=[*scratch, plgpu.Barrier(num_arrivals=3)])
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.filterwarnings("ignore:copy_")
@pytest.mark.parametrize("pitch", [32, 33])
def test_copies_that_begin_before_the_array(run, rng, pitch):
    """By the engine and, where a row is no multiple of 16 bytes, by all lanes: zeros on the way in,
    nothing on the way out."""
    x = random(rng, (12, pitch), np.float32)

    def body(x_ref, o_ref, s_ref, smem, bar):
        i = lax.axis_index("g") - 3
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i, 8)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]
        s_ref[...] = jnp.zeros((12, pitch), jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, s_ref.at[pl.ds(i - 1, 8)])
        plgpu.wait_smem_to_gmem(0)

    outs = np.zeros((8, pitch), np.float32), x
    scratch = [plgpu.SMEM((8, pitch), np.float32), plgpu.Barrier()]
    o, s = run(body, outs, x, grid=(1,), grid_names=("g",), scratch_types=scratch)
    want = np.concatenate([np.zeros((3, pitch), np.float32), x[:5]])
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(s, np.concatenate([want[4:], np.zeros((8, pitch), np.float32)]))


@pytest.mark.covering(2)
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
@pytest.mark.parametrize("low,high", [((0, 0), (1, 2)), ((0, 0), (3, 5)), ((-3, -3), (1, 2))])
@pytest.mark.parametrize("i,j", [(0, 2), (1, 1), (0, 4), (1, -1), (2, 0)])
def test_copies_of_six_dimensions(run, rng, i, j, low, high, whole):
    """The engine sees them as fewer. An index past the end of one is none of the next, but zeros;
    where it is known to be inside, the two are one."""
    x = random(rng, (2, 3, 4, 2, 2, 64), np.float32)
    part = () if whole else (slice(1, 3), slice(None), slice(None), slice(0, 32))

    def body(x_ref, at_ref, o_ref, smem, bar):
        i, j = (jnp.clip(at_ref[k], low[k], high[k]) for k in range(2))
        plgpu.copy_gmem_to_smem(x_ref.at[(i, j, *part)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]

    like = x[(0, 0, *part)]
    scratch = [plgpu.SMEM(like.shape, np.float32), plgpu.Barrier()]
    got = run(body, like, x, np.array([i, j], np.int32), scratch_types=scratch)
    i, j = np.clip((i, j), low, high)
    inside = 0 <= i < 2 and 0 <= j < 3
    np.testing.assert_array_equal(got, x[(i, j, *part)] if inside else np.zeros_like(like))


@pytest.mark.parametrize("step", [1, 2, 4])
def test_contiguous_copies_begin_anywhere(run, rng, step):
    """In bounds for sure, at a multiple of 16 bytes only where the step is one."""
    x = random(rng, 512, np.float32)

    def body(x_ref, o_ref, again_ref, smem, bar):
        i = lax.axis_index("g")
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * step + step, 128)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[i] = smem[...]
        plgpu.copy_smem_to_gmem(smem, again_ref.at[pl.ds(i * (128 + step) + step, 128)])
        plgpu.wait_smem_to_gmem(0)

    outs = np.zeros((3, 128), np.float32), np.zeros(512, np.float32)
    scratch = [plgpu.SMEM((128,), np.float32), plgpu.Barrier()]
    got, again = run(body, outs, x, grid=(3,), grid_names=("g",), scratch_types=scratch)
    for k in range(3):
        row = x[(k + 1) * step :][:128]
        np.testing.assert_array_equal(got[k], row)
        np.testing.assert_array_equal(again[k * (128 + step) + step :][:128], row)


@pytest.mark.filterwarnings("ignore:copy_")
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_copies_of_transposed_blocks(run, rng, dtype):
    """No engine transposes."""
    x = random(rng, (64, 32), dtype)

    def body(x_ref, o_ref, p_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref.T, smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]
        plgpu.copy_smem_to_gmem(smem, p_ref.T)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((32, 64), dtype), plgpu.Barrier()]
    o, p = run(body, (x.T.copy(), x), x, scratch_types=scratch)
    np.testing.assert_array_equal(o, x.T)
    np.testing.assert_array_equal(p, x)


@pytest.mark.filterwarnings("ignore:copy_")
def test_overhanging_copies_to_the_middle_of_smem(run, rng):
    """Where no engine can begin, lanes copy pieces, none of which crosses the end of the array."""
    x = random(rng, 1001, np.float32)

    def body(x_ref, o_ref, p_ref, smem, bar):
        i = pl.multiple_of(940 + lax.axis_index("g") * 12, 4)
        part = smem.at[pl.ds(4, 64)]
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i, 64)], part, bar)
        plgpu.barrier_wait(bar)
        o_ref[lax.axis_index("g")] = smem[4:68]
        plgpu.copy_smem_to_gmem(part, p_ref.at[lax.axis_index("g"), pl.ds(i, 64)])
        plgpu.wait_smem_to_gmem(0)

    outs = np.zeros((2, 64), np.float32), np.zeros((2, 1001), np.float32)
    scratch = [plgpu.SMEM((72,), np.float32), plgpu.Barrier()]
    got, back = run(body, outs, x, grid=(2,), grid_names=("g",), scratch_types=scratch)
    for k, start in enumerate((940, 952)):
        row = np.zeros(64, np.float32)
        row[: 1001 - start] = x[start:][:64]
        np.testing.assert_array_equal(got[k], row)
        np.testing.assert_array_equal(back[k, start:], row[: 1001 - start])


@pytest.mark.filterwarnings("ignore:copy_")
def test_groups_of_stores_by_lanes_count(run, rng):
    """A store that no engine can make is a group all the same: the one before it is awaited."""
    x = random(rng, (2, 4096), np.float32)

    def body(x_ref, o_ref, p_ref, first, second):
        for k, smem in enumerate((first, second)):
            smem[...] = x_ref[k]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(first, o_ref)
        plgpu.copy_smem_to_gmem(second, p_ref.at[pl.ds(3, 4096)])
        plgpu.wait_smem_to_gmem(1)
        first[...] = jnp.zeros((4096,), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    outs = np.zeros(4096, np.float32), np.zeros(4100, np.float32)
    scratch = [plgpu.SMEM((4096,), np.float32)] * 2
    o, p = run(body, outs, x, scratch_types=scratch)
    np.testing.assert_array_equal(o, x[0])
    np.testing.assert_array_equal(p[3:-1], x[1])


def test_one_array_with_two_swizzles(run, rng):
    """The same boxes, into plain rows and into swizzled ones."""
    x = random(rng, (64, 96), np.float16)
    swizzled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
    part = x[:, 32:64]

    def body(x_ref, o_ref, p_ref, plain, other, bar):
        for smem in (plain, other):
            plgpu.copy_gmem_to_smem(x_ref.at[:, 32:64], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...], p_ref[...] = plain[...], other[...]

    scratch = [
        plgpu.SMEM(part.shape, x.dtype),
        plgpu.SMEM(part.shape, x.dtype, transforms=swizzled),
        plgpu.Barrier(2),
    ]
    for got in run(body, (part, part), x, scratch_types=scratch):
        np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_registers_along_the_rows_of_a_swizzle(run, rng, swizzle):
    """Each row of a pattern is permuted in its own way, also from register to register."""
    x = random(rng, (64, 64), np.float16)
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    layout = plgpu.Layout.TILED(plgpu.Tiling(((64, 64), (16, 64), (4, 2))), (-6,), (-3,), -1)

    def body(x_ref, o_ref, p_ref, first, second, bar):
        plgpu.copy_gmem_to_smem(x_ref, first, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = plgpu.load(first, layout=layout)
        second[...] = plgpu.load(x_ref, layout=layout, optimized=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(second, p_ref)
        plgpu.wait_smem_to_gmem(0)

    smem = plgpu.SMEM(x.shape, x.dtype, transforms=transforms)
    for got in run(body, (x, x), x, scratch_types=[smem, smem, plgpu.Barrier()]):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("columns", [232, 256])
def test_swizzled_blocks_overhang(run, rng, columns):
    """Chunks of columns are boxes of their own where the array does not consist of such."""
    x = random(rng, (64, columns), np.float16)

    def body(x_ref, o_ref, p_ref, smem, bar):
        g = lax.axis_index("g")
        part = (slice(None), pl.ds(g * 64, 128))
        plgpu.copy_gmem_to_smem(x_ref.at[part], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[g] = smem[...]
        plgpu.copy_smem_to_gmem(smem, p_ref.at[(g, *part)])
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [plgpu.SMEM((64, 128), x.dtype, transforms=transforms), plgpu.Barrier()]
    outs = np.zeros((4, 64, 128), x.dtype), np.zeros((4, 64, columns), x.dtype)
    got, back = run(body, outs, x, grid=(4,), grid_names=("g",), scratch_types=scratch)
    for g in range(4):
        part = x[:, g * 64 : g * 64 + 128]
        want = np.zeros((64, 128), x.dtype)
        want[:, : part.shape[1]] = part
        np.testing.assert_array_equal(got[g], want)
        np.testing.assert_array_equal(back[g, :, g * 64 : g * 64 + 128], part)


def test_barriers_in_any_order(run, rng):
    """Each has a phase of its own."""
    x = random(rng, (3, 4096), np.float32)

    def body(x_ref, o_ref, smem, bars):
        for turn in ((2, 0, 1), (1, 2, 0)):
            for k in range(3):
                plgpu.copy_gmem_to_smem(x_ref.at[k], smem.at[k], bars.at[k])
            for k in turn:
                plgpu.barrier_wait(bars.at[k])
                o_ref[k] = smem[k]

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_barriers=3)]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x)


def test_copies_that_nobody_reads_in_between(run, rng):
    """A lane that is late still waits for the phase before."""
    x = random(rng, (4, 128), np.float32)

    def body(x_ref, o_ref, smem, bar):
        for k in range(4):
            plgpu.copy_gmem_to_smem(x_ref.at[k], smem, bar)
            plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]

    scratch = [plgpu.SMEM((128,), x.dtype), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, x[0], x, scratch_types=scratch), x[3])


@pytest.mark.parametrize("where", ["branch", "loop", "straight"])
def test_copies_over_what_lanes_have_stored(run, rng, where):
    """The stores are shown to the engine first, or they might land last."""
    x = random(rng, (3, 1024), np.float32)

    def body(x_ref, n_ref, o_ref, smem, bar):
        def change():
            smem[...] = x_ref[0] * 2

        def step(k, _=None):
            plgpu.copy_gmem_to_smem(x_ref.at[k], smem, bar)
            plgpu.barrier_wait(bar)
            o_ref[k] = smem[...]
            if where == "branch":
                pl.when(n_ref[k] == 1)(change)
            else:
                change()

        if where == "loop":
            lax.fori_loop(0, 3, step, None)
        else:
            for k in range(3):
                step(k)

    scratch = [plgpu.SMEM((1024,), x.dtype), plgpu.Barrier()]
    n = np.array([1, 0, 1], np.int32)
    got = run(body, x, x, n, scratch_types=scratch)
    np.testing.assert_array_equal(got, x)


def test_scalars_over_what_lanes_still_read(run):
    """Parts of one ref, and scopes that share memory."""

    def body(x_ref, o_ref, p_ref, q_ref, smem):
        smem[...] = x_ref[...]
        whole = smem[0:96]
        smem[5] = 1000
        o_ref[...] = whole
        part = smem[64:128]
        smem[100] = 2000
        p_ref[...] = part + smem[0:64]

        def first(s):
            s[...] = x_ref[...]
            return s[...]

        def second(s):
            s[7] = 3000
            q_ref[0] = kept
            q_ref[1, 0] = s[7]

        kept = pl.run_scoped(first, plgpu.SMEM((128,), jnp.int32))
        pl.run_scoped(second, plgpu.SMEM((128,), jnp.int32))
        smem[...] = x_ref[...]
        taken = lax.cond(x_ref[3] == 3, lambda: smem[...], lambda: jnp.zeros((128,), jnp.int32))
        smem[77] = 4000
        q_ref[2] = taken

    x = np.arange(128, dtype=np.int32)
    outs = x[:96], x[:64], np.zeros((3, 128), np.int32)
    o, p, q = run(body, outs, x, scratch_types=[plgpu.SMEM((128,), jnp.int32)])
    np.testing.assert_array_equal(o, x[:96])
    want = x[64:] + np.where(x[:64] == 5, 1000, x[:64])
    np.testing.assert_array_equal(p, want)
    np.testing.assert_array_equal(q[0], x)
    np.testing.assert_array_equal(q[2], x)
    assert q[1, 0] == 3000


def test_what_was_stored_is_read_again(run, rng):
    """Waiting for a store, not only for its reads, makes the array in GMEM readable."""
    x = random(rng, (128, 64), np.float32)

    def body(x_ref, o_ref, again_ref, smem):
        smem[...] = x_ref[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)
        again_ref[...] = o_ref[...] * 2

    scratch = [plgpu.SMEM(x.shape, np.float32)]
    o, again = run(body, (x, x), x, scratch_types=scratch)
    np.testing.assert_array_equal(o, x + 1)
    np.testing.assert_array_equal(again, (x + 1) * 2)


def test_more_than_256_rows_are_two_boxes(run, rng):
    x = random(rng, (512, 64), np.float16)

    def body(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref, smem, bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(smem, o_ref)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(x.shape, np.float16, transforms=SWIZZLED[128]), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, x, x, scratch_types=scratch), x)


def test_overhang_of_rows_that_are_one_axis_for_the_engine(run, rng):
    """Rows of 24 bytes, merged with their neighbours; a known and a traced part of the start."""
    x = random(rng, (10, 2, 6), np.float32)

    def body(x_ref, o_ref, smem, bar):
        i = lax.axis_index("g")
        plgpu.copy_gmem_to_smem(x_ref.at[4:].at[pl.ds(i * 3, 4)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[i] = smem[...]

    scratch = [plgpu.SMEM((4, 2, 6), np.float32), plgpu.Barrier()]
    want = np.zeros((2, 4, 2, 6), np.float32)
    want[0], want[1, :3] = x[4:8], x[7:]
    got = run(body, want, x, grid=(2,), grid_names=("g",), scratch_types=scratch)
    np.testing.assert_array_equal(got, want)


def test_a_loop_stores_over_what_it_has_read(run):
    """Its first access is the store: nothing but the loop says that lanes may still read."""

    def body(o_ref, smem):
        rows = plgpu.broadcasted_iota(np.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)

        def step(k, total):
            smem[...] = (rows + k).astype(np.float32)
            return total + plgpu.load(smem.T, layout=plgpu.Layout.WGMMA)

        zeros = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
        o_ref[...] = lax.fori_loop(0, 8, step, zeros)

    want = np.broadcast_to(8.0 * np.arange(64, dtype=np.float32) + 28, (64, 64))
    got = run(body, want.copy(), scratch_types=[plgpu.SMEM((64, 64), np.float32)])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("start", [0, 13, 57])
def test_copies_of_reshaped_arrays(run, rng, start):
    """A copy clips at the shape that was sliced, be it of the array or of its reshape."""
    x = random(rng, (6, 10, 64), np.float32)
    views = [
        (lambda r, s: r.reshape(60, 64).at[pl.ds(s, 8)], x.reshape(60, 64)),
        (lambda r, s: r.reshape(60, 2, 32).at[pl.ds(s, 8), 1], x.reshape(60, 2, 32)[:, 1]),
        (
            lambda r, s: r.at[2:5].reshape(30, 64).at[pl.ds(s, 8), 3:40],
            x[2:5].reshape(30, 64)[:, 3:40],
        ),
        (lambda r, s: r.at[s - s + 4].reshape(5, 128).at[pl.ds(s, 8)], x[4].reshape(5, 128)),
        (lambda r, s: r.reshape(-1).at[pl.ds(s * 64, 512)], x.reshape(-1)),
    ]
    wants, valid = [], []
    for k, (_, v) in enumerate(views):
        n, at = (512, start * 64) if k == 4 else (8, start)
        rows = [i for i in range(n) if 0 <= at + i < v.shape[0]]
        wants.append(np.zeros((n, *v.shape[1:]), np.float32))
        wants[k][rows] = v[[at + i for i in rows]]
        valid.append((rows, [at + i for i in rows]))

    def body(x_ref, start_ref, *refs):
        outs, backs = refs[:5], refs[5:]
        for (view, _), o, back in zip(views, outs, backs):

            def move(smem, bar, view=view, o=o, back=back):
                source, target = (view(r, start_ref[0]) for r in (x_ref, back))
                plgpu.copy_gmem_to_smem(source, smem, bar)
                plgpu.barrier_wait(bar)
                o[...] = smem[...]
                plgpu.copy_smem_to_gmem(smem, target)
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(move, plgpu.SMEM(o.shape, np.float32), plgpu.Barrier())

    got = run(body, (*wants, *[x] * 5), x, np.array([start], np.int32))
    for k, want in enumerate(wants):
        np.testing.assert_array_equal(got[k], want, err_msg=f"view {k}")
    wheres = [
        lambda a: a.reshape(60, 64),
        lambda a: a.reshape(60, 2, 32)[:, 1],
        lambda a: a[2:5].reshape(30, 64)[:, 3:40],
        lambda a: a[4].reshape(5, 128),
        lambda a: a.reshape(-1),
    ]
    for k, where in enumerate(wheres):
        rows, stored = valid[k]
        back = where(got[5 + k])[stored]
        np.testing.assert_array_equal(back, wants[k][rows], err_msg=f"view {k} back")


def test_names_in_copies(run, rng):
    """A user's variables may have the names of the generator's own."""
    x = random(rng, (9, 37), np.float32)

    def body(c, c0, c1, index, smem, p):
        i = c0[0]
        plgpu.copy_gmem_to_smem(c.at[pl.ds(i, 4), pl.ds(i, 33)], smem, p)
        plgpu.barrier_wait(p)
        c1[...] = smem[...]
        plgpu.copy_smem_to_gmem(smem, index.at[pl.ds(i, 4), pl.ds(i, 33)])
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((4, 33), np.float32), plgpu.Barrier()]
    got, back = run(body, (x[:4, :33], x), x, np.array([2], np.int32), scratch_types=scratch)
    np.testing.assert_array_equal(got, x[2:6, 2:35])
    np.testing.assert_array_equal(back[2:6, 2:35], x[2:6, 2:35])


@pytest.mark.parametrize("grid", [(70000, 1), (300, 300, 1, 1)])
def test_grids_that_cuda_has_not(grid):
    """Only the last axis may have more than 65535 blocks: others lie along it, too."""
    kernel = plgpu.kernel(
        lambda o: None, out_type=plgpu.ShapeDtypeStruct((1,), np.float32), grid=grid
    )
    assert kernel.lower().resources()["grid"] == (math.prod(grid), 1, 1)
    kernel = plgpu.kernel(
        lambda o: None, out_type=plgpu.ShapeDtypeStruct((1,), np.float32), grid=(70000, *grid)
    )
    with pytest.raises(ValueError, match="all its axes; at most 2147483647"):
        kernel.lower().as_text("cuda")
    kernel = plgpu.kernel(
        lambda o: None, out_type=plgpu.ShapeDtypeStruct((1,), np.float32), grid=grid[::-1]
    )
    if len(grid) == 2:
        assert kernel.lower().resources()["grid"] == (70000, 1, 1)
