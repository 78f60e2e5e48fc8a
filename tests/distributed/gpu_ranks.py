"""One process of several, each with its GPU: `gpu_ranks.py CASE...`, started by test_groups.py."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import pallas_mgpu as plgpu
from pallas_mgpu.ops import (
    distributed,
    distributed_matmul,
    distributed_norms,
    distributed_ragged,
)

rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def start(timeout=20, **options):
    torch.cuda.set_device(rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return plgpu.DeviceMesh((n,), "x", group=True, timeout=timeout, **options)


def data(*shape, dtype=torch.bfloat16, of=None, seed=0):
    g = torch.Generator("cuda").manual_seed(100 * seed + (rank if of is None else of))
    return torch.randint(-4, 5, shape, generator=g, device="cuda").to(dtype)


def symmetric(mesh, x):
    dtype = str(x.dtype).removeprefix("torch.")
    return plgpu.symm_empty(tuple(x.shape), dtype, mesh).copy_(x)


def case_collectives():
    collectives(start())


def case_nvshmem():
    """Memory of NVSHMEM, which the mesh frees when it is closed."""
    import nvshmem.core

    mesh = start(memory="nvshmem")
    assert nvshmem.core.n_pes() == n
    collectives(mesh)
    mesh.close()
    nvshmem.core.finalize()


def case_closing():
    """With kernels in flight, and then again."""
    mesh = start()
    for _ in range(3):
        x = symmetric(mesh, data(5000, dtype=torch.float32))
        want = sum(data(5000, dtype=torch.float32, of=r) for r in range(n))
        for _ in range(200):
            total = distributed.all_reduce(x, mesh)
        mesh.close()
        assert torch.equal(total, want)
        try:
            distributed.all_reduce(x, mesh)
        except RuntimeError as e:
            assert "was closed" in str(e)
        else:
            raise AssertionError("a closed mesh was used")
        mesh = plgpu.DeviceMesh((n,), "x", group=True, timeout=20)


def collectives(mesh):
    for shape in [(n,), (3 * n, 5), (2 * n, 5000)]:
        all_x = [data(*shape, of=r) for r in range(n)]
        total = sum(x.float() for x in all_x).to(torch.bfloat16)
        part = lambda x: x.chunk(n)[rank]  # noqa: E731
        for x in (all_x[rank], symmetric(mesh, all_x[rank])):
            for _ in range(3):
                assert torch.equal(distributed.all_gather(x, mesh), torch.cat(all_x))
                assert torch.equal(distributed.reduce_scatter(x, mesh), part(total))
                for one_shot in (True, False):
                    got = distributed.all_reduce(x, mesh, one_shot=one_shot)
                    assert torch.equal(got, total)
                want = torch.cat([part(y) for y in all_x])
                assert torch.equal(distributed.all_to_all(x, mesh), want)
    large(mesh)
    sizes = torch.full((n,), 2, dtype=torch.int32, device="cuda")
    x = data(2 * n, 300)
    out, received = distributed_ragged.ragged_all_to_all(x, sizes, mesh)
    back, _ = distributed_ragged.ragged_all_to_all(out, received, mesh)
    assert torch.equal(back, x) and torch.equal(received, sizes)
    g, r = torch.ones(300, device="cuda", dtype=x.dtype), data(2 * n, 300, of=0, seed=1)
    normed, total = distributed_norms.all_reduce_rms_norm(x, r, g, mesh)
    want = sum(data(2 * n, 300, of=k).float() for k in range(n)) + r.float()
    assert torch.equal(total, want.to(x.dtype))
    want = torch.nn.functional.rms_norm(total.float(), (300,), None, 1e-6)
    torch.testing.assert_close(normed.float(), want, rtol=1e-2, atol=1e-2)


def large(mesh):
    """Arrays that are copied directly to where they belong, and that take all slots."""
    shape = (n, 8 << 20)
    all_x = [data(*shape, of=r) for r in range(n)]
    total = sum(x.float() for x in all_x).to(torch.bfloat16)
    parts = [x.chunk(n)[rank] for x in all_x]
    for x in (all_x[rank], symmetric(mesh, all_x[rank])):
        assert torch.equal(distributed.all_gather(x, mesh), torch.cat(all_x))
        assert torch.equal(distributed.all_to_all(x, mesh), torch.cat(parts))
        assert torch.equal(distributed.reduce_scatter(x, mesh), total.chunk(n)[rank])
        assert torch.equal(distributed.all_reduce(x, mesh), total)
    columns = data(64, 1001 * n)
    want = torch.cat([data(64, 1001 * n, of=r) for r in range(n)], 1)
    assert torch.equal(distributed.all_gather(columns, mesh, axis=1), want)


def case_products():
    mesh = start()
    for m, k, columns in [(128, 64, 128), (257, 130, 129), (1024, 512, 768)]:
        a = [data(m * n, k, of=r) for r in range(n)]
        b = [data(k, columns, of=r, seed=1) for r in range(n)]
        total = sum(x.float() @ y.float() for x, y in zip(a, b))
        own = data(m, k)
        gathered = torch.cat([data(m, k, of=r) for r in range(n)])
        for transfer in ("push", "pull") * 2 if m == 257 else ("push", "push"):
            how = {"transfer": transfer}
            got = distributed_matmul.all_gather_matmul(own, b[rank], mesh, **how)
            close(got, gathered.float() @ b[rank].float())
            got = distributed_matmul.matmul_reduce_scatter(a[rank], b[rank], mesh, **how)
            close(got, total.chunk(n)[rank])
            close(distributed_matmul.matmul_all_reduce(a[rank], b[rank], mesh, **how), total)


def case_engine():
    """By the copy engines: calls in a row with new operands, and replays of a graph."""
    mesh = start()
    rows, how = 4096 * n, {"transfer": "engine"}
    b, x = data(512, 768, seed=9), data(4096, 512)
    c, y = data(512, 1024, seed=8), data(rows, 512)
    out, part = (torch.empty(s, dtype=b.dtype, device="cuda") for s in ((rows, 768), (4096, 1024)))

    def call():
        distributed_matmul.all_gather_matmul(x, b, mesh, out=out, **how)
        distributed_matmul.matmul_reduce_scatter(y, c, mesh, out=part, **how)

    def check(f, seed):
        x.copy_(data(4096, 512, seed=seed))
        y.copy_(data(rows, 512, seed=seed))
        gathered = torch.cat([data(4096, 512, of=r, seed=seed) for r in range(n)])
        summands = [
            data(rows, 512, of=r, seed=seed).float() @ data(512, 1024, of=r, seed=8).float()
            for r in range(n)
        ]
        out.fill_(77)
        part.fill_(77)
        f()
        close(out, gathered.float() @ b.float())
        close(part, sum(summands).chunk(n)[rank])

    for seed in range(4):
        check(call, seed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    for seed in range(4, 12):
        check(graph.replay if seed % 2 else call, seed)


def close(got, want):
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-1)


def case_graphs():
    """Replays take turns with eager calls."""
    mesh = start()
    x = symmetric(mesh, data(3000, dtype=torch.float32))
    out = plgpu.symm_empty((3000,), "float32", mesh)
    for one_shot in (True, False):

        def call(one_shot=one_shot):
            return distributed.all_reduce(x, mesh, one_shot=one_shot, out=out)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
        want = x.clone()
        dist.all_reduce(want)
        for _ in range(20):
            for f in (graph.replay, call):
                out.fill_(77)
                f()
                assert torch.equal(out, want)


def until_refused(mesh, words):
    x = data(5000, dtype=torch.float32)
    start = time.time()
    while time.time() - start < 10:
        try:
            distributed.all_reduce(x, mesh)
            torch.cuda.synchronize()
        except plgpu.DeadlockError as e:
            assert words in str(e), e
            print(e)
            return
    raise AssertionError("no error within 10 seconds")


def case_killed():
    """SIGKILL of rank 1 in the middle: the others end within 10 seconds."""
    mesh = start(0)
    x = data(5000, dtype=torch.float32)
    for _ in range(10):
        distributed.all_reduce(x, mesh)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_refused(mesh, "the process of rank 1")


def case_late():
    """A rank that makes no call: the others' waits end, and say which they were."""
    mesh = start(2)
    distributed.all_reduce(data(5000, dtype=torch.float32), mesh)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(8)
        return
    until_refused(mesh, "a wait lasted longer than the timeout of the mesh")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        globals()["case_" + case]()
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)
