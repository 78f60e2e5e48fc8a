"""Functions of ops for any number of rows: few programs, right results, the same bits."""

import re

import numpy as np
import pytest
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops
from pallas_mgpu.ops import _open_rows


@pytest.fixture(autouse=True)
def forget():
    plgpu.clear_caches()


def spec(*shape):
    return plgpu.ShapeDtypeStruct(shape, bfloat16)


def test_random_rows_have_at_most_twelve_programs():
    rng = np.random.default_rng(0)
    rows = [*rng.integers(1, 8193, 200), 1, 2, 3, 8192]
    kernels = {}
    for m in map(int, rows):
        kernel = ops.matmul.kernel(spec(m, 4096), spec(14336, 4096), transpose_b=True)
        kernels[id(kernel)] = kernel
    assert len(kernels) <= 12
    again = ops.matmul.kernel(spec(4097, 4096), spec(14336, 4096), transpose_b=True)
    assert id(again) in kernels


def test_the_first_few_have_programs_of_their_own():
    kernels = [ops.matmul.kernel(spec(m, 256), spec(256, 512)) for m in (100, 200, 300, 100, 400)]
    texts = [
        k.lower(spec(m, 256), spec(256, 512)).as_text("traced")
        for k, m in zip(kernels, (100, 200, 300, 100, 400))
    ]
    assert ["size" in t.split("threads")[0] for t in texts] == [False] * 4 + [True]
    assert kernels[3] is kernels[0]


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


@pytest.mark.parametrize("transpose_b", [False, True])
def test_results_of_all_buckets(transpose_b):
    rows = (6, 63, 64, 65, 127, 129, 256, 257, 600, 1023, 1025, 2048, 2049, 3000)
    _, programs = products(rows, 72, 136, transpose_b=transpose_b, interpret=True)
    assert programs == 7


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
    """Widths that TMA takes and does not, several rows a tile and one; four programs in all."""
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
    assert _core.plan_memory()["plans"] - before == _open_rows.STATIC + 1


@pytest.mark.parametrize("m", [50, pytest.param(5000, marks=pytest.mark.long)])
def test_nvrtc_compiles_it(m):
    for first in range(3, 3 + _open_rows.STATIC):
        ops.matmul.kernel(spec(first, 4096), spec(4096, 4096))
    args = spec(m, 4096), spec(4096, 4096)
    lowered = ops.matmul.kernel(*args).lower(*args)
    assert re.search(r"const i32 (M|size_\d+)", lowered.as_text("cuda")) or m == 50
    assert lowered.cubin()


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


EACH_ROW = {
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
        got = plgpu.tree.leaves(function(*arrays, interpret=way))
        for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(np.asarray(g), w, rtol=1e-3, atol=1e-4)
    assert _core.plan_memory()["plans"] - before == _open_rows.STATIC + 1


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
