/* Refs of elements below 8 bits become refs of bytes.
 *
 * In memory two neighbours of the last dim share a byte, the first of them in its low half. So a
 * ref (..., N) of them is one of uint8 (..., N / 2), and all that comes after this pass (copies,
 * layouts, both back ends) sees bytes. Values in registers stay what they were, one register for
 * each element: a load is followed by UNPACK, a store preceded by PACK.
 *
 * A byte is the least that memory has: the last dim stays last, and slices of it begin and end at
 * even indices. */
#include "passes.h"

typedef struct packer {
  pm_graph *g;
  pm_err *err;
  pm_code code;
  pm_val *now; /* by value: what its users read instead */
  uint32_t n_values;
} packer;

static bool is_small(const pm_type *t) {
  return (t->kind == PM_REF || t->kind == PM_ARRAY) && pm_dtypes[t->dtype].bits < 8;
}

static bool is_packed_ref(const pm_graph *g, pm_val v) {
  const pm_type *t = pm_typeof(g, v);
  return t->kind == PM_REF && t->space != PM_REGS && is_small(t);
}

static pm_type bytes_of(pm_type t) {
  t.dtype = PM_U8;
  t.dim[t.rank - 1] /= 2;
  return t;
}

static void refuse(packer *p, pm_opid op, pm_val v, const char *why) {
  if (p->code) return;
  p->code =
      pm_fail(p->err, PM_E_NOT_IMPLEMENTED, "%s of %s: %s", pm_ops[pm_get(p->g, op)->code].text,
              pm_type_text(p->g->arena, pm_typeof(p->g, v)), why);
  pm_err_op(p->err, p->g, op);
}

static pm_val constant(packer *p, pm_blk block, uint32_t at, int64_t i, pm_opid op) {
  const pm_type type = pm_scalar_type(PM_I32);
  const pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = i};
  return pm_get(p->g, pm_insert(p->g, block, at, PM_OP_CONST, NULL, 0, &type, 1, &value, 1, op))
      ->out;
}

/* Starts and sizes of the last dim, in bytes. Returns how many ops were put before. */
static uint32_t halve_index(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  static const char even[] =
      "two elements share a byte, so a slice of the last dim must begin and end at even indices, "
      "without a stride (a traced start: pl.multiple_of(start, 2)), and an int index of it is not "
      "supported; load "
      "the row, or convert the array to int8";
  pm_graph *g = p->g;
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
  if (spread || sizes[n - 1] == PM_DROPPED || sizes[n - 1] % 2 || (!traced && starts[n - 1] % 2) ||
      (traced && pm_divisor(g, pm_in(g, op, last)) % 2)) {
    refuse(p, op, from, even);
    return 0;
  }
  sizes[n - 1] /= 2;
  if (!traced) starts[n - 1] /= 2;
  pm_set_list(g, op, PM_ATTR_STARTS, starts, n);
  pm_set_list(g, op, PM_ATTR_SIZES, sizes, n);
  if (!traced) return 0;
  const pm_type type = pm_scalar_type(PM_I32);
  const pm_val in[2] = {pm_in(g, op, last), constant(p, block, at, 2, op)};
  const pm_opid half = pm_insert(g, block, at + 1, PM_OP_DIV, in, 2, &type, 1, NULL, 0, op);
  g->operands.at[pm_get(g, op)->in + last] = pm_get(g, half)->out;
  return 2;
}

static void keep_last(packer *p, pm_opid op) {
  uint32_t n;
  const int64_t *dims = pm_attr_list(p->g, op, PM_ATTR_DIMS, &n);
  if (dims[n - 1] != n - 1) {
    refuse(p, op, pm_in(p->g, op, 0),
           "two elements of the last dim share a byte; it must stay last");
  }
}

/* A tile of 8 rows has a swizzle of bytes in each. */
static void halve_tiling(packer *p, pm_opid op) {
  uint32_t n;
  int64_t tile[PM_MAX_RANK];
  const int64_t *tiling = pm_attr_list(p->g, op, PM_ATTR_TILING, &n);
  if (!n) return;
  memcpy(tile, tiling, sizeof(int64_t) * n);
  tile[n - 1] /= 2;
  pm_set_list(p->g, op, PM_ATTR_TILING, tile, n);
}

/* The load gives bytes; what it gave comes from an UNPACK, in the layout the user asked for. */
static uint32_t split_load(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const pm_val out = pm_get(g, op)->out;
  const pm_type whole = *pm_typeof(g, out), bytes = bytes_of(whole);
  const pm_layid wanted = (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT);
  const pm_layid half = wanted ? pm_layout_halved(g, wanted, &bytes) : 0;
  *pm_attr(g, op, PM_ATTR_LAYOUT) = half;
  pm_value_of(g, out)->type = bytes;
  pm_opid made = pm_insert(g, block, at + 1, PM_OP_UNPACK, &out, 1, &whole, 1, NULL, 0, op);
  uint32_t n = 1;
  if (wanted && !half) {
    const pm_val unpacked = pm_get(g, made)->out;
    const pm_attr_arg layout = {.id = PM_ATTR_LAYOUT, .i = wanted};
    made = pm_insert(g, block, at + 2, PM_OP_LAYOUT_CAST, &unpacked, 1, &whole, 1, &layout, 1, op);
    n = 2;
  }
  p->now[out] = pm_get(g, made)->out;
  pm_value_of(g, p->now[out])->name = pm_value_of(g, out)->name;
  return n;
}

static void split_store(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const pm_val x = pm_in(g, op, 1);
  const pm_type bytes = bytes_of(*pm_typeof(g, x));
  const pm_opid made = pm_insert(g, block, at, PM_OP_PACK, &x, 1, &bytes, 1, NULL, 0, op);
  g->operands.at[pm_get(g, op)->in + 1] = pm_get(g, made)->out;
}

/* A layout_cast of unpacked elements becomes one of their bytes, half as many, where the layout
 * keeps them in pairs. */
static uint32_t move_bytes(packer *p, pm_opid op, pm_blk block, uint32_t at) {
  pm_graph *g = p->g;
  const pm_opid def = pm_value_of(g, pm_in(g, op, 0))->def;
  if (!def || pm_get(g, def)->code != PM_OP_UNPACK) return 0;
  const pm_val in = pm_in(g, def, 0), out = pm_get(g, op)->out;
  const pm_type whole = *pm_typeof(g, out), bytes = *pm_typeof(g, in);
  const pm_attr_arg layout = {
      .id = PM_ATTR_LAYOUT,
      .i = pm_layout_halved(g, (pm_layid)*pm_attr(g, op, PM_ATTR_LAYOUT), &bytes)};
  if (!layout.i) return 0;
  const pm_opid moved =
      pm_insert(g, block, at, PM_OP_LAYOUT_CAST, &in, 1, &bytes, 1, &layout, 1, op);
  const pm_val cast = pm_get(g, moved)->out;
  const pm_opid made = pm_insert(g, block, at + 1, PM_OP_UNPACK, &cast, 1, &whole, 1, NULL, 0, op);
  p->now[out] = pm_get(g, made)->out;
  pm_value_of(g, p->now[out])->name = pm_value_of(g, out)->name;
  return 2; /* nobody uses the op itself any more */
}

/* Accesses of single elements cannot leave the other half of a byte alone. */
static bool takes_bytes(int code) {
  return code != PM_OP_MASKED_LOAD && code != PM_OP_MASKED_STORE && code != PM_OP_ATOMIC;
}

/* Returns the position behind the op and what was made for it. */
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
  if (code == PM_OP_ALLOC_SMEM && is_packed_ref(g, pm_get(g, op)->out)) halve_tiling(p, op);
  if (code == PM_OP_LAYOUT_CAST) return at + 1 + move_bytes(p, op, block, at);
  if (!small) return at + 1;
  if (!takes_bytes(code)) {
    refuse(p, op, pm_in(g, op, 0),
           "two elements share a byte, so they cannot be accessed one by one; load and store whole "
           "rows, or convert the array to int8");
  }
  switch (code) {
    case PM_OP_INDEX: return at + 1 + halve_index(p, op, block, at);
    case PM_OP_TRANSPOSE_REF: keep_last(p, op); return at + 1;
    case PM_OP_LOAD: return at + 1 + split_load(p, op, block, at);
    case PM_OP_STORE: split_store(p, op, block, at); return at + 2;
    default: return at + 1;
  }
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
  if (t->rank && t->dim[t->rank - 1] % 2 == 0) return PM_OK;
  const pm_opid def = pm_value_of(p->g, v)->def;
  pm_fail(p->err, PM_E_NOT_IMPLEMENTED,
          "%s: two elements of the last dim share a byte, so its size must be even; pad it, or "
          "convert the array to int8",
          pm_type_text(p->g->arena, t));
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
  visit_block(&p, 1);
  for (pm_val v = 1; v < p.n_values && !p.code; v++) {
    if (!is_packed_ref(g, v)) continue;
    p.code = check_rows(&p, v);
    if (!p.code) pm_value_of(g, v)->type = bytes_of(*pm_typeof(g, v));
  }
  return p.code;
}
