"""What ops touch: the table of ops (csrc/ir/access.c) beside what the interpreter's memory
functions saw (`Graph.interpret(touched=)`), which never read it; and the table by hand."""

import collections
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fuzz import generate, kernels
from fuzz.test_fuzz import COVER, FIRST
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu import _core
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

ROOT = Path(__file__).parent.parent.parent
F32 = np.dtype(np.float32)


class Access(NamedTuple):
    op: int
    text: str
    param: int  # argument of the kernel, -1: none
    where: str
    reads: bool
    writes: bool
    proxy: str
    scope: str
    certainty: str
    done: str
    start: int
    end: int  # bytes


class Touch(NamedTuple):
    op: int
    param: int  # -1: SMEM
    reads: bool
    writes: bool
    engine: bool
    start: int
    end: int

    def fits(self, a):
        """Is it what the table says? Nobody knows what source text does with a ref."""
        how = (a.reads, a.writes) == (self.reads, self.writes) or a.certainty == "untold"
        place = (a.where, a.param) == ("smem" if self.param < 0 else "gmem", self.param)
        bytes_ = a.start <= self.start and self.end <= a.end
        return how and place and bytes_ and (a.proxy == "async") == self.engine


def accesses(graph, **options):
    return [Access(*a) for a in graph.accesses(**options)]


def compare(graph, operands):
    """Runs a lowered graph. The kinds of accesses that the table has, and those that were seen."""
    touched, arrays = [], []
    for dtype, shape, _, alias in graph.cuda()[1]["params"]:
        if len(arrays) < len(operands):
            x = np.array(operands[len(arrays)], order="C")
            arrays.append(host.packed(x) if x.dtype.name in host.SMALL else x)
        else:
            arrays.append(arrays[alias] if alias >= 0 else np.zeros(shape, jnp.dtype(dtype)))
    graph.interpret(arrays, touched=touched)
    told, seen = collections.defaultdict(list), set()
    for a in accesses(graph):
        told[a.op].append(a)
    for t in map(Touch._make, touched):
        found = [a for a in told[t.op] if t.fits(a)]
        assert found, f"{t} is none of {told[t.op]}"
        seen |= {(a.text, a.where, a.reads, a.writes) for a in found}
    return {(a.text, a.where, a.reads, a.writes) for of in told.values() for a in of}, seen


def random_kernel(seed):
    """The kinds of a kernel of the generator; none where it meets a gap."""
    case = kernels.Case(generate.generate(seed).source())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            lowered = case.kernel(interpret=True).lower(*case.operands)
        except (NotImplementedError, ValueError) as e:
            assert kernels.GAPS.search(str(e)), e
            return set(), set()
    return compare(lowered.graph, case.operands)


@pytest.mark.parametrize("first", only_long(range(FIRST, FIRST + 300, 50), every=3))
def test_random_kernels(first):
    for seed in range(first, first + 50):
        random_kernel(seed)


def masked(x_ref, o_ref, smem):
    i = jnp.arange(64, dtype=jnp.int32)
    smem[...] = x_ref[...]
    at = plgpu.load(smem, (i,), mask=i < 40, other=0.0)
    plgpu.store(smem, at + 1, mask=i < 50)
    old = plgpu.load(o_ref, mask=i < 10, other=3.0)
    plgpu.store(o_ref, old + smem[...], mask=i < 60)


def source(x_ref, o_ref, smem):
    add = plgpu.inline_cuda(
        "a1[threadIdx.x] = a0[threadIdx.x] + 1;",
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        interpret=lambda x, y: y.__setitem__(slice(None), x + 1),
    )
    smem[...] = x_ref[...]
    add(smem, o_ref)


def test_every_kind_of_access_is_seen():
    """By kernels that have every op between them. Arguments that nothing writes are not watched."""
    told, seen = set(), set()
    for seed in COVER:
        told, seen = map(set.union, (told, seen), random_kernel(seed))
    for body in (masked, source):
        x = np.arange(64, dtype=F32)
        kernel = plgpu.kernel(
            body, out_type=x, scratch_types=[plgpu.SMEM((64,), F32)], interpret=True
        )
        found = compare(kernel.lower(x).graph, [x])
        told, seen = map(set.union, (told, seen), found)
    memory = {k for k in told if k[1] in ("smem", "gmem")}
    assert memory - seen <= {k for k in memory if k[1] == "gmem" and not k[3]}
    assert len(seen) >= 17


# ---- by hand -------------------------------------------------------------------------------------

HEAD = """\
kernel "k" grid [4] cluster [2] threads 1 stage traced {
  args %x_1: gmem float16[64,128], out %o_2: gmem float16[64,128]
  scope {collective = 1} {
    %s_3 = alloc_smem {tiling = [8, 64], swizzle = 128, given = transforms} : smem float16[4,64,128]
    %b_4 = alloc_barrier {arrivals = 1} : barrier[1]
    %c_5 = alloc_barrier {arrivals = 1, cluster = [0, -1]} : barrier[1]
"""
TAIL = """\
    yield
  }
}
"""


def parsed(body, lower=False):
    graph = _core.Graph.parse(HEAD + body + TAIL)
    return graph.lower("sm_90a") if lower else graph


def of(graph, text, **options):
    """What the op touches, without its number and name."""
    return [a[3:10] for a in accesses(graph, **options) if a.text == text]


BARRIERS = """\
    %6 = index %b_4 {starts = [0], sizes = [_]} : barrier[]
    %7 = index %c_5 {starts = [0], sizes = [_]} : barrier[]
    %8 = axis {axis = grid, dim = 0} : int32[]
    %9 = index %s_3, %8 {starts = [?, 0, 64], sizes = [_, 64, 64]} : smem float16[64,64]
    %10 = index %x_1 {starts = [0, 64], sizes = [64, 64]} : gmem float16[64,64]
    %11 = index %o_2 {starts = [0, 64], sizes = [64, 64]} : gmem float16[64,64]
"""


def test_copies():
    """Their engine is not known before it is chosen."""
    body = (
        BARRIERS
        + """\
    copy_gmem_to_smem %10, %9, %6 {oob = zeros, engine = auto, cluster = [0]}
    barrier_wait %6
    copy_smem_to_gmem %9, %11 {commit = 1, engine = auto, reduction_op = add}
"""
    )
    graph = parsed(body)
    assert of(graph, "copy_gmem_to_smem") == [
        ("gmem", True, False, "unknown", "device", "must", "barrier"),
        ("smem", False, True, "unknown", "cluster", "must", "barrier"),
        ("barrier", True, True, "generic", "cluster", "must", "now"),
    ]
    assert of(graph, "barrier_wait") == [
        ("barrier", True, False, "generic", "block", "must", "now"),
        ("phase", True, True, "generic", "thread", "must", "now"),
    ]
    assert of(graph, "copy_smem_to_gmem") == [
        ("smem", True, False, "unknown", "block", "must", "group"),
        ("gmem", True, True, "unknown", "device", "must", "group"),
    ]
    lowered = parsed(body, lower=True)
    assert [x[3] for x in of(lowered, "copy_gmem_to_smem")] == ["async", "async", "generic"]


def test_arrivals():
    graph = parsed(BARRIERS + "    barrier_arrive %6\n    barrier_arrive %7\n")
    assert of(graph, "barrier_arrive") == [
        ("barrier", True, True, "generic", scope, "must", "now") for scope in ("block", "cluster")
    ]


def test_a_wait_that_is_told_its_phase_advances_none():
    graph = parsed(BARRIERS + "    barrier_wait %6, %8\n")
    assert [x[0] for x in of(graph, "barrier_wait")] == ["barrier"]


LOADS = (
    BARRIERS
    + """\
    %12 = load %9 : float16[64,64]
    store %11, %12
    %13 = index %s_3 {starts = [3, 8, 0], sizes = [_, 16, 128]} : smem float16[16,128]
    %14 = load %13 : float16[16,128]
    %15 = index %o_2 {starts = [48, 0], sizes = [16, 128]} : gmem float16[16,128]
    store %15, %14
"""
)


def test_bytes():
    """Row-major, and as in memory: [slot][chunk of 64 columns][row][64]. The slot of %9 is 0 to 3:
    its last byte may be that of the last slot."""
    graph = parsed(LOADS, lower=True)
    row = 128 * 2
    loads = [a for a in accesses(graph) if a.text == "load"]
    assert (loads[0].start, loads[0].end) == (128, 4 * 64 * row)
    assert (loads[1].start, loads[1].end) == ((3 * 64 + 8) * row, (3 * 64 + 24) * row)
    stores = [a for a in accesses(graph) if a.text == "store"]
    assert (stores[1].start, stores[1].end, stores[1].param) == (48 * row, 64 * row, 1)
    slot, chunk = 64 * row, 64 * 128
    loads = [a for a in accesses(graph, physical=True) if a.text == "load"]
    assert (loads[0].start, loads[0].end) == (chunk, 4 * slot)
    start = 3 * slot + 8 * 128
    assert (loads[1].start, loads[1].end) == (start, start + chunk + 16 * 128)
    plain = _core.Graph.parse((HEAD + LOADS + TAIL).replace("swizzle = 128, ", "")).lower()
    loads = [a for a in accesses(plain, physical=True) if a.text == "load"]
    assert (loads[1].start, loads[1].end) == (start, start + chunk + 16 * 128)


SUMMARY = """\
    %6 = const {value = 0} : int32[]
    %7 = const {value = 3} : int32[]
    %8 = axis {axis = grid, dim = 0} : int32[]
    %9 = lt %6, %8 : bool[]
    %10 = index %s_3 {starts = [0, 0, 0], sizes = [_, _, _]} : smem float16[]
    %11 = index %s_3 {starts = [1, 0, 0], sizes = [_, _, _]} : smem float16[]
    %12 = index %s_3 {starts = [2, 0, 0], sizes = [_, _, _]} : smem float16[]
    %13 = const {value = 1.0} : float16[]
"""


def summary(body):
    """Certainty by view: the byte where it begins."""
    rows = accesses(parsed(SUMMARY + body), summary=True)
    assert len({(a.start, a.reads) for a in rows}) == len(rows), "each once"
    slot = 64 * 128 * 2
    return {a.start // slot: a.certainty for a in rows}


def store(k):
    return f"store %{10 + k}, %13\n"


@pytest.mark.parametrize("count, loop", [("%7", "must"), ("%6", "may"), ("%8", "may")])
def test_summaries_of_loops(count, loop):
    body = f"for %6, {count} {{unroll = 1}} {{\nargs %14: int32[]\n{store(0)}{store(1)}yield\n}}\n"
    assert summary(body + store(1)) == {0: loop, 1: "must"}


def test_summaries_of_branches():
    """What all branches do is done, and what is done once more before or after them."""
    first, second = 2 * store(0) + 2 * store(1), store(1) + store(2)
    body = f"if %9 {{\n{first}yield\n}} {{\n{second}yield\n}}\n"
    assert summary(body) == {0: "may", 1: "must", 2: "may"}
    assert summary(store(0) + body + store(2)) == {0: "must", 1: "must", 2: "must"}
    nested = f"if %9 {{\n{body}yield\n}} {{\n{store(1)}yield\n}}\n"
    assert summary(nested) == {0: "may", 1: "must", 2: "may"}


# ---- the table -----------------------------------------------------------------------------------


def test_every_column_has_a_reader():
    """Of ops.def: a field of pm_op_info that nothing but the table itself names tells nobody."""
    text = (ROOT / "csrc/ir/ir.h").read_text()
    struct = re.search(r"typedef struct pm_op_info \{(.*?)\} pm_op_info;", text, re.S)[1]
    fields = set(re.findall(r"(\w+)(?:\[\w+\])?[,;]", re.sub(r"/\*.*?\*/", "", struct)))
    assert {"text", "in", "effects", "participants", "known_to", "completion"} <= fields
    files = [f for f in ROOT.glob("csrc/*/*.[ch]") if f.name != "ir.h"]
    source = "\n".join(f.read_text() for f in files) + text.replace(struct, "")
    read = set(re.findall(r"pm_ops\[[^;]*?\]\s*\.(\w+)", source))
    read |= set(re.findall(r"\binfo->(\w+)", source))
    assert fields - read == set()
