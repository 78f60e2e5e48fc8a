"""Time from call to launch of a kernel never seen before, and of one in the disk cache.

    python benchmarks/bench_compile.py [--json FILE]

`first`: context and NVRTC are loaded (another kernel ran), NVRTC's own cache is off (--no-cache),
our disk cache is empty. `cached`: a second process, kernel in our disk cache, context loaded.
Process-first costs beside. Then what a program that calls one function of `ops` waits for in a new
process: until it is imported, and until its first result is there (without a GPU: until it is
compiled), with an empty disk cache and with the kernel in it."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import results

CHILD = r"""
import json, sys, time
t0 = time.perf_counter()
import numpy as np
import ml_dtypes
t1 = time.perf_counter()
import pallas_mgpu as plgpu
t2 = time.perf_counter()
from pallas_mgpu._matmul import matmul_kernel

m, n, k = 4096, 8192, 4096
gpu, serial = sys.argv[1] == "gpu", int(sys.argv[2])

def add(x, o):
    o[...] = x[...] + 1

x = np.zeros(128 * serial, np.float32)
warm = plgpu.kernel(add, out_type=plgpu.ShapeDtypeStruct(x.shape, np.float32))
if gpu:
    warm(plgpu.device_put(x))
    plgpu.synchronize()
else:
    warm.lower(x).cubin()
t3 = time.perf_counter()
kernel = matmul_kernel(m, n, k, np.float16)
a, b = np.ones((m, k), np.float16), np.ones((k, n), np.float16)
ok = True
if gpu:
    a, b = plgpu.device_put(a), plgpu.device_put(b)
    plgpu.synchronize()
t4 = time.perf_counter()
if gpu:
    out = kernel(a, b)
    t5 = time.perf_counter()
    plgpu.synchronize()
    t6 = time.perf_counter()
    out = kernel(a, b, out=out)
    t7 = time.perf_counter()
    ok = bool((out.numpy()[:2, :2] == k).all())
else:
    kernel.lower(a, b).cubin()
    t5 = t6 = t7 = time.perf_counter()
times = dict(numpy=t1 - t0, imported=t2 - t1, first_kernel=t3 - t2, call=t5 - t4, second=t7 - t6)
print(json.dumps(dict(times, ok=ok)))
"""

FIRST = r"""
import json, sys, time
t0 = time.perf_counter()
import numpy as np
import ml_dtypes
from pallas_mgpu import ops
import pallas_mgpu as plgpu
t1 = time.perf_counter()
shapes = {"matmul": [(4096, 4096)] * 2, "attention": [(4, 4096, 16, 128)] * 3,
          "softmax": [(8192, 4096)]}[sys.argv[2]]
f, options = getattr(ops, sys.argv[2]), {"causal": True} if sys.argv[2] == "attention" else {}
arrays = [np.ones(x, ml_dtypes.bfloat16) for x in shapes]
t2 = time.perf_counter()
if sys.argv[1] == "gpu":
    arrays = [plgpu.device_put(x) for x in arrays]
    f(*arrays, **options)
    plgpu.synchronize()
else:
    f.kernel(*arrays, **options).lower(*arrays).cubin()
print(json.dumps(dict(imported=t1 - t0, call=time.perf_counter() - t2, ok=True)))
"""


def child(cache, what, gpu, program=CHILD):
    env = dict(os.environ, PALLAS_MGPU_CACHE_DIR=cache, PALLAS_MGPU_NVRTC_OPTIONS="--no-cache")
    out = subprocess.run(
        [sys.executable, "-c", program, "gpu" if gpu else "cpu", str(what)],
        env=env,
        capture_output=True,
        text=True,
    )
    if out.returncode:
        sys.exit(out.stderr)
    return json.loads(out.stdout.splitlines()[-1])


def main():
    from pallas_mgpu import _core

    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json, "least to greatest")
    gpu = bool(_core.system_info()["devices"])
    first, cached = [], []
    for k in range(5):
        with tempfile.TemporaryDirectory() as cache:
            first.append(child(cache, 1, gpu))
            cached.append(child(cache, 2 + k, gpu))

    def row(name, samples, key):
        ms = [s[key] * 1e3 for s in samples]
        spread = (statistics.median(ms) / 1e3, min(ms) / 1e3, max(ms) / 1e3)
        found.add("compile", name, {"process": {"pallas_mgpu": spread}}, ours="pallas_mgpu")
        print(f"| {name} | {statistics.median(ms):.1f} | {min(ms):.1f} to {max(ms):.1f} |")

    assert all(s["ok"] for s in first + cached)
    print(
        f"{'with' if gpu else 'without'} a GPU, median of 5 processes\n\n| what | ms | range"
        f" |\n|---|---:|---|"
    )
    row("first compile of the matmul, call to launch, --no-cache", first, "call")
    row("the same in a second process, from the disk cache", cached, "call")
    row("first kernel of a process (context, NVRTC, small kernel)", first, "first_kernel")
    row("import pallas_mgpu, above numpy and ml_dtypes", first + cached, "imported")
    row("import numpy and ml_dtypes", first + cached, "numpy")
    if gpu:
        row("host time of the second call of the matmul", first, "second")
    for name in ("matmul", "attention", "softmax"):
        runs = {"empty disk cache": [], "from the disk cache": []}
        for _ in range(5):
            with tempfile.TemporaryDirectory() as cache:
                for samples in runs.values():
                    samples.append(child(cache, name, gpu, FIRST))
        for state, samples in runs.items():
            row(f"first call of ops.{name} in a process, {state}", samples, "call")
        row(f"imports in front of it ({name})", sum(runs.values(), []), "imported")


if __name__ == "__main__":
    main()
