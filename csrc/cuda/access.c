/* Loads and stores of arrays: addresses of the registers of a layout in a view.
 *
 * A layout says that index[d] is a sum over digits of warp, lane and register number. A view says
 * that a dimension is at i * inner, or at i / tile * outer + i % tile * inner. If no digit
 * straddles a tile other than at a whole factor, and the digits inside a tile never carry into the
 * next one, the address is linear in the digits too:
 *
 *     address = start of the view + sum(warp) + sum(lane) + sum(register)
 *
 * The last sum folds to a constant in an unrolled loop. The fastest register digits that are dense
 * in memory form the vector of one instruction, as wide as alignment can be proved, at most 16
 * bytes. FLAT layouts on a dense view are linear with one dimension, the linear index. Accesses
 * that are not linear compute the coordinates of every vector.
 *
 * Swizzle is a ^= (a >> 7 & m) << 4 on the low 10 bits, which is linear over exclusive or. If the
 * thread's part and the register's part share none of those 10 bits, the thread's part is swizzled
 * once. The register's part, a constant, is combined with it by ^ below 1024 and by + from there
 * on.
 *
 * Padding is masked by vectors: no vector crosses the end of an extent. */
#include "gen.h"

enum { WARP, LANE, REG, N_PARTS, VECTOR_BYTES = 16, PATTERN = 1024 };

typedef struct access {
  pm_gen *e;
  const pm_layout *l;
  const pm_view *v;
  bool linear, store, single; /* single: no vectors */
  int64_t bytes, vec, n;      /* of an element; elements of a vector; vectors */
  pm_sum part[N_PARTS];       /* linear: elements of memory; REG: counts vectors */
  int vec_dim;                /* dimension of the layout along which vectors run, -1: none */
  int matrix;                 /* 1, 2: ldmatrix / stmatrix, plain or transposed */
  bool split;                 /* the swizzle can be split */
  bool words;                 /* registers are pairs of 16-bit elements */
  const char *stem, *i, *address, *valid; /* i: number of the vector */
} access;

/* ---- sums -------------------------------------------------------------------------------- */

static const pm_digit *digits(const pm_layout *l, int part, uint32_t *n) {
  *n = part == WARP ? l->n_warp : part == LANE ? l->n_lane : l->n_reg;
  return part == WARP ? l->warp : part == LANE ? l->lane : l->reg;
}

static void count_vectors(pm_sum *s, int64_t vec);

static void add_piece(pm_sum *s, int64_t div, int64_t size, int64_t mul) {
  if (size > 1 && mul) s->at[s->n++] = (pm_piece){div, size, mul};
}

static int64_t sum_max(const pm_sum *s) {
  int64_t max = 0;
  for (uint32_t k = 0; k < s->n; k++) max += (s->at[k].size - 1) * s->at[k].mul;
  return max;
}

/* " + text" onto a text, if it is not 0 */
static void plus(pm_text *t, const char *x) {
  if (!strcmp(x, "0")) return;
  pm_putf(t, t->n ? " + %s" : "%s", x);
}

static const char *thread_sum(pm_gen *e, const pm_sum *warp, const pm_sum *lane, int64_t scale) {
  pm_text t;
  pm_text_init(&t, e->arena);
  plus(&t, pm_sum_text(e, warp, "warp", scale));
  plus(&t, pm_sum_text(e, lane, "lane", scale));
  return t.n ? t.at : "0";
}

/* ---- coordinates ------------------------------------------------------------------------- */

static int64_t numbers(const pm_layout *l, int part) {
  return part == WARP ? 4 : part == LANE ? 32 : pm_layout_regs(l);
}

static void coord_sum(const pm_layout *l, int part, int dim, pm_sum *out) {
  uint32_t n;
  const pm_digit *d = digits(l, part, &n);
  int64_t div = 1;
  *out = (pm_sum){.total = numbers(l, part)};
  for (uint32_t k = n; k-- > 0;) {
    if (d[k].dim == dim) add_piece(out, div, d[k].size, d[k].stride);
    div *= d[k].size;
  }
}

const char *pm_coord_base(pm_gen *e, const pm_layout *l, int dim) {
  pm_sum warp, lane;
  coord_sum(l, WARP, dim, &warp);
  coord_sum(l, LANE, dim, &lane);
  return thread_sum(e, &warp, &lane, 1);
}

void pm_coord_regs(const pm_layout *l, int dim, pm_sum *out) { coord_sum(l, REG, dim, out); }

static int n_coords(const pm_layout *l) { return l->kind == PM_FLAT ? 1 : l->rank; }
static int64_t extent(const pm_layout *l, int dim) {
  int64_t n = l->shape[dim];
  for (int k = 1; l->kind == PM_FLAT && k < l->rank; k++) n *= l->shape[k];
  return n;
}
static bool is_padded(const pm_layout *l, int dim) {
  return l->kind != PM_SPLAT && l->padded[dim] > extent(l, dim);
}

static const char *coord_name(pm_gen *e, const char *stem, int dim) {
  return pm_str(e, "%s_d%d", stem, dim);
}

static void coord_line(pm_gen *e, const pm_layout *l, const char *stem, int d, bool always) {
  if (!always && !is_padded(l, d)) return;
  pm_line(e, "const i32 %s = %s;", coord_name(e, stem, d), pm_coord_base(e, l, d));
}

const char *pm_coord_lines(pm_gen *e, const pm_layout *l) {
  const char *stem = pm_unique(e, "index");
  for (int d = 0; d < n_coords(l); d++) coord_line(e, l, stem, d, false);
  return stem;
}

static const char *valid_text(pm_gen *e, const pm_layout *l, const char *stem, const char *reg,
                              int64_t vec) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int d = 0; d < n_coords(l); d++) {
    pm_sum s;
    if (!is_padded(l, d)) continue;
    coord_sum(l, REG, d, &s);
    count_vectors(&s, vec);
    if (t.n) pm_put(&t, " && ");
    pm_put(&t, coord_name(e, stem, d));
    if (s.n) pm_putf(&t, " + %s", pm_sum_text(e, &s, reg, 1));
    pm_putf(&t, " < %lld", (long long)extent(l, d));
  }
  return t.n ? t.at : NULL;
}

const char *pm_valid(pm_gen *e, const pm_layout *l, const char *stem, const char *reg) {
  return valid_text(e, l, stem, reg, 1);
}

/* ---- registers of one layout in another -------------------------------------------------- */

static bool same_index(const int64_t *a, const int64_t *b, int rank) {
  return !memcmp(a, b, sizeof *a * (size_t)rank);
}

/* The indices of a layout by parts: those of registers are computed once for all lanes. */
typedef struct parts {
  const pm_layout *l;
  int64_t n, (*reg)[PM_MAX_RANK], lane[PM_MAX_RANK];
} parts;

static parts parts_of(pm_gen *e, const pm_layout *l) {
  parts p = {.l = l, .n = pm_layout_regs(l)};
  p.reg = pm_alloc(e->arena, sizeof *p.reg * (size_t)p.n);
  for (int64_t r = 0; r < p.n; r++) pm_layout_part(l, 0, r, p.reg[r]);
  return p;
}

static void set_lane(parts *p, int tid) { pm_layout_part(p->l, tid, 0, p->lane); }

static bool index_at(const parts *p, int64_t r, int64_t index[PM_MAX_RANK]) {
  for (int k = 0; k < PM_MAX_RANK; k++) index[k] = p->lane[k] + p->reg[r][k];
  return pm_layout_place(p->l, index);
}

/* Register of src, in this lane, at the index; -1: none. Tries the one after the last hit first. */
static int64_t find_reg(const parts *src, const int64_t *index, int64_t guess) {
  int64_t at[PM_MAX_RANK];
  for (int64_t k = 0; k < src->n; k++) {
    const int64_t s = (guess + k) % src->n;
    index_at(src, s, at);
    if (same_index(at, index, src->l->rank)) return s;
  }
  return -1;
}

const char *pm_table(pm_gen *e, const char *stem, const int64_t *x, int64_t n, const char *k) {
  const char *name = pm_unique(e, stem);
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int64_t j = 0; j < n; j++) {
    pm_putf(&t, "%s%lld", j ? ", " : "", (long long)pm_max(x[j], 0));
  }
  pm_line(e, "constexpr u16 %s[] = {%s};", name, t.at);
  return pm_str(e, "%s[%s]", name, k);
}

/* The map as a sum over the digits of dst's registers, or as a table. -1: any of the n_src that
 * there are. */
static const char *map_text(pm_gen *e, const pm_layout *dst, const int64_t *map, int64_t n,
                            int64_t n_src, const char *reg) {
  pm_sum s = {.total = n};
  int64_t div = 1;
  for (uint32_t k = dst->n_reg; k-- > 0; div *= dst->reg[k].size) {
    const int64_t step = map[div % n] < 0 ? 0 : map[div % n] - map[0];
    if (dst->reg[k].size > 1) add_piece(&s, div, dst->reg[k].size, step);
  }
  bool fits = true;
  for (int64_t r = 0; fits && r < n; r++) {
    int64_t x = map[0];
    for (uint32_t k = 0; k < s.n; k++) x += r / s.at[k].div % s.at[k].size * s.at[k].mul;
    fits = map[r] < 0 ? x >= 0 && x < n_src : x == map[r];
  }
  if (fits && !map[0]) return pm_sum_text(e, &s, reg, 1);
  if (fits) return pm_str(e, "%s + %lld", pm_sum_text(e, &s, reg, 1), (long long)map[0]);
  return pm_table(e, "register", map, n, reg);
}

const char *pm_map_text(pm_gen *e, const pm_layout *dst, const int32_t *map, int64_t n) {
  int64_t *wide = PM_NEW(e->arena, int64_t, n);
  for (int64_t r = 0; r < n; r++) wide[r] = map[r];
  return map_text(e, dst, wide, n, n, "r");
}

/* Lane 0 has the least index of each register, so what is padding there is so in all lanes. */
const int64_t *pm_reg_list(pm_gen *e, const pm_layout *src, const pm_layout *dst, pm_project fn,
                           const void *ctx) {
  parts from = parts_of(e, src), to = parts_of(e, dst);
  const int64_t n = to.n;
  int64_t *map = PM_NEW(e->arena, int64_t, n), at[PM_MAX_RANK], want[PM_MAX_RANK];
  int64_t last = -1;
  for (int64_t r = 0; r < n; r++) {
    map[r] = -1;
    if (!index_at(&to, r, at)) continue;
    fn(ctx, at, want);
    map[r] = find_reg(&from, want, last + 1);
    if (map[r] < 0) return NULL;
    last = map[r];
  }
  /* the other lanes: for one register, but for all of them where an index is unravelled */
  const bool all = src->kind == PM_FLAT || dst->kind == PM_FLAT;
  for (int tid = 1; tid < 128; tid++) {
    set_lane(&from, tid);
    set_lane(&to, tid);
    for (int64_t r = 0; r < (all ? n : 1); r++) {
      int64_t got[PM_MAX_RANK];
      if (!index_at(&to, r, at)) continue;
      fn(ctx, at, want);
      index_at(&from, map[r], got);
      if (!same_index(got, want, src->rank)) return NULL;
    }
  }
  return map;
}

typedef struct slice {
  int rank; /* of the source */
  int64_t dim[PM_MAX_RANK], start[PM_MAX_RANK];
} slice;

static void project_slice(const void *ctx, const int64_t *dst, int64_t *src) {
  const slice *s = ctx;
  for (int k = 0; k < s->rank; k++) src[k] = dst[s->dim[k]] + s->start[k];
}

const int64_t *pm_slice_registers(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  uint32_t n;
  const int64_t *starts = pm_attr_list(e->g, op, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(e->g, op, PM_ATTR_SIZES, &n);
  slice s = {.rank = pm_typeof(e->g, in)->rank};
  int next = 0;
  for (int k = 0; k < s.rank; k++) {
    s.start[k] = starts[k];
    s.dim[k] = sizes[k] == PM_DROPPED ? PM_MAX_RANK - 1 : next++; /* an index that is 0 */
  }
  if (next == PM_MAX_RANK || !pm_wants_array(e, in) || !pm_wants_array(e, out)) return NULL;
  if (!pm_moves_in_registers(e->g, op)) return NULL;
  return pm_reg_list(e, pm_layout_in(e, in), pm_layout_in(e, out), project_slice, &s);
}

const char *pm_list_text(pm_gen *e, const pm_layout *src, const pm_layout *dst, const int64_t *list,
                         const char *reg) {
  return map_text(e, dst, list, pm_layout_regs(dst), pm_layout_regs(src), reg);
}

const char *pm_reg_map(pm_gen *e, const pm_layout *src, const pm_layout *dst, pm_project fn,
                       const void *ctx, const char *reg) {
  const int64_t *list = pm_reg_list(e, src, dst, fn, ctx);
  return list ? pm_list_text(e, src, dst, list, reg) : NULL;
}

/* ---- addresses --------------------------------------------------------------------------- */

const char *pm_term_text(pm_gen *e, const pm_term *t, int64_t scale, bool wide) {
  const char *x = pm_scalar_of(e, t->val);
  if (wide) x = pm_str(e, "(i64)%s", x);
  if (t->div > 1) x = pm_str(e, "%s / %lld", x, (long long)t->div);
  return t->mul * scale == 1 ? x : pm_str(e, "%s * %lld", x, (long long)(t->mul * scale));
}

static void offset_text(pm_gen *e, const pm_view *v, int64_t scale, bool wide, pm_text *t) {
  for (uint32_t k = 0; k < v->n_terms; k++) plus(t, pm_term_text(e, &v->term[k], scale, wide));
  if (v->offset) plus(t, pm_str(e, "%lld", (long long)(v->offset * scale)));
}

const char *pm_view_address(pm_gen *e, const pm_view *v) {
  const bool gmem = v->space == PM_GMEM;
  pm_text t;
  pm_text_init(&t, e->arena);
  const char *base = v->base ? e->slot[v->base].text : pm_scratch(e);
  if (pm_is_remote(v)) {
    base = pm_remote_base(e, v, v->param, pm_cpp_type(v->dtype), 0);
  } else if (gmem) {
    if (pm_typeof(e->g, v->base)->dtype != v->dtype)
      base = pm_str(e, "(%s*)%s", pm_cpp_type(v->dtype), base);
    e->param_used[v->param] = true;
  }
  pm_put(&t, base);
  offset_text(e, v, gmem ? 1 : pm_dtypes[v->dtype].bytes, gmem, &t);
  return t.at;
}

const char *pm_view_peer(pm_gen *e, const pm_view *v) {
  if (!v->cluster_val) return NULL;
  const char *name = pm_unique(e, "peer");
  const char *at = pm_scalar_of(e, v->cluster_val);
  pm_line(e, "const u32 %s = peer_offset(%s);", name, pm_cluster_peer(e, v->cluster_dim, at));
  return name;
}

void pm_need_alignment(pm_gen *e, const pm_view *v, int64_t bytes) {
  if (v->param >= 0) {
    e->program->align[v->param] = pm_max(e->program->align[v->param], bytes);
  }
}

/* ---- is the access linear? --------------------------------------------------------------- */

static bool is_dense(const pm_view *v) {
  int64_t stride = 1;
  for (int d = v->rank - 1; d >= 0; d--) {
    const pm_view_dim *vd = &v->dim[d];
    if (vd->size == 1) continue;
    if ((vd->tile && vd->tile < vd->size) || vd->inner != stride) return false;
    stride *= vd->size;
  }
  return !v->swizzle;
}

/* A digit of an index as one or two pieces of memory; false: it straddles a tile. */
static bool add_digit(pm_sum *s, int64_t div, const pm_digit *d, const pm_view_dim *vd) {
  if (!vd->tile || d->size * d->stride <= vd->tile) {
    add_piece(s, div, d->size, d->stride * vd->inner);
    return true;
  }
  if (d->stride % vd->tile == 0) {
    add_piece(s, div, d->size, d->stride / vd->tile * vd->outer);
    return true;
  }
  const int64_t low = vd->tile / d->stride;
  if (vd->tile % d->stride || d->size % low) return false;
  add_piece(s, div, low, d->stride * vd->inner);
  add_piece(s, div * low, d->size / low, vd->outer);
  return true;
}

static bool linear_sums(access *a) {
  const pm_view_dim flat = {.size = extent(a->l, 0), .inner = 1};
  int64_t inside[PM_MAX_RANK] = {0};
  if (a->l->kind == PM_FLAT && !is_dense(a->v)) return false;
  for (int part = 0; part < N_PARTS; part++) {
    uint32_t n;
    const pm_digit *d = digits(a->l, part, &n);
    int64_t div = 1;
    a->part[part] = (pm_sum){.total = numbers(a->l, part)};
    for (uint32_t k = n; k-- > 0; div *= d[k].size) {
      if (d[k].dim < 0) continue;
      const pm_view_dim *vd = a->l->kind == PM_FLAT ? &flat : &a->v->dim[d[k].dim];
      if (!add_digit(&a->part[part], div, &d[k], vd)) return false;
      if (vd->tile && d[k].stride < vd->tile) {
        inside[d[k].dim] += pm_min((d[k].size - 1) * d[k].stride, vd->tile - d[k].stride);
        if (inside[d[k].dim] >= vd->tile) return false;
      }
    }
  }
  return true;
}

/* ---- array indices ----------------------------------------------------------------------- */

static const char *dim_text(pm_gen *e, const pm_view_dim *d, const char *x, int64_t scale) {
  pm_text t;
  pm_text_init(&t, e->arena);
  if (d->tile) {
    plus(&t, pm_str(e, "%s / %lld * %lld", x, (long long)d->tile, (long long)(d->outer * scale)));
    x = pm_str(e, "%s %% %lld", x, (long long)d->tile);
  }
  plus(&t, d->inner * scale == 1 ? x : pm_str(e, "%s * %lld", x, (long long)(d->inner * scale)));
  return t.at;
}

const char *pm_add_indices(pm_gen *e, const pm_view *v, const char *address, const char *reg) {
  const bool gmem = v->space == PM_GMEM;
  for (uint32_t k = 0; k < v->n_index; k++) {
    const char *x = pm_str(e, gmem ? "(i64)%s" : "%s", pm_at(e, v->index[k].val, reg));
    const int64_t scale = gmem ? 1 : pm_dtypes[v->dtype].bytes;
    address = pm_str(e, "%s + %s", address, dim_text(e, &v->index[k].dim, x, scale));
  }
  return address;
}

/* Register k (a text) of vector i. */
static const char *of_vector(access *a, const char *k) {
  if (a->vec == 1) return a->i;
  if (a->n == 1) return k;
  return pm_str(a->e, "i * %lld + %s", (long long)a->vec, k);
}

/* Has the array one value for all elements of each vector? */
static bool is_whole(access *a, pm_val v, int64_t vec) {
  int dim = a->vec_dim;
  if (vec == 1 || !pm_is_array(a->e, v)) return true;
  if (a->l->kind == PM_FLAT) {
    int64_t above = 1;
    dim = a->l->rank - 1;
    while (dim > 0 && a->l->shape[dim] == 1) dim--;
    for (int d = 0; d < dim; d++) above *= a->l->shape[d];
    if (above > 1 && a->l->shape[dim] % vec) return false;
  }
  return pm_grain(a->e->g, v, dim) >= vec;
}

/* ---- vectors ----------------------------------------------------------------------------- */

/* Elements that the fastest register digits hold densely along one dimension of the layout. */
static int64_t dense_run(access *a) {
  const pm_layout *l = a->l;
  int64_t run = 1;
  a->vec_dim = -1;
  for (uint32_t k = l->n_reg; k-- > 0;) {
    const pm_digit *d = &l->reg[k];
    if (d->stride != run || (a->vec_dim >= 0 && d->dim != a->vec_dim)) break;
    a->vec_dim = d->dim;
    run *= d->size;
  }
  if (a->vec_dim < 0) return 1;
  const pm_view_dim *vd = &a->v->dim[l->kind == PM_FLAT ? a->v->rank - 1 : a->vec_dim];
  if (l->kind == PM_FLAT && a->linear) return run;
  if (vd->inner != 1) return 1;
  if (l->kind == PM_FLAT) run = pm_gcd(run, vd->size);
  return vd->tile ? pm_gcd(run, vd->tile) : run;
}

static bool sum_is_multiple(const pm_sum *s, int64_t of) {
  for (uint32_t k = 0; k < s->n; k++) {
    if (s->at[k].mul % of && s->at[k].mul >= of) return false;
  }
  return true;
}

/* May vectors of `vec` elements be used? All other parts of the address are multiples of it. */
static bool vector_fits(access *a, int64_t vec) {
  const pm_layout *l = a->l;
  if (pm_view_divisor(a->e->g, a->v) % vec) return false;
  for (uint32_t k = 0; k < a->v->n_index; k++) {
    const pm_view_dim *vd = &a->v->index[k].dim;
    if (vd->inner % vec || vd->outer % vec || !is_whole(a, a->v->index[k].val, vec)) return false;
  }
  if (is_padded(l, a->vec_dim) && extent(l, a->vec_dim) % vec) return false;
  for (int part = 0; part < N_PARTS; part++) {
    uint32_t n;
    const pm_digit *d = digits(l, part, &n);
    for (uint32_t k = 0; k < n; k++) { /* vectors begin at multiples of their size */
      if (d[k].dim == a->vec_dim && d[k].stride % vec && (part != REG || d[k].stride >= vec)) {
        return false;
      }
    }
    if (!a->linear) continue;
    if (part != REG) {
      for (uint32_t k = 0; k < a->part[part].n; k++) {
        if (a->part[part].at[k].mul % vec) return false;
      }
    } else if (!sum_is_multiple(&a->part[REG], vec)) {
      return false;
    }
  }
  for (int d = 0; d < a->v->rank && !a->linear; d++) {
    const pm_view_dim *vd = &a->v->dim[d];
    const bool fastest = d == (l->kind == PM_FLAT ? a->v->rank - 1 : a->vec_dim);
    if (vd->size > 1 && ((!fastest && vd->inner % vec) || (vd->tile && vd->outer % vec))) {
      return false;
    }
  }
  return true;
}

static void choose_vector(access *a) {
  const int64_t run = dense_run(a);
  int64_t vec = 1;
  while (!a->single && run % (vec * 2) == 0 && vec * 2 * a->bytes <= VECTOR_BYTES) vec *= 2;
  while (vec > 1 && !vector_fits(a, vec)) vec /= 2;
  a->vec = vec;
}

/* The register sum in terms of vectors: the first `vec` registers drop out. */
static void count_vectors(pm_sum *s, int64_t vec) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < s->n; k++) {
    pm_piece p = s->at[k];
    if (p.div * p.size <= vec) continue;
    if (p.div < vec) {
      p.size /= vec / p.div;
      p.mul *= vec / p.div;
      p.div = vec;
    }
    p.div /= vec;
    s->at[n++] = p;
  }
  s->n = n;
  s->total /= vec;
}

/* ---- swizzle ----------------------------------------------------------------------------- */

/* Cut the pieces of a sum at 1024 bytes; the bits below that they set, -1: no powers of two. */
static int64_t low_bits(pm_sum *s, int64_t bytes) {
  int64_t bits = 0;
  pm_sum out = {.total = s->total};
  for (uint32_t k = 0; k < s->n; k++) {
    const pm_piece p = s->at[k];
    const int64_t step = p.mul * bytes;
    if (step % PATTERN == 0) {
      add_piece(&out, p.div, p.size, p.mul);
      continue;
    }
    if (!pm_is_pow2(step) || !pm_is_pow2(p.size) || step > PATTERN) return -1;
    const int64_t low = pm_min(p.size, PATTERN / step), mask = (low - 1) * step;
    if (bits & mask) return -1;
    bits |= mask;
    add_piece(&out, p.div, low, p.mul);
    add_piece(&out, p.div * low, p.size / low, p.mul * low);
  }
  *s = out;
  return bits;
}

static void split_swizzle(access *a) {
  if (!a->v->swizzle || !a->linear || a->v->n_index) return;
  if (pm_view_divisor(a->e->g, a->v) * a->bytes % PATTERN) return;
  pm_sum part[N_PARTS];
  int64_t bits = (a->vec * a->bytes - 1) & (PATTERN - 1);
  memcpy(part, a->part, sizeof part);
  for (int k = 0; k < N_PARTS; k++) {
    const int64_t more = low_bits(&part[k], a->bytes);
    if (more < 0 || (bits & more)) return;
    bits |= more;
  }
  memcpy(a->part, part, sizeof part);
  a->split = true;
}

/* The pieces of a sum, with those that go beyond 16 bytes in two: the part inside and the rest. */
static pm_sum split_chunks(const pm_sum *s, int64_t bytes) {
  enum { CHUNK = 16 };
  pm_sum out = {.total = s->total};
  for (uint32_t k = 0; k < s->n; k++) {
    const pm_piece p = s->at[k];
    const int64_t inside = p.mul * bytes < CHUNK ? CHUNK / (p.mul * bytes) : 0;
    if (inside && inside < p.size && p.size % inside == 0) {
      add_piece(&out, p.div, inside, p.mul);
      add_piece(&out, p.div * inside, p.size / inside, p.mul * inside);
    } else {
      add_piece(&out, p.div, p.size, p.mul);
    }
  }
  return out;
}

/* "(p ^ low) + high" for vector i. What lies inside of a chunk of 16 bytes is high too: the pattern
 * does not touch it, and as part of an address it costs nothing. */
static const char *split_text(access *a) {
  pm_gen *e = a->e;
  const pm_sum sum = split_chunks(&a->part[REG], a->bytes);
  pm_sum low = {.total = sum.total}, high = low;
  bool rows = false;
  for (uint32_t k = 0; k < sum.n; k++) {
    const pm_piece p = sum.at[k];
    const bool is_low = p.mul * a->bytes < PATTERN && (p.size - 1) * p.mul * a->bytes >= 16;
    pm_sum *s = is_low ? &low : &high;
    s->at[s->n++] = p;
    rows = rows || (is_low && (p.size - 1) * p.mul * a->bytes >= 128);
  }
  const char *l = pm_sum_text(e, &low, "i", a->bytes), *h = pm_sum_text(e, &high, "i", a->bytes);
  if (rows) l = pm_str(e, "swizzle<%d>(%s)", a->v->swizzle, l);
  const char *text = low.n ? pm_str(e, "(p ^ (%s))", l) : "p";
  return high.n ? pm_str(e, "%s + %s", text, h) : text;
}

/* ---- the loop over vectors --------------------------------------------------------------- */

static void declare_pointer(access *a, const char *thread) {
  pm_gen *e = a->e;
  const char *start = pm_view_address(e, a->v);
  if (a->v->space == PM_GMEM) {
    pm_line(e, "%s%s* const p = %s%s%s;", a->store ? "" : "const ", pm_cpp_type(a->v->dtype), start,
            *thread ? " + " : "", thread);
  } else if (a->split) {
    pm_line(e, "const u32 p = swizzle<%d>(%s%s%s);", a->v->swizzle, start, *thread ? " + " : "",
            thread);
  } else {
    pm_line(e, "const u32 p = %s%s%s;", start, *thread ? " + " : "", thread);
  }
}

static void begin_linear(access *a) {
  pm_gen *e = a->e;
  const int64_t scale = a->v->space == PM_GMEM ? 1 : a->bytes;
  const bool wide = sum_max(&a->part[WARP]) + sum_max(&a->part[LANE]) > INT32_MAX;
  const char *thread = thread_sum(e, &a->part[WARP], &a->part[LANE], scale);
  if (wide) {
    thread = pm_str(e, "(%s) + (%s)", pm_sum_text(e, &a->part[WARP], "(i64)warp", scale),
                    pm_sum_text(e, &a->part[LANE], "(i64)lane", scale));
  }
  declare_pointer(a, strcmp(thread, "0") ? thread : "");
  a->i = pm_begin_unrolled(e, "i", a->n, 1);
  const char *i = sum_max(&a->part[REG]) * scale > INT32_MAX ? "(i64)i" : "i";
  const char *regs = pm_sum_text(e, &a->part[REG], i, scale);
  if (a->split) {
    a->address = split_text(a);
  } else {
    a->address = a->part[REG].n ? pm_str(e, "p + %s", regs) : "p";
    a->address = pm_add_indices(e, a->v, a->address, of_vector(a, "0"));
    if (a->v->swizzle) a->address = pm_str(e, "swizzle<%d>(%s)", a->v->swizzle, a->address);
  }
}

/* Is an element where it is whatever its index? */
static bool is_fixed(const pm_view_dim *d) { return d->size == 1 || (!d->inner && !d->outer); }

/* Coordinates of vector i as c0, c1 ..., then at(dim, c) of all dims. */
static void begin_coords(access *a) {
  pm_gen *e = a->e;
  const pm_layout *l = a->l;
  const bool gmem = a->v->space == PM_GMEM;
  const int64_t scale = gmem ? 1 : a->bytes;
  pm_text t;
  pm_text_init(&t, e->arena);
  declare_pointer(a, "");
  a->i = pm_begin_unrolled(e, "i", a->n, 1);
  int64_t below = 1;
  for (int d = a->v->rank - 1; d >= 0; d--) {
    const pm_view_dim *vd = &a->v->dim[d];
    const int from = l->kind == PM_FLAT ? 0 : d;
    pm_sum s;
    if (is_fixed(vd)) {
      below *= vd->size;
      continue;
    }
    coord_sum(l, REG, from, &s);
    count_vectors(&s, a->vec);
    const char *c = coord_name(e, a->stem, from);
    if (s.n) c = pm_str(e, "%s + (i32)(%s)", c, pm_sum_text(e, &s, "i", 1));
    if (l->kind == PM_FLAT) {
      c = below > 1 ? pm_str(e, "(%s) / %lld", c, (long long)below) : pm_str(e, "(%s)", c);
      if (d) c = pm_str(e, "%s %% %lld", c, (long long)vd->size);
      below *= vd->size;
    }
    pm_line(e, "const i32 c%d = %s;", d, c);
    plus(&t, dim_text(e, vd, pm_str(e, gmem ? "(i64)c%d" : "c%d", d), scale));
  }
  a->address = pm_add_indices(e, a->v, t.n ? pm_str(e, "p + %s", t.at) : "p", of_vector(a, "0"));
  if (a->v->swizzle) a->address = pm_str(e, "swizzle<%d>(%s)", a->v->swizzle, a->address);
}

/* Does the address of an element depend on the coordinate? */
static bool reads_coord(const access *a, int from) {
  for (int d = 0; !a->linear && d < a->v->rank; d++) {
    if ((a->l->kind == PM_FLAT || d == from) && !is_fixed(&a->v->dim[d])) return true;
  }
  return false;
}

static void begin_access(access *a) {
  pm_begin(a->e, "{");
  a->stem = pm_unique(a->e, "index");
  for (int d = 0; d < n_coords(a->l); d++) coord_line(a->e, a->l, a->stem, d, reads_coord(a, d));
  const char *peer = pm_view_peer(a->e, a->v);
  if (a->linear) {
    begin_linear(a);
  } else {
    begin_coords(a);
  }
  if (peer) a->address = pm_str(a->e, "%s + %s", a->address, peer);
  a->valid = valid_text(a->e, a->l, a->stem, "i", a->vec);
}

static void end_access(access *a) {
  pm_end_unrolled(a->e, a->n, 1);
  pm_end(a->e);
}

static void plan(access *a) {
  a->bytes = pm_dtypes[a->v->dtype].bytes;
  a->linear = linear_sums(a);
  choose_vector(a);
  a->n = pm_layout_regs(a->l) / a->vec;
  if (a->linear) count_vectors(&a->part[REG], a->vec);
  split_swizzle(a);
  pm_need_alignment(a->e, a->v, a->vec * a->bytes);
}

/* ---- matrices: ldmatrix and stmatrix ----------------------------------------------------- */

/* The parts of a layout whose registers, four pairs at a time, are four matrices of 8 x 8 elements:
 * lanes along 8 rows and 4 pairs of columns, a pair in neighbouring registers, and two bits of the
 * register number above it that move by whole matrices. `rows`: the rows of 8 elements whose
 * addresses the lanes give for an .x4, those of matrix k in lanes 8 k to 8 k + 7; with by_columns
 * a lane gives a column. */
static void append(pm_digit *d, uint8_t *n, pm_digit x) {
  pm_digit *last = *n ? &d[*n - 1] : NULL;
  if (last && last->dim == x.dim && last->stride == x.stride * x.size) {
    last->size *= x.size;
    last->stride = x.stride;
  } else {
    d[(*n)++] = x;
  }
}

static bool matrix_rows(const pm_layout *l, bool by_columns, pm_layout *rows) {
  const int8_t i = (int8_t)(l->rank - 2), j = (int8_t)(i + 1);
  const pm_digit *lane = l->lane, pair = l->n_reg ? l->reg[l->n_reg - 1] : (pm_digit){0};
  if (l->n_lane != 2 || lane[0].dim != i || lane[0].size != 8 || lane[0].stride != 1) return false;
  if (lane[1].dim != j || lane[1].size != 4 || lane[1].stride != 2) return false;
  if (pair.dim != j || pair.size != 2 || pair.stride != 1) return false;
  pm_digit bits[2];
  *rows = *l;
  rows->n_reg--;
  for (int b = 0; b < 2; b++) {
    pm_digit *d = rows->n_reg ? &rows->reg[rows->n_reg - 1] : NULL;
    if (!d || d->dim < i || d->stride % 8 || d->size % 2) return false;
    bits[b] = (pm_digit){d->dim, 2, d->stride};
    d->size /= 2;
    d->stride *= 2;
    rows->n_reg -= d->size == 1;
  }
  rows->n_lane = 0;
  append(rows->lane, &rows->n_lane, bits[1]);
  append(rows->lane, &rows->n_lane, bits[0]);
  append(rows->lane, &rows->n_lane, (pm_digit){by_columns ? j : i, 8, 1});
  append(rows->reg, &rows->n_reg, (pm_digit){by_columns ? i : j, 8, 1});
  return true;
}

static void swap_digits(pm_digit *d, uint32_t n) {
  for (uint32_t k = 0; k < n; k++) {
    if (d[k].dim >= 0) d[k].dim = (int8_t)(1 - d[k].dim);
  }
}

/* A matrix and its memory as their transposes; layouts and views are copies. */
static void transpose_access(access *a) {
  pm_layout *l = PM_NEW(a->e->arena, pm_layout, 1);
  pm_view *v = PM_NEW(a->e->arena, pm_view, 1);
  *l = *a->l;
  *v = *a->v;
  for (int k = 0; k < 2; k++) {
    l->shape[k] = a->l->shape[1 - k];
    l->padded[k] = a->l->padded[1 - k];
    v->dim[k] = a->v->dim[1 - k];
  }
  swap_digits(l->warp, l->n_warp);
  swap_digits(l->lane, l->n_lane);
  swap_digits(l->reg, l->n_reg);
  a->l = l;
  a->v = v;
}

static bool plan_rows(access *a) {
  const pm_view_dim *d = &a->v->dim[a->l->rank - 2];
  const bool by_columns = d[0].inner == 1 && d[1].inner != 1;
  pm_layout *rows = PM_NEW(a->e->arena, pm_layout, 1);
  if (!matrix_rows(a->l, by_columns, rows)) return false;
  a->l = rows;
  plan(a);
  a->matrix = by_columns ? 2 : 1;
  return a->linear && a->vec == 8;
}

/* Plan it as matrices if rows are whole aligned 16 bytes; false: not possible. A lane's pair of
 * elements lies in a row, as in WGMMA and TCGEN05, or in a column, as in the right operand of mma
 * and in transposes of arrays: those are layouts of the transpose. */
static bool plan_matrix(access *a) {
  access m = *a;
  if (pm_dtypes[a->v->dtype].bits != 16 || a->v->space != PM_SMEM || a->l->rank < 2) return false;
  if (a->store && !pm_target_has(a->e->target, PM_HAS_STMATRIX)) return false;
  if (a->store && pm_layout_is_replicated(a->l)) return false;
  if (a->v->cluster_val || a->l->kind != PM_TILED || pm_layout_is_padded(a->l)) return false;
  if (!plan_rows(&m)) {
    if (a->l->rank != 2 || a->v->n_index) return false;
    m = *a;
    transpose_access(&m);
    if (!plan_rows(&m)) return false;
  }
  *a = m;
  return true;
}

/* ---- arrays ------------------------------------------------------------------------------ */

static const char *element(access *a, const char *x) {
  if (a->words) return a->n == 1 ? x : pm_str(a->e, "&%s[i * %lld]", x, (long long)(a->vec / 2));
  if (a->vec == 1 || a->n == 1) return pm_str(a->e, "&%s[%s]", x, a->i);
  return pm_str(a->e, "&%s[i * %lld]", x, (long long)a->vec);
}

const char *pm_space_of(const pm_view *v) {
  return v->space == PM_GMEM ? "global" : v->cluster_val ? "cluster" : "shared";
}

bool pm_is_matrix(pm_gen *e, const pm_layout *l, const pm_view *v, bool store) {
  access a = {.e = e, .l = l, .v = v, .store = store};
  return plan_matrix(&a);
}

/* "ld_global<f32, 4>" */
static const char *load_name(const access *a) {
  if (a->e->multimem) return pm_ptx_multimem(a->e, a->v, a->vec, false);
  return pm_str(a->e, "ld_%s<%s, %lld>", pm_space_of(a->v), pm_cpp_type(a->v->dtype),
                (long long)a->vec);
}

void pm_load_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, bool words) {
  access a = {.e = e, .l = l, .v = v, .words = words};
  const char *type = pm_cpp_type(v->dtype);
  if (!plan_matrix(&a)) plan(&a);
  begin_access(&a);
  if (a.matrix) {
    pm_line(e, "ldmatrix_x4%s(%s, %s);", a.matrix == 2 ? "_trans" : "", element(&a, x), a.address);
  } else if (a.valid) {
    pm_line(e, "if (%s) %s(%s, %s);", a.valid, load_name(&a), element(&a, x), a.address);
    pm_line(e, "else zero<%s, %lld>(%s);", type, (long long)a.vec, element(&a, x));
  } else {
    pm_line(e, "%s(%s, %s);", load_name(&a), element(&a, x), a.address);
  }
  end_access(&a);
}

const char *pm_coord_text(pm_gen *e, const pm_layout *l, int dim, const char *reg) {
  const bool flat = l->kind == PM_FLAT;
  const int from = flat ? 0 : dim;
  int64_t below = 1;
  pm_sum s;
  coord_sum(l, REG, from, &s);
  const char *x = pm_coord_base(e, l, from);
  if (s.n) x = pm_str(e, "%s + (i32)(%s)", x, pm_sum_text(e, &s, reg, 1));
  if (!flat) return pm_str(e, "(i32)(%s)", x);
  for (int k = dim + 1; k < l->rank; k++) below *= l->shape[k];
  return pm_str(e, "(i32)(%s) / %lld %% %lld", x, (long long)below, (long long)l->shape[dim]);
}

/* Copies are equal: the one whose replicated digits are 0 writes. */
const char *pm_first_copy(pm_gen *e, const pm_layout *l) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int part = WARP; part <= LANE; part++) {
    pm_sum s;
    coord_sum(l, part, -1, &s);
    uint32_t n;
    const pm_digit *d = digits(l, part, &n);
    int64_t div = 1;
    for (uint32_t k = n; k-- > 0; div *= d[k].size) {
      if (d[k].dim >= 0 || d[k].size == 1) continue;
      const char *name = part == WARP ? "warp" : "lane";
      if (t.n) pm_put(&t, " && ");
      if (div * d[k].size < numbers(l, part)) {
        pm_put(&t, name);
        if (div > 1) pm_putf(&t, " / %lld", (long long)div);
        pm_putf(&t, " %% %d == 0", d[k].size);
      } else {
        pm_putf(&t, "%s < %lld", name, (long long)div);
      }
    }
  }
  return t.n ? t.at : NULL;
}

/* To another block, as bytes for its barrier. */
static void store_async(access *a, const char *what) {
  pm_gen *e = a->e;
  const char *valid = a->valid ? pm_str(e, "if (%s) ", a->valid) : "";
  if (a->vec * a->bytes < 4) e->async.narrow = true;
  if (e->async.combine) {
    pm_line(e, "%sfor (int k = 0; k < %lld; k++) %s(%s + k * 4, (%s)[k], %s);", valid,
            (long long)a->vec, e->async.combine, a->address, what, e->async.barrier);
  } else {
    pm_line(e, "%sst_async<%s, %lld>(%s, %s, %s);", valid, pm_cpp_type(a->v->dtype),
            (long long)a->vec, a->address, what, e->async.barrier);
  }
}

static void store(access *a, const char *what) {
  pm_gen *e = a->e;
  if (e->async.barrier) {
    store_async(a, what);
  } else if (a->matrix) {
    pm_line(e, "stmatrix_x4%s(%s, %s);", a->matrix == 2 ? "_trans" : "", a->address, what);
  } else {
    const char *fn = a->v->all_devices ? pm_ptx_multimem(e, a->v, a->vec, true)
                                       : pm_str(e, "st_%s<%s, %lld>", pm_space_of(a->v),
                                                pm_cpp_type(a->v->dtype), (long long)a->vec);
    pm_line(e, "%s%s%s%s(%s, %s);", a->valid ? "if (" : "", a->valid ? a->valid : "",
            a->valid ? ") " : "", fn, a->address, what);
  }
}

void pm_store_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, bool words) {
  access a = {.e = e, .l = l, .v = v, .store = true, .words = words};
  const char *first = pm_first_copy(e, l);
  if (!plan_matrix(&a)) plan(&a);
  if (first) pm_begin(e, "if (%s) {", first);
  begin_access(&a);
  store(&a, element(&a, x));
  end_access(&a);
  if (first) pm_end(e);
}

/* One number into every element: any layout will do, so a strided one. */
void pm_store_splat(pm_gen *e, const pm_view *v, const char *x) {
  const int64_t bytes = pm_dtypes[v->dtype].bytes;
  pm_layout l = {.kind = PM_FLAT, .rank = v->rank};
  int64_t size = 1, vec = VECTOR_BYTES / bytes;
  for (int d = 0; d < v->rank; d++) size *= l.shape[d] = v->dim[d].size;
  while (vec > 1 && size % vec) vec /= 2;
  l.padded[0] = pm_round_up(size, 128 * vec);
  l.warp[l.n_warp++] = (pm_digit){0, 4, (int32_t)(32 * vec)};
  l.lane[l.n_lane++] = (pm_digit){0, 32, (int32_t)vec};
  l.reg[l.n_reg++] = (pm_digit){0, (int32_t)(l.padded[0] / (128 * vec)), (int32_t)(128 * vec)};
  l.reg[l.n_reg++] = (pm_digit){0, (int32_t)vec, 1};
  access a = {.e = e, .l = &l, .v = v, .store = true};
  plan(&a);
  pm_begin(e, "{");
  pm_line(e, "%s x[%lld];", pm_cpp_type(v->dtype), (long long)a.vec);
  pm_line(e, "for (int k = 0; k < %lld; k++) x[k] = %s;", (long long)a.vec, x);
  begin_access(&a);
  store(&a, "x");
  end_access(&a);
  pm_end(e);
}

/* ---- masks ------------------------------------------------------------------------------- */

static const char *both(pm_gen *e, const char *x, const char *y) {
  if (x && !strcmp(y, "true")) return x;
  return x ? pm_str(e, "%s && %s", x, y) : y;
}

/* The coordinates of the element in a register; NULL: nobody asks. */
static const char *const *coordinates(const access *a, const char *reg) {
  pm_gen *e = a->e;
  const pm_layout *l = a->l;
  if (!e->options->check_indices) return NULL;
  const char **at = pm_alloc(e->arena, PM_MAX_RANK * sizeof *at);
  int64_t below = 1;
  reg = pm_str(e, "(%s)", reg);
  for (int d = l->rank - 1; d >= 0; below *= l->shape[d--]) {
    const int dim = l->kind == PM_FLAT ? 0 : d;
    pm_sum s;
    coord_sum(l, REG, dim, &s);
    at[d] = pm_coord_base(e, l, dim);
    if (s.n) at[d] = pm_str(e, "%s + %s", at[d], pm_sum_text(e, &s, reg, 1));
    if (l->kind == PM_FLAT && l->rank > 1)
      at[d] = pm_str(e, "(%s) / %lld %% %lld", at[d], (long long)below, (long long)l->shape[d]);
  }
  return at;
}

static const char *inside(const access *a, pm_opid op, const char *condition, const char *reg) {
  return pm_inside(a->e, op, coordinates(a, reg), condition, reg);
}

/* The condition for vector i as a whole; *parts: if it does not hold, elements have to be asked. */
static const char *begin_masked(access *a, pm_val mask, bool *parts) {
  pm_gen *e = a->e;
  *parts = !is_whole(a, mask, a->vec);
  if (!*parts) {
    const char *c = both(e, a->valid, pm_at(e, mask, of_vector(a, "0")));
    c = inside(a, e->masked, c, of_vector(a, "0"));
    if (a->vec == 1) return c;
    return inside(a, e->masked, c, of_vector(a, pm_str(e, "%lld", (long long)a->vec - 1)));
  }
  pm_line(e, "bool whole = %s;", a->valid ? a->valid : "true");
  pm_begin_unrolled(e, "k", a->vec, 1);
  pm_line(e, "whole = whole && %s;",
          inside(a, e->masked, pm_at(e, mask, of_vector(a, "k")), of_vector(a, "k")));
  pm_end_unrolled(e, a->vec, 1);
  return "whole";
}

static const char *element_condition(access *a, pm_val mask) {
  const char *k = of_vector(a, "k"), *c = both(a->e, a->valid, pm_at(a->e, mask, k));
  return inside(a, a->e->masked, c, k);
}

/* of element k of vector i: a vector lies in one piece */
static const char *element_address_k(access *a) {
  const int64_t bytes = a->v->space == PM_GMEM ? 1 : a->bytes;
  if (bytes == 1) return pm_str(a->e, "%s + k", a->address);
  return pm_str(a->e, "%s + k * %lld", a->address, (long long)bytes);
}

void pm_load_masked(pm_gen *e, const pm_layout *l, const pm_view *v, const char *x, pm_val mask,
                    pm_val other) {
  access a = {.e = e, .l = l, .v = v};
  const char *type = pm_cpp_type(v->dtype);
  bool parts;
  plan(&a);
  begin_access(&a);
  const char *whole = begin_masked(&a, mask, &parts);
  const char *k = of_vector(&a, "k");
  const char *all = pm_str(e, "ld_%s<%s, %lld>(%s, %s);", pm_space_of(v), type, (long long)a.vec,
                           element(&a, x), a.address);
  if (!strcmp(whole, "true")) {
    pm_line(e, "%s", all);
    end_access(&a);
    return;
  }
  pm_begin(e, "if (%s) {", whole);
  pm_line(e, "%s", all);
  e->indent--;
  pm_begin(e, "} else {");
  pm_begin_unrolled(e, "k", a.vec, 1);
  if (parts) {
    pm_line(e, "if (%s) ld_%s<%s, 1>(&%s[%s], %s);", element_condition(&a, mask), pm_space_of(v),
            type, x, k, element_address_k(&a));
    pm_line(e, "else %s[%s] = %s;", x, k, pm_at(e, other, k));
  } else {
    pm_line(e, "%s[%s] = %s;", x, k, pm_at(e, other, k));
  }
  pm_end_unrolled(e, a.vec, 1);
  pm_end(e);
  end_access(&a);
}

void pm_store_masked(pm_gen *e, const pm_layout *l, const pm_view *v, pm_val value, pm_val mask) {
  access a = {.e = e, .l = l, .v = v, .store = true};
  const char *first = pm_first_copy(e, l), *type = pm_cpp_type(v->dtype);
  const bool splat = !pm_is_array(e, value);
  bool parts;
  plan(&a);
  if (first || splat) pm_begin(e, "%s{", first ? pm_str(e, "if (%s) ", first) : "");
  if (splat) {
    pm_line(e, "%s x[%lld];", type, (long long)a.vec);
    pm_line(e, "for (int k = 0; k < %lld; k++) x[k] = %s;", (long long)a.vec, pm_at(e, value, "0"));
  }
  begin_access(&a);
  const char *whole = begin_masked(&a, mask, &parts);
  const char *from = splat ? "x" : element(&a, e->slot[value].text);
  const char *condition = strcmp(whole, "true") ? pm_str(e, "if (%s) ", whole) : "";
  pm_line(e, "%sst_%s<%s, %lld>(%s, %s);", condition, pm_space_of(v), type, (long long)a.vec,
          a.address, from);
  if (parts) {
    pm_begin(e, "else {");
    pm_begin_unrolled(e, "k", a.vec, 1);
    pm_line(e, "if (%s) st_%s<%s, 1>(%s, %s);", element_condition(&a, mask), pm_space_of(v), type,
            element_address_k(&a),
            splat ? "&x[k]" : pm_str(e, "&%s", pm_at(e, value, of_vector(&a, "k"))));
    pm_end_unrolled(e, a.vec, 1);
    pm_end(e);
  }
  end_access(&a);
  if (first || splat) pm_end(e);
}

void pm_atomic_array(pm_gen *e, const pm_layout *l, const pm_view *v, const char *fn, pm_opid op,
                     const char *x) {
  access a = {.e = e, .l = l, .v = v, .store = true, .single = true};
  const pm_val value = pm_in(e->g, op, 1), mask = pm_in(e->g, op, 2);
  const char *first = pm_first_copy(e, l), *type = pm_cpp_type(v->dtype);
  plan(&a);
  if (first) pm_begin(e, "if (%s) {", first);
  begin_access(&a);
  const char *arguments = pm_at(e, value, a.i);
  if (*pm_attr(e->g, op, PM_ATTR_ATOMIC) == PM_ATOMIC_CAS)
    arguments = pm_str(e, "%s, %s", pm_at(e, pm_in(e->g, op, 3), a.i), arguments);
  const char *condition = inside(&a, op, both(e, a.valid, pm_at(e, mask, a.i)), a.i);
  const bool always = !strcmp(condition, "true");
  pm_line(e, "%s%s%s(%s, %s);", always ? "" : pm_str(e, "if (%s) ", condition),
          x ? pm_str(e, "%s[%s] = ", x, a.i) : "", fn, a.address, arguments);
  if (x && !always) pm_line(e, "else zero<%s, 1>(&%s[%s]);", type, x, a.i);
  end_access(&a);
  if (first) pm_end(e);
}
