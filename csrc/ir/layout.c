/* Register layouts: constructors, canonical form, algebra, text.
 *
 * Everything is lists of digits. put() appends a digit; it drops digits of size 1 and merges a
 * digit into the previous one if both run along one dimension without a gap, so that two
 * descriptions of one map become the same lists. Merging never changes which register holds an
 * element. The strides of the digits of one dimension, sorted, form a chain (each is the product of
 * the sizes of the smaller ones), so a dimension can be split wherever a digit can.
 *
 * Reshape goes through the row-major linear index of a group of dimensions: digits of the old
 * dimensions become digits of the linear index, which are split where the new dimensions start. */
#include "layout.h"

enum { WARP, LANE, REG };

typedef struct maker {
  pm_layout l;
  bool bad; /* more digits, or a larger number, than a layout holds */
} maker;

static pm_digit *digits(const pm_layout *l, int where, uint32_t *n) {
  const pm_digit *d = where == WARP ? l->warp : where == LANE ? l->lane : l->reg;
  *n = where == WARP ? l->n_warp : where == LANE ? l->n_lane : l->n_reg;
  return (pm_digit *)d;
}

static void put(maker *m, int where, int dim, int64_t size, int64_t stride) {
  if (size == 1) return;
  uint32_t n;
  pm_digit *d = digits(&m->l, where, &n);
  if (dim < 0) stride = 0;
  if (size > INT32_MAX || stride > INT32_MAX) {
    m->bad = true;
    return;
  }
  if (n && d[n - 1].dim == dim && d[n - 1].stride == size * stride &&
      d[n - 1].size * size <= INT32_MAX) {
    d[n - 1].size *= (int32_t)size;
    d[n - 1].stride = (int32_t)stride;
    return;
  }
  if (n == PM_MAX_DIGITS) {
    m->bad = true;
    return;
  }
  d[n] = (pm_digit){(int8_t)dim, (int32_t)size, (int32_t)stride};
  *(where == WARP ? &m->l.n_warp : where == LANE ? &m->l.n_lane : &m->l.n_reg) = (uint8_t)(n + 1);
}

static void start(maker *m, pm_layout_kind kind, const pm_type *array) {
  memset(m, 0, sizeof *m);
  m->l.kind = (uint8_t)kind;
  m->l.rank = array->rank;
  for (int i = 0; i < array->rank; i++) m->l.shape[i] = array->dim[i];
}

static pm_type type_of(const pm_layout *l) {
  pm_type t = {PM_ARRAY, PM_F32, PM_REGS, l->rank, {0}};
  for (int i = 0; i < l->rank; i++) t.dim[i] = l->shape[i];
  return t;
}

static int64_t product(const int64_t *dim, uint32_t n) {
  int64_t p = 1;
  for (uint32_t i = 0; i < n; i++) p *= dim[i];
  return p;
}

static bool same_digits(const pm_digit *a, const pm_digit *b, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    if (a[i].dim != b[i].dim || a[i].size != b[i].size || a[i].stride != b[i].stride) return false;
  }
  return true;
}

static bool same_map(const pm_layout *a, const pm_layout *b) {
  return a->n_warp == b->n_warp && a->n_lane == b->n_lane && a->n_reg == b->n_reg &&
         same_digits(a->warp, b->warp, a->n_warp) && same_digits(a->lane, b->lane, a->n_lane) &&
         same_digits(a->reg, b->reg, a->n_reg);
}

static bool same_layout(const pm_layout *a, const pm_layout *b) {
  if (a->kind != b->kind || a->rank != b->rank || !same_map(a, b)) return false;
  for (int i = 0; i < a->rank; i++) {
    if (a->shape[i] != b->shape[i] || a->padded[i] != b->padded[i]) return false;
  }
  return true;
}

/* ---- interning ---------------------------------------------------------------------------- */

static bool make_strided(maker *m, const pm_type *array, int64_t vec) {
  int64_t size = pm_type_size(array);
  if (vec < 1 || vec > INT32_MAX || (vec > 1 && size % (128 * vec) != 0)) return false;
  start(m, PM_FLAT, array);
  m->l.padded[0] = pm_round_up(pm_max(size, 1), 128 * vec);
  put(m, WARP, 0, 4, 32 * vec);
  put(m, LANE, 0, 32, vec);
  put(m, REG, 0, m->l.padded[0] / (128 * vec), 128 * vec);
  put(m, REG, 0, vec, 1);
  return !m->bad;
}

/* A tiled map of a vector that is a strided one: one id for both. */
static void vector_is_flat(maker *m) {
  maker s;
  pm_type t = type_of(&m->l);
  int64_t vec = pm_layout_vector(&m->l, 0);
  if (m->l.kind != PM_TILED || m->l.rank != 1 || !make_strided(&s, &t, vec)) return;
  if (s.l.padded[0] == m->l.padded[0] && same_map(&s.l, &m->l)) m->l.kind = PM_FLAT;
}

static pm_layid finish(pm_graph *g, maker *m) {
  if (m->bad) return 0;
  if (m->l.rank == 0) {
    pm_type t = type_of(&m->l);
    start(m, PM_SPLAT, &t);
  }
  vector_is_flat(m);
  if (g->layouts.n == 0) pm_vec_push(g->arena, &g->layouts, NULL);
  for (uint32_t i = 1; i < g->layouts.n; i++) {
    if (same_layout(g->layouts.at[i], &m->l)) return i;
  }
  pm_layout *l = PM_NEW(g->arena, pm_layout, 1);
  *l = m->l;
  pm_vec_push(g->arena, &g->layouts, l);
  return g->layouts.n - 1;
}

/* The layout without its digits, to be given new ones. */
static void start_like(maker *m, const pm_layout *l) {
  memset(m, 0, sizeof *m);
  m->l.kind = l->kind;
  m->l.rank = l->rank;
  memcpy(m->l.shape, l->shape, sizeof l->shape);
  memcpy(m->l.padded, l->padded, sizeof l->padded);
}

pm_layid pm_layout_intern(pm_graph *g, const pm_layout *l) {
  maker m;
  start_like(&m, l);
  for (int i = l->rank; i < PM_MAX_RANK; i++) m.l.shape[i] = m.l.padded[i] = 0;
  if (l->kind == PM_FLAT) m.l.padded[0] = l->padded[0];
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) put(&m, where, d[k].dim, d[k].size, d[k].stride);
  }
  return finish(g, &m);
}

/* ---- constructors ------------------------------------------------------------------------- */

pm_layid pm_layout_splat(pm_graph *g, const pm_type *array) {
  maker m;
  start(&m, PM_SPLAT, array);
  return finish(g, &m);
}

static int64_t default_vector(const pm_type *array) {
  int64_t size = pm_type_size(array), most = pm_min(64 / pm_dtypes[array->dtype].bits, size / 128);
  int64_t vec = 1;
  if (size % 128) return 1;
  while (vec * 2 <= most) vec *= 2;
  while (size % (128 * vec)) vec /= 2;
  return vec;
}

pm_layid pm_layout_strided(pm_graph *g, const pm_type *array, int64_t vec) {
  maker m;
  if (array->rank == 0) return pm_layout_splat(g, array);
  if (!make_strided(&m, array, vec ? vec : default_vector(array))) return 0;
  return finish(g, &m);
}

pm_layid pm_layout_along(pm_graph *g, const pm_type *array, int dim, int64_t vec) {
  maker m;
  start(&m, PM_TILED, array);
  for (int k = 0; k < array->rank; k++) {
    m.l.padded[k] = k == dim ? pm_round_up(array->dim[k], 128 * vec) : array->dim[k];
    put(&m, REG, k, k == dim ? m.l.padded[k] / (128 * vec) : array->dim[k],
        k == dim ? 128 * vec : 1);
  }
  if (dim >= 0) put(&m, REG, dim, vec, 1);
  put(&m, WARP, dim, 4, 32 * vec);
  put(&m, LANE, dim, 32, vec);
  return finish(g, &m);
}

/* ---- tilings ------------------------------------------------------------------------------ */

enum { MAX_TILED = 64 };

/* Dimensions of a tiled shape; each still knows its dimension of the array and its stride there. */
typedef struct tiled_shape {
  uint32_t n;
  struct {
    int dim;
    int64_t size, stride;
    bool used;
  } at[MAX_TILED];
} tiled_shape;

static pm_code split(tiled_shape *s, const int64_t *tile, uint32_t n, pm_err *err) {
  if (s->n + n > MAX_TILED) return pm_fail(err, PM_E_VALUE, "Tiling: too many tiles");
  uint32_t first = s->n - n;
  for (uint32_t k = 0; k < n; k++) {
    int64_t t = tile[k], size = s->at[first + k].size, stride = s->at[first + k].stride;
    if (t <= 0 || size % t) {
      return pm_fail(err, PM_E_VALUE,
                     "Tiling: a tile size of %lld does not divide a dimension of size %lld",
                     (long long)t, (long long)size);
    }
    s->at[s->n + k] = s->at[first + k];
    s->at[s->n + k].size = t;
    s->at[first + k].size = size / t;
    s->at[first + k].stride = stride * t;
  }
  s->n += n;
  return PM_OK;
}

/* Give the dims to the warps (4 of them) or lanes (32). */
static pm_code assign(maker *m, tiled_shape *s, int where, const int64_t *dims, uint32_t n,
                      pm_err *err) {
  const char *name = where == WARP ? "warp_dims" : "lane_dims";
  int64_t total = 1, need = where == WARP ? 4 : 32;
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] >= PM_REPLICATED) {
      int64_t times = dims[k] - PM_REPLICATED;
      if (times < 1 || times > 32) {
        return pm_fail(err, PM_E_VALUE, "%s: Replicated(%lld) is out of range", name,
                       (long long)times);
      }
      total *= times;
      put(m, where, -1, times, 0);
      continue;
    }
    int64_t at = (int64_t)s->n + dims[k];
    if (dims[k] >= 0 || at < m->l.rank) {
      return pm_fail(err, PM_E_VALUE,
                     "%s: %lld is not accepted: dims are counted from the end, within the tiled "
                     "part (-%u to -1)",
                     name, (long long)dims[k], s->n - m->l.rank);
    }
    if (s->at[at].used) {
      return pm_fail(err, PM_E_VALUE, "%s: dim %lld is used twice", name, (long long)dims[k]);
    }
    s->at[at].used = true;
    total *= s->at[at].size;
    put(m, where, s->at[at].dim, s->at[at].size, s->at[at].stride);
  }
  if (total != need) {
    return pm_fail(err, PM_E_VALUE, "%s: the sizes multiply to %lld, but must to %lld", name,
                   (long long)total, (long long)need);
  }
  return PM_OK;
}

pm_code pm_layout_tiled(pm_graph *g, const pm_type *array, const int64_t *const *tiles,
                        const uint32_t *tile_rank, uint32_t n_tiles, const int64_t *warp_dims,
                        uint32_t n_warp, const int64_t *lane_dims, uint32_t n_lane,
                        int64_t vector_dim, pm_layid *out, pm_err *err) {
  maker m;
  tiled_shape s = {.n = array->rank};
  pm_code code;
  if (n_tiles == 0) return pm_fail(err, PM_E_VALUE, "Tiling: at least one tile is needed");
  start(&m, PM_TILED, array);
  for (uint32_t k = 0; k < array->rank; k++) {
    int64_t below = (int64_t)array->rank - tile_rank[0];
    int64_t tile = below < 0 || k < below ? 1 : tiles[0][k - below];
    m.l.padded[k] = tile > 0 ? pm_round_up(array->dim[k], tile) : array->dim[k];
    s.at[k].dim = (int)k;
    s.at[k].size = m.l.padded[k];
    s.at[k].stride = 1;
  }
  uint32_t before = array->rank;
  for (uint32_t k = 0; k < n_tiles; k++) {
    if (tile_rank[k] == 0 || tile_rank[k] > before) {
      return pm_fail(err, PM_E_VALUE,
                     "Tiling: tile %u has rank %u, but the shape it splits has %u dimensions", k,
                     tile_rank[k], before);
    }
    if ((code = split(&s, tiles[k], tile_rank[k], err))) return code;
    before = tile_rank[k];
  }
  if ((code = assign(&m, &s, WARP, warp_dims, n_warp, err))) return code;
  if ((code = assign(&m, &s, LANE, lane_dims, n_lane, err))) return code;
  int64_t v = (int64_t)s.n + vector_dim;
  if (vector_dim >= 0 || v < array->rank || s.at[v].used) {
    return pm_fail(
        err, PM_E_VALUE,
        "vector_dim: %lld is not accepted: it is counted from the end, within the tiled part, and "
        "used once",
        (long long)vector_dim);
  }
  s.at[v].used = true;
  for (uint32_t k = 0; k < s.n; k++) {
    if (!s.at[k].used) put(&m, REG, s.at[k].dim, s.at[k].size, s.at[k].stride);
  }
  put(&m, REG, s.at[v].dim, s.at[v].size, s.at[v].stride);
  *out = finish(g, &m);
  return *out ? PM_OK : pm_fail(err, PM_E_VALUE, "Tiling: too many tiles");
}

/* ---- algebra ------------------------------------------------------------------------------ */

static bool has_dim(const int64_t *dims, uint32_t n, int64_t d) {
  for (uint32_t k = 0; k < n; k++) {
    if (dims[k] == d) return true;
  }
  return false;
}

/* Drop dims of a tiled map: their registers go, their lanes and warps hold copies. */
static void make_reduced(maker *m, const pm_layout *l, const int64_t *dims, uint32_t n) {
  int to[PM_MAX_RANK];
  start_like(m, l);
  m->l.rank = 0;
  memset(m->l.shape, 0, sizeof m->l.shape);
  memset(m->l.padded, 0, sizeof m->l.padded);
  for (int k = 0; k < l->rank; k++) {
    to[k] = has_dim(dims, n, k) ? -1 : m->l.rank;
    if (to[k] < 0) continue;
    m->l.shape[m->l.rank] = l->shape[k];
    m->l.padded[m->l.rank++] = l->padded[k];
  }
  for (int where = WARP; where <= REG; where++) {
    uint32_t nd;
    const pm_digit *d = digits(l, where, &nd);
    for (uint32_t k = 0; k < nd; k++) {
      int dim = d[k].dim < 0 ? -1 : to[d[k].dim];
      if (dim >= 0 || where != REG) put(m, where, dim, d[k].size, d[k].stride);
    }
  }
}

static pm_type type_without(const pm_layout *l, const int64_t *dims, uint32_t n) {
  pm_type t = {PM_ARRAY, PM_F32, PM_REGS, 0, {0}};
  for (int k = 0; k < l->rank; k++) {
    if (!has_dim(dims, n, k)) t.dim[t.rank++] = l->shape[k];
  }
  return t;
}

pm_layid pm_layout_without(pm_graph *g, pm_layid id, const int64_t *dims, uint32_t n) {
  maker m;
  make_reduced(&m, pm_layout_of(g, id), dims, n);
  return finish(g, &m);
}

pm_layid pm_layout_reduce(pm_graph *g, pm_layid id, const int64_t *dims, uint32_t n) {
  const pm_layout *l = pm_layout_of(g, id);
  pm_type left = type_without(l, dims, n);
  if (n == 0) return id;
  if (l->kind == PM_SPLAT || pm_type_size(&left) == 1) return pm_layout_splat(g, &left);
  return l->kind == PM_FLAT ? 0 : pm_layout_without(g, id, dims, n);
}

/* Give the pieces of one digit of a linear index to dimensions first..last-1 with linear strides
 * below[]; the first of them has no upper end. */
static bool cut(maker *m, int where, int64_t size, int64_t stride, int first, int last,
                const int64_t *below) {
  int64_t end = size * stride;
  for (int q = first; q < last; q++) {
    int64_t lo = pm_max(stride, below[q]), hi = q == first ? end : pm_min(end, below[q - 1]);
    if (lo >= hi) continue;
    if (lo % stride || end % hi || lo % below[q] || hi % lo) return false;
    put(m, where, q, hi / lo, lo / below[q]);
  }
  return true;
}

/* One group of a reshape: dims a0..a1-1 of l become dims b0..b1-1 of m. */
typedef struct fold {
  int a0, a1, b0, b1;
} fold;

static bool fold_padding(maker *m, const pm_layout *l, const fold *f, int64_t *below_a,
                         int64_t *below_b) {
  int64_t p = 1;
  for (int k = f->a1 - 1; k >= f->a0; k--) {
    below_a[k] = p;
    if (k > f->a0 && l->padded[k] != l->shape[k]) return false;
    p *= k == f->a0 ? l->padded[k] : l->shape[k];
  }
  int64_t total = p;
  p = 1;
  for (int k = f->b1 - 1; k >= f->b0; k--) {
    below_b[k] = p;
    m->l.padded[k] = k == f->b0 ? total / p : m->l.shape[k];
    if (k == f->b0 && total % p) return false;
    p *= m->l.shape[k];
  }
  return true;
}

/* How many of the dims from k on have size 1, not counting those that take no part (of the new
 * shape all do: its padding is not known yet, 0). */
static int unit_run(const pm_layout *l, int k) {
  int n = 0;
  for (; k < l->rank && l->shape[k] == 1; k++) n += l->padded[k] != 1;
  return n;
}

/* Pair dims that hold the same elements. Dims of l without digits and unit dims of m that nothing
 * needs stay outside of all groups. */
static int fold_groups(maker *m, const pm_layout *l, fold *out) {
  int i = 0, j = 0, n = 0;
  for (;;) {
    while (i < l->rank && l->padded[i] == 1) i++;
    if (i == l->rank) break;
    for (int left = unit_run(&m->l, j) - unit_run(l, i); left > 0; left--) j++;
    if (j == m->l.rank) return -1; /* padding with no place to go */
    fold f = {i, i + 1, j, j + 1};
    int64_t a = l->shape[i++], b = m->l.shape[j++];
    while (a != b) {
      if (a < b ? i == l->rank : j == m->l.rank) return -1;
      if (a < b) a *= l->shape[i++];
      else b *= m->l.shape[j++];
    }
    f.a1 = i;
    f.b1 = j;
    out[n++] = f;
  }
  for (int k = 0; k < m->l.rank; k++) m->l.padded[k] = 1;
  return n;
}

static bool make_reshaped(maker *m, const pm_layout *l, const pm_type *to) {
  fold f[PM_MAX_RANK];
  int group[PM_MAX_RANK];
  int64_t below_a[PM_MAX_RANK], below_b[PM_MAX_RANK];
  start(m, PM_TILED, to);
  int n = fold_groups(m, l, f);
  for (int k = 0; k < n; k++) {
    if (!fold_padding(m, l, &f[k], below_a, below_b)) return false;
    for (int d = f[k].a0; d < f[k].a1; d++) group[d] = k;
  }
  if (n < 0) return false;
  for (int where = WARP; where <= REG; where++) {
    uint32_t nd;
    const pm_digit *d = digits(l, where, &nd);
    for (uint32_t k = 0; k < nd; k++) {
      if (d[k].dim < 0) {
        put(m, where, -1, d[k].size, 0);
        continue;
      }
      const fold *w = &f[group[d[k].dim]];
      if (!cut(m, where, d[k].size, d[k].stride * below_a[d[k].dim], w->b0, w->b1, below_b)) {
        return false;
      }
    }
  }
  return !m->bad;
}

pm_layid pm_layout_reshape(pm_graph *g, pm_layid id, const pm_type *to) {
  const pm_layout *l = pm_layout_of(g, id);
  maker m;
  if (l->kind == PM_SPLAT || to->rank == 0) return pm_layout_splat(g, to);
  if (product(l->shape, l->rank) != pm_type_size(to)) return 0;
  if (l->kind == PM_FLAT) {
    start_like(&m, l);
    m.l.rank = to->rank;
    memset(m.l.shape, 0, sizeof m.l.shape);
    memcpy(m.l.shape, to->dim, sizeof to->dim[0] * to->rank);
  } else {
    return make_reshaped(&m, l, to) ? finish(g, &m) : 0;
  }
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) put(&m, where, d[k].dim, d[k].size, d[k].stride);
  }
  return finish(g, &m);
}

pm_layid pm_layout_transpose(pm_graph *g, pm_layid id, const int64_t *perm, const pm_type *to) {
  const pm_layout *l = pm_layout_of(g, id);
  int last = -1, where_to[PM_MAX_RANK];
  bool ordered = true; /* but for unit dims, which have no elements to move */
  for (int k = 0; k < l->rank; k++) {
    where_to[perm[k]] = k;
    if (l->shape[perm[k]] == 1) continue;
    ordered = ordered && (int)perm[k] > last;
    last = (int)perm[k];
  }
  if (l->kind != PM_TILED) return l->kind == PM_SPLAT || ordered ? pm_layout_reshape(g, id, to) : 0;
  maker m;
  start(&m, PM_TILED, to);
  for (int k = 0; k < l->rank; k++) m.l.padded[k] = l->padded[perm[k]];
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      put(&m, where, d[k].dim < 0 ? -1 : where_to[d[k].dim], d[k].size, d[k].stride);
    }
  }
  return finish(g, &m);
}

static void scale_digits(maker *m, const pm_layout *l, int dim, bool up) {
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      const int64_t stride = d[k].stride;
      const bool pair = !up && where == REG && k + 1 == n;
      if (d[k].dim != dim) put(m, where, d[k].dim, d[k].size, stride);
      else if (pair) put(m, where, dim, d[k].size / 2, 1);
      else put(m, where, dim, d[k].size, up ? 2 * stride : stride / 2);
      m->bad |= d[k].dim == dim && !up && !pair && stride % 2;
    }
  }
}

static pm_layid scaled(pm_graph *g, pm_layid id, const pm_type *to, bool up) {
  const pm_layout *l = pm_layout_of(g, id);
  if (l->kind == PM_SPLAT || !l->rank) return 0;
  const int dim = l->kind == PM_FLAT ? 0 : l->rank - 1;
  const pm_digit *pair = l->n_reg ? &l->reg[l->n_reg - 1] : NULL;
  if (!up && (!pair || pair->dim != dim || pair->stride != 1 || pair->size % 2)) return 0;
  if (!up && l->padded[dim] % 2) return 0;
  maker m;
  start_like(&m, l);
  memcpy(m.l.shape, to->dim, sizeof to->dim[0] * to->rank);
  m.l.padded[dim] = up ? 2 * l->padded[dim] : l->padded[dim] / 2;
  scale_digits(&m, l, dim, up);
  if (up) put(&m, REG, dim, 2, 1);
  return finish(g, &m);
}

pm_layid pm_layout_doubled(pm_graph *g, pm_layid l, const pm_type *to) {
  return scaled(g, l, to, true);
}

pm_layid pm_layout_halved(pm_graph *g, pm_layid l, const pm_type *to) {
  return scaled(g, l, to, false);
}

/* How many values of each register digit of `dim` the elements start..start+size-1 take. The lowest
 * digits are taken whole, one in part, those above it for one value; false: not of this form. */
static bool slice_digits(const pm_layout *l, int dim, int64_t start_at, int64_t size,
                         int64_t padded, int64_t *keep, int64_t *new_padded) {
  int64_t unit = 1; /* at and above this distance only registers count */
  for (int where = WARP; where <= LANE; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      if (d[k].dim == dim) unit = pm_max(unit, (int64_t)d[k].size * d[k].stride);
    }
  }
  if (start_at % unit) return false;
  bool parted = false;
  int64_t end = pm_round_up(start_at + size, unit);
  int64_t reached = unit;
  while (reached < padded) {
    int at = -1;
    for (int k = 0; k < l->n_reg; k++) {
      if (l->reg[k].dim == dim && l->reg[k].stride == reached) at = k;
    }
    if (at < 0) return false;
    int64_t n = l->reg[at].size, s = reached, first = start_at / s % n;
    int64_t count = pm_cdiv(end - start_at, s);
    reached = s * n;
    if (parted) {
      keep[at] = 1;
      continue;
    }
    if (first == 0 && count >= n) {
      end = pm_round_up(end, reached);
      continue;
    }
    if (first + count > n) return false;
    keep[at] = count;
    parted = true;
  }
  *new_padded = end - start_at;
  return true;
}

pm_layid pm_layout_slice(pm_graph *g, pm_layid id, const int64_t *starts, const pm_type *to) {
  const pm_layout *l = pm_layout_of(g, id);
  int64_t keep[PM_MAX_DIGITS];
  maker m;
  if (to->rank != l->rank) return 0;
  if (l->kind == PM_SPLAT || to->rank == 0) return pm_layout_splat(g, to);
  for (int k = 0; k < l->n_reg; k++) keep[k] = l->reg[k].size;
  start(&m, (pm_layout_kind)l->kind, to);
  if (l->kind == PM_TILED) {
    for (int k = 0; k < l->rank; k++) {
      if (!slice_digits(l, k, starts[k], to->dim[k], l->padded[k], keep, &m.l.padded[k])) return 0;
    }
  } else {
    /* a run of the linear index: dims before the first cut one are taken once, those after it whole
     */
    int d = 0;
    while (d + 1 < l->rank && to->dim[d] == 1) d++;
    for (int k = d + 1; k < l->rank; k++) {
      if (to->dim[k] != l->shape[k]) return 0;
    }
    int64_t first = 0;
    for (int k = 0; k < l->rank; k++) first = first * l->shape[k] + starts[k];
    if (!slice_digits(l, 0, first, pm_type_size(to), l->padded[0], keep, &m.l.padded[0])) return 0;
  }
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      put(&m, where, d[k].dim, where == REG ? keep[k] : d[k].size, d[k].stride);
    }
  }
  return finish(g, &m);
}

/* FLAT, new leading dims only: the part of the linear index below the size of the source. */
static bool make_flat_source(maker *m, const pm_layout *l, const pm_type *source) {
  int64_t size = pm_type_size(source), below[2] = {size, 1};
  maker both;
  start(m, PM_FLAT, source);
  m->l.padded[0] = size;
  memset(&both, 0, sizeof both);
  for (int where = WARP; where <= REG; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      if (d[k].dim >= 0) {
        if (!cut(&both, where, d[k].size, d[k].stride, 0, 2, below)) return false;
      } else {
        put(&both, where, -1, d[k].size, 0);
      }
    }
    d = digits(&both.l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      if (d[k].dim == 1) put(m, where, 0, d[k].size, d[k].stride);
      else if (where != REG) put(m, where, -1, d[k].size, 0);
    }
  }
  return !m->bad && !both.bad;
}

pm_layid pm_layout_broadcast_source(pm_graph *g, pm_layid result, const int64_t *dims, uint32_t n) {
  const pm_layout *l = pm_layout_of(g, result);
  int64_t gone[PM_MAX_RANK];
  uint32_t n_gone = 0;
  for (int k = 0; k < l->rank; k++) {
    if (!has_dim(dims, n, k)) gone[n_gone++] = k;
  }
  if (n_gone == 0) return result;
  if (l->kind != PM_FLAT || n_gone == l->rank) {
    if (n_gone < l->rank) return pm_layout_reduce(g, result, gone, n_gone);
    pm_type scalar = pm_scalar_type(PM_F32);
    return pm_layout_splat(g, &scalar);
  }
  bool kept = false;
  for (int k = 0; k < l->rank; k++) {
    if (l->shape[k] == 1) continue;
    bool goes = has_dim(gone, n_gone, k);
    if (kept && goes) return 0;
    kept = kept || !goes;
  }
  pm_type source = type_without(l, gone, n_gone);
  if (pm_type_size(&source) == product(l->shape, l->rank)) {
    return pm_layout_reshape(g, result, &source);
  }
  maker m;
  return make_flat_source(&m, l, &source) ? finish(g, &m) : 0;
}

pm_layid pm_layout_broadcast_operand(pm_graph *g, pm_layid result, const int64_t *dims, uint32_t n,
                                     const pm_type *operand) {
  const pm_layout *l = pm_layout_of(g, result);
  int64_t kept[PM_MAX_RANK] = {0};
  uint32_t n_kept = 0;
  for (uint32_t k = 0; k < n; k++) {
    if (operand->dim[k] == l->shape[dims[k]]) kept[n_kept++] = dims[k];
  }
  pm_layid source = pm_layout_broadcast_source(g, result, kept, n_kept);
  if (!source || n_kept == n) return source;
  return pm_layout_reshape(g, source, operand);
}

/* ---- reading ------------------------------------------------------------------------------ */

int64_t pm_layout_regs(const pm_layout *l) {
  int64_t n = 1;
  for (int k = 0; k < l->n_reg; k++) n *= l->reg[k].size;
  return n;
}

int64_t pm_layout_vector(const pm_layout *l, int dim) {
  if (l->n_reg == 0) return 1;
  const pm_digit *d = &l->reg[l->n_reg - 1];
  return d->stride == 1 && (d->dim == dim || l->kind == PM_FLAT) ? d->size : 1;
}

static void add_digits(const pm_digit *d, uint32_t n, int64_t number, int64_t *index) {
  while (n--) {
    if (d[n].dim >= 0) index[d[n].dim] += number % d[n].size * d[n].stride;
    number /= d[n].size;
  }
}

void pm_layout_part(const pm_layout *l, int tid, int64_t r, int64_t part[PM_MAX_RANK]) {
  for (int k = 0; k < PM_MAX_RANK; k++) part[k] = 0;
  add_digits(l->warp, l->n_warp, tid / 32, part);
  add_digits(l->lane, l->n_lane, tid % 32, part);
  add_digits(l->reg, l->n_reg, r, part);
}

bool pm_layout_place(const pm_layout *l, int64_t index[PM_MAX_RANK]) {
  if (l->kind == PM_FLAT) {
    int64_t linear = index[0];
    for (int k = l->rank - 1; k > 0; k--) {
      index[k] = linear % l->shape[k];
      linear /= l->shape[k];
    }
    index[0] = linear;
  }
  for (int k = 0; k < l->rank; k++) {
    if (index[k] >= l->shape[k]) return false;
  }
  return true;
}

bool pm_layout_index(const pm_layout *l, int tid, int64_t r, int64_t index[PM_MAX_RANK]) {
  pm_layout_part(l, tid, r, index);
  return pm_layout_place(l, index);
}

bool pm_layout_is_padded(const pm_layout *l) {
  if (l->kind == PM_FLAT) return l->padded[0] != product(l->shape, l->rank);
  for (int k = 0; l->kind == PM_TILED && k < l->rank; k++) {
    if (l->padded[k] != l->shape[k]) return true;
  }
  return false;
}

bool pm_layout_is_replicated(const pm_layout *l) {
  if (l->kind == PM_SPLAT) return true;
  for (int where = WARP; where <= LANE; where++) {
    uint32_t n;
    const pm_digit *d = digits(l, where, &n);
    for (uint32_t k = 0; k < n; k++) {
      if (d[k].dim < 0) return true;
    }
  }
  return false;
}

pm_val pm_masked_shared(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (o->n_out) return o->out;
  for (uint32_t k = 1; k < o->n_in; k++) {
    const pm_value *v = pm_value_of(g, pm_in(g, op, k));
    if (v->type.rank && pm_layout_of(g, v->layout)->kind != PM_SPLAT) return pm_in(g, op, k);
  }
  return pm_in(g, op, 1);
}

static int64_t linear_index(const pm_layout *l, const int64_t *index) {
  int64_t at = 0;
  for (int k = 0; k < l->rank; k++) at = at * l->shape[k] + index[k];
  return at;
}

/* The register in which every lane holds the only element; false: not all lanes hold it. */
static bool only_element(const pm_layout *l, int32_t *reg) {
  int64_t index[PM_MAX_RANK];
  if (product(l->shape, l->rank) != 1) return false;
  for (*reg = 0; *reg < pm_layout_regs(l); ++*reg) {
    int tid = 0;
    while (tid < 128 && pm_layout_index(l, tid, *reg, index)) tid++;
    if (tid == 128) return true;
  }
  return false;
}

bool pm_layout_register_map(pm_arena *a, const pm_layout *from, const pm_layout *to, int32_t *map) {
  int64_t n_from = pm_layout_regs(from), n_to = pm_layout_regs(to), index[PM_MAX_RANK];
  if (from->kind == PM_SPLAT) {
    for (int64_t r = 0; r < n_to; r++) map[r] = 0;
    return true;
  }
  if (to->kind == PM_SPLAT) return only_element(from, map);
  /* held[element] == tid + 1 + 128 * register, if lane tid is the last that was seen to hold it */
  int32_t *held = PM_NEW(a, int32_t, product(from->shape, from->rank));
  for (int64_t r = 0; r < n_to; r++) map[r] = -1;
  for (int tid = 0; tid < 128; tid++) {
    for (int64_t r = 0; r < n_from; r++) {
      if (!pm_layout_index(from, tid, r, index)) continue;
      held[linear_index(from, index)] = (int32_t)(tid + 1 + 128 * r);
    }
    for (int64_t r = 0; r < n_to; r++) {
      if (!pm_layout_index(to, tid, r, index)) continue;
      int32_t h = held[linear_index(to, index)] - 1;
      if (h < 0 || h % 128 != tid || (map[r] >= 0 && map[r] != h / 128)) return false;
      map[r] = h / 128;
    }
  }
  return true;
}

/* ---- text --------------------------------------------------------------------------------- */

static void put_digits(pm_text *t, const pm_digit *d, uint32_t n) {
  pm_put(t, ";");
  for (uint32_t k = 0; k < n; k++) {
    pm_put(t, k ? "," : "");
    if (d[k].dim < 0) pm_putf(t, "*:%d", (int)d[k].size);
    else pm_putf(t, "%d:%d:%d", d[k].dim, (int)d[k].size, (int)d[k].stride);
  }
}

bool pm_layout_is_strided(const pm_layout *l) {
  maker m;
  const pm_type t = type_of(l);
  return l->kind == PM_FLAT && make_strided(&m, &t, pm_layout_vector(l, 0)) && same_layout(&m.l, l);
}

const char *pm_layout_digits(pm_arena *a, const pm_layout *l) {
  if (l->kind == PM_SPLAT) return "splat";
  if (pm_layout_is_strided(l)) return pm_printf(a, "strided(%d)", (int)pm_layout_vector(l, 0));
  pm_text out;
  pm_text_init(&out, a);
  pm_put(&out, l->kind == PM_FLAT ? "flat(" : "tiled(");
  for (int k = 0; k < (l->kind == PM_FLAT ? 1 : l->rank); k++) {
    pm_putf(&out, k ? ",%lld" : "%lld", (long long)l->padded[k]);
  }
  put_digits(&out, l->warp, l->n_warp);
  put_digits(&out, l->lane, l->n_lane);
  put_digits(&out, l->reg, l->n_reg);
  pm_put(&out, ")");
  return out.at;
}

typedef struct reader {
  const char *at, *end;
} reader;

static bool eat(reader *r, char c) {
  if (r->at == r->end || *r->at != c) return false;
  r->at++;
  return true;
}

static bool number(reader *r, int64_t *out) {
  const char *from = r->at;
  *out = 0;
  while (r->at < r->end && *r->at >= '0' && *r->at <= '9' && *out < INT32_MAX) {
    *out = *out * 10 + (*r->at++ - '0');
  }
  return r->at > from && *out <= INT32_MAX;
}

static bool read_digits(reader *r, maker *m, int where) {
  if (!eat(r, ';')) return false;
  if (r->at < r->end && (*r->at == ';' || *r->at == ')')) return true;
  do {
    int64_t dim = -1, size, stride = 0;
    if (!eat(r, '*') && (!number(r, &dim) || dim >= m->l.rank)) return false;
    if (!eat(r, ':') || !number(r, &size) || size < 1) return false;
    if (dim >= 0 && (!eat(r, ':') || !number(r, &stride) || stride < 1)) return false;
    if (m->l.kind == PM_FLAT && dim > 0) return false;
    put(m, where, (int)dim, size, stride);
  } while (eat(r, ','));
  return true;
}

/* Do the digits of `dim` reach each index below the padded extent once? */
static bool is_chain(const pm_layout *l, int dim, int64_t padded) {
  int64_t reached = 1;
  uint32_t n, seen = 0, total = 0;
  for (bool more = true; more;) {
    more = false;
    total = 0;
    for (int where = WARP; where <= REG; where++) {
      const pm_digit *d = digits(l, where, &n);
      for (uint32_t k = 0; k < n; k++) {
        if (d[k].dim != dim) continue;
        total++;
        if (d[k].stride != reached || more) continue;
        reached *= d[k].size;
        more = true;
        seen++;
        if (reached > padded) return false;
      }
    }
  }
  return reached == padded && seen == total;
}

static bool well_formed(const pm_layout *l) {
  int64_t warps = 1, lanes = 1;
  for (int k = 0; k < l->n_warp && warps <= 4; k++) warps *= l->warp[k].size;
  for (int k = 0; k < l->n_lane && lanes <= 32; k++) lanes *= l->lane[k].size;
  for (int k = 0; k < l->n_reg; k++) {
    if (l->reg[k].dim < 0) return false;
  }
  if (warps != 4 || lanes != 32) return false;
  if (l->kind == PM_FLAT) {
    return l->padded[0] >= product(l->shape, l->rank) && is_chain(l, 0, l->padded[0]);
  }
  for (int k = 0; k < l->rank; k++) {
    if (l->padded[k] < l->shape[k] || !is_chain(l, k, l->padded[k])) return false;
  }
  return true;
}

static bool read_general(reader *r, maker *m, pm_layout_kind kind, const pm_type *array) {
  start(m, kind, array);
  for (int k = 0; k < (kind == PM_FLAT ? 1 : array->rank); k++) {
    if ((k && !eat(r, ',')) || !number(r, &m->l.padded[k])) return false;
  }
  for (int where = WARP; where <= REG; where++) {
    if (!read_digits(r, m, where)) return false;
  }
  return eat(r, ')') && r->at == r->end && !m->bad && well_formed(&m->l);
}

static bool read_strided(reader *r, maker *m, const pm_type *array) {
  int64_t vec;
  return number(r, &vec) && eat(r, ')') && r->at == r->end && make_strided(m, array, vec);
}

static bool begins(reader *r, const char *word) {
  size_t n = strlen(word);
  if ((size_t)(r->end - r->at) < n || memcmp(r->at, word, n)) return false;
  r->at += n;
  return true;
}

static bool is_text(const reader *r, const char *word) {
  return (size_t)(r->end - r->at) == strlen(word) && memcmp(r->at, word, strlen(word)) == 0;
}

pm_layid pm_layout_by_digits(pm_graph *g, const char *text, size_t n, const pm_type *array) {
  maker m;
  reader r = {text, text + n};
  bool ok = true;
  if (is_text(&r, "splat")) start(&m, PM_SPLAT, array);
  else if (array->rank == 0) ok = false;
  else if (is_text(&r, "strided")) ok = make_strided(&m, array, default_vector(array));
  else if (begins(&r, "strided(")) ok = read_strided(&r, &m, array);
  else if (begins(&r, "flat(")) ok = read_general(&r, &m, PM_FLAT, array);
  else if (begins(&r, "tiled(")) ok = read_general(&r, &m, PM_TILED, array);
  else ok = false;
  return ok ? finish(g, &m) : 0;
}
