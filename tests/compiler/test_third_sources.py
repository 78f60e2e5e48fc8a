"""What other compilers emit for sm_100, against this one.

Triton (data/triton.json, made by triton_programs.py): kernels of whole_kernels.py, written again in
Gluon, have the same order of synchronisation in each role; single products have the same
instruction descriptors, and matrix descriptors and offsets that follow from the same formula for
Triton's order of tiles. CUTLASS through nvcc (data/cutlass.json, made by cutlass_programs.py): the
loops of its roles have what the same loops of `ops` have, in the same order, and products the same
instruction descriptors.

Differences that are accepted stand in `reduced`, `NAMES` and `skeleton`, with the reason; those of
the PTX ISA are in docs/blackwell.md."""

import functools
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import ptx_lanes
import pytest
import test_encodings
from test_encodings import BITS, DTYPES, KINDS
from test_records import Program
from test_sequences import emitted

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops
from pallas_mgpu._types import layout_spec

pytestmark = pytest.mark.filterwarnings("ignore:.*registers a lane", "ignore:load. idx")
DATA = Path(__file__).parent / "data"
FACTS = json.loads((DATA / "triton.json").read_text())
CUTLASS = json.loads((DATA / "cutlass.json").read_text())

# Roles of Triton's programs (the warps that go on, then the workers) that do what a thread does.
ROLES = {
    "ring of four": {0: [1], 1: [2, 0]},
    "pair": {0: [1], 1: [2, 0]},
    "two accumulators": {0: [1], 1: [2], 2: [0]},
    "A in tensor memory": {0: [0]},
    "scales": {0: [0]},
    "launched": {0: [0]},
    "two products": {0: [1], 1: [2], 2: [0]},
}
WIDTHS = {"16x256b": 4, "16x128b": 2, "32x32b": 1}  # registers, times the number of repetitions


def registers(name):
    shape, n = re.search(r"(\d+x\d+b)_x(\d+)", name).groups()
    return WIDTHS[shape] * int(n)


def reduced(steps, copies=1):
    """The same for programs that differ in what the ISA leaves open.

    How many copies fill a buffer follows from the width of a tile, and where bytes are expected
    from how many arrivals count: what is compared is the barrier and the bytes. copies: blocks
    whose copies one arrival expects. Loads and stores of tensor memory have other shapes: the
    number of registers is compared. Waits for loads that come before others change nothing. Triton
    has no fences of tcgen05, which the ISA's patterns for the synchronisation of several threads
    have, and other proxy fences."""
    out = []
    for word, *rest in steps:
        last = out[-1] if out else [None]
        if word in ("expect", "copy"):
            if last[:2] != ["fill", rest[0]]:
                last = ["fill", rest[0], 0, False]
                out.append(last)
            last[2] += rest[1] // copies if word == "expect" else 0
            last[3] |= "first block" in rest
        elif word in ("products", "load", "store") and last[0] == word:
            last[1] += rest[0]
        elif word == "wait load" and last[0] == word or "fence" in word:
            continue
        else:
            out.append([word, *rest])
    return out


@pytest.mark.parametrize(
    "name, rank, thread",
    [
        (n, rank, t)
        for n, roles in ROLES.items()
        for rank in range(1 + (n == "pair"))
        for t in roles
    ],
)
def test_roles(name, rank, thread):
    theirs = FACTS["sequences"][name]
    want = [step for role in ROLES[name][thread] for step in theirs[f"{rank},{role}"]]
    have = emitted(name, rank, thread, registers)
    if name == "pair" and thread == 0:
        # there each block arrives with the bytes of its own copies; here the first one with all
        both = [reduced(emitted(name, r, thread, registers), 2 - r) for r in range(2)]
        total = sum(step[2] for steps in both for step in steps if step[0] == "fill")
        assert total == sum(s[2] for s in reduced(want) if s[0] == "fill")
        want = [[*s[:2], 0, s[3]] if s[0] == "fill" else s for s in reduced(want)]
        have = [[*s[:2], 0, s[3]] if s[0] == "fill" else s for s in reduced(have)]
        assert have == want
    else:
        assert reduced(have) == reduced(want)


# ---- products ------------------------------------------------------------------------------------

DEFAULT = {"m": 128, "n": 128, "acc": "f32", "sw_a": 128, "sw_b": 128, "block": 32}
NAMES = {  # other spellings of one kind (PTX ISA, tcgen05.mma, .block32 and .block16)
    "mxf8f6f4.block_scale.scale_vec::1X": "mxf8f6f4.block_scale.block32",
    "mxf4nvf4.block_scale.scale_vec::2X": "mxf4.block_scale.block32",
    "mxf4nvf4.block_scale.scale_vec::4X": "mxf4nvf4.block_scale.block16",
}


def operand(rows, columns, swizzle, bits, k_major):
    """Tiles of 8 rows of a swizzle; Triton has those of one column of tiles one after the other."""
    return k_major, swizzle, rows * swizzle, 8 * swizzle


def product(case):
    c = DEFAULT | case
    a, b, scale = c["dtype"], c.get("dtype_b", c["dtype"]), c.get("scale")
    kind = KINDS.get(a)
    if scale:
        steps = 32 if BITS[a] == 8 else 64
        kind = "mxf8f6f4" if BITS[a] == 8 else "mxf4nvf4"
        kind += f".block_scale.scale_vec::{steps // c['block']}X"
    a_mn, b_k, k = c.get("a_mn_major", False), c.get("b_k_major", False), c["k"]
    shape_a, shape_b = (k, c["m"]) if a_mn else (c["m"], k), (c["n"], k) if b_k else (k, c["n"])
    return kind, _core.tcgen05_product(
        kind,
        DTYPES[a],
        DTYPES[b],
        "int32" if kind == "i8" else DTYPES[c["acc"]],
        c["m"],
        c["n"],
        k,
        scale=DTYPES[scale] if scale else None,
        block=c["block"] if scale else 0,
        sparse=False,
        pair=False,
        a_in_tmem=c.get("a_tmem", False),
        in_a=operand(*shape_a, c["sw_a"], BITS[a], not a_mn),
        in_b=operand(*shape_b, c["sw_b"], BITS[b], b_k),
    )


def fixed_bits(descriptor, mn, swizzle, bits, k_major):
    """All but the address, and distances that one tile does not have: the leading dimension's of
    less than two columns of tiles, the stride of one row of tiles."""
    unused = 0x3FFF
    if k_major or mn * bits // 8 <= swizzle:
        unused |= 0x3FFF << 16
    if k_major and mn <= 8:
        unused |= 0x3FFF << 32
    return descriptor & ~unused


def address(descriptor):
    return (descriptor & 0x3FFF) * 16


@pytest.mark.parametrize(
    "fact", FACTS["products"], ids=lambda f: "-".join(map(str, f["in"].values()))
)
def test_products(fact):
    case, rows = DEFAULT | fact["in"], fact["rows"]
    if case["m"] == 64:
        # in this language 64 rows have each half of their columns in half of the lanes; there all
        # in one half, which is the first part of a product of twice as many columns
        kind, (name, a, b, steps) = product(case | {"n": 2 * case["n"]})
        steps = steps[: len(steps) // 2]
    else:
        kind, (name, a, b, steps) = product(case)
    assert fact["ptx"] in (name, name.replace(kind, NAMES.get(kind, kind)))
    bits_a, bits_b = BITS[case["dtype"]], BITS[case.get("dtype_b", case["dtype"])]
    a_k, b_k = not case.get("a_mn_major"), case.get("b_k_major", False)
    tiles_a, tiles_b = (
        (case["m"], case["sw_a"], bits_a, a_k),
        (case["n"], case["sw_b"], bits_b, b_k),
    )
    for row, (d, code, at_a, at_b, first, *scales) in zip(rows, steps, strict=True):
        assert row[0] - rows[0][0] == d and row[3] == code
        for field, fixed, at, tiles in ((1, a, at_a, tiles_a), (2, b, at_b, tiles_b)):
            start = rows[0][field]
            if field == 1 and case.get("a_tmem"):
                assert row[field] - start == at
                continue
            assert fixed_bits(row[field], *tiles) == fixed_bits(fixed, *tiles)
            assert address(row[field]) - address(start) == at
        assert bool(row[-1]) == (not first)
        if "scale" in case:
            # there scales of 64 columns of B take two columns of tensor memory, here four as of 128
            of_a, of_b = row[4] - rows[0][4], row[5] - rows[0][5]
            assert [of_a, of_b * 128 // min(case["n"], 128)] == scales[:2]


# ---- loads and stores of tensor memory -----------------------------------------------------------

MOVES = {  # shape of the instruction and bits of an element: a layout that it loads and stores
    ("32x32b", 32): plgpu.Layout.TCGEN05_TMEM_NATIVE,
    ("16x256b", 32): plgpu.Layout.TCGEN05,
    ("32x32b", 16): plgpu.Layout.TCGEN05_TMEM_NATIVE(2),
    ("16x128b", 16): plgpu.Layout.TCGEN05,
}


def move(layout, dtype, store):
    """A load or store of 128 x 64 elements; 16 bits are packed."""

    def load(x, o, t):
        o[...] = plgpu.async_load_tmem(t, layout=layout)

    def put(x, o, t):
        plgpu.async_store_tmem(t, plgpu.load(x, layout=layout, optimized=False))

    x = struct((128, 64), dtype)
    packed = True if np.dtype(dtype).itemsize == 2 else None
    return Program(put if store else load, [plgpu.TMEM((128, 64), dtype, packed=packed)], (x,), x)


def added(bases, number):
    """What the bits of a number add to row and column."""
    set_ = [base for k, base in enumerate(bases) if number >> k & 1]
    return np.array(set_ or [[0, 0]]).sum(0)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("shape, bits", MOVES)
def test_registers_of_moves(shape, bits, store):
    """Each register of an instruction has the row and the column of tensor memory that it has in
    Triton."""
    (fact,) = [x for x in FACTS["moves"] if (x["shape"], x["bits"]) == (shape, bits)]
    layout, n = MOVES[shape, bits], 32 // bits
    p = move(layout, np.float32 if bits == 32 else np.float16, store)
    elements = np.array(_core.layout_elements((128, 64), layout_spec(layout)))
    for tid in (0, 5, 31, 38, 127):
        calls = [e for e in p.events(tid) if re.match("tmem_(load|store)", e.name)]
        assert calls and all(shape in e.name for e in calls)
        seen = 0
        for e in calls:
            at = e.args[-1]
            start = np.array([at >> 16, (at & 0xFFFF) * n])
            for k, word in enumerate(p.of[e.name, ""].registers):
                for j in range(n):
                    want = start + added(fact["registers"], n * k + j)
                    want = want + added(fact["lanes"], tid % 32)
                    found = elements[tid][(e.args[0].first + word) * n + j]
                    assert divmod(found, 64) == tuple(want)
                    seen += 1
        assert seen == 64


# ---- CUTLASS -------------------------------------------------------------------------------------


def struct(shape, dtype):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def matmul():
    x = struct((4096, 4096), np.float16)
    return ops.matmul.kernel(x, x, config=ops.TensorMemoryConfig()), (x, x)


def scales():
    x = struct((4096, 4096), ml_dtypes.float8_e4m3fn)
    scale = struct((32, 32, 32, 16), ml_dtypes.float8_e8m0fnu)
    how = dict(transpose_b=True, out_dtype=np.dtype(np.float32))
    config = ops.TensorMemoryConfig(256, True, 3)
    f = ops.matmul.kernel(x, x, scale_a=scale, scale_b=scale, config=config, **how)
    return f, (x, x, scale, scale)


def grouped():
    x, w = struct((4096, 1024), np.float16), struct((8, 1024, 1024), np.float16)
    sizes = struct((8,), np.int32)
    return ops.ragged_dot.kernel(
        x, w, sizes, config=ops.TensorMemoryConfig(256, False, dynamic=False)
    ), (x, w, sizes)


def attention():
    x = struct((2, 4096, 8, 128), np.float16)
    config = ops.TensorMemoryAttentionConfig(polynomials=8)
    return ops.attention.kernel(x, x, x, config=config), (x, x, x)


OURS = {"matmul": matmul, "scales": scales, "grouped": grouped, "attention": attention}
LOOPS = {
    "multiplier": [r"tcgen05\.mma"],
    "producer": [r"cp\.async\.bulk\.tensor.*mbarrier"],
    "requests": [r"clusterlaunchcontrol\.try"],
    "epilogue": [r"tcgen05\.ld"],
    "softmax": [r"tcgen05\.ld", r"tcgen05\.st", r"ex2\."],
    "correction": [r"tcgen05\.ld", r"tcgen05\.st"],
}


@functools.cache
def loops(name):
    f, arguments = OURS[name]()
    program = ptx_lanes.parse(f.lower(*arguments, target="sm_100a").as_text("ptx"))
    return lambda role: ptx_lanes.summary(ptx_lanes.innermost(program, *LOOPS[role]))


def words(summary):
    return [word for word, _ in summary if not word.startswith("fence")]


def skeleton(summary):
    """Each word once, of those that follow each other. Where bytes are expected once for each copy,
    the ISA adds them up."""
    out = []
    for word in words(summary):
        if word == "expect" and out[-2:] == ["expect", "copy"]:
            out.pop()
            out.pop()
        if out[-1:] != [word]:
            out.append(word)
    return out


@pytest.mark.parametrize("role", ["multiplier", "producer"])
@pytest.mark.parametrize("name", ["matmul", "scales", "grouped"])
def test_loops(name, role):
    """What is waited for, copied, multiplied and committed in a step."""
    theirs = CUTLASS[name]["loops"][role]
    assert skeleton(loops(name)(role)) == skeleton(theirs)
    if name == "matmul":
        assert [x for x in loops(name)(role) if not x[0].startswith("fence")] == theirs


@pytest.mark.parametrize("name", ["matmul", "scales", "grouped"])
def test_release_of_an_accumulator(name):
    """Its last load is waited for before the arrival that gives it back."""
    for steps in (words(CUTLASS[name]["loops"]["epilogue"]), words(loops(name)("epilogue"))):
        arrives = [k for k, word in enumerate(steps) if word == "arrive"]
        assert any(steps[k - 2 : k] == ["load", "wait load"] for k in arrives)
    assert CUTLASS[name]["fences"] == 0  # docs/blackwell.md


def test_requests():
    """A request follows its expected bytes; an answer that has been read is given back after a
    proxy fence, because the next one is written by the asynchronous proxy."""
    for steps in (
        words(CUTLASS["matmul"]["loops"]["requests"]),
        words(loops("matmul")("requests")),
    ):
        request, answer = steps.index("request"), steps.index("answer")
        assert steps[request - 1] == "expect"
        assert steps[answer - 1 : answer + 3] == ["wait", "answer", "proxy fence", "arrive"]


@pytest.mark.parametrize("role", ["softmax", "correction"])
def test_attention(role):
    """Stores of tensor memory are waited for before the arrival that tells of them."""
    for steps in (words(CUTLASS["attention"]["loops"][role]), words(loops("attention")(role))):
        stored = steps.index("wait store")
        assert steps[0] == "wait" and "store" in steps[:stored] and steps[stored + 1] == "arrive"


PRODUCTS = {  # the products of the examples, as cases of test_encodings.py
    "matmul": [{"n": 64, "collective": True, "b_k_major": True}],
    "grouped": [{"n": 256, "dtype": "e4m3", "b_k_major": True}],
    "attention": [{"b_k_major": True}, {}],
    "gradients": [{"b_k_major": True}, {}, {"a_mn_major": True}],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_instruction_descriptors(name):
    theirs = {tuple(x) for x in CUTLASS[name]["products"]}
    found = set()
    for case in PRODUCTS[name]:
        kind, _, _, steps = test_encodings.product(case)
        found |= {(kind, step[1]) for step in steps}
    assert found == theirs
