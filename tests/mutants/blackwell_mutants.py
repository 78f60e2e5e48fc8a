"""Does the emulated machine notice a broken Blackwell kernel of `ops`? Breaks the generated program
at one place at a time.

`python tests/mutants/blackwell_mutants.py [--only TEXT ...] [--jobs N]`

The programs are products of one block and of pairs with cluster launch control, with scales of
blocks, grouped products (sums of groups, too), mixed and gated products, attention and its
gradients, with rings that come round. `WAYS` has the changes of each class; a mutant is one of them
at one place of one program. Of all places of a class the sample has at least `EACH`, spread evenly
over programs and ways. A mutant is noticed if the emulated machine refuses it under one of a few
seeds, or if the results are wrong. Prints each with what noticed it; blackwell_mutants.txt is that
list. test_blackwell_mutants.py runs a few in each run, and all in exhaustive ones."""

import argparse
import dataclasses
import functools
import linecache
import multiprocessing
import re
import signal
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu.machine.run import SMALL, HostError, packed, program, run_program

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
F8, E8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
SEEDS, EACH, LIMIT = range(40), 6, 600

# ---- programs ------------------------------------------------------------------------------------


def integers(*shape, dtype=F16, seed=0):
    return np.random.default_rng([seed, *shape]).integers(-3, 4, shape).astype(dtype)


def product(m, n, k, *config):
    a, b = integers(m, k), integers(k, n, seed=1)
    return ops.matmul, (a, b), dict(config=ops.TensorMemoryConfig(*config))


def scaled():
    a, b = integers(640, 512, dtype=F8), integers(256, 512, dtype=F8, seed=1)
    scales = [np.exp2(integers(len(x), 16, dtype=F32, seed=2)).astype(E8) for x in (a, b)]
    a_scale, b_scale = map(plgpu.ext.format_tcgen05_scales, scales)
    config = ops.TensorMemoryConfig(128, False, 2, dynamic=False)
    how = dict(transpose_b=True, out_dtype=F32, config=config)
    return ops.matmul, (a, b), dict(scale_a=a_scale, scale_b=b_scale, **how)


def grouped():
    sizes = np.array([3, 0, 150, 70, 29], np.int32)
    config = ops.TensorMemoryConfig(64, False, 2, dynamic=False)
    args = integers(300, 200), integers(5, 200, 136, seed=1), sizes
    return ops.ragged_dot, args, dict(config=config)


def softmax(dim, causal):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, dim)).astype(F16) for n in (300, 520, 520))
    k = (k * np.linspace(0.2, 3, 520)[:, None, None]).astype(F16)  # maxima that grow
    how = dict(causal=causal, config=ops.TensorMemoryAttentionConfig(2))
    return ops.attention, (q, k, v), how


def mixed():
    x, w = integers(70, 512), integers(200, 512, dtype=np.int8, seed=1)
    scales = np.exp2(integers(4, 200, dtype=F32, seed=2))
    config = ops.TensorMemoryMixedConfig(32, 3, 64)
    return ops.mixed_matmul, (x, w, scales), dict(config=config)


def gated():
    """Pairs, a ring that comes round, several tiles of each."""
    x, gate, up = integers(640, 200), integers(200, 264, seed=1), integers(200, 264, seed=2)
    config = ops.TensorMemoryConfig(256, True, 2, dynamic=False)
    return ops.gated_matmul, (x, gate, up), dict(config=config, activation="relu")


def summed():
    sizes = np.array([3, 0, 150, 70, 29], np.int32)
    config = ops.TensorMemoryConfig(64, False, 2, dynamic=False)
    args = integers(300, 136), integers(300, 72, seed=1), sizes
    return ops.transposed_ragged_dot, args, dict(config=config)


def gradients(which):
    """By five products ("all"), and two kernels of seven. One block of keys, so that nothing
    depends on the order of sums."""
    rng = np.random.default_rng(0)
    q, grad = (rng.standard_normal((1, 360, 1, 64)).astype(F16) for _ in range(2))
    k, v = (rng.standard_normal((1, 360 if which == "queries" else 120, 1, 64)) for _ in range(2))
    k, v = k.astype(F16), v.astype(F16)
    lse, delta = np.full((1, 1, 384), 9, F32), rng.standard_normal((1, 1, 384)).astype(F32)
    how = dict(config=ops.TensorMemoryBackwardConfig(), deterministic=which != "all")
    f = ops.attention_backward.kernel(grad, q, k, v, q, lse[:, :, :360], **how)
    kernel = f.fused.fused if which == "all" else f.by_keys if which == "keys" else f.by_queries
    return kernel, (grad, q, k, v, lse, delta), None


PROGRAMS = {
    "matmul": lambda: product(384, 136, 200, 64, False, 2),
    "matmul, pairs": lambda: product(768, 264, 200, 128, True, 2),
    "matmul, dealt out": lambda: product(512, 136, 200, 64, False, 2, 2, 8, 128, False),
    "matmul, scales": scaled,
    "ragged": grouped,
    "ragged, sums": summed,
    "mixed": mixed,
    "gated": gated,
    "attention": lambda: softmax(64, False),
    "gradients": lambda: gradients("all"),
    "gradients of keys": lambda: gradients("keys"),
    "gradients of queries": lambda: gradients("queries"),
}


@dataclasses.dataclass
class Program:
    text: str
    info: dict
    args: list
    want: bytes = b""

    def run(self, text, seed):
        outs = []
        for dtype, shape, *_ in self.info["params"][len(self.args) :]:
            outs.append(np.zeros(shape, getattr(ml_dtypes, dtype, None) or np.dtype(dtype)))
        run_program(text, self.info, self.args, outs, seed)
        return b"".join(x.tobytes() for x in outs)


@functools.cache
def made(name):
    f, args, options = PROGRAMS[name]()
    if options is None:  # it is a kernel
        text, info = program(f.lower(*args, target="sm_100a"))
        p = Program(text, info, list(args))
        p.want = p.run(text, 0)
        return p
    given = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    real, plgpu.sm_count = plgpu.sm_count, lambda device=None: 2
    try:
        f.maker.forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = f.kernel(*args, **options)
    finally:
        plgpu.sm_count = real
        f.maker.forget()
    args = [*args, *given.values()]
    text, info = program(kernel.lower(*args, target="sm_100a"))
    p = Program(text, info, [packed(x) if x.dtype.name in SMALL else x for x in args])
    p.want = p.run(text, 0)
    return p


# ---- mutants -------------------------------------------------------------------------------------


def hexadecimal(change):
    """A constant of the program with some bits changed."""
    return lambda m: f"{m[1]}0x{change(int(m[2], 16)):x}u"


def flipped(bit):
    return hexadecimal(lambda x: x ^ 1 << bit)


def half(m):
    return f"{m[1]}{int(m[2]) // 2}"


INSTRUCTION, MATRIX = r"(instruction_\w+ = )0x(\w+)u", r"(matrix_\w+ = )0x(\w+)u"
BARRIERS = r"(?!next_point)"  # those of cluster launch control have a class of their own

WAYS = {  # class: (what, pattern, what replaces it)
    "fence": [
        ("no fence after", r"tcgen05_fence_after\(\);", ";"),
        ("no fence before", r"tcgen05_fence_before\(\);", ";"),
        (
            "fence before after the barrier",
            r"tcgen05_fence_before\(\);(\s*)warpgroup_sync\(wg\);",
            r"warpgroup_sync(wg);\1tcgen05_fence_before();",
        ),
    ],
    "wait::ld": [
        ("no wait", r"tmem_wait_load\(\);(?=\s*pin_)", ";"),
        ("wait for stores", r"tmem_wait_load\(\);(?=\s*pin_)", "tmem_wait_store();"),
    ],
    "wait::st": [
        ("no wait", r"tmem_wait_store\(\);", ";"),
        ("wait for loads", r"tmem_wait_store\(\);", "tmem_wait_load();"),
    ],
    "proxy fence": [
        ("no fence", r"fence_proxy_async\(\);", ";"),
        ("fence of one warp", r"fence_proxy_async\(\);", "if (warp == 0) fence_proxy_async();"),
    ],
    "commit": [
        ("no commit", r"tcgen05_commit(_pair)?\([^;]*;", ";"),
        ("commit for the first block", r"(tcgen05_commit_pair\([^;]*)0x3", r"\g<1>0x1"),
        ("commit for the other block", r"(tcgen05_commit_pair\([^;]*)0x3", r"\g<1>0x2"),
        ("plain arrival", r"tcgen05_commit\(", "mbarrier_arrive("),
    ],
    "expect-tx": [
        (
            "16 bytes less",
            rf"(expect_tx\({BARRIERS}[^;]*, )(\d+)\)",
            lambda m: f"{m[1]}{int(m[2]) - 16})",
        ),
        (
            "16 bytes more",
            rf"(expect_tx\({BARRIERS}[^;]*, )(\d+)\)",
            lambda m: f"{m[1]}{int(m[2]) + 16})",
        ),
    ],
    "allocation": [
        ("half the columns", r"(tmem_alloc<\d>\([^;]*, )(\d+)", half),
        ("no deallocation", r"tmem_dealloc<\d>\([^;]*;", ";"),
        ("half is deallocated", r"(tmem_dealloc<\d>\(tmem, )(\d+)", half),
        (
            "relinquished first",
            r"(tmem_alloc<\d>\([^;]*;\s*)(tmem_relinquish<\d>\(\);)",
            r"\2 \1",
        ),
    ],
    "descriptor": [
        ("other stride", MATRIX, hexadecimal(lambda x: x ^ 0xC0)),
        ("other swizzle", MATRIX, hexadecimal(lambda x: x ^ 0x80000000 ^ 0x40000000)),
        ("other step of A", r", a \+ 2,", ", a + 4,"),
        ("other step of B", r", b \+ (\d+),", lambda m: f", b + {2 * int(m[1])},"),
        ("half of N", INSTRUCTION, hexadecimal(lambda x: x & ~(63 << 17) | (x >> 18 & 31) << 17)),
        ("other type of A", INSTRUCTION, hexadecimal(lambda x: x ^ 1 << 7)),
        ("first product adds", r"(tcgen05_mma_\w+\([^;]*), accumulate\)", r"\1, true)"),
    ],
    "scale": [
        ("other scales of A", r"(instruction_[2468a-f]\w* = )0x(\w+)u", flipped(29)),
        ("other scales of B", r"(instruction_\w+ = )0x(\w+[02468ace][89a-f]\w{5})u", flipped(4)),
        ("other column of A", r"(tcgen05_mma_mx\w+\([^;]*), (\w*a_scale\w*),", r"\1, \2 + 4,"),
        ("other column of B", r"(tcgen05_mma_mx\w+\([^;]*), (\w*b_scale\w*),", r"\1, \2 + 4,"),
        ("no copy", r"tcgen05_copy_\w+\([^;]*;", ";"),
    ],
    "launch control": [
        ("no wait", r"mbarrier_wait(_cluster)?\(next_point[^;]*;", ";"),
        ("no request", r"try_cancel\(next_point[^;]*;", ";"),
        ("other bytes", r"(expect_tx\(next_point[^;]*), 16\)", r"\1, 32)"),
        ("no arrival", r"mbarrier_arrive(_release)?\(next_point[^;]*;", ";"),
        ("other answer", r"query_cancel\(next_point \+ v_\d+ \* 16", "query_cancel(next_point"),
        ("every point is taken", r"if \(query_cancel\(([^;]*)\)\)", r"query_cancel(\1);"),
        ("other place", r"try_cancel\(next_point \+ v_\d+ \* 16", "try_cancel(next_point"),
    ],
    "arrive": [
        ("no arrival", rf"mbarrier_arrive(_release)?\({BARRIERS}[^;]*;", ";"),
        ("one more counts", r"(mbarrier_init\([^;]*, )(\d+)", lambda m: m[1] + str(int(m[2]) + 1)),
        ("other block", r"(mbarrier_arrive_release\((?!next)[^;]*), 0\)", r"\1, 1)"),
        ("other block's bytes", r"peer_offset\(0\)", "peer_offset(1)"),
    ],
    "wait": [
        ("no wait", rf"mbarrier_wait(_cluster)?\({BARRIERS}[^;]*;", ";"),
        ("other phase", rf"(mbarrier_wait(?:_cluster)?\({BARRIERS}[^;]*) & 1\);", r"\1 & 1 ^ 1);"),
    ],
}  # fmt: skip


@dataclasses.dataclass
class Mutant:
    kind: str
    name: str
    program: str
    text: str


def place_of(text, at):
    """ "_common.py: the line of Python", from the comment above."""
    above = re.findall(r"// (?:\w+  )?(\S+\.py):(\d+)$", text[:at], re.M)
    if not above:
        return "the prologue"
    file, line = above[-1]
    path = Path(ops.__file__).parent / file
    return f"{file}: {linecache.getline(str(path), int(line)).strip()}"


def mutants():
    """All, by class."""
    found = {kind: [] for kind in WAYS}
    for name in PROGRAMS:
        text = made(name).text
        for kind, ways in WAYS.items():
            if kind == "scale" and "scales" not in name:
                continue
            for what, pattern, new in ways:
                for k, m in enumerate(re.finditer(pattern, text)):
                    put = new(m) if callable(new) else m.expand(new)
                    changed = text[: m.start()] + put + text[m.end() :]
                    if changed == text:
                        continue
                    label = f"{name}: {kind}: {what} #{k} in {place_of(text, m.start())}"
                    if not reason(label):
                        found[kind].append(Mutant(kind, label, name, changed))
    return found


# pattern of names: why such a mutant changes nothing that may be seen
NO_ACCESS = "the thread makes no access of tensor memory after this wait"
LATER = "the epilogue has awaited a later commit of the same thread; nothing follows"
END = "blocks of a cluster end together"
SCHEDULER = "the ring of tile indices orders the same accesses, after the fence"
SCORES = (
    "the correction warpgroup, which waits, accesses other columns; p_ready tells the multiplier"
)
CONVERTED = "a wait for converted weights, with a fence, follows before the product"
TOLD = "the arrival before, at converted, has told the multiplier of the stores"

STORES = "stores with a fence follow, and p_ready, before the commit that also frees the slot"
BOTH = "the release of the slot, which follows the loads, has a fence, too"
RELEASED = (
    "the producer makes no access of tensor memory; the multiplier is told by another arrival"
)
MET = "the warps also meet before the fence, which so comes after all their accesses"
LANES = "it ends code of one lane or of warps, and the thread accesses no tensor memory afterwards"
NEXT = "the thread's next access of tensor memory comes after another wait with its fence"
EPILOGUE = "the epilogue's fence of the next tile comes after the reads of all threads"

EQUIVALENT = {
    r": fence: .* in \S+: (return lax.fori_loop|plgpu.tcgen05_commit_arrive|.*n=last)": LANES,
    r"no fence after #\d+ in _common.py: .*self.empty": NO_ACCESS,
    r": wait: no wait #\d+ in _common.py: .*n=last": LATER,
    r"^matmul, pairs: launch control: no wait #[23] ": END,
    r"^matmul(, pairs)?: fence: fence before after the barrier ": SCHEDULER,
    r"^attention: fence: (no fence before|fence before after the barrier) .*factors_ready": SCORES,
    r"^mixed: fence: no fence after .*self.taken": CONVERTED,
    r"^mixed: fence: (no fence before|fence before after the barrier) .*self.empty": TOLD,
    r"^(ragged, sums|gradients.*): fence: .*barrier_arrive\(self.empty": RELEASED,
    r"^gradients of keys: fence: no fence after .*self.p_free": NEXT,
    r"^gradients of keys: fence: (no fence before|fence before after .*) #.*self.p_ready": BOTH,
    r"^matmul: proxy fence: .* in _tensor_memory.py: return loop": EPILOGUE,
    r"^gradients of keys: proxy fence: no fence #[03] ": STORES,
    r"^gradients: proxy fence: fence of one warp #[25] ": MET,
    r"^gradients of keys: proxy fence: fence of one warp #[0235] ": MET,
    r"^gradients of queries: proxy fence: fence of one warp #1 ": MET,
}


def reason(name):
    return next((why for pattern, why in EQUIVALENT.items() if re.search(pattern, name)), None)


def sample():
    """At least EACH of each class (all, where there are fewer), the same ones in each run: in turn
    from the groups of one program and one way."""
    out = []
    for found in mutants().values():
        groups = {}
        for m in found:
            groups.setdefault(m.name.partition(" #")[0], []).append(m)
        rows = [list(g) for g in groups.values()]
        taken, most = [], max(EACH, len(rows))
        while len(taken) < most and any(rows):
            for row in rows:
                if row and len(taken) < most:
                    taken.append(row.pop(len(row) // 2))
        out += taken
    return out


def verdict(mutant):
    """What notices it, None: nothing does."""
    p = made(mutant.program)
    for seed in SEEDS:
        try:
            got = p.run(mutant.text, seed)
        except HostError as e:
            return f"emulated machine: {e.what or e}"
        if got != p.want:
            return "emulated machine: wrong result"
    return None


# ---- all of them ---------------------------------------------------------------------------------


class Hang(BaseException):
    pass


def hang(*_):
    raise Hang


def judge(mutant):
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        return mutant.name, verdict(mutant)
    except Hang:
        return mutant.name, None
    finally:
        signal.alarm(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    found = [m for m in sample() if all(x in m.name for x in options.only)]
    lost = 0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for name, by in pool.imap(judge, found):
            says = (by or "NOT NOTICED").splitlines()[0]
            print(f"{name}\n    {re.sub(r'[0-9]+', 'N', says)[:100]}", flush=True)
            lost += by is None
    share = 100 * (1 - lost / max(len(found), 1))
    print(f"{len(found) - lost} of {len(found)} noticed: {share:.1f} %")
    return 0 if share >= 98 else 1


if __name__ == "__main__":
    sys.exit(main())
