"""Copies between GMEM and SMEM: what each engine does, and that all do the same."""

import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

BF16 = ml_dtypes.bfloat16


def shape(dims, dtype):
    return plgpu.ShapeDtypeStruct(dims, dtype)


# ---- copies that combine -------------------------------------------------------------------------

COMBINES = {
    "add": lambda a, b: (a + b).astype(a.dtype),
    "min": np.minimum,
    "max": np.maximum,
    "umin": lambda a, b: np.minimum(a.view(np.uint32), b.view(np.uint32)).view(a.dtype),
    "umax": lambda a, b: np.maximum(a.view(np.uint32), b.view(np.uint32)).view(a.dtype),
    "smin": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(a.dtype),
    "smax": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(a.dtype),
    "inc": lambda a, b: np.where(
        a.view(np.uint32) >= b.view(np.uint32), 0, a.view(np.uint32) + 1
    ).view(a.dtype),
    "dec": lambda a, b: np.where(
        (a.view(np.uint32) == 0) | (a.view(np.uint32) > b.view(np.uint32)),
        b.view(np.uint32),
        a.view(np.uint32) - 1,
    ).view(a.dtype),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
INTS = [op for op in COMBINES if op not in ("min", "max")]
LEGAL = {
    np.int32: INTS,
    np.uint32: INTS,
    np.float32: ["add"],
    np.float16: ["add", "min", "max"],
    BF16: ["add", "min", "max"],
}


def numbers(rng, dims, dtype):
    if np.dtype(dtype).kind in "iu":
        x = rng.integers(-(2**31), 2**31, dims).astype(np.int32).view(dtype)
        x[..., ::3] = np.abs(x[..., ::3].view(np.int32)) % 3  # for inc and dec
        return x.view(dtype)
    return (rng.integers(-64, 64, dims) / 8).astype(dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", LEGAL, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("engine", ["tma", "bulk", "plain"])
def test_a_store_combines(run, rng, dtype, engine):
    """Every operation of a dtype by each engine: what was there and what comes make what is
    there, twice. Plain stores of the same kernel come first."""
    dims = (len(LEGAL[dtype]), 12, 64)
    x, y = numbers(rng, dims, dtype), numbers(rng, dims, dtype)
    y[:, ::2] = x[:, ::2]

    def body(x_ref, y_ref, o_ref, smem):
        smem[...] = y_ref[...]
        o_ref[...] = x_ref[...]
        plgpu.commit_smem()
        for k, op in enumerate(LEGAL[dtype]):
            for _ in range(2):
                to = o_ref.at[k]
                plgpu.copy_smem_to_gmem(smem.at[k], to, reduction_op=op, engine=engine)
                plgpu.wait_smem_to_gmem(0)

    got = run(body, shape(dims, dtype), x, y, scratch_types=[plgpu.SMEM(dims, dtype)])
    for k, op in enumerate(LEGAL[dtype]):
        want = COMBINES[op](COMBINES[op](x[k], y[k]), y[k])
        assert got[k].tobytes() == want.astype(dtype).tobytes(), op


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", [None, "add"])
@pytest.mark.parametrize("engine", ["tma", "bulk", "plain"])
def test_stores_that_leave_the_cache_first(run, rng, engine, op):
    """The same bytes arrive; engines are told so in the program."""
    x = numbers(rng, (3, 70, 64), np.float32)

    def body(x_ref, o_ref, smem):
        for k in range(3):
            smem[...] = x_ref[k]
            o_ref[k] = smem[...]
            plgpu.commit_smem()
            to = o_ref.at[k]
            plgpu.copy_smem_to_gmem(smem, to, reduction_op=op, engine=engine, evict_first=True)
            plgpu.wait_smem_to_gmem(0)

    out = shape(x.shape, x.dtype)
    kernel = run.kernel(body, out, scratch_types=[plgpu.SMEM((70, 64), np.float32)])
    low = kernel.lower(x)
    assert ("_evict_first" in low.as_text("cuda")) == (engine != "plain" and not op)
    assert "evict_first = 1" in low.as_text("graph")
    got = run.call(kernel, x)
    np.testing.assert_array_equal(got, 2 * x if op else x)


@pytest.mark.parametrize("width", [96, 92], ids=["tma", "plain"])
def test_combining_clips(run, rng, width):
    """A box that overhangs the array: what is inside is combined, nothing else is touched. Tiled
    and swizzled SMEM, starts that are traced; rows that no engine can do are done by lanes."""
    rows = 70
    x = rng.integers(-9, 9, (rows, width)).astype(np.float32)
    y = rng.integers(-9, 9, (128, 128)).astype(np.float32)

    def body(x_ref, y_ref, o_ref, smem):
        smem[...] = y_ref[...]
        o_ref[...] = x_ref[...]
        plgpu.commit_smem()

        def step(i, _):
            at = o_ref.at[pl.ds(i * 32, 64), pl.ds(i * 32, 64)]
            plgpu.copy_smem_to_gmem(smem.at[:64, :64], at, reduction_op="add")

        lax.fori_loop(0, 3, step, None)
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
    smem = plgpu.SMEM((128, 128), np.float32, transforms=transforms)
    got = run(body, shape((rows, width), np.float32), x, y, scratch_types=[smem])
    want = np.pad(x, ((0, 128), (0, 128)))
    for i in range(3):
        want[i * 32 : i * 32 + 64, i * 32 : i * 32 + 64] += y[:64, :64]
    np.testing.assert_array_equal(got, want[:rows, :width])


def test_blocks_combine_into_one(run, rng):
    """All blocks add to one array in any order; each element is added at once. The first one
    writes what is there before, and says so."""
    n, w = 4, 256
    x = rng.integers(-1000, 1000, (n, w), dtype=np.int32)

    def body(x_ref, o_ref, smem):
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
        i = lax.axis_index("i")
        smem[...] = x_ref[i]
        plgpu.commit_smem()

        @pl.when(i == 0)
        def _():
            o_ref[...] = jnp.full((w,), 5, jnp.int32)
            plgpu.semaphore_signal(ready)

        plgpu.semaphore_wait(ready, 1, decrement=False)
        plgpu.copy_smem_to_gmem(smem, o_ref, reduction_op="add")
        plgpu.copy_smem_to_gmem(smem, o_ref, reduction_op="add", predicate=i == 2)
        plgpu.wait_smem_to_gmem(0)

    got = run(
        body,
        shape((w,), np.int32),
        x,
        grid=(n,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((w,), jnp.int32)],
    )
    np.testing.assert_array_equal(got, x.sum(0) + x[2] + 5)


@pytest.mark.parametrize(
    "dtype, op, match",
    [
        (np.float32, "max", "for float16 and bfloat16"),
        (np.int32, "max", "umax, smin, smax"),
        (np.float16, "xor", "int32 and uint32"),
        (np.float32, "smin", "int32 and uint32"),
        (np.int8, "add", "float32, int32 and uint32"),
        (np.float32, "mul", "must be one of"),
    ],
)
def test_what_cannot_be_combined(dtype, op, match):
    def body(x_ref, o_ref, smem):
        plgpu.copy_smem_to_gmem(smem, o_ref, reduction_op=op)

    kernel = plgpu.kernel(
        body, out_type=shape((128,), dtype), scratch_types=[plgpu.SMEM((128,), dtype)]
    )
    with pytest.raises(ValueError, match=match):
        kernel.lower(np.zeros(128, dtype))


# ---- every rank and dtype ------------------------------------------------------------------------

DTYPES = [np.bool_, np.int16, np.float32, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]


@pytest.mark.parametrize("rank", range(1, 9))
def test_every_rank(run, rng, rank):
    """Slices at traced offsets along the first and the last dimension, there and back: contiguous
    ones, boxes of up to 5 dimensions, and loops over boxes where there are more. They cover all."""
    dims = (3, 2, 3, 2, 3, 2, 4, 64)[8 - rank :]
    first = (2,) if rank > 1 else ()
    box = (*first, *dims[1:-1], 32)
    dims = (*(3 for _ in first), *dims[1:-1], 64)
    xs = [rng.integers(0, 2, dims).astype(t) for t in DTYPES]

    def body(*refs):
        n = len(DTYPES)
        inputs, outputs, buffers, bar = refs[:n], refs[n : 2 * n], refs[2 * n : 3 * n], refs[3 * n]

        def step(i, _):
            column = pl.ds(pl.multiple_of(i % 2 * 32, 32), 32)
            at = (*(pl.ds(i // 2, 2) for _ in first), *(slice(None) for _ in dims[1:-1]), column)
            for x, smem in zip(inputs, buffers):
                plgpu.copy_gmem_to_smem(x.at[at], smem, bar)
            plgpu.barrier_wait(bar)
            for o, smem in zip(outputs, buffers):
                plgpu.copy_smem_to_gmem(smem, o.at[at], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)

        lax.fori_loop(0, 4, step, None)

    scratch = [*(plgpu.SMEM(box, t) for t in DTYPES), plgpu.Barrier(num_arrivals=len(DTYPES))]
    got = run(body, [shape(dims, t) for t in DTYPES], *xs, scratch_types=scratch)
    for x, y in zip(xs, got):
        assert x.tobytes() == np.asarray(y).tobytes(), x.dtype


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
@pytest.mark.parametrize("width", [128, 64, 32])
def test_boxes_begin_inside_of_a_swizzle_pattern(run, rng, width, dtype):
    """TMA permutes by address: what it brings to row 3 of a swizzled buffer other copies and loads
    find there, and the other way round."""
    row = width // np.dtype(dtype).itemsize
    unit = 128 // width  # rows that make 128 bytes
    rows, cols, n = 56, 2 * row, 12
    x = rng.integers(-100, 100, (rows, cols)).astype(dtype)

    def body(x_ref, loaded, stored, bounced, smem, other, bar):
        i = lax.axis_index("g") * unit
        for buffer in (smem, other):
            buffer[...] = jnp.zeros((rows, cols), dtype)
        plgpu.commit_smem()
        here = pl.ds(i + 3 * unit, n)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(5, n)], smem.at[here], bar, engine="tma")
        plgpu.barrier_wait(bar)
        loaded[pl.program_id(0)] = smem[...]
        other[...] = x_ref[...]
        plgpu.commit_smem()
        for buffer, out in ((other, stored), (smem, bounced)):
            out = out.at[pl.program_id(0)]
            plgpu.copy_smem_to_gmem(buffer.at[here], out.at[pl.ds(2, n)], engine="tma")
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(width))
    buffer = plgpu.SMEM((rows, cols), dtype, transforms=transforms)
    grid = 9
    loaded, stored, bounced = run(
        body,
        (np.zeros((grid, rows, cols), dtype),) + (np.zeros((grid, n + 3, cols), dtype),) * 2,
        x,
        grid=(grid,),
        grid_names=("g",),
        scratch_types=[buffer, buffer, plgpu.Barrier()],
    )
    for g in range(grid):
        at = (g + 3) * unit
        want = np.zeros_like(x)
        want[at : at + n] = x[5 : 5 + n]
        np.testing.assert_array_equal(loaded[g], want[: len(want)])
        np.testing.assert_array_equal(stored[g, 2 : 2 + n], x[at : at + n])
        np.testing.assert_array_equal(bounced[g, 2 : 2 + n], x[5 : 5 + n])


def test_boxes_are_aligned(run, rng):
    """Two column chunks of 192 bytes, which are not those of the array: the second box of TMA would
    not begin at a multiple of 128 bytes, so the lanes copy."""
    x = rng.standard_normal((4, 28)).astype(np.float32)

    def body(x_ref, o_ref, smem, bar):
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(0, 24)], smem, bar)
        plgpu.barrier_wait(bar)
        o_ref[...] = smem[...]

    buffer = plgpu.SMEM((4, 24), np.float32, transforms=(plgpu.TilingTransform((4, 12)),))
    got = run(body, shape((4, 24), np.float32), x, scratch_types=[buffer, plgpu.Barrier()])
    np.testing.assert_array_equal(got, x[:, :24])


def test_ladder_of_rows(run, rng):
    """A tile of the WGMMA layout whose rows leave in powers of two, from any row on: TMA takes them
    from a buffer that is swizzled for the lanes."""
    x = rng.standard_normal((9, 64, 128)).astype(np.float16)
    sizes = np.array([[5, 20], [0, 64], [63, 1], [1, 63], [17, 33], [3, 0]], np.int32)

    def body(x_ref, sizes_ref, o_ref, smem):
        i = lax.axis_index("g")
        smem[...] = plgpu.load(x_ref.at[i], layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        start, left = sizes_ref[i, 0], sizes_ref[i, 1]
        for n in (64, 32, 16, 8, 4, 2, 1):
            part = left & n

            @pl.when(part != 0)
            def _(n=n, start=start):
                rows = pl.ds(start, n)
                plgpu.copy_smem_to_gmem(smem.at[rows], o_ref.at[i, rows])

            start += part
        plgpu.wait_smem_to_gmem(0)

    grid = len(sizes)
    kernel = run.kernel(
        body,
        shape((grid, 64, 128), np.float16),
        grid=(grid,),
        grid_names=("g",),
        scratch_types=[plgpu.SMEM((64, 128), np.float16)],
    )
    got = run.call(kernel, x, sizes)
    for g, (start, count) in enumerate(sizes):
        np.testing.assert_array_equal(got[g, start : start + count], x[g, start : start + count])
    text = kernel.lower(x, sizes).as_text("cuda")
    assert "swizzle<128>" in text and text.count("tma_store_") >= 7


# ---- prefetches ----------------------------------------------------------------------------------


def test_prefetch(run, rng):
    """Parts of all kinds come to L2: boxes, contiguous bytes, what overhangs, what no engine can
    do. What is read is what is there; without a box or a way to wait, nothing else can be seen."""
    x = rng.integers(-99, 99, (96, 160), dtype=np.int32)
    y = rng.integers(-99, 99, (33, 37), dtype=np.int8)

    def body(x_ref, y_ref, o_ref, p_ref):
        def step(i, _):
            plgpu.async_prefetch(x_ref.at[pl.ds(i * 32, 32), 32:64])
            plgpu.async_prefetch(x_ref.at[i])
            plgpu.async_prefetch(x_ref.at[pl.ds(i * 64, 64), 64:])

        lax.fori_loop(0, 3, step, None)
        plgpu.async_prefetch(y_ref.at[pl.ds(3, 9), 5:30])
        plgpu.async_prefetch(y_ref.at[:, 3])
        o_ref[...] = x_ref[...] + 1
        p_ref[...] = y_ref[...]

    kernel = run.kernel(body, [shape(x.shape, np.int32), shape(y.shape, np.int8)])
    got = run.call(kernel, x, y)
    np.testing.assert_array_equal(got[0], x + 1)
    np.testing.assert_array_equal(got[1], y)
    text = kernel.lower(x, y).as_text("cuda")
    for name in ("tma_prefetch_2d(&", "bulk_prefetch(x", "prefetch_global("):
        assert text.count(name) >= 1, name


def test_a_producer_prefetches(run, rng):
    """Between the copies of one lane, and by a warp: the lane stays elected."""
    x = rng.integers(-99, 99, (4, 64, 64), dtype=np.int32)

    def body(x_ref, o_ref, smem, bar):
        def step(i, _):
            plgpu.async_prefetch(x_ref.at[jnp.minimum(i + 1, 3)])
            plgpu.copy_gmem_to_smem(x_ref.at[i], smem, bar)
            plgpu.barrier_wait(bar)
            o_ref[i] = smem[...]

        lax.fori_loop(0, 4, step, None)

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 2)(lambda: plgpu.async_prefetch(x_ref.at[warp]))

    scratch = [plgpu.SMEM((64, 64), jnp.int32), plgpu.Barrier()]
    np.testing.assert_array_equal(run(body, shape(x.shape, np.int32), x, scratch_types=scratch), x)


def test_prefetch_errors():
    def raises(error, match, **options):
        def body(x_ref, o_ref, smem):
            plgpu.async_prefetch(smem if "smem" in options else x_ref, **options.get("with_", {}))

        kernel = plgpu.kernel(
            body, out_type=shape((128,), np.int32), scratch_types=[plgpu.SMEM((128,), jnp.int32)]
        )
        with pytest.raises(error, match=match):
            kernel.lower(np.zeros(128, np.int32))

    raises(ValueError, "must be a GMEM ref", smem=True)
    raises(NotImplementedError, "collective", with_={"collective_axes": "c"})
    raises(ValueError, "needs collective_axes", with_={"leader_tracked": 1})


# ---- stores to other blocks ----------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint32])
@pytest.mark.parametrize("kind", ["rows", "wgmma"])
def test_store_to_another_block(run, rng, dtype, kind):
    """Each block hands a tile to the next one, round and round; nobody reads before its barrier
    has all bytes. Plain SMEM, or tiled and swizzled SMEM from the layout of accumulators."""
    n, dims = 4, (64, 64)
    if kind == "wgmma" and np.dtype(dtype).itemsize != 4:
        transforms, layout = (), plgpu.Layout.WG_STRIDED(dims, 8)
    elif kind == "wgmma":
        transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        layout = plgpu.Layout.WGMMA
    else:
        transforms, layout = (), None
    x = rng.integers(0, 99, (n, *dims)).astype(dtype)

    def body(x_ref, o_ref, smem, bar, free):
        i = lax.axis_index("c")
        mine = plgpu.load(x_ref.at[i], layout=layout)

        def step(k, _):
            plgpu.async_store_smem(
                mine, smem.at[k % 2], bar.at[k % 2], cluster_idx=(i + 1) % n, cluster_dim="c"
            )
            plgpu.barrier_wait(bar.at[k % 2])
            o_ref[i] = smem[k % 2]
            plgpu.barrier_arrive(free)
            plgpu.barrier_wait(free)

        lax.fori_loop(0, 3, step, None)

    scratch = [
        plgpu.SMEM((2, *dims), dtype, transforms=transforms),
        plgpu.Barrier(num_barriers=2),
        plgpu.ClusterBarrier(collective_axes=("c",)),
    ]
    got = run(
        body,
        shape(x.shape, dtype),
        x,
        cluster=(n,),
        cluster_names=("c",),
        scratch_types=scratch,
    )
    np.testing.assert_array_equal(got, np.roll(x, 1, 0))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_atomics_to_another_block(run, rng, dtype):
    """All blocks combine into the SMEM of the first one, their own included, each element at
    once; one number for all elements too."""
    n, w, ops = 4, 192, ["add", "max", "min", "and", "or", "xor"]
    x = rng.integers(0, 2**32, (n, len(ops), w), dtype=np.uint64).astype(np.uint32).view(dtype)

    def body(x_ref, o_ref, smem, bar, ready):
        i = lax.axis_index("c")
        smem[...] = jnp.full((len(ops), w), 77, dtype)
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        for k, op in enumerate(ops):
            plgpu.async_store_smem(
                x_ref[i, k], smem.at[k], bar, cluster_idx=0, cluster_dim="c", atomic=op
            )
        one = jnp.full((w,), 3, dtype)
        plgpu.async_store_smem(one, smem.at[0], bar, cluster_idx=0, cluster_dim="c", atomic="add")

        @pl.when(i == 0)
        def _():
            plgpu.barrier_wait(bar)
            o_ref[...] = smem[...]

        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

    scratch = [
        plgpu.SMEM((len(ops), w), dtype),
        plgpu.Barrier(num_arrivals=n * (len(ops) + 1)),
        plgpu.ClusterBarrier(collective_axes=("c",)),
    ]
    options = {"cluster": (n,), "cluster_names": ("c",), "scratch_types": scratch}
    got = run(body, shape((len(ops), w), dtype), x, **options)
    want = np.full((len(ops), w), 77, dtype)
    for k, op in enumerate(ops):
        for i in range(n):
            least = {"max": np.maximum, "min": np.minimum}
            want[k] = least[op](want[k], x[i, k]) if op in least else COMBINES[op](want[k], x[i, k])
    want[0] += dtype(3 * n)
    np.testing.assert_array_equal(got, want)


def test_store_to_another_block_errors():
    def raises(error, match, src, bar=0, **options):
        def body(x_ref, o_ref, smem, bars, far):
            barrier = bars.at[0] if bar == 0 else bars if bar == 1 else far
            src_ = {"row": x_ref, "scalar": x_ref.at[0], "half": x_ref.at[:64]}[src][...]
            to = smem.at[0] if src == "scalar" else smem
            plgpu.async_store_smem(
                src_, to, barrier, **{"cluster_idx": 1, "cluster_dim": "c", **options}
            )

        scratch = [
            plgpu.SMEM((128,), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.ClusterBarrier(collective_axes=("c",)),
        ]
        kernel = plgpu.kernel(
            body,
            out_type=shape((128,), np.float32),
            scratch_types=scratch,
            cluster=(2,),
            cluster_names=("c",),
        )
        with pytest.raises(error, match=match):
            kernel.lower(np.zeros(128, np.float32))

    raises(TypeError, "shapes and dtypes", "half")
    raises(TypeError, "needs one barrier", "row", 1)
    raises(ValueError, "a Barrier is needed", "row", 2)
    raises(NotImplementedError, "scalars", "scalar")
    raises(NotImplementedError, "int32 and uint32", "row", atomic="add")
    raises(ValueError, "atomic must be", "row", atomic="mul")
    raises(ValueError, "not a cluster axis", "row", cluster_dim="d")
    raises(ValueError, "out of bounds", "row", cluster_idx=2)


# ---- what a barrier expects ---------------------------------------------------------------------

SHARED_ARRIVAL = {
    # copies of a step, arrivals that complete a phase: copies that tell their bytes
    "both in each phase": (("x", "y"), 2, 1),
    "only when true": (("x", "y if"), 2, 2),
    "an arrival beside them": (("x", "y", "arrive"), 3, 2),
    "a store between them": (("x", "store", "y"), 2, 2),
    "one phase each": (("x", "wait", "y"), 1, 2),
    "one phase in two steps": (("x", "y"), 4, 2),
}


@pytest.mark.parametrize("how", SHARED_ARRIVAL)
def test_copies_that_complete_a_phase_share_an_arrival(run, rng, how):
    """The first of them tells the bytes of both; where anything else completes phases each tells
    its own."""
    steps, arrivals, told = SHARED_ARRIVAL[how]
    n = 4

    def body(x, y, o, xs, ys, other, bar):
        def step(k, _):
            for what in steps:
                if what == "x":
                    plgpu.copy_gmem_to_smem(x.at[k], xs.at[k], bar)
                elif what == "y":
                    plgpu.copy_gmem_to_smem(y.at[k], ys.at[k], bar)
                elif what == "y if":
                    plgpu.copy_gmem_to_smem(y.at[k], ys.at[k], bar, predicate=k >= 0)
                elif what == "arrive":
                    plgpu.barrier_arrive(bar)
                elif what == "store":
                    other[...] = jnp.full((128,), k, jnp.int32)
                else:
                    plgpu.barrier_wait(bar)
            if arrivals <= len(steps):
                plgpu.barrier_wait(bar)
            else:
                pl.when(k % 2 == 1)(lambda: plgpu.barrier_wait(bar))

        lax.fori_loop(0, n, step, None)
        for k in range(n):
            o[k] = xs[k] + ys[k]

    x, y = rng.standard_normal((2, n, 256)).astype(np.float32)
    scratch = [plgpu.SMEM((n, 256), np.float32)] * 2
    scratch += [plgpu.SMEM((128,), np.int32), plgpu.Barrier(num_arrivals=arrivals)]
    kernel = run.kernel(body, x, scratch_types=scratch)
    entry = kernel.lower(x, y).as_text("cuda").split("__global__")[1]
    assert entry.count("mbarrier_arrive_expect_tx(") == told
    counted = 1 if told == 1 else arrivals
    assert re.search(rf"mbarrier_init\(smem \+ \d+, {counted}\);", entry)
    np.testing.assert_array_equal(run.call(kernel, x, y), x + y)
