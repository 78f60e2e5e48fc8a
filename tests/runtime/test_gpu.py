"""Calls on a GPU: kinds of arrays, streams, preallocated results, the cache, errors of the
device."""

import os
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, ops, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._matmul import matmul_kernel

pytestmark = pytest.mark.gpu
F32 = plgpu.ShapeDtypeStruct((1000,), np.float32)


def add(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] + b_ref[...]


def kernel(**options):
    return plgpu.kernel(add, out_type=F32, **options)


def test_numpy_in_numpy_out(rng):
    a, b = rng.standard_normal((2, 1000)).astype(np.float32)
    out = kernel()(a, b)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, a + b)
    wide = rng.standard_normal((1000, 2)).astype(np.float32)  # columns: not contiguous
    np.testing.assert_array_equal(kernel()(wide[:, 0], wide[:, 1]), wide.sum(1, dtype=np.float32))


def test_device_array(rng):
    a, b = rng.standard_normal((2, 1000)).astype(np.float32)
    da, db = plgpu.device_put(a), plgpu.device_put(b)
    out = kernel()(da, db)
    assert isinstance(out, plgpu.DeviceArray) and out.shape == (1000,) and out.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(out), a + b)
    again = kernel()(out, db, out=out)
    assert again is out
    np.testing.assert_array_equal(out.numpy(), a + b + b)
    h = plgpu.device_put(a.astype(ml_dtypes.bfloat16))
    assert h.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        h.numpy().astype(np.float32), a.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_torch(rng):
    """Tensors in and out, on the current stream, without synchronising the host."""
    torch = pytest.importorskip("torch")
    k = kernel()
    a, b = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    out = k(a, b)
    assert isinstance(out, torch.Tensor) and out.device == a.device
    assert torch.equal(out, a + b)
    into = torch.empty_like(a)
    assert k(a, b, out=into) is into and torch.equal(into, a + b)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = a
        for _ in range(50):
            torch.cuda._sleep(100000)
            x = k(x, b)
        y = x * 1
    side.synchronize()
    want = a.clone()
    for _ in range(50):
        want = want + b
    assert torch.equal(y, want)
    wide = torch.randn(1000, 2, device="cuda")
    assert torch.equal(k(wide[:, 0], b), wide[:, 0] + b)
    with pytest.raises(ValueError, match="contiguous"):
        k(a, b, out=wide[:, 0])
    with pytest.raises(TypeError):
        k(a, rng.standard_normal(1000).astype(np.float32))
    offset = torch.randn(1001, device="cuda")[1:]  # 4-byte aligned only
    assert torch.equal(k(offset, b), offset + b)
    half = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    product = matmul_kernel(128, 128, 128, np.dtype(ml_dtypes.bfloat16))(half, half)
    assert product.dtype == torch.bfloat16


def test_cupy(rng):
    cupy = pytest.importorskip("cupy")
    a, b = cupy.asarray(rng.standard_normal((2, 1000)).astype(np.float32))
    out = kernel()(a, b)
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(out.get(), (a + b).get())


def test_jax(rng):
    jax = pytest.importorskip("jax")
    a, b = jax.numpy.asarray(rng.standard_normal((2, 1000)).astype(np.float32))
    out = kernel()(a, b)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(a + b))


def test_dlpack_both_ways(rng):
    torch = pytest.importorskip("torch")
    a = rng.standard_normal(1000).astype(np.float32)
    d = plgpu.device_put(a)
    t = torch.from_dlpack(d)
    np.testing.assert_array_equal(t.cpu().numpy(), a)
    t += 1
    np.testing.assert_array_equal(d.numpy(), a + 1)
    np.testing.assert_array_equal(plgpu.device_put(t).numpy(), a + 1)


def test_interpret_on_device_arrays(rng):
    """interpret=True takes device arrays too, and answers in kind."""
    a, b = rng.standard_normal((2, 1000)).astype(np.float32)
    out = kernel(interpret=True)(plgpu.device_put(a), plgpu.device_put(b))
    assert isinstance(out, plgpu.DeviceArray)
    np.testing.assert_array_equal(out.numpy(), a + b)


def test_many_threads_launch_at_once(rng):
    """Calls from several Python threads: one compilation, right results."""
    from concurrent.futures import ThreadPoolExecutor

    k = kernel()
    xs = rng.standard_normal((32, 1000)).astype(np.float32)
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda x: k(x, x), xs))
    np.testing.assert_array_equal(np.stack(outs), xs * 2)


@pytest.mark.parametrize("other", [False, True], ids=["tensor", "DeviceArray"])
def test_cuda_graph_capture(other):
    """A warm kernel can be captured and replayed. The stream of a DeviceArray is no part of a
    capture of PyTorch's, and does not end it."""
    torch = pytest.importorskip("torch")
    k = kernel()
    a, b = torch.randn(1000, device="cuda"), torch.ones(1000, device="cuda")
    out, second = torch.empty_like(a), plgpu.device_put(b.cpu().numpy()) if other else b
    k(a, second, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k(a, second, out=out)
    a.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, a + b)


def test_matmul_is_right_at_size(rng):
    torch = pytest.importorskip("torch")
    for dtype, bound in ((torch.float16, 4e-4), (torch.bfloat16, 3e-3)):
        a = torch.randn(1024, 512, device="cuda").to(dtype)
        b = torch.randn(512, 2048, device="cuda").to(dtype)
        name = str(dtype).removeprefix("torch.")
        for steps in (2, 3, 4, 6):
            got = matmul_kernel(1024, 2048, 512, np.dtype(jnp.dtype(name)), steps=steps)(
                a, b
            ).float()
            want = a.float() @ b.float()
            assert (got - want).norm() / want.norm() < bound


def test_products_of_8_bit_floats_of_torch():
    """Tensors of torch as they are, beside its own function; operands that are transposed."""
    torch = pytest.importorskip("torch")
    m, n, k = 384, 512, 1024
    for types in (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")):
        a_type, b_type = (getattr(torch, f"float8_{t}") for t in types)
        a = torch.randn(m, k, device="cuda").to(a_type)
        b = torch.randn(n, k, device="cuda").to(b_type)
        scale_a = torch.rand(m, 1, device="cuda") + 0.5
        scale_b = torch.rand(1, n, device="cuda") + 0.5
        want = a.float() @ b.float().T * scale_a * scale_b
        got = ops.matmul(a, b, transpose_b=True, scale_a=scale_a, scale_b=scale_b)
        assert got.dtype == torch.bfloat16 and got.device == a.device
        assert (got.float() - want).norm() / want.norm() < 1e-2
        transposed = ops.matmul(a, b.view(torch.uint8).T.contiguous().view(b_type), scale_a=scale_a)
        assert (transposed.float() * scale_b - want).norm() / want.norm() < 1e-2
    far_a, far_b = torch.rand(m + 1, device="cuda")[1:], torch.rand(n + 3, device="cuda")[3:]
    got = ops.matmul(a, b, transpose_b=True, scale_a=far_a, scale_b=far_b)  # 4-byte aligned only
    want = a.float() @ b.float().T * far_a[:, None] * far_b
    assert (got.float() - want).norm() / want.norm() < 1e-2


def test_sass_is_shown_where_nvdisasm_is_found():
    import shutil

    a = np.zeros(1000, np.float32)
    if shutil.which("nvdisasm") or os.path.exists("/usr/local/cuda/bin/nvdisasm"):
        assert "EXIT" in kernel().lower(a, a).as_text("sass")
    else:
        with pytest.raises(RuntimeError, match="nvdisasm"):
            kernel().lower(a, a).as_text("sass")


def test_a_fault_on_the_device_says_that_the_context_is_lost():
    """An address outside every allocation, in a process of its own."""
    code = """
import numpy as np
import pallas_mgpu as plgpu
from pallas_mgpu import lax

def wild(x_ref, o_ref):
    o_ref[0] = x_ref[(lax.axis_index("g") + 1) * 2000000000]

out = plgpu.ShapeDtypeStruct((1,), np.float32)
k = plgpu.kernel(wild, out_type=out, grid=(1,), grid_names=("g",))
for _ in range(2):
    try:
        k(np.zeros(4, np.float32))
    except (plgpu.DriverError, plgpu.LaunchError, plgpu.OutOfMemoryError) as e:
        print(type(e).__name__, "context is lost" in str(e))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = out.stdout.splitlines()
    assert len(lines) == 2 and all(line.endswith("True") for line in lines), out


def test_out_of_device_memory_is_an_error_and_no_more():
    with pytest.raises(plgpu.OutOfMemoryError):
        plgpu.kernel(lambda o: None, out_type=plgpu.ShapeDtypeStruct((1 << 20, 1 << 20), np.int8))()
    a = np.ones(1000, np.float32)
    np.testing.assert_array_equal(kernel()(a, a), a + a)


def test_cache_entries_damaged_on_disk_are_misses(tmp_path):
    """A corrupt entry is compiled anew and replaced."""
    code = (
        "import numpy as np, pallas_mgpu as plgpu\n"
        "def f(x, o): o[...] = x[...] * 3\n"
        "k = plgpu.kernel(f, out_type=plgpu.ShapeDtypeStruct((128,), np.float32))\n"
        "assert (k(np.ones(128, np.float32)) == 3).all()\n"
    )
    env = dict(os.environ, PALLAS_MGPU_CACHE_DIR=str(tmp_path), PALLAS_MGPU_BACKEND="cuda")

    def run():
        subprocess.run([sys.executable, "-c", code], env=env, check=True)
        return [p for p in tmp_path.rglob("*") if p.is_file()]

    (entry,) = run()
    good = entry.read_bytes()
    assert (os.stat(tmp_path).st_mode & 0o077) == 0 or os.stat(entry.parent).st_mode & 0o077 == 0
    for damage in (good[:-10], good[: len(good) // 2] + b"x" + good[len(good) // 2 + 1 :], b""):
        entry.write_bytes(damage)
        run()
        made = entry.read_bytes()
        assert len(made) > len(good) // 2 and made != damage
        run()
        assert entry.read_bytes() == made  # a hit leaves it alone


def test_warning_free_on_a_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = np.ones(1000, np.float32)
        kernel()(a, a)


def test_sixteen_warps_agree_on_scalars():
    """Scalars of a thread are uniform and threads of a block see each other's stores after a
    barrier."""

    def body(o_ref, smem, bar):
        me = lax.axis_index("t")
        smem[me] = me * 10 + 1
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        total = lax.fori_loop(0, 4, lambda i, c: c + smem[i], 0)

        @pl.when(me == 3)
        def _():
            o_ref[0] = total

    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((1,), np.int32),
        num_threads=4,
        thread_name="t",
        scratch_types=[plgpu.SMEM((4,), np.int32), plgpu.Barrier(num_arrivals=4)],
    )
    assert k()[0] == 64
