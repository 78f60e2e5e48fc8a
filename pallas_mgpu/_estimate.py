"""`plgpu.estimate`: how long a kernel takes on a GPU and what bounds it, from its graph alone.

1. The lowered graph becomes generators that do what the kernel's threads do but for the elements of
   arrays (`_estimate_program`).
2. One SM runs the blocks that it gets (`_estimate_machine`), with its share of the bandwidths. It
   does so twice: the first time says how many bytes of each argument all SMs ask for, hence which
   part must come from memory.
3. Cycles become seconds by the clock, which sinks where products and bytes need more power than
   there is; a launch is added."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from . import _core
from . import _estimate_machine as machine
from ._estimate_program import bits_of, compile_kernel, read
from ._names import show

_LAST, _SAMPLES = 0.999, (0.125, 0.375, 0.625, 0.875)  # SMs that are simulated
_WAVES = 12  # of blocks on an SM that are simulated; more go on as the last half of these


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What :func:`estimate` returns.

    ``seconds``: of one call among others in a stream that goes on for a while, at the clock that
    the GPU's power allows then; a short burst on a cool GPU can be a tenth faster. ``bound``: what
    limits it: one of the keys of ``parts``, or "latency" if nothing is busy for half of the time.
    ``parts``: seconds that the kernel would take if each resource alone limited it: "tensor
    cores", "SMEM", "L2", "HBM", "exponentials", "instructions", "power" and "launch". ``flops``:
    of matrix products.
    ``read``, ``written``: bytes that the SMs read and write. ``memory``: bytes that pass between
    L2 and memory. ``blocks``: of the launch. ``occupancy``: blocks of an SM at once. ``waves``:
    rounds of blocks. ``gpu``: which GPU it is for. ``assumed``: lines of Python with branches and
    waits that the graph does not decide, and what the estimate assumes for them; loops whose last
    iterations are not simulated; that registers spill, which takes time that is not counted.
    """

    kernel: str
    gpu: str
    seconds: float
    bound: str
    parts: dict[str, float]
    flops: float
    read: float
    written: float
    memory: float
    blocks: int
    occupancy: int
    waves: int
    assumed: tuple[str, ...]

    def __str__(self):
        lines = [
            f"{self.kernel} on {self.gpu}: about {self.seconds * 1e6:.3g} us,"
            f" bound by {self.bound}",
            f"{self.blocks} blocks, {self.occupancy} at once on an SM, {self.waves} waves",
        ]
        if self.flops:
            rate = self.flops / self.seconds / 1e12
            lines.append(f"{self.flops:.4g} FLOP in products: {rate:.3g} TFLOP/s")
        lines.append(
            f"{self.read / 1e6:.4g} MB read, {self.written / 1e6:.4g} MB written by the SMs;"
            f" {self.memory / 1e6:.4g} MB to and from memory:"
            f" {self.memory / self.seconds / 1e12:.3g} TB/s"
        )
        for name, seconds in sorted(self.parts.items(), key=lambda x: -x[1]):
            if seconds >= 0.005 * self.seconds:
                lines.append(f"  {name:13} {seconds * 1e6:9.3g} us, {seconds / self.seconds:4.0%}")
        return "\n".join([*lines, *(f"assumed: {x}" for x in self.assumed)])


def _facts(gpu):
    if isinstance(gpu, machine.Facts):
        return gpu
    for name, facts in machine.GPUS.items():
        if gpu == name:
            return facts
    raise ValueError(f"plgpu.estimate: gpu must be one of {tuple(machine.GPUS)}, got {gpu!r}")


def _sizes(graph, sizes):
    """Values of the sizes that are known at run time, with number 0 in front."""
    if not isinstance(sizes, Mapping):
        raise TypeError(f"plgpu.estimate: sizes must be a dict of ints, got {show(sizes)}")
    found, known = [0], dict(sizes)
    forms = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "min": min, "max": max,
    }  # fmt: skip
    names = {name for name, how, *_ in graph.sizes if how == "extent"}
    unknown = set(known) - names
    if unknown:
        raise ValueError(
            f"plgpu.estimate: the kernel has no size {sorted(unknown)}; it has {sorted(names)}"
        )
    for name, how, a, b, least, most, multiple in graph.sizes:
        if how == "extent":
            if name not in known:
                raise ValueError(
                    f"plgpu.estimate: pass the size {name} that the kernel takes at run time:"
                    f" sizes={{{name!r}: ...}}"
                )
            n = known[name]
            if not hasattr(n, "__index__") or not least <= n <= most or n % multiple:
                raise ValueError(
                    f"plgpu.estimate: size {name} must be an int from {least} to {most}, a multiple"
                    f" of {multiple}; got {show(n)}"
                )
            found.append(int(n))
        else:
            found.append(a if how == "number" else forms[how](found[a], found[b]))
    return found


def _registers(lowered):
    """Of a lane, and bytes of it that spill, by the compiler; (None, 0) without one."""
    try:
        found = lowered.resources()
        return found["registers"], found["spill_bytes"]
    except RuntimeError:
        return None, 0


def _values(graph, values, sizes):
    """The arrays that are given by the numbers of arguments."""
    if not isinstance(values, Mapping):
        raise TypeError(f"plgpu.estimate: values must be a dict of arrays, got {show(values)}")
    arguments, found = graph.body.args, {}
    for k, x in values.items():
        if k not in range(len(arguments)):
            raise ValueError(
                f"plgpu.estimate: values are of arguments 0 to {len(arguments) - 1}, got {show(k)}"
            )
        v, t = arguments[k]
        found[v] = x = np.asarray(x)
        extents = graph.extents.get(v, [0] * x.ndim)
        want = tuple(sizes[e] if e else n for n, e in zip(t.shape, extents))
        if x.shape != want:
            raise ValueError(
                f"plgpu.estimate: the value of argument {k} must have the shape {want}, got"
                f" {x.shape}"
            )
    return found


class _Launch:
    """A kernel on a GPU: which SM gets what."""

    def __init__(self, program, facts, sizes, values, registers):
        graph = program.graph
        self.program, self.facts, self.sizes = program, facts, sizes
        self.values = values
        open_axes = graph.grid_sizes or [0] * len(graph.grid)
        self.grid = [sizes[k] if k else n for k, n in zip(open_axes, graph.grid)]
        self.clusters, self.cluster = math.prod(self.grid), math.prod(graph.cluster)
        self.blocks = self.clusters * self.cluster
        self.occupancy = machine.occupancy(facts, 128 * graph.threads, graph.smem, registers)
        sms = facts.sms if self.cluster <= 2 else facts.sms * 10 // 11
        self.slots = max(sms // self.cluster, 1) * self.occupancy  # for clusters
        if program.shares_grid:
            self.clusters = min(self.clusters, self.slots)
            self.blocks = self.clusters * self.cluster
        self.waves = -(-self.clusters // self.slots)
        self.resident = min(self.clusters, self.slots)
        self.at_once = min(self.occupancy, -(-self.blocks // facts.sms))
        self.sms = min(facts.sms, -(-self.resident * self.cluster // self.at_once))
        self.left_out = {}  # iterations, by lines of Python

    def point(self, k):
        """Grid coordinates of the k-th cluster."""
        out = []
        for n in reversed(self.grid):
            out.append(k % n)
            k //= n
        return out[::-1]

    def of_one_sm(self, at):
        """Numbers of the clusters that an SM gets; at: which SM, 0 the first, just below 1 the
        last. Later ones come in no regular order, so an SM gets some of all kinds."""
        step = max(self.resident // self.at_once, 1)
        count = len(range(int(at * step), self.clusters, step))
        last = self.clusters - (count - 1) * step  # of the last round, which may be incomplete
        turns = [int(at * step) + int(k * 0.618 * step) for k in range(count)]
        return [k * step + turn % (step if k < count - 1 else last)
                for k, turn in enumerate(turns)]  # fmt: skip

    def run(self, numbers, cold):
        """(cycles, the machine) of an SM with these clusters."""
        facts = self.facts
        a_cycle = facts.memory / facts.clock / self.sms
        share = facts.l2 / self.sms
        sm = machine.Machine(facts, share, a_cycle, cold, self.program.dynamic)

        def start(k):
            place = machine.Place(k, self.resident, self.values)
            grid, body = self.point(k), self.program.body
            return lambda t: [
                body(sm, place, grid, thread, self.sizes, t)
                for thread in range(self.program.graph.threads)
            ]

        return sm.run((start(k) for k in numbers), self.at_once), sm


def _array_bytes(graph, sizes, k):
    """Of an argument; of one with an open extent, for the sizes of the call."""
    v, t = graph.body.args[k]
    extents = graph.extents.get(v, [0] * len(t.shape))
    return math.prod(sizes[k] if k else n for n, k in zip(t.shape, extents)) * bits_of(t.dtype) / 8


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one SM did; what it read, wrote and multiplied, as if all SMs had done so."""

    cycles: float
    busy: dict  # cycles of its engines
    read: dict  # bytes of arguments
    written: dict
    taken: float  # bytes that came to the SM, by multicast too
    macs: float
    work_16: float


def _simulate(launch, cold, at):
    mine = launch.of_one_sm(at)
    most = _WAVES * launch.at_once
    cycles, sm = launch.run(mine[:most], cold)
    more = len(mine) / sm.begun
    if sm.over:
        cycles *= more
    elif len(mine) > most:  # the others go on as the last half of these
        half, _ = launch.run(mine[: most // 2], cold)
        cycles += (cycles - half) * (len(mine) - most) / (most - most // 2)
    launch.left_out.update(sm.left_out)
    every = launch.clusters * launch.cluster / sm.begun
    scaled = [{k: n * f for k, n in x.items()}
              for x, f in ((sm.busy, more), (sm.read, every), (sm.written, every))]  # fmt: skip
    return _Run(cycles, *scaled, sm.taken * every, sm.macs * every, sm.work_16 * every)


def estimate(lowered, *, gpu="H200", sizes=None, values=None, cold=False):
    """How long a kernel takes on a GPU, and what bounds it, as an :class:`Estimate`. No GPU is
    needed.

    ``lowered``: what ``kernel.lower(...)`` returns, for Hopper. ``gpu``: "H200" or "H100".
    ``sizes``: ints by the names of sizes that are known at run time (``plgpu.dim``). ``values``:
    arrays by the number of the argument, for kernels whose loops depend on their elements, such as
    lengths. ``cold``: nothing is in the L2; otherwise what fits there is left by the call before.

    A few SMs are simulated, and others are taken to do the same; so are the last iterations of
    loops that take more than a second to simulate (``assumed`` names them). ValueError for other
    GPUs, missing or unknown sizes, and loops that depend on the elements of arrays that are not
    given. NotImplementedError for kernels of other GPUs than Hopper's, and for `while` loops with
    millions of iterations.
    """
    if not isinstance(lowered, _core.Lowered):
        raise TypeError(
            "plgpu.estimate: a lowered kernel is needed, kernel.lower(*operands), got"
            f" {show(lowered)}"
        )
    facts = _facts(gpu)
    graph = read(lowered.as_text("graph"))
    if graph.target != "sm_90a":
        raise NotImplementedError(
            f"plgpu.estimate: the kernel is lowered for {graph.target}, of which nothing was"
            ' measured; lower it with target="sm_90a"'
        )
    registers, spilled = _registers(lowered)
    found = _of_graph(graph, registers, facts, sizes, values, cold)
    if not spilled:
        return found
    note = f"{spilled} bytes of registers spill, which is not counted: see lowered.spills()"
    return dataclasses.replace(found, assumed=(*found.assumed, note))


def _of_graph(graph, registers, facts, sizes, values, cold):
    def products(dtype, op):
        return (facts.tensor if op == "wgmma" else facts.mma) * 8 / bits_of(dtype)

    sizes = _sizes(graph, sizes or {})
    values = _values(graph, values or {}, sizes)
    program = compile_kernel(graph, products, facts.wgmma_least, values)
    launch = _Launch(program, facts, sizes, values, registers)
    arguments = [v for v, _ in graph.body.args]
    held = {v: _array_bytes(graph, sizes, k) for k, v in enumerate(arguments)}
    kept = (facts.cold_bytes - sum(held.values())) / (facts.cold_bytes - facts.warm_bytes)
    warm = 0.0 if cold else max(0.0, min(1.0, kept))
    last = _simulate(launch, dict.fromkeys(arguments, 1.0 - warm), _LAST)
    part = dict.fromkeys(last.written, 1.0 - warm)
    for v, nbytes in last.read.items():  # each byte once, however often it is asked for
        part[v] = (1.0 - warm) * min(1.0, held.get(v, 0.0) / nbytes) if nbytes else 0.0
    if program.dynamic:  # a counter evens out what SMs do
        runs = [_simulate(launch, part, at) for at in _SAMPLES]
        return _result(launch, part, runs, sum(r.cycles for r in runs) / len(runs))
    runs = [_simulate(launch, part, at) for at in (0, _LAST)]
    if abs(runs[1].cycles / runs[0].cycles - 1) > 0.02:  # shares differ
        runs += [_simulate(launch, part, at) for at in _SAMPLES]
    return _result(launch, part, runs, max(r.cycles for r in runs))


def _result(launch, cold, runs, cycles):
    """runs: of several SMs, for means; the first has the parts. cycles: until the last one ends."""
    facts, graph = launch.facts, launch.program.graph

    def mean(what):
        return sum(map(what, runs)) / len(runs)

    asked, written = mean(lambda r: sum(r.read.values())), mean(lambda r: sum(r.written.values()))
    taken, macs = mean(lambda r: r.taken), mean(lambda r: r.macs)
    memory = sum(
        cold.get(v, 0.0) * mean(lambda r, v=v: r.read.get(v, 0.0) + r.written.get(v, 0.0))
        for v in {v for r in runs for v in (*r.read, *r.written)}
    )
    parts = {k: mean(lambda r, k=k: r.busy[k]) / facts.clock for k in runs[0].busy}
    parts["L2"] = max((asked + written) / facts.l2, taken / facts.intake / launch.sms) / facts.clock
    parts["HBM"] = memory / facts.memory
    energy = mean(lambda r: r.work_16) * facts.joules + taken * facts.joules_byte
    energy += memory * facts.joules_memory
    parts["power"] = energy / facts.watts
    own = max((cycles + facts.end) / facts.clock, parts["HBM"])
    limit = parts["power"]
    between = facts.overlapped if launch.program.overlaps else facts.launch
    seconds = (own**8 + limit**8) ** (1 / 8) + between
    parts["launch"] = between + (facts.begin + facts.end) / facts.clock
    bound = max(parts, key=parts.get)
    if parts[bound] < 0.5 * seconds:
        bound = "latency"
    return Estimate(
        graph.name, facts.name, seconds, bound, parts, 2 * macs, asked, written,
        memory, launch.blocks, launch.occupancy, launch.waves,
        tuple(launch.program.assumed) + tuple(
            f"{place}: the last {n} iterations of a thread take as long as those before"
            for place, n in launch.left_out.items()
        ),
    )  # fmt: skip
