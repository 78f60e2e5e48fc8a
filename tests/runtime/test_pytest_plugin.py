"""The plugin of pytest: cases, options, what is printed; the files that the documents show."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pallas_mgpu import _core
from pallas_mgpu.machine import run as machine

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent.parent
NAME = "pallas_mgpu.pytest_plugin"
FAST = [x for n in ("xdist", "hypothesispytest", "cacheprovider") for x in ("-p", f"no:{n}")]
SOURCE = """
import numpy as np
import pytest
import pallas_mgpu as plgpu
from pallas_mgpu import lax

X = np.arange(64, dtype=np.float32)


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((64,), np.float32))
def double(x, o):
    o[...] = x[...] * 2


def swap(x, o, tile):
    t = lax.axis_index("t")
    tile[t] = x[...] + t
    o[t] = tile[1 - t]


swap = plgpu.kernel(
    swap, out_type=plgpu.ShapeDtypeStruct((2, 64), np.float32), num_threads=2, thread_name="t",
    scratch_types=[plgpu.SMEM((2, 64), np.float32)],
)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a file with the source above in front."""
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "auto")

    def run(text, *options):
        pytester.makepyfile(test_it=SOURCE + text)
        return pytester.runpytest_inprocess("-p", NAME, *FAST, "-rs", *options)

    return run


ON_GPU = _core.system_info()["device"] >= 0


def test_the_entry_point():
    """pyproject.toml names the module, under its own name: -p of it means the same plugin."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    point = metadata.EntryPoint(NAME, project["entry-points"]["pytest11"][NAME], "pytest11")
    assert callable(point.load().check_kernel)


def test_a_case_for_each_backend(run):
    text = """
@pytest.mark.pallas(seeds=3)
def test_double(check_kernel):
    np.testing.assert_array_equal(check_kernel(double, X, ref=lambda x: x * 2), X * 2)


@pytest.mark.pallas(seeds=(4, 5), backends="interpret")
class TestAll:
    @pytest.mark.parametrize("factor", [2, 3])
    def test_more(self, check_kernel, factor):
        check_kernel(double, factor * X, ref=2 * factor * X)
"""
    result = run(text, "-v", "--strict-markers")
    result.assert_outcomes(passed=4 + ON_GPU, skipped=1 - ON_GPU)
    names = re.findall(r"::(\S+) (PASSED|SKIPPED)", result.stdout.str())
    assert [n for n, _ in names[:3]] == [
        f"test_double[{b}]" for b in ("interpret", "emulate", "cuda")
    ]
    assert ON_GPU or re.search("no GPU: .+", result.stdout.str())


def test_a_failure_prints_the_command_that_repeats_it(run):
    text = """
def test_swap(check_kernel):
    check_kernel(swap, X)


def test_double(check_kernel):
    check_kernel(double, X, ref=X)
"""
    result = run(text, "--kernel-backends=interpret")
    result.assert_outcomes(failed=2)
    lines = re.findall(r"^pytest .*", result.stdout.str(), re.M)
    assert lines[0].startswith(
        "pytest 'test_it.py::test_swap[interpret]' --kernel-seeds=0,  # Race"
    )
    assert lines[1].endswith("test_double[interpret]' --kernel-seeds=0,  # AssertionError")
    again = lines[0].partition("  #")[0].replace("'", "").split()[1:]
    result = run(text, *again)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RACE DETECTED on 'tile' in SMEM*"])


def test_a_failure_shows_the_test_and_the_report(run, pytester, monkeypatch):
    """Without frames of the package; the command fits the directory that pytest ran in."""
    text = "def test_swap(check_kernel):\n    check_kernel(swap, X)"
    shown = run(text, "--kernel-backends=interpret").stdout.str()
    assert re.search(r"^> +check_kernel\(swap, X\)", shown, re.M)
    assert "_testing.py" not in shown
    assert "_testing.py" in run(text, "--kernel-backends=interpret", "--full-trace").stdout.str()
    monkeypatch.chdir(pytester.mkdir("below"))
    below = run(text, "--kernel-backends=interpret", "../test_it.py").stdout.str()
    assert "pytest '../test_it.py::test_swap[interpret]' --kernel-seeds=0," in below


def test_seeds_that_are_asked_for(run):
    text = """
def test_seeds(check_kernel, monkeypatch):
    from pallas_mgpu import _testing
    at, seen = _testing._Schedules.at, []
    monkeypatch.setattr(
        _testing._Schedules, "at", lambda self, seed: seen.append(seed) or at(self, seed)
    )
    check_kernel(double, X)
    print("seeds", seen)
"""
    for given, want in {"3": [0, 1, 2], "3,": [3]}.items():
        result = run(text, "-s", "--kernel-backends=interpret", f"--kernel-seeds={given}")
        result.stdout.fnmatch_lines([f"*seeds {want}*".replace("[", "[[]")])


WRONG = {
    "--kernel-seeds: a number of schedules (20) or seeds (3, or 0,7), got x": ["--kernel-seeds=x"],
    "--kernel-backends: backends are some of": ["--kernel-backends=gpu"],
}
MARKED = {  # what is wrong, the marker
    "takes seeds= and backends=, got {'seed': 3}": "seed=3",
    "seeds must be an int or ints, got 2.5": "seeds=2.5",
    "backends are some of": "backends=7",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options(run, text):
    result = run("def test_it(check_kernel):\n    check_kernel(double, X)", *WRONG[text])
    assert result.ret != 0 and text in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("text", MARKED)
def test_wrong_markers(run, text):
    marker = f"@pytest.mark.pallas({MARKED[text]})"
    shown = run(f"{marker}\ndef test_it(check_kernel):\n    check_kernel(double, X)").stdout.str()
    assert text in shown and "pytest_plugin.py" not in shown


def test_without_a_compiler(run, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(machine, "compiler", machine.compiler.__wrapped__)
    result = run("def test_it(check_kernel):\n    check_kernel(double, X, ref=2 * X)")
    result.assert_outcomes(passed=1 + ON_GPU, skipped=2 - ON_GPU)
    result.stdout.fnmatch_lines(["*needs g++*no-such-compiler was not found*"])


@pytest.mark.parametrize("page", ["README.md", "docs/checking.md"])
def test_the_file_that_a_page_shows(page, pytester):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    (shown,) = (b for b in blocks if "(check_kernel)" in b)
    imports = "import numpy as np\nimport pallas_mgpu as plgpu\n"
    pytester.makepyfile(test_double=imports + shown)
    result = pytester.runpytest_inprocess("-p", NAME, *FAST)
    result.assert_outcomes(passed=2 + ON_GPU, skipped=1 - ON_GPU)


def test_it_costs_little_without_such_tests():
    """Loading the plugin imports neither testing nor the emulated machine."""
    code = (
        f"import sys, {NAME}; there = sys.modules;"
        " print([m for m in there if 'pallas_mgpu.machine' in m or '_testing' in m])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "pallas_mgpu" not in out.stdout, out.stdout + out.stderr
