/* Barriers between the 128 lanes of a Pallas thread, so that its ops appear sequential.
 *
 * One forward walk tracks how far the lanes may be apart:
 *   ORDERED  all lanes have passed a barrier and accessed no memory and no mbarrier since
 *   COPIES   the same, but asynchronous copies have been issued since
 *   APART    nothing is known
 * An array store needs ORDERED before it and a SYNC after it. The first copy of a sequence needs a
 * SYNC: other lanes may still read what it overwrites, or may still wait for the phase of an
 * mbarrier that the copy completes (its elected lane arrives for all). Nothing is assumed at the
 * start of a loop body.
 *
 * One lane performs an ARRIVE for all, so all lanes must have finished what precedes it: their
 * memory accesses (except of GMEM that nobody writes) and their waits. The ARRIVE needs a SYNC if
 * there were any since the last SYNC. A completed wgmma counts as a SYNC here: it runs once all
 * warps have issued it, so all lanes have passed the preceding waits, and it has read its operands.
 * If an ARRIVE is in a loop that accesses no memory, the SYNC for accesses before the loop is
 * placed before the loop.
 *
 * The SYNC can be avoided if the barrier counts WARPS, so that each warp arrives when its own lanes
 * are ready. This is done for barriers of one block on which no copy arrives.
 *
 * One lane also performs a SIGNAL or BROADCAST_TILE for all; these always need the SYNC. The lanes
 * synchronise after an AWAIT.
 *
 * An ARRIVE on a cluster barrier is RELAXED if asynchronous engines alone access the memory that
 * other blocks of the cluster can reach, because a release is expensive and would order nothing of
 * interest. That memory is the SMEM that a collective copy fills or that a CLUSTER_REF refers to,
 * the GMEM that the kernel both reads and writes, and the TMEM of a pair: a load or store of it is
 * ordered before the other block's products by a synchronisation of both blocks, which one of the
 * scope of a block is not (PTX ISA, memory consistency model, scopes). This is what AUTO means. An
 * ARRIVE that tells of something else (that the threads of its block have read a tile index) comes
 * here as RELEASE, and one whose program says that semaphores order that memory as RELAXED.
 *
 * All lanes perform a scalar store with the same value, so no SYNC is needed after it. But a late
 * lane must not read what an early lane has already stored, so a SYNC comes before it if the same
 * memory was accessed since the last SYNC.
 *
 * As long as a product is in flight the tensor cores read A from its registers. ptxas leaves those
 * alone until the wait, but not across the end of a loop, where the next iteration may overwrite
 * them: a WGMMA_WAIT at the end of the body waits for such products.
 *
 * Consecutive scopes share memory. If a copy by an engine overwrites what ordinary stores wrote, a
 * COMMIT_SMEM replaces the SYNC, since otherwise the stores might land last.
 *
 * Loads have the same problem. An issued load may wait in the queue of the load unit (for more than
 * a microsecond after scattered stores), while arrivals and barriers overtake it, and an engine's
 * copy does not wait in that queue. So a thread that loaded from SMEM that an engine fills executes
 * a proxy fence, which waits for its loads, before it signals anyone: at the SYNC before a copy or
 * an arrival (which becomes a COMMIT_SMEM), before a warp arrives, at other ops that synchronise
 * threads, before a WARP_MAP, and at the end of a scope (a PROXY_FENCE, which does not synchronise
 * the lanes).
 *
 * With no_auto_barriers the user is responsible for memory; only the order of waits and copies is
 * kept. */
#include "passes.h"

typedef enum state { APART, COPIES, ORDERED } state;

typedef struct touched {
  pm_val base, view;
} touched;

enum { MAX_OPEN = 64 };

/* Bytes of SMEM. */
typedef struct byte_ranges {
  struct {
    int64_t from, to;
  } at[MAX_OPEN];
  uint32_t n;
  bool all; /* there were too many */
} byte_ranges;

/* What the whole kernel accesses. */
typedef struct survey {
  uint8_t *reach;     /* by value: how the memory at the base of views is accessed */
  bool *copied;       /* by value: barrier allocations that copies arrive at */
  byte_ranges filled; /* by engines */
} survey;

typedef struct placer {
  pm_graph *g;
  pm_summaries *summaries;
  const survey *kernel;
  state at;
  byte_ranges unfenced; /* bytes that ordinary stores wrote, without a proxy fence since */
  byte_ranges loaded;   /* filled bytes that lanes loaded, without a proxy fence since */
  /* Accesses since the last SYNC that matter for scalar stores. */
  touched open[MAX_OPEN];
  uint32_t n_open;
  bool lost; /* there were too many: any memory may have been accessed */
  /* Since the last SYNC, for ARRIVE. */
  bool touched;     /* the lanes loaded or stored */
  bool waited;      /* they waited for a barrier, and no wgmma has synchronised them since */
  bool requested;   /* registers */
  int64_t n_wgmmas; /* issued since that wait */
} placer;

/* Memory that the lanes access when they come to the op, or that a product reads later. */
static bool is_direct(const pm_access *a) {
  return a->where & PM_IN_MEMORY &&
         (a->completion == PM_COMPLETES_NOW || a->completion == PM_COMPLETES_COMMIT);
}
static bool is_now(const pm_access *a) {
  return a->where & PM_IN_MEMORY && a->completion == PM_COMPLETES_NOW;
}

/* ---- accesses ----------------------------------------------------------------------------- */

/* The first allocation of the union that an allocation is part of; itself if it is in none. */
static pm_val union_of(const pm_graph *g, pm_val v) {
  const pm_opid alloc = pm_value_of(g, v)->def;
  uint32_t n;
  const int64_t *u = pm_attr_list(g, alloc, PM_ATTR_UNION, &n);
  const pm_block *b = &g->blocks.at[pm_get(g, alloc)->parent];
  for (uint32_t k = 0; n && k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (!pm_allocates(g, op, PM_SMEM)) continue;
    const int64_t *other = pm_attr_list(g, op, PM_ATTR_UNION, &n);
    if (n && other[0] == u[0]) return pm_get(g, op)->out;
    n = 2;
  }
  return v;
}

/* One representative value for all names of the same bytes. */
static pm_val base_of(const pm_graph *g, pm_val v) {
  v = pm_memory_of(g, v);
  return pm_view_smem(g, v) ? union_of(g, v) : v;
}

/* Are these static parts of one ref, without a common element? */
static bool disjoint(const pm_graph *g, pm_val x, pm_val y) {
  pm_opid a = pm_value_of(g, x)->def, b = pm_value_of(g, y)->def;
  if (pm_get(g, a)->code != PM_OP_INDEX || pm_get(g, b)->code != PM_OP_INDEX) return false;
  if (pm_in(g, a, 0) != pm_in(g, b, 0)) return false;
  uint32_t n, n_a, n_b;
  const int64_t *start_a = pm_attr_list(g, a, PM_ATTR_STARTS, &n);
  const int64_t *size_a = pm_attr_list(g, a, PM_ATTR_SIZES, &n);
  const int64_t *start_b = pm_attr_list(g, b, PM_ATTR_STARTS, &n);
  const int64_t *size_b = pm_attr_list(g, b, PM_ATTR_SIZES, &n);
  const int64_t *stride_a = pm_attr_list(g, a, PM_ATTR_STRIDES, &n_a);
  const int64_t *stride_b = pm_attr_list(g, b, PM_ATTR_STRIDES, &n_b);
  for (uint32_t k = 0; k < n; k++) {
    if (start_a[k] == PM_DYNAMIC || start_b[k] == PM_DYNAMIC) continue;
    const int64_t end_a = start_a[k] + pm_slice_extent(size_a[k], stride_a, n_a, k);
    const int64_t end_b = start_b[k] + pm_slice_extent(size_b[k], stride_b, n_b, k);
    if (end_a <= start_b[k] || end_b <= start_a[k]) return true;
  }
  return false;
}

static void note(placer *p, pm_val view) {
  if (p->n_open == MAX_OPEN) {
    p->lost = true;
  } else {
    p->open[p->n_open++] = (touched){base_of(p->g, view), view};
  }
}

static bool conflicts(const placer *p, pm_val view) {
  pm_val base = base_of(p->g, view);
  for (uint32_t k = 0; k < p->n_open; k++) {
    if (p->open[k].base == base && !disjoint(p->g, p->open[k].view, view)) return true;
  }
  return p->lost;
}

static void add_range(byte_ranges *d, int64_t from, int64_t to) {
  for (uint32_t k = 0; k < d->n; k++) {
    if (d->at[k].from <= from && to <= d->at[k].to) return;
  }
  if (d->n == MAX_OPEN) {
    d->all = true;
  } else {
    d->at[d->n].from = from;
    d->at[d->n++].to = to;
  }
}

static void add_ranges(byte_ranges *d, const byte_ranges *more) {
  d->all |= more->all;
  for (uint32_t k = 0; k < more->n; k++) add_range(d, more->at[k].from, more->at[k].to);
}

/* The allocation that a ref in SMEM is a part of; false: it is elsewhere. */
static bool bytes_of(const pm_graph *g, pm_val ref, int64_t *from, int64_t *to) {
  const pm_opid alloc = pm_view_smem(g, ref);
  if (!alloc) return false;
  const pm_type *t = pm_typeof(g, pm_get(g, alloc)->out);
  *from = *pm_attr(g, alloc, PM_ATTR_OFFSET);
  *to = *from + pm_type_size(t) * pm_dtypes[t->dtype].bytes;
  return true;
}

static bool in_warps(const pm_graph *g, pm_opid op) {
  while (op && !pm_maps_warps(pm_get(g, op)->code)) {
    op = g->blocks.at[pm_get(g, op)->parent].parent;
  }
  return op;
}

static bool overlap(const byte_ranges *d, int64_t from, int64_t to) {
  for (uint32_t k = 0; k < d->n; k++) {
    if (from < d->at[k].to && d->at[k].from < to) return true;
  }
  return d->all;
}

static void load_bytes(placer *p, pm_val ref) {
  int64_t from, to;
  if (bytes_of(p->g, ref, &from, &to) && overlap(&p->kernel->filled, from, to))
    add_range(&p->loaded, from, to);
}

static void store_bytes(placer *p, pm_val ref) {
  int64_t from, to;
  if (bytes_of(p->g, ref, &from, &to)) add_range(&p->unfenced, from, to);
}

static void clear(byte_ranges *d) {
  d->n = 0;
  d->all = false;
}

static bool is_empty(const byte_ranges *d) { return !d->n && !d->all; }

static void soil_by(placer *p, pm_opid op) {
  const pm_graph *g = p->g;
  const uint16_t effects = pm_ops[pm_get(g, op)->code].effects;
  if (effects & E_FENCE) {
    if (in_warps(g, op)) return; /* the other warps have not committed */
    if (effects & E_MEET) clear(&p->unfenced);
    clear(&p->loaded);
  }
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where != PM_IN_SMEM || !pm_by_lanes(&a)) continue;
    if (a.writes) store_bytes(p, a.view);
    if (a.reads) load_bytes(p, a.view);
  }
}

/* A thread's loads are complete when it tells others that it has come there: a fence is inserted
 * unless there is one. */
static void released(placer *p, pm_opid op) {
  const bool releases = pm_ops[pm_get(p->g, op)->code].effects & E_RELEASE;
  if (releases && !in_warps(p->g, op)) clear(&p->loaded);
}

/* An upper bound on what is unfenced and loaded after a block, without changing the block. */
static void soil_block(placer *p, pm_blk block) {
  const pm_block *b = &p->g->blocks.at[block];
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    const bool scope = pm_get(p->g, op)->code == PM_OP_SCOPE;
    if (pm_is_pure(pm_get(p->g, op)->code)) continue;
    soil_by(p, op);
    released(p, op);
    for (uint32_t r = 0; r < pm_get(p->g, op)->n_regions; r++) {
      const byte_ranges unfenced = p->unfenced, loaded = p->loaded;
      soil_block(p, pm_region(p->g, op, r));
      if (scope) {
        clear(&p->loaded);
        continue;
      }
      add_ranges(&p->unfenced, &unfenced);
      add_ranges(&p->loaded, &loaded);
    }
  }
}

/* Is a proxy fence needed between earlier accesses of the lanes and this copy? */
static bool overwrites_unfenced(const placer *p, pm_opid copy) {
  int64_t from, to;
  pm_access a = pm_accesses(copy);
  while (pm_next_access(p->g, &a)) {
    if (!a.writes || pm_by_lanes(&a) || !bytes_of(p->g, a.view, &from, &to)) continue;
    if (overlap(&p->unfenced, from, to) || overlap(&p->loaded, from, to)) return true;
  }
  return false;
}

/* ---- how memory is reached ---------------------------------------------------------------- */

enum { REMOTE = 1, READ = 2, WRITTEN = 4, GENERIC = 8 };

static void note_filled(survey *s, const pm_graph *g, const pm_access *a) {
  int64_t from, to;
  if (!a->writes || pm_by_lanes(a) || !bytes_of(g, a->view, &from, &to)) return;
  add_range(&s->filled, from, to);
}

static void note_reach(survey *s, const pm_graph *g, const pm_access *a) {
  uint8_t *how = &s->reach[base_of(g, a->view)];
  *how |= (a->reads ? READ : 0) | (a->writes ? WRITTEN : 0);
  *how |= (pm_by_lanes(a) ? GENERIC : 0) | (a->scope == PM_CLUSTER ? REMOTE : 0);
}

/* COPIED is a barrier at which more arrives than all lanes of a thread together: an engine, source
 * text, or a warp on behalf of its thread. BROADCAST_TILE is not among what an arrival must
 * release: the one that says that its number was read is a RELEASE. */
static void note_accesses(pm_graph *g, pm_opid op, void *ctx) {
  survey *s = ctx;
  const uint16_t code = pm_get(g, op)->code;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where == PM_IN_BARRIER && a.writes && (code != PM_OP_ARRIVE || in_warps(g, op)))
      s->copied[base_of(g, a.view)] = true;
    if (a.where & PM_IN_TMEM) note_reach(s, g, &a);
    if (!(a.where & PM_IN_MEMORY)) continue;
    note_filled(s, g, &a);
    if (code != PM_OP_BROADCAST_TILE) note_reach(s, g, &a);
  }
}

/* GMEM that nobody writes. */
static bool is_constant(const placer *p, pm_val view) {
  const pm_val base = base_of(p->g, view);
  return pm_typeof(p->g, base)->space == PM_GMEM && !(p->kernel->reach[base] & WRITTEN);
}

/* ---- placing ------------------------------------------------------------------------------ */

static void met(placer *p) {
  p->at = ORDERED;
  p->n_open = 0;
  p->lost = p->touched = p->waited = p->requested = false;
}

/* Insert before position *k of the block; *k continues to denote the same op. */
static void place_op(placer *p, pm_blk block, uint32_t *k, uint16_t code) {
  const pm_opid before = p->g->blocks.at[block].ops.at[*k];
  const pm_opid op = pm_insert(p->g, block, *k, code, NULL, 0, NULL, 0, NULL, 0, before);
  if (code == PM_OP_COMMIT_SMEM) *pm_attr(p->g, op, PM_ATTR_PLACED) = 1;
  soil_by(p, op);
  ++*k;
  met(p);
}

static void place(placer *p, pm_blk block, uint32_t *k) { place_op(p, block, k, PM_OP_SYNC); }

/* Before an op that signals others that the lanes have finished their loads. */
static void place_release(placer *p, pm_blk block, uint32_t *k) {
  place_op(p, block, k, is_empty(&p->loaded) ? PM_OP_SYNC : PM_OP_COMMIT_SMEM);
}

static void place_fence(placer *p, pm_blk block, uint32_t *k) {
  if (is_empty(&p->loaded)) return;
  const pm_opid op = p->g->blocks.at[block].ops.at[*k];
  soil_by(p, pm_insert(p->g, block, *k, PM_OP_PROXY_FENCE, NULL, 0, NULL, 0, NULL, 0, op));
  ++*k;
}

/* Do the lanes synchronise directly after position k anyway? */
static bool meets_next(const pm_graph *g, pm_blk block, uint32_t k) {
  const pm_block *b = &g->blocks.at[block];
  while (++k < b->ops.n) {
    const uint16_t code = pm_get(g, b->ops.at[k])->code;
    if (!pm_is_pure(code)) return pm_meets(code);
  }
  return false;
}

static void place_after(placer *p, pm_blk block, uint32_t *k) {
  pm_graph *g = p->g;
  pm_opid op = g->blocks.at[block].ops.at[*k];
  p->at = APART;
  if (meets_next(g, block, *k)) return;
  if (*k + 1 < g->blocks.at[block].ops.n) {
    pm_insert(g, block, *k + 1, PM_OP_SYNC, NULL, 0, NULL, 0, NULL, 0, op);
    ++*k;
  }
  met(p); /* at the end of the kernel nothing is left to be ordered */
}

/* One lane does an atomic for all elements, or each lane those that it has. */
static void visit_store(placer *p, pm_blk block, uint32_t *k, const pm_access *a) {
  const pm_graph *g = p->g;
  const bool one_lane = pm_ops[pm_get(g, a->op)->code].participants != PM_BY_EACH;
  const bool array = one_lane || pm_typeof(g, a->view)->rank > 0;
  const bool by_user = g->no_auto_barriers;
  if (!by_user && (array ? p->at != ORDERED : conflicts(p, a->view))) place(p, block, k);
  p->touched = true;
  if (by_user) return;
  if (array) {
    place_after(p, block, k);
    return;
  }
  note(p, a->view);
  p->at = APART;
}

/* At most n wgmmas are pending now. */
static void await_wgmma(placer *p, int64_t n) {
  if (n >= 0 && p->n_wgmmas > n) p->waited = false;
}

/* Does the op read memory of the block's threads, now? */
static bool reads_now(const placer *p, const pm_access *a) {
  return is_now(a) && a->reads && !is_constant(p, a->view);
}

static void visit_memory(placer *p, pm_opid op) {
  int64_t n;
  pm_access a = pm_accesses(op);
  while (pm_next_access(p->g, &a)) p->touched |= reads_now(p, &a);
  p->n_wgmmas += pm_ops[pm_get(p->g, op)->code].completion == PM_COMPLETES_COMMIT;
  if (pm_awaits_products(p->g, op, &n)) await_wgmma(p, n);
  if (p->g->no_auto_barriers) return;
  a = pm_accesses(op);
  while (pm_next_access(p->g, &a)) {
    if (is_direct(&a)) note(p, a.view);
  }
  p->at = APART;
}

static void visit_block(placer *p, pm_blk block);

/* Source text that may access its refs in any way. Without refs and barriers it is as any op on
 * registers. */
static void visit_inline(placer *p, pm_blk block, uint32_t *k) {
  const pm_graph *g = p->g;
  const pm_opid op = g->blocks.at[block].ops.at[*k];
  bool reaches = false;
  for (uint32_t i = 0; i < pm_get(g, op)->n_in; i++) {
    reaches |= pm_typeof(g, pm_in(g, op, i))->kind != PM_ARRAY;
  }
  if (!reaches) return;
  if (!g->no_auto_barriers && p->at != ORDERED) place(p, block, k);
  p->touched = p->waited = true;
  if (!g->no_auto_barriers) place_after(p, block, k);
}

static void note_regions(placer *p, pm_opid op) {
  const pm_access_list *inside = pm_accesses_inside(p->summaries, op);
  for (uint32_t k = 0; k < inside->all.n; k++) {
    if (is_direct(&inside->all.at[k])) note(p, inside->all.at[k].view);
  }
}

/* The allocation of the barrier of an ARRIVE, if warps may arrive there separately. */
static pm_opid warp_barrier(const placer *p, pm_opid arrive) {
  const pm_graph *g = p->g;
  uint32_t n;
  const pm_val base = base_of(g, pm_in(g, arrive, 0));
  const pm_opid alloc = pm_value_of(g, base)->def;
  pm_attr_list(g, alloc, PM_ATTR_CLUSTER, &n);
  return n || p->kernel->copied[base] ? 0 : alloc;
}

static void visit_arrive(placer *p, pm_blk block, uint32_t *k) {
  if (!p->touched && !p->waited && is_empty(&p->loaded)) return;
  const pm_opid alloc = warp_barrier(p, p->g->blocks.at[block].ops.at[*k]);
  if (alloc) {
    *pm_attr(p->g, alloc, PM_ATTR_WARPS) = 1;
    place_fence(p, block, k);
  } else {
    place_release(p, block, k);
  }
}

static void visit_wait(placer *p) {
  p->at = APART;
  p->waited = true;
  p->n_wgmmas = 0;
}

/* What ARRIVE must know of a loop. */
typedef struct summary {
  const placer *p;
  bool arrives, waits, touches;
} summary;

static void summarise(pm_graph *g, pm_opid op, void *ctx) {
  summary *s = ctx;
  const uint16_t code = pm_get(g, op)->code;
  s->arrives |= code == PM_OP_ARRIVE && !warp_barrier(s->p, op);
  s->touches |= pm_is_source(g, op);
}

/* Set the state to what is known at every start of the loop body; returns the state before. */
static placer enter_loop(placer *p, pm_blk block, uint32_t *k) {
  const pm_opid op = p->g->blocks.at[block].ops.at[*k];
  summary s = {.p = p};
  for (uint32_t r = 0; r < pm_get(p->g, op)->n_regions; r++) {
    pm_walk(p->g, pm_region(p->g, op, r), summarise, &s);
  }
  const pm_access_list *inside = pm_accesses_inside(p->summaries, op);
  for (uint32_t k = 0; k < inside->all.n; k++) {
    const pm_access *a = &inside->all.at[k];
    s.waits |= a->where == PM_IN_BARRIER && !a->writes;
    s.touches |= (is_now(a) && a->writes) || reads_now(p, a);
  }
  if (s.arrives && p->touched && !s.touches) place(p, block, k);
  const placer before = *p;
  p->touched |= s.touches;
  p->waited |= s.waits;
  p->n_wgmmas = 0;
  note_regions(p, op);
  return before;
}

static void visit_scope(placer *p, pm_opid op) {
  const pm_blk body = pm_region(p->g, op, 0);
  visit_block(p, body);
  uint32_t last = p->g->blocks.at[body].ops.n - 1; /* the yield */
  place_fence(p, body, &last);
  p->lost |= p->n_open > 0; /* its memory may be reused under another name */
}

/* A loop may run zero or more times, and one of several branches runs. Accesses only accumulate. */
static void visit_control(placer *p, pm_blk block, uint32_t *k) {
  pm_graph *g = p->g;
  pm_opid op = g->blocks.at[block].ops.at[*k];
  const bool loop = pm_is_loop(pm_get(g, op)->code);
  placer *before = PM_NEW(g->arena, placer, 1);
  placer after = {.at = ORDERED, .n_wgmmas = INT64_MAX};
  byte_ranges unfenced = {0}, loaded = {0};
  if (loop) {
    after = enter_loop(p, block, k);
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) {
      unfenced = p->unfenced;
      loaded = p->loaded;
      soil_block(p, pm_region(g, op, r));
      add_ranges(&p->unfenced, &unfenced);
      add_ranges(&p->loaded, &loaded);
    }
    unfenced = p->unfenced;
    loaded = p->loaded;
  }
  *before = *p;
  for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) {
    *p = *before;
    if (loop) p->at = APART;
    p->requested |= loop;
    visit_block(p, pm_region(g, op, r));
    after.at = p->at < after.at ? p->at : after.at;
    after.touched |= p->touched;
    after.waited |= p->waited;
    after.requested |= p->requested;
    after.n_wgmmas = pm_min(after.n_wgmmas, p->n_wgmmas);
    add_ranges(&unfenced, &p->unfenced);
    add_ranges(&loaded, &p->loaded);
  }
  *p = *before;
  p->unfenced = unfenced;
  p->loaded = loaded;
  if (!loop) note_regions(p, op);
  p->at = after.at;
  p->touched = after.touched;
  p->waited = after.waited;
  p->requested = after.requested;
  p->n_wgmmas = after.n_wgmmas;
}

/* All lanes synchronise before and after a WARP_MAP. */
static void visit_warps(placer *p, pm_blk block, uint32_t *k) {
  const bool by_user = p->g->no_auto_barriers;
  place_fence(p, block, k);
  clear(&p->loaded);
  if (!by_user && p->at != ORDERED) place(p, block, k);
  visit_control(p, block, k);
  if (!by_user) place_after(p, block, k);
}

/* Is there a COMMIT_SMEM before position k, with only pure ops in between? */
static bool is_committed(const pm_graph *g, pm_blk block, uint32_t k) {
  const pm_block *b = &g->blocks.at[block];
  while (k > 0 && pm_is_pure(pm_get(g, b->ops.at[k - 1])->code)) k--;
  const uint16_t code = k > 0 ? pm_get(g, b->ops.at[k - 1])->code : PM_OP_NONE;
  return (pm_ops[code].effects & (E_MEET | E_FENCE)) == (E_MEET | E_FENCE);
}

static void visit_copy(placer *p, pm_blk block, uint32_t *k) {
  const bool committed = is_committed(p->g, block, *k);
  if (!committed && overwrites_unfenced(p, p->g->blocks.at[block].ops.at[*k])) {
    place_op(p, block, k, PM_OP_COMMIT_SMEM);
  }
  if (p->at == APART) place(p, block, k);
  p->at = COPIES;
}

/* One lane tells others by a barrier or a semaphore what all lanes have done; at a named barrier
 * each lane speaks for itself. */
static void visit_release(placer *p, pm_blk block, uint32_t *k, bool one_lane) {
  const pm_opid op = p->g->blocks.at[block].ops.at[*k];
  if (pm_get(p->g, op)->code == PM_OP_ARRIVE) {
    visit_arrive(p, block, k);
  } else if (!one_lane) {
    place_fence(p, block, k);
  } else if (p->touched || p->waited || !is_empty(&p->loaded)) {
    place_release(p, block, k);
  }
}

static void visit_regions(placer *p, pm_blk block, uint32_t *k) {
  const pm_opid op = p->g->blocks.at[block].ops.at[*k];
  switch (pm_get(p->g, op)->code) {
    case PM_OP_SCOPE: visit_scope(p, op); break;
    case PM_OP_WARP_MAP: visit_warps(p, block, k); break;
    default: visit_control(p, block, k);
  }
}

/* All warps of a thread synchronise between two requests (PTX ISA, setmaxnreg). */
static void visit_request(placer *p, pm_blk block, uint32_t *k) {
  if (p->requested) place(p, block, k);
  p->requested = true;
}

static void visit_op(placer *p, pm_blk block, uint32_t *k) {
  const pm_graph *g = p->g;
  const pm_opid op = g->blocks.at[block].ops.at[*k];
  const uint16_t code = pm_get(g, op)->code, effects = pm_ops[code].effects;
  if (pm_is_pure(code)) return;
  pm_access a = pm_accesses(op), store = {.where = 0};
  int64_t n;
  bool direct = pm_awaits_products(g, op, &n), copies = false, waits = false, signals = false;
  while (pm_next_access(g, &a)) {
    if (is_now(&a) && a.writes) store = a;
    direct |= is_direct(&a);
    copies |= a.where & PM_IN_MEMORY && !is_direct(&a);
    waits |= a.where == PM_IN_BARRIER && !a.writes;
    signals |= a.where & (PM_IN_BARRIER | PM_IN_SEMAPHORE) && a.writes;
  }
  soil_by(p, op);
  if (pm_get(g, op)->n_regions) visit_regions(p, block, k);
  else if (pm_is_source(g, op)) visit_inline(p, block, k);
  else if (code == PM_OP_SET_MAX_REGISTERS) visit_request(p, block, k);
  else if (effects & E_RELEASE) visit_release(p, block, k, signals);
  else if (store.where) visit_store(p, block, k, &store);
  else if (copies) visit_copy(p, block, k);
  else if (direct) visit_memory(p, op);
  else if (waits) visit_wait(p);
  if (effects & E_MEET) met(p);
  released(p, op);
}

static void visit_block(placer *p, pm_blk block) {
  for (uint32_t k = 0; k < p->g->blocks.at[block].ops.n; k++) visit_op(p, block, &k);
}

/* ---- releases ----------------------------------------------------------------------------- */

/* Products that one block of a pair issues write to tensor memory of the other one. */
static bool is_of_pair(const pm_graph *g, pm_val v) {
  const pm_opid def = pm_value_of(g, v)->def;
  return def && pm_allocates(g, def, PM_TMEM) && *pm_attr(g, def, PM_ATTR_PAIR);
}

static bool needs_release(const pm_graph *g, pm_val v, uint8_t how) {
  const uint8_t space = pm_typeof(g, v)->space;
  if (space == PM_GMEM) return (how & READ) && (how & WRITTEN);
  if (space == PM_TMEM) return (how & GENERIC) && is_of_pair(g, v);
  return (how & REMOTE) && (how & GENERIC);
}

static void set_order(pm_graph *g, pm_opid op, void *ctx) {
  uint32_t n;
  if (pm_get(g, op)->code != PM_OP_ARRIVE) return;
  int64_t *order = pm_attr(g, op, PM_ATTR_ORDER);
  pm_attr_list(g, pm_value_of(g, base_of(g, pm_in(g, op, 0)))->def, PM_ATTR_CLUSTER, &n);
  if (!n) *order = PM_ORDER_AUTO;
  else if (*order == PM_ORDER_AUTO) *order = *(int64_t *)ctx;
}

static void order_arrivals(placer *p) {
  int64_t order = PM_ORDER_RELAXED;
  const uint8_t *reach = p->kernel->reach;
  for (pm_val v = 1; v < p->g->values.n; v++)
    if (needs_release(p->g, v, reach[v])) order = PM_ORDER_RELEASE;
  pm_walk(p->g, 1, set_order, &order);
}

/* ---- registers of products in flight ------------------------------------------------------ */

enum { NONE = -1 }; /* no product with A in registers is in flight */

/* The products begun for sure after the last one with A in registers that may be in flight. */
static int64_t since_last(const pm_graph *g, pm_blk block, int64_t since) {
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    const pm_op *o = pm_get(g, op);
    int64_t n;
    if (o->code == PM_OP_WGMMA) {
      const bool registers = pm_typeof(g, pm_in(g, op, 1))->kind == PM_ARRAY;
      if (registers || since != NONE) since = registers ? 0 : since + 1;
    } else if (pm_awaits_products(g, op, &n)) {
      if (n >= 0 && n <= since) since = NONE;
    } else if (o->code == PM_OP_SCOPE) {
      since = since_last(g, pm_region(g, op, 0), since);
    } else {
      const bool loop = pm_is_loop(o->code);                 /* waits for its own */
      for (uint32_t r = 0; r < o->n_regions && !loop; r++) { /* which may or may not run */
        const int64_t found = since_last(g, pm_region(g, op, r), since);
        if (found != NONE) since = since == NONE ? found : pm_min(since, found);
      }
    }
  }
  return since;
}

static void await_registers(pm_graph *g, pm_opid op, void *ctx) {
  (void)ctx;
  if (!pm_is_loop(pm_get(g, op)->code)) return;
  const pm_blk body = pm_region(g, op, pm_get(g, op)->n_regions - 1u);
  const int64_t n = since_last(g, body, NONE);
  const pm_attr_arg pending = {.id = PM_ATTR_N, .i = n};
  if (n == NONE) return;
  pm_insert(g, body, g->blocks.at[body].ops.n - 1, PM_OP_WGMMA_WAIT, NULL, 0, NULL, 0, &pending, 1,
            pm_terminator(g, body));
}

pm_code pm_place_syncs(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  (void)err;
  survey kernel = {.reach = PM_NEW(g->arena, uint8_t, g->values.n),
                   .copied = PM_NEW(g->arena, bool, g->values.n)};
  pm_walk(g, 1, note_accesses, &kernel);
  placer p = {.g = g, .at = ORDERED, .kernel = &kernel, .summaries = pm_new_summaries(g)};
  visit_block(&p, 1);
  order_arrivals(&p);
  pm_walk(g, 1, await_registers, NULL);
  g->stage = PM_SYNCED;
  return PM_OK;
}
