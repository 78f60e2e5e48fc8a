"""Copies of rows that an array of numbers names (TMA gather and scatter, Blackwell): interpreter,
emulated machine and NumPy agree, and the compilers take them."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine

L = plgpu.Layout
CASES = [  # rows, columns of the array, first column, columns, layout, dtype, swizzle
    (16, 128, 0, 64, L.TMA_INDICES, np.float16, 128),
    (48, 256, 64, 128, L.TMA_INDICES, np.float16, 128),
    (32, 512, 0, 256, L.TMA_INDICES, np.int8, None),
    (4, 128, 16, 32, L.TMA_INDICES_4, np.float16, None),
    (8, 128, 64, 64, L.TMA_INDICES_4, np.float32, 64),
]


@pytest.mark.parametrize("rows, of, first, columns, layout, dtype, swizzle", CASES)
def test_gather_and_scatter(rows, of, first, columns, layout, dtype, swizzle, rng):
    """Rows that do not exist are zeros, and are not written."""
    transforms = ()
    if swizzle:
        tile = plgpu.TilingTransform((8, swizzle // np.dtype(dtype).itemsize))
        transforms = tile, plgpu.SwizzleTransform(swizzle)

    def body(x, i, j, o, smem, barrier):
        take = plgpu.load(i, layout=layout, optimized=False)
        plgpu.copy_gmem_to_smem(x.at[take, first : first + columns], smem, barrier)
        plgpu.barrier_wait(barrier)
        put = plgpu.load(j, layout=layout, optimized=False)
        plgpu.copy_smem_to_gmem(smem, o.at[put, 0:columns])
        plgpu.wait_smem_to_gmem(0)

    def kernel(**options):
        return plgpu.kernel(
            body,
            out_type=np.zeros((64, columns), dtype),
            scratch_types=[
                plgpu.SMEM((rows, columns), dtype, transforms=transforms),
                plgpu.Barrier(),
            ],
            **options,
        )

    x = rng.integers(-3, 4, (40, of)).astype(dtype)
    i, j = rng.integers(0, 44, rows), rng.permutation(70)[:rows]
    args = [x, i.astype(np.uint32), j.astype(np.uint32)]
    want = np.concatenate([x, np.zeros((8, of), dtype)])[i][:, first : first + columns]
    inside = j < 64
    lowered = kernel().lower(*args, target="sm_100a")
    for seed in range(3):
        got = np.zeros((64, columns), dtype)
        run_on_machine(lowered, args, [got], seed=seed)
        np.testing.assert_array_equal(got[j[inside]], want[inside])
    got = kernel(interpret=True)(*args)
    np.testing.assert_array_equal(got[j[inside]], want[inside])
    for target in ("sm_100a", "sm_103a"):
        assert not kernel().lower(*args, target=target).resources()["remarks"]


@pytest.mark.parametrize(
    "dtype, options, error, why",
    [
        (np.float32, {}, ValueError, "must be integers, got float32"),
        (np.int32, {}, ValueError, "unsigned integers are needed"),
        (np.uint32, {"predicate": True}, NotImplementedError, "predicate together with"),
    ],
)
def test_refused(dtype, options, error, why):
    def body(x, i, o, smem, barrier):
        plgpu.copy_gmem_to_smem(x.at[i[...], 0:64], smem, barrier, **options)

    x = plgpu.ShapeDtypeStruct((40, 64), np.float16)
    kernel = plgpu.kernel(
        body, out_type=x, scratch_types=[plgpu.SMEM((32, 64), np.float16), plgpu.Barrier()]
    )
    with pytest.raises(error, match=rf"{why}.*\n  at .*test_rows_by_number\.py"):
        kernel.lower(x, plgpu.ShapeDtypeStruct((32,), dtype), target="sm_100a")
