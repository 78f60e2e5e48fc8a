"""Random kernels with a planted synchronisation error: both judges agree, or differ
for a known reason. planted.py runs many."""

import pytest
from fuzz import planted

SEEDS = [
    10,
    *(pytest.param(k, marks=pytest.mark.long) for k in range(15, 30, 5)),
    *(pytest.param(k, marks=pytest.mark.exhaustive) for k in range(30, 200, 5)),
]


@pytest.mark.parametrize("first", SEEDS)
def test_the_judges_agree(first):
    judged = 0
    for seed in range(first, first + 5):
        name, verdicts, why = planted.judge(seed)
        if verdicts is None:
            continue
        judged += 1
        assert planted.agree(verdicts) or planted.reason(verdicts), (name, verdicts)
    assert judged >= 1


def test_the_same_error_each_time():
    first, again = planted.planted(0), planted.planted(0)
    assert first.text == again.text and first.name == again.name != ""
    assert first.text != first.kernel.text
