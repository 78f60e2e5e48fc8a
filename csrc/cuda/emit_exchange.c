/* Ops that move elements between lanes: transpose, concat, gather, scatter and scan.
 *
 * Elements are exchanged through this thread's scratch (exchange.c).
 *
 * A scan has its dimension in registers, where it is a chain, or distributed as (warp * 32 + lane)
 * * run + register. In the latter case each lane scans its run, the totals are scanned by shuffles
 * within a warp and through scratch between warps, and the total before a run is combined with each
 * of its elements. Padding comes last, so it does no harm. */
#include "gen.h"

/* ---- transpose and concat ---------------------------------------------------------------- */

typedef struct shift {
  int rank;
  int64_t dim[PM_MAX_RANK], add[PM_MAX_RANK];
} shift;

static void project_shift(const void *ctx, const int64_t *dst, int64_t *src) {
  const shift *f = ctx;
  for (int k = 0; k < f->rank; k++) src[k] = dst[f->dim[k]] + f->add[k];
}

pm_code pm_cuda_TRANSPOSE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  uint32_t n;
  const int64_t *perm = pm_attr_list(e->g, op, PM_ATTR_DIMS, &n);
  if (pm_bind_scalar(e, op)) return PM_OK;
  if (!pm_moves_in_registers(e->g, op)) {
    pm_type wide = *pm_typeof(e->g, in);
    wide.dim[n - 1] = pm_transposed_row(&wide);
    pm_view all = pm_scratch_view(&wide), view = all;
    all.dim[n - 1].size = pm_typeof(e->g, in)->dim[n - 1];
    for (uint32_t k = 0; k < n; k++) view.dim[k] = all.dim[perm[k]];
    return pm_through(e, op, &all, &view);
  }
  shift f = {.rank = (int)n};
  for (uint32_t k = 0; k < n; k++) f.dim[perm[k]] = k;
  const char *map =
      pm_wants_array(e, out)
          ? pm_reg_map(e, pm_layout_in(e, in), pm_layout_in(e, out), project_shift, &f, "r")
          : NULL;
  if (!map) return pm_no_registers(e, op);
  pm_bind_registers(e, op, map);
  return PM_OK;
}

/* Registers of one operand into those of the result, but for those that are padding: what they
 * would overwrite might be another part's. `stem`: coordinates, where that depends on the lane. */
static pm_code concat_registers(pm_gen *e, pm_opid op, uint32_t k, int64_t start, const char *name,
                                const char *stem) {
  const pm_val in = pm_in(e->g, op, k), out = pm_get(e->g, op)->out;
  const pm_type *t = pm_typeof(e->g, in);
  const int64_t dim = *pm_attr(e->g, op, PM_ATTR_DIM);
  const pm_layout *whole = pm_layout_in(e, out), *part = pm_layout_in(e, in);
  shift f = {.rank = t->rank};
  for (int d = 0; d < t->rank; d++) f.dim[d] = d;
  f.add[dim] = start;
  pm_at(e, in, "0");
  if (!pm_is_array(e, in)) { /* a splat: as the part of the result that it becomes */
    int64_t starts[PM_MAX_RANK] = {0};
    starts[dim] = start;
    part = pm_layout_of(
        e->g, pm_layout_slice((pm_graph *)e->g, pm_value_of(e->g, out)->layout, starts, t));
  }
  const int64_t n = pm_layout_regs(part), *list = pm_reg_list(e, whole, part, project_shift, &f);
  if (!list) return pm_no_registers(e, op);
  int64_t *from = PM_NEW(e->arena, int64_t, n), *to = PM_NEW(e->arena, int64_t, n), used = 0;
  for (int64_t r = 0; r < n; r++) {
    if (list[r] < 0) continue;
    from[used] = r;
    to[used++] = list[r];
  }
  const char *at = used > 1 ? "r" : "0", *source = at, *map;
  if (used == n) {
    map = pm_list_text(e, whole, part, list, at);
  } else {
    source = pm_table(e, "from", from, used, at);
    map = pm_table(e, "to", to, used, at);
  }
  const char *valid = stem ? pm_valid(e, part, stem, source) : NULL;
  pm_begin_unrolled(e, "r", used, 1);
  pm_line(e, "%s%s[%s] = %s;", valid ? pm_str(e, "if (%s) ", valid) : "", name, map,
          pm_at(e, in, source));
  pm_end_unrolled(e, used, 1);
  return PM_OK;
}

/* An array, and one number after it: that number everywhere, and over it the array's registers in
 * the lanes where they are elements. */
static pm_code fill_registers(pm_gen *e, pm_opid op, const char *name) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_layout *whole = pm_layout_in(e, out), *part = pm_layout_in(e, in);
  const char *at = pm_begin_unrolled(e, "r", pm_layout_regs(whole), 1);
  pm_line(e, "%s[%s] = %s;", name, at, pm_at(e, pm_in(e->g, op, 1), "0"));
  pm_end_unrolled(e, pm_layout_regs(whole), 1);
  const char *stem = pm_coord_lines(e, part);
  return concat_registers(e, op, 0, 0, name, stem);
}

pm_code pm_cuda_CONCAT(pm_gen *e, pm_opid op) {
  const uint32_t n_in = pm_get(e->g, op)->n_in;
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t dim = *pm_attr(e->g, op, PM_ATTR_DIM);
  const bool in_registers = pm_moves_in_registers(e->g, op) && pm_wants_array(e, out);
  const pm_view whole = pm_scratch_view(pm_typeof(e->g, out));
  const char *name = NULL;
  int64_t start = 0;
  if (in_registers) {
    pm_note(e, op, "concat");
    name = pm_declare(e, out, out);
  } else {
    PM_TRY(pm_need_scratch(e, op, pm_scratch_size(e, out)));
    pm_note(e, op, "concat, through shared memory");
  }
  if (in_registers && pm_is_fill(e->g, op)) return fill_registers(e, op, name);
  for (uint32_t k = 0; k < n_in; k++) {
    const int64_t size = pm_typeof(e->g, pm_in(e->g, op, k))->dim[dim];
    if (in_registers) {
      PM_TRY(concat_registers(e, op, k, start, name, NULL));
    } else {
      pm_view part = whole;
      part.offset = start * whole.dim[dim].inner;
      part.dim[dim].size = size;
      pm_put_array(e, pm_in(e->g, op, k), &part);
    }
    start += size;
  }
  if (!in_registers) pm_take_result(e, op, &whole);
  return PM_OK;
}

/* ---- gather and scatter ------------------------------------------------------------------ */

static const char *element_address(pm_gen *e, const char *number, int64_t bytes) {
  if (bytes == 1) return pm_str(e, "%s + (%s)", pm_scratch(e), number);
  return pm_str(e, "%s + (%s) * %lld", pm_scratch(e), number, (long long)bytes);
}

pm_code pm_cuda_GATHER(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), index = pm_in(e->g, op, 1), out = pm_get(e->g, op)->out;
  const pm_type *t = pm_typeof(e->g, in);
  const pm_view all = pm_scratch_view(t);
  const int64_t n = pm_regs_of(e, out);
  if (pm_bind_scalar(e, op)) return PM_OK;
  PM_TRY(pm_need_scratch(e, op, pm_scratch_size(e, in)));
  pm_note(e, op, "gather, through shared memory");
  pm_put_array(e, in, &all);
  pm_line(e, PM_WARPGROUP_SYNC);
  const char *name = pm_declare(e, out, out), *r = pm_begin_unrolled(e, "r", n, 1);
  const char *number = pm_str(e, "min_int((u32)max_int(%s, 0), %lluu)", pm_at(e, index, r),
                              (unsigned long long)(pm_type_size(t) - 1));
  pm_line(e, "ld_shared<%s, 1>(&%s%s, %s);", pm_cpp_type(t->dtype), name,
          pm_is_array(e, out) ? pm_str(e, "[%s]", r) : "",
          element_address(e, number, pm_dtypes[t->dtype].bytes));
  pm_end_unrolled(e, n, 1);
  pm_line(e, PM_WARPGROUP_SYNC);
  return PM_OK;
}

pm_code pm_cuda_SCATTER(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), index = pm_in(e->g, op, 1), value = pm_in(e->g, op, 2);
  const pm_type *t = pm_typeof(e->g, in);
  const pm_view all = pm_scratch_view(t);
  const char *cpp = pm_cpp_type(t->dtype);
  PM_TRY(pm_need_scratch(e, op, pm_scratch_size(e, in)));
  pm_note(e, op, "scatter, through shared memory");
  pm_put_array(e, in, &all);
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_at(e, index, "0");
  pm_at(e, value, "0");
  const pm_val like = pm_is_array(e, index) ? index : value;
  const bool array = pm_is_array(e, like);
  const int64_t n = array ? pm_regs_of(e, like) : 1;
  pm_begin(e, "{");
  const char *stem = array ? pm_coord_lines(e, pm_layout_in(e, like)) : NULL;
  const char *r = pm_begin_unrolled(e, "r", n, 1);
  const char *valid =
      array ? pm_valid(e, pm_layout_in(e, like), stem, r) : "warp == 0 && lane == 0";
  pm_line(e, "const u32 at = (u32)%s;", pm_at(e, index, r));
  pm_line(e, "const %s x = %s;", cpp, pm_at(e, value, r));
  pm_line(e, "if (%s%sat < %lluu) st_shared<%s, 1>(%s, &x);", valid ? valid : "",
          valid ? " && " : "", (unsigned long long)pm_type_size(t), cpp,
          element_address(e, "at", pm_dtypes[t->dtype].bytes));
  pm_end_unrolled(e, n, 1);
  pm_end(e);
  pm_take_result(e, op, &all);
  return PM_OK;
}

/* ---- scan -------------------------------------------------------------------------------- */

/* x[r] takes in the register before it along the dim, where there is one. */
static void scan_registers(pm_gen *e, int kind, pm_dtype d, const char *name, int64_t n,
                           int64_t size, int64_t step) {
  if (size == 1) return;
  pm_begin_unrolled(e, "r", n, 1);
  const char *at = step > 1 ? pm_str(e, "r / %lld", (long long)step) : "r";
  if (step * size < n) at = pm_str(e, "%s %% %lld", at, (long long)size);
  pm_line(e, "if (%s) %s[r] = %s;", at, name,
          pm_combine(e, kind, d, pm_str(e, "%s[r - %lld]", name, (long long)step),
                     pm_str(e, "%s[r]", name)));
  pm_end_unrolled(e, n, 1);
}

/* What came before each run, from lanes and warps before. */
static void scan_lanes(pm_gen *e, int kind, pm_dtype d, const char *name, int64_t n, int64_t run) {
  const char *cpp = pm_cpp_type(d);
  const int64_t runs = n / run, bytes = pm_dtypes[d].bytes;
  const char *before = pm_unique(e, "before");
  pm_line(e, "%s %s[%lld];", cpp, before, (long long)runs);
  const char *k = pm_begin_unrolled(e, "k", runs, 1);
  const char *last = runs > 1 ? pm_str(e, "k * %lld + %lld", (long long)run, (long long)(run - 1))
                              : pm_str(e, "%lld", (long long)(run - 1));
  pm_begin(e, "{");
  pm_line(e, "%s x = %s[%s];", cpp, name, last);
  for (int step = 1; step < 32; step *= 2) {
    pm_begin(e, "{");
    pm_line(e, "const %s y = shuffle_up(x, %d);", cpp, step);
    pm_line(e, "if (lane >= %d) x = %s;", step, pm_combine(e, kind, d, "y", "x"));
    pm_end(e);
  }
  pm_line(e, "if (lane == 31) st_shared<%s, 1>(%s + warp * %lld + %s * %lld, &x);", cpp,
          pm_scratch(e), (long long)(runs * bytes), k, (long long)bytes);
  pm_line(e, "x = shuffle_up(x, 1);");
  pm_line(e, "%s[%s] = lane > 0 ? x : %s;", before, k, pm_identity(e, kind, d));
  pm_end(e);
  pm_end_unrolled(e, runs, 1);
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_begin_unrolled(e, "k", runs, 1);
  pm_begin_unrolled(e, "w", 3, 1);
  pm_line(e, "%s y;", cpp);
  pm_line(e, "ld_shared<%s, 1>(&y, %s + (2 - w) * %lld + %s * %lld);", cpp, pm_scratch(e),
          (long long)(runs * bytes), k, (long long)bytes);
  const char *x = pm_str(e, "%s[%s]", before, k);
  pm_line(e, "if (2 - w < (int)warp) %s = %s;", x, pm_combine(e, kind, d, "y", x));
  pm_end_unrolled(e, 3, 1);
  pm_end_unrolled(e, runs, 1);
  const char *r = pm_begin_unrolled(e, "r", n, 1);
  x = pm_str(e, "%s[%s]", name, r);
  const char *b =
      runs > 1 ? pm_str(e, "%s[r / %lld]", before, (long long)run) : pm_str(e, "%s[0]", before);
  pm_line(e, "%s = %s;", x, pm_combine(e, kind, d, b, x));
  pm_end_unrolled(e, n, 1);
  pm_line(e, PM_WARPGROUP_SYNC);
}

pm_code pm_cuda_SCAN(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const int dim = (int)*pm_attr(e->g, op, PM_ATTR_DIM),
            kind = (int)*pm_attr(e->g, op, PM_ATTR_REDUCE);
  const pm_layout *l = pm_layout_in(e, out);
  const pm_dtype d = pm_typeof(e->g, in)->dtype;
  const int64_t n = pm_regs_of(e, out);
  pm_note(e, op, pm_str(e, "scan %s", pm_enum_text(PM_ENUM_REDUCE, kind)));
  pm_at(e, in, "0"); /* what it is made of stands before it; equal elements have other sums */
  const char *name = pm_declare(e, out, out);
  pm_assign(e, out, in);
  int64_t step = 1, size = 1;
  for (uint32_t k = l->n_reg; k-- > 0;) {
    if (l->reg[k].dim == dim) {
      size = l->reg[k].size;
      break;
    }
    step *= l->reg[k].size;
  }
  scan_registers(e, kind, d, name, n, size, size > 1 ? step : 1);
  if (l->n_warp && l->warp[0].dim == dim) {
    PM_TRY(pm_need_scratch(e, op, pm_op_scratch(e->g, op)));
    scan_lanes(e, kind, d, name, n, size);
  }
  return PM_OK;
}
