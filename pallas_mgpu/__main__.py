"""``python -m pallas_mgpu`` runs and checks a pipelined tensor-core matmul. ``info`` prints the
versions that were found, ``cache`` the size of the compile cache on disk; ``cache clear`` empties
it. ``layouts`` prints docs/layouts.md, the costs of layout conversions, ``gaps`` what is missing
and what to use instead. ``explain file.py:kernel`` predicts how long a kernel takes and what bounds
it; ``explain --help`` says more."""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np

import pallas_mgpu as plgpu

from . import _compilers, _core, _explain, _layout_table
from ._matmul import matmul_kernel


class _Progress:
    """A line that says what goes on, for whatever lasts."""

    def __init__(self):
        self.live = sys.stderr.isatty()

    def __call__(self, text):
        if self.live:
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)

    def done(self):
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def info():
    """Print version, devices, NVRTC and cache."""
    print(
        f"pallas_mgpu {plgpu.__version__}, Python {sys.version.split()[0]}, NumPy {np.__version__}"
    )
    found = _core.system_info()
    for d in found["devices"]:
        print(
            f"GPU {d['ordinal']}: {d['name']}, {d['target'] or d['capability'] / 10},"
            f" {d['sm_count']} SMs, driver {d['driver']}"
        )
    if not found["devices"]:
        print(f"GPU: none ({found['no_gpu']})")
    print(f"NVRTC: {_compilers.describe(found['nvrtc'])}")
    print(f"cache: {found['cache_dir']}")
    print(f"backend for host arrays: {found['backend']}")


def cache(action):
    """Print the size of the compile cache on disk, or empty it; exit status 1 if that failed."""
    folder = Path(_core.system_info()["cache_dir"])
    patterns = ("*.cubin", "tmp-*", "failures/*.pickle", "autotune/*")
    entries = [entry for pattern in patterns for entry in folder.glob(pattern)]
    size = 0
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            size += entry.stat().st_size
    what = f"{len(entries)} entries, {size / 2**20:.1f} MiB, in {folder}"
    if action == "size":
        print(what)
        return 0
    try:
        for entry in entries:
            entry.unlink(missing_ok=True)
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"removed {what}")
    return 0


def demo(size, dtype, seconds):
    """Run the matmul and check it; exit status 1 if it is wrong."""
    found = _core.system_info()
    gpu = found["backend"] == "cuda"
    say = _Progress()
    m, n, k = size or ((4096, 8192, 4096) if gpu else (2048, 4096, 2048))
    where = found["devices"][found["device"]]["name"] if gpu else "CPU"
    backend = "cuda" if gpu else "interpreter"
    steps, dt = 3, np.dtype(plgpu.numpy.dtype(dtype))
    kernel = matmul_kernel(m, n, k, dt, steps=steps, interpret=None if gpu else True)
    print(
        f"matmul {m} x {n} x {k} {dtype} (M x N x K): wgmma, TMA, 128-byte swizzle, {steps} steps"
        " in flight"
    )
    print(f"backend: {backend}, device: {where}")
    if not gpu:
        print(
            f"no GPU is used ({found['no_gpu']}): this runs on the CPU interpreter, which checks"
            " synchronisation and bounds and is not fast"
        )

    say("making random input")
    rng = np.random.default_rng()
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dt)
    b = rng.standard_normal((k, n), dtype=np.float32).astype(dt)
    if gpu:
        say("copying to the GPU")
        xa, xb = plgpu.device_put(a), plgpu.device_put(b)
        say("tracing and compiling")
        start = time.perf_counter()
        out = kernel(xa, xb)
        plgpu.synchronize()
        first = time.perf_counter() - start
        say("timing")
        times = []
        stop = time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < stop:
            start = time.perf_counter()
            for _ in range(10):
                kernel(xa, xb, out=out)
            plgpu.synchronize()
            times.append((time.perf_counter() - start) / 10)
        took = float(np.median(times))
        result = out.numpy()
    else:
        say("tracing and interpreting")
        start = time.perf_counter()
        result = kernel(a, b)
        took = time.perf_counter() - start
    say("checking against NumPy")
    want = a.astype(np.float32) @ b.astype(np.float32)
    error = float(np.linalg.norm(result.astype(np.float32) - want) / np.linalg.norm(want))
    say.done()
    bound = 4e-3 if dt.name == "bfloat16" else 6e-4
    tflops = 2 * m * n * k / took / 1e12
    calls = f"first call {first * 1e3:.1f} ms, then " if gpu else ""
    print(f"{calls}{took * 1e3:.3f} ms a call: {tflops:.3g} TFLOP/s")
    print(
        f"relative error against NumPy: {error:.2e} ({'ok' if error < bound else 'WRONG'}, bound"
        f" {bound:.0e})"
    )
    return 0 if error < bound else 1


def _run(argv):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["explain"]:
        return _explain.run(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m pallas_mgpu", description=__doc__)
    commands = ("demo", "info", "cache", "gaps", "layouts", "explain")
    parser.add_argument("command", nargs="?", default="demo", choices=commands)
    parser.add_argument(
        "action", nargs="?", choices=("size", "clear"), help="of cache; size by default"
    )
    parser.add_argument(
        "--size", type=int, nargs=3, metavar=("M", "N", "K"), help="multiples of 128, 128 and 64"
    )
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time on a GPU")
    args = parser.parse_args(argv)
    if args.command == "explain":
        parser.error("explain comes first, as in: explain file.py:kernel float32[1024]")
    if args.action and args.command != "cache":
        parser.error(f"{args.command} takes no action, got {args.action!r}")
    if args.command == "cache":
        return cache(args.action or "size")
    if args.command == "info":
        info()
        return 0
    if args.command == "gaps":
        print((Path(__file__).parent / "gaps.md").read_text(encoding="utf-8"), end="")
        return 0
    if args.command == "layouts":
        print(_layout_table.text(), end="")
        return 0
    try:
        return demo(args.size, args.dtype, args.seconds)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def main(argv=None):
    """Exit status of a command."""
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
