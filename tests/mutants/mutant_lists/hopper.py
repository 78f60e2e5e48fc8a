"""Mutants of device functions, ops and interpreter of what is Hopper's: semaphores, stores to other
blocks, prefetches, copies that combine, atomics, small products, transposes beside SMEM."""

from . import CATALOGUE, CUDA, DEVICE, PASSES, SPECIALISED, breaks

COPIES, SEMAPHORES, SHAPES = (
    "memory/test_copies.py",
    "memory/test_semaphores.py",
    "arrays/test_shapes.py",
)
PTX, MASKS, PRODUCTS = (
    "compiler/test_ptx.py",
    "arrays/test_masks.py",
    "arrays/test_products.py",
)
WIDENING = "compiler/test_widening.py"

# ---- device functions ----------------------------------------------------------------------------

breaks(
    f"{DEVICE}/semaphore.cuh",
    CATALOGUE,
    SEMAPHORES,
    semaphores_of_blocks_begin_at_one=(
        "block_semaphore_init",
        '"r"(s + k * 4), "r"(0)',
        '"r"(s + k * 4), "r"(1)',
    ),
    waits_of_blocks_are_for_more=(
        "block_semaphore_wait",
        "while ((i32)(block_semaphore_load(s) - n) < 0) {}",
        "while ((i32)(block_semaphore_load(s) - n) <= 0) {}",
    ),
    looks_are_at_the_own_gpu=(
        "semaphore_load",
        '"ld.relaxed.sys.global.u32 %0, [%1];"',
        '"ld.relaxed.gpu.global.u32 %0, [%1];"',
    ),
    reads_are_of_the_next_word=(
        "block_semaphore_read",
        "return (i32)block_semaphore_load(s);",
        "return (i32)block_semaphore_load(s + 4);",
    ),
    delays_are_in_microseconds=(
        "delay",
        '"nanosleep.u32 %0;" :: "r"(nanos)',
        '"nanosleep.u32 %0;" :: "r"(nanos * 1000)',
    ),
)
breaks(
    f"{DEVICE}/barrier.cuh",
    CATALOGUE,
    words_go_to_the_barrier=(
        "store_async",
        (
            '"{ .reg .b32 p, q;\\nmapa.shared::cluster.u32 p, %0, '
            "%3;\\nmapa.shared::cluster.u32 q, %2, "
            "%3;\\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [p], %1, "
            '[q]; }"'
        ),
        (
            '"{ .reg .b32 p, q;\\nmapa.shared::cluster.u32 p, %0, '
            "%3;\\nmapa.shared::cluster.u32 q, %2, "
            "%3;\\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [q], %1, "
            '[p]; }"'
        ),
    ),
)
breaks(
    f"{DEVICE}/tma.cuh",
    CATALOGUE,
    COPIES,
    prefetches_of_one_dim_have_two=(
        "tma_prefetch_1d",
        '"cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];"',
        '"cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1}];"',
    ),
    prefetches_of_three_dims_are_transposed=(
        "tma_prefetch_3d",
        '"cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1,%2,%3}];"',
        '"cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%3,%2,%1}];"',
    ),
    prefetches_of_four_dims_are_transposed=(
        "tma_prefetch_4d",
        '"cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];"',
        '"cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%4,%3}];"',
    ),
    prefetches_of_five_dims_are_transposed=(
        "tma_prefetch_5d",
        '"cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1,%2,%3,%4,%5}];"',
        '"cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%2,%1,%3,%4,%5}];"',
    ),
    prefetches_are_one_byte_short=(
        "bulk_prefetch",
        '"cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(src), "r"(bytes) : "memory"',
        '"cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(src), "r"(bytes - 1) : "memory"',
    ),
)
breaks(
    f"{DEVICE}/widen.cuh",
    WIDENING,
    unsigned_bytes_are_one_too_small=(
        "cvt_from_u8x4",
        '"r"(p[k]), "r"(0x64006400u)',
        '"r"(p[k]), "r"(0x64016401u)',
    ),
    unsigned_bytes_are_one_too_small_as_f32=("cvt_from_u8x4", "- 8388608.0f", "- 8388609.0f"),
)

# ---- what csrc/cuda prints -----------------------------------------------------------------------

breaks(
    f"{CUDA}/block.c",
    f"{SPECIALISED}::test_tiles_from_a_counter",
    f"{SPECIALISED}::test_tiles_of_two_counters",
    SEMAPHORES,
    one_lane_is_not_waited_for=(
        "pm_end_of_one_lane",
        "pm_line(e, PM_WARPGROUP_SYNC); pm_line",
        "pm_line",
    ),
    scratch_of_one_lane_is_left_early=(
        "pm_end_of_one_lane",
        "pm_scratch(e)); pm_line(e, PM_WARPGROUP_SYNC); }",
        "pm_scratch(e)); }",
    ),
)
breaks(
    f"{CUDA}/emit_semaphore.c",
    SEMAPHORES,
    all_lanes_signal=(
        "pm_cuda_SIGNAL",
        '"%s%ssemaphore_signal%s(%s, %s);", by_one(e)',
        '"%s%ssemaphore_signal%s(%s, %s);", ""',
    ),
    delays_are_forgotten=("pm_cuda_DELAY", '"delay(%s);"', '"(void)(%s);"'),
    semaphores_lie_a_byte_apart=(
        "semaphore_of",
        "const int scale = global ? 1 : 4;",
        "const int scale = 1;",
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    COPIES,
    half_the_bytes_are_expected=("pm_cuda_ASYNC_STORE", "bytes); e->", "bytes / 2); e->"),
    stores_to_blocks_do_not_combine=(
        "pm_cuda_ASYNC_STORE",
        "e->async.combine = combine ? pm_async_combine",
        "e->async.combine = false ? pm_async_combine",
    ),
    prefetches_go_beyond_the_array=("pm_cuda_PREFETCH", "->bytes);", "->bytes * 4096);"),
)
breaks(
    f"{CUDA}/ptx.c",
    PTX,
    signs_stay_in_names=(
        "op_text",
        "return signs ? text + 1 : text;",
        "return signs ? text : text;",
    ),
    small_halves_are_flushed=(
        "pm_bulk_combine",
        'half && combine == PM_COMBINE_ADD ? ".noftz"',
        'half && combine == PM_COMBINE_MIN ? ".noftz"',
    ),
    bits_of_other_blocks_have_a_sign=(
        "pm_async_combine",
        'const char *as = combine >= PM_COMBINE_AND ? "b32"',
        'const char *as = combine >= PM_COMBINE_AND ? "s32"',
    ),
    counters_are_of_the_block=(
        "pm_lane_combine",
        'name, atomic_where(e, "global"), op',
        'name, atomic_where(e, "shared"), op',
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    PTX,
    parts_of_ptx_are_read_from_the_first=(
        "pm_ptx_read",
        "at = first + (pairs ? 2 : 1) * word;",
        "at = (pairs ? 2 : 1) * word;",
    ),
    words_of_sums_are_exchanged=("pm_ptx_read", "acc, at + 1, acc, at);", "acc, at, acc, at + 1);"),
    the_last_of_ptx_is_not_zero=(
        "pm_ptx_zero",
        'for (int64_t k = 0; k < n; k++) { pm_putf(&t, "%smov.%s %s_%lld, %s;"',
        'for (int64_t k = 0; k < n - 1; k++) { pm_putf(&t, "%smov.%s %s_%lld, %s;"',
    ),
    words_of_a_are_swapped=(
        "pm_ptx_mma",
        '"    \\"{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};\\"\\n    : "',
        '"    \\"{%0,%1,%2,%3}, {%4,%6,%5,%7}, {%8,%9}, {%10,%11,%12,%13};\\"\\n    : "',
    ),
    atomics_are_of_the_block=(
        "atomic_where",
        '"sys.global" : "gpu.global"',
        '"sys.global" : "cta.global"',
    ),
    atomics_of_clusters_are_of_the_block=(
        "atomic_where",
        '"cta.shared" : "cluster.shared::cluster"',
        '"cta.shared" : "cta.shared::cluster"',
    ),
    exchanges_are_other_things=(
        "pm_ptx_atomic",
        'kind == PM_ATOMIC_XCHG ? "exch"',
        'kind == PM_ATOMIC_XCHG ? "or"',
    ),
    numbers_are_bits=(
        "pm_ptx_atomic",
        "if (!half && (minmax || kind == PM_ATOMIC_ADD)) kind_text",
        "if (!half && kind == PM_ATOMIC_ADD) kind_text",
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    PTX,
    MASKS,
    atomics_of_halves_are_tried_once=(
        "put_atomic_loop",
        '"  } while (seen != old);\\n"',
        '"  } while (false);\\n"',
    ),
)
breaks(
    f"{CUDA}/emit_mma.c",
    f"{PRODUCTS}::test_mma",
    rows_of_b_are_as_long_as_those_of_a=(
        "pm_cuda_MMA",
        "m, (long long)k_steps, k, k, (long long)n_steps, n);",
        "m, (long long)k_steps, k, k, (long long)k_steps, n);",
    ),
    words_of_nibbles_overlap=(
        "put_words",
        '"for (int r = 0; r < %lld; r++) pack_nibbles(&%s[r], &%s[r * 8]);", n / of_word',
        '"for (int r = 0; r < %lld; r++) pack_nibbles(&%s[r], &%s[r * 4]);", n / of_word',
    ),
)
breaks(
    f"{PASSES}/transposes.c",
    SHAPES,
    "memory/test_refs.py",
    "memory/test_memory.py",
    refs_turn_the_other_way=(
        "permutation",
        "if (back) out[dims[k]] = k;",
        "if (back) out[k] = dims[k];",
    ),
    loads_turn_the_other_way=(
        "visit_transpose",
        "permutation(g, op, false, dims);",
        "permutation(g, op, true, dims);",
    ),
    transposed_loads_come_after_stores=(
        "visit_transpose",
        "const uint32_t at = position(g, load) + 1;",
        "const uint32_t at = position(g, op);",
    ),
)

# ---- the interpreter -----------------------------------------------------------------------------

INTERP = "csrc/interp"
breaks(
    f"{INTERP}/semaphores.c",
    SEMAPHORES,
    interpreted_waits_are_for_more=(
        "exec_await",
        "(int32_t)(*s - least) < 0;",
        "(int32_t)(*s - least) <= 0;",
    ),
    interpreted_waits_take_nothing=("exec_await", "if (i->flags) *s -= least;", ""),
    interpreted_reads_are_of_another=("exec_read", "(int32_t)*s;", "(int32_t)s[1];"),
    interpreted_signals_wake_nobody=("signal", "pm_vm_wake_at(m, s);", ""),
)
breaks(
    f"{INTERP}/async.c",
    COPIES,
    interpreted_stores_use_the_own_barrier=(
        "exec_async_store",
        "barrier *b = to->bars + (own - t->block->bars);",
        "barrier *b = t->block->bars + (own - t->block->bars);",
    ),
    interpreted_stores_do_not_combine=(
        "run_async_store",
        "if (k->i->to) { pm_dtype as;",
        "if (false) { pm_dtype as;",
    ),
)
breaks(
    f"{INTERP}/matmul.c",
    f"{PRODUCTS}::test_mma",
    interpreted_b_is_transposed=(
        "exec_mma",
        "slot_of(t, i->c), n, k, 1, n, d}",
        "slot_of(t, i->c), n, k, k, 1, d}",
    ),
)
