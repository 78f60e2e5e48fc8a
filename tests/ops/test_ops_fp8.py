"""ops.matmul of 8-bit floats beside NumPy: forms of scales, types, orders of operands, odd extents.

Where operands are small whole numbers and scales powers of two, every sum fits in what the tensor
cores keep, so results are exact and a wrong element or scale shows. Random numbers are compared
within 2**-9 of the sum of magnitudes: the hardware keeps about 14 bits."""

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import nn
from pallas_mgpu.ops import FewRowsConfig, MatmulConfig, matmul
from pallas_mgpu.ops._matmul_choice import candidates, choose_k_major
from pallas_mgpu.ops._scaled import transposing

pytestmark = pytest.mark.covering(1, share=True)

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
UNIT = {F16: 2**-11, BF16: 2**-8, F32: 2**-23}  # of the rounding of a result


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Blocks do several tiles; no warnings."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def whole(rng, shape, dtype):
    return rng.integers(-3, 4, shape).astype(dtype)


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def powers(rng, shape):
    return np.asarray(np.exp2(rng.integers(-3, 4, shape)), F32)


def blocks_of(m, n, k):
    return (m, -(-k // 128)), (-(-n // 128), -(-k // 128))


def spread(scale, shape, transposed=False):
    """A number for each element of A (M, K), or of B (N, K), by the definition."""
    if scale is None or scale.size == 1:
        return np.full(shape, 1 if scale is None else scale.item())
    each = scale.size == shape[0] and not (
        scale.ndim == 2 and scale.shape[1] == -(-shape[1] // 128)
    )
    if each:
        return np.broadcast_to(scale.reshape(-1, 1), shape)
    rows = 128 if transposed else 1
    wide = np.repeat(np.repeat(scale, rows, 0), 128, 1)
    return wide[: shape[0], : shape[1]]


def reference(a, b, ta, tb, scale_a, scale_b):
    """float64, and the sum of magnitudes"""
    a, b = (a.T if ta else a).astype(np.float64), (b if tb else b.T).astype(np.float64)
    a, b = a * spread(scale_a, a.shape), b * spread(scale_b, b.shape, True)
    return a @ b.T, np.abs(a) @ np.abs(b).T


def product(run, a, b, **options):
    """`matmul`, step by step where it takes more than one kernel."""
    if run.way != "cuda":
        options["interpret"] = True
    f = matmul.kernel(a, b, **options)
    order = ("bias", "scale_a", "scale_b")
    arrays = [a, b, *(options[x] for x in order if options.get(x) is not None)]
    return by_steps(run.call, f, arrays)


def check(
    run,
    rng,
    m,
    n,
    k,
    scales=(None, None),
    *,
    dtypes=(E4M3, E4M3),
    ta=False,
    tb=True,
    values=whole,
    bias=None,
    activation=None,
    out_dtype=F32,
    config=None,
):
    a = values(rng, (k, m) if ta else (m, k), dtypes[0])
    b = values(rng, (n, k) if tb else (k, n), dtypes[1])
    scale_a, scale_b = (None if s is None else powers(rng, s) for s in scales)
    options = dict(transpose_a=ta, transpose_b=tb, scale_a=scale_a, scale_b=scale_b)
    if bias is not None:
        bias = options["bias"] = rng.integers(-9, 10, n).astype(bias)
    if config is not None:
        options["config"] = config
    if activation is not None:
        options["activation"] = activation
    if out_dtype is not None:
        options["out_dtype"] = out_dtype
    got = product(run, a, b, **options)
    want, magnitude = reference(a, b, ta, tb, scale_a, scale_b)
    if bias is not None:
        want = want + bias.astype(np.float64)
    if activation is not None:
        want = activation(want.astype(F32))
    assert got.shape == want.shape
    assert got.dtype == (BF16 if out_dtype is None else out_dtype)
    if values is whole and activation in (None, nn.relu):
        np.testing.assert_array_equal(got, want.astype(got.dtype))
    else:
        bound = 2**-9 * magnitude + 2 * UNIT[got.dtype] * np.abs(want) + 1e-6
        error = np.abs(got.astype(np.float64) - want)
        assert np.all(error <= bound), np.max(error / bound)


@pytest.mark.parametrize("a, b", list(itertools.product((E4M3, E5M2), repeat=2)), ids=str)
def test_types(run, rng, a, b):
    check(run, rng, 70, 40, 96, dtypes=(a, b))
    check(run, rng, 65, 72, 272, ((), ()), dtypes=(a, b), values=normal, out_dtype=None)


FORMS = {
    "one": ((), (1,)),
    "one of a": ((1, 1), None),
    "rows": ((70, 1), None),
    "columns": (None, (136,)),
    "rows and columns": ((70,), (1, 136)),
    "rows and one": ((70, 1), ()),
    "one and columns": ((1,), (1, 136)),
    "blocks": blocks_of(70, 136, 272),
}


@pytest.mark.parametrize("form", FORMS)
def test_scales(run, rng, form):
    """Each form, on several tiles of a block, ragged in all directions; the ring goes round."""
    config = MatmulConfig(1, 64, 2, 1, 1, 2, step=128)
    check(run, rng, 70, 136, 272, FORMS[form], config=config)


C, F = MatmulConfig, FewRowsConfig
CONFIGS = {  # extents, configuration, options
    "B is shared": ((140, 136, 144), C(1, 128, 2, 2, step=128), {"bias": F32}),
    "A is shared": ((40, 260, 144), C(1, 128, 0, 1, 2, 8, 2, step=128), {"bias": BF16}),
    "K in two": ((40, 72, 392), C(1, 128, 0, 1, 2, 8, 1, 2, 128), {"bias": F16}),
    "K in four, few rows": ((3, 40, 600), C(1, 64, 0, 1, 2, 8, 1, 4, 128), {}),
    "slices": ((70, 150, 700), C(1, 64, 0, 1, step=128, slices=3), {"bias": F32}),
    "slices, K in two": ((40, 72, 700), C(1, 128, 0, 1, 2, 8, 1, 2, 128, slices=2), {}),
    "two consumers": ((150, 150, 272), C(2, 128, 2, 1, step=128), {}),
    "three consumers": ((200, 40, 272), C(3, 32, 2, 1, step=128, lag=0), {}),
    "256 columns": ((150, 410, 400), C(2, 256, 2, 1, step=128), {"bias": F32}),
    "256 columns, B is shared": ((300, 136, 144), C(2, 256, 2, 2, 1, step=128), {}),
    "256 columns, A is shared": ((40, 530, 272), C(2, 256, 2, 1, 2, 8, 2, step=128), {}),
}


@pytest.mark.parametrize("swapped", [False, True])
def test_128_rows_of_a_consumer(run, rng, swapped):
    m, n, k = (75, 300, 272) if swapped else (300, 75, 272)
    config = C(2, 64, 2, 1, step=128, swapped=swapped, consumer_rows=128)
    check(run, rng, m, n, k, ((m, 1), (1, n)), config=config, bias=F32)
    with pytest.raises(ValueError, match="scales of blocks"):
        check(run, rng, m, n, k, blocks_of(m, n, k), config=config)


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("form", ["each", "blocks"])
def test_configurations(run, rng, case, form):
    """What blocks share and divide, beside scales that differ everywhere."""
    (m, n, k), config, options = CONFIGS[case]
    scales = blocks_of(m, n, k) if form == "blocks" else ((m, 1), (1, n))
    check(run, rng, m, n, k, scales, config=config, **options)


@pytest.mark.parametrize("step", [64, 256])
def test_other_steps(run, rng, step):
    config = C(1, 64, 2, 1, step=step, lag=int(step == 64))
    check(run, rng, 40, 72, 528, ((40,), None), dtypes=(E5M2, E4M3), config=config)


@pytest.mark.covering(2, share=True)
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 130), (33, 130, 17), (130, 1, 48)], ids=str)
def test_orders(run, rng, shape, ta, tb):
    """Operands that are transposed or padded, results that TMA cannot store."""
    check(run, rng, *shape, ((shape[0],), ()), dtypes=(E5M2, E4M3), ta=ta, tb=tb)


def test_orders_with_blocks(run, rng):
    """Scales of blocks do not change their shapes with the order of the operands."""
    m, n, k = 40, 136, 272
    check(run, rng, m, n, k, blocks_of(m, n, k), ta=True, tb=False)


@pytest.mark.parametrize("k", [100, 256])
def test_few_blocks(run, rng, k):
    """One step, and one pair of steps; and in turns."""
    check(run, rng, 40, 136, k, blocks_of(40, 136, k))
    config = C(2, 256, 2, 1, step=128)
    check(run, rng, 70, 136, k, blocks_of(70, 136, k), config=config)


def test_random_numbers_in_turns(run, rng):
    """The consumers' sums and scales of blocks, where nothing is a small whole number."""
    m, n, k = 150, 410, 520
    config = C(2, 256, 2, 1, step=128)
    scales = blocks_of(m, n, k)
    check(run, rng, m, n, k, scales, config=config, values=normal, out_dtype=None)


def test_infinite_scales_of_the_last_block(run, rng):
    """Parts of K that lie outside multiply no scale."""
    a, b = np.ones((3, 600), E4M3), np.ones((8, 600), E4M3)
    scale_a, scale_b = (powers(rng, s) for s in blocks_of(3, 8, 600))
    scale_b[0, -1] = np.inf
    config = CONFIGS["K in four, few rows"][1]
    got = product(run, a, b, transpose_b=True, scale_a=scale_a, scale_b=scale_b, config=config)
    assert np.all(got == np.inf)


def test_few_columns_of_blocks(run, rng):
    """A shape of scale_b that could be that of columns: that of scale_a decides."""
    check(run, rng, 70, 2, 200, ((70, 2), (1, 2)))
    a, b = whole(rng, (70, 200), E4M3), whole(rng, (2, 200), E4M3)
    columns = np.array([[1, 4]], F32)
    got = product(run, a, b, transpose_b=True, scale_b=columns, out_dtype=F32)
    np.testing.assert_array_equal(got, a.astype(F32) @ b.astype(F32).T * columns)


@pytest.mark.parametrize(
    "activation, form", [(nn.relu, "one"), (nn.gelu, "rows and columns"), (nn.relu, "blocks")]
)
def test_epilogue(run, rng, activation, form):
    scales = FORMS[form]
    check(run, rng, 70, 136, 272, scales, bias=BF16, activation=activation, out_dtype=F16)


@pytest.mark.parametrize("shape", [(256, 128), (130, 77), (1, 300), (300, 1), (5, 272)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_transposing(run, rng, shape, dtype):
    """Every byte, NaN too; what is beyond the array is zero."""
    x = rng.integers(0, 256, shape).astype(np.uint8).view(dtype)
    got = run.call(transposing(shape, dtype, True, run.way != "cuda" or None), x).view(np.uint8)
    rows, cols = shape
    assert got.shape == (cols, -(-rows // 16) * 16)
    np.testing.assert_array_equal(got[:, :rows], x.view(np.uint8).T)
    assert not got[:, rows:].any()


def test_transposing_moves_words():
    """As a copy does: by TMA, swizzled, several blocks on an SM."""
    x = plgpu.ShapeDtypeStruct((8192, 8192), E4M3)
    low = transposing(x.shape, E4M3, True, None).lower(x)
    text, used = low.as_text("cuda"), low.resources()
    assert "tma_load_2d(" in text and "tma_store_2d(" in text and "st_shared<e4m3, 2>" in text
    assert used["spill_bytes"] == 0 and used["registers"] <= 128 and used["smem_bytes"] <= 34000


def test_operands_that_begin_anywhere(run, rng):
    """They are copied or transposed by accesses that no address is too odd for."""
    x = whole(rng, (40, 48), E4M3)
    transpose = transposing(x.shape, E4M3, False, run.way != "cuda" or None)
    assert "ld_global<e4m3, 1>" in transpose.lower(x).as_text("cuda")
    np.testing.assert_array_equal(run.call(transpose, x)[:, :40], x.T)
    odd = plgpu.ArrayInfo(x.shape, E4M3, aligned=False)
    f = matmul.__wrapped__(odd, odd, transpose_b=True, interpret=True)
    assert all(f.pads) and "ld_global<e4m3, 1>" in f.pads[1].lower(x).as_text("cuda")


def test_what_callers_get(rng):
    a, b = whole(rng, (20, 64), E4M3), whole(rng, (64, 24), E5M2)
    one, each = powers(rng, ()), powers(rng, (1, 24))
    out = np.empty((20, 24), BF16)
    assert matmul(a, b, scale_b=each, scale_a=one, out=out, interpret=True) is out
    np.testing.assert_array_equal(out, (a.astype(F32) @ b.astype(F32) * one * each).astype(BF16))
    kernel = matmul.kernel(a, b, scale_a=one)
    assert kernel is matmul.kernel(a, scale_a=powers(rng, ()), b=b)


def test_chosen_configurations():
    """One for every shape; the large ones neither spill nor make ptxas serialise products."""
    for m, n, k in itertools.product((1, 3, 100, 1000, 4097), repeat=3):
        for blocks in (False, True):
            got = choose_k_major(m, n, k, 132, blocks)
            assert got.step == 128 or got.swapped and got.step == 256
            assert not blocks or 128 % got.tile_n == 0 or got[:2] == (2, 256) and got.split == 1
    large = choose_k_major(8192, 8192, 8192)
    assert large.consumers * large.consumer_rows * large.tile_n == 128 * 256
    for size, tile in ((8192, 256), (4096, 256), (2048, 256), (1024, 64)):
        assert choose_k_major(size, size, size, blocks=True)[:2] == (2, tile)
    assert choose_k_major(8192, 8192, 8192) in candidates(8192, 8192, 8192, in_bytes=1)
    spec, size = plgpu.ShapeDtypeStruct, 8192
    a = spec((size, size), E4M3)
    of_blocks = blocks_of(size, size, size)
    for scales in (((size, 1), (1, size)), of_blocks):
        scale_a, scale_b = (spec(s, F32) for s in scales)
        config = choose_k_major(size, size, size, 132, scales is of_blocks)
        scales_of = {"scale_a": scale_a, "scale_b": scale_b}
        f = matmul.kernel(a, a, transpose_b=True, **scales_of, config=config)
        low = f.lower(a, a, scale_a, scale_b)
        used, text = low.resources(), low.as_text("cuda")
        assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used
        text = text[text.index("__global__") :]
        assert "mbarrier_arrive_release" not in text  # releases without fences
        # two products a step into one accumulator, which stays where it is
        product, times = ("m64n128k32", 2) if scales is of_blocks else ("m64n256k32", 1)
        contents = "held" if scales is of_blocks else "ptx"
        assert text.count(f"wgmma_{product}_f32_e4m3_kk_x4_{contents}") == times


def zeros(*shape):
    return np.zeros(shape, F32)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(b=np.zeros((48, 8), F16)), TypeError, "each; got float8_e4m3fn and float16"),
        (dict(b=np.zeros((48, 8), np.int8)), TypeError, "float8_e4m3fn or float8_e5m2 each"),
        (dict(a=np.zeros((4, 40), E4M3)), ValueError, "inner dims differ, 40 and 48"),
        (dict(scale_a=0.5), TypeError, "scale_a must be an array or None, got 0.5"),
        (dict(scale_b=np.zeros(8, F16)), TypeError, "scale_b must be a float32 .* got float16"),
        (
            dict(scale_a=zeros(5)),
            ValueError,
            r"scale_a .* \(4,\) \(per row\), .* \(4, 1\) .* got \(5,\)",
        ),
        (dict(scale_b=zeros(8, 1)), ValueError, r"scale_b .* \(1, 8\) \(per column\), .*128"),
        (
            dict(a=np.zeros((4, 300), E4M3), b=np.zeros((300, 8), E4M3), scale_a=zeros(4, 3)),
            ValueError,
            r"scales of blocks go together, scale_a of shape \(4, 3\) and scale_b of \(1, 3\)",
        ),
        (dict(bias=np.zeros(8, np.int32)), ValueError, "float16 or bfloat16 or float32 of shape"),
        (dict(bias=np.zeros(9, F16)), ValueError, r"of shape \(8,\), got float16 \(9,\)"),
        (
            dict(out_dtype=E4M3),
            TypeError,
            "out_dtype must be float16, bfloat16 or float32, got float8_e4m3fn",
        ),
        (dict(config=F()), ValueError, "must be a MatmulConfig for 8-bit operands, got FewRows"),
        (dict(config=C(2, 64, 1, step=128)), ValueError, "1 slots, MatmulConfig.* needs 2 of them"),
        (dict(config=C(step=32)), ValueError, r"step of 8-bit operands is one of \[64, 128, 256\]"),
        (
            dict(a=np.zeros((4, 48), F16), b=np.zeros((48, 8), F16), scale_b=zeros(1)),
            ValueError,
            "scale_b is for 8-bit floats, a and b are float16",
        ),
    ],
)
def test_errors(change, error, words):
    given = {"a": np.zeros((4, 48), E4M3), "b": np.zeros((48, 8), E5M2), **change}
    with pytest.raises(error, match=words):
        matmul(interpret=True, **given)


@pytest.mark.parametrize(
    "config",
    [
        C(1, 64, step=64),
        C(1, 192, step=128),
        C(1, 256, step=128),
        C(3, 256, step=128),
        C(2, 256, split=2, cluster=1, step=128),
    ],
)
def test_configurations_that_blocks_do_not_take(config):
    scale_a, scale_b = zeros(4, 2), zeros(1, 2)
    a, b = np.zeros((4, 200), E4M3), np.zeros((200, 8), E4M3)
    with pytest.raises(ValueError, match="with scales of blocks step must be 128 and tile_n"):
        matmul(a, b, scale_a=scale_a, scale_b=scale_b, config=config, interpret=True)
