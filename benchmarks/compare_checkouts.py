"""Machine code and time of the compiler beside another checkout, without a GPU.

    python benchmarks/compare_checkouts.py OTHER [--rounds 20] [--only matmul]

OTHER is a directory with a built checkout, say a worktree of an earlier commit; both use the NVRTC
that is installed. The first table counts the instructions of each class in the inner loops of the
tensor-core kernels: of each innermost loop of the machine code that has tensor-core instructions,
in their order. The second one gives the smallest processor time of tracing and lowering, and of
printing CUDA C++, in processes that take turns."""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

WORKER = """
import os, sys, time, json
sys.path.insert(0, sys.argv[1])
os.environ["PALLAS_MGPU_NO_CACHE"] = "1"
import resources
for line in sys.stdin:
    what, name = json.loads(line)
    lower = resources.KERNELS[name]
    if what == "sass":
        out = lower().as_text("sass")
    else:
        start = time.thread_time()
        low = lower()
        middle = time.thread_time()
        low.as_text("cuda")
        out = middle - start, time.thread_time() - middle
    print(json.dumps(out), flush=True)
"""

MACHINE_CODE = ("matmul 8192 x 8192 x 8192", "attention 4096, dim 128",
                "attention 4096, dim 128, causal")  # fmt: skip
TIMED = ("matmul 8192 x 8192 x 8192", "attention 4096, dim 128, causal", "layer_norm 65536",
         "ragged_dot 32768 x 14336 x 4096, 64 groups")  # fmt: skip
CLASSES = {
    "tensor cores": r"[HIQ]GMMA|[HI]MMA",
    "waits for them": r"WARPGROUP|WARPSYNC|DEPBAR",
    "float": r"F(FMA|ADD|MUL|MNMX|SETP|SEL|CHK)\w*|H(FMA|ADD|MUL|MNMX)2\w*",
    "exponentials": r"MUFU",
    "conversions": r"F2F\w*|F2I\w*|I2F\w*|F2FP",
    "integer": r"U?(IMAD|IADD3|LEA|LOP3|SHF|ISETP|V?IMNMX|SEL|PRMT|PLOP3|P2R|SGXT|VIADD)\w*",
    "moves": r"U?MOV|U?CS2R|R2UR|S2R|S2UR|CREG\w*|R2P|ULDC\w*|LDC\w*",
    "shuffles": r"SHFL|VOTE\w*|ELECT",
    "shared memory": r"LDS\w*|STS\w*|LDSM|STSM|MOVM",
    "global memory": r"LDG\w*|STG\w*|RED\w*|ATOM\w*",
    "copies": r"UTMA\w*|UBLK\w*|LDGSTS",
    "barriers": r"SYNCS|BAR|MEMBAR|FENCE|ERRBAR|CCTL\w*|UCGABAR\w*",
    "control": r"BRA|BRX|BSSY|BSYNC|BREAK|CALL|RET|EXIT|NOP|YIELD|NANOSLEEP|WARPSYNC",
}


class Checkout:
    """A process that imports pallas_mgpu from a directory, and answers questions. command: what
    Python runs: it reads a line of JSON for each question, a list, and prints one."""

    def __init__(self, root, *command):
        env = dict(os.environ, PYTHONPATH=str(root), PALLAS_MGPU_NO_CACHE="1")
        env["PALLAS_MGPU_NVRTC_OPTIONS"] = "--no-cache"
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=env,
            cwd="/",
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, *question):
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process that was asked for {question} ended")
        return json.loads(line)


def class_of(op):
    return next((c for c, pattern in CLASSES.items() if re.fullmatch(pattern, op)), op)


def inner_loops(sass):
    """Counts of each innermost loop with tensor-core instructions: labels, and branches back."""
    code, labels = [], {}
    for line in sass.splitlines():
        if m := re.match(r"\s*(\.L_\w+):", line):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*)", line):
            code.append((m[1], m[2]))
    loops = set()
    for k, (op, rest) in enumerate(code):
        target = re.search(r"\.L_\w+", rest) if op == "BRA" else None
        if target and labels.get(target[0], k + 1) <= k:
            loops.add((labels[target[0]], k + 1))
    has = {x for x in loops if any(class_of(op) == "tensor cores" for op, _ in code[slice(*x)])}
    inner = [x for x in has if not any(x[0] <= y[0] and y[1] <= x[1] and x != y for y in has)]
    return [collections.Counter(class_of(op) for op, _ in code[slice(*x)]) for x in sorted(inner)]


def compare_code(old, new, names):
    print("| kernel | loop | class | other | here |\n|---|---:|---|---:|---:|")
    for name in names:
        before, after = (inner_loops(c.ask("sass", name)) for c in (old, new))
        if len(before) != len(after):
            print(f"| {name} | inner loops | | {len(before)} | {len(after)} |")
        for k, (x, y) in enumerate(zip(before, after)):
            for c in sorted(x | y, key=lambda c: -x[c]):
                print(f"| {name} | {k + 1} | {c} | {x[c]} | {y[c]} |{' +' * (y[c] > x[c])}")
            print(f"| {name} | {k + 1} | all | {x.total()} | {y.total()} |")


def compare_times(old, new, names, rounds):
    print(
        "| kernel | other: lowering, printing, ms | here | ratio of the sums |\n|---|---|---|---:|"
    )
    for name in names:
        best = {c: (9e9, 9e9) for c in (old, new)}
        for k in range(rounds):
            for c in (old, new) if k % 2 else (new, old):
                best[c] = tuple(map(min, best[c], c.ask("time", name)))
        text = [f"{best[c][0] * 1e3:.2f}, {best[c][1] * 1e3:.2f}" for c in (old, new)]
        print(f"| {name} | {text[0]} | {text[1]} | {sum(best[new]) / sum(best[old]):.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    args = parser.parse_args()
    roots = Path(args.other).resolve(), HERE.parent
    old, new = (Checkout(root, "-c", WORKER, HERE) for root in roots)
    compare_code(old, new, [n for n in MACHINE_CODE if args.only in n])
    print()
    compare_times(old, new, [n for n in TIMED if args.only in n], args.rounds)


if __name__ == "__main__":
    main()
