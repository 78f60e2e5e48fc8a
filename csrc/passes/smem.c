/* The positions of everything in shared memory.
 *
 *   [remote allocations][others][private ones][scratch of reductions and conversions]
 *   [mbarriers, semaphores][events of the profiler]
 *
 * Allocations form a stack that follows the nesting of regions. An allocation takes the next
 * multiple of 1024 bytes, and the end of a region frees what was allocated in it. So consecutive
 * scopes overlap, nested scopes add up, and the deepest point determines the size. Buffers that
 * only one loop uses (passes/stage.c) are freed when the next such loop of the same block starts.
 * The groups of a union start at the same position; the next allocation follows the largest of
 * them. (In a kernel of several Pallas threads, all of them enter a collective scope together,
 * after a barrier of the block.)
 *
 * A private scope has a separate part for each thread, with a stack of its own. Memory that other
 * blocks of the cluster access has a separate stack, because a block that runs ahead may fill the
 * memory of a peer that is still in the previous scope. A union is there if one of its allocations
 * is. The stacks at the deepest point are kept
 * for the error message of a kernel that is too large.
 *
 * Scratch is as large as the op that needs most of it, once for each Pallas thread. Barriers and
 * semaphores never share memory: each allocation has its own, because their phase or value persists
 * when a scope is entered again. */
#include "passes.h"

enum { SMEM_ALIGN = 1024, SCRATCH_ALIGN = 16, BARRIER_BYTES = 8, SEMAPHORE_BYTES = 4 };

enum { OTHERS, REMOTE, OWN, N_STACKS }; /* OWN: private to each thread */

typedef PM_VEC(pm_opid) op_list;

/* Memory that only one loop uses, on the stack OTHERS; number 0: none. */
typedef struct stage {
  int64_t number, start, end;
} stage;

typedef struct plan {
  pm_graph *g;
  pm_err *err;
  pm_code code;
  int64_t top[N_STACKS], deepest[N_STACKS];
  int64_t most; /* of the sum of those that exist once for each block */
  struct {
    int64_t number, group; /* 0: no union is open */
    int64_t start[N_STACKS], end[N_STACKS];
  } overlay;
  stage stage;  /* of the current block */
  bool *remote; /* by value: an allocation on the stack REMOTE */
  PM_VEC(int64_t) remote_unions;
  int64_t barriers; /* bytes */
  int64_t scratch;  /* bytes of one Pallas thread */
  op_list live, live_at_deepest;
} plan;

static int64_t alloc_bytes(const pm_graph *g, pm_opid op) {
  const pm_type *t = pm_typeof(g, pm_get(g, op)->out);
  int64_t bytes = pm_dtypes[t->dtype].bytes;
  for (int k = 0; k < t->rank; k++) {
    if (__builtin_mul_overflow(bytes, t->dim[k], &bytes)) return INT64_MAX / 4;
  }
  return pm_min(bytes, INT64_MAX / 4);
}

/* Does the op allocate memory, rather than barriers or semaphores? */
static bool is_memory(const pm_graph *g, pm_opid op) { return pm_allocates(g, op, PM_SMEM); }

/* Does the op have a place in shared memory? */
static bool is_placed(const pm_graph *g, pm_opid op) {
  return pm_has_attr(g, op, PM_ATTR_OFFSET) && !pm_allocates(g, op, PM_TMEM);
}

/* Is the op in a private scope of a Pallas thread? */
static bool is_private(const pm_graph *g, pm_opid op) {
  for (pm_blk b = pm_get(g, op)->parent; g->blocks.at[b].parent; b = pm_get(g, op)->parent) {
    op = g->blocks.at[b].parent;
    if (pm_has_attr(g, op, PM_ATTR_COLLECTIVE)) return !*pm_attr(g, op, PM_ATTR_COLLECTIVE);
  }
  return false;
}

static void close_union(plan *p) {
  for (int r = 0; r < N_STACKS && p->overlay.number; r++) {
    p->top[r] = pm_max(p->top[r], p->overlay.end[r]);
  }
  p->overlay.number = 0;
}

/* The allocation starts at the top of its stack. */
static void enter_union(plan *p, pm_opid alloc) {
  uint32_t n;
  const int64_t *u = pm_attr_list(p->g, alloc, PM_ATTR_UNION, &n);
  if (!n || u[0] != p->overlay.number) close_union(p);
  if (!n) return;
  if (!p->overlay.number) {
    p->overlay.number = u[0];
    memcpy(p->overlay.start, p->top, sizeof p->top);
    memcpy(p->overlay.end, p->top, sizeof p->top);
  } else if (u[1] != p->overlay.group) {
    for (int r = 0; r < N_STACKS; r++) p->overlay.end[r] = pm_max(p->overlay.end[r], p->top[r]);
    memcpy(p->top, p->overlay.start, sizeof p->top);
  }
  p->overlay.group = u[1];
}

/* Private barriers and semaphores have a part for each thread in their first dim. */
static void refuse_own(plan *p, pm_opid op) {
  const bool memory = is_memory(p->g, op);
  const pm_type *t = pm_typeof(p->g, pm_get(p->g, op)->out);
  if (memory ? !p->remote[pm_get(p->g, op)->out] : t->rank && t->dim[0] == p->g->n_threads) return;
  p->code = pm_fail(
      p->err, PM_E_NOT_IMPLEMENTED,
      memory ? "SMEM that other blocks of the cluster reach must be allocated by all threads: pass "
               "the name of the thread axis as collective_axes to run_scoped"
             : "%s: in a scope of one thread the first dimension must be the %u threads",
      pm_op_name(pm_get(p->g, op)->code), p->g->n_threads);
  pm_err_op(p->err, p->g, op);
}

/* When another loop's memory starts, that of the previous loop is freed, if it is on top. */
static void enter_stage(plan *p, pm_opid alloc, int stack) {
  const int64_t number = stack == OTHERS ? *pm_attr(p->g, alloc, PM_ATTR_STAGE) : 0;
  if (!number || number == p->stage.number) return;
  if (p->stage.number && p->stage.end == p->top[OTHERS]) p->top[OTHERS] = p->stage.start;
  p->stage.number = number;
  p->stage.start = p->top[OTHERS];
}

static void place_alloc(plan *p, pm_opid op) {
  pm_graph *g = p->g;
  const bool own = g->n_threads > 1 && is_private(g, op);
  if (own) refuse_own(p, op);
  if (!is_memory(g, op)) {
    const pm_type *t = pm_typeof(g, pm_get(g, op)->out);
    const bool barrier = t->kind == PM_BARRIER;
    const int64_t n = pm_type_size(t);
    *pm_attr(g, op, PM_ATTR_OFFSET) = p->barriers;
    p->barriers += barrier ? n * BARRIER_BYTES : pm_round_up(n * SEMAPHORE_BYTES, BARRIER_BYTES);
    return;
  }
  const int r = own ? OWN : p->remote[pm_get(g, op)->out] ? REMOTE : OTHERS;
  enter_union(p, op);
  enter_stage(p, op, r);
  *pm_attr(g, op, PM_ATTR_OFFSET) = p->top[r];
  p->top[r] = pm_min(p->top[r] + pm_round_up(alloc_bytes(g, op), SMEM_ALIGN), INT64_MAX / 64);
  p->deepest[r] = pm_max(p->deepest[r], p->top[r]);
  if (p->stage.number == *pm_attr(g, op, PM_ATTR_STAGE)) p->stage.end = p->top[OTHERS];
  if (own) return;
  pm_vec_push(g->arena, &p->live, op);
  if (p->top[OTHERS] + p->top[REMOTE] > p->most) {
    p->most = p->top[OTHERS] + p->top[REMOTE];
    p->live_at_deepest.n = 0;
    for (uint32_t k = 0; k < p->live.n; k++) {
      pm_vec_push(g->arena, &p->live_at_deepest, p->live.at[k]);
    }
  }
}

/* The user limits the scratch of reductions. */
static void place_scratch(plan *p, pm_opid op) {
  const int64_t bytes = pm_op_scratch(p->g, op);
  const bool reduces = pm_ops[pm_get(p->g, op)->code].layout == PM_LAY_REDUCE;
  p->scratch = pm_max(p->scratch, bytes);
  if (!reduces || bytes <= p->g->reduction_scratch) return;
  p->code = pm_fail(p->err, PM_E_VALUE,
                    "Required reduction scratch size (%lld bytes) is larger than the available "
                    "scratch size (%lld bytes); raise CompilerParams(reduction_scratch_bytes=)",
                    (long long)bytes, (long long)p->g->reduction_scratch);
  pm_err_op(p->err, p->g, op);
}

static void place_block(plan *p, pm_blk block) {
  pm_graph *g = p->g;
  int64_t top[N_STACKS];
  const uint32_t live = p->live.n;
  memcpy(top, p->top, sizeof top);
  const stage outer = p->stage;
  p->stage = (stage){0};
  for (uint32_t k = 0; k < g->blocks.at[block].ops.n && !p->code; k++) {
    const pm_opid op = g->blocks.at[block].ops.at[k];
    if (!is_memory(g, op)) close_union(p);
    if (is_placed(g, op)) place_alloc(p, op);
    place_scratch(p, op);
    for (uint32_t r = 0; r < pm_get(g, op)->n_regions; r++) place_block(p, pm_region(g, op, r));
  }
  p->stage = outer;
  p->overlay.number = 0;
  memcpy(p->top, top, sizeof top);
  p->live.n = live;
}

static void find_remote(pm_graph *g, pm_opid op, void *ctx) {
  plan *p = ctx;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where == PM_IN_SMEM && a.scope == PM_CLUSTER) p->remote[pm_view_base(g, a.view)] = true;
  }
}

/* The number of the union that an allocation belongs to; 0: none. */
static int64_t union_of(const pm_graph *g, pm_opid op) {
  if (!is_memory(g, op)) return 0;
  uint32_t n;
  const int64_t *u = pm_attr_list(g, op, PM_ATTR_UNION, &n);
  return n ? u[0] : 0;
}

static void find_remote_union(pm_graph *g, pm_opid op, void *ctx) {
  plan *p = ctx;
  const int64_t number = union_of(g, op);
  if (number && p->remote[pm_get(g, op)->out]) pm_vec_push(g->arena, &p->remote_unions, number);
}

static void move_to_remote(pm_graph *g, pm_opid op, void *ctx) {
  plan *p = ctx;
  const int64_t number = union_of(g, op);
  for (uint32_t k = 0; number && k < p->remote_unions.n; k++) {
    if (p->remote_unions.at[k] == number) p->remote[pm_get(g, op)->out] = true;
  }
}

/* Offsets were relative to each part. */
static void move(pm_graph *g, pm_opid op, void *ctx) {
  const plan *p = ctx;
  const pm_op *o = pm_get(g, op);
  if (!is_placed(g, op)) return;
  int64_t *offset = pm_attr(g, op, PM_ATTR_OFFSET);
  if (!is_memory(g, op)) {
    *offset += g->scratch_offset + g->scratch_bytes;
  } else if (g->n_threads > 1 && is_private(g, op)) {
    *offset += p->deepest[OTHERS] + p->deepest[REMOTE];
    *pm_attr(g, op, PM_ATTR_APART) = p->deepest[OWN];
  } else if (!p->remote[o->out]) {
    *offset += p->deepest[REMOTE];
  }
}

static int64_t profile_bytes(const pm_graph *g) {
  return g->profile_words * 4 * pm_profile_traces(g);
}

static pm_code too_large(plan *p, int64_t limit) {
  enum { MAX_ROWS = 40 };
  pm_graph *g = p->g;
  pm_text t;
  pm_text_init(&t, g->arena);
  pm_putf(&t, "\n  %12s  %-24s %s\n", "bytes", "name", "shape and place");
  const uint32_t n = p->live_at_deepest.n;
  for (uint32_t k = 0; k < n && k < MAX_ROWS; k++) {
    const pm_opid op = p->live_at_deepest.at[k];
    const pm_value *v = pm_value_of(g, pm_get(g, op)->out);
    const char *name = v->name ? g->strings.at[v->name] : pm_printf(g->arena, "smem%u", k);
    pm_putf(&t, "  %12lld  %-24s %s at %s:%u\n", (long long)alloc_bytes(g, op), name,
            pm_type_text(g->arena, &v->type), g->strings.at[pm_get(g, op)->file],
            pm_get(g, op)->line);
  }
  if (n > MAX_ROWS) pm_putf(&t, "  ... and %u more\n", n - MAX_ROWS);
  if (p->deepest[OWN]) {
    pm_putf(&t,
            "  %12lld  (what %u threads have for themselves: operands of products, scopes without "
            "collective_axes)\n",
            (long long)(p->deepest[OWN] * g->n_threads), g->n_threads);
  }
  if (g->scratch_bytes) {
    pm_putf(&t, "  %12lld  (scratch of reductions and layout conversions)\n",
            (long long)g->scratch_bytes);
  }
  if (p->barriers) pm_putf(&t, "  %12lld  (barriers)\n", (long long)p->barriers);
  if (g->profile_words) {
    pm_putf(&t, "  %12lld  (profile_space: %u traces)\n", (long long)profile_bytes(g),
            pm_profile_traces(g));
  }
  pm_fail(
      p->err, PM_E_VALUE,
      "the kernel needs %lld bytes of SMEM, which exceeds available shared memory of %lld bytes a "
      "block on %s. At the deepest point these are live, each rounded up to %d bytes:%s",
      (long long)g->smem_bytes, (long long)limit, g->target->text, SMEM_ALIGN, t.at);
  if (n) pm_err_op(p->err, g, p->live_at_deepest.at[n - 1]);
  return PM_E_VALUE;
}

pm_code pm_plan_smem(pm_graph *g, const pm_target *t, pm_err *err) {
  plan p = {.g = g, .err = err, .remote = PM_NEW(g->arena, bool, g->values.n)};
  if (g->n_cluster) pm_walk(g, 1, find_remote, &p);
  pm_walk(g, 1, find_remote_union, &p);
  if (p.remote_unions.n) pm_walk(g, 1, move_to_remote, &p);
  place_block(&p, 1);
  if (p.code) return p.code;
  g->scratch_offset = p.deepest[OTHERS] + p.deepest[REMOTE] + p.deepest[OWN] * g->n_threads;
  g->scratch_bytes = pm_round_up(p.scratch, SCRATCH_ALIGN) * g->n_threads;
  g->smem_bytes = g->scratch_offset + g->scratch_bytes + p.barriers;
  if (g->profile_words) {
    g->profile_offset = pm_round_up(g->smem_bytes, BARRIER_BYTES);
    g->smem_bytes = g->profile_offset + profile_bytes(g);
  }
  if (g->smem_bytes > t->smem) return too_large(&p, t->smem);
  pm_walk(g, 1, move, &p);
  return PM_OK;
}
