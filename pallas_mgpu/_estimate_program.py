"""A lowered graph as Python generators that tell a machine of `_estimate_machine` what to do.

`read` reads the text form of a graph (docs/graph-text.md), which `compile_kernel` turns into the
source of one function: the body of a Pallas thread. It computes the scalars (indices, trip counts,
slots, phases) as the kernel does, and no array: of arrays only their number of elements counts, and
the moment at which a load from GMEM has brought one. Costs of neighbouring array ops are added up
here, so that a step of a pipeline is a few calls.

A scalar that follows from the elements of an array is unknown. A branch on it is taken to be the
rare case and left out, a loop on it to end at once; `Program.assumed` names the lines."""

import dataclasses
import math
import re

import numpy as np

from . import _estimate_values as elements
from ._estimate_loops import Loop
from ._estimate_values import UNKNOWN
from ._types import _DTYPES

_STRING = r'"(?:[^"\\]|\\.)*"'
_VALUE = re.compile(rf"%(?:{_STRING}_|[A-Za-z]\w*?_|_\w*?_)?(\d+)(?!\w)")
_PLACE = re.compile(rf"\s*//\s*({_STRING}):(\d+)\s*$")
_OP = re.compile(
    r"(?:(?P<outs>%\d+(?:, %\d+)*) = )?(?P<name>\w+)(?: (?P<ins>%\d+(?:, %\d+)*))?"
    r"(?: \{(?P<attrs>.*?)\})?(?: : (?P<types>.*?))?(?P<region> \{)?$"
)
_TYPE = re.compile(r"(?:(gmem|smem|acc|tmem) )?(\w+)(?:\[([\d,]*)\])?(?: @(\S+))?")


@dataclasses.dataclass(frozen=True)
class Type:
    space: str | None  # None: an array or scalar
    dtype: str
    shape: tuple[int, ...]
    layout: str | None

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.size * bits_of(self.dtype) / 8

    @property
    def is_scalar(self):
        return self.space is None and self.dtype != "barrier" and not self.shape

    @property
    def registers(self):
        """Elements of a lane of 128, of an array; those beyond the array, too."""
        layout = self.layout or ""
        if self.space or layout == "splat" or not self.shape:
            return 0.0
        if layout.startswith("tiled"):
            tile, dims = _tile(layout)
            tiles = math.prod(math.ceil(n / t) for n, t in zip(self.shape, tile))
            return float(tiles * math.prod(n for _, n, _ in dims))
        if layout.startswith("strided"):
            return math.ceil(self.size / (128 * self.neighbours)) * self.neighbours
        shared = {"wgmma.reduce(0)": 32}.get(layout, 4) if "reduce" in layout else 1  # copies
        return self.size * shared / 128

    @property
    def neighbours(self):
        """Elements that lie side by side in a lane, which one instruction may load or store."""
        layout, most = self.layout or "", max(1, 128 // bits_of(self.dtype))
        if layout.startswith("strided"):
            return min(most, int(layout[8:-1]))
        if layout.startswith("tiled"):
            tile, dims = _tile(layout)
            last = [n for d, n, step in dims if d == len(tile) - 1 and step == 1]
            return min(most, max(last, default=1))
        return most


def _tile(layout):
    """Of `tiled(tile; warps; lanes; registers)`, perhaps with `.reduce(dim)`: the extents of the
    tile, and (dim, extent, step) of a lane's registers, of the dims that there are."""
    inside, gone = re.fullmatch(r"tiled\(([^)]*)\)(?:\.reduce\((\d+)\))?", layout).groups()
    tile, _, _, registers = inside.split(";")
    gone = -1 if gone is None else int(gone)
    extents = [int(n) for d, n in enumerate(tile.split(",")) if d != gone]
    parts = [[int(y) for y in x.split(":")] for x in registers.split(",") if x and x[0] != "*"]
    dims = [(d - (0 <= gone < d), n, *(step or [0])) for d, n, *step in parts if d != gone]
    return extents, dims


def bits_of(dtype):
    return _DTYPES[dtype][0]


@dataclasses.dataclass
class Op:
    name: str
    outs: list[int]
    ins: list[int]
    attrs: dict[str, str]
    types: list[Type]
    place: str
    regions: list = dataclasses.field(default_factory=list)

    def int(self, name, default=0):
        return int(self.attrs.get(name, default))

    def list(self, name):
        text = self.attrs.get(name, "[]")[1:-1]
        return [x.strip() for x in text.split(",")] if text else []


@dataclasses.dataclass
class Block:
    args: list[tuple[int, Type]] = dataclasses.field(default_factory=list)
    ops: list[Op] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Graph:
    name: str
    grid: list[int]
    cluster: list[int]
    threads: int
    smem: int
    target: str
    approximate: bool  # functions of one instruction
    sizes: list[tuple]  # (name, how, a, b, least, most, multiple), from number 1 on
    grid_sizes: list[int]
    body: Block
    outputs: set[int]  # values that are outputs
    types: dict[int, Type]
    extents: dict[int, list[int]]  # of arguments: the size of each dimension, or 0


# ---- reading -------------------------------------------------------------------------------------


def _ints(head, word):
    found = re.search(rf" {word} \[([-\d, ]*)\]", head)
    return [int(x) for x in found[1].split(",")] if found and found[1].strip() else []


def _type(text):
    space, dtype, dims, layout = _TYPE.match(text).groups()
    layout = layout and layout.rstrip(",")  # between arguments
    return Type(space, dtype, tuple(map(int, dims.split(","))) if dims else (), layout)


def _types(text):
    return [_type(x) for x in text.split(", ")] if text else []


def _attrs(text):
    return dict(re.findall(r"(\w+) = (\[[^\]]*\]|[^,]+)", text or ""))


def _args(line):
    return [
        (int(n), _type(t))
        for n, t in re.findall(r"%(\d+): ((?:\w+ )?\w+\[[\d,]*\](?: @\S+)?)", line)
    ]


def read(text):
    """The :class:`Graph` of a text form."""
    lines = text.splitlines()
    head = lines[0]
    name = re.match(rf"kernel ({_STRING})", head)[1][1:-1]
    head = re.sub(rf"^kernel {_STRING}", "", head)
    sizes = [
        (n[1:-1], how, *map(int, numbers))
        for n, how, *numbers in re.findall(
            rf" size ({_STRING}) (\w+) (-?\d+) (-?\d+) (-?\d+) (-?\d+) (-?\d+)", head
        )
    ]
    number = lambda word: int((re.search(rf" {word} (\d+)", head) or [0, 0])[1])  # noqa: E731
    graph = Graph(
        name, _ints(head, "grid"), _ints(head, "cluster"), number("threads") or 1, number("smem"),
        (re.search(r" target (\w+)", head) or [0, "sm_90a"])[1], " approx_math" in head, sizes,
        _ints(head, "grid_sizes"), Block(), set(), {}, {},
    )  # fmt: skip
    open_blocks, open_ops = [graph.body], []
    for line in lines[1:]:
        place = _PLACE.search(line)
        at = f"{place[1][1:-1]}:{place[2]}" if place else ""
        line = line[: place.start()] if place else line
        line = re.sub(_STRING, '""', _VALUE.sub(r"%\1", line)).strip()
        if not line or line.startswith("warning "):
            continue
        if line == "}":
            open_blocks.pop()
            if open_ops:
                open_ops.pop()
        elif line == "} {":
            open_blocks[-1] = Block()
            open_ops[-1].regions.append(open_blocks[-1])
        elif line.startswith("args "):
            open_blocks[-1].args = _args(line)
            graph.types.update(open_blocks[-1].args)
            for n, numbers in re.findall(r"%(\d+): [^%]*? extents \[([\d, ]*)\]", line):
                graph.extents[int(n)] = [int(x) for x in numbers.split(",")]
            graph.outputs.update(int(n) for n in re.findall(r"out(?:\(\d+\))? %(\d+)", line))
        else:
            _read_op(line, at, graph, open_blocks, open_ops)
    return graph


def _read_op(line, at, graph, open_blocks, open_ops):
    m = _OP.match(line)
    values = lambda x: [int(n) for n in re.findall(r"%(\d+)", x or "")]  # noqa: E731
    op = Op(
        m["name"], values(m["outs"]), values(m["ins"]), _attrs(m["attrs"]), _types(m["types"]), at
    )
    graph.types.update(zip(op.outs, op.types))
    open_blocks[-1].ops.append(op)
    if m["region"]:
        op.regions.append(Block())
        open_blocks.append(op.regions[0])
        open_ops.append(op)


# ---- scalars -------------------------------------------------------------------------------------


def _div(a, b):
    if a is UNKNOWN or b is UNKNOWN or not b:
        return UNKNOWN
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _rem(a, b):
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN or not b else a - _div(a, b) * b


def _min(a, b):
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else min(a, b)


def _max(a, b):
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else max(a, b)


def _select(p, a, b):
    return UNKNOWN if p is UNKNOWN else a if p else b


def _not(a):
    return a if a is UNKNOWN else not a if isinstance(a, bool) else ~a


def _convert(a, dtype):
    if a is UNKNOWN or dtype.startswith(("float", "bfloat")):
        return a
    if dtype == "bool":
        return bool(a)
    return int(a) if math.isfinite(a) else UNKNOWN


_FORMS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "_div({}, {})",
    "rem": "_rem({}, {})", "min": "_min({}, {})", "max": "_max({}, {})", "and": "{} & {}",
    "or": "{} | {}", "xor": "{} ^ {}", "shl": "{} << {}", "shr": "{} >> {}", "eq": "{} == {}",
    "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}",
    "select": "_select({}, {}, {})", "neg": "-{}", "abs": "abs({})", "not": "_not({})",
    "multiple_of": "{}", "opt_barrier": "{}", "bitcast": "{}", "reshape": "{}", "broadcast": "{}",
    "layout_cast": "{}", "shuffle_tile": "{}",
}  # fmt: skip

# ---- costs of array ops --------------------------------------------------------------------------

# instructions of a lane for an element of 32 bits: (all, those of the special function unit)
_COSTS = {
    "exp2": (4, 1), "exp": (7, 1), "log2": (26, 0), "log": (25, 0), "rcp_approx": (2, 1),
    "rsqrt": (4, 1), "sqrt": (8, 1), "tanh": (15, 2), "div": (7, 1), "pow": (84, 1), "rem": (12, 1),
    "sin": (30, 0), "cos": (30, 0), "gather": (6, 0), "scatter": (8, 0), "scan": (8, 0),
    "layout_cast": (2, 0), "transpose": (2, 0), "inline_cuda": (4, 0), "iota": (0, 0),
    "unpack": (2, 0), "pack": (2, 0), "acc_store": (1, 0), "reduce": (1, 0), "tmem_reduced": (1, 0),
}  # fmt: skip
_APPROXIMATE = {  # of a kernel with approx_math
    "exp2": (2, 1), "exp": (3, 1), "log2": (2, 1), "log": (3, 1), "rsqrt": (2, 1), "tanh": (1, 1),
    "sin": (1, 1), "cos": (1, 1),
}  # fmt: skip
_CHAIN = 4.0  # cycles from one instruction to the next that needs its result
_MEETING = 110.0  # cycles in which the warps of a thread exchange what they have
_FREE = {"slice", "concat", "broadcast", "reshape", "opt_barrier", "bitcast", "const"}
_LONG = set(
    "log1p expm1 cbrt sinh cosh asinh acosh atanh erf erfc erf_inv lgamma tan asin acos atan atan2"
    .split()
)  # fmt: skip


def _is_splat(v, graph, defined):
    op = defined.get(v)
    return op is not None and op.name == "layout_cast" and graph.types[op.ins[0]].layout == "splat"


def _is_one_for_many(v, graph, defined):
    return not graph.types[v].shape or getattr(defined.get(v), "name", "") == "broadcast"


def _instructions(op, graph):
    """Of a lane for an element of 32 bits: all, and those of the special function unit."""
    found = _APPROXIMATE.get(op.name) if graph.approximate else None
    return found or _COSTS.get(op.name, (1, 0))


def _cost(op, graph, defined):
    """(instructions of a lane, those of special functions, cycles of latency) of an array op."""
    types = [graph.types[x] for x in (*op.ins, *op.outs)]
    n = max((t.registers for t in types), default=0.0)
    if not n and all(t.is_scalar for t in types):
        return 0.0, 0.0, _CHAIN * _instructions(op, graph)[0]
    if not n or op.name in _FREE:
        return 0.0, 0.0, 0.0
    if op.name in ("layout_cast", "acc_store"):
        if any(graph.types[v].layout == "splat" or _is_splat(v, graph, defined) for v in op.ins):
            return 0.0, 0.0, 0.0  # the first product begins anew
    if op.name in _LONG:
        return 20 * n, n, 0.0
    every, special = _instructions(op, graph)
    if op.name == "div" and _is_one_for_many(op.ins[1], graph, defined):
        every, special = 3, 0  # by a reciprocal
    if op.name in ("add", "sub"):  # one instruction with the product
        arms = [defined.get(x) for x in op.ins]
        if any(a is not None and a.name == "mul" and graph.types[a.outs[0]].shape for a in arms):
            every = 0
    if op.name == "convert":
        every = 1
        if graph.types[op.ins[0]].dtype.lstrip("u").startswith("int"):
            every = 1.5
    elif all(bits_of(t.dtype) == 16 for t in types if t.shape):
        every /= 2
    latency = 0.0
    if op.name in ("max", "min") or op.attrs.get("op") in ("max", "min"):
        every *= 2
    if op.name == "reduce":
        latency = _MEETING if op.types[0].layout in ("splat", None) else 60.0
    return every * n, special * n, latency


# ---- compiling -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _View:
    root: int
    starts: list[str]  # of each dimension of the root
    left: list[int]  # dimensions of the root that the view has, in its order
    sizes: list[int]  # of each dimension of the root
    known: bool = True


_ELEMENTS = {"made": elements.made, "full": np.full, "share": elements.share}


class _Compiler:
    def __init__(self, graph, products, least, given):
        self.graph, self.products, self.least, self.given = graph, products, least, given
        self.lines, self.depth = [], 0
        self.expr, self.views, self.defined = {}, {}, {}
        self.work = [0.0, 0.0, 0.0, 0.0]  # instructions, special ones, latency, scalars
        self.assumed, self.maps = [], 0
        self.overlaps = self.dynamic = self.shares_grid = False
        self.whiles = 0
        self.elements, self.held = {}, set()  # of arrays; roots in SMEM that have such arrays

    # -- text

    def put(self, text):
        self.lines.append("  " * self.depth + text)

    def flush(self):
        every, special, latency, scalars = self.work
        if every or special:
            self.put(f"t = yield t + {scalars + latency:.0f}")
            self.put(f"t = sm.work(t, {every:.2f}, {special:.2f})")
            if latency >= _MEETING:
                self.put("met = t")
        elif scalars or latency:
            self.put(f"t += {scalars + latency:.0f}")
        self.work = [0.0, 0.0, 0.0, 0.0]

    def value(self, v):
        return self.expr.get(v, "UNKNOWN")

    def await_loads(self, op):
        for v in dict.fromkeys(op.ins):
            ready = self.expr.get(v, "0")
            if self.graph.types[v].shape and not self.graph.types[v].space and ready != "0":
                self.put(f"if {ready} > t: t = {ready}")

    # -- blocks

    def block(self, block, results=()):
        """The ops of a block; its yields become `results`."""
        start = len(self.lines)
        for op in block.ops:
            if op.name == "yield":
                self.flush()
                self.assign(results, op.ins)
            else:
                self.op(op)
        self.flush()
        if len(self.lines) == start:
            self.put("pass")

    def assign(self, names, values):
        pairs = [(n, self.carried(v)) for n, v in zip(names, values)]
        pairs = [(n, v) for n, v in pairs if n != v]
        if pairs:
            self.put(f"{', '.join(n for n, _ in pairs)} = {', '.join(v for _, v in pairs)}")

    def carried(self, v):
        """An expression for a value that a region takes or gives."""
        t = self.graph.types[v]
        if t.shape and t.dtype != "barrier" and not t.space:
            return self.expr.get(v, "0")
        return self.value(v)

    def nest(self, block, results=()):
        self.depth += 1
        self.block(block, results)
        self.depth -= 1

    def bind(self, values):
        names = [f"v{v}" for v in values]
        self.expr.update(zip(values, names))
        return names

    def op(self, op):
        for v in op.outs:
            self.defined[v] = op
        handler = getattr(self, f"do_{op.name}", None)
        if handler is not None:
            handler(op)
        elif op.name in _FORMS and op.types and op.types[0].is_scalar:
            self.scalar(op)
        elif op.types and op.types[0].is_scalar and op.name in ("convert",):
            self.set_scalar(op, f"_convert({self.value(op.ins[0])}, '{op.types[0].dtype}')")
        else:
            self.array(op)

    def set_scalar(self, op, text):
        name = self.bind(op.outs)[0]
        self.put(f"{name} = {text}")
        self.work[3] += 1

    def scalar(self, op):
        if any(not self.graph.types[v].is_scalar for v in op.ins):
            self.array(op)
            return
        operands = [self.value(v) for v in op.ins]
        if "UNKNOWN" in operands:
            self.expr[op.outs[0]] = "UNKNOWN"
            self.work[3] += 1
        else:
            self.set_scalar(op, _FORMS[op.name].format(*operands))

    def array(self, op):
        """An op whose elements nobody computes."""
        self.await_loads(op)
        for k, cost in enumerate(_cost(op, self.graph, self.defined)):
            self.work[k] += cost
        for v, t in zip(op.outs, op.types):
            self.expr[v] = "UNKNOWN" if t.is_scalar else "0"
        if len(op.outs) == 1 and op.name in elements.FOLLOWED:
            self.follow(op, op.outs[0], op.types[0])

    # -- elements of small arrays

    def is_followed(self, t):
        return t.dtype.lstrip("u").startswith(("int", "bool")) and t.size <= elements.MOST

    def element(self, v):
        """An expression for the elements of an array, or for a scalar."""
        return self.value(v) if self.graph.types[v].is_scalar else self.elements.get(v, "UNKNOWN")

    def follow(self, op, out, t):
        """Compute the elements of a result if those of an operand are known. What follows from
        constants and scalars alone is an expression, which is computed where a scalar needs it."""
        if not self.is_followed(t):
            return
        operands = [self.element(v) for v in op.ins]
        if "UNKNOWN" in operands:
            return
        text = f"made({', '.join([repr(op.name), repr(t.shape), repr(op.attrs), *operands])})"
        if t.is_scalar or len(text) > 1000 or any(x[0] == "a" for x in operands):
            self.put(f"a{out} = {text}")
            text = f"a{out}"
        if t.is_scalar:
            self.expr[out] = text
        else:
            self.elements[out] = text

    def part(self, v):
        """Arguments that name the elements of a view; None where they are not known."""
        view = self.view(v)
        if not view.known:
            return None
        return f"[{', '.join(view.starts)}], {view.sizes}, {view.left}"

    def share_of(self, mask):
        """An expression for the part of a mask that is true, as far as it is known."""
        text = self.element(mask)
        if text == "UNKNOWN":
            return "1"
        try:  # of constants alone
            return f"{elements.share(eval(text, dict(_ELEMENTS))):.4g}"  # noqa: S307
        except NameError:
            return f"share({text})"

    def follow_load(self, op, source, mask=None, other=None):
        root, at, out = self.root_of(source), self.part(source), op.outs[0]
        there = root in (self.given if self.in_gmem(source) else self.held)
        if not there or at is None or not self.is_followed(op.types[0]):
            return
        if not self.in_gmem(source):
            text = f"kept(place.scalars, {root}, {at})"
        elif mask is None:
            text = f"part(place.values.get({root}), {at})"
        else:
            chosen = ", ".join(map(self.element, (mask, other)))
            text = f"part(place.values.get({root}), {at}, {chosen})"
        self.put(f"a{out} = {text}")
        self.elements[out] = f"a{out}"

    def follow_store(self, target, value, mask=None):
        root, at = self.root_of(target), self.part(target)
        text = self.element(value)
        if self.in_gmem(target) or at is None or text == "UNKNOWN" and root not in self.held:
            return
        self.held.add(root)
        mask = "True" if mask is None else self.element(mask)
        self.put(f"keep(place.scalars, {root}, {at}, {text}, {mask})")

    # -- values

    def do_const(self, op):
        text = op.attrs["value"]
        if not op.types[0].is_scalar:
            self.expr[op.outs[0]] = "0"
            if self.is_followed(op.types[0]) and re.fullmatch(r"-?\d+", text):
                self.elements[op.outs[0]] = f"full({op.types[0].shape}, {text})"
        elif re.fullmatch(r"-?\d+", text):
            self.expr[op.outs[0]] = f"({text})" if text[0] == "-" else text
        elif re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", text):
            self.expr[op.outs[0]] = f"({text})"
        else:
            self.expr[op.outs[0]] = "UNKNOWN"

    def do_axis(self, op):
        kind, dim = op.attrs.get("axis", "grid"), op.int("dim")
        at = {"grid": f"grid[{dim}]", "thread": "thread", "warp": "warp"}
        self.expr[op.outs[0]] = at.get(kind, "0")

    def do_size(self, op):
        self.expr[op.outs[0]] = f"sizes[{op.int('n')}]"

    def do_first_tile(self, op):
        self.expr[op.outs[0]] = "place.cluster"

    def do_next_tile(self, op):
        self.dynamic = True
        self.set_scalar(op, f"place.next({op.int('n')}, sm)")
        self.put("t += sm.facts.lane_latency")

    def do_fetch_tile(self, op):
        """The same of the points of the grid, of which each cluster has one from the start."""
        self.dynamic = self.shares_grid = True
        self.set_scalar(op, f"place.next({op.int('n')}, sm) + place.clusters")
        self.put("t += sm.facts.lane_latency")

    # -- views

    def view(self, v):
        if v not in self.views:
            t = self.graph.types[v]
            dims = list(range(len(t.shape)))
            self.views[v] = _View(v, ["0"] * len(dims), dims, list(t.shape))
        return self.views[v]

    def do_index(self, op):
        source = self.view(op.ins[0])
        out = _View(source.root, list(source.starts), [], list(source.sizes), source.known)
        operands = iter(op.ins[1:])
        for d, start, size in zip(source.left, op.list("starts"), op.list("sizes")):
            text = self.value(next(operands)) if start == "?" else start
            if text != "0":
                out.starts[d] = text if out.starts[d] == "0" else f"{out.starts[d]} + {text}"
            out.sizes[d] = 1 if size == "_" else int(size)
            if size != "_":
                out.left.append(d)
        self.views[op.outs[0]] = out

    def do_transpose_ref(self, op):
        source = self.view(op.ins[0])
        left = [source.left[int(d)] for d in op.list("dims")] if source.known else source.left
        self.views[op.outs[0]] = dataclasses.replace(source, left=left)

    def do_reshape_ref(self, op):
        source = self.view(op.ins[0])
        self.views[op.outs[0]] = dataclasses.replace(source, known=False)

    do_bitcast_ref = do_reshape_ref

    def do_cluster_ref(self, op):
        self.views[op.outs[0]] = self.view(op.ins[0])

    do_device_ref = do_multicast_ref = do_semaphore_of = do_cluster_ref

    def barrier(self, v):
        view = self.view(v)
        shape = self.graph.types[view.root].shape
        at = "0"
        for start, size in zip(view.starts, shape):
            at = f"({at}) * {size} + ({start})" if at != "0" else f"({start})"
        return f"b{view.root}[{at}]"

    def key(self, v):
        view = self.view(v)
        return f"({view.root}, {', '.join(view.starts)}{',' if view.starts else ''})"

    def moved(self, v):
        """An expression for the bytes of a view that its array has."""
        view, t = self.view(v), self.graph.types[v]
        if not view.known:
            return f"{t.nbytes:g}"
        shape, whole, factors = self.graph.types[view.root].shape, t.nbytes, []
        for start, size, dim in zip(view.starts, view.sizes, shape):
            if dim % size or start == "?" or dim < size:
                whole /= size
                factors.append(f"clip({start}, {size}, {dim})")
        return " * ".join([f"{whole:g}", *factors])

    # -- memory

    def access(self, t):
        """Loads or stores of the lanes: adds their instructions, and returns the bytes that shared
        memory moves meanwhile, as each one of a warp takes a cycle of it."""
        count = t.registers / t.neighbours
        self.work[0] += count
        return max(t.nbytes, 512 * count)

    def root_of(self, v):
        return self.view(v).root

    def in_gmem(self, v):
        return self.graph.types[v].space == "gmem"

    def do_alloc_smem(self, op):
        pass

    do_alloc_acc = do_alloc_tmem = do_alloc_semaphore = do_alloc_smem

    def do_global_semaphore(self, op):
        pass

    def do_alloc_barrier(self, op):
        count = max(op.types[0].size, 1)
        name = f"b{op.outs[0]}"
        self.put(f"{name} = place.barriers({op.outs[0]}, {count}, {op.int('arrivals', 1)})")

    def do_load(self, op):
        source, out = op.ins[0], op.outs[0]
        if op.types[0].is_scalar:
            self.flush()
            if self.in_gmem(source):  # floats are needed later
                late = op.types[0].dtype.startswith(("int", "uint"))
                took = "sm.facts.lane_latency" if late else "4"
                self.put(f"t += {took}; v{out} = place.argument{self.key(source)}")
            else:
                self.put(f"t += 30; v{out} = place.scalars.get({self.key(source)}, UNKNOWN)")
            self.expr[out] = f"v{out}"
            return
        moved = self.access(op.types[0])
        self.flush()
        self.put("t = yield t")
        if self.in_gmem(source):
            self.put(f"t, v{out} = sm.load(t, met, {self.root_of(source)}, {self.moved(source)})")
            self.expr[out] = f"v{out}"
        else:
            self.put(f"t = sm.shared(t, {moved:g}, 30)")
            self.expr[out] = "0"
        self.follow_load(op, source)

    def do_masked_load(self, op):
        _, mask, other, *indices = op.ins
        t = op.types[0]
        moved = self.access(t)
        self.flush()
        self.put("t = yield t")
        if self.in_gmem(op.ins[0]):
            nbytes = f"{t.size * bits_of(t.dtype) / 8:g} * {self.share_of(mask)}"
            self.put(f"t, v{op.outs[0]} = sm.load(t, met, {self.root_of(op.ins[0])}, {nbytes})")
            self.expr[op.outs[0]] = "UNKNOWN" if t.is_scalar else f"v{op.outs[0]}"
        else:
            self.put(f"t = sm.shared(t, {moved:g}, 30)")
            self.expr[op.outs[0]] = "UNKNOWN" if t.is_scalar else "0"
        if self.in_gmem(op.ins[0]) and not indices:
            self.follow_load(op, op.ins[0], mask, other)

    def do_store(self, op):
        target, value = op.ins[:2]
        self.await_loads(op)
        self.flush()
        t = self.graph.types[value]
        if t.is_scalar and not self.in_gmem(target):
            self.put(f"place.scalars[{self.key(target)}] = {self.value(value)}; t += 4")
            return
        moved = self.access(t)
        self.flush()
        self.put("t = yield t")
        if self.in_gmem(target):
            self.put(f"t = sm.store(t, {self.root_of(target)}, {self.moved(target)})")
        else:
            self.put(f"t = sm.shared(t, {moved:g}, 0)")
            self.follow_store(target, value)

    def do_masked_store(self, op):
        self.await_loads(op)
        t = self.graph.types[op.ins[1]]
        moved = self.access(t)
        self.flush()
        self.put("t = yield t")
        if self.in_gmem(op.ins[0]):
            nbytes = f"{t.nbytes or 4:g} * {self.share_of(op.ins[2])}"
            self.put(f"t = sm.store(t, {self.root_of(op.ins[0])}, {nbytes})")
        else:
            self.put(f"t = sm.shared(t, {moved:g}, 0)")
            if len(op.ins) == 3:
                self.follow_store(*op.ins)

    def do_atomic(self, op):
        self.await_loads(op)
        self.flush()
        t = self.graph.types[op.ins[1]]
        self.put("t = yield t")
        self.put(f"t = sm.store(t, {self.root_of(op.ins[0])}, {max(t.nbytes, 4):g})")
        self.put("t += sm.facts.lane_latency")
        for v, x in zip(op.outs, op.types):
            self.expr[v] = "UNKNOWN" if x.is_scalar else "0"

    def guarded(self, op, lines, predicate, otherwise=None):
        self.flush()
        if predicate is not None:
            self.put(f"if may_hold({self.value(predicate)}):")
            self.depth += 1
        for line in lines:
            self.put(line)
        if predicate is not None:
            self.depth -= 1
            if otherwise:
                self.put(f"else: {otherwise}")

    def shared_by(self, op):
        """Blocks of the cluster that a copy is multicast to."""
        axes = [int(x) for x in op.list("cluster") if int(x) >= 0]
        return math.prod(self.graph.cluster[a] for a in axes) if axes else 1

    def do_copy_gmem_to_smem(self, op):
        source, _, barrier = op.ins[:3]
        lines = [
            "t = yield t + sm.facts.issue",
            f"sm.copy_in(t, {self.root_of(source)}, {self.moved(source)}, {self.shared_by(op)},"
            f" {self.barrier(barrier)})",
        ]
        predicate = op.ins[3] if len(op.ins) > 3 else None
        self.guarded(op, lines, predicate, f"{self.barrier(barrier)}.arrive(t)")

    def do_copy_smem_to_gmem(self, op):
        lines = [
            "t = yield t + sm.facts.issue",
            f"sm.copy_out(t, {self.root_of(op.ins[1])}, {self.moved(op.ins[1])}, stores)",
        ]
        self.guarded(op, lines, op.ins[2] if len(op.ins) > 2 else None)

    def do_wait_smem_to_gmem(self, op):
        self.flush()
        self.put(f"t = sm.await_stores(t, stores, {op.int('n')}, {bool(op.int('read_only'))})")

    def do_async_store_smem(self, op):
        self.await_loads(op)
        self.flush()
        self.put("t = yield t")
        nbytes = self.graph.types[op.ins[0]].nbytes
        self.put(f"t = sm.exchange(t, {nbytes:g}, {self.barrier(op.ins[2])})")

    def do_broadcast_tile(self, op):
        self.flush()
        self.put(f"place.scalars[{self.key(op.ins[1])}] = {self.value(op.ins[0])}")
        self.put("t = yield t + sm.facts.issue")
        self.put(f"{self.barrier(op.ins[2])}.arrive(t + sm.facts.exchange_latency)")

    def do_async_prefetch(self, op):
        self.flush()
        self.put("t += sm.facts.issue")

    do_discard = do_async_prefetch

    # -- synchronisation

    def do_barrier_arrive(self, op):
        self.flush()
        self.put("t = yield t + sm.facts.issue")
        self.put(f"{self.barrier(op.ins[0])}.arrive(t)")

    def do_barrier_wait(self, op):
        self.flush()
        phase = self.value(op.ins[1]) if len(op.ins) > 1 else None
        barrier = self.barrier(op.ins[0])
        self.put(f"t = yield {barrier}.until(t, waits, {phase})")
        self.put("t += sm.facts.wake; met = t")

    def do_barrier_test(self, op):
        self.expr[op.outs[0]] = "True"
        self.work[3] += 10

    def meet(self, op):
        self.work[2] += 12

    do_sync = do_commit_smem = do_wait_gmem_to_smem = meet

    def nothing(self, op):
        pass

    do_set_max_registers = do_griddepcontrol_wait = nothing
    do_named_scope = do_print_layout = do_debug_print = do_debug_check = nothing
    do_commit_smem_to_gmem_group = do_proxy_fence = nothing

    def do_griddepcontrol_launch_dependents(self, op):
        self.overlaps = True

    def do_semaphore_signal(self, op):
        self.work[2] += 20

    def do_semaphore_wait(self, op):
        self.work[2] += 700
        self.assume(op.place, "a wait for another block takes the time of one access")

    def do_semaphore_read(self, op):
        self.expr[op.outs[0]] = "UNKNOWN"
        self.work[2] += 700

    def do_delay(self, op):
        self.flush()
        self.put(f"t += ({self.value(op.ins[0])} or 0) * sm.facts.clock / 1e9")

    def do_enter_section(self, op):
        self.flush()
        self.put(f"t = yield place.section.until(t, thread, {op.int('n')})")

    def do_leave_section(self, op):
        self.flush()
        self.put(f"place.section.leave(t + sm.facts.issue, {op.int('n')})")

    def do_named_barrier_sync(self, op):
        self.flush()
        self.put("t = yield t")
        named = f"place.named({self.value(op.ins[0])}, {op.int('n')})"
        self.put(f"t = yield {named}.join(t, {'32' if self.maps else '128'}, waits)")

    def do_named_barrier_arrive(self, op):
        self.flush()
        self.put("t = yield t")
        named = f"place.named({self.value(op.ins[0])}, {op.int('n')})"
        self.put(f"{named}.come(t, {'32' if self.maps else '128'}, waits)")

    # -- products

    def product(self, op, acc, a, b):
        """(multiply-adds, cycles of the tensor cores, bytes of operands in SMEM)"""
        x, y, out = (self.graph.types[v] for v in (a, b, acc))
        m, n = out.shape[-2:]
        k = x.shape[-1]
        macs = out.size * k
        rate = self.products(x.dtype, op.name)
        read = (x.nbytes if x.space else 0) + y.nbytes * max(m // 64, 1) if y.space else 0
        cycles = macs / rate
        if op.name == "wgmma":  # an instruction takes 64 rows and 32 bytes along K
            count = math.ceil(m / 64) * math.ceil(k * bits_of(x.dtype) / 256)
            cycles = max(cycles, count * self.least)
        return macs, cycles, read

    def do_wgmma(self, op):
        self.await_loads(op)
        self.flush()
        macs, cycles, read = self.product(op, *op.ins[:3])
        bits = bits_of(self.graph.types[op.ins[1]].dtype)
        self.put("t = yield t + sm.facts.issue")
        self.put(f"t = sm.wgmma(t, {macs}, {bits}, {cycles:.1f}, {read:.0f}, products)")

    def do_wgmma_wait(self, op):
        self.flush()
        self.put(f"t = sm.await_products(t, products, {op.int('n')})")

    def do_acc_load(self, op):
        self.flush()
        if op.int("n", -1) >= 0:
            self.put(f"t = sm.await_products(t, products, {op.int('n')})")
        self.expr[op.outs[0]] = "0"

    def do_mma(self, op):
        self.await_loads(op)
        self.flush()
        macs, cycles, _ = self.product(op, *op.ins[:3])
        bits = bits_of(self.graph.types[op.ins[1]].dtype)
        self.put("t = yield t")
        self.put(f"t = sm.mma(t, {macs}, {bits}, {cycles:.1f})")
        self.expr[op.outs[0]] = "0"

    # -- control

    def end_of_loop(self, go, place):
        """Called by the program."""
        if go is UNKNOWN:
            self.assume(place, "a loop that depends on data ends at once")

    def assume(self, place, what):
        text = f"{place}: {what}"
        if text not in self.assumed:
            self.assumed.append(text)

    def do_scope(self, op):
        results = self.bind(op.outs)
        self.block(op.regions[0], results)

    def do_if(self, op):
        self.flush()
        predicate = self.value(op.ins[0])
        results = self.bind(op.outs)
        if predicate == "UNKNOWN":
            self.assume(op.place, "a branch that depends on data is not taken")
        self.put(f"if {predicate}:")
        self.nest(op.regions[0], results)
        if len(op.regions) > 1 and (results or len(op.regions[1].ops) > 1):
            self.put("else:")
            self.nest(op.regions[1], results)
        self.work[3] += 4

    def do_switch(self, op):
        self.flush()
        results = self.bind(op.outs)
        last = len(op.regions) - 1
        self.put(f"case = _max(0, _min({self.value(op.ins[0])}, {last}))")
        for k, region in enumerate(op.regions):
            self.put(f"{'elif' if k else 'if'} case == {k}:" if k < last else "else:")
            self.nest(region, results)

    def loop(self, op, lo, hi):
        """Arguments of a `Loop`."""
        outer = op.name == "for" and not self.whiles
        key = f"({len(self.lines)}, thread, warp)"
        return f"sm, {key}, {lo}, {hi}, rest, {op.place!r}, place, {outer})"

    def do_for(self, op):
        self.flush()
        (index, _), *carries = op.regions[0].args
        names = self.bind([v for v, _ in carries])
        self.assign(names, op.ins[2:])
        self.bind([index])
        lo, hi = map(self.value, op.ins[:2])
        loop, step = f"l{index}", f"v{index}"
        self.put(f"{loop} = trips({self.loop(op, lo, hi)}")
        self.put(f"{step} = {loop}.low")
        self.put(f"while {step} < {loop}.high and not {loop}.is_over({step}, t):")
        self.put("  met = t")  # the compiler moves no load to an earlier iteration
        self.nest(op.regions[0], names)
        self.put(f"  {step} += 1")
        self.put(f"{loop}.end({step}, t)")
        results = self.bind(op.outs)
        if results:
            self.put(f"{', '.join(results)} = {', '.join(names)}")

    def do_while(self, op):
        self.flush()
        condition, body = op.regions
        names = self.bind([v for v, _ in body.args])
        self.assign(names, op.ins)
        self.expr.update((v, n) for (v, _), n in zip(condition.args, names))
        loop, step = f"l{len(self.lines)}", f"n{len(self.lines)}"
        self.put(f"{loop} = Loop({self.loop(op, 0, 0)}")
        self.put(f"{step} = 0")
        self.put(f"while {loop}.goes_on({step}, t):")
        self.depth += 1
        self.whiles += 1
        self.put(f"{step} += 1")
        self.block(condition, ["go"])
        self.put(f"if not go: end_of_loop(go, {op.place!r}); break")
        self.depth -= 1
        self.nest(body, names)
        self.whiles -= 1
        results = self.bind(op.outs)
        if results:
            self.put(f"{', '.join(results)} = {', '.join(names)}")

    def do_warp_map(self, op):
        self.flush()
        name = f"warp_map_{len(self.lines)}"
        self.put(f"def {name}(t, warp, stores, products, waits):")
        self.depth += 1
        self.maps += 1
        self.put("rest = rests[warp]")
        self.put("met = t = yield t")
        self.block(op.regions[0])
        self.put("return t")
        self.maps -= 1
        self.depth -= 1
        self.put("of_warps, rests = [dict(waits) for _ in range(4)], [[0.0] for _ in range(4)]")
        self.put(f"t = yield [{name}(t, w, stores, products, of_warps[w]) for w in range(4)]")
        self.put("rest[0] += max(rests)[0]")
        self.put("for x in of_warps:")
        self.put("  waits.update((b, n) for b, n in x.items() if n > waits.get(b, 0))")

    def refuse(self, op):
        raise NotImplementedError(
            f"plgpu.estimate: {op.name} ({op.place}) is not part of the model; measure with"
            " plgpu.testing.do_bench"
        )

    do_tcgen05_mma = do_copy_gmem_to_smem_cp_async = do_async_load_tmem = refuse
    do_async_store_tmem = do_try_cluster_cancel = refuse


def _may_hold(predicate):
    """An unknown one is taken to hold: others wait for the copy."""
    return predicate is UNKNOWN or bool(predicate)


def _trips(sm, key, lo, hi, rest, place, block, outer):
    if lo is UNKNOWN or hi is UNKNOWN:
        raise ValueError(
            f"plgpu.estimate: the number of iterations of the loop at {place} depends on elements"
            " of arrays. Pass those, values={number of the argument: array}; where that does not"
            " help, measure with plgpu.testing.do_bench"
        )
    return Loop(sm, key, lo, hi, rest, place, block, outer)


def _clip(start, size, dim):
    return size if start is UNKNOWN else max(0, min(size, dim - start, size + min(start, 0)))


@dataclasses.dataclass
class Program:
    graph: Graph
    body: object  # generator function (sm, place, grid, thread, sizes, t) -> time of its end
    source: str
    assumed: list[str]
    overlaps: bool  # lets the next kernel of the stream start before its end
    dynamic: bool  # blocks take what to do next from a counter
    shares_grid: bool  # and there are only as many as run at once


def compile_kernel(graph, products, least, given=()):
    """``products(dtype, op)``: multiply-adds of a cycle. least: cycles of a wgmma instruction.
    given: the numbers of values that are arguments whose elements are known."""
    c = _Compiler(graph, products, least, frozenset(given))
    for v, _ in graph.body.args:
        c.view(v)
    c.put("def body(sm, place, grid, thread, sizes, t):")
    c.depth += 1
    c.put("stores, products, waits, warp, rest = [], [], {}, 0, [0.0]")
    c.put("met = t = yield t")
    c.block(graph.body)
    c.put("return sm.finish(t, stores, products, rest[0])")
    source = "\n".join(c.lines)
    scope = {
        "UNKNOWN": UNKNOWN, "_div": _div, "_rem": _rem, "_min": _min, "_max": _max,
        "_select": _select, "_not": _not, "_convert": _convert, "trips": _trips, "clip": _clip,
        "end_of_loop": c.end_of_loop, "may_hold": _may_hold, "Loop": Loop,
        "part": elements.part, "keep": elements.keep, "kept": elements.kept, **_ELEMENTS,
    }  # fmt: skip
    exec(compile(source, f"<estimate of {graph.name}>", "exec"), scope)  # noqa: S102
    return Program(graph, scope["body"], source, c.assumed, c.overlaps, c.dynamic, c.shares_grid)
