"""Random kernels (fuzz/kernels.py): the model in NumPy, the interpreter under several schedules,
the generated program on the CPU and NVRTC's verdict must agree. `fuzz/run_long.py` runs more."""

import pathlib

import pytest
from fuzz import generate, kernels

COUNT, CHUNK = 300, 10
WAYS = ("interpret", "host", "nvrtc")
FIRST = 1_000_000  # seeds of the long runs begin at 0
REGRESSIONS = sorted(pathlib.Path(kernels.__file__).parent.glob("regressions/*.py"))


def agree(source, name, ways):
    try:
        return kernels.check(kernels.Case(source, name), ways=ways)
    except kernels.Failure as e:
        pytest.fail(f"{e}\n\n{source}", pytrace=False)


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, CHUNK))
def test_random_kernels(first):
    ran = [
        agree(generate.generate(seed).source(), f"seed {seed}", WAYS)
        for seed in range(first, first + CHUNK)
    ]
    assert sum(map(len, ran)) >= 0.8 * CHUNK * len(WAYS), "too many kernels meet gaps"


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda p: p.stem)
def test_regressions(path):
    """Small kernels that once failed."""
    assert agree(path.read_text(), path.stem, WAYS)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 60, CHUNK))
def test_random_kernels_on_a_gpu(first):
    for seed in range(first, first + CHUNK):
        agree(generate.generate(seed).source(), f"seed {seed}", ("cuda",))


def test_every_pattern_is_made():
    """The generator reaches what it knows."""
    made = set()
    for seed in range(FIRST, FIRST + COUNT):
        made |= generate.generate(seed).features
    missing = {
        "a in registers", "acc store", "any", "at", "atomic", "barrier test", "broadcast",
        "combining copy", "combining floats", "concatenate", "cond", "copy", "copy out", "delay",
        "dot", "exchange", "fori", "gather", "indexed", "indexed store", "launch", "layout",
        "loop", "masked", "masked store", "math", "mma", "move", "multicast", "narrow",
        "overhang", "own parts", "pad", "peers", "phase", "pipeline", "points", "prefetch", "prod",
        "producer", "reduce", "ring", "scan", "search", "semaphores", "smem", "sort",
        "specialised", "store groups", "switch", "swizzle", "threads", "transpose", "wgmma",
        "wgmma of others", "when", "while", "widened",
    } - made  # fmt: skip
    assert not missing


def test_a_seed_makes_one_kernel():
    assert generate.generate(7).source() == generate.generate(7).source()


def test_the_shrinker_keeps_what_fails(monkeypatch):
    """With a broken interpreter stand-in (sums are one too large), the kernel that remains has
    little but the sum."""
    real = kernels.check

    def broken(case, expected=None, ways=(), seeds=()):
        if ".sum(" in case.source:
            raise kernels.Failure("interpret: wrong result", "a sum")
        return real(case, expected, ways=("interpret",), seeds=(0,))

    monkeypatch.setattr(kernels, "check", broken)
    seed = next(s for s in range(1000) if ".sum(" in generate.generate(s).source())
    program = generate.generate(seed)
    small = kernels.shrink(program, ("interpret",), (0,), budget=300)
    assert ".sum(" in small.source()
    assert len(small.source()) < 0.7 * len(program.source())
