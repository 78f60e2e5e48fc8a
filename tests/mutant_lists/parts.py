"""Mutants of the passes that take loops and arrays apart."""

from . import CUDA, PASSES, breaks

breaks(
    f"{PASSES}/strips.c",
    "test_strips.py",
    strips_forget_the_rest=("if (extent % c->strip && !m.code)", "if (0 && !m.code)"),
    strips_of_refs_that_overlap=(
        "return !a || !b || a == b || (is_operand(g, a) && is_operand(g, b));",
        "return false;",
    ),
    strips_count_from_zero=("if (along.i != dim) return i;", "return i;"),
)
breaks(
    f"{PASSES}/roles.c",
    "test_roles.py",
    roles_go_the_other_way=(
        "truth[s->taken[group][n++]];",
        "truth[!s->taken[group][n++]];",
    ),
    roles_take_what_both_do=(
        "} else if (pm_ops[code].effects || pm_get(g, op)->n_regions) {\n      return false;",
        "} else if (0) {\n      return false;",
    ),
)
breaks(
    f"{CUDA}/access.c",
    "test_products.py::test_right_operand_of_mma_from_smem",
    right_operands_are_not_transposed=(
        "a->matrix = by_columns != right ? 2 : 1;",
        "a->matrix = by_columns ? 2 : 1;",
    ),
)
