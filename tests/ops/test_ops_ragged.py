"""ops.ragged_dot and transposed_ragged_dot beside a loop over groups in float32: sizes that only
the arrays know, odd extents, what other groups hold, schedules."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu.ops import RaggedConfig, _open_rows, ragged_dot, transposed_ragged_dot
from pallas_mgpu.ops.ragged import choose, choose_transposed

pytestmark = pytest.mark.covering(1, share=True)

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
UNIT = {F16: 1e-3, BF16: 8e-3, F32: 1e-5}  # of the rounding of a result, roughly
C = RaggedConfig


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Blocks do several tiles; no warnings."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def parts(sizes, m):
    """Slices of the groups, by the definition: negative sizes are 0, none reaches beyond m."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), m)
    return [slice(a, b) for a, b in zip((0, *ends[:-1]), ends)]


def run_padded(run, kernel, *arrays):
    """Step by step where it takes more than one kernel."""
    if hasattr(kernel, "pads"):
        arrays = [x if pad is None else run.call(pad, x) for x, pad in zip(arrays, kernel.pads)]
        kernel = kernel.product
    return run.call(kernel, *arrays)


def close(got, want, depth):
    unit = UNIT[got.dtype]
    np.testing.assert_allclose(
        got.astype(np.float32), want, rtol=2 * unit, atol=unit * np.sqrt(depth + 1)
    )


def forward(run, rng, m, n, k, sizes, dtype=F16, tb=False, **options):
    groups = len(sizes)
    lhs = (rng.standard_normal((m, k)) / 4).astype(dtype)
    rhs = (rng.standard_normal((groups, n, k) if tb else (groups, k, n)) / 4).astype(dtype)
    sizes = np.array(sizes, np.int32)
    options |= {"transpose_rhs": True} if tb else {}
    interpret = None if run.way == "cuda" else True
    kernel = ragged_dot.kernel(lhs, rhs, sizes, interpret=interpret, **options)
    got = run_padded(run, kernel, lhs, rhs, sizes)
    want = np.zeros((m, n), np.float32)  # rows of no group
    for g, rows in enumerate(parts(sizes, m)):
        b = rhs[g].astype(np.float32)
        want[rows] = lhs[rows].astype(np.float32) @ (b.T if tb else b)
    assert got.dtype == np.dtype(options.get("out_dtype", dtype))
    close(got, want, k)


def transposed(run, rng, m, n, k, sizes, dtype=F16, spoil=True, **options):
    lhs, rhs = ((rng.standard_normal((m, c)) / 4).astype(dtype) for c in (k, n))
    sizes = np.array(sizes, np.int32)
    rows_of = parts(sizes, m)
    if spoil:  # rows of no group may hold anything, also 0 times it
        lhs[rows_of[-1].stop :] = np.nan
        rhs[rows_of[-1].stop :] = np.inf
    interpret = None if run.way == "cuda" else True
    kernel = transposed_ragged_dot.kernel(lhs, rhs, sizes, interpret=interpret, **options)
    got = run_padded(run, kernel, lhs, rhs, sizes)
    want = [lhs[r].astype(np.float32).T @ rhs[r].astype(np.float32) for r in rows_of]
    assert got.dtype == np.dtype(options.get("out_dtype", dtype))
    close(got, np.stack(want), max(r.stop - r.start for r in rows_of))


SIZES = {
    "uneven": [70, 0, 60, 30],
    "a row each": [1, 1, 1, 1],
    "one group": [0, 160, 0, 0],
    "rows of no group": [0, 70, 5, 0],
    "all empty": [0, 0, 0, 0],
    "whole tiles": [64, 0, 64, 32],
    "too many": [100, 1, 100, 100],
    "negative": [-5, 64, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes(run, rng, case):
    forward(run, rng, 160, 72, 72, SIZES[case])
    transposed(run, rng, 160, 72, 72, SIZES[case])


@pytest.mark.parametrize("m, n, k", [(77, 61, 33), (70, 8, 1), (65, 1, 130), (66, 7, 1)])
def test_odd_extents(run, rng, m, n, k):
    """Padded operands, results that TMA cannot store."""
    sizes = [m // 3, 0, m // 2]
    forward(run, rng, m, n, k, sizes, BF16)
    transposed(run, rng, m, n, k, sizes, BF16)


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, BF16), (F16, F32)], ids=str)
def test_dtypes(run, rng, dtype, out_dtype):
    sizes = [40, 5, 20]
    forward(run, rng, 70, 72, 80, sizes, dtype, tb=True, out_dtype=out_dtype)
    transposed(run, rng, 70, 72, 80, sizes, dtype, out_dtype=out_dtype)


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCKS = {  # rows (of each group, if it has an array), n, k, sizes, by groups, configuration
    "packed": (200, 264, 400, [70, 0, 60, 30], False, None),
    "packed, odd": (301, 136, 300, [130, 0, 160], False, C(2, 128, 0, 2)),
    "packed, small tiles": (50, 72, 128, [30, 7], False, C(1, 64, 0, 1)),
    "packed, a block without columns": (60, 128, 256, [30, 30], False, C(2, 64, 0, 2)),
    "by groups": (90, 200, 256, [70, 0, 90, 1], True, None),
    "by groups, too many": (65, 72, 144, [100, -3, 64], True, C(1, 128, 0, 1)),
}


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("scaled", [False, True], ids=["no scales", "scales"])
def test_8_bit_floats(run, rng, case, scaled):
    """Scales change along K and, on the right, along columns."""
    m, n, k, sizes, by_groups, config = BLOCKS[case]
    groups, blocks = len(sizes), -(-k // 128)
    lhs = rng.standard_normal((groups, m, k) if by_groups else (m, k)).astype(E4M3)
    rhs = rng.standard_normal((groups, n, k)).astype(E4M3)
    left, right = lhs.astype(np.float32), rhs.astype(np.float32)
    scales = {}
    if scaled:
        of_rows = rng.random((*lhs.shape[:-1], blocks)).astype(F32) + F32.type(0.5)
        of_columns = rng.random((groups, -(-n // 128), blocks)).astype(F32) + F32.type(0.5)
        scales = {"scale_lhs": of_rows, "scale_rhs": of_columns}
        left = left * np.repeat(of_rows, 128, -1)[..., :k]
        spread = np.repeat(np.repeat(of_columns, 128, 1)[:, :n], 128, 2)[..., :k]
        right = right * spread
    given = np.array(sizes, np.int32)
    how = None if run.way == "cuda" else True
    options = {"transpose_rhs": True, "config": config, "out_dtype": np.float32}
    kernel = ragged_dot.kernel(lhs, rhs, given, **scales, **options, interpret=how)
    got = run_padded(run, kernel, lhs, rhs, given, *scales.values())
    assert got.dtype == F32 and got.shape == (*lhs.shape[:-1], n)
    if by_groups:
        counts = np.clip(sizes, 0, m)
        pairs = [(got[g, :c], left[g, :c] @ right[g].T) for g, c in enumerate(counts)]
    else:
        rows_of = parts(sizes, m)
        pairs = [(got[r], left[r] @ right[g].T) for g, r in enumerate(rows_of)]
        assert not got[rows_of[-1].stop :].any()
    for found, want in pairs:  # the tensor cores keep about 14 bits
        np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3 * np.sqrt(k))


def test_arrays_of_groups_of_16_bits(run, rng):
    lhs = rng.standard_normal((3, 70, 72)).astype(F16)
    rhs = rng.standard_normal((3, 72, 136)).astype(F16)
    sizes = np.array([70, 0, 33], np.int32)
    how = None if run.way == "cuda" else True
    kernel = ragged_dot.kernel(lhs, rhs, sizes, interpret=how)
    got = run_padded(run, kernel, lhs, rhs, sizes)
    for g, c in enumerate(sizes):
        close(got[g, :c], lhs[g, :c].astype(np.float32) @ rhs[g].astype(np.float32), 72)


_LHS, _RHS = np.zeros((40, 256), E4M3), np.zeros((2, 136, 256), E4M3)
_SCALES = {"scale_lhs": np.ones((40, 2), F32), "scale_rhs": np.ones((2, 2, 2), F32)}


@pytest.mark.parametrize(
    "change, exception, match",
    [
        ({"transpose_rhs": False, "rhs": _RHS.swapaxes(1, 2).copy()}, NotImplementedError, "G, N"),
        ({"scale_lhs": None}, ValueError, "must both be given"),
        ({"scale_lhs": np.ones((40, 3), F32)}, ValueError, r"scale_lhs .* \(40, 2\), got \(40, 3"),
        ({"scale_rhs": np.ones((2, 2, 2), F16)}, TypeError, "scale_rhs must be float32"),
        ({"rhs": _RHS.astype(F16)}, TypeError, "must have the same dtype"),
        (
            {"lhs": np.zeros((40, 256), F16), "rhs": _RHS.astype(F16)},
            ValueError,
            "for 8-bit floats",
        ),
        ({"lhs": np.zeros((3, 40, 256), E4M3)}, ValueError, "arrays of 3 groups, rhs of 2"),
        ({"config": C(2, 256)}, ValueError, "up to 128 rows"),
    ],
)
def test_misuse_of_8_bit_floats(change, exception, match):
    given = {"lhs": _LHS, "rhs": _RHS, "transpose_rhs": True, **_SCALES, **change}
    with pytest.raises(exception, match=match):
        ragged_dot(group_sizes=np.array([3, 4], np.int32), interpret=True, **given)


def test_8_bit_floats_on_blackwell(monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    plgpu.clear_caches()
    try:
        sizes = np.array([3, 4], np.int32)
        with pytest.raises(NotImplementedError, match="8-bit floats and arrays of each group"):
            ragged_dot(_LHS, _RHS, sizes, transpose_rhs=True, interpret=True)
    finally:
        plgpu.clear_caches()


CONFIGS = {  # with extents m, n, k
    C(1, 64, 2, 1, 1, 1): (150, 200, 72),  # bands of one tile
    C(2, 64, 2, 2, 1, 2): (300, 260, 136),  # rings that go round, several bands
    C(2, 128, 3, 1, 2, 3): (150, 200, 200),
    C(1, 192, 0, 2): (70, 200, 72),  # a width that is no power of two
    C(2, 256, 2, 2): (150, 264, 72),
}


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_configurations(run, rng, config):
    m, n, k = CONFIGS[config]
    forward(run, rng, m, n, k, [m // 2, 1, m // 3], tb=config.stages == 2, config=config)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_transposed_configurations(run, rng, config):
    m, n, k = CONFIGS[config]
    transposed(run, rng, m, n, k, [64, 1, 0, m // 2], config=config)


RINGS = {  # of 3, 5 and 7 slots; results that are stored at once, clusters
    "a tile at once": (C(2, 64, 5, 1, 2, 4), F32),
    "all slots": (C(2, 256, 0, 2, 2, 4), F16),
    "one consumer": (C(1, 64, 3, 2, 4, 4), BF16),
}


@pytest.mark.parametrize("case", RINGS)
def test_random_sizes(run, rng, case):
    """Groups that are empty, below a step or a whole number of them, rings that go round between
    tiles at any slot: nobody waits for what never comes, no slot is multiplied too early."""
    config, out_dtype = RINGS[case]
    dtype = BF16 if out_dtype == BF16 else F16
    cases = [rng.integers(0, 100, 5) * (rng.random(5) < 0.7) for _ in range(2)]
    for sizes in (*cases, [3, 15, 0, 32, 33], [97, 0, 130, 1, 64]):
        transposed(run, rng, 300, 72, 136, sizes, dtype, out_dtype=out_dtype, config=config)


def test_neighbours_are_not_touched(run, rng):
    """NaN in a group stays there: none of its rows counts in the next group, or the one before."""
    m, sizes = 200, np.array([30, 70, 100], np.int32)
    lhs, rhs = ((rng.standard_normal((m, 72))).astype(F16) for _ in range(2))
    matrices = rng.standard_normal((3, 72, 72)).astype(F16)
    bad = parts(sizes, m)[1]
    lhs[bad], rhs[bad] = np.nan, np.inf
    interpret = None if run.way == "cuda" else True
    got = run.call(
        ragged_dot.kernel(lhs, matrices, sizes, interpret=interpret), lhs, matrices, sizes
    )
    assert np.isnan(got[bad]).all()
    assert not np.isnan(np.delete(got, np.r_[bad], axis=0)).any()
    kernel = transposed_ragged_dot.kernel(lhs, rhs, sizes, interpret=interpret)
    got = run.call(kernel, lhs, rhs, sizes)
    assert np.isnan(got[1]).all() and not np.isnan(got[[0, 2]]).any()


def test_many_groups(run, rng):
    """More groups than lanes, most of them empty."""
    sizes = rng.integers(0, 3, 300) * (rng.random(300) < 0.1)
    forward(run, rng, 40, 64, 64, sizes)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("n", [72, 71], ids=["", "padded matrices"])
def test_groups_at_run_time(rng, n, target, monkeypatch):
    """One program for numbers of groups and rows, whatever they are."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    plgpu.clear_caches()
    way, made = plgpu.InterpretParams(detect_races=True), (set(), set(), set())
    for m, groups in ((160, 4), (33, 1), (1, 32), (300, 33), (300, 127), (300, 128), (400, 300)):
        sizes = rng.integers(-1, 2 * m // groups + 1, groups).astype(np.int32)
        lhs = (rng.standard_normal((m, 136)) / 4).astype(F16)
        rhs = (rng.standard_normal((groups, 136, n)) / 4).astype(F16)
        want = np.zeros((m, n), np.float32)
        rows_of = parts(sizes, m)
        for rows, b in zip(rows_of, rhs):
            want[rows] = lhs[rows].astype(np.float32) @ b.astype(np.float32)
        close(ragged_dot(lhs, rhs, sizes, interpret=way), want, 136)
        if n % 8:
            continue
        right = (rng.standard_normal((m, n)) / 4).astype(F16)
        for x in (lhs, right):
            x[rows_of[-1].stop :] = np.inf
        sums = [lhs[r].astype(np.float32).T @ right[r].astype(np.float32) for r in rows_of]
        close(transposed_ragged_dot(lhs, right, sizes, interpret=way), np.stack(sums), m)
        made[(groups > 32) + (groups > 127)].add(ragged_dot.kernel(lhs, rhs, sizes, interpret=way))
    assert n % 8 or [len(of_range) for of_range in made] == [1, 1, 1]
    plgpu.clear_caches()


def test_200_numbers_of_groups_have_at_most_twelve_programs(rng, monkeypatch):
    monkeypatch.undo()  # all SMs
    spec, forward, backward = plgpu.ShapeDtypeStruct, set(), set()
    for _ in range(200):
        groups, m = (int(2 ** rng.uniform(0, most)) for most in (11, 15))
        lhs, right, sizes = spec((m, 4096), BF16), spec((m, 1536), BF16), spec((groups,), np.int32)
        forward.add(ragged_dot.kernel(lhs, spec((groups, 4096, 1536), BF16), sizes))
        backward.add(transposed_ragged_dot.kernel(lhs, right, sizes))
    assert len(forward) <= 12 and len(backward) <= 12


def test_vmap(rng):
    """Elements share a launch, whose counter cannot be that of each: tiles have fixed blocks."""
    lhs = rng.standard_normal((2, 300, 64)).astype(F16)
    rhs = rng.standard_normal((2, 3, 64, 256)).astype(F16)
    sizes = np.array([[100, 0, 200], [7, 250, 11]], np.int32)
    kernel = ragged_dot.kernel(lhs[0], rhs[0], sizes[0], interpret=True)
    assert "next_tile(" in kernel.lower(lhs[0], rhs[0], sizes[0]).as_text("cuda")
    for k, got in enumerate(plgpu.vmap(kernel)(lhs, rhs, sizes)):
        assert got.tobytes() == kernel(lhs[k], rhs[k], sizes[k]).tobytes()


def test_what_callers_get(rng):
    lhs = rng.standard_normal((40, 24)).astype(F16)
    rhs = rng.standard_normal((2, 24, 16)).astype(F16)
    sizes = np.array([25, 15], np.int32)
    out = np.empty((40, 16), F16)
    assert ragged_dot(lhs, rhs, sizes, out=out, interpret=True) is out
    named = ragged_dot(group_sizes=sizes, rhs=rhs, lhs=lhs, interpret=True)
    np.testing.assert_array_equal(named, out)
    got = transposed_ragged_dot(lhs, named, sizes, interpret=True)
    assert got.shape == (2, 24, 16) and got.dtype == F16


def test_chosen_configurations():
    """The flagship sizes neither spill nor make ptxas serialise products; all sizes get a ring."""
    assert choose(32768, 14336, 64)[:2] == (2, 256)
    assert choose(64, 14336, 8).tile == 64
    assert choose_transposed(14336, 4096, 64)[:2] == (2, 256)
    spec = plgpu.ShapeDtypeStruct
    for m, n, k, groups in ((32768, 14336, 4096, 64), (256, 512, 512, 2000)):
        lhs, rhs = spec((m, k), BF16), spec((groups, k, n), BF16)
        sizes, right = spec((groups,), np.int32), spec((m, n), BF16)
        for f, given in (
            (ragged_dot, (lhs, rhs, sizes)),
            (transposed_ragged_dot, (lhs, right, sizes)),
        ):
            low = f.kernel(*given).lower(*given)
            used = low.resources()
            assert (used["spill_bytes"], used["stack_bytes"], used["remarks"]) == (0, 0, ""), used
            text = low.as_text("cuda")
            text = text[text.index("__global__") :]
            large = f is transposed_ragged_dot  # of both shapes: more than the L2 holds
            assert ("_evict_first" in text) == large
            # slots are released without fences; the number of a tile takes one
            assert text.count("mbarrier_arrive_release") == (f is ragged_dot)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(lhs=np.zeros((4, 8), F32)), TypeError, "one of float16, bfloat16, .* got float32"),
        (dict(rhs=np.zeros((2, 8, 8), BF16)), TypeError, "got float16 and bfloat16"),
        (dict(rhs=np.zeros((8, 8), F16)), ValueError, "rhs 3, got"),
        (dict(rhs=np.zeros((2, 9, 8), F16)), ValueError, "inner dims differ, 8 and 9"),
        (dict(group_sizes=np.zeros(2, np.float32)), TypeError, "group_sizes must be int32"),
        (dict(group_sizes=np.zeros((2, 1), np.int32)), ValueError, "must have one dim"),
        (dict(group_sizes=np.zeros(3, np.int32)), ValueError, r"must have the shape \(2,\)"),
        (dict(lhs=np.zeros((0, 8), F16)), ValueError, "empty operands"),
        (dict(out_dtype="int32"), TypeError, "out_dtype must be float16, bfloat16 or float32"),
        (dict(config=3), TypeError, "must be a RaggedConfig"),
        (dict(config=C(3)), ValueError, "has 1 or 2 consumers"),
        (dict(config=C(stages=1)), ValueError, "needs two slots, which RaggedConfig.*asks? for"),
    ],
)
def test_errors(change, error, words):
    given = {
        "lhs": np.zeros((4, 8), F16),
        "rhs": np.zeros((2, 8, 8), F16),
        "group_sizes": np.zeros(2, np.int32),
        **change,
    }
    with pytest.raises(error, match=words):
        ragged_dot(interpret=True, **given)


def test_transposed_errors():
    lhs, sizes = np.zeros((4, 8), F16), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="the same rows, got 4 and 5"):
        transposed_ragged_dot(lhs, np.zeros((5, 8), F16), sizes, interpret=True)
    with pytest.raises(ValueError, match="rhs 2, got"):
        transposed_ragged_dot(lhs, np.zeros((4, 8, 1), F16), sizes, interpret=True)
    with pytest.raises(ValueError, match="do not fit into SMEM"):
        transposed_ragged_dot(lhs, lhs, np.zeros(30000, np.int32), interpret=True)
