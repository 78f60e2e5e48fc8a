"""Registers, stack, spills and SMEM of the ready kernels, and how long they take to compile.

    python benchmarks/resources.py [--json FILE]

Works without a GPU. The flagship configurations. Times are medians of 5 with the range, Python's
tracing included, without our disk cache and NVRTC's own (--no-cache), in a process that compiled
the kernel before."""

import argparse
import os
import statistics
import time

import results

import pallas_mgpu as plgpu
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import (
    attention,
    layer_norm,
    matmul,
    mixed_matmul,
    ragged_dot,
    rms_norm,
    softmax,
    transposed_ragged_dot,
)


def product(m, n, k, nt=False, **options):
    dims = ((m, k), (n, k) if nt else (k, n))
    spec = [plgpu.ShapeDtypeStruct(x, jnp.bfloat16) for x in dims]
    if nt:
        options["transpose_b"] = True
    return lambda: matmul.kernel(*spec, **options).lower(*spec)


def of_8_bits(size, blocks):
    shapes = [(size, size)] * 2
    shapes += [(size, size // 128), (size // 128,) * 2] if blocks else [(size, 1), (1, size)]
    types = [jnp.float8_e4m3fn] * 2 + [jnp.float32] * 2
    spec = [plgpu.ShapeDtypeStruct(*x) for x in zip(shapes, types)]
    a, b, scale_a, scale_b = spec
    options = dict(transpose_b=True, scale_a=scale_a, scale_b=scale_b)
    return lambda: matmul.kernel(a, b, **options).lower(*spec)


def attend(length, heads, kv_heads, dim, causal):
    q, k = (plgpu.ShapeDtypeStruct((4, length, h, dim), jnp.bfloat16) for h in (heads, kv_heads))
    return lambda: attention.kernel(q, k, k, causal=causal).lower(q, k, k)


def norm(f, columns):
    shapes = ((65536, columns), (columns,), (columns,))
    count = {"softmax": 1, "rms_norm": 2, "layer_norm": 3}[f.__name__]
    spec = [plgpu.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes[:count]]
    return lambda: f.kernel(*spec).lower(*spec)


def grouped(f, m, n, k, groups):
    shapes = ((m, k), (groups, k, n) if f is ragged_dot else (m, n))
    spec = [plgpu.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    spec.append(plgpu.ShapeDtypeStruct((groups,), jnp.int32))
    return lambda: f.kernel(*spec).lower(*spec)


def mixed(m, n, k, weights, groups):
    spec = [
        plgpu.ShapeDtypeStruct((m, k), jnp.bfloat16),
        plgpu.ShapeDtypeStruct((n, k), weights),
        plgpu.ShapeDtypeStruct((groups, n), jnp.bfloat16),
    ]
    return lambda: mixed_matmul.kernel(*spec).lower(*spec)


KERNELS = {
    "matmul 8192 x 8192 x 8192": product(8192, 8192, 8192),
    "matmul 4096 x 8192 x 4096, gelu": product(4096, 8192, 4096, activation="gelu"),
    "matmul 2048 x 2048 x 2048": product(2048, 2048, 2048),
    "matmul 1024 x 1024 x 1024": product(1024, 1024, 1024),
    "matmul 64 x 4096 x 4096": product(64, 4096, 4096),
    "matmul 1 x 4096 x 4096": product(1, 4096, 4096),
    "matmul 1 x 4096 x 4096, B transposed": product(1, 4096, 4096, nt=True),
    "matmul 8192 x 8192 x 8192, float8, scales of rows": of_8_bits(8192, False),
    "matmul 8192 x 8192 x 8192, float8, scales of blocks": of_8_bits(8192, True),
    "attention 4096, dim 64": attend(4096, 32, 32, 64, False),
    "attention 4096, dim 128": attend(4096, 16, 16, 128, False),
    "attention 4096, dim 128, causal": attend(4096, 16, 16, 128, True),
    "attention 4096, dim 128, causal, 4 heads of K": attend(4096, 16, 4, 128, True),
    "attention 4096, dim 256, causal": attend(4096, 8, 8, 256, True),
    "softmax 16384": norm(softmax, 16384),
    "rms_norm 4096": norm(rms_norm, 4096),
    "layer_norm 65536": norm(layer_norm, 65536),
    "ragged_dot 32768 x 14336 x 4096, 64 groups": grouped(ragged_dot, 32768, 14336, 4096, 64),
    "mixed_matmul 16 x 8192 x 8192, int4": mixed(16, 8192, 8192, jnp.int4, 64),
    "mixed_matmul 4096 x 8192 x 8192, int4": mixed(4096, 8192, 8192, jnp.int4, 64),
    "transposed_ragged_dot, the same": grouped(transposed_ragged_dot, 32768, 14336, 4096, 64),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    results.argument(parser)
    found = results.Results(__file__, parser.parse_args().json, "least to greatest")
    os.environ["PALLAS_MGPU_NO_CACHE"] = "1"
    os.environ["PALLAS_MGPU_NVRTC_OPTIONS"] = "--no-cache"

    def add(x, o):
        o[...] = x[...] + 1

    x = plgpu.ShapeDtypeStruct((128,), jnp.float32)
    plgpu.kernel(add, out_type=x).lower(x).cubin()
    print("| kernel | threads | registers | stack, bytes | spills, bytes | SMEM, bytes | ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, lower in KERNELS.items():
        r, took = None, []
        for _ in range(6):
            start = time.perf_counter()
            r = lower().resources()
            took.append((time.perf_counter() - start) * 1e3)
            assert not r["from_disk"]
        ms = f"{statistics.median(took[1:]):.0f} ({min(took[1:]):.0f} to {max(took[1:]):.0f})"
        seconds = [x / 1e3 for x in took[1:]]
        spread = (statistics.median(seconds), min(seconds), max(seconds))
        found.add(
            "compile", name, {"process": {"ops": spread}}, registers=r["registers"],
            spill_bytes=r["spill_bytes"], smem_bytes=r["smem_bytes"],
        )  # fmt: skip
        keys = ("threads", "registers", "stack_bytes", "spill_bytes", "smem_bytes")
        print(f"| {name} | " + " | ".join(str(r[key]) for key in keys) + f" | {ms} |")


if __name__ == "__main__":
    main()
