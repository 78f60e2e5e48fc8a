/* The layouts of layouts.def: reading their tilings, and finding the name of a layout.
 *
 * A name with e in its tiles has the width of an element as its argument, "mma_lhs(16)". A name may
 * be reduced, "wgmma_8bit.reduce(1)": over dims of its first tile, like Layout.reduce. */
#include "layout.h"

static const struct named {
  const char *text, *tiles, *warp, *lane;
  int64_t vector;
} named[] = {
#define PM_LAYOUT(text, tiles, warp, lane, vector) {text, tiles, warp, lane, vector},
#include "layouts.def"
#undef PM_LAYOUT
};

/* "16", "8e", "e", "-3", "*4"; moves on behind it and a separator */
static int64_t read_number(const char **at, int64_t e) {
  int64_t x = 0, sign = 1;
  bool digits = false, copies = false;
  for (; **at && **at != ',' && **at != '/'; ++*at) {
    if (**at == '-') sign = -1;
    else if (**at == '*') copies = true;
    else if (**at == 'e') x = digits ? x * e : e;
    else x = x * 10 + (**at - '0'), digits = true;
  }
  if (**at == ',') ++*at;
  return copies ? PM_REPLICATED + x : sign * x;
}

static uint32_t read_dims(const char *at, int64_t *out) {
  uint32_t n = 0;
  while (*at) out[n++] = read_number(&at, 1);
  return n;
}

static bool has_width(const struct named *l) { return strchr(l->tiles, 'e') != NULL; }

static void read_tiling(const struct named *l, int64_t bits, pm_tiling *out) {
  memset(out, 0, sizeof *out);
  out->named = true;
  for (const char *at = l->tiles; *at; out->n++) {
    for (; *at && *at != '/'; out->rank[out->n]++) {
      out->tile[out->n][out->rank[out->n]] = read_number(&at, bits ? 32 / bits : 1);
    }
    if (*at) at++;
  }
  out->n_warp = read_dims(l->warp, out->warp);
  out->n_lane = read_dims(l->lane, out->lane);
  out->vector = l->vector;
}

bool pm_layout_named(const char *text, size_t n, int64_t bits, pm_tiling *out) {
  for (size_t k = 0; k < PM_COUNT(named); k++) {
    if (strlen(named[k].text) != n || memcmp(named[k].text, text, n)) continue;
    if (has_width(&named[k]) != (bits == 4 || bits == 8 || bits == 16 || bits == 32)) return false;
    read_tiling(&named[k], bits, out);
    return true;
  }
  return false;
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
  return axis < 0 ? out : pm_layout_reduce(g, out, &gone, 1);
}

const char *pm_layout_name(pm_arena *a, const pm_layout *l) {
  static const uint8_t widths[] = {32, 16, 8, 4};
  pm_graph g; /* somewhere to intern */
  memset(&g, 0, sizeof g);
  g.arena = a;
  pm_type array = {PM_ARRAY, PM_F32, PM_REGS, l->rank, {0}};
  memcpy(array.dim, l->shape, sizeof array.dim);
  const pm_layid id = pm_layout_intern(&g, l);
  for (int axis = -1; axis < 2; axis++) {
    for (size_t k = 0; k < PM_COUNT(named); k++) {
      for (size_t w = 0; w < (has_width(&named[k]) ? PM_COUNT(widths) : 1); w++) {
        pm_tiling t;
        read_tiling(&named[k], has_width(&named[k]) ? widths[w] : 0, &t);
        if (make(&g, &array, &t, axis) != id) continue;
        pm_text out;
        pm_text_init(&out, a);
        pm_put(&out, named[k].text);
        if (has_width(&named[k])) pm_putf(&out, "(%d)", widths[w]);
        if (axis >= 0) pm_putf(&out, ".reduce(%d)", axis);
        return out.at;
      }
    }
  }
  return NULL;
}

pm_layid pm_layout_by_name(pm_graph *g, const char *text, size_t n, const pm_type *array) {
  const char *end = text + n, *at = text;
  int64_t bits = 0;
  int axis = -1;
  pm_tiling t;
  while (at < end && *at != '(' && *at != '.') at++;
  const size_t length = (size_t)(at - text);
  if (at < end && *at == '(') {
    for (at++; at < end && *at >= '0' && *at <= '9' && bits < 64; at++) {
      bits = bits * 10 + (*at - '0');
    }
    if (at == end || *at++ != ')') return 0;
  }
  if (at < end) {
    static const char reduce[] = ".reduce(";
    const size_t k = sizeof reduce - 1;
    if ((size_t)(end - at) != k + 2 || memcmp(at, reduce, k) || at[k + 1] != ')') return 0;
    axis = at[k] - '0';
    if (axis < 0 || axis > 1) return 0;
  }
  return pm_layout_named(text, length, bits, &t) ? make(g, array, &t, axis) : 0;
}
