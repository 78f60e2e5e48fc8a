/* See sizes.h. Sizes are few, so all look-ups are linear. */
#include "sizes.h"

#include <inttypes.h>

#include "view.h"

uint32_t pm_add_size(pm_graph *g, const pm_size *s, pm_err *err) {
  const bool of_sizes = s->how > PM_SIZE_NUMBER;
  if (!g->sizes.n) pm_vec_push(g->arena, &g->sizes, (pm_size){0});
  if (s->how < 0 || s->how >= PM_SIZE_COUNT || s->least > s->most || s->multiple < 0 ||
      (of_sizes && (s->a < 1 || s->b < 1 || s->a >= g->sizes.n || s->b >= g->sizes.n))) {
    pm_fail(err, PM_E_VALUE, "a size that is no expression of sizes before it");
    return 0;
  }
  for (uint32_t k = 1; k < g->sizes.n; k++) {
    const pm_size *o = &g->sizes.at[k];
    if (o->how == s->how && o->a == s->a && o->b == s->b) return k;
  }
  if (g->sizes.n == PM_MAX_SIZES) {
    pm_fail(err, PM_E_NOT_IMPLEMENTED,
            "more than %d sizes that are known at run time only (plgpu.dim and what is computed "
            "from them); compute in the kernel from fewer of them, as arrays",
            PM_MAX_SIZES - 1);
    return 0;
  }
  pm_vec_push(g->arena, &g->sizes, *s);
  return g->sizes.n - 1;
}

pm_code pm_set_extents(pm_graph *g, uint32_t k, const uint32_t *size, pm_err *err) {
  const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + k);
  bool before = false; /* an extent above 1 */
  for (uint32_t d = 0; d < t->rank; d++) {
    if (size[d] > pm_n_sizes(g)) return pm_fail(err, PM_E_VALUE, "there is no size %u", size[d]);
    if (size[d] && t->dim[d] != g->sizes.at[size[d]].most + 1)
      return pm_fail(err, PM_E_VALUE, "extent %u is %" PRId64 ", not one more than %" PRId64, d,
                     t->dim[d], g->sizes.at[size[d]].most);
    if (size[d] && before)
      return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                     "argument %u: dimension %u has a size that is known at run time only "
                     "(plgpu.dim); of an array that can be the first dimension above 1 alone, "
                     "because strides are static. Put it first, or flatten the dimensions before "
                     "it into it",
                     k, d);
    before |= t->dim[d] > 1;
  }
  while (g->extents.n < (k + 1) * PM_MAX_RANK) pm_vec_push(g->arena, &g->extents, 0);
  memcpy(&g->extents.at[k * PM_MAX_RANK], size, t->rank * sizeof *size);
  return PM_OK;
}

/* ---- values -------------------------------------------------------------------------------- */

static int64_t floor_div(int64_t a, int64_t b) {
  if (!b) return 0;
  return a / b - (a % b && (a < 0) != (b < 0));
}

static int64_t combine(int64_t how, int64_t a, int64_t b) {
  switch (how) {
    case PM_SIZE_ADD: return a + b;
    case PM_SIZE_SUB: return a - b;
    case PM_SIZE_MUL: return a * b;
    case PM_SIZE_FLOORDIV: return floor_div(a, b);
    case PM_SIZE_MOD: return a - floor_div(a, b) * b;
    case PM_SIZE_MIN: return pm_min(a, b);
    default: return pm_max(a, b);
  }
}

static pm_code check_extent(const pm_graph *g, const pm_size *s, int64_t value, pm_err *err) {
  const char *name = g->strings.at[s->name];
  if (value < s->least || value > s->most)
    return pm_fail(err, PM_E_VALUE,
                   "kernel %s: %s is %" PRId64 " (dimension %" PRId64 " of argument %" PRId64
                   "); from %" PRId64 " to %" PRId64 " is accepted",
                   g->name, name, value, s->b, s->a, s->least, s->most);
  if (s->multiple > 1 && value % s->multiple)
    return pm_fail(err, PM_E_VALUE,
                   "kernel %s: %s is %" PRId64 " (dimension %" PRId64 " of argument %" PRId64
                   "); multiples of %" PRId64 " are accepted",
                   g->name, name, value, s->b, s->a, s->multiple);
  return PM_OK;
}

/* All extents that are one size agree. */
static pm_code check_shapes(const pm_graph *g, const pm_shapes *shapes, const int64_t *value,
                            pm_err *err) {
  for (uint32_t k = 0; k < g->n_operands; k++) {
    const int rank = pm_typeof(g, g->blocks.at[1].arg + k)->rank;
    for (uint32_t d = 0; d < (uint32_t)rank; d++) {
      const uint32_t size = pm_extent_of(g, k, d);
      const int64_t given = shapes->of(shapes->ctx, k)[d];
      if (!size || given == value[size]) continue;
      const char *name = g->strings.at[g->sizes.at[size].name];
      return pm_fail(err, PM_E_VALUE,
                     "kernel %s: dimension %u of argument %u is %" PRId64 ", and %s is %" PRId64
                     " by the arguments before it",
                     g->name, d, k, given, *name ? name : "its size", value[size]);
    }
  }
  return PM_OK;
}

pm_code pm_eval_sizes(const pm_graph *g, const pm_shapes *shapes, int64_t *value, pm_err *err) {
  for (uint32_t k = 1; k < g->sizes.n; k++) {
    const pm_size *s = &g->sizes.at[k];
    if (s->how == PM_SIZE_EXTENT) {
      value[k] = shapes->of(shapes->ctx, (uint32_t)s->a)[s->b];
      if (check_extent(g, s, value[k], err)) return err->code;
    } else {
      value[k] = s->how == PM_SIZE_NUMBER ? s->a : combine(s->how, value[s->a], value[s->b]);
      if (value[k] >= INT32_MAX || value[k] <= INT32_MIN)
        return pm_fail(err, PM_E_VALUE,
                       "kernel %s: a size computed from those of its arguments (plgpu.dim) is "
                       "%" PRId64 " for these; sizes are below 2**31 - 1",
                       g->name, value[k]);
    }
  }
  for (uint32_t k = 0; k < g->n_grid; k++) {
    const int64_t n = g->grid_sizes[k] ? value[g->grid_sizes[k]] : 1;
    if (n < 1)
      return pm_fail(err, PM_E_VALUE,
                     "kernel %s: axis %u of its grid is %" PRId64
                     " for these arguments; at least 1 "
                     "is needed",
                     g->name, k, n);
  }
  for (uint32_t k = 0; k < g->n_outputs * PM_MAX_RANK; k++) {
    const uint32_t size = pm_extent_of(g, g->n_operands + k / PM_MAX_RANK, k % PM_MAX_RANK);
    if (size && value[size] < 1)
      return pm_fail(err, PM_E_VALUE,
                     "kernel %s: dimension %u of output %u is %" PRId64
                     " for these arguments; at "
                     "least 1 is needed",
                     g->name, k % PM_MAX_RANK, k / PM_MAX_RANK, value[size]);
  }
  return check_shapes(g, shapes, value, err);
}

void pm_bound_shape(const pm_graph *g, uint32_t k, const int64_t *value, int64_t *dim) {
  const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + k);
  for (uint32_t d = 0; d < t->rank; d++) {
    const uint32_t size = pm_extent_of(g, k, d);
    dim[d] = size ? value[size] : t->dim[d];
  }
}

/* ---- binding ------------------------------------------------------------------------------- */

uint32_t pm_whole_extent(const pm_graph *g, pm_val ref, uint32_t d) {
  pm_err ignored = {0};
  pm_view view;
  const pm_type *t = pm_typeof(g, ref);
  if (!g->extents.n || t->kind != PM_REF || t->space != PM_GMEM || d >= t->rank) return 0;
  return pm_view_of(g, ref, false, &view, &ignored) ? 0 : view.dim[d].extent;
}

typedef struct binder {
  const pm_type *old; /* types of all values */
  uint32_t *extent;   /* PM_MAX_RANK for each value */
  const int64_t *value;
} binder;

static void bind_index(pm_graph *g, pm_opid op, void *ctx) {
  const binder *b = ctx;
  if (pm_get(g, op)->code != PM_OP_INDEX) return;
  uint32_t n;
  const pm_val of = pm_in(g, op, 0);
  const int64_t *starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  int64_t *sizes =
      (int64_t *)pm_attr_list(g, op, PM_ATTR_SIZES, &n); /* undone by pm_unbind_sizes */
  for (uint32_t d = 0; d < n; d++) {
    const uint32_t extent = b->extent[of * PM_MAX_RANK + d];
    if (extent && !starts[d] && sizes[d] == b->old[of].dim[d]) sizes[d] = b->value[extent];
  }
}

void pm_bind_sizes(pm_graph *g, const int64_t *value, pm_arena *temp, pm_binding *b) {
  binder w = {.value = value, .extent = PM_NEW(temp, uint32_t, (size_t)g->values.n * PM_MAX_RANK)};
  b->types = PM_NEW(temp, pm_type, g->values.n);
  b->lists = PM_NEW(temp, int64_t, g->lists.n + 1);
  w.old = b->types;
  memcpy(b->lists, g->lists.at, g->lists.n * sizeof *b->lists);
  memcpy(b->grid, g->grid, sizeof b->grid);
  b->sizes = PM_NEW(temp, pm_size, g->sizes.n + 1);
  memcpy(b->sizes, g->sizes.at, g->sizes.n * sizeof *b->sizes);
  b->n_extents = g->extents.n;
  for (pm_val v = 1; v < g->values.n; v++) {
    b->types[v] = g->values.at[v].type;
    for (uint32_t d = 0; d < b->types[v].rank; d++)
      w.extent[v * PM_MAX_RANK + d] = pm_whole_extent(g, v, d);
  }
  for (pm_val v = 1; v < g->values.n; v++) {
    pm_type *t = &g->values.at[v].type;
    for (uint32_t d = 0; d < t->rank; d++) {
      const uint32_t extent = w.extent[v * PM_MAX_RANK + d];
      if (extent) t->dim[d] = value[extent];
    }
  }
  pm_walk(g, 1, bind_index, &w);
  for (uint32_t k = 0; k < g->n_grid; k++)
    if (g->grid_sizes[k]) g->grid[k] = value[g->grid_sizes[k]];
  for (uint32_t k = 1; k < g->sizes.n; k++) g->sizes.at[k].least = g->sizes.at[k].most = value[k];
  g->extents.n = 0;
}

void pm_unbind_sizes(pm_graph *g, const pm_binding *b) {
  for (pm_val v = 1; v < g->values.n; v++) g->values.at[v].type = b->types[v];
  memcpy(g->lists.at, b->lists, g->lists.n * sizeof *b->lists);
  memcpy(g->sizes.at, b->sizes, g->sizes.n * sizeof *b->sizes);
  memcpy(g->grid, b->grid, sizeof b->grid);
  g->extents.n = b->n_extents;
}
