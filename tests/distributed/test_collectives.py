"""ops.distributed: what every device gets, whatever the schedule, call after call."""

import re

import numpy as np
import pytest
from distributed.meshes import GPUS, gpus, on_gpus, params, shards
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu.machine import run as host
from pallas_mgpu.ops import (
    distributed,
    distributed_matmul,
    distributed_norms,
    distributed_ragged,
)


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=on_gpus)])
def way(request):
    return request.param


def run(way, f, x, n, seed=0, calls=1, blocks=2, **options):
    """The results of the last of some calls, as NumPy arrays."""
    if way == "cuda":
        mesh = plgpu.DeviceMesh(n, "x", devices=gpus(n))
        x = [plgpu.device_put(a, d) for a, d in zip(x, mesh.devices, strict=True)]
    else:
        mesh, options["interpret"] = plgpu.DeviceMesh(n, "x"), params(seed)
    for _ in range(calls):
        y = f(x, mesh, blocks=blocks, **options)
    return [np.asarray(a) for a in y]


SHAPES = [(1,), (3, 5), (40, 33), (2, 5000), (7, 3, 130)]
DTYPES = [np.float32, np.float16, bfloat16, np.int32, np.int8]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_all_gather(way, rng, shape, axis):
    n = 3
    x = shards(rng, n, shape)
    for y in run(way, distributed.all_gather, x, n, axis=axis, calls=3):
        np.testing.assert_array_equal(y, np.concatenate(x, axis))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter(way, rng, dtype, axis):
    n = 4
    x = shards(rng, n, (4 * 3, 4 * 37), dtype)
    wide = np.int32 if np.issubdtype(dtype, np.integer) else np.float32
    total = sum(a.astype(wide) for a in x).astype(dtype)
    y = run(way, distributed.reduce_scatter, x, n, axis=axis, calls=2)
    for a, b in zip(y, np.split(total, n, axis), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("one_shot", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_all_reduce(way, rng, shape, dtype, one_shot):
    n = 3
    x = shards(rng, n, shape, dtype)
    total = sum(a.astype(np.float32) for a in x).astype(dtype)
    for y in run(way, distributed.all_reduce, x, n, one_shot=one_shot, calls=4):
        np.testing.assert_array_equal(y, total)


@pytest.mark.parametrize("shape", [(3,), (6, 7), (3, 5000)], ids=str)
def test_all_to_all(way, rng, shape):
    n = 3
    x = shards(rng, n, (shape[0] // 3 * n, *shape[1:]), np.float16)
    y = run(way, distributed.all_to_all, x, n, calls=2)
    parts = [np.split(a, n) for a in x]
    for d in range(n):
        np.testing.assert_array_equal(y[d], np.concatenate([p[d] for p in parts]))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_more_items_than_slots(way, rng, kind, n):
    """Slots of staging memory are used again, within a call and by the next one."""
    x = shards(rng, n, (n * 500_003,), bfloat16)
    x = [a[:500_003] for a in x] if kind == "all_gather" else x
    f, options = getattr(distributed, kind), {"one_shot": False} if kind == "all_reduce" else {}
    total = x[0].astype(np.float32)
    for a in x[1:]:
        total = total + a.astype(np.float32)
    total = total.astype(bfloat16)
    want = {
        "all_gather": lambda: [np.concatenate(x)] * n,
        "reduce_scatter": lambda: np.split(total, n),
        "all_reduce": lambda: [total] * n,
        "all_to_all": lambda: [np.concatenate([np.split(a, n)[d] for a in x]) for d in range(n)],
    }[kind]()
    for got, expected in zip(run(way, f, x, n, calls=2, blocks=1, **options), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(3, 5), (6,), (9, 700), (3, 2, 9001)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.int32])
def test_multicast(rng, shape, dtype):
    """Through the address of all devices, on the interpreter: NVLink multicast is never used."""
    n, options = 3, {"multicast": True, "calls": 3}
    x = [np.round(a * 4).astype(dtype) for a in shards(rng, n, shape)]
    total = sum(a.astype(np.float32) for a in x).astype(dtype)
    for y in run("interpret", distributed.all_gather, x, n, **options):
        np.testing.assert_array_equal(y, np.concatenate(x))
    for y in run("interpret", distributed.all_reduce, x, n, 1, **options):
        np.testing.assert_array_equal(y, total)
    y = run("interpret", distributed.reduce_scatter, x, n, 2, **options)
    for a, b in zip(y, np.split(total, n), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("columns", [1024, 1001])
def test_large(way, rng, columns):
    """By TMA from 2 MiB a device on, where parts are aligned; a rest of less than a piece."""
    n, dtype = 2, np.dtype(np.float32)
    x = [rng.integers(-99, 99, (2 * 520, columns)).astype(dtype) for _ in range(n)]
    for y in run(way, distributed.all_gather, x, n, calls=2):
        np.testing.assert_array_equal(y, np.concatenate(x))
    y = run(way, distributed.all_to_all, x, n, calls=2)
    for d, got in enumerate(y):
        np.testing.assert_array_equal(got, np.concatenate([np.split(a, n)[d] for a in x]))


@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("kind", ["all_gather_directly", "reduce_scatter", "all_reduce"])
def test_counts_wrap(rng, kind, start):
    """After 2^31 and 2^32 items, on the interpreter and the emulated machine."""
    n = 2
    x = shards(rng, n, (64, 48))
    f = made(plgpu.DeviceMesh(n, "x"), kind, n, interpret=params())
    flags, epochs = f.lasting[-2:]
    for a in (*flags, *epochs):
        a[...] = np.uint32(start).astype(np.int32)
    lasting = [[a.copy() for a in row] for row in zip(*f.lasting)]
    for _ in range(6):
        for got, want in zip(f(x), expected(kind, x), strict=True):
            np.testing.assert_array_equal(got, want)
    for seed in range(2):
        outs = [[np.zeros(problems(n)[kind][0], np.float32), *row] for row in lasting]
        host.run_mesh(f.lower(x[0]), [[a] for a in x], outs, seed, written=True)
        for got, want in zip(outs, expected(kind, x), strict=True):
            np.testing.assert_array_equal(got[0], want)
    assert 0 < (int(epochs[0][0]) - start) % 2**32 < 99  # it went on from there


def test_multicast_that_is_not_there(rng):
    mesh = plgpu.DeviceMesh(2, "x")
    with pytest.raises(NotImplementedError, match="along axis 1"):
        distributed.all_gather(shards(rng, 2, (2, 4)), mesh, axis=1, multicast=True)
    with pytest.raises(NotImplementedError, match="NVLink sums float32"):
        distributed.all_reduce([np.zeros(4, np.int8)] * 2, mesh, multicast=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("one_shot", [False, True])
def test_schedules(rng, seed, one_shot):
    """Eight devices, late and early, with the race detector."""
    x = shards(rng, 8, (9, 300))
    total = sum(x)
    for y in run("interpret", distributed.all_reduce, x, 8, seed, 3, one_shot=one_shot):
        np.testing.assert_array_equal(y, total)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_gpus_in_another_order(rng):
    """The devices of a mesh are GPUs in the order that they are given in."""
    x, mesh = shards(rng, 2, (40, 33)), plgpu.DeviceMesh(2, "x", devices=(1, 0))
    on = [plgpu.device_put(a, d) for a, d in zip(x, mesh.devices, strict=True)]
    for y in distributed.all_gather(on, mesh):
        np.testing.assert_array_equal(np.asarray(y), np.concatenate(x))
    for y, part in zip(distributed.reduce_scatter(on, mesh), np.split(x[0] + x[1], 2)):
        np.testing.assert_array_equal(np.asarray(y), part)


def test_wrong_arguments(rng):
    mesh, x = plgpu.DeviceMesh(2, "x"), shards(rng, 2, (3, 4))
    with pytest.raises(TypeError, match="x must be a list of 2 arrays, one for each device, got 1"):
        distributed.all_gather(x[:1], mesh)
    with pytest.raises(TypeError, match="plgpu.DeviceMesh"):
        distributed.all_gather(x, 2)
    with pytest.raises(ValueError, match="no 2 equal parts"):
        distributed.reduce_scatter(x, mesh)
    with pytest.raises(ValueError, match="axis_name"):
        distributed.all_gather(x, mesh, "y")
    with pytest.raises(ValueError, match="axis 2"):
        distributed.all_gather(x, mesh, axis=2)
    with pytest.raises(ValueError, match="blocks"):
        distributed.all_gather(x, mesh, blocks=0)
    with pytest.raises(TypeError, match="axis must be an int, got 0.5"):
        distributed.all_gather(x, mesh, axis=0.5)
    with pytest.raises(TypeError, match="multicast must be a bool, got 'no'"):
        distributed.all_gather(x, mesh, multicast="no")
    with pytest.raises(TypeError, match="x must consist of arrays, got 2.5"):
        distributed.all_gather([x[0], 2.5], mesh)
    with pytest.raises(TypeError, match="x has dtype complex64"):
        distributed.all_gather([a.astype(np.complex64) for a in x], mesh)
    with pytest.raises(ValueError, match=r"x has no elements, its shape is \(0, 4\)"):
        distributed.all_to_all([a[:0] for a in x], mesh)
    with pytest.raises(TypeError, match="one_shot must be a bool or None, got 'no'"):
        distributed.all_reduce(x, mesh, one_shot="no")
    with pytest.raises(ValueError, match=r"out\[0\] must be a list of 2 arrays.*got array"):
        distributed.all_reduce(x, mesh, out=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"out\[0\] of device 1 and out\[0\] of device 0 share 48"):
        distributed.all_reduce(x, mesh, out=[np.zeros_like(x[0])] * 2)
    with pytest.raises(
        ValueError, match=r"out\[0\] of device 1 and argument 0 of device 0 share 48"
    ):
        distributed.all_reduce(x, mesh, out=x[::-1])
    two, y = plgpu.DeviceMesh((2, 2), ("x", "y")), shards(rng, 4, (4,))
    with pytest.raises(ValueError, match="axis_name must be one of"):
        distributed.all_gather(y, two)
    with pytest.raises(NotImplementedError, match="a mesh of 2 axes"):
        distributed.all_gather(y, two, "x", multicast=True)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_meshes_of_two_axes(way, rng, axis):
    """Devices along an axis exchange among themselves."""
    shape, rows = (2, 3), 6
    where = np.arange(6).reshape(shape)
    groups = list(where.T if axis == "x" else where)
    x = shards(rng, 6, (rows, 130))
    a, b = (shards(rng, 6, s, np.float16) for s in ((rows, 64), (64, 72)))
    n = shape["xy".index(axis)]
    mesh = plgpu.DeviceMesh(shape, ("x", "y"), devices=gpus(6) if way == "cuda" else None)
    options = {"blocks": 2} | ({} if way == "cuda" else {"interpret": params()})
    sizes, g = [np.full(n, rows // n, np.int32)] * 6, [np.ones(130, np.float32)] * 6
    if way == "cuda":
        x, a, b, sizes, g = (
            [plgpu.device_put(v, d) for v, d in zip(each, mesh.devices, strict=True)]
            for each in (x, a, b, sizes, g)
        )
    gathered = distributed.all_gather(x, mesh, axis, **options)
    columns = distributed.all_gather(x, mesh, axis, axis=1, **options)
    scattered = distributed.reduce_scatter(x, mesh, axis, **options)
    one, two = (distributed.all_reduce(x, mesh, axis, one_shot=k, **options) for k in (True, False))
    exchanged = distributed.all_to_all(x, mesh, axis, **options)
    ragged, _ = distributed_ragged.ragged_all_to_all(x, sizes, mesh, axis, **options)
    _, normed = distributed_norms.all_reduce_rms_norm(x, x, g, mesh, axis, **options)
    product = distributed_matmul.all_gather_matmul(a, b, mesh, axis, **options)
    summed = distributed_matmul.matmul_reduce_scatter(a, b, mesh, axis, **options)
    x, a, b = ([np.asarray(v) for v in r] for r in (x, a, b))
    for group in groups:
        mine = [x[d] for d in group]
        total = sum(mine[1:], mine[0])
        products = sum(a[d].astype(np.float32) @ b[d].astype(np.float32) for d in group)
        for k, d in enumerate(group):
            equal = np.testing.assert_array_equal
            equal(np.asarray(gathered[d]), np.concatenate(mine))
            equal(np.asarray(columns[d]), np.concatenate(mine, 1))
            equal(np.asarray(scattered[d]), np.split(total, n)[k])
            equal(np.asarray(one[d]), total)
            equal(np.asarray(two[d]), total)
            parts = np.concatenate([np.split(v, n)[k] for v in mine])
            equal(np.asarray(exchanged[d]), parts)
            equal(np.asarray(ragged[d]), parts)
            equal(np.asarray(normed[d]), total + x[d])
            close = {"rtol": 1e-2, "atol": 1e-2}
            want = np.concatenate([a[e] for e in group]).astype(np.float32) @ b[d].astype(
                np.float32
            )
            np.testing.assert_allclose(np.asarray(product[d], np.float32), want, **close)
            part = np.split(products, n)[k]
            np.testing.assert_allclose(np.asarray(summed[d], np.float32), part, **close)


def problems(n, columns=48):
    """(result, the dimensions that kernels see) of arrays (64, columns)."""
    whole = 64 * columns
    gathered, scattered = (n * 64, columns), (64 // n, columns)
    return {
        "all_gather": (gathered, (1, whole)),
        "all_gather_directly": (gathered, (1, whole)),
        "reduce_scatter": (scattered, (1, whole // n)),
        "reduce_scatter_of_columns": (scattered, (1, whole // n)),
        "all_reduce": ((64, columns), (whole,)),
        "all_reduce_one_shot": ((64, columns), (whole,)),
        "all_to_all": ((64, columns), (1, whole // n)),
        "all_gather_in_bulk": (gathered, (1, whole)),
        "all_to_all_in_bulk": ((64, columns), (1, whole // n)),
        "all_gather_by_multicast": (gathered, (1, whole)),
        "reduce_scatter_by_multicast": (scattered, (1, whole // n)),
        "all_reduce_by_multicast": ((64, columns), (whole,)),
    }


def expected(kind, x):
    n, total = len(x), sum(x)
    name = re.sub("_(by_multicast|directly|in_bulk|of_columns|one_shot)$", "", kind)
    return {
        "all_gather": [np.concatenate(x)] * n,
        "reduce_scatter": np.split(total, n),
        "all_reduce": [total] * n,
        "all_to_all": [np.concatenate([np.split(a, n)[d] for a in x]) for d in range(n)],
    }[name]


def made(mesh, kind, n, dtype=np.float32, blocks=2, columns=48, interpret=None):
    out, view = problems(n, columns)[kind]
    return distributed._collective(mesh, "x", kind, np.dtype(dtype), out, view, blocks, interpret)


def on_the_host():
    """Every third kind on two devices, or on four, with --long each; with --exhaustive
    everything."""
    found = []
    for k, kind in enumerate(problems(2)):
        for n in (2, 4, 8):
            usual = n == (4 if kind == "all_reduce" else (2, 4)[k % 2])
            late = pytest.mark.long if k % 3 else []
            found.append(pytest.param(kind, n, marks=late if usual else pytest.mark.exhaustive))
    return found


@pytest.mark.parametrize("kind, n", on_the_host())
def test_host(kind, n, rng):
    """Calls in a row on the emulated machine, with the flags and the staging memory of the last."""
    columns = 250 if kind.endswith("in_bulk") else 48  # more pieces than slots
    f = made(plgpu.DeviceMesh(n, "x"), kind, n, blocks=1, columns=columns)
    x = [np.round(a * 8) for a in shards(rng, n, (64, columns))]
    out = problems(n, columns)[kind][0]
    lasting = [[np.zeros(a.shape, a.dtype) for a in row] for row in zip(*f.lasting)]
    for seed in range(2):
        outs = [[np.zeros(out, np.float32), *row] for row in lasting]
        host.run_mesh(f.lower(x[0]), [[a] for a in x], outs, seed, written=True)
        for got, want in zip(outs, expected(kind, x), strict=True):
            np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("kind", problems(8))
def test_programs(kind):
    """For sm_90a and eight devices, in registers."""
    f = made(plgpu.DeviceMesh(8, "x"), kind, 8, bfloat16, 16, 512)
    lowered = f.lower(plgpu.ShapeDtypeStruct((64, 512), bfloat16))
    used = lowered.resources()
    assert ("cp.async.bulk" in lowered.as_text("ptx")) == kind.endswith("in_bulk")
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used


@pytest.mark.gpu
@pytest.mark.parametrize("one_shot", [False, True])
def test_replays_of_graphs(one_shot):
    """A CUDA graph of PyTorch replayed in turn with eager calls: epochs are in device memory."""
    torch = pytest.importorskip("torch")
    n = 4
    mesh = plgpu.DeviceMesh((n,), "x", devices=(0,) * n)
    x = [torch.randint(-9, 9, (3000,), device="cuda:0").float() for _ in range(n)]

    def call():
        return distributed.all_reduce(x, mesh, blocks=2, one_shot=one_shot)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for _ in range(20):
        for a in x:
            a += 1
        graph.replay()
        call()
        for a in y:
            assert torch.equal(a, sum(x))
