"""Attention with rotary embedding: bit for bit what ops.rotary before attention gives, gradients
within the rounding that it adds; no unordered accesses, no spills."""

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import _open_rows

CHECKED = plgpu.InterpretParams(detect_races=True, on_race="raise")
EMULATED = plgpu.InterpretParams(backend="emulate")
CASES = {  # batch, queries, heads, head_dim, keys, kv_heads; options; rows of the tables beyond
    "registers": ((2, 100, 2, 128, 77, 1), {}, 0),
    "shared memory": ((1, 200, 2, 64, 200, 1), {"causal": True}, 3),
    "after a prefix": ((1, 70, 1, 64, 130, 1), {"causal": True, "bottom_right": True}, 0),
    "padded rows": ((1, 70, 1, 80, 64, 1), {"softcap": 5.0}, 2),
    "by a kernel before": ((1, 40, 2, 112, 70, 1), {"window": (9, 9)}, 0),
    "long rows": ((1, 40, 1, 256, 33, 1), {}, 0),
    "divided keys": ((1, 3, 2, 128, 3000, 1), {}, 0),
    "packed": ((1, 130, 2, 64, 130, 1), {"causal": True, "cu": [0, 50, 50, 130]}, 0),
}


def operands(rng, shape, more, options, dtype=np.float16):
    """q, k, v, a gradient; the tables; those of q and those of k."""
    batch, queries, heads, dim, keys, kv_heads = shape
    sizes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    arrays = [rng.standard_normal((batch, n, h, dim)).astype(dtype) for n, h in sizes]
    first = keys - queries if options.get("bottom_right") else 0
    angles = rng.standard_normal((max(first + queries, keys) + more, dim // 2))
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    parts = slice(first, first + queries), slice(0, keys)
    return arrays, tables, [[t[part].copy() for t in tables] for part in parts]


def given(options):
    """With arrays."""
    starts = options.get("cu")
    rest = {k: x for k, x in options.items() if k != "cu"}
    if starts is None:
        return rest
    starts = np.array(starts, np.int32)
    return rest | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}


def rotated(x, tables, how=True, **options):
    return ops.rotary(x, *tables, interpret=how, **options)


@pytest.mark.parametrize("case", CASES)
def test_forward(rng, case, how=CHECKED, atol=0):
    shape, options, more = CASES[case]
    dtype = ml_dtypes.bfloat16 if more else np.float16
    (q, k, v, _), (cos, sin), (of_q, of_k) = operands(rng, shape, more, options, dtype)
    options = given(options)
    got = ops.attention(q, k, v, cos=cos, sin=sin, interpret=how, **options)
    how = how and True
    q, k = rotated(q, of_q, how), rotated(k, of_k, how)
    want = ops.attention(q, k, v, interpret=how, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_one_program_of_all_lengths(rng, case, monkeypatch):
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    test_forward(rng, case, atol=5e-4 * (case == "divided keys"))  # into other numbers of parts


def kernel_in(function):
    """What runs where the function only shows it arrays with other shapes."""
    return getattr(function, "kernel", function)


@pytest.mark.parametrize("most", [100, 4000])
@pytest.mark.parametrize("options", [{}, {"causal": True, "bottom_right": True}], ids=str)
def test_random_lengths_have_at_most_twelve_programs(rng, monkeypatch, options, most):
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    made, others, spec = set(), set(), plgpu.ShapeDtypeStruct
    for _ in range(40):
        n = int(rng.integers(1, most))
        m = n + int(rng.integers(0, 4000))
        q, k = spec((1, n, 16, 64), np.float16), spec((1, m, 4, 64), np.float16)
        table = spec((m + int(rng.integers(0, 99)), 32), np.float32)
        found = ops.attention.kernel(q, k, k, cos=table, sin=table, **options)
        last = found.attention
        made.add(kernel_in(getattr(last, "parts", last)))
        others |= {kernel_in(found.keys), kernel_in(getattr(last, "merge", found.keys))}
    assert len(made) <= 12 and len(others) <= 12  # others rotate keys and add parts up


GRADIENTS = [
    ("registers", None),
    ("registers", ops.AttentionBackwardConfig(7)),
    ("shared memory", None),
    ("after a prefix", ops.AttentionBackwardConfig(7)),
    ("long rows", None),
    ("packed", None),
]


@pytest.mark.parametrize(
    "case, config",
    [*GRADIENTS, ("by a kernel before", ops.TensorMemoryBackwardConfig())],
    ids=str,
)
def test_gradients(rng, case, config, how=CHECKED):
    shape, options, more = CASES[case]
    (q, k, v, grad), (cos, sin), (of_q, of_k) = operands(rng, shape, more, options)
    plain = how and True
    options, rq, rk = given(options), rotated(q, of_q, plain), rotated(k, of_k, plain)
    o, lse = ops.attention(rq, rk, v, return_lse=True, interpret=plain, **options)
    options["config"] = config
    backward = ops.attention_backward
    got = backward(grad, q, k, v, o, lse, cos=cos, sin=sin, interpret=how, **options)
    dq, dk, dv = backward(grad, rq, rk, v, o, lse, interpret=plain, **options)
    dq, dk = rotated(dq, of_q, plain, inverse=True), rotated(dk, of_k, plain, inverse=True)
    for a, b in zip(got, (dq, dk, dv), strict=True):
        a, b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
        assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max()


@pytest.mark.gpu
def test_on_a_gpu(rng):
    for case in CASES:
        test_forward(rng, case, how=None)
    for case, config in GRADIENTS:
        test_gradients(rng, case, config, how=None)


def test_emulated(rng):
    shape, options, more = CASES["shared memory"]
    (q, k, v, _), (cos, sin), _ = operands(rng, shape, more, options)
    got, want = (
        ops.attention(q, k, v, cos=cos, sin=sin, causal=True, interpret=how)
        for how in (EMULATED, True)
    )
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=2e-3)


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.exhaustive), 128])
def test_no_spills(dim):
    x = plgpu.ShapeDtypeStruct((2, 1024, 4, dim), np.float16)
    t, lse = (plgpu.ShapeDtypeStruct(s, np.float32) for s in ((1024, dim // 2), (2, 4, 1024)))
    how = {"causal": True, "batch_invariant": True}  # keys are not divided
    forward = ops.attention.kernel(x, x, x, cos=t, sin=t, **how).attention
    backward = ops.attention_backward.kernel(
        x, x, x, x, x, lse, cos=t, sin=t, causal=True, deterministic=True
    )
    statistics = x, x, x, x, lse, lse, t, t
    for kernel, arrays in (
        (forward, (x, x, x, t, t)),
        (backward.by_keys, statistics),
        (backward.by_queries, statistics),
    ):
        used = kernel.lower(*arrays, target="sm_90a").resources()
        assert used["spill_bytes"] == 0 and "C75" not in used["remarks"], used


def test_other_targets(rng):
    """Kernels before attention rotate both."""
    x, t = plgpu.ShapeDtypeStruct((1, 64, 1, 64), np.float16), np.zeros((64, 32), np.float32)
    for config in (ops.TensorMemoryAttentionConfig(), ops.MmaAttentionConfig()):
        found = ops.attention.kernel(x, x, x, cos=t, sin=t, config=config)
        assert found.queries is not None and found.keys is not None


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"sin": None}, ValueError, "cos and sin must be given together"),
        ({"cos": np.zeros((7, 32), np.float32)}, ValueError, "length of at least 8"),
        ({"sin": np.zeros((9, 32), np.float32)}, ValueError, r"got \(9, 32\)"),
        ({"cos": np.zeros((8, 64), np.float32)}, ValueError, r"\(length, 32\)"),
        ({"cos": np.zeros((8, 32), np.int32)}, TypeError, "got int32"),
        ({"queries": 9, "bottom_right": True}, ValueError, "as many keys as queries"),
    ],
)
def test_errors(change, error, text):
    q, k = (np.zeros((1, n, 1, 64), np.float16) for n in (change.get("queries", 8), 8))
    tables = {name: np.zeros((8, 32), np.float32) for name in ("cos", "sin")}
    options = tables | {name: x for name, x in change.items() if name != "queries"}
    with pytest.raises(error, match=f"attention: .*{text}"):
        ops.attention(q, k, k, interpret=True, **options)
    if "queries" not in change:
        lse = np.zeros((1, 1, 8), np.float32)
        with pytest.raises(error, match=f"attention_backward: .*{text}"):
            ops.attention_backward(q, q, k, k, q, lse, interpret=True, **options)
