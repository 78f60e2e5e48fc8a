"""Kernels whose times `plgpu.estimate` is compared with, and what they once took.

`cases()` lists them. `us` is a time on an H200 by the benchmark of its kind (queued where a call
takes less than 50 us, else bursts), None where it has none. Every other case of a kind was used to
choose the constants of `pallas_mgpu/_estimate_machine.py` (`fitted`); the others test them."""

import dataclasses
import functools
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _matmul, ops
from pallas_mgpu import numpy as jnp
from pallas_mgpu.ops import _open_rows

_open_rows.STATIC = 1 << 30  # programs of one number of rows, as they were measured
EXAMPLES = Path(__file__).parent.parent / "examples"
SPEC = plgpu.ShapeDtypeStruct
COPY = 4.11e12  # bytes a second of the copies in the table of norms


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    name: str
    make: Callable  # () -> (kernel, operands)
    us: float | None = None
    cold: bool = False
    values: dict = dataclasses.field(default_factory=dict)  # arrays that loops depend on
    fitted: bool = False


MATMULS = [  # m, n, k, us: --candidates and the table of sizes
    (8192, 8192, 8192, 1568.5), (4096, 4096, 4096, 194.9), (16384, 16384, 4096, 3177.8),
    (2048, 2048, 2048, 23.3), (1024, 1024, 1024, 4.93), (512, 512, 512, 2.91),
    (256, 256, 256, 2.17), (3072, 3072, 1024, 30.24), (1024, 4096, 1024, 13.40),
    (128, 4096, 4096, 12.42),
    (64, 4096, 4096, 9.87), (16, 8192, 1024, 6.37), (4096, 64, 4096, 9.87),
    (1, 4096, 4096, 9.19), (1536, 1536, 1536, 13.99),
    (1000, 4096, 4096, 44.71), (4096, 8192, 4096, 410.9),
    (333, 4096, 4096, None), (2999, 4096, 14336, None), (37, 8192, 8192, None),
    (8192, 14336, 4096, None), (16384, 1024, 1024, None), (640, 640, 640, None),
]  # fmt: skip
ATTENTIONS = [  # batch, length, heads, key heads, head_dim, causal, TFLOP/s in bursts
    (4, 4096, 16, 16, 128, False, 661), (1, 16384, 16, 16, 128, False, 686),
    (4, 4096, 16, 16, 128, True, 605), (1, 16384, 16, 16, 128, True, 662),
    (4, 4096, 16, 16, 64, False, 519), (1, 16384, 16, 16, 64, False, 521),
    (4, 4096, 16, 16, 64, True, 446), (1, 16384, 16, 16, 64, True, 515),
    (4, 4096, 16, 16, 256, False, 760), (4, 4096, 16, 16, 256, True, 697),
    (4, 4096, 16, 2, 128, True, 650), (2, 1000, 16, 16, 128, True, 319),
    (8, 2048, 8, 8, 96, False, None), (2, 3000, 24, 8, 128, True, None),
]  # fmt: skip
NORMS = {  # columns: bandwidth by that of a copy, for softmax, rms_norm and layer_norm; 256 MiB
    1024: (1.020, 1.017, 1.009), 2048: (1.019, 1.012, 1.012), 4096: (0.993, 0.995, 0.994),
    8192: (0.989, 0.995, 0.989), 16384: (0.990, 0.946, 0.909), 32768: (0.928, 0.939, 0.933),
    65536: (0.903, 0.925, 0.922),
}  # fmt: skip
SMALL_NORMS = [(4, 1.22), (128, 1.31), (1000, 2.60), (4096, 4.30)]  # rows of 1024, rms_norm
FP8 = [  # m, n, k, TFLOP/s with one scale, scales of rows, of blocks; sustained
    (8192, 8192, 8192, 1333, 1327, 1147), (4096, 4096, 4096, 1267, 1261, 1112),
    (2048, 2048, 2048, 1158, 1160, 1046), (4096, 8192, 4096, 1297, 1274, 1127),
    (16, 8192, 8192, 102, 101, 95),
]  # fmt: skip
MIXED = [  # rows, us with int4 and scales, int4, int8 and scales, int8; 8192 x 8192
    (16, 17.4, 16.2, 22.3, 21.5), (256, 72.8, 55.6, 78.8, 57.1),
    (4096, 1140.2, 845.7, 1150.1, 898.3),
]  # fmt: skip
PIPELINED = [  # steps, group, TFLOP/s of 8192^3 bfloat16, of 4096 x 8192 x 4096 float16
    (3, 8, 677, 628), (3, 16, 661, 623), (4, 8, 629, 580), (6, 8, 638, 589),
]  # fmt: skip
DECODES = [  # batch, keys, us; 32/8 heads of 128
    (32, 8192, 278.8), (1, 32768, 42.2), (1, 8192, 15.0), (8, 4096, 39.0), (128, 2048, 285.5),
]  # fmt: skip


def _product(m, n, k, us):
    def make():
        a, b = SPEC((m, k), jnp.bfloat16), SPEC((k, n), jnp.bfloat16)
        return ops.matmul.kernel(a, b), (a, b)

    return Case("matmul", f"{m}x{n}x{k}", make, us)


def _attention(b, s, h, kv, d, causal, rate):
    def make():
        q, k = (SPEC((b, s, x, d), jnp.float16) for x in (h, kv))
        return ops.attention.kernel(q, k, k, causal=causal), (q, k, k)

    flops = 4 * b * h * s * s * d / (2 if causal else 1)
    name = f"{b}x{s}, {h}/{kv} heads of {d}{', causal' if causal else ''}"
    return Case("attention", name, make, rate and flops / rate / 1e6)


def _norm(name, rows, columns, us):
    def make():
        dims = ((rows, columns), (columns,), (columns,))
        count = {"softmax": 1, "rms_norm": 2, "layer_norm": 3}[name]
        operands = [SPEC(x, jnp.bfloat16) for x in dims[:count]]
        return getattr(ops, name).kernel(*operands), operands

    return Case("norm", f"{name} {rows}x{columns}", make, us)


def _fp8(m, n, k, scales, rate):
    shapes = {
        "one": ((1, 1), (1, 1)),
        "rows": ((m, 1), (1, n)),
        "blocks": ((m, k // 128), (n // 128, k // 128)),
    }

    def make():
        a, b = SPEC((m, k), jnp.float8_e4m3fn), SPEC((n, k), jnp.float8_e4m3fn)
        x, y = (SPEC(s, jnp.float32) for s in shapes[scales])
        kernel = ops.matmul.kernel(
            a, b, transpose_b=True, scale_a=x, scale_b=y, out_dtype=jnp.bfloat16
        )
        return kernel, (a, b, x, y)

    return Case("fp8", f"{m}x{n}x{k}, scales of {scales}", make, 2 * m * n * k / rate / 1e6)


def _mixed(m, weights, groups, us):
    def make():
        operands = [SPEC((m, 8192), jnp.bfloat16), SPEC((8192, 8192), weights)]
        if groups:
            operands.append(SPEC((groups, 8192), jnp.bfloat16))
        return ops.mixed_matmul.kernel(*operands), operands

    name = f"{m}x8192x8192 {np.dtype(weights).name}{', 64 groups' if groups else ''}"
    return Case("mixed", name, make, us)


def _pipelined(m, n, k, dtype, steps, group, rate):
    def make():
        operands = SPEC((m, k), dtype), SPEC((k, n), dtype)
        kernel = _matmul.matmul_kernel(m, n, k, np.dtype(dtype), steps=steps, group=group)
        return kernel, operands

    name = f"one thread, {m}x{n}x{k}, {steps} steps, group {group}"
    return Case("user", name, make, 2 * m * n * k / rate / 1e6)


def _examples():
    """The kernels of examples/triton_kernels.py."""
    module = runpy.run_path(str(EXAMPLES / "triton_kernels.py"))
    f32, f16 = jnp.float32, jnp.float16
    norms = ((8192, 4096, 69, 70, 70), (16384, 1024, 36, 36, 36), (4096, 8192, 70, 73, 71))
    for rows, n, *times in norms:
        x, w = SPEC((rows, n), f32), SPEC((n,), f32)
        operands = {"softmax": (x,), "layer_norm": (x, w, w), "rms_norm": (x, w)}
        for (name, arrays), us in zip(operands.items(), times):

            def make(name=name, arrays=arrays, rows=rows, n=n):
                return module[name](rows, n, np.float32), arrays

            yield Case("user", f"example {name} {rows}x{n}", make, us)
    for b, s, h, d, causal, block, us in (
        (2, 2048, 8, 128, False, 64, 98), (2, 2048, 8, 128, True, 64, 63),
        (2, 2048, 8, 128, False, 128, 77), (4, 1024, 16, 64, False, 64, 58),
        (4, 4096, 8, 64, True, 64, 259),
    ):  # fmt: skip

        def make(b=b, s=s, h=h, d=d, causal=causal, block=block):
            warps = 8 if block == 128 else 4
            kernel = module["mha"](b, s, h, d, np.float16, causal, block, block, num_warps=warps)
            return kernel, [SPEC((b, s, h, d), f16)] * 3

        name = f"example mha {b}x{s}x{h}x{d}{', causal' if causal else ''}, blocks of {block}"
        yield Case("user", name, make, us)


def _elementwise():
    """Ready kernels that only move elements; times from the table of training."""
    bf16 = jnp.bfloat16
    x = SPEC((16384, 4096), bf16)

    def case(name, make, operands, us):
        return Case("elementwise", name, lambda: (make(*operands), operands), us)

    yield case("gated_linear_unit 8192x28672", ops.gated_linear_unit.kernel,
               [SPEC((8192, 28672), bf16)], None)  # fmt: skip
    for block, us in ((None, 49), (128, 125)):
        make = functools.partial(ops.quantize.kernel, block=block)
        yield case(f"quantize 16384x4096, block {block}", make, [x], us)
    for rows, columns, us in ((8192, 4096, 48), (16384, 2048, 48), (8192, 8192, 94)):
        grad = SPEC((rows, columns), bf16)
        name = f"softmax_backward {rows}x{columns}"
        yield case(name, ops.softmax_backward.kernel, [grad, grad], us)
    angles = SPEC((4096, 64), jnp.float32)
    yield case("rotary 4x4096x32x128", ops.rotary.kernel,
               [SPEC((4, 4096, 32, 128), bf16), angles, angles], 68)  # fmt: skip


def _all():
    yield from (_product(*x) for x in MATMULS)
    yield from (_attention(*x) for x in ATTENTIONS)
    for columns, shares in NORMS.items():
        for name, share in zip(("softmax", "rms_norm", "layer_norm"), shares):
            yield _norm(name, 2**26 // columns, columns, 2**28 / share / COPY * 1e6)
    yield from (_norm("rms_norm", rows, 1024, us) for rows, us in SMALL_NORMS)
    for m, n, k, *rates in FP8:
        for scales, rate in zip(("one", "rows", "blocks"), rates):
            yield _fp8(m, n, k, scales, rate)
    for rows, *times in MIXED:
        forms = ((jnp.int4, 64), (jnp.int4, 0), (jnp.int8, 64), (jnp.int8, 0))
        for (weights, groups), us in zip(forms, times):
            yield _mixed(rows, weights, groups, us)
    for steps, group, square, flat in PIPELINED:
        yield _pipelined(8192, 8192, 8192, jnp.bfloat16, steps, group, square)
        yield _pipelined(4096, 8192, 4096, jnp.float16, steps, group, flat)
    yield from _examples()
    yield from _elementwise()


def cases():
    """All of them; of each kind every other one that has a time is for fitting."""
    counts = {}
    for case in _all():
        if case.us is not None:
            counts[case.kind] = counts.get(case.kind, 0) + 1
            case = dataclasses.replace(case, fitted=counts[case.kind] % 2 == 1)
        yield case
