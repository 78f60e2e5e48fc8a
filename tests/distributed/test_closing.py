"""Closing of meshes on the interpreter: what is refused afterwards, what begins anew. With GPUs:
case_mesh_close of runtime/fake_driver.py; with a process group: fake_ranks.py."""

import contextlib
import dataclasses
import pickle
import time

import numpy as np
import pytest
from distributed.meshes import GPUS, gpus, struct

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu.ops import distributed


def make(n=2):
    return plgpu.DeviceMesh((n,), ("closes",))


def to_the_other(x, o, arrived):
    other = 1 - lax.axis_index("closes")
    plgpu.remote_ref(o, other)[...] = x[...]
    pl.semaphore_signal(arrived, device_id=other)
    pl.semaphore_wait(arrived)


SCRATCH = [plgpu.SemaphoreType.REGULAR]
KERNEL = plgpu.kernel(to_the_other, out_type=struct((8,)), scratch_types=SCRATCH, interpret=True)


@pytest.fixture
def xs(rng):
    return [rng.standard_normal(8, np.float32) for _ in range(2)]


def test_calls_after_close(xs):
    mesh = make()
    f = plgpu.spmd(KERNEL, mesh)
    y = f(xs)
    np.testing.assert_array_equal(y[0], xs[1])
    distributed.all_gather(xs, mesh)
    assert not mesh.closed
    mesh.close()
    mesh.close()
    assert mesh.closed
    named = r"the mesh closes=2 was closed; make a new DeviceMesh"
    for call in (
        lambda: f(xs),
        lambda: f(xs, out=y),
        lambda: plgpu.spmd(KERNEL, mesh),
        lambda: plgpu.symm_empty((8,), np.float32, mesh),
        lambda: distributed.all_gather(xs, mesh),
        lambda: distributed.all_reduce(xs, mesh),
        mesh.__enter__,
    ):
        with pytest.raises(RuntimeError, match=named):
            call()
    np.testing.assert_array_equal(y[1], xs[0])  # results stay


def test_equal_meshes_close_together_and_new_ones_begin_anew(xs):
    a, b, other = make(), make(), make(3)
    assert a == b
    a.close()
    assert b.closed and a == b and not other.closed
    c = make()
    assert c != a and not c.closed
    np.testing.assert_array_equal(plgpu.spmd(KERNEL, c)(xs)[1], xs[0])
    assert pickle.loads(pickle.dumps(a)) == c
    b.close()
    assert not c.closed


def test_replace(xs):
    """Of the parameters that make a mesh; the timeout stays."""
    mesh = plgpu.DeviceMesh((2, 3), ("a", "b"))
    assert mesh.replace() == mesh
    other = mesh.replace(shape=(3, 2))
    assert other == plgpu.DeviceMesh((3, 2), ("a", "b")) and other.name == "a=3,b=2"
    assert dataclasses.replace(mesh, axis_names=("c", "d")).axes == (("c", 2), ("d", 3))
    with pytest.raises(ValueError, match="one name for each axis"):
        mesh.replace(shape=(6,))
    with pytest.raises(TypeError, match="nonsense"):
        mesh.replace(nonsense=1)
    mesh = make()
    mesh.close()
    new = mesh.replace()
    assert not new.closed and new.timeout is None
    np.testing.assert_array_equal(plgpu.spmd(KERNEL, new)(xs)[1], xs[0])


def test_with_statement(xs):
    with make() as mesh:
        plgpu.spmd(KERNEL, mesh)(xs)
    assert mesh.closed
    with pytest.raises(ZeroDivisionError), make() as mesh:
        plgpu.spmd(KERNEL, mesh)(xs)
        raise ZeroDivisionError
    assert mesh.closed and not make().closed


def test_after_a_deadlock(xs):
    """A kernel that failed leaves nothing that close waits for."""

    def waits(x, o, arrived):
        pl.semaphore_wait(arrived)
        o[...] = x[...]

    kernel = plgpu.kernel(waits, out_type=struct((8,)), scratch_types=SCRATCH, interpret=True)
    with make() as mesh:
        with pytest.raises(plgpu.DeadlockError):
            plgpu.spmd(kernel, mesh)(xs)
        plgpu.spmd(KERNEL, mesh)(xs)
    assert mesh.closed


def waits_for_ever(x, o, arrived):
    @pl.when(lax.axis_index("closes") == 0)
    def _():
        pl.semaphore_wait(arrived)

    o[...] = x[...]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("raises", [False, True])
def test_kernels_in_flight(xs, raises):
    """Closing waits until the timeout has ended them; an exception ends them at once."""
    timeout = 60 if raises else 2
    mesh = plgpu.DeviceMesh((2,), ("closes",), devices=gpus(2), timeout=timeout)
    on = [plgpu.device_put(x, d) for x, d in zip(xs, mesh.devices)]
    kernel = plgpu.kernel(waits_for_ever, out_type=struct((8,)), scratch_types=SCRATCH)
    f = plgpu.spmd(kernel, mesh)
    expected = pytest.raises(KeyError) if raises else contextlib.nullcontext()
    start = time.time()
    with expected, mesh:
        y = f(on)
        if raises:
            raise KeyError
    assert time.time() - start < 20 and (raises or time.time() - start > 1.5)
    with pytest.raises(RuntimeError, match="was closed"):
        f(on)
    with pytest.raises(plgpu.DeadlockError, match="KeyError" if raises else "timeout of the mesh"):
        y[0].numpy()
    again = plgpu.DeviceMesh((2,), ("closes",), devices=gpus(2), timeout=timeout)
    kernel = plgpu.kernel(to_the_other, out_type=struct((8,)), scratch_types=SCRATCH)
    np.testing.assert_array_equal(plgpu.spmd(kernel, again)(on)[0].numpy(), xs[1])


@pytest.mark.parametrize("options", [{}, {"devices": (0,)}])
def test_memory_needs_a_group(options):
    with pytest.raises(ValueError, match="memory must be one of .*'nvshmem'.* without group"):
        plgpu.DeviceMesh((1,), "d", memory="nvshmem", **options)
