"""tcgen05 products and moves on the emulated machine, which decodes descriptors by the PTX ISA's
tables, against NumPy; all of it compiles for both targets, without spills."""

import itertools
import random

import ml_dtypes
import numpy as np
import pytest
from tcgen05_kernels import E2M1, E8M0, F8, Product

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu.machine.run import run as run_on_machine

BF16 = ml_dtypes.bfloat16
E4M3, E5M2 = F8


def agrees(case, rng, seeds):
    operands = case.operands(rng)
    args, want = case.arranged(operands), case.expected(operands)
    kernel = case.kernel()
    lowered = kernel.lower(*args, target="sm_100a")
    for seed in seeds:
        got = np.zeros_like(want)
        run_on_machine(lowered, args, [got], seed=seed)
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(case.kernel(interpret=True)(*args), want)
    for target in ("sm_100a", "sm_103a")[: 1 if want.dtype == np.int32 else 2]:
        used = kernel.lower(*args, target=target).resources()
        assert not used["remarks"], used
        if case.m == 128 or case.n <= 256:
            assert used["spill_bytes"] == used["stack_bytes"] == 0, used


def dense():
    """Types, shapes, swizzles and transpositions that fit each other."""
    types = [
        (np.float16, np.float16, np.float32),
        (np.float16, np.float16, np.float16),
        (BF16, BF16, np.float32),
        (E4M3, E4M3, np.float32),
        (E4M3, E5M2, np.float32),
        (E5M2, E4M3, np.float16),
        (E5M2, E5M2, np.float32),
        (np.int8, np.int8, np.int32),
        (np.uint8, np.uint8, np.int32),
    ]
    swizzles, flags = (32, 64, 128), (False, True)
    for (a, b, d), m, n, pair in itertools.product(
        types, (64, 128), (64, 128, 192, 256, 320, 512), flags
    ):
        size = np.dtype(a).itemsize
        for sa, sb, ta, tb in itertools.product(swizzles, swizzles, flags, flags):
            columns = n // (1 + pair)
            if pair and (n > 256 or columns % 32):
                continue
            if m == 64 and not pair and sb // size > n // 2:
                continue
            if not tb and columns % (sb // size):
                continue
            if ta and m % (sa // size):
                continue
            yield Product(
                m=m, n=n, k=128 // size * 2, a=a, b=b, d=d, a_swizzle=sa, b_swizzle=sb,
                a_mn_major=ta, b_k_major=tb, pair=pair, steps=2,
            )  # fmt: skip


def chosen(cases, quick, long):
    """So many of them in a quick run and in one with --long, drawn at random."""
    cases = list(cases)
    order = random.Random(0).sample(range(len(cases)), len(cases))
    for place, k in enumerate(order):
        late = "long" if place < long else "exhaustive"
        marks = [] if place < quick else [getattr(pytest.mark, late)]
        yield pytest.param(cases[k], marks=marks, id=str(k))


@pytest.mark.parametrize("case", list(chosen(dense(), 4, 40)))
def test_dense(case, rng):
    agrees(case, rng, seeds=range(1))


OTHERS = [
    *(Product(n=n, k=64, b_k_major=True) for n in (8, 24, 104, 248, 264, 392, 504)),
    *(Product(n=n, m=64, b_k_major=True, b_swizzle=32) for n in (32, 48, 112)),
    *(Product(k=k, a_swizzle=32, b_swizzle=32, b_k_major=True) for k in (16, 48, 272)),
    *(Product(a=a, k=256 // np.dtype(a).itemsize, a_in_tmem=True, steps=2) for a in (BF16, E4M3)),
    Product(a_in_tmem=True, pair=True, n=256, steps=2),
    Product(a=np.int8, d=np.int32, k=128, a_in_tmem=True),
    *(Product(a=a, b=E5M2, k=256, n=n, scale=E8M0) for a, n in ((E4M3, 256), (E5M2, 128))),
    Product(a=E4M3, k=512, n=128, scale=E8M0, steps=2, b_k_major=True),
    Product(a=E4M3, k=128, scale=E8M0, a_in_tmem=True),
    Product(a=E4M3, k=128, n=256, scale=E8M0, pair=True),
    *(Product(a=E4M3, k=256, m=64, n=n, scale=E8M0, pair=True, b_k_major=True) for n in (128, 256)),
    *(
        Product(a=E2M1, k=256, n=n, scale=scale, block=block, b_k_major=True)
        for n, scale, block in ((128, E8M0, 32), (256, E8M0, 16), (64, E4M3, 16))
    ),
    Product(a=E2M1, k=512, n=256, scale=E4M3, block=16, pair=True, b_k_major=True),
    *(Product(sparse=True, a=a, k=256) for a in (np.float16, BF16, E4M3)),
    Product(sparse=True, a=np.int8, d=np.int32, k=256, n=64, b_k_major=True),
    Product(sparse=True, a=BF16, k=256, n=256, pair=True, steps=2),
    Product(sparse=True, a=BF16, k=256, a_in_tmem=True),
    Product(sparse=True, a=E4M3, k=256, scale=E8M0, block=64),
]  # fmt: skip


@pytest.mark.parametrize("case", list(chosen(OTHERS, 7, 20)))
def test_others(case, rng):
    """Odd widths, A in tensor memory, scales, sparsity."""
    agrees(case, rng, seeds=range(2))


# ---- between registers and tensor memory ---------------------------------------------------------

L = plgpu.Layout
MOVES = [  # rows, columns, dtype, packed, layout of registers, pair
    *((128, c, d, p, layout, False)
      for c in (8, 40, 128)
      for d, p in ((np.float32, None), (np.float16, True), (np.float16, False))
      for layout in (L.TCGEN05, L.TCGEN05_TMEM_NATIVE)),
    (128, 16, np.int8, True, L.TCGEN05_TMEM_NATIVE(4), False),
    (128, 64, E4M3, True, L.TCGEN05_TMEM_NATIVE(4), False),
    *((64, c, d, p, L.WGMMA, False)
      for c in (16, 96) for d, p in ((np.float32, None), (np.float16, True), (np.float16, False))),
    *((64, c, d, p, L.TCGEN05_M64_COLLECTIVE(c), True)
      for c in (16, 96) for d, p in ((np.float32, None), (np.float16, True), (np.float16, False))),
    (64, 32, np.float32, None, L.TCGEN05_M64_COLLECTIVE_NATIVE(32), True),
]  # fmt: skip


@pytest.mark.parametrize("move", list(chosen(MOVES, 7, 20)))
def test_moves(move, rng):
    """A store and a load give back the array; what each lane and column holds is what another
    layout finds there."""
    rows, columns, dtype, packed, layout, pair = move
    if packed is False and layout is L.TCGEN05_TMEM_NATIVE:
        other = L.TCGEN05
    else:
        other = None

    def body(x, o, tmem):
        value = plgpu.load(x, layout=layout, optimized=False)
        plgpu.async_store_tmem(tmem, value)
        plgpu.commit_tmem()
        block = lax.axis_index("pair") if pair else 0
        o[block] = plgpu.async_load_tmem(tmem, layout=other)
        plgpu.wait_load_tmem()

    x = rng.integers(-3, 4, (rows, columns)).astype(dtype)
    blocks = 1 + pair
    cluster = dict(cluster=(2,), cluster_names=("pair",)) if pair else {}
    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((blocks, *x.shape), dtype),
        scratch_types=[plgpu.TMEM(x.shape, dtype, packed=packed, collective=pair)],
        **cluster,
    )
    lowered = kernel.lower(x, target="sm_100a")
    for seed in range(3):
        got = np.zeros((blocks, *x.shape), dtype)
        run_on_machine(lowered, [x], [got], seed=seed)
        assert got.tobytes() == x.tobytes() * blocks
    assert not lowered.resources()["remarks"]


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, E2M1])
def test_moves_of_four_bits(dtype, rng):
    """Eight elements share a column, two of them a byte in memory, each has a byte in registers."""

    def body(x, o, smem, tmem, full, done):
        plgpu.async_store_tmem(
            tmem, plgpu.load(x, layout=L.TCGEN05_TMEM_NATIVE(8), optimized=False)
        )
        plgpu.commit_tmem()
        o[0] = plgpu.async_load_tmem(tmem)
        plgpu.wait_load_tmem()
        plgpu.copy_gmem_to_smem(x, smem, full)
        plgpu.barrier_wait(full)
        plgpu.async_copy_smem_to_tmem(smem, tmem)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        o[1] = plgpu.async_load_tmem(tmem)

    x = rng.integers(0, 8, (128, 64)).astype(dtype)
    x[:, ::3] = -x[:, ::3] if dtype != ml_dtypes.uint4 else x[:, ::3] + x[:, ::3]
    for interpret in (True, "emulate"):
        kernel = plgpu.kernel(
            body,
            out_type=plgpu.ShapeDtypeStruct((2, *x.shape), dtype),
            scratch_types=[
                plgpu.SMEM(x.shape, dtype),
                plgpu.TMEM(x.shape, dtype, packed=True),
                plgpu.Barrier(),
                plgpu.Barrier(orders_tensor_core=True),
            ],
            interpret=interpret,
        )
        np.testing.assert_array_equal(kernel(x).astype(np.int8), np.stack([x, x]).astype(np.int8))
    assert not kernel.lower(x, target="sm_103a").resources()["remarks"]


def test_rows_that_a_load_reduces_in_another_layout(rng):
    """The load keeps whole rows in each lane; the array is converted for its use."""

    def body(x, o, r, tmem):
        value = plgpu.load(x, layout=L.TCGEN05, optimized=False)
        plgpu.async_store_tmem(tmem, value)
        plgpu.commit_tmem()
        again, r[...] = plgpu.async_load_tmem(tmem, reduce="max")
        o[...] = plgpu.layout_cast(again, L.TCGEN05) + value

    x = rng.integers(-99, 99, (128, 40)).astype(np.float32)
    kernel = plgpu.kernel(body, out_type=(x, x[:, 0]), scratch_types=[plgpu.TMEM(x.shape, x.dtype)])
    lowered = kernel.lower(x, target="sm_103a")
    got, found = np.zeros_like(x), np.zeros_like(x[:, 0])
    run_on_machine(lowered, [x], [got, found])
    np.testing.assert_array_equal(got, x + x)
    np.testing.assert_array_equal(found, x.max(1))
    assert not lowered.resources()["remarks"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
@pytest.mark.parametrize("reduce", ["max", "min", "absmax", "absmin"])
def test_loads_that_reduce(dtype, reduce, rng):
    if dtype != np.float32 and reduce.startswith("abs"):
        return

    def body(x, o, r, tmem):
        value = plgpu.load(x, layout=L.TCGEN05_TMEM_NATIVE, optimized=False)
        plgpu.async_store_tmem(tmem, value)
        plgpu.commit_tmem()
        o[...], r[...] = plgpu.async_load_tmem(tmem, reduce=reduce)

    x = (rng.standard_normal((128, 72)) * 1e8).astype(dtype)
    kernel = plgpu.kernel(body, out_type=(x, x[:, 0]), scratch_types=[plgpu.TMEM(x.shape, dtype)])
    lowered = kernel.lower(x, target="sm_103a")
    got, found = np.zeros_like(x), np.zeros_like(x[:, 0])
    run_on_machine(lowered, [x], [got, found])
    of = np.abs(x) if reduce.startswith("abs") else x
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(found, getattr(of, reduce[-3:])(1))
    assert not lowered.resources()["remarks"]
