/* A run of a kernel under several schedules, whose results must have the same bits.
 *
 * The arguments that the kernel writes are kept as they were, and put back before each schedule but
 * the first one. The results of the first stay: a kernel with seeds=n gives what it gives with its
 * first seed. Only that run prints and has a timeline. */
#include <inttypes.h>
#include <stdio.h>

#include "vm.h"

/* Of the arguments that are written, one after another. */
typedef struct copies {
  char *before, *results;
  size_t bytes;
} copies;

static size_t bytes_of(const pm_machine *m) {
  size_t n = 0;
  for (uint32_t k = 0; k < m->n_buffers; k++)
    n += m->args[k % m->n_args].written ? m->args[k % m->n_args].bytes : 0;
  return n;
}

static void keep(const pm_machine *m, void *const *buffers, char *to) {
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    if (!m->args[k % m->n_args].written) continue;
    memcpy(to, buffers[k], m->args[k % m->n_args].bytes);
    to += m->args[k % m->n_args].bytes;
  }
}

static void put_back(const pm_machine *m, void *const *buffers, const char *from) {
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    if (!m->args[k % m->n_args].written) continue;
    memcpy(buffers[k], from, m->args[k % m->n_args].bytes);
    from += m->args[k % m->n_args].bytes;
  }
}

static void number(const arg *a, const char *at, char *buf, size_t n) {
  const pm_scalar v = pm_load_scalar((pm_dtype)a->dtype, at);
  if (pm_is_float((pm_dtype)a->dtype)) snprintf(buf, n, "%.9g", v.f);
  else snprintf(buf, n, "%" PRId64, v.i);
}

/* Where the results differ from those of the first seed. */
static pm_code compare(pm_machine *m, void *const *buffers, const char *first, uint64_t seed,
                       uint64_t other, pm_err *err) {
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    const arg *a = &m->args[k % m->n_args];
    const char *got = buffers[k];
    size_t n = 0, at = 0;
    if (!a->written) continue;
    for (size_t e = 0; e < a->bytes && memcmp(first, got, a->bytes); e += a->item) {
      if (memcmp(first + e, got + e, a->item) && !n++) at = e;
    }
    if (n) {
      char index[256], x[40], y[40];
      number(a, first + at, x, sizeof x);
      number(a, got + at, y, sizeof y);
      return pm_fail(
          err, PM_E_SCHEDULE,
          "the result depends on the schedule: %s differs in %zu of %zu elements between "
          "seeds %" PRIu64 " and %" PRIu64 ", the first at %s: %s and %s",
          a->name, n, (size_t)(a->bytes / a->item), seed, other,
          pm_vm_index_text(a, at, index, sizeof index), x, y);
    }
    first += a->bytes;
  }
  return PM_OK;
}

static void no_print(void *ctx, const char *line) { (void)ctx, (void)line; }

static pm_code more_seeds(pm_machine *m, void *const *buffers, const pm_interp_options *o,
                          const copies *c, pm_err *err) {
  pm_interp_options other = *o;
  keep(m, buffers, c->results);
  other.print = no_print;
  other.timeline = NULL;
  pm_code code = PM_OK;
  for (uint32_t k = 1; !code && k < o->seeds; k++) {
    other.seed = o->seed + k;
    put_back(m, buffers, c->before);
    code = pm_vm_run_once(m, buffers, &other, err);
    if (code) {
      const size_t n = strlen(err->text);
      snprintf(err->text + n, sizeof err->text - n, "\n  under seed=%" PRIu64, other.seed);
    } else {
      code = compare(m, buffers, c->results, o->seed, other.seed, err);
    }
  }
  put_back(m, buffers, c->results);
  return code;
}

pm_code pm_interp_run(pm_machine *m, void *const *buffers, const pm_interp_options *o,
                      pm_err *err) {
  if (o->seeds < 2) return pm_vm_run_once(m, buffers, o, err);
  copies c = {.bytes = bytes_of(m)};
  c.before = pm_malloc(2 * c.bytes + 1);
  if (!c.before) {
    return pm_fail(err, PM_E_MEMORY, "no memory for the results of several schedules");
  }
  c.results = c.before + c.bytes;
  keep(m, buffers, c.before);
  pm_code code = pm_vm_run_once(m, buffers, o, err);
  if (!code) code = more_seeds(m, buffers, o, &c, err);
  pm_free(c.before);
  return code;
}
