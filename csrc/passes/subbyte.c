/* Refs of elements below 8 bits become refs of bytes.
 *
 * In memory, two neighbours of the last dimension share a byte (four if they have 2 bits), the
 * first one in the low bits. So a ref (..., N) of 4-bit elements becomes a ref (..., N / 2) of
 * uint8, and everything after this pass (copies, layouts, both back ends) sees bytes. Values in
 * registers do not change: one register for each element. A load is followed by UNPACK, a store
 * preceded by PACK. For 2 bits there are two of each, with uint4 in between.
 *
 * Memory is addressed by bytes, so slices of the last dimension must start and end at byte
 * boundaries. A transpose that moves the last dimension is deferred: a view of the transposed ref
 * is the same view of the original ref, and the load or store transposes the values in registers.
 * Copies of such views are refused. */
#include "passes.h"

typedef struct packer {
  pm_graph *g;
  pm_err *err;
  pm_code code;
  pm_val *now; /* by value: what its users read instead */
  struct transpose {
    pm_val base; /* 0: not such a view */
    int64_t dims[PM_MAX_RANK];
  } * transposes; /* by value: a view whose dim k is dim dims[k] of base, with the last dim moved */
  uint32_t n_values;
} packer;

static bool is_small(const pm_type *t) {
  return (t->kind == PM_REF || t->kind == PM_ARRAY) && pm_dtypes[t->dtype].bits < 8;
}

static bool is_packed_ref(const pm_graph *g, pm_val v) {
  const pm_type *t = pm_typeof(g, v);
  return pm_is_memory(t) && is_small(t);
}

/* Elements that share a byte. */
static int64_t per_byte(const pm_type *t) { return 8 / pm_dtypes[t->dtype].bits; }

static pm_type bytes_of(pm_type t) {
  t.dim[t.rank - 1] /= per_byte(&t);
  t.dtype = PM_U8;
  return t;
}

/* Two elements in one of twice as many bits. */
static pm_type pairs_of(pm_type t) {
  t.dim[t.rank - 1] /= 2;
  t.dtype = pm_dtypes[t.dtype].bits == 4 ? PM_U8 : PM_UINT4;
  return t;
}

static void refuse(packer *p, pm_opid op, pm_val v, const char *why) {
  if (p->code) return;
  p->code =
      pm_fail(p->err, PM_E_NOT_IMPLEMENTED, "%s of %s: %s", pm_op_name(pm_get(p->g, op)->code),
              pm_type_text(p->g->arena, pm_typeof(p->g, v)), why);
  pm_err_op(p->err, p->g, op);
}

/* Convert starts and sizes of the last dim to bytes. Returns how many ops were inserted before. */
static uint32_t divide_index(packer *p, pm_opid op) {
  pm_graph *g = p->g;
  const int64_t per = per_byte(pm_typeof(g, pm_in(g, op, 0)));
  const char *whole = pm_printf(
      g->arena,
      "%s elements share a byte, so a slice of the last dim must begin and end at multiples of %d, "
      "without a stride (a traced start: pl.multiple_of(start, %d)), and an int index of it is not "
      "supported; load the row, or convert the array to int8",
      per == 2 ? "two" : "four", (int)per, (int)per);
  uint32_t n;
  int64_t starts[PM_MAX_RANK], sizes[PM_MAX_RANK];
  const int64_t *from_list = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  memcpy(starts, from_list, sizeof(int64_t) * n);
  from_list = pm_attr_list(g, op, PM_ATTR_SIZES, &n);
  memcpy(sizes, from_list, sizeof(int64_t) * n);
  uint32_t n_strides;
  const int64_t *strides = pm_attr_list(g, op, PM_ATTR_STRIDES, &n_strides);
  const bool spread = n_strides && strides[n - 1] != 1;
  const pm_val from = pm_in(g, op, 0);
  const bool traced = starts[n - 1] == PM_DYNAMIC;
  const uint32_t last = pm_get(g, op)->n_in - 1;
  if (spread || sizes[n - 1] == PM_DROPPED || sizes[n - 1] % per ||
      (!traced && starts[n - 1] % per) || (traced && pm_divisor(g, pm_in(g, op, last)) % per)) {
    refuse(p, op, from, whole);
    return 0;
  }
  sizes[n - 1] /= per;
  if (!traced) starts[n - 1] /= per;
  pm_set_list(g, op, PM_ATTR_STARTS, starts, n);
  pm_set_list(g, op, PM_ATTR_SIZES, sizes, n);
  if (!traced) return 0;
  const pm_type type = pm_scalar_type(PM_I32);
  const pm_val in[2] = {pm_in(g, op, last), pm_insert_number(g, op, per, op)};
  const pm_val half = pm_insert_value(g, op, PM_OP_DIV, in, 2, &type, NULL, 0, op);
  g->operands.at[pm_get(g, op)->in + last] = half;
  return 2;
}

static bool keeps_last(const pm_graph *g, pm_opid op) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  return dims[n - 1] == n - 1;
}

/* ---- transposes of the last dim ------------------------------------------------------------ */

static const struct transpose *transpose_of(const packer *p, pm_val v) {
  return v < p->n_values && p->transposes[v].base ? &p->transposes[v] : NULL;
}

/* A transpose, perhaps of a transpose. */
static void note_transpose(packer *p, pm_opid op) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(p->g, op, PM_ATTR_DIMS, &n);
  const struct transpose *before = transpose_of(p, pm_in(p->g, op, 0));
  struct transpose *t = &p->transposes[pm_get(p->g, op)->out];
  t->base = before ? before->base : pm_in(p->g, op, 0);
  for (uint32_t k = 0; k < n; k++) t->dims[k] = before ? before->dims[dims[k]] : dims[k];
}

/* An index of a transpose becomes the transpose of an index: the op takes the base as its operand,
 * with its entries in the order of the base's dims. */
static void transpose_index(packer *p, pm_opid op) {
  pm_graph *g = p->g;
  const struct transpose from = *transpose_of(p, pm_in(g, op, 0));
  const pm_val out = pm_get(g, op)->out;
  struct transpose *to = &p->transposes[out];
  int64_t starts[PM_MAX_RANK], sizes[PM_MAX_RANK], strides[PM_MAX_RANK], kept[PM_MAX_RANK];
  pm_val in[PM_MAX_RANK] = {0}, traced[PM_MAX_RANK];
  uint32_t n, n_strides, next = 1, n_kept = 0;
  const int64_t *old_strides = pm_attr_list(g, op, PM_ATTR_STRIDES, &n_strides);
  const int64_t *old_starts = pm_attr_list(g, op, PM_ATTR_STARTS, &n);
  const int64_t *old_sizes = pm_attr_list(g, op, PM_ATTR_SIZES, &n);
  for (uint32_t k = 0; k < n; k++) {
    const int64_t d = from.dims[k];
    starts[d] = old_starts[k];
    sizes[d] = old_sizes[k];
    strides[d] = n_strides ? old_strides[k] : 1;
    if (starts[d] == PM_DYNAMIC) traced[d] = pm_in(g, op, next++);
  }
  pm_type type = *pm_typeof(g, out);
  for (uint32_t d = 0; d < n; d++) { /* kept[d]: its position among the remaining dims */
    kept[d] = n_kept;
    n_kept += sizes[d] != PM_DROPPED;
  }
  uint32_t rank = 0;
  for (uint32_t k = 0; k < n; k++) {
    if (sizes[from.dims[k]] == PM_DROPPED) continue;
    to->dims[rank] = kept[from.dims[k]];
    type.dim[to->dims[rank]] = pm_typeof(g, out)->dim[rank];
    rank++;
  }
  next = 1;
  for (uint32_t d = 0; d < n; d++) {
    if (starts[d] == PM_DYNAMIC) in[next++] = traced[d];
  }
  g->operands.at[pm_get(g, op)->in] = from.base;
  for (uint32_t k = 1; k < next; k++) g->operands.at[pm_get(g, op)->in + k] = in[k];
  pm_set_list(g, op, PM_ATTR_STARTS, starts, n);
  pm_set_list(g, op, PM_ATTR_SIZES, sizes, n);
  if (n_strides) pm_set_list(g, op, PM_ATTR_STRIDES, strides, n);
  pm_value_of(g, out)->type = type;
  bool same = true;
  for (uint32_t k = 0; k < rank; k++) same &= to->dims[k] == k;
  to->base = same ? 0 : out; /* the view before the transpose */
}

/* Transpose the value before a store through a transpose, or the result after such a load. */
static pm_val transposed(packer *p, pm_val x, const int64_t *dims, pm_blk block, uint32_t at,
                         pm_opid op) {
  pm_graph *g = p->g;
  pm_type type = *pm_typeof(g, x);
  const uint32_t rank = (uint32_t)type.rank;
  for (uint32_t k = 0; k < rank; k++) type.dim[k] = pm_typeof(g, x)->dim[dims[k]];
  const pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = dims, .n = rank};
  return pm_get(g, pm_insert(g, block, at, PM_OP_TRANSPOSE, &x, 1, &type, 1, &attr, 1, op))->out;
}

/* ---- allocations, loads, stores ------------------------------------------------------------- */

/* A tile of 8 rows has a swizzle of bytes in each. */
static void divide_tiling(packer *p, pm_opid op) {
  uint32_t n;
  int64_t tile[PM_MAX_RANK];
  const int64_t *tiling = pm_attr_list(p->g, op, PM_ATTR_TILING, &n);
  if (!n) return;
  memcpy(tile, tiling, sizeof(int64_t) * n);
  tile[n - 1] /= per_byte(pm_typeof(p->g, pm_get(p->g, op)->out));
  pm_set_list(p->g, op, PM_ATTR_TILING, tile, n);
}

/* x unpacked to elements of `type`, made before position `at`. */
static pm_val unpacked(pm_graph *g, pm_val x, const pm_type *type, pm_blk block, uint32_t at,
                       pm_opid op) {
  return pm_get(g, pm_insert(g, block, at, PM_OP_UNPACK, &x, 1, type, 1, NULL, 0, op))->out;
}

/* x in another layout, made before position `at`. */
static pm_val laid_out(pm_graph *g, pm_val x, pm_layid to, pm_blk block, uint32_t at, pm_opid op) {
  const pm_type type = *pm_typeof(g, x);
  const pm_attr_arg layout = {.id = PM_ATTR_LAYOUT, .i = to};
  return pm_get(g, pm_insert(g, block, at, PM_OP_LAYOUT_CAST, &x, 1, &type, 1, &layout, 1, op))
      ->out;
}

/* The load produces bytes, and UNPACKs produce its former result in the layout the user requested.
 * A load through a transpose loads from the base and transposes the result. Returns how many ops
 * were inserted after it. */
static uint32_t split_load(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const pm_val out = pm_get(g, op)->out;
  const struct transpose *transpose = transpose_of(p, pm_in(g, op, 0));
  pm_type whole = *pm_typeof(g, out);
  const pm_layid wanted = (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT);
  if (transpose) {
    g->operands.at[pm_get(g, op)->in] = transpose->base;
    for (int k = 0; k < whole.rank; k++) {
      whole.dim[transpose->dims[k]] = pm_typeof(g, out)->dim[k];
    }
  }
  const pm_type pairs = pairs_of(whole), bytes = bytes_of(whole);
  const bool twice = pairs.dtype != PM_U8;
  pm_layid half = wanted && !transpose ? pm_layout_halved(g, wanted, &pairs) : 0;
  if (half && twice) half = pm_layout_halved(g, half, &bytes);
  *pm_attr(g, op, PM_ATTR_LAYOUT) = half;
  pm_value_of(g, out)->type = bytes;
  uint32_t n = 0;
  pm_val now = out;
  if (twice) now = unpacked(g, now, &pairs, block, at + ++n, op);
  now = unpacked(g, now, &whole, block, at + ++n, op);
  if (transpose) {
    now = transposed(p, now, transpose->dims, block, at + ++n, op);
  }
  if (wanted && !half) now = laid_out(g, now, wanted, block, at + ++n, op);
  p->now[out] = now;
  pm_value_of(g, now)->name = pm_value_of(g, out)->name;
  return n;
}

/* Returns how many ops were inserted before it. */
static uint32_t split_store(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const struct transpose *transpose = transpose_of(p, pm_in(g, op, 0));
  pm_val x = pm_in(g, op, 1);
  uint32_t n = 0;
  if (transpose) {
    int64_t back[PM_MAX_RANK];
    for (int k = 0; k < pm_typeof(g, x)->rank; k++) back[transpose->dims[k]] = k;
    g->operands.at[pm_get(g, op)->in] = transpose->base;
    x = transposed(p, x, back, block, at + n++, op);
  }
  for (bool more = true; more;) {
    const pm_type pairs = pairs_of(*pm_typeof(g, x));
    x = pm_get(g, pm_insert(g, block, at + n++, PM_OP_PACK, &x, 1, &pairs, 1, NULL, 0, op))->out;
    more = pairs.dtype != PM_U8;
  }
  g->operands.at[pm_get(g, op)->in + 1] = x;
  return n;
}

/* A layout_cast of unpacked elements becomes one of their bytes, half as many, if the layout keeps
 * them in pairs. */
static uint32_t move_bytes(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const pm_opid def = pm_value_of(g, pm_in(g, op, 0))->def;
  if (!def || pm_get(g, def)->code != PM_OP_UNPACK) return 0;
  const pm_val in = pm_in(g, def, 0), out = pm_get(g, op)->out;
  const pm_type whole = *pm_typeof(g, out), bytes = *pm_typeof(g, in);
  if (bytes.dtype != PM_U8) return 0;
  const pm_layid half = pm_layout_halved(g, (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT), &bytes);
  if (!half) return 0;
  const pm_val cast = laid_out(g, in, half, block, at, op);
  p->now[out] = unpacked(g, cast, &whole, block, at + 1, op);
  pm_value_of(g, p->now[out])->name = pm_value_of(g, out)->name;
  return 2; /* the op itself is no longer used */
}

/* A product in tensor memory takes bytes as well, and knows how many elements they hold. Of b the
 * view may be transposed. Returns how many ops were inserted before it. */
static uint32_t pack_product(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  uint32_t inserted = 0;
  for (uint32_t k = 1; k < 3; k++) {
    const pm_val v = pm_in(g, op, k);
    if (!is_packed_ref(g, v)) continue;
    *pm_attr(g, op, PM_ATTR_PACKED) = per_byte(pm_typeof(g, v));
    const struct transpose *transpose = transpose_of(p, v);
    if (!transpose) continue;
    if (k == 1 && transpose->dims[1] != 1) {
      p->code = pm_refuse_major(g, op, k, (pm_dtype)pm_typeof(g, v)->dtype, p->err);
    }
    const pm_type base = bytes_of(*pm_typeof(g, transpose->base));
    pm_type type = base;
    for (int d = 0; d < type.rank; d++) type.dim[d] = base.dim[transpose->dims[d]];
    const pm_attr_arg attr = {
        .id = PM_ATTR_DIMS, .list = transpose->dims, .n = (uint32_t)type.rank};
    const pm_opid view = pm_insert(g, block, at + inserted++, PM_OP_TRANSPOSE_REF, &transpose->base,
                                   1, &type, 1, &attr, 1, op);
    g->operands.at[pm_get(g, op)->in + k] = pm_get(g, view)->out;
  }
  return inserted;
}

/* An access to a single element would overwrite the other half of its byte. */
static bool takes_bytes(int code) { return !pm_is_masked(code); }

/* Returns the position after the op and everything inserted for it. */
static uint32_t visit(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const uint32_t n_in = pm_get(g, op)->n_in;
  bool small = false;
  for (uint32_t k = 0; k < n_in; k++) {
    pm_val *v = &g->operands.at[pm_get(g, op)->in + k];
    if (*v < p->n_values && p->now[*v]) *v = p->now[*v];
    small |= is_packed_ref(g, *v);
  }
  const int code = pm_get(g, op)->code;
  if (pm_allocates(g, op, PM_SMEM) && is_packed_ref(g, pm_get(g, op)->out)) divide_tiling(p, op);
  if (code == PM_OP_LAYOUT_CAST) return at + 1 + move_bytes(p, op, block, at);
  if (!small) return at + 1;
  if (!takes_bytes(code)) {
    refuse(p, op, pm_in(g, op, 0),
           "elements share bytes, so they cannot be accessed one by one; load and store whole "
           "rows, or convert the array to int8");
  }
  const struct transpose *transpose = transpose_of(p, pm_in(g, op, 0));
  if (code == PM_OP_PRINT_LAYOUT && is_packed_ref(g, pm_in(g, op, 0))) {
    *pm_attr(g, op, PM_ATTR_PACKED) = per_byte(pm_typeof(g, pm_in(g, op, 0)));
  }
  switch (code) {
    case PM_OP_INDEX:
      if (transpose) transpose_index(p, op);
      return at + 1 + divide_index(p, op);
    case PM_OP_TRANSPOSE_REF:
      if (transpose || !keeps_last(g, op)) note_transpose(p, op);
      return at + 1;
    case PM_OP_TCGEN05_MMA: return at + 1 + pack_product(p, op, block, at);
    case PM_OP_LOAD: return at + 1 + split_load(p, op, block, at);
    case PM_OP_STORE: return at + 1 + split_store(p, op, block, at);
    default: break;
  }
  for (uint32_t k = 0; k < n_in; k++) {
    if (!transpose_of(p, pm_in(g, op, k))) continue;
    refuse(p, op, pm_in(g, op, k),
           "elements of the last dim share bytes, and it is not last here; load and store the "
           "transposed ref, or copy what is transposed");
  }
  return at + 1;
}

static void visit_block(packer *p, pm_blk block) {
  for (uint32_t at = 0; at < p->g->blocks.at[block].ops.n && !p->code;) {
    const pm_opid op = p->g->blocks.at[block].ops.at[at];
    at = visit(p, op, block, at);
    for (uint32_t r = 0; r < pm_get(p->g, op)->n_regions && !p->code; r++) {
      visit_block(p, pm_region(p->g, op, r));
    }
  }
}

static pm_code check_rows(packer *p, pm_val v) {
  const pm_type *t = pm_typeof(p->g, v);
  const int64_t per = per_byte(t);
  if (t->rank && t->dim[t->rank - 1] % per == 0) return PM_OK;
  const pm_opid def = pm_value_of(p->g, v)->def;
  pm_fail(p->err, PM_E_NOT_IMPLEMENTED,
          "%s: %s elements of the last dim share a byte, so its size must be a multiple of %d; pad "
          "it, or convert the array to int8",
          pm_type_text(p->g->arena, t), per == 2 ? "two" : "four", (int)per);
  if (def) pm_err_op(p->err, p->g, def);
  return p->err->code;
}

pm_code pm_pack_refs(pm_graph *g, const pm_target *target, pm_err *err) {
  packer p = {.g = g, .err = err, .n_values = g->values.n};
  bool any = false;
  (void)target;
  for (pm_val v = 1; v < g->values.n; v++) any |= is_packed_ref(g, v);
  if (!any) return PM_OK;
  p.now = PM_NEW(g->arena, pm_val, g->values.n);
  p.transposes = PM_NEW(g->arena, struct transpose, g->values.n);
  visit_block(&p, 1);
  for (pm_val v = 1; v < p.n_values && !p.code; v++) {
    if (!is_packed_ref(g, v)) continue;
    if (transpose_of(&p, v) &&
        p.transposes[v].base != v) { /* unused: any view of the base will do */
      int64_t dims[PM_MAX_RANK];
      const pm_opid def = pm_value_of(g, v)->def;
      const pm_type type = *pm_typeof(g, p.transposes[v].base);
      for (int k = 0; k < type.rank; k++) dims[k] = k;
      pm_set_list(g, def, PM_ATTR_DIMS, dims, (uint32_t)type.rank);
      g->operands.at[pm_get(g, def)->in] = p.transposes[v].base;
      pm_value_of(g, v)->type = type;
      continue;
    }
    p.code = check_rows(&p, v);
    if (!p.code) pm_value_of(g, v)->type = bytes_of(*pm_typeof(g, v));
  }
  return p.code;
}
