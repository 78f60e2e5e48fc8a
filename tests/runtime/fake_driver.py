"""Cases that run in a process of their own on the stand-in for libcuda (fake_cuda.c).

`python fake_driver.py CASE`, with the directory of the stand-in first in LD_LIBRARY_PATH;
test_runtime.py does that. Kernels are compiled for real and launched in name only: `emulate` does
in Python what the kernel under test would have done."""

import atexit
import copy
import ctypes
import gc
import os
import pickle
import re
import sys
import threading
import warnings
import weakref

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_live_bytes.restype = fake.fake_live_modules.restype = ctypes.c_int64
fake.fake_live_events.restype = fake.fake_waits.restype = ctypes.c_int64
fake.fake_calls.restype = ctypes.c_int64


class Record(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("cluster", ctypes.c_uint * 3),
        ("pdl", ctypes.c_uint),
        ("launches", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    ]


fake.fake_last.restype = ctypes.POINTER(Record)
Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Record))
N = 128


def emulate(f, n_params):
    """Launches call f on the parameters as float32 arrays of N elements."""

    def kernel(params, record):
        at = [ctypes.cast(params[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(n_params)]
        f(*[np.ctypeslib.as_array((ctypes.c_float * N).from_address(p)) for p in at])

    emulate.keep = Callback(kernel)
    fake.fake_set_kernel(emulate.keep)


def add_one(x, o):
    o[...] = x[...] + 1


def add(x, y, o):
    o[...] = x[...] + y[...]


def kernel(body=add_one, **options):
    return plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((N,), np.float32), **options)


def refused(exception, pattern, f, *args, **kw):
    try:
        f(*args, **kw)
    except exception as e:
        assert re.search(pattern, str(e)), f"{pattern!r} is not in {str(e)!r}"
    else:
        raise AssertionError(f"{exception.__name__} was expected")


x = np.arange(N, dtype=np.float32)


def plus_one():
    emulate(add_one, 2)
    return kernel()


class TensorMap(ctypes.Structure):
    """What the stand-in encodes."""

    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("base", ctypes.c_uint64),
        ("dim", ctypes.c_uint32 * 5),
    ]


def case_sizes_of_a_call():
    """Maps, grid and parameters follow the arrays of each call; one program serves all."""
    M = plgpu.dim("M")

    def body(x, o, x_smem, full):
        rows = pl.ds(lax.axis_index("i") * 16, 16)
        plgpu.copy_gmem_to_smem(x.at[rows], x_smem, full)
        plgpu.barrier_wait(full)
        x_smem[...] = x_smem[...] * x.shape[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, o.at[rows])
        plgpu.wait_smem_to_gmem(0)

    k = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((M, N), np.float32),
        in_shapes=((M, None),),
        grid=(pl.cdiv(M, 16), 2),
        grid_names=("i", "j"),
        scratch_types=[plgpu.SMEM((16, N), np.float32), plgpu.Barrier()],
    )
    seen = []

    def launched(params, record):
        maps = [ctypes.cast(params[i], ctypes.POINTER(TensorMap))[0] for i in range(2)]
        rows = ctypes.cast(params[2], ctypes.POINTER(ctypes.c_int32))[0]
        dims = [list(m.dim[: m.rank]) for m in maps]
        seen.append((list(record[0].grid), dims, rows))

    keep = Callback(launched)
    fake.fake_set_kernel(keep)
    d = plgpu.device_put(np.zeros((700, N), np.float32))
    sizes = (700, 1, 33, 33, 700)
    outs = [plgpu.device_put(np.zeros((m, N), np.float32)) for m in sizes]
    before = _core.plan_memory()["plans"]
    for m, out in zip(sizes, outs):
        x = d if m == 700 else plgpu.device_put(np.zeros((m, N), np.float32))
        k(x, out=out)
        grid, dims, rows = seen[-1]
        assert grid == [2 * -(-m // 16), 1, 1] and rows == m, (m, grid, rows)
        assert dims == [[N, m]] * 2, (m, dims)
    assert _core.plan_memory()["plans"] == before + 1
    assert k(d).shape == (700, N)
    refused(ValueError, r"out\[0\] must be float32 of shape \(700, 128\)", k, d, out=outs[1])
    fake.fake_set_kernel(None)


def case_sanitize():
    """What a launch notes in its record is an error with the line; the next one has its own."""
    os.environ["PALLAS_MGPU_SANITIZE"] = "1"
    seen, noted = [], []

    def launched(params, record):
        at = ctypes.cast(params[3], ctypes.POINTER(ctypes.c_uint64))[0]  # after i, x and o
        words = (ctypes.c_uint32 * 8).from_address(at)
        seen.append(any(words))
        words[: len(noted)] = noted

    keep = Callback(launched)
    fake.fake_set_kernel(keep)

    def take(i, x, o):
        o[0] = x[i[0]]

    k, i = kernel(take), np.zeros(1, np.int32)
    assert "u32* sanitizer" in k.lower(i, x).as_text("cuda")
    k(i, x)
    noted[:] = 1, 0, 200, 3, 2, 1, 133
    what = r"load out of bounds: index 200 of dimension 0 lies outside 'x' of shape \(128,\)"
    line = take.__code__.co_firstlineno + 1
    who = r" \(block \(3, 2, 1\), thread 1, warp 0\)"
    refused(IndexError, rf"{what}{who}\n  at .*fake_driver.py:{line}", k, i, x)
    noted.clear()
    k(i, x)
    assert seen == [False] * 3


def case_numpy():
    k = plus_one()
    y = k(x)
    assert type(y) is np.ndarray and (y == x + 1).all()
    out = np.empty(N, np.float32)
    assert k(x, out=out) is out and (out == x + 1).all()
    assert (k(np.arange(2 * N, dtype=np.float32)[::2]) == np.arange(0, 2 * N, 2) + 1).all()
    assert fake.fake_live_bytes() == 0


def case_device_array():
    k = plus_one()
    d = plgpu.device_put(x)
    assert (d.shape, d.dtype, d.ndim, d.size, d.nbytes, len(d)) == (
        (N,),
        np.float32,
        1,
        N,
        4 * N,
        N,
    )
    y = k(d)
    assert type(y) is plgpu.DeviceArray and (y.numpy() == x + 1).all()
    out = _core.device_empty((N,), np.float32)
    assert k(d, out=out) is out and (np.asarray(out) == x + 1).all()
    gone = weakref.ref(y)
    del y
    assert gone() is None and fake.fake_live_bytes() == 2 * 4 * N
    b = plgpu.device_put(x.astype(ml_dtypes.bfloat16))
    assert np.asarray(b).dtype == ml_dtypes.bfloat16 and not hasattr(b, "__cuda_array_interface__")
    assert (np.asarray(d, dtype=np.float64) == x).all()
    refused(ValueError, "uncopied", d.__array__, copy=False)  # np.asarray(copy=) is NumPy 2's
    refused(plgpu.OutOfMemoryError, "out of memory", _core.device_empty, (1 << 40,), np.float32)
    for shape in ((2, -1), (-1,), (1, 2, N // 2), ((N, 1),), ([N // 4, 4],)):
        want = x.reshape(*shape)
        view = d.reshape(*shape)
        assert view.shape == want.shape and (view.numpy() == want).all()
    for wrong in ((3, -1), (N + 1,), (-1, -1), (-2, N), (), (1 << 62, 1 << 62), (1,) * 9 + (N,)):
        refused(ValueError, "cannot have the shape", d.reshape, *wrong)
    refused(TypeError, "", d.reshape, "x")
    y = k(d)
    view = y.reshape(1, N)
    del y
    assert (view.numpy() == x + 1).all() and fake.fake_live_bytes() == 3 * 4 * N + 2 * N
    del d, out, b, view
    assert fake.fake_live_bytes() == 0


def case_small_dtypes():
    """On the device two elements of 4 bits share a byte; NumPy has a byte for each."""
    n = 2 * N
    for name in ("int4", "uint4"):
        dtype = np.dtype(name)
        low = np.arange(n) % 16
        a = (low - 16 * (low > 7) if name == "int4" else low).astype(dtype)
        packed = (low[::2] | low[1::2] << 4).astype(np.uint8)
        d = plgpu.device_put(a)
        assert (d.dtype, d.size, d.nbytes) == (dtype, n, N)
        assert fake.fake_live_bytes() == N and (d.numpy() == a).all()
        assert not hasattr(d, "__cuda_array_interface__")

        def swap(params, record, packed=packed):
            at = [ctypes.cast(params[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(2)]
            x, o = (np.ctypeslib.as_array((ctypes.c_uint8 * N).from_address(p)) for p in at)
            assert (x == packed).all()
            o[...] = x >> 4 | x << 4

        keep = Callback(swap)
        fake.fake_set_kernel(keep)

        def body(x, o):
            o[...] = x[...] ^ 1

        f = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((n,), dtype))
        want = a.reshape(-1, 2)[:, ::-1].reshape(-1)
        y, z, out = f(a), f(d), np.zeros(n, dtype)
        assert y.dtype == dtype and (y == want).all() and (z.numpy() == want).all()
        assert f(d, out=_core.device_empty((n,), dtype)).nbytes == N
        assert f(a, out=out) is out and (out == want).all()
        del d, z
        assert fake.fake_live_bytes() == 0
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        a = np.arange(N).astype(np.uint8).view(getattr(ml_dtypes, name))
        d = plgpu.device_put(a)
        assert d.nbytes == N and (d.numpy().view(np.uint8) == a.view(np.uint8)).all()
        refused(AttributeError, f"has no {name}: use __dlpack__", getattr, d,
                "__cuda_array_interface__")  # fmt: skip


class Producer:
    """A library of which only __dlpack__ is known."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.array.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldProducer(Producer):
    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class Interface:
    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def case_exchange():
    k = plus_one()
    d = plgpu.device_put(x)
    references = sys.getrefcount(d)
    for kind in (Producer, OldProducer, Interface):
        y = k(kind(d))
        assert type(y) is plgpu.DeviceArray and (y.numpy() == x + 1).all()
        z = plgpu.DeviceArray.from_dlpack(kind(d))
        assert (z.numpy() == x).all() and (k(z).numpy() == x + 1).all()
        del z
    k(Producer(d))  # arrays held for earlier launches go at the next one
    plgpu.synchronize()
    gc.collect()
    assert sys.getrefcount(d) <= references + 1
    unused = d.__dlpack__(max_version=(1, 0))
    del unused
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # from_dlpack has no `device` before
        assert (np.from_dlpack(d, device="cpu") == x).all()
    refused(ValueError, "stream 0", d.__dlpack__, stream=0)


def case_refusals():
    k, k2, d = plus_one(), kernel(add), plgpu.device_put(x)
    refused(TypeError, "float64.*x.astype.'float32'", k, x, out=x.astype(np.float64))
    refused(TypeError, "int64.*x.astype.'int32'", k, x, out=np.arange(N))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            assert (k(x.astype(np.float64)) == x + 1).all()
    assert len(found) == 1 and "argument 0 of float64" in str(found[0].message), found
    refused(TypeError, "argument 0 is a str", k, "abc")
    refused(TypeError, "unknown argument 'other'", k, x, other=1)
    refused(TypeError, "argument 0 and argument 1 are in different memories", k2, x, d)
    refused(TypeError, "different libraries", k2, d, Producer(d))
    refused(TypeError, "out has 2 arrays", k, x, out=(x, x.copy()))
    refused(ValueError, r"must be float32 of shape \(128,\)", k, x, out=np.empty(1, np.float32))
    refused(ValueError, "contiguous", k, x, out=np.empty(2 * N, np.float32)[::2])
    refused(TypeError, "is a number", k, x, out=5)
    frozen = np.empty(N, np.float32)
    frozen.flags.writeable = False
    refused(ValueError, "read-only", k, x, out=frozen)
    refused(OverflowError, "int32", k2, x, 2**40)
    refused(ValueError, "no CUDA device 3", plgpu.device_put, x, 3)
    assert (k(x) == x + 1).all()


def case_scalars():
    k = kernel(lambda x, s, o: o.__setitem__(..., x[...] + s[...]))
    emulate(lambda x, s, o: o.__setitem__(..., x + s[0]), 3)
    assert (k(x, 2.5) == x + 2.5).all()
    assert (k(plgpu.device_put(x), np.float32(3)).numpy() == x + 3).all()


def case_failures():
    k = plus_one()
    k(x)
    for entry, result, exception, text in (
        ("cuLaunchKernelEx", 700, plgpu.LaunchError, "context is lost.*add_one"),
        ("cuLaunchKernelEx", 1, plgpu.LaunchError, "grid 1 x 1 x 1"),
        ("cuMemAllocFromPoolAsync", 2, plgpu.OutOfMemoryError, "512 bytes"),
        ("cuStreamSynchronize", 719, plgpu.LaunchError, "context is lost"),
        ("cuMemcpyDtoHAsync", 1, plgpu.DriverError, "copy to the host"),
        ("cuMemcpyHtoDAsync", 1, plgpu.DriverError, "copy from the host"),
    ):
        fake.fake_fail(entry.encode(), -result, 0)
        refused(exception, text, k, x)
        fake.fake_fail(b"", 0, 0)
        assert (k(x) == x + 1).all(), entry
        assert fake.fake_live_bytes() == 0, entry
    fresh = kernel()
    for entry, result, exception, text in (
        ("cuModuleLoadData", 209, plgpu.DriverError, "update the driver"),
        ("cuModuleGetFunction", 500, plgpu.LaunchError, "cannot be loaded"),
    ):
        fake.fake_fail(entry.encode(), result, 0)
        refused(exception, text, fresh, x)
    assert (fresh(x) == x + 1).all()
    modules = fake.fake_live_modules()
    del fresh
    gc.collect()
    plgpu.synchronize()
    assert fake.fake_live_modules() < modules


def case_capture():
    k, d = plus_one(), plgpu.device_put(x)
    fake.fake_set_capturing(1)
    refused(RuntimeError, "before the capture", k, d)
    fake.fake_set_capturing(0)
    assert (k(d).numpy() == x + 1).all()


def given(n):
    """An array of n MiB that others got through DLPack, for a stream that we do not know."""
    d = plgpu._core.device_empty((n << 18,), np.float32)
    d.__dlpack__(stream=4096)
    return d


def case_garbage_in_captures():
    """Memory of arrays that others got through DLPack is there again, once there is much of it, for
    a request that comes after all work on the device, outside of a capture. Nothing waits."""
    a, b, c = (given(128) for _ in range(3))
    live, synchronized = fake.fake_live_bytes(), fake.fake_synchronized()
    events = fake.fake_live_events()
    del a
    fake.fake_set_capturing(1)
    del b
    d = plgpu.device_put(x)
    assert fake.fake_live_bytes() == live + d.nbytes
    fake.fake_set_capturing(0)
    fake.fake_fail(b"cuEventQuery", -600, 0)  # the device is busy
    e = plgpu.device_put(x)
    plgpu.synchronize()
    assert fake.fake_live_bytes() == live + d.nbytes + e.nbytes
    fake.fake_fail(b"", 0, 0)
    f = plgpu.device_put(x)
    assert fake.fake_live_bytes() == live - 2 * c.nbytes + 3 * x.nbytes
    large = c.nbytes
    del c
    plgpu.synchronize()
    del d, e, f
    assert fake.fake_live_bytes() == live - 3 * large
    assert (fake.fake_synchronized(), fake.fake_live_events()) == (synchronized, events)


def case_captures_of_other_threads():
    """To ask for all work of the context ends them. Nothing asks while there is little to free, but
    where memory is short, all work is waited for."""
    fake.fake_fail(b"cuCtxRecordEvent", -900, 0)
    arrays = [given(8) for _ in range(3)]
    live, synchronized = fake.fake_live_bytes(), fake.fake_synchronized()
    arrays.clear()
    d = plgpu.device_put(x)
    plgpu.synchronize()
    assert fake.fake_live_bytes() == live + d.nbytes
    assert fake.fake_synchronized() == synchronized
    fake.fake_fail(b"cuMemAllocFromPoolAsync", 2, 0)
    e = plgpu.device_put(x)
    assert fake.fake_live_bytes() == live + d.nbytes + e.nbytes - (24 << 20)
    assert fake.fake_synchronized() == synchronized + 2  # before these are freed, and after it


def case_no_pools():
    """Memory that is short is asked for again after what waits to be freed."""
    os.environ["FAKE_CUDA_POOLS"] = "0"
    arrays = [given(8) for _ in range(3)]
    live = fake.fake_live_bytes()
    arrays.clear()
    plgpu.synchronize()
    assert fake.fake_live_bytes() == live
    fake.fake_fail(b"cuMemAlloc", 2, 0)
    d = plgpu.device_put(x)
    assert fake.fake_live_bytes() == live + d.nbytes - (24 << 20)


def case_older_driver():
    """Before CUDA 12.5 no event comes after all work: a request waits for what others may use."""
    a, b = given(128), given(128)
    live, synchronized = fake.fake_live_bytes(), fake.fake_synchronized()
    del a
    assert (fake.fake_live_bytes(), fake.fake_synchronized()) == (live, synchronized)
    c = plgpu.device_put(x)
    assert fake.fake_live_bytes() == live - b.nbytes + c.nbytes
    assert fake.fake_synchronized() == synchronized + 1
    del b, c


def case_scratch():
    """GMEM scratch of calls on arrays of the GPU: memory of their library, nothing is copied."""

    def double(x, o, tmp):
        tmp[...] = x[...] * 2
        o[...] = tmp[...]

    tmp = plgpu.GMEM((128,), np.float32)
    k = plgpu.kernel(double, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=[tmp])
    d, e = plgpu.device_put(x), plgpu.device_put(x)
    k(d, out=e)
    live, copies = fake.fake_live_bytes(), fake.fake_copies()
    assert k(d, out=e) is e
    assert fake.fake_live_bytes() == live and fake.fake_copies() == copies
    found = k(d)
    assert fake.fake_live_bytes() == live + x.nbytes and fake.fake_copies() == copies
    del found
    assert fake.fake_live_bytes() == live


def counted(x, o):
    i = _core.next_tile(1)

    @pl.when(i < 1)
    def _():
        o[...] = x[...] + 1


def case_counters():
    """One zeroed buffer for each stream, and for each stream of each capture."""
    seen = []

    def count(params, record):
        x, o, words = (ctypes.cast(params[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(3))
        assert list((ctypes.c_uint32 * 3).from_address(words)) == [0, 0, 0]
        seen.append(words)

    callback = Callback(count)
    fake.fake_set_kernel(callback)
    before = fake.fake_live_bytes()
    k = kernel(counted)
    d = plgpu.device_put(x)
    stream = ctypes.c_void_p(4096)

    class Elsewhere(Interface):
        @property
        def __cuda_array_interface__(self):
            return {**self.array.__cuda_array_interface__, "stream": stream.value}

    for _ in range(3):
        k(x)  # the device's own stream
        k(d)  # the default stream
    assert len(set(seen)) == 2 and seen[0::2] == seen[:1] * 3 and seen[1::2] == seen[1:2] * 3
    own, default = seen[:2]
    seen.clear()
    for capture in range(1, 41):
        fake.fake_set_capturing(capture)
        for _ in range(3):
            k(x)
    assert len(set(seen)) == 40 and seen[0::3] == seen[1::3] == seen[2::3]
    k(d)  # the default stream is never captured
    assert own not in seen and seen[-1] == default
    for capture in range(41, 127):
        fake.fake_set_capturing(capture)
        k(x)
    assert len(set(seen)) == 127
    fake.fake_set_capturing(127)
    refused(RuntimeError, "captured too often", k, x)
    fake.fake_set_capturing(0)
    k(x)
    assert seen[-1] == own
    fake.fake_set_capturing(127)
    refused(RuntimeError, "captured too often", k, x)
    fake.fake_set_capturing(0)
    del k
    gc.collect()
    plus_one()(d)  # what follows on the default stream shows that it has passed the kernel
    plgpu.synchronize()
    del d
    assert fake.fake_live_bytes() == before
    modules = fake.fake_live_modules()
    fake.fake_fail(b"cuMemAllocFromPoolAsync", 2, 0)
    refused(plgpu.OutOfMemoryError, "counters", kernel(counted), x)
    plgpu.synchronize()
    assert fake.fake_live_modules() == modules


def case_attributes():
    """Clusters and dependent launches."""

    def wait(x, o):
        plgpu.griddepcontrol_wait()
        o[...] = x[...] + 1

    kernel(wait)(x)
    assert fake.fake_last().contents.pdl == 1
    for size in (1, 2, 8, 16):
        kernel(cluster=(size,), cluster_names=("c",), grid=(3,), grid_names=("g",))(x)
        last = fake.fake_last().contents
        assert last.pdl == 0 and list(last.grid) == [3 * size, 1, 1]
        assert list(last.cluster) == [size, 1, 1] and fake.fake_attribute(14) == (size > 8)


class Stream:
    """A stream as the protocol names it; as an attribute in its older form."""

    def __init__(self, handle, version=0, call=True):
        pair = (version, handle)
        self.__cuda_stream__ = (lambda: pair) if call else pair


class TorchStream:
    cuda_stream = 8192


class CupyStream:
    ptr = 12288


def case_streams():
    """stream= names the stream of the launch, in every kind of call."""
    k, d = plus_one(), plgpu.device_put(x)
    out = plgpu.device_put(x)

    def last():
        return fake.fake_last().contents.stream or 0

    for stream, handle in [
        (Stream(4096), 4096),
        (Stream(4096, call=False), 4096),
        (TorchStream(), 8192),
        (CupyStream(), 12288),
        (16384, 16384),
        (2, 2),
        (0, 0),
    ]:
        assert (k(d, stream=stream).numpy() == x + 1).all() and last() == handle
        assert k(d, out=out, stream=stream) is out and last() == handle
        assert (k(x, stream=stream) == x + 1).all() and last() == handle
        waits = fake.fake_waits()
        k(d, stream=stream)  # the array and the result are used on the default stream
        assert (fake.fake_waits() > waits) == (handle != 0)
    waits = fake.fake_waits()
    k(d, out=out, stream=None)
    assert last() == 0 and fake.fake_waits() == waits
    nested = kernel(lambda xs, o: o.__setitem__(..., xs[0][...] + 1))
    nested([d], stream=4096)
    assert last() == 4096
    family = plgpu.specialize(lambda x: kernel())
    family(d, out=out, stream=Stream(4096))
    assert last() == 4096
    family = plgpu.specialize(lambda x: lambda x, **given: (x, given))
    assert family(d, out=out, stream=7) == (d, {"out": out, "stream": 7})
    assert family(d, stream=7) == (d, {"stream": 7}) and family(d) == (d, {})
    assert (kernel(interpret=True)(d, stream=4096).numpy() == x + 1).all()
    d.__dlpack__(stream=Stream(4096))
    for bad, error, text in [
        ("4096", TypeError, "stream: got a str"),
        (True, TypeError, "stream: got a bool"),
        (-1, ValueError, "no handle"),
        (1 << 64, ValueError, "no handle"),
        (Stream(1, version=3), ValueError, "version 3"),
        (Stream("no"), TypeError, "is an int, got a str"),
        (type("S", (), {"__cuda_stream__": 5})(), TypeError, "gives .version, handle."),
        (d, TypeError, "stream: got a"),
    ]:
        refused(error, text, k, d, stream=bad)
        refused(error, text, k, x, stream=bad)
        assert (k(d).numpy() == x + 1).all() and last() == 0
    refused(TypeError, "unknown argument 'streams'", k, d, streams=0)
    plgpu.synchronize()
    k(d, stream=4096)
    references = sys.getrefcount(d)
    k(d, stream=4096)  # arrays held for the launch before go at the next one
    assert sys.getrefcount(d) == references
    fake.fake_set_capturing(1)
    waits = fake.fake_waits()
    assert k(d, out=out, stream=4096) is out and last() == 4096
    assert fake.fake_waits() == waits and sys.getrefcount(d) == references
    refused(RuntimeError, "as out=", k, d, stream=4096)
    refused(RuntimeError, "arrays of the host", k, x, out=np.empty_like(x), stream=4096)
    fake.fake_set_capturing(0)
    assert (k(x) == x + 1).all() and fake.fake_context_depth() == 0


def case_shared_grid():
    """A kernel that hands out its grid is launched with the clusters that fit, along x."""

    def handed(x, o, cluster=()):
        @plgpu.dynamic_scheduling_loop(("a", "b"), cluster_axes=cluster)
        def _(info):
            o[...] = x[...] + 1

    def in_cluster(x, o):
        handed(x, o, ("c", "d"))

    axes = dict(grid_names=("a", "b"))
    for grid, launched in [((100, 70), 264), ((1, 7), 7), ((3, 88), 264)]:
        kernel(handed, grid=grid, **axes)(x)
        assert list(fake.fake_last().contents.grid) == [launched, 1, 1]
    axes |= dict(cluster=(2, 4), cluster_names=("c", "d"))
    for grid, launched in [((100, 70), 16), ((1, 7), 7)]:
        kernel(in_cluster, grid=grid, **axes)(x)
        last = fake.fake_last().contents
        assert list(last.cluster) == [4, 2, 1] and list(last.grid) == [4 * launched, 2, 1]
    fake.fake_fail(b"cuOccupancyMaxActiveClusters", 1, 0)
    refused(plgpu.LaunchError, "cannot be loaded", kernel(in_cluster, grid=(9, 9), **axes), x)
    assert fake.fake_context_depth() == 0


def sizes(n):
    """Kernels of n signatures as one function, each launched once."""
    k = plgpu.kernel(
        lambda x, o: o.__setitem__(..., x[x.shape[0] - 1]),
        out_type=plgpu.ShapeDtypeStruct((), np.float32),
    )
    fake.fake_set_kernel(Callback())
    return k, [plgpu.device_put(np.zeros(i + 1, np.float32)) for i in range(n)]


def case_evicted_modules():
    """Modules are unloaded once what followed them on the default stream is passed."""
    os.environ["PALLAS_MGPU_PLAN_BYTES"] = "400000"
    k, arrays = sizes(40)
    for d in arrays:
        k(d)
    assert 1 <= _core.plan_memory()["plans"] < 20
    assert 1 <= fake.fake_live_modules() < 20, fake.fake_live_modules()
    for d in arrays:
        k(d, stream=4096)
    seen = fake.fake_live_modules()
    assert seen >= 40  # each may be in a graph
    for _ in range(3):
        for d in arrays:
            k(d, stream=4096)
    assert fake.fake_live_modules() == seen  # those that were loaded serve again
    assert fake.fake_context_depth() == 0


def case_no_driver_while_evicting():
    """Plans go without a call of the driver; modules in flight stay."""
    k, arrays = sizes(3)
    for d in arrays:
        k(d)
    events, modules = fake.fake_live_events(), fake.fake_live_modules()
    fake.fake_fail(b"cuEventQuery", -600, 0)  # never passed
    calls = fake.fake_calls()
    plgpu.clear_caches()
    assert fake.fake_calls() == calls
    assert (_core.plan_memory()["plans"], fake.fake_live_modules()) == (0, modules)
    k(arrays[0])
    for d in arrays:
        k(d)
    plgpu.clear_caches()
    plgpu.synchronize()
    assert fake.fake_live_modules() == modules and fake.fake_live_events() == events + 1
    fake.fake_fail(b"", 0, 0)
    plus_one()(plgpu.device_put(x))
    plgpu.synchronize()
    plus_one()(plgpu.device_put(x))
    plgpu.synchronize()
    assert fake.fake_live_modules() <= 2 and fake.fake_live_events() <= events + 1


def case_family():
    """Operands say where an array lies and how it is aligned; each has its own kernel."""
    made = []

    @plgpu.specialize
    def family(x, *, y=None):
        made.append((x.device, x.aligned))
        return kernel() if y is None else kernel(add)

    emulate(add_one, 2)
    d = plgpu.device_put(x)
    long = plgpu.device_put(np.arange(N + 1, dtype=np.float32))

    class Shifted(Interface):
        @property
        def __cuda_array_interface__(self):
            about = self.array.__cuda_array_interface__
            return {**about, "data": (about["data"][0] + 4, False), "shape": (N,)}

    out = plgpu.device_put(x)
    for _ in range(3):
        assert family(d, out=out) is out and (out.numpy() == x + 1).all()
        assert type(family(d)) is plgpu.DeviceArray
        assert (family(x) == x + 1).all()
        assert (family(Shifted(long)).numpy() == x + 2).all()
    assert made == [(0, True), (None, True), (0, False)]
    assert family.kernel(d) is family.kernel(out) is not family.kernel(x)
    emulate(add, 3)
    for _ in range(2):
        assert (family(x=d, y=d).numpy() == 2 * x).all()
        assert (family(y=d, x=d).numpy() == 2 * x).all()
    assert len(made) == 4
    refused(TypeError, "argument 0 and argument 1 are in different memories", family, d, y=x)
    sms = _core.system_info()["devices"][0]["sm_count"]
    assert plgpu.sm_count() == plgpu.sm_count(0) == sms
    refused(ValueError, "there is no CUDA device 7", plgpu.sm_count, 7)


def case_interpret_on_device():
    d = plgpu.device_put(x)
    y = kernel(interpret=True)(d)
    assert type(y) is plgpu.DeviceArray and (y.numpy() == x + 1).all()
    assert fake.fake_last().contents.launches == 0


def case_threads():
    k, d, errors = kernel(), plgpu.device_put(x), []

    def work():
        try:
            for i in range(100):
                (kernel() if i % 50 == 0 else k)(d).numpy()
                k(x)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    assert fake.fake_context_depth() == 0


def launched(body, out, *args, **options):
    """What the driver was asked for, as (grid, block, cluster, smem), and the figures of it."""
    k = plgpu.kernel(body, out_type=out, **options)
    k(*[plgpu.device_put(a) for a in args])
    r = fake.fake_last().contents
    return (tuple(r.grid), tuple(r.block), tuple(r.cluster), r.smem), k.lower(*args).resources()


def case_geometry():
    """The last axis is x, the one before y, all others z; a grid counts clusters."""

    def body(o):
        o[0] = 1.0

    out = plgpu.ShapeDtypeStruct((1,), np.float32)
    for grid, cluster, threads, want in (
        ((), (), None, ((1, 1, 1), 1, (1, 1, 1))),
        ((7,), (), None, ((7, 1, 1), 1, (1, 1, 1))),
        ((7, 5), (), 2, ((5, 7, 1), 2, (1, 1, 1))),
        ((7, 5, 3), (), 8, ((3, 5, 7), 8, (1, 1, 1))),
        ((2, 7, 5, 3), (), None, ((3, 5, 14), 1, (1, 1, 1))),
        ((2, 3, 2, 7, 5), (), None, ((5, 7, 12), 1, (1, 1, 1))),
        ((7,), (2,), 3, ((14, 1, 1), 3, (2, 1, 1))),
        ((7, 5), (2, 4), None, ((20, 14, 1), 1, (4, 2, 1))),
        ((7,), (2, 1, 3), None, ((21, 1, 2), 1, (3, 1, 2))),
    ):
        options = dict(grid=grid, cluster=cluster, cluster_names=tuple("abc"[: len(cluster)]))
        if threads:
            options.update(num_threads=threads, thread_name="t")
        got, used = launched(body, out, **options)
        assert got == (want[0], (128 * want[1], 1, 1), want[2], 0), (grid, got)
        assert (used["grid"], used["threads"], used["cluster"]) == (got[0], got[1][0], got[2])

    def scratch(o, a, b, bar):
        a[0] = 1.0
        b[0] = a[0]
        plgpu.barrier_arrive(bar)
        plgpu.barrier_wait(bar)
        o[0] = b[0]

    types = [plgpu.SMEM((n,), np.float32) for n in (60, 20000)] + [plgpu.Barrier()]
    got, used = launched(scratch, out, scratch_types=types)
    assert got[3] == used["smem_bytes"] >= 1024 + 80000


def tma(x, o, s, bar):
    plgpu.copy_gmem_to_smem(x.at[:, :64], s, bar)
    plgpu.barrier_wait(bar)
    o[...] = s[...]


def tma_kernel():
    return plgpu.kernel(
        tma,
        out_type=plgpu.ShapeDtypeStruct((64, 64), np.float16),
        scratch_types=[plgpu.SMEM((64, 64), np.float16), plgpu.Barrier()],
    )


class Shifted:
    """A view of device memory that begins some bytes later."""

    def __init__(self, array, shape, by):
        interface = dict(array.__cuda_array_interface__, shape=shape)
        interface["data"] = (interface["data"][0] + by, False)
        self.__cuda_array_interface__ = interface
        self.keep = array


def case_tensor_maps():
    """TMA on memory that begins off a multiple of 16 bytes, and a driver that makes no maps."""
    k, d = tma_kernel(), plgpu.device_put(np.ones(9000, np.float16))
    assert "engine = tma" in k.lower(np.ones((64, 128), np.float16)).as_text("graph")
    k(Shifted(d, (64, 128), 32))
    for by in (2, 8):
        refused(ValueError, "argument 0.*divisible by 16", k, Shifted(d, (64, 128), by))
    for by in (16, 16, 48):  # the same address again needs no new map
        k(Shifted(d, (64, 128), by))
    fake.fake_fail(b"cuTensorMapEncodeTiled", 1, 0)
    refused(plgpu.TMADescriptorError, "tensor map", k, Shifted(d, (64, 128), 16))
    k(Shifted(d, (64, 128), 16))


def case_other_gpu():
    """A GPU that kernels are not compiled for: host arrays go to the interpreter with one
    warning, arrays on it are refused."""
    arch = os.environ["FAKE_CUDA_ARCH"]
    k = kernel()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            assert (k(x) == x + 1).all()
    assert len(found) == 1 and found[0].category is UserWarning, found
    assert "interpreter" in str(found[0].message)
    d = plgpu.device_put(x)
    refused(NotImplementedError, f"{arch[:-1]}.{arch[-1]}.*interpret=True", k, d)
    assert (kernel(interpret=True)(d).numpy() == x + 1).all()
    os.environ["PALLAS_MGPU_BACKEND"] = "cuda"
    refused(plgpu.DriverError, "PALLAS_MGPU_BACKEND", k, x)


def case_targets():
    """Other GPUs of the table: kernels are compiled for them, and what they lack is refused on
    their arrays; host arrays go to the interpreter then."""
    target = {"80": "sm_80", "100": "sm_100a"}[os.environ["FAKE_CUDA_ARCH"]]
    k = plus_one()
    assert (k(x) == x + 1).all() and (k(plgpu.device_put(x)).numpy() == x + 1).all()
    assert _core.target()["name"] == _core.target(0)["name"] == target
    assert f".target {target}" in k.lower(x).as_text("ptx")
    assert fake.fake_last().contents.launches == 2

    def body(a, o):
        def scope(acc, b):
            b[...] = a[...]
            plgpu.commit_smem()

            def step(i, _):
                plgpu.wgmma(acc, b, b)
                plgpu.wgmma_wait(0)

            lax.fori_loop(0, 2, step, None)
            o[...] = acc[...]

        pl.run_scoped(scope, plgpu.ACC((64, 64)), plgpu.SMEM((64, 64), np.float16))

    k = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((64, 64), np.float32))
    a = np.eye(64, dtype=np.float16)
    refused(NotImplementedError, f"wgmma needs .*, which {target} lacks", k, plgpu.device_put(a))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert (k(a) == 2 * a).all()
    assert len(seen) == 1 and target in str(seen[0].message), seen
    assert fake.fake_last().contents.launches == 2
    os.environ["PALLAS_MGPU_BACKEND"] = "cuda"
    refused(NotImplementedError, "needs .*wgmma", k, a)


def case_device_misuse():
    """DeviceArray and its relatives in wrong hands."""
    d = plgpu.device_put(x)
    refused(TypeError, "max_version must be a tuple", d.__dlpack__, max_version=5)
    refused(TypeError, "dl_device must be a tuple", d.__dlpack__, dl_device="cpu")
    refused(BufferError, "cannot be given to device", d.__dlpack__, dl_device=(2, 7))
    refused(TypeError, "cannot create", plgpu.DeviceArray)
    refused(TypeError, "pickle", pickle.dumps, d)
    refused(TypeError, "accepted are bool", _core.device_empty, (3,), "complex64")
    refused(ValueError, "extents are 0 or more", _core.device_empty, (-3,), "int8")
    refused(ValueError, "no memory can hold", _core.device_empty, (2**33, 2**33), "int8")
    refused(ValueError, "9 dimensions", _core.device_empty, (1,) * 9, "int8")
    refused((TypeError, ValueError), "device", plgpu.device_put, x, "cuda:x")
    refused((TypeError, ValueError), "device", plgpu.device_put, x, -1)
    refused(TypeError, "float64.*astype", plgpu.device_put, x.astype("f8"))
    refused(TypeError, "", plgpu.device_put, "text")
    refused(BufferError, "device_put", plgpu.DeviceArray.from_dlpack, x)
    refused(AttributeError, "", setattr, d, "shape", (1,))
    assert "128" in repr(d) and "float32" in repr(d) and len(d) == N
    for copied in (d.copy(), copy.copy(d), copy.deepcopy([d])[0]):
        assert (copied.numpy() == x).all() and copied is not d
    empty = _core.device_empty((0, 3), np.float32)
    assert empty.size == 0 and empty.numpy().shape == (0, 3)
    scalar = plgpu.device_put(np.float32(3))
    assert scalar.shape == () and scalar.numpy() == 3
    refused(TypeError, "len|sized", len, scalar)
    gone = weakref.ref(d)
    del d, copied
    gc.collect()
    assert gone() is None


def case_errors_do_not_stick():
    """Misuse of many kinds between good calls, on the same arrays."""
    k, d = plus_one(), plgpu.device_put(x)
    bad = [
        lambda: k(d, d),
        lambda: k(d, out=x),
        lambda: k(d, out=_core.device_empty((1,), np.float32)),
        lambda: kernel(lambda x, o: o.set(x[500]))(d),
        lambda: kernel(lambda x, o: 1 / 0)(d),
        lambda: kernel(scratch_types=[plgpu.SMEM((2**20,), np.float32)])(d),
    ]
    for f in bad * 2:
        try:
            f()
        except Exception:
            pass
        else:
            raise AssertionError("no error")
        assert (k(d).numpy() == x + 1).all() and (k(x) == x + 1).all()
    assert fake.fake_context_depth() == 0


def case_second_device():
    """Arrays on cuda:1 while device 0 is current."""
    k = plus_one()
    fake.fake_make_current(0)
    for device in (1, 0, 1):
        d = plgpu.device_put(x, device)
        y = k(d)
        assert y.device == f"cuda:{device}" and (y.numpy() == x + 1).all()
        assert fake.fake_last().contents.device == device
        assert fake.fake_context_depth() == 1
    other = kernel(add)
    refused(TypeError, "lie on different GPUs", other, plgpu.device_put(x, 0), d)
    (k(x) == x + 1).all()
    assert fake.fake_last().contents.device == 0 and fake.fake_context_depth() == 1
    fake.fake_make_current(-1)


def to_the_other(x, o):
    plgpu.remote_ref(o, 1 - lax.axis_index("d"))[...] = x[...] + 1


def case_mesh():
    """A mesh of two GPUs of this process: the table of peers, and the order of the launches."""
    mesh = plgpu.DeviceMesh((2,), ("d",), devices=(0, 1))
    ran = []

    def run(params, record):
        table = ctypes.cast(params[1], ctypes.POINTER(ctypes.c_uint64))
        at = ctypes.cast(params[0], ctypes.POINTER(ctypes.c_uint64))[0]
        rank, outs = table[0], table[1:3]
        ran.append((rank, record.contents.device, *outs))
        here, there = ((ctypes.c_float * N).from_address(p) for p in (at, outs[1 - rank]))
        np.ctypeslib.as_array(there)[...] = np.ctypeslib.as_array(here) + 1

    keep = Callback(run)
    fake.fake_set_kernel(keep)
    f = plgpu.spmd(kernel(to_the_other), mesh)
    xs = [plgpu.device_put(x + 100 * d, d) for d in range(2)]
    for _ in range(3):
        out = f(xs)
        assert [o.device for o in out] == ["cuda:0", "cuda:1"]
        assert (out[1].numpy() == x + 1).all() and (out[0].numpy() == x + 101).all()
    assert [r[:2] for r in ran] == [(0, 0), (1, 1)] * 3
    assert all(ran[k][2:] == ran[k + 1][2:] for k in (0, 2, 4)), "the ranks got other tables"
    assert fake.fake_context_depth() == 0

    waits = fake.fake_waits()
    f(xs, out=out)
    ordered = fake.fake_waits() - waits
    waits = fake.fake_waits()
    plgpu.spmd(kernel(to_the_other), mesh, ordered=False)(xs, out=out)
    assert fake.fake_waits() == waits and ordered >= 2

    whole = np.arange(2 * N, dtype=np.float32)
    split = plgpu.spmd(
        kernel(to_the_other), mesh, plgpu.PartitionSpec("d"), plgpu.PartitionSpec("d")
    )
    assert (split(whole) == np.concatenate([whole[N:], whole[:N]]) + 1).all()

    refused(ValueError, "for cuda:0.*is on cuda:1", f, xs[::-1])
    arrays = plgpu.symm_empty((N,), np.float32, mesh)
    assert [a.device for a in arrays] == ["cuda:0", "cuda:1"] and not arrays[1].numpy().any()
    refused(
        NotImplementedError,
        "process group",
        plgpu.symm_empty,
        (N,),
        np.float32,
        mesh,
        multicast=True,
    )
    fake.fake_set_memory(0, 1)
    refused(ValueError, "symm_empty", f, xs, out=arrays)
    fake.fake_set_memory(0, 0)
    refused(ValueError, "4", plgpu.DeviceMesh, (2,), ("d",), devices=(0, 4))

    fake.fake_set_kernel(nothing := Callback(lambda params, record: None))
    made = plgpu.spmd(kernel(lambda o: o.__setitem__(0, 1.0)), mesh)()
    assert nothing
    assert [o.device for o in made] == ["cuda:0", "cuda:1"]

    # one GPU for both devices: the second one has a stream of its own
    streams = []
    one = plgpu.spmd(kernel(to_the_other), plgpu.DeviceMesh((2,), ("d",), devices=(1, 1)))

    def note(params, record):
        streams.append((record.contents.device, record.contents.stream))

    fake.fake_set_kernel(also := Callback(note))
    waits = fake.fake_waits()
    one([plgpu.device_put(x, 1)] * 2)
    assert [s[0] for s in streams] == [1, 1] and streams[0][1] != streams[1][1]
    assert fake.fake_waits() >= waits + 2 and also


def wait_for_the_other(x, o, arrived):
    pl.semaphore_signal(arrived, device_id=1 - lax.axis_index("d"))
    pl.semaphore_wait(arrived)
    o[...] = x[...]


def waiting(mesh):
    scratch = [plgpu.SemaphoreType.REGULAR]
    return plgpu.spmd(kernel(wait_for_the_other, scratch_types=scratch), mesh)


class Watched(ctypes.Structure):
    """struct Watch of the generated programs."""

    _fields_ = [
        ("words", ctypes.POINTER(ctypes.c_uint32)),
        ("mesh", ctypes.c_uint32),
        ("kernel", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    ]


def case_mesh_watch():
    """Waits that were ended, by their kernel or by a launch that failed, are what later calls on
    the mesh raise; a new mesh is not concerned."""
    at = lambda: plgpu.DeviceMesh((2,), ("d",), devices=(0, 1), timeout=1.5)  # noqa: E731
    mesh, seen, reports = at(), [], []
    assert at() == mesh and hash(at()) == hash(mesh) and copy.copy(mesh) is mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    f, xs = waiting(mesh), [plgpu.device_put(x, d) for d in range(2)]

    def run(params, record):
        w = ctypes.cast(params[3], ctypes.POINTER(Watched))[0]  # after x, o, counters
        seen.append((w.mesh, w.rank, w.words[0], w.words[1]))
        if reports:
            w.words[0] = 1
            row = [w.kernel + 1, *reports[w.rank]]
            for k, word in enumerate(row):
                w.words[8 + 8 * w.rank + k] = word

    keep = Callback(run)
    fake.fake_set_kernel(keep)
    f(xs)
    assert [s[1:] for s in seen] == [(0, 0, 1500), (1, 0, 1500)] and seen[0][0] == seen[1][0]
    reports += [(0, 0, 0, 1, 7, 133), (0, 0, 0, 1, 0, 0)]
    y = f(xs)
    line = wait_for_the_other.__code__.co_firstlineno + 2
    first = (
        r"lasted longer than the timeout of the mesh\. Make a new DeviceMesh.*\n  rank 0, kernel"
        r" wait_for_the_other_kernel: semaphore_wait of element 0 of 'arrived', which is 0,"
        rf" for 1 or more \(block 7, thread 1, warp 0\) at .*fake_driver.py:{line}\n  rank 1, "
    )
    refused(plgpu.DeadlockError, first, y[0].numpy)  # once, where results are looked at
    y[0].numpy()
    for _ in range(2):
        refused(plgpu.DeadlockError, first, f, xs)
    reports.clear()

    again = at()
    assert again != mesh and at() == again
    g = waiting(again)
    g(xs)
    assert seen[-1][0] != seen[0][0]
    fake.fake_fail(b"cuLaunchKernelEx", 719, 1)
    refused(plgpu.LaunchError, "failed", g, xs)
    refused(plgpu.DeadlockError, "a launch on rank 1 failed: the launch of kernel", g, xs)
    refused(plgpu.DeadlockError, "timeout of the mesh", f, xs)
    g = waiting(at())
    fake.fake_fail(b"cuLaunchKernelEx", 719, 0)  # nobody waits for those that were not launched
    refused(plgpu.LaunchError, "failed", g, xs)
    g(xs)
    refused(ValueError, "timeout must be seconds", plgpu.DeviceMesh, 2, "d", timeout=-1)


def case_mesh_close():
    """Closing waits for kernels on all devices; a new mesh begins anew; an exception ends waits."""
    at = lambda: plgpu.DeviceMesh((2,), ("d",), devices=(0, 1), timeout=1.5)  # noqa: E731
    xs, words = [plgpu.device_put(x, d) for d in range(2)], []

    def run(params, record):
        w = ctypes.cast(params[3], ctypes.POINTER(Watched))[0]
        words.append((w.mesh, w.words))

    fake.fake_set_kernel(keep := Callback(run))
    mesh = at()
    f = waiting(mesh)
    mesh.close()  # nothing has run
    mesh = at()
    refused(RuntimeError, "the mesh d=2 of 0,1 was closed", f, xs)
    f = waiting(mesh)
    y = f(xs)
    before = fake.fake_synchronized()
    mesh.close()
    mesh.close()
    assert fake.fake_synchronized() == before + 2 and keep
    refused(RuntimeError, "was closed", f, xs)
    refused(RuntimeError, "was closed", f, xs, out=y)
    refused(RuntimeError, "was closed", plgpu.symm_empty, (N,), np.float32, mesh)
    assert y[0].numpy().shape == x.shape and not words[-1][1][0]

    again = at()
    assert again != mesh
    waiting(again)(xs)
    assert words[-1][0] != words[0][0]
    try:
        with again:
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert words[-1][1][0] == 2  # asked to end
    refused(RuntimeError, "was closed", again.__enter__)

    mesh = at()
    waiting(mesh)(xs)
    fake.fake_fail(b"cuCtxSynchronize", 801, 1)
    refused(plgpu.DriverError, "kernels of a mesh failed on GPU 1", mesh.close)
    assert mesh.closed and fake.fake_context_depth() == 0
    waiting(at())(xs)


def case_mesh_exit():
    """At exit, kernels of meshes end before anything else; a mesh that was closed does no harm."""
    before = None

    def check():  # after the function of the mesh, which was registered later
        os._exit(0 if fake.fake_synchronized() > before else 1)

    atexit.register(check)
    fake.fake_set_kernel(0)
    for timeout in (2, 3):
        mesh = plgpu.DeviceMesh((2,), ("d",), devices=(0, 1), timeout=timeout)
        waiting(mesh)([plgpu.device_put(x, d) for d in range(2)])
        if timeout == 2:
            mesh.close()
    before = fake.fake_synchronized()


def case_fork():
    """As in workers of a data loader: the child has the interpreter, the parent the GPU."""
    k, d = plus_one(), plgpu.device_put(x)
    k(d), k(x)
    child = os.fork()
    if child == 0:
        try:
            refused(plgpu.DriverError, "forked.*spawn", k, d)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert (kernel()(x) == x + 1).all()
            assert (kernel(interpret=True)(x) == x + 1).all()
            plgpu.clear_caches()
            del k, d
            gc.collect()
            os._exit(0)
        except BaseException as e:
            print(type(e).__name__, e, flush=True)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (k(d).numpy() == x + 1).all() and (k(x) == x + 1).all()


def case_no_gpu():
    refused(plgpu.DriverError, os.environ["EXPECTED"], plgpu.device_put, x)
    os.environ["PALLAS_MGPU_BACKEND"] = "cuda"
    refused(plgpu.DriverError, os.environ["EXPECTED"], kernel(), x)
    os.environ["PALLAS_MGPU_BACKEND"] = "interpret"
    assert (kernel()(x) == x + 1).all()


if __name__ == "__main__":
    globals()["case_" + sys.argv[1]]()
