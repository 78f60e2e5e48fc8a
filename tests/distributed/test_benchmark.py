"""Protects benchmarks/bench_distributed.py, which seldom meets GPUs: each of its sections runs on
the interpreter, with right results."""

import json
import pathlib
import subprocess
import sys

import pytest

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_distributed.py"


@pytest.mark.long
def test_every_section_runs(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, PATH, "--dry", "--seconds", "240", "--json", found]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(found.read_text())["rows"]
    tables = {r["table"] for r in rows if r["seconds"][0] > 0}
    sys.path.insert(0, str(PATH.parent))
    try:
        import bench_distributed
    finally:
        sys.path.remove(str(PATH.parent))
    timed = set(bench_distributed.SECTIONS) - {"many_launches"}  # has no times
    assert tables == {*timed, "one process"}
