"""`pallas_mgpu.ops`: results beside NumPy's float32 product."""

import inspect
import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import nn
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import FewRowsConfig, MatmulConfig, _matmul_checks, matmul
from pallas_mgpu.ops._common import SMS
from pallas_mgpu.ops._few_rows import candidates as few_rows_candidates
from pallas_mgpu.ops._matmul_choice import (
    Plan,
    candidates,
    choose,
    choose_k_major,
    cycles,
    misaligned_rows,
    rates_of,
    wide_candidates,
)
from pallas_mgpu.ops._scaled import UNSCALED

pytestmark = pytest.mark.covering(1, share=True)

f16, f32, bf16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
UNIT = {f16: 1e-3, bf16: 8e-3, f32: 1e-5}  # of the rounding of a result, roughly


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def call(request):
    """matmul itself, on host arrays or on the GPU."""

    def on_gpu(*args, **kw):
        kw = {k: plgpu.device_put(v) if isinstance(v, np.ndarray) else v for k, v in kw.items()}
        return matmul(*map(plgpu.device_put, args), **kw).numpy()

    def interpreted(*args, **kw):
        return matmul(*args, interpret=True, **kw)

    return on_gpu if request.param == "cuda" else interpreted


def operands(rng, m, n, k, dtype=f16, ta=False, tb=False):
    a = (rng.standard_normal((k, m) if ta else (m, k)) / 4).astype(dtype)
    b = (rng.standard_normal((n, k) if tb else (k, n)) / 4).astype(dtype)
    return a, b


def check(got, a, b, bias=None, activation=None, ta=False, tb=False):
    a, b = (x.astype(f32) for x in (a.T if ta else a, b.T if tb else b))
    want = a @ b if bias is None else a @ b + bias.astype(f32)
    if activation is not None:
        want = activation(want)
    unit = UNIT[got.dtype]
    assert got.shape == want.shape
    close = dict(rtol=2 * unit, atol=unit * np.sqrt(a.shape[1]))
    np.testing.assert_allclose(got.astype(f32), want, **close)


SHAPES = [
    (1, 1, 1),
    (1, 128, 200),
    (3, 7, 1),
    (7, 1, 3),
    (100, 777, 40),
    (129, 65, 64),
    (64, 9, 129),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_shapes(call, rng, shape, ta, tb):
    a, b = operands(rng, *shape, f16, ta, tb)
    check(call(a, b, transpose_a=ta, transpose_b=tb), a, b, ta=ta, tb=tb)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("out_dtype", [None, "float32", bf16, jnp.float16], ids=str)
def test_dtypes(call, rng, dtype, out_dtype):
    a, b = operands(rng, 65, 72, 80, dtype)
    got = call(a, b, out_dtype=out_dtype)
    assert got.dtype == (dtype if out_dtype is None else jnp.dtype(out_dtype))
    check(got, a, b)


def squared(x):
    return x * x


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "tanh", nn.relu6, squared, None])
@pytest.mark.parametrize("n", [136, 61])
def test_epilogue(call, rng, activation, n):
    a, b = operands(rng, 70, n, 64)
    bias = rng.standard_normal(n).astype(f16)
    f = getattr(nn, activation) if isinstance(activation, str) else activation
    check(call(a, b, bias=bias, activation=activation), a, b, bias, f)
    check(call(a, b, activation=activation), a, b, activation=f)


def product(run, a, b, bias=None, **options):
    """`matmul`, step by step where it takes more than one kernel."""
    if run.way != "cuda":
        options["interpret"] = True
    f = matmul.kernel(a, b, bias=bias, **options)
    arrays = [a, b] if bias is None else [a, b, bias]
    return by_steps(run.call, f, arrays)


C, F = MatmulConfig, FewRowsConfig
SLICED = C(1, 64, 0, 1, slices=3)
SHARED = C(1, 64, 0, 1, shares=3)


def swapped(consumers, rows, **options):
    return C(consumers, rows, 0, 1, swapped=True, **options)


CASES = {  # shape, ta, tb, configuration, options
    "odd": ((77, 131, 99), False, False, None, {"out_dtype": bf16}),
    "odd, transposed": ((131, 77, 99), True, True, None, {}),
    "persistent": ((300, 200, 72), False, False, C(1, 64, 2, 1, 1, 3), {"activation": "relu"}),
    "two rows of tiles": ((200, 300, 200), False, True, C(1, 128, 0, 1, 1), {"bias": True}),
    "A is shared": ((200, 130, 72), True, False, C(2, 64, 0, 2, 2, 8, 2), {}),
    "K in two": ((100, 150, 328), False, False, C(2, 128, 0, 1, 2, 8, 1, 2), {"bias": True}),
    "K in two, few rows": (
        (40, 72, 200),
        False,
        False,
        C(1, 128, 0, 1, 2, 8, 1, 2),
        {"bias": True, "out_dtype": "float32"},
    ),
    "K in four, few rows": ((3, 72, 600), False, False, C(1, 64, 0, 1, 2, 8, 1, 4), {}),
    "K in two, all shared": (
        (100, 80, 200),
        False,
        True,
        C(1, 64, 0, 2, 1, 8, 2, 2),
        {"bias": True, "out_dtype": "float32"},
    ),
    "rows that four fetch": ((70, 600, 200), False, True, C(2, 72, 0, 4, swapped=True), {}),
    "rows that four fetch, of three": (
        (130, 520, 330),
        False,
        False,
        C(3, 136, 3, 4, 2, 1, swapped=True),
        {"bias": True},
    ),
    "slices": ((77, 131, 330), False, True, SLICED, {"bias": True, "activation": "relu"}),
    "slices, K in two": (
        (40, 72, 520),
        False,
        False,
        C(1, 128, 0, 1, 2, 8, 1, 2, slices=2),
        {"bias": True, "out_dtype": "float32"},
    ),
    "slices, persistent": ((200, 130, 200), False, False, C(1, 64, 2, 2, slices=2), {}),
    "slices beyond K": ((3, 66, 100), True, True, SLICED, {"out_dtype": bf16}),
    "shares of the last tiles, persistent": (
        (200, 130, 330),
        False,
        True,
        SHARED,
        {"bias": True, "activation": "relu"},
    ),
    "shares of all tiles, persistent": ((40, 72, 520), False, False, SHARED, {"out_dtype": bf16}),
    "shares in two rounds, persistent": (
        (140, 200, 260),
        True,
        False,
        C(1, 64, 0, 1, shares=2),
        {"out_dtype": "float32"},
    ),
    "shares, A is shared, persistent": (
        (60, 380, 330),
        False,
        False,
        C(1, 64, 0, 1, 2, 8, 2, shares=2),
        {"bias": True},
    ),
    "swapped": ((5, 200, 200), False, True, swapped(2, 8), {"bias": True, "activation": "relu"}),
    "swapped, N contiguous": ((37, 131, 330), False, False, swapped(1, 40), {"bias": True}),
    "swapped, several tiles of rows": ((100, 70, 200), False, True, swapped(1, 48), {}),
    "swapped, two store buffers": (
        (99, 70, 200),
        False,
        True,
        swapped(1, 104),
        {"out_dtype": bf16},
    ),
    "swapped, K in two, few columns": (
        (20, 24, 300),
        False,
        True,
        swapped(1, 24, split=2),
        {"bias": True},
    ),
    "swapped, K in four": (
        (20, 130, 520),
        False,
        False,
        swapped(1, 24, split=4),
        {"bias": True, "out_dtype": "float32"},
    ),
    "swapped, slices": (
        (20, 130, 520),
        False,
        False,
        swapped(1, 24, slices=3, step=128),
        {"bias": True, "out_dtype": "float32"},
    ),
    "swapped, shares, persistent": (
        (33, 800, 330),
        False,
        True,
        swapped(2, 40, shares=2),
        {"bias": True, "out_dtype": "float32"},
    ),
    "swapped, wide, A is shared": (
        (150, 200, 200),
        False,
        True,
        C(2, 80, 2, 1, cluster_n=2, swapped=True),
        {"bias": True},
    ),
    "swapped, wide, B is shared": (
        (150, 300, 200),
        False,
        False,
        C(2, 152, 2, 2, swapped=True),
        {"out_dtype": bf16},
    ),
    "128 rows of a consumer": (
        (300, 200, 150),
        False,
        True,
        C(2, 64, 0, 2, consumer_rows=128),
        {"bias": True, "activation": "relu"},
    ),
    "128 rows of a consumer, transposed, persistent": (
        (400, 130, 200),
        True,
        False,
        C(1, 64, 2, 1, buffers=1, consumer_rows=128),
        {"out_dtype": bf16},
    ),
    "128 rows of a consumer, shares, persistent": (
        (300, 200, 330),
        False,
        True,
        C(1, 64, 0, 1, shares=3, consumer_rows=128),
        {"bias": True, "out_dtype": "float32"},
    ),
    "128 rows of a consumer, slices": (
        (150, 72, 330),
        False,
        False,
        C(2, 64, 0, 1, slices=2, consumer_rows=128),
        {"bias": True},
    ),
    "128 rows of a consumer, swapped": (
        (150, 300, 200),
        False,
        True,
        C(2, 80, 2, 1, cluster_n=2, swapped=True, consumer_rows=128),
        {"bias": True, "activation": "relu"},
    ),
    "narrow": ((70, 30, 200), False, False, C(1, 32, 0, 1), {}),
    "112 columns": ((130, 230, 200), False, True, C(2, 112), {"bias": True}),
    "in three chunks": ((130, 200, 200), False, False, C(2, 192, 0, 2, lag=0), {"bias": True}),
    "parts that store buffers do not divide": (
        (70, 193, 130),
        False,
        True,
        C(1, 192, 0, 1, 1, 8, 1, 4),
        {"out_dtype": "float32"},
    ),
    "long steps": ((130, 100, 300), False, False, C(2, 64, 0, 1, step=128), {}),
    "few rows": ((1, 200, 300), False, False, F(64, 2, 2), {"bias": True, "activation": "relu"}),
    "few rows, K in eight": ((3, 136, 900), False, False, F(128, 8, 2), {"bias": True}),
    "few rows, wide": ((8, 256, 100), False, False, F(256, 1), {"out_dtype": "float32"}),
    "few rows, B transposed": ((8, 72, 1030), False, True, F(8, 2, 2, 256), {"bias": True}),
    "one row, both transposed": ((1, 33, 600), True, True, F(16, 1, 6, 256), {}),
}


def planned(shape, config, sms):
    """The shares of the last tiles."""
    m, n, k = shape
    return Plan(*(n, m) if config.swapped else (m, n), k, 2, config, sms).shares


@pytest.mark.parametrize("case", CASES)
def test_configurations(run, rng, case, monkeypatch):
    if "persistent" in case:
        sms = 5 if "shares" in case else 3
        monkeypatch.setattr(plgpu, "sm_count", lambda device: sms)
    shape, ta, tb, config, options = CASES[case]
    if isinstance(config, C) and config.shares > 1:  # what the case is about
        assert planned(shape, config, sms)
    a, b = operands(rng, *shape, f16, ta, tb)
    bias = rng.standard_normal(shape[1]).astype(f16) if options.pop("bias", False) else None
    got = product(run, a, b, bias, transpose_a=ta, transpose_b=tb, config=config, **options)
    check(got, a, b, bias, nn.relu if "activation" in options else None, ta, tb)


def test_chosen_configurations():
    """The chooser finds something for every shape, quickly."""
    for m, n, k in itertools.product((1, 3, 64, 100, 1000, 4097), repeat=3):
        for ta, tb in itertools.product((False, True), repeat=2):
            few_rows = m == 1 and (ta or tb) or m == 2 and tb and not ta
            got = choose(m, n, k, transpose_a=ta, transpose_b=tb)
            assert isinstance(got, FewRowsConfig if few_rows else MatmulConfig)
    large = choose(8192, 8192, 8192)
    assert large.consumers * large.consumer_rows * large.tile_n == 128 * 256
    assert choose(777, 3584, 3584).swapped  # several tiles with the rows of A as columns
    assert not choose(777, 3584, 3584, transpose_a=True).swapped
    assert FewRowsConfig() in few_rows_candidates(1, 4096, False)


def test_the_choice_is_the_fastest_of_all_candidates(rng):
    """By the estimate, and as far as it tells them apart: bounds leave out none that could win."""
    for _ in range(12):
        m, n, k = (int(2 ** rng.uniform(4, most)) for most in (13, 14, 14))
        for in_bytes, tb in ((1, True), (2, False), (2, True)):
            how = {
                "in_bytes": in_bytes,
                "misaligned": misaligned_rows((k, k if tb else n), in_bytes),
            }
            how["rates"] = rates_of(m, in_bytes)
            found = candidates(m, n, k, in_bytes=in_bytes, tb=tb, swaps=m)
            steps = {cfg: -(-k // cfg.step) for cfg in found}
            assert all((c.slices - 1) * -(-n // c.slices) < n for c, n in steps.items())  # no empty
            least = min(cycles(m, n, k, cfg, SMS, **how) for cfg in found)
            if in_bytes == 1:
                got = choose_k_major(m, n, k)
            else:
                got = choose(m, n, k, transpose_b=tb)
            assert got in found
            assert cycles(m, n, k, got, SMS, **how) <= 1.015 * least


@pytest.mark.parametrize("dtype", [f16, np.int8], ids=str)
def test_rows_as_columns_of_several_tiles(run, rng, dtype, monkeypatch):
    """What is chosen swaps the operands of more rows than a tile has."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 8)
    m, n, k = 138, 224, 608
    if dtype == f16:
        a, b = operands(rng, m, n, k, f16, False, True)
        assert choose(m, n, k, 8, transpose_b=True).swapped
        check(product(run, a, b, None, transpose_b=True), a, b, None, None, False, True)
    else:
        a, b = (rng.integers(-9, 9, (x, k)).astype(np.int8) for x in (m, n))
        assert choose_k_major(m, n, k, 8, grain=16)[1::12] == (48, True)
        got = product(run, a, b, None, transpose_b=True)
        np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32).T)


@pytest.mark.parametrize(
    "config, m, n, k, transpose_b",
    [
        (C(1, 128, 2, 1, cluster_n=2), 70, 868, 256, True),  # 7 tiles of columns in pairs
        (C(2, 64, 3, 2), 300, 130, 320, False),  # 3 tiles of rows in pairs
        (C(2, 64, 2, 2, swapped=True), 70, 330, 256, False),
        (C(1, 64, 2, 1, shares=2), 150, 330, 512, True),
    ],
    ids=str,
)
def test_tiles_beyond_the_arrays(run, rng, config, m, n, k, transpose_b):
    """Parts of tiles, and whole ones of a cluster, that no operand has; more steps than slots."""
    a, b = operands(rng, m, n, k, bf16, False, transpose_b)
    got = product(run, a, b, None, transpose_b=transpose_b, config=config)
    check(got, a, b, None, None, False, transpose_b)


@pytest.mark.parametrize(
    "config", [C(1, 32, 2, 2, cluster_n=2), C(2, 16, 2, 4, cluster_n=2, lag=0)]
)
def test_blocks_of_clusters_beyond_both_edges(rng, config):
    """They have no operands, and still wait for the others before they release a slot again."""
    for m, n in ((1, 16), (64, 40)):
        a, b = operands(rng, m, n, 512)
        way = plgpu.InterpretParams(detect_races=True)
        check(matmul(a, b, config=config, interpret=way), a, b)


def test_wide_candidates():
    """What the benchmark of products times beside the choice is legal, and something else."""
    for m, n, k in ((4, 28672, 4096), (333, 4096, 7168), (2999, 3584, 512)):
        for in_bytes, tb in ((1, True), (2, True), (2, False)):
            found = wide_candidates(m, n, k, in_bytes=in_bytes, tb=tb)
            assert found
            assert not set(found) & set(candidates(m, n, k, in_bytes=in_bytes, tb=tb, swaps=m))
            for cfg in found:
                if in_bytes == 2:
                    _matmul_checks.check(cfg, m, False, tb)
                else:
                    _matmul_checks.check_k_major(cfg, UNSCALED, in_bytes)
                assert cycles(m, n, k, cfg, 132, in_bytes) > 0


def fp8(*args, **options):
    return C(*args, **options, step=128)


# us of configurations on an H200, in CUDA graphs, weights of up to 512 rows from memory. Shapes:
# rows, columns, K, bytes of an element, do rows begin anywhere?
MEASURED = {
    (1024, 1024, 1024, 2, False): {C(2, 64, 0, 1): 4.6, C(1, 128, 0, 1): 4.7, C(2, 64): 4.9},
    (2999, 4608, 3584, 2, False): {
        C(3, 192, 0, 1): 126.3,
        C(2, 224): 134.0,
        C(2, 256, shares=3): 137.3,
        C(2, 96, 0, 1): 172.0,
    },
    (256, 6144, 4096, 2, False): {
        C(2, 96, 0, 1): 21.3,
        C(2, 128, 0, 1): 23.7,
        C(2, 192, 0, 1, shares=2): 27.5,
    },
    (333, 37888, 3584, 2, False): {
        C(3, 192): 136.1,
        C(2, 224, 0, 1): 143.7,
        C(2, 192, 0, 1, shares=2): 150.0,
        C(3, 128, 0, 1, shares=2): 156.3,
    },
    (512, 512, 16384, 2, False): {
        C(2, 128, 0, 1, slices=8): 17.9,
        C(2, 64, 0, 1, slices=4): 20.2,
        C(2, 64, 0, 1, 2, 8, 2, shares=4): 21.6,
    },
    (8, 4096, 14336, 2, False): {
        swapped(1, 8, split=2, step=128): 28.2,
        swapped(2, 8, slices=4, step=128): 28.8,
        C(1, 128, 0, 1, slices=4): 31.6,
        C(1, 256, 0, 1, slices=8): 31.8,
    },
    (8, 57344, 8192, 2, False): {
        swapped(1, 8, step=128): 212.6,
        swapped(2, 8, step=128): 216.0,
        C(1, 256, 0, 1): 238.0,
    },
    (1000, 1000, 1000, 2, True): {
        C(2, 64, 0, 1, 2, 8, 2): 6.8,
        C(2, 64): 7.5,
        C(1, 128, 0, 1): 8.4,
        C(2, 96, 0, 1): 9.9,
        C(1, 192, 0, 1): 11.4,
    },
    (3000, 5000, 7000, 2, True): {
        C(2, 256, shares=3): 295.4,
        C(3, 128, 0, 1, 2, 8, 2): 297.4,
        C(2, 256, 0, 1, 2, 8, 2, shares=3): 342.1,
        C(2, 256, 0, 1, shares=3): 395.6,
        C(3, 128, 0, 1): 418.9,
    },
    (512, 4608, 3584, 1, False): {
        fp8(2, 160, 4, 1): 14.8,
        fp8(2, 192, 4, 1): 16.2,
        fp8(3, 128, 4, 1): 16.9,
        fp8(2, 224, 4, 1): 18.4,
    },
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_estimate_against_measurements(shape):
    """What the estimate puts first takes at most 5 % longer than the fastest one; times are within
    a third (at 1.755 GHz)."""
    *extents, in_bytes, misaligned = shape
    measured = MEASURED[shape]
    found = {
        c: cycles(*extents, c, 132, in_bytes, misaligned=(misaligned, misaligned)) for c in measured
    }
    for config, us in measured.items():
        assert 0.75 < found[config] / 1755 / us < 1.33, (config, found[config] / 1755, us)
    assert measured[min(found, key=found.get)] <= 1.05 * min(measured.values())


@pytest.mark.parametrize("aligned", [False, True])
def test_operands_that_begin_anywhere(aligned):
    """They are copied first, by accesses that no address is too odd for."""
    a, b = plgpu.ArrayInfo((64, 64), f16, aligned=aligned), plgpu.ArrayInfo((64, 64), f16)
    f = matmul.__wrapped__(a, b, interpret=True)
    assert hasattr(f, "pads") != aligned
    if not aligned:
        assert f.pads[1] is None
        text = f.pads[0].lower(a).as_text("cuda")
        assert "ld_global<f16, 1>" in text and "st_global<f16, 8>" in text


@pytest.mark.parametrize("rows, early", [(1, True), (128, True), (129, False)])
def test_operands_are_asked_for_early(rows, early, rng):
    """While the kernels before still run, if they come from memory; by the maps of the loads."""
    a, b = operands(rng, rows, 512, 1024, tb=True)
    config = FewRowsConfig(16, 1, 4, 256) if rows == 1 else MatmulConfig(1, 64, cluster=1)
    kernel = matmul.kernel(a, b, transpose_b=True, config=config)
    text = kernel.lower(a, b, target="sm_90a").as_text("cuda")
    before = text[text.index("__global__") : text.index("griddepcontrol_wait();")]
    assert ("tma_prefetch" in before) == early
    assert text.count("const __grid_constant__ TensorMap") <= 3 + (rows == 129)  # parts of a tile


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 40, 300])
def test_operands_that_the_kernel_before_stores(rows):
    """Kernels ask for their operands while those before them still run, but multiply what these
    have stored in the end."""
    torch = pytest.importorskip("torch")
    n, k, many = 4096, 1024, 30

    def numbers(*shape):
        return torch.randint(-3, 4, shape, device="cuda").half()

    a, columns, b = numbers(rows, k), numbers(64, k), torch.empty(n, k, device="cuda").half()
    lefts = [numbers(n, 64) for _ in range(many)]
    outs = [torch.empty(rows, n, device="cuda") for _ in range(many)]
    for _ in range(2):  # nothing is compiled the second time
        for left, out in zip(lefts, outs):
            matmul(left, columns, out=b)
            matmul(a, b, out=out, out_dtype="float32", transpose_b=True)
    for left, out in zip(lefts, outs):
        want = a.double() @ (left.double() @ columns.double()).T
        assert torch.equal(out.double(), want)


def test_out_and_spellings(rng):
    a, b = operands(rng, 64, 64, 64)
    out = np.empty((64, 64), f16)
    assert matmul(a, b, out=out, interpret=True) is out
    check(out, a, b)
    check(matmul(b=b, a=a, interpret=True), a, b)
    k = matmul.kernel(a, b, activation="relu")
    assert k is matmul.kernel(a, b, activation=nn.relu, transpose_a=0)
    parameters = inspect.signature(matmul).parameters
    assert "transpose_b" in parameters and "float32 accumulation" in matmul.__doc__


@pytest.mark.parametrize(
    "change, exception, match",
    [
        (
            dict(a=np.zeros((4, 4), f32)),
            TypeError,
            "float16, bfloat16, float32, .* got float32 and float16",
        ),
        (dict(a=np.zeros((4, 4), bf16)), TypeError, "got bfloat16 and float16"),
        (dict(a=np.zeros(4, f16)), ValueError, "two dims"),
        (dict(a=np.zeros((4, 5), f16)), ValueError, "inner dims differ, 5 and 4"),
        (dict(transpose_a=True, a=np.zeros((5, 4), f16)), ValueError, "inner dims differ, 5 and 4"),
        (dict(bias=np.zeros(4, f16)), ValueError, r"bias must be float16 of shape \(8,\)"),
        (dict(bias=np.zeros(8, f32)), ValueError, "bias must be float16"),
        (dict(activation="sigmoid"), ValueError, "activation must be one of .*'sigmoid'"),
        (dict(activation=3), TypeError, "activation must be a function, one of .*got 3"),
        (dict(activation=lambda x: x.sum()), ValueError, "activation must return an array of"),
        (dict(out_dtype="int32"), TypeError, "out_dtype must be float16, bfloat16 or float32"),
        (dict(out_dtype="f17"), TypeError, "^matmul: out_dtype must be .*, got 'f17'"),
        (dict(out=np.zeros((4, 9), f16)), ValueError, r"out\[0\] must be"),
        (dict(config=F(), transpose_a=True), ValueError, "up to 16 rows, with transpose_a for 1"),
        (dict(config=C(2, 64, 1)), ValueError, "1 slots, MatmulConfig.* needs 2 of them"),
        (dict(config=F(100)), ValueError, "tile_n of a FewRowsConfig must be 64, 128 or 256"),
        (dict(config=C(slices=0)), ValueError, "slices and shares from 1"),
        (dict(config=C(1, 64, cluster=1, shares=2, slices=2)), ValueError, "shares above 1 with"),
        (dict(config=F(split=9)), ValueError, "split 1 to 8"),
        (dict(config=3), TypeError, "must be a MatmulConfig or a FewRowsConfig, got 3"),
        (dict(config=C(4)), ValueError, "1 to 3 consumers"),
        (dict(config=C(2.0)), TypeError, "consumers of a MatmulConfig must be an int, got 2.0"),
        (dict(config=C(2, 112)), ValueError, "of 16 where B is stored as"),
        (dict(config=C(tile_n=64, split=16)), ValueError, "leaves a multiple of 8 columns"),
        (dict(config=C(1, 64, cluster=4, split=4)), ValueError, "up to 8 blocks a cluster"),
        (dict(config=C(3, 192, cluster=1, split=2)), ValueError, "0 slots, .* needs 2"),
        (dict(config=C(2, 64, consumer_rows=96)), ValueError, "consumer_rows is 64 or 128"),
        (dict(config=C(2, 256, consumer_rows=128)), ValueError, "a tile_n up to 200"),
    ],
)
def test_errors(change, exception, match):
    given = {"a": np.zeros((4, 4), f16), "b": np.zeros((4, 8), f16), **change}
    with pytest.raises(exception, match=match):
        matmul(interpret=True, **given)
