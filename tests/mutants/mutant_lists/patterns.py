"""Mutants of what the patterns of the random kernels reach since they make every op: functions,
warps, memory at one place, CUDA source, counters and grids of a launch."""

from . import CATALOGUE, CUDA, DEVICE, FUZZ, PASSES, SCHEDULE, breaks

ENDS, FUNCTIONS, INLINE, REFS, WARPS = (
    "memory/test_ends.py",
    "arrays/test_functions.py",
    "language/test_inline.py",
    "memory/test_refs.py",
    "pipelines/test_warps.py",
)

# ---- device functions ----------------------------------------------------------------------------

breaks(
    f"{DEVICE}/thread.cuh",
    CATALOGUE,
    grids_let_others_start_and_wait_for_none=(
        "griddepcontrol_wait",
        'asm volatile("griddepcontrol.wait;"',
        'asm volatile("griddepcontrol.launch_dependents;"',
    ),
    dependents_are_awaited=(
        "griddepcontrol_launch_dependents",
        'asm volatile("griddepcontrol.launch_dependents;"',
        'asm volatile("griddepcontrol.wait;"',
    ),
)
breaks(
    f"{DEVICE}/math.cuh",
    CATALOGUE,
    exact_quotients_are_full_range=(
        "div_rn",
        '"div.rn.f32 %0, %1, %2;"',
        '"div.full.f32 %0, %1, %2;"',
    ),
    approximate_exponentials_are_of_two=(
        "exp_approx",
        "exp2_approx(x * 1.4426950408889634f)",
        "exp2_approx(x)",
    ),
    approximate_logarithms_are_of_two=(
        "log_approx",
        "log2_approx(x) * 0.6931471805599453f",
        "log2_approx(x)",
    ),
    approximate_sines_are_cosines=(
        "sin_approx",
        '"sin.approx.f32 %0, %1;"',
        '"cos.approx.f32 %0, %1;"',
    ),
    approximate_roots_are_upright=(
        "rsqrt_approx",
        '"rsqrt.approx.f32 %0, %1;"',
        '"sqrt.approx.f32 %0, %1;"',
    ),
)

# ---- what is printed -----------------------------------------------------------------------------

breaks(
    f"{CUDA}/emit_pointwise.c",
    FUNCTIONS,
    *FUZZ,
    error_functions_are_not_inverted=(
        "ERF_INV",
        'FLOAT_FUNCTION(ERF_INV, "erfinvf")',
        'FLOAT_FUNCTION(ERF_INV, "erff")',
    ),
    less_one_is_forgotten=(
        "EXPM1",
        'FLOAT_FUNCTION(EXPM1, "expm1f")',
        'FLOAT_FUNCTION(EXPM1, "expf")',
    ),
    areas_are_angles=("ASINH", 'FLOAT_FUNCTION(ASINH, "asinhf")', 'FLOAT_FUNCTION(ASINH, "asinf")'),
    quadrants_are_quotients=(
        "pm_cuda_ATAN2",
        'call2_f32(e, op, "atan2f")',
        'call2_f32(e, op, "fmodf")',
    ),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    INLINE,
    warps_have_each_others_numbers=(
        "pm_cuda_AXIS",
        '"(i32)warp"); default',
        '"(i32)(warp ^ 1)"); default',
    ),
)
breaks(
    f"{CUDA}/emit_async.c",
    SCHEDULE,
    shared_tiles_stay_with_one_lane=(
        "pm_cuda_SHUFFLE_TILE",
        'pm_line(e, "%s = %s;", x, after_first(e, in)); pm_end_of_one_lane(e, x);',
        'pm_line(e, "%s = %s;", x, after_first(e, in)); pm_end(e);',
    ),
)
breaks(
    f"{CUDA}/emit_inline.c",
    INLINE,
    source_gets_the_first_of_its_barriers=(
        "of_barrier",
        (
            'for (uint32_t k = 0; k < view.n_terms; k++) { pm_putf(&t, " + %s", '
            "pm_term_text(e, &view.term[k], 8, false)); }"
        ),
        "",
    ),
)

breaks(
    f"{CUDA}/emit_exchange.c",
    "arrays/test_shapes.py::test_joins_of_padded_parts",
    padding_of_parts_overwrites_others=("concat_registers", "if (used == n) {", "if (used) {"),
)

# ---- passes, views -------------------------------------------------------------------------------

breaks(
    f"{PASSES}/sync.c",
    REFS,
    WARPS,
    INLINE,
    *FUZZ,
    groups_of_a_union_have_nothing_in_common=(
        "union_of",
        "if (n && other[0] == u[0]) return pm_get(g, op)->out;",
        "if (n && other[0] == u[0]) return v;",
    ),
    nobody_meets_in_front_of_warps=(
        "visit_warps",
        "if (!by_user && p->at != ORDERED) place(p, block, k); visit_control(p, block, k);",
        "visit_control(p, block, k);",
    ),
    nobody_meets_in_front_of_source=(
        "visit_inline",
        "if (!g->no_auto_barriers && p->at != ORDERED) place(p, block, k);",
        "",
    ),
    nobody_meets_after_source=(
        "visit_inline",
        "p->touched = p->waited = true; if (!g->no_auto_barriers) place_after(p, block, k);",
        "p->touched = p->waited = true;",
    ),
)
breaks(
    "csrc/ir/view.c",
    REFS,
    *FUZZ,
    bitcasts_of_refs_change_nothing=(
        "pm_view_of",
        "out->dtype = pm_typeof(g, pm_get(g, op)->out)->dtype; break;",
        "break;",
    ),
)

# ---- the interpreter -----------------------------------------------------------------------------

breaks(
    "csrc/interp/machine.c",
    WARPS,
    interpreted_warps_have_seen_nothing=(
        "exec_warp_map",
        "seen[w->observer] = seen[t->observer];",
        "seen[w->observer] = 0;",
    ),
    interpreted_threads_forget_what_warps_saw=(
        "join_waits",
        "b->seen[of->observer] = pm_max(b->seen[of->observer], seen);",
        "b->seen[of->observer] = pm_max(b->seen[of->observer], 0);",
    ),
    interpreted_warps_may_wait_unequally_often=(
        "join_waits",
        "if (most && !all)",
        "if (!most)",
    ),
    interpreted_threads_leave_a_warp_after=(
        "exec_warp_map",
        "t->n_warps = WARPS;",
        "t->n_warps = WARPS - 1;",
    ),
)
breaks(
    "csrc/interp/machine.c",
    ENDS,
    everybody_must_see_the_last_phase=(
        "check_barrier",
        "for (uint32_t j = 0; b->info->again && j < m->n_threads; j++) {",
        "for (uint32_t j = 0; j < m->n_threads; j++) {",
    ),
    scopes_may_end_while_copies_are_in_flight=(
        "check_barrier",
        "if (b->copied > most) {",
        "if (most < 0) {",
    ),
    phases_may_be_missed_before_a_scope_comes_again=(
        "reset_barrier",
        "info->again && missed ? MISSED : NEVER",
        "info->again && missed ? NEVER : NEVER",
    ),
    scopes_may_leave_accumulators_in_flight=("pm_vm_leave", "if (!writer) continue;", "continue;"),
)
breaks(
    "csrc/interp/async.c",
    ENDS,
    WARPS,
    accumulators_in_flight_may_be_read=(
        "locate_idle",
        "const task *k = writer_of(t, s);",
        "const task *k = i->to > 4096 ? NULL : NULL;",
    ),
    a_half_in_flight_is_the_whole=(
        "writer_of",
        "k->acc.base == acc->base && overlap(&k->acc, acc)",
        "(k->acc.base == acc->base || overlap(&k->acc, acc))",
    ),
    interpreted_threads_wait_for_one_warp=(
        "exec_wait_copies_out",
        "w < WARPS && s != STEP_FAIL; w++",
        "w < 1 && s != STEP_FAIL; w++",
    ),
    interpreted_groups_of_threads_are_of_one_warp=(
        "pm_vm_close_group",
        "for (uint32_t w = 1; m->has_warps && !t->of && w < WARPS; w++) pm_vm_warps",
        "for (uint32_t w = 1; m->has_warps && !t->of && w < 1; w++) pm_vm_warps",
    ),
)
breaks(
    f"{CUDA}/groups.c",
    ENDS,
    open_copies_stay_open=(
        "pm_print_last_wait",
        "if (state & OPEN) pm_line(e,",
        "if (state & 4) pm_line(e,",
    ),
    all_loops_run_for_sure=(
        "after_loop",
        "return sure ? end : state | end;",
        "return sure ? end : end;",
    ),
    a_wait_for_some_copies_is_for_all=(
        "after_op",
        "return *pm_attr(g, op, PM_ATTR_N) ? state : state & ~GROUPED;",
        "return state & ~GROUPED;",
    ),
    all_threads_wait_at_the_end=(
        "pm_print_last_wait",
        "threads |= end ? 1u << wg : 0;",
        "threads |= 1u << wg;",
    ),
)
breaks(
    f"{PASSES}/copies.c",
    WARPS,
    threads_close_groups_of_one_warp=(
        "pm_plan_copies",
        "if (warps_store) split_commits",
        "if (warps_store && !g) split_commits",
    ),
)
breaks(
    f"{CUDA}/lane.c",
    WARPS,
    one_lane_waits_for_copies_of_warps=(
        "of_all_warps",
        "return e->warps_store && !e->warps;",
        "return e->warps_store && e->warps;",
    ),
)
breaks(
    f"{CUDA}/emit_wgmma.c",
    ENDS,
    reads_pin_all_of_an_accumulator=(
        "pin",
        "words = p->columns / per_word;",
        "words = p->base_columns / per_word;",
    ),
)
breaks(
    "csrc/interp/tile_ops.c",
    SCHEDULE,
    interpreted_tiles_begin_at_1=(
        "exec_next_tile",
        "*(int32_t *)slot_of(t, i->dst) = counters_of(m, t)[i->to]++;",
        "*(int32_t *)slot_of(t, i->dst) = ++counters_of(m, t)[i->to];",
    ),
    interpreted_points_are_done_again=(
        "exec_fetch_tile",
        "number = m->points + counters_of",
        "number = 0 * m->points + counters_of",
    ),
)

breaks(
    "csrc/interp/machine.c",
    "language/test_interpret.py::test_engines_are_late_with_seed_0_and_early_with_others",
    interpreted_engines_are_always_late=(
        "set_weights",
        "m->options.seed ? choices[below(m, PM_COUNT(choices))] : LATE",
        "LATE + 0 * choices[below(m, PM_COUNT(choices))]",
    ),
)

# ---- the compile cache ---------------------------------------------------------------------------

breaks(
    "csrc/runtime/cache.c",
    "runtime/test_runtime.py::test_cache_entry_of_another_user",
    entries_of_others_are_read=(
        "read_entry",
        "fstat(fd, &st) || st.st_uid != geteuid() ||",
        "fstat(fd, &st) ||",
    ),
)

# ---- functions composed in Python ----------------------------------------------------------------

breaks(
    "pallas_mgpu/_jnp/activations.py",
    FUNCTIONS,
    sums_of_softmax_are_of_all=(
        "softmax",
        "return e / reduce.sum(e, axis=axis, keepdims=True)",
        "return e / reduce.sum(e)",
    ),
    hard_sigmoids_end_at_2=("hard_sigmoid", "return relu6(x + 3) / 6", "return relu6(x + 3) / 3"),
)
