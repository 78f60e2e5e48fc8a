"""Mutants of tensor memory: its planning, the rules of its ops, and the interpreter of tcgen05."""

from . import PASSES, breaks

CORE, TMEM, PRODUCTS = (
    "memory/test_tensor_core.py",
    "memory/test_tmem.py",
    "compiler/test_tcgen05.py",
)

# ---- places and layouts --------------------------------------------------------------------------

breaks(
    f"{PASSES}/tmem.c",
    TMEM,
    tensor_unions_add_up=("enter_union", "p->top = p->overlay.start", "p->top = p->overlay.end"),
    tensor_unions_end_with_their_last_group=(
        "close_union",
        "p->top = pm_max(p->top, p->overlay.end)",
        "p->top = p->top",
    ),
    tensor_scopes_keep_their_columns=("place_block", "p->top = top;", ""),
    the_pool_is_not_a_power_of_two=(
        "pm_plan_tmem",
        "g->tmem_columns *= 2",
        "g->tmem_columns += LEAST",
    ),
    one_column_more_than_there_are=(
        "pm_plan_tmem",
        "p.deepest > t->tmem",
        "p.deepest > t->tmem + 4",
    ),
    pairs_and_single_blocks_mix=("pm_plan_tmem", "if (p.mixed)", "if (p.mixed && p.deepest < 0)"),
)
breaks(
    f"{PASSES}/tmem.c",
    CORE,
    commits_are_of_either_kind=(
        "check_pairs",
        "*pm_attr(g, op, PM_ATTR_PAIR) == pair",
        "*pm_attr(g, op, PM_ATTR_PAIR) >= 0",
    ),
)
breaks(
    f"{PASSES}/layouts.c",
    PRODUCTS,
    loads_that_reduce_rows_are_in_any_layout=(
        "seed_reduced_loads",
        "!reduces_rows(p->g, op)",
        "true",
    ),
)
breaks(
    "csrc/cuda/emit_tcgen05.c",
    PRODUCTS,
    nibbles_are_loaded_as_bytes=("split_words", "d.bits >= 8", "d.bits >= 4"),
    nibbles_are_stored_as_bytes=("join_word", "d.bits >= 8", "d.bits >= 4"),
)
breaks(
    "csrc/ir/tmem.c",
    TMEM,
    PRODUCTS,
    CORE,
    columns_of_slices_start_at_their_element=(
        "pm_tmem_view_of",
        "v.start[last] / tile * step",
        "v.start[last]",
    ),
    batches_start_at_their_first=("pm_tmem_view_of", "v.start[k] * stride[k]", "0 * stride[k]"),
)
breaks(
    "csrc/ir/tcgen05.c",
    TMEM,
    CORE,
    slices_start_anywhere=(
        "pm_type_tmem_index",
        "size % tile == 0 && divisor % tile == 0",
        "size % tile == 0",
    ),
    copies_complete_on_barriers_of_products=(
        "pm_flavour",
        "(*pm_attr(t->g, def, PM_ATTR_TENSOR_CORE) != 0) == tensor_core",
        "tensor_core >= 0",
    ),
    scales_of_any_layout_are_copied=(
        "pm_type_copy_scales",
        "if (m.layout == PM_TMEM_SCALES)",
        "if (m.layout < 99)",
    ),
    batches_are_loaded=("pm_type_load_tmem", "x->rank != 2", "x->rank < 2"),
    metadata_is_loaded=(
        "no_metadata",
        "m.layout != PM_TMEM_METADATA",
        "m.layout <= PM_TMEM_METADATA + 9",
    ),
)

# ---- the interpreter -----------------------------------------------------------------------------

breaks(
    "csrc/interp/tcgen05.c",
    CORE,
    TMEM,
    PRODUCTS,
    loads_after_products_that_nobody_awaited=(
        "finished",
        "if (writes_only && !d->writes) continue;",
        "continue;",
    ),
    loads_beside_products_in_flight=(
        "in_flight",
        "if (!touches(k, p, writes_only)) continue;",
        "continue;",
    ),
    operands_of_products_are_overwritten=(
        "check_idle",
        "in_flight(m, p, !store)",
        "in_flight(m, p, true)",
    ),
    products_of_the_peer_are_not_seen=(
        "touches",
        "k->i->tensor->pair ? peer_of(other.block) : other.block",
        "other.block",
    ),
    finished_products_of_the_peer_are_not_seen=(
        "finished",
        "if (d->pair) other.block = peer_of(other.block);",
        "",
    ),
    products_overtake_loads=(
        "check_uses",
        "(!u->store && !writes)",
        "!u->store",
    ),
    products_overtake_stores=(
        "check_uses",
        "(!u->store && !writes)",
        "u->store",
    ),
    products_after_loads_of_who_told_nobody=(
        "check_uses",
        "u->stage == USE_WAITED && t == own",
        "u->stage == USE_WAITED",
    ),
    waits_for_loads_are_for_stores=("exec_wait_load", "waited(t, false)", "waited(t, true)"),
    commits_of_stores_are_waits_for_loads=(
        "exec_commit_tmem",
        "waited(t, true)",
        "waited(t, false)",
    ),
    barriers_tell_of_accesses_in_flight=(
        "pm_vm_tmem_told",
        "t->uses[k].stage == USE_ISSUED",
        "t->uses[k].stage > USE_WAITED",
    ),
    barriers_tell_of_every_product=(
        "forget_finished",
        "t->finished[j].commit > commit",
        "t->finished[j].commit > commit + 9",
    ),
    barriers_tell_of_no_product=(
        "pm_vm_see_commit",
        "c.phase > phase",
        "c.phase >= phase",
    ),
    pairs_may_differ=(
        "pm_vm_check_pairs",
        "b->n_pairs[k] == b[1].n_pairs[k]",
        "b->n_pairs[k] >= b[1].n_pairs[k]",
    ),
    commits_may_be_ignored=("check_commits", "n.by->block == b ||", "true ||"),
    the_peer_is_not_told=(
        "run_commit",
        "pair ? arrive(m, t, op, in_peer(b)) : STEP_NEXT",
        "STEP_NEXT",
    ),
    the_peer_has_its_own_b=(
        "run_product",
        "multiply_block(m, k, &a, &k->rhs, &b, places); return STEP_NEXT;",
        "multiply_block(m, k, &a, &b, &k->rhs, places); return STEP_NEXT;",
    ),
    the_peer_has_the_leaders_a=(
        "run_product",
        "const located a = in_block(&k->lhs, own, peer);",
        "const located a = k->lhs;",
    ),
    copies_are_for_one_block=(
        "pm_vm_run_tensor",
        "else { if (run_copy(m, k, own) == STEP_FAIL) return STEP_FAIL; if (x->pair &&",
        "else { if (run_copy(m, k, own) == STEP_FAIL) return STEP_FAIL; if (x->pair && !own &&",
    ),
    products_that_start_anew_add=(
        "multiply_block",
        "!k->accumulate && i < x->m",
        "!k->accumulate && i < x->m - 1",
    ),
    scales_of_b_begin_at_each_half=("widen_b", "row = first + j", "row = j"),
    scales_are_for_one_element_more=(
        "widen_a",
        "scale_at(m, &places[x->a_scale], i, p / x->block)",
        "scale_at(m, &places[x->a_scale], i, p / (x->block + 1))",
    ),
    metadata_of_16_bits_is_row_by_row=("index_at", "bits == 16", "bits == 99"),
    rows_that_do_not_exist_stay=("run_gather", "else memset(at, 0, (size_t)n);", ""),
    one_row_more_exists=("locate_rows", "rows[r] < of->dim[0]", "rows[r] <= of->dim[0]"),
    scattered_rows_have_no_marks=(
        "run_scatter",
        "m->poison ? pm_poison_beside(m, k->owner, &k->gmem, to) : NULL",
        "NULL",
    ),
    reductions_forget_nans=("REDUCE_ROWS", "y != y ||", ""),
    grid_points_are_given_twice=("run_cancel", "m->points ? d->begun++", "m->points ? d->begun"),
    questions_after_the_end=(
        "exec_try_cancel",
        "cluster *c = t->block->cluster; if (c->refused)",
        "cluster *c = t->block->cluster; if (c->refused && !c)",
    ),
    answers_are_for_the_leader_alone=(
        "run_cancel",
        "u < own->cluster->blocks + m->n_blocks",
        "u < own->cluster->blocks + 1",
    ),
    scopes_end_under_products=("pm_vm_check_tmem", "if (by.op)", "if (by.op && !by.name)"),
    scopes_end_under_stores=(
        "pm_vm_check_tmem",
        "use->stage == USE_ISSUED",
        "use->stage > USE_WAITED",
    ),
    copies_overwrite_operands_in_flight=(
        "pm_vm_check_operands",
        "if (!hit) continue;",
        "continue;",
    ),
    marks_of_a_are_dropped=(
        "mark_products",
        "row[i] ? row[i] : column[j]",
        "column[j]",
    ),
    marks_of_b_are_dropped=(
        "mark_products",
        "row[i] ? row[i] : column[j]",
        "row[i]",
    ),
    marks_stay_in_what_starts_anew=(
        "mark_products",
        "mark || !k->accumulate",
        "mark",
    ),
)

# ---- what orders accesses of pairs and of warps --------------------------------------------------

breaks(
    f"{PASSES}/sync.c",
    "fuzz/test_blackwell.py",
    pairs_need_no_release=(
        "needs_release",
        "return (how & GENERIC) && is_of_pair(g, v)",
        "return false",
    ),
)
