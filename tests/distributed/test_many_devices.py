"""All of ops.distributed on four and on eight devices: with the race detector on the interpreter,
and on GPUs. With several GPUs, also on all of them, with arrays that take every path."""

import numpy as np
import pytest
from distributed.meshes import GPUS, gpus, on_gpus, params, shards
from ml_dtypes import bfloat16

import pallas_mgpu as plgpu
from pallas_mgpu.ops import (
    distributed,
    distributed_matmul,
    distributed_norms,
    distributed_ragged,
)
from pallas_mgpu.ops.matmul import MatmulConfig

# blocks that pad rows may write the same twice, with a warning
pytestmark = pytest.mark.filterwarnings("ignore:.*write and write are not ordered")


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=on_gpus)])
def way(request):
    return request.param


class On:
    """A mesh of n devices, and calls on it with arrays of the host."""

    def __init__(self, way, n, devices=None):
        self.way, self.n, self.seed = way, n, 0
        self.mesh = plgpu.DeviceMesh(
            n, "x", devices=(devices or gpus(n)) if way == "cuda" else None
        )

    def put(self, x):
        if self.way != "cuda":
            return x
        return [plgpu.device_put(a, d) for a, d in zip(x, self.mesh.devices, strict=True)]

    def __call__(self, f, *columns, calls=2, **options):
        """The results of the last call, as NumPy arrays: a list, or several."""
        columns = [self.put(c) for c in columns]
        for _ in range(calls):
            if self.way != "cuda":
                self.seed, options["interpret"] = self.seed + 1, params(self.seed)
            found = f(*columns, self.mesh, **options)
        if isinstance(found, tuple):
            return [[np.asarray(a) for a in y] for y in found]
        return [np.asarray(a) for a in found]


def whole(rng, n, shape, dtype):
    """Small integers: their sums are exact."""
    return [rng.integers(-4, 5, shape).astype(np.float32).astype(dtype) for _ in range(n)]


def parts(x):
    return [np.concatenate([np.split(a, len(x))[d] for a in x]) for d in range(len(x))]


def equal(got, wants):
    for a, b in zip(got, wants, strict=True):
        np.testing.assert_array_equal(a, b)


def check_collectives(on, x, **options):
    """x: of each device, with equal parts."""
    n, total = on.n, sum(a.astype(np.float32) for a in x).astype(x[0].dtype)
    equal(on(distributed.all_gather, x, **options), [np.concatenate(x)] * n)
    equal(on(distributed.reduce_scatter, x, **options), np.split(total, n))
    equal(on(distributed.all_to_all, x, **options), parts(x))
    for one_shot in (True, False):
        equal(on(distributed.all_reduce, x, one_shot=one_shot, **options), [total] * n)


def check_columns(on, x, **options):
    n, total = on.n, sum(a.astype(np.float32) for a in x).astype(x[0].dtype)
    equal(on(distributed.all_gather, x, axis=1, **options), [np.concatenate(x, 1)] * n)
    equal(on(distributed.reduce_scatter, x, axis=1, **options), np.split(total, n, 1))


def check_ragged(on, rng, rows, columns, **options):
    """Devices send different numbers of rows, of which some are none, and get them back."""
    n = on.n
    cuts = np.sort(rng.integers(0, rows + 1, (n, n)), 1)
    sizes = list(np.diff(cuts, prepend=0).astype(np.int32))
    x, scales = shards(rng, n, (rows, columns)), shards(rng, n, (rows, 3))
    options["capacity"] = n * rows
    f, scaled = distributed_ragged.ragged_all_to_all, on.put(scales)
    out, received, moved = on(f, x, sizes, scales=scaled, calls=2, **options)
    starts = [np.concatenate([[0], np.cumsum(s)]) for s in sizes]
    for d in range(n):
        for source, got in ((x, out), (scales, moved)):
            want = np.concatenate([source[s][starts[s][d] : starts[s][d + 1]] for s in range(n)])
            np.testing.assert_array_equal(got[d][: len(want)], want)
            assert not got[d][len(want) :].any()
        np.testing.assert_array_equal(received[d], [s[d] for s in sizes])
    back, _ = on(f, out, received, **{**options, "capacity": rows})
    for d in range(n):
        sent = sizes[d].sum()
        np.testing.assert_array_equal(back[d][:sent], x[d][:sent])


def check_normed(on, rng, shape, **options):
    n = on.n
    x, [r], [g] = whole(rng, n, shape, bfloat16), *(whole(rng, 1, s, bfloat16) for s in
                                                    (shape, shape[-1:]))  # fmt: skip
    total = sum(a.astype(np.float32) for a in [*x, r]).astype(bfloat16)
    f = total.astype(np.float32)
    want = f / np.sqrt((f * f).mean(-1, keepdims=True) + 1e-6) * g.astype(np.float32)
    for one_shot in (True, False):
        normed, totals = on(
            distributed_norms.all_reduce_rms_norm, x, [r] * n, [g] * n, one_shot=one_shot, **options
        )
        equal(totals, [total] * n)
        for a in normed:
            assert a.tobytes() == normed[0].tobytes()
            np.testing.assert_allclose(a.astype(np.float32), want, rtol=1e-2, atol=1e-2)


def check_products(on, rng, m, k, cols, **options):
    """In float32, of small integers: exact."""
    n, options["out_dtype"] = on.n, np.float32
    a, b = whole(rng, n, (m, k), np.float16), whole(rng, n, (k, cols), np.float16)
    x, y = ([z.astype(np.float32) for z in arrays] for arrays in (a, b))
    total = sum(p @ q for p, q in zip(x, y, strict=True))
    got = on(distributed_matmul.matmul_all_reduce, a, b, **options)
    equal(got, [total] * n)
    got = on(distributed_matmul.all_gather_matmul, a, b, **options)
    equal(got, [np.concatenate(x) @ z for z in y])
    if m % n == 0:
        got = on(distributed_matmul.matmul_reduce_scatter, a, b, **options)
        equal(got, np.split(total, n))


@pytest.mark.parametrize("n", [4, 8])
def test_collectives(way, rng, n):
    on = On(way, n)
    check_collectives(on, whole(rng, n, (2 * n, 33), bfloat16), blocks=2)
    check_columns(on, whole(rng, n, (3, 5 * n), np.float32), blocks=1)


@pytest.mark.parametrize("n", [4, 8])
def test_more_items_than_slots(way, rng, n):
    """Slots of staging memory are used again; floats are summed in the order of the ranks."""
    on, options = On(way, n), {"blocks": 1}
    x = shards(rng, n, (n * 20_011,))
    total = x[0]
    for a in x[1:]:
        total = total + a
    equal(on(distributed.reduce_scatter, x, **options), np.split(total, n))
    equal(on(distributed.all_reduce, x, one_shot=False, **options), [total] * n)
    equal(on(distributed.all_to_all, x, **options), parts(x))


@pytest.mark.parametrize("n", [4, 8])
def test_fused(way, rng, n):
    on = On(way, n)
    check_ragged(on, rng, 9, 40, blocks=1)
    check_normed(on, rng, (5, 72), blocks=1)


CONFIGS = [MatmulConfig(1, 32, group=1, stages=2), MatmulConfig(2, 64, split=2, stages=2)]


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("config", CONFIGS, ids=["one consumer", "split"])
def test_products(way, rng, n, config):
    """Several tiles for each device; shapes that nothing divides."""
    check_products(On(way, n), rng, 8 * n, 72, 46, blocks=4, config=config)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [n for n in (2, 4, 8) if n <= GPUS] or [2])
class TestAllGpus:
    """A GPU for each device, with as many SMs as calls take by default."""

    @pytest.mark.parametrize("mib", [1, 16])
    def test_large(self, rng, n, mib):
        """Of a device: by staging memory, and by copies to where they belong."""
        x = whole(rng, n, (n * 8, mib * (1 << 16) // n), np.float16)
        check_collectives(On("cuda", n), x, calls=1)

    def test_odd(self, rng, n):
        on = On("cuda", n)
        check_collectives(on, whole(rng, n, (n * 3, 70_001), np.float32))
        check_columns(on, whole(rng, n, (37, n * 1001), bfloat16))
        check_ragged(on, rng, 301, 1030)
        check_normed(on, rng, (67, 5000))

    @pytest.mark.parametrize("shape", [(1024, 1024, 1536), (1032, 520, 1031)], ids=str)
    def test_products(self, rng, n, shape):
        check_products(On("cuda", n), rng, *shape)

    def test_calls_in_a_row(self, rng, n):
        """That nobody waits for on the host, with arrays that each call reads from the last."""
        on = On("cuda", n)
        x = on.put(whole(rng, n, (4096,), np.float32))
        want = sum(np.asarray(a) for a in x)
        for k in range(300):
            y = distributed.all_reduce(x, on.mesh, one_shot=k % 2 == 0)
            z = distributed.all_gather([a for a in y], on.mesh)
        equal([np.asarray(a) for a in y], [want] * n)
        equal([np.asarray(a) for a in z], [np.tile(want, n)] * n)
