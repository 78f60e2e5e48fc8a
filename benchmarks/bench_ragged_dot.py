"""ops.ragged_dot and transposed_ragged_dot beside one dense torch.matmul of the same FLOPs, torch's
grouped product and JAX's ragged_dot_mgpu and transposed_ragged_dot_mgpu.

    python benchmarks/bench_ragged_dot.py [--groups 8 16 64] [--rows M] [--k K] [--n N]
        [--only forward|transposed] [--configs] [--no-jax] [--quick]

bfloat16, random normal; sizes of groups are random, one of them is 0, and they are the same for
all. Every contestant is checked against float32, group by group, on a poisoned output before it is
timed; contestants take turns, in bursts, cool and sustained (timing.py). JAX's tiling is searched
at the first number of groups. --configs times other configurations of ops. A short table comes
last."""

import argparse
import functools
import os
import time

import results

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BOUND = 3e-3  # of the relative error in the norm
WAYS = ("burst", "cool", "sustained")


def sizes_of(rows, groups, torch):
    """Uneven ones that add up to all rows; group 1 has none."""
    weights = torch.rand(groups, generator=torch.Generator().manual_seed(groups)) + 0.2
    if groups > 1:
        weights[1] = 0
    ends = (weights.cumsum(0) / weights.sum() * rows).round().to(torch.int32)
    ends[-1] = rows
    return torch.diff(ends, prepend=ends.new_zeros(1))


class Problem:
    """Operands, what is right, and how many FLOPs that is."""

    def __init__(self, transposed, rows, n, k, groups):
        import torch

        self.torch, self.transposed = torch, transposed
        self.errors = {}  # of what was checked
        self.groups, self.shape = groups, (rows, n, k)
        make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.lhs = make(rows, k)
        self.rhs = make(rows, n) if transposed else make(groups, k, n)
        self.dense_rhs = self.rhs if transposed else self.rhs[0]
        host = sizes_of(rows, groups, torch)
        self.sizes, self.ends = host.cuda(), host.cumsum(0).to(torch.int32).cuda()
        ends = host.cumsum(0).tolist()
        self.parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends)]
        self.tflop = 2 * rows * n * k / 1e12
        what = "transposed_ragged_dot" if transposed else "ragged_dot"
        self.title = f"{what}, {groups} groups, M={rows} N={n} K={k}"

    def empty(self):
        torch, (rows, n, k) = self.torch, self.shape
        shape = (self.groups, k, n) if self.transposed else (rows, n)
        return torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)

    def check(self, name, got):
        """Relative error in the norm of each group, NaN included."""
        worst = 0.0
        for g, rows in enumerate(self.parts):
            left = self.lhs[rows].float()
            if self.transposed:
                part, want = got[g].float(), left.T @ self.rhs[rows].float()
            else:
                part, want = got[rows].float(), left @ self.rhs[g].float()
            error = float((part - want).norm() / (want.norm() if want.norm() > 0 else 1))
            worst = max(worst, error) if error == error else float("inf")
        assert worst < BOUND, f"{name}: relative error {worst:.2e}"
        self.errors[name.strip()] = worst

    # contestants: functions that launch

    def dense(self):
        torch, (rows, n, k) = self.torch, self.shape
        shape = (k, n) if self.transposed else (rows, n)
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        left = self.lhs.T if self.transposed else self.lhs
        return functools.partial(torch.matmul, left, self.dense_rhs, out=out)

    def ours(self, out, config=None):
        from pallas_mgpu.ops import ragged_dot, transposed_ragged_dot

        f = transposed_ragged_dot if self.transposed else ragged_dot
        options = {} if config is None else {"config": config}
        run = functools.partial(f, self.lhs, self.rhs, self.sizes, out=out, **options)
        out.fill_(float("nan"))
        run()
        self.check(f"ops {config or ''}", out)
        return run

    def of_torch(self):
        left = self.lhs.T if self.transposed else self.lhs
        run = functools.partial(self.torch._grouped_mm, left, self.rhs, offs=self.ends)
        self.check("torch._grouped_mm", run())
        return run

    def of_jax(self, module, tiling):
        import jax

        f = module.transposed_ragged_dot if self.transposed else module.ragged_dot
        call = jax.jit(lambda a, b, s: f(a, b, group_sizes=s, **tiling))
        args = [jax.dlpack.from_dlpack(x) for x in (self.lhs, self.rhs, self.sizes)]
        last = []

        def run():
            last[:] = [call(*args)]  # the one before is freed

        run()
        self.check("JAX", self.torch.from_dlpack(last[0].block_until_ready()))
        run.wall = True
        return run


def tilings(transposed):
    """The likely ones of JAX's own search, best guesses first."""
    steps = (1,) if transposed else (4, 6)
    for block_m, block_n, grid_n in ((128, 128, 4), (128, 128, 8), (128, 128, 1), (64, 128, 4)):
        for concurrent in steps:
            yield dict(
                block_m=block_m,
                block_n=block_n,
                block_k=64,
                max_concurrent_steps=concurrent,
                grid_block_n=grid_n,
            )


def best_of_jax(problem, known, seconds):
    """(thunk, tiling) or None. known: tilings found before, by whether transposed."""
    from jax_search import fastest, kernels

    transposed = problem.transposed
    module = kernels("transposed_ragged_dot_mgpu" if transposed else "ragged_dot_mgpu")
    if module is None:
        return None
    given = [known[transposed]] if transposed in known else tilings(transposed)
    make = functools.partial(problem.of_jax, module)
    found = fastest(problem.title, given, make, seconds, samples=2)
    if found:
        known[transposed] = found[1]
    return found


def configs(problem):
    from pallas_mgpu.ops import RaggedConfig

    if problem.transposed:
        yield RaggedConfig(2, 256, 0, 1, 2, 16)
        yield RaggedConfig(2, 256, 0, 2, 2, 4)
        yield RaggedConfig(2, 256, 0, 2, 1, 8)
        yield RaggedConfig(2, 128, 0, 2, 2, 8)
    else:
        yield RaggedConfig(2, 256, 0, 1, 2, 16)
        yield RaggedConfig(2, 256, 0, 2, 2, 4)
        yield RaggedConfig(2, 256, 0, 2, 2, 32)
        yield RaggedConfig(2, 256, 0, 2, 1, 16)
        yield RaggedConfig(2, 192, 0, 2, 2, 16)
        yield RaggedConfig(2, 128, 0, 2, 2, 16)


def bench(problem, args, known):
    from timing import all_ways

    contestants = {"dense torch.matmul": problem.dense(), "ops": problem.ours(problem.empty())}
    if args.configs:
        out = problem.empty()
        for config in configs(problem):
            try:
                contestants[f"  {tuple(config)}"] = problem.ours(out, config)
            except Exception as e:  # noqa: BLE001 - shown, the others are still timed
                print(f"{config}: {type(e).__name__}: {str(e)[:300]}")
    try:
        contestants["torch._grouped_mm"] = problem.of_torch()
    except Exception as e:  # noqa: BLE001
        print(f"torch._grouped_mm: {type(e).__name__}: {str(e)[:160]}")
    if not args.no_jax:
        found = best_of_jax(problem, known, 3 if args.quick else 6)
        if found:
            t = found[1]
            name = f"JAX {t['block_m']}x{t['block_n']}, {t['max_concurrent_steps']} steps"
            contestants[name] = found[0]
    times = all_ways(contestants, 0.3 if args.quick else 0.6, WAYS)
    args.found.add(
        "transposed_ragged_dot" if problem.transposed else "ragged_dot", problem.title, times,
        work=problem.tflop * 1e12, errors=problem.errors, groups=len(problem.sizes),
    )  # fmt: skip
    print(f"\n### {problem.title}\n\nsizes {problem.sizes.tolist()}\n")
    print("| contestant | " + " | ".join(f"{w}, TFLOP/s | of dense" for w in WAYS) + " |")
    print("|---|" + "---:|---:|" * len(WAYS))
    row = {}
    for name in contestants:
        cells = []
        for way in WAYS:
            if name not in times[way]:  # its stream is not ours
                cells.append("- | -")
                continue
            middle, low, high = times[way][name]
            ratio = times[way]["dense torch.matmul"][0] / middle
            row.setdefault(name.split(" ")[0], {}).setdefault(way, ratio)
            rates = [problem.tflop / t for t in (middle, high, low)]
            cells.append(f"{rates[0]:.0f} ({rates[1]:.0f} to {rates[2]:.0f}) | {ratio:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="*", default=(8, 16, 64))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=14336)
    parser.add_argument("--only", choices=["forward", "transposed"])
    parser.add_argument("--configs", action="store_true", help="other configurations of ops")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    import torch

    start = time.perf_counter()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows, known = {}, {}
    for transposed in (False, True):
        if args.only and transposed != (args.only == "transposed"):
            continue
        for groups in args.groups:
            problem = Problem(transposed, args.rows, args.n, args.k, groups)
            rows[problem.title] = bench(problem, args, known)
            del problem
            torch.cuda.empty_cache()
    print("\n### Summary: rate / rate of one dense torch.matmul of the same FLOPs\n")
    names = ("ops", "torch._grouped_mm", "JAX")
    print("| what | " + " | ".join(f"{n}, {w}" for n in names for w in WAYS) + " |")
    print("|---|" + "---:|" * (len(names) * len(WAYS)))
    for title, row in rows.items():
        cells = [row.get(n, {}).get(w) for n in names for w in WAYS]
        text = " | ".join("-" if c is None else f"{c:.3f}" for c in cells)
        print(f"| {title} | {text} |")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
