"""On a GPU: kernels that go while graphs and launches use them, streams of the caller, arrays of 64
bits, memory that arrays share."""

import gc

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops, pl

pytestmark = pytest.mark.gpu
N = 1000


def shaped(*shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def add(x, y, o):
    o[...] = x[...] + y[...]


def slow(x, o):
    @pl.loop(0, 300)
    def _(i):
        pl.delay(1000000)

    o[...] = x[...] + 1


def many(n, monkeypatch, like):
    """n signatures of a kernel, with room for few of them."""
    monkeypatch.setenv("PALLAS_MGPU_PLAN_BYTES", "500000")
    k = plgpu.kernel(lambda x, o: o.__setitem__(..., x[x.shape[0] - 1] + 1), out_type=shaped())
    for i in range(1, n):
        assert float(k(like(i))) == 2
    assert _core.plan_memory()["plans"] < n // 2


def test_graphs_outlive_their_kernels(monkeypatch):
    torch = pytest.importorskip("torch")
    a, b = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    out = torch.zeros_like(a)
    k = plgpu.kernel(add, out_type=shaped(N))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        k(a, b, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        k(a, b, out=out)
        plgpu.clear_caches()
        del k
        gc.collect()
    many(40, monkeypatch, lambda i: torch.ones(i, device="cuda"))
    plgpu.synchronize()
    many(40, monkeypatch, lambda i: np.ones(i, np.float32))
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, a + b)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("blocking", [False, True])
def test_captures_go_on_when_arrays_are_collected(mode, blocking):
    """Their memory is freed at once where that is no part of the capture, otherwise later."""
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    x = np.arange(N, dtype=np.float32)
    arrays = [plgpu.device_put(x) for _ in range(3)]
    arrays[1].__dlpack__(stream=torch.cuda.Stream().cuda_stream)
    k = plgpu.kernel(add, out_type=shaped(N))
    a, b = cupy.arange(N, dtype=np.float32), cupy.ones(N, np.float32)
    out = cupy.zeros_like(a)
    with cupy.cuda.Stream(non_blocking=not blocking) as stream:
        k(a, b, out=out)
        stream.synchronize()
        mode = getattr(cupy.cuda.runtime, f"streamCaptureMode{mode.title().replace('_', '')}")
        stream.begin_capture(mode)
        k(a, b, out=out)
        while arrays:
            arrays.pop()
        graph = stream.end_capture()
        out[:] = 0
        graph.launch(stream)
        stream.synchronize()
    assert (out == a + b).all()
    assert (plgpu.device_put(x).numpy() == x).all()


@pytest.mark.parametrize("side", [False, True])
def test_launches_in_flight_keep_their_code(side):
    torch = pytest.importorskip("torch")
    a = torch.randn(N, device="cuda")
    k = plgpu.kernel(slow, out_type=shaped(N))
    k(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        got = k(a)
        done = torch.cuda.Event()
        done.record()
        plgpu.clear_caches()
        del k
        assert not done.query()  # nothing waited for the kernel
        gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(got, a + 1)


def test_streams_by_name():
    torch = pytest.importorskip("torch")
    a, b = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    k, wait = plgpu.kernel(add, out_type=shaped(N)), plgpu.kernel(slow, out_type=shaped(N))
    wait(a), k(a, b)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self):
            return 0, side.cuda_stream

    for stream in (side, Protocol(), side.cuda_stream):
        out = torch.empty_like(a)
        late = wait(a, stream=stream)
        assert k(late, b, out=out, stream=stream) is out
        assert not side.query()
        side.synchronize()
        assert torch.equal(out, a + 1 + b)
        x, y = (plgpu.device_put(t.cpu().numpy()) for t in (a, b))
        want = (a + 1 + b).cpu().numpy()
        np.testing.assert_array_equal(k(wait(x, stream=stream), y).numpy(), want)
        got = k(a.cpu().numpy(), b.cpu().numpy(), stream=stream)
        np.testing.assert_array_equal(got, (a + b).cpu().numpy())
    x = torch.full((N,), 1.0, device="cuda")
    late = wait(x, stream=side)
    del x  # its memory is not handed out again while the kernel reads it
    other = torch.full((N,), 5.0, device="cuda")
    side.synchronize()
    assert (late == 2).all() and (other == 5).all()
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros_like(a)
    with torch.cuda.graph(graph, stream=side):
        k(a, b, out=out, stream=side)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, a + b)


def test_streams_of_cupy():
    cupy = pytest.importorskip("cupy")
    a = cupy.arange(N, dtype=np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    out = plgpu.kernel(add, out_type=shaped(N))(a, a, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), 2 * a.get())


def test_arrays_of_64_bits(rng):
    torch = pytest.importorskip("torch")
    k = plgpu.kernel(add, out_type=shaped(N))
    x = rng.standard_normal(N)
    with pytest.warns(UserWarning, match="float64"):
        got = k(x, x)
    np.testing.assert_array_equal(got, x.astype("f4") * 2)
    with pytest.raises(TypeError, match=r"float64.*x.to\(torch.float32\)"):
        k(torch.randn(N, device="cuda", dtype=torch.float64), torch.randn(N, device="cuda"))


def test_memory_that_arrays_share():
    torch = pytest.importorskip("torch")
    memory = torch.randn(3 * N, device="cuda")
    x, y = memory[:N], memory[N : 2 * N]
    k = plgpu.kernel(add, out_type=shaped(N))
    with pytest.raises(ValueError, match=r"out\[0\] and argument 1 share"):
        k(x, y, out=memory[N + 4 : 2 * N + 4])
    want = x + y
    assert torch.equal(k(x, y, out=x), want)
    a = torch.randn(128, 128, device="cuda").half()
    with pytest.raises(ValueError, match="in place"):
        ops.matmul(a, a, out=a)


def test_inference_mode():
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        a = torch.randn(N, device="cuda")
        got = plgpu.kernel(add, out_type=shaped(N))(a, a)
        assert torch.equal(got, a + a) and got.is_inference()
        assert torch.equal(ops.softmax(a.reshape(10, 100)), ops.softmax(a.reshape(10, 100)))


def test_a_device_that_is_not_current():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        a = torch.randn(N, device="cuda:1")
        got = plgpu.kernel(add, out_type=shaped(N))(a, a)
        assert got.device == a.device and torch.equal(got, a + a)
        assert torch.cuda.current_device() == 0
