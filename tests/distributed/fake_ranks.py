"""Two processes of a group without GPUs: `python fake_ranks.py`, with the stand-in for libcuda
(runtime/fake_cuda.c) first in LD_LIBRARY_PATH; test_groups.py does that.

Processes meet by gloo. Device memory is one piece of memory that both share at one address, and
stands for PyTorch's symmetric memory and for NVSHMEM's heap; tensors are stand-ins, too. Launches
call Python functions that do what the kernels would."""

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import threading
import types
import weakref

import numpy as np
import torch
import torch.distributed as dist

import pallas_mgpu as plgpu
from pallas_mgpu import _spmd, _symmetric, lax
from pallas_mgpu.ops import distributed

N, HALF = 2, 1 << 20
ARENA = mmap.mmap(-1, N * HALF)
BASE = ctypes.addressof(ctypes.c_char.from_buffer(ARENA))


def meet():
    """A barrier that asks PyTorch for no device."""
    dist.all_gather_object([None] * N, 0)


class Tensor:
    """A CUDA tensor of the stand-in: a piece of the memory of its rank."""

    used, is_cuda = 0, True

    def __init__(self, shape, dtype, rank):
        self.shape, self.dtype, self.rank = tuple(shape), dtype, rank
        size = -(-max(self.numel() * self.element_size(), 1) // 256) * 256
        self.at, Tensor.used = BASE + rank * HALF + Tensor.used, Tensor.used + size
        assert Tensor.used <= HALF
        self.storage = Storage()

    def numel(self):
        return int(np.prod(self.shape))

    def element_size(self):
        return self.host_dtype().itemsize

    def host_dtype(self):
        return np.dtype(str(self.dtype).removeprefix("torch."))

    def data_ptr(self):
        return self.at

    def untyped_storage(self):
        return self.storage

    @property
    def host(self):
        raw = (ctypes.c_uint8 * (self.numel() * self.element_size())).from_address(self.at)
        return np.frombuffer(raw, self.host_dtype()).reshape(self.shape)

    @property
    def __cuda_array_interface__(self):
        kind = self.host_dtype().str
        return {"shape": self.shape, "typestr": kind, "data": (self.at, False), "version": 3}

    def copy_(self, other):
        self.host[...] = other.host
        return self

    def view(self, how):
        """Of another dtype, or another shape."""
        x = Tensor.__new__(Tensor)
        x.__dict__.update(self.__dict__)
        if isinstance(how, tuple):
            x.shape = how
        else:
            x.dtype = how
            x.shape = (self.numel() * self.element_size() // x.element_size(),)
        return x

    def __getitem__(self, part):
        assert part.start is None and part.step is None and len(self.shape) == 1
        return self.view((min(part.stop, self.numel()),))

    def zero_(self):
        self.host[...] = 0
        return self

    def clone(self):
        return self.new_empty(self.shape, self.dtype).copy_(self)

    def new_empty(self, shape, dtype):
        return Tensor(shape, dtype, self.rank)


class Storage:
    """Lives as long as the memory of a tensor."""


class Handle:
    multicast_ptr = 0

    def __init__(self, x, rank):
        self.rank, offset = rank, x.at - BASE - rank * HALF
        everyone = [None] * N
        dist.all_gather_object(everyone, offset)
        self.buffer_ptrs = [BASE + r * HALF + at for r, at in enumerate(everyone)]

    def barrier(self, channel=0, timeout_ms=0):
        meet()


class Nvshmem(types.ModuleType):
    """nvshmem.core, whose processing elements are the ranks in reverse order if the program has
    initialised it."""

    InitStatus = types.SimpleNamespace(STATUS_IS_INITIALIZED=2)
    Teams = types.SimpleNamespace(TEAM_WORLD=0)
    NvshmemError = type("NvshmemError", (Exception,), {})
    NvshmemInvalid = type("NvshmemInvalid", (Exception,), {})
    NvshmemStream = staticmethod(lambda stream: ("stream", stream))

    def __init__(self, rank):
        super().__init__("nvshmem.core")
        self.rank, self.pe, self.elements, self.kept = rank, None, N, []
        self.unreachable = False

    def init_status(self):
        return 0 if self.pe is None else 2

    def get_unique_id(self, empty=False):
        data = np.zeros(1, [("version", np.int32), ("internal", np.int8, 124)])
        if not empty:
            data["internal"] = 7
        return types.SimpleNamespace(_data=data)

    def init(self, *, device, uid, rank, nranks, initializer_method):
        assert (rank, nranks, initializer_method) == (self.rank, N, "uid")
        assert (uid._data["internal"] == 7).all() and device.current
        assert os.environ["NVSHMEM_DISABLE_NVLS"]
        self.pe = rank

    def my_pe(self):
        return self.pe

    def n_pes(self):
        return self.elements

    def buffer(self, size):
        x = Tensor((size,), torch.int8, self.rank)

        def tensor():
            made = x.view(x.dtype)
            made.storage = Storage()
            return made

        everyone = [None] * N
        dist.all_gather_object(everyone, (self.pe, size, x.at))
        assert {s for _, s, _ in everyone} == {size}
        made = types.SimpleNamespace(
            handle=x.at, tensor=tensor, everywhere={p: at for p, _, at in everyone}
        )
        self.kept.append(made)
        return made

    def get_peer_buffer(self, buffer, pe):
        assert pe != self.pe
        if self.unreachable:
            raise self.NvshmemError("no peer")
        return types.SimpleNamespace(handle=buffer.everywhere[pe])

    def get_multicast_buffer(self, team, buffer):
        raise self.NvshmemError("no multicast")

    def barrier_all(self, stream):
        assert stream[0] == "stream"
        meet()

    def free(self, buffer):
        assert buffer is self.kept.pop(0)
        meet()


def a_device(ordinal):
    made = types.SimpleNamespace(current=False)
    made.set_current = lambda: setattr(made, "current", True)
    return made


def stand_ins(rank):
    """What `_spmd` takes for torch and torch.distributed._symmetric_memory."""
    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    cuda = types.SimpleNamespace(current_stream=lambda: stream, current_device=lambda: 0)
    cuda.synchronize = stream.synchronize
    new = lambda shape, dtype, device: Tensor(shape, dtype, rank)  # noqa: E731
    main = types.SimpleNamespace(
        Tensor=Tensor, cuda=cuda, empty=new, device=str, float32=torch.float32, int32=torch.int32
    )
    main.from_dlpack = lambda buffer: buffer.tensor()
    memory = types.SimpleNamespace(empty=new, rendezvous=lambda x, group: Handle(x, rank))
    modules = {"": main, ".distributed": dist, ".distributed._symmetric_memory": memory}
    return lambda name="": modules[name]


def array(at, n=8):
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(at))


def refused(error, words, f, *args, **kw):
    try:
        f(*args, **kw)
    except error as e:
        assert words in str(e), f"{words!r} is not in {e}"
    else:
        raise AssertionError(f"{error.__name__} was expected")


def launches(fake, run):
    """Launches call run(parameters, as numbers; the table of peers, if it is the last of n)."""
    callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    launches.keep = callback(lambda params, record: run(params))
    fake.fake_set_kernel(launches.keep)


def word(params, k):
    return ctypes.cast(params[k], ctypes.POINTER(ctypes.c_uint64))


def on_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=N)
    fake = ctypes.CDLL("libcuda.so.1")
    _spmd._torch = _symmetric._torch = stand_ins(rank)
    mesh = plgpu.DeviceMesh((N,), "d", group=True, timeout=2)
    assert plgpu.DeviceMesh((N,), "d", group=True, timeout=2) == mesh
    a_kernel(fake, mesh, rank)
    a_collective(fake, mesh, rank)
    a_closed_mesh(fake, mesh, rank)
    nvshmem(fake, rank)
    a_late_rank(fake, rank)
    meet()
    refused(TypeError, "process group cannot be pickled", mesh.__reduce__)


def a_kernel(fake, mesh, rank):
    """The table of addresses is that of the symmetric memory, also of views into it."""

    def to_the_other(x, o):
        plgpu.remote_ref(o, 1 - lax.axis_index("d"))[...] = x[...] + 1

    def run(params):
        table = word(params, 1)
        assert table[0] == rank
        array(table[1 + 1 - rank])[...] = array(word(params, 0)[0]) + 1

    launches(fake, run)
    f = plgpu.spmd(
        plgpu.kernel(to_the_other, out_type=plgpu.ShapeDtypeStruct((8,), np.float32)), mesh
    )
    x = Tensor((8,), torch.float32, rank)
    x.host[...] = np.arange(8) + 100 * rank
    out = plgpu.symm_empty((8,), np.float32, mesh)
    assert not out.host.any()
    f(x, out=out)
    meet()
    np.testing.assert_array_equal(out.host, np.arange(8) + 100 * (1 - rank) + 1)
    whole = plgpu.symm_empty((4, 8), np.float32, mesh)
    row = Tensor((8,), torch.float32, rank)
    row.at = whole.at + 2 * 32
    f(x, out=row)
    meet()
    np.testing.assert_array_equal(whole.host[2], out.host)
    assert not whole.host[[0, 1, 3]].any()
    fresh = Tensor((8,), torch.float32, rank)
    refused(ValueError, "is not in memory that they reach: make it by plgpu.symm_empty", f, x)
    refused(ValueError, "plgpu.symm_empty", f, x, out=fresh)
    small = Tensor((6 - 2 * rank,), torch.float32, rank)
    refused(ValueError, "ranks 0 and 1 call with other arrays", f, small, out=out)
    refused(TypeError, "must be a CUDA tensor of this process", f, np.zeros(8, np.float32))
    gone = weakref.ref(whole.storage)
    before = len(_symmetric._symmetric)
    del whole
    assert gone() is None and len(_symmetric._symmetric) == before - 1


def followers():
    """The threads that wait for the end of the other process."""
    return [t for t in threading.enumerate() if t.name == "pallas_mgpu mesh"]


def a_closed_mesh(fake, mesh, rank):
    """Its memory is forgotten; a second close does not wait for the other rank."""
    launches(fake, lambda params: None)
    kernel = plgpu.kernel(
        lambda x, o: o.__setitem__(0, 1.0), out_type=plgpu.ShapeDtypeStruct((8,), np.float32)
    )
    f, x = plgpu.spmd(kernel, mesh), plgpu.symm_empty((8,), np.float32, mesh)
    f(x)
    assert _symmetric.peers_of(x) and not mesh.closed
    before = followers()
    mesh.close()
    for t in before:
        t.join(0.1)
    assert len(followers()) == len(before) - (hasattr(os, "pidfd_open"))
    assert mesh.closed and _symmetric.peers_of(x) is None
    if rank:
        mesh.close()
    refused(RuntimeError, f"the mesh {mesh.name} was closed", f, x)
    refused(RuntimeError, "was closed", plgpu.symm_empty, (8,), np.float32, mesh)
    refused(RuntimeError, "was closed", plgpu.spmd, kernel, mesh)
    again = plgpu.DeviceMesh((N,), "d", group=True, timeout=2)
    assert again != mesh and not again.closed
    plgpu.spmd(kernel, again)(x)


def nvshmem(fake, rank):
    """The same with memory of NVSHMEM, which all ranks free when they close the mesh."""
    core = Nvshmem(rank)
    make = lambda **options: plgpu.DeviceMesh(  # noqa: E731
        (N,), "d", group=True, timeout=2, **{"memory": "nvshmem", **options}
    )
    sys.modules["nvshmem.core"] = None
    refused(ImportError, "pip install nvshmem4py", make)
    sys.modules["nvshmem.core"] = core
    sys.modules["cuda.core"] = types.SimpleNamespace(Device=a_device)
    memory = ("torch", "nvshmem")[rank]
    refused(ValueError, "memory is 'torch' on rank 0 and 'nvshmem' on rank 1", make, memory=memory)
    refused(ValueError, "memory must be one of", make, memory="mpi")
    mesh = make()
    assert core.pe == rank and mesh != make(memory=None) and mesh == make()
    a_kernel(fake, mesh, rank)
    a_collective(fake, mesh, rank)
    refused(
        ValueError, "no NVLink multicast", lambda: plgpu.symm_empty(8, "f4", mesh, multicast=True)
    )
    core.unreachable = True
    refused(
        ValueError, f"no address for the memory of rank {1 - rank}", plgpu.symm_empty, 8, "f4", mesh
    )
    core.unreachable = False
    assert len(core.kept) > 5
    mesh.close()
    assert not core.kept

    core.pe, core.elements = 1 - rank, 4  # the program has initialised it
    refused(ValueError, "4 processing elements, and the group 2 processes", make)
    core.elements = N
    with make() as mesh:
        a_kernel(fake, mesh, rank)
    assert not core.kept and mesh.closed
    core.pe = (None, 1)[rank]
    refused(RuntimeError, "is initialised on rank 1 and not on rank 0", make)


def a_late_rank(fake, rank):
    """A rank with arrays that are new to it alone does not wait for ever; a new mesh works."""
    launches(fake, lambda params: None)
    make = lambda: plgpu.DeviceMesh((N,), "d", group=True, timeout=1)  # noqa: E731
    kernel = plgpu.kernel(
        lambda x, o: o.__setitem__(0, 1.0), out_type=plgpu.ShapeDtypeStruct((8,), np.float32)
    )
    mesh, x = make(), Tensor((8,), torch.float32, rank)
    f = plgpu.spmd(kernel, mesh)
    f(x)
    if rank:
        small = Tensor((4,), torch.float32, rank)
        refused(ValueError, "rank 1 calls anonymous with arrays (((4,), 'torch.fl", f, small)
        refused(plgpu.DeadlockError, "not all ranks did so in time", f, x)
    meet()
    again = make()
    assert again != mesh
    plgpu.spmd(kernel, again)(x)


def a_collective(fake, mesh, rank):
    """Results that others write (columns, which do not go through staging memory) are in symmetric
    memory, and the caller's are copies."""
    seen = []

    def run(entries, params):
        table = word(params, len(entries["args"]) - 1)
        k = entries["peers"].index(1)  # the result, after the operand
        own = entries["args"].index(("pointer", 0, 0))
        targets = [table[1 + k * N + d] for d in range(N)]
        seen.append(targets)
        for at in targets:
            for row in range(2):
                found = array(word(params, own)[0] + row * 16, 4)
                array(at + row * 32 + rank * 16, 4)[...] = found

    x = Tensor((2, 4), torch.float32, rank)
    x.host[...] = rank + 1
    f = distributed._collective(
        mesh, "d", "all_gather_directly", np.dtype(np.float32), (2, 8), (2, 4), 1, None
    )
    program = f.lower(plgpu.ShapeDtypeStruct((2, 4), np.float32)).graph.cuda(line=False)[1]
    launches(fake, functools.partial(run, program))
    want = np.repeat([1.0, 2.0], 4) + np.zeros((2, 1))
    y = distributed.all_gather(x, mesh, axis=1, blocks=1)
    meet()
    assert y.at not in seen[0] and seen[0][rank] != y.at and f.windows.keys() == {1}
    y.copy_(f.windows[1])  # what the copy found, had the kernel waited for the other rank
    np.testing.assert_array_equal(y.host, want)
    out = plgpu.symm_empty((2, 8), np.float32, mesh)
    assert distributed.all_gather(x, mesh, axis=1, blocks=1, out=out) is out
    meet()
    assert seen[1][rank] == out.at
    np.testing.assert_array_equal(out.host, want)


def main():
    store = tempfile.mktemp()
    children = []
    for rank in range(N):
        child = os.fork()
        if not child:
            try:
                on_rank(rank, store)
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children)


if __name__ == "__main__":
    sys.exit(main())
