"""Kernels in the style of Pallas' Triton backend: staging of products, split rows, indices that
count, blocks that overhang."""

from . import CUDA, PASSES, breaks

TRITON = "language/test_triton_style.py"

breaks(
    f"{PASSES}/stage.c",
    f"{TRITON}::test_copies_ahead",
    f"{TRITON}::test_mha",
    copy_ahead_of_this_step=(
        "stage_copy",
        "const pm_val next = insert_value(g, before, PM_OP_ADD, step",
        "const pm_val next = insert_value(g, before, PM_OP_MUL, step",
    ),
    copy_ahead_without_end=(
        "copy_step",
        "if (!bounded || hi >= least) {",
        "if (!bounded && hi < least) {",
    ),
)
breaks(
    f"{PASSES}/rows.c",
    f"{TRITON}::test_mha",
    parts_count_from_zero=(
        "split",
        "else if (*pm_attr(g, op, PM_ATTR_DIM) == row_of",
        "else if (0 == row_of",
    ),
    parts_begin_at_zero=(
        "cut_ref",
        "starts[dim] = PM_DYNAMIC;",
        "starts[dim ? 0 : 1] = PM_DYNAMIC;",
    ),
)
breaks(
    f"{CUDA}/emit_memory.c",
    f"{TRITON}::test_indices_are_views",
    f"{TRITON}::test_indices_of_two_dims",
    start_of_an_index_is_lost=(
        "fold_index",
        "v->offset += x.constant * dim->inner;",
        "v->offset += 0 * dim->inner;",
    ),
    index_strides_are_lost=(
        "fold_index",
        "v->dim[d].inner += x.coef[d] * dim->inner;",
        "v->dim[d].inner += (x.coef[d] != 0) * dim->inner;",
    ),
)
breaks(
    "pallas_mgpu/_clipped.py",
    f"{TRITON}::test_blocks_in_gmem",
    f"{TRITON}::test_blocks_wholly_outside",
    blocks_may_begin_before=(
        "ClippedRef._inside",
        "conditions.append(x >= -start)",
        "conditions.append(x >= -start - 64)",
    ),
    blocks_end_late=(
        "ClippedRef._inside",
        "conditions.append(x < dim - start)",
        "conditions.append(x <= dim - start)",
    ),
)
breaks(
    "pallas_mgpu/_call.py",
    f"{TRITON}::test_programs_that_share_an_output_block",
    shared_blocks_are_staged=(
        "_Call._choose_forms",
        "parts\n        room = _core",
        "[]\n        room = _core",
    ),
)
breaks(
    f"{CUDA}/emit_exchange.c",
    "arrays/test_products.py::test_few_rows_stay_in_registers",
    every_lane_has_the_rows_that_are_there=(
        "concat_registers",
        "const char *valid = stem ? pm_valid(e, part, stem, source) : NULL;",
        "const char *valid = NULL;",
    ),
)
breaks(
    f"{CUDA}/access.c",
    "arrays/test_products.py::test_transposed_operands_go_through_matrices",
    memory_is_not_transposed=("transpose_access", "v->dim[k] = a->v->dim[1 - k]; }", "}"),
)
breaks(
    f"{PASSES}/smem.c",
    "arrays/test_products.py::test_loops_one_after_the_other_share_what_was_staged",
    loops_share_nothing=("enter_stage", "p->stage.end == p->top[OTHERS]", "false"),
)
