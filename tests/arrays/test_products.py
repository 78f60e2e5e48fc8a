"""Products of the tensor cores: every type of wgmma and of mma, and small integers and floats that
become operands in registers.

Sums of products of fp8 are rounded by the hardware to about 14 bits in each step along K, so
results are compared within 2**-9 of the sum of magnitudes; integers and conversions are exact."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
I8, U8, I32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)
INT4, UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)
LIMITS = {I8: (-128, 128), U8: (0, 256), INT4: (-8, 8), UINT4: (0, 16)}
L = plgpu.Layout


def values(rng, shape, dtype):
    if dtype in LIMITS:
        return rng.integers(*LIMITS[dtype], shape).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def close(out, a, b, tolerance, start=0):
    """Of a @ b, in units of the sum of magnitudes."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(out.astype(np.float64) - (start + a @ b))
    bound = tolerance * (np.abs(start) + np.abs(a) @ np.abs(b)) + 1e-6
    assert np.all(error <= bound), np.max(error / bound) * tolerance


def staged(body, *types):
    """body(refs in SMEM) after copies of the first len(types) operands to SMEM."""

    def kernel(*refs):
        def scope(*smem):
            *smem, barrier = smem
            for g, s in zip(refs, smem, strict=False):
                plgpu.copy_gmem_to_smem(g, s, barrier)
            plgpu.barrier_wait(barrier)
            body(*smem, *refs[len(types) :])

        pl.run_scoped(scope, *types, plgpu.Barrier(num_arrivals=len(types)))

    return kernel


def product(m, n, k, a, b, acc, registers=False, transforms=()):
    """out = A @ B.T in one wgmma, A in SMEM or registers, B in SMEM with rows along K."""

    def body(a_smem, b_smem, out):
        def accumulate(c):
            plgpu.wgmma(c, a_smem[...] if registers else a_smem, b_smem.T)
            return c[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((m, n), acc))

    return staged(
        body,
        plgpu.SMEM((m, k), a, transforms=transforms),
        plgpu.SMEM((n, k), b, transforms=transforms),
    )


FP8 = [
    (64, 8, 32, E4M3, E4M3, F32, False),
    (128, 72, 96, E5M2, E4M3, F32, False),
    (64, 24, 160, E4M3, E5M2, F32, True),
    (192, 40, 64, E5M2, E5M2, F32, True),
    (64, 248, 128, E4M3, E4M3, F32, True),
    (64, 16, 64, E4M3, E4M3, F16, False),
    (128, 40, 32, E5M2, E5M2, F16, True),
    (64, 24, 96, E4M3, E5M2, F16, False),
    (64, 8, 288, E5M2, E4M3, F16, True),
]


@pytest.mark.parametrize("m, n, k, a, b, acc, registers", FP8)
def test_wgmma_of_fp8(run, rng, m, n, k, a, b, acc, registers):
    """Each pair of types and accumulators, A in SMEM and in registers, by every swizzle: types,
    descriptors, the order of registers."""
    x, y = values(rng, (m, k), a), values(rng, (n, k), b)
    out = run(product(m, n, k, a, b, acc, registers), plgpu.ShapeDtypeStruct((m, n), acc), x, y)
    close(out, x, y.T, 2**-9 if acc == F32 else 2**-8)


@pytest.mark.parametrize("registers", [False, True])
def test_wgmma_of_fp8_is_exact_where_it_can_be(run, rng, registers):
    """Small whole numbers: whatever the hardware rounds, every sum fits. A wrong element shows."""
    x = rng.integers(-4, 5, (128, 128)).astype(E4M3)
    y = rng.integers(-4, 5, (48, 128)).astype(E5M2)
    out = run(
        product(128, 48, 128, E4M3, E5M2, F32, registers),
        plgpu.ShapeDtypeStruct((128, 48), F32),
        x,
        y,
    )
    np.testing.assert_array_equal(out, x.astype(np.float32) @ y.astype(np.float32).T)


@pytest.mark.parametrize(
    "m, n, k, dtype, registers",
    [
        (64, 8, 32, I8, False),
        (128, 24, 96, I8, True),
        (64, 176, 128, I8, True),
        (64, 48, 64, U8, False),
        (192, 16, 320, U8, True),
    ],
)
def test_wgmma_of_integers(run, rng, m, n, k, dtype, registers):
    """Exact, signed and unsigned."""
    x, y = values(rng, (m, k), dtype), values(rng, (n, k), dtype)
    out = run(
        product(m, n, k, dtype, dtype, I32, registers), plgpu.ShapeDtypeStruct((m, n), I32), x, y
    )
    np.testing.assert_array_equal(out, x.astype(np.int32) @ y.astype(np.int32).T)


def test_wgmma_of_integers_wraps(run, rng):
    """An int32 accumulator that is given, and overflows."""
    x, y = values(rng, (64, 64), I8), values(rng, (32, 64), I8)
    start = rng.integers(-(2**31), 2**31, (64, 32)).astype(np.int32)

    def body(a, b, c, out):
        def accumulate(acc):
            plgpu.wgmma(acc, a, b.T)

        out[...] = pl.run_state(accumulate)(plgpu.ACC.init(c[...]))

    body = staged(body, plgpu.SMEM((64, 64), I8), plgpu.SMEM((32, 64), I8))
    out = run(body, plgpu.ShapeDtypeStruct((64, 32), I32), x, y, start)
    whole = start.astype(np.int64) + x.astype(np.int64) @ y.astype(np.int64).T
    np.testing.assert_array_equal(out, whole.astype(np.int32))


@pytest.mark.parametrize(
    "m, n, k, registers",
    [(64, 8, 8, False), (128, 40, 24, False), (64, 120, 64, False), (128, 24, 104, True)],
)
def test_wgmma_of_float32(run, rng, m, n, k, registers):
    """As tf32: exact operands of 10 bits, then some that lose theirs. A in SMEM and, of several
    blocks of rows and more steps than a statement has, in registers."""
    x, y = values(rng, (m, k), F32), values(rng, (n, k), F32)
    cut = [(z.view(np.uint32) & 0xFFFFE000).view(np.float32) for z in (x, y)]
    kernel = product(m, n, k, F32, F32, F32, registers)
    out = run(kernel, plgpu.ShapeDtypeStruct((m, n), F32), *cut)
    close(out, cut[0], cut[1].T, 1e-6 if run.way != "cuda" else 2e-5)
    out = run(kernel, plgpu.ShapeDtypeStruct((m, n), F32), x, y)
    if run.way != "cuda":
        close(out, cut[0], cut[1].T, 1e-6)
    close(out, x, y.T, 2**-9)


def test_wgmma_of_fp8_in_steps(run, rng):
    """Several products into parts of one accumulator, with the user's transforms and dynamic
    slices: descriptors of the second and later steps."""
    m, n, k, step = 128, 96, 512, 128
    x, y = values(rng, (m, k), E4M3), values(rng, (n, k), E4M3)
    tiles = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))

    def body(a, b, out):
        def accumulate(acc):
            @pl.loop(0, k // step)
            def _(i):
                part = pl.ds(pl.multiple_of(i * step, step), step)
                plgpu.wgmma(acc.at[:, :32], a.at[:, part], b.at[:32, part].T)
                plgpu.wgmma(acc.at[:, 32:], a.at[:, part], b.at[32:, part].T)

            return acc[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((m, n)))

    body = staged(
        body,
        plgpu.SMEM((m, k), E4M3, transforms=tiles),
        plgpu.SMEM((n, k), E4M3, transforms=tiles),
    )
    close(run(body, plgpu.ShapeDtypeStruct((m, n), F32), x, y), x, y.T, 2**-9)


def test_wgmma_of_a_result(run, rng):
    """An accumulator that becomes fp8 and the A operand of the next product: from its layout to
    that of bytes."""
    x, y, z = (values(rng, (64, 64), E4M3) for _ in range(3))

    def body(a, b, c, out):
        def first(acc):
            plgpu.wgmma(acc, a, b.T)
            return (acc[...] * 0.125).astype(E4M3)

        inner = pl.run_scoped(first, plgpu.ACC((64, 64)))

        def second(acc):
            plgpu.wgmma(acc, inner, c.T)
            return acc[...]

        out[...] = pl.run_scoped(second, plgpu.ACC((64, 64)))

    body = staged(body, *(plgpu.SMEM((64, 64), E4M3) for _ in range(3)))
    out = run(body, plgpu.ShapeDtypeStruct((64, 64), F32), x, y, z)
    exact = (x.astype(np.float32) @ y.astype(np.float32).T * 0.125).astype(E4M3)
    magnitude = np.abs(exact.astype(np.float32)) @ np.abs(z.astype(np.float32)).T
    error = np.abs(out - exact.astype(np.float32) @ z.astype(np.float32).T)
    assert np.all(error <= 2**-4 * magnitude)  # an ulp of e4m3, where the first sum is rounded
    assert np.mean(error / magnitude) < 2**-8


@pytest.mark.parametrize("dtype, acc", [(E4M3, F32), (I8, I32), (F32, F32)])
def test_wgmma_of_transposed_operands(run, rng, dtype, acc):
    """b along N, transposed in SMEM as the error says."""
    x, y = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((64, 64), (64, 32)))

    def body(a, b, out):
        def scope(transposed, c):
            transposed[...] = b[...].T
            plgpu.commit_smem()
            plgpu.wgmma(c, a, transposed.T)
            return c[...]

        out[...] = pl.run_scoped(scope, plgpu.SMEM((32, 64), dtype), plgpu.ACC((64, 32), acc))

    body = staged(body, plgpu.SMEM((64, 64), dtype), plgpu.SMEM((64, 32), dtype))
    out = run(body, plgpu.ShapeDtypeStruct((64, 32), acc), x, y)
    np.testing.assert_array_equal(out, x.astype(np.float32) @ y.astype(np.float32))


@pytest.mark.parametrize("dtype", [E4M3, F32])
def test_wgmma_of_equal_elements(run, rng, dtype):
    """A in registers that is one number, of bytes and of words."""
    y = rng.integers(-4, 5, (32, 64)).astype(dtype)

    def body(b, out):
        def accumulate(acc):
            plgpu.wgmma(acc, jnp.full((64, 64), 0.5, dtype), b.T)
            return acc[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((64, 32)))

    out = run(staged(body, plgpu.SMEM((32, 64), dtype)), plgpu.ShapeDtypeStruct((64, 32), F32), y)
    np.testing.assert_array_equal(out, np.full((64, 64), 0.5) @ y.T.astype(np.float64))


def test_wgmma_of_a_float32_result(run, rng):
    """A result that is the A operand of the next product: from the accumulator's layout to that of
    32-bit operands, by shuffles."""
    x, y, z = (rng.integers(-4, 5, (64, 64)).astype(F32) for _ in range(3))

    def body(a, b, c, out):
        def first(acc):
            plgpu.wgmma(acc, a, b.T)
            return acc[...]

        inner = pl.run_scoped(first, plgpu.ACC((64, 64))) * 0.25

        def second(acc):
            plgpu.wgmma(acc, inner, c.T)
            return acc[...]

        out[...] = pl.run_scoped(second, plgpu.ACC((64, 64)))

    body = staged(body, *(plgpu.SMEM((64, 64), F32) for _ in range(3)))
    out_type = plgpu.ShapeDtypeStruct((64, 64), F32)
    out = run(body, out_type, x, y, z)
    np.testing.assert_array_equal(out, (x @ y.T * 0.25) @ z.T)
    if run.way == "interpret":
        text = run.kernel(body, out_type).lower(x, y, z).as_text("cuda")
        assert "through shared memory" not in text


# ---- mma ---------------------------------------------------------------------------------------

MMA = [
    (64, 8, 16, F16, F32),
    (128, 24, 48, BF16, F32),
    (64, 8, 8, F32, F32),
    (128, 40, 24, F32, F32),
    (64, 40, 64, E4M3, F32),
    (128, 8, 32, E5M2, F32),
    (64, 16, 96, I8, I32),
    (64, 24, 32, U8, I32),
    (128, 16, 64, INT4, I32),
    (64, 8, 128, UINT4, I32),
]


@pytest.mark.filterwarnings("ignore:.*through shared memory")
@pytest.mark.parametrize("m, n, k, dtype, acc", MMA)
def test_mma(run, rng, m, n, k, dtype, acc):
    """Every type, several instructions along each dimension; a loaded in the layout that it has,
    b by what inference makes of it."""
    x, y = values(rng, (m, k), dtype), values(rng, (k, n), dtype)
    c = values(rng, (m, n), I8).astype(acc)

    def body(a_ref, b_ref, c_ref, out):
        a = plgpu.load(a_ref, layout=L.MMA_LHS(dtype), optimized=False)
        out[...] = plgpu.mma(c_ref[...], a, b_ref[...])

    out = run(body, plgpu.ShapeDtypeStruct((m, n), acc), x, y, c)
    if acc == I32:
        np.testing.assert_array_equal(out, c + x.astype(np.int32) @ y.astype(np.int32))
    else:
        close(out, x, y, 2**-9 if dtype in (E4M3, E5M2, F32) else 1e-5, c)
    if dtype == F32 and run.way != "cuda":  # what tf32 has not is cut off
        close(out, *((z.view(np.uint32) & 0xFFFFE000).view(F32) for z in (x, y)), 1e-6, c)


def test_mma_from_smem_in_a_chain(run, rng):
    """Results that are accumulators and, rounded, operands of others; equal elements."""
    x, y = values(rng, (64, 32), BF16), values(rng, (32, 32), BF16)

    def body(a, b, out):
        c = plgpu.mma(jnp.zeros((64, 32), F32), a[...], b[...])
        c = plgpu.mma(c, jnp.full((64, 32), 2, BF16), b[...])
        out[...] = plgpu.mma(c, c.astype(BF16), b.T[...])

    body = staged(body, plgpu.SMEM((64, 32), BF16), plgpu.SMEM((32, 32), BF16))
    out = run(body, plgpu.ShapeDtypeStruct((64, 32), F32), x, y)
    x, y = x.astype(np.float32), y.astype(np.float32)
    c = x @ y + np.full((64, 32), 2, np.float32) @ y
    close(out, c, y.T, 2**-7, c)


# ---- narrow operands that become wide -----------------------------------------------------------

NARROW = {
    I8: L.WGMMA_UPCAST_2X,
    U8: L.WGMMA_UPCAST_2X,
    E4M3: L.WGMMA_UPCAST_2X,
    E5M2: L.WGMMA_UPCAST_2X,
    INT4: L.WGMMA_UPCAST_4X,
    UINT4: L.WGMMA_UPCAST_4X,
}


@pytest.mark.parametrize("dtype", NARROW)
def test_conversions_of_all_numbers(run, dtype):
    """Every number of a narrow type as float16, bfloat16 and float32, bit for bit."""
    bits = dtype.itemsize * 8 if dtype not in (INT4, UINT4) else 4
    x = np.tile(np.arange(2**bits, dtype=np.uint8), 64 * 128 // 2**bits).reshape(64, 128)
    if dtype == INT4:
        x = x.astype(np.int8) - 16 * (x > 7)
    x = x.astype(dtype) if bits == 4 else x.view(dtype)
    types = (F16, BF16, F32)

    def body(ref, *outs):
        v = plgpu.load(ref, layout=NARROW[dtype], optimized=False)
        for out, to in zip(outs, types, strict=True):
            out[...] = v.astype(to)

    outs = run(body, tuple(plgpu.ShapeDtypeStruct(x.shape, to) for to in types), x)
    for out, to in zip(outs, types, strict=True):
        want = x.astype(np.float32).astype(to)
        same = (out.view(f"u{to.itemsize}") == want.view(f"u{to.itemsize}")) | (
            np.isnan(out.astype(np.float32)) & np.isnan(want.astype(np.float32))
        )
        assert np.all(same), (to, x[~same][:4], out[~same][:4])


@pytest.mark.parametrize(
    "dtype, to, how",
    [
        *itertools.product(NARROW, (BF16,), ("cast",)),
        (I8, F16, "cast"),
        (E4M3, F16, "plain"),
        (INT4, F16, "after"),
        (INT4, BF16, "plain"),
        (U8, BF16, "after"),
    ],
)
def test_wgmma_of_widened_operands(run, rng, dtype, to, how):
    """A narrow A from SMEM becomes bf16 or f16 in registers: in an UPCAST layout that is cast to
    WGMMA before or after, or as inference has it. Nothing goes through shared memory."""
    m, n, k = 128, 40, 96
    x, y = values(rng, (m, k), dtype), values(rng, (n, k), to)

    def body(a, b, out):
        v = a[...] if how == "plain" else plgpu.load(a, layout=NARROW[dtype])
        if how == "cast":
            v = plgpu.layout_cast(v, L.WGMMA)
        v = v.astype(to)
        if how == "after":
            v = plgpu.layout_cast(v, L.WGMMA)

        def accumulate(acc):
            plgpu.wgmma(acc, v, b.T)
            return acc[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((m, n)))

    body = staged(body, plgpu.SMEM((m, k), dtype), plgpu.SMEM((n, k), to))
    out_type = plgpu.ShapeDtypeStruct((m, n), F32)
    close(run(body, out_type, x, y), x, y.T, 1e-5)
    if run.way == "interpret":
        text = run.kernel(body, out_type).lower(x, y).as_text("cuda")
        assert "through shared memory" not in text
        if dtype not in (E4M3, E5M2):
            assert "cvt_from_" in text


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [INT4, UINT4, I8, U8])
@pytest.mark.parametrize("to", [BF16, F16])
def test_slices_of_narrow_operands(run, rng, dtype, to):
    """Parts of a narrow array along K, made wide and scaled by rows one after the other: whole
    words are converted and multiplied, and nothing goes through shared memory."""
    m, n, k = 64, 24, 128
    x, y = values(rng, (m, k), dtype), values(rng, (n, k), to)
    scale = (2.0 ** rng.integers(-3, 3, m)).astype(to)

    def body(a, b, scales, out):
        v = a[...]
        by_row = plgpu.load(scales, layout=L.WGMMA.reduce(1))

        def accumulate(acc):
            for at in range(0, k, 64):
                part = v[:, at : at + 64].astype(to)
                part = part * lax.broadcast_in_dim(by_row, part.shape, [0])
                plgpu.wgmma(acc, part, b.at[:, at : at + 64].T)
            return acc[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((m, n)))

    body = staged(body, plgpu.SMEM((m, k), dtype), plgpu.SMEM((n, k), to), plgpu.SMEM((m,), to))
    out_type = plgpu.ShapeDtypeStruct((m, n), F32)
    want = x.astype(F32) * scale.astype(F32)[:, None]
    close(run(body, out_type, x, y, scale), want, y.T, 1e-5)
    if run.way != "cuda":
        text = run.kernel(body, out_type).lower(x, y, scale).as_text("cuda")
        assert "through shared memory" not in text and "by shuffles" not in text
        assert len(re.findall(r"cvt_from_\w+\(&", text)) == len(re.findall(r"mul_x2\(&", text)) == 2


@pytest.mark.parametrize("form, waits", [("waited", None), ("last", 0), ("after", 1), ("if", 0)])
def test_registers_of_a_product_in_flight(run, rng, form, waits):
    """No iteration ends with a product in flight that reads registers, which the next one may
    write: it waits for that one, if the kernel has not, and not for those after it."""
    m, n, k, steps = 128, 64, 64, 24
    x, y = values(rng, (2, m, k), F16), values(rng, (2, n, k), F16)

    def body(a, b, out, other):
        def accumulate(acc, acc2):
            def step(s, _):
                factor = (s % 3 - 1).astype(F16)
                slot = s % 2

                def product():
                    plgpu.wgmma(acc, a[slot] * factor, b.at[slot].T)

                product() if form != "if" else pl.when(s % 3 != 1)(product)
                if form == "after":
                    plgpu.wgmma(acc2, a.at[slot], b.at[slot].T)
                plgpu.wgmma_wait({"waited": 0, "last": 1, "if": 1, "after": 2}[form])

            lax.fori_loop(0, steps, step, None)
            return acc[...], acc2[...]

        accs = plgpu.ACC((m, n)), plgpu.ACC((m, n))
        out[...], other[...] = pl.run_scoped(accumulate, *accs)

    body = staged(body, plgpu.SMEM(x.shape, F16), plgpu.SMEM(y.shape, F16))
    outs = (plgpu.ShapeDtypeStruct((m, n), F32),) * 2
    products = [x[i].astype(F32) @ y[i].astype(F32).T for i in range(2)]
    want = sum((s % 3 - 1) * products[s % 2] for s in range(steps))
    got, other = run(body, outs, x, y)
    np.testing.assert_allclose(got, want, atol=1e-2)
    want = sum(products) * (steps // 2 * (form == "after"))
    np.testing.assert_allclose(other, want, rtol=1e-4, atol=1e-2)
    if run.way != "cuda":
        text = run.kernel(body, outs).lower(x, y).as_text("graph")
        found = re.findall(r"\bwgmma_wait \{n = (\d)\}(?=.*\n *yield)", text)
        assert found == [str(waits or 0)]
        assert text.count("wgmma_wait {") == 1 + (waits is not None)


BYTES = {name: getattr(L, name) for name in ("WGMMA", "WGMMA_8BIT", "WGMMA_UPCAST_2X")}
BYTES["WGMMA_UPCAST_4X"] = L.WGMMA_UPCAST_4X


@pytest.mark.parametrize("start", BYTES)
def test_casts_of_bytes(run, rng, start):
    """Bytes go from each of these layouts to each other by words, in parts of words and whole."""
    others = [b for name, b in BYTES.items() if name != start]
    x = values(rng, (128, 96), I8)

    def body(x_ref, *outs):
        v = plgpu.load(x_ref, layout=BYTES[start], optimized=False)
        for out, layout in zip(outs, others, strict=True):
            out[...] = plgpu.layout_cast(lax.optimization_barrier(v), layout)

    outs = tuple(plgpu.ShapeDtypeStruct(x.shape, I8) for _ in others)
    for got in run(body, outs, x):
        np.testing.assert_array_equal(got, x)


# ---- what is refused -----------------------------------------------------------------------------


def refused(kernel, a, b, acc, shapes=((64, 64), (64, 64), (64, 64))):
    outs = plgpu.ShapeDtypeStruct(shapes[2], acc)
    return plgpu.kernel(kernel, out_type=outs, interpret=True).lower(
        np.zeros(shapes[0], a), np.zeros(shapes[1], b)
    )


def plain_product(a, b, acc, registers=False, n=64, b_is_transposed=True):
    def body(a_ref, b_ref, out):
        def accumulate(c):
            plgpu.wgmma(
                c, a_ref[...] if registers else a_ref, b_ref.T if b_is_transposed else b_ref
            )
            return c[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((64, n), acc))

    kernel = staged(
        body, plgpu.SMEM((64, 64), a), plgpu.SMEM((n, 64) if b_is_transposed else (64, n), b)
    )
    shape = (n, 64) if b_is_transposed else (64, n)
    return lambda: refused(kernel, a, b, acc, ((64, 64), shape, (64, n)))


def plain_mma(a, b, acc, shapes=((64, 64), (64, 64), (64, 64))):
    def body(a_ref, b_ref, out):
        out[...] = plgpu.mma(jnp.zeros(shapes[2], acc), a_ref[...], b_ref[...])

    return lambda: refused(body, a, b, acc, shapes)


def a_transposed():
    def body(a_ref, b_ref, out):
        def accumulate(c):
            plgpu.wgmma(c, a_ref.T, b_ref.T)
            return c[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((64, 64)))

    kernel = staged(body, plgpu.SMEM((64, 64), E4M3), plgpu.SMEM((64, 64), E4M3))
    return refused(kernel, E4M3, E4M3, F32)


REFUSED = {
    "b along N": (
        ValueError,
        "Keep it in SMEM as",
        plain_product(E4M3, E4M3, F32, b_is_transposed=False),
    ),
    "b of int8 along N": (ValueError, "b.T", plain_product(I8, I8, I32, b_is_transposed=False)),
    "b of f32 along N": (ValueError, "b.T", plain_product(F32, F32, F32, b_is_transposed=False)),
    "a along M": (ValueError, "a is contiguous along M", a_transposed),
    "types differ": (ValueError, "must be equal", plain_product(E4M3, I8, F32)),
    "f16 and bf16": (ValueError, "must be equal", plain_product(F16, BF16, F32)),
    "fp8 into int32": (NotImplementedError, "float32 accumulator", plain_product(E4M3, E4M3, I32)),
    "int8 into f32": (NotImplementedError, "int32 accumulator", plain_product(I8, I8, F32)),
    "int32": (NotImplementedError, "available are float16", plain_product(I32, I32, I32)),
    "N of integers": (ValueError, "multiple of 16", plain_product(I8, I8, I32, n=40)),
    "mma types differ": (TypeError, "must be equal", plain_mma(F16, BF16, F32)),
    "mma of int16": (NotImplementedError, "available are", plain_mma(np.int16, np.int16, I32)),
    "mma into f16": (NotImplementedError, "float32 accumulator", plain_mma(F16, F16, F16)),
    "mma of int8 into f32": (NotImplementedError, "int32", plain_mma(I8, I8, F32)),
    "mma M": (ValueError, "multiple of 64", plain_mma(F16, F16, F32, ((32, 16), (16, 8), (32, 8)))),
    "mma K": (ValueError, "multiple of 32", plain_mma(I8, I8, I32, ((64, 16), (16, 8), (64, 8)))),
    "mma shapes": (ValueError, r"\(M, N\)", plain_mma(I8, I8, I32, ((64, 32), (64, 8), (64, 8)))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    """What the tensor cores do not take names the operand and what to do."""
    error, text, call = REFUSED[what]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("form", ["rows", "columns", "stored"])
def test_what_is_written_before_several_statements(run, rng, form):
    """Zeros and stored values stay in front of the first one: nothing waits between them, which
    NVRTC would remark."""
    m, n, k = (64, 256, 64) if form == "columns" else (128, 72, 128)
    x, y = (rng.integers(-4, 5, (s, k)).astype(np.float16) for s in (m, n))

    def body(x_ref, y_ref, o_ref, a, b, bar):
        plgpu.copy_gmem_to_smem(x_ref, a, bar)
        plgpu.copy_gmem_to_smem(y_ref, b, bar)
        plgpu.barrier_wait(bar)

        def products(acc):
            if form == "stored":
                acc[...] = jnp.full((m, n), 3.0)
            if form == "columns":
                for half in (slice(0, 128), slice(128, 256)):
                    plgpu.wgmma(acc.at[:, half], a, b.at[half].T)
            else:
                plgpu.wgmma(acc, a, b.T)

        o_ref[...] = pl.run_state(products)(plgpu.ACC.init(jnp.zeros((m, n))))

    want = x.astype(np.float32) @ y.astype(np.float32).T + 3 * (form == "stored")
    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.SMEM(y.shape, y.dtype), plgpu.Barrier(2)]
    np.testing.assert_array_equal(run(body, want, x, y, scratch_types=scratch), want)


@pytest.mark.covering(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("k, n", [(16, 16), (64, 48), (32, 128), (64, 24)])
def test_right_operand_of_mma_from_smem(run, rng, dtype, k, n, transposed):
    """Loaded as matrices, from rows or from columns; 24 columns, by elements."""
    a = rng.standard_normal((64, k)).astype(dtype)
    b = rng.standard_normal((n, k) if transposed else (k, n)).astype(dtype)

    def body(a_ref, b_ref, o_ref, s_ref):
        s_ref[...] = b_ref[...]
        right = plgpu.load(s_ref.T if transposed else s_ref, layout=plgpu.Layout.MMA_RHS(dtype))
        left = plgpu.load(a_ref, layout=plgpu.Layout.MMA_LHS(dtype))
        acc = plgpu.layout_cast(jnp.zeros((64, n), np.float32), plgpu.Layout.WGMMA)
        o_ref[...] = plgpu.mma(acc, left, right)

    out, scratch = np.zeros((64, n), np.float32), [plgpu.SMEM(b.shape, dtype)]
    text = run.kernel(body, out, scratch_types=scratch).lower(a, b).as_text("cuda")
    text = text[text.index('extern "C"') :]
    assert ("ldmatrix_x4_trans(" in text) == (not transposed and n % 16 == 0)
    assert ("ldmatrix_x4(" in text) == (transposed and n % 16 == 0)
    wide = [x.astype(np.float32) for x in (a, b)]
    want = wide[0] @ (wide[1].T if transposed else wide[1])
    got = run(body, out, a, b, scratch_types=scratch)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("m", [5, 16, 40, 64])
def test_few_rows_stay_in_registers(run, rng, m):
    """Rows that are missing to 64 are filled with zeros in the lanes that would hold them: in a
    loop of two products nothing goes through shared memory but what wgmma reads."""
    steps, n, d = 3, 32, 48
    q = rng.standard_normal((m, d)).astype(np.float16)
    k = rng.standard_normal((steps * n, d)).astype(np.float16)

    def body(q_ref, k_ref, o_ref):
        a = q_ref[...]

        def step(j, total):
            part = k_ref[pl.ds(j * n, n)]
            s = jnp.dot(a, part.T, preferred_element_type=jnp.float32)
            return total + jnp.dot(s.astype(jnp.float16), part, preferred_element_type=jnp.float32)

        o_ref[...] = lax.fori_loop(0, steps, step, jnp.zeros((m, d), jnp.float32))

    out = plgpu.ShapeDtypeStruct((m, d), np.float32)
    text = plgpu.kernel(body, out_type=out).lower(q, k).as_text("cuda")
    assert "through shared memory" not in text
    q32, k32 = q.astype(np.float32), k.astype(np.float32)
    want = ((q32 @ k32.T).astype(np.float16)).astype(np.float32) @ k32
    got = run(body, np.zeros((m, d), np.float32), q, k)
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())


def test_transposed_operands_go_through_matrices(run, rng):
    """P^T of a product as the left operand of the next: stmatrix and ldmatrix, no element by
    itself, and no two rows of scratch that begin in one bank."""
    x, y = rng.standard_normal((2, 64, 64)).astype(np.float16)

    def body(x_ref, y_ref, o_ref):
        p = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
        o_ref[...] = jnp.dot(
            p.astype(jnp.float16).T, y_ref[...], preferred_element_type=jnp.float32
        )

    out = plgpu.ShapeDtypeStruct((64, 64), np.float32)
    text = plgpu.kernel(body, out_type=out).lower(x, y).as_text("cuda")
    moved = text[text.index("layout_cast, through shared memory") :]
    assert "stmatrix_x4_trans(" in moved and "ldmatrix_x4(" in moved and "% 8 * 144" in moved
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    want = (x32 @ y32).astype(np.float16).astype(np.float32).T @ y32
    got = run(body, np.zeros((64, 64), np.float32), x, y)
    np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())


def test_loops_one_after_the_other_share_what_was_staged(run, rng):
    """Each loop stages its operands; the second one's lie where the first one's were."""
    x = rng.standard_normal((64, 64)).astype(np.float16)
    a, b = rng.standard_normal((2, 256, 64)).astype(np.float16)

    def kernel_of(loops):
        def body(x_ref, a_ref, b_ref, o_ref):
            mine = x_ref[...]
            total = jnp.zeros((64, 64), jnp.float32)
            for ref in (a_ref, b_ref)[:loops]:

                def step(j, c, ref=ref):
                    rows = ref[pl.ds(j * 64, 64)]
                    return c + jnp.dot(mine, rows, preferred_element_type=jnp.float32)

                total = lax.fori_loop(0, 4, step, total)
            o_ref[...] = total

        return body

    out = plgpu.ShapeDtypeStruct((64, 64), np.float32)
    one, two = (
        plgpu.kernel(kernel_of(n), out_type=out).lower(x, a, b).resources()["smem_bytes"]
        for n in (1, 2)
    )
    assert one <= two <= one + 64  # barriers
    x32 = x.astype(np.float32)
    want = sum(x32 @ y[i : i + 64].astype(np.float32) for y in (a, b) for i in range(0, 256, 64))
    got = run(kernel_of(2), np.zeros((64, 64), np.float32), x, a, b)
    np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("branch", [False, True])
def test_the_next_a_is_computed_while_products_read_this_one(run, rng, branch):
    """A loop carries A in registers, and what it has in the next iteration comes before the wait:
    the compiler must not compute it into the registers that products in flight read."""
    steps, k = 6, 128

    def kernel(a, b, out, b_smem, barrier):
        plgpu.copy_gmem_to_smem(b, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def of_step(i):
            x = plgpu.load(a.at[i], layout=L.WGMMA, optimized=False)
            return (x.astype(F32) * 2).astype(BF16)

        def accumulate(acc):
            def step(i, x):
                plgpu.wgmma(acc, x, b_smem)
                if branch:
                    x = lax.cond(i + 1 < steps, lambda: of_step(i + 1), lambda: x)
                else:
                    x = of_step(jnp.minimum(i + 1, steps - 1))
                plgpu.wgmma_wait(0)
                return x

            lax.fori_loop(0, steps, step, of_step(0))
            return acc[...]

        out[...] = pl.run_scoped(accumulate, plgpu.ACC((64, 64), F32))

    a, b = values(rng, (steps, 64, k), I8), values(rng, (k, 64), BF16)
    tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    scratch = [plgpu.SMEM((k, 64), BF16, transforms=tiled), plgpu.Barrier()]
    got = run(kernel, np.zeros((64, 64), F32), a, b, scratch_types=scratch)
    close(got, np.concatenate(list(2.0 * a), 1), np.concatenate([b] * steps), 2**-9)
    if run.way == "host":
        out = plgpu.ShapeDtypeStruct(got.shape, F32)
        low = plgpu.kernel(kernel, out_type=out, scratch_types=scratch).lower(a, b, target="sm_90a")
        ptx = low.as_text("ptx")
        begin = ptx.index("wgmma.mma_async")
        flight = ptx[begin : ptx.index("wgmma.wait_group", begin)]
        read = set(re.findall(r"%r\d+", " ".join(re.findall(r"\{(%r[^}]*)\}, mb", flight))))
        written = set(re.findall(r"^\s+\w[\w.]*\s+(%r\d+),", flight, re.M))
        assert read and written and not read & written


def awaited_branch(acc, a, b):
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)
    return lax.cond(jnp.max(b[...]) > 100, lambda: acc[...] * 0, lambda: acc[...])


def awaited_in_a_branch(acc, a, b):
    plgpu.wgmma(acc, a, b)
    pl.when(jnp.max(b[...]) > 100)(lambda: plgpu.wgmma_wait(0))
    return acc[...]


def awaited_before(acc, a, b):
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)
    plgpu.wgmma(acc, a, b)
    return acc[...] / 2


def awaited_in_a_loop(acc, a, b):
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)

    def step(_, total):
        total = total + acc[...]
        plgpu.wgmma(acc, a, b)
        return total

    total = plgpu.layout_cast(jnp.zeros((64, 64), F32), L.WGMMA)
    total = lax.fori_loop(0, 2, step, total)
    plgpu.wgmma_wait(0)
    return total / 3


def awaited_in_each_iteration(acc, a, b):
    def step(k, _):
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    lax.fori_loop(0, 4, step, None)
    return acc[...] / 4


def multiplied_in_branches(acc, a, b):
    def awaited():
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    lax.cond(jnp.max(b[...]) > 100, awaited, lambda: plgpu.wgmma(acc, a, b))
    return acc[...]


def read_twice(acc, a, b):
    plgpu.wgmma(acc, a, b)
    return (acc[...] + acc[...]) / 2


@pytest.mark.parametrize(
    "body, waits",
    [
        (awaited_branch, 1),
        (awaited_in_a_branch, 2),
        (awaited_before, 2),
        (awaited_in_a_loop, 3),
        (awaited_in_each_iteration, 1),
        (multiplied_in_branches, 2),
        (read_twice, 1),
    ],
)
def test_products_are_awaited_once(run, rng, body, waits):
    """Reading an accumulator waits for its products, unless a wait before has done so for sure."""
    a, b = values(rng, (64, 64), F16), values(rng, (64, 64), F16)
    out = np.zeros((64, 64), F32)

    def kernel(a_smem, b_smem, o_ref):
        o_ref[...] = pl.run_scoped(lambda acc: body(acc, a_smem, b_smem), plgpu.ACC((64, 64)))

    kernel = staged(kernel, plgpu.SMEM((64, 64), F16), plgpu.SMEM((64, 64), F16))
    close(run(kernel, out, a, b), a, b, 2**-12)
    low = plgpu.kernel(kernel, out_type=plgpu.ShapeDtypeStruct((64, 64), F32)).lower(
        a, b, target="sm_90a"
    )
    text = low.as_text("cuda")
    assert text.count("wgmma_wait<", text.index("__global__")) == waits
