/* Printing and checks. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "vm.h"

enum { MOST_NUMBER = 512 }; /* characters */

/* The number with the shortest decimal digits that is x in dtype d; those of 8 bits as float32. */
static double shortest(pm_dtype d, double x) {
  char buf[64];
  if (isnan(x) || isinf(x)) return x;
  if (pm_is_small_float(d)) d = PM_F32;
  for (int digits = 1; digits <= 9; digits++) {
    uint32_t bits = 0, same = 0;
    snprintf(buf, sizeof buf, "%.*g", digits, x);
    pm_store_scalar(d, &bits, (pm_scalar){.f = strtod(buf, NULL)});
    pm_store_scalar(d, &same, (pm_scalar){.f = x});
    if (bits == same) break;
  }
  return strtod(buf, NULL);
}

/* Does the format say how many digits? Then they are those of the exact number. */
static bool has_digits(const char *spec) {
  const size_t n = strlen(spec);
  return strchr(spec, '.') || (n && strchr("eEfFgGn%", spec[n - 1]));
}

static void print_number(pm_machine *m, const char *spec, pm_dtype d, pm_scalar v, char *buf) {
  if (pm_is_float(d) && !has_digits(spec)) v.f = shortest(d, v.f);
  if (m->options.number && (*spec || pm_is_float(d))) {
    m->options.number(m->options.print_ctx, spec, d, v, buf, MOST_NUMBER);
  } else if (d == PM_BOOL) {
    snprintf(buf, MOST_NUMBER, "%s", v.i ? "True" : "False");
  } else if (pm_is_float(d)) {
    snprintf(buf, MOST_NUMBER, "%.9g", v.f);
  } else {
    snprintf(buf, MOST_NUMBER, "%" PRId64, v.i);
  }
}

/* "[i, j]: " of element n of an array */
static size_t print_index(const printing *p, int64_t n, char *buf) {
  int64_t below = p->arg[0].n;
  size_t at = 0;
  for (uint32_t d = 0; d < p->arg[0].rank; d++) {
    below /= p->arg[0].dim[d];
    at += (size_t)sprintf(buf + at, d ? ", %" PRId64 : "[%" PRId64, n / below % p->arg[0].dim[d]);
  }
  return at ? at + (size_t)sprintf(buf + at, "]: ") : 0;
}

/* A line of scalars, or of element n of an array. */
static void print_line(pm_machine *m, thread *t, const printing *p, int64_t n) {
  char line[8192], agent[512], spec[128];
  size_t at = 0;
  uint32_t k = 0;
  if (p->label) {
    at = (size_t)snprintf(line, sizeof line, "[%s] ", pm_vm_agent(m, t, agent, sizeof agent));
  }
  for (const char *f = p->format; *f && at + MOST_NUMBER + 24 * PM_MAX_RANK < sizeof line;) {
    if ((*f == '{' || *f == '}') && f[1] == *f) f++; /* {{ is one { */
    else if (*f == '{' && k < p->n) {
      const char *end = strchr(f, '}');
      const size_t from = f[1] == ':' ? 2 : 1, size = end ? (size_t)(end - f) - from : 0;
      if (!end) break;
      snprintf(spec, sizeof spec, "%.*s", (int)size, f + from);
      const pm_dtype d = p->arg[k].dtype;
      const char *value = slot_of(t, p->arg[k++].slot);
      at += print_index(p, n, line + at);
      print_number(m, spec, d, pm_load_scalar(d, value + n * pm_dtypes[d].bytes), line + at);
      at += strlen(line + at);
      f = end + 1;
      continue;
    }
    line[at++] = *f++;
  }
  line[at] = 0;
  pm_vm_line(m, line);
}

static step exec_print(pm_machine *m, thread *t, const instr *i) {
  const printing *p = i->printing;
  const int64_t n = p->n == 1 ? p->arg[0].n : 1;
  for (int64_t k = 0; k < n; k++) print_line(m, t, p, k);
  return STEP_NEXT;
}

static step exec_check(pm_machine *m, thread *t, const instr *i) {
  const printing *p = i->printing;
  if (*(const uint8_t *)slot_of(t, p->arg[0].slot)) return STEP_NEXT;
  return pm_vm_fail(m, t, i->op, PM_E_ASSERTION, "debug_check: %s", p->format);
}

const handler pm_vm_DEBUG_PRINT = {pm_vm_encode_print, exec_print, {0}};
const handler pm_vm_DEBUG_CHECK = {
    pm_vm_encode_print, exec_check, {.poison = pm_poison_rule_check}};
