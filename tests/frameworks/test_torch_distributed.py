"""Gradients of collectives over the devices of a mesh, on the interpreter, against autograd through
the same sums and pieces written in PyTorch."""

import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import distributed

torch = pytest.importorskip("torch")
pt = pytest.importorskip("pallas_mgpu.torch")
N = 2


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    return plgpu.DeviceMesh((N,), ("x",))


def parts(x, n=N):
    return list(x.chunk(n))


REFERENCE = {
    "all_gather": lambda x: [torch.cat(x)] * N,
    "reduce_scatter": lambda x: parts(sum(x)),
    "all_reduce": lambda x: [sum(x)] * N,
    "all_to_all": lambda x: [torch.cat([parts(s)[d] for s in x]) for d in range(N)],
}


def compare(ours, theirs, *arrays, tolerance=1e-5):
    """Results and gradients on all devices; theirs computes in float32."""

    def run(f, wide):
        leaves = [[x.detach().to(x.dtype).requires_grad_() for x in a] for a in arrays]
        given = [[x.float() for x in a] for a in leaves] if wide else leaves
        found = f(*given)
        torch.manual_seed(1)
        loss = sum((torch.randn(y.shape) * y.float()).sum() for y in found)
        flat = [x for a in leaves for x in a]
        return [*found, *torch.autograd.grad(loss, flat)]

    for a, b in zip(run(ours, False), run(theirs, True), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", REFERENCE)
def test_collectives(name, mesh):
    x = [torch.randn(6, 8) for _ in range(N)]
    compare(lambda x: getattr(pt, name)(x, mesh, interpret=True), REFERENCE[name], x)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 8e-2), (torch.float32, 2e-3)])
def test_products(mesh, dtype, tolerance):
    a = [torch.randn(64, 128).to(dtype) for _ in range(N)]
    b = [torch.randn(128, 64).to(dtype) for _ in range(N)]
    compare(
        lambda a, b: pt.all_gather_matmul(a, b, mesh, interpret=True),
        lambda a, b: [torch.cat(a) @ y for y in b],
        a,
        b,
        tolerance=tolerance,
    )
    compare(
        lambda a, b: pt.matmul_reduce_scatter(a, b, mesh, interpret=True),
        lambda a, b: parts(sum(x @ y for x, y in zip(a, b))),
        a,
        b,
        tolerance=tolerance,
    )


def test_a_product_that_all_get(mesh):
    a = [torch.randn(64, 128).half() for _ in range(N)]
    b = [torch.randn(128, 64).half() for _ in range(N)]
    compare(
        lambda a, b: pt.matmul_all_reduce(a, b, mesh, interpret=True),
        lambda a, b: [sum(x @ y for x, y in zip(a, b))] * N,
        a,
        b,
        tolerance=8e-2,
    )


def test_rows_there_and_back(mesh):
    """Dispatch and combine; rows that are not sent have no gradient."""
    x = [torch.randn(6, 5, requires_grad=True) for _ in range(N)]
    sizes = [torch.tensor([1 + d, 3 - d], dtype=torch.int32) for d in range(N)]
    out, received = pt.ragged_all_to_all(x, sizes, mesh, capacity=9, interpret=True)
    back, _ = pt.ragged_all_to_all([y * 3 for y in out], received, mesh, capacity=6, interpret=True)
    weights = [torch.randn(6, 5) for _ in range(N)]
    sum((y * w).sum() for y, w in zip(back, weights)).backward()
    for d in range(N):
        torch.testing.assert_close(back[d][:4], 3 * x[d][:4])
        torch.testing.assert_close(x[d].grad[:4], 3 * weights[d][:4])
        assert not x[d].grad[4:].any() and not back[d][4:].any()
    with pytest.raises(NotImplementedError, match="out="):
        pt.ragged_all_to_all(x, sizes, mesh, out=x)


def test_scales_go_with_their_rows(mesh):
    x, scales = ([torch.randn(4, k).requires_grad_() for _ in range(N)] for k in (8, 1))
    sizes = [torch.tensor([1 + d, 3 - d], dtype=torch.int32) for d in range(N)]
    how = {"scales": scales, "capacity": 5, "interpret": True}
    out, received, moved = pt.ragged_all_to_all(x, sizes, mesh, **how)
    w = [torch.randn(5, 8) for _ in range(N)]
    sum((y * s * v).sum() for y, s, v in zip(out, moved, w)).backward()
    # device 0 has row 0 of its own and two of device 1; device 1 three of device 0 and two
    there = [torch.cat([w[0][:1], w[1][:3]]), torch.cat([w[0][1:3], w[1][3:]])]
    for d in range(N):
        assert received[d].tolist() == [int(s[d]) for s in sizes]
        torch.testing.assert_close(x[d].grad, scales[d].detach() * there[d])
        want = (x[d].detach() * there[d]).sum(1, keepdim=True)
        torch.testing.assert_close(scales[d].grad, want)


@pytest.mark.parametrize("one_shot", [True, False])
def test_a_sum_and_its_norm(mesh, one_shot):
    x, r = ([torch.randn(6, 128) for _ in range(N)] for _ in range(2))
    r[1].copy_(r[0])
    g = [torch.randn(128)] * N

    def ours(x, r, g):
        normed, total = pt.all_reduce_rms_norm(x, r, g, mesh, one_shot=one_shot, interpret=True)
        return [*normed, *total]

    def theirs(x, r, g):
        total = [sum(x) + own for own in r]
        normed = [torch.nn.functional.rms_norm(t, (128,), w, 1e-6) for t, w in zip(total, g)]
        return [*normed, *total]

    compare(ours, theirs, x, r, g, tolerance=1e-4)


def test_the_functions_of_ops_say_that_they_have_no_gradient(mesh):
    x = [torch.ones(4, 8, requires_grad=True), torch.ones(4, 8)]
    with pytest.warns(UserWarning, match="requires grad"):
        distributed.all_gather(x, mesh, interpret=True)


def sums(x, mesh):
    y = pt.all_reduce(pt.all_gather([t.sin() for t in x], mesh), mesh)
    return [t.cos() for t in pt.reduce_scatter(y, mesh)]


def test_compiled_without_breaks(mesh):
    """Collectives are operators: one graph for all sizes, forward and backward."""
    compiled = torch.compile(
        lambda x: sum(y.sum() for y in sums(x, mesh)),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for n in (4, 6):
        x = [torch.randn(n, 8, requires_grad=True) for _ in range(N)]
        got = torch.autograd.grad(compiled(x), x)
        want = torch.autograd.grad(sum(y.sum() for y in sums(x, mesh)), x)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


def _products(name):
    a = [torch.randn(64, 128).half().requires_grad_() for _ in range(N)]
    b = [torch.randn(128, 64).half().requires_grad_() for _ in range(N)]
    return a, b


@pytest.mark.parametrize(
    "name", [*REFERENCE, "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_opcheck(name, mesh):
    x = [torch.randn(4, 8, requires_grad=True) for _ in range(N)]
    arrays = _products(name) if "matmul" in name else (x,)
    op = getattr(torch.ops.pallas_mgpu, name).default
    torch.library.opcheck(op, (*arrays, mesh.name), rtol=6e-2, atol=6e-1)


def test_what_collectives_have_no_derivatives_of(mesh):
    x = [torch.randn(4, 8) for _ in range(N)]
    with pytest.raises(NotImplementedError, match="all_gather has no derivative for forward mode"):
        torch.func.jvp(lambda *x: pt.all_gather(x, mesh)[0], tuple(x), tuple(x))
    with pytest.raises(NotImplementedError, match="all_gather has no gradient under torch.func"):
        torch.func.grad(lambda t: pt.all_gather([t, t], mesh)[0].sum())(x[0])
    x = [t.requires_grad_() for t in x]
    with pytest.raises(NotImplementedError, match="all_gather: out="):
        pt.all_gather(x, mesh, out=[torch.empty(8, 8) for _ in range(N)])
    (g, *_) = torch.autograd.grad(pt.all_gather(x, mesh)[0].pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_a_mesh_that_is_not_there(mesh):
    assert mesh.name == "x=2"
    with pytest.raises(RuntimeError, match="no mesh y=2"):
        torch.ops.pallas_mgpu.all_reduce([torch.ones(4)], "y=2")


def test_adamw_of_distributed_parameters():
    """Each process updates its part; parts may be empty."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, found = init_device_mesh("cpu", (1,)), []
        for whole in (False, True):
            make = (lambda x: x) if whole else (lambda x: distribute_tensor(x, mesh, [Shard(0)]))
            params = [torch.nn.Parameter(make(torch.ones(n, 5))) for n in (3, 0)]
            optimizer = (torch.optim.AdamW if whole else pt.AdamW)(params, lr=0.1)
            for _ in range(2):
                for p in params:
                    p.grad = make(torch.arange(p.shape[0] * 5.0).reshape(p.shape))
                optimizer.step()
            found.append([p.detach() if whole else p.to_local() for p in params])
            for p in () if whole else params:  # a checkpoint has the state of all of them
                assert optimizer.state[p]["first"].shape == p.shape
                assert optimizer.state[p]["settings"][5] == 2
        for a, b in zip(*found):
            torch.testing.assert_close(a, b)
        params[0] = torch.nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]))
        params[0].grad = distribute_tensor(torch.ones(3, 5), mesh, [Replicate()])
        with pytest.raises(ValueError, match="distributed in different ways"):
            pt.AdamW(params[:1]).step()
    finally:
        dist.destroy_process_group()
