"""ops.matmul beside torch.matmul, JAX's Pallas matmul for Hopper, and a hand-written kernel.

    python benchmarks/bench_ops_matmul.py [--sizes 8192x8192x8192:bfloat16[:nt] ...] [--quick]
        [--configs] [--target DIR] [--no-jax] [--json FILE]
    python benchmarks/bench_ops_matmul.py --candidates [--json FILE]

Random normal input, every result checked on a poisoned output before it is timed; contestants take
turns. Four ways of timing (timing.py): bursts, calls queued behind a sleep (the GPU alone), cool
(after an idle gap) and sustained (0.15 s each). JAX's kernel is searched over its tilings, the best
is shown. --target: a folder with gemm.cu and bench.py. --candidates times the configurations that
the chooser looks at, on small and odd shapes. A short table comes last."""

import argparse
import concurrent.futures
import functools
import importlib.util
import inspect
import itertools
import os
import pathlib
import statistics
import sys
import time
import types

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import results
import torch  # noqa: E402
from timing import WAYS, all_ways, estimate, host_seconds  # noqa: E402

import pallas_mgpu as plgpu  # noqa: E402
from pallas_mgpu.ops import MatmulConfig, matmul  # noqa: E402
from pallas_mgpu.ops._few_rows import candidates as few_rows_candidates  # noqa: E402
from pallas_mgpu.ops._matmul_choice import candidates, choose  # noqa: E402
from pallas_mgpu.testing import do_bench  # noqa: E402

SIZES = (
    "8192x8192x8192:bfloat16",
    "4096x8192x4096:float16",
    "16384x16384x4096:bfloat16",
    "4096x4096x4096:bfloat16",
    "2048x2048x2048:bfloat16",
    "1024x1024x1024:bfloat16",
    "512x512x512:bfloat16",
    "4097x8191x4095:bfloat16",
    "100x5000x777:bfloat16",
    "1x4096x4096:bfloat16",
)
SMALL = (
    "2048x2048x2048",
    "1024x1024x1024",
    "512x512x512",
    "256x256x256",
    "1536x1536x1536",
    "3072x3072x1024",
    "1024x4096x1024",
    "512x512x8192",
    "256x1024x4096",
    "128x4096x4096",
    "100x5000x777",
    "64x4096x4096",
    "16x8192x1024",
    "1x4096x4096",
    "1x1024x16384",
    "4096x64x4096",
    "1x4096x4096:nt",
    "4x4096x4096",
    "8x4096x4096",
    "8x4096x4096:nt",
)
BOUND = {"bfloat16": 3e-3, "float16": 4e-4}
FOUND = None  # results.Results


def sizes_of(text):
    """m, n, k, dtype, whether B is transposed."""
    shape, *rest = text.split(":")
    nt = "nt" in rest
    dtype = [x for x in rest if x != "nt"] or ["bfloat16"]
    return *map(int, shape.split("x")), dtype[0], nt


def check(name, got, want, dtype):
    error = float((got.float() - want).norm() / want.norm())
    assert error < BOUND[dtype], f"{name}: relative error {error:.2e}"
    return error


class Size:
    def __init__(self, text):
        self.m, self.n, self.k, self.dtype, self.nt = sizes_of(text)
        self.title = f"{self.m} x {self.n} x {self.k} {self.dtype}" + (" NT" if self.nt else "")
        tdt = getattr(torch, self.dtype)
        self.a = torch.randn(self.m, self.k, device="cuda").to(tdt)
        shape = (self.n, self.k) if self.nt else (self.k, self.n)
        self.b = torch.randn(shape, device="cuda").to(tdt)
        self.b_kn = self.b.T if self.nt else self.b
        self.want = self.a.float() @ self.b_kn.float()
        self.tflop = 2 * self.m * self.n * self.k / 1e12
        self.errors = {}  # of this package

    def empty(self):
        tdt = getattr(torch, self.dtype)
        return torch.full((self.m, self.n), float("nan"), device="cuda", dtype=tdt)

    def ours(self, config=None):
        """Checked; a call of ops.matmul."""
        out = self.empty()
        options = {} if config is None else {"config": config}
        if self.nt:
            options["transpose_b"] = True
        f = functools.partial(matmul, self.a, self.b, out=out, **options)
        f()
        name = "ops.matmul" if config is None else f"ops {tuple(config)}"
        self.errors[name] = check(name, out, self.want, self.dtype)
        return f


# ---- JAX -----------------------------------------------------------------------------------------


def jax_module():
    import jax  # noqa: F401

    name = "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:  # it imports test helpers, which need absl, and does not use them
        sys.modules.setdefault("jax._src.test_util", types.ModuleType("jax._src.test_util"))
        return importlib.import_module(name)


def jax_matmul():
    """(function of a configuration, configurations, best guesses first), or (None, why)."""
    try:
        import jax

        mod = jax_module()
    except Exception as e:  # noqa: BLE001 - any failure means: no JAX
        return None, f"{type(e).__name__}: {e}"
    fields = mod.TuningConfig.__dataclass_fields__
    dim = mod.MatmulDimension
    configs = []
    for (tile_m, tile_n, wg), cluster, minor in itertools.product(
        ((128, 128, "N"), (64, 256, "M"), (128, 128, "M"), (64, 128, "M"), (64, 64, "M")),
        (None, "M", "N"),
        "NM",
    ):
        options = {
            "tile_m": tile_m,
            "tile_n": tile_n,
            "tile_k": 64,
            "max_concurrent_steps": 4,
            "epi_tile_m": 64,
            "epi_tile_n": 64,
            "grid_minor_dim": dim[minor],
            "grid_tile_width": 8,
            "wg_dimension": dim[wg],
            "cluster_dimension": cluster and dim[cluster],
        }
        configs.append(mod.TuningConfig(**{k: v for k, v in options.items() if k in fields}))
    f = getattr(mod, "matmul", None) or mod.matmul_kernel
    takes_c = "c" in inspect.signature(f).parameters

    def make(config):
        return jax.jit(lambda a, b: f(a, b, *([None] if takes_c else []), config=config))

    return make, list(dict.fromkeys(configs))


def add_jax(size, contestants, make, configs, seconds):
    import jax

    ja, jb = jax.dlpack.from_dlpack(size.a), jax.dlpack.from_dlpack(size.b)
    best, why, start = None, "", time.perf_counter()
    for config in configs:
        if time.perf_counter() - start > seconds:
            break
        try:
            run = make(config)
            check("JAX", torch.from_dlpack(run(ja, jb)), size.want, size.dtype)
        except Exception as e:  # noqa: BLE001 - a tiling that this shape does not take
            why = f"{type(e).__name__}: {e}".splitlines()[0][:110]
            continue
        call = functools.partial(run, ja, jb)
        call.wall = True
        t = min(estimate(call) for _ in range(3))
        if best is None or t < best[0]:
            best = (t, call, config)
    if best is None:
        print(f"JAX's Pallas, {size.title}: no tiling works ({why})")
        return
    c = best[2]
    parts = (
        c.grid_minor_dim,
        getattr(c, "wg_dimension", "-"),
        getattr(c, "cluster_dimension", "-"),
    )
    name = f"JAX's Pallas {c.tile_m}x{c.tile_n}, {' '.join(map(str, parts))}"
    contestants[name] = best[1]


# ---- the hand-written kernel ---------------------------------------------------------------------


def load_target(folder):
    path = pathlib.Path(folder) / "bench.py"
    spec = importlib.util.spec_from_file_location("target_bench", path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod, mod.Cuda()


TARGETS = {
    "128x256": {},
    "128x256, groups of 4": dict(GROUP=4),
    "128x256, no cluster, PDL": dict(CM=1, PDL=1),
}


def add_target(size, contestants, target):
    mod, cuda = target
    if size.m % 256 or size.n % 256 or size.k % 64 or size.nt:
        return
    for name, defs in TARGETS.items():
        out = size.empty()
        run = mod.gemm_make(cuda, defs, size.a, size.b, out, int(size.dtype == "float16"))
        run()
        torch.cuda.synchronize()
        check("target", out, size.want, size.dtype)
        contestants[f"hand-written {name}"] = lambda run=run, out=out: run()


# ---- the tables ----------------------------------------------------------------------------------


CONFIGS = (
    MatmulConfig(2, 256, 4, 2, 2, 8),
    MatmulConfig(2, 256, 4, 2, 2, 8, lag=0),
    MatmulConfig(2, 256, 4, 2, 2, 4),
    MatmulConfig(2, 256, 4, 2, 2, 16),
    MatmulConfig(2, 256, 3, 2, 4, 8),
    MatmulConfig(2, 256, 4, 1, 2, 8),
    MatmulConfig(2, 192, 5, 2, 1, 8),
)


def bench(text, args, jax_config, target):
    size = Size(text)
    ref = size.empty()
    contestants = {"torch.matmul": functools.partial(torch.matmul, size.a, size.b_kn, out=ref)}
    contestants["torch.matmul"]()
    check("torch.matmul", ref, size.want, size.dtype)
    contestants["ops.matmul"] = size.ours()
    for config in CONFIGS if args.configs else ():
        contestants[f"  {tuple(config)}"] = size.ours(config)
    if target:
        add_target(size, contestants, target)
    if jax_config[0] and not size.nt:
        add_jax(size, contestants, *jax_config, seconds=4 if args.quick else 12)
    del size.want
    times = all_ways(contestants, 0.5 if args.quick else 1)
    print(f"\n### {size.title}\n")
    print(f"ops.matmul: {choose(size.m, size.n, size.k, transpose_b=size.nt)}\n")
    print("| contestant | " + " | ".join(f"{w}, TFLOP/s | ratio" for w in times) + " |")
    print("|---|" + "---:|---:|" * len(times))
    for name in contestants:
        cells = []
        for t in times.values():
            if name not in t:
                cells.append("- | -")
                continue
            med, lo, hi = t[name]
            ratio = t["torch.matmul"][0] / med
            f = size.tflop
            cells.append(f"{f / med:.0f} ({f / hi:.0f} to {f / lo:.0f}) | {ratio:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    us = ", ".join(f"{w} {t['ops.matmul'][0] * 1e6:.2f}" for w, t in times.items())
    base = ", ".join(f"{w} {t['torch.matmul'][0] * 1e6:.2f}" for w, t in times.items())
    print(f"\nus per call: ops.matmul {us}; torch.matmul {base}", flush=True)
    FOUND.add(
        "matmul", text, times, work=size.tflop * 1e12, errors=size.errors, m=size.m, n=size.n,
        k=size.k,
    )  # fmt: skip
    rest = [n for n in contestants if n not in ("torch.matmul", "ops.matmul")]
    best = {p: [n for n in rest if n.startswith(p)] for p in ("JAX", "hand")}
    row = {w: [t["torch.matmul"][0] / t["ops.matmul"][0]] for w, t in times.items()}
    for names in best.values():
        for w, t in times.items():
            timed = [t[n][0] for n in names if n in t]
            row[w].append(min(timed) / t["ops.matmul"][0] if timed else float("nan"))
    return size.title, row


def summary(rows):
    print("\n### Summary: time of the other / time of ops.matmul (above 1: ops.matmul is faster)\n")
    print("torch.matmul, best of JAX, best hand-written\n")
    print("| size | " + " | ".join(WAYS) + " |")
    print("|---|" + "---:|" * len(WAYS))
    for title, row in rows:
        cells = [", ".join("-" if r != r else f"{r:.3f}" for r in row[w]) for w in WAYS]
        print(f"| {title} | " + " | ".join(cells) + " |")


def host_table():
    """What the host takes for a small product."""
    a = torch.randn(64, 64, device="cuda").to(torch.bfloat16)
    b, out, bias = a.clone(), torch.empty_like(a), a[0].clone()
    da, db, dout = (plgpu.DeviceArray.from_dlpack(x) for x in (a, b, out.clone()))
    kernel = matmul.kernel(a, b)
    rows = {
        "kernel, DeviceArray, out=": lambda: kernel(da, db, out=dout),
        "ops.matmul, DeviceArray, out=": lambda: matmul(da, db, out=dout),
        "kernel, torch, out=": lambda: kernel(a, b, out=out),
        "ops.matmul, torch, out=": lambda: matmul(a, b, out=out),
        "ops.matmul, torch, bias, relu, out=": lambda: matmul(
            a, b, bias=bias, activation="relu", out=out
        ),
        "ops.matmul, torch, new result": lambda: matmul(a, b),
        "torch.matmul, out=": lambda: torch.matmul(a, b, out=out),
        "torch.matmul, new result": lambda: torch.matmul(a, b),
    }
    samples = {name: [] for name in rows}
    for f in rows.values():
        host_seconds(f, 50)
    for _ in range(30):
        for name, f in rows.items():
            samples[name].append(host_seconds(f, 200))
    print("\n### Host time of a call, 64 x 64 x 64\n\n| what | us |\n|---|---:|")
    for name, s in samples.items():
        print(f"| {name} | {statistics.median(s) * 1e6:.2f} |")


def more(m, n, k, dtype, nt):
    """Configurations that the chooser does not look at."""
    if m <= 8:
        return [c for c in few_rows_candidates(m, k, nt) if c.stages * c.step * c.tile_n < 100_000]
    return [c._replace(lag=0) for c in candidates(m, n, k)]


def bench_candidates(texts):
    start = time.perf_counter()
    shapes = [sizes_of(t) for t in texts]
    todo = {s: [*more(*s), *candidates(*s[:3])] for s in shapes}

    def padded(x):
        rows, cols = x.shape
        return plgpu.ShapeDtypeStruct((rows, -(-cols // 8) * 8), x.dtype)

    def compile_one(job):
        (m, n, k, dtype, nt), config = job
        dims = ((m, k), (n, k) if nt else (k, n))
        spec = [plgpu.ShapeDtypeStruct(x, getattr(plgpu.numpy, dtype)) for x in dims]
        f = matmul.kernel(*spec, config=config, **({"transpose_b": True} if nt else {}))
        if hasattr(f, "pads"):
            spec = [x if pad is None else padded(x) for x, pad in zip(spec, f.pads)]
            f = f.product
        if hasattr(f, "lower"):  # those of several kernels: when they are called
            f.lower(*spec).resources()

    jobs = [(s, c) for s in shapes for c in todo[s]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - start:.0f} s\n")
    print("| size | torch, us | chosen, us | best, us | configurations from the best on |")
    print("|---|---:|---:|---:|---|")
    for text, s in zip(texts, shapes):
        size = Size(text)
        ref = size.empty()
        chosen = choose(*s[:3], transpose_b=s[4])
        contestants = {"torch": functools.partial(torch.matmul, size.a, size.b_kn, out=ref)}
        for config in dict.fromkeys([chosen, *todo[s]]):
            try:
                contestants[config] = size.ours(config)
            except Exception as e:  # noqa: BLE001 - shown, the others are still timed
                print(f"{s}: {config}: {type(e).__name__}: {str(e)[:300]}")
        found = do_bench(contestants, ways="queued", rounds=5)["queued"]
        times = {n: t.median for n, t in found.items()}
        named = {"torch": "torch", **{n: f"ops {tuple(n)}" for n in times if n != "torch"}}
        spreads = {named[n]: results.of_timing(t) for n, t in found.items()}
        FOUND.add(
            "candidates", text, {"queued": spreads}, work=size.tflop * 1e12, errors=size.errors
        )
        ours = sorted((t, n) for n, t in times.items() if n != "torch")
        short = "; ".join(f"{t * 1e6:.2f} {tuple(n)}" for t, n in ours[:4])
        chosen_us = times.get(chosen, float("nan")) * 1e6
        print(
            f"| {text} | {times['torch'] * 1e6:.2f} | {chosen_us:.2f} {tuple(chosen)} |"
            f" {ours[0][0] * 1e6:.2f} | {short} |",
            flush=True,
        )
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--configs", action="store_true", help="several configurations of each")
    parser.add_argument("--candidates", action="store_true", help="those of the chooser")
    parser.add_argument("--target", help="folder of the hand-written kernel")
    parser.add_argument("--no-jax", action="store_true")
    results.argument(parser)
    args = parser.parse_args()
    global FOUND
    FOUND = results.Results(__file__, args.json)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.candidates:
        bench_candidates(args.sizes or SMALL)
    else:
        jax_config = (None, "not asked for") if args.no_jax else jax_matmul()
        if not jax_config[0]:
            print(f"JAX: {jax_config[1]}")
        target = load_target(args.target) if args.target else None
        rows = [bench(text, args, jax_config, target) for text in args.sizes or SIZES]
        host_table()
        summary(rows)


if __name__ == "__main__":
    main()
