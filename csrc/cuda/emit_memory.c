/* Allocations, views, loads and stores. */
#include "gen.h"

/* Views are resolved where they are used. */
pm_code pm_cuda_INDEX(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_TRANSPOSE_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_RESHAPE_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_BITCAST_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_CLUSTER_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_DEVICE_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_MULTICAST_REF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
pm_code pm_cuda_SEMAPHORE_OF(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }

/* ", tiled (8, 64), swizzle 128" */
static const char *transforms_text(pm_gen *e, pm_opid op) {
  uint32_t n;
  pm_text t;
  const int64_t *tile = pm_attr_list(e->g, op, PM_ATTR_TILING, &n);
  const long long swizzle = *pm_attr(e->g, op, PM_ATTR_SWIZZLE);
  pm_text_init(&t, e->arena);
  pm_put(&t, n ? ", tiled " : "");
  if (n) pm_put_dims(&t, tile, n);
  if (swizzle) pm_putf(&t, ", swizzle %lld", swizzle);
  return t.at;
}

static pm_code bind_address(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t offset = *pm_attr(e->g, op, PM_ATTR_OFFSET);
  if (offset < 0) return pm_gen_fail(e, op, PM_E_INTERNAL, "it has no place in SMEM");
  const char *name = pm_name_of(e, out), *own = "";
  const bool smem = pm_allocates(e->g, op, PM_SMEM);
  const int64_t apart = smem ? *pm_attr(e->g, op, PM_ATTR_APART) : 0;
  if (apart) own = pm_str(e, " + wg * %lld", (long long)apart);
  pm_place(e, op);
  pm_line(e, "const u32 %s = smem + %lld%s; // %s%s", name, (long long)offset, own,
          pm_type_text(e->arena, pm_typeof(e->g, out)), smem ? transforms_text(e, op) : "");
  pm_bind(e, out, name, PM_FORM_SCALAR);
  return PM_OK;
}

pm_code pm_cuda_ALLOC_SMEM(pm_gen *e, pm_opid op) { return bind_address(e, op); }
pm_code pm_cuda_ALLOC_BARRIER(pm_gen *e, pm_opid op) { return bind_address(e, op); }

/* Can the index be a part of the view itself? Its scalars are to be had here. */
static bool fold_index(pm_gen *e, pm_view *v, pm_val index, const pm_view_dim *dim) {
  pm_affine x;
  if (dim->tile || !pm_affine_of(e->g, index, &x)) return false;
  if (v->n_terms + x.n > PM_MAX_TERMS) return false;
  for (uint32_t k = 0; k < x.n; k++) {
    if (e->slot[x.term[k].val].form != PM_FORM_SCALAR) return false;
  }
  for (int d = 0; d < v->rank; d++) {
    if (x.coef[d] && v->dim[d].tile) return false;
  }
  for (int d = 0; d < v->rank; d++) v->dim[d].inner += x.coef[d] * dim->inner;
  for (uint32_t k = 0; k < x.n; k++)
    v->term[v->n_terms++] = (pm_term){x.term[k].val, x.term[k].mul * dim->inner, 1};
  v->offset += x.constant * dim->inner;
  return true;
}

/* Without the indices that are a start and counts. */
static void fold_indices(pm_gen *e, pm_view *v) {
  uint8_t n = 0;
  for (uint32_t k = 0; k < v->n_index; k++) {
    if (!fold_index(e, v, v->index[k].val, &v->index[k].dim)) v->index[n++] = v->index[k];
  }
  v->n_index = n;
}

static pm_code view_of(pm_gen *e, pm_opid op, pm_view *v) {
  const pm_code code = pm_view_of_access(e->g, op, true, v, e->err);
  if (code) pm_err_op(e->err, e->g, op);
  else fold_indices(e, v);
  return code;
}

/* One element, by all lanes. */
static const char *element_address(pm_gen *e, const pm_view *v) {
  const char *a = pm_view_address(e, v), *peer = pm_view_peer(e, v);
  a = pm_add_indices(e, v, a, "0");
  if (v->swizzle) a = pm_str(e, "swizzle<%d>(%s)", v->swizzle, a);
  return peer ? pm_str(e, "%s + %s", a, peer) : a;
}

pm_code pm_cuda_LOAD(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "load");
  if (e->only_words[out]) {
    pm_load_array(e, pm_value_layout(e->g, out), &v, pm_declare_words(e, out), true);
    return PM_OK;
  }
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_array(e, pm_value_layout(e->g, out), &v, name, false);
    return PM_OK;
  }
  if (pm_type_size(pm_typeof(e->g, out)) > 1) {
    return pm_gen_fail(e, op, PM_E_INTERNAL,
                       "an array that differs between elements has a splat "
                       "layout");
  }
  pm_line(e, "ld_%s<%s, 1>(&%s, %s);", pm_space_of(&v), pm_cpp_type(v.dtype), name,
          element_address(e, &v));
  return PM_OK;
}

pm_code pm_cuda_STORE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 1);
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "store");
  const char *x = pm_at(e, in, "0");
  const bool words = e->slot[in].form == PM_FORM_WORDS;
  if (words || pm_is_array(e, in)) {
    pm_store_array(e, pm_value_layout(e->g, in), &v, e->slot[in].text, words);
    return PM_OK;
  }
  if (pm_type_size(pm_typeof(e->g, in)) > 1) {
    pm_store_splat(e, &v, x);
    return PM_OK;
  }
  const char *one = pm_unique(e, "one");
  pm_line(e, "const %s %s = %s;", pm_cpp_type(v.dtype), one, x);
  pm_line(e, "st_%s<%s, 1>(%s, &%s);", pm_space_of(&v), pm_cpp_type(v.dtype),
          element_address(e, &v), one);
  return PM_OK;
}

/* The lanes share the lines of a contiguous view; else each warp has rows of its own. */
pm_code pm_cuda_DISCARD(pm_gen *e, pm_opid op) {
  int64_t run = 1;
  pm_sum rows = {.total = 1};
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  for (int d = v.rank - 1; d >= 0; d--) {
    const pm_view_dim *x = &v.dim[d];
    if (x->size == 1) continue;
    if (rows.n == 0 && x->inner == run) {
      run *= x->size;
    } else {
      rows.at[rows.n++] = (pm_piece){rows.total, x->size, x->inner};
      rows.total *= x->size;
    }
  }
  const char *at = pm_view_address(e, &v);
  const long long bytes = run * pm_dtypes[v.dtype].bits / 8;
  pm_note(e, op, "discard");
  if (rows.n == 0) {
    pm_line(e, "discard_lines(%s, %lld, tid, 128);", at, bytes);
    return PM_OK;
  }
  pm_begin(e, "for (u32 row = warp; row < %lld; row += 4) {", (long long)rows.total);
  pm_line(e, "discard_lines(%s + (%s), %lld, lane, 32);", at, pm_sum_text(e, &rows, "(u64)row", 1),
          bytes);
  pm_end(e);
  return PM_OK;
}

/* One element, or a splat where all operands are. The ref has one view. */
static bool all_scalar(pm_gen *e, pm_opid op) {
  for (uint32_t k = 1; k < pm_get(e->g, op)->n_in; k++) {
    if (pm_is_array(e, pm_in(e->g, op, k))) return false;
  }
  return true;
}

pm_code pm_cuda_MASKED_LOAD(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out, mask = pm_in(e->g, op, 1), other = pm_in(e->g, op, 2);
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "masked load");
  e->masked = op;
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_masked(e, pm_value_layout(e->g, out), &v, name, mask, other);
    return PM_OK;
  }
  const char *at = element_address(e, &v);
  pm_line(e, "%s = %s;", name, pm_at(e, other, "0"));
  pm_line(e, "if (%s) ld_%s<%s, 1>(&%s, %s);", pm_inside(e, op, NULL, pm_at(e, mask, "0"), "0"),
          pm_space_of(&v), pm_cpp_type(v.dtype), name, at);
  return PM_OK;
}

pm_code pm_cuda_MASKED_STORE(pm_gen *e, pm_opid op) {
  const pm_val value = pm_in(e->g, op, 1), mask = pm_in(e->g, op, 2);
  int64_t size = 1;
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "masked store");
  e->masked = op;
  if (!all_scalar(e, op)) {
    const pm_layout *l = pm_value_layout(e->g, pm_masked_shared(e->g, op));
    pm_store_masked(e, l, &v, value, mask);
    return PM_OK;
  }
  for (int d = 0; d < v.rank; d++) size *= v.dim[d].size;
  pm_begin(e, "if (%s) {", pm_inside(e, op, NULL, pm_at(e, mask, "0"), "0"));
  if (size > 1) {
    pm_store_splat(e, &v, pm_at(e, value, "0"));
  } else {
    pm_line(e, "const %s x = %s;", pm_cpp_type(v.dtype), pm_at(e, value, "0"));
    pm_line(e, "st_%s<%s, 1>(%s, &x);", pm_space_of(&v), pm_cpp_type(v.dtype),
            element_address(e, &v));
  }
  pm_end(e);
  return PM_OK;
}

/* One element: one lane does it, the others get the result from scratch. */
static void atomic_scalar(pm_gen *e, pm_opid op, const pm_view *v, const char *fn, const char *x) {
  const char *type = pm_cpp_type(v->dtype), *arguments = pm_at(e, pm_in(e->g, op, 1), "0");
  if (*pm_attr(e->g, op, PM_ATTR_ATOMIC) == PM_ATOMIC_CAS)
    arguments = pm_str(e, "%s, %s", pm_at(e, pm_in(e->g, op, 3), "0"), arguments);
  const char *at = element_address(e, v);
  pm_begin(e, PM_ONE_LANE " {");
  if (x) pm_line(e, "zero<%s, 1>(&%s);", type, x);
  pm_line(e, "if (%s) %s%s(%s, %s);",
          pm_inside(e, op, NULL, pm_at(e, pm_in(e->g, op, 2), "0"), "0"),
          x ? pm_str(e, "%s = ", x) : "", fn, at, arguments);
  if (x) pm_line(e, "st_shared<%s, 1>(%s, &%s);", type, pm_scratch(e), x);
  pm_end(e);
  if (!x) return;
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_line(e, "ld_shared<%s, 1>(&%s, %s);", type, x, pm_scratch(e));
  pm_line(e, PM_WARPGROUP_SYNC);
}

pm_code pm_cuda_ATOMIC(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const int64_t kind = *pm_attr(e->g, op, PM_ATTR_ATOMIC);
  const bool needed = kind >= PM_ATOMIC_XCHG, used = e->uses[out] > 0;
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, pm_str(e, "atomic_%s", pm_enum_text(PM_ENUM_ATOMIC, kind)));
  const char *fn = pm_ptx_atomic(e, kind, v.dtype, pm_space_of(&v), used || needed);
  const char *x = used ? pm_declare(e, out, out) : NULL;
  /* one element of a layout has its lane, which need not be the one that is elected */
  const bool spread = !all_scalar(e, op) || (used && pm_is_array(e, out));
  if (spread || pm_type_size(pm_typeof(e->g, out)) > 1) {
    pm_atomic_array(e, pm_value_layout(e->g, out), &v, fn, op, x);
  } else {
    atomic_scalar(e, op, &v, fn, x);
  }
  return PM_OK;
}
