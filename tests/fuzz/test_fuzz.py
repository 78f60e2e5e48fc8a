"""Random kernels (fuzz/kernels.py): the model in NumPy, the interpreter under several schedules,
the generated program on the CPU and NVRTC's verdict must agree. `fuzz/run_long.py` runs more."""

import pathlib
import re
import time
import warnings

import pytest
from fuzz import generate, kernels

from pallas_mgpu import pl

WAYS = ("interpret", "host", "nvrtc")
FIRST, COUNT = 1_000_000, 300  # seeds of run_long.py begin at 0
# Few kernels that have every pattern of the generator and every op between them. Where they lack
# some, `python -m fuzz.test_fuzz`, in tests/, finds others, in minutes.
COVER = [25, 42, 75, 147, 153, 214, 218, 237, 276, 301, 308, 324, 331, 344, 348, 362, 468, 521,
         542, 544, 555, 557, 585, 616, 623, 632, 640]  # fmt: skip
COVER = [FIRST + k for k in COVER]
MARKS = [(), pytest.mark.long, pytest.mark.long]
SEEDS = [pytest.param(COVER[k::3], id=f"cover{k}", marks=MARKS[k]) for k in range(3)]
SEEDS += [
    pytest.param(range(FIRST + k, FIRST + k + 10), id=str(FIRST + k), marks=pytest.mark.exhaustive)
    for k in range(0, COUNT, 10)
]
REGRESSIONS = sorted(pathlib.Path(kernels.__file__).parent.glob("regressions/*.py"))


def agree(source, name, ways):
    try:
        return kernels.check(kernels.Case(source, name), ways=ways)
    except kernels.Failure as e:
        pytest.fail(f"{e}\n\n{source}", pytrace=False)


@pytest.mark.parametrize("seeds", SEEDS)
def test_random_kernels(seeds):
    ran = [agree(generate.generate(seed).source(), f"seed {seed}", WAYS) for seed in seeds]
    assert sum(map(len, ran)) >= 0.8 * len(seeds) * len(WAYS), "too many kernels meet gaps"


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda p: p.stem)
def test_regressions(path):
    """Small kernels that once failed."""
    assert agree(path.read_text(), path.stem, WAYS)


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(FIRST, FIRST + 60, 10))
def test_random_kernels_on_a_gpu(first):
    for seed in range(first, first + 10):
        agree(generate.generate(seed).source(), f"seed {seed}", ("cuda",))


PATTERNS = {
    "a in registers", "acc store", "activation", "any", "at", "atomic", "barrier test",
    "bitcast of a ref", "bitcast of a target", "broadcast", "check", "combining copy",
    "combining floats", "concatenate", "cond", "copies of warps that their thread awaits",
    "copies that nobody awaits", "copy", "copy out", "delay", "dependent launches", "dot",
    "dynamic loop", "exchange", "fori", "gather", "indexed", "indexed store", "launch",
    "layout", "lazy", "loop", "many points", "masked", "masked store", "math", "math of two", "mma",
    "move", "multicast", "narrow", "narrow store", "nn", "overhang", "own parts", "pad", "peers",
    "phase", "phases that nobody sees", "pipeline", "points", "prefetch", "prod", "producer",
    "reduce", "ring", "scan", "scope",
    "search", "semaphore read", "semaphores", "smem", "softmax", "sort", "source",
    "source in warps", "source of refs", "source of several results", "specialised",
    "store groups", "switch",
    "swizzle", "threads", "tiles", "transpose", "turns in a ring", "union", "upcast", "warps",
    "warps and memory",
    "warps in step", "wgmma", "wgmma of others", "when", "while", "widened",
}  # fmt: skip
OPS = pathlib.Path(__file__).parent.parent.parent / "csrc/ir/ops.def"
NOT_MADE = {
    "debug_print": "it prints, and there is nothing to compare; test_print.py",
    "discard": "what it leaves is undefined, and there is nothing to compare; test_discard.py",
    "named_barrier_arrive": "who comes must be planned for the whole block; test_named_barriers.py",
    "named_barrier_sync": "the same",
    "named_scope": "it takes the time, and there is nothing to compare; test_profile.py",
    "print_layout": "it prints when a kernel is lowered; test_layouts.py",
}
# Kernels of the generator run on a Hopper GPU, and on one device.
BLACKWELL = "it needs Blackwell; fuzz/test_blackwell.py, test_tmem.py, test_tensor_core.py"
MESHES = "it needs a mesh of devices; distributed/test_random.py"
NOT_MADE |= dict.fromkeys(
    """alloc_tmem async_copy_scales_to_tmem async_copy_smem_to_tmem async_load_tmem async_store_tmem
    async_copy_sparse_metadata_to_tmem commit_tmem gather_gmem_to_smem scatter_smem_to_gmem
    query_cluster_cancel try_cluster_cancel tcgen05_commit_arrive tcgen05_mma tmem_reduced
    wait_load_tmem""".split(),
    BLACKWELL,
)
NOT_MADE["size"] = "kernels of the generator have static shapes; test_sizes.py"
NOT_MADE |= dict.fromkeys(
    ["copy_gmem_to_smem_cp_async", "wait_gmem_to_smem"],
    "it needs a GPU before Hopper; test_lane_copies.py",
)
NOT_MADE |= dict.fromkeys(
    "device_ref multicast_ref multimem_load_reduce multimem_store semaphore_of".split(), MESHES
)


def ops_of(text):
    return set(re.findall(r"^ *(?:%[\w, %]+ = )?([a-z]\w*)", text, re.M))


def wanted():
    known = set(re.findall(r'^(?:PM_OP|UNARY|BINARY)\(\w+, "(\w+)"', OPS.read_text(), re.M))
    assert known > set(NOT_MADE)
    return PATTERNS | {f"op {name}" for name in known - set(NOT_MADE)}


def made(seed):
    """The patterns of a seed's kernel, and its ops, if there is no gap."""
    program = generate.generate(seed)
    case = kernels.Case(program.source())
    with pl.enable_debug_checks(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ops = ops_of(case.kernel().lower(*case.operands).as_text("graph"))
        except (NotImplementedError, ValueError) as e:
            assert kernels.GAPS.search(str(e)), (seed, e)
            ops = set()
    return program.features | {f"op {name}" for name in ops}


def test_every_pattern_and_op_is_made():
    """The generator reaches what it knows, and what ops.def has: an op that is new there is made
    by a pattern, or stands in NOT_MADE with its reason."""
    lacks = wanted().difference(*map(made, COVER))
    assert not lacks, "python -m fuzz.test_fuzz, in tests/, looks for kernels with all of them"


def find_cover(seeds):
    """Greedy: the kernel with most that the others lack for its time, again and again."""
    left, found, has, seconds = wanted(), [], {}, {}
    for seed in seeds:
        start = time.process_time()
        has[seed] = made(seed) & left
        seconds[seed] = 0.05 + time.process_time() - start
    while left := left.difference(*(has[seed] for seed in found)):
        best = max(has, key=lambda seed: len(has[seed] & left) / seconds[seed])
        if not has[best] & left:
            raise SystemExit(f"no kernel of these seeds has {sorted(left)}")
        found.append(best)
    return sorted(found)


def test_a_seed_makes_one_kernel():
    assert generate.generate(7).source() == generate.generate(7).source()


def test_the_shrinker_keeps_what_fails(monkeypatch):
    """With a broken interpreter stand-in (sums are one too large), the kernel that remains has
    little but the sum."""
    real = kernels.check

    def broken(case, expected=None, ways=(), seeds=()):
        if ".sum(" in case.source:
            raise kernels.Failure("interpret: wrong result", "a sum")
        return real(case, expected, ways=("interpret",), seeds=(0,))

    monkeypatch.setattr(kernels, "check", broken)
    seed = next(s for s in range(1000) if ".sum(" in generate.generate(s).source())
    program = generate.generate(seed)
    small = kernels.shrink(program, ("interpret",), (0,), budget=300)
    assert ".sum(" in small.source()
    assert len(small.source()) < 0.7 * len(program.source())


if __name__ == "__main__":
    print([seed - FIRST for seed in find_cover(range(FIRST, FIRST + 700))])
