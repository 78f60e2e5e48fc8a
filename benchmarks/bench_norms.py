"""ops.softmax, rms_norm, layer_norm, and those of examples/, against the bandwidth of copies.

    python benchmarks/bench_norms.py [--only softmax|rms_norm|layer_norm] [--columns N ...]
        [--rows N] [--megabytes M] [--tune] [--no-jax] [--no-compile] [--quick]

bfloat16, random normal; arrays of M = 128 MB, several times the L2 cache. Every contestant is
checked against float32 in the same process, its output poisoned before. Bandwidth counts each array
once (read or written); "of copy" is relative to the fastest copy in the same table, which moves the
same bytes. Beside: torch, torch.compile, Triton, JAX's Pallas on Triton and on Mosaic GPU, where
they run. --tune adds other configurations, block sizes and depths. A short table comes last."""

import argparse
import functools
import runpy
from pathlib import Path

import results
import torch
from timing import all_ways

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu import ops, pl
from pallas_mgpu.ops import NormConfig, _norms_ring

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

EXAMPLES = Path(__file__).parent.parent / "examples"
SOFTMAX = runpy.run_path(str(EXAMPLES / "fused_softmax.py"))
NORM = runpy.run_path(str(EXAMPLES / "rms_norm.py"))
EPSILON = NORM["EPSILON"]
OPS = ("softmax", "rms_norm", "layer_norm")
COLUMNS = (1024, 2048, 4096, 8192, 16384, 65536)
LONG = 32768  # columns from which on a row goes by in chunks


# ---- contestants: functions that launch, by name -------------------------------------------------


def pallas_copy(shape, elements):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows, part = max(1, elements // shape[1]), min(shape[1], elements)
    block = pl.BlockSpec((rows, part), lambda i, j: (i, j))
    return pl.pallas_call(
        body,
        out_shape=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16),
        grid=(pl.cdiv(shape[0], rows), pl.cdiv(shape[1], part)),
        in_specs=[block],
        out_specs=block,
    )


def copies(x, out):
    yield "torch copy_", lambda: out.copy_(x)
    for elements in (8192, 16384):
        f = pallas_copy(tuple(x.shape), elements)
        yield f"pallas_mgpu copy, {elements}", lambda f=f: f(x, out=out)


def ours(op, shape, tune):
    """Functions of arrays and out, by name."""
    f = getattr(ops, op)
    yield "ops", f
    if tune:
        for config in configs(op, shape[1]):
            yield f"ops {tuple(config)}", functools.partial(f, config=config)
    if op != "layer_norm":
        yield from examples(op, shape, tune)


def configs(op, columns):
    for height in (1, 2, 4, 8):
        if 1024 <= height * columns <= 16384:
            for part in (0, 4096) if columns > 4096 else (0,):
                yield NormConfig(height, 1, part)
    for cluster in (2, 4, 8):
        width = columns // cluster
        if 2048 <= width <= 32768:
            for part in (0, 4096):
                if part < width and (part or width <= 16384):
                    yield NormConfig(1, cluster, part)
    for consumers in (1, 2, 3) if columns > 16384 else ():
        for ring in (8192, 4096, 2048):
            if not _norms_ring.Plan(1, columns, 2, ring, consumers, 1).why_not():
                yield NormConfig(ring=ring, consumers=consumers)


def examples(op, shape, tune):
    """The kernels of the examples."""
    make, make_long = (
        (SOFTMAX["make_softmax"], SOFTMAX["make_long_softmax"])
        if op == "softmax"
        else (NORM["make_rms_norm"], NORM["make_long_rms_norm"])
    )
    dtype = jnp.bfloat16
    if shape[1] >= LONG:
        yield "example", make_long(shape, dtype)
        if tune:
            for chunk, steps in ((4096, 4), (4096, 8), (8192, 2), (8192, 6), (16384, 2)):
                yield (
                    f"example, chunks of {chunk}, {steps} steps",
                    make_long(shape, dtype, chunk=chunk, steps=steps),
                )
        return
    yield "example", make(shape, dtype)
    if tune:
        for elements in (2048, 4096, 16384):
            if max(elements, shape[1]) != max(8192, shape[1]):
                yield f"example, {elements} elements", make(shape, dtype, elements)


REFERENCE = {
    "rms_norm": torch.nn.functional.rms_norm,
    "layer_norm": torch.nn.functional.layer_norm,
}


def of_torch(op, x, w, compiled):
    if op == "softmax":

        def f(x):
            return torch.softmax(x, -1)

        args = (x,)
    else:

        def f(x, w):
            return REFERENCE[op](x, (x.shape[1],), w, eps=EPSILON)

        args = (x, w)
    yield "torch", lambda: f(*args)
    if compiled:
        g = torch.compile(f, dynamic=False)
        yield "torch.compile", lambda: g(*args)


if triton:

    @triton.jit
    def _triton_softmax(x, o, n, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=-float("inf")).to(tl.float32)
        e = tl.exp(v - tl.max(v, axis=0))
        tl.store(o + row * n + at, (e / tl.sum(e, axis=0)).to(tl.bfloat16), mask=at < n)

    @triton.jit
    def _triton_norm(x, w, o, n, eps, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, axis=0) / n + eps)
        g = tl.load(w + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(o + row * n + at, (v * scale * g).to(tl.bfloat16), mask=at < n)

    @triton.jit
    def _triton_layer(x, w, o, n, eps, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        v = tl.where(at < n, v - tl.sum(v, axis=0) / n, 0.0)
        scale = tl.rsqrt(tl.sum(v * v, axis=0) / n + eps)
        g = tl.load(w + at, mask=at < n, other=0.0).to(tl.float32)
        tl.store(o + row * n + at, (v * scale * g).to(tl.bfloat16), mask=at < n)


def of_triton(op, x, w, out):
    if not triton:
        return
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    for warps in (4, 8, 16) if n < LONG else (16, 32):
        if op == "softmax":

            def f(warps=warps):
                _triton_softmax[(rows,)](x, out, n, BLOCK=block, num_warps=warps)
                return out

        else:

            def f(warps=warps, kernel=_triton_norm if op == "rms_norm" else _triton_layer):
                kernel[(rows,)](x, w, out, n, EPSILON, BLOCK=block, num_warps=warps)
                return out

        yield f"Triton, {warps} warps", f


def of_jax(op, x, w):
    """The body of the examples under JAX's Pallas, on both of its backends."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    rows, n = x.shape

    def softmax(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        e = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
        o_ref[...] = (e * (1 / jnp.sum(e, axis=1, keepdims=True))).astype(o_ref.dtype)

    def norm(x_ref, w_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        if op == "layer_norm":
            x = x - jnp.sum(x, axis=1, keepdims=True) / n
        scale = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / n + EPSILON)
        o_ref[...] = (x * scale * w_ref[...].astype(jnp.float32)[None]).astype(o_ref.dtype)

    def contestant(params, block_rows):
        block = pl.BlockSpec((block_rows, n), lambda i: (i, 0))
        weight = [] if op == "softmax" else [pl.BlockSpec((n,), lambda i: (0,))]
        call = jax.jit(
            pl.pallas_call(
                softmax if op == "softmax" else norm,
                out_shape=jax.ShapeDtypeStruct((rows, n), jnp.bfloat16),
                grid=(pl.cdiv(rows, block_rows),),
                in_specs=[block, *weight],
                out_specs=block,
                compiler_params=params,
            )
        )
        args = [jax.dlpack.from_dlpack(t) for t in ((x,) if op == "softmax" else (x, w))]
        last = []

        def f():
            last[:] = [call(*args)]
            return last[0]

        f.wall = True
        f.result = lambda: torch.from_dlpack(last[0].block_until_ready())
        return f

    def on_triton(warps):
        from jax.experimental.pallas import triton as backend

        return contestant(backend.CompilerParams(num_warps=warps), 1)

    def on_mosaic():
        from jax.experimental.pallas import mosaic_gpu as backend

        return contestant(backend.CompilerParams(approx_math=True), max(1, 8192 // n))

    for warps in (4, 8, 16):
        yield f"JAX's Pallas on Triton, {warps} warps", lambda warps=warps: on_triton(warps)
    yield "JAX's Pallas on Mosaic GPU", on_mosaic


# ---- one table -----------------------------------------------------------------------------------


def expected(op, x, w):
    """In float32, a part of the rows at a time."""
    for part in x.split(max(1, (1 << 24) // x.shape[1])):
        y = part.float()
        if op == "softmax":
            yield torch.softmax(y, -1)
        else:
            yield REFERENCE[op](y, (x.shape[1],), w.float(), eps=EPSILON)


def error(op, got, x, w):
    """Relative, as norms; NaN where anything is not finite."""
    wrong = total = 0.0
    at = 0
    for want in expected(op, x, w):
        part = got[at : at + want.shape[0]].float()
        at += want.shape[0]
        wrong += float((part - want).square().sum())
        total += float(want.square().sum())
    return (wrong / total) ** 0.5


def run(op, shape, args):
    torch.manual_seed(shape[1])
    x = torch.randn(shape, device="cuda").bfloat16()
    w = torch.randn(shape[1], device="cuda").bfloat16()
    out = torch.empty_like(x)
    copied = dict(copies(x, out))
    todo = dict(copied)
    arrays = (x,) if op == "softmax" else (x, w)
    # the epsilon of ops is an option
    options = {} if op == "softmax" else {"eps": EPSILON}
    for name, kernel in ours(op, shape, args.tune):
        given = options if name.startswith("ops") else {}
        todo[name] = functools.partial(kernel, *arrays, out=out, **given)
    todo.update(of_torch(op, x, w, not args.no_compile))
    todo.update(of_triton(op, x, w, out))
    good, errors = {}, {}

    def admit(name, f):
        try:
            out.fill_(float("nan"))
            got = f()
            got = f.result() if hasattr(f, "result") else got
            torch.cuda.synchronize()
            if name in copied:
                e = 0.0 if torch.equal(got, x) else float("nan")
            else:
                e = error(op, got, x, w)
        except Exception as e:
            print(f"{name}: {type(e).__name__}: {str(e)[:160]}")
            return
        errors[name] = e
        if e < 4e-3:
            good[name] = f
        else:
            print(f"{name} is WRONG: relative error {e}")

    for name, f in todo.items():
        admit(name, f)
    if not args.no_jax and shape[1] < LONG:
        try:
            for name, make in of_jax(op, x, w):
                try:
                    admit(name, make())
                except Exception as e:
                    print(f"{name}: {type(e).__name__}: {str(e)[:160]}")
        except ImportError as e:
            print(f"JAX: {e}")
    ways = ("burst",) if args.quick else ("burst", "queued")
    times = all_ways(good, 0.3 if args.quick else 1.0, ways)
    moved = 2 * x.numel() * x.element_size()
    args.found.add(
        op, f"{op} {shape[0]} x {shape[1]}", times, work=moved, unit="B", errors=errors,
        references="torch copy_", columns=shape[1],
    )  # fmt: skip
    print(f"### {op}, {shape[0]} x {shape[1]}, {moved / 2**20:.0f} MiB moved\n")
    print("| kernel | " + " | ".join(f"{way}, GB/s | of copy" for way in ways) + " | error |")
    print("|---|" + "---:|---:|" * len(ways) + "---:|")
    for name in good:
        cells = []
        for way in ways:
            if name not in times[way]:  # its stream is not ours
                cells.append(" | ")
                continue
            middle, low, high = times[way][name]
            best = min(times[way][c][0] for c in copied if c in good)
            rate = [moved / t / 1e9 for t in (middle, high, low)]
            cells.append(f"{rate[0]:.0f} ({rate[1]:.0f} to {rate[2]:.0f}) | {best / middle:.3f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {errors[name]:.1e} |")
    print(flush=True)
    return {way: shares(times[way], [c for c in copied if c in good]) for way in ways}


# of the short table: beginning of a name, whether it is the whole name
GROUPS = {
    "ops": True,
    "ops (": False,  # the best of --tune
    "example": True,
    "torch": True,
    "torch.compile": True,
    "Triton": False,
    "JAX": False,
}


def shares(times, copied):
    """Of the bandwidth of the fastest copy: the fastest of each group, NaN where there is none."""
    copy = min(times[c][0] for c in copied)
    found = {}
    for start, whole in GROUPS.items():
        t = [v[0] for n, v in times.items() if (n == start if whole else n.startswith(start))]
        found[start] = copy / min(t) if t else float("nan")
    return found


def summary(rows):
    way = "queued" if "queued" in next(iter(rows.values())) else "burst"
    names = list(GROUPS)
    print(f"### Summary: bandwidth / that of the fastest copy, {way}\n")
    print("| what | " + " | ".join(names) + " |")
    print("|---|" + "---:|" * len(names))
    for title, row in rows.items():
        cells = ["-" if row[way][n] != row[way][n] else f"{row[way][n]:.3f}" for n in names]
        print(f"| {title} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *OPS])
    parser.add_argument("--columns", type=int, nargs="*", default=COLUMNS)
    parser.add_argument("--rows", type=int, help="instead of as many as the megabytes hold")
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-jax", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    rows = {}
    for op in OPS:
        for columns in args.columns:
            height = args.rows or args.megabytes * 2**20 // 2 // columns
            if args.only in ("", op):
                rows[f"{op} {columns}"] = run(op, (height, columns), args)
    summary(rows)


if __name__ == "__main__":
    main()
