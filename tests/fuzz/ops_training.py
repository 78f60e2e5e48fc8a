"""Random calls of the functions of `pallas_mgpu.ops` for training and decoding, beside float64:
gradients, gated products, cross entropy, rotary embedding, 8-bit elements, AdamW. A maker takes a
call (fuzz/ops.py), draws arrays and options, and returns the arrays and what must come out."""

import math

import ml_dtypes
import numpy as np

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, MX = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e8m0fnu)
E4, E5 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UNIT = {F16: 2**-10, BF16: 2**-7, F32: 2**-20}
WORK = 4e6  # multiplications of a call


def wide(x):
    return x.astype(np.float64)


def near(dtype, atol=1e-5):
    return 2 * UNIT[dtype], atol + UNIT[dtype] / 100


def normal(c, shape, *dtypes, factor=1.0):
    return (c.numbers.standard_normal(shape) * factor).astype(c.pick(*(dtypes or (F16, BF16, F32))))


def shape_of(c, least=1, most=40000):
    """Of rank least to 3; the last extent is that of the rows."""
    rank = c.rng.randint(least, 3)
    n = c.pick(c.extent(), c.extent(), 8 * c.extent(), c.rng.randint(400, 9000))
    shape = (*(c.extent(40) for _ in range(rank - 1)), n)
    c.need(math.prod(shape) <= most)
    return shape


# ---- gated linear units --------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
}


def activation(c):
    name = c.pick(*ACTIVATIONS)
    if name != "silu" or c.chance(0.5):
        c.options["activation"] = name
    return ACTIVATIONS[name], name


def slope(f, name, x):
    return np.where(x > 0, 1.0, 0.0) if name == "relu" else (f(x + 1e-6) - f(x - 1e-6)) / 2e-6


def gated_linear_unit(c):
    shape, (f, _), dtype = shape_of(c), activation(c), c.pick(F16, BF16, F32)
    gate, up = normal(c, shape, dtype), normal(c, shape, dtype)
    want, out = f(wide(gate)) * wide(up), c.out_dtype(dtype)
    c.close = near(out)
    arrays = [np.concatenate([gate, up], -1)] if c.chance(0.5) else [gate, up]
    return arrays, want.astype(out)


def gated_linear_unit_backward(c):
    shape, (f, name), dtype = shape_of(c), activation(c), c.pick(F16, BF16, F32)
    grad, gate, up = normal(c, shape), normal(c, shape, dtype), normal(c, shape, dtype)
    d, g, u = wide(grad), wide(gate), wide(up)
    want = [x.astype(dtype) for x in (d * u * slope(f, name, g), d * f(g))]
    c.close = near(dtype)
    if c.chance(0.5):
        return [grad, np.concatenate([gate, up], -1)], np.concatenate(want, -1)
    return [grad, gate, up], tuple(want)


def activation_backward(c):
    shape, (f, name), dtype = shape_of(c), activation(c), c.pick(F16, BF16, F32)
    c.need(name != "sigmoid")
    if c.chance(0.2):
        f, name = np.tanh, "tanh"
        c.options["activation"] = name
    grad, x = normal(c, shape, dtype), normal(c, shape, dtype)
    want, bias = wide(grad) * slope(f, name, wide(x)), c.chance(0.6)
    if not bias:
        c.close = near(dtype)
        return [grad, x], want.astype(dtype)
    c.options["bias"], out = True, c.out_dtype(dtype)
    sums = want.sum(tuple(range(len(shape) - 1))).astype(out)
    count = math.sqrt(math.prod(shape[:-1]))
    c.close = [near(dtype), near(out, 1e-5 * count)]
    return [grad, x], (want.astype(dtype), sums)


def gated_matmul(c):
    m, n, k, (f, _), dtype = c.extent(), c.extent(200), c.extent(), activation(c), c.pick(F16, BF16)
    c.need(2 * m * n * k <= WORK)
    tb = c.chance(0.5)
    c.options |= {"transpose_b": True} if tb else {}
    x = normal(c, (m, k), dtype)
    w, up = (normal(c, (n, k) if tb else (k, n), dtype, factor=k**-0.5) for _ in range(2))
    gate, other = (wide(x) @ wide(y.T if tb else y) for y in (w, up))
    want, both = f(gate) * other, np.concatenate([gate, other], -1)
    c.close = 2 * UNIT[dtype], 4 * UNIT[dtype]
    if c.chance(0.5):
        consumers, tile = c.pick((1, 128), (2, 128), (1, 256), (2, 256), (3, 128))
        c.options["config"] = c.configs.MatmulConfig(
            consumers, tile, c.pick(0, 2, 3), c.pick(1, 2), c.pick(1, 2), c.rng.randint(1, 4),
        )  # fmt: skip
    arrays = [x, w, up] if c.chance(0.5) else [x, np.concatenate([w, up], 0 if tb else 1)]
    if c.chance(0.4):
        c.options["return_products"] = True
        return arrays, (want.astype(dtype), both.astype(dtype))
    return arrays, want.astype(dtype)


def gated_matmul_backward(c):
    m, n, k, dtype = c.extent(), c.extent(200), c.extent(), c.pick(F16, BF16)
    (f, name), beside, tb = activation(c), c.chance(0.5), c.chance(0.5)
    if beside:
        n, k = max(n // 64, 1) * 64, max(k // 8, 1) * 8
        tile = c.configs.MatmulConfig(
            2, c.pick(64, 128, 256), 0, c.pick(1, 2), c.pick(1, 2), c.rng.randint(1, 4)
        )
        c.options["config"] = c.configs.GatedBackwardConfig(tile, c.pick(32, 64))
    c.need(4 * m * n * k <= WORK)
    c.options |= {"transpose_b": True} if tb else {}
    grad, both = normal(c, (m, n), dtype), normal(c, (m, 2 * n), dtype)
    w = normal(c, (2 * n, k) if tb else (k, 2 * n), dtype, factor=n**-0.5)
    d, g, u = wide(grad), wide(both[:, :n]), wide(both[:, n:])
    of_products = np.concatenate([d * u * slope(f, name, g), d * f(g)], -1).astype(dtype)
    dx = wide(of_products) @ (wide(w) if tb else wide(w).T)
    c.close = 4 * UNIT[dtype], 4 * UNIT[dtype]
    return [grad, both, w], (dx.astype(dtype), of_products)


# ---- norms ---------------------------------------------------------------------------------------


def softmax_backward(c):
    shape = shape_of(c)
    axis = len(shape) - 1 if c.chance(0.7) else c.rng.randrange(len(shape))
    grad, z = normal(c, shape), wide(normal(c, shape))
    e = np.exp(z - z.max(axis, keepdims=True))
    y = (e / e.sum(axis, keepdims=True)).astype(c.pick(F16, BF16, F32))
    if axis != len(shape) - 1 or c.chance(0.3):
        c.options["axis"] = c.pick(axis, axis - len(shape))
    d, p = wide(grad), wide(y)
    c.close = near(y.dtype)
    return [grad, y], (p * (d - (d * p).sum(axis, keepdims=True))).astype(y.dtype)


def norm_backward(centered):
    def make(c):
        shape = shape_of(c)
        c.need(shape[-1] > 1)  # the deviation of one number is 0
        grad, x = normal(c, shape), normal(c, shape)
        arrays, names = [grad, x], []
        weight = normal(c, shape[-1:]) if c.chance(0.6) else None
        add = normal(c, shape) if c.chance(0.4) else None
        for name, v in (("weight", weight), ("add", add)):
            if v is not None:
                arrays.append(v)
                names.append(name)
        c.names = tuple(names)
        eps = c.pick(None, 0.5, 1e-3)
        c.options |= {} if eps is None else {"eps": eps}
        bias = centered and c.chance(0.5)
        c.options |= {"bias": True} if bias else {}
        d, y = wide(grad), wide(x)
        y = y - y.mean(-1, keepdims=True) if centered else y
        root = np.sqrt((y * y).mean(-1, keepdims=True) + (eps or (1e-5 if centered else 1e-6)))
        y = y / root
        scaled = d if weight is None else d * wide(weight)
        dx = scaled - y * (scaled * y).mean(-1, keepdims=True)
        dx = (dx - scaled.mean(-1, keepdims=True) if centered else dx) / root
        want = [(dx if add is None else dx + wide(add)).astype(x.dtype)]
        rows = tuple(range(len(shape) - 1))
        if weight is not None:
            want.append((d * y).sum(rows).astype(weight.dtype))
        if bias:
            want.append(d.sum(rows).astype((x if weight is None else weight).dtype))
        lost = 1e-5 / root.min()  # of short rows of nearly equal numbers
        count = math.sqrt(math.prod(shape[:-1]))
        c.close = [near(v.dtype, 1e-5 * (count if k else 1) + lost) for k, v in enumerate(want)]
        return arrays, tuple(want) if len(want) > 1 else want[0]

    return make


def column_sums(c):
    shape = (c.pick(c.extent(), c.rng.randint(1, 3000)), *shape_of(c)[-2:])
    c.need(math.prod(shape) <= 200_000)
    x = normal(c, shape)
    out = c.out_dtype(x.dtype)
    c.close = near(out, 2e-6 * math.sqrt(math.prod(shape[:-1])))
    return [x], wide(x).sum(tuple(range(len(shape) - 1))).astype(out)


# ---- cross entropy, rotary embedding, AdamW ------------------------------------------------------


def _logits(c):
    rows, n = c.extent(140), c.pick(c.extent(), c.rng.randint(400, 9000))
    c.need(rows * n <= 60000)
    logits = normal(c, (rows, n), factor=c.pick(1, 4, 10))
    targets = c.numbers.integers(0, n, rows).astype(np.int32)
    ignore = c.pick(-100, -100, 0, n - 1)
    c.options |= {} if ignore == -100 else {"ignore_index": ignore}
    targets[c.numbers.random(rows) < 0.2] = ignore
    x = wide(logits)
    top = x.max(1, keepdims=True)
    return logits, targets, targets == ignore, x, np.log(np.exp(x - top).sum(1)) + top[:, 0]


def cross_entropy(c):
    logits, targets, ignored, x, lse = _logits(c)
    odd = c.numbers.random(len(x)) < 0.1 * c.chance(0.5)
    targets[odd & ~ignored] = c.pick(x.shape[1], -1, 2**31 - 1, -(2**31))
    known = (targets >= 0) & (targets < x.shape[1])
    here = x[np.arange(len(x)), np.where(known, targets, 0)]
    losses = np.where(ignored, 0, np.where(known, lse - here, np.nan))
    c.close = 1e-5, 2e-5
    return [logits, targets], (losses.astype(F32), lse.astype(F32))


def cross_entropy_backward(c):
    logits, targets, ignored, x, lse = _logits(c)
    grad = normal(c, len(x), F32)
    onehot = np.arange(x.shape[1]) == targets[:, None]
    want = (np.exp(x - lse[:, None]) - onehot) * np.where(ignored, 0, wide(grad))[:, None]
    c.close = near(logits.dtype, 2e-5)
    return [grad, logits, targets, lse.astype(F32)], want.astype(logits.dtype)


def _heads_and_angles(c):
    batch, length, heads = c.rng.randint(1, 3), c.extent(), c.rng.randint(1, 4)
    half = c.pick(1, 2, 3, 5, 16, 31, 32, 33, 64, 96, 128)
    c.need(batch * length * heads * half <= 60000)
    x = normal(c, (batch, length, heads, 2 * half))
    angles = c.numbers.random((length, half)) * 7
    dtypes = c.pick(F16, BF16, F32), c.pick(F16, BF16, F32)
    return x, np.cos(angles).astype(dtypes[0]), np.sin(angles).astype(dtypes[1])


def _rotated(x, cos, sin, inverse):
    u, v = wide(cos)[None, :, None], wide(sin)[None, :, None] * (-1 if inverse else 1)
    left, right = np.split(x, 2, -1)
    return np.concatenate([left * u - right * v, right * u + left * v], -1)


def _normed(c, x):
    """The factors of heads, and the heads times them."""
    eps = c.pick(None, 1e-3, 0.5)
    c.options |= {} if eps is None else {"eps": eps}
    factor = 1 / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + (eps or 1e-6))
    return factor, wide(x) * factor


def rotary(c):
    x, cos, sin = _heads_and_angles(c)
    c.close = near(x.dtype)
    if c.chance(0.4):
        weight = normal(c, x.shape[3:])
        want = _rotated(_normed(c, x)[1] * wide(weight), cos, sin, False)
        c.close = near(x.dtype, 1e-4)
        return [x, cos, sin, weight], want.astype(x.dtype)
    inverse = c.chance(0.5)
    c.options |= {"inverse": True} if inverse else {}
    return [x, cos, sin], _rotated(wide(x), cos, sin, inverse).astype(x.dtype)


def rotary_backward(c):
    x, cos, sin = _heads_and_angles(c)
    weight, grad = normal(c, x.shape[3:]), normal(c, x.shape)
    factor, y = _normed(c, x)
    c.need(factor.max() < 50)
    g = _rotated(wide(grad), cos, sin, True)
    gw = g * wide(weight)
    dx = (gw - y * (gw * y).mean(-1, keepdims=True)) * factor
    dw = (g * y).sum((0, 1, 2))
    count = math.sqrt(math.prod(x.shape[:3]))
    c.close = [near(x.dtype, 1e-5 * factor.max()), near(weight.dtype, 2e-5 * count)]
    return [grad, x, cos, sin, weight], (dx.astype(x.dtype), dw.astype(weight.dtype))


def add_norm(centered):
    def make(c):
        shape, dtype = shape_of(c), c.pick(F16, BF16, F32)
        c.need(shape[-1] > 1)
        x, residual = normal(c, shape, dtype), normal(c, shape, dtype)
        arrays, names = [x, residual], []
        for name in ("weight", "bias")[: 1 + centered]:
            if c.chance(0.6):
                arrays.append(normal(c, shape[-1:]))
                names.append(name)
        c.names = tuple(names)
        eps = c.pick(0.5, 1e-3)
        c.options["eps"] = eps
        total = (x.astype(F32) + residual.astype(F32)).astype(dtype)
        y = wide(total)
        y = y - y.mean(-1, keepdims=True) if centered else y
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
        given = dict(zip(names, arrays[2:]))
        y = y * wide(given["weight"]) if "weight" in given else y
        y = y + wide(given["bias"]) if "bias" in given else y
        c.close = [near(dtype, 1e-4), (0, 0)]
        return arrays, (y.astype(dtype), total)

    return make


def adamw(c):
    shape = shape_of(c)
    p, g, m = (normal(c, shape) for _ in range(3))
    v = np.abs(normal(c, shape)) + 0.01
    v = v.astype(c.pick(F16, BF16, F32))
    step = c.pick(1, 2, 3, 100, 10000)
    numbers = [c.pick(0.1, 1e-3), c.pick(0.9, 0.5), c.pick(0.99, 0.999), 1e-8, c.pick(0, 0.1), step]
    settings = np.asarray(numbers, F32)
    rate, beta1, beta2, eps, decay, _ = wide(settings)
    d = wide(g)
    first = beta1 * wide(m) + (1 - beta1) * d
    second = beta2 * wide(v) + (1 - beta2) * d * d
    root = np.sqrt(second / (1 - beta2**step)) + eps
    moved = rate / (1 - beta1**step) * first / root
    want = wide(p) * (1 - rate * decay) - moved, first, second
    lost = 1e-5 + 3e-4 * np.abs(moved).max()  # 1 - beta**step in float32
    c.close = [near(x.dtype, lost if k == 0 else 1e-5) for k, x in enumerate((p, m, v))]
    return [p, g, m, v, settings], tuple(w.astype(x.dtype) for w, x in zip(want, (p, m, v)))


# ---- 8-bit elements ------------------------------------------------------------------------------

LARGEST = {E4: 448.0, E5: 57344.0, I8: 127.0}
STEP = {E4: 2**-3, E5: 2**-2, I8: 0}  # from one number to the next


def _blocks(c):
    block = c.pick(None, 32, 64, 128)
    c.options |= {} if block is None else {"block": block}
    mx = block == 32 and c.chance(0.6)
    return block, mx


def _groups(x, block):
    """(..., groups, elements), filled with zeros."""
    n, size = x.shape[-1], block or x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-n // size) * size))
    padded[..., :n] = x
    return padded.reshape(*x.shape[:-1], -1, size)


def _whole(groups, shape):
    return groups.reshape(*shape[:-1], -1)[..., : shape[-1]]


def quantize(c):
    shape, to = shape_of(c), c.pick(E4, E5, I8)
    x = normal(c, shape, factor=c.pick(0.01, 1, 100))
    block, mx = _blocks(c)
    c.options |= {"mx": True} if mx else {}
    c.options |= {"dtype": c.pick(to, to.name)} if to != E4 or c.chance(0.5) else {}
    groups = _groups(wide(x), block)
    scales = np.maximum(np.abs(groups).max(-1), 2.0**-100) / LARGEST[to]
    if mx:
        powers = np.log2(scales)
        c.need((np.abs(powers - np.round(powers)) > 1e-5).all())  # float32 may round to either side
        scales = 2.0 ** np.ceil(powers)
    q = _whole(groups / scales[..., None], shape)
    q = np.clip(np.round(q) if to == I8 else q, -LARGEST[to], LARGEST[to])
    # scales are near; an element between two numbers may become either
    c.close = [(STEP[to], 1.0 if to == I8 else 2.0**-9 if to == E4 else 2.0**-16), (1e-5, 0)]
    scales = scales if block else scales[..., 0]
    return [x], (q.astype(to), scales.astype(MX if mx else F32))


def quantize_by_scale(c):
    shape, to = shape_of(c, most=100_000), c.pick(E4, E5, I8)
    x, scale = normal(c, shape, factor=c.pick(0.01, 1, 100)), np.asarray([c.pick(0.02, 0.3)], F32)
    c.options |= {"dtype": c.pick(to, to.name)} if to != E4 or c.chance(0.5) else {}
    q = wide(x) / wide(scale)
    q = np.clip(np.round(q) if to == I8 else q, -LARGEST[to], LARGEST[to])
    c.close = [(STEP[to], 1.0 if to == I8 else 2.0**-9 if to == E4 else 2.0**-16), (1e-6, 0)]
    return [x, scale], (q.astype(to), np.abs(wide(x)).max().astype(F32).reshape(1))


def dequantize(c):
    shape, of = shape_of(c), c.pick(E4, E5, I8)
    block, mx = _blocks(c)
    q = (c.numbers.standard_normal(shape) * 30).astype(F32)
    q = (np.clip(np.round(q), -127, 127) if of == I8 else q).astype(of)
    groups = _groups(wide(q), block)
    scales = 2.0 ** c.numbers.integers(-6, 4, groups.shape[:-1])
    scales = (scales if mx else scales * 1.3).astype(MX if mx else F32)
    want = _whole(groups * wide(scales)[..., None], shape)
    out = c.pick(None, F16, BF16, F32)
    c.options |= {} if out is None else {"out_dtype": out}
    out = out or BF16
    c.close = UNIT[out], 1e-7
    return [q, scales if block else scales[..., 0]], want.astype(out)


# ---- attention -----------------------------------------------------------------------------------


def _heads(c, most):
    batch, kv_heads, share = c.rng.randint(1, 3), c.rng.randint(1, 3), c.rng.randint(1, most)
    return batch, kv_heads, share, c.pick(F16, BF16)


def _shares(x, share):
    return np.repeat(wide(x), share, 2)


def attention_decode(c):
    batch, kv_heads, share, dtype = _heads(c, 8)
    queries, keys, dim = c.pick(1, 1, 2, 3, 7), c.extent() * c.pick(1, 1, 3), c.pick(64, 128)
    heads = kv_heads * share
    c.need(queries * share <= 64 and batch * heads * queries * keys * dim <= WORK)
    q = normal(c, (batch, queries, heads, dim), dtype)
    k, v = (normal(c, (batch, keys, kv_heads, dim), dtype) for _ in range(2))
    arrays, lengths = [q, k, v], np.full(batch, keys)
    if c.chance(0.6):
        given = c.numbers.integers(0, keys + 1, batch)
        given[c.numbers.random(batch) < 0.2] = c.pick(0, 1, keys, keys + 5, -3, 2**31 - 1)
        lengths = np.clip(given, 0, keys)
        arrays.append(given.astype(np.int32))
        c.names = ("kv_lengths",)
        for b, n in enumerate(lengths):
            k[b, n:] = v[b, n:] = np.nan
    scale = c.pick(None, 0.3)
    c.options |= {} if scale is None else {"scale": scale}
    o, lse = np.zeros(q.shape), np.full((batch, heads, queries), -np.inf)
    for b, n in enumerate(lengths):
        if n:
            k2, v2 = (_shares(x[b : b + 1, :n], share)[0] for x in (k, v))
            s = np.einsum("qhd,khd->hqk", wide(q[b]), k2) * (scale or dim**-0.5)
            e = np.exp(s - s.max(-1, keepdims=True))
            o[b] = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v2)
            lse[b] = s.max(-1) + np.log(e.sum(-1))
    c.close = [(4e-3, 4e-3) if dtype == F16 else (3e-2, 3e-2), (1e-4, 1e-3)]
    if c.chance(0.4):
        c.options["return_lse"] = True
        return arrays, (o.astype(dtype), lse.astype(F32))
    c.close = c.close[0]
    return arrays, o.astype(dtype)


def merge_attention(c):
    batch, heads, queries = c.pick(1, 2, 3), c.pick(1, 2, 5), c.extent(60)
    parts, dim, dtype = c.pick(1, 2, 3, 8), c.extent(300), c.pick(F16, BF16, F32)
    c.need(parts * batch * queries * heads * dim <= 60000)
    o = normal(c, (parts, batch, queries, heads, dim), dtype)
    lse = normal(c, (parts, batch, heads, queries), F32, factor=c.pick(1, 30))
    empty = c.numbers.random(lse.shape) < c.pick(0, 0.3, 1)
    lse[empty] = -np.inf
    o[np.swapaxes(empty, 2, 3)] = c.pick(0, np.nan, np.inf)  # what a part without keys holds
    w = wide(lse) - np.maximum(lse.max(0), -1e30)
    w, top = np.exp(w), wide(lse.max(0))
    total = w.sum(0)
    kept = np.where(np.swapaxes(empty, 2, 3)[..., None], 0, wide(o))
    with np.errstate(all="ignore"):
        share = np.where(total == 0, 0, w / total)
        log = top + np.log(total)
    want = (kept * np.swapaxes(share, 2, 3)[..., None]).sum(0)
    log = np.where(total == 0, -np.inf, log)
    c.close = [near(dtype, 1e-4), (1e-5, 1e-5)]
    if c.chance(0.5):
        c.options["return_lse"] = True
        return [o, lse], (want.astype(dtype), log.astype(F32))
    c.close = c.close[0]
    return [o, lse], want.astype(dtype)


def append_pages(c):
    """In place, and the same each time."""
    batch, rows, heads, dim = c.pick(1, 2, 3), c.extent(9), c.pick(1, 2, 3), c.extent(130)
    size, entries, dtype = c.pick(1, 3, 8, 16), c.pick(1, 2, 5), c.pick(F16, BF16, F32)
    pages = batch * entries + c.pick(0, 2)
    c.need(pages * size * heads * dim <= 60000)
    caches = [normal(c, (pages, size, heads, dim), dtype) for _ in range(2)]
    new = [normal(c, (batch, rows, heads, dim), dtype) for _ in range(2)]
    table = c.numbers.permutation(pages)[: batch * entries].reshape(batch, entries)
    table[c.numbers.random(table.shape) < 0.2] = c.pick(-1, pages, 2**31 - 1)
    lengths = c.numbers.integers(-2, entries * size + 2, batch)
    want = [x.copy() for x in caches]
    for b in range(batch):
        for i in range(rows):
            at = int(lengths[b]) + i
            if 0 <= at < entries * size and 0 <= table[b, at // size] < pages:
                for cache, x in zip(want, new):
                    cache[table[b, at // size], at % size] = x[b, i]
    return [*caches, *new, table.astype(np.int32), lengths.astype(np.int32)], tuple(want)


def _mixed(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def kept(batch, heads, queries, keys, dropout, seed):
    """What probabilities are multiplied with."""
    if not dropout:
        return 1.0
    u32 = np.uint32
    with np.errstate(over="ignore"):
        head = np.arange(batch * heads, dtype=u32).reshape(batch, heads, 1, 1)
        key = _mixed(_mixed(np.asarray(seed, u32)) ^ (head * u32(0x9E3779B9)))
        pair = np.arange(queries * keys, dtype=u32).reshape(queries, keys)
        return (_mixed(pair ^ key) >= u32(round(dropout * 2**32))) / (1 - dropout)


def attention_backward(c):
    batch, kv_heads, share, dtype = _heads(c, 3)
    queries, keys, dim = c.extent(200), c.extent(200), c.pick(64, 64, 128, 256)
    heads = kv_heads * share
    c.need(batch * heads * queries * keys * dim <= WORK)
    grad, q = (normal(c, (batch, queries, heads, dim), dtype) for _ in range(2))
    k, v = (normal(c, (batch, keys, kv_heads, dim), dtype) for _ in range(2))
    causal, five = c.chance(0.5), dim != 256 and c.chance(0.5)
    c.options |= {"causal": True} if causal else {}
    dropout, seed = c.pick(0, 0, 0.25), np.asarray([c.rng.randint(-9, 9)], np.int32)
    five &= dim == 64 or not dropout
    if five:
        c.options["config"] = c.configs.AttentionBackwardConfig(5, c.rng.randint(0, 3))
    k2, v2 = _shares(k, share), _shares(v, share)
    s = np.einsum("bqhd,bkhd->bhqk", wide(q), k2) * dim**-0.5
    s = np.where(np.tri(queries, keys, dtype=bool), s, -np.inf) if causal else s
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    p = p / total
    keep = kept(batch, heads, queries, keys, dropout, seed)
    o, d = np.einsum("bhqk,bkhd->bqhd", p * keep, v2).astype(dtype), wide(grad)
    dp = np.einsum("bqhd,bkhd->bhqk", d, v2) * keep
    ds = p * (dp - (d * wide(o)).sum(-1).transpose(0, 2, 1)[..., None]) * dim**-0.5
    dq = np.einsum("bhqk,bkhd->bqhd", ds, k2)
    dk, dv = np.einsum("bhqk,bqhd->bkhd", ds, wide(q)), np.einsum("bhqk,bqhd->bkhd", p * keep, d)
    dk, dv = (x.reshape(batch, keys, kv_heads, share, dim).sum(3) for x in (dk, dv))
    unit = 3e-3 if dtype == F16 else 2e-2
    c.close = [(unit, 2 * unit * max(np.abs(x).max(), 0.3)) for x in (dq, dk, dv)]
    lse = (top + np.log(total))[..., 0].astype(F32)
    arrays = [grad, q, k, v, o, lse]
    if dropout:
        c.options["dropout"], c.names = dropout, ("seed",)
        arrays.append(seed)
    return arrays, tuple(x.astype(dtype) for x in (dq, dk, dv))


MAKERS = {
    "gated_linear_unit": gated_linear_unit,
    "activation_backward": activation_backward,
    "gated_linear_unit_backward": gated_linear_unit_backward,
    "gated_matmul_backward": gated_matmul_backward,
    "gated_matmul": gated_matmul,
    "softmax_backward": softmax_backward,
    "rms_norm_backward": norm_backward(False),
    "layer_norm_backward": norm_backward(True),
    "column_sums": column_sums,
    "cross_entropy": cross_entropy,
    "cross_entropy_backward": cross_entropy_backward,
    "rotary": rotary,
    "rotary_backward": rotary_backward,
    "add_rms_norm": add_norm(False),
    "add_layer_norm": add_norm(True),
    "adamw": adamw,
    "quantize": quantize,
    "quantize_by_scale": quantize_by_scale,
    "dequantize": dequantize,
    "attention_decode": attention_decode,
    "merge_attention": merge_attention,
    "append_pages": append_pages,
    "attention_backward": attention_backward,
}
