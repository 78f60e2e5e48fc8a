"""Products over devices: right under every schedule, call after call, for any shape."""

import re

import numpy as np
import pytest
from distributed.meshes import gpus, on_gpus, params
from ml_dtypes import bfloat16
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine import run as host
from pallas_mgpu.ops import distributed_matmul as ops
from pallas_mgpu.ops.matmul import FewRowsConfig, MatmulConfig


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=on_gpus)])
def way(request):
    return request.param


def on(way, n, *arrays):
    if way != "cuda":
        return plgpu.DeviceMesh(n, "x"), arrays
    mesh = plgpu.DeviceMesh(n, "x", devices=gpus(n))
    return mesh, [
        [plgpu.device_put(a, d) for a, d in zip(x, mesh.devices, strict=True)] for x in arrays
    ]


def operands(rng, n, shape, dtype):
    return [rng.standard_normal(shape, np.float32).astype(dtype) / 4 for _ in range(n)]


# blocks that pad rows may write the same twice, with a warning
pytestmark = pytest.mark.filterwarnings("ignore:.*write and write are not ordered")

FUNCTIONS = [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce]
SHAPES = [(128, 64, 128), (130, 96, 264), (7, 200, 33), (257, 130, 129)]
DTYPES = [np.float16, bfloat16, np.float32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_matmul(way, rng, shape, dtype):
    n, (m, k, cols) = 2, shape
    a, b = operands(rng, n, (m, k), dtype), operands(rng, n, (k, cols), dtype)
    mesh, (x, y) = on(way, n, a, b)
    interpret = None if way == "cuda" else params(3)
    for _ in range(2):
        got = ops.all_gather_matmul(x, y, mesh, blocks=3, out_dtype=np.float32, interpret=interpret)
    for d in range(n):
        want = np.concatenate(a).astype(np.float32) @ b[d].astype(np.float32)
        np.testing.assert_allclose(np.asarray(got[d]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_matmul_all_reduce(way, rng, shape, n):
    m, k, cols = shape
    dtype = bfloat16 if n == 2 else np.float32
    a, b = operands(rng, n, (m, k), dtype), operands(rng, n, (k, cols), dtype)
    mesh, (x, y) = on(way, n, a, b)
    interpret = None if way == "cuda" else params(3)
    for _ in range(2):
        got = ops.matmul_all_reduce(x, y, mesh, blocks=3, out_dtype=np.float32, interpret=interpret)
    want = sum(p.astype(np.float32) @ q.astype(np.float32) for p, q in zip(a, b))
    for d in range(n):
        np.testing.assert_allclose(np.asarray(got[d]), want, rtol=1e-4, atol=2e-4)
        assert np.asarray(got[d]).tobytes() == np.asarray(got[0]).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_reduce_scatter(way, rng, shape, dtype):
    n, (m, k, cols) = 2, shape
    a, b = operands(rng, n, (n * m, k), dtype), operands(rng, n, (k, cols), dtype)
    mesh, (x, y) = on(way, n, a, b)
    interpret = None if way == "cuda" else params(3)
    for _ in range(2):
        got = ops.matmul_reduce_scatter(
            x, y, mesh, blocks=3, out_dtype=np.float32, interpret=interpret
        )
    total = sum(u.astype(np.float32) @ v.astype(np.float32) for u, v in zip(a, b))
    for d in range(n):
        want = total[d * m : (d + 1) * m]
        np.testing.assert_allclose(np.asarray(got[d]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_four_devices(rng, f, seed):
    """Equal bits under all schedules; several calls follow each other."""
    n, (m, k, cols) = 4, (66, 72, 130)
    a = operands(rng, n, (n * m if f is ops.matmul_reduce_scatter else m, k), bfloat16)
    b = operands(rng, n, (k, cols), bfloat16)
    mesh = plgpu.DeviceMesh(n, "x")
    first = f(a, b, mesh, blocks=2, interpret=params(0))
    for _ in range(3):
        got = f(a, b, mesh, blocks=2, interpret=params(seed + 1))
    for x, y in zip(first, got, strict=True):
        assert x.tobytes() == y.tobytes()


CONFIGS = [
    MatmulConfig(2, 128, cluster=2, group=1, buffers=1),  # many bands of rows
    MatmulConfig(1, 64, cluster=1, cluster_n=2, group=2, stages=3),
    MatmulConfig(1, 32, cluster=2, group=8, lag=0, step=128),
    MatmulConfig(2, 256, cluster=2, buffers=1),
    MatmulConfig(1, 192, cluster=1, cluster_n=2),
    MatmulConfig(2, 256, cluster=1, split=2),  # blocks divide K
    MatmulConfig(1, 64, cluster=1, split=4, stages=2),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_configs(rng, f, config):
    """Clusters of blocks, bands and cells, under several schedules."""
    n, (m, k, cols) = (3 if config in CONFIGS[::3] else 2), (290, 456, 272)
    rows = n * m if f is ops.matmul_reduce_scatter else m
    a = [rng.integers(-3, 4, (rows, k)).astype(np.float16) for _ in range(n)]
    b = [rng.integers(-3, 4, (k, cols)).astype(np.float16) for _ in range(n)]
    x, y = ([z.astype(np.float32) for z in arrays] for arrays in (a, b))
    if f is ops.all_gather_matmul:
        wants = [np.concatenate(x) @ one for one in y]
    else:
        total = sum(p @ q for p, q in zip(x, y, strict=True))
        wants = np.split(total, n) if f is ops.matmul_reduce_scatter else [total] * n
    mesh, how = plgpu.DeviceMesh(n, "x"), {"config": config, "blocks": 6, "out_dtype": np.float32}
    for seed in (4, 5):
        got = f(a, b, mesh, interpret=params(seed), **how)
        for one, want in zip(got, wants, strict=True):
            np.testing.assert_array_equal(one, want)


TRANSFERS = [
    (f, t) for f in FUNCTIONS for t in ops.TRANSFERS if t != "engine" or f is not FUNCTIONS[2]
]


@pytest.mark.parametrize("n, shape", [(2, (160, 136, 144)), (3, (66, 104, 33))], ids=str)
@pytest.mark.parametrize("f, transfer", TRANSFERS)
def test_transfers(way, rng, f, transfer, n, shape):
    """Rows and summands that the devices which need them fetch, or that the host has copied: many
    tiles of a block, call after call."""
    if way == "cuda" and transfer == "engine":
        pytest.skip("with a process group: gpu_ranks.py")
    m, k, cols = shape
    if transfer == "engine" and f is ops.matmul_reduce_scatter:
        m, cols = 128, 64 * n  # whole tiles
    a = operands(rng, n, (n * m if f is ops.matmul_reduce_scatter else m, k), np.float16)
    b = operands(rng, n, (k, cols), np.float16)
    mesh, (x, y) = on(way, n, a, b)
    config = MatmulConfig(1, 64, cluster=2, group=1, stages=3) if n == 2 else None
    options = {"blocks": 4, "config": config, "transfer": transfer, "out_dtype": np.float32}
    for seed in range(2):
        options["interpret"] = None if way == "cuda" else params(seed)
        got = f(x, y, mesh, **options)
    if f is ops.all_gather_matmul:
        wants = [np.concatenate(a).astype(np.float32) @ one.astype(np.float32) for one in b]
    else:
        total = sum(p.astype(np.float32) @ q.astype(np.float32) for p, q in zip(a, b, strict=True))
        wants = np.split(total, n) if f is ops.matmul_reduce_scatter else [total] * n
    for one, want in zip(got, wants, strict=True):
        np.testing.assert_allclose(np.asarray(one), want, rtol=1e-4, atol=3e-4)


def test_chosen_transfers(rng, monkeypatch):
    """Summands are fetched if there are several waves of them; rows if others reach them."""
    mesh, f16 = plgpu.DeviceMesh(2, "x"), np.dtype(np.float16)
    config = MatmulConfig(1, 64, cluster=1)
    for blocks, transfer in ((2, "pull"), (4, "push")):
        call = ops.Call(mesh, "x", 128, 64, 128, f16, f16, blocks, config=config)
        chosen = ops._scattered(call._replace(transfer=None))
        assert chosen is ops._scattered(call._replace(transfer=transfer))
    a, b, made = operands(rng, 2, (8, 64), f16), operands(rng, 2, (64, 8), f16), []
    monkeypatch.setattr(ops, "_gathered", lambda call: made.append(call) or (lambda *x, **y: x))
    ops.all_gather_matmul(a, b, mesh)
    monkeypatch.setattr(ops, "_reachable", lambda x, mesh: False)
    ops.all_gather_matmul(a, b, mesh)
    ops.all_gather_matmul(a, b, mesh, transfer="pull")
    assert [call.transfer for call in made] == ["pull", "push", "pull"]


def test_transfers_that_are_not_there(rng):
    mesh = plgpu.DeviceMesh(2, "x")
    a, b = operands(rng, 2, (4, 12), np.float16), operands(rng, 2, (12, 8), np.float16)
    with pytest.raises(ValueError, match=r"one of \('push', 'pull', 'engine'\), got 'fetch'"):
        ops.all_gather_matmul(a, b, mesh, transfer="fetch")
    for x, y in ((a, b), [[o.astype(np.float32) for o in side] for side in (a, b)]):
        with pytest.raises(NotImplementedError, match="multiple of 8 elements"):
            ops.all_gather_matmul(x, y, mesh, transfer="engine")
    with pytest.raises(NotImplementedError, match="for all_gather_matmul and matmul_reduce_sca"):
        ops.matmul_all_reduce(a, b, mesh, transfer="engine")
    a, b = operands(rng, 2, (264, 16), np.float16), operands(rng, 2, (16, 264), np.float16)
    with pytest.raises(NotImplementedError, match=r"part \(132, 264\) of the sums"):
        ops.matmul_reduce_scatter(a, b, mesh, transfer="engine")


@pytest.mark.parametrize("n", only_long([2, 4], 2))
@pytest.mark.parametrize("make", [ops._gathered, ops._scattered, ops._reduced])
def test_on_the_emulated_machine(rng, make, n):
    """Calls in a row, with the flags and the staging memory of the last; more steps than slots."""
    (m, k, cols), cluster = ((100, 104, 72), 2) if n == 2 else ((40, 136, 40), 1)
    f16 = np.dtype(np.float16)
    rows = n * m if make is ops._scattered else m
    a = [rng.integers(-3, 4, (rows, k)).astype(f16) for _ in range(n)]
    b = [rng.integers(-3, 4, (k, cols)).astype(f16) for _ in range(n)]
    if make is ops._gathered:
        wants = [np.concatenate(a).astype("f4") @ y.astype("f4") for y in b]
    else:
        total = sum(x.astype("f4") @ y.astype("f4") for x, y in zip(a, b, strict=True))
        wants = np.split(total, n) if make is ops._scattered else [total] * n
    config = MatmulConfig(1, 64, cluster=cluster, group=1, stages=2)
    f32, mesh = np.dtype(np.float32), plgpu.DeviceMesh(n, "x")
    f = make(ops.Call(mesh, "x", m, k, cols, f16, f32, 2 * cluster, config=config))
    lasting = [[np.zeros(x.shape, x.dtype) for x in row] for row in zip(*f.lasting, strict=True)]
    low = f.lower(a[0], b[0])
    for seed in range(2):
        outs = [[np.zeros(w.shape, f32), *row] for w, row in zip(wants, lasting, strict=True)]
        args = [list(x) for x in zip(a, b, strict=True)]
        host.run_mesh(low, args, outs, seed, written=True)
        for got, want in zip(outs, wants, strict=True):
            np.testing.assert_array_equal(got[0], want)


PROGRAMS = [(2, (1024, 4096, 2048)), (8, (8192, 8192, 8192)), (4, (1500, 520, 2056))]


@pytest.mark.parametrize("n, shape", PROGRAMS, ids=str)
@pytest.mark.parametrize("make", [ops._gathered, ops._scattered, ops._reduced])
def test_programs(make, n, shape):
    """For sm_90a, without spills, no wait that serialises products, and no copy by lanes."""
    mesh, bf, (m, k, cols) = plgpu.DeviceMesh(n, "x"), np.dtype(bfloat16), shape
    f = make(ops.Call(mesh, "x", m, k, cols, bf, bf, 132))
    rows = n * m if make is ops._scattered else m
    struct = plgpu.ShapeDtypeStruct
    low = f.lower(struct((rows, k), bf), struct((k, cols), bf))
    used = low.resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used
    assert "C75" not in used["remarks"], used
    text = low.as_text("cuda")
    assert "by all lanes" not in text
    # slots are released without a fence of all memory
    for slow in ("arrive_release", "wait_cluster"):
        assert not re.search(rf"mbarrier_{slow}\((empty|full)", text)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_one_device(rng, f):
    """Alone along its axis, a device only multiplies."""
    mesh = plgpu.DeviceMesh((2, 1), ("x", "y"))
    for dtype in (np.float16, np.float32):
        a, b = operands(rng, 2, (5, 12), dtype), operands(rng, 2, (12, 7), dtype)
        out = [np.full((5, 7), np.nan, np.float32) for _ in range(2)]
        f(a, b, mesh, "y", out_dtype=np.float32, out=out)
        for x, y, got in zip(a, b, out, strict=True):
            want = x.astype(np.float32) @ y.astype(np.float32)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        with pytest.raises(ValueError, match="out must be a list of 2 arrays"):
            f(a, b, mesh, "y", out_dtype=np.float32, out=out[0])


def test_wrong_arguments(rng):
    mesh = plgpu.DeviceMesh(2, "x")
    a, b = operands(rng, 2, (3, 8), np.float16), operands(rng, 2, (8, 8), np.float16)
    with pytest.raises(ValueError, match="no 2 equal parts"):
        ops.matmul_reduce_scatter(a, b, mesh)
    with pytest.raises(ValueError, match=r"a must be \(m, k\)"):
        ops.all_gather_matmul(a, a, mesh)
    with pytest.raises(ValueError, match="room for two slots"):
        wide = MatmulConfig(2, 256, step=128)
        ops.matmul_all_reduce([np.zeros((4, 8), np.float16)] * 2, b, mesh, config=wide)
    for config in (MatmulConfig(slices=2), FewRowsConfig()):
        with pytest.raises(ValueError, match="a MatmulConfig"):
            ops.all_gather_matmul(a, b, mesh, config=config)
    with pytest.raises(NotImplementedError, match="float16"):
        ops.all_gather_matmul([x.astype(np.float32) for x in a], b, mesh)
