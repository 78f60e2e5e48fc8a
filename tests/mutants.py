"""Does the suite notice a broken generator? Breaks it on purpose, one small change at a time.

`python tests/mutants.py [--only NAME ...] [--jobs N] [--list]`

Each mutant is a text of a source file and what replaces it. It is applied to a copy of the tree,
built incrementally, and the tests run until the first one fails: those named with the mutant, then
the rest of the suite (sixty of its random kernels), all of it without a GPU. In the end the tests
that noticed something run once more without a mutant: those that fail then have noticed nothing.
Prints a table and the share of noticed mutants; below 95 % it fails. A text that is not in its file
exactly once is stale and stops the run before it begins. Tests or a build that do not start at all
are an error of the mutant."""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA, DEVICE, PASSES = "csrc/cuda", "csrc/cuda/device", "csrc/passes"
PIPELINE = "pallas_mgpu/_pipeline.py"
LIMIT = 300  # seconds for the tests of one mutant

ARRAYS, CONTROL, MEMORY = "test_arrays.py", "test_control.py", "test_memory.py"
PIPES, DOCUMENTS, HOST = "test_pipeline.py", "test_documents.py", "test_host.py"
TEXT, CATALOGUE, ERRORS = "test_text.py", "test_catalogue.py", "test_errors.py"
RUNTIME, SURFACE = "test_runtime.py", "test_surface.py"
CLUSTER, SPECIALISED, WS = "test_cluster.py", "test_specialised.py", "test_ws_steps.py"
TURNS, SCHEDULE = "test_turns.py", "test_schedule.py"
ATTENTION, WS_PIPELINE = "test_attention.py", "test_ws_pipeline.py"
FUZZ = [f"test_fuzz.py::test_random_kernels[{1_000_000 + 10 * k}]" for k in range(6)]
ALL = [MEMORY, ARRAYS, PIPES, TEXT, *FUZZ, CLUSTER, SPECIALISED, WS, CONTROL, DOCUMENTS, CATALOGUE]
ALL += [HOST, ERRORS, SURFACE, RUNTIME, TURNS, SCHEDULE, ATTENTION, WS_PIPELINE]

# Of the tests that come first, those that have several ways go the one that sees most.
FIRST_WAY = ["-k", "not interpret"]
# name: (file, text, what replaces it, tests that come first)
MUTANTS = {}


def breaks(file, *tests, **mutants):
    for name, (old, new) in mutants.items():
        name = name.replace("_", "-")
        assert name not in MUTANTS and old != new, name
        MUTANTS[name] = file, old, new, tests


# Texts around those that are there more than once.
LEAVE = "  return PM_OK;\n}\n\n"
ONE_LANE = '  if (!e->lane) pm_begin(e, PM_ONE_LANE " {");\n'
NEXT_TILE = """\
  if (e->lane) return PM_OK;
  pm_line(e, "st_shared<i32, 1>(%s, &%s);", pm_scratch(e), x);
  pm_end(e);
"""
SHARE_TILE = """\
  pm_line(e, "%s = %s;", x, behind_first(e, in));
  pm_line(e, "st_shared<i32, 1>(%s, &%s);", pm_scratch(e), x);
  pm_end(e);
"""
TAKER = '  pm_begin(e, "%s {", pm_taker(e, true));\n'
BEGIN_FOR = '  pm_begin(e, "for (i32 %s = %s; %s < %s; %s++) {", i, lower, i, upper, i);\n'
UNPACK_FOR = "  unpack_carries(e, op, index + 1, words);\n"
BEGIN_WHILE = '  pm_begin(e, "for (;;) {");\n'
UNPACK_WHILE = "  unpack_carries(e, op, body_args, words);\n"


# ---- addresses of registers ----------------------------------------------------------------------

breaks(
    f"{CUDA}/access.c",
    f"{MEMORY}::test_vectors_begin_where_they_may",
    f"{ARRAYS}::test_add_one",
    f"{TEXT}::test_offsets_of_large_arrays_have_64_bits",
    f"{ARRAYS}::test_reductions",
    f"{MEMORY}::test_index_forms",
    *FUZZ,
    lane_digits_count_in_twos=(
        "for (uint32_t k = n; k-- > 0; div *= d[k].size) {\n      if (d[k].dim < 0) continue;",
        "for (uint32_t k = n; k-- > 0; div *= part == LANE ? 2 : d[k].size) {\n"
        "      if (d[k].dim < 0) continue;",
    ),
    mask_takes_one_too_many=(
        'pm_putf(&t, " < %lld", (long long)extent(l, d));',
        'pm_putf(&t, " <= %lld", (long long)extent(l, d));',
    ),
    mask_forgets_one_of_padding=(
        "l->padded[dim] > extent(l, dim);",
        "l->padded[dim] > extent(l, dim) + 1;",
    ),
    vectors_need_no_alignment=(
        "  if (pm_view_divisor(a->e->g, a->v) % vec) return false;\n",
        "",
    ),
    vectors_cross_the_end_of_an_extent=(
        "  if (is_padded(l, a->vec_dim) && extent(l, a->vec_dim) % vec) return false;\n",
        "",
    ),
    vector_lanes_at_odd_places=(
        "        if (a->part[part].at[k].mul % vec) return false;",
        "        if (a->part[part].at[k].mul % vec && vec > 2) return false;",
    ),
    flat_index_without_remainder=(
        'if (d) c = pm_str(e, "%s %% %lld", c, (long long)vd->size);',
        "(void)c;",
    ),
    any_register_map_will_do=(
        "      if (!same_index(got, want, src->rank)) return NULL;\n",
        "      (void)got;\n",
    ),
    parameters_may_be_anywhere=(
        "    e->program->align[v->param] = pm_max(e->program->align[v->param], bytes);",
        "    e->program->align[v->param] = pm_max(e->program->align[v->param], bytes / 2);",
    ),
    offsets_have_32_bits=(
        "offset_text(e, v, gmem ? 1 : pm_dtypes[v->dtype].bytes, gmem, &t);",
        "offset_text(e, v, gmem ? 1 : pm_dtypes[v->dtype].bytes, false, &t);",
    ),
    wide_thread_offsets_have_32_bits=(
        "sum_max(&a->part[WARP]) + sum_max(&a->part[LANE]) > INT32_MAX;",
        "false;",
    ),
)
breaks(
    f"{CUDA}/access.c",
    f"{DOCUMENTS}::test_matmul_of_one_block",
    f"{MEMORY}::test_wgmma_layout_meets_swizzled_rows_anywhere",
    f"{MEMORY}::test_registers_along_the_rows_of_a_swizzle",
    f"{PIPES}::test_matmul",
    f"{PIPES}::test_wgmma_forms",
    f"{DOCUMENTS}::test_idiom_accumulators",
    *FUZZ,
    tiles_lie_one_behind_the_other=(
        "add_piece(s, div, d->size, d->stride / vd->tile * vd->outer);",
        "add_piece(s, div, d->size, d->stride / vd->tile * vd->inner);",
    ),
    swizzle_splits_at_256=(
        "if (pm_view_divisor(a->e->g, a->v) * a->bytes % PATTERN) return;",
        "if (pm_view_divisor(a->e->g, a->v) * a->bytes % 128) return;",
    ),
    swizzle_of_registers_is_left_out=(
        "(p.size - 1) * p.mul * a->bytes >= 128);",
        "(p.size - 1) * p.mul * a->bytes >= 1024);",
    ),
    swizzle_of_threads_is_left_out=(
        'pm_line(e, "const u32 p = swizzle<%d>(%s%s%s);", a->v->swizzle, start, *thread',
        'pm_line(e, "const u32 p = %.0d(%s%s%s);", 0, start, *thread',
    ),
    stmatrix_takes_columns_for_rows=(
        "  out->lane[out->n_lane++] = (pm_digit){j, 2, 8};\n"
        "  out->lane[out->n_lane++] = (pm_digit){i, 2, 8};\n",
        "  out->lane[out->n_lane++] = (pm_digit){i, 2, 8};\n"
        "  out->lane[out->n_lane++] = (pm_digit){j, 2, 8};\n",
    ),
    stmatrix_is_never_transposed=(
        "a->matrix = transposed ? 2 : 1;",
        "a->matrix = 1;",
    ),
)
breaks(
    "csrc/ir/view.c",
    f"{DOCUMENTS}::test_matmul_of_one_block",
    f"{PIPES}::test_wgmma_forms",
    f"{PIPES}::test_matmul",
    columns_of_tiles_are_8_rows_apart=(
        "c->outer = m->size * tile[1];",
        "c->outer = 8 * tile[1];",
    ),
    starts_inside_of_tiles=(
        "v->offset += start / div * mul;",
        "v->offset += start * mul;",
    ),
)

# ---- barriers and copies -------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_async.c",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    f"{MEMORY}::test_predicated_copies",
    f"{MEMORY}::test_grouped_stores_and_read_only_wait",
    f"{MEMORY}::test_predicated_stores_leave_what_was_there",
    f"{MEMORY}::test_boxes_of_one_array_differ",
    f"{MEMORY}::test_copies_that_begin_before_the_array",
    f"{MEMORY}::test_what_was_stored_is_read_again",
    f"{MEMORY}::test_copy_there_and_back",
    f"{PIPES}::test_mixed_delays",
    f"{MEMORY}::test_copy_swizzled_blocks",
    f"{MEMORY}::test_producer_and_consumers",
    f"{HOST}::test_copies_of_what_was_stored_to_gmem",
    f"{PIPES}::test_overhanging_blocks",
    f"{PIPES}::test_slots_and_steps",
    *FUZZ,
    phase_never_flips=('    pm_line(e, "%s ^= 1;", b.phase);\n', ""),
    phase_of_the_next_barrier_flips=('"%s ^= 1u << (%s);"', '"%s ^= 2u << (%s);"'),
    wait_for_the_phase_before=(
        'pm_line(e, "%s(%s, %s);", wait, b.address, b.phase);',
        'pm_line(e, "%s(%s, %s ^ 1);", wait, b.address, b.phase);',
    ),
    wait_on_every_second_barrier=(
        "pm_term_text(e, &v.term[k], 8, false)",
        "pm_term_text(e, &v.term[k], 16, false)",
    ),
    arrival_without_meeting=(
        '    pm_line(e, PM_LANES_SYNC);\n    pm_line(e, "if (tid == 0) barrier_arrive',
        '    pm_line(e, "if (tid == 0) barrier_arrive',
    ),
    arrival_of_all_for_one=(
        '"%sbarrier_arrive(%s);", e->lane ? "" : "if (tid == 0) ",',
        '"%sbarrier_arrive(%s);", e->lane ? "" : "if (tid < 32) ",',
    ),
    too_many_bytes_are_expected=(
        '"barrier_arrive_tx(%s, %lld);", b.address, (long long)p->bytes);',
        '"barrier_arrive_tx(%s, %lld);", b.address, (long long)p->bytes + 16);',
    ),
    half_of_the_bytes_are_expected=(
        '"barrier_arrive_tx(%s, %lld);", b.address, (long long)p->bytes);',
        '"barrier_arrive_tx(%s, %lld);", b.address, (long long)p->bytes / 2);',
    ),
    no_arrival_if_the_predicate_is_false=(
        '    pm_line(e, "barrier_arrive(%s);", b.address);\n    pm_end(e);',
        "    pm_end(e);",
    ),
    predicate_of_stores_is_ignored=(
        '  if (when) pm_begin(e, "if (%s) {", when);\n  issue(e, op, p, NULL);',
        '  if (when) pm_begin(e, "{");\n  issue(e, op, p, NULL);',
    ),
    predicate_of_loads_is_ignored=(
        '  if (when) pm_begin(e, "if (%s) {", when);\n  pm_line(e, "barrier_arrive_tx',
        '  if (when) pm_begin(e, "if (true) {");\n  pm_line(e, "barrier_arrive_tx',
    ),
    stores_are_not_committed=(
        'if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) pm_line(e, "store_group_commit();");',
        "(void)op;",
    ),
    coordinates_are_reversed=(
        "coord_text(e, p, d, share));",
        "coord_text(e, p, p->map.rank - 1 - d, share));",
    ),
    boxes_of_a_loop_at_one_coordinate=(
        'if (step) pm_putf(&t, "%sb%u * %lld"',
        'if (step && k) pm_putf(&t, "%sb%u * %lld"',
    ),
    boxes_of_a_loop_overlap=(
        "smem, k, (long long)p->loop[k].smem_step);",
        "smem, k, (long long)p->loop[k].smem_step / 2);",
    ),
    maps_differ_by_more_than_the_box=(
        "a->stride[d] != b->stride[d] || a->box[d] != b->box[d])",
        "a->stride[d] != b->stride[d])",
    ),
    plain_copies_know_no_bounds=(
        "  return t.n ? t.at : NULL;\n}\n\nstatic bool chunk_fits",
        "  return NULL;\n}\n\nstatic bool chunk_fits",
    ),
    plain_copies_before_the_start=(
        '"%s(u32)(%s) < %lldu"',
        '"%s(%s) < %lld"',
    ),
    plain_loads_leave_garbage_outside=(
        '    if (valid) pm_line(e, "zero<%s, %lld>(x);", cpp, (long long)n);\n',
        "",
    ),
    plain_loads_without_proxy_fence=(
        '    pm_line(e, "async_proxy_fence();");\n    pm_line(e, PM_LANES_SYNC);',
        "    pm_line(e, PM_LANES_SYNC);",
    ),
    another_lane_waits_for_stores=(
        'e->lane ? "" : PM_ONE_LANE " ", read, n);',
        'e->lane ? "" : "if (warp == 1 && elect_one()) ", read, n);',
    ),
    one_group_more_may_be_pending=('PM_ONE_LANE " ", read, n);', 'PM_ONE_LANE " ", read, n + 1);'),
    nobody_waits_for_writes=(
        '*pm_attr(e->g, op, PM_ATTR_READ_ONLY) ? "_read" : ""',
        '*pm_attr(e->g, op, PM_ATTR_READ_ONLY) ? "_read" : "_read"',
    ),
    nobody_meets_behind_a_wait_for_stores=(
        'PM_ONE_LANE " ", read, n);\n  meet(e);',
        'PM_ONE_LANE " ", read, n);',
    ),
    commit_smem_without_fence=(
        '  pm_note(e, op, "commit_smem");\n  pm_line(e, "async_proxy_fence();");\n',
        '  pm_note(e, op, "commit_smem");\n',
    ),
    commit_smem_without_meeting=(
        '  pm_line(e, "async_proxy_fence();");\n  pm_line(e, PM_LANES_SYNC);\n',
        '  pm_line(e, "async_proxy_fence();");\n',
    ),
    stores_to_gmem_without_proxy_fence=("  return s.found;", "  return false;"),
    bulk_copies_from_anywhere=("  pm_need_alignment(e, &p->gmem, 16);\n", ""),
    tensor_maps_of_anything=(
        "pm_max(e->program->align[m->param], 16);",
        "pm_max(e->program->align[m->param], 4);",
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{MEMORY}::test_producer_and_consumers",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    barriers_count_all_lanes=(
        "pm_barrier_arrivals(e->g, op) * unit;",
        "pm_barrier_arrivals(e->g, op) * unit * 128;",
    ),
    barriers_count_one_arrival_more=(
        "pm_barrier_arrivals(e->g, op) * unit;",
        "pm_barrier_arrivals(e->g, op) * unit + 1;",
    ),
    barriers_without_fence=('  pm_line(e, "barrier_init_fence();");\n', ""),
    nobody_meets_behind_the_barriers=('    pm_line(e, "block_sync();");\n', ""),
    warps_are_counted_in_the_block=(
        "warp_uniform(threadIdx.x >> 5 & 3)",
        "warp_uniform(threadIdx.x >> 5)",
    ),
)

# ---- passes --------------------------------------------------------------------------------------

breaks(
    f"{PASSES}/copies.c",
    f"{MEMORY}::test_more_than_256_rows_are_two_boxes",
    f"{MEMORY}::test_swizzled_blocks_overhang",
    f"{MEMORY}::test_copies_of_six_dimensions",
    f"{MEMORY}::test_overhang_of_rows_that_are_one_axis_for_the_engine",
    f"{MEMORY}::test_copy_swizzled_blocks",
    f"{PIPES}::test_overhanging_blocks",
    f"{MEMORY}::test_copy_there_and_back",
    *FUZZ,
    start_of_a_cut_axis_is_not_divided=("c->fixed = a->start / div;", "c->fixed = a->start;"),
    cut_axes_clip_wrongly=("a->cut || a->size % c || a->start % c)", "a->cut || a->start % c)"),
    boxes_of_512=("MAX_BOX = 256,", "MAX_BOX = 512,"),
    boxes_begin_anywhere=(
        "if (aligned && p->share.coord_step[0] % e == 0) return NULL;",
        "if (e) return NULL;",
    ),
    boxes_begin_inside_of_a_swizzle=(
        "p->smem.swizzle ? pm_max(LINE, 8 * p->smem.swizzle) : LINE;",
        "16;",
    ),
    bulk_copies_out_of_bounds=(
        "if (!promised && !pm_view_in_bounds(g, &p->gmem)) {",
        "if (promised && !pm_view_in_bounds(g, &p->gmem)) {",
    ),
    merged_axes_keep_their_start=("slow->start = slow->start * n + fast->start;", ""),
    overhanging_rows_are_merged=(
        "(n_fast == 1 ? df->size == fast->size :",
        "(n_fast == 1 ? df->size <= fast->size :",
    ),
)
breaks(
    f"{PASSES}/copies.c",
    f"{CLUSTER}::test_multicast",
    f"{CLUSTER}::test_what_cannot_be_shared",
    f"{MEMORY}::test_copies_of_six_dimensions",
    f"{MEMORY}::test_contiguous_copies_begin_anywhere",
    f"{MEMORY}::test_copies_of_turned_blocks",
    f"{MEMORY}::test_copies_that_begin_before_the_array",
    f"{MEMORY}::test_overhang_of_rows_that_are_one_axis_for_the_engine",
    f"{MEMORY}::test_copy_there_and_back",
    f"{MEMORY}::test_copy_swizzled_blocks",
    MEMORY,
    *FUZZ,
    shares_cut_swizzle_patterns=("  if (c * d->smem * t->bytes % t->align) {", "  if (false) {"),
    shares_need_not_be_equal=("  if (d->size % parts) return indivisible;\n", ""),
    stores_begin_before_the_array=(
        "if (lo < 0 && lo > INT32_MIN / 2) return",
        "if (false) return",
    ),
    starts_of_merged_axes_may_be_outside=("return lo >= 0 && hi < a->size;", "return lo >= 0;"),
    merged_axes_keep_their_terms=("slow->term[k].mul *= n;", "slow->term[k].mul *= 1;"),
    merged_rows_may_lie_apart_in_smem=(
        "  if (ds && df && ds->smem != df->smem * df->size) return;\n",
        "",
    ),
    bulk_copies_of_gaps=(
        "t.digit[k].smem != dense || t.digit[k].gmem != dense)",
        "t.digit[k].smem != dense)",
    ),
    bulk_copies_of_swizzles=(
        '  if (p->smem.swizzle) return "the SMEM ref is swizzled";\n',
        "",
    ),
    bulk_copies_begin_anywhere=(
        "pm_view_divisor(g, &p->gmem) * bytes % 16 ||",
        "false ||",
    ),
    boxes_jump_over_smem=(
        "if (d->loop || d->smem != dense) return false;",
        "if (d->loop || d->smem < dense) return false;",
    ),
    loops_of_cut_axes_count_elements=("= d->step / cut;", "= d->step;"),
    boxes_lie_anywhere_in_smem=(
        '    if (step % t->align) return "the boxes would not be aligned in SMEM";\n',
        "",
    ),
    pitches_are_any_number=('    if (pitch % 16) return "rows', '    if (pitch % 4) return "rows'),
    terms_of_cut_axes_are_not_divided=("a->term[k].mul / by, div / by", "a->term[k].mul, div / by"),
    views_begin_anywhere=(
        "if (pm_view_divisor(g, &p->smem) * t.bytes % t.align) {",
        "if (false) {",
    ),
)
breaks(
    f"{PASSES}/smem.c",
    f"{MEMORY}::test_scopes_nest_and_follow_each_other",
    f"{MEMORY}::test_grouped_stores_and_read_only_wait",
    f"{MEMORY}::test_producer_and_consumers",
    f"{DOCUMENTS}::test_idiom_masks_and_row_statistics",
    *FUZZ,
    allocations_overlap=(
        "pm_round_up(alloc_bytes(g, op), SMEM_ALIGN)",
        "alloc_bytes(g, op) / SMEM_ALIGN * SMEM_ALIGN",
    ),
    live_scopes_overlap=(
        "place_block(p, pm_region(g, op, r));\n",
        "{\n      p->top = 0;\n      place_block(p, pm_region(g, op, r));\n    }\n",
    ),
    scratch_overlaps_allocations=("g->scratch_offset = p.deepest;", "g->scratch_offset = p.top;"),
    barriers_overlap=(
        "p->barriers += n * BARRIER_BYTES;",
        "p->barriers += (n > 0) * BARRIER_BYTES;",
    ),
)
breaks(
    f"{CUDA}/block.c",
    f"{ARRAYS}::test_convert",
    f"{DOCUMENTS}::test_idiom_scopes_of_threads",
    *FUZZ,
    threads_share_scratch=(
        "(long long)pm_scratch_bytes(e));",
        "(long long)pm_scratch_bytes(e) * 0);",
    ),
    pairs_are_converted_in_reverse=(
        'fn, name, pm_at(e, in, "r"), pm_at(e, in, "r + 1"));',
        'fn, name, pm_at(e, in, "r + 1"), pm_at(e, in, "r"));',
    ),
)
breaks(
    f"{PASSES}/sync.c",
    f"{HOST}::test_sibling_scopes_share_memory",
    f"{MEMORY}::test_swap_and_update",
    f"{MEMORY}::test_a_loop_stores_over_what_it_has_read",
    f"{MEMORY}::test_grouped_stores_and_read_only_wait",
    f"{MEMORY}::test_scopes_nest_and_follow_each_other",
    f"{PIPES}::test_slots_and_steps",
    f"{CONTROL}",
    *FUZZ,
    nobody_meets_in_front_of_stores=(
        "(array ? p->at != ORDERED : conflicts",
        "(array ? false : conflicts",
    ),
    nobody_meets_behind_stores=(
        "    place_behind(p, block, k);\n",
        "    if (p->at == APART) place_behind(p, block, k);\n    p->at = APART;\n",
    ),
    nobody_meets_in_front_of_copies=("      if (p->at == APART) place(p, block, k);\n", ""),
    scalar_stores_overtake_reads=(
        "conflicts(p, pm_in(g, op, 0)))) place",
        "conflicts(p, pm_in(g, op, 0)) && p->lost)) place",
    ),
    loops_begin_ordered=("    if (loop) p->at = APART;\n", ""),
    engines_overwrite_stores=(
        "      if (overwrites_dirt(p, op)) place_op(p, block, k, PM_OP_COMMIT_SMEM);\n",
        "      (void)overwrites_dirt;\n",
    ),
)

# ---- values --------------------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_control.c",
    CONTROL,
    f"{DOCUMENTS}::test_idiom_scopes_of_threads",
    *FUZZ,
    carries_are_not_swapped=(
        "if (e->slot[first + j].text == from[k].text && from[j].text != from[k].text) {",
        "if (k > n && e->slot[first + j].text == from[k].text) {",
    ),
    else_does_the_same=(
        "PM_TRY(emit_branch(e, op, 1, words));",
        "PM_TRY(emit_branch(e, op, 0, words));",
    ),
    switch_below_0_is_the_last=(
        '"switch (max_int(0, min_int(%u, %s))) {"',
        '"switch (min_int(%u, %s)) {"',
    ),
    loops_run_once_more=(
        '"for (i32 %s = %s; %s < %s; %s++) {"',
        '"for (i32 %s = %s; %s <= %s; %s++) {"',
    ),
    threads_enter_scopes_alone=('pm_line(e, "block_sync();");', "(void)op;"),
    while_tests_the_opposite=('"if (!(%s)) break;"', '"if (%s) break;"'),
)
breaks(
    f"{CUDA}/emit_shape.c",
    f"{ARRAYS}::test_reductions",
    f"{ARRAYS}::test_reduction_propagates_nan",
    f"{ARRAYS}::test_extrema_of_integers_at_their_ends",
    f"{ARRAYS}::test_sums_of_negative_zeros",
    f"{ARRAYS}::test_full_reduction_of_a_vector",
    f"{ARRAYS}::test_layout_conversion_through_smem",
    f"{ARRAYS}::test_broadcasts",
    f"{ARRAYS}::test_reshape_and_slice",
    *FUZZ,
    shuffle_of_the_wrong_lanes=("(long long)(m * div))));", "(long long)m)));"),
    shuffle_leaves_out_a_distance=(
        "for (int64_t m = 1; m < d->size; m *= 2) {",
        "for (int64_t m = 2; m < d->size; m *= 2) {",
    ),
    maximum_begins_at_infinity=(
        "reduce == PM_REDUCE_MAX ? -inf : inf;",
        "reduce == PM_REDUCE_MAX ? inf : -inf;",
    ),
    unsigned_minimum_begins_too_low=(
        "(is_signed ? bits - 1 : bits)) - 1;",
        "(bits - 1)) - 1;",
    ),
    sums_begin_at_positive_zero=(
        "reduce == PM_REDUCE_ADD ? -0.0 :",
        "reduce == PM_REDUCE_ADD ? 0.0 :",
    ),
    maximum_drops_nan=(
        'on_float[] = {NULL, "max_f32", "min_f32"};',
        'on_float[] = {NULL, "fmaxf", "fminf"};',
    ),
    padding_is_reduced=(
        "const char *valid = pm_valid(e, r->l, stem, reg), *x",
        "const char *valid = n ? NULL : pm_valid(e, r->l, stem, reg), *x",
    ),
    warps_reduce_without_meeting=(
        '  pm_line(e, PM_LANES_SYNC);\n  pm_begin_unrolled(e, "k", r->n, 1);',
        '  pm_begin_unrolled(e, "k", r->n, 1);',
    ),
    scratch_of_reductions_is_left_early=(
        "  pm_end_unrolled(e, r->n, 1);\n  pm_line(e, PM_LANES_SYNC);\n  pm_end(e);",
        "  pm_end_unrolled(e, r->n, 1);\n  pm_end(e);",
    ),
    all_warps_add_the_first=(
        "others->at[others->n++] = (pm_piece){n, d->size, div};",
        "others->at[others->n++] = (pm_piece){n, d->size, 0};",
    ),
    layout_cast_without_meeting=(
        "e->slot[in].text);\n  pm_line(e, PM_LANES_SYNC);\n  const char *name",
        "e->slot[in].text);\n  const char *name",
    ),
    slices_begin_at_0=("f.start[k] = starts[k];", "f.start[k] = starts[k] * 0;"),
    sums_of_one_value_count_wrongly=(
        'pm_line(e, "const f32 %s = %s * %lld.0f;", name, x, (long long)n);',
        'pm_line(e, "const f32 %s = %s * %lld.0f;", name, x, (long long)n - 1);',
    ),
)
breaks(
    f"{CUDA}/emit_shape.c",
    f"{CLUSTER}::test_any_and_all",
    votes_are_exchanged=(
        'return "lanes_any(wg, ";\n    case PM_REDUCE_ALL: return "lanes_all(wg, ";',
        'return "lanes_all(wg, ";\n    case PM_REDUCE_ALL: return "lanes_any(wg, ";',
    ),
    all_begins_with_false=(
        "reduce == PM_REDUCE_MIN || reduce == PM_REDUCE_ALL;",
        "reduce == PM_REDUCE_MIN;",
    ),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    f"{ARRAYS}::test_shifts",
    f"{ARRAYS}::test_convert",
    f"{ARRAYS}::test_scalar_arithmetic",
    f"{ARRAYS}::test_integers_wrap",
    f"{ARRAYS}::test_integers_to_bfloat16_are_rounded_once",
    f"{ARRAYS}::test_iota_mask",
    f"{MEMORY}::test_grid_ranks",
    f"{MEMORY}::test_axis_indices",
    f"{ARRAYS}::test_binary_int",
    f"{ARRAYS}::test_binary_float",
    *FUZZ,
    shifts_to_the_right_are_unsigned=(
        'return infix_cast(e, op, ">>");',
        'return leave(e, pm_str(e, "(%s)((u32)%s >> %s)", pm_cpp_type(in_dtype(e, op)),\n'
        "    arg(e, op, 0), arg(e, op, 1)));",
    ),
    less_is_less_or_equal=('return compare(e, op, "<");', 'return compare(e, op, "<=");'),
    bf16_of_integers_is_rounded_twice=(
        "if (to == PM_BF16 && (from == PM_I32 || from == PM_U32)) return",
        "if (to == PM_BF16 && from == PM_BOOL) return",
    ),
    floats_to_integers_wrap=(
        'is_half(to) ? "to_%s(%s)" : "to_int<%s>(%s)"',
        'is_half(to) ? "to_%s(%s)" : "(%s)(i64)(%s)"',
    ),
    division_by_minus_one_traps=("y.i && y.i != -1)", "y.i)"),
    scalars_never_overflow=(
        "return pm_range(e->g, out, &lo, &hi) && lo >= INT32_MIN && hi <= INT32_MAX;",
        "return pm_range(e->g, out, &lo, &hi) || true;",
    ),
    flat_index_arrays_divide_too_much=(
        "for (int k = dim + 1; k < l->rank; k++) below *= l->shape[k];",
        "for (int k = dim; k < l->rank; k++) below *= l->shape[k];",
    ),
    blocks_of_a_cluster_count_alone=(
        'if (cluster > 1) block = pm_str(e, "%s / %u", block, cluster);',
        "(void)cluster;",
    ),
    leading_axes_of_a_grid_grow=(
        'return d ? pm_str(e, "%s %% %lld", block, (long long)g->grid[d]) : block;',
        "return block;",
    ),
    select_takes_the_other=(
        '"%s ? %s : %s", arg(e, op, 0), arg(e, op, 1), arg(e, op, 2)',
        '"%s ? %s : %s", arg(e, op, 0), arg(e, op, 2), arg(e, op, 1)',
    ),
)

# ---- products ------------------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_wgmma.c",
    f"{CATALOGUE}::test_products",
    f"{DOCUMENTS}::test_matmul_of_one_block",
    f"{PIPES}::test_matmul",
    f"{DOCUMENTS}::test_idiom_accumulators",
    f"{PIPES}::test_accumulator_slices_and_state",
    f"{PIPES}::test_wgmma_forms",
    *FUZZ,
    leading_and_stride_are_exchanged=(
        "o->stride = 8 * v->swizzle;\n  o->leading = o->k_contiguous || !chunk ? 16 : chunk * 16;",
        "o->leading = 8 * v->swizzle;\n  o->stride = o->k_contiguous || !chunk ? 16 : chunk * 16;",
    ),
    groups_of_rows_are_half_as_far=("o->stride = 8 * v->swizzle;", "o->stride = 4 * v->swizzle;"),
    swizzle_of_64_says_32=("o->view.swizzle == 64 ? 2 : 3;", "o->view.swizzle == 64 ? 3 : 2;"),
    k_steps_skip_one=("(pm_piece){1, inside, 2};", "(pm_piece){1, inside, 4};"),
    k_steps_of_8_rows=("(pm_piece){1, k_steps, 16 * row};", "(pm_piece){1, k_steps, 8 * row};"),
    chunks_of_k_overlap=(
        "(pm_piece){inside, k_steps / inside, chunk};",
        "(pm_piece){inside, k_steps / inside, chunk / 2};",
    ),
    m_steps_of_8_rows=("(pm_piece){1, m_steps, 64 * row};", "(pm_piece){1, m_steps, 8 * row};"),
    m_steps_of_one_chunk=(
        "(pm_piece){1, m_steps, 64 / s * chunk};",
        "(pm_piece){1, m_steps, chunk};",
    ),
    products_without_fence=(
        '  pm_line(e, "wgmma_fence();");\n  if (kind.fresh)',
        "  if (kind.fresh)",
    ),
    products_are_not_committed=('  pm_line(e, "wgmma_commit();");\n', ""),
    one_product_more_may_be_pending=(
        '"wgmma_wait<%lld>();", (long long)*pm_attr(e->g, op, PM_ATTR_N));',
        '"wgmma_wait<%lld>();", (long long)*pm_attr(e->g, op, PM_ATTR_N) + 1);',
    ),
    accumulators_are_read_early=(
        '"wgmma_wait<%lld>();", (long long)n);',
        '"wgmma_wait<%lld>();", (long long)n + 1);',
    ),
    b_is_transposed_the_other_way=(
        "!a.k_contiguous, !b.k_contiguous, e->fresh",
        "!a.k_contiguous, b.k_contiguous, e->fresh",
    ),
    registers_of_a_step_by_2=('"&a[%s * %lld + %s * 4]"', '"&a[%s * %lld + %s * 2]"'),
    slices_of_accumulators_are_twice_as_far=("+ v->start[1] / 2;", "+ v->start[1];"),
    halves_of_accumulators_take_a_word=(
        "const int64_t words = p->half ? 4 : 2, m_steps",
        "const int64_t words = 2, m_steps",
    ),
    accumulators_are_not_pinned=(
        "  pin(e, &p);\n  const char *name = pm_declare(e, out, out)",
        "  const char *name = pm_declare(e, out, out)",
    ),
)
breaks(
    f"{CUDA}/emit_wgmma.c",
    f"{SPECIALISED}::test_a_fresh_accumulator_is_overwritten",
    f"{SPECIALISED}::test_an_accumulator_that_is_read_first",
    f"{SPECIALISED}::test_an_accumulator_that_is_used_inside_first",
    f"{SPECIALISED}::test_an_accumulator_begins_with_an_array",
    f"{PIPES}::test_accumulator_slices_and_state",
    f"{PIPES}::test_wgmma_forms",
    f"{PIPES}::test_matmul",
    *FUZZ,
    accumulators_are_fresh_in_loops=(
        "    if (mentions(g, op, acc)) {",
        "    if (mentions(g, op, acc) && !pm_get(g, op)->n_regions) {",
    ),
    all_steps_overwrite=(
        "if (kind.fresh) issue_steps(e, &x, pm_family_wgmma(e, &kind), 0, 1);",
        "if (kind.fresh) issue_steps(e, &x, pm_family_wgmma(e, &kind), 0, x.k_steps);",
    ),
    the_first_step_is_added_twice=(
        "const int64_t first = e->fresh[p.view.base] ? 1 : 0;",
        "const int64_t first = 0;",
    ),
    accumulators_stay_fresh=("  e->fresh[p.view.base] = false;\n", ""),
    nothing_is_fresh_and_nothing_zero=(
        "    e->fresh[o->out] = true;\n",
        "",
    ),
    halves_are_unpacked_from_the_next=(
        'unpack_pair(&%s[r], %s[(%s) / 2]);",',
        'unpack_pair(&%s[r], %s[(%s) / 2 ^ 1]);",',
    ),
    halves_are_packed_in_reverse=(
        '"const f16 x[2] = {%s, %s};", x, next);',
        '"const f16 x[2] = {%s, %s};", next, x);',
    ),
)
breaks(
    f"{CUDA}/family.c",
    CATALOGUE,
    transposes_are_exchanged=(
        "w->transpose_a, w->transpose_b);\n  }\n}",
        "w->transpose_b, w->transpose_a);\n  }\n}",
    ),
    b_is_negated=("mb, p, 1, 1, %d; }", "mb, p, 1, -1, %d; }"),
    words_of_b_are_exchanged=('(b), \\"r\\"(b_high)', '(b_high), \\"r\\"(b)'),
    products_forget_the_accumulator=('w->fresh ? "ne" : "eq");', 'w->fresh ? "ne" : "ne");'),
    pins_leave_out_the_last=(
        'put_registers(&t, acc == PM_F32 ? "+f" : "+r", n);',
        'put_registers(&t, acc == PM_F32 ? "+f" : "+r", n - 1);',
    ),
)
breaks(
    f"{CUDA}/family.c",
    f"{CATALOGUE}::test_products",
    f"{SPECIALISED}::test_a_fresh_accumulator_is_overwritten",
    f"{PIPES}::test_wgmma_forms",
    CATALOGUE,
    overwriting_products_have_the_same_name=('w->fresh ? "_fresh" : "");', '"");'),
    all_products_overwrite=('w->fresh ? "=" : "+", w->acc', '"=", w->acc'),
    names_forget_which_way_b_lies=("w->transpose_b ? 'n' : 'k', w->fresh", "'k', w->fresh"),
    names_forget_which_way_a_lies=("w->transpose_a ? 'm' : 'k',\n", "'k',\n"),
    registers_of_a_take_two_operands=("    next += 4;\n", "    next += 2;\n"),
    halves_have_as_many_registers=(
        "w->acc == PM_F32 ? w->n / 2 : w->n / 4);",
        "w->acc == PM_F32 ? w->n / 2 : w->n / 2);",
    ),
    words_of_registers_are_read_in_reverse=(
        '\\"r\\"(a[0]), \\"r\\"(a[1]), \\"r\\"(a[2]), \\"r\\"(a[3]), ',
        '\\"r\\"(a[0]), \\"r\\"(a[2]), \\"r\\"(a[1]), \\"r\\"(a[3]), ',
    ),
)

# ---- the pipeline --------------------------------------------------------------------------------

breaks(
    PIPELINE,
    f"{PIPES}::test_mixed_delays",
    f"{PIPES}::test_output_visits",
    f"{PIPES}::test_two_dimensional_grid_with_carry",
    f"{PIPES}::test_slots_and_steps",
    PIPES,
    slots_are_not_reused=("slot = s % slots if slots > 1 else 0", "slot = 0"),
    next_blocks_come_too_late=("ahead = slots - d\n", "ahead = slots - d - 1\n"),
    blocks_past_the_last_are_fetched=("more = s < steps - ahead", "more = s < steps - ahead + 1"),
    delayed_slots_are_the_present_one=("(s - d) % slots if d else slot", "slot"),
    stores_of_a_slot_are_not_awaited=(
        "_ops.wait_smem_to_gmem(slots - 1, wait_read_only=True)",
        "_ops.wait_smem_to_gmem(slots, wait_read_only=True)",
    ),
    results_are_not_committed=(
        "        if variant:\n            _ops.commit_smem()\n",
        "        if variant:\n",
    ),
    results_are_stored_at_each_visit=("first = (s == 0) | moved(o, now, s)", "first = (s == s)"),
    last_visit_is_not_stored=("again = (last > 0) & ~moved", "again = (last < 0) & ~moved"),
    last_stores_are_not_awaited=(
        "    if stored:\n        _ops.wait_smem_to_gmem(0)\n",
        "",
    ),
)

breaks(
    "pallas_mgpu/_schedule.py",
    f"{PIPES}::test_two_dimensional_grid_with_carry",
    PIPES,
    grid_indices_are_reversed=("return (flat, *reversed(out))", "return (*out, flat)"),
)
breaks(
    "pallas_mgpu/_ws_pipeline.py",
    f"{CLUSTER}::test_gemm",
    WS,
    slots_are_refilled_before_they_are_consumed=(
        "            await_consumed(k)\n            fetch(k, k % slots)",
        "            fetch(k, k % slots)\n            await_consumed(k)",
    ),
    compute_threads_release_the_next_slot=(
        'a["consumed"][0].at[released])',
        'a["consumed"][0].at[(released + 1) % slots])',
    ),
    compute_threads_release_at_once=(
        "released = (s + (slots - d)) % slots if d else slot",
        "released = slot",
    ),
)
breaks(
    "pallas_mgpu/_ws_pipeline.py",
    WS,
    f"{CLUSTER}::test_gemm",
    ready_after_one_input=("num_arrivals=len(ins), num_barriers=slots", "num_barriers=slots"),
    consumed_by_one_thread=(
        "return Barrier(num_arrivals=n, num_barriers=slots)",
        "return Barrier(num_barriers=slots)",
    ),
    consumed_by_one_thread_of_a_cluster=(
        "collective_axes=tuple(axes), num_arrivals=n, num_barriers=slots",
        "collective_axes=tuple(axes), num_barriers=slots",
    ),
    shared_slots_are_consumed_by_one_block=("            if axes:\n", "            if not axes:\n"),
    early_steps_release_as_well=("when(s >= d)(release) if d else release()", "release()"),
    releases_are_awaited_for_ever=("hi = steps - self.delay + late", "hi = steps"),
    the_last_releases_are_not_awaited=(
        "fori_loop(_not_below_zero(steps - slots), hi,",
        "fori_loop(hi, hi,",
    ),
    a_step_is_never_fetched=("        first = slots\n", "        first = slots + 1\n"),
    the_first_steps_are_fetched_twice=(
        "when(state == int(start))(prologue)",
        "prologue()",
    ),
    steady_pipelines_begin_behind_the_first=(
        "first = _core.where(state == int(start), slots, 0)",
        "first = _core.where(state == int(start), slots, slots)",
    ),
    steady_state_is_stop=(
        "when(state == int(PipelinePipeline.STOP))(quiesce)",
        "quiesce()",
    ),
    stores_of_a_step_are_not_awaited=(
        "_ops.wait_smem_to_gmem(slots - 1, wait_read_only=True)",
        "_ops.wait_smem_to_gmem(slots, wait_read_only=True)",
    ),
    results_of_steps_are_not_committed=(
        "            if variant:\n                _ops.commit_smem()\n",
        "            if variant:\n",
    ),
    last_results_are_not_committed=(
        "            if not variant:\n                _ops.commit_smem()\n",
        "",
    ),
    kernel_ends_before_its_stores=("        if outs:\n            _ops.wait_smem_to_gmem(0)\n", ""),
    collective_axes_are_ignored=(
        "collective_axes=o.spec.collective_axes,",
        "collective_axes=None,",
    ),
    out_of_bounds_mode_is_ignored=(
        "oob_mode=o.spec.oob_fill_mode,",
        "oob_mode=None,",
    ),
    registers_of_the_memory_thread_are_counted_twice=(
        "share = (512 - self.memory_registers) // self.num_compute_wgs",
        "share = (512 - 2 * self.memory_registers) // self.num_compute_wgs",
    ),
    short_pipelines_fetch_past_the_end=(
        "            min(self.max_concurrent_steps, steps)\n",
        "            self.max_concurrent_steps\n",
    ),
    short_dynamic_pipelines_fetch_past_the_end=(
        "when(steps > k)(lambda step=step, k=k: fetch(step, k))",
        "fetch(step, k)",
    ),
    stores_where_nothing_moved=(
        "x != y for x, y in zip(now, past)",
        "x == y for x, y in zip(now, past)",
    ),
    all_inputs_are_ready_at_once=(
        'a["ready"][k if self.manual_ready_barriers else 0]',
        'a["ready"][0]',
    ),
)

# ---- one lane, clusters --------------------------------------------------------------------------

breaks(
    f"{CUDA}/lane.c",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    f"{MEMORY}::test_producer_and_consumers",
    SPECIALISED,
    one_lane_of_each_warp_copies=(
        'pm_begin(e, "if (warp == 0 && elect_one()) {");',
        'pm_begin(e, "if (elect_one()) {");',
    ),
    all_lanes_copy=(
        'pm_begin(e, "if (warp == 0 && elect_one()) {");',
        'pm_begin(e, "if (warp == 0) {");',
    ),
    regions_keep_what_others_need=(
        "if (uses[o->out + i] != e->uses[o->out + i]) return",
        "if (uses[o->out + i] > e->uses[o->out + i]) return",
    ),
    one_lane_waits_for_all=(
        "if (plain < end && !is_rest(g, block, end)) end = plain;",
        "if (plain < end && !is_rest(g, block, end)) end -= plain > end;",
    ),
    a_barrier_is_awaited_in_two_ways=(
        "if (!(w.inside[v] & w.outside[v])) continue;",
        "if (!(w.inside[v] & w.outside[v] & 0x80000000)) continue;",
    ),
)
breaks(
    f"{CUDA}/lane.c",
    SPECIALISED,
    f"{MEMORY}::test_copies_that_nobody_reads_in_between",
    f"{MEMORY}::test_barriers_in_any_order",
    f"{MEMORY}::test_producer_and_consumers",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    f"{PIPES}::test_mixed_delays",
    *FUZZ,
    branches_of_threads_are_exchanged=("return r == (x ? 0 : 1);", "return r == (x ? 1 : 0);"),
    equal_threads_are_different=(
        "case PM_OP_EQ: *out = x[0] == x[1]; return true;",
        "case PM_OP_EQ: *out = x[0] != x[1]; return true;",
    ),
    copies_by_all_lanes_are_made_by_one=(
        "return *pm_attr(g, op, PM_ATTR_ENGINE) != PM_ENGINE_PLAIN;",
        "return true;",
    ),
    one_lane_waits_for_barriers_anywhere=(
        "    case PM_OP_WAIT:\n      t->sticky = true;",
        "    case PM_OP_WAIT:",
    ),
    one_lane_takes_tiles_for_all=(
        "    case PM_OP_NEXT_TILE:\n    case PM_OP_PDL_WAIT: t->sticky = true; return true;",
        "    case PM_OP_NEXT_TILE:\n    case PM_OP_PDL_WAIT: return true;",
    ),
    one_lane_enters_collective_scopes=(
        "if (*pm_attr(g, op, PM_ATTR_COLLECTIVE) && g->n_threads > 1) return false;",
        "",
    ),
    meetings_behind_regions_are_lost=(
        "if (!is_pure(e, op) && pm_get(g, op)->code != PM_OP_SYNC) break;",
        "if (!is_pure(e, op)) break;",
    ),
    nobody_meets_in_front_of_regions=(
        "if (t.syncs && !has_met(e, block, first)) pm_line",
        "if (t.syncs && !has_met(e, block, first) && false) pm_line",
    ),
    nobody_meets_behind_regions=(
        "if (t.sticky && !is_last(e->g, block, end)) pm_line",
        "if (t.sticky && !is_last(e->g, block, end) && false) pm_line",
    ),
    warps_stay_apart_behind_regions=(
        'if (t.flows || t.sticky) pm_line(e, "warp_sync();");',
        "",
    ),
    scalars_of_regions_move_out=(
        "    if (made[pm_in(e->g, op, k)]) return false;\n",
        "    (void)made;\n",
    ),
    rest_of_a_loop_is_the_rest=(
        "if (code == PM_OP_FOR || code == PM_OP_WHILE) return false;\n    for (uint32_t wg",
        "if (code == PM_OP_WHILE) return false;\n    for (uint32_t wg",
    ),
)
breaks(
    f"{CUDA}/cluster.c",
    CLUSTER,
    masks_begin_at_block_0=(
        '"0x%xu << (cluster_rank() - (%s))"',
        '"0x%xu << (cluster_rank() * 0 - 0 * (%s))"',
    ),
    axes_of_a_cluster_are_exchanged=(
        "for (uint32_t k = (uint32_t)axis + 1; k < g->n_cluster; k++) stride *= g->cluster[k];",
        "for (uint32_t k = 0; k < axis; k++) stride *= g->cluster[k];",
    ),
    blocks_signal_themselves_twice=(
        "(long long)(size + 1 - before % size), k, (long long)size);",
        "(long long)(size - before % size), k, (long long)size);",
    ),
    peers_count_from_the_other_side=(
        "cluster_rank() + (u32)((%s) - %s)",
        "cluster_rank() - (u32)((%s) - %s)",
    ),
)
breaks(
    f"{CUDA}/cluster.c",
    f"{CLUSTER}::test_who_waits_for_whom",
    f"{CLUSTER}::test_multicast",
    f"{CLUSTER}::test_cluster_ref",
    f"{CLUSTER}::test_gemm",
    CLUSTER,
    groups_are_always_whole=(
        "return pm_cluster_size(g, axes, n) == pm_blocks(g);",
        "return pm_cluster_size(g, axes, n) <= pm_blocks(g);",
    ),
    number_in_a_group_is_that_in_the_cluster=(
        "in_rank ? stride_of(e->g, axes[k]) : below);",
        "in_rank || below ? stride_of(e->g, axes[k]) : below);",
    ),
    masks_are_of_neighbours=("    pattern |= 1u << rank;", "    pattern |= 1u << k;"),
    groups_count_their_own_block_again=(
        "pm_cluster_size(g, &groups[k], group_end(groups, k) - k) - 1;",
        "pm_cluster_size(g, &groups[k], group_end(groups, k) - k);",
    ),
    peers_are_next_to_each_other=(
        "coordinate(e, axis),\n                (long long)stride_of(e->g, axis));",
        "coordinate(e, axis), 1LL);",
    ),
    one_variable_for_all_groups=(
        "if (!strcmp(e->head_vars.at[k].text, text))",
        "if (*e->head_vars.at[k].text)",
    ),
    numbers_of_blocks_do_not_divide=(
        "s.at[s.n++] = (pm_piece){below, e->g->cluster[axes[i]], stride_of(e->g, axes[i])};",
        "s.at[s.n++] = (pm_piece){1, e->g->cluster[axes[i]], stride_of(e->g, axes[i])};",
    ),
    coordinates_are_named_from_the_front=(
        '"xyz"[e->g->n_cluster - 1 - axis]',
        '"xyz"[axis]',
    ),
)
breaks(
    f"{CUDA}/program.c",
    CLUSTER,
    blocks_signal_before_barriers_are_there=(
        '  if (s.meets_cluster) {\n    pm_line(e, "cluster_sync();");',
        '  if (s.meets_cluster) {\n    pm_line(e, "block_sync();");',
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{SPECIALISED}::test_tiles_from_a_counter",
    f"{SPECIALISED}::test_tiles_of_two_counters",
    f"{SPECIALISED}::test_no_tile_is_taken_twice",
    f"{CLUSTER}::test_a_block_does_not_end_before_its_memory_is_read",
    f"{HOST}::test_an_output_that_is_an_operand",
    f"{CLUSTER}::test_cluster_ref",
    f"{CLUSTER}::test_multicast",
    f"{MEMORY}::test_grid_ranks",
    TEXT,
    threads_of_a_block_are_done_at_once=(
        "p->grid[2] * e->g->n_threads;",
        "p->grid[2];",
    ),
    all_lanes_are_done=(
        'PM_ONE_LANE " counters_done(counters',
        '" counters_done(counters',
    ),
    the_last_counter_is_not_there=(
        "s->e->n_counters = counter + 1;",
        "s->e->n_counters = pm_max(counter, 1);",
    ),
    blocks_end_while_others_reach_them=(
        '  if (s.meets_cluster) pm_line(e, "cluster_sync();");',
        "",
    ),
    axes_of_clusters_are_reversed_at_launch=(
        "p->cluster[g->n_cluster - 1 - k] =",
        "p->cluster[k] =",
    ),
    two_axes_of_a_grid_are_one=("from_last < 2 ? from_last : 2]", "from_last < 1 ? from_last : 1]"),
    aliased_operands_are_constant=("if (g->alias && g->alias[k] == (int32_t)param)", "if (false)"),
)
breaks(
    f"{CUDA}/emit_async.c",
    CLUSTER,
    shares_lie_at_one_place=(
        "share, (long long)p->share.smem_step);",
        "share, (long long)p->share.smem_step * 0);",
    ),
    all_load_the_same_share=(
        "share, (long long)p->share.coord_step[d]);",
        "share, (long long)p->share.coord_step[d] * 0);",
    ),
    the_first_blocks_are_signalled_only=('"if (tid < %lld)", n);', '"if (tid < %lld)", n - 1);'),
    next_tile_without_meeting=(
        f"{NEXT_TILE}  pm_line(e, PM_LANES_SYNC);\n",
        NEXT_TILE,
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    f"{SPECIALISED}::test_tiles_from_a_counter",
    f"{SPECIALISED}::test_tiles_of_two_counters",
    f"{WS}::test_registers",
    f"{MEMORY}::test_debug_print",
    TEXT,
    SURFACE,
    DOCUMENTS,
    next_tile_scratch_is_left_early=(
        f"pm_scratch(e));\n  pm_line(e, PM_LANES_SYNC);\n{LEAVE}const char *pm_taker",
        f"pm_scratch(e));\n{LEAVE}const char *pm_taker",
    ),
    next_tile_ignores_the_launch_before=(
        f'{ONE_LANE}  if (e->program->pdl) pm_line(e, "grid_wait();");\n',
        ONE_LANE,
    ),
    one_counter_for_all=(
        'counters[%lld]);", x, n);\n  if (e->lane)',
        'counters[%lld]);", x, n * 0);\n  if (e->lane)',
    ),
    registers_go_the_other_way=('INCREASE) ? "up" : "down"', 'INCREASE) ? "down" : "up"'),
    all_lanes_print=('e->lane ? "" : "if (tid == 0) ", format.at', '"", format.at'),
    percent_signs_are_formats=('pm_put(&format, "%%");', 'pm_put(&format, "%");'),
)
breaks(
    f"{CUDA}/emit_async.c",
    f"{MEMORY}::test_barriers_in_any_order",
    f"{CLUSTER}::test_cluster_ref",
    f"{CLUSTER}::test_who_waits_for_whom",
    f"{CLUSTER}::test_slots",
    f"{CLUSTER}::test_multicast",
    f"{SPECIALISED}::test_gemm_of_a_cluster",
    CLUSTER,
    collective_loads_stay_at_home=('share ? "multicast" : "load"', '"load"'),
    acquires_of_cluster_barriers_are_forgotten=(
        'e->released[b.base] ? "barrier_wait_cluster"',
        'e->released[b.base] ? "barrier_wait"',
    ),
    releases_of_cluster_barriers_are_forgotten=(
        'relaxed ? "remote" : "release"',
        'relaxed ? "remote" : "remote"',
    ),
    one_lane_signals_one_block_less=(
        '"for (u32 k = 0; k < %lld; k++)", n);',
        '"for (u32 k = 0; k < %lld; k++)", n - 1);',
    ),
    phases_of_other_barriers_are_tested=(
        '"%s(%s, %s >> (%s) & 1);", wait',
        '"%s(%s, %s >> (%s) != 0);", wait',
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    f"{MEMORY}::test_overhanging_copies_to_the_middle_of_smem",
    f"{MEMORY}::test_groups_of_stores_by_lanes_count",
    f"{MEMORY}::test_one_array_with_two_swizzles",
    f"{HOST}::test_an_output_that_is_an_operand",
    f"{MEMORY}::test_copies_that_begin_before_the_array",
    f"{MEMORY}::test_copy_there_and_back",
    f"{PIPES}::test_overhanging_blocks",
    f"{MEMORY}::test_what_was_stored_is_read_again",
    f"{MEMORY}::test_boxes_of_one_array_differ",
    f"{HOST}::test_copies_of_what_was_stored_to_gmem",
    *FUZZ,
    MEMORY,
    plain_copies_leave_out_the_last_chunk=("  chunks /= n;\n", "  chunks = chunks / n - 1;\n"),
    chunks_begin_anywhere=(
        "v->dim[last].size % n || pm_view_divisor(e->g, v) % n)",
        "v->dim[last].size % n)",
    ),
    chunks_overhang=("v->base_shape[b] % n == 0 && start % n == 0;", "start % n == 0;"),
    chunks_are_not_swizzled=(
        'v->swizzle ? pm_str(e, "swizzle<%d>(%s)", v->swizzle, t.at) : t.at;',
        "t.at;",
    ),
    bounds_of_plain_copies_are_one_too_wide=(
        "hi + size <= v->base_shape[d];",
        "hi + size <= v->base_shape[d] + 1;",
    ),
    aliases_are_other_arguments=(
        "             ? g->alias[k - g->n_operands]\n             : k;",
        "             ? k\n             : k;",
    ),
    plain_stores_are_no_group=(
        "if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) { /*",
        "if (false) { /*",
    ),
    maps_of_two_swizzles_are_one=("  if (a->swizzle != b->swizzle) return false;\n", ""),
)
breaks(
    f"{PASSES}/sync.c",
    CLUSTER,
    SPECIALISED,
    arrivals_overtake_accesses=(
        "  if (!p->touched && !p->waited) return;",
        "  if (p->touched || !p->waited) return;",
    ),
    arrivals_overtake_waits=(
        "  if (!p->touched && !p->waited) return;",
        "  if (!p->touched) return;",
    ),
    all_arrivals_are_relaxed=(
        "? 0 : n && *(bool *)ctx;",
        "? 0 : n && (*(bool *)ctx || true);",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    f"{CLUSTER}::test_meetings_before_arrivals",
    f"{CLUSTER}::test_meetings_before_arrivals_in_loops_and_branches",
    f"{MEMORY}::test_copies_that_nobody_reads_in_between",
    f"{MEMORY}::test_copies_over_what_lanes_have_stored",
    f"{MEMORY}::test_scalars_over_what_lanes_still_read",
    f"{HOST}::test_an_output_that_is_an_operand",
    f"{CLUSTER}::test_a_wait_is_behind_all_lanes_before_an_arrival",
    f"{CLUSTER}::test_loads_of_what_nobody_writes_need_no_meeting",
    f"{CLUSTER}::test_a_scalar_store_is_finished_before_an_arrival",
    f"{MEMORY}::test_swap_and_update",
    f"{MEMORY}::test_a_loop_stores_over_what_it_has_read",
    f"{HOST}::test_sibling_scopes_share_memory",
    f"{MEMORY}::test_what_was_stored_is_read_again",
    CONTROL,
    *FUZZ,
    other_parts_have_nothing_in_common=(
        "if (end_a <= start_b[k] || end_b <= start_a[k]) return true;",
        "if (end_a != end_b) return true;",
    ),
    aliases_are_other_memory=(
        "    if (operand >= 0) return g->blocks.at[1].arg + (pm_val)operand;\n",
        "    (void)operand;\n",
    ),
    branches_leave_no_dirt=(
        "    soil_all(&dirty, &p->dirty);\n  }\n  *p = *before;",
        "  }\n  *p = *before;",
    ),
    loops_begin_clean=(
        "      soil_block(p, pm_region(g, op, r));\n      soil_all(&p->dirty, &dirty);\n",
        "      if (!loop) soil_block(p, pm_region(g, op, r));\n",
    ),
    pending_products_are_complete=("p->n_wgmmas > n) p->waited", "p->n_wgmmas >= n) p->waited"),
    waits_are_meetings=("  p->at = APART;\n  p->waited = true;", "  p->waited = true;"),
    written_arrays_are_constant=(
        "== PM_GMEM && !(p->reach[base] & WRITTEN);",
        "== PM_GMEM;",
    ),
    loops_begin_untouched=("  p->touched |= s.touches;\n", ""),
    loops_begin_without_waits=("  p->waited |= s.waits;\n", ""),
    products_of_another_round_count=(
        "  p->waited |= s.waits;\n  p->n_wgmmas = 0;\n",
        "  p->waited |= s.waits;\n",
    ),
    gmem_needs_no_release=(
        "return (how & READ) && (how & WRITTEN);",
        "return false;",
    ),
    peers_need_no_release=(
        "return (how & REMOTE) && (how & GENERIC);",
        "return false;",
    ),
    refs_of_peers_are_local=(
        "if (code == PM_OP_CLUSTER_REF) of[base_of(g, pm_in(g, op, 0))] |= REMOTE;",
        "",
    ),
    collective_copies_are_local=(
        "  if (n) of[base_of(g, pm_in(g, op, 1))] |= REMOTE;\n",
        "",
    ),
    scopes_forget_accesses=("  p->lost |= p->n_open > 0;", "  p->n_open = 0;"),
    branches_forget_accesses=("  if (!loop) note_regions(p, op);\n", ""),
    branches_forget_touches=(
        "    after.touched |= p->touched;\n",
        "    after.touched = p->touched;\n",
    ),
    branches_forget_waits=("    after.waited |= p->waited;\n", "    after.waited = p->waited;\n"),
    the_next_op_is_always_a_meeting=(
        "return code == PM_OP_COMMIT_SMEM || code == PM_OP_WAIT_S2G;",
        "return true;",
    ),
)

# ---- the catalogue -------------------------------------------------------------------------------

breaks(
    f"{DEVICE}/memory.cuh",
    CATALOGUE,
    swizzle_of_the_wrong_row=(
        "(((a >> 7) & (B / 16 - 1)) << 4)",
        "(((a >> 8) & (B / 16 - 1)) << 4)",
    ),
    swizzle_of_too_few_chunks=("(B / 16 - 1)) << 4)", "(B / 32 - 1)) << 4)"),
    stmatrix_forgets_trans=("stmatrix.sync.aligned.m8n8.x4.trans", "stmatrix.sync.aligned.m8n8.x4"),
    vector_loads_exchange_words=("ld.shared.v2.b32 {%0,%1}", "ld.shared.v2.b32 {%1,%0}"),
    halves_are_stored_as_words=('"st.shared.b16 [%0], %1;"', '"st.shared.b32 [%0], %1;"'),
    bytes_are_unpacked_by_nibbles=("% 4 * 8))", "% 4 * 4))"),
)
breaks(
    f"{DEVICE}/barrier.cuh",
    CATALOGUE,
    arrival_forgets_the_bytes=("mbarrier.arrive.expect_tx.shared", "mbarrier.arrive.shared"),
    wait_tries_once=(
        '.parity.shared::cta.b64 p, [%0], %1;\\n"\n               "@p bra D;\\nbra W;',
        '.parity.shared::cta.b64 p, [%0], %1;\\n"\n               "@p bra D;',
    ),
    wait_tests_the_state=("mbarrier.try_wait.parity.shared", "mbarrier.try_wait.shared"),
    barrier_init_fence_is_another=("fence.mbarrier_init.release.cluster", "fence.acq_rel.cta"),
    arrival_at_the_wrong_block=(
        'mapa.shared::cluster.u32 r, %0, %1;\\n"\n               "mbarrier.arrive.shared',
        'mapa.shared::cluster.u32 r, %1, %0;\\n"\n               "mbarrier.arrive.shared',
    ),
    release_is_forgotten=(
        "mbarrier.arrive.release.cluster.shared",
        "mbarrier.arrive.relaxed.cluster.shared",
    ),
    acquire_is_forgotten=("try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster"),
    arrivals_are_dropped=(
        '"mbarrier.arrive.shared::cta.b64 _, [%0];"',
        '"mbarrier.arrive.noComplete.shared::cta.b64 _, [%0], 1;"',
    ),
)
breaks(
    f"{DEVICE}/tma.cuh",
    CATALOGUE,
    columns_and_rows_of_loads=("[%0], [%1, {%3,%4}], [%2];", "[%0], [%1, {%4,%3}], [%2];"),
    multicast_goes_to_this_block=(
        ".multicast::cluster [%0], [%1, {%4,%5}], [%2], %3;",
        " [%0], [%1, {%4,%5}], [%2];",
    ),
    planes_of_stores=("[%0, {%2,%3,%4}], [%1];", "[%0, {%4,%3,%2}], [%1];"),
    reads_are_not_awaited=("wait_group.read %0", "wait_group %0"),
    proxy_fence_of_gmem_for_smem=("fence.proxy.async.shared::cta;", "fence.proxy.async.global;"),
    bulk_stores_in_no_group=("cp.async.bulk.commit_group;", ""),
)
breaks(
    f"{DEVICE}/wgmma.cuh",
    CATALOGUE,
    leading_distance_in_bytes=("(leading >> 4) << 16", "leading << 16"),
    addresses_of_high_memory=("(a & 0x3ffff) >> 4", "(a & 0xffff) >> 4"),
    groups_are_not_committed=("wgmma.commit_group.sync.aligned;", ""),
)
breaks(
    f"{DEVICE}/wgmma.cuh",
    CATALOGUE,
    halves_of_a_pair_are_exchanged=("0x4410;", "0x4432;"),
    a_pair_is_twice_its_low_half=("0x4432;", "0x4410;"),
    products_are_not_awaited=(
        "wgmma.wait_group.sync.aligned %0;",
        "wgmma.wait_group.sync.aligned 7;",
    ),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    half_a_warpgroup_meets=('"bar.sync %0, 128;"', '"bar.sync %0, 64;"'),
    warpgroup_0_meets_as_a_block=(
        '"bar.sync %0, 128;" :: "r"(wg + 1)',
        '"bar.sync %0, 128;" :: "r"(wg)',
    ),
    registers_are_given_instead_of_taken=("setmaxnreg.inc", "setmaxnreg.dec"),
    shuffle_of_half_a_warp=("__shfl_xor_sync(0xffffffffu", "__shfl_xor_sync(0xffffu"),
    elected_among_one=("elect.sync _|p, 0xffffffff", "elect.sync _|p, 1"),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    the_last_caller_but_one_clears=("r != callers - 1", "r != callers - 2"),
    the_count_of_the_done_is_not_cleared=("k <= n; k++", "k < n; k++"),
    the_done_are_counted_with_the_tiles=(
        '"l"(counters + n) : "memory"',
        '"l"(counters) : "memory"',
    ),
    tiles_are_counted_in_twos=(
        'add.u32 %0, [%1], 1;" : "=r"(r) : "l"(counter)',
        'add.u32 %0, [%1], 2;" : "=r"(r) : "l"(counter)',
    ),
    blocks_of_a_cluster_meet_without_waiting=("barrier.cluster.wait.acquire;", ""),
    rows_of_clusters_are_columns=("%%cluster_ctaid.y", "%%cluster_ctaid.x"),
    any_is_all=("bar.red.or.pred p, %2", "bar.red.and.pred p, %2"),
)
breaks(
    f"{DEVICE}/types.cuh",
    CATALOGUE,
    halves_are_cut=("cvt.rn.f16.f32", "cvt.rz.f16.f32"),
    pairs_are_packed_in_reverse=(
        'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));',
        'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(lo), "f"(hi));',
    ),
    integers_are_rounded=("__float2int_rz", "__float2int_rn"),
)
breaks(f"{DEVICE}/math.cuh", CATALOGUE, minimum_drops_nan=("min.NaN.f32", "min.f32"))


# ---- turns, arrivals of warps, tiles as they come ------------------------------------------------

breaks(
    f"{CUDA}/emit_async.c",
    f"{TURNS}::test_turns_go_round",
    TURNS,
    a_turn_is_passed_to_oneself=("e->n_turns, first + 1, first);", "e->n_turns, first, first);"),
    the_last_passes_to_the_second=(
        "e->n_turns, first + 1, first);",
        "e->n_turns, first + 1, first + 1);",
    ),
    turns_are_taken_at_the_barriers_of_lanes=(
        '"turn_take(%u + wg);", e->g->n_threads + 1);',
        '"turn_take(%u + wg);", e->g->n_threads);',
    ),
    turns_are_not_awaited=(
        '  pm_line(e, "turn_take(%u + wg);", e->g->n_threads + 1);\n',
        "",
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{TURNS}::test_turns_go_round",
    TURNS,
    f"{ATTENTION}::test_lengths",
    nobody_has_the_first_turn=('"if (wg == %u) turn_pass(%u);"', '"if (wg == 77 + %u + %u) {}"'),
    the_last_turn_is_left=('"if (wg == 0) turn_take(%u);"', '"if (wg == 77 + %u) {}"'),
    three_warps_arrive=("PM_ATTR_WARPS) ? 4 : 1", "PM_ATTR_WARPS) ? 3 : 1"),
    one_warp_arrives=("PM_ATTR_WARPS) ? 4 : 1", "PM_ATTR_WARPS) ? 1 : 1"),
)
breaks(
    f"{CUDA}/emit_async.c",
    f"{TURNS}::test_warps_arrive_by_themselves",
    WS,
    one_lane_arrives_for_one_warp=('"barrier_arrive_n<4>(%s);"', '"barrier_arrive_n<1>(%s);"'),
    all_lanes_of_warps_arrive=('"if (lane == 0) barrier_arrive(', '"barrier_arrive('),
    the_first_warp_arrives_alone=(
        '"if (lane == 0) barrier_arrive(',
        '"if (tid == 0) barrier_arrive(',
    ),
    lanes_do_not_meet_before_their_warp_arrives=('    pm_line(e, "warp_sync();");\n', ""),
)
breaks(
    f"{PASSES}/sync.c",
    f"{TURNS}::test_warps_arrive_by_themselves",
    f"{TURNS}::test_warps_do_not_arrive_beside_a_copy",
    WS,
    CLUSTER,
    SCHEDULE,
    copied_barriers_count_warps=(
        "return n || p->copied[base] ? 0 : alloc;",
        "return n ? 0 : alloc;",
    ),
    cluster_barriers_count_warps=(
        "return n || p->copied[base] ? 0 : alloc;",
        "return p->copied[base] ? 0 : alloc;",
    ),
    releases_are_not_kept=("*out = *out == KEEP_RELEASE ? 0 : n", "*out = n"),
)
breaks(
    f"{PASSES}/divergence.c",
    TURNS,
    one_named_barrier_too_many=("g->n_threads + 1 + n >", "g->n_threads + n >"),
    rings_of_several_sizes=("if (c->turns && c->turns != n)", "if (c->turns > n)"),
    some_warps_may_move_data=("return !pm_layout_cast_scratch(g, op);", "return true;"),
    some_warps_may_do_all_that_has_no_effects=(
        "return pm_ops[o->code].part == PM_PART_EACH || o->code == PM_OP_SLICE;",
        "return true;",
    ),
)
breaks(
    f"{CUDA}/emit_shape.c",
    f"{TURNS}::test_lazy_where_is_where",
    f"{ARRAYS}::test_reductions",
    f"{CLUSTER}::test_any_and_all",
    several_results_have_one_vote=("  if (results > 1) return NULL;\n", "  (void)results;\n"),
    some_warps_go_where_all_do=('return "warp_any(";', 'return "!warp_any(!";'),
)
breaks(
    f"{CUDA}/emit_async.c",
    SCHEDULE,
    tiles_that_are_taken_begin_at_0=('"%s + (i32)gridDim.x"', '"%s"'),
    blocks_of_clusters_count_as_clusters=(
        '"%s + (i32)(gridDim.x / %u)"',
        '"%s + (i32)(gridDim.x + 0 * %u)"',
    ),
    all_blocks_of_a_cluster_take_tiles=(
        f"{TAKER}  if (e->program->pdl)",
        TAKER.replace("true", "false") + "  if (e->program->pdl)",
    ),
    tiles_are_taken_before_the_launch_before_ends=(
        f'{TAKER}  if (e->program->pdl) pm_line(e, "grid_wait();");\n',
        TAKER,
    ),
    all_blocks_hand_tiles_to_all=("k < %u && cluster_rank() == 0; k++", "k < %u; k++"),
    tiles_come_unexpected=('"barrier_arrive_tx(%s, 4);"', '"barrier_arrive(%s);"'),
    shared_tiles_are_read_without_meeting=(
        f"{SHARE_TILE}  pm_line(e, PM_LANES_SYNC);\n",
        SHARE_TILE,
    ),
    shared_tiles_are_left_early=(
        f"  pm_line(e, PM_LANES_SYNC);\n{LEAVE}/* Named barriers",
        f"{LEAVE}/* Named barriers",
    ),
)
breaks(
    f"{CUDA}/program.c",
    SCHEDULE,
    clusters_are_done_as_blocks=(
        "if (!e->asks) all = p->cluster[0] > 1 ?",
        "if (!e->asks) all = p->cluster[0] > 99 ?",
    ),
)
breaks(
    "pallas_mgpu/_schedule.py",
    SCHEDULE,
    tiles_overwrite_what_is_still_read=(
        "when(k > 1)(lambda: await_readers(k))",
        "when(k > 3)(lambda: await_readers(k))",
    ),
    other_blocks_may_still_read=("                    barrier_wait(free.at[k % 2])\n", ""),
    tiles_have_one_slot=("slot = k % 2\n", "slot = k % 1\n"),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    TURNS,
    one_warpgroup_takes_the_turn=('"bar.sync %0, 256;"', '"bar.sync %0, 128;"'),
    one_warpgroup_passes_the_turn=('"bar.arrive %0, 256;"', '"bar.arrive %0, 128;"'),
    some_is_all_in_a_warp=("__any_sync(0xffffffffu, x)", "__all_sync(0xffffffffu, x)"),
)


# ---- words of carries, ranges, layouts of few rows -----------------------------------------------

breaks(
    f"{CUDA}/emit_control.c",
    CONTROL,
    *FUZZ,
    yields_of_words_are_lost=("      pack(e, words[k], first + k, v);\n", ""),
    words_begin_with_anything=("      pack(e, words[k], o->out + k, init);\n", ""),
    words_of_for_are_unpacked_once=(BEGIN_FOR + UNPACK_FOR, UNPACK_FOR + BEGIN_FOR),
    words_of_while_are_unpacked_once=(BEGIN_WHILE + UNPACK_WHILE, UNPACK_WHILE + BEGIN_WHILE),
    odd_arrays_are_words=(" && pm_regs_of(e, v) * bytes % 4 == 0;", ";"),
    one_splat_element_is_packed=(
        '%s[r] = %s;", (long long)n, from, e',
        '%s[0] = %s;", (long long)n, from, e',
    ),
)
breaks(
    "csrc/ir/facts.c",
    f"{CONTROL}::test_ends_of_ranges",
    MEMORY,
    TEXT,
    SCHEDULE,
    *FUZZ,
    remainders_end_one_early=(
        "(span){0, pm_min(x.hi, y.hi - 1)};",
        "(span){0, pm_min(x.hi, y.hi - 2)};",
    ),
    remainders_are_never_negative=(
        "  if (x.lo >= 0) return x.hi < y.lo",
        "  if (x.hi >= 0) return x.hi < y.lo",
    ),
    negative_remainders_end_one_early=(
        "(span){pm_max(x.lo, 1 - y.hi),",
        "(span){pm_max(x.lo, 2 - y.hi),",
    ),
    adjusted_remainders_end_one_early=(
        "hull((span){b.lo + c, c - 1},",
        "hull((span){b.lo + c, c - 2},",
    ),
    adjusted_are_as_before=(
        "(pm_typeof(g, r)->dtype) && range(f, r).lo >= 0) return b;",
        "(pm_typeof(g, r)->dtype) && range(f, r).hi >= 0) return b;",
    ),
    quotients_begin_too_high=("a.lo / (a.lo < 0 ? b.lo : b.hi)", "a.lo / (a.lo < 0 ? b.hi : b.lo)"),
    quotients_end_too_low=("a.hi / (a.hi < 0 ? b.hi : b.lo)", "a.hi / (a.hi < 0 ? b.lo : b.hi)"),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{TURNS}::test_few_rows_take_few_registers",
    few_rows_are_padded_to_64=(
        "  if (!best || !pm_layout_is_padded(pm_layout_of(g, best))) return best;",
        "  if (best) return best;",
    ),
)


# ---- running -------------------------------------------------------------------------------------


CRASH = "or one behind it: signal"
PYTEST = "-m pytest -q --no-header -p no:cacheprovider --tb=no -rfE -m".split() + ["not gpu"]


class Broken(Exception):
    """The mutant itself is no good."""


def check_texts(names):
    for name in names:
        file, old, _, tests = MUTANTS[name]
        n = (ROOT / file).read_text().count(old)
        if n != 1:
            raise SystemExit(f"stale mutant {name}: its text occurs {n} times in {file}:\n{old}")
        for test in tests:
            path, _, function = test.partition("[")[0].partition("::")
            assert not function or f"def {function}(" in (ROOT / "tests" / path).read_text(), test


def copy_tree(to):
    """What the build and the tests need, with times, so that little is compiled."""
    skip = shutil.ignore_patterns(
        ".git", "__pycache__", ".pytest_cache", "*-sanitized", "lib.*", "shared", "*.egg-info"
    )
    shutil.copytree(ROOT, to, ignore=skip, symlinks=True)


def run(tree, *command, limit):
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *map(str, command)]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "", None


def build(tree):
    out, code = run(tree, "setup.py", "build_ext", "--inplace", limit=600)
    if code != 0:
        raise Broken(f"it does not compile:\n{out[-2000:]}")


def failures(out):
    """Their names; where a parameter holds blanks, the function's."""
    names = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)(.*)", out, re.M)
    return [n if "[" not in n or n.endswith("]") else n.partition("[")[0] for n, _ in names]


def first_failure(tree, tests, limit, *more):
    """(the test that fails first or None, why there is none). Too slow is no failure."""
    files = [*(f"tests/{t}" for t in tests), *more]
    out, code = run(tree, *PYTEST, "-x", *files, limit=limit)
    if code is None:
        return None, f"not in {limit} s"
    if code in (0, 5):  # 5: none of them was selected
        return None, ""
    failed = failures(out)
    if code == 1 and failed:
        return failed[0], ""
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        return f"{tests[0]} {CRASH} {-code}", ""
    raise Broken(f"pytest ends with {code}:\n{out[-2000:]}")


def fail_anyway(tree, tests):
    tests = [f"tests/{t}" for t in sorted(tests) if CRASH not in t]
    out, code = run(tree, *PYTEST, *tests, limit=None) if tests else ("", 0)
    if code not in (0, 1):
        raise SystemExit(f"pytest ends with {code} without a mutant:\n{out[-2000:]}")
    return set(failures(out))


def attempt(name, tree):
    """(noticed by or None, why not, seconds)"""
    file, old, new, tests = MUTANTS[name]
    path = tree / file
    original, times = path.read_text(), path.stat()
    start = time.time()
    try:
        path.write_text(original.replace(old, new))
        build(tree)
        for group, more in ((tests, FIRST_WAY), (ALL, ())):
            by, why = first_failure(tree, group, LIMIT, *more)
            if by or why:
                return by, why, time.time() - start
        return None, "", time.time() - start
    finally:
        path.write_text(original)
        if file.startswith("pallas_mgpu"):
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names hold this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = [n for n in MUTANTS if not options.only or any(o in n for o in options.only)]
    if options.list:
        print("\n".join(f"{n:44} {MUTANTS[n][0]}" for n in names))
        return 0
    check_texts(names)
    rows, bad, begin = {}, [], time.time()
    print_lock, trees = threading.Lock(), queue.Queue()

    def one(name):
        tree = trees.get()
        try:
            by, why, seconds = attempt(name, tree)
            text = by or why or "SURVIVES"
        except Broken as e:
            by, text, seconds = None, f"NO MUTANT: {e}", 0
            bad.append(name)
        finally:
            trees.put(tree)
        with print_lock:
            rows[name] = by
            print(f"{name:44} {text:76} {seconds:6.1f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        for k in range(options.jobs):
            tree = Path(directory) / str(k) / "tree"
            copy_tree(tree)
            build(tree)
            trees.put(tree)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, names))
        build(tree)
        void = fail_anyway(tree, {by for by in rows.values() if by})
    for name, by in rows.items():
        if by in void:
            print(f"{name}: {by} fails without the mutant as well")
            rows[name] = None
    print(f"\n| {'file':32} | mutants | noticed |\n|{'-' * 34}|--------:|--------:|")
    for file in dict.fromkeys(MUTANTS[n][0] for n in names):
        of = [rows[n] for n in names if MUTANTS[n][0] == file]
        print(f"| {file:32} | {len(of):7} | {sum(by is not None for by in of):7} |")
    lost = [n for n, by in rows.items() if not by and n not in bad]
    noticed = sum(by is not None for by in rows.values())
    share = 100 * noticed / max(len(names), 1)
    print(f"\n{noticed} of {len(names)} noticed: {share:.1f} %, {time.time() - begin:.0f} s")
    print(f"survive: {', '.join(lost) or 'none'}")
    if bad:
        print(f"no mutants: {', '.join(bad)}")
    return 0 if share >= 95 and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
