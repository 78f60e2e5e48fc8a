"""`ops.attention` for Blackwell: the interpreter and the emulated machine give NumPy's results, and
both targets' compilers take the programs, without local memory."""

import ml_dtypes
import numpy as np
import pytest
import test_attention_options as scored
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine
from pallas_mgpu.ops import TensorMemoryAttentionConfig, attention

f16, bf16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

CASES = {  # batch, queries, heads, head_dim, keys, heads of keys; dtype, config, options
    "one tile": ((1, 128, 1, 64, 128, 1), f16, (), {}),
    "few queries": ((1, 3, 2, 128, 300, 1), bf16, (0, 32), {"return_lse": True}),
    "ragged": ((1, 300, 2, 64, 400, 1), f16, (0, 16), {"return_lse": True}),
    "causal": ((2, 520, 2, 128, 520, 2), f16, (2, 0), {"causal": True, "return_lse": True}),
    "causal, more keys": ((1, 130, 2, 128, 700, 1), bf16, (1,), {"causal": True}),
    "causal, more queries": (
        (1, 300, 1, 64, 90, 1),
        f16,
        (0, 24),
        {"causal": True, "return_lse": True},
    ),
    "head_dim 96": ((1, 300, 2, 96, 300, 1), bf16, (), {"return_lse": True}),
    "head_dim 96, causal": ((1, 300, 2, 96, 300, 1), f16, (2,), {"causal": True}),
    "head_dim 192": ((1, 300, 2, 192, 300, 1), f16, (), {"return_lse": True}),
    "head_dim 192, causal": ((1, 300, 2, 192, 400, 1), bf16, (), {"causal": True}),
    "head_dim 256": ((1, 200, 2, 256, 300, 1), f16, (), {"return_lse": True}),
    "head_dim 256, causal": ((1, 300, 2, 256, 300, 2), bf16, (), {"causal": True}),
    "head_dim 8": ((1, 300, 2, 8, 300, 1), f16, (), {"return_lse": True}),
    "head_dim 72, causal": ((1, 300, 2, 72, 300, 1), f16, (), {"causal": True}),
    "head_dim 120": ((1, 130, 2, 120, 200, 1), bf16, (), {"return_lse": True}),
    "head_dim 136": ((1, 300, 2, 136, 300, 1), f16, (), {"return_lse": True}),
    "head_dim 248, causal": ((1, 200, 2, 248, 200, 1), bf16, (), {"causal": True}),
    "scale": ((1, 256, 2, 64, 384, 2), bf16, (3,), {"scale": 0.7}),
}


def expected(q, k, v, causal=False, scale=None, return_lse=False):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        s = np.where(np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None], s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    sums = e.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", e / sums, v), (np.log(sums) + m)[..., 0]


def operands(rng, shape, dtype):
    batch, queries, heads, dim, keys, kv_heads = shape
    q = rng.standard_normal((batch, queries, heads, dim)).astype(dtype)
    k = rng.standard_normal((batch, keys, kv_heads, dim)).astype(dtype)
    # keys that grow: maxima grow by more than what is borne without rescaling
    k = (k * np.linspace(0.2, 3, keys)[:, None, None]).astype(dtype)
    return q, k, rng.standard_normal(k.shape).astype(dtype)


def compare(got, want, dtype):
    (o, *lse), (want_o, want_lse) = got, want
    bound = 4e-3 if dtype == f16 else 3e-2
    np.testing.assert_allclose(o.astype(np.float64), want_o, atol=bound, rtol=bound)
    for x in lse:
        np.testing.assert_allclose(x, want_lse, atol=2e-4, rtol=2e-4)


DEFAULT = ["causal, more keys", "head_dim 72, causal"]
LONG = ["head_dim 192", "head_dim 256, causal"]


@pytest.mark.parametrize("name", only_long(CASES, *DEFAULT, long=LONG, every=3))
def test_results(name, rng, some):
    shape, dtype, config, options = CASES[name]
    q, k, v = operands(rng, shape, dtype)
    want = expected(q, k, v, **options)
    how = dict(config=TensorMemoryAttentionConfig(*config), **options)
    f = attention.kernel(q, k, v, **how)
    lowered = f.lower(q, k, v, target="sm_100a")
    for seed in some(range(2)):
        outs = [np.zeros(q.shape, dtype)]
        if options.get("return_lse"):
            outs.append(np.zeros((shape[0], shape[2], shape[1]), np.float32))
        run_on_machine(lowered, [q, k, v], outs, seed=seed)
        compare(outs, want, dtype)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(q, k, v, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    races = plgpu.InterpretParams(detect_races=True, seed=1)
    got = attention(q, k, v, **how, interpret=races)
    compare(got if options.get("return_lse") else [got], want, dtype)


def test_refusals(rng):
    q, k, v = operands(rng, (1, 64, 1, 84, 64, 1), f16)
    with pytest.raises(NotImplementedError, match="a multiple of 8 up to 256, got 84; pad q"):
        attention.kernel(q, k, v, config=TensorMemoryAttentionConfig())
    q, k, v = operands(rng, (1, 64, 1, 64, 64, 1), f16)
    with pytest.raises(ValueError, match="stages are 0 or more"):
        attention.kernel(q, k, v, config=TensorMemoryAttentionConfig(-1))
    with pytest.raises(ValueError, match="polynomials None, 0, 8"):
        attention.kernel(q, k, v, config=TensorMemoryAttentionConfig(0, 4))


@pytest.mark.long
def test_registers_of_packed_sequences_with_dropout():
    """Where no exponentials are polynomials."""
    q = plgpu.ShapeDtypeStruct((1, 1000, 2, 128), bf16)
    starts, rows, seed = (plgpu.ShapeDtypeStruct((n,), np.int32) for n in (5, 1152, 1))
    how = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, dropout=0.2, seed=seed, window=(0, 0))
    f = attention.kernel(q, q, q, config=TensorMemoryAttentionConfig(polynomials=0), **how)
    used = f.attention.lower(q, q, q, seed, rows, rows, target="sm_103a").resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0, used


SCORED = list(scored.CASES)


@pytest.mark.filterwarnings("ignore:kernels on host arrays")
@pytest.mark.parametrize("name", only_long(SCORED, "softcap", long=["packed, window"], every=4))
def test_options_of_scores(name, rng, some):
    """Those of Hopper, on several seeds."""
    (grad, q, k, v), options, call = scored.problem(rng, name)
    want, want_lse, _ = scored.reference(grad, q, k, v, **options)
    f = attention.kernel(q, k, v, return_lse=True, config=TensorMemoryAttentionConfig(), **call)
    arrays = [q, k, v, *(call[n] for n in ("bias", "seed") if n in call)]
    if "cu" in options:
        arrays += f.ranges(call["cu_seqlens_q"], call["cu_seqlens_k"])
        f = f.attention
    lowered = f.lower(*arrays, target="sm_100a")
    for seed in some(range(2)):
        o, lse = np.zeros(q.shape, q.dtype), np.zeros(want_lse.shape, np.float32)
        run_on_machine(lowered, arrays, [o, lse], seed=seed)
        scored.near(o, want, q.dtype)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-4, atol=2e-4)
    for target in some(("sm_100a", "sm_103a")):
        used = f.lower(*arrays, target=target).resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    races = plgpu.InterpretParams(detect_races=True, seed=1)
    config = TensorMemoryAttentionConfig(polynomials=8)
    o, lse = attention(q, k, v, return_lse=True, config=config, interpret=races, **call)
    scored.near(o, want, q.dtype)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-4, atol=2e-4)
