/* Layouts and views of tensor memory, and the operands of tcgen05 products: see tmem.h. */
#include "tmem.h"

#include "layout.h"
#include "mma.h"

/* ---- allocations ---------------------------------------------------------------------------- */

int pm_tmem_copies(const pm_tmem *m) {
  return m->layout == PM_TMEM_SCALES ? 4 : m->layout == PM_TMEM_SCALES_M64 ? 2 : 1;
}

pm_tmem pm_tmem_of(const pm_graph *g, pm_opid alloc) {
  const pm_type *t = pm_typeof(g, pm_get(g, alloc)->out);
  pm_tmem m = {.layout = (uint8_t)*pm_attr(g, alloc, PM_ATTR_TMEM_LAYOUT),
               .dtype = (pm_dtype)t->dtype,
               .packing = (int)*pm_attr(g, alloc, PM_ATTR_PACKING),
               .batch = 1,
               .rows = t->dim[t->rank - 2],
               .columns = t->dim[t->rank - 1],
               .offset = *pm_attr(g, alloc, PM_ATTR_OFFSET),
               .pair = *pm_attr(g, alloc, PM_ATTR_PAIR)};
  for (int k = 0; k < t->rank - 2; k++) m.batch *= t->dim[k];
  m.width = m.rows * m.columns * pm_tmem_copies(&m) / PM_TMEM_LANES / m.packing;
  return m;
}

int64_t pm_tmem_size(const pm_tmem *m) { return pm_round_up(m->batch * m->width, 4); }

int64_t pm_tmem_tile(const pm_tmem *m) {
  switch (m->layout) {
    case PM_TMEM_DEFAULT: return m->packing;
    case PM_TMEM_SCALES:
    case PM_TMEM_SCALES_M64: return 4;
    case PM_TMEM_METADATA: return 64;
    default: return m->columns;
  }
}

pm_tmem_cell pm_tmem_at(const pm_tmem *m, int64_t i, int64_t j, int k) {
  const int64_t half = m->columns / 2, bits = pm_dtypes[m->dtype].bits;
  pm_tmem_cell c = {.bit = (int)(j % m->packing * bits)};
  switch (m->layout) {
    case PM_TMEM_HALF:
      c.lane = (int)(32 * (i / 16) + 16 * (j / half) + i % 16);
      c.column = j % half / m->packing;
      break;
    case PM_TMEM_M64:
      c.lane = (int)(64 * (j / half) + i);
      c.column = j % half / m->packing;
      break;
    case PM_TMEM_SCALES:
      c.lane = (int)(32 * k + i % 32);
      c.column = j / 4 * (m->rows / 32) + 4 * (i / 128) + i % 128 / 32;
      break;
    case PM_TMEM_SCALES_M64:
      c.lane = (int)(64 * (i / 128) + 32 * k + i % 32);
      c.column = j / 4 * 4 + i % 128 / 32;
      break;
    default: c.lane = (int)i; c.column = j / m->packing;
  }
  return c;
}

/* ---- views ---------------------------------------------------------------------------------- */

pm_opid pm_tmem_alloc(const pm_graph *g, pm_val ref) {
  const pm_type *t = pm_typeof(g, ref);
  if (t->kind != PM_REF || t->space != PM_TMEM) return 0;
  const pm_opid def = pm_value_of(g, pm_view_base(g, ref))->def;
  return def && pm_allocates(g, def, PM_TMEM) ? def : 0;
}

/* The dimensions that a view has lost are numbers of the batch; it starts at row 0. */
pm_code pm_tmem_view_of(const pm_graph *g, pm_val ref, pm_tmem_view *out, pm_err *err) {
  const pm_type *t = pm_typeof(g, ref);
  pm_view v;
  memset(out, 0, sizeof *out);
  if (pm_view_of(g, ref, false, &v, err)) return err->code;
  out->alloc = v.alloc;
  out->of = pm_tmem_of(g, v.alloc);
  out->batch = 1;
  for (int k = 0; k < t->rank - 2; k++) out->batch *= t->dim[k];
  out->rows = t->dim[t->rank - 2];
  out->columns = t->dim[t->rank - 1];
  const int last = v.base_rank - 1;
  const int64_t tile = pm_tmem_tile(&out->of), step = out->of.width * tile / out->of.columns;
  int64_t stride[PM_MAX_RANK], matrices = 1; /* of a dimension of the batch, in columns of TMEM */
  for (int k = last - 2; k >= 0; k--) {
    stride[k] = matrices * out->of.width;
    matrices *= v.base_shape[k];
    out->column += v.start[k] * stride[k];
  }
  out->column += v.start[last] / tile * step;
  for (uint32_t k = 0; k < v.n_start_terms; k++) {
    const bool column = v.start_term[k].dim == last;
    out->term[out->n_terms++] =
        (pm_term){.val = v.start_term[k].val,
                  .mul = column ? step : v.start_term[k].mul * stride[v.start_term[k].dim],
                  .div = column ? tile : 1};
  }
  return PM_OK;
}

/* ---- registers ------------------------------------------------------------------------------ */

/* Each lane holds what lies in its own lane of TMEM, column by column; 0: some of the 32 bits are
 * unused, or the rows are in two tiles. */
static pm_layid native(pm_graph *g, const pm_tmem *m, const pm_type *array) {
  const int64_t p = m->packing, c = array->dim[1], half = c / 2;
  pm_tiling t = {.named = true, .n = 2, .rank = {2, 2}, .n_warp = 1, .n_lane = 1, .vector = -1};
  const int64_t bits = pm_dtypes[m->dtype].bits;
  pm_layid l = 0;
  pm_err ignored;
  if (p * bits != 32) return 0;
  switch (m->layout) {
    case PM_TMEM_DEFAULT: return pm_layout_constant(g, PM_LAYOUT_TCGEN05_TMEM_NATIVE, &p, 1, array);
    case PM_TMEM_M64:
      return pm_layout_constant(g, PM_LAYOUT_TCGEN05_M64_COLLECTIVE_NATIVE, (int64_t[]){c, p}, 2,
                                array);
    case PM_TMEM_HALF:
      memcpy(t.tile, (int64_t[][PM_MAX_RANK]){{64, c}, {16, half}}, 2 * sizeof t.tile[0]);
      t.warp[0] = -4;
      t.n_lane = 2;
      t.lane[0] = -3;
      t.lane[1] = -2;
      break;
    case PM_TMEM_SCALES:
      memcpy(t.tile, (int64_t[][PM_MAX_RANK]){{128, 4}, {32, 4}}, 2 * sizeof t.tile[0]);
      t.warp[0] = PM_REPLICATED + 4;
      t.lane[0] = -2;
      break;
    default: return 0;
  }
  memset(&ignored, 0, sizeof ignored);
  return pm_layout_of_tiling(g, array, &t, &l, &ignored) ? 0 : l;
}

pm_layid pm_tmem_registers(pm_graph *g, pm_val ref, const pm_type *array, bool rows, uint32_t k) {
  const pm_tmem m = pm_tmem_of(g, pm_tmem_alloc(g, ref));
  const int64_t bits = pm_dtypes[m.dtype].bits, c = array->dim[1], two = 2;
  pm_layid found[4] = {0};
  uint32_t n = 0;
  const bool plain = m.layout == PM_TMEM_DEFAULT && bits >= 16;
  if (plain && !rows && c % 8 == 0) {
    found[n++] = pm_layout_constant(g, PM_LAYOUT_TCGEN05, NULL, 0, array);
  } else if (m.layout == PM_TMEM_HALF && bits >= 16) {
    found[n++] = pm_layout_constant(g, PM_LAYOUT_WGMMA, NULL, 0, array);
  } else if (m.layout == PM_TMEM_M64 && bits >= 16) {
    found[n++] = pm_layout_constant(g, PM_LAYOUT_TCGEN05_M64_COLLECTIVE, &c, 1, array);
  }
  if (plain && m.packing == 1 && c % 2 == 0) {
    found[n++] = pm_layout_constant(g, PM_LAYOUT_TCGEN05_TMEM_NATIVE, &two, 1, array);
  }
  found[n++] = native(g, &m, array);
  return k < n ? found[k] : 0;
}

/* ---- products ------------------------------------------------------------------------------- */

pm_tcgen05 pm_tcgen05_of(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  const uint32_t more = o->n_in - 4;
  pm_tcgen05 x = {.acc = pm_in(g, op, 0),
                  .a = pm_in(g, op, 1),
                  .b = pm_in(g, op, 2),
                  .accumulate = pm_in(g, op, 3),
                  .a_scale = more >= 2 ? pm_in(g, op, 4) : 0,
                  .b_scale = more >= 2 ? pm_in(g, op, 5) : 0,
                  .metadata = more & 1 ? pm_in(g, op, o->n_in - 1) : 0,
                  .pair = *pm_attr(g, op, PM_ATTR_PAIR),
                  .packed = (int)pm_max(*pm_attr(g, op, PM_ATTR_PACKED), 1),
                  .row = pm_mma_of(g, op)};
  x.in_tmem = pm_typeof(g, x.a)->space == PM_TMEM;
  x.m = pm_typeof(g, x.acc)->dim[0];
  x.n = pm_typeof(g, x.acc)->dim[1];
  x.k = pm_typeof(g, x.b)->dim[0] * x.packed;
  if (x.a_scale) x.block = x.k / pm_typeof(g, x.a_scale)->dim[1];
  return x;
}
