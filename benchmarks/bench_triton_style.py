"""Kernels in the style of Pallas' Triton backend: the same bodies, compiled by pallas_mgpu and by
JAX's Triton backend.

    python benchmarks/bench_triton_style.py [--only WORD ...] [--quick]

The kernels are those of examples/triton_kernels.py; for JAX their text is run with JAX's imports.
Random normal input; the results of both are compared before anything is timed. Calls of both take
turns, in bursts, timed by the host's clock until the GPU is done; a call makes a new result.
Medians, and the geometric mean of the ratios. Without JAX only pallas_mgpu is timed."""

import argparse
import math
import os
import sys
import time
import types
import warnings
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import results
from bench_jax_kernels import seconds_each

import pallas_mgpu as plgpu

BOUND = 4e-3  # of the largest difference, by the largest number
SOURCE = Path(__file__).parent.parent / "examples" / "triton_kernels.py"
HERE = """import pallas_mgpu as plgpu
from pallas_mgpu import ShapeDtypeStruct, lax, pl, vmap
from pallas_mgpu import numpy as jnp
"""
THERE = """from jax import ShapeDtypeStruct, lax, numpy as jnp, vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
"""


def kernels(imports):
    """The module of kernels with these imports."""
    text = SOURCE.read_text()
    assert HERE in text
    module = types.ModuleType("triton_kernels")
    exec(compile(text.replace(HERE, imports), str(SOURCE), "exec"), module.__dict__)
    return module


def normal(rng, *shape, dtype=np.float16):
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def cases(rng):
    """(title, make(module), arrays)."""
    f32 = np.float32
    for rows, n in ((8192, 4096), (16384, 1024), (4096, 8192)):
        x, w, b = (normal(rng, *s, dtype=f32) for s in ((rows, n), (n,), (n,)))
        for name, arrays in (("softmax", (x,)), ("layer_norm", (x, w, b)), ("rms_norm", (x, w))):

            def rows_of(m, name=name, rows=rows, n=n):
                return getattr(m, name)(rows, n, f32)

            yield f"{name} {rows}x{n}", rows_of, arrays
    for b, seq, h, d, causal, block in (
        (2, 2048, 8, 128, False, 64),
        (2, 2048, 8, 128, True, 64),
        (2, 2048, 8, 128, False, 128),
        (4, 1024, 16, 64, False, 64),
        (4, 4096, 8, 64, True, 64),
    ):
        q, k, v, do = (normal(rng, b, seq, h, d) for _ in range(4))
        title = f"{b}x{seq}x{h}x{d}{', causal' if causal else ''}, blocks of {block}"

        def forward(m, b=b, seq=seq, h=h, d=d, causal=causal, block=block):
            warps = 8 if block == 128 else 4
            return m.mha(b, seq, h, d, np.float16, causal, block, block, num_warps=warps)

        yield f"mha {title}", forward, (q, k, v)

        def backward(m, b=b, seq=seq, h=h, d=d, causal=causal, block=block):
            return m.mha_backward(b, seq, h, d, np.float16, causal, block, block)

        if block == 64 and d == 64:
            lse = np.full((b, h, seq), math.log2(seq), f32)
            delta = normal(rng, *lse.shape, dtype=f32)
            yield f"mha backward {title}", backward, (q, k, v, do, lse, delta)
    b, seq, h, kv, d, page = 16, 4096, 32, 8, 128, 16
    q, k, v = normal(rng, b, h, d), normal(rng, b, seq, kv, d), normal(rng, b, seq, kv, d)
    lengths = rng.integers(seq // 2, seq, b).astype(np.int32)
    yield (
        f"decode {b}x{seq}x{h}/{kv}x{d}",
        lambda m: m.decode(b, seq, h, kv, d, splits=8),
        (q, k, v, lengths),
    )
    pages = b * seq // page
    table = rng.permutation(pages).reshape(b, -1).astype(np.int32)
    cache = [normal(rng, kv, pages, page, d) for _ in range(2)]
    yield (
        f"paged {b}x{seq}x{h}/{kv}x{d}",
        lambda m: m.paged(b, seq // page, pages, page, h, kv, d, splits=8),
        (q, *cache, table, lengths),
    )


def runner(call, arrays, done):
    """run(n): n calls, until the last is done; the result of the last."""

    def run(n):
        for _ in range(n):
            out = call(*arrays)
        done(out)
        return out

    return run


def ours(make, arrays):
    arrays = [plgpu.device_put(x) for x in arrays]
    return runner(make(kernels(HERE)), arrays, lambda _: plgpu.synchronize())


def of_jax(make, arrays):
    import jax

    arrays = [jax.device_put(x) for x in arrays]
    return runner(jax.jit(make(kernels(THERE))), arrays, jax.block_until_ready)


def difference(got, want):
    """The largest of any output, by its largest number."""
    pairs = [
        (np.asarray(x, np.float32), np.asarray(y, np.float32))
        for x, y in zip(plgpu.tree.leaves(got), want)
    ]
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="titles with one of these words")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    results.argument(parser)
    args = parser.parse_args()
    args.found = results.Results(__file__, args.json)
    warnings.simplefilter("ignore")
    try:
        import jax
    except ImportError:
        jax = None
    start, ratios, wrong = time.perf_counter(), [], []
    print("| kernel | pallas_mgpu, us | Triton, us | Triton / pallas_mgpu |\n|---|---:|---:|---:|")
    for title, make, arrays in cases(np.random.default_rng(0)):
        if args.only and not any(word in title for word in args.only):
            continue
        runs, error = {"pallas_mgpu": ours(make, arrays)}, None
        try:
            if jax:
                other = of_jax(make, arrays)
                error = difference(runs["pallas_mgpu"](1), jax.tree.leaves(other(1)))
                if not error < BOUND:
                    wrong.append(title)
                    print(f"{title}: WRONG, error {error:.2e}", file=sys.stderr)
                    continue
                runs["Triton"] = other
        except Exception as e:  # what this JAX cannot compile is no reason to time nothing
            print(f"{title}: JAX: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
        spreads = seconds_each(runs, 7 if args.quick else 21)
        args.found.add(
            "kernels in Triton's style", title, {"host": spreads}, ours="pallas_mgpu",
            errors={"pallas_mgpu": error},
        )  # fmt: skip
        t = {name: x[0] for name, x in spreads.items()}
        us = t["pallas_mgpu"] * 1e6
        if "Triton" not in t:
            print(f"| {title} | {us:.0f} | | |", flush=True)
            continue
        ratios.append(t["Triton"] / t["pallas_mgpu"])
        print(f"| {title} | {us:.0f} | {t['Triton'] * 1e6:.0f} | {ratios[-1]:.3f} |", flush=True)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\ngeometric mean {mean:.3f}, least {min(ratios):.3f}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
