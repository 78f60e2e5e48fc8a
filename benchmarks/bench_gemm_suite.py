"""ops.matmul beside torch (cuBLAS) on the products of gemm_suite.py.

    python benchmarks/bench_gemm_suite.py [--budget SECONDS] [--json FILE] [--only KIND ...]
    python benchmarks/bench_gemm_suite.py --configs [--sizes 512x512x16384:bfloat16:nt ...]
    python benchmarks/bench_gemm_suite.py --configs --wide --below 0.98 [--of FILE]

Kernels are compiled first, by 16 processes. Every result is checked against float32 on random
normal operands, in an output poisoned with NaN; torch's error is noted, not judged. Then both are
captured in CUDA graphs and take turns (plgpu.testing.do_bench, queued). Up to 512 rows, the calls
go round over copies of the operands of 256 MiB or more, so that the weights come from memory. The
ratio is torch's time divided by ours: the median of the rounds and its 95 % confidence interval.
8-bit products have one scale for each operand; torch sums them as the tensor cores do.

--budget: no product is begun after so many seconds; what was left out is named. --configs times
configurations of ops.matmul on a few products, the best one of each family by the estimate, and
asks the driver how many clusters of each size run at the same time: what a model of the machine is
fitted to. --wide adds families that the choice does not take yet. --below: in place of a few
products those that FILE, an earlier run, has below that ratio, the slowest first."""

import argparse
import concurrent.futures
import ctypes
import functools
import math
import multiprocessing
import os
import pathlib
import time

import results
from gemm_suite import parse, suite

import pallas_mgpu as plgpu
from pallas_mgpu.ops import MatmulConfig, matmul
from pallas_mgpu.ops._common import SMS, compile_for
from pallas_mgpu.ops._matmul_choice import (
    Rates,
    candidates,
    cycles,
    misaligned_rows,
    rates_of,
    wide_candidates,
)
from pallas_mgpu.ops._matmul_family import Rows

# of the error, relative in the norm; sums of 8-bit products have 14 bits, as torch's here
BOUND = {"bfloat16": 3e-3, "float16": 4e-4, "float8_e4m3fn": 6e-3}
COLD = 512  # rows up to which the weights come from memory
CONFIG_SIZES = (
    "512x512x16384:bfloat16:nt",
    "512x512x8192:bfloat16:nt",
    "64x14336x4096:bfloat16:nt",
    "3000x5000x7000:bfloat16:nt",
    "1000x1000x1000:bfloat16:nt",
    "512x4096x14336:bfloat16:nt",
    "128x14336x4096:bfloat16:nt",
    "256x14336x4096:bfloat16:nt",
    "16x14336x4096:bfloat16:nt",
    "4x14336x4096:bfloat16:nt",
)
FAMILIES = 12  # of configurations that --configs times
WIDE = 10  # and of those that --wide adds
# for the order of these: the rate at which an SM takes in swapped operands is one of few rows
WIDE_RATES = Rates(intake=60)
EARLIER = pathlib.Path(__file__).parent / "results" / "bench_gemm_suite.json"


# ---- compilation ---------------------------------------------------------------------------------


def options(gemm, config):
    found = {"transpose_b": True} if gemm.nt else {}
    return found if config is None else found | {"config": MatmulConfig(*config)}


def compile_one(job):
    """The kernel of one product, into the cache on disk; what went wrong, or None."""
    gemm, config = job
    dims = ((gemm.m, gemm.k), (gemm.n, gemm.k) if gemm.nt else (gemm.k, gemm.n))
    specs = [plgpu.ShapeDtypeStruct(x, getattr(plgpu.numpy, gemm.dtype)) for x in dims]
    plgpu.clear_caches()  # else the program for any number of rows, after a few
    try:
        scale = plgpu.ShapeDtypeStruct((1,), plgpu.numpy.float32)
        scales = [scale, scale] if gemm.dtype.startswith("float8") else []
        given = dict(zip(("scale_a", "scale_b"), scales))
        kernel = matmul.kernel(*specs, **given, **options(gemm, config))
        compile_for(kernel, [*specs, *scales])
    except Exception as e:  # noqa: BLE001 - shown, the others are still compiled
        return f"{gemm.text} {config}: {type(e).__name__}: {str(e)[:200]}"
    return None


def compile_all(jobs):
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = min(16, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failure in pool.map(compile_one, jobs, chunksize=2):
            if failure:
                print(failure)
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s, {workers} processes\n")


# ---- products ------------------------------------------------------------------------------------


class Problem:
    """Operands of a product, as many copies as the L2 cache does not hold, and the contestants."""

    def __init__(self, gemm):
        import torch

        self.torch, self.gemm = torch, gemm
        self.fp8 = gemm.dtype.startswith("float8")
        dtype = getattr(torch, gemm.dtype)
        size = (gemm.m * gemm.k + gemm.k * gemm.n) * (1 if self.fp8 else 2)
        copies = min(64, max(2, math.ceil((256 << 20) / size))) if gemm.m <= COLD else 1
        shape = (gemm.n, gemm.k) if gemm.nt else (gemm.k, gemm.n)
        normal = functools.partial(torch.randn, device="cuda")
        self.sets = [
            (normal(gemm.m, gemm.k).to(dtype), normal(*shape).to(dtype)) for _ in range(copies)
        ]
        self.one = torch.ones(1, device="cuda")
        self.out_dtype = torch.bfloat16 if self.fp8 else dtype
        self.errors = {}

    def poisoned(self):
        shape = self.gemm.m, self.gemm.n
        return self.torch.full(shape, float("nan"), device="cuda", dtype=self.out_dtype)

    def torch_call(self, a, b, out):
        right = b.T if self.gemm.nt else b
        if not self.fp8:
            return self.torch.matmul(a, right, out=out)
        scales = self.one, self.one
        kind = {"out_dtype": self.out_dtype, "use_fast_accum": True}
        return self.torch._scaled_mm(a, right, *scales, **kind, out=out)

    def ours(self, config, a, b, out):
        scales = {"scale_a": self.one, "scale_b": self.one} if self.fp8 else {}
        return matmul(a, b, out=out, **scales, **options(self.gemm, config))

    def checked(self, name, call):
        """The calls of a contestant, one for each copy; the first and the last are checked."""
        calls, which = [], {0, len(self.sets) - 1}
        for i, (a, b) in enumerate(self.sets):
            out = self.poisoned()
            calls.append(functools.partial(call, a, b, out))
            calls[-1]()
            if i in which:
                right = b.float().T if self.gemm.nt else b.float()
                want = a.float() @ right
                error = float((out.float() - want).norm() / want.norm())
                self.errors[name] = max(error, self.errors.get(name, 0.0))
                if name != "torch" and not error < BOUND[self.gemm.dtype]:
                    raise AssertionError(f"{name}: relative error {error:.2e}")
        return calls

    def contestants(self, configs):
        found, failed = {"torch": self.checked("torch", self.torch_call)}, []
        for config in configs:
            name = "ops" if config is None else str(tuple(config))
            plgpu.clear_caches()
            try:
                found[name] = self.checked(name, functools.partial(self.ours, config))
            except (ValueError, NotImplementedError, AssertionError) as e:
                failed.append(f"{name}: {type(e).__name__}: {str(e)[:200]}")
        return found, failed


FOUND = None  # results.Results


def chosen(gemm):
    in_bytes = 1 if gemm.dtype.startswith("float8") else 2
    return Rows(gemm.n, gemm.k, SMS, False, gemm.nt, in_bytes=in_bytes).of_one(gemm.m)


def time_one(gemm, configs, rounds):
    """A row of the JSON."""
    problem = Problem(gemm)
    found, failed = problem.contestants(configs)
    times = plgpu.testing.do_bench(found, ways="queued", rounds=rounds, graphs=True)["queued"]
    row = gemm._asdict() | {"text": gemm.text, "chosen": str(tuple(chosen(gemm)))}
    row["copies"], row["errors"], row["failed"] = len(problem.sets), problem.errors, failed
    FOUND.add(
        gemm.kind, gemm.text, {"queued": {n: results.of_timing(t) for n, t in times.items()}},
        work=2 * gemm.m * gemm.n * gemm.k, errors=problem.errors, m=gemm.m, n=gemm.n, k=gemm.k,
    )  # fmt: skip
    row["us"] = {n: [t.median * 1e6, *(q * 1e6 for q in t.quartiles)] for n, t in times.items()}
    row["ratio"] = {n: t.ratio(times["torch"]) for n, t in times.items() if n != "torch"}
    return row


# ---- the machine ---------------------------------------------------------------------------------


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of a cluster"""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def clusters_at_once(smem=200 << 10):
    """How many clusters of each size run at the same time, with so much shared memory a block."""
    import torch

    torch.zeros(1, device="cuda")  # a context
    cu = ctypes.CDLL("libcuda.so.1")
    spec = plgpu.ShapeDtypeStruct((256, 256), plgpu.numpy.bfloat16)
    low = matmul.kernel(spec, spec).lower(spec, spec)
    module, function, n = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    assert cu.cuModuleLoadData(ctypes.byref(module), low.cubin()) == 0
    assert cu.cuModuleEnumerateFunctions(ctypes.byref(function), 1, module) == 0
    cu.cuFuncSetAttribute(function, 8, ctypes.c_int(smem))  # dynamic shared memory
    cu.cuFuncSetAttribute(function, 14, ctypes.c_int(1))  # clusters above 8
    found = {}
    for size in (1, 2, 4, 8, 16):
        attribute = _Attribute(4, 0, (ctypes.c_uint * 16)(size, 1, 1))
        shape = (ctypes.c_uint * 3)(size * 256, 1, 1), (ctypes.c_uint * 3)(256, 1, 1)
        launch = _Launch(*shape, smem, None, ctypes.pointer(attribute), 1)
        status = cu.cuOccupancyMaxActiveClusters(ctypes.byref(n), function, ctypes.byref(launch))
        found[size] = n.value if status == 0 else f"error {status}"
    return found


# ---- tables --------------------------------------------------------------------------------------


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows):
    timed = [r for r in rows if "ops" in r["ratio"]]
    if not timed:
        return
    print(
        "\n| class | products | geometric mean | minimum | below 0.98 |\n|---|---:|---:|---:|---:|"
    )
    classes = {"all": timed}
    for r in timed:
        classes.setdefault(r["kind"], []).append(r)
        classes.setdefault(r["dtype"], []).append(r)
        classes.setdefault("up to 64 rows" if r["m"] <= 64 else "more rows", []).append(r)
    for name, members in classes.items():
        ratios = [r["ratio"]["ops"][0] for r in members]
        low = sum(x < 0.98 for x in ratios)
        print(f"| {name} | {len(ratios)} | {geomean(ratios):.3f} | {min(ratios):.3f} | {low} |")
    print("\n| the ten slowest beside torch | torch, us | ops, us | ratio | configuration |")
    print("|---|---:|---:|---:|---|")
    for r in sorted(timed, key=lambda r: r["ratio"]["ops"][0])[:10]:
        us, ratio = r["us"], r["ratio"]["ops"][0]
        print(f"| {r['text']} | {us['torch'][0]:.2f} | {us['ops'][0]:.2f} | {ratio:.3f} |"
              f" {r['chosen']} |")  # fmt: skip


def print_configs(row):
    print(f"\n{row['text']}: torch {row['us']['torch'][0]:.2f} us, chosen {row['chosen']}")
    best = sorted((t[0], n) for n, t in row["us"].items() if n != "torch")
    for us, name in best[:8]:
        print(f"  {us:8.2f} us {row['ratio'][name][0]:.3f} {name}")


def family(config):
    """What configurations differ in that are not only more or less of the same."""
    divided = config.slices > 1, config.shares > 1, config.swapped
    return config[:2], config.cluster, config.cluster_n, config.split, config.step, divided


def configs_of(gemm, most, wide):
    """Of those the chooser looks at, the best one of each family by the estimate, best first, and
    with wide as many of those that it does not look at."""
    in_bytes = 1 if gemm.dtype.startswith("float8") else 2
    misaligned = misaligned_rows((gemm.k, gemm.k if gemm.nt else gemm.n), in_bytes)

    def best(found, most, rates):
        of_families = {}
        how = {"in_bytes": in_bytes, "misaligned": misaligned, "rates": rates}
        for cfg in sorted(found, key=lambda c: cycles(gemm.m, gemm.n, gemm.k, c, 132, **how)):
            of_families.setdefault(family(cfg), cfg)
        return list(of_families.values())[:most]

    shape = gemm.m, gemm.n, gemm.k
    found = candidates(*shape, in_bytes=in_bytes, tb=gemm.nt, swaps=gemm.m)
    found = best(found, most, rates_of(gemm.m, in_bytes))
    if wide:
        found += best(wide_candidates(*shape, in_bytes=in_bytes, tb=gemm.nt), WIDE, WIDE_RATES)
    return [None, *found]


def slow(path, ratio):
    """The products of an earlier run below that ratio, the slowest first."""
    by_case = {}
    for row in results.read(path)["rows"]:
        by_case.setdefault(row["case"], {})[row["contestant"]] = row["seconds"][0]
    found = {n: t["torch"] / t["ops"] for n, t in by_case.items() if len(t) > 1}
    return sorted((n for n in found if found[n] < ratio), key=found.get)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=400, help="seconds")
    results.argument(parser)
    parser.add_argument("--only", nargs="*", help="classes: aligned, odd, flat, deep")
    parser.add_argument("--sizes", nargs="*", help="MxNxK:dtype[:nt] in place of the suite")
    parser.add_argument("--configs", action="store_true", help="several configurations of each")
    parser.add_argument("--families", type=int, default=FAMILIES, help="of --configs")
    parser.add_argument("--wide", action="store_true", help="also what the choice does not take")
    parser.add_argument("--below", type=float, metavar="RATIO", help="products to time")
    parser.add_argument("--of", metavar="FILE", default=EARLIER, help="of an earlier run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile-only", action="store_true", help="without a GPU")
    args = parser.parse_args()
    global FOUND
    FOUND = results.Results(__file__, args.json)
    start = time.perf_counter()
    sizes = args.sizes or (CONFIG_SIZES if args.configs else None)
    if args.below:
        sizes = slow(args.of, args.below)
    gemms = [parse(x) for x in sizes] if sizes else suite()
    gemms = [g for g in gemms if not args.only or g.kind in args.only]
    todo = {g: configs_of(g, args.families, args.wide) if args.configs else [None] for g in gemms}
    compile_all([(g, c and tuple(c)) for g in gemms for c in todo[g]])
    if args.compile_only:
        return
    data = {"rows": [], "left_out": []}
    if args.configs:
        data["clusters_at_once"] = clusters_at_once()
        print(f"clusters at the same time: {data['clusters_at_once']}")
    for gemm in gemms:
        if time.perf_counter() - start > args.budget:
            data["left_out"].append(gemm.text)
            continue
        row = time_one(gemm, todo[gemm], args.rounds)
        data["rows"].append(row)
        if args.configs:
            print_configs(row)
        elif "ops" in row["us"]:
            us = {n: round(t[0], 2) for n, t in row["us"].items()}
            print(f"{gemm.text} {us} {row['ratio']['ops'][0]:.3f}", flush=True)
        for failure in row["failed"]:
            print(f"  {gemm.text} {failure}")
    if data["left_out"]:
        print(f"\nleft out after {args.budget:.0f} s: {', '.join(data['left_out'])}")
    summary(data["rows"])


if __name__ == "__main__":
    main()
