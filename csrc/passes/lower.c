/* All passes in order, from a traced graph to one that both back ends read.
 *
 * Simplification runs first, so that inference sees constants and no dead code, and again after
 * layouts are known, because conversions may have made values equal or unused. Copies are planned
 * before SMEM: the engine of a copy depends only on the alignment within an allocation, and every
 * allocation starts at a multiple of 1024 bytes. */
#include "passes.h"

static pm_code simplify(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  return pm_simplify(g, err);
}

typedef struct step {
  const char *name;
  pm_code (*run)(pm_graph *g, const pm_target *t, pm_err *err);
  enum pm_stage stage; /* stages that the graph has passed */
} step;

static const step steps[] = {
    {"check_target", pm_check_target, PM_TRACED},
    {"make_mma", pm_make_mma, PM_TRACED},
    {"pack_refs", pm_pack_refs, PM_TRACED},
    {"transpose_refs", pm_transpose_refs, PM_TRACED},
    {"simplify", simplify, PM_TRACED},
    {"check_outputs", pm_check_outputs, PM_TRACED},
    {"split_rows", pm_split_rows, PM_TRACED},
    {"stage_products", pm_stage_products, PM_TRACED},
    {"split_roles", pm_split_roles, PM_TRACED},
    {"loop_over_strips", pm_loop_over_strips, PM_TRACED},
    {"check_registers", pm_check_registers, PM_TRACED},
    {"force_transforms", pm_force_transforms, PM_TRACED},
    {"infer_layouts", pm_infer_layouts, PM_LAID_OUT},
    {"choose_transforms", pm_choose_transforms, PM_LAID_OUT},
    {"simplify", simplify, PM_LAID_OUT},
    {"repeat_requests", pm_repeat_requests, PM_LAID_OUT},
    {"warn_large", pm_warn_large, PM_LAID_OUT},
    {"check_divergence", pm_check_divergence, PM_LAID_OUT},
    {"plan_copies", pm_plan_copies, PM_LAID_OUT},
    {"plan_smem", pm_plan_smem, PM_PLANNED},
    {"plan_tmem", pm_plan_tmem, PM_PLANNED},
    {"place_syncs", pm_place_syncs, PM_SYNCED},
    {"check_ordering", pm_check_ordering, PM_SYNCED},
};

pm_code pm_lower(pm_graph *g, const pm_target *t, pm_err *err) {
  pm_code code = PM_OK;
  g->target = t;
  for (size_t k = 0; k < PM_COUNT(steps) && !code; k++) {
    code = steps[k].run(g, t, err);
    if (code) return code;
    g->stage = (uint8_t)steps[k].stage;
#ifndef NDEBUG
    pm_err bad;
    memset(&bad, 0, sizeof bad);
    if (pm_verify(g, &bad)) {
      return pm_fail(err, PM_E_INTERNAL, "the pass %s left a graph that is not valid: %s",
                     steps[k].name, bad.text);
    }
#endif
  }
  return code;
}
