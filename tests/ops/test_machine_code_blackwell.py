"""Machine code of the Blackwell kernels of `ops`, for both targets: each tensor core, tensor memory
and TMA instruction of the program is there once, none in a loop that was unrolled or left out;
nothing lies in local memory; the registers that the roles take exist."""

import re
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from compiler import sass
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.ops import (
    TensorMemoryAttentionConfig,
    TensorMemoryBackwardConfig,
    TensorMemoryConfig,
    TensorMemoryMixedConfig,
    attention,
    attention_backward,
    gated_matmul,
    matmul,
    mixed_matmul,
    ragged_dot,
    transposed_ragged_dot,
)

f16, bf16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1, I4 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.int4)
C = TensorMemoryConfig

# functions of the program: instructions of ptxas
ONE_EACH = {
    r"tcgen05_mma\w*": ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA"),
    r"tcgen05_commit\w*": ("UTCBAR",),
    r"tcgen05_copy\w*": ("UTCCP",),
    r"tmem_load_\w*": ("LDTM",),
    r"tmem_store_\w*": ("STTM",),
    r"tma_(load|multicast)\w*": ("UTMALDG",),
    r"tma_store\w*": ("UTMASTG",),
    r"setmaxnreg_\w*": ("USETMAXREG",),
    r"try_cancel": ("UGETNEXTWORKID",),
}
REGISTERS = 65536


def product(dtype, config, **options):
    a = np.zeros((2048, 2048), dtype)
    return matmul.kernel(a, a, config=config, **options), (a, a, *options.values())


def scaled(dtype, scale, block, config):
    a, s = np.zeros((2048, 2048), dtype), np.ones((2048, 2048 // block), scale)
    s = plgpu.ext.format_tcgen05_scales(s)
    how = dict(scale_a=s, scale_b=s)
    f = matmul.kernel(a, a, config=config, transpose_b=True, out_dtype=bf16, **how)
    return f, (a, a, s, s)


def softmax(dim, causal):
    q = np.zeros((1, 1024, 4, dim), bf16)
    config = TensorMemoryAttentionConfig()
    return attention.kernel(q, q, q, causal=causal, config=config), (q, q, q)


def by_blocks(config):
    """float32 scales of blocks of 128"""
    a = np.zeros((2048, 2048), E4M3)
    scales = np.ones((2048, 16), np.float32), np.ones((16, 16), np.float32)
    how = dict(scale_a=scales[0], scale_b=scales[1])
    return matmul.kernel(a, a, config=config, **how), (a, a, *scales)


def grouped(tile_n, **options):
    lhs, rhs = np.zeros((2048, 512), bf16), np.zeros((8, 512, 512), bf16)
    args = lhs, rhs, np.full(8, 256, np.int32)
    return ragged_dot.kernel(*args, config=C(tile_n, False, dynamic=False), **options), args


def summed():
    lhs, rhs = np.zeros((2048, 512), bf16), np.zeros((2048, 512), bf16)
    args = lhs, rhs, np.full(8, 256, np.int32)
    return transposed_ragged_dot.kernel(*args, config=C(256, False, dynamic=False)), args


def mixed(dtype, groups, tile_m):
    x, w = np.zeros((2048, 2048), bf16), np.zeros((2048, 2048), dtype)
    args = (x, w, np.ones((groups, 2048), bf16)) if groups else (x, w)
    return mixed_matmul.kernel(*args, config=TensorMemoryMixedConfig(tile_m)), args


def scored(**options):
    q = np.zeros((1, 1024, 4, 128), bf16)
    arrays = [x for x in options.values() if isinstance(x, np.ndarray)]
    config = TensorMemoryAttentionConfig()
    return attention.kernel(q, q, q, config=config, **options), (q, q, q, *arrays)


def gated(tile_n, pair):
    x = np.zeros((2048, 2048), bf16)
    config = C(tile_n, pair, dynamic=False)
    return gated_matmul.kernel(x, x, x, config=config), (x, x, x)


def gradients(which, dim, deterministic=False, causal=True):
    """which: a kernel of the gradients of attention."""
    x, lse = np.zeros((1, 1024, 4, dim), bf16), np.zeros((1, 4, 1024), np.float32)
    bias = np.zeros((1, 4, 1024, 1024), bf16) if which == "bias" else None
    how = dict(causal=causal, bias=bias, bias_gradient=bias is not None)
    how |= dict(config=TensorMemoryBackwardConfig(), deterministic=deterministic)
    f = attention_backward.kernel(x, x, x, x, x, lse, **how)
    args = (x, x, x, x, lse, lse, *([] if bias is None else [bias]))
    if f.fused and which != "bias":
        return f.fused.fused, args
    kernels = {"bias": f.bias, "queries": getattr(f, "by_queries", None)}
    kernels |= vars(f.by_keys) if dim > 192 else {"keys": getattr(f, "by_keys", None)}
    return kernels[which], args


KERNELS = {
    "matmul": lambda: product(bf16, C(256, False)),
    "matmul, pair": lambda: product(f16, C(256)),
    "matmul, launched, bias": lambda: product(bf16, C(128), bias=np.zeros(2048, bf16)),
    "matmul, 8 bits": lambda: product(E4M3, C(256)),
    "matmul, mxfp8": lambda: scaled(E4M3, E8M0, 32, C(256, False)),
    "matmul, nvfp4, pair": lambda: scaled(E2M1, E4M3, 16, C(256)),
    "matmul, nvfp4": lambda: scaled(E2M1, E4M3, 16, C(128, False)),
    "matmul, float32 scales": lambda: by_blocks(C(128)),
    "ragged": lambda: grouped(256),
    "ragged, transposed": lambda: grouped(128, transpose_rhs=True),
    "ragged, sums": summed,
    "mixed, int4": lambda: mixed(I4, 16, 128),
    "mixed, int8": lambda: mixed(np.int8, 0, 16),
    "attention, window": lambda: scored(window=(300, 0)),
    "attention, bias": lambda: scored(softcap=9.0, bias=np.zeros((1, 4, 1024, 1024), bf16)),
    "attention": lambda: softmax(128, False),
    "attention, 64": lambda: softmax(64, False),
    "attention, causal, 128": lambda: softmax(128, True),
    "attention, causal": lambda: softmax(64, True),
    "attention, 80": lambda: softmax(80, True),
    "attention, 192": lambda: softmax(192, False),
    "attention, 256": lambda: softmax(256, True),
    "gated": lambda: gated(128, False),
    "gated, pair": lambda: gated(256, True),
    "gradients": lambda: gradients("all", 128),
    "gradients, 64": lambda: gradients("all", 64, causal=False),
    "gradients, 80": lambda: gradients("all", 80),
    "gradients of keys": lambda: gradients("keys", 128, True),
    "gradients of queries": lambda: gradients("queries", 64, True),
    "gradients of keys, 192": lambda: gradients("keys", 192),
    "gradients, 256, dK": lambda: gradients("dk", 256),
    "gradients, 256, dV": lambda: gradients("dv", 256, causal=False),
    "gradients, 256, dQ": lambda: gradients("queries", 256),
    "gradient of a bias": lambda: gradients("bias", 128),
}


QUICK = ["matmul, pair", "matmul, nvfp4, pair", "ragged", "mixed, int4", "attention", "gradients"]
LONG = [
    "matmul", "matmul, launched, bias", "ragged, sums", "attention, bias", "attention, causal",
    "gated, pair", "gradients of keys", "gradient of a bias",
]  # fmt: skip


def held(text, used):
    """Registers of all threads of a block, at launch and after setmaxnreg."""
    start = used["registers"] + -used["registers"] % 8
    now = [start] * (used["threads"] // 128)
    groups = re.findall(r"setmaxnreg_(?:inc|dec)<(\d+)>", text)
    return 128 * sum(now), [int(x) for x in groups]


@pytest.mark.skipif(not sass.nvdisasm(), reason="needs nvdisasm")
@pytest.mark.parametrize(
    "target", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", only_long(KERNELS, *QUICK, long=LONG, every=2))
def test_instructions(name, target, monkeypatch):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 64)
    matmul.maker.forget()
    f, args = KERNELS[name]()
    matmul.maker.forget()
    lowered = f.lower(*args, target=target)
    text, code = lowered.as_text("cuda"), lowered.as_text("sass")
    body = text[text.index("__global__") :]
    calls = Counter(re.findall(r"\b(\w+)(?:<[^<>]*>)?\(", body))
    found = Counter(re.findall(r"\b([A-Z][A-Z0-9]+)\b", code))
    for function, instructions in ONE_EACH.items():
        asked = sum(n for call, n in calls.items() if re.fullmatch(function, call))
        assert sum(found[x] for x in instructions) == asked, (function, calls)
    assert calls["tcgen05_commit"] + calls["tcgen05_commit_pair"] > 0
    assert not found["LDL"] and not found["STL"]
    used = lowered.resources()
    assert not used["remarks"] and "warning" not in used["log"], used["log"]
    assert used["spill_bytes"] == used["stack_bytes"] == 0
    start, changed = held(body, used)
    assert start <= REGISTERS
    if changed:  # a role of one or two warpgroups takes more, others of one each take less
        more, less = max(changed), [x for x in changed if x != max(changed)]
        takers = used["threads"] // 128 - len(less)
        assert 128 * (takers * more + sum(less)) <= start
