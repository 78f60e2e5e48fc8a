/* Type rules of tensor memory, tcgen05 products, cluster launch control and copies of rows.
 *
 * Everything that shapes, dtypes and layouts of TMEM decide is checked here, when the op is traced.
 * Swizzles are known later: passes/transforms.c checks what depends on them. */
#include "access.h"
#include "mma.h"
#include "tmem.h"
#include "typing.h"

/* ---- rows by index -------------------------------------------------------------------------- */

static pm_code rows_by_index(const pm_typing *t, uint32_t gmem, uint32_t smem, uint32_t index) {
  const pm_type *g = type_in(t, gmem), *s = type_in(t, smem), *k = type_in(t, index);
  if (g->dtype != s->dtype) {
    FAIL(VALUE, "%s: the GMEM ref has dtype %s, the SMEM ref %s; they must be equal", name(t),
         pm_dtypes[g->dtype].text, pm_dtypes[s->dtype].text);
  }
  if (g->rank != 2) {
    FAIL(NOT_IMPLEMENTED, "%s: the GMEM ref is %s; rows of a matrix (rows, columns) are copied",
         name(t), show(t, g));
  }
  if (pm_dtypes[k->dtype].class != PM_CLASS_UINT || k->rank != 1) {
    FAIL(VALUE, "%s: the indices are %s; a 1-D array of unsigned integers (uint32) is needed",
         name(t), show(t, k));
  }
  if (s->rank != 2 || s->dim[0] != k->dim[0] || s->dim[1] != g->dim[1]) {
    FAIL(VALUE,
         "%s: %" PRId64 " rows of %s are copied, the SMEM ref has shape %s; it must be (%" PRId64
         ", %" PRId64 ")",
         name(t), k->dim[0], show(t, g), show_shape(t, s), k->dim[0], g->dim[1]);
  }
  if (k->dim[0] % 4) {
    FAIL(VALUE, "%s: %" PRId64 " indices; a multiple of 4 is needed", name(t), k->dim[0]);
  }
  if (g->dim[1] * 4 * pm_dtypes[g->dtype].bits % 1024) {
    FAIL(VALUE, "%s: rows of %" PRId64 " %s; they must be a multiple of 32 bytes", name(t),
         g->dim[1], pm_dtypes[g->dtype].text);
  }
  return pm_own_block(t, smem, "the SMEM ref");
}

static pm_code plain_barrier(const pm_typing *t, uint32_t k) {
  const pm_code rc = pm_single_barrier(t, k);
  if (rc) return rc;
  if (pm_is_cluster_barrier(t->g, t->in[k])) {
    FAIL(VALUE, "%s: the barrier is a ClusterBarrier; it completes on a Barrier", name(t));
  }
  return pm_flavour(t, k, false);
}

pm_code pm_type_gather_rows(const pm_typing *t, pm_type *out) {
  (void)out;
  const pm_code rc = rows_by_index(t, 0, 1, 3);
  return rc ? rc : plain_barrier(t, 2);
}

pm_code pm_type_scatter_rows(const pm_typing *t, pm_type *out) {
  (void)out;
  return rows_by_index(t, 1, 0, 2);
}

/* ---- cluster launch control ----------------------------------------------------------------- */

static pm_code cancel_result(const pm_typing *t) {
  const pm_type *r = type_in(t, 0);
  const pm_code rc = pm_own_block(t, 0, "the result");
  if (rc) return rc;
  if (pm_type_size(r) * pm_dtypes[r->dtype].bits != 128) {
    FAIL(TYPE,
         "%s: the result is %s; 16 bytes are needed: a plgpu.TryClusterCancelResult, indexed by "
         ".at[slot] if it has several",
         name(t), show(t, r));
  }
  for (pm_opid def = pm_value_of(t->g, t->in[0])->def;
       def && pm_makes_view(pm_get(t->g, def)->code);
       def = pm_value_of(t->g, pm_in(t->g, def, 0))->def) {
    if (pm_has_attr(t->g, def, PM_ATTR_STARTS)) continue;
    FAIL(NOT_IMPLEMENTED, "%s: the result is a %s of an allocation; only indices are possible",
         name(t), pm_op_name(pm_get(t->g, def)->code));
  }
  return PM_OK;
}

pm_code pm_type_try_cancel(const pm_typing *t, pm_type *out) {
  (void)out;
  const pm_code rc = cancel_result(t);
  return rc ? rc : plain_barrier(t, 1);
}

pm_code pm_type_query_cancel(const pm_typing *t, pm_type *out) {
  *out = pm_scalar_type(PM_I32);
  return cancel_result(t);
}

/* ---- allocations and views ------------------------------------------------------------------ */

/* A pair is two blocks along the last axis of the cluster. */
static pm_code has_pair(const pm_typing *t) {
  const pm_graph *g = t->g;
  if (!word(t, PM_ATTR_PAIR)) return PM_OK;
  if (g->n_cluster && g->cluster[g->n_cluster - 1] == 2) return PM_OK;
  FAIL(VALUE, "%s: a pair of blocks is two along the last cluster axis, which has size %" PRId64,
       name(t), g->n_cluster ? g->cluster[g->n_cluster - 1] : 1);
}

static const char *refuse_extents(pm_arena *arena, const pm_type *type, int64_t layout, int64_t p) {
  const char *text = pm_enum_text(PM_ENUM_TMEM, layout);
  const int64_t rows = type->dim[type->rank - 2], columns = type->dim[type->rank - 1];
  const bool scales = layout == PM_TMEM_SCALES || layout == PM_TMEM_SCALES_M64;
  const bool halves = layout == PM_TMEM_HALF || layout == PM_TMEM_M64;
  const int64_t want = halves ? 64 : layout == PM_TMEM_SCALES_M64 ? 256 : 128;
  if (rows != want && !(layout == PM_TMEM_SCALES && rows == 256)) {
    return pm_printf(arena, "%" PRId64 " rows in the layout %s; it has %s", rows, text,
                     layout == PM_TMEM_SCALES ? "128 or 256" : pm_printf(arena, "%" PRId64, want));
  }
  const int64_t unit = halves                       ? pm_max(16, 2 * p)
                       : scales                     ? 4
                       : layout == PM_TMEM_METADATA ? 64
                                                    : p;
  if (columns > 0 && columns % unit == 0) return NULL;
  return pm_printf(arena,
                   "%" PRId64 " columns in the layout %s; a multiple of %" PRId64 " is needed",
                   columns, text, unit);
}

const char *pm_tmem_refusal(pm_arena *arena, const pm_type *type, int64_t layout, int64_t p) {
  const int64_t bits = pm_dtypes[type->dtype].bits;
  const char *dtype = pm_dtypes[type->dtype].text;
  if (type->rank < 2) return "a shape of (rows, columns) or (batch.., rows, columns) is needed";
  if ((layout == PM_TMEM_SCALES || layout == PM_TMEM_SCALES_M64) && (bits != 8 || p != 4)) {
    return pm_printf(arena, "scales have 8 bits, not %s", dtype);
  }
  if (layout == PM_TMEM_METADATA && (bits != 2 || p != 16)) {
    return pm_printf(arena, "sparse metadata is uint2, not %s", dtype);
  }
  if (p < 1 || p & (p - 1) || p * bits > 32) {
    return pm_printf(arena,
                     "%" PRId64
                     " elements of %s in 32 bits; a power of two that fits is "
                     "needed",
                     p, dtype);
  }
  return refuse_extents(arena, type, layout, p);
}

pm_code pm_type_alloc_tmem(const pm_typing *t, pm_type *out) {
  pm_code rc = given(t, PM_REF, out);
  if (rc) return rc;
  uint32_t n;
  const char *why = pm_tmem_refusal(t->g->arena, t->given, word(t, PM_ATTR_TMEM_LAYOUT),
                                    word(t, PM_ATTR_PACKING));
  if (t->given->space != PM_TMEM) why = "it is in another space";
  if (why) FAIL(VALUE, "%s: %s", show(t, t->given), why);
  const int64_t *overlay = list_of(t, PM_ATTR_UNION, &n);
  if (n && (n != 2 || overlay[0] < 1 || overlay[1] < 0)) {
    FAIL(INTERNAL, "alloc_tmem: attribute union is [number from 1, group]");
  }
  return has_pair(t);
}

static pm_code whole(const pm_typing *t, int d, int64_t start, int64_t size, const char *what) {
  const pm_type *from = type_in(t, 0);
  if (size == PM_DROPPED) {
    FAIL(VALUE, "index: dimension %d of %s, %s of TMEM, is indexed by an int; take all of them", d,
         show(t, from), what);
  }
  if (!start && size == from->dim[d]) return PM_OK;
  FAIL(NOT_IMPLEMENTED, "index: a slice of dimension %d of %s, %s of TMEM; take all of them%s", d,
       show(t, from), what, *what == 'a' ? ", or index it by an int" : "");
}

pm_code pm_type_tmem_index(const pm_typing *t) {
  const pm_type *from = type_in(t, 0);
  const pm_opid alloc = pm_tmem_alloc(t->g, t->in[0]);
  const int last = from->rank - 1;
  uint32_t n, next = 1;
  const int64_t *starts = list_of(t, PM_ATTR_STARTS, &n), *sizes = list_of(t, PM_ATTR_SIZES, &n);
  if (!alloc || last < 1) FAIL(INTERNAL, "index: %s", show(t, from));
  const pm_tmem m = pm_tmem_of(t->g, alloc);
  for (int d = 0; d < last - 1; d++) {
    if (starts[d] == PM_DYNAMIC) next++;
    if (sizes[d] == PM_DROPPED) continue;
    const pm_code rc = whole(t, d, starts[d], sizes[d], "a batch");
    if (rc) return rc;
  }
  const pm_code rc = whole(t, last - 1, starts[last - 1], sizes[last - 1], "the rows");
  if (rc) return rc;
  const int64_t tile = pm_tmem_tile(&m), start = starts[last], size = sizes[last];
  if (size == PM_DROPPED) return whole(t, last, start, size, "the columns");
  const bool dynamic = start == PM_DYNAMIC;
  const int64_t divisor = dynamic ? pm_divisor(t->g, t->in[next]) : start;
  if (size % tile == 0 && divisor % tile == 0) return PM_OK;
  FAIL(VALUE,
       "index: a slice of the columns of %s must start at and have a size divisible by %" PRId64
       ", a tile of its layout %s; got %s%s and size %" PRId64 "%s",
       show(t, from), tile, pm_enum_text(PM_ENUM_TMEM, m.layout),
       dynamic ? "a dynamic start" : "start ",
       dynamic ? "" : pm_printf(t->g->arena, "%" PRId64, start), size,
       dynamic ? "; wrap the start in pl.multiple_of" : "");
}

/* ---- copies from SMEM ----------------------------------------------------------------------- */

/* A ref of bytes as the ref of `dtype` that it was before passes/subbyte.c; `dim` is contiguous. */
static pm_type unpacked(const pm_type *bytes, int dim, pm_dtype dtype) {
  pm_type out = *bytes;
  if (bytes->space != PM_SMEM || bytes->dtype != PM_U8 || pm_dtypes[dtype].bits >= 8) return out;
  out.dtype = (uint8_t)dtype;
  out.dim[dim] *= 8 / pm_dtypes[dtype].bits;
  return out;
}

/* The ref in SMEM of a copy. */
static pm_type source(const pm_typing *t) {
  const pm_type *s = type_in(t, 0);
  return unpacked(s, s->rank - 1, type_in(t, 1)->dtype);
}

static pm_code copy_to_tmem(const pm_typing *t, pm_tmem *m) {
  const pm_type from = source(t), *s = &from, *x = type_in(t, 1);
  if (s->dtype != x->dtype) {
    FAIL(VALUE, "%s: smem_ref has dtype %s, tmem_ref %s; they must be equal", name(t),
         pm_dtypes[s->dtype].text, pm_dtypes[x->dtype].text);
  }
  if (x->rank != 2) FAIL(VALUE, "%s: tmem_ref is %s; index its batch first", name(t), show(t, x));
  *m = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[1]));
  m->columns = x->dim[1];
  if (word(t, PM_ATTR_PAIR) && !m->pair) {
    FAIL(VALUE, "%s: collective_axis, but tmem_ref was not allocated with collective=True",
         name(t));
  }
  if (!word(t, PM_ATTR_PAIR) && m->pair) {
    FAIL(VALUE, "%s: tmem_ref was allocated with collective=True; collective_axis is needed",
         name(t));
  }
  pm_code rc = pm_own_block(t, 0, "smem_ref");
  return rc ? rc : has_pair(t);
}

pm_code pm_type_copy_tmem(const pm_typing *t, pm_type *out) {
  (void)out;
  pm_tmem m;
  const pm_code rc = copy_to_tmem(t, &m);
  if (rc) return rc;
  const pm_type s = source(t);
  if (!same_shape(&s, type_in(t, 1))) {
    FAIL(VALUE, "%s: smem_ref has shape %s, tmem_ref %s; they must be equal", name(t),
         show_shape(t, &s), show_shape(t, type_in(t, 1)));
  }
  if (m.layout != PM_TMEM_DEFAULT || m.packing * pm_dtypes[m.dtype].bits != 32) {
    FAIL(VALUE,
         "%s: tmem_ref is %s in the layout %s, packed %d to 32 bits; 128 rows and all 32 "
         "bits are needed (packed=True)",
         name(t), show_in(t, 1), pm_enum_text(PM_ENUM_TMEM, m.layout), m.packing);
  }
  return PM_OK;
}

/* smem_ref is a pile of tiles of this shape. */
static pm_code tiles(const pm_typing *t, int64_t n, int64_t depth, int64_t rows, int64_t columns) {
  const pm_type s = source(t);
  const int64_t want[] = {n, depth, rows, columns};
  if (s.rank == 4 && !memcmp(s.dim, want, sizeof want)) return PM_OK;
  FAIL(VALUE,
       "%s: smem_ref has shape %s; for tmem_ref of shape %s it must be (%" PRId64 ", %" PRId64
       ", %" PRId64 ", %" PRId64 ")",
       name(t), show_shape(t, &s), show_shape(t, type_in(t, 1)), n, depth, rows, columns);
}

pm_code pm_type_copy_scales(const pm_typing *t, pm_type *out) {
  (void)out;
  pm_tmem m;
  const pm_code rc = copy_to_tmem(t, &m);
  if (rc) return rc;
  if (m.layout == PM_TMEM_SCALES_M64) return tiles(t, 1, m.columns / 4, 64, 16);
  if (m.layout == PM_TMEM_SCALES) return tiles(t, m.rows / 128, m.columns / 4, 32, 16);
  FAIL(VALUE,
       "%s: tmem_ref has the layout %s; allocate it with a layout for scales "
       "(plgpu.TMEMLayout.SCALES_LAYOUT)",
       name(t), pm_enum_text(PM_ENUM_TMEM, m.layout));
}

pm_code pm_type_copy_metadata(const pm_typing *t, pm_type *out) {
  (void)out;
  pm_tmem m;
  const pm_code rc = copy_to_tmem(t, &m);
  if (rc) return rc;
  if (m.layout == PM_TMEM_METADATA) return tiles(t, 1, m.columns / 64, 128, 64);
  FAIL(VALUE,
       "%s: tmem_ref has the layout %s; allocate it with "
       "plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT",
       name(t), pm_enum_text(PM_ENUM_TMEM, m.layout));
}

/* ---- registers ------------------------------------------------------------------------------ */

static pm_code no_metadata(const pm_typing *t) {
  const pm_tmem m = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[0]));
  if (m.layout != PM_TMEM_METADATA) return PM_OK;
  FAIL(NOT_IMPLEMENTED,
       "%s: sparse metadata; it is written by async_copy_sparse_metadata_to_tmem and read by "
       "products alone",
       name(t));
}

pm_code pm_type_load_tmem(const pm_typing *t, pm_type *out) {
  const pm_type *x = type_in(t, 0);
  const int64_t reduce = word(t, PM_ATTR_TMEM_REDUCE);
  const bool is_abs = reduce == PM_TMEM_REDUCE_ABSMAX || reduce == PM_TMEM_REDUCE_ABSMIN;
  const pm_code rc = no_metadata(t);
  if (rc) return rc;
  if (x->rank != 2) {
    FAIL(VALUE, "%s: src is %s; index its batch first", name(t), show(t, x));
  }
  if (x->dim[0] > PM_TMEM_LANES) {
    FAIL(NOT_IMPLEMENTED, "%s: src is %s; at most 128 rows are loaded", name(t), show(t, x));
  }
  const bool whole = x->dtype == PM_I32 || x->dtype == PM_U32;
  if (reduce && x->dtype != PM_F32 && (is_abs || !whole)) {
    FAIL(VALUE,
         "%s: reduce='%s' of %s; float32 takes max, min, absmax and absmin, int32 and uint32 max "
         "and min",
         name(t), pm_enum_text(PM_ENUM_TMEM_REDUCE, reduce), pm_dtypes[x->dtype].text);
  }
  const pm_tmem m = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[0]));
  if (reduce && m.layout != PM_TMEM_DEFAULT) {
    FAIL(VALUE, "%s: reduce='%s' of %s in the layout %s; a ref of 128 rows is needed", name(t),
         pm_enum_text(PM_ENUM_TMEM_REDUCE, reduce), show(t, x),
         pm_enum_text(PM_ENUM_TMEM, m.layout));
  }
  *out = *x;
  out->kind = PM_ARRAY;
  out->space = PM_REGS;
  return pm_type_check(t->g, out, name(t), t->err);
}

pm_code pm_type_tmem_reduced(const pm_typing *t, pm_type *out) {
  const pm_type *x = type_in(t, 0);
  const pm_opid load = pm_value_of(t->g, t->in[0])->def;
  const int64_t reduce = word(t, PM_ATTR_TMEM_REDUCE);
  uint32_t n;
  const int64_t *dims = list_of(t, PM_ATTR_DIMS, &n);
  if (!load || pm_get(t->g, load)->code != PM_OP_LOAD_TMEM || x->rank != 2 || n != 1 ||
      *dims != 1 || !reduce || *pm_attr(t->g, load, PM_ATTR_TMEM_REDUCE) != reduce) {
    FAIL(INTERNAL, "%s: its operand is no load that reduces", name(t));
  }
  *out = *x;
  out->rank = 1;
  out->dim[1] = 0;
  return PM_OK;
}

pm_code pm_type_store_tmem(const pm_typing *t, pm_type *out) {
  const pm_type *ref = type_in(t, 0), *x = type_in(t, 1);
  (void)out;
  if (!same_shape(ref, x) || ref->dtype != x->dtype) {
    FAIL(VALUE, "%s: value is %s, ref %s; shapes and dtypes must be equal", name(t), show(t, x),
         show(t, ref));
  }
  return no_metadata(t);
}

/* ---- products ------------------------------------------------------------------------------- */

pm_code pm_type_tcgen05_commit(const pm_typing *t, pm_type *out) {
  (void)out;
  pm_code rc = pm_single_barrier(t, 0);
  if (rc) return rc;
  if (pm_is_cluster_barrier(t->g, t->in[0])) {
    FAIL(VALUE, "%s: the barrier is a ClusterBarrier; products complete on a Barrier", name(t));
  }
  rc = pm_flavour(t, 0, true);
  if (rc || (rc = has_pair(t))) return rc;
  if (!word(t, PM_ATTR_PAIR)) return PM_OK;
  for (uint32_t k = 0; k + 1 < t->g->n_cluster; k++) {
    if (t->g->cluster[k] == 1) continue;
    FAIL(VALUE,
         "%s: collective_axis in a cluster of more than two blocks; a cluster of two is needed",
         name(t));
  }
  return PM_OK;
}

/* The operands of a product while it is typed. */
typedef struct product {
  const pm_typing *t;
  const pm_type *acc, *a, *b;
  pm_tmem to; /* acc */
  bool pair, in_tmem, scaled, sparse;
} product;

static pm_code product_spaces(product *p) {
  const pm_typing *t = p->t;
  if (p->a->kind != PM_REF || (p->a->space != PM_SMEM && p->a->space != PM_TMEM)) {
    FAIL(VALUE, "%s: a is %s; a ref in SMEM or TMEM is needed", name(t), show(t, p->a));
  }
  p->in_tmem = p->a->space == PM_TMEM;
  if (p->acc->rank != 2 || p->a->rank != 2 || p->b->rank != 2) {
    FAIL(VALUE, "%s: acc has shape %s, a %s, b %s; they must be (M, N), (M, K), (K, N)", name(t),
         show_shape(t, p->acc), show_shape(t, p->a), show_shape(t, p->b));
  }
  p->to = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[0]));
  pm_code rc = has_pair(t);
  if (!rc && !p->in_tmem) rc = pm_own_block(t, 1, "a");
  if (!rc) rc = pm_own_block(t, 2, "b");
  if (rc) return rc;
  if (p->pair && !p->to.pair) {
    FAIL(VALUE, "%s: collective_axis, but acc was not allocated with collective=True", name(t));
  }
  if (!p->pair && p->to.pair) {
    FAIL(VALUE, "%s: acc was allocated with collective=True; collective_axis is needed", name(t));
  }
  if (p->in_tmem && p->pair && !pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[1])).pair) {
    FAIL(VALUE, "%s: collective_axis, but a was not allocated with collective=True", name(t));
  }
  return PM_OK;
}

static pm_code product_shapes(const product *p) {
  const pm_typing *t = p->t;
  const int64_t n = p->b->dim[1] * (p->pair ? 2 : 1), k = p->a->dim[1] * (p->sparse ? 2 : 1);
  if (p->acc->dim[0] != p->a->dim[0] || p->acc->dim[1] != n || k != p->b->dim[0]) {
    FAIL(VALUE, "%s: acc has shape %s, a %s, b %s; they must be (M, N), (M, %s), (K, %s)%s%s",
         name(t), show_shape(t, p->acc), show_shape(t, p->a), show_shape(t, p->b),
         p->sparse ? "K / 2" : "K", p->pair ? "N / 2" : "N", p->sparse ? ", a being sparse" : "",
         p->pair ? ", b being the block's half" : "");
  }
  return PM_OK;
}

static pm_code product_layouts(const product *p) {
  const pm_typing *t = p->t;
  const int64_t m = p->acc->dim[0];
  const int want = m == 128 ? PM_TMEM_DEFAULT : p->pair ? PM_TMEM_M64 : PM_TMEM_HALF;
  if (p->to.layout != want || p->to.packing != 1) {
    FAIL(VALUE,
         "%s: acc is %s in the layout %s, packed %d to 32 bits; with %" PRId64
         " rows it must be %s, not packed",
         name(t), show(t, p->acc), pm_enum_text(PM_ENUM_TMEM, p->to.layout), p->to.packing, m,
         pm_enum_text(PM_ENUM_TMEM, want));
  }
  if (m == 64 && p->in_tmem) {
    FAIL(NOT_IMPLEMENTED, "%s: a in TMEM with 64 rows; 128 are needed", name(t));
  }
  if (m == 64 && p->scaled && !p->pair) {
    FAIL(NOT_IMPLEMENTED, "%s: scales with 64 rows; 128 are needed, or a pair of blocks", name(t));
  }
  if (m == 64 && p->sparse) {
    FAIL(NOT_IMPLEMENTED, "%s: a sparse a with 64 rows; 128 are needed", name(t));
  }
  if (p->in_tmem) {
    const pm_tmem a = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[1]));
    if (a.layout != PM_TMEM_DEFAULT || a.packing * pm_dtypes[a.dtype].bits != 32) {
      FAIL(VALUE,
           "%s: a is %s in TMEM, in the layout %s, packed %d to 32 bits; it must be packed "
           "(packed=True)",
           name(t), show(t, p->a), pm_enum_text(PM_ENUM_TMEM, a.layout), a.packing);
    }
    if (p->scaled && p->sparse) {
      FAIL(NOT_IMPLEMENTED, "%s: a sparse a in TMEM with scales; put a into SMEM", name(t));
    }
  }
  return PM_OK;
}

static const char *dtype_text(const pm_type *x) { return pm_dtypes[x->dtype].text; }

static pm_code product_row(const product *p, const pm_mma **row) {
  const pm_typing *t = p->t;
  const pm_type *s = p->scaled ? type_in(t, 4) : NULL;
  const pm_dtype a = p->a->dtype, b = p->b->dtype, acc = p->acc->dtype;
  *row = NULL;
  if (p->scaled) {
    const int64_t columns = s->rank == 2 ? s->dim[1] : 0;
    if (columns && p->a->dim[1] % columns == 0) {
      *row = pm_mma_find_scaled(t->code, a, b, acc, s->dtype, p->a->dim[1] / columns);
    }
    if (*row) return PM_OK;
    FAIL(VALUE,
         "%s: a is %s, b %s, acc %s, a_scale %s; float8 takes float8_e8m0fnu scales, one for 32 "
         "elements along K, float4_e2m1fn the same, or float8_e8m0fnu or float8_e4m3fn, one for "
         "16 (twice as many with a sparse a); acc is float32",
         name(t), show(t, p->a), show(t, p->b), show(t, p->acc), show(t, s));
  }
  *row = pm_mma_find(t->code, a, b, acc);
  if (*row) return PM_OK;
  if (a == PM_F32) {
    FAIL(NOT_IMPLEMENTED, "%s: operands of dtype float32; available are %s", name(t),
         pm_operand_dtypes(t));
  }
  if (a == PM_E2M1 || b == PM_E2M1) {
    FAIL(VALUE, "%s: float4_e2m1fn operands need a_scale and b_scale", name(t));
  }
  FAIL(VALUE,
       "%s: a is %s, b %s, acc %s; a and b have one dtype (float8_e4m3fn and float8_e5m2 may mix) "
       "of %s; acc is float32, for float16 and float8 also float16, for int8 and uint8 int32",
       name(t), dtype_text(p->a), dtype_text(p->b), dtype_text(p->acc), pm_operand_dtypes(t));
}

/* N of the accumulator; what one instruction cannot take is cut into several. */
static pm_code product_columns(const product *p, const pm_mma *row) {
  const pm_typing *t = p->t;
  const int64_t n = p->acc->dim[1];
  const bool halves = p->pair || p->acc->dim[0] == 64;
  int64_t unit = row->n * (p->pair ? 4 : halves ? 2 : 1);
  if (n % unit) {
    FAIL(VALUE,
         "%s: N is %" PRId64
         " (columns of acc); for %s operands%s it must be a multiple of "
         "%" PRId64,
         name(t), n, dtype_text(p->a),
         p->pair  ? " of a pair"
         : halves ? " and 64 rows"
                  : "",
         unit);
  }
  if (p->sparse && n % 16) {
    FAIL(NOT_IMPLEMENTED,
         "%s: N is %" PRId64 " (columns of acc); with a sparse a a multiple of 16 is needed",
         name(t), n);
  }
  const int64_t most = p->pair ? row->most_n : 2 * row->most_n;
  if (n > most) {
    FAIL(VALUE, "%s: N is %" PRId64 " (columns of acc); at most %" PRId64 " are accepted%s",
         name(t), n, most, p->pair ? " with a pair" : "");
  }
  if (n > row->most_n && (p->scaled || p->sparse)) {
    FAIL(NOT_IMPLEMENTED,
         "%s: N is %" PRId64
         " (columns of acc); with scales or a sparse a at most %d are accepted: several products",
         name(t), n, (int)row->most_n);
  }
  return PM_OK;
}

static pm_code product_depth(const product *p, const pm_mma *row) {
  const pm_typing *t = p->t;
  const int64_t k = p->b->dim[0];
  int64_t unit = row->k * (p->sparse ? 2 : 1);
  if (p->sparse) unit = pm_max(unit, 64);
  if (row->block) unit = pm_max(unit, 4 * row->block * (p->sparse ? 2 : 1));
  if (k % unit == 0) return PM_OK;
  FAIL(VALUE, "%s: K is %" PRId64 "; for %s operands%s%s it must be a multiple of %" PRId64,
       name(t), k, dtype_text(p->a), p->scaled ? " with scales" : "",
       p->sparse ? ", a being sparse," : "", unit);
}

static pm_code is_layout(const pm_typing *t, uint32_t k, const char *what, int layout, int64_t rows,
                         int64_t columns) {
  const pm_type *x = type_in(t, k);
  const pm_tmem m = pm_tmem_of(t->g, pm_tmem_alloc(t->g, t->in[k]));
  if (m.layout == layout && x->rank == 2 && x->dim[0] == rows && x->dim[1] == columns) return PM_OK;
  FAIL(VALUE, "%s: %s has shape %s and the layout %s; (%" PRId64 ", %" PRId64 ") and %s are needed",
       name(t), what, show_shape(t, x), pm_enum_text(PM_ENUM_TMEM, m.layout), rows, columns,
       pm_enum_text(PM_ENUM_TMEM, layout));
}

static pm_code product_extras(const product *p, const pm_mma *row) {
  const pm_typing *t = p->t;
  const bool m64 = p->acc->dim[0] == 64;
  pm_code rc = PM_OK;
  if (p->scaled) {
    const int64_t columns = p->a->dim[1] / row->block;
    if (type_in(t, 4)->dtype != type_in(t, 5)->dtype) {
      FAIL(VALUE, "%s: a_scale is %s, b_scale %s; they must be equal", name(t),
           dtype_text(type_in(t, 4)), dtype_text(type_in(t, 5)));
    }
    rc = is_layout(t, 4, "a_scale", PM_TMEM_SCALES, 128, columns);
    if (rc) return rc;
    rc = is_layout(t, 5, "b_scale", m64 ? PM_TMEM_SCALES_M64 : PM_TMEM_SCALES,
                   m64 ? 256 : pm_round_up(p->acc->dim[1], 128), columns);
  }
  if (rc || !p->sparse) return rc;
  const int64_t pairs = p->a->dim[1] / (pm_dtypes[p->a->dtype].bits == 4 ? 2 : 1);
  return is_layout(t, t->n_in - 1, "a_sparse_metadata", PM_TMEM_METADATA, 128, pairs);
}

pm_code pm_type_tcgen05_mma(const pm_typing *t, pm_type *out) {
  (void)out;
  const uint32_t more = t->n_in - 4;
  const pm_dtype small = word(t, PM_ATTR_PACKED) ? PM_E2M1 : PM_U8;
  const pm_type a = unpacked(type_in(t, 1), 1, small), b = unpacked(type_in(t, 2), 0, small);
  product p = {.t = t,
               .acc = type_in(t, 0),
               .a = &a,
               .b = &b,
               .pair = word(t, PM_ATTR_PAIR),
               .scaled = more >= 2,
               .sparse = more & 1};
  const pm_mma *row = NULL;
  if (more > 3) FAIL(INTERNAL, "%s: %u operands", name(t), t->n_in);
  pm_code rc = product_spaces(&p);
  if (!rc) rc = product_shapes(&p);
  if (!rc) rc = product_layouts(&p);
  if (!rc) rc = product_row(&p, &row);
  if (!rc) rc = product_columns(&p, row);
  if (!rc) rc = product_depth(&p, row);
  return rc ? rc : product_extras(&p, row);
}
