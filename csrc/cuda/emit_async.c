/* Barriers, copies by engines, and their order.
 *
 * Barriers that order the tensor core: every lane's accesses of tensor memory are fenced before an
 * arrival, and after a wait. A fence is of its lane alone, so the lanes meet between their fences
 * and the arrival.
 *
 * A wait takes its parity from a word of phase bits, one for each barrier of the allocation, that
 * every lane keeps and flips; or from its operand, if all waits on the allocation have one. One
 * lane arrives for all lanes of a thread; passes/sync.c synchronises the lanes before it where that
 * is needed. An arrival on a cluster barrier is one arrival in each block that it signals: lane k
 * arrives in the k-th of them.
 *
 * One elected lane of warp 0 (lane.c) issues the copies by engines. It is always the same one,
 * since elect.sync with all lanes is deterministic, so the bulk groups of this lane are those of
 * the thread. If warps of a WARP_MAP store too, each has such a lane: a group that the thread
 * closes or awaits is one of all four. The elected lane arrives, with the bytes to expect, before
 * it issues the copy, or the first copy of a run (expect.c). A collective copy loads this block's
 * share and multicasts it; its barrier receives the bytes of all shares. PLAIN copies are loads and
 * stores by all lanes, followed by a proxy fence and the arrival. */
#include "gen.h"

/* ---- barriers ---------------------------------------------------------------------------- */

typedef struct barrier {
  const char *address;
  const char *index; /* NULL: the only barrier of its allocation */
  const char *phase; /* NULL: waits know theirs */
  pm_val base;
  const int64_t *groups; /* of a cluster barrier that signals other blocks */
  uint32_t n_groups;
  bool leader; /* of them only the one with index 0 */
  bool warps;  /* each warp arrives */
  bool tensor_core;
} barrier;

static pm_code barrier_of(pm_gen *e, pm_opid op, pm_val ref, barrier *b) {
  pm_view v;
  pm_text a, i;
  if (pm_view_of(e->g, ref, true, &v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  pm_text_init(&a, e->arena);
  pm_text_init(&i, e->arena);
  pm_put(&a, e->slot[v.base].text);
  for (uint32_t k = 0; k < v.n_terms; k++) {
    pm_putf(&a, " + %s", pm_term_text(e, &v.term[k], 8, false));
    pm_putf(&i, "%s%s", k ? " + " : "", pm_term_text(e, &v.term[k], 1, false));
  }
  if (v.offset) pm_putf(&a, " + %lld", (long long)(v.offset * 8));
  if (v.offset || !v.n_terms) pm_putf(&i, "%s%lld", i.n ? " + " : "", (long long)v.offset);
  b->address = a.at;
  b->index = pm_type_size(pm_typeof(e->g, v.base)) == 1 ? NULL : i.at;
  b->phase = e->phase[v.base];
  b->base = v.base;
  b->warps = *pm_attr(e->g, v.alloc, PM_ATTR_WARPS);
  b->tensor_core = *pm_attr(e->g, v.alloc, PM_ATTR_TENSOR_CORE);
  b->leader = *pm_attr(e->g, v.alloc, PM_ATTR_LEADER);
  b->groups = pm_attr_list(e->g, v.alloc, PM_ATTR_CLUSTER, &b->n_groups);
  if (pm_cluster_targets(e->g, b->groups, b->n_groups) == 1) b->n_groups = 0;
  return PM_OK;
}

pm_code pm_barrier_address(pm_gen *e, pm_opid op, pm_val ref, const char **address) {
  barrier b;
  PM_TRY(barrier_of(e, op, ref, &b));
  *address = b.address;
  return PM_OK;
}

static const char *wait_function(const pm_gen *e, const barrier *b) {
  const bool far = (b->n_groups && e->released[b->base]) || e->sent[b->base];
  return far ? "mbarrier_wait_cluster" : "mbarrier_wait";
}

static const char *parity_of(pm_gen *e, pm_val phase) {
  pm_scalar x;
  if (pm_constant(e->g, phase, &x)) return x.i & 1 ? "1" : "0";
  return pm_str(e, "%s & 1", pm_scalar_of(e, phase));
}

/* Of a word of phase bits, one for each barrier of an allocation. */
static const char *shifted(pm_gen *e, const char *text, const char *sign, const char *index) {
  return strcmp(index, "0") ? pm_str(e, "%s %s %s", text, sign, pm_atom(e, index)) : text;
}

pm_code pm_cuda_WAIT(pm_gen *e, pm_opid op) {
  barrier b;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 0), &b));
  const char *wait = wait_function(e, &b);
  pm_note(e, op, "barrier_wait");
  if (!b.phase) {
    pm_print_wait(e, op, wait, pm_str(e, "%s, %s", b.address, parity_of(e, pm_in(e->g, op, 1))));
  } else if (b.index) {
    const char *bit = shifted(e, b.phase, ">>", b.index);
    pm_print_wait(e, op, wait, pm_str(e, "%s, %s & 1", b.address, bit));
    pm_line(e, "%s ^= %s;", b.phase, shifted(e, "1u", "<<", b.index));
  } else {
    pm_print_wait(e, op, wait, pm_str(e, "%s, %s", b.address, b.phase));
    pm_line(e, "%s ^= 1;", b.phase);
  }
  if (b.tensor_core) pm_line(e, "tcgen05_fence_after();");
  return PM_OK;
}

/* Of lanes that arrived before, the last one finds the phase complete. The others wait for it then,
 * which acquires what it releases. */
pm_code pm_cuda_BARRIER_TEST(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  barrier b;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 0), &b));
  pm_note(e, op, "barrier_test");
  const char *x = pm_declare(e, out, out), *index = b.index ? b.index : "0";
  const char *bit = shifted(e, b.phase, ">>", index);
  const char *parity = b.index ? pm_str(e, "%s & 1", bit) : b.phase;
  const char *test = pm_str(e, "mbarrier_test(%s, %s)", b.address, parity);
  if (!e->lane) test = pm_str(e, e->warps ? "warp_any(%s)" : "lanes_any(wg, %s)", test);
  pm_line(e, "%s = %s;", x, test);
  pm_begin(e, "if (%s) {", x);
  pm_line(e, "%s(%s, %s);", wait_function(e, &b), b.address, parity);
  pm_line(e, "%s ^= %s;", b.phase, shifted(e, "1u", "<<", index));
  if (b.tensor_core) pm_line(e, "tcgen05_fence_after();");
  pm_end(e);
  return PM_OK;
}

static void arrive_in_cluster(pm_gen *e, const barrier *b, int64_t order) {
  const long long n = pm_cluster_targets(e->g, b->groups, b->n_groups);
  const char *k = e->lane ? "k" : "tid";
  const char *target = b->leader ? pm_cluster_leader(e, b->groups[0])
                                 : pm_cluster_target(e, b->groups, b->n_groups, k);
  if (b->leader) {
    if (!e->lane) pm_line(e, "if (%s)", pm_first_lane(e));
  } else if (e->lane) {
    pm_line(e, "for (u32 k = 0; k < %lld; k++)", n);
  } else {
    pm_line(e, "if (tid < %lld)", n);
  }
  pm_line(e, "  mbarrier_arrive_%s(%s, %s);", order == PM_ORDER_RELAXED ? "remote" : "release",
          b->address, target);
}

pm_code pm_cuda_ARRIVE(pm_gen *e, pm_opid op) {
  barrier b;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 0), &b));
  pm_note(e, op, "barrier_arrive");
  if (b.tensor_core) {
    pm_line(e, "tcgen05_fence_before();");
    if (!e->lane && !b.warps) pm_line(e, "%s", pm_meet(e));
  }
  if (b.n_groups) {
    arrive_in_cluster(e, &b, *pm_attr(e->g, op, PM_ATTR_ORDER));
  } else if (!b.warps) {
    if (e->lane) {
      pm_line(e, "mbarrier_arrive(%s);", b.address);
    } else {
      pm_line(e, "if (%s) mbarrier_arrive(%s);", pm_first_lane(e), b.address);
    }
  } else if (e->lane) {
    pm_line(e, "mbarrier_arrive_n<4>(%s);", b.address); /* for all warps */
  } else {
    pm_line(e, "warp_sync();");
    pm_line(e, "if (lane == 0) mbarrier_arrive(%s);", b.address);
  }
  return PM_OK;
}

/* ---- tensor maps ------------------------------------------------------------------------- */

static bool same_map(const pm_tensor_map *a, const pm_tensor_map *b) {
  const bool any = a->swizzle == PM_ANY_SWIZZLE || b->swizzle == PM_ANY_SWIZZLE;
  if (a->param != b->param || a->dtype != b->dtype || a->rank != b->rank) return false;
  if ((a->swizzle != b->swizzle && !any) || a->of != b->of) return false;
  for (int d = 0; d < a->rank; d++) {
    if (a->dim[d] != b->dim[d] || a->stride[d] != b->stride[d] || a->box[d] != b->box[d] ||
        a->extent[d] != b->extent[d])
      return false;
  }
  return true;
}

const char *pm_map_name(pm_gen *e, const pm_tensor_map *m) {
  for (uint32_t k = 0; k < e->maps.n; k++) {
    pm_tensor_map *known = &e->maps.at[k];
    if (!same_map(known, m)) continue;
    if (known->swizzle == PM_ANY_SWIZZLE) known->swizzle = m->swizzle;
    return e->map_names.at[k];
  }
  const pm_val arg = e->g->blocks.at[1].arg + (pm_val)m->param;
  const char *name =
      pm_unique(e, pm_str(e, m->of ? "%s_maps" : "%s_map",
                          pm_identifier(e, e->g->strings.at[pm_value_of(e->g, arg)->name])));
  pm_vec_push(e->arena, &e->maps, *m);
  pm_vec_push(e->arena, &e->map_names, name);
  e->program->align[m->param] = pm_max(e->program->align[m->param], 16);
  return name;
}

/* ---- copies by one lane ------------------------------------------------------------------ */

/* share: number of this block among those of a collective copy, else NULL */
static const char *coord_text(pm_gen *e, const pm_copy_plan *p, int d, const char *share) {
  const pm_coord *c = &p->coord[d];
  pm_text t;
  pm_text_init(&t, e->arena);
  for (uint32_t k = 0; k < c->n_terms; k++) {
    pm_putf(&t, "%s%s", t.n ? " + " : "", pm_term_text(e, &c->term[k], 1, false));
  }
  for (uint32_t k = 0; k < p->n_loops; k++) {
    const int64_t step = p->loop[k].coord_step[d];
    if (step) pm_putf(&t, "%sb%u * %lld", t.n ? " + " : "", k, (long long)step);
  }
  if (share && p->share.coord_step[d]) {
    pm_putf(&t, "%s(i32)%s * %lld", t.n ? " + " : "", share, (long long)p->share.coord_step[d]);
  }
  if (c->fixed || !t.n) pm_putf(&t, "%s%lld", t.n ? " + " : "", (long long)c->fixed);
  return t.at;
}

static void issue_tma(pm_gen *e, pm_opid op, const pm_copy_plan *p, const char *bar) {
  pm_text t;
  pm_text_init(&t, e->arena);
  uint32_t n_axes = 0;
  const bool prefetch = pm_get(e->g, op)->code == PM_OP_PREFETCH;
  const int64_t *axes = bar ? pm_attr_list(e->g, op, PM_ATTR_CLUSTER, &n_axes) : NULL;
  const char *share = p->share.count > 1 ? pm_cluster_share(e, axes, n_axes) : NULL;
  pm_tensor_map of = p->map;
  if (prefetch) of.swizzle = PM_ANY_SWIZZLE; /* there is no SMEM that has one */
  const char *map = pm_remote_map(e, &p->gmem, &p->map, pm_map_name(e, &of));
  const char *smem = prefetch ? "" : pm_view_address(e, &p->smem);
  if (share) smem = pm_str(e, "%s + %s * %lld", smem, share, (long long)p->share.smem_step);
  for (uint32_t k = 0; k < p->n_loops; k++) {
    smem = pm_str(e, "%s + b%u * %lld", smem, k, (long long)p->loop[k].smem_step);
    pm_begin(e, "for (int b%u = 0; b%u < %lld; b%u++) {", k, k, (long long)p->loop[k].count, k);
  }
  if (prefetch) {
    pm_putf(&t, "tma_prefetch_%dd(%s", p->map.rank, map);
  } else if (bar) {
    const char *fn = pm_str(e, "tma_%s_%dd", share ? "multicast" : "load", p->map.rank);
    if (*pm_attr(e->g, op, PM_ATTR_LEADER)) {
      fn = pm_stand_in_pair_copy(e, pm_ptx_tma_pair(e, p->map.rank, share), &p->map);
    }
    pm_putf(&t, "%s(%s, %s, %s", fn, smem, map, bar);
    if (share) pm_putf(&t, ", %s", pm_cluster_mask(e, axes, n_axes));
  } else {
    const int64_t combine = *pm_attr(e->g, op, PM_ATTR_COMBINE);
    const char *hint = *pm_attr(e->g, op, PM_ATTR_EVICT_FIRST) ? "_evict_first" : "";
    const char *fn = combine ? pm_tma_combine(e, combine, p->map.rank)
                             : pm_str(e, "tma_store%s_%dd", hint, p->map.rank);
    pm_putf(&t, "%s(%s, %s", fn, map, smem);
  }
  for (int d = 0; d < p->map.rank; d++) pm_putf(&t, ", %s", coord_text(e, p, d, share));
  pm_line(e, "%s);", t.at);
  for (uint32_t k = 0; k < p->n_loops; k++) pm_end(e);
}

static void issue(pm_gen *e, pm_opid op, const pm_copy_plan *p, const char *bar) {
  if (p->engine == PM_ENGINE_TMA) {
    issue_tma(e, op, p, bar);
    return;
  }
  const char *gmem = pm_view_address(e, &p->gmem), *smem = pm_view_address(e, &p->smem);
  pm_need_alignment(e, &p->gmem, 16);
  if (bar) {
    pm_line(e, "bulk_load%s(%s, %s, %lld, %s);", pm_blocks(e->g) > 1 ? "_cluster" : "", smem, gmem,
            (long long)p->bytes, bar);
  } else {
    const int64_t combine = *pm_attr(e->g, op, PM_ATTR_COMBINE);
    const char *hint = *pm_attr(e->g, op, PM_ATTR_EVICT_FIRST) ? "_evict_first" : "";
    const char *fn =
        combine ? pm_bulk_combine(e, combine, p->gmem.dtype) : pm_str(e, "bulk_store%s", hint);
    pm_line(e, "%s(%s, %s, %lld);", fn, gmem, smem, (long long)p->bytes);
  }
}

static const char *predicate(pm_gen *e, pm_opid op) {
  if (!*pm_attr(e->g, op, PM_ATTR_PREDICATED)) return NULL;
  return pm_scalar_of(e, pm_in(e->g, op, pm_get(e->g, op)->n_in - 1));
}

/* A copy that the first block of a pair tracks: only there the barrier counts it, with the bytes of
 * both blocks. */
static pm_code load_by_lane(pm_gen *e, pm_opid op, const pm_copy_plan *p) {
  const bool leader = *pm_attr(e->g, op, PM_ATTR_LEADER);
  const char *when = predicate(e, op), *first = leader ? "if (cluster_rank() == 0) " : "";
  barrier b;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 2), &b));
  if (when) pm_begin(e, "if (%s) {", when);
  if (!e->is_expected[op]) {
    long long bytes;
    PM_TRY(pm_expected_bytes(e, op, &bytes));
    pm_line(e, "%smbarrier_arrive_expect_tx(%s, %lld);", first, b.address, bytes * (1 + leader));
  }
  issue(e, op, p, leader ? pm_str(e, "%s + peer_offset(0)", b.address) : b.address);
  if (when) {
    e->indent--;
    pm_begin(e, "} else {");
    pm_line(e, "%smbarrier_arrive(%s);", first, b.address);
    pm_end(e);
  }
  return PM_OK;
}

static pm_code store_by_lane(pm_gen *e, pm_opid op, const pm_copy_plan *p) {
  const char *when = predicate(e, op);
  if (when) pm_begin(e, "if (%s) {", when);
  issue(e, op, p, NULL);
  if (when) pm_end(e);
  if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) pm_line(e, "bulk_group_commit();");
  return PM_OK;
}

/* ---- copies by all lanes ----------------------------------------------------------------- */

/* An index of the base along d: start, and coordinates ck of the dims of the view along it. */
static const char *base_index(pm_gen *e, const pm_view *v, int d) {
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "%lld", (long long)v->start[d]);
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    if (v->start_term[k].dim != d) continue;
    pm_putf(&t, " + %s", pm_scalar_of(e, v->start_term[k].val));
    if (v->start_term[k].mul != 1) pm_putf(&t, " * %lld", (long long)v->start_term[k].mul);
  }
  for (int k = 0; k < v->rank; k++) {
    if (v->dim[k].base_dim != d || v->dim[k].size == 1) continue;
    pm_putf(&t, " + c%d", k);
    if (v->dim[k].step != 1) pm_putf(&t, " * %lld", (long long)v->dim[k].step);
  }
  return t.at;
}

static bool dim_in_bounds(pm_gen *e, const pm_view *v, int d) {
  int64_t lo, hi, size = 1;
  for (int k = 0; k < v->rank; k++) {
    if (v->dim[k].base_dim == d) size = pm_view_extent(&v->dim[k]);
  }
  return pm_view_start_range(e->g, v, (uint32_t)d, &lo, &hi) && lo >= 0 &&
         hi + size <= v->base_shape[d];
}

static const char *in_bounds(pm_gen *e, const pm_view *v) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int d = 0; d < v->base_rank && !v->reshaped; d++) {
    if (dim_in_bounds(e, v, d)) continue;
    const char *limit = v->base_extent[d] ? pm_str(e, "(u32)%s", pm_size_text(e, v->base_extent[d]))
                                          : pm_str(e, "%lldu", (long long)v->base_shape[d]);
    pm_putf(&t, "%s(u32)(%s) < %s", t.n ? " && " : "", base_index(e, v, d), limit);
  }
  return t.n ? t.at : NULL;
}

static bool chunk_fits(pm_gen *e, const pm_view *v, int64_t n) {
  const int last = v->rank - 1;
  if (v->dim[last].inner != 1 || v->dim[last].size % n || pm_view_divisor(e->g, v) % n)
    return false;
  for (int k = 0; k < v->rank; k++) {
    const pm_view_dim *d = &v->dim[k];
    if (d->tile && d->outer % n) return false;
    if (k == last ? d->tile % n : d->size > 1 && d->inner % n) return false;
  }
  if (v->space != PM_GMEM || v->reshaped) return true;
  const int b = v->dim[last].base_dim;
  if (b < 0 || dim_in_bounds(e, v, b)) return true;
  int64_t start = v->start[b];
  for (uint32_t k = 0; k < v->n_start_terms; k++) {
    if (v->start_term[k].dim == b) {
      start = pm_gcd(start, pm_divisor(e->g, v->start_term[k].val) * v->start_term[k].mul);
    }
  }
  const uint32_t extent = v->base_extent[b];
  const int64_t all = extent ? e->g->sizes.at[extent].multiple : v->base_shape[b];
  return all % n == 0 && start % n == 0;
}

static const char *chunk_address(pm_gen *e, const pm_view *v) {
  const bool gmem = v->space == PM_GMEM;
  const int64_t scale = gmem ? 1 : pm_dtypes[v->dtype].bytes;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_put(&t, pm_view_address(e, v));
  for (int k = 0; k < v->rank; k++) {
    const pm_view_dim *d = &v->dim[k];
    const char *c = pm_str(e, gmem ? "(i64)c%d" : "c%d", k);
    if (d->size == 1) continue;
    if (d->tile) {
      pm_putf(&t, " + %s / %lld * %lld", c, (long long)d->tile, (long long)(d->outer * scale));
      c = pm_str(e, "%s %% %lld", c, (long long)d->tile);
    }
    pm_putf(&t, " + %s * %lld", c, (long long)(d->inner * scale));
  }
  return v->swizzle ? pm_str(e, "swizzle<%d>(%s)", v->swizzle, t.at) : t.at;
}

enum { FEW_REGISTERS = 64 }; /* of a lane: more chunks in flight would spill */
enum { MOST_UNROLLED = 16 }; /* chunks of a lane, whose addresses differ by constants then */

/* Elements x[0 .. n - 1] are combined with those from `at` on. */
static void combine_chunk(pm_gen *e, int64_t combine, pm_dtype d, const char *at, const char *valid,
                          int64_t n) {
  const char *type, *fn = pm_lane_combine(e, combine, d, &type);
  if (valid) pm_begin(e, "if (%s) {", valid);
  pm_line(e, "%s* const to = (%s*)(%s);", type, type, at);
  if (n > 1) pm_line(e, "#pragma unroll");
  pm_line(e, "for (int k = 0; k < %lld; k++) %s(to + k, bitcast<%s>(x[k]));", (long long)n, fn,
          type);
  if (valid) pm_end(e);
}

typedef enum chunks { STORE_CHUNKS, LOAD_CHUNKS, PREFETCH_CHUNKS, CP_ASYNC_CHUNKS } chunks;

/* Elements of the largest chunk that lanes move at once, at most 16 bytes. */
static int64_t chunk_size(pm_gen *e, const pm_view *g, const pm_view *s) {
  int64_t n = 16 / pm_dtypes[g->dtype].bytes;
  while (n > 1 && (!g->rank || !chunk_fits(e, g, n) || !chunk_fits(e, s, n))) n /= 2;
  return n;
}

/* combine: of a store, 0: it overwrites what is there */
static void copy_chunks(pm_gen *e, const pm_copy_plan *p, chunks what, int64_t combine) {
  const pm_view *g = &p->gmem, *s = &p->smem;
  const int64_t bytes = pm_dtypes[g->dtype].bytes;
  const int64_t n = chunk_size(e, g, s);
  int64_t chunks = 1, below = 1;
  for (int k = 0; k < g->rank; k++) chunks *= g->dim[k].size;
  chunks /= n;
  pm_need_alignment(e, g, n * bytes);
  const int few = e->registers && e->registers < FEW_REGISTERS ? 2 : 4;
  pm_line(e, "#pragma unroll %d", what == CP_ASYNC_CHUNKS ? MOST_UNROLLED : few);
  pm_begin(e, "for (i32 c = %s; c < %lld; c += %d) {", e->warps ? "lane" : "tid", (long long)chunks,
           e->warps ? 32 : 128);
  for (int k = g->rank - 1; k >= 0; k--) {
    const int64_t step = k == g->rank - 1 ? n : 1, size = g->dim[k].size / step;
    pm_text t;
    if (g->dim[k].size == 1) continue;
    pm_text_init(&t, e->arena);
    pm_put(&t, "c");
    if (below > 1) pm_putf(&t, " / %lld", (long long)below);
    if (k) pm_putf(&t, " %% %lld", (long long)size);
    if (step > 1) pm_putf(&t, " * %lld", (long long)step);
    pm_line(e, "const i32 c%d = %s;", k, t.at);
    below *= size;
  }
  const char *valid = p->promised ? NULL : in_bounds(e, g), *cpp = pm_cpp_type(g->dtype);
  const char *at_g = chunk_address(e, g);
  if (what == PREFETCH_CHUNKS) {
    pm_line(e, "%s%s%sprefetch_global(%s);", valid ? "if (" : "", valid ? valid : "",
            valid ? ") " : "", at_g);
    pm_end(e);
    return;
  }
  const char *at_s = chunk_address(e, s);
  if (what == CP_ASYNC_CHUNKS) {
    if (valid)
      pm_line(e, "cp_async_or_zeros<%lld>(%s, %s, %s);", (long long)(n * bytes), at_s, at_g, valid);
    else pm_line(e, "cp_async<%lld>(%s, %s);", (long long)(n * bytes), at_s, at_g);
    pm_end(e);
    return;
  }
  pm_line(e, "%s x[%lld];", cpp, (long long)n);
  if (what == LOAD_CHUNKS) {
    if (valid) pm_line(e, "zero<%s, %lld>(x);", cpp, (long long)n);
    pm_line(e, "%s%s%sld_global<%s, %lld>(x, %s);", valid ? "if (" : "", valid ? valid : "",
            valid ? ") " : "", cpp, (long long)n, at_g);
    pm_line(e, "st_shared<%s, %lld>(%s, x);", cpp, (long long)n, at_s);
  } else {
    pm_line(e, "ld_shared<%s, %lld>(x, %s);", cpp, (long long)n, at_s);
    if (combine) combine_chunk(e, combine, g->dtype, at_g, valid, n);
    else
      pm_line(e, "%s%s%sst_global<%s, %lld>(%s, x);", valid ? "if (" : "", valid ? valid : "",
              valid ? ") " : "", cpp, (long long)n, at_g);
  }
  pm_end(e);
}

static pm_code copy_by_lanes(pm_gen *e, pm_opid op, const pm_copy_plan *p) {
  const bool load = pm_get(e->g, op)->code == PM_OP_COPY_G2S;
  const char *when = predicate(e, op);
  pm_note(e, op, pm_str(e, "%s by all lanes", pm_ops[pm_get(e->g, op)->code].text));
  if (when) pm_begin(e, "if (%s) {", when);
  copy_chunks(e, p, load ? LOAD_CHUNKS : STORE_CHUNKS,
              load ? 0 : *pm_attr(e->g, op, PM_ATTR_COMBINE));
  if (when) pm_end(e);
  if (load) {
    barrier b;
    PM_TRY(barrier_of(e, op, pm_in(e->g, op, 2), &b));
    pm_line(e, "fence_proxy_async();");
    pm_line(e, "%s", pm_meet(e));
    pm_line(e, "if (%s) mbarrier_arrive(%s);", pm_first_lane(e), b.address);
    return PM_OK;
  }
  pm_line(e, "%s", pm_meet(e));
  if (*pm_attr(e->g, op, PM_ATTR_COMMIT)) { /* an empty group: waits count groups */
    pm_line(e, "%s bulk_group_commit();", pm_elected(e));
  }
  return PM_OK;
}

/* What cp.async cannot move in pieces of 4 bytes at least is loaded and stored at once. */
pm_code pm_cuda_CP_ASYNC(pm_gen *e, pm_opid op) {
  pm_copy_plan *p = PM_NEW(e->arena, pm_copy_plan, 1);
  PM_TRY(pm_plan_copy(e->g, op, e->target, p, e->err));
  pm_scalar known;
  const bool always = pm_constant(e->g, pm_in(e->g, op, pm_get(e->g, op)->n_in - 1), &known);
  const char *when = always && known.i ? NULL : predicate(e, op);
  const bool small = chunk_size(e, &p->gmem, &p->smem) * pm_dtypes[p->gmem.dtype].bytes < 4;
  pm_note(e, op, small ? "copy_gmem_to_smem by loads and stores" : "copy_gmem_to_smem by cp.async");
  if (when) pm_begin(e, "if (%s) {", when);
  copy_chunks(e, p, small ? LOAD_CHUNKS : CP_ASYNC_CHUNKS, 0);
  if (when) pm_end(e);
  pm_line(e, "cp_async_commit();");
  return PM_OK;
}

/* ---- copies ------------------------------------------------------------------------------ */

typedef pm_code (*by_lane)(pm_gen *e, pm_opid op, const pm_copy_plan *p);

/* Does an engine meet, in the GMEM of the copy, what lanes have stored, or what engines of other
 * blocks have, of which lanes have heard? */
static bool meets_stores(pm_gen *e, pm_opid op) {
  const pm_access_list *kernel = pm_accesses_inside(e->summaries, 0);
  pm_access own = pm_accesses(op);
  while (pm_next_access(e->g, &own) && own.where != PM_IN_GMEM) continue;
  const pm_val memory = pm_memory_of(e->g, own.view);
  for (uint32_t k = 0; k < kernel->all.n; k++) {
    const pm_access *a = &kernel->all.at[k];
    if (a->where != PM_IN_GMEM || !a->writes || pm_memory_of(e->g, a->view) != memory) continue;
    if (e->program->meets_blocks || pm_by_lanes(a)) return true;
  }
  return false;
}

static pm_code copy(pm_gen *e, pm_opid op, by_lane emit) {
  pm_copy_plan *p = PM_NEW(e->arena, pm_copy_plan, 1);
  PM_TRY(pm_plan_copy(e->g, op, e->target, p, e->err));
  if (p->engine == PM_ENGINE_PLAIN) return copy_by_lanes(e, op, p);
  if (!e->lane) return pm_gen_fail(e, op, PM_E_INTERNAL, "no lane was elected for it");
  pm_place(e, op);
  if (meets_stores(e, op)) pm_line(e, "fence_proxy_async_global();");
  return emit(e, op, p);
}

pm_code pm_cuda_COPY_G2S(pm_gen *e, pm_opid op) { return copy(e, op, load_by_lane); }
pm_code pm_cuda_COPY_S2G(pm_gen *e, pm_opid op) { return copy(e, op, store_by_lane); }

static void on_store_lanes(pm_gen *e, const char *call) {
  pm_line(e, "%s%s", e->lane ? "" : pm_str(e, "%s ", pm_store_lanes(e)), call);
}

pm_code pm_cuda_COMMIT_GROUP(pm_gen *e, pm_opid op) {
  pm_place(e, op);
  on_store_lanes(e, "bulk_group_commit();");
  return PM_OK;
}

static void prefetch_by_lanes(pm_gen *e, const pm_copy_plan *p) {
  if (p->gmem.reshaped && !pm_view_in_bounds(e->g, &p->gmem)) return;
  copy_chunks(e, p, PREFETCH_CHUNKS, 0);
}

pm_code pm_cuda_PREFETCH(pm_gen *e, pm_opid op) {
  pm_copy_plan *p = PM_NEW(e->arena, pm_copy_plan, 1);
  PM_TRY(pm_plan_copy(e->g, op, e->target, p, e->err));
  if (p->engine == PM_ENGINE_PLAIN) {
    pm_note(e, op, "async_prefetch by all lanes");
    prefetch_by_lanes(e, p);
    return PM_OK;
  }
  if (!e->lane) return pm_gen_fail(e, op, PM_E_INTERNAL, "no lane was elected for it");
  pm_place(e, op);
  if (p->engine == PM_ENGINE_TMA) {
    issue_tma(e, op, p, NULL);
  } else {
    pm_need_alignment(e, &p->gmem, 16);
    pm_line(e, "bulk_prefetch(%s, %lld);", pm_view_address(e, &p->gmem), (long long)p->bytes);
  }
  return PM_OK;
}

/* One lane arrives in the other block and says how many bytes all lanes bring. */
pm_code pm_cuda_ASYNC_STORE(pm_gen *e, pm_opid op) {
  const pm_val x = pm_in(e->g, op, 1);
  const pm_type *t = pm_typeof(e->g, x);
  const int64_t combine = *pm_attr(e->g, op, PM_ATTR_COMBINE);
  const long long bytes = pm_type_size(t) * pm_dtypes[t->dtype].bytes;
  barrier b;
  pm_view v;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 2), &b));
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, &v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  pm_note(e, op, "async_store_smem");
  const char *value = pm_at(e, x, "0"), *to = pm_unique(e, "barrier");
  pm_begin(e, "{");
  const char *peer = pm_view_peer(e, &v);
  pm_line(e, "const u32 %s = %s + %s;", to, b.address, peer);
  pm_line(e, "if (%s) mbarrier_arrive_expect_tx_cluster(%s, %lld);", pm_first_lane(e), to, bytes);
  e->async.barrier = to;
  e->async.combine = combine ? pm_async_combine(e, combine, t->dtype) : NULL;
  e->async.narrow = false;
  if (pm_is_array(e, x)) {
    pm_store_array(e, pm_value_layout(e->g, x), &v, e->slot[x].text, false);
  } else {
    pm_store_splat(e, &v, value);
  }
  e->async.barrier = e->async.combine = NULL;
  pm_end(e);
  if (!e->async.narrow) return PM_OK;
  return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                     "lanes would store less than 32 bits at once; give the "
                     "array a layout with neighbours in one lane, or use a wider dtype");
}

/* ---- order ------------------------------------------------------------------------------- */

/* Runs of one lane (lane.c) have no use for meetings. */
static void meet(pm_gen *e) {
  if (!e->lane) pm_line(e, "%s", pm_meet(e));
}

pm_code pm_cuda_WAIT_S2G(pm_gen *e, pm_opid op) {
  const long long n = *pm_attr(e->g, op, PM_ATTR_N);
  const char *read = *pm_attr(e->g, op, PM_ATTR_READ_ONLY) ? "_read" : "";
  pm_note(e, op, "wait_smem_to_gmem");
  on_store_lanes(e, pm_str(e, "bulk_group_wait%s<%lld>();", read, n));
  meet(e);
  return PM_OK;
}

pm_code pm_cuda_WAIT_CP_ASYNC(pm_gen *e, pm_opid op) {
  pm_note(e, op, "wait_gmem_to_smem");
  pm_line(e, "cp_async_wait<%lld>();", (long long)*pm_attr(e->g, op, PM_ATTR_N));
  meet(e);
  return PM_OK;
}

/* Do lanes store to shared memory of other blocks, where engines read it? */
static bool feeds_engines_of_others(pm_gen *e) {
  const pm_access_list *kernel = pm_accesses_inside(e->summaries, 0);
  for (uint32_t i = 0; i < kernel->all.n; i++) {
    const pm_access *a = &kernel->all.at[i];
    if (a->where != PM_IN_SMEM || !a->writes || a->scope != PM_CLUSTER || !pm_by_lanes(a)) continue;
    for (uint32_t k = 0; k < kernel->all.n; k++) {
      const pm_access *b = &kernel->all.at[k];
      if (b->where == PM_IN_SMEM && b->reads && !pm_by_lanes(b) &&
          pm_memory_of(e->g, b->view) == pm_memory_of(e->g, a->view))
        return true;
    }
  }
  return false;
}

/* Without TMA only generic accesses read what was written. */
pm_code pm_cuda_COMMIT_SMEM(pm_gen *e, pm_opid op) {
  pm_note(e, op, "commit_smem");
  if (pm_target_has(e->target, PM_HAS_TMA)) {
    pm_line(e, "fence_proxy_async%s();", feeds_engines_of_others(e) ? "_cluster" : "");
  }
  pm_line(e, "%s", pm_meet(e));
  return PM_OK;
}

pm_code pm_cuda_PROXY_FENCE(pm_gen *e, pm_opid op) {
  pm_place(e, op);
  pm_line(e, "fence_proxy_async();");
  return PM_OK;
}

pm_code pm_cuda_SYNC(pm_gen *e, pm_opid op) {
  pm_place(e, op);
  meet(e);
  return PM_OK;
}

/* ---- grids ------------------------------------------------------------------------------- */

pm_code pm_cuda_PDL_WAIT(pm_gen *e, pm_opid op) {
  pm_note(e, op, "griddepcontrol_wait");
  pm_line(e, "griddepcontrol_wait();");
  return PM_OK;
}

pm_code pm_cuda_PDL_LAUNCH(pm_gen *e, pm_opid op) {
  pm_note(e, op, "griddepcontrol_launch_dependents");
  pm_line(e, "griddepcontrol_launch_dependents();");
  return PM_OK;
}

/* One lane counts; the others read the number in scratch. The counters are those of the launch
 * before as well, whose end a dependent launch must have awaited. */
pm_code pm_cuda_NEXT_TILE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const long long n = *pm_attr(e->g, op, PM_ATTR_N);
  pm_note(e, op, "next_tile");
  const char *x = pm_declare(e, out, out);
  if (!e->lane) pm_begin(e, PM_ONE_LANE " {");
  if (e->program->pdl) pm_line(e, "griddepcontrol_wait();");
  pm_line(e, "%s = next_tile(&counters[%lld]);", x, n);
  if (e->lane) return PM_OK;
  pm_end_of_one_lane(e, x);
  return PM_OK;
}

const char *pm_taker(pm_gen *e, bool first_block) {
  const pm_graph *g = e->g;
  const char *of[3];
  uint32_t n = 0;
  pm_text t;
  pm_text_init(&t, e->arena);
  if (first_block && pm_blocks(g) > 1) of[n++] = "cluster_rank() == 0";
  if (g->n_threads > 1) of[n++] = pm_str(e, "wg == %u", g->n_threads - 1);
  if (!e->lane) of[n++] = "warp == 0 && elect_one()";
  for (uint32_t k = 0; k < n; k++) pm_putf(&t, "%s%s", k ? " && " : "if (", of[k]);
  return n ? pm_str(e, "%s)", t.at) : "";
}

static void begin_taker(pm_gen *e, bool first_block) {
  const char *condition = pm_taker(e, first_block);
  pm_begin(e, "%s%s{", condition, *condition ? " " : "");
}

/* Clusters of the launch have tiles by their number; what the counter says comes afterwards. */
static const char *after_first(pm_gen *e, pm_val taken) {
  const uint32_t x = e->program->cluster[0];
  const pm_opid def = pm_value_of(e->g, taken)->def;
  const bool bare = !def || pm_get(e->g, def)->code != PM_OP_FETCH_TILE;
  if (bare || !e->program->shares_grid) return pm_scalar_of(e, taken);
  return pm_str(e, x > 1 ? "%s + (i32)(gridDim.x / %u)" : "%s + (i32)gridDim.x",
                pm_scalar_of(e, taken), x);
}

/* The atomic's result is first used where the tile is handed on: until then nothing waits for it.
 * All points are taken from the start where the launch has a cluster for each. */
pm_code pm_cuda_FETCH_TILE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const long long n = *pm_attr(e->g, op, PM_ATTR_N);
  pm_note(e, op, "fetch_tile");
  if (!e->program->shares_grid) {
    const bool given = pm_get(e->g, op)->n_in;
    const char *next = given ? pm_scalar_of(e, pm_in(e->g, op, 0))
                             : pm_str(e, "%lld", (long long)pm_grid_size(e->g));
    pm_bind(e, out, next, PM_FORM_SCALAR);
    return PM_OK;
  }
  const char *x = pm_declare(e, out, out);
  begin_taker(e, true);
  if (e->program->pdl) pm_line(e, "griddepcontrol_wait();");
  pm_line(e, "%s = next_tile(&counters[%lld]);", x, n);
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_BROADCAST_TILE(pm_gen *e, pm_opid op) {
  const uint32_t blocks = pm_blocks(e->g);
  pm_view v;
  barrier b;
  PM_TRY(barrier_of(e, op, pm_in(e->g, op, 2), &b));
  if (pm_view_of(e->g, pm_in(e->g, op, 1), true, &v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  pm_note(e, op, "broadcast_tile");
  begin_taker(e, false);
  if (blocks > 1) {
    pm_line(e, "mbarrier_arrive_expect_tx(%s, 4);", b.address);
    pm_line(e, "for (u32 k = 0; k < %u && cluster_rank() == 0; k++)", blocks);
    pm_line(e, "  store_async(%s, %s, %s, k);", pm_view_address(e, &v),
            after_first(e, pm_in(e->g, op, 0)), b.address);
  } else {
    const char *x = pm_unique(e, "tile");
    pm_line(e, "const i32 %s = %s;", x, after_first(e, pm_in(e->g, op, 0)));
    pm_line(e, "st_shared<i32, 1>(%s, &%s);", pm_view_address(e, &v), x);
    pm_line(e, "mbarrier_arrive(%s);", b.address);
  }
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_SHUFFLE_TILE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out, in = pm_in(e->g, op, 0);
  pm_note(e, op, "shuffle_tile");
  if (!e->program->shares_grid) {
    pm_alias(e, out, in);
    return PM_OK;
  }
  const char *x = pm_declare(e, out, out);
  pm_begin(e, PM_ONE_LANE " {");
  pm_line(e, "%s = %s;", x, after_first(e, in));
  pm_end_of_one_lane(e, x);
  return PM_OK;
}

/* Named barriers: 0 is block_sync, then one for each thread's warpgroup_sync, then those of the
 * ordered section, then those that the kernel numbers itself. */
pm_code pm_cuda_ENTER_SECTION(pm_gen *e, pm_opid op) {
  pm_note(e, op, "enter_section");
  pm_print_meeting(e, op, "", "section_enter", pm_str(e, "%u + wg", e->g->n_threads + 1), "");
  return PM_OK;
}

pm_code pm_cuda_LEAVE_SECTION(pm_gen *e, pm_opid op) {
  const unsigned first = e->g->n_threads + 1;
  pm_note(e, op, "leave_section");
  pm_print_arrival(e, "", "section_leave",
                   pm_str(e, "wg + 1 < %u ? %u + wg : %u", e->n_section, first + 1, first), "");
  return PM_OK;
}

static pm_code named(pm_gen *e, pm_opid op, const char *fn, bool waits) {
  const pm_val which = pm_in(e->g, op, 0);
  const unsigned first = e->g->n_threads + 1 + e->n_section;
  pm_scalar number;
  pm_note(e, op, fn);
  const char *id = pm_constant(e->g, which, &number)
                       ? pm_str(e, "%lld", (long long)(first + number.i))
                       : pm_str(e, "%u + (u32)%s", first, pm_atom(e, pm_scalar_of(e, which)));
  const char *lanes = pm_str(e, "%lld", (long long)*pm_attr(e->g, op, PM_ATTR_N));
  if (waits) pm_print_meeting(e, op, "", fn, id, lanes);
  else pm_print_arrival(e, "", fn, id, lanes);
  return PM_OK;
}

pm_code pm_cuda_NAMED_SYNC(pm_gen *e, pm_opid op) {
  return named(e, op, "named_barrier_sync", true);
}
pm_code pm_cuda_NAMED_ARRIVE(pm_gen *e, pm_opid op) {
  return named(e, op, "named_barrier_arrive", false);
}

pm_code pm_cuda_SET_MAX_REGISTERS(pm_gen *e, pm_opid op) {
  pm_note(e, op, "set_max_registers");
  e->registers = *pm_attr(e->g, op, PM_ATTR_N);
  pm_line(e, "setmaxnreg_%s<%lld>();", *pm_attr(e->g, op, PM_ATTR_INCREASE) ? "inc" : "dec",
          (long long)e->registers);
  if (*pm_attr(e->g, op, PM_ATTR_PLACED)) {
    e->reads_again = true;
    pm_line(e, "read_again(wg, tid, warp, lane);");
  }
  return PM_OK;
}

/* ---- warps ------------------------------------------------------------------------------- */

/* A warp flips its own copies of phase bits. After the region all lanes get the flips of all
 * warps, through scratch. */
pm_code pm_cuda_WARP_MAP(pm_gen *e, pm_opid op) {
  const pm_blk region = pm_region(e->g, op, 0);
  bool *waited = PM_NEW(e->arena, bool, e->g->values.n);
  const char **before = PM_NEW(e->arena, const char *, e->g->values.n);
  const pm_access_list *inside = pm_accesses_inside(e->summaries, op);
  bool sees_tensor_core = false; /* some warp does, by a wait, and all know afterwards */
  for (uint32_t k = 0; k < inside->all.n; k++) {
    const pm_access *a = &inside->all.at[k];
    if (a->where != PM_IN_BARRIER || a->writes) continue;
    waited[pm_view_base(e->g, a->view)] = true;
    sees_tensor_core |= pm_orders_tensor_core(e->g, a->view);
  }
  pm_note(e, op, "warp_map");
  for (pm_val v = 1; v < e->g->values.n; v++) {
    if (!waited[v] || !e->phase[v]) continue;
    before[v] = pm_unique(e, "before");
    pm_line(e, "const u32 %s = %s;", before[v], e->phase[v]);
  }
  pm_begin(e, "{");
  e->warps = true;
  PM_TRY(pm_gen_block(e, region));
  e->warps = false;
  pm_end(e);
  pm_print_exit(e, &e->warp_exit);
  if (sees_tensor_core) {
    pm_line(e, "tcgen05_fence_before();");
    pm_line(e, PM_WARPGROUP_SYNC);
    pm_line(e, "tcgen05_fence_after();");
  }
  for (pm_val v = 1; v < e->g->values.n; v++) {
    if (!waited[v] || !e->phase[v]) continue;
    pm_begin(e, "{");
    pm_line(e, "u32 flips[4] = {%s ^ %s};", e->phase[v], before[v]);
    pm_line(e, PM_WARPGROUP_SYNC);
    pm_line(e, "if (lane == 0) st_shared<u32, 1>(%s + warp * 4, flips);", pm_scratch(e));
    pm_line(e, PM_WARPGROUP_SYNC);
    pm_line(e, "ld_shared<u32, 4>(flips, %s);", pm_scratch(e));
    pm_line(e, "%s = %s ^ (flips[0] | flips[1] | flips[2] | flips[3]);", e->phase[v], before[v]);
    pm_line(e, PM_WARPGROUP_SYNC);
    pm_end(e);
  }
  return PM_OK;
}
