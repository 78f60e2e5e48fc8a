"""Random calls of the collectives of ops: devices, shapes, dtypes, axes and options, with the race
detector, beside NumPy. All sums are of small integers, so every order of them gives the same bits;
results of norms are compared with a tolerance."""

import numpy as np
import pytest
from distributed.meshes import gpus, on_gpus, params
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu.ops import distributed, distributed_matmul, distributed_norms, distributed_ragged

F16, F32 = np.float16, np.float32
EXTENTS = [1, 2, 3, 5, 8, 16, 33, 64, 65, 130]


class Call:
    """What a seed makes: the arrays of all devices by operand, and what each device gets."""

    def __init__(self, seed, name):
        self.rng = np.random.default_rng([seed, len(name)])
        self.n, self.options = int(self.rng.integers(2, 5)), {}
        self.close = 0
        self.arrays, self.want = MAKERS[name](self)

    def pick(self, *xs):
        return xs[self.rng.integers(len(xs))]

    def extent(self, most=999):
        return min(self.pick(*EXTENTS), most)

    def shape(self):
        return tuple(self.extent(40) for _ in range(self.rng.integers(0, 3))) + (self.extent(),)

    def small(self, shape, dtype):
        return [self.rng.integers(-3, 4, shape).astype(dtype) for _ in range(self.n)]


def total(x):
    return sum(a.astype(F32) for a in x).astype(x[0].dtype)


def all_gather(c):
    x = c.small(c.shape(), c.pick(F32, F16, bfloat16, np.int32, np.int8))
    axis = c.options["axis"] = int(c.rng.integers(-x[0].ndim, x[0].ndim))
    return [x], [[np.concatenate(x, axis)] * c.n]


def reduce_scatter(c):
    shape = list(c.shape())
    axis = c.options["axis"] = int(c.rng.integers(-len(shape), len(shape)))
    shape[axis] *= c.n
    x = c.small(shape, c.pick(F32, F16, bfloat16, np.int32))
    return [x], [np.split(total(x), c.n, axis)]


def all_reduce(c):
    x = c.small(c.shape(), c.pick(F32, F16, bfloat16, np.int32))
    c.options["one_shot"] = c.pick(None, False, True)
    return [x], [[total(x)] * c.n]


def all_to_all(c):
    shape = c.shape()
    x = c.small((shape[0] * c.n, *shape[1:]), c.pick(F32, F16, np.int8))
    parts = [np.split(a, c.n) for a in x]
    return [x], [[np.concatenate([p[d] for p in parts]) for d in range(c.n)]]


def all_reduce_rms_norm(c):
    shape, dtype = c.shape(), c.pick(F32, F16, bfloat16)
    x, r, g = c.small(shape, dtype), c.small(shape, dtype)[0], c.small(shape[-1:], dtype)[0]
    c.options |= {"one_shot": c.pick(None, False, True), "eps": c.pick(1e-6, 1e-3)}
    y = (total(x).astype(F32) + r.astype(F32)).astype(dtype)
    f = y.astype(F32)
    scale = 1 / np.sqrt((f * f).mean(-1, keepdims=True) + c.options["eps"])
    c.close = {F32: 1e-5, F16: 4e-3, bfloat16: 3e-2}[dtype]
    normed = (f * scale * g.astype(F32)).astype(dtype)
    return [x, [r] * c.n, [g] * c.n], [[normed] * c.n, [y] * c.n]


def ragged_all_to_all(c):
    rows, width = c.extent(40), c.extent()
    x = c.small((rows, width), c.pick(F32, F16, np.int8))
    cuts = [np.sort(c.rng.integers(0, rows + 1, c.n)) for _ in range(c.n)]
    sizes = [np.diff(k, prepend=0).astype(np.int32) for k in cuts]
    capacity = c.options["capacity"] = c.n * rows
    out = []
    for d in range(c.n):
        parts = [a[s[:d].sum() : s[: d + 1].sum()] for a, s in zip(x, sizes)]
        found = np.concatenate(parts)
        rest = np.zeros((capacity - len(found), width), found.dtype)
        out.append(np.concatenate([found, rest]))
    return [x, sizes], [out, [np.array([s[d] for s in sizes], np.int32) for d in range(c.n)]]


def _product(c, rows):
    k, n, dtype = c.extent(), c.extent(), c.pick(F16, bfloat16)
    out = c.options["out_dtype"] = c.pick(F32, dtype)
    a, b = c.small((rows, k), dtype), c.small((k, n), dtype)
    return [a, b], [x.astype(F32) @ y.astype(F32) for x, y in zip(a, b)], out


def all_gather_matmul(c):
    (a, b), _, out = _product(c, c.extent())
    whole = np.concatenate(a).astype(F32)
    return [a, b], [[(whole @ y.astype(F32)).astype(out) for y in b]]


def matmul_reduce_scatter(c):
    arrays, parts, out = _product(c, c.extent(64) * c.n)
    return arrays, [np.split(sum(parts).astype(out), c.n)]


def matmul_all_reduce(c):
    arrays, parts, out = _product(c, c.extent())
    return arrays, [[sum(parts).astype(out)] * c.n]


MAKERS = {
    f.__name__: f
    for f in (
        all_gather, reduce_scatter, all_reduce, all_to_all, all_reduce_rms_norm, ragged_all_to_all,
        all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce,
    )
}  # fmt: skip
MODULES = distributed, distributed_matmul, distributed_norms, distributed_ragged


def check(way, seed, name):
    call = Call(seed, name)
    f = next(getattr(m, name) for m in MODULES if hasattr(m, name))
    mesh = plgpu.DeviceMesh(call.n, "x", devices=gpus(call.n) if way == "cuda" else None)
    options = {"blocks": call.pick(1, 2, 3), **call.options}
    arrays = call.arrays
    if way == "cuda":
        arrays = [
            [plgpu.device_put(a, d) for a, d in zip(x, mesh.devices, strict=True)] for x in arrays
        ]
    else:
        options["interpret"] = params(seed)
    got = f(*arrays, mesh, **options)
    got = got if isinstance(got, tuple) else (got,)
    for mine, want in zip(got, call.want, strict=True):
        for x, y in zip(mine, want, strict=True):
            x = np.asarray(x)
            assert x.dtype == y.dtype and x.shape == y.shape
            x, y = x.astype(F32), y.astype(F32)
            np.testing.assert_allclose(x, y, rtol=call.close, atol=call.close, err_msg=f"{seed}")


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (6, 12))])
def test_random_calls(name, first):
    for seed in range(first, first + 6):
        check("interpret", seed, name)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("way", [pytest.param("cuda", marks=on_gpus)])
def test_random_calls_on_gpus(way, name):
    for seed in range(100, 110):
        check(way, seed, name)
