"""Mutants of what the patterns of the random kernels reach since they make every op: functions,
warps, memory at one place, CUDA source, counters and grids of a launch."""

from . import CATALOGUE, CUDA, DEVICE, FUZZ, PASSES, SCHEDULE, breaks

ENDS, FUNCTIONS, INLINE, REFS, WARPS = (
    "test_ends.py",
    "test_functions.py",
    "test_inline.py",
    "test_refs.py",
    "test_warps.py",
)

# ---- device functions ----------------------------------------------------------------------------

breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    grids_let_others_start_and_wait_for_none=(
        'asm volatile("griddepcontrol.wait;"',
        'asm volatile("griddepcontrol.launch_dependents;"',
    ),
    dependents_are_awaited=(
        'asm volatile("griddepcontrol.launch_dependents;"',
        'asm volatile("griddepcontrol.wait;"',
    ),
)
breaks(
    f"{DEVICE}/math.cuh",
    CATALOGUE,
    exact_quotients_are_full_range=('"div.rn.f32 %0, %1, %2;"', '"div.full.f32 %0, %1, %2;"'),
    approximate_exponentials_are_of_two=("exp2_approx(x * 1.4426950408889634f)", "exp2_approx(x)"),
    approximate_logarithms_are_of_two=("log2_approx(x) * 0.6931471805599453f", "log2_approx(x)"),
    approximate_sines_are_cosines=('"sin.approx.f32 %0, %1;"', '"cos.approx.f32 %0, %1;"'),
    approximate_roots_are_upright=('"rsqrt.approx.f32 %0, %1;"', '"sqrt.approx.f32 %0, %1;"'),
)

# ---- what is printed -----------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_pointwise.c",
    FUNCTIONS,
    *FUZZ,
    error_functions_are_not_inverted=(
        'FLOAT_FUNCTION(ERF_INV, "erfinvf")',
        'FLOAT_FUNCTION(ERF_INV, "erff")',
    ),
    less_one_is_forgotten=('FLOAT_FUNCTION(EXPM1, "expm1f")', 'FLOAT_FUNCTION(EXPM1, "expf")'),
    areas_are_angles=('FLOAT_FUNCTION(ASINH, "asinhf")', 'FLOAT_FUNCTION(ASINH, "asinf")'),
    quadrants_are_quotients=('call2_f32(e, op, "atan2f")', 'call2_f32(e, op, "fmodf")'),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    INLINE,
    warps_have_each_others_numbers=(
        'return leave(e, "(i32)warp");',
        'return leave(e, "(i32)(warp ^ 1)");',
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    SCHEDULE,
    shared_tiles_stay_with_one_lane=(
        '  pm_line(e, "%s = %s;", x, behind_first(e, in));\n  pm_end_of_one_lane(e, x);\n',
        '  pm_line(e, "%s = %s;", x, behind_first(e, in));\n  pm_end(e);\n',
    ),
)
breaks(
    f"{CUDA}/emit_inline.c",
    INLINE,
    source_gets_the_first_of_its_barriers=(
        "  for (uint32_t k = 0; k < view.n_terms; k++) {\n"
        '    pm_putf(&t, " + %s", pm_term_text(e, &view.term[k], 8, false));\n  }\n',
        "",
    ),
)

breaks(
    f"{CUDA}/emit_move.c",
    "test_shapes.py::test_joins_of_padded_parts",
    padding_of_parts_overwrites_others=("  if (used == n) {\n", "  if (used) {\n"),
)

# ---- passes, views -------------------------------------------------------------------------------

breaks(
    f"{PASSES}/sync.c",
    REFS,
    WARPS,
    INLINE,
    *FUZZ,
    groups_of_a_union_have_nothing_in_common=(
        "if (n && other[0] == u[0]) return pm_get(g, op)->out;",
        "if (n && other[0] == u[0]) return v;",
    ),
    nobody_meets_in_front_of_warps=(
        "  if (!by_user && p->at != ORDERED) place(p, block, k);\n  visit_control(p, block, k);\n",
        "  visit_control(p, block, k);\n",
    ),
    nobody_meets_in_front_of_source=(
        "  if (!g->no_auto_barriers && p->at != ORDERED) place(p, block, k);\n"
        "  p->touched = p->waited = true;\n",
        "  p->touched = p->waited = true;\n",
    ),
    nobody_meets_behind_source=(
        "  p->touched = p->waited = true;\n"
        "  if (!g->no_auto_barriers) place_behind(p, block, k);\n",
        "  p->touched = p->waited = true;\n",
    ),
)
breaks(
    "csrc/ir/view.c",
    REFS,
    *FUZZ,
    bitcasts_of_refs_change_nothing=(
        "out->dtype = pm_typeof(g, pm_get(g, op)->out)->dtype; break;",
        "break;",
    ),
)

# ---- the interpreter -----------------------------------------------------------------------------

breaks(
    "csrc/interp/machine.c",
    WARPS,
    interpreted_warps_have_seen_nothing=("seen[w->seer] = seen[t->seer];", "seen[w->seer] = 0;"),
    interpreted_threads_forget_what_warps_saw=(
        "b->seen[of->seer] = pm_max(b->seen[of->seer], seen);",
        "b->seen[of->seer] = pm_max(b->seen[of->seer], 0);",
    ),
    interpreted_warps_may_wait_unequally_often=("if (most && least < most)", "if (!most)"),
    interpreted_threads_leave_a_warp_behind=("t->n_warps = WARPS;", "t->n_warps = WARPS - 1;"),
)
breaks(
    "csrc/interp/machine.c",
    ENDS,
    everybody_must_see_the_last_phase=(
        "for (uint32_t j = 0; b->info->again && j < m->n_threads; j++) {",
        "for (uint32_t j = 0; j < m->n_threads; j++) {",
    ),
    scopes_may_end_while_copies_are_in_flight=("if (b->copied > most) {", "if (most < 0) {"),
    phases_may_be_missed_before_a_scope_comes_again=(
        "info->again && missed ? MISSED : NEVER",
        "info->again && missed ? NEVER : NEVER",
    ),
    scopes_may_leave_accumulators_in_flight=("if (!writer) continue;", "continue;"),
)
breaks(
    "csrc/interp/async.c",
    ENDS,
    WARPS,
    accumulators_in_flight_may_be_read=(
        "const task *k = pm_vm_writer_of(t, s);",
        "const task *k = i->to > 4096 ? NULL : NULL;",
    ),
    a_half_in_flight_is_the_whole=(
        "k->acc.base == acc->base && overlap(&k->acc, acc)",
        "(k->acc.base == acc->base || overlap(&k->acc, acc))",
    ),
    interpreted_threads_wait_for_one_warp=(
        "w < WARPS && s != STEP_FAIL; w++",
        "w < 1 && s != STEP_FAIL; w++",
    ),
    interpreted_groups_of_threads_are_of_one_warp=(
        "for (uint32_t w = 1; m->has_warps && !t->of && w < WARPS; w++) pm_vm_warps",
        "for (uint32_t w = 1; m->has_warps && !t->of && w < 1; w++) pm_vm_warps",
    ),
)
breaks(
    f"{CUDA}/groups.c",
    ENDS,
    open_copies_stay_open=("if (state & OPEN) pm_line(e,", "if (state & 4) pm_line(e,"),
    all_loops_run_for_sure=("return sure ? end : state | end;", "return sure ? end : end;"),
    a_wait_for_some_copies_is_for_all=(
        "return *pm_attr(g, op, PM_ATTR_N) ? state : state & ~GROUPED;",
        "return state & ~GROUPED;",
    ),
    all_threads_wait_at_the_end=("threads |= end ? 1u << wg : 0;", "threads |= 1u << wg;"),
)
breaks(
    f"{PASSES}/copies.c",
    WARPS,
    threads_close_groups_of_one_warp=("if (warps_store) split", "if (warps_store && !g) split"),
)
breaks(
    f"{CUDA}/lane.c",
    WARPS,
    one_lane_waits_for_copies_of_warps=(
        "return e->warps_store && !e->warps;",
        "return e->warps_store && e->warps;",
    ),
)
breaks(
    f"{CUDA}/emit_wgmma.c",
    ENDS,
    reads_pin_all_of_an_accumulator=(
        "words = p->columns / per_word;",
        "words = p->base_columns / per_word;",
    ),
)
breaks(
    "csrc/interp/tile_ops.c",
    SCHEDULE,
    interpreted_tiles_begin_at_1=(
        "*(int32_t *)slot_of(t, i->dst) = m->counters[i->to]++;",
        "*(int32_t *)slot_of(t, i->dst) = ++m->counters[i->to];",
    ),
    interpreted_points_are_done_again=("number = m->points + m->", "number = 0 * m->points + m->"),
)

# ---- functions composed in Python ----------------------------------------------------------------

breaks(
    "pallas_mgpu/_jnp/activations.py",
    FUNCTIONS,
    sums_of_softmax_are_of_all=(
        "return e / reduce.sum(e, axis=axis, keepdims=True)",
        "return e / reduce.sum(e)",
    ),
    hard_sigmoids_end_at_2=("return relu6(x + 3) / 6", "return relu6(x + 3) / 3"),
)
