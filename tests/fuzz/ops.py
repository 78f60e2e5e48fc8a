"""Random calls of `pallas_mgpu.ops`: shapes around the borders of tiles, dtypes, options,
configurations, arrays that begin anywhere; beside NumPy.

Most operands of products are small integers: sums of them are exact in every order, and the result
must have the bits of the rounded sum. NaN and infinities show what reads more than its part. Other
numbers are compared with float64 within the rounding of the result.

    python tests/fuzz/ops.py --count 200 --way interpret,host,nvrtc

runs the calls of many seeds; a seed makes one call, or with `--inference` several, which differ in
sizes alone. `--training` and `--inference` draw from the functions of fuzz/ops_training.py and
fuzz/ops_inference.py; the way `races` is the interpreter with the race detector."""

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import sys
import time
import warnings

import ml_dtypes
import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from fuzz import ops_inference, ops_training

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops._common import SeveralKernels

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
I8, I4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
F8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
UNIT = {F16: 2**-10, BF16: 2**-7, F32: 2**-20}  # of the last place, and of sums of float32
EXTENTS = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 48, 61, 63, 64, 65, 72, 96, 100, 127, 128)
EXTENTS += (129, 131, 160, 191, 192, 193, 200, 255, 256, 257, 264, 300, 320, 385)
WORK = 6e6  # multiplications of a call


class Call:
    """What a seed makes: a function (of `makers`), its arrays and options, and what must come out.

    close: (relative, absolute) error that is right, of each result if it is a list; None: none.
    rms: the root mean square of the error of the first result, as a part of its own, instead. seen:
    None, or what is compared of a result. step: calls of one seed differ in `length` alone."""

    configs = ops

    def __init__(self, seed, makers=None, step=0):
        self.makers = makers = makers or MAKERS
        self.rng, self.numbers = random.Random(seed), np.random.default_rng((seed, step))
        self.sizes = random.Random(seed * 1000 + step)
        self.seed, self.step, self.cores = seed, step, self.pick(1, 2, 3, 6, 132)
        self.options, self.close = {}, None
        self.names = ()  # of the last arrays, as arguments
        self.rms = self.seen = None
        self.name = self.pick(*makers)
        while True:
            try:
                self.arrays, self.want = makers[self.name](self)
                break
            except Again:
                self.options, self.names, self.close = {}, (), None
                self.rms = self.seen = None
        self.arrays = [self.anywhere(x) for x in self.arrays]

    def __repr__(self):
        arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in self.arrays)
        options = "".join(f", {k}={v!r}" for k, v in self.options.items())
        name = f"seed {self.seed}, step {self.step}: {self.name}"
        return f"{name}({arrays}{options}) on {self.cores} cores"

    def chance(self, p):
        return self.rng.random() < p

    def pick(self, *xs):
        return self.rng.choice(xs)

    @staticmethod
    def need(ok):
        need(ok)

    def extent(self, most=10**9):
        n = self.pick(*EXTENTS) if self.chance(0.8) else self.rng.randint(1, 400)
        return min(n, most)

    def length(self, most):
        """An extent that changes from step to step."""
        near = self.sizes.random() < 0.6
        n = self.sizes.choice(EXTENTS) if near else self.sizes.randint(1, int(max(1, most)))
        return max(1, min(n, int(most)))

    def anywhere(self, x):
        """The array, sometimes at an address that TMA cannot take."""
        if self.chance(0.85) or x.dtype == I4:
            return x
        memory = np.empty(x.size + 1, x.dtype)[1:]
        memory[:] = x.ravel()
        return memory.reshape(x.shape)

    def some(self, **options):
        """Options, each perhaps."""
        self.options |= {k: v for k, v in options.items() if v is not None and self.chance(0.6)}

    def out_dtype(self, dtype):
        given = self.pick(None, None, F16, BF16, F32)
        if given is not None:
            self.options["out_dtype"] = given
        return given or dtype

    def factor(self, shape, dtype, exact):
        if exact:
            return self.numbers.integers(-8, 9, shape).astype(np.float32).astype(dtype)
        return (self.numbers.standard_normal(shape) / 4).astype(dtype)

    def spoil(self, *arrays):
        """Something that is no number, somewhere."""
        if self.chance(0.3):
            x = self.pick(*arrays)
            x.flat[self.rng.randrange(x.size)] = self.pick(np.nan, np.inf, -np.inf)

    def rounded(self, want, dtype, exact, depth=0):
        """The result, and how close a product must come."""
        if not exact:
            self.close = 2 * UNIT[dtype], UNIT[dtype] * math.sqrt(depth + 1) / 4
        return want.astype(np.float32).astype(dtype)


class Again(Exception):
    """This choice of options is none."""


def need(ok):
    if not ok:
        raise Again


def multiplied(a, b):
    with np.errstate(invalid="ignore"):
        return a.astype(np.float64) @ b.astype(np.float64)


def _matmul(c):
    few = c.chance(0.3)
    m, n, k = c.pick(1, 2, 3, 8) if few else c.extent(), c.extent(), c.extent()
    k = c.pick(k, k * 3, 1030) if few else k
    need(m * n * k <= WORK)
    ta, tb, exact, dtype = c.chance(0.3), c.chance(0.3), c.chance(0.7), c.pick(F16, BF16)
    a = c.factor((k, m) if ta else (m, k), dtype, exact)
    b = c.factor((n, k) if tb else (k, n), dtype, exact)
    c.spoil(a, b)
    c.options |= {"transpose_a": True} if ta else {}
    c.options |= {"transpose_b": True} if tb else {}
    out = c.out_dtype(dtype)
    want = multiplied(a.T if ta else a, b.T if tb else b)
    arrays = [a, b]
    if c.chance(0.4):
        arrays.append(c.factor((n,), dtype, exact))
        c.names = ("bias",)
        want = want + arrays[2].astype(np.float64)
    if c.chance(0.3):
        c.options["activation"] = "relu"
        want = np.maximum(want, 0)
    need(np.abs(want[np.isfinite(want)]).max(initial=0) < 6e4)
    if few and c.chance(0.5) and (m == 1 or not ta):
        stages, split = c.rng.randint(1, 6), c.pick(1, 2, 4, 8)
        if tb:
            width, step = 4 * c.rng.randint(1, 64 // m // 4 or 1), 256
        else:
            width, step = c.pick(64, 128, 256), 16 * c.rng.randint(1, 8)
        c.options["config"] = ops.FewRowsConfig(width, split, stages, step)
    elif c.chance(0.5):
        split = c.pick(1, 1, 2, 3, 4)
        cluster, cluster_n = c.pick((1, 1), (2, 1), (1, 2), (2, 2)) if split < 3 else (1, 1)
        consumers, tile = c.pick(1, 2, 3), c.pick(16, 32, 64, 128, 192, 256)
        need(tile % (8 * split) == 0 and (consumers < 3 or tile <= 128))
        c.options["config"] = ops.MatmulConfig(
            consumers, tile, c.pick(0, 2, 3), cluster, c.pick(1, 2), c.rng.randint(1, 4),
            cluster_n, split, c.pick(64, 64, 128), c.pick(0, 1), slices=c.pick(1, 1, 2, 3),
            consumer_rows=c.pick(64, 128) if consumers < 3 and tile <= 192 and split == 1 else 64,
        )  # fmt: skip
    return arrays, c.rounded(want, out, exact, k)


def _matmul_of_8_bits(c):
    """All exact: the tensor cores' sums have about 14 bits."""
    m, n, k = c.extent(), c.extent(), c.pick(c.extent(), 130, 300)
    need(m * n * k <= WORK)
    ta, tb, blocks = c.chance(0.3), c.chance(0.6), c.chance(0.4)

    def factor(shape):
        return c.numbers.integers(-4, 5, shape).astype(np.float32).astype(c.pick(*F8))

    def scale(*shape):
        return c.numbers.choice([0.5, 1, 2], shape).astype(np.float32)

    a, b = factor((k, m) if ta else (m, k)), factor((n, k) if tb else (k, n))
    c.options |= {"transpose_a": True} if ta else {}
    c.options |= {"transpose_b": True} if tb else {}
    out, arrays, names = c.out_dtype(BF16), [a, b], []
    left, right = (a.T if ta else a).astype(np.float64), (b.T if tb else b).astype(np.float64)
    bias = c.numbers.integers(-9, 10, n).astype(c.pick(F16, BF16, F32)) if c.chance(0.3) else None
    if bias is not None:
        arrays.append(bias)
        names.append("bias")
    parts = -(-k // 128)
    if blocks:
        scales = {"scale_a": scale(m, parts), "scale_b": scale(-(-n // 128), parts)}
        left = left * np.repeat(scales["scale_a"], 128, 1)[:, :k]
        right = right * np.repeat(np.repeat(scales["scale_b"], 128, 0)[:n], 128, 1)[:, :k].T
    else:
        forms_a, forms_b = ((), (1,), (1, 1), (m,), (m, 1)), ((), (1,), (1, 1), (n,), (1, n))
        forms = {"scale_a": c.pick(None, *forms_a), "scale_b": c.pick(None, *forms_b)}
        scales = {name: scale(*form) for name, form in forms.items() if form is not None}
        left = left * scales.get("scale_a", np.ones(1)).reshape(-1, 1)
        right = right * scales.get("scale_b", np.ones(1)).reshape(1, -1)
    arrays += scales.values()
    c.names = (*names, *scales)
    want = multiplied(left, right) + (0 if bias is None else bias.astype(np.float64))
    need(np.abs(want).max() < 6e4)
    if c.chance(0.4):
        consumers, tile = (2, 256) if blocks else (c.pick(1, 2), c.pick(64, 128, 256))
        c.options["config"] = ops.MatmulConfig(
            consumers, tile, c.pick(0, 2, 3), c.pick(1, 2), step=128
        )
    return arrays, c.rounded(want, out, True)


def _mixed(c):
    step = c.pick(64, 128)
    groups = c.pick(0, 1, 2, 3, 4)
    k = step * max(groups, 1) * c.rng.randint(1, 3 if groups > 1 else 8)
    m, n = c.extent(), c.extent()
    need(m * n * k <= WORK)
    exact, dtype, bits = c.chance(0.7), c.pick(F16, BF16), c.pick(I8, I4)
    x = c.factor((m, k), dtype, exact)
    info = ml_dtypes.iinfo(bits)
    w = c.numbers.integers(info.min, info.max + 1, (n, k)).astype(bits)
    c.spoil(x)
    out = c.out_dtype(dtype)
    arrays, factors = [x, w], w.astype(np.float64)
    if groups:
        s = c.numbers.choice([0.5, 1, 2] if exact else [0.7, 1.3], (groups, n))
        arrays.append(s.astype(c.pick(F16, BF16, F32)))
        factors *= np.repeat(arrays[2].astype(np.float64), k // groups, 0).T
    if c.chance(0.5):
        split = c.pick(*(s for s in (1, 2, 4, 8) if groups < 2 or groups % s == 0))
        tile = c.pick(16, 32) if split > 1 else 16 * c.rng.randint(1, 8)
        consumers = c.rng.randint(1, 3)
        turns = c.pick(1, 2) if tile <= 32 and consumers < 3 else 1
        turns = 4 if tile == 16 and consumers == 1 and c.chance(0.3) else turns
        ahead = c.pick(0, 2, 3) if groups < 2 or turns == split == 1 and consumers < 3 else 0
        c.options["config"] = ops.MixedConfig(
            consumers, tile, split, c.pick(0, 2, 3), step, c.rng.randint(1, 3), turns, ahead,
            c.pick(1, 2) if split == 1 else 1, consumers > 1 and turns == 1 and c.chance(0.3),
        )  # fmt: skip
    want = c.rounded(multiplied(x, factors.T), out, exact)
    if not exact:
        c.close = UNIT[out], 2e-6 * math.sqrt(k) * np.abs(factors).max()
    return arrays, want


def _sizes(c, groups, m):
    """Of groups; their slices of the rows."""
    sizes = c.numbers.integers(0, 2 * m // groups + 2, groups)
    sizes[c.numbers.random(groups) < 0.2] = c.pick(0, 1, 64, -3, 2**31 - 1, -(2**31))
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), m)
    return sizes.astype(np.int32), [slice(a, b) for a, b in zip((0, *ends[:-1]), ends)]


def _ragged_config(c):
    if c.chance(0.5):
        c.options["config"] = ops.RaggedConfig(
            c.pick(1, 2), c.pick(64, 128, 192, 256), c.pick(0, 2, 3, 5), c.pick(1, 2), c.pick(1, 2),
            c.rng.randint(1, 4),
        )  # fmt: skip


def _ragged(c):
    m, n, k, groups = c.extent(), c.extent(), c.extent(), c.pick(1, 2, 3, 4, 7, 40)
    need(m * n * k <= WORK and groups * n * k <= WORK)
    exact, dtype, tb = c.chance(0.7), c.pick(F16, BF16), c.chance(0.4)
    lhs, rhs = (
        c.factor(shape, dtype, exact)
        for shape in ((m, k), (groups, n, k) if tb else (groups, k, n))
    )
    c.spoil(lhs, rhs)
    sizes, rows_of = _sizes(c, groups, m)
    c.options |= {"transpose_rhs": True} if tb else {}
    out = c.out_dtype(dtype)
    _ragged_config(c)
    want = np.zeros((m, n))
    for g, rows in enumerate(rows_of):
        want[rows] = multiplied(lhs[rows], rhs[g].T if tb else rhs[g])
    return [lhs, rhs, sizes], c.rounded(want, out, exact, k)


def _transposed_ragged(c):
    m, n, k, groups = c.extent(), c.extent(), c.extent(), c.pick(1, 2, 3, 5)
    need(m * n * k <= WORK)
    exact, dtype = c.chance(0.7), c.pick(F16, BF16)
    lhs, rhs = (c.factor((m, width), dtype, exact) for width in (k, n))
    c.spoil(lhs, rhs)
    sizes, rows_of = _sizes(c, groups, m)
    out = c.out_dtype(dtype)
    _ragged_config(c)
    want = np.stack([multiplied(lhs[rows].T, rhs[rows]) for rows in rows_of])
    return [lhs, rhs, sizes], c.rounded(want, out, exact, m)


def _rows(c, last):
    """An array whose rows are normalised, the axis and the dtype of the result."""
    rank = c.pick(1, 2, 2, 3)
    n = c.pick(c.extent(), c.extent(), 8 * c.extent(), c.rng.randint(400, 9000))
    shape = [c.extent(9) for _ in range(rank)]
    if c.chance(0.2):
        shape[0] = c.extent()
    axis = rank - 1 if last or c.chance(0.7) else c.rng.randrange(rank)
    shape[axis] = n if axis == rank - 1 else c.extent()
    need(math.prod(shape) <= 40000)
    x = c.numbers.standard_normal(shape) * c.pick(0.1, 1, 5) + c.pick(0, 0.5, -3)
    x = x.astype(c.pick(F16, BF16, F32))
    out = c.out_dtype(x.dtype)
    c.close = 2 * UNIT[out], 2e-6 + UNIT[out] / 100
    return x, axis, out


def _norm_config(c, x, axis, out):
    inner, n = math.prod(x.shape[axis + 1 :]), x.shape[axis]
    grain = 2048 // x.itemsize
    by_tma = inner == 1 and n * x.itemsize % 16 == 0
    if by_tma and out == x.dtype and n >= grain and c.chance(0.5):
        ring, consumers = grain * c.pick(1, 1, 2), c.pick(1, 2, 2, 3)
        need(n >= ring * consumers)
        programs = c.pick(0, 1, 2, 5)
        given = {"ring": ring, "consumers": consumers, "programs": programs}
        given |= {"unroll": c.pick(0, 0, 1, 2), "stream": c.chance(0.5)}
        c.options["config"] = ops.NormConfig(**given)
    elif c.chance(0.5):
        cluster = c.pick(1, 1, 2, 4, 8) if inner == 1 else 1
        part = c.pick(0, 0, 64, 100, 1024, 3000)
        need(n // cluster <= 16384 or part)
        height = 1 if cluster > 1 else c.pick(1, 2, 3, 16, 64)
        need(height * min(n, part or n) <= 8192)
        need(x.size // n * cluster <= 200 * height)  # blocks, which the host runs one by one
        staged = inner == 1 and c.chance(0.5)
        staged &= n * x.dtype.itemsize % 16 == 0 == n * out.itemsize % 16
        need(not staged or height * n // cluster * (x.itemsize + out.itemsize) < 200_000)
        c.options["config"] = ops.NormConfig(height, cluster, part, staged)


def _softmax(c):
    x, axis, out = _rows(c, False)
    for value in (-np.inf, np.nan, np.inf, -np.inf):
        if c.chance(0.15):
            x.flat[c.numbers.integers(0, x.size, c.pick(1, 3, x.size // 3 + 1))] = value
    if axis != x.ndim - 1 or c.chance(0.3):
        c.options["axis"] = c.pick(axis, axis - x.ndim)
    _norm_config(c, x, axis, out)
    y = x.astype(np.float64)
    with np.errstate(all="ignore"):
        e = np.exp(y - y.max(axis, keepdims=True))
        return [x], (e / e.sum(axis, keepdims=True)).astype(out)


def _norm(name, most, eps):
    def make(c):
        x, axis, out = _rows(c, True)
        c.spoil(x)
        _norm_config(c, x, axis, out)
        y = x.astype(np.float64)
        with np.errstate(all="ignore"):
            y = y - y.mean(-1, keepdims=True) if most > 1 else y
            given = c.pick(None, 0.5, 1e-3)
            c.options |= {} if given is None else {"eps": given}
            y = y / np.sqrt((y * y).mean(-1, keepdims=True) + (given or eps))
        # what cancels where the mean is subtracted was rounded as float32
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            lost = np.abs(wide).max(-1) / np.maximum(wide.std(-1), 1e-3)
            c.close = c.close[0], c.close[1] + 1e-6 * np.where(lost < np.inf, lost, 0).max()
        arrays = [x]
        for k in range(c.rng.randint(0, most)):
            v = c.numbers.standard_normal(x.shape[-1]).astype(c.pick(F16, BF16, F32))
            arrays.append(v)
            y = y + v.astype(np.float64) if k else y * v.astype(np.float64)
        return arrays, y.astype(out)

    return make


def _attention(c):
    batch, kv_heads, share = c.pick(1, 1, 2), c.pick(1, 1, 2, 3), c.pick(1, 1, 2, 3)
    queries, keys, dim = c.extent(), c.extent(), c.pick(64, 64, 128, 256)
    heads = kv_heads * share
    need(batch * heads * queries * keys * dim <= WORK)
    dtype = c.pick(F16, BF16)
    q = (c.numbers.standard_normal((batch, queries, heads, dim)) * c.pick(0.1, 1, 8)).astype(dtype)
    k, v = c.numbers.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
    causal, scale = c.chance(0.5), c.pick(None, 0.3)
    c.options |= {"causal": True} if causal else {}
    c.options |= {} if scale is None else {"scale": scale}
    if c.chance(0.5):
        block = 16 * c.rng.randint(1, 8)
        size = 64 * (dim + min(dim, 128)) * 2, block * dim * 4
        consumers, stages = c.pick(1, 2, 3) if dim == 64 else c.pick(1, 2), c.pick(1, 2, 3)
        need(consumers * size[0] + stages * size[1] < 215_000)
        c.options["config"] = ops.AttentionConfig(
            consumers, block, stages, c.chance(0.5), c.chance(0.5), c.chance(0.5),
            c.chance(0.3), c.pick(0, 0, 1, 2),
        )  # fmt: skip
    q2, k2, v2 = (x.astype(np.float64) for x in (q, *(np.repeat(x, share, 2) for x in (k, v))))
    s = np.einsum("bqhd,bkhd->bhqk", q2, k2) * (dim**-0.5 if scale is None else scale)
    if causal:
        s = np.where(np.tri(queries, keys, dtype=bool), s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    o = np.einsum("bhqk,bkhd->bqhd", p / total, v2)
    c.close = (4e-3, 4e-3) if dtype == F16 else (3e-2, 3e-2)
    if c.chance(0.4):
        c.options["return_lse"] = True
        return [q, k, v], (o.astype(dtype), (top + np.log(total))[..., 0].astype(F32))
    return [q, k, v], o.astype(dtype)


MAKERS = {
    "matmul": _matmul,
    "matmul of 8 bits": _matmul_of_8_bits,
    "mixed_matmul": _mixed,
    "ragged_dot": _ragged,
    "transposed_ragged_dot": _transposed_ragged,
    "softmax": _softmax,
    "rms_norm": _norm("rms_norm", 1, 1e-6),
    "layer_norm": _norm("layer_norm", 2, 1e-5),
    "attention": _attention,
}


# ---- running -------------------------------------------------------------------------------------


CHECKED = plgpu.InterpretParams(detect_races=True, on_race="raise")


class Wrong(Exception):
    """A result that is not what it must be."""


class Unfit(Exception):
    """A configuration that asks for too much SMEM, which the call says."""


@contextlib.contextmanager
def on_cores(n):
    real, plgpu.sm_count = plgpu.sm_count, lambda device=None: n
    try:
        yield
    finally:
        plgpu.sm_count = real


def compare(way, call, got):
    results = got if isinstance(got, tuple) else (got,)
    results = tuple(map(call.seen, results)) if call.seen else results
    wanted = call.want if isinstance(call.want, tuple) else (call.want,)
    for k, (g, w) in enumerate(zip(results, wanted, strict=True)):
        if (g.dtype, g.shape) != (w.dtype, w.shape):
            raise Wrong(f"{way}: {g.dtype}{g.shape} instead of {w.dtype}{w.shape}")
        a, b = g.astype(np.float64), w.astype(np.float64)
        if call.rms and k == 0:
            error, size = (np.sqrt((x * x).mean()) for x in (a - b, b))
            if not error <= call.rms * size + 1e-3:
                raise Wrong(f"{way}: the error is {error}, of {size} (root mean squares)")
            continue
        same = (a == b) | np.isnan(a) & np.isnan(b)
        if call.close:
            rtol, atol = call.close[k] if isinstance(call.close, list) else call.close
            with np.errstate(invalid="ignore"):
                same |= np.abs(a - b) <= rtol * np.abs(b) + atol
        if not same.all():
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            raise Wrong(
                f"{way}: result {k}: {(~same).sum()} of {same.size} elements differ, the first at"
                f" {at}: {g[at]!r} instead of {w[at]!r}"
            )


def step_by_step(target, arrays, run):
    """The result where every kernel of a call is run by `run(kernel, arrays)`."""
    pads = getattr(target, "pads", None) or [getattr(target, "pad", None)]
    arrays = list(arrays)
    for k, pad in enumerate(pads):
        if pad is not None:
            arrays[k] = run(pad, [arrays[k]])
    target = getattr(target, "product", target)
    if hasattr(target, "slicing"):  # parts of K, which a second kernel adds up
        first, second = target.operands(*arrays)
        return run(target.adding, [run(target.slicing, list(first)), *second])
    return run(target, arrays)


def on_host(kernel, arrays, seed):
    from pallas_mgpu.machine import run as host

    like = kernel(*arrays)  # of the interpreter: the structure of the results
    outs = [np.empty_like(x) for x in plgpu.tree.leaves(like)]
    host.run(kernel.lower(*arrays), list(arrays), outs, seed)
    return plgpu.tree.unflatten(plgpu.tree.structure(like), outs)


def compiled(kernel, arrays, spills):
    """The result, by the interpreter; appends the bytes that registers spill."""
    used = kernel.lower(*arrays).resources()
    if used["remarks"]:
        raise Wrong(f"nvrtc: {used['remarks']}\n{used['log']}")
    spills.append(used["spill_bytes"])
    return kernel(*arrays)


def check(call, ways=("interpret", "host"), interpret=True):
    """Runs a call in some ways. Raises Wrong, or what the call raises; returns the bytes that
    registers of its kernels spill."""
    spills, f = [], getattr(ops, call.name.split()[0])
    arrays, options = list(call.arrays), dict(call.options)
    positional = arrays[: len(arrays) - len(call.names)]
    options |= zip(call.names, arrays[len(positional) :])
    with on_cores(call.cores), warnings.catch_warnings():
        warnings.simplefilter("error")
        if "config" in options:  # odd ones may be slow
            for text in (
                ".* is converted from layout",
                ".* moves between lanes",
                ".* is done by loads and stores",
            ):
                warnings.filterwarnings("ignore", text)
        same = r"(?s)not portable to JAX.*_padding\.py.*both write the same bytes"
        warnings.filterwarnings("ignore", same)
        try:
            got = f(*positional, **options, interpret=interpret)
        except ValueError as e:
            if "config" in options and re.search(
                "of them|into SMEM|available shared memory|a ring has|do not fit", str(e)
            ):
                raise Unfit(str(e)) from None
            raise
        if "interpret" in ways:
            compare("interpret", call, got)
        if "races" in ways:
            compare("races", call, f(*positional, **options, interpret=CHECKED))
        target = f.kernel(*positional, **options, interpret=True)
        several = isinstance(target, SeveralKernels) and not hasattr(target, "slicing")
        if "host" in ways and (several or call.makers is not MAKERS):
            compare("host", call, f(*positional, **options, interpret="emulate"))
        elif "host" in ways:
            for seed in (call.seed, call.seed + 1):
                got = step_by_step(target, arrays, lambda k, a, s=seed: on_host(k, a, s))
                compare("host", call, got)
        single = hasattr(target, "lower") and not several
        if "nvrtc" in ways and (single or hasattr(target, "product")):
            step_by_step(target, arrays, lambda k, a: compiled(k, a, spills))
        if "cuda" in ways:
            on_gpu = [plgpu.device_put(x) for x in arrays]
            options |= zip(call.names, on_gpu[len(positional) :])
            got = f(*on_gpu[: len(positional)], **options)
            got = tuple(x.numpy() for x in got) if isinstance(got, tuple) else got.numpy()
            compare("cuda", call, got)
    return sum(spills)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--way", default="interpret,host")
    parser.add_argument("--only", help="one function")
    parser.add_argument("--training", action="store_true", help="of fuzz/ops_training.py")
    parser.add_argument("--inference", action="store_true", help="of fuzz/ops_inference.py")
    o = parser.parse_args()
    makers = ops_training.MAKERS if o.training else MAKERS
    makers = ops_inference.MAKERS if o.inference else makers
    ways, counts, failed, unfit, start = tuple(o.way.split(",")), {}, 0, 0, time.time()
    seeds = range(o.start, o.start + o.count)
    for seed, step in itertools.product(seeds, range(5 if o.inference else 1)):
        call = Call(seed, makers, step)
        if o.only and call.name != o.only:
            continue
        counts[call.name] = counts.get(call.name, 0) + 1
        begin = time.time()
        try:
            spills = check(call, ways)
            if spills:
                print(f"{call}: {spills} bytes of spills", flush=True)
        except Unfit:
            unfit += 1
        except Exception as e:
            failed += 1
            print(f"{call}\n    {type(e).__name__}: {str(e)[:600]}", flush=True)
        if time.time() - begin > 20:
            print(f"{call}: {time.time() - begin:.0f} s", flush=True)
    print(", ".join(f"{n} {k}" for k, n in counts.items()))
    calls, seconds = sum(counts.values()), time.time() - start
    print(f"{calls} calls, {failed} failed, {unfit} do not fit, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
