"""No false alarm: the race detector is silent on ready kernels, examples and random kernels."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest
from fuzz import generate, kernels, ops

import pallas_mgpu as plgpu
from pallas_mgpu import _kernel

EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").glob("*.py"))
SILENT = dict(detect_races=True, mode="reference")


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


@pytest.mark.parametrize("first", long(*range(0, 400, 40)))
def test_random_kernels(first):
    ran = 0
    for seed in range(first, first + 40):
        case = kernels.Case(generate.generate(seed).source())
        ran += bool(kernels.check(case, ways=("interpret",), seeds=(0, seed), **SILENT))
    assert ran > 20


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
@pytest.mark.parametrize("seed", long(0, *range(1, 32)))
@pytest.mark.filterwarnings("ignore:kernels on host arrays")
def test_examples(monkeypatch, file, seed):
    made = _kernel.Definition.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        timeline = getattr(self.interpret, "timeline", None)
        self.interpret = plgpu.InterpretParams(**SILENT, seed=seed, timeline=timeline)

    monkeypatch.setattr(_kernel.Definition, "__init__", make)
    monkeypatch.setattr(plgpu._races, "_latest", None)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(file), run_name="__main__")
    assert not plgpu.get_races().races_found
