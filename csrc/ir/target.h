/* The GPUs that kernels are lowered for: the rows of targets.def. */
#ifndef PM_TARGET_H
#define PM_TARGET_H

#include "../base/base.h"

typedef enum pm_feature {
#define PM_FEATURE(id, what, instead, error) PM_FEATURE_##id,
#define PM_TARGET(id, text, capability, smem, tmem, cluster, sms, features)
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
  PM_FEATURE_COUNT
} pm_feature;

extern const char *const pm_feature_names[PM_FEATURE_COUNT]; /* "TMA" ... */

enum { /* sets of features: PM_HAS_TMA | PM_HAS_CLUSTER ... */
#define PM_FEATURE(id, what, instead, error) PM_HAS_##id = 1 << PM_FEATURE_##id,
#define PM_TARGET(id, text, capability, smem, tmem, cluster, sms, features)
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
};

typedef struct pm_target {
  const char *text;
  uint32_t features;
  int capability;
  int64_t smem;
  int tmem, cluster, sms;
} pm_target;

typedef enum pm_target_id {
#define PM_FEATURE(id, what, instead, error)
#define PM_TARGET(id, text, capability, smem, tmem, cluster, sms, features) PM_TARGET_##id,
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
  PM_TARGET_COUNT
} pm_target_id;
extern const pm_target pm_targets[PM_TARGET_COUNT];

/* NULL: not in the table. */
const pm_target *pm_target_named(const char *text);
const pm_target *pm_target_of_device(int capability);
/* Do devices of this compute capability run what is compiled for the target? Targets with an
 * architecture of their own (sm_90a) run there alone. */
bool pm_target_runs_on(const pm_target *t, int capability);
/* The first that has all of these features; the first of all if none has. */
const pm_target *pm_target_with(uint32_t features);
/* Fails with the feature's error if the target lacks one of the features that `who` needs. */
pm_code pm_target_check(const pm_target *t, uint32_t features, const char *who, pm_arena *a,
                        pm_err *err);
/* "sm_90a, sm_100a": those with all of the features */
const char *pm_target_list(pm_arena *a, uint32_t features);

static inline bool pm_target_has(const pm_target *t, uint32_t features) {
  return (t->features & features) == features;
}

#endif
