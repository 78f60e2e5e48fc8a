"""pl.enable_poison_buffers: what scratch holds at the beginning, on every backend; right kernels
stay right, also those of clusters."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl

F32 = np.float32
POISON = {
    "float32": np.nan,
    "float16": np.nan,
    "bfloat16": np.nan,
    "float8_e4m3fn": np.nan,
    "int32": -(2**31),
    "int16": -(2**15),
    "uint8": 0,
    "bool": True,
}
CHECKED = plgpu.InterpretParams(detect_races=True, mode="reference")


def read_scratch(o, tile):
    o[...] = tile[...]


def kernel(dtype="float32", interpret=True, space=plgpu.SMEM):
    out = plgpu.ShapeDtypeStruct((64, 128), np.dtype(dtype))
    scratch = [space((64, 128), np.dtype(dtype))]
    return plgpu.kernel(read_scratch, out_type=out, scratch_types=scratch, interpret=interpret)


@pytest.mark.parametrize("dtype", POISON)
@pytest.mark.parametrize("interpret", [True, "emulate"], ids=["interpret", "emulate"])
def test_scratch_begins_as_poison(dtype, interpret):
    with pl.enable_poison_buffers(True):
        got = kernel(dtype, interpret)()
    wide = got.astype(F32) if got.dtype.kind in "fV" else got
    np.testing.assert_array_equal(wide, np.full((64, 128), POISON[dtype]))


def test_the_flag():
    """Kernels are traced for each state; only bools set it."""
    read = kernel("int32")
    assert read()[0, 0] == 2**31 - 1 and not pl.enable_poison_buffers.value
    pl.enable_poison_buffers(True)
    try:
        assert read()[0, 0] == -(2**31) and repr(pl.enable_poison_buffers).endswith("True>")
        with pl.enable_poison_buffers(False), pl.enable_debug_checks(True):
            assert read()[0, 0] == 2**31 - 1
        assert pl.enable_poison_buffers.value and not pl.enable_debug_checks.value
    finally:
        pl.enable_poison_buffers(False)
    with pytest.raises(TypeError, match="enable_poison_buffers: expected a bool, got 1"):
        pl.enable_poison_buffers(1)


def test_memory_of_other_kinds():
    """GMEM scratch, unions, scopes of each thread; barriers, semaphores and ACC are as ever."""

    def body(o, p, union, gmem, bar, acc, semaphore):
        a, _ = union
        t = lax.axis_index("t")
        o[t, 0] = a[...]
        o[t, 1] = gmem[...]
        pl.run_scoped(lambda own: o.set(own[...], (t, 2)), plgpu.SMEM((128,), F32))
        p[t] = pl.semaphore_read(semaphore)

        @pl.when(t == 0)
        def _():
            plgpu.barrier_arrive(bar)
            plgpu.barrier_wait(bar)
            o[0, 3] = acc[...][0]

    sums = plgpu.ACC((64, 128))
    call = plgpu.kernel(
        lambda o, p, u, g, b, s: pl.run_scoped(lambda acc: body(o, p, u, g, b, acc, s), sums),
        out_type=(
            plgpu.ShapeDtypeStruct((2, 4, 128), F32),
            plgpu.ShapeDtypeStruct((2,), np.int32),
        ),
        scratch_types=[
            plgpu.RefUnion(plgpu.SMEM((128,), F32), plgpu.SMEM((256,), F32)),
            plgpu.GMEM((128,), F32),
            plgpu.Barrier(),
            plgpu.SemaphoreType.REGULAR,
        ],
        num_threads=2,
        thread_name="t",
        interpret=plgpu.InterpretParams(uninitialized_memory="zero", detect_races=True),
    )
    with pl.enable_poison_buffers(True):
        o, p = call()
    assert np.isnan(o[:, :3]).all() and not o[0, 3].any() and not p.any()


@pytest.mark.parametrize("interpret", [CHECKED, "emulate"], ids=["interpret", "emulate"])
def test_kernels_that_write_first_stay_right(interpret):
    """One that divides K among the blocks of a cluster, which store to each other's scratch, and a
    ring of slots that a producer fills."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((64, 512), (512, 64)))
    with pl.enable_poison_buffers(True):
        for split in (1, 2):
            config = ops.MatmulConfig(1, 32, 2, 1, 1, 1, 1, split)
            got = ops.matmul(a, b, config=config, interpret=interpret)
            np.testing.assert_array_equal(got, a.astype(F32) @ b.astype(F32))


def test_tracked_memory_is_not_filled():
    params = plgpu.InterpretParams(detect_uninitialized=True)
    with pl.enable_poison_buffers(True), pytest.raises(plgpu.UninitializedError, match="tile"):
        kernel(interpret=params)()


def test_the_generated_program_fills():
    low = kernel(ml_dtypes.bfloat16, None)
    assert "0x7fc0" not in low.lower().as_text("cuda")
    with pl.enable_poison_buffers(True):
        assert "store" in low.lower().as_text("traced")
