"""One set of cases, several ways to run them.

`run(body, outs, *args, **kernel_options)` runs a kernel and returns NumPy results. Way
"interpret" runs it on the CPU interpreter and also has NVRTC compile the generated program for
sm_90a, whose log must be clean (of some cases only, see selection.py); way "host"
runs the generated program on the CPU, on the emulated machine of pallas_mgpu/machine; way "cuda"
(marked gpu) runs it on a GPU."""

import gc
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
import selection  # noqa: E402
from compiler import sass  # noqa: E402

from pallas_mgpu.machine import run as host
from pallas_mgpu.ops import _open_rows

# JAX would take three quarters of the GPU's memory in each process of the tests
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# there is a process for each processor
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if tool := sass.nvdisasm():  # the package looks for it beside NVRTC, which may lie elsewhere
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(tool)])


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run what is marked long")
    parser.addoption("--exhaustive", action="store_true", help="run everything: takes hours")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    processes = selection.workers(config)
    if processes is not None:
        config.option.numprocesses, config.option.dist = processes, "loadgroup"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    found = _core.system_info()
    on_gpu = found["device"] >= 0
    selection.keep_together(items, on_gpu)
    selection.leave_out(config, items)
    selection.compile_some(config, items)
    for item in items:
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {found['no_gpu']}"))


def pytest_collection_finish():
    """Thousands of tests are not looked through for garbage again and again."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True)
def each_number_of_rows_has_a_program(request, monkeypatch):
    """What a test of ops runs does not depend on the tests before it; test_open_rows.py has
    programs for many numbers of rows."""
    if request.path.name != "test_open_rows.py":
        monkeypatch.setattr(_open_rows, "STATIC", 1 << 30)


def shape_of(x):
    return plgpu.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, np.ndarray) else x


class Runner:
    def __init__(self, way, seed, schedules, compiles):
        self.way, self.compiles = way, compiles
        self.seeds = range(seed, seed + schedules)  # of the schedules of way "host"

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
        if not self.compiles:
            lowered.as_text("cuda")
            return kernel(*args)
        used = lowered.resources()
        assert used["spill_bytes"] <= spills, used
        # exact sin, cos and tan reduce large arguments on a stack with some compilers
        on_stack = re.search(r"\b(?:printf|sinf|cosf|tanf)\(", lowered.as_text("cuda"))
        assert used["stack_bytes"] == 0 or spills or on_stack, used
        assert used["remarks"] == "" or "C75" not in used["remarks"], used
        return kernel(*args)

    def call_host(self, kernel, lowered, args):
        """One schedule, or two, which must give the same bits."""
        like = kernel(*args)  # by the interpreter: the structure of the results
        operands = [np.asarray(x, order="C") for x in plgpu.tree.leaves(args)]
        first = None
        for seed in self.seeds:
            results = [np.empty_like(x) for x in plgpu.tree.leaves(like)]
            printed = host.run(lowered, operands, results, seed)
            first = first or (results, printed)
            for a, b in zip(first[0], results, strict=True):
                assert a.tobytes() == b.tobytes(), f"seeds {self.seeds[0]} and {seed} differ"
        sys.stdout.write(first[1])
        return plgpu.tree.unflatten(plgpu.tree.structure(like), first[0])

    def __call__(self, body, outs, *args, spills=0, **options):
        return self.call(self.kernel(body, outs, **options), *args, spills=spills)


@pytest.fixture(params=["interpret", "host", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    seed = zlib.crc32(request.node.name.encode())
    compiles = request.node.stash.get(selection.COMPILES, False)
    return Runner(request.param, seed, 2 if request.config.option.exhaustive else 1, compiles)


@pytest.fixture
def some(request):
    """some(cases): the first of them; with --long one that the test's name picks, with --exhaustive
    all."""
    option, name = request.config.option, request.node.name

    def some(cases):
        cases = list(cases)
        if not option.exhaustive:
            k = zlib.crc32(name.encode()) % len(cases) if option.long else 0
            cases = cases[k : k + 1]
        return cases

    return some


@pytest.fixture
def rng(request):
    """Random numbers, seeded by the name of the test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def here(offset=0):
    """(file, line) of the caller, for checking where errors point."""
    frame = sys._getframe(1)
    return frame.f_code.co_filename, frame.f_lineno + offset


@pytest.fixture
def one_sm(monkeypatch):
    """A GPU of one SM, so that there are more tiles than SMs: gradients of attention convert dQ in
    blocks that have none."""
    monkeypatch.setattr(plgpu, "sm_count", lambda device=None: 1)
    plgpu.clear_caches()
    yield
    plgpu.clear_caches()
