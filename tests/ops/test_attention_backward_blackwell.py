"""Gradients of attention for Blackwell: the interpreter, with its races, and the emulated machine
give those of float64; both targets' compilers take the programs, without local memory."""

import ml_dtypes
import numpy as np
import pytest
import test_attention_backward as plain
import test_attention_options as scored
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import TensorMemoryBackwardConfig as C

f16, bf16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CASES = {  # batch, queries, heads, head_dim, keys, kv_heads, causal; dtype, configuration
    "one block": ((1, 128, 1, 64, 128, 1, False), f16, C()),
    "odd": ((2, 100, 2, 64, 77, 1, False), bf16, C()),
    "several blocks": ((1, 300, 2, 128, 129, 1, False), f16, C()),
    "causal": ((1, 300, 4, 128, 260, 2, True), f16, C()),
    "no rotation": ((1, 270, 2, 64, 300, 1, True), bf16, C(False)),
    "keys that nobody sees": ((1, 65, 3, 64, 257, 1, True), f16, C()),
    "one query, one key": ((1, 1, 1, 128, 1, 1, False), bf16, C()),
    "head_dim 8": ((1, 140, 2, 8, 130, 1, False), f16, C()),
    "head_dim 72": ((1, 200, 2, 72, 150, 1, True), f16, C()),
    "head_dim 96": ((1, 200, 2, 96, 150, 2, False), bf16, C()),
    "head_dim 120": ((1, 130, 1, 120, 200, 1, True), f16, C()),
}
SEVEN = {  # by seven products; the last: deterministic
    "64": ((2, 300, 2, 64, 200, 1, False), f16, True),
    "128, causal": ((1, 300, 4, 128, 260, 2, True), bf16, True),
    "40": ((1, 100, 2, 40, 150, 1, True), f16, True),
    "136": ((1, 200, 2, 136, 150, 1, True), f16, False),
    "192": ((1, 150, 2, 192, 200, 2, False), bf16, False),
    "192, keys that nobody sees": ((1, 65, 3, 192, 257, 1, True), f16, False),
    "248": ((1, 150, 1, 248, 140, 1, False), f16, False),
    "256": ((1, 200, 2, 256, 150, 1, True), f16, False),
    "256, one query, one key": ((1, 1, 1, 256, 1, 1, False), f16, False),
}


def compare(found, wants, dtype):
    unit = 2e-3 if dtype == f16 else 1.5e-2
    for got, want in zip(found, wants, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        error = np.abs(got.astype(np.float64) - want).max()
        assert error <= unit * np.abs(want).max() + 1e-2 * unit


WAYS = [
    plgpu.InterpretParams(detect_races=True, on_race="raise", seed=1),
    *(plgpu.InterpretParams(backend="emulate", seed=seed) for seed in range(2)),
]


def forward(q, k, v, **how):
    config = ops.TensorMemoryAttentionConfig()
    return ops.attention(q, k, v, **how, return_lse=True, config=config, interpret=True)


def check(rng, shape, dtype, **more):
    """Returns the bits of the results on the emulated machine."""
    grad, q, k, v = plain.operands(rng, shape, dtype)
    how = {"causal": shape[-1], "scale": 0.1}
    o, lse = forward(q, k, v, **how)
    wants, bits = plain.gradients(grad, q, k, v, **how), set()
    for way in WAYS:
        found = ops.attention_backward(grad, q, k, v, o, lse, **how, **more, interpret=way)
        compare(found, wants, dtype)
        if way.backend == "emulate":
            bits.add(b"".join(x.tobytes() for x in found))
    return bits


@pytest.mark.parametrize("name", only_long(CASES, "odd", "head_dim 72", long=["causal"], every=4))
def test_gradients(name, rng):
    shape, dtype, config = CASES[name]
    check(rng, shape, dtype, config=config)


@pytest.mark.parametrize(
    "name", only_long(SEVEN, "192, keys that nobody sees", long=["128, causal"], every=3)
)
def test_seven_products(name, rng):
    """Results repeat bit for bit, whatever the order of the blocks."""
    shape, dtype, deterministic = SEVEN[name]
    assert len(check(rng, shape, dtype, config=C(), deterministic=deterministic)) == 1


def no_local_memory(f, operands, lse, more=(), ranges=(), targets=("sm_100a",)):
    """Compiles the kernels of a call. more, ranges: operands of the options of the scores, and of
    packed sequences."""
    padded = plgpu.ShapeDtypeStruct((*lse.shape[:2], -(-lse.shape[2] // 128) * 128), np.float32)
    operands = *operands, padded, padded, *more
    if f.fused:
        kernels = [(f.fused.fused, (*operands, *ranges, *ranges))]
    else:
        by_keys = f.by_keys
        of_keys = (by_keys.dk, by_keys.dv) if hasattr(by_keys, "dk") else (by_keys,)
        kernels = [(g, (*operands, *ranges)) for g in (*of_keys, f.by_queries)]
    if f.bias:
        kernels.append((f.bias, (*operands, *ranges)))
    for kernel, arguments in kernels:
        for target in targets:
            low = kernel.lower(*arguments, target=target)
            used = low.resources()
            assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
            assert low.as_text("cuda").count("tcgen05_commit(") > (kernel is not f.bias)


OPTIONS = [name + repeats for name in scored.CASES for repeats in ("", "; deterministic")]
DEFAULT = "packed, window", "bias; deterministic"
LONG = "all", "packed, causal; deterministic"


@pytest.mark.filterwarnings("ignore:kernels on host arrays")
@pytest.mark.parametrize("case", only_long(OPTIONS, *DEFAULT, long=LONG, every=10))
def test_options_of_scores(case, rng):
    name, _, deterministic = case.partition("; ")
    deterministic = bool(deterministic)
    (grad, q, k, v), options, call = scored.problem(rng, name)
    _, _, wants = scored.reference(grad, q, k, v, **options)
    o, lse = forward(q, k, v, **call)
    how = dict(config=C(), deterministic=deterministic, bias_gradient="bias" in call)
    for way in WAYS[: 3 if name in ("bias", "all") else 2]:
        found = ops.attention_backward(grad, q, k, v, o, lse, **call, **how, interpret=way)
        compare(found[:3], wants[:3], f16)
        for got, want in zip(found[3:], wants[3:], strict=True):  # sums are 0 but for rounding
            summed = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] / got.size
            scored.near(got, want, f16, scale=max(np.abs(want).max(), summed**0.5))
    f = ops.attention_backward.kernel(grad, q, k, v, o, lse, **call, **how)
    more = [call[n] for n in ("bias", "seed") if n in call]
    ranges = [plgpu.ShapeDtypeStruct((384,), np.int32)] * 2 if "cu_seqlens_q" in call else []
    no_local_memory(f, (grad, q, k, v), lse, more, ranges)


CHOSEN = {  # head_dim, causal, deterministic
    "64": (64, False, False),
    "128, causal": (128, True, False),
    "80": (80, False, False),
    "32, causal": (32, True, False),
    "64, deterministic": (64, True, True),
    "128, deterministic": (128, False, True),
    "192": (192, False, False),
    "256, causal": (256, True, False),
}


@pytest.mark.parametrize("name", only_long(CHOSEN, "128, causal"))
def test_chosen(name, monkeypatch):
    """What a call on such a GPU runs has no local memory."""
    dim, causal, deterministic = CHOSEN[name]
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    x = plgpu.ShapeDtypeStruct((2, 1000, 4, dim), bf16)
    lse = plgpu.ShapeDtypeStruct((2, 4, 1000), np.float32)
    how = dict(causal=causal, deterministic=deterministic)
    f = ops.attention_backward.kernel(x, x, x, x, x, lse, **how)
    no_local_memory(f, (x, x, x, x), lse, targets=("sm_100a", "sm_103a"))


TIGHT = {  # head_dim, causal, options of the scores: those that take most registers
    "128, softcap, bias": (128, True, {"softcap": 9.0, "bias": True}),
    "128, dropout": (128, True, {"dropout": 0.2}),
    "128, window, bias, dropout": (128, False, {"window": (9, 9), "bias": True, "dropout": 0.2}),
    "72": (72, True, {}),
    "72, softcap": (72, True, {"softcap": 9.0}),
    "72, softcap, bias": (72, False, {"softcap": 9.0, "bias": True}),
    "24, all": (24, True, {"softcap": 9.0, "bias": True, "dropout": 0.2, "window": (70, 20)}),
}


@pytest.mark.parametrize("name", only_long(TIGHT, "128, softcap, bias", long=["72"], every=3))
def test_registers(name):
    dim, causal, options = TIGHT[name]
    call, x = dict(options), plgpu.ShapeDtypeStruct((1, 256, 2, dim), f16)
    if "bias" in options:
        call["bias"] = plgpu.ShapeDtypeStruct((1, 1, 256, 256), f16)
    if "dropout" in options:
        call["seed"] = plgpu.ShapeDtypeStruct((1,), np.int32)
    lse = plgpu.ShapeDtypeStruct((1, 2, 256), np.float32)
    f = ops.attention_backward.kernel(x, x, x, x, x, lse, causal=causal, config=C(), **call)
    no_local_memory(f, (x, x, x, x), lse, [call[n] for n in ("bias", "seed") if n in call])


def test_refusals():
    x, lse = np.zeros((1, 16, 1, 264), f16), np.zeros((1, 1, 16), np.float32)
    with pytest.raises(NotImplementedError, match="a multiple of 8 up to 256, got 264"):
        ops.attention_backward.kernel(*[x] * 5, lse, config=C())
    x = np.zeros((1, 16, 1, 60), f16)
    with pytest.raises(NotImplementedError, match="a multiple of 8 up to 256, got 60"):
        ops.attention_backward.kernel(*[x] * 5, lse, config=C())
    x = np.zeros((1, 16, 1, 64), f16)
    with pytest.raises(ValueError, match="bias_gradient needs the bias"):
        ops.attention_backward.kernel(*[x] * 5, lse, bias_gradient=True, config=C())
