"""plgpu.autotune finds the fastest, whatever else hangs, dies or is wrong, and remembers it."""

import functools
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _autotune

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TUNED_HANGS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    module = importlib.import_module("tuned")
    module.EVENTS.clear()
    module.add_one.best.clear()
    return module


@pytest.mark.long
def test_finds_the_fastest_and_remembers(tuned):
    x = np.arange(5.0)
    np.testing.assert_array_equal(tuned.add_one(x), x + 1)
    assert tuned.add_one.tune(x) == "fast"
    events = {e["config"]: e for e in tuned.EVENTS if e["event"] == "run"}
    statuses = {c: e["status"] for c, e in events.items()}
    assert statuses == {
        "slow": "ok",
        "near": "ok",
        "fast": "ok",
        "hangs": "hung",
        "raises": "failed",
        "dies": "failed",
        "wrong": "wrong",
    }
    assert "ZeroDivisionError: as intended" in events["raises"]["why"]
    assert "code 7" in events["dies"]["why"]
    tuned.EVENTS.clear()
    tuned.add_one.best.clear()  # as a new process
    assert tuned.add_one.tune(x) == "fast" and not tuned.EVENTS


def test_arrays_are_sent_once_for_all_rounds(tuned, monkeypatch):
    """Candidates may write them, so each one that is checked gets them anew."""
    sent, send = [], _autotune._send

    def record(connection, x):
        sent.append(x[:1] + (x[2] is not None,))
        send(connection, x)

    monkeypatch.setattr(_autotune, "_send", record)
    monkeypatch.setattr(tuned.add_one, "configs", ["slow", "near", "fast"])
    assert tuned.add_one.tune(np.arange(7.0)) == "fast"
    assert sent.count(("run", True)) == 3 and sent.count(("time", True)) == 1
    assert sent.count(("time", False)) >= 4 and ("run", False) not in sent


def test_other_shapes_are_tuned_anew_and_interrupted_tuning_resumes(tuned, monkeypatch):
    monkeypatch.delenv("TUNED_HANGS")
    x = np.ones(3, np.float32)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(type(tuned.add_one), "_time", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tuned.add_one.tune(x)
    assert len(tuned.EVENTS) == 7
    tuned.EVENTS.clear()
    assert tuned.add_one.tune(x) == "fast"
    assert [e["event"] for e in tuned.EVENTS] == ["best"]
    (record,) = (Path(os.environ["PALLAS_MGPU_CACHE_DIR"]) / "autotune").glob("*.json")
    record.write_text(record.read_text().replace('"candidates"', '"damaged"'))
    tuned.EVENTS.clear()
    tuned.add_one.best.clear()
    assert tuned.add_one.tune(x) == "fast" and len(tuned.EVENTS) == 8


def test_what_hangs_ends_with_the_process_that_tunes(tuned, tmp_path):
    """Also if that is killed, and so kills nothing."""
    path = tmp_path / "pid"
    code = "import numpy, tuned; tuned.add_one.configs = ['hangs', 'fast']; tuned.add_one.timeout ="
    env = os.environ | {"TUNED_PID": str(path)}
    process = subprocess.Popen([sys.executable, "-c", f"{code} 99; tuned.add_one(1)"], env=env)
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    stat = Path(f"/proc/{path.read_text()}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":  # nobody may wait for it
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_imports_are_not_the_time_of_a_candidate(tuned, monkeypatch):
    monkeypatch.setenv("TUNED_IMPORTS", "3")
    monkeypatch.setattr(tuned.add_one, "timeout", 2.5)
    monkeypatch.setattr(tuned.add_one, "configs", ["fast", "near"])
    assert tuned.add_one.tune(np.zeros(2)) == "fast"
    assert [e["status"] for e in tuned.EVENTS if e["event"] == "run"] == ["ok", "ok"]


def test_another_version_is_tuned_anew(tuned, monkeypatch):
    monkeypatch.setattr(tuned.add_one, "configs", ["fast", "near"])
    events = []
    for version in ("1.0", "1.0", "2.0"):
        monkeypatch.setattr(plgpu, "__version__", version)
        tuned.add_one.best.clear()
        tuned.EVENTS.clear()
        tuned.add_one.tune(np.zeros(2))
        events.append(len(tuned.EVENTS))
    assert events == [3, 0, 3]


SCRIPT = """
from typing import NamedTuple
import pallas_mgpu as plgpu

class Config(NamedTuple):
    factor: int

def timer(f):
    return f.keywords["config"].factor * (1 + 0.01 * f.keywords["scale"])

broken = False

@plgpu.autotune([Config(1), Config(2), Config(3)], timer=timer, workers=1)
def product(x, *, scale, config):
    global broken
    broken |= config.factor == 1
    if broken:
        raise RuntimeError("the GPU cannot be used any more")
    return x * scale

print("before")
print(product(2, scale=5), product.tune(2, scale=5))
"""


def test_a_script_calls_what_it_tunes(tmp_path):
    """Without a guard: children execute it as far as the call. An error that may leave the GPU
    unusable ends a child."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PALLAS_MGPU_CACHE_DIR": str(tmp_path)}
    for times in (3, 1):  # two children and the script; then the answer is known
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines.count("before") == times and lines[-1] == "10 Config(factor=2)"


def test_what_children_cannot_load(tuned, monkeypatch, tmp_path):
    def local(x, *, config):
        return x

    with pytest.raises(TypeError, match="local is defined in a function, which child processes"):
        plgpu.autotune([1, 2])(local)(1)
    monkeypatch.setattr(tuned.add_one, "__qualname__", "EVENTS")
    with pytest.raises(RuntimeError, match=r"could load tuned.EVENTS: TypeError: .* is \[\]"):
        tuned.add_one(np.zeros(4))
    assert not tuned.EVENTS  # nothing is remembered of candidates


def test_work_of_the_host_is_told(monkeypatch):
    info = {**plgpu._core.system_info(), "device": 0}
    monkeypatch.setattr(plgpu._core, "system_info", lambda: info)
    with pytest.warns(UserWarning, match="work of the host"):
        assert _autotune.host_timer(lambda: time.sleep(3e-3), 1e-3) >= 3e-3


def test_errors():
    with pytest.raises(ValueError, match="configs must be different ones"):
        plgpu.autotune([1, 1])
    with pytest.raises(ValueError, match="<object object at .*> has another one in each process"):
        plgpu.autotune([object(), 1])
    with pytest.raises(ValueError, match="timeout, workers and rounds must be positive"):
        plgpu.autotune([1], rounds=0)
    with pytest.raises(TypeError, match="expected a function, got 3"):
        plgpu.autotune([1])(3)
    with pytest.raises(TypeError, match="expected a function, got functools.partial"):
        plgpu.autotune([1])(functools.partial(min, 3))
    with pytest.raises(TypeError, match="wraps has no argument config="):
        plgpu.autotune([1])(functools.wraps)
    none = plgpu.autotune([1, 2], prune=lambda c, x: False)(lambda x, config: x)
    with pytest.raises(ValueError, match="prune leaves no configuration"):
        none(1)
    with pytest.raises(TypeError, match="chooses config itself; .*__wrapped__ takes one"):
        none(1, config=2)
    assert none.__wrapped__(1, config=2) == 1
