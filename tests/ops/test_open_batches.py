"""Attention, its gradients and block masks for any batch: few programs, right results."""

import time
from functools import partial

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from programs import kernels_in

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops import AttentionBackwardConfig as C
from pallas_mgpu.ops import _open_rows

RACES = plgpu.InterpretParams(detect_races=True)
WAYS = [
    pytest.param(RACES, id="interpret"),
    pytest.param("emulate", marks=pytest.mark.exhaustive),
    pytest.param(None, id="cuda", marks=pytest.mark.gpu),
]
SIZES = (2, 150, 131), (5, 130, 150), (3, 257, 65), (1, 40, 70), (4, 33, 131)  # batch, lengths


@pytest.fixture(autouse=True)
def open_sizes(monkeypatch):
    """No sizes have programs of their own."""
    plgpu.clear_caches()
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 5)
    yield
    plgpu.clear_caches()


def same_or_near(b, h, i, j):
    return ((i + b) % 3 == 0) & (j <= i) | (abs(i - j) < 9)


def far(b, h, i, j):
    return (j <= i) | (j < 40)


def normal(rng, *shape, dtype=np.float16):
    return rng.standard_normal(shape).astype(dtype)


def keep_of(kind, batch, n, m):
    """Which pairs of [batch, 1, queries, keys] there are."""
    i, j = np.arange(n)[:, None], np.arange(m)
    b = np.arange(batch)[:, None, None, None]
    if kind in ("mask", "shared mask"):
        return (same_or_near if kind == "mask" else far)(b, 0, i, j) & np.ones((1, 1, n, m), bool)
    if kind == "window":
        return ((j >= i - 20) & (j <= i + 9))[None, None]
    return np.ones((1, 1, n, m), bool) if kind in ("full", "128") else (j <= i)[None, None]


def expected(q, k, v, keep, bias=0.0):
    """The result and the logarithms, in float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    e = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + bias) * keep
    total = e.sum(3)
    o = np.einsum("bhqk,bkhd->bqhd", e / np.where(total == 0, 1, total)[..., None], v)
    with np.errstate(divide="ignore"):
        return o, np.log(total)


def rotated(x, cos, sin):
    left, right = np.split(x.astype(np.float64), 2, axis=3)
    cos, sin = (a[None, : x.shape[1], None].astype(np.float64) for a in (cos, sin))
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], 3)


def case(kind, rng, batch, n, m):
    """Operands and options of a call, the result and the logarithms, and what they may be off."""
    dim, tolerance = 128 if kind in ("128", "bias") else 64, 4e-3
    dtype = {"128": bfloat16, "8 bits": float8_e4m3fn}.get(kind, np.float16)
    q = normal(rng, batch, n, 4, dim, dtype=dtype)
    k, v = (normal(rng, batch, m, 2, dim, dtype=dtype) for _ in "kv")
    how, keep, bias, seen = {"causal": True}, keep_of(kind, batch, n, m), 0.0, (q, k)
    if kind in ("full", "128"):
        how = {}
    if kind == "window":
        how = {"window": (20, 9)}
    if kind == "configuration":
        how["config"] = ops.AttentionConfig(2, 64, 2)
    if kind.endswith("mask"):
        mask = same_or_near if kind == "mask" else far
        how = {"mask": mask}
        if kind == "shared mask":
            how["block_mask"] = ops.block_mask(q, k, mask=mask, interpret=True)
    if kind in ("bias", "shared bias"):
        bias = normal(rng, batch if kind == "bias" else 1, 4, n, m)
        how["bias"] = bias
    if kind == "int8":
        k, v = (np.clip(x * 30, -127, 127).astype(np.int8) for x in (k, v))
        how |= {f"{name}_scale": np.full(2, 1 / 30, np.float32) for name in "kv"}
        v_wide, seen = v / 30, (q, k / 30)
    if kind == "pages":
        n_pages = -(-m // 16)
        table = rng.permutation(batch * n_pages).reshape(batch, n_pages).astype(np.int32)
        whole = [np.zeros((batch, n_pages * 16, 2, dim), dtype) for _ in "kv"]
        for x, there in zip(whole, (k, v)):
            x[:, :m] = there
        keep = keep_of(kind, batch, n, n_pages * 16)
        seen, v_wide = (q, whole[0]), whole[1]
        k, v = (np.empty((batch * n_pages, 16, 2, dim), dtype) for _ in "kv")
        for pages, x in zip((k, v), whole):
            pages[table] = x.reshape(batch, n_pages, 16, 2, dim)
        how["page_table"] = table
    if kind == "angles":
        cos, sin = normal(rng, 2, 300, dim // 2)
        how |= {"cos": cos, "sin": sin}
        seen = rotated(q, cos, sin), rotated(k, cos, sin)
    values = v_wide if kind in ("int8", "pages") else v
    tolerance = {"8 bits": 0.2, "128": 2e-2, "angles": 1e-2}.get(kind, tolerance)
    return (q, k, v), how, *expected(*seen, values, keep, bias), tolerance


KINDS = ["full", "128", "causal", "window", "8 bits", "int8", "pages", "angles", "bias",
         "shared bias", "mask", "shared mask", "configuration"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_attention_of_any_batch(rng, kind, way):
    """On poisoned results, with one program for many queries and one for few."""
    made = set()
    for sizes in SIZES:
        arrays, how, want, want_lse, tolerance = case(kind, rng, *sizes)
        how |= {"return_lse": True, "interpret": way}
        dtype = bfloat16 if arrays[0].dtype.itemsize == 1 else arrays[0].dtype
        out = np.full(want.shape, np.nan, dtype), np.full(want_lse.shape, np.nan, np.float32)
        ops.attention(*arrays, out=out, **how)
        got, lse = (np.asarray(x, np.float64) for x in out)
        np.testing.assert_allclose(got, want, atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, atol=5 * tolerance)
        again, _ = ops.attention(*arrays, **how)
        np.testing.assert_array_equal(np.asarray(again), out[0])
        found = ops.attention.kernel(*arrays, **how)
        made |= {id(x) for x in kernels_in(found) if x.definition.name == "attention"}
    assert len(made) <= 3


def test_one_entry_does_not_see_the_next(rng):
    for batch in (2, 3):
        q, k, v = (normal(rng, batch, 75, h, 64) for h in (4, 2, 2))
        want = ops.attention(q, k, v, interpret=True)
        q[1], k[1], v[1] = np.nan, np.nan, np.nan
        got = ops.attention(q, k, v, interpret=True)
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(want, 1, 0))


def test_arrays_with_wide_rows(rng):
    """The most elements of an array limit its rows."""
    arrays = [normal(rng, 2, 3, 600, 128) for _ in "qkvg"]
    q, k, v, g = arrays
    got, lse = ops.attention(q, k, v, return_lse=True, interpret=True)
    want, _, *of_arrays = gradients(*arrays, np.ones((1, 1, 3, 3)))
    np.testing.assert_allclose(got, want, atol=4e-3)
    found = ops.attention_backward(g, q, k, v, got, lse, interpret=True)
    for a, b in zip(found, of_arrays):
        np.testing.assert_allclose(a, b, atol=1e-2 * np.abs(b).max())
    mask = ops.block_mask(q, q, mask=far, interpret=True)
    np.testing.assert_array_equal(mask, np.full((1, 1, 1, 2), 1))


def test_pages_that_are_widened(rng):
    """Of many elements, with scales of each entry."""
    pages = rng.integers(-9, 9, (7, 64, 8, 128)).astype(np.int8)
    table, scale = np.array([[5, 2], [3, 6]], np.int32), rng.random((2, 8)).astype(np.float32)
    q, whole = normal(rng, 2, 150, 56, 128), pages[table].reshape(2, 128, 8, 128)
    k = whole * scale[:, None, :, None]
    want, _ = expected(q, k, whole, np.ones((1, 1, 150, 128)))
    how = {"page_table": table, "k_scale": scale, "interpret": True}
    np.testing.assert_allclose(ops.attention(q, pages, pages, **how), want, atol=2e-2)


def test_bits_are_those_of_one_batch(rng):
    q, k, v = (normal(rng, 3, 140, h, 64) for h in (4, 2, 2))
    found = ops.attention.kernel(q, k, v, causal=True, interpret=True)
    np.testing.assert_array_equal(found(q, k, v), found.alone()(q, k, v))


@pytest.mark.parametrize("options", [{}, {"kv_lengths": True}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_divided_keys(rng, monkeypatch, options, way):
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 64)
    made = set()
    for batch, n, m in ((2, 3, 1700), (3, 20, 1300), (1, 9, 2100)):
        q, k, v = (normal(rng, batch, x, h, 64) for x, h in ((n, 4), (m, 2), (m, 2)))
        lengths = np.full(batch, m, np.int32)
        lengths[0] -= 130
        how = {"kv_lengths": lengths} if options else {}
        keep = np.arange(m) < (lengths if options else np.full(batch, m))[:, None, None, None]
        want, want_lse = expected(q, k, v, keep)
        out = np.full_like(q, np.nan), np.full((batch, 4, n), np.nan, np.float32)
        ops.attention(q, k, v, return_lse=True, out=out, interpret=way, **how)
        np.testing.assert_allclose(out[0], want, atol=4e-3)
        np.testing.assert_allclose(out[1], want_lse, atol=5e-3)
        found = ops.attention.kernel(q, k, v, return_lse=True, interpret=way, **how)
        assert type(found).__name__ == "DividedOpen"
        made |= set(map(id, kernels_in(found)))
    assert len(made) == 2


@pytest.mark.parametrize("by_batch", [False, True])
def test_block_masks_of_any_batch(rng, by_batch):
    made = set()
    for batch, n, m in ((1, 130, 300), (2, 300, 131), (5, 129, 260)):
        q, k = normal(rng, batch, n, 2, 64), normal(rng, batch, m, 1, 64)
        how = {"mask": same_or_near, "by_batch": by_batch, "interpret": RACES}
        got = np.asarray(ops.block_mask(q, k, **how))
        entries = np.arange(batch if by_batch else 1)[:, None, None]
        i, j = np.arange(n)[:, None], np.arange(m)
        keep = np.broadcast_to(same_or_near(entries, 0, i, j), (len(entries), n, m))
        tiles, blocks = -(-n // 128), -(-m // 128)
        assert got.shape == (len(entries), 1, tiles, 1 + blocks)
        for b, tile in np.ndindex(len(entries), tiles):
            part = keep[b, tile * 128 : tile * 128 + 128]
            parts = [part[:, x * 128 : x * 128 + 128] for x in range(blocks)]
            want = [2 * x + (not (p.all() and p.shape[1] == 128)) for x, p in enumerate(parts)
                    if p.any()]  # fmt: skip
            assert got[b, 0, tile, 0] == max(len(want), 1)
            np.testing.assert_array_equal(got[b, 0, tile, 1 : 1 + len(want)], want)
        made |= set(map(id, kernels_in(ops.block_mask.kernel(q, k, **how))))
    assert len(made) == 1


# ---- gradients -----------------------------------------------------------------------------------


def gradients(q, k, v, g, keep):
    """(o, lse, dq, dk, dv) in float64."""
    o, lse = expected(q, k, v, keep)
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    p = np.exp(np.einsum("bnhd,bmhd->bhnm", q, wide_k) * scale - lse[..., None]) * keep
    delta = np.einsum("bnhd,bnhd->bhn", g, o)
    ds = p * (np.einsum("bnhd,bmhd->bhnm", g, wide_v) - delta[..., None]) * scale
    dq = np.einsum("bhnm,bmhd->bnhd", ds, wide_k)
    pair = np.einsum("bhnm,bnhd->bmhd", ds, q), np.einsum("bhnm,bnhd->bmhd", p, g)
    return o, lse, dq, *(x.reshape(*k.shape[:3], group, -1).sum(3) for x in pair)


def multiplying(found):
    """The kernel of gradients that multiplies."""
    return found.fused.fused if found.fused else found.by_queries


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dim, options",
    [
        (64, {}), (128, {"causal": True}), (64, {"deterministic": True, "causal": True}),
        (128, {"deterministic": True}),
        pytest.param(256, {"causal": True}, marks=pytest.mark.long),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_any_batch(rng, dim, options, way):
    made = set()
    for batch, n, m in SIZES[:4]:
        q, g = normal(rng, batch, n, 4, dim), normal(rng, batch, n, 4, dim)
        k, v = (normal(rng, batch, m, 2, dim) for _ in "kv")
        keep = keep_of("causal" if "causal" in options else "full", batch, n, m)
        o, lse, *want = gradients(q, k, v, g, keep)
        arrays = g, q, k, v, o.astype(np.float16), lse.astype(np.float32)
        out = tuple(np.full_like(x, np.nan) for x in (q, k, v))
        ops.attention_backward(*arrays, out=out, interpret=way, **options)
        for found in (out, ops.attention_backward(*arrays, interpret=way, **options)):
            for a, b in zip(found, want):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, atol=1e-2 * max(1, np.abs(b).max()))
        if batch > 1:
            found = ops.attention_backward.kernel(*arrays, interpret=way, **options)
            made.add(multiplying(found).kernel)
    assert len(made) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [64, 128])
def test_gradient_of_a_bias_beside_nan(rng, dim, way):
    """Rows of the next batch entry, which blocks read, too, may have any values."""
    n = 75
    q, o, g = (normal(rng, 3, n, 4, dim) for _ in "qog")
    for axes, m in (((), 140), ((), 139), ((0,), 66), ((2,), 140), ((3,), 140), ((1, 2, 3), 140)):
        k, v, bias = normal(rng, 3, m, 2, dim), normal(rng, 3, m, 2, dim), normal(rng, 3, 4, n, m)
        arrays = g, q, k, v, o, np.full((3, 4, n), 9, np.float32)
        shape = [1 if axis in axes else size for axis, size in enumerate(bias.shape)]
        part = np.ascontiguousarray(bias[tuple(slice(size) for size in shape)])
        how = {"bias": part, "bias_gradient": True, "interpret": way}
        clean = ops.attention_backward(*arrays, **how)
        dirty = [x.copy() for x in arrays]
        for x in dirty:
            x[1] = np.nan
        assert ops.attention_backward.kernel(*dirty, **how).is_open
        for a, b in zip(ops.attention_backward(*dirty, **how), clean):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            if a.shape[0] > 1:
                np.testing.assert_allclose(a[::2], b[::2], atol=1e-2 * np.abs(b).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim, wide", [(64, np.float16), (128, np.float16), (64, np.float32)])
@pytest.mark.parametrize("m", [66, 67, 130])
def test_gradient_of_a_bias_of_even_and_odd_rows(rng, monkeypatch, dim, wide, m, way):
    """Of each entry and of all of them, causal and full: as those of programs of the sizes."""
    n = 75
    q, o, g = (normal(rng, 3, n, 4, dim) for _ in "qog")
    k, v = normal(rng, 3, m, 2, dim), normal(rng, 3, m, 2, dim)
    lse = np.full((3, 4, n), 3, np.float32)
    for causal, shape in ((False, (3, 4, n, m)), (True, (1, 4, n, m)), (False, (3, 1, n, m))):
        bias, found = normal(rng, *shape, dtype=wide), []
        how = {"bias": bias, "bias_gradient": True, "causal": causal, "interpret": way}
        for static in (99, 0):
            monkeypatch.setattr(_open_rows, "STATIC", static)
            plgpu.clear_caches()
            got = ops.attention_backward(g, q, k, v, o, lse, **how)
            assert got[3].shape == shape and got[3].dtype == wide
            found.append([np.asarray(x, np.float32) for x in got])
        for a, b in zip(*found):
            np.testing.assert_allclose(a, b, atol=4e-3 * np.abs(b).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["dropout", "angles", "angles at the end"])
def test_gradients_with_options(rng, monkeypatch, kind, dim, way):
    """As those of programs of the sizes, whose results other tests compare with NumPy's."""
    cos, sin = normal(rng, 2, 300, dim // 2, dtype=np.float32)
    options = {"dropout": 0.3, "seed": np.array([7], np.int32)}
    options = options if kind == "dropout" else {"cos": cos, "sin": sin}
    options |= {"bottom_right": True} if kind == "angles at the end" else {}
    made = set()
    for batch, n, m in SIZES[:4]:
        n, m = (min(n, m), max(n, m)) if "bottom_right" in options else (n, m)
        q, g = normal(rng, batch, n, 4, dim), normal(rng, batch, n, 4, dim)
        k, v = (normal(rng, batch, m, 2, dim) for _ in "kv")
        how, found = dict(options, causal=True, interpret=way), []
        o, lse = ops.attention(q, k, v, return_lse=True, **how)
        backward = partial(ops.attention_backward, g, q, k, v, np.asarray(o), np.asarray(lse))
        for static in (99, 0):
            monkeypatch.setattr(_open_rows, "STATIC", static)
            plgpu.clear_caches()
            found.append([np.asarray(x, np.float32) for x in backward(**how)])
        for a, b in zip(*found):
            np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())
        kernel = ops.attention_backward.kernel(*backward.args, **how)
        assert kernel.is_open
        made.add(multiplying(kernel).kernel if batch > 1 else None)


@pytest.mark.parametrize("config", [C(7), C(5), C(5, stages=2)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_with_a_configuration(rng, config, dim):
    made = set()
    for batch, n, m in SIZES[:3]:
        q, g = normal(rng, batch, n, 4, dim), normal(rng, batch, n, 4, dim)
        k, v = (normal(rng, batch, m, 2, dim) for _ in "kv")
        o, lse, *want = gradients(q, k, v, g, keep_of("causal", batch, n, m))
        arrays = g, q, k, v, o.astype(np.float16), lse.astype(np.float32)
        how = {"causal": True, "config": config, "interpret": True}
        for a, b in zip(ops.attention_backward(*arrays, **how), want):
            np.testing.assert_allclose(a, b, atol=1e-2 * max(1, np.abs(b).max()))
        if batch > 1:
            made.add(multiplying(ops.attention_backward.kernel(*arrays, **how)).kernel)
    assert len(made) == 1


def used_by(found):
    """The kernels of a call of gradients that allocates its results."""
    if f := found.fused:
        used = (
            [f.allocating_all, f.converting] if f.converting else [f.allocating, f.fused, f.convert]
        )
    else:
        used = [found.statistics, found.by_keys, found.by_queries]
    used += [*getattr(found.rotations, "rotate", []), *([found.bias] if found.bias else [])]
    used = [getattr(x, "kernel", x) for x in used] + list(found.ranges or ())
    return {id(x) for x in kernels_in(used)}


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        "128", "64", "256", "deterministic", "deterministic 256", "dropout", "angles", "bias",
        "angles at the end", "configuration", "packed", "packed 256",
    ],
)  # fmt: skip
def test_random_sizes_of_gradients(rng, monkeypatch, kind, uniform):
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    S, made, dim = plgpu.ShapeDtypeStruct, set(), 128
    for size in (64, 256):
        dim = size if kind.endswith(str(size)) else dim
    table = S((8192, dim // 2), np.float32)
    options = {"causal": True, "deterministic": kind.startswith("deterministic")}
    options |= {"dropout": 0.3, "seed": S((1,), np.int32)} if kind == "dropout" else {}
    options |= {"cos": table, "sin": table} if "angles" in kind else {}
    options |= {"bottom_right": True} if kind == "angles at the end" else {}
    options |= {"config": C(5)} if kind == "configuration" else {}
    for batch, n, m in random_sizes(rng, uniform, (16, 2000, 2000)):
        if kind == "angles at the end":
            n, m = min(n, m), max(n, m) + 1  # equal lengths have programs of another kind
        if kind.startswith("packed"):
            cu = S((batch + 1,), np.int32)
            options, batch = options | {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, 1
        q, k = S((batch, n, 32, dim), bfloat16), S((batch, m, 8, dim), bfloat16)
        if kind == "bias":
            options |= {"bias": S((1, 32, n, m), bfloat16), "bias_gradient": True}
        lse = S((batch, 32, n), np.float32)
        made |= used_by(ops.attention_backward.kernel(q, q, k, k, q, lse, **options))
    assert 4 <= len(made) <= 12


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_gradients_that_come_often_get_programs_of_their_own(options):
    q, k = (plgpu.ShapeDtypeStruct((2, n, 1, 64), np.float16) for n in (33, 70))
    arrays = q, q, k, k, q, plgpu.ShapeDtypeStruct((2, 1, 33), np.float32)
    first, deadline = ops.attention_backward.kernel(*arrays, **options), time.monotonic() + 60
    assert first.is_open
    for _ in range(200):
        found = ops.attention_backward.kernel(*arrays, **options)
    while not options and found is first:
        assert time.monotonic() < deadline
        found = ops.attention_backward.kernel(*arrays)
    assert found.is_open == bool(options)  # where bits are promised, they stay


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 256])
def test_own_gradients_are_compiled_before_a_call(tmp_path, monkeypatch, dim):
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    q, lse = (
        plgpu.ArrayInfo(shape, np.dtype(dtype), 0, True)
        for shape, dtype in (((2, 70, 1, dim), np.float16), ((2, 1, 70), np.float32))
    )
    arrays = q, q, q, q, q, lse
    specs = [plgpu.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    found = ops.attention_backward.kernel(*specs).compile(*arrays)
    assert [(x.shape, x.dtype) for x in found] == [(q.shape, q.dtype)] * 3
    assert len(list(tmp_path.rglob("*.cubin"))) == (3 if dim == 64 else 4)
    table = plgpu.ArrayInfo((70, dim // 2), np.dtype(np.float32), 0, True)
    angles = plgpu.ShapeDtypeStruct(table.shape, table.dtype)
    with _open_rows.together(True):  # as own programs are made
        rotated = ops.attention_backward.kernel(*specs, cos=angles, sin=angles)
    assert [x.shape for x in rotated.compile(*arrays, table, table)] == [q.shape] * 3


@pytest.mark.parametrize("function", ["attention", "rotated", "attention_backward", "block_mask"])
def test_under_vmap(rng, monkeypatch, function):
    q, k, lse = (
        normal(rng, 2, 3, 40, 2, 64),
        normal(rng, 2, 3, 33, 1, 64),
        np.full((2, 3, 2, 40), 8),
    )
    arrays = {
        "attention": (q, k, k),
        "rotated": (q, k, k),
        "attention_backward": (q, q, k, k, q, lse.astype(np.float32)),
        "block_mask": (q, k),
    }[function]
    angles = normal(rng, 2, 50, 32)
    call = partial(getattr(ops, function, ops.attention), interpret=True)
    call = partial(call, cos=angles[0], sin=angles[1]) if function == "rotated" else call
    call = partial(call, mask=same_or_near, by_batch=True) if function == "block_mask" else call
    found = []
    for static in (0, 99):
        monkeypatch.setattr(_open_rows, "STATIC", static)
        plgpu.clear_caches()
        found.append(plgpu.tree.leaves(plgpu.vmap(call)(*arrays)))
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


# ---- programs ------------------------------------------------------------------------------------


def random_sizes(rng, uniform, most):
    """200 of them; not uniform: their logarithms are."""
    for _ in range(200):
        if uniform:
            yield [int(rng.integers(1, n + 1)) for n in most]
        else:
            yield [int(np.exp(rng.uniform(0, np.log(n)))) for n in most]


def described(kind, batch, n, m):
    """Descriptions of operands and options of a call with such sizes."""
    S, dim = plgpu.ShapeDtypeStruct, 64 if kind == "64" else 128
    heads = 8 if kind.endswith("bias") else 32
    dtype = float8_e4m3fn if kind == "8 bits" else bfloat16
    q, k = S((batch, n, heads, dim), dtype), S((batch, m, 8, dim), dtype)
    how = {"causal": True} if kind in ("causal", "8 bits", "angles") else {}
    if kind == "angles":
        how |= {name: S((8192, dim // 2), bfloat16) for name in ("cos", "sin")}
    if kind.endswith("bias"):
        how["bias"] = S((batch if kind == "bias" else 1, heads, n, m), bfloat16)
    if kind == "mask":
        how["mask"] = far
    if kind == "configuration":
        how["config"] = ops.AttentionConfig()
    if kind.endswith("pages"):
        k = S((batch * -(-m // 64), 64, 8, dim), bfloat16)
        how["page_table"] = S((batch, -(-m // 64)), np.int32)
    if kind.startswith("int8"):
        k = S(k.shape, np.int8)
        how |= {name: S((batch, 8), np.float32) for name in ("k_scale", "v_scale")}
    return (q, k, k), how


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    "kind", ["64", "causal", "full", "8 bits", "angles", "bias", "shared bias", "mask", "pages",
             "int8", "int8 pages", "configuration"],
)  # fmt: skip
def test_random_batches_have_at_most_twelve_programs(rng, monkeypatch, kind, uniform):
    monkeypatch.setattr(_open_rows, "STATIC", 3)
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 132)
    most, made = (16, *(2000 if kind.endswith("bias") else 8192,) * 2), set()
    for sizes in random_sizes(rng, uniform, most):
        operands, how = described(kind, *sizes)
        made |= set(map(id, kernels_in(ops.attention.kernel(*operands, **how))))
    assert 4 <= len(made) <= 12
