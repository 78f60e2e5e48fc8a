"""Copies between GMEM and SMEM: what each engine does, and that all do the same."""

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


@pytest.mark.parametrize("dtype", LEGAL, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("engine", ["tma", "bulk", "lanes"])
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


@pytest.mark.parametrize("width", [96, 92], ids=["tma", "lanes"])
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
