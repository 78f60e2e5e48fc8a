"""Sums fused with a residual and RMS norm, and all-to-all of rows in different numbers: right for
odd shapes under every schedule, call after call, with the same bits on all devices."""

import ml_dtypes
import numpy as np
import pytest
from distributed.meshes import gpus, on_gpus, params, shards
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu.machine import run as host
from pallas_mgpu.ops import distributed_norms, distributed_ragged


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=on_gpus)])
def way(request):
    return request.param


class Call:
    """Calls on a mesh of n devices."""

    def __init__(self, way, n, seed=0):
        devices = gpus(n) if way == "cuda" else None
        self.mesh = plgpu.DeviceMesh(n, "x", devices=devices)
        self.options = {"blocks": 2} | ({} if devices else {"interpret": params(seed)})

    def put(self, x):
        if self.mesh.devices is None:
            return x
        return [plgpu.device_put(a, d) for a, d in zip(x, self.mesh.devices, strict=True)]

    def __call__(self, f, *arrays, **options):
        got = f(*map(self.put, arrays), self.mesh, **self.options, **options)
        return [[np.asarray(a) for a in column] for column in got]


def normed(x, residual, weight, eps):
    dtype = x[0].dtype
    total = x[0].astype(np.float32)
    for a in x[1:]:
        total = total + a.astype(np.float32)
    total = (total + residual.astype(np.float32)).astype(dtype)
    f = total.astype(np.float32)
    scale = 1 / np.sqrt((f * f).mean(-1, keepdims=True) + eps)
    return (f * scale * weight.astype(np.float32)).astype(dtype), total


@pytest.mark.parametrize("one_shot", [False, True, None])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 2, 640), (2, 9001)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_all_reduce_rms_norm(way, rng, shape, dtype, one_shot):
    n, call = 3, Call(way, 3, 1)
    x, [r] = shards(rng, n, shape, dtype), shards(rng, 1, shape, dtype)
    [g] = shards(rng, 1, shape[-1:], dtype)
    f = distributed_norms.all_reduce_rms_norm
    for _ in range(1 if one_shot is None else 2):
        got, totals = call(f, x, [r] * n, [g] * n, one_shot=one_shot, eps=1e-5)
    want, total = normed(x, r, g, 1e-5)
    for d in range(n):
        assert totals[d].tobytes() == total.tobytes()
        assert got[d].tobytes() == got[0].tobytes() and got[d].shape == shape
        tolerance = {4: 1e-5, 2: 1e-2}[want.itemsize]
        np.testing.assert_allclose(
            got[d].astype("f4"), want.astype("f4"), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("n, one_shot", [(2, True), (3, False), (4, True)])
@pytest.mark.parametrize("columns", [512, 18432])
def test_rows_of_blocks(rng, n, one_shot, columns):
    """The warpgroups of a block share a row."""
    x, [r] = shards(rng, n, (3, columns), bfloat16), shards(rng, 1, (3, columns), bfloat16)
    [g] = shards(rng, 1, (columns,), bfloat16)
    mesh, dtype = plgpu.DeviceMesh(n, "x"), np.dtype(bfloat16)
    f = distributed_norms._normed(mesh, "x", (3, columns), dtype, 1e-5, one_shot, 3, params(2))
    for _ in range(2):
        got, totals = f(x, [r] * n, [g] * n)
    want, total = normed(x, r, g, 1e-5)
    for d in range(n):
        assert totals[d].tobytes() == total.tobytes() and got[d].tobytes() == got[0].tobytes()
        np.testing.assert_allclose(got[d].astype("f4"), want.astype("f4"), rtol=1e-2, atol=1e-2)


def exchanged(x, sizes, capacity):
    """Of each device: rows from all, in their order, and zeros."""
    n = len(x)
    starts = [np.concatenate([[0], np.cumsum(s)]) for s in sizes]
    found = []
    for d in range(n):
        rows = np.concatenate([x[s][starts[s][d] : starts[s][d + 1]] for s in range(n)])
        out = np.zeros((capacity, *x[0].shape[1:]), x[0].dtype)
        out[: len(rows)] = rows[:capacity]
        found.append(out)
    return found


def routed(rng, n, rows):
    """Numbers of rows for each device, of which some are 0; not all rows are sent."""
    found = []
    for s in range(n):
        cuts = np.sort(rng.integers(0, rows + 1, n))
        found.append(np.diff(cuts, prepend=0).astype(np.int32))
        if s == 1:
            found[-1][...] = 0
    return found


SHAPES = [(7, 3), (40, 200), (19, 2, 5), (6, 9000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, ml_dtypes.float8_e4m3fn])
def test_ragged_all_to_all(way, rng, shape, dtype):
    """Dispatch, and the way back; rows of scales travel with theirs."""
    n, call = 3, Call(way, 3, 2)
    sizes, capacity = routed(rng, n, shape[0]), 2 * shape[0]
    x, scales = shards(rng, n, shape, dtype), shards(rng, n, (shape[0], 3))
    f = distributed_ragged.ragged_all_to_all
    out, received, moved = call(f, x, sizes, scales=call.put(scales), capacity=capacity)
    for d, (a, b) in enumerate(
        zip(exchanged(x, sizes, capacity), exchanged(scales, sizes, capacity), strict=True)
    ):
        assert out[d].tobytes() == a.tobytes() and moved[d].tobytes() == b.tobytes()
        np.testing.assert_array_equal(received[d], [s[d] for s in sizes])
    back, counts = call(f, out, received, capacity=shape[0])
    for d in range(n):
        sent = int(sizes[d].sum())
        assert back[d][:sent].tobytes() == x[d][:sent].tobytes()
        assert not back[d][sent:].astype(np.float32).any()
        np.testing.assert_array_equal(counts[d], sizes[d])


@pytest.mark.parametrize("back", ["interpret", "emulate"])
@pytest.mark.parametrize("sizes", [[9, 9], [-3, 5], [4, 0], [2**31 - 1] * 2], ids=str)
def test_sizes_that_do_not_fit(sizes, back):
    """Rows that are not there are not sent, and those beyond the capacity are dropped."""
    rows, capacity, mesh = 6, 5, plgpu.DeviceMesh(2, "x")
    x = [np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 100 * d for d in range(2)]
    given, how = np.array(sizes, np.int32), {"blocks": 1, "interpret": params(backend=back)}
    out, received = distributed_ragged.ragged_all_to_all(
        x, [given] * 2, mesh, capacity=capacity, **how
    )
    first = min(max(sizes[0], 0), rows)
    sent = first, min(max(sizes[1], 0), rows - first)
    for d in range(2):
        start = first * d
        want = np.concatenate([a[start : start + sent[d]] for a in x])[:capacity]
        np.testing.assert_array_equal(out[d][: len(want)], want)
        assert not out[d][len(want) :].any()
        np.testing.assert_array_equal(received[d], [sent[d]] * 2)


def test_given_results(rng):
    """out= gets the results, at any number of dimensions."""
    mesh = plgpu.DeviceMesh(2, "x")
    x, [r], [g] = shards(rng, 2, (2, 3, 40)), shards(rng, 1, (2, 3, 40)), shards(rng, 1, (40,))
    out = [[np.zeros_like(r) for _ in range(2)] for _ in range(2)]
    got = distributed_norms.all_reduce_rms_norm(x, [r] * 2, [g] * 2, mesh, out=out)
    assert all(a is b for p, q in zip(got, out, strict=True) for a, b in zip(p, q, strict=True))
    np.testing.assert_allclose(out[0][1], normed(x, r, g, 1e-6)[0], rtol=1e-5, atol=1e-5)
    sizes = [np.array([1, 1], np.int32)] * 2
    out = [[np.zeros_like(r) for _ in range(2)], [np.zeros(2, np.int32) for _ in range(2)]]
    distributed_ragged.ragged_all_to_all(x, sizes, mesh, out=out)
    np.testing.assert_array_equal(out[0][1], np.stack([x[0][1], x[1][1]]))


def test_wrong_arguments(rng):
    mesh, x = plgpu.DeviceMesh(2, "x"), shards(rng, 2, (4, 8))
    norm, ragged = distributed_norms.all_reduce_rms_norm, distributed_ragged.ragged_all_to_all
    g = [np.ones(8, np.float32)] * 2
    with pytest.raises(ValueError, match="residual must have the same"):
        norm(x, g, g, mesh)
    with pytest.raises(TypeError, match="eps must be a number, got 'small'"):
        norm(x, x, g, mesh, eps="small")
    with pytest.raises(ValueError, match="out must have 2 results, got 1"):
        ragged(x, [np.ones(2, np.int32)] * 2, mesh, out=(x,))
    with pytest.raises(TypeError, match="one dtype, got float32, float32 and float16"):
        norm(x, x, [np.ones(8, np.float16)] * 2, mesh)
    with pytest.raises(NotImplementedError, match="float16, bfloat16 or float32"):
        norm(*([[np.ones((4, 8), np.int32)] * 2] * 3), mesh)
    with pytest.raises(ValueError, match=r"sizes must be int32 \(2,\)"):
        ragged(x, [np.ones(3, np.int32)] * 2, mesh)
    with pytest.raises(ValueError, match="capacity"):
        ragged(x, [np.ones(2, np.int32)] * 2, mesh, capacity=0)
    with pytest.raises(ValueError, match="the same rows"):
        ragged(x, [np.ones(2, np.int32)] * 2, mesh, scales=shards(rng, 2, (3, 1)))


def test_on_the_emulated_machine(rng):
    n, rows, columns = 2, 6, 300
    mesh = plgpu.DeviceMesh(n, "x")
    x, [r] = shards(rng, n, (rows, columns)), shards(rng, 1, (rows, columns))
    g = np.ones(columns, np.float32)
    for one_shot in (False, True):
        f = distributed_norms._normed(mesh, "x", r.shape, r.dtype, 1e-6, one_shot, 1, None)
        lasting = [[np.zeros(a.shape, a.dtype) for a in row] for row in zip(*f.lasting)]
        outs = [[np.zeros_like(r), np.zeros_like(r), *row] for row in lasting]
        for seed in range(2):
            host.run_mesh(f.lower(x[0], r, g), [[a, r, g] for a in x], outs, seed, written=True)
        for got in outs:
            np.testing.assert_allclose(got[0], normed(x, r, g, 1e-6)[0], rtol=1e-5, atol=1e-5)

    kinds = (((columns,), r.dtype),)
    f = distributed_ragged._ragged(mesh, "x", rows, 9, kinds, 1, None)
    sizes = [np.array([2, 3], np.int32), np.array([1, 5], np.int32)]
    lasting = [[np.zeros(a.shape, a.dtype) for a in row] for row in zip(*f.lasting)]
    outs = [[np.zeros(n, np.int32), np.zeros((9, columns), np.float32), *row] for row in lasting]
    args = [list(a) for a in zip(sizes, x, strict=True)]
    for seed in range(2):
        host.run_mesh(f.lower(*args[0]), args, outs, seed, written=True)
    for got, want in zip(outs, exchanged(x, sizes, 9), strict=True):
        np.testing.assert_array_equal(got[1], want)


def test_programs():
    """For sm_90a and eight devices, in registers."""
    mesh = plgpu.DeviceMesh(8, "x")
    for shape, one_shot in (((256, 4096), False), ((4, 4096), True), ((64, 16384), False)):
        f = distributed_norms._normed(mesh, "x", shape, np.dtype(bfloat16), 1e-6, one_shot, 8, None)
        x, g = (plgpu.ShapeDtypeStruct(s, bfloat16) for s in (shape, shape[-1:]))
        used = f.lower(x, x, g).resources()
        assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used
    kinds = (((7168,), np.dtype(ml_dtypes.float8_e4m3fn)), ((56,), np.dtype(np.float32)))
    f = distributed_ragged._ragged(mesh, "x", 512, 4096, kinds, 8, None)
    args = [plgpu.ShapeDtypeStruct((8,), np.int32)]
    args += [plgpu.ShapeDtypeStruct((512, *shape), dtype) for shape, dtype in kinds]
    used = f.lower(*args).resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used
