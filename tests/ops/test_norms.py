"""The fused softmax and RMSNorm of examples/: right for any rows and columns, and of the shape that
makes them fast: one pass over memory, accesses of 16 bytes, several blocks on an SM."""

import re
import runpy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu

pytestmark = pytest.mark.covering(1, share=True)

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SOFTMAX = runpy.run_path(str(EXAMPLES / "fused_softmax.py"))
NORM = runpy.run_path(str(EXAMPLES / "rms_norm.py"))
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(1, 1), (3, 7), (130, 127), (5, 129), (9, 1000), (13, 1024), (3, 4096), (2, 12288)]


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Rows that are no multiple of 16 bytes are copied by the lanes, with a warning."""
    yield


def options(run):
    return {} if run.way == "cuda" else {"interpret": True}


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def rms_norm(x, w):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + NORM["EPSILON"]) * w


def check(got, want):
    """Half a unit of bfloat16's last place, and the approximate functions."""
    assert got.dtype == BF16
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8 + 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax(run, rng, shape):
    x = (rng.standard_normal(shape) * 4).astype(BF16)
    got = run.call(SOFTMAX["make_softmax"](shape, BF16, **options(run)), x)
    check(got, softmax(x.astype(np.float32)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(run, rng, shape):
    x, w = (rng.standard_normal(s).astype(BF16) for s in (shape, shape[1:]))
    got = run.call(NORM["make_rms_norm"](shape, BF16, **options(run)), x, w)
    check(got, rms_norm(x.astype(np.float32), w.astype(np.float32)))


@pytest.mark.parametrize("chunks, steps", [(1, 1), (3, 2), (4, 4)])
def test_long_rows(run, rng, chunks, steps):
    shape = (3, 512 * chunks)
    x, w = (rng.standard_normal(s).astype(BF16) for s in (shape, shape[1:]))
    how = {"chunk": 512, "steps": steps, **options(run)}
    y = x.astype(np.float32)
    check(run.call(SOFTMAX["make_long_softmax"](shape, BF16, **how), x), softmax(y))
    got = run.call(NORM["make_long_rms_norm"](shape, BF16, **how), x, w)
    check(got, rms_norm(y, w.astype(np.float32)))


def shaped(*shape):
    return plgpu.ShapeDtypeStruct(shape, BF16)


@pytest.mark.parametrize("rows", [4096, 4099])
@pytest.mark.parametrize("columns", [1024, 4096, 16384])
def test_how_they_move_data(rows, columns):
    """Each array goes through one bulk or TMA copy a program, registers and SMEM see words of 16
    bytes, and at least three blocks have room on an SM."""
    x = shaped(rows, columns)
    for make, args in (
        (SOFTMAX["make_softmax"], (x,)),
        (NORM["make_rms_norm"], (x, shaped(columns))),
    ):
        low = make(x.shape, BF16).lower(*args)
        text, used = low.as_text("cuda"), low.resources()
        text = text[text.index("__global__") :]
        assert len(re.findall(r"\b(?:bulk|tma)_load\w*\(", text)) == 1
        assert len(re.findall(r"\b(?:bulk|tma)_store\w*\(", text)) == 1
        assert set(re.findall(r"(?:ld|st)_\w+<bf16, (\d+)>", text)) == {"8"}
        assert used["spill_bytes"] == used["stack_bytes"] == 0
        blocks = min(65536 // (128 * used["registers"]), 227 * 1024 // (used["smem_bytes"] + 1024))
        assert blocks >= 3, used
