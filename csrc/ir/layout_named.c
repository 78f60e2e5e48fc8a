/* The layouts of layouts.def: their tilings, and which of them a layout is.
 *
 * A name may have arguments, "mma_lhs(16)", and may be reduced, "wgmma_8bit.reduce(1)": over a
 * dimension of its first tile, as Layout.reduce. */
#include "layout.h"

typedef enum arguments { NONE, BITS, VECTOR, COLUMNS, COLUMNS_PACKING } arguments;
static const uint8_t n_arguments[] = {
    [NONE] = 0, [BITS] = 1, [VECTOR] = 1, [COLUMNS] = 1, [COLUMNS_PACKING] = 2};

/* A number of a tile: k times what the arguments say. */
enum { BY_NOTHING, BY_ELEMENTS, BY_VECTOR, BY_COLUMNS, BY_PACKING };
#define TIMES(k, by) ((k) | (by) << 24)
#define E(k) TIMES(k, BY_ELEMENTS)
#define V(k) TIMES(k, BY_VECTOR)
#define C(k) TIMES(k, BY_COLUMNS)
#define P(k) TIMES(k, BY_PACKING)

typedef struct dims {
  uint8_t n;
  int32_t at[4];
} dims;
#define LIST(...)                                                       \
  {                                                                     \
    sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t), { __VA_ARGS__ } \
  }
#define T(...) LIST(__VA_ARGS__),
#define D(...) LIST(__VA_ARGS__)
#define COPIES(n) LIST(PM_REPLICATED + n)

static const struct named {
  const char *text;
  arguments arguments;
  bool swizzled;
  dims tiles[PM_MAX_TILES], warp, lane;
  int64_t vector;
} named[PM_LAYOUT_COUNT] = {
#define PM_LAYOUT(id, name, numbers, swizzles, tiling, warps, lanes, fastest) \
  [PM_LAYOUT_##id] = {.text = name,                                           \
                      .arguments = numbers,                                   \
                      .swizzled = swizzles,                                   \
                      .tiles = {tiling},                                      \
                      .warp = warps,                                          \
                      .lane = lanes,                                          \
                      .vector = fastest},
#include "layouts.def"
#undef PM_LAYOUT
};

int pm_layout_find(const char *text, size_t n) {
  for (int k = 0; k < PM_LAYOUT_COUNT; k++) {
    if (strlen(named[k].text) == n && !memcmp(named[k].text, text, n)) return k;
  }
  return -1;
}

/* ---- tilings ------------------------------------------------------------------------------ */

static bool arguments_fit(arguments a, const int64_t *arg, uint32_t n) {
  if (n != n_arguments[a]) return false;
  for (uint32_t k = 0; k < n; k++) {
    if (arg[k] < 1 || arg[k] > 1 << 20) return false;
  }
  switch (a) {
    case BITS: return arg[0] == 4 || arg[0] == 8 || arg[0] == 16 || arg[0] == 32;
    case COLUMNS: return arg[0] % 16 == 0;
    case COLUMNS_PACKING: return arg[0] % 16 == 0 && arg[0] / 2 % arg[1] == 0;
    default: return true;
  }
}

static int64_t number(int32_t x, arguments a, const int64_t *arg) {
  const int64_t k = x & 0xffffff;
  switch (x >> 24) {
    case BY_ELEMENTS: return k * 32 / arg[0];
    case BY_VECTOR: return k * arg[0];
    case BY_COLUMNS: return k * arg[0] / 2;
    case BY_PACKING: return k * arg[a == COLUMNS_PACKING];
    default: return k;
  }
}

static uint32_t copy_dims(const dims *from, int64_t *to) {
  for (uint32_t k = 0; k < from->n; k++) to[k] = from->at[k];
  return from->n;
}

bool pm_layout_tiling(pm_layout_name_id id, const int64_t *arg, uint32_t n, pm_tiling *out) {
  const struct named *l = &named[id];
  if (!arguments_fit(l->arguments, arg, n)) return false;
  memset(out, 0, sizeof *out);
  out->named = true;
  for (; out->n < PM_MAX_TILES && l->tiles[out->n].n; out->n++) {
    const dims *tile = &l->tiles[out->n];
    out->rank[out->n] = tile->n;
    for (uint32_t k = 0; k < tile->n; k++) {
      out->tile[out->n][k] = number(tile->at[k], l->arguments, arg);
    }
  }
  out->n_warp = copy_dims(&l->warp, out->warp);
  out->n_lane = copy_dims(&l->lane, out->lane);
  out->vector = l->vector;
  return true;
}

/* Each tile against the dims that it splits: those of the tile before. */
static pm_code check_canonical(const pm_tiling *t, pm_err *err) {
  for (uint32_t k = 1; k < t->n; k++) {
    const uint32_t n = t->rank[k], before = t->rank[k - 1];
    bool same = n > 0 && n <= before, ones = true;
    for (uint32_t i = 0; i < n; i++) {
      same = same && t->tile[k][i] == t->tile[k - 1][before - n + i];
      ones = ones && t->tile[k][i] == 1;
    }
    if (same) {
      return pm_fail(err, PM_E_VALUE,
                     "Tiling: not canonical: a tile equals the dimensions it splits");
    }
    if (n > 1 && t->tile[k][0] == 1) {
      return pm_fail(err, PM_E_VALUE, "Tiling: not canonical: %s",
                     ones ? "a tile of ones is written (1,)" : "a tile begins with 1");
    }
  }
  return PM_OK;
}

pm_code pm_layout_of_tiling(pm_graph *g, const pm_type *array, const pm_tiling *t, pm_layid *out,
                            pm_err *err) {
  const int64_t *tiles[PM_MAX_TILES];
  for (uint32_t k = 0; k < t->n; k++) tiles[k] = t->tile[k];
  if (!t->named && check_canonical(t, err)) return err->code;
  return pm_layout_tiled(g, array, tiles, t->rank, t->n, t->warp, t->n_warp, t->lane, t->n_lane,
                         t->vector, out, err);
}

/* ---- layouts ------------------------------------------------------------------------------ */

/* The layout of an array reduced over dim `axis` of the tiling's first tile; -1: not reduced. */
static pm_layid make(pm_graph *g, const pm_type *array, const pm_tiling *t, int axis) {
  pm_layid out = 0;
  pm_err ignored;
  pm_type full = *array;
  memset(&ignored, 0, sizeof ignored);
  const int base = (int)t->rank[0], rank = array->rank + (axis >= 0);
  if (rank < base || rank > PM_MAX_RANK || axis >= base) return 0;
  const int64_t gone = rank - base + axis;
  if (axis >= 0) {
    full.rank = (uint8_t)rank;
    for (int k = rank - 1; k > gone; k--) full.dim[k] = array->dim[k - 1];
    full.dim[gone] = t->tile[0][axis];
  }
  if (pm_layout_of_tiling(g, &full, t, &out, &ignored)) return 0;
  if (axis < 0 || pm_layout_of(g, out)->kind != PM_TILED) return axis < 0 ? out : 0;
  return pm_layout_without(g, out, &gone, 1);
}

pm_layid pm_layout_constant(pm_graph *g, pm_layout_name_id id, const int64_t *arg, uint32_t n,
                            const pm_type *array) {
  pm_tiling t;
  return pm_layout_tiling(id, arg, n, &t) ? make(g, array, &t, -1) : 0;
}

pm_layid pm_layout_wgmma(pm_graph *g, const pm_type *array) {
  return pm_layout_constant(g, PM_LAYOUT_WGMMA, NULL, 0, array);
}

/* ---- names of layouts --------------------------------------------------------------------- */

/* Arguments that the layout may have been made with: all widths, its vector, its columns. Most of
 * its reductions forget the last two. */
static uint32_t candidates(arguments a, const pm_layout *l, int axis, int64_t arg[][2]) {
  static const uint8_t widths[] = {32, 16, 8, 4};
  if (a == BITS) {
    for (uint32_t k = 0; k < PM_COUNT(widths); k++) arg[k][0] = widths[k];
    return PM_COUNT(widths);
  }
  const int64_t vector = pm_layout_vector(l, l->rank - 1);
  arg[0][0] = a == VECTOR ? vector : l->padded[l->rank - 1];
  arg[0][1] = vector;
  return a == NONE || axis < 0;
}

static const char *text_of(pm_arena *a, const struct named *l, const int64_t *arg, int axis) {
  pm_text out;
  pm_text_init(&out, a);
  pm_put(&out, l->text);
  for (int k = 0; k < n_arguments[l->arguments]; k++) {
    pm_putf(&out, k ? ",%lld" : "(%lld", (long long)arg[k]);
  }
  if (l->arguments) pm_put(&out, ")");
  if (axis >= 0) pm_putf(&out, ".reduce(%d)", axis);
  return out.at;
}

/* A layout among its like, to compare it with those of names. */
typedef struct sample {
  pm_graph g; /* somewhere to intern */
  pm_type array;
  const pm_layout *l;
  pm_layid id;
} sample;

static bool take_sample(pm_arena *a, const pm_layout *l, sample *s) {
  memset(s, 0, sizeof *s);
  if (l->kind == PM_SPLAT || !l->rank) return false;
  s->g.arena = a;
  s->array = (pm_type){PM_ARRAY, PM_F32, PM_REGS, l->rank, {0}};
  memcpy(s->array.dim, l->shape, sizeof s->array.dim);
  s->l = l;
  s->id = pm_layout_intern(&s->g, l);
  return true;
}

/* Is the layout that of this name, or of its reduction? */
static bool is_called(sample *s, int name, int axis, pm_layout_identity *out) {
  int64_t arg[4][2] = {{0}};
  const uint32_t n = candidates(named[name].arguments, s->l, axis, arg);
  for (uint32_t i = 0; i < n; i++) {
    pm_tiling t;
    if (!pm_layout_tiling((pm_layout_name_id)name, arg[i], n_arguments[named[name].arguments],
                          &t) ||
        make(&s->g, &s->array, &t, axis) != s->id)
      continue;
    *out = (pm_layout_identity){(pm_layout_name_id)name, axis, {arg[i][0], arg[i][1]}};
    return true;
  }
  return false;
}

static bool identify(sample *s, pm_layout_identity *out) {
  for (int axis = -1; axis < 2; axis++) {
    for (int name = 0; name < PM_LAYOUT_COUNT; name++) {
      if (is_called(s, name, axis, out)) return true;
    }
  }
  return false;
}

bool pm_layout_identify(pm_arena *a, const pm_layout *l, pm_layout_identity *out) {
  sample s;
  return take_sample(a, l, &s) && identify(&s, out);
}

const char *pm_layout_name(pm_arena *a, const pm_layout *l) {
  pm_layout_identity x;
  return pm_layout_identify(a, l, &x) ? text_of(a, &named[x.id], x.arg, x.axis) : NULL;
}

bool pm_layout_swizzled(pm_arena *a, const pm_layout *l) {
  sample s;
  pm_layout_identity x;
  if (!take_sample(a, l, &s)) return false;
  for (int name = 0; name < PM_LAYOUT_COUNT; name++) { /* few are, and most layouts are none */
    if (named[name].swizzled && is_called(&s, name, -1, &x)) {
      return identify(&s, &x) && x.axis < 0 && named[x.id].swizzled;
    }
  }
  return false;
}

/* "(16,2)", "": at most two numbers, and where they end */
static const char *read_arguments(const char *at, const char *end, int64_t *arg, uint32_t *n) {
  *n = 0;
  if (at == end || *at != '(') return at;
  do {
    if (*n == 2) return NULL;
    arg[*n] = 0;
    for (at++; at < end && *at >= '0' && *at <= '9' && arg[*n] < 1 << 24; at++) {
      arg[*n] = arg[*n] * 10 + (*at - '0');
    }
    ++*n;
  } while (at < end && *at == ',');
  return at < end && *at == ')' ? at + 1 : NULL;
}

pm_layid pm_layout_by_name(pm_graph *g, const char *text, size_t n, const pm_type *array) {
  static const char reduce[] = ".reduce(";
  const size_t k = sizeof reduce - 1;
  const char *end = text + n, *at = text;
  int64_t arg[2];
  uint32_t n_arg;
  int axis = -1;
  pm_tiling t;
  while (at < end && *at != '(' && *at != '.') at++;
  const int id = pm_layout_find(text, (size_t)(at - text));
  at = read_arguments(at, end, arg, &n_arg);
  if (id < 0 || !at || !pm_layout_tiling((pm_layout_name_id)id, arg, n_arg, &t)) return 0;
  if (at < end) {
    if ((size_t)(end - at) != k + 2 || memcmp(at, reduce, k) || at[k + 1] != ')') return 0;
    axis = at[k] - '0';
    if (axis < 0 || axis > 1) return 0;
  }
  return make(g, array, &t, axis);
}

const char *pm_layout_text(pm_arena *a, const pm_layout *l) {
  const char *name = l->kind == PM_TILED ? pm_layout_name(a, l) : NULL;
  return name ? name : pm_layout_digits(a, l);
}

pm_code pm_layout_parse(pm_graph *g, const char *text, size_t n, const pm_type *array,
                        pm_layid *out, pm_err *err) {
  *out = pm_layout_by_digits(g, text, n, array);
  if (!*out) *out = pm_layout_by_name(g, text, n, array);
  if (*out) return PM_OK;
  return pm_fail(err, PM_E_VALUE, "'%.*s' is not a layout of an array of type %s",
                 (int)pm_min((int64_t)n, 200), text, pm_type_text(g->arena, array));
}
