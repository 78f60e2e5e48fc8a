"""ops with batch_invariant=True: a row has the same bits, whatever rows are computed with it,
wherever they begin in memory. A row alone against the same row of batches of other sizes; on a GPU
of up to 4096 rows, on the CPU of fewer. And deterministic=True: a call repeats bit for bit."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from by_steps import by_steps

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.ops._matmul_choice import Plan, choose_invariant

pytestmark = pytest.mark.covering(1, share=True)

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NORMS = {"softmax": 0, "rms_norm": 1, "layer_norm": 2}  # and their vectors


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def call(run, f, *args, **options):
    """The result, with batch_invariant=True unless options say else."""
    options = {"batch_invariant": True, "interpret": None if run.way == "cuda" else True, **options}
    if run.way == "interpret":
        return f(*args, **options)
    if run.way == "host":
        kernel = f.kernel(*args, **options)
        args = (*args, *(x for x in options.values() if isinstance(x, np.ndarray)))
        return by_steps(run.call, kernel, args)
    there = {k: plgpu.device_put(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    result = f(*map(plgpu.device_put, args), **there)
    return plgpu.tree.map(lambda x: x.numpy(), result)


def batches(run, most=40):
    """(rows of the whole, [(first row, rows) of each part of it])"""
    if run.way == "cuda":
        return 4096, [(4095, 1), (3, 7), (1001, 128)]
    if most < 12:
        return most, [(most - 1, 1), (0, 2)]
    return most, [(0, 1), (most - 1, 1), (5, 7), (3, most - 7)]


def same(whole, part, first, axis=0):
    want = (
        whole[first : first + part.shape[0]] if axis == 0 else whole[:, first:][:, : part.shape[1]]
    )
    assert part.tobytes() == np.ascontiguousarray(want).tobytes()


LENGTHS = [1, 7, 33, 256, 1001, 1024, 4104, 5001, 20000, 20001]


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", NORMS)
def test_rows_of_norms(run, rng, name, n):
    """Short rows share warps; long ones a block, longer ones a cluster; pitches of all kinds."""
    if run.way == "host" and n >= 20000 and (name, n) != ("layer_norm", 20001):
        pytest.skip("as the others, and slow there")
    slow = run.way == "host" and n > 2000 or run.way == "cuda"
    rows, parts = batches(run, 3 if slow else 40 if n < 2000 else 12)
    for dtype in [(BF16, F32)[n % 2]] if slow else [BF16, F32]:
        x = (rng.standard_normal((rows, n)) * 3 + 0.5).astype(dtype)
        vectors = rng.standard_normal((NORMS[name], n)).astype(dtype)
        f = getattr(ops, name)
        whole = call(run, f, x, *vectors)
        for first, count in parts:
            same(whole, call(run, f, x[first : first + count].copy(), *vectors), first)
        plain = call(run, f, x, *vectors, batch_invariant=False)
        atol = 1e-6 if dtype == F32 else 1e-2
        np.testing.assert_allclose(whole.astype(F32), plain.astype(F32), rtol=1e-2, atol=atol)


@pytest.mark.parametrize("n", [1, 63, 130])
def test_columns_of_softmax(run, rng, n):
    """Along another axis than the last one: the row alone is then a column, and its array would
    have rows of one element."""
    rows, parts = batches(run, 70)
    x = rng.standard_normal((n, rows)).astype(F32)
    whole = call(run, ops.softmax, x, axis=0)
    np.testing.assert_allclose(whole.sum(0), 1, rtol=1e-5)
    for first, count in parts:
        part = np.ascontiguousarray(x[:, first : first + count])
        same(whole, call(run, ops.softmax, part, axis=0), first, axis=1)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [256, 1001, 8192, 20000])
def test_rows_that_begin_anywhere(rng, n):
    """Views of a device array, whose first element TMA and vectors do not take: the same bits."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal(9 * n + 1).astype(F32)).cuda()
    a, b = x[: 8 * n].view(8, n), x[1:][: 8 * n].view(8, n)
    for f in (ops.softmax, ops.rms_norm, ops.layer_norm):
        want = f(b.clone(), batch_invariant=True)
        assert torch.equal(f(b, batch_invariant=True), want)
        assert torch.equal(f(a[3:5], batch_invariant=True), f(a, batch_invariant=True)[3:5])


PRODUCTS = [  # N, K, options
    (64, 200, dict()),
    (300, 130, dict(transpose_b=True, activation="gelu")),
    (40, 520, dict(transpose_a=True, out_dtype=F32)),
]


@pytest.mark.parametrize("n, k, options", PRODUCTS, ids=str)
def test_rows_of_products(run, rng, n, k, options):
    """One row goes to the tensor cores, too; K is neither divided nor gone through backwards."""
    if run.way == "cuda":
        n, k = 8 * n, 8 * k
    rows, parts = batches(run, 200 if run.way == "interpret" else 40)
    x = rng.standard_normal((rows, k)).astype(F16)
    b = rng.standard_normal((n, k) if options.get("transpose_b") else (k, n)).astype(F16)
    bias = rng.standard_normal(n).astype(F16)

    def product(x):
        a = np.ascontiguousarray(x.T) if options.get("transpose_a") else x
        return call(run, ops.matmul, a, b, bias=bias, **options)

    whole = product(x)
    for first, count in parts[:: 2 if run.way == "host" else 1]:
        same(whole, product(x[first : first + count].copy()), first)


@pytest.mark.parametrize("scaled", ["tensor", "rows", "blocks"])
def test_rows_of_fp8_products(run, rng, scaled):
    n, k = (4096, 2048) if run.way == "cuda" else (144, 400)
    rows, parts = batches(run, 80)
    x, b = rng.standard_normal((rows, k)).astype(E4M3), rng.standard_normal((n, k)).astype(E4M3)
    of_k = -(-k // 128)
    shape = {"tensor": (), "rows": (rows,), "blocks": (rows, of_k)}[scaled]
    scale_a = rng.uniform(0.5, 2, shape).astype(F32)
    shape = {"tensor": (), "rows": (n,), "blocks": (-(-n // 128), of_k)}[scaled]
    scale_b = rng.uniform(0.5, 2, shape).astype(F32)

    def product(x, scale_a):
        return call(run, ops.matmul, x, b, transpose_b=True, scale_a=scale_a, scale_b=scale_b)

    whole = product(x, scale_a)
    for first, count in parts:
        at = slice(first, first + count)
        same(
            whole,
            product(x[at].copy(), scale_a if scaled == "tensor" else scale_a[at].copy()),
            first,
        )


def test_the_order_of_a_product_is_that_of_k(rng):
    """What batch invariance rests on: whatever the shape, K is whole and goes forwards, in the
    steps of the tensor cores; default products do otherwise, so the option does something."""
    seen = set()
    for m in (1, 2, 7, 64, 128, 300, 4096, 20000):
        for n, k in ((64, 64), (512, 8192), (4096, 4096), (200, 33)):
            for in_bytes, blocks in ((2, False), (1, False), (1, True)):
                cfg = choose_invariant(m, n, k, 132, in_bytes, blocks)
                assert cfg.split == cfg.slices == cfg.shares == 1 and not cfg.serpentine
                assert cfg.step * in_bytes in (128, 256)  # both in the steps of an instruction
                assert Plan(m, n, k, 2, cfg, 132, in_bytes).stages > 1
                seen.add(cfg[:2])
    assert len(seen) > 3

    def text(**options):
        x = plgpu.ShapeDtypeStruct((8192, 4096), F16)
        y = plgpu.ShapeDtypeStruct((4096, 8192), F16)
        return ops.matmul.kernel(x, y, **options).lower(x, y).as_text("cuda")

    assert text(batch_invariant=True) != text(deterministic=True) == text()
    config = ops.MatmulConfig()
    assert text(batch_invariant=True, config=config) == text(
        config=config._replace(serpentine=False)
    )


@pytest.mark.parametrize("dim, causal", [(64, False), (64, True), (128, False), (256, True)])
def test_rows_of_attention(run, rng, dim, causal):
    """Sequences of a batch, heads, and queries of a sequence: more of them make other tiles."""
    batch, queries, keys, heads = (32, 1000, 700, 4) if run.way == "cuda" else (3, 150, 140, 2)
    q, k, v = (
        rng.standard_normal((batch, n, heads, dim)).astype(F16) * 2 for n in (queries, keys, keys)
    )

    def attend(q, k, v):
        return call(run, ops.attention, q, k, v, causal=causal, return_lse=True)

    o, lse = attend(q, k, v)
    at = slice(batch - 1, batch), slice(None), slice(1, 2)
    part, part_lse = attend(*(np.ascontiguousarray(x[at]) for x in (q, k, v)))
    assert part.tobytes() == o[at].tobytes()
    assert part_lse.tobytes() == lse[-1:, 1:2].tobytes()
    counts = (1, 7, 64, 128, 300) if run.way == "cuda" else (1, 70)
    for count in counts[: 1 if run.way == "host" else None]:  # causal: the first ones, as now
        part, part_lse = attend(np.ascontiguousarray(q[:, :count]), k, v)
        assert part.tobytes() == np.ascontiguousarray(o[:, :count]).tobytes()
        assert part_lse.tobytes() == np.ascontiguousarray(lse[:, :, :count]).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_calls_repeat(rng, invariant):
    """Bit for bit, though blocks get their tiles in another order each time."""
    options = dict(deterministic=True, batch_invariant=invariant)
    x = plgpu.device_put(rng.standard_normal((3000, 4096)).astype(F16))
    w = plgpu.device_put(rng.standard_normal((4096, 1000)).astype(F16))
    q = plgpu.device_put(rng.standard_normal((4, 2000, 8, 64)).astype(F16))
    calls = [
        lambda: ops.matmul(x, w, **options),
        lambda: ops.softmax(x, **options),
        lambda: ops.layer_norm(x, **options),
        lambda: ops.attention(q, q, q, causal=True, **options),
    ]
    for f in calls:
        first = f().numpy().tobytes()
        assert all(f().numpy().tobytes() == first for _ in range(20))


def test_options_are_bools():
    x = np.zeros((2, 8), F16)
    q = np.zeros((1, 8, 1, 64), F16)
    calls = [(ops.softmax, (x,)), (ops.rms_norm, (x,)), (ops.layer_norm, (x,))]
    calls += [(ops.matmul, (x, x.T.copy())), (ops.attention, (q, q, q))]
    for f, args in calls:
        for what in ("batch_invariant", "deterministic"):
            with pytest.raises(
                TypeError, match=f"{f.__name__}: {what} must be True or False, got 2"
            ):
                f(*args, **{what: 2})
