/* Environment variables, by the table env.def. */
#ifndef PM_ENV_H
#define PM_ENV_H

#include "base.h"

typedef enum pm_env_id {
#define PM_ENV(id, kind, variable, default, meaning) PM_ENV_##id,
#include "env.def"
#undef PM_ENV
  PM_ENV_COUNT
} pm_env_id;

typedef struct pm_env_info {
  const char *variable, *standard;
} pm_env_info;
extern const pm_env_info pm_env_table[PM_ENV_COUNT];

/* The variable's value, or its default where it is unset or empty. Read anew at every call. */
const char *pm_env(pm_env_id id);
/* A switch (0, 1, false, true, no, yes, off, on), or a number of at least 0; the default where the
 * value is none, which pm_env_check refuses. */
bool pm_env_is_on(pm_env_id id);
int64_t pm_env_number(pm_env_id id);
/* PM_E_VALUE if the value of a variable is not of its kind. */
pm_code pm_env_check(pm_err *err);

#endif
