"""A sample of blackwell_mutants.py: programs of the Blackwell kernels of `ops` with one thing
wrong, which the emulated machine must notice. blackwell_mutants.txt names all of them."""

import functools
import re
from pathlib import Path

import blackwell_mutants
import pytest

LIST = Path(__file__).with_name("blackwell_mutants.txt")


@functools.cache
def sample():
    return blackwell_mutants.sample()


@pytest.mark.long
def test_the_list():
    """It has the mutants of the sample: 60 or more, five or more of each class. After a change of
    the kernels `python tests/mutants/blackwell_mutants.py` prints the new list."""
    named = re.findall(r"^\S.*$", LIST.read_text(), re.M)[:-1]
    assert named == [m.name for m in sample()]
    kinds = [m.kind for m in sample()]
    assert len(kinds) >= 60 and all(kinds.count(kind) >= 5 for kind in blackwell_mutants.WAYS)


@pytest.mark.long
@pytest.mark.parametrize("kind", blackwell_mutants.WAYS)
def test_one_of_each_class(kind):
    mutant = next(m for m in sample() if m.kind == kind)
    assert blackwell_mutants.verdict(mutant), mutant.name


@pytest.mark.exhaustive
def test_all():
    lost = [m.name for m in sample() if not blackwell_mutants.verdict(m)]
    assert len(lost) <= 0.02 * len(sample()), lost


@pytest.mark.long
def test_each_reason_is_needed():
    """Without its reason there would be such a mutant."""
    reasons, blackwell_mutants.EQUIVALENT = blackwell_mutants.EQUIVALENT, {}
    try:
        names = [m.name for found in blackwell_mutants.mutants().values() for m in found]
    finally:
        blackwell_mutants.EQUIVALENT = reasons
    for pattern in reasons:
        assert any(re.search(pattern, name) for name in names), pattern
