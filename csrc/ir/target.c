/* The table of targets, and the errors for features that a target lacks. */
#include "target.h"

const pm_target pm_targets[PM_TARGET_COUNT] = {
#define F(id) | PM_HAS_##id
#define PM_FEATURE(id, what, instead, error)
#define PM_TARGET(id, name, of_device, bytes, columns, blocks, cores, has) \
  [PM_TARGET_##id] = {.text = name,                                        \
                      .features = 0 has,                                   \
                      .capability = of_device,                             \
                      .smem = bytes,                                       \
                      .tmem = columns,                                     \
                      .cluster = blocks,                                   \
                      .sms = cores},
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
#undef F
};

const char *const pm_feature_names[PM_FEATURE_COUNT] = {
#define PM_FEATURE(id, what, instead, error) [PM_FEATURE_##id] = #id,
#define PM_TARGET(id, text, capability, smem, tmem, cluster, sms, features)
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
};

static const struct {
  const char *what, *instead;
  pm_code code;
} features[PM_FEATURE_COUNT] = {
#define PM_FEATURE(id, needed, other, error) \
  [PM_FEATURE_##id] = {.what = needed, .instead = other, .code = PM_E_##error},
#define PM_TARGET(id, text, capability, smem, tmem, cluster, sms, features)
#include "targets.def"
#undef PM_FEATURE
#undef PM_TARGET
};

const pm_target *pm_target_named(const char *text) {
  for (int k = 0; k < PM_TARGET_COUNT; k++) {
    if (!strcmp(pm_targets[k].text, text)) return &pm_targets[k];
  }
  return NULL;
}

const pm_target *pm_target_of_device(int capability) {
  for (int k = 0; k < PM_TARGET_COUNT; k++) {
    if (pm_targets[k].capability == capability) return &pm_targets[k];
  }
  return NULL;
}

bool pm_target_runs_on(const pm_target *t, int capability) {
  const bool alone = t->text[strlen(t->text) - 1] == 'a';
  return alone ? capability == t->capability : capability >= t->capability;
}

const pm_target *pm_target_with(uint32_t needed) {
  for (int k = 0; k < PM_TARGET_COUNT; k++) {
    if (pm_target_has(&pm_targets[k], needed)) return &pm_targets[k];
  }
  return &pm_targets[0];
}

const char *pm_target_list(pm_arena *a, uint32_t needed) {
  pm_text out;
  pm_text_init(&out, a);
  pm_put(&out, "");
  for (int k = 0; k < PM_TARGET_COUNT; k++) {
    if (!pm_target_has(&pm_targets[k], needed)) continue;
    pm_putf(&out, "%s%s", out.n ? ", " : "", pm_targets[k].text);
  }
  return out.at;
}

pm_code pm_target_check(const pm_target *t, uint32_t needed, const char *who, pm_arena *a,
                        pm_err *err) {
  for (int k = 0; k < PM_FEATURE_COUNT; k++) {
    if (!(needed & ~t->features & 1u << k)) continue;
    return pm_fail(err, features[k].code,
                   "%s needs %s, which %s lacks (targets that have it: %s); %s", who,
                   features[k].what, t->text, pm_target_list(a, 1u << k), features[k].instead);
  }
  return PM_OK;
}
