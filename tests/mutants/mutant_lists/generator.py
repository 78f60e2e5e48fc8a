"""Mutants of addresses, copies, passes, values, products and pipelines."""

from . import (
    ARRAYS,
    CATALOGUE,
    CLUSTER,
    COMPILERS,
    CONTROL,
    CUDA,
    DOCUMENTS,
    FUZZ,
    HOST,
    MEMORY,
    PASSES,
    PIPELINE,
    PIPES,
    SPECIALISED,
    TEXT,
    WS,
    breaks,
)

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
        "linear_sums",
        "for (uint32_t k = n; k-- > 0; div *= d[k].size) { if (d[k].dim < 0) continue;",
        (
            "for (uint32_t k = n; k-- > 0; div *= part == LANE ? 2 : d[k].size) { if "
            "(d[k].dim < 0) continue;"
        ),
    ),
    mask_takes_one_too_many=(
        "valid_text",
        'pm_putf(&t, " < %lld", (long long)extent(l, d));',
        'pm_putf(&t, " <= %lld", (long long)extent(l, d));',
    ),
    mask_forgets_one_of_padding=(
        "is_padded",
        "l->padded[dim] > extent(l, dim);",
        "l->padded[dim] > extent(l, dim) + 1;",
    ),
    vectors_need_no_alignment=(
        "vector_fits",
        "if (pm_view_divisor(a->e->g, a->v) % vec) return false;",
        "",
    ),
    vectors_cross_the_end_of_an_extent=(
        "vector_fits",
        "if (is_padded(l, a->vec_dim) && extent(l, a->vec_dim) % vec) return false;",
        "",
    ),
    vector_lanes_at_odd_places=(
        "vector_fits",
        "if (a->part[part].at[k].mul % vec) return false;",
        "if (a->part[part].at[k].mul % vec && vec > 2) return false;",
    ),
    flat_index_without_remainder=(
        "begin_coords",
        'if (d) c = pm_str(e, "%s %% %lld", c, (long long)vd->size);',
        "(void)c;",
    ),
    any_register_map_will_do=(
        "pm_reg_list",
        "if (!same_index(got, want, src->rank)) return NULL;",
        "(void)got;",
    ),
    parameters_may_be_anywhere=(
        "pm_need_alignment",
        "e->program->align[v->param] = pm_max(e->program->align[v->param], bytes);",
        "e->program->align[v->param] = pm_max(e->program->align[v->param], bytes / 2);",
    ),
    offsets_have_32_bits=(
        "pm_view_address",
        "offset_text(e, v, gmem ? 1 : pm_dtypes[v->dtype].bytes, gmem, &t);",
        "offset_text(e, v, gmem ? 1 : pm_dtypes[v->dtype].bytes, false, &t);",
    ),
    wide_thread_offsets_have_32_bits=(
        "begin_linear",
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
    tiles_lie_one_after_the_other=(
        "add_digit",
        "add_piece(s, div, d->size, d->stride / vd->tile * vd->outer);",
        "add_piece(s, div, d->size, d->stride / vd->tile * vd->inner);",
    ),
    swizzle_splits_at_256=(
        "split_swizzle",
        "if (pm_view_divisor(a->e->g, a->v) * a->bytes % PATTERN) return;",
        "if (pm_view_divisor(a->e->g, a->v) * a->bytes % 128) return;",
    ),
    swizzle_of_registers_is_left_out=(
        "split_text",
        "(p.size - 1) * p.mul * a->bytes >= 128);",
        "(p.size - 1) * p.mul * a->bytes >= 1024);",
    ),
    swizzle_of_threads_is_left_out=(
        "declare_pointer",
        'pm_line(e, "const u32 p = swizzle<%d>(%s%s%s);", a->v->swizzle, start, *thread',
        'pm_line(e, "const u32 p = %.0d(%s%s%s);", 0, start, *thread',
    ),
    stmatrix_takes_columns_for_rows=(
        "matrix_rows",
        "{by_columns ? j : i, 8, 1}); append",
        "{by_columns ? i : i, 8, 1}); append",
    ),
    stmatrix_is_never_transposed=(
        "plan_rows",
        "a->matrix = by_columns ? 2 : 1;",
        "a->matrix = 1;",
    ),
)
breaks(
    "csrc/ir/view.c",
    f"{DOCUMENTS}::test_matmul_of_one_block",
    f"{PIPES}::test_wgmma_forms",
    f"{PIPES}::test_matmul",
    columns_of_tiles_are_8_rows_apart=(
        "apply_tiling",
        "d[n - 1].outer = stride;",
        "d[n - 1].outer = 8 * tile[n - 1];",
    ),
    starts_inside_of_tiles=(
        "apply_index",
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
    phase_never_flips=("pm_cuda_WAIT", 'pm_line(e, "%s ^= 1;", b.phase);', ""),
    phase_of_the_next_barrier_flips=(
        "pm_cuda_WAIT",
        'shifted(e, "1u", "<<", b.index)',
        'shifted(e, "2u", "<<", b.index)',
    ),
    known_phase_is_the_next=(
        "parity_of",
        '"%s & 1", pm_scalar_of',
        '"%s + 1 & 1", pm_scalar_of',
    ),
    wait_for_the_phase_before=(
        "pm_cuda_WAIT",
        'pm_str(e, "%s, %s", b.address, b.phase)',
        'pm_str(e, "%s, %s ^ 1", b.address, b.phase)',
    ),
    wait_on_every_second_barrier=(
        "barrier_of",
        "pm_term_text(e, &v.term[k], 8, false)",
        "pm_term_text(e, &v.term[k], 16, false)",
    ),
    arrival_without_meeting=(
        "copy_by_lanes",
        'pm_line(e, "%s", pm_meet(e)); pm_line(e, "if (%s) mbarrier_arrive(%s);"',
        'pm_line(e, "if (%s) mbarrier_arrive(%s);"',
    ),
    arrival_of_all_for_one=(
        "pm_cuda_ARRIVE",
        'pm_line(e, "if (%s) mbarrier_arrive(%s);", pm_first_lane(e), b.address);',
        'pm_line(e, "if (tid < 32) mbarrier_arrive(%s);", b.address);',
    ),
    too_many_bytes_are_expected=(
        "load_by_lane",
        "bytes * (1 + leader));",
        "bytes * (1 + leader) + 16);",
    ),
    half_of_the_bytes_are_expected=("load_by_lane", "bytes * (1 + leader));", "bytes / 2);"),
    no_arrival_if_the_predicate_is_false=(
        "load_by_lane",
        'pm_line(e, "%smbarrier_arrive(%s);", first, b.address); pm_end(e);',
        "pm_end(e);",
    ),
    predicate_of_stores_is_ignored=(
        "store_by_lane",
        'if (when) pm_begin(e, "if (%s) {", when); issue(e, op, p, NULL);',
        'if (when) pm_begin(e, "{"); issue(e, op, p, NULL);',
    ),
    predicate_of_loads_is_ignored=("load_by_lane", '"if (%s) {"', '"if (true) {"'),
    stores_are_not_committed=(
        "store_by_lane",
        'if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) pm_line(e, "bulk_group_commit();");',
        "(void)op;",
    ),
    coordinates_are_reversed=(
        "issue_tma",
        "coord_text(e, p, d, share));",
        "coord_text(e, p, p->map.rank - 1 - d, share));",
    ),
    boxes_of_a_loop_at_one_coordinate=(
        "coord_text",
        'if (step) pm_putf(&t, "%sb%u * %lld"',
        'if (step && k) pm_putf(&t, "%sb%u * %lld"',
    ),
    boxes_of_a_loop_overlap=(
        "issue_tma",
        "smem, k, (long long)p->loop[k].smem_step);",
        "smem, k, (long long)p->loop[k].smem_step / 2);",
    ),
    maps_differ_by_more_than_the_box=(
        "same_map",
        "a->stride[d] != b->stride[d] || a->box[d] != b->box[d])",
        "a->stride[d] != b->stride[d])",
    ),
    plain_copies_know_no_bounds=("in_bounds", "return t.n ? t.at : NULL; }", "return NULL; }"),
    plain_copies_before_the_start=("in_bounds", '"%s(u32)(%s) < %s"', '"%s(%s) < (i32)%s"'),
    plain_loads_leave_garbage_outside=(
        "copy_chunks",
        'if (valid) pm_line(e, "zero<%s, %lld>(x);", cpp, (long long)n);',
        "",
    ),
    plain_loads_without_proxy_fence=(
        "copy_by_lanes",
        'pm_line(e, "fence_proxy_async();"); pm_line(e, "%s", pm_meet(e));',
        'pm_line(e, "%s", pm_meet(e));',
    ),
    another_lane_waits_for_stores=(
        "on_store_lanes",
        'e->lane ? "" : pm_str(e, "%s ", pm_store_lanes(e)), call',
        'e->lane ? "" : "if (warp == 1 && elect_one()) ", call',
    ),
    one_group_more_may_be_pending=("pm_cuda_WAIT_S2G", ", read, n));", ", read, n + 1));"),
    nobody_waits_for_writes=(
        "pm_cuda_WAIT_S2G",
        '*pm_attr(e->g, op, PM_ATTR_READ_ONLY) ? "_read" : ""',
        '*pm_attr(e->g, op, PM_ATTR_READ_ONLY) ? "_read" : "_read"',
    ),
    nobody_meets_after_a_wait_for_stores=(
        "pm_cuda_WAIT_S2G",
        ", read, n)); meet(e);",
        ", read, n));",
    ),
    commit_smem_without_fence=(
        "pm_cuda_COMMIT_SMEM",
        "if (pm_target_has(e->target, PM_HAS_TMA)) {",
        "if (false) {",
    ),
    commit_smem_without_meeting=(
        "pm_cuda_COMMIT_SMEM",
        '? "_cluster" : ""); } pm_line(e, "%s", pm_meet(e));',
        '? "_cluster" : ""); }',
    ),
    stores_to_gmem_without_proxy_fence=(
        "meets_stores",
        "pm_by_lanes(a)) return true;",
        "pm_by_lanes(a)) return false;",
    ),
    bulk_copies_from_anywhere=(
        "issue",
        "pm_need_alignment(e, &p->gmem, 16); if (bar) {",
        "if (bar) {",
    ),
    tensor_maps_of_anything=(
        "pm_map_name",
        "pm_max(e->program->align[m->param], 16);",
        "pm_max(e->program->align[m->param], 4);",
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{SPECIALISED}::test_phases_of_a_scope_that_comes_again",
    f"{SPECIALISED}::test_waits_that_know_their_phase",
    f"{MEMORY}::test_producer_and_consumers",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    barriers_count_all_lanes=(
        "print_barriers",
        "pm_barrier_arrivals(e->g, op) * unit;",
        "pm_barrier_arrivals(e->g, op) * unit * 128;",
    ),
    barriers_count_one_arrival_more=(
        "print_barriers",
        "pm_barrier_arrivals(e->g, op) * unit;",
        "pm_barrier_arrivals(e->g, op) * unit + 1;",
    ),
    phases_begin_again_with_the_scope=(
        "look_at_allocation",
        "|= pm_in_loop(g, op);",
        "|= pm_in_loop(g, op) && false;",
    ),
    waits_forget_who_needs_the_phase=(
        "look_at_accesses",
        "s->keeps_phase[pm_view_base(g, a.view)] = true;",
        "s->keeps_phase[pm_view_base(g, a.view)] = false;",
    ),
    barriers_without_fence=(
        "print_barriers",
        'if (s->barriers.n) pm_line(e, "mbarrier_init_fence();");',
        "",
    ),
    nobody_meets_after_the_barriers=(
        "print_body",
        's.barriers.n || s.semaphores.n || tmem || e->arrivals) { pm_line(e, "block_sync();"); }',
        "s.barriers.n || s.semaphores.n || tmem || e->arrivals) { }",
    ),
    warps_are_counted_in_the_block=(
        "print_entry",
        '"  %s warp = warp_uniform(threadIdx.x >> 5 & 3);\\n"',
        '"  %s warp = warp_uniform(threadIdx.x >> 5);\\n"',
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
    start_of_a_cut_axis_is_not_divided=(
        "set_coord",
        "c->fixed = a->start / div;",
        "c->fixed = a->start;",
    ),
    cut_axes_clip_wrongly=(
        "may_cut_axis",
        "a->cut || a->size % c || a->start % c)",
        "a->cut || a->start % c)",
    ),
    boxes_of_512=("MAX_DIGITS", "MAX_BOX = 256,", "MAX_BOX = 512,"),
    boxes_begin_anywhere=(
        "check_inner_start",
        "if (aligned && p->share.coord_step[0] % e == 0) return NULL;",
        "if (e) return NULL;",
    ),
    boxes_begin_at_any_chunk=("LINE", "enum { LINE = 128 }", "enum { LINE = 16 }"),
    bulk_copies_out_of_bounds=(
        "plan_bulk",
        "if (!promised && !pm_view_in_bounds(g, &p->gmem)) {",
        "if (promised && !pm_view_in_bounds(g, &p->gmem)) {",
    ),
    merged_axes_keep_their_start=("merge_pair", "slow->start = slow->start * n + fast->start;", ""),
    overhanging_rows_are_merged=(
        "merge_pair",
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
    f"{MEMORY}::test_copies_of_transposed_blocks",
    f"{MEMORY}::test_copies_that_begin_before_the_array",
    f"{MEMORY}::test_overhang_of_rows_that_are_one_axis_for_the_engine",
    f"{MEMORY}::test_copy_there_and_back",
    f"{MEMORY}::test_copy_swizzled_blocks",
    MEMORY,
    *FUZZ,
    shares_begin_anywhere=("share_digit", "if (c * d->smem * t->bytes % LINE) {", "if (false) {"),
    shares_need_not_be_equal=("share_digit", "if (d->size % parts) return indivisible;", ""),
    stores_begin_before_the_array=(
        "check_store_start",
        "if (lo < 0 && lo > INT32_MIN / 2) return",
        "if (false) return",
    ),
    starts_of_merged_axes_may_be_outside=(
        "start_inside",
        "return lo >= 0 && hi < a->size;",
        "return lo >= 0;",
    ),
    merged_axes_keep_their_terms=(
        "merge_pair",
        "slow->term[k].mul *= n;",
        "slow->term[k].mul *= 1;",
    ),
    merged_rows_may_lie_apart_in_smem=(
        "merge_pair",
        "if (ds && df && (ds->smem != df->smem * df->size || ds->step != 1)) return;",
        "",
    ),
    bulk_copies_of_gaps=(
        "plan_bulk",
        "t.digit[k].smem != dense || t.digit[k].gmem != dense)",
        "t.digit[k].smem != dense)",
    ),
    bulk_copies_of_swizzles=(
        "plan_bulk",
        'if (p->smem.swizzle) return "the SMEM ref is swizzled";',
        "",
    ),
    bulk_copies_begin_anywhere=(
        "plan_bulk",
        "pm_view_divisor(g, &p->gmem) * bytes % 16 ||",
        "false ||",
    ),
    boxes_jump_over_smem=(
        "box_digit",
        "if (d->loop || d->smem != dense) return false;",
        "if (d->loop || d->smem < dense) return false;",
    ),
    loops_of_cut_axes_count_elements=("add_loops", "= d->step / cut;", "= d->step;"),
    boxes_lie_anywhere_in_smem=(
        "add_loops",
        'if (step % LINE) return "the boxes would not be aligned in SMEM";',
        "",
    ),
    pitches_are_any_number=(
        "add_map_dim",
        'if (pitch % 16) return "rows of the GMEM array are not a multiple of 16 bytes"',
        'if (pitch % 4) return "rows of the GMEM array are not a multiple of 16 bytes"',
    ),
    terms_of_cut_axes_are_not_divided=(
        "set_coord",
        "a->term[k].mul / by, div / by",
        "a->term[k].mul, div / by",
    ),
    views_begin_anywhere=(
        "plan_tma",
        "if (pm_view_divisor(g, &p->smem) * t.bytes % LINE) {",
        "if (false) {",
    ),
)
breaks(
    f"{PASSES}/smem.c",
    f"{MEMORY}::test_swizzled_buffers_after_small_ones",
    f"{MEMORY}::test_scopes_nest_and_follow_each_other",
    f"{MEMORY}::test_grouped_stores_and_read_only_wait",
    f"{MEMORY}::test_producer_and_consumers",
    f"{DOCUMENTS}::test_idiom_masks_and_row_statistics",
    *FUZZ,
    allocations_overlap=(
        "place_alloc",
        "p->top[r] + pm_round_up(alloc_bytes(g, op), SMEM_ALIGN)",
        "p->top[r] + alloc_bytes(g, op) / SMEM_ALIGN * SMEM_ALIGN",
    ),
    live_scopes_overlap=(
        "place_block",
        "place_block(p, pm_region(g, op, r));",
        "{ p->top = 0; place_block(p, pm_region(g, op, r)); }",
    ),
    scratch_overlaps_allocations=(
        "pm_plan_smem",
        "p.deepest[OTHERS] + p.deepest[REMOTE] + p.deepest[OWN] * g->n_threads;",
        "p.deepest[OTHERS];",
    ),
    buffers_begin_at_multiples_of_512=("SMEM_ALIGN", "SMEM_ALIGN = 1024,", "SMEM_ALIGN = 512,"),
    others_overlap_what_peers_reach=(
        "move",
        "else if (!p->remote[o->out]) { *offset += p->deepest[REMOTE]; }",
        "",
    ),
    barriers_overlap=("place_alloc", "barrier ? n * BARRIER_BYTES :", "barrier ? BARRIER_BYTES :"),
)
breaks(
    f"{CUDA}/block.c",
    f"{ARRAYS}::test_convert",
    f"{DOCUMENTS}::test_idiom_scopes_of_threads",
    *FUZZ,
    threads_share_scratch=(
        "pm_scratch",
        "(long long)pm_scratch_bytes(e));",
        "(long long)pm_scratch_bytes(e) * 0);",
    ),
    pairs_are_converted_in_reverse=(
        "emit_group_convert",
        'c.fn, name, pm_at(e, c.in, "r"), pm_at(e, c.in, "r + 1"));',
        'c.fn, name, pm_at(e, c.in, "r + 1"), pm_at(e, c.in, "r"));',
    ),
    words_are_converted_in_reverse=(
        "convert_to_words",
        'pm_str(e, "%s, %s", pm_at(e, in, "r"), pm_at(e, in, "r + 1"));',
        'pm_str(e, "%s, %s", pm_at(e, in, "r + 1"), pm_at(e, in, "r"));',
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
        "visit_store",
        "(array ? p->at != ORDERED : conflicts",
        "(array ? false : conflicts",
    ),
    nobody_meets_after_stores=(
        "visit_store",
        "{ place_after(p, block, k)",
        "{ if (p->at == APART) place_after(p, block, k); p->at = APART",
    ),
    nobody_meets_in_front_of_copies=("visit_copy", "if (p->at == APART) place(p, block, k);", ""),
    scalar_stores_overtake_reads=(
        "visit_store",
        "p->at != ORDERED : conflicts(p, a->view)",
        "p->at != ORDERED : conflicts(p, a->view) && p->lost",
    ),
    loops_begin_ordered=("visit_control", "if (loop) p->at = APART;", ""),
    engines_overwrite_stores=(
        "visit_copy",
        "!committed && overwrites_unfenced(p, p->g->blocks.at[block].ops.at[*k])",
        "(committed, false)",
    ),
)

# ---- values --------------------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_control.c",
    CONTROL,
    f"{DOCUMENTS}::test_idiom_scopes_of_threads",
    *FUZZ,
    carries_are_not_swapped=(
        "emit_yield",
        "if (e->slot[first + j].text == from[k].text && from[j].text != from[k].text) {",
        "if (k > n && e->slot[first + j].text == from[k].text) {",
    ),
    else_does_the_same=(
        "pm_cuda_IF",
        "PM_TRY(emit_branch(e, op, 1, words));",
        "PM_TRY(emit_branch(e, op, 0, words));",
    ),
    switch_below_0_is_the_last=(
        "pm_cuda_SWITCH",
        '"switch (max_int(0, min_int(%u, %s))) {"',
        '"switch (min_int(%u, %s)) {"',
    ),
    loops_run_once_more=(
        "pm_cuda_FOR",
        '"for (i32 %s = %s; %s < %s; %s++) {"',
        '"for (i32 %s = %s; %s <= %s; %s++) {"',
    ),
    threads_enter_scopes_alone=(
        "enter_together",
        'else pm_line(e, "block_sync();");',
        "else (void)op;",
    ),
    while_tests_the_opposite=("pm_cuda_WHILE", '"if (!%s) break;"', '"if (%s) break;"'),
)
breaks(
    f"{CUDA}/access.c",
    f"{ARRAYS}::test_reductions",
    f"{ARRAYS}::test_reduction_propagates_nan",
    f"{ARRAYS}::test_extrema_of_integers_at_their_ends",
    f"{ARRAYS}::test_sums_of_negative_zeros",
    f"{ARRAYS}::test_full_reduction_of_a_vector",
    f"{ARRAYS}::test_layout_conversion_through_smem",
    f"{ARRAYS}::test_broadcasts",
    f"{ARRAYS}::test_reshape_and_slice",
    *FUZZ,
    slices_begin_at_0=(
        "pm_slice_registers",
        "s.start[k] = starts[k];",
        "s.start[k] = starts[k] * 0;",
    ),
)
breaks(
    f"{CUDA}/emit_registers.c",
    f"{ARRAYS}::test_reductions",
    f"{ARRAYS}::test_reduction_propagates_nan",
    f"{ARRAYS}::test_extrema_of_integers_at_their_ends",
    f"{ARRAYS}::test_sums_of_negative_zeros",
    f"{ARRAYS}::test_full_reduction_of_a_vector",
    f"{ARRAYS}::test_layout_conversion_through_smem",
    f"{ARRAYS}::test_broadcasts",
    f"{ARRAYS}::test_reshape_and_slice",
    *FUZZ,
    shuffle_of_the_wrong_lanes=("combine_lanes", "(long long)(m * div))));", "(long long)m)));"),
    shuffle_leaves_out_a_distance=(
        "combine_lanes",
        "for (int64_t m = 1; m < d->size; m *= 2) {",
        "for (int64_t m = 2; m < d->size; m *= 2) {",
    ),
    maximum_begins_at_infinity=(
        "pm_identity",
        "reduce == PM_REDUCE_MAX ? -inf : inf;",
        "reduce == PM_REDUCE_MAX ? inf : -inf;",
    ),
    unsigned_minimum_begins_too_low=(
        "pm_identity",
        "(is_signed ? bits - 1 : bits)) - 1;",
        "(bits - 1)) - 1;",
    ),
    sums_begin_at_positive_zero=(
        "pm_identity",
        "reduce == PM_REDUCE_ADD ? -0.0 :",
        "reduce == PM_REDUCE_ADD ? 0.0 :",
    ),
    maximum_drops_nan=(
        "pm_combine",
        'on_float[] = {NULL, "max_f32", "min_f32"};',
        'on_float[] = {NULL, "fmaxf", "fminf"};',
    ),
    padding_is_reduced=(
        "combine_registers",
        "const char *valid = pm_valid(e, r->l, stem, reg), *x",
        "const char *valid = n ? NULL : pm_valid(e, r->l, stem, reg), *x",
    ),
    warps_reduce_without_meeting=(
        "combine_warps",
        'pm_line(e, PM_WARPGROUP_SYNC); pm_begin_unrolled(e, "k", n, 1);',
        'pm_begin_unrolled(e, "k", n, 1);',
    ),
    scratch_of_reductions_is_left_early=(
        "combine_warps",
        "pm_end_unrolled(e, n, 1); pm_line(e, PM_WARPGROUP_SYNC); pm_end(e);",
        "pm_end_unrolled(e, n, 1); pm_end(e);",
    ),
    all_warps_add_the_first=(
        "reduced_warps",
        "others->at[others->n++] = (pm_piece){n, d->size, div};",
        "others->at[others->n++] = (pm_piece){n, d->size, 0};",
    ),
    sums_of_one_value_count_wrongly=(
        "reduce_splat",
        'pm_line(e, "const f32 %s = %s * %lld.0f;", name, x, (long long)n);',
        'pm_line(e, "const f32 %s = %s * %lld.0f;", name, x, (long long)n - 1);',
    ),
)
breaks(
    f"{CUDA}/emit_registers.c",
    f"{CLUSTER}::test_any_and_all",
    votes_are_exchanged=(
        "vote",
        'return "lanes_any(wg, "; case PM_REDUCE_ALL: return "lanes_all(wg, ";',
        'return "lanes_all(wg, "; case PM_REDUCE_ALL: return "lanes_any(wg, ";',
    ),
    all_begins_with_false=(
        "pm_identity",
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
        "pm_cuda_SHR",
        'return infix_cast(e, op, ">>");',
        (
            'return leave(e, pm_str(e, "(%s)((u32)%s >> %s)", pm_cpp_type(in_dtype(e, op)), '
            "arg(e, op, 0), arg(e, op, 1)));"
        ),
    ),
    less_is_less_or_equal=(
        "pm_cuda_LT",
        'return compare(e, op, "<");',
        'return compare(e, op, "<=");',
    ),
    bf16_of_integers_is_rounded_twice=(
        "pm_convert_text",
        "to == PM_BF16 && (from == PM_I32 || from == PM_U32)",
        "to == PM_BF16 && from == PM_BOOL",
    ),
    floats_to_integers_wrap=(
        "pm_convert_text",
        'pm_is_narrow_float(to) ? "cvt_%s(%s)" : "cvt_int<%s>(%s)"',
        'pm_is_narrow_float(to) ? "cvt_%s(%s)" : "(%s)(i64)(%s)"',
    ),
    division_by_minus_one_traps=("divide", "y.i && y.i != -1)", "y.i)"),
    scalars_never_overflow=(
        "fits_i32",
        "return pm_range(e->g, out, &lo, &hi) && lo >= INT32_MIN && hi <= INT32_MAX;",
        "return pm_range(e->g, out, &lo, &hi) || true;",
    ),
    flat_index_arrays_divide_too_much=(
        "pm_cuda_IOTA",
        "for (int k = dim + 1; k < l->rank; k++) below *= l->shape[k];",
        "for (int k = dim; k < l->rank; k++) below *= l->shape[k];",
    ),
    blocks_of_a_cluster_count_alone=(
        "pm_grid_index",
        'if (cluster > 1) block = pm_str(e, "%s / %u", block, cluster);',
        "(void)cluster;",
    ),
    leading_axes_of_a_grid_grow=(
        "pm_grid_index",
        'return d ? pm_str(e, "%s %% %s", block, grid_points(e, d, d + 1, 1)) : block;',
        "return block;",
    ),
    select_takes_the_other=(
        "pm_cuda_SELECT",
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
        "operand_of",
        ("o->stride = 8 * v->swizzle; o->leading = o->k_contiguous || !chunk ? 16 : chunk * 16;"),
        ("o->leading = 8 * v->swizzle; o->stride = o->k_contiguous || !chunk ? 16 : chunk * 16;"),
    ),
    groups_of_rows_are_half_as_far=(
        "operand_of",
        "o->stride = 8 * v->swizzle;",
        "o->stride = 4 * v->swizzle;",
    ),
    swizzle_of_64_says_32=(
        "high_word",
        "o->view.swizzle == 64 ? 2 : 3;",
        "o->view.swizzle == 64 ? 3 : 2;",
    ),
    k_steps_skip_one=("operand_of", "(pm_piece){1, inside, 2};", "(pm_piece){1, inside, 4};"),
    k_steps_of_8_rows=(
        "operand_of",
        "(pm_piece){1, k_steps, 16 * row};",
        "(pm_piece){1, k_steps, 8 * row};",
    ),
    chunks_of_k_overlap=(
        "operand_of",
        "(pm_piece){inside, k_steps / inside, chunk};",
        "(pm_piece){inside, k_steps / inside, chunk / 2};",
    ),
    m_steps_of_8_rows=(
        "operand_of",
        "(pm_piece){1, m_steps, 64 * row};",
        "(pm_piece){1, m_steps, 8 * row};",
    ),
    m_steps_of_one_chunk=(
        "operand_of",
        "(pm_piece){1, m_steps, 64 / s * chunk};",
        "(pm_piece){1, m_steps, chunk};",
    ),
    products_are_not_committed=("pm_cuda_WGMMA", 'pm_line(e, "wgmma_commit();");', ""),
    one_product_more_may_be_pending=(
        "pm_cuda_WGMMA_WAIT",
        "wait_for_products(e, op, *pm_attr(e->g, op, PM_ATTR_N));",
        "wait_for_products(e, op, *pm_attr(e->g, op, PM_ATTR_N) + 1);",
    ),
    accumulators_are_read_early=(
        "pm_cuda_ACC_LOAD",
        "wait_for_products(e, op, n);",
        "wait_for_products(e, op, n + 1);",
    ),
    b_is_transposed_the_other_way=(
        "pm_cuda_WGMMA",
        ".transpose_b = !b.k_contiguous,",
        ".transpose_b = b.k_contiguous,",
    ),
    row_blocks_of_a_are_half_as_far=(
        "issue_row",
        '"a", m, k_steps * 4, k * 4);',
        '"a", m, k_steps * 2, k * 4);',
    ),
    later_steps_begin_where_the_first_does=(
        "issue_row",
        'moved(e, "b", "0", 0, pm_sum_at(&b->k, k)),',
        'moved(e, "b", "0", 0, 0),',
    ),
    slices_of_accumulators_are_twice_as_far=("part_of", "+ v->start[1] / 2;", "+ v->start[1];"),
    halves_of_accumulators_take_a_word=(
        "issue_rows",
        "const int64_t per_word = p->half ? 4 : 2, m_steps",
        "const int64_t per_word = 2, m_steps",
    ),
    accumulators_are_not_pinned=(
        "pm_cuda_ACC_LOAD",
        "if (!in_ptx) pin(e, &p);",
        "",
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
        "is_overwritten",
        "if (mentions(g, op, acc)) {",
        "if (mentions(g, op, acc) && !pm_get(g, op)->n_regions) {",
    ),
    all_steps_overwrite=("issue_row", "kind.contents = PM_ADDED_TO;", ""),
    accumulators_stay_fresh=("pm_cuda_WGMMA", "e->contents[p.view.base] = PM_ADDED_TO;", ""),
    nothing_is_fresh_and_nothing_zero=("pm_cuda_ALLOC_ACC", "e->contents[o->out] = PM_FRESH;", ""),
    halves_are_unpacked_from_the_next=(
        "pm_cuda_ACC_LOAD",
        '"for (int r = 0; r < %lld; r += 2) unpack_pair(&%s[r], %s[(%s) / 2]);",',
        '"for (int r = 0; r < %lld; r += 2) unpack_pair(&%s[r], %s[(%s) / 2 ^ 1]);",',
    ),
    halves_are_packed_in_reverse=(
        "write_registers",
        '"const f16 x[2] = {%s, %s};", x, next);',
        '"const f16 x[2] = {%s, %s};", next, x);',
    ),
)
breaks(
    f"{CUDA}/emit_wgmma.c",
    f"{SPECIALISED}::test_zeros_in_front_of_a_product",
    f"{SPECIALISED}::test_an_accumulator_begins_with_an_array",
    f"{SPECIALISED}::test_an_accumulator_that_is_used_inside_first",
    "ops/test_ops_fp8.py",
    what_products_overwrite_is_not_written=(
        "pm_cuda_ACC_STORE",
        "is_zeros(e->g, in) && is_overwritten(",
        "(is_zeros(e->g, in) | true) && is_overwritten(",
    ),
    zeros_are_never_written=(
        "pm_cuda_ACC_STORE",
        "&& is_overwritten(e->g, op, p.view.base)) {",
        ") {",
    ),
    all_numbers_are_zero=(
        "is_zeros",
        "pm_constant(g, array, &x) && !x.i;",
        "pm_constant(g, array, &x);",
    ),
    zeros_in_a_layout_are_written=(
        "is_zeros",
        "while (def && pm_get(g, def)->code == PM_OP_LAYOUT_CAST) {",
        "while (false) {",
    ),
    slices_are_no_use_of_an_accumulator=(
        "mentions",
        "if (pm_view_base(g, pm_in(g, op, k)) == v) return true;",
        "if (pm_in(g, op, k) == v) return true;",
    ),
    zeros_leave_old_sums=("pm_cuda_ACC_STORE", "e->contents[p.view.base] = PM_HELD;", ""),
    products_after_zeros_get_other_registers=(
        "pm_cuda_ACC_STORE",
        "e->contents[p.view.base] = PM_HELD;",
        "e->contents[p.view.base] = PM_FRESH;",
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    CATALOGUE,
    transposes_are_exchanged=("put_immediates", "transpose_a); pm_putf", "transpose_b); pm_putf"),
    b_is_negated=("put_immediates", 'pm_put(t, ", 1, 1");', 'pm_put(t, ", 1, -1");'),
    descriptors_stay_at_the_first_step=(
        "put_descriptor",
        "if (offset) {",
        "if (offset > 1 << 20) {",
    ),
    words_of_b_are_exchanged=(
        "put_statement",
        '"\\"r\\"(b), \\"r\\"(b_high)\\n    : \\"memory\\")"',
        '"\\"r\\"(b_high), \\"r\\"(b)\\n    : \\"memory\\")"',
    ),
    products_forget_the_accumulator=(
        "put_step",
        'adds ? "eq" : "ne", adds);',
        'overwrites ? "ne" : "eq", adds);',
    ),
    registers_of_zeros_are_not_read=(
        "put_statement",
        "w->contents == PM_FRESH ? '=' : '+'",
        "w->contents != PM_ADDED_TO ? '=' : '+'",
    ),
    statements_begin_without_the_fence=(
        "put_statement",
        '"    \\"wgmma.fence.sync.aligned;\\\\n\\"\\n"',
        '"    \\"\\\\n\\"\\n"',
    ),
    pins_leave_out_the_last=(
        "pm_ptx_pin",
        "k < pm_min(n, from + PINNED_AT_ONCE)",
        "k < pm_min(n - 1, from + PINNED_AT_ONCE)",
    ),
)
breaks(
    f"{CUDA}/ptx.c",
    f"{CATALOGUE}::test_products",
    f"{SPECIALISED}::test_products_of_tiles_of_other_extents",
    f"{SPECIALISED}::test_a_fresh_accumulator_is_overwritten",
    f"{PIPES}::test_wgmma_forms",
    CATALOGUE,
    overwriting_products_have_the_same_name=(
        "pm_ptx_wgmma",
        '"_fresh" : w->contents ==',
        '"" : w->contents ==',
    ),
    all_products_overwrite=(
        "put_statement",
        "{w->contents == PM_FRESH ? '=' : '+', letter}",
        "{'=', letter}",
    ),
    names_forget_which_way_b_lies=("pm_ptx_wgmma", "w->transpose_b ? 'n' : 'k');", "'k');"),
    names_forget_which_way_a_lies=("pm_ptx_wgmma", "'m' : 'k',", "'k' : 'k',"),
    names_forget_how_far_steps_are=("pm_ptx_wgmma", "pm_sum_at(w->b, k)); if", "k); if"),
    registers_of_a_take_two_operands=("put_step", "(w->a ? 2 : (int)w->steps * 4);", "2;"),
    halves_have_as_many_registers=(
        "pm_ptx_wgmma",
        "acc == PM_F16 ? w->n / 4 : w->n / 2);",
        "acc == PM_F16 ? w->n / 2 : w->n / 2);",
    ),
    words_of_registers_are_read_in_reverse=(
        "put_step",
        "a, a + 1, a + 2, a + 3);",
        "a, a + 2, a + 1, a + 3);",
    ),
    products_elsewhere_without_fence=("put_calls", 'pm_put(t, "  wgmma_fence(line);\\n");', ""),
)

# ---- the pipeline --------------------------------------------------------------------------------

breaks(
    PIPELINE,
    f"{PIPES}::test_mixed_delays",
    f"{PIPES}::test_output_visits",
    f"{PIPES}::test_two_dimensional_grid_with_carry",
    f"{PIPES}::test_slots_and_steps",
    PIPES,
    slots_are_not_reused=(
        "_run",
        "slot = {n: s % n if n > 1 else 0 for n in counts}",
        "slot = dict.fromkeys(counts, 0)",
    ),
    next_blocks_come_too_late=(
        "_run",
        "fetch(level, s + (n - d),",
        "fetch(level, s + (n - d) + 1,",
    ),
    blocks_past_the_last_are_fetched=(
        "_run",
        "more = s < steps - (n - d)",
        "more = s < steps - (n - d) + 1",
    ),
    delayed_slots_are_the_present_one=("_run", "(s - d) % n if d else slot[n]", "slot[n]"),
    stores_of_a_slot_are_not_awaited=(
        "_run",
        "min(o.slots for o in variant) - 1, wait_read_only",
        "min(o.slots for o in variant), wait_read_only",
    ),
    results_are_not_committed=(
        "_run",
        "if variant:\n            _ops.commit_smem()",
        "if variant:\n",
    ),
    results_are_stored_at_each_visit=(
        "_run",
        "first = (s == 0) | _moved(o, grid, now, s)",
        "first = (s == s)",
    ),
    last_visit_is_not_stored=(
        "_finish",
        "again = (last > 0) & ~_moved",
        "again = (last < 0) & ~_moved",
    ),
    last_stores_are_not_awaited=(
        "run_steps",
        "_ops.wait_smem_to_gmem(0, wait_read_only=last)",
        "pass",
    ),
)

breaks(
    "pallas_mgpu/_schedule.py",
    f"{PIPES}::test_two_dimensional_grid_with_carry",
    PIPES,
    grid_indices_are_reversed=("unravel", "return (flat, *reversed(out))", "return (*out, flat)"),
)
breaks(
    "pallas_mgpu/_ws_pipeline.py",
    f"{CLUSTER}::test_gemm",
    WS,
    slots_are_refilled_before_they_are_consumed=(
        "_Pipeline._memory",
        "await_consumed(n, k)\n            fetch(n, k, k % n)",
        "fetch(n, k, k % n)\n            await_consumed(n, k)",
    ),
    compute_threads_release_the_next_slot=(
        "_Pipeline._compute_loop",
        "_ops.barrier_arrive, b.at[released[n]])",
        "_ops.barrier_arrive, b.at[(released[n] + 1) % n])",
    ),
    compute_threads_release_at_once=(
        "_Pipeline._compute_loop",
        "released = {n: (s + (n - d)) % n if d else slot[n] for n in counts}",
        "released = slot",
    ),
)
breaks(
    "pallas_mgpu/_ws_pipeline.py",
    WS,
    f"{CLUSTER}::test_gemm",
    ready_after_one_input=(
        "_Pipeline.get_allocations",
        "Barrier(num_arrivals=len(r), num_barriers=k)",
        "Barrier(num_barriers=k)",
    ),
    consumed_by_one_thread=(
        "_Pipeline.get_allocations",
        "return Barrier(num_arrivals=n, num_barriers=slots)",
        "return Barrier(num_barriers=slots)",
    ),
    consumed_by_one_thread_of_a_cluster=(
        "_Pipeline.get_allocations",
        "collective_axes=tuple(axes), num_arrivals=n, num_barriers=slots",
        "collective_axes=tuple(axes), num_barriers=slots",
    ),
    shared_slots_are_consumed_by_one_block=(
        "_Pipeline.get_allocations",
        "if axes:",
        "if not axes:",
    ),
    early_steps_release_as_well=(
        "_Pipeline._compute_loop",
        "when(s >= d)(release) if d else release()",
        "release()",
    ),
    releases_are_awaited_for_ever=(
        "_Pipeline._memory",
        "hi = steps - self.delay + late",
        "hi = steps",
    ),
    the_last_releases_are_not_awaited=(
        "_Pipeline._memory",
        "_not_below_zero(steps - n), hi, lambda",
        "hi, hi, lambda",
    ),
    a_step_is_never_fetched=(
        "_Pipeline._memory",
        "fewest\n        if state is",
        "fewest + 1\n        if state is",
    ),
    the_first_steps_are_fetched_twice=(
        "_Pipeline._memory",
        "when(state == int(start))(prologue)",
        "prologue()",
    ),
    steady_pipelines_begin_after_the_first=(
        "_Pipeline._memory",
        "first = _core.where(state == int(start), fewest, 0)",
        "first = _core.where(state == int(start), fewest, fewest)",
    ),
    steady_state_is_stop=(
        "_Pipeline._memory",
        "when(state == int(PipelinePipeline.STOP))(quiesce)",
        "quiesce()",
    ),
    stores_of_a_step_are_not_awaited=(
        "_Pipeline._compute_loop",
        "_ops.wait_smem_to_gmem(fewest - 1, wait_read_only=True)",
        "_ops.wait_smem_to_gmem(fewest, wait_read_only=True)",
    ),
    results_of_steps_are_not_committed=(
        "_Pipeline._compute_loop",
        "if variant:\n                _ops.commit_smem()",
        "if variant:\n",
    ),
    last_results_are_not_committed=(
        "_Pipeline._compute",
        "if not variant:\n                _ops.commit_smem()",
        "",
    ),
    kernel_ends_before_its_stores=(
        "_Pipeline._compute",
        "()\n        if outs:\n            _ops.wait_smem_to_gmem(0)",
        "()\n",
    ),
    collective_axes_are_ignored=(
        "_Pipeline._memory",
        "collective_axes=o.spec.collective_axes,",
        "collective_axes=None,",
    ),
    out_of_bounds_mode_is_ignored=(
        "_Pipeline._memory",
        "oob_mode=o.spec.oob_fill_mode,",
        "oob_mode=None,",
    ),
    registers_of_the_memory_thread_are_counted_twice=(
        "_Pipeline._compute",
        "share = (512 - self.memory_registers) // self.num_compute_wgs",
        "share = (512 - 2 * self.memory_registers) // self.num_compute_wgs",
    ),
    short_pipelines_fetch_past_the_end=(
        "_Pipeline._operands",
        "o.set_slots(self.max_concurrent_steps, steps)",
        "o.set_slots(self.max_concurrent_steps, None)",
    ),
    short_dynamic_pipelines_fetch_past_the_end=(
        "_Pipeline._memory",
        "when(steps > k)(lambda n=n, step=step, k=k: fetch(n, step, k))",
        "fetch(n, step, k)",
    ),
    stores_where_nothing_moved=(
        "_Pipeline._compute_loop",
        "x != y for x, y in zip(now, past)",
        "x == y for x, y in zip(now, past)",
    ),
    all_inputs_are_ready_at_once=("_Pipeline._memory", "ready[k].at[slot],", "ready[0].at[slot],"),
)

# ---- what compilers lose and overwrite -----------------------------------------------------------

breaks(
    f"{CUDA}/emit_wgmma.c",
    f"{COMPILERS}::test_what_is_held",
    operands_of_loops_are_not_held=(
        "pack_a",
        "repeats = pm_repeats(e->g, a, op)",
        "repeats = !op",
    ),
)
breaks(
    "csrc/ir/depends.c",
    f"{COMPILERS}::test_what_is_held",
    f"{COMPILERS}::test_ops_hold_nothing",
    carries_never_change=(
        "changes_in",
        "return c->g->blocks.at[value->block].parent == c->loop;",
        "return false;",
    ),
    carries_that_stay_change=(
        "argument_changes",
        "parent == op) return false;",
        "parent == op + 1) return false;",
    ),
    shared_memory_stays=(
        "result_changes",
        "PM_IN_SMEM | PM_IN_BARRIER | PM_IN_SEMAPHORE",
        "PM_IN_BARRIER | PM_IN_SEMAPHORE",
    ),
    accumulators_change_anyway=(
        "result_changes",
        "if (writes(g, c->loop, pm_view_base(g, a.view))) return true;",
        "return true;",
    ),
)
breaks(
    "csrc/runtime/products.c",
    f"{COMPILERS}::test_every_missing_instruction_is_found",
    f"{COMPILERS}::test_what_a_compiler_may_leave_out",
    one_product_may_be_lost=(
        "lacking",
        "if (have[k] < want[k]) return k;",
        "if (have[k] + 1 < want[k]) return k;",
    ),
    nothing_may_be_left_out=(
        "pm_check_products",
        "if (pm_protect(find_needed, &want, err)) return err->code;",
        "if (!want.ptx && pm_protect(find_needed, &want, err)) return err->code;",
    ),
)
breaks(
    "csrc/runtime/ptx.c",
    f"{COMPILERS}::test_what_a_compiler_may_leave_out",
    what_is_overwritten_is_needed=("step_back", "async && !overwrites(f, s);", "async;"),
    everything_has_a_value_of_its_own=(
        "value_of",
        "if (x->n_writers != 1 ||",
        "if (x->n_writers != 9 ||",
    ),
)
