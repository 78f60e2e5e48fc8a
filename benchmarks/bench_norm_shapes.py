"""ops.softmax, rms_norm and layer_norm of many widths, heights and axes, beside the fastest copy.

    python benchmarks/bench_norm_shapes.py [--budget SECONDS] [--below SHARE] [--no-torch]
        [--only TEXT] [--workers N] [--config "height=32, cluster=8, ..."] [--json FILE]

Rows of 64 to 151936 elements, among them odd ones and widths of models, reductions along other
axes, arrays that begin after a multiple of 16 bytes; bfloat16 and float32. A call moves 64 MiB (32
read, 32 written), or 256; calls go round over five pairs of arrays, 320 MiB (two of 512). Medians
of bursts in CUDA graphs, alternating contestants (plgpu.testing.do_bench), beside torch and three
copies of as many bytes. Kernels are compiled in several processes first, and checked there against
float32 on a poisoned output. --below prints cases with a smaller share of the copy's bandwidth.
--only: the cases whose names contain the text; --config: with this ops.NormConfig."""

import argparse
import ast
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, wait
from typing import NamedTuple

import results
import torch

import pallas_mgpu as plgpu
from pallas_mgpu import ops, pl
from pallas_mgpu.ops import _open_rows
from pallas_mgpu.testing import do_bench

_open_rows.STATIC = 1 << 30  # programs of one shape, as calls that come often have them
OPS = ("softmax", "rms_norm", "layer_norm")
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ODD_WIDTHS = (100, 777, 5000, 50257, 128256)
MODEL_WIDTHS = (768, 1152, 1536, 2560, 3072, 11008, 18432, 36864, 151936)  # in bfloat16
LARGE_WIDTHS = (1024, 16384, 65536, 131072, 50257)  # where 256 MiB move
EPSILON = 1e-5
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 2e-5}
SHIFTED = 1  # elements


class Case(NamedTuple):
    op: str
    dtype: torch.dtype
    shape: tuple
    axis: int | tuple
    mib: int = 64  # of memory that a copy of as large an array moves
    shift: int = 0  # elements between a multiple of 16 bytes and the first one

    def __str__(self):
        name = str(self.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, self.shape))
        where = "" if self.axis == -1 else f", axis {self.axis}"
        moved = "" if self.mib == 64 else f", {self.mib} MiB"
        return f"{self.op} {shape} {name}{where}{moved}" + (", unaligned" if self.shift else "")

    @property
    def row(self):
        """The shape of weight and bias."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return tuple(self.shape[a] for a in axes)


def cases():
    for mib, dtype in ((64, torch.bfloat16), (64, torch.float32), (256, torch.bfloat16)):
        n = mib * 2**19 // dtype.itemsize
        widths = (*WIDTHS, *ODD_WIDTHS) if mib == 64 else LARGE_WIDTHS
        if mib == 64 and dtype == torch.bfloat16:
            widths += MODEL_WIDTHS
        for width in widths:
            for op in OPS:
                yield Case(op, dtype, (n // width, width), -1, mib)
        if mib > 64:
            continue
        for shape, axis in (
            ((4096, n // 4096), 0),
            ((512, n // 512), 0),
            ((64, n // 64), 0),
            ((n // 512, 512), 0),
            ((64, n // 64 // 128, 128), 1),
            ((16, 4096, n // 65536), 1),
            ((3333, n // 3333 // 8 * 8), 0),
            ((777, n // 777), 0),
            ((5, 77, n // 385), 1),
        ):
            yield Case("softmax", dtype, shape, axis)
        for shape in ((256, 64), (4, 16, 64), (7, 7, 64), (256, 256)):
            axes = tuple(range(-len(shape), 0))
            yield Case("layer_norm", dtype, (n // math.prod(shape), *shape), axes)
    for width in (777, 4096, 50257):
        for op in OPS:
            rows = 2**24 // width - 1
            yield Case(op, torch.bfloat16, (rows, width), -1, shift=SHIFTED)


def config_of(text):
    fields = (field.split("=") for field in text.split(","))
    return ops.NormConfig(**{name.strip(): ast.literal_eval(value) for name, value in fields})


def vectors(case):
    torch.manual_seed(2)
    count = OPS.index(case.op)
    return [torch.randn(case.row, device="cuda").to(case.dtype) for _ in range(count)]


def of_ops(case, config):
    more = {"config": config} | ({} if case.op == "softmax" else {"eps": EPSILON})
    f, given = getattr(ops, case.op), vectors(case)
    return lambda x, out: f(x, *given, axis=case.axis, out=out, **more)


def of_torch(case, given):
    f = torch.nn.functional
    if case.op == "softmax":
        return lambda x: torch.softmax(x, case.axis)
    if case.op == "rms_norm":
        return lambda x: f.rms_norm(x, case.row, *given, eps=EPSILON)
    return lambda x: f.layer_norm(x, case.row, *given, eps=EPSILON)


def shifted(x, elements):
    if not elements:
        return x
    y = x.new_empty(x.numel() + elements)[elements:].view(x.shape)
    return y.copy_(x)


def check(case, config):
    """Compiles the kernel into the cache on disk; (relative error, None) or (None, what is wrong).
    Runs in a process of its own."""
    try:
        torch.manual_seed(1)
        x = shifted(torch.randn(case.shape, device="cuda").to(case.dtype), case.shift)
        want = of_torch(case, [v.float() for v in vectors(case)])(x.float())
        got = shifted(torch.full_like(x, math.nan), case.shift)
        of_ops(case, config)(x, got)
        error = ((got.float() - want).norm() / want.norm()).item()
        why = None if error < TOLERANCE[case.dtype] else f"relative error {error}"
        return (error, None) if why is None else (None, why)
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"[:300]


def start():
    torch.zeros(1, device="cuda")


class Buffers:
    """Pairs of arrays of each size, as many as calls go round over."""

    def __init__(self):
        self.pools = {}

    def pairs(self, mib, dtype, shape, shift=0):
        n, count = math.prod(shape), 5 if mib == 64 else 2
        if (mib, dtype) not in self.pools:
            size = count, mib * 2**19 // dtype.itemsize + 512  # begin at multiples of 1 KiB
            x = torch.randn(size, device="cuda").to(dtype)
            self.pools[mib, dtype] = x, torch.empty_like(x)
        pools = self.pools[mib, dtype]
        return [[p[i, shift : n + shift].view(shape) for p in pools] for i in range(count)]


def _copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def copies(buffers, mib):
    """The copies that cases are compared with, by name: of so many MiB."""
    n = mib * 2**18
    found = {"copy of torch": [
        lambda x=x, o=o: o.copy_(x) for x, o in buffers.pairs(mib, torch.bfloat16, (n,))
    ]}  # fmt: skip
    for elements in (8192, 16384):
        shape = n // elements, elements
        block = pl.BlockSpec((1, elements), lambda i: (i, 0))
        f = pl.pallas_call(
            _copy_body,
            out_shape=plgpu.ShapeDtypeStruct(shape, "bfloat16"),
            grid=(shape[0],),
            in_specs=[block],
            out_specs=block,
        )
        pairs = buffers.pairs(mib, torch.bfloat16, shape)
        found[f"copy in parts of {elements}"] = [
            lambda x=x, o=o, f=f: f(x, out=o) for x, o in pairs
        ]
    return found


def time_together(group, errors, buffers, args):
    """Times the cases of one array in turns; the share of each in the bandwidth of the copy."""
    named, first = copies(buffers, group[0].mib), group[0]
    pairs = buffers.pairs(first.mib, first.dtype, first.shape, first.shift)
    for case in group:
        f = of_ops(case, args.config)
        named[f"ops {case}"] = [lambda x=x, o=o, f=f: f(x, o) for x, o in pairs]
        if not args.no_torch:
            g = of_torch(case, vectors(case))
            named[f"torch {case}"] = [lambda x=x, g=g: g(x) for x, _ in pairs]
    found = do_bench(named, ways="burst", rounds=args.rounds, graphs=True)["burst"]
    copied = {name: t for name, t in found.items() if name.startswith("copy")}
    least = min(t.median for t in copied.values())
    shares = {}
    for case in group:
        moved = 2 * math.prod(case.shape) * case.dtype.itemsize
        # a copy of the bytes that this case moves
        copy_time = least * moved / (case.mib * 2**20)
        shares[case] = copy_time / found[f"ops {case}"].median
        times = {"copy": tuple(v * moved / (case.mib * 2**20) for v in spread(copied, least))}
        for who in ("ops", "torch"):
            if f"{who} {case}" in found:
                times[who] = results.of_timing(found[f"{who} {case}"])
        axes = {"columns": math.prod(case.row), "share": round(shares[case], 4)}
        args.found.add(
            case.op, str(case), {"burst": times}, work=moved, unit="B",
            errors={"ops": errors[case]}, references="copy", **axes,
        )  # fmt: skip
    return shares, least / (first.mib * 2**20)


def spread(copied, least):
    """Of the fastest copy."""
    return results.of_timing(next(t for t in copied.values() if t.median == least))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds for all")
    parser.add_argument("--below", type=float, default=0.93)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--config", type=config_of, help="fields of an ops.NormConfig")
    results.argument(parser)
    args = parser.parse_args()
    args.found, begin = results.Results(__file__, args.json), time.time()
    todo = [case for case in cases() if args.only in str(case)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context, initializer=start) as pool:
        running = {case: pool.submit(check, case, args.config) for case in todo}
        wait(running.values(), timeout=args.budget / 2)  # nothing else runs while it is timed
        checked = {c: f.result() if f.done() else (None, "no time") for c, f in running.items()}
        pool.shutdown(cancel_futures=True)
    for case, (_, why) in checked.items():
        if why:
            print(f"{case} is not timed: {why}")
    groups, shares, buffers = {}, {}, Buffers()
    for case in todo:
        if not checked[case][1]:
            row = case.row if case.op != "softmax" or case.axis == -1 else ()
            key = case.dtype, case.shape, row, case.mib, case.shift
            groups.setdefault(key, []).append(case)
    errors = {case: error for case, (error, _) in checked.items()}
    for group in groups.values():
        if time.time() - begin > args.budget:
            print(f"no time for {len(todo) - len(shares)} cases")
            break
        found, pace = time_together(group, errors, buffers, args)
        shares |= found
        each = ", ".join(f"{c.op} {share:.3f}" for c, share in found.items())
        print(f"{str(group[0]).partition(' ')[2]}: {each} of {1e-12 / pace:.2f} TB/s", flush=True)
    short = {c: s for c, s in shares.items() if s < args.below}
    print(f"\n{len(shares)} cases, {len(short)} below {args.below}")
    for case, share in sorted(short.items(), key=lambda item: item[1]):
        print(f"{share:.3f} {case}")


if __name__ == "__main__":
    main()
