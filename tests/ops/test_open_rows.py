"""Functions of ops for any number of rows: few programs, right results, the same bits."""

import re
import time
from functools import partial

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from programs import kernels_in

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops
from pallas_mgpu.ops import _open_rows
from pallas_mgpu.ops._common import compile_for
from pallas_mgpu.ops._matmul_family import Rows, shared
from pallas_mgpu.ops._padding import Padded
from pallas_mgpu.ops.gated_matmul import input_gradient, weight_gradient
from pallas_mgpu.ops.matmul import _BUCKETS, _K_MAJOR_BUCKETS


@pytest.fixture(autouse=True)
def forget():
    plgpu.clear_caches()


def spec(*shape):
    return plgpu.ShapeDtypeStruct(shape, bfloat16)


@pytest.mark.parametrize("dtype", [np.float16, float8_e4m3fn])
def test_random_rows_have_at_most_twelve_programs(dtype):
    """Large and small ones, and those that have programs of their own."""

    def kernel_of_rows(m):
        of = plgpu.ShapeDtypeStruct
        a, b = of((m, 4096), dtype), of((14336, 4096), dtype)
        return ops.matmul.kernel(a, b, transpose_b=True)

    rng = np.random.default_rng(0)
    small = (2 ** rng.uniform(0, 13, 200)).astype(int)
    rows = [*rng.integers(1, 8193, 200), *small, 1, 2, 3, 8192]
    kernels = set(map(kernel_of_rows, map(int, rows)))
    assert len(kernels) <= 12
    assert kernel_of_rows(4097) in kernels


def test_the_first_few_have_programs_of_their_own():
    rows = 100, 200, 100, 300, 400
    kernels = [ops.matmul.kernel(spec(m, 256), spec(256, 512)) for m in rows]
    texts = [k.lower(spec(m, 256), spec(256, 512)).as_text("traced") for k, m in zip(kernels, rows)]
    assert ["size" in t.split("threads")[0] for t in texts] == [False] * 3 + [True] * 2
    assert kernels[2] is kernels[0]


def kernel_of(m, often=1, **options):
    """The kernel of a call after so many calls."""
    for _ in range(often):
        kernel = ops.matmul.kernel(spec(m, 4096), spec(512, 4096), transpose_b=True, **options)
    return kernel


def test_rows_that_come_often_get_a_program_of_their_own():
    for m in (100, 200, 300):
        kernel_of(m)
    shared, repeated = kernel_of(3001), kernel_of(2999, deterministic=True)
    assert kernel_of(2999) is shared is not repeated
    deadline = time.monotonic() + 60
    while kernel_of(2999, 128) is shared:  # the last tile has more rows than there are
        assert time.monotonic() < deadline
    own = kernel_of(2999)
    assert own is kernel_of(2999, 300)
    assert kernel_of(2999, 300, deterministic=True) is repeated
    assert kernel_of(128, 300) is kernel_of(127)  # what it is tuned for


def products(rows, n, k, **options):
    """Results for the numbers of rows, after the static forms are used up."""
    rng = np.random.default_rng(n)
    b = rng.standard_normal((n, k) if options.get("transpose_b") else (k, n)).astype(bfloat16)
    a = rng.standard_normal((max(rows), k)).astype(bfloat16)
    for m in range(3, 3 + _open_rows.STATIC):
        ops.matmul.kernel(spec(m, k), spec(*b.shape), **options)
    wide = b.astype(np.float32).T if options.get("transpose_b") else b.astype(np.float32)
    before = _core.plan_memory()["plans"]
    out = [np.asarray(ops.matmul(a[:m].copy(), b, **options)).astype(np.float32) for m in rows]
    for m, o in zip(rows, out):
        np.testing.assert_allclose(o, a[:m].astype(np.float32) @ wide, rtol=2e-2, atol=0.2)
    return out, _core.plan_memory()["plans"] - before


def deterministic_calls():
    """Calls whose sums blocks divide: in other ways where a program serves many sizes."""
    rng = np.random.default_rng(3)

    def half(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    a, b, a2 = half(300, 4096), half(512, 4096), half(64, 300, 4096)[:2]
    q, k = half(1, 100, 2, 64), half(1, 3000, 2, 64)
    return {
        "matmul": lambda **o: ops.matmul(a, b, transpose_b=True, **o),
        "batches": lambda **o: ops.matmul(a2, b, transpose_b=True, **o),
        "attention": lambda **o: ops.attention(q, k, k, **o),
    }


def other_sizes(name):
    for m in (150, 1000, 5000, 37):
        if name == "attention":
            ops.attention.kernel(*(plgpu.ShapeDtypeStruct((1, m, 2, 64), np.float16),) * 3)
        else:
            of_a = (m, 4096) if name == "matmul" else (2, m, 4096)
            of_a, of_b = (plgpu.ShapeDtypeStruct(s, np.float16) for s in (of_a, (512, 4096)))
            for options in ({}, {"deterministic": True}):
                ops.matmul.kernel(of_a, of_b, transpose_b=True, **options)


@pytest.mark.parametrize("name", deterministic_calls())
def test_deterministic_calls_do_not_depend_on_those_before(name):
    call = deterministic_calls()[name]
    first = call(deterministic=True)
    plgpu.clear_caches()
    other_sizes(name)
    assert (call(deterministic=True) == first).all()


@pytest.mark.parametrize("transpose_b", [False, True])
def test_results_of_all_buckets(transpose_b, monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    rows = (6, 63, 64, 65, 127, 129, 250, 257, 400, 600, 900, 1023, 1025, 2049, 3000)
    _, programs = products(rows, 136, 136, transpose_b=transpose_b, interpret=True)
    assert 5 <= programs <= 9


@pytest.mark.parametrize("in_bytes", [1, 2])
@pytest.mark.parametrize("n, k", [(4096, 4096), (14336, 4096), (8192, 8192), (7168, 16384)])
def test_rows_share_programs_that_suit_them(n, k, in_bytes):
    """By the estimate, beside configurations of their own."""
    rows = Rows(n, k, 132, False, True, in_bytes=in_bytes)
    buckets = _BUCKETS if in_bytes == 2 else _K_MAJOR_BUCKETS
    sizes = np.random.default_rng(n).integers(513, 8193, 60).tolist()
    chosen = [shared(rows, m, buckets) for m in sizes]
    slower = [rows.time(m, cfg) / rows.time(m, rows.own(m)) for m, cfg in zip(sizes, chosen)]
    assert 1 < len(set(chosen)) <= 3
    assert np.mean(slower) < 1.07 and max(slower) < 1.4


def attention_of(n, m, causal=False, left=None, dim=64):
    """Arrays of a call and what comes out, in float64; the diagonal ends at the last pair."""
    rng = np.random.default_rng(n * 1000 + m)
    q = rng.standard_normal((1, n, 4, dim)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, m, 2, dim)).astype(np.float16)
    wide = (x.astype(np.float64) for x in (q, np.repeat(k, 2, 2), np.repeat(v, 2, 2)))
    q64, k64, v64 = wide
    distance = np.arange(m) - np.arange(n)[:, None] - (m - n)
    hidden = (distance > 0) & causal | (distance < -(left or m + n))
    e = np.where(hidden, 0, np.exp(np.einsum("bqhd,bkhd->bhqk", q64, k64) * dim**-0.5))
    total = e.sum(3, keepdims=True)
    return (q, k, v), np.einsum("bhqk,bkhd->bqhd", e / np.where(total == 0, 1, total), v64)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": (40, None)}],
    ids=str,
)
def test_attention_of_any_lengths(options, dim, monkeypatch):
    """Also more queries than keys, fewer tiles than blocks, and keys that are divided."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 10)
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    how = {"bottom_right": True, "interpret": plgpu.InterpretParams(detect_races=True), **options}
    left, causal = options.get("window", (None,))[0], "causal" in options
    made = set()
    for n, m in ((1, 300), (64, 65), (70, 30), (128, 129), (300, 301), (420, 333), (2, 1500)):
        arrays, want = attention_of(n, m, causal, left, dim)
        np.testing.assert_allclose(ops.attention(*arrays, **how), want, atol=4e-3)
        made |= set(map(id, kernels_in(ops.attention.kernel(*arrays, **how))))
    assert len(made) <= 5  # one, two and more consumers; the divided one and its sum


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "bottom_right": True}, {"window": (40, 5)}], ids=str
)
def test_attention_to_batches_of_any_lengths(options, monkeypatch):
    """One program for all numbers of more than 128 queries, with the bits of those for these
    lengths. What stands in one batch entry is nothing to the others."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    how = {"interpret": plgpu.InterpretParams(detect_races=True), **options}
    rng, made = np.random.default_rng(7), set()
    for n, m in ((130, 150), (200, 130), (257, 65)):
        q = rng.standard_normal((3, n, 4, 64)).astype(np.float16)
        k, v = rng.standard_normal((2, 3, m, 2, 64)).astype(np.float16)
        open_ = ops.attention.kernel(q, k, v, **how)
        made.add(open_.kernel)
        want = open_.alone()(q, k, v)
        np.testing.assert_array_equal(ops.attention(q, k, v, **how), want)
        v[1], out = np.nan, np.full_like(q, np.nan)
        assert ops.attention(q, k, v, out=out, **how) is out
        np.testing.assert_array_equal(out[::2], want[::2])
    assert len(made) == 1


def test_batches_that_come_often_get_a_program_of_their_own(monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    q, k = (plgpu.ShapeDtypeStruct((2, n, 1, 64), np.float16) for n in (3, 5))
    first, deadline = ops.attention.kernel(q, k, k), time.monotonic() + 60
    while (found := ops.attention.kernel(q, k, k)) is first:
        assert time.monotonic() < deadline
    assert found is first.alone()


@pytest.mark.long
def test_batches_on_the_emulated_machine(monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 3)
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    how = {"causal": True, "bottom_right": True, "interpret": "emulate"}
    arrays, want = attention_of(150, 170, True)
    both = [np.concatenate([x, x]) for x in arrays]
    got = ops.attention(*both, **how)
    np.testing.assert_allclose(got, np.concatenate([want, want]), atol=4e-3)


def test_attention_on_the_emulated_machine(monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 3)
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    how = {"causal": True, "bottom_right": True, "interpret": "emulate"}
    made = set()
    for n, m in ((130, 150), (260, 270)):
        arrays, want = attention_of(n, m, True)
        np.testing.assert_allclose(ops.attention(*arrays, **how), want, atol=4e-3)
        made.add(ops.attention.kernel(*arrays, **how))
    assert len(made) == 1


def test_packed_sequences_of_any_number(monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plans = _core.plan_memory()["plans"]
    for starts, keys in (
        ([0, 40, 100], [0, 30, 77]),
        ([0, 10, 11, 90], [0, 0, 60, 70]),
        ([0, 120], [0, 150]),
    ):
        whole, _ = attention_of(starts[-1], keys[-1])
        both = (np.asarray(x, np.int32) for x in (starts, keys))
        how = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), both), causal=True, interpret=True)
        got = ops.attention(*whole, bottom_right=True, **how)
        for a, b, c, d in zip(starts, starts[1:], keys, keys[1:]):
            part = whole[0][:, a:b], whole[1][:, c:d], whole[2][:, c:d]
            want = np.zeros(part[0].shape)
            if d > c:
                alone = {"causal": True, "bottom_right": True, "batch_invariant": True}
                part = [x.copy() for x in part]
                want = ops.attention(*part, interpret=True, **alone)
            np.testing.assert_allclose(got[:, a:b], want, atol=4e-3)
    assert _core.plan_memory()["plans"] - plans <= 2 * 2 + 2


def test_decoding_with_attention_compiles_few_programs():
    """Every capacity from 1 on, one query."""
    made = set()
    for keys in range(1, 4097, 5):
        q, k = (plgpu.ShapeDtypeStruct((1, n, 8, 128), bfloat16) for n in (1, keys))
        found = ops.attention.kernel(q, k, k)
        parts = (found.parts, found.merge) if hasattr(found, "parts") else (found,)
        made |= {getattr(part, "kernel", part) for part in parts}
    assert len(made) <= 12


def test_bias_and_activation():
    rng = np.random.default_rng(3)
    b, bias = (rng.standard_normal(s).astype(bfloat16) for s in ((64, 96), (96,)))
    for m in (10, 11, 12, 40, 61):
        a = rng.standard_normal((m, 64)).astype(bfloat16)
        o = np.asarray(ops.matmul(a, b, bias=bias, activation="relu", interpret=True))
        want = a.astype(np.float32) @ b.astype(np.float32) + bias.astype(np.float32)
        np.testing.assert_allclose(o.astype(np.float32), np.maximum(want, 0), rtol=2e-2, atol=0.1)


def test_rows_do_not_depend_on_the_others_if_asked_for():
    rows = (7, 64, 100, 130, 500, 1030)
    out, _ = products(rows, 80, 200, batch_invariant=True, interpret=True)
    for o in out:
        np.testing.assert_array_equal(o[:7], out[-1][:7])


def test_generated_program():
    rows = (7, 33, 70, 2100)
    products(rows, 72, 136, interpret="emulate")
    for m in range(1, 9):
        x = np.random.default_rng(m).standard_normal((m, 101)).astype(np.float32)
        got = np.asarray(ops.softmax(x, interpret="emulate"))
        want = NORMS["softmax"](x)
        np.testing.assert_allclose(got, want / want.sum(1, keepdims=True), rtol=1e-4)


NORMS = {
    "softmax": lambda x, *_: np.exp(x - x.max(1, keepdims=True)),
    "rms_norm": lambda x, w, _: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w,
    "layer_norm": lambda x, w, b: (
        (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * w + b
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("n", [64, 100, 101, 3000])
@pytest.mark.parametrize("invariant", [False, True])
def test_norms_of_any_number_of_rows(name, n, invariant):
    """Widths that TMA takes and does not, several rows a tile and one; four programs in all, and
    one more of odd rows for fewer than a tile has."""
    rng = np.random.default_rng(n)
    vectors = {"softmax": 0, "rms_norm": 1, "layer_norm": 2}[name]
    w, b = rng.standard_normal((2, n)).astype(np.float32)
    x = rng.standard_normal((300, n)).astype(np.float32)
    want = NORMS[name](x, w, b)
    want = want / want.sum(1, keepdims=True) if name == "softmax" else want
    before = _core.plan_memory()["plans"]
    for m in (7, 8, 9, 300, 1, 33, 64, 299, 2):
        function = getattr(ops, name)
        got = function(x[:m], *(w, b)[:vectors], batch_invariant=invariant, interpret=True)
        np.testing.assert_allclose(np.asarray(got), want[:m], rtol=1e-4, atol=1e-5)
    odd = n == 101 and not invariant
    assert _core.plan_memory()["plans"] - before == _open_rows.STATIC + 1 + odd


@pytest.mark.parametrize("function", [ops.softmax, ops.rms_norm])
def test_rows_above_a_million_elements(function):
    """More rows of them than memory has are never promised."""
    for rows in (1, 2, 3, 4, 5):
        x = np.zeros((rows, (1 << 20) + 8), np.float16)
        x[:, 3] = 100
        got = function(x, interpret=True)
        want = 1 if function is ops.softmax else x.shape[1] ** 0.5
        np.testing.assert_allclose(got[:, 3].astype(np.float64), want, rtol=2e-3)
        assert not got[:, 4:].any()


def test_long_rows_of_any_number(monkeypatch):
    """Rows that clusters share, with a weight and a bias, without races."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    before, n = _core.plan_memory()["plans"], 20000
    rng = np.random.default_rng(n)
    w, b = rng.standard_normal((2, n)).astype(bfloat16)
    for m in (2, 3, 7):
        x = rng.standard_normal((m, n)).astype(bfloat16)
        wide = (y.astype(np.float32) for y in (x, w, b))
        got = ops.layer_norm(x, w, b, interpret=plgpu.InterpretParams(detect_races=True))
        np.testing.assert_allclose(got.astype(np.float32), NORMS["layer_norm"](*wide), atol=0.06)
    assert _core.plan_memory()["plans"] - before == 1


@pytest.mark.parametrize("m", [50, pytest.param(5000, marks=pytest.mark.long)])
def test_nvrtc_compiles_it(m):
    for first in range(3, 3 + _open_rows.STATIC):
        ops.matmul.kernel(spec(first, 4096), spec(4096, 14336))
    args = spec(m, 4096), spec(4096, 14336)
    lowered = ops.matmul.kernel(*args).lower(*args)
    assert re.search(r"const i32 (M|size_\d+)", lowered.as_text("cuda")) or m == 50
    assert lowered.cubin()


def test_several_kernels_are_compiled_without_arrays():
    """As the thread does that makes a program of its own."""
    a, b = (plgpu.ShapeDtypeStruct((m, 4112), float8_e4m3fn) for m in (21, 40))
    wide = plgpu.ShapeDtypeStruct(b.shape[::-1], b.dtype)
    scale = plgpu.ShapeDtypeStruct((1, 40), np.float32)
    config = ops.MatmulConfig(1, 64, cluster=1, step=128, slices=3)
    sliced = ops.matmul.kernel(a, b, scale_b=scale, transpose_b=True, config=config)
    padded = ops.matmul.kernel(a, wide, config=config._replace(slices=1))
    assert compile_for(sliced, [a, b, scale]).shape == (21, 40)
    assert compile_for(padded, [a, wide]).shape == (21, 40)
    programs = (sliced.slicing, [a, b]), (padded.pads[1], [wide]), (padded.product, [a, b])
    assert all(k.lower(*x).resources()["from_disk"] for k, x in programs)
    with pytest.raises(NotImplementedError, match="depend on the arrays"):
        compile_for(Padded(partial(ops.matmul), []), [a, b])


@pytest.mark.gpu
def test_on_a_gpu():
    torch = pytest.importorskip("torch")
    b = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    for m in (5, 6, 7, 64, 65, 333, 999, 2999, 8191, 37):
        a = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(ops.matmul(a, b), a @ b, rtol=2e-2, atol=0.5)


def test_slices_of_k():
    """A long K, divided among blocks: both kernels serve all rows of a bucket."""
    bits = products([90, 128, 65], 24, 2048, transpose_b=True)[0]
    assert [x.shape for x in bits] == [(90, 24), (128, 24), (65, 24)]
    kernels = [
        ops.matmul.kernel(spec(m, 2048), spec(24, 2048), transpose_b=True) for m in (90, 127)
    ]
    assert kernels[0] is kernels[1] and hasattr(kernels[0], "slicing")
    rng, numbers = np.random.default_rng(0), set()
    bias, b = (rng.standard_normal(s).astype(bfloat16) for s in ((24,), (24, 2048)))
    scales = rng.uniform(0.5, 2, (1, 24)).astype(np.float32)
    narrow = b.astype(float8_e4m3fn)
    for m in (5, 6, 7, 90, 127):
        a = rng.standard_normal((m, 2048)).astype(bfloat16)
        got = ops.matmul(a, b, bias=bias, transpose_b=True, out_dtype=np.float32, interpret=True)
        np.testing.assert_allclose(got, f32(a) @ f32(b).T + f32(bias), rtol=2e-2, atol=1)
        a, rows = a.astype(float8_e4m3fn), rng.uniform(0.5, 2, (m, 1)).astype(np.float32)
        how = dict(scale_a=rows, scale_b=scales, transpose_b=True, out_dtype=np.float32)
        got = ops.matmul(a, narrow, bias=bias, interpret=True, **how)
        want = f32(a) @ f32(narrow).T * rows * scales + f32(bias)
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2)
        kernel = ops.matmul.kernel(a, narrow, bias=bias, interpret=True, **how)
        numbers.add((m > 64, hasattr(kernel, "slicing")))
    assert (True, True) in numbers


# ---- kernels that work on each row alone ---------------------------------------------------------

ROWS = (5, 6, 7, 8, 1, 33, 130)


def gated(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def gated_gradients(grad, gate, up):
    s = 1 / (1 + np.exp(-gate))
    return grad * up * (s + gate * s * (1 - s)), grad * gate * s


def losses(logits, targets):
    top = logits.max(1)
    lse = np.log(np.exp(logits - top[:, None]).sum(1)) + top
    return lse - logits[np.arange(len(logits)), targets], lse


def gradient_of_loss(grad, logits, targets, lse):
    p = np.exp(logits - lse[:, None])
    p[np.arange(len(logits)), targets] -= 1
    return p * grad[:, None]


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def halves(m, n):
    both = normal(m, 2 * n)
    return (both,), gated(both[:, :n], both[:, n:])


def two(m, n):
    gate, up = normal(m, n), normal(m, n, seed=1)
    return (gate, up), gated(gate, up)


def backward(m, n):
    arrays = normal(m, n), normal(m, n, seed=1), normal(m, n, seed=2)
    return arrays, gated_gradients(*arrays)


def labelled(m, n):
    return normal(m, n), np.random.default_rng(m).integers(0, n, m).astype(np.int32)


def loss(m, n):
    arrays = labelled(m, n)
    return arrays, losses(*arrays)


def loss_backward(m, n):
    arrays = labelled(m, n)
    arrays = normal(m), *arrays, losses(*arrays)[1].astype(np.float32)
    return arrays, gradient_of_loss(*arrays)


def residual(m, n):
    x, r, w, b = normal(m, n), normal(m, n, seed=1), normal(n), normal(n, seed=1)
    total = x + r
    return (x, r, w, b), (NORMS["layer_norm"](total, w, b), total)


def rectified(m, n):
    grad, x = normal(m, n), normal(m, n, seed=1)
    return (grad, x), np.where(x > 0, grad, 0)


EACH_ROW = {
    "add_layer_norm": residual,
    "activation_backward": rectified,
    "gated_linear_unit": halves,
    "gated_linear_unit, two arrays": two,
    "gated_linear_unit_backward": backward,
    "cross_entropy": loss,
    "cross_entropy_backward": loss_backward,
}


@pytest.mark.parametrize("name", EACH_ROW)
@pytest.mark.parametrize("n", [64, 301, 2048, 2500])
@pytest.mark.parametrize("way", [True, pytest.param("emulate", marks=pytest.mark.exhaustive)])
def test_each_row_alone(name, n, way):
    """Several rows a tile and one, with and without a rest of columns: four programs in all."""
    function = getattr(ops, name.partition(",")[0])
    before = _core.plan_memory()["plans"]
    for m in ROWS:
        arrays, want = EACH_ROW[name](m, n)
        how = {"activation": "relu"} if name == "activation_backward" else {}
        got = plgpu.tree.leaves(function(*arrays, interpret=way, **how))
        for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-3, atol=1e-4)
    assert _core.plan_memory()["plans"] - before == _open_rows.STATIC + 1


def quantized(x, block=None, **options):
    return x, ops.quantize(x, block=block, **options)


def of_norm(x, block=None, **options):
    return NORMS["rms_norm"](x, 1, 0), ops.rms_norm_quantize(x, block=block, **options)


def of_unit(x, block=None, **options):
    both = np.concatenate([x, x[:, ::-1]], axis=1)
    return gated(x, x[:, ::-1]), ops.gated_linear_unit_quantize(both, block=block, **options)


@pytest.mark.parametrize("function", [quantized, of_norm, of_unit])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("n", [256, 384, 5000])
def test_quantised_rows(function, block, n):
    """Rows that lanes of a warp share, and others; blocks that fill them, and not."""
    before, count = _core.plan_memory()["plans"], 0
    for m in ROWS:
        want, (q, scales) = function(normal(m, n), block, interpret=True)
        assert scales.shape == ((m,) if block is None else (m, -(-n // block)))
        back = (
            np.asarray(q).astype(np.float32)
            * np.repeat(scales.reshape(m, -1), block or n, axis=1)[:, :n]
        )
        np.testing.assert_allclose(back, want, rtol=0.07, atol=np.abs(want).max() / 400)
        count = _core.plan_memory()["plans"] - before
    if n % 128 == 0 or function is quantized or block is None and function is of_norm:
        assert count == _open_rows.STATIC + 1


def test_positions_of_rotary():
    before = _core.plan_memory()["plans"]
    for m in ROWS:
        x, angles = normal(1, m, 3, 64), normal(m, 32, seed=1)
        cos, sin = np.cos(angles), np.sin(angles)
        got = ops.rotary(x, cos, sin, interpret=True)
        left, right = x[..., :32], x[..., 32:]
        cos, sin = cos[:, None], sin[:, None]
        want = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert _core.plan_memory()["plans"] - before == _open_rows.STATIC + 1


def test_arrays_of_more_dimensions(monkeypatch):
    """They are matrices to the program, results have the caller's shapes, and `out` is filled."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    before, w = _core.plan_memory()["plans"], normal(96)
    for lead in ((2, 5), (3, 1, 7), (1, 4, 1, 2)):
        x, out = normal(*lead, 96), np.full((*lead, 96), np.nan, np.float32)
        want = NORMS["rms_norm"](x.reshape(-1, 96), w, 0).reshape(x.shape)
        assert ops.rms_norm(x, w, out=out, interpret=True) is out
        for got in (out, ops.rms_norm(x, w, interpret=True)):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        q, scales = ops.quantize(x, interpret=True)
        assert q.shape == x.shape and scales.shape == lead
    assert _core.plan_memory()["plans"] - before == 2
    backwards = np.empty_like(x)[..., ::-1]
    with pytest.raises(ValueError, match="not contiguous"):
        ops.rms_norm(x, w, out=backwards, interpret=True)
    with pytest.raises(ValueError, match=r"out\[0\] must be float32 of shape"):
        ops.rms_norm(x, w, out=out.reshape(-1, 96), interpret=True)
    kernel = ops.rms_norm.kernel(x, w, interpret=True)
    for strange in (w, 3.0, "x"):
        with pytest.raises((ValueError, TypeError)):
            kernel(strange, w)
    for wrong in ((x,), (x, w, w), ()):
        with pytest.raises(TypeError, match="2 arrays are needed"):
            kernel(*wrong)
    with pytest.raises(TypeError, match="unknown argument 'seed'"):
        kernel(x, w, seed=3)
    np.testing.assert_array_equal(kernel(x, w), ops.rms_norm(weight=w, x=x, interpret=True))


# ---- other products ------------------------------------------------------------------------------


def of_rows(rng, m):
    """8-bit floats with scales of rows and columns."""
    a, b = (rng.standard_normal(s).astype(float8_e4m3fn) for s in ((m, 256), (192, 256)))
    x, y = (rng.uniform(0.5, 2, s).astype(np.float32) for s in ((m, 1), (1, 192)))
    how = {"transpose_b": True, "scale_a": x, "scale_b": y, "out_dtype": np.float32}
    return ops.matmul, (a, b), how, f32(a) * x @ (f32(b) * y.T).T


def of_blocks(rng, m):
    a, b = (rng.standard_normal(s).astype(float8_e4m3fn) for s in ((m, 256), (192, 256)))
    x, y = (rng.uniform(0.5, 2, s).astype(np.float32) for s in ((m, 2), (2, 2)))
    how = {"transpose_b": True, "scale_a": x, "scale_b": y, "out_dtype": np.float32}
    wide = np.repeat(np.repeat(y, 128, 0)[:192], 128, 1)
    return ops.matmul, (a, b), how, f32(a) * np.repeat(x, 128, 1) @ (f32(b) * wide).T


def of_int8(rng, m):
    a, b = (rng.integers(-9, 9, s).astype(np.int8) for s in ((m, 256), (192, 256)))
    return ops.matmul, (a, b), {"transpose_b": True, "out_dtype": np.int32}, f32(a) @ f32(b).T


def of_tf32(rng, m):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, 128), (128, 192)))
    return ops.matmul, (a, b), {"precision": "tf32"}, a @ b


def of_float32(rng, m):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, 101), (101, 77)))
    return ops.matmul, (a, b), {}, a @ b


def of_odd_rows(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 333), (333, 77)))
    return ops.matmul, (a, b), {"out_dtype": np.float32}, f32(a) @ f32(b)


def of_weights(rng, m):
    """The rows are what is summed over."""
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 96), (m, 136)))
    return ops.matmul, (a, b), {"transpose_a": True, "out_dtype": np.float32}, f32(a).T @ f32(b)


def of_odd_weights(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 77), (m, 33)))
    return ops.matmul, (a, b), {"transpose_a": True, "out_dtype": np.float32}, f32(a).T @ f32(b)


def mixed(rng, m):
    x, w = rng.standard_normal((m, 256)).astype(bfloat16), rng.integers(-9, 9, (200, 256))
    scales = rng.uniform(0.5, 2, (4, 200)).astype(np.float32)
    want = f32(x) @ (w * np.repeat(scales, 64, 0).T).T
    return ops.mixed_matmul, (x, w.astype(np.int8), scales), {"out_dtype": np.float32}, want


def with_gate(rng, m):
    x, w = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 128), (128, 256)))
    both = f32(x) @ f32(w)
    return ops.gated_matmul, (x, w), {}, gated(both[:, :128], both[:, 128:])


def in_groups(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 128), (3, 128, 192)))
    ends = np.sort(rng.integers(0, m + 1, 3))
    want = np.zeros((m, 192), np.float32)
    for start, end, matrix in zip((0, *ends), ends, b):
        want[start:end] = f32(a[start:end]) @ f32(matrix)
    sizes = np.diff([0, *ends]).astype(np.int32)
    return ops.ragged_dot, (a, b, sizes), {"out_dtype": np.float32}, want


def in_odd_groups(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 77), (3, 77, 40)))
    return _in_groups(rng, a, b, f32(a), f32(b), {})


def in_groups_by_config(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 64), (4, 64, 128)))
    return _in_groups(rng, a, b, f32(a), f32(b), {"config": ops.RaggedConfig(1, 64, 3, 1)})


def in_groups_of_8_bits(rng, m):
    a, b = (rng.integers(-3, 4, s).astype(float8_e4m3fn) for s in ((m, 300), (3, 130, 300)))
    x, y = (rng.choice([0.5, 1, 2], s).astype(np.float32) for s in ((m, 3), (3, 2, 3)))
    left = f32(a) * np.repeat(x, 128, 1)[:, :300]
    wide = np.repeat(np.repeat(y, 128, 1), 128, 2)[:, :130, :300]
    right = (f32(b) * wide).swapaxes(1, 2)
    how = {"transpose_rhs": True, "scale_lhs": x, "scale_rhs": y}
    return _in_groups(rng, a, b, left, right, how)


def _in_groups(rng, a, b, left, right, options):
    ends = np.sort(rng.integers(0, len(a) + 1, len(b)))
    want = np.zeros((len(a), right.shape[2]), np.float32)
    for start, end, matrix in zip((0, *ends), ends, right):
        want[start:end] = left[start:end] @ matrix
    sizes = np.diff([0, *ends]).astype(np.int32)
    return ops.ragged_dot, (a, b, sizes), {"out_dtype": np.float32, **options}, want


def of_odd_groups(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 77), (m, 33)))
    return _of_groups(rng, a, b, 3)


def of_groups(rng, m):
    a, b = (rng.standard_normal(s).astype(bfloat16) for s in ((m, 128), (m, 192)))
    return _of_groups(rng, a, b, 3)


def _of_groups(rng, a, b, groups):
    ends = np.sort(rng.integers(0, len(a) + 1, groups))
    parts = list(zip((0, *ends), ends))
    want = np.stack([f32(a[i:j]).T @ f32(b[i:j]) for i, j in parts])
    sizes = np.diff([0, *ends]).astype(np.int32)
    return ops.transposed_ragged_dot, (a, b, sizes), {"out_dtype": np.float32}, want


def f32(x):
    return np.asarray(x).astype(np.float32)


PRODUCTS = [of_rows, of_blocks, of_int8, of_tf32, of_float32, of_odd_rows, mixed, with_gate]
PRODUCTS += [in_groups, of_groups, of_weights, of_odd_weights, in_odd_groups, of_odd_groups]
PRODUCTS += [in_groups_by_config, in_groups_of_8_bits]


@pytest.mark.parametrize("make", PRODUCTS)
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
def test_other_products_of_any_number_of_rows(make, way, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 4)
    rng, before = np.random.default_rng(5), _core.plan_memory()["plans"]
    for m in (3, 17, 63, 65, 130, 200):
        function, arrays, options, want = make(rng, m)
        got = f32(function(*arrays, interpret=way, **options))
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
    assert _core.plan_memory()["plans"] - before <= 7


@pytest.mark.parametrize("make", PRODUCTS)
def test_other_products_have_at_most_twelve_programs(make, monkeypatch):
    """Of 200 random numbers of rows up to 8192, for operands without elements."""
    rng, kernels = np.random.default_rng(0), set()
    function, arrays, options, _ = make(rng, 1000)
    given = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    for m in map(int, rng.integers(1, 8193, 200)):

        def sized(x, m=m):
            shape = tuple(m if n == 1000 else n for n in x.shape)
            return plgpu.ShapeDtypeStruct(shape, x.dtype)

        named = {k: sized(v) for k, v in given.items()}
        kernel = function.kernel(*map(sized, arrays), **options | named)
        kernels.add(getattr(kernel, "product", kernel))  # beside kernels that transpose b
    assert len(kernels) <= 12


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sms", [2, 6])  # weights are many for one, few for the other
def test_mixed_products_with_tiles_of_several_heights(groups, sms, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: sms)
    rng, used = np.random.default_rng(7), set()
    w = rng.integers(-9, 9, (300, 256)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (groups, 300)).astype(np.float32)
    full = f32(w) * np.repeat(scales, 256 // groups, 0).T
    for m in (65, 97, 100, 129, 150, 170, 193, 250, 300, 400):
        x = rng.standard_normal((m, 256)).astype(bfloat16)
        options = {"out_dtype": np.float32, "interpret": plgpu.InterpretParams(detect_races=True)}
        used.add(ops.mixed_matmul.kernel(x, w, scales, **options))
        got = ops.mixed_matmul(x, w, scales, **options)
        np.testing.assert_allclose(got, f32(x) @ full.T, rtol=1e-3, atol=1e-2)
    assert len(used) > 2


def test_gated_products_with_several_tilings(monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 8)
    rng, used = np.random.default_rng(7), set()
    x, w = (rng.standard_normal(s).astype(bfloat16) for s in ((600, 128), (520, 128)))
    both = f32(x) @ f32(w).T
    want = gated(both[:, :260], both[:, 260:])
    options = {"interpret": plgpu.InterpretParams(detect_races=True), "transpose_b": True}
    for m in (40, 65, 129, 140, 200, 257, 300, 390, 520, 600):
        used.add(ops.gated_matmul.kernel(x[:m], w, **options))
        got = f32(ops.gated_matmul(x[:m].copy(), w, **options))
        np.testing.assert_allclose(got, want[:m], rtol=2e-2, atol=2e-2 * np.abs(want).max())
    assert len(used) > 3


@pytest.mark.parametrize("n", [512, 4096, 8192, 14336])
@pytest.mark.parametrize("function", [ops.mixed_matmul, ops.gated_matmul])
def test_no_rows_need_more_than_twelve_programs(function, n):
    """Also where each program is met."""
    rows = [1, 2, *range(3, 1025, 11), *range(1030, 8193, 97)]
    for scales in ([], [plgpu.ShapeDtypeStruct((32, n), bfloat16)]):
        if function is ops.mixed_matmul:
            others, options = (plgpu.ShapeDtypeStruct((n, 4096), np.int8), *scales), {}
        else:
            others, options = (spec(2 * n, 4096),), {"transpose_b": True}
        kernels = {function.kernel(spec(m, 4096), *others, **options) for m in rows}
        assert len(kernels) <= 12


@pytest.mark.parametrize("make", [of_rows, mixed, in_groups, "softmax", "more dimensions"])
def test_rows_that_come_often(make, monkeypatch):
    """They get a program of their own, unless bits have to stay."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    function, arrays, options = ops.softmax, (normal(*(2, 3, 64)[-2 - (make != "softmax") :]),), {}
    if callable(make):
        function, arrays, options, _ = make(np.random.default_rng(0), 100)
    shared, deadline = function.kernel(*arrays, **options), time.monotonic() + 60
    while (found := function.kernel(*arrays, **options)) is shared:
        assert time.monotonic() < deadline
    given = [*arrays, *(x for x in options.values() if isinstance(x, np.ndarray))]
    assert "size" not in found.lower(*given).as_text("traced").split("threads")[0]
    if function is ops.softmax:
        same = function.kernel(*arrays, deterministic=True)
        assert all(function.kernel(*arrays, deterministic=True) is same for _ in range(300))


# ---- caches that grow ----------------------------------------------------------------------------


def test_4096_steps_of_decoding_have_at_most_twelve_programs():
    q, kernels = spec(1, 1, 32, 128), {}
    for n in range(1, 4097):
        cache = spec(1, n, 8, 128)
        kernel = ops.attention_decode.kernel(q, cache, cache).kernel
        kernels[id(kernel)] = kernel
    assert len(kernels) <= 12


@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"window": (50, None)}])
@pytest.mark.parametrize("way", [True, pytest.param("emulate", marks=pytest.mark.exhaustive)])
def test_decoding_with_a_cache_that_grows(options, way):
    rng = np.random.default_rng(1)
    options = dict(options)
    shortened = options.pop("lengths", False)
    for n in (70, 100, 33, 64, 65, 129, 511, 513, 700):
        q = rng.standard_normal((1, 1, 8, 64)).astype(bfloat16)
        k, v = (rng.standard_normal((1, n, 2, 64)).astype(bfloat16) for _ in range(2))
        if shortened:
            options["kv_lengths"] = np.array([n - 20], np.int32)
        got = np.asarray(ops.attention_decode(q, k, v, **options, interpret=way))
        end = n - 20 if shortened else n
        first = max(0, n - 1 - options["window"][0]) if "window" in options else 0
        k, v = (np.repeat(x[0, first:end].astype(np.float32), 4, axis=1) for x in (k, v))
        s = np.einsum("hd,khd->hk", q[0, 0].astype(np.float32), k) / 8
        p = np.exp(s - s.max(1, keepdims=True))
        want = np.einsum("hk,khd->hd", p / p.sum(1, keepdims=True), v)
        np.testing.assert_allclose(got[0, 0].astype(np.float32), want, atol=2e-2)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
def test_decoding_of_any_batch(latent, paged, way, monkeypatch):
    """Batches, capacities, page tables and numbers of pages; what stands beyond a sequence's end is
    nothing to the others. Two programs: up to 16 sequences, and more."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 4)
    rng, kernels, dims = np.random.default_rng(3), set(), (128,) if latent else (2, 64)
    for batch, keys in ((5, 70), (1, 33 if paged else 0), (16, 16), (17, 50), (3, 129)):
        if not keys:  # without pages a batch of one has programs of its own
            continue
        lengths = rng.integers(0, keys + 1, batch).astype(np.int32)
        q = rng.standard_normal((batch, 2, 4, dims[-1])).astype(np.float16)
        caches = rng.standard_normal((1 if latent else 2, batch, keys, *dims)).astype(np.float16)
        for b, n in enumerate(lengths):
            caches[:, b, n:] = np.nan
        want, lse = zip(*(attended(q[b], caches[:, b, :n]) for b, n in enumerate(lengths)))
        how, given = {"kv_lengths": lengths, "return_lse": True, "interpret": way}, caches
        if paged:
            entries = -(-keys // 16)
            table = rng.permutation(batch * entries + 2)[: batch * entries]
            how["page_table"] = table.reshape(batch, entries).astype(np.int32)
            given = np.full((len(caches), batch * entries + 2, 16, *dims), np.nan, np.float16)
            for page, at in zip(table, np.ndindex(batch, entries)):
                rows = caches[:, at[0], at[1] * 16 : at[1] * 16 + 16]
                given[:, page, : rows.shape[1]] = rows
        function, more = ops.attention_decode, {}
        if latent:
            function, more = ops.mla_decode, {"value_dim": 128}
        out = np.full((*q.shape[:3], 128 if latent else 64), np.nan, np.float16)
        logs = np.full((batch, 4, 2), np.nan, np.float32)
        for into in ({}, {"out": (out, logs)}):
            got = function(q, *given, **how, **more, **into)
            np.testing.assert_allclose(got[0], np.stack(want), atol=3e-3)
            np.testing.assert_allclose(got[1], np.stack(lse), atol=2e-3)
        kernels.add(function.kernel(q, *given, **how, **more).kernel.kernel)
    assert len(kernels) == 2


def test_pages_of_many_elements(monkeypatch):
    """2**31 of these would be more than arrays have, of the values though not of the keys."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    rng, lengths = np.random.default_rng(0), np.array([300, 20], np.int32)
    q = rng.standard_normal((2, 1, 2, 32)).astype(np.float16)
    k, v = (rng.standard_normal((3, 256, 2, n)).astype(np.float16) for n in (32, 160))
    table = np.array([[2, 0], [1, -1]], np.int32)
    for function in (ops.attention_decode, ops.attention):
        got = function(q, k, v, kv_lengths=lengths, page_table=table, interpret=True)
        for b, n in enumerate(lengths):
            keys, values = (np.concatenate(x[table[b]])[:n].astype(np.float64) for x in (k, v))
            e = np.exp(np.einsum("hd,khd->kh", q[b, 0].astype(np.float64), keys) * 32**-0.5)
            want = np.einsum("kh,khd->hd", e / e.sum(0), values)
            np.testing.assert_allclose(got[b, 0].astype(np.float64), want, atol=3e-3)


def attended(q, caches):
    """What queries (query, head, dim) see of keys and values (key, head, dim) or latent rows."""
    k, v = (caches[i].astype(np.float64) for i in (0, -1))
    if k.ndim == 2:
        k = v = k[:, None]
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    if not len(k):
        return np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[1::-1], -np.inf)
    s = np.einsum("qhd,khd->hqk", q.astype(np.float64), k) * q.shape[2] ** -0.5
    e = np.exp(s)
    return np.einsum("hqk,khd->qhd", e / e.sum(2, keepdims=True), v), np.log(e.sum(2))


def test_batches_of_decoding_have_at_most_twelve_programs():
    kernels, rng = set(), np.random.default_rng(0)
    for batch, entries, pages in rng.integers(1, (1025, 129, 5000), (200, 3)).tolist():
        cache, table = spec(pages, 64, 8, 128), plgpu.ShapeDtypeStruct((batch, entries), np.int32)
        given = {"page_table": table, "kv_lengths": plgpu.ShapeDtypeStruct((batch,), np.int32)}
        kernel = ops.attention_decode.kernel(spec(batch, 1, 32, 128), cache, cache, **given).kernel
        kernels.add(getattr(kernel, "kernel", kernel))
    assert len(kernels) <= 12


# ---- gradients of norms --------------------------------------------------------------------------


def of_norm_backward(name, g, x, w):
    """Gradients of the argument, of the weight and of a bias, in float64."""
    g, x = g.astype(np.float64), x.astype(np.float64)
    mean = x.mean(-1, keepdims=True) if name == "layer_norm" else 0.0
    r = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + (1e-5 if np.any(mean) else 1e-6))
    y, gw, rows = (x - mean) * r, g * w, (-1, x.shape[-1])
    dx = gw - y * (gw * y).mean(-1, keepdims=True)
    dx = dx - gw.mean(-1, keepdims=True) if name == "layer_norm" else dx
    return r * dx, (g * y).reshape(rows).sum(0), g.reshape(rows).sum(0)


@pytest.mark.parametrize("n", [64, 777, 1024, pytest.param(9000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
def test_gradients_of_norms(n, way, monkeypatch):
    """Tiles of several rows, rows in parts, through shared memory and by roles; more blocks than
    rows; matrices and arrays of more dimensions. One program each, and one of its sums."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 4)
    before, w = _core.plan_memory()["plans"], normal(n, seed=3)
    for lead in ((1,), (33,), (2, 3), (3, 1, 5)):
        g, x = normal(*lead, n), normal(*lead, n, seed=1)
        y = NORMS["softmax"](x.reshape(-1, n)).reshape(x.shape)
        y /= y.sum(-1, keepdims=True)
        dx, dw, db = of_norm_backward("layer_norm", g, x, w)
        pairs = [
            (ops.layer_norm_backward(g, x, w, bias=True, interpret=way), (dx, dw, db)),
            (ops.rms_norm_backward(g, x, w, interpret=way), of_norm_backward("", g, x, w)[:2]),
            (ops.softmax_backward(g, y, interpret=way), y * (g - (g * y).sum(-1, keepdims=True))),
        ]
        if len(lead) > 1:
            pairs.append((ops.column_sums(g, interpret=way), db))
        for got, want in pairs:
            for a, b in zip(plgpu.tree.leaves(got), plgpu.tree.leaves(want), strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=3e-5 * np.abs(b).max() + 1e-5)
    assert _core.plan_memory()["plans"] - before <= 7


@pytest.mark.parametrize("name", ["rms_norm_backward", "softmax_backward", "column_sums"])
def test_gradients_have_at_most_twelve_programs(name):
    kernels, function = set(), getattr(ops, name)
    for m in map(int, np.random.default_rng(0).integers(1, 8193, 200)):
        arrays = [spec(m, 4096)] * (1 if name == "column_sums" else 2)
        kernel = function.kernel(*arrays, *[spec(4096)] * (name == "rms_norm_backward"))
        steps = getattr(kernel, "kernels", [kernel])
        kernels |= {getattr(k, "kernel", k) for k in steps}
        kernels |= set(getattr(kernel, "sums", ()))
    assert len(kernels) <= 12


# ---- other functions of batches ------------------------------------------------------------------


def test_rotary_of_batches(monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    before, how = _core.plan_memory()["plans"], plgpu.InterpretParams(detect_races=True)
    for batch, length in ((3, 7), (2, 40), (5, 1)):
        x, angles = normal(batch, length, 3, 64), normal(length, 32, seed=1)
        cos, sin = np.cos(angles), np.sin(angles)
        left, right, c, s = x[..., :32], x[..., 32:], cos[:, None], sin[:, None]
        want = np.concatenate([left * c - right * s, right * c + left * s], axis=-1)
        np.testing.assert_allclose(ops.rotary(x, cos, sin, interpret=how), want, atol=1e-5)
    assert _core.plan_memory()["plans"] - before == 1


def test_merged_parts(monkeypatch):
    """Any number of parts, any batch and any number of queries."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    before, how = _core.plan_memory()["plans"], plgpu.InterpretParams(detect_races=True)
    for parts, batch, queries in ((3, 4, 1), (2, 9, 1), (3, 2, 3), (5, 1, 8), (2, 3, 8)):
        o, lse = normal(parts, batch, queries, 4, 64), normal(parts, batch, 4, queries, seed=1)
        lse[1, 0, 0, 0] = -np.inf
        got, log = ops.merge_attention(o, lse, return_lse=True, interpret=how)
        e = np.exp(lse.astype(np.float64))
        want = np.einsum("pbhn,pbnhd->bnhd", e / e.sum(0), o)
        np.testing.assert_allclose(got, want, atol=1e-5)
        np.testing.assert_allclose(log, np.log(e.sum(0)), atol=1e-5)
    assert _core.plan_memory()["plans"] - before == 2  # of two parts, and of more


def test_tokens_of_any_number_of_rows(monkeypatch):
    """The same tokens as with a program for each number of rows."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 40)
    logits, seed, tokens = normal(40, 5000), np.array([7], np.int32), {}
    top_k = np.random.default_rng(0).integers(1, 50, 40).astype(np.int32)
    for static in (99, 0):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        for m in (1, 3, 5, 40):
            options = {"top_k": top_k[:m].copy(), "top_p": 0.9, "temperature": 0.7}
            got = ops.sample(logits[:m].copy(), seed, **options, interpret=True)
            np.testing.assert_array_equal(got, tokens.setdefault(m, got))


# ---- logarithms of attention ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_with_logarithms(batch, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    rng, used = np.random.default_rng(2), set()
    for n, m in ((130, 150), (257, 65)):
        q = rng.standard_normal((batch, n, 4, 64)).astype(np.float16)
        k, v = rng.standard_normal((2, batch, m, 2, 64)).astype(np.float16)
        wide = (x.astype(np.float64) for x in (q, np.repeat(k, 2, 2), np.repeat(v, 2, 2)))
        q64, k64, v64 = wide
        e = np.exp(np.einsum("bqhd,bkhd->bhqk", q64, k64) / 8)
        total = e.sum(3)
        out = np.full_like(q, np.nan), np.full((batch, 4, n), np.nan, np.float32)
        ops.attention(q, k, v, return_lse=True, out=out, interpret=True)
        want = np.einsum("bhqk,bkhd->bqhd", e / total[..., None], v64)
        np.testing.assert_allclose(out[0], want, atol=5e-3)
        np.testing.assert_allclose(out[1], np.log(total), atol=5e-3)
        used.add(ops.attention.kernel(q, k, v, return_lse=True, interpret=True).kernel)
    assert len(used) == 1


def test_views_under_vmap(monkeypatch):
    """Elements of a batch are not reshaped: they may be anywhere in memory."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    vmap, rng = plgpu.vmap, np.random.default_rng(4)
    x, angles, o, lse, q, k = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in (
            (3, 9, 2, 4, 64), (9, 32), (2, 3, 2, 5, 4, 64), (2, 3, 2, 4, 5), (2, 1, 8, 1, 64),
            (2, 1, 700, 1, 64),
        )
    )  # fmt: skip
    q, k = q.astype(np.float16), k.astype(np.float16)
    merge = partial(ops.merge_attention, return_lse=True, interpret=True)
    attention = partial(ops.attention, return_lse=True, interpret=True)
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        rotated = vmap(lambda x: ops.rotary(x, angles, angles, interpret=True), in_axes=2)(x)
        divided = vmap(lambda q, k: attention(q, k, k))(q, k)
        found.append((rotated, *vmap(merge)(o, lse), *divided))
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)
    assert attention.func.kernel(q[0], k[0], k[0], return_lse=True).merge  # of divided keys


# ---- gradients of attention ----------------------------------------------------------------------


def gradients_of_attention(q, k, v, g, seen):
    """(o, lse, dq, dk, dv) in float64. seen: which queries see which keys."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bnhd,bmhd->bhnm", q, wide_k) * scale
    e = np.where(seen, np.exp(s), 0)
    total = e.sum(3, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    o = np.einsum("bhnm,bmhd->bnhd", p, wide_v)
    delta = np.einsum("bnhd,bnhd->bhn", g, o)
    ds = p * (np.einsum("bnhd,bmhd->bhnm", g, wide_v) - delta[..., None]) * scale
    dq = np.einsum("bhnm,bmhd->bnhd", ds, wide_k)
    pair = np.einsum("bhnm,bnhd->bmhd", ds, q), np.einsum("bhnm,bnhd->bmhd", p, g)
    dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in pair)
    return o, np.log(total[..., 0], where=total[..., 0] > 0, out=total[..., 0] * 0), dq, dk, dv


@pytest.mark.filterwarnings("error::UserWarning")  # copies by other means than TMA
@pytest.mark.parametrize(
    "dim, options",
    [
        (64, {}),
        (64, {"causal": True}),
        (128, {"causal": True, "bottom_right": True}),
        (128, {"deterministic": True, "window": (20, 30)}),
        pytest.param(256, {"causal": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
def test_gradients_of_attention(dim, options, packed, way, monkeypatch):
    """One program of each kernel for all lengths and numbers of sequences."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 6)
    rng, how, used = np.random.default_rng(dim), dict(options, interpret=way), set()
    forward = {name: x for name, x in how.items() if name != "deterministic"}
    left, right = how.get("window", (None, None))
    right = 0 if "causal" in how else right
    for n, m in ((150, 150), (129, 170), (200, 131), (200, 400)):
        q, g = rng.standard_normal((2, 1, n, 4, dim)).astype(np.float16)
        k, v = rng.standard_normal((2, 1, m, 2, dim)).astype(np.float16)
        starts, cu = (np.array([0, n]), np.array([0, m])), {}
        if packed:
            starts = np.array([0, 7, 90, n], np.int32), np.array([0, 40, 41, m], np.int32)
            starts = starts if n < 180 else tuple(x[[0, 2, 3]] for x in starts)
            cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))
        i, j = (np.searchsorted(x, np.arange(x[-1]), side="right") - 1 for x in starts)
        distance = (np.arange(m) - starts[1][j]) - (np.arange(n) - starts[0][i])[:, None]
        if "bottom_right" in how:
            distance = distance - (np.diff(starts[1])[i] - np.diff(starts[0])[i])[:, None]
        seen = i[:, None] == j
        seen &= (distance <= (m if right is None else right)) & (distance >= -(left or n + m))
        want = gradients_of_attention(q, k, v, g, seen)
        o, lse = ops.attention(q, k, v, return_lse=True, **forward, **cu)
        found = ops.attention_backward(g, q, k, v, o, lse, **how, **cu)
        there = np.broadcast_to(seen.any(1), lse.shape)
        np.testing.assert_allclose(lse[there], want[1][there], atol=5e-3)
        for a, b in zip((o, *found), (want[0], *want[2:])):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=2e-2 * max(1, np.abs(b).max()))
        kernels = ops.attention_backward.kernel(g, q, k, v, o, lse, **how, **cu)
        kernel = kernels.fused.fused if kernels.fused else kernels.by_queries
        used.add(getattr(kernel, "kernel", kernel))
    assert len(used) <= 1 + ("bottom_right" in how)  # which equal lengths do not need


@pytest.mark.parametrize("dim, options", [(64, {}), (128, {}), (64, {"causal": True})], ids=str)
def test_gradients_of_batches(dim, options, monkeypatch):
    """Rows of a batch entry end at those of the next one."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    rng, used, how = np.random.default_rng(2), set(), dict(options, interpret=True)
    for deterministic, n, m in ((False, 130, 149), (False, 257, 65), (True, 75, 131)):
        q = rng.standard_normal((3, n, 4, dim)).astype(np.float16)
        k, v = rng.standard_normal((2, 3, m, 2, dim)).astype(np.float16)
        seen = np.ones((n, m), bool)
        want = gradients_of_attention(q, k, v, q, np.tril(seen) if options else seen)
        o, lse = (x.astype(t) for x, t in zip(want, (np.float16, np.float32)))
        out = [np.full_like(x, np.nan) for x in (q, k, v)]
        how["deterministic"] = deterministic
        ops.attention_backward(q, q, k, v, o, lse, out=tuple(out), **how)
        for found in (out, ops.attention_backward(q, q, k, v, o, lse, **how)):
            for a, b in zip(found, want[2:]):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, atol=1e-2 * max(1, np.abs(b).max()))
        if not deterministic:
            used.add(ops.attention_backward.kernel(q, q, k, v, o, lse, **how).fused.fused.kernel)
    assert len(used) == 1


@pytest.mark.parametrize(
    "way",
    [
        plgpu.InterpretParams(detect_races=True),
        pytest.param("emulate", marks=pytest.mark.exhaustive),
    ],
    ids=("interpret", "host"),
)
@pytest.mark.parametrize(
    "dim, options",
    [
        (64, {}),
        (64, {"window": (20, 30)}),
        (128, {"causal": True}),
        (128, {"deterministic": True}),
        (64, {"deterministic": True, "causal": True}),
        pytest.param(256, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_of_batches_beside_nan(dim, options, way, monkeypatch):
    """Rows of the next batch entry, which blocks read, too, may have any values."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    rng, n, m = np.random.default_rng(dim), 75, 140
    q, o = rng.standard_normal((2, 3, n, 4, dim)).astype(np.float16)
    k, v = rng.standard_normal((2, 3, m, 2, dim)).astype(np.float16)
    arrays = q, q, k, v, o, np.full((3, 4, n), 9, np.float32)
    gradients = partial(ops.attention_backward, interpret=way, **options)
    clean = gradients(*arrays)
    for x in arrays:
        x[1] = np.nan
    for a, b in zip(gradients(*arrays), clean):
        np.testing.assert_allclose(a[::2], b[::2], atol=1e-2 * np.abs(b).max())
        assert np.isnan(a[1]).any() and np.isfinite(b).all()


@pytest.mark.parametrize("dim", [64, 96])
def test_gradients_of_batches_under_vmap(dim, monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    rng, found = np.random.default_rng(3), []
    q = rng.standard_normal((2, 2, 70, 2, dim)).astype(np.float16)
    k, lse = rng.standard_normal((2, 2, 33, 1, dim)).astype(np.float16), np.full((2, 2, 2, 70), 8.0)
    arrays = q, q, k, k, q, lse.astype(np.float32)
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        found.append(plgpu.vmap(partial(ops.attention_backward, interpret=True))(*arrays))
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


# ---- other functions -----------------------------------------------------------------------------


def normals(rng, *shapes):
    return [rng.standard_normal(s).astype(np.float16) for s in shapes]


def class_losses(rng, m):
    (logits,) = normals(rng, (m, 4104))
    return ops.cross_entropy, (logits, rng.integers(0, 4104, m).astype(np.int32)), {}


def class_gradients(rng, m):
    logits, grad = normals(rng, (m, 4104), (m,))
    grad, targets = grad.astype(np.float32), rng.integers(0, 4104, m).astype(np.int32)
    return ops.cross_entropy_backward, (grad, logits, targets, grad + 9), {}


def rotated_gradients(rng, m):
    arrays = normals(rng, *[(2, m, 2, 64)] * 2, *[(m, 32)] * 2, (64,))
    return ops.rotary_backward, arrays, {}


def one_rotated_gradient(rng, m):
    return ops.rotary_backward, normals(rng, *[(1, m, 2, 24)] * 2, *[(m, 12)] * 2, (24,)), {}


def activation_and_bias(rng, m):
    return ops.activation_backward, normals(rng, (m, 136), (m, 136)), {"bias": True}


def activation_and_bias_3d(rng, m):
    return ops.activation_backward, normals(rng, (2, m, 72), (2, m, 72)), {"bias": True}


def scaled(rng, m):
    return ops.quantize_by_scale, (*normals(rng, (3, m, 24)), np.full(1, 0.01, np.float32)), {}


def step_of_adamw(rng, m):
    arrays = [x.astype(np.float32) for x in normals(rng, *[(m, 21)] * 4)]
    settings = np.array([1e-3, 0.9, 0.95, 1e-8, 0.1, 3], np.float32)
    return ops.adamw, (*arrays[:3], np.abs(arrays[3]), settings), {}


def both_products(rng, m):
    return ops.gated_matmul, normals(rng, (m, 64), (64, 256)), {"return_products": True}


def along_another_axis(rng, m):
    return ops.softmax_backward, normals(rng, *[(3, m, 20, 9)] * 2), {"axis": 2}


def gradient_of_input(rng, m):
    return input_gradient, normals(rng, (m, 144), (64, 72), (64, 72)), {}


def gradient_of_up(rng, m):
    return weight_gradient, normals(rng, (m, 64), (m, 144)), {"up": True}


def padded_gradients(rng, m):
    q, k, v, o = normals(rng, (2, m, 2, 40), (2, 30, 1, 40), (2, 30, 1, 24), (2, m, 2, 24))
    return ops.attention_backward, (o, q, k, v, o, np.full((2, 2, m), 8, np.float32)), {}


@pytest.mark.parametrize(
    "make",
    [
        class_losses, class_gradients, rotated_gradients, one_rotated_gradient, scaled,
        activation_and_bias, activation_and_bias_3d, step_of_adamw, both_products,
        along_another_axis,
        gradient_of_input,
        gradient_of_up, padded_gradients,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "way", [True, pytest.param("emulate", marks=pytest.mark.exhaustive)], ids=str
)
def test_programs_of_any_sizes(make, way, monkeypatch):
    """As those of the sizes, whose results other tests compare with NumPy's."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 3)
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        for m in (5, 33, 70):
            function, arrays, options = make(np.random.default_rng(m), m)
            got = function(*arrays, interpret=way, **options)
            got = got if isinstance(got, tuple) else (got,)
            found.append([np.asarray(x, np.float32) for x in got])
    for a, b in zip(found[:3], found[3:]):
        for x, y in zip(a, b):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3 * np.abs(y).max())
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    kept = []
    for m in range(1, 60, 2):
        function, arrays, options = make(np.random.default_rng(0), m)
        kept.append(function.kernel(*arrays, **options))
    programs = {id(kernel): kernel.definition.name for kernel in kernels_in(kept)}
    names = list(programs.values())
    assert len(names) > 3 and max(map(names.count, names)) <= 12


@pytest.mark.parametrize(
    "make",
    [
        class_gradients, rotated_gradients, activation_and_bias_3d, scaled, step_of_adamw,
        both_products, gradient_of_input, along_another_axis, padded_gradients,
        lambda rng, m: (ops.matmul, normals(rng, (m, 33), (33, 40)), {}),
        lambda rng, m: (ops.matmul, normals(rng, (m, 33), (m, 40)), {"transpose_a": True}),
    ],
)  # fmt: skip
def test_programs_of_any_sizes_under_vmap(make, monkeypatch):
    """Programs of mapped kernels know their sizes."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 3)
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        function, arrays, options = make(np.random.default_rng(0), 20)
        arrays = [np.stack([x, x[::-1]]) for x in arrays]
        got = plgpu.vmap(partial(function, interpret=True, **options))(*arrays)
        found.append([np.asarray(x, np.float32) for x in plgpu.tree.leaves(got)])
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3 * np.nanmax(np.abs(y)))


@pytest.mark.parametrize(
    "way", [True, pytest.param("emulate", marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("angles, scales", [(False, False), (True, True)])
def test_appended_pages_of_any_sizes(angles, scales, way, monkeypatch):
    """Sequences, rows, entries of the page table and positions."""
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        rng = np.random.default_rng(1)
        for batch, rows, entries, positions in ((3, 5, 4, 40), (1, 9, 6, 70), (7, 1, 3, 11)):
            pages = np.zeros((2, 32, 8, 2, 16), np.int8 if scales else np.float16)
            new = normals(rng, *[(batch, rows, 2, 16)] * 2)
            table = rng.permutation(32)[: batch * entries].reshape(batch, entries)
            options = {}
            if angles:
                options |= zip(("cos", "sin"), normals(rng, *[(positions, 6)] * 2))
            if scales:
                options |= {"k_scale": np.full((batch, 2), 0.02, np.float32)}
                options |= {"v_scale": np.full(2, 0.03, np.float32)}
            lengths = rng.integers(0, 8 * entries, batch)
            ints = table.astype(np.int32), lengths.astype(np.int32)
            ops.append_pages(*pages, *new, *ints, interpret=way, **options)
            assert pages.any()
            found.append(pages)
    for a, b in zip(found[:3], found[3:]):
        np.testing.assert_array_equal(a, b)
    sizes, kernels = np.random.default_rng(0).integers(1, 60, (40, 3)), set()
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    for batch, rows, entries in sizes.tolist():
        new = spec(batch, rows, 2, 16)
        ints = [plgpu.ShapeDtypeStruct(s, np.int32) for s in ((batch, entries), (batch,))]
        kernel = ops.append_pages.kernel(*[spec(32, 8, 2, 16)] * 2, new, new, *ints).kernel
        kernels.add(getattr(kernel, "kernel", kernel))
    assert len(kernels) == 4


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
def test_gradients_of_random_lengths_have_at_most_twelve_programs(batch, options):
    programs = set()
    for n, m in np.random.default_rng(batch).integers(1, 20000, (40, 2)).tolist():
        q, k, lse = spec(batch, n, 8, 128), spec(batch, m, 2, 128), (batch, 8, n)
        lse = plgpu.ShapeDtypeStruct(lse, np.float32)
        g = ops.attention_backward.kernel(q, q, k, k, q, lse, **options)
        if not g.fused:
            used = g.statistics, g.by_keys, g.by_queries
        elif g.fused.converting:  # of more tiles than SMs
            used = g.fused.allocating_all, g.fused.converting
        else:
            used = g.fused.allocating, g.fused.fused, g.fused.convert
        programs |= {getattr(kernel, "kernel", kernel) for kernel in used}
    assert 3 < len(programs) <= 12
