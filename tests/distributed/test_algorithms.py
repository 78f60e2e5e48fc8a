"""Algorithms as a user writes them: collectives by NVLink multicast, and a ring of rows for a
product. Multicast runs on the CPU only."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from distributed.meshes import Mesh, gpus, on_gpus, params, shards, struct

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

REGULAR, f16 = plgpu.SemaphoreType.REGULAR, np.float16


@pytest.fixture(params=["interpret", "host"])
def on_cpu(request):
    return request.param


def all_here(done):
    """Every device has told every other one, and itself, that it is done."""
    plgpu.semaphore_signal_multicast(done, collective_axes="x")
    pl.semaphore_wait(done, lax.axis_size("x"), decrement=False)


@pytest.mark.parametrize("n", [2, 3])
def test_all_gather_by_multicast(on_cpu, rng, n):
    """Blocks store tiles at the address of all devices."""

    def body(x, y, done):
        block = lax.axis_index("i")
        tile = pl.ds(block * 8, 8)
        window = y.at[pl.ds(lax.axis_index("x") * 16, 16)]
        plgpu.multimem_store(x[tile], window.at[tile], collective_axes="x")
        all_here(done)

    x = shards(rng, n, (16, 64))
    y = Mesh((n,), "x", on_cpu)(
        body,
        struct((n * 16, 64)),
        x,
        scratch_types=[REGULAR],
        grid=(2,),
        grid_names=("i",),
    )
    for d in range(n):
        np.testing.assert_array_equal(y[d], np.concatenate(x))


@pytest.mark.parametrize("scatter", [False, True])
def test_sums_by_multicast(on_cpu, rng, scatter):
    """Each device reads the sum of all, of its rows or of all rows; no device leaves before the
    others have read."""
    n, rows = 2, 16

    def body(x, y, done):
        block = lax.axis_index("i")
        first = lax.axis_index("x") * (rows // n) if scatter else 0
        size = rows // n // 2 if scatter else rows // 2
        source = x.at[pl.ds(first + block * size, size)]
        y[pl.ds(block * size, size)] = plgpu.multimem_load_reduce(
            source, collective_axes="x", reduction_op="add"
        )
        all_here(done)

    x = [np.round(a * 8) for a in shards(rng, n, (rows, 64))]
    y = Mesh((n,), "x", on_cpu)(
        body,
        struct((rows // n if scatter else rows, 64)),
        x,
        scratch_types=[REGULAR],
        grid=(2,),
        grid_names=("i",),
    )
    for d in range(n):
        want = np.split(x[0] + x[1], n)[d] if scatter else x[0] + x[1]
        np.testing.assert_array_equal(y[d], want)


@pytest.mark.parametrize("way", ["interpret", "host", pytest.param("cuda", marks=on_gpus)])
@pytest.mark.parametrize("n", [2, 4])
def test_product_with_a_ring_of_rows(way, rng, n):
    """Rows of A travel round the ring, each step while the product of the step before runs: a
    device has its neighbour's rows only when it needs them. Nobody writes to a slot twice."""
    m, k, columns = 64, 64, 64

    def body(a, b, c, ring, a_smem, b_smem, barrier, received):
        me = lax.axis_index("x")
        to = (me + n - 1) % n
        plgpu.copy_gmem_to_smem(b, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        for step in range(n):
            source = a if step == 0 else ring.at[step - 1]
            plgpu.copy_gmem_to_smem(source, a_smem, barrier)
            plgpu.barrier_wait(barrier)
            if step < n - 1:  # from here on to the next device
                plgpu.copy_smem_to_gmem(a_smem, plgpu.remote_ref(ring.at[step], to))

            def multiply(acc):
                plgpu.wgmma(acc, a_smem, b_smem)
                return acc[...]

            product = pl.run_scoped(multiply, plgpu.ACC((m, columns), jnp.float32))
            c[pl.ds((me + step) % n * m, m)] = product
            if step < n - 1:
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(received, device_id=to)
                pl.semaphore_wait(received, step + 1, decrement=False)

    a = [(x / 4).astype(np.float16) for x in shards(rng, n, (m, k))]
    b = [(x / 4).astype(np.float16) for x in shards(rng, n, (k, columns))]
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = plgpu.SMEM((64, 64), jnp.float16, transforms=tiled)
    c, _ = Mesh((n,), "x", way)(
        body,
        (struct((n * m, columns)), struct((n - 1, m, k), np.float16)),
        a,
        b,
        seeds=(0, 1),
        scratch_types=[smem, smem, plgpu.Barrier(), REGULAR],
    )
    for d in range(n):
        want = np.concatenate(a).astype(np.float32) @ b[d].astype(np.float32)
        np.testing.assert_allclose(c[d], want, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent.parent / "examples" / "collective_matmul.py"
    spec = importlib.util.spec_from_file_location("collective_matmul", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("way", ["interpret", "emulate", pytest.param("cuda", marks=on_gpus)])
@pytest.mark.parametrize("n", [2, 3])
def test_pipelined_product_on_a_ring(example, way, rng, n):
    """The example, whose pipelines send on the tiles that they multiply."""
    m, k, columns = 128, 128, 256
    mesh = plgpu.DeviceMesh((n,), "ring", devices=gpus(n) if way == "cuda" else None)
    interpret = {"interpret": params(n), "emulate": "emulate", "cuda": None}[way]
    kernel = example.ring_all_gather_matmul(m, k, columns, n, f16, 2, interpret=interpret)
    a = [(x / 4).astype(f16) for x in shards(rng, n, (m, k))]
    b = [(x / 4).astype(f16) for x in shards(rng, n, (k, columns))]
    if way == "cuda":
        put = [[plgpu.device_put(x, d) for x, d in zip(y, mesh.devices)] for y in (a, b)]
    c, _ = plgpu.spmd(kernel, mesh)(*(put if way == "cuda" else (a, b)))
    for d in range(n):
        want = np.concatenate(a).astype(np.float32) @ b[d].astype(np.float32)
        np.testing.assert_allclose(np.asarray(c[d], np.float32), want, rtol=1e-2, atol=1e-2)


def test_program_of_the_product_on_a_ring(example):
    """Eight devices, 132 blocks: in registers, and no wait that serialises products."""
    m, k, columns = 1024, 4096, 2048
    kernel = example.ring_all_gather_matmul(m, k, columns, 8, f16, 132)
    f = plgpu.spmd(kernel, plgpu.DeviceMesh((8,), "ring"))
    used = f.lower(struct((m, k), f16), struct((k, columns), f16)).resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0, used
    assert "C75" not in used["remarks"], used


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("way", ["interpret", "host", pytest.param("cuda", marks=on_gpus)])
def test_exchange_of_two_devices(way, rng, asks):
    """Ready, write, received. The first pair is not needed where launches are ordered."""

    def body(x, y, ready, received):
        peer = 1 - lax.axis_index("x")
        if asks:
            pl.semaphore_signal(ready, device_id=peer)
            pl.semaphore_wait(ready)
        plgpu.remote_ref(y, peer)[...] = x[...]
        pl.semaphore_signal(received, device_id=peer)
        pl.semaphore_wait(received)

    x = shards(rng, 2, (16, 64))
    y = Mesh((2,), "x", way)(body, struct((16, 64)), x, scratch_types=[REGULAR, REGULAR])
    for d in range(2):
        np.testing.assert_array_equal(y[d], x[1 - d])
