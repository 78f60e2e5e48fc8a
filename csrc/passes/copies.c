/* The engine of every copy.
 *
 * A copy moves a view of a kernel argument to or from a view of an SMEM allocation with the same
 * logical shape. Both are described by one list of digits. An untiled dimension of the SMEM view is
 * one digit; a tiled one is two (which tile, where in the tile). A digit has a size, a stride in
 * SMEM, and a step along one axis of the GMEM tensor. Sorted by SMEM stride, fastest first, the
 * digits describe the memory image that an engine must produce.
 *
 * A box may start at any multiple of 128 bytes, even inside a swizzle pattern, because the swizzle
 * depends on addresses and not on where the box starts.
 *
 * TMA writes a box densely. So the longest dense run of digits, starting from the fastest, becomes
 * the box, and the other digits become loops over boxes. Each axis of the tensor is a dimension of
 * the map. Two digits of one axis can share a box only if the map splits the axis in two. That
 * clips exactly only if the tensor's size and the start of the view are multiples of the split;
 * otherwise the slower digit becomes a loop. A digit above 256, the limit of a box, is split in the
 * same two ways. The hardware clips coordinates that are out of range: loads read zeros, stores
 * write nothing.
 *
 * The blocks that share a collective copy take equal parts of one digit: the slowest one that can
 * be divided, column chunks first, then rows. The index of the part is a separate digit, which is
 * neither in the box nor a loop. If no tensor map fits at all (because of the pitch), each block
 * copies everything for itself, with the same result.
 *
 * Axes are kept if that is legal. Otherwise, adjacent axes that are copied whole are merged. This
 * reduces the rank, and makes pitches legal that are not multiples of 16 bytes. */
#include "passes.h"

enum { MAX_DIGITS = 4 * PM_MAX_RANK + 2, MAX_BOX = 256, MAX_COORD_TERMS = 6 };
enum { LINE = 128 }; /* bytes; a box in SMEM starts at a multiple of this */

typedef struct digit {
  int64_t size;
  int64_t smem, gmem; /* strides in elements */
  int64_t step;       /* index units along the axis */
  int axis;
  bool loop;  /* must not be in the box */
  bool share; /* the index of the block's part */
} digit;

/* A dimension of the tensor, or several merged ones. */
typedef struct axis {
  int64_t size, stride, start;
  uint32_t extent; /* its size is this one of the call, and `size` the least: sizes.h; 0: static */
  uint32_t n_terms;
  pm_term term[MAX_COORD_TERMS]; /* start += val * mul */
  int64_t cut;                   /* the map splits it into {cut, size / cut}; 0: not split */
  int inner, outer;              /* dimensions of the map, -1: none */
  bool gone;                     /* merged into the one before it */
} axis;

typedef struct trial {
  const pm_graph *g;
  const pm_view *gmem, *smem;
  int64_t bytes; /* of an element */
  axis axis[PM_MAX_RANK];
  int n_axes;
  digit digit[MAX_DIGITS];
  int n_digits;
  bool may_cut;
} trial;

/* ---- axes and digits ---------------------------------------------------------------------------
 */

static const char *add_coord_term(pm_term *term, uint32_t *n, pm_val val, int64_t mul,
                                  int64_t div) {
  if (*n == MAX_COORD_TERMS) return "a coordinate has too many dynamic parts";
  term[(*n)++] = (pm_term){val, mul, div};
  return NULL;
}

static const char *make_axes(trial *t) {
  const pm_view *v = t->gmem;
  t->n_axes = v->base_rank;
  for (int d = 0; d < t->n_axes; d++) {
    t->axis[d] = (axis){.size = v->base_shape[d],
                        .stride = v->base_stride[d],
                        .start = v->start[d],
                        .extent = v->base_extent[d],
                        .inner = -1,
                        .outer = -1};
  }
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    axis *a = &t->axis[v->start_term[k].dim];
    const char *why =
        add_coord_term(a->term, &a->n_terms, v->start_term[k].val, v->start_term[k].mul, 1);
    if (why) return why;
  }
  return NULL;
}

static void add_digit(trial *t, int64_t size, int64_t smem, int64_t gmem, int64_t step, int axis) {
  if (size == 1) return;
  t->digit[t->n_digits++] = (digit){size, smem, gmem, step, axis, false, false};
}

static void make_digits(trial *t) {
  t->n_digits = 0;
  for (int k = 0; k < t->smem->rank; k++) {
    const pm_view_dim *s = &t->smem->dim[k], *g = &t->gmem->dim[k];
    const int64_t fast = s->tile ? pm_min(s->tile, s->size) : s->size;
    add_digit(t, fast, s->inner, g->inner, g->step, g->base_dim);
    if (s->tile) {
      add_digit(t, s->size / fast, s->outer, g->inner * fast, g->step * fast, g->base_dim);
    }
  }
  for (int i = 1; i < t->n_digits; i++) {
    const digit d = t->digit[i];
    int k = i;
    for (; k > 0 && t->digit[k - 1].smem > d.smem; k--) t->digit[k] = t->digit[k - 1];
    t->digit[k] = d;
  }
}

/* ---- merging axes ------------------------------------------------------------------------------
 */

static digit *only_digit(trial *t, int axis, int *count) {
  digit *found = NULL;
  *count = 0;
  for (int k = 0; k < t->n_digits; k++) {
    if (t->digit[k].axis != axis) continue;
    found = &t->digit[k];
    ++*count;
  }
  return found;
}

/* Is the start of a single index known to be within the axis? */
static bool start_inside(const trial *t, const axis *a) {
  int64_t lo = a->start, hi = a->start;
  for (uint32_t k = 0; k < a->n_terms; k++) {
    int64_t x, y;
    if (!pm_range(t->g, a->term[k].val, &x, &y)) return false;
    lo += x * a->term[k].mul;
    hi += y * a->term[k].mul;
  }
  return lo >= 0 && hi < a->size;
}

/* Merge axis `i` and the faster neighbour `j`, if the merged axis clips in the same way. */
static void merge_pair(trial *t, int i, int j) {
  axis *slow = &t->axis[i], *fast = &t->axis[j];
  int n_slow, n_fast;
  digit *ds = only_digit(t, i, &n_slow), *df = only_digit(t, j, &n_fast);
  const bool whole = !fast->start && !fast->n_terms &&
                     (n_fast == 1 ? df->size == fast->size : !n_fast && fast->size == 1);
  const bool index = !n_slow && !n_fast && start_inside(t, fast);
  const int64_t n = fast->size;
  if (slow->extent || fast->extent) return;
  if ((!whole && !index) || n_slow > 1 || slow->n_terms + fast->n_terms > MAX_COORD_TERMS) return;
  if (slow->size > INT32_MAX / fast->size || slow->stride != fast->stride * n) return;
  if (ds && df && (ds->smem != df->smem * df->size || ds->step != 1)) return;
  slow->start = slow->start * n + fast->start;
  for (uint32_t k = 0; k < slow->n_terms; k++) slow->term[k].mul *= n;
  for (uint32_t k = 0; k < fast->n_terms; k++) slow->term[slow->n_terms++] = fast->term[k];
  slow->size *= n;
  slow->stride = fast->stride;
  fast->gone = true;
  if (!df) return;
  df->axis = i;
  if (!ds) return;
  df->size *= ds->size;
  const int at = (int)(ds - t->digit);
  memmove(ds, ds + 1, sizeof *ds * (size_t)(t->n_digits - at - 1));
  t->n_digits--;
}

static void merge_axes(trial *t) {
  for (int j = t->n_axes - 1; j > 0; j--) merge_pair(t, j - 1, j);
}

/* ---- cutting digits ----------------------------------------------------------------------------
 */

/* Does the map, with the axis split at c, clip exactly where the tensor ends? */
static bool may_cut_axis(const trial *t, const axis *a, int64_t c) {
  if (!t->may_cut || a->cut || a->extent || a->size % c || a->start % c) return false;
  for (uint32_t k = 0; k < a->n_terms; k++) {
    if (pm_divisor(t->g, a->term[k].val) * a->term[k].mul % c) return false;
  }
  return c * a->stride * t->bytes % 16 == 0;
}

static void split_digit(trial *t, int k, int64_t c, bool loop) {
  digit *d = &t->digit[k];
  memmove(d + 2, d + 1, sizeof *d * (size_t)(t->n_digits - k - 1));
  d[1] = (digit){d->size / c, d->smem * c, d->gmem * c, d->step * c, d->axis, loop, false};
  d->size = c;
  t->n_digits++;
}

static const char indivisible[] =
    "no dimension of it can be cut into as many parts as blocks share it";

/* Split digit k into equal parts, one for each block. */
static const char *share_digit(trial *t, int k, int64_t parts) {
  const digit *d = &t->digit[k];
  if (d->size % parts) return indivisible;
  if (k == 0 && t->smem->swizzle) return "it would cut the swizzled dimension";
  const int64_t c = d->size / parts;
  if (c * d->smem * t->bytes % LINE) {
    return "the parts of the blocks would not be multiples of 128 bytes";
  }
  split_digit(t, k, c, true);
  t->digit[k + 1].share = true;
  if (c > 1) return NULL;
  memmove(&t->digit[k], &t->digit[k + 1], sizeof *d * (size_t)(t->n_digits - k - 1));
  t->n_digits--;
  return NULL;
}

/* Split a digit above the limit of a box: into two digits of the box, else into a loop over boxes.
 */
static const char *cut_large(trial *t, int k) {
  const digit *d = &t->digit[k];
  int count;
  only_digit(t, d->axis, &count);
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t c = MAX_BOX; c > 0; c--) {
      if (d->size % c || (k == 0 && c * t->bytes % 16)) continue;
      if (pass == 0 && (count > 1 || d->step != 1 || d->size / c > MAX_BOX)) continue;
      if (pass == 0 ? !may_cut_axis(t, &t->axis[d->axis], c) : c * d->smem * t->bytes % LINE) {
        continue;
      }
      split_digit(t, k, c, pass == 1);
      return NULL;
    }
  }
  return "a dimension above 256 elements has no legal cut into boxes of at most 256";
}

static const char *cut_digits(trial *t) {
  if (!t->n_digits || t->digit[0].smem != 1) {
    return t->n_digits ? "the SMEM view is not contiguous" : "it moves less than 16 bytes";
  }
  if (t->digit[0].step != 1 || t->axis[t->digit[0].axis].stride != 1) {
    return "the fastest dimension of the SMEM view is not the last one of the GMEM array";
  }
  if (t->smem->swizzle) {
    const int64_t s = t->smem->swizzle / t->bytes;
    if (t->digit[0].size % s) return "the swizzled dimension is not taken whole";
    if (t->digit[0].size > s) split_digit(t, 0, s, false);
  }
  if (t->digit[0].size * t->bytes % 16) {
    return "rows of the slice are not a multiple of 16 bytes";
  }
  for (int k = 0; k < t->n_digits; k++) {
    const char *why = t->digit[k].size > MAX_BOX && !t->digit[k].loop ? cut_large(t, k) : NULL;
    if (why) return why;
  }
  return NULL;
}

/* ---- the map -----------------------------------------------------------------------------------
 */

static const char *add_map_dim(const trial *t, pm_copy_plan *p, int64_t dim, uint32_t extent,
                               int64_t stride, int64_t box) {
  pm_tensor_map *m = &p->map;
  int64_t pitch = stride * t->bytes;
  if (m->rank == PM_TMA_RANK) return "the tensor map would have more than 5 dimensions";
  if (dim > INT32_MAX) return "a dimension of the GMEM array is too large";
  if (m->rank) {
    if (dim == 1 && !extent) pitch = pm_round_up(pitch, 16);
    if (pitch % 16) return "rows of the GMEM array are not a multiple of 16 bytes";
    if (pitch >= (int64_t)1 << 40) return "a stride of the GMEM array is too large";
  }
  m->dim[m->rank] = (uint64_t)dim;
  m->extent[m->rank] = extent;
  m->stride[m->rank] = (uint64_t)pitch;
  m->box[m->rank++] = (uint32_t)box;
  return NULL;
}

static const char *set_coord(pm_coord *c, const axis *a, int64_t div) {
  c->fixed = a->start / div;
  c->n_terms = 0;
  for (uint32_t k = 0; k < a->n_terms; k++) {
    const int64_t by = pm_gcd(a->term[k].mul, div);
    const char *why =
        add_coord_term(c->term, &c->n_terms, a->term[k].val, a->term[k].mul / by, div / by);
    if (why) return why;
  }
  return NULL;
}

/* Try to add a digit to the box; false: it must become a loop. */
static bool box_digit(trial *t, const digit *d, int64_t dense) {
  axis *a = &t->axis[d->axis];
  if (d->loop || d->smem != dense) return false;
  if (a->inner < 0) return d->step == 1;
  if (a->cut || !may_cut_axis(t, a, d->step)) return false;
  a->cut = d->step;
  return true;
}

/* Dimensions of the map are in the order of the box: one pass finds the splits, one adds them. */
static const char *make_box(trial *t, pm_copy_plan *p, int *n_box) {
  int64_t dense = 1;
  const char *why = NULL;
  *n_box = 0;
  for (int k = 0; k < t->n_digits; k++) {
    const digit *d = &t->digit[k];
    axis *a = &t->axis[d->axis];
    if (!box_digit(t, d, dense)) break;
    if (a->cut) {
      a->outer = k;
    } else {
      a->inner = k;
    }
    dense *= d->size;
    ++*n_box;
  }
  for (int k = 0; k < *n_box && !why; k++) {
    const digit *d = &t->digit[k];
    const axis *a = &t->axis[d->axis];
    const int64_t cut = a->cut ? a->cut : 1;
    if (k == a->inner) {
      why = add_map_dim(t, p, a->cut ? a->cut : a->size, a->extent, a->stride, d->size);
      if (!why && !a->cut) why = set_coord(&p->coord[k], a, 1);
    } else {
      why = add_map_dim(t, p, a->size / cut, a->extent, a->stride * cut, d->size);
      if (!why) why = set_coord(&p->coord[k], a, cut);
    }
  }
  return why;
}

/* Axes that no digit of the box runs along: one index at a time. */
static const char *add_unit_axes(trial *t, pm_copy_plan *p) {
  for (int i = t->n_axes - 1; i >= 0; i--) {
    axis *a = &t->axis[i];
    int count;
    only_digit(t, i, &count);
    if (a->gone || a->inner >= 0) continue;
    if (a->size == 1 && !a->extent && !count && !a->start && !a->n_terms) continue;
    const char *why = add_map_dim(t, p, a->size, a->extent, a->stride, 1);
    a->inner = p->map.rank - 1;
    if (!why) why = set_coord(&p->coord[a->inner], a, 1);
    if (why) return why;
  }
  return NULL;
}

static const char *add_loops(trial *t, pm_copy_plan *p, int first) {
  for (int k = first; k < t->n_digits; k++) {
    const digit *d = &t->digit[k];
    const axis *a = &t->axis[d->axis];
    const int64_t cut = a->cut ? a->cut : 1, step = d->smem * t->bytes;
    if (!d->share && p->n_loops == PM_COUNT(p->loop)) {
      return "it would take more than 3 nested loops of boxes";
    }
    if (d->step % cut) return "a loop over boxes would not stop at whole tiles";
    if (step % LINE) return "the boxes would not be aligned in SMEM";
    pm_box_loop *l = d->share ? &p->share : &p->loop[p->n_loops++];
    l->count = d->size;
    l->smem_step = step;
    l->coord_step[a->cut ? a->outer : a->inner] = d->step / cut;
  }
  return NULL;
}

/* A box must start at a multiple of 16 bytes along the innermost dimension: the hardware treats any
 * other coordinate as an illegal instruction. */
static const char *check_inner_start(const trial *t, const pm_copy_plan *p) {
  const int64_t e = 16 / t->bytes;
  const pm_coord *c = &p->coord[0];
  bool aligned = c->fixed % e == 0;
  for (uint32_t k = 0; k < c->n_terms && aligned; k++) {
    const int64_t d = pm_divisor(t->g, c->term[k].val);
    aligned = d % c->term[k].div == 0 && d / c->term[k].div * c->term[k].mul % e == 0;
  }
  for (uint32_t k = 0; k < p->n_loops && aligned; k++) aligned = p->loop[k].coord_step[0] % e == 0;
  if (aligned && p->share.coord_step[0] % e == 0) return NULL;
  return "its start along the last dimension is not provably a multiple of 16 bytes (if it is one, "
         "say so by pl.multiple_of)";
}

/* `part`: the digit that is shared, counted from the slowest. */
static const char *try_tma(trial *t, pm_copy_plan *p, bool merge, int64_t parts, int part) {
  int n_box;
  memset(&p->map, 0, sizeof p->map);
  memset(p->coord, 0, sizeof p->coord);
  memset(p->loop, 0, sizeof p->loop);
  memset(&p->share, 0, sizeof p->share);
  p->n_loops = 0;
  p->share.count = 1;
  p->map.param = t->gmem->param;
  p->map.dtype = t->gmem->dtype;
  p->map.of = t->gmem->all_devices ? PM_MAP_ALL : t->gmem->device_val ? PM_MAP_PEERS : PM_MAP_OWN;
  p->map.swizzle = t->smem->swizzle;
  const char *why = make_axes(t);
  if (why) return why;
  make_digits(t);
  if (merge) merge_axes(t);
  if (parts > 1) {
    if (part >= t->n_digits) return indivisible;
    if ((why = share_digit(t, t->n_digits - 1 - part, parts))) return why;
  }
  if (!(why = cut_digits(t)) && !(why = make_box(t, p, &n_box)) && !(why = add_unit_axes(t, p))) {
    why = add_loops(t, p, n_box);
  }
  return why ? why : check_inner_start(t, p);
}

/* A map for a combining copy takes integers as unsigned, except for signed minimum and maximum. */
static void set_map_dtype(const pm_graph *g, pm_opid op, pm_copy_plan *p) {
  pm_dtype as;
  if (pm_get(g, op)->code != PM_OP_COPY_S2G || !*pm_attr(g, op, PM_ATTR_COMBINE)) return;
  pm_combine_atomic(*pm_attr(g, op, PM_ATTR_COMBINE), p->map.dtype, &as);
  p->map.dtype = (uint8_t)as;
}

static const char *plan_tma(const pm_graph *g, pm_copy_plan *p, int64_t parts) {
  trial t = {.g = g, .gmem = &p->gmem, .smem = &p->smem};
  t.bytes = pm_dtypes[p->gmem.dtype].bytes;
  if (p->gmem.reshaped || p->gmem.shifted) return "the GMEM view is a reshaped part of an array";
  if (pm_view_divisor(g, &p->smem) * t.bytes % LINE) {
    return "the SMEM view does not provably start at a multiple of 128 bytes";
  }
  const char *first = NULL;
  for (int k = 0; k < (parts > 1 ? 4 * MAX_DIGITS : 4); k++) {
    t.may_cut = k % 2 == 0;
    const char *why = try_tma(&t, p, k / 2 % 2, parts, k / 4);
    if (!why) return NULL;
    if (!first || first == indivisible) first = why;
  }
  return first;
}

/* ---- bulk --------------------------------------------------------------------------------------
 */

static const char *plan_bulk(const pm_graph *g, pm_copy_plan *p, bool promised) {
  trial t = {.g = g, .gmem = &p->gmem, .smem = &p->smem};
  const int64_t bytes = pm_dtypes[p->gmem.dtype].bytes;
  int64_t dense = 1;
  make_digits(&t);
  for (int k = 0; k < t.n_digits; k++) {
    if (t.digit[k].smem != dense || t.digit[k].gmem != dense) return "the slice is not contiguous";
    dense *= t.digit[k].size;
  }
  if (p->smem.swizzle) return "the SMEM ref is swizzled";
  if (p->bytes % 16 || pm_view_divisor(g, &p->gmem) * bytes % 16 ||
      pm_view_divisor(g, &p->smem) * bytes % 16) {
    return "addresses and size are not provably multiples of 16 bytes";
  }
  if (!promised && !pm_view_in_bounds(g, &p->gmem)) {
    return "the slice is not provably inside the GMEM array";
  }
  return NULL;
}

/* ---- one copy ----------------------------------------------------------------------------------
 */

/* The blocks that share the copy. */
static int64_t sharers(const pm_graph *g, pm_opid op) {
  int64_t parts = 1;
  uint32_t n;
  if (!pm_has_attr(g, op, PM_ATTR_CLUSTER)) return 1;
  const int64_t *axes = pm_attr_list(g, op, PM_ATTR_CLUSTER, &n);
  for (uint32_t k = 0; k < n; k++) parts *= g->cluster[axes[k]];
  return parts;
}

static pm_code plan_collective(const pm_graph *g, pm_opid op, pm_copy_plan *p, int64_t parts,
                               pm_err *err) {
  const char *why = "only tensor maps can multicast";
  p->engine = PM_ENGINE_TMA;
  if (*pm_attr(g, op, PM_ATTR_ENGINE) <= PM_ENGINE_TMA && !(why = plan_tma(g, p, 1)) &&
      !(why = plan_tma(g, p, parts))) {
    return PM_OK;
  }
  return pm_fail(err, PM_E_VALUE,
                 "copy_gmem_to_smem with collective_axes: %lld blocks of the cluster cannot share "
                 "the copy of %s: %s. Leave out collective_axes, or change the block",
                 (long long)parts, pm_type_text(g->arena, pm_typeof(g, pm_in(g, op, 1))), why);
}

/* A store whose box starts before the array is an illegal instruction too; a load is not. Starts of
 * which nothing is known are assumed to be fine. */
static const char *check_store_start(const pm_graph *g, const pm_copy_plan *p) {
  for (uint32_t k = 0; k < p->gmem.base_rank; k++) {
    int64_t lo, hi;
    if (!pm_view_start_range(g, &p->gmem, k, &lo, &hi)) continue;
    if (lo < 0 && lo > INT32_MIN / 2) return "it may begin before the array";
  }
  return NULL;
}

/* Only the copy engine signals another block. */
static pm_code plan_leader(const pm_graph *g, pm_opid op, pm_copy_plan *p, int64_t parts,
                           pm_err *err) {
  const int engine = p->engine;
  if (parts > 1) return plan_collective(g, op, p, parts, err);
  p->engine = PM_ENGINE_TMA;
  const char *why = plan_tma(g, p, 1);
  if (!why && (engine == PM_ENGINE_AUTO || engine == PM_ENGINE_TMA)) {
    set_map_dtype(g, op, p);
    return PM_OK;
  }
  return pm_fail(err, PM_E_VALUE, "copy_gmem_to_smem with leader_tracked needs TMA, %s%s",
                 why ? "which cannot do it: " : "not the engine ",
                 why ? why : pm_enum_text(PM_ENUM_ENGINE, engine));
}

static pm_code plan(const pm_graph *g, pm_opid op, pm_copy_plan *p, pm_err *err) {
  const bool load = pm_get(g, op)->code == PM_OP_COPY_G2S;
  const int engine = (int)*pm_attr(g, op, PM_ATTR_ENGINE);
  memset(p, 0, sizeof *p);
  if (pm_view_of(g, pm_in(g, op, load ? 0 : 1), true, &p->gmem, err)) return err->code;
  if (pm_view_of(g, pm_in(g, op, load ? 1 : 0), true, &p->smem, err)) return err->code;
  if (p->gmem.param < 0 || p->smem.space != PM_SMEM) {
    return pm_fail(err, PM_E_VALUE, "%s: one side must be a GMEM ref, the other one an SMEM ref",
                   pm_op_name(pm_get(g, op)->code));
  }
  p->bytes = pm_dtypes[p->gmem.dtype].bytes;
  for (int k = 0; k < p->smem.rank; k++) p->bytes *= p->smem.dim[k].size;
  p->engine = engine;
  p->share.count = 1;
  const int64_t parts = sharers(g, op);
  if (load && *pm_attr(g, op, PM_ATTR_LEADER)) return plan_leader(g, op, p, parts, err);
  if (parts > 1) {
    p->alone = engine == PM_ENGINE_AUTO && plan_tma(g, p, 1);
    if (!p->alone) return plan_collective(g, op, p, parts, err);
  }
  if (engine == PM_ENGINE_PLAIN) return PM_OK;
  const char *why;
  if (engine != PM_ENGINE_TMA) {
    const bool promised = load && *pm_attr(g, op, PM_ATTR_OOB) == PM_OOB_PROMISE_IN_BOUNDS;
    p->engine = PM_ENGINE_BULK;
    if (!(why = plan_bulk(g, p, promised))) return PM_OK;
  }
  if (engine != PM_ENGINE_BULK) {
    p->engine = PM_ENGINE_TMA;
    if (!(why = plan_tma(g, p, 1)) && (load || !(why = check_store_start(g, p)))) {
      set_map_dtype(g, op, p);
      return PM_OK;
    }
  }
  if (engine != PM_ENGINE_AUTO) {
    return pm_fail(err, PM_E_VALUE, "%s: the engine %s cannot do this copy: %s",
                   pm_op_name(pm_get(g, op)->code), pm_enum_text(PM_ENUM_ENGINE, engine), why);
  }
  if (p->gmem.reshaped && !(load && *pm_attr(g, op, PM_ATTR_OOB) == PM_OOB_PROMISE_IN_BOUNDS)) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "%s: the GMEM view is a reshape of a slice that is not provably inside the "
                   "array; reshape the ref first and slice it then",
                   pm_op_name(pm_get(g, op)->code));
  }
  if (p->gmem.all_devices) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "%s to a multicast_ref: no engine can do this copy: %s. Change the block, or "
                   "store the array by plgpu.multimem_store",
                   pm_op_name(pm_get(g, op)->code), why);
  }
  p->engine = PM_ENGINE_PLAIN;
  p->why = why;
  return PM_OK;
}

/* Planned as a copy to dense SMEM, of which only the boxes matter. */
static pm_code plan_prefetch(const pm_graph *g, pm_opid op, pm_copy_plan *p, pm_err *err) {
  const int engine = (int)*pm_attr(g, op, PM_ATTR_ENGINE);
  int64_t n = 1;
  memset(p, 0, sizeof *p);
  if (pm_view_of(g, pm_in(g, op, 0), true, &p->gmem, err)) return err->code;
  p->smem = (pm_view){.space = PM_SMEM,
                      .dtype = p->gmem.dtype,
                      .rank = p->gmem.rank,
                      .param = -1,
                      .cluster_dim = -1};
  for (int k = p->gmem.rank - 1; k >= 0; k--) {
    p->smem.dim[k] = (pm_view_dim){.size = p->gmem.dim[k].size, .inner = n, .step = 1};
    n *= p->gmem.dim[k].size;
  }
  p->bytes = n * pm_dtypes[p->gmem.dtype].bytes;
  p->share.count = 1;
  p->engine = PM_ENGINE_BULK;
  if (engine != PM_ENGINE_PLAIN && !plan_bulk(g, p, false)) return PM_OK;
  p->engine = PM_ENGINE_TMA;
  if (engine != PM_ENGINE_PLAIN && !plan_tma(g, p, 1) && !check_store_start(g, p)) return PM_OK;
  p->engine = PM_ENGINE_PLAIN;
  return PM_OK;
}

/* By cp.async, or by loads and stores where pieces of 4 bytes are too large: the generator finds
 * out. */
static pm_code plan_cp_async(const pm_graph *g, pm_opid op, pm_copy_plan *p, pm_err *err) {
  memset(p, 0, sizeof *p);
  if (pm_view_of(g, pm_in(g, op, 0), true, &p->gmem, err)) return err->code;
  if (pm_view_of(g, pm_in(g, op, 1), true, &p->smem, err)) return err->code;
  if (p->gmem.reshaped && *pm_attr(g, op, PM_ATTR_OOB) != PM_OOB_PROMISE_IN_BOUNDS &&
      !pm_view_in_bounds(g, &p->gmem)) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "copy_gmem_to_smem: the GMEM view is a reshape of a slice that is not provably "
                   "inside the array; reshape the ref first and slice it then");
  }
  p->engine = PM_ENGINE_PLAIN;
  p->promised = *pm_attr(g, op, PM_ATTR_OOB) == PM_OOB_PROMISE_IN_BOUNDS;
  return PM_OK;
}

/* Rows by number: each is a box of a tensor map of the matrix, cut into chunks of a swizzle. */
static pm_code check_rows(const pm_graph *g, pm_opid op, pm_err *err) {
  const uint32_t gather = pm_typeof(g, pm_in(g, op, 0))->space == PM_GMEM;
  pm_view s, m;
  if (pm_view_of(g, pm_in(g, op, gather), true, &s, err) ||
      pm_view_of(g, pm_in(g, op, !gather), true, &m, err)) {
    return err->code;
  }
  const pm_view_dim *column = &s.dim[1];
  const int64_t bits = pm_dtypes[s.dtype].bits, chunk = column->tile ? column->tile : column->size;
  if (column->inner != 1 || s.dim[0].inner != chunk || s.dim[0].tile || chunk > 256 ||
      chunk * bits % 128 || column->size % chunk) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "%s: rows of %lld columns of this SMEM; tile it by (8, S), S being 128, 64 or "
                   "32 bytes, with that swizzle",
                   pm_op_name(pm_get(g, op)->code), (long long)column->size);
  }
  if (m.reshaped || m.base_rank != 2 || m.dim[1].step != 1 || m.dim[0].base_dim != 0 ||
      m.base_stride[0] * bits % 128) {
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "%s: the array must be a matrix whose rows begin at multiples of 16 bytes, and "
                   "the ref all of its rows",
                   pm_op_name(pm_get(g, op)->code));
  }
  return PM_OK;
}

/* A matrix whose rows an instruction reads by a descriptor, in tiles as wide as the swizzle. */
static pm_code check_matrix(const pm_graph *g, pm_opid op, pm_err *err) {
  pm_view v;
  if (pm_view_of(g, pm_in(g, op, 0), true, &v, err)) return err->code;
  const pm_view_dim *row = &v.dim[0], *column = &v.dim[1];
  const int64_t bits = pm_dtypes[v.dtype].bits, s = (v.swizzle ? v.swizzle : 16) * 8 / bits;
  if (column->inner == 1 && row->inner == s && !row->tile &&
      (column->tile ? column->tile == s : column->size <= s)) {
    return PM_OK;
  }
  return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                 "%s: the SMEM is not tiled by (8, %lld)%s; give it TilingTransform((8, S)) and "
                 "SwizzleTransform, or leave out its transforms",
                 pm_op_name(pm_get(g, op)->code), (long long)s,
                 v.swizzle ? " with this swizzle" : "");
}

/* Scales and metadata: their tiles follow each other. */
static pm_code check_staged(const pm_graph *g, pm_opid op, pm_err *err) {
  pm_view v;
  int64_t stride = 1;
  if (pm_view_of(g, pm_in(g, op, 0), true, &v, err)) return err->code;
  bool dense = !v.swizzle;
  for (int d = v.rank - 1; d >= 0; d--) {
    if (v.dim[d].size > 1) dense &= !v.dim[d].tile && v.dim[d].inner == stride;
    stride *= v.dim[d].size;
  }
  if (dense) return PM_OK;
  return pm_fail(err, PM_E_VALUE, "%s: its tiles must be contiguous in SMEM, without transforms",
                 pm_op_name(pm_get(g, op)->code));
}

static pm_code check_form(const pm_graph *g, pm_opid op, pm_err *err) {
  if (pm_rule_of(g, op) == PM_LAY_ROWS) return check_rows(g, op, err);
  if (!pm_has_attr(g, op, PM_ATTR_PAIR) || pm_get(g, op)->n_in != 2) return PM_OK;
  const pm_type *from = pm_typeof(g, pm_in(g, op, 0)); /* of a copy to tensor memory */
  return from->rank == 2 ? check_matrix(g, op, err) : check_staged(g, op, err);
}

pm_code pm_plan_copy(const pm_graph *g, pm_opid op, const pm_target *t, pm_copy_plan *out,
                     pm_err *err) {
  (void)t;
  const int op_code = pm_get(g, op)->code;
  const pm_code code = op_code == PM_OP_PREFETCH   ? plan_prefetch(g, op, out, err)
                       : op_code == PM_OP_CP_ASYNC ? plan_cp_async(g, op, out, err)
                                                   : plan(g, op, out, err);
  if (code) pm_err_op(err, g, op);
  return code;
}

/* ---- all copies --------------------------------------------------------------------------------
 */

enum { WORTH_A_WARNING = 1024 };

typedef struct pass {
  const pm_target *target;
  pm_err *err;
  pm_code code;
} pass;

static void plan_one(pm_graph *g, pm_opid op, void *ctx) {
  pass *s = ctx;
  pm_copy_plan p;
  const int code = pm_get(g, op)->code;
  if (!s->code && (s->code = check_form(g, op, s->err))) pm_err_op(s->err, g, op);
  if (s->code || !pm_has_attr(g, op, PM_ATTR_ENGINE)) return;
  s->code = pm_plan_copy(g, op, s->target, &p, s->err);
  if (s->code) return;
  *pm_attr(g, op, PM_ATTR_ENGINE) = p.engine;
  if (p.alone) pm_set_list(g, op, PM_ATTR_CLUSTER, NULL, 0);
  if (p.why && p.bytes >= WORTH_A_WARNING) {
    const pm_op *o = pm_get(g, op);
    pm_vec_push(g->arena, &g->warnings,
                pm_printf(g->arena,
                          "%s:%u: %s of %lld bytes is done by loads and stores of all lanes%s: %s",
                          g->strings.at[o->file], o->line, pm_op_name(code), (long long)p.bytes,
                          p.alone ? " of each block" : "", p.why));
  }
}

static void note_store(pm_graph *g, pm_opid op, void *ctx) {
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a))
    *(bool *)ctx |= a.completion == PM_COMPLETES_GROUP && !pm_by_lanes(&a);
}

bool pm_warps_store(pm_graph *g, pm_opid map) {
  bool found = false;
  pm_walk(g, pm_region(g, map, 0), note_store, &found);
  return found;
}

static void note_warps(pm_graph *g, pm_opid op, void *ctx) {
  if (pm_maps_warps(pm_get(g, op)->code)) *(bool *)ctx |= pm_warps_store(g, op);
}

/* One lane issues the copies of a thread, but a group that the thread closes counts as one of each
 * warp: if warps store too, closing it is a separate op. */
static void split_commits(pm_graph *g, pm_blk block) {
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    const int code = pm_get(g, op)->code;
    if (pm_has_attr(g, op, PM_ATTR_COMMIT) && *pm_attr(g, op, PM_ATTR_COMMIT)) {
      *pm_attr(g, op, PM_ATTR_COMMIT) = 0;
      pm_insert(g, block, ++k, PM_OP_COMMIT_GROUP, NULL, 0, NULL, 0, NULL, 0, op);
    }
    for (uint32_t r = 0; !pm_maps_warps(code) && r < pm_get(g, op)->n_regions; r++) {
      split_commits(g, pm_region(g, op, r));
    }
  }
}

pm_code pm_plan_copies(pm_graph *g, const pm_target *t, pm_err *err) {
  pass s = {t, err, PM_OK};
  bool warps_store = false;
  pm_walk(g, 1, plan_one, &s);
  if (s.code) return s.code;
  pm_walk(g, 1, note_warps, &warps_store);
  if (warps_store) split_commits(g, 1);
  return PM_OK;
}
