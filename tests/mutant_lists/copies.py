"""Mutants of semaphores, tests of barriers, copies that combine, prefetches, stores to other blocks
and inline code."""

from . import CATALOGUE, CUDA, DEVICE, PASSES, breaks

COPIES, INLINE, SEMAPHORES = "test_copies.py", "test_inline.py", "test_semaphores.py"

breaks(
    f"{DEVICE}/semaphore.cuh",
    CATALOGUE,
    signals_release_nothing=("red.release.gpu.global", "red.relaxed.gpu.global"),
    signals_for_the_block_alone=("red.release.sys.global", "red.release.cta.global"),
    waits_acquire_nothing=('asm volatile("fence.acq_rel.gpu;" ::: "memory");', ""),
    waits_for_more_than_asked=(
        "while (semaphore_load<SYSTEM>(s) < n)",
        "while (semaphore_load<SYSTEM>(s) <= n)",
    ),
    signed_comparisons=(
        "old = seen < n ? n : seen;\n    if",
        "old = (i32)seen < (i32)n ? n : seen;\n    if",
    ),
    nothing_is_taken=('"r"(s), "r"(old), "r"(old - n)', '"r"(s), "r"(old), "r"(old)'),
    a_warp_clears_at_once=(
        "__shfl_sync(0xffffffffu, r, 0) != callers - 1",
        "__shfl_sync(0xffffffffu, r, 0) > callers",
    ),
    a_warp_leaves_the_last_word=("k <= n; k += 32", "k < n; k += 32"),
    block_signals_are_relaxed=("red.release.cta.shared", "red.relaxed.cta.shared"),
    block_reads_are_relaxed=("ld.acquire.cta.shared", "ld.relaxed.cta.shared"),
)
breaks(
    f"{DEVICE}/barrier.cuh",
    CATALOGUE,
    tests_of_the_state=("mbarrier.test_wait.parity.shared", "mbarrier.test_wait.shared"),
    words_are_sent_turned=(
        'v2.b32"\n                 " [%0], {%1,%2}, [%3];',
        'v2.b32"\n                 " [%0], {%2,%1}, [%3];',
    ),
    far_arrivals_forget_the_bytes=(
        "mbarrier.arrive.expect_tx.shared::cluster",
        "mbarrier.arrive.shared::cluster",
    ),
)
breaks(
    f"{DEVICE}/tma.cuh",
    CATALOGUE,
    prefetches_of_turned_boxes=(
        "tensor.2d.L2.global.tile [%0, {%1,%2}];",
        "tensor.2d.L2.global.tile [%0, {%2,%1}];",
    ),
    prefetches_to_l1=('"prefetch.global.L2 [%0];"', '"prefetch.global.L1 [%0];"'),
    what_leaves_first_in_one_dim=("[%0, {%2}], [%1], first", "[%0, {%1}], [%2], first"),
    what_leaves_first_in_two_dims=("{%2,%3}], [%1], first", "{%3,%2}], [%1], first"),
    what_leaves_first_in_three_dims=("{%2,%3,%4}], [%1], first", "{%4,%3,%2}], [%1], first"),
    what_leaves_first_in_four_dims=("{%2,%3,%4,%5}], [%1], first", "{%2,%3,%5,%4}], [%1], first"),
    what_leaves_first_in_five_dims=("%4,%5,%6}], [%1], first", "%4,%6,%5}], [%1], first"),
    what_leaves_first_in_a_row=("[%0], [%1], %2, first", "[%0], [%2], %1, first"),
)
breaks(
    f"{CUDA}/emit_semaphore.c",
    SEMAPHORES,
    semaphores_share_words=(
        "const int scale = global ? 1 : 4;",
        "const int scale = global ? 1 : 0;",
    ),
    semaphores_begin_at_the_tiles=("+ e->first_semaphore;", "+ 0 * e->first_semaphore;"),
    nobody_meets_behind_a_wait=('  if (!e->lane) pm_line(e, "%s", pm_meet(e));\n', ""),
    waits_take_nothing=(
        'PM_ATTR_DECREMENT) ? "take" : "wait"',
        'PM_ATTR_DECREMENT) ? "wait" : "wait"',
    ),
    words_of_the_grid_before=(
        "if (global && e->program->pdl)",
        "if (global && e->program->pdl && false)",
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    SEMAPHORES,
    only_the_arriving_lane_sees_the_phase=(
        'e->warps ? "warp_any(%s)" : "lanes_any(wg, %s)"',
        'e->warps ? "warp_any(%s)" : "lanes_all(wg, %s)"',
    ),
    a_test_forgets_the_phase=('  pm_line(e, "%s ^= 1u << (%s);", b.phase, index);\n', ""),
)
breaks(
    f"{PASSES}/sync.c",
    SEMAPHORES,
    COPIES,
    signals_overtake_the_lanes=(
        "if (p->touched || p->waited || !is_clean(&p->loaded)) place_release(p, block, k);",
        "if (false) place(p, block, k);",
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    "test_families.py",
    COPIES,
    bits_have_a_sign=(
        'return bits ? "b32" : pm_dtypes[as].short_name;',
        'return bits ? "s32" : pm_dtypes[as].short_name;',
    ),
    coordinates_of_combining_boxes=("k + 2);", "k + 1);"),
)
breaks(
    "csrc/ir/types.c",
    COPIES,
    least_of_signed_numbers_as_unsigned=(
        "if (minmax && combine >= PM_COMBINE_SMIN) *as = PM_I32;",
        "(void)minmax;",
    ),
    sums_of_floats_as_least=(
        "case PM_COMBINE_ADD: return PM_ATOMIC_ADD;",
        "case PM_COMBINE_ADD: return PM_ATOMIC_MAX;",
    ),
)
breaks(
    f"{PASSES}/copies.c",
    COPIES,
    maps_do_not_know_the_sign=("p->map.dtype = (uint8_t)as;", "(void)as;"),
)
breaks(
    f"{CUDA}/access.c",
    COPIES,
    elements_are_sent_to_one_place=("%s(%s + k * 4, (%s)[k], %s);", "%s(%s + 0 * k, (%s)[k], %s);"),
)
breaks(
    f"{CUDA}/emit_inline.c",
    INLINE,
    barriers_lie_side_by_side=("(long long)(view.offset * 8)", "(long long)(view.offset * 4)"),
    constants_are_one_register=(
        'for (int r = 0; r < %lld; r++) %s[r] = %s;", n, name, p->text',
        'for (int r = 0; r < %lld; r++) %s[0] = %s;", n, name, p->text',
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{SEMAPHORES}::test_the_last_thing_warps_do",
    counters_are_cleared_before_all_warps=(
        "    if (in_warps) pm_line(e, PM_WARPGROUP_SYNC);\n",
        "    (void)in_warps;\n",
    ),
)
breaks(
    f"{CUDA}/emit_inline.c",
    f"{INLINE}::test_several_results",
    all_results_are_the_first=("pm_cpp_type(t->dtype), n++,", "pm_cpp_type(t->dtype), n,"),
)
breaks(
    f"{PASSES}/copies.c",
    "test_cluster.py::test_multicast_of_any_pitch",
    copies_alone_are_shared_too=(
        "  if (p.alone) pm_set_list(g, op, PM_ATTR_CLUSTER, NULL, 0);\n",
        "",
    ),
)
breaks(
    f"{CUDA}/cluster.c",
    "test_cluster.py::test_leader_waits",
    the_leader_is_this_block=(
        'once(e, "leader", pm_str(e, "cluster_rank() - (%s)",',
        'once(e, "leader", pm_str(e, "cluster_rank() - 0 * (%s)",',
    ),
)
