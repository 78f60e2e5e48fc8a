/* Tiling and swizzle of SMEM allocations.
 *
 * Two passes, before and after register layouts are chosen. Both try the swizzles from wide to
 * narrow on a set of allocations: they write (8, S) and the swizzle into the attributes and then
 * resolve every view of the allocation (ir/view.h alone decides what a tiling allows). The first
 * swizzle for which all views resolve is kept.
 *
 * Forced: the operands of a product must be tiled and swizzled, those of a wgmma with the same
 * swizzle. Operands of a common wgmma form a group (union-find over allocations), and a group gets
 * one swizzle; a tcgen05 product takes two. A copy to tensor memory that is not tiled is tiled,
 * too. What the user specified is binding. Chosen: allocations that arrays in the WGMMA layout are
 * loaded from or stored to, unless that would prevent a copy from using an engine. All others stay
 * row-major. */
#include "../ir/tmem.h"
#include "passes.h"

static const int64_t widths[] = {128, 64, 32};

/* A ref value and the op that reads it, so that errors have a location. */
typedef struct use {
  pm_val ref;
  pm_opid op;
} use;

typedef struct buffer {
  pm_opid alloc;
  uint32_t group;  /* parent in the union-find forest: an index of a buffer */
  pm_opid product; /* an op that needs its tiles, 0: none */
  bool wgmma_laid; /* arrays in the WGMMA layout are loaded or stored */
  PM_VEC(use) views;
  PM_VEC(pm_opid) copies;
} buffer;

typedef struct pass {
  pm_graph *g;
  const pm_target *target;
  pm_err *err;
  pm_code code;
  uint32_t n;
  buffer *buffers;
  uint32_t *index; /* op -> buffer of an ALLOC_SMEM */
} pass;

/* ---- what there is -----------------------------------------------------------------------------
 */

static buffer *buffer_of(pass *p, pm_val ref) {
  const pm_opid alloc = pm_view_smem(p->g, ref);
  return alloc ? &p->buffers[p->index[alloc]] : NULL;
}

static void count_allocs(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  if (pm_allocates(g, op, PM_SMEM)) p->index[op] = p->n++;
}

/* Is it WGMMA, or a corresponding layout of narrow elements? */
static bool is_wgmma_laid(pm_graph *g, pm_val array) {
  const pm_value v = *pm_value_of(g, array);
  if (v.type.rank < 2 || !v.layout) return false;
  return pm_layout_swizzled(g->arena, pm_layout_of(g, v.layout));
}

/* Does the op read the buffer by descriptors of tiles? A copy to tensor memory without a swizzle
 * can do without, if the user wants it. */
static bool needs_tiles(const pass *p, pm_opid op, const buffer *b) {
  const pm_mma *mma = pm_mma_of(p->g, op);
  if (mma) return mma->majors != PM_MAJORS_NONE;
  if (pm_get(p->g, op)->code != PM_OP_COPY_S2T) return false;
  return !*pm_attr(p->g, b->alloc, PM_ATTR_GIVEN) || *pm_attr(p->g, b->alloc, PM_ATTR_SWIZZLE);
}

/* Whole arrays that lanes load or store ask for a layout of the buffer; atomics do not. */
static void collect_access(pass *p, const pm_access *a) {
  pm_graph *g = p->g;
  pm_access same;
  pm_val array;
  buffer *b = a->where == PM_IN_SMEM ? buffer_of(p, a->view) : NULL;
  if (!b) return;
  if (pm_has_attr(g, a->op, PM_ATTR_ENGINE)) pm_vec_push(g->arena, &b->copies, a->op);
  if (needs_tiles(p, a->op, b)) b->product = a->op;
  if (pm_moves_array(g, a->op, &same, &array)) b->wgmma_laid |= is_wgmma_laid(g, array);
}

static void collect(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  const pm_op *o = pm_get(g, op);
  const uint32_t n_in = o->n_in;
  if (pm_allocates(g, op, PM_SMEM)) {
    p->buffers[p->index[op]].alloc = op;
    p->buffers[p->index[op]].group = p->index[op];
    return;
  }
  for (uint32_t k = 0; k < n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    if (pm_typeof(g, v)->kind != PM_REF) continue;
    buffer *b = buffer_of(p, v);
    if (!b) continue;
    pm_vec_push(g->arena, &b->views, ((use){v, op}));
  }
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) collect_access(p, &a);
}

static void start(pass *p, pm_graph *g, const pm_target *t, pm_err *err) {
  *p = (pass){.g = g, .target = t, .err = err};
  p->index = PM_NEW(g->arena, uint32_t, g->ops.n);
  pm_walk(g, 1, count_allocs, p);
  p->buffers = PM_NEW(g->arena, buffer, p->n);
  pm_walk(g, 1, collect, p);
}

/* ---- trying a swizzle --------------------------------------------------------------------------
 */

/* Tiles of 8 along dimension `row`, 1 along the others from `first` on, and as wide as the swizzle:
 * for a reshape that merges the dimensions from first to row, and those after it. */
static void tile_dims(pass *p, const buffer *b, int64_t swizzle, int first, int row) {
  const pm_type *t = pm_typeof(p->g, pm_get(p->g, b->alloc)->out);
  int64_t tiling[PM_MAX_RANK];
  const int n = swizzle ? t->rank - first : 0;
  for (int k = 0; k < n; k++) tiling[k] = k == row - first ? 8 : 1;
  if (n) tiling[n - 1] = swizzle * 8 / pm_dtypes[t->dtype].bits;
  pm_set_list(p->g, b->alloc, PM_ATTR_TILING, tiling, (uint32_t)n);
  *pm_attr(p->g, b->alloc, PM_ATTR_SWIZZLE) = swizzle;
}

static void set_transforms(pass *p, const buffer *b, int64_t swizzle) {
  const int row = pm_typeof(p->g, pm_get(p->g, b->alloc)->out)->rank - 2;
  tile_dims(p, b, swizzle, row, row);
}

static bool is_given(const pass *p, const buffer *b) {
  return *pm_attr(p->g, b->alloc, PM_ATTR_GIVEN) != PM_GIVEN_NOTHING;
}

/* What a tcgen05 product asks of its operands beyond tiles. */
static bool tcgen05_fits(const pass *p, pm_opid op, pm_val ref, const pm_view *v, int64_t s,
                         pm_err *err) {
  const pm_tcgen05 x = pm_tcgen05_of(p->g, op);
  if (ref != x.b) return true;
  if (x.m == 64 && !x.pair && s > x.n / 2) {
    pm_fail(err, PM_E_VALUE,
            "the swizzle of b is too big: with 64 rows its %lld elements must fit into half of the "
            "%lld columns",
            (long long)s, (long long)x.n);
    return false;
  }
  if (x.metadata && v->swizzle == 32 && v->dim[0].inner == 1) {
    pm_fail(err, PM_E_NOT_IMPLEMENTED,
            "with a sparse a and a swizzle of 32 bytes b must be contiguous along N");
    return false;
  }
  return true;
}

/* An operand of a product is a matrix of whole 8-row atoms along the two tiled dimensions. */
static bool product_fits(const pass *p, const buffer *b, const use *u, const pm_view *v,
                         pm_err *err) {
  uint32_t n;
  const int64_t *tiling = pm_attr_list(p->g, b->alloc, PM_ATTR_TILING, &n), s = tiling[n - 1];
  const pm_view_dim *x = &v->dim[0], *y = &v->dim[1];
  const bool plain = x->tile == s && !y->tile && y->inner == s;
  const bool transposed = y->tile == s && !x->tile && x->inner == s;
  if (v->rank != 2 || (!plain && !transposed)) {
    pm_fail(err, PM_E_VALUE,
            "an operand is not a matrix along the last two dimensions of its allocation");
    return false;
  }
  if (pm_view_divisor(p->g, v) % (8 * s)) {
    pm_fail(err, PM_E_VALUE,
            "an operand does not provably start at a multiple of 8 rows; wrap a dynamic start in "
            "pl.multiple_of(x, 8)");
    return false;
  }
  const uint16_t code = pm_get(p->g, u->op)->code;
  if (code == PM_OP_COPY_S2T && plain) {
    pm_fail(err, PM_E_NOT_IMPLEMENTED, "a copy to TMEM of a transposed ref");
    return false;
  }
  return code != PM_OP_TCGEN05_MMA || tcgen05_fits(p, u->op, u->ref, v, s, err);
}

/* Do the shape and all views of the buffer allow the transforms it has now? */
static bool views_fit(const pass *p, const buffer *b, pm_err *err) {
  pm_view v;
  if (pm_check_transforms(p->g, b->alloc, err)) return false;
  for (uint32_t k = 0; k < b->views.n; k++) {
    const use *u = &b->views.at[k];
    if (pm_view_of(p->g, u->ref, true, &v, err) ||
        (needs_tiles(p, u->op, b) && !product_fits(p, b, u, &v, err))) {
      pm_err_op(err, p->g, u->op);
      return false;
    }
  }
  return true;
}

static const char *place(const pass *p, pm_opid op) {
  const pm_op *o = pm_get(p->g, op);
  return pm_printf(p->g->arena, "%s:%u", p->g->strings.at[o->file], o->line);
}

static const char *type_text(const pass *p, const buffer *b) {
  return pm_type_text(p->g->arena, pm_typeof(p->g, pm_get(p->g, b->alloc)->out));
}

/* ---- forced by products
 * ---------------------------------------------------------------------------
 */

static uint32_t find(pass *p, uint32_t k) {
  while (p->buffers[k].group != k) k = p->buffers[k].group = p->buffers[p->buffers[k].group].group;
  return k;
}

static void join(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  if (pm_get(g, op)->code != PM_OP_WGMMA) return;
  buffer *a = buffer_of(p, pm_in(g, op, 1)), *b = buffer_of(p, pm_in(g, op, 2));
  if (pm_typeof(g, pm_in(g, op, 1))->kind != PM_REF || !a || !b) return;
  p->buffers[find(p, (uint32_t)(a - p->buffers))].group = find(p, (uint32_t)(b - p->buffers));
}

/* Is `swizzle` what the user specified, with the tiling that a wgmma needs? */
static bool given_fits(pass *p, const buffer *b, int64_t swizzle) {
  const pm_type *t = pm_typeof(p->g, pm_get(p->g, b->alloc)->out);
  uint32_t n;
  const int64_t *tile = pm_attr_list(p->g, b->alloc, PM_ATTR_TILING, &n);
  int64_t rows = 1;
  for (uint32_t k = 0; k + 1 < n; k++) rows *= tile[k];
  return *pm_attr(p->g, b->alloc, PM_ATTR_SWIZZLE) == swizzle && n > 1 && rows % 8 == 0 &&
         tile[n - 1] * pm_dtypes[t->dtype].bits == swizzle * 8;
}

static bool group_given_fits(pass *p, uint32_t group, int64_t swizzle) {
  for (uint32_t k = 0; k < p->n; k++) {
    const buffer *b = &p->buffers[k];
    if (find(p, k) == group && is_given(p, b) && !given_fits(p, b, swizzle)) return false;
  }
  return true;
}

static void put_given(pass *p, uint32_t group, pm_text *t) {
  const char *sep = "";
  for (uint32_t k = 0; k < p->n; k++) {
    const buffer *b = &p->buffers[k];
    if (find(p, k) != group || !is_given(p, b)) continue;
    uint32_t n;
    const int64_t *tile = pm_attr_list(p->g, b->alloc, PM_ATTR_TILING, &n);
    const int64_t swizzle = *pm_attr(p->g, b->alloc, PM_ATTR_SWIZZLE);
    pm_putf(t, "%s%s at %s was given ", sep, type_text(p, b), place(p, b->alloc));
    if (n) pm_put(t, "the tiling ");
    if (n) pm_put_dims(t, tile, n);
    pm_put(t, n ? " and " : "no tiling and ");
    pm_putf(t, swizzle ? "a swizzle of %lld bytes" : "no swizzle", (long long)swizzle);
    sep = ", ";
  }
}

/* Try the transforms that were given, else (8, S), else a tiling of more dimensions, for operands
 * that are reshapes of more than two. */
static bool infer(pass *p, const buffer *b, int64_t swizzle, pm_err *err) {
  const int rank = pm_typeof(p->g, pm_get(p->g, b->alloc)->out)->rank;
  pm_err ignored;
  if (!is_given(p, b)) set_transforms(p, b, swizzle);
  if (views_fit(p, b, err)) return true;
  if (is_given(p, b)) return false;
  for (int row = rank - 2; row >= 0; row--) {
    for (int first = row; first >= 0; first--) {
      memset(&ignored, 0, sizeof ignored);
      tile_dims(p, b, swizzle, first, row);
      if (views_fit(p, b, &ignored)) return true;
    }
  }
  return false;
}

static bool group_views_fit(pass *p, uint32_t group, int64_t swizzle, pm_err *err) {
  for (uint32_t k = 0; k < p->n; k++) {
    if (find(p, k) == group && !infer(p, &p->buffers[k], swizzle, err)) return false;
  }
  return true;
}

static pm_code force_group(pass *p, uint32_t group) {
  static const char head[] = "Failed to infer a possible set of layouts: ";
  pm_err why;
  memset(&why, 0, sizeof why);
  for (uint32_t k = 0; k < PM_COUNT(widths); k++) {
    if (!group_given_fits(p, group, widths[k])) continue;
    memset(&why, 0, sizeof why);
    if (group_views_fit(p, group, widths[k], &why)) return PM_OK;
  }
  pm_text t;
  pm_text_init(&t, p->g->arena);
  if (why.code) {
    pm_put(&t, why.text + (strncmp(why.text, head, strlen(head)) ? 0 : strlen(head)));
    if (why.line) pm_putf(&t, " (%s:%u)", why.file, why.line);
  } else {
    put_given(p, group, &t);
  }
  pm_opid op = 0;
  for (uint32_t k = 0; k < p->n && !op; k++) {
    if (find(p, k) == group) op = p->buffers[k].product;
  }
  pm_fail(p->err, why.code == PM_E_NOT_IMPLEMENTED ? why.code : PM_E_VALUE,
          "%sthe SMEM operands of the %s at %s need the tiling (8, S) and one swizzle of 128, 64 "
          "or 32 bytes, S being the elements in it, but %s",
          head, pm_op_name(pm_get(p->g, op)->code), place(p, op), t.at);
  pm_err_op(p->err, p->g, op);
  return p->err->code;
}

/* Check that every ref that an op reads can be resolved. Transforms chosen later do not change
 * this, because they are only used if all views allow them. */
static void check_views(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  pm_view v;
  for (uint32_t k = 0; !p->code && k < pm_get(g, op)->n_in; k++) {
    const pm_val in = pm_in(g, op, k);
    if (pm_typeof(g, in)->kind == PM_ARRAY) continue;
    p->code = pm_view_of(g, in, true, &v, p->err);
    if (p->code) pm_err_op(p->err, g, op);
  }
}

pm_code pm_refuse_major(pm_graph *g, pm_opid op, uint32_t k, pm_dtype dtype, pm_err *err) {
  const pm_mma *mma = pm_mma_of(g, op);
  const bool wgmma = mma && mma->in[0] != PM_LAYOUT_NONE;
  pm_fail(err, PM_E_VALUE,
          "%s: %s%s is contiguous along %s, and of %s operands the tensor cores read rows along K. "
          "Keep it in SMEM as %s, or transpose it there: transposed[...] = ref[...].T, then "
          "plgpu.commit_smem()",
          pm_op_name(pm_get(g, op)->code), wgmma ? "Only f16 WGMMA supports transposes: " : "",
          k == 1 ? "a" : "b", k == 1 ? "M" : "N", pm_dtypes[dtype].text,
          k == 1 ? "(M, K) and pass the ref" : "(N, K) and pass the transposed ref, b.T");
  pm_err_op(err, g, op);
  return err->code;
}

/* With 16-bit elements, either dimension of an operand may be contiguous; otherwise it must be K.
 */
static void check_majors(pm_graph *g, pm_opid op, void *ctx) {
  pass *p = ctx;
  const pm_mma *mma = pm_mma_of(g, op);
  if (p->code || !mma || mma->majors != PM_MAJORS_K) return;
  for (uint32_t k = 1; k < 3 && !p->code; k++) {
    const pm_type *t = pm_typeof(g, pm_in(g, op, k));
    pm_view v;
    if (t->kind != PM_REF || t->space != PM_SMEM) continue;
    if (pm_view_of(g, pm_in(g, op, k), true, &v, p->err)) {
      p->code = p->err->code;
      pm_err_op(p->err, g, op);
    } else if (v.dim[2 - k].inner != 1) {
      p->code = pm_refuse_major(g, op, k, k == 1 ? mma->a : mma->b, p->err);
    }
  }
}

pm_code pm_force_transforms(pm_graph *g, const pm_target *t, pm_err *err) {
  pass p;
  start(&p, g, t, err);
  for (uint32_t k = 0; k < p.n; k++) {
    if (pm_check_transforms(g, p.buffers[k].alloc, err)) return err->code;
  }
  pm_walk(g, 1, check_majors, &p);
  if (p.code) return p.code;
  pm_walk(g, 1, join, &p);
  for (uint32_t k = 0; k < p.n; k++) {
    if (p.buffers[k].product && find(&p, k) == k && force_group(&p, k)) return err->code;
  }
  pm_walk(g, 1, check_views, &p);
  return p.code;
}

/* ---- chosen ------------------------------------------------------------------------------------
 */

static uint32_t count_plain(const pass *p, const buffer *b) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < b->copies.n; k++) {
    pm_copy_plan plan;
    pm_err ignored;
    memset(&ignored, 0, sizeof ignored);
    n += pm_plan_copy(p->g, b->copies.at[k], p->target, &plan, &ignored) ||
         plan.engine == PM_ENGINE_PLAIN;
  }
  return n;
}

static void choose(pass *p, const buffer *b) {
  const uint32_t plain = count_plain(p, b);
  for (uint32_t k = 0; k < PM_COUNT(widths); k++) {
    pm_err ignored;
    memset(&ignored, 0, sizeof ignored);
    set_transforms(p, b, widths[k]);
    if (views_fit(p, b, &ignored) && count_plain(p, b) <= plain) return;
  }
  set_transforms(p, b, 0);
}

pm_code pm_choose_transforms(pm_graph *g, const pm_target *t, pm_err *err) {
  pass p;
  start(&p, g, t, err);
  for (uint32_t k = 0; k < p.n; k++) {
    const buffer *b = &p.buffers[k];
    if (b->wgmma_laid && !b->product && !is_given(&p, b)) choose(&p, b);
  }
  return PM_OK;
}
