"""Runs generated CUDA on the CPU, against the emulated machine of this directory.

The machine is compiled once, and the catalogue once into a precompiled header; a kernel is then a
small shared library. All of it is kept in the compile cache, in directories named by hashes of what
they were made from. Needs g++ 12 or later."""

import atexit
import contextlib
import copy
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import _core

HERE = Path(__file__).parent
LEAST_GCC = 12  # -ftrivial-auto-var-init
KEPT_DAYS = 7  # of machines of other versions
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
    """What a generated program did that the hardware does not allow, or a deadlock, or a crash.

    ``what``: the machine's own words; ``line``: the generated line, 0: unknown; ``facts``: what
    host_fact wrote, one list of words for each; ``printed``: the output until then."""

    def __init__(self, text, what="", line=0, facts="", printed=""):
        super().__init__(text)
        self.what, self.line, self.printed = what, line, printed
        self.facts = [x.split(" ") for x in facts.splitlines()]


class BuildError(RuntimeError):
    """The C++ compiler refuses the machine, or a program."""


def digest(*parts):
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else str(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:24]


@functools.cache
def compiler():
    """The C++ compiler that can build the machine; NotImplementedError if there is none."""
    asked = os.environ.get("CXX")
    tried = []
    for name in [asked] if asked else ["g++", "c++"]:
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name} was not found")
            continue
        macros = subprocess.run(
            [path, "-x", "c++", "-dM", "-E", os.devnull], capture_output=True, text=True
        ).stdout
        version = re.search(r"__GNUC__ (\d+)", macros)
        clang = "__clang__" in macros
        if version and not clang and int(version[1]) >= LEAST_GCC:
            return path
        what = "clang" if clang else f"GCC {version[1]}" if version else "no C++ compiler"
        tried.append(f"{path} is {what}")
    where = f" (CXX={asked})" if asked else " on PATH"
    raise NotImplementedError(
        f"the emulated machine needs g++ {LEAST_GCC} or later{where}: {', '.join(tried)}. Install"
        " g++ (Debian and Ubuntu: apt install g++) or name it in the environment variable CXX;"
        " interpret=True runs the kernel on the interpreter, which needs no compiler"
    )


def build(*command):
    got = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if got.returncode:
        raise BuildError(f"{' '.join(map(str, command))} failed:\n{got.stderr[:8000]}")


def _root():
    """The directory of all machines: in the compile cache; without one, of this process alone."""
    cache = _core.cache_dir()
    if cache is not None:
        root = Path(cache[0]) / "emulate"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid == os.geteuid() and os.access(root, os.W_OK):
                return root
        except OSError:
            pass
    temporary = tempfile.mkdtemp(prefix="pallas_mgpu_emulate-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


@functools.cache
def home():
    """The directory of this machine and catalogue, which are built in it if they are not there."""
    cxx = compiler()
    sources = sorted(HERE.glob("*.cpp"))
    version = subprocess.run([cxx, "--version"], capture_output=True).stdout
    key = digest(version, MACHINE, KERNEL, *(p.read_bytes() for p in sorted(HERE.glob("*.[hc]*"))))
    root = _root()
    place = root / key
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            made = Path(tempfile.mkdtemp(dir=root))
            shutil.copy(HERE / "catalogue.h", made)
            header = made / "catalogue.h"
            parts = [(s, made / f"{s.stem}.o") for s in sources]
            steps = [(*MACHINE, "-c", source, "-o", part) for source, part in parts]
            steps.append((*KERNEL, "-x", "c++-header", header, "-o", f"{header}.gch"))
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(lambda step: build(cxx, *step), steps))
            build(cxx, "-shared", *(part for _, part in parts), "-o", made / "machine.so", "-ldl")
            for _, part in parts:
                part.unlink()
            made.rename(place)
            for old in root.iterdir():
                if (
                    old.is_dir()
                    and old != place
                    and old.stat().st_mtime < time.time() - KEPT_DAYS * 86400
                ):
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
            build(
                compiler(),
                *KERNEL,
                "-include",
                header,
                "-shared",
                "-nostdlib",
                source,
                "-o",
                library,
            )
            library.rename(place)
        _evict()
    else:
        place.touch()  # used
    return place


def _evict():
    """Remove the least recently used programs beyond the size of the compile cache."""
    cache = _core.cache_dir()
    if cache is None:
        return
    found = []
    for file in home().glob("*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            found.append((file.stat().st_mtime, file.stat().st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= cache[1]:
            break
        if file.name != "machine.so":
            file.unlink(missing_ok=True)
            total -= size


def program(lowered):
    """(text, facts of the launch) of a Lowered or a lowered Graph."""
    return getattr(lowered, "graph", lowered).cuda(line=False, catalogue=False)


def for_sizes(info, values):
    """The facts of a launch for the sizes of a call, by number."""
    if not info["sizes"]:
        return info

    def put(shape, extents):
        return tuple(values[e] if e else n for n, e in zip(shape, extents))

    grid = put(info["grid_sizes"], info["grid_extents"])
    blocks = [1, 1, 1]
    for k, n in enumerate(reversed(grid)):
        blocks[0 if info["folds_grid"] else min(k, 2)] *= n
    return {
        **info,
        "values": values,
        "grid_sizes": grid,
        "grid": tuple(n * c for n, c in zip(blocks, info["cluster"])),
        "maps": [{**m, "dim": put(m["dim"], m["extent"])} for m in info["maps"]],
        "params": [
            (dtype, put(shape, extents), *rest)
            for (dtype, shape, *rest), extents in zip(info["params"], info["extents"])
        ],
    }


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

    def __init__(self, sizes, aligns, devices=1):
        self.at, n = [], 1 << 16
        for size, align in zip(sizes, aligns):
            n = -(-n // 1024) * 1024 + align
            self.at.append(n)
            n += size + (1 << 16)
        self.stride = -(-n // 4096) * 4096
        self.size = self.stride * devices
        self.base = machine().host_alloc(self.size)
        if not self.base:
            raise MemoryError(self.size)
        self.at = [self.base + at for at in self.at]

    def of(self, device):
        """What one device has of it."""
        part = copy.copy(self)
        part.base = self.base + device * self.stride
        part.at = [at + device * self.stride for at in self.at]
        return part

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


def run_program(text, info, args, outs, seed=0, record=None):
    """The same for a text and the facts of its launch, as _core.Graph.cuda gives them. record: a
    list; checks that fail and waits that cannot end then do what they do on a GPU, and the list
    gets the words that the kernel notes: 1, site, value, block x, y, z, thread."""
    arrays = [*args, *outs]
    for k, (x, (dtype, shape, _, _)) in enumerate(zip(arrays, info["params"], strict=True)):
        if x.shape != shape or x.dtype.name != dtype or not x.flags.c_contiguous:
            raise ValueError(
                f"parameter {k}: expected {dtype}{list(shape)}, got {x.dtype}{x.shape}"
            )
    data = [raw(x) for x in arrays]
    for x in data[len(args) :]:
        x[:] = 0xA5
    return run_bytes(text, info, data, len(args), seed, record=record)


@functools.lru_cache(maxsize=16)
def _loose_lines(text):
    """By line: is it of a store by indices, of which one wins where several are the same?"""
    lines = text.splitlines()
    loose, inside = bytearray(len(lines) + 1), False
    for k, line in enumerate(lines, 1):
        if line.lstrip().startswith("//"):
            inside = "// masked store" in line
        loose[k] = inside
    return bytes(loose)


def _check_alignment(text, info):
    """A swizzle permutes 8 rows at a multiple of their size, so a tile of it begins there."""
    for k, line in enumerate(text.splitlines(), 1):
        found = re.match(
            r" *const u32 (\w+) = smem \+ (\d+)(?: \+ wg \* (\d+))?;.*swizzle (\d+)", line
        )
        if found and (int(found[2]) | int(found[3] or 0)) % (8 * int(found[4])):
            what = (
                f"'{found[1]}' begins at byte {found[2]} of shared memory, which is no multiple of"
                f" {8 * int(found[4])}, as its swizzle needs"
            )
            raise HostError(f"{info['entry']}: {what}{describe(text, k)}", what, k)


def run_bytes(text, info, data, n_args, seed=0, **options):
    """The same for the bytes of all parameters, of which the last are outputs. Options are those of
    run_rows."""
    return run_rows(text, info, [data], n_args, seed, **options)


def run_rows(
    text, info, rows, n_args, seed=0, *, written=False, unwritten_ok=False, ended=None, record=None
):
    """The same for the bytes of all parameters on each device of a mesh. ``written``: what outputs
    hold counts as written; ``unwritten_ok``: reading what was never written is no error;
    ``ended``: as in run_mesh; ``record``: as in run_program."""
    noted = (ctypes.c_uint32 * 8)() if record is not None else None
    _check_alignment(text, info)
    library = compile_kernel(text, info["entry"])
    same = [k if alias < 0 else alias for k, (*_, alias) in enumerate(info["params"])]
    aligns = [max(p[2], 16) if len(rows) > 1 else p[2] for p in info["params"]]
    for k, j in enumerate(same):
        aligns[j] = max(aligns[j], aligns[k])
    words = 4 * (info.get("counters", 0) + 1)
    sizes = [x.size for x in rows[0]]
    memory = Memory([*sizes, words], [*aligns, 16], len(rows))
    watch = Memory([32 * (len(rows) + 1)], [16])
    watched = watch.bytes_of(0, 32 * (len(rows) + 1)).view(np.uint32).reshape(-1, 8)
    watched[0, 0] = ended is not None
    try:
        places = [memory.of(d) for d in range(len(rows))]
        for place, row in zip(places, rows):
            for k, x in enumerate(row):
                place.bytes_of(k, x.size)[:] = x
        how = written, unwritten_ok, watch, noted
        printed = launch_mesh(text, info, library, sizes, same, n_args, places, seed, *how)
        if record is not None:
            record[:] = noted
        if ended is not None:
            ended[:] = [tuple(map(int, row[1:7])) if row[0] else None for row in watched[1:]]
        for place, row in zip(places, rows):
            for k in range(n_args, len(row)):
                row[k][:] = place.bytes_of(same[k], row[k].size)
        return printed
    finally:
        memory.free()
        watch.free()


EVERYWHERE = 1 << 56  # in an address: of all devices


def table_of_peers(info, places, same, rank):
    """What PM_ARG_PEERS says: the rank, addresses by argument and device, those of all devices."""
    n = len(info["peers"])
    entry = [same[p] if p >= 0 else -1 for p in info["peers"]]
    at = [m.at[k] for k in entry for m in places] or [0] * len(places)
    everywhere = [places[0].at[k] | EVERYWHERE for k in entry] or [0]
    return (ctypes.c_uint64 * (1 + max(n, 1) * (len(places) + 1)))(rank, *at, *everywhere)


class Watch(ctypes.Structure):
    _fields_ = [
        ("words", ctypes.c_void_p),
        ("mesh", ctypes.c_uint32),
        ("kernel", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    ]


def arguments(info, places, same, rank, watch):
    """The kernel's parameters on one device. watch: address of the words by which waits end."""
    keep = []
    for kind, param, index in info["args"]:
        key = same[param] if param >= 0 and kind != "size" else -1
        if kind == "tensor_map":
            element = _core.as_dtype(info["params"][param][0]).itemsize
            m = info["maps"][index]
            bases = [places[rank].at[key]]
            if m.get("of") == 1:  # one for each device
                bases = [p.at[key] for p in places]
            elif m.get("of") == 2:
                bases = [places[0].at[key] | EVERYWHERE]
            keep.append((TensorMap * len(bases))(*[tensor_map(m, b, element) for b in bases]))
        elif kind == "size":
            keep.append(ctypes.c_int32(info["values"][param]))
        elif kind == "peers":
            keep.append(table_of_peers(info, places, same, rank))
        elif kind == "watch":
            keep.append(Watch(watch, 1, 0, rank))
        else:
            keep.append(ctypes.c_uint64(places[rank].at[key]))
    return keep


def launch_mesh(
    text,
    info,
    library,
    sizes,
    same,
    n_args,
    places,
    seed,
    written=False,
    unwritten_ok=False,
    watch=None,
    record=None,
):
    """One launch on all devices, each with a memory that holds all parameters and then the
    counters, at equal distances; what it printed. watch: the memory by which waits end; record: as
    in run_program, eight words of ctypes."""
    first = sorted(set(same))
    counters = [m.bytes_of(len(sizes), 4 * (info.get("counters", 0) + 1)) for m in places]
    buffers = (Buffer * (len(places) * (len(first) + 1)))()
    stride = places[1].base - places[0].base if len(places) > 1 else 0
    for d, m in enumerate(places):
        row = d * (len(first) + 1)
        buffers[row + len(first)] = Buffer(m.at[len(sizes)], counters[d].size, 0, 1)
        for k, j in enumerate(first):
            changes = j >= n_args or j in same[n_args:]
            buffers[row + k] = Buffer(m.at[j], sizes[j], not changes, j < n_args or written)
    words = watch.at[0] if watch else None
    keep = [x for d in range(len(places)) for x in arguments(info, places, same, d, words)]
    pointers = (ctypes.c_void_p * max(len(keep), 1))(*[ctypes.addressof(x) for x in keep])
    grid = list(info["grid"])
    if info.get("shares_grid"):  # any number of clusters will do
        clusters = grid[0] // info["cluster"][0]
        grid[0] = info["cluster"][0] * (1 + seed % min(clusters, 5))
    error, output = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(1 << 16)
    facts = ctypes.create_string_buffer(1 << 14)
    line, loose = ctypes.c_int(), _loose_lines(text)
    failed = machine().host_run(
        os.fsencode(library),
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*info["cluster"]),
        ctypes.c_uint32(info["block"]),
        ctypes.c_uint32(info.get("meets_blocks", 0)),
        ctypes.c_uint32(info.get("pdl", 0)),
        ctypes.c_uint32(info["smem_bytes"]),
        buffers,
        ctypes.c_uint32(len(buffers)),
        pointers,
        ctypes.c_uint32(len(places)),
        ctypes.c_uint32(len(info["args"])),
        ctypes.c_uint64(stride),
        ctypes.c_uint64(seed),
        ctypes.c_uint32(unwritten_ok),
        record,
        loose,
        ctypes.c_uint32(len(loose)),
        error,
        ctypes.c_uint32(len(error)),
        ctypes.byref(line),
        output,
        ctypes.c_uint32(len(output)),
        facts,
        ctypes.c_uint32(len(facts)),
    )
    printed = output.value.decode(errors="replace")
    if failed:
        what = error.value.decode(errors="replace")
        where = describe(text, line.value)
        message = f"{info['entry']}, seed {seed}: {what}{where}\n{printed}"
        raise HostError(message, what, line.value, facts.value.decode(errors="replace"), printed)
    for words in [] if info.get("clears_counters") else counters:
        if words.any() and not (watch and watch.bytes_of(0, 4).any()):
            what = f"the counters are left at {words.view('u4')}"
            raise HostError(f"{info['entry']}, seed {seed}: {what}", what)
    return printed


def run_mesh(lowered, args, outs, seed=0, *, written=False, ended=None):
    """Run a lowered kernel on the devices of its mesh. `args`, `outs`: for each device its
    operands and its outputs, which are written in place; written: what they hold counts. ended: a
    list; waits for other devices then end after a while, and the list gets for each device None, or
    (site, element, value, target, block, thread) of a wait that ended so."""
    text, info = program(lowered)
    n = len(args[0])
    rows = [[raw(x) for x in (*a, *o)] for a, o in zip(args, outs, strict=True)]
    for row in rows:
        for x in row[n:]:
            x[:] = x if written else 0xA5
    return run_rows(text, info, rows, n, seed, written=written, ended=ended)
