"""Mutants of one-lane code, clusters, the catalogue, turns, tiles, carries and ranges."""

from . import (
    ACCESSES,
    ARRAYS,
    ATTENTION,
    CATALOGUE,
    CLUSTER,
    CONTROL,
    CUDA,
    DEVICE,
    DOCUMENTS,
    EVAL,
    FUZZ,
    HOST,
    MEMORY,
    NAMED,
    PASSES,
    PIPES,
    SCHEDULE,
    SECTIONS,
    SPECIALISED,
    SURFACE,
    TEXT,
    WS,
    breaks,
)

# ---- what ops touch ------------------------------------------------------------------------------

breaks(
    "csrc/ir/ops.def",
    ACCESSES,
    stores_also_read=("STORE", '"r>a"', '"r=a"'),
    copies_only_read=("COPY_S2G", '"m<~g>~p?"', '"m<~g<~p?"'),
    products_of_plain_reads=("WGMMA", '"c=~v<~v<~"', '"c=~v<v<"'),
    source_reads_only=("INLINE", '"v!*"', '"v<*"'),
)
breaks(
    "csrc/ir/access.c",
    ACCESSES,
    plain_copies_are_of_the_async_proxy=(
        "proxy_of",
        "engine == PM_ENGINE_PLAIN ? PM_GENERIC : PM_ASYNC;",
        "engine == PM_ENGINE_PLAIN ? PM_ASYNC : PM_ASYNC;",
    ),
    combining_copies_do_not_read=(
        "fill",
        "how->role != '>' || (memory && attr_of(g, o, PM_ATTR_COMBINE));",
        "how->role != '>';",
    ),
    arrivals_stay_in_the_block=(
        "leaves_block",
        "return how->role != '<' && spans_blocks(",
        "return how->role == '<' && spans_blocks(",
    ),
    waits_that_know_their_phase_advance_it=("next_extra", "&& o->n_in == 1;", "&& o->n_in >= 1;"),
    loops_run_for_sure=("always_runs", "lower.i < upper.i;", "lower.i <= upper.i;"),
    branches_are_all_taken=("pm_accesses_inside", "branches && e->n_sure < n)", "branches && !n)"),
    repeats_in_a_branch_count=(
        "add",
        "if (a.certainty != PM_MUST || e->region == m->region) return;",
        "if (a.certainty != PM_MUST) return;",
    ),
    starts_are_the_least=("pm_access_bytes", "v.offset + most + 1;", "v.offset + least + 1;"),
    tiles_end_early=(
        "reach_of",
        "(d->size - 1) / d->tile * d->outer + (d->tile - 1) * d->inner;",
        "(d->size - 1) / d->tile * d->outer;",
    ),
)

# ---- what is known before the kernel runs --------------------------------------------------------

breaks(
    "csrc/ir/eval.c",
    EVAL,
    branches_of_threads_are_exchanged=(
        "pm_chosen_region",
        "if (branch->code == PM_OP_IF) return x ? 0 : 1;",
        "if (branch->code == PM_OP_IF) return x ? 1 : 0;",
    ),
    threads_switch_without_limits=(
        "pm_chosen_region",
        "return (uint32_t)pm_max(0, pm_min(x, (int64_t)branch->n_regions - 1));",
        "return (uint32_t)x % branch->n_regions;",
    ),
    equal_threads_are_different=(
        "eq",
        "COMPARISON(eq, ==)",
        "COMPARISON(eq, !=)",
    ),
    known_values_do_not_wrap=(
        "pm_eval",
        "pm_store_scalar(to, wrapped, *out); *out = pm_load_scalar(to, wrapped);",
        "(void)wrapped;",
    ),
    one_operand_decides_nothing=(
        "is_decided",
        "if (e == PM_ELEMENT_NO || pm_is_float(o->from)) return false;",
        "if (e != PM_ELEMENT_NO || pm_is_float(o->from)) return false;",
    ),
    one_bit_decides_an_or=(
        "element",
        "return t == PM_BOOL ? 1 : -1;",
        "return 1;",
    ),
    all_axes_are_threads=(
        "value",
        "return *pm_attr(g, def, PM_ATTR_AXIS) == PM_AXIS_THREAD;",
        "return true;",
    ),
)

breaks(
    "csrc/interp/compile.c",
    "language/test_scopes.py",
    interpreted_threads_share_what_is_theirs=(
        "alloc_smem",
        "c->apart[v] = (uint32_t)*pm_attr(c->g, op, PM_ATTR_APART);",
        "c->apart[v] = 0;",
    ),
    interpreted_allocations_begin_together=(
        "alloc_smem",
        "c->alloc[v] = (uint32_t)*pm_attr(c->g, op, PM_ATTR_OFFSET);",
        "c->alloc[v] = 0;",
    ),
)

breaks(
    "csrc/ir/numbers.def",
    EVAL,
    differences_commute=(
        "SUB",
        "NEVER, ZERO, NO, NOTHING",
        "ALWAYS, ZERO, NO, NOTHING",
    ),
    an_and_of_equals_is_nothing=(
        "AND",
        "ALWAYS, ONES, ZERO, SAME",
        "ALWAYS, ONES, ZERO, NOTHING",
    ),
    ones_decide_a_product=(
        "MUL",
        "ALWAYS, ANY_ONE, ZERO, NO",
        "ALWAYS, ANY_ONE, ONE, NO",
    ),
)

# ---- one lane, clusters --------------------------------------------------------------------------

breaks(
    f"{CUDA}/lane.c",
    f"{MEMORY}::test_many_copies_on_one_barrier",
    f"{MEMORY}::test_producer_and_consumers",
    f"{SPECIALISED}::test_lanes_that_go_on_wait_themselves",
    SPECIALISED,
    one_lane_of_each_warp_copies=(
        "pm_gen_region",
        'pm_begin(e, "%s {", pm_elected(e));',
        'pm_begin(e, "if (elect_one()) {");',
    ),
    all_lanes_copy=(
        "pm_gen_region",
        'pm_begin(e, "%s {", pm_elected(e));',
        'pm_begin(e, "if (warp == 0) {");',
    ),
    regions_keep_what_others_need=(
        "cut_at_used",
        "if (uses[o->out + i] != e->uses[o->out + i]) return",
        "if (uses[o->out + i] > e->uses[o->out + i]) return",
    ),
    one_lane_waits_for_all=(
        "find_region",
        "if (plain < end && !is_last(g, block, end, true)) end = plain;",
        "if (plain < end && !is_last(g, block, end, true)) end -= plain > end;",
    ),
    a_barrier_is_awaited_in_two_ways=(
        "pm_find_lane_barriers",
        "if (!e->lane_barrier[v] || !(w.inside[v] & w.outside[v])) continue;",
        "if (!e->lane_barrier[v] || !(w.inside[v] & w.outside[v] & 0x80000000)) continue;",
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
    copies_by_all_lanes_are_made_by_one=(
        "lane_op",
        "if (engine && *pm_attr(g, op, PM_ATTR_ENGINE) == PM_ENGINE_PLAIN) return false;",
        "(void)engine;",
    ),
    one_lane_waits_for_barriers_anywhere=(
        "lane_op",
        "if (waits && !e->lane_barrier[pm_view_base(g, a.view)]) return false;",
        "(void)waits;",
    ),
    one_lane_takes_tiles_for_all=(
        "lane_op",
        "case PM_KNOWN_LANE: t->sticky = true; break;",
        "case PM_KNOWN_LANE: break;",
    ),
    one_lane_enters_collective_scopes=(
        "lane_regions",
        ("if (scope && *pm_attr(g, op, PM_ATTR_COLLECTIVE) && g->n_threads > 1) return false;"),
        "(void)scope;",
    ),
    meetings_after_regions_are_lost=(
        "find_region",
        "if (!is_pure(e, op) && pm_get(g, op)->code != PM_OP_SYNC) break;",
        "if (!is_pure(e, op)) break;",
    ),
    nobody_meets_in_front_of_regions=(
        "pm_gen_region",
        "if (t.syncs && !has_met(e, block, first)) pm_line",
        "if (t.syncs && !has_met(e, block, first) && false) pm_line",
    ),
    nobody_meets_after_regions=(
        "pm_gen_region",
        'if (meets) pm_line(e, "%s", pm_meet(e));',
        'if (false) pm_line(e, "%s", pm_meet(e));',
    ),
    warps_stay_apart_after_regions=(
        "pm_gen_region",
        'if (t.flows || t.sticky) pm_line(e, "warp_sync();");',
        "",
    ),
    scalars_of_regions_move_out=(
        "is_hoisted",
        "if (made[pm_in(e->g, op, k)]) return false;",
        "(void)made;",
    ),
    rest_of_a_loop_is_the_rest=(
        "is_last",
        "if (pm_is_loop(code) || pm_maps_warps(code)) return false;",
        "if (code == PM_OP_WHILE || pm_maps_warps(code)) return false;",
    ),
)
breaks(
    f"{CUDA}/cluster.c",
    CLUSTER,
    masks_begin_at_block_0=(
        "pm_cluster_mask",
        '"0x%xu << (cluster_rank() - (%s))"',
        '"0x%xu << (cluster_rank() * 0 - 0 * (%s))"',
    ),
    axes_of_a_cluster_are_exchanged=(
        "stride_of",
        ("for (uint32_t k = (uint32_t)axis + 1; k < g->n_cluster; k++) stride *= g->cluster[k];"),
        "for (uint32_t k = 0; k < axis; k++) stride *= g->cluster[k];",
    ),
    blocks_signal_themselves_twice=(
        "pm_cluster_target",
        "(long long)(size + 1 - before % size), k, (long long)size);",
        "(long long)(size - before % size), k, (long long)size);",
    ),
    peers_count_from_the_other_side=(
        "pm_cluster_peer",
        '"cluster_rank() + (u32)((%s) - %s) * %lldu"',
        '"cluster_rank() - (u32)((%s) - %s) * %lldu"',
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
        "is_whole",
        "return pm_cluster_size(g, axes, n) == pm_blocks(g);",
        "return pm_cluster_size(g, axes, n) <= pm_blocks(g);",
    ),
    number_in_a_group_is_that_in_the_cluster=(
        "own_part",
        "in_rank ? stride_of(e->g, axes[k]) : below);",
        "in_rank || below ? stride_of(e->g, axes[k]) : below);",
    ),
    masks_are_of_neighbours=("pm_cluster_mask", "pattern |= 1u << rank;", "pattern |= 1u << k;"),
    groups_count_their_own_block_again=(
        "pm_cluster_targets",
        "pm_cluster_size(g, &groups[k], group_end(groups, k) - k) - 1;",
        "pm_cluster_size(g, &groups[k], group_end(groups, k) - k);",
    ),
    peers_are_next_to_each_other=(
        "pm_cluster_peer",
        "coordinate(e, axis), (long long)stride_of(e->g, axis));",
        "coordinate(e, axis), 1LL);",
    ),
    one_variable_for_all_groups=(
        "once",
        "if (!strcmp(e->head_vars.at[k].text, text))",
        "if (*e->head_vars.at[k].text)",
    ),
    numbers_of_blocks_do_not_divide=(
        "part_of",
        "s.at[s.n++] = (pm_piece){below, e->g->cluster[axes[i]], stride_of(e->g, axes[i])};",
        "s.at[s.n++] = (pm_piece){1, e->g->cluster[axes[i]], stride_of(e->g, axes[i])};",
    ),
    coordinates_are_named_from_the_front=(
        "coordinate",
        '"xyz"[e->g->n_cluster - 1 - axis]',
        '"xyz"[axis]',
    ),
)
breaks(
    f"{CUDA}/program.c",
    CLUSTER,
    blocks_signal_before_barriers_are_there=(
        "print_body",
        'if (s.meets_cluster || pairs) { pm_line(e, "cluster_sync();");',
        'if (s.meets_cluster || pairs) { pm_line(e, "block_sync();");',
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
        "print_counters_done",
        "p->grid[2] * e->g->n_threads;",
        "p->grid[2];",
    ),
    all_lanes_are_done=("print_counters_done", "*who = PM_ONE_LANE,", '*who = "",'),
    the_last_counter_is_not_there=(
        "look_at_counter",
        "s->e->n_counters = counter + 1;",
        "s->e->n_counters = pm_max(counter, 1);",
    ),
    blocks_end_while_others_reach_them=(
        "print_body",
        'if (s.meets_cluster || pairs) pm_line(e, "cluster_sync();");',
        "",
    ),
    axes_of_clusters_are_reversed_at_launch=(
        "set_geometry",
        "p->cluster[g->n_cluster - 1 - k] =",
        "p->cluster[k] =",
    ),
    two_axes_of_a_grid_are_one=(
        "along",
        "pm_min(g->n - 1 - axis, 2)",
        "pm_min(g->n - 1 - axis, 1)",
    ),
    aliased_operands_are_constant=(
        "is_written",
        "if (g->alias && g->alias[k] == (int32_t)param)",
        "if (false)",
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    CLUSTER,
    shares_lie_at_one_place=(
        "issue_tma",
        "share, (long long)p->share.smem_step);",
        "share, (long long)p->share.smem_step * 0);",
    ),
    all_load_the_same_share=(
        "coord_text",
        "share, (long long)p->share.coord_step[d]);",
        "share, (long long)p->share.coord_step[d] * 0);",
    ),
    the_first_blocks_are_signalled_only=(
        "arrive_in_cluster",
        '"if (tid < %lld)", n);',
        '"if (tid < %lld)", n - 1);',
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
    next_tile_ignores_the_launch_before=(
        "pm_cuda_NEXT_TILE",
        'if (e->program->pdl) pm_line(e, "griddepcontrol_wait();");',
        "",
    ),
    one_counter_for_all=(
        "pm_cuda_NEXT_TILE",
        '"%s = next_tile(&counters[%lld]);", x, n); if (e->lane)',
        '"%s = next_tile(&counters[%lld]);", x, n * 0); if (e->lane)',
    ),
    registers_go_the_other_way=("pm_cuda_SET_MAX_REGISTERS", '? "inc" : "dec"', '? "dec" : "inc"'),
)
breaks(
    f"{CUDA}/emit_print.c",
    f"{MEMORY}::test_debug_print",
    "language/test_print.py",
    all_lanes_print=(
        "pm_cuda_DEBUG_PRINT",
        '"if (%s) {", pm_first_lane(e)',
        '"if (true) {", pm_first_lane(e)',
    ),
    percent_signs_are_formats=("print_format", "if (*s == '%') pm_put(&format, \"%\");", ""),
    copies_are_printed=(
        "print_array",
        "const char *first = pm_first_copy(e, l), *stem",
        "const char *first = NULL, *stem",
    ),
    padding_is_printed=(
        "print_array",
        "const char *valid = pm_valid(e, l, stem, i);",
        "const char *valid = stem ? NULL : NULL;",
    ),
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
    collective_loads_stay_at_home=("issue_tma", 'share ? "multicast" : "load"', '"load"'),
    acquires_of_cluster_barriers_are_forgotten=(
        "wait_function",
        'return far ? "mbarrier_wait_cluster"',
        'return far ? "mbarrier_wait"',
    ),
    releases_of_cluster_barriers_are_forgotten=("arrive_in_cluster", '"release",', '"remote",'),
    one_lane_signals_one_block_less=(
        "arrive_in_cluster",
        '"for (u32 k = 0; k < %lld; k++)", n);',
        '"for (u32 k = 0; k < %lld; k++)", n - 1);',
    ),
    phases_of_other_barriers_are_tested=(
        "pm_cuda_WAIT",
        '"%s, %s & 1", b.address, bit',
        '"%s, %s != 0", b.address, bit',
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
    plain_copies_leave_out_the_last_chunk=(
        "copy_chunks",
        "chunks /= n;",
        "chunks = chunks / n - 1;",
    ),
    chunks_begin_anywhere=(
        "chunk_fits",
        "v->dim[last].size % n || pm_view_divisor(e->g, v) % n)",
        "v->dim[last].size % n)",
    ),
    chunks_overhang=(
        "chunk_fits",
        "all % n == 0 && start % n == 0;",
        "start % n == 0;",
    ),
    chunks_are_not_swizzled=(
        "chunk_address",
        'v->swizzle ? pm_str(e, "swizzle<%d>(%s)", v->swizzle, t.at) : t.at;',
        "t.at;",
    ),
    bounds_of_plain_copies_are_one_too_wide=(
        "dim_in_bounds",
        "hi + size <= v->base_shape[d];",
        "hi + size <= v->base_shape[d] + 1;",
    ),
    plain_stores_are_no_group=(
        "copy_by_lanes",
        "if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) {",
        "if (false) {",
    ),
    maps_of_two_swizzles_are_one=(
        "same_map",
        "if ((a->swizzle != b->swizzle && !any) || a->of != b->of)",
        "if (a->of != b->of)",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    CLUSTER,
    SPECIALISED,
    arrivals_overtake_accesses=(
        "visit_arrive",
        "if (!p->touched && !p->waited && is_empty(&p->loaded)) return;",
        "if (p->touched || !p->waited) return;",
    ),
    arrivals_overtake_waits=(
        "visit_arrive",
        "if (!p->touched && !p->waited && is_empty(&p->loaded)) return;",
        "if (!p->touched) return;",
    ),
    all_arrivals_are_relaxed=(
        "set_order",
        "*order = *(int64_t *)ctx",
        "*order = PM_ORDER_RELAXED",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    "memory/test_late_loads.py",
    warps_arrive_before_their_loads=(
        "visit_arrive",
        "place_fence(p, block, k); } else {",
        "} else {",
    ),
    copies_overtake_loads=(
        "overwrites_unfenced",
        "overlap(&p->unfenced, from, to) || overlap(&p->loaded, from, to)",
        "overlap(&p->unfenced, from, to)",
    ),
    scopes_end_before_their_loads=("visit_scope", "place_fence(p, body, &last);", ""),
    every_load_is_fenced=(
        "load_bytes",
        "&& overlap(&p->kernel->filled, from, to)) add_range(&p->loaded",
        ") add_range(&p->loaded",
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
    f"{CLUSTER}::test_a_wait_is_after_all_lanes_before_an_arrival",
    f"{CLUSTER}::test_loads_of_what_nobody_writes_need_no_meeting",
    f"{CLUSTER}::test_a_scalar_store_is_finished_before_an_arrival",
    f"{MEMORY}::test_swap_and_update",
    f"{MEMORY}::test_a_loop_stores_over_what_it_has_read",
    f"{HOST}::test_sibling_scopes_share_memory",
    f"{MEMORY}::test_what_was_stored_is_read_again",
    CONTROL,
    *FUZZ,
    other_parts_have_nothing_in_common=(
        "disjoint",
        "if (end_a <= start_b[k] || end_b <= start_a[k]) return true;",
        "if (end_a != end_b) return true;",
    ),
    branches_leave_nothing_unfenced=(
        "visit_control",
        "add_ranges(&unfenced, &p->unfenced); add_ranges(&loaded, &p->loaded);",
        "add_ranges(&loaded, &p->loaded);",
    ),
    loops_begin_clean=(
        "visit_control",
        "soil_block(p, pm_region(g, op, r)); add_ranges(&p->unfenced, &unfenced);",
        "if (!loop) soil_block(p, pm_region(g, op, r));",
    ),
    pending_products_are_complete=(
        "await_wgmma",
        "p->n_wgmmas > n) p->waited",
        "p->n_wgmmas >= n) p->waited",
    ),
    waits_are_meetings=("visit_wait", "p->at = APART; p->waited = true;", "p->waited = true;"),
    written_arrays_are_constant=(
        "is_constant",
        "== PM_GMEM && !(p->kernel->reach[base] & WRITTEN);",
        "== PM_GMEM;",
    ),
    loops_begin_untouched=("enter_loop", "p; p->touched |= s.touches;", "p;"),
    loops_begin_without_waits=("enter_loop", "touches; p->waited |= s.waits;", "touches;"),
    products_of_another_round_count=(
        "enter_loop",
        "p->waited |= s.waits; p->n_wgmmas = 0;",
        "p->waited |= s.waits;",
    ),
    gmem_needs_no_release=(
        "needs_release",
        ") return (how & READ) && (how & WRITTEN)",
        ") return false",
    ),
    peers_need_no_release=("needs_release", "(how & REMOTE) && (how & GENERIC); }", "false; }"),
    refs_of_peers_are_local=("note_reach", "a->scope == PM_CLUSTER ? REMOTE : 0", "0"),
    scopes_forget_accesses=("visit_scope", "p->lost |= p->n_open > 0;", "p->n_open = 0;"),
    branches_forget_accesses=("visit_control", "if (!loop) note_regions(p, op);", ""),
    branches_forget_touches=("visit_control", ".at; after.touched |=", ".at; after.touched ="),
    branches_forget_waits=(
        "visit_control",
        ".at; after.touched |= p->touched; after.waited |=",
        ".at; after.touched |= p->touched; after.waited =",
    ),
    the_next_op_is_always_a_meeting=("meets_next", "return pm_meets(code);", "return true;"),
)

breaks(
    "csrc/ir/access.c",
    f"{CLUSTER}::test_meetings_before_arrivals",
    CLUSTER,
    collective_copies_are_local=(
        "leaves_block",
        "if (how->remote || spans_blocks(g, o)) return true;",
        "if (how->remote) return true;",
    ),
)

# ---- the catalogue -------------------------------------------------------------------------------

breaks(
    f"{DEVICE}/memory.cuh",
    CATALOGUE,
    swizzle_of_the_wrong_row=(
        "swizzle",
        "(((a >> 7) & (B / 16 - 1)) << 4)",
        "(((a >> 8) & (B / 16 - 1)) << 4)",
    ),
    swizzle_of_too_few_chunks=("swizzle", "(B / 16 - 1)) << 4)", "(B / 32 - 1)) << 4)"),
    stmatrix_forgets_trans=(
        "stmatrix_x4_trans",
        '"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"',
        '"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"',
    ),
    vector_loads_exchange_words=(
        "ld_shared",
        '"ld.shared.v2.b32 {%0,%1}, [%2];"',
        '"ld.shared.v2.b32 {%1,%0}, [%2];"',
    ),
    halves_are_stored_as_words=(
        "st_shared",
        '"st.shared.b16 [%0], %1;"',
        '"st.shared.b32 [%0], %1;"',
    ),
    bytes_are_unpacked_by_nibbles=("unpack", "% 4 * 8))", "% 4 * 4))"),
)
breaks(
    f"{DEVICE}/barrier.cuh",
    CATALOGUE,
    arrival_forgets_the_bytes=(
        "mbarrier_arrive_expect_tx",
        '"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"',
        '"mbarrier.arrive.shared::cta.b64 _, [%0], %1;"',
    ),
    wait_tries_once=(
        "mbarrier_wait",
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], '
            '%1;\\n@p bra D;\\nbra W;\\nD: }"'
        ),
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], '
            '%1;\\n@p bra D;\\nD: }"'
        ),
    ),
    wait_tests_the_state=(
        "mbarrier_wait",
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], '
            '%1;\\n@p bra D;\\nbra W;\\nD: }"'
        ),
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.shared::cta.b64 p, [%0], %1;\\n@p bra '
            'D;\\nbra W;\\nD: }"'
        ),
    ),
    barrier_init_fence_is_another=(
        "mbarrier_init_fence",
        '"fence.mbarrier_init.release.cluster;"',
        '"fence.acq_rel.cta;"',
    ),
    arrival_at_the_wrong_block=(
        "mbarrier_arrive_remote",
        (
            '"{ .reg .b32 r;\\nmapa.shared::cluster.u32 r, %0, '
            '%1;\\nmbarrier.arrive.shared::cluster.b64 _, [r]; }"'
        ),
        (
            '"{ .reg .b32 r;\\nmapa.shared::cluster.u32 r, %1, '
            '%0;\\nmbarrier.arrive.shared::cluster.b64 _, [r]; }"'
        ),
    ),
    release_is_forgotten=(
        "mbarrier_arrive_release",
        (
            '"{ .reg .b32 r;\\nmapa.shared::cluster.u32 r, %0, '
            '%1;\\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]; }"'
        ),
        (
            '"{ .reg .b32 r;\\nmapa.shared::cluster.u32 r, %0, '
            '%1;\\nmbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r]; }"'
        ),
    ),
    acquire_is_forgotten=(
        "mbarrier_wait_cluster",
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 '
            'p, [%0], %1;\\n@p bra D;\\nbra W;\\nD: }"'
        ),
        (
            '"{ .reg .pred p;\\nW: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 '
            'p, [%0], %1;\\n@p bra D;\\nbra W;\\nD: }"'
        ),
    ),
    arrivals_are_dropped=(
        "mbarrier_arrive",
        '"mbarrier.arrive.shared::cta.b64 _, [%0];"',
        '"mbarrier.arrive.noComplete.shared::cta.b64 _, [%0], 1;"',
    ),
)
breaks(
    f"{DEVICE}/tma.cuh",
    CATALOGUE,
    columns_and_rows_of_loads=(
        "tma_load_2d",
        (
            '"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes '
            '[%0], [%1, {%3,%4}], [%2];"'
        ),
        (
            '"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes '
            '[%0], [%1, {%4,%3}], [%2];"'
        ),
    ),
    multicast_goes_to_this_block=(
        "tma_multicast_2d",
        (
            '"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes'
            ".multicast::cluster "
            '[%0], [%1, {%4,%5}], [%2], %3;"'
        ),
        (
            '"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes '
            '[%0], [%1, {%4,%5}], [%2];"'
        ),
    ),
    planes_of_stores=(
        "tma_store_3d",
        '"cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];"',
        '"cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%4,%3,%2}], [%1];"',
    ),
    reads_are_not_awaited=(
        "bulk_group_wait_read",
        '"cp.async.bulk.wait_group.read %0;"',
        '"cp.async.bulk.wait_group %0;"',
    ),
    proxy_fence_of_gmem_for_smem=(
        "fence_proxy_async",
        '"fence.proxy.async.shared::cta;"',
        '"fence.proxy.async.global;"',
    ),
    bulk_stores_in_no_group=("bulk_group_commit", '"cp.async.bulk.commit_group;"', '""'),
)
breaks(
    f"{DEVICE}/wgmma.cuh",
    CATALOGUE,
    leading_distance_in_bytes=("wgmma_address", "(leading >> 4) << 16", "leading << 16"),
    addresses_of_high_memory=("wgmma_address", "(a & 0x3ffff) >> 4", "(a & 0xffff) >> 4"),
    addresses_of_17_bits=("wgmma_address", "(a & 0x3ffff) >> 4", "(a & 0x1ffff) >> 4"),
    addresses_are_not_masked=("wgmma_address", "(a & 0x3ffff) >> 4", "a >> 4"),
    groups_are_not_committed=("wgmma_commit", '"wgmma.commit_group.sync.aligned;"', '""'),
)
breaks(
    f"{DEVICE}/wgmma.cuh",
    CATALOGUE,
    halves_of_a_pair_are_exchanged=(
        "unpack_pair",
        '"prmt.b32 %0, %2, 0, 0x4410;\\nprmt.b32 %1, %2, 0, 0x4432;"',
        '"prmt.b32 %0, %2, 0, 0x4432;\\nprmt.b32 %1, %2, 0, 0x4432;"',
    ),
    a_pair_is_twice_its_low_half=(
        "unpack_pair",
        '"prmt.b32 %0, %2, 0, 0x4410;\\nprmt.b32 %1, %2, 0, 0x4432;"',
        '"prmt.b32 %0, %2, 0, 0x4410;\\nprmt.b32 %1, %2, 0, 0x4410;"',
    ),
    products_are_not_awaited=(
        "wgmma_wait",
        '"wgmma.wait_group.sync.aligned %0;"',
        '"wgmma.wait_group.sync.aligned 7;"',
    ),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    half_a_warpgroup_meets=("warpgroup_sync", '"bar.sync %0, 128;"', '"bar.sync %0, 64;"'),
    warpgroup_0_meets_as_a_block=(
        "warpgroup_sync",
        '"bar.sync %0, 128;" :: "r"(wg + 1)',
        '"bar.sync %0, 128;" :: "r"(wg)',
    ),
    registers_are_given_instead_of_taken=(
        "setmaxnreg_inc",
        '"setmaxnreg.inc.sync.aligned.u32 %0;"',
        '"setmaxnreg.dec.sync.aligned.u32 %0;"',
    ),
    shuffle_of_half_a_warp=(
        "shuffle_xor",
        "__shfl_xor_sync(0xffffffffu, bits_of(x)",
        "__shfl_xor_sync(0xffffu, bits_of(x)",
    ),
    elected_among_one=(
        "elect_one",
        '"{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"',
        '"{ .reg .pred p; elect.sync _|p, 1; selp.u32 %0, 1, 0, p; }"',
    ),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    the_last_caller_but_one_clears=("counters_done", "r != callers - 1", "r != callers - 2"),
    the_count_of_the_done_is_not_cleared=("counters_done", "k <= n; k++", "k < n; k++"),
    the_done_are_counted_with_the_tiles=(
        "counters_done",
        '"l"(counters + n) : "memory"',
        '"l"(counters) : "memory"',
    ),
    tiles_are_counted_in_twos=(
        "next_tile",
        '"atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(r) : "l"(counter)',
        '"atom.relaxed.gpu.global.add.u32 %0, [%1], 2;" : "=r"(r) : "l"(counter)',
    ),
    blocks_of_a_cluster_meet_without_waiting=(
        "cluster_sync",
        '"barrier.cluster.arrive.relaxed;\\nbarrier.cluster.wait.acquire;"',
        '"barrier.cluster.arrive.relaxed;\\n"',
    ),
    rows_of_clusters_are_columns=(
        "cluster_index_y",
        '"mov.u32 %0, %%cluster_ctaid.y;"',
        '"mov.u32 %0, %%cluster_ctaid.x;"',
    ),
    any_is_all=(
        "lanes_any",
        (
            '"{ .reg .pred p, q;\\nsetp.ne.u32 q, %1, 0;\\nbar.red.or.pred p, %2, 128, '
            'q;\\nselp.u32 %0, 1, 0, p; }"'
        ),
        (
            '"{ .reg .pred p, q;\\nsetp.ne.u32 q, %1, 0;\\nbar.red.and.pred p, %2, 128, '
            'q;\\nselp.u32 %0, 1, 0, p; }"'
        ),
    ),
)
breaks(
    f"{DEVICE}/types.cuh",
    CATALOGUE,
    halves_are_cut=("cvt_f16", '"cvt.rn.f16.f32 %0, %1;"', '"cvt.rz.f16.f32 %0, %1;"'),
    pairs_are_packed_in_reverse=(
        "cvt_rn_f16x2",
        'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));',
        'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(lo), "f"(hi));',
    ),
    integers_are_rounded=(
        "cvt_int",
        "min((i32)top, __float2int_rz(x))",
        "min((i32)top, __float2int_rn(x))",
    ),
)
breaks(
    f"{DEVICE}/math.cuh",
    CATALOGUE,
    minimum_drops_nan=("min_f32", '"min.NaN.f32 %0, %1, %2;"', '"min.f32 %0, %1, %2;"'),
)


# ---- turns, arrivals of warps, tiles as they come ------------------------------------------------

breaks(
    f"{CUDA}/emit_async.c",
    f"{SECTIONS}::test_sections_go_round",
    SECTIONS,
    a_turn_is_passed_to_oneself=(
        "pm_cuda_LEAVE_SECTION",
        'e->n_section, first + 1, first), "");',
        'e->n_section, first, first), "");',
    ),
    the_last_passes_to_the_second=(
        "pm_cuda_LEAVE_SECTION",
        'e->n_section, first + 1, first), "");',
        'e->n_section, first + 1, first + 1), "");',
    ),
    turns_are_taken_at_the_barriers_of_lanes=(
        "pm_cuda_ENTER_SECTION",
        '"%u + wg", e->g->n_threads + 1)',
        '"%u + wg", e->g->n_threads)',
    ),
    turns_are_not_awaited=(
        "pm_cuda_ENTER_SECTION",
        'pm_print_meeting(e, op, "", "section_enter",'
        ' pm_str(e, "%u + wg", e->g->n_threads + 1), "");',
        "",
    ),
)
breaks(
    "pallas_mgpu/ops/norms.py",
    "ops/test_ops_batches.py::test_rows_of_norms[host-softmax-256]",
    rows_are_reduced_as_they_lie=(
        "_Tile.fixed",
        "return x if self.layout is None else",
        "return x if True else",
    ),
)
breaks(
    "pallas_mgpu/ops/norms.py",
    "ops/test_ops_batches.py::test_columns_of_softmax",
    one_column_is_a_row=(
        "_by_columns",
        "return inner > 1 or invariant and",
        "return inner > 1 or False and",
    ),
)
breaks(
    "pallas_mgpu/ops/_matmul_choice.py",
    "ops/test_ops_batches.py::test_the_order_of_a_product_is_that_of_k",
    every_second_tile_goes_backwards=(
        "choose_invariant",
        "found._replace(serpentine=False)",
        "found",
    ),
    blocks_divide_k_in_batches=(
        "sums_in_order",
        "undivided = cfg.split == cfg.slices == cfg.shares == 1",
        "undivided = True",
    ),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    "arrays/test_arrays.py::test_quotients_are_exact_by_themselves",
    no_quotient_is_exact=(
        "pm_cuda_DIV",
        "PM_ATTR_EXACT) ? divide_exactly",
        "PM_ATTR_EXACT) == 2 ? divide_exactly",
    ),
    every_quotient_is_exact=(
        "pm_cuda_DIV",
        "PM_ATTR_EXACT) ? divide_exactly",
        "PM_ATTR_EXACT) < 2 ? divide_exactly",
    ),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    "arrays/test_arrays.py::test_exact_quotients",
    thirds_are_products=(
        "divide_exactly",
        "&y) || fabs(frexp(y.f, &exponent)) != 0.5",
        "&y) || !frexp(y.f, &exponent)",
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    NAMED,
    named_barriers_are_those_of_turns=(
        "named",
        "first = e->g->n_threads + 1 + e->n_section;",
        "first = e->g->n_threads + 1;",
    ),
    named_barriers_are_those_of_lanes=(
        "named",
        "first = e->g->n_threads + 1 + e->n_section;",
        "first = 1 + e->n_section;",
    ),
    traced_numbers_are_one_off=("named", "first, pm_atom(e", "first + 1, pm_atom(e"),
    who_waits_only_arrives=(
        "pm_cuda_NAMED_SYNC",
        'named(e, op, "named_barrier_sync", true)',
        'named(e, op, "named_barrier_arrive", false)',
    ),
    who_arrives_waits=(
        "pm_cuda_NAMED_ARRIVE",
        'named(e, op, "named_barrier_arrive", false)',
        'named(e, op, "named_barrier_sync", true)',
    ),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    named_barriers_are_of_all_lanes=(
        "named_barrier_sync",
        '"bar.sync %0, %1;" :: "r"(id), "r"(lanes)',
        '"bar.sync %0;" :: "r"(id)',
    ),
    arrivals_at_named_barriers_wait=(
        "named_barrier_arrive",
        '"bar.arrive %0, %1;"',
        '"bar.sync %0, %1;"',
    ),
)
breaks(
    f"{CUDA}/program.c",
    f"{SECTIONS}::test_sections_go_round",
    SECTIONS,
    f"{ATTENTION}::test_lengths",
    nobody_has_the_first_turn=(
        "print_work",
        '"if (wg == %u) ", e->n_section - 1',
        '"if (wg == 77 + %u) ", e->n_section - 1',
    ),
    the_last_turn_is_left=(
        "print_work",
        '"if (wg == 0) "',
        '"if (wg == 77) "',
    ),
    three_warps_arrive=("print_barriers", "PM_ATTR_WARPS) ? 4 : 1", "PM_ATTR_WARPS) ? 3 : 1"),
    one_warp_arrives=("print_barriers", "PM_ATTR_WARPS) ? 4 : 1", "PM_ATTR_WARPS) ? 1 : 1"),
)
breaks(
    f"{CUDA}/emit_async.c",
    f"{SECTIONS}::test_warps_arrive_by_themselves",
    WS,
    one_lane_arrives_for_one_warp=(
        "pm_cuda_ARRIVE",
        '"mbarrier_arrive_n<4>(%s);"',
        '"mbarrier_arrive_n<1>(%s);"',
    ),
    all_lanes_of_warps_arrive=(
        "pm_cuda_ARRIVE",
        '"if (lane == 0) mbarrier_arrive(%s);"',
        '"mbarrier_arrive(%s);"',
    ),
    the_first_warp_arrives_alone=(
        "pm_cuda_ARRIVE",
        '"if (lane == 0) mbarrier_arrive(%s);"',
        '"if (tid == 0) mbarrier_arrive(%s);"',
    ),
    lanes_do_not_meet_before_their_warp_arrives=(
        "pm_cuda_ARRIVE",
        'pm_line(e, "warp_sync();"); pm_line(e, "if (lane == 0) mbarrier_arrive(%s);", b.address);',
        'pm_line(e, "if (lane == 0) mbarrier_arrive(%s);", b.address);',
    ),
)
breaks(
    f"{PASSES}/sync.c",
    f"{SECTIONS}::test_warps_arrive_by_themselves",
    f"{SECTIONS}::test_warps_do_not_arrive_beside_a_copy",
    WS,
    CLUSTER,
    SCHEDULE,
    copied_barriers_count_warps=(
        "warp_barrier",
        "return n || p->kernel->copied[base] ? 0 : alloc;",
        "return n ? 0 : alloc;",
    ),
    cluster_barriers_count_warps=(
        "warp_barrier",
        "return n || p->kernel->copied[base] ? 0 : alloc;",
        "return p->kernel->copied[base] ? 0 : alloc;",
    ),
    releases_are_not_kept=("set_order", "*order == PM_ORDER_AUTO", "*order != PM_ORDER_RELAXED"),
)
breaks(
    f"{PASSES}/divergence.c",
    f"{SECTIONS}::test_lazy_where_refuses_what_lanes_do_together",
    SECTIONS,
    one_named_barrier_too_many=("check_section", "g->n_threads + 1 + n >", "g->n_threads + n >"),
    rings_of_several_sizes=("check_section", "if (c->turns && c->turns != n)", "if (c->turns > n)"),
    some_warps_may_move_data=(
        "is_local",
        "PM_LAY_REDUCE && pm_typeof(g, o->out)->rank) return !pm_op_scratch(g, op);",
        "PM_LAY_REDUCE && pm_typeof(g, o->out)->rank) return true;",
    ),
    some_warps_may_do_all_that_has_no_effects=(
        "is_local",
        "return info->part == PM_PART_EACH || pm_moves_in_registers(g, op);",
        "return true;",
    ),
)
breaks(
    f"{CUDA}/emit_registers.c",
    f"{SECTIONS}::test_lazy_where_is_where",
    f"{ARRAYS}::test_reductions",
    f"{CLUSTER}::test_any_and_all",
    several_results_have_one_vote=("vote", "if (results > 1) return NULL;", "(void)results;"),
    some_warps_go_where_all_do=("vote", 'return "warp_any(";', 'return "!warp_any(!";'),
)
breaks(
    f"{CUDA}/emit_async.c",
    SCHEDULE,
    tiles_that_are_taken_begin_at_0=("after_first", '"%s + (i32)gridDim.x"', '"%s"'),
    blocks_of_clusters_count_as_clusters=(
        "after_first",
        '"%s + (i32)(gridDim.x / %u)"',
        '"%s + (i32)(gridDim.x + 0 * %u)"',
    ),
    all_blocks_of_a_cluster_fetch_tiles=(
        "pm_cuda_FETCH_TILE",
        "begin_taker(e, true); if (e->program->pdl)",
        "begin_taker(e, false); if (e->program->pdl)",
    ),
    tiles_are_taken_before_the_launch_before_ends=(
        "pm_cuda_FETCH_TILE",
        'if (e->program->pdl) pm_line(e, "griddepcontrol_wait();");',
        "",
    ),
    all_blocks_broadcast_tiles_to_all=(
        "pm_cuda_BROADCAST_TILE",
        '"for (u32 k = 0; k < %u && cluster_rank() == 0; k++)"',
        '"for (u32 k = 0; k < %u; k++)"',
    ),
    tiles_come_unexpected=(
        "pm_cuda_BROADCAST_TILE",
        '"mbarrier_arrive_expect_tx(%s, 4);"',
        '"mbarrier_arrive(%s);"',
    ),
    what_is_handed_on_stands_after_the_grid=(
        "after_first",
        "if (bare || !e->program",
        "if ((bare && false) || !e->program",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    SCHEDULE,
    tiles_are_handed_on_while_lanes_wait=(
        "visit_op",
        "signals |= a.where & (PM_IN_BARRIER | PM_IN_SEMAPHORE) && a.writes;",
        (
            "signals |= a.where & (PM_IN_BARRIER | PM_IN_SEMAPHORE) && a.writes && code != "
            "PM_OP_BROADCAST_TILE;"
        ),
    ),
)
breaks(
    f"{CUDA}/program.c",
    SCHEDULE,
    clusters_are_done_as_blocks=(
        "print_counters_done",
        "all = p->cluster[0] > 1 ?",
        "all = p->cluster[0] > 99 ?",
    ),
)
breaks(
    "pallas_mgpu/_schedule.py",
    SCHEDULE,
    tiles_overwrite_what_is_still_read=(
        "TileScheduler.broadcast",
        "step >= self.slots",
        "step >= self.slots + 2",
    ),
    other_blocks_may_still_read=(
        "TileScheduler.broadcast",
        'memory_order="release")\n                barrier_wait(self.free.at[slot])',
        'memory_order="release")',
    ),
    tiles_have_one_slot=("TileScheduler.broadcast", "slot = step % self.slots", "slot = step * 0"),
)
breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    SECTIONS,
    one_warpgroup_takes_the_turn=("section_enter", '"bar.sync %0, 256;"', '"bar.sync %0, 128;"'),
    one_warpgroup_passes_the_turn=(
        "section_leave",
        '"bar.arrive %0, 256;"',
        '"bar.arrive %0, 128;"',
    ),
    some_is_all_in_a_warp=("warp_any", "__any_sync(0xffffffffu, x)", "__all_sync(0xffffffffu, x)"),
)


# ---- words of carries, ranges, layouts of few rows -----------------------------------------------

breaks(
    f"{CUDA}/emit_control.c",
    CONTROL,
    *FUZZ,
    yields_of_words_are_lost=("emit_yield", "pm_pack(e, words[k], first + k, v);", ""),
    words_begin_with_anything=("declare_carries", "pm_pack(e, words[k], o->out + k, init);", ""),
    words_of_for_are_unpacked_once=(
        "pm_cuda_FOR",
        (
            'if (unroll == 1) { pm_begin(e, "for (i32 %s = %s; %s < %s; %s = '
            'next_index(%s)) {", i, lower, i, upper, i, i); } else { pm_begin(e, "for (i32 '
            '%s = %s; %s < %s; %s++) {", i, lower, i, upper, i); } unpack_carries(e, op, '
            "index + 1, words);"
        ),
        (
            'unpack_carries(e, op, index + 1, words); pm_begin(e, "for (i32 %s = %s; %s < '
            '%s; %s++) {", i, lower, i, upper, i);'
        ),
    ),
    words_of_while_are_unpacked_once=(
        "pm_cuda_WHILE",
        'pm_begin(e, "for (;;) {"); unpack_carries(e, op, body_args, words);',
        'unpack_carries(e, op, body_args, words); pm_begin(e, "for (;;) {");',
    ),
)
breaks(
    f"{CUDA}/packed16.c",
    CONTROL,
    *FUZZ,
    odd_arrays_are_words=("pm_is_packed", "&& pm_regs_of(e, v) * bytes % 4 == 0;", ";"),
    one_splat_element_is_packed=(
        "pm_pack",
        '"for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, from, e',
        '"for (int r = 0; r < %lld; r++) %s[0] = %s;", (long long)n, from, e',
    ),
    words_of_loads_are_elements=("makes_words", "is_matrix_access(e, val->def, v, false)", "true"),
    words_are_taken_by_any_store=(
        "takes_words",
        "k == 1 && is_matrix_access(e, op, pm_in(e->g, op, 1), true)",
        "true",
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
        "range_rem",
        "(span){0, pm_min(x.hi, y.hi - 1)};",
        "(span){0, pm_min(x.hi, y.hi - 2)};",
    ),
    remainders_are_never_negative=(
        "range_rem",
        "if (x.lo >= 0) return x.hi < y.lo",
        "if (x.hi >= 0) return x.hi < y.lo",
    ),
    negative_remainders_end_one_early=(
        "range_rem",
        "(span){pm_max(x.lo, 1 - y.hi),",
        "(span){pm_max(x.lo, 2 - y.hi),",
    ),
    adjusted_remainders_end_one_early=(
        "range_select",
        "hull((span){b.lo + c, c - 1},",
        "hull((span){b.lo + c, c - 2},",
    ),
    adjusted_are_as_before=(
        "range_select",
        "(pm_typeof(g, r)->dtype) && range(f, r).lo >= 0) return b;",
        "(pm_typeof(g, r)->dtype) && range(f, r).hi >= 0) return b;",
    ),
    quotients_begin_too_high=("range_div", "lo : b.hi),", "hi : b.lo),"),
    quotients_end_too_low=("range_div", "hi : b.lo)}", "lo : b.hi)}"),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{SECTIONS}::test_few_rows_take_few_registers",
    few_rows_are_padded_to_64=(
        "matrix_for",
        "if (!best || !pm_layout_is_padded(pm_layout_of(g, best))) return best;",
        "if (best) return best;",
    ),
)

# ---- masks, atomics, views, warps ----------------------------------------------------------------

MASKS, REFS, WARPS = "arrays/test_masks.py", "memory/test_refs.py", "pipelines/test_warps.py"

breaks(
    f"{CUDA}/access.c",
    MASKS,
    vectors_ask_their_first_element=(
        "begin_masked",
        "*parts = !is_whole(a, mask, a->vec);",
        "*parts = false;",
    ),
    masks_of_parts_are_forgotten=(
        "begin_masked",
        'pm_line(e, "whole = whole && %s;", pm_inside(',
        'pm_line(e, "whole = whole || %s;", pm_inside(',
    ),
    each_copy_is_added=("pm_atomic_array", "pm_first_copy(e, l)", "NULL"),
)
breaks(
    "csrc/ir/grain.c",
    MASKS,
    bounds_need_not_divide=("grain", "base = pm_gcd(base, pm_divisor(w->g, y));", "base = base;"),
    a_sum_begins_anywhere=(
        "is_index",
        "*base = pm_gcd(*base, pm_divisor(w->g, y));",
        "*base = *base;",
    ),
    at_most_is_less=("grain", "base = pm_gcd(base, c.i + 1);", "base = pm_gcd(base, c.i);"),
)
breaks(
    f"{CUDA}/emit_memory.c",
    MASKS,
    scalar_masks_are_true=(
        "pm_cuda_MASKED_STORE",
        'pm_begin(e, "if (%s) {", pm_inside(e, op, NULL, pm_at(e, mask, "0"), "0"));',
        'pm_begin(e, "if (%s || true) {", pm_inside(e, op, NULL, pm_at(e, mask, "0"), "0"));',
    ),
    other_lanes_keep_no_result=(
        "atomic_scalar",
        "if (!x) return; pm_line(e, PM_WARPGROUP_SYNC);",
        "return;",
    ),
)
breaks(
    "csrc/ir/view.c",
    REFS,
    strides_are_one=("apply_index", "d.inner *= stride; d", "d"),
    strided_starts_are_counted_once=(
        "apply_index",
        "v->start[d.base_dim] += start * d.step;",
        "v->start[d.base_dim] += start;",
    ),
    tiles_are_unfolded_densely=(
        "unfold",
        "out[k].tile = out[k].given = left, out[k].outer = outer;",
        "out[k].given = left, out[k].outer = outer;",
    ),
)
breaks(
    f"{PASSES}/smem.c",
    REFS,
    unions_end_with_their_last_group=(
        "enter_union",
        "p->overlay.end[r] = pm_max(p->overlay.end[r], p->top[r]);",
        "p->overlay.end[r] = p->top[r] * 0;",
    ),
)
breaks(
    f"{PASSES}/sync.c",
    REFS,
    f"{REFS}::test_groups_of_a_union_are_one_memory",
    MASKS,
    WARPS,
    groups_of_a_union_are_apart=(
        "union_of",
        "if (n && other[0] == u[0]) return",
        "if (n && other[0] == u[0] + 1) return",
    ),
    nobody_meets_after_warps=("visit_warps", "if (!by_user) place_after(p, block, k); }", "}"),
)
breaks(
    f"{CUDA}/emit_async.c",
    WARPS,
    flips_of_other_warps_are_lost=(
        "pm_cuda_WARP_MAP",
        '"%s = %s ^ (flips[0] | flips[1] | flips[2] | flips[3]);"',
        '"%s = %s ^ flips[1];"',
    ),
    lanes_of_a_warp_copy_a_quarter=("copy_chunks", "e->warps ? 32 : 128);", "128);"),
)
