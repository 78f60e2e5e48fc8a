"""Mutants of the passes that take loops and arrays apart."""

from . import CUDA, PASSES, breaks

breaks(
    f"{PASSES}/strips.c",
    "compiler/test_strips.py",
    strips_forget_the_rest=("loop_over", "if (extent % c->strip && !m.code)", "if (0 && !m.code)"),
    strips_of_refs_that_overlap=(
        "may_overlap",
        "return !a || !b || a == b || (is_operand(g, a) && is_operand(g, b));",
        "return false;",
    ),
    strips_count_from_zero=("strip_of_iota", "if (along.i != dim) return i;", "return i;"),
)
breaks(
    f"{PASSES}/roles.c",
    "compiler/test_roles.py",
    roles_go_the_other_way=(
        "loop_of_role",
        "truth[s->taken[group][n++]];",
        "truth[!s->taken[group][n++]];",
    ),
    roles_take_what_both_do=(
        "can_be_split",
        "else if (!pm_is_pure(code) || pm_get(g, op)->n_regions) {",
        "else if (0) {",
    ),
)
breaks(
    f"{CUDA}/access.c",
    "arrays/test_products.py::test_right_operand_of_mma_from_smem",
    right_operands_are_not_transposed=(
        "plan_matrix",
        "transpose_access(&m);",
        "(void)transpose_access;",
    ),
)
breaks(
    f"{PASSES}/ordering.c",
    "memory/test_ordering.py",
    ordering_forgets_other_threads=("walk", "if (forgets) s->n = 0;", "(void)forgets;"),
    ordering_trusts_one_branch=(
        "walk_regions",
        "else keep_common(c->g, s, &inside);",
        "else copy(s, &inside);",
    ),
    ordering_takes_parts_for_wholes=(
        "meet",
        "return is_dense(g, x) && is_dense(g, y) &&",
        "return true || is_dense(g, y) &&",
    ),
    ordering_knows_no_fence=("walk", "effects & E_FENCE)", "effects & 0)"),
)
breaks(
    f"{CUDA}/sanitize.c",
    "runtime/test_sanitize.py",
    checks_allow_one_more=(
        "check_starts",
        "size - span, extent, mask, place_of(e, view), s);",
        "size - span + 1, extent, mask, place_of(e, view), s);",
    ),
    checks_forget_arrays=("pm_inside", "if (dims[d] >= 0) continue;", "continue;"),
    checks_forget_barriers=("pm_check_indices", "a.where == PM_IN_PHASE", "a.where != PM_IN_GMEM"),
)
