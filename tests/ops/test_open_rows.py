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
