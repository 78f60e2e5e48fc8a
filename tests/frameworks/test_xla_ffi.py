"""The handlers of XLA's foreign function interface, called as XLA calls them but without XLA: what
they answer about themselves, and that a call of another version is an error, not a crash."""

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_void_p

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops

STRING, INSTANTIATE = 4, 0


class Version(Structure):
    _fields_ = [("size", c_size_t), ("extensions", c_void_p), ("major", c_int), ("minor", c_int)]


class ErrorCreate(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extensions", c_void_p),
        ("message", c_char_p),
        ("code", c_int),
    ]


CREATE = CFUNCTYPE(c_void_p, POINTER(ErrorCreate))


class Api(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extensions", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", CREATE),
        ("others", c_void_p * 3),
        ("stream_get", c_void_p),
    ]


class Buffers(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extensions", c_void_p),
        ("count", ctypes.c_int64),
        ("types", c_void_p),
        ("at", c_void_p),
    ]


class Attributes(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extensions", c_void_p),
        ("count", ctypes.c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("at", c_void_p),
    ]


class Call(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("extensions", c_void_p),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


class Span(Structure):
    _fields_ = [("at", c_char_p), ("size", c_size_t)]


class Metadata(Structure):
    _fields_ = [("size", c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]


class Extension(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(Metadata)),
    ]


def handler(k):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    return CFUNCTYPE(c_void_p, POINTER(Call))(get(_core.xla_handlers()[k], None))


def attributes_of(strings):
    """Attributes that are strings, and what must outlive them."""
    n = len(strings)
    names, values = ((Span * n)(*(Span(t, len(t)) for t in x)) for x in (strings, strings.values()))
    at = [(c_void_p * n)(*(ctypes.addressof(x) for x in spans)) for spans in (names, values)]
    types = (c_int * n)(*[STRING] * n)
    pointers = (ctypes.cast(x, c_void_p) for x in (types, *at))
    return Attributes(ctypes.sizeof(Attributes), None, n, *pointers), (names, values, at, types)


def call(k, major=0, minor=3, api_size=None, call_size=None, extension=None, stage=3, strings=None):
    """The error of a call, or None. strings: attributes."""
    said = []

    @CREATE
    def create(args):
        said.append((args.contents.code, args.contents.message.decode()))
        return 1

    api = Api(size=api_size or ctypes.sizeof(Api), version=Version(32, None, major, minor))
    api.error_create = create
    frame = Call(size=call_size or ctypes.sizeof(Call), api=ctypes.pointer(api), stage=stage)
    if strings:
        frame.attributes, kept = attributes_of(strings)
    if extension is not None:
        frame.extensions = ctypes.cast(byref(extension), c_void_p)
    assert bool(handler(k)(byref(frame))) == bool(said)
    return said[0] if said else None


def digest(data):
    return _core.digest(data).encode()


# the handlers for the CPU, and for GPUs
both = pytest.mark.parametrize("k", [0, 1], ids=["first", "second"])


@both
@pytest.mark.parametrize("minor", [1, 3, 9])
def test_metadata(k, minor):
    """The version of XLA, of the same major version, and that calls may be recorded."""
    metadata = Metadata(size=ctypes.sizeof(Metadata))
    extension = Extension(size=ctypes.sizeof(Extension), type=1, metadata=ctypes.pointer(metadata))
    assert call(k, minor=minor, extension=extension) is None
    assert (metadata.version.major, metadata.version.minor) == (0, minor)
    assert metadata.traits == 1


@both
def test_another_major_version(k):
    metadata = Metadata(size=ctypes.sizeof(Metadata))
    extension = Extension(size=ctypes.sizeof(Extension), type=1, metadata=ctypes.pointer(metadata))
    call(k, major=1, minor=0, extension=extension)
    assert (metadata.version.major, metadata.version.minor) == (0, 3)  # XLA refuses that
    code, text = call(k, major=1)
    assert "version 1.3" in text and "knows 0.3" in text and code == 13


@both
@pytest.mark.parametrize("short", [{"call_size": 64}, {"api_size": 72}])
def test_structs_that_are_too_small(k, short):
    _, text = call(k, **short)
    assert "update pallas_mgpu" in text


@both
def test_a_call_without_attributes(k):
    code, text = call(k)
    assert code == 3 and "ValueError" in text and "no hash" in text


def test_a_kernel_of_another_version():
    """What a launch must be is made from the graph again: not for a cubin of another program."""
    x = plgpu.ShapeDtypeStruct((8, 256), np.float16)
    lowered = ops.softmax.kernel(x).lower(x, target="sm_90a")
    strings = {
        b"graph": lowered.as_text("graph").encode(),
        b"cubin": lowered.cubin().hex().encode(),
        b"name": b"softmax",
    }
    program = digest(lowered.graph.cuda(line=False)[0].encode())
    both = digest(digest(strings[b"graph"]) + digest(strings[b"cubin"]))
    other = strings | {b"hash": both, b"program": program[::-1]}
    code, text = call(1, stage=INSTANTIATE, strings=other)
    assert code == 3 and "compiled by another version of pallas_mgpu" in text
    right = other | {b"program": program}
    assert call(1, stage=INSTANTIATE, strings=right) is None
    for damaged in (b"graph", b"cubin", b"hash"):  # even where the kernel is known by now
        text = right[damaged]
        wrong = right | {damaged: text[:-9] + bytes([text[-9] ^ 1]) + text[-8:]}
        code, text = call(1, stage=INSTANTIATE, strings=wrong)
        assert code == 3 and "kernel softmax: the attributes of a call are damaged" in text
