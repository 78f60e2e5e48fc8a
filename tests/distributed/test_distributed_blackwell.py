"""Collectives and products over devices for Blackwell: products are right on the interpreter under
several schedules, and on the emulated machine; all programs compile for both targets, in
registers."""

import ml_dtypes
import numpy as np
import pytest
from distributed.meshes import params
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine import run as host
from pallas_mgpu.ops import distributed, distributed_norms, distributed_ragged
from pallas_mgpu.ops import distributed_matmul as ops

# what TMA cannot address is copied by lanes, with a warning
pytestmark = pytest.mark.filterwarnings("ignore:.*loads and stores of all lanes")
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TARGETS = ["sm_100a", "sm_103a"]
PRODUCTS = {
    "all_gather_matmul": ops._gathered,
    "matmul_reduce_scatter": ops._scattered,
    "matmul_all_reduce": ops._reduced,
}


def problem(rng, name, n, m, k, cols):
    """Operands of integers, whose sums are exact, and the results of all devices."""
    rows = n * m if name == "matmul_reduce_scatter" else m
    a = [rng.integers(-3, 4, (rows, k)).astype(BF16) for _ in range(n)]
    b = [rng.integers(-3, 4, (k, cols)).astype(BF16) for _ in range(n)]
    x, y = ([z.astype(F32) for z in arrays] for arrays in (a, b))
    if name == "all_gather_matmul":
        return a, b, [np.concatenate(x) @ one for one in y]
    total = sum(p @ q for p, q in zip(x, y))
    parts = np.split(total, n) if name == "matmul_reduce_scatter" else [total] * n
    return a, b, parts


@pytest.mark.parametrize("shape", [(128, 64, 128), (130, 96, 264), (7, 330, 33)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(rng, name, shape, monkeypatch):
    """What a call on such a GPU runs; several calls follow each other."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    a, b, wants = problem(rng, name, 2, *shape)
    mesh = plgpu.DeviceMesh(2, "x")
    for _ in range(2):
        got = getattr(ops, name)(a, b, mesh, blocks=3, out_dtype=F32, interpret=params(3))
        for x, want in zip(got, wants, strict=True):
            np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("name", only_long(PRODUCTS, "matmul_reduce_scatter"))
def test_host(rng, name):
    """Calls in a row on the emulated machine, with the flags and the staging memory of the last."""
    n, (m, k, cols) = 2, (128, 128, 136)
    a, b, wants = problem(rng, name, n, m, k, cols)
    call = ops.Call(plgpu.DeviceMesh(n, "x"), "x", m, k, cols, BF16, F32, 2, tmem=True)
    f = PRODUCTS[name](call)
    lasting = [[np.zeros(x.shape, x.dtype) for x in row] for row in zip(*f.lasting)]
    low = f.lower(a[0], b[0], target="sm_100a")
    for seed in range(2):
        outs = [[np.zeros(want.shape, F32), *row] for want, row in zip(wants, lasting)]
        host.run_mesh(low, [list(x) for x in zip(a, b)], outs, seed, written=True)
        for got, want in zip(outs, wants, strict=True):
            np.testing.assert_array_equal(got[0], want)


def programs():
    """Kernels of two devices, with the arguments of one."""
    mesh, spec = plgpu.DeviceMesh(2, "x"), plgpu.ShapeDtypeStruct
    call = ops.Call(mesh, "x", 1024, 4096, 2048, BF16, BF16, 132, tmem=True)
    for name, make in PRODUCTS.items():
        rows = 2048 if make is ops._scattered else 1024
        args = spec((rows, 4096), BF16), spec((4096, 2048), BF16)
        yield name, lambda make=make: make(call), args
    yield (
        "norm",
        lambda: distributed_norms._normed(mesh, "x", (256, 4096), BF16, 1e-6, False, 8, None),
        (spec((256, 4096), BF16), spec((256, 4096), BF16), spec((4096,), BF16)),
    )
    kinds = (((7168,), np.dtype(ml_dtypes.float8_e4m3fn)), ((56,), F32))
    yield (
        "ragged",
        lambda: distributed_ragged._ragged(mesh, "x", 512, 4096, kinds, 8, None),
        (
            spec((2,), np.int32),
            *(spec((512, *shape), dtype) for shape, dtype in kinds),
        ),
    )


PROGRAMS = {name: (make, args) for name, make, args in programs()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name, target):
    make, args = PROGRAMS[name]
    low = make().lower(*args, target=target)
    assert ("tcgen05_mma" in low.as_text("cuda")) == ("matmul" in name)
    used = low.resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


COLLECTIVES = {
    "all_gather": distributed.all_gather,
    "reduce_scatter": distributed.reduce_scatter,
    "all_reduce": distributed.all_reduce,
    "all_to_all": distributed.all_to_all,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(rng, name, monkeypatch):
    """They need no tensor cores; each compiles for both targets when it is made."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    made, real = [], distributed.Collective.__init__

    def recorded(self, *args, **options):
        real(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(distributed.Collective, "__init__", recorded)
    x = [rng.integers(-9, 9, (66, 40)).astype(F32) for _ in range(2)]
    got = COLLECTIVES[name](x, plgpu.DeviceMesh(2, "y"), blocks=2, interpret=params(1))
    total, rows = sum(x), np.concatenate(x)
    wants = {
        "all_gather": [rows] * 2,
        "reduce_scatter": np.split(total, 2),
        "all_reduce": [total] * 2,
        "all_to_all": [np.concatenate([a[33 * d : 33 * (d + 1)] for a in x]) for d in range(2)],
    }[name]
    for a, want in zip(got, wants, strict=True):
        np.testing.assert_array_equal(np.asarray(a).reshape(want.shape), want)
    assert made
    for f in made:
        for target in TARGETS:
            used = f.lower(x[0], target=target).resources()
            assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
