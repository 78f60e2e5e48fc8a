"""Kernels on meshes of devices: run on the interpreter under several schedules, with the race
detector, while NVRTC compiles the program for sm_90a; the program on the
emulated machine; or on GPUs, of which one may stand for all devices."""

import socket

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core

GPUS = len(_core.system_info()["devices"])
on_gpus = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def gpus(n):
    """A GPU for each device; with fewer of them, the first one stands for all devices."""
    return tuple(range(n)) if n <= GPUS else (0,) * n


def struct(shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def params(seed=0, **options):
    return plgpu.InterpretParams(seed=seed, detect_races=True, on_race="raise", **options)


class Mesh:
    """Runs bodies on a mesh of devices."""

    def __init__(self, shape, names, way="interpret"):
        self.way = way
        devices = gpus(int(np.prod(shape))) if way == "cuda" else None
        self.mesh = plgpu.DeviceMesh(shape, names, devices=devices)

    def kernel(self, body, outs, seed=0, **options):
        if self.way != "cuda":
            backend = "emulate" if self.way == "host" else "interpret"
            options.setdefault("interpret", params(seed, backend=backend))
        return plgpu.kernel(body, out_type=outs, **options)

    def __call__(self, body, outs, *args, seeds=(0, 1, 2), specs=None, compiles=True, **options):
        """The results, the same under all schedules. args: a list for each operand."""
        if self.way == "cuda":
            f = plgpu.spmd(self.kernel(body, outs, **options), self.mesh, specs, specs)
            on = [self.put(a) for a in args]
            return plgpu.tree.map(lambda x: x.numpy(), f(*on))
        first = None
        for seed in seeds:
            f = plgpu.spmd(self.kernel(body, outs, seed, **options), self.mesh, specs, specs)
            got = f(*args)
            first = got if first is None else first
            for x, y in zip(plgpu.tree.leaves(first), plgpu.tree.leaves(got), strict=True):
                np.testing.assert_array_equal(x, y)
        if compiles and self.way == "interpret":
            flat = [a[0] if isinstance(a, list) else a for a in args]
            used = f.lower(*flat).resources()
            assert used["stack_bytes"] == 0 and used["spill_bytes"] == 0, used
        return first

    def put(self, arrays):
        """An operand on its devices."""
        if self.way != "cuda":
            return arrays
        pairs = zip(arrays, self.mesh.devices, strict=True)
        return [plgpu.device_put(np.asarray(x), d) for x, d in pairs]


def shards(rng, n, shape, dtype=np.float32):
    if np.issubdtype(dtype, np.integer):
        return [rng.integers(-99, 99, shape, dtype) for _ in range(n)]
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(n)]
