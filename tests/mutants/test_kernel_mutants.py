"""A sample of kernel_mutants.py: kernels of ops and examples with one broken synchronisation, which
the interpreter and the emulated machine must notice. `--long` judges one in twenty of each kind of
change that is not known to be equivalent, `--exhaustive` all."""

import collections
import functools
import re

import kernel_mutants
import pytest
from selection import only_long

KERNELS = {
    "matmul": ["drop barrier_arrive", "one more in flight wgmma_wait", "drop commit_smem"],
    "matmul, cluster": ["of the block alone", "along one axis"],
    "ragged, one step": ["earlier barrier_arrive at _common.py: return self.scheduler.receive"],
    "softmax, cluster": ["later barrier_wait", "one arrival less"],
    "layer norm, staged": ["later griddepcontrol_wait", "drop barrier_wait"],
    "producer_consumer.0": ["the phase before|drop barrier_wait", "later barrier_wait"],
    "timeline.1": ["one more in flight wgmma_wait", "one arrival less"],
}


@functools.cache
def kernels():
    return {k.name: k for k in kernel_mutants.kernels()}


@functools.cache
def all_mutants(name):
    return kernel_mutants.all_mutants(kernels()[name])


@functools.cache
def some_of_each_kind():
    """Kernel -> of its mutants those that make one in twenty of each kind in all kernels, or else
    its first one. Those that neither judge can notice take longest, and are left out."""
    found, counts = {}, collections.Counter()
    for name in kernels():
        wrong = [m for m in all_mutants(name) if not kernel_mutants.reason(m.name)]
        for m in wrong:
            kind = kernel_mutants.kind_of(m.name)
            if counts[kind] % 20 == 0:
                found.setdefault(name, []).append(m)
            counts[kind] += 1
        found.setdefault(name, wrong[:1])
    return found


def missed(found, judges):
    """Those that a judge does not notice."""
    expected = kernel_mutants.results(found[0].kernel, judges, seeds=(0,))
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
    found = all_mutants(name)
    some = [next(m for m in found if re.search(pattern, m.name)) for pattern in KERNELS[name]]
    assert not missed(some, tuple(kernel_mutants.JUDGES))


def test_each_reason_is_needed():
    names = [m.name for name in kernels() for m in all_mutants(name)]
    for pattern in kernel_mutants.EQUIVALENT:
        assert any(re.search(pattern, name) for name in names), pattern
    assert len(names) >= 500 and len(names) == len(set(names))


MOST = 72  # kernels; they are made when a test needs them


def name_of(k):
    names = list(kernels())
    assert len(names) <= MOST
    if k >= len(names):
        pytest.skip(f"there are {len(names)} kernels")
    return names[k]


def check(rows):
    """What only one judge notices is equivalent on hardware, or misuse that harms nothing there."""
    lost = [n for n, v in rows if not any(v.values()) and not kernel_mutants.reason(n)]
    assert not lost
    assert sum(v.get("interpreter", "x") is None for n, v in rows if any(v.values())) == 0


@pytest.mark.parametrize("k", only_long(range(MOST), every=2))
def test_some_of_each_kind(k):
    check(kernel_mutants.judge(some_of_each_kind()[name_of(k)], seeds=(0,)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", range(MOST))
def test_all(k):
    check(kernel_mutants.judge_kernel((kernels()[name_of(k)], [])))
