"""Random calls of `pallas_mgpu.ops` (fuzz/ops.py): odd shapes, dtypes, options, configurations and
addresses, beside NumPy. `python tests/fuzz/ops.py` runs more."""

import itertools

import pytest
from fuzz import ops, ops_inference, ops_training

from pallas_mgpu.ops import _open_rows

FIRST = 1_000_000  # seeds of the long runs begin at 0


def agree(seeds, way, makers=None, steps=1):
    """The functions that were called."""
    called = set()
    for seed, step in itertools.product(seeds, range(steps)):
        call = ops.Call(seed, makers, step)
        try:
            ops.check(call, (way,))
        except ops.Unfit:
            continue
        except Exception as e:
            pytest.fail(f"{call}\n{type(e).__name__}: {e}", pytrace=False)
        called.add(call.name)
    return called


@pytest.mark.parametrize("first", range(FIRST, FIRST + 160, 40))
def test_interpreted(first):
    assert agree(range(first, first + 40), "interpret") == set(ops.MAKERS)


@pytest.mark.parametrize("first", range(FIRST, FIRST + 280, 140))
@pytest.mark.parametrize("way", ["interpret", pytest.param("races", marks=pytest.mark.long)])
def test_training(first, way):
    """Gradients and what training calls besides."""
    called = agree(range(first, first + 140), way, ops_training.MAKERS)
    assert called == set(ops_training.MAKERS)


@pytest.mark.parametrize("first", range(FIRST, FIRST + 200, 100))
@pytest.mark.parametrize("way", ["interpret", pytest.param("races", marks=pytest.mark.long)])
def test_inference(first, way, monkeypatch):
    """With programs of their own, and with sizes that are known at run time."""
    if first == FIRST:
        monkeypatch.setattr(_open_rows, "STATIC", 0)
    called = agree(range(first, first + 100), way, ops_inference.MAKERS, 3)
    assert called == set(ops_inference.MAKERS)


@pytest.mark.parametrize(
    "first",
    [FIRST, *(pytest.param(FIRST + k, marks=pytest.mark.long) for k in (3, 6))],
)
def test_generated(first):
    """The generated programs, on the CPU."""
    assert agree(range(first, first + 3), "host")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 120, 20))
def test_on_a_gpu(first):
    assert agree(range(first, first + 20), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 60, 20))
def test_inference_on_a_gpu(first, monkeypatch):
    monkeypatch.setattr(_open_rows, "STATIC", 0)
    assert agree(range(first, first + 20), "cuda", ops_inference.MAKERS, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 60, 20))
def test_training_on_a_gpu(first):
    assert agree(range(first, first + 20), "cuda", ops_training.MAKERS)


def test_a_wrong_result_is_noticed():
    """One bit of one element of an exact product, and of one that is rounded."""
    for exact in (True, False):
        call = next(
            c
            for c in map(ops.Call, range(1000))
            if c.name == "matmul" and (c.close is None) == exact and c.want.size > 3
        )
        ops.check(call, ("interpret",))
        call.want.flat[-1] += call.want.dtype.type(1)
        with pytest.raises(ops.Wrong, match="1 of"):
            ops.check(call, ("interpret",))
