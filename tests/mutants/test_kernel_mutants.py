"""A sample of kernel_mutants.py: kernels of ops and examples with one broken synchronisation, which
the interpreter and the emulated machine must notice. `--long` judges all mutants of each third
kernel, `--exhaustive` all."""

import functools
import re

import kernel_mutants
import pytest
from selection import only_long

KERNELS = {
    "matmul": ["drop barrier_arrive", "one more in flight wgmma_wait", "drop commit_smem"],
    "matmul, cluster": ["of the block alone", "along one axis"],
    "ragged, one step": ["earlier barrier_arrive at _common.py: return self.scheduler.receive"],
    "softmax, cluster": ["generated, relaxed"],
    "layer norm, staged": ["later griddepcontrol_wait", "drop barrier_wait"],
    "producer_consumer.0": ["the phase before|drop barrier_wait", "later barrier_wait"],
    "timeline.1": ["one more in flight wgmma_wait", "one arrival less"],
}


@functools.cache
def kernels():
    return {k.name: k for k in kernel_mutants.kernels()}


def mutants(name):
    kernel = kernels()[name]
    return [*kernel_mutants.mutants(kernel), *kernel_mutants.generated(kernel)]


def missed(found, judges):
    """Those that a judge does not notice."""
    expected = kernel_mutants.results(found[0].kernel, judges)
    out = []
    for m in found:
        graph = kernel_mutants.lowered(m.text)
        for judge in set(judges) & set(kernel_mutants.judges_of(m)):
            if not kernel_mutants.verdict(m, judge, expected[judge], graph):
                out.append((m.name, judge))
    return out


SAMPLE = ["matmul", "softmax, cluster", "timeline.1"]


@pytest.mark.parametrize("name", only_long(KERNELS, *SAMPLE))
def test_a_sample(name):
    """Some mutants, by both judges."""
    found = mutants(name)
    some = [next(m for m in found if re.search(pattern, m.name)) for pattern in KERNELS[name]]
    assert not missed(some, tuple(kernel_mutants.JUDGES))


@pytest.mark.long
def test_the_interpreter_notices_all_but_the_equivalent_ones():
    """One in five, or all where nothing else has that change."""
    seen = set()
    for name in kernels():
        found = []
        for k, m in enumerate(kernel_mutants.mutants(kernels()[name])):
            kind = kernel_mutants.kind_of(m.name)
            if k % 5 == 0 or kind not in seen:
                found.append(m)
            seen.add(kind)
        lost = missed(found, ("interpreter",)) if found else []
        assert not [name for name, _ in lost if not kernel_mutants.reason(name)]


def test_each_reason_is_needed():
    names = [m.name for name in kernels() for m in mutants(name)]
    for pattern in kernel_mutants.EQUIVALENT:
        assert any(re.search(pattern, name) for name in names), pattern
    assert len(names) >= 500 and len(names) == len(set(names))


MOST = 64  # kernels; they are made when a test needs them


@pytest.mark.parametrize(
    "k",
    [
        pytest.param(k, marks=pytest.mark.exhaustive if k % 3 else pytest.mark.long)
        for k in range(MOST)
    ],
)
def test_all(k):
    """What only one judge notices is equivalent on hardware, or misuse that harms nothing there."""
    names = list(kernels())
    assert len(names) <= MOST
    if k >= len(names):
        pytest.skip(f"there are {len(names)} kernels")
    rows = kernel_mutants.judge_kernel((kernels()[names[k]], []))
    lost = [n for n, v in rows if not any(v.values()) and not kernel_mutants.reason(n)]
    assert not lost
    assert sum(v.get("interpreter", "x") is None for n, v in rows if any(v.values())) == 0
