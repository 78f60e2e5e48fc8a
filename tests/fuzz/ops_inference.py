"""Random calls of the functions of `pallas_mgpu.ops` for inference, beside float64: attention with
all its options, caches in pages, latent attention, sampling, products of groups and of 8 bits,
norms over several axes. A maker takes a call (fuzz/ops.py) whose `length` changes from step to
step while everything else stays: the sizes that programs take when they run."""

import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from fuzz.ops_training import kept

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, I32 = np.dtype(np.int8), np.dtype(np.int32)
E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UNIT = {F16: 2**-10, BF16: 2**-7, F32: 2**-20}
WORK = 4e6  # multiplications of a call
BAD = {I8: 127}


def wide(x):
    return np.asarray(x).astype(np.float64)


def numbers(c, shape, dtype, factor=1.0):
    x = c.numbers.standard_normal(shape) * factor
    return (x * 30).round().clip(-127, 127).astype(I8) if dtype == I8 else x.astype(dtype)


# ---- scores and their softmax --------------------------------------------------------------------


def reference(q, k, v, keep, scale, softcap=None, bias=None, sinks=None, weights=1.0):
    """The result [queries, heads, dim] and the logarithms [heads, queries] of one entry.

    keep: [1 or heads, queries, keys]; sinks: [heads]; weights: what dropout leaves."""
    share = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, share, 1) for x in (k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * scale
    s = softcap * np.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(s - top[..., None])
    total = e.sum(-1) + (0 if sinks is None else np.exp(sinks[:, None] - top))
    with np.errstate(divide="ignore"):
        log = np.log(total) + top
    share_of = e * weights / np.where(total == 0, 1, total)[..., None]
    return np.einsum("hqk,khd->qhd", share_of, v), log


def band(queries, keys, first, causal, window):
    """[queries, keys]: query i is at the position first + i."""
    left, right = window or (None, None)
    right = 0 if causal else right  # causal is the tighter one
    if window and window[1] is not None and causal:
        right = min(0, window[1])
    distance = np.arange(keys) - (first + np.arange(queries))[:, None]
    keep = np.ones((queries, keys), bool)
    keep &= True if right is None else distance <= right
    return keep & (True if left is None else distance >= -left)


def rotated(x, positions, cos, sin):
    """x: [..., rows, heads, dim]."""
    n = cos.shape[1]
    positions = np.clip(positions, 0, len(cos) - 1)
    co, si = wide(cos)[positions][:, None], wide(sin)[positions][:, None]
    x = wide(x)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([a * co - b * si, b * co + a * si, rest], -1)


def scores(c):
    """Options of scores that all kinds of attention have."""
    c.some(scale=c.pick(None, 0.3, 0.05), softcap=c.pick(None, None, 5.0, 1.5))
    c.some(return_lse=c.pick(None, True))


def windows(c):
    if c.chance(0.5):
        c.options["causal"] = True
    if c.chance(0.4):
        c.options["window"] = c.pick(
            (7, 3), (0, 0), (None, 5), (64, None), (130, 0), (None, None), (300, 300), (1, 200)
        )


def lengths_of(c, batch, most):
    """As given and as meant."""
    given = np.array([c.sizes.randint(0, most) for _ in range(batch)])
    for b in range(batch):
        if c.sizes.random() < 0.15:
            given[b] = c.sizes.choice((0, 1, most, most + 5, -3, 2**31 - 1))
    return given.astype(I32), np.clip(given, 0, most)


def spoiled(x, lengths):
    """Beyond the lengths there is anything."""
    for b, n in enumerate(lengths):
        x[b, n:] = BAD.get(x.dtype, np.nan)


def in_pages(c, caches, lengths, size):
    """The caches as pages in any order, with pages of nobody, and the table."""
    batch, keys = caches[0].shape[:2]
    entries = -(-keys // size)
    total = batch * entries + c.sizes.randint(0, 3)
    order = c.numbers.permutation(total)
    table = c.numbers.choice([-5, 10**9, 0, total - 1], (batch, entries)).astype(I32)
    pages = []
    for cache in caches:
        new = np.full((total, size, *cache.shape[2:]), BAD.get(cache.dtype, np.nan), cache.dtype)
        for b, n in enumerate(lengths):
            for e in range(-(-int(n) // size)):
                table[b, e] = order[b * entries + e]
                rows = cache[b, e * size : min((e + 1) * size, n)]
                new[table[b, e], : len(rows)] = rows
        pages.append(new)
    return pages, table


def scaled(c, name, x, arrays, names):
    """The elements as meant; perhaps with scales."""
    if not c.chance(0.7):
        return wide(x)
    form = c.pick((x.shape[2],), (c.batch, x.shape[2]))
    scale = c.numbers.uniform(0.5, 1.5, form).astype(F32)
    scale /= F32.type(30) if x.dtype == I8 else F32.type(1)
    arrays.append(scale)
    names.append(name)
    return wide(x) * np.broadcast_to(scale, (c.batch, x.shape[2]))[:, None, :, None]


def results(c, o, lse, dtype):
    """What a call returns."""
    if c.options.get("return_lse"):
        return o.astype(dtype), lse.astype(F32)
    c.close = c.close[0]
    return o.astype(dtype)


# ---- attention -----------------------------------------------------------------------------------


def same_group(b, h, i, j, data):
    return (data[i % 64] == data[j % 64]) | (j <= i)


def stripes(b, h, i, j):
    return ((i // 5 + j // 7 + b + h) % 3 == 0) | (i == j)


def prefix_and_causal(b, h, i, j):
    return (j < 70) | (j <= i)


def _masked(c, mask, batch, heads, queries, keys):
    """keep [batch, heads, queries, keys] and the arrays of the mask."""
    data = c.numbers.integers(0, 3, 64).astype(I32)
    b, h = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None, None]
    i, j = np.arange(queries)[:, None], np.arange(keys)
    given = (data,) if mask is same_group else ()
    keep = np.broadcast_to(mask(b, h, i, j, *given), (batch, heads, queries, keys))
    return keep, given


def _packed(c, queries, keys, count):
    """Cuts into sequences."""
    ends = []
    for rows in (queries, keys):
        inner = sorted(c.sizes.randint(0, rows) for _ in range(count - 1))
        ends.append(np.array([0, *inner, rows], I32))
    return ends


def _attention_options(c):
    """What stays from step to step."""
    x = SimpleNamespace(kind=c.pick("plain", "plain", "packed", "lengths", "pages", "mask"))
    masked = x.kind == "mask"
    x.bits = 16 if masked else c.pick(16, 16, 16, "kv", 8)
    x.kv_heads, share = c.pick(1, 1, 2, 3), c.pick(1, 1, 2, 4)
    x.heads = x.kv_heads * share
    step, most = 8 if x.bits == 16 else 16, 128 if masked else 256
    x.dim = c.pick(64, 128, step * c.rng.randint(1, most // step), min(192, most))
    x.vdim = c.pick(x.dim, x.dim, step * c.rng.randint(1, most // step), 128)
    x.dtype = E4 if x.bits == 8 else c.pick(F16, BF16)
    x.kv_dtype = {16: x.dtype, "kv": c.pick(I8, E4), 8: E4}[x.bits]
    x.out = BF16 if x.bits == 8 else x.dtype
    scores(c)
    if not masked:
        windows(c)
        c.some(bottom_right=c.pick(None, True))
    c.some(batch_invariant=c.pick(None, None, True), deterministic=c.pick(None, None, True))
    x.diagonal = c.options.get("bottom_right", False)
    x.rotate = x.kind in ("plain", "packed", "mask") and x.bits == 16
    x.rotate &= x.dim % 16 == 0 and c.chance(0.3)
    x.bias = None if masked or c.chance(0.7) else [c.chance(0.6) for _ in range(4)]
    x.bias_dtype = c.pick(F32, x.out if x.bits != 8 else F32)
    x.drop = c.pick(0, 0, 0.3) if x.kind == "plain" else 0
    x.mask = c.pick(same_group, stripes, prefix_and_causal) if masked else None
    x.page, x.own_lengths = c.pick(16, 32, 48, 64, 128, 80, 256), c.chance(0.5)
    return x


def _attention_arrays(c, x):
    """q, k and v; as they are meant; arrays and names of what changes them."""
    limit = WORK / (x.heads * (x.dim + x.vdim))
    c.batch = x.batch = 1 if x.kind == "packed" else c.sizes.choice((1, 1, 2, 3))
    x.queries = c.length(min(420, limit / 60 / x.batch))
    x.keys = c.length(min(700, limit / x.queries / x.batch))
    x.keys = -(-x.keys // x.page) * x.page if x.kind == "pages" else x.keys
    if x.rotate and x.diagonal:
        x.keys = max(x.keys, x.queries)
    q = numbers(c, (x.batch, x.queries, x.heads, x.dim), x.dtype, c.pick(0.3, 1, 3))
    k, v = (numbers(c, (x.batch, x.keys, x.kv_heads, d), x.kv_dtype) for d in (x.dim, x.vdim))
    meant, more, names = {"q": wide(q), "k": wide(k), "v": wide(v)}, [], []
    if x.bits != 16:
        for name, y in zip("qkv", (q, k, v)):
            if y.dtype.itemsize == 1:
                meant[name] = scaled(c, f"{name}_scale", y, more, names)
    if x.rotate:
        first = x.keys - x.queries if x.diagonal and x.kind != "packed" else 0
        rows = max(x.keys, x.queries, first + x.queries) + c.sizes.choice((0, 3))
        angle = c.numbers.uniform(-3, 3, (rows, x.dim // 2))
        cos, sin = (f(angle).astype(F32) for f in (np.cos, np.sin))
        more += [cos, sin]
        names += ["cos", "sin"]
        for name, y, at in (("q", q, first + np.arange(x.queries)), ("k", k, np.arange(x.keys))):
            meant[name] = wide(rotated(y, at, cos, sin).astype(x.dtype))
    x.added = None
    if x.bias:
        of_scores = x.batch, x.heads, x.queries, x.keys
        bias = numbers(c, [n if has else 1 for n, has in zip(of_scores, x.bias)], x.bias_dtype)
        more.append(bias)
        names.append("bias")
        x.added = np.broadcast_to(wide(bias), of_scores)
    return (q, k, v), meant, more, names


def _of_packed(c, x, meant, more, names, how, o, lse):
    ends = _packed(c, x.queries, x.keys, c.sizes.randint(1, 4))
    more += ends
    names += ["cu_seqlens_q", "cu_seqlens_k"]
    for cuts in zip(*(itertools.pairwise(e) for e in ends)):
        (n, m), (i, j) = (int(b - a) for a, b in cuts), (slice(*cut) for cut in cuts)
        keep = band(n, m, m - n if x.diagonal else 0, *x.band)
        bias = None if x.added is None else x.added[0, :, i, j]
        parts = meant["q"][0, i], meant["k"][0, j], meant["v"][0, j]
        o[0, i], lse[0, :, i] = reference(*parts, keep, *how, bias)


def _of_entries(c, x, arrays, meant, more, names, how, o, lse):
    """Returns q, k and v as they are given."""
    q, k, v = arrays
    n_keys, n_queries = np.full(x.batch, x.keys), np.full(x.batch, x.queries)
    if x.kind in ("lengths", "pages"):
        given, n_keys = lengths_of(c, x.batch, x.keys)
        more.append(given)
        names.append("kv_lengths")
        if x.own_lengths:
            given, n_queries = lengths_of(c, x.batch, x.queries)
            more.append(given)
            names.append("q_lengths")
            spoiled(q, n_queries)
        spoiled(k, n_keys)
        spoiled(v, n_keys)
    keep = np.ones((x.batch, 1, x.queries, x.keys), bool)
    if x.mask:
        c.options["mask"] = x.mask
        keep, given = _masked(c, x.mask, x.batch, x.heads, x.queries, x.keys)
        more += given
        names += ["mask_data"] * len(given)
    if x.kind == "pages":
        (k, v), table = in_pages(c, [k, v], n_keys, x.page)
        more.append(table)
        names.append("page_table")
    seed = np.array([c.sizes.randint(-99, 99)], I32)
    weights = kept(x.batch, x.heads, x.queries, x.keys, x.drop, seed[0])
    if x.drop:
        c.options["dropout"] = x.drop
        more.append(seed)
        names.append("seed")
    for b, (n, m) in enumerate(zip(n_queries, n_keys)):
        both = band(n, m, m - n if x.diagonal else 0, *x.band) & keep[b, :, :n, :m]
        bias = None if x.added is None else x.added[b, :, :n, :m]
        part = weights[b, :, :n, :m] if x.drop else 1.0
        seen = meant["q"][b, :n], meant["k"][b, :m], meant["v"][b, :m]
        o[b, :n], lse[b, :, :n] = reference(*seen, both, *how, bias, weights=part)
    return q, k, v


def attention(c):
    x = _attention_options(c)
    arrays, meant, more, names = _attention_arrays(c, x)
    how = c.options.get("scale") or x.dim**-0.5, c.options.get("softcap")
    x.band = c.options.get("causal"), c.options.get("window")
    o = np.zeros((x.batch, x.queries, x.heads, x.vdim))
    lse = np.full((x.batch, x.heads, x.queries), -np.inf)
    if x.kind == "packed":
        _of_packed(c, x, meant, more, names, how, o, lse)
    else:
        arrays = _of_entries(c, x, arrays, meant, more, names, how, o, lse)
    c.names = tuple(names)
    top, unit = max(1.0, np.abs(o).max()), {F16: 3e-3, BF16: 2e-2}[x.out]
    extra = 2.0 if x.bits == "kv" or x.rotate else 1.0
    c.close = [(unit, unit * top * extra), (2e-3, 4e-3 if x.bits != 8 else 2e-2)]
    if x.bits == 8 or x.bits == "kv" and top > 20:
        c.rms = 0.05
    return [*arrays, *more], results(c, o, lse, x.out)


# ---- decoding ------------------------------------------------------------------------------------


def _tree(c, batch, queries):
    """Each query sees itself and the ancestors of its parent."""
    tree = np.zeros((c.sizes.choice((1, batch)), queries, queries), bool)
    for t in tree:
        for i in range(queries):
            if i and c.numbers.random() < 0.8:
                t[i] = t[c.numbers.integers(i)]
            t[i, i] = True
    return tree


def attention_decode(c):
    small = c.chance(0.4)
    step = 16 if small else 8
    dim = c.pick(64, 128, step * c.rng.randint(32 // step, 256 // step), 96)
    vdim = c.pick(dim, dim, step * c.rng.randint(32 // step, 256 // step))
    kv_heads, share, queries = c.pick(1, 1, 2, 3), c.pick(1, 2, 4, 5, 8), c.pick(1, 1, 1, 2, 3, 7)
    most = 64 if vdim <= 128 else 40 if vdim <= 192 else 32
    c.need(queries * share <= most)
    dtype, heads = c.pick(F16, BF16), kv_heads * share
    kv_dtype = c.pick(I8, E4, E5) if small else dtype
    scores(c)
    treed = queries > 1 and c.chance(0.3)
    if not treed:
        windows(c)
    sunk, lengthed, size = c.chance(0.3), c.chance(0.8), c.pick(0, 0, 16, 24, 64, 128, 40, 256)
    if c.chance(0.3):
        c.options["config"] = c.configs.AttentionDecodeConfig(
            c.pick(0, 1, 2, 4), c.pick(0, 1, 2), 0, c.pick(None, False)
        )

    c.batch = batch = c.sizes.choice((1, 1, 2, 3, 5, 9))
    keys = c.length(min(1500, WORK / (batch * heads * queries * (dim + vdim))))
    keys = -(-keys // size) * size if size else keys
    q = numbers(c, (batch, queries, heads, dim), dtype, c.pick(0.3, 1, 3))
    k, v = (numbers(c, (batch, keys, kv_heads, d), kv_dtype) for d in (dim, vdim))
    arrays, names = [q, k, v], []
    given, lengths = lengths_of(c, batch, keys)
    if treed:
        given = lengths = np.maximum(lengths, min(queries, keys)).astype(I32)
    if lengthed:
        arrays.append(given)
        names.append("kv_lengths")
        spoiled(k, lengths)
        spoiled(v, lengths)
    else:
        lengths = np.full(batch, keys)
    wk, wv = wide(k), wide(v)
    if small:
        wk, wv = (scaled(c, f"{name}_scale", x, arrays, names) for name, x in (("k", k), ("v", v)))
    if sunk:
        sinks = numbers(c, (heads,), F32, 2)
        arrays.append(sinks)
        names.append("sinks")
    if treed:
        tree = _tree(c, batch, queries)
        arrays.append(tree)
        names.append("tree")
        tree = np.broadcast_to(tree, (batch, queries, queries))
    if size:
        (arrays[1], arrays[2]), table = in_pages(c, [k, v], lengths, size)
        arrays.append(table)
        names.append("page_table")
    causal, window = c.options.get("causal"), c.options.get("window")
    how = c.options.get("scale") or dim**-0.5, c.options.get("softcap")
    o, lse = np.zeros((batch, queries, heads, vdim)), np.zeros((batch, heads, queries))
    for b, n in enumerate(lengths):
        keep = band(queries, n, n - queries, causal, window)
        if treed:
            own = np.arange(n) - (n - queries)
            keep = (own < 0) | tree[b][:, np.maximum(own, 0)]
        o[b], lse[b] = reference(
            wide(q[b]), wk[b, :n], wv[b, :n], keep, *how, sinks=wide(sinks) if sunk else None
        )
    c.names = tuple(names)
    top = max(1.0, np.abs(o).max())
    unit = {F16: 3e-3, BF16: 2e-2}[dtype]
    c.close = [(unit, unit * top), (2e-3, 4e-3)]
    return arrays, results(c, o, lse, dtype)


def mla_decode(c):
    dim, vdim = 64 * c.rng.randint(2, 9), 128 * c.rng.randint(1, 4)
    dim, vdim = c.pick((576, 512), (dim, min(vdim, dim // 128 * 128)))
    queries, heads, dtype = c.pick(1, 1, 2, 3), c.pick(1, 7, 16, 64, 128), c.pick(F16, BF16)
    c.some(scale=c.pick(None, 0.07), causal=c.pick(None, True), return_lse=c.pick(None, True))
    if vdim != 512 or c.chance(0.5):
        c.options["value_dim"] = vdim
    size, lengthed = c.pick(0, 16, 24, 64, 128), c.chance(0.8)
    batch = c.sizes.choice((1, 2, 3, 5))
    keys = c.length(min(1000, 3 * WORK / (batch * heads * queries * (dim + vdim))))
    keys = -(-keys // size) * size if size else keys
    q = numbers(c, (batch, queries, heads, dim), dtype, 0.5)
    cache = numbers(c, (batch, keys, dim), dtype)
    arrays, names, lengths = [q, cache], [], np.full(batch, keys)
    if lengthed or size:
        given, lengths = lengths_of(c, batch, keys)
        arrays.append(given)
        names.append("kv_lengths")
        spoiled(cache, lengths)
    if size:
        (arrays[1],), table = in_pages(c, [cache], lengths, size)
        arrays.append(table)
        names.append("page_table")
    o, lse = np.zeros((batch, queries, heads, vdim)), np.zeros((batch, heads, queries))
    for b, n in enumerate(lengths):
        k = wide(cache[b, :n])[:, None]
        keep = band(queries, n, n - queries, c.options.get("causal"), None)
        scale = c.options.get("scale") or dim**-0.5
        o[b], lse[b] = reference(wide(q[b]), k, k[..., :vdim], keep, scale)
    c.names = tuple(names)
    unit = {F16: 3e-3, BF16: 2e-2}[dtype]
    c.close = [(unit, unit * max(1.0, np.abs(o).max())), (2e-3, 4e-3)]
    return arrays, results(c, o, lse, dtype)


def append_pages(c):
    """Rotated and converted, in place."""
    heads, dim, vdim = c.pick(1, 2, 3), 8 * c.rng.randint(1, 20), 8 * c.rng.randint(1, 20)
    size, dtype = c.pick(1, 3, 16, 24, 64), c.pick(F16, BF16, F32)
    cache_dtype = c.pick(dtype, I8, E4, E5)
    turn, scaling = c.chance(0.6), [c.chance(0.7) for _ in "kv"]
    n = c.pick(dim // 2, c.rng.randint(1, dim // 2))
    forms = c.pick(1, 2), c.pick(1, 2)
    angle_dtype = c.pick(F32, F16, BF16)

    batch, rows = c.sizes.choice((1, 2, 3, 5)), c.length(40)
    entries = c.sizes.randint(1, 6)
    pages = batch * entries + c.sizes.randint(0, 2)
    caches = [numbers(c, (pages, size, heads, d), F32).astype(cache_dtype) for d in (dim, vdim)]
    new = [numbers(c, (batch, rows, heads, d), dtype) for d in (dim, vdim)]
    table = c.numbers.permutation(pages)[: batch * entries].reshape(batch, entries).astype(I32)
    table[c.numbers.random(table.shape) < 0.1] = c.sizes.choice((-1, pages, 2**31 - 1))
    lengths = c.numbers.integers(-2, entries * size + 2, batch).astype(I32)
    arrays, names = [*caches, *new, table, lengths], []
    values = [wide(x) for x in new]
    if turn:
        positions = c.sizes.randint(1, entries * size + 4)
        angle = c.numbers.uniform(-3, 3, (positions, n))
        cos, sin = (f(angle).astype(angle_dtype) for f in (np.cos, np.sin))
        arrays += [cos, sin]
        names += ["cos", "sin"]
        for b in range(batch):
            values[0][b] = rotated(new[0][b], lengths[b] + np.arange(rows), cos, sin)
    if cache_dtype.itemsize == 1:
        for k, name in enumerate(("k_scale", "v_scale")):
            if scaling[k]:
                scale = c.numbers.uniform(0.01, 0.05, (batch, heads)[2 - forms[k] :]).astype(F32)
                arrays.append(scale)
                names.append(name)
                values[k] /= np.broadcast_to(wide(scale), (batch, heads))[:, None, :, None]
    if cache_dtype == I8:
        values = [np.rint(x).clip(-127, 127).astype(I8) for x in values]
    elif cache_dtype.itemsize == 1:
        top = float(ml_dtypes.finfo(cache_dtype).max)
        values = [x.clip(-top, top).astype(F32).astype(cache_dtype) for x in values]
    want = [x.copy() for x in caches]
    for b in range(batch):
        for i in range(rows):
            at = int(lengths[b]) + i
            if 0 <= at < entries * size and 0 <= table[b, at // size] < pages:
                for cache, x in zip(want, values):
                    cache[table[b, at // size], at % size] = x[b, i]
    c.names = tuple(names)
    if cache_dtype == I8:
        c.close = 0, 1.0
    elif cache_dtype.itemsize == 1:
        c.close = {E4: 2**-3, E5: 2**-2}[cache_dtype] * 1.01, 2**-9 if cache_dtype == E4 else 2**-15
    elif turn:
        c.close = UNIT[cache_dtype] * 2, 1e-5 if cache_dtype == F32 else UNIT[cache_dtype]
    return arrays, tuple(want)


# ---- sampling ------------------------------------------------------------------------------------


def sample(c):
    """What is compared is whether the token of a row is one that may be drawn."""
    n, dtype = c.pick(1, 5, c.extent(), 1000, c.rng.randint(1, 9000), 33000), c.pick(F16, BF16, F32)
    by_row = [c.chance(0.4) for _ in range(3)]
    given = [c.chance(0.6) for _ in range(3)]
    spread = c.pick(0.1, 1, 4)
    rows = c.length(max(1, min(70, 200_000 // n)))
    x = numbers(c, (rows, n), dtype, spread)
    x[c.numbers.random(x.shape) < c.pick(0, 0.2)] = -np.inf
    x[:, c.numbers.integers(n)] = 0
    arrays, names = [x, np.array([c.sizes.randint(-(2**31), 2**31 - 1)], I32)], []
    values = {}
    draws = {
        "top_k": (lambda: c.pick(0, 1, 2, 50, n, n + 7, c.rng.randint(1, n)), I32),
        "top_p": (lambda: c.pick(0.9, 1.0, 0.5, 0.05, 0.99), F32),
        "temperature": (lambda: c.pick(1.0, 0.7, 2.0, 0, 0.1), F32),
    }
    for (name, (draw, kind)), rowed, there in zip(draws.items(), by_row, given):
        values[name] = np.full(rows, {"top_k": 0}.get(name, 1))
        if there and rowed:
            array = np.array([draw() for _ in range(rows)], kind)
            arrays.append(array)
            names.append(name)
            values[name] = array
        elif there:
            c.options[name] = draw()
            values[name] = np.full(rows, c.options[name])
    c.names = tuple(names)
    may = np.zeros((rows, n), bool)
    for r, (row, k, p, t) in enumerate(zip(wide(x), *values.values())):
        keep = row >= np.sort(row)[-k] if 0 < k < n else np.ones(n, bool)
        if t == 0:
            may[r, row.argmax()] = True
            continue
        share = np.where(keep, np.exp((row - row.max()) / t), 0)
        share /= share.sum()
        order = np.argsort(-row, kind="stable")
        before = np.empty(n)
        sums = np.concatenate([[0], np.cumsum(share[order])[:-1]])
        before[order] = sums
        _, first = np.unique(-row[order], return_index=True)
        start = np.repeat(sums[first], np.diff([*first, n]))  # equal logits: all or none
        before[order] = start
        may[r] = keep & (before < p + 1e-5) & (share > 0)
    c.seen = lambda got: may[np.arange(rows), got]
    return arrays, np.ones(rows, bool)


# ---- products ------------------------------------------------------------------------------------


def _small(c, shape, dtype):
    return c.numbers.integers(-4, 5, shape).astype(F32).astype(dtype)


def _powers(c, *shape):
    return c.numbers.choice([0.5, 1, 2], shape).astype(F32)


def ragged_dot(c):
    """8-bit groups with scales, and an array for each group."""
    dtype, masked = c.pick(E4, E5, F16, BF16), c.chance(0.6)
    c.need(masked or dtype.itemsize == 1)
    n, k = c.extent(300), c.pick(c.extent(), 130, 256)
    tb = dtype.itemsize == 1 or c.chance(0.5)
    scaling = dtype.itemsize == 1 and c.chance(0.7)
    c.options |= {"transpose_rhs": True} if tb else {}
    out = c.out_dtype(BF16 if dtype.itemsize == 1 else dtype)
    groups = c.sizes.choice((1, 2, 3, 5, 9, 40))
    c.need(groups * n * k <= 4 * WORK)
    rows = c.length(max(1, min(300, WORK / n / k / (groups if masked else 1))))
    lhs = _small(c, (groups, rows, k) if masked else (rows, k), dtype)
    rhs = _small(c, (groups, n, k) if tb else (groups, k, n), dtype)
    given, meant = lengths_of(c, groups, rows if masked else max(1, 2 * rows // groups))
    if not masked:
        given = np.where(given > 2**30, 2**30, given).astype(I32)
    arrays, names, parts = [lhs, rhs, given], [], -(-k // 128)
    left, right = wide(lhs), wide(rhs if tb else rhs.swapaxes(1, 2))
    if masked:
        spoiled(lhs, meant)
    if scaling:
        names = ["scale_lhs", "scale_rhs"]
        arrays += [_powers(c, *lhs.shape[:-1], parts), _powers(c, groups, -(-n // 128), parts)]
        left = left * np.repeat(arrays[-2], 128, -1)[..., :k]
        right = right * np.repeat(np.repeat(arrays[-1], 128, 1)[:, :n], 128, 2)[..., :k]
    c.names = tuple(names)
    if masked:
        want = np.einsum("grk,gnk->grn", left, right)
        want = np.where((np.arange(rows) < meant[:, None])[..., None], want, 0)

        def defined(got):
            return np.where((np.arange(rows) < meant[:, None])[..., None], got, got.dtype.type(0))

        c.seen = defined
    else:
        want, at = np.zeros((rows, n)), 0
        for g, size in enumerate(np.maximum(given, 0)):
            end = min(at + int(size), rows)
            want[at:end] = left[at:end] @ right[g].T
            at = end
    c.need(np.abs(want).max() < 6e4)
    return arrays, want.astype(F32).astype(out)


def matmul(c):
    """int8, float32 and batches."""
    kind = c.pick("int8", "tf32", "bf16x3", "batch", "batch")
    n, k, ta, tb = c.extent(300), c.extent(), c.chance(0.3), c.chance(0.5)
    c.options |= ({"transpose_a": True} if ta else {}) | ({"transpose_b": True} if tb else {})
    dtype = {"int8": I8, "tf32": F32, "bf16x3": F32, "batch": c.pick(F16, BF16, E4, I8, F32)}[kind]
    lead = [(), ()]
    if kind == "batch":
        pair = c.pick("ab", "ab", "b", "a", "cross")
        count = c.sizes.randint(1, 5)
        full = c.pick((count,), (count, 2), (2, count))
        lead = {"ab": [full, full], "b": [(), full], "a": [full, ()],
                "cross": [(count, 1), (1, 3)]}[pair]  # fmt: skip
    elif kind == "tf32":
        c.options["precision"] = "tf32"
    batch = np.broadcast_shapes(*lead)
    m = c.length(max(1, min(400, WORK / n / k / math.prod(batch))))
    if kind == "int8":
        make = lambda s: c.numbers.integers(-128, 128, s).astype(I8)  # noqa: E731
    else:
        make = lambda s: _small(c, s, dtype)  # noqa: E731
    a = make((*lead[0], *((k, m) if ta else (m, k))))
    b = make((*lead[1], *((n, k) if tb else (k, n))))
    wa, wb = wide(a.swapaxes(-1, -2) if ta else a), wide(b.swapaxes(-1, -2) if tb else b)
    arrays, names = [a, b], []
    scaling = dtype.itemsize == 1 and c.chance(0.4)
    if scaling:
        forms = c.pick("one", "rows", "blocks")
        if forms == "blocks" and lead == [(), ()]:
            parts = -(-k // 128)
            sa, sb = _powers(c, m, parts), _powers(c, -(-n // 128), parts)
            wa = wa * np.repeat(sa, 128, 1)[:, :k]
            wb = wb * np.repeat(np.repeat(sb, 128, 0)[:n], 128, 1)[:, :k].T
        elif forms == "rows" and lead == [(), ()]:
            sa, sb = _powers(c, m, 1), _powers(c, 1, n)
            wa, wb = wa * sa, wb * sb
        else:
            sa, sb = _powers(c, 1), _powers(c, 1, 1)
            wa, wb = wa * sa[0], wb * sb[0, 0]
        arrays += [sa, sb]
        names += ["scale_a", "scale_b"]
    want = wa @ wb
    biased = c.chance(0.3) and (dtype != I8 or scaling)
    if biased:
        bias = _small(c, (n,), F32 if dtype.itemsize == 1 else dtype)
        arrays.append(bias)
        names.append("bias")
        want = want + wide(bias)
    default = {I8: BF16 if scaling else I32, E4: BF16}.get(dtype, dtype)
    out = c.out_dtype(default)
    if out == F16:
        c.need(np.abs(want).max() < 6e4)
    c.names = tuple(names)
    # numbers of int8 with scales are large, and rounded once
    return arrays, want.astype(out) if out == I32 else want.astype(F32).astype(out)


def mixed_matmul(c):
    """Weights of 8-bit floats."""
    groups, dtype, kind = c.pick(0, 1, 2, 3, 4), c.pick(F16, BF16), c.pick(E4, E5)
    k, n = 64 * max(groups, 1) * c.rng.randint(1, 4), c.extent(300)
    c.some(out_dtype=c.pick(F32, F16, BF16))
    out = c.options.get("out_dtype", dtype)
    scale_dtype = c.pick(F16, BF16, F32)
    m = c.length(max(1, min(300, WORK / n / k)))
    x, w = _small(c, (m, k), dtype), _small(c, (n, k), kind)
    arrays, full = [x, w], wide(w)
    if groups:
        arrays.append(_powers(c, groups, n).astype(scale_dtype))
        full = full * np.repeat(wide(arrays[2]), k // groups, 0).T
    want = wide(x) @ full.T
    c.need(np.abs(want).max() < 6e4)
    return arrays, want.astype(F32).astype(out)


# ---- norms ---------------------------------------------------------------------------------------


def _several_axes(c, last):
    rank = c.rng.randint(2, 4)
    shape = [c.pick(c.extent(40), c.rng.randint(1, 9)) for _ in range(rank)]
    shape[-1] = c.pick(c.extent(), c.rng.randint(1, 600))
    count = c.rng.randint(1, rank)
    first = rank - count if last else c.rng.randint(0, rank - count)
    axes = tuple(range(first, first + count))
    if 0 not in axes:
        shape[0] = c.length(60)
    c.need(math.prod(shape) <= 60000)
    return shape, axes


def softmax(c):
    shape, axes = _several_axes(c, False)
    x = numbers(c, shape, c.pick(F16, BF16, F32), c.pick(0.1, 1, 6))
    out = c.out_dtype(x.dtype)
    c.options["axis"] = c.pick(axes, tuple(a - len(shape) for a in axes), axes[::-1])
    c.some(batch_invariant=c.pick(None, True), deterministic=c.pick(None, True))
    e = np.exp(wide(x) - wide(x).max(axes, keepdims=True))
    c.close = 2 * UNIT[out], 2e-6 + UNIT[out] / 100
    return [x], (e / e.sum(axes, keepdims=True)).astype(out)


def norm(centered):
    def make(c):
        shape, axes = _several_axes(c, True)
        x = numbers(c, shape, c.pick(F16, BF16, F32), c.pick(0.3, 1, 6))
        x = (wide(x) + c.pick(0, 0.5)).astype(x.dtype)
        out, eps = c.out_dtype(x.dtype), c.pick(None, 0.5, 1e-3)
        c.options["axis"] = c.pick(axes, tuple(a - len(shape) for a in axes))
        c.some(batch_invariant=c.pick(None, True), deterministic=c.pick(None, True))
        c.options |= {} if eps is None else {"eps": eps}
        y = wide(x)
        y = y - y.mean(axes, keepdims=True) if centered else y
        root = np.sqrt((y * y).mean(axes, keepdims=True) + (eps or (1e-5 if centered else 1e-6)))
        y, arrays, names = y / root, [x], []
        for name in ("weight", "bias")[: 1 + centered]:
            if c.chance(0.6):
                arrays.append(numbers(c, [shape[a] for a in axes], c.pick(F16, BF16, F32)))
                names.append(name)
                y = y * wide(arrays[-1]) if name == "weight" else y + wide(arrays[-1])
        c.names = tuple(names)
        lost = np.abs(wide(x)).max() / max(root.min(), 1e-3)
        c.close = 2 * UNIT[out], 1e-5 + UNIT[out] / 100 + 1e-6 * lost * centered
        return arrays, y.astype(out)

    return make


MAKERS = {
    "attention": attention,
    "attention_decode": attention_decode,
    "mla_decode": mla_decode,
    "append_pages": append_pages,
    "sample": sample,
    "ragged_dot": ragged_dot,
    "matmul": matmul,
    "mixed_matmul": mixed_matmul,
    "softmax": softmax,
    "rms_norm": norm(False),
    "layer_norm": norm(True),
}
