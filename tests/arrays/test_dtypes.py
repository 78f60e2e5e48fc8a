"""Conversions among all dtypes, exhaustive from those of 16 bits and fewer; floats of 8 bits in
memory, copies and comparisons; what is refused; dtype functions of the host."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp

INTS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
FLOAT4 = "float4_e2m1fn"
FLOATS = (FLOAT4, *FLOAT8, "float16", "bfloat16", "float32")
INT4 = ("int4", "uint4")
INT2 = ("int2", "uint2")
SMALL_INTS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}  # bits
ALL = ("bool", *INTS, *SMALL_INTS, *FLOATS)
GREATEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float8_e8m0fnu": 2.0**127}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def as_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def every(name):
    """All numbers of a dtype, or edges and random ones of it."""
    dtype = as_dtype(name)
    if dtype.itemsize == 4:
        rng = np.random.default_rng(4)
        bits = rng.integers(0, 1 << 32, 3000, dtype=np.uint32)
        if name == "float32":  # those that the others can hold, and halfway between them
            near = rng.integers(0x2F000000, 0x50000000, 3000, dtype=np.uint32) & 0xFFF80000
            extra = np.array([448, 449, 464, 465, 57344, 61440, 65504, 65520, 1e9, 2.0**31,
                              2.0**32, -2.0**31, 0.5, 0, -0.0, np.inf, -np.inf, np.nan, 1e-40,
                              2.0**-127, 6e-39, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 2.0**-17],
                             np.float32).view(np.uint32)  # fmt: skip
            bits = np.concatenate([bits, near, near | 0x80000000, extra])
        bits = np.concatenate([bits, np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)])
        return bits[: len(bits) // 64 * 64].view(dtype)
    if name == "bool":
        return np.array([False, True] * 32)
    if name == FLOAT4:
        return np.resize(np.arange(16).astype(np.uint8).view(dtype), 512)
    if name in SMALL_INTS:
        return np.resize(converted(np.arange(16), name), 512)
    words = {1: np.uint8, 2: np.uint16}[dtype.itemsize]
    return np.arange(1 << 8 * dtype.itemsize).astype(words).view(dtype)


def converted(x, to):
    """What `x.astype(to)` gives in a kernel, by NumPy and ml_dtypes."""
    dtype, is_float = as_dtype(to), x.dtype.name in FLOATS
    if to == "bool":
        return x.astype(np.float64) != 0
    if is_float and to in (*INTS, *SMALL_INTS):
        info, wide = ml_dtypes.iinfo(dtype), x.astype(np.float64)
        whole = np.where(np.isnan(wide), 0, np.trunc(wide))
        return np.clip(whole, info.min, info.max).astype(np.int64).astype(dtype)
    if to in INTS:
        return x.astype(np.int64).astype(dtype)
    if to in SMALL_INTS:
        n = 1 << SMALL_INTS[to]
        low = x.astype(np.int64) & n - 1
        return (low if to[0] == "u" else low - n * (low >= n // 2)).astype(dtype)
    if to == FLOAT4:
        wide = np.nan_to_num(x.astype(np.float32), nan=6)
        return np.clip(wide, -6, 6).astype(dtype)
    if to in FLOAT8:
        wide = x.astype(np.float32)
        if to == "float8_e8m0fnu":
            low, high = np.float32(2.0**-127), np.float32(2.0**127)
            mantissa, exponent = np.frexp(np.clip(wide, low, high).astype(np.float64))
            up = np.ldexp(1.0, exponent - (mantissa == 0.5))
            return np.where(wide >= 0, np.clip(up, low, high), np.nan).astype(dtype)
        return np.clip(wide, -GREATEST[to], GREATEST[to]).astype(dtype)
    if to == "bfloat16" and not is_float:  # once, not by way of float32
        wide = x.astype(np.float64)
        m, e = np.frexp(wide)
        return np.ldexp(np.rint(m * 256), e - 8).astype(np.float32).astype(dtype)
    return x.astype(np.float64).astype(np.float32).astype(dtype)


def assert_same(got, want):
    """Equal numbers and signs, NaN where NaN is expected."""
    assert got.dtype == want.dtype
    if got.dtype.name not in FLOATS:
        np.testing.assert_array_equal(got, want)
        return
    got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    ok = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[ok]), np.signbit(want[ok]))


@pytest.mark.parametrize("source", ALL)
def test_conversions(run, source):
    """Every number of 8 and 16 bits to every dtype; rounding, saturation, NaN."""
    x = every(source)
    n = len(x) // 16 if len(x) < 30000 else len(x) // 64
    targets = [t for t in ALL if t != source]

    def body(x_ref, *out_refs):
        part = pl.ds(lax.axis_index("i") * n, n)
        for t, out_ref in zip(targets, out_refs, strict=True):
            out_ref[part] = x_ref[part].astype(t)

    outs = [np.zeros(x.shape, as_dtype(t)) for t in targets]
    got = run(body, tuple(outs), x, grid=(len(x) // n,), grid_names=("i",))
    for t, y in zip(targets, got, strict=True):
        assert_same(y, converted(x, t))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("shape", [(1,), (7,), (1000,), (33, 48), (3, 5, 7)], ids=str)
def test_memory(run, rng, dtype, shape):
    """Loads, stores and scalars keep bits; select, comparisons, constants."""
    words = np.resize(rng.permutation(256).astype(np.uint8), shape)
    x, y = words.view(as_dtype(dtype)), np.roll(words, 1).view(as_dtype(dtype))

    def body(x_ref, y_ref, copy_ref, bits_ref, chosen_ref, eq_ref, ne_ref, full_ref, back_ref):
        x, y = x_ref[...], y_ref[...]
        copy_ref[...] = x
        bits_ref[...] = lax.bitcast_convert_type(x, jnp.uint8)
        chosen_ref[...] = jnp.where(x == y, x, y)
        eq_ref[...], ne_ref[...] = x == y, x != y
        full_ref[...] = jnp.full(shape, 2.0, dtype)
        back_ref[...] = lax.bitcast_convert_type(lax.bitcast_convert_type(x, "int8"), dtype)

    flag = np.zeros(shape, bool)
    got = run(body, (x, words, x, flag, flag, x, x), x, y)
    np.testing.assert_array_equal(got[0].view(np.uint8), words)
    np.testing.assert_array_equal(got[1], words)
    np.testing.assert_array_equal(got[2].view(np.uint8), np.where(x == y, x, y).view(np.uint8))
    np.testing.assert_array_equal(got[3], x == y)
    np.testing.assert_array_equal(got[4], x != y)
    assert np.all(got[5].astype(np.float32) == 2)
    np.testing.assert_array_equal(got[6].view(np.uint8), words)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_copies(run, rng, dtype):
    """Through tiled SMEM by TMA, and through plain SMEM at an odd width."""
    for shape, transforms in [
        ((64, 128), (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))),
        ((16, 33), ()),
    ]:
        words = rng.integers(0, 256, shape).astype(np.uint8)
        words[words == 127] = 0
        x = words.view(as_dtype(dtype))

        def body(x_ref, o_ref, smem, barrier):
            plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
            plgpu.barrier_wait(barrier)
            smem[...] = smem[...].astype(jnp.float32).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, o_ref)
            plgpu.wait_smem_to_gmem(0)

        smem = plgpu.SMEM(shape, as_dtype(dtype), transforms=transforms)
        got = run(body, x, x, scratch_types=[smem, plgpu.Barrier()])
        assert_same(got, x if dtype != "float8_e5m2" else converted(x.astype(np.float32), dtype))


@pytest.mark.parametrize("dtype,shape", [
    *((d, s) for d in INT4 for s in ((2,), (6,), (256,), (1000,), (3, 34), (2, 3, 10), (64, 128))),
    *((d, s) for d in INT2 for s in ((4,), (12,), (1000,), (3, 36), (2, 3, 20), (64, 128)))],
                         ids=str)  # fmt: skip
def test_small_integers(run, rng, dtype, shape):
    """Loads, bitwise functions, choices and stores of what shares bytes, at any row of whole
    bytes."""
    x, y = (converted(rng.integers(0, 16, shape), dtype) for _ in range(2))

    def body(x_ref, y_ref, f_ref, bits_ref, chosen_ref, full_ref, zeros_ref, other_ref, eq_ref):
        x, y = x_ref[...], y_ref[...]
        f_ref[...] = x.astype(jnp.float32)
        bits_ref[...] = (x & ~y) ^ one
        chosen_ref[...] = jnp.where(y.astype(jnp.int32) > 0, x, y)
        full_ref[...] = jnp.full(shape, one, dtype)
        zeros_ref[...] = lax.clz(x).astype(jnp.int8)
        other_ref[...] = lax.bitcast_convert_type(x, other.name)
        eq_ref[...] = x == y

    bits, one = SMALL_INTS[dtype], 5 if dtype in INT4 else 1
    other = as_dtype(dtype[1:] if dtype[0] == "u" else f"u{dtype}")
    outs = (np.zeros(shape, np.float32), x, x, x, np.zeros(shape, np.int8), np.zeros(shape, other))
    got = run(body, (*outs, np.zeros(shape, bool)), x, y)
    a, b = x.astype(int), y.astype(int)
    np.testing.assert_array_equal(got[0], a)
    assert_same(got[1], converted((a & ~b) ^ one, dtype))
    assert_same(got[2], np.where(b > 0, x, y))
    assert_same(got[3], np.full(shape, one).astype(x.dtype))
    zeros = converted(np.array([bits - k.bit_length() for k in range(1 << bits)]), dtype)
    np.testing.assert_array_equal(got[4], zeros.astype(int)[a & (1 << bits) - 1])
    assert_same(got[5], converted(a, other.name))
    np.testing.assert_array_equal(got[6], a == b)


def test_small_integers_in_parts(run, rng):
    """Slices at even places, static, traced and in loops; views; SMEM, tiled and not, by TMA."""
    x = rng.integers(-8, 8, (64, 512)).astype(ml_dtypes.int4)
    tiled = (plgpu.TilingTransform((8, 256)), plgpu.SwizzleTransform(128))

    def body(x_ref, part_ref, row_ref, sum_ref, copy_ref, w_ref, plain, swizzled, barrier):
        part_ref[...] = x_ref[3:7, 10:30].astype(jnp.int8)
        k = lax.axis_index("i")
        row_ref[...] = x_ref.at[2 * k + 1].reshape(8, 64)[1:3].astype(jnp.int32)

        def add(j, total):
            start = pl.multiple_of(j * 64, 64)
            return total + x_ref[:, pl.ds(start, 64)].astype(jnp.float32)

        sum_ref[...] = lax.fori_loop(0, 8, add, jnp.zeros((64, 64)))
        plgpu.copy_gmem_to_smem(x_ref, swizzled, barrier)
        plgpu.barrier_wait(barrier)
        plain[...] = swizzled[:, 256:]
        x = plgpu.layout_cast(plain[...], plgpu.Layout.WGMMA)
        w_ref[...] = x.astype(jnp.bfloat16)
        swizzled[:, 256:] = (x.astype(jnp.int32) + 3).astype(jnp.int4)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(swizzled, copy_ref)
        plgpu.wait_smem_to_gmem(0)

    outs = (
        np.zeros((4, 20), np.int8),
        np.zeros((2, 64), np.int32),
        np.zeros((64, 64), np.float32),
        x,
        np.zeros((64, 256), ml_dtypes.bfloat16),
    )
    scratch = [
        plgpu.SMEM((64, 256), "int4"),
        plgpu.SMEM((64, 512), "int4", transforms=tiled),
        plgpu.Barrier(),
    ]
    part, row, total, copy, wide = run(
        body, outs, x, scratch_types=scratch, grid=(1,), grid_names=("i",)
    )
    a = x.astype(np.int64)
    np.testing.assert_array_equal(part, a[3:7, 10:30])
    np.testing.assert_array_equal(row, a[1].reshape(8, 64)[1:3])
    np.testing.assert_array_equal(total, a.reshape(64, 8, 64).sum(1))
    np.testing.assert_array_equal(wide.astype(np.float32), a[:, 256:])
    a[:, 256:] = (a[:, 256:] + 3 + 8) % 16 - 8
    np.testing.assert_array_equal(copy.astype(np.int64), a)


def test_product_of_small_integers(run, rng):
    """4-bit blocks of a pipeline, widened in registers where wgmma wants them: nothing moves
    between lanes (that would warn)."""
    x = rng.integers(-8, 8, (128, 256)).astype(ml_dtypes.int4)
    y = rng.standard_normal((256, 64)).astype(ml_dtypes.bfloat16)

    def body(x_ref, y_ref, o_ref):
        i = lax.axis_index("i")

        def product(acc):
            def step(_, x_block, y_block):
                plgpu.wgmma(acc, x_block[...].astype(jnp.bfloat16), y_block)
                plgpu.wgmma_wait(0)

            specs = [
                plgpu.BlockSpec((64, 64), lambda k: (i, k)),
                plgpu.BlockSpec((64, 64), lambda k: (k, 0)),
            ]
            plgpu.emit_pipeline(step, grid=(4,), in_specs=specs, max_concurrent_steps=2)(
                x_ref, y_ref
            )
            return acc[...]

        o_ref[pl.ds(i * 64, 64)] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))

    out = np.zeros((128, 64), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(body, out, x, y, grid=(2,), grid_names=("i",))
    want = x.astype(np.float64) @ y.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_printing_small_dtypes(capsys):
    """Scalars and arrays, by the interpreter."""

    def body(x_ref, y_ref, o_ref):
        pl.debug_print("x {}", x_ref[0])
        pl.debug_print("y {}", y_ref[...])
        o_ref[...] = x_ref[...]

    x = np.array([96, 1.625], ml_dtypes.float8_e4m3fn)
    y = np.array([-8, 7], ml_dtypes.int4)
    out = plgpu.ShapeDtypeStruct((2,), x.dtype)
    plgpu.kernel(body, out_type=out, interpret=True)(x, y)
    assert capsys.readouterr().out == "x 96.0\ny [0]: -8\ny [1]: 7\n"


def test_transposed_refs_of_small_dtypes(run, rng):
    """Refs whose last dim is not the last in memory: loads and stores of all of them and of parts,
    in GMEM and SMEM, with traced starts, dims that go, and a layout that is asked for."""
    for name in (*SMALL_INTS, FLOAT4):
        x = rng.integers(0, 16, (4, 32, 64)).astype(np.uint8)
        x = converted(x, name) if name in SMALL_INTS else x.view(as_dtype(name))

        def body(x_ref, n_ref, all_ref, part_ref, row_ref, back_ref, laid_ref, tile):
            y = plgpu.transpose_ref(x_ref, (2, 0, 1))
            all_ref[...] = y[...].astype(jnp.float32)
            start = pl.multiple_of(n_ref[0] * 4, 4)
            part = y.at[pl.ds(start, 32), 1:3, pl.ds(n_ref[0], 16)]
            part_ref[...] = plgpu.transpose_ref(part, (2, 0, 1))[...].astype(jnp.float32)
            row_ref[...] = y.at[8:40, n_ref[0]].at[:, 3][...].astype(jnp.float32)
            tile[...] = x_ref[1]
            transposed = plgpu.transpose_ref(back_ref, (1, 2, 0))
            transposed[:, 0:32, 0] = x_ref[0, :, 0:32]
            transposed[:, 32:64, 0] = x_ref[0, :, 32:64]
            transposed[:, :, 1] = tile.T[...].T
            laid = plgpu.load(x_ref.at[2].T, layout=plgpu.Layout.WGMMA)
            laid_ref[...] = laid.astype(jnp.float32)

        f32 = np.float32
        outs = [np.zeros(s, f32) for s in ((64, 4, 32), (16, 32, 2), (32,))]
        back = np.zeros((2, 32, 64), x.dtype)
        got = run(
            body,
            (*outs, back, np.zeros((64, 32), f32)),
            x,
            np.array([3], np.int32),
            scratch_types=[plgpu.SMEM((32, 64), x.dtype)],
        )
        y = x.astype(f32).transpose(2, 0, 1)
        np.testing.assert_array_equal(got[0], y)
        np.testing.assert_array_equal(got[1], y[12:44, 1:3, 3:19].transpose(2, 0, 1))
        np.testing.assert_array_equal(got[2], y[8:40, 3, 3])
        np.testing.assert_array_equal(got[3].astype(f32), x[:2].astype(f32))
        np.testing.assert_array_equal(got[4], y[:, 2])


def test_two_bits_in_parts(run, rng):
    """Slices at whole bytes, static and traced; SMEM by TMA; bits by loops; layouts."""
    for name in INT2:
        x = converted(rng.integers(0, 4, (64, 256)), name)

        def body(x_ref, n_ref, slice_ref, tma_ref, loop_ref, laid_ref, tile, ready):
            start = pl.multiple_of(n_ref[0] * 4, 4)
            slice_ref[...] = x_ref[pl.ds(n_ref[0], 32), pl.ds(start, 128)].astype(jnp.int32)
            plgpu.copy_gmem_to_smem(x_ref, tile, ready)
            plgpu.barrier_wait(ready)
            tma_ref[...] = tile[:, 128:]
            v = x_ref[:, 0:64]
            loop_ref[...] = lax.fori_loop(0, 3, lambda i, c: ~(c ^ v), v)
            laid = plgpu.load(x_ref.at[:, 0:128], layout=plgpu.Layout.WGMMA)
            laid_ref[...] = laid.astype(jnp.bfloat16).astype(jnp.float32)

        outs = [
            np.zeros((32, 128), np.int32),
            x[:, 128:].copy(),
            x[:, :64].copy(),
            np.zeros((64, 128), np.float32),
        ]
        scratch = [plgpu.SMEM((64, 256), x.dtype), plgpu.Barrier()]
        got = run(body, tuple(outs), x, np.array([5], np.int32), scratch_types=scratch)
        a = x.astype(np.int32)
        np.testing.assert_array_equal(got[0], a[5:37, 20:148])
        assert_same(got[1], x[:, 128:])
        assert_same(got[2], np.full((64, 64), -1 if name == "int2" else 3).astype(x.dtype))
        np.testing.assert_array_equal(got[3], a[:, :128])


def test_arithmetic_of_exponents(run):
    """float8_e8m0fnu: products, quotients and reciprocals are exact and saturate; sums round up to
    a power of two; NaN stays."""
    every_pair = np.arange(256, dtype=np.uint8)
    x, y = np.repeat(every_pair, 256), np.tile(every_pair, 256)
    e8m0 = as_dtype("float8_e8m0fnu")
    a, b = x.view(e8m0), y.view(e8m0)
    functions = {
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "laxdiv": lax.div,
        "min": jnp.minimum,
        "max": jnp.maximum,
        "add": lambda a, b: a + b,
        "reciprocal": lambda a, b: 1 / b,
        "numpy": lambda a, b: jnp.reciprocal(b),
        "approx": lambda a, b: pl.reciprocal(b, approx=True),
        "square": lambda a, b: a**2,
        "scaled": lambda a, b: a * 4,
    }

    def body(a_ref, b_ref, less_ref, at_least_ref, *out_refs):
        part = pl.ds(lax.axis_index("i") * 2048, 2048)
        a, b = a_ref[part], b_ref[part]
        less_ref[part], at_least_ref[part] = a < b, a >= b
        for f, out in zip(functions.values(), out_refs, strict=True):
            out[part] = f(a, b)

    flags = np.zeros(a.shape, bool)
    outs = (flags, flags, *[a] * len(functions))
    less, at_least, *got = run(body, outs, a, b, grid=(32,), grid_names=("i",))
    got = dict(zip(functions, (g.view(np.uint8).astype(int) for g in got)))
    p, q = x.astype(int), y.astype(int)
    nan = (p == 255) | (q == 255)

    def power(e, nan=nan):
        return np.where(nan, 255, np.clip(e, 0, 254))

    np.testing.assert_array_equal(less, ~nan & (p < q))
    np.testing.assert_array_equal(at_least, ~nan & (p >= q))
    np.testing.assert_array_equal(got["mul"], power(p + q - 127))
    np.testing.assert_array_equal(got["div"], power(p - q + 127))
    np.testing.assert_array_equal(got["laxdiv"], got["div"])
    np.testing.assert_array_equal(got["min"], power(np.minimum(p, q)))
    np.testing.assert_array_equal(got["max"], power(np.maximum(p, q)))
    np.testing.assert_array_equal(got["square"], power(2 * p - 127, p == 255))
    np.testing.assert_array_equal(got["scaled"], power(p + 2, p == 255))
    for name in ("reciprocal", "numpy", "approx"):
        np.testing.assert_array_equal(got[name], power(254 - q, q == 255))
    seen = np.maximum(p, q) - np.minimum(p, q) <= 23  # else the lesser one is rounded away
    np.testing.assert_array_equal(got["add"][seen], power(np.maximum(p, q) + 1)[seen])


def test_small_integers_refused():
    """What would cut a byte, and what 4 bits do not have."""

    def lower(f, shape=(64, 128), dtype="int4"):
        def body(x_ref, o_ref):
            f(x_ref)

        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((1,), "float32"), grid=(4,),
                     grid_names=("i",)).lower(plgpu.ShapeDtypeStruct(shape, dtype))  # fmt: skip

    def use(v):
        pl.debug_print("{}", v.astype(jnp.int32).sum())

    even = "must begin and end at multiples of 2"
    for what, f in [
        (even, lambda r: use(r[:, 1:3])),
        (even, lambda r: use(r[:, 0:3])),
        (even, lambda r: use(r[:, pl.ds(lax.axis_index("i"), 2)])),
        (even, lambda r: use(r[:, 5])),
        (even, lambda r: use(r[:, ::2])),
        ("accessed one by one", lambda r: use(pl.load(r, ..., mask=r[...] == r[...]))),
        ("scan of int4", lambda r: use(lax.cummax(r[...], axis=1))),
        ("and it is not last here", lambda r: use(r.T.reshape(128 * 64)[...])),
        (
            "and it is not last here",
            lambda r: pl.run_scoped(
                lambda s, b: plgpu.copy_gmem_to_smem(r.T, s, b),
                plgpu.SMEM((128, 64), "int4"),
                plgpu.Barrier(),
            ),
        ),
        (even, lambda r: use(r.T[5])),
        ("on 4-bit types are unsupported", lambda r: use(r[...] + 1)),
        ("on 4-bit types are unsupported", lambda r: use(r[...] < 1)),
        ("sum of int4.64,128.; convert", lambda r: r[...].sum()),
    ]:
        with pytest.raises(NotImplementedError, match=what):
            lower(f)
    with pytest.raises(NotImplementedError, match="size must be a multiple of 2"):
        lower(lambda r: use(r[...]), (4, 3))
    with pytest.raises(NotImplementedError, match="four elements .* must be a multiple of 4"):
        lower(lambda r: use(r[...]), (4, 6), "int2")
    with pytest.raises(NotImplementedError, match="on 2-bit types are unsupported"):
        lower(lambda r: use(r[...] + 1), dtype="uint2")
    with pytest.raises(plgpu.TypePromotionError, match="int4 and int8 have no"):
        lower(lambda r: r[...] & jnp.int8(3))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", FLOAT4])
def test_values_of_small_dtypes(run, rng, dtype):
    """Loops, branches, layout casts, reshapes, slices, broadcasts, iotas, any and all, swap."""
    shape = (64, 128)
    bits = rng.integers(0, 120 if dtype == "float8_e4m3fn" else 16, shape)
    x = converted(bits, "int4") if dtype == "int4" else bits.astype(np.uint8).view(as_dtype(dtype))

    def body(x_ref, loop_ref, branch_ref, cast_ref, fold_ref, part_ref, row_ref, iota_ref,
             any_ref, all_ref, swap_ref, smem):  # fmt: skip
        x = x_ref[...]
        if dtype != "float8_e4m3fn":
            twice = lax.bitcast_convert_type(lax.bitcast_convert_type(x, "int4"), "uint4")
            x = lax.bitcast_convert_type(twice, dtype)
        loop_ref[...] = lax.fori_loop(0, 3, lambda i, c: jnp.where(c == c, x, c), x)
        first = lax.axis_index("i") == 0
        branch_ref[...] = lax.cond(first, lambda: x, lambda: jnp.zeros(x.shape, x.dtype))
        strided = plgpu.Layout.WG_STRIDED(shape, 2)
        cast_ref[...] = plgpu.layout_cast(plgpu.layout_cast(x, plgpu.Layout.WGMMA), strided)
        fold_ref[...] = x.reshape(128, 64)
        part_ref[...] = x[:, 64:128]
        row_ref[...] = lax.broadcast_in_dim(x_ref[3], shape, (1,))
        iota_ref[...] = lax.broadcasted_iota(dtype, shape, 1)
        any_ref[...], all_ref[...] = jnp.any(x, axis=0), (x == x).all()
        smem[...] = x
        swap_ref[...] = smem.swap(x_ref[...])

    flags = np.zeros(128, bool), np.zeros((), bool)
    outs = (x, x, x, x.reshape(128, 64), x[:, 64:].copy(), x, x, *flags, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # casts through shared memory are meant
        got = run(
            body, outs, x, scratch_types=[plgpu.SMEM(shape, dtype)], grid=(1,), grid_names=("i",)
        )
    index = np.broadcast_to(np.arange(128), shape)
    wide = x.astype(np.float32)
    row = np.broadcast_to(x[3], shape)
    want = [x, x, x, outs[3], outs[4], row, converted(index, dtype), (wide != 0).any(0)]
    for have, reference in zip(got, [*want, np.array(True), x], strict=True):
        assert_same(have, np.asarray(reference))


def test_scalars_of_four_bits(run):
    """Arithmetic wraps; comparisons are of the wrapped numbers."""

    def body(x_ref, o_ref):
        a = x_ref[0].astype(jnp.int4)
        b = x_ref[1].astype(jnp.int4)
        found = (a + b, a * b, a - b, -a, a // b, a % b, jnp.maximum(a, b), a << 1, a >> 1, abs(b),
                 ~a, a < b, a == 21, jnp.int4(7) + a, x_ref[0].astype(jnp.uint4) - 7)  # fmt: skip
        for k, v in enumerate(found):
            o_ref[k] = v.astype(jnp.int32)

    got = run(body, np.zeros(15, np.int32), np.array([5, -6], np.int32))
    np.testing.assert_array_equal(got, [-1, 2, -5, -5, -1, -1, 5, -6, 2, 6, -6, 0, 1, -4, 14])


def test_scalars(run):
    """Arithmetic of 8-bit scalars, which arrays do not have; abs of arrays; sums in float32."""
    x = np.array([1.5, -2.5, 3, 0.25], ml_dtypes.float8_e4m3fn)
    y = np.array([2, 5, -7, 100], np.int8)

    def body(x_ref, y_ref, f_ref, i_ref, a_ref, s_ref):
        a, b = x_ref[0], x_ref[1]
        for k, v in enumerate((a + b, a * b, -a, a / b, a + 1, jnp.maximum(a, b), abs(b))):
            f_ref[k] = v
        i, j = y_ref[0], y_ref[2]
        for k, v in enumerate((i + j, i * j, -j, j // i, j % i, y_ref[3] + y_ref[3], i << 3)):
            i_ref[k] = v
        a_ref[...] = jnp.abs(x_ref[...])
        s_ref[...] = x_ref[...].sum()

    outs = np.zeros(7, x.dtype), np.zeros(7, np.int8), x, np.zeros((), x.dtype)
    f, i, a, s = run(body, outs, x, y)
    want = [-1, -3.75, -1.5, -0.6, 2.5, 1.5, 2.5]
    np.testing.assert_array_equal(f, np.array(want, np.float32).astype(x.dtype))
    np.testing.assert_array_equal(i, [-5, -14, 7, -4, 1, -56, 16])
    np.testing.assert_array_equal(a, np.abs(x))
    assert s == 2.25


def test_refused_on_arrays():
    """Pointwise arithmetic of 8-bit arrays, and pairs of dtypes that have no common one."""

    def trace(f, dtype, other=jnp.float32):
        def body(x_ref, y_ref, o_ref):
            f(x_ref[...], y_ref[...])

        shape = (128,)
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(shape, jnp.float32)).lower(
            plgpu.ShapeDtypeStruct(shape, dtype), plgpu.ShapeDtypeStruct(shape, other)
        )

    for dtype in FLOAT8:
        refused = [jnp.exp, lambda x: -x, jnp.sqrt, lambda x: x - x]
        if dtype != "float8_e8m0fnu":
            refused += [lambda x: x + 1, lambda x: x < 1, lambda x: x**2]
        for f in refused:
            with pytest.raises(NotImplementedError, match="on 8-bit types are unsupported"):
                trace(lambda x, y, f=f: f(x), dtype)
        for other in (jnp.float32, jnp.bfloat16, jnp.float16, FLOAT4, *FLOAT8):
            if other != dtype:
                with pytest.raises(plgpu.TypePromotionError, match="no available implicit dtype"):
                    trace(lambda x, y: x + y, dtype, other)
        with pytest.raises(ValueError, match=f"{dtype} and float32 have no .* x.astype"):
            trace(lambda x, y: jnp.where(x == x, x, y), dtype)
        with pytest.raises(TypeError, match="and does not accept"):
            trace(lambda x, y: x & x, dtype)
    with pytest.raises(NotImplementedError, match="on 4-bit types .* x.astype.jnp.float32"):
        trace(lambda x, y: x * 2, FLOAT4)
    for op in (jnp.add, jnp.left_shift, jnp.less, jnp.maximum):
        with pytest.raises(NotImplementedError, match="x.astype.jnp.int32"):
            trace(op, "int8", "int8")


def test_functions_of_the_host():
    for name in INT4:
        dtype = jnp.dtype(name)
        assert dtype == as_dtype(name) and getattr(jnp, name) == name and dtype.itemsize == 1
        assert jnp.itemsize_bits(name) == 4 and jnp.iinfo(dtype).bits == 4
        assert jnp.issubdtype(dtype, jnp.signedinteger) == (name == "int4")
        assert jnp.issubdtype(dtype, jnp.unsignedinteger) == (name == "uint4")
        assert jnp.result_type(dtype, 3) == dtype == jnp.promote_types("bool", dtype)
        for other in ("int8", "float32", "uint32", 1.5, *FLOAT8, *(set(INT4) - {name})):
            with pytest.raises(plgpu.TypePromotionError, match="no available implicit"):
                jnp.result_type(dtype, other if isinstance(other, float) else jnp.dtype(other))
    assert jnp.itemsize_bits(FLOAT4) == 4 and float(jnp.finfo(FLOAT4).max) == 6
    assert jnp.issubdtype(FLOAT4, jnp.floating) and jnp.promote_types(FLOAT4, "int8") == FLOAT4
    assert jnp.itemsize_bits(jnp.bfloat16) == 16 and jnp.itemsize_bits("bool") == 8
    for name in FLOAT8:
        dtype = jnp.dtype(name)
        assert dtype == as_dtype(name) and dtype.itemsize == 1 and dtype.name == name
        assert jnp.dtype(getattr(jnp, name)) == dtype and getattr(jnp, name) == name
        assert float(jnp.finfo(dtype).max) == GREATEST[name] and jnp.finfo(dtype).bits == 8
        assert jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer)
        assert jnp.promote_types(name, "int32") == dtype
        assert jnp.result_type(dtype, 1.5) == dtype
        with pytest.raises(plgpu.TypePromotionError, match="no available implicit"):
            jnp.promote_types(name, "float32")
        assert plgpu.ShapeDtypeStruct((2,), name) == plgpu.ShapeDtypeStruct((2,), dtype)
    assert jnp.issubdtype(jnp.bfloat16, jnp.floating) and jnp.issubdtype("uint8", jnp.integer)
    assert jnp.finfo(jnp.bfloat16).bits == 16 and jnp.iinfo(jnp.int8).min == -128
    with pytest.raises(TypeError, match="accepted are bool, int8.*float8_e4m3fn"):
        jnp.dtype("float8_e3m4")


# Functions that take a dtype, of an array x of 16 elements.
TAKE_DTYPE = {
    "astype": lambda x, d: x.astype(d),
    "view": lambda x, d: x.view(d),
    "jnp.astype": lambda x, d: jnp.astype(x, d),
    "convert_element_type": lambda x, d: lax.convert_element_type(x, new_dtype=d),
    "bitcast_convert_type": lambda x, d: lax.bitcast_convert_type(x, new_dtype=d),
    "array": lambda x, d: jnp.array(1, dtype=d),
    "asarray": lambda x, d: jnp.asarray(x, dtype=d),
    "full": lambda x, d: jnp.full((16,), 1, d),
    "lax.full": lambda x, d: lax.full((16,), 1, d),
    "full_like": lambda x, d: jnp.full_like(x, 1, dtype=d),
    "zeros": lambda x, d: jnp.zeros((16,), d),
    "ones_like": lambda x, d: jnp.ones_like(x, dtype=d),
    "arange": lambda x, d: jnp.arange(16, dtype=d),
    "linspace": lambda x, d: jnp.linspace(0, 1, 16, dtype=d),
    "iota": lambda x, d: lax.iota(d, 16),
    "broadcasted_iota": lambda x, d: lax.broadcasted_iota(d, (16, 2), 0),
    "eye": lambda x, d: jnp.eye(4, dtype=d),
    "indices": lambda x, d: jnp.indices((4,), dtype=d)[0],
    "one_hot": lambda x, d: nn.one_hot(x.astype(np.int32), 4, dtype=d),
    "concatenate": lambda x, d: jnp.concatenate([x, x], dtype=d),
    "stack": lambda x, d: jnp.stack([x, x], dtype=d),
    "sum": lambda x, d: jnp.sum(x, dtype=d),
    "mean": lambda x, d: x.mean(dtype=d),
    "nansum": lambda x, d: jnp.nansum(x, dtype=d),
    "cumsum": lambda x, d: jnp.cumsum(x, dtype=d),
    "trace": lambda x, d: jnp.trace(x.reshape(4, 4), dtype=d),
    "dot": lambda x, d: jnp.dot(x, x, preferred_element_type=d),
    "SMEM": lambda x, d: pl.run_scoped(lambda ref: ref[...], plgpu.SMEM((16,), d)),
}


@pytest.mark.parametrize("name", TAKE_DTYPE)
def test_spellings_of_a_dtype(name):
    found = []

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        for of in (np, ml_dtypes):
            kind = {np: "float16", ml_dtypes: "bfloat16"}[of]
            for d in (getattr(of, kind), kind, np.dtype(kind), getattr(jnp, kind)):
                found.append((kind, TAKE_DTYPE[name](x, d).dtype))
        o_ref[...] = x

    shape = plgpu.ShapeDtypeStruct((16,), jnp.float16)
    plgpu.kernel(kernel, out_type=shape).lower(shape)
    assert len(found) == 8 and all(got == kind for kind, got in found)
