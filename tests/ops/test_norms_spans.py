"""Norms of rows that begin anywhere (ops/_norms_spans.py): pieces of 16 bytes that rows share with
their neighbours, the end of the array, tiles of several rows, segments of a cluster."""

import re

import numpy as np
import pytest
from test_ops_norms import (
    BF16,
    F16,
    F32,
    FUNCTIONS,
    TOLERANCE,
    arrays,
    check,
    no_warnings,
    reference,
)

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu.ops import NormConfig, _open_rows, rms_norm, softmax

pytestmark = pytest.mark.covering(1, share=True)

__all__ = ["no_warnings"]  # a fixture


def spans(height=1, cluster=1, part=0, threads=1, stream=False):
    return NormConfig(height, cluster, part, spans=True, threads=threads, stream=stream)


CASES = [
    ((5, 777), BF16, spans()),
    ((9, 777), BF16, spans(4)),  # the last tile has one row
    ((3, 777), F32, spans(8)),  # all rows together are less than a tile
    ((37, 9), F16, spans(64)),  # several rows for each warp, among them some that are not there
    ((130, 3), BF16, spans(128)),
    ((40, 100), BF16, spans(32)),  # four lanes for each row
    ((16, 132), F16, spans(16)),  # eight
    ((16, 10), F16, spans(16)),  # as many rows as columns
    ((7, 300), BF16, spans(3)),  # warps share each row
    ((3, 5003), BF16, spans(part=1024)),
    ((3, 5000), BF16, spans(part=1024)),  # every row begins at a multiple of 16 bytes
    ((3, 12801), BF16, spans(1, 4, 1024)),
    ((2, 3001), F32, spans(1, 2, 512)),
    ((1, 5001), F16, spans(1, 2, 1024)),  # no room for a piece after the row
    ((1, 9), BF16, spans()),
    ((5, 3), F16, spans()),  # rows that lie inside one piece
    ((7, 17), F32, spans(threads=3)),  # and segments
    ((4, 6008), F32, spans(1, 1, 512, threads=2)),
    ((3, 12808), BF16, spans(1, 2, 1024, threads=2)),
    ((2, 12801), BF16, spans(1, 1, 1024, threads=3)),
    ((11, 1152), BF16, spans(4)),  # lanes share a row evenly by 8 bytes, not by 16
    ((5, 1536), F16, spans(2)),
    ((3, 2304), BF16, spans()),  # by 4 bytes
    ((19, 768), BF16, None),  # as chosen
    ((21, 1152), F16, None),
    ((3, 4096), BF16, spans(stream=True)),  # vectors through shared memory
    ((3, 4104), F32, spans(1, 2, stream=True)),
    ((3, 4104), F16, spans(1, 2, 1024, threads=2, stream=True)),
    ((2, 16424), F16, spans(1, 16, 512)),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape, dtype, config", CASES, ids=str)
def test_rows_that_begin_anywhere(run, rng, name, shape, dtype, config):
    check(run, name, arrays(rng, name, shape, dtype), config=config)


COLUMNS = NormConfig(16, 2, 64)


@pytest.mark.parametrize(
    "config", [spans(), spans(1, 2, 512), COLUMNS], ids=["row", "segments", "columns"]
)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_softmax_of_large_numbers(run, dtype, config):
    """Exponents are differences of products, which are rounded, or would overflow."""
    most = float(plgpu.numpy.finfo(dtype).max)
    numbers = np.array(
        [0.0, 300.0, 8160.0, 8192.0, 6e4, 1e6, 2.0**28 - 2**20, 2.0**28, 1e30, most / 2, most]
    )
    numbers = np.concatenate([numbers, -numbers])
    numbers = numbers[np.abs(numbers) <= most]
    x = np.full((len(numbers), 2056), -most, np.float32)
    x[:, 3::7] = numbers[:, None]
    x[:, 1030:] = numbers[:, None] * (1 - 2.0**-7)  # in the other segment, above or below
    x[:, 5] = -np.inf
    x = x.astype(dtype)
    with np.errstate(over="ignore"):
        e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True).astype(np.float64))
    want = e / e.sum(1, keepdims=True)
    interpret, axis = None if run.way == "cuda" else True, 1
    if config is COLUMNS:
        x, want = (np.ascontiguousarray(np.resize(v, (32, 2056)).T) for v in (x, want))
        axis = 0
    got = run.call(softmax.kernel(x, axis=axis, config=config, interpret=interpret), x)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("shape, config", [((5, 777), spans(4)), ((3, 5001), spans(1, 2, 1024))])
@pytest.mark.parametrize("dtype, out_dtype", [(F32, BF16), (BF16, F32)], ids=str)
def test_results_of_another_dtype(run, rng, shape, config, dtype, out_dtype):
    given = arrays(rng, "rms_norm", shape, dtype)
    check(run, "rms_norm", given, config=config, out_dtype=out_dtype)


@pytest.mark.parametrize(
    "shape, config",
    [
        ((5, 2051), spans(1, 2, 512)),
        ((9, 777), spans(4)),
        ((7, 100), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_place_and_without_races(rng, name, shape, config):
    """Pieces at the ends of a span belong to its neighbours, too: nobody reads these elements."""
    given = arrays(rng, name, shape)
    params = plgpu.InterpretParams(detect_races=True, detect_uninitialized=True, seeds=2)
    want = FUNCTIONS[name](*given, config=config, interpret=True)
    x = given[0]
    assert FUNCTIONS[name](*given, config=config, out=x, interpret=params) is x
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_long_rows_of_arrays_that_begin_anywhere(run, rng, name, dtype):
    """Lanes bring them to shared memory, element by element."""
    given = arrays(rng, name, (3, 16401), dtype)
    x, *vectors = (plgpu.ArrayInfo(a.shape, dtype, aligned=False) for a in given)
    interpret = None if run.way == "cuda" else True
    kernel = FUNCTIONS[name].__wrapped__(x, *vectors, interpret=interpret)
    got, want = run.call(kernel, *given), reference(name, *given)
    np.testing.assert_allclose(got.astype(F32), want, rtol=TOLERANCE[dtype], atol=2e-6)
    text = kernel.lower(x, *vectors).as_text("cuda")
    text = text[text.index("__global__") :]
    assert set(re.findall(r"(?:ld|st)_global<\w+, (\d+)>", text)) == {"1"}
    assert "bulk_load" not in text


def test_a_short_row_has_the_same_bits_wherever_it_begins(rng):
    x = arrays(rng, "softmax", (1, 777))[0]
    given = np.repeat(x, 9, axis=0)
    for config in (spans(), spans(4)):
        got = softmax(given, config=config, interpret=True)
        assert all(row.tobytes() == got[0].tobytes() for row in got)
        assert softmax(x, config=config, interpret=True).tobytes() == got[0].tobytes()


@pytest.mark.parametrize("config", [spans(), spans(1, 2, 256), spans(4)], ids=str)
def test_special_values(rng, config):
    x = rng.standard_normal((5, 1001)).astype(F32) * 100 + 1000
    x[0, :900] = -np.inf
    x[1, 700] = np.nan
    x[2] = -np.inf
    x[3, 5] = np.inf
    got = softmax(x, config=config, interpret=True)
    assert np.isnan(got[1:4]).all(axis=1).tolist() == [True, True, True]
    assert (got[0, :900] == 0).all()
    for row in (0, 4):
        e = np.exp(x[row].astype(np.float64) - x[row].max())
        np.testing.assert_allclose(got[row], e / e.sum(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("n", [777, 5001, 20001])
def test_any_number_of_rows(rng, n, monkeypatch):
    """One program, of arrays with one dimension, has the bits of those for each number of rows."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    w = rng.standard_normal(n).astype(BF16)
    before = _core.plan_memory()["plans"]
    calls = []
    for shape in ((5, n), (12, n), (2, 5, n), (8, n)):
        x = (rng.standard_normal(shape) * 3).astype(BF16)
        kernel = rms_norm.kernel(x, w, interpret=True)
        calls.append((kernel, x, rms_norm(x, w, interpret=True)))
    assert _core.plan_memory()["plans"] - before == 1
    for kernel, x, got in calls:
        np.testing.assert_array_equal(got, kernel.alone()(x, w))
