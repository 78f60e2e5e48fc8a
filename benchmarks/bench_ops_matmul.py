"""ops.matmul beside torch.matmul.

    python benchmarks/bench_ops_matmul.py [--sizes 8192x8192x8192:bfloat16 ...] [--configs]

Random normal input, results checked, contestants in turns: bursts without a pause, cool (after an
idle gap), sustained (0.15 s each). Medians and ratios to torch.matmul."""

import argparse
import functools
import statistics
import time

import torch

from pallas_mgpu.ops import MatmulConfig, matmul

SIZES = (
    "8192x8192x8192:bfloat16",
    "4096x8192x4096:float16",
    "16384x16384x4096:bfloat16",
    "4096x4096x4096:bfloat16",
    "2048x2048x2048:bfloat16",
    "1024x1024x1024:bfloat16",
    "4097x8191x4095:bfloat16",
    "100x5000x777:bfloat16",
    "1x4096x4096:bfloat16",
)
BOUND = {"bfloat16": 3e-3, "float16": 4e-4}


def timed(f, count):
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(count):
        f()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / count / 1e3


def ways(contestants):
    """{name: {way: [seconds]}}: burst, cool and sustained, taking turns."""
    count = {}
    for name, f in contestants.items():
        for _ in range(3):
            f()
        once = timed(f, 3)
        count[name] = (max(1, int(4e-3 / once)), max(1, int(0.15 / once)))
    out = {name: {"burst": [], "cool": [], "sustained": []} for name in contestants}
    for _ in range(12):
        for name, f in contestants.items():
            out[name]["burst"].append(timed(f, count[name][0]))
    for _ in range(8):
        for name, f in contestants.items():
            time.sleep(0.03)
            out[name]["cool"].append(timed(f, 1 if count[name][0] < 4 else 4))
    for _ in range(4):
        for name, f in contestants.items():
            out[name]["sustained"].append(timed(f, count[name][1]))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--configs", action="store_true", help="several configurations of each")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for text in args.sizes:
        shape, dtype = text.split(":")
        m, n, k = map(int, shape.split("x"))
        tdt = getattr(torch, dtype)
        a = torch.randn(m, k, device="cuda").to(tdt)
        b = torch.randn(k, n, device="cuda").to(tdt)
        want = a.float() @ b.float()
        ref, out = (
            torch.empty(m, n, device="cuda", dtype=tdt),
            torch.empty(m, n, device="cuda", dtype=tdt),
        )
        contestants = {"torch.matmul": functools.partial(torch.matmul, a, b, out=ref)}
        configs = [None]
        if args.configs:
            configs += [
                MatmulConfig(2, 256, 4, 2, 2, 8),
                MatmulConfig(2, 256, 3, 2, 4, 8),
                MatmulConfig(2, 256, 4, 1, 2, 8),
                MatmulConfig(2, 256, 4, 2, 2, 4),
                MatmulConfig(2, 128, 6, 2, 2, 8),
                MatmulConfig(2, 128, 6, 1, 2, 8),
            ]
        for cfg in configs:
            name = "ops.matmul" if cfg is None else f"  {cfg}"
            out.fill_(float("nan"))
            matmul(a, b, config=cfg, out=out)
            error = float((out.float() - want).norm() / want.norm())
            assert error < BOUND[dtype], (name, error)
            contestants[name] = functools.partial(matmul, a, b, config=cfg, out=out)
        print(f"\n### {m} x {n} x {k} {dtype}\n")
        print("| contestant | burst, TFLOP/s | ratio | cool | ratio | sustained | ratio |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        flop, base = 2 * m * n * k / 1e12, None
        for name, times in ways(contestants).items():
            med = {w: statistics.median(t) for w, t in times.items()}
            base = base or med
            print(
                f"| {name} | "
                + " | ".join(f"{flop / t:.0f} | {base[w] / t:.3f}" for w, t in med.items())
                + " |"
            )


if __name__ == "__main__":
    main()
