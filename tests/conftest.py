"""One set of cases, several ways to run them.

`run(body, outs, *args, **kernel_options)` runs a kernel and returns NumPy results. Way
"interpret" runs it on the CPU interpreter and also has NVRTC compile the generated program for
sm_90a, whose log must be clean; way "host" runs the generated program on the CPU, on the emulated
machine of tests/host; way "cuda" (marked gpu) runs it on a GPU."""

import os
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core

sys.path.insert(0, str(Path(__file__).parent))
from host import run as host  # noqa: E402

SCHEDULES = int(os.environ.get("HOST_SCHEDULES", 3))  # of every case of way "host"


def pytest_collection_modifyitems(items):
    found = _core.system_info()
    if found["device"] >= 0:
        return
    why = found["no_gpu"]
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {why}"))


def pytest_terminal_summary(terminalreporter):
    """How many cases each way of running had."""
    counts = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            name = report.nodeid.partition("[")[2]
            for way in ("interpret", "host", "cuda"):
                if re.search(rf"\b{way}\b", name) and (
                    report.when == "call" or outcome != "passed"
                ):
                    counts.setdefault(way, {}).setdefault(outcome, []).append(name)
    for way, found in counts.items():
        text = ", ".join(f"{len(names)} {outcome}" for outcome, names in found.items())
        terminalreporter.write_line(f"way {way}: {text}")


def shape_of(x):
    return plgpu.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, np.ndarray) else x


class Runner:
    def __init__(self, way, seed=0):
        self.way = way
        self.seed = seed  # of the schedule

    def kernel(self, body, outs, **options):
        outs = plgpu.tree.map(shape_of, outs)
        if self.way != "cuda":
            options.setdefault("interpret", True)
        return plgpu.kernel(body, out_type=outs, **options)

    def call(self, kernel, *args, spills=0):
        """Run; nested containers of NumPy arrays are fine."""
        args = [plgpu.tree.map(np.asarray, a) for a in args]
        if self.way == "cuda":
            args = [plgpu.tree.map(plgpu.device_put, a) for a in args]
            result = kernel(*args)
            return plgpu.tree.map(
                lambda x: x.numpy() if isinstance(x, plgpu.DeviceArray) else x, result
            )
        lowered = kernel.lower(*args)
        if self.way == "host":
            return self.call_host(kernel, lowered, args)
        used = lowered.resources()
        assert used["spill_bytes"] <= spills, used
        assert used["stack_bytes"] == 0 or spills or "printf(" in lowered.as_text("cuda"), used
        assert used["remarks"] == "" or "C75" not in used["remarks"], used
        return kernel(*args)

    def call_host(self, kernel, lowered, args):
        """Several schedules, which must give the same bits."""
        like = kernel(*args)  # by the interpreter: the structure of the results
        operands = [np.asarray(x, order="C") for x in plgpu.tree.leaves(args)]
        first = None
        for seed in range(self.seed, self.seed + SCHEDULES):
            results = [np.empty_like(x) for x in plgpu.tree.leaves(like)]
            printed = host.run(lowered, operands, results, seed)
            first = first or (results, printed)
            for a, b in zip(first[0], results, strict=True):
                assert a.tobytes() == b.tobytes(), f"seeds {self.seed} and {seed} differ"
        sys.stdout.write(first[1])
        return plgpu.tree.unflatten(plgpu.tree.structure(like), first[0])

    def __call__(self, body, outs, *args, spills=0, **options):
        return self.call(self.kernel(body, outs, **options), *args, spills=spills)


@pytest.fixture(params=["interpret", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    return Runner(request.param, zlib.crc32(request.node.name.encode()))


@pytest.fixture
def rng(request):
    """Random numbers, seeded by the name of the test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def here(offset=0):
    """(file, line) of the caller, for checking where errors point."""
    frame = sys._getframe(1)
    return frame.f_code.co_filename, frame.f_lineno + offset
