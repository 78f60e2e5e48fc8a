"""Loops over tiles: planar_snake, nd_loop, and grids whose points a launch hands out."""

import re
import warnings
from collections import Counter

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

f16, f32, i32 = np.float16, np.float32, np.int32


# ---- planar_snake, nd_loop -----------------------------------------------------------------------


def snake(lin, shape, minor_dim, width):
    """As it is specified."""
    major_size, minor_size = shape[1 - minor_dim], shape[minor_dim]
    tile = lin // (width * major_size)
    full = minor_size // width
    inside = lin < full * width * major_size
    w = width if inside else minor_size % width
    at = lin if inside else lin - full * width * major_size
    minor = tile * width + at % w
    q = at // w % major_size
    major = q if tile % 2 == 0 else major_size - 1 - q
    return (minor, major) if minor_dim == 0 else (major, minor)


@pytest.mark.parametrize("minor_dim", [0, 1])
def test_planar_snake_is_a_bijection(minor_dim):
    for m in range(1, 8):
        for n in range(1, 8):
            for width in range(1, 8):
                got = [plgpu.planar_snake(k, (m, n), minor_dim, width) for k in range(m * n)]
                assert sorted(got) == [(i, j) for i in range(m) for j in range(n)]
                if width <= (m, n)[minor_dim]:
                    assert got == [snake(k, (m, n), minor_dim, width) for k in range(m * n)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape,minor_dim,width", [((4, 6), 0, 2), ((5, 5), 0, 3), ((3, 7), 1, 4)])
def test_planar_snake_in_kernels(run, shape, minor_dim, width, traced):
    def body(o):
        @pl.loop(0, shape[0] * shape[1])
        def _(k):
            of = tuple(n + lax.axis_index("g") for n in shape) if traced else shape
            i, j = plgpu.planar_snake(k, of, minor_dim, width)
            assert i.dtype == j.dtype == np.int32
            o[k, 0], o[k, 1] = i, j

    want = [snake(k, shape, minor_dim, width) for k in range(shape[0] * shape[1])]
    out = plgpu.ShapeDtypeStruct((len(want), 2), i32)
    np.testing.assert_array_equal(run(body, out, grid=(1,), grid_names=("g",)), want)


def test_copies_of_a_snake_go_by_tma(rng):
    """Starts that come from it are seen not to be negative."""

    def body(x, o, s, bar):
        @plgpu.nd_loop((15,), collective_axes="g")
        def _(info):
            i, j = plgpu.planar_snake(info.index[0], (5, 3), 0, 2)
            at = (pl.ds(i * 8, 8), pl.ds(j * 32, 32))
            plgpu.copy_gmem_to_smem(x.at[at], s, bar)
            plgpu.barrier_wait(bar)
            plgpu.copy_smem_to_gmem(s, o.at[at])
            plgpu.wait_smem_to_gmem(0)

    x = rng.standard_normal((40, 96)).astype(f32)
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(x.shape, f32),
        scratch_types=[plgpu.SMEM((8, 32), f32), plgpu.Barrier()],
        grid=(4,),
        grid_names=("g",),
        interpret=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(kernel(x), x)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("tiling", [None, (2, 3)])
def test_nd_loop(run, traced, tiling):
    """Over the programs of a grid and a thread axis; the steps of all make up the whole."""
    grid, programs = (4, 6), 5 * 2

    def body(o, steps):
        zero = lax.axis_index("g") * 0 if traced else 0
        g, t = lax.axis_index("g"), lax.axis_index("wg")

        @plgpu.nd_loop(
            tuple(n + zero for n in grid),
            collective_axes=("g", "wg"),
            tiling=tiling,
            init_carry=jnp.int32(0),
        )
        def count(info, carry):
            i, j = info.index
            o[i, j, 0] = info.local_index * programs + g * 2 + t
            o[i, j, 1] = info.num_local_steps
            return carry + 1

        steps[g, t] = count

    outs = [plgpu.ShapeDtypeStruct(s, i32) for s in ((*grid, 2), (5, 2))]
    options = dict(grid=(5,), grid_names=("g",), num_threads=2, thread_name="wg")
    o, steps = run(body, outs, **options)
    order = [(i, j) for i in range(4) for j in range(6)]
    if tiling:
        order.sort(key=lambda x: (x[0] // 2, x[1] // 3, x[0] % 2, x[1] % 3))
    for flat, (i, j) in enumerate(order):
        assert o[i, j, 0] == flat and o[i, j, 1] == 24 // programs + (flat % programs < 4)
    assert steps.sum() == 24 and steps.ravel().tolist() == [3] * 4 + [2] * 6


def test_nd_loop_refusals():
    for tiling, why in [((2,), "length"), ((3, 2), "divide")]:

        def body(o, tiling=tiling):
            plgpu.nd_loop((4, 6), collective_axes="g", tiling=tiling)(lambda info: None)

        kernel = plgpu.kernel(
            body, out_type=plgpu.ShapeDtypeStruct((4,), f32), grid=(2,), grid_names=("g",)
        )
        with pytest.raises(ValueError, match=why):
            kernel.lower()


def test_find_swizzle():
    for bits in range(0, 4097, 16):
        fits = [s for s in (128, 64, 32, 16) if bits % (8 * s) == 0]
        if fits:
            assert plgpu.find_swizzle(bits) == fits[0]
        else:
            with pytest.raises(ValueError, match="of lhs"):
                plgpu.find_swizzle(bits, "lhs")


# ---- dynamic_scheduling_loop ---------------------------------------------------------------------


def options_of(grid, threads=1, cluster=()):
    """Keywords of the kernel, and of its loop."""
    kernel = dict(grid=grid, grid_names=tuple("abcdef"[: len(grid)]))
    loop = dict(grid_names=kernel["grid_names"])
    if threads > 1:
        kernel |= dict(num_threads=threads, thread_name="wg")
        loop["thread_axis"] = "wg"
    if cluster:
        kernel |= dict(cluster=cluster, cluster_names=tuple("xyz"[: len(cluster)]))
        loop["cluster_axes"] = kernel["cluster_names"]
    return kernel, loop


def flat(index, sizes):
    n = 0
    for k, size in zip(index, sizes):
        n = n * size + k
    return n


CASES = [
    ((13,), 1, ()),
    ((13,), 2, ()),
    ((3, 5), 3, ()),
    ((1,), 2, ()),
    ((2,), 1, (2,)),
    ((2, 3, 2, 1), 2, (2,)),
    ((11,), 3, (2,)),
    ((5,), 2, (1, 2)),
    ((), 2, ()),
]


@pytest.mark.parametrize("grid,threads,cluster", CASES, ids=str)
def test_every_point_once(run, capfd, grid, threads, cluster):
    kernel_options, loop_options = options_of(grid, threads, cluster)
    blocks = int(np.prod(cluster))

    def body(o):
        t = lax.axis_index("wg") if threads > 1 else 0
        c = lax.axis_index(kernel_options["cluster_names"]) if cluster else 0

        @plgpu.dynamic_scheduling_loop(**loop_options)
        def _(info):
            assert info.num_local_steps is None and len(info.index) == len(grid)
            n = jnp.int32(0) + flat(info.index, grid)
            pl.debug_print("visit {} {} {}", n, c, t)
            o[n, c, t] = jnp.full((128,), 1, f32) * n.astype(f32)

    total = int(np.prod(grid))
    out = plgpu.ShapeDtypeStruct((total, blocks, threads, 128), f32)
    kernel = run.kernel(body, out, **kernel_options)
    want = np.broadcast_to(np.arange(total, dtype=f32)[:, None, None, None], out.shape)
    for _ in range(1 if run.way == "interpret" else 2):
        capfd.readouterr()
        np.testing.assert_array_equal(run.call(kernel), want)
        if run.way != "cuda":
            seen = Counter(re.findall(r"visit (\d+ \d+ \d+)", capfd.readouterr().out))
            times = set(seen.values())
            assert len(seen) == total * blocks * threads and len(times) == 1, seen
    if run.way == "interpret":  # other numbers of clusters, other orders
        for seed in range(1, 12):
            again = plgpu.kernel(
                body, out_type=out, interpret=plgpu.InterpretParams(seed=seed), **kernel_options
            )
            np.testing.assert_array_equal(again(), want)
            seen = Counter(re.findall(r"visit (\d+ \d+ \d+)", capfd.readouterr().out))
            assert set(seen.values()) == {1}


@pytest.mark.parametrize("threads,cluster", [(1, (2,)), (2, (2,)), (2, (1, 3))], ids=str)
def test_loops_of_clusters_in_turn(run, threads, cluster):
    """The slots of one loop may be where those of the next one are, also in the other blocks."""
    kernel_options, loop_options = options_of((9,), threads, cluster)
    blocks = int(np.prod(cluster))

    def body(o):
        t = lax.axis_index("wg") if threads > 1 else 0
        c = lax.axis_index(kernel_options["cluster_names"])
        for k in range(3):

            @plgpu.dynamic_scheduling_loop(**loop_options)
            def _(info, k=k):
                (i,) = info.index
                o[k, i, c, t] = jnp.full((128,), 10 * k + i, jnp.int32)

    out = plgpu.ShapeDtypeStruct((3, 9, blocks, threads, 128), np.int32)
    want = 10 * np.arange(3)[:, None] + np.arange(9)
    want = np.broadcast_to(want[:, :, None, None, None], out.shape)
    np.testing.assert_array_equal(run(body, out, **kernel_options), want)
    if run.way == "interpret":
        params = plgpu.InterpretParams(seeds=5, detect_races=True)
        kernel = plgpu.kernel(body, out_type=out, interpret=params, **kernel_options)
        np.testing.assert_array_equal(kernel(), want)


def test_axes_in_another_order(run):
    def body(o):
        @plgpu.dynamic_scheduling_loop(("b", "a"))
        def _(info):
            b, a = info.index
            o[a, b] = jnp.full((128,), 1, f32) * (10 * a + b).astype(f32)

    out = plgpu.ShapeDtypeStruct((3, 4, 128), f32)
    got = run(body, out, grid=(3, 4), grid_names=("a", "b"))
    want = 10 * np.arange(3)[:, None, None] + np.arange(4)[None, :, None]
    np.testing.assert_array_equal(got, np.broadcast_to(want, (3, 4, 128)))


def test_lanes_that_are_late_get_every_tile(run):
    """Nothing in the body lets the lanes meet."""

    def body(o):
        @plgpu.dynamic_scheduling_loop("g", init_carry=jnp.int32(0))
        def total(info, carry):
            return carry * 3 + info.index[0]

        o[_core.first_tile()] = jnp.full((128,), 1, i32) * total

    out = plgpu.ShapeDtypeStruct((9, 128), i32)
    options = dict(grid=(9,), grid_names=("g",))
    want = 0
    for k in range(9):
        want = want * 3 + k
    if run.way != "host":
        got = run(body, out, **options)
        assert (got[0] == got[0, 0]).all()
        return
    from pallas_mgpu.machine import run as host

    low = run.kernel(body, out, **options).lower()
    for seed in range(0, 30, 5):  # one block does all
        got = np.zeros(out.shape, i32)
        host.run(low, [], [got], seed)
        np.testing.assert_array_equal(got[0], np.full(128, want))


@pytest.mark.parametrize("threads", [1, 2])
def test_carries_and_local_indices(run, threads):
    """The carry of a block counts its steps, as local_index does. All blocks together do all."""
    kernel_options, loop_options = options_of((20,), threads)

    def body(steps, first):
        t = lax.axis_index("wg") if threads > 1 else 0

        @plgpu.dynamic_scheduling_loop(init_carry=(0, 100.0), **loop_options)
        def carry(info, carry):
            n, x = carry
            (tile,) = info.index
            steps[tile, t] = jnp.full((128,), 1, i32) * (info.local_index * 1000 + n)
            return n + 1, x + 1.0

        n, x = carry
        own = _core.first_tile()
        first[own, t] = jnp.full((128,), 1, f32) * (x - n.astype(f32))

    outs = [plgpu.ShapeDtypeStruct((20, threads, 128), t) for t in (i32, f32)]
    if run.way == "host":
        kernel = run.kernel(body, outs, **kernel_options)
        low = kernel.lower()
        from pallas_mgpu.machine import run as host

        for seed in range(6):
            steps, first = np.full((20, threads, 128), -1, i32), np.zeros((20, threads, 128), f32)
            host.run(low, [], [steps, first], seed)
            check_steps(steps, 1 + seed % 5)
            assert (first[: 1 + seed % 5] == 100).all()
    else:
        steps, first = run(body, outs, **kernel_options)
        check_steps(steps, None)
        assert (first[0] == 100).all()


def check_steps(steps, clusters):
    assert (steps == steps[:, :1, :1]).all()  # all threads the same tile at the same step
    k = steps[:, 0, 0]
    assert (k // 1000 == k % 1000).all()
    if clusters is not None:
        assert (k == 0).sum() == clusters and (k[:clusters] == 0).all()
    for n in range(int(k.max() // 1001)):  # a block that did step n + 1 did step n
        assert (k // 1001 == n).sum() >= (k // 1001 == n + 1).sum()


def test_longest_first_in_groups(run):
    """What a kernel makes of the number is its own affair: rows from the last to the first, in
    groups of two heads."""
    heads, rows, group = 6, 5, 2

    def body(o):
        @plgpu.dynamic_scheduling_loop(("tile",))
        def _(info):
            (t,) = info.index
            band, inside = t // (group * rows), t % (group * rows)
            head, row = band * group + inside % group, rows - 1 - inside // group
            o[head, row] = jnp.full((128,), 1, f32) * t.astype(f32)

    out = plgpu.ShapeDtypeStruct((heads, rows, 128), f32)
    got = run(body, out, grid=(heads * rows,), grid_names=("tile",))[:, :, 0]
    assert list(got[:2].T[::-1].ravel()) == list(range(10))
    assert sorted(got.ravel()) == list(range(30))


def matmul(rng, run, threads, cluster=()):
    """A producer that runs ahead of consumers, into the next tile."""
    m, n, k, slots = 512, 128, 192, 2
    consumers = threads - 1
    rows = 64 * consumers * (cluster[0] if cluster else 1)
    kernel_options, loop_options = options_of((m // rows, n // 64), threads, cluster)

    def body(a, b, o, a_s, b_s, full, empty):
        me = lax.axis_index("wg")
        c = lax.axis_index("x") if cluster else 0

        @plgpu.dynamic_scheduling_loop(init_carry=0, **loop_options)
        def _(info, carry):
            i, j = info.index
            row = (i * (cluster[0] if cluster else 1) + c) * 64 * consumers

            @pl.when(me == consumers)
            def _():
                @pl.loop(0, k // 64)
                def _(s):
                    it = carry + s
                    slot = it % slots

                    @pl.when(it >= slots)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    at = pl.ds(s * 64, 64)
                    plgpu.copy_gmem_to_smem(
                        a.at[pl.ds(row, 64 * consumers), at], a_s.at[slot], full.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        b.at[at, pl.ds(j * 64, 64)],
                        b_s.at[slot],
                        full.at[slot],
                        collective_axes="x" if cluster else None,
                    )

            @pl.when(me < consumers)
            def _():
                def product(acc):
                    @pl.loop(0, k // 64)
                    def _(s):
                        slot = (carry + s) % slots
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, a_s.at[slot, pl.ds(me * 64, 64)], b_s.at[slot])
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot])

                    return acc[...]

                o[pl.ds(row + me * 64, 64), pl.ds(j * 64, 64)] = pl.run_scoped(
                    product, plgpu.ACC((64, 64))
                )

            return carry + k // 64

        @pl.when(me == consumers)  # three steps a tile at least
        def _():
            plgpu.barrier_wait(empty.at[0])
            plgpu.barrier_wait(empty.at[1])

    a, b = (rng.standard_normal(s).astype(f16) for s in ((m, k), (k, n)))
    many = dict(num_arrivals=consumers, num_barriers=slots)
    scratch = [
        plgpu.SMEM((slots, 64 * consumers, 64), f16),
        plgpu.SMEM((slots, 64, 64), f16),
        plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        plgpu.ClusterBarrier(collective_axes=("x",), **many) if cluster else plgpu.Barrier(**many),
    ]
    out = plgpu.ShapeDtypeStruct((m, n), f32)
    kernel = run.kernel(body, out, scratch_types=scratch, **kernel_options)
    want = a.astype(f32) @ b.astype(f32)
    for _ in range(2):
        np.testing.assert_allclose(run.call(kernel, a, b), want, atol=1e-2)
    return kernel.lower(a, b).as_text("cuda")


@pytest.mark.parametrize("threads,cluster", [(2, ()), (3, ()), (2, (2,)), (3, (2,))], ids=str)
def test_matmul_with_a_producer(run, rng, threads, cluster):
    text = matmul(rng, run, threads, cluster)
    assert ("store_async(" in text) == bool(cluster)
    # consumers release slots without a fence; the tile's number takes one, by one lane
    assert text.count("mbarrier_arrive_release(") == (1 if cluster else 0) + text.count(
        "FN void mbarrier_arrive_release("
    )


def test_the_text(run):
    """The number is asked for in front of the body and used after it; no block waits for it."""

    def body(o):
        @plgpu.dynamic_scheduling_loop(("a", "b"), thread_axis="wg")
        def _(info):
            i, j = info.index
            o[i, j, lax.axis_index("wg")] = jnp.full((128,), 1, f32)

    out = plgpu.ShapeDtypeStruct((3, 4, 2, 128), f32)
    options, _ = options_of((3, 4), 2)
    low = run.kernel(body, out, **options).lower()
    text, info = low.graph.cuda()
    assert info["shares_grid"] and info["grid"] == (12, 1, 1) and info["counters"] == 1
    take = text.index("= next_tile(&counters[0]);")
    store = text.index("st_global", take)
    assert take < store < text.index("st_shared<i32, 1>(", store)
    assert "if (wg == 1 && warp == 0 && elect_one()) counters_done(counters, 1, gridDim.x)" in text


def test_a_kernel_that_asks_for_its_place(run):
    """It gets all points, one for each block."""

    def body(o):
        mine = lax.axis_index("a")

        @plgpu.dynamic_scheduling_loop("a", thread_axis="wg")
        def _(info):
            (i,) = info.index
            value = (mine * 100 + i).astype(f32)
            o[i, lax.axis_index("wg")] = jnp.full((128,), 1, f32) * value

    options, _ = options_of((6,), 2)
    out = plgpu.ShapeDtypeStruct((6, 2, 128), f32)
    low = run.kernel(body, out, **options).lower()
    assert not low.graph.cuda()[1]["shares_grid"]
    got = run(body, out, **options)
    want = np.broadcast_to(101.0 * np.arange(6)[:, None, None], (6, 2, 128))
    np.testing.assert_array_equal(got, want)


def test_two_loops(run):
    """One after the other, each over the whole grid."""

    def body(o, p):
        for ref in (o, p):

            @plgpu.dynamic_scheduling_loop("a", thread_axis="wg")
            def _(info, ref=ref):
                (i,) = info.index
                ref[i, lax.axis_index("wg")] = jnp.full((128,), 1, f32) * i.astype(f32)

    options, _ = options_of((7,), 2)
    out = plgpu.ShapeDtypeStruct((7, 2, 128), f32)
    for got in run(body, (out, out), **options):
        np.testing.assert_array_equal(got[:, 1, 5], np.arange(7))


def test_after_the_grid_before(run):
    def body(o):
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()

        @plgpu.dynamic_scheduling_loop("a")
        def _(info):
            (i,) = info.index
            o[i] = jnp.full((128,), 1, f32) * i.astype(f32)

    out = plgpu.ShapeDtypeStruct((7, 128), f32)
    options, _ = options_of((7,))
    text = run.kernel(body, out, **options).lower().as_text("cuda")
    assert "griddepcontrol_wait();" in text[: text.index("= next_tile(")].rsplit("{", 1)[1]
    np.testing.assert_array_equal(run(body, out, **options)[:, 0], np.arange(7))


@pytest.mark.parametrize("placed", [False, True], ids=["", "placed"])
@pytest.mark.parametrize("grid,threads,cluster", CASES, ids=str)
def test_every_point_once_in_each_round(run, capfd, grid, threads, cluster, placed):
    """Inside a loop, with carries of both, also where the kernel asks for its place."""
    rounds, blocks, total = 4, int(np.prod(cluster)), int(np.prod(grid))
    kernel_options, loop_options = options_of(grid, threads, cluster)

    def body(o):
        t = lax.axis_index("wg") if threads > 1 else 0
        c = lax.axis_index(kernel_options["cluster_names"]) if cluster else 0
        zero = lax.axis_index(loop_options["grid_names"]) * 0 if placed and grid else 0

        def one(r, done):
            @plgpu.dynamic_scheduling_loop(init_carry=done, **loop_options)
            def after(info, carry):
                n = jnp.int32(0) + flat(info.index, grid) + zero
                pl.debug_print("visit {} {} {} {}", r, n, c, t)
                o[r, n, c, t] = jnp.full((128,), 1, f32) * (100 * r + n).astype(f32)
                return carry + 1

            return after

        pl.debug_print("did {} of them", lax.fori_loop(0, rounds, one, jnp.int32(0)))

    out = plgpu.ShapeDtypeStruct((rounds, total, blocks, threads, 128), f32)
    want = (100 * np.arange(rounds)[:, None] + np.arange(total)).astype(f32)
    want = np.broadcast_to(want[:, :, None, None, None], out.shape)
    kernel = run.kernel(body, out, **kernel_options)
    np.testing.assert_array_equal(run.call(kernel), want)

    def check():
        text = capfd.readouterr().out
        seen = Counter(re.findall(r"visit (\d+ \d+ \d+ \d+)", text))
        assert len(seen) == rounds * total * blocks * threads and len(set(seen.values())) == 1
        done = [int(x) for x in re.findall(r"did (\d+) of", text)]
        assert sum(done) == sum(seen.values())

    if run.way != "cuda":
        check()
    if run.way == "interpret":
        for seed in range(1, 6):
            again = plgpu.kernel(
                body, out_type=out, interpret=plgpu.InterpretParams(seed=seed), **kernel_options
            )
            np.testing.assert_array_equal(again(), want)
            check()


def test_rounds_at_several_places(run):
    """Two loops in the body of a loop of loops, one of them in a branch, and one outside."""
    out = plgpu.ShapeDtypeStruct((3, 2, 7, 128), i32), plgpu.ShapeDtypeStruct((7, 128), i32)

    def body(o, p):
        def write(ref, value):
            @plgpu.dynamic_scheduling_loop("a")
            def _(info):
                ref[info.index[0]] = jnp.full((128,), 1, i32) * (value + info.index[0])

        @pl.loop(0, 3)
        def _(r):
            write(o.at[r, 0], 100 * r)

            @pl.loop(0, 1)
            def _(k):
                pl.when(r != 1)(lambda: write(o.at[r, 1], 100 * r + 50))
                pl.when(r == 1)(lambda: write(o.at[r, 1], -100))

        write(p, 1000)

    got, last = run(body, out, grid=(7,), grid_names=("a",))
    want = np.array([[0, 50], [100, -100], [200, 250]])[:, :, None] + np.arange(7)
    np.testing.assert_array_equal(got[..., 5], want)
    np.testing.assert_array_equal(last[:, 9], 1000 + np.arange(7))


def refused():
    def nothing(info):
        pass

    def over(*args, **kwargs):
        return lambda o: plgpu.dynamic_scheduling_loop(*args, **kwargs)(nothing)

    yield over("c", thread_axis="wg", cluster_axes="x"), ValueError, "'c' is not a grid axis"
    yield over("a", thread_axis="wg", cluster_axes="x"), ValueError, "all axes of the grid"
    yield over(("a", "b"), cluster_axes="x"), ValueError, "thread_axis must be 'wg'"
    yield over(("a", "b"), thread_axis="wg"), ValueError, "all axes of the cluster"
    yield over(("a", "b"), thread_axis="wg", cluster_axes="y"), ValueError, "all axes of the clus"
    yield over(("a", "a", "b"), thread_axis="wg", cluster_axes="x"), ValueError, "once"

    def with_its_counter(o):
        over(("a", "b"), thread_axis="wg", cluster_axes="x")(o)
        o[...] = jnp.full((4,), 1.0) * plgpu.ext.TileScheduler().fetch().astype(f32)

    yield with_its_counter, ValueError, "use another number"


@pytest.mark.parametrize("body,error,why", list(refused()))
def test_refused(body, error, why):
    options, _ = options_of((2, 3), 2, (2,))
    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((4,), f32), **options)
    with pytest.raises(error, match=why):
        kernel.lower()


def test_too_many_points():
    def body(o):
        @plgpu.dynamic_scheduling_loop(("a", "b"))
        def _(info):
            o[...] = jnp.zeros((128,), f32)

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((128,), f32),
        grid=(1 << 16, 1 << 16),
        grid_names=("a", "b"),
    )
    with pytest.raises(ValueError, match="at most"):
        kernel.lower().as_text("cuda")


@pytest.mark.parametrize(
    "count, ahead, blocks, threads", [(9, 2, 2, 2), (20, 3, 4, 3), (7, 1, 2, 2), (11, 2, 1, 3)]
)
def test_a_schedule_of_ones_own(run, count, ahead, blocks, threads):
    """What the first block of a cluster fetches, all readers of all its blocks receive, each number
    once; a slot is not overwritten before they have read it."""

    def body(o, tiles):
        wg, rank = lax.axis_index("t"), lax.axis_index("c")
        scheduler = plgpu.ext.TileScheduler(**tiles)
        assert scheduler.slots == ahead

        def take(k):
            scheduler.broadcast(scheduler.fetch(), k)
            return scheduler.receive(k, release=False)

        def each(f):
            start = jnp.int32(0), jnp.int32(0)
            return lax.while_loop(lambda c: c[1] < count, lambda c: (c[0] + 1, f(c[0])), start)[0]

        @pl.when(wg == threads - 1)
        def _():
            scheduler.drain(each(take))

        @pl.when(wg < threads - 1)
        def _():
            def work(k):
                tile = scheduler.receive(k)

                @pl.when(tile < count)
                def _():
                    o[tile, rank, wg] = 10 * tile

                return tile

            each(work)

    axes = ("c",) if blocks > 1 else ()
    scratch = {"tiles": plgpu.ext.TileScheduler.scratch(threads - 1, ahead, axes)}
    out = plgpu.ShapeDtypeStruct((count, blocks, threads - 1), i32)
    options = dict(grid=(3,), grid_names=("g",), num_threads=threads, thread_name="t")
    options |= dict(cluster=(blocks,), cluster_names=("c",), scratch_types=scratch)
    want = np.broadcast_to(10 * np.arange(count)[:, None, None], out.shape)
    np.testing.assert_array_equal(run(body, out, **options), want)


def test_both_schedules(run):
    """What is broadcast beside a dynamic loop is the number itself, not one beyond the grid."""

    def body(o, p, tiles):
        wg = lax.axis_index("t")
        scheduler = plgpu.ext.TileScheduler(**tiles)

        @plgpu.dynamic_scheduling_loop("g", thread_axis="t")
        def _(info):
            o[info.index[0], wg] = 1

        def each(k, _):
            pl.when(wg == 1)(lambda: scheduler.broadcast(7 + k, k))

            @pl.when(wg == 0)
            def _():
                p[k] = scheduler.receive(k)

        lax.fori_loop(0, 5, each, None)
        pl.when(wg == 1)(lambda: scheduler.drain(5))

    scratch = {"tiles": plgpu.ext.TileScheduler.scratch(readers=1, slots=1)}
    outs = plgpu.ShapeDtypeStruct((9, 2), i32), plgpu.ShapeDtypeStruct((5,), i32)
    options = dict(grid=(9,), grid_names=("g",), num_threads=2, thread_name="t")
    ones, told = run(body, outs, scratch_types=scratch, **options)
    np.testing.assert_array_equal(ones, 1)
    np.testing.assert_array_equal(told, 7 + np.arange(5))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tiles=3), "tiles must be a ref of one dim in SMEM, got 3"),
        (dict(ready=None), "ready must be 2 barriers, one for each slot of tiles; got None"),
        (dict(read="ready", ready="one"), "ready must be 2 barriers"),
        (dict(free=None), "free must be 2 barriers"),
        (dict(ready="free"), "the barrier is a ClusterBarrier"),
        (dict(tiles="floats"), "one int32 in SMEM is needed"),
    ],
)
def test_tile_scheduler_errors(change, words):
    def body(o, tiles, ready, read, free, one, floats):
        refs = dict(tiles=tiles, ready=ready, read=read, free=free)
        names = refs | dict(one=one, floats=floats)
        given = refs | {k: names.get(v, v) for k, v in change.items()}
        plgpu.ext.TileScheduler(**given).broadcast(0, 0)

    scratch = [
        plgpu.SMEM((2,), i32),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.ClusterBarrier(collective_axes=("c",), num_barriers=2),
        plgpu.Barrier(num_barriers=1),
        plgpu.SMEM((2,), f32),
    ]
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((4,), f32),
        scratch_types=scratch,
        cluster=(2,),
        cluster_names=("c",),
        interpret=True,
    )
    with pytest.raises(ValueError, match=words) as caught:
        kernel()
    assert re.search("TileScheduler|broadcast_tile", str(caught.value))


TAKEN = """\
kernel "take" grid [5] cluster [] threads 1 stage traced {
  args out %o_1: gmem int32[5]
  %2 = const {value = 5} : int32[]
  %3 = first_tile : int32[]
  %4 = while %3 : int32[] {
    args %5: int32[]
    %6 = lt %5, %2 : bool[]
    yield %6
  } {
    args %7: int32[]
    %8 = fetch_tile {n = 0} : int32[]
    %9 = index %o_1, %7 {starts = [?], sizes = [_]} : gmem int32[]
    store %9, %7
    %10 = shuffle_tile %8 : int32[]
    yield %10
  }
}
"""


def test_the_text_form():
    g = _core.Graph.parse(TAKEN)
    assert _core.Graph.parse(g.text()).text() == g.text()
    g.lower()
    for seed in range(8):
        seen = np.zeros(5, np.int32)
        g.interpret([seen], seed=seed)
        np.testing.assert_array_equal(seen, range(5))
    for a, b, why in [
        ("store %9, %7", "store %9, %8", "fetch_tile"),  # known to one lane only
        ("shuffle_tile %8", "shuffle_tile %7", "fetch_tile"),
        ("threads 1", "threads 2", "several threads"),
        ("cluster []", "cluster [2]", "several threads"),
        ("n = 0", "n = 40", "counter 40"),
    ]:
        with pytest.raises((ValueError, plgpu.InternalError), match=why):
            _core.Graph.parse(TAKEN.replace(a, b))
