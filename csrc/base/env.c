/* Environment variables: expands env.def. */
#include "env.h"

#include <stdlib.h>

const pm_env_info pm_env_table[PM_ENV_COUNT] = {
#define PM_ENV(id, variable, default, meaning) {variable, default, meaning},
#include "env.def"
#undef PM_ENV
};

const char *pm_env(pm_env_id id) {
  const char *value = getenv(pm_env_table[id].variable);
  return value && *value ? value : pm_env_table[id].standard;
}
