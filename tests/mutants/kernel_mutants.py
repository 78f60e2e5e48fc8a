"""Do the checkers notice a broken kernel? Breaks kernels on purpose, one synchronisation at a time.

`python tests/mutants/kernel_mutants.py [--only TEXT ...] [--jobs N] [--list]`

The kernels are those of `pallas_mgpu.ops`, called with small arrays and configurations that go
through every ring more than once, those of `ops.distributed` on a mesh, and the examples. A mutant
is the graph of a call, as traced, in which one op is changed that a run of the kernel comes to:

    drop       a wait, an arrival, a commit, a fence or a section's end is left out
    weaken     a wait leaves one operation more in flight, or waits for the source alone, or for the
               phase before; a barrier completes with one arrival less; a cluster barrier is one of
               the block, or has one axis
    move       a wait comes after what it should protect, an arrival or a commit before it

of each line of Python in each way the first one. Mutants of generated code change the graph as
lowered: the fences that passes/sync.c placed are left out, arrivals are relaxed. These are for the
emulated machine alone, and those of wait_load_tmem for the interpreter alone.

Both judges run a mutant under five seeds: the interpreter with the race detector and
detect_uninitialized, and the emulated machine. A mutant is caught if a judge refuses it or if a
result has other bits than that of the kernel as it is. It is equivalent if neither catches it and
EQUIVALENT has a reason. Prints a table, and what is caught by one judge alone or by none without a
reason. Below 98 % of either judge it fails. test_kernel_mutants.py runs a sample."""

import argparse
import contextlib
import dataclasses
import io
import linecache
import multiprocessing
import re
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _kernel, ops
from pallas_mgpu.ops import _attention_backward_fused
from pallas_mgpu.ops._attention_scores import Problem

ROOT = Path(plgpu.__file__).parent.parent
EXAMPLES = ROOT / "examples"
SEEDS = range(5)

# ---- kernels -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Kernel:
    name: str
    text: str  # of the traced graph
    arrays: list  # of the first device
    others: tuple = ()  # those of the other devices


def array(*shape, dtype=np.float16, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-8, 9, shape).astype(np.float32).astype(dtype)


BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
F16, F32 = np.float16, np.float32


def of_ops():
    """Calls of ops: (name, function, arrays, options)"""
    M, X, R, A, N, F = (
        ops.MatmulConfig, ops.MixedConfig, ops.RaggedConfig, ops.AttentionConfig, ops.NormConfig,
        ops.FewRowsConfig,
    )  # fmt: skip
    a, b = array(96, 256), array(256, 96)
    e = array(64, 512), array(512, 64)
    yield "matmul", ops.matmul, (a, b), dict(config=M(2, 32, 2, 1, 1, 1))
    yield "matmul, lag 0", ops.matmul, (a, b), dict(config=M(1, 32, 2, 2, 2, 1, lag=0))
    yield (
        "matmul, cluster", ops.matmul, (array(256, 192), array(192, 64)),
        dict(config=M(1, 32, 2, 2, 1, 1, 2)),
    )  # fmt: skip
    split = dict(names=("bias",), config=M(1, 32, 2, 1, 1, 1, 1, 2))
    yield "matmul, split", ops.matmul, (*e, array(64, seed=3)), split
    eights = array(64, 512, dtype=F8), array(192, 512, dtype=F8)
    scales = np.full((64, 4), 0.5, F32), np.full((2, 4), 2, F32)
    by_blocks = dict(names=("scale_a", "scale_b"), transpose_b=True)
    by_blocks["config"] = M(1, 64, 2, 1, step=128)
    yield "matmul, block scales", ops.matmul, (*eights, *scales), by_blocks
    by_columns = dict(names=("scale_b",), transpose_b=True, config=M(1, 64, 2, 1, step=128))
    yield "matmul, column scales", ops.matmul, (*eights, np.ones(192, F32)), by_columns
    one = array(1, 256), array(256, 128)
    yield "matmul, one row", ops.matmul, one, dict(config=F(64, 2, 2, 32))
    x, w = array(64, 512), array(160, 512, dtype=np.int8)
    yield "mixed", ops.mixed_matmul, (x, w), dict(config=X(2, 32, 1, 2, 64, 1))
    groups = np.ones((2, 160), F32)
    yield "mixed, split", ops.mixed_matmul, (x, w, groups), dict(config=X(2, 16, 2, 2, 64, 1))
    yield "mixed, turns", ops.mixed_matmul, (x, w), dict(config=X(1, 16, 1, 2, 64, 1, 2))
    four = np.ones((4, 160), F32)
    in_place = X(1, 208, 1, 3, 64, 1)
    yield "mixed, in place", ops.mixed_matmul, (x, w, four), dict(config=in_place)
    sizes = np.array([40, 0, 150, 60, 17], np.int32)
    lhs, rhs = array(270, 256), array(5, 256, 192)
    yield "ragged", ops.ragged_dot, (lhs, rhs, sizes), dict(config=R(1, 64, 2, 1, 1, 1))
    few = array(270, 64), array(5, 64, 192)
    yield "ragged, one step", ops.ragged_dot, (*few, sizes), dict(config=R(1, 64, 2, 1, 1, 1))
    shared = dict(config=R(2, 64, 2, 2, 2, 1))
    yield "ragged, cluster", ops.ragged_dot, (lhs, rhs, sizes), shared
    of_groups = array(270, 128), array(270, 192, seed=1), sizes
    transposed = dict(config=R(1, 64, 2, 1, 1, 1))
    yield "ragged, transposed", ops.transposed_ragged_dot, of_groups, transposed
    row, rows = array(30, 8192, dtype=BF16), array(6, 2048, dtype=BF16)
    ring = dict(config=N(ring=2048, consumers=2, programs=1))
    yield "softmax, ring", ops.softmax, (row,), ring
    yield "softmax, cluster", ops.softmax, (rows,), dict(config=N(1, 2, 0, False))
    vectors, staged = (array(2048), array(2048)), dict(config=N(2, 1, 0, True))
    yield "layer norm, staged", ops.layer_norm, (rows, *vectors), staged
    q = array(1, 200, 2, 64), array(1, 190, 1, 64), array(1, 190, 1, 64, seed=1)
    yield "attention", ops.attention, q, dict(config=A(1, 32, 2))
    few = array(1, 200, 4, 64), array(1, 30, 1, 64), array(1, 30, 1, 64, seed=1)
    one = dict(causal=True, config=A(1, 32, 2, False, False, True))
    yield "attention, one block", ops.attention, few, one
    yield (
        "attention, causal",
        ops.attention,
        q,
        dict(causal=True, config=A(2, 32, 2, True, True, True)),
    )


def of_training():
    """Calls of ops that are made of several kernels, or have no configuration: (name, function)"""
    q, k = array(1, 270, 2, 128), array(1, 300, 1, 128)
    o, lse = np.zeros_like(q), np.ones((1, 2, 270), F32)
    x, w = array(70, 256), array(256)
    gate = array(70, 520)
    logits, targets = array(5, 8200, dtype=BF16), np.array([7, 8199, -100, 0, 3], np.int32)
    angles = array(7, 32, dtype=F32)
    many = [array(70, 264, dtype=F32) for _ in range(4)]
    settings = np.array([0.1, 0.9, 0.99, 1e-8, 0.1, 0.5], F32)
    i = dict(interpret=True)
    yield (
        "attention backward",
        lambda: ops.attention_backward(q, q, k, k, o, lse, causal=True, deterministic=True, **i),
    )
    small = array(1, 400, 1, 64)
    problem = Problem(1, 400, 1, 64, 400, 1, np.dtype(F16), False, 0.125)
    five = ops.AttentionBackwardConfig(5)
    rows, sums = np.ones((1, 1, 512), F32), np.zeros((1, 1, 512, 64), F32)
    yield (
        "attention backward, five products",
        lambda: _attention_backward_fused.kernel(problem, five, True, functional=True, sms=2)(
            *[small] * 4, rows, rows, sums
        ),
    )
    yield "cross entropy", lambda: ops.cross_entropy(logits, targets, **i)
    yield (
        "cross entropy backward",
        lambda: ops.cross_entropy_backward(np.ones(5, F32), logits, targets, np.ones(5, F32), **i),
    )
    yield "rms norm backward", lambda: ops.rms_norm_backward(x, x, w, **i)
    yield "softmax backward", lambda: ops.softmax_backward(x, x, **i)
    yield "column sums", lambda: ops.column_sums(np.tile(x, (40, 1)), **i)
    yield "gated", lambda: ops.gated_linear_unit(gate, gate, **i)
    yield "gated backward", lambda: ops.gated_linear_unit_backward(gate, gate, gate, **i)
    beside = array(300, 128), array(300, 256), array(72, 256)
    config = ops.GatedBackwardConfig(ops.MatmulConfig(2, 128, stages=2, group=1))
    yield (
        "gated backward, beside the product",
        lambda: ops.gated_matmul_backward(*beside, config=config, **i),
    )
    yield "rotary", lambda: ops.rotary(array(1, 7, 4, 64), angles, angles, **i)
    yield "quantize", lambda: ops.quantize(x, block=64, **i)
    yield "adamw", lambda: ops.adamw(*many, settings, **i)


def of_blackwell():
    """Products by tcgen05: (name, function, arrays, options)"""
    C = ops.TensorMemoryConfig
    yield "tcgen05", ops.matmul, (array(392, 264), array(264, 72)), dict(config=C(64, False, 2))
    pairs = array(264, 200), array(200, 136)
    yield "tcgen05, pairs", ops.matmul, pairs, dict(config=C(128, stages=2, dynamic=False))
    q, k, v = (array(1, n, 1, 64, seed=k) / 8 for k, n in enumerate((130, 520, 520)))
    k = (k * np.linspace(0.2, 20, 520)[:, None, None]).astype(F16)  # maxima that grow
    scores = dict(config=ops.TensorMemoryAttentionConfig(2))
    yield "tcgen05, attention", ops.attention, (q, k, v), scores
    x, w = array(70, 512), array(200, 512, dtype=np.int8)
    ring = dict(config=ops.TensorMemoryMixedConfig(32, 3, 64))
    yield "tcgen05, mixed", ops.mixed_matmul, (x, w, np.ones((4, 200), F32)), ring


def on_meshes():
    """Collectives: (name, arrays of all devices by operand, options)"""
    n = 3

    def each(*shape, dtype=F32):
        return [array(*shape, dtype=dtype, seed=d) for d in range(n)]

    yield "all_gather", (each(2, 40),), {}
    yield "reduce_scatter", (each(3, 40),), {}
    yield "all_reduce", (each(3, 50),), dict(one_shot=False)
    yield "all_reduce", (each(3, 50),), dict(one_shot=True)
    yield "all_to_all", (each(6, 40),), {}
    a, b = each(128, 320, dtype=F16), each(320, 256, dtype=F16)
    # a tile has all rows of a device: it reads the last piece of a cell as soon as that is there
    push = {"transfer": "push"}
    yield "all_gather_matmul", (each(64, 320, dtype=F16), b), push
    yield "matmul_reduce_scatter", (each(384, 320, dtype=F16), b), push
    # a block sends more tiles than wait at a time
    yield "matmul_all_reduce", (a, each(320, 512, dtype=F16)), {}
    yield "all_reduce_rms_norm", (each(3, 40), each(3, 40), each(40)), dict(one_shot=False)
    sizes = [np.array(s, np.int32) for s in ([1, 3, 0], [2, 0, 2], [0, 1, 3])]
    # seven pieces a worker and more, so that the ring goes round
    yield "ragged_all_to_all", (each(4, 7500), sizes), dict(capacity=5)


def kernels():
    """All kernels."""
    yield from of_configured(of_ops(), None)
    yield from of_configured(of_blackwell(), "sm_100a")
    yield from of_collectives()
    for name, call in of_training():
        for k, (text, arrays) in enumerate(recorded(call)):
            yield Kernel(f"{name}.{k}", text, arrays)
    for path in sorted(EXAMPLES.glob("*.py")):
        if "plgpu.spmd" in path.read_text():
            continue  # the collectives are above
        for k, (text, arrays) in enumerate(calls_of(path)):
            yield Kernel(f"{path.stem}.{k}", text, arrays)


def of_configured(calls, target):
    """Kernels of functions of ops with configurations."""
    for name, f, arrays, options in calls:
        names = options.pop("names", ())
        given = dict(zip(names, arrays[len(arrays) - len(names) :]))
        positional = arrays[: len(arrays) - len(names)]
        real, plgpu.sm_count = plgpu.sm_count, lambda device=None: 2
        try:
            made = f.kernel(*positional, **given, **options, interpret=True)
        finally:
            plgpu.sm_count = real
        pads = getattr(made, "pads", None) or [getattr(made, "pad", None)]
        assert not any(pads), name
        kernel = getattr(made, "product", made)
        text = kernel.lower(*arrays, target=target).as_text("traced")
        yield Kernel(name, text, [np.array(x) for x in arrays])


def of_collectives():
    """The calls of on_meshes; a collective's own kernel is made by plgpu.spmd. Copies go piece by
    piece, of 1 KiB, which takes less time here."""
    from pallas_mgpu.ops import _bulk, distributed

    piece, _bulk.PIECE = _bulk.PIECE, 1024
    for name, arrays, options in on_meshes():
        mesh, found = plgpu.DeviceMesh(len(arrays[0]), "x"), []
        real, distributed.Collective.__call__ = (
            distributed.Collective.__call__,
            lambda self, *given, out=None, found=found: found.append((self, given)),
        )
        try:
            with contextlib.suppress(TypeError):  # there is no result
                function(name)(*arrays, mesh, blocks=1, interpret=True, **options)
        finally:
            distributed.Collective.__call__ = real
        collective, given = found[0]
        text = collective.lower(*(x[0] for x in given)).as_text("traced")
        rows = [[np.array(x[d]) for x in given] for d in range(mesh.size)]
        way = "".join(f", {k} {v}" for k, v in options.items() if k == "one_shot")
        yield Kernel(f"{name}{way}", text, rows[0], tuple(rows[1:]))
    _bulk.PIECE = piece


def function(name):
    """Of one of the modules of collectives."""
    from pallas_mgpu.ops import (
        distributed,
        distributed_matmul,
        distributed_norms,
        distributed_ragged,
    )

    modules = distributed, distributed_matmul, distributed_norms, distributed_ragged
    return next(getattr(m, name) for m in modules if hasattr(m, name))


def calls_of(path):
    """The traced graphs of an example's calls, each once, with their arrays."""
    given, sys.argv = sys.argv, [str(path)]
    try:
        return recorded(lambda: runpy.run_path(str(path), run_name="__main__"))
    finally:
        sys.argv = given


class Recorded:
    """A kernel whose calls are noted."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def __call__(self, *arrays, **options):
        with contextlib.suppress(Exception):
            text = self.kernel.lower(*arrays).as_text("traced")
            if any(word in text for word in ("barrier", "smem", "griddepcontrol_wait")):
                self.found.setdefault(text, [np.array(x) for x in arrays])
        return self.kernel(*arrays, **options)


def recorded(run):
    """The same of the calls that a function makes."""
    found, made = {}, _kernel.Definition.make

    def make(self, *args, **kwargs):
        return Recorded(made(self, *args, **kwargs), found)

    _kernel.Definition.make = make
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    finally:
        _kernel.Definition.make = made
    return found.items()


# ---- mutants -------------------------------------------------------------------------------------


class Op:
    """A line of a graph, with the ops of its regions."""

    def __init__(self, head, place):
        self.head, self.place, self.regions = head, place, []
        m = re.match(r"((?:%\S+, )*%\S+ = )?(\w+)", head)
        self.results = re.findall(r"%[\w\"]+", m[1] or "")
        self.name = m[2]
        self.operands = re.findall(r"%[\w\"]+", head[m.end() :].partition("{")[0])
        n = re.search(r"\bn = (-?\d+)", head)
        self.n = int(n[1]) if n else None

    def lines(self, indent):
        pad, place = "  " * indent, f"  // {self.place}" if self.place else ""
        if not self.regions:
            return [f"{pad}{self.head}{place}"]
        out = [f"{pad}{self.head} {{{place}"]
        for k, (args, body) in enumerate(self.regions):
            out += [f"{pad}}} {{"] if k else []
            out += [f"{pad}  {args}"] if args else []
            for op in body:
                out += op.lines(indent + 1)
        return [*out, f"{pad}}}"]

    def inside(self):
        yield self
        for _, body in self.regions:
            for op in body:
                yield from op.inside()

    @property
    def uses(self):
        return {v for op in self.inside() for v in op.operands}


def parse(text):
    """(head, ops) of the text of a graph."""
    first, *lines = text.splitlines()
    stack = [[None, []]]
    while lines[0].startswith("  warning"):
        first += f"\n{lines.pop(0)}"
    for line in lines[:-1]:
        body, _, place = line.strip().partition("  // ")
        if body.startswith("args "):
            stack[-1][0] = body
        elif body == "}":
            stack.pop()
        elif body == "} {":
            stack.pop()
            region = [None, []]
            stack[-1][1][-1].regions.append(region)
            stack.append(region)
        elif body.endswith("{"):
            op = Op(body[:-2], place)
            stack[-1][1].append(op)
            op.regions.append([None, []])
            stack.append(op.regions[0])
        elif body:
            stack[-1][1].append(Op(body, place))
    args, body = stack[0]
    return first, args, body


def show(graph):
    first, args, body = graph
    lines = [line for op in body for line in op.lines(1)]
    return "\n".join([first, f"  {args}", *lines, "}", ""])


WAITS = {"barrier_wait", "wgmma_wait", "wait_smem_to_gmem", "semaphore_wait", "griddepcontrol_wait"}
WAITS |= {"enter_section", "named_barrier_sync", "wait_load_tmem"}
ARRIVALS = {"barrier_arrive", "semaphore_signal", "leave_section", "named_barrier_arrive"}
ARRIVALS |= {"tcgen05_commit_arrive"}
COMMITS = {"commit_smem", "commit_smem_to_gmem_group", "commit_tmem"}
TENSOR = {"tcgen05_mma", "tcgen05_copy", "async_load_tmem", "async_store_tmem"}
NEAR = COMMITS | {"wait_smem_to_gmem"}
SITES = WAITS | ARRIVALS | COMMITS | {"acc_load", "alloc_barrier"}
MEMORY = {"load", "store", "masked_load", "masked_store", "atomic", "async_store_smem", "acc_load"}
MEMORY |= TENSOR | {"copy_gmem_to_smem", "copy_smem_to_gmem", "wgmma"}
MEMORY |= {"inline_cuda", "broadcast_tile"}
EFFECTS = SITES | MEMORY | {"set_max_registers", "next_tile", "fetch_tile", "shuffle_tile", "yield"}
EFFECTS |= {
    "sync",
    "proxy_fence",
    "griddepcontrol_launch_dependents",
    "debug_print",
    "named_scope",
    "barrier_test",
}


class Body:
    """The ops of a kernel, which of them a run comes to, and what they touch."""

    def __init__(self, kernel):
        self.head, self.args, self.ops = parse(kernel.text)
        self.space = dict(re.findall(r"(%\S+): (gmem|smem|acc|barrier)", self.args))
        self.all = [x for op in self.ops for x in op.inside()]
        for op in self.all:
            for k, type in enumerate(re.findall(r"(?:: |, )(gmem|smem|acc|barrier)\b", op.head)):
                self.space.setdefault(op.results[k] if k < len(op.results) else None, type)
        self.reached = self.come(kernel)

    def text(self):
        lines = [line for op in self.ops for line in op.lines(1)]
        return "\n".join([self.head, f"  {self.args}", *lines, "}", ""])

    def come(self, kernel):
        """The ops, by id(), that a run of the kernel comes to: each prints its number."""
        marked = []

        def mark(ops):
            for op in list(ops):
                if op.name in EFFECTS - {"yield"}:
                    at = ops.index(op) + op.name.startswith("alloc")
                    text = f'debug_print {{format = "site {len(marked)}"}}'
                    ops.insert(at, Op(text, op.place))
                    marked.append(op)
                for _, inner in op.regions:
                    mark(inner)

        mark(self.ops)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            lowered(self.text()).interpret(host_arrays(kernel))
        _, _, self.ops = parse(kernel.text)
        again = [x for op in self.ops for x in op.inside() if x.name in EFFECTS - {"yield"}]
        seen = {int(k) for k in re.findall(r"site (\d+)", out.getvalue())}
        return {id(op) for k, op in enumerate(again) if k in seen}

    def does(self, op):
        """What it does when it is run besides arithmetic, also in its regions."""
        found = set()
        for x in op.inside():
            if id(x) not in self.reached:
                continue
            kinds = {"wait": WAITS, "arrive": ARRIVALS, "commit": COMMITS}
            found |= {k for k, names in kinds.items() if x.name in names}
            if x.name in {"wgmma", "acc_load"} | TENSOR:
                found |= {"acc", "smem"}
            elif x.name in MEMORY:
                found |= {self.space.get(v) for v in x.operands} & {"smem", "gmem"}
            elif x.name in EFFECTS - SITES:
                found.add("other")
        return found

    def is_fixed(self, op):
        return any(x.name in EFFECTS for x in op.inside() if x.name != "yield" or x is op)


def without(body, k):
    return body[:k] + body[k + 1 :]


def changed(body, k, head):
    op = Op(head, body[k].place)
    op.regions = body[k].regions
    return [*body[:k], op, *body[k + 1 :]]


def later(b, ops, k, space):
    """The op at k after those of its region that touch that space, as far as its results let it go:
    a wait for copies and a commit after the first, others after all. None: there are none."""
    last, near = None, ops[k].name in NEAR
    for j in range(k + 1, len(ops)):
        if set(ops[k].results) & ops[j].uses or ops[j].name == "yield":
            break
        if space in b.does(ops[j]) and not (near and last):
            last = j
    if last is None:
        return None
    return [*ops[:k], *ops[k + 1 : last + 1], ops[k], *ops[last + 1 :]]


def earlier(b, ops, k, space):
    """The op at k before those of its region that touch that space, with the arithmetic that it
    needs, as far as its operands let it go: a commit before the last, others before all."""
    needs, moved, rest, best = set(ops[k].uses), [], [], None
    for j in range(k - 1, -1, -1):
        if set(ops[j].results) & needs:
            if b.is_fixed(ops[j]):
                break
            needs |= ops[j].uses
            moved.insert(0, ops[j])
            continue
        rest.insert(0, ops[j])
        if space in b.does(ops[j]) and not (best and ops[k].name in NEAR):
            best = [*ops[:j], *moved, ops[k], *rest, *ops[k + 1 :]]
    return best


def moved(move, b, ops, k):
    return move(b, ops, k, "smem") or move(b, ops, k, "gmem")


def weaker(body, k, loop):
    """(what, changed body)"""
    op = body[k]
    if op.name in ("wgmma_wait", "acc_load", "wait_smem_to_gmem") and op.n >= 0:
        yield (
            "one more in flight",
            changed(body, k, re.sub(r"\bn = \d+", f"n = {op.n + 1}", op.head)),
        )
    if op.name == "wait_smem_to_gmem" and "read_only" not in op.head:
        yield "source only", changed(body, k, re.sub(r"(n = \d+)", r"\1, read_only = 1", op.head))
    if op.name == "barrier_wait" and len(op.operands) == 2 and loop:
        bar, phase = op.operands
        new = [
            Op("%one_m = const {value = 1} : int32[]", op.place),
            Op(f"%phase_m = sub {phase}, %one_m : int32[]", op.place),
            Op(f"barrier_wait {bar}, %phase_m", op.place),
        ]
        yield "the phase before", [*body[:k], *new, *body[k + 1 :]]
    if op.name == "semaphore_wait":
        at, value = op.operands
        new = [
            Op("%one_m = const {value = 1} : int32[]", op.place),
            Op(f"%value_m = sub {value}, %one_m : int32[]", op.place),
            Op(re.sub(re.escape(value) + r"\b", "%value_m", op.head), op.place),
        ]
        yield "one signal less", [*body[:k], *new, *body[k + 1 :]]
    arrivals = re.search(r"arrivals = (\d+)", op.head)
    if op.name == "alloc_barrier" and int(arrivals[1]) > 1:
        fewer = op.head.replace(arrivals[0], f"arrivals = {int(arrivals[1]) - 1}")
        yield "one arrival less", changed(body, k, fewer)
    cluster = re.search(r"cluster = \[([^]]*)\], ", op.head)
    if op.name == "alloc_barrier" and cluster:
        own = op.head.replace(cluster[0], "").replace("leader = 1, ", "")
        yield "of the block alone", changed(body, k, own)
        axes = cluster[1].split(", -1")
        if len(axes) > 2:
            one = f"cluster = [{axes[0]}, -1], "
            yield "along one axis", changed(body, k, op.head.replace(cluster[0], one))


def edits(b, ops, k, loop):
    """(what is changed, the ops in its region) of one op."""
    op, does = ops[k], b.does(ops[k])
    if op.name in WAITS | ARRIVALS | COMMITS:
        yield "drop", without(ops, k)
    if op.name in SITES:
        yield from weaker(ops, k, loop)
    if does == {"wait"}:
        yield "later", moved(later, b, ops, k)
    if does == {"arrive"}:
        yield "earlier", moved(earlier, b, ops, k)
    if does == {"commit"}:
        yield "later", moved(later, b, ops, k)
        yield "earlier", moved(earlier, b, ops, k)


def source_line(place):
    """ "matmul.py: plgpu.wgmma_wait(0)"; "the call": the caller of the kernel."""
    file, line = re.fullmatch(r'"(.*)":(\d+)', place).groups()
    if file == __file__:
        return "the call"
    return f"{Path(file).name}: {linecache.getline(file, int(line)).strip()}"


@dataclasses.dataclass
class Mutant:
    name: str
    kernel: Kernel
    text: str


MOST = 1  # of one line of Python, changed in one way; of collectives 3, whose meetings share lines


def mutants(kernel):
    """All of a kernel."""
    b = Body(kernel)
    found, counts = {}, {}

    def visit(ops, loop):
        for k, op in enumerate(list(ops)):
            kept = list(ops)
            if not any(id(x) in b.reached for x in op.inside()):
                continue
            for what, new in edits(b, kept, k, loop):
                if new is None:
                    continue
                inner = next(x for x in op.inside() if x.name in SITES)
                where = f"{what} {inner.name} at {source_line(inner.place)}"
                ops[:] = new
                text = b.text()
                ops[:] = kept
                if text in found:
                    continue
                n = counts[where] = counts.get(where, 0) + 1
                if n <= (3 if kernel.others else MOST):
                    found[text] = f"{kernel.name}: {where}" + (f" #{n}" if n > 1 else "")
            for _, inner in op.regions:
                visit(inner, loop or op.name in ("for", "while"))

    visit(b.ops, False)
    return [Mutant(name, kernel, text) for text, name in found.items()]


# ---- equivalent mutants --------------------------------------------------------------------------

BEGIN = "here all devices begin and end a launch together, and their arrays are there before it"
END = "the block itself waits at its end until all bulk copies have read shared memory"
UNSEEN = "nothing follows: what completes after the last access of a kernel may stay unobserved"
WAITED = "the products were awaited before"
RING = "the slots of the ring order the same accesses: a tile has at least as many steps as slots"
PLAIN = "lanes make the copies, since the pitch of the array allows no TMA"
LAST = "no copy fills the slot again"
COMMITTED = "the commit of the product of what was converted arrives on the same barrier"
TWO_PIECES = "of two pieces neither is loaded over the other, and the flag follows both"
ONE_PIECE = "of one piece no slot is used again, and the flag follows it"
ONE_TILE = "a device has one tile, and before its first chunk nothing was stored"

# pattern of names: why. A mutant leaves the count only if neither judge catches it.
EQUIVALENT = {
    r"drop griddepcontrol_wait": "without any such call the launch does not overlap others",
    r"(drop|in flight|source only) wait_smem_to_gmem at .*self.reads_only": END,
    r"(drop|in flight) wait_smem_to_gmem at (_few_rows|norms|_norms_ring).*\(0, wait_read": END,
    r"^tcgen05: (drop|.*in flight) wait_smem_to_gmem at .*self.is_epilogue": END,
    r"^tcgen05, (attention|mixed): (drop|.*in flight) wait_smem_to_gmem at .*\(0, wait": END,
    r"^tcgen05, attention: drop barrier_wait at .*factors_read.at\[me\], phase=n": UNSEEN,
    r"^timeline.*wait_smem_to_gmem": END,
    r"^(fused_softmax|rms_norm)\.\d: .* (wait_smem_to_gmem|commit_smem_to_gmem_group)": END,
    r"^mixed, split: .* wait_smem_to_gmem at mixed.py": "a block has one tile: nothing was stored",
    r"drop barrier_wait at .*(n=last|\(read.at|edge_empty, phase=self.trips)": UNSEEN,
    r"drop barrier_wait at _norms_ring.py: .*empty.at\[pair, s\]": UNSEEN,
    r"later barrier_wait at .*\(read.at": UNSEEN,
    r"^producer_consumer.0: drop barrier_wait at .*empty.at\[s\]": UNSEEN,
    r"^attention.*: later barrier_wait at .*self.empty.at\[self.slot\(it\)\]": UNSEEN,
    r"in flight acc_load at (matmul|mixed|_mixed_sums|timeline|_attention_backward)": WAITED,
    r"^ragged, one step: (drop|one more in flight) wgmma_wait": "acc_load waits for it",
    r"^attention.*: earlier barrier_arrive at .*q_empty": WAITED,
    r"^attention, one block: earlier barrier_arrive at .*(k|v)_empty": LAST,
    r"earlier barrier_arrive at .*scheduler.receive": RING,
    r"later barrier_wait at .*scheduler.broadcast": RING,
    r"^attention, causal: earlier leave_section": "the section orders the products alone",
    r"^tcgen05: (drop|earlier) commit_smem at .*return loop": "the compiler places the fence",
    r"^tcgen05, mixed: earlier barrier_arrive at _common.py": COMMITTED,
    r"generated, no proxy_fence": "a barrier stands between the loads and the copy over them",
    r"semaphore_(wait|signal) at distributed.py: plgpu.semaphore_(wait|signal_parallel)\(": BEGIN,
    r"^matmul_(all_reduce|reduce_scatter): .*wait_smem_to_gmem\(pending": ONE_TILE,
    r"^matmul_reduce_scatter: .* wait_smem_to_gmem at .*_LEAVING": TWO_PIECES,
    r"^matmul_all_reduce: .* wait_smem_to_gmem at .*_LEAVING": ONE_PIECE,
    r"^matmul_all_reduce: (earlier barrier_arrive|later barrier_wait) at .*self.sent.* #2$": (
        "the sums of each tile have their own place in the result"
    ),
    r"drop barrier_wait at _distributed_products.py: .*self.added, phase=k": UNSEEN,
    r"earlier barrier_arrive at _distributed_products.py: .*self.added": (
        "each tile has its summands"
    ),
    r"^matmul_all_reduce: .*semaphore_wait at .*decrement=False\)( #2)?$": BEGIN,
    r"^matmul_all_reduce: .*wait_smem_to_gmem.*(_LEAVING|\(0\)).* #2": BEGIN,
    r"^matmul_all_reduce: earlier semaphore_signal at .*flags.at.flag": BEGIN,
    r"^ragged_all_to_all: .* wait_smem_to_gmem at _bulk.py: .*wait_read_only=True\) #3$": LAST,
    r"^softmax\.0: ": PLAIN,
    r"^triton_kernels.* commit_smem at .*jnp.dot": "mma multiplies from registers here",
}


# ---- mutants of generated code -------------------------------------------------------------------


def generated(kernel):
    """Of the lowered graph: without the fences that the compiler placed, and with all arrivals on
    barriers of other blocks relaxed."""
    text = lowered(kernel.text).text()
    first, args, body = parse(text)

    def relaxed(op):
        return [Op(op.head.replace("memory_order = release", "memory_order = relaxed"), op.place)]

    ways = {"proxy_fence": lambda op: [], "barrier_arrive": relaxed}
    for name, change in ways.items():

        def copied(ops, name=name, change=change):
            out = []
            for op in ops:
                new = Op(op.head, op.place)
                new.regions = [[given, copied(inner)] for given, inner in op.regions]
                out += change(new) if new.name == name else [new]
            return out

        changed = show((first, args, copied(body)))
        if changed != text:
            what = "relaxed" if name == "barrier_arrive" else "no"
            yield Mutant(f"{kernel.name}: generated, {what} {name} at all", kernel, changed)


# ---- judges --------------------------------------------------------------------------------------


def buffers(kernel):
    """Of each device, operands and outputs; an output in the memory of an operand is that array."""
    args = next(x for x in kernel.text.splitlines() if x.startswith("  args "))
    made = re.findall(r"out(?:\((\d+)\))? %\S+: gmem (\w+)\[([\d,]*)\]", args)
    for row in (kernel.arrays, *kernel.others):
        arrays, outs = [x.copy() for x in row], []
        for alias, dtype, dims in made:
            shape = tuple(int(d) for d in dims.split(",") if d)
            dtype = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
            outs.append(arrays[int(alias)] if alias else np.zeros(shape, dtype))
        yield arrays, outs


def lowered(text):
    graph = _core.Graph.parse(text)
    return graph.lower() if " stage traced " in text.partition("\n")[0] else graph


def host_arrays(kernel):
    """As a lowered graph has them: elements below 8 bits share bytes."""
    from pallas_mgpu.machine import run as host

    arrays = [x for row in buffers(kernel) for group in row for x in group]
    return [host.packed(x) if x.dtype.name in host.SMALL else x for x in arrays]


def interpreted(kernel, graph, seed):
    """On a mesh the memory in which devices meet counts as written: it lasts."""
    found, arrays = [], host_arrays(kernel)
    each = len(arrays) // (1 + len(kernel.others))
    graph.interpret(arrays, seed, races=found, uninitialized=not kernel.others)
    races = [x[5] for x in found if len(x) > 3]
    if races:
        raise plgpu.RaceError(races[0])
    return [x.tobytes() for k, x in enumerate(arrays) if k % each >= len(kernel.arrays)]


def emulated(kernel, graph, seed):
    from pallas_mgpu.machine import run as host

    args, outs = zip(*buffers(kernel))
    if kernel.others:
        host.run_mesh(graph, args, outs, seed, written=True)
    else:
        host.run(graph, args[0], outs[0], seed)
    return [x.tobytes() for row in outs for x in row]


JUDGES = {"interpreter": interpreted, "emulator": emulated}


def judges_of(mutant):
    """Mutants of generated code are for the emulated machine alone. Those of wait_load_tmem are for
    the interpreter alone: the generated program waits right after each load anyway."""
    if ": generated," in mutant.name:
        return ("emulator",)
    return ("interpreter",) if " wait_load_tmem at " in mutant.name else tuple(JUDGES)


def results(kernel, judges=tuple(JUDGES), seeds=SEEDS):
    """Of the kernel as it is, by judge; the same under all seeds."""
    graph, out = lowered(kernel.text), {}
    for name in judges:
        for seed in seeds:
            got = JUDGES[name](kernel, graph, seed)
            assert out.setdefault(name, got) == got, (kernel.name, name, seed)
    return out


def verdict(mutant, name, expected, graph, seeds=SEEDS):
    """What a judge says of a mutant, None if it finds nothing wrong."""
    for seed in seeds:
        try:
            got = JUDGES[name](mutant.kernel, graph, seed)
        except Exception as e:
            return f"seed {seed}: {type(e).__name__}: {e}"
        if got != expected:
            return f"seed {seed}: wrong result"
    return None


def verdicts(mutant, expected):
    """judge -> verdict"""
    graph = lowered(mutant.text)
    return {name: verdict(mutant, name, expected[name], graph) for name in judges_of(mutant)}


def reason(mutant):
    """Why it is equivalent, None: it is not known to be."""
    return next((why for pattern, why in EQUIVALENT.items() if re.search(pattern, mutant)), None)


# ---- all of them ---------------------------------------------------------------------------------

LIMIT = 600  # seconds for a mutant, on a machine that others use, too


class Hang(BaseException):
    pass


def hang(*_):
    raise Hang


def all_mutants(kernel):
    return [*mutants(kernel), *generated(kernel)]


def judge_kernel(job):
    """[(name, verdicts)] of the mutants of a kernel whose names hold some texts."""
    kernel, only = job
    return judge([m for m in all_mutants(kernel) if all(o in m.name for o in only)])


def judge(found, seeds=SEEDS):
    """[(name, verdicts)] of mutants of one kernel, which is right under these seeds."""
    if not found:
        return []
    signal.signal(signal.SIGALRM, hang)
    expected, out = results(found[0].kernel, seeds=seeds), []
    for m in found:
        signal.alarm(LIMIT)
        try:
            out.append((m.name, verdicts(m, expected)))
        except Hang:
            out.append((m.name, dict.fromkeys(judges_of(m))))
        signal.alarm(0)
    return out


def kind_of(name):
    return name.partition(": ")[2].partition(" at ")[0]


def table(rows):
    """Prints it; returns the lowest share of what is caught."""
    equal = {n for n, v in rows if not any(v.values()) and reason(n)}
    line = "| {:44} | {:>7} | {:>10} | {:>11} | {:>8} |"
    print(line.format("change", "mutants", "equivalent", "interpreter", "emulator"))
    print("|" + "|".join(f"{'-' * n}:" for n in (45, 8, 11, 12, 9)) + "|")
    total, kinds = None, dict.fromkeys(kind_of(n) for n, _ in rows)
    for kind in [*sorted(kinds), ""]:
        of = [(n, v) for n, v in rows if not kind or kind_of(n) == kind]
        left = [(n, v) for n, v in of if n not in equal]
        counts = []
        for judge in JUDGES:
            asked = [v[judge] for _, v in left if judge in v]
            counts.append((sum(v is not None for v in asked), len(asked)))
        shown = [f"{a} of {b}" if b else "" for a, b in counts]
        print(line.format(kind or "all", len(of), len(of) - len(left), *shown))
        total = counts
    for name, v in rows:
        if name in equal or all(v.values()):
            continue
        says = next(
            (f"{j}: {text.splitlines()[0][:150]}" for j, text in v.items() if text), "nobody"
        )
        print(f"{name}\n    {says}")
    shares = [100 * a / max(b, 1) for a, b in total]
    print(", ".join(f"{j} {s:.1f} %" for j, s in zip(JUDGES, shares)))
    return min(shares)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="names hold all of it"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        for kernel in kernels():
            for m in all_mutants(kernel):
                print(m.name)
        return 0
    start, rows = time.time(), []
    jobs = [(kernel, options.only) for kernel in kernels()]
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for done in pool.imap(judge_kernel, jobs):
            rows += done
    share = table(rows)
    print(f"{time.time() - start:.0f} s")
    return 0 if share >= 98 else 1


if __name__ == "__main__":
    sys.exit(main())
