"""`inline_cuda` sources on the CPU: compiled as plain C++ and run lane by lane.

A source is plain C++ if it contains no PTX and does not depend on other lanes. It is wrapped in a
function with the same parameters as on a GPU, after `_inline_host.h`, compiled by the first C++
compiler found, and cached under a hash of its text. The function is called for each lane with the
registers that the layouts assign to the lane."""

import ctypes
import functools
import os
import re

import numpy as np

from . import _core

_HEADER = os.path.join(os.path.dirname(__file__), "_inline_host.h")
_FLAGS = "-std=c++17 -O1 -w -fPIC -shared -ffp-contract=off -fno-strict-aliasing".split()
_TYPES = {name: cpp for name, (bits, cpp) in _core.dtype_table().items() if bits >= 8}
_REMEDY = "give inline_cuda interpret=, or call the kernel with arrays of a GPU"
BARRIERS = 0xB0000000


class _Where(ctypes.Structure):
    _fields_ = [
        ("thread", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("grid", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_void_p),
        ("smem_bytes", ctypes.c_uint64),
        ("message", ctypes.c_char * 256),
    ]


class _Memory(ctypes.Structure):
    """Of an operand or result: an array as a whole, or where a ref begins and what it lies in."""

    _fields_ = [("at", ctypes.c_void_p), ("low", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


def _program(name):
    """The path of a program, or None."""
    at = [name] if os.path.dirname(name) else [os.path.join(d, name) for d in os.get_exec_path()]
    return next((p for p in at if os.path.isfile(p) and os.access(p, os.X_OK)), None)


def _compiler():
    asked = os.environ.get("CXX")
    found = next(filter(None, map(_program, [asked] if asked else ["c++", "g++", "clang++"])), None)
    if found is None:
        raise NotImplementedError(
            "inline_cuda: on the interpreter a source is compiled as C++, and no compiler was found"
            f" ({f'CXX={asked}' if asked else 'c++, g++, clang++'}); {_REMEDY}"
        )
    return found


def _directory():
    """Of this user alone."""
    temporary = os.environ.get("TMPDIR") or "/tmp"
    place = os.path.join(temporary, f"pallas_mgpu_inline-{os.getuid()}")
    os.makedirs(place, mode=0o700, exist_ok=True)
    if os.stat(place).st_uid != os.getuid():
        raise PermissionError(f"inline_cuda: {place} belongs to another user")
    return place


def _compile(compiler, text, library):
    """Made beside the library and renamed when it is done. `os` alone does it, as subprocess and
    tempfile would be imported by all who import the package."""
    made = f"{library}.{os.urandom(8).hex()}"
    source, out, log = f"{made}.cpp", f"{made}.so", f"{made}.log"
    try:
        with open(source, "w", encoding="utf-8") as file:
            file.write(text)
        streams = [
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o600),
        ]
        command = [compiler, *_FLAGS, source, "-o", out]
        child = os.posix_spawn(compiler, command, os.environ, file_actions=streams)
        if os.waitpid(child, 0)[1]:
            with open(log, encoding="utf-8", errors="replace") as file:
                errors = [x for x in file.read().splitlines() if "error" in x][:4]
            errors = [x.partition("error")[2].lstrip(": ") for x in errors]
            raise NotImplementedError(
                "inline_cuda: this source does not compile as plain C++ for the interpreter, which"
                f" has the functions of generated programs that concern one lane; {_REMEDY}. The"
                f" compiler says: {'; '.join(errors)}"
            )
        os.rename(out, library)
    finally:
        for path in (source, out, log):
            if os.path.exists(path):
                os.remove(path)


@functools.cache
def _library(text):
    compiler = _compiler()
    with open(_HEADER, encoding="utf-8") as file:
        text = f"{file.read()}\n{text}"
    key = "\0".join((compiler, *_FLAGS, text))
    library = os.path.join(_directory(), f"{_core.digest(key.encode())}.so")
    if not os.path.exists(library):
        _compile(compiler, text, library)
    f = ctypes.CDLL(library).run
    f.restype = ctypes.c_int
    return f


def _parameter(kind, k, dtype, written):
    cpp = _TYPES.get(dtype)
    if kind in ("smem", "barrier"):
        return f"u32 a{k}"
    if kind == "gmem":
        return f"Global<{'' if written else 'const '}{cpp}> a{k}"
    return f"{cpp} a{k}" if kind == "scalar" else f"const {cpp}* a{k}"


class HostSource:
    """What stands for a source in the interpreter, if nothing else does.

    ``operands``: (kind, shape, dtype name, layout), kind "array", "scalar", "gmem", "smem" or
    "barrier"; ``results``: (shape, dtype name, layout). ``why_not``: why it cannot run here, or
    None."""

    def __init__(self, source, operands, results, why_not):
        self.source, self.operands, self.results = source, operands, results
        self.why_not = why_not
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
        if re.search(r"\b(asm|__asm__|__asm)\b", code):
            self.why_not = "the source holds PTX (asm), which only a GPU runs"
        small = [d for *_, d, _ in (*operands, *results) if d not in _TYPES and d != "barrier"]
        if small and not why_not:
            self.why_not = f"the interpreter does not hold {small[0]} as a GPU does"

    @functools.cached_property
    def elements(self):
        """Of each operand and result the numbers of elements, [lane][register]; None: no array."""
        found = []
        for shape, layout in [(x[1], x[3]) for x in self.operands] + [
            (x[0], x[2]) for x in self.results
        ]:
            of = layout is not None and shape and _core.layout_elements(shape, layout)
            found.append(np.array(of, np.int32) if of else None)
        return found

    def text(self, written):
        """The program; written: may operands in GMEM be written."""
        parameters, before, given, after = [], [], [], []
        for k, (kind, _, dtype, _) in enumerate(self.operands):
            parameters.append(_parameter(kind, k, dtype, written[k]))
            cpp = _TYPES.get(dtype)
            if kind == "array":
                n = self.elements[k].shape[1]
                before += [
                    f"{cpp} x{k}[{n}] = {{}};",
                    f"for (int r = 0; r < {n}; r++) if (map[{k}][lane * {n} + r] >= 0)",
                    f"  x{k}[r] = (({cpp} *)v[{k}].at)[map[{k}][lane * {n} + r]];",
                ]
                given.append(f"x{k}")
            elif kind == "scalar":
                given.append(f"*({cpp} *)v[{k}].at")
            elif kind == "barrier":
                given.append(f"BARRIERS + {k}")
            elif kind == "smem":
                given.append(f"(u32)((char *)v[{k}].at - (char *)v[{k}].low)")
            else:
                of = f"{'' if written[k] else 'const '}{cpp}"
                given.append(f"Global<{of}>{{({of} *)v[{k}].at, ({of} *)v[{k}].low, v[{k}].bytes}}")
        for j, (_, dtype, _) in enumerate(self.results):
            k, cpp = len(self.operands) + j, _TYPES[dtype]
            n = 1 if self.elements[k] is None else self.elements[k].shape[1]
            parameters.append(f"{cpp}* r{j}")
            given.append(f"y{j}")
            before.append(f"{cpp} y{j}[{n}]; memset((void *)y{j}, 0xff, sizeof y{j});")
            if self.elements[k] is None:
                after.append(f"*({cpp} *)v[{k}].at = y{j}[0];")
                continue
            after += [
                f"for (int r = 0; r < {n}; r++) if (map[{k}][lane * {n} + r] >= 0)",
                f"  (({cpp} *)v[{k}].at)[map[{k}][lane * {n} + r]] = y{j}[r];",
            ]
        lines = "\n      ".join([*before, f"source({', '.join(given)});", *after])
        return f"""
static void source({", ".join(parameters)}) {{
{self.source}
}}
struct Memory {{ void *at, *low; u64 bytes; }};
extern "C" int run(Where *w, const Memory *v, const i32 *const *map, i32 *come) {{
  where = w;
  arrivals = come;
  blockIdx = {{w->block[0], w->block[1], w->block[2]}};
  gridDim = {{w->grid[0], w->grid[1], w->grid[2]}};
  const int from = w->warp < 4 ? (int)w->warp * 32 : 0, to = w->warp < 4 ? from + 32 : 128;
  for (int lane = from; lane < to; lane++) {{
    threadIdx = {{w->thread * 128 + lane, 0, 0}};
    try {{
      {lines}
    }} catch (const std::exception &e) {{
      snprintf(w->message, sizeof w->message, "%s", e.what());
      return 1;
    }}
  }}
  return 0;
}}
"""

    def __call__(self, memory, where, places):
        """places: (first element, memory it lies in, its bytes, written) of each ref, else None."""
        if self.why_not:
            raise NotImplementedError(f"inline_cuda: {self.why_not}; {_REMEDY}")
        run = _library(self.text([bool(p and p[3]) for p in places]))
        n = len(memory)
        given = (_Memory * max(n, 1))()
        views = [None if m is None else np.frombuffer(m, np.uint8) for m in memory]
        for k, (m, place) in enumerate(zip(views, (*places, *[None] * (n - len(places))))):
            if place:
                given[k] = _Memory(*place[:3])
            elif m is not None:
                given[k] = _Memory(m.ctypes.data, m.ctypes.data, m.nbytes)
        maps = (ctypes.c_void_p * max(n, 1))(
            *[e.ctypes.data if e is not None else None for e in self.elements]
        )
        thread, warp, block, grid = where
        w = _Where(thread=thread, warp=warp)
        w.block[:], w.grid[:] = block, grid
        smem = next((p for p, x in zip(places, self.operands) if x[0] == "smem"), None)
        if smem:
            w.smem, w.smem_bytes = smem[1], smem[2]
        come = (ctypes.c_int32 * max(n, 64))()
        if run(ctypes.byref(w), given, maps, come):
            raise IndexError(f"inline_cuda: {w.message.decode(errors='replace')}")
        return [-1 if place else come[k] for k, place in enumerate(places)]
