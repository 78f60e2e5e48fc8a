"""Attention with options of its scores, and its gradients, against float64: softcap, bias, windows,
diagonals that end at the last key, packed sequences, dropout. Every case also runs under the
checker: no unordered accesses."""

import re

import ml_dtypes
import numpy as np
import pytest
from fuzz.ops_training import kept

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import _open_rows

CHECKED = plgpu.InterpretParams(detect_races=True, on_race="raise")
PACKED = [0, 100, 100, 130, 300], [0, 90, 150, 151, 310]
CASES = {  # batch, queries, heads, head_dim, keys, kv_heads; options; bias: which dims are not 1
    "softcap": ((1, 300, 2, 64, 200, 2), {"softcap": 5.0}),
    "bias": ((1, 130, 2, 128, 200, 1), {"bias": (1, 1, 1, 1)}),
    "bias of keys": ((2, 130, 2, 64, 200, 1), {"bias": (0, 1, 0, 1)}),
    "bias of queries": ((2, 70, 2, 64, 200, 1), {"bias": (1, 0, 1, 0)}),
    "one bias": ((1, 130, 2, 64, 200, 1), {"bias": (0, 0, 0, 0), "causal": True}),
    "window": ((1, 400, 1, 64, 400, 1), {"window": (30, 20)}),
    "window before": ((1, 400, 1, 128, 500, 1), {"window": (70, None), "causal": True}),
    "more keys": ((1, 100, 2, 64, 333, 1), {"causal": True, "bottom_right": True}),
    "fewer keys": ((1, 333, 2, 128, 100, 1), {"causal": True, "bottom_right": True}),
    "diagonal": ((1, 333, 2, 64, 100, 1), {"window": (0, 0), "bottom_right": True}),
    "packed": ((1, 300, 2, 64, 310, 1), {"cu": PACKED}),
    "packed, causal": (
        (1, 300, 2, 128, 310, 1),
        {"cu": ([0, 100, 100, 130, 290], [0, 90, 150, 151, 305]), "causal": True},
    ),
    "packed, window": (
        (1, 300, 2, 64, 310, 1),
        {"cu": PACKED, "causal": True, "bottom_right": True, "window": (40, None)},
    ),
    "dropout": ((2, 130, 2, 64, 200, 1), {"dropout": 0.3}),
    "dropout of one key": ((1, 70, 2, 64, 1, 1), {"dropout": 0.25}),
    "dropout, causal": ((1, 70, 1, 128, 80, 1), {"dropout": 0.25, "causal": True}),
    "all": (
        (1, 130, 1, 128, 200, 1),
        {
            "dropout": 0.1,
            "bias": (0, 0, 1, 1),
            "softcap": 3.0,
            "window": (100, 3),
            "cu": ([0, 60, 130], [0, 70, 200]),
        },
    ),
    "negative scale": ((1, 70, 2, 64, 90, 1), {"scale": -0.4, "causal": True}),
    "scale of 0": ((1, 70, 2, 64, 90, 1), {"scale": 0.0}),
    "256": ((1, 70, 2, 256, 200, 1), {}),
    "256, causal": ((1, 200, 1, 256, 150, 1), {"causal": True}),
    "256, more": ((1, 130, 1, 256, 100, 1), {"softcap": 2.0, "bias": (0, 1, 1, 1)}),
}


def visible(queries, keys, cu, causal, window, bottom_right):
    found = np.zeros((queries, keys), bool)
    left, right = window or (None, None)
    right = 0 if causal else right
    starts_q, starts_k = cu or ([0, queries], [0, keys])
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        shift = (d - c) - (b - a) if bottom_right else 0
        distance = np.arange(d - c)[None] - (np.arange(b - a)[:, None] + shift)
        keep = np.ones(distance.shape, bool)
        keep &= True if left is None else distance >= -left
        found[a:b, c:d] = keep & (True if right is None else distance <= right)
    return found


def reference(grad, q, k, v, *, causal=False, window=None, bottom_right=False, softcap=None,
              bias=None, cu=None, dropout=0.0, seed=None, given=None, scale=None):  # fmt: skip
    """(o, lse, [dq, dk, dv, dbias]) in float64. given: o as the gradients are given it, rounded:
    rows that see one key have a gradient of q that is the difference of o and one value."""
    grad, q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (grad, q, k, v))
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = dim**-0.5 if scale is None else scale
    s, slope = q @ k.swapaxes(-1, -2) * scale, 1.0
    if softcap:
        t = np.tanh(s / softcap)
        s, slope = softcap * t, 1 - t * t
    if bias is not None:
        s = s + bias.astype(np.float64)
    s = np.where(visible(queries, keys, cu, causal, window, bottom_right), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = (np.where(np.isfinite(top), top, 0) + np.log(total))[..., 0]
        p = np.where(total > 0, p / total, 0)
    keep = kept(batch, heads, queries, keys, dropout, seed)
    o = (p * keep) @ v
    used = o if given is None else given.astype(np.float64).transpose(0, 2, 1, 3)
    ds = p * (keep * (grad @ v.swapaxes(-1, -2)) - (grad * used).sum(-1, keepdims=True))
    db, ds = ds, ds * slope * scale
    dk, dv = ds.swapaxes(-1, -2) @ q, (p * keep).swapaxes(-1, -2) @ grad
    dk, dv = (x.reshape(batch, -1, group, keys, dim).sum(2) for x in (dk, dv))
    found = [x.transpose(0, 2, 1, 3) for x in (ds @ k, dk, dv)]
    if bias is not None:
        axes = tuple(i for i, n in enumerate(bias.shape) if n == 1)
        found.append(db.sum(axes, keepdims=True))
    return o.transpose(0, 2, 1, 3), lse, found


def problem(rng, name, dtype=np.float16):
    """(grad, q, k, v), options of the reference, options of ops."""
    (batch, queries, heads, dim, keys, kv_heads), options = CASES[name]
    q, grad = rng.standard_normal((2, batch, queries, heads, dim)).astype(dtype)
    k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
    options = dict(options)
    if "bias" in options:
        whole = batch, heads, queries, keys
        shape = [n if there else 1 for n, there in zip(whole, options["bias"])]
        options["bias"] = rng.standard_normal(shape).astype(dtype)
    if "dropout" in options:
        options["seed"] = np.asarray([7], np.int32)
    call = dict(options)
    if "cu" in call:
        starts = call.pop("cu")
        call["cu_seqlens_q"], call["cu_seqlens_k"] = (np.asarray(x, np.int32) for x in starts)
    return (grad, q, k, v), options, call


def near(got, want, dtype, scale=None):
    unit = 3e-3 if dtype == np.float16 else 2e-2
    scale = np.abs(want).max() if scale is None else scale
    assert got.shape == want.shape
    assert np.abs(got.astype(np.float64) - want).max() <= unit * max(scale, 0.3)


@pytest.mark.parametrize("name", CASES)
def test_forward(rng, name, interpret=CHECKED):
    (grad, q, k, v), options, call = problem(rng, name)
    want, want_lse, _ = reference(grad, q, k, v, **options)
    o, lse = ops.attention(q, k, v, return_lse=True, interpret=interpret, **call)
    near(o, want, q.dtype)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


OPEN = {  # sizes that are known when the kernel runs; other cases are above
    "odd rows": ((2, 67, 4, 64, 201, 2), {"bias": (1, 1, 1, 1), "dropout": 0.2}),
    "even rows": ((3, 70, 2, 64, 130, 1), {"bias": (0, 1, 1, 1), "causal": True}),
    "one entry": ((1, 70, 2, 64, 131, 1), {"bias": (0, 1, 0, 1), "bottom_right": True,
                                           "causal": True}),
    "divided": ((1, 3, 2, 64, 1700, 1), {"bias": (0, 1, 1, 1), "dropout": 0.1}),
}  # fmt: skip
WITH_ARRAYS = [name for name in CASES if {"bias", "dropout"} & {*CASES[name][1]}]


@pytest.mark.parametrize("name", [*WITH_ARRAYS, *OPEN])
def test_one_program_of_all_sizes(rng, name, monkeypatch):
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 16 if name == "divided" else 2)
    if name in OPEN:
        monkeypatch.setitem(CASES, name, OPEN[name])
    test_forward(rng, name)
    plgpu.clear_caches()


@pytest.mark.parametrize("most", [100, 3000])
@pytest.mark.parametrize("dims", [(0, 1, 1, 1), (0, 0, 0, 1), (1, 1, 0, 0), None])
def test_random_sizes_have_at_most_twelve_programs(rng, monkeypatch, dims, most):
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    made, spec = set(), plgpu.ShapeDtypeStruct
    for _ in range(40):
        n, m = (int(rng.integers(1, k)) for k in (most, 3000))
        q, k = spec((1, n, 8, 64), np.float16), spec((1, m, 2, 64), np.float16)
        if dims:
            shape = (there and size or 1 for there, size in zip(dims, (1, 8, n, m)))
            how = {"bias": spec((*shape,), np.float32)}
        else:
            how = {"dropout": 0.1, "seed": spec((1,), np.int32)}
        found = ops.attention.kernel(q, k, k, causal=True, bottom_right=True, **how)
        for part in (found.parts, found.merge) if hasattr(found, "parts") else (found,):
            made.add(getattr(part, "kernel", part))
    assert len(made) <= 12
    plgpu.clear_caches()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_rows_after_the_last_sequence_mean_nothing(rng, dim, causal):
    """Buffers are longer than what is packed, and nobody has written there."""
    q, k, v = rng.standard_normal((3, 1, 300, 1, dim)).astype(np.float16)
    starts = np.array([0, 70, 201], np.int32)
    how = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": causal, "interpret": CHECKED}
    want = ops.attention(q[:, :201], k[:, :201], v[:, :201], **how)
    for x in (q, k, v):
        x[:, 201:] = np.nan
    np.testing.assert_array_equal(ops.attention(q, k, v, **how)[:, :201], want)


@pytest.mark.usefixtures("one_sm")
@pytest.mark.parametrize("products", [7, 5])
@pytest.mark.parametrize("name", CASES)
def test_gradients(rng, name, products, interpret=CHECKED):
    how = {"config": ops.AttentionBackwardConfig(products), "interpret": interpret}
    check_gradients(rng, name, products, **how)


def check_gradients(rng, name, products, **how):
    (grad, q, k, v), options, call = problem(rng, name)
    dim, more = q.shape[3], {"bias", "softcap", "dropout"} & {*options}
    o, lse = ops.attention(q, k, v, return_lse=True, interpret=how["interpret"] and True, **call)
    how["bias_gradient"] = "bias" in options
    if products == 5 and (dim == 256 or dim == 128 and more):
        with pytest.raises(NotImplementedError, match="products=7"):
            ops.attention_backward(grad, q, k, v, o, lse, **how, **call)
        return
    found = ops.attention_backward(grad, q, k, v, o, lse, **how, **call)
    _, _, want = reference(grad, q, k, v, given=o, **options)
    assert len(found) == len(want)
    for got, expected in zip(found[:3], want):
        near(got, expected, q.dtype)
    for got, expected in zip(found[3:], want[3:]):  # sums along keys are 0 but for rounding
        summed = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] / got.size
        near(got, expected, q.dtype, scale=max(np.abs(expected).max(), summed**0.5))
    return ops.attention_backward.kernel(grad, q, k, v, o, lse, **how, **call)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [*CASES, *OPEN])
def test_gradients_by_programs_of_all_sizes(rng, name, deterministic, monkeypatch):
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 2)
    if name in OPEN:
        monkeypatch.setitem(CASES, name, OPEN[name])
    how = {"deterministic": deterministic, "interpret": CHECKED}
    assert check_gradients(rng, name, None, **how).is_open
    plgpu.clear_caches()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(rng, name):
    test_forward(rng, name, interpret=None)
    for products in (7, 5):
        test_gradients(rng, name, products, interpret=None)


@pytest.mark.gpu
def test_five_products_on_a_gpu(rng):
    test_five_products_in_bfloat16(rng, interpret=None)


@pytest.mark.usefixtures("one_sm")
@pytest.mark.long
def test_five_products_in_bfloat16(rng, interpret=CHECKED):
    """Several blocks of keys add to dQ; results have the memory that is given."""
    q, grad = rng.standard_normal((2, 2, 200, 4, 128)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, 2, 300, 2, 128)).astype(ml_dtypes.bfloat16)
    o, lse = ops.attention(q, k, v, return_lse=True, interpret=interpret and True)
    out = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    for config in (None, ops.AttentionBackwardConfig(5, 1)):
        ops.attention_backward(grad, q, k, v, o, lse, config=config, out=out, interpret=interpret)
        for got, want in zip(out, reference(grad, q, k, v)[2]):
            near(got, want, q.dtype)


def test_deterministic_dropout(rng):
    """A seed decides, wherever the kernel's blocks begin; another one decides otherwise."""
    (_, q, k, v), _, call = problem(rng, "dropout")
    small = ops.AttentionConfig(1, 64, 2, programs=1)
    first = ops.attention(q, k, v, interpret=True, **call)
    near(ops.attention(q, k, v, config=small, interpret=True, **call), first, q.dtype)
    call["seed"] = np.asarray([8], np.int32)
    assert np.abs(ops.attention(q, k, v, interpret=True, **call) - first).max() > 0.1


@pytest.mark.long
def test_no_spills():
    S = plgpu.ShapeDtypeStruct
    x, lse = S((1, 1024, 4, 128), np.float16), S((1, 4, 1024), np.float32)
    bias, seed = S((1, 4, 1024, 1024), np.float16), S((1,), np.int32)
    rows = x, x, x, x, lse, lse
    for options in ({"window": (200, 0)}, {"softcap": 9.0}, {"bias": bias}, {"seed": seed}):
        given = {"dropout": 0.1, **options} if "seed" in options else options
        more = [a for a in options.values() if isinstance(a, S)]
        forward = ops.attention.kernel(x, x, x, **given)
        kernels = [(getattr(forward, "parts", forward), (x, x, x, *more))]
        backward = ops.attention_backward.kernel(x, x, x, x, x, lse, deterministic=True, **given)
        kernels += [(backward.by_keys, (*rows, *more)), (backward.by_queries, (*rows, *more))]
        if hasattr(forward, "merge"):
            partial = forward.parts.lower(x, x, x, *more, target="sm_90a").outputs
            kernels.append((forward.merge, [S(*o) for o in partial]))
        for kernel, arrays in kernels:
            used = kernel.lower(*arrays, target="sm_90a").resources()
            assert (used["spill_bytes"], used["remarks"]) == (0, ""), (options, used)


@pytest.mark.usefixtures("one_sm")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["full", "causal", "groups", "window", "packed", "rotary"])
def test_no_spills_of_five_products(dim, kind):
    S = plgpu.ShapeDtypeStruct
    x, k = (
        S((2, 1024, 4, dim), np.float16),
        S((2, 1024, 2 if kind == "groups" else 4, dim), np.float16),
    )
    lse, options, more = S((2, 4, 1024), np.float32), {"causal": kind != "full"}, []
    if kind == "window":
        options["window"] = 100, 0
    if kind == "packed":
        x, k, lse = (S((1, *y.shape[1:]), y.dtype) for y in (x, k, lse))
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), S((4,), np.int32))
        more = [S((1152,), np.int32)] * 2
    if kind == "rotary":
        more = [S((1024, dim // 2), np.float16)] * 2
        options |= dict(zip(("cos", "sin"), more))
    found = ops.attention_backward.kernel(x, x, k, k, x, lse, **options)
    for kernel in (found.fused.fused, found.fused.converting):
        used = kernel.lower(x, x, k, k, lse, lse, *more, target="sm_90a").resources()
        assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used


def _errors(q, bias, cu, seed):
    return {
        "window must be": {"window": (-1, 0)},
        "window must be [(]left": {"window": 5},
        "window must be.*got [(]1, 2, 3": {"window": (1, 2, 3)},
        "scale must be finite": {"scale": float("nan")},
        "softcap must not be negative": {"softcap": -1.0},
        "softcap must be finite in float32": {"softcap": 1e39},
        "dropout must be": {"dropout": 1.0, "seed": seed},
        "dropout and seed": {"dropout": 0.5},
        "seed must be": {"dropout": 0.5, "seed": np.zeros(2, np.int32)},
        "bias must have": {"bias": bias[:, :, :5]},
        "given together": {"cu_seqlens_q": cu},
        "cu_seqlens_k must be": {"cu_seqlens_q": cu, "cu_seqlens_k": cu[:2]},
    }


@pytest.mark.parametrize("words", _errors(*[np.zeros((1, 1, 9), np.int32)] * 4))
def test_errors(words):
    q, bias = np.zeros((1, 16, 2, 64), np.float16), np.zeros((1, 2, 16, 16), np.float16)
    options = _errors(q, bias, np.asarray([0, 8, 16], np.int32), np.zeros(1, np.int32))[words]
    with pytest.raises(ValueError, match=f"attention: .*{words}"):
        ops.attention(q, q, q, interpret=True, **options)


@pytest.mark.parametrize("op", (ops.attention, ops.attention_decode))
def test_windows_without_an_end(op, rng):
    """Their sides are beyond int32, or reach beyond it with a position added."""
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float16) for n in (3, 70, 70))
    lengths = np.array([66], np.int32)
    how = {"bottom_right": True} if op is ops.attention else {}
    want = op(q, k, v, kv_lengths=lengths, interpret=True)
    for window in ((2**31 - 1, 2**31 - 2), (2**40, None), (None, 1 << 30)):
        got = op(q, k, v, kv_lengths=lengths, window=window, interpret=True, **how)
        np.testing.assert_allclose(got, want, atol=1e-3)


def test_configs_of_other_types():
    q, c = np.zeros((1, 16, 2, 128), np.float16), np.zeros((1, 16, 128), np.float16)
    for call, config in (
        (lambda c: ops.attention(q, q, q, config=c), ops.AttentionConfig(block=64.0)),
        (lambda c: ops.attention_decode(q, q, q, config=c), ops.AttentionDecodeConfig(stages=1.5)),
        (lambda k: ops.mla_decode(q, c, value_dim=128, config=k), ops.MlaConfig(stages="2")),
    ):
        with pytest.raises(TypeError, match=f"of {type(config).__name__} must be an int, got"):
            call(config)


def test_numbers_that_are_none():
    q = np.zeros((1, 16, 2, 64), np.float16)
    for what in ("scale", "softcap"):
        with pytest.raises(TypeError, match=f"attention: {what} must be a number"):
            ops.attention(q, q, q, interpret=True, **{what: "x"})


def test_errors_of_gradients():
    q, lse = np.zeros((1, 16, 2, 64), np.float16), np.zeros((1, 2, 16), np.float32)
    with pytest.raises(ValueError, match="needs the bias"):
        ops.attention_backward(q, q, q, q, q, lse, bias_gradient=True)
    with pytest.raises(TypeError, match="must be an AttentionBackwardConfig"):
        ops.attention_backward(q, q, q, q, q, lse, config=5)
    with pytest.raises(ValueError, match="5 or 7 products"):
        ops.attention_backward(q, q, q, q, q, lse, config=ops.AttentionBackwardConfig(6))
    with pytest.raises(NotImplementedError, match="deterministic"):
        config = ops.AttentionBackwardConfig(5)
        ops.attention_backward(q, q, q, q, q, lse, config=config, deterministic=True)


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_bias_spills_nothing_and_threads_get_their_registers(dim, dtype):
    """A block that asks for more registers than it began with waits for ever."""
    q = plgpu.ShapeDtypeStruct((2, 2000, 16, dim), np.float16)
    bias = plgpu.ShapeDtypeStruct((1, 16, 2000, 2000), dtype)
    lowered = ops.attention.kernel(q, q, q, bias=bias).lower(q, q, q, bias, target="sm_90a")
    used, text = lowered.resources(), lowered.as_text("cuda")
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used
    (less,), (more,) = (
        {int(n) for n in re.findall(rf"setmaxnreg_{how}<(\d+)>\(\);", text)}
        for how in ("dec", "inc")
    )
    consumers = used["threads"] // 128 - 1
    assert (less + consumers * more) * 128 <= used["registers"] * used["threads"]
