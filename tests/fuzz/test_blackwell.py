"""Random tcgen05 pipelines (fuzz/blackwell.py): the interpreter, which looks for races, the
emulated machine under several schedules and NumPy agree; NVRTC takes them without remarks."""

import numpy as np
import pytest
from fuzz.blackwell import draw

import pallas_mgpu as plgpu
from pallas_mgpu.machine.run import run as run_on_machine

QUICK = [
    1,  # a pair whose accumulators begin with what each block stores
    3,  # a pair that uses an accumulator again, 8-bit integers
    4, 8,  # pairs with 64 rows
    9,  # warp 0 of the multiplier issues: the producer learns what it knew
    17,  # the same, A in tensor memory
    6,
]  # fmt: skip
LATER = {k: pytest.mark.long if k < 16 else pytest.mark.exhaustive for k in range(300)}
SEEDS = [pytest.param(k, marks=[] if k in QUICK else mark) for k, mark in LATER.items()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_pipelines(seed, request):
    x = draw(seed)
    args, want = x.operands(np.random.default_rng(seed))
    races = plgpu.InterpretParams(seeds=2, detect_races=True)
    np.testing.assert_array_equal(x.kernel(interpret=races)(*args), want)
    lowered = x.kernel().lower(*args, target="sm_100a")
    for schedule in range(2):
        got = np.zeros_like(want)
        run_on_machine(lowered, args, [got], seed=schedule)
        np.testing.assert_array_equal(got, want)
    if seed not in QUICK or seed == QUICK[0]:
        assert not lowered.resources()["remarks"]


def test_a_seed_is_one_pipeline():
    assert draw(7) == draw(7)


def test_all_kinds_are_drawn():
    drawn = [draw(seed) for seed in range(150)]
    products = [x.product for x in drawn]
    assert {x.roles for x in drawn} == {1, 2, 3} and {x.accumulators for x in drawn} == {1, 2}
    assert {x.from_warp for x in drawn} == {None, 0, 1, 2, 3}
    assert {p.m for p in products} == {64, 128} and {p.pair for p in products} == {False, True}
    for flag in ("a_in_tmem", "a_mn_major", "b_k_major", "sparse"):
        assert len({getattr(p, flag) for p in products}) == 2
    assert len({p.scale for p in products}) == 3 and len({str(p.a) for p in products}) == 7
    assert any(x.initial and x.pair for x in drawn) and any(x.apart for x in drawn)
