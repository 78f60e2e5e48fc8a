"""plgpu.ext.discard: what lies beside the part stays, and who reads the part before it is written
again is told."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = np.float32
discard = plgpu.ext.discard


def out(*shape, dtype=F32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "shape, dtype, part",
    [
        ((6000,), F32, np.s_[37:5003]),
        ((48, 96), np.int32, np.s_[16:48]),
        ((40, 3, 130), np.int8, np.s_[3:29, 1:3]),
        ((33, 260), np.float16, np.s_[5:, 64:200]),
        ((16, 31), F32, np.s_[:, 3]),
    ],
)
def test_what_is_beside_it_stays(run, rng, shape, dtype, part):
    x = rng.integers(-99, 99, shape).astype(dtype)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        discard(o_ref.at[part])
        discard(o_ref.at[part].at[0])  # again, and a part of it

    got = np.array(run.call(run.kernel(body, out(*shape, dtype=dtype)), x))
    got[part] = x[part] = 0
    np.testing.assert_array_equal(got, x)


def test_scratch_is_discarded_and_written_again(run, rng):
    """Each thread of each block has rows of its own, at a traced start, and discards twice."""
    x = rng.standard_normal((8, 4, 256)).astype(F32)

    def body(x_ref, o_ref, work):
        at = lax.axis_index("i") * 2 + lax.axis_index("t")
        total = jnp.zeros((256,), F32)
        for k in range(2):
            work[at] = x_ref[at] * (k + 1)
            total += work[at].sum(axis=0)
            discard(work.at[at])
        o_ref[at] = total

    kernel = run.kernel(
        body, out(8, 256), grid=(4,), grid_names=("i",), num_threads=2, thread_name="t",
        scratch_types=[plgpu.GMEM(x.shape, F32)],
    )  # fmt: skip
    np.testing.assert_allclose(run.call(kernel, x), 3 * x.sum(axis=1), rtol=1e-4, atol=1e-4)
    assert "discard.global.L2" in kernel.lower(x).as_text("ptx")


def test_a_later_read_is_one_of_uninitialised_memory():
    def body(x_ref, o_ref, work):
        work[...] = x_ref[...]
        discard(work.at[pl.ds(64, 64)])
        o_ref[...] = work[...] * 2

    params = plgpu.InterpretParams(detect_uninitialized=True)
    kernel = plgpu.kernel(
        body, out_type=out(256), scratch_types={"work": plgpu.GMEM((256,), F32)}, interpret=params
    )
    with pytest.raises(plgpu.UninitializedError, match="'work'"):
        kernel(np.ones(256, F32))


@pytest.mark.parametrize("backend", ["interpret", "emulate"])
def test_a_read_by_another_thread_races(backend):
    def body(x_ref, o_ref):
        me = lax.axis_index("t")

        @pl.when(me == 0)
        def _():
            discard(o_ref.at[0])

        @pl.when(me == 1)
        def _():
            o_ref[1] = o_ref[0] + x_ref[0]

    params = plgpu.InterpretParams(detect_races=True, backend=backend)
    kernel = plgpu.kernel(
        body, out_type=out(2, 128), num_threads=2, thread_name="t", interpret=params
    )
    with pytest.raises(plgpu.RaceError, match="discard"):
        kernel(np.ones((1, 128), F32))


def test_what_cannot_be_discarded():
    def of_smem(x_ref, o_ref, smem):
        discard(smem)

    kernel = plgpu.kernel(of_smem, out_type=out(128), scratch_types=[plgpu.SMEM((128,), F32)])
    with pytest.raises(ValueError, match="discard: ref must be a GMEM ref"):
        kernel.lower(np.ones(128, F32))

    def of_a_block(x_ref, o_ref):
        discard(o_ref)

    blocks = pl.BlockSpec((128,), lambda i: (i,), memory_space=plgpu.GMEM)
    kernel = pl.pallas_call(
        of_a_block,
        grid=(2,),
        in_specs=[blocks],
        out_specs=blocks,
        out_shape=out(200),
        interpret=True,
    )
    with pytest.raises(NotImplementedError, match="discard: ref is a block that may overhang"):
        kernel(np.ones(200, F32))

    n = plgpu.dim("n", max=512)

    def of_any_size(x_ref, o_ref):
        discard(o_ref)

    kernel = plgpu.kernel(of_any_size, out_type=out(n), in_shapes=((n,),))
    with pytest.raises(NotImplementedError, match="discard: dimension 0 has a size that is known"):
        kernel.lower(np.ones(128, F32))
