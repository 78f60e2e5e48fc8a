"""Host time of one launch of a three-array kernel, in an asynchronous loop.

    python benchmarks/bench_launch.py

The yardstick is a C loop of cuLaunchKernelEx over the very same cubin (launch_loop.c). All
contestants run in turns in one process; the figure is the median over rounds of a burst of
launches, without the final wait."""

import ctypes
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np
import torch

import pallas_mgpu as plgpu

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


def per_call(f):
    start = time.perf_counter()
    for _ in range(BURST):
        f()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / BURST * 1e9


def main():
    kernel = plgpu.kernel(add, out_type=plgpu.ShapeDtypeStruct((N,), np.float32))
    a, b = torch.randn(N, device="cuda"), torch.randn(N, device="cuda")
    out = torch.empty_like(a)
    da, db = plgpu.device_put(a.cpu().numpy()), plgpu.device_put(b.cpu().numpy())
    dout = kernel(da, db)
    assert np.array_equal(dout.numpy(), (a + b).cpu().numpy())
    assert torch.equal(kernel(a, b), a + b)
    contestants = {
        "pallas_mgpu, DeviceArray, out=": lambda: kernel(da, db, out=dout),
        "pallas_mgpu, DeviceArray, new result": lambda: kernel(da, db),
        "pallas_mgpu, torch, out=": lambda: kernel(a, b, out=out),
        "pallas_mgpu, torch, new result": lambda: kernel(a, b),
        "torch a + b": lambda: a + b,
        "torch.add(out=)": lambda: torch.add(a, b, out=out),
    }
    try:
        import cupy

        ca, cb, co = cupy.asarray(a), cupy.asarray(b), cupy.asarray(out)
        raw = cupy.RawKernel(
            f'extern "C" __global__ void k(const float* a, const float* b, float* o)'
            f"{{ int i = threadIdx.x; for (; i < {N}; i += 128) o[i] = a[i] + b[i]; }}",
            "k",
        )
        contestants["CuPy RawKernel"] = lambda: raw((1,), (128,), (ca, cb, co))
    except Exception as e:  # noqa: BLE001
        print(f"CuPy: {e}")
    try:
        import triton
        import triton.language as tl

        @triton.jit
        def triton_add(a, b, o, N: tl.constexpr):
            i = tl.arange(0, N)
            tl.store(o + i, tl.load(a + i) + tl.load(b + i))

        contestants["Triton"] = lambda: triton_add[(1,)](a, b, out, N)
    except Exception as e:  # noqa: BLE001
        print(f"Triton: {e}")
    try:
        import jax
        import jax.experimental.pallas.mosaic_gpu as jplgpu

        ja, jb = jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b)
        jk = jax.jit(jplgpu.kernel(add, out_type=jax.ShapeDtypeStruct((N,), np.float32)))
        contestants["JAX's Pallas, jit"] = lambda: jk(ja, jb)
    except Exception as e:  # noqa: BLE001
        print(f"JAX: {type(e).__name__}: {e}")

    low = kernel.lower(da, db)
    cubin = low.cubin()
    program = low.resources()
    pointers = (ctypes.c_uint64 * 3)(a.data_ptr(), b.data_ptr(), out.data_ptr())
    loop = c_loop()

    def c_time():
        ns = loop(
            cubin,
            program["entry"].encode(),
            1,
            program["threads"],
            program["smem_bytes"],
            pointers,
            3,
            BURST,
        )
        assert ns > 0, ns
        return ns

    samples = {"C loop of cuLaunchKernelEx": []} | {name: [] for name in contestants}
    for f in contestants.values():
        for _ in range(20):
            f()
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        samples["C loop of cuLaunchKernelEx"].append(c_time())
        for name, f in contestants.items():
            samples[name].append(per_call(f))
    base = statistics.median(samples["C loop of cuLaunchKernelEx"])
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bursts of {BURST}, {ROUNDS}"
        f" rounds\n"
    )
    print("| what | us per launch (median) | quartiles | above the C loop, us |")
    print("|---|---:|---|---:|")
    for name, s in samples.items():
        q = statistics.quantiles(s, n=4)
        print(
            f"| {name} | {q[1] / 1e3:.2f} | {q[0] / 1e3:.2f} to {q[2] / 1e3:.2f} |"
            f" {(q[1] - base) / 1e3:+.2f} |"
        )


if __name__ == "__main__":
    main()
