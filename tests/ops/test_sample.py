"""ops.sample: which tokens may be drawn, how often, and that a draw depends on its row alone."""

import functools

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops

DTYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)]
SEED = np.array([5], np.int32)


def allowed(row, top_k, top_p, temperature):
    """A mask of the tokens that may be drawn, in float64; and one of those that must be in it, as
    the sum of their probabilities is clearly below top_p."""
    row = row.astype(np.float64)
    keep = np.ones(row.size, bool)
    if 0 < top_k < row.size:
        keep = row >= np.sort(row)[-top_k]
    if temperature == 0:
        return row == row.max(), row == row.max()
    p = np.where(keep, np.exp((row - row.max()) / temperature), 0)
    p /= p.sum()
    before = np.array([p[row > x].sum() for x in row])
    return keep & (before < top_p + 1e-5), keep & (before < top_p - 1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n", [1, 37, 1024, 5003])
def test_tokens_that_may_be_drawn(run, dtype, n, rng):
    if run.way == "host" and n > 1000 and (dtype, n) != (np.float32, 1024):
        pytest.skip("slow there, and nothing else than in few columns and on the interpreter")
    rows = 6
    x = (rng.standard_normal((rows, n)) * 3).astype(dtype)
    x[0, rng.integers(n, size=n // 2)] = -np.inf
    x[0, 0] = 0
    k = np.array([0, 1, 3, n, 7, 2 * n], np.int32)
    p = np.array([0.9, 1, 0.5, 0.2, 2.0, 0.7], np.float32)
    t = np.array([1, 1, 0.3, 2, 0, 1], np.float32)

    options = {"top_k": k, "top_p": p, "temperature": t}
    kernel = ops.sample.kernel(x, SEED, **options, interpret=None if run.way == "cuda" else True)
    got = run.call(kernel, x, SEED, k, p, t)
    for i in range(rows):
        may, _ = allowed(x[i], k[i], p[i], t[i])
        assert may[got[i]], (i, got[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 3}, {"top_p": 0.65}, {"top_k": 4, "top_p": 0.8}, {"temperature": 0.5}],
    ids=str,
)
def test_how_often(dtype, options):
    """The numbers of draws pass a chi-square test with the probabilities."""
    draws = 4000
    row = np.log(np.array([0.06, 0.4, 0.2, 0.3, 0.04])).astype(dtype)
    got = ops.sample(np.tile(row, (draws, 1)), SEED, interpret=True, **options)
    may, must = allowed(row, options.get("top_k", 0), options.get("top_p", 1.0), 1.0)
    assert np.array_equal(may, must)
    p = np.where(may, np.exp(row.astype(np.float64) / options.get("temperature", 1)), 0)
    p = p / p.sum() * draws
    counts = np.bincount(got, minlength=5)
    assert not counts[~may].any()
    chi = ((counts - p)[may] ** 2 / p[may]).sum()
    assert chi < 25  # 4 degrees of freedom: one in 20,000


@pytest.mark.covering(1, share=True)
@pytest.mark.parametrize("blocks", [2, 8])
def test_rows_that_a_cluster_divides(run, rng, blocks):
    """Blocks without a part of the row among them."""
    n, rows, p = (300, 1, 1.0) if run.way == "host" and blocks == 8 else (2100, 2, 0.8)
    x = (rng.standard_normal((rows, n)) * 3).astype(np.float16)
    options = {"top_k": 40, "top_p": p, "config": ops.SampleConfig(blocks)}
    kernel = ops.sample.kernel(x, SEED, **options, interpret=None if run.way == "cuda" else True)
    got = run.call(kernel, x, SEED)
    for i in range(rows):
        assert allowed(x[i], 40, p, 1.0)[0][got[i]], (i, got[i])
    divided, whole = (
        ops.sample(x, SEED, top_k=40, top_p=p, config=config, interpret=True)
        for config in (options["config"], None)
    )
    assert (divided == whole).all()  # nothing is rounded


@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_p": 0.6}], ids=str)
def test_a_long_row_is_divided_by_default(options, rng):
    """Among eight blocks, or as one of 20 rows among two; the token is the same."""
    x = rng.standard_normal((20, 33000)).astype(np.float32)
    draw = functools.partial(ops.sample, seed=SEED, interpret=True, **options)
    few = ops.sample.kernel(x[:1], SEED, interpret=True, **options)
    assert "cluster [8]" in few.lower(x[:1], SEED).as_text("graph").split("\n")[0]
    assert draw(x[:1])[0] == draw(x)[0] == draw(x[:1], config=ops.SampleConfig(1))[0]


@pytest.mark.parametrize("share, several", [(-1e-6, False), (1e-6, True)])
def test_small_probabilities_add_up(share, several):
    """3,000 tokens have 2^-12 of the probability of the first one each, together 0.42 of all.
    Just below its share top_p leaves the first one alone, just above it all."""
    x = np.zeros((64, 3001), np.float32)
    x[:, 1:] = -12 * np.log(2)
    got = ops.sample(x, SEED, top_p=1 / (1 + 3000 / 4096) + share, interpret=True)
    assert got.any() == several


def test_zeros_of_both_signs_are_equal():
    x = np.tile(np.array([0.0, -0.0, -1, -5], np.float32), (200, 1))
    for options in ({"top_k": 1}, {"top_p": 0.3}):
        assert set(ops.sample(x, SEED, interpret=True, **options).tolist()) == {0, 1}


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("strange", [-np.inf, np.inf, np.nan])
def test_rows_that_are_not_finite_give_a_token(strange, options):
    x = np.zeros((2, 5), np.float32)
    x[0] = strange
    x[1, 3] = strange
    got = ops.sample(x, SEED, interpret=True, **options)
    assert ((got >= 0) & (got < 5)).all()


def test_equal_logits_are_all_drawn():
    x = np.zeros((500, 9), np.float32)
    x[:, 4] = -1
    got = ops.sample(x, SEED, top_k=2, interpret=True)
    assert set(got.tolist()) == set(range(9)) - {4}
    assert (ops.sample(x, SEED, temperature=0, interpret=True) == 0).all()


def test_a_draw_depends_on_its_row_alone(rng):
    x = rng.standard_normal((8, 300)).astype(np.float32)
    got = ops.sample(x, SEED, interpret=True)
    other = rng.standard_normal((20, 300)).astype(np.float32)
    other[:8] = x
    assert np.array_equal(ops.sample(other, SEED, interpret=True)[:8], got)
    assert not np.array_equal(ops.sample(x, SEED + 1, interpret=True), got)
    as_arrays = {
        "top_k": np.full(8, 20, np.int32),
        "top_p": np.full(8, 0.8, np.float32),
        "temperature": np.full(8, 0.7, np.float32),
    }
    numbers = {"top_k": 20, "top_p": 0.8, "temperature": 0.7}
    assert np.array_equal(
        ops.sample(x, SEED, interpret=True, **as_arrays),
        ops.sample(x, SEED, interpret=True, **numbers),
    )


def test_numbers_that_equal_true(rng):
    """Kernels for the numbers 1 are not those for arrays."""
    x = rng.standard_normal((4, 50)).astype(np.float32)
    assert np.array_equal(ops.sample(x, SEED, top_k=1, interpret=True), x.argmax(1))
    k, t = np.ones(4, np.int32), np.zeros(4, np.float32)
    assert np.array_equal(ops.sample(x, SEED, top_k=k, interpret=True), x.argmax(1))
    ops.sample(x, SEED, temperature=1, interpret=True)
    assert np.array_equal(ops.sample(x, SEED, temperature=t, interpret=True), x.argmax(1))


@pytest.mark.parametrize("backend", ["interpret", "emulate"])
def test_no_races(backend, rng):
    x = rng.standard_normal((2, 3000)).astype(ml_dtypes.bfloat16)
    params = plgpu.InterpretParams(
        backend=backend, detect_races=True, detect_uninitialized=True, seeds=2
    )
    ops.sample(x, SEED, top_k=9, top_p=0.9, interpret=params)


def test_errors():
    x = np.zeros((3, 8), np.float32)

    def call(error, words, *args, **options):
        with pytest.raises(error, match=words):
            ops.sample(*args, interpret=True, **options)

    call(
        TypeError,
        "logits must be float16, bfloat16 or float32, got int32",
        x.astype(np.int32),
        SEED,
    )
    call(ValueError, r"logits must be \[rows, vocabulary\], got shape \(8,\)", x[0], SEED)
    call(ValueError, "seed must be int32 or uint32", x, np.zeros(2, np.int32))
    call(ValueError, "top_k must be an int from 0; got -1", x, SEED, top_k=-1)
    call(ValueError, "top_k must be an int from 0; got 1.5", x, SEED, top_k=1.5)
    call(ValueError, "top_p must be above 0 and at most 1; got 0", x, SEED, top_p=0)
    call(ValueError, "temperature must be from 0 and finite; got -1", x, SEED, temperature=-1)
    call(ValueError, "temperature must be a number or an array", x, SEED, temperature=None)
    call(
        ValueError,
        r"top_k must be a number or int32 of shape \(3,\)",
        x,
        SEED,
        top_k=np.zeros(2, np.int32),
    )
    call(
        ValueError, "top_p must be a number or float32", x, SEED, top_p=np.zeros((3, 1), np.float32)
    )
