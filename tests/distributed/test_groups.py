"""Meshes with a process group: on the CPU with stand-ins for CUDA and for symmetric memory
(fake_ranks.py), and by torchrun on GPUs (gpu_ranks.py)."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed.meshes import GPUS, free_port

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


two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_torch
@two_gpus
@pytest.mark.parametrize(
    "cases", ["collectives products graphs", "engine", "closing late", "nvshmem"]
)
def test_torchrun(cases):
    """A process for each GPU of the machine; processes take long to start, so some cases share
    them."""
    if cases == "nvshmem":
        pytest.importorskip("nvshmem.core")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", GPUS, "--standalone"]
    run(*torchrun, HERE / "gpu_ranks.py", *cases.split())


@pytest.mark.gpu
@needs_torch
@two_gpus
def test_a_killed_rank():
    """The ranks, one for each GPU, are started here: torchrun would end the others by itself."""
    env = {**os.environ, "PYTHONPATH": str(Path(plgpu.__file__).parent.parent)}
    env |= {"WORLD_SIZE": str(GPUS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, HERE / "gpu_ranks.py", "killed"]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}) for r in range(GPUS)]
    try:
        assert ranks[1].wait(120) == -9
        end = time.monotonic() + 15
        for rank in [ranks[0], *ranks[2:]]:
            assert rank.wait(max(end - time.monotonic(), 0)) == 0
    finally:
        for p in ranks:
            p.kill()
            p.wait()
