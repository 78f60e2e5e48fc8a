"""ops.mixed_matmul beside NumPy's float32 product: weights of 8 and 4 bits, groups of scales, odd
extents, configurations."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import MixedConfig, mixed_matmul
from pallas_mgpu.ops.mixed import choose

pytestmark = pytest.mark.covering(1, share=True)

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, I4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UNIT = {F16: 2**-11, BF16: 2**-8, F32: 2**-22}  # of the rounding of a result
C = MixedConfig


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Blocks do several tiles; no warnings."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def operands(rng, m, n, k, groups, weights=I4, dtype=BF16, scales=F32):
    x = rng.standard_normal((m, k)).astype(dtype)
    if weights in (E4, E5):
        w = rng.standard_normal((n, k)).astype(weights)
    else:
        info = ml_dtypes.iinfo(weights)
        w = rng.integers(info.min, info.max + 1, (n, k)).astype(weights)  # also the least number
    if not groups:
        return x, w
    return x, w, (rng.random((groups, n)) + 0.5).astype(scales)


def check(run, given, **options):
    x, w, *scales = given
    full = w.astype(np.float64)
    if scales:
        full *= np.repeat(scales[0].astype(np.float64), x.shape[1] // len(scales[0]), 0).T
    want = x.astype(np.float64) @ full.T
    interpret = None if run.way == "cuda" else True
    kernel = mixed_matmul.kernel(*given, **options, interpret=interpret)
    if hasattr(kernel, "pads"):
        given = [a if pad is None else run.call(pad, a) for a, pad in zip(given, kernel.pads)]
        kernel = kernel.product
    got = run.call(kernel, *given)
    assert got.dtype == np.dtype(options.get("out_dtype", x.dtype)) and got.shape == want.shape
    # sums of float32
    close = 2e-6 * np.sqrt(x.shape[1]) * np.abs(full).max()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=UNIT[got.dtype], atol=close)


@pytest.mark.parametrize("weights", [I8, I4], ids=str)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_groups(run, rng, weights, groups):
    check(run, operands(rng, 5, 128, 384, groups, weights))


@pytest.mark.parametrize(
    "dtype, scales, out_dtype", [(F16, F16, F32), (BF16, BF16, F16), (F16, F32, F16)], ids=str
)
def test_dtypes(run, rng, dtype, scales, out_dtype):
    check(run, operands(rng, 7, 64, 128, 2, I8, dtype, scales), out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("weights", [E4, E5], ids=str)
def test_float8(run, rng, weights, dtype):
    check(run, operands(rng, 20, 70, 192, 3, weights, dtype), out_dtype=F32)


def test_scales_of_0_and_far_apart(run, rng):
    """Sums of many rows are held in units of scales; these may be 0 at first, later, always."""
    x, w, scales = operands(rng, 210, 160, 1024, 8, I8)
    scales[0, :20] = 0
    scales[:3, 20:30] = 0
    scales[2:5, 30:40] = 0
    scales[3:, 40:50] = 0
    scales[:, 50:60] = 0
    scales[4, 60:] *= 1e-30
    scales[5, 100:120] = 1e-38
    scales[6, 120:130] = -1e30
    check(run, (x, w, scales), config=C(2, 208, 1, 0, 64), out_dtype=F32)


@pytest.mark.parametrize("m, n, k, groups", [(1, 1, 64, 0), (17, 77, 192, 3), (130, 200, 128, 2)])
def test_odd_extents(run, rng, m, n, k, groups):
    """Results that TMA cannot store, scales that end within a tile."""
    check(run, operands(rng, m, n, k, groups))


CONFIGS = {  # with extents m, n, k, groups of scales
    C(1, 16, 4, 2, 64): (3, 130, 512, 4),
    C(1, 32, 2, 0, 128): (40, 64, 640, 0),  # a part of K that lies outside
    C(3, 48, 1, 2, 64, 2): (150, 200, 256, 2),  # rings that go round, several bands
    C(2, 128, 1, 2, 128, 1): (140, 260, 256, 1),
    C(1, 16, 1, 0, 64, turns=2): (5, 100, 448, 1),  # an odd number of steps, one block
    C(2, 16, 2, 4, 64, turns=2): (16, 200, 512, 4),
    C(2, 32, 1, 2, 64, turns=2): (20, 130, 384, 3),  # an odd number of groups
    C(1, 16, 1, 5, 64, turns=2): (9, 70, 768, 4),  # groups of several steps
    C(2, 16, 1, 0, 64, turns=2): (3, 64, 64, 1),  # nothing left for the second
    C(1, 64, 2, 8, 64, turns=2): (60, 70, 512, 1),
    C(1, 128, 1, 0, 64, turns=2): (100, 130, 256, 1),
    C(2, 256, 1, 0, 64): (300, 200, 192, 1),
    C(2, 128, 1, 4, 64, ahead=4): (140, 300, 448, 1),
    C(2, 256, 1, 0, 64, ahead=2, cluster=2): (260, 500, 384, 1),
    C(1, 64, 1, 4, 64, turns=2, ahead=2, cluster=2): (60, 264, 512, 1),
    C(2, 256, 1, 0, 64, cluster=2): (260, 504, 384, 3),  # halves of the rows
    C(2, 128, 1, 0, 128, ahead=2): (140, 304, 512, 4),
    C(2, 128, 1, 0, 64, ahead=4, cluster=2): (140, 302, 384, 3),
    C(2, 176, 1, 0, 128, ordered=True): (340, 200, 512, 4),  # an accumulator beside the sums
    C(2, 160, 1, 0, 64, cluster=2, ordered=True): (150, 300, 768, 3),
    C(3, 48, 1, 3, 64, ordered=True): (50, 456, 320, 1),
    C(2, 128, 1, 0, 128, ahead=2, ordered=True): (140, 300, 640, 0),
    C(2, 256, 1, 0, 64, ordered=True): (300, 392, 384, 3),
    C(2, 208, 1, 1, 64): (150, 136, 768, 2),  # parts of groups, no slot to spare
    C(1, 16, 1, 2, 64, turns=2, ahead=3): (9, 130, 640, 0),
    C(1, 16, 1, 4, 64, turns=4): (9, 712, 768, 12),  # several tiles of a block
    C(1, 32, 1, 4, 64, turns=2): (20, 712, 768, 6),
    C(1, 16, 1, 4, 64, turns=4, group=1): (40, 500, 512, 1),
    # parts of K of the last tiles: without whole tiles before, after some, in several rounds
    C(1, 48, 1, 3, 64, shares=3): (90, 64, 704, 1),
    C(2, 128, 1, 4, 64, ahead=4, ordered=True, shares=2): (250, 500, 1024, 1),
    C(2, 128, 1, 0, 64, ahead=2, shares=4): (250, 200, 320, 1),
    C(2, 32, 1, 4, 64, shares=2): (200, 250, 384, 3),
    C(2, 176, 1, 0, 128, ordered=True, shares=3): (340, 200, 640, 5),
    C(2, 256, 1, 0, 64, shares=2): (500, 260, 512, 4),
    C(3, 64, 1, 0, 64, shares=2): (100, 400, 512, 0),
    C(2, 208, 1, 1, 64, shares=2): (150, 136, 768, 2),
    C(2, 192, 1, 0, 128, ordered=True): (380, 200, 512, 4),
    C(2, 152, 1, 0, 128, ordered=True): (300, 200, 512, 4),  # rows of no multiple of 16
    C(2, 184, 1, 0, 64, ahead=4): (180, 200, 512, 0),
    C(2, 248, 1, 0, 64, ordered=True): (490, 200, 640, 5),  # two steps of a group, in place
    C(3, 104, 1, 0, 128): (100, 400, 512, 4),
    C(1, 72, 1, 0, 64, turns=2): (70, 130, 512, 4),
}


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("weights", [I8, I4], ids=str)
def test_configurations(run, rng, config, weights):
    m, n, k, groups = CONFIGS[config]
    check(run, operands(rng, m, n, k, groups, weights), config=config)


def test_weights_are_asked_for_early(rng):
    """While the kernels before still run."""
    x, w, s = operands(rng, 4, 256, 256, 1)
    text = mixed_matmul.kernel(x, w, s).lower(x, w, s, target="sm_90a").as_text("cuda")
    assert "tma_prefetch" in text[text.index("__global__") : text.index("griddepcontrol_wait();")]


def test_slots_of_chosen_configurations(monkeypatch):
    """Also of float32 results, whose store buffers leave room for fewer."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 132)
    spec = plgpu.ShapeDtypeStruct
    for m in (100, 128, 300, 1000, 2725):
        for n, groups in ((200, 32), (4096, 64), (4096, 32), (5120, 1), (28672, 16)):
            for out_dtype in (F32, BF16):
                given = spec((m, 8192), BF16), spec((n, 8192), I8), spec((groups, n), F32)
                mixed_matmul.kernel(*given, out_dtype=out_dtype)


def test_shares_under_vmap(rng):
    """All tiles are whole."""
    _, w, scales = operands(rng, 1, 64, 512, 4)
    x = rng.standard_normal((2, 90, 512)).astype(BF16)
    how = {"config": C(1, 48, 1, 3, 64, shares=2), "interpret": True, "out_dtype": F32}
    got = plgpu.vmap(lambda x: mixed_matmul(x, w, scales, **how))(x)
    full = w.astype(np.float64) * np.repeat(scales, 128, 0).T
    np.testing.assert_allclose(got, x.astype(np.float64) @ full.T, rtol=1e-4, atol=1e-3)


def test_what_callers_get(rng):
    x, w, s = operands(rng, 4, 64, 64, 1)
    out = np.empty((4, 64), BF16)
    assert mixed_matmul(x, w, s, out=out, interpret=True) is out
    again = mixed_matmul(weights=w, scales=s, x=x, interpret=True)
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize(
    "m, tile", [(16, 16), (64, 64), (128, 128), (256, 128), (300, 152), (4096, 256)]
)
def test_chosen_configurations(m, tile):
    """No spills, and tensor cores that nothing serialises."""
    spec = plgpu.ShapeDtypeStruct
    for weights, groups in ((I4, 64), (I8, 0), (E4, 64)):
        given = [spec((m, 8192), BF16), spec((8192, 8192), weights)]
        given += [spec((groups, 8192), BF16)] if groups else []
        config = choose(m, 8192, 8192, max(groups, 1), weights=weights.name)
        assert config.tile_m == tile
        assert config.split == 1 or m == 16
        used = mixed_matmul.kernel(*given, config=config).lower(*given).resources()
        assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(x=np.zeros((4, 128), F32)), TypeError, "x must be float16 or bfloat16, got float32"),
        (dict(weights=np.zeros((8, 128), F16)), TypeError, "weights must be one of int8"),
        (dict(weights=np.zeros((8, 64), I8)), ValueError, "differ in K"),
        (dict(weights=np.zeros(128, I8)), ValueError, "two dims"),
        (dict(x=np.zeros((0, 128), F16)), ValueError, "empty operands"),
        (dict(scales=np.zeros((2, 8), np.int32)), TypeError, "scales must be of a float dtype"),
        (dict(scales=np.zeros((2, 9), F16)), ValueError, r"must have the shape \(G, 8\)"),
        (dict(scales=np.zeros((4, 8), F16)), ValueError, "4 groups of a multiple of 64"),
        (dict(out_dtype="int32"), TypeError, "out_dtype must be float16, bfloat16 or float32"),
        (dict(config=2), TypeError, "must be a MixedConfig"),
        (dict(config=C(4)), ValueError, "has 1 to 3 consumers"),
        (dict(config=C(step=128)), ValueError, "multiple of the step"),
        (dict(config=C(1, step=64, ordered=True)), ValueError, "ordered with 2 or 3 consumers"),
        (dict(config=C(3, 192, step=64)), ValueError, "a tile_m above 128 up to 2"),
        (dict(config=C(1, 136, step=64, cluster=2)), ValueError, "a multiple of 8"),
        (dict(config=C(2, 128, step=64, turns=2)), ValueError, "tile_m .* turns up to 256"),
        (dict(config=C(1, 16, 2, step=64, cluster=2)), ValueError, r"2 \(1 with a split\)"),
        (dict(config=C(1, 16, 2, step=64, shares=2)), ValueError, "above 1 with 1 turn, no split"),
    ],
)
def test_errors(change, error, words):
    given = {
        "x": np.zeros((4, 128), F16),
        "weights": np.zeros((8, 128), I8),
        "scales": np.zeros((2, 8), F16),
        **change,
    }
    with pytest.raises(error, match=words):
        mixed_matmul(interpret=True, **given)


def test_k_that_does_not_fit():
    with pytest.raises(ValueError, match="K must be a multiple of 64, got 72; pad both"):
        mixed_matmul(np.zeros((4, 72), F16), np.zeros((8, 72), I8), interpret=True)
