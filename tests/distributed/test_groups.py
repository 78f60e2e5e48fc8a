"""Meshes with a process group: on the CPU with stand-ins for CUDA and for symmetric memory
(fake_ranks.py), and by torchrun on GPUs (gpu_ranks.py)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_mgpu as plgpu

HERE = Path(__file__).parent
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")


def run(*command, **env):
    env = {**os.environ, "PYTHONPATH": str(Path(plgpu.__file__).parent.parent), **env}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@needs_torch
def test_two_processes_without_gpus(tmp_path):
    cc = os.environ.get("CC", "gcc").split()
    if not shutil.which(cc[0]):
        pytest.skip("needs a C compiler")
    library = [*cc, "-std=gnu11", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*library, HERE.parent / "runtime" / "fake_cuda.c"], check=True)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]))
    run(HERE / "fake_ranks.py", LD_LIBRARY_PATH=paths, PALLAS_MGPU_BACKEND="auto")
