/* Environment variables, by the table env.def. */
#ifndef PM_ENV_H
#define PM_ENV_H

#include "base.h"

typedef enum pm_env_id {
#define PM_ENV(id, variable, default, meaning) PM_ENV_##id,
#include "env.def"
#undef PM_ENV
  PM_ENV_COUNT
} pm_env_id;

typedef struct pm_env_info {
  const char *variable, *standard, *meaning;
} pm_env_info;
extern const pm_env_info pm_env_table[PM_ENV_COUNT];

/* The variable's value, or its default where it is unset or empty. Read anew at every call. */
const char *pm_env(pm_env_id id);

#endif
