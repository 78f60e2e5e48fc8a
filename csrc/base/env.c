/* Environment variables: expands env.def. */
#include "env.h"

#include <stdlib.h>
#include <string.h>

const pm_env_info pm_env_table[PM_ENV_COUNT] = {
#define PM_ENV(id, variable, default, meaning) {variable, default, meaning},
#include "env.def"
#undef PM_ENV
};

const char *pm_env(pm_env_id id) {
  const char *value = getenv(pm_env_table[id].variable);
  return value && *value ? value : pm_env_table[id].standard;
}

bool pm_env_is_on(pm_env_id id) { return strcmp(pm_env(id), "0") != 0; }

int64_t pm_env_number(pm_env_id id) {
  char *end;
  const char *value = pm_env(id);
  int64_t n = strtoll(value, &end, 10);
  return end == value || *end || n < 0 ? strtoll(pm_env_table[id].standard, NULL, 10) : n;
}
