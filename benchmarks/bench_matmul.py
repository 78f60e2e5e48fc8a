"""The one-thread pipelined matmul beside torch.matmul and beside the same program under JAX's
Pallas.

    python benchmarks/bench_matmul.py [--quick] [--sizes 8192x8192x8192:bfloat16 ...]

Random normal input, a fresh one per size; every contestant's result is checked against a float32
product before it is timed; the output is poisoned first. JAX runs the very function object of
pallas_mgpu._matmul with its global names bound to JAX's modules."""

import argparse
import sys
import types

import numpy as np
import results
import torch
from timing import turns

import pallas_mgpu as plgpu
from pallas_mgpu import _matmul

SIZES = ("8192x8192x8192:bfloat16", "4096x8192x4096:float16")
CONFIGS = (  # tile_m, tile_n, steps, group
    (128, 128, 3, 8),
    (128, 128, 3, 16),
    (128, 128, 4, 8),
    (128, 128, 6, 8),
)
BOUND = {"bfloat16": 3e-3, "float16": 4e-4}


def jax_matmul():
    """`matmul_kernel` with JAX's Pallas under the same names; None and why if JAX cannot."""
    try:
        import jax
        import jax.experimental.pallas as pl
        import jax.experimental.pallas.mosaic_gpu as jplgpu
        from jax import lax
        from jax import numpy as jnp
    except Exception as e:  # noqa: BLE001 - any failure means: no JAX column
        return None, f"{type(e).__name__}: {e}"

    class Names:
        ShapeDtypeStruct = jax.ShapeDtypeStruct

        def __getattr__(self, name):
            return getattr(jplgpu, name)

        @staticmethod
        def kernel(body, *, out_type, interpret=None, **kw):
            try:
                return jplgpu.kernel(body, out_type=out_type, **kw)
            except TypeError:
                return jplgpu.kernel(body, out_shape=out_type, **kw)

    f = _matmul.matmul_kernel
    names = {"plgpu": Names(), "pl": pl, "lax": lax, "jnp": jnp, "__builtins__": __builtins__}
    g = types.FunctionType(f.__code__, names, f.__name__, f.__defaults__)
    g.__kwdefaults__ = f.__kwdefaults__

    def make(m, n, k, dtype, **config):
        kernel = g(m, n, k, getattr(jnp, dtype), **config)
        run = jax.jit(kernel)
        return lambda a, b: run(jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b)), run, jax

    return make, jax.__version__


def check(name, got, want, bound):
    error = float((got.float() - want).norm() / want.norm())
    if not error < bound:
        sys.exit(f"{name}: relative error {error:.2e} is not below {bound:.0e}")
    return error


FOUND = None  # results.Results


def bench(text, quick, make_jax):
    shape, dtype = text.split(":")
    m, n, k = map(int, shape.split("x"))
    tdt = getattr(torch, dtype)
    a = torch.randn(m, k, device="cuda").to(tdt)
    b = torch.randn(k, n, device="cuda").to(tdt)
    want = a.float() @ b.float()
    bound = BOUND[dtype]
    out = torch.empty(m, n, device="cuda", dtype=tdt)
    ref = torch.empty_like(out)
    contestants = {"torch.matmul": lambda: torch.matmul(a, b, out=ref)}
    errors = {}
    torch.matmul(a, b, out=ref)
    errors["torch.matmul"] = check("torch.matmul", ref, want, bound)
    for tm, tn, steps, group in CONFIGS[: 2 if quick else None]:
        kernel = _matmul.matmul_kernel(
            m,
            n,
            k,
            np.dtype(plgpu.numpy.dtype(dtype)),
            tile_m=tm,
            tile_n=tn,
            steps=steps,
            group=group,
        )
        name = f"pallas_mgpu {tm}x{tn}, {steps} steps, group {group}"
        out.fill_(float("nan"))
        kernel(a, b, out=out)
        errors[name] = check(name, out, want, bound)
        contestants[name] = lambda kernel=kernel: kernel(a, b, out=out)
    if make_jax is not None:
        import jax

        ja, jb = jax.dlpack.from_dlpack(a), jax.dlpack.from_dlpack(b)
        for tm, tn, steps, group in CONFIGS[: 1 if quick else None]:
            name = f"JAX's Pallas {tm}x{tn}, {steps} steps, group {group}"
            try:
                _, run, _ = make_jax(m, n, k, dtype, tile_m=tm, tile_n=tn, steps=steps, group=group)
                got = torch.from_dlpack(run(ja, jb))
            except Exception as e:  # noqa: BLE001 - reported in the table
                print(f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:160]}")
                continue
            errors[name] = check(name, got, want, bound)
            contestants[name] = lambda run=run: run(ja, jb)
    times = turns(contestants, torch.cuda.synchronize, rounds=8 if quick else 20)
    title = f"{m} x {n} x {k} {dtype}"
    FOUND.add(
        "one thread", title, {"host": times}, ours="pallas_mgpu", work=2 * m * n * k, errors=errors
    )
    base = times["torch.matmul"][0]
    print(f"\n### {m} x {n} x {k} {dtype}\n")
    print("| contestant | TFLOP/s (median) | range | ratio to torch | relative error |")
    print("|---|---:|---|---:|---:|")
    flop = 2 * m * n * k / 1e12
    for name, (t, lo, hi) in times.items():
        print(
            f"| {name} | {flop / t:.0f} | {flop / hi:.0f} to {flop / lo:.0f} | {base / t:.3f} |"
            f" {errors[name]:.1e} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--no-jax", action="store_true")
    results.argument(parser)
    args = parser.parse_args()
    global FOUND
    FOUND = results.Results(__file__, args.json, "least to greatest")
    make_jax, version = (None, "not asked for") if args.no_jax else jax_matmul()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, JAX {version}")
    for size in args.sizes:
        bench(size, args.quick, make_jax)


if __name__ == "__main__":
    main()
