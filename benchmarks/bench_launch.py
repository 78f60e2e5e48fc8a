"""Host time of one launch, in an asynchronous loop: of a three-array kernel, and of ops.matmul.

    python benchmarks/bench_launch.py

The yardstick is a C loop of cuLaunchKernelEx over the very same cubin (launch_loop.c), with tensor
maps that were made before. All contestants run in turns in one process; the figure is the median
over rounds of a burst of launches, without the final wait."""

import argparse
import ctypes
import pathlib
import statistics
import subprocess
import tempfile
import timeit

import numpy as np
import results
import torch
from torch._C._dynamo.guards import _empty_strided_cuda as empty  # noqa: F401

import pallas_mgpu as plgpu
from pallas_mgpu.ops import matmul

N, BURST, ROUNDS = 1024, 200, 50


def add(a_ref, b_ref, o_ref):
    o_ref[...] = a_ref[...] + b_ref[...]


def c_loop():
    here = pathlib.Path(__file__).with_name("launch_loop.c")
    lib = pathlib.Path(tempfile.mkdtemp()) / "launch_loop.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(here), "-o", str(lib), "-ldl"], check=True)
    f = ctypes.CDLL(str(lib)).launch_loop
    f.restype = ctypes.c_double
    return f


def per_call(timer):
    took = timer.timeit(BURST)
    torch.cuda.synchronize()
    return took / BURST * 1e9


def tensor_map(m, pointer):
    """(memory that holds it, its address), as the runtime encodes it."""
    cuda, n = ctypes.CDLL("libcuda.so.1"), len(m["dim"])
    memory = ctypes.create_string_buffer(128 + 63)
    at = (ctypes.addressof(memory) + 63) & ~63
    dtype = {"float32": 7, "float16": 6, "bfloat16": 9}[m["dtype"]]
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[m["swizzle"]]
    longs, words = ctypes.c_uint64 * n, ctypes.c_uint32 * n
    rc = cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), dtype, n, ctypes.c_void_p(pointer), longs(*m["dim"]),
        longs(*m["stride"][1:], 0), words(*m["box"]), words(*[1] * n), 0, swizzle, 2, 0,
    )  # fmt: skip
    assert rc == 0, rc
    return memory, at


def c_contestant(loop, low, pointers):
    """A function: nanoseconds per launch of the lowered kernel."""
    info = low.graph.lower().cuda()[1]
    keep, params = [], []
    for kind, param, which in info["args"]:
        if kind == "tensor_map":
            memory, at = tensor_map(info["maps"][which], pointers[param])
        else:
            memory = ctypes.c_uint64(pointers[param])
            at = ctypes.addressof(memory)
        keep.append(memory)
        params.append(at)
    array = (ctypes.c_void_p * len(params))(*params)
    cubin, entry = low.cubin(), info["entry"].encode()
    pdl = "griddepcontrol" in low.as_text("cuda")

    def run(_keep=keep):
        ns = loop(
            cubin, entry, info["grid"][0], info["block"], info["smem_bytes"], array, pdl, BURST
        )
        assert ns > 0, ns
        return ns

    return run


FOUND = None  # results.Results


def table(title, c_time, contestants, scope):
    """contestants: statements by name; timeit puts them into the loop itself."""
    base = "C loop of cuLaunchKernelEx"
    samples = {base: []} | {name: [] for name in contestants}
    timers = {name: timeit.Timer(f, globals=scope) for name, f in contestants.items()}
    for timer in timers.values():
        timer.timeit(20)
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        samples[base].append(c_time())
        for name, timer in timers.items():
            samples[name].append(per_call(timer))
    median = statistics.median(samples[base])
    FOUND.add_samples(
        "launch", title, {n: [x / 1e9 for x in s] for n, s in samples.items()},
        ours=("pallas_mgpu", "ops."), references=base,
    )  # fmt: skip
    print(f"\n### {title}\n")
    print("| what | us per launch (median) | quartiles | above the C loop, us |")
    print("|---|---:|---|---:|")
    for name, s in samples.items():
        q = statistics.quantiles(s, n=4)
        print(
            f"| {name} | {q[1] / 1e3:.2f} | {q[0] / 1e3:.2f} to {q[2] / 1e3:.2f} |"
            f" {(q[1] - median) / 1e3:+.2f} |"
        )


def three_arrays(loop):
    kernel = plgpu.kernel(add, out_type=plgpu.ShapeDtypeStruct((N,), np.float32))
    a, b = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    out = torch.empty_like(a)
    da, db = plgpu.device_put(a.cpu().numpy()), plgpu.device_put(b.cpu().numpy())
    dout = kernel(da, db)
    assert np.array_equal(dout.numpy(), (a + b).cpu().numpy())
    assert torch.equal(kernel(a, b), a + b)
    contestants = {
        "pallas_mgpu, DeviceArray, out=": "kernel(da, db, out=dout)",
        "pallas_mgpu, DeviceArray, new result": "kernel(da, db)",
        "pallas_mgpu, torch, out=": "kernel(a, b, out=out)",
        "pallas_mgpu, torch, new result": "kernel(a, b)",
        "torch's allocation alone": "empty((N,), (1,), torch.float32)",
        "torch a + b": "a + b",
        "torch.add(out=)": "torch.add(a, b, out=out)",
    }
    try:
        import cupy

        ca, cb, co = cupy.asarray(a), cupy.asarray(b), cupy.asarray(out)
        raw = cupy.RawKernel(
            f'extern "C" __global__ void k(const float* a, const float* b, float* o)'
            f"{{ int i = threadIdx.x; for (; i < {N}; i += 128) o[i] = a[i] + b[i]; }}",
            "k",
        )
        contestants["CuPy RawKernel"] = "raw((1,), (128,), (ca, cb, co))"
        contestants["pallas_mgpu, CuPy, out="] = "kernel(ca, cb, out=co)"
        contestants["pallas_mgpu, CuPy, new result"] = "kernel(ca, cb)"
    except Exception as e:  # noqa: BLE001
        print(f"CuPy: {e}")
    try:
        import triton
        import triton.language as tl

        @triton.jit
        def triton_add(a, b, o, N: tl.constexpr):
            i = tl.arange(0, N)
            tl.store(o + i, tl.load(a + i) + tl.load(b + i))

        contestants["Triton"] = "triton_add[(1,)](a, b, out, N)"
    except Exception as e:  # noqa: BLE001
        print(f"Triton: {e}")
    try:
        import jax
        import jax.experimental.pallas.mosaic_gpu as jplgpu

        ja, jb = jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b)
        jk = jax.jit(jplgpu.kernel(add, out_type=jax.ShapeDtypeStruct((N,), np.float32)))
        jo = jax.jit(kernel)
        assert np.array_equal(jo(ja, jb), (a + b).cpu().numpy())
        contestants["JAX's Pallas, jit"] = "jk(ja, jb)"
        contestants["pallas_mgpu, JAX, jit"] = "jo(ja, jb)"
        contestants["pallas_mgpu, JAX, no jit"] = "kernel(ja, jb)"
    except Exception as e:  # noqa: BLE001
        print(f"JAX: {type(e).__name__}: {e}")

    c_time = c_contestant(loop, kernel.lower(da, db), [x.data_ptr() for x in (a, b, out)])
    table(f"Three arrays of {N} float32", c_time, contestants, {**globals(), **locals()})


def product(loop):
    n = 64
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    out, want = torch.empty_like(a), a.float() @ b.float()
    da, db, dout = (plgpu.DeviceArray.from_dlpack(x) for x in (a, b, out.clone()))
    kernel = matmul.kernel(a, b)

    def check(got):
        assert float((got.float() - want).norm() / want.norm()) < 3e-3

    contestants = {
        "ops.matmul, DeviceArray, out=": "matmul(da, db, out=dout)",
        "ops.matmul, torch, out=": "matmul(a, b, out=out)",
        "ops.matmul, torch, new result": "matmul(a, b)",
        "torch.matmul(out=)": "torch.matmul(a, b, out=out)",
        "torch.matmul": "torch.matmul(a, b)",
    }
    check(matmul(a, b))
    try:
        import cupy

        ca, cb = (cupy.asarray(x.half()) for x in (a, b))
        co = cupy.empty_like(ca)
        contestants["CuPy matmul(out=), float16"] = "cupy.matmul(ca, cb, out=co)"
    except Exception as e:  # noqa: BLE001
        print(f"CuPy: {e}")
    try:
        import triton
        import triton.language as tl

        @triton.jit
        def triton_dot(a, b, o, N: tl.constexpr):
            i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
            x = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j))
            tl.store(o + i * N + j, x.to(tl.bfloat16))

        triton_dot[(1,)](a, b, out, n)
        check(out)
        contestants["Triton"] = "triton_dot[(1,)](a, b, out, n)"
    except Exception as e:  # noqa: BLE001
        print(f"Triton: {e}")
    try:
        import jax

        ja, jb = jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b)
        dot = jax.jit(jax.numpy.matmul)
        check(torch.from_dlpack(dot(ja, jb)))
        contestants["JAX, jit of matmul"] = "dot(ja, jb)"
        jo = jax.jit(matmul)
        check(torch.from_dlpack(jo(ja, jb)))
        contestants["ops.matmul, JAX, jit"] = "jo(ja, jb)"
    except Exception as e:  # noqa: BLE001
        print(f"JAX: {type(e).__name__}: {e}")
    c_time = c_contestant(loop, kernel.lower(a, b), [x.data_ptr() for x in (a, b, out)])
    table(
        f"Product of {n} x {n} bfloat16, three tensor maps",
        c_time,
        contestants,
        {**globals(), **locals()},
    )
    check(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    global FOUND
    FOUND = results.Results(__file__, parser.parse_args().json)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bursts of {BURST}, {ROUNDS}"
        " rounds"
    )
    loop = c_loop()
    three_arrays(loop)
    product(loop)


if __name__ == "__main__":
    main()
