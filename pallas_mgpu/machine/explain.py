"""What the emulated machine found, in the terms of the kernel: refs, indices, threads, lines.

The machine speaks of bytes and of lines of the generated program. What they are is read from that
program: `#line` directives, or comments where the compiler would count to the right line by itself,
give the place of each line, declarations such as

    const u32 tile = smem + 0;  // smem float16[64,128], tiled (8, 64), swizzle 128

the map of shared memory, with indentation as their scope. Names that the program had to number are
taken from the text of the graph. Of a tiling (t0, t1) over (..., M, N) the elements lie as
[..., N / t1, M, t1]; of a tiling over more dimensions the rows end with the last tile above 1, and
the columns are the dimensions after them. A swizzle of B bytes then exchanges the 16-byte chunks of
a 128-byte line by the number of the line."""

import itertools
import linecache
import math
import os
import re

from .._races import Race, RaceAccess

_DECLARED = re.compile(
    r"( *)const u32 (\w+) = smem \+ (\d+)(?: \+ wg \* (\d+))?; // (?:smem )?(\w+)\[([\d,]*)\](.*)"
)
_IN_GRAPH = re.compile(
    r'%(\S+)_\d+ = alloc_(?!tmem)\w+ \{.*?\boffset = (\d+).*// ".*":(\d+)$', re.M
)
_IN_TENSOR_MEMORY = re.compile(
    r" *const u32 (\w+) = tmem \+ (\d+); // tmem (\w+)\[([\d,]*)\], (\w+), (\d+) in 32 bits"
)
_BITS = {"bool": 8, "barrier": 64, "semaphore": 32}


def bits_of(dtype):
    return _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])


def unravel(n, shape):
    index = []
    for d in reversed(shape):
        index.append(n % d)
        n //= d
    return index[::-1]


def _physical(shape, tiling):
    """The dimensions in the order of memory: for each (dimension, how many, divided by)."""
    lead = len(shape) - len(tiling)
    if len(tiling) < 2:
        return [(d, n, 1) for d, n in enumerate(shape)]
    above = [k for k, t in enumerate(tiling[:-1]) if t > 1]
    rows = lead + (above[-1] + 1 if above else 0)
    last, t = len(shape) - 1, tiling[-1]
    order = [*range(lead), *range(rows, last)]
    out = [(d, shape[d], 1) for d in order] + [(last, -(-shape[last] // t), t)]
    return out + [(d, shape[d], 1) for d in range(lead, rows)] + [(last, t, 1)]


class Allocation:
    """A piece of shared memory, as the program declares it."""

    def __init__(self, match, line, name):
        self.indent, self.line, self.end = len(match[1]), line, None
        self.name, self.offset, self.apart = name, int(match[3]), int(match[4] or 0)
        self.mentioned = re.compile(rf"\b{match[2]}\b")
        self.dtype, self.shape = match[5], [int(d) for d in match[6].split(",") if d]
        tiled, swizzle = (
            re.search(r"tiled \(([\d, ]*?),?\)", match[7]),
            re.search(r"swizzle (\d+)", match[7]),
        )
        self.tiling = [int(t) for t in tiled[1].split(",")] if tiled else []
        self.swizzle = int(swizzle[1]) if swizzle else 0
        self.bytes = math.prod(self.shape) * bits_of(self.dtype) // 8

    def index(self, at):
        """The text of the index of the element that byte `at` of the allocation belongs to."""
        if self.swizzle:
            at ^= (at >> 7 & self.swizzle // 16 - 1) << 4
        order = _physical(self.shape, self.tiling)
        found = [0] * len(self.shape)
        parts = unravel(at * 8 // bits_of(self.dtype), [n for _, n, _ in order])
        for (d, _, by), i in zip(order, parts):
            found[d] += i * by
        return "[" + ", ".join(map(str, found)) + "]" if found else "[...]"


class Names:
    """Names of everything in one program. `marked`: its text with #line directives."""

    def __init__(self, marked, info, graph_text):
        self.info, self.lines, self.places = info, [""], [None]
        place = None
        for line in marked.splitlines():
            if found := re.fullmatch(r'#line (\d+)(?: "(.*)")?', line):
                file = found[2].replace(r"\"", '"').replace(r"\\", "\\") if found[2] else place[0]
                place = file, int(found[1])
            else:
                noted = re.fullmatch(r" *// (?:.*  )?(\S.*):(\d+)", line)
                if noted and place and os.path.basename(place[0]) == noted[1]:
                    place = place[0], int(noted[2])
                self.lines.append(line)
                self.places.append(place)
        self.text = "\n".join(self.lines[1:]) + "\n"
        self.allocations = list(self._allocations(graph_text))
        self.in_tensor_memory = set(re.findall(r"%(\S+)_\d+ = alloc_tmem", graph_text))
        self.in_warps = set(self._warp_lines())

    def _allocations(self, graph_text):
        names = {}
        for name, at, line in _IN_GRAPH.findall(graph_text):
            names.setdefault((int(at), int(line)), []).append(name)
        for k, line in enumerate(self.lines):
            if not (found := _DECLARED.match(line)):
                continue
            at = int(found[3]), self.places[k][1] if self.places[k] else 0
            short = re.sub(r"_\d+$", "", found[2])
            given = names.get(at, [short])  # several of a union
            a = Allocation(found, k, next((n for n in (found[2], short) if n in given), given[0]))
            a.end = self._end(k, a.indent)
            yield a

    def _end(self, first, indent):
        """The first line from there on that is indented less."""
        for k in range(first, len(self.lines)):
            line = self.lines[k]
            if (
                line.strip()
                and not line.startswith("#")
                and len(line) - len(line.lstrip()) < indent
            ):
                return k
        return len(self.lines)

    def _warp_lines(self):
        for k, line in enumerate(self.lines):
            if re.match(r" *// (warp_map|core_map)\b", line):
                indent = len(line) - len(line.lstrip())
                opens = next(
                    j for j in range(k + 1, len(self.lines)) if self.lines[j][indent:] == "{"
                )
                yield from range(k, self._end(opens + 1, indent + 1))

    # ---- words ----

    def place(self, line):
        """(file, line) of Python of a generated line; None: it belongs to none."""
        return self.places[line] if 0 < line < len(self.places) else None

    def at(self, line, indent="  "):
        place = self.place(line)
        return f"\n{indent}at {place[0]}:{place[1]}" if place else ""

    def source(self, line):
        """As errors end: the place with its line of Python."""
        place = self.place(line)
        text = linecache.getline(*place).strip() if place else ""
        return f"{self.at(line)}{': ' + text if text else ''}"

    def _statement(self, line):
        """The generated lines of the same line of Python up to this one."""
        first = line
        while first > 1 and line - first < 40 and self.places[first - 1] == self.places[line]:
            first -= 1
        return "\n".join(self.lines[first : line + 1])

    def allocation(self, at, line=0, kind=None):
        """(what lies at a byte of shared memory, byte in it), or (None, at). Between those that
        share it decides the line: inside of whose scope it is, and what it names."""
        best, known = None, 0 < line < len(self.lines)
        text, around = (self.lines[line], self._statement(line)) if known else ("", "")
        for a in self.allocations:
            threads = self.info["block"] // 128 if a.apart else 1
            for k in range(threads):
                first = a.offset + k * a.apart
                if not first <= at < first + a.bytes or (kind and a.dtype != kind):
                    continue
                named = bool(a.mentioned.search(text)) + bool(a.mentioned.search(around))
                score = (a.line <= line < a.end, named, a.line)
                if best is None or score > best[0]:
                    best = score, a, at - first
        return best[1:] if best else (None, at)

    def smem(self, at, line=0):
        """(name, index)"""
        a, rest = self.allocation(at, line)
        return (a.name, a.index(rest)) if a else ("shared memory", f" (byte {at})")

    def tmem(self, lane, column, line):
        """(name, index) of a cell of tensor memory."""
        best = None
        text = self.lines[line] if 0 < line < len(self.lines) else ""
        for k, found in enumerate(map(_IN_TENSOR_MEMORY.match, self.lines)):
            if not found:
                continue
            shape = [int(d) for d in found[4].split(",")]
            packing, at = int(found[6]), column - int(found[2])
            used = math.prod(shape) // (128 * packing)
            score = bool(re.search(rf"\b{found[1]}\b", text)), k
            if 0 <= at < used and (best is None or score > best[0]):
                best = score, found, shape, packing, at
        if not best:
            return "tensor memory", f" (lane {lane}, column {column})"
        _, found, shape, packing, at = best
        name = found[1]
        if name not in self.in_tensor_memory:
            name = re.sub(r"_\d+$", "", name)
        if found[5] != "default" or shape[-2] != 128:
            return name, f" (lane {lane}, column {at})"
        wide = shape[-1] // packing
        index = [*unravel(at // wide, shape[:-2]), lane, at % wide * packing]
        return name, f"[{', '.join(map(str, index))}]"

    def barrier(self, at):
        a, rest = self.allocation(at, kind="barrier")
        if a is None:
            return f"the barrier at byte {at}"
        index = unravel(rest // 8, a.shape)
        one = math.prod(a.shape) == 1
        return f"'{a.name}{'' if one else '[' + ', '.join(map(str, index)) + ']'}'"

    def gmem(self, region, at):
        """(name, index) of a byte of a buffer; buffers are those parameters that share no operand,
        and then the counters."""
        params = self.info["params"]
        buffers = [k for k, p in enumerate(params) if p[3] < 0]
        region %= len(buffers) + 1  # of a device
        if region >= len(buffers):
            return "semaphores and counters", f"[{at // 4}]"
        k = buffers[region]
        written = [o for o, p in enumerate(params) if p[3] == k]
        name, strides = self.info["given"][written[0] if written else k]
        operands = self.info["operands"]
        name = name or (f"operand {k}" if k < operands else f"output {k - operands}")
        dtype, shape, *_ = params[k]
        n = at * 8 // bits_of(dtype)
        if strides:
            return name, self._strided(n, shape, strides)
        if not 0 <= n < math.prod(shape):
            return name, f" (element {n} in row-major order)"
        return name, "[" + ", ".join(map(str, unravel(n, shape))) + "]" if shape else "[...]"

    @staticmethod
    def _strided(n, shape, strides):
        index = [0] * len(shape)
        for d in sorted(range(len(shape)), key=lambda d: -strides[d]):
            index[d] = min(n // strides[d], shape[d] - 1) if strides[d] > 0 else 0
            n -= index[d] * strides[d]
        return "[" + ", ".join(map(str, index)) + "]"

    def block(self, b):
        """ "grid point (1, 0), block (1)", of the index of a block in CUDA's order."""
        info, words = self.info, []
        *index, device = (int(x) for x in b.split(","))
        grid, cluster = info["grid_sizes"], info["cluster_sizes"]
        if info["mesh"]:
            words.append(self.device(device))
        if info["shares_grid"]:
            if math.prod(info["grid"]) > 1:
                words.append(f"block {index[0]} of the launch")
            return ", ".join(words)
        size = list(info["cluster"])
        point = [i // n for i, n in zip(index, size)]
        if grid and info["folds_grid"]:
            words.append(f"grid point {_tuple(unravel(point[0], grid))}")
        elif grid:
            rest = unravel(point[2], grid[:-2]) if len(grid) > 2 else []
            words.append(f"grid point {_tuple([*rest, *point[: min(len(grid), 2)][::-1]])}")
        if cluster:
            inside = [i % n for i, n in zip(index, size)][: len(cluster)][::-1]
            words.append(f"block {_tuple(inside)}")
        return ", ".join(words)

    def point(self, block):
        """The number of a block's cluster along each axis."""
        *index, device = map(int, block.split(","))
        return [device, *(i // n for i, n in zip(index, self.info["cluster"]))]

    def device(self, number):
        """ "device (1,)" of the mesh."""
        return f"device {_tuple(unravel(number, self.info['mesh']))}"

    def agent(self, a):
        """Who made an access: "thread 1, warp 2", "TMA, for thread 0", "the tensor core"."""
        line = self.lines[int(a["line"])] if int(a["line"]) < len(self.lines) else ""
        kind, number = a["by"], int(a.get("number", 0))
        where = self.block(a["block"]) if "block" in a else ""
        if kind in ("several", "unknown", "launch"):
            return {
                "several": "several threads",
                "launch": "kernels that were launched earlier",
            }.get(kind, "an engine")
        if kind == "end":
            return f"what follows the kernel on {self.device(number)}"
        if kind == "cluster":
            engine = "TMA, for " if re.search(r"\b(tma|bulk)_", line) else ""
            return engine + (where or "several points of the grid")
        if kind == "barrier":
            remote = re.search(r"\b(st|red)_async", line) or "store_async" in line
            return ", for ".join(filter(None, ["st.async" if remote else "TMA", where]))
        lanes = 32 if kind in ("products", "tmem_loads", "tmem_stores") else 1
        thread = f"thread {number * lanes // 128}"
        if kind == "thread" and int(a["line"]) in self.in_warps:
            thread += f", warp {number // 32 % 4}"
        who = ", ".join(filter(None, [where, thread]))
        core = "the tensor core, for "
        makers = {"thread": "", "tmem_loads": "", "tmem_stores": "", "products": core}
        makers["tensor_core"] = core
        return makers.get(kind, "TMA, for ") + who

    def access(self, words):
        """A fact of an access, as a dict with `ref`, `index`, `agent` and `place`."""
        a = dict(zip(words[1::2], words[2::2]))
        at, line = int(a["at"]), int(a["line"])
        region = int(a["region"])
        a["ref"], a["index"] = {
            "smem": lambda: self.smem(at, line),
            "gmem": lambda: self.gmem(region, at),
            "tmem": lambda: self.tmem(region, at, line),
        }[a["space"]]()
        a["agent"], a["place"] = self.agent(a), self.place(line)
        return a

    def translate(self, text):
        """The machine's words, with names for bytes and lines of Python."""

        def line(m):
            place = self.place(int(m[1]))
            return f"at {place[0]}:{place[1]}" if place else "in the prologue of the program"

        text = re.sub(
            r"mbarrier at byte (\d+) \(of line \d+\)",
            lambda m: f"barrier {self.barrier(int(m[1]))}",
            text,
        )
        text = re.sub(
            r"(?:the )?mbarrier at byte (\d+)", lambda m: f"barrier {self.barrier(int(m[1]))}", text
        )
        text = re.sub(
            r"byte (\d+) of shared memory", lambda m: "'{}'{}".format(*self.smem(int(m[1]))), text
        )
        text = re.sub(
            r"(?:device (\d+), )?block \((\d+), (\d+), (\d+)\), thread (\d+)", self._who, text
        )
        return re.sub(r"\b(?:of|in) line (\d+)", line, text)

    def _who(self, m):
        words = self.block(",".join([*m.group(2, 3, 4), m[1] or "0"])), f"thread {int(m[5]) // 128}"
        return ", ".join(filter(None, words))


def _tuple(xs):
    return f"({', '.join(map(str, xs))}{',' if len(xs) == 1 else ''})"


# ---- messages ------------------------------------------------------------------------------------


def _tensor_memory(first):
    """What an access to tensor memory lacks after it."""
    other = (
        "and, if another thread issues the second, plgpu.barrier_arrive on a barrier with"
        " orders_tensor_core=True"
    )
    if "tensor core" in first["agent"]:
        return f"wait for the first on a barrier of plgpu.tcgen05_commit_arrive {other}"
    call, what = {"read": ("wait_load_tmem", "load")}.get(first["touch"], ("commit_tmem", "store"))
    return f"call plgpu.{call}() after the {what} {other}"


def _wait_for(names, access):
    """What waits for an engine's access; None of a thread."""
    if access["by"] == "barrier":
        return f"plgpu.barrier_wait({names.barrier(int(access['number']))[1:-1]})"
    return {
        "store_reads": "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        "store_writes": "plgpu.wait_smem_to_gmem(0)",
        "tensor_core": "a barrier that the product completes",
        "products": "plgpu.wgmma_wait(0)",
    }.get(access["by"])


def _remedy(names, lacks, first, second):
    """What to change in the kernel."""
    engine = "product" if "tensor core" in second["agent"] else "copy"
    if lacks == "tensor":
        return _tensor_memory(first)
    if lacks == "end":
        return "let a thread of that device wait for a signal that follows the first"
    if lacks == "fence":
        return (
            f"call plgpu.commit_smem() before the {engine}, in the thread that stores or issues it"
        )
    if lacks == "wait":
        return (
            "wait for the first: plgpu.wait_gmem_to_smem(0); only the thread that issued it can,"
            " and then tell others"
        )
    if lacks == "drain":
        return "no proxy fence follows the load, which may be late"
    points = [names.point(x["block"]) for x in (first, second) if "block" in x]
    if len(points) == 2 and points[0][0] != points[1][0]:
        return "devices are not ordered, unless a semaphore orders them"
    if lacks == "grid" or (len(points) == 2 and points[0] != points[1]):
        return "points of the grid are not ordered, unless a semaphore orders them"
    if lacks == "launch":
        return "call plgpu.griddepcontrol_wait() before the second"
    if wait := _wait_for(names, first):
        other = "only the thread that issued it can, and then tell others by a barrier"
        text = f"wait for the first: {wait}"
        text += f"; {other}" if first["by"] in ("store_reads", "store_writes", "products") else ""
        loads = [x["by"] == "barrier" for x in (first, second)]
        if loads[0] != loads[1] and second["by"] in ("barrier", "store_reads", "store_writes"):
            other = _wait_for(names, second)
            text += f"; if the second was issued first, wait for that one: {other}"
        return text
    if second["by"] == "barrier":
        name = names.barrier(int(second["number"]))[1:-1]
        return (
            f"plgpu.barrier_wait({name}) before the first, or issue the {engine} after it: in the"
            " same thread, or after a barrier"
        )
    if second["by"] == "products":
        return "plgpu.wgmma_wait(0) before the first, or issue the product after it"
    if second["by"] in ("store_reads", "store_writes"):
        read_only = ", wait_read_only=True" if second["by"] == "store_reads" else ""
        return (
            f"plgpu.wait_smem_to_gmem(0{read_only}) before the first, or issue the copy after it:"
            " in the same thread, or after a barrier"
        )
    if second["by"] != "thread":
        return (
            f"issue the {engine} after the first access: in the same thread, or after a barrier"
            " that it waits on"
        )
    return (
        "order them by a barrier (plgpu.barrier_arrive after the first, plgpu.barrier_wait before"
        " the second) or a semaphore"
    )


def race(names, facts):
    """The Race of the facts of an error."""
    lacks = next(f[1] for f in facts if f[0] == "lacks")
    a, b = (names.access(f) for f in facts if f[0] == "access")
    sides = [
        RaceAccess(x["touch"], x["ref"], x["index"], x["agent"], *(x["place"] or (None, 0)))
        for x in (a, b)
    ]
    hint, space = _remedy(names, lacks, a, b), b["space"].upper()
    other = f" and '{b['ref']}'" if a["ref"] != b["ref"] else ""
    text = (
        f"RACE DETECTED on '{a['ref']}'{other} in {space}, {b['index']}: {a['touch']} and"
        f" {b['touch']} are not ordered"
    )
    for x in (a, b):
        text += f"\n  {x['touch']} of {x['ref']}{x['index']} by {x['agent']}"
        text += names.at(int(x["line"]), "    ")
    at = int(b["at"])
    return Race(*sides, space, b["index"], (at, at + 1), hint, f"{text}\n  {hint}")


def unwritten(names, facts):
    a = next(names.access(f) for f in facts if f[0] == "access")
    return f"'{a['ref']}'{a['index']} was never written, and is read by {a['agent']}"


def bounds(names, facts, what):
    found = [names.access(f) for f in facts if f[0] == "access"]
    if not found:
        return names.translate(what)
    a = found[0]
    return f"an access outside of '{a['ref']}'{a['index']} by {a['agent']}"


def _meeting(what, block):
    """What threads wait for that meet there, in words."""
    if found := re.match(r"bar.sync (\d+), where (\d+) threads meet", what):
        number, lanes = int(found[1]), int(found[2])
        if number == 0:
            return "the other threads of its block"
        if lanes == 128 and number <= block // 128:
            return "the other lanes of its thread"
        return f"others at a named barrier of {lanes} lanes"
    if what == "barrier.cluster":
        return "the other blocks of its cluster"
    return re.sub(r" of its warp at .*", " of its warp", what)


def site(names, facts):
    """A check of the program itself that failed, with its place."""
    words = next(f for f in facts if f[0] == "site")
    a = dict(zip(words[::2], words[1::2]))
    file, line, op, ref, dim, shape, size, _, blocks, devices = names.info["sites"][int(a["site"])]
    place = f"\n  at {file}:{line}" if file else ""
    source = linecache.getline(file, line).strip() if file else ""
    n = int(a["value"])
    what = f"range {n}:{n + size}" if size else f"index {n}"
    who = ", ".join(filter(None, [names.block(a["block"]), f"thread {int(a['thread']) // 128}"]))
    wrong = f"{what} of dimension {dim} lies outside {ref} of shape {shape}"
    if owner := int(a["place"]):  # 1 + another device
        wrong += f" on {names.device(owner - 1)}"
    if blocks:
        wrong = f"cluster_ref of {ref} to index {n}, on an axis of {blocks} blocks"
    if devices:
        wrong = f"remote_ref of {ref} to device {n} of a mesh of {devices} devices"
    return f"{op} out of bounds: {wrong} ({who}){place}{': ' + source if source else ''}"


def _wait(names, words, barriers):
    """One agent of a deadlock, and what it waits for."""
    k = words.index("for")
    a, what = dict(zip(words[1:k:2], words[2:k:2])), " ".join(words[k + 1 :])
    who = ", ".join(filter(None, [names.block(a["block"]), f"thread {int(a['thread']) // 128}"]))
    if int(a["line"]) in names.in_warps:
        who += f", warp {int(a['thread']) // 32 % 4}"
    if found := re.match(r"parity \d+ of the mbarrier at byte (\d+)", what):
        b = barriers.get((a["block"], found[1]), {})
        what = f"barrier {names.barrier(int(found[1]))}"
        missing = (
            [f"{b['pending']} of {b['expected']} arrivals"] if int(b.get("pending", 0)) else []
        )
        missing += [f"{b['bytes']} bytes of copies"] if int(b.get("bytes", 0)) else []
        what += f", which lacks {' and '.join(missing)}" if missing else ""
    if found := re.match(r"a semaphore (to .*), of site (\d+), element (\d+)", what):
        ref = names.info["sites"][int(found[2])][3].replace("''", "'")
        what = f"a semaphore, element {found[3]} of {ref}, {found[1]}"
    what = names.translate(_meeting(what, names.info["block"]))
    return f"\n  {who}: waits for {what}{names.at(int(a['line']), ', ').lstrip(chr(10))}"


def deadlock(names, facts, name):
    barriers = {}
    for f in facts:
        if f[0] == "barrier":
            b = dict(zip(f[1::2], f[2::2]))
            barriers[b["block"], b["at"]] = b
    waits = dict.fromkeys(_wait(names, f, barriers) for f in facts if f[0] == "waits")
    text = f"deadlock: no thread of the kernel '{name}' can go on"
    text += "".join(itertools.islice(waits, 16))
    return text + (f"\n  and {len(waits) - 16} more" if len(waits) > 16 else "")
