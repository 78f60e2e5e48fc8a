"""The interpreter on a 512 x 512 x 512 float16 matmul, one core, checks on.

taskset -c 0 python benchmarks/bench_interpreter.py [--json FILE]"""

import argparse
import statistics
import time

import numpy as np
import results

import pallas_mgpu as plgpu
from pallas_mgpu._matmul import matmul_kernel


def later_calls(kernel, a, b):  # seconds of ten
    kernel(a, b)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        kernel(a, b)
        times.append(time.perf_counter() - start)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((512, 512), dtype=np.float32).astype(np.float16)
    b = rng.standard_normal((512, 512), dtype=np.float32).astype(np.float16)
    want = a.astype(np.float32) @ b.astype(np.float32)
    kernel = matmul_kernel(512, 512, 512, np.float16, steps=4, interpret=True)
    start = time.perf_counter()
    out = kernel(a, b)
    first = time.perf_counter() - start
    later = later_calls(kernel, a, b)
    error = np.linalg.norm(out.astype(np.float32) - want) / np.linalg.norm(want)
    assert error < 5e-4, error
    print("| what | ms |\n|---|---:|")
    print(f"| first call (trace, lower, bytecode, run) | {first * 1e3:.1f} |")
    print(f"| later calls, median of 10 | {statistics.median(later) * 1e3:.1f} |")
    races = plgpu.InterpretParams(detect_races=True, mode="reference")
    kernel = matmul_kernel(512, 512, 512, np.float16, steps=4, interpret=races)
    checked = later_calls(kernel, a, b)
    print(f"| the same with detect_races | {statistics.median(checked) * 1e3:.1f} |")
    samples = {"first call": [first], "later calls": later, "with detect_races": checked}
    found.add_samples(
        "interpreter", "512 x 512 x 512 float16", samples, ours="",
        errors=dict.fromkeys(samples, error),
    )  # fmt: skip
    print(f"| relative error | {error:.1e} |")


if __name__ == "__main__":
    main()
