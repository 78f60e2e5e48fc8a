"""Mutants of pallas_call and vmap, and of the layout that fused norms take."""

from . import PASSES, breaks

CALL, NORMS = "language/test_call.py", "ops/test_norms.py"

breaks(
    "pallas_mgpu/_call.py",
    CALL,
    sequential_axes_are_swapped=(
        "_Call._run_body",
        "e.programs = tuple(next(it) if i is None else i for i in ids)",
        "e.programs = tuple(steps[-1] if i is None else i for i in ids)",
    ),
    parallel_axes_count_from_the_first=(
        "_Call._run_body",
        '_core.axis_index("grid", e.leading + k)',
        '_core.axis_index("grid", k)',
    ),
    short_axes_are_longer=("_SHORT", "_SHORT = 65535", "_SHORT = 65536 * 2"),
)
breaks(
    "pallas_mgpu/_batch.py",
    CALL,
    outputs_grow_outside_in=(
        "Batch.__init__",
        "zip(reversed(definition.levels), reversed(self.sizes))",
        "zip(definition.levels, self.sizes)",
    ),
    results_are_mapped_in_front=("Batch._add", "axes[k] = a = axis % rank", "axes[k] = a = 0"),
)
breaks(
    "pallas_mgpu/_kernel.py",
    CALL,
    inner_axes_first=(
        "Definition.mapped",
        "out.levels = ((in_axes, out_axes), *self.levels)",
        "out.levels = (*self.levels, (in_axes, out_axes))",
    ),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{NORMS}::test_how_they_move_data",
    words_are_made_for_what_is_reduced=(
        "class_bytes",
        "uint8_t widest = p->widest[root(p, v)];",
        "uint8_t widest = 0 * p->widest[root(p, v)];",
    ),
)
breaks(
    "csrc/ir/view.c",
    "memory/test_strides.py",
    strides_of_operands_are_row_major=(
        "resolve_base",
        "if (g->strides && val->index < g->n_operands && g->strides[val->index])",
        "if (0 && g->strides && val->index < g->n_operands && g->strides[val->index])",
    ),
    strides_matter_to_loads_alone=(
        "take_strides",
        "v->dim[k].inner = v->base_stride[k] = stride[k];",
        "v->dim[k].inner = stride[k];",
    ),
)
breaks(
    "csrc/cuda/block.c",
    "compiler/test_text.py::test_no_line_directive_stands_before_another",
    lines_stand_before_lines=("pm_place", "if (take_back(e)) same_file = false;", ""),
)
