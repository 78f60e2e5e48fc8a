"""Products, attention, norms, launches and compilation beside another checkout, on a GPU.

    python benchmarks/compare_gpu.py OTHER [--rounds 5] [--only matmul]

OTHER is a directory with a built checkout, say a worktree of an earlier commit. Each checkout has a
process; they take turns, case by case and round by round, so that clocks and heat meet both. Each
process first checks its result on random inputs in a poisoned output. A sample is the median of
replays of a CUDA graph of several calls (a launch: host time of a call in a burst; a compilation:
processor time without caches). The table has the medians over the rounds, the ratio other / here of
each round (above 1: this checkout is faster) and the spread of those ratios."""

import argparse
import json
import statistics
import sys
from pathlib import Path

from compare_checkouts import Checkout

HERE = Path(__file__).resolve().parent


def _products():
    for m, n, k, transposed in ((8192, 8192, 8192, False), (4096, 4096, 4096, False),
                                (4096, 14336, 4096, True), (2048, 2048, 2048, True),
                                (512, 4096, 4096, True), (64, 14336, 4096, True),
                                (1, 14336, 4096, True)):  # fmt: skip
        yield f"matmul {m} x {n} x {k}{' (B transposed)' * transposed}", (m, n, k, transposed)


def _attentions():
    for batch, length, heads, kv_heads, dim, causal in (
        (4, 4096, 16, 16, 128, False), (4, 4096, 16, 16, 128, True), (4, 4096, 32, 8, 128, True),
        (4, 4096, 16, 16, 64, True), (2, 4096, 8, 8, 256, False)):  # fmt: skip
        name = f"attention {batch} x {length}, heads {heads}/{kv_heads}, dim {dim}"
        yield name + ", causal" * causal, (batch, length, heads, kv_heads, dim, causal)


def _norms():
    for f in ("rms_norm", "layer_norm", "softmax"):
        for rows, columns in ((16384, 4096), (65536, 1024), (8192, 16384)):
            yield f"{f} {rows} x {columns}", (f, rows, columns)


CASES = {
    **{name: ("product", case) for name, case in _products()},
    **{name: ("attend", case) for name, case in _attentions()},
    **{name: ("norm", case) for name, case in _norms()},
    "launch of three arrays, out=": ("launch", True),
    "launch of three arrays, new result": ("launch", False),
    "compilation of matmul": ("compile", "matmul 8192 x 8192 x 8192"),
    "compilation of attention, causal": ("compile", "attention 4096, dim 128, causal"),
}


class Worker:
    """Runs in the process of one checkout: answers each name with the seconds of a call."""

    def __init__(self):
        import torch

        self.torch, self.ready = torch, {}
        torch.manual_seed(0)

    def random(self, *shape):
        return self.torch.randn(*shape, device="cuda").bfloat16()

    def poisoned(self, like):
        return self.torch.full_like(like, float("nan"))

    def check(self, got, want, bound):
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < bound, f"wrong by {error}"

    def product(self, case):
        from pallas_mgpu.ops import matmul

        m, n, k, transposed = case
        a, b = self.random(m, k), self.random(*((n, k) if transposed else (k, n)))
        want = a @ (b.T if transposed else b)
        out = self.poisoned(want)
        call = lambda: matmul(a, b, transpose_b=transposed, out=out)  # noqa: E731
        call()
        self.check(out, want, 5e-3)
        return self.graph(call)

    def attend(self, case):
        from pallas_mgpu.ops import attention

        batch, length, heads, kv_heads, dim, causal = case
        q = self.random(batch, length, heads, dim)
        k, v = (self.random(batch, length, kv_heads, dim) for _ in range(2))
        out = self.poisoned(q)
        call = lambda: attention(q, k, v, causal=causal, out=out)  # noqa: E731
        call()
        want = self.torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
        self.check(out, want, 1e-2)
        return self.graph(call)

    def norm(self, case):
        from pallas_mgpu import ops

        name, rows, columns = case
        sets = [(x := self.random(rows, columns), self.poisoned(x)) for _ in range(3)]
        more = [
            self.random(columns) for _ in range(("softmax", "rms_norm", "layer_norm").index(name))
        ]
        f, nn = getattr(ops, name), self.torch.nn.functional
        want = {
            "softmax": lambda x: nn.softmax(x.float(), -1),
            "rms_norm": lambda x: nn.rms_norm(x.float(), (columns,), more[0].float(), 1e-6),
            "layer_norm": lambda x: nn.layer_norm(
                x.float(), (columns,), *(w.float() for w in more)
            ),
        }[name]

        def call():
            for x, out in sets:  # three pairs: more than the L2 holds
                f(x, *more, out=out)

        call()
        self.check(sets[1][1], want(sets[1][0]), 1e-2)
        return self.graph(call, 3)

    def graph(self, call, calls=1):
        torch = self.torch
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        count = max(1, round(4e-3 / (start.elapsed_time(stop) * 1e-3)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()

        def sample():
            times = []
            for _ in range(12):
                start.record()
                graph.replay()
                stop.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop) * 1e-3 / count / calls)
            return statistics.median(times[2:])

        return sample

    def launch(self, out_given):
        import time

        import numpy as np

        import pallas_mgpu as plgpu

        def add(a_ref, b_ref, o_ref):
            o_ref[...] = a_ref[...] + b_ref[...]

        kernel = plgpu.kernel(add, out_type=plgpu.ShapeDtypeStruct((1024,), np.float32))
        torch = self.torch
        a, b = (torch.randn(1024, device="cuda") for _ in range(2))
        out = self.poisoned(a)
        kernel(a, b, out=out)
        assert torch.equal(out, a + b)
        options = {"out": out} if out_given else {}

        def sample():
            times = []
            for _ in range(30):
                begin = time.perf_counter()
                for _ in range(200):
                    kernel(a, b, **options)
                times.append((time.perf_counter() - begin) / 200)
                torch.cuda.synchronize()
            return statistics.median(times)

        return sample

    def compile(self, name):
        import time

        import resources

        def sample():
            begin = time.process_time()
            resources.KERNELS[name]().cubin()
            return time.process_time() - begin

        sample()
        return sample

    def answer(self, name):
        if name not in self.ready:
            if not name.startswith("launch"):  # the memory of other cases
                self.ready.clear()
            kind, case = CASES[name]
            self.ready[name] = getattr(self, kind)(case)
        return self.ready[name]()


def work():
    sys.path.insert(0, str(HERE))
    worker = Worker()
    for line in sys.stdin:
        try:
            print(json.dumps(worker.answer(*json.loads(line))), flush=True)
        except Exception as e:  # noqa: BLE001
            print(json.dumps(f"{type(e).__name__}: {e}"[:300]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    roots = Path(args.other).resolve(), HERE.parent
    both = [Checkout(root, HERE / "compare_gpu.py", "--work") for root in roots]
    print(
        "| case | other, us | here, us | other / here | of each round |\n|---|---:|---:|---:|---|"
    )
    ratios = []
    for name in (n for n in CASES if args.only in n):
        samples = ([], [])
        for k in range(args.rounds):
            for i in (0, 1) if k % 2 else (1, 0):
                samples[i].append(both[i].ask(name))
        if wrong := [s for s in (*samples[0], *samples[1]) if isinstance(s, str)]:
            print(f"| {name} | {wrong[0]} |", flush=True)
            continue
        each = [x / y for x, y in zip(*samples)]
        ratios.append(statistics.median(each))
        x, y = (statistics.median(s) * 1e6 for s in samples)
        text = f"{min(each):.3f} to {max(each):.3f}"
        print(f"| {name} | {x:.2f} | {y:.2f} | {ratios[-1]:.3f} | {text} |", flush=True)
    print(f"| geometric mean | | | {statistics.geometric_mean(ratios):.3f} | |")


if __name__ == "__main__":
    main()
