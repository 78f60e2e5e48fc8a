"""Memory of one process that the other processes of a mesh reach: where it comes from, and the
addresses that it has on each of them.

Two libraries fill the same table: PyTorch's symmetric memory, and NVSHMEM by nvshmem4py. A tensor
of either has a handle with the rank of this process, its addresses by rank (``buffer_ptrs``), the
address of all (``multicast_ptr``, 0: none) and a barrier on the current stream.

Allocations are collective. PyTorch frees a tensor when its last reference goes. NVSHMEM frees
memory only together, so it stays until the mesh is closed."""

import contextlib
import importlib
import os
import weakref

MEMORIES = "torch", "nvshmem"

_symmetric: dict = {}  # address: (weak reference to the storage, handle, bytes)


def _torch(name=""):
    return importlib.import_module(f"torch{name}")


def new_tensor(spec, mesh, multicast):
    """A tensor of zeros, and its handle. The ranks meet on the CPU: a barrier of the handle has no
    timeout, and it would signal in memory that PyTorch clears on a stream of each rank."""
    torch, watch = _torch(), mesh._watch
    make = _of_nvshmem if mesh.memory == "nvshmem" else _of_torch
    x, handle = make(torch, spec, mesh, multicast)
    if multicast and not handle.multicast_ptr:
        raise ValueError("symm_empty: this system has no NVLink multicast, or it is switched off")
    x.zero_()
    torch.cuda.current_stream().synchronize()
    watch.gather(None)
    at = x.data_ptr()
    gone = weakref.ref(x.untyped_storage(), lambda gone: _drop(at, gone))
    _symmetric[at] = (gone, handle, x.numel() * x.element_size())
    watch.tensors = [*(t for t in watch.tensors if t[1]() is not None), (at, gone)]
    return x, handle


def own_tensor(spec):
    """A tensor of zeros that no other process reaches."""
    torch = _torch()
    dtype = getattr(torch, spec.dtype.name)
    x = torch.empty(spec.shape, dtype=dtype, device=torch.device("cuda")).zero_()
    torch.cuda.current_stream().synchronize()
    return x


def _drop(at, gone):
    if at in _symmetric and _symmetric[at][0] is gone:
        del _symmetric[at]


def peers_of(x):
    """(addresses on all ranks, multicast address) of a tensor in symmetric memory, or None."""
    at = x.data_ptr()
    for base, (_, handle, size) in _symmetric.items():
        if base <= at < base + size:
            offset = at - base
            own = handle.buffer_ptrs[handle.rank]
            shift = base - own + offset
            all_at = handle.multicast_ptr + shift if handle.multicast_ptr else 0
            return [p + shift for p in handle.buffer_ptrs], all_at
    return None


def peer_tensor(x, rank):
    """A tensor of `new_tensor` in PyTorch's symmetric memory, as another process of its group has
    it."""
    handle = _symmetric[x.data_ptr()][1]
    offset = (x.data_ptr() - handle.buffer_ptrs[handle.rank]) // x.element_size()
    return handle.get_buffer(rank, tuple(x.shape), x.dtype, offset)


def release(watch):
    """Give up the memory of a mesh that is closed: all ranks meet, each forgets the addresses of
    its peers, they meet again, and free what NVSHMEM has, in one order. If they cannot meet, what
    NVSHMEM has stays."""
    together = watch.why is None and _meet(watch)
    for at, gone in reversed(watch.tensors):
        _drop(at, gone)
    if together and _meet(watch):
        for buffer in watch.buffers:
            _nvshmem().free(buffer)
    watch.tensors, watch.buffers = [], []


def _meet(watch):
    if watch.control is None:
        return False
    with contextlib.suppress(RuntimeError):  # a rank has ended, or is late
        watch.gather(None)
        return True
    return False


# ---- PyTorch ------------------------------------------------------------------------------------


def _of_torch(torch, spec, mesh, multicast):
    symm_mem = _torch(".distributed._symmetric_memory")
    dtype = getattr(torch, spec.dtype.name)
    x = symm_mem.empty(spec.shape, dtype=dtype, device=torch.device("cuda"))
    return x, symm_mem.rendezvous(x, mesh.group)


# ---- NVSHMEM ------------------------------------------------------------------------------------


class _Handle:
    """buffers: that of each rank, as this process reaches it."""

    def __init__(self, rank, buffers, multicast):
        self.rank = rank
        self.buffer_ptrs = [int(b.handle) for b in buffers]
        self.multicast_ptr = int(multicast.handle) if multicast else 0

    def barrier(self):
        core = _nvshmem()
        core.barrier_all(core.NvshmemStream(_torch().cuda.current_stream()))


def _nvshmem():
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as e:
        raise ImportError(
            'DeviceMesh: memory="nvshmem" needs nvshmem4py (pip install nvshmem4py-cu12 or'
            f" nvshmem4py-cu13): {e}"
        ) from None


def bootstrap(watch, n):
    """Initialise NVSHMEM over the group of a mesh of n devices, unless the program has done so, and
    find the processing element of each rank. NVSHMEM then makes no multicast objects, unless
    NVSHMEM_DISABLE_NVLS=0 is set."""
    if watch.elements is not None:
        return
    core, dist = _nvshmem(), _torch(".distributed")
    rank = dist.get_rank(watch.control)
    running = watch.gather(int(core.init_status()) >= int(core.InitStatus.STATUS_IS_INITIALIZED))
    if any(running) and not all(running):
        raise RuntimeError(
            f"DeviceMesh: nvshmem.core is initialised on rank {running.index(True)} and not on rank"
            f" {running.index(False)}"
        )
    if not any(running):
        _init(core, watch, rank, n)
    elements = watch.gather((core.my_pe(), core.n_pes()))
    if elements[0][1] != n:
        raise ValueError(
            f"DeviceMesh: NVSHMEM has {elements[0][1]} processing elements, and the group {n}"
            " processes; both must be the same"
        )
    watch.elements = [pe for pe, _ in elements]


def _init(core, watch, rank, n):
    numpy = importlib.import_module("numpy")
    device = importlib.import_module("cuda.core").Device(_torch().cuda.current_device())
    device.set_current()
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    unique = core.get_unique_id(empty=rank != 0)
    first = watch.gather(unique._data.tobytes() if rank == 0 else None)[0]
    unique._data.view(numpy.int8)[:] = numpy.frombuffer(first, numpy.int8)
    core.init(device=device, uid=unique, rank=rank, nranks=n, initializer_method="uid")


def _of_nvshmem(torch, spec, mesh, multicast):
    core, watch = _nvshmem(), mesh._watch
    rank = _torch(".distributed").get_rank(mesh.group)
    count = 1
    for size in spec.shape:
        count *= size
    own = core.buffer(max(count, 1) * spec.dtype.itemsize)
    watch.buffers.append(own)
    errors = core.NvshmemError, core.NvshmemInvalid
    buffers, everywhere = [], None
    for r, element in enumerate(watch.elements):
        try:  # nvshmem4py counts references to the own one, if asked for it
            buffers.append(own if r == rank else core.get_peer_buffer(own, element))
        except errors as e:
            raise ValueError(
                f"symm_empty: NVSHMEM has no address for the memory of rank {r}, which NVLink must"
                f" join to rank {rank}: {e}"
            ) from None
    if multicast:
        with contextlib.suppress(*errors):
            everywhere = core.get_multicast_buffer(core.Teams.TEAM_WORLD, own)
    flat = torch.from_dlpack(own).view(getattr(torch, spec.dtype.name))
    return flat[:count].view(spec.shape), _Handle(rank, buffers, everywhere)
