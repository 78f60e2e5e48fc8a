"""No false alarm: no races in ready kernels, examples, documents and random kernels."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from fuzz import generate, kernels, ops

import pallas_mgpu as plgpu
from pallas_mgpu import _kernel

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [
    "README.md",
    *(f"docs/{k}.md" for k in ("language", "arrays", "ops", "profiling", "calling")),
]
SILENT = dict(detect_races=True, mode="reference")


def random_sets():
    """The first seeds of sets of 20, of which a run has one, one with --long three."""
    marks = [[], *[pytest.mark.long] * 2, *[pytest.mark.exhaustive] * 17]
    return [pytest.param(20 * k, marks=m) for k, m in enumerate(marks)]


def long(*first):
    return [first[0], *(pytest.param(k, marks=pytest.mark.long) for k in first[1:])]


@pytest.mark.parametrize("first", long(*range(0, 400, 40)))
def test_ops(first):
    """Random calls of all of `pallas_mgpu.ops`."""
    ran = 0
    for seed in range(first, first + 40):
        params = plgpu.InterpretParams(**SILENT, seed=seed)
        with contextlib.suppress(ops.Unfit):
            ops.check(ops.Call(seed), ("interpret",), params)
            ran += 1
    assert ran > 20


@pytest.mark.parametrize("first", random_sets())
def test_random_kernels(first):
    ran = 0
    for seed in range(first, first + 20):
        case = kernels.Case(generate.generate(seed).source())
        ran += bool(kernels.check(case, ways=("interpret",), seeds=(0, seed), **SILENT))
    assert ran > 10


@pytest.fixture
def checked(monkeypatch):
    """A function that has each kernel made from now on run with the detector under one seed."""
    made = _kernel.Definition.__init__

    def check(seed):
        def make(self, *args, **kwargs):
            made(self, *args, **kwargs)
            timeline = getattr(self.interpret, "timeline", None)
            self.interpret = plgpu.InterpretParams(**SILENT, seed=seed, timeline=timeline)

        plgpu.clear_caches()  # kernels of ops that other tests made have no detector
        monkeypatch.setattr(_kernel.Definition, "__init__", make)
        monkeypatch.setattr(plgpu._races, "_latest", None)

    yield check
    plgpu.clear_caches()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
@pytest.mark.parametrize("seed", long(0, *range(1, 32)))
@pytest.mark.filterwarnings("ignore:kernels on host arrays")
def test_examples(checked, file, seed):
    checked(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(file), run_name="__main__")
    assert not plgpu.get_races().races_found


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", [0, *long(*range(1, 32))])
@pytest.mark.filterwarnings("ignore:kernels on host arrays")
def test_documents(checked, rng, tmp_path, monkeypatch, page, seed):
    """The Python blocks of a page, one after the other, but for those that show a race."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    names = {name: rng.standard_normal((512, 512)).astype(np.float16) for name in "ab"}
    monkeypatch.chdir(tmp_path)
    checked(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        for k, block in enumerate(blocks):
            if "RaceError" not in block:
                exec(compile(block, f"<{page} block {k}>", "exec"), names)  # noqa: S102
    assert not plgpu.get_races().races_found
