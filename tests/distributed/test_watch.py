"""Waits for devices that will not signal any more: they end, and later calls say which they were.
The launch path of it is in runtime/fake_driver.py (case_mesh_watch)."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from distributed.meshes import free_port, gpus, struct

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

REGULAR = plgpu.SemaphoreType.REGULAR
LEFT = {"device 1 leaves": True, "all signal": False}


def ring(x, y, words, arrived, leaves, takes):
    """Device 1 may leave without a signal to device 0."""
    me, n = lax.axis_index("d"), lax.axis_size("d")
    flags = plgpu.ext.as_semaphores(words)

    @pl.when(me != (1 if leaves else -1))
    def _():
        pl.semaphore_signal(arrived.at[2], device_id=(me + 1) % n)
        pl.semaphore_signal(flags.at[1, 1], 3, device_id=(me + 1) % n)

    pl.semaphore_wait(arrived.at[2], decrement=takes)
    pl.semaphore_wait(flags.at[1, 1], 3, decrement=takes)
    y[...] = x[...] + jnp.float32(1)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("leaves", LEFT.values(), ids=LEFT)
def test_ended_waits_on_the_emulated_machine(leaves, takes):
    """The kernel runs to its end. Where nobody left, no wait ends early."""
    kernel = plgpu.kernel(
        lambda x, y, words, arrived: ring(x, y, words, arrived, leaves, takes),
        out_type=(struct((64,)), struct((2, 2), np.int32)),
        scratch_types=[REGULAR((4,))],
    )
    f = plgpu.spmd(kernel, plgpu.DeviceMesh((2,), "d"))
    x = [np.full(64, d, np.float32) for d in range(2)]
    outs = [[np.zeros(64, np.float32), np.zeros((2, 2), np.int32)] for _ in range(2)]
    lowered, ended = f.lower(x[0]), []
    if leaves:
        with pytest.raises(host.HostError, match="semaphore to be 1"):
            host.run_mesh(lowered, [[a] for a in x], outs, 0, written=True)
    host.run_mesh(lowered, [[a] for a in x], outs, 1, written=True, ended=ended)
    for d in range(2):
        np.testing.assert_array_equal(outs[d][0], d + 1)
    site, element, value, target = ended[0][:4] if leaves else (0, 2, 0, 1)
    assert (element, value, target) == (2, 0, 1) and ended[1] is None
    assert leaves == (ended[0] is not None)
    sites = host.program(lowered)[1]["sites"]
    assert len(sites) == 2 and "test_watch.py" in sites[site][0]


def test_cost_of_watched_waits():
    """Between two looks at a semaphore stand a count and a test of it: nothing of the host."""
    kernel = plgpu.kernel(
        lambda x, y, words, arrived: ring(x, y, words, arrived, False, False),
        out_type=(struct((64,)), struct((2, 2), np.int32)),
        scratch_types=[REGULAR((4,))],
    )
    f = plgpu.spmd(kernel, plgpu.DeviceMesh((2,), "d"))
    lowered = f.lower(struct((64,)))
    used = lowered.resources()
    assert used["spill_bytes"] == 0 and used["stack_bytes"] == 0 and used["registers"] <= 40, used
    ptx = re.sub(r"\n\s*(//[^\n]*)?(?=\n)", "", lowered.as_text("ptx"))
    look, leave = r"ld\.relaxed\.sys\.global\.u32 (%r\d+), \[%rd\d+\];\s+", r"@%p\d+ bra "
    assert re.search(look + r"setp\.\S+\s+%p\d+, \1, \d+;\s+" + leave, ptx), "the first look"
    count = r"add\.s32\s+(%r\d+), \1, 1;\s+and\.b32\s+(%r\d+), \1, 63;\s+"
    assert re.search(count + r"setp\.ne\.s32\s+%p\d+, \2, 0;\s+" + leave, ptx), "later ones"
    assert "trap" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("takes", [False, True])
def test_a_kernel_that_waits_for_ever(takes):
    """It ends after the timeout, the error says what it waited for, and a new mesh works."""
    kernel = lambda leaves: plgpu.kernel(  # noqa: E731
        lambda x, y, words, arrived: ring(x, y, words, arrived, leaves, takes),
        out_type=(struct((64,)), struct((2, 2), np.int32)),
        scratch_types=[REGULAR((4,))],
    )
    for _ in range(2):
        mesh = plgpu.DeviceMesh((2,), "d", devices=gpus(2), timeout=1)
        x, words = (
            [plgpu.device_put(a, d) for d in mesh.devices]
            for a in (np.zeros(64, np.float32), np.zeros((2, 2), np.int32))
        )
        y, _ = plgpu.spmd(kernel(False), mesh)(x, out=(None, words))
        assert (y[1].numpy() == 1).all()
        f = plgpu.spmd(kernel(True), mesh)
        start = time.time()
        y, _ = f(x, out=(None, words))
        with pytest.raises(plgpu.DeadlockError, match="lasted longer than the timeout") as e:
            y[0].numpy()
        assert 0.9 < time.time() - start < 10
        text = r"rank 0, kernel \w+: semaphore_wait of element 2 of .*, which is 0, for 1 or more"
        assert re.search(text, str(e.value)) and "test_watch.py:" in str(e.value)
        with pytest.raises(plgpu.DeadlockError, match="Make a new DeviceMesh"):
            f(x, out=(None, words))


RANK = """
import os, sys, time
import torch.distributed as dist
import pallas_mgpu as plgpu

dist.init_process_group("gloo")
mesh = plgpu.DeviceMesh((3,), "x", group=True, timeout=0)
dist.barrier()
rank = dist.get_rank()
if rank == 1:
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
f = plgpu.spmd(plgpu.kernel(lambda y: None, out_type=plgpu.ShapeDtypeStruct((4,), "float32")), mesh)
start = time.time()
while time.time() - start < 30:
    time.sleep(0.05)
    try:
        f()
    except plgpu.DeadlockError as e:
        print(f"rank {rank} raised: {e}", flush=True)
        mesh.close()
        try:
            f()
        except RuntimeError as e:
            print(f"then: {e}", flush=True)
        break
    except Exception:  # there is no GPU
        pass
os._exit(0)
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
def test_a_killed_process():
    """torchrun's processes, of which one is killed: the others know it at once."""
    command = [sys.executable, "-c", RANK]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    try:
        pid = int(ranks[1].stdout.readline().split()[1])
        os.kill(pid, signal.SIGKILL)
        start = time.time()
        for r in (0, 2):
            text = ranks[r].communicate(timeout=60)[0]
            assert f"rank {r} raised: the mesh of 3 devices cannot be used any more" in text
            assert f"the process of rank 1 ({pid}) has ended" in text
            assert re.search("then: the mesh x=3 of group .* was closed", text)
        assert time.time() - start < 10
    finally:
        for p in ranks:
            p.kill()
            p.wait()
