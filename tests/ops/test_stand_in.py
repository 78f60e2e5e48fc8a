"""Blackwell's kernels of `ops` on a Hopper GPU, with PALLAS_MGPU_STAND_IN=1: an engine of wgmma in
global memory stands in for the tensor cores and tensor memory (csrc/cuda/stand_in.c); TMA,
barriers, clusters, multicasts and the host side are real. Without a GPU NVRTC compiles the programs
for Hopper, and the emulated machine runs them with the engine, whose products are the machine's.

On a GPU each case is a process of its own, as its target is another one:
    python tests/ops/test_stand_in.py            # all cases, a table
    python tests/ops/test_stand_in.py NAME ..."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SWITCHES = {"PALLAS_MGPU_STAND_IN": "1", "PALLAS_MGPU_TARGET": "sm_100a"}
if __name__ == "__main__":
    os.environ.update(SWITCHES)
    sys.path[:0] = [str(HERE.parent), str(ROOT)]

import test_attention_backward as attention_backward  # noqa: E402
from selection import only_long  # noqa: E402

import pallas_mgpu as plgpu  # noqa: E402
from pallas_mgpu import ops  # noqa: E402
from pallas_mgpu.machine import run as host  # noqa: E402
from pallas_mgpu.ops import TensorMemoryAttentionConfig, TensorMemoryMixedConfig  # noqa: E402
from pallas_mgpu.ops import TensorMemoryConfig as C  # noqa: E402

f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
SHORT = {"dynamic": False}


def whole(rng, shape, dtype):
    return rng.integers(-3, 4, shape).astype(dtype)


def product(shape, dtypes, config, ta=False, tb=False, **options):
    def make(rng):
        m, n, k = shape
        a, b = (
            whole(rng, (k, m) if ta else (m, k), dtypes[0]),
            whole(rng, (n, k) if tb else (k, n), dtypes[1]),
        )
        args = [a, b]
        want = (a.T if ta else a).astype(f32) @ (b.T if tb else b).astype(f32)
        if options.get("bias"):
            args.append(whole(rng, n, dtypes[0]))
            want = want + args[2].astype(f32)
        out = options.get("out_dtype", bf16 if dtypes[0].itemsize == 1 else dtypes[0])
        how = {**options, "transpose_a": ta, "transpose_b": tb, "config": config}
        if how.pop("bias", None):
            how["bias"] = args[2]
        f = ops.matmul.kernel(a, b, **how)
        return f, args, [want.astype(out)], 0

    return make


def grouped(shape, sizes, dtype, config, transposed=False):
    def make(rng):
        m, n, k = shape
        ends = np.minimum(np.cumsum(sizes), m)
        parts = list(zip((0, *ends), ends))
        if transposed:
            lhs, rhs = whole(rng, (m, k), dtype), whole(rng, (m, n), dtype)
            want = np.stack([lhs[a:b].astype(f32).T @ rhs[a:b].astype(f32) for a, b in parts])
            op = ops.transposed_ragged_dot
        else:
            lhs, rhs = whole(rng, (m, k), dtype), whole(rng, (len(sizes), k, n), dtype)
            want = np.zeros((m, n), f32)
            for g, (a, b) in enumerate(parts):
                want[a:b] = lhs[a:b].astype(f32) @ rhs[g].astype(f32)
            op = ops.ragged_dot
        args = [lhs, rhs, np.array(sizes, np.int32)]
        f = op.kernel(*args, config=config, out_dtype=f32)
        return getattr(f, "product", f), args, [want], 0

    return make


def mixed(shape, weights, dtype, groups, config):
    def make(rng):
        m, n, k = shape
        info = ml_dtypes.iinfo(weights)
        x = whole(rng, (m, k), dtype)
        w = rng.integers(info.min, info.max + 1, (n, k)).astype(weights)
        args, full = [x, w], w.astype(np.float64)
        if groups:
            args.append(rng.choice([0.5, 1, 2], (groups, n)).astype(f32))
            full *= np.repeat(args[2].astype(np.float64), k // groups, 0).T
        f = ops.mixed_matmul.kernel(*args, config=config, out_dtype=f32)
        want = (x.astype(np.float64) @ full.T).astype(f32)
        return getattr(f, "product", f), args, [want], 0

    return make


def gated(shape, dtype, config):
    def make(rng):
        m, n, k = shape
        x = rng.standard_normal((m, k)).astype(dtype)
        gate, up = (rng.standard_normal((2, k, n)) * k**-0.5).astype(dtype)
        g, u = (
            x.astype(np.float64) @ gate.astype(np.float64),
            x.astype(np.float64) @ up.astype(np.float64),
        )
        f = ops.gated_matmul.kernel(x, gate, up, config=config)
        return f, [x, gate, up], [(g / (1 + np.exp(-g)) * u).astype(dtype)], 2e-2

    return make


def attention(shape, dtype, causal=False, stages=0):
    def make(rng):
        batch, queries, heads, dim, keys, kv_heads = shape
        q = rng.standard_normal((batch, queries, heads, dim)).astype(dtype)
        k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
        wide = [np.repeat(x.astype(np.float64), heads // kv_heads, 2) for x in (k, v)]
        s = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), wide[0]) * dim**-0.5
        if causal:
            s = np.where(np.arange(keys) <= np.arange(queries)[:, None], s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), wide[1])
        config = TensorMemoryAttentionConfig(stages)
        f = ops.attention.kernel(q, k, v, causal=causal, config=config)
        return f, [q, k, v], [want.astype(dtype)], 4e-3 if dtype == f16 else 3e-2

    return make


def gradients(shape, dtype, causal=False, deterministic=False):
    """Of attention: the kernel that adds to dQ, whose sums the call before cleared, or those of
    seven products."""

    def make(rng):
        batch, queries, heads, dim, keys, kv_heads = shape
        q, grad = rng.standard_normal((2, batch, queries, heads, dim)).astype(dtype)
        k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
        how = dict(causal=causal, return_lse=True, config=TensorMemoryAttentionConfig())
        o, lse = ops.attention(q, k, v, **how, interpret=True)
        wants = attention_backward.gradients(grad, q, k, v, causal, dim**-0.5)
        how = dict(config=ops.TensorMemoryBackwardConfig(), deterministic=deterministic)
        f = ops.attention_backward.kernel(grad, q, k, v, o, lse, causal=causal, **how)
        return f, [grad, q, k, v, o, lse], [w.astype(dtype) for w in wants], 1e-2

    return make


# On a GPU, of more blocks than it has multiprocessors, some are launched late.
CASES = {
    "one block": product((256, 128, 200), (f16, f16), C(128, False, 3, **SHORT)),
    "pair": product((300, 256, 136), (bf16, bf16), C(256, True, 3, **SHORT)),
    "transposed": product((264, 200, 136), (f16, f16), C(64, False, 3), True, True, out_dtype=f16),
    "A transposed, pair": product((280, 136, 72), (bf16, bf16), C(128, True, 3), ta=True),
    "launch control": product((600, 520, 72), (f16, f16), C(128, False, 3), bias=True),
    "launch control, pairs": product((1000, 520, 136), (bf16, bf16), C(256, True, 3)),
    "8 bits": product((264, 136, 160), (E4M3, E5M2), C(128, False, 3), tb=True, out_dtype=f32),
    "8 bits, pair": product((264, 136, 160), (E5M2, E4M3), C(128, True, 3), tb=True, out_dtype=f32),
    "float32 result": product((136, 64, 512), (f16, f16), C(64, False, 4), out_dtype=f32),
    "groups": grouped((400, 72, 136), [3, 0, 200, 128], f16, C(64, pair=False, dynamic=False)),
    "sums of groups": grouped(
        (300, 136, 72), [3, 200, 97], bf16, C(128, pair=False, dynamic=False), True
    ),
    "int8 weights": mixed(
        (40, 200, 256), np.dtype(np.int8), bf16, 2, TensorMemoryMixedConfig(32, 2)
    ),
    "int4 weights": mixed(
        (70, 128, 192), np.dtype(ml_dtypes.int4), f16, 0, TensorMemoryMixedConfig(64, 0, 64)
    ),
    "gated": gated((130, 200, 136), f16, C(128, False)),
    "gated, pair": gated((300, 264, 136), bf16, C(256, True)),
    "attention": attention((1, 300, 2, 64, 400, 1), f16),
    "attention, causal": attention((2, 260, 2, 128, 260, 2), bf16, True),
    "head_dim 72": attention((1, 200, 2, 72, 200, 1), f16, True),
    "head_dim 192": attention((1, 200, 2, 192, 130, 1), f16),
    "head_dim 256": attention((1, 130, 2, 256, 200, 2), bf16, True),
}

SEVERAL = {  # several kernels, of which one has tensor memory
    "gradients": gradients((1, 300, 2, 64, 260, 1), f16),
    "gradients, causal": gradients((1, 300, 1, 128, 200, 1), bf16, True),
    "gradients, 80": gradients((1, 200, 2, 80, 260, 1), f16),
    "gradients, repeating": gradients((1, 300, 2, 64, 260, 1), f16, True, True),
    "gradients, 256": gradients((1, 200, 1, 256, 150, 1), bf16, True),
}


def compare(outs, wants, bound):
    for got, want in zip(outs, wants, strict=True):
        got, want = got.astype(np.float64), want.astype(np.float64)
        if bound:
            np.testing.assert_allclose(got, want, atol=bound, rtol=bound)
        else:
            np.testing.assert_array_equal(got, want)


def on_machine(lowered, args, outs, seed):
    """The emulated machine with the engine: its functions go before the machine's."""
    text, info = host.program(lowered)
    device = (ROOT / "csrc/cuda/device/stand_in.cuh").read_text()
    names = [n for n in re.findall(r"^//! (\w+)$", device, re.M) if not n.startswith("tensor_")]
    names = "".join(f"#define {n} stand_in_{n}\n" for n in names if n.islower())
    head = (HERE.parent / "compiler/stand_in_host.h").read_text()
    args = [host.packed(x) if x.dtype.name in host.SMALL else x for x in args]
    host.run_program(head + names + text, info, args, outs, seed)


@pytest.fixture
def small_gpu(monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 4)
    monkeypatch.setenv("PALLAS_MGPU_STAND_IN", "1")
    makers = [x.maker for x in vars(ops).values() if hasattr(x, "maker")]
    for maker in makers:
        maker.forget()
    yield
    for maker in makers:
        maker.forget()


RARE = [  # combinations of others
    "one block", "transposed", "8 bits", "float32 result", "launch control, pairs", "gated",
    "gated, pair", "sums of groups", "int4 weights", "head_dim 192", "head_dim 256",
]  # fmt: skip


@pytest.mark.parametrize("name", only_long(CASES, "pair", "int8 weights", rare=RARE))
def test_on_the_machine(name, rng, small_gpu):
    f, args, wants, bound = CASES[name](rng)
    lowered = f.lower(*args, target="sm_100a")
    for seed in range(2):
        outs = [np.zeros(x.shape, x.dtype) for x in wants]
        on_machine(lowered, args, outs, seed)
        compare(outs, wants, bound)


@pytest.mark.parametrize("name", only_long(CASES, "8 bits, pair", rare=RARE, every=2))
def test_compiles_for_hopper(name, rng, small_gpu):
    f, args, *_ = CASES[name](rng)
    low = f.lower(*args, target="sm_100a")
    assert "'sm_90a'" in low.resources()["log"]
    ptx = low.as_text("ptx")
    assert "wgmma.mma_async" in ptx and "tcgen05" not in ptx


@pytest.mark.parametrize("name", only_long(SEVERAL, every=3))
def test_gradients_compile_for_hopper(name, rng, small_gpu):
    f, (grad, q, k, v, _, lse), *_ = SEVERAL[name](rng)
    rows = plgpu.ShapeDtypeStruct((*lse.shape[:2], 384), f32)
    keys = f.by_keys if not f.fused else None
    kernels = [keys.dk, keys.dv] if hasattr(keys, "dk") else [keys]
    for kernel in [f.fused.fused] if f.fused else [*kernels, f.by_queries]:
        low = kernel.lower(grad, q, k, v, rows, rows, target="sm_100a")
        assert "'sm_90a'" in low.resources()["log"]


def test_what_has_no_stand_in(rng, small_gpu):
    scaled = [np.ones((128, 64), E4M3), np.ones((64, 64), E4M3)]
    f = ops.matmul.kernel(*scaled, transpose_b=True, config=C(64, False, 3))
    f.lower(*scaled, target="sm_100a").as_text("cuda")
    f = ops.matmul.kernel(*scaled, config=C(64, False, 3))
    with pytest.raises(NotImplementedError, match="STAND_IN=1: no stand-in for 8-bit operands"):
        f.lower(*scaled, target="sm_100a").as_text("cuda")


def run_on_gpu(name, seconds=120):
    """Several launches, so that each finds what the one before left."""
    command = [sys.executable, __file__, name]
    env = {**os.environ, **SWITCHES}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *SEVERAL])
def test_on_a_gpu(name):
    got = run_on_gpu(name)
    assert got.returncode == 0, got.stdout + got.stderr


def main(names):
    if len(names) != 1:
        failed = 0
        for name in names or [*CASES, *SEVERAL]:
            start = time.time()
            got = run_on_gpu(name)
            failed += got.returncode != 0
            last = (got.stdout + got.stderr).strip().splitlines()[-1:]
            words = "right" if got.returncode == 0 else f"WRONG: {last}"
            print(f"{name:24} {time.time() - start:5.1f} s  {words}", flush=True)
        return failed > 0
    plgpu.sm_count = lambda device=None: 4  # so that clusters take the places of others
    f, args, wants, bound = (CASES | SEVERAL)[names[0]](np.random.default_rng(0))
    arrays = [plgpu.device_put(x) for x in args]
    for _ in range(4):
        got = f(*arrays)
        outs = [x.numpy() for x in (got if isinstance(got, (list, tuple)) else [got])]
        compare(outs, wants, bound)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
