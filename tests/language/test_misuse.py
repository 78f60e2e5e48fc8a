"""Misuse by the hundred: the type of the exception, a text that names what is wrong, the user's
line where a body is at fault, and a process that works afterwards."""

import copy
import gc
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, nn, pl
from pallas_mgpu import numpy as jnp

F32 = plgpu.ShapeDtypeStruct((128,), np.float32)
I32 = plgpu.ShapeDtypeStruct((128,), np.int32)
X = np.arange(128, dtype=np.float32)
HALF = np.float16
SMEM, BAR = plgpu.SMEM((128,), np.float32), plgpu.Barrier()
BS, EP = plgpu.BlockSpec, plgpu.emit_pipeline
VE, TE, NIE, AE = ValueError, TypeError, NotImplementedError, AttributeError


def add_one(x, o):
    o[...] = x[...] + 1


GOOD = plgpu.kernel(add_one, out_type=F32, interpret=True)


def still_works():
    """A kernel traced before and one traced now."""
    for k in (GOOD, plgpu.kernel(add_one, out_type=F32, interpret=True)):
        np.testing.assert_array_equal(k(X), X + 1)


def check(error, pattern, f, placed):
    with pytest.raises(error) as info:
        f()
    assert type(info.value) is error, repr(info.value)
    text = str(info.value)
    assert re.search(pattern, text), text
    if placed:
        assert re.search(rf"\n  at {re.escape(__file__)}:\d+", text), text
    assert len(text) < 2000
    still_works()


def lazily(r, x):
    plgpu.ext.warp_where(x > 0, lambda: (r.__setitem__(..., 2.0), x)[1], x)


def run(f, *args, out=F32, **options):
    """f is the body; its output is written, so that it alone is at fault."""

    def body(*refs):
        result = f(*refs)
        if out is F32:
            refs[1][...] = refs[0][...]
        return result if callable(result) else None

    return lambda: plgpu.kernel(body, out_type=out, interpret=True, **options)(*(args or (X,)))


def named(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


# ---- while a kernel is defined or called -----------------------------------------------------


def define(body=add_one, out_type=F32, **options):
    return lambda: plgpu.kernel(body, out_type=out_type, interpret=True, **options)


def call(*args, out_type=F32, body=add_one, **kw):
    return lambda: plgpu.kernel(body, out_type=out_type, interpret=True)(*args, **kw)


class Evil:
    def __repr__(self):
        raise RuntimeError("evil")


class NoCapsule:
    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **kw):
        return 5


class NoDevice(NoCapsule):
    def __dlpack_device__(self):
        return "cpu"


frozen = X.copy()
frozen.flags.writeable = False
big = plgpu.ShapeDtypeStruct((2**31, 2**31), np.float32)

DEFINITIONS = {
    "body": (TE, "body must be callable, got 5", define(5)),
    "out_type int": (
        TE,
        r"out_type must have shape and dtype: a plgpu.ShapeDtypeStruct\(.*; got 5",
        define(out_type=5),
    ),
    "out_type type": (TE, "ShapeDtypeStruct.*; got <class", define(out_type=np.float32)),
    "out_type evil": (TE, "got a Evil", define(out_type=Evil())),
    "out_type smem": (VE, r"output is in GMEM, got SMEM\(\(128,\)", define(out_type=SMEM)),
    "out_type rank": (VE, "9 dimensions; at most 8", define(out_type=np.zeros((1,) * 9, "i4"))),
    "out_type empty": (VE, r"shape \(0,\).*at least 1", define(out_type=np.zeros(0, "f4"))),
    "out_type huge": (VE, r"shape.*less than 2\*\*31", define(out_type=big)),
    "grid float": (TE, r"kernel: grid must be a tuple of ints, got \(2.5,\)", define(grid=(2.5,))),
    "grid 0": (VE, r"grid must be positive, got \(0,\)", define(grid=(0,))),
    "grid None": (TE, "grid must be a tuple of ints, got None", define(grid=None)),
    "grid_names": (VE, "differ in length", define(grid=(2, 2), grid_names=("a",))),
    "grid_names twice": (VE, "names must differ", define(grid=(2, 2), grid_names=("a", "a"))),
    "grid_names None": (TE, "grid_names must be a tuple", define(grid=(2,), grid_names=None)),
    "grid_names list": (TE, "hashable", define(grid=(2,), grid_names=([],))),
    "cluster unnamed": (VE, "differ in length", define(cluster=(2,))),
    "cluster big": (VE, "at most 16 blocks", define(cluster=(17,), cluster_names=("c",))),
    "threads unnamed": (VE, "num_threads and thread_name go together", define(num_threads=2)),
    "threads 0": (VE, "1 to 8, .*got 0", define(num_threads=0, thread_name="t")),
    "threads 9": (VE, "1 to 8, .*got 9", define(num_threads=9, thread_name="t")),
    "threads 1.5": (TE, "must be an int, got 1.5", define(num_threads=1.5, thread_name="t")),
    "threads True": (TE, "must be an int, got True", define(num_threads=True, thread_name="t")),
    "kernel_name": (TE, "kernel_name must be printable text, got 5", define(kernel_name=5)),
    "kernel_name newline": (TE, "printable", define(kernel_name="a\nb")),
    "compiler_params": (TE, r"plgpu.CompilerParams, got \{\}", define(compiler_params={})),
    "dimension_semantics": (
        NIE,
        "lax.fori_loop",
        define(compiler_params=plgpu.CompilerParams(dimension_semantics=("parallel",))),
    ),
    "scratch bare": (TE, "tuple, list or dict of descriptors", define(scratch_types=BAR)),
    "scratch text": (TE, "tuple, list or dict of descriptors", define(scratch_types="ab")),
    "scratch keys": (TE, "parameter names of the body", define(scratch_types={5: BAR})),
    "keyword": (TE, "unknown argument 'gird', did you mean 'grid'", define(gird=(1,))),
    "interpret": (
        TE,
        "a bool, .emulate. or plgpu.Interpret",
        lambda: plgpu.kernel(add_one, interpret=5),
    ),
    "profile": (VE, "go together", lambda: plgpu.CompilerParams(profile_space=5)),
    "profile dir": (
        TE,
        "profile_dir must be a path, got 3",
        lambda: plgpu.CompilerParams(profile_space=5, profile_dir=3),
    ),
    "seed": (TE, "seed must be an int, got 2.5", lambda: plgpu.InterpretParams(seed=2.5)),
    "no seed": (TE, "seed must be an int, got None", lambda: plgpu.InterpretParams(seed=None)),
    "timeline": (TE, "timeline must be a path", lambda: plgpu.InterpretParams(timeline=3)),
    "on race": (VE, "on_race must be", lambda: plgpu.InterpretParams(on_race="stop")),
    "mode": (VE, "mode must be 'strict'", lambda: plgpu.InterpretParams(mode="loose")),
    "Barrier arrivals": (VE, "at least 1 and at most 8191", lambda: plgpu.Barrier(10**9)),
    "Barrier text": (TE, "num_arrivals must be an int", lambda: plgpu.Barrier("a")),
    "Barrier none": (VE, "num_barriers must be positive", lambda: plgpu.Barrier(num_barriers=0)),
    "SMEM dtype": (TE, "got None; accepted are bool", lambda: plgpu.SMEM((1,), None)),
    "SMEM shape": (TE, "plgpu.SMEM: shape must be ints", lambda: plgpu.SMEM("ab", HALF)),
    "SMEM negative": (VE, "negative extent", lambda: plgpu.SMEM((-1,), HALF)),
    "SMEM 2**70": (VE, "no array can have", lambda: plgpu.SMEM((2**70,), HALF)),
    "SMEM packed": (VE, "only TMEM takes packed=True", lambda: plgpu.SMEM((1,), HALF, packed=True)),
    "SMEM transform": (TE, "must be a tuple", lambda: plgpu.SMEM((1,), HALF, transforms=5)),
    "SMEM tiling": (
        VE,
        "not divisible",
        lambda: plgpu.SMEM((60, 64), HALF, transforms=plgpu.TilingTransform((8, 64))),
    ),
    "SMEM swizzle": (
        VE,
        "exactly 64 elements of float16, got 32",
        lambda: plgpu.SMEM(
            (8, 32), HALF, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        ),
    ),
    "TMEM rows": (VE, "128 or 64, got 32", lambda: plgpu.TMEM((32, 128), np.float32)),
    "TMEM packing": (VE, "packed or layout", lambda: plgpu.TMEM((128, 128), HALF)),
    "REGS": (VE, "plgpu.ACC", lambda: plgpu.REGS((128, 128), np.float32)),
    "swizzle 16": (VE, "32, 64 or 128 bytes, got 16", lambda: plgpu.SwizzleTransform(16)),
    "tiling 0": (VE, "tiles must be positive", lambda: plgpu.TilingTransform((0, 8))),
    "layout shape": (VE, "multiple of 128", lambda: plgpu.Layout.WG_STRIDED((100,), 1)),
    "layout vec": (VE, "vec_size must be positive", lambda: plgpu.Layout.WG_STRIDED((128,), 0)),
    "snake of no width": (VE, "tile_width must be", lambda: plgpu.planar_snake(0, (3, 3), 0, 0)),
    "layout tiled": (TE, "must be a plgpu.Tiling", lambda: plgpu.Layout.TILED(1, 2, 3, 4)),
    "layout reduce": (TE, "axes must be ints", lambda: plgpu.Layout.WGMMA.reduce("a")),
    "call nothing": (
        TE,
        r"the body is add_one\(x, o\), and it gets 0 operands, 1 output and",
        call(),
    ),
    "call two": (TE, r"gets 2 operands, 1 output.*\n  at .*test_misuse.py:\d+", call(X, X)),
    "call keyword": (TE, "unknown argument 'x'; only out=", call(x=X)),
    "call rows": (TE, "list of numbers, which would be 6 arguments", call([[1, 2, 3], [4, 5, 6]])),
    "many out": (NIE, "1 arguments and 200 arrays as out=", call(X, out=[X] * 200)),
    "call text": (TE, "argument 0 is a str, which is no array", call("a")),
    "call i64": (OverflowError, "of int64. is converted to int32, and", call(np.full(128, 2**40))),
    "call big-endian": (TE, "dtype >f4", call(X.astype(">f4"))),
    "call object": (TE, "dtype object", call(X.astype(object))),
    "call complex": (TE, "dtype complex64, which kernels do not take: cast", call(X.astype("c8"))),
    "call text array": (TE, "dtype <U32", call(X.astype("U"))),
    "call struct": (TE, "dtype", call(np.zeros(128, [("a", "f4")]))),
    "call fp8": (TE, "float8_e3m4", call(X.astype(ml_dtypes.float8_e3m4))),
    "call rank 9": (VE, "9 dimensions", call(np.zeros((1,) * 9, "f4"))),
    "call empty": (VE, r"argument 0 has shape \(3, 0\)", call(np.zeros((3, 0), "f4"))),
    "call 2**40": (OverflowError, "argument 0.*int32", call(2**40)),
    "call evil": (TE, "argument 0 is a Evil", call(Evil())),
    "call no capsule": (TE, "no capsule", call(NoCapsule())),
    "call no device": (TE, "no pair of ints", call(NoDevice())),
    "call spec": (TE, "ShapeDtypeStruct, which is no array", call(F32)),
    "call many": (
        NIE,
        "at most 128",
        call(*[X] * 200, body=lambda *r: None),
    ),
    "out shape": (
        VE,
        r"out\[0\] must be float32 of shape \(128,\); got float32 of shape \(64,\)",
        call(X, out=np.zeros(64, "f4")),
    ),
    "out dtype": (VE, "got int32", call(X, out=np.zeros(128, "i4"))),
    "out f64": (TE, r"out\[0\].*float64", call(X, out=np.zeros(128))),
    "out frozen": (VE, r"out\[0\].*read-only", call(X, out=frozen)),
    "out strided": (VE, r"out\[0\].*not contiguous", call(X, out=np.zeros(256, "f4")[::2])),
    "out count": (TE, "out has 2 arrays, and the kernel has 1", call(X, out=(X, X))),
    "out number": (TE, "an array is needed", call(X, out=5)),
    "lower target": (VE, "sm_90a, sm_100a.*'sm_75'", lambda: GOOD.lower(X, target="sm_75")),
    "lower target type": (TE, "sm_90a", lambda: GOOD.lower(X, target=90)),
    "lower text": (VE, "graph, traced, cuda, ptx, sass", lambda: GOOD.lower(X).as_text("q")),
}


@named(DEFINITIONS)
def test_definitions_and_calls(case):
    check(*case, placed=False)


# ---- in a body -------------------------------------------------------------------------------


def value(f):
    return run(lambda x, o: f(x[...]))


def index(i):
    return run(lambda x, o: x[i])


def on_ref(f, **options):
    return run(lambda x, o: f(x), **options)


def on_axes(f):
    return lambda x, o: f(("a", "a"))


def on_semaphore(x, o):
    plgpu.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR), 2**40)


ARRAYS = {
    "index text": (VE, "str is no index; use ints, slices, pl.ds", index("a")),
    "index float": (VE, "float is no index", index(1.5)),
    "index floats": (VE, "must be integers, got float32", run(lambda x, o: x[x[...]])),
    "index bool": (VE, "a bool is no index", index(True)),
    "index list": (VE, "list is no index", index([1, 2])),
    "index array": (VE, "pass the indices as an operand", index(np.array([1, 2]))),
    "index 2**70": (VE, "more than 64 bits", index(2**70)),
    "index high": (VE, "index 128 is out of bounds for dimension 0", index(128)),
    "index low": (VE, "index -129 is out of bounds", index(-129)),
    "index empty": (VE, "slice of dimension 0 of float32.128. is empty", index(slice(5, 5))),
    "index back": (VE, "step -1", index(slice(None, None, -1))),
    "index many": (VE, "too many indices", index((0, 0))),
    "index dots": (VE, "at most one ...", index((..., ...))),
    "ds out": (VE, "100 elements from 100 are out of bounds", index(pl.ds(100, 100))),
    "ds empty": (VE, "size 0, it must be at least 1", index(pl.ds(0, 0))),
    "ds negative": (VE, "start -5, it must not be negative", index(pl.ds(-5, 5))),
    "ds stride": (VE, "stride 0, it must be at least 1", index(pl.ds(0, 5, 0))),
    "ds float": (TE, "must be an integer scalar", run(lambda x, o: x[pl.ds(x[0], 5)])),
    "ds size": (NIE, "Dynamic slice size", run(lambda x, o: x[pl.ds(0, x[0].astype("int32"))])),
    "slice traced": (
        plgpu.TracerBoolConversionError,
        "pl.ds",
        run(lambda x, o: x[x[0].astype("int32") :]),
    ),
    "ref + 1": (TE, r"a Ref \(float32\[128\]\) is memory.*load it first", on_ref(lambda x: x + 1)),
    "ref < 1": (TE, "load it first", on_ref(lambda x: x < 1)),
    "-ref": (TE, "load it first", on_ref(lambda x: -x)),
    "np of ref": (plgpu.TracerArrayConversionError, "load it with ref", on_ref(np.asarray)),
    "np.sin of ref": (plgpu.TracerArrayConversionError, "load it with ref", on_ref(np.sin)),
    "jnp.exp of ref": (TE, "exp: got a Ref", on_ref(jnp.exp)),
    "jnp.sum of ref": (TE, "jnp.sum: a Ref was given", on_ref(jnp.sum)),
    "store ref": (VE, "the value is a Ref", run(lambda x, o: o.set(x))),
    "store text": (
        TE,
        "expected a traced array or a number, got str",
        run(lambda x, o: o.set("a")),
    ),
    "store array": (VE, "captures non-scalar array", run(lambda x, o: o.set(X))),
    "store int": (VE, "Invalid dtype for `swap`", run(lambda x, o: o.set(1, 0))),
    "store bool": (VE, "Invalid dtype for `swap`", run(lambda x, o: o.set(True, 0))),
    "store f16": (VE, "Invalid dtype", run(lambda x, o: o.set(x[...].astype(HALF)))),
    "store scalar": (VE, "Invalid shape for `swap`.*no broadcasting", run(lambda x, o: o.set(1.0))),
    "store 2**40": (
        OverflowError,
        "Python int 1099511627776 too large to convert to int32",
        run(lambda x, o: o.set(2**40, 0), out=I32),
    ),
    "store to operand": (
        VE,
        "ref x is operand 0 of the kernel, which is read-only; write to an output",
        lambda: plgpu.kernel(lambda x, o: x.set(1.0, 3), out_type=F32, interpret=True)(X),
    ),
    "delete": (TE, "cannot be deleted", run(lambda x, o: o.__delitem__(0))),
    "reshape": (VE, r"cannot reshape float32\[128\]", on_ref(lambda x: x.reshape(3, 5))),
    "transpose": (VE, "permutation", on_ref(lambda x: x.transpose((0, 1)))),
    "bitcast": (NIE, "must have the same width", on_ref(lambda x: x.bitcast(jnp.int16))),
    "bool": (plgpu.TracerBoolConversionError, "pl.when, lax.cond or jnp.where", value(bool)),
    "int": (plgpu.ConcretizationTypeError, "no Python number", value(lambda v: int(v[0]))),
    "item": (plgpu.ConcretizationTypeError, "no Python number", value(lambda v: v.item())),
    "range": (
        plgpu.TracerIntegerConversionError,
        "Python int",
        value(lambda v: range(v[0].astype("int32"))),
    ),
    "np.sin": (plgpu.TracerArrayConversionError, "pallas_mgpu.numpy", value(np.sin)),
    "iter": (NIE, "at most 1024", value(lambda v: list(jnp.zeros((1025,))))),
    "iter 0-d": (TE, "iteration over a 0-d array", value(lambda v: list(v[0]))),
    "len 0-d": (TE, "0-d", value(lambda v: len(v[0]))),
    "assign": (TE, "immutable", value(lambda v: v.__setitem__(0, 1))),
    "at mask": (IndexError, "the mask has shape", value(lambda v: v.at[v[:3] > 0].add(1))),
    "at mask values": (VE, "known only at run time", value(lambda v: v.at[v > 0].set(v[:3]))),
    "lax shapes": (TE, "add got incompatible shapes.*64", value(lambda v: lax.add(v, v[:64]))),
    "at outside": (IndexError, "index: 128 is out of bounds", value(lambda v: v.at[128].set(1))),
    "float index": (IndexError, "must be integers, got float32", value(lambda v: v[v[0]])),
    "mask index": (IndexError, "boolean masks", value(lambda v: v[v > 0])),
    "list index": (VE, "cannot capture constants", value(lambda v: v[[1, 2]])),
    "many indices": (IndexError, "too many indices", value(lambda v: v[::2, ::2])),
    "traced slice": (
        IndexError,
        "must have static start/stop/step",
        value(lambda v: v[v[0].astype("int32") :: 2]),
    ),
    "empty slice": (VE, "has none", value(lambda v: v[5:5:2])),
    "array index": (IndexError, "index 128 is out of bounds", value(lambda v: v[128])),
    "array + array": (VE, "captures non-scalar array constants", value(lambda v: v + X)),
    "NumPy + array": (VE, "captures non-scalar array constants", value(lambda v: X + v)),
    "shapes": (VE, "Incompatible shapes for broadcasting", value(lambda v: v + v[:64])),
    "v + 2**40": (OverflowError, "too large to convert to int32", value(lambda v: v + 2**40)),
    "<< float": (TE, "shl does not accept dtype float32", value(lambda v: v << 1)),
    "& float": (TE, "and does not accept dtype float32", value(lambda v: v & 1)),
    "~ float": (TE, "not does not accept dtype float32", value(lambda v: ~v)),
    "- bool": (TE, "bool has no negative", value(lambda v: -(v > 0))),
    "@": (
        TE,
        "shapes .64, 2. and .64, 2. do not fit",
        value(lambda v: v.reshape(64, 2) @ v.reshape(64, 2)),
    ),
    "@ number": (TE, "operands must be arrays or refs, got 3", value(lambda v: v @ 3)),
    "@ scalar": (VE, "at least one dimension", value(lambda v: v @ v[0])),
    "clz of floats": (TE, "clz does not accept dtype float32", value(lambda v: lax.clz(v))),
    "erf_inv of ints": (
        TE,
        "does not accept dtype int32",
        value(lambda v: lax.erf_inv(v.astype("int32"))),
    ),
    "logistic of ints": (
        TE,
        "does not accept dtype int32",
        value(lambda v: lax.logistic(v.astype("int32"))),
    ),
    "** -1": (TE, "negative powers", value(lambda v: v.astype("int32") ** -1)),
    "int8 + 1": (NIE, "8-bit types are unsupported", value(lambda v: v.astype("int8") + 1)),
    "transpose axes": (
        VE,
        "axes .0,. for an array of rank 2",
        value(lambda v: v.reshape(2, 64).transpose((0,))),
    ),
    "transpose twice": (
        VE,
        "a dimension twice",
        value(lambda v: jnp.transpose(v.reshape(2, 64), (0, 0))),
    ),
    "argmax axes": (TE, "must be one int", value(lambda v: jnp.argmax(v.reshape(2, 64), (0, 1)))),
    "argmax axis": (VE, "axis 3 is out of bounds", value(lambda v: v.argmax(3))),
    "sort": (
        NIE,
        "8192 elements along the axis",
        value(lambda v: jnp.sort(jnp.zeros((8192,)) + v[0])),
    ),
    "stack": (VE, "shapes differ", value(lambda v: jnp.stack([v, v[:5]]))),
    "split": (VE, "do not divide into 3", value(lambda v: jnp.split(v, 3))),
    "take mode": (VE, "mode must be", value(lambda v: jnp.take(v, 3, mode="q"))),
    "pad mode": (NIE, "only 'constant'", value(lambda v: jnp.pad(v, 3, "edge"))),
    "view": (NIE, "different widths", value(lambda v: v.view(HALF))),
    "astype": (TE, "got 'foo'; accepted are bool, int8", value(lambda v: v.astype("foo"))),
    "sum axis": (VE, "axis 5 is out of bounds", value(lambda v: v.sum(axis=5))),
    "sum axes": (VE, "given twice", value(lambda v: v.reshape(2, 64).sum(axis=(0, 0)))),
    "jnp.concatenate": (
        TE,
        "differ in more than dimension 0",
        value(lambda v: jnp.concatenate([v.reshape(2, 64), v.reshape(64, 2)])),
    ),
    "jnp.concatenate 0-d": (VE, "use jnp.stack", value(lambda v: jnp.concatenate([v[0], v[1]]))),
    "jnp.dot": (TE, "do not fit", value(lambda v: jnp.dot(v, v[:5]))),
    "jnp.array": (VE, "not scalars; pass them as operands", value(lambda v: jnp.array([1, 2]))),
    "jnp.arange": (
        plgpu.ConcretizationTypeError,
        "known at trace time",
        value(lambda v: jnp.arange(v[0])),
    ),
    "jnp.arange 0": (VE, "step must not be 0", value(lambda v: jnp.arange(0, 5, 0))),
    "jnp.zeros": (TE, "shape must be ints", value(lambda v: jnp.zeros("a"))),
    "jnp.full": (VE, "value must be a scalar", value(lambda v: jnp.full((64,), v))),
    "jnp.where": (NIE, "x and y must be given", value(lambda v: jnp.where(v > 0))),
    "jnp.broadcast_to": (VE, "Incompatible shapes", value(lambda v: jnp.broadcast_to(v, (64,)))),
    "jnp.expand_dims": (VE, "axis 5", value(lambda v: jnp.expand_dims(v, 5))),
    "huge": (VE, "too many elements", value(lambda v: jnp.zeros((2**20, 2**10)) + v[0])),
    "lax.dynamic_slice": (
        TE,
        "size 200 along a dimension of 128",
        value(lambda v: lax.dynamic_slice(v, (0,), (200,))),
    ),
    "lax.slice": (VE, "200 elements from 0", value(lambda v: lax.slice(v, (0,), (200,)))),
    "lax.round": (VE, "rounding_method", value(lambda v: lax.round(v, "q"))),
    "lax.broadcast_in_dim": (
        TE,
        "neither 1 nor 64",
        value(lambda v: lax.broadcast_in_dim(v, (64,), (0,))),
    ),
    "lax.shift": (
        TE,
        "does not accept dtype float32",
        value(lambda v: lax.shift_right_logical(v, 1)),
    ),
    "lax.select_n": (TE, "one of two cases", value(lambda v: lax.select_n(v > 0, v, v, v))),
    "nn.normalize": (NIE, "nn.normalize is not supported", value(lambda v: nn.normalize(v))),
    "nn.glu odd": (VE, "must be even, got 127", value(lambda v: nn.glu(v[:127]))),
    "nn.one_hot axis": (VE, "out of bounds for rank 2", value(lambda v: nn.one_hot(v, 3, axis=5))),
    "jnp.select lists": (VE, "must have one length", value(lambda v: jnp.select([v > 0], [v, v]))),
    "reduce_precision": (VE, "at least 1", value(lambda v: lax.reduce_precision(v, 0, 3))),
    "call a kernel": (TE, "cannot be called inside of another", value(GOOD)),
    "layout None": (TE, "must be a plgpu.Layout", value(lambda v: plgpu.layout_cast(v, None))),
    "layout rank": (
        VE,
        "does not fit an array of rank 1",
        value(lambda v: plgpu.layout_cast(v, plgpu.Layout.WGMMA)),
    ),
    "iota": (
        VE,
        "dimension 2 is out of bounds",
        value(lambda v: plgpu.broadcasted_iota(jnp.int32, (8, 8), 2)),
    ),
    "print array": (
        NIE,
        r"argument 1 is float32\[128\].*printed alone",
        value(lambda v: pl.debug_print("{} {}", v[0], v)),
    ),
    "layout of gmem": (VE, "SMEM ref, got", on_ref(lambda x: plgpu.print_layout("{}", x))),
    "layout format": (VE, "exactly one bare", value(lambda v: plgpu.print_layout("{} {}", v))),
    "layout spec": (VE, "exactly one bare", value(lambda v: plgpu.print_layout("{:3}", v))),
    "layout of text": (TE, "print_layout: x", value(lambda v: plgpu.print_layout("{}", "a"))),
    "print ref": (TE, "argument 0 is a ref", on_ref(lambda x: pl.debug_print("{}", x))),
    "print count": (TE, "2 fields for 1 arguments", value(lambda v: pl.debug_print("{} {}", v[0]))),
    "print spec": (VE, "Unknown format code", value(lambda v: pl.debug_print("{:d}", v[0]))),
    "print keyword": (
        VE,
        "keyword arguments are not accepted, got {'x': ",
        value(lambda v: pl.debug_print("{x}", x=v[0])),
    ),
    "print zero": (TE, "without zero bytes", value(lambda v: pl.debug_print("a\0{}", v[0]))),
    "axis": (NameError, "unbound axis name: 'q'; bound are", run(lambda x, o: lax.axis_index("q"))),
    "axes": (VE, "an axis is repeated in", run(on_axes(lax.axis_index), grid=(2,), grid_names="a")),
    "sizes": (VE, "an axis is repeated in", run(on_axes(lax.axis_size), grid=(2,), grid_names="a")),
    "axis dict": (NameError, "unbound axis name: {}", run(lambda x, o: lax.axis_index({}))),
    "inc 2**40": (OverflowError, "semaphore_signal: inc: .*int32", run(on_semaphore)),
    "iota 2**40": (
        VE,
        "is out of bounds",
        value(lambda v: lax.broadcasted_iota("int32", (4,), 2**40)),
    ),
    "iota of a tuple": (
        TE,
        "dimension must be an int",
        value(lambda v: lax.broadcasted_iota("int32", (4,), (0,))),
    ),
    "loop 2**40": (
        OverflowError,
        "fori_loop: upper: .*int32",
        run(lambda x, o: lax.fori_loop(0, 2**40, lambda i, c: c, 0)),
    ),
    "mask 2**40": (
        TE,
        "mask must be a bool array",
        run(lambda x, o: pl.load(x.at[...], mask=2**40)),
    ),
    "program_id": (VE, "axis must be 0..0, got 1", run(lambda x, o: pl.program_id(1), grid=(2,))),
    "program_id none": (VE, "there is no grid", run(lambda x, o: pl.program_id(0))),
    "multiple_of": (VE, "at least 1", value(lambda v: pl.multiple_of(v[0].astype("int32"), 0))),
    "return": (
        VE,
        "must return None",
        lambda: plgpu.kernel(lambda x, o: 5, out_type=F32, interpret=True)(X),
    ),
}


@named(ARRAYS)
def test_arrays_and_refs(case):
    check(*case, placed=True)


def carry(f, init, n=3):
    return run(lambda x, o: lax.fori_loop(0, n, lambda i, c: f(c), init))


def leak(how):
    def body(x, o):
        kept = []
        how(x, kept)
        o[0] = kept[0] + 1

    return run(body)


def forever(x, f, n):
    return pl.when(x[0] > -1)(lambda: forever(x, f, n - 1)) if n else None


CONTROL = {
    "lower": (
        TE,
        "lower must be an integer scalar, got 0.5",
        run(lambda x, o: lax.fori_loop(0.5, 3, lambda i, c: c, 0)),
    ),
    "upper": (
        TE,
        "upper must be an integer scalar",
        run(lambda x, o: lax.fori_loop(0, x[...], lambda i, c: c, 0)),
    ),
    "uint32": (
        TE,
        "must have equal types",
        run(lambda x, o: lax.fori_loop(0, x[0].astype("uint32"), lambda i, c: c, 0)),
    ),
    "2**40": (OverflowError, "int32", carry(lambda c: c, 0, 2**40)),
    "body": (TE, "not callable", run(lambda x, o: lax.fori_loop(0, 3, 5, 0))),
    "init": (TE, "'a' is not an array, a number or a ref", carry(lambda c: c, "a")),
    "carry dtype": (
        TE,
        r"leaf 0 goes in as int32\[\] and comes out as float32\[\]",
        carry(lambda c: c * 1.5, jnp.int32(1)),
    ),
    "carry structure": (
        TE,
        r"same pytree structure, got \* and \(\*, \*\)",
        carry(lambda c: (c, c), 1),
    ),
    "carry ref": (
        TE,
        "is a ref, which must not change",
        run(lambda x, o: lax.fori_loop(0, 3, lambda i, c: c[::-1], (x, o))),
    ),
    "unroll": (
        NIE,
        "unroll=3 does not divide the 4",
        run(lambda x, o: lax.fori_loop(0, 4, lambda i, c: c, 0, unroll=3)),
    ),
    "unroll text": (
        TE,
        "unroll must be a bool or an int",
        run(lambda x, o: lax.fori_loop(0, 4, lambda i, c: c, 0, unroll="a")),
    ),
    "unroll -1": (
        VE,
        "positive",
        run(lambda x, o: lax.fori_loop(0, 4, lambda i, c: c, 0, unroll=-1)),
    ),
    "unroll traced": (
        VE,
        "statically known",
        run(lambda x, o: lax.fori_loop(0, x[0].astype("int32"), lambda i, c: c, 0, unroll=2)),
    ),
    "while int": (
        TE,
        "must be a bool scalar",
        run(lambda x, o: lax.while_loop(lambda c: c, lambda c: c, 1)),
    ),
    "while None": (
        TE,
        "result of cond_fun",
        run(lambda x, o: lax.while_loop(lambda c: None, lambda c: c, 1)),
    ),
    "cond array": (
        TE,
        "predicate must be a scalar",
        run(lambda x, o: lax.cond(x[...] > 0, int, int)),
    ),
    "cond text": (TE, "cond: the predicate", run(lambda x, o: lax.cond("a", int, int))),
    "cond types": (
        TE,
        r"leaf 0 is int32\[\] and float32\[\]",
        run(lambda x, o: lax.cond(x[0] > 0, lambda: jnp.int32(1), lambda: jnp.float32(1))),
    ),
    "cond structure": (
        TE,
        "same pytree structure",
        run(lambda x, o: lax.cond(x[0] > 0, lambda: 1, lambda: (1,))),
    ),
    "cond ref": (
        VE,
        "cannot return a ref",
        run(lambda x, o: lax.cond(x[0] > 0, lambda: x, lambda: x)),
    ),
    "cond view": (TE, "close over it", run(lambda x, o: lax.cond(x[0] > 0, len, len, x.at[0:3]))),
    "switch empty": (VE, "at least one branch", run(lambda x, o: lax.switch(0, []))),
    "switch float": (TE, "integer scalar", run(lambda x, o: lax.switch(x[0], [int, int]))),
    "switch many": (
        VE,
        "1 to 65535 are supported",
        run(lambda x, o: lax.switch(x[0].astype("int32"), [int] * 70000)),
    ),
    "scan": (VE, "length must be given", run(lambda x, o: lax.scan(lambda c, y: (c, None), 0))),
    "scan ref": (TE, "load it first", run(lambda x, o: lax.scan(lambda c, y: (c, None), 0, x))),
    "when array": (
        TE,
        "pl.when: the predicate must be a scalar",
        run(lambda x, o: pl.when(x[...] > 0)(int)),
    ),
    "when text": (TE, "pl.when: the predicate", run(lambda x, o: pl.when("a")(int))),
    "when result": (TE, "must return None", run(lambda x, o: pl.when(True)(int))),
    "loop step": (VE, "step must be positive, got 0", run(lambda x, o: pl.loop(0, 4, step=0)(int))),
    "loop result": (TE, "must return None", run(lambda x, o: pl.loop(0, 4)(lambda i: i))),
    "nesting": (NIE, "more than 64 nested loops", run(lambda x, o: forever(x, None, 100))),
    "leak index": (
        plgpu.UnexpectedTracerError,
        "loop, branch or scope that has ended",
        leak(lambda x, k: lax.fori_loop(0, 3, lambda i, c: k.append(i) or c, 0)),
    ),
    "leak branch": (
        plgpu.UnexpectedTracerError,
        "that has ended",
        leak(lambda x, k: pl.when(x[0] > 0)(lambda: k.append(x[1]))),
    ),
    "leak map": (
        plgpu.UnexpectedTracerError,
        "that has ended",
        leak(
            lambda x, k: EP(
                lambda i, a: None, grid=(2,), in_specs=[BS((64,), lambda i: k.append(i) or i)]
            )(x)
        ),
    ),
    "scope result": (
        VE,
        "a ref cannot leave its scope",
        run(lambda x, o: pl.run_scoped(lambda s: s, SMEM)),
    ),
    "scope axes": (
        VE,
        "no thread axis",
        run(lambda x, o: pl.run_scoped(len, SMEM, collective_axes="q")),
    ),
    "scope int": (TE, "cannot allocate 5; accepted are", run(lambda x, o: pl.run_scoped(len, 5))),
    "scope space": (
        TE,
        r"accepted are plgpu.SMEM\(shape, dtype\)",
        run(lambda x, o: pl.run_scoped(len, plgpu.SMEM)),
    ),
    "scope gmem": (
        NIE,
        "gmem cannot be allocated",
        run(lambda x, o: pl.run_scoped(len, plgpu.GMEM((1,), HALF))),
    ),
    "scope huge": (
        VE,
        "exceeds available shared memory",
        run(lambda x, o, s: s.set(1.0, 0), scratch_types=[plgpu.SMEM((2**20,), np.float32)]),
    ),
    "init in scope": (
        VE,
        "only for pl.run_state",
        run(lambda x, o: pl.run_scoped(len, plgpu.ACC.init(jnp.zeros((64, 64))))),
    ),
    "run_state of a ref": (
        NIE,
        "leaves are plgpu.ACC.init",
        run(lambda x, o: pl.run_state(len)(x)),
    ),
    "run_state in a warp": (
        NIE,
        "written in plgpu.warp_map",
        run(
            lambda x, o: pl.run_state(lambda r: plgpu.warp_map(lambda w: r.__setitem__(..., 2.0)))(
                1.0
            )
        ),
    ),
    "run_state in warp_where": (
        NIE,
        "plgpu.ext.warp_where or the condition",
        run(lambda x, o: pl.run_state(lambda r: lazily(r, x[...]))(1.0)),
    ),
    "run_state in a condition": (
        NIE,
        "the condition of a loop",
        run(
            lambda x, o: pl.run_state(
                lambda r: lax.while_loop(lambda c: r.__setitem__(..., 2.0), lambda c: c, 0)
            )(1.0)
        ),
    ),
    "run_state ref": (VE, "ref cannot leave", run(lambda x, o: pl.run_state(lambda r: [r])(1.0))),
    "run_state shape": (
        VE,
        "Invalid shape for `swap`",
        run(lambda x, o: pl.run_state(lambda r: r.__setitem__(..., 1.0))(x[...])),
    ),
    "run_state dtype": (
        VE,
        "Invalid dtype for `swap`",
        run(lambda x, o: pl.run_state(lambda r: r.__setitem__(..., r[...] > 0))(x[...])),
    ),
    "accumulator of threads": (
        VE,
        "private to a thread",
        run(
            lambda x, o, a: None,
            scratch_types=[plgpu.ACC((64, 64))],
            num_threads=2,
            thread_name="t",
        ),
    ),
    "33 barriers": (
        NIE,
        "at most 32 barriers",
        run(lambda x, o, b: None, scratch_types=[plgpu.Barrier(num_barriers=33)]),
    ),
}


@named(CONTROL)
def test_control_flow_and_scopes(case):
    check(*case, placed=True)


# ---- copies, barriers, tensor cores, pipelines ------------------------------------------------

load, wait = plgpu.copy_gmem_to_smem, plgpu.barrier_wait


def partitioned(part, n=128):
    """Of all of x, 128 elements, to n."""
    return run(
        lambda x, o, s, b: load(x, s, b, collective_axes="c", leader_tracked=part),
        scratch_types=[plgpu.SMEM((n,), np.float32), BAR],
        cluster=(2,),
        cluster_names=("c",),
    )


def copying(f):
    return run(f, scratch_types=[SMEM, BAR])


def barriers(f, n=3):
    return run(f, scratch_types=[plgpu.Barrier(num_barriers=n)])


def product(f=plgpu.wgmma, acc=(64, 64), a=(64, 64), b=(64, 64), dtypes=(HALF, HALF), **kw):
    def body(x, o, a_smem, b_smem):
        pl.run_scoped(lambda c: f(c, a_smem, b_smem) and None, plgpu.ACC(acc, **kw))

    types = [plgpu.SMEM(s, d) for s, d in zip((a, b), dtypes)]
    return run(body, scratch_types=types)


HARDWARE = {
    "copy of array": (TE, "src must be a ref", copying(lambda x, o, s, b: load(x[...], s, b))),
    "copy of NumPy": (
        TE,
        r"got a ndarray of shape \(128,\)",
        copying(lambda x, o, s, b: load(X, s, b)),
    ),
    "copy backwards": (VE, "src must be a GMEM ref", copying(lambda x, o, s, b: load(s, x, b))),
    "copy shape": (
        VE,
        r"src has shape \(64,\) and dst \(128,\)",
        copying(lambda x, o, s, b: load(x.at[:64], s, b)),
    ),
    "copy dtype": (
        VE,
        "src is float32 and dst is float16",
        run(lambda x, o, s, b: load(x, s, b), scratch_types=[plgpu.SMEM((128,), HALF), BAR]),
    ),
    "copy barrier": (VE, "barrier is required on Hopper", copying(lambda x, o, s, b: load(x, s))),
    "copy wrong barrier": (VE, "must be a barrier ref", copying(lambda x, o, s, b: load(x, s, s))),
    "copy oob": (VE, "plgpu.OOBFillMode", copying(lambda x, o, s, b: load(x, s, b, oob_mode="a"))),
    "copy predicate": (
        TE,
        "must be a bool scalar",
        copying(lambda x, o, s, b: load(x, s, b, predicate=1)),
    ),
    "copy collective": (
        VE,
        "'c' is not a cluster axis",
        copying(lambda x, o, s, b: load(x, s, b, collective_axes="c")),
    ),
    "copy leader": (
        VE,
        "needs collective_axes",
        copying(lambda x, o, s, b: load(x, s, b, leader_tracked=1)),
    ),
    "copy partitioned": (
        VE,
        r"dim 0 is partitioned over an axis of size 2 \('c'\), so dst of shape \(128,\) needs src"
        r" of shape \(256,\), got \(128,\)",
        partitioned(plgpu.CopyPartition.PARTITIONED(0)),
    ),
    "copy partitioned shapes": (
        VE,
        r"axis of size 2 \('c'\), so dst of shape \(32,\) needs src of shape \(64,\), got \(128,\)",
        partitioned(plgpu.CopyPartition.PARTITIONED(0), 32),
    ),
    "copy partitioned dim": (VE, "PARTITIONED.1.", partitioned(plgpu.CopyPartition.PARTITIONED(1))),
    "copy gather": (
        NIE,
        "src is indexed by arrays; copies take rows of a matrix",
        copying(lambda x, o, s, b: load(x.at[jnp.arange(128)], s, b)),
    ),
    "copy to operand": (
        VE,
        "operand 0 of the kernel, which is read-only",
        copying(lambda x, o, s, b: plgpu.copy_smem_to_gmem(s, x)),
    ),
    "copy reduction": (
        VE,
        "reduction_op must be one of",
        copying(lambda x, o, s, b: plgpu.copy_smem_to_gmem(s, o, reduction_op="mul")),
    ),
    "copy unwaited": (VE, "Wait for all of them", copying(lambda x, o, s, b: load(x, s, b))),
    "accumulator unread": (
        VE,
        "scope of accumulator '.*' ends while the wgmma",
        product(b=(64, 64)),
    ),
    "wait twice": (
        plgpu.DeadlockError,
        "thread 0: barrier_wait at .*for phase 2",
        copying(lambda x, o, s, b: (load(x, s, b), wait(b), wait(b)) and None),
    ),
    "wait for another phase": (
        VE,
        "phase is 2, but this thread waited for 0 phases of barrier",
        copying(lambda x, o, s, b: (load(x, s, b), wait(b, phase=2)) and None),
    ),
    "phase of floats": (
        TE,
        "phase must be an int32 scalar, got float32",
        copying(lambda x, o, s, b: (load(x, s, b), wait(b, phase=1.5)) and None),
    ),
    "arrive twice": (
        VE,
        "for the first time, but 2 phases are complete",
        barriers(
            lambda x, o, b: (plgpu.barrier_arrive(b), plgpu.barrier_arrive(b), wait(b)) and None, 1
        ),
    ),
    "wait on array": (VE, "must be a barrier ref", on_ref(wait)),
    "wait on many": (VE, r"needs one barrier, got 3.*\.at\[i\]", barriers(lambda x, o, b: wait(b))),
    "wait out": (VE, "index 3 is out of bounds", barriers(lambda x, o, b: wait(b.at[3]))),
    "wait out at run time": (
        IndexError,
        "index 5 of dimension 0",
        barriers(lambda x, o, b: wait(b.at[x[5].astype("int32")])),
    ),
    "read barrier": (VE, "cannot be read or written", barriers(lambda x, o, b: b[...])),
    "wait groups": (VE, "n must not be negative", on_ref(lambda x: plgpu.wait_smem_to_gmem(-1))),
    "wait traced": (TE, "must be a Python int", on_ref(lambda x: plgpu.wait_smem_to_gmem(x[0]))),
    "wait before Hopper": (
        VE,
        "n must not be negative, got -1",
        on_ref(lambda x: plgpu.wait_gmem_to_smem(-1)),
    ),
    "registers": (
        VE,
        "multiple of 8 in 24..256, got 23",
        on_ref(lambda x: plgpu.set_max_registers(23, action="increase")),
    ),
    "registers up": (
        VE,
        "'increase' or 'decrease'",
        on_ref(lambda x: plgpu.set_max_registers(24, action="up")),
    ),
    "product K": (VE, r"must be \(M, N\), \(M, K\), \(K, N\)", product(b=(32, 64))),
    "product K 8": (VE, "K is 8; it must be a multiple of 16", product(a=(64, 8), b=(8, 64))),
    "product N": (VE, "N a multiple of 8 and at most 256", product(acc=(64, 512), b=(64, 512))),
    "product dtypes": (
        VE,
        "a has dtype float16, b bfloat16",
        product(dtypes=(HALF, ml_dtypes.bfloat16)),
    ),
    "product f32": (VE, "b is contiguous along N", product(dtypes=(np.float32, np.float32))),
    "product int16": (NIE, "operands of dtype int16", product(dtypes=(np.int16, np.int16))),
    "product bf16 in f16": (
        NIE,
        "use a float32 accumulator",
        product(dtypes=(ml_dtypes.bfloat16,) * 2, dtype=HALF),
    ),
    "product array": (TE, "b must be a ref", product(lambda c, a, b: plgpu.wgmma(c, a, b[...]))),
    "product acc": (TE, "acc must be an ACC ref", product(lambda c, a, b: plgpu.wgmma(a, a, b))),
    "product GMEM": (
        VE,
        "a must be an SMEM ref",
        run(lambda x, o: pl.run_scoped(lambda c: plgpu.wgmma(c, x, x), plgpu.ACC((64, 64)))),
    ),
    "acc part": (NIE, "store to all of it", product(lambda c, a, b: c.set(c[:8], slice(0, 8)))),
    "acc dtype": (VE, "Invalid dtype", product(lambda c, a, b: c.set(c[...].astype(HALF)))),
    "acc T": (VE, "an accumulator has no such view", product(lambda c, a, b: c.T)),
    "acc wait": (
        VE,
        "must not be negative",
        product(lambda c, a, b: plgpu.wgmma_accumulator_load(c, wait_n=-1)),
    ),
}


def registers(n):
    return plgpu.set_max_registers(abs(n), action="increase" if n > 0 else "decrease")


def of_threads(f, n):
    return run(lambda x, o: f(lax.axis_index("t"), x), num_threads=n, thread_name="t")


REGISTERS = {  # threads, what thread i does, does it fit
    "all": (4, lambda i, x: registers(256), False),
    "in a loop": (4, lambda i, x: lax.fori_loop(0, 3, lambda j, c: registers(256), None), False),
    "when": (
        3,
        lambda i, x: (
            [pl.when(i < 2)(lambda: registers(232)), pl.when(i == 2)(lambda: registers(-40))]
            and None
        ),
        True,
    ),
    "cond": (
        3,
        lambda i, x: lax.cond(i == 2, lambda: registers(-40), lambda: registers(240)),
        False,
    ),
    "none given back": (3, lambda i, x: pl.when((i < 2) & (i != 7))(lambda: registers(232)), False),
    "switch": (
        4,
        lambda i, x: lax.switch(i, [lambda n=n: registers(n) for n in (-24, 152, 152, 160)]),
        True,
    ),
    "rem": (
        4,
        lambda i, x: lax.cond(lax.rem(i, 2) == 0, lambda: registers(240), lambda: registers(-24)),
        False,
    ),
    "unknown": (4, lambda i, x: pl.when(x[0] > 5)(lambda: registers(256)), True),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_registers_of_a_block(name):
    """More than the SM has would hang the GPU; what cannot be decided is let through."""
    n, f, fits = REGISTERS[name]
    if fits:
        of_threads(f, n)()
    else:
        check(VE, "set_max_registers: .* at launch.* the block would wait", of_threads(f, n), True)


@named(HARDWARE)
def test_hardware(case):
    check(*case, placed=True)


ROWS = BS((64,), lambda i: i)


def pipe(
    body=lambda i, a, c: c.set(a[...]),
    grid=(2,),
    ins=(ROWS,),
    outs=(ROWS,),
    refs=lambda x, o: (x, o),
    **options,
):
    return run(
        lambda x, o: EP(body, grid=grid, in_specs=ins, out_specs=outs, **options)(*refs(x, o))
    )


def spec(block=(64,), index_map=lambda i: i, **kw):
    return pipe(ins=(BS(block, index_map, **kw),))


PIPELINES = {
    "grid 0": (VE, "strictly positive", pipe(grid=(0,))),
    "grid text": (TE, "entry of the grid must be ints", pipe(grid=("a",))),
    "grid huge": (VE, "2147483648 steps", pipe(grid=(2**31,))),
    "grid array": (TE, "traced grid entry", run(lambda x, o: EP(int, grid=(x[...],)))),
    "steps 0": (
        VE,
        "max_concurrent_steps must be a positive int, got 0",
        pipe(max_concurrent_steps=0),
    ),
    "steps True": (VE, "got True", pipe(max_concurrent_steps=True)),
    "steps 100": (NIE, "at most 32 steps", pipe(grid=(100,), max_concurrent_steps=100)),
    "body": (TE, "the body must be callable, got None", pipe(body=None)),
    "arity": (TE, "it gets indices, 1 input and 1 output refs", pipe(body=lambda i: None)),
    "arity of carry": (TE, "output refs, carry", pipe(init_carry=0)),
    "specs": (TE, r"in_specs\[0\] must be a BlockSpec, got 5", pipe(ins=(5,))),
    "specs bare": (TE, "in_specs must be a tuple or list", pipe(ins=BS((64,)))),
    "refs": (VE, "1 in_specs and 1 out_specs, but 1 refs", pipe(refs=lambda x, o: (x,))),
    "ref array": (
        TE,
        r"argument for in_specs\[0\] must be a GMEM ref",
        pipe(refs=lambda x, o: (x[...], o)),
    ),
    "ref operand": (
        VE,
        "operand 0 of the kernel, which is read-only",
        pipe(refs=lambda x, o: (o, x)),
    ),
    "rank": (VE, "block of rank 2 for a ref of rank 1", spec((64, 64), lambda i: (i, 0))),
    "block 0": (VE, "block sizes are positive, got 0", spec((0,))),
    "block float": (NIE, "unsupported block size type 6.5", spec((6.5,))),
    "padding": (NIE, "Element with padding", spec((pl.Element(64, (1, 0)),))),
    "indices": (VE, "returned 2 indices for 1 block dims", spec(index_map=lambda i: (i, 0))),
    "index float": (VE, "must return integers, got 1.5", spec(index_map=lambda i: 1.5)),
    "index None": (VE, "must return integers, got None", spec(index_map=lambda i: None)),
    "index if": (
        plgpu.TracerBoolConversionError,
        "pl.when",
        spec(index_map=lambda i: 0 if i == 0 else 1),
    ),
    "delay": (VE, "greater than all delay_release", spec(delay_release=1)),
    "collective in": (NIE, "collective_axes", spec(collective_axes="c")),
    "collective out": (
        VE,
        "collective_axes",
        pipe(outs=(BS((64,), lambda i: i, collective_axes="c"),)),
    ),
    "space": (NIE, "blocks in tmem", spec(memory_space=plgpu.TMEM)),
    "tiling": (VE, "more dims than the shape", spec(transforms=plgpu.TilingTransform((8, 64)))),
    "too big": (
        VE,
        "exceeds available shared memory",
        pipe(lambda i, a, c: None, ins=(BS((65536,), lambda i: i),)),
    ),
    "carry": (
        TE,
        "identical types",
        pipe(body=lambda i, a, c, z: z * 1.5, init_carry=jnp.int32(0)),
    ),
}


@named(PIPELINES)
def test_pipelines(case):
    check(*case, placed=True)


# ---- outside of a kernel ----------------------------------------------------------------------

OUTSIDE = {
    "axis_index": lambda: lax.axis_index("x"),
    "program_id": lambda: pl.program_id(0),
    "commit_smem": lambda: plgpu.commit_smem(),
    "wgmma_wait": lambda: plgpu.wgmma_wait(0),
    "set_max_registers": lambda: plgpu.set_max_registers(24, action="decrease"),
    "fori_loop": lambda: lax.fori_loop(0, 3, lambda i, c: c, 0),
    "cond": lambda: lax.cond(True, int, int),
    "run_scoped": lambda: pl.run_scoped(len, SMEM),
    "layout_cast": lambda: plgpu.layout_cast(X, plgpu.Layout.WGMMA),
    "iota": lambda: plgpu.broadcasted_iota(jnp.int32, (8,), 0),
    "emit_pipeline": lambda: EP(lambda i: None, grid=(1,))(),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_a_kernel(name):
    check(RuntimeError, name, OUTSIDE[name], placed=False)


# ---- other people's exceptions, threads, signals, memory ---------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize(
    "where",
    [
        lambda x, o, f: f(),
        lambda x, o, f: lax.fori_loop(0, 3, lambda i, c: f(), 0),
        lambda x, o, f: lax.while_loop(lambda c: f(), lambda c: c, 0),
        lambda x, o, f: lax.cond(x[0] > 0, lambda: 1, f),
        lambda x, o, f: pl.when(x[0] > 0)(f),
        lambda x, o, f: pl.run_scoped(lambda s: lax.fori_loop(0, 3, lambda i, c: f(), 0), SMEM),
        lambda x, o, f: EP(lambda *a: f(), grid=(2,), in_specs=[BS((64,), lambda i: i)])(x),
        lambda x, o, f: EP(lambda *a: None, grid=(2,), in_specs=[BS((64,), lambda i: f())])(x),
    ],
    ids=["body", "fori", "while", "cond", "when", "scope", "pipeline", "index map"],
)
def test_exceptions_of_the_user_pass_through(where, error):
    mine = error("mine")

    def fail():
        raise mine

    with pytest.raises(error) as info:
        run(lambda x, o: where(x, o, fail))()
    assert info.value is mine and info.value.args == ("mine",)
    still_works()


def test_operands_are_never_changed():
    """Stores, copies and pipelines into an operand are refused, so are swaps of it."""
    x = X.copy()
    for f in (
        lambda x, o, s: x.set(1.0, 0),
        lambda x, o, s: x.at[3:5].at[0].set(1.0),
        lambda x, o, s: x.reshape(2, 64).T.set(1.0, (0, 0)),
        lambda x, o, s: x.swap(1.0, 0),
        lambda x, o, s: lax.fori_loop(0, 3, lambda i, c: x.set(1.0, i), None),
        lambda x, o, s: plgpu.copy_smem_to_gmem(s, x),
        lambda x, o, s: plgpu.copy_smem_to_gmem(s.at[:64], x.at[64:]),
    ):
        with pytest.raises(ValueError, match="read-only"):
            run(f, x, scratch_types=[SMEM])()
    np.testing.assert_array_equal(x, X)


def test_kernels_inside_of_bodies():
    """A body may run other kernels on host arrays while it is traced, in any thread."""
    seen = []

    def body(x, o):
        seen.append(GOOD(X)[3])
        t = threading.Thread(target=lambda: seen.append(GOOD(X)[4]))
        t.start()
        t.join()
        seen.append(plgpu.kernel(add_one, out_type=F32, interpret=True)(X)[5])
        o[...] = x[...] + 1

    np.testing.assert_array_equal(plgpu.kernel(body, out_type=F32, interpret=True)(X), X + 1)
    assert seen == [4, 5, 6]

    def foreign(x, o):
        plgpu.kernel(lambda a, c: c.set(x[...]), out_type=F32, interpret=True)(X)

    check(plgpu.UnexpectedTracerError, "another kernel", run(foreign), placed=True)
    errors = []

    def other_thread(x, o):
        def work():
            try:
                x[0] + 1
            except plgpu.UnexpectedTracerError as e:
                errors.append(e)

        t = threading.Thread(target=work)
        t.start()
        t.join()

    run(other_thread)()
    assert len(errors) == 1


def test_recursion():
    def body(x, o):
        k(X)

    k = plgpu.kernel(body, out_type=F32, interpret=True)
    with pytest.raises(RecursionError):
        k(X)
    nest = []
    nest.append(nest)
    with pytest.raises(RecursionError):
        GOOD(nest)
    still_works()


class Stdout:
    def __init__(self, f):
        self.write = f


def printing(x, o):
    pl.debug_print("hello {}", x[1])
    o[...] = x[...] + 1


def test_printing_into_trouble(monkeypatch):
    """What sys.stdout raises comes out of the call; a print that calls the kernel is refused."""
    k = plgpu.kernel(printing, out_type=F32, interpret=True)

    def raiser(error):
        def write(text):
            raise error

        return write

    for error in (OSError("disk full"), KeyboardInterrupt()):
        monkeypatch.setattr(sys, "stdout", Stdout(raiser(error)))
        with pytest.raises(type(error)) as info:
            k(X)
        assert info.value is error
    monkeypatch.setattr(sys, "stdout", Stdout(lambda text: k(X)))
    with pytest.raises(RuntimeError, match="called by something that it called itself"):
        k(X)
    for nothing in (None, Stdout(lambda text: len(text))):
        monkeypatch.setattr(sys, "stdout", nothing)
        np.testing.assert_array_equal(k(X), X + 1)
    monkeypatch.undo()
    still_works()


def spin(n):
    def body(x, o):
        o[0] = lax.fori_loop(0, n, lambda i, c: c + 1, 0).astype(jnp.float32)

    return plgpu.kernel(body, out_type=F32, interpret=True)


def endless(x, o):
    o[0] = lax.while_loop(lambda c: c > 0, lambda c: c, jnp.int32(1)).astype(jnp.float32)


@pytest.mark.timing
@pytest.mark.parametrize("body", ["long", "endless"])
def test_ctrl_c_stops_the_interpreter(body):
    k = spin(2**30) if body == "long" else plgpu.kernel(endless, out_type=F32, interpret=True)
    pid = os.getpid()
    # a shell starts what runs in the background with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.3, lambda: os.kill(pid, signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            k(X)
        assert time.monotonic() - start < 10
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    still_works()


def test_threads():
    """Calls, traces and misuse in many threads at once; the GIL is free while kernels run."""
    errors = []
    shared = plgpu.kernel(
        lambda x, o: o.set(x[0], 0),
        out_type=plgpu.ShapeDtypeStruct((1,), np.float32),
        interpret=True,
    )

    def work(seed):
        try:
            for n in range(1, 60):
                assert shared(np.full(n, n, np.float32))[0] == n
                still_works()
                with pytest.raises(ValueError):
                    run(lambda x, o: x[seed + 500])()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    long = threading.Thread(target=lambda: spin(2**22)(X))
    long.start()
    ticks = 0
    while long.is_alive():
        ticks += 1
        time.sleep(0.0005)
    assert ticks > 2


def test_objects():
    """repr, copies, pickles, cycles and weak references of the objects a user can hold."""
    low = GOOD.lower(X)
    assert "kernel add_one(" in repr(GOOD) and "add_one, lowered:" in repr(low)
    assert "add_one" in repr(low.graph)
    assert copy.copy(GOOD) is GOOD and copy.deepcopy([GOOD])[0] is GOOD
    for x in (low, low.graph):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(x)
    assert pickle.loads(pickle.dumps(GOOD)) is GOOD
    for x in (GOOD, low, low.graph):
        with pytest.raises(TypeError):
            type(x)()
        assert hash(x) is not None and x == x
    GOOD.note = "kernels take attributes"
    assert weakref.ref(GOOD)() is GOOD
    texts = []

    def body(x, o, s, b):
        texts.extend(map(repr, (x, s, b, x[...], x[...] > 0, lax.axis_size("g") + x[0], x.at)))
        for t in (x, x[...]):
            with pytest.raises(TypeError, match="pickle"):
                pickle.dumps(t)
        o[...] = x[...]

    scratch = [SMEM, plgpu.Barrier(num_barriers=2)]
    run(body, scratch_types=scratch, grid=(1,), grid_names=("g",))()
    assert texts[:5] == [
        "Ref<float32[128], gmem>",
        "Ref<float32[128], smem>",
        "Ref<barrier[2]>",
        "Traced<float32[128]>",
        "Traced<bool[128]>",
    ]

    class Holder:
        pass

    h = Holder()

    def hold(x, o, h=h):
        o[...] = x[...]

    h.kernel = plgpu.kernel(hold, out_type=F32, interpret=True)
    h.kernel(X)
    h.kernel.holder = h
    gone = weakref.ref(h)
    del h, hold
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan keeps what is freed"
)
def test_failures_do_not_leak():
    def once():
        still_works()
        for f in (ARRAYS["index high"], CONTROL["leak index"], PIPELINES["index if"]):
            with pytest.raises(f[0]):
                f[2]()

    def pages():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1])

    for _ in range(40):
        once()
    gc.collect()
    before = pages()
    for _ in range(100):
        once()
    gc.collect()
    assert pages() - before < 500  # 20 KiB a round


def test_mutation_by_the_body():
    """A body may take its arguments apart; the caller's containers stay as they are."""

    def body(d, o):
        a = d.pop("a")
        d.clear()
        o[...] = a[...]

    args = {"a": X, "b": X}
    k = plgpu.kernel(body, out_type=F32, interpret=True)
    for _ in range(2):
        np.testing.assert_array_equal(k(args), X)
    assert set(args) == {"a", "b"}


def test_strange_file_names():
    for name in ("<string>", 'we"ird\\na\\me.py', "a" * 3000 + ".py", "ünïcode.py", "100%s.py"):
        names = {}
        exec(compile("def f(x, o):\n  o[...] = x[...] + 1\n", name, "exec"), names)
        k = plgpu.kernel(names["f"], out_type=F32, interpret=True)
        np.testing.assert_array_equal(k(X), X + 1)
        assert k.lower(X).resources()["registers"] > 0
        exec(compile("def f(x, o):\n  o[...] = x[500]\n", name, "exec"), names)
        with pytest.raises(ValueError, match="out of bounds"):
            plgpu.kernel(names["f"], out_type=F32, interpret=True)(X)
    still_works()
