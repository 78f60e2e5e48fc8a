"""ops.attention with 8-bit operands, pages and lengths that are read when the kernel runs: against
float64, with garbage wherever nothing is to be read."""

import functools

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import AttentionConfig, _open_rows, attention

CHECKED = plgpu.InterpretParams(detect_races=True)
bf16, e4m3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    plgpu.clear_caches()
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 2)
    yield
    plgpu.clear_caches()


def expected(q, k, v, kv_lengths, q_lengths, scale=None, causal=False, bottom_right=False,
             window=None, softcap=None):  # fmt: skip
    """Result and logarithm in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group, (batch, queries, heads, dim) = q.shape[2] // k.shape[2], q.shape
    out, log = np.zeros((*q.shape[:3], v.shape[3])), np.full((batch, heads, queries), -np.inf)
    left, right = window or (None, None)
    right = 0 if causal else right
    for b, (n, m) in enumerate(zip(q_lengths, kv_lengths)):
        distance = np.arange(m) - np.arange(n)[:, None] - (m - n if bottom_right else 0)
        keep = np.ones((n, m), bool) if right is None else distance <= right
        keep &= True if left is None else distance >= -left
        for h in range(heads):
            s = q[b, :n, h] @ k[b, :m, h // group].T * (scale or dim**-0.5)
            s = softcap * np.tanh(s / softcap) if softcap else s
            e = np.where(keep, np.exp(s), 0)
            total = e.sum(1)
            there = total > 0
            out[b, :n, h][there] = (e @ v[b, :m, h // group])[there] / total[there, None]
            log[b, h, :n][there] = np.log(total[there])
    return out, log


def random(rng, shape, dtype):
    x = rng.standard_normal(shape)
    return (x * 30).round().clip(-127, 127).astype(np.int8) if dtype == np.int8 else x.astype(dtype)


def paged(rng, x, size, lengths):
    """The cache in pages in random order, garbage where nothing is, and the table."""
    batch, keys = x.shape[:2]
    entries = -(-keys // size)
    bad = 127 if x.dtype == np.int8 else np.nan
    pages = np.full((batch * entries + 3, size, *x.shape[2:]), bad, x.dtype)
    order = rng.permutation(len(pages))
    table = rng.integers(-9, 999, (batch, entries)).astype(np.int32)
    for b, n in enumerate(lengths):
        for i in range(-(-n // size)):
            table[b, i] = page = order[b * entries + i]
            rows = x[b, i * size : min((i + 1) * size, n)]
            pages[page, : len(rows)] = rows
    return pages, table


def check(rng, interpret, shape, dtypes, scales=(0, 0, 0), page=0, kv_lengths=None, q_lengths=None,
          config=None, value_dim=None, with_log=True, **how):  # fmt: skip
    """The kernel of a call, whose result is compared."""
    batch, queries, keys, heads, kv_heads, dim = shape
    q = random(rng, (batch, queries, heads, dim), dtypes[0])
    k = random(rng, (batch, keys, kv_heads, dim), dtypes[1])
    v = random(rng, (batch, keys, kv_heads, value_dim or dim), dtypes[1])
    named, wide = {}, []
    for n, dims, x in zip("qkv", scales, (q, k, v)):
        wide.append(np.asarray(x, np.float64))
        if dims:
            unit = np.float32(1 / 30 if x.dtype == np.int8 else 1)
            scale = rng.uniform(0.5, 1.5, (batch, x.shape[2])[2 - dims :]).astype(np.float32) * unit
            if n == "k" and scale.size > 1:
                scale.flat[0] = 0  # of a head without keys other than 0
            named[f"{n}_scale"] = scale
            wide[-1] = wide[-1] * np.broadcast_to(scale, (batch, x.shape[2]))[:, None, :, None]
    seen = kv_lengths or [keys] * batch, q_lengths or [queries] * batch
    want, want_log = expected(*wide, *seen, **how)
    if kv_lengths:
        named["kv_lengths"] = np.array(kv_lengths, np.int32)
        bad = 127 if k.dtype == np.int8 else np.nan
        for b, n in enumerate(kv_lengths):
            k[b, n:] = v[b, n:] = bad
    if q_lengths:
        named["q_lengths"] = np.array(q_lengths, np.int32)
        for b, n in enumerate(q_lengths):
            q[b, n:] = np.nan
    if page:
        state = rng.bit_generator.state
        k, table = paged(rng, k, page, seen[0])
        rng.bit_generator.state = state
        v, named["page_table"] = paged(rng, v, page, seen[0])
        np.testing.assert_array_equal(table, named["page_table"])
    options = {"return_lse": with_log, "config": config, "interpret": interpret, **named, **how}
    got = attention(q, k, v, **options)
    got, log = got if with_log else (got, None)
    assert got.dtype == (bf16 if q.dtype == e4m3 else q.dtype)
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
    assert error < (0.035 if q.dtype == e4m3 else 4e-3 if q.dtype == bf16 else 6e-4), error
    if with_log:
        np.testing.assert_allclose(log, want_log, atol=2e-3, rtol=2e-3)
    return attention.kernel(q, k, v, **options)


NARROW = [
    ((1, 200, 300, 2, 1, 128), {"scales": (1, 1, 1)}),
    ((2, 70, 330, 2, 2, 64), {"scales": (2, 1, 2), "causal": True}),
    ((1, 70, 130, 2, 1, 256), {"scales": (0, 1, 0), "softcap": 4.0}),
    ((1, 150, 290, 1, 1, 96), {"causal": True, "window": (100, None), "bottom_right": True}),
    ((1, 100, 200, 1, 1, 48), {"value_dim": 80, "scales": (0, 0, 1)}),
    ((2, 150, 230, 1, 1, 128), {"kv_lengths": [200, 0], "scales": (1, 1, 1)}),
    ((2, 130, 330, 1, 1, 64), {"kv_lengths": [330, 77], "page": 48, "causal": True,
                               "bottom_right": True}),
    ((1, 200, 200, 1, 1, 128), {"config": AttentionConfig(1, 64, 3, lazy=False, late=False)}),
    ((1, 200, 300, 1, 1, 64), {"config": AttentionConfig(3, 128, 1, hold=True, late=False)}),
    ((1, 200, 300, 1, 1, 128), {"config": AttentionConfig(3, 64, 4, apart=True, early=True),
                                "causal": True}),
    ((1, 70, 130, 1, 1, 256), {"value_dim": 64, "softcap": 4.0}),
    ((1, 200, 450, 1, 1, 128), {"config": AttentionConfig(2, 192, 2, late=False, trusting=True),
                                "scales": (1, 1, 1)}),
    ((1, 200, 300, 1, 1, 64), {"config": AttentionConfig(3, 128, 2, apart=True, trusting=True),
                               "causal": True, "bottom_right": True}),
    ((1, 3, 800, 1, 1, 64), {"scales": (1, 1, 1)}),  # in two parts
    # many queries: a kernel before
    ((2, 270, 150, 8, 1, 96), {"scales": (1, 1, 2), "causal": True, "bottom_right": True}),
    ((1, 520, 70, 4, 1, 48), {"value_dim": 64}),
]  # fmt: skip
WIDENED = [
    ((1, 130, 200, 2, 1, 128), np.int8, {"scales": (0, 1, 1)}),
    ((2, 70, 330, 2, 2, 64), e4m3, {"scales": (0, 2, 2), "causal": True}),
    ((1, 70, 100, 1, 1, 256), np.int8, {"scales": (0, 1, 1), "softcap": 4.0}),
    ((2, 150, 230, 1, 1, 128), e4m3, {"kv_lengths": [200, 0], "q_lengths": [150, 20]}),
    ((2, 130, 330, 1, 1, 64), np.int8, {"kv_lengths": [330, 77], "page": 64, "causal": True,
                                        "bottom_right": True, "scales": (0, 1, 2)}),
    ((1, 70, 130, 1, 1, 256), np.int8, {"value_dim": 64, "scales": (0, 1, 1)}),
    # many queries: a kernel before
    ((2, 260, 201, 8, 2, 64), np.int8, {"kv_lengths": [201, 60], "scales": (0, 1, 2)}),
    ((1, 1030, 70, 1, 1, 48), e4m3, {"value_dim": 80, "causal": True, "bottom_right": True}),
    ((2, 130, 200, 16, 2, 64), e4m3, {"kv_lengths": [200, 77], "page": 16, "causal": True,
                                      "bottom_right": True, "scales": (0, 1, 2)}),
    ((1, 150, 192, 8, 1, 64), e4m3, {"page": 96, "value_dim": 128}),
    ((1, 150, 120, 8, 1, 64), e4m3, {"page": 24}),  # a lane has more than a vector of a page
]  # fmt: skip
WIDE = [
    ((2, 130, 330, 2, 1, 64), {"kv_lengths": [330, 77], "causal": True, "bottom_right": True}),
    ((3, 140, 290, 1, 1, 128), {"kv_lengths": [100, 0, 290], "q_lengths": [60, 10, 140], "page": 16,
                                "causal": True, "bottom_right": True}),
    ((2, 70, 300, 2, 2, 128), {"kv_lengths": [10, 200], "page": 128}),
    ((2, 150, 300, 1, 1, 64), {"q_lengths": [10, 0], "softcap": 3.0}),
    ((1, 64, 128, 1, 1, 64), {"page": 64, "causal": True, "bottom_right": True}),
    ((2, 90, 90, 1, 1, 64), {"kv_lengths": [50, 90], "causal": True, "bottom_right": True}),
    ((1, 70, 1100, 1, 1, 64), {"kv_lengths": [1050], "page": 24}),
    ((2, 520, 70, 8, 1, 64), {"kv_lengths": [40, 70], "page": 16, "causal": True,
                              "bottom_right": True}),  # many queries: a kernel before
    ((2, 70, 200, 1, 1, 256), {"kv_lengths": [60, 200], "window": (50, 20), "bottom_right": True}),
]  # fmt: skip


def sixteen(dtype):
    """Of queries to keys of 8 bits."""
    return bf16 if dtype == np.int8 else np.float16


def on_both(cases, emulated):
    """The cases under the checker, on a GPU, and so many of the first ones on the emulated machine,
    which compiles each program; the others there with --exhaustive."""
    found = [pytest.param(*case, CHECKED, id=f"{n}-races") for n, case in enumerate(cases)]
    found += [
        pytest.param(*case, None, id=f"{n}-cuda", marks=pytest.mark.gpu)
        for n, case in enumerate(cases)
    ]
    for n, case in enumerate(cases):
        marks = [pytest.mark.exhaustive] if n >= emulated else []
        found.append(pytest.param(*case, "emulate", id=f"{n}-emulate", marks=marks))
    return found


@pytest.mark.parametrize("shape,how,interpret", on_both(NARROW, 1))
def test_all_of_8_bits(rng, interpret, shape, how):
    check(rng, interpret, shape, (e4m3, e4m3), **how)


@pytest.mark.parametrize("shape,dtype,how,interpret", on_both(WIDENED, 0))
def test_keys_of_8_bits(rng, interpret, shape, dtype, how):
    check(rng, interpret, shape, (sixteen(dtype), dtype), **how)


@pytest.mark.parametrize("shape,how,interpret", on_both(WIDE, 0))
def test_lengths_and_pages(rng, interpret, shape, how):
    check(rng, interpret, shape, (np.float16,) * 2, **how)


@pytest.mark.parametrize(
    "shape,dtypes,how",
    [
        *((shape, (np.float16,) * 2, how) for shape, how in WIDE),
        *((shape, (e4m3,) * 2, how) for shape, how in NARROW[5:7]),
        *((shape, (sixteen(dtype), dtype), how) for shape, dtype, how in WIDENED[3:]),
    ],
)
def test_one_program_of_all_sizes(rng, monkeypatch, shape, dtypes, how):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    check(rng, CHECKED, shape, dtypes, **how)


@pytest.mark.parametrize(
    "sizes",
    [{"kv_lengths": [1400, 1700]}, {"kv_lengths": [16, 1630], "page": 48}, {"q_lengths": [4, 70]}],
)
def test_one_program_of_all_sizes_that_divides_keys(rng, monkeypatch, sizes):
    """One entry has fewer blocks of keys than there are parts."""
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 16)
    how = {"causal": True, "bottom_right": True, "with_log": False}
    kernel = check(rng, CHECKED, (2, 70, 1700, 2, 1, 64), (np.float16,) * 2, **sizes, **how)
    assert type(kernel).__name__ == "DividedOpen"


def random_sizes(rng, kind):
    """Descriptions of the operands of a call with lengths or pages, of any sizes."""
    spec = plgpu.ShapeDtypeStruct
    most = 65, *((130, 4000) if "few" in kind else (4000, 4000))
    batch, queries, keys = (int(rng.integers(1, n)) for n in most)
    dtype = e4m3 if kind == "8 bits" else bf16
    q, k = (spec((batch, n, heads, 64), dtype) for n, heads in ((queries, 8), (keys, 2)))
    given = {"kv_lengths": spec((batch,), np.int32)}
    if kind != "lengths" and kind != "both lengths":
        k = spec((int(rng.integers(1, 9999)), 64, 2, 64), dtype)
        given["page_table"] = spec((batch, -(-keys // 64)), np.int32)
    if kind == "both lengths":
        given |= {"q_lengths": given["kv_lengths"], "return_lse": True}
    return (q, k, k), given


@pytest.mark.parametrize("kind", ["lengths", "both lengths", "pages", "8 bits", "few"])
def test_random_sizes_have_at_most_twelve_programs(rng, monkeypatch, kind):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    made = set()
    for _ in range(40):
        operands, given = random_sizes(rng, kind)
        kernel = attention.kernel(*operands, causal=True, bottom_right=True, **given)
        parts = [kernel.parts, kernel.merge] if hasattr(kernel, "parts") else [kernel]
        made |= {id(getattr(part, "kernel", part)) for part in parts}
    assert len(made) <= 12


def test_many_queries_have_the_bits_of_few(rng):
    """With batch_invariant, although keys and values would be widened for many queries."""
    q = random(rng, (1, 130, 8, 64), bf16)
    k, v = (random(rng, (1, 90, 1, 64), np.int8) for _ in "kv")
    scale = np.full(1, 0.031, np.float32)
    call = functools.partial(
        attention, k=k, v=v, k_scale=scale, v_scale=scale, interpret=True, batch_invariant=True
    )
    np.testing.assert_array_equal(call(q)[:, :60], call(q[:, :60]))


def test_lengths_are_read_when_the_kernel_runs(rng):
    """New lengths compile nothing: the same kernel serves them."""
    q, k, v = (random(rng, (2, 20, 1, 64), np.float16) for _ in range(3))
    lengths = np.array([20, 3], np.int32)
    f = attention.kernel(q, k, v, kv_lengths=lengths, interpret=True)
    for n in ([20, 3], [0, 20], [99, -5]):
        lengths[:] = n
        got = np.asarray(f(q, k, v, lengths), np.float64)
        want, _ = expected(q, k, v, np.clip(n, 0, 20), [20, 20])
        np.testing.assert_allclose(got, want, atol=2e-3)
    assert f is attention.kernel(q, k, v, kv_lengths=lengths, interpret=True)


@pytest.mark.parametrize(
    "change,error,words",
    [
        (lambda a: a | {"k": a["k"].astype(np.int8)}, TypeError, "both int8 or both float8_e4m3fn"),
        (lambda a: a | {"k_scale": np.ones(1, np.float32)}, ValueError, "k_scale is for elements"),
        (
            lambda a: a | {"kv_lengths": np.ones(2, np.float32)},
            ValueError,
            "kv_lengths must be int32",
        ),
        (lambda a: a | {"page_table": np.ones((2, 1), np.int32)}, NotImplementedError, "a page"),
        (
            lambda a: a | {"q_lengths": np.ones(2, np.int32), "mask": lambda b, h, i, j: i >= j},
            ValueError,
            "q_lengths with mask",
        ),
    ],
)
def test_errors(change, error, words):
    arrays = {n: np.zeros((2, 20, 1, 64), np.float16) for n in "qkv"}
    with pytest.raises(error, match=words):
        attention(**change(arrays), interpret=True)


@pytest.mark.parametrize("spread", [0.0, 0.02, 3.0])
@pytest.mark.parametrize("dim,how", [(128, {}), (128, {"causal": True}), (256, {}), (64, {})])
def test_growing_maxima_of_8_bits(rng, spread, dim, how):
    """Scores that are all the same, that hardly differ, and that grow from block to block by more
    than probabilities of 8 bits can."""
    q, k, v = (rng.standard_normal((1, 600, h, dim)) for h in (4, 1, 1))
    q *= spread
    k *= np.linspace(3, 0.1, 600)[None, :, None, None]  # blocks come from the last
    q, k, v = (x.astype(e4m3) for x in (q, k, v))
    assert type(attention.kernel(q, k, v, **how, interpret=True)).__name__ == "TransposedFirst"
    got = np.asarray(attention(q, k, v, **how, interpret=True), np.float64)
    want, _ = expected(q, k, v, [600], [600], **how)
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) < 0.035


def test_narrow_errors():
    q = np.zeros((1, 20, 1, 72), e4m3)
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        attention(q, q, q, interpret=True)
    q = np.zeros((1, 200, 1, 64), e4m3)
    with pytest.raises(ValueError, match="a multiple of 128"):
        attention(q, q, q, config=AttentionConfig(2, 64), interpret=True)
    with pytest.raises(ValueError, match="k_scale must be float32"):
        attention(q, q, q, k_scale=np.ones(2, np.float32), interpret=True)


@pytest.mark.long
@pytest.mark.parametrize("kinds", [(e4m3, e4m3, 0), (bf16, np.int8, 64), (bf16, bf16, 16)], ids=str)
def test_no_spills(kinds):
    S, (q_dtype, dtype, page) = plgpu.ShapeDtypeStruct, kinds
    q, keys = S((2, 4096, 16, 128), q_dtype), (8192 // page, page) if page else (2, 4096)
    k = S((*keys, 4, 128), dtype)
    named = {"kv_lengths": S((2,), np.int32)} if page else {}
    named |= {"page_table": S((2, 4096 // page), np.int32)} if page else {}
    scales = "q_scale" * (q_dtype == dtype), "k_scale", "v_scale"
    if k.dtype.itemsize == 1:
        named |= {n: S((16 if n == "q_scale" else 4,), np.float32) for n in scales if n}
    one = {"batch_invariant": True}  # not widened, copied or transposed by another kernel before
    f = attention.kernel(q, k, k, **named, **one, causal=True, bottom_right=True)
    used = f.lower(q, k, k, *named.values(), target="sm_90a").resources()
    assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.long
@pytest.mark.parametrize("dim,causal", [(64, False), (128, True), (128, False), (256, True)])
def test_no_spills_where_values_are_transposed_before(dim, causal):
    q = plgpu.ShapeDtypeStruct((2, 4096, 16, dim), e4m3)
    f = attention.kernel(q, q, q, causal=causal)
    v = plgpu.ShapeDtypeStruct(f.transpose.definition.outs[0].shape, e4m3)
    for kernel, given in ((f.transpose, (q,)), (f.attention, (q, q, v))):
        used = kernel.lower(*given, target="sm_90a").resources()
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


def test_values_transposed_before_give_the_same_bits(rng):
    q, k, v = (
        rng.standard_normal((1, n, h, 128)).astype(e4m3) for n, h in ((300, 8), (150, 1), (150, 1))
    )
    how = {"causal": True, "bottom_right": True, "interpret": True}
    assert type(attention.kernel(q, k, v, **how)).__name__ == "TransposedFirst"
    alone = attention(q, k, v, batch_invariant=True, **how)
    np.testing.assert_array_equal(attention(q, k, v, **how), alone)
