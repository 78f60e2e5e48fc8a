"""Runs generated CUDA on the CPU, against the emulated machine of this directory.

The machine is compiled once, and the catalogue once into a precompiled header; a kernel is then a
small shared library. All of it is kept in a temporary directory under hashes of what it was made
from. Needs g++ 12 or later."""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")
COMMON = [
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
]
MACHINE = [*COMMON, "-O2", "-ftree-vectorize", "-Wall", "-Wextra", "-g1"]
# Reading what was never assigned gives odd numbers; undefined behaviour traps. Of <math.h> the C
# functions are enough: libstdc++ adds half of what the compiler would read for each kernel.
KERNEL = [*COMMON, "-O1", "-w", "-ftrivial-auto-var-init=pattern"]
KERNEL += ["-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS"]
KERNEL += ["-fsanitize=bounds-strict,signed-integer-overflow,shift,integer-divide-by-zero"]
KERNEL += ["-fsanitize-undefined-trap-on-error"]


class HostError(RuntimeError):
    """What a generated program did that the hardware does not allow, or a deadlock, or a crash."""


def digest(*parts):
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else str(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:24]


def build(*command):
    got = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if got.returncode:
        raise HostError(f"{' '.join(map(str, command))} failed:\n{got.stderr[:8000]}")


@functools.cache
def home():
    """The directory of this machine and catalogue, which are built in it if they are not there."""
    sources = sorted(HERE.glob("*.cpp"))
    version = subprocess.run([CXX, "--version"], capture_output=True).stdout
    key = digest(version, MACHINE, KERNEL, *(p.read_bytes() for p in sorted(HERE.glob("*.[hc]*"))))
    root = Path(tempfile.gettempdir()) / f"pallas_mgpu_host-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    place = root / key
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            made = Path(tempfile.mkdtemp(dir=root))
            shutil.copy(HERE / "catalogue.h", made)
            header = made / "catalogue.h"
            build(CXX, *KERNEL, "-x", "c++-header", header, "-o", f"{header}.gch")
            build(CXX, *MACHINE, "-shared", *sources, "-o", made / "machine.so", "-ldl")
            made.rename(place)
            for old in root.iterdir():
                if old.is_dir() and old != place and old.stat().st_mtime < time.time() - 86400:
                    shutil.rmtree(old, ignore_errors=True)
    return place


class Buffer(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("read_only", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
    ]


class TensorMap(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("dim", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("rank", ctypes.c_uint8),
        ("element", ctypes.c_uint8),
        ("swizzle", ctypes.c_uint8),
        ("is_map", ctypes.c_uint8),
        ("type", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 2),
    ]


@functools.cache
def machine():
    lib = ctypes.CDLL(str(home() / "machine.so"), mode=ctypes.RTLD_GLOBAL)
    lib.host_alloc.restype = ctypes.c_void_p
    lib.host_alloc.argtypes = [ctypes.c_uint64]
    lib.host_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return lib


def compile_kernel(text, entry):
    """The shared library of a program; made at first need."""
    place = home() / f"{digest(text)}.so"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=home()) as directory:
            source, library = Path(directory) / "kernel.cpp", Path(directory) / "kernel.so"
            source.write_text(f"{text}HOST_ENTRY({entry})\n")
            header = home() / "catalogue.h"
            build(CXX, *KERNEL, "-include", header, "-shared", "-nostdlib", source, "-o", library)
            library.rename(place)
    return place


def program(lowered):
    """(text, facts of the launch) of a Lowered or a lowered Graph."""
    return getattr(lowered, "graph", lowered).cuda(line=False, catalogue=False)


def describe(text, line):
    """The generated line, and the comment above it that names the user's."""
    lines = text.splitlines()
    if not 0 < line <= len(lines):
        return ""
    above = [x.strip() for x in lines[:line] if re.match(r"\s*// .*:\d+$", x)]
    return (
        f"\n  line {line}: {lines[line - 1].strip()}\n  of {above[-1] if above else 'the prologue'}"
    )


class Memory:
    """Memory that a child process shares. Arrays begin where their alignment just allows, with
    room between them."""

    def __init__(self, sizes, aligns):
        self.at, n = [], 1 << 16
        for size, align in zip(sizes, aligns):
            n = -(-n // 1024) * 1024 + align
            self.at.append(n)
            n += size + (1 << 16)
        self.size = n
        self.base = machine().host_alloc(n)
        if not self.base:
            raise MemoryError(n)
        self.at = [self.base + at for at in self.at]

    def bytes_of(self, k, size):
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(self.at[k]))[
            :size
        ]

    def free(self):
        machine().host_free(self.base, self.size)


def raw(x):
    """The bytes of a contiguous array, shared with it."""
    return x.reshape(-1).view(np.uint8) if x.size else np.zeros(0, np.uint8)


TYPES = ["", "uint32", "int32", "float16", "bfloat16", "float32"]  # HostType


def tensor_map(m, base, element):
    type = TYPES.index(m.get("dtype")) if m.get("dtype") in TYPES else 0
    out = TensorMap(
        type=type, base=base, rank=len(m["dim"]), element=element, swizzle=m["swizzle"], is_map=1
    )
    out.dim[: out.rank] = m["dim"]
    out.stride[: out.rank - 1] = m["stride"][1:]
    out.box[: out.rank] = m["box"]
    return out


SMALL = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}  # bits


def packed(x):
    """Elements that share bytes, the first in the low bits."""
    bits = SMALL[x.dtype.name]
    per = 8 // bits
    parts = (x.view(np.uint8) & (1 << bits) - 1).reshape(*x.shape[:-1], -1, per)
    shifted = parts << (bits * np.arange(per, dtype=np.uint8))
    return np.ascontiguousarray(np.bitwise_or.reduce(shifted, -1))


def unpacked(x, dtype):
    bits = SMALL[dtype.name]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (x[..., None] >> shifts & (1 << bits) - 1).reshape(*x.shape[:-1], -1)
    if dtype.name.startswith("int"):
        parts = (parts ^ (1 << bits - 1)) - np.uint8(1 << bits - 1)  # the sign
    return parts.view(dtype)


def run(lowered, args, outs, seed=0):
    """Run a lowered kernel (kernel.lower(...), or a lowered _core.Graph) on NumPy arrays.

    `args` are the operands, `outs` the outputs: contiguous arrays, written in place (those that
    alias an operand begin as copies of it, all others as garbage). Returns what the kernel
    printed. Raises HostError for misuse of the hardware, a deadlock or a crash, naming the
    generated line."""
    text, info = program(lowered)
    scratch = [
        np.empty(shape, dtype) for dtype, shape, *_ in info["params"][len(args) + len(outs) :]
    ]
    small = [x.dtype.name in SMALL for x in [*args, *outs]]
    inner = [packed(x) if s else x for x, s in zip([*args, *outs], small)]
    results = [*inner[len(args) :], *scratch]
    printed = run_program(text, info, inner[: len(args)], results, seed)
    for x, y, s in zip(outs, inner[len(args) :], small[len(args) :]):
        if s:
            x[...] = unpacked(y, x.dtype)
    return printed


def run_program(text, info, args, outs, seed=0):
    """The same for a text and the facts of its launch, as _core.Graph.cuda gives them."""
    library = compile_kernel(text, info["entry"])
    arrays = [*args, *outs]
    for k, (x, (dtype, shape, _, _)) in enumerate(zip(arrays, info["params"], strict=True)):
        if x.shape != shape or x.dtype.name != dtype or not x.flags.c_contiguous:
            raise ValueError(
                f"parameter {k}: expected {dtype}{list(shape)}, got {x.dtype}{x.shape}"
            )
    same = [k if alias < 0 else alias for k, (*_, alias) in enumerate(info["params"])]
    aligns = [p[2] for p in info["params"]]
    for k, j in enumerate(same):
        aligns[j] = max(aligns[j], aligns[k])
    words = 4 * (info.get("counters", 0) + 1)
    memory = Memory([*(x.nbytes for x in arrays), words], [*aligns, 16])
    try:
        return launch(text, info, library, arrays, same, len(args), memory, seed)
    finally:
        memory.free()


def launch(text, info, library, arrays, same, n_args, memory, seed):
    for k, x in enumerate(arrays):
        memory.bytes_of(k, x.nbytes)[:] = raw(x) if k < n_args else 0xA5
    first = sorted(set(same))
    words = memory.bytes_of(len(arrays), 4 * (info.get("counters", 0) + 1))
    buffers = (Buffer * (len(first) + 1))()
    buffers[len(first)] = Buffer(memory.at[len(arrays)], words.size, 0, 1)
    for k, j in enumerate(first):
        written = j >= n_args or j in same[n_args:]
        buffers[k] = Buffer(memory.at[j], arrays[j].nbytes, not written, j < n_args)
    keep = []
    for kind, param, index in info["args"]:
        at = memory.at[same[param] if param >= 0 else -1]
        if kind == "tensor_map":
            keep.append(tensor_map(info["maps"][index], at, arrays[param].itemsize))
        else:
            keep.append(ctypes.c_uint64(at))
    pointers = (ctypes.c_void_p * max(len(keep), 1))(*[ctypes.addressof(x) for x in keep])
    grid = list(info["grid"])
    if info.get("shares_grid"):  # any number of clusters will do
        clusters = grid[0] // info["cluster"][0]
        grid[0] = info["cluster"][0] * (1 + seed % min(clusters, 5))
    error, output = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(1 << 16)
    line = ctypes.c_int()
    failed = machine().host_run(
        os.fsencode(library),
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*info["cluster"]),
        ctypes.c_uint32(info["block"]),
        ctypes.c_uint32(info.get("meets_blocks", 0)),
        ctypes.c_uint32(info["smem_bytes"]),
        buffers,
        ctypes.c_uint32(len(buffers)),
        pointers,
        ctypes.c_uint64(seed),
        error,
        ctypes.c_uint32(len(error)),
        ctypes.byref(line),
        output,
        ctypes.c_uint32(len(output)),
    )
    printed = output.value.decode(errors="replace")
    if failed:
        what = error.value.decode(errors="replace")
        where = describe(text, line.value)
        raise HostError(f"{info['entry']}, seed {seed}: {what}{where}\n{printed}")
    if words.any():
        raise HostError(
            f"{info['entry']}, seed {seed}: the counters are left at {words.view('u4')}"
        )
    for k in range(n_args, len(arrays)):
        raw(arrays[k])[:] = memory.bytes_of(same[k], arrays[k].nbytes)
    return printed
