"""What the documents show runs: the README's blocks, the examples, the program of the package."""

import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples(path, capsys):
    """Each example checks itself and prints ok."""
    runpy.run_path(str(path), run_name="__main__")
    assert "ok" in capsys.readouterr().out


def test_readme():
    """The Python blocks of the README, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512)).astype(np.float16) for _ in range(2))
    names = {"a": a, "b": b}
    for k, block in enumerate(blocks):
        path = f"<README block {k}>"
        exec(compile(block, path, "exec"), names)  # noqa: S102
    np.testing.assert_array_equal(names["add_one"](names["x"]), names["x"] + 1)
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert np.linalg.norm(names["matmul"](a, b) - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_program(dtype):
    """`python -m pallas_mgpu` runs its matmul, checks it and says where it ran."""
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "--size", "256", "256", "128", "--dtype", dtype],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    for word in ("backend:", "device:", "TFLOP/s", "relative error", "(ok"):
        assert word in out.stdout
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "--size", "100", "256", "128"],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 2 and "divide" in out.stderr and "Traceback" not in out.stderr


def test_info():
    out = subprocess.run(
        [sys.executable, "-m", "pallas_mgpu", "info"], capture_output=True, text=True
    )
    assert out.returncode == 0 and "NVRTC:" in out.stdout and "cache:" in out.stdout
