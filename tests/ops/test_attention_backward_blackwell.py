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


@pytest.mark.parametrize("name", only_long(CASES, "odd", "causal", "keys that nobody sees"))
def test_gradients(name, rng):
    shape, dtype, config = CASES[name]
    grad, q, k, v = plain.operands(rng, shape, dtype)
    how = {"causal": shape[-1], "scale": 0.1}
    o, lse = ops.attention(q, k, v, **how, return_lse=True, interpret=True)
    wants = plain.gradients(grad, q, k, v, **how)
    for way in WAYS:
        found = ops.attention_backward(grad, q, k, v, o, lse, **how, config=config, interpret=way)
        compare(found, wants, dtype)


SCORED = [name for name in scored.CASES if not name.startswith("256")]


@pytest.mark.filterwarnings("ignore:kernels on host arrays")
@pytest.mark.parametrize("name", only_long(SCORED, "bias", "packed, window", "all"))
def test_options_of_scores(name, rng):
    (grad, q, k, v), _, call = scored.problem(rng, name)
    _, _, wants = scored.reference(grad, q, k, v, **_)
    o, lse = ops.attention(q, k, v, **call, return_lse=True, interpret=True)
    for way in WAYS:
        found = ops.attention_backward(grad, q, k, v, o, lse, **call, config=C(), interpret=way)
        compare(found, wants[:3], f16)
    f = ops.attention_backward.kernel(grad, q, k, v, o, lse, **call, config=C()).fused.fused
    padded = plgpu.ShapeDtypeStruct((*lse.shape[:2], -(-lse.shape[2] // 128) * 128), np.float32)
    more = [call[n] for n in ("bias", "seed") if n in call]
    if "cu_seqlens_q" in call:
        rows = plgpu.ShapeDtypeStruct((384,), np.int32)
        more += [rows] * 4
    for target in ("sm_100a", "sm_103a"):
        used = f.lower(grad, q, k, v, padded, padded, *more, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_chosen(dim, causal, monkeypatch):
    """What a call on such a GPU runs has no local memory."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    x = plgpu.ShapeDtypeStruct((2, 1000, 4, dim), bf16)
    lse = plgpu.ShapeDtypeStruct((2, 4, 1000), np.float32)
    f = ops.attention_backward.kernel(x, x, x, x, x, lse, causal=causal).fused.fused
    lse = plgpu.ShapeDtypeStruct((2, 4, 1024), np.float32)
    for target in ("sm_100a", "sm_103a"):
        low = f.lower(x, x, x, x, lse, lse, target=target)
        used = low.resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    assert low.as_text("cuda").count("tcgen05_commit(") > 3


def test_refusals():
    x, lse = np.zeros((1, 16, 1, 256), f16), np.zeros((1, 1, 16), np.float32)
    with pytest.raises(NotImplementedError, match="head_dim 256 on Blackwell"):
        ops.attention_backward.kernel(*[x] * 5, lse, config=C())
    x = np.zeros((1, 16, 1, 64), f16)
    with pytest.raises(NotImplementedError, match="deterministic gradients on Blackwell"):
        ops.attention_backward.kernel(*[x] * 5, lse, config=C(), deterministic=True)
    bias = np.zeros((1, 1, 16, 16), f16)
    with pytest.raises(NotImplementedError, match="bias_gradient on Blackwell"):
        ops.attention_backward.kernel(*[x] * 5, lse, bias=bias, bias_gradient=True, config=C())
