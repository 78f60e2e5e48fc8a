"""Random kernels as data: a tree of templates that prints as Python, runs, and shrinks.

A `Program` holds operands, outputs, launch options and a body. The body is a `Block` of
statements; a statement or an expression is a `Node`: a text with `{}` where its parts go, which
are nodes, blocks, names, or numbers. The printed source is what runs, so a failing kernel is
always readable Python:

    python tests/fuzz/kernels.py 1234           # print the kernel of seed 1234
    python tests/fuzz/kernels.py 1234 --check   # and run it in every way there is here

`check` compares the ways: the NumPy model (model.py), the interpreter under several schedules,
NVRTC's verdict on the generated program, the generated program on the emulated machine and on a
GPU. `shrink` makes a failing program small: it deletes statements, puts parts in the place of
their wholes, and lowers numbers, as long as the model accepts the program and it fails alike."""

import copy
import os
import re
import sys
import warnings

import ml_dtypes
import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fuzz import hopper_model, model
else:
    from . import hopper_model, model

bf16 = np.dtype(ml_dtypes.bfloat16)
EIGHTS = [np.dtype(getattr(ml_dtypes, n)) for n in ("float8_e4m3fn", "float8_e5m2")]


class Node:
    """`text` with `{}` for each of `parts`."""

    __slots__ = ("text", "parts", "keep")

    def __init__(self, text, *parts, keep=False):
        self.text, self.parts, self.keep = text, list(parts), keep
        assert text.count("{}") == len(parts), (text, parts)

    def __repr__(self):
        return render(self)


class Block:
    """Statements of one indentation."""

    __slots__ = ("statements",)

    def __init__(self, statements=()):
        self.statements = list(statements)


def render(x, indent=0):
    if isinstance(x, Block):
        pad = "    " * indent
        lines = [pad + render(s, indent) for s in x.statements] or [pad + "pass"]
        return "\n".join(lines)
    if not isinstance(x, Node):
        return repr(x) if isinstance(x, float) else str(x)
    out, pieces = [], x.text.replace("\n", "\n" + "    " * indent).split("{}")
    for piece, part in zip(pieces, [*x.parts, None]):
        out.append(piece)
        if part is None:
            break
        if isinstance(part, Block):
            # a block stands on lines of its own: drop the pad that the template put before it
            out[-1] = out[-1].rstrip(" ")
            out.append(render(part, indent + 1))
        else:
            out.append(render(part, indent))
    return "".join(out)


class Program:
    """A kernel with its data."""

    def __init__(self, seed):
        self.seed = seed
        self.operands = []  # (name, shape, dtype, kind of data)
        self.outputs = []  # (name, shape, dtype)
        self.scratch = []  # (name, Node)
        self.options = {}  # grid, grid_names, ...
        self.body = Block()
        self.features = set()

    def source(self):
        """The kernel as Python; `load` reads it back."""
        names = [n for n, *_ in self.operands] + [n for n, *_ in self.outputs]
        names += [n for n, _ in self.scratch]
        options = [
            f"{k}={render(v) if isinstance(v, Node) else repr(v)}" for k, v in self.options.items()
        ]
        if self.scratch:
            options.append("scratch_types=[" + ", ".join(render(t) for _, t in self.scratch) + "]")
        lines = [
            f"SEED = {self.seed}",
            "OPERANDS = [  # name, shape, dtype, kind of data",
            *(f"    {o!r}," for o in self.operands),
            "]",
            "OUTPUTS = [",
            *(f"    {o!r}," for o in self.outputs),
            "]",
            "",
            "",
            "def make(plgpu, pl, lax, jnp):",
            f"    def body({', '.join(names)}):",
            render(self.body, 2),
            "",
            f"    return body, dict({', '.join(options)})",
        ]
        return "\n".join(lines) + "\n"


class _Interpreted:
    """The names of the package, with what CUDA source says in place of it."""

    def __init__(self, package, where):
        self.package, self.where = package, where

    def __getattr__(self, name):
        return getattr(self.package, name)

    def inline_cuda(self, source, **types):
        return hopper_model.described(source, self.where)


class Case:
    """A kernel ready to run: what a printed source defines."""

    def __init__(self, source, name="kernel"):
        self.source, self.name = source, name
        scope = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the shrinker tries
            exec(compile(source, f"<{name}>", "exec"), scope)
        self.make, self.seed = scope["make"], scope["SEED"]
        self.outputs = [(tuple(s), model.as_dtype(d)) for _, s, d in scope["OUTPUTS"]]
        self.operands = [
            data(self.seed, k, tuple(s), model.as_dtype(d), kind)
            for k, (_, s, d, kind) in enumerate(scope["OPERANDS"])
        ]

    def expected(self):
        return model.run(self.make, self.operands, self.outputs)

    def kernel(self, **options):
        import pallas_mgpu as plgpu
        from pallas_mgpu import lax, pl
        from pallas_mgpu import numpy as jnp

        names = _Interpreted(plgpu, jnp.where) if "interpret" in options else plgpu
        body, own = self.make(names, pl, lax, jnp)
        outs = tuple(plgpu.ShapeDtypeStruct(s, d) for s, d in self.outputs)
        return plgpu.kernel(body, out_type=outs, kernel_name="fuzz", **own, **options)


def data(seed, k, shape, dtype, kind):
    """Operand k. Kinds: wild (any bits), norm (ordinary floats), small (integers that add up
    exactly), unit (0.01 to 1.5), or (low, high): integers between."""
    rng = np.random.default_rng([seed & 0x7FFFFFFF, k])
    if isinstance(kind, tuple):
        return rng.integers(kind[0], kind[1], shape, endpoint=True).astype(dtype)
    if dtype == bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if kind == "small":
            return rng.integers(0 if dtype.kind == "u" else -7, 8, shape).astype(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    if kind == "small":
        return rng.integers(-8, 9, shape).astype(np.float32).astype(dtype)
    if kind == "unit":
        return rng.uniform(0.0625, 1.5, shape).astype(np.float32).astype(dtype)
    if kind == "norm":
        return rng.uniform(-6, 6, shape).astype(np.float32).astype(dtype)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, dtype=np.uint64)
    wild = bits.astype(f"u{dtype.itemsize}").view(dtype)
    tame = rng.uniform(-6, 6, shape).astype(np.float32).astype(dtype)
    special = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -2.5], np.float32)
    odd = special[rng.integers(0, len(special), shape)].astype(dtype)
    pick = rng.integers(0, 4, shape)
    return np.where(pick == 0, wild, np.where(pick == 1, odd, tame)).astype(dtype)


# ---- running -------------------------------------------------------------------------------------


class Failure(Exception):
    """A way that does not agree. `kind` is what a smaller program must show too."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind, self.ran = kind, []


# what the language says that it does not do; a kernel that meets one is left out
GAPS = re.compile(
    r"more than \d+ (dynamic starts|slices)"
    r"|too many dynamic parts"
    r"|slice the ref instead"
    r"|which exceeds available shared memory"
    r"|not emulated"  # by the CPU that runs the CUDA program
)


def difference(got, want, on_gpu=False):
    """None, or how a result differs from what the model expects."""
    if got.shape != want.value.shape or got.dtype != want.value.dtype:
        return f"{got.dtype}{got.shape} instead of {want.value.dtype}{want.value.shape}"
    if on_gpu and want.fused:
        return None
    g, w = got[want.mask], want.value[want.mask]
    if not g.size:
        return None
    if model.is_float(g.dtype) or g.dtype in EIGHTS:
        same = g.view(f"u{g.dtype.itemsize}") == w.view(f"u{g.dtype.itemsize}")
        with np.errstate(invalid="ignore"):  # signalling NaN
            a, b = g.astype(np.float64), w.astype(np.float64)
        same |= np.isnan(a) & np.isnan(b)
        if want.tol is not None:
            rtol, atol = want.tol
            with np.errstate(invalid="ignore"):
                same |= np.abs(a - b) <= rtol * np.abs(b) + atol
                same |= a == b
    else:
        same = g == w
    if same.all():
        return None
    at = np.argwhere(want.mask)[np.argmin(same)]
    k = tuple(int(i) for i in at)
    return (
        f"{int((~same).sum())} of {same.size} elements differ, the first at {k}:"
        f" {got[k]!r} instead of {want.value[k]!r}"
    )


def _compare(way, got, expected, on_gpu=False):
    got = got if isinstance(got, (tuple, list)) else (got,)
    for k, (g, w) in enumerate(zip(got, expected)):
        text = difference(np.asarray(g), w, on_gpu)
        if text:
            raise Failure(f"{way}: wrong result", f"output {k}: {text}")


def _attempt(way, f):
    """f(), with what it raises as a Failure; None where the language has a gap."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f()
    except Exception as e:
        text = str(e)
        if isinstance(e, (RuntimeError, ValueError)) and GAPS.search(text):
            return None
        where = re.sub(r"0x[0-9a-f]+|\d+", "#", text.split("\n")[0])
        raise Failure(f"{way}: {type(e).__name__}: {where[:90]}", text) from e


MANY_REGISTERS = 48  # of one array, of the 256 of a lane: a kernel that has such a one may spill


COPIES = {  # of an element, over the lanes
    "wgmma.reduce(0)": 32,
    "wgmma.reduce(1)": 4,
    "wgmma_transposed.reduce(0)": 16,
    "wgmma_transposed.reduce(1)": 8,
    "tma_indices": 32,
    "tma_indices_4": 128,
}


def most_registers(graph):
    """Registers per lane of the widest array of a lowered graph, by its text."""
    most = 0
    for shape, layout in re.findall(r": \w+\[([\d,]*)\] @(\S+)", graph):
        dims = [int(d) for d in shape.split(",") if d]
        if layout.startswith(("wgmma", "mma")) and "reduce" not in layout:
            columns = 8 if layout.startswith("wgmma") and "x" not in layout else 32
            dims[-2:] = -(-dims[-2] // 64) * 64, -(-dims[-1] // columns) * columns
        size = int(np.prod(dims))
        digits = re.match(r"(?:tiled|flat)\([^;]*;[^;]*;[^;]*;([^)]*)\)", layout)
        if digits:
            n = int(np.prod([int(d.split(":")[1]) for d in digits[1].split(",") if d]))
        else:
            copies = COPIES.get(layout, 4 if layout.startswith("mma_rhs") else 1)
            n = 0 if layout == "splat" else -(-size * copies // 128)
        most = max(most, n)
    return most


WAYS = ("interpret", "nvrtc", "host", "cuda")
SEEDS = (0, 1, 7)


def check(case, expected=None, ways=("interpret", "nvrtc"), seeds=SEEDS, **params):
    """Run a case; `params` are fields of InterpretParams. Raises Failure; returns the ways that ran
    (fewer where there is a gap)."""
    ran = []
    try:
        for _ in _ways(
            case, case.expected() if expected is None else expected, ways, seeds, ran, params
        ):
            pass
    except Failure as e:
        e.ran = ran
        raise
    return ran


def _round_trip(lowered):
    """The text form of the graph reads back as it was, traced and lowered."""
    from pallas_mgpu import _core

    for stage in ("traced", "graph"):
        text = lowered.as_text(stage)
        again = _attempt("text", lambda t=text: _core.Graph.parse(t).text())
        if again != text:
            raise Failure("text: a graph does not read back", text)


def _ways(case, expected, ways, seeds, ran, params):
    """Runs one way after the other, and yields in between; ends where there is a gap."""
    import pallas_mgpu as plgpu
    from pallas_mgpu import pl

    if "interpret" in ways:
        for seed in seeds:
            kernel = case.kernel(interpret=plgpu.InterpretParams(seed=seed, **params))
            with pl.enable_debug_checks(seed == seeds[-1]):
                got = _attempt("interpret", lambda k=kernel: k(*case.operands))
            if got is None:
                return
            _compare("interpret", got, expected)
        yield ran.append("interpret")
    lowered = None
    if {"nvrtc", "host"} & set(ways):
        lowered = _attempt("lower", lambda: case.kernel().lower(*case.operands))
        if lowered is None:
            return
        _round_trip(lowered)
    if "host" in ways:
        from pallas_mgpu.machine import run as host

        for seed in seeds[:2]:
            outs = [np.zeros(s, d) for s, d in case.outputs]

            def run(seed=seed, outs=outs):
                host.run(lowered, case.operands, outs, seed=seed)
                return outs

            got = _attempt("host", run)
            if got is None:
                return
            _compare("host", got, expected)
        yield ran.append("host")
    if "nvrtc" in ways:
        used = _attempt("nvrtc", lowered.resources)
        many = MANY_REGISTERS * min(256, 65536 // used["threads"]) // 256
        if used["spill_bytes"] and most_registers(lowered.as_text("graph")) <= many:
            raise Failure("nvrtc: spills", f"{used['spill_bytes']} bytes")
        if used["remarks"]:
            raise Failure(f"nvrtc: {used['remarks']}", used["log"])
        yield ran.append("nvrtc")
    if "cuda" in ways:
        args = [plgpu.device_put(x) for x in case.operands]
        got = _attempt("cuda", lambda: case.kernel()(*args))
        if got is None:
            return
        got = [np.asarray(x) for x in (got if isinstance(got, (tuple, list)) else (got,))]
        _compare("cuda", got, expected, on_gpu=True)
        yield ran.append("cuda")


# ---- shrinking -----------------------------------------------------------------------------------


def _failure(program, ways, seeds):
    """The kind of failure of a program, None if it does not fail, False if it is none."""
    try:
        case = Case(program.source())
        expected = case.expected()
    except model.Invalid:
        return False
    except Exception:
        return False
    if not any(e.mask.any() for e in expected):
        return False
    try:
        check(case, expected, ways, seeds)
    except Failure as e:
        return e.kind
    return None


def _blocks(x, out):
    """All blocks below x, outer ones first."""
    if isinstance(x, Block):
        out.append(x)
        for s in x.statements:
            _blocks(s, out)
    elif isinstance(x, Node):
        for p in x.parts:
            _blocks(p, out)
    return out


def _nodes(x, out):
    """(owner list, position) of all parts and statements below x."""
    items = x.statements if isinstance(x, Block) else x.parts if isinstance(x, Node) else []
    for k, item in enumerate(items):
        out.append((items, k))
        _nodes(item, out)
    return out


class _Shrinker:
    def __init__(self, program, ways, seeds, budget):
        self.best, self.ways, self.seeds, self.budget = program, ways, seeds, budget
        self.kind = _failure(program, ways, seeds)

    def accept(self, candidate):
        if self.budget <= 0:
            return False
        self.budget -= 1
        if _failure(candidate, self.ways, self.seeds) == self.kind:
            self.best = candidate
            return True
        return False

    def change(self, f):
        """Try f(copy); f returns False where there is nothing to do."""
        candidate = copy.deepcopy(self.best)
        return f(candidate) is not False and self.accept(candidate)

    def delete_statements(self):
        progress = False
        n = len(_blocks(self.best.body, []))
        for b in range(n):
            size = 8
            while size:
                k = 0
                while True:
                    blocks = _blocks(self.best.body, [])
                    if b >= len(blocks) or k >= len(blocks[b].statements):
                        break

                    def cut(p, b=b, k=k, size=size):
                        s = _blocks(p.body, [])[b].statements
                        if any(isinstance(x, Node) and x.keep for x in s[k : k + size]):
                            return False
                        del s[k : k + size]

                    if self.change(cut):
                        progress = True
                    else:
                        k += size
                size //= 2
        return progress

    def replace_parts(self):
        """Put a part in the place of its whole, a block in the place of its statement."""
        progress, at = False, 0
        while True:
            sites = _nodes(self.best.body, [])
            if at >= len(sites):
                return progress
            owner, k = sites[at]
            node = owner[k]
            if isinstance(node, Node) and not node.keep:
                for part in range(len(node.parts)):

                    def lift(p, at=at, part=part):
                        items, i = _nodes(p.body, [])[at]
                        inner = items[i].parts[part]
                        if isinstance(inner, Block):
                            items[i : i + 1] = inner.statements
                        elif isinstance(inner, (Node, str)):
                            items[i] = inner

                    if self.change(lift):
                        progress = True
                        break
            at += 1

    def lower_numbers(self):
        progress, at = False, 0
        while True:
            sites = _nodes(self.best.body, [])
            if at >= len(sites):
                return progress
            owner, k = sites[at]
            x = owner[k]
            if isinstance(x, int) and not isinstance(x, bool):
                for smaller in sorted({0, 1, x // 2, x - 1}, key=abs):
                    if abs(smaller) < abs(x):

                        def put(p, at=at, value=smaller):
                            items, i = _nodes(p.body, [])[at]
                            items[i] = value

                        if self.change(put):
                            progress = True
                            break
            at += 1

    def drop_parameters(self):
        progress = False
        for what in ("outputs", "operands", "scratch"):
            k = 0
            while k < len(getattr(self.best, what)):
                name = getattr(self.best, what)[k][0]
                used = re.search(rf"\b{name}\b", render(self.best.body))

                def drop(p, what=what, k=k):
                    del getattr(p, what)[k]

                if not used and len(self.best.outputs) > (what == "outputs") and self.change(drop):
                    progress = True
                else:
                    k += 1
        for key in list(self.best.options):

            def simpler(p, key=key):
                value = p.options[key]
                if key == "compiler_params":
                    del p.options[key]
                elif key in ("grid", "cluster") and any(n > 1 for n in value):
                    p.options[key] = tuple(1 for _ in value)
                else:
                    return False

            progress |= self.change(simpler)
        return progress


def shrink(program, ways=("interpret", "nvrtc"), seeds=SEEDS, budget=2000):
    """A smaller program that fails in the same way."""
    s = _Shrinker(program, ways, seeds, budget)
    if not s.kind:
        return program
    progress = True
    while progress and s.budget > 0:
        progress = s.delete_statements()
        progress |= s.replace_parts()
        progress |= s.lower_numbers()
        progress |= s.drop_parameters()
    return s.best


# ---- by hand -------------------------------------------------------------------------------------


def generate(seed):
    """The program of a seed."""
    from fuzz import generate as g

    return g.generate(seed)


def main(argv):
    import argparse

    from fuzz import generate as g

    parser = argparse.ArgumentParser(description="One random kernel.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--check", action="store_true", help="run it in every way")
    parser.add_argument("--ways", default="interpret,nvrtc")
    parser.add_argument("--shrink", action="store_true", help="and make it small if it fails")
    options = parser.parse_args(argv)
    ways = tuple(options.ways.split(","))
    program = g.generate(options.seed)
    print(program.source())
    if options.check or options.shrink:
        try:
            print("ran:", check(Case(program.source()), ways=ways))
        except Failure as e:
            print(e)
            if options.shrink:
                print(shrink(program, ways).source())


if __name__ == "__main__":
    from fuzz import kernels  # the same module as everybody else's

    kernels.main(sys.argv[1:])
