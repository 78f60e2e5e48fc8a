/* Environment variables: expands env.def. */
#include "env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const pm_env_info pm_env_table[PM_ENV_COUNT] = {
#define PM_ENV(id, kind, name, default, meaning) {.variable = name, .standard = default},
#include "env.def"
#undef PM_ENV
};

const char *pm_env(pm_env_id id) {
  const char *value = getenv(pm_env_table[id].variable);
  return value && *value ? value : pm_env_table[id].standard;
}

enum { TEXT, NUMBER, SWITCH, DIRECTORY };
static const unsigned char kinds[PM_ENV_COUNT] = {
#define PM_ENV(id, kind, variable, default, meaning) kind,
#include "env.def"
#undef PM_ENV
};

static bool read_switch(const char *value, bool *on) {
  static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
  for (size_t i = 0; i < PM_COUNT(words); i++) {
    *on = i % 2;
    if (!strcasecmp(value, words[i])) return true;
  }
  return false;
}

static bool read_number(const char *value, int64_t *n) {
  char *end;
  errno = 0;
  *n = strtoll(value, &end, 10);
  return end != value && !*end && *n >= 0 && !errno;
}

bool pm_env_is_on(pm_env_id id) {
  bool on;
  if (!read_switch(pm_env(id), &on)) read_switch(pm_env_table[id].standard, &on);
  return on;
}

int64_t pm_env_number(pm_env_id id) {
  int64_t n;
  if (!read_number(pm_env(id), &n)) read_number(pm_env_table[id].standard, &n);
  return n;
}

pm_code pm_env_check(pm_err *err) {
  for (int i = 0; i < PM_ENV_COUNT; i++) {
    const char *value = pm_env(i), *wanted = NULL;
    int64_t n;
    bool on;
    if (kinds[i] == NUMBER && !read_number(value, &n)) wanted = "a whole number of at least 0";
    if (kinds[i] == SWITCH && !read_switch(value, &on))
      wanted = "0, 1, false, true, no, yes, off or on";
    if (kinds[i] == DIRECTORY && *value == '~') wanted = "a path without ~, which no shell expands";
    if (wanted)
      return pm_fail(err, PM_E_VALUE, "the environment variable %s must be %s, got %.80s",
                     pm_env_table[i].variable, wanted, value);
  }
  return PM_OK;
}
