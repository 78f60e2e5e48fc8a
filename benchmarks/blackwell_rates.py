"""What the kernels for Blackwell issue in each of their loops, from the machine code, beside what
an SM does in a clock cycle: what limits a kernel, and what it should reach.

    python benchmarks/blackwell_rates.py [sm_100a | sm_103a]

Needs no GPU, but nvdisasm (``nvidia-cuda-nvdisasm``, or a toolkit). No such GPU was at hand:
nothing here is a measurement. A loop is found by its backward branch; what an iteration issues is
counted once, branches that are rarely taken too. Cycles of the tensor cores follow from the shape
of the tile."""

import re
import sys
from collections import Counter

import ml_dtypes
import numpy as np

from pallas_mgpu.ops import (
    TensorMemoryAttentionConfig,
    TensorMemoryConfig,
    attention,
    matmul,
)

# Of an SM in a clock cycle. NVIDIA's data sheet of the B200: 2.25 PFLOP/s of dense bfloat16 with
# 148 SMs at about 1.85 GHz; 8-bit floats twice, 4-bit floats four times as many.
FLOP = 8192
SMEM_BYTES = 128
EXPONENTIALS = {"sm_100a": 16, "sm_103a": 32}
LANES = 128  # that issue an instruction: four schedulers with a warp each

COLUMNS = {
    "MMA": r"UTC[A-Z]*MMA",
    "commit": r"UTCBAR",
    "cp": r"UTCCP",
    "ld": r"LDTM",
    "st": r"STTM",
    "TMA": r"UTMALDG|UTMASTG|UBLKCP",
    "ex2": r"MUFU\.EX2",
    "FMA": r"FFMA2?|FMUL2?|FADD2?",
}
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^\s*\.?(\.L\w+):")


def loops(sass):
    """The loops of a program: Counters of instructions, innermost loops count for themselves."""
    code, labels, ends = [], {}, []
    for line in sass.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _LINE.match(line):
            code.append((found[2], found[3]))
            if found[2] == "EXIT" and not found[1]:
                ends.append(len(code))
    spans = set()
    for k, (name, rest) in enumerate(code):
        target = re.search(r"`\((\.L\w+)\)", rest)
        begin = labels.get(target[1], k + 1) if target and name.startswith("BRA") else k + 1
        # shorter ones wait for a barrier; what lies beyond an end comes back from waiting
        if begin <= k and k - begin > 12 and not any(begin < end <= k for end in ends):
            spans.add((begin, k))
    inner = {}
    for k, (name, _) in enumerate(code):
        around = [s for s in spans if s[0] <= k <= s[1]]
        if around:
            inner.setdefault(min(around, key=lambda s: s[1] - s[0]), Counter())[name] += 1
    return [inner[s] for s in sorted(inner)]


def counts(loop):
    found = {
        title: sum(n for name, n in loop.items() if re.fullmatch(rf"(?:{pattern})(\..*)?", name))
        for title, pattern in COLUMNS.items()
    }
    return found | {"all": sum(loop.values())}


def products():
    """Name, kernel, operands, MMA work of an iteration: rows of an SM, columns, K, bits."""
    bf16, e4m3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
    e2m1, e8m0 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e8m0fnu)
    for pair in (False, True):
        how = dict(config=TensorMemoryConfig(256, pair), transpose_b=True)
        name = f"matmul, {'pairs' if pair else 'one block'}, "
        for kind, dtype, scale, block in (
            ("bfloat16", bf16, None, 0),
            ("8 bits", e4m3, None, 0),
            ("mxfp8", e4m3, e8m0, 32),
            ("nvfp4", e2m1, e4m3, 16),
        ):
            bits = {bf16: 16, e4m3: 8, e2m1: 4}[dtype]
            x, operands = np.zeros((8192, 8192), dtype), {}
            if scale:
                tiles = np.zeros((64, 8192 // (4 * block), 32, 16), scale)
                operands = {"scale_a": tiles, "scale_b": tiles}
            f = matmul.kernel(x, x, **operands, **how)
            yield name + kind, f, [x, x, *operands.values()], (128, 256, 1024 // bits, bits, pair)


def attentions():
    for dim in (64, 128):
        q = np.zeros((2, 8192, 16, dim), ml_dtypes.bfloat16)
        for polynomials in (0, 8):
            config = TensorMemoryAttentionConfig(0, polynomials)
            f = attention.kernel(q, q, q, config=config)
            yield f"attention, {dim}, {polynomials} of 32 by polynomials", f, [q, q, q], dim


def table(rows):
    print("| kernel | loop | " + " | ".join(rows[0][2]) + " |")
    print("|---|---|" + "---|" * len(rows[0][2]))
    for name, loop, row in rows:
        print(f"| {name} | {loop} | " + " | ".join(str(x) for x in row.values()) + " |")


def role(row):
    if row["MMA"]:
        return "products"
    if row["ex2"]:
        return "softmax"
    if row["ld"] and row["st"]:
        return "correction"
    if row["ld"]:
        return "epilogue"
    return "copies" if row["TMA"] else None


def issued(name, f, operands, target):
    for loop in loops(f.lower(*operands, target=target).as_text("sass")):
        row = counts(loop)
        if role(row):
            yield name, role(row), row


def matmul_bounds(name, shape):
    """Cycles of an SM for one slot of the ring."""
    rows, cols, k, bits, pair = shape
    tensor = 2 * rows * cols * k * bits / 16 / FLOP
    # the tensor core reads A of its rows and, of a pair, its half of B; TMA wrote as much
    read = (rows + cols / (1 + pair)) * k * bits / 8 / SMEM_BYTES
    reached = 100 * min(1, tensor / (2 * read))
    print(f"| {name} | {tensor:.0f} | {read:.0f} | {2 * read:.0f} | {reached:.0f} % |")


def attention_bounds(name, dim, rows, target):
    """Cycles of an SM for a block of 128 keys and both tiles of queries."""
    tensor = 2 * 2 * 2 * 128 * 128 * dim / FLOP
    softmax = next(row for _, loop, row in rows if loop == "softmax")
    lanes = 2 * 128  # of both softmax threads
    exponentials = softmax["ex2"] * lanes / EXPONENTIALS[target]
    slots = softmax["all"] * lanes / LANES
    limit = max(tensor, exponentials, slots)
    numbers = f"{tensor:.0f} | {exponentials:.0f} | {slots:.0f} | {100 * tensor / limit:.0f} %"
    print(f"| {name} | {numbers} |")


def main():
    target = sys.argv[1] if len(sys.argv) > 1 else "sm_100a"
    every, matmuls, attended = [], [], []
    for name, f, operands, shape in products():
        every += issued(name, f, operands, target)
        matmuls.append((name, shape))
    for name, f, operands, dim in attentions():
        rows = list(issued(name, f, operands, target))
        every += rows
        attended.append((name, dim, rows))
    print(f"Instructions of an iteration, of a warp ({target})\n")
    table(every)
    print("\nCycles of an SM for a slot of the ring\n")
    print("| kernel | tensor | SMEM read | SMEM read and written | of the peak |")
    print("|---|---|---|---|---|")
    for name, shape in matmuls:
        matmul_bounds(name, shape)
    print("\nCycles of an SM for 128 keys and two tiles of queries\n")
    print("| kernel | tensor | ex2 | issue slots of the softmax | of the peak |")
    print("|---|---|---|---|---|")
    for name, dim, rows in attended:
        attention_bounds(name, dim, rows, target)


if __name__ == "__main__":
    main()
