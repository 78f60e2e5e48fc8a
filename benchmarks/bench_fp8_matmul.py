"""ops.matmul of float8_e4m3fn with scales of the whole, of rows and columns, and of blocks, beside
torch._scaled_mm and torch.matmul in bfloat16.

    python benchmarks/bench_fp8_matmul.py [--sizes 8192x8192x8192 ...] [--quick] [--configs]
        [--types e4m3,e5m2]

Random normal input, B as (N, K). Every contestant is checked against float32 on a poisoned output
before it is timed; the relative error in the norm is shown. Contestants take turns, in three ways
(timing.py). torch._scaled_mm sums as the tensor cores do ("fast") or not; with scales of blocks
it has one way. Contestants that fail (torch takes multiples of 16 only) are named with the reason.
Few rows go round over copies of B, so that it comes from memory. --configs times configurations
of ours. The pass that transposes operands is timed beside a copy. A short table comes last."""

import argparse
import functools
import itertools
import time

import results
import torch
from timing import all_ways

from pallas_mgpu.ops import MatmulConfig, matmul
from pallas_mgpu.ops._matmul_choice import candidates, choose_k_major, cycles
from pallas_mgpu.ops._scaled import transposing

SIZES = (
    "8192x8192x8192",
    "4096x4096x4096",
    "2048x2048x2048",
    "4096x8192x4096",
    "16x8192x8192",
    "4097x8191x4095",
)
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WAYS = ("burst", "cool", "sustained")
NORM, ELEMENT = 3e-2, 0.15  # of the error: in the norm, and of any element over the norm's mean
FORMS = ("one", "rows", "blocks")


def spread(scale, rows, shape):
    """A number for each element of an operand from one for `rows` rows and 128 columns."""
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return wide[: shape[0], : shape[1]]


def cdiv(a, b):
    return -(-a // b)


class Problem:
    def __init__(self, text, types):
        m, n, k = self.shape = tuple(map(int, text.split("x")))
        self.title, self.tflop = text.replace("x", " x "), 2 * m * n * k / 1e12
        self.copies = 3 if m <= 64 else 1
        a_type, b_type = (TYPES[t] for t in types)
        self.a = torch.randn(m, k, device="cuda").to(a_type)
        self.b = [torch.randn(n, k, device="cuda").to(b_type)]
        self.b += [self.b[0].clone() for _ in range(self.copies - 1)]

        def scales(*shape):
            return torch.rand(*shape, device="cuda") + 0.5

        self.scales = {
            "one": (scales(1), scales(1)),
            "rows": (scales(m, 1), scales(1, n)),
            "blocks": (scales(m, cdiv(k, 128)), scales(cdiv(n, 128), cdiv(k, 128))),
        }
        a, b = self.a.float(), self.b[0].float()
        plain = a @ b.T
        self.want = {"none": plain}
        for form in ("one", "rows"):
            scale_a, scale_b = self.scales[form]
            self.want[form] = plain * scale_a * scale_b
        scale_a, scale_b = self.scales["blocks"]
        a *= spread(scale_a, 1, a.shape)
        b *= spread(scale_b, 128, b.shape)
        self.want["blocks"] = a @ b.T
        self.errors = {}

    def check(self, name, got, form):
        want = self.want[form]
        difference = got.float() - want
        error = float(difference.norm() / want.norm())
        element = float(difference.abs().max() / (want.norm() / want.numel() ** 0.5))
        assert error < NORM and element < ELEMENT, (
            f"{name}: relative error {error:.2e} in the norm, {element:.2e} of one element"
        )
        self.errors[name] = error

    def ours(self, name, form, config=None, transposed=False):
        m, n, _ = self.shape
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        scale_a, scale_b = self.scales[form]
        options = {} if config is None else {"config": config}
        bs = [b.T.contiguous() for b in self.b] if transposed else self.b
        turn = itertools.cycle(bs)

        def run():
            matmul(
                self.a,
                next(turn),
                transpose_b=not transposed,
                scale_a=scale_a,
                scale_b=scale_b,
                out=out,
                **options,
            )

        run()
        self.check(name, out, form)
        return run

    def scaled_mm(self, name, form, fast):
        scale_a, scale_b = self.scales[form]
        if form == "blocks":  # its own orders of the same numbers
            scale_a = scale_a.T.contiguous().T
            rows, blocks = scale_b.shape
            padded = torch.zeros(rows, cdiv(blocks, 4) * 4, device="cuda")
            padded[:, :blocks] = scale_b
            scale_b = padded[:, :blocks].T
        turn = itertools.cycle([b.T for b in self.b])

        def run():
            return torch._scaled_mm(
                self.a,
                next(turn),
                scale_a,
                scale_b,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )

        self.check(name, run(), form)
        return run

    def bfloat16(self, name):
        a, bs = self.a.bfloat16(), [b.bfloat16().T for b in self.b]
        out = a @ bs[0]
        self.check(name, out, "none")
        turn = itertools.cycle(bs)
        return lambda: torch.matmul(a, next(turn), out=out)


def configs(m, n, k, form):
    """Beside the chosen one: for large sizes what the chooser does not look at, for others what it
    estimates to be the fastest."""
    blocks = form == "blocks"
    if m * n * k < 2**34:
        found = candidates(m, n, k, in_bytes=1, blocks=blocks)
        return sorted(found, key=lambda c: cycles(m, n, k, c, 132, 1))[:10]
    C = functools.partial(MatmulConfig, step=128)
    if blocks:
        return [
            C(2, 256, 4, 2),
            C(2, 256, 4, 1),
            C(2, 256, 4, 1, cluster_n=2),
            C(2, 256, 3, 2),
            C(2, 256, 4, 2, group=4),
            C(2, 256, 4, 2, group=16),
            C(2, 128, 4, 2),
            C(2, 128, 4, 1),
        ]
    return [
        C(2, 256, 4, 2),
        C(2, 256, 4, 1),
        C(2, 256, 4, 1, cluster_n=2),
        C(2, 256, 3, 2),
        C(2, 256, 4, 2, lag=0),
        C(2, 256, 4, 2, group=4),
        C(2, 256, 4, 2, group=16),
        C(2, 192, 4, 2),
    ]


def bench(text, args):
    problem, contestants = Problem(text, args.types.split(",")), {}

    def admit(name, make, *given, **options):
        try:
            contestants[name] = make(name, *given, **options)
        except Exception as e:  # noqa: BLE001 - shown, the others are still timed
            print(f"{problem.title}, {name}: {type(e).__name__}: {str(e).splitlines()[0][:300]}")

    for form in FORMS[:2]:
        admit(f"torch._scaled_mm, {form}, fast", problem.scaled_mm, form, True)
        admit(f"torch._scaled_mm, {form}", problem.scaled_mm, form, False)
    admit("torch._scaled_mm, blocks", problem.scaled_mm, "blocks", False)
    admit("torch.matmul, bfloat16", problem.bfloat16)
    for form in FORMS:
        admit(f"ops, {form}", problem.ours, form)
    admit("ops, one, B as (K, N)", problem.ours, "one", transposed=True)
    for form in ("one", "blocks") if args.configs else ():
        for config in configs(*problem.shape, form):
            admit(f"  {form} {tuple(config)}", problem.ours, form, config)
    times = all_ways(contestants, 0.3 if args.quick else 0.6, WAYS)
    m, n, k = problem.shape
    args.found.add(
        "fp8", problem.title, times, work=2 * m * n * k, errors=problem.errors, m=m, n=n, k=k
    )
    print(f"\n### {problem.title}\n")
    of_blocks = choose_k_major(m, n, k, blocks=True)
    print(f"chosen: {tuple(choose_k_major(m, n, k))}, blocks {tuple(of_blocks)}")
    print("\n| contestant | error | " + " | ".join(f"{w}, us | TFLOP/s" for w in WAYS) + " |")
    print("|---|---:|" + "---:|---:|" * len(WAYS))
    row = {}
    for name in contestants:
        cells = [f"{problem.errors[name]:.1e}"]
        for way in WAYS:
            t, lo, hi = times[way][name]
            rate = problem.tflop / t
            cells.append(f"{t * 1e6:.1f} ({lo * 1e6:.1f} to {hi * 1e6:.1f}) | {rate:.0f}")
            row[name, way] = t
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return problem.title, row


def bench_transpose(rows, cols, args):
    """The pass that transposes operands, beside a copy and torch's way."""
    x = torch.randn(rows, cols, device="cuda").to(torch.float8_e4m3fn)
    plain = x.view(torch.uint8)
    out = torch.empty(cols, rows, device="cuda", dtype=torch.uint8)
    kernel = transposing((rows, cols), _dtype(), True, None)
    got = kernel(x)
    assert torch.equal(got.view(torch.uint8)[:, :rows], plain.T), "transpose: wrong elements"
    contestants = {
        "copy": lambda: out.view(rows, cols).copy_(plain),
        "torch, transposed copy": lambda: out.copy_(plain.T),
        "transpose": lambda: kernel(x, out=got),
    }
    times = all_ways(contestants, 0.3 if args.quick else 0.6, ("burst",))["burst"]
    print(f"\n### Turning {rows} x {cols}\n\n| what | us | TB/s |\n|---|---:|---:|")
    for name, (t, _, _) in times.items():
        print(f"| {name} | {t * 1e6:.1f} | {2 * rows * cols / t / 1e12:.2f} |", flush=True)


def _dtype():
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.float8_e4m3fn)


SUMMARY = {
    "one": ("torch._scaled_mm, one, fast", "ops, one"),
    "one, not fast": ("torch._scaled_mm, one", "ops, one"),
    "rows": ("torch._scaled_mm, rows, fast", "ops, rows"),
    "rows, not fast": ("torch._scaled_mm, rows", "ops, rows"),
    "blocks": ("torch._scaled_mm, blocks", "ops, blocks"),
    "bfloat16": ("torch.matmul, bfloat16", "ops, one"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--types", default="e4m3,e4m3", help="of A and B")
    parser.add_argument("--configs", action="store_true", help="other configurations of ops")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    start = time.perf_counter()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for text in args.sizes:
        rows.append(bench(text, args))
        torch.cuda.empty_cache()
    for shape in ((8192, 8192), (4095, 8192), (4096, 4100)):
        try:
            bench_transpose(*shape, args)
        except Exception as e:  # noqa: BLE001 - shown, the rest is still done
            print(f"transpose {shape}: {type(e).__name__}: {str(e)[:300]}")
    print("\n### Summary: time of torch / time of ops (above 1: ops is faster)\n")
    print("burst, cool, sustained; TFLOP/s of ops, sustained\n")
    print("| size | " + " | ".join(SUMMARY) + " |")
    print("|---|" + "---:|" * len(SUMMARY))
    for title, row in rows:
        cells = []
        for theirs, ours in SUMMARY.values():
            pairs = [(row.get((theirs, w)), row.get((ours, w))) for w in WAYS]
            ratios = ["-" if None in (a, b) else f"{a / b:.3f}" for a, b in pairs]
            cells.append(", ".join(ratios))
        print(f"| {title} | " + " | ".join(cells) + " |")
    print("\n| size | ops, one | ops, rows | ops, blocks |\n|---|---:|---:|---:|")
    for title, row in rows:
        m, n, k = map(int, title.split(" x "))
        cells = []
        for form in FORMS:
            t = row.get((f"ops, {form}", "sustained"))
            cells.append("-" if t is None else f"{2 * m * n * k / t / 1e12:.0f}")
        print(f"| {title} | " + " | ".join(cells) + " |")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
