"""Mutants of copies without a barrier (cp.async), their pipelines, and ops on GPUs
without wgmma."""

from . import CUDA, DEVICE, breaks

COPIES, PIPES, PORTABLE = (
    "memory/test_lane_copies.py",
    "pipelines/test_lane_pipeline.py",
    "ops/test_ops_portable.py",
)

breaks(
    f"{DEVICE}/cp_async.cuh",
    COPIES,
    lanes_read_what_is_outside=("cp_async_or_zeros", "valid ? N : 0", "valid ? N : N"),
    lanes_wait_for_one_group_less=("cp_async_wait", '"n"(N)', '"n"(N + 1)'),
    lanes_wait_for_bulk_groups=(
        "cp_async_wait",
        '"cp.async.wait_group %0;"',
        '"cp.async.bulk.wait_group %0;"',
    ),
)

breaks(
    f"{CUDA}/emit_async.c",
    COPIES,
    copies_of_lanes_without_group=("pm_cuda_CP_ASYNC", 'pm_line(e, "cp_async_commit();");', ""),
    groups_of_copies_that_happen_alone=(
        "pm_cuda_CP_ASYNC",
        'if (when) pm_end(e); pm_line(e, "cp_async_commit();");',
        'pm_line(e, "cp_async_commit();"); if (when) pm_end(e);',
    ),
    lanes_wait_for_all_but_one_more=(
        "pm_cuda_WAIT_CP_ASYNC",
        "(long long)*pm_attr(e->g, op, PM_ATTR_N));",
        "(long long)*pm_attr(e->g, op, PM_ATTR_N) + 1);",
    ),
    lanes_wait_each_for_itself=("pm_cuda_WAIT_CP_ASYNC", "meet(e);", ""),
    all_copies_of_lanes_are_promised=(
        "copy_chunks",
        "p->promised ? NULL : in_bounds(e, g)",
        "what == CP_ASYNC_CHUNKS ? NULL : in_bounds(e, g)",
    ),
    pieces_of_two_bytes=("pm_cuda_CP_ASYNC", "pm_dtypes[p->gmem.dtype].bytes < 4;",
                         "pm_dtypes[p->gmem.dtype].bytes < 2;"),
)  # fmt: skip

breaks(
    f"{CUDA}/groups.c",
    COPIES,
    blocks_end_under_copies_of_lanes=(
        "after_op",
        "if (a.completion == PM_COMPLETES_LANES) state |= FETCHING;",
        "",
    ),
)

breaks(
    "csrc/interp/async.c",
    COPIES,
    copies_that_do_not_happen_are_no_group=(
        "exec_fetch",
        "pm_vm_close_group(m, t); return STEP_PAUSE;",
        "if (!predicated_off(t, i)) pm_vm_close_group(m, t); return STEP_PAUSE;",
    ),
)

breaks(
    "csrc/interp/races.c",
    COPIES,
    races_with_copies_of_the_group_before=(
        "begin_engine",
        "maker = CP_ASYNC; id = pm_race_agent_id(m, STORES, k->owner); "
        "time = (uint32_t)k->group + 1;",
        "maker = CP_ASYNC; id = pm_race_agent_id(m, STORES, k->owner); time = (uint32_t)k->group;",
    ),
)

breaks(
    "pallas_mgpu/_lane_pipeline.py",
    PIPES,
    one_step_more_in_flight=(
        "run_steps",
        "(min(ahead.values()) - 1) * len(rings)",
        "min(ahead.values()) * len(rings)",
    ),
    slots_are_refilled_a_step_later=(
        "run_steps",
        "step = s + ahead[id(o)]",
        "step = s + ahead[id(o)] + 1",
    ),
    revisited_blocks_are_stored_once=(
        "run_steps",
        "again = (last > 0) & ~moved(",
        "again = (last > 0) & moved(",
    ),
)

breaks(
    "pallas_mgpu/ops/_warp_mma.py",
    PORTABLE,
    products_of_slots_that_are_filled=(
        "_Block.wait",
        "await_fetch(full, s // stages, 2 * (stages - 2))",
        "await_fetch(full, s // stages, 2 * (stages - 1))",
    ),
    the_result_overwrites_the_ring=(
        "_Block.store",
        "if not p.by_tma: plgpu.wait_gmem_to_smem(0)",
        "if p.by_tma: plgpu.wait_gmem_to_smem(0)",
    ),
    columns_outside_are_stored=(
        "_Block.put",
        "left = x.n - cols.start",
        "left = x.n - cols.start + 8",
    ),
)

breaks(
    "pallas_mgpu/ops/_attention_warp_mma.py",
    PORTABLE,
    values_that_have_not_come=(
        "_Block.next_keys",
        "j // stages, 2 * stages - 3)",
        "j // stages, 2 * stages - 2)",
    ),
    blocks_on_the_diagonal_are_whole=(
        "_Block.spans",
        "whole = jnp.minimum(self.row // cfg.block, whole)",
        "whole = jnp.minimum(self.row // cfg.block + 1, whole)",
    ),
)
