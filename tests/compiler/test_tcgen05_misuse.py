"""Programs for Blackwell with one thing wrong: the emulated machine refuses them, or their results
are wrong, under some of a few schedules."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
from tcgen05_kernels import E8M0, F8, Product

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu.machine.run import SMALL, HostError, packed, program, run_program
from pallas_mgpu.ops import TensorMemoryConfig
from pallas_mgpu.ops._tensor_memory import kernel as matmul_kernel
from pallas_mgpu.ops.matmul import Product as Matmul

f16 = np.dtype(np.float16)


def matmul(pair):
    """Several tiles, a ring that comes round, both accumulators twice."""
    m, n, k = (512, 264, 200) if pair else (384, 136, 200)
    x = Matmul(m, n, k, (f16, f16), f16, False, False)
    config = TensorMemoryConfig(128 if pair else 64, pair, 2, dynamic=False)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(f16) for s in ((m, k), (k, n)))
    return matmul_kernel(x, config, 2, True), [a, b], a.astype(float) @ b.astype(float)


def product(**options):
    case = Product(**options)
    operands = case.operands(np.random.default_rng(0))
    return case.kernel(), case.arranged(operands), case.expected(operands)


def through_registers():
    """A goes to tensor memory by lanes, D twice to registers and back."""

    def body(a, b, o, a_smem, b_smem, a_tmem, acc, full, done):
        plgpu.copy_gmem_to_smem(b, b_smem, full)
        plgpu.barrier_wait(full)
        plgpu.async_store_tmem(a_tmem, plgpu.load(a, layout=plgpu.Layout.TCGEN05, optimized=False))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(a_smem)
        plgpu.barrier_wait(a_smem)
        plgpu.tcgen05_mma(acc, a_tmem, b_smem, done, accumulate=False)
        plgpu.barrier_wait(done)
        plgpu.async_store_tmem(acc, plgpu.async_load_tmem(acc) * 2)
        plgpu.commit_tmem()
        o[...] = plgpu.async_load_tmem(acc)

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(f16) for s in ((128, 64), (64, 64)))
    kernel = plgpu.kernel(
        body,
        out_type=np.zeros((128, 64), np.float32),
        scratch_types=[
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.SMEM((64, 64), f16),
            plgpu.TMEM((128, 64), f16, packed=True),
            plgpu.TMEM((128, 64), np.float32),
            plgpu.Barrier(),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    return kernel, [a, b], 2 * a.astype(float) @ b.astype(float)


def by_launch_control():
    """A block works on the points of blocks that have not begun, in its stead."""

    def body(o, result, told):
        def step(x):
            i, _ = x
            o[i] = 3 * i + 1
            plgpu.commit_smem()
            plgpu.try_cluster_cancel(result, told)
            plgpu.barrier_wait(told)
            (i,), more = plgpu.query_cluster_cancel(result, ("i",))
            return i, more

        lax.while_loop(lambda x: x[1], step, (lax.axis_index("i"), np.bool_(True)))

    kernel = plgpu.kernel(
        body,
        out_type=np.zeros((13,), np.int32),
        grid=(13,),
        grid_names=("i",),
        scratch_types=[plgpu.TryClusterCancelResult(), plgpu.Barrier()],
    )
    return kernel, [], 3 * np.arange(13, dtype=np.int32) + 1


PROGRAMS = {
    "pair": functools.partial(matmul, True),
    "one": functools.partial(matmul, False),
    "registers": through_registers,
    "scales": functools.partial(product, a=F8[0], k=256, scale=E8M0, steps=2),
    "folded": functools.partial(
        product, a=F8[0], k=256, m=64, pair=True, scale=E8M0, b_k_major=True
    ),
    "sparse": functools.partial(product, sparse=True, a=ml_dtypes.bfloat16, k=256),
    "control": by_launch_control,
}

BEFORE_ARRIVAL = r"(// barrier_arrive[^\n]*\n\s*)tcgen05_fence_before\(\);()"

# program, what is replaced (the first match of a regular expression), by what
MUTANTS = {
    "fence": [
        ("pair", r"(mbarrier_wait\(ready[^;]*;\s*)tcgen05_fence_after\(\);", r"\1"),
        ("pair", r"(mbarrier_wait_cluster\(taken[^;]*;\s*)tcgen05_fence_after\(\);", r"\1"),
        ("pair", BEFORE_ARRIVAL, r"\1\2"),
        ("one", BEFORE_ARRIVAL, r"\1if (tid == 0) tcgen05_fence_before();\2"),
        ("one", BEFORE_ARRIVAL + r"(\s*)warpgroup_sync\(wg\);",
         r"\1\2warpgroup_sync(wg);\3tcgen05_fence_before();"),
        ("one", r"(mbarrier_wait\(ready[^;]*;\s*)tcgen05_fence_after\(\);", r"\1"),
        # that of commit_tmem and that before the arrival: one of them is enough
        ("registers", r"tcgen05_fence_before\(\);((?:(?!mma).)*?)tcgen05_fence_before\(\);", r"\1"),
        ("registers", r"(mbarrier_wait\(done[^;]*;[^;]*;\s*)tcgen05_fence_after\(\);", r"\1"),
    ],
    "order": [
        ("pair", r"mbarrier_wait\(ready[^;]*;", ""),
        ("pair", r"mbarrier_wait_cluster\(taken[^;]*;", ""),
        ("pair", r"mbarrier_wait\(full[^;]*;", ""),
        ("one", r"(mbarrier_wait\(empty[^;]*), \w+ & 1\);", r"\1, 0);"),
        ("one", r"fence_proxy_async\(\);", ""),
    ],
    "wait::ld": [
        ("pair", r"tmem_wait_load\(\);", ""),
        ("one", r"tmem_wait_load\(\);", ""),
        ("scales", r"tmem_wait_load\(\);", ""),
        ("registers", r"tmem_wait_load\(\);", ""),
        ("sparse", r"tmem_wait_load\(\);", ""),
    ],
    "wait::st": [
        ("registers", r"tmem_wait_store\(\);", ""),
        ("registers", r"(?s)(tmem_wait_store\(\);.*?)tmem_wait_store\(\);", r"\1"),
        ("registers", r"(?s)(tmem_wait_store\(\);)(.*?)tmem_wait_store\(\);", r"\2\1"),
        ("registers", r"tmem_wait_store\(\);", "tmem_wait_load();"),
        ("registers", r"tmem_wait_store\(\);", "if (false) tmem_wait_store();"),
    ],
    "commit": [
        ("pair", r"(tcgen05_commit_pair\(ready[^;]*)0x3", r"\g<1>0x1"),
        ("pair", r"(tcgen05_commit_pair\(empty[^;]*)0x3", r"\g<1>0x2"),
        ("pair", r"tcgen05_commit_pair\(ready[^;]*;", ""),
        ("pair", r"tcgen05_commit_pair\(ready \+ [^,]*,", "tcgen05_commit_pair(ready,"),
        ("pair", r"(?s)(tcgen05_mma_f16_pair\(.*?)(tcgen05_commit_pair\(ready[^;]*;)", r"\2\1"),
        ("one", r"tcgen05_commit\(empty[^;]*;", ""),
        ("one", r"tcgen05_commit\(ready([^;]*;)", r"tcgen05_commit(empty\1"),
        ("one", r"tcgen05_commit\(empty([^;]*;)", r"mbarrier_arrive(empty\1"),
    ],
    "mapa": [
        ("pair", r"peer_offset\(0\)", "peer_offset(1)"),
        ("pair", r"(mbarrier_arrive_release\(taken[^;]*), 0\)", r"\1, 1)"),
        ("pair", r"full \+ (slot\w* \* 8) \+ peer_offset\(0\)", r"full + \1"),
        ("pair", r"mbarrier_arrive_release\(taken([^;]*), 0\)", r"mbarrier_arrive(taken\1)"),
        ("pair", r"(?s)(peer_offset\(0\).*?)peer_offset\(0\)", r"\1peer_offset(1)"),
    ],
    "expect-tx": [
        ("pair", r"(expect_tx\(full[^;]*), \d+\)", r"\1, 24576)"),
        ("pair", r"(expect_tx\(full[^;]*), \d+\)", r"\1, 49168)"),
        ("pair", r"if \(cluster_rank\(\) == 0\) (mbarrier_arrive_expect)", r"\1"),
        ("pair", r"if \(cluster_rank\(\) == 0\) (mbarrier_arrive_expect)",
         r"if (cluster_rank() == 1) \1"),
        ("one", r"(expect_tx\(full[^;]*), \d+\)", r"\1, 16384)"),
    ],
    "end of a block": [
        ("pair", r"cluster_sync\(\);(?!.*cluster_sync)", ""),
        ("pair", r"(cluster_sync\(\);)(?!.*cluster_sync)", r"if (cluster_rank() == 0) \1"),
    ],
    "allocation": [
        ("pair", r"(tmem_alloc<2>\([^;]*), 256\)", r"\1, 128)"),
        ("pair", r"tmem_dealloc<2>\(tmem, 256\);", ";"),
        ("pair", r"tmem_dealloc<2>\(tmem, 256\)", "tmem_dealloc<2>(tmem, 128)"),
        ("pair", r"tmem_dealloc<2>", "tmem_dealloc<1>"),
        ("one", r"(tmem_alloc<1>[^;]*;\s*)(tmem_relinquish<1>\(\);)", r"\2 \1"),
        ("one", r"tmem_dealloc<1>\(tmem,", "tmem_dealloc<1>(tmem + 32,"),
        ("one", r"(tmem_alloc<1>\([^;]*), 128\)", r"\1, 96)"),
        ("one", r"const u32 acc = tmem \+ 0;", "const u32 acc = tmem + 64;"),
        ("one", r"const u32 acc = tmem \+ 0;", "const u32 acc = 0;"),
        ("one", r"\(warp << 21\)", "(warp << 20)"),
        ("one", r" \+ \(warp << 21\)", ""),
    ],
    "descriptor": [
        ("pair", r"= 0x40004040u", "= 0x40004080u"),
        ("pair", r"= 0x40004040u", "= 0x80004040u"),
        ("pair", r"= 0x40004040u", "= 0x40000040u"),
        ("pair", r", a \+ 2,", ", a + 4,"),
        ("pair", r", b \+ 128,", ", b + 64,"),
        ("one", r"(const u32 a = tcgen05_address\()", r"\g<1>16 + "),
        ("pair", r"(instruction_\w+ = )0x10210010u", r"\g<1>0x10200010u"),
        ("pair", r"(instruction_\w+ = )0x10210010u", r"\g<1>0x10210410u"),
        ("pair", r"(instruction_\w+ = )0x10210010u", r"\g<1>0x08210010u"),
        ("pair", r"(instruction_\w+ = )0x10210010u", r"\g<1>0x10110010u"),
        ("one", r"(tcgen05_mma_f16\([^;]*), accumulate\)", r"\1, true)"),
        ("one", r"(tcgen05_mma_f16\([^;]*), true\)", r"\1, false)"),
    ],
    "launch control": [
        ("control", r"mbarrier_wait\(told[^;]*;", ""),
        ("control", r"mbarrier_arrive_expect_tx\(told, 16\)", "mbarrier_arrive(told)"),
        ("control", r"fence_proxy_async\(\);", ""),
        ("control", r"mbarrier_arrive_expect_tx\(told, 16\)",
         "mbarrier_arrive_expect_tx(told, 32)"),
        ("control", r"if \(!(\w+)\) break;", r"if (!\1 && told_phase) break;"),
        ("control", r"if \(query_cancel\(result, block\)\)", "query_cancel(result, block);"),
        ("control", r"block\[0\] / 1", "block[0] / 2"),
        ("control", r"query_cancel\(result,", "query_cancel(result + 16,"),
    ],
    "scales": [
        ("scales", r"(instruction_28\w+ = )0x28(\w+u)", r"\g<1>0x08\2"),
        ("scales", r"(instruction_48\w+ = 0x48\w*)2(\du)", r"\g<1>1\2"),
        ("scales", r"(instruction_68\w+ = )0x68a", r"\g<1>0x682"),
        ("scales", r"(tcgen05_mma_\w+\([^;]*), a_scale,", r"\1, a_scale + 1,"),
        ("scales", r"a_scale \+ 4", "a_scale"),
        ("scales", r"b_scale \+ 4", "b_scale + 5"),
        ("folded", r"tcgen05_copy_64x128b_warpx2_pair", "tcgen05_copy_32x128b_warpx4_pair"),
        ("folded", r"tcgen05_copy_32x128b_warpx4_pair", "tcgen05_copy_64x128b_warpx2_pair"),
        ("sparse", r"(instruction_\w+5 = 0x\w*)5u", r"\g<1>4u"),
        ("sparse", r"meta \+ 2", "meta + 1"),
        ("sparse", r"tcgen05_copy_128x128b", "tcgen05_copy_64x128b_warpx2"),
    ],
}  # fmt: skip


@functools.cache
def made(name):
    kernel, args, want = PROGRAMS[name]()
    text, info = program(kernel.lower(*args, target="sm_100a"))
    return text, info, [packed(x) if x.dtype.name in SMALL else x for x in args], want


def results(name, text, seed):
    _, info, args, want = made(name)
    out = np.zeros(want.shape, info["params"][len(args)][0])
    run_program(text, info, args, [out], seed)
    return out


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_are_right(name):
    for seed in range(3):
        np.testing.assert_array_equal(results(name, made(name)[0], seed), made(name)[3])


def is_noticed(name, text):
    for seed in range(6):
        try:
            if (results(name, text, seed) != made(name)[3]).any():
                return True
        except HostError:
            return True
    return False


def cases():
    for kind, mutants in MUTANTS.items():
        for k, mutant in enumerate(mutants):
            marks = [] if k < 1 else pytest.mark.long
            yield pytest.param(*mutant, marks=marks, id=f"{kind}-{k}")


@pytest.mark.parametrize("name, old, new", list(cases()))
def test_misuse_is_noticed(name, old, new):
    text = made(name)[0]
    changed = re.sub(old, new, text, count=1, flags=re.DOTALL)
    assert changed != text, "the mutant's line is not in the program"
    assert is_noticed(name, changed)
