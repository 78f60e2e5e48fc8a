"""Mutants of what moves elements between lanes: layouts by name, shuffles, scans, gathers."""

from . import CUDA, DEVICE, PASSES, SCHEDULE, breaks

MOVES, LAYOUTS, INDEXED = (
    "arrays/test_shapes.py",
    "arrays/test_layouts.py",
    "arrays/test_indexed.py",
)

SWAPPED = (
    "const u32 w = __shfl_xor_sync(0xffffffffu, high ? %s, mask);\n"
    "  first = high ? w : first;\n  second = high ? second : w;\n  #pragma"
)

breaks(
    f"{DEVICE}/thread.cuh",
    "compiler/test_catalogue.py",
    "compiler/test_widening.py",
    scans_take_the_lane_above=("shuffle_up", "r, __shfl_up_sync", "r, __shfl_down_sync"),
    swaps_send_what_stays=("swap_lanes", "first : second,", "second : first,"),
    swaps_take_into_the_other=(
        "swap_lanes",
        "second = high ? second : w;\n  #pragma",
        "second = high ? w : second;\n  #pragma",
    ),
    shuffles_read_their_own_lane=(
        "shuffle_from",
        "w = __shfl_sync(0xffffffffu, w, from);",
        "w = __shfl_sync(0xffffffffu, w, threadIdx.x & 31);",
    ),
)
breaks(
    f"{CUDA}/emit_exchange.c",
    f"{MOVES}::test_moves_in_loops_and_threads",
    f"{MOVES}::test_scans",
    f"{MOVES}::test_traced_indices",
    f"{MOVES}::test_scatters_beyond_the_end",
    f"{LAYOUTS}::test_casts_between_any_two",
    result_is_taken_without_meeting=(
        "pm_take_result",
        "const pm_val out = pm_get(e->g, op)->out; pm_line(e, PM_WARPGROUP_SYNC);",
        "const pm_val out = pm_get(e->g, op)->out;",
    ),
    swaps_are_of_the_next_bit=("pm_by_shuffles", "1 << bit, 1 << bit);", "1 << bit, 2 << bit);"),
    joined_pieces_begin_at_0=("concat_registers", "f.add[dim] = start;", "f.add[dim] = 0;"),
    gathers_are_not_limited=("pm_cuda_GATHER", "pm_type_size(t) - 1));", "pm_type_size(t) - 2));"),
    scatters_write_after_the_end=(
        "pm_cuda_SCATTER",
        '"if (%s%sat < %lluu) st_shared<%s, 1>(%s, &x);"',
        '"if (%s%sat <= %lluu) st_shared<%s, 1>(%s, &x);"',
    ),
    scans_forget_the_first_warps=(
        "scan_lanes",
        '"if (2 - w < (int)warp) %s = %s;"',
        '"if (2 - w <= (int)warp) %s = %s;"',
    ),
    scans_of_lanes_stop_early=("scan_lanes", "step < 32; step *= 2", "step < 16; step *= 2"),
    runs_begin_with_their_own_sum=(
        "scan_lanes",
        'pm_line(e, "x = shuffle_up(x, 1);");',
        "(void)x;",
    ),
)
breaks(
    "csrc/ir/relayout.c",
    f"{LAYOUTS}::test_casts_between_any_two",
    leaving_bits_get_lost=(
        "pm_relayout_plan",
        "reg[0][r] = (atom){leaves.dim, leaves.size, leaves.stride, reg[0][r].div};",
        ";",
    ),
    lanes_never_trade_places=("pm_relayout_plan", "out->permutes |= q != p;", ""),
    words_of_swaps_overlap=("pm_relayout_words", "*apart = 2 * step;", "*apart = step;"),
)
breaks(
    "csrc/ir/layouts.def",
    f"{LAYOUTS}::test_places_of_elements",
    upcast_lanes_in_another_order=(
        "WGMMA_UPCAST_2X",
        "D(-8), D(-4, -2, -3)",
        "D(-8), D(-4, -3, -2)",
    ),
    rhs_lanes_in_another_order=("MMA_RHS", "COPIES(4), D(-3, -4)", "COPIES(4), D(-4, -3)"),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{MOVES}::test_scans",
    f"{MOVES}::test_joining_and_cutting",
    scans_of_splats_are_splats=(
        "mark_op",
        (
            "; case PM_LAY_CONCAT: case PM_LAY_SCATTER: case PM_LAY_SCAN: /* the elements "
            "differ even for splats */ if"
        ),
        "; case PM_LAY_CONCAT: case PM_LAY_SCATTER: if",
    ),
    pieces_follow_without_a_start=(
        "pm_piece_layout",
        "for (uint32_t i = 0; i < k; i++) starts[dim] +=",
        "for (uint32_t i = 0; i < k; i++) starts[dim] =",
    ),
)
breaks(
    f"{CUDA}/access.c",
    INDEXED,
    indices_count_bytes_as_elements=(
        "pm_add_indices",
        "const int64_t scale = gmem ? 1 : pm_dtypes[v->dtype].bytes; address",
        "const int64_t scale = 1; address",
    ),
    swizzles_are_split_before_indices=(
        "split_swizzle",
        "!a->linear || a->v->n_index) return;",
        "!a->linear) return;",
    ),
    indices_are_those_of_the_first_vector=("begin_coords", '"p", of_vector(a, "0"))', '"p", "0")'),
    vectors_begin_at_any_index=("vector_fits", "if (vd->inner % vec ||", "if (vd->inner < 0 ||"),
)
breaks(
    "csrc/ir/view.c",
    INDEXED,
    dims_of_indexed_refs_keep_their_places=(
        "pm_view_of_access",
        "along[dims[d]] = out->dim[d];",
        "along[d] = out->dim[d];",
    ),
)
breaks(
    f"{PASSES}/smem.c",
    f"{MOVES}::test_products_of_threads",
    f"{MOVES}::test_products_of_threads_that_go_apart",
    threads_share_what_is_their_own=(
        "move",
        "*pm_attr(g, op, PM_ATTR_APART) = p->deepest[OWN];",
        "*pm_attr(g, op, PM_ATTR_APART) = 0;",
    ),
    scratch_overlaps_what_threads_own=(
        "pm_plan_smem",
        "p.deepest[REMOTE] + p.deepest[OWN] * g->n_threads;",
        "p.deepest[REMOTE] + p.deepest[OWN];",
    ),
    own_memory_overlaps_that_of_all=(
        "move",
        "*offset += p->deepest[OTHERS] + p->deepest[REMOTE];",
        "*offset += p->deepest[REMOTE];",
    ),
)
TILINGS, PRINTING = "memory/test_tilings.py", "language/test_print.py"
breaks(
    "csrc/ir/view.c",
    TILINGS,
    rows_of_a_tiling_end_with_its_first_dim=(
        "apply_tiling",
        "if (k + 1 < n && tile[k] > 1) n_rows = k + 1;",
        "if (!k && n > 1) n_rows = 1;",
    ),
    columns_of_a_tiling_begin_with_their_tiles=(
        "apply_tiling",
        "stride *= d[n - 1].size / tile[n - 1];",
        "stride *= d[n - 1].size;",
    ),
    folds_with_a_tiled_dim_ignore_the_gap=(
        "fold_pair",
        "slow->inner == fast->outer * (fast->size / fast->tile)",
        "slow->inner >= fast->outer",
    ),
)
breaks(
    f"{PASSES}/transforms.c",
    TILINGS,
    operands_of_more_dims_are_not_inferred=(
        "infer",
        "for (int row = rank - 2; row >= 0; row--) {",
        "for (int row = -1; row >= 0; row--) {",
    ),
)
breaks(
    f"{CUDA}/emit_print.c",
    PRINTING,
    fields_forget_their_fill=("read_field", "if (filled) f.style[0] = *at++;", "if (filled) at++;"),
    fields_forget_their_precision=("read_field", "++; f.precision =", "++;"),
    halves_are_printed_as_floats=("print_arg", "t == PM_F16 ? 11 :", "t == PM_F16 ? 24 :"),
    labels_are_printed_always=(
        "label",
        "if (!*pm_attr(e->g, op, PM_ATTR_LABEL)) return text.at;",
        "",
    ),
)
breaks(
    f"{DEVICE}/print.cuh",
    "compiler/test_print_device.py",
    halves_are_rounded_up=("set", "(!half && n && digit[n - 1] % 2)", "!half"),
    powers_of_two_have_even_neighbours=("set", "m == 1 && ulp > least", "false"),
    small_numbers_have_no_exponent=("print_float", "d.point <= -4 ||", "d.point <= -5 ||"),
)
breaks(
    "pallas_mgpu/_schedule.py",
    f"{SCHEDULE}::test_every_point_once_in_each_round",
    rounds_begin_anew=(
        "_tile_loop",
        "rounds.write(base + total, tile - first)",
        "rounds.write(base + total, base + total)",
    ),
    rounds_all_have_the_first_numbers=(
        "dynamic_scheduling_loop",
        "tile = tile if rounds is None else tile - rounds.base",
        "tile = tile",
    ),
)
