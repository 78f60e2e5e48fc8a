"""plgpu.estimate beside measured times.

    python benchmarks/bench_estimate.py [--only WORD ...] [--rounds N] [--json FILE]
    python benchmarks/bench_estimate.py --table    # without a GPU: beside times that are kept
    python benchmarks/bench_estimate.py --random 102 103 104    # kernels of estimate_random.py

Each kernel of estimate_cases.py runs on random operands; its results must have no NaN (whether
they are right is the matter of the other benchmarks). Times are of calls in CUDA graphs that go
on for 0.15 s (sustained), as the estimate is of a GPU whose power is what limits its clock. At
the end: the median of the errors and how many are below 20 %, of cases that were used to choose
the constants of the model and of the others."""

import argparse
import statistics
import sys
import time
import warnings

import estimate_cases
import estimate_random
import numpy as np
import results

import pallas_mgpu as plgpu


def array(spec, torch):
    """Random on the GPU; integers are small."""
    name = np.dtype(spec.dtype).name
    if name in ("int4", "uint4"):
        return plgpu.device_put(np.random.randint(-8, 8, spec.shape).astype(spec.dtype))
    if name.startswith(("int", "uint")):
        return torch.randint(-100, 100, spec.shape, device="cuda").to(getattr(torch, name))
    return torch.randn(spec.shape, device="cuda").to(getattr(torch, name))


def measured(kernel, arrays, rounds, torch):
    """Samples in seconds."""
    given = {}
    if any(isinstance(x, plgpu.DeviceArray) for x in arrays):  # torch has no 4-bit integers
        outs = kernel(*(plgpu.DeviceArray.from_dlpack(x) for x in arrays))
        given["out"] = torch.from_dlpack(outs)
        kernel(*arrays, **given)
    outs = plgpu.tree.leaves(given["out"] if given else kernel(*arrays))
    outs = [x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in outs]
    torch.cuda.synchronize()
    for out in outs:
        if out.dtype.is_floating_point and out.element_size() > 1:
            assert not torch.isnan(out).any(), "NaN in a result"
    timing = plgpu.testing.do_bench(
        lambda: kernel(*arrays, **given), ways="sustained", rounds=rounds, graphs=True
    )
    return timing["sustained"].samples


def report(found):
    """found: [(case, predicted, measured)] in seconds"""
    print("\n| cases | number | median error | within 20 % |\n|---|---:|---:|---:|")
    groups = {"all": lambda c: True, "used for fitting": lambda c: c.fitted}
    groups["not used"] = lambda c: not c.fitted
    kinds = dict.fromkeys(c.kind for c, _, _ in found)
    groups.update({f"{k}": lambda c, k=k: c.kind == k for k in kinds})
    for name, has in groups.items():
        errors = [abs(p / m - 1) for c, p, m in found if has(c)]
        if errors:
            within = sum(e <= 0.2 for e in errors) / len(errors)
            print(f"| {name} | {len(errors)} | {statistics.median(errors):.1%} | {within:.0%} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="kinds or parts of names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", default="H200", choices=("H200", "H100"))
    parser.add_argument("--table", action="store_true", help="no GPU: times of estimate_cases.py")
    parser.add_argument("--random", nargs="*", type=int, default=[], help="seeds")
    results.argument(parser)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    kept, found, start = results.Results(__file__, args.json), [], time.perf_counter()
    print("| case | predicted, us | measured, us | ratio | bound |\n|---|---:|---:|---:|---|")
    seeds = [c for seed in args.random for c in estimate_random.cases(seed)]
    for case in seeds or estimate_cases.cases():
        title = f"{case.kind}: {case.name}"
        if args.only and not any(word in title for word in args.only):
            continue
        kernel, operands = case.make()
        if not hasattr(kernel, "lower") or hasattr(kernel, "lower_each"):
            print(f"{title}: several kernels", file=sys.stderr)
            continue
        lowered = kernel.lower(*operands)
        e = plgpu.estimate(lowered, gpu=args.gpu, cold=case.cold, values=case.values)
        if args.table:
            if case.us is None:
                continue
            samples = [case.us / 1e6]
        else:
            import torch

            arrays = [
                torch.from_numpy(case.values[k]).cuda() if k in case.values else array(x, torch)
                for k, x in enumerate(operands)
            ]
            samples = measured(kernel, arrays, args.rounds, torch)
            del arrays
            torch.cuda.empty_cache()
        middle = statistics.median(samples)
        found.append((case, e.seconds, middle))
        kept.add_samples(
            "estimate", title, {"ops": samples, "predicted": [e.seconds]},
            references="predicted", fitted=int(case.fitted),
        )  # fmt: skip
        mark = " *" if case.fitted else ""
        print(
            f"| {title}{mark} | {e.seconds * 1e6:.2f} | {middle * 1e6:.2f} |"
            f" {e.seconds / middle:.3f} | {e.bound} |",
            flush=True,
        )
    report(found)
    print(f"\n* used to choose constants. {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
