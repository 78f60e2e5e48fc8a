"""ops.mixed_matmul, x in bfloat16 with weights of 8 and 4 bits, beside torch.matmul on weights in
bfloat16 and JAX's hopper_mixed_type_matmul_mgpu (8 bits; it has no scales, and no 4 bits).

    python benchmarks/bench_mixed_matmul.py [--rows 16 256 4096] [--n N] [--k K] [--groups G]
        [--configs] [--no-jax] [--quick]

Random input. Calls go round over copies of the weights, so that these come from memory and not from
the L2 cache. Every contestant is checked against float32 on a poisoned output before it is timed.
GB/s are those of the weights. JAX's tiling is searched; it runs as one program of a call for each
copy, timed by the clock of the host. A short table comes last."""

import argparse
import functools
import itertools
import os
import time

import results

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BOUND = 4e-3  # of the relative error in the norm
WAYS = ("burst", "queued", "cool")
COPIES = {"int4": 8, "int8": 4, "bfloat16": 2}  # of the weights


class Problem:
    def __init__(self, m, n, k, groups):
        import ml_dtypes
        import numpy as np
        import torch

        import pallas_mgpu as plgpu

        self.torch, self.shape, self.errors = torch, (m, n, k), {}
        rng = np.random.default_rng(m)
        self.x = torch.randn(m, k, device="cuda").bfloat16()
        self.scales = (torch.rand(groups, n, device="cuda") + 0.5).bfloat16()
        full = {}
        self.weights, self.want = {}, {}
        for name, least in (("int4", -8), ("int8", -128)):
            values = rng.integers(least, -least, (n, k), dtype=np.int8)
            full[name] = torch.from_numpy(values).cuda()
            if name == "int4":
                packed = values.astype(ml_dtypes.int4)
                self.weights[name] = [plgpu.device_put(packed) for _ in range(COPIES[name])]
            else:
                self.weights[name] = [full[name].clone() for _ in range(COPIES[name])]
        spread = self.scales.float().repeat_interleave(k // groups, 0).T
        for name in full:
            for scaled in (False, True):
                w = full[name].float()
                self.want[name, scaled] = self.x.float() @ (w * spread if scaled else w).T
        self.dense = [full["int8"].bfloat16() for _ in range(COPIES["bfloat16"])]
        self.tflop = 2 * m * n * k / 1e12
        self.title = f"{m} x {n} x {k}, {groups} groups"

    def check(self, name, got, want):
        error = float((got.float() - want).norm() / want.norm())
        assert error < BOUND, f"{name}: relative error {error:.2e}"
        self.errors[name.strip()] = error

    def bytes_of(self, weights):
        _, n, k = self.shape
        return n * k * {"int4": 0.5, "int8": 1, "bfloat16": 2}[weights]

    def ours(self, weights, scaled, config=None):
        from pallas_mgpu.ops import mixed_matmul

        m, n, _ = self.shape
        out = self.torch.full((m, n), float("nan"), device="cuda", dtype=self.torch.bfloat16)
        options = {} if config is None else {"config": config}
        scales = (self.scales,) if scaled else ()
        turn = itertools.cycle(self.weights[weights])

        def run():
            mixed_matmul(self.x, next(turn), *scales, out=out, **options)

        run()
        self.check(
            f"ops, {weights}{', scales' * scaled} {config or ''}", out, self.want[weights, scaled]
        )
        return run

    def of_torch(self):
        turn = itertools.cycle(self.dense)
        out = self.x @ self.dense[0].T
        self.check("torch", out, self.want["int8", False])
        return lambda: self.torch.matmul(self.x, next(turn).T, out=out)

    def of_jax(self, module, config):
        """All copies in one program, which counts as so many calls."""
        import jax
        import jax.numpy as jnp

        f = functools.partial(module.mixed_matmul_kernel, out_dtype=jnp.bfloat16, config=config)
        call = jax.jit(lambda x, ws: [f(w, x) for w in ws])
        x = jax.dlpack.from_dlpack(self.x.T.contiguous())
        ws = [jax.dlpack.from_dlpack(w) for w in self.weights["int8"]]
        last = []

        def run():
            last[:] = call(x, ws)

        run()
        for got in last:
            got = self.torch.from_dlpack(got.block_until_ready())
            self.check("JAX", got.T, self.want["int8", False])
        run.wall = True
        return run


def tilings(module, tokens):
    dim = module.MatmulDimension
    tiles = [(m, n) for m in (128, 64, 256) for n in (128, 64, 16) if n <= tokens]
    for (tile_m, tile_n), wg, tile_k in itertools.product(tiles[:4], (dim.M, dim.N), (64, 128)):
        yield module.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            max_concurrent_steps=4,
            epi_tile_n=min(tile_n, 64),
            epi_tile_m=64,
            grid_minor_dim=dim.M,
            grid_tile_width=8,
            wg_dimension=wg,
        )


def best_of_jax(problem, seconds):
    """Thunk and configuration, or None."""
    from jax_search import fastest, kernels

    module = kernels("hopper_mixed_type_matmul_mgpu")
    if module is None:
        return None
    make = functools.partial(problem.of_jax, module)
    return fastest(problem.title, tilings(module, problem.shape[0]), make, seconds, samples=3)


def configs(m):
    from pallas_mgpu.ops import MixedConfig

    if m <= 16:
        yield MixedConfig(2, 16, 4, 6)  # two blocks on an SM, where registers allow it
        yield MixedConfig(1, 16, 4, 6)
        yield MixedConfig(1, 16, 2)
        yield MixedConfig(3, 16, 2)
    else:
        yield MixedConfig(3, 96, 1)
        yield MixedConfig(2, 96, 1)
        yield MixedConfig(2, 128, 1, 0, 64)
        yield MixedConfig(2, 128, 1, 0, 128, 16)


def bench(problem, args):
    from timing import all_ways

    contestants, weights_of, calls = {}, {}, {}

    def admit(name, weights, make, count=1):
        try:
            contestants[name] = make()
        except Exception as e:  # noqa: BLE001 - shown, the others are still timed
            print(f"{name}: {type(e).__name__}: {str(e)[:300]}")
            return
        weights_of[name], calls[name] = weights, count

    admit("torch.matmul, bfloat16", "bfloat16", problem.of_torch)
    for weights, scaled in (("int4", True), ("int4", False), ("int8", True), ("int8", False)):
        name = f"ops, {weights}" + (", scales" if scaled else "")
        admit(name, weights, functools.partial(problem.ours, weights, scaled))
    for config in configs(problem.shape[0]) if args.configs else ():
        for weights, scaled in (("int4", True), ("int8", False)):
            name = f"  {weights}{', scales' if scaled else ''}, {tuple(config)}"
            admit(name, weights, functools.partial(problem.ours, weights, scaled, config))
    if not args.no_jax:
        found = best_of_jax(problem, 4 if args.quick else 8)
        if found:
            c = found[1]
            name = f"JAX, int8, {c.tile_m}x{c.tile_n}x{c.tile_k} {c.wg_dimension}"
            admit(name, "int8", lambda: found[0], COPIES["int8"])
    times = all_ways(contestants, 0.3 if args.quick else 0.6, WAYS)
    a_call = {
        w: {n: [x / calls[n] for x in t] for n, t in found.items()} for w, found in times.items()
    }
    args.found.add(
        "mixed_matmul",
        problem.title,
        a_call,
        work=problem.tflop * 1e12,
        errors=problem.errors,
        rows=problem.shape[0],
    )
    print(f"\n### {problem.title}\n")
    print("| contestant | " + " | ".join(f"{w}, us | GB/s | TFLOP/s" for w in WAYS) + " |")
    print("|---|" + "---:|---:|---:|" * len(WAYS))
    row = {}
    for name in contestants:
        cells = []
        for way in WAYS:
            if name not in times[way]:  # its stream is not ours
                cells.append("- | - | -")
                continue
            t = times[way][name][0] / calls[name]
            rate = problem.bytes_of(weights_of[name]) / t / 1e9
            cells.append(f"{t * 1e6:.1f} | {rate:.0f} | {problem.tflop / t:.0f}")
            row[name.split(",")[0] if name.startswith(("torch", "JAX")) else name, way] = t
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=(16, 256, 4096))
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--k", type=int, default=8192)
    parser.add_argument("--groups", type=int, default=64, help="of scales")
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
    rows = {}
    for m in args.rows:
        problem = Problem(m, args.n, args.k, args.groups)
        rows[problem.title] = bench(problem, args)
        del problem
        torch.cuda.empty_cache()
    way = "burst"
    names = (
        "torch.matmul",
        "JAX",
        "ops, int4, scales",
        "ops, int4",
        "ops, int8, scales",
        "ops, int8",
    )
    print(f"\n### Summary: us per call, {way}\n\n| what | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for title, row in rows.items():
        cells = ["-" if (n, way) not in row else f"{row[n, way] * 1e6:.1f}" for n in names]
        print(f"| {title} | " + " | ".join(cells) + " |")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
