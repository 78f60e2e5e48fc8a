"""ops.softmax, rms_norm, layer_norm against float64: any shape, dtype and configuration; and that
they move data as they should: once, in words of 16 bytes, several blocks on an SM."""

import functools
import re
import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import NormConfig, _norms_ring, layer_norm, rms_norm, softmax
from pallas_mgpu.ops.norms import choose

pytestmark = pytest.mark.covering(1, share=True)

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
# of the last place of a result, and of the functions for 16 bits
TOLERANCE = {BF16: 2**-8 + 1e-5, F16: 2**-11 + 1e-5, F32: 2e-6}
FUNCTIONS = {"softmax": softmax, "rms_norm": rms_norm, "layer_norm": layer_norm}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def reference(name, x, weight=None, bias=None, axis=-1, eps=None):
    x, *vectors = (None if v is None else v.astype(np.float64) for v in (x, weight, bias))
    if name == "softmax":
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)
    y = x - x.mean(axis, keepdims=True) if name == "layer_norm" else x
    eps = {"rms_norm": 1e-6, "layer_norm": 1e-5}[name] if eps is None else eps
    y = y / np.sqrt((y * y).mean(axis, keepdims=True) + eps)
    y = y if vectors[0] is None else y * vectors[0]
    return y if vectors[1] is None else y + vectors[1]


def arrays(rng, name, shape, dtype=BF16, vector_dtype=None):
    count = {"softmax": 0, "rms_norm": 1, "layer_norm": 2}[name]
    x = (rng.standard_normal(shape) * 3 + 0.5).astype(dtype)
    return x, *rng.standard_normal((count, shape[-1])).astype(vector_dtype or dtype)


def check(run, name, given, **options):
    interpret = None if run.way == "cuda" else True
    named = dict(zip(("x", "weight", "bias"), given))
    named = {k: v for k, v in named.items() if v is not None}
    kernel = FUNCTIONS[name].kernel(**named, **options, interpret=interpret)
    got = run.call(kernel, *named.values())
    want_dtype = np.dtype(options.pop("out_dtype", given[0].dtype))
    options.pop("config", None)
    want = reference(name, *given, **options)
    assert got.dtype == want_dtype and got.shape == given[0].shape
    unit = TOLERANCE[want_dtype]
    floor = 1e-6 if want_dtype == F32 else 6e-8  # where terms cancel; subnormal numbers
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=unit, atol=floor + unit / 100)


SHAPES = [(1,), (3, 7), (130, 127), (9, 1000), (5, 3, 64), (13, 1024), (2, 5000), (2, 2, 8192)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(run, rng, name, shape):
    check(run, name, arrays(rng, name, shape))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [20000, 20001])
def test_rows_of_a_cluster(run, rng, name, n):
    """The last segment ends with the row; TMA and lanes."""
    check(run, name, arrays(rng, name, (1, n)))


def test_rows_that_no_boxes_divide(rng):
    """TMA copies them nevertheless, rather than the lanes, with a warning."""
    for name, n in (("layer_norm", 2056), ("softmax", 16408), ("rms_norm", 8248)):
        given, unit = arrays(rng, name, (2, n)), TOLERANCE[BF16]
        found = FUNCTIONS[name](*given, interpret=True).astype(np.float64)
        np.testing.assert_allclose(found, reference(name, *given), rtol=unit, atol=unit / 100)


@pytest.mark.parametrize("n", [131072, 131071])
def test_long_rows(rng, n):
    """Eight blocks a row."""
    for name, f in FUNCTIONS.items():
        given = arrays(rng, name, (1, n))
        got = f(*given, interpret=True).astype(np.float64)
        np.testing.assert_allclose(got, reference(name, *given), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "dtype, out_dtype, vectors", [(F32, F32, BF16), (F16, F32, F16), (F32, BF16, F32)], ids=str
)
def test_dtypes(run, rng, name, dtype, out_dtype, vectors):
    check(run, name, arrays(rng, name, (5, 520), dtype, vectors), out_dtype=out_dtype)


C = NormConfig
CONFIGS = [
    ((5, 3000), C(2, 1, 1024)),  # parts, the last one overhangs
    ((3, 7003), C(2, 1, 1024, False)),  # the same by the lanes, in a loop
    ((1, 3000), C(1, 4, 512)),  # parts of a cluster, which is longer than the row
    ((3, 130), C(1, 2, 0, False)),
    ((1, 24), C(1, 4, 0)),  # a segment without elements
    ((70, 24), C(64, 1, 0)),  # the last tile overhangs
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape, config", CONFIGS, ids=str)
def test_configurations(run, rng, name, shape, config):
    check(run, name, arrays(rng, name, shape), config=config)


def chunk_of(rows, n, itemsize):
    """The longest chunk with which two pairs of warpgroups have a ring for such rows."""
    grain = 2048 // itemsize
    chunks = range(8 * grain, grain, -grain)
    return next(c for c in chunks if not _norms_ring.Plan(rows, n, itemsize, c, 2, 132).why_not())


RINGS = [
    ((5, 8192), BF16, C(ring=2048, programs=2)),  # whole chunks; slots go round
    ((7, 7016), BF16, C(ring=2048, programs=3)),  # the last chunk is a part, and is a lane's part
    ((2, 3, 6144), F16, C(ring=1024, consumers=3, programs=1)),  # 2 chunks for each pair
    ((3, 3004), F32, C(ring=512, consumers=3)),  # a block each
    ((4, 16392), BF16, C(ring=4096, consumers=1, programs=3)),  # 8 elements after whole chunks
    ((2, 40008), BF16, C(ring=8192, programs=1)),
    ((1, 4104), F16, C(ring=1024)),  # one row
    ((18, 2048), BF16, C(ring=1024, programs=1)),  # more rows than are told at a time
    ((3, 26632), F16, C(ring=8192, programs=2)),  # registers keep weights, not all of float32
    ((3, 14344), BF16, C(ring=1024, programs=2, unroll=1)),  # moved on from chunk to chunk
    ((5, 11000), F16, C(ring=1024, programs=2, unroll=2)),  # of the first 4 of 5 chunks
    ((4, 25608), BF16, C(ring=2048, programs=2, stream=True)),  # the bias comes along
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape, dtype, config", RINGS, ids=str)
def test_rings(run, rng, name, shape, dtype, config):
    """Chunks that go through SMEM, of more rows than blocks and of fewer."""
    vectors = F32 if shape[-1] in (7016, 26632, 25608) else None
    check(run, name, arrays(rng, name, shape, dtype, vectors), config=config)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rings_repeat(run, rng, name):
    """A row has the same result wherever it lies, whichever block and slots it gets."""
    config = C(ring=2048, programs=2)
    x, *vectors = arrays(rng, name, (2, 10248))
    given = np.concatenate([x] * 3 + [x[:1]]), *vectors
    interpret = None if run.way == "cuda" else True
    kernel = FUNCTIONS[name].kernel(*given, config=config, interpret=interpret)
    first, second = run.call(kernel, *given), run.call(kernel, *given)
    assert first.tobytes() == second.tobytes()
    for k in range(7):
        assert first[k].tobytes() == first[k % 2].tobytes()


def test_vmap_of_a_ring(rng):
    """Elements share a launch, whose counter cannot be that of each: rows have fixed blocks."""
    x, w = arrays(rng, "rms_norm", (2, 7, 3080))
    kernel = rms_norm.kernel(x[0], w, config=C(ring=1024, programs=3), interpret=True)
    assert "next_tile(" in kernel.lower(x[0], w).as_text("cuda")
    got = plgpu.vmap(kernel, in_axes=(0, None))(x, w)
    for a, b in zip(got, x, strict=True):
        assert a.tobytes() == kernel(b, w).tobytes()


@pytest.mark.gpu
def test_launches_in_turn(rng):
    """Every launch does every row: its counter begins at 0 while the launch before it ends, which
    may be of another number of rows. Results are poisoned, so that a row left out shows."""
    torch = pytest.importorskip("torch")
    sms = plgpu.sm_count()
    calls = []
    for rows, n in ((5 * sms + 3, 2048), (sms - 1, 2048), (1, 4096), (9 * sms, 4096)):
        x = torch.from_numpy(rng.standard_normal((rows, n)).astype(np.float32)).cuda().bfloat16()
        f = softmax.kernel(x, config=C(ring=1024))
        outs = [torch.full_like(x, torch.nan) for _ in range(40)]
        calls.append((f, x, outs))
    torch.cuda.synchronize()
    for k in range(0, 40, 2):
        for f, x, outs in calls:
            f(x, out=outs[k])
            f(x, out=outs[k + 1])  # after a launch of the same kernel
    for _, x, outs in calls:
        want = torch.softmax(x.float(), -1)
        torch.testing.assert_close(outs[0].float(), want, rtol=2**-8, atol=1e-6)
        assert all(torch.equal(o, outs[0]) for o in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n, dtype", [(65536, BF16), (40008, BF16), (90000, F16), (20004, F32)])
def test_long_rows_in_a_ring(rng, name, n, dtype):
    """A ring for every SM, in place, several times with the same bits."""
    torch = pytest.importorskip("torch")
    rows = 2 * plgpu.sm_count() + 7
    given = arrays(rng, name, (rows, n), dtype)
    config = C(ring=chunk_of(rows, n, dtype.itemsize))
    if dtype == BF16:
        on_gpu = [torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16) for a in given]
    else:
        on_gpu = [torch.from_numpy(a).cuda() for a in given]
    run = functools.partial(FUNCTIONS[name], config=config)
    got = run(*on_gpu)
    want = reference(name, *given)
    unit = TOLERANCE[dtype]
    floor = (1e-6 if dtype == F32 else 6e-8) + unit / 100
    np.testing.assert_allclose(got.double().cpu().numpy(), want, rtol=unit, atol=floor)
    for _ in range(20):
        assert torch.equal(run(*on_gpu), got)
    assert run(*on_gpu, out=on_gpu[0]) is on_gpu[0]
    assert torch.equal(on_gpu[0], got)


@pytest.mark.parametrize("shape, axes", [((3, 5, 40), 2), ((2, 3, 7, 11), 3), ((2, 90, 200), 2)])
def test_several_axes(run, rng, shape, axes):
    """Rows go over the last axes, whose shape the vectors have; those of softmax over any that
    follow each other."""
    x = rng.standard_normal(shape).astype(F16)
    w, b = rng.standard_normal((2, *shape[-axes:])).astype(F16)
    last = tuple(range(-axes, 0))
    check(run, "layer_norm", (x, w, b), axis=last)
    check(run, "rms_norm", (x, w), axis=last)
    check(run, "softmax", (x,), axis=(1, 0))


COLUMNS = [
    C(32, 2, 32, threads=2),
    C(32, 1, 0, threads=2),
    C(16, 8, 16, threads=2),
    C(128, 2, 16),
    C(32, 1, 64, divided=True),
    C(16, 4, 32, threads=2, divided=True),  # the last blocks have no part
]


@pytest.mark.parametrize("config", COLUMNS, ids=str)
@pytest.mark.parametrize("shape", [(517, 136), (256, 64)])
def test_columns(run, rng, shape, config):
    """Segments of warpgroups and of blocks, the last one without elements; wide tiles."""
    check(run, "softmax", arrays(rng, "softmax", shape), axis=0, config=config)


@pytest.mark.parametrize("divided", [False, True])
def test_columns_of_special_values(run, rng, divided):
    """Warpgroups and blocks whose part of a column is -inf alone, columns of -inf, NaN."""
    x = rng.standard_normal((512, 32)).astype(np.float32) * 100 + 1000
    x[:200, 0] = -np.inf
    x[:300, 1] = -np.inf
    x[300:, 2] = -np.inf
    x[:, 3] = -np.inf
    x[400, 4] = np.nan
    with np.errstate(invalid="ignore"):
        want = reference("softmax", x, axis=0)
    config = C(16, 2, 64, threads=2, divided=divided)
    interpret = None if run.way == "cuda" else True
    got = run.call(softmax.kernel(x, axis=0, config=config, interpret=interpret), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)
    assert np.isnan(got[:, 3]).all() and np.isnan(got[:, 4]).all()


@pytest.mark.parametrize(
    "shape, axis",
    [((3, 50, 7), 1), ((300, 64), 0), ((2, 9, 70, 3), -3), ((2, 700, 40), 1), ((1300, 72), 0)],
)
def test_axis(run, rng, shape, axis):
    check(run, "softmax", arrays(rng, "softmax", shape), axis=axis)


def test_without_weights(run, rng):
    x = arrays(rng, "softmax", (3, 200))
    check(run, "rms_norm", x, eps=0.5)
    check(run, "layer_norm", x, eps=0.25)
    check(run, "layer_norm", (*x, None, rng.standard_normal(200).astype(BF16)))


CONFIGS = [None, C(1, 4), C(1, 2, 1024), C(ring=512, programs=2), C(ring=1024, consumers=1)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_softmax_of_special_values(run, rng, config):
    """Segments of -inf alone, rows of -inf, NaN, what would overflow."""
    x = rng.standard_normal((5, 2048)).astype(np.float32) * 100 + 1000
    x[0, :1500] = -np.inf
    x[1, 700] = np.nan
    x[2] = -np.inf
    x[3, 5] = np.inf
    with np.errstate(invalid="ignore"):
        want = reference("softmax", x)
    interpret = None if run.way == "cuda" else True
    got = run.call(softmax.kernel(x, config=config, interpret=interpret), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)
    assert np.isnan(got[1]).all() and np.isnan(got[2]).all() and (got[0, :1500] == 0).all()


@pytest.mark.parametrize("config", [None, C(1, 4), C(1, 1, 1024), C(ring=512)], ids=str)
def test_variance_of_a_small_spread(run, rng, config):
    """Squares are of differences from the mean: float32 has no digits left otherwise."""
    x = (rng.standard_normal((3, 3000)) + 5000).astype(np.float32)
    interpret = None if run.way == "cuda" else True
    got = run.call(layer_norm.kernel(x, config=config, interpret=interpret), x)
    np.testing.assert_allclose(got, reference("layer_norm", x), atol=4e-3)


def test_out(rng):
    x, w = arrays(rng, "rms_norm", (7, 300))
    want = rms_norm(x, w, interpret=True)
    out = np.empty_like(x)
    assert rms_norm(x, weight=w, out=out, interpret=True) is out
    np.testing.assert_array_equal(out, want)
    assert rms_norm(x, w, out=x, interpret=True) is x  # in place
    np.testing.assert_array_equal(x, want)
    assert rms_norm.kernel(x, w) is rms_norm.kernel(x, weight=w, eps=1e-6)


def test_arrays_that_begin_anywhere():
    """No access is wider than an element where the address is no multiple of 16 bytes."""
    for aligned, want in (
        ((False, True), ["1", "1", "1"]),  # x, weight, result: each lane beside the next
        ((True, False), ["1"]),  # weight; TMA does the rest
        ((False, False), ["1", "1", "1"]),
    ):
        x, w = (plgpu.ArrayInfo(s, BF16, aligned=a) for s, a in zip(((64, 1024), (1024,)), aligned))
        text = rms_norm.__wrapped__(x, w, interpret=True).lower(x, w).as_text("cuda")
        words = re.findall(r"(?:ld|st)_global<\w+, (\d+)>", text[text.index("__global__") :])
        assert words == want
    x, w = (plgpu.ArrayInfo(s, BF16, aligned=a) for s, a in (((3, 2048), True), ((2048,), False)))
    text = rms_norm.__wrapped__(x, w, config=C(ring=1024), interpret=True).lower(x, w)
    text = text.as_text("cuda")
    words = re.findall(r"(?:ld|st)_global<\w+, (\d+)>", text[text.index("__global__") :])
    assert set(words) == {"1"} and "setmaxnreg_inc<" not in text  # of a ring: nor kept


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_misaligned_and_in_place(rng, name):
    torch = pytest.importorskip("torch")
    given = arrays(rng, name, (33, 256), F32)
    want = reference(name, *given)
    given = [torch.from_numpy(a).cuda() for a in given]
    shifted = [torch.cat([a.new_zeros(1), a.reshape(-1)])[1:].view(a.shape) for a in given]
    for args in (given, shifted):
        got = FUNCTIONS[name](*args)
        np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-6, atol=2e-6)
        assert FUNCTIONS[name](*args, out=args[0]) is args[0]
        np.testing.assert_array_equal(args[0].cpu().numpy(), got.cpu().numpy())


# ---- how they do it ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [1024, 2048, 4096, 8192, 16384, 65536, 131072])
def test_how_they_move_data(name, n):
    """Each array goes through one bulk copy a block, weights and a bias, too, unless registers get
    them; registers and SMEM see words of 16 bytes, and at least two blocks have room on an SM."""
    x, w = (plgpu.ShapeDtypeStruct(s, BF16) for s in ((4099, n), (n,)))
    given = (x, w, w)[: {"softmax": 1, "rms_norm": 2, "layer_norm": 3}[name]]
    low = FUNCTIONS[name].kernel(*given).lower(*given)
    text, used = low.as_text("cuda"), low.resources()
    text = text[text.index("__global__") :]
    copies = re.findall(r"\b(?:bulk|tma)_(load|store)\w*\(", text)
    vectors = len(given) - 1 if n >= {"rms_norm": 8192, "layer_norm": 2048}.get(name, 0) else 0
    if name == "layer_norm" and n == 131072:  # no room for the bias
        vectors = 1
    assert copies == ["load"] * (1 + vectors) + ["store"]
    assert set(re.findall(r"(?:ld|st)_\w+<bf16, (\d+)>", text)) == {"8"}
    assert used["spill_bytes"] == used["stack_bytes"] == 0
    blocks = min(65536 // (128 * used["registers"]), 228 * 1024 // (used["smem_bytes"] + 1024))
    assert blocks >= 2 and used["threads"] == 128, used


@pytest.mark.parametrize(
    "n, ring, loads",
    [
        (65536, 8192, (32, 0)),
        (57344, 7168, (28, 0)),
        (32768, 8192, (32, 0)),
        (90112, 8192, None),
    ],
)
def test_weights_of_a_ring_stay_in_registers(n, ring, loads):
    """Weight and bias, or one of them, are loaded in front of all rows where registers have room:
    loads of a lane there, and in the loop; others come through shared memory."""
    given = [plgpu.ShapeDtypeStruct(s, BF16) for s in ((264, n), (n,), (n,))]
    config = C(ring=ring, unroll=int(n == 65536), stream=n != 90112)
    text = layer_norm.kernel(*given, config=config).lower(*given).as_text("cuda")
    text = text[text.index("__global__") :]
    assert ("setmaxnreg_inc<" in text) == (loads is not None)
    if loads:
        front, rows = text[text.index("setmaxnreg_inc<") :].split("// while", 1)
        assert (front.count("ld_global<bf16, 8>"), rows.count("ld_global<bf16, 8>")) == loads


def test_chosen_configurations():
    """Something for every extent, that fits: no spills where rows are longest or oddest."""
    for n in (1, 2, 63, 2047, 4097, 16385, 40000, 131071, 131072, 400000, 10**6):
        for staged in (False, True):
            for itemsize in (2, 4):
                config = choose("softmax", 10, n, 1, itemsize, staged)
                assert config.height <= (10 if n > 512 else 128)  # as the layout has them
                assert config.cluster in (1, 2, 4, 8)
                assert staged or not config.staged
                segment = -(-n // config.cluster) * itemsize
                assert not config.staged or segment <= 3 * 65536
    assert [choose("softmax", m, 16).height for m in (10**4, 10**6)] == [128, 256]
    for n, inner in ((1, 8), (600, 64), (4096, 4096), (20000, 24), (30000, 24), (10**6, 8)):
        config = choose("softmax", 3, n, inner)
        assert config.staged == (n <= 20000) and bool(config.slices) == (n > 20000)
        if config.staged:
            assert -(-n // config.cluster) * config.height * 2 <= 98304
    for n in (131071, 10**6):
        x = plgpu.ShapeDtypeStruct((3, n), BF16)
        assert softmax.kernel(x).lower(x).resources()["spill_bytes"] == 0


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: softmax(x.astype(np.int32)), TypeError, "x must be float16.*got int32"),
        (lambda x: softmax(x, axis=2), ValueError, "axis must be an int from -2 to 1, .*got 2"),
        (lambda x: softmax(x, axis=(0, 2)), ValueError, "or a tuple of different ones, got .0, 2."),
        (lambda x: softmax(x[None], axis=(0, 2)), NotImplementedError, "follow each other"),
        (lambda x: softmax(x, axis=(0, 0)), ValueError, "a tuple of different ones, got .0, 0."),
        (lambda x: softmax(x, axis=()), ValueError, "axis must be an int"),
        (lambda x: rms_norm(x, axis=0), NotImplementedError, "the last axis is one of those"),
        (lambda x: softmax(x[:, :0]), ValueError, "elements, got shape"),
        (lambda x: softmax(x[0, 0]), ValueError, "must have a dim"),
        (lambda x: softmax(x, out_dtype=np.int8), TypeError, "out_dtype must be"),
        (lambda x: softmax(x, out_dtype="half"), TypeError, "^softmax: out_dtype .*got 'half'$"),
        (lambda x: rms_norm(x, x), ValueError, r"weight must have the shape \(8,\)"),
        (lambda x: rms_norm(x, x[0, :4]), ValueError, "weight must have"),
        (lambda x: layer_norm(x, x[0], x[:, 0]), ValueError, "bias must have"),
        (lambda x: layer_norm(x, x[0].astype(np.int8)), TypeError, "weight must be"),
        (lambda x: softmax(x, config=3), TypeError, "must be a NormConfig"),
        (lambda x: softmax(x, config=C(0)), ValueError, "a height from 1"),
        (lambda x: softmax(x, config=C(2, 2)), ValueError, "for single rows"),
        (lambda x: softmax(x[:, :7], config=C()), ValueError, "staged must be False"),
        (lambda x: softmax(x, config=C(ring=512, staged=False)), ValueError, "must be True"),
        (lambda x: softmax(x, config=C(ring=512, consumers=5)), ValueError, "1 to 3 consumers"),
        (lambda x: softmax(x, config=C(2, ring=512)), ValueError, "for single rows"),
        (lambda x: softmax(x, axis=0, config=C(spans=True)), ValueError, "is for the last axis"),
        (lambda x: softmax(x, config=C(staged=False, spans=True)), ValueError, "must be True"),
        (lambda x: softmax(x, config=C(1, 8, spans=True)), ValueError, "would be empty"),
        (lambda x: softmax(x, config=C(threads=2)), ValueError, "threads are 1 to 8"),
        (lambda x: softmax(x, config=C(1, 1, 4, divided=True)), ValueError, "is for columns"),
        (
            lambda x: softmax(x.repeat(64, 0), axis=0, config=C(8, 1, 4, threads=2, divided=True)),
            ValueError,
            "up to 32 parts, 32 for each of 2",
        ),
        (lambda x: softmax(x, config=C(spans=True, threads=9)), ValueError, "threads are 1 to 8"),
        (lambda x: softmax(x, config=C(ring=-1)), ValueError, "unroll and slices from 0"),
        (lambda x: softmax(x, config=C(ring=500)), ValueError, "a multiple of 512 elements"),
        (lambda x: softmax(x, config=C(ring=512)), ValueError, "a whole chunk for each"),
        (
            lambda x: softmax(x[:1].repeat(10000, 1), config=C(ring=512)),
            ValueError,
            "has 16 slots",
        ),
        (
            lambda x: softmax(x[:1].repeat(200, 1), config=C(ring=512), out_dtype=np.float16),
            ValueError,
            "dtype of x, float32",
        ),
    ],
)
def test_errors(rng, call, error, words):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    with pytest.raises(error, match=words):
        call(x)
