"""Mutants of semaphores, tests of barriers, copies that combine, prefetches, stores to other blocks
and inline code."""

from . import CATALOGUE, CUDA, DEVICE, PASSES, breaks

COPIES, INLINE, SEMAPHORES = (
    "memory/test_copies.py",
    "language/test_inline.py",
    "memory/test_semaphores.py",
)

breaks(
    f"{DEVICE}/semaphore.cuh",
    CATALOGUE,
    signals_release_nothing=(
        "semaphore_signal",
        '"red.release.gpu.global.add.u32 [%0], %1;"',
        '"red.relaxed.gpu.global.add.u32 [%0], %1;"',
    ),
    signals_for_the_block_alone=(
        "semaphore_signal",
        '"red.release.sys.global.add.u32 [%0], %1;"',
        '"red.release.cta.global.add.u32 [%0], %1;"',
    ),
    waits_acquire_nothing=(
        "semaphore_acquire",
        'asm volatile("fence.acq_rel.gpu;" ::: "memory");',
        "",
    ),
    waits_for_more_than_asked=(
        "semaphore_wait",
        "while ((i32)(semaphore_load<SYSTEM>(s) - n) < 0)",
        "while ((i32)(semaphore_load<SYSTEM>(s) - n) <= 0)",
    ),
    signed_comparisons=(
        "semaphore_take",
        "old = seen < n ? n : seen; if",
        "old = (i32)seen < (i32)n ? n : seen; if",
    ),
    nothing_is_taken=(
        "block_semaphore_take",
        '"r"(s), "r"(old), "r"(old - n)',
        '"r"(s), "r"(old), "r"(old)',
    ),
    a_warp_clears_at_once=(
        "counters_done_by_warp",
        "__shfl_sync(0xffffffffu, r, 0) != callers - 1",
        "__shfl_sync(0xffffffffu, r, 0) > callers",
    ),
    a_warp_leaves_the_last_word=("counters_done_by_warp", "k <= n; k += 32", "k < n; k += 32"),
    block_signals_are_relaxed=(
        "block_semaphore_signal",
        '"red.release.cta.shared::cta.add.u32 [%0], %1;"',
        '"red.relaxed.cta.shared::cta.add.u32 [%0], %1;"',
    ),
    block_reads_are_relaxed=(
        "block_semaphore_load",
        '"ld.acquire.cta.shared::cta.u32 %0, [%1];"',
        '"ld.relaxed.cta.shared::cta.u32 %0, [%1];"',
    ),
)
breaks(
    f"{DEVICE}/barrier.cuh",
    CATALOGUE,
    tests_of_the_state=(
        "mbarrier_test",
        (
            '"{ .reg .pred p;\\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], '
            '%2;\\nselp.u32 %0, 1, 0, p; }"'
        ),
        (
            '"{ .reg .pred p;\\nmbarrier.test_wait.shared::cta.b64 p, [%1], %2;\\nselp.u32 '
            '%0, 1, 0, p; }"'
        ),
    ),
    words_are_sent_transposed=(
        "st_async",
        (
            '"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], '
            '{%1,%2}, [%3];"'
        ),
        (
            '"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], '
            '{%2,%1}, [%3];"'
        ),
    ),
    far_arrivals_forget_the_bytes=(
        "mbarrier_arrive_expect_tx_cluster",
        '"mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;"',
        '"mbarrier.arrive.shared::cluster.b64 _, [%0], %1;"',
    ),
)
breaks(
    f"{DEVICE}/tma.cuh",
    CATALOGUE,
    prefetches_of_transposed_boxes=(
        "tma_prefetch_2d",
        '"cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1,%2}];"',
        '"cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%2,%1}];"',
    ),
    prefetches_to_l1=(
        "prefetch_global",
        '"prefetch.global.L2 [%0];"',
        '"prefetch.global.L1 [%0];"',
    ),
    what_leaves_first_in_one_dim=(
        "tma_store_evict_first_1d",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2}], [%1], first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%1}], [%2], first; }"'
        ),
    ),
    what_leaves_first_in_two_dims=(
        "tma_store_evict_first_2d",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3}], [%1], first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%3,%2}], [%1], first; }"'
        ),
    ),
    what_leaves_first_in_three_dims=(
        "tma_store_evict_first_3d",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3,%4}], [%1], first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%4,%3,%2}], [%1], first; }"'
        ),
    ),
    what_leaves_first_in_four_dims=(
        "tma_store_evict_first_4d",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3,%4,%5}], [%1], first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3,%5,%4}], [%1], first; }"'
        ),
    ),
    what_leaves_first_in_five_dims=(
        "tma_store_evict_first_5d",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3,%4,%5,%6}], [%1], first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, "
            '{%2,%3,%4,%6,%5}], [%1], first; }"'
        ),
    ),
    what_leaves_first_in_a_row=(
        "bulk_store_evict_first",
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, "
            'first; }"'
        ),
        (
            '"{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0; '
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%2], %1, "
            'first; }"'
        ),
    ),
)
breaks(
    f"{CUDA}/sanitize.c",
    SEMAPHORES,
    nobody_meets_after_a_wait=(
        "pm_print_wait_of_one",
        'arguments); if (!e->lane) pm_line(e, "%s", pm_meet(e)); return;',
        "arguments); return;",
    ),
)
breaks(
    f"{CUDA}/emit_semaphore.c",
    SEMAPHORES,
    semaphores_share_words=(
        "semaphore_of",
        "const int scale = global ? 1 : 4;",
        "const int scale = global ? 1 : 0;",
    ),
    semaphores_begin_at_the_tiles=(
        "pm_cuda_GLOBAL_SEMAPHORE",
        "+ e->first_semaphore;",
        "+ 0 * e->first_semaphore;",
    ),
    waits_take_nothing=(
        "pm_cuda_AWAIT",
        'PM_ATTR_DECREMENT) ? "take" : "wait"',
        'PM_ATTR_DECREMENT) ? "wait" : "wait"',
    ),
    words_of_the_grid_before=(
        "semaphore_of",
        "if (global && e->program->pdl)",
        "if (global && e->program->pdl && false)",
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    SEMAPHORES,
    only_the_arriving_lane_sees_the_phase=(
        "pm_cuda_BARRIER_TEST",
        'e->warps ? "warp_any(%s)" : "lanes_any(wg, %s)"',
        'e->warps ? "warp_any(%s)" : "lanes_all(wg, %s)"',
    ),
    a_test_forgets_the_phase=(
        "pm_cuda_BARRIER_TEST",
        'pm_line(e, "%s ^= %s;", b.phase, shifted(e, "1u", "<<", index));',
        "",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    SEMAPHORES,
    COPIES,
    signals_overtake_the_lanes=(
        "visit_release",
        "p->touched || p->waited || !is_empty(&p->loaded)",
        "false",
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    "compiler/test_ptx.py",
    COPIES,
    bits_have_a_sign=(
        "type_text",
        'return bits ? "b32" : pm_dtypes[as].short_name;',
        'return bits ? "s32" : pm_dtypes[as].short_name;',
    ),
    coordinates_of_combining_boxes=("pm_tma_combine", "k + 2);", "k + 1);"),
)
breaks(
    "csrc/ir/types.c",
    COPIES,
    least_of_signed_numbers_as_unsigned=(
        "pm_combine_atomic",
        "if (minmax && combine >= PM_COMBINE_SMIN) *as = PM_I32;",
        "(void)minmax;",
    ),
    sums_of_floats_as_least=(
        "pm_combine_atomic",
        "{ case PM_COMBINE_ADD: return PM_ATOMIC_ADD",
        "{ case PM_COMBINE_ADD: return PM_ATOMIC_MAX",
    ),
)
breaks(
    f"{PASSES}/copies.c",
    COPIES,
    maps_do_not_know_the_sign=("set_map_dtype", "p->map.dtype = (uint8_t)as;", "(void)as;"),
)
breaks(
    f"{CUDA}/access.c",
    COPIES,
    elements_are_sent_to_one_place=(
        "store_async",
        '"%sfor (int k = 0; k < %lld; k++) %s(%s + k * 4, (%s)[k], %s);"',
        '"%sfor (int k = 0; k < %lld; k++) %s(%s + 0 * k, (%s)[k], %s);"',
    ),
)
breaks(
    f"{CUDA}/emit_inline.c",
    INLINE,
    barriers_lie_side_by_side=(
        "of_barrier",
        "(long long)(view.offset * 8)",
        "(long long)(view.offset * 4)",
    ),
    constants_are_one_register=(
        "of_array",
        '"for (int r = 0; r < %lld; r++) %s[r] = %s;", n, name, p->text',
        '"for (int r = 0; r < %lld; r++) %s[0] = %s;", n, name, p->text',
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{SEMAPHORES}::test_the_last_thing_warps_do",
    counters_are_cleared_before_all_warps=(
        "print_counters_done",
        "if (in_warps) pm_line(e, PM_WARPGROUP_SYNC);",
        "(void)in_warps;",
    ),
)
breaks(
    f"{CUDA}/emit_inline.c",
    f"{INLINE}::test_several_results",
    all_results_are_the_first=(
        "put_results",
        "pm_cpp_type(t->dtype), k,",
        "pm_cpp_type(t->dtype), 0,",
    ),
)
breaks(
    f"{PASSES}/copies.c",
    "memory/test_cluster.py::test_multicast_of_any_pitch",
    copies_alone_are_shared_too=(
        "plan_one",
        "if (p.alone) pm_set_list(g, op, PM_ATTR_CLUSTER, NULL, 0);",
        "",
    ),
)
breaks(
    f"{CUDA}/cluster.c",
    "memory/test_cluster.py::test_leader_waits",
    the_leader_is_this_block=(
        "pm_cluster_leader",
        'once(e, "leader", pm_str(e, "cluster_rank() - (%s)",',
        'once(e, "leader", pm_str(e, "cluster_rank() - 0 * (%s)",',
    ),
)
