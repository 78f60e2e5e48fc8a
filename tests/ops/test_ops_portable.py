"""`ops` on GPUs without wgmma and tensor memory: sm_80, sm_86, sm_89 (cp.async) and sm_120a (TMA).

The call chooses the kernel of the target; interpreter and emulated machine give NumPy's results,
and the programs have what a fast kernel needs."""

import os
import re
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
import test_attention_options as scored

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import MmaAttentionConfig, MmaConfig

P = plgpu.InterpretParams
e4m3, e5m2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
f16, bf16, f32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TARGETS = ["sm_80", "sm_86", "sm_89", "sm_120a"]


@pytest.fixture
def on(monkeypatch):
    """on(target): what kernels are lowered for from now on."""

    def choose(target):
        monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
        plgpu.clear_caches()  # functions of ops choose once for each signature

    yield choose
    plgpu.clear_caches()


def ways(exact):
    """Options of a call for each way of running it, with seeds."""
    yield {"interpret": P(detect_races=True)}
    yield {"interpret": P(detect_races=True, seed=3)}
    if exact:
        yield {"interpret": P(backend="emulate", seed=1)}


def check_program(kernel, *arrays, copies):
    """Machine code without local memory; tiles by 16-byte copies and ldmatrix."""
    low = kernel.lower(*arrays)
    text, used = low.as_text("cuda"), low.resources()
    main = text[text.index("__global__") :]
    assert used["spill_bytes"] == used["stack_bytes"] == 0
    assert "mma_m16n8k16" in main and "ldmatrix_x4" in main
    assert "wgmma" not in main
    if copies:
        found = re.findall(r"(?:cp_async(?:_or_zeros)?<(\d+)>|(tma_load)_\dd)\(", main)
        assert found and set(found) <= {("16", ""), ("", "tma_load")}
        assert re.search(r"st_global<\w+, [48]>", main)
    return main


# ---- matmul --------------------------------------------------------------------------------------

PRODUCTS = {  # M, N, K, dtype, options
    "whole tiles": (256, 128, 96, bf16, {}),
    "ragged": (130, 72, 40, f16, {"transpose_b": True, "bias": 1, "activation": "relu"}),
    "odd": (33, 65, 17, f16, {}),
    "transposed": (72, 136, 64, bf16, {"transpose_a": True, "transpose_b": True}),
    "A transposed": (64, 64, 104, f16, {"transpose_a": True, "out_dtype": "float32"}),
    "one row": (1, 200, 64, bf16, {"out_dtype": "float32"}),
    "wide step": (150, 200, 200, f16, {"config": MmaConfig(64, 128, 64, 3, 2)}),
    "many slots": (64, 64, 64, f16, {"config": MmaConfig(64, 64, 32, 6)}),
    "large tiles": (200, 264, 72, bf16, {"config": MmaConfig(), "bias": 1}),
}


def product(name, rng):
    m, n, k, dtype, options = PRODUCTS[name]
    options = dict(options)
    a, b = rng.integers(-3, 4, (m, k)).astype(dtype), rng.integers(-3, 4, (k, n)).astype(dtype)
    want = a.astype(f32) @ b.astype(f32)
    if options.get("bias"):
        options["bias"] = rng.integers(-3, 4, n).astype(dtype)
        want = want + options["bias"].astype(f32)
    if options.get("activation"):
        want = np.maximum(want, 0)
    a = np.ascontiguousarray(a.T) if options.get("transpose_a") else a
    b = np.ascontiguousarray(b.T) if options.get("transpose_b") else b
    return a, b, options, want.astype(options.get("out_dtype", dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmul(name, target, on, rng):
    on(target)
    a, b, options, want = product(name, rng)
    for how in ways(target in ("sm_80", "sm_120a")):
        np.testing.assert_array_equal(ops.matmul(a, b, **options, **how), want)
    if name in ("whole tiles", "transposed", "large tiles"):
        bias = [options["bias"]] if "bias" in options else []
        kernel = ops.matmul.kernel(a, b, **options)
        main = check_program(kernel, a, b, *bias, copies=name != "transposed")
        assert ("cp_async" in main) == (target != "sm_120a")


FLOATS8 = {  # M, N, K, dtypes, form of the scales, options
    "whole": (128, 128, 128, (e4m3, e4m3), None, {"transpose_b": True}),
    "mixed": (130, 72, 200, (e4m3, e5m2), None, {"transpose_a": True, "out_dtype": "float32"}),
    "by row": (70, 136, 300, (e5m2, e5m2), "each", {"transpose_b": True, "bias": 1}),
    "by one": (33, 65, 17, (e4m3, e4m3), "one", {"activation": "relu"}),
    "by block": (100, 200, 300, (e4m3, e4m3), "blocks", {"transpose_b": True}),
    "mixed by block": (64, 130, 256, (e5m2, e4m3), "blocks", {}),
}


def product_of_8_bits(name, rng):
    m, n, k, (of_a, of_b), form, options = FLOATS8[name]
    options = dict(options)
    a, b = rng.integers(-3, 4, (m, k)).astype(of_a), rng.integers(-3, 4, (k, n)).astype(of_b)
    wide_a, wide_b = a.astype(f32), b.astype(f32)
    if form:
        blocks_n, blocks_k = -(-n // 128), -(-k // 128)
        shapes = {"one": ((), ()), "each": ((m,), (n,))}
        shapes["blocks"] = (m, blocks_k), (blocks_n, blocks_k)
        of_a, of_b = (np.asarray(rng.integers(1, 4, shape), f32) for shape in shapes[form])
        options |= {"scale_a": of_a, "scale_b": of_b}
        if form == "blocks":
            of_a = of_a.repeat(128, 1)[:, :k]
            of_b = of_b.repeat(128, 0).repeat(128, 1)[:n, :k]
        elif form == "each":
            of_a, of_b = of_a[:, None], of_b[:, None]
        wide_a, wide_b = wide_a * of_a, wide_b * of_b.T
    want = wide_a @ wide_b
    if options.get("bias"):
        options["bias"] = rng.integers(-3, 4, n).astype(f32)
        want = want + options["bias"]
    if options.get("activation"):
        want = np.maximum(want, 0)
    a = np.ascontiguousarray(a.T) if options.get("transpose_a") else a
    b = np.ascontiguousarray(b.T) if options.get("transpose_b") else b
    return a, b, options, want.astype(options.get("out_dtype", bf16))


@pytest.mark.filterwarnings("ignore:not portable to JAX")
@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FLOATS8)
def test_matmul_of_8_bits(name, target, on, rng):
    """sm_80 and sm_86 multiply in float16; the others only where the dtypes differ."""
    on(target)
    a, b, options, want = product_of_8_bits(name, rng)
    for how in ways(target in ("sm_80", "sm_89", "sm_120a")):
        np.testing.assert_array_equal(ops.matmul(a, b, **options, **how), want)
    if name not in ("whole", "by block"):
        return
    scales = [options[x] for x in ("scale_a", "scale_b") if x in options]
    x = np.zeros((1024, 1024), a.dtype)
    scales = [np.zeros((1024, 8), f32), np.zeros((8, 8), f32)] if scales else []
    kernel = ops.matmul.kernel(x, x, transpose_b=True, **dict(zip(("scale_a", "scale_b"), scales)))
    low = kernel.lower(x, x, *scales)
    used = low.resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0
    native = target in ("sm_89", "sm_120a")
    assert ("mma_m16n8k32_f32_e4m3" in low.as_text("cuda")) == native


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [f16, e4m3])
@pytest.mark.parametrize("out_dtype", [f32, bf16])
def test_matmul_accumulates(out_dtype, dtype, target, on, rng):
    on(target)
    for m, n, k in (128, 128, 64), (70, 65, 40):
        a, b = rng.integers(-2, 3, (m, k)).astype(dtype), rng.integers(-2, 3, (k, n)).astype(dtype)
        there = rng.integers(-8, 9, (m, n)).astype(out_dtype)
        product = (a.astype(f32) @ b.astype(f32)).astype(out_dtype)
        want = (there.astype(f32) + product.astype(f32)).astype(out_dtype)
        for how in True, P(backend="emulate"):
            out = there.copy()
            ops.matmul(a, b, accumulate=True, out_dtype=out_dtype, out=out, interpret=how)
            np.testing.assert_array_equal(out, want)


def test_matmul_refuses(on):
    on("sm_89")
    a, x = np.zeros((64, 64), f16), np.zeros((64, 256), e4m3)
    with pytest.raises(ValueError, match="accumulate=True adds to out="):
        ops.matmul(a, a, accumulate=True, interpret=True)
    with pytest.raises(NotImplementedError, match="accumulate=True with a bias"):
        ops.matmul(a, a, bias=a[0], accumulate=True)
    with pytest.raises(ValueError, match="scale_a is for 8-bit floats"):
        ops.matmul(a, a, scale_a=np.ones((), f32))
    with pytest.raises(ValueError, match="a step of 64 or 128 for float8_e4m3fn"):
        ops.matmul(x, x, transpose_b=True, config=MmaConfig())
    scales = {"scale_a": np.ones((64, 2), f32), "scale_b": np.ones((1, 2), f32)}
    with pytest.raises(ValueError, match="with scales of blocks tile_m must be 64"):
        ops.matmul(x, x, transpose_b=True, config=MmaConfig(128, 64, 128), **scales)
    with pytest.raises(ValueError, match="tile_m and a tile_n of 64 or 128"):
        ops.matmul(a, a, config=MmaConfig(32))
    with pytest.raises(ValueError, match="exceed the 101376 bytes of shared memory of sm_89"):
        ops.matmul(np.zeros((64, 999), f16), np.zeros((999, 64), f16), config=MmaConfig(stages=8))


# ---- attention -----------------------------------------------------------------------------------

SCORES = {  # batch, queries, heads, head_dim, keys, heads of keys, options
    "whole": (1, 128, 2, 64, 128, 1, {}),
    "causal": (2, 100, 2, 64, 200, 2, {"causal": True}),
    "few keys": (1, 5, 1, 64, 9, 1, {"causal": True}),
    "wide": (1, 70, 2, 128, 130, 1, {"causal": True}),
    "negative scale": (1, 64, 1, 128, 96, 1, {"scale": -0.1}),
    "widest": (1, 40, 1, 256, 70, 1, {}),
    "slots": (1, 64, 1, 64, 80, 1, {"config": MmaAttentionConfig(64, 16, 4)}),
}


def attended(q, k, v, causal=False, scale=None, config=None):
    q, k, v = (x.astype(f32) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        s = np.where(np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    sums = p.sum(-1, keepdims=True)
    lse = (s.max(-1, keepdims=True) + np.log(sums))[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", p / sums, v), lse


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SCORES)
def test_attention(name, target, on, rng):
    on(target)
    batch, queries, heads, dim, keys, kv_heads, options = SCORES[name]
    q = rng.standard_normal((batch, queries, heads, dim)).astype(bf16)
    k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(bf16)
    want, sums = attended(q, k, v, **options)
    for how in ways(target in ("sm_86", "sm_120a")):
        o, lse = ops.attention(q, k, v, return_lse=True, **options, **how)
        np.testing.assert_allclose(o.astype(f32), want, rtol=3e-2, atol=3e-2)
        np.testing.assert_allclose(lse, sums, rtol=1e-2, atol=1e-2)
    if name in ("whole", "few keys", "widest"):
        kernel = ops.attention.kernel(q, k, v, return_lse=True, **options)
        check_program(kernel, q, k, v, copies=True)


def test_attention_fits(on, request):
    """Shared memory for two blocks on an SM, for one with 256 columns; registers where one block of
    keys overhangs, too."""
    targets = ("sm_80", (64, 128)), ("sm_86", (64, 128)), ("sm_120a", (64, 128, 256))
    for target, dims in targets if request.config.option.long else targets[2:]:
        on(target)
        gpu = plgpu._core.target(target)
        for dim in dims:
            x = np.zeros((1, 200, 1, dim), f16)
            used = ops.attention.kernel(x, x, x).lower(x, x, x).resources()
            assert used["spill_bytes"] == used["stack_bytes"] == 0
            blocks = 1 if dim == 256 else 2
            assert (used["smem_bytes"] + 1024) * blocks <= gpu["smem"] + 1024
    with pytest.raises(ValueError, match="takes .* bytes of shared memory with head_dim 256"):
        ops.attention(x, x, x, config=MmaAttentionConfig(128, 64, 2))


QUICK = ["bias", "window before", "packed, causal", "all"]


def two_targets_each():
    """Each case for two of the targets; the others are for exhaustive runs."""
    for k, name in enumerate(scored.CASES):
        late = [] if name in QUICK else pytest.mark.long
        for target in TARGETS:
            kept = target in (("sm_80", "sm_89"), ("sm_86", "sm_120a"))[k % 2]
            yield pytest.param(name, target, marks=late if kept else pytest.mark.exhaustive)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name, target", two_targets_each())
def test_attention_options(name, target, on, rng, some):
    """Results, races on two seeds, the emulated machine, and machine code without local memory.
    Without --exhaustive few run on the emulated machine."""
    emulated = target in ("sm_80", "sm_120a") and (
        name in ("packed, causal", "dropout", "256, causal") or len(some(range(2))) == 2
    )
    on(target)
    (_, q, k, v), options, call = scored.problem(rng, name)
    want, want_lse, _ = scored.reference(q, q, k, v, **options)
    for how in ways(emulated):
        o, lse = ops.attention(q, k, v, return_lse=True, **call, **how)
        scored.near(o, want, q.dtype)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)
    kernel = ops.attention.kernel(q, k, v, return_lse=True, **call)
    arrays = [x for x in call.values() if isinstance(x, np.ndarray)]
    if "cu_seqlens_q" in call:
        kernel, rows = kernel.attention, np.zeros(-(-q.shape[1] // 384) * 384, np.int32)
        arrays = [x for what, x in call.items() if what in ("bias", "seed") and x is not None]
        arrays += [rows, rows]
    used = kernel.lower(q, k, v, *arrays).resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


# ---- rows ----------------------------------------------------------------------------------------


def of_rows(name, x):
    if name == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    d = x - x.mean(-1, keepdims=True) if name == "layer_norm" else x
    eps = 1e-5 if name == "layer_norm" else 1e-6
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + eps)


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm"])
def test_rows(name, target, on, rng):
    on(target)
    for shape in (16, 1024), (300, 64), (3, 16384), (2, 20000), (5, 333):
        x = rng.standard_normal(shape).astype(bf16)
        want = of_rows(name, x.astype(f32))
        for invariant in False, True:
            got = getattr(ops, name)(x, batch_invariant=invariant, interpret=True).astype(f32)
            np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2 * np.abs(want).max())
        low = getattr(ops, name).kernel(x).lower(x)
        assert low.resources()["spill_bytes"] == 0
        assert "cluster_sync" not in low.as_text("cuda")


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_programs_of_sm_80():
    """PTX of compute_80 on the GPU that is there, in a process whose kernels are all for sm_80."""
    script = """
    import ml_dtypes
    import numpy as np
    import pallas_mgpu as plgpu
    from pallas_mgpu import ops

    rng = np.random.default_rng(0)
    for m, n, k in (512, 512, 512), (130, 72, 40), (1, 200, 64), (1000, 999, 1001):
        a = rng.integers(-3, 4, (m, k)).astype(np.float16)
        b = rng.integers(-3, 4, (k, n)).astype(np.float16)
        got = ops.matmul(*map(plgpu.device_put, (a, b)), out_dtype=np.float32).numpy()
        np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))
        out = plgpu.device_put(np.ones((m, n), np.float32))
        operands = map(plgpu.device_put, (a, b))
        ops.matmul(*operands, accumulate=True, out_dtype=np.float32, out=out)
        np.testing.assert_array_equal(out.numpy(), 1 + a.astype(np.float32) @ b.astype(np.float32))
        e4m3, e5m2 = (x.astype(t) for x, t in ((a, "float8_e4m3fn"), (b, "float8_e5m2")))
        got = ops.matmul(*map(plgpu.device_put, (e4m3, e5m2)), out_dtype=np.float32).numpy()
        np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))
    for dim in 64, 128, 256:
        q, k, v = rng.standard_normal((3, 2, 300, 2, dim)).astype(np.float16)
        for causal in False, True:
            got = ops.attention(*map(plgpu.device_put, (q, k, v)), causal=causal).numpy()
            s = np.einsum("bqhd,bkhd->bhqk", *(x.astype(np.float32) for x in (q, k)))
            s *= dim**-0.5
            if causal:
                s = np.where(np.tri(300, dtype=bool), s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            want = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.astype(np.float32))
            np.testing.assert_allclose(got.astype(np.float32), want, rtol=2e-2, atol=2e-2)
    q, k, v = rng.standard_normal((3, 1, 300, 2, 64)).astype(np.float16)
    bias = rng.standard_normal((1, 2, 300, 300)).astype(np.float16)
    for starts in None, [0, 100, 300]:
        packed = {}
        if starts:
            cu = plgpu.device_put(np.asarray(starts, np.int32))
            packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        got = ops.attention(
            *map(plgpu.device_put, (q, k, v)), bias=plgpu.device_put(bias), softcap=5.0,
            window=(40, 3), **packed,
        ).numpy()
        s = np.einsum("bqhd,bkhd->bhqk", *(x.astype(np.float32) for x in (q, k))) / 8
        s = 5 * np.tanh(s / 5) + bias
        i, j = np.arange(300)[:, None], np.arange(300)
        keep = (j >= i - 40) & (j <= i + 3)
        if starts:
            keep &= (i < 100) == (j < 100)
        s = np.where(keep, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.astype(np.float32))
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2e-2, atol=2e-2)
    x = rng.standard_normal((300, 1000)).astype(np.float32)
    got = ops.rms_norm(plgpu.device_put(x)).numpy()
    np.testing.assert_allclose(got, x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), rtol=1e-4)
    print(plgpu._core.target(0)["name"])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PALLAS_MGPU_TARGET": "sm_80"},
        capture_output=True,
        text=True,
    )
    if "the driver is older than the NVRTC" in run.stderr:
        pytest.skip("PTX of a compiler that is newer than the driver")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "sm_80"
